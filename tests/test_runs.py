"""Each lab's run, of a learner's copy: it calls the learner's code and leaves its question open."""

import json
import re

import pytest
from learner import CHECKS, FILES, LABS, NAMES, run_lab

from labs.kit.mistakes import REGION

NOT_SHOWN = {  # (lab, exercise) that no run calls: why the checks have to do
    ("lab1", "gradients"): "bytes and seconds are of the forwards",
    ("lab1", "overlap"): "lab 4 measures what overlap gains",
    ("lab2", "vocab_parallel_embedding"): "it sends what a row parallel layer sends",
    ("lab5", "rotary_style"): "the lab's plans pass DTensors, which do without it",
    ("lab6", "translate_to_lora"): "the run builds its layers without a plan",
    ("lab9", "clip"): "memory and messages are those of steps that clip nothing",
    ("lab11", "strategies"): "--plan shows it, which takes oom_search.py 10 to 30 s",
    ("lab13", "export"): "Hugging Face reads the file in the check",
}


def with_marks(text, folder):
    """A lab's text in which each exercise that is called makes a file of its name in a folder."""
    mark = rf'\g<0>\1__import__("pathlib").Path("{folder}/\2").touch()\n'
    return re.sub(r"^( *)# exercise: (\w+)\n", mark, text, flags=re.M)


SHORT = {"lab3b", "lab5", "lab13", "lab15", "lab17", "lab18"}  # theirs, as 6, stands for much
NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?")


def given_away(measured, text):
    """The lines of a text with a number that --predict would call right."""

    def right(found):
        return abs(float(found.replace(",", "")) - measured) <= 0.005 * abs(measured)

    return [line for line in text.splitlines() if any(map(right, NUMBER.findall(line)))]


def test_what_is_given_away():
    """5,040 in a table, 5041.0 rounded; not 504, nor a part of another number."""
    lines = ["a rank  5,040", "about 5041.0 bytes", "504", "x5040", "15,040", "0.5040"]
    assert given_away(5040, "\n".join(lines)) == lines[:2]


@pytest.mark.slow  # minutes
@pytest.mark.parametrize("name", NAMES)
def test_a_run_is_of_the_learners_code(name, tmp_path, monkeypatch, capfd):
    """The experiments, without the checks before them, call each exercise of the copy.

    Neither what they print above the question nor the lab's page has the number that it asks for.
    """
    monkeypatch.setattr(CHECKS[name], "CHECKS", {})
    called, file, text = tmp_path / "called", tmp_path / FILES[name], LABS[name].read_text()
    results = tmp_path / "results.json"
    called.mkdir()
    file.write_text(with_marks(text, called))
    status = run_lab(file, ["--plot", str(tmp_path / "picture.png"), "--json", str(results)])
    printed, errors = capfd.readouterr()
    assert status == 0, printed + errors
    exercises = {exercise for _, exercise, _ in REGION.findall(text)}
    missing = exercises - {mark.name for mark in called.iterdir()}
    assert missing == {exercise for lab, exercise in NOT_SHOWN if lab == name}
    above, question, _ = printed.partition("\n  Predict, then run:")
    page = (LABS[name].parent / "README.md").read_text()
    measured = json.loads(results.read_text())["prediction"]["measured"]
    assert question and (name in SHORT) == (measured < 100 and measured == int(measured))
    assert name in SHORT or not given_away(measured, above + page)
