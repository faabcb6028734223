"""What the finished lab 15 shows: programs with a mistake, refused, and the error that one gets.

Every mutant of the five programs is judged twice: by the checker, and on numbers of two ranks.
"""

import linecache
from collections import Counter
from pathlib import Path

from labs.kit.harness import table
from labs.kit.pictures import BLUE, GREEN, ORANGE, PINK, picture
from labs.lab15_types import typed
from labs.lab15_types.typed import PROGRAMS

SHOWN = "sp_block"  # the program that the question is about
HOWS = {"dropped": BLUE, "doubled": ORANGE, "changed": GREEN, "exchanged": PINK}


def judge(lab, name, seed):
    """{"mutants", "wrong", "refused", "mended", "odd", each of HOWS} of a program."""
    (types, returns), program = PROGRAMS[name], getattr(lab, name)
    right = typed.computed(lab, program, types, returns, seed, world=1)
    found, odd = Counter(), []
    mutants = list(typed.mutants(lab, program, types))
    for how, edits in [("right", {}), *mutants]:
        broken = typed.edited(lab, program, edits)
        problem = lab.check(broken, types, returns)
        wrong = typed.wrong_on_numbers(lab, broken, types, returns, right, seed)
        found.update([how], wrong=wrong is not None, refused=problem is not None)
        if (wrong is None) != (problem is None):
            odd.append(f"{name}, {how}, {edits}: {problem} on types, {wrong} on numbers")
        if how in ("dropped", "doubled"):
            edit = lab.mend(broken, types, returns, problem)
            mended = edit and typed.edited(lab, broken, dict([edit]))
            given = types, returns, right, seed
            found.update(mended=mended and not typed.wrong_on_numbers(lab, mended, *given))
    return dict(found) | {"mutants": len(mutants), "odd": odd}


def show_mutants(lab, args):
    """The table of mutants; ({program: judge()}, what is off)."""
    rows = [["program", *HOWS, "wrong on numbers", "refused", "mended"]]
    found, off = {}, []
    for name in PROGRAMS:
        row = found[name] = judge(lab, name, args.seed)
        one = row["dropped"] + row["doubled"]
        counts = [row[how] for how in (*HOWS, "wrong", "refused")]
        rows.append([name, *counts, f"{row['mended']} of {one}"])
        off += row["odd"]
        if row["mended"] != one:
            off.append(f"{name}: {row['mended']} of {one} dropped or doubled moves are mended")
    print("\nPrograms with one mistake: a move dropped, doubled, changed, or two exchanged")
    table(*rows)
    print("\n  mended: dropped and doubled ones, by the collective that the error names; then")
    print("  they are right on numbers")
    return found, off


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
    """All of it: {"mutants", "error", "collectives", "failed"}."""
    mutants, off = show_mutants(lab, args)
    error = show_error(lab)
    for line in off:
        print(f"  {line}")
    sent = typed.messages(lab, getattr(lab, SHOWN), PROGRAMS[SHOWN][0])
    return {"mutants": mutants, "error": error, "failed": off, "collectives": len(sent)}


def draw(results, path):
    """How many mistakes of each kind a program can have, and how many are refused."""
    with picture(path, [["mutants"]], (8, 4)) as axes:
        axis = axes["mutants"]
        for name, row in results["mutants"].items():
            left = 0
            for how, color in HOWS.items():
                label = how if name == SHOWN else None
                axis.barh(name, row[how], left=left, color=color, label=label)
                left += row[how]
            words = f"{row['wrong']} wrong, {row['refused']} refused"
            axis.text(left + 3, name, words, va="center")
        title = "Programs with one mistake: how many are wrong on numbers of two ranks,"
        axis.set_title(f"{title}\nand how many the checker refuses. A move is ...", loc="left")
        axis.set_xlim(right=1.3 * max(row["mutants"] for row in results["mutants"].values()))
        axis.invert_yaxis()
        axis.legend(frameon=False)


PREDICT = (
    "sp_block(): how many collectives do its moves send, forward and backward together?",
    "forward 2 all-gathers, 2 reduce-scatters; backward as many, and an all-reduce for each norm",
    lambda results: results["collectives"],
)


def add_options(parser):
    """This lab has no option of its own."""
