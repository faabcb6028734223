"""What the finished lab 5 shows: every family by its plan, and what sequence parallelism saves."""

import argparse
import os
import sys
import tempfile
from pathlib import Path

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import SequenceParallel

from labs.kit.cli import UsageError
from labs.kit.harness import Wrong, on_ranks, table
from labs.kit.pictures import BLUE, GREEN, GREY, ORANGE, RED, SKY, picture
from labs.kit.tools import Kept
from labs.lab5_tp_plans import lesson as finished  # for an option, before there is a learner's
from labs.lab5_tp_plans.models import FAMILIES, random_ids, short, step, tiny_model
from labs.lab5_tp_plans.referee import (
    LIMIT,
    NEMO,
    OURS,
    REFEREED,
    STRINGS,
    as_plan,
    judge,
    make_folder,
    print_verdicts,
    referee,
    tp_or_sp,
    verdict_of,
)


def plain_norms_plan(lab, model):
    """Llama's plan with torch's SequenceParallel: gathered only where a projection needs it."""
    plan = lab.llama_plan(model, True)
    plan |= {name: SequenceParallel() for name in plan if name.endswith("norm")}
    return plan | {"lm_head": lab.sharded_logits(Shard(1))}


def judge_all(group, lab, cases):
    """This rank's row of each (folder, plan, sequence_parallel)."""
    return [judge(group, lab, *case) for case in cases]


def asked_for(args):
    """([(model, plan, sequence_parallel)], whether they are of one model) that args ask for."""
    if args.model or args.sp or args.plan or args.hf_plan:
        model = args.model or "llama"
        cases = [(model, args.plan or (STRINGS if args.hf_plan else OURS), args.sp)]
        return cases + [(model, NEMO, args.sp)] * (model in ("qwen3", "gemma3")), True
    cases = [(family, OURS, sp) for family in FAMILIES for sp in (False, True)]
    cases += [(family, STRINGS, False) for family in ("qwen3", "phi3")]
    cases += [(family, NEMO, sp) for family in ("qwen3", "gemma3") for sp in (False, True)]
    return cases, False


def families(lab, args):
    """Which plan each family gets and what comes out; returns (rows, what is off)."""
    cases, single = asked_for(args)
    try:
        with tempfile.TemporaryDirectory() as scratch:
            inputs = [(make_folder(model, scratch), *case) for model, *case in cases]
            found = on_ranks(2, judge_all, lab, inputs, timeout=120)
    except Wrong as wrong:
        _, refused, message = wrong.found.partition("ValueError: ")
        if args.plan and refused:  # the user's plan, not the lab's
            raise UsageError(message) from None
        raise
    rows = [{"model": model} | verdict_of(ranks) for (model, *_), ranks in zip(cases, zip(*found))]
    if single:
        print(f"\nThe plan of {cases[0][0]}{' with sequence parallelism' if args.sp else ''}")
        print(f"  chosen: {rows[0]['chosen']}")
        table(["module", "style"], *rows[0]["entries"].items())
    print_verdicts(rows)
    return rows, [found for found in map(what_is_off, rows) if found]


def what_is_off(row):
    """What of a row is not as the lab says: NeMo's q_norm and k_norm are wrong, all else right."""
    norms = ("q_norm.weight", "k_norm.weight") if row["plan"] == NEMO else ()
    others = [name for name in row["wrong"] if not name.endswith(norms)]
    if norms and not row["wrong"]:
        others = ["no gradient is wrong"]
    return f"{row['model']} {tp_or_sp(row)}, {row['plan']}: {', '.join(others)}" if others else ""


MEASURED = {"hidden_size": 128, "intermediate_size": 448, "head_dim": 8, "num_attention_heads": 16}
MEASURED |= {"num_key_value_heads": 8, "vocab_size": 64}  # the proportions of Llama 3 8B
TP, GATHERED, PLAIN = WAYS = "TP", "SP, gathered after the norm", "SP, plain"


def saved_and_sent(group, lab):
    """{way: {"saved", "forward", "backward"}} of a Llama; saved: without lm_head and loss."""
    mesh, ids, found = DeviceMesh.from_group(group, "cpu"), random_ids(0, 128, 64), {}
    for way in WAYS:
        model = tiny_model("llama", **MEASURED)
        plan = lab.llama_plan(model, way == GATHERED)
        lab.parallelize(model, mesh, plain_norms_plan(lab, model) if way == PLAIN else plan)
        with Kept(*model.parameters()) as saved:
            out = model.model(input_ids=ids, use_cache=False)  # whose graph keeps them
        found[way] = {"saved": saved.bytes}
        del out
        _, _, forward, backward = step(model, ids)
        found[way] |= {"forward": forward.ops, "backward": backward.ops}
    return found


def memory(lab):
    """What SP saves, in two styles, beside what is claimed of it; returns (rows, what is off)."""
    many = {world: on_ranks(world, saved_and_sent, lab, timeout=120)[0] for world in (2, 4)}
    rows, off = [], []
    lines = [["ranks", "way", "bytes", "less than TP by", "claimed", "forward", "backward"]]
    for world, ways in many.items():
        for way, found in ways.items():
            saving = 1 - found["saved"] / ways[TP]["saved"]
            claim = 0.5 * (1 - 1 / world) if way != TP else 0.0
            rows.append({"ranks": world, "way": way, "saving": saving, "claim": claim, **found})
            messages = short(found["forward"]), short(found["backward"])
            lines.append([world, way, found["saved"], f"{saving:.1%}", f"{claim:.2%}", *messages])
        tp, gathered, plain = (ways[way]["saved"] for way in WAYS)
        if not plain < gathered < tp:
            found = f"plain SP keeps {plain} bytes, gathered after the norm {gathered}, TP {tp}"
            off.append(f"{world} ranks: {found}")
        if calls(ways[GATHERED]) >= calls(ways[PLAIN]):
            sent = f"{calls(ways[GATHERED])} messages, plain SP {calls(ways[PLAIN])}"
            off.append(f"{world} ranks: gathering after the norm takes {sent}")
    print("\nWhat autograd keeps on a rank of a Llama's layers, and the messages of a step")
    table(*lines)
    print("\n  claimed: 0.5 (1 - 1/P), half of it all divided by P: a model that knows no style")
    return rows, off


def calls(found, ops=None):
    """How many messages a step takes, of some kinds or of all."""
    sent = [item for phase in ("forward", "backward") for item in found[phase].items()]
    return sum(count for op, (count, _) in sent if ops is None or op in ops)


def experiment(lab, args):
    """The families, and what sequence parallelism saves and sends."""
    (rows, wrong), (saved, more) = families(lab, args), memory(lab)
    return {"failed": wrong + more, "families": rows, "memory": saved}


KINDS = {NEMO: RED, STRINGS: GREEN, OURS: BLUE}


def draw(results, path):
    """Left: whose gradients are right. Right: what SP saves, beside the claim."""
    with picture(path, [["errors", "savings"]], (12, 4.8), width_ratios=(1.25, 1)) as axes:
        draw_errors(axes["errors"], results["families"])
        draw_savings(axes["savings"], results["memory"])


def draw_errors(axis, rows):
    labels = [f"{row['model']} {tp_or_sp(row)}" for row in rows]
    names = list(dict.fromkeys(labels))
    look = {"linestyle": "none", "marker": "o", "markersize": 8, "alpha": 0.85}
    for kind in dict.fromkeys(row["plan"] for row in rows):
        picked = [(label, row) for label, row in zip(labels, rows) if row["plan"] == kind]
        shift = 0.35 * (kind == STRINGS)  # no point hides another
        places = [names.index(label) + shift for label, _ in picked]
        errors = [row["gradient"] for _, row in picked]
        axis.plot(errors, places, color=KINDS.get(kind, BLUE), label=kind, **look)
    axis.axvline(LIMIT, color=GREY, lw=1, ls="--")
    axis.text(LIMIT, len(names) - 0.4, " limit", color=GREY, va="center")
    axis.set(xscale="log", yticks=range(len(names)), yticklabels=names, ylim=(len(names), -0.6))
    axis.set(xlabel="largest relative error of a parameter's gradient")
    axis.set_title("Plans: every gradient against one device", loc="left")
    axis.legend(frameon=False, loc="lower right")


def draw_savings(axis, rows):
    worlds = sorted({row["ranks"] for row in rows})
    for shift, (way, color) in zip((-0.3, 0), {GATHERED: SKY, PLAIN: ORANGE}.items()):
        savings = [100 * row["saving"] for row in rows if row["way"] == way]
        places = [x + shift for x in range(len(worlds))]
        bars = axis.bar(places, savings, 0.28, color=color, label=way)
        axis.bar_label(bars, fmt="%.0f%%", label_type="center")
    for x, world in enumerate(worlds):
        axis.hlines(50 * (1 - 1 / world), x - 0.5, x + 0.2, color="black", lw=2)
    axis.plot([], [], "k-", lw=2, label="claimed: 0.5 (1 - 1/P)")
    places = [x - 0.15 for x in range(len(worlds))]
    axis.set_xticks(places, [f"{world} ranks" for world in worlds])
    axis.set(ylabel="less than TP, %", ylim=(0, 1.3 * axis.get_ylim()[1]))
    axis.set_title("Saved activations: it depends on the norm's style", loc="left")
    axis.legend(frameon=False, loc="upper left")


PREDICT = (
    "how many all-gathers and reduce-scatters does a step of a 2-layer Llama take under SP, "
    "forward and backward together, if x is gathered after each norm?",
    "4 (2 L + 1): a layer has two blocks, embed_tokens and lm_head count as one more; each "
    "block has an all-gather and a reduce-scatter, and the backward has as many",
    lambda results: calls(
        next(row for row in results["memory"] if row["way"] == GATHERED),
        ("all_gather", "reduce_scatter"),
    ),
)


def plan_path(text):
    """The import path of a plan, for argparse."""
    sys.path.insert(0, os.getcwd())
    try:
        plan = finished.load_plan(text)
        if not callable(plan):
            as_plan(plan, text)
    except ValueError as problem:
        raise argparse.ArgumentTypeError(problem) from None
    return text


def model_path(text):
    """A family, or for --referee a folder with a config.json, for argparse."""
    if text not in REFEREED and not Path(text, "config.json").is_file():
        choose = f"choose from {', '.join(REFEREED)}, or a folder with a config.json"
        raise argparse.ArgumentTypeError(f"invalid choice: {text!r} ({choose})")
    return text


def add_options(parser):
    """The lab's own options: without any of them, every family is run."""
    parser.add_argument("--model", type=model_path, help="one family, its plan printed")
    one = parser.add_mutually_exclusive_group()
    one.add_argument("--sp", action="store_true", help="with sequence parallelism")
    one.add_argument("--hf-plan", action="store_true", help="Hugging Face's plan, which has none")
    parser.add_argument("--plan", type=plan_path, metavar="PATH", help="import path of a plan")
    words = "a verdict on everyone's plans, or on --plan; --model may be a folder"
    parser.add_argument("--referee", action="store_const", const=referee, help=words)
