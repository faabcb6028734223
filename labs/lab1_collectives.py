"""Lab 1. Collectives from send and receive alone: how P ranks add, gather and exchange, and what it costs.

Question: every rank holds n bytes of gradient and wants the sum of all of them. Rank 0 could collect, add
and send back, but then 2 (P-1) n bytes go through one wire. How does everyone get the sum, with all wires
equally busy?

Idea: cut x into P chunks and pass them around a ring; at any time every rank sends one chunk to the
next rank and receives one from the previous. P = 3, xr[c] is chunk c of rank r:

    reduce-scatter   x (n, ...) -> (n/P, ...)         chunk c leaves rank c + 1 and ends, complete, on rank c
                             step 1                      step 2
      chunk 0:     rank 1 --x1[0]-->  rank 2 --x1[0]+x2[0]-->  rank 0: x1[0]+x2[0]+x0[0]
      chunk 1:     rank 2 --x2[1]-->  rank 0 --x2[1]+x0[1]-->  rank 1: x2[1]+x0[1]+x1[1]
      chunk 2:     rank 0 --x0[2]-->  rank 1 --x0[2]+x1[2]-->  rank 2: x0[2]+x1[2]+x2[2]

    all-gather       (n/P, ...) -> (n, ...)           the same ring, nothing is added: all keep what passes
    all-reduce       x (n, ...) -> (n, ...)           the one, then the other
    all-to-all       (n, ...) -> (n, ...)             chunk c of rank r becomes chunk r of rank c: a transpose

    operation        steps       bytes that each rank sends; n bytes is the whole message
    reduce-scatter   P - 1       (P-1)/P n
    all-gather       P - 1       (P-1)/P n
    all-reduce       2 (P-1)     2 (P-1)/P n          below 2n for any number of ranks
    all-to-all       P - 1       (P-1)/P n            n: the rank's own input

A step costs a + b m seconds for m bytes: latency and bandwidth. The run measures a and b and predicts the
all-reduce from them. Last, collectives that run in the background: what a result read too early looks like.

    python labs/lab1_collectives.py                      # it starts its own ranks
    python labs/lab1_collectives.py --ranks 2 --plot time.png --json lab1.json
    python labs/lab1_collectives.py --inject-bug list
    python labs/grade.py start lab1                      # then fill in my_labs/lab1_collectives.py

Sources: Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations (2009);
Thakur, Rabenseifner and Gropp, Optimization of collective communication operations in MPICH (2005).
The same ideas live in Megatron-LM: megatron/core/tensor_parallel/mappings.py (the conjugate pairs) and
layers.py (LinearWithGradAccumulationAndAsyncCommunication: our linear_backward), on which NeMo runs; in
Nanotron: parallel/tensor_parallel/distributed_differentiable_primitives.py; in DeepSpeed: sequence/layer.py
(_SeqAllToAll).
"""

import argparse
import importlib.util
import json
import math
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from multiprocessing import connection
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.utils._pytree import tree_leaves

# ---------------------------------------------------------------------------------------------------
# The lesson. Ranks are numbered within the group; each of them calls the same function.
# ---------------------------------------------------------------------------------------------------


# Copied from tp.py
def split(n, rank, world):
    """[start, end) of the rank's share of n things: the first n % world ranks hold one more."""
    base, extra = divmod(n, world)
    return rank * base + min(rank, extra), (rank + 1) * base + min(rank + 1, extra)


def chunk_sizes(n, world):
    """Rows of each rank's chunk of n rows."""
    return [end - start for start, end in (split(n, rank, world) for rank in range(world))]


def exchange(x, to, source, shape, group):
    """Send x to rank `to` while receiving a tensor of that shape from rank `source`; returns what came.

    It must not matter in which order the ranks come here, or how large x is. A blocking dist.send returns
    when its message has been taken: if all ranks send first, nobody takes, and all wait for ever. So start
    both (dist.isend and dist.irecv, or dist.batch_isend_irecv), then wait for both.
    x need not be contiguous (what is sent has to be). `to` and `source` are numbers within the group, which
    torch calls group_dst, group_src and, in P2POp, group_peer.
    """
    # exercise: exchange
    received = x.new_empty(shape)
    both = [
        dist.P2POp(dist.isend, x.contiguous(), group=group, group_peer=to),
        dist.P2POp(dist.irecv, received, group=group, group_peer=source),
    ]
    for work in dist.batch_isend_irecv(both):
        work.wait()
    return received
    # end exercise


def ring_reduce_scatter(x, group):
    """The sum of all ranks' x, of which this rank gets chunk `rank`: (n, ...) -> (chunk_sizes[rank], ...).

    P - 1 exchanges with the neighbours: see the picture at the top. Chunk c sets out from rank c + 1, so
    this rank first sends chunk rank - 1; what it receives it adds to its own and sends on in the next step.
    x stays as it is. n may be any number, smaller than P too (chunks may be empty).
    """
    rank, P = group.rank(), group.size()
    chunks = x.split(chunk_sizes(len(x), P))  # views of x
    # exercise: reduce_scatter
    total = chunks[(rank - 1) % P]
    for step in range(P - 1):
        own = chunks[(rank - 2 - step) % P]
        total = own + exchange(total, (rank + 1) % P, (rank - 1) % P, own.shape, group)
    return total
    # end exercise


def ring_all_gather(shard, n, group):
    """All ranks' shards, one after the other: (chunk_sizes[rank], ...) -> (n, ...), the same on every rank.

    P - 1 exchanges with the neighbours: each rank sends on what it received last.
    """
    rank, P = group.rank(), group.size()
    sizes = chunk_sizes(n, P)
    # exercise: all_gather
    chunks = [shard] * P
    for step in range(P - 1):
        sent, received = (rank - step) % P, (rank - step - 1) % P
        shape = sizes[received], *shard.shape[1:]
        chunks[received] = exchange(chunks[sent], (rank + 1) % P, (rank - 1) % P, shape, group)
    return torch.cat(chunks)
    # end exercise


def ring_all_reduce(x, group):
    """The sum of all ranks' x, (n, ...) -> (n, ...), the same bits on every rank; x stays as it is.

    2 (P-1) exchanges, 2 (P-1)/P of x sent: made of what you have.
    """
    # exercise: all_reduce
    return ring_all_gather(ring_reduce_scatter(x, group), len(x), group)
    # end exercise


def all_to_all(x, sends, receives, group):
    """Rows to the ranks that they are for: (sum(sends), ...) -> (sum(receives), ...).

    The first sends[0] rows of x go to rank 0, the next sends[1] to rank 1, ...; receives[r] rows come from
    rank r and stand in the result in the order of the ranks. (dist.all_to_all_single; Ulysses sends heads
    this way, a mixture of experts its tokens.) P - 1 exchanges: in step s with the ranks s places ahead
    and s places behind. What this rank keeps is not sent.
    """
    rank, P = group.rank(), group.size()
    # exercise: all_to_all
    parts = x.split(sends)
    arrived = [parts[rank]] * P
    for step in range(1, P):
        to, source = (rank + step) % P, (rank - step) % P
        arrived[source] = exchange(parts[to], to, source, (receives[source], *x.shape[1:]), group)
    return torch.cat(arrived)
    # end exercise


class AllGather(torch.autograd.Function):
    """ring_all_gather(shard, n, group) with its gradient, (n, ...) -> (chunk_sizes[rank], ...).

    The loss is the sum of all ranks' losses. All ranks read this rank's shard, so all have a gradient for it.
    """

    @staticmethod
    def forward(ctx, shard, n, group):
        ctx.group = group
        return ring_all_gather(shard, n, group)

    @staticmethod
    def backward(ctx, grad):
        """The gradient of each of forward's arguments; None where there is none."""
        # exercise: gradients
        return ring_reduce_scatter(grad, ctx.group), None, None
        # end exercise


class ReduceScatter(torch.autograd.Function):
    """ring_reduce_scatter(x, group) with its gradient, (chunk_sizes[rank], ...) -> (n, ...).

    Every row of x is added to a sum that one rank holds; that rank has the gradient of it.
    """

    @staticmethod
    def forward(ctx, x, group):
        ctx.n, ctx.group = len(x), group
        return ring_reduce_scatter(x, group)

    @staticmethod
    def backward(ctx, grad):
        """The gradient of each of forward's arguments; None where there is none."""
        # exercise: gradients
        return ring_all_gather(grad, ctx.n, ctx.group), None
        # end exercise


class AllToAll(torch.autograd.Function):
    """all_to_all(x, sends, receives, group) with its gradient, (sum(receives), ...) -> (sum(sends), ...).

    A row's gradient is where the row went.
    """

    @staticmethod
    def forward(ctx, x, sends, receives, group):
        ctx.sends, ctx.receives, ctx.group = sends, receives, group
        return all_to_all(x, sends, receives, group)

    @staticmethod
    def backward(ctx, grad):
        """The gradient of each of forward's arguments; None where there is none."""
        # exercise: gradients
        return all_to_all(grad, ctx.receives, ctx.sends, ctx.group), None, None, None
        # end exercise


def linear_backward(x, weight, grad, group):
    """Backward of a column-parallel linear, y = x @ weight.T: returns (dx, dw).

    x (b, i) is the same on every rank, weight (o/P, i) and grad = dy (b, o/P) are the rank's own. dx (b, i)
    is the sum of all ranks' grad @ weight, dw (o/P, i) = grad.T @ x needs no other rank. So the sum of dx
    (dist.all_reduce with async_op=True, which returns work at once) has to be under way while dw is
    computed, and complete (work.wait()) when they are returned. Megatron-LM hides most of tensor
    parallelism's backward traffic like this.
    """
    # exercise: overlap
    dx = grad @ weight
    work = dist.all_reduce(dx, group=group, async_op=True)
    dw = grad.T @ x
    work.wait()
    return dx, dw
    # end exercise


# ---------------------------------------------------------------------------------------------------
# Checks: every rank runs them. Values are held against torch.distributed, gradients against one device.
# ---------------------------------------------------------------------------------------------------


def draw_all(seed, world, *shape):
    """The inputs of all ranks, each drawn by all of them."""
    return list(torch.randn(world, *shape, generator=torch.Generator().manual_seed(seed)))


def counted(function, *args):
    """What function returns, and the Traffic of it."""
    with Traffic() as traffic:
        return function(*args), traffic


def check_traffic(traffic, steps, target):
    """Raise Wrong unless there were at most `steps` sends, of `target` bytes together, and nothing else."""
    others = ", ".join(op for op in traffic.ops if op != "send")
    expect(not others, f"calls torch's {others}", "build it from exchange alone")
    calls, sent = traffic.ops.get("send", [0, 0])
    more = "send one chunk a step, not all of x, and nothing that the receiver has already"
    less = "some data takes another way, or never arrives"
    expect(sent == target, f"sends {sent} bytes, not {target}", more if sent > target else less)
    expect(calls <= steps, f"takes {calls} sends, not {steps}", "one exchange a step")


def check_unchanged(x, before):
    hint = "a chunk is a view: add into a new tensor (a + b), not in place (a += b)"
    expect(torch.equal(x, before), "the input was overwritten", hint)


@contextmanager
def shared_folder(group):
    """A folder that all ranks of this machine see, till all are done with it: for signals between them."""
    with tempfile.TemporaryDirectory() as own:
        names = [own]
        dist.broadcast_object_list(names, group=group, group_src=0)
        yield Path(names[0])
        dist.barrier(group)


def appears(path, seconds):
    """Wait till a file is there, for at most so long."""
    end = time.monotonic() + seconds
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.002)


def within(seconds, hint, function, *args):
    """What function returns; Wrong if it is stuck for so long. Its thread then stays where it is."""
    try:
        return ThreadPoolExecutor(1).submit(function, *args).result(timeout=seconds)
    except TimeoutError:
        raise Wrong(f"stuck for {seconds} s", hint) from None


@contextmanager
def noted_waits():
    """A list to which every work.wait() adds its work."""
    waits, wait_for = [], dist.Work.wait

    def noting_wait(work, *args):
        waits.append(work)
        return wait_for(work, *args)

    with mock.patch.object(dist.Work, "wait", noting_wait):
        yield waits


def check_exchange(lab, group, seed):
    some = dist.new_group([0, 2, 3])  # its rank 1 is rank 2 of all
    blocked = "all wait in send, nobody receives: start both (isend, irecv), then wait for both"
    lost = (
        "pass group=group; `to` counts within the group (group_dst, group_src, in P2POp group_peer)"
    )
    for ranks, hint in ((group, blocked), (some, lost)):
        if ranks is some and group.rank() == 1:
            break
        rank, P = ranks.rank(), ranks.size()
        for ahead, rows in ((1, [3] * P), (-1, [1 << 16] * P), (2, [3] * P), (1, range(P))):
            to, source = (rank + ahead) % P, (rank - ahead) % P
            xs = [
                x[:, :n].T for n, x in zip(rows, draw_all(seed, P, 3, 1 << 16))
            ]  # (n, 3), not contiguous
            x, right, before = xs[rank], xs[source], xs[rank].clone()
            with noted_waits() as waits:
                mine, traffic = within(
                    10, hint, counted, lab.exchange, x, to, source, right.shape, ranks
                )
            late = (
                "call work.wait() on both: gloo forgives a work that is thrown away, NCCL does not"
            )
            expect(len(waits) >= 2, f"waits for {len(waits)} of 2 transfers", late)
            hints = {
                "this is what was sent: receive into a tensor of its own": x,
                "this comes from rank `to`: it goes to `to` and comes from `source`": xs[to],
            }
            expect_close("what was received", mine, right, 0, hints)
            check_unchanged(x, before)
            check_traffic(traffic, 1, x.nbytes)
    return "exact: forward, backward, pairwise, uneven, and in a group of 3; one send each"


def check_reduce_scatter(lab, group, seed):
    rank, P = group.rank(), group.size()
    for n in (8 * P, 8 * P + 3, 2):  # even, uneven, some chunks empty
        sizes, xs = chunk_sizes(n, P), draw_all(seed + n, P, n, 5)
        x, total = xs[rank].clone(), xs[rank].clone()
        dist.all_reduce(total, group=group)
        mine, traffic = counted(lab.ring_reduce_scatter, x, group)
        chunks, sums = [x.split(sizes) for x in xs], total.split(sizes)
        after = (rank + 1) % P
        hints = {
            "this is the sum of chunk rank + 1: chunk rank - 1 sets out first, not chunk rank": sums[
                after
            ],
            "this is the sum of chunk rank - 1: chunk rank - 1 sets out first": sums[rank - 1],
            "this is chunk rank + 1 on its way: P - 1 steps": sums[after] - chunks[after][after],
            "only two ranks' parts: send the sum so far": chunks[rank][rank]
            + chunks[rank - 1][rank],
            "the own chunk is not added in the last step": sums[rank] - chunks[rank][rank],
            "this is the own chunk alone": chunks[rank][rank],
        }
        check_unchanged(x, xs[rank])
        error = expect_close(f"chunk {rank} of {n} rows", mine, sums[rank], hints=hints)
        check_traffic(traffic, P - 1, (n - sizes[rank]) * 5 * 4)
    return f"off by {error:.0e}; {P - 1} steps, {1 - 1 / P:.0%} of x sent"


def check_all_gather(lab, group, seed):
    rank, P = group.rank(), group.size()
    for n in (8 * P, 8 * P + 3, 2):
        sizes = chunk_sizes(n, P)
        shards = [x[:size] for x, size in zip(draw_all(seed + n, P, n, 5), sizes)]
        shard, right = shards[rank].clone(), [None] * P
        dist.all_gather_object(right, shard, group=group)
        mine, traffic = counted(lab.ring_all_gather, shard, n, group)
        arrived = torch.cat([shards[(rank - step) % P] for step in range(P)])
        lefts = [shard if c == rank else shards[rank - 1] for c in range(P)]
        hints = {
            "the chunks stand in the order of arrival: chunk c belongs in place c": arrived,
            "one neighbour's shard everywhere: send on what came last, not the own": torch.cat(
                lefts
            ),
            "this is the own shard again and again": torch.cat([shard] * P),
        }
        expect_close(f"{n} rows from {P} ranks", mine, torch.cat(right), 0, hints)
        check_unchanged(shard, shards[rank])
        check_traffic(traffic, P - 1, (n - sizes[(rank + 1) % P]) * 5 * 4)
    return f"exact; {P - 1} steps, {1 - 1 / P:.0%} of the result sent"


def check_all_reduce(lab, group, seed):
    rank, P = group.rank(), group.size()
    for n in (8 * P, 8 * P + 3, 2):
        sizes, xs = chunk_sizes(n, P), draw_all(seed + n, P, n, 5)
        x, total = xs[rank].clone(), xs[rank].clone()
        dist.all_reduce(total, group=group)
        mine, traffic = counted(lab.ring_all_reduce, x, group)
        hints = {"this is the mean, not the sum": total / P, "this is the rank's own x": x}
        check_unchanged(x, xs[rank])
        error = expect_close(f"the sum of {n} rows", mine, total, hints=hints)
        check_traffic(traffic, 2 * (P - 1), (2 * n - sizes[rank] - sizes[(rank + 1) % P]) * 5 * 4)
        results = [torch.empty_like(mine) for _ in range(P)]
        dist.all_gather(results, mine, group=group)
        hint = "one rank sums a chunk and sends it to all"
        expect(
            all(torch.equal(mine, r) for r in results),
            "the ranks' results differ in their last bits",
            hint,
        )
    return f"off by {error:.0e}, same bits on all ranks; {2 * (P - 1)} steps, {2 - 2 / P:.0%} of x sent"


def uneven_rows(P):
    """[r][c]: how many rows rank r sends to rank c."""
    return [[1 + (r + 2 * c) % 3 for c in range(P)] for r in range(P)]


def check_all_to_all(lab, group, seed):
    rank, P = group.rank(), group.size()
    for table in ([[2] * P] * P, uneven_rows(P)):
        sends, receives = table[rank], [row[rank] for row in table]
        x = draw_all(seed, P, sum(sends), 5)[rank]
        before, right = x.clone(), torch.empty(sum(receives), 5)
        dist.all_to_all_single(right, x, receives, sends, group=group)
        mine, traffic = counted(lab.all_to_all, x, sends, receives, group)
        parts = right.split(receives)
        arrived = [parts[(rank - step) % P] for step in range(P)]
        mirrored = [parts[(2 * rank - c) % P] for c in range(P)]
        hints = {
            "the parts stand in the order of arrival: what rank r sent belongs in place r": torch.cat(
                arrived
            ),
            "what comes from s ranks behind stands s ranks ahead, where one was sent": torch.cat(
                mirrored
            ),
            "nothing was exchanged": x,
        }
        expect_close(f"{sum(receives)} rows from {P} ranks", mine, right, 0, hints)
        check_unchanged(x, before)
        check_traffic(traffic, P - 1, (sum(sends) - sends[rank]) * 5 * 4)
    return f"exact, even and uneven; {P - 1} steps, the own rows stay"


def check_gradients(lab, group, seed):
    """On one device all ranks' outputs stand in one graph; rank r's loss is (its output * w[r]).sum()."""
    rank, P = group.rank(), group.size()
    errors = []

    def compare(name, args, inputs, outputs, rows, hints):
        own = inputs[rank].detach().clone().requires_grad_()
        out = getattr(lab, name).apply(own, *args)
        backward = partial(torch.autograd.grad, allow_unused=True)
        (mine,), traffic = counted(backward, out, own, w[rank][: len(out)])
        loss = sum((y * weights[: len(y)]).sum() for y, weights in zip(outputs, w))
        (right,) = torch.autograd.grad(loss, inputs[rank])
        errors.append(expect_close(f"{name}'s gradient", mine, right, hints=hints))
        check_traffic(traffic, P - 1, rows * 5 * 4)

    for n in (4 * P, 4 * P + 2):
        sizes, table = chunk_sizes(n, P), uneven_rows(P)
        w = draw_all(seed + 1, P, n, 5)
        w[0] = w[0][:1, :1].expand(n, 5)  # not contiguous, as the gradient of .sum()

        xs = [x.requires_grad_() for x in draw_all(seed, P, n, 5)]
        shards = [x.detach()[:size].requires_grad_() for x, size in zip(xs, sizes)]
        slices = [weights.split(sizes)[rank] for weights in w]
        hints = {
            "this is the rank's own gradient of its shard: the other ranks read it too": slices[
                rank
            ],
            "this is the mean of the ranks' gradients, not their sum": sum(slices) / P,
        }
        compare("AllGather", (n, group), shards, [torch.cat(shards)] * P, n - sizes[rank], hints)

        right, alone = (
            torch.cat([weights[:size] for weights, size in zip(w, sizes)]),
            torch.zeros(n, 5),
        )
        alone.split(sizes)[rank].copy_(w[rank][: sizes[rank]])
        hints = {
            "only the own chunk has a gradient here: the others' are on the other ranks": alone,
            "divided by P: each term of a sum has the gradient of the sum": right / P,
        }
        compare(
            "ReduceScatter", (group,), xs, sum(xs).split(sizes), n - sizes[(rank + 1) % P], hints
        )

        sends, receives = table[rank], [row[rank] for row in table]
        mixed = [x.detach()[: sum(row)].requires_grad_() for x, row in zip(xs, table)]
        outs = [torch.cat(parts) for parts in zip(*(x.split(row) for x, row in zip(mixed, table)))]
        again = torch.cat([weights[: sum(row)].split(row)[rank] for weights, row in zip(w, table)])
        hints = {"sent forward again: on the way back `receives` is what is sent": again}
        compare(
            "AllToAll", (sends, receives, group), mixed, outs, sum(receives) - receives[rank], hints
        )
    return f"off by {max(errors):.0e} from one device; as many bytes as forward"


class Watch(torch.utils._python_dispatch.TorchDispatchMode):
    """Calls note("all_reduce") and note("dw") where they happen; dw: a matrix product of that size."""

    def __init__(self, size, note):
        super().__init__()
        self.size, self.note = size, note

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func._opname.startswith(("allreduce", "all_reduce")):
            self.note("all_reduce")
        elif func._opname in ("mm", "addmm", "bmm", "baddbmm") and out.numel() == self.size:
            self.note("dw")
        return out


def check_overlap(lab, group, seed):
    """The last rank comes late: when the others have computed dw, or have had 1.5 s each to do so."""
    rank, late = group.rank(), group.size() - 1
    x, weights, grads = (
        draw_all(seed + i, group.size(), *s) for i, s in enumerate([(6, 5), (4, 5), (6, 4)])
    )
    x, args = x[0], (x[0].clone(), weights[rank].clone(), grads[rank].clone())
    with shared_folder(group) as folder:
        joined, order = folder / "joined", []

        def note(what):
            order.append((what, joined.exists()))
            (folder / f"{what}{rank}").touch()

        dist.barrier(group)
        if rank == late:
            for r in range(late):
                appears(folder / f"dw{r}", 1.5)
            appears(folder / "returned0", 0.3)  # an answer that waits cannot return yet
            joined.touch()
        with Watch(weights[rank].numel(), note):
            (dx, dw), traffic = counted(lab.linear_backward, *args, group)
        waited = joined.exists()
        (folder / f"returned{rank}").touch()
    names = [what for what, _ in order]
    hint = "a rank's columns give a part of dx: dist.all_reduce(dx, group=group, async_op=True)"
    expect("all_reduce" in names, "dx is not summed over the ranks", hint)
    expect(
        waited,
        f"dx came back before rank {late} had sent its part",
        "work.wait() before you return dx",
    )
    total = sum(g @ w for g, w in zip(grads, weights))  # one device's: all columns together
    expect_close(
        "dx", dx, total, hints={"this is the rank's own part": grads[rank] @ weights[rank]}
    )
    summed = {"dw is the rank's own: do not sum it": sum(g.T @ x for g in grads)}
    error = expect_close("dw", dw, grads[rank].T @ x, hints=summed)
    for arg, before in zip(args, (x, weights[rank], grads[rank])):
        check_unchanged(arg, before)
    expect(
        traffic.ops == {"all_reduce": [1, x.nbytes]},
        f"calls {traffic.ops}",
        "one all-reduce, of dx",
    )
    expect("dw" in names, "no matrix product gives dw", "dw = grad.T @ x")
    hint = "start the all-reduce of dx first (async_op=True), compute dw, then wait"
    expect(
        names.index("all_reduce") < names.index("dw"),
        "dw is computed before the all-reduce starts",
        hint,
    )
    hint = "wait for the all-reduce (work.wait()) after dw, not before; without async_op=True it waits at once"
    expect(
        rank == late or ("dw", False) in order,
        "dw is computed after the all-reduce, not meanwhile",
        hint,
    )
    return f"off by {error:.0e}; dw computed while rank {late} was not there yet"


CHECKS = {
    "exchange": (check_exchange, 4),
    "reduce_scatter": (check_reduce_scatter, 4),
    "all_gather": (check_all_gather, 4),
    "all_reduce": (check_all_reduce, 3),
    "all_to_all": (check_all_to_all, 4),
    "gradients": (check_gradients, 3),
    "overlap": (check_overlap, 3),
}


# ---------------------------------------------------------------------------------------------------
# Experiments
# ---------------------------------------------------------------------------------------------------


def gather_and_add(x, group):
    """An all-reduce without a plan: everyone sends all of x to everyone. P - 1 steps, (P-1) n bytes."""
    rank, P = group.rank(), group.size()
    total = x
    for step in range(1, P):
        total = total + exchange(x, (rank + step) % P, (rank - step) % P, x.shape, group)
    return total


COSTS = {  # steps, and bytes that each of P ranks sends of a message of n
    "reduce-scatter": lambda P, n: (P - 1, n * (P - 1) // P),
    "all-gather": lambda P, n: (P - 1, n * (P - 1) // P),
    "all-reduce": lambda P, n: (2 * (P - 1), 2 * n * (P - 1) // P),
    "all-to-all": lambda P, n: (P - 1, n * (P - 1) // P),
    "gather and add": lambda P, n: (P - 1, n * (P - 1)),
}


def count(group):
    """Steps and bytes of every operation on 2 to P ranks, counted by rank 0, beside COSTS."""
    rows, worlds = [], range(2, group.size() + 1)
    n = 64 * math.lcm(*worlds)  # floats: every number of ranks divides them
    for world in worlds:
        ranks = dist.new_group(list(range(world)))
        if group.rank() >= world:
            continue
        x, even = torch.ones(n), [n // world] * world
        runs = [
            ("reduce-scatter", ring_reduce_scatter, x),
            ("all-gather", ring_all_gather, x[: n // world], n),
            ("all-reduce", ring_all_reduce, x),
            ("all-to-all", all_to_all, x, even, even),
            ("gather and add", gather_and_add, x),
        ]
        for name, *call in runs:
            _, traffic = counted(*call, ranks)
            steps, sent = traffic.ops["send"]
            row = {
                "operation": name,
                "ranks": world,
                "message": x.nbytes,
                "steps": steps,
                "bytes": sent,
            }
            row["expected_steps"], row["expected_bytes"] = COSTS[name](world, x.nbytes)
            rows.append(row)
    return rows


def blocking_ring(group):
    """What this rank is at after 2 s of one blocking send and receive round the ring: [even first, all send].

    First with the even ranks sending and the odd ones receiving first, then with all sending first.
    """
    rank, P = group.rank(), group.size()
    x, received, at = torch.ones(4), torch.empty(4), []
    send = "send", partial(dist.send, x, group=group, group_dst=(rank + 1) % P)
    receive = "receive", partial(dist.recv, received, group=group, group_src=(rank - 1) % P)

    def go(steps, place):
        for name, step in steps:
            at[place] = name
            step()
        at[place] = "done"

    for place, steps in enumerate(
        ([receive, send] if rank % 2 else [send, receive], [send, receive])
    ):
        at.append("start")
        wait([ThreadPoolExecutor(1).submit(go, steps, place)], timeout=(20, 2)[place])
    return at


LATE = 0.5  # seconds that rank 1 is late; less where rank 0 did not wait for it, and has read


def unwaited(x, group):
    dist.all_reduce(x, group=group, async_op=True)
    return x.clone()


def waited(x, group):
    dist.all_reduce(x, group=group, async_op=True).wait()
    return x


READS = {  # of y, an AsyncCollectiveTensor: what functional collectives (and DTensor) return
    "y.elem": lambda y: y.elem.clone(),
    "y + 0": lambda y: y + 0,
    "y.item()": lambda y: y.item(),
    "y.numpy()": lambda y: y.numpy()[0],
    "y.wait()": lambda y: y.wait(),
}


def read_early(group):
    """Rank 0 (x = 1) reads the sum of x while rank 1 (x = 10) is late: [what, value, seconds it took]."""

    def of(read):
        return lambda x, group: read(functional.all_reduce(x, "sum", group))

    reads = {"x, not waited for": unwaited, "x after work.wait()": waited}
    reads |= {name: of(read) for name, read in READS.items()}
    rows = []
    with shared_folder(group) as folder:
        for i, (name, read) in enumerate(reads.items()):
            x = torch.tensor([10.0 if group.rank() else 1.0])
            dist.barrier(group)
            if group.rank() == 0:
                begin = time.perf_counter()
                value = float(read(x, group))
                rows.append([name, value, time.perf_counter() - begin])
                (folder / str(i)).touch()
            else:
                appears(folder / str(i), LATE)
                dist.all_reduce(x, group=group)
        x = torch.ones(1)
        if group.rank() == 0:
            work = dist.isend(x, group=group, group_dst=1)
            x.fill_(0)  # too early: it may not have left
            (folder / "overwritten").touch()
            work.wait()
        else:
            appears(folder / "overwritten", LATE)
            dist.recv(x, group=group, group_src=0)
        dist.broadcast(x, group=group, group_src=1)
    return rows, x.item()


def clock(group, sizes, turns=12):
    """{operation: [seconds for each size in bytes]}: the median over the turns of the slowest rank's time.

    Each turn times all of them, so that another program's burst of work hits all alike.
    """
    rank, P = group.rank(), group.size()
    operations = {
        "exchange": lambda x: exchange(x, (rank + 1) % P, (rank - 1) % P, x.shape, group),
        "ring_all_reduce": lambda x: ring_all_reduce(x, group),
        "gather_and_add": lambda x: gather_and_add(x, group),
        "torch": lambda x: dist.all_reduce(x, group=group),
    }
    seconds = torch.zeros(1 + turns, len(operations), len(sizes))
    for turn in range(1 + turns):  # the first one warms up
        for column, size in enumerate(sizes):
            x = torch.zeros(size // 4)
            for row, operation in enumerate(operations.values()):
                dist.barrier(group)
                begin = time.perf_counter()
                operation(x)
                seconds[turn, row, column] = time.perf_counter() - begin
    dist.all_reduce(seconds, dist.ReduceOp.MAX, group=group)
    return dict(zip(operations, seconds[1:].median(0).values.tolist()))


def fit(sizes, seconds):
    """(a, b) of t = a + b n with the least squared relative errors: seconds, seconds a byte."""
    n, t = torch.tensor(sizes, dtype=torch.float64), torch.tensor(seconds, dtype=torch.float64)
    terms = torch.stack([1 / t, n / t], 1)  # (a + b n) / t should be 1
    return (
        torch.linalg.lstsq(terms, torch.ones(len(t), 1, dtype=torch.float64))
        .solution.flatten()
        .tolist()
    )


def experiment(args):
    """What the lesson says, measured: bytes and steps, deadlock, reads that come too early, time."""
    if args.inject_bug:
        return {}  # these run the right code
    P, failed = args.ranks, []
    counts = on_ranks(P, count)[0]
    rows = [[r["operation"], r["ranks"], r["steps"], r["expected_steps"], r["bytes"], r["expected_bytes"],
             f"{r['bytes'] / r['message']:.0%}"] for r in counts]  # fmt: skip
    print_table(
        ["operation", "ranks", "steps", "formula", "bytes sent", "formula", "of the message"], *rows
    )
    if any(r["steps"] != r["expected_steps"] or r["bytes"] != r["expected_bytes"] for r in counts):
        failed.append("counts")

    orders = list(zip(*on_ranks(P, blocking_ring)))  # [even first, all send][rank]
    texts = ["even ranks send first, odd ranks receive first", "all send first, then receive"]
    title = "one blocking send and receive round the ring: each rank after 2 s"
    print_table(
        [title, *(f"rank {rank}" for rank in range(P))], *([t, *o] for t, o in zip(texts, orders))
    )
    if set(orders[0]) != {"done"} or set(orders[1]) != {"send"}:
        failed.append("blocking ring")

    reads, overwritten = on_ranks(2, read_early)[0]
    rows = [
        [name, value, "stale" if value == 1 else "right", f"{took:.2f}"]
        for name, value, took in reads
    ]
    print_table(["rank 0 reads 1 + 10 while rank 1 is late", "value", "", "waited, s"], *rows)
    print(f"  isend(x), then x = 0 before work.wait(): a 1 was sent, a {overwritten:.0f} arrives")
    values = {name: value for name, value, _ in reads}
    stale, safe = ("x, not waited for", "y.elem"), ("x after work.wait()", "y + 0", "y.wait()")
    if any(values[name] != 1 for name in stale) or any(values[name] != 11 for name in safe):
        failed.append("early reads")

    sizes = [4**k for k in range(4, 12)]
    seconds = on_ranks(P, clock, sizes)[0]
    a, b = fit(sizes, seconds["exchange"])
    predicted = {
        "ring_all_reduce": [2 * (P - 1) * (a + b * n / P) for n in sizes],
        "gather_and_add": [(P - 1) * (a + b * n) for n in sizes],
    }
    columns = [seconds["exchange"]]
    for name, times in predicted.items():
        columns += [seconds[name], times]
    columns.append(seconds["torch"])
    rows = [[n, *(f"{1e6 * t:.0f}" for t in times)] for n, *times in zip(sizes, *columns)]
    heads = [
        "exchange",
        "ring all-reduce",
        "predicted",
        "gather and add",
        "predicted",
        "torch's all-reduce",
    ]
    print_table([f"bytes (times in us, {P} ranks)", *heads], *rows)
    print(
        f"\n  an exchange of n bytes takes a + b n: a = {1e6 * a:.0f} us, 1/b = {1e-9 / b:.2f} GB/s"
    )
    print(f"  both parts weigh the same at {a / b / 1e6:.2g} MB; {crossing(P, a, b)}")
    print("  (gloo on one CPU: no prediction for GPUs)")
    return {
        "failed": failed,
        "counts": counts,
        "blocking_ring": dict(zip(texts, orders)),
        "reads": [{"read": name, "value": value, "seconds": took} for name, value, took in reads],
        "overwritten": overwritten,
        "time": {"ranks": P, "bytes": sizes, "seconds": seconds, "predicted": predicted},
        "fit": {"latency_s": a, "seconds_per_byte": b},
    }


def crossing(P, a, b):
    """Which all-reduce the model says to take: (P-1) (a + b n) against 2 (P-1) (a + b n/P)."""
    if P == 2:
        return "on 2 ranks gather and add sends no more than the ring, in half the steps"
    return f"the ring should beat gather and add above {a / b / (1 - 2 / P) / 1e6:.2g} MB"


def draw(results, path):
    """Time against message size: points measured, lines from the fit of one exchange."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    timed, (a, b) = results["time"], results["fit"].values()
    P, sizes = timed["ranks"], timed["bytes"]
    grid = [sizes[0] * (sizes[-1] / sizes[0]) ** (i / 100) for i in range(101)]
    looks = {
        "gather_and_add": (
            "all-reduce, gather and add",
            "^",
            "#D55E00",
            lambda n: (P - 1) * (a + b * n),
        ),
        "ring_all_reduce": (
            "all-reduce, ring",
            "s",
            "#0072B2",
            lambda n: 2 * (P - 1) * (a + b * n / P),
        ),
        "exchange": ("one exchange", "o", "#666666", lambda n: a + b * n),
    }
    figure, axis = pyplot.subplots(figsize=(8, 5))
    for name, (label, marker, color, model) in looks.items():
        axis.plot(
            sizes, [1e3 * t for t in timed["seconds"][name]], marker, color=color, label=label
        )
        axis.plot(grid, [1e3 * model(n) for n in grid], color=color, lw=1)
    axis.set(xscale="log", yscale="log", xlabel="message, bytes", ylabel="time, ms")
    axis.set_ylim(top=5 * axis.get_ylim()[1])  # room for the legend
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_formatter("")
    axis.set_title(f"Few steps or few bytes: {crossing(P, a, b)}", loc="left")
    fitted = f"lines: a + b n a step, fitted to one exchange\na = {1e6 * a:.0f} us, 1/b = {1e-9 / b:.2f} GB/s"
    axis.plot([], [], "k-", lw=1, label=f"{fitted} ({P} ranks, gloo)")
    axis.legend(frameon=False)
    axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


# ---------------------------------------------------------------------------------------------------
# Sabotage: what people really get wrong, for --inject-bug. The checks have to catch every one.
# ---------------------------------------------------------------------------------------------------


def other_direction(lab):
    """exchange sends to `source` and receives from `to`."""
    right = lab.exchange
    lab.exchange = lambda x, to, source, shape, group: right(x, source, to, shape, group)


def own_chunks_only(lab):
    """The reduce-scatter sends the own chunk in every step, not the sum so far."""

    def ring_reduce_scatter(x, group):
        rank, P = group.rank(), group.size()
        chunks = x.split(chunk_sizes(len(x), P))
        for step in range(P - 1):
            sent, own = chunks[(rank - 1 - step) % P], chunks[(rank - 2 - step) % P]
            total = own + exchange(sent, (rank + 1) % P, (rank - 1) % P, own.shape, group)
        return total

    lab.ring_reduce_scatter = ring_reduce_scatter


def added_in_place(lab):
    """The reduce-scatter adds into its chunks, which are views of x."""

    def ring_reduce_scatter(x, group):
        rank, P = group.rank(), group.size()
        chunks = x.split(chunk_sizes(len(x), P))
        for step in range(P - 1):
            sent, own = chunks[(rank - 1 - step) % P], chunks[(rank - 2 - step) % P]
            own += exchange(sent, (rank + 1) % P, (rank - 1) % P, own.shape, group)
        return chunks[rank]

    lab.ring_reduce_scatter = ring_reduce_scatter


def order_of_arrival(lab):
    """The all-gather puts the chunks one after the other as they come: the own first."""

    def ring_all_gather(shard, n, group):
        rank, P = group.rank(), group.size()
        chunks = right(shard, n, group).split(chunk_sizes(n, P))
        return torch.cat([chunks[(rank - step) % P] for step in range(P)])

    right, lab.ring_all_gather = lab.ring_all_gather, ring_all_gather


def all_to_everyone(lab):
    """The all-reduce sends all of x to every rank: the right sum, for P/2 times the bytes."""
    lab.ring_all_reduce = gather_and_add


def no_way_back(lab):
    """The gradient of an all-to-all is sent as forward, instead of back."""
    lab.AllToAll.backward = staticmethod(
        lambda ctx, grad: (
            lab.all_to_all(grad, ctx.sends, ctx.receives, ctx.group),
            None,
            None,
            None,
        )
    )


def slice_for_gradient(lab):
    """The gradient of an all-gather is the rank's own gradient of its slice; nobody sums."""
    lab.AllGather.backward = staticmethod(
        lambda ctx, grad: (
            grad.split(chunk_sizes(len(grad), ctx.group.size()))[ctx.group.rank()],
            None,
            None,
        )
    )


def never_waited_for(lab):
    """linear_backward returns dx while the all-reduce is still under way."""

    def linear_backward(x, weight, grad, group):
        dx = grad @ weight
        dist.all_reduce(dx, group=group, async_op=True)
        return dx, grad.T @ x

    lab.linear_backward = linear_backward


def waited_for_at_once(lab):
    """linear_backward sums dx first and computes dw then: right, and nothing overlaps."""

    def linear_backward(x, weight, grad, group):
        dx = grad @ weight
        dist.all_reduce(dx, group=group)
        return dx, grad.T @ x

    lab.linear_backward = linear_backward


BUGS = [
    other_direction,
    own_chunks_only,
    added_in_place,
    order_of_arrival,
    all_to_everyone,
    no_way_back,
    slice_for_gradient,
    never_waited_for,
    waited_for_at_once,
]


# ---------------------------------------------------------------------------------------------------
# Harness: the same in every lab
# ---------------------------------------------------------------------------------------------------


# Copied from labs/lab1_collectives.py
class Unusable(Exception):
    """An argument that cannot work; its message says what would. Ends as `error: ...`, exit 2."""


# Copied from labs/lab1_collectives.py
class Wrong(Exception):
    """What a check found wrong with an exercise, and a hint at what usually causes it."""

    def __init__(self, found, hint=""):
        super().__init__(found, hint)
        self.found, self.hint = found, hint


# Copied from labs/lab1_collectives.py
def expect(holds, found, hint=""):
    """Raise Wrong where something does not hold."""
    if not holds:
        raise Wrong(found, hint)


# Copied from labs/lab1_collectives.py
def expect_close(name, mine, right, tolerance=1e-5, hints=None):
    """Raise Wrong unless ||mine - right|| <= tolerance ||right||; returns the relative error.

    hints {text: tensor}: if mine is that tensor instead, the text is the hint.
    """
    expect(
        isinstance(mine, torch.Tensor),
        f"{name} is {type(mine).__name__}, not a tensor",
        "return the result",
    )
    expect(
        mine.shape == right.shape, f"{name} has shape {tuple(mine.shape)}, not {tuple(right.shape)}"
    )

    def error(other):
        apart = torch.linalg.vector_norm((mine - other).double())
        return (apart / torch.linalg.vector_norm(other.double()).clamp(min=1e-30)).item()

    known = [text for text, other in (hints or {}).items() if other.shape == right.shape]
    known = [text for text in known if error(hints[text]) <= tolerance < error(right)]
    hint = known[0] if known else ""
    expect(
        error(right) <= tolerance,
        f"{name} is off by {error(right):.1e} (at most {tolerance:.0e})",
        hint,
    )
    return error(right)


# Copied from labs/lab1_collectives.py
class Traffic(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts what this rank's collectives and sends move while inside it: {op: [calls, bytes]}.

    Bytes of the whole message (all_gather: what comes out; reduce_scatter: what goes in; all_to_all: the
    rank's own input).
    """

    OPS = {"allreduce": "all_reduce", "allgather": "all_gather", "reducescatter": "reduce_scatter"}
    OPS |= {"alltoall": "all_to_all", "send": "send", "broadcast": "broadcast", "reduce": "reduce"}
    OPS |= {
        "gather": "gather",
        "scatter": "scatter",
    }  # a name starts with one of these, the first that fits

    def __init__(self):
        super().__init__()
        self.ops = {}

    def bytes(self, op):
        return self.ops.get(op, [0, 0])[1]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func._opname.replace("_", "")
        op = next((op for start, op in self.OPS.items() if name.startswith(start)), None)
        if op and func.namespace in ("c10d", "_c10d_functional"):
            tensors = [
                [t for t in tree_leaves(x) if isinstance(t, torch.Tensor)] for x in (*args, out)
            ]
            sizes = [sum(t.nbytes for t in ts) for ts in tensors]
            if op == "all_to_all":  # c10d names the output before the input
                sizes = [sizes[1 if func.namespace == "c10d" else 0]]
            entry = self.ops.setdefault(op, [0, 0])
            entry[0] += 1
            entry[1] += max(sizes)
        return out


# Copied from labs/lab1_collectives.py
def load(path):
    """The file of a lab, or of a learner's answers to it, as a module."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# Copied from labs/lab1_collectives.py
def rank_main(rank, world, rendezvous, pipe, limit, function, args):
    """A rank's process: join the others, run function(group, *args), send back what it returns."""
    os.dup2(
        os.open(os.devnull, os.O_WRONLY), 2
    )  # gloo complains there about ranks that others' errors ended
    signal.alarm(limit)  # its parent ends it long before; this is for a parent that was killed
    torch.set_num_threads(1)
    # torch 2.13 renames all_gather_into_tensor and reduce_scatter_tensor; 2.11 knows only these names
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    store = dist.FileStore(rendezvous, world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    try:
        answer = True, function(dist.group.WORLD, *args)
    except Wrong as wrong:
        answer = False, wrong
    except NotImplementedError as todo:
        answer = False, Wrong(f"not done yet: {todo}")
    except BaseException as problem:  # whatever a learner's code may raise
        frames = traceback.extract_tb(problem.__traceback__)
        ours = [frame.line for frame in frames if not frame.filename.startswith(torch.__path__[0])]
        first = str(problem).partition("\n")[0]
        answer = False, Wrong(f"{type(problem).__name__}: {first} (in: {ours[-1]})")
    pipe.send(answer)
    with suppress(EOFError):
        pipe.recv()  # stay till the end: a rank that leaves early breaks the others' connections


# Copied from labs/lab1_collectives.py
def on_ranks(world, function, *args, timeout=60):
    """[function(group, *args) of each rank], run by `world` processes of this machine, over gloo.

    Raises Wrong: the first one that a rank raised, or one naming the ranks still busy after `timeout`
    seconds. function is one of a module's own, and args and results can be pickled.
    """
    context = multiprocessing.get_context(
        "forkserver"
    )  # forks ranks from a process that has torch already
    heavy = {"torch.distributed", "transformers.models.llama.modeling_llama"} & sys.modules.keys()
    context.set_forkserver_preload(
        [*heavy, "torch._dynamo"]
    )  # the first dispatch mode imports that: 2 s
    with tempfile.TemporaryDirectory() as folder, ExitStack() as ending:
        pipes = {}
        for rank in range(world):
            here, there = context.Pipe()
            start = (rank, world, f"{folder}/store", there, int(timeout) + 60, function, args)
            process = context.Process(target=rank_main, args=start, daemon=True)
            process.start()
            ending.callback(process.join)
            ending.callback(process.kill)
            there.close()
            pipes[here] = rank
        busy = dict(pipes)  # those that have not answered
        results, end = [None] * world, time.monotonic() + timeout
        while busy:
            ready = connection.wait(busy, max(0, end - time.monotonic()))
            silent = ", ".join(map(str, busy.values()))
            hint = (
                "a send without its recv, a collective that some rank skips, or a loop without end"
            )
            expect(ready, f"no answer from rank {silent} in {timeout} s", hint)
            wrong = []
            for pipe in ready:
                rank = busy.pop(pipe)
                try:
                    fine, results[rank] = pipe.recv()
                except EOFError:
                    fine, results[rank] = False, Wrong("died")
                wrong += [] if fine else [rank]
            if wrong:  # a death first: the others' errors come of it
                rank = min(wrong, key=lambda rank: results[rank].found != "died")
                raise Wrong(f"rank {rank}: {results[rank].found}", results[rank].hint)
        return results


# Copied from labs/lab1_collectives.py
def check_on_rank(group, answers, bug, name, seed):
    """One exercise's check on this rank. answers: the file of the lab, or of a learner's copy of it."""
    lab = load(answers)
    if bug:
        globals()[bug](lab)
    check, _ = CHECKS[name]
    return check(lab, group, seed)


# Copied from labs/lab1_collectives.py
def print_table(*rows):
    """Columns aligned to the left, after an empty line."""
    cells = [
        [f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in row] for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(*cells)]
    print(
        "",
        *("  " + "   ".join(c.ljust(w) for c, w in zip(row, widths)).rstrip() for row in cells),
        sep="\n",
    )


# Copied from labs/lab1_collectives.py
def run_checks(args):
    """Run every exercise's check; returns {name: {"passed", "report"}}, and prints them as a table."""
    results, rows = {}, [["exercise", "ranks", "", "what was seen"]]
    for name, (_, world) in CHECKS.items():
        try:
            report, passed = (
                on_ranks(world, check_on_rank, __file__, args.inject_bug, name, args.seed)[0],
                True,
            )
        except Wrong as wrong:
            report, passed = wrong.found, False
        results[name] = {"passed": passed, "report": report}
        rows.append([name, world, "PASS" if passed else "FAIL", report])
    print_table(*rows)
    return results


# Copied from labs/lab1_collectives.py
def main(argv=None):
    """Returns the exit status: 0 all held, 1 a check failed, 2 unusable arguments."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of the checks' inputs (0)")
    parser.add_argument("--json", metavar="FILE", help="write the results")
    parser.add_argument("--plot", metavar="FILE", help="draw them")
    parser.add_argument(
        "--inject-bug", metavar="NAME", help="run with a bug that must be caught; list: name them"
    )
    add_options(parser)
    try:
        args = parser.parse_args(argv)
        if args.inject_bug == "list":
            print(*(f"  {bug.__name__:28} {bug.__doc__}" for bug in BUGS), sep="\n")
            return 0
        if args.inject_bug not in (None, *(bug.__name__ for bug in BUGS)):
            raise Unusable(f"no bug {args.inject_bug}; --inject-bug list names them")
        for path in (args.json, args.plot):
            if path and (
                Path(path).is_dir() or not os.access(Path(path).absolute().parent, os.W_OK)
            ):
                raise Unusable(f"cannot write {path}: a directory, or in none that can be written")
        results = {"lab": Path(__file__).stem, "exercises": run_checks(args), **experiment(args)}
        failed = [name for name, result in results["exercises"].items() if not result["passed"]]
        failed += [name for name in results.get("failed", []) if name not in failed]
        results["passed"] = not failed
        count = f"all {len(results['exercises'])} exercises' checks hold"
        print(
            f"\n{'FAIL' if failed else 'PASS'} {results['lab']}: {', '.join(failed) or count}",
            flush=True,
        )
        if args.json:
            write_whole(
                args.json, lambda path: Path(path).write_text(json.dumps(results, indent=1) + "\n")
            )
        if args.plot:
            write_whole(args.plot, partial(draw, results))
        return 1 if failed else 0
    except Unusable as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    except Wrong as wrong:  # a rank of an experiment, which has nothing to compare
        print(f"\nFAIL {Path(__file__).stem}: {wrong.found}")
        return 1


# ---------------------------------------------------------------------------------------------------
# Command line
# ---------------------------------------------------------------------------------------------------


# Copied from tp.py
class Parser(argparse.ArgumentParser):
    """argparse, with its complaint raised instead of printed with the usage."""

    def error(self, message):
        raise Unusable(message)


# Copied from labs/grade.py
def write_whole(path, write):
    """Have write(another path) make the file, then name it path: whole or not at all, or Unusable."""
    draft = f"{path}.{os.getpid()}{Path(path).suffix}"
    try:
        write(draft)
        os.replace(draft, path)
    except (
        OSError,
        ValueError,
    ) as problem:  # a full disk; a picture of a kind that matplotlib lacks
        raise Unusable(f"cannot write {path}: {problem}") from None
    finally:
        Path(draft).unlink(missing_ok=True)


def add_options(parser):
    """The lab's own options."""
    add = parser.add_argument
    add("--ranks", type=int, choices=range(2, 9), default=4, help="of the experiments (4); 2 to 8")


if __name__ == "__main__":
    sys.exit(main())
