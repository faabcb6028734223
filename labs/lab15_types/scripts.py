"""The four scripts, one layer of each, and lab 3's pitfalls, as programs of lab 15.

A program has a script's moves and operations, TYPES the types of its weights. nets.py writes
the bugs of labs/break_it.py into these lines.
"""

from functools import partial
from inspect import signature
from types import FunctionType
from unittest.mock import patch

from labs.lab15_types import lesson
from labs.lab15_types.lesson import HEADS, KV, D, H, S
from labs.lab15_types.typed import OPERATIONS, SHAPES, on

B, LENGTH, _ = SHAPES["x"]
SHAPES = SHAPES | {"labels": (B, LENGTH), "own_count": (), "received": (B, LENGTH, H)}
SHAPES |= {"last": (H,), "q_norm": (D,), "square": (H, H), "own_positions": (LENGTH // 2,)}
SHAPES |= {"own_tokens": (B, LENGTH // 2, H)}
MORE = {  # rules of what the lesson's programs do without
    "pick": ("multiply", "bsv,bs->bs", ""),  # the logit of each label; on other ranks zero
    "shift": ("none", "bs->bs", "s"),  # each token's label is the next token
    "scale": ("multiply", "*,->*", ""),  # times one number
    "masked": ("none", "bs->bs", ""),  # some labels set to IGNORE
    "modulo": ("none", "s->s", ""),  # positions, number by number
    "roll_heads": ("add", "bsnd->bsnd", "n"),
    "roll_sequences": ("none", "bs->bs", "b"),
    "head_norm": ("last", "bsnd,d->bsnd", "d"),
    "transposed": ("add", "oi->io", ""),
    "gather_gradless": ("none", "*->*", ""),
}
(
    move, repeat_heads, reshape, add, subtract, multiply, silu, exp, log, total, mean, linear,
    norm, softmax, embedding, rotary, attention,
) = (getattr(lesson, name) for name in OPERATIONS)  # fmt: skip
operate = FunctionType(lesson.operate.__code__, vars(lesson) | {"rule": MORE.get})
(
    pick, shift, scale, masked, modulo, roll_heads, roll_sequences, head_norm,
    transposed, gradless,
) = (lesson.op(partial(operate, name), name) for name in MORE)  # fmt: skip


def same(y):
    return y


def layer(x, w, enter, leave, own=same, attention=attention):
    """One layer; enter and leave: what moves x before and after the matrices."""
    y = enter(norm(x, own(w["norm1"])))
    q, k, v = (linear(y, own(w[name])) for name in "qkv")
    q, k, v = (reshape(y, (*y.shape[:2], -1, D)) for y in (q, k, v))
    q, k = (rotary(w["positions"], y) for y in (q, k))
    k, v = (repeat_heads(y, HEADS // KV) for y in (k, v))
    y = attention(q, k, v)
    y = reshape(y, (*y.shape[:2], -1))
    x = add(x, leave(linear(y, own(w["o"]))))
    y = enter(norm(x, own(w["norm2"])))
    y = multiply(silu(linear(y, own(w["gate"]))), linear(y, own(w["up"])))
    return add(x, leave(linear(y, own(w["down"]))))


def mean_loss(logits, labels, settle):
    """Mean cross entropy; settle: what is done with sums over the vocabulary."""
    normalizer, own = settle(total(exp(logits))), settle(pick(logits, labels))
    return mean(subtract(log(normalizer), own))


def f(y):
    return move(y, "I", "R")


def g(y):
    return move(y, "P", "I")


def tp(ids, labels, table, head, last, own_count, **w):
    x = layer(g(embedding(ids, table)), w, f, g)
    loss = mean_loss(linear(f(norm(x, last)), head), shift(labels), g)
    return loss


def sp_megatron(ids, labels, table, head, last, own_count, **w):
    def gather(y):
        return move(y, S(1), "R")

    def scatter(y):
        return move(y, "P", S(1))

    def whole(weight):  # norms work on this rank's tokens alone
        return move(weight, "I", "R") if len(weight.shape) == 1 else weight

    x = layer(scatter(embedding(ids, table)), w, gather, scatter, whole)
    logits = linear(gather(norm(x, whole(last))), head)
    loss = mean_loss(logits, shift(labels), g)
    return loss


def sp_ulysses(ids, labels, table, head, last, own_count, **w):
    def whole(weight):  # every weight works on this rank's tokens alone
        return move(weight, "I", "R")

    def all_to_all(q, k, v):  # tokens to heads, and back
        y = attention(*(move(y, S(1), S(2)) for y in (q, k, v)))
        return move(y, S(2), S(1))

    labels = move(shift(labels), "R", S(1))
    w["positions"] = move(w["positions"], "R", S(0))
    ids = move(ids, "R", S(1))
    x = layer(embedding(ids, whole(table)), w, same, same, whole, all_to_all)
    logits = linear(norm(x, whole(last)), whole(head))
    loss = g(mean_loss(logits, labels, same))
    return loss


def pp(ids, labels, table, last, received, **w):
    """Two stages, tied embedding: stage 0 has it at its entrance, stage 1 at its exit."""
    tied = move(table, "I", "R")
    losses = []
    for _ in "01":  # microbatches; stage 1 adds nothing of its own to what it receives
        x = layer(add(embedding(ids, tied), received), w, same, same)
        loss = mean_loss(linear(norm(x, last), tied), shift(labels), same)
        losses.append(move(loss, "V", "P"))  # stage 1's; stage 0 has none
    return g(add(*losses))


def unsharded(ids, labels, table, head, last, **w):
    """no_op_parallelize: no move at all, every rank has all of it."""
    x = layer(embedding(ids, table), w, same, same)
    return mean_loss(linear(norm(x, last), head), shift(labels), same)


def qk_norm(x, q, q_norm):  # what Qwen3 has beside LLaMA: one weight for all heads
    y = linear(f(x), q)
    return head_norm(reshape(y, (*y.shape[:2], -1, D)), move(q_norm, "I", "R"))


COMMON = {"ids": "R", "labels": "R", "positions": "R", "own_count": "V"}
WEIGHTS = ["norm1", "norm2", "last", "q", "k", "v", "gate", "up", "table", "head", "o", "down"]
REPLICATED = COMMON | dict.fromkeys(WEIGHTS, "I")
SHARDED = REPLICATED | dict.fromkeys(WEIGHTS[3:10], S(0)) | {"o": S(1), "down": S(1)}
STAGE = REPLICATED | dict.fromkeys([*WEIGHTS, "received"], "V") | {"table": "I"}
TYPES = {  # program: (types of its arguments, of its result)
    "tp": (SHARDED, "I"),
    "sp_megatron": (SHARDED, "I"),
    "sp_ulysses": (REPLICATED, "I"),
    "pp": ({name: STAGE[name] for name in STAGE if name not in ("head", "own_count")}, "I"),
    "unsharded": (dict.fromkeys(["ids", "labels", "positions", *WEIGHTS], "I"), "I"),
    "qk_norm": ({"x": "I", "q": S(0), "q_norm": "I"}, S(2)),
}
S0, S1, S2 = S(0), S(1), S(2)
PITFALLS = {  # of lab 3, where they have a line that a type has; defaults are arguments' types
    # two parameters, where there was one
    "untied_weights": (
        lambda ids="R", table=S0, head=S0: linear(f(g(embedding(ids, table))), head),
        S2,
    ),
    # columns, turned over: fits, as the matrix is square
    "transposed_weights": (lambda x="I", square=S1: linear(f(x), transposed(square)), S2),
    # right, and one message more in the backward
    "f_per_projection": (
        lambda x="I", gate=S0, up=S0: multiply(linear(f(x), gate), linear(f(x), up)),
        S2,
    ),
    # the first sequence summed, beside the others: add's rule
    "returned_tuples": (
        lambda x=S2, square=S1: add(g(linear(x, square)), linear(x, square)),
        "I",
    ),
    # gathered without a gradient
    "loss_without_graph": (lambda x=S1: mean(gradless(move(x, S1, "I"))), "I"),
    # by arange(s / P), the same on every rank
    "local_positions": (lambda heads=S1, own_positions="R": rotary(own_positions, heads), S1),
    # by a triangle (s / P, s), the same on every rank
    "local_mask": (lambda x=S1, own_tokens="R": multiply(x, own_tokens), S1),
    "chunk_boundary": (lambda ids=S1: shift(ids), S1),
}


def said(name):
    """The TypeProblem of a program; None if it is accepted."""
    if name in PITFALLS:
        program, returns = PITFALLS[name]
        types = {n: p.default for n, p in signature(program).parameters.items()}
    else:
        program, (types, returns) = globals()[name], TYPES[name]
    with patch.dict(lesson.SHAPES, SHAPES):
        return lesson.check(program, on(types), {"tp": returns})
