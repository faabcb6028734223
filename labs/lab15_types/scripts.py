"""The four scripts, one layer of each, and lab 3's pitfalls, as programs of lab 15.

All scripts are one model. HOW has what each of them puts into it, TYPES what its ranks have of
each argument. A bug of labs/break_it.py puts something else there, see BUGS.
"""

from functools import partial
from inspect import signature
from types import FunctionType
from unittest.mock import patch

from labs.lab15_types import lesson
from labs.lab15_types.lesson import HEADS, KV, D, H, S
from labs.lab15_types.typed import OPERATIONS, SHAPES, on

B, LENGTH, _ = SHAPES["x"]
SHAPES = SHAPES | {"last": (H,), "q_norm": (D,), "square": (H, H)}
SHAPES |= {"own_positions": (LENGTH // 2,), "own_tokens": (B, LENGTH // 2, H)}
MORE = {  # rules of what the lesson's programs do without
    "others": ("none", "*->*", ""),  # positions modulo s / P, targets masked; no gradient
    "shift": ("none", "bs->bs", "s"),  # each token's label is the next token
    "head_norm": ("last", "bsnd,d->bsnd", "d"),
    "transposed": ("add", "oi->io", ""),
}
(
    move, repeat_heads, reshape, add, subtract, multiply, silu, exp, log, total, mean, linear,
    norm, softmax, embedding, rotary, attention,
) = (getattr(lesson, name) for name in OPERATIONS)  # fmt: skip
operate = FunctionType(lesson.operate.__code__, vars(lesson) | {"rule": MORE.get})
others, shift, head_norm, transposed = (lesson.op(partial(operate, name), name) for name in MORE)


def same(y):
    return y


def to(src, dst):
    """A move, as a function of the tensor alone."""
    return lambda y: move(y, src, dst)


f, g, twice = to("I", "R"), to("P", "I"), to("P", "R")


def model(
    enter=same, leave=same, settle=same, end=same, own=(), attend=attention, positions=same,
    targets=same,
):  # fmt: skip
    """A program: embedding, one layer with norms of q and k, mean cross entropy.

    enter, leave: what moves x before and after the matrices; settle: what is done with sums
    over the vocabulary, end: with the loss. own: weights whose gradient is a summand on a rank.
    """

    def program(ids, **w):
        w |= {name: f(w[name]) for name in own}
        x = leave(embedding(ids, w["table"]))
        y = enter(norm(x, w["norm1"]))
        q, k, v = (linear(y, w[name]) for name in "qkv")
        q, k, v = (reshape(y, (*y.shape[:2], -1, D)) for y in (q, k, v))
        q, k = (rotary(positions(w["positions"]), head_norm(y, w["q_norm"])) for y in (q, k))
        k, v = (repeat_heads(y, HEADS // KV) for y in (k, v))
        y = attend(q, k, v)
        y = reshape(y, (*y.shape[:2], -1))
        x = add(x, leave(linear(y, w["o"])))
        y = enter(norm(x, w["norm2"]))
        y = multiply(silu(linear(y, w["gate"])), linear(y, w["up"]))
        x = add(x, leave(linear(y, w["down"])))
        logits = linear(enter(norm(x, w["last"])), w["head"])
        normalizer = settle(total(exp(logits)))
        target = settle(total(multiply(logits, targets(w["targets"]))))
        return end(mean(subtract(log(normalizer), target)))

    return program


def to_heads(*qkv):
    """Ulysses' attention: from tokens to heads, and back."""
    return move(attention(*(move(y, S(1), S(2)) for y in qkv)), S(2), S(1))


def stage_loss(loss):
    """Of two stages the last one has the loss."""
    return g(move(loss, "V", "P"))


def by_own_count(loss):
    return multiply(loss, lesson.Typed((), {"tp": "V"}))


NORMS = ["norm1", "norm2", "last", "q_norm"]
SHARDED = ["q", "k", "v", "gate", "up", "table", "head"]
WEIGHTS = dict.fromkeys([*NORMS, *SHARDED, "o", "down"], "I")
WHOLE = WEIGHTS | {"ids": "R", "positions": "R", "targets": "R"}
CUT = WHOLE | dict.fromkeys(SHARDED, S(0)) | {"o": S(1), "down": S(1), "targets": S(2)}
HOW = {
    "tp": {"enter": f, "leave": g, "settle": g, "own": ["q_norm"]},
    "sp_megatron": {"enter": to(S(1), "R"), "leave": to("P", S(1)), "settle": g, "own": NORMS},
    "sp_ulysses": {"own": WEIGHTS, "attend": to_heads, "end": g},
    "pp": {"own": ["table", "head"], "end": stage_loss},  # one tied weight, in both stages
    "no_op_parallelize": {},
}
TYPES = {  # of the arguments
    "tp": CUT,
    "sp_megatron": CUT,
    "sp_ulysses": WHOLE | {"ids": S(1), "positions": S(0), "targets": S(1)},
    "pp": WHOLE | dict.fromkeys(WEIGHTS, "V") | {"table": "I", "head": "I"},
    "no_op_parallelize": dict.fromkeys(WHOLE, "I"),  # every rank has all of it
}
BUGS = {  # of break_it.py; one that is not here changes numbers alone
    ("tp", "missing_backward_all_reduce"): {"enter": same},
    ("tp", "missing_forward_reduction"): {"leave": same},
    ("tp", "all_reduce_both_ways"): {"leave": twice, "settle": twice},
    ("tp", "local_softmax"): {"settle": same},
    ("tp", "unsummed_qk_norm_gradient"): {"own": []},
    ("tp", "loss_by_local_count"): {"end": by_own_count},
    ("sp_megatron", "missing_backward_reduction"): {"enter": to(S(1), "I")},
    ("sp_megatron", "missing_forward_reduction"): {"leave": same},
    ("sp_megatron", "local_softmax"): {"settle": same},
    ("sp_megatron", "unsummed_norm_gradient"): {"own": ["q_norm"]},
    ("sp_megatron", "local_position_ids"): {"positions": others},
    ("sp_megatron", "shift_after_split"): {"targets": others},
    ("sp_megatron", "loss_by_local_count"): {"end": by_own_count},
    ("sp_ulysses", "missing_gradient_sum"): {"own": []},
    ("sp_ulysses", "local_position_ids"): {"positions": others},
    ("sp_ulysses", "shift_after_split"): {"targets": others},
    ("sp_ulysses", "no_op_ulysses"): {"attend": attention},
    ("sp_ulysses", "loss_by_local_count"): {"end": lambda loss: by_own_count(g(loss))},
    ("pp", "untied_gradient"): {"own": []},
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
    "f_per_projection": (lambda x="I", k=S0, v=S0: add(linear(f(x), k), linear(f(x), v)), S2),
    # the first sequence summed, beside the others: add's rule
    "returned_tuples": (lambda x=S2, q=S1: add(g(linear(x, q)), linear(x, q)), "I"),
    # gathered without a gradient
    "loss_without_graph": (lambda x=S1: mean(others(move(x, S1, "I"))), "I"),
    # by arange(s / P), the same on every rank
    "local_positions": (lambda heads=S1, own_positions="R": rotary(own_positions, heads), S1),
    # by a triangle (s / P, s), the same on every rank
    "local_mask": (lambda x=S1, own_tokens="R": multiply(x, own_tokens), S1),
    "chunk_boundary": (lambda ids=S1: shift(ids), S1),
}


def checked(program, types, returns):
    """The TypeProblem of a program with types {argument: type}; None if it is accepted."""
    with patch.dict(lesson.SHAPES, SHAPES):
        return lesson.check(program, on(types), {"tp": returns})


def script_says(script, bug=None):
    """What the checker says to a script, such as tp, with a bug of break_it.py."""
    name = bug if bug in HOW else script
    return checked(model(**HOW[name] | BUGS.get((script, bug), {})), TYPES[name], "I")


def pitfall_says(name):
    """The same of a pitfall of lab 3; accepted, where it has no line that a type has."""
    if name not in PITFALLS:
        return None
    program, returns = PITFALLS[name]
    types = {name: each.default for name, each in signature(program).parameters.items()}
    return checked(program, types, returns)
