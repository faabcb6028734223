"""Labs as a learner meets them: answers written into a lab, graded by its checks on real ranks.

answers/labN.txt has below each `== EXERCISE` a right answer, written in another way than ours. What
must be caught stands in the lab's mistakes.txt. Where there is none, it stands in answers/labN.txt:
bugs of the lab's check.py, by name, and at least three wrong answers. Each of these begins on a
line with a comment, a part of what the learner must be told. A line -- stands between two
regions, and ... for ours. Lines "ours -> theirs" change our answer instead.
"""

import json
import re
import tempfile
from pathlib import Path
from textwrap import dedent, indent

import pytest
from conftest import ROOT

from labs import grade
from labs.kit import harness
from labs.kit.cli import UsageError  # noqa: F401
from labs.kit.mistakes import Mistake, read_mistakes, with_mistake
from labs.kit.run import run_lab  # noqa: F401

LABS = {lab.parent.name.partition("_")[0]: lab for lab in grade.lab_files()}  # their lessons
NAMES = sorted(LABS)
FILES = {name: f"{lab.parent.name}.py" for name, lab in LABS.items()}  # as a learner has them
CHECKS = {name: harness.companion("check", lab) for name, lab in LABS.items()}
SHOWN = {name: harness.companion("show", lab) for name, lab in LABS.items()}
REGION = re.compile(r"^( *)# exercise: (\w+)\n(.*?)^ *# end exercise\n", re.M | re.S)


def listed(name):
    """({exercise: its right answer}, [(exercise, bug or None, wrong answer, said)]) of a lab."""
    text, right, caught = (ROOT / "tests" / "answers" / f"{name}.txt").read_text(), {}, []
    for part in re.split(r"^== ", text, flags=re.M)[1:]:
        exercise, *lines = part.splitlines()
        answer = right[exercise] = []
        for line in lines:
            code, mark, said = line.rpartition("# ")
            if code.startswith("bug "):
                caught.append((exercise, code.split()[1], [], said))
            elif mark:
                answer = [code.rstrip()] if code else []
                caught.append((exercise, None, answer, said))
            else:
                answer.append(line)
    mistakes = LABS[name].with_name("mistakes.txt")
    listed = read_mistakes(mistakes) if mistakes.exists() else {}
    for exercise, (wrong, _) in listed.items():
        caught += [(exercise, None, mistake, mistake.hint) for mistake in wrong]
        caught += [(exercise, each.bug[0], [], each.hint) for each in wrong if each.bug]
    return right, caught


def written(lab, exercise, answer):
    """An answer's lines as [its regions], None where it is ours."""
    if not any(" ->" in line for line in answer):
        regions = "\n".join(answer).split("\n--\n")
        return [None if region == "..." else region for region in regions]
    texts = [dedent(body) for _, name, body in REGION.findall(lab.read_text()) if name == exercise]
    for line in answer:
        ours, theirs = line.split(" ->")
        assert any(ours in text for text in texts), ours
        texts = [text.replace(ours, theirs.removeprefix(" ")) for text in texts]
    return texts


def answered(lab, answers):
    """A lab's text with {exercise: the lines of an answer} written in."""
    left = {exercise: written(lab, exercise, answer) for exercise, answer in answers.items()}

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


def graded(lab, exercise, answer=(), bug=None):
    """(passed, report and hint) of an exercise with an answer, or with a bug."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"{lab.parent.name}.py"
        if isinstance(answer, Mistake):
            file.write_text(with_mistake(lab.read_text(), exercise, answer))
        else:
            file.write_text(answered(lab, {exercise: answer} if answer else {}))
        passed, report, hint = harness.check(file, exercise, seed=7, bug=bug, timeout=90)
    return passed, f"{report} {hint}".strip()
