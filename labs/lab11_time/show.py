"""What the finished lab 11 shows: the model against the runs, each part's share, and a plan."""

import argparse
import dataclasses
import math
import re
import statistics
from unittest import mock

from labs.kit.cli import positive
from labs.kit.harness import table
from labs.lab11_time.plan import ATTENTION, MEMORY, MODELS, both_mfus, draw_plan, plan
from labs.lab11_time.runs import (
    FIRST_GUESS,
    consistent,
    fit,
    half,
    judged,
    measured,
    read_runs,
    scored,
)

COLOURS = "#0072b2", "#56b4e9", "#009e73", "#cc79a7", "#e69f00", "#d55e00"
SLOW = 0.4  # seconds a microbatch: between the residuals of pipelines that wait and the others'


def ablation(lab, rows):
    """{what is left out: score()} of the constants as they are."""

    def unhidden(way, message, matmul, tp):
        return 3 * message if way == "column" else 2 * message

    def late(weights, dp, tp, zero, last_backward, cluster):
        return gradients(weights, dp, tp, zero, 0.0, cluster)

    gradients, none = lab.gradient_seconds, {"return_value": 0.0}
    functions = {
        "tensor parallel communication": ("exposed_seconds", none),
        "that matmuls hide some of it": ("exposed_seconds", {"side_effect": unhidden}),
        "gradients of data parallelism": ("gradient_seconds", none),
        "that the backward hides some of them": ("gradient_seconds", {"side_effect": late}),
        "the host's launches": ("host_gap", none),
    }
    infinite = ((64, math.inf), (128, math.inf))
    constants = {"memory traffic": {"memory": math.inf}, "attention": {"attention": infinite}}
    constants |= {"a hop between nodes": {"hop": 0.0}, "the spread over nodes": {"spread": 0.0}}
    constants |= {"what no formula explains": {"other": 0.0}}
    results = {"nothing": scored(lab, rows, lab.H100)}
    for what, (name, behaviour) in functions.items():
        with mock.patch.object(lab, name, **behaviour):
            results[what] = scored(lab, rows, lab.H100)
    for what, values in constants.items():
        results[what] = scored(lab, rows, dataclasses.replace(lab.H100, **values))
    return results


def pipelines(lab, rows):
    """Pipelines of 16 microbatches or more: [{"row", "slots", "residual", "ratio", "layer"}].

    In shorter steps what a step has once counts too much. slots: gradacc + pp - 1, so many times
    the time of a microbatch is 1F1B's. residual: seconds that a step took longer than predicted;
    ratio: times; layer: milliseconds a layer and slot.
    """
    runs = []
    for row in rows:
        pp, slots = int(row["pp"]), int(row["gradacc"]) + int(row["pp"]) - 1
        if pp > 1 and slots >= 16 + pp - 1 and consistent(row) and row["model"] != "80B":
            tokens = int(row["gbs"]) * 4096 / (8 * int(row["nodes"]))  # of a GPU
            predicted, took = tokens / lab.predict_run(row), tokens / measured(row)
            layer = 1000 * took / slots / lab.stage_layers(lab.MODELS[row["model"]], pp)[0]
            run = {"row": row, "slots": slots, "residual": took - predicted, "layer": layer}
            runs.append(run | {"ratio": took / predicted})
    return runs


def kind(run):
    """Which group of pipelines a run belongs to."""
    if run["row"]["nodes"] == "1":
        return "one node"
    if int(run["row"]["tp"]) > 8:
        return "several nodes, tp above 8"
    return f"several nodes, {'above' if run['residual'] / run['slots'] > SLOW else 'below'}"


# --------------------------------------------------------------------------------------------------
# The lab's own run
# --------------------------------------------------------------------------------------------------


WAITING = {  # groups of those that wait
    "pp 2": lambda row: row["pp"] == "2",
    "pp 4 and more": lambda row: row["pp"] != "2",
    "of these, 3B": lambda row: row["pp"] != "2" and row["model"] == "3B",
    "8B": lambda row: row["pp"] != "2" and row["model"] == "8B",
    "tp 1 and 2": lambda row: row["pp"] != "2" and row["tp"] in "12",
    "tp 4 and 8": lambda row: row["pp"] != "2" and row["tp"] in "48",
    "one sequence a microbatch": lambda row: row["pp"] != "2" and row["mbs"] == "1",
    "several": lambda row: row["pp"] != "2" and row["mbs"] != "1",
}


def score_row(name, result):
    return [name, *(f"{100 * value:.1f}%" for value in result.values())]


def show_judge(lab, rows):
    """Fit on one half, score on both: {"score": .., "ablation": ..}."""
    mine, judge = ([row for row in rows if judged(row) and half(row) == side] for side in (0, 1))
    fitted = fit(lab, mine, dataclasses.replace(lab.H100, **FIRST_GUESS))
    nothing = {"matmul": 794e12, "network": 50e9, "hop": 0.0, "host": 0.0}
    published = dataclasses.replace(lab.H100, **nothing, other=0.0)
    results = {f"fitted to, {len(mine)} runs": scored(lab, mine, lab.H100)}
    results[f"the judge, {len(judge)} runs"] = scored(lab, judge, lab.H100)
    results["the judge, fitted again now"] = scored(lab, judge, fitted)
    results["the judge, published numbers alone"] = scored(lab, judge, published)
    head = ["", "median error", "within 10%", "within 20%", "pairs in order", "picks within 5%"]
    print("\nWithout a pipeline, at most 32 nodes: tokens a second, predicted against measured")
    table(head, *(score_row(*item) for item in results.items()))
    names = [[name, getattr(lab.H100, name), getattr(fitted, name)] for name in lab.READ_OFF]
    table(["read off the runs", "the lesson has", "fitted again now"], *names)
    left_out = ablation(lab, judge)
    print("\nThe judge, with a part left out and nothing fitted again")
    table(["left out", *head[1:]], *(score_row(*item) for item in left_out.items()))
    return {"score": results, "judge": scored(lab, judge, lab.H100), "ablation": left_out}


def show_mfu(lab, rows):
    """What the runs' own MFU counts, against mfu()."""
    ratios, lines = {}, []
    for row in rows:
        if float(row["mfu_percent"]) >= 5:  # it has one decimal
            mine = lab.mfu(lab.MODELS[row["model"]], 4096, measured(row), 1, lab.H100.peak)
            group = row["model"], "pp 1" if row["pp"] == "1" else "pp > 1"
            ratios.setdefault(group, []).append(float(row["mfu_percent"]) / 100 / mine)
    for (name, stages), values in sorted(ratios.items()):
        model = lab.MODELS[name]
        twice = 1 + 6 * model.head_weights / sum(lab.flops_per_token(model, 4096))
        lines.append([name, stages, len(values), statistics.median(values), twice])
    print("\nThe runs' mfu_percent over mfu(): where is the embedding, a lookup, counted as well?")
    table(["model", "", "runs", "median ratio", "with the embedding"], *lines)


def show_pipelines(lab, runs):
    """What the residuals of pipelines say; returns {group: (a, b) of waiting()}."""
    groups, lines, found = {}, [], {}
    for run in sorted(runs, key=kind):
        groups.setdefault(kind(run), []).append(run)
    for name, group in groups.items():
        slots = [run["residual"] / run["slots"] for run in group]
        ratio = statistics.median(run["ratio"] for run in group)
        lines.append([name, len(group), ratio, f"{min(slots):.2f} to {max(slots):.2f}"])
    print(f"\nPipelines; above, below: {SLOW} s of residual for each of gradacc + pp - 1")
    table(["", "runs", "measured / predicted, median", "residual / (gradacc + pp - 1)"], *lines)
    lines = []
    for name, wanted in WAITING.items():
        some = [run for run in groups["several nodes, above"] if wanted(run["row"])]
        seen = [(int(r["row"]["gradacc"]), int(r["row"]["pp"]), r["residual"]) for r in some]
        found[name] = lab.waiting(seen)
        lines.append([name, len(seen), *found[name]])
    print("\nThose above: seconds = a x microbatches + b x (stages - 1)")
    table(["", "runs", "a", "b"], *lines)
    lines = []
    for tp in "1", "2", "4", "8", "16":
        below = [run for run in runs if run["row"]["tp"] == tp and run["row"]["mbs"] == "1"]
        below = [run for run in below if run["residual"] / run["slots"] < SLOW]
        several = [run["layer"] for run in below if run["row"]["nodes"] != "1"]
        one = [run["layer"] for run in below if run["row"]["nodes"] == "1"]
        line = [tp, len(several), statistics.median(several)]
        lines.append([*line, statistics.median(one) if one else "none"])
    print("\nThose below, one sequence a microbatch: milliseconds a layer and microbatch, median")
    table(["tp", "runs", "several nodes", "one node"], *lines)
    return found


def show_split(lab, args):
    """What fills a step of --split."""
    name, nodes, (dp, pp, tp) = args.split
    count = args.sequences
    model = MODELS[name]
    parts = lab.step_parts(model, lab.H100, dp, pp, tp, 1, count, args.length)
    seconds = sum(parts.values())
    speed = dp * count * args.length / seconds
    full, causal = both_mfus(lab, model, args.length, speed, dp * pp * tp)
    print(f"\n{name} on {nodes} nodes, dp {dp} x pp {pp} x tp {tp}, {count} microbatches of one")
    print(f"sequence: {seconds:.3f} s a step, {speed:,.0f} tokens/s, MFU {full:.1%}")
    print(f"({causal:.1%} if the half of attention that is masked does not count)")
    table(["part", "s", ""], *([key, x, f"{x / seconds:.0%}"] for key, x in parts.items()))
    return parts


def split_type(text):
    """MODEL:NODES:DPxPPxTP, a type for argparse."""
    form = re.fullmatch(r"([\w.-]+):(\d+):(\d+)x(\d+)x(\d+)", text)
    if not form or form[1] not in MODELS:
        say = f"{text}: MODEL:NODES:DPxPPxTP, such as 8B:2:4x1x4, of {', '.join(MODELS)}"
        raise argparse.ArgumentTypeError(say)
    nodes, dp, pp, tp = (int(number) for number in form.groups()[1:])
    model, say = MODELS[form[1]], None
    if dp * pp * tp != 8 * nodes or not nodes:
        say = f"{dp} x {pp} x {tp} is {dp * pp * tp}, and {nodes} nodes have {8 * nodes} GPUs"
    elif pp > model.layers:
        say = f"{pp} stages are more than the {model.layers} layers of {form[1]}"
    elif model.heads % tp:
        say = f"tp {tp} does not divide the {model.heads} heads of {form[1]}"
    if say:
        raise argparse.ArgumentTypeError(say)
    return form[1], nodes, (dp, pp, tp)


def add_options(parser):
    """The lab's own options."""
    add = parser.add_argument
    add("--split", type=split_type, metavar="MODEL:NODES:DPxPPxTP", help="show this step's parts")
    add("--plan", action="store_true", help="rank this project's strategies (10 to 30 s)")
    add("--model", choices=MODELS, default="llama-3.1-8b", help="of --plan (llama-3.1-8b)")
    add("--nodes", type=positive, default=2, help="of --plan, 8 GPUs each (2)")
    add("--gpu", choices=MEMORY, default="h100", help="of --plan (h100)")
    add("--attention", choices=ATTENTION, default="flash", help="of --plan (flash)")
    add("--length", type=positive, default=4096, help="tokens, of --plan and --split (4096)")
    add("--sequences", type=positive, default=16, help="a step's, of a replica (16)")


def experiment(lab, args):
    """The lab's results."""
    rows, results = read_runs(), {"failed": []}
    message = lab.BF16 * 4096 * lab.MODELS["3B"].hidden
    results["gather_ms"] = 1000 * lab.ring_seconds(message, 32, 8, lab.H100)
    if args.plan:
        judge = [row for row in rows if judged(row) and half(row) == 1]
        return results | {"plan": plan(lab, args, scored(lab, judge, lab.H100))}
    if args.split:
        return results | {"split": show_split(lab, args)}
    runs = pipelines(lab, rows)
    results |= show_judge(lab, rows)
    show_mfu(lab, rows)
    results["waiting"] = show_pipelines(lab, runs)
    dots = [(int(row["tp"]), lab.predict_run(row), measured(row)) for row in rows if judged(row)]
    bars = [(kind(run), run["residual"] / run["slots"]) for run in runs]
    return results | {"dots": dots, "residuals": bars}


PREDICT = (
    "how many milliseconds does an all-gather of 3B's hidden states take on 32 ranks of 4 nodes "
    "(4096 tokens, 3072 wide, bf16)?",
    "31 steps x 44.1 us, and 31/32 of 25.2 MB, each byte of which takes 1 / (8 x 36.7 GB/s) + "
    "3 x 0.42 ps; most of the time goes to steps, not to bytes",
    lambda results: results["gather_ms"],
)


def draw(results, path):
    """Predicted against measured, what each part buys, residuals; or what fills a step."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    if "plan" in results or "split" in results:
        rows = results.get("plan") or [{"strategy": "", "parts": results["split"], "fits": None}]
        figure, axis = pyplot.subplots(figsize=(10, 2 + len(rows) / 2), layout="constrained")
        draw_plan(axis, rows)
    else:
        figure, axes = pyplot.subplots(1, 3, figsize=(16, 5), layout="constrained")
        draw_dots(axes[0], results["dots"])
        draw_ablation(axes[1], results["ablation"])
        draw_residuals(axes[2], results["residuals"])
    for axis in figure.axes:
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def draw_dots(axis, dots):
    colours = dict(zip((1, 2, 4, 8, 16, 32), COLOURS))
    for tp, colour in colours.items():
        xs, ys = zip(*((x, y) for t, x, y in dots if t == tp))
        axis.plot(xs, ys, "o", color=colour, alpha=0.8, markersize=5, label=f"tp {tp}")
    ends = 200, 50000
    axis.plot(ends, ends, color="black", lw=1, label="as predicted")
    axis.fill_between(ends, [0.9 * x for x in ends], [1.1 * x for x in ends], color="0.88")
    axis.set(xscale="log", yscale="log", xlabel="predicted tokens/s a GPU", ylabel="measured")
    axis.set_title("No pipeline, up to 32 nodes (grey: within 10%)")
    axis.legend()


def draw_ablation(axis, ablation):
    names = list(ablation)
    medians = [100 * ablation[name]["median"] for name in names]
    axis.barh(names, medians, color=["0.4"] + ["#0072b2"] * (len(names) - 1))
    for row, value in enumerate(medians):
        axis.text(value + 0.2, row, f"{value:.1f}", va="center")
    axis.invert_yaxis()
    axis.set(xlabel="median error, %", title="The judge, with a part left out")


def draw_residuals(axis, residuals):
    names = sorted({name for name, _ in residuals})
    values = [[max(0.0, x) for other, x in residuals if other == name] for name in names]
    bins = [0.05 * i for i in range(42)]
    axis.hist(values, bins, stacked=True, label=names, color=COLOURS[: len(names)])
    axis.set(xlabel="residual, s for each of gradacc + pp - 1", ylabel="runs")
    axis.set_title("Pipelines: longer than predicted by")
    axis.legend()
