"""Mutation proof: change the lesson of each script in many small ways; correctness must catch it.

    python tests/mutants.py                      # all mutants of the four scripts: about an hour
    python tests/mutants.py --every 5            # every fifth of them; --start 1: from the second
    python tests/mutants.py --only tp.py:split   # those whose name contains this
    python tests/mutants.py --list               # their names

A mutant is a script with one change in its sections 2 to 4, the lesson, made from its syntax tree
by changes(). Code that stands in several scripts is changed in its original only. A mutant runs
--mode correctness as TRIALS say, on 1 to 5 ranks; it is caught by the first rank that does not exit
with 0, or that waits for ever. Those that no trial can catch, because they compute the same, stand
in survivors.txt with the reason. Exit status: 0 if exactly these survive, 1 if not.
"""

import argparse
import ast
import contextlib
import functools
import sys
import tempfile
from collections import Counter
from functools import partial
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))  # PYTHONSAFEPATH leaves it out
from forks import ROOT, compiled, on_ranks, prepare, run_script  # noqa: E402
from forks import STRATEGIES as SCRIPTS  # noqa: E402

WAIT = ["--timeout", "20"]  # a rank that waits longer for another one ends
NOT_RUN = {  # what correctness without further options never runs; each has tests of its own
    "expected_traffic": "benchmark mode's formula",
    "finalize_args": "refuses what cannot work, and fills in defaults",
    "parallelize_by_dtensor": "--dtensor",
    "grad_norm_by_dtensor": "--dtensor",
    "check_heads": "refuses what cannot work",
    "simulate": "draws schedules; test_schedules.py",
    "pp.py:Pipeline.run: self.wait(self.sending.pop(kind)) -> pass": "caught by chance; "
    "test_scripts.py watches it",
    "pp.py:Pipeline.send: self.wait(self.sending.get(kind)) -> pass": "caught by chance; "
    "test_scripts.py watches it",
}
SWAPS = {  # a name and the one that it is mistaken for, where a function knows both
    "copy_to_tp_region": "reduce_from_tp_region",
    "reduce_from_tp_region": "copy_to_tp_region",
    "gather_from_sp_region": "reduce_scatter_to_sp_region",
    "reduce_scatter_to_sp_region": "gather_from_sp_region",
    "all_gather": "reduce_scatter",
    "reduce_scatter": "all_gather",
    "tokens_to_heads": "heads_to_tokens",
    "heads_to_tokens": "tokens_to_heads",
    "send": "receive",
}
COLLECTIVES = {*SWAPS, "all_reduce", "all_to_all"} - {"send"}
SOURCES = {  # the same kind of number, from elsewhere
    "labels": "targets", "targets": "labels", "args.length": "hidden.shape[1]",
    "hidden.shape[1]": "args.length", "args.batch": "len(hidden)", "len(hidden)": "args.batch",
    "dist.ReduceOp.MAX": "dist.ReduceOp.SUM", "dist.ReduceOp.SUM": "dist.ReduceOp.MAX",
}  # fmt: skip
DROPS = {"float", "clone", "contiguous", "detach", "clamp", "masked_fill", "requires_grad_"}
TENSORS = {*COLLECTIVES, "linear", "embedding", "apply", "sum", "exp_", "log", "cat", "stack"}
TENSORS |= {"checkpoint", "sum_of_losses", "to", "mul_", "div_", "flatten", "permute"}
ROUND = "(lambda x: x.bfloat16().to(x.dtype) if x.is_floating_point() else x)"
SIGNS = {  # of an operation, and of the one that it is changed to
    ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "//"), ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"), ast.Mod: ("%", "//"), ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="), ast.GtE: (">=", ">"), ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is"), ast.BitOr: ("|", "&"),
    ast.And: ("and", "or"), ast.Or: ("or", "and"),
}  # fmt: skip

CHUNK = ("LOSS_CHUNK = 2048", "LOSS_CHUNK = 8")  # so that short sequences take several chunks
LONG = "--length 13 --batch 3"
PLAIN = [  # (ranks, model and options)
    (2, f"shared_kv {LONG} --attn eager"),  # chunks of the loss
    (3, f"own_kv {LONG} --loss full"),
    (2, f"own_kv {LONG} --attn eager --recompute none"),  # two KV heads on a rank, and one
    (4, f"two_kv {LONG}"),  # a KV head on two ranks
    (5, f"shared_kv {LONG}"),  # its query heads unevenly on five
    (2, f"bias {LONG}"),
    (2, f"head_dim {LONG}"),  # sliding windows
    (2, f"shared_kv {LONG} --dtype bfloat16"),
    (1, f"shared_kv {LONG}"),
    (2, "longrope --length 20 --batch 3"),  # step 2 has 13 tokens
    (2, f"own_kv {LONG} --mode learning"),  # train_step()
]
CUT = "--length 13 --batch 5 --microbatches 3"
PIPELINES = [
    (2, f"deep --schedule zb {CUT}"),
    (2, f"deep --schedule 1f1b {CUT}"),
    (3, f"deep --schedule interleaved {CUT}"),
    (2, f"deep --schedule interleaved {CUT[:-1]}4"),
    (2, f"deep_untied --schedule afab --loss full --recompute none {CUT}"),
    (3, f"deep --schedule 1f1b {CUT}"),
    (3, f"deep --schedule zb {CUT}"),
    (4, f"deep --schedule zb {CUT}"),  # more ranks than microbatches
    (1, f"deep --schedule interleaved {CUT}"),  # all stages on one
    (2, f"deep --schedule zb --dtype bfloat16 {CUT}"),
    (2, f"even --schedule 1f1b --mode learning {CUT}"),
]
TRIALS = dict.fromkeys(SCRIPTS, PLAIN) | {"pp.py": PIPELINES}
TRIALS["sp_ulysses.py"] = [*PLAIN, (3, f"own_kv {LONG} --shard-weights")]


def survivors():
    """{mutant that no trial can catch: the reason}, of survivors.txt."""
    _, *parts = (ROOT / "tests" / "survivors.txt").read_text().split("\n# ")
    return {name: part.splitlines()[0] for part in parts for name in part.split("\n")[1:] if name}


EQUIVALENT = survivors()


class Mutant(NamedTuple):
    """One change: its name "SCRIPT:FUNCTION: old -> new", the script, its whole text, changed."""

    name: str
    script: str
    source: str


# ---- Making them ---------------------------------------------------------------------------------


class Source:
    """A script's text, and where the nodes of its syntax tree stand in it."""

    def __init__(self, script):
        self.data = (ROOT / script).read_bytes()  # bytes, as the syntax tree counts
        self.lines = self.data.decode().splitlines(keepends=True)
        self.starts = [0]  # where each line begins
        for line in self.lines:
            self.starts.append(self.starts[-1] + len(line.encode()))

    def place(self, node):
        begin, end = self.starts[node.lineno - 1], self.starts[node.end_lineno - 1]
        return begin + node.col_offset, end + node.end_col_offset

    def part(self, begin, end):
        return self.data[begin:end].decode()

    def text(self, node):
        return self.part(*self.place(node))

    def changed(self, node, new, within=None):
        """The whole text, or that of a node within, with a new one in a node's place."""
        first, last = self.place(within) if within else (0, None)
        begin, end = self.place(node)
        return self.part(first, begin) + new + self.part(end, last)


def changes(node, source, names):
    """The changes of a node in a function that knows these names: (part replaced, its new text)."""
    text = source.text
    if isinstance(node, ast.Call):
        yield from changed_call(node, source)
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in SWAPS:
        yield node, SWAPS[node.id]
    read = isinstance(node, ast.expr) and isinstance(getattr(node, "ctx", ast.Load()), ast.Load)
    if read and (other := SOURCES.get(text(node))) and knows(names, other):
        yield node, other
    if isinstance(node, ast.Constant) and type(node.value) is int:
        yield node, str(node.value + 1)
    if isinstance(node, ast.Constant) and type(node.value) is bool:
        yield node, str(not node.value)
    if isinstance(node, (ast.BinOp, ast.Compare, ast.BoolOp)):
        sign = type(node.ops[0] if isinstance(node, ast.Compare) else node.op)
        if sign in SIGNS:
            yield node, swapped_sign(node, sign, source)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.Invert, ast.Not)):
        yield node, text(node.operand)
    if isinstance(node, ast.If):
        yield node.test, f"not ({text(node.test)})"
    if isinstance(node, ast.IfExp):
        yield node, f"({text(node.orelse)} if {text(node.test)} else {text(node.body)})"
    if isinstance(node, ast.Expr) and isinstance(node.value, (ast.Call, ast.Yield)):
        yield node, "pass"  # a statement is forgotten
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute):
        yield node, "pass"
    if isinstance(node, ast.AugAssign):
        yield node, "pass"
        yield node, f"{text(node.target)} = {text(node.value)}"
    if isinstance(node, (ast.Assign, ast.AugAssign, ast.Expr)) and "group" in names:
        target = node.targets[0] if isinstance(node, ast.Assign) else node
        called_one = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
        if called_one or isinstance(target, (ast.Attribute, ast.AugAssign)):
            yield node, f"if group.rank() == 0: {text(node)}"  # other ranks forget it
    if isinstance(node, ast.Return) and is_tensor(node.value):
        yield node.value, f"{ROUND}({text(node.value)})"
        if "group" in names:  # right on one rank only
            yield node.value, f"(1 + group.rank()) * ({text(node.value)})"
    if isinstance(node, (ast.Assign, ast.AugAssign)) and is_tensor(node.value):
        yield node.value, f"{ROUND}({text(node.value)})"


def changed_call(node, source):
    """The changes of a call."""
    text, name = source.text, called(node)
    if name in COLLECTIVES and node.args:
        yield node, text(node.args[0])  # the collective is forgotten
        rest = "".join(f", {text(a)}" for a in node.args[1:])
        rest += "".join(f", {k.arg}={text(k.value)}" for k in node.keywords)
        if not isinstance(node.func, ast.Attribute):
            yield node, f"{name}({text(node)}{rest})"  # done twice
    if name in DROPS and isinstance(node.func, ast.Attribute):
        yield node, text(node.func.value)
    if name in ("max", "min") and isinstance(node.func, ast.Name) and len(node.args) == 2:
        yield from ((node, text(argument)) for argument in node.args)
    if name == "max" and isinstance(node.func, ast.Attribute):  # of logits: 0 instead
        yield node, f"({text(node.func.value)} * 0).max(-1, keepdim=True)"


def called(call):
    """The name of the function that a call calls, without its module."""
    return getattr(call.func, "attr", None) or getattr(call.func, "id", None)


def is_tensor(node):
    """Whether an expression looks like one whose value is a tensor."""
    if isinstance(node, ast.BinOp):
        return is_tensor(node.left) or is_tensor(node.right)
    return isinstance(node, ast.Call) and called(node) in TENSORS


def knows(names, expression):
    """Whether all variables of an expression are among the names; a module's are everywhere."""
    variables = {n.id for n in ast.walk(ast.parse(expression)) if isinstance(n, ast.Name)}
    return variables - {"dist", "len"} <= names


def swapped_sign(node, sign, source):
    """The text of an operation or comparison with another sign: of a <= b < c, the first."""
    old, new = SIGNS[sign]
    if isinstance(node, ast.BoolOp):
        return f" {new} ".join(source.text(value) for value in node.values)
    left, right = node.left, node.comparators[0] if isinstance(node, ast.Compare) else node.right
    (begin, end), (_, left_end), (right_begin, _) = map(source.place, (node, left, right))
    between = source.part(left_end, right_begin).replace(old, new, 1)
    return source.part(begin, left_end) + between + source.part(right_begin, end)


@functools.cache
def mutants(script):
    """All mutants of one script, in the order of its lines."""
    source = Source(script)
    lines = source.lines
    banners = [i + 1 for i, line in enumerate(lines) if line.startswith(("# ---- 2.", "# ---- 5."))]
    found, counts = [], Counter()
    for top in ast.parse(source.data).body:
        above = lines[first_line(top) - 2]
        copied = above.startswith("# Copied from ") and f"from {script}" not in above
        name = getattr(top, "name", "")
        if not banners[0] < top.lineno < banners[1] or copied or name in NOT_RUN:
            continue
        for function in [n for n in ast.walk(top) if isinstance(n, ast.FunctionDef)]:
            where = function.name if function is top else f"{top.name}.{function.name}"
            names = {n.id for n in ast.walk(function) if isinstance(n, ast.Name)}
            names |= {argument.arg for argument in function.args.args}
            for node in own_nodes(function):
                for part, new in changes(node, source, names):
                    with contextlib.suppress(SyntaxError):  # a keyword argument's order, or so
                        ast.parse(source.changed(part, new, within=top))
                        mutated = source.changed(part, new)
                        old, new = (" ".join(t.split()) for t in (source.text(part), new))
                        new = new.replace(ROUND, "rounded")
                        new = new.replace(old, "...") if len(old) > 20 else new
                        name = f"{script}:{where}: {old} -> {new}"
                        counts[name] += 1
                        name += f" (no. {counts[name]})" if counts[name] > 1 else ""
                        found.append((source.place(part), Mutant(name, script, mutated)))
    return [mutant for _, mutant in sorted(found, key=lambda pair: pair[0])]


def own_nodes(function):
    """The nodes of a function's statements, without those of functions within."""
    within = [f for f in ast.walk(function) if isinstance(f, ast.FunctionDef) and f is not function]
    others = {node for f in within for node in ast.walk(f)}
    nodes = [node for statement in function.body for node in ast.walk(statement)]
    return [node for node in nodes if node not in others]


def first_line(node):
    """Its first line, decorators included."""
    return min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])


# ---- Running them --------------------------------------------------------------------------------


def caught(mutant, folder):
    """What catches a mutant: "2 ranks, exit 1: the last line said", or None if nothing does."""
    output, source = f"{folder}/output", mutant.source.replace(*CHUNK)
    compiled(mutant.script, source)
    for world, line in TRIALS[mutant.script]:
        model, *options = line.split()
        argv = ["--model", f"{folder}/{model}", *options, *WAIT]
        life = partial(run_script, mutant.script, source, argv)
        codes = on_ranks(world, life, output)
        if any(codes) or None in codes:
            said = Path(output).read_text(errors="replace").strip().splitlines() or [""]
            exits = ", ".join(str(code) for code in codes if code) or "none"
            return f"{world} ranks, {line}, exit {exits}: {said[-1][:100]}"
    return None


def main(argv=None):
    """Returns the exit status: 0 if the mutants that survive are those known to be equivalent."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--every", type=int, default=1, metavar="N", help="every Nth mutant only")
    add("--start", type=int, default=0, metavar="N", help="without the first N")
    add("--only", nargs="+", default=[""], metavar="TEXT", help="those whose name contains one")
    add("--list", action="store_true", help="name them, run none")
    args = parser.parse_args(argv)
    every = [mutant for script in SCRIPTS for mutant in mutants(script)]
    chosen = [m for m in every if m.name not in NOT_RUN and any(t in m.name for t in args.only)]
    chosen = chosen[args.start :: args.every]
    if args.list:
        print(*(m.name for m in chosen), sep="\n")
        return 0
    wrong, scores = [], {script: Counter() for script in SCRIPTS}
    with tempfile.TemporaryDirectory() as folder:
        prepare(folder)
        for script in sorted({m.script for m in chosen}, key=SCRIPTS.index):
            unchanged = (ROOT / script).read_text()
            assert CHUNK[0] in unchanged, "a constant has another value now"
            why = caught(Mutant(f"{script}: unchanged", script, unchanged), folder)
            if why:
                raise SystemExit(f"{script} itself does not pass: {why}")
        for mutant in chosen:
            why, known = caught(mutant, folder), mutant.name in EQUIVALENT
            said = "caught" if why else "equivalent" if known else "SURVIVED"
            scores[mutant.script]["equivalent" if known else said] += 1
            if known == bool(why):
                wrong.append(mutant.name)
            print(f"{said}  {mutant.name}  {why or ''}", flush=True)
    print(f"\n{'':16}{'mutants':>8}{'caught':>8}{'equivalent':>12}{'survived':>10}")
    for script, score in scores.items():
        row = score["caught"], score["equivalent"], score["SURVIVED"]
        print(f"{script:16}{sum(row):8}{row[0]:8}{row[1]:12}{row[2]:10}")
    if wrong:
        print("", *(f"not as survivors.txt says: {name}" for name in wrong), sep="\n")
    print(f"\n{'FAIL' if wrong else 'PASS'} mutants: {len(wrong)} of {len(chosen)} not as expected")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
