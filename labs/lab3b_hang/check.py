"""Lab 3b's exercises: dumps that are to be read, and programs that no longer hang."""

import faulthandler
import os
import re
import tempfile
import threading
import time
from functools import partial

import torch

from labs.kit.blame import own_line
from labs.kit.eye import copied, unchanged
from labs.kit.harness import Traffic
from labs.kit.inputs import numbers
from labs.kit.judge import checks
from labs.kit.tools import noted_waits, on_every_rank, subgroup
from labs.lab3b_hang import lesson as finished

SUBGROUP = True  # the group is not the world, and has other rank numbers
PATIENCE = 3  # seconds that a call may wait: a right answer's take milliseconds

# Reading
# --------------------------------------------------------------------------------------------------

LIBRARY = """
def {op}(dump):
    dump()
"""
PROGRAM = """
def exchange(op, dump):
    op(dump)


def main(op, dump):
    exchange(op, dump)
"""


def compiled(source, name, path):
    """A function of a source, as if that stood in the file of that path."""
    space = {}
    exec(compile(source, path, "exec"), space)
    return space[name]


def stack_of(program, *args):
    """faulthandler's text at the moment when program(*args, dump) calls dump(); of two threads."""
    leave = threading.Event()
    other = threading.Thread(target=leave.wait)
    other.start()
    with tempfile.TemporaryFile("w+") as file:
        program(*args, partial(faulthandler.dump_traceback, file))
        leave.set()
        other.join()
        file.seek(0)
        return file.read().replace("Current thread", "Thread")  # as another thread would call it


def own_frame(group, seed):
    """Real dumps: torch's frames above the program's, another thread's block before or behind."""
    above, op = 20 + seed % 50, ("send", "barrier", "all_reduce")[seed % 3]
    path = "/home/me/my job/train.py"
    library = compiled(LIBRARY.format(op=op), op, f"/lib{path}")
    main = compiled("\n" * above + PROGRAM, "main", path)
    blocks = re.split(r"\n(?=Thread 0x)", stack_of(main, library))
    for where, order in ("before", blocks), ("behind", blocks[::-1]):
        stack = "Timeout (0:00:01)!\n" + "\n".join(order)
        right = {"the function": op, "the line": above + 3}
        yield f"another thread is {where} the program's", partial(frame, stack, path), right
    none = {"the function": "none", "the line": 0}
    yield "there is no stack", partial(frame, "", path), none
    yield "no thread runs the program", partial(frame, stack, "/home/me/other.py"), none


def frame(stack, file, lab, eye):
    function, line = lab.own_frame(stack, file) or ("none", 0)
    eye.note("the function", function)
    eye.note("the line", line)


def record(first, *calls):
    """A flight record, its entries numbered from first: calls are (op, numbers in the tensor)."""
    return [
        {"collective_seq_id": i, "profiling_name": f"gloo:{op}", "input_sizes": [[n]]}
        for i, (op, n) in enumerate(calls, first)
    ]


def first_difference(group, seed):
    """Three ranks' records: another op, another size, a rank that never came, entries dropped."""
    draw = torch.randint(4, 9, (8,), generator=torch.Generator().manual_seed(seed)).tolist()
    calls = [("all_reduce", n) for n in draw]
    full, other, late = record(1, *calls), seed % 7, 3 + seed % 5
    cases = {}
    for what, call in ("op", ("broadcast", draw[other])), ("size", ("all_reduce", 99)):
        theirs = record(1, *calls[:other], call, *calls[other + 1 : -1], ("barrier", 0))
        cases[f"rank 1 has another {what}"] = full, theirs, full
        cases[f"rank 2 has another {what}"] = full, full, theirs
    cases["rank 2 has stopped"] = full, full, full[:late]
    cases["rank 2 lacks the last call"] = full, full, full[:-1]
    cases["rank 0 has called nothing"] = [], full, full
    cases["no rank has called anything"] = [], [], []
    cases["rank 1 no longer has its oldest calls"] = full, full[3:], full
    cases["the ranks agree"] = full, full, full
    for title, records in cases.items():
        yield title, partial(difference, [*records])


def difference(records, lab, eye):
    given = copied(records)
    number, calls = lab.first_difference(given) or ("none", [])
    eye.note("the number", number)
    eye.note("the calls", [*calls])
    eye.note("records is overwritten", given != records)


# Programs
# --------------------------------------------------------------------------------------------------


class Waits(str):
    """Where ranks wait for ever, as a text; equal are two in which they wait in the same calls."""

    calls = ()

    def __eq__(self, other):
        return self.calls == getattr(other, "calls", None)

    __hash__ = str.__hash__


def where_they_wait(lab, name, dumps):
    """The ranks' lines of the program that hangs, and what their dumps say."""
    file = getattr(lab, f"right_{name}").__code__.co_filename
    frames = [finished.own_frame(dump["stack"], file) for dump in dumps]
    lines = [own_line([(file, found[1])], file, name) if found else "" for found in frames]
    each = "".join(f"rank {rank} {line}" for rank, line in enumerate(lines) if line)
    found = Waits(each + "; ".join(finished.diagnosis(dumps, file)))
    found.calls = [frame and frame[0] for frame in frames]
    return found


def watch(lab, eye, name, given, group, late=False):
    """Note what right_NAME(*given.values()) returns, or where the ranks wait for ever."""
    program, args = getattr(lab, f"right_{name}"), {n: copied(x) for n, x in given.items()}
    own = subgroup(group, PATIENCE)
    time.sleep(0.2 * late)
    with Traffic() as traffic, noted_waits(id) as waits:
        seen = finished.watched(program, *args.values(), group=own, seconds=PATIENCE / 2)
    seen["stack"] = re.sub(r".*/kit/tools\.py.*\n", "", seen["stack"])  # noted_waits()
    result = seen.pop("result")
    dumps = on_every_rank(seen, group)
    hangs = any(dump["hung"] for dump in dumps)
    eye.note("what waits for ever", where_they_wait(lab, name, dumps) if hangs else Waits())
    if hangs:
        return
    eye.note_unwaited("messages that nobody waits for", traffic, waits)
    eye.note("the result", result)
    for n, x in given.items():
        eye.note(f"{n} is overwritten", not unchanged(args[n], x))


def skipped_collective(group, seed):
    """Seven steps; rank 1 has three batches whose gradient is not finite, and rank 0 another."""
    batches = list(numbers(seed, 7, group.size(), 3, 4))  # of each step: (ranks, n, h)
    batches[seed % 2][1, 0, 0], batches[3][1, 1, 1], batches[4][0] = torch.inf, torch.nan, torch.inf
    batches[5][1, :, 2] = 1e30  # finite, but one number of its gradient is not
    right = weight = numbers(seed + 1, 4)
    for step in batches:
        if all(finished.gradient_of(batch, right).isfinite().all() for batch in step):
            right = right - finished.RATE * finished.gradient_of(step.flatten(0, 1), right)
    given = {"batches": [step[group.rank()] for step in batches], "weight": weight}
    see = partial(watch, name="skipped_collective", given=given, group=group)
    yield "4 of 7 steps are left out", see, {"the result": right}


class Name(str):
    """A name whose hash is another in each process, as of every str where ranks are started."""

    def __hash__(self):
        return hash((str(self), os.getpid()))


def two_orders(group, seed):
    """Each rank has the tensors in an order of its own."""
    rank, kinds = group.rank(), ("gradient", "mean")
    names = [Name(f"{kind} {i}") for i in range(3) for kind in kinds]
    values = dict(zip(names, numbers(seed, len(names), group.size(), 5)))
    order = names[seed % 3 :] + names[: seed % 3]
    order = order if rank == 0 else [*reversed(order)]
    right = {n: x.sum(0) if n.startswith("gradient") else x[0] for n, x in values.items()}

    def see(lab, eye):
        ready = {name: values[name][rank].clone() for name in order}
        tensors = dict(ready)
        watch(lab, eye, "two_orders", {"ready": ready}, group)
        for name in names:
            eye.note(name, tensors[name])
        others = [name for name in names if ready.get(name) is not tensors[name]]
        eye.note("the names of other tensors than before", others)

    yield "the ranks have other orders", see, right


def uneven_batches(group, seed):
    """Ranks with 2 and 4 batches, and with 3 and none; batches of different lengths."""
    for lengths in ([3, 1], [2, 4, 1, 2 + seed % 3]), ([2, 5, 1], []):
        data = [list(numbers(seed + r, sum(ns), 4).split(ns)) for r, ns in enumerate(lengths)]
        right = weight = numbers(seed + 9, 4)
        for i in range(max(map(len, data))):
            batch = torch.cat([mine[i] for mine in data if i < len(mine)])
            right = right - finished.RATE * finished.gradient_of(batch, right) / len(batch)
        given = {"batches": data[group.rank()], "weight": weight}
        see = partial(watch, name="uneven_batches", given=given, group=group)
        yield f"{len(data[0])} and {len(data[1])} batches", see, {"the result": right}


def crossed_messages(group, seed):
    """A ring of three: a few numbers, and four megabytes; one rank comes late."""
    rank, late = group.rank(), group.rank() == seed % group.size()
    for count in 5, 1 << 20:
        xs = numbers(seed, group.size(), count)
        what = {"name": "crossed_messages", "given": {"x": xs[rank]}, "group": group}
        yield f"{4 * count} bytes", partial(watch, late=late, **what), {"the result": xs[rank - 1]}


EXERCISES = {
    "own_frame": (own_frame, 1),
    "first_difference": (first_difference, 1),
    "skipped_collective": (skipped_collective, 2),
    "two_orders": (two_orders, 2),
    "uneven_batches": (uneven_batches, 2),
    "crossed_messages": (crossed_messages, 3),
}
CHECKS, BUGS = checks(EXERCISES, finished, 1e-5)
