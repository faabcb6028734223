"""All labs: nothing handed out gives an answer away, sizes hold, wrong answers get their hints."""

import ast
import json
import keyword
import re
import sys
from collections import Counter

import learner
import pytest
from conftest import ROOT, python
from learner import CHECKS, FILES, LABS, NAMES, SAVED, SHOWN, answered, graded, wrong_answers

from labs import grade
from labs.kit.blame import HINTS
from labs.kit.mistakes import REGION, Mistake, with_mistake
from labs.kit.run import run_lab

EACH_LAB = pytest.mark.parametrize("name", NAMES)
MAIN = '\nif __name__ == "__main__":'
SHARED = [ROOT / "labs/grade.py", *(ROOT / "labs/kit").glob("*.py")]
CAUGHT = [(name, *case) for name in NAMES for case in wrong_answers(name)]


@EACH_LAB
def test_a_lesson_imports_nothing_of_this_project(name):
    lesson, start = LABS[name].read_text().split(MAIN)
    imported = re.findall(r"^ *(?:from|import) (\w+)", lesson, re.M)
    allowed = sys.stdlib_module_names | {"torch", "transformers", "numpy"}
    assert set(imported) <= allowed
    assert start == LABS["lab1"].read_text().split(MAIN)[1], "all labs start alike"


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


@EACH_LAB
def test_what_is_handed_out_says_the_task_and_gives_no_line_of_ours_away(name):
    text = LABS[name].read_text()
    handed_out = grade.emptied(text)
    places = re.findall(r"# about \d+ lines?\n *raise NotImplementedError\(.+\)\n", handed_out)
    assert len(places) == len(REGION.findall(text))
    assert max(map(len, handed_out.splitlines())) <= 100
    left = code(handed_out)
    pairs = {normalised(pair) for pair in zip(left, left[1:])}
    for _, exercise, solution in REGION.findall(text):
        lines = code(solution)
        assert not [line for line in lines if len(line) >= 34 and line in left], exercise
        assert not [p for p in zip(lines, lines[1:]) if normalised(p) in pairs], exercise


def meaning(code):
    """What Python makes of a file: its syntax tree, blanks in texts left aside."""
    return re.sub(r"(\\[nt]| )+", " ", ast.dump(ast.parse(code)))


@EACH_LAB
def test_a_lab_means_the_same_however_an_editor_saves_it(name, tmp_path):
    """Of one exercise the learner's answer is graded, of all others ours take its indentation."""
    text, file = LABS[name].read_text(), tmp_path / "saved.py"
    exercise, right = next(iter(CHECKS[name].CHECKS)), meaning(text)
    for way, save in SAVED.items():
        file.write_bytes(save(text))
        mine, encoding = grade.cli.read_code(file)
        file.write_text(grade.spliced(text, mine, exercise), encoding=encoding)
        assert meaning(file.read_bytes()) == right, way


@EACH_LAB
def test_an_exercise_has_a_right_answer_and_three_wrong_ones_and_a_bug_is_a_case(name):
    """A wrong answer changes the finished lab: it has a place there. Its hint is whole, if ours."""
    text, wrong, bugs = LABS[name].read_text(), Counter(), []
    for exercise, bug, mistake, hint in wrong_answers(name):
        wrong[exercise] += not bug
        bugs += [bug] if bug else []
        assert bug or with_mistake(text, exercise, mistake) != text, hint
        assert hint.endswith(".") or any(hint in usual for usual in HINTS.values()), hint
    assert set(learner.right_answers(name)) == set(CHECKS[name].CHECKS)
    assert all(wrong[exercise] >= 3 for exercise in CHECKS[name].CHECKS), wrong
    assert sorted(bugs) == sorted(bug.__name__ for bug in CHECKS[name].BUGS)


@EACH_LAB
def test_bugs_are_listed_and_a_prediction_is_asked_for(name, capsys):
    assert run_lab(LABS[name], ["--inject-bug", "list"]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert listed == [bug.__name__ for bug in CHECKS[name].BUGS]
    question, formula, measure = SHOWN[name].PREDICT
    assert question.endswith("?") and formula and callable(measure)


SPLIT = "argument --split: "
BAD = [  # an option of each kind; argparse's own choices are argparse's
    ("lab1", "--inject-bug typo", "no bug typo: use --inject-bug list, which names"),
    ("lab1", "--json /nowhere/lab.json", "cannot write /nowhere/lab.json"),
    ("lab1", "--plot lab.xyz", "cannot draw lab.xyz: use a name that ends in ."),
    ("lab1", "--predict nan", "argument --predict: use a number above"),
    ("lab1", "--typo", "unrecognized arguments: --typo"),
    ("lab2", "--label-smoothing 1", "argument --label-smoothing: use a number above 0 and"),
    ("lab4", "--profile /nowhere/trace.json", "cannot write /nowhere/trace.json"),
    ("lab5", "--sp --hf-plan", "argument --hf-plan: not allowed with argument --sp"),
    ("lab5", "--plan no_such.plan", "argument --plan: no plan at no_such.plan"),
    ("lab7", "--length 3", "argument --length: use 4 to 2147483647, not 3"),
    ("lab8", "--tp 3", "argument --tp: 8 heads with 2 KV heads cannot be split over 3 ranks: use"),
    ("lab11", "--split 8B:2:4x1x2", f"{SPLIT}4 x 1 x 2 is 8, and 2 nodes have 16 GPUs"),
    ("lab11", "--split 1B:4:1x32x1", f"{SPLIT}32 stages are more than the 16 layers of 1B"),
    ("lab11", "--split 8B:6:1x1x48", f"{SPLIT}tp 48 does not divide the 32 heads of 8B"),
    ("lab11", "--split 8B:4x1x2", f"{SPLIT}8B:4x1x2: MODEL:NODES:DPxPPxTP, such as 8B:2:4x1x4"),
    ("lab11", "--split 9B:1:8x1x1", f"{SPLIT}9B:1:8x1x1: MODEL:NODES:DPxPPxTP"),
    ("lab11", "--plan --nodes 0", "argument --nodes: use 1 to 2147483647, not 0"),
    ("lab14", "--tokens 100", "argument --tokens: use 8192 to 1048576, not 100"),
]


@pytest.mark.ci(every=4)
@pytest.mark.parametrize("name,options,message", BAD)
def test_bad_input_is_one_line(name, options, message, capsys, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])  # lab 5 looks for a plan in this folder
    assert run_lab(LABS[name], options.split()) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"error: {message}") and err.count("\n") == 1


@pytest.mark.ci(every=160)
@pytest.mark.parametrize("name,exercise,bug,mistake,said", CAUGHT)
def test_wrong_is_caught_with_its_hint(name, exercise, bug, mistake, said):
    passed, verdict = graded(LABS[name], exercise, mistake, bug)
    assert not passed and said in verdict, verdict


@pytest.mark.ci
def test_a_general_hint_names_the_function_of_its_case():
    """The exercise is gradients; AllToAll, which spoils what it is given, has to be named."""
    call = "all_to_all(grad, ctx.receives, ctx.sends, ctx.group)"
    spoilt = Mistake("", [(call, f"{call} + 0 * grad.zero_().sum()")], [], None)
    passed, said = graded(LABS["lab1"], "gradients", spoilt)
    assert not passed and "overwritten AllToAll must leave its arguments as they are" in said


@pytest.mark.ci(every=3)
@EACH_LAB
def test_the_empty_lab_grades_0(name, tmp_path):
    mine, results = tmp_path / FILES[name], tmp_path / "results.json"
    mine.write_text(grade.emptied(LABS[name].read_text()))
    assert grade.main([name, "--file", str(mine), "--json", str(results), "--seed", "7"]) == 1
    exercises = json.loads(results.read_text())["exercises"]
    names = dict.fromkeys(exercise for _, exercise, _ in REGION.findall(LABS[name].read_text()))
    assert list(names) == list(exercises), "in one order: the lesson's, list's, the grader's"
    for result in exercises.values():
        assert "not done yet: " in result["report"] and not result["passed"]


OTHERWISE = {  # how the experiments are run with other right answers
    "lab1": ["--ranks", "2"],
    "lab2": ["--length", "2"],  # fewer tokens than ranks
    "lab4": ["--pairs", "1"],
    "lab5": ["--model", "phi3"],
    "lab7": ["--length", "5"],  # with zigzag 3 of the 8 chunks are empty
    "lab8": ["--pp", "4", "--dp", "2", "--tp", "1"],
    "lab9": ["--ranks", "2"],
    "lab12": ["--ranks", "2"],
}


@pytest.mark.ci(every=20)
@EACH_LAB
def test_other_right_answers_pass_and_serve_the_experiments(name, tmp_path, capsys, monkeypatch):
    mine, ways = tmp_path / FILES[name], list(SAVED.values())
    save = ways[NAMES.index(name) % len(ways)]
    mine.write_bytes(save(answered(name)))
    assert grade.main([name, "--file", str(mine), "--seed", "7", "--timeout", "90"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert re.fullmatch(rf"PASS {mine.stem}: (\d+) of \1 exercises pass", last)
    monkeypatch.setattr(CHECKS[name], "CHECKS", {})  # they have just been run
    assert run_lab(mine, ["--seed", "20", *OTHERWISE.get(name, [])]) == 0
    assert "Predict, then run: " in capsys.readouterr().out


@pytest.mark.ci
def test_a_bug_fails_a_lab_in_my_labs_alone(tmp_path):
    (tmp_path / "labs").symlink_to(ROOT / "labs")
    mine, results = tmp_path / "my_labs" / FILES["lab1"], tmp_path / "results.json"
    mine.parent.mkdir()
    mine.write_text(answered("lab1"))
    ran = python(mine, "--inject-bug", "all_to_everyone", "--json", results, cwd=tmp_path)
    assert ran.returncode == 1 and ran.stdout.endswith("\nFAIL lab1_collectives: all_reduce\n")
    seen = json.loads(results.read_text())
    assert not seen["passed"] and seen["exercises"].keys() == CHECKS["lab1"].CHECKS.keys()
    assert [name for name, e in seen["exercises"].items() if not e["passed"]] == ["all_reduce"]
