"""Labs as a learner meets them: answers written into a lab, graded by its checks on real ranks.

graded(lab, exercise, regions) says what the grader says of one answer. A lab's tests list its bugs,
wrong answers with the hint that each must get, and right answers written in another way than ours:

    BUGS = {name: (exercise, part of the verdict)}
    WRONG = [(exercise, [its regions in their order; None: ours], part of the verdict), ...]
    RIGHT = {exercise: [its regions]}
"""

import re
import sys
import tempfile
from pathlib import Path
from textwrap import dedent, indent

from conftest import REGION, ROOT

sys.path.insert(0, str(ROOT / "labs"))
import grade  # noqa: E402
import ranks  # noqa: E402


def lab_file(name):
    """The file of lab1, lab2, ..."""
    return grade.find_lab(name)


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


def listed(text):
    """(WRONG, RIGHT) of a text that lists answers, each below a line of its own:

    "== exercise: part of the verdict" where it is wrong, "== exercise" where it is right. A line --
    stands between two regions, and ... for ours.
    """
    wrong, right = [], {}
    for part in re.split(r"^== ", text, flags=re.M)[1:]:
        head, body = part.split("\n", 1)
        exercise, _, said = head.partition(": ")
        answer = [None if region.strip() == "..." else region for region in body.split("\n--\n")]
        if said:
            wrong.append((exercise, answer, said))
        else:
            right[exercise] = answer
    return wrong, right
