"""Hints by usual mistakes, for the labs whose checks are no cases of judge.py: 11, 13, 16, 17.

A usual mistake is a part of a finished function's text, and what stands there instead. The result
with the mistake is compared with the learner's. Who changes a finished exercise has to change its
mistakes, too, because mistaken() refuses a part that is not there.
"""

from contextlib import suppress

import torch

from labs.kit.compare import mistaken
from labs.kit.harness import Wrong, expect_close, relative_error


def alike(mine, other, tolerance=1e-9):
    """Whether two results, tensors or numbers or others, are equal up to rounding."""
    if isinstance(mine, torch.Tensor) and isinstance(other, torch.Tensor):
        mine, other = (x.double().nan_to_num(0, 0, 0) for x in (mine, other))
        return relative_error(mine, other) <= tolerance
    if isinstance(mine, float) and isinstance(other, float | int):
        return abs(mine - other) <= tolerance * max(abs(other), 1e-12)
    return mine == other


def section(mistakes, function):
    """The lines that a text of mistakes has on a function.
    As in tests/answers/ they stand below "== name". Each is "ours -> theirs  # hint": a part of
    the finished function and what usually stands there. The last is the hint for all others."""
    lines = mistakes.partition(f"\n== {function.__name__}\n")[2].partition("\n== ")[0]
    return lines.strip().splitlines()


def usual_results(mistakes, function, args):
    """Yield (hint, what the function gives of args) for each usual mistake in it."""
    for line in section(mistakes, function)[:-1]:
        change, _, hint = line.rpartition("  # ")
        ours, theirs = change.split(" ->")
        wrong = mistaken(function, (ours, theirs.removeprefix(" ")))
        with suppress(Exception):
            yield hint, wrong(*args)


def usual_hint(
    mistakes, function, args, mine, part=None, view=lambda result: result, tolerance=1e-9
):
    """The hint of the mistake whose result is the learner's; else the hint for all others.

    Of several results one part is compared; view(results) has the parts.
    """
    for hint, result in usual_results(mistakes, function, args):
        with suppress(Exception):
            if alike(mine, view(result) if part is None else view(result)[part], tolerance):
                return hint
    return section(mistakes, function)[-1]


def close_or_usual(what, mine, right, *usual, tolerance=1e-10):
    """expect_close(); usual: what usual_hint() takes, to find the hint."""
    try:
        return expect_close(what, mine, right, tolerance)
    except Wrong as wrong:
        mistakes, function, args, *part = usual
        raise Wrong(wrong.found, usual_hint(mistakes, function, args, mine, *part)) from None
