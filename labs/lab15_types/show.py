"""What the finished lab 15 shows: programs with a mistake, refused; which net sees which bug.

Every mutant of the five programs is judged three times: by the checker, on numbers of two
ranks, and by spmd_types, where it is installed. Bugs of break_it.py and pitfalls of lab 3 are
judged as typed programs; what the other nets say stands in nets.json (--nets: anew).
"""

import json
import linecache
from collections import Counter
from pathlib import Path

from labs.kit.cli import check_writable
from labs.kit.harness import table
from labs.kit.pictures import BLUE, GREY, PALE, picture
from labs.lab15_types import nets, oracle, typed
from labs.lab15_types.nets import JUDGED
from labs.lab15_types.typed import PROGRAMS

SHOWN = "sp_block"  # the program that the question is about
HOWS = "dropped", "doubled", "changed", "exchanged"


def judge(lab, name, seed, everything):
    """{"mutants", "wrong", "refused", "mended", "asked", "same", "odd"} of a program."""
    (types, returns), program = PROGRAMS[name], getattr(lab, name)
    right = typed.computed(lab, program, types, returns, seed, world=1)
    found, odd = Counter(), []
    mutants = list(typed.mutants(lab, program, types))
    with oracle.fake_mesh(dict.fromkeys(returns, 2)) as mesh:
        for i, (how, edits) in enumerate([("right", {}), *mutants]):
            broken = typed.edited(lab, program, edits)
            problem = lab.check(broken, types, returns)
            wrong = typed.wrong_on_numbers(lab, broken, types, returns, right, seed)
            found.update([how] * (i > 0), wrong=wrong is not None, refused=problem is not None)
            if (wrong is None) != (problem is None):
                odd.append(f"{name}, {how}, {edits}: {problem} on types, {wrong} on numbers")
            if how in ("dropped", "doubled"):
                edit = lab.mend(broken, types, returns, problem)
                mended = edit and typed.edited(lab, broken, dict([edit]))
                how = types, returns, right, seed
                found.update(mended=mended and not typed.wrong_on_numbers(lab, mended, *how))
            if oracle.INSTALLED and (everything or i % 4 == 0):
                other = oracle.refused(mesh, lab, broken, types, returns)
                found.update(asked=1, same=(other is None) == (problem is None))
                if (other is None) != (problem is None):
                    odd.append(f"{name}, {edits}: {problem} here, {other} in spmd_types")
    return dict(found) | {"mutants": len(mutants), "odd": odd}


def show_mutants(lab, args):
    """The table of mutants; ({program: judge()}, what is off)."""
    rows = [["program", *HOWS, "wrong on numbers", "refused", "mended", "as spmd_types"]]
    found, off = {}, []
    for name in PROGRAMS:
        row = found[name] = judge(lab, name, args.seed, args.everything)
        one = row["dropped"] + row["doubled"]
        same = f"{row['same']} of {row['asked']}" if oracle.INSTALLED else "not installed"
        counts = [row[how] for how in (*HOWS, "wrong", "refused")]
        rows.append([name, *counts, f"{row['mended']} of {one}", same])
        off += row["odd"]
        if row["mended"] != one:
            off.append(f"{name}: {row['mended']} of {one} dropped or doubled moves are mended")
    print("\nPrograms with one mistake: a move dropped, doubled, changed, or two exchanged")
    table(*rows)
    print("\n  mended: dropped and doubled ones, by the collective that the error names; then")
    print("  they are right on numbers. as spmd_types: of every fourth (--everything: of all)")
    return found, off


def show_nets():
    """The table of bugs and nets; (nets, what is off)."""
    found, off = json.loads(nets.NETS.read_bytes()), []
    print("\nWhich net sees which bug: types (no rank, no data), parity (the float64 proof),")
    print("bits (as on one rank to the last bit: lab 16's program, if it has a place for the bug)")
    rows = [["", "bug", *JUDGED, "what the checker says"]]
    for script, bugs in nets.type_verdicts().items():
        for bug, problem in bugs.items():
            row = found.get(script, {}).get(bug, "")
            if ("types" in row) != (problem is not None):
                off.append(f"{script} {bug}: nets.json has {row}, the checker says {problem}")
            marks = [mark(script, bug, net, row) for net in JUDGED]
            rows.append([script, bug, *marks, str(problem or "")[:52]])
    table(*rows)
    groups = {"break_it.py": [], "lab3": [], "lab16": []}
    for script, bugs in found.items():
        groups.get(script, groups["break_it.py"]).extend(bugs.values())
    for name, seen in groups.items():
        counts = [f"{net} {sum(net in row for row in seen)}" for net in JUDGED]
        neither = f"none of them {sum(not row for row in seen)}"
        print(f"  {name}: {len(seen)} bugs, seen by {', by '.join(counts)}; by {neither}")
    return found, off


def mark(script, bug, net, row):
    """x: this net sees the bug; -: it does not; nothing: no program to judge it in."""
    judged = net != "bits" or bug in nets.BITS.get(script, ())
    return "x" if net in row else "-" if judged else ""


def show_error(lab):
    """An error as a user gets it: the line, and the collective that would mend it."""

    def forgotten(x, norm1, q):
        y = lab.norm(x, norm1)
        return lab.linear(lab.move(y, typed.S(1), "R"), q)

    types = {"x": {"tp": typed.S(1)}, "norm1": {"tp": "I"}, "q": {"tp": typed.S(0)}}
    returns = {"tp": typed.S(2)}
    problem = lab.check(forgotten, types, returns)
    number, (i, src, dst, _) = lab.mend(forgotten, types, returns, problem)
    line = linecache.getline(__file__, problem.line).strip()
    print("\nAn error, as it is reported:")
    print(f"  {Path(__file__).name}, line {problem.line}: {line}")
    mend = lab.sent(src, dst), lab.sent(*lab.backward(src, dst))
    print(f"  {problem}")
    print(f"  move operand {i} from {src} to {dst}: forward {mend[0]}, backward {mend[1]}")
    return {"line": line, "mend": [number - problem.call, i, src, dst, *mend]}


def experiment(lab, args):
    """All of it: {"mutants", "nets", "error", "collectives", "failed"}."""
    if args.nets:
        check_writable(nets.NETS)
        print("\nEvery bug once more through the float64 proof, on 2 ranks:")
        nets.make(args.seed)
    mutants, off = show_mutants(lab, args)
    error = show_error(lab)
    table_of_nets, wrong = show_nets()
    found = {"mutants": mutants, "nets": table_of_nets, "error": error, "failed": off + wrong}
    for line in found["failed"]:
        print(f"  {line}")
    sent = typed.messages(lab, getattr(lab, SHOWN), PROGRAMS[SHOWN][0])
    return found | {"collectives": len(sent)}


def draw(results, path):
    """Bugs by nets."""
    with picture(path, [["nets"]], (8, 9)) as axes:
        axis, labels = axes["nets"], []
        for script, bugs in results["nets"].items():
            for bug, row in bugs.items():
                for column, net in enumerate(JUDGED):
                    color = {"x": BLUE, "-": "white", "": PALE}[mark(script, bug, net, row)]
                    axis.barh(len(labels), 0.9, left=column, edgecolor=GREY, color=color, lw=0.5)
                labels.append(f"{script}  {bug.replace('_', ' ')}")
        axis.set_yticks(range(len(labels)), labels, fontsize=6.5)
        axis.set_xticks([0.45, 1.45, 2.45], JUDGED)
        axis.invert_yaxis()
        axis.set_title("Which net sees which bug (grey: no program for it)", loc="left")


PREDICT = (
    "sp_block(): how many collectives do its moves send, forward and backward together?",
    "forward 2 all-gathers, 2 reduce-scatters; backward as many, and an all-reduce for each norm",
    lambda results: results["collectives"],
)


def add_options(parser):
    """The options of this lab's own."""
    add = parser.add_argument
    add("--everything", action="store_true", help="ask spmd_types about every mutant")
    add("--nets", action="store_true", help="all bugs through the proofs: nets.json anew")
