"""How an exercise is judged: what is seen of a learner's code has to be what is seen of ours.

How a lab's check.py is written:

    def total(group, seed):                                # the cases of the exercise total
        x = torch.randn(5, generator=...)
        given = {"x": x.requires_grad_(), "group": group}  # its arguments, in their order
        right = {"the sum": P * x}                         # what one device says; may be left out
        yield "five numbers", ("total", given, "the sum"), right

    EXERCISES = {"total": (total, 3)}                      # on 3 ranks; or (total, 4, GROUPS)
    CHECKS, BUGS = checks(EXERCISES, finished, 1e-5)       # off by at most so much

A case is (title, what is called, right). What is called is ("function", {name: argument}, "names,
of, results", ...), as Eye.call() takes them; or see(lab, eye), a function that calls what it wants
and has the eye note what it sees: eye.call(...), eye.note("the sum", y). The finished lab is seen
first, then the learner's, in the same way. All that was noted has to be the same in both, and what
`right` names has to have the values given there. So bytes, dtypes, arguments that are overwritten
and messages that nobody waits for need no line of a check. A case draws the same numbers each time.
With GROUPS, such as [[1, 3], [0, 2, 3]], the cases run in these groups of the ranks. Some things a
rank cannot see (the order of starts and waits, bytes alive, a killed process, a disk). A probe has
to see them (labs/kit/link.py, alive.py), and see() notes what it says.

mistakes.txt beside check.py has the wrong answers, as labs/kit/mistakes.py explains. The grader
tries them to find the hint, and the tests try them to see each caught with its hint. Add to both: a
case for each edge (a rank that has nothing, another dtype, more dimensions, a second call), and the
mistake that only this case sees.
"""

import itertools
import re
from contextlib import suppress
from functools import partial
from operator import attrgetter
from pathlib import Path

import torch

from labs.kit.blame import default_group_refused, hint_at
from labs.kit.eye import Eye, Most, differs
from labs.kit.harness import Wrong, relative_error
from labs.kit.mistakes import as_bug, mistaken_lab, read_mistakes
from labs.kit.tools import on_every_rank, subgroup

GENERAL = {  # hints by the end of a name, where no mistake has one
    "overwritten": "{} must leave its arguments as they are, because the caller needs them: make a "
    "new tensor. A collective works in place, as x.add_() does.",
    "waits for": "{} returns before its messages have arrived: call wait() on the handle that "
    "async_op=True returns.",
    "keeps, in bytes": "{} must keep no more for the backward than it needs: of what is gathered, "
    "its own shard.",
}


def tried(what, hint, function, *args, **kwargs):
    """What a function returns. If it raises, Wrong, with the hint and that of a known error."""
    try:
        return function(*args, **kwargs)
    except Wrong:
        raise
    except Exception as problem:
        first = f"{type(problem).__name__}: {problem}".partition("\n")[0]
        if isinstance(problem, NotImplementedError) and "meta tensor" not in first:
            raise  # an exercise not done
        hint = "; ".join(filter(None, (hint, hint_at(first))))
        raise Wrong(f"{what} fails, {first}", hint) from problem


def looked(see, lab, group, right):
    """What is seen of a lab: {name: value}. On several ranks it raises errors: others may wait."""
    eye = Eye(lambda flag: all(on_every_rank(flag, group)), right)
    try:
        if isinstance(see, tuple):
            eye.call(attrgetter(see[0])(lab), *see[1:])
        else:
            see(lab, eye)
    except (Wrong, NotImplementedError):
        raise
    except Exception as problem:
        if group.size() > 1:
            raise
        eye.note("it", f"{type(problem).__name__}: {problem}".partition("\n")[0])
    return eye.seen


def first_wrong(seen, right, tolerance, excused=True):
    """(name, what is wrong with it) of the first that is not right, or None.

    excused: what a skipped case has not come to may be missing, because some rank's is wrong.
    """
    for name in dict.fromkeys([*seen, *right]):
        if name == "it" and "it" not in right:
            text = f"fails, {seen['it']}"
        elif name in seen:  # more than ours notes is right, but no messages and nothing overwritten
            missing = 0 if isinstance(seen[name], Most | bool) else seen[name]
            text = differs(seen[name], right.get(name, missing), tolerance)
        else:
            skipped = excused and "skipped" in seen
            text = None if isinstance(right[name], Most) or skipped else "is not there"
        if text is not None:
            return name, text
    return None


def usual_hint(again, finished, exercise, mistakes, mine, name, control, tolerance):
    """The hint of the mistake that looks as the learner's answer does, on all ranks; or None.

    again(group) gives the case anew: (what is called, expected). Best is a mistake with which all
    is the same, else one with which `name` is: the first that is wrong on this rank, or None.
    """
    near = None
    for mistake in mistakes:
        group = subgroup(control, 5) if control.size() > 1 else control  # it may hang
        first = whole = False
        with suppress(Exception):
            see, expected = again(group)
            seen = looked(see, mistaken_lab(finished, exercise, mistake), group, expected)
            same = {n: n in seen and differs(mine[n], seen[n], tolerance) is None for n in mine}
            first, whole = name is None or same.get(name, name not in seen), all(same.values())
        everywhere = on_every_rank((first, whole), control)
        if all(whole for _, whole in everywhere):
            return mistake.hint
        near = near or (mistake.hint if all(first for first, _ in everywhere) else None)
    return near


def judge(exercise, cases, finished, listed, tolerance, lab, group, seed, control=None):
    """Raise Wrong where what is seen of a case is not right; returns a line to report.

    listed: ([Mistake], {name: hint}). control: a group of the same ranks, for the judge's own
    messages.
    """
    mistakes, hints = listed
    control = control or (subgroup(group) if group.size() > 1 else group)
    count, worst, sent = 0, 0.0, {}
    for place, (title, see, *right) in enumerate(cases(group, seed)):
        right = right[0] if right else {}
        case = see[0] if isinstance(see, tuple) else title
        own = hints.get(case, hints[""])
        ours = looked(see, finished, control, {})
        for name, value in right.items():
            assert differs(ours[name], value, tolerance) is None, (title, name)
        expected = ours | right
        mine = tried(f"{title}: it", own, looked, see, lab, control, expected)
        wrong = first_wrong(mine, expected, tolerance)
        if "skipped" in mine and not any(on_every_rank(wrong is not None, control)):
            wrong = first_wrong(mine, expected, tolerance, excused=False)
        if any(on_every_rank(wrong is not None, control)):

            def again(group, place=place, expected=expected):
                _, see, *_ = next(itertools.islice(cases(group, seed), place, None))
                return see, expected

            name, text = wrong or (None, "")
            hint = usual_hint(again, finished, exercise, mistakes, mine, name, control, tolerance)
            if wrong:
                function, another = (re.match(r"\w*", words)[0] for words in (case, own))
                function = function if hasattr(finished, function) else another
                general = [h for end, h in GENERAL.items() if name.endswith(end)]
                general = general[0].format(function) if general else own
                hint = hint or hints.get(name, general)
                hint = "; ".join(filter(None, (hint, hint_at(text) if name == "it" else "")))
                raise Wrong(f"{title}: {name} {text}".rstrip(), hint)
            return ""  # a rank that sees it says so
        count += 1
        worst = max(worst, largest_error(mine, expected))
        moved = {name: n for name, n in mine.items() if " bytes that " in name and n}
        sent |= {re.sub(" bytes that| moves", "", name): n for name, n in moved.items()}
    moved = ", ".join(f"{name} {nbytes} bytes" for name, nbytes in sent.items())
    return f"{count} case{'s' * (count > 1)}, off by {worst:.0e}; {moved or 'nothing sent'}"


def largest_error(mine, right):
    """The largest relative error of all floating-point tensors, without what is infinite."""
    found = [0.0]
    for name, value in mine.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            odd = ~value.isfinite()
            found.append(relative_error(*(x.masked_fill(odd, 0) for x in (value, right[name]))))
    return max(found)


def on_groups(check, groups, lab, group, seed):
    """A check in each of some groups of the ranks; returns the last line to report."""
    made = []
    for ranks in groups:  # torch names a group by how many groups its ranks have, so all get two
        own = ranks if group.rank() in ranks else [group.rank()]
        made.append((group.rank() in ranks, subgroup(group, ranks=own), subgroup(group, ranks=own)))
    with default_group_refused():
        return [check(lab, each, seed, control) for inside, each, control in made if inside][-1]


def checks(exercises, finished, tolerance):
    """A lab's CHECKS {exercise: (check(lab, group, seed), ranks)}, and its BUGS."""
    found, bugs = {}, []
    listed = read_mistakes(Path(finished.__file__).with_name("mistakes.txt"))
    for name, (cases, world, *groups) in exercises.items():
        check = partial(judge, name, cases, finished, listed[name], tolerance)
        found[name] = partial(on_groups, check, groups[0]) if groups else check, world
        bugs += [as_bug(finished, name, mistake) for mistake in listed[name][0] if mistake.bug]
    return found, bugs
