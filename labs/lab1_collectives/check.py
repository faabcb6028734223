"""Lab 1's checks, each of which runs on every rank, and the bugs that they have to catch.

Values are compared with torch.distributed, gradients with one device, traffic with the formulas.
"""

import time
from functools import partial
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from labs.kit.compare import expect_same, mistaken, tried
from labs.kit.harness import Traffic, expect, expect_close
from labs.kit.link import Link, expect_order
from labs.kit.tools import noted_waits, subgroup
from labs.lab1_collectives import lesson as finished  # not the learner's

MEAN = "the sum of the ranks' parts, not the mean"
SUBGROUP = True  # the group is not the world, and has other rank numbers
chunk_sizes = finished.chunk_sizes


def draw_all(seed, world, *shape):
    """The inputs of all ranks, each drawn by all of them."""
    return list(torch.randn(world, *shape, generator=torch.Generator().manual_seed(seed)))


def ring_inputs(seed, P):
    """[all ranks' x (n, 5)]: even chunks, uneven ones of another dtype, some that are empty."""
    for n, dtype in ((8 * P, torch.float32), (8 * P - 1, torch.float64), (2, torch.float32)):
        yield [x.to(dtype) for x in draw_all(seed + n, P, n, 5)]


def compared(exchange, x, to, source, shape, group):
    """exchange(); raises Wrong where a rank receives what no rank sends it."""
    calls, rank, hint = [None] * group.size(), group.rank(), "to, source and shape go with the step"
    with _disable_current_modes():  # this is no traffic of the learner's
        dist.all_gather_object(calls, (to, tuple(x.shape)), group=group)
    takes, (receiver, sent) = tuple(shape), calls[source]
    found = f"rank {rank} receives {takes} from {source}, which sends {sent} to {receiver}"
    expect((receiver, sent) == (rank, takes), found, f"shape is that of what comes; {hint}")
    return exchange(x, to, source, shape, group)


def counted(lab, function, *args):
    """What function returns, and the Traffic of it; exchanges are compared()."""
    exchange = partial(compared, lab.exchange)
    with mock.patch.object(lab, "exchange", exchange), Traffic() as traffic:
        return function(*args), traffic


def check_traffic(traffic, steps, *targets):
    """Raise Wrong unless at most `steps` sends, of one of `targets` bytes, are all there was."""
    others = ", ".join(op for op in traffic.ops if op != "send")
    expect(not others, f"calls torch's {others}", "build it from exchange alone")
    calls, sent = traffic.ops.get("send", [0, 0])
    more = "send one chunk a step, not all of x, and nothing that the receiver has already"
    less = "some data takes another way, or never arrives"
    hint = more if sent > min(targets) else less
    expect(sent in targets, f"sends {sent} bytes, not {targets[0]}", hint)
    expect(calls <= steps, f"takes {calls} sends, not {steps}", "one exchange a step")


def on_a_ring(lab, function, *args):
    """counted(), with P - 1 exchanges, all to one neighbour; the last of args is the group."""
    with mock.patch.object(lab, "exchange", wraps=lab.exchange) as exchange:
        out = counted(lab, function, *args)
    calls, steps = exchange.mock_calls, args[-1].size() - 1
    expect(len(calls) == steps, f"{len(calls)} exchanges, not {steps}", "P - 1 steps")
    to = {call.args[1] if call.args[1:] else call.kwargs["to"] for call in calls}
    hint = "a ring: always to the same neighbour, who sends it on"
    expect(len(to) == 1, f"sends to ranks {sorted(to)}", hint)
    return out


def check_exchange(lab, group, seed):
    late = "call work.wait() on both: gloo forgives a work that is thrown away, NCCL does not"
    rank, P, group = group.rank(), group.size(), subgroup(group, 10)  # if all wait, so long
    forward, backward = (1, [3] * P, torch.float32), (-1, [1 << 16] * P, torch.float64)
    others = (2, [3] * P, torch.bfloat16), backward, (1, range(P), torch.float32)
    for ahead, rows, dtype in (forward, *others):  # rows of each rank's x
        to, source = (rank + ahead) % P, (rank - ahead) % P
        drawn = zip(rows, draw_all(seed, P, 3, 1 << 16))
        xs = [x[:, :n].T.to(dtype) for n, x in drawn]  # (n, 3), not contiguous
        x, right, before = xs[rank], xs[source], xs[rank].clone()
        with noted_waits() as waits:
            mine, traffic = counted(lab, lab.exchange, x, to, source, right.shape, group)
        expect(len(waits) >= 2, f"waits for {len(waits)} of 2 transfers", late)
        found = f"{mine.dtype} is returned for {x.dtype}"
        expect(mine.dtype == x.dtype, found, "x.new_empty(shape)")
        swapped = "this comes from rank `to`: it goes to `to` and comes from `source`"
        own = "this is the rank's own x, not what it receives"
        expect_close("what was received", mine, right, 0, {own: x, swapped: xs[to]})
        expect_same("the input", [x], [before])
        check_traffic(traffic, 1, x.nbytes)
    return "exact: forward, backward, pairwise, uneven, in 3 dtypes; one send each"


def check_reduce_scatter(lab, group, seed):
    rank, P = group.rank(), group.size()
    for xs in ring_inputs(seed, P):
        x, total, n = xs[rank].clone(), sum(xs), len(xs[0])
        sizes = chunk_sizes(n, P)
        mine, traffic = on_a_ring(lab, lab.ring_reduce_scatter, x, group)
        parts, sums = [x.split(sizes)[rank] for x in xs], total.split(sizes)
        hints = {
            "chunk rank - 1 sets out first, not chunk rank": sums[(rank + 1) % P],
            "only two ranks' parts: send the sum so far": parts[rank] + parts[rank - 1],
            MEAN: sums[rank] / P,
        }
        expect_same("the input", [x], [xs[rank]])
        hint = "first send chunk rank - 1; to what comes add your own chunk of that number"
        error = expect_close(f"chunk {rank} of {n} rows", mine, sums[rank], 1e-5, hints, hint)
        check_traffic(traffic, P - 1, (n - sizes[rank]) * x[0].nbytes)
    return f"off by {error:.0e}; {P - 1} steps, {1 - 1 / P:.0%} of x sent"


def check_all_gather(lab, group, seed):
    rank, P = group.rank(), group.size()
    for xs in ring_inputs(seed, P):
        n, row, sizes = len(xs[0]), xs[0][0].nbytes, chunk_sizes(len(xs[0]), P)
        shards = [x[:size] for x, size in zip(xs, sizes)]
        shard = shards[rank].clone()
        mine, traffic = on_a_ring(lab, lab.ring_all_gather, shard, n, group)
        arrived = torch.cat([shards[(rank - step) % P] for step in range(P)])
        neighbours = [shard if c == rank else shards[rank - 1] for c in range(P)]
        hints = {
            "the chunks stand in the order of arrival: chunk c belongs in place c": arrived,
            "send on what came last, not the own shard": torch.cat(neighbours),
        }
        hint = "what comes in step s is chunk rank - s - 1, of that chunk's size, in that place"
        expect_close(f"{n} rows from {P} ranks", mine, torch.cat(shards), 0, hints, hint)
        expect_same("the input", [shard], [shards[rank]])
        either = [(n - sizes[(rank + way) % P]) * row for way in (1, -1)]  # way round
        check_traffic(traffic, P - 1, *either)
    return f"exact; {P - 1} steps, {1 - 1 / P:.0%} of the result sent"


def check_all_reduce(lab, group, seed):
    rank, P = group.rank(), group.size()
    for xs in ring_inputs(seed, P):
        x, n, total = xs[rank].clone(), len(xs[0]), sum(xs)
        sizes = chunk_sizes(n, P)
        mine, traffic = counted(lab, lab.ring_all_reduce, x, group)
        expect_same("the input", [x], [xs[rank]])
        hint, mean = "the sum of all ranks' x", {MEAN: total / P}
        error = expect_close(f"the sum of {n} rows", mine, total, hints=mean, hint=hint)
        either = [2 * n - sizes[rank] - sizes[(rank + way) % P] for way in (1, -1)]
        check_traffic(traffic, 2 * (P - 1), *(rows * x[0].nbytes for rows in either))
        results = [torch.empty_like(mine) for _ in range(P)]
        dist.all_gather(results, mine, group=group)
        same = all(torch.equal(mine, result) for result in results)
        hint = "one rank sums a chunk and sends it to all"
        expect(same, "the ranks' results differ in their last bits", hint)
    sent = f"{2 * (P - 1)} steps, {2 - 2 / P:.0%} of x sent"
    return f"off by {error:.0e}, same bits on all ranks; {sent}"


def uneven_rows(P):
    """[r][c]: how many rows rank r sends to rank c, some none."""
    return [[(r + 2 * c) % 3 for c in range(P)] for r in range(P)]


def check_all_to_all(lab, group, seed):
    rank, P = group.rank(), group.size()
    for table, dtype in ([[2] * P] * P, torch.float32), (uneven_rows(P), torch.float64):
        sends, receives = table[rank], [row[rank] for row in table]
        x = draw_all(seed, P, sum(sends), 5)[rank].to(dtype)
        before, right = x.clone(), x.new_empty(sum(receives), 5)
        dist.all_to_all_single(right, x, receives, sends, group=group)
        hint = "part `to` goes to rank `to`; what rank r sent belongs in place r, the own part too"
        call = lab, lab.all_to_all, x, sends, receives, group
        mine, traffic = tried("all_to_all", hint, counted, *call)
        expect_close(f"{sum(receives)} rows from {P} ranks", mine, right, 0, hint=hint)
        expect_same("the input", [x], [before])
        check_traffic(traffic, P - 1, (sum(sends) - sends[rank]) * x[0].nbytes)
    return f"exact, even and uneven; {P - 1} steps, the own rows stay"


def expect_gradient(lab, function, args, graph, rank, w, rows, hint, hints):
    """Compare function.apply(own input, *args)'s gradient and bytes with one device's; the error.

    graph: (all ranks' inputs, the outputs made of them). Rank r's loss: (its output * w[r]).sum().
    """
    inputs, outputs = graph
    own = inputs[rank].detach().clone().requires_grad_()
    out = function.apply(own, *args)
    backward = partial(torch.autograd.grad, allow_unused=True)
    given = w[rank][: len(out)]
    before = given.clone()
    (mine,), traffic = counted(lab, backward, out, own, given)
    expect_same("the input", [given], [before])
    loss = sum((y * weights[: len(y)]).sum() for y, weights in zip(outputs, w))
    (right,) = torch.autograd.grad(loss, inputs[rank])
    error = expect_close(f"{function.__name__}'s gradient", mine, right, 1e-5, hints, hint)
    check_traffic(traffic, len(inputs) - 1, *(count * 5 * 4 for count in rows))
    return error


def check_gradients(lab, group, seed):
    rank, P = group.rank(), group.size()
    for n in (4 * P, 4 * P + 2):
        sizes, table = chunk_sizes(n, P), uneven_rows(P)
        w = draw_all(seed + 1, P, n, 5)
        w[0] = w[0][:1, :1].expand(n, 5)  # not contiguous, as the gradient of .sum()
        xs = [x.requires_grad_() for x in draw_all(seed, P, n, 5)]

        shards = [x.detach()[:size].requires_grad_() for x, size in zip(xs, sizes)]
        graph = shards, [torch.cat(shards)] * P
        own = w[rank].split(sizes)[rank]
        hints = {"the rank's own gradient of its shard: the other ranks read it too": own}
        rows = [n - sizes[rank]]
        hint = "the sum of what all ranks did with it; nothing is divided"
        error = expect_gradient(lab, lab.AllGather, (n, group), graph, rank, w, rows, hint, hints)

        graph, alone = (xs, sum(xs).split(sizes)), torch.zeros(n, 5)
        alone.split(sizes)[rank].copy_(w[rank][: sizes[rank]])
        hints = {"only the own chunk has a gradient here: others' are on other ranks": alone}
        rows = [n - sizes[(rank + way) % P] for way in (1, -1)]
        hint = "each chunk's gradient, as it is, from the rank that has the chunk's sum"
        expect_gradient(lab, lab.ReduceScatter, (group,), graph, rank, w, rows, hint, hints)

        sends, receives = table[rank], [row[rank] for row in table]
        mixed = [x.detach()[: sum(row)].requires_grad_() for x, row in zip(xs, table)]
        outs = [torch.cat(parts) for parts in zip(*(x.split(row) for x, row in zip(mixed, table)))]
        again = torch.cat([weights[: sum(row)].split(row)[rank] for weights, row in zip(w, table)])
        hints = {"sent forward again: on the way back `receives` is what is sent": again}
        args, rows = (sends, receives, group), [sum(receives) - receives[rank]]
        hint = "a row's gradient comes back from the rank that the row went to"
        expect_gradient(lab, lab.AllToAll, args, (mixed, outs), rank, w, rows, hint, hints)
    return f"off by {error:.0e} from one device; as many bytes as forward"


def check_overlap(lab, group, seed):
    """On a slow Link, whose log shows what came before what."""
    rank, P = group.rank(), group.size()
    shapes = enumerate([(6, 5), (4, 5), (6, 4)])
    xs, weights, grads = (draw_all(seed + i, P, *shape) for i, shape in shapes)
    given = xs[0], weights[rank], grads[rank]
    args = [tensor.clone() for tensor in given]
    with Link({weights[0].numel(): "dw"}, delay=partial(time.sleep, 0.1)) as link:
        dx, dw = (tensor.clone() for tensor in lab.linear_backward(*args, group))
    first = "sum dx over the ranks (dist.all_reduce, async_op=True), and compute dw meanwhile"
    last = "work.wait() after dw, before you return dx; without async_op=True it waits at once"
    order = ("start all_reduce", "dw", first), ("dw", "wait all_reduce", last)
    expect_order(link.log, order)
    right = sum(g @ w for g, w in zip(grads, weights))  # all columns together
    expect_same("an argument", args, given)
    own = {MEAN: right / P, "sum dx itself, not a copy of it": grads[rank] @ weights[rank]}
    expect_close("dx", dx, right, 1e-5, own, "dx, then dw: the sum of all ranks' grad @ weight")
    error = expect_close("dw", dw, grads[rank].T @ xs[0], hint="grad.T @ x, the rank's own")
    one = link.traffic.ops == {"all_reduce": [1, args[0].nbytes]}
    expect(one, f"calls {link.traffic.ops}", "one all-reduce, of dx; dw is the rank's own")
    return f"off by {error:.0e}; dw computed while the sum was under way"


CHECKS = {
    "exchange": (check_exchange, 4),
    "reduce_scatter": (check_reduce_scatter, 4),
    "all_gather": (check_all_gather, 4),
    "all_reduce": (check_all_reduce, 3),
    "all_to_all": (check_all_to_all, 4),
    "gradients": (check_gradients, 3),
    "overlap": (check_overlap, 3),
}


def gather_and_add(lab, x, group):
    """An all-reduce without a plan: all of x to everyone. P - 1 steps, (P-1) n bytes."""
    rank, P = group.rank(), group.size()
    total = x
    for step in range(1, P):
        to, source = (rank + step) % P, (rank - step) % P
        total = total + lab.exchange(x, to, source, x.shape, group)
    return total


# Bugs for --inject-bug: the checks have to catch every one


def all_to_everyone(lab):
    """The all-reduce sends all of x to every rank: the right sum, for P/2 times the bytes."""
    lab.ring_all_reduce = partial(gather_and_add, lab)


def slice_for_gradient(lab):
    """The gradient of an all-gather is the rank's own gradient of its slice; nobody sums."""

    def backward(ctx, grad):
        return grad.tensor_split(ctx.group.size())[ctx.group.rank()], None, None

    lab.AllGather.backward = staticmethod(backward)


def waited_for_at_once(lab):
    """linear_backward sums dx first and computes dw then: right, and nothing overlaps."""
    changes = ("async_op=True", "async_op=False"), ("work.wait()", "pass")
    lab.linear_backward = mistaken(finished.linear_backward, *changes)


BUGS = [all_to_everyone, slice_for_gradient, waited_for_at_once]
