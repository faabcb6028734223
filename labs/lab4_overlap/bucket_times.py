"""What the finished lab 4 shows of data parallelism: what the backward hides of the messages."""

import statistics
import time
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile

from labs.kit.harness import on_ranks, table
from labs.kit.link import Link

LAYERS, WIDTH, TOKENS = 6, 384, 512  # of the model: as many equal layers, tokens a rank
NUMBERS = WIDTH * WIDTH  # of a layer
SIZES = {"one for all": LAYERS * NUMBERS, "2 layers each": 2 * NUMBERS, "a layer each": NUMBERS}


def timed_step(group, model, parallel, x, **link):
    """(seconds of the backward and finish(), of the backward alone, the link) of a step."""
    dist.barrier(group)
    loss = model(x).square().sum()
    with Link({}, **link) as link:
        begin = time.perf_counter()
        loss.backward()
        backward = time.perf_counter() - begin
        parallel.finish(len(x))
        whole = time.perf_counter() - begin
    return whole, backward, begin, link


def buckets_on_rank(group, lab, seed, trace):
    """A row for each size of bucket, on a link that takes as long as the backward.

    hidden: the share of the messages' time during which the backward computes.
    """
    rows, pace = [], 0.0
    for name, most in SIZES.items():
        torch.manual_seed(seed)
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
        parallel = lab.DataParallel(model.parameters(), group, most)
        x = torch.randn(TOKENS, WIDTH)
        if not pace:  # of the first: the median of five backwards, the same on every rank
            runs = [timed_step(group, model, parallel, x)[1] for _ in range(5)]
            median = torch.tensor(statistics.median(runs))
            dist.all_reduce(median, dist.ReduceOp.MAX, group=group)
            pace = median.item() / (4 * LAYERS * NUMBERS)
        runs = []
        for _ in range(3):
            whole, backward, begin, link = timed_step(
                group, model, parallel, x, seconds_per_byte=pace
            )
            spans = [(start - begin, end - begin) for _, start, end in link.messages]
            under = sum(max(0.0, min(end, backward) - start) for start, end in spans)
            runs.append((whole, under / sum(end - start for start, end in spans)))
        seconds, hidden = map(statistics.median, zip(*runs))
        row = {"buckets": name, "messages": len(link.messages), "bytes": link.wire}
        rows.append(row | {"seconds": seconds, "hidden": hidden})
    if trace:
        trace_step(group, model, parallel, x, trace)
    return rows


def trace_step(group, model, parallel, x, path):
    """A step over gloo itself; rank 0 writes it for Perfetto (ui.perfetto.dev)."""
    dist.barrier(group)
    on_rank_0 = group.rank() == 0
    with profile(activities=[ProfilerActivity.CPU]) if on_rank_0 else nullcontext() as profiler:
        model(x).square().sum().backward()
        parallel.finish(len(x))
    if on_rank_0:
        profiler.export_chrome_trace(path)


def buckets(lab, args):
    """The step with three sizes of bucket; returns (rows of rank 0, what is off)."""
    rows = on_ranks(2, buckets_on_rank, lab, args.seed, args.profile)[0]
    print(f"\ndata parallelism on 2 ranks, {LAYERS} layers of {NUMBERS} weights: backward and sums")
    lines = [["buckets", "messages", "wire bytes", "ms", "sent while the backward computes"]]
    for row in rows:
        ms, hidden = f"{1000 * row['seconds']:.0f}", f"{row['hidden']:.0%}"
        lines.append([row["buckets"], row["messages"], row["bytes"], ms, hidden])
    table(*lines)
    print("\n  messages: a bucket each, and the number of tokens")
    wanted = [-(-LAYERS * NUMBERS // most) + 1 for most in SIZES.values()]
    found = [row["messages"] for row in rows]
    return rows, [] if found == wanted else [f"{found} messages, not {wanted}"]
