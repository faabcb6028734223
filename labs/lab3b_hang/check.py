"""Lab 3b's checks: dumps that are read right, programs that no longer hang."""

import copy
import faulthandler
import os
import re
import tempfile
import threading
import time
from functools import partial

import torch
from torch.utils._pytree import tree_leaves

from labs.kit.blame import own_line
from labs.kit.compare import tried
from labs.kit.harness import Wrong, expect, expect_close
from labs.kit.tools import noted_waits, numbers, on_every_rank, subgroup
from labs.lab3b_hang import lesson as finished  # not the learner's

SUBGROUP = True  # the group is not the world, and has other rank numbers
PATIENCE = 3  # seconds that a call may wait: a right answer's take milliseconds

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


def check_own_frame(lab, group, seed):
    """Real dumps: torch's frames above the program's, another thread's block before or behind."""
    above, op = 20 + seed % 50, ("send", "barrier", "all_reduce")[seed % 3]
    path = "/home/me/my job/train.py"
    library = compiled(LIBRARY.format(op=op), op, f"/lib{path}")
    main = compiled("\n" * above + PROGRAM, "main", path)
    blocks = re.split(r"\n(?=Thread 0x)", stack_of(main, library))
    innermost, outermost = (op, above + 3), (op, above + 7)
    for stack in ("\n".join(order) for order in (blocks, blocks[::-1])):
        mine = lab.own_frame(f"Timeout (0:00:01)!\n{stack}", path)
        mine = tuple(mine) if isinstance(mine, list) else mine
        found = f"{mine} of a rank that waits in {op}, called in line {above + 3}"
        hint = "not the first block, nor the last: the one with a line of the program's file"
        expect(mine and mine[0] not in ("wait", "acquire"), found, hint)
        hint = f"line {above + 7} is the call of a function of the same file: the innermost first"
        expect(mine != outermost, found, hint)
        hint = "line 3 is of another file: the line is the program's own, and compare whole paths"
        expect(mine[1] != 3, found, hint)
        expect(
            not isinstance(mine[1], str), f"{mine}", "the function, then the line, a number: int()"
        )
        hint = "the function: the block's first line; the line: the first one of the program's file"
        expect(mine == innermost, found, hint)
    for text, file in (("", path), (stack, "/home/me/other.py")):
        mine = lab.own_frame(text, file)
        expect(mine is None, f"{mine}, and no thread runs the program", "it has returned: None")
    return f"{op}, line {above + 3}, of two threads"


def record(first, *calls):
    """A flight record, its entries numbered from first: calls are (op, numbers in the tensor)."""
    return [
        {"collective_seq_id": i, "profiling_name": f"gloo:{op}", "input_sizes": [[n]]}
        for i, (op, n) in enumerate(calls, first)
    ]


def check_first_difference(lab, group, seed):
    """Three ranks' records: another op, another size, a rank that never came, entries dropped."""
    draw = torch.randint(4, 9, (8,), generator=torch.Generator().manual_seed(seed)).tolist()
    calls = [("all_reduce", n) for n in draw]
    full, other, late = record(1, *calls), seed % 7, 3 + seed % 5
    said = [finished.called(entry) for entry in full]
    for what, changed in (("op", ("broadcast", draw[other])), ("size", ("all_reduce", 99))):
        theirs = record(1, *calls[:other], changed, *calls[other + 1 : -1], ("barrier", 0))
        ours, one = said[other], finished.called(theirs[other])
        hint = "compare what called() says, sizes too, of all ranks; return at the first number"
        third, second = (other + 1, [ours, ours, one]), (other + 1, [ours, one, ours])
        expect_difference(lab, [full, full, theirs], third, f"another {what}", hint)
        expect_difference(lab, [full, theirs, full], second, f"another {what}", hint)
    never = late + 1, [said[late]] * 2 + [None]
    hint = "a record that is shorter: the rank never came to this call, None"
    expect_difference(lab, [full, full, full[:late]], never, "a rank that stopped", hint)
    last = len(full), [said[-1]] * 2 + [None]
    expect_difference(lab, [full, full, full[:-1]], last, "a rank that lacks the last call", hint)
    came = "an empty record: it never came to call 1"
    expect_difference(lab, [[], full, full], (1, [None] + [said[0]] * 2), "an empty record", came)
    expect_difference(lab, [[], [], []], None, "no rank has called anything", "None")
    hint = "go by collective_seq_id, not by the place in the list, from the newest of the oldest on"
    expect_difference(lab, [full, full[3:], full], None, "a record without its oldest", hint)
    expect_difference(lab, [full, full, full], None, "three equal records", "None")
    return f"op, size, absence, at calls {other + 1} and {late + 1}"


def expect_difference(lab, records, want, what, hint):
    """Raise Wrong unless first_difference gives what is wanted, and leaves the records alone."""
    before = copy.deepcopy(records)
    mine = tried(what, hint, lab.first_difference, records)
    if isinstance(mine, (tuple, list)) and len(mine) == 2:
        mine = mine[0], list(mine[1])
    expect(mine == want, f"{what}: {mine}, not {want}", hint)
    expect(records == before, f"{what}: the records are changed", "they are the caller's")


def expect_no_hang(lab, name, args, group, hint, waits=0):
    """What right_NAME returns on this rank; raises Wrong with the diagnosis if it waits in vain.

    Nor may it change its arguments, other than a dict's tensors, or wait fewer than so many times.
    """
    own, program = subgroup(group, PATIENCE), getattr(lab, f"right_{name}")
    before = copy.deepcopy(args)
    with noted_waits() as noted:
        seen = finished.watched(program, *args, group=own, seconds=PATIENCE / 2)
    seen["stack"] = re.sub(r".*/kit/tools\.py.*\n", "", seen["stack"])  # noted_waits()
    result, seen["waits"] = seen.pop("result"), len(noted)
    dumps = on_every_rank(seen, group)
    fewest = min((dump["waits"] for dump in dumps if not dump["hung"]), default=waits)
    lost = "a message that nobody waits for may still be under way: wait() for each"
    expect(fewest >= waits, f"{fewest} waits for {waits} messages", lost)
    if any(dump["hung"] for dump in dumps):
        frames = [finished.own_frame(dump["stack"], lab.__file__) for dump in dumps]
        lines = [own_line([(lab.__file__, f[1])], lab.__file__, name) if f else "" for f in frames]
        each = "".join(f"rank {rank} {line}" for rank, line in enumerate(lines) if line)
        where = "; ".join(finished.diagnosis(dumps, lab.__file__))
        raise Wrong(f"{each}hangs; {where}", hint)
    if not isinstance(args[0], dict):
        pairs = zip(tree_leaves(args), tree_leaves(before), strict=False)
        same = len(tree_leaves(args)) == len(tree_leaves(before))
        same = same and all(torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in pairs)
        expect(same, "an argument is changed", "in place (-=, pop, append): make a new one")
    return result


def check_skipped_collective(lab, group, seed):
    """Seven steps; rank 1 has three batches whose gradient is not finite, and rank 0 another."""
    batches = list(numbers(seed, 7, group.size(), 3, 4))  # of each step: (ranks, n, h)
    batches[seed % 2][1, 0, 0], batches[3][1, 1, 1], batches[4][0] = torch.inf, torch.nan, torch.inf
    batches[5][1, :, 2] = 1e30  # finite, but one number of its gradient is not
    weight = numbers(seed + 1, 4)
    mine = [step[group.rank()] for step in batches]
    hint = "whether to leave a step out has to be decided from what all ranks share"
    result = expect_no_hang(lab, "skipped_collective", (mine, weight.clone()), group, hint)
    right, alone, mean, until = weight, weight, weight, None
    for step in batches:
        all_of_it = finished.gradient_of(step.flatten(0, 1), right)
        bad = not all(finished.gradient_of(batch, right).isfinite().all() for batch in step)
        until = right if bad and until is None else until
        right = right if bad else right - finished.RATE * all_of_it
        halves = finished.gradient_of(step.flatten(0, 1), mean) / group.size()
        mean = mean if bad else mean - finished.RATE * halves
        parts = [finished.gradient_of(batch, alone) for batch in step]
        alone = alone - finished.RATE * sum(part for part in parts if part.isfinite().all())
    finite = result is not None and result.isfinite().all()
    hint = "a gradient that is not finite has been added: look at all of it, on all ranks"
    expect(finite, f"the weight is {result}", hint)
    hints = {"one rank's gradient was left out: all ranks leave the step out": alone}
    hints |= {"the sum over the ranks, not the mean": mean, "the steps behind it count": until}
    hint = "of a step that one rank leaves out, no rank may add any number"
    error = expect_close("the weight", result, right, hints=hints, hint=hint)
    return f"4 of 7 steps left out by both ranks, weight off by {error:.0e}"


class Name(str):
    """A name whose hash is another in each process, as of every str where ranks are started."""

    def __hash__(self):
        return hash((str(self), os.getpid()))


def check_two_orders(lab, group, seed):
    """Each rank has the tensors in an order of its own."""
    rank, kinds = group.rank(), ("gradient", "mean")
    names = [Name(f"{kind} {i}") for i in range(3) for kind in kinds]
    values = dict(zip(names, numbers(seed, len(names), group.size(), 5)))
    order = names[seed % 3 :] + names[: seed % 3]
    order = order if rank == 0 else [*reversed(order)]
    tensors = {name: values[name][rank].clone() for name in order}
    hint = "the ranks' calls differ in their order, or in a broadcast's source, rank 0 for all"
    expect_no_hang(lab, "two_orders", (given := dict(tensors),), group, hint, len(names))
    same = all(given.get(name) is tensor for name, tensor in tensors.items())
    expect(same, "the dict has other values than its tensors", "in place: they are the caller's")
    for name, (one, other) in values.items():
        right, mine = one + other if name.startswith("gradient") else one, tensors[name]
        hints = {"statistics are rank 0's, not a sum": one + other, "a sum, not a mean": right / 2}
        hints |= {} if right is not one else {"statistics are those of the group's rank 0": other}
        own = values[name][rank]
        hints |= {"nothing is added to the tensor that was given: in place, and gradients": own}
        hint = "it did not hang, and mixed two tensors: one order for each kind"
        expect_close(name, mine, right, hints=hints, hint=hint)
    return f"{len(names)} tensors in one order, sums and rank 0's right"


def check_uneven_batches(lab, group, seed):
    """Ranks with 2 and 4 batches, and with 3 and none; batches of different lengths."""
    for lengths in (([3, 1], [2, 4, 1, 2 + seed % 3]), ([2, 5, 1], [])):
        data = [list(numbers(seed + r, sum(ns), 4).split(ns)) for r, ns in enumerate(lengths)]
        weight, counts = numbers(seed + 9, 4), [len(ns) for ns in lengths]
        hint = "agree on the number of steps; a rank that is done takes part with zeros"
        mine = list(data[group.rank()]), weight.clone()
        result = expect_no_hang(lab, "uneven_batches", mine, group, hint)
        repeated = [ds + ds[-1:] * (max(counts) - len(ds)) for ds in data]
        means = "a mean of the ranks' means, or over the ranks: divide by all sequences"
        hints = {
            "the least number of steps: sequences are lost": (data, min(counts), True),
            means: (data, max(counts), False),
            "a rank that is done repeats its last batch": (repeated, max(counts), True),
        }
        hints = {text: one_device(weight, *case) for text, case in hints.items()}
        right = one_device(weight, data, max(counts), True)
        hint = "as many steps as the longest has; in each, all ranks' sum by all their sequences"
        finite = result is not None and result.isfinite().all()
        expect(finite, f"the weight is {result}", "so many steps as the longest, and not one more")
        everyone = on_every_rank(result.tolist(), group)
        same = "every rank takes every step, with the same sum, also one that has no batch"
        expect(everyone[0] == everyone[1], f"the ranks' weights differ: {everyone}", same)
        error = expect_close("the weight", result, right, hints=hints, hint=hint)
    return f"2 and 4 batches, 3 and none: weight off by {error:.0e}"


def one_device(weight, data, steps, joined):
    """The weight after so many steps; data: each rank's batches, a step's joined into one or not.

    Not joined: the sum of the batches' means, divided by the ranks.
    """
    for i in range(steps):
        batches = [mine[i] for mine in data if i < len(mine)]
        batches = [torch.cat(batches)] if joined else batches
        means = [finished.gradient_of(batch, weight) / len(batch) for batch in batches]
        weight = weight - finished.RATE * sum(means) / (1 if joined else len(data))
    return weight


def check_crossed_messages(lab, group, seed):
    """A ring of three: a few numbers, and four megabytes; one rank comes late."""
    rank, world = group.rank(), group.size()
    for count in (5, 1 << 20):
        xs = numbers(seed, world, count)
        time.sleep(0.2 * (rank == seed % world))
        hint = "the next rank has to receive while this one sends: isend, or one receives first"
        received = expect_no_hang(lab, "crossed_messages", (xs[rank].clone(),), group, hint, 2)
        hints = {"that is the next rank's: send to it, and receive from the one before": 1}
        hints |= {"that is the rank's own: wait for what is received": 0}
        hints = {text: xs[(rank + step) % world] for text, step in hints.items()}
        error = expect_close("what was received", received, xs[rank - 1], hints=hints, hint=hint)
    return f"a ring of {world} ranks, 20 bytes and 4 MiB, off by {error:.0e}"


CHECKS = {
    "own_frame": (check_own_frame, 1),
    "first_difference": (check_first_difference, 1),
    "skipped_collective": (check_skipped_collective, 2),
    "two_orders": (check_two_orders, 2),
    "uneven_batches": (check_uneven_batches, 2),
    "crossed_messages": (check_crossed_messages, 3),
}


# Bugs for --inject-bug: the checks have to catch every one


def by_place(lab):
    """first_difference: compares the records by the place in the list."""

    def first_difference(records):
        for i, entries in enumerate(zip(*records)):
            calls = [lab.called(entry) for entry in entries]
            if len(set(calls)) > 1:
                return i + 1, calls
        return None

    lab.first_difference = first_difference


def skips_alone(lab):
    """skipped_collective: the rank with the bad batch leaves its all-reduce out."""
    lab.right_skipped_collective = lab.wrong_skipped_collective


def all_send(lab):
    """crossed_messages: all ranks send before anybody receives."""
    lab.right_crossed_messages = lab.wrong_crossed_messages


BUGS = [by_place, skips_alone, all_send]
