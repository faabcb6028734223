"""results/make.py: README's tables are those of the JSON, and every kind of step comes to a result."""

import json
import re
import sys

import pytest
from conftest import ROOT, python

sys.path.insert(0, str(ROOT / "results"))
import make  # noqa: E402


def test_readme_shows_what_was_found():
    text = (ROOT / "README.md").read_text()
    assert make.with_tables(text) == text
    changed = re.sub(r"(?<=\| )\d+k(?= \|)", "9k", text)
    assert changed != text and make.with_tables(changed) == text, "a figure changed by hand is put right"


@pytest.mark.parametrize("name", make.PARTS)
def test_what_was_found_has_its_command(name):
    for file in make.files(name):
        part = json.loads(file.read_text())
        assert set(part["about"]) == {"date", "device", "cpu", "versions"}
        assert list(part["steps"]) == list(make.PARTS[name](trial=False))
        assert {s: o["command"] for s, o in part["steps"].items()} == make.PARTS[name](trial=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    "part,step,row",
    [
        ("lengths", "40 GiB", r"\| tp \| 19k, 21k \| error, error \| \d+k \| \d+k \|"),
        ("cpu", "correctness bfloat16, tp", r"\| tp \|  \|  \| \d\.\de-\d\d \|"),
        ("cpu", "benchmark, pp zb", r"\| pp zb \|  \|  \|  \| \d+\.\d\d \| \d+ / \d+ \|"),
        ("gpu", "benchmark 512, plain", r"\| plain, 512 tokens \| full, block \| \d+ \|  \| 1\.000 \|"),
        ("gpu", "rank 0 of 8, sp_megatron", r"\| sp_megatron \|  \|  \| \d+\.\d\d \| \d+\.\d \|"),
    ],
)
def test_a_step_of_each_kind(part, step, row):
    outcome = make.run(make.PARTS[part](trial=True)[step])
    assert "result" in outcome, outcome
    text = make.TABLES[part]({"about": make.about(), "steps": {step: outcome}})
    assert text.startswith(("*Predicted", "*Measured"))
    assert re.search(row, text), text


def test_a_step_that_fails_says_why():
    outcome = make.run("python tp.py --length 1")
    assert outcome["error"] == ["error: --length 1 has no next token to predict; 2 would do"]


def test_an_unknown_part_is_refused():
    done = python("results/make.py", "typo")
    assert done.returncode == 2 and "invalid choice: 'typo'" in done.stderr
