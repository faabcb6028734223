"""Lab 15's exercises: their cases. mistakes.txt has the wrong answers.

No table says what a rule gives: types have to hold on numbers of two ranks, see true_type().
What is right of a program's result and gradients comes from one device.
"""

import copy
import itertools
import math
import random
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from types import FunctionType

import torch

from labs.kit.eye import Most
from labs.kit.judge import checks
from labs.lab15_types import typed
from labs.lab15_types.typed import OPERATIONS, PROGRAMS, SHAPES, S, finished

OPERANDS = {  # operations: the arguments that they are tried with
    "linear": ("x", "q"),
    "norm": ("x", "norm1"),
    "embedding": ("ids", "table"),
    "attention": ("heads", "keys", "values"),
}
OPERANDS |= dict.fromkeys(("add", "multiply"), ("x", "y"))
OPERANDS |= dict.fromkeys(("exp", "total", "mean", "softmax"), ("x",))
KINDS = {"add": "add", "multiply": "multiply", "last": "norm", "none": "exp"}
REFUSED = "refused"


def said(lab, function, *args):
    """What a function of the lab's returns, or that it refuses the types."""
    try:
        return function(*args)
    except lab.TypeProblem:
        return REFUSED


@cache
def true_type(operation, types):
    """The type that an operation's result has on numbers of two ranks, forward and backward.

    A type fits if the ranks' results make up what one device computes, and their gradients
    what its gradients are. If none fits, the operation has to be refused.
    """
    own = {name: {"tp": type} for name, type in zip(OPERANDS[operation], types)}
    mesh, right = {"tp": 2}, one_device(operation)
    with suppress(ValueError, RuntimeError):
        ran = typed.run(finished, alone(operation), own, mesh, 0)
        for type in ("R", "I", "P", *map(S, range(right["the result"].dim()))):
            with suppress(ValueError, RuntimeError):  # ranks differ, or cannot share it
                found = typed.put_together(*ran, own, {"tp": type}, mesh, 0)
                if not typed.difference(found, right):
                    return type
    return REFUSED


def alone(operation):
    """A program that is one operation."""
    return lambda **operands: getattr(finished, operation)(*operands.values())


@cache
def one_device(operation):
    """What one device computes; there it makes no difference which types are given."""
    types = typed.on(dict.fromkeys(OPERANDS[operation], "R"))
    return typed.computed(finished, alone(operation), types, {"tp": "R"}, world=1)


def combinations(operation):
    """Types of the operands: R, I, P and S(d); of ids, which have no gradient, R and S(d)."""
    letters = dict.fromkeys(("ids", "table"), ["R", "P"])
    each = []
    for name in OPERANDS[operation]:
        dims = map(S, range(len(SHAPES[name])))
        each.append([*letters.get(name, ["R", "I", "P"]), *dims])
    return itertools.product(*each)


def moves():
    """(src, dst) of all moves; what is sharded is cut along dimension 0 before, 1 behind."""
    for pair in " ".join(finished.MOVES).split():
        yield tuple(f"S({i})" if letter == "S" else letter for i, letter in enumerate(pair))


def gradient(group, seed):
    def see(lab, eye):
        for type in ("R", "I", "P", "V", S(0), S(2)):
            eye.note(f"the gradient of {type}", lab.gradient(type))

    def see_moves(lab, eye):
        for src, dst in moves():
            eye.note(f"the backward of {src} to {dst}", " to ".join(lab.backward(src, dst)))

    yield "gradient", see
    yield "backward", see_moves


def sent(group, seed):
    def see(lab, eye):
        for src, dst in moves():
            eye.note(f"the collective of {src} to {dst}", lab.sent(src, dst) or "none")

    yield "all moves", see


def see_calls(function, calls, lab, eye):
    """Note what a function says to calls {name: arguments}, and whether it changes these."""
    changed = False
    for name, args in calls.items():
        given = copy.deepcopy(args)
        eye.note(name, said(lab, getattr(lab, function), *given))
        changed |= given != args
    eye.note("an argument is overwritten", changed)


def letters(group, seed):
    cases, right = {}, {}
    for kind, n in itertools.product(KINDS, (1, 2, 3)):
        for types in itertools.product("RIPV", repeat=n):
            name = f"{kind} of {', '.join(types)}"
            title = f"{kind} with P" if "P" in types else "R or I alone"
            title = "V among the types" if "V" in types else title
            title = "I beside others" if {"I"} < {*types} else title
            cases.setdefault(title, {})[name] = kind, [*types]
            if "V" not in types and n == len(OPERANDS[KINDS[kind]]):
                right.setdefault(title, {})[name] = true_type(KINDS[kind], types)
    for title, calls in cases.items():
        yield title, partial(see_calls, "combine_letters", calls), right.get(title, {})


def shards(group, seed):
    v_beside = (["V", S(0)], [S(1), "V"], [S(0), "V", "R"], [S(0), "V", "I"], ["P", "V", S(1)])
    calls = {", ".join(types): (["ab"] * len(types), "ab", "", types) for types in v_beside}
    cases, right = {"V among the types": calls}, {}
    for operation in OPERANDS:
        _, equation, whole = finished.rule(operation)
        dims = "abc" if operation in ("add", "multiply", "exp", "mean") else "ab"
        *labels, out = equation.replace("*", dims).replace("->", ",").split(",")
        for types in combinations(operation):
            if any(type[0] == "S" for type in types):
                what = labels, out, whole, [*types]
                name = f"{operation} ({', '.join(labels)} to {out}) of {', '.join(types)}"
                cases.setdefault(kind_of(*what), {})[name] = what
                right.setdefault(kind_of(*what), {})[name] = true_type(operation, types)
    for title, calls in cases.items():
        yield title, partial(see_calls, "combine_shards", calls), right.get(title, {})


def kind_of(labels, out, whole, types):
    """Which sentence of combine_shards()'s docstring a call is about: a case's title."""
    pairs = list(zip(labels, types))
    names = [label[finished.sharded_dim(type)] for label, type in pairs if type[0] == "S"]
    if {"I", "P"} & set(types):
        return "I or P beside a shard"
    if len(set(names)) > 1:
        return "shards of two letters"
    if any(type == "R" and names[0] in label for label, type in pairs):
        return "R with the letter that is cut"
    if names[0] in whole:
        return "a letter in whole"
    return "a letter of the result" if names[0] in out else "a letter that is summed over"


def rules(group, seed):
    def see(operation, lab, eye):
        def result(types):
            shapes = [SHAPES[name] for name in OPERANDS[operation]]
            operands = [lab.Typed(shape, {"tp": type}) for shape, type in zip(shapes, types)]
            return said(lab, lab.operate, operation, *operands)

        replicated = result(["R"] * len(OPERANDS[operation]))
        eye.note("the shape", getattr(replicated, "shape", REFUSED))
        for types in combinations(operation):
            found = result(types)
            eye.note(", ".join(types), found if found == REFUSED else found.types["tp"])

    def see_sizes(lab, eye):
        shapes = (2, 4, 8, 3), (2, 6, 8, 3), (2, 6, 8, 5)
        found = lab.operate("attention", *(lab.Typed(shape, {"tp": "R"}) for shape in shapes))
        eye.note(f"the shape of q, k, v of {shapes}", found.shape)

    yield "attention", see_sizes
    for operation in "linear", "norm", "softmax", "embedding", "attention":
        asked = combinations(operation)
        right = {", ".join(types): true_type(operation, types) for types in asked}
        yield operation, partial(see, operation), right


def reshape(group, seed):
    numbers, others, cases = random.Random(seed), itertools.cycle("RIPV"), {}
    fixed = [((2, 4, 8), (2, 4, 4, 2), 2), ((2, 4, 4, 2), (2, 4, 8), 3), ((2, 8), (16,), 1)]
    fixed += [((4, 6), (1, 4, 6), 0), ((4, 6), (4, 1, 6), 1), ((1, 4, 6), (4, 6), 1)]
    for _ in range(100):
        old, new = ([2 ** numbers.randint(1, 2) for _ in range(3)] for _ in "ab")
        new[-1] = math.prod(old) // math.prod(new[:-1]) or 1
        if math.prod(old) == math.prod(new):
            fixed.append((tuple(old), tuple(new), numbers.randrange(3)))
    for old, new, dim in dict.fromkeys(fixed):
        types = {"dp": next(others), "tp": S(dim), "pp": S(dim)}
        end = on_numbers(old, new, dim)
        title = "one dimension begins where d did" if end != REFUSED else "none begins there"
        title = "dimensions of 1 number" if 1 in new else title
        right = end if end == REFUSED else (types | {"tp": end, "pp": end}, new)
        name = f"the types and the shape of S({dim}) of {old} in the shape {new}"
        cases.setdefault(title, {})[name] = old, new, types, right

    def see(asked, lab, eye):
        changed = False
        for name, (old, new, types, _) in asked.items():
            x = lab.Typed(old, dict(types))
            made = said(lab, lab.reshape, x, new)
            eye.note(name, made if made == REFUSED else (made.types, made.shape))
            changed |= x.types != types
        eye.note("the types of x are overwritten", changed)

    for title, asked in cases.items():
        yield title, partial(see, asked), {name: right for name, (*_, right) in asked.items()}


def on_numbers(old, new, dim):
    """The type that a tensor, sharded along dim, has in a new shape, as two halves show it."""
    full = torch.arange(math.prod(old)).view(old)
    for e, size in enumerate(new):
        local = [*new[:e], size // 2, *new[e + 1 :]]
        if size % 2 == 0:
            parts = [part.reshape(local) for part in full.chunk(2, dim)]
            if torch.equal(torch.cat(parts, e), full.view(new)):
                return S(e)
    return REFUSED


K_AND_V = {"norm1": "I", "k": "P", "v": "I"}
SMALL = {  # what does not fit: (program, whose operations come first; types of its arguments)
    "exp(k)": (lambda o, k, v, norm1: (o.exp(k), norm1)[1], K_AND_V),
    "k + v": (lambda o, k, v, norm1: (o.add(k, v), norm1)[1], K_AND_V | {"k": "I", "v": "P"}),
    "the result": (lambda o, k: k, {"k": "V"}),
    "v + k": (lambda o, k, v, norm1: (o.add(v, o.move(k, "P", "R")), norm1)[1], K_AND_V),
    "the result v + k": (lambda o, k, v: o.add(v, o.move(k, "P", "R")), {"k": "P", "v": "I"}),
    "x k, with k summed": (
        lambda o, x, k: (o.linear(x, k), o.move(o.mean(k), "P", "I"))[1],
        {"x": "R", "k": "I"},
    ),
}


def mend(group, seed):
    def edit_of(lab, program, how):
        """What mend() says to a program that does not fit."""
        return str(lab.mend(program, *how, lab.check(program, *how)))

    def see(name, lab, eye):
        how = types, _ = PROGRAMS[name]
        ours = getattr(finished, name)
        program = FunctionType(ours.__code__, vars(lab))  # with the lab's operations
        for kind, edits in typed.mutants(lab, program, types):
            if kind in ("dropped", "doubled"):
                broken = typed.edited(lab, program, edits)
                number = [*edits][0]
                eye.note(f"the mend of call {number}, {kind},", edit_of(lab, broken, how))

    def see_small(lab, eye):
        for what, (program, types) in SMALL.items():
            how = typed.on(types), {"tp": "I"}
            eye.note(f"the mend of {what},", edit_of(lab, partial(program, lab), how))

    for name in PROGRAMS:
        yield name, partial(see, name)
    yield "small programs", see_small


@dataclass
class Refused:
    """What does not fit in a program; where that is differs from answer to answer."""

    problem: str
    line: int = field(compare=False)


def program(name):
    """The cases of a program: accepted, right on numbers, no more messages than it needs."""
    types, returns = PROGRAMS[name]

    def see(seed, lab, eye):
        function = getattr(lab, name)
        problem = lab.check(function, types, returns)
        for operation in [*OPERATIONS, "give_back"]:
            here = problem and problem.operation == operation
            verdict = Refused(str(problem), problem.line) if here else "accepted"
            eye.note(f"{operation}()", verdict)
        if eye.goes_on():
            for what, x in typed.computed(lab, function, types, returns, seed).items():
                eye.note(what, x)
            calls = typed.calls_of(lab, function, types)
            normed = [str(args[0].types) for operation, args in calls if operation == "norm"]
            eye.note("what norm() gets", normed)
            sent = typed.messages(lab, function, types)  # an all-reduce counts twice
            numbers = sum(n * (1 + (op == "all_reduce")) for op, n in sent)
            eye.note("numbers in messages", Most(numbers))

    def cases(group, seed):
        ours = getattr(finished, name)
        right = typed.computed(finished, ours, types, returns, seed, world=1)
        yield name, partial(see, seed), right

    return cases


EXERCISES = {cases.__name__: (cases, 1) for cases in (gradient, sent, letters, shards)}
EXERCISES |= {cases.__name__: (cases, 1) for cases in (rules, reshape, mend)}
EXERCISES |= {name: (program(name), 1) for name in PROGRAMS}
CHECKS, BUGS = checks(EXERCISES, finished, typed.SAME)
