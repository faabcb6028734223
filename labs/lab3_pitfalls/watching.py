"""Lab 3's cases of what one watches in training: the loss, asynchronous results, clocks."""

import time
from functools import partial
from statistics import median
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from labs.kit.harness import Traffic
from labs.kit.inputs import numbers
from labs.kit.tools import appears, on_every_rank, shared_folder, subgroup


def loss_curve(model, optimizer, loss_of, scale, steps):
    """The losses of so many steps, all gradients times scale. loss_of(model) -> loss"""
    losses = []
    for _ in range(steps):
        loss = loss_of(model)
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            parameter.grad *= scale
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def adam_hides_scale(group, seed):
    x, target = numbers(seed, 64, 8), numbers(seed, 64, 8).argmax(1)

    def loss_of(model):
        return F.cross_entropy(model(x), target)

    def see(lab, eye):
        curves = {}
        for scale in 1, 2, 0.5:
            torch.manual_seed(seed)
            model = nn.Linear(8, 8)
            optimizer = lab.right_adam_hides_scale(model.parameters())
            curves[scale] = loss_curve(model, optimizer, loss_of, scale, 20)
        right = curves.pop(1)
        eye.note("the loss hardly falls in 20 steps", not right[-1] < 0.95 * right[0])
        for scale, losses in curves.items():
            apart = ((losses - right) / right).abs().max()
            eye.note(f"gradients times {scale} hardly move the loss", not apart > 0.01)

    yield "a small model", see


def see_stale(parts, group, lab, eye):
    """Rank 1 comes once rank 0's meanwhile() has run, or late; rank 0 has the whole sum."""
    rank, calls, before = group.rank(), [], True
    x = parts[rank].clone()
    with shared_folder(group) as folder:

        def meanwhile():
            calls.append("all_reduce" in traffic.ops)
            (folder / f"rank {rank}").touch()

        if rank == 1:
            appears(folder / "rank 0", 1)
            time.sleep(0.1)  # longer than luck
            before = (folder / "rank 0").exists()
        barriers = mock.patch.object(dist, "barrier", wraps=dist.barrier)
        with Traffic() as traffic, barriers as barrier:
            result = lab.right_stale_result(x, group, meanwhile)
            if rank == 1:
                time.sleep(0.05)  # rank 0 alone can be too early
            result = result.clone()  # as it is now
    eye.note("the sum", result)
    eye.note("x is overwritten", not torch.equal(x, parts[rank]))
    eye.note("the number of barriers", barrier.call_count)
    eye.note("the number of calls of meanwhile()", len(calls))
    eye.note("meanwhile() runs before the sum is started", not all(calls))
    late = not all(on_every_rank(before, group))
    eye.note("rank 0 waits for rank 1 before meanwhile()", late)


def stale_result(group, seed):
    parts = numbers(seed, group.size(), 1000)
    yield "rank 1 is late", partial(see_stale, parts, group), {"the sum": parts.sum(0)}


LONG, BUDGET = 0.01, 0.1  # seconds of a long step; what the timing may take


def see_counts(group, lab, eye):
    """How many steps, which hold a collective, each rank makes; one rank is slower."""
    rank, calls = group.rank(), []
    inside, shared = subgroup(group, 2), subgroup(group, 4)  # apart: counts may differ

    def step():
        calls.append(rank)
        dist.all_reduce(torch.ones(1), group=inside)
        time.sleep(0.0002 * rank)

    time.sleep(0.2 * rank)
    hung = False
    try:
        lab.right_adaptive_timing(step, shared)
    except RuntimeError as problem:
        if "Timed out" not in str(problem):
            raise
        hung = True
    counts, waits = zip(*on_every_rank((len(calls), hung), group))
    eye.note("the ranks run unequally many steps", len(set(counts)) > 1 or any(waits))


def timed_steps(first, group, lab):
    """What the timing returns, and what each step took by a clock that steps alone move.

    A step takes 1 or 7 times LONG on one of the ranks and less on the others, the first one `first`
    seconds more. So a rank's own median is short, and neither the largest nor the mean of the
    ranks' maxima is the median, nor a sum.
    """
    times = []

    def step():
        turn = len(times)
        length = (7 if turn % 2 else 1) if turn % 3 == group.rank() else 0.3
        times.append(LONG * length + (0 if times else first))

    clocks = dict.fromkeys(("perf_counter", "monotonic", "time"), lambda: sum(times))
    with mock.patch.multiple(time, **clocks):
        return lab.right_adaptive_timing(step, group), times


def see_median(group, lab, eye):
    seconds, times = timed_steps(0, group, lab)
    told, everyone = zip(*on_every_rank((seconds, times), group))
    eye.note("fewer than 6 steps are run", len(times) < 6)
    eye.note("more steps are run than the budget allows", len(times) > 10 * BUDGET / LONG)
    eye.note("what is returned", type(seconds).__name__)
    eye.note("the ranks say different seconds", len(set(told)) > 1)
    slowest = [max(run) for run in zip(*everyone)]
    nearest = min(abs(seconds - median(slowest[skipped:])) for skipped in range(3))
    eye.note("the seconds are not those of most steps", not nearest < 0.01 * LONG)
    _, after = timed_steps(BUDGET, group, lab)
    eye.note("fewer steps are run where the first one is slow", len(after) < len(times))


def adaptive_timing(group, seed):
    yield "a collective in the step", partial(see_counts, group)
    yield "short and long steps", partial(see_median, group)


LATE = 0.3  # seconds


def see_clock(sender, group, lab, eye):
    """One sends, works a bit more and is done; the other comes late, and works longer."""
    rank, spans = group.rank(), []  # by a clock that all processes of a machine share

    def step():
        begin = time.monotonic()
        if rank == sender:
            dist.send(torch.ones(1), group=group, group_dst=1 - sender)
            time.sleep(0.25)
        else:
            dist.recv(torch.empty(1), group=group, group_src=sender)
            time.sleep(0.3)
        spans.append((begin, time.monotonic()))

    dist.barrier(group)  # late by this much, not by what a process took to start
    time.sleep(LATE * (rank != sender))
    seconds = lab.right_rank_0_clock(step, group)
    eye.note("the number of steps", len(spans))
    eye.note("what is returned", type(seconds).__name__)
    if not eye.goes_on():
        return
    begins, ends = zip(*on_every_rank(spans[0], group))
    told, right = on_every_rank(seconds, group), max(ends) - max(begins)
    eye.note("the seconds are more than the work's", max(told) > right + LATE / 2)
    eye.note("the ranks say different seconds", len(set(told)) > 1)
    eye.note("the seconds are less than the work's", min(told) < 0.3)


def rank_0_clock(group, seed):
    """A pipeline's forward, either way: whoever sends is done first."""
    for sender in 1, 0:
        yield f"rank {sender} sends", partial(see_clock, sender, group)
