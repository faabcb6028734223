"""Lab 3's checks of what one watches in training: the loss, asynchronous results, clocks."""

import time
from statistics import median

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from labs.kit.harness import Traffic, expect, expect_close
from labs.kit.tools import appears, numbers, on_every_rank, shared_folder, subgroup


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


def check_adam_hides_scale(lab, group, seed):
    """A small model, its gradients right, doubled, halved: the loss falls, the curves part."""
    x, target = numbers(seed, 64, 8), numbers(seed, 64, 8).argmax(1)

    def losses(scale):
        torch.manual_seed(seed)
        model = nn.Linear(8, 8)
        optimizer = lab.right_adam_hides_scale(model.parameters())
        return loss_curve(model, optimizer, lambda m: F.cross_entropy(m(x), target), scale, 20)

    right = losses(1)
    found = f"the loss goes from {right[0]:.2f} to {right[-1]:.2f} in 20 steps"
    expect(right[-1] < 0.95 * right[0], found, "it has to fall: with a larger learning rate?")
    for scale in (2, 0.5):
        apart = ((losses(scale) - right) / right).abs().max().item()
        hint = "its step is the same whatever the gradient's scale: take one proportional to it"
        expect(apart > 0.01, f"gradients times {scale} move the loss by {apart:.1e} only", hint)
    return f"gradients times {scale} move the loss by {apart:.0%}"


def check_stale_result(lab, group, seed):
    """Rank 1 comes once rank 0's meanwhile() has run, or late; rank 0 has the whole sum."""
    rank, parts = group.rank(), numbers(seed, group.size(), 1000)
    x, calls, before = parts[rank].clone(), [], True
    with shared_folder(group) as folder:

        def meanwhile():
            calls.append("all_reduce" in traffic.ops)
            (folder / f"rank {rank}").touch()

        if rank == 1:
            appears(folder / "rank 0", 2)
            time.sleep(0.1)  # longer than luck
            before = (folder / "rank 0").exists()
        with Traffic() as traffic:
            result = lab.right_stale_result(x, group, meanwhile)
            if isinstance(result, torch.Tensor):
                result = result.clone()  # as it is now
    before = all(on_every_rank(before, group))
    total, stale = parts.sum(0), parts[rank]
    if isinstance(result, torch.Tensor) and result.shape == total.shape:
        stale = torch.where(result == total, total, stale)  # some of the sum may have been there
    hints = {"this is this rank's own x: wait() on the handle, then return what was summed": stale}
    hint = "return what was summed, once it has been waited for"
    error = expect_close("the sum", result, total, hints=hints, hint=hint)
    expect(torch.equal(x, parts[rank]), "x is overwritten", "sum a copy: autograd may need x")
    expect(len(calls) == 1, f"meanwhile() was called {len(calls)} times", "once")
    hint = "start with async_op=True, work, then wait"
    expect(all(calls), "meanwhile() was called before the sum was started", hint)
    expect(before, "rank 0 waited for rank 1, then worked", hint)
    return f"sum off by {error:.0e}; rank 0's meanwhile() ran before rank 1 came"


LONG, BUDGET = 0.01, 0.1  # seconds of a long step; what the timing may take
LATE = 0.4  # seconds


def steps_of_each(lab, group):
    """How many steps, which hold a collective, each rank makes; and whether it waited in vain."""
    rank, calls = group.rank(), []
    inside, shared = subgroup(group, 3), subgroup(group, 6)  # apart: counts may differ

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
    return zip(*on_every_rank((len(calls), hung), group))


def check_adaptive_timing(lab, group, seed):
    """A step that holds a collective, on ranks of different speeds: all make as many steps.

    Then a step without one, of 1 or 7 times LONG on one of the ranks, or none: a rank's own median
    is short, and neither the largest nor the mean of the ranks' maxima is the median, nor a sum.
    """
    times = []

    def alternating():
        begin, turn = time.perf_counter(), len(times)
        time.sleep(LONG * ((7 if turn % 2 else 1) if turn % 3 == group.rank() else 0.3))
        times.append(time.perf_counter() - begin)

    counts, waits = steps_of_each(lab, group)
    hint = "how often is decided once, from a number all ranks share: the maximum of their clocks"
    found = f"the ranks ran {counts} steps" + ", and one waited in vain" * any(waits)
    expect(len(set(counts)) == 1 and not any(waits), found, hint)
    seconds = lab.right_adaptive_timing(alternating, group)
    told, everyone = zip(*on_every_rank((seconds, times), group))
    count = len(times)
    expect(count >= 6, f"only {count} steps", "one to warm up, then 5 for a median")
    found, hint = f"{count} steps of {LONG} s", f"budget is {BUDGET} s: fewer"
    expect(count <= 10 * BUDGET / LONG, found, hint)
    same = len(set(told)) == 1 and isinstance(seconds, float)
    expect(same, f"the ranks say {told} s", "the same number on every rank")
    slowest = [max(run) for run in zip(*everyone)]
    nearest = min(abs(seconds - median(slowest[skipped:])) for skipped in range(3))
    hint = "of each run the slowest rank's time (a maximum, no sum), then the median of those"
    expect(nearest < 0.15 * LONG, f"{seconds:.4f} s, and most runs take {LONG} s", hint)
    return f"{count} steps on every rank, {seconds * 1e3:.1f} ms each"


def timed_forward(lab, group, sender):
    """(what each rank says, when each began and ended) of step(): one sends, one receives.

    The sender works 0.25 s more and is done; the other comes 0.4 s late, and works 0.3 s.
    """
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
    expect(len(spans) == 1, f"step() ran {len(spans)} times", "once, after the barrier")
    return on_every_rank(seconds, group), on_every_rank(spans[0], group)


def check_rank_0_clock(lab, group, seed):
    """A pipeline's forward, either way: whoever sends is done first, the other comes late."""
    for sender in (1, 0):
        everyone, spans = timed_forward(lab, group, sender)
        seconds = everyone[0]
        expect(all(isinstance(s, float) for s in everyone), f"the ranks say {everyone}", "seconds")
        begins, ends = zip(*spans)
        right = max(ends) - max(begins)
        found = f"the ranks say {[round(s, 3) for s in everyone]} s for {right:.3f} s of work"
        hint = "the clock ran while a rank was still on its way: start together, after a barrier; "
        hint += "the maximum, not a sum"
        expect(max(everyone) < right + LATE / 2, found, hint)
        hint = "a rank stops its clock when it has sent: return the maximum over the ranks"
        expect(len(set(everyone)) == 1 and seconds >= 0.3, found, hint)
    return f"{seconds:.2f} s on every rank"
