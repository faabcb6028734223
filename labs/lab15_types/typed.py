"""Lab 15's programs on numbers: two ranks have what types say, beside one device.

A program's text stays as it is: its operations, move() among them, are looked up in the lab's
module, where others are put. The ranks are lists of tensors in one process.
"""

import itertools
import math
from functools import partial
from unittest.mock import patch

import torch
import torch.nn.functional as F

from labs.kit.harness import relative_error
from labs.lab15_types import lesson as finished  # not the learner's

OPERATIONS = "move repeat_heads reshape add subtract multiply silu exp log total mean linear"
OPERATIONS = f"{OPERATIONS} norm softmax embedding rotary attention".split()
CONSTANT = {"positions", "targets", "ids"}  # arguments without a gradient
SAME = 1e-10  # relative, in float64
SHAPES = finished.SHAPES | {"y": finished.SHAPES["x"], "ids": finished.SHAPES["x"][:2]}
SHAPES |= dict.fromkeys(("heads", "keys", "values"), (2, 4, 4, 2)) | {"table": (16, 8)}
S = finished.S

BLOCK = {"positions": "R", "norm1": "I", "q": S(0), "k": S(0), "v": S(0), "o": S(1)}
BLOCK |= {"norm2": "I", "gate": S(0), "up": S(0), "down": S(1)}
BOTH = {"kv": "I", "rep": "I"}
REPLICATED = {"x": BOTH, "positions": {"kv": "R", "rep": "R"}, "q": {"kv": S(0), "rep": S(0)}}
REPLICATED |= {"k": {"kv": S(0), "rep": "I"}, "v": {"kv": S(0), "rep": "I"}}
REPLICATED |= {"o": {"kv": S(1), "rep": S(1)}}
LORA = {"x": "I", "up": S(0), "a1": "I", "b1": S(0), "down": S(1), "a2": S(1), "b2": "I"}


def on(types):
    """{name: {axis: type}} of {name: type}, whose axis is tp; others stay."""
    return {name: own if isinstance(own, dict) else {"tp": own} for name, own in types.items()}


PROGRAMS = {  # name: (types of the arguments, types of the result)
    "tp_block": (on({"x": "I"} | BLOCK), {"tp": "I"}),
    "sp_block": (on({"x": S(1)} | BLOCK), {"tp": S(1)}),
    "vocabulary_loss": (on({"x": "I", "head": S(0), "targets": S(2)}), {"tp": "I"}),
    "replicated_kv": (REPLICATED, BOTH),
    "lora": (on(LORA), {"tp": "I"}),
}


class Ranks(list):
    """The tensors of all ranks, those of the mesh's last axis beside each other."""

    @property
    def shape(self):
        return tuple(self[0].shape)


# ---- Moves and operations ------------------------------------------------------------------------


class Move(torch.autograd.Function):
    """A move of a group's tensors: the same full tensor, held as another type holds it.

    backward: the move of their gradients.
    """

    @staticmethod
    def forward(ctx, src, dst, *xs):
        ctx.move, mesh = (src, dst), {"": len(xs)}
        parts = split(join(xs, {"": src}, mesh), {"": dst}, mesh)
        return tuple(x.clone() for x in parts)

    @staticmethod
    def backward(ctx, *grads):
        return None, None, *Move.apply(*finished.backward(*ctx.move), *grads)


def rotary(positions, x):  # (s), (b, s, n, 2)
    cos, sin = positions.cos()[:, None], positions.sin()[:, None]
    first, second = x.unbind(-1)
    return torch.stack([first * cos - second * sin, second * cos + first * sin], -1)


def attention(*qkv):
    q, k, v = (x.transpose(1, 2) for x in qkv)
    if len({x.shape[1] for x in (q, k, v)}) > 1:  # one head would be used for all
        raise ValueError("q, k and v have different numbers of heads")
    scores = q @ k.mT / q.shape[-1] ** 0.5
    later = torch.ones(scores.shape[-2:]).triu(1).bool()
    return (scores.masked_fill(later, -torch.inf).softmax(-1) @ v).transpose(1, 2)


def embedding(all_ids, tables):
    """Of a part of the table a rank has the rows of its own ids; the others are zero."""
    found = Ranks()
    for rank, (ids, table) in enumerate(zip(all_ids, tables)):
        start = rank * len(table) if len(table) < finished.VOCABULARY else 0
        mine = (ids >= start) & (ids < start + len(table))
        found.append(F.embedding((ids - start) * mine, table) * mine[..., None])
    return found


EACH = {"norm": lambda x, w: F.rms_norm(x, x.shape[-1:], eps=1e-6) * w, "rotary": rotary}
EACH |= {"attention": attention, "add": torch.add, "subtract": torch.sub, "silu": F.silu}
EACH |= {"multiply": torch.mul, "exp": torch.exp, "log": torch.log}
EACH |= {"total": lambda x: x.sum(-1)}
EACH |= {"mean": lambda x: x.sum() / (finished.B * finished.LENGTH)}
EACH |= {"linear": lambda x, w: x @ w.mT, "softmax": lambda x: x.softmax(-1)}
EACH |= {"reshape": torch.reshape, "repeat_heads": lambda x, n: x.repeat_interleave(n, 2)}


def on_numbers(mesh):
    """{name: operation} on Ranks of a mesh {axis: size}."""

    def each(function):
        def of_all(x, *others):
            others = (y if isinstance(y, Ranks) else [y] * len(x) for y in others)
            return Ranks(map(function, x, *others))

        return of_all

    def move(x, src, dst, axis="tp"):
        places = torch.arange(len(x)).view(*mesh.values()).movedim(list(mesh).index(axis), -1)
        out = dict(enumerate(x))
        for ranks in places.reshape(-1, mesh[axis]).tolist():  # they differ on this axis alone
            if src != dst:
                out |= zip(ranks, Move.apply(src, dst, *(x[rank] for rank in ranks)))
        return Ranks(out.values())

    own = {name: each(function) for name, function in EACH.items()}
    return own | {"move": move, "embedding": embedding}


# ---- What ranks have of a tensor -----------------------------------------------------------------


def split(full, types, mesh, generator=None):
    """The Ranks of a tensor of these types; P: summands are drawn, or zeros but one."""
    parts = [full]
    for axis, world in mesh.items():
        type, before, parts = types[axis], parts, []
        for x in before:
            if type[0] == "P":
                zeros = torch.zeros(world - 1, *x.shape)
                noise = (zeros.normal_(generator=generator) if generator else zeros).to(x)
                parts += [x - noise.sum(0), *noise]
            elif type[0] == "S":
                dim = finished.sharded_dim(type)
                parts += x.unflatten(dim, (world, -1)).unbind(dim)
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
            elif all(relative_error(x.nan_to_num(), own[0].nan_to_num()) <= SAME for x in own):
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


def gradients_of(types):
    """The types of a tensor's gradient, {axis: type}."""
    return {axis: finished.gradient(type) for axis, type in types.items()}


def run(lab, program, types, mesh, seed):
    """(the result, {argument: its tensors}), all Ranks, of a program; mesh {axis: size}."""
    generator, parts = torch.Generator().manual_seed(seed + 1), {}
    for name, full in drawn(types, seed).items():
        own = split(full, types[name], mesh, generator)
        parts[name] = Ranks(x.clone().requires_grad_(name not in CONSTANT) for x in own)
    with patch.dict(vars(lab), on_numbers(mesh)):
        return program(**{name: Ranks(x) for name, x in parts.items()}), parts


def put_together(out, parts, types, returns, mesh, seed):
    """{"the result" or "the gradient of x": full tensor}, where run() gave out and parts."""
    found = {"the result": join([x.detach() for x in out], returns, mesh)}
    generator = torch.Generator().manual_seed(seed + 2)
    dy = torch.randn(found["the result"].shape, generator=generator).double()
    dy = split(dy, gradients_of(returns), mesh, generator)
    learned = [name for name in types if name not in CONSTANT]
    inputs = [x for name in learned for x in parts[name]]
    how = {"allow_unused": True, "materialize_grads": True, "retain_graph": True}
    grads = iter(torch.autograd.grad(list(out), inputs, list(dy), **how))
    for name in learned:
        own = [next(grads) for _ in parts[name]]
        found[f"the gradient of {name}"] = join(own, gradients_of(types[name]), mesh)
    return found


def computed(lab, program, types, returns, seed=0, world=2):
    """put_together() of a program on `world` ranks an axis.

    types {argument: {axis: type}}; returns {axis: type}. One rank is one device, where every
    move is the identity. Raises ValueError, RuntimeError or IndexError where the program
    cannot be run, or where ranks differ in what they should have in common.
    """
    mesh = dict.fromkeys(returns, world)
    out, parts = run(lab, program, types, mesh, seed)
    return put_together(out, parts, types, returns, mesh, seed)


def difference(found, right):
    """What of computed() is not right; None if all is."""
    off = (name for name, x in right.items() if relative_error(found[name], x) > SAME)
    return next((f"{name} is another" for name in off), None)


def wrong_on_numbers(lab, program, types, returns, right, seed=0):
    """What is wrong with a program on two ranks; None where all is as `right`, computed()."""
    try:
        return difference(computed(lab, program, types, returns, seed), right)
    except (ValueError, RuntimeError, IndexError) as problem:
        return str(problem).partition("\n")[0]


# ---- Programs with a mistake, and what programs call ---------------------------------------------


def edited(lab, program, edits, calls=None):
    """A program with edits, as check() takes them, that runs on types, numbers or tensors.

    calls: a list, to which its calls are added, (operation, arguments).
    """

    def run(**arguments):
        numbers = itertools.count()
        before = {name: getattr(lab, name) for name in OPERATIONS} | {"give_back": lambda x: x}

        def call(name, *args):
            args = [*args, "tp"][:4] if name == "move" else [*args]
            if calls is not None:
                calls.append((name, [*args]))
            i, *how = edits.get(next(numbers), (None,))
            if i is not None:
                old, args[i] = args[i], before["move"](args[i], *how)
                if isinstance(old, Ranks):
                    old[:] = args[i]  # for its later uses, too
                elif isinstance(old, lab.Typed):
                    old.types = args[i].types
            elif how and how[0] == how[1]:
                return args[0]
            elif how:
                args[1:] = how
            return before[name](*args)

        with patch.dict(vars(lab), {name: partial(call, name) for name in OPERATIONS}):
            result = program(**arguments)
        return call("give_back", result)

    return run


def calls_of(lab, program, types):
    """[(operation, arguments)] of a program on types, in order."""
    calls = []
    program = edited(lab, program, {}, calls)
    program(**{name: lab.Typed(SHAPES[name], own) for name, own in types.items()})
    return calls


def mutants(lab, program, types):
    """Yield (how, edits): a move dropped, doubled, changed to any other; two exchanged."""
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


def messages(lab, program, types):
    """[(collective, numbers in it)] of all messages of a program, both ways."""
    found = []
    for name, args in calls_of(lab, program, types):
        if name == "move" and args[1] != args[2]:
            x, src, dst, _ = args
            both = finished.sent(src, dst), finished.sent(*finished.backward(src, dst))
            found += [(op, math.prod(x.shape)) for op in both if op]
    return found
