"""Lab 4's checks of data parallelism: buckets, when they start, and what the gradients are."""

import copy
import random
import time
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from labs.kit.compare import tried
from labs.kit.harness import Traffic, expect, expect_close
from labs.kit.tools import noted_waits

EXACT = 1e-12  # float64
MOST = 40  # numbers a bucket


class Net(nn.Module):
    """Three layers, registered in another order than they are used.

    The middle one is skipped where a rank's sequences do not need it.
    """

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.last, self.first, self.middle = nn.Linear(5, 6), nn.Linear(4, 5), nn.Linear(5, 5)

    def forward(self, x, middle=True):  # (tokens, 4) -> (tokens, 6)
        hidden = self.first(x).tanh()
        return self.last(self.middle(hidden).tanh() if middle else hidden)


def check_make_buckets(lab, group, seed):
    """Buckets that are exactly full; a first parameter that is larger than a bucket."""
    numbers = torch.Generator().manual_seed(seed)
    sizes = [*torch.randint(1, 60, (12,), generator=numbers).tolist(), 100, 1, 2, 57, 60]
    parameters = [nn.Parameter(torch.zeros(1, size)) for size in sizes]
    places = {id(p): place for place, p in enumerate(parameters)}
    for most, given in ((60, list(parameters)), (10, iter(parameters)), (10_000, parameters[:])):
        mine = lab.make_buckets(given, most)
        kept = not isinstance(given, list) or given == parameters
        expect(kept, "the list of parameters is changed", "it is the caller's: take a copy")
        hint = "a new bucket only for a parameter: the first one may be larger than `most`"
        expect(all(mine), f"an empty bucket, of at most {most}", hint)
        flat = [places.get(id(p)) for bucket in mine for p in bucket]
        right = list(range(len(sizes)))[::-1]
        found = f"buckets of at most {most} have parameters {flat}, not {right}"
        hint = "the last first, as the backward comes; none is lost, none moves to an earlier one"
        expect(flat == right, found, hint)
        totals = [sum(p.numel() for p in bucket) for bucket in mine]
        for bucket, total in zip(mine, totals):
            fits, hint = total <= most or len(bucket) == 1, "a new one before it is too full"
            expect(fits, f"a bucket has {total} numbers (p.numel()) of {most}", hint)
        for following, total in zip(mine[1:], totals):
            number = following[0].numel()
            hint = "fill a bucket: it may have exactly `most` numbers, which are no bytes"
            expect(total + number > most, f"{number} numbers fit beside {total} of {most}", hint)
    return f"{len(sizes)} parameters, last first, in 3 sizes of bucket"


def batches_of(seed, rank, dtype=torch.float64):
    """A rank's microbatches, x (tokens, 4): ranks have different numbers of tokens."""
    numbers = torch.Generator().manual_seed(seed + rank)
    return [torch.randn(3 + rank, 4, generator=numbers, dtype=dtype) for _ in range(2)]


def loss_of(model, x, middle):
    """The sum of the losses of the tokens."""
    return model(x, middle).logsumexp(-1).sum()


def reference(model, group, seed, skips):
    """{name: gradient of the mean over all tokens}, by torch's DistributedDataParallel."""
    rank, P = group.rank(), group.size()
    batches = batches_of(seed, rank, model.first.weight.dtype)
    total = sum(len(x) for r in range(P) for x in batches_of(seed, r))
    unused = {"find_unused_parameters": True, "bucket_cap_mb": 1e-4}
    parallel = DistributedDataParallel(copy.deepcopy(model), process_group=group, **unused)
    for i, x in enumerate(batches):
        with parallel.no_sync() if i == 0 else nullcontext():
            (loss_of(parallel, x, rank not in skips) * P / total).backward()  # DDP takes the mean
    named = parallel.module.named_parameters()
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in named}


def arrive(parallel, order):
    """Gradients arrive in that order: Wrong unless what may go has gone, and nothing is awaited."""
    there, early = set(), 0
    for place, p in enumerate(order):
        there.add(p)
        with noted_waits() as waits:
            parallel.on_gradient(p)
        ready = 0
        while ready < len(parallel.buckets) and there.issuperset(parallel.buckets[ready]):
            ready += 1
        found = f"after {place + 1} gradients {parallel.started} buckets have started, not {ready}"
        hint = "start() takes the next bucket: all its last gradients have come, in whatever order"
        if parallel.started < ready:
            hint = "start() each that is complete: one gradient may set several free (while)"
        expect(parallel.started == ready, found, hint)
        hint = "wait() is for finish(): here it would hold up the backward"
        expect(not waits, f"{len(waits)} buckets are waited for where they start", hint)
        early += parallel.started if place == len(order) // 2 - 1 else 0
    return early


def check_on_gradient(lab, group, seed):
    """Steps in a row, gradients of each in an order of its own, another one on each rank."""
    model, draw, early = Net(seed).double(), random.Random(seed + group.rank()), []
    parallel = lab.DataParallel(model.parameters(), group, MOST)
    backward = [p for bucket in parallel.buckets for p in bucket]
    orders = [backward, backward[::-1], *(draw.sample(backward, len(backward)) for _ in range(3))]
    for order in orders:
        with parallel.no_sync():
            for p in order:
                p.grad = torch.ones_like(p)
                parallel.on_gradient(p)
        found = f"{parallel.started} buckets start inside no_sync()"
        expect(parallel.started == 0, found, "self.sync is False there")
        early.append(arrive(parallel, order))
        parallel.finish(1)
    seen = f"{len(parallel.buckets)} buckets in {len(orders)} orders of arrival"
    return f"{seen}; {early[0]} under way with half of the backward to come"


def usual_gradients(own, group, tokens, total):
    """{hint: gradient of that mistake} of a parameter; own: the sum over this rank's tokens."""
    P, summed = group.size(), own.clone()
    dist.all_reduce(summed, group=group)
    return {
        "a mean over this rank's tokens: sum the counts too": summed / tokens,
        "a mean of means: a rank with fewer tokens has to count less": summed / tokens / P,
        "a sum over the tokens: divide by their number": summed,
        "a mean over ranks: they have different numbers of tokens": summed / P,
        "this rank's part alone": own / total,
    }


def run_step(parallel, model, own, batches, middle, late):
    """A step of both models, the parallel one's finished; Wrong unless it waits and cleans up."""
    for i, x in enumerate(batches):
        loss_of(own, x, middle).backward()
        with parallel.no_sync() if i == 0 else nullcontext():
            loss_of(model, x, middle).backward()
    time.sleep(0.1 * late)
    with noted_waits() as waits:
        hint = "no gradient here: the other ranks' sum is its gradient; parts in the bucket's order"
        tried("finish()", hint, parallel.finish, sum(map(len, batches)))
    found = f"finish() waits {len(waits)} times for {len(parallel.buckets)} buckets"
    expect(len(waits) >= len(parallel.buckets), found, "each goes, also an unused one: wait()")
    left = parallel.started, len(parallel.works), len(parallel.arrived)
    hint = "reset(), or the next step finds all of them sent"
    expect(left == (0, 0, 0), f"behind finish() (started, works, arrived) are {left}", hint)


def check_finish(lab, group, seed):
    """Steps in a row against torch's, ranks that skip a layer, one that is late; in float32 too."""
    worst, rank, P = 0, group.rank(), group.size()
    for dtype, steps in ((torch.float64, [set(), {0, 1, 2}, {0}, {1, 2}]), (torch.float32, [{1}])):
        model = Net(seed).to(dtype)
        parallel = lab.DataParallel(model.parameters(), group, MOST)
        for step, skips in enumerate(steps):
            case, given = f"step {step + 1}, ranks {sorted(skips)} skip a layer", seed + 10 * step
            right = reference(Net(seed).to(dtype), group, given, skips)
            batches, own = batches_of(given, rank, dtype), Net(seed).to(dtype)
            total = sum(len(x) for r in range(P) for x in batches_of(given, r))
            model.zero_grad()
            with Traffic() as traffic:
                late = rank == (seed + step) % P
                run_step(parallel, model, own, batches, rank not in skips, late)
            for (name, p), alone in zip(model.named_parameters(), own.parameters()):
                what, mine = f"{case}: the gradient of {name}", alone.grad
                hint = "the other ranks' sum is its gradient"
                expect(p.grad is not None, f"{what} is None", hint)
                mine = torch.zeros_like(p) if mine is None else mine
                hints = usual_gradients(mine, group, sum(map(len, batches)), total)
                limit = EXACT if dtype == torch.float64 else 1e-5
                hint = "the sum of all ranks by the tokens of all, in place of .grad, not added"
                worst = max(worst, expect_close(what, p.grad, right[name], limit, hints, hint))
            most, sent = sum(p.nbytes for p in model.parameters()) + 8, traffic.bytes("all_reduce")
            expect(sent <= most, f"{case}: {sent} bytes all-reduced; {most} will do", "each once")
            dist.barrier(group)
    for p in model.parameters():
        p.grad = torch.full_like(p, rank > 0)
    parallel.finish(2 * (rank > 0))
    same = all(p.grad is not None and (p.grad == 0.5).all() for p in model.parameters())
    expect(same, "rank 0 without tokens: not the mean of the others'", "the mean is every rank's")
    seen = "uneven tokens, a layer not used, steps in a row"
    return f"as DistributedDataParallel, off by {worst:.0e} in float32: {seen}"
