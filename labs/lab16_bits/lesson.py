"""Lab 16. Bits: the same numbers on 1, 2, 4 and 8 ranks, to the last bit.

Question: a run on 4 GPUs is continued on 8, and its loss differs. A sampler on 2 ranks and a
trainer on 8 give the same token different log probabilities. Is that rounding, or a mistake?
If it may be rounding, every mistake of that size hides behind it. And a comparison with one
device, from given weights and without dropout, cannot see what ranks draw at random.

Idea: a sum of floats depends on its order, (a + b) + c is not a + (b + c); so does a matrix
product, whose kernel chooses an order by the shape. So fix both, for every P: always compute
in BLOCKS blocks, of which each of P ranks has BLOCKS / P. The blocks' summands are added as a
tree, neighbours first. A rank's own blocks are a whole branch; sums over ranks are the rest:

    ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7))      blocks
      rank 0    rank 1      rank 2    rank 3       P = 4: own sums, then sums over ranks
      rank 0                rank 1                 P = 2

Every matrix product is that of one block and one sequence, so every P calls the same kernel
with the same shape on the same numbers. Nothing is assumed about that kernel.

Random numbers come from no rank's generator. They are functions of global numbers: of an
element's in the full matrix, or of step, token and feature. Then the step's number is the
state of all generators, and a run that is resumed on other ranks draws the same.

    python labs/lab16_bits/lesson.py --plot lab16.png  # checks and experiments
    python labs/lab16_bits/lesson.py --predict 1000    # first your guess; see the end
    python labs/grade.py start lab16                   # writes my_labs/lab16_bits.py

Sources: TBIK, arXiv 2511.17826 (a tree of blocks). Philox: Salmon et al., SC 2011. Halving and
doubling: Thakur, Rabenseifner and Gropp, 2005.
"""

import math
import sys
import zlib
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

BLOCKS = 8  # that each sharded dimension is cut into; a power of two, as is the number of ranks
LAYERS, H, HEADS, KV, D, WIDTH, VOCAB = 2, 32, 16, 8, 4, 64, 64
B, S, EXAMPLES = 4, 8, 12  # sequences of a batch, tokens of each, sequences of an epoch
SPREAD = 0.1 * math.sqrt(12)  # of a uniform distribution with the standard deviation 0.1
DROP, EPS, THETA = 0.1, 1e-6, 10_000.0
RATE, BETAS, DECAY = 1e-2, (0.9, 0.95), 0.1
ONCE = "embed", "head", "norm"  # the others are those of each layer
CUT = {"embed": (0, (VOCAB, H)), "head": (0, (VOCAB, H)), "norm": (None, (H,))}  # dim, full shape
CUT |= {"q": (0, (HEADS * D, H)), "k": (0, (KV * D, H)), "v": (0, (KV * D, H))}
CUT |= {"o": (1, (H, HEADS * D)), "gate": (0, (WIDTH, H)), "up": (0, (WIDTH, H))}
CUT |= {"down": (1, (H, WIDTH)), "norm1": (None, (H,)), "norm2": (None, (H,))}


class Layout:
    """dp x tp ranks, from two groups: dp shares a batch's sequences, tp shares the blocks."""

    def __init__(self, dp, tp):
        self.dp, self.tp = dp, tp
        self.sequences, self.blocks = own(B, dp), own(BLOCKS, tp)


def own(n, group):
    """The indices, in a row, of this rank's share of n things; all shares are equal."""
    size = n // group.size()
    return range(group.rank() * size, (group.rank() + 1) * size)


# ---- The lesson 1: what is drawn at random -------------------------------------------------------


def philox(counter, key):
    """Philox4x32-10: four random 32-bit numbers, a function of four others and a key of two.

    Each may be an int or an int64 tensor. A GPU's generator in torch is this function, too.
    """
    (c0, c1, c2, c3), (k0, k1), low = counter, key, 0xFFFFFFFF
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2  # an int64 that wraps keeps its low 64 bits
        c0, c1 = (p1 >> 32) & low ^ c1 ^ k0, p1 & low
        c2, c3 = (p0 >> 32) & low ^ c3 ^ k1, p0 & low
        k0, k1 = (k0 + 0x9E3779B9) & low, (k1 + 0xBB67AE85) & low
    return c0, c1, c2, c3


def uniform(seed, name, a, b=0, c=0):
    """Random numbers in [0, 1), float32, a function of all arguments: tensors are broadcast.

    a, b, c: whole numbers. Results are multiples of 2 ** -24, which are exact.
    """
    bits = philox((a, b, c, zlib.crc32(name.encode())), (seed, 0))[0]
    return (bits >> 8).float() * 2.0**-24


def initial(name, block, seed):
    """One block of a new weight matrix: (its rows, all columns) if dim is 0, else the other way.

    Element (i, j) of the full matrix (m, n) is (uniform(seed, name, i n + j) - 0.5) SPREAD. The
    full matrix is never made. name: "layers.0.q"; CUT has the entry "q".
    """
    dim, (m, n) = CUT[name.split(".")[-1]]
    # exercise: initial
    size = (m, n)[dim] // BLOCKS
    part = torch.arange(block * size, (block + 1) * size)
    rows, columns = (part, torch.arange(n)) if dim == 0 else (torch.arange(m), part)
    return (uniform(seed, name, rows[:, None] * n + columns) - 0.5) * SPREAD
    # end exercise


def dropout(x, site, first, layer, sequence, step, seed):
    """x (s, f) with elements set to 0 with probability DROP, the others times 1 / (1 - DROP).

    x is from sequence number `sequence` of the batch; its features are first, first + 1, ...
    Keep an element if uniform(seed, f"{site} {layer}", step, token, feature) >= DROP. Tokens
    are counted through the batch: sequence number 1 begins with token S.
    """
    # exercise: dropout
    token = sequence * S + torch.arange(x.shape[0])
    feature = first + torch.arange(x.shape[1])
    kept = uniform(seed, f"{site} {layer}", step, token[:, None], feature) >= DROP
    return x * (kept / (1 - DROP)).to(x.dtype)
    # end exercise


def batch_at(step, seed):
    """(B,): which of EXAMPLES sequences are step's batch; step counts from 0 over all epochs.

    In each epoch every sequence comes once, by uniform(seed, "data", epoch, example) in
    ascending order, of equals the lower number first.
    """
    # exercise: batch_at
    epoch, place = divmod(step, EXAMPLES // B)
    order = uniform(seed, "data", epoch, torch.arange(EXAMPLES)).argsort(stable=True)
    return order[place * B : (place + 1) * B]
    # end exercise


# ---- The lesson 2: sums with a fixed order -------------------------------------------------------


def tree_sum(parts):
    """The sum of 1, 2, 4, 8, ... tensors: of neighbours, then of neighbouring sums, and so on."""
    # exercise: tree_sum
    while len(parts) > 1:
        parts = [a + b for a, b in zip(parts[::2], parts[1::2])]
    return parts[0]
    # end exercise


def exchange(x, peer, group):
    """Send x to rank `peer` of the group; returns what that rank sends, of the same shape."""
    x, got = x.contiguous(), x.new_empty(x.shape)
    send = dist.P2POp(dist.isend, x, group=group, group_peer=peer)
    receive = dist.P2POp(dist.irecv, got, group=group, group_peer=peer)
    for work in dist.batch_isend_irecv([send, receive]):
        work.wait()
    return got


def doubling(x, group):
    """The tree's sum of all ranks' x, on each: log2(P) exchanges of x.

    First with the neighbour (ranks 0 and 1, 2 and 3, ..), then two ranks away, then four.
    """
    rank, P = group.rank(), group.size()
    # exercise: doubling
    distance = 1
    while distance < P:
        x = x + exchange(x, rank ^ distance, group)
        distance *= 2
    return x
    # end exercise


def halving(x, group):
    """The same bits for fewer bytes, 2 (P - 1) / P of x: P divides x's number of elements.

    As doubling(), but at each distance a rank keeps and adds half of what it has, the lower
    rank the first half. Then back, largest distance first: each sends the other its part.
    """
    rank, P, mine = group.rank(), group.size(), x.flatten()
    # exercise: halving
    distance = 1
    while distance < P:
        keep, give = mine.chunk(2) if not rank & distance else reversed(mine.chunk(2))
        mine = keep + exchange(give, rank ^ distance, group)
        distance *= 2
    while distance > 1:
        distance //= 2
        other = exchange(mine, rank ^ distance, group)
        mine = torch.cat([other, mine] if rank & distance else [mine, other])
    return mine.view(x.shape)
    # end exercise


def all_reduce(x, group):
    """The tree's sum of all ranks' x."""
    return (doubling if x.numel() % group.size() else halving)(x, group)


class Enter(torch.autograd.Function):
    """f: x for each of `count` own blocks; its gradient is the tree's sum over all blocks."""

    @staticmethod
    def forward(ctx, x, count, group):
        ctx.group = group
        return tuple(x.view_as(x) for _ in range(count))

    @staticmethod
    def backward(ctx, *grads):
        # exercise: edges
        return all_reduce(tree_sum(grads), ctx.group), None, None
        # end exercise


class Leave(torch.autograd.Function):
    """g: the tree's sum of all blocks' parts, of which this rank has some."""

    @staticmethod
    def forward(ctx, group, *parts):
        ctx.count = len(parts)
        # exercise: edges
        return all_reduce(tree_sum(parts), group)
        # end exercise

    @staticmethod
    def backward(ctx, grad):
        # exercise: edges
        return None, *[grad] * ctx.count
        # end exercise


# ---- The lesson 3: LLaMA in blocks ---------------------------------------------------------------

# w {(name, block): tensor}: of what is not cut, block is None. drop(x, site, first): see dropout().


def rows_of(ids, block):
    """(row, elsewhere) of ids (s,) in one block of the vocabulary; row is 0 where elsewhere."""
    row = ids - block * (VOCAB // BLOCKS)
    elsewhere = (row < 0) | (row >= VOCAB // BLOCKS)
    return row.masked_fill(elsewhere, 0), elsewhere


def embed(ids, w, layout):
    """ids (s,) -> (s, h). All summands but one are 0."""
    parts = []
    for block in layout.blocks:
        row, elsewhere = rows_of(ids, block)
        parts.append(F.embedding(row, w["embed", block]).masked_fill(elsewhere[:, None], 0))
    return Leave.apply(layout.tp, *parts)


def rotate(x):
    """Rotary position embedding of x (heads, s, d), as in Hugging Face's LLaMA."""
    half = x.shape[-1] // 2
    rates = THETA ** (-torch.arange(half, dtype=torch.float32) / half)
    angles = (torch.arange(x.shape[1])[:, None] * rates).repeat(1, 2)  # (s, d)
    turned = torch.cat([-x[..., half:], x[..., :half]], -1)
    return x * angles.cos().to(x.dtype) + turned * angles.sin().to(x.dtype)


def attend(q, k, v):
    """Causal attention of one block's heads: q (s, heads d), k and v (s, kv d) -> (s, heads d)."""
    q, k, v = (y.unflatten(1, (-1, D)).transpose(0, 1) for y in (q, k, v))  # (heads, s, d)
    q, k = rotate(q), rotate(k)
    k, v = (y.repeat_interleave(HEADS // KV, 0) for y in (k, v))
    scores = q @ k.mT / math.sqrt(D)
    scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    return (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)


def attention(w, name, block, y):
    """One block's part of attention, which has heads of its own: y (s, h) -> (s, h)."""
    q, k, v = (F.linear(y, w[f"{name}.{which}", block]) for which in "qkv")
    return F.linear(attend(q, k, v), w[f"{name}.o", block])


def mlp(w, name, drop, block, y):
    """One block's part of down drop(silu(gate y) (up y)): y (s, h) -> (s, h).

    Weights: w[f"{name}.gate", block], .. drop(x, "mlp", first): x's first feature has the number
    first among all WIDTH, of which a block has WIDTH / BLOCKS.
    """
    # exercise: mlp
    gate, up = (F.linear(y, w[f"{name}.{which}", block]) for which in ("gate", "up"))
    hidden = drop(F.silu(gate) * up, "mlp", block * (WIDTH // BLOCKS))
    return F.linear(hidden, w[f"{name}.down", block])
    # end exercise


def in_blocks(part, x, layout):
    """The tree's sum of part(block, x) over all ranks' blocks: (s, h) -> (s, h)."""
    # exercise: mlp
    copies = Enter.apply(x, len(layout.blocks), layout.tp)
    return Leave.apply(layout.tp, *[part(block, y) for block, y in zip(layout.blocks, copies)])
    # end exercise


def forward(ids, w, layout, sequence, step, seed):
    """[logits (s, v / BLOCKS) of each own block] of one sequence of the batch, ids (s,)."""
    x = embed(ids, w, layout)
    for layer in range(LAYERS):
        name = f"layers.{layer}"
        drop = partial(dropout, layer=layer, sequence=sequence, step=step, seed=seed)
        y = F.rms_norm(x, (H,), w[f"{name}.norm1", None], EPS)
        x = x + drop(in_blocks(partial(attention, w, name), y, layout), "attention", 0)
        y = F.rms_norm(x, (H,), w[f"{name}.norm2", None], EPS)
        x = x + drop(in_blocks(partial(mlp, w, name, drop), y, layout), "residual", 0)
    x = F.rms_norm(x, (H,), w["norm", None], EPS)
    entered = Enter.apply(x, len(layout.blocks), layout.tp)
    return [F.linear(y, w["head", block]) for block, y in zip(layout.blocks, entered)]


def token_losses(logits, targets, layout):
    """(n,): log(sum of exp(logits)) - the target's logit. logits: [(n, v / BLOCKS)] of own blocks.

    targets (n,). Both sums over the vocabulary are tree sums of the blocks' own sums
    (rows_of()), in float32 at least. `peak`, the largest logit, keeps exp() in range.
    """
    wide = torch.promote_types(logits[0].dtype, torch.float32)
    peak = torch.stack([x.detach().amax(-1) for x in logits]).amax(0).to(wide)[:, None]
    dist.all_reduce(peak, dist.ReduceOp.MAX, group=layout.tp)  # a maximum has no order
    # exercise: loss
    sums, chosen = [], []
    for block, x in zip(layout.blocks, logits):
        shifted = x.to(wide) - peak
        sums.append(shifted.exp().sum(-1))
        column, elsewhere = rows_of(targets, block)
        chosen.append(shifted.gather(1, column[:, None])[:, 0].masked_fill(elsewhere, 0))
    return Leave.apply(layout.tp, *sums).log() - Leave.apply(layout.tp, *chosen)
    # end exercise


# ---- The lesson 4: training, on any number of ranks ----------------------------------------------


def sequence_loss(ids, w, layout, sequence, step, seed):
    """One sequence's part of the batch's mean loss: a token's target is the next one."""
    logits = forward(ids, w, layout, sequence, step, seed)
    return token_losses([x[:-1] for x in logits], ids[1:], layout).sum() / (B * (S - 1))


def gradients(batch, w, layout, step, seed):
    """(loss, {key: gradient}) of batch (B, s), the same on every rank that has the key.

    Compute each sequence's loss and gradients alone (sequence_loss, torch.autograd.grad), then
    the tree's sums over own sequences (layout.sequences) and layout.dp, with all gradients in
    one message. All w require gradients; the loss returned has no graph.
    """
    # exercise: gradients
    losses, grads = [], []
    for i in layout.sequences:
        loss = sequence_loss(batch[i], w, layout, i, step, seed)
        own_grads = torch.autograd.grad(loss, list(w.values()))
        grads.append(torch.cat([grad.flatten() for grad in own_grads]))
        losses.append(loss.detach())
    loss, row = (all_reduce(tree_sum(parts), layout.dp) for parts in (losses, grads))
    parts = row.split([x.numel() for x in w.values()])
    return loss, {key: part.view_as(w[key]) for key, part in zip(w, parts)}
    # end exercise


def new_state(layout, seed, dtype):
    """{"step": 0, "weights", "mean", "square"}, the last three {(name, block): tensor}."""
    weights, names = {}, [name for name in CUT if name not in ONCE]
    for name in [*ONCE, *(f"layers.{layer}.{name}" for layer in range(LAYERS) for name in names)]:
        dim, shape = CUT[name.split(".")[-1]]
        for block in (None,) if dim is None else layout.blocks:
            made = torch.ones(shape) if dim is None else initial(name, block, seed)
            weights[name, block] = made.to(dtype).requires_grad_()
    zeros = [{key: torch.zeros(x.shape) for key, x in weights.items()} for _ in range(2)]
    return {"step": 0, "weights": weights, "mean": zeros[0], "square": zeros[1]}


@torch.no_grad()
def adamw(state, grads):
    """A step of AdamW: element by element, so no order matters. Mean and square are float32."""
    state["step"] += 1
    corrections = [1 - beta ** state["step"] for beta in BETAS]
    for key, weight in state["weights"].items():
        mean, square, grad = state["mean"][key], state["square"][key], grads[key].float()
        mean.mul_(BETAS[0]).add_(grad * (1 - BETAS[0]))
        square.mul_(BETAS[1]).add_(grad * grad * (1 - BETAS[1]))
        change = (mean / corrections[0]) / ((square / corrections[1]).sqrt() + 1e-8)
        weight.copy_(weight.float() * (1 - RATE * DECAY) - change * RATE)


def train(state, data, steps, layout, seed):
    """Take steps on data (EXAMPLES, s); returns [(loss, gradients) of each]."""
    seen = []
    for _ in range(steps):
        batch = data[batch_at(state["step"], seed)]
        seen.append(gradients(batch, state["weights"], layout, state["step"], seed))
        adamw(state, seen[-1][1])
    return seen


def save(state, layout, folder):
    """Write what this rank holds to the folder, once for all dp: {tp's rank}.pt."""
    if layout.dp.rank() == 0:
        torch.save(state, Path(folder) / f"{layout.tp.rank()}.pt")


def resume(folder, layout):
    """The state of this rank from files of any other layout: see new_state() and save().

    torch.load() gives a file's state: {"step", "weights", "mean", "square"}. Keep the keys
    whose block is None or this rank's. All are on the disk.
    """
    # exercise: resume
    state = {"weights": {}, "mean": {}, "square": {}}
    for file in sorted(Path(folder).glob("*.pt")):
        saved = torch.load(file, weights_only=True)
        state["step"] = saved["step"]
        for kind in ("weights", "mean", "square"):
            kept = [key for key in saved[kind] if key[1] in (None, *layout.blocks)]
            state[kind] |= {key: saved[kind][key] for key in kept}
    return state
    # end exercise


def cost(dp, tp, itemsize):
    """(bytes that a rank sends, its matrix products) in a step on dp x tp ranks, as run above.

    itemsize: bytes of a weight, and of x; the loss and its sums over the vocabulary are float32.
    Bytes: those of all_reduce(). A linear is a product forward and two backward, attention 2 and 4.
    """

    # exercise: cost
    def sent(numbers, P):
        return numbers * P.bit_length() - numbers if numbers % P else 2 * numbers * (P - 1) // P

    sequences, blocks = B // dp, BLOCKS // tp
    activations = (4 * LAYERS + 2) * sent(S * H, tp) * itemsize
    over_tp = sequences * (activations + 2 * 4 * sent(S - 1, tp))
    weights = 0
    for name, (dim, shape) in CUT.items():
        size = math.prod(shape) if dim is None else math.prod(shape) // BLOCKS * blocks
        weights += size if name in ONCE else LAYERS * size
    over_dp = 4 * sent(1, dp) + itemsize * sent(weights, dp)
    return over_tp + over_dp, sequences * blocks * (LAYERS * (7 * 3 + 6) + 3)
    # end exercise


if __name__ == "__main__":  # the lab's checks and experiments, of labs/ and of my_labs/
    sys.path[:0] = [str(folder) for folder in Path(__file__).resolve().parents[1:3]]
    from labs.kit.run import main

    sys.exit(main(__file__))
