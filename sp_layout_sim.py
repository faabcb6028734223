"""Sequence parallelism as a layout, on simulated ranks: numpy only, no torchrun, under a second.

One transformer block, x + dropout(attention(norm(x))) and the same again with an MLP, is computed on one
device and on P ranks that are entries of a list. The report says which slice of (b, s, h) each rank holds at
every step, and compares it with that slice of the one device's tensor, forward and backward. P = 2, sp:

    rank 0: tokens 0..s/2       rank 1: tokens s/2..s      SP region: norm, dropout, residual   (b, s/2, h)
        |     all-gather the tokens         |              backward: reduce-scatter
        v                                   v
    all tokens                  all tokens                 TP region: qkv or up, column parallel
    half of the features        half of the features       (b, s, f/2)
    a part of each sum          a part of each sum         o or down, row parallel   (b, s, h)
        |     reduce-scatter                |              backward: all-gather
        v                                   v
    rank 0: tokens 0..s/2       rank 1: tokens s/2..s      SP region again   (b, s/2, h)

What the ranks cut among them in each layout:
    tp       the weights; between the blocks each holds the same whole tensor   Nanotron: tp_mode all_reduce
    sp       the weights; between the blocks the same ranks cut the tokens      tp_mode reduce_scatter
    ulysses  the tokens; inside attention, between all-to-alls, the heads       weights whole
    cp       the tokens, inside attention too: keys and values go round         weights whole
sp adds no ranks: it is how the ranks of a TP group store what lies between the blocks. cp is an axis of its
own, ranks with the same weights and other tokens; tp x cp ranks do both.

    python sp_layout_sim.py
    python sp_layout_sim.py --tp 4 --seq 14 --layout cp
    python sp_layout_sim.py --tp-mode all_reduce --plot tp.png --json tp.json
    python sp_layout_sim.py --break forgot_reduction      # see it caught; --break list names them all
"""

import argparse
import importlib.util
import json
import math
import os
import sys
from functools import partial
from pathlib import Path

import numpy as np

TOLERANCE = 1e-12  # ||a - b|| / ||b|| against one device, in float64
DIFFERENCES = 1e-6  # the same for finite differences, which lose half of the digits
DROPOUT = 0.5  # high, so that a wrong mask shows in a few numbers
# Bytes that a number would take on a GPU: in bf16, as a mask, as softmax's log-sum-exp (float32).
BF16, MASK, LSE = 2, 1, 4
LARGEST = 1 << 22  # numbers in a tensor; with more a laptop would need minutes
TP_MODES = {"all_reduce": "tp", "reduce_scatter": "sp"}  # Nanotron's TensorParallelLinearMode
COLOURS = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999"]
COPIES = "#DDDDDD"


# ---------------------------------------------------------------------------------------------------
# 2. Communication. A tensor on P ranks is a list of P arrays, and only exchange carries them over. It sends
#    each piece straight to where it belongs; round a ring, as NCCL may, a rank sends as many bytes.
# ---------------------------------------------------------------------------------------------------


class Network:
    """What was sent. traffic {(phase, collective): [calls, bytes that left any rank]}."""

    def __init__(self):
        self.phase, self.traffic = "forward", {}

    def exchange(self, pieces, collective, calls=1):
        """pieces[r][to] goes from rank r to rank `to`, unless it is None. Returns received[to][r]."""
        entry = self.traffic.setdefault((self.phase, collective), [0, 0])
        entry[0] += calls
        for r, row in enumerate(pieces):
            entry[1] += sum(BF16 * x.size for to, x in enumerate(row) if to != r and x is not None)
        return list(zip(*pieces))


# Copied from tp.py
def split(n, rank, world):
    """[start, end) of the rank's share of n things: contiguous, the first n % world ranks hold one more."""
    base, extra = divmod(n, world)
    return rank * base + min(rank, extra), (rank + 1) * base + min(rank + 1, extra)


def cut(x, axis, P):
    """x in P contiguous pieces along an axis. Where P does not divide, some are longer; real systems pad."""
    return np.split(x, [split(x.shape[axis], r, P)[1] for r in range(P - 1)], axis)


def all_gather(xs, net, name="all_gather", calls=1):
    """(b, s/P, h) -> (b, s, h) on every rank."""
    return [np.concatenate(got, 1) for got in net.exchange([[x] * len(xs) for x in xs], name, calls)]


def reduce_scatter(xs, net, name="reduce_scatter"):
    """Partial sums (b, s, h) -> each rank's own tokens of their sum, (b, s/P, h)."""
    return [sum(got) for got in net.exchange([cut(x, 1, len(xs)) for x in xs], name)]


def all_reduce(xs, net):
    """Partial sums (b, s, h) -> their sum on every rank: a reduce-scatter and an all-gather, in one call."""
    return all_gather(reduce_scatter(xs, net, "all_reduce"), net, "all_reduce", calls=0)


def all_to_all(xs, cut_axis, join_axis, net):
    """Rank r gets the r-th piece along one axis of every rank's array, and joins them along another."""
    pieces = [cut(x, cut_axis, len(xs)) for x in xs]
    return [np.concatenate(got, join_axis) for got in net.exchange(pieces, "all_to_all")]


def send_next(xs, net):
    """Every rank sends its array to the next one: one step round the ring."""
    P = len(xs)
    pieces = [[xs[r] if to == (r + 1) % P else None for to in range(P)] for r in range(P)]
    return [got[r - 1] for r, got in enumerate(net.exchange(pieces, "send"))]


def nothing(xs, net):
    """No rank sends anything."""
    return xs


# How a block is entered and left: (enter, its backward, leave, its backward). The backward of a copy is a sum
# and that of a sum a copy, so each is the other's conjugate; Megatron calls them f and g.
BOUNDARY = {
    "tp": (nothing, all_reduce, all_reduce, nothing),
    "sp": (all_gather, reduce_scatter, reduce_scatter, all_gather),
    "ulysses": (nothing, nothing, nothing, nothing),
    "cp": (nothing, nothing, nothing, nothing),
}


# ---------------------------------------------------------------------------------------------------
# 3. What a rank computes by itself, with gradients by hand
# ---------------------------------------------------------------------------------------------------


def normalize(x, centred):
    """x / its root mean square, and the factor. Over h: each token by itself, but all of its features."""
    x = x - x.mean(-1, keepdims=True) if centred else x
    factor = 1 / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5)
    return x * factor, factor


def norm(x, weight, centred):
    """LayerNorm (centred, without its bias) or RMSNorm."""
    return normalize(x, centred)[0] * weight


def norm_backward(dy, x, weight, centred):
    """(dx, dweight). The statistics are cheap to make again from x."""
    n, factor = normalize(x, centred)
    dn = dy * weight
    dx = factor * (dn - n * (dn * n).mean(-1, keepdims=True))
    return dx - dx.mean(-1, keepdims=True) if centred else dx, (dy * n).sum((0, 1))


# A real model has one kind of norm; this block has both, so that both are seen on shards.
layer_norm, rms_norm = partial(norm, centred=True), partial(norm, centred=False)
layer_norm_backward, rms_norm_backward = (partial(norm_backward, centred=c) for c in (True, False))


def linear(x, w):
    """x (b, s, in) @ w (in, out); either of in and out may be several axes, as (heads, d)."""
    return np.tensordot(x, w, x.ndim - 2)


def linear_backward(dy, x, w):
    """(dx, dw)."""
    dx = np.tensordot(dy, w, (range(2, dy.ndim), range(x.ndim - 2, w.ndim)))
    return dx, np.tensordot(x, dy, ((0, 1), (0, 1)))


def silu(x):
    """x * sigmoid(x), where 1/(1 + exp(-x)) is written so that it cannot overflow."""
    return x * (1 + np.tanh(x / 2)) / 2


def silu_backward(dy, x):
    """(dx, dbias) for x = column-parallel output + bias."""
    sigmoid = (1 + np.tanh(x / 2)) / 2
    dx = dy * sigmoid * (1 + x * (1 - sigmoid))
    return dx, dx.sum((0, 1))


def dropout(x, bias, mask):
    """With the row-parallel bias, which belongs after the reduction: before it, it would be added P times."""
    return (x + bias) * mask / (1 - DROPOUT)


def dropout_backward(dy, mask):
    """(dx, dbias)."""
    dx = dy * mask / (1 - DROPOUT)
    return dx, dx.sum((0, 1))


def unpack(qkv):
    """q, k, v of (b, s, heads, 3, d), or k, v of two: (b, s, heads, d) each."""
    return np.moveaxis(qkv, 3, 0)


def scores(q, k, first_q, first_k):
    """Causal q k / sqrt(d), (b, q, heads, k); first_q and first_k are the positions of the first tokens."""
    past = first_q + np.arange(q.shape[1])[:, None] >= first_k + np.arange(k.shape[1])
    return np.where(past[:, None], np.einsum("bqad,bkad->bqak", q, k) / math.sqrt(q.shape[-1]), -np.inf)


def attend(q, k, v, first_q=0, first_k=0):
    """Attention to these keys: (out (b, q, heads, d), log-sum-exp of the scores (b, q, heads))."""
    z = scores(q, k, first_q, first_k)
    top = z.max(-1)
    lse = top + np.log(np.exp(z - top[..., None]).sum(-1))
    return np.einsum("bqak,bkad->bqad", np.exp(z - lse[..., None]), v), lse


def attend_backward(dout, out, lse, q, k, v, first_q=0, first_k=0):
    """(dq, dk, dv) for these keys out of all, as in FlashAttention: lse gives the probabilities back."""
    p = np.exp(scores(q, k, first_q, first_k) - lse[..., None])
    dp = np.einsum("bqad,bkad->bqak", dout, v)
    dz = p * (dp - (dout * out).sum(-1)[..., None]) / math.sqrt(q.shape[-1])
    dq, dk = np.einsum("bqak,bkad->bqad", dz, k), np.einsum("bqak,bqad->bkad", dz, q)
    return dq, dk, np.einsum("bqak,bqad->bkad", p, dout)


# ---------------------------------------------------------------------------------------------------
# 4. One device: the block with no ranks in it
# ---------------------------------------------------------------------------------------------------


def make_problem(args):
    """x (b, s, h), the weights, the two dropout masks, and dy: the gradient that arrives from above."""
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
    """{step: value}, with softmax written out."""
    v = {"x": x, "norm 1": layer_norm(x, W["norm 1"])}
    v["qkv"] = linear(v["norm 1"], W["qkv"])  # (b, s, heads, 3, d)
    q, k, value = unpack(v["qkv"])
    e = np.exp(scores(q, k, 0, 0))
    v["attention"] = np.einsum("bqak,bkad->bqad", e / e.sum(-1, keepdims=True), value)
    v["o"] = linear(v["attention"], W["o"])  # (b, s, h)
    v["dropout 1"] = dropout(v["o"], W["o bias"], masks[0])
    v["residual"] = x + v["dropout 1"]
    v["norm 2"] = rms_norm(v["residual"], W["norm 2"])
    v["up"] = linear(v["norm 2"], W["up"]) + W["up bias"]  # (b, s, f)
    v["silu"] = silu(v["up"])
    v["down"] = linear(v["silu"], W["down"])  # (b, s, h)
    v["dropout 2"] = dropout(v["down"], W["down bias"], masks[1])
    return v | {"y": v["residual"] + v["dropout 2"]}


def finite_differences(problem, gradients):
    """{tensor: error of its gradient} against one_device a little to each side, in a random direction.

    This holds the gradients by hand; those of P ranks are then held against these, to the last digit.
    """
    x, W, masks, dy = problem
    rng, errors, tensors, step = np.random.default_rng(1), {}, {"x": x, **W}, 1e-5
    for name, tensor in tensors.items():
        d, gradient = rng.normal(size=tensor.shape), gradients[name]
        sides = [tensors | {name: tensor + t * d} for t in (step, -step)]
        losses = [(one_device(side["x"], side, masks)["y"] * dy).sum() for side in sides]
        typical = np.linalg.norm(gradient) * np.linalg.norm(d) / math.sqrt(d.size)
        errors[name] = abs((losses[0] - losses[1]) / (2 * step) - (gradient * d).sum()) / typical
    return errors


# ---------------------------------------------------------------------------------------------------
# 5. The block on P ranks, in any layout
# ---------------------------------------------------------------------------------------------------

LAYOUTS = ["tp", "sp", "ulysses", "cp"]
# How the value of each step lies on the ranks, a letter a layout. t: some tokens, all features; f: some
# features (or heads), all tokens; w: whole, the same on every rank; p: whole, but only a part of the sum.
STEPS = {"x": "wttt", "norm 1": "wttt", "enter attention": "wwtt", "qkv": "fftt", "qkv of heads": "ffft"}
STEPS |= {"attention of heads": "ffft", "attention": "fftt", "o": "pptt", "leave attention": "wttt"}
STEPS |= {"dropout 1": "wttt", "residual": "wttt", "norm 2": "wttt", "enter mlp": "wwtt", "up": "fftt"}
STEPS |= {"silu": "fftt", "down": "pptt", "leave mlp": "wttt", "dropout 2": "wttt", "y": "wttt"}
AXIS = {"t": 1, "f": 2}
# Moving a tensor changes no number: the step of one device with the same value.
SAME = {"enter attention": "norm 1", "leave attention": "o", "enter mlp": "norm 2", "leave mlp": "down"}
SAME |= {"qkv of heads": "qkv", "attention of heads": "attention"}
SHARDED = {"qkv": 1, "o": 0, "up": 1, "up bias": 0, "down": 0}  # the axis that tp and sp cut
KEPT = ["x", "norm 1", "qkv of heads", "lse", "attention of heads", "attention", "mask 1"]
KEPT += ["residual", "norm 2", "up", "silu", "mask 2"]  # the backward gets these and nothing else


def lies(step, layout):
    """Letters for a step's value and its gradient.

    Each addend of a sum gets the sum's whole gradient. Of an input that all ranks used each knows only the
    part of the gradient that came through its own weights.
    """
    value = STEPS[step][LAYOUTS.index(layout)]
    enters = value == "w" and step.startswith("enter")
    return value, "p" if enters else "w" if value == "p" else value


def each(function, *lists):
    """What every rank does by itself; several results come as several lists."""
    results = [function(*arguments) for arguments in zip(*lists)]
    return tuple(map(list, zip(*results))) if isinstance(results[0], tuple) else results


def place(x, how, P):
    """A tensor of one device as it lies on P ranks; how: t, f or w."""
    return [x] * P if how == "w" else cut(x, AXIS[how], P)


def place_masks(masks, layout, P):
    """Each rank's slice of the masks that one device would draw, so that the two can be compared.

    In a real job nobody draws them whole. Ranks that hold different tokens must draw from different seeds, or
    their masks would be alike; ranks that hold copies (tp) from the same seed, or their copies would part.
    Megatron has a random state for each.
    """
    return [place(mask, STEPS["dropout 1"][LAYOUTS.index(layout)], P) for mask in masks]


def attention_of_heads(v, net):
    """tp, sp: attention treats each head by itself, and each rank has whole heads."""
    out, lse = each(lambda qkv: attend(*unpack(qkv)), v["qkv"])
    return {"qkv of heads": v["qkv"], "attention of heads": out, "lse": lse, "attention": out}


def attention_of_heads_backward(dout, kept, net):
    def one_rank(dout, out, lse, qkv):
        return np.stack(attend_backward(dout, out, lse, *unpack(qkv)), 3)

    dqkv = each(one_rank, dout, kept["attention of heads"], kept["lse"], kept["qkv of heads"])
    return {"attention of heads": dout, "qkv of heads": dqkv, "qkv": dqkv}


def ulysses_attention(v, net):
    """Own tokens, all heads -> all tokens, own heads, and back (DeepSpeed-Ulysses, arXiv 2309.14509)."""
    qkv = all_to_all(v["qkv"], 2, 1, net)  # (b, s/P, heads, 3, d) -> (b, s, heads/P, 3, d)
    inner = attention_of_heads({"qkv": qkv}, net)
    return inner | {"attention": all_to_all(inner["attention"], 1, 2, net)}  # (b, s/P, heads, d)


def ulysses_attention_backward(dout, kept, net):
    g = attention_of_heads_backward(all_to_all(dout, 2, 1, net), kept, net)
    return g | {"qkv": all_to_all(g["qkv"], 1, 2, net)}


def first_tokens(xs):
    """The position in the sequence of each rank's first token."""
    return [sum(x.shape[1] for x in xs[:r]) for r in range(len(xs))]


def merge(out, lse, out2, lse2):
    """Online softmax: results of the same queries over different keys, weighed by their sums of exp."""
    total = np.logaddexp(lse, lse2)
    return out * np.exp(lse - total)[..., None] + out2 * np.exp(lse2 - total)[..., None], total


def ring_attention(v, net):
    """cp: the queries stay, keys and values go round the ranks (Ring Attention, arXiv 2310.01889)."""
    P, first, kv = len(v["qkv"]), first_tokens(v["qkv"]), [qkv[:, :, :, 1:] for qkv in v["qkv"]]
    out = [np.zeros_like(qkv[:, :, :, 0]) for qkv in v["qkv"]]
    lse = [np.full(x.shape[:-1], -np.inf) for x in out]
    for step in range(P):
        kv = send_next(kv, net) if step else kv
        for r in range(P):
            owner = (r - step) % P  # whose keys rank r has now
            if owner <= r:  # later tokens' keys are masked, so rank 0 has 1 block to do and the last one P
                q = v["qkv"][r][:, :, :, 0]
                out[r], lse[r] = merge(out[r], lse[r], *attend(q, *unpack(kv[r]), first[r], first[owner]))
    return {"qkv of heads": v["qkv"], "attention of heads": out, "lse": lse, "attention": out}


def ring_attention_backward(dout, kept, net):
    """Keys and values go round again; their gradients go with them, and one step further: home."""
    qkv, out, lse = kept["qkv of heads"], kept["attention of heads"], kept["lse"]
    P, first, kv = len(qkv), first_tokens(qkv), [x[:, :, :, 1:] for x in qkv]
    dq, dkv = [np.zeros_like(x) for x in out], [np.zeros_like(x) for x in kv]
    for step in range(P):
        kv = send_next(kv, net) if step else kv
        for r in range(P):
            owner = (r - step) % P
            if owner <= r:
                block = qkv[r][:, :, :, 0], *unpack(kv[r]), first[r], first[owner]
                q_part, *kv_part = attend_backward(dout[r], out[r], lse[r], *block)
                dq[r], dkv[r] = dq[r] + q_part, dkv[r] + np.stack(kv_part, 3)
        dkv = send_next(dkv, net)
    dqkv = each(lambda dq, dkv: np.concatenate([dq[:, :, :, None], dkv], 3), dq, dkv)
    return {"attention of heads": dout, "qkv of heads": dqkv, "qkv": dqkv}


ATTENTION = {
    "tp": (attention_of_heads, attention_of_heads_backward),
    "sp": (attention_of_heads, attention_of_heads_backward),
    "ulysses": (ulysses_attention, ulysses_attention_backward),
    "cp": (ring_attention, ring_attention_backward),
}


def forward(layout, x, W, masks, net):
    """{step: its arrays}. The shapes in the comments are sp's."""
    enter, _, leave, _ = BOUNDARY[layout]
    v = {"x": x, "mask 1": masks[0], "mask 2": masks[1]}  # (b, s/P, h)
    v["norm 1"] = each(layer_norm, x, W["norm 1"])
    v["enter attention"] = enter(v["norm 1"], net)  # (b, s, h)
    v["qkv"] = each(linear, v["enter attention"], W["qkv"])  # (b, s, heads/P, 3, d)
    v |= ATTENTION[layout][0](v, net)  # (b, s, heads/P, d)
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
    """({step: gradient of its arrays}, {weight: its gradient}): the forward upwards, with the conjugates."""
    enter, enter_backward, _, leave_backward = BOUNDARY[layout]
    g, dW = {"y": dy, "dropout 2": dy}, {}
    g["leave mlp"], dW["down bias"] = each(dropout_backward, dy, kept["mask 2"])
    g["down"] = leave_backward(g["leave mlp"], net)
    g["silu"], dW["down"] = each(linear_backward, g["down"], kept["silu"], W["down"])
    g["up"], dW["up bias"] = each(silu_backward, g["silu"], kept["up"])
    entered = enter(kept["norm 2"], net)  # sp kept only its tokens of it, as Megatron does: gather again
    g["enter mlp"], dW["up"] = each(linear_backward, g["up"], entered, W["up"])
    g["norm 2"] = enter_backward(g["enter mlp"], net)
    dx, dW["norm 2"] = each(rms_norm_backward, g["norm 2"], kept["residual"], W["norm 2"])
    g["residual"] = g["dropout 1"] = each(np.add, dy, dx)
    g["leave attention"], dW["o bias"] = each(dropout_backward, g["residual"], kept["mask 1"])
    g["o"] = leave_backward(g["leave attention"], net)
    g["attention"], dW["o"] = each(linear_backward, g["o"], kept["attention"], W["o"])
    g |= ATTENTION[layout][1](g["attention"], kept, net)
    entered = enter(kept["norm 1"], net)
    g["enter attention"], dW["qkv"] = each(linear_backward, g["qkv"], entered, W["qkv"])
    g["norm 1"] = enter_backward(g["enter attention"], net)
    dx, dW["norm 1"] = each(layer_norm_backward, g["norm 1"], kept["x"], W["norm 1"])
    return g | {"x": each(np.add, g["residual"], dx)}, dW


def sum_gradients(dW, layout, net):
    """A whole weight that saw only its rank's tokens has a part of its gradient: sum them, in one message.

    sp: norms and row biases; ulysses, cp: everything; tp: nothing, as every rank saw all tokens.
    """
    names = [n for n in dW if layout in ("ulysses", "cp") or (layout == "sp" and n not in SHARDED)]
    if not names:
        return dW
    flat = each(lambda *d: np.concatenate([x.ravel() for x in d])[None], *(dW[n] for n in names))
    ends = np.cumsum([dW[n][0].size for n in names])[:-1]
    parts = zip(*(np.split(total[0], ends) for total in all_reduce(flat, net)))
    return dW | {n: [x.reshape(dW[n][0].shape) for x in part] for n, part in zip(names, parts)}


# ---------------------------------------------------------------------------------------------------
# 6. Checks: every number, every byte kept, every byte sent
# ---------------------------------------------------------------------------------------------------


def expected_kept(layout, args):
    """Bytes kept for the backward by all ranks together.

    Outside the blocks 10 bsh (x, norm, residual, norm; two masks), inside 8 bsh + 4 bsf (q, k, v, out; up,
    silu) and the log-sum-exp. With f = 4h these are the 10 + 24/t of TP and the 34/t of TP + SP that
    Korthikanti et al. (arXiv 2205.05198) count where attention's probabilities are not kept.
    """
    tokens, h, f = args.batch * args.seq, args.hidden, args.ffn
    outside = tokens * h * (4 * BF16 + 2 * MASK) * (args.tp if layout == "tp" else 1)
    out_again = tokens * h * BF16 if layout == "ulysses" else 0  # before its all-to-all, and after
    return outside + out_again + tokens * (4 * BF16 * h + 2 * BF16 * f + LSE * args.heads)


def expected_sent(layout, args):
    """{(phase, collective): [calls, bytes]}, bytes sent by all ranks together.

    To gather, or to reduce and scatter, a tensor of M bytes, each of its P pieces goes to or comes from P - 1
    other ranks: (P - 1) M in all, (P - 1)/P M a rank. An all-reduce is both.
    """
    P, h, f, M = args.tp, args.hidden, args.ffn, BF16 * args.batch * args.seq * args.hidden
    once, both = (P - 1) * M, ("forward", "backward")
    if layout == "tp":
        return {(phase, "all_reduce"): [2, 4 * once] for phase in both}
    parameters = 4 * h if layout == "sp" else 4 * h + f + 4 * h * h + 2 * h * f
    sent = {("gradients", "all_reduce"): [1, 2 * (P - 1) * BF16 * parameters]}
    if layout == "sp":  # the backward gathers the blocks' inputs again
        sent |= {(phase, "reduce_scatter"): [2, 2 * once] for phase in both}
        return sent | {("forward", "all_gather"): [2, 2 * once], ("backward", "all_gather"): [4, 4 * once]}
    if layout == "ulysses":  # of q, k, v and out each rank keeps its own heads of its own tokens: about 1/P
        tokens, heads = (
            [b - a for a, b in (split(n, r, P) for r in range(P))] for n in (args.seq, args.heads)
        )
        stays = sum(t * a for t, a in zip(tokens, heads)) * M // (args.seq * args.heads)
        return sent | {(phase, "all_to_all"): [2, 4 * (M - stays)] for phase in both}
    home = 2 * P * M if P > 1 else 0  # keys and values make P - 1 steps, their gradients P
    sent |= {("forward", "send"): [P - 1, 2 * once]} if P > 1 else {}
    return sent | {("backward", "send"): [2 * P - 1, 2 * once + home]}


def error(arrays, full, axis=None):
    """The largest ||a - b|| / ||full|| of the ranks; b is full, or the rank's piece of it along an axis."""
    pieces = [full] * len(arrays) if axis is None else cut(full, axis, len(arrays))
    if [a.shape for a in arrays] != [b.shape for b in pieces]:
        return math.inf
    return float(np.max([np.linalg.norm(a - b) for a, b in zip(arrays, pieces)]) / np.linalg.norm(full))


def hold(arrays, full, how):
    """(error, what each rank holds in words) of arrays that lie as a letter of STEPS says."""
    if how in "wp":
        return error([sum(arrays)] if how == "p" else arrays, full), ["all"] * len(arrays)
    axis, P = AXIS[how], len(arrays)
    return error(arrays, full, axis), ["{}:{}".format(*split(full.shape[axis], r, P)) for r in range(P)]


def simulate(layout, problem, args):
    """Forward and backward in a layout: (values, gradients, gradients of the weights, kept, weights, net)."""
    x, W, masks, dy = problem
    P, net, outside = args.tp, Network(), lies("x", layout)[0]
    sharded = SHARDED if layout in ("tp", "sp") else {}
    W = {name: cut(w, sharded[name], P) if name in sharded else [w] * P for name, w in W.items()}
    v = forward(layout, place(x, outside, P), W, place_masks(masks, layout, P), net)
    kept, net.phase = {name: v[name] for name in KEPT}, "backward"
    g, dW = backward(layout, place(dy, outside, P), kept, W, net)
    net.phase = "gradients"
    return v, g, sum_gradients(dW, layout, net), kept, W, net


def compare(step, layout, v, g, values, gradients):
    """What the report says of a step: where it lies, and how far it is from one device."""
    same, (how, how_gradient) = SAME.get(step, step), lies(step, layout)
    full, words = values[same], {"t": "tokens", "f": "features", "w": "whole", "p": "partial sum"}
    words |= {"f": "heads"} if full.ndim > 3 else {}
    wrong, slices = hold(v[step], full, how)
    row = {"holds": words[how], "slices": slices, "shapes": [x.shape for x in v[step]], "error": wrong}
    wrong, _ = hold(g[step], gradients[same], how_gradient)
    row |= {"gradient_holds": words[how_gradient], "gradient_error": wrong}
    row |= {"first_numbers": [float(x.flat[0]) for x in v[step]], "one_device": float(full.flat[0])}
    # A boundary that this layout does not have changes nothing, and is not shown.
    here = v[step] is v[same] and how_gradient == lies(same, layout)[1] if step in SAME else False
    return row | {"shown": not here}


def check(layout, problem, reference, args):
    """Compare a layout with one device's (values, gradients, gradients of weights); JSON's part of it."""
    v, g, dW, kept, W, net = simulate(layout, problem, args)
    values, gradients, weight_gradients = reference
    ranks, axes = range(args.tp), SHARDED if layout in ("tp", "sp") else {}
    steps = {step: compare(step, layout, v, g, values, gradients) for step in STEPS}
    weights = {name: error(dW[name], weight_gradients[name], axes.get(name)) for name in W}
    sizes = {"lse": LSE, "mask 1": MASK, "mask 2": MASK}
    # By id: under two names an array is still kept once.
    held = [{id(xs[r]): xs[r].size * sizes.get(n, BF16) for n, xs in kept.items()} for r in ranks]
    kept_bytes, expected_kept_bytes = [sum(h.values()) for h in held], expected_kept(layout, args)
    traffic, expected = [], expected_sent(layout, args)
    for phase, op in net.traffic | expected:
        (calls, sent), wanted = (log.get((phase, op), [0, 0]) for log in (net.traffic, expected))
        row = {"phase": phase, "op": op, "count": calls, "expected_count": wanted[0]}
        traffic.append(row | {"sent_bytes": sent, "expected_sent_bytes": wanted[1]})

    # In the order of computation, so that the culprit comes first.
    wrong = [f"{n}, forward" for n, step in steps.items() if not step["error"] <= TOLERANCE]
    wrong += [f"{n}, gradient" for n, s in reversed(steps.items()) if not s["gradient_error"] <= TOLERANCE]
    wrong += [f"gradient of weight {n}" for n, e in weights.items() if not e <= TOLERANCE]
    wrong += ["bytes kept"] if sum(kept_bytes) != expected_kept_bytes else []
    for t in traffic:
        if (t["count"], t["sent_bytes"]) != (t["expected_count"], t["expected_sent_bytes"]):
            wrong.append(f"bytes of {t['op']}, {t['phase']}")
    return {
        "wrong": wrong,
        "steps": steps,
        "weight_gradients": weights,
        "weight_bytes": [sum(BF16 * w[r].size for w in W.values()) for r in ranks],
        "kept_bytes": kept_bytes,
        "expected_kept_bytes": expected_kept_bytes,
        "traffic": traffic,
    }


# ---------------------------------------------------------------------------------------------------
# 7. Sabotage, for --break: what people get wrong. The checks have to catch every one.
# ---------------------------------------------------------------------------------------------------


def own_tokens(xs, net):
    """A scatter that does not reduce."""
    return [cut(x, 1, len(xs))[r] for r, x in enumerate(xs)]


def forgot_reduction():
    """A block is left without the sum: each rank goes on with its own part of it."""
    BOUNDARY["tp"] = (nothing, all_reduce, nothing, nothing)
    BOUNDARY["sp"] = (all_gather, reduce_scatter, own_tokens, all_gather)


def forgot_backward_reduction():
    """The forward is right, but the gradient of a block's input lacks the other ranks' part."""
    BOUNDARY["tp"] = (nothing, nothing, all_reduce, nothing)
    BOUNDARY["sp"] = (all_gather, own_tokens, reduce_scatter, all_gather)


def reduced_both_ways():
    """The sum that ends a block is summed in the backward too: gradients P times too large."""
    BOUNDARY["tp"] = (nothing, all_reduce, all_reduce, all_reduce)


def bias_before_reduction():
    """The row-parallel bias is added on every rank, before the sum: P times in all."""
    global forward
    right = forward

    def forward(layout, x, W, masks, net):
        added = {name: [len(x) * bias for bias in W[name]] for name in ("o bias", "down bias")}
        return right(layout, x, W | added, masks, net)


def wrong_dropout_seed():
    """Ranks with different tokens draw the same mask; in tp, ranks with the same tokens different ones."""
    global place_masks
    right = place_masks

    def place_masks(masks, layout, P):
        placed = right(masks, layout, P)
        if layout == "tp":
            return [[np.roll(x, r) for r, x in enumerate(xs)] for xs in placed]
        return [[xs[0][:, : x.shape[1]] for x in xs] for xs in placed]


def unsummed_gradients():
    """Weights that saw only the rank's tokens keep a part of their gradient; all else is right."""
    global sum_gradients

    def sum_gradients(dW, layout, net):
        return dW


def own_tokens_only():
    """Attention stays as on one device, so every rank attends to its own tokens only."""
    ATTENTION["ulysses"] = ATTENTION["cp"] = ATTENTION["tp"]


def local_positions():
    """Each rank counts positions from 0, so that the causal mask between ranks is wrong."""
    global first_tokens

    def first_tokens(xs):
        return [0] * len(xs)


def unscaled_merge():
    """Blocks of keys are added up as if each had the whole softmax to itself."""
    global merge

    def merge(out, lse, out2, lse2):
        return out + out2, np.logaddexp(lse, lse2)


BREAKS = {  # and the layouts it breaks
    forgot_reduction: ["tp", "sp"],
    forgot_backward_reduction: ["tp", "sp"],
    reduced_both_ways: ["tp"],
    bias_before_reduction: ["tp", "sp"],
    wrong_dropout_seed: LAYOUTS,
    unsummed_gradients: ["sp", "ulysses", "cp"],
    own_tokens_only: ["ulysses", "cp"],
    local_positions: ["cp"],
    unscaled_merge: ["cp"],
}


# ---------------------------------------------------------------------------------------------------
# 8. Report and picture
# ---------------------------------------------------------------------------------------------------


def short(number):
    """An error, in a few characters."""
    return f"{number:.0e}" if number else "0"


def say_rows(rows):
    """Columns aligned to the left."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    print("", *("  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows), sep="\n")


def report_steps(results, args):
    """The walk through the block, a line a step."""
    moves = [f.__name__ for f in BOUNDARY[args.layout]]
    some = range(args.tp) if args.tp <= 4 else (0, 1, args.tp - 1)
    ranks = [f"rank {r}" for r in some]
    rows = [["step", "holds", *ranks, "shape, rank 0", "error", "its gradient", "error"]]
    for name, step in results["layouts"][args.layout]["steps"].items():
        for start, move, conjugate in (("enter", *moves[:2]), ("leave", *moves[2:])):
            if name.startswith(start) and step["shown"]:
                rows.append([f"  v {move}", *[""] * (len(some) + 3), f"^ {conjugate}", ""])
        if step["shown"]:
            shape, slices = str(step["shapes"][0]), [step["slices"][r] for r in some]
            rows.append([name, step["holds"], *slices, shape, short(step["error"])])
            rows[-1] += [step["gradient_holds"], short(step["gradient_error"])]
    say_rows(rows)


def report_layouts(results, args):
    """What each layout cuts, keeps and sends: counted, and beside it the formula."""
    rows = [["layout", "between blocks", "attention", "mlp", "weights", "kept", "formula", "largest error"]]
    sent = [["layout", "phase", "collectives", "sent", "formula", "in bsh"]]
    tensors = BF16 * args.batch * args.seq * args.hidden * args.tp
    for layout, result in results["layouts"].items():
        steps = result["steps"]
        totals = sum(result["weight_bytes"]), sum(result["kept_bytes"]), result["expected_kept_bytes"]
        worst = np.max([e for step in steps.values() for e in (step["error"], step["gradient_error"])])
        rows.append([layout, *(steps[n]["holds"] for n in ("x", "attention of heads", "up"))])
        rows[-1] += [*(f"{total / args.tp:,.0f}" for total in totals), short(worst)]
        for t in result["traffic"]:
            counted = [f"{t[key] / args.tp:,.0f}" for key in ("sent_bytes", "expected_sent_bytes")]
            unit = "" if t["phase"] == "gradients" else f"{t['sent_bytes'] / tensors:.2f}"
            sent.append([layout, t["phase"], f"{t['count']} {t['op']}", *counted, unit])
    print("\nWhat the ranks cut; bytes a rank (the mean) of weights, and of what is kept for the backward:")
    say_rows(rows)
    print("\nsp cuts tokens where tp has copies, over the same ranks; inside the blocks it is tp.")
    print("cp cuts tokens everywhere, over ranks of its own with the same weights; tp x cp ranks do both.")
    print("\nBytes a rank sends (the mean), and as a multiple of one tensor (b, s, h):")
    say_rows(sent)


def report_answers(results, args):
    """The three questions about SP, answered from the numbers of this run."""
    tp, sp = (results["layouts"][layout] for layout in ("tp", "sp"))
    whole, shard = (result["steps"]["leave mlp"]["shapes"][0] for result in (tp, sp))
    on_tokens, on_features = short(sp["steps"]["norm 1"]["error"]), short(results["norm_on_features"])

    def sent(phase):
        totals = [sum(t["sent_bytes"] for t in x["traffic"] if t["phase"] == phase) for x in (tp, sp)]
        return "{:,.0f} bytes in tp, {:,.0f} in sp".format(*(total / args.tp for total in totals))

    print(f"""
1. Which tp_mode activates sequence parallelism?
   reduce_scatter, in Nanotron; Megatron's switch is --sequence-parallel. all_reduce is TP alone.
2. How do TP's all-reduce and TP + SP's reduce-scatter differ in what they store?
   Both add up the same. all-reduce leaves {whole} on every rank, copies; reduce-scatter
   leaves each token on one rank, {shard} on rank 0.
   Rank 0 keeps for the backward: {tp["kept_bytes"][0]:,} bytes in tp, {sp["kept_bytes"][0]:,} in sp.
   A rank sends in the forward:   {sent("forward")};
   an all-reduce is a reduce-scatter and an all-gather.
   A rank sends in the backward:  {sent("backward")};
   sp kept slices of the blocks' inputs, and gathers them again.
3. Why can LayerNorm be computed on (b, s/P, h)?
   Its mean and variance are over the h of one token; other tokens may be anywhere: error {on_tokens}.
   On (b, s, h/P) each rank would take the mean and variance of a part of h: error {on_features}.""")


def report(results, args):
    """All of it, for a reader who never saw sequence parallelism."""
    chosen, modes = results["layouts"][args.layout], {layout: mode for mode, layout in TP_MODES.items()}
    steps, worst = chosen["steps"], short(max(chosen["weight_gradients"].values()))
    mode = f", Nanotron's tp_mode {modes[args.layout]}" if args.layout in modes else ""
    sizes = f"b = {args.batch} sequences, s = {args.seq} tokens, h = {args.hidden} features, "
    print(f"""\
One transformer block on {args.tp} simulated ranks, --layout {args.layout}{mode}.
{sizes}{args.heads} heads, MLP of f = {args.ffn}.

What each rank holds at every step, and how far it is from the same slice on one device.
tokens, heads, features: the rank's slice of them. whole: all, the same on every rank.
partial sum: all, but only the sum over the ranks is right.""")
    if args.bug:
        print(f"\nWith the bug {args.bug}: {globals()[args.bug].__doc__}")
    report_steps(results, args)
    if steps["down"]["holds"] == "partial sum":
        addends = " + ".join(f"{x:.4f}" for x in steps["down"]["first_numbers"]).replace("+ -", "- ")
        total, one_device = steps["leave mlp"]["first_numbers"][0], steps["down"]["one_device"]
        print(
            f"\nOne number: down is {addends}, leave mlp {total:.4f} on rank 0; one device {one_device:.4f}."
        )
    print(f"\nGradients of the {len(chosen['weight_gradients'])} weights: error at most {worst}.")
    differences = short(max(results["finite_differences"].values()))
    print(f"Those of one device against finite differences: at most {differences}.")
    report_layouts(results, args)
    if "sp" in results["layouts"]:
        report_answers(results, args)
    verdict = f"PASS sp_layout_sim: {', '.join(results['layouts'])}: all values and gradients within "
    verdict += f"{TOLERANCE:.0e} of one device, bytes as the formulas say"
    if results["wrong"]:
        verdict = f"FAIL sp_layout_sim: {len(results['wrong'])} checks, the first: {results['wrong'][0]}"
    print(f"\n{verdict}")


def boxes(step, layout, r, args):
    """What rank r has of a step, to draw: (tokens, features, the rank that computed it, is it partial)."""
    shares = [[np.array(split(n, i, args.tp)) / n for i in range(args.tp)] for n in (args.seq, args.heads)]
    (tokens, heads), everything, how = shares, (0, 1), lies(step, layout)[0]
    if (layout, step) == ("ulysses", "qkv of heads"):
        return [(tokens[i], heads[r], i, False) for i in range(args.tp)]
    if (layout, step) == ("ulysses", "attention"):
        return [(tokens[r], heads[i], i, False) for i in range(args.tp)]
    if (layout, how) == ("sp", "w"):
        return [(tokens[i], everything, i, False) for i in range(args.tp)]
    of_tokens, of_features = tokens[r] if how == "t" else everything, heads[r] if how == "f" else everything
    return [(of_tokens, of_features, None if how == "w" else r, how == "p")]


def picture_columns(results, args):
    """The attention block: (step, the collective before it, boxes of each rank), a column a step."""
    layout, P, columns = args.layout, args.tp, []
    came = {"enter attention": BOUNDARY[layout][0].__name__, "leave attention": BOUNDARY[layout][2].__name__}
    came |= {"qkv of heads": "all_to_all", "attention": "all_to_all"} if layout == "ulysses" else {}
    for name in list(STEPS)[1 : list(STEPS).index("dropout 1")]:
        if results["layouts"][layout]["steps"][name]["shown"] and came.get(name) != "nothing":
            columns.append((name, came.get(name), [boxes(name, layout, r, args) for r in range(P)]))
        if (layout, name) == ("cp", "qkv"):  # no step of STEPS: what passes by is not kept
            for i in range(1, P):
                passing = [boxes("qkv", layout, (r - i) % P, args) for r in range(P)]
                columns.append(("keys, values", f"send {i}", passing))
    return columns


def draw(results, args, path):
    """A row a rank, a column a step; in each frame tokens downwards and features to the right."""
    from matplotlib.figure import Figure  # here, as it takes longer to load than all the rest to run
    from matplotlib.patches import Patch, Rectangle

    P, columns = args.tp, picture_columns(results, args)
    figure = Figure(figsize=(1 + 1.4 * len(columns), 2 + 1.2 * P), layout="constrained")
    axes = figure.subplots(P, len(columns), squeeze=False)
    for (title, came, ranks), column in zip(columns, axes.T):
        column[0].set_title(f"{came} \u2192\n{title}" if came else f"\n{title}", fontsize=9)
        column[-1].set_xlabel("features", fontsize=8)
        for axis, filled in zip(column, ranks):
            axis.set(xlim=(0, 1), ylim=(1, 0), xticks=[], yticks=[])
            for (t0, t1), (f0, f1), owner, partial_sum in filled:
                look = {"hatch": "///", "alpha": 0.6} if partial_sum else {}
                look |= {"facecolor": COPIES if owner is None else COLOURS[owner], "edgecolor": "white"}
                axis.add_patch(Rectangle((f0, t0), f1 - f0, t1 - t0, **look))
    for r in range(P):
        axes[r, 0].set_ylabel(f"rank {r}\ntokens", fontsize=9)
    keys = [Patch(facecolor=COLOURS[r], label=f"made by rank {r}") for r in range(P)]
    if args.layout == "tp":
        keys.append(Patch(facecolor=COPIES, label="same on all ranks"))
    if args.layout in ("tp", "sp"):
        keys.append(Patch(facecolor="white", edgecolor="black", hatch="///", label="partial sum"))
    figure.legend(handles=keys, loc="outside lower center", ncols=4, fontsize=9, frameon=False)
    figure.suptitle(f"--layout {args.layout}, {P} ranks: what each holds in the attention block", fontsize=11)
    figure.savefig(path, dpi=120)


# ---------------------------------------------------------------------------------------------------
# 9. Command line
# ---------------------------------------------------------------------------------------------------


# Copied from tp.py
class Unusable(Exception):
    """An argument or model that cannot work; its message says what would. Ends as `error: ...`, exit 2."""


# Copied from tp.py
class Parser(argparse.ArgumentParser):
    """argparse, with its complaint raised instead of printed with the usage."""

    def error(self, message):
        raise Unusable(message)


# Copied from tp.py
def positive(text):
    """A whole number of at least 1, for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1")
    return int(text)


# Copied from tp.py
def write_whole(path, write):
    """Have write(another path) make the file, then name it path: whole or not at all, or Unusable."""
    draft = f"{path}.{os.getpid()}{Path(path).suffix}"
    try:
        write(draft)
        os.replace(draft, path)
    except (OSError, ValueError) as problem:  # a full disk; a picture of a kind that matplotlib lacks
        raise Unusable(f"cannot write {path}: {problem}") from None
    finally:
        Path(draft).unlink(missing_ok=True)


def parse(argv):
    """The arguments; Unusable where nothing of that shape can be computed that way."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--layout", choices=LAYOUTS, help="which one to walk through (sp); the others are checked, too")
    add("--tp-mode", choices=TP_MODES, help="Nanotron's names of --layout tp and sp")
    add("--tp", type=positive, default=2, help="ranks (2)")
    add("--batch", type=positive, default=2, help="sequences (2)")
    add("--seq", type=positive, default=12, help="tokens a sequence (12); ranks need not divide it")
    add("--hidden", type=positive, default=16, help="features of a token (16)")
    add("--heads", type=positive, default=4, help="attention heads (4)")
    add("--ffn", type=positive, default=64, help="features inside the MLP (64)")
    add("--json", metavar="FILE", help="write the results")
    add("--plot", metavar="FILE", help="draw the layout")
    add("--break", dest="bug", metavar="NAME", help="run with a bug that must be caught; list: name them")
    args = parser.parse_args(argv)
    asked = TP_MODES.get(args.tp_mode, args.layout or "sp")
    if args.layout not in (None, asked):
        raise Unusable(
            f"--tp-mode {args.tp_mode} is --layout {asked}, not {args.layout}; give one of the two"
        )
    args.layout, P = asked, args.tp
    numbers = args.batch * args.seq * max(args.heads * args.seq, args.ffn, 3 * args.hidden)
    broken = {bug.__name__: layouts for bug, layouts in BREAKS.items()}
    largest = max(numbers, args.hidden * max(args.ffn, 3 * args.hidden))
    for unusable, message in [
        (args.hidden % args.heads, f"--hidden {args.hidden} must be a multiple of --heads {args.heads}"),
        (args.hidden < 4, f"--hidden {args.hidden}: norms of so few features are all alike; 4 would do"),
        (asked != "cp" and args.heads < P, f"--tp {P}: --layout {asked} gives each rank whole heads, of "
         f"{args.heads}; --tp {args.heads} would do, or more --heads, or --layout cp"),
        (args.seq < P, f"--seq {args.seq} leaves some of {P} ranks without a token; {P} would do"),
        (args.ffn < P, f"--ffn {args.ffn} leaves some of {P} ranks without a feature; {P} would do"),
        (largest > LARGEST or P > 64, f"{P} ranks and a tensor of {largest:,} numbers are too much for one "
         f"process; 64 and {LARGEST:,} would do"),
        (args.plot and Path(args.plot).suffix not in (".png", ".pdf", ".svg"),
         f"--plot {args.plot}: the name must end in .png, .pdf or .svg"),
        (args.plot and len(COLOURS) < P, f"--plot has colours for {len(COLOURS)} ranks, not for {P}"),
        (args.plot and not importlib.util.find_spec("matplotlib"), "--plot needs: pip install matplotlib"),
        (args.bug and args.bug not in ["list", *broken], f"no bug {args.bug}; --break list names them"),
        (asked not in broken.get(args.bug, LAYOUTS), f"--break {args.bug} breaks nothing in --layout "
         f"{asked}, but in {', '.join(broken.get(args.bug, []))}"),
        (args.bug in broken and P == 1, "--break needs at least --tp 2; on one rank nothing is parallel"),
    ]:  # fmt: skip
        if unusable:
            raise Unusable(message)
    for path in (args.json, args.plot):
        if path and (Path(path).is_dir() or not os.access(Path(path).absolute().parent, os.W_OK)):
            raise Unusable(f"cannot write {path}: a directory, or in none that can be written")
    return args


def run(args):
    """Compute and check everything; returns what --json writes."""
    problem, P = make_problem(args), args.tp
    x, W, masks, _ = problem
    # The gradients of one device are those of one rank: there every collective does nothing.
    _, g, dW, *_ = simulate("tp", problem, argparse.Namespace(**{**vars(args), "tp": 1}))
    g, dW = ({name: xs[0] for name, xs in gradients.items()} for gradients in (g, dW))
    reference = one_device(x, W, masks), g, dW
    layouts = LAYOUTS if args.heads >= P else ["cp"]
    results = {
        "script": Path(__file__).name,
        **vars(args),
        "versions": {"python": sys.version.split()[0], "numpy": np.__version__},
    }
    results["finite_differences"] = finite_differences(problem, dW | {"x": g["x"]})
    if "sp" in layouts:
        of_features = each(layer_norm, cut(x, 2, P), cut(W["norm 1"], 0, P))
        results["norm_on_features"] = error(of_features, reference[0]["norm 1"], 2)
    results["layouts"] = {layout: check(layout, problem, reference, args) for layout in layouts}
    if args.bug:
        globals()[args.bug]()
        results["layouts"][args.layout] = check(args.layout, problem, reference, args)
    differences, checked = results["finite_differences"], results["layouts"]
    wrong = [f"{name}, against finite differences" for name, e in differences.items() if not e <= DIFFERENCES]
    wrong += [f"{layout}: {first}" for layout in layouts for first in checked[layout]["wrong"]]
    return results | {"wrong": wrong, "passed": not wrong}


def main(argv=None):
    """Returns the exit status: 0 all held, 1 a check failed, 2 unusable arguments."""
    try:
        args = parse(argv)
        if args.bug == "list":
            say_rows([[bug.__name__, ", ".join(layouts), bug.__doc__] for bug, layouts in BREAKS.items()])
            return 0
        results = run(args)
        report(results, args)
        if args.json:
            plain = json.loads(json.dumps(results), parse_constant=lambda name: None)  # JSON has no NaN: null
            write_whole(args.json, lambda path: Path(path).write_text(json.dumps(plain, indent=1) + "\n"))
        if args.plot:
            write_whole(args.plot, partial(draw, results, args))
    except Unusable as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    return 0 if results["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
