"""Lab 15's programs on other things than types: on numbers of ranks, and as spmd_types has them.

A program's text stays as it is: its operations, move() among them, are looked up in the lab's
module, where inside() puts others. Ranks here are lists of tensors in one process.
"""

import itertools
from contextlib import contextmanager

import torch
import torch.nn.functional as F

from labs.kit.harness import relative_error as apart
from labs.lab15_types import lesson as finished  # not the learner's

OPERATIONS = "move repeat_heads reshape add subtract multiply silu exp log total mean linear norm"
OPERATIONS = f"{OPERATIONS} softmax embedding rotary attention".split()
CONSTANT = {"positions", "targets", "ids"}  # arguments without a gradient
SAME = 1e-10  # relative, in float64
SHAPES = finished.SHAPES | {"y": finished.SHAPES["x"], "ids": finished.SHAPES["x"][:2]}
SHAPES |= dict.fromkeys(("heads", "keys", "values"), (2, 4, 4, 2)) | {"table": (16, 8)}
S = finished.S

BLOCK = {"positions": "R", "norm1": "I", "q": S(0), "k": S(0), "v": S(0), "o": S(1)}
BLOCK |= {"norm2": "I", "gate": S(0), "up": S(0), "down": S(1)}
BOTH = {"kv": "I", "rep": "I"}
CUT_TWICE = {"q": {"kv": S(0), "rep": S(0)}, "o": {"kv": S(1), "rep": S(1)}}
REPLICATED = dict.fromkeys(("k", "v"), {"kv": S(0), "rep": "I"}) | CUT_TWICE
REPLICATED |= {"x": BOTH, "positions": {"kv": "R", "rep": "R"}}
LORA = {"x": "I", "up": S(0), "a1": "I", "b1": S(0), "down": S(1), "a2": S(1), "b2": "I"}
SIGNATURES = {  # name: (types of the arguments, of the result)
    "tp_block": ({"x": "I"} | BLOCK, "I"),
    "sp_block": ({"x": S(1)} | BLOCK, S(1)),
    "vocabulary_loss": ({"x": "I", "head": S(0), "targets": S(2)}, "I"),
    "replicated_kv": (REPLICATED, BOTH),
    "lora": (LORA, "I"),
}

RULE_HINTS = """
linear: in x and in the weight, the other held fixed; weight is (o, i); i need not be whole
norm: linear in the weight alone; x (b, s, h), weight (h); h is needed as a whole
softmax: linear in nothing; as many numbers come out as go in; v is needed as a whole, nothing else
embedding: linear in the table alone; a sum over v; v is summed over, and need not be whole
attention: linear in v alone; k and v have t for q's s, v has e for d; all of s, t and d, not of e
"""  # what is linear; letters; what is needed as a whole
PROGRAM_HINTS = """
tp_block: f (I to R) in front of what is sharded, g (P to I) behind; one of each in either half
tp_block norm: norms and what they norm are I: f comes behind the norm
sp_block: S(1) to R in front of the matrices, where all tokens are needed; P to S(1) behind them
sp_block norm: the norm of own tokens gives a summand of its weight's gradient: the weight I to R
vocabulary_loss: f in front of the head; the sums over the vocabulary are P, and the loss is I
vocabulary_loss messages: the two sums are moved: no rank may have all logits
replicated_kv: each axis by itself: x from I to R on both, k and v on rep; o gives P on both
replicated_kv attention: own takes of the repeated heads, dimension 2, those of own query heads
lora: x and a1 go from I to R, since outputs are sharded, and b2, since it works on summands
lora messages: one sum over the ranks, of both paths together; f for x, a1 and b2 alone
lora add: both paths are P: the one sum over the ranks comes behind the addition
"""  # program and operation that does not fit, or program: what to do


def on(type):
    """{axis: type}; a type alone is on the axis tp."""
    return type if isinstance(type, dict) else {"tp": type}


PROGRAMS = {
    program: ({name: on(type) for name, type in types.items()}, on(returns))
    for program, (types, returns) in SIGNATURES.items()
}


@contextmanager
def inside(lab, functions, edits=None):
    """Programs of the lab run functions {name: function} instead of its own, edited as in check().

    Calls are numbered as the lab's op() does. Yields what takes the place of give_back().
    """
    edits, calls, before = edits or {}, itertools.count(), {}
    functions = functions | {"give_back": lambda x: x}

    def numbered(name):
        def call(*args):
            number, args = next(calls), list(args)
            if number in edits:
                i, *how = edits[number]
                if i is None and how[0] == how[1]:
                    return args[0]
                if i is None:
                    args[1:] = how
                else:
                    made, old = functions["move"](args[i], *how), args[i]
                    args[i] = made
                    if isinstance(old, Ranks):
                        old[:] = made  # for its later uses, too
                    elif isinstance(old, lab.Typed):
                        old.types = made.types
            return functions[name](*args)

        return call

    try:
        for name in OPERATIONS:
            before[name] = getattr(lab, name)
            setattr(lab, name, numbered(name))
        yield numbered("give_back")
    finally:
        for name, function in before.items():
            setattr(lab, name, function)


# ---- Numbers -------------------------------------------------------------------------------------


class Ranks(list):
    """The tensors of all ranks, those of the mesh's last axis beside each other."""

    @property
    def shape(self):
        return tuple(self[0].shape)


def slice_of(x, rank, world, dim):
    if x.shape[dim] % world:
        raise ValueError(f"{world} ranks cannot share a dimension of {x.shape[dim]}")
    return x.chunk(world, dim)[rank]


def carry_out(src, dst, xs):
    """What a move makes of a group's tensors, by its letters: as MOVES says, without gradients."""
    kind, world = src[0] + dst[0], len(xs)
    here, there = finished.sharded_dim(src), finished.sharded_dim(dst)
    if src == dst or kind in ("IR", "RI", "RV", "VP"):
        return list(xs)
    if kind in ("RP", "IP"):
        return [x if rank == 0 else torch.zeros_like(x) for rank, x in enumerate(xs)]
    if kind == "SP":
        found = [torch.cat([torch.zeros_like(x)] * world, here) for x in xs]
        for rank, (x, into) in enumerate(zip(xs, found)):
            into.narrow(here, rank * x.shape[here], x.shape[here]).copy_(x)
        return found
    whole = torch.cat(xs, here) if src[0] == "S" else sum(xs)
    if dst[0] == "S":
        own = xs if kind in ("RS", "IS") else [whole] * world
        return [slice_of(x, rank, world, there) for rank, x in enumerate(own)]
    return [whole] * world


# {move: its backward}, by letters; S stands for the same dimension on either side
BACK = {"IR": "PI", "PI": "IR", "RI": "IP", "IP": "RI", "PR": "PR", "RP": "RP", "SR": "PS"}
BACK |= {"PS": "SR", "SI": "IS", "IS": "SI", "RS": "SP", "SP": "RS", "SS": "SS", "VP": "RV"}
BACK |= {"RV": "VP"}


class Move(torch.autograd.Function):
    """A move of a group's tensors; backward: the move of BACK."""

    @staticmethod
    def forward(ctx, src, dst, *xs):
        ctx.move = src, dst
        return tuple(x.clone() for x in carry_out(src, dst, xs))

    @staticmethod
    def backward(ctx, *grads):
        src, dst = ctx.move
        first, last = BACK[src[0] + dst[0]] if src != dst else (src[0], dst[0])
        first, last = dst if first == "S" else first, src if last == "S" else last
        return None, None, *(x.clone() for x in carry_out(first, last, grads))


def groups(mesh, axis):
    """The groups of ranks that differ on one axis alone; mesh {axis: size}."""
    places = list(itertools.product(*(range(size) for size in mesh.values())))
    column, found = list(mesh).index(axis), {}
    for rank, place in enumerate(places):
        found.setdefault((*place[:column], *place[column + 1 :]), []).append(rank)
    return list(found.values())


def on_numbers(mesh):
    """{name: operation} on Ranks of a mesh {axis: size}."""

    def each(function):
        return lambda *xs: Ranks(map(function, *xs))

    def move(x, src, dst, axis="tp"):
        out = Ranks(x)
        for ranks in groups(mesh, axis if axis in mesh else next(iter(mesh))):
            own = Move.apply(src, dst, *(x[rank] for rank in ranks)) if src != dst else ()
            for rank, tensor in zip(ranks, own):
                out[rank] = tensor
        return out

    def norm(x, weight):
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight

    def rotary(positions, x):  # (s), (b, s, n, 2)
        cos, sin = positions.cos()[:, None], positions.sin()[:, None]
        return torch.stack(
            [x[..., 0] * cos - x[..., 1] * sin, x[..., 1] * cos + x[..., 0] * sin], -1
        )

    def attention(*qkv):
        q, k, v = (x.transpose(1, 2) for x in qkv)
        if len({x.shape[1] for x in (q, k, v)}) > 1:  # one head would be used for all
            raise ValueError("q, k and v have different numbers of heads")
        scores = q @ k.mT / q.shape[-1] ** 0.5
        later = torch.ones_like(scores).triu(1).bool()
        return (scores.masked_fill(later, -torch.inf).softmax(-1) @ v).transpose(1, 2)

    def embedding(ids, table):
        return Ranks(rows(i, t, rank, len(ids)) for rank, (i, t) in enumerate(zip(ids, table)))

    def rows(ids, table, rank, world):  # of this rank's part of the table; others are zero
        start = rank * len(table) if len(table) < finished.VOCABULARY else 0
        mine = (ids >= start) & (ids < start + len(table))
        return F.embedding((ids - start) * mine, table) * mine[..., None]

    count = finished.B * finished.LENGTH
    own = {"norm": norm, "rotary": rotary, "attention": attention, "add": torch.add}
    own |= {"subtract": torch.sub, "multiply": torch.mul, "silu": F.silu, "exp": torch.exp}
    own |= {"log": torch.log, "total": lambda x: x.sum(-1), "mean": lambda x: x.sum() / count}
    own |= {"linear": lambda x, weight: x @ weight.mT, "softmax": lambda x: x.softmax(-1)}
    own = {name: each(function) for name, function in own.items()}
    own["reshape"] = lambda x, shape: Ranks(tensor.reshape(shape) for tensor in x)
    own["repeat_heads"] = lambda x, n: Ranks(tensor.repeat_interleave(n, 2) for tensor in x)
    return own | {"move": move, "embedding": embedding}


def split(full, types, mesh, generator):
    """The Ranks of a tensor of these types; summands of what is P are drawn."""
    parts = [full]
    for axis, world in mesh.items():
        type, before, parts = types[axis], parts, []
        for x in before:
            if type[0] == "P":
                some = [torch.randn(x.shape, generator=generator).to(x) for _ in range(world - 1)]
                parts += [*some, x - sum(some)]
            elif type[0] == "S":
                dim = finished.sharded_dim(type)
                parts += [slice_of(x, rank, world, dim) for rank in range(world)]
            else:
                parts += [x] * world
    return Ranks(parts)


def join(parts, types, mesh):
    """The full tensor that Ranks of these types make up; ValueError where replicas differ."""
    for axis, world in reversed(mesh.items()):
        type, before, parts = types[axis], list(parts), []
        for i in range(0, len(before), world):
            own = before[i : i + world]
            if type[0] == "P":
                parts.append(sum(own))
            elif type[0] == "S":
                parts.append(torch.cat(own, finished.sharded_dim(type)))
            elif all(apart(x.nan_to_num(), own[0].nan_to_num()) <= SAME for x in own):
                parts.append(own[0])
            else:
                raise ValueError(f"ranks have different numbers of what is {type}")
    return parts[0]


def drawn(types, seed):
    """{argument: full tensor} in float64."""
    generator, found = torch.Generator().manual_seed(seed), {}
    for name in types:
        shape = SHAPES[name]
        found[name] = torch.randn(shape, generator=generator, dtype=torch.float64)
        if name == "positions":
            found[name] = torch.arange(shape[0], dtype=torch.float64)
        if name == "ids":
            found[name] = torch.randint(finished.VOCABULARY, shape, generator=generator)
        if name == "targets":
            own = torch.randint(shape[-1], shape[:-1], generator=generator)
            found[name] = F.one_hot(own, shape[-1]).double()
    return found


def computed(lab, program, types, returns, mesh, seed=0, edits=None):
    """(result, {argument: gradient}) of a program on numbers, as full tensors.

    types and returns: {axis: type}; mesh {axis: ranks}. ValueError, RuntimeError and the like
    where it cannot be run, or ranks differ in what they should have in common.
    """
    generator = torch.Generator().manual_seed(seed + 1)
    full = drawn(types, seed)
    parts = {name: split(full[name], types[name], mesh, generator) for name in types}
    learned = [name for name in types if name not in CONSTANT]
    for name in learned:
        parts[name] = Ranks(x.clone().requires_grad_() for x in parts[name])
    with inside(lab, on_numbers(mesh), edits) as give_back:
        out = give_back(program(**{name: Ranks(x) for name, x in parts.items()}))
    result = join([x.detach() for x in out], returns, mesh)
    dy = torch.randn(result.shape, generator=torch.Generator().manual_seed(seed + 2)).double()
    back = {axis: finished.gradient(type) for axis, type in returns.items()}
    dy = split(dy, back, mesh, generator)
    inputs = [x for name in learned for x in parts[name]]
    grads = torch.autograd.grad(list(out), inputs, list(dy), allow_unused=True)
    grads = [torch.zeros_like(x) if dx is None else dx for x, dx in zip(inputs, grads)]
    found, world = {}, len(out)
    for i, name in enumerate(learned):
        own = {axis: finished.gradient(type) for axis, type in types[name].items()}
        try:
            found[name] = join(grads[i * world : (i + 1) * world], own, mesh)
        except ValueError as problem:
            raise ValueError(f"the gradient of {name}: {problem}") from None
    return result, found


def one_device(lab, program, types, returns, seed=0):
    """The same on one rank, where every move is the identity."""
    mesh = dict.fromkeys(returns, 1)
    return computed(lab, program, types, returns, mesh, seed)


def difference(found, right):
    """What of (result, gradients) is not as on one device; None if all is."""
    if apart(found[0], right[0]) > SAME:
        return "the result is another"
    for name, grad in right[1].items():
        off = apart(found[1][name], grad)
        if off > SAME:
            factor = (found[1][name] * grad).sum() / grad.square().sum() if off < 1e9 else 0
            times = f" ({factor:.3g} times)" if apart(found[1][name], factor * grad) < 1e-6 else ""
            return f"the gradient of {name} is another{times}"
    return None


def wrong_on_numbers(lab, program, types, returns, right, seed=0, edits=None, world=2):
    """What is wrong with a program on `world` ranks an axis, compared with one device; or None."""
    mesh = dict.fromkeys(returns, world)
    try:
        return difference(computed(lab, program, types, returns, mesh, seed, edits), right)
    except (ValueError, RuntimeError, IndexError) as problem:
        return str(problem).partition("\n")[0]


# ---- Programs with a mistake ---------------------------------------------------------------------


def mutated(lab, program, edits):
    """A program with edits (as in check()) as a program: on types, numbers or other tensors."""

    def run(**arguments):
        with inside(lab, {name: getattr(lab, name) for name in OPERATIONS}, edits):
            return program(**arguments)

    return run


def calls_of(lab, program, types):
    """[(operation, arguments)] of a program on types, in order."""
    calls = []

    def recorded(name, function):
        def call(*args):
            args = [*args, "tp"][:4] if name == "move" else list(args)
            calls.append((name, args))
            return function(*args)

        return call

    functions = {name: recorded(name, getattr(lab, name)) for name in OPERATIONS}
    with inside(lab, functions):
        program(**{name: lab.Typed(SHAPES[name], own) for name, own in types.items()})
    return calls


def mutants(lab, program, types):
    """Yield (how, edits): each move dropped, doubled, changed to any other; each two exchanged."""
    calls = enumerate(calls_of(lab, program, types))
    moves = [(n, args[0], tuple(args[1:])) for n, (name, args) in calls if name == "move"]
    for n, x, (src, dst, axis) in moves:
        yield "dropped", {n: (None, src, src, axis)}
        yield "doubled", {n: (0, src, dst, axis)}
        letters = ["R", "I", "P", *map(S, range(len(x.shape)))]
        for pair in itertools.permutations(letters, 2):
            known = pair[0][0] + pair[1][0] in " ".join(finished.MOVES).split()
            if known and pair != (src, dst):
                yield "changed", {n: (None, *pair, axis)}
    for (n, _, one), (m, _, other) in itertools.combinations(moves, 2):
        if one != other:
            yield "exchanged", {n: (None, *other), m: (None, *one)}


def message_numbers(lab, program, types):
    """The numbers in a program's messages, forward and backward; twice those of an all-reduce."""
    total = 0
    for name, args in calls_of(lab, program, types):
        if name == "move" and args[1] != args[2]:
            x, src, dst, _ = args
            both = finished.sent(src, dst), finished.sent(*finished.backward(src, dst))
            times = sum((op is not None) + (op == "all_reduce") for op in both)
            total += times * torch.Size(x.shape).numel()
    return total


def norms(lab, program, types):
    """The types of what a program norms."""
    return [args[0].types for name, args in calls_of(lab, program, types) if name == "norm"]
