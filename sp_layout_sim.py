"""Sequence parallelism as a layout, on simulated ranks: numpy only, no torchrun, under a second.

One transformer block, x + dropout(attention(norm(x))) and the same again with an MLP, is computed
on one device and on P ranks that are entries of a list. The report shows which shard of (b, s, h)
each rank holds at every step, and compares it with that slice of the one device's tensor. In
--layout sp (v: what the forward sends, ^: what the backward sends):

    SP region   norm                         (b, s/P, h)   own tokens
                v all-gather                 ^ reduce-scatter
    TP region   qkv or up, column parallel   (b, s, f/P)   all tokens, own features
                o or down, row parallel      (b, s, h)     all tokens, a partial sum
                v reduce-scatter             ^ all-gather
    SP region   dropout, residual            (b, s/P, h)   own tokens

What the ranks shard in each layout:
    tp       the weights; between the blocks activations are replicated    Nanotron: all_reduce
    sp       the weights; between the blocks the same ranks shard tokens   Nanotron: reduce_scatter
    ulysses  the tokens; inside attention, between all-to-alls, the heads  weights are replicated
    cp       the tokens, inside attention too: keys and values go round    weights are replicated
sp adds no ranks: it is how the ranks of a TP group store what lies between the blocks. cp is an
axis of its own, ranks with the same weights and other tokens; tp x cp ranks do both.

    python sp_layout_sim.py
    python sp_layout_sim.py --tp 4 --seq 14 --layout cp
    python sp_layout_sim.py --tp-mode all_reduce --json tp.json
    python results/plot.py tp.json                      # draws the attention block of that run
    python sp_layout_sim.py --break forgot_reduction    # see it caught; --break list names them all
"""

import argparse
import json
import math
import sys
from pathlib import Path

import numpy as np

LAYOUTS = ["tp", "sp", "ulysses", "cp"]
TP_MODES = {"all_reduce": "tp", "reduce_scatter": "sp"}  # Nanotron's TensorParallelLinearMode
TOLERANCE = 1e-12  # ||a - b|| / ||b|| against one device, in float64
DIFFERENCES = 1e-6  # the same for finite differences, which lose half of the digits
DROPOUT = 0.5  # high, so that a wrong mask shows in a few numbers
BF16, MASK, LSE = 2, 1, 4  # bytes of a number on a GPU; softmax's log-sum-exp is float32
LARGEST = 1 << 22  # numbers in a tensor; with more a laptop would need minutes


# 2. Communication. A tensor on P ranks is a list of P arrays, and only exchange carries them over,
#    each piece straight to where it belongs. Round a ring, as in NCCL, as many bytes are sent.
# --------------------------------------------------------------------------------------------------


class Network:
    """Counts what is sent. traffic: {(phase, collective): [calls, wire bytes of all ranks]}."""

    def __init__(self):
        self.phase, self.traffic = "forward", {}

    def exchange(self, pieces, collective, calls=1):
        """pieces[r][to] goes from rank r to rank `to`, unless None. Returns received[to][r]."""
        entry = self.traffic.setdefault((self.phase, collective), [0, 0])
        entry[0] += calls
        for r, row in enumerate(pieces):
            entry[1] += sum(BF16 * x.size for to, x in enumerate(row) if to != r and x is not None)
        return list(zip(*pieces))


# Copied from tp.py
def split(n, rank, world):
    """[start, end) of the rank's share of n things: the first n % world ranks hold one more."""
    base, extra = divmod(n, world)
    return rank * base + min(rank, extra), (rank + 1) * base + min(rank + 1, extra)


def all_gather(xs, net, name="all_gather", calls=1):
    """(b, s/P, h) -> (b, s, h) on every rank."""
    pieces = [[x] * len(xs) for x in xs]
    return [np.concatenate(got, 1) for got in net.exchange(pieces, name, calls)]


def reduce_scatter(xs, net, name="reduce_scatter", calls=1):
    """Partial sums (b, s, h) -> each rank's own tokens of their sum, (b, s/P, h)."""
    pieces = [np.array_split(x, len(xs), 1) for x in xs]
    return [sum(got) for got in net.exchange(pieces, name, calls)]


def all_reduce(xs, net, calls=1):
    """Partial sums (b, s, h) -> their sum on every rank: a reduce-scatter and an all-gather."""
    return all_gather(reduce_scatter(xs, net, "all_reduce", 0), net, "all_reduce", calls)


def all_to_all(xs, cut_axis, join_axis, net):
    """Rank r gets the r-th piece along one axis of every rank's array, joined along another."""
    calls = 3 if xs[0].ndim == 5 else 1  # q, k and v are one array here, but a message each
    pieces = [np.array_split(x, len(xs), cut_axis) for x in xs]
    return [np.concatenate(got, join_axis) for got in net.exchange(pieces, "all_to_all", calls)]


def send_next(xs, net):
    """Every rank sends its array to the next one: one step round the ring."""
    P = len(xs)
    pieces = [[xs[r] if to == (r + 1) % P else None for to in range(P)] for r in range(P)]
    return [got[r - 1] for r, got in enumerate(net.exchange(pieces, "send"))]


def nothing(xs, net):
    """No rank sends anything."""
    return xs


# How a block is entered and left: (enter, its backward, leave, its backward). The backward of a
# copy is a sum and that of a sum a copy, so each is the other's conjugate: Megatron's f and g.
BOUNDARY = {
    "tp": (nothing, all_reduce, all_reduce, nothing),
    "sp": (all_gather, reduce_scatter, reduce_scatter, all_gather),
    "ulysses": (nothing, nothing, nothing, nothing),
    "cp": (nothing, nothing, nothing, nothing),
}


# ---- 3. What a rank computes by itself, with gradients by hand -----------------------------------


def rms_norm(x, weight):
    """x / its root mean square over h: each token by itself, but all of its features."""
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * weight


def rms_norm_backward(dy, x, weight):
    """(dx, dweight). The statistics are cheap to compute again from x."""
    rms = np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5)
    n, dn = x / rms, dy * weight
    return (dn - n * (dn * n).mean(-1, keepdims=True)) / rms, (dy * n).sum((0, 1))


def layer_norm(x, weight):
    """RMSNorm of x without its mean. This block has one of each kind; a real model has one kind."""
    return rms_norm(x - x.mean(-1, keepdims=True), weight)


def layer_norm_backward(dy, x, weight):
    dx, dweight = rms_norm_backward(dy, x - x.mean(-1, keepdims=True), weight)
    return dx - dx.mean(-1, keepdims=True), dweight


def linear(x, w):
    """x (b, s, in) @ w (in, out); either of in and out may be several axes, as (heads, d)."""
    return np.tensordot(x, w, x.ndim - 2)


def linear_backward(dy, x, w):
    dx = np.tensordot(dy, w, (range(2, dy.ndim), range(x.ndim - 2, w.ndim)))
    dw = np.tensordot(x, dy, ((0, 1), (0, 1)))
    return dx, dw


def silu(x):
    """x / (1 + exp(-x)), written so that it cannot overflow."""
    return x * (1 + np.tanh(x / 2)) / 2


def silu_backward(dy, x):
    """(dx, dbias) for x = column-parallel output + bias."""
    sigmoid = (1 + np.tanh(x / 2)) / 2
    dx = dy * sigmoid * (1 + x * (1 - sigmoid))
    return dx, dx.sum((0, 1))


def dropout(x, bias, mask):
    """With the row-parallel bias: added before the reduction, it would be added P times."""
    return (x + bias) * mask / (1 - DROPOUT)


def dropout_backward(dy, mask):
    """(dx, dbias)."""
    dx = dy * mask / (1 - DROPOUT)
    return dx, dx.sum((0, 1))


def scores(q, k, first_q=0, first_k=0):
    """Causal q k / sqrt(d), (b, q, heads, k); first_q, first_k: positions of the first tokens."""
    past = first_q + np.arange(q.shape[1])[:, None] >= first_k + np.arange(k.shape[1])
    z = np.einsum("bqad,bkad->bqak", q, k) / math.sqrt(q.shape[-1])
    return np.where(past[:, None], z, -np.inf)


def attend(q, k, v, *first):
    """Attention to these keys: (out (b, q, heads, d), log-sum-exp of the scores (b, q, heads))."""
    z = scores(q, k, *first)
    top = z.max(-1)
    lse = top + np.log(np.exp(z - top[..., None]).sum(-1))
    return np.einsum("bqak,bkad->bqad", np.exp(z - lse[..., None]), v), lse


def attend_backward(dout, out, lse, q, k, v, *first):
    """(dq, dk, dv) for these keys: lse gives the probabilities back, as in FlashAttention."""
    p = np.exp(scores(q, k, *first) - lse[..., None])
    dp = np.einsum("bqad,bkad->bqak", dout, v)
    dz = p * (dp - (dout * out).sum(-1)[..., None]) / math.sqrt(q.shape[-1])
    dq = np.einsum("bqak,bkad->bqad", dz, k)
    dk = np.einsum("bqak,bqad->bkad", dz, q)
    return dq, dk, np.einsum("bqak,bqad->bkad", p, dout)


# ---- 4. One device: the block with no ranks in it ------------------------------------------------


def make_problem(args):
    """x (b, s, h), the weights, the two dropout masks, and dy: the gradient from above."""
    rng = np.random.default_rng(0)
    h, f, a, x_shape = args.hidden, args.ffn, args.heads, (args.batch, args.seq, args.hidden)
    shapes = {"norm 1": h, "qkv": (h, a, 3, h // a), "o": (a, h // a, h), "o bias": h}
    shapes |= {"norm 2": h, "up": (h, f), "up bias": f, "down": (f, h), "down bias": h}
    W = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    for name in ("qkv", "o", "up", "down"):
        W[name] /= math.sqrt(f if name == "down" else h)
    masks = [rng.random(x_shape) >= DROPOUT for _ in range(2)]
    return rng.normal(size=x_shape), W, masks, rng.normal(size=x_shape)


def one_device(x, W, masks):
    """y (b, s, h), with softmax written out."""
    qkv = linear(layer_norm(x, W["norm 1"]), W["qkv"])  # (b, s, heads, 3, d)
    q, k, v = np.moveaxis(qkv, 3, 0)
    e = np.exp(scores(q, k))
    attention = np.einsum("bqak,bkad->bqad", e / e.sum(-1, keepdims=True), v)
    residual = x + dropout(linear(attention, W["o"]), W["o bias"], masks[0])
    up = linear(rms_norm(residual, W["norm 2"]), W["up"]) + W["up bias"]  # (b, s, f)
    return residual + dropout(linear(silu(up), W["down"]), W["down bias"], masks[1])


def finite_differences(problem, gradients):
    """{tensor: error of its gradient by hand}, against one_device a little to each side of it."""
    x, W, masks, dy = problem
    rng, step, errors = np.random.default_rng(1), 1e-5, {}

    def loss(name, tensor):
        tensors = {"x": x, **W, name: tensor}
        return (one_device(tensors["x"], tensors, masks) * dy).sum()

    for name, tensor in {"x": x, **W}.items():
        d, gradient = rng.normal(size=tensor.shape), gradients[name]
        slope = (loss(name, tensor + step * d) - loss(name, tensor - step * d)) / (2 * step)
        typical = np.linalg.norm(gradient) * np.linalg.norm(d) / math.sqrt(d.size)
        errors[name] = abs(slope - (gradient * d).sum()) / typical
    return errors


# ---- 5. The block on P ranks, in any layout ------------------------------------------------------

CUT = {"qkv": 1, "o": 0, "up": 1, "up bias": 0, "down": 0}  # column and row parallel: the axis
SHARDED = {"tp": CUT, "sp": CUT, "ulysses": {}, "cp": {}}  # all other weights are replicated
AXIS = {"tokens": 1, "features": 2, "heads": 2}  # of an activation
# Moving a tensor changes no number: the step with the same values.
SAME = {"enter attention": "norm 1", "leave attention": "o", "enter mlp": "norm 2"}
SAME |= {"leave mlp": "down", "qkv of heads": "qkv", "attention of heads": "attention"}
# The backward gets these and nothing else. Of a block's input sp keeps own tokens, as Megatron.
KEPT = ["x", "norm 1", "qkv of heads", "lse", "attention of heads", "attention", "mask 1"]
KEPT += ["residual", "norm 2", "up", "silu", "mask 2"]


def lies(step, layout):
    """How the ranks hold a step's value, and how its gradient.

    Each addend of a partial sum gets the sum's full gradient. Of an input that all ranks used each
    knows only the part of the gradient that came through its own weights.
    """
    kind, how = step.split()[0], "replicated" if layout == "tp" else "tokens"
    if layout in ("tp", "sp"):
        if kind == "enter":
            return "replicated", "partial sum"
        if kind in ("o", "down"):
            return "partial sum", "replicated"
        if kind in ("up", "silu"):
            how = "features"
        if kind in ("qkv", "attention"):
            how = "heads"
    if layout == "ulysses" and step.endswith("of heads"):
        how = "heads"
    return how, how


def place(x, how, P):
    """A tensor of one device as it lies on P ranks; how: a word of AXIS, an axis, or replicated."""
    return [x] * P if how == "replicated" else np.array_split(x, P, AXIS.get(how, how))


def each(function, *lists):
    """What every rank does by itself; several results come as several lists."""
    results = [function(*arguments) for arguments in zip(*lists)]
    return tuple(map(list, zip(*results))) if isinstance(results[0], tuple) else results


# tp, sp: a rank has all tokens of its heads. ulysses: so it has between two all-to-alls
# (DeepSpeed-Ulysses, arXiv 2309.14509). cp: keys and values go round (Ring Attention, 2310.01889).
ATTENTION = {"tp": "own heads", "sp": "own heads", "ulysses": "all_to_all", "cp": "ring"}


def blocks(qkv, ring, net):
    """Yields lists of (rank, arguments of attend): one, or in a ring P, as keys and values pass."""
    P, kv = len(qkv), [x[:, :, :, 1:] for x in qkv]
    first = np.cumsum([0] + [x.shape[1] for x in qkv]) * ring  # positions of the first tokens
    for step in range(P if ring else 1):
        if step:
            kv = send_next(kv, net)
        here = []
        for r in range(P):
            owner = (r - step) % P  # whose keys rank r has now
            if owner <= r:  # later keys are masked: rank 0 has 1 block to do and the last rank P
                q, k, v = qkv[r][:, :, :, 0], kv[r][:, :, :, 0], kv[r][:, :, :, 1]
                here.append((r, (q, k, v, first[r], first[owner])))
        yield here


def merge(out, lse, out2, lse2):
    """Online softmax: the same queries over different keys, weighed by their sums of exp."""
    total = np.logaddexp(lse, lse2)
    return out * np.exp(lse - total)[..., None] + out2 * np.exp(lse2 - total)[..., None], total


def attention(layout, qkv, net):
    """{step: its arrays}. Queries stay on their rank; what each block of keys gives is merged."""
    kind = ATTENTION[layout]
    if kind == "all_to_all":  # own tokens, all heads -> all tokens, own heads
        qkv = all_to_all(qkv, 2, 1, net)
    out = [np.zeros_like(x[:, :, :, 0]) for x in qkv]
    lse = [np.full(x.shape[:-1], -np.inf) for x in out]
    for here in blocks(qkv, kind == "ring", net):
        for r, block in here:
            out[r], lse[r] = merge(out[r], lse[r], *attend(*block))
    back = all_to_all(out, 1, 2, net) if kind == "all_to_all" else out
    return {"qkv of heads": qkv, "attention of heads": out, "lse": lse, "attention": back}


def attention_backward(layout, dout, kept, net):
    """{step: its gradient}. In a ring the gradients of keys and values go round with them."""
    kind = ATTENTION[layout]
    qkv, out, lse = kept["qkv of heads"], kept["attention of heads"], kept["lse"]
    dout = all_to_all(dout, 2, 1, net) if kind == "all_to_all" else dout
    dq = [np.zeros_like(x) for x in out]
    dkv = [np.zeros_like(x[:, :, :, 1:]) for x in qkv]
    for here in blocks(qkv, kind == "ring", net):
        for r, block in here:
            dq_part, *dkv_part = attend_backward(dout[r], out[r], lse[r], *block)
            dq[r] += dq_part
            dkv[r] += np.stack(dkv_part, 3)
        if kind == "ring":
            dkv = send_next(dkv, net)  # one step more than the keys: home
    dqkv = each(lambda dq, dkv: np.concatenate([dq[:, :, :, None], dkv], 3), dq, dkv)
    back = all_to_all(dqkv, 1, 2, net) if kind == "all_to_all" else dqkv
    return {"attention of heads": dout, "qkv of heads": dqkv, "qkv": back}


def forward(layout, x, W, masks, net):
    """{step: its arrays}. The shapes in the comments are sp's."""
    enter, _, leave, _ = BOUNDARY[layout]
    v = {"x": x, "mask 1": masks[0], "mask 2": masks[1]}  # (b, s/P, h)
    v["norm 1"] = each(layer_norm, x, W["norm 1"])
    v["enter attention"] = enter(v["norm 1"], net)  # (b, s, h)
    v["qkv"] = each(linear, v["enter attention"], W["qkv"])  # (b, s, heads/P, 3, d)
    v |= attention(layout, v["qkv"], net)  # (b, s, heads/P, d)
    v["o"] = each(linear, v["attention"], W["o"])  # (b, s, h), a partial sum
    v["leave attention"] = leave(v["o"], net)  # (b, s/P, h)
    v["dropout 1"] = each(dropout, v["leave attention"], W["o bias"], masks[0])
    v["residual"] = each(np.add, x, v["dropout 1"])
    v["norm 2"] = each(rms_norm, v["residual"], W["norm 2"])
    v["enter mlp"] = enter(v["norm 2"], net)  # (b, s, h)
    v["up"] = each(np.add, each(linear, v["enter mlp"], W["up"]), W["up bias"])  # (b, s, f/P)
    v["silu"] = each(silu, v["up"])
    v["down"] = each(linear, v["silu"], W["down"])  # (b, s, h), a partial sum
    v["leave mlp"] = leave(v["down"], net)  # (b, s/P, h)
    v["dropout 2"] = each(dropout, v["leave mlp"], W["down bias"], masks[1])
    return v | {"y": each(np.add, v["residual"], v["dropout 2"])}


def backward(layout, dy, kept, W, net):
    """({step: gradient of its arrays}, {weight: its gradient}): the forward upwards."""
    enter, enter_backward, _, leave_backward = BOUNDARY[layout]
    g, dW = {"y": dy, "dropout 2": dy}, {}
    g["leave mlp"], dW["down bias"] = each(dropout_backward, dy, kept["mask 2"])
    g["down"] = leave_backward(g["leave mlp"], net)
    g["silu"], dW["down"] = each(linear_backward, g["down"], kept["silu"], W["down"])
    g["up"], dW["up bias"] = each(silu_backward, g["silu"], kept["up"])
    entered = enter(kept["norm 2"], net)  # sp: gathered again
    g["enter mlp"], dW["up"] = each(linear_backward, g["up"], entered, W["up"])
    g["norm 2"] = enter_backward(g["enter mlp"], net)
    dx, dW["norm 2"] = each(rms_norm_backward, g["norm 2"], kept["residual"], W["norm 2"])
    g["residual"] = g["dropout 1"] = each(np.add, dy, dx)
    g["leave attention"], dW["o bias"] = each(dropout_backward, g["residual"], kept["mask 1"])
    g["o"] = leave_backward(g["leave attention"], net)
    g["attention"], dW["o"] = each(linear_backward, g["o"], kept["attention"], W["o"])
    g |= attention_backward(layout, g["attention"], kept, net)
    entered = enter(kept["norm 1"], net)
    g["enter attention"], dW["qkv"] = each(linear_backward, g["qkv"], entered, W["qkv"])
    g["norm 1"] = enter_backward(g["enter attention"], net)
    dx, dW["norm 1"] = each(layer_norm_backward, g["norm 1"], kept["x"], W["norm 1"])
    return g | {"x": each(np.add, g["residual"], dx)}, dW


def sum_gradients(dW, layout, net):
    """Sum over the ranks the gradients of replicated weights that saw only their rank's tokens.

    sp: norms and row biases; ulysses, cp: everything; tp: nothing, as every rank saw all tokens.
    They are sent in one bucket, and counted as one call.
    """
    names = [name for name in dW if layout != "tp" and name not in SHARDED[layout]]
    for i, name in enumerate(names):
        summed = all_reduce([x[None] for x in dW[name]], net, calls=int(i == 0))
        dW[name] = [x[0] for x in summed]
    return dW


def simulate(layout, problem, P):
    """Forward and backward: (values, gradients, gradients of weights, what is kept, W, network)."""
    x, W, masks, dy = problem
    net, outside, axes = Network(), lies("x", layout)[0], SHARDED[layout]
    # In a real job nobody draws masks for all tokens. Ranks that hold different tokens must draw
    # from different seeds, or their masks would be alike; ranks that hold replicas (tp) from the
    # same seed, or their replicas would part. Megatron has a random state for each.
    x, dy, *masks = (place(tensor, outside, P) for tensor in (x, dy, *masks))
    W = {name: place(w, axes.get(name, "replicated"), P) for name, w in W.items()}
    v = forward(layout, x, W, masks, net)
    kept, net.phase = {name: v[name] for name in KEPT}, "backward"
    g, dW = backward(layout, dy, kept, W, net)
    net.phase = "gradients"
    return v, g, sum_gradients(dW, layout, net), kept, W, net


# ---- 6. Checks: every number, every byte kept, every byte sent -----------------------------------


def expected_kept(layout, args):
    """Bytes kept for the backward by all ranks together.

    Outside the blocks 10 bsh (x, norm, residual, norm; two masks), inside 8 bsh + 4 bsf (q, k, v,
    out; up, silu) and the log-sum-exp. With f = 4h these are the 10 + 24/t of TP and the 34/t of
    TP + SP that Korthikanti et al. (arXiv 2205.05198) count without attention's probabilities.
    """
    tokens, h, f = args.batch * args.seq, args.hidden, args.ffn
    outside = tokens * h * (4 * BF16 + 2 * MASK) * (args.tp if layout == "tp" else 1)
    out_again = tokens * h * BF16 if layout == "ulysses" else 0  # before its all-to-all, and after
    return outside + out_again + tokens * (4 * BF16 * h + 2 * BF16 * f + LSE * args.heads)


def expected_sent(layout, args):
    """{(phase, collective): [calls, wire bytes of all ranks]}.

    To gather, or to reduce and scatter, a tensor of M bytes, each of its P pieces goes to or comes
    from P - 1 other ranks: (P - 1) M in all, (P - 1)/P M a rank. An all-reduce is both.
    """
    P, h, f, M = args.tp, args.hidden, args.ffn, BF16 * args.batch * args.seq * args.hidden
    once = (P - 1) * M
    if layout == "tp":
        return {(phase, "all_reduce"): [2, 4 * once] for phase in ("forward", "backward")}
    weights = 4 * h if layout == "sp" else 4 * h + f + 4 * h * h + 2 * h * f  # replicated
    sent = {("gradients", "all_reduce"): [1, 2 * (P - 1) * BF16 * weights]}
    if layout == "sp":
        sent["forward", "all_gather"] = sent["forward", "reduce_scatter"] = [2, 2 * once]
        sent["backward", "all_gather"] = [4, 4 * once]  # the blocks' inputs are gathered again
        sent["backward", "reduce_scatter"] = [2, 2 * once]
    if layout == "ulysses":  # of q, k, v and out a rank keeps own heads of own tokens: about 1/P
        shares = [np.diff([split(n, r, P) for r in range(P)]) for n in (args.seq, args.heads)]
        stays = int((shares[0] * shares[1]).sum()) * M // (args.seq * args.heads)
        sent["forward", "all_to_all"] = sent["backward", "all_to_all"] = [4, 4 * (M - stays)]
    if layout == "cp":  # keys and values make P - 1 steps, their gradients P: the last one is home
        sent["forward", "send"] = [P - 1, 2 * once]
        sent["backward", "send"] = [P - 1 + P, 2 * once + (2 * P * M if P > 1 else 0)]
    return {what: sums for what, sums in sent.items() if sums[0]}


def moves(layout):
    """{step: (what moves a tensor there, what moves its gradient back)}; --break changes them."""
    enter, enter_backward, leave, leave_backward = (f.__name__ for f in BOUNDARY[layout])
    found = dict.fromkeys(["enter attention", "enter mlp"], (enter, enter_backward))
    found |= dict.fromkeys(["leave attention", "leave mlp"], (leave, leave_backward))
    if ATTENTION[layout] == "all_to_all":
        found["qkv of heads"] = "3 all_to_all", "3 all_to_all"
        found["attention"] = "1 all_to_all", "1 all_to_all"
    if ATTENTION[layout] == "ring":
        found["attention"] = "P - 1 send", "2 P - 1 send"
    return found


def error(arrays, full, how):
    """The largest ||a - b|| / ||full|| of the ranks, b: what lies there if full is as how says."""
    if how == "partial sum":
        arrays, how = [sum(arrays)], "replicated"
    pieces = place(full, how, len(arrays))
    if [a.shape for a in arrays] != [b.shape for b in pieces]:
        return math.inf
    distances = [np.linalg.norm(a - b) for a, b in zip(arrays, pieces)]
    return float(np.max(distances) / np.linalg.norm(full))


def compare(step, layout, v, g, values, gradients):
    """What the report shows of a step: where it lies, and how far it is from one device."""
    (how, gradient_how), full, P = lies(step, layout), values[step], len(v[step])
    ends = [split(full.shape[AXIS[how]], r, P) for r in range(P)] if how in AXIS else []
    return {
        "holds": how,
        "slices": [f"{start}:{end}" for start, end in ends] or ["all"] * P,
        "shapes": [x.shape for x in v[step]],
        "error": error(v[step], full, how),
        "gradient_holds": gradient_how,
        "gradient_error": error(g[step], gradients[step], gradient_how),
        "first_numbers": [float(x.flat[0]) for x in v[step]],
        "one_device": float(full.flat[0]),
        # A boundary that this layout does not have moves nothing, and is not shown.
        "shown": step not in SAME or lies(step, layout) != lies(SAME[step], layout),
        "moved_by": moves(layout).get(step),
    }


def check(layout, problem, reference, args):
    """A layout against one device's values, gradients and gradients of weights, for the JSON."""
    v, g, dW, kept, W, net = simulate(layout, problem, args.tp)
    (values, gradients, weight_gradients), axes = reference, SHARDED[layout]
    steps = {step: compare(step, layout, v, g, values, gradients) for step in v if step in g}
    weights = {n: error(dW[n], weight_gradients[n], axes.get(n, "replicated")) for n in W}
    ranks, sizes = range(args.tp), {"lse": LSE, "mask 1": MASK, "mask 2": MASK}
    # By id: under two names an array is still kept once.
    held = [{id(xs[r]): xs[r].size * sizes.get(n, BF16) for n, xs in kept.items()} for r in ranks]
    kept_bytes, expected_kept_bytes = [sum(h.values()) for h in held], expected_kept(layout, args)

    # In the order of computation, so that the culprit comes first.
    errors = {f"{name}, forward": steps[name]["error"] for name in steps}
    errors |= {f"{name}, gradient": steps[name]["gradient_error"] for name in reversed(steps)}
    errors |= {f"gradient of weight {name}": weights[name] for name in weights}
    wrong = [name for name in errors if not errors[name] <= TOLERANCE]
    wrong += ["bytes kept"] if sum(kept_bytes) != expected_kept_bytes else []
    traffic, expected = [], expected_sent(layout, args)
    for phase, op in net.traffic | expected:
        (count, sent), wanted = (log.get((phase, op), [0, 0]) for log in (net.traffic, expected))
        row = {"phase": phase, "op": op, "count": count, "expected_count": wanted[0]}
        traffic.append(row | {"sent_bytes": sent, "expected_sent_bytes": wanted[1]})
        if [count, sent] != wanted:
            wrong.append(f"bytes of {op}, {phase}")
    return {
        "wrong": wrong,
        "steps": steps,
        "weight_gradients": weights,
        "weight_bytes": [sum(BF16 * w[r].size for w in W.values()) for r in ranks],
        "kept_bytes": kept_bytes,
        "expected_kept_bytes": expected_kept_bytes,
        "traffic": traffic,
    }


# ---- 7. Sabotage, for --break: what people get wrong. The checks have to catch every one ---------

BREAKS = {  # the layouts that it breaks: what it does
    "forgot_reduction": "tp, sp: a block is left without the sum, each rank goes on with its part",
    "forgot_backward_reduction": "tp, sp: a block's input gets no gradient from the other ranks",
    "reduced_both_ways": "tp: the sum that ends a block is summed in the backward too",
    "bias_before_reduction": "tp, sp: every rank adds the row-parallel bias, before the sum",
    "wrong_dropout_seed": "tp, sp, ulysses, cp: masks alike where tokens differ; in tp they differ",
    "unsummed_gradients": "sp, ulysses, cp: replicated weights keep their own tokens' gradient",
    "own_tokens_only": "ulysses, cp: attention stays as it is, and sees its own rank's tokens only",
    "local_positions": "cp: positions count from 0 on each rank, so that the causal mask is wrong",
    "unscaled_merge": "cp: blocks of keys are added as if each had the whole softmax to itself",
}


def own_tokens(xs, net):
    """A scatter that does not reduce."""
    return [np.array_split(x, len(xs), 1)[r] for r, x in enumerate(xs)]


def place_wrong_masks(x, how, P, place=place):
    """place as it was, but masks are alike where the ranks' tokens differ, or the other way."""
    xs = place(x, how, P)
    if x.dtype != bool:
        return xs
    if how == "replicated":
        return [np.roll(mask, r) for r, mask in enumerate(xs)]
    return [xs[0][:, : mask.shape[1]] for mask in xs]


def plant(bug, W, P):
    """Put the bug into this module or into the weights."""
    module, right_scores = globals(), scores
    if bug == "forgot_reduction":
        BOUNDARY["tp"] = (nothing, all_reduce, nothing, nothing)
        BOUNDARY["sp"] = (all_gather, reduce_scatter, own_tokens, all_gather)
    if bug == "forgot_backward_reduction":
        BOUNDARY["tp"] = (nothing, nothing, all_reduce, nothing)
        BOUNDARY["sp"] = (all_gather, own_tokens, reduce_scatter, all_gather)
    if bug == "reduced_both_ways":
        BOUNDARY["tp"] = (nothing, all_reduce, all_reduce, all_reduce)
    if bug == "bias_before_reduction":
        W |= {name: P * W[name] for name in ("o bias", "down bias")}
    if bug == "wrong_dropout_seed":
        module["place"] = place_wrong_masks
    if bug == "unsummed_gradients":
        module["sum_gradients"] = lambda dW, layout, net: dW
    if bug == "own_tokens_only":
        ATTENTION["ulysses"] = ATTENTION["cp"] = "own heads"
    if bug == "local_positions":
        module["scores"] = lambda q, k, *first: right_scores(q, k)
    if bug == "unscaled_merge":
        module["merge"] = lambda out, lse, out2, lse2: (out + out2, np.logaddexp(lse, lse2))


# ---- 8. Report -----------------------------------------------------------------------------------


def say_table(rows):
    """Columns aligned to the left; errors, which are floats, with one digit."""
    cells = [[f"{x:.0g}" if isinstance(x, float) else str(x) for x in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells)]
    print("", *("  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in cells), sep="\n")


def report_steps(results, args, hold):
    """The walk through the block, a line a step."""
    some = range(args.tp) if args.tp <= 4 else (0, 1, args.tp - 1)
    head = ["step", f"ranks {hold}", *(f"rank {r}" for r in some), "shape, rank 0", "error"]
    rows = [[*head, "its gradient", "error"]]
    for name, step in results["layouts"][args.layout]["steps"].items():
        if not step["shown"]:
            continue
        if step["moved_by"]:
            move, conjugate = step["moved_by"]
            rows.append([f"  v {move}", *[""] * (len(some) + 3), f"^ {conjugate}", ""])
        slices = [step["slices"][r] for r in some]
        rows.append([name, step["holds"], *slices, step["shapes"][0], step["error"]])
        rows[-1] += [step["gradient_holds"], step["gradient_error"]]
    say_table(rows)


def report_layouts(results, args, hold):
    """What each layout holds, keeps and sends: counted, and beside it the formula."""
    rows = [["layout", "between blocks", "attention", "mlp", "weights", "kept", "formula", "error"]]
    sent = [["layout", "phase", "collectives", "wire bytes", "formula", "in bsh"]]
    P, tensor = args.tp, BF16 * args.batch * args.seq * args.hidden
    for layout, run in results["layouts"].items():
        holds = [run["steps"][name]["holds"] for name in ("x", "attention of heads", "up")]
        totals = sum(run["weight_bytes"]), sum(run["kept_bytes"]), run["expected_kept_bytes"]
        worst = max(max(s["error"], s["gradient_error"]) for s in run["steps"].values())
        rows.append([layout, *holds, *(f"{total / P:,.0f}" for total in totals), worst])
        for t in run["traffic"]:
            calls = f"{t['count']} {t['op']}"
            if t["count"] != t["expected_count"]:
                calls += f", not {t['expected_count']}"
            counted = [f"{t[key] / P:,.0f}" for key in ("sent_bytes", "expected_sent_bytes")]
            unit = "" if t["phase"] == "gradients" else f"{t['sent_bytes'] / P / tensor:.2f}"
            sent.append([layout, t["phase"], calls, *counted, unit])
    print(f"\nWhat ranks {hold}; bytes a rank (the mean) of weights, and kept for the backward:")
    say_table(rows)
    print("\nWire bytes: what leaves a rank (the mean), and as a multiple of one tensor (b, s, h):")
    say_table(sent)


def report_answers(results, P):
    """The three questions about SP, answered from the numbers of this run."""
    tp, sp = (results["layouts"][layout] for layout in ("tp", "sp"))
    full, shard = (run["steps"]["leave mlp"]["shapes"][0] for run in (tp, sp))
    on_tokens, on_features = sp["steps"]["norm 1"]["error"], results["norm_on_features"]

    def wire_bytes(phase):
        rows = [[t["sent_bytes"] for t in x["traffic"] if t["phase"] == phase] for x in (tp, sp)]
        return "{:,.0f} wire bytes in tp, {:,.0f} in sp".format(*(sum(row) / P for row in rows))

    print(f"""
1. Which tp_mode activates sequence parallelism?
   reduce_scatter, in Nanotron; Megatron's switch is --sequence-parallel. all_reduce is TP alone.
2. How do TP's all-reduce and TP + SP's reduce-scatter differ in what they store?
   Both add up the same. all-reduce leaves {full} on every rank, replicated; reduce-scatter
   leaves each token on one rank, {shard} on rank 0. Rank 0 keeps for the backward:
   {tp["kept_bytes"][0]:,} bytes in tp, {sp["kept_bytes"][0]:,} in sp.
   A rank sends in the forward:  {wire_bytes("forward")};
   an all-reduce is a reduce-scatter and an all-gather.
   A rank sends in the backward: {wire_bytes("backward")};
   sp kept shards of the blocks' inputs, and gathers them again.
3. Why can LayerNorm be computed on (b, s/P, h)?
   Its mean and variance are over the h of one token, wherever others are: error {on_tokens:.0g}.
   On (b, s, h/P) a rank would take those of a part of h: error {on_features:.0g}.""")


def report(results, args):
    """All of it, for a reader who never saw sequence parallelism."""
    P, run, wrong = args.tp, results["layouts"][args.layout], results["wrong"]
    mode = [f", Nanotron's tp_mode {mode}" for mode in TP_MODES if TP_MODES[mode] == args.layout]
    hold = "should hold" if args.bug else "hold"
    print(f"""\
One transformer block on {P} simulated rank{"s" * (P > 1)}, --layout {args.layout}{"".join(mode)}.
b = {args.batch} sequences, s = {args.seq} tokens, h = {args.hidden} features, {args.heads} heads,
f = {args.ffn} features in the MLP.""")
    if args.bug:
        print(f"\nWith the bug {args.bug}: {BREAKS[args.bug].split(': ', 1)[1]}.")
    print(f"""
What the ranks {hold} at every step, and how far that is from the same slice on one device.
tokens, heads, features: the rank's shard. replicated: all of it, the same on every rank.
partial sum: all of it, but only the sum over the ranks is right.""")
    report_steps(results, args, hold)
    down, left = run["steps"]["down"], run["steps"]["leave mlp"]["first_numbers"][0]
    if down["holds"] == "partial sum":
        addends = " + ".join(f"{x:.4f}" for x in down["first_numbers"]).replace("+ -", "- ")
        one_device = f"one device {down['one_device']:.4f}"
        print(f"\nOne number: down is {addends}, leave mlp {left:.4f} on rank 0; {one_device}.")
    weights, differences = run["weight_gradients"].values(), results["finite_differences"].values()
    print(f"\nGradients of the {len(weights)} weights: error at most {max(weights):.0g}.")
    print(f"Those of one device against finite differences: at most {max(differences):.0g}.")
    report_layouts(results, args, hold)
    if "sp" in results["layouts"] and not wrong:
        report_answers(results, P)
    verdict = f"PASS sp_layout_sim: {', '.join(results['layouts'])}: all values and gradients "
    verdict += f"within {TOLERANCE:.0e} of one device, bytes as the formulas say"
    if wrong:
        verdict = f"FAIL sp_layout_sim: {len(wrong)} checks, the first: {wrong[0]}"
    print(f"\n{verdict}")


# ---- 9. Command line -----------------------------------------------------------------------------


def parse(argv):
    """The arguments; an error where nothing of that shape can be computed that way."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add, either = parser.add_argument, parser.add_mutually_exclusive_group().add_argument
    either("--layout", choices=LAYOUTS, default="sp", help="which to walk through (sp)")
    either("--tp-mode", choices=TP_MODES, help="Nanotron's names of --layout tp and sp")
    add("--tp", type=int, default=2, help="ranks (2)")
    add("--batch", type=int, default=2, help="sequences (2)")
    add("--seq", type=int, default=12, help="tokens a sequence (12); ranks need not divide it")
    add("--hidden", type=int, default=16, help="features of a token (16)")
    add("--heads", type=int, default=4, help="attention heads (4)")
    add("--ffn", type=int, default=64, help="features inside the MLP (64)")
    add("--json", metavar="FILE", help="write the results; results/plot.py draws the layout")
    add("--break", dest="bug", choices=[*BREAKS, "list"], help="a bug to see caught; list: all")
    args = parser.parse_args(argv)
    args.layout = layout = TP_MODES.get(args.tp_mode, args.layout)
    P, b, s, h, f, heads = args.tp, args.batch, args.seq, args.hidden, args.ffn, args.heads
    if min(P, b, s, h, f, heads) < 1:
        parser.error("--tp, --batch, --seq, --hidden, --heads and --ffn must be at least 1")
    largest = max(b * s * max(heads * s, f, 3 * h), h * max(f, 3 * h))
    broken = BREAKS.get(args.bug, layout).split(":")[0]
    for unusable, message in [
        (h % heads, f"--hidden {h} must be a multiple of --heads {heads}"),
        (h < 4, f"--hidden {h}: norms of so few features are all alike; 4 would do"),
        (heads < P and layout != "cp", f"--tp {P}: too few heads; {heads} or --layout cp would do"),
        (s < P, f"--seq {s} leaves some of {P} ranks without a token; {P} would do"),
        (f < P, f"--ffn {f} leaves some of {P} ranks without a feature; {P} would do"),
        (P > 64, f"--tp {P} is too much for one process; 64 would do"),
        (largest > LARGEST, f"a tensor of {largest:,} numbers is too large; {LARGEST:,} would do"),
        (layout not in broken.split(", "), f"--break {args.bug} breaks {broken}, not {layout}"),
        (args.bug in BREAKS and P == 1, "--break needs at least --tp 2: 1 rank sends nothing"),
    ]:
        if unusable:
            parser.error(message)
    return args


def run(args):
    """Compute and check everything; returns what --json writes."""
    problem, P = make_problem(args), args.tp
    x, W, masks, _ = problem
    # The steps of one device are those of one rank, where every collective does nothing.
    one_rank = simulate("tp", problem, 1)[:3]
    reference = [{name: xs[0] for name, xs in tensors.items()} for tensors in one_rank]
    values, gradients, weight_gradients = reference
    layouts = LAYOUTS if args.heads >= P else ["cp"]
    results = {"script": Path(__file__).name, **vars(args)}
    results["versions"] = {"python": sys.version.split()[0], "numpy": np.__version__}
    differences = finite_differences(problem, {"x": gradients["x"], **weight_gradients})
    far = [name for name, e in differences.items() if not e <= DIFFERENCES]  # NaN is wrong, too
    wrong = [f"{name}, against finite differences" for name in far]
    if not error([one_device(x, W, masks)], values["y"], "replicated") <= TOLERANCE:
        wrong.append("y of one rank, against one device")
    if "sp" in layouts:
        on_features = each(layer_norm, place(x, 2, P), place(W["norm 1"], 0, P))
        results["norm_on_features"] = error(on_features, values["norm 1"], "features")
    checked = {layout: check(layout, problem, reference, args) for layout in layouts}
    if args.bug:
        plant(args.bug, W, P)
        checked[args.layout] = check(args.layout, problem, reference, args)
    wrong += [f"{layout}: {what}" for layout in layouts for what in checked[layout]["wrong"]]
    results |= {"finite_differences": differences, "layouts": checked}
    return results | {"wrong": wrong, "passed": not wrong}


def main(argv=None):
    """Returns the exit status: 0 all held, 1 a check failed, 2 unusable arguments."""
    args = parse(argv)
    if args.bug == "list":
        say_table(BREAKS.items())
        return 0
    results = run(args)
    try:
        report(results, args)
        if args.json:
            Path(args.json).write_text(json.dumps(results, indent=1) + "\n")
    except OSError as problem:  # a full disk, say
        where = args.json or "the report"
        print(f"error: cannot write {where}: {problem.strerror}", file=sys.stderr)
        return 2
    return 0 if results["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
