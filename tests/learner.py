"""Labs as a learner meets them: answers written into a lab, graded by its checks on real ranks.

A lab's tests list its BUGS, {name: (exercise, part of the verdict)}, and in the text that listed()
reads three wrong answers to each exercise, with the hint that each must get, and a right one
written in another way than ours.
"""

import json
import re
import sys
import tempfile
from pathlib import Path
from textwrap import dedent, indent

import pytest
from conftest import ROOT, python

sys.path.insert(0, str(ROOT / "labs"))
import grade  # noqa: E402
import ranks  # noqa: E402

lab_file = grade.find_lab  # of lab1, lab2, ...
REGION = re.compile(r"^( *)# exercise: (\w+)\n(.*?)^ *# end exercise\n", re.M | re.S)


def answered(lab, answers):
    """A lab's text with {exercise: [its regions]} written in; None leaves a region as it is."""
    left = {exercise: list(regions) for exercise, regions in answers.items()}

    def replaced(match):
        space, exercise, _ = match.groups()
        answer = left[exercise].pop(0) if left.get(exercise) else None
        if answer is None:
            return match[0]
        body = indent(dedent(answer).strip("\n"), space)
        return f"{space}# exercise: {exercise}\n{body}\n{space}# end exercise\n"

    text = REGION.sub(replaced, lab.read_text())
    assert not any(left.values()), "more answers than regions"
    return text


def graded(lab, exercise, regions=(), bug=None, seed=7, timeout=90):
    """(passed, report and hint) of an exercise with these answers, or with a bug."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / lab.name
        file.write_text(answered(lab, {exercise: regions}))
        passed, report, hint = ranks.check(file, exercise, seed, bug, timeout)
    return passed, f"{report} {hint}".strip()


def listed(lab, text):
    """(WRONG, RIGHT) of a text that lists answers, each below a line of its own:

    "== exercise: part of the verdict" where it is wrong, "== exercise" where it is right. A line --
    stands between two regions, and ... for ours. Lines "ours -> theirs" change our answer instead.
    """
    wrong, right = [], {}
    for part in re.split(r"^== ", text, flags=re.M)[1:]:
        head, body = part.split("\n", 1)
        exercise, _, said = head.partition(": ")
        answer = [None if region.strip() == "..." else region for region in body.split("\n--\n")]
        if " ->" in body:
            answer = edited(lab, exercise, [line.split(" ->") for line in body.splitlines()])
        if said:
            wrong.append((exercise, answer, said))
        else:
            right[exercise] = answer
    return wrong, right


def edited(lab, exercise, changes):
    """Our answer to an exercise, a text for each region, with pieces replaced: [(ours, theirs)]."""
    texts = [dedent(body) for _, name, body in REGION.findall(lab.read_text()) if name == exercise]
    for ours, theirs in changes:
        assert any(ours in text for text in texts), ours
        texts = [text.replace(ours, theirs.removeprefix(" ")) for text in texts]
    return texts


def caught(lab, bugs, wrong):
    """Two tests: that the lab's bugs are caught, that wrong answers get their hint."""

    @pytest.mark.parametrize("bug", bugs)
    def bugs_are_caught(bug):
        exercise, said = bugs[bug]
        passed, verdict = graded(lab, exercise, bug=bug)
        assert not passed and said in verdict, verdict

    @pytest.mark.parametrize("exercise,regions,said", wrong)
    def wrong_answers_get_their_hint(exercise, regions, said):
        passed, verdict = graded(lab, exercise, regions)
        assert not passed and said in verdict, verdict

    return bugs_are_caught, wrong_answers_get_their_hint


def refused(lab, options, message, capsys):
    """A lab ends with these options in one line, and exit status 2."""
    assert grade.run_lab(lab, options) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"error: {message}") and err.count("\n") == 1


def run_finished(lab, folder, *options):
    """A lab, run as it is: what it prints and its results, which hold, with its picture."""
    files = folder / "results.json", folder / "picture.png"
    run = python(lab, *options, "--json", files[0], "--plot", files[1])
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stderr == "", "nothing but the report is printed"
    results, checks = json.loads(files[0].read_text()), ranks.room("checks", lab).CHECKS
    exercises = results["exercises"]
    assert run.stdout.endswith(f"\nPASS {lab.stem}: all {len(checks)} exercises' checks hold\n")
    assert results["passed"] and results["failed"] == [] and exercises.keys() == checks.keys()
    assert all(seen["passed"] and seen["report"] for seen in exercises.values())
    assert files[1].read_bytes()[:4] == b"\x89PNG" and files[1].stat().st_size > 20_000
    assert sorted(folder.iterdir()) == sorted(files)
    return run.stdout, results


def run_answered(lab, answers, folder, *options):
    """Run a lab with other right answers, in another folder's my_labs/: it holds and asks."""
    (folder / "labs").symlink_to(ROOT / "labs")
    (folder / "my_labs").mkdir()
    mine = folder / "my_labs" / lab.name
    mine.write_text(answered(lab, answers))
    run = python(mine, *options, cwd=folder)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.endswith("exercises' checks hold\n") and "Predict, then run: " in run.stdout
