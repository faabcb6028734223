"""Draws what `--json` of the four strategy scripts and of three more has written.

    torchrun --nproc_per_node=2 tp.py --mode all --json tp.json
    python results/plot.py tp.json              # draws tp.png
    python results/plot.py tp.json -o tp.pdf    # or .svg: any suffix that matplotlib knows

A panel for each mode that ran: the errors of correctness tensor by tensor, the learning curves, the
traffic measured beside the expected. Of labs/schedules.py the timeline of a schedule of pp.py,
measured or simulated. Of four_layouts.py the attention block of its --layout: what each rank holds,
step by step, and who made it. Of oom_search.py the lengths, and what fills the memory there.
"""

import argparse
import json
import math
import os
from pathlib import Path

import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import EngFormatter, MaxNLocator

BLUE, ORANGE, GREEN, PINK = "#0072B2", "#E69F00", "#009E73", "#CC79A7"  # for the colour-blind too
SKY, RED, GREY = "#56B4E9", "#D55E00", "#777777"
RANKS = [BLUE, ORANGE, GREEN, PINK, SKY, RED, "#F0E442", "#999999"]
KINDS = {"shard": ("v", GREY), "logits": ("^", PINK), "loss": ("D", ORANGE), "grad": ("o", BLUE)}
KINDS |= {"grad_norm": ("P", "black"), "weight": ("s", GREEN)}  # of tensors: marker, colour
KINDS |= {"large": ("*", RED)}  # a gradient where logits are 512 times as large
ACTIONS = {"F": ("forward", SKY, ""), "B": ("backward", ORANGE, "//")}  # meaning, colour, hatch
ACTIONS |= {"W": ("gradients of weights", GREEN, "")}
VERDICT = {True: "PASS", False: "FAIL"}
LEGEND = {"ncols": 4, "frameon": False, "fontsize": 9}
BELOW = LEGEND | {"loc": "upper center", "bbox_to_anchor": (0.5, -0.13)}


def draw_errors(axis, result, world):
    """Errors on a log axis, with strips at its ends for what it cannot show: 0, not a number."""
    tensors = result["tensors"]
    sizes = [x for t in tensors for x in (t["relative_error"], t["limit"]) if x] or [1e-9]
    low, high = math.floor(math.log10(min(sizes))), math.ceil(math.log10(max(sizes)))
    half = 10 ** max(0.045 * (high - low), 0.15)  # of a strip
    zero, no_number = 10**low / half, 10**high * half
    ticks = {zero: "exactly 0"}
    if any(t["relative_error"] is None for t in tensors):
        ticks[no_number] = "not a number"
    for place in ticks:
        axis.axhspan(place / half, place * half, color="0.92", lw=0)
    step = 1 + (high - low) // 9
    ticks |= {10.0**e: f"$10^{{{e}}}$" for e in range(low + 1, high + (len(ticks) == 1), step)}

    points, failed = {}, []  # {(marker, colour): [(tensor, place on the axis)]}
    for i, t in enumerate(tensors):
        error, (marker, colour) = t["relative_error"], KINDS[t["kind"]]
        place = no_number if error is None else error or zero
        marker = "x" if error is None else marker if error else "|"
        points.setdefault((marker, colour), []).append((i, place))
        failed += [] if t["passed"] else [(i, place)]
    for (marker, colour), places in points.items():
        axis.plot(*zip(*places), marker, color=colour, ms=8 if marker in "|x" else 4)
    for kind in dict.fromkeys(t["kind"] for t in tensors):
        axis.plot([], [], KINDS[kind][0], color=KINDS[kind][1], label=kind.replace("_", " "))
    begins, ends = zip(*((i - 0.6, i + 0.6) for i in range(len(tensors))))
    limits = [math.nan if t["limit"] is None else t["limit"] or zero for t in tensors]
    axis.hlines(limits, begins, ends, "black", label="at most")  # none: judged with all of its kind
    if failed:
        uncovered = sum(abs(t["coverage"] - 1) > 1e-9 for t in tensors)
        label = f"failed ({len(failed)}" + f"; coverage ≠ 1: {uncovered}" * bool(uncovered) + ")"
        axis.plot(*zip(*failed), "o", ms=10, mfc="none", mec=RED, label=label)
    axis.set(yscale="log", xlabel="tensors, in the order of computation")
    axis.set_ylabel("error relative to one device")
    axis.set_yticks(list(ticks), list(ticks.values()))
    axis.minorticks_off()
    axis.set_ylim(zero / half, no_number * half if no_number in ticks else None)
    axis.set_title(f"correctness, {len(tensors)} tensors: {VERDICT[result['passed']]}", loc="left")
    axis.legend(**BELOW)


def draw_losses(axis, result, world):
    one = result["loss_reference"], "one device", {"color": ORANGE, "lw": 6, "alpha": 0.5}
    many = result["loss"], f"{world} rank{'s' * (world > 1)}", {"color": BLUE}
    for losses, label, look in (one, many):
        if None in losses:
            label += f" (not a number from step {losses.index(None)})"
        axis.plot([math.nan if x is None else x for x in losses], label=label, **look)
    axis.set(xlabel="step", ylabel="loss, nats a token")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.set_title(f"learning: {VERDICT[result['passed']]}", loc="left")
    axis.legend(**BELOW)


def draw_traffic(axis, result, world):
    traffic, names = result["traffic"], []
    for key, down, colour in ("bytes", -0.2, BLUE), ("expected_bytes", 0.2, SKY):
        places = [i + down for i in range(len(traffic))]
        label = "measured" if key == "bytes" else "expected"
        bars = axis.barh(places, [t[key] for t in traffic], 0.38, color=colour, label=label)
        axis.bar_label(bars, [f"{t[key]:,} B" for t in traffic], padding=3, fontsize=8)
    for t in traffic:
        some = t.get("ranks", range(world))  # those that take part; all goes without saying
        who = "" if len(some) == world else f" (rank {', '.join(map(str, some))})"
        names.append(f"{t['phase']}\n{t['op']}{who}")
    axis.set_yticks(range(len(names) or 1), names or ["nothing\nis sent"], fontsize=9)
    axis.set_xlabel("the full tensor of a collective, summed over calls")
    axis.xaxis.set_major_formatter(EngFormatter("B"))
    axis.xaxis.set_major_locator(MaxNLocator(4))
    axis.set_xlim(0, 1.4 * max((bar.get_width() for bar in axis.patches), default=10))  # for labels
    axis.invert_yaxis()
    axis.set_title(f"message bytes per rank and step: {VERDICT[result['passed']]}", loc="left")
    if traffic:
        axis.legend(**BELOW)


def draw_timeline(axis, result, simulated):
    """Ranks downwards, time to the right; rows are rank, kind, stage, microbatch, begin, end."""
    title, unit, scale = "measured timeline", "ms", 1000
    if simulated:
        title = f"simulated timeline: {VERDICT[result['passed']]}"
        unit, scale = "in forwards of a rank's layers on one microbatch", 1
    rows, in_flight = result["timeline"], result["in_flight"]
    last, widest = max(row[5] for row in rows), max(len(str(row[3])) for row in rows)
    chunks = 1 + max(row[2] for row in rows) // len(in_flight)  # stages of a rank
    points = 0.9 * 72 * axis.figure.get_figwidth() / last  # that a unit of time takes
    for rank, kind, stage, microbatch, begin, end in rows:
        _, colour, hatch = ACTIONS[kind]
        look = {"alpha": 1 - 0.6 * (stage // len(in_flight)) / chunks, "ec": "white", "lw": 0.6}
        axis.barh(rank, end - begin, 0.9, begin, color=colour, hatch=hatch, **look)
        if points * (end - begin) >= 5 * widest:  # a digit of 8 points is 5 wide
            axis.text((begin + end) / 2, rank, microbatch, ha="center", va="center", fontsize=8)
    looks = [look for kind, look in ACTIONS.items() if kind in {row[1] for row in rows}]
    looks += [("lighter: the rank's later stages", "0.85", "")] * (chunks > 1)
    keys = [Patch(label=m, fc=c, hatch=h, ec="white") for m, c, h in looks]
    axis.legend(handles=keys, loc="lower right", bbox_to_anchor=(1, 1), **LEGEND)
    axis.set(xlabel=f"time, {unit}", xlim=(0, last))
    axis.xaxis.set_major_formatter(lambda time, _: f"{time * scale:g}")
    names = [f"rank {r}\n≤ {n} in flight" for r, n in enumerate(in_flight)]
    axis.set_yticks(range(len(names)), names)
    axis.invert_yaxis()
    formula = result["bubble_formula"]
    formula = "" if formula is None else f" (formula: {formula:.1%})"
    axis.set_title(f"{title}, bubble {result['bubble']:.1%}{formula}", loc="left")


def layout_columns(results):
    """The attention block: (title, placement, who made what each rank has), a column a step."""
    steps = results["layouts"][results["layout"]]["steps"]
    P, columns, before = results["tp"], [], None
    names = ["norm 1", "enter attention", "qkv", "qkv of heads", "attention of heads", "attention"]
    for name in [*names, "o", "leave attention"]:
        if name not in steps:
            continue
        step = steps[name]
        placement, move = step["placement"], (step["moved_by"] or ["nothing"])[0]
        made = np.full((P, results["seq"], results["heads"]), np.nan)  # NaN: not on this rank
        for r, ends in enumerate(step["slices"]):
            part = slice(None) if ends == "all" else slice(*map(int, ends.split(":")))
            where = (slice(None), part) if placement == "Shard(2)" else part
            made[r][where] = P if placement == "Replicate" else r
        if move.endswith(("all_gather", "all_to_all")):  # a piece from each rank
            made = np.where(np.isnan(made), np.nan, np.fmax.reduce(before))
        if name == "attention" and move.endswith("send"):  # round the ring, before attention
            for i in range(1, P):
                title = f"send {i} \u2192\nkeys, values"
                columns.append((title, placement, np.roll(made, i, 0)))
            move = "nothing"
        if not (name == "enter attention" and move == "nothing"):  # TP's way in moves nothing
            title = name if move == "nothing" else f"{move} \u2192\n{name}"
            columns.append((title, placement, made))
        before = made
    return columns


def draw_layout(results):
    """A row a rank, a column a step; in each frame tokens downwards and features to the right."""
    P, columns = results["tp"], layout_columns(results)
    if len(RANKS) < P:
        raise ValueError(f"colours are for {len(RANKS)} ranks, not for {P}")
    colours = [*RANKS[:P], "#DDDDDD"]
    figure = Figure(figsize=(1 + 1.4 * len(columns), 2 + 1.2 * P), layout="constrained")
    axes = figure.subplots(P, len(columns), squeeze=False)
    for (title, placement, images), column in zip(columns, axes.T):
        column[0].set_title(title, fontsize=9)
        column[-1].set_xlabel("features", fontsize=8)
        look = {"vmin": 0, "vmax": P, "alpha": 0.5 if placement == "Partial" else 1}
        for r, axis in enumerate(column):
            axis.imshow(images[r], ListedColormap(colours), aspect="auto", **look)
            axis.set(xticks=[], yticks=[])
            axes[r, 0].set_ylabel(f"rank {r}\ntokens", fontsize=9)
    labels = [*(f"made by rank {r}" for r in range(P)), "Replicate"]
    keys = [Patch(facecolor=colour, label=label) for colour, label in zip(colours, labels)]
    keys.append(Patch(facecolor=colours[0], alpha=0.5, label="pale: Partial, an addend"))
    figure.legend(handles=keys, loc="outside lower center", ncols=4, fontsize=9, frameon=False)
    title = f"--layout {results['layout']} --tp {P}: what each rank holds in the attention block"
    figure.suptitle(title, fontsize=11)
    return figure


def draw_limits(results):
    """Lengths as bars, and beside them the parts of the memory that they take."""
    found = []
    for row in results["results"]:
        name = f"{row['strategy']}, {row['nproc']} rank{'s' * (row['nproc'] > 1)}"
        for entry in row.get("at", [row]):
            tokens = entry["length"] if "at" in row else row["longest"]
            if tokens and entry["breakdown"]:
                label = f"{name}, {tokens:,} tokens" if "at" in row else name
                found.append((label, tokens, entry["breakdown"]))
    names, tokens, parts = zip(*found)
    figure = Figure(figsize=(13, 2.2 + 0.32 * max(len(found), 6)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    left.bar_label(left.barh(names, tokens), [f"{n:,}" for n in tokens], padding=3)
    asked = any("at" in row for row in results["results"])
    title = "tokens in the sequence" if asked else "longest sequence in tokens"
    how = results["results"][0]["how"]
    left.set(title=f"{title}, {how}", xticks=[], xlim=(0, 1.25 * max(tokens)))  # room for labels
    begin = np.zeros(len(found))
    for part, colour in zip(parts[0], [BLUE, ORANGE, "#999999", GREEN, PINK, SKY, RED, "#F0E442"]):
        sizes = np.array([size[part] for size in parts]) / 2**30
        if sizes.any():
            right.barh(names, sizes, left=begin, color=colour, label=part)
        begin += sizes
    room = results["memory_bytes"] / 2**30
    right.axvline(room, color="black", lw=1, ls="--")
    right.invert_yaxis()
    right.set(title="what fills the memory there", xlabel="GiB (dashed: all there is)")
    figure.legend(loc="outside lower center", ncols=8, frameon=False)
    what = f"{results['model']}, {results['dtype']}, batch {results['batch']}, {room:.1f} GiB"
    figure.suptitle(f"{what}, --loss {results['loss']}, --recompute {results['recompute']}")
    return figure


PANELS = {"correctness": draw_errors, "learning": draw_losses, "benchmark": draw_traffic}


def picture(results):
    """The matplotlib Figure of one run's JSON; LookupError or the like where it is none."""
    if "layouts" in results:
        return draw_layout(results)
    if "results" in results:
        return draw_limits(results)
    simulated = isinstance(results.get("schedule"), dict)  # of a mode; else it is an option's value
    timed = results["schedule"] if simulated else results.get("bubble", {})
    world = timed["ranks"] if simulated else results["world_size"]
    panels = [mode for mode in PANELS if mode in results]
    wide = max(1, len(panels))
    layout = [(panels, 5)] if panels else []
    layout += [(["timeline"] * wide, 1.5 + 0.4 * world)] if "timeline" in timed else []
    rows, heights = zip(*layout)
    width = max(6.3 * wide, 12 if "timeline" in timed else 0)
    figure = Figure((width, 0.4 + sum(heights)), layout="constrained")
    axes = figure.subplot_mosaic(rows, height_ratios=heights)
    for mode in panels:
        PANELS[mode](axes[mode], results[mode], world)
    if "timeline" in timed:
        draw_timeline(axes["timeline"], timed, simulated)
    words = [f"{world} rank{'s' * (world > 1)}"]
    names = () if simulated else ("schedule", "model", "dtype", "backend", "device")
    words += [timed["schedule"]] if simulated else []
    words += [str(results[name])[-40:] for name in names if name in results]  # a model has a path
    sizes = ("microbatches",) if simulated else ("batch", "length", "microbatches")
    words += [f"{size} {results[size]}" for size in sizes if size in results]
    figure.suptitle(f"{results['script']}: {', '.join(words)}")
    return figure


def main(argv=None):
    parser = argparse.ArgumentParser(description="Draws what --json of a script wrote.")
    parser.add_argument("run", metavar="RUN.json", type=Path)
    parser.add_argument("-o", metavar="PNG", type=Path, help="the picture (default: RUN.png)")
    parser.error = lambda message: parser.exit(2, f"error: {message}\n")
    args = parser.parse_args(argv)
    path, kinds = args.o or args.run.with_suffix(".png"), Figure().canvas.get_supported_filetypes()
    if path.suffix[1:] not in kinds:
        parser.error(f"{path}: not a kind of picture; {', '.join(sorted(kinds))} are")
    draft = f"{path}.draft{os.getpid()}"
    try:
        figure = picture(json.loads(args.run.read_bytes(), parse_constant=lambda name: None))
        figure.savefig(draft, format=path.suffix[1:], dpi=130, bbox_inches="tight")
        os.replace(draft, path)
    except OSError as problem:
        parser.error(f"{problem.strerror}: {str(problem.filename).partition('.draft')[0]}")
    except (LookupError, TypeError, ValueError, AttributeError) as problem:
        parser.error(f"{args.run} is not what --json of a script wrote: {repr(problem)[:70]}")
    finally:
        if os.path.exists(draft):
            os.remove(draft)


if __name__ == "__main__":
    main()
