"""What the finished lab 8 shows: the model on any mesh, who talks to whom, and the usual norms."""

import argparse
import gc
import math
import os
import warnings

import torch
import torch.distributed as dist

from labs.kit.cli import UsageError, positive
from labs.kit.harness import on_ranks, table
from labs.kit.pictures import RANKS as COLOURS
from labs.kit.pictures import picture
from labs.lab8_3d.check import say
from labs.lab8_3d.mesh import (
    AXES,
    SAME,
    TOLERANCE,
    Ledger,
    finished,
    prove,
    sent_too_much,
    tiny_config,
)

PHASES = list(Ledger.PHASES.values())
ASKED = "over all ranks, dp too"  # of the usual norms


def prove_on_rank(group, lab, sizes, microbatches, seed):
    """prove() on this rank."""
    return prove(lab, sizes, microbatches, seed)


def on_torchruns_ranks(lab, task=None):
    """[prove() of each rank], on rank 0 of those that torchrun started; None on the others.

    Rank 0 comes here from the experiment, with the task; the others have waited for it.
    """
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    dist.init_process_group("gloo")
    tasks, reports = [task], [None] * dist.get_world_size()
    dist.broadcast_object_list(tasks)
    report = prove(lab, *tasks[0])
    dist.gather_object(report, reports if dist.get_rank() == 0 else None)
    dist.destroy_process_group()
    gc.collect()  # garbage holds the group, whose threads must end before Python does
    return reports


def follow(lab):
    """What torchrun's other ranks do: rank 0 will say which task. Returns the exit status."""
    on_torchruns_ranks(lab)
    return 0


def started():
    """How many ranks torchrun has started; None without it."""
    return int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ else None


def mesh_sizes(args):
    """{"dp", "pp", "tp"}: what the command line does not say, of torchrun's ranks or else of 8."""
    sizes = {axis: getattr(args, axis) for axis in AXES}
    left = (started() or 8) // math.prod(n for n in sizes.values() if n) or 1
    for axis in ("tp", "pp"):
        sizes[axis] = sizes[axis] or 2 - left % 2
        left //= 1 if getattr(args, axis) else sizes[axis]
    sizes["dp"] = sizes["dp"] or left
    world = math.prod(sizes.values())
    if started() not in (None, world):
        found = f"{say(sizes.values())} is {world} ranks, and torchrun started {started()}"
        raise UsageError(f"{found}: use --dp {started()} --pp 1 --tp 1")
    return sizes


def experiment(lab, args):
    """The proof on all ranks, what they sent, the usual norms; "ranks" in the JSON: see prove()."""
    sizes = mesh_sizes(args)
    task, world = (sizes, args.microbatches, args.seed), math.prod(sizes.values())
    if started():
        reports = on_torchruns_ranks(lab, task)
    else:
        reports = on_ranks(world, prove_on_rank, lab, *task)
    nodes = 1 + max(report["node"] for report in reports)
    on = f"{world} ranks" + (f" of {nodes} nodes" if nodes > 1 else "")
    print(f"\nLLaMA on {on}, dp x pp x tp = {say(sizes.values())}, beside one device")
    failed = print_errors(lab, reports) + print_traffic(reports)
    print_norms(reports)
    held, whole = sum(report["held"] for report in reports), reports[0]["whole"]
    if not math.isclose(held, whole):
        failed.append(f"the ranks hold {held} of {whole} numbers")
    for rank, report in enumerate(reports):
        report["at"] = dict(lab.coordinates(rank, sizes))
        for key in ("traffic", "expected"):  # JSON has no tuples as keys
            report[key] = [[*place, *row] for place, row in sorted(report[key].items())]
    return {"mesh": sizes, "microbatches": args.microbatches, "ranks": reports, "failed": failed}


def print_errors(lab, reports):
    """A line for loss, norm and each kind of parameter; returns those that are off."""
    worst = {}
    for rank, report in enumerate(reports):
        for name, error in report["errors"].items():
            kind = SAME.get(name, name).replace("model.", "").removesuffix(".weight")
            kind = ".".join(part for part in kind.split(".") if not part.isdigit())
            shared = ", ".join(lab.copies_of(name)) if "." in name else "all"
            worst[kind] = max(worst.get(kind, (0, 0, shared)), (error, rank, shared))
    rows = [[kind, shared, f"{error:.1e}", rank] for kind, (error, rank, shared) in worst.items()]
    table(["", "the same on all ranks of", "off by at most", "on rank"], *rows)
    off = [(kind, error) for kind, (error, *_) in worst.items() if not error <= TOLERANCE]
    return [f"{kind} off by {error:.1e}" for kind, error in off]


def spread(numbers):
    return " to ".join(dict.fromkeys(map(str, (min(numbers), max(numbers)))))


def print_traffic(reports):
    """A line for each collective, its phase and its group; returns what is sent too much."""
    rows = [["phase", "what", "group", "groups x ranks", "calls", "bytes a rank", "as expected"]]
    keys = {key for report in reports for key in report["traffic"] | report["expected"]}
    for key in sorted(keys, key=lambda key: (PHASES.index(key[0]), key)):
        phase, op, name = key
        took_part = [report for report in reports if key in report["traffic"] | report["expected"]]
        calls, sent = zip(*(report["traffic"].get(key, (0, 0)) for report in took_part))
        lines = {tuple(report["groups"].get(name, ())) for report in took_part}
        size = f"{len(lines)} x {max(map(len, lines))}"
        if any(len({reports[rank]["node"] for rank in line}) > 1 for line in lines):
            size += ", across nodes"
        right = all(report["traffic"].get(key) == report["expected"].get(key) for report in reports)
        rows.append([phase, op, name, size, spread(calls), spread(sent), "yes" if right else "NO"])
    table(*rows)
    return [f"rank {rank}: {more}" for rank, r in enumerate(reports) for more in sent_too_much(r)]


def print_norms(reports, most=0.5):
    """The gradient norm as it is usually got wrong, and what clipping to `most` multiplies by.

    Without ASKED, which the reader is to predict.
    """
    clipped = f"clipped to {most}: gradients times"
    rows = [["the norm, computed", "lowest rank", "highest rank", clipped]]
    for text in filter(ASKED.__ne__, reports[0]["norms"]):
        norms = sorted(report["norms"][text] for report in reports)
        factors = dict.fromkeys(f"{min(1, most / norm):.4f}" for norm in (norms[0], norms[-1]))
        rows.append([text, f"{norms[0]:.5f}", f"{norms[-1]:.5f}", " to ".join(factors)])
    table(*rows)


DARK = COLOURS[0], COLOURS[2], COLOURS[5]  # of Okabe and Ito's colours: text on these is white


def draw(results, path):
    """For each collective of the step, which ranks do it together."""
    reports, sizes = results["ranks"], results["mesh"]
    traffic = [{tuple(row[:3]): row[3:] for row in report["traffic"]} for report in reports]
    keys = {key for rows in traffic for key in rows}
    keys = sorted(keys, key=lambda key: (PHASES.index(key[0]), key))
    size = 4.5 + 0.95 * len(reports), 1.9 + 0.42 * len(keys)
    with picture(path, [["step"]], size) as axes:
        draw_step(axes["step"], reports, traffic, keys, sizes)


def draw_step(axis, reports, traffic, keys, sizes):
    """A row for each collective of the step, a column for each rank."""
    for y, key in enumerate(keys):
        for rank, (report, rows) in enumerate(zip(reports, traffic)):
            if key in rows or key[1] == "send":
                draw_box(axis, rank, y, report["groups"].get(key[2], [rank]), key in rows)
        most = max(rows[key][1] for rows in traffic if key in rows)
        size = f"{most / 1024:.1f} KiB" if most > 99 else f"{most} bytes"
        axis.text(len(reports) + 0.4, y, size, va="center", ha="right")
    ticks = []
    for rank, report in enumerate(reports):
        places = [f"{axis_name} {n}" for axis_name, n in report["at"].items()]
        ticks.append("\n".join([f"rank {rank}", *places]))
    axis.set_xticks([*range(len(reports)), len(reports)], [*ticks, "a rank,\nat most"])
    names = [f"{phase}: {op.replace('_', '-')}, {name}" for phase, op, name in keys]
    axis.set_yticks(range(len(keys)), names)
    axis.set(xlim=(-0.5, len(reports) + 0.5), ylim=(max(1, len(keys)) - 0.5, -0.5))
    axis.xaxis.tick_top()
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)
    title = f"Who talks to whom in a step, dp x pp x tp = {say(sizes.values())}."
    axis.set_title(f"{title} In a row: one colour, one group", loc="left", pad=12)


def draw_box(axis, rank, y, ranks, sends):
    """A rank in a collective with these ranks: filled, or an outline where it only receives."""
    colour = COLOURS[ranks[0] % len(COLOURS)]
    ink = "white" if sends and colour in DARK else "black"
    look = {"color": colour if sends else "white", "edgecolor": colour, "linewidth": 2}
    axis.barh(y, 0.92, 0.8, rank - 0.46, **look)
    text = " ".join(map(str, ranks)) if len(ranks) <= 4 else f"{ranks[0]} to {ranks[-1]}"
    text = text if sends else "receives"
    axis.text(rank, y, text, ha="center", va="center", color=ink, fontsize=9)


def too_large(results):
    """The norm over all ranks over the right one."""
    right, *_ = norms = results["ranks"][0]["norms"]
    return norms[ASKED] / norms[right]


PREDICT = (
    "by what factor is the gradient norm too large, if the squares are summed over all "
    "ranks, those of dp included?",
    "sqrt(dp): the replicas have the same gradients, so their squares are counted dp times",
    too_large,
)


def axis_size(text):
    """A whole number of at least 1 that divides torchrun's ranks, for argparse."""
    size = positive(text)
    if (started() or size) % size:
        problem = f"use a divisor of the {started()} ranks that torchrun started, not {size}"
        raise argparse.ArgumentTypeError(problem)
    return size


def tp_size(text):
    """An axis_size over which the heads can be dealt out."""
    size = axis_size(text)
    try:
        finished.head_range(tiny_config(1), 0, size)
    except finished.Unusable as problem:  # which says which sizes to use
        raise argparse.ArgumentTypeError(problem) from None
    return size


def add_options(parser):
    """The lab's own options."""
    add = parser.add_argument
    dp = "replicas (what --pp and --tp leave of 8 ranks, or of torchrun's)"
    add("--dp", type=axis_size, help=dp)
    add("--pp", type=axis_size, help="stages (2)")
    add("--tp", type=tp_size, help="ranks that share a layer (2)")
    add("--microbatches", type=positive, default=3, help="of a replica, in a step (3)")
