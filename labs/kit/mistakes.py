"""mistakes.txt of a lab: wrong answers, as texts and as labs, and their hints.

    == total
    all_reduce(x, group) -> x  # total() has ...   an edit: a part of our lines, theirs, the hint
    a -> b && c -> d  # total() ...                two edits at once
    bug no_sum: Nothing is summed.                 --inject-bug no_sum plants the mistake below it
    | dist.all_reduce(x, group=group)              a whole answer; "| --" stands between regions,
    | return x                                     "| ..." in the place of a region of ours
    # total() must ...                             and its hint
    the gradient of x: total() ...                 the hint for all else that is wrong in this,
    TakeRows.apply: TakeRows ...                   or for errors in this function, or case
    total() gives ...                              last: the hint for all the rest

A hint is a sentence, and it names the function.
"""

import re
import types
from functools import partial
from pathlib import Path
from textwrap import indent
from typing import NamedTuple

# a name and its hint; "forward: calls of send" has a colon of its own
NAMED = re.compile(r"((?:[^:]+: (?=bytes |calls |messages ))?.*?): (.*)")
REGION = re.compile(r"^( *)# exercise: (\w+)\n(.*?)^ *# end exercise\n", re.M | re.S)


class Mistake(NamedTuple):
    """A wrong answer. edits: [(ours, theirs)]; or regions: the lines of each, None where ours."""

    hint: str
    edits: list
    regions: list
    bug: tuple | None  # (name, what it does), where --inject-bug plants it


def edits_of(lines):
    """[(ours, theirs)] of lines "ours -> theirs"."""
    pairs = (line.split(" ->") for line in lines)
    return [(ours, theirs.removeprefix(" ")) for ours, theirs in pairs]


def regions_of(lines):
    """The regions of an answer's lines, with -- between two of them; None where one is ours."""
    regions = "\n".join(lines).split("\n--\n")
    return [None if region == "..." else region for region in regions]


def read_mistakes(path):
    """{exercise: ([Mistake], {name: hint})} of mistakes.txt; the name of the last hint is ""."""
    found = {}
    for part in re.split(r"^== ", Path(path).read_text(), flags=re.M)[1:]:
        exercise, *lines, last = part.splitlines()
        mistakes, hints, whole, bug = [], {"": last}, [], None
        for line in lines:
            change, _, hint = line.rpartition("  # ")
            if line.startswith("bug "):
                bug = tuple(line.removeprefix("bug ").split(": ", 1))
            elif line.startswith("|"):
                whole.append(line[2:])
            elif line.startswith("# "):
                mistakes.append(Mistake(line[2:], [], regions_of(whole), bug))
                whole, bug = [], None
            elif " ->" in line:
                mistakes.append(Mistake(hint, edits_of(change.split(" && ")), [], bug))
                bug = None
            else:
                name, hint = NAMED.fullmatch(line).groups()
                hints[name] = hint
        found[exercise] = mistakes, hints
    return found


def with_mistake(text, exercise, mistake):
    """A finished lab's text with a mistake in it. Raises AssertionError where it has no place."""
    left, unused = [*mistake.regions], {ours for ours, _ in mistake.edits}

    def change(match):
        space, name, body = match.groups()
        if name != exercise:
            return match[0]
        for ours, theirs in mistake.edits:
            unused.difference_update([ours] if ours in body else [])
            body = body.replace(ours, theirs)
        region = left.pop(0) if left else None
        body = body if region is None else indent(region, space) + "\n"
        return f"{space}# exercise: {name}\n{body}{space}# end exercise\n"

    text = REGION.sub(change, text)
    assert not unused and not left, f"{exercise} has no {unused or left}"
    return text


def plant(finished, exercise, mistake, module):
    """Make a module the finished lab with a mistake in it."""
    text = with_mistake(Path(finished.__file__).read_text(), exercise, mistake)
    exec(compile(text, finished.__file__, "exec"), vars(module))


def mistaken_lab(finished, exercise, mistake):
    """The finished lab with a mistake in it, as a module."""
    module = types.ModuleType(finished.__name__)
    module.__file__ = finished.__file__
    plant(finished, exercise, mistake, module)
    return module


def as_bug(finished, exercise, mistake):
    """What --inject-bug calls: it makes a lab the finished one with the mistake."""
    bug = partial(plant, finished, exercise, mistake)
    bug.__name__, bug.__doc__ = mistake.bug
    return bug
