"""Lab 1's exercises: their cases. mistakes.txt has the wrong answers.

Values and gradients are one device's; steps and bytes are the finished lab's. A Link shows what
overlaps.
"""

import time
from functools import partial
from unittest import mock

import torch

from labs.kit.eye import Most
from labs.kit.harness import Wrong
from labs.kit.inputs import draw_from
from labs.kit.judge import checks
from labs.kit.link import Link
from labs.kit.tools import noted_waits, on_every_rank, subgroup
from labs.lab1_collectives import lesson as finished  # not the learner's

SUBGROUP = True  # the group is not the world, and has other rank numbers
GROUPS = [0, 1, 2, 3], [1, 3], [3]
chunk_sizes = finished.chunk_sizes


def whole(randn, shape, dtype):
    """Numbers of that dtype, with strides the other way round; of a short one, sums are exact."""
    x = 2 * randn(shape[::-1]).permute(*range(len(shape))[::-1])
    return (x.round() if dtype.itemsize < 4 else x).to(dtype)


def ring_inputs(group, seed):
    """[a title, all ranks' x]: even chunks, uneven ones, some that are empty."""
    _, randn = draw_from(seed, group)
    P = group.size()
    kinds = ((8 * P, 5), torch.float32), ((8 * P - 1,), torch.float64)
    for shape, dtype in (*kinds, ((P // 2, 3, 2), torch.bfloat16)):
        yield f"{shape}, {dtype}", [whole(randn, shape, dtype) for _ in range(P)]


# ---- Exchange ------------------------------------------------------------------------------------


def see_exchange(given, lab, eye):
    def exchange(*args):
        with noted_waits() as waits:
            received = lab.exchange(*args)
        eye.note("transfers that nobody waits for", Most(max(0, 2 - len(set(map(id, waits))))))
        return received

    eye.call(exchange, given, "what comes")


def exchange(group, seed):
    rank, P, group = group.rank(), group.size(), subgroup(group, 5)  # if all wait, so long
    _, randn = draw_from(seed)
    some, many = [3] * P, [1 << 16] * P  # rows of each rank's x
    cases = {
        "forward": (1, some, torch.float32),
        "two places ahead": (2, some, torch.bfloat16),
        "backward, 0.8 MB": (-1, many, torch.float32),
        "rank r has r rows": (1, range(P), torch.float32),
        "backward": (-1, some, torch.float64),
    }
    for title, (ahead, rows, dtype) in cases.items():
        xs = [whole(randn, (n, 3), dtype) for n in rows]
        to, source = (rank + ahead) % P, (rank - ahead) % P
        given = {"x": xs[rank], "to": to, "source": source, "shape": xs[source].shape}
        yield title, partial(see_exchange, given | {"group": group}), {"what comes": xs[source]}


# ---- What is made of exchanges -------------------------------------------------------------------


class Exchanges:
    """In the place of exchange(): notes where to, stops all where one waits for what none sends."""

    def __init__(self, exchange):
        self.exchange, self.to = exchange, []

    def __call__(self, x, to, source, shape, group):
        self.to.append(to)
        calls = on_every_rank((to, tuple(x.shape), source, tuple(shape)), group)
        sent = {(rank, to): shape for rank, (to, shape, *_) in enumerate(calls)}
        for rank, (_, _, source_of_it, wanted) in enumerate(calls):
            found = sent.get((source_of_it, rank))
            text = f"rank {rank} waits for {wanted} from {source_of_it}, which sends it {found}"
            if found != wanted:
                hint = "exchange()'s to, source and shape must go with the step, on all ranks."
                raise Wrong(text, hint)
        return self.exchange(x, to, source, shape, group)


def see_exchanges(name, ring, given, dy, lab, eye):
    """A function, or an autograd Function with its backward. ring: all goes to one neighbour."""
    exchanges, function = Exchanges(lab.exchange), getattr(lab, name)
    with mock.patch.object(lab, "exchange", exchanges):
        out = eye.call(getattr(function, "apply", function), given, dy=dy)
    steps, neighbours = len(exchanges.to), len(set(exchanges.to))
    if ring:
        eye.note("its way", f"{steps} exchanges with {neighbours} neighbours")
    else:
        eye.note("exchanges", Most(steps))
    if name == "ring_all_reduce":
        everyone = on_every_rank(out, given["group"])
        same = all(torch.equal(out, other) for other in everyone)
        eye.note("the ranks' results differ in their last bits", not same)


def seen(name, given, ring=False, dy=None):
    return partial(see_exchanges, name, ring, given, dy)


def at_most(when, rows, x):
    """{bytes that may be sent}: so many rows of x, the more of both ways round the ring."""
    return {f"{when}: bytes that send moves": rows * x[:1].nbytes} if rows else {}


def smaller(sizes, rank):
    """Rows of the smaller of both neighbours' chunks: one of the two need not be sent on."""
    return min(sizes[rank - 1], sizes[(rank + 1) % len(sizes)])


def reduce_scatter(group, seed):
    for title, xs in ring_inputs(group, seed):
        given = {"x": xs[group.rank()], "group": group}
        own = sum(xs).split(chunk_sizes(len(xs[0]), len(xs)))[group.rank()]
        yield title, seen("ring_reduce_scatter", given, ring=True), {"the result": own}


def all_gather(group, seed):
    rank, P = group.rank(), group.size()
    for title, [x, *_] in ring_inputs(group, seed):
        n, sizes = len(x), chunk_sizes(len(x), P)
        given = {"shard": x.split(sizes)[rank].clone(), "n": n, "group": group}
        right = at_most("forward", n - smaller(sizes, rank), x) | {"the result": x}
        yield title, seen("ring_all_gather", given, ring=True), right


def all_reduce(group, seed):
    rank, P = group.rank(), group.size()
    for title, xs in ring_inputs(group, seed):
        n, sizes = len(xs[0]), chunk_sizes(len(xs[0]), P)
        right = at_most("forward", 2 * n - sizes[rank] - smaller(sizes, rank), xs[0])
        right |= {"the result": sum(xs)}
        yield title, seen("ring_all_reduce", {"x": xs[rank], "group": group}), right


def tables(P):
    """{title: [r][c], how many rows rank r sends to rank c}"""
    yield "all send 2 rows to all", [[2] * P] * P
    yield "0 to P - 1 rows", [[(r - c + 1) % P for c in range(P)] for r in range(P)]
    yield "rank 0 alone sends", [[(c + 1) * (r == 0) for c in range(P)] for r in range(P)]


def exchanged(xs, table, rank):
    """The rows of all ranks' xs that are for a rank."""
    return torch.cat([x.split(row)[rank] for x, row in zip(xs, table)])


def all_to_all(group, seed):
    _, randn = draw_from(seed, group)
    rank, P = group.rank(), group.size()
    dtypes = torch.float32, torch.float64, torch.bfloat16
    for (title, table), dtype in zip(tables(P), dtypes):
        xs = [whole(randn, (sum(row), 5), dtype) for row in table]
        sends, receives = table[rank], [row[rank] for row in table]
        given = {"x": xs[rank], "sends": sends, "receives": receives, "group": group}
        yield title, seen("all_to_all", given), {"the result": exchanged(xs, table, rank)}


def gradients(group, seed):
    _, randn = draw_from(seed, group)
    rank, P = group.rank(), group.size()
    draw = partial(whole, randn)
    for n, dtype in (4 * P, torch.float32), (4 * P + 2, torch.float64), (P // 2, torch.bfloat16):
        sizes = chunk_sizes(n, P)
        x, dys = draw((n, 5), dtype), [draw((n, 5), dtype) for _ in range(P)]
        shard = x.split(sizes)[rank].clone().requires_grad_()
        given = {"shard": shard, "n": n, "group": group}
        right = {"the gradient of shard": sum(dys).split(sizes)[rank]}
        yield f"AllGather of {n} rows", seen("AllGather", given, dy=[dys[rank]]), right

        dys, x = [draw((size, 5), dtype) for size in sizes], x.clone().requires_grad_()
        right = at_most("backward", n - smaller(sizes, rank), x)
        right |= {"the gradient of x": torch.cat(dys)}
        see = seen("ReduceScatter", {"x": x, "group": group}, dy=[dys[rank]])
        yield f"ReduceScatter of {n} rows", see, right
    for title, table in tables(P):
        columns = [[*column] for column in zip(*table)]
        xs, dys = ([draw((sum(n), 5), dtype) for n in each] for each in (table, columns))
        given = {"x": xs[rank].requires_grad_(), "sends": table[rank], "receives": columns[rank]}
        right = {"the gradient of x": exchanged(dys, columns, rank)}
        see = seen("AllToAll", given | {"group": group}, dy=[dys[rank]])
        yield f"AllToAll, {title}", see, right


# ---- Overlap -------------------------------------------------------------------------------------


def see_overlap(given, lab, eye):
    """On a slow Link, whose log shows what came before what."""
    names = {given["weight"].numel(): "dw"}
    with Link(names, delay=partial(time.sleep, 0.1)) as link:
        eye.call(lab.linear_backward, given, "dx, dw")
    order = [what for what, *_ in link.log]
    for first, then in ("start all_reduce", "dw"), ("dw", "wait all_reduce"):
        there = {first, then} <= {*order} and order.index(first) < order.index(then)
        eye.note(f"no '{then}' after '{first}'", not there)
    eye.note_traffic("forward", link.traffic, [w for w in order if w.startswith("wait")])


def overlap(group, seed):
    _, randn = draw_from(seed, group)
    P = group.size()
    for dtype in torch.float32, torch.bfloat16:
        x, weights, grads = (
            [whole(randn, shape, dtype) for _ in range(P)] for shape in ((6, 5), (4, 5), (6, 4))
        )
        given = {"x": x[0], "weight": weights[group.rank()], "grad": grads[group.rank()]}
        right = {"dx": sum(dy @ weight for dy, weight in zip(grads, weights))}
        right |= {"dw": given["grad"].T @ x[0]}
        yield f"{dtype}", partial(see_overlap, given | {"group": group}), right


EXERCISES = {
    "exchange": (exchange, 4),
    "reduce_scatter": (reduce_scatter, 4, GROUPS),
    "all_gather": (all_gather, 4, GROUPS),
    "all_reduce": (all_reduce, 4, GROUPS),
    "all_to_all": (all_to_all, 4, GROUPS),
    "gradients": (gradients, 4, GROUPS),
    "overlap": (overlap, 3, ([0, 1, 2], [0, 1])),
}
CHECKS, BUGS = checks(EXERCISES, finished, 1e-5)
