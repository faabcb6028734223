"""Lab 15's checks: what rules and programs say of types has to hold on numbers of two ranks."""

import inspect
import itertools
import math
import random
from functools import cache, partial

import torch

from labs.kit.compare import tried
from labs.kit.harness import Wrong, expect
from labs.kit.usual import usual_hint
from labs.lab15_types import typed
from labs.lab15_types.typed import PROGRAMS, S, finished

OPERANDS = {  # operations: the arguments that they are tried with, kind by kind
    "linear": ("x", "q"),
    "norm": ("x", "norm1"),
    "embedding": ("ids", "table"),
    "attention": ("heads", "keys", "values"),
}
OPERANDS |= dict.fromkeys(("add", "multiply"), ("x", "y"))
OPERANDS |= dict.fromkeys(("exp", "total", "mean", "softmax"), ("x",))
KINDS = {"add": "add", "multiply": "multiply", "last": "norm", "none": "exp"}
THROUGH = {"add": "all operands are P", "multiply": "one P, all others R", "none": "no P at all"}
THROUGH["last"] = "P is the last operand, the others are R"
MISTAKES = """
== tp_block
multiply(silu(linear(y, gate)), -> multiply(linear(y, gate),  # silu of gate y is left out
(silu(linear(y, gate)), linear(y, up) -> (silu(linear(y, up)), linear(y, gate)  # silu of gate y
multiply(silu(linear(y, gate)), -> (lambda *z: silu(multiply(*z)))(linear(y, gate),  # silu(gate y)
norm(x, norm2) -> norm(x, norm1)  # the second norm is norm2
norm(x, norm1) -> x  # norm(x, norm1) comes before attention
norm(x, norm2) -> x  # norm(x, norm2) comes before the MLP
x = add(x, move(y, "P", "I")) -> x = y  # attention is added to x
return add(x, -> return add(norm(x, norm2),  # the MLP is added to x, not to what is normed
return add(x, -> return multiply(exp(subtract(x, x)),  # the MLP is added to x
norm, attention, o, added to x; norm, MLP, added to that: what you have is another layer
== vocabulary_loss
subtract(log(normalizer), own) -> subtract(own, log(normalizer))  # the target's logit is subtracted
log(normalizer) -> normalizer  # the log of the sum
mean(subtract -> (lambda x: total(total(x)))(subtract  # the mean, not the sum
mean(subtract(log(normalizer), own)) -> subtract(log(normalizer), own)  # the mean over all tokens
subtract(log(normalizer), own) -> log(normalizer)  # less the target's logit
log(sum of exp(logits)) - the target's logit, and of that the mean
== replicated_kv
attention, then o, as the docstring has them
== lora
y = silu(add(linear(x, up), -> y = (add(silu(linear(x, up)),  # silu of the sum, not of up x alone
silu(add(linear(x, up), -> (lambda *z: add(*map(silu, z)))(*(linear(x, up),  # silu of the sum
y = silu(add( -> y = (add(  # silu of (up + b1 a1) x
y = add(linear(y, down), -> y = (lambda x, y: x)(linear(y, down),  # + b2 a2 y
(down + b2 a2) silu((up + b1 a1) x), and nothing else
"""


def called(function, *args):
    """What a function of the lab's returns; None where it raises TypeProblem."""
    hint = "raise TypeProblem, with a message, where types do not fit"
    try:
        found = function(*args)
    except NotImplementedError:  # an exercise not done
        raise
    except Exception as problem:
        if type(problem).__name__ == "TypeProblem":
            return None
        raise Wrong(f"{type(problem).__name__}: {problem}", hint) from problem
    expect(found is not None, "None is returned", hint)
    return found


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
    outs = [{"tp": out} for out in ("R", "I", "P", *map(S, range(dims)))]
    rights = [typed.one_device(finished, program, own, out) for out in outs]
    fine = [typed.wrong_on_numbers(finished, program, own, *out) for out in zip(outs, rights)]
    return tuple(out["tp"] for out, wrong in zip(outs, fine) if not wrong)


def cases(operation):
    """Types of the operands: R, I, P and S(d); of ids, which have no gradient, R and S(d)."""
    letters = dict.fromkeys(("ids", "table"), ["R", "P"])
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
        found = tried(f"gradient({type!r})", "of any d", lab.gradient, type)
        expect(found == own, f"the gradient of {type} is {found}, not {own}", hint)
    for pair in " ".join(lab.MOVES).split():
        src, dst = (f"S({i})" if letter == "S" else letter for i, letter in enumerate(pair))
        found, own = lab.backward(src, dst), (right.get(dst, dst), right.get(src, src))
        hint = "from the gradient of dst to that of src"
        expect(found == own, f"backward of {src} to {dst}: {found}, not {own}", hint)
        expect(typed.BACK[pair] == own[0][0] + own[1][0], pair)  # what the numbers do
    return "6 types, 15 moves"


def check_sent(lab, group, seed):
    """Who needs numbers of others? Those whose result differs when another rank's input does."""
    names = {"PR": "all_reduce", "PI": "all_reduce", "PS": "reduce_scatter", "SR": "all_gather"}
    names |= {"SI": "all_gather", "SS": "all_to_all"}
    xs = torch.randn(2, 2, 4)
    for pair in " ".join(lab.MOVES).split():
        src, dst = (f"S({i})" if letter == "S" else letter for i, letter in enumerate(pair))
        before, after = (typed.carry_out(src, dst, [xs[0], other])[0] for other in (xs[1], xs[0]))
        needed, found = not torch.equal(before, after), lab.sent(src, dst)
        hint = "a rank needs what others have" if needed else "a rank has what it needs"
        hint += "; S(0), S(1), .. begin with S" * (needed and "S" in pair)
        hint = hint if (found is not None) != needed else f"{names.get(pair)}: see MOVES"
        expect(found == names.get(pair), f"{src} to {dst}: sent() is {found}", hint)
        expect((found is not None) == needed, f"{pair}: {found}")  # as the numbers say
    return "6 of 15 moves send something"


def check_letters(lab, group, seed):
    for (kind, operation), n in itertools.product(KINDS.items(), (1, 2, 3)):
        for types in itertools.product("RIPV", repeat=n):
            found, right = (called(x.combine_letters, kind, [*types]) for x in (lab, finished))
            what, hint = f"{kind} of {', '.join(types)}", THROUGH[kind]
            if {"I"} < {*types}:
                hint = "I with I alone: with R beside it, its gradient would be a summand"
            elif "V" in types or "P" not in types:
                hint = "R is R, I is I; V with R or V is V, and with no other"
            if "V" not in types and n == len(OPERANDS[operation]):
                compare(what, found, true_types(operation, types), hint)
            expect(found == right, f"{what}: {found or 'refused'}, not {right or 'refused'}", hint)
    return "R, I and P as on numbers of 2 ranks; V"


def check_shards(lab, group, seed):
    for operation in OPERANDS:
        _, equation, whole = finished.rule(operation)
        dims = "abc" if operation in ("add", "multiply", "exp", "mean") else "ab"
        *labels, out = equation.replace("*", dims).replace("->", ",").split(",")
        for types in cases(operation):
            if any(type[0] == "S" for type in types):
                found = called(lab.combine_shards, labels, out, whole, list(types))
                what = f"{operation} of {', '.join(types)} ({equation})"
                hint = hint_of(labels, out, whole, types)
                compare(what, found, true_types(operation, types), hint)
    for *types, right in (("V", S(0), "V"), (S(1), "V", "V"), (S(0), "V", "I", None)):
        found = called(lab.combine_shards, ["ab"] * len(types), "ab", "", types)
        told = f"{', '.join(types)}: {found or 'refused'}, not {right or 'refused'}"
        expect(found == right, told, "V beside a shard is V; I or P beside a shard is refused")
    return "all types of operands, as on numbers of 2 ranks"


def hint_of(labels, out, whole, types):
    """What to think of, where a combination with shards is wrong."""
    names = [label[finished.sharded_dim(t)] for label, t in zip(labels, types) if t[0] == "S"]
    if len(set(names)) > 1:
        return "rank r has slice r of one dimension and slice r of another: a block of the diagonal"
    if {"I", "P"} & set(types):
        return "a shard has R beside it, or a shard"
    if any(t == "R" and names[0] in label for label, t in zip(labels, types)):
        return "the R operand has all of the sharded dimension: it has to be cut first"
    if names[0] in whole:
        return f"the letter is in whole ({whole!r}): one number needs all others along it"
    if names[0] in out:
        return "R without the letter fits; the result is sharded where out has the letter"
    return "out lacks the letter: a sum, of which each rank has a summand: P"


def line_of(text, *names):
    """What stands behind the first of these names that has a line in a text; "" if none has."""
    found = (text.partition(f"\n{name}: ")[2].partition("\n")[0] for name in names)
    return next(filter(None, found), "")


def rule_hint(lab, operation):
    """What is wrong with a rule: its kind, its equation or the letters in whole."""
    parts = []
    for kind, equation, whole in (x.rule(operation) for x in (lab, finished)):
        letters = dict.fromkeys(filter(str.isalpha, equation))  # numbered as they come
        known = str.maketrans({letter: str(i) for i, letter in enumerate(letters)})
        parts.append((kind, equation.translate(known), sorted(whole.translate(known))))
    hints = line_of(typed.RULE_HINTS, operation).split("; ")
    return next((hint for hint, *pair in zip(hints, *parts) if pair[0] != pair[1]), "")


def check_rules(lab, group, seed):
    for operation in ("linear", "norm", "softmax", "embedding", "attention"):
        for types in cases(operation):
            shapes = [typed.SHAPES[name] for name in OPERANDS[operation]]
            operands = [lab.Typed(shape, {"tp": type}) for shape, type in zip(shapes, types)]
            made = called(lab.operate, operation, *operands)
            found = made and made.types["tp"]
            right, hint = true_types(operation, types), rule_hint(lab, operation)
            compare(f"{operation} of {', '.join(types)}", found, right, hint)
            shape = {"attention": (2, 4, 4, 2), "linear": (2, 4, 16)}.get(operation, (2, 4, 8))
            what = f"{operation}: {made and made.shape}"
            expect(made is None or made.shape == shape, what, hint)
    shapes = (2, 4, 8, 3), (2, 6, 8, 3), (2, 6, 8, 5)
    made = called(lab.operate, "attention", *(lab.Typed(shape, {"tp": "R"}) for shape in shapes))
    found = f"attention of q, k and v of shapes {shapes}: {made and made.shape}"
    expect(made and made.shape == (2, 4, 8, 5), found, rule_hint(lab, "attention"))
    return "all types of their operands, as on numbers of 2 ranks"


def check_reshape(lab, group, seed):
    drawn, refused = random.Random(seed), 0
    fixed = [((2, 4, 8), (2, 4, 4, 2), 2), ((2, 4, 4, 2), (2, 4, 8), 3), ((2, 8), (16,), 1)]
    fixed += [((4, 6), (1, 4, 6), 0), ((4, 6), (4, 1, 6), 1), ((1, 4, 6), (4, 6), 1)]
    for i in range(100):
        old, new = ([2 ** drawn.randint(1, 2) for _ in range(3)] for _ in "ab")
        new[-1] = math.prod(old) // math.prod(new[:-1]) or 1
        old, new, dim = (tuple(old), tuple(new), drawn.randrange(3)) if i >= 6 else fixed[i]
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
        axes = ("tp", "dp")[:: 1 - i % 2 * 2]
        other = S(dim) if i % 3 else "P"
        x = lab.Typed(old, {axes[0]: S(dim), axes[1]: other})
        made = called(lab.reshape, x, asked)
        found = made and made.types[axes[0]]
        hint = "the dimensions before d, and those before e, have the same product"
        hint = hint if right else "no dimension begins where d did: TypeProblem"
        hint = "one number cannot be cut: the next dimension that fits" if 1 in new else hint
        compare(f"{old}, {S(dim)}, reshaped to {asked}", found, right, hint)
        expect(x.types[axes[0]] == S(dim), "the argument x has other types now", "dict(x.types)")
        refused += made is None
        if made is not None:
            fine = made.types.get(axes[1]) == (found if other != "P" else other)
            fine = fine and made.shape == tuple(new)
            expect(fine, f"{x} becomes {made}", "every axis has a type: S(d) moves, a letter stays")
    return f"100 reshapes as on numbers, {refused} of them refused"


def check_mend(lab, group, seed):
    for name, (types, returns) in PROGRAMS.items():
        program = getattr(lab, name)
        right = typed.one_device(lab, program, types, returns, seed)
        mutants = typed.mutants(lab, program, types)
        for how, edits in (m for m in mutants if m[0] in ("dropped", "doubled")):
            what = f"{name} with a move {how} ({edits})"
            both = [typed.mutated(x, getattr(x, name), edits) for x in (lab, finished)]
            found = expect_mended(what, lab, both, types, returns)
            off = typed.wrong_on_numbers(lab, both[0], types, returns, right, seed, dict([found]))
            expect(not off, f"{what}: with {found} {off}")
    for what, made, k, v in SMALL:
        types = {"k": {"tp": k}, "v": {"tp": v}, "norm1": {"tp": "I"}}
        expect_mended(what, lab, [partial(made, x) for x in (lab, finished)], types, {"tp": "I"})
    return f"all programs mended, and right on numbers; {len(SMALL)} small ones"


SMALL = (  # what, program (of a module's operations), types of k and v
    ("an unused exp(k)", lambda x, k, v, norm1: (x.exp(k), norm1)[1], "P", "R"),
    ("an unused k + v", lambda x, k, v, norm1: (x.add(k, v), norm1)[1], "I", "P"),
    ("a result k", lambda x, k, v, norm1: k, "V", "R"),
    ("a v + k, summed", lambda x, k, v, norm1: (x.add(v, x.move(k, "P", "R")), norm1)[1], "P", "I"),
    ("v + k, summed to R", lambda x, k, v, norm1: x.add(v, x.move(k, "P", "R")), "P", "I"),
)


def expect_mended(what, lab, programs, *how):
    """Raise Wrong unless mend() mends the lab's program as the finished one its own; the edit."""
    problem, other = (x.check(program, *how) for x, program in zip((lab, finished), programs))
    right = finished.mend(programs[1], *how, other)
    hint = "an edit is (number of a call, (operand or None, src, dst, axis)), axis one of x.types"
    found = tried(f"{what}: mend()", hint, lab.mend, programs[0], *how, problem)
    hint = "all three kinds, of each operand and axis, each dst: R, I, S(d) for every d, P"
    expect(found is not None or right is None, f"{what}: mend() finds nothing", hint)
    accepted = found == right or lab.check(programs[0], *how, dict([found])) is None
    hint = "check() all of the program; None where no edit will do"
    expect(accepted, f"{what}: {found} mends nothing", hint)
    hint = "another comes first: a move left out, then other moves before, then moves in front;"
    expect(found == right, f"{what}: {found}", f"{hint} operands in order; dst R, I, S(0), .., P")
    return found


def mending(lab, program, types, returns, problem, least):
    """The edit that mends a program, in words; "" where it would send more than it has to."""
    number, how = lab.mend(program, types, returns, problem) or (None, None)
    mended = typed.mutated(lab, program, {number: how})
    if not how or typed.message_numbers(lab, mended, types) > least:
        return ""
    i, src, dst, axis = how
    where = "in place of an operand's move" if i is None else f"of operand {i + 1}"
    move = f"a move {src} to {dst} on {axis}, {where}," if src != dst else "leaving the move out"
    return f"; mend it by {move}"


def layer_hint(lab, name, seed):
    """Which usual mistake gives the result that a program of the lab gives on one device."""
    types, returns = PROGRAMS[name]
    function = getattr(finished, name.replace("sp_", "tp_"))  # on one device they are the same
    mine, _ = typed.one_device(lab, getattr(lab, name), types, returns, seed)
    full = typed.drawn(types, seed)
    args = [typed.Ranks([full[argument]]) for argument in inspect.signature(function).parameters]
    with typed.inside(finished, typed.on_numbers(dict.fromkeys(returns, 1))):
        return usual_hint(MISTAKES, function, args, mine, 0)


def check_program(name):
    """The check of a program: accepted, right on numbers, and sends no more than it has to."""

    def check(lab, group, seed):
        types, returns = PROGRAMS[name]
        program = getattr(lab, name)
        hint = "move(x, src, dst, axis): on the axes kv and rep, if there are two"
        problem = tried(name, hint, lab.check, program, types, returns)
        least = typed.message_numbers(finished, getattr(finished, name), types)
        if problem is not None:
            hint = line_of(typed.PROGRAM_HINTS, f"{name} {problem.operation}", name)
            hint += mending(lab, program, types, returns, problem, least)
            hint = f"{hint}; sizes: see the shapes" if str(problem).startswith("sizes") else hint
            raise Wrong(f"line {problem.line}, {problem.operation}: {problem}", hint)
        right = typed.one_device(finished, getattr(finished, name), types, returns, seed)
        off = typed.wrong_on_numbers(lab, program, types, returns, right, seed)
        expect(not off, f"types fit, and {off}", off and layer_hint(lab, name, seed))
        mine, norms = (typed.norms(x, getattr(x, name), types) for x in (lab, finished))
        hint = "a norm is of the residual stream, in front of f or of the gather"
        expect(mine == norms, f"norms of what is {mine}, not {norms}", hint)
        sent = typed.message_numbers(lab, program, types)
        hint = "it sends more than it has to: one f for what is used several times; move the small"
        hint += "; an all-reduce counts twice: it is a reduce-scatter and an all-gather"
        hint = line_of(typed.PROGRAM_HINTS, f"{name} messages") or hint
        expect(sent <= least, f"{sent} numbers in messages: send {least}", hint)
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
