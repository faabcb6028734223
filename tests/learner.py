"""Labs as a learner meets them: answers written into a lab, graded by its checks on real ranks.

answers/labN.txt has below each `== EXERCISE` a right answer, written in another way than ours: the
lines of its regions, with -- between two regions and ... for ours; or lines "ours -> theirs", which
change our answer. What must be caught stands in the lab's mistakes.txt.
"""

import json
import re
import tempfile
from pathlib import Path

import pytest
from conftest import ROOT

from labs import grade
from labs.kit import harness
from labs.kit.cli import UsageError  # noqa: F401
from labs.kit.mistakes import Mistake, edits_of, read_mistakes, regions_of, with_mistake
from labs.kit.run import run_lab  # noqa: F401

LABS = {lab.parent.name.partition("_")[0]: lab for lab in grade.lab_files()}  # their lessons
NAMES = sorted(LABS)
FILES = {name: f"{lab.parent.name}.py" for name, lab in LABS.items()}  # as a learner has them
CHECKS = {name: harness.companion("check", lab) for name, lab in LABS.items()}
SHOWN = {name: harness.companion("show", lab) for name, lab in LABS.items()}


def right_answers(name):
    """{exercise: its right answer, as a change of ours} of a lab."""
    text, found = (ROOT / "tests" / "answers" / f"{name}.txt").read_text(), {}
    for part in re.split(r"^== ", text, flags=re.M)[1:]:
        exercise, *lines = part.splitlines()
        edits = edits_of(line for line in lines if " ->" in line)
        found[exercise] = Mistake("", edits, [] if edits else regions_of(lines), None)
    return found


def wrong_answers(name):
    """[(exercise, bug or None, mistake or None, hint)] of a lab."""
    found = []
    for exercise, (wrong, _) in read_mistakes(LABS[name].with_name("mistakes.txt")).items():
        found += [(exercise, None, mistake, mistake.hint) for mistake in wrong]
        found += [(exercise, each.bug[0], None, each.hint) for each in wrong if each.bug]
    return found


def answered(name):
    """A lab's text with its other right answers written in."""
    text = LABS[name].read_text()
    for exercise, answer in right_answers(name).items():
        text = with_mistake(text, exercise, answer)
    return text


def with_comment(text, comment):
    """A lab's text with a comment at the beginning of each exercise."""
    return re.sub(r"^( *)# exercise: \w+\n", rf"\g<0>\1# {comment}\n", text, flags=re.M)


def indented(text, unit):
    """A text with another unit of indentation than four blanks."""
    return re.sub("^(?:    )+", lambda blanks: unit * (len(blanks[0]) // 4), text, flags=re.M)


BREAKS = "\u2028 \u2029 \x85 \v \f \x1c"  # lines for str.splitlines(), and not for Python
SAVED = {  # how editors save a lab: {name: its bytes}
    "as it is": lambda text: with_comment(text, "réduit").encode(),
    "byte order mark": lambda text: b"\xef\xbb\xbf" + with_comment(text, "réduit").encode(),
    "CR LF": lambda text: text.replace("\n", "\r\n").encode(),
    "CR": lambda text: text.replace("\n", "\r").encode(),
    "tabs": lambda text: indented(text, "\t").encode(),
    "two blanks": lambda text: indented(text, "  ").encode(),
    "Latin-1": lambda text: f"# coding: latin-1\n{with_comment(text, 'réduit')}".encode("latin-1"),
    "separators": lambda text: with_comment(text, f"pasted {BREAKS}, from slides").encode(),
    "form feeds": lambda text: text.replace("\n\n\n", "\n\n\f\n").encode(),
    "blanks, no end": lambda text: re.sub(r"(exercise.*)\n", r"\1  \n", text).rstrip("\n").encode(),
}


def shown(name, folder, *options):
    """The results of a finished lab's run; without its checks, which test_labs.py runs."""
    files = folder / "results.json", folder / "picture.png"
    options = [*options, "--json", files[0], "--plot", files[1]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CHECKS[name], "CHECKS", {})
        assert run_lab(LABS[name], [*map(str, options)]) == 0
    assert files[1].stat().st_size > 50_000
    return json.loads(files[0].read_text())


def graded(lab, exercise, mistake=None, bug=None):
    """(passed, report and hint) of an exercise with a mistake, or with a bug."""
    text = lab.read_text()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"{lab.parent.name}.py"
        file.write_text(with_mistake(text, exercise, mistake) if mistake else text)
        passed, report, hint = harness.check(file, exercise, seed=7, bug=bug, timeout=90)
    return passed, f"{report} {hint}".strip()
