"""What the finished lab 15 shows: programs with a mistake, refused; bugs, and which net sees them.

Every mutant of the five programs is judged three times: by the checker, on numbers of two ranks,
and by spmd_types, where it is installed. Bugs of break_it.py and pitfalls of lab 3 are judged as
typed programs; what the float64 proof says to them stands in nets.json (--nets: anew).
"""

import json
import linecache
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

from labs.kit.cli import check_writable
from labs.kit.harness import LABS, load, on_ranks, table
from labs.kit.pictures import BLUE, GREY, PALE, picture
from labs.lab3_pitfalls import check as lab3
from labs.lab3_pitfalls.show import WRONG, size, try_all
from labs.lab15_types import bits_bugs, oracle, price, typed, typed_bugs
from labs.lab15_types.typed import PROGRAMS

break_it = load(LABS / "break_it.py")
NETS = LABS / "lab15_types" / "nets.json"
SHOWN = "sp_block"  # the program that the question is about
HOWS = "dropped", "doubled", "changed", "exchanged"
WATCHING = "adaptive_timing", "rank_0_clock"  # no number of the model is wrong
JUDGED = "types", "parity", "bits"


def judge(lab, name, seed, everything):
    """{"mutants", "wrong", "refused", "mended", "first", "package", "odd"} of a program."""
    (types, returns), program = PROGRAMS[name], getattr(lab, name)
    right = typed.one_device(lab, program, types, returns, seed)
    found, odd = Counter(), []
    mutants = list(typed.mutants(lab, program, types))
    with oracle.fake_mesh(dict.fromkeys(returns, 2)) as mesh:
        for i, (how, edits) in enumerate([("right", {}), *mutants]):
            broken = typed.mutated(lab, program, edits)
            problem = lab.check(broken, types, returns)
            wrong = typed.wrong_on_numbers(lab, broken, types, returns, right, seed)
            found.update([how] * (i > 0), wrong=wrong is not None, refused=problem is not None)
            if (wrong is None) != (problem is None):
                odd.append(f"{name}, {how}, {edits}: {problem} on types, {wrong} on numbers")
            if how in ("dropped", "doubled"):
                edit = lab.mend(broken, types, returns, problem)
                bad = edit is None or typed.wrong_on_numbers(
                    lab, broken, types, returns, right, seed, dict([edit])
                )
                found.update(mended=not bad)
            if oracle.installed() and (everything or i % 4 == 0):
                other = oracle.refused(mesh, lab, broken, types, returns)
                found.update(asked=1, same=(other is None) == (problem is None))
                if (other is None) != (problem is None):
                    odd.append(f"{name}, {how}, {edits}: {problem} here, {other} in spmd_types")
    return dict(found) | {"mutants": len(mutants), "odd": odd}


def show_mutants(lab, args):
    """The table of mutants; ({program: judge()}, what is off)."""
    rows = [["program", *HOWS, "wrong on numbers", "refused", "mended", "as spmd_types"]]
    found, off = {}, []
    for name in PROGRAMS:
        row = found[name] = judge(lab, name, args.seed, args.everything)
        one = row["dropped"] + row["doubled"]
        same = f"{row['same']} of {row['asked']}" if oracle.installed() else "not installed"
        counts = [str(row[how]) for how in HOWS]
        mended = f"{row['mended']} of {one}"
        rows.append([name, *counts, str(row["wrong"]), str(row["refused"]), mended, same])
        off += row["odd"]
        if row["mended"] != one:
            off.append(f"{name}: {row['mended']} of {one} dropped or doubled moves are mended")
    print("\nPrograms with one mistake: a move dropped, doubled, changed, or two of them exchanged")
    table(*rows)
    print("\n  mended: dropped and doubled ones, by the collective that the error names; then they")
    print("  are right on numbers. as spmd_types: of every fourth mutant (--everything: of all)")
    return found, off


def type_verdicts():
    """{script, lab3 or lab16: {bug: what the checker says, or None}}."""
    found = {}
    for script, bugs in break_it.BUGS.items():
        found[f"{script}.py"] = {bug: typed_bugs.script_says(script, bug) for bug in bugs}
    found["lab3"] = {name: typed_bugs.pitfall_says(name) for name in lab3.CHECKS}
    # orders of sums and random numbers: a type says nothing of either
    found["lab16"] = {bug: None for script, bug in sorted(bits_bugs.JUDGED) if script == "lab16"}
    return found


def proof_sees(script, bug):
    """Whether the float64 proof of a script fails with a bug, on 2 ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2"]
    command += ["labs/break_it.py", script, bug, "--length", "64"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, cwd=LABS.parent, env=environment, capture_output=True, text=True)
    return "FAIL correctness" in run.stdout


def pitfalls_seen(seed):
    """{pitfall: whether a comparison of gradients with one device shows it, or it raises}."""
    names = [name for name in lab3.CHECKS if name not in WATCHING]
    ranks = on_ranks(
        2, try_all, load(LABS / "lab3_pitfalls" / "lesson.py"), names, seed, timeout=120
    )
    found = dict.fromkeys(WATCHING, False)
    for name in names:
        rows = [rank[name]["wrong"] for rank in ranks if "wrong" in rank[name]]
        worst = max(rows, key=size)
        found[name] = worst.get("gradient", size(worst)) > WRONG
    return {name: found[name] for name in lab3.CHECKS}


def make_nets(seed):
    """nets.json anew: {script: {bug: the nets that see it}}."""
    found, bits = {}, bits_bugs.judge(seed)
    for script, bugs in type_verdicts().items():
        seen = pitfalls_seen(seed) if script == "lab3" else {}
        for bug, problem in bugs.items():
            row = bits.get(script, {}).get(bug, [])
            if script != "lab16":
                parity = seen[bug] if script == "lab3" else proof_sees(script, bug)
                row = ["types"] * (problem is not None) + ["parity"] * parity + row
            found.setdefault(script, {})[bug] = row
            print(f"  {script:15} {bug:28} {', '.join(row)}", flush=True)
    NETS.write_text(json.dumps(found, indent=1) + "\n")


def show_nets():
    """The table of bugs and nets; (nets, what is off)."""
    nets, off = json.loads(NETS.read_bytes()), []
    print(
        "\nWhich net sees which bug: types (no rank, no data), parity (the float64 proof), bits (as"
    )
    print("on one rank to the last bit: lab 16's program, where it has a place for the bug)")
    rows = [["", "bug", *JUDGED, "what the checker says"]]
    for script, bugs in type_verdicts().items():
        for bug, problem in bugs.items():
            row = nets.get(script, {}).get(bug, [])
            if ("types" in row) != (problem is not None):
                off.append(f"{script} {bug}: nets.json has {row}, the checker says {problem}")
            marks = [mark(script, bug, net, row) for net in JUDGED]
            rows.append([script, bug, *marks, str(problem or "")[:52]])
    table(*rows)
    groups = {"break_it.py": [], "lab3": [], "lab16": []}
    for script, bugs in nets.items():
        groups.get(script, groups["break_it.py"]).extend(bugs.values())
    for name, seen in groups.items():
        counts = [f"{net} {sum(net in row for row in seen)}" for net in JUDGED]
        neither = f"none of them {sum(not row for row in seen)}"
        print(f"  {name}: {len(seen)} bugs, seen by {', by '.join(counts)}; by {neither}")
    return nets, off


def mark(script, bug, net, row):
    """x: this net sees the bug; -: it does not; nothing: there is no program to judge it in."""
    judged = net != "bits" or (script, bug) in bits_bugs.JUDGED
    return "x" if net in row else "-" if judged else ""


def show_price():
    """What DTensor costs."""
    found = price.prices()
    rows = [
        ["model", "plain step", "with --dtensor", "slower by", "outside kernels: plain", "DTensor"]
    ]
    for name, row in found.items():
        steps = [f"{1e3 * row[kind]['step']:.0f} ms" for kind in ("plain", "dtensor")]
        shares = [f"{row[kind]['outside']:.0%}" for kind in ("plain", "dtensor")]
        rows.append([name, *steps, f"{row['slower']:.0%}", *shares])
    print(
        "\nA training step of tp.py, rank 0 of 2 with silent peers, processor time on this machine"
    )
    table(*rows)
    return found


def collectives(lab):
    """How many collectives sp_block's moves send, forward and backward."""
    types, _ = PROGRAMS[SHOWN]
    moves = [
        args for name, args in typed.calls_of(lab, getattr(lab, SHOWN), types) if name == "move"
    ]
    both = [(lab.sent(src, dst), lab.sent(*lab.backward(src, dst))) for _, src, dst, _ in moves]
    return sum(op is not None for pair in both for op in pair)


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
    print(f"\nAn error, as it is reported:\n  {Path(__file__).name}, line {problem.line}: {line}")
    mend = lab.sent(src, dst), lab.sent(*lab.backward(src, dst))
    print(f"  {problem}")
    print(f"  move operand {i} from {src} to {dst}: forward {mend[0]}, backward {mend[1]}")
    return {"line": line, "mend": [number - problem.call, i, src, dst, *mend]}


def experiment(lab, args):
    """All of it: {"mutants", "nets", "price", "collectives", "failed"}."""
    if args.nets:
        check_writable(NETS)
        print("\nEvery bug once more through the float64 proof, on 2 ranks:")
        make_nets(args.seed)
    mutants, off = show_mutants(lab, args)
    error = show_error(lab)
    nets, wrong = show_nets()
    found = {"mutants": mutants, "nets": nets, "error": error, "failed": off + wrong}
    found["price"] = show_price() if args.price else None
    for line in found["failed"]:
        print(f"  {line}")
    return found | {"collectives": collectives(lab)}


def draw(results, path):
    """Bugs by nets, and the mutants of each program."""
    with picture(path, [["nets", "mutants"]], (13, 9), width_ratios=[3, 2]) as axes:
        axis, labels = axes["nets"], []
        for script, bugs in results["nets"].items():
            for bug, row in bugs.items():
                for column, net in enumerate(JUDGED):
                    marked = mark(script, bug, net, row)
                    colour = {"x": BLUE, "-": "white", "": PALE}[marked]
                    axis.barh(len(labels), 0.9, left=column, color=colour, edgecolor=GREY, lw=0.5)
                labels.append(f"{script}  {re.sub('_', ' ', bug)}")
        axis.set_yticks(range(len(labels)), labels, fontsize=6.5)
        axis.set_xticks([0.45, 1.45, 2.45], ["types", "parity", "bits"])
        axis.invert_yaxis()
        axis.set_title("Which net sees which bug (grey: no program for it)", loc="left")
        axis, left = axes["mutants"], [0] * len(results["mutants"])
        names, rows = list(results["mutants"]), list(results["mutants"].values())
        axis.barh(names, [row["mutants"] for row in rows], color=PALE, label="mutants")
        axis.barh(
            names, [row["wrong"] for row in rows], height=0.5, color=GREY, label="wrong on numbers"
        )
        refused = [row["refused"] for row in rows]
        axis.barh(names, refused, left=left, height=0.25, color=BLUE, label="refused by types")
        axis.invert_yaxis()
        axis.legend(frameon=False, loc="lower right")
        axis.set_title("Programs with a mistake", loc="left")


PREDICT = (
    "sp_block(): how many collectives do its moves send, forward and backward together?",
    "forward 2 all-gathers, 2 reduce-scatters; backward as many, and an all-reduce for each norm",
    lambda results: results["collectives"],
)


def add_options(parser):
    """The options of this lab's own."""
    add = parser.add_argument
    add("--everything", action="store_true", help="ask spmd_types about every mutant, if installed")
    add("--nets", action="store_true", help="all bugs through the proofs: nets.json anew")
    add("--price", action="store_true", help="what DTensor costs a step (half a minute)")
