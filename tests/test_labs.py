"""All labs that stand in three rooms: nothing handed out gives an answer away, and sizes hold."""

import importlib
import io
import keyword
import re
import sys
from collections import Counter
from contextlib import redirect_stdout

import pytest
from conftest import ROOT
from learner import REGION, answered, grade, lab_file, ranks

NAMES = sorted(path.stem for path in (ROOT / "labs" / "checks").glob("lab*.py"))
EACH_LAB = pytest.mark.parametrize("name", NAMES)
LONG_LESSONS = {"lab3": 550, "lab8": 550}


@EACH_LAB
def test_budgets(name):
    room = ROOT / "labs"
    sizes = {
        lab_file(name): LONG_LESSONS.get(name, 450),
        room / "checks" / f"{name}.py": 650,
        room / "experiments" / f"{name}.py": 400,
        room / "ranks.py": 300,
        room / "grade.py": 300,
    }
    for file, most in sizes.items():
        lines = file.read_text().splitlines()
        assert len(lines) <= most, file
        assert max(map(len, lines)) <= 100, file


@EACH_LAB
def test_a_lesson_imports_nothing_of_this_project(name):
    lesson = lab_file(name).read_text().split('\nif __name__ == "__main__":')[0]
    imported = re.findall(r"^ *(?:from|import) (\w+)", lesson, re.M)
    allowed = sys.stdlib_module_names | {"torch", "transformers", "numpy"}
    assert set(imported) <= allowed


def code(text):
    """A text's lines of code, stripped, without comments and docstrings' lines."""
    text = re.sub(r'"""(.*?)"""', "", text, flags=re.S)
    lines = (re.sub(r"\s+#.*", "", line).strip() for line in text.splitlines())
    return [line for line in lines if line and line[0] != "#"]


def normalised(lines):
    """Lines with their names numbered in the order in which they come: equal but for the names."""
    known, out = {}, []
    for word in re.findall(r"\w+|[^\w\s]", "\n".join(lines)):
        named = word.isidentifier() and not keyword.iskeyword(word)
        out.append(f"n{known.setdefault(word, len(known))}" if named else word)
    return " ".join(out)


def spoilers(text):
    """What of the solutions stands elsewhere in what `start` hands out: (exercise, lines)."""
    left = code(grade.emptied(text))
    pairs = {normalised(pair) for pair in zip(left, left[1:])}
    found = []
    for _, exercise, solution in REGION.findall(text):
        lines = code(solution)
        found += [(exercise, pair) for pair in zip(lines, lines[1:]) if normalised(pair) in pairs]
        found += [(exercise, line) for line in lines if len(line) >= 34 and line in left]
    return found


@EACH_LAB
def test_no_spoilers(name):
    assert spoilers(lab_file(name).read_text()) == []


def test_a_spoiler_is_seen():
    """A finished variant of an exercise, with other names; and one long line of it."""
    text = lab_file("lab1").read_text()
    variant = "\ndef other(t, g):\n    for job in all_of_them:\n        job.wait()\n"
    pair = "for work in dist.batch_isend_irecv(both):", "work.wait()"
    assert ("exchange", pair) not in spoilers(text + variant)
    variant = variant.replace("all_of_them", "dist.batch_isend_irecv(jobs)")
    assert ("exchange", pair) in spoilers(text + variant)
    line = "dx = reduce_scatter(grad @ weight, ctx.group)"
    assert ("gathered_linear", line) in spoilers(lab_file("lab2").read_text() + f"    {line}\n")


@EACH_LAB
def test_an_emptied_exercise_says_its_task_and_its_length(name):
    text = lab_file(name).read_text()
    handed_out = grade.emptied(text)
    places = re.findall(r"# about \d+ lines?\n *raise NotImplementedError\(.+\)\n", handed_out)
    assert len(places) == len(REGION.findall(text))
    assert max(map(len, handed_out.splitlines())) <= 100


@EACH_LAB
def test_the_tests_hold_three_wrong_answers_and_a_right_one(name):
    tests = importlib.import_module(f"test_{name}")
    checks = ranks.room("checks", lab_file(name))
    wrong = Counter(exercise for exercise, *_ in tests.WRONG)
    assert all(wrong[exercise] >= 3 for exercise in checks.CHECKS), wrong
    assert set(tests.RIGHT) == set(checks.CHECKS)
    assert answered(lab_file(name), tests.RIGHT) != lab_file(name).read_text()
    assert list(tests.BUGS) == [bug.__name__ for bug in checks.BUGS]


@EACH_LAB
def test_bugs_are_listed_and_a_prediction_is_asked_for(name):
    out = io.StringIO()
    with redirect_stdout(out):
        assert grade.run_lab(lab_file(name), ["--inject-bug", "list"]) == 0
    bugs = ranks.room("checks", lab_file(name)).BUGS
    assert [line.split()[0] for line in out.getvalue().splitlines()] == [b.__name__ for b in bugs]
    question, formula, measure = ranks.room("experiments", lab_file(name)).PREDICT
    assert question.endswith("?") and formula and callable(measure)
