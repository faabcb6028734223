"""The bugs of labs/break_it.py and of lab 3, as programs of lab 15: what its checker says to each.

Each script is transcribed once, one layer of it: its moves, its operations, its weights' types. A
bug is what break_it.py changes, as a change of the operations that the program calls.
"""

import functools
from types import SimpleNamespace

from labs.lab15_types.typed import OPERATIONS, S, finished
from labs.lab15_types.typed import SHAPES as KNOWN

B, LENGTH, H = KNOWN["x"]
MORE = {  # operations of the scripts that the lesson's programs do without
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
SHAPES = KNOWN | {"labels": (B, LENGTH), "own_count": (), "received": (B, LENGTH, H)}
SHAPES |= {"norm": (H,), "q_norm": (finished.D,), "square": (H, H), "own_positions": (LENGTH // 2,)}
SHAPES |= {"own_tokens": (B, LENGTH // 2, H)}


def same(y):
    return y


def layer(o, x, w, enter, leave, own=lambda weight: weight):
    """One layer; enter and leave: what moves x before and after the matrices."""
    y = enter(o.norm(x, own(w["norm1"])))
    q, k, v = (o.linear(y, own(w[name])) for name in "qkv")
    y = o.attend(q, k, v, w["positions"])
    x = o.add(x, leave(o.linear(y, own(w["o"]))))
    y = enter(o.norm(x, own(w["norm2"])))
    y = o.multiply(o.silu(o.linear(y, own(w["gate"]))), o.linear(y, own(w["up"])))
    return o.add(x, leave(o.linear(y, own(w["down"]))))


def attend(o, q, k, v, positions):
    """Heads of q, k, v, turned, repeated, attended to; in Ulysses exchanged for tokens."""
    q, k, v = (o.reshape(y, (*y.shape[:2], -1, finished.D)) for y in (q, k, v))
    q, k = o.rotary(positions, q), o.rotary(positions, k)
    k, v = (o.repeat_heads(y, finished.HEADS // finished.KV) for y in (k, v))
    y = o.heads_to_tokens(o.attention(*map(o.tokens_to_heads, (q, k, v))))
    return o.reshape(y, (*y.shape[:2], -1))


def vocabulary_loss(o, logits, labels, settle):
    """Mean cross entropy; settle: what is done with sums over the vocabulary."""
    normalizer, own = settle(o.total(o.exp(logits))), settle(o.pick(logits, labels))
    return o.mean(o.subtract(o.log(normalizer), own))


def tp(o, /, ids, labels, table, head, norm, own_count, **w):
    def f(y):
        return o.move(y, "I", "R")

    def g(y):
        return o.move(y, "P", "I")

    x = layer(o, g(o.embedding(ids, table)), w, f, g)
    logits = o.linear(f(o.norm(x, norm)), head)
    return o.count(vocabulary_loss(o, logits, o.shift(labels), g), own_count)


def sp_megatron(o, /, ids, labels, table, head, norm, own_count, **w):
    def gather(y):
        return o.move(y, S(1), "R")

    def scatter(y):
        return o.move(y, "P", S(1))

    def whole(weight):  # norms work on this rank's tokens alone
        return o.move(weight, "I", "R") if len(weight.shape) == 1 else weight

    w["positions"] = o.turn(w["positions"])
    x = layer(o, scatter(o.embedding(ids, table)), w, gather, scatter, whole)
    logits = o.linear(gather(o.norm(x, whole(norm))), head)
    labels = o.label(o.shift(labels))
    loss = vocabulary_loss(o, logits, labels, lambda y: o.move(y, "P", "I"))
    return o.count(loss, own_count)


def sp_ulysses(o, /, ids, labels, table, head, norm, own_count, **w):
    def whole(weight):  # every weight works on this rank's tokens alone
        return o.move(weight, "I", "R")

    labels = o.label(o.move(o.shift(labels), "R", S(1)))
    w["positions"] = o.turn(o.move(w["positions"], "R", S(0)))
    ids = o.move(ids, "R", S(1))
    x = layer(o, o.embedding(ids, whole(table)), w, same, same, whole)
    logits = o.linear(o.norm(x, whole(norm)), whole(head))
    loss = o.move(vocabulary_loss(o, logits, labels, same), "P", "I")
    return o.count(loss, own_count)


def pp(o, /, ids, labels, table, norm, received, **w):
    """Two stages, tied embedding: stage 0 has it at its entrance, stage 1 at its exit."""
    tied = o.move(table, "I", "R")
    losses = []
    for _ in "01":  # microbatches; stage 1 adds nothing of its own to what it receives
        x = layer(o, o.add(o.embedding(ids, tied), o.receive(received)), w, same, same)
        logits = o.linear(o.norm(x, norm), tied)
        loss = vocabulary_loss(o, logits, o.label(o.shift(labels)), same)
        losses.append(o.weigh(o.move(loss, "V", "P")))  # stage 1's; stage 0 has none
    return o.move(o.accumulate(*losses), "P", "I")


def qk_norm(o, x, q, q_norm):  # what Qwen3 has beside LLaMA: one weight for all heads
    y = o.linear(o.move(x, "I", "R"), q)
    return o.head_norm(o.reshape(y, (*y.shape[:2], -1, finished.D)), o.share(q_norm))


QK_NORM = {"x": "I", "q": S(0), "q_norm": "I"}
IDS = {"ids": "R", "labels": "R", "own_count": "V"}
WEIGHTS = {"positions": "R", "norm1": "I", "norm2": "I", "norm": "I"}
ROWS = dict.fromkeys(("q", "k", "v", "gate", "up", "table", "head"), S(0))
SHARDED = IDS | WEIGHTS | ROWS | {"o": S(1), "down": S(1)}
REPLICATED = IDS | WEIGHTS | dict.fromkeys([*ROWS, "o", "down"], "I")
STAGE = {"ids": "R", "labels": "R", "table": "I", "positions": "R", "received": "V", "norm": "V"}
STAGE |= dict.fromkeys([*"qkvo", "norm1", "norm2", "gate", "up", "down"], "V")
SCRIPTS = {  # program, types of its arguments
    "tp": (tp, SHARDED),
    "sp_megatron": (sp_megatron, SHARDED),
    "sp_ulysses": (sp_ulysses, REPLICATED),
    "pp": (pp, STAGE),
}


def one_device_program(o, /, ids, labels, table, head, norm, **w):
    """no_op_parallelize: no move at all, every rank has all of it."""
    x = layer(o, o.embedding(ids, table), w, same, same)
    logits = o.linear(o.norm(x, norm), head)
    return vocabulary_loss(o, logits, o.shift(labels), same)


ALL_THE_SAME = dict.fromkeys(["ids", "labels", "positions", *REPLICATED], "I")
del ALL_THE_SAME["own_count"]


def no_exchange(o):
    o.tokens_to_heads = o.heads_to_tokens = same


def operations(script):
    """The lab's operations, and what the scripts have beside them, as a namespace to change."""
    o = SimpleNamespace(**{name: getattr(finished, name) for name in OPERATIONS})
    for name in MORE:
        setattr(o, name, finished.op(functools.partial(finished.operate, name), name))
    o.attend = functools.partial(attend, o)
    no_exchange(o)
    if script == "sp_ulysses":
        o.tokens_to_heads = lambda y: o.move(y, S(1), S(2))
        o.heads_to_tokens = lambda y: o.move(y, S(2), S(1))
    for name in ("turn", "label", "receive", "weigh"):
        setattr(o, name, same)
    o.count = lambda loss, own: loss
    o.share = lambda weight: o.move(weight, "I", "R")
    o.accumulate = o.add
    return o


def without(o, src, dst):
    """Leave out the moves from src to dst: P, where P is what is there."""
    right = o.move
    o.move = lambda x, *how: x if how[:2] == (src, dst) else right(x, *how)


def instead(o, src, dst, other):
    """Move to another type."""
    right = o.move
    o.move = lambda x, *how: right(x, src, other) if how[:2] == (src, dst) else right(x, *how)


CHANGES = {  # what a bug changes in the operations; the others change numbers alone
    "tp missing_backward_all_reduce": lambda o: without(o, "I", "R"),
    "sp_megatron missing_backward_reduction": lambda o: instead(o, S(1), "R", "I"),  # I to S: cut
    "tp missing_forward_reduction": lambda o: without(o, "P", "I"),
    "sp_megatron missing_forward_reduction": lambda o: without(o, "P", S(1)),
    "tp all_reduce_both_ways": lambda o: instead(o, "P", "I", "R"),
    "tp local_softmax": lambda o: local_softmax(o),
    "sp_megatron local_softmax": lambda o: local_softmax(o),
    "tp unsummed_qk_norm_gradient": lambda o: vars(o).update(share=lambda weight: weight),
    "sp_megatron unsummed_norm_gradient": lambda o: without(o, "I", "R"),
    "sp_ulysses missing_gradient_sum": lambda o: without(o, "I", "R"),
    "sp_megatron local_position_ids": lambda o: vars(o).update(turn=o.modulo),
    "sp_ulysses local_position_ids": lambda o: vars(o).update(turn=o.modulo),
    "sp_megatron shift_after_split": lambda o: vars(o).update(label=o.masked),
    "sp_ulysses shift_after_split": lambda o: vars(o).update(label=o.masked),
    "sp_ulysses no_op_ulysses": lambda o: no_exchange(o),
    "sp_ulysses wrong_head_order": lambda o: rolled(o),
    "pp overwritten_gradients": lambda o: vars(o).update(accumulate=lambda first, last: last),
    "pp untied_gradient": lambda o: without(o, "I", "R"),
    "pp swapped_labels": lambda o: vars(o).update(label=o.roll_sequences),
    "tp loss_by_local_count": lambda o: vars(o).update(count=o.scale),
    "sp_megatron loss_by_local_count": lambda o: vars(o).update(count=o.scale),
    "sp_ulysses loss_by_local_count": lambda o: vars(o).update(count=o.scale),
}


def local_softmax(o):
    """No sum over the ranks of what the loss sums over the vocabulary."""
    total, pick, move, open_sums = o.total, o.pick, o.move, []

    def kept(function):
        def call(*args):
            open_sums.append(function(*args))
            return open_sums[-1]

        return call

    o.total, o.pick = kept(total), kept(pick)
    o.move = lambda x, *how: x if any(x is y for y in open_sums) else move(x, *how)


def rolled(o):
    right = o.heads_to_tokens
    o.heads_to_tokens = lambda y: o.roll_heads(right(y))


# ---- Lab 3's pitfalls, where a program has a part of them ----------------------------------------


def transposed_weights(o, x, square):  # columns, turned over: fits, as the matrix is square
    return o.linear(o.move(x, "I", "R"), o.transposed(square))


def f_per_projection(o, x, gate, up):  # right, and one message more in the backward
    return o.multiply(o.linear(o.move(x, "I", "R"), gate), o.linear(o.move(x, "I", "R"), up))


def returned_tuples(o, x, up, down):  # the first sequence summed, beside the others: add's rule
    y = o.linear(o.linear(o.move(x, "I", "R"), up), down)
    return o.add(o.move(y, "P", "I"), y)


def untied_weights(o, ids, table, head):  # two parameters, where there was one
    x = o.move(o.embedding(ids, table), "P", "I")
    return o.linear(o.move(x, "I", "R"), head)


def loss_without_graph(o, x):  # gathered without a gradient
    return o.mean(o.gather_gradless(o.move(x, S(1), "I")))


TURN = {"heads": S(1), "own_positions": "R"}  # by arange(s / P), the same on every rank
MASK = {"x": S(1), "own_tokens": "R"}  # by a triangle (s / P, s), the same on every rank
LAB3 = {  # pitfall: (program, types, result); the others have no line that a type has
    "transposed_weights": (transposed_weights, {"x": "I", "square": S(1)}, S(2)),
    "untied_weights": (untied_weights, {"ids": "R", "table": S(0), "head": S(0)}, S(2)),
    "f_per_projection": (f_per_projection, {"x": "I", "gate": S(0), "up": S(0)}, S(2)),
    "returned_tuples": (returned_tuples, {"x": "I", "up": S(0), "down": S(1)}, "I"),
    "local_positions": (lambda o, heads, own_positions: o.rotary(own_positions, heads), TURN, S(1)),
    "local_mask": (lambda o, x, own_tokens: o.multiply(x, own_tokens), MASK, S(1)),
    "chunk_boundary": (lambda o, ids: o.shift(ids), {"ids": S(1)}, S(1)),
    "loss_without_graph": (loss_without_graph, {"x": S(1)}, "I"),
}


def said(program, types, returns):
    """The TypeProblem of a program (its operations partially applied), or None."""
    rule, shapes = finished.rule, dict(finished.SHAPES)
    finished.rule = lambda name: MORE[name] if name in MORE else rule(name)
    finished.SHAPES.update(SHAPES)
    try:
        own = {name: {"tp": type} for name, type in types.items()}
        return finished.check(program, own, {"tp": returns})
    finally:
        finished.rule = rule
        finished.SHAPES.clear()
        finished.SHAPES.update(shapes)


def script_says(script, bug=None):
    """What the checker says to a script's program with a bug of break_it.py; None: accepted."""
    program, types = SCRIPTS[script]
    if bug == "no_op_parallelize":
        return said(functools.partial(one_device_program, operations("")), ALL_THE_SAME, "I")
    o = operations(script)
    CHANGES.get(f"{script} {bug}", lambda o: None)(o)
    if bug == "unsummed_qk_norm_gradient":
        return said(functools.partial(qk_norm, o), QK_NORM, S(2))
    return said(functools.partial(program, o), types, "I")


def pitfall_says(name):
    """The same of a pitfall of lab 3; accepted, where it has no line that a type has."""
    if name not in LAB3:
        return None
    program, types, returns = LAB3[name]
    return said(functools.partial(program, operations("lab3")), types, returns)
