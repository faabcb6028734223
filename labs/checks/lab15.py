"""Lab 15's checks: what rules and programs say of types has to hold on numbers of two ranks."""

import itertools
import math
import random
from functools import cache

import torch
from checks import typed
from checks.typed import PROGRAMS, S, finished
from harness import Wrong, expect

LETTERS = "R", "I", "P", "V"
OPERANDS = {  # operations: the arguments that they are tried with, kind by kind
    "add": ("x", "y"),
    "multiply": ("x", "y"),
    "exp": ("x",),
    "total": ("x",),
    "mean": ("x",),
    "linear": ("x", "q"),
    "norm": ("x", "norm1"),
    "softmax": ("x",),
    "embedding": ("ids", "table"),
    "attention": ("heads", "keys", "values"),
}
RULES = ("linear", "norm", "softmax", "embedding", "attention")  # the exercise's
KINDS = {"add": "add", "multiply": "multiply", "last": "norm", "none": "exp"}


def called(function, *args):
    """What a function of the lab's returns; None where it raises TypeProblem."""
    try:
        return function(*args)
    except Exception as problem:
        if type(problem).__name__ == "TypeProblem":
            return None
        raise


@cache
def true_types(operation, types):
    """The types that an operation's result has on numbers, forward and backward; () if none.

    2 ranks hold operands of these types; a type fits, if what they compute makes up what one
    device computes, and their gradients what its gradients are.
    """
    names = OPERANDS[operation]
    own = {name: {"tp": type} for name, type in zip(names, types)}

    def program(**operands):
        return getattr(finished, operation)(*(operands[name] for name in names))

    dims = {"total": 2, "mean": 0, "attention": 4}.get(operation, 3)
    found = []
    for out in ["R", "I", "P", *map(S, range(dims))]:
        right = typed.one_device(finished, program, own, {"tp": out})
        if not typed.wrong_on_numbers(finished, program, own, {"tp": out}, right):
            found.append(out)
    return tuple(found)


def cases(operation):
    """Types of the operands: R, I, P and S(d); of ids, which have no gradient, R and S(d)."""
    letters = {"ids": ["R"], "table": ["R", "P"]}
    each = []
    for name in OPERANDS[operation]:
        dims = map(S, range(len(typed.SHAPES[name])))
        each.append([*letters.get(name, ["R", "I", "P"]), *dims])
    return itertools.product(*each)


def compare(what, found, right, hint=""):
    """Raise Wrong unless a type is what numbers of ranks show; None: the operation is refused."""
    if found is None:
        expect(not right, f"{what} is refused; on numbers the result is {right[:1]}", hint)
    else:
        expect(right, f"{what} gives {found}; on numbers nothing fits", hint)
        expect(found in right, f"{what} gives {found}; on numbers it is {right[0]}", hint)


def check_gradient(lab, group, seed):
    right = {"R": "P", "I": "I", "P": "R", "V": "V", S(0): S(0), S(2): S(2)}
    hints = {"R": "each rank's work differs: it has a summand", "I": "the same work: all of it"}
    hints["P"] = "d(sum)/d(summand) is 1: every rank gets the sum's gradient, the same on each"
    for type, own in right.items():
        hint = hints.get(type, "each rank has the gradient of what it holds")
        found = lab.gradient(type)
        expect(found == own, f"the gradient of {type} is {found}, not {own}", hint)
    for pair in " ".join(lab.MOVES).split():
        src, dst = (f"S({i})" if letter == "S" else letter for i, letter in enumerate(pair))
        found, own = lab.backward(src, dst), (right.get(dst, dst), right.get(src, src))
        hint = "from the gradient of dst to that of src"
        expect(found == own, f"backward of {src} to {dst}: {found}, not {own}", hint)
        letters = own[0][0] + own[1][0]
        expect(typed.BACK[pair] == letters, f"{pair}: {letters}")  # what the numbers do
    return "6 types, 15 moves"


def check_sent(lab, group, seed):
    """Who needs numbers of others? Those whose result differs when another rank's input does."""
    names = {"PR": "all_reduce", "PI": "all_reduce", "PS": "reduce_scatter", "SR": "all_gather"}
    names |= {"SI": "all_gather", "SS": "all_to_all"}
    for pair in " ".join(lab.MOVES).split():
        src, dst = (f"S({i})" if letter == "S" else letter for i, letter in enumerate(pair))
        xs = [torch.randn(2, 4, generator=torch.Generator().manual_seed(i)) for i in range(2)]
        before = typed.carry_out(src, dst, xs)[0]
        after = typed.carry_out(src, dst, [xs[0], xs[1] + 1])[0]
        needed = not torch.equal(before, after)
        found = lab.sent(src, dst)
        text = f"{src} to {dst}: sent() is {found}"
        hint = "a rank has what it needs" if not needed else "a rank needs what others have"
        expect((found is not None) == needed, text, hint)
        expect(found == names.get(pair), text, f"{names.get(pair)}: see MOVES")
    return "6 of 15 moves send something"


def check_letters(lab, group, seed):
    count = 0
    for kind, operation in KINDS.items():
        for types in itertools.product("RIP", repeat=len(OPERANDS[operation])):
            found = called(lab.combine_letters, kind, list(types))
            hints = {"I": "what is R beside it would give I a gradient that is a summand"}
            hints |= {"P": "is f(a + b) = f(a) + f(b) in that operand?"}
            hint = next((text for letter, text in hints.items() if letter in types), "")
            compare(f"{kind} of {', '.join(types)}", found, true_types(operation, types), hint)
            count += 1
    for kind, *types in itertools.product(("add", "multiply"), "RPV", "RPV"):
        if "V" in types:
            found = called(lab.combine_letters, kind, types)
            right = None if "P" in types else "V"
            text = f"{kind} of {', '.join(types)}: {found}, not {right}"
            expect(found == right, text, "V with R or V is V; of V nothing is known to be summed")
    three = called(lab.combine_letters, "add", ["P", "P", "P"])
    expect(three == "P", f"P + P + P is {three}", "all operands P")
    return f"{count} combinations of R, I and P as on numbers of 2 ranks; V"


def check_shards(lab, group, seed):
    count = 0
    for operation in OPERANDS:
        _, equation, whole = finished.rule(operation)
        dims = "abc" if operation in ("add", "multiply", "exp", "mean") else "ab"
        *labels, out = equation.replace("*", dims).replace("->", ",").split(",")
        for types in cases(operation):
            if any(type[0] == "S" for type in types):
                found = called(lab.combine_shards, labels, out, whole, list(types))
                what = f"{operation} of {', '.join(types)} ({equation})"
                compare(what, found, true_types(operation, types), hint_of(labels, out, types))
                count += 1
    for types, right in ((["V", S(0)], "V"), ([S(1), "V"], "V")):
        found = called(lab.combine_shards, ["ab", "ab"], "ab", "", types)
        expect(found == right, f"{types} gives {found}", "V beside a shard is V")
    return f"{count} combinations as on numbers of 2 ranks"


def hint_of(labels, out, types):
    """What to think of, where a combination with shards is wrong."""
    names = [label[finished.sharded_dim(t)] for label, t in zip(labels, types) if t[0] == "S"]
    if len(set(names)) > 1:
        return "rank r has slice r of one dimension and slice r of another: a block of the diagonal"
    if {"I", "P"} & set(types):
        return "a shard has R beside it, or a shard"
    if any(t == "R" and names[0] in label for label, t in zip(labels, types)):
        return "the R operand has all of the sharded dimension: it has to be cut first"
    return "out lacks the letter: a sum, of which each rank has a summand: P" * (
        names[0] not in out
    )


def check_rules(lab, group, seed):
    count = 0
    for operation in RULES:
        for types in cases(operation):
            names = OPERANDS[operation]
            operands = [
                lab.Typed(typed.SHAPES[name], {"tp": type}) for name, type in zip(names, types)
            ]
            made = called(lab.operate, operation, *operands)
            found = made and made.types["tp"]
            hint = {"linear": "weight is (o, i): x's last dimension is its second"}
            hint |= {"norm": "h is needed as a whole; linear in the weight alone"}
            hint |= {"softmax": "v is needed as a whole"}
            hint |= {"embedding": "a sum over v, linear in the table alone"}
            hint |= {"attention": "t of k and v is another letter than s of q, and v's e than d"}
            right = true_types(operation, types)
            compare(f"{operation} of {', '.join(types)}", found, right, hint[operation])
            shape = {"attention": (2, 4, 4, 2), "linear": (2, 4, 16)}.get(operation, (2, 4, 8))
            expect(made is None or made.shape == shape, f"{operation}: {made and made.shape}")
            count += 1
    return f"{count} combinations as on numbers of 2 ranks"


def check_reshape(lab, group, seed):
    drawn, refused = random.Random(seed), 0
    fixed = [((2, 4, 8), (2, 4, 4, 2), 2), ((2, 4, 4, 2), (2, 4, 8), 3), ((2, 8), (16,), 1)]
    for i in range(100):
        old, new = ([2 ** drawn.randint(1, 2) for _ in range(3)] for _ in "ab")
        new[-1] = math.prod(old) // math.prod(new[:-1]) or 1
        shapes = (tuple(old), tuple(new), drawn.randrange(3)) if i >= 3 else fixed[i]
        old, new, dim = shapes
        if math.prod(old) != math.prod(new):
            continue
        full = torch.arange(math.prod(old)).view(old)
        right = []
        for e, size in enumerate(new):
            local = [*new[:e], size // 2, *new[e + 1 :]]
            if size % 2 == 0:
                parts = [part.reshape(local) for part in full.chunk(2, dim)]
                if torch.equal(torch.cat(parts, e), full.view(new)):
                    right.append(S(e))
        asked = (*new[:-1], -1) if i % 2 else new
        x = lab.Typed(old, {"tp": S(dim), "dp": "P"})
        made = called(lab.reshape, x, asked)
        hint = "the dimensions before d, and those before e, have the same product"
        compare(f"{old}, {S(dim)}, reshaped to {asked}", made and made.types["tp"], right, hint)
        refused += made is None
        if made is not None:
            expect(made.types["dp"] == "P" and made.shape == tuple(new), f"{made}", "letters stay")
    return f"100 reshapes as on numbers, {refused} of them refused"


def check_mend(lab, group, seed):
    count = 0
    for name, (types, returns) in PROGRAMS.items():
        program = getattr(lab, name)
        right = typed.one_device(lab, program, types, returns, seed)
        for how, edits in typed.mutants(lab, program, types):
            if how not in ("dropped", "doubled"):
                continue
            broken = typed.mutated(lab, program, edits)
            problem = lab.check(broken, types, returns)
            found = lab.mend(broken, types, returns, problem)
            what = f"{name} with a move {how} ({edits})"
            expect(found is not None, f"{what}: mend() finds nothing", "see the three kinds")
            accepted = lab.check(broken, types, returns, dict([found])) is None
            expect(accepted, f"{what}: {found} mends nothing", "check() all of the program")
            off = typed.wrong_on_numbers(lab, broken, types, returns, right, seed, dict([found]))
            expect(not off, f"{what}: with {found} {off}")
            first = finished.mend(broken_in(name, edits), types, returns, again(name, edits))
            hint = "another comes first: the kinds, operands and targets have an order"
            expect(found == first, f"{what}: {found}", hint)
            count += 1
    return f"{count} of {count} programs mended, and right on numbers"


def broken_in(name, edits):
    """The finished lab's program with edits."""
    return typed.mutated(finished, getattr(finished, name), edits)


def again(name, edits):
    """What the finished lab finds wrong with it."""
    return finished.check(broken_in(name, edits), *PROGRAMS[name])


HINTS = {
    "tp_block": "f in front of what is sharded, g behind the sum; one of each in either half",
    "sp_block": "tokens are gathered in front of the matrices, and scattered behind the sum",
    "vocabulary_loss": "f in front of the head; the sums over the vocabulary are summands",
    "replicated_kv": "each axis by itself; a KV head's gradient is a sum over rep",
    "lora": "a1 works for all of the cut outputs, b2 on summands",
}


def check_program(name):
    """The check of a program: accepted, right on numbers, and sends no more than it has to."""

    def check(lab, group, seed):
        types, returns = PROGRAMS[name]
        program = getattr(lab, name)
        problem = lab.check(program, types, returns)
        if problem is not None:
            edit = lab.mend(program, types, returns, problem)
            hint = HINTS[name] + (f"; {edit} would mend it (see mend())" if edit else "")
            raise Wrong(f"line {problem.line}, {problem.operation}: {problem}", hint)
        right = typed.one_device(finished, getattr(finished, name), types, returns, seed)
        off = typed.wrong_on_numbers(lab, program, types, returns, right, seed)
        expect(not off, f"types fit, and {off}", "another layer than the docstring's")
        sent, least = (typed.message_numbers(x, getattr(x, name), types) for x in (lab, finished))
        hint = "it sends more than it has to: one f for what is used several times; move the small"
        expect(sent <= least, f"{sent} numbers in messages, {least} would do", hint)
        return f"accepted; result and gradients as on one device; {sent} numbers in messages"

    return check


CHECKS = {
    "gradient": (check_gradient, 1),
    "sent": (check_sent, 1),
    "letters": (check_letters, 1),
    "shards": (check_shards, 1),
    "rules": (check_rules, 1),
    "reshape": (check_reshape, 1),
    "mend": (check_mend, 1),
}
CHECKS |= {name: (check_program(name), 1) for name in PROGRAMS}


def swapped_gradients(lab):
    """R and I have each other's gradients: what every rank has is taken for a summand."""
    lab.gradient = lambda type: {"I": "P", "P": "R", "R": "I"}.get(type, type)


def affine_partial(lab):
    """P + R is P: what is R counts once for each rank."""
    right = lab.combine_letters

    def combine_letters(kind, types):
        return "P" if kind == "add" and set(types) == {"P", "R"} else right(kind, types)

    lab.combine_letters = combine_letters


def unsummed_norm(lab):
    """Sequence parallelism's norms are not moved: each rank keeps its own tokens' gradient."""
    move = lab.move

    def keep(x, src, dst, axis="tp"):
        return x if len(x.shape) == 1 else move(x, src, dst, axis)

    lab.move = keep


BUGS = [swapped_gradients, affine_partial, unsummed_norm]
