"""What the finished lab 1 shows: bytes and steps, deadlock, reads that come too early, time."""

import time
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

from labs.kit.harness import Traffic, on_ranks, table
from labs.kit.pictures import BLUE, GREY, RED, picture
from labs.kit.tools import appears, shared_folder

COSTS = {  # steps, and bytes that each of P ranks sends of a message of n
    "reduce-scatter": lambda P, n: (P - 1, n * (P - 1) // P),
    "all-gather": lambda P, n: (P - 1, n * (P - 1) // P),
    "all-reduce": lambda P, n: (2 * (P - 1), 2 * n * (P - 1) // P),
    "all-to-all": lambda P, n: (P - 1, n * (P - 1) // P),
    "gather and add": lambda P, n: (P - 1, n * (P - 1)),
}
MESSAGE = 3360  # bytes: every number of ranks from 2 to 8 divides its floats


def gather_and_add(lab, x, group):
    """An all-reduce without a plan: all of x to everyone. P - 1 steps, (P-1) n bytes."""
    rank, P = group.rank(), group.size()
    total = x
    for step in range(1, P):
        to, source = (rank + step) % P, (rank - step) % P
        total = total + lab.exchange(x, to, source, x.shape, group)
    return total


def count(group, lab):
    """Steps and bytes of every operation on 2 to P ranks, counted by rank 0, beside COSTS."""
    rows, worlds = [], range(2, group.size() + 1)
    n = MESSAGE // 4  # floats
    for world in worlds:
        ranks = dist.new_group(list(range(world)))
        if group.rank() >= world:
            continue
        x, even = torch.ones(n), [n // world] * world
        runs = [
            ("reduce-scatter", lab.ring_reduce_scatter, x),
            ("all-gather", lab.ring_all_gather, x[: n // world], n),
            ("all-reduce", lab.ring_all_reduce, x),
            ("all-to-all", lab.all_to_all, x, even, even),
            ("gather and add", partial(gather_and_add, lab), x),
        ]
        for name, function, *args in runs:
            with Traffic() as traffic:
                function(*args, ranks)
            steps, sent = traffic.ops["send"]
            row = {"operation": name, "ranks": world, "message": x.nbytes}
            row |= {"steps": steps, "bytes": sent}
            row["expected_steps"], row["expected_bytes"] = COSTS[name](world, x.nbytes)
            rows.append(row)
    return rows


def blocking_ring(group):
    """What this rank is at after 2 s of blocking sends round the ring: [even first, all send].

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
STALE, SAFE = ("x, not waited for", "y.elem"), ("x after work.wait()", "y + 0", "y.wait()")


def read_early(group):
    """Rank 0 (x = 1) reads the sum of x while rank 1 (x = 10) is late: [what, value, seconds]."""

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
                appears(folder / str(i), 20 if name in STALE else LATE)  # those read at once
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


def clock(group, lab, sizes, turns=12):
    """{operation: [seconds for each size in bytes]}: medians over turns of the slowest rank's.

    Each turn times all of them, so that another program's burst of work hits all alike.
    """
    rank, P = group.rank(), group.size()
    operations = {
        "exchange": lambda x: lab.exchange(x, (rank + 1) % P, (rank - 1) % P, x.shape, group),
        "ring_all_reduce": lambda x: lab.ring_all_reduce(x, group),
        "gather_and_add": lambda x: gather_and_add(lab, x, group),
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
    ones = torch.ones(len(t), 1, dtype=torch.float64)
    return torch.linalg.lstsq(terms, ones).solution.flatten().tolist()


def show_counts(lab, P):
    """Count steps and bytes beside the formulas; returns (rows, what is off).

    The table lacks the all-reduce on P ranks, because PREDICT asks about it.
    """
    counts = on_ranks(P, count, lab)[0]
    heads = ["operation", "ranks", "steps", "formula", "bytes sent", "formula", "of the message"]
    keys = ["operation", "ranks", "steps", "expected_steps", "bytes", "expected_bytes"]
    shown = [row for row in counts if (row["operation"], row["ranks"]) != ("all-reduce", P)]
    share = [f"{row['bytes'] / row['message']:.0%}" for row in shown]
    table(heads, *([*(row[key] for key in keys), part] for row, part in zip(shown, share)))
    off = [
        f"{row['operation']} on {row['ranks']} ranks: {row['steps']} steps, {row['bytes']} bytes"
        for row in counts
        if row["steps"] > row["expected_steps"] or row["bytes"] != row["expected_bytes"]
    ]
    return counts, off


def show_blocking_ring(P):
    """Where blocking sends leave the ranks, in two orders; returns (results, what is off)."""
    orders = list(zip(*on_ranks(P, blocking_ring)))  # [even first, all send][rank]
    texts = ["even ranks send first, odd ranks receive first", "all send first, then receive"]
    title = "one blocking send and receive round the ring: each rank after 2 s"
    rows = [[text, *order] for text, order in zip(texts, orders)]
    table([title, *(f"rank {rank}" for rank in range(P))], *rows)
    expected = [{"done"}, {"send"}]
    off = [f"{t}: {', '.join(o)}" for t, o, at in zip(texts, orders, expected) if set(o) != at]
    return dict(zip(texts, orders)), off


def show_reads():
    """What rank 0 reads from a sum that is not there yet; returns (results, what is off)."""
    reads, overwritten = on_ranks(2, read_early)[0]
    rows = [
        [name, value, "stale" if value == 1 else "right", f"{took:.2f}"]
        for name, value, took in reads
    ]
    table(["rank 0 reads 1 + 10 while rank 1 is late", "value", "", "waited, s"], *rows)
    print(f"  isend(x), then x = 0 before work.wait(): a 1 was sent, a {overwritten:.0f} arrives")
    expected = dict.fromkeys(STALE, 1) | dict.fromkeys(SAFE, 11)
    wrong = [(name, value) for name, value, _ in reads if expected.get(name, value) != value]
    off = [f"{name} gives {value:g}" for name, value in wrong]
    rows = [{"read": name, "value": value, "seconds": took} for name, value, took in reads]
    return {"reads": rows, "overwritten": overwritten}, off


def show_times(lab, P):
    """Time an exchange, fit it, and predict the all-reduces from the fit; returns the results."""
    sizes = [4**k for k in range(4, 12)]
    seconds = on_ranks(P, clock, lab, sizes)[0]
    a, b = fit(sizes, seconds["exchange"])
    predicted = {
        "ring_all_reduce": [2 * (P - 1) * (a + b * n / P) for n in sizes],
        "gather_and_add": [(P - 1) * (a + b * n) for n in sizes],
    }
    columns = {
        "exchange": seconds["exchange"],
        "ring all-reduce": seconds["ring_all_reduce"],
        "predicted": predicted["ring_all_reduce"],
        "gather and add": seconds["gather_and_add"],
        "predicted ": predicted["gather_and_add"],
        "torch's all-reduce": seconds["torch"],
    }
    rows = [[n, *(f"{1e6 * t:.0f}" for t in times)] for n, *times in zip(sizes, *columns.values())]
    table([f"bytes (times in us, {P} ranks)", *columns], *rows)
    line = f"a = {1e6 * a:.0f} us, 1/b = {1e-9 / b:.2f} GB/s"
    print(f"\n  an exchange of n bytes takes a + b n: {line}")
    print(f"  both parts weigh the same at {a / b / 1e6:.2g} MB; {crossing(P, a, b)}")
    print("  (gloo on one CPU: no prediction for GPUs)")
    return {
        "time": {"ranks": P, "bytes": sizes, "seconds": seconds, "predicted": predicted},
        "fit": {"latency_s": a, "seconds_per_byte": b},
    }


def experiment(lab, args):
    """What the lesson says, measured: bytes and steps, deadlock, early reads, time."""
    counts, off = show_counts(lab, args.ranks)
    orders, stuck = show_blocking_ring(args.ranks)
    reads, early = show_reads()
    results = {"failed": off + stuck + early, "counts": counts, "blocking_ring": orders, **reads}
    return results | show_times(lab, args.ranks)


PREDICT = (
    f"how many bytes does each of {{ranks}} ranks send in a ring all-reduce of {MESSAGE} bytes?",
    "2 (P-1)/P n: each of 2 (P-1) steps sends one chunk of n/P bytes",
    lambda results: next(
        row["bytes"] for row in reversed(results["counts"]) if row["operation"] == "all-reduce"
    ),
)


def crossing(P, a, b):
    """Which all-reduce the model says to take: (P-1) (a + b n) against 2 (P-1) (a + b n/P)."""
    if P == 2:
        return "on 2 ranks gather and add sends no more than the ring, in half the steps"
    return f"the ring should beat gather and add above {a / b / (1 - 2 / P) / 1e6:.2g} MB"


def draw(results, path):
    """Time against message size: points measured, lines from the fit of one exchange."""
    timed, (a, b) = results["time"], results["fit"].values()
    P, sizes = timed["ranks"], timed["bytes"]
    grid = [sizes[0] * (sizes[-1] / sizes[0]) ** (i / 100) for i in range(101)]
    ways = {  # name: label, marker, colour, seconds of each size of the grid
        "gather_and_add": (
            ("all-reduce, gather and add", "^", RED),
            [(P - 1) * (a + b * n) for n in grid],
        ),
        "ring_all_reduce": (
            ("all-reduce, ring", "s", BLUE),
            [2 * (P - 1) * (a + b * n / P) for n in grid],
        ),
        "exchange": (("one exchange", "o", GREY), [a + b * n for n in grid]),
    }
    with picture(path, [["time"]], (8, 5)) as axes:
        axis = axes["time"]
        for name, ((label, marker, colour), model) in ways.items():
            measured = [1e3 * seconds for seconds in timed["seconds"][name]]
            axis.plot(sizes, measured, marker, color=colour, label=label)
            axis.plot(grid, [1e3 * seconds for seconds in model], color=colour, lw=1)
        axis.set(xscale="log", yscale="log", xlabel="message, bytes", ylabel="time, ms")
        axis.set_ylim(top=5 * axis.get_ylim()[1])  # room for the legend
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter("")
        axis.set_title(f"Few steps or few bytes: {crossing(P, a, b)}", loc="left")
        fitted = f"a = {1e6 * a:.0f} us, 1/b = {1e-9 / b:.2f} GB/s ({P} ranks, gloo)"
        label = f"lines: a + b n a step, fitted to one exchange\n{fitted}"
        axis.plot([], [], "k-", lw=1, label=label)
        axis.legend(frameon=False)


def add_options(parser):
    """The lab's own options."""
    add = parser.add_argument
    add("--ranks", type=int, choices=range(2, 9), default=4, help="of the experiments (4); 2 to 8")
