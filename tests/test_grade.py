"""labs/grade.py: hands out, grades, and is neither fooled nor held up."""

import json
import re
import shutil

import pytest
from conftest import ROOT, python

LABS = sorted((ROOT / "labs").glob("lab*.py"))
SMALL_LAB = '''
import torch
import torch.distributed as dist


class Wrong(Exception):
    def __init__(self, found, hint=""):
        super().__init__(found, hint)
        self.found, self.hint = found, hint


def helper(x):
    return x


def total(x, group):
    """The sum of x over the ranks, in a new tensor. x (n)."""
    # exercise: total
    x = x.clone()
    dist.all_reduce(x, group=group)
    return x
    # end exercise


def check_total(lab, group, seed):
    x = torch.arange(3.0) + seed + group.rank()
    right = 2 * (torch.arange(3.0) + seed) + 1
    y = lab.total(x, group)
    if torch.equal(y, x):
        raise Wrong("the sum is off", "every rank's x counts")
    if not torch.equal(y, right):
        raise Wrong("the sum is off")
    return "the sum is right"


def twice(x):
    """2 x."""
    # exercise: twice
    return helper(x) + helper(x)
    # end exercise


def check_twice(lab, group, seed):
    if lab.twice(seed) != 2 * seed:
        raise Wrong("not twice")
    return "twice"


CHECKS = {"total": (check_total, 2), "twice": (check_twice, 1)}
'''


@pytest.fixture
def desk(tmp_path):
    """A folder with the grader and one small lab, handed out: grade(answer to total) -> its results."""
    (tmp_path / "labs").mkdir()
    shutil.copy(ROOT / "labs" / "grade.py", tmp_path / "labs")
    lab, mine = tmp_path / "labs" / "lab0_small.py", tmp_path / "my_labs" / "lab0_small.py"
    lab.write_text(SMALL_LAB)
    assert python(tmp_path / "labs" / "grade.py", "start", "lab0").returncode == 0

    def grade(total=None, change=lambda text: text, options=()):
        text = SMALL_LAB
        if total is not None:
            text = re.sub(r"    x = x.clone.*?return x\n", total, text, flags=re.S)
        mine.write_text(change(text))
        results = tmp_path / "results.json"
        run = python(tmp_path / "labs" / "grade.py", "lab0", "--json", results, "--timeout", "8", *options)
        assert "Traceback" not in run.stdout + run.stderr
        return run, json.loads(results.read_text())["exercises"] if results.exists() else None

    grade.folder, grade.mine = tmp_path, mine
    return grade


def test_hands_out_and_refuses_to_overwrite(desk):
    text = desk.mine.read_text()
    assert text.count("raise NotImplementedError") == 2 and "all_reduce" not in text
    assert "raise NotImplementedError('The sum of x over the ranks, in a new tensor.')" in text
    again = python(desk.folder / "labs" / "grade.py", "start", "lab0")
    assert again.returncode == 2 and again.stderr.startswith("error: ") and "--force" in again.stderr
    desk.mine.write_text("")
    assert python(desk.folder / "labs" / "grade.py", "start", "lab0", "--force").returncode == 0
    assert desk.mine.read_text() == text


def test_right_answers_pass(desk):
    run, results = desk()
    assert run.returncode == 0 and all(result["passed"] for result in results.values())
    assert run.stdout.splitlines()[-1] == "PASS lab0_small: 2 of 2 exercises pass"


WRONG = {  # an answer to total: what is said
    "    return x\n": "the sum is off",
    "    return x +\n": "SyntaxError",
    "  return x\n": "IndentationError",
    "    return y\n": "NameError: name 'y' is not defined (in: return y)",
    "    while True:\n        pass\n": "no answer from rank",
    "    dist.recv(x, 1 - group.rank())\n    return x\n": "no answer from rank",
    "    import os\n    os._exit(0)\n": "died",
    "    raise SystemExit(0)\n": "SystemExit",
    "    print('noise')\n    return None\n": "TypeError",
}


@pytest.mark.parametrize("answer", WRONG, ids=lambda answer: WRONG[answer].split(" ")[0])
def test_a_wrong_answer_fails_alone(desk, answer):
    run, results = desk(answer)
    assert run.returncode == 1
    assert not results["total"]["passed"] and WRONG[answer] in results["total"]["report"]
    assert results["twice"]["passed"], "the other exercise is graded as if nothing were wrong"
    assert "FAIL lab0_small: 1 of 2 exercises pass (the same inputs again: --seed " in run.stdout


def test_a_usual_mistake_gets_its_hint(desk):
    run, results = desk("    return x\n")
    assert results["total"]["hint"] == "every rank's x counts" and "hint: every rank's x counts" in run.stdout


def test_inputs_are_new_each_time_and_can_be_had_again(desk):
    seen = "    raise ValueError(str(x.tolist()))\n"
    reports = [desk(seen, options=options)[1]["total"]["report"] for options in ([], [], ["--seed", "7"])]
    numbers = [re.search(r"\[([\d.]+)", report)[1] for report in reports]
    assert numbers[0] != numbers[1] and numbers[2] in ("7.0", "8.0")


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text + "CHECKS = {name: (lambda *_: 'fine', 1) for name in CHECKS}\n",
        lambda text: text.replace('raise Wrong("the sum is off")', "pass"),
        lambda text: text + "class Wrong(Exception):\n    pass\n",
    ],
)
def test_checks_are_not_the_learners(desk, change):
    run, results = desk("    return 0 * x\n", change)
    assert run.returncode == 1 and not results["total"]["passed"] and results["twice"]["passed"]


def test_what_a_learner_adds_outside_counts_for_all(desk):
    _, results = desk(
        change=lambda text: text.replace("    return x\n\n\ndef total", "    return 0\n\n\ndef total")
    )
    assert (
        results["total"]["passed"] and not results["twice"]["passed"] or results["twice"]["report"] == "twice"
    )


def test_lost_markers_are_named(desk):
    run, results = desk(change=lambda text: text.replace("    # end exercise\n", "", 1))
    assert run.returncode == 1 and "without its other half" in results["total"]["report"]
    run, results = desk(
        change=lambda text: text.replace("    # exercise: total\n", "").replace("    # end exercise\n", "", 1)
    )
    assert "0 places '# exercise: total', and there should be 1" in results["total"]["report"]
    assert results["twice"]["passed"]


BAD = [
    (["lab99"], "no lab lab99; there are lab"),
    (["start", "lab99"], "no lab lab99; there are lab"),
    (["lab1", "--file", "nowhere.py"], "no nowhere.py; python labs/grade.py start lab1"),
    (["finish", "lab1"], "finish lab1: list, start LAB, or LAB would do"),
    (["lab1", "--timeout", "0"], "argument --timeout: 0 is not a whole number of at least 1"),
    (
        ["lab1", "--file", "labs/lab1_collectives.py", "--only", "x"],
        "lab1_collectives has no exercise x; it has",
    ),
    ([], "the following arguments are required: LAB"),
]


@pytest.mark.parametrize("options,message", BAD)
def test_bad_input(options, message):
    run = python("labs/grade.py", *options)
    assert run.returncode == 2 and run.stdout == ""
    assert run.stderr.startswith(f"error: {message}") and run.stderr.count("\n") == 1


@pytest.mark.parametrize("lab", LABS, ids=lambda lab: lab.stem)
def test_the_empty_lab_grades_0(lab, tmp_path):
    (tmp_path / "labs").mkdir()
    for file in (lab, ROOT / "labs" / "grade.py"):
        shutil.copy(file, tmp_path / "labs")
    grade, results = tmp_path / "labs" / "grade.py", tmp_path / "results.json"
    assert python(grade, "start", lab.stem).returncode == 0
    run = python(grade, lab.stem, "--json", results)
    assert run.returncode == 1, run.stderr
    exercises = json.loads(results.read_text())["exercises"]
    names = re.findall(r"# exercise: (\w+)", lab.read_text())
    assert set(names) == set(exercises), "every exercise has a check, and every check an exercise"
    assert all("not done yet: " in result["report"] and not result["passed"] for result in exercises.values())


@pytest.mark.slow
@pytest.mark.parametrize("lab", LABS, ids=lambda lab: lab.stem)
def test_the_finished_lab_grades_100(lab, tmp_path):
    run = python("labs/grade.py", lab.stem, "--file", lab)
    assert run.returncode == 0, run.stdout + run.stderr
    assert re.fullmatch(rf"PASS {lab.stem}: (\d+) of \1 exercises pass", run.stdout.splitlines()[-1])
