"""Lab 15: Types. Which mistakes are seen before any rank starts?

Question: a norm's gradient is not summed over the ranks; an all-reduce stands there twice. The
proofs of this suite see both, with ranks, data and a second model. Could a program be refused
for its text alone, as a compiler refuses to add a number to a list?

Idea: on each axis of the mesh a tensor has a type. It says what a rank has of the tensor and
of its gradient:

    type           a rank has of the tensor     of its gradient   for example
    R replicated   all, the same as the others  P                 x of a column parallel layer
    I invariant    all, the same as the others  I                 the residual stream, a norm
    P partial      a summand                    R                 what a row parallel layer gives
    S(d) sharded   a slice along dimension d    S(d)              the shard of a weight
    V varying      no more is known             V                 its own number of targets

R and I are the same numbers. R goes into work that differs from rank to rank, so each rank has a
summand of its gradient; I goes into the same work everywhere. Each operation has a rule (P + P is
P, I + P is a mistake). A collective moves a tensor from one type to another, and its backward
moves the gradient back, between the gradients' types:

    f    x = move(x, "I", "R")    forward nothing       backward P to I: an all-reduce
    g    y = move(y, "P", "I")    forward all-reduce    backward I to R: nothing

The programs at the end run on shapes and types, without ranks or data. The checks run the same
text on numbers, with each rank's slices and summands, and compare it with one device.

    python labs/lab15_types/lesson.py --plot lab15.png  # checks and experiments
    python labs/lab15_types/lesson.py --predict 3       # first your guess; see the end
    python labs/grade.py start lab15                    # writes my_labs/lab15_types.py

Sources: spmd_types (PyPI), whose types these are; blog.ezyang.com, 2026; f and g: 1909.08053.
"""

import dataclasses
import functools
import itertools
import math
import sys
from pathlib import Path

B, LENGTH, H, HEADS, KV, D, WIDTH, VOCABULARY, RANK = 2, 4, 8, 8, 2, 2, 12, 16, 2


class TypeProblem(Exception):
    """What does not fit; op() adds in which call and line, with which operands."""


@dataclasses.dataclass
class Typed:
    """A tensor without numbers: the shape of the full tensor, its type on each axis of the mesh,
    and, if a move() made it, (number of that call, from which type, to which, axis)."""

    shape: tuple
    types: dict
    moved: tuple = ()


def S(dim):
    """The type of a tensor that is sharded along a dimension."""
    return f"S({dim})"


def sharded_dim(type):
    """The dimension of a type S(d); None for the letters R, I, P and V."""
    return int(type[2:-1]) if type[0] == "S" else None


# ---- The lesson 1: gradients and moves -----------------------------------------------------------


def gradient(type):
    """The type of the gradient of a tensor of this type."""
    # exercise: gradient
    return {"R": "P", "P": "R"}.get(type, type)
    # end exercise


def backward(src, dst):
    """(from which type, to which type) the backward of a move from src to dst takes a gradient."""
    # exercise: gradient
    return gradient(dst), gradient(src)
    # end exercise


MOVES = {  # by the types' first letters: what a rank has to do; each one's backward is here, too
    "IR RI RV VP": "nothing",
    "PR PI": "sum over the ranks",
    "RP IP": "zeros, but on the first rank",
    "SR SI": "all slices beside each other",
    "RS IS": "its slice",
    "PS": "its slice of the sum over the ranks",
    "SP": "zeros around its slice",
    "SS": "its slice along another dimension",
}


def sent(src, dst):
    """The collective of a move (all_reduce, all_gather, reduce_scatter, all_to_all), or None.

    None: a rank can do what MOVES says without a message.
    """
    # exercise: sent
    if src[0] == "P":
        return "reduce_scatter" if dst[0] == "S" else "all_reduce"
    return {"SR": "all_gather", "SI": "all_gather", "SS": "all_to_all"}.get(src[0] + dst[0])
    # end exercise


# ---- The lesson 2: what an operation makes of its operands' types --------------------------------


def combine_letters(kind, types):
    """The type of an operation's result on an axis, of operands of types R, I, P, V.

    kind: in what the operation is linear. "add": in all operands together; "multiply": in each of
    them, the others held fixed; "last": in the last alone; "none": in none. I goes with I
    only. V with V or R gives V. P gives P in "add" if all are P, in "multiply" if one is P and
    the rest are R, in "last" if the last is P and the rest R. Else raises TypeProblem.
    """
    # exercise: letters
    found = set(types)
    if "I" in found and len(found) > 1:
        raise TypeProblem(f"{', '.join(types)}: the gradient of what is I would be a summand")
    if "P" not in found:
        return "V" if "V" in found else types[0]
    fits = {"add": found == {"P"}, "multiply": types.count("P") == 1}
    fits["last"] = types.index("P") == len(types) - 1
    if not fits.get(kind) or "V" in found:
        raise TypeProblem(f"{', '.join(types)}: the sum over the ranks has to come first")
    return "P"
    # end exercise


def combine_shards(labels, out, whole, types):
    """The type of an operation's result on an axis, where at least one operand is sharded.

    labels: a letter for each dimension of each operand, as in einsum; out: the result's; a
    letter that out lacks is summed over. whole: letters along which one number needs all
    others. I or P beside a shard raises TypeProblem. Else V beside anything gives V. Else S may
    stand beside S of the same letter, or beside R without that letter (else R has to be cut
    first), and the result is sharded along the letter, or P if out lacks it. All others raise
    TypeProblem, as does a letter in whole.
    """
    # exercise: shards
    dims = [sharded_dim(type) for type in types]
    names = {label[dim] for label, dim in zip(labels, dims) if dim is not None}
    if {"I", "P"} & set(types):
        raise TypeProblem(f"{', '.join(types)}: a shard beside what is I or P")
    if "V" in types:
        return "V"
    if len(names) > 1:
        raise TypeProblem(f"{', '.join(types)}: each rank would have a block of the diagonal")
    (name,) = names
    if name in whole:
        raise TypeProblem(f"{', '.join(types)}: along the sharded dimension all numbers are needed")
    if any(dim is None and name in label for label, dim in zip(labels, dims)):
        raise TypeProblem(f"{', '.join(types)}: a slice of one, all of the other")
    return S(out.index(name)) if name in out else "P"
    # end exercise


def rule(name):
    """(kind, dimensions as in einsum, letters along which one number needs all others).

    linear: x (b, s, i), weight (o, i) -> (b, s, o). norm: RMSNorm of x (b, s, h) along h, times
    weight (h). softmax: of x (b, s, v) along v. embedding: rows of a table (v, h) by ids (b, s);
    rows that a rank lacks give zero: a sum over v. attention: q (b, s, n, d), k (b, t, n, d), v (b,
    t, n, e), causal: a number needs all tokens and all of d, not all of e.
    """
    known = {  # * is as many letters as are needed
        "multiply": ("multiply", "*,*->*", ""),  # number by number
        "total": ("add", "*v->*", ""),  # the sum along the last dimension
        "mean": ("add", "*->", ""),  # of all numbers; the divisor is known beforehand
        "rotary": ("last", "s,bsnd->bsnd", "d"),  # positions (s) turn q or k (b, s, n, d)
    }
    known |= dict.fromkeys(("add", "subtract"), ("add", "*,*->*", ""))
    known |= dict.fromkeys(("silu", "exp", "log"), ("none", "*->*", ""))
    # exercise: rules
    known["linear"] = "multiply", "bsi,oi->bso", ""
    known["norm"] = "last", "bsh,h->bsh", "h"
    known["softmax"] = "none", "bsv->bsv", "v"
    known["embedding"] = "last", "bs,vh->bsh", ""
    known["attention"] = "last", "bsnd,btnd,btne->bsne", "std"
    # end exercise
    return known[name]


def operate(name, *xs):
    """The result of an operation; raises TypeProblem where types or sizes do not fit."""
    kind, equation, whole = rule(name)
    equation = equation.replace("*", "abcdefg"[: len(xs[0].shape) - ("*v" in equation)])
    *labels, out = equation.replace("->", ",").split(",")
    pairs = [pair for label, x in zip(labels, xs) for pair in zip(label, x.shape)]
    sizes, types = dict(pairs), {}
    lengths = [len(label) - len(x.shape) for label, x in zip(labels, xs)]
    if any(lengths) or any(sizes[name] != size for name, size in pairs):
        raise TypeProblem(f"sizes {', '.join(str(x.shape) for x in xs)}")
    for axis in xs[0].types:
        own = [x.types[axis] for x in xs]
        if any(type[0] == "S" for type in own):
            types[axis] = combine_shards(labels, out, whole, own)
        else:
            types[axis] = combine_letters(kind, own)
    return Typed(tuple(sizes[name] for name in out), types)


# ---- The lesson 3: the operations; each call has a number, and a line if it does not fit ---------


CALLS = itertools.count()  # numbers the calls of the program that is being checked
EDITS = {}  # {number of a call: (operand or None, src, dst, axis)}: what to change, see check()


def op(function, name=None):
    """Make a function of Typed tensors an operation: its calls are numbered, and can be edited."""
    name = name or function.__name__

    @functools.wraps(function)
    def call(*args):
        number, args = next(CALLS), list(args)
        args = [*args, "tp"][:4] if name == "move" else args
        i, *how = EDITS.get(number, (None,))
        if i is not None:
            args[i].types = moved(args[i], *how).types  # for its later uses, too
        elif how:
            args[1:] = how
        try:
            made = function(*args)
        except TypeProblem as problem:
            problem.line = sys._getframe(1).f_lineno
            problem.call, problem.operation, problem.operands = number, name, args
            raise
        made.moved = (number, *args[1:]) if name == "move" else ()
        return made

    return call


def moved(x, src, dst, axis="tp"):
    """x with another type on one axis: a collective, or what each rank can do alone."""
    if x.types[axis] != src:
        raise TypeProblem(f"a move from {src}, of what is {x.types[axis]} on the axis {axis}")
    known = {*"RIPV", *map(S, range(len(x.shape)))}
    if src != dst and src[0] + dst[0] not in " ".join(MOVES).split() or not {src, dst} <= known:
        raise TypeProblem(f"no rank can move {src} to {dst}")
    return Typed(x.shape, x.types | {axis: dst})


@op
def give_back(x, types):
    """The end of a program: what it returns has to be of these types."""
    if x.types != types:
        raise TypeProblem(f"the result is {x.types}, and should be {types}")
    return x


@op
def repeat_heads(x, times):
    """Each head of x (b, s, n, d) several times in a row: (b, s, n times, d)."""
    b, s, n, d = x.shape
    return Typed((b, s, n * times, d), dict(x.types))


@op
def reshape(x, shape):
    """x, its numbers in the same order, in another shape.

    -1 is what is left. R, I, P and V stay. S(d) becomes S(e) if dimension e of the new shape
    has more than one number and begins where d did: the dimensions before d and before e have
    the same product. If there is no such e, TypeProblem.
    """
    size = math.prod(x.shape)
    shape = tuple(n if n > 0 else -size // math.prod(shape) for n in shape)
    # exercise: reshape
    types = dict(x.types)
    for axis, d in ((axis, sharded_dim(type)) for axis, type in x.types.items()):
        before = math.prod(x.shape[:d])
        if d is not None:
            fits = [e for e, n in enumerate(shape) if math.prod(shape[:e]) == before and n > 1]
            if not fits:
                raise TypeProblem(f"S({d}) of {x.shape}: no dimension of {shape} begins there")
            types[axis] = S(fits[0])
    return Typed(shape, types)
    # end exercise


def operations(names):
    """The operations of rule() with these names."""
    return [op(functools.partial(operate, name), name) for name in names.split()]


move = op(moved, "move")
add, subtract, multiply, silu, exp, log = operations("add subtract multiply silu exp log")
total, mean, linear, norm, softmax = operations("total mean linear norm softmax")
embedding, rotary, attention = operations("embedding rotary attention")


# ---- The lesson 4: a program is accepted, or the line is named and what would mend it ------------


def check(program, types, returns, edits=None):
    """Run a program on types: None if it is accepted, else its first TypeProblem.

    types: {argument: {axis: type}}; returns: {axis: type} of the result. edits: what to change,
    {number of a call: (i, src, dst, axis)}: if i is a number, operand i is moved first, for all of
    its later uses, too; if i is None, the call is a move, from src to dst (src, src: left out).
    """
    global CALLS
    CALLS = itertools.count()
    EDITS.clear()
    EDITS.update(edits or {})
    try:
        result = program(**{name: Typed(SHAPES[name], own) for name, own in types.items()})
        give_back(result, returns)
    except TypeProblem as problem:
        return problem
    return None


def mend(program, types, returns, problem):
    """The first edit with which the whole program is accepted, (number of a call, edit), or None.

    problem.call is the number of the call that does not fit, .operation its name, .operands
    its arguments, of which only Typed ones count. Try in this order, by check(), each with dst
    "R", "I", S(0), .. for every dimension of the operand x, "P":

    1. if the call is a move: leave it out
    2. for each operand that a move made (x.moved): let that move go to dst
    3. before each operand, on each axis: add a move to dst (it stays moved)
    """
    # exercise: mend
    operands = [(i, x) for i, x in enumerate(problem.operands) if isinstance(x, Typed)]
    targets = {i: ["R", "I", *map(S, range(len(x.shape))), "P"] for i, x in operands}
    edits = []
    if problem.operation == "move":
        x, *_, axis = problem.operands
        edits.append((problem.call, (None, x.types[axis], x.types[axis], axis)))
    for i, x in operands:
        if x.moved:
            number, src, _, axis = x.moved
            edits += [(number, (None, src, dst, axis)) for dst in targets[i]]
    for i, x in operands:
        for axis, src in x.types.items():
            edits += [(problem.call, (i, src, dst, axis)) for dst in targets[i]]
    return next((e for e in edits if not check(program, types, returns, dict([e]))), None)
    # end exercise


# ---- The lesson 5: programs ----------------------------------------------------------------------

SHAPES = {"x": (B, LENGTH, H), "positions": (LENGTH,), "norm1": (H,), "norm2": (H,)}
SHAPES |= {"q": (HEADS * D, H), "k": (KV * D, H), "v": (KV * D, H), "o": (H, HEADS * D)}
SHAPES |= {"gate": (WIDTH, H), "up": (WIDTH, H), "down": (H, WIDTH), "head": (VOCABULARY, H)}
SHAPES |= {"a1": (RANK, H), "b1": (WIDTH, RANK), "a2": (RANK, WIDTH), "b2": (H, RANK)}
SHAPES["targets"] = B, LENGTH, VOCABULARY


def attend(x, positions, q, k, v, own=lambda y: y):
    """x (b, s, h) -> its heads side by side (b, s, n d). Weights q (n d, h), k and v (kv d, h).

    own: applied to k and v (b, s, n, d) after each KV head is repeated for its query heads.
    """
    q, k, v = (linear(x, weight) for weight in (q, k, v))
    q, k, v = (reshape(y, (*y.shape[:2], -1, D)) for y in (q, k, v))
    q, k = rotary(positions, q), rotary(positions, k)
    k, v = (own(repeat_heads(y, HEADS // KV)) for y in (k, v))
    y = attention(q, k, v)
    return reshape(y, (*y.shape[:2], -1))


def tp_block(x, positions, norm1, q, k, v, o, norm2, gate, up, down):
    """A layer of LLaMA, tensor parallel: x (b, s, h), I -> I.

    Add to x the attention (attend) of norm(x), times o; then, with y = norm(x), silu(gate y)
    (up y), times down. The norms are I; q, k, v, gate, up are S(0), o and down are S(1).
    """
    # exercise: tp_block
    y = move(norm(x, norm1), "I", "R")
    y = linear(attend(y, positions, q, k, v), o)
    x = add(x, move(y, "P", "I"))
    y = move(norm(x, norm2), "I", "R")
    y = multiply(silu(linear(y, gate)), linear(y, up))
    return add(x, move(linear(y, down), "P", "I"))
    # end exercise


def sp_block(x, positions, norm1, q, k, v, o, norm2, gate, up, down):
    """The same layer with Megatron's sequence parallelism: x (b, s, h), S(1) -> S(1): its tokens.

    The weights are as before, the norms are I: the optimizer needs their whole gradient.
    """
    # exercise: sp_block
    y = move(norm(x, move(norm1, "I", "R")), S(1), "R")
    y = linear(attend(y, positions, q, k, v), o)
    x = add(x, move(y, "P", S(1)))
    y = move(norm(x, move(norm2, "I", "R")), S(1), "R")
    y = multiply(silu(linear(y, gate)), linear(y, up))
    return add(x, move(linear(y, down), "P", S(1)))
    # end exercise


def vocabulary_loss(x, head, targets):
    """Mean cross entropy of x (b, s, h), I, by a head (v, h), S(0): (), I.

    log(sum of exp(logits)) - the target's logit; targets (b, s, v), S(2), are 1 at the target, else
    0. No rank may have all logits. (The maximum, which keeps exp() in range, is left out.)
    """
    # exercise: vocabulary_loss
    logits = linear(move(x, "I", "R"), head)
    normalizer = move(total(exp(logits)), "P", "I")
    own = move(total(multiply(logits, targets)), "P", "I")
    return mean(subtract(log(normalizer), own))
    # end exercise


def replicated_kv(x, positions, q, k, v, o):
    """Attention with twice as many ranks as KV heads: x (b, s, h), I -> I on both axes.

    The mesh is kv x rep. q is S(0), o S(1) on both axes; k, v are S(0) on kv, I on rep: ranks
    of a row have one KV head, and each takes its repetitions for its own query heads.
    """
    # exercise: replicated_kv
    x = move(move(x, "I", "R", "kv"), "I", "R", "rep")
    k, v = move(k, "I", "R", "rep"), move(v, "I", "R", "rep")
    y = attend(x, positions, q, k, v, own=lambda y: move(y, "R", S(2), "rep"))
    y = linear(y, o)
    return move(move(y, "P", "I", "kv"), "P", "I", "rep")
    # end exercise


def lora(x, up, a1, b1, down, a2, b2):
    """Two matrices with LoRA: (down + b2 a2) silu((up + b1 a1) x), x (b, s, h), I -> I.

    up (f, h) and b1 (f, r) are S(0), down (h, f) and a2 (r, f) are S(1): cut along f. a1 (r, h) and
    b2 (h, r) have no f, so every rank has all of them: I.
    """
    # exercise: lora
    x = move(x, "I", "R")
    y = silu(add(linear(x, up), linear(linear(x, move(a1, "I", "R")), b1)))
    y = add(linear(y, down), linear(linear(y, a2), move(b2, "I", "R")))
    return move(y, "P", "I")
    # end exercise


if __name__ == "__main__":  # the lab's checks and experiments, of labs/ and of my_labs/
    sys.path[:0] = [str(folder) for folder in Path(__file__).resolve().parents[1:3]]
    from labs.kit.run import main

    sys.exit(main(__file__))
