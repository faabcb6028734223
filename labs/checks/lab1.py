"""Lab 1's checks, each of which runs on every rank, and the bugs that they have to catch.

Values are compared with torch.distributed, gradients with one device, traffic with the formulas.
"""

import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from harness import LABS, TorchDispatchMode, Traffic, Wrong, expect, expect_close, load

chunk_sizes = load(LABS / "lab1_collectives.py").chunk_sizes  # not the learner's


def draw_all(seed, world, *shape):
    """The inputs of all ranks, each drawn by all of them."""
    return list(torch.randn(world, *shape, generator=torch.Generator().manual_seed(seed)))


def counted(function, *args):
    """What function returns, and the Traffic of it."""
    with Traffic() as traffic:
        return function(*args), traffic


def check_traffic(traffic, steps, target):
    """Raise Wrong unless at most `steps` sends, of `target` bytes together, are all there was."""
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
    """A folder that all ranks see, till all are done with it: for signals between them."""
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
    """What function returns; Wrong if it is stuck for so long. Its thread stays there."""
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
        after, own, first = (rank + 1) % P, chunks[rank][rank], "chunk rank - 1 sets out first"
        hints = {
            f"this is the sum of chunk rank + 1: {first}, not chunk rank": sums[after],
            f"this is the sum of chunk rank - 1: {first}": sums[rank - 1],
            "this is chunk rank + 1 on its way: P - 1 steps": sums[after] - chunks[after][after],
            "only two ranks' parts: send the sum so far": own + chunks[rank - 1][rank],
            "the own chunk is not added in the last step": sums[rank] - own,
            "this is the own chunk alone": own,
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
        short = [shard if c == (rank + 1) % P else shards[c] for c in range(P)]
        hints = {
            "the chunks stand in the order of arrival: chunk c belongs in place c": arrived,
            "one neighbour's shard everywhere: send on what came last, not the own": torch.cat(
                lefts
            ),
            "this is the own shard again and again": torch.cat([shard] * P),
            "one chunk has not come: P - 1 steps": torch.cat(short),
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
    sent = f"{2 * (P - 1)} steps, {2 - 2 / P:.0%} of x sent"
    return f"off by {error:.0e}, same bits on all ranks; {sent}"


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
        order = "the parts stand in the order of arrival: what rank r sent belongs in place r"
        places = "what comes from s ranks behind stands s ranks ahead, where one was sent"
        hints = {order: torch.cat(arrived), places: torch.cat(mirrored)}
        hints = hints if rank else {f"{order}; or {places}": torch.cat(arrived)}  # the same there
        hints["nothing was exchanged"] = x
        expect_close(f"{sum(receives)} rows from {P} ranks", mine, right, 0, hints)
        check_unchanged(x, before)
        check_traffic(traffic, P - 1, (sum(sends) - sends[rank]) * 5 * 4)
    return f"exact, even and uneven; {P - 1} steps, the own rows stay"


def check_gradients(lab, group, seed):
    """Rank r's loss is (its output * w[r]).sum(); on one device one graph has all outputs."""
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


class Watch(TorchDispatchMode):
    """Calls note("all_reduce") and note("dw"): a matrix product of that size."""

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
    """The last rank is late: the others have computed dw, or have had 1.5 s each to do so."""
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
    hint = "wait for the all-reduce (work.wait()) after dw, not before; "
    hint += "without async_op=True it waits at once"
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


# --------------------------------------------------------------------------------------------------
# Sabotage: what people really get wrong, for --inject-bug. The checks have to catch every one.
# --------------------------------------------------------------------------------------------------


def gather_and_add(lab, x, group):
    """An all-reduce without a plan: all of x to everyone. P - 1 steps, (P-1) n bytes."""
    rank, P = group.rank(), group.size()
    total = x
    for step in range(1, P):
        to, source = (rank + step) % P, (rank - step) % P
        total = total + lab.exchange(x, to, source, x.shape, group)
    return total


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
            total = own + lab.exchange(sent, (rank + 1) % P, (rank - 1) % P, own.shape, group)
        return total

    lab.ring_reduce_scatter = ring_reduce_scatter


def added_in_place(lab):
    """The reduce-scatter adds into its chunks, which are views of x."""

    def ring_reduce_scatter(x, group):
        rank, P = group.rank(), group.size()
        chunks = x.split(chunk_sizes(len(x), P))
        for step in range(P - 1):
            sent, own = chunks[(rank - 1 - step) % P], chunks[(rank - 2 - step) % P]
            own += lab.exchange(sent, (rank + 1) % P, (rank - 1) % P, own.shape, group)
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
    lab.ring_all_reduce = partial(gather_and_add, lab)


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
