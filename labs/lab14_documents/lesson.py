"""Lab 14. Documents: packed sequences and windows, across ranks.

Question: documents are short and sequences are long, so documents are packed. No token may
attend to another document or, in a layer with a window, to its own far past. On one device
that is a mask. On P ranks no rank has all queries and all keys: who knows the mask, what is
sent, and how much does each rank compute? Trainers have silently dropped the mask there.

Idea: number the packed tokens 0 to s - 1. Their ids are small, so every rank reads all of them
and no mask is sent. Query i sees an unbroken run of keys, first[i] ... i. E ends a document:

    token             0  1  2  3  4  5  6  7  8
    id                a  b  E  E  c  d  e  f  E
    document          0  0  0  1  2  2  2  2  2
    position          0  1  2  0  0  1  2  3  4      the position id, in its document
    target            b  E  -  -  d  e  f  E  -      a document's last token has none
    first             0  0  0  3  4  4  4  4  4      of a layer that sees all of a document
    first, window 3   0  0  0  3  4  4  4  5  6      of a layer whose tokens see 3

All the rest follows from `first`. Any rank may hold any tokens:

    in order      little is sent, because a rank shares documents with its neighbours. But a
                  rank with one long document has more to do than one with many short ones
    by document   each is cut in 2P chunks, of which rank r has r and 2P - 1 - r (zigzag): all
                  ranks have the same to do, and need each other's keys
    by work       blocks of tokens, the most expensive first, to the rank with the least to do

Ulysses: an all-to-all brings a rank all tokens of some heads, and it computes as one device
does. It sends q, k, v, and gets the output back.

Ring: q stays, k and v go from rank to rank, a key no further than to the last rank with a query
that sees it. With tokens in order and a window of w, w - 1 keys go one rank on, whatever the
length. What comes is kept for the backward; gradients go back the way the keys came.

    python labs/lab14_documents/lesson.py --plot lab14.png  # checks and experiments
    python labs/lab14_documents/lesson.py --predict 100000  # first your guess; see the end
    python labs/grade.py start lab14                        # writes my_labs/lab14_documents.py

Sources: TRL's pull request 6843 and accelerate's 4177, which refuse what had been wrong. Llama 3,
arXiv 2407.21783, section 3.3.2. WLB-LLM, arXiv 2503.17924 (zigzag by document).
"""

import sys
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import AttentionInterface

IGNORE = -100  # the label of a token that has no target
TILE = 16  # queries that are multiplied by the same keys
ALONE = SimpleNamespace(rank=lambda: 0, size=lambda: 1)  # a group of one rank


# Copied from tp.py
def shard_range(n, rank, world):
    """[start, end): a rank's share of n things. The first n % world ranks have one more."""
    base, extra = divmod(n, world)
    return rank * base + min(rank, extra), (rank + 1) * base + min(rank + 1, extra)


# ---- The lesson 1: documents and the mask --------------------------------------------------------


def documents(ids, end):
    """(document, position) of packed ids (s,): each token's document, and its place in that.

    (s,) each, from 0. A document's last token is the id `end`; the last document may lack it.
    """
    # exercise: documents
    ends = ids == end
    document = ends.cumsum(0) - ends.long()
    starts = torch.cat([ends.new_ones(1), ends[:-1]])
    index = torch.arange(len(ids))
    return document, index - torch.where(starts, index, 0).cummax(0).values
    # end exercise


def targets(ids, end):
    """(s,): the id that each token of packed ids has to predict; IGNORE for a document's last."""
    # exercise: documents
    following = torch.cat([ids[1:], ids.new_full((1,), IGNORE)])
    return following.masked_fill(ids == end, IGNORE)
    # end exercise


def first_seen(position, window):
    """(s,): the first key that each token's query sees, as its number in the packed sequence.

    window: how many keys a query sees at most, its own included; None: all that its document has.
    """
    # exercise: mask
    back = position if window is None else position.clamp(max=window - 1)
    return torch.arange(len(position)) - back
    # end exercise


def visible(q_at, k_at, first):
    """(n, m) booleans: whether the query of token q_at[i] sees the key of token k_at[j].

    q_at (n,), k_at (m,): numbers in the packed sequence, in any order. first (s,): first_seen().
    """
    # exercise: mask
    return (k_at <= q_at[:, None]) & (k_at >= first[q_at, None])
    # end exercise


# ---- The lesson 2: who holds which tokens --------------------------------------------------------

# held: a list with the numbers (n,) of the tokens that each rank holds, ascending; at least one.


def in_order(length, world):
    """held, if the sequence is cut in P parts, in order."""
    return [torch.arange(*shard_range(length, rank, world)) for rank in range(world)]


def work(held, first):
    """[for each rank how many pairs of an own query and a key that this sees]: integers."""
    # exercise: work
    return [(at - first[at] + 1).sum().item() for at in held]
    # end exercise


def by_document(position, world):
    """held by zigzag in every document; position (s,) of documents().

    A document of n tokens begins with 2P chunks of n // 2P tokens; rank r takes chunks r and
    2P - 1 - r. The n % 2P tokens behind them are dealt to the ranks in turn, one by one: those of
    the first document to ranks 0, 1, ...; the next goes on where the one before has stopped.
    """
    # exercise: by_document
    starts = (position == 0).nonzero()[:, 0].tolist()
    held, turn = [[] for _ in range(world)], 0
    for start, end in pairwise([*starts, len(position)]):
        size, left = divmod(end - start, 2 * world)
        for chunk in range(2 * world):
            rank, at = min(chunk, 2 * world - 1 - chunk), start + chunk * size
            held[rank] += range(at, at + size)
        for token in range(end - left, end):
            held[turn % world].append(token)
            turn += 1
    return [torch.tensor(tokens) for tokens in held]
    # end exercise


def by_work(first, world, size):
    """held by dealing out blocks of `size` tokens (the last may be shorter), most pairs first.

    Of the ranks with room each goes to the one with the fewest pairs so far; a rank takes at
    most ceil(blocks / P). Of equals the lower number comes first. There are P blocks at least.
    """
    # exercise: by_work
    blocks = torch.arange(len(first)).split(size)
    pairs = [(block - first[block] + 1).sum().item() for block in blocks]
    room = -(-len(blocks) // world)
    taken, total = [[] for _ in range(world)], [0] * world
    for block in sorted(range(len(blocks)), key=pairs.__getitem__, reverse=True):
        rank = min((r for r in range(world) if len(taken[r]) < room), key=total.__getitem__)
        taken[rank].append(block)
        total[rank] += pairs[block]
    return [torch.cat([blocks[block] for block in sorted(mine)]) for mine in taken]
    # end exercise


# ---- The lesson 3: attention over some of the keys -----------------------------------------------

# Shapes: q, out (kv, g, n, d): g query heads read each of kv KV heads; k, v (kv, m, d).
# q has been multiplied by 1 / sqrt(d). One packed sequence: there is no batch.


def tiles(q_at, k_at, first):
    """Yield slices (rows, keys) of q_at (n,) and k_at (m,), both ascending: TILE queries at a time.

    keys: the shortest slice that has every key seen by at least one of these queries. If they
    see none of the keys, nothing is yielded.
    """
    for start in range(0, len(q_at), TILE):
        rows = slice(start, start + TILE)
        # exercise: tiles
        seen = visible(q_at[rows], k_at, first).any(0).nonzero()[:, 0].tolist()
        if seen:
            yield rows, slice(seen[0], seen[-1] + 1)
        # end exercise


def scores(q, k, q_at, k_at, first):
    """(kv, g, n, m): q k, minus infinity where the query does not see the key."""
    return (q @ k.mT[:, None]).masked_fill(~visible(q_at, k_at, first), -torch.inf)


def attend(q, k, v, q_at, k_at, first):
    """Attention over these keys alone: (out, lse), as in lab 7; 0, -inf where none is seen."""
    out, lse = torch.zeros_like(q), q.new_full(q.shape[:-1], -torch.inf)
    for rows, keys in tiles(q_at, k_at, first):
        s = scores(q[..., rows, :], k[:, keys], q_at[rows], k_at[keys], first)
        lse[..., rows] = s.logsumexp(-1)
        finite = lse[..., rows, None].clamp(min=torch.finfo(s.dtype).min)
        out[..., rows, :] = (s - finite).exp() @ v[:, None, keys]
    return out, lse


def merge(out1, lse1, out2, lse2):
    """Attention over two sets of keys together, from that over each: (out, lse)."""
    lse = torch.logaddexp(lse1, lse2)
    finite = lse.clamp(min=torch.finfo(lse.dtype).min)
    return (lse1 - finite).exp()[..., None] * out1 + (lse2 - finite).exp()[..., None] * out2, lse


def attend_backward(q, k, v, dout, lse, delta, q_at, k_at, first):
    """What these queries and keys add to (dq, dk, dv); lse, delta: of the whole attention."""
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for rows, keys in tiles(q_at, k_at, first):
        q_tile, do_tile = q[..., rows, :], dout[..., rows, :]
        s = scores(q_tile, k[:, keys], q_at[rows], k_at[keys], first)
        p = (s - lse[..., rows, None]).exp()
        ds = p * (do_tile @ v.mT[:, None, :, keys] - delta[..., rows, None])
        dq[..., rows, :] = ds @ k[:, None, keys]
        dk[:, keys] += (ds.mT @ q_tile).sum(1)
        dv[:, keys] += (p.mT @ do_tile).sum(1)
    return dq, dk, dv


# ---- The lesson 4: a ring that stops early -------------------------------------------------------


def travels(held, source, step, first):
    """The tokens (m,) of rank `source` whose keys come to rank (source + step) mod P, ascending.

    Step 0: all that `source` holds. Then those that a query of that rank or of one further on
    sees: of ranks source + step, ..., source + P - 1 (mod P). Step P: none.
    """
    # exercise: travels
    keys, P = held[source], len(held)
    needed = torch.zeros(len(keys), dtype=torch.bool)
    for other in range(step, P):
        needed |= visible(held[(source + other) % P], keys, first).any(0)
    return keys[needed]
    # end exercise


def pass_on(x, length, by, group):
    """Begin to send x (.., n, d) to the next rank (by 1) or the previous one (by -1), as in lab 7.

    Returns a function that waits for and returns the other neighbour's x (.., length, d).
    """
    ahead, behind = ((group.rank() + shift) % group.size() for shift in (by, -by))
    arriving, messages = x.new_empty(*x.shape[:-2], length, x.shape[-1]), []
    if x.shape[-2]:
        messages.append(dist.P2POp(dist.isend, x.contiguous(), group=group, group_peer=ahead))
    if length:
        messages.append(dist.P2POp(dist.irecv, arriving, group=group, group_peer=behind))
    under_way = dist.batch_isend_irecv(messages) if messages else []

    def wait():
        for message in under_way:
            message.wait()
        return arriving

    return wait


def ring_forward(q, k, v, held, first, group):
    """This rank's queries attend to the keys of all ranks: (out, lse, kept).

    In step t it has k and v of travels(held, rank - t, t, first), as one (2, kv, m, d).
    pass_on() sends those that travel further while the rank computes. kept: all P such pairs.
    """
    rank, P = group.rank(), group.size()
    out, lse, kept = torch.zeros_like(q), q.new_full(q.shape[:-1], -torch.inf), []
    # exercise: ring_forward
    kv, at = torch.stack([k, v]), held[rank]
    for step in range(P):
        going = travels(held, (rank - step) % P, step + 1, first)
        coming = travels(held, (rank - step - 1) % P, step + 1, first)
        arriving = pass_on(kv[:, :, torch.isin(at, going)], len(coming), 1, group)
        out, lse = merge(out, lse, *attend(q, *kv, held[rank], at, first))
        kept.append(kv)
        kv, at = arriving(), coming
    return out, lse, kept
    # end exercise


def ring_backward(q, kept, out, lse, dout, held, first, group):
    """(dq, dk, dv) of own tokens; out, lse, kept: ring_forward()'s; dout: out's gradient.

    From the last step to the first. The gradient of a step's keys, (2, kv, m, d), is this
    rank's part plus what the next rank sends back for keys that went there: compute, then wait
    for that. The sum goes to the previous rank, where the keys came from; step 0's stays.
    """
    rank, P = group.rank(), group.size()
    dq, delta = torch.zeros_like(q), (dout * out).sum(-1)
    # exercise: ring_backward
    returning = None
    for step in reversed(range(P)):
        source = (rank - step) % P
        at, went = (travels(held, source, t, first) for t in (step, step + 1))
        mine, *parts = attend_backward(q, *kept[step], dout, lse, delta, held[rank], at, first)
        dq, dkv = dq + mine, torch.stack(parts)
        if returning:
            dkv[:, :, torch.isin(at, went)] += returning()
        if step:
            back = travels(held, (source + 1) % P, step, first)
            returning = pass_on(dkv, len(back), -1, group)
    return dq, *dkv
    # end exercise


class RingAttention(torch.autograd.Function):
    """apply(q, k, v, held, first, group): own queries attend to the keys of all ranks; out."""

    @staticmethod
    def forward(ctx, q, k, v, *where):
        out, lse, kept = ring_forward(q, k, v, *where)
        ctx.save_for_backward(q, out, lse, *kept)
        ctx.where = where
        return out

    @staticmethod
    def backward(ctx, dout):
        q, out, lse, *kept = ctx.saved_tensors
        return *ring_backward(q, kept, out, lse, dout, *ctx.where), None, None, None


# ---- The lesson 5: Ulysses -----------------------------------------------------------------------


class AllToAll(torch.autograd.Function):
    """Rows to other ranks: sends[r] rows of x (n, c) go to rank r, receives[r] come from there."""

    @staticmethod
    def forward(ctx, x, sends, receives, group):
        ctx.sizes, ctx.group = (receives, sends), group
        out = x.new_empty(sum(receives), x.shape[1])
        dist.all_to_all_single(out, x.contiguous(), receives, sends, group=group)
        return out

    @staticmethod
    def backward(ctx, grad):
        return AllToAll.apply(grad, *ctx.sizes, ctx.group), None, None, None


def to_heads(x, held, group):
    """All KV heads of own tokens x (kv, n, c) -> own heads of all tokens (own, s, c), in order.

    Rank r's KV heads are shard_range(kv, r, P), its tokens held[r]. One all-to-all, of rows of c
    numbers.
    """
    rank, P = group.rank(), group.size()
    # exercise: ulysses
    heads = [end - start for start, end in (shard_range(len(x), r, P) for r in range(P))]
    sends = [count * x.shape[1] for count in heads]
    receives = [heads[rank] * len(at) for at in held]
    rows = AllToAll.apply(x.flatten(0, 1), sends, receives, group)
    parts = [part.view(heads[rank], -1, x.shape[2]) for part in rows.split(receives)]
    return torch.cat(parts, 1)[:, torch.cat(held).argsort()]
    # end exercise


def to_tokens(x, kv, held, group):
    """Own heads of all tokens x (own, s, c), in order -> all kv heads of own tokens (kv, n, c)."""
    rank, P = group.rank(), group.size()
    # exercise: ulysses
    heads = [end - start for start, end in (shard_range(kv, r, P) for r in range(P))]
    sends = [len(x) * len(at) for at in held]
    receives = [count * len(held[rank]) for count in heads]
    rows = torch.cat([x[:, at].flatten(0, 1) for at in held])
    rows = AllToAll.apply(rows, sends, receives, group)
    return rows.view(kv, -1, x.shape[2])
    # end exercise


def ulysses_attention(q, k, v, held, first, group):
    """As RingAttention.apply: own heads attend to all tokens, as on one device. P <= kv."""
    kv, g, _, d = q.shape
    together = torch.cat([q.transpose(1, 2).flatten(2), k, v], -1)  # (kv, n, (g + 2) d)
    q, k, v = to_heads(together, held, group).split([g * d, d, d], -1)  # (own, s, ..)
    q, every = q.unflatten(2, (g, d)).transpose(1, 2), torch.arange(len(first))
    out = RingAttention.apply(q, k, v, [every], first, ALONE)  # (own, g, s, d)
    out = to_tokens(out.transpose(1, 2).flatten(2), kv, held, group)
    return out.unflatten(2, (g, d)).transpose(1, 2)


def message_bytes(held, first, rank, kv, g, d, itemsize):
    """(ring, Ulysses): bytes of a rank's messages in a forward and its backward of one attention.

    kv KV heads of d numbers, `itemsize` bytes each, g query heads for each. An all-to-all's
    message is all of its input, even what stays.
    """
    P = len(held)
    # exercise: bytes
    tokens = 0
    for step in range(1, P):
        for source in rank - step + 1, rank - step:  # k and v go forward, their gradients back
            tokens += len(travels(held, source % P, step, first))
    start, end = shard_range(kv, rank, P)
    rows = kv * len(held[rank]) + (end - start) * len(first)
    return tokens * 2 * kv * d * itemsize, rows * (2 * g + 2) * d * itemsize
    # end exercise


# ---- The lesson 6: the loss, and a step ----------------------------------------------------------


def mean_loss(logits, labels, group):
    """This rank's part of the mean loss over all ranks' targets: the parts add up to it.

    logits (n, v), labels (n,), IGNORE where a token has no target: a rank may have none at
    all. One all-reduce, of one number. The result is 0 if no rank has a target.
    """
    # exercise: loss
    count = (labels != IGNORE).sum()
    dist.all_reduce(count, group=group)
    return F.cross_entropy(logits, labels, reduction="sum") / count.clamp(min=1)
    # end exercise


def attention_of(way, position, held, group, module, q, k, v, mask, scaling, **others):
    """Hugging Face's interface: q (1, heads, n, d), k, v (1, kv, n, d) -> (1, n, heads, d)."""
    first = first_seen(position, others.get("sliding_window"))
    q = (scaling * q[0]).unflatten(0, (k.shape[1], -1))
    out = way(q, k[0], v[0], held, first, group)
    return out.flatten(0, 1).transpose(0, 1)[None], None


def train_step(model, ids, end, way, held, group):
    """The mean loss over all targets of packed ids (s,); sets each .grad to its gradient.

    This rank computes its tokens. way: RingAttention.apply or ulysses_attention.
    """
    own, (_, position) = held[group.rank()], documents(ids, end)
    AttentionInterface.register("documents", partial(attention_of, way, position, held, group))
    model.set_attn_implementation("documents")  # HF makes no mask for what it does not know
    given = {"input_ids": ids[own][None], "position_ids": position[own][None]}
    logits = model(**given, use_cache=False).logits[0]
    loss = mean_loss(logits, targets(ids, end)[own], group)
    loss.backward()
    total = loss.detach().clone()
    for x in total, *(parameter.grad for parameter in model.parameters()):
        dist.all_reduce(x, group=group)
    return total


if __name__ == "__main__":  # the lab's checks and experiments, of labs/ and of my_labs/
    sys.path[:0] = [str(folder) for folder in Path(__file__).resolve().parents[1:3]]
    from labs.kit.run import main

    sys.exit(main(__file__))
