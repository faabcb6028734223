"""Lab 7: Ring attention. One sequence, sharded over P ranks, goes through one softmax.

A sequence is too long for one device. Everything in a transformer but attention works token by
token, so each rank takes s/P tokens (context parallelism, CP). But a query needs the keys and
values of all tokens before it. How does it see them, if no rank may hold them all? The queries
stay; the keys and values travel round a ring. P = 3:

              rank 0        rank 1        rank 2
    step 0    q0 x kv0      q1 x kv1      q2 x kv2      meanwhile each kv travels to rank + 1
    step 1    q0 x kv2      q1 x kv0      q2 x kv1      and again
    step 2    q0 x kv1      q1 x kv2      q2 x kv0      every query has met every key

One step gives the attention over a part of the keys: out (.., n, d), a mean of their values, and
lse (.., n), the log of the sum of exp(score) that the mean was divided by. Two such parts make the
whole (online softmax):

    lse = log(exp(lse1) + exp(lse2))        out = exp(lse1 - lse) out1 + exp(lse2 - lse) out2

The backward goes round once more. Given the final lse, exp(score - lse) is the whole softmax's
probability from the first step on, so the parts' gradients are simply added. kv0's gradient
travels with kv0: each rank adds its queries' part, and one last send brings it home.

Causal attention makes the ring uneven. q0 may not see kv1 or kv2: with tokens in order, rank 0
idles while rank 2 works, and a ring is as slow as its busiest rank. Zigzag cuts 2P chunks;
rank r holds chunks r and 2P - 1 - r:

    chunk         0  1  2  3  4  5        rank 0 holds the least and the most expensive queries,
    contiguous    0  0  1  1  2  2        rank 2 two middle ones: all ranks have the same to do,
    zigzag        0  1  2  2  1  0        not only in sum but in every step

Cost, with KV = 2 b (s/P) kv_heads d numbers: forward P - 1 sends of KV; backward P - 1 sends of KV
and P of its gradient. All but the last travel while the rank computes. Heads are not cut, so P
may exceed their number.

    python labs/lab7_ring_attention/lesson.py                  # checks and experiments
    python labs/lab7_ring_attention/lesson.py --plot lab7.png --json lab7.json
    python labs/lab7_ring_attention/lesson.py --predict 65536  # first your guess; see the end
    python labs/lab7_ring_attention/lesson.py --inject-bug list
    python labs/lab7_ring_attention/lesson.py --length 1003    # no number has to divide another
    python labs/grade.py start lab7                   # writes my_labs/lab7_ring_attention.py

Sources: Ring Attention, arXiv 2310.01889; online softmax and lse, FlashAttention-2, 2307.08691;
uneven causal rings, Striped Attention, 2311.09431; all-gather instead of a ring, Llama 3,
2407.21783 section 3.3.2. Zigzag: zhuzilin/ring-flash-attention,
ring_flash_attn/zigzag_ring_flash_attn.py. Megatron-LM deals the chunks in
get_batch_on_this_cp_rank; megatron/core/extensions/transformer_engine.py hands the ring to
Transformer Engine's context_parallel.py. Nanotron: src/nanotron/nn/ring_attention.py,
llama3_ring_attention.py. NeMo AutoModel: components/distributed/context_parallel/. DeepSpeed has
Ulysses: deepspeed/sequence/layer.py.
"""

import math
import sys
from pathlib import Path

import torch
import torch.distributed as dist

CONTIGUOUS, ZIGZAG = "contiguous", "zigzag"
TILE = 32  # queries that are multiplied by the same keys

# --------------------------------------------------------------------------------------------------
# The lesson 1: who holds which tokens
# --------------------------------------------------------------------------------------------------


# Copied from tp.py
def shard_range(n, rank, world):
    """[start, end): a rank's share of n things. The first n % world ranks have one more."""
    base, extra = divmod(n, world)
    return rank * base + min(rank, extra), (rank + 1) * base + min(rank + 1, extra)


def positions(length, rank, world, placement):
    """The positions (n,) of the tokens that a rank holds, ascending, as position ids.

    CONTIGUOUS: shard_range(length, rank, world). ZIGZAG: shard_range() makes 2 * world chunks, of
    which it holds number rank and number 2 * world - 1 - rank. Nothing is padded: ranks may differ
    by one token.
    """
    # exercise: positions
    if placement == CONTIGUOUS:
        return torch.arange(*shard_range(length, rank, world))
    early = torch.arange(*shard_range(length, rank, 2 * world))
    late = torch.arange(*shard_range(length, 2 * world - 1 - rank, 2 * world))
    return torch.cat([early, late])
    # end exercise


def work(length, world, placement):
    """A (P, P) tensor of integers: [r, t] is how many (query, key) pairs rank r has in step t.

    In step t rank r has the keys of rank (r - t) mod P. A query at position i sees the keys up to
    i, its own included.
    """
    held = [positions(length, rank, world, placement) for rank in range(world)]
    # exercise: work
    pairs = torch.zeros(world, world, dtype=torch.long)
    for rank in range(world):
        for step in range(world):
            keys = held[(rank - step) % world]
            pairs[rank, step] = torch.searchsorted(keys, held[rank], right=True).sum()
    return pairs
    # end exercise


# --------------------------------------------------------------------------------------------------
# The lesson 2: attention over a part of the keys
# --------------------------------------------------------------------------------------------------

# Shapes: q and out (b, kv, g, n, d), because g query heads read each of kv KV heads; k and v
# (b, kv, m, d). q_pos (n,) and k_pos (m,) are their positions, ascending.


def tiles(q_pos, k_pos):
    """Slices (rows, keys): TILE queries at a time, and the keys that the last of them sees.

    All of these queries precede the other keys. So FlashAttention skips half of the work.
    """
    for start in range(0, len(q_pos), TILE):
        rows = slice(start, start + TILE)
        seen = int(torch.searchsorted(k_pos, q_pos[rows][-1], right=True))
        if seen:
            yield rows, slice(0, seen)


def scores(q, k, q_pos, k_pos):
    """(b, kv, g, n, m): q k / sqrt(d), minus infinity where the key is in the query's future."""
    s = q @ k.mT[:, :, None] / math.sqrt(q.shape[-1])
    return s.masked_fill(k_pos > q_pos[:, None], -torch.inf)


def attend(q, k, v, q_pos, k_pos):
    """Attention over these keys alone: out like q, lse (b, kv, g, n), log of summed exp(scores).

    A query that sees none of the keys has out 0 and lse minus infinity. From a tile's scores()
    write out[..., rows, :] and lse[..., rows]; other tiles stay as they are.
    """
    out, lse = torch.zeros_like(q), q.new_full(q.shape[:-1], -torch.inf)
    for rows, keys in tiles(q_pos, k_pos):
        # exercise: attend
        # (b, kv, g, tile, m)
        s = scores(q[..., rows, :], k[..., keys, :], q_pos[rows], k_pos[keys])
        lse[..., rows] = s.logsumexp(-1)
        # inf - inf would be no number
        finite = lse[..., rows, None].clamp(min=torch.finfo(s.dtype).min)
        out[..., rows, :] = (s - finite).exp() @ v[:, :, None, keys]
        # end exercise
    return out, lse


def merge(out1, lse1, out2, lse2):
    """Attention over two sets of keys together, from that over each: (out, lse), new tensors.

    exp(lse) itself would overflow. Where neither set had a key to see, out is 0 and lse minus
    infinity.
    """
    # exercise: merge
    lse = torch.logaddexp(lse1, lse2)
    finite = lse.clamp(min=torch.finfo(lse.dtype).min)
    out = (lse1 - finite).exp()[..., None] * out1 + (lse2 - finite).exp()[..., None] * out2
    return out, lse
    # end exercise


def attend_backward(q, k, v, dout, lse, delta, q_pos, k_pos):
    """(dq, dk, dv): the part of dq from these keys, and of dk and dv from these queries.

    lse and delta = sum of dout * out (b, kv, g, n) are those of the whole attention, over all keys.
    With p = exp(scores - lse):   dv = p^T dout,   ds = p (dout v^T - delta),   dq = ds k / sqrt(d),
    dk = ds^T q / sqrt(d), and a KV head sums over the g heads that read it. Each query is in one
    tile: write dq[..., rows, :]; a key is in many: add to dk[..., keys, :] and dv[..., keys, :].
    """
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for rows, keys in tiles(q_pos, k_pos):
        q_tile, do_tile = q[..., rows, :], dout[..., rows, :]
        k_seen, v_seen = k[..., keys, :], v[..., keys, :]
        # exercise: attend_backward
        p = (scores(q_tile, k_seen, q_pos[rows], k_pos[keys]) - lse[..., rows, None]).exp()
        ds = p * (do_tile @ v_seen.mT[:, :, None] - delta[..., rows, None]) / math.sqrt(q.shape[-1])
        dq[..., rows, :] = ds @ k_seen[:, :, None]
        dk[..., keys, :] += (ds.mT @ q_tile).sum(2)
        dv[..., keys, :] += (p.mT @ do_tile).sum(2)
        # end exercise
    return dq, dk, dv


# --------------------------------------------------------------------------------------------------
# The lesson 3: the ring
# --------------------------------------------------------------------------------------------------


def pass_on(x, length, group):
    """Begin to send x (.., n, d) to the next rank and to receive (.., length, d) from the previous.

    Returns at once; the function that it returns waits for both, and returns what arrived. One rank
    alone sends nothing and receives its own x. Neighbours are counted within the group (group_dst,
    group_src and, in P2POp, group_peer); x need not be contiguous (what is sent has to be).
    """
    rank, P = group.rank(), group.size()
    # exercise: pass_on
    if P == 1:
        return lambda: x
    arriving = x.new_empty(*x.shape[:-2], length, x.shape[-1])
    send = dist.P2POp(dist.isend, x.contiguous(), group=group, group_peer=(rank + 1) % P)
    receive = dist.P2POp(dist.irecv, arriving, group=group, group_peer=(rank - 1) % P)
    under_way = dist.batch_isend_irecv([send, receive])  # NCCL wants the two begun together

    def wait():
        for message in under_way:
            message.wait()
        return arriving

    return wait
    # end exercise


def ring_forward(q, k, v, length, placement, group):
    """This rank's queries attend to the keys of all ranks: (out, lse) as of attend() over all.

    K and V go round by pass_on(), P - 1 times, as one message (2, b, kv, n, d), and each is sent on
    before it is used, so that it travels meanwhile. length: tokens of all ranks.
    """
    rank, P = group.rank(), group.size()
    held = [positions(length, other, P, placement) for other in range(P)]
    out, lse = torch.zeros_like(q), q.new_full(q.shape[:-1], -torch.inf)
    # exercise: ring_forward
    kv = torch.stack([k, v])
    for step in range(P):
        source = (rank - step) % P  # whose keys these are; those of source - 1 come next
        if step < P - 1:
            arriving = pass_on(kv, len(held[source - 1]), group)
        out, lse = merge(out, lse, *attend(q, *kv, held[rank], held[source]))
        if step < P - 1:
            kv = arriving()
    return out, lse
    # end exercise


def ring_backward(q, k, v, out, lse, dout, length, placement, group):
    """(dq, dk, dv) of this rank's tokens; out, lse: ring_forward()'s; dout: out's gradient.

    K and V go round as in the forward; their gradient (2, b, kv, n, d) follows one step
    behind: while this rank works on a block, the others' gradient of it arrives. The last of P
    sends takes it home.
    """
    rank, P = group.rank(), group.size()
    held = [positions(length, other, P, placement) for other in range(P)]
    delta, dq = (dout * out).sum(-1), torch.zeros_like(q)
    # exercise: ring_backward
    kv = torch.stack([k, v])
    following = None  # behind a block that sets out follows no gradient
    for step in range(P):
        source = (rank - step) % P
        if step < P - 1:
            arriving = pass_on(kv, len(held[source - 1]), group)
        mine_q, *mine_kv = attend_backward(q, *kv, dout, lse, delta, held[rank], held[source])
        dq += mine_q
        dkv = torch.stack(mine_kv)
        if following:
            dkv += following()
        following = pass_on(dkv, len(held[source - 1]), group)
        if step < P - 1:
            kv = arriving()
    dk, dv = following()
    return dq, dk, dv
    # end exercise


class RingAttention(torch.autograd.Function):
    """Causal attention of a sequence of which each rank holds a part; see ring_attention()."""

    @staticmethod
    def forward(ctx, q, k, v, *where):
        q = q.unflatten(1, (k.shape[1], -1))  # (b, kv, g, n, d)
        out, lse = ring_forward(q, k, v, *where)
        ctx.save_for_backward(q, k, v, out, lse)  # own tokens: the others' keys come round again
        ctx.where = where
        return out.flatten(1, 2)

    @staticmethod
    def backward(ctx, dout):
        q, k, v, out, lse = ctx.saved_tensors
        dout = dout.unflatten(1, (k.shape[1], -1))
        dq, dk, dv = ring_backward(q, k, v, out, lse, dout, *ctx.where)
        return dq.flatten(1, 2), dk, dv, None, None, None


def ring_attention(q, k, v, length, placement, group):
    """Causal attention, differentiable: q (b, heads, n, d) -> (b, heads, n, d).

    k and v (b, kv_heads, n, d): kv_heads divides heads. The n tokens are those at positions(length,
    rank, P, placement) of a sequence of length tokens. The group's size is free: heads are not cut.
    """
    return RingAttention.apply(q, k, v, length, placement, group)


if __name__ == "__main__":  # the lab's checks and experiments, of labs/ and of my_labs/
    sys.path[:0] = [str(folder) for folder in Path(__file__).resolve().parents[1:3]]
    from labs.kit.run import main

    sys.exit(main(__file__))
