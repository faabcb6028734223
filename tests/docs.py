"""Writes into the documents the numbers that are computed: exercises, hours, totals of courses.

python tests/docs.py          # lists the documents whose numbers are old; exit 1 if there are any
python tests/docs.py --fix    # writes the numbers: `make docs`
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def exercises_and_hours(lesson):
    """How many exercises a lesson's text has, and the hours that labs/README.md estimates."""
    exercises = re.findall(r"# exercise: (\w+)\n(.*?)# end exercise", lesson, re.S)
    names = {name for name, _ in exercises}
    lines = re.findall(r"^ *[^ #\n].*", "\n".join(code for _, code in exercises), re.M)
    minutes = 30 + 10 * len(names) + 2 * len(lines)
    return len(names), round(minutes / 30) / 2


def labs_table(text, labs):
    """labs/README.md with each lab's exercises and hours."""

    def row(match):
        exercises, hours = labs[match[2]]
        return f"{match[1]} {exercises} | {match[3]} | {hours:g} h |"

    return re.sub(
        r"^(.*\]\((lab\w+)/lesson\.py\).*\|) \d+ \| (\d+ s) \| [\d.]+ h \|$", row, text, flags=re.M
    )


def course(text, hours):
    """labs/course.md with the sums of each row and plan. hours: {"lab 1": 3.0}."""

    def plan(match):
        total = 0
        rows = match[3].splitlines()
        for i, row in enumerate(rows[2:], start=2):
            parts = re.findall(r"lab \w+|notebook \d|\w+\.py", row)
            cost = sum(hours.get(part, 2 if part.endswith(".py") else 1) for part in parts)
            rows[i] = re.sub(r" [\d.]+ \|$", f" {cost:g} |", row)
            total += cost
        return f"{match[1]} {total:g} hours{match[2]}" + "\n".join(rows) + "\n"

    text = re.sub(
        r"The \d+ labs take [\d.]+ hours",
        f"The {len(hours)} labs take {sum(hours.values()):g} hours",
        text,
    )
    return re.sub(r"^(\*\*.*,) [\d.]+ hours(\*\*.*\n\n)((?:\|.*\n)+)", plan, text, flags=re.M)


def lesson_length(text):
    """A script with the number of its lesson's lines, to the next ten."""
    end = text[: text.index("# The lesson ends here.")].count("\n") + 1
    return re.sub(
        r"lesson is the first \d+ lines", f"lesson is the first {-(-end // 10) * 10} lines", text
    )


def documents():
    """{path: its text as it should be}."""
    lessons = {file.parent.name: file.read_text() for file in ROOT.glob("labs/*/lesson.py")}
    labs = {name: exercises_and_hours(text) for name, text in lessons.items()}
    hours = {re.sub(r"lab(\d+b?)_.*", r"lab \1", name): own for name, (_, own) in labs.items()}
    found = {}
    for name, (exercises, _) in labs.items():
        page = ROOT / "labs" / name / "README.md"
        found[page] = re.sub(
            r"\): \d+ exercises", f"): {exercises} exercises", page.read_text(), count=1
        )
    found[ROOT / "labs/README.md"] = labs_table((ROOT / "labs/README.md").read_text(), labs)
    found[ROOT / "labs/course.md"] = course((ROOT / "labs/course.md").read_text(), hours)
    for name in ("tp", "sp_megatron", "sp_ulysses", "pp"):
        script = ROOT / f"{name}.py"
        found[script] = lesson_length(script.read_text())
    return found


def drift(fix=False):
    """The documents whose numbers are old; with fix they are written."""
    old = {path: text for path, text in documents().items() if path.read_text() != text}
    for path, text in old.items() if fix else ():
        path.write_text(text)
    return [path.relative_to(ROOT).as_posix() for path in old]


if __name__ == "__main__":
    changed = drift(fix="--fix" in sys.argv)
    print(*changed or ["all numbers are current"], sep="\n")
    sys.exit(1 if changed and "--fix" not in sys.argv else 0)
