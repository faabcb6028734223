"""What the finished lab 4 shows: the gain by overlap, early reads, memory that must not be kept."""

import statistics
import time
from functools import partial

import torch
import torch.distributed as dist

from labs.kit.cli import check_writable, positive
from labs.kit.harness import expect, on_ranks, relative_error, table
from labs.kit.link import Link
from labs.kit.pictures import BLUE, GREY, ORANGE, SKY, picture
from labs.kit.tools import appears, shared_folder
from labs.lab4_overlap.aliasing import aliasing
from labs.lab4_overlap.bucket_times import buckets
from labs.lab4_overlap.check import one_device

TOKENS, HIDDEN, FEATURES = 512, 1024, 1920  # of the timed layer: 2 ranks, 960 output features each
RATIOS = 0.25, 0.5, 1, 2, 4  # of the time of an all-gather to that of a GEMM
LATE = 0.4  # seconds, in the experiment of who does not wait


def layers_of(lab):
    return {"TP": lab.tp_linear, "SP": lab.sp_linear}


def gemm_seconds(group, layer):
    """Median time of the layer's dgrad GEMM while every rank runs its own, on the slowest rank."""
    times = []
    for _ in range(7):
        dist.barrier(group)
        begin = time.perf_counter()
        layer.dy @ layer.weight.detach()
        times.append(time.perf_counter() - begin)
    slowest = torch.tensor(statistics.median(times[1:]))  # the first one warms up
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
    return slowest.item()


def run_backward(group, layer, y, **link):
    """One backward through a Link: {"seconds", "log", "messages", "wire_bytes"}, from its start."""
    layer.x.grad = layer.weight.grad = layer.bias.grad = None
    with Link(layer.gemms, **link) as link:
        dist.barrier(group)
        begin = time.perf_counter()
        y.backward(layer.dy, retain_graph=True)
        run = {"seconds": time.perf_counter() - begin}
    for name in "log", "messages":
        run[name] = [[what, start - begin, end - begin] for what, start, end in getattr(link, name)]
    return run | {"wire_bytes": link.wire}


def hidden(run):
    """The fraction of a run's message time during which a GEMM runs."""
    gemms = [(begin, end) for what, begin, end in run["log"] if what in ("dgrad", "wgrad")]
    spans = [(begin, end) for _, begin, end in run["messages"]]
    under = sum(max(0, min(end, e) - max(begin, b)) for begin, end in spans for b, e in gemms)
    return under / sum(end - begin for begin, end in spans)


def timings_on_rank(group, lab, seed, pairs):
    """Blocking and overlapped backwards in turn: TP once, SP at each ratio.

    Returns (seconds of a GEMM, {(way, ratio): [(blocking run, overlapped run), ...]}).
    """
    randn, runs = partial(torch.randn, generator=torch.Generator().manual_seed(seed)), {}
    gemm = None
    wire = 4 * TOKENS * HIDDEN * (group.size() - 1) / group.size()  # bytes of an all-gather
    for way, function in layers_of(lab).items():
        layer = one_device(randn, group, TOKENS, 1, HIDDEN, FEATURES, way)
        y = function(layer.x, layer.weight, layer.bias, group)
        gemm = gemm or gemm_seconds(group, layer)
        for ratio in RATIOS if way == "SP" else [1]:
            runs[way, ratio], pace = [], ratio * gemm / wire
            for i in range(pairs if ratio == 1 else 3):
                pair = {}
                for mode in ("blocking", "overlapped")[:: (-1) ** i]:  # each goes first in turn
                    pair[mode] = run_backward(group, layer, y, seconds_per_byte=pace, mode=mode)
                    for mine, right in (layer.x.grad, layer.dx), (layer.weight.grad, layer.dw):
                        expect(relative_error(mine, right) <= 1e-5, f"{way}: a gradient is off")
                runs[way, ratio].append((pair["blocking"], pair["overlapped"]))
    return gemm, runs


UNDER = {"all_reduce": "wgrad", "all_gather": "dgrad", "reduce_scatter": "wgrad"}


def at_shortest(run):
    """(seconds, messages / GEMMs) of a run that takes but the longer of each GEMM and its message.

    By its own times: a GEMM takes longer in a blocking run, whose processor has just been idle.
    """
    gemms = {what: end - begin for what, begin, end in run["log"] if what in ("dgrad", "wgrad")}
    under = dict.fromkeys(gemms, 0.0)
    for op, begin, end in run["messages"]:
        under[UNDER[op]] += end - begin
    longer = sum(max(gemms[gemm], under[gemm]) for gemm in gemms)
    return longer, sum(under.values()) / sum(gemms.values())


def timings(lab, args):
    """The gain by overlap: {"gemm_seconds", "gains": rows, "timelines": {way: runs of rank 0}}."""
    ranks = on_ranks(2, timings_on_rank, lab, args.seed, args.pairs, timeout=120)
    gemm, rows, timelines = ranks[0][0], [], {}
    for way, ratio in ranks[0][1]:
        pairs = list(zip(*(runs[way, ratio] for _, runs in ranks)))  # [pair][rank][mode]
        slowest = [[max(run[mode]["seconds"] for run in pair) for mode in (0, 1)] for pair in pairs]
        gains = [blocking / overlapped for blocking, overlapped in slowest]
        blocking, overlapped = (statistics.median(column) for column in zip(*slowest))
        row = {"way": way, "ratio": ratio, "blocking_s": blocking, "overlapped_s": overlapped}
        row["gain"] = statistics.median(gains)
        best = [[at_shortest(rank[1]) for rank in pair] for pair in pairs]
        least = [max(seconds for seconds, _ in pair) for pair in best]
        row["at_best"] = statistics.median(one[0] / few for one, few in zip(slowest, least))
        row["message_over_gemm"] = statistics.median(over for pair in best for _, over in pair)
        row["hidden"] = statistics.median(hidden(rank[1]) for pair in pairs for rank in pair)
        rows.append(row)
        if ratio == 1:
            middle = gains.index(statistics.median_low(gains))
            timelines[way] = dict(zip(["blocking", "overlapped"], pairs[middle][0]))
    shape = f"{TOKENS} tokens, {HIDDEN} -> {FEATURES // 2} features on each of 2 ranks"
    print(f"\n{shape}: a GEMM takes {1000 * gemm:.0f} ms; medians of {args.pairs} pairs, or 3")
    print("(at best: if the overlapped run took no more than the longer of each GEMM and message)")
    lines = [["", "messages / GEMMs", "blocking ms", "overlapped ms", "gain", "at best", "hidden"]]
    for row in rows:
        times = [f"{1000 * row[mode]:.0f}" for mode in ("blocking_s", "overlapped_s")]
        gain = f"{row['gain']:.2f}", f"{row['at_best']:.2f}", f"{row['hidden']:.0%}"
        lines.append([row["way"], f"{row['message_over_gemm']:.2f}", *times, *gain])
    table(*lines)
    return {"gemm_seconds": gemm, "gains": rows, "timelines": timelines}


def unwaited_on_rank(group, lab, seed):
    """What a late message does to who does not wait: rows with fractions of elements wrong.

    Rank 1 joins once rank 0 has read its gradients, or, where that waits for rank 1, LATE later.
    """
    rows, randn = [], partial(torch.randn, generator=torch.Generator().manual_seed(seed))

    def wrong(mine, right):
        return (~torch.isclose(mine, right, rtol=1e-3, atol=1e-3)).double().mean().item()

    with shared_folder(group) as folder:
        for way, function in layers_of(lab).items():
            for mode, most in ("overlapped", LATE), ("unwaited", 20):
                layer = one_device(randn, group, 8, 2, 16, 10, way)
                y = function(layer.x, layer.weight, layer.bias, group)
                read = folder / f"{way}_{mode}"
                delay = partial(appears, read, most) if group.rank() else None
                with Link(layer.gemms, delay=delay, mode=mode):
                    y.backward(layer.dy)
                    errors = wrong(layer.x.grad, layer.dx), wrong(layer.weight.grad, layer.dw)
                    read.touch() if group.rank() == 0 else None
                row = {"way": way, "waits": mode == "overlapped"}
                rows.append(row | dict(zip(("dx", "dw"), errors)))
    return rows


def unwaited(lab, args):
    """The same backward, waiting and not, rank 1 late; returns (rows, what is off)."""
    rows = on_ranks(2, unwaited_on_rank, lab, args.seed)[0]
    print("\nrank 1 joins every message late: wrong elements of rank 0's gradients")
    lines, off = [["", "handle.wait()", "dx", "dW"]], []
    for row in rows:
        called = "called" if row["waits"] else "left out"
        lines.append(line := [row["way"], called, f"{row['dx']:.0%}", f"{row['dw']:.0%}"])
        if (row["dx"] or row["dw"]) if row["waits"] else row["dx"] <= 0.9:
            off.append(f"{row['way']}, wait() {called}: {line[2]} of dx, {line[3]} of dW wrong")
    table(*lines)
    return rows, off


def experiment(lab, args):
    """{"gemm_seconds", "gains", "timelines", "unwaited", "aliasing", "buckets", "failed"}."""
    results = timings(lab, args)
    results["unwaited"], early = unwaited(lab, args)
    results["aliasing"], kept = aliasing(lab, args)
    results["buckets"], messages = buckets(lab, args)
    return results | {"failed": early + kept + messages}


DGRAD, WGRAD, MESSAGE = BLUE, SKY, ORANGE


def draw(results, path):
    """When rank 0's messages and GEMMs ran, and the gain at each speed of the link."""
    with picture(path, [["timelines", "gains"]], (14, 5.5), width_ratios=[2.2, 1]) as axes:
        draw_timelines(axes["timelines"], results["timelines"])
        draw_gains(axes["gains"], [row for row in results["gains"] if row["way"] == "SP"])


def draw_gains(axis, rows):
    """The gain of overlap at each speed of the link, measured and at best."""
    finer = [2 ** (i / 16) for i in range(-40, 41)]
    best = [(1 + ratio) / max(1, ratio) for ratio in finer]
    axis.plot(finer, best, color=GREY, label="at best: (C + M) / max(C, M)")
    measured = [row["message_over_gemm"] for row in rows], [row["gain"] for row in rows]
    axis.plot(*measured, "o", color=DGRAD, label="measured, medians")
    axis.set_xscale("log", base=2)
    axis.set_xticks(RATIOS, [f"{ratio:g}" for ratio in RATIOS])
    axis.set_xlabel("M / C: time of the messages / of the GEMMs")
    axis.set_ylabel("blocking / overlapped time")
    axis.set(ylim=(0.7, 2.1), title="SP: the gain at other speeds of the link")
    axis.legend(loc="lower center")


def draw_timelines(axis, timelines):
    """A row for the link and one for the processor, of each way and mode, over time in ms."""
    colours, ticks, row = {"dgrad": DGRAD, "wgrad": WGRAD}, [], 0
    for way, runs in timelines.items():
        for mode, run in runs.items():
            events = [(*event, 0) for event in run["messages"]]
            events += [(*event, 1) for event in run["log"] if event[0] in colours]
            for what, begin, end, lane in events:
                box = {"color": colours.get(what, MESSAGE), "edgecolor": "white", "height": 0.9}
                axis.barh(row + lane, 1000 * (end - begin), left=1000 * begin, **box)
                label, middle = what.replace("_", "-"), 500 * (begin + end)
                look = {"ha": "center", "va": "center"}
                look["color"] = "white" if what == "dgrad" else "black"
                axis.text(middle, row + lane, label, **look)
            axis.plot([1000 * run["seconds"]] * 2, [row - 0.5, row + 1.5], color="black", lw=1.5)
            ticks += [(row, f"{way}, {mode}: link"), (row + 1, "processor")]
            row += 3 if mode == "overlapped" else 2.4
    axis.set_yticks(*zip(*ticks))
    axis.invert_yaxis()
    axis.set_xlabel("ms since the backward began (black: it returns)")
    axis.set_title("rank 0's backward, as it was logged")


PREDICT = (
    f"2 ranks have a layer {HIDDEN} -> {FEATURES // 2} each; {TOKENS} tokens, float32: how "
    "many KiB does each rank send in one SP backward?",
    "2 (P-1)/P s b h numbers of 4 bytes: x's all-gather and dx's reduce-scatter send (P-1)/P "
    "of a whole (s, b, h) each; the output features are in no message",
    lambda results: results["timelines"]["SP"]["overlapped"]["wire_bytes"] / 1024,
)


def add_options(parser):
    """The lab's own options."""
    add = parser.add_argument
    add("--pairs", type=positive, default=7, help="timings of each way (7)")
    add("--profile", metavar="FILE", type=check_writable, help="trace of a step, for Perfetto")
