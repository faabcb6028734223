"""Lab 4's checks of data parallelism: buckets, when they start, and what the gradients are."""

import copy
from contextlib import nullcontext

import torch
import torch.distributed as dist
from harness import Traffic, expect, expect_close
from torch import nn
from torch.nn.parallel import DistributedDataParallel

EXACT = 1e-12  # float64
MOST = 40  # numbers a bucket


class Net(nn.Module):
    """Three layers; the middle one is skipped where a rank's sequences do not need it."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.middle, self.last = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 6)

    def forward(self, x, middle=True):  # (tokens, 4) -> (tokens, 6)
        hidden = self.first(x).tanh()
        return self.last(self.middle(hidden).tanh() if middle else hidden)


def check_make_buckets(lab, group, seed):
    numbers = torch.Generator().manual_seed(seed)
    sizes = [*torch.randint(1, 60, (12,), generator=numbers).tolist(), 100, 3]
    parameters = [nn.Parameter(torch.zeros(size)) for size in sizes]
    for most in (60, 10, 10_000):
        mine = lab.make_buckets(iter(parameters), most)
        flat = [id(p) for bucket in mine for p in bucket]
        found = f"buckets of at most {most}: not all parameters once, from the last to the first"
        hint = "the backward reaches the last layer first: reversed()"
        expect(flat == [id(p) for p in reversed(parameters)], found, hint)
        totals = [sum(p.numel() for p in bucket) for bucket in mine]
        for bucket, total in zip(mine, totals):
            fits, hint = total <= most or len(bucket) == 1, "a new one before it is too full"
            expect(fits, f"a bucket has {total} numbers of {most}", hint)
        for following, total in zip(mine[1:], totals):
            room = total + following[0].numel() <= most
            expect(not room, f"{following[0].numel()} numbers fit beside {total}", "fill a bucket")
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
    return {name: p.grad for name, p in parallel.module.named_parameters()}


def check_on_gradient(lab, group, seed):
    """When the buckets start, seen from hooks: early, in order, and not inside no_sync()."""
    model = Net(seed).double()
    parallel = lab.DataParallel(model.parameters(), group, MOST)
    order = [id(p) for bucket in parallel.buckets for p in bucket]
    seen, gone = [], []
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: seen.append((id(p), parallel.started)))
    first, second = batches_of(seed, group.rank())
    with parallel.no_sync():
        loss_of(model, first, True).backward()
    quiet = parallel.started == 0
    expect(quiet, f"{parallel.started} buckets start inside no_sync()", "self.sync is False there")
    seen.clear()
    loss_of(model, second, True).backward()
    for place, (_, started) in enumerate(seen):
        there = {key for key, _ in seen[: place + 1]}
        ready = 0
        for bucket in parallel.buckets:
            if not {id(p) for p in bucket} <= there:
                break
            ready += 1
        gone.append(started)
        found = f"{started} buckets have started when {ready} are complete"
        hint = "start() each that is complete, if those before it have gone"
        expect(started == ready, f"after {place + 1} of {len(order)} gradients {found}", hint)
    early = gone[len(gone) // 2]
    parallel.finish(1)
    return f"{len(parallel.buckets)} buckets; {early} under way with half of the backward to come"


def check_finish(lab, group, seed):
    """Gradients of two steps against torch's, with ranks that skip a layer; in float32 too."""
    worst = 0
    for dtype, skips in ((torch.float64, set()), (torch.float64, {0}), (torch.float32, {1})):
        model = Net(seed).to(dtype)
        right = reference(model, group, seed, skips)
        batches = batches_of(seed, group.rank(), dtype)
        mine = copy.deepcopy(model)
        parallel = lab.DataParallel(mine.parameters(), group, MOST)
        P, tokens = group.size(), sum(map(len, batches))
        total = sum(len(x) for r in range(P) for x in batches_of(seed, r))
        with Traffic() as traffic:
            for i, x in enumerate(batches):
                with parallel.no_sync() if i == 0 else nullcontext():
                    loss_of(mine, x, group.rank() not in skips).backward()
            parallel.finish(tokens)
        case = f"ranks {sorted(skips)} skip a layer" if skips else "all layers used"
        for name, p in mine.named_parameters():
            what = f"{case}: the gradient of {name}"
            expect(p.grad is not None, f"{what} is None", "the other ranks' sum is its gradient")
            hints = {
                "a mean over this rank's tokens: sum the counts too": right[name] * total / tokens,
                "a sum over the tokens: divide by their number": right[name] * total,
                "a mean over ranks: they have different numbers of tokens": right[name] * total / P,
            }
            limit = EXACT if dtype == torch.float64 else 1e-5
            worst = max(worst, expect_close(what, p.grad, right[name], limit, hints))
        most = sum(p.nbytes for p in mine.parameters()) + 8
        sent = traffic.bytes("all_reduce")
        expect(sent <= most, f"{case}: {sent} bytes all-reduced; {most} will do", "each once")
        dist.barrier(group)
    seen = "uneven tokens, a layer not used"
    return f"as DistributedDataParallel, off by {worst:.0e} in float32: {seen}"
