"""Lab 3b's checks: dumps that are read right, programs that no longer hang."""

import faulthandler
import tempfile
import threading
import time
from functools import partial

import torch
from checks.watching import numbers, on_every_rank
from harness import LABS, expect, expect_close, load

finished = load(LABS / "lab3b_hang.py")  # not the learner's
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
    """Real dumps: another thread's block comes first; torch's frames lie above the program's."""
    above, op = 20 + seed % 50, ("send", "barrier", "all_reduce")[seed % 3]
    library = compiled(LIBRARY.format(op=op), op, "/lib/torch/distributed/distributed_c10d.py")
    main = compiled("\n" * above + PROGRAM, "main", "/home/me/train.py")
    stack = stack_of(main, library)
    innermost, outermost = (op, above + 3), (op, above + 7)
    mine = lab.own_frame(stack, "/home/me/train.py")
    mine = tuple(mine) if isinstance(mine, list) else mine
    found = f"{mine} of a rank that waits in {op}, called in line {above + 3}"
    hint = "the first line of the whole dump is another thread's: look at the program's block"
    expect(not mine or mine[0] not in ("wait", "acquire"), found, hint)
    hint = f"line {above + 7} is the call of a function of the same file: the innermost comes first"
    expect(mine != outermost, found, hint)
    hint = "the function: the block's first line; the line: the first one of the program's file"
    expect(mine == innermost, found, hint)
    for text, file in (("", "/home/me/train.py"), (stack, "/home/me/other.py")):
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
    full, other, late = record(1, *calls), seed % 8, 3 + seed % 5
    for what, changed in (("op", ("broadcast", draw[other])), ("size", ("all_reduce", 99))):
        theirs = record(1, *calls[:other], changed, *calls[other + 1 :])
        want = other + 1, [finished.called(r[other]) for r in (full, theirs, full)]
        hint = {"op": "compare what called() says", "size": "called() has the sizes, too"}[what]
        expect_difference(lab, [full, theirs, full], want, f"another {what}", hint)
    never = late + 1, [finished.called(full[late])] * 2 + [None]
    hint = "a record that is shorter: the rank never came to this call, None"
    expect_difference(lab, [full, full, full[:late]], never, "a rank that stopped", hint)
    never = 1, [None] + [finished.called(full[0])] * 2
    expect_difference(lab, [[], full, full], never, "an empty record", "it never came to call 1")
    hint = "go by collective_seq_id, not by the place in the list, from the newest of the oldest on"
    expect_difference(lab, [full, full[3:], full], None, "a record without its oldest", hint)
    expect_difference(lab, [full, full, full], None, "three equal records", "None")
    return f"op, size, absence, at calls {other + 1} and {late + 1}"


def expect_difference(lab, records, want, what, hint):
    """Raise Wrong unless first_difference gives what is wanted."""
    mine = lab.first_difference(records)
    if isinstance(mine, (tuple, list)) and len(mine) == 2:
        mine = mine[0], list(mine[1])
    expect(mine == want, f"{what}: {mine}, not {want}", hint)


def expect_no_hang(lab, name, args, group, hint):
    """What right_NAME returns on this rank; raises Wrong with the diagnosis if it waits in vain."""
    own = finished.group_with_timeout(list(range(group.size())), PATIENCE)
    program = getattr(lab, f"right_{name}")
    seen = finished.watched(program, *args, group=own, seconds=PATIENCE / 2)
    result = seen.pop("result")
    dumps = on_every_rank(seen, group)
    hung = any(dump["hung"] for dump in dumps)
    expect(not hung, f"hangs: {', '.join(finished.diagnosis(dumps, lab.__file__))}", hint)
    return result


def check_skipped_collective(lab, group, seed):
    """Six steps; two batches of rank 1 are not finite, and another one of rank 0."""
    batches = list(numbers(seed, 6, group.size(), 3, 4))  # of each step: (ranks, n, h)
    batches[seed % 2][1, 0, 0], batches[3][1, 1, 1], batches[4][0] = torch.inf, torch.nan, torch.inf
    weight = numbers(seed + 1, 4)
    mine = [step[group.rank()] for step in batches]
    hint = "whether to leave a step out has to be decided from what all ranks share"
    result = expect_no_hang(lab, "skipped_collective", (mine, weight.clone()), group, hint)
    right, alone = weight, weight
    for step in batches:
        all_of_it = finished.gradient_of(step.flatten(0, 1), right)
        right = right - finished.RATE * all_of_it if all_of_it.isfinite().all() else right
        parts = [finished.gradient_of(batch, alone) for batch in step]
        finite = [part for part in parts if part.isfinite().all()]
        alone = alone - finished.RATE * sum(finite)
    finite = result is not None and result.isfinite().all()
    expect(finite, f"the weight is {result}", "a gradient that is not finite has been added")
    hints = {"one rank's gradient was left out: all ranks leave the step out": alone}
    error = expect_close("the weight", result, right, hints=hints)
    return f"3 of 6 steps left out by both ranks, weight off by {error:.0e}"


def check_two_orders(lab, group, seed):
    """Each rank has the tensors in an order of its own."""
    rank, names = group.rank(), [f"{kind} {i}" for i in range(3) for kind in ("gradient", "mean")]
    values = dict(zip(names, numbers(seed, len(names), group.size(), 5)))
    order = names[seed % 3 :] + names[: seed % 3]
    order = order if rank == 0 else [*reversed(order)]
    ready = {name: values[name][rank].clone() for name in order}
    hint = "the ranks' calls come in different orders: choose one that is the same on all ranks"
    expect_no_hang(lab, "two_orders", (ready,), group, hint)
    for name, (mine, other) in values.items():
        right = mine + other if name.startswith("gradient") else mine
        hints = {"statistics are rank 0's, not a sum": mine + other}
        if not any(torch.allclose(ready[name], x) for x in (right, mine + other)):
            hints = {"it did not hang, and mixed two tensors: one order for each kind": ready[name]}
        expect_close(name, ready[name], right, hints=hints)
    return f"{len(names)} tensors in one order, sums and rank 0's right"


def check_uneven_batches(lab, group, seed):
    """Ranks with 2 and 4 batches, and with 3 and none; batches of different lengths."""
    for lengths in (([3, 1], [2, 4, 1, 2 + seed % 3]), ([2, 5, 1], [])):
        data = [list(numbers(seed + r, sum(ns), 4).split(ns)) for r, ns in enumerate(lengths)]
        weight, counts = numbers(seed + 9, 4), [len(ns) for ns in lengths]
        hint = "agree on the number of steps; a rank that is done takes part with zeros"
        mine = data[group.rank()], weight.clone()
        result = expect_no_hang(lab, "uneven_batches", mine, group, hint)
        repeated = [ds + ds[-1:] * (max(counts) - len(ds)) for ds in data]
        hints = {
            "the least number of steps: sequences are lost": (data, min(counts), True),
            "a mean of the ranks' means: divide by all sequences": (data, max(counts), False),
            "a rank that is done repeats its last batch": (repeated, max(counts), True),
        }
        hints = {text: one_device(weight, *case) for text, case in hints.items()}
        right = one_device(weight, data, max(counts), True)
        error = expect_close("the weight", result, right, hints=hints)
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
        hint = "somebody has to receive while somebody sends: isend, or one half receives first"
        received = expect_no_hang(lab, "crossed_messages", (xs[rank].clone(),), group, hint)
        hints = {"that is the next rank's: send to it, and receive from the one before": 1}
        hints |= {"that is the rank's own: wait for what is received": 0}
        hints = {text: xs[(rank + step) % world] for text, step in hints.items()}
        error = expect_close("what was received", received, xs[rank - 1], hints=hints)
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
