"""Which strategy, how fast, and does it fit? This project's strategies by lab 11's model of time.

Called by labs/experiments/lab11.py (--plan). A step is `sequences` sequences of `length` tokens,
one at a time through all GPUs (PP: as its microbatches), layers recomputed, and an AdamW step.
Messages are those that the scripts send, one after the other, and nothing hides them.
"""

import argparse
import dataclasses
import json
import re
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path

from experiments.runs import half, judged, measured, read_runs, scored
from harness import LABS, load, table

lesson = load(LABS / "lab11_time.py")
MODELS = lesson.MODELS | {  # and presets whose heads are hidden / heads wide: not qwen3-0.6b's
    "mistral-7b": lesson.Model(32, 4096, 32, 8, 14336, 32768, False),
    "qwen3-8b": lesson.Model(36, 4096, 32, 8, 12288, 151936, False),
    "smollm3-3b": lesson.Model(36, 2048, 16, 4, 11008, 128256, True),
}
COLOURS = {"matmul": "#0072b2", "attention": "#56b4e9", "memory": "#009e73"}
COLOURS |= {"communication": "#d55e00", "host": "#cc79a7", "bubble": "0.8"}
COLOURS |= {"gradients": "#e69f00", "optimizer": "#f0e442", "other": "0.4"}
STRATEGIES = {  # in the lesson: (what people call it, oom_search.py's arguments)
    "tp": ("TP", ["tp"]),
    "sp": ("Megatron SP", ["sp_megatron"]),
    "ulysses": ("Ulysses", ["sp_ulysses"]),
    "ulysses_sharded": ("Ulysses, sharded weights", ["sp_ulysses", "--shard-weights"]),
    "pp": ("PP, 1F1B", ["pp", "--schedule", "1f1b"]),
}
MEMORY = {"h100": 2.9e12, "h200": 2.9e12 * 4.8 / 3.35}  # bytes/s; the H200 is an H100 otherwise
AGAIN = 4 / 3  # a recomputed layer: a forward more beside the three of forward and backward


def cluster_of(lab, gpu):
    return dataclasses.replace(lab.H100, memory=MEMORY[gpu])


def why_not(model, strategy, gpus):
    """What keeps a strategy from running, or None."""
    if strategy == "pp" and gpus > model.layers:
        return f"more stages than its {model.layers} layers"
    if strategy != "pp" and model.heads % gpus:
        return f"{gpus} does not divide {model.heads} heads"
    return None


def message_seconds(lab, op, calls, size, gpus, cluster):
    """`calls` messages of `size` bytes in all, over all gpus."""
    in_node, one = min(gpus, cluster.node), size / calls
    inside = gpus <= cluster.node
    if op == "send":
        return size / (cluster.nvlink if inside else cluster.network)
    if op == "all_to_all":  # a piece to each rank: in the node and out of it at the same time
        near = one * (in_node - 1) / gpus / cluster.nvlink
        far = 0 if inside else one * (gpus - in_node) / gpus / cluster.network + cluster.hop
        return calls * max(near, far)
    ring = lab.ring_seconds(one, gpus, in_node, cluster)
    return calls * ring * (2 if op == "all_reduce" else 1)


def rank_parts(lab, model, strategy, layers, head, gpus, length, cluster):
    """{part: seconds} of a sequence on a rank with so many layers (and the head)."""
    tp = gpus if strategy in ("tp", "sp") else 1
    tokens = -(-length // gpus) if strategy.startswith("ulysses") else length  # padded
    parts = lab.layer_parts(model, tokens, length, tp, cluster)
    if strategy == "tp":  # norms and residual sums of all tokens, on every rank: 22 passes
        unsharded = 22 * lab.BF16 * tokens * model.hidden * (1 - 1 / tp)
        parts = lab.add_up(parts, {"memory": unsharded / cluster.memory})
    parts = {name: layers * seconds for name, seconds in parts.items()}
    if head:
        parts = lab.add_up(parts, lab.head_parts(model, tokens, tp, cluster))
    del parts["communication"]  # nanotron's, which hides some of it
    parts = {name: AGAIN * seconds for name, seconds in parts.items()}
    return parts | {"host": lab.host_gap(sum(parts.values()), AGAIN * layers * cluster.host)}


def sequence_parts(lab, model, strategy, *setting):
    """The same of the slowest rank; setting: gpus, length, cluster."""
    gpus, ranks = setting[0], [(model.layers, True)]
    if strategy == "pp":  # pp.py's stages: the first hold the layers that are left over
        ranks = [(-(-model.layers // gpus), gpus == 1), (model.layers // gpus, True)]
    works = [rank_parts(lab, model, strategy, *rank, *setting) for rank in ranks]
    return max(works, key=lambda parts: sum(parts.values()))


def strategy_parts(lab, model, strategy, gpus, length, sequences, cluster):
    """{part: seconds} of a step."""
    parts = sequence_parts(lab, model, strategy, gpus, length, cluster)
    each, once = 0.0, 0.0
    for op, calls, size in lab.strategy_messages(model, strategy, gpus, length):
        seconds = message_seconds(lab, op, calls, size, gpus, cluster)
        if strategy == "ulysses" and op == "all_reduce":
            once = seconds  # the gradients, when the step's sequences are done
        else:
            each += seconds
    parts["communication"] = each
    stages = gpus if strategy == "pp" else 1
    work, bubble = lab.pipeline_seconds(sum(parts.values()), stages, sequences)
    parts = {name: part * sequences for name, part in parts.items()}
    tables = (1 if model.tied else 2) * model.head_weights
    weights = model.layers * model.layer_weights + tables  # Ulysses updates all on every rank
    shards = 1 if strategy == "ulysses" else gpus
    parts["optimizer"] = lab.optimizer_seconds(weights / shards, 1, 0, cluster)
    return parts | {"bubble": bubble, "gradients": once, "other": cluster.other}


def config_of(model):
    """A lesson's model as the config.json of a LLaMA, which oom_search.py and the scripts read."""
    sizes = {"num_hidden_layers": model.layers, "hidden_size": model.hidden}
    sizes |= {"num_attention_heads": model.heads, "num_key_value_heads": model.kv_heads}
    sizes |= {"intermediate_size": model.ffn, "vocab_size": model.vocab}
    sizes |= {"tie_word_embeddings": model.tied, "max_position_embeddings": 1 << 20}
    return {"model_type": "llama", "architectures": ["LlamaForCausalLM"]} | sizes


def peak_memory(strategies, name, gpus, length, sequences, gpu):
    """{strategy: {"peak_bytes", "fits", "why"}} of the worst rank, as oom_search.py predicts them.

    With AdamW, its state on the device; of PP as many microbatches as 1F1B has in flight. why: what
    oom_search.py says where it has no answer; then peak_bytes and fits are None.
    """
    found, flight = {}, str(min(sequences, gpus))
    with tempfile.TemporaryDirectory() as folder:
        file, config = Path(folder, "memory.json"), Path(folder, "config.json")
        config.write_text(json.dumps(config_of(MODELS[name])))
        model = name if "-" in name else folder
        for strategy in strategies:
            call = [sys.executable, LABS.parent / "oom_search.py", "--strategy"]
            call += [*STRATEGIES[strategy][1], "--model", model, "--nproc", str(gpus)]
            call += ["--at", str(length), "--gpu", gpu, "--how", "predicted"]
            call += ["--optimizer", "adamw", "--journal", f"{folder}/journal", "--json", file]
            call += ["--batch", flight, "--microbatches", flight] if strategy == "pp" else []
            file.unlink(missing_ok=True)
            print(f"  memory of {STRATEGIES[strategy][0]} ...", file=sys.stderr, flush=True)
            done = subprocess.run(call, capture_output=True, text=True)
            said = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
            row = json.loads(file.read_text())["results"][0] if file.exists() else {}
            why = row.get("error") or "".join(said[-1:]).removeprefix("error: ")
            found[strategy] = {"peak_bytes": None, "fits": None, "why": why or "no answer"}
            if "at" in row:
                peak, fits = max(row["at"][0]["peak_memory_bytes"]), row["at"][0]["fits"]
                found[strategy] = {"peak_bytes": peak, "fits": fits, "why": None}
    return found


def ranking(row):
    """What fits comes first, the fastest of it first; then what is not known; then the rest."""
    if row["fits"] is False:
        return 2, row["peak_bytes"]  # the first is nearest to fitting
    return 0 if row["fits"] else 1, row["seconds"]


def plan(lab, args, off):
    """Rank the strategies; off: score() of the model where it could be checked."""
    model, cluster = MODELS[args.model], cluster_of(lab, args.gpu)
    gpus = args.nodes * cluster.node
    tokens, rows = args.sequences * args.length, []
    reasons = {strategy: why_not(model, strategy, gpus) for strategy in STRATEGIES}
    able = [strategy for strategy, reason in reasons.items() if not reason]
    memory = peak_memory(able, args.model, gpus, args.length, args.sequences, args.gpu)
    for strategy in able:
        parts = strategy_parts(lab, model, strategy, gpus, args.length, args.sequences, cluster)
        seconds = sum(parts.values())
        used = lab.mfu(model, args.length, tokens / seconds, gpus, cluster.peak)
        row = {"strategy": strategy, "seconds": seconds, "mfu": used, "parts": parts}
        rows.append(row | memory[strategy])
    rows.sort(key=ranking)
    print(
        f"\n{args.model} on {args.nodes} x 8 {args.gpu}, {args.sequences} sequences of "
        f"{args.length:,} tokens a step, bf16, AdamW"
    )
    if rows and not any(row["fits"] for row in rows):
        print("  Nothing is known to fit: more nodes, an H200 or a shorter sequence may help.")
    lines = [["", "s a step", "tokens/s", "MFU", "what fills the time", "GiB", "fits"]]
    for row in rows:
        largest = sorted(row["parts"].items(), key=lambda part: -part[1])[:4]
        fills = [f"{name} {part / row['seconds']:.0%}" for name, part in largest]
        size = f"{row['peak_bytes'] / 2**30:.1f}" if row["peak_bytes"] else "-"
        fits = {True: "yes", False: "no", None: f"not known: {row['why']}"}[row["fits"]]
        speed = [f"{row['seconds']:.1f}", f"{tokens / row['seconds']:,.0f}", f"{row['mfu']:.1%}"]
        lines.append([STRATEGIES[row["strategy"]][0], *speed, ", ".join(fills), size, fits])
    lines += [
        [STRATEGIES[strategy][0], *"----", "-", f"cannot run: {reason}"]
        for strategy, reason in reasons.items()
        if reason
    ]
    table(*lines)
    print(
        "\n  What fits comes first. GiB: the peak of the rank that needs most, by oom_search.py."
        f"\n  How far off? Where runs could check it (dp x tp of 4096 tokens, not fitted to) half"
        f"\n  were off by {off['median']:.0%} or less, {1 - off['within_20']:.0%} by over 20%; "
        f"{off['ordered']:.0%} of pairs were in order."
        "\n  Nobody has checked here: all_to_all, recomputation, long sequences, other GPUs."
    )
    return rows


def show_split(lab, args):
    """What fills a step of --split."""
    name, nodes, (dp, pp, tp) = args.split
    count = args.sequences
    parts = lab.step_parts(lab.MODELS[name], lab.H100, dp, pp, tp, 1, count, args.length)
    seconds = sum(parts.values())
    speed = dp * count * args.length / seconds
    used = lab.mfu(lab.MODELS[name], args.length, speed, dp * pp * tp, lab.H100.peak)
    print(f"\n{name} on {nodes} nodes, dp {dp} x pp {pp} x tp {tp}, {count} microbatches of one")
    print(f"sequence: {seconds:.3f} s a step, {speed:,.0f} tokens/s, MFU {used:.1%}")
    table(["part", "s", ""], *([key, x, f"{x / seconds:.0%}"] for key, x in parts.items()))
    return parts


def split_type(text):
    """MODEL:NODES:DPxPPxTP, a type for argparse."""
    form = re.fullmatch(r"([\w.-]+):(\d+):(\d+)x(\d+)x(\d+)", text)
    if not form or form[1] not in MODELS:
        say = f"{text}: MODEL:NODES:DPxPPxTP, such as 8B:2:4x1x4, of {', '.join(MODELS)}"
        raise argparse.ArgumentTypeError(say)
    nodes, dp, pp, tp = (int(number) for number in form.groups()[1:])
    model = MODELS[form[1]]
    if dp * pp * tp != 8 * nodes or not nodes:
        say = f"{dp} x {pp} x {tp} is {dp * pp * tp}, and {nodes} nodes have {8 * nodes} GPUs"
        raise argparse.ArgumentTypeError(say)
    if pp > model.layers:
        say = f"{pp} stages are more than the {model.layers} layers of {form[1]}"
        raise argparse.ArgumentTypeError(say)
    if model.heads % tp:
        say = f"tp {tp} does not divide the {model.heads} heads of {form[1]}"
        raise argparse.ArgumentTypeError(say)
    return form[1], nodes, (dp, pp, tp)


def draw_plan(axis, rows):
    """A bar for each row of plan(), and what fills it."""
    for name, colour in COLOURS.items():
        labels, lefts, widths = [], [], []
        for row in rows:
            before = list(COLOURS)[: list(COLOURS).index(name)]
            label = STRATEGIES.get(row["strategy"], [row["strategy"]])[0]
            labels.append(label + (" (does not fit)" if row["fits"] is False else ""))
            lefts.append(sum(row["parts"].get(part, 0.0) for part in before))
            widths.append(row["parts"].get(name, 0.0))
        if any(widths):
            axis.barh(labels, widths, left=lefts, color=colour, label=name)
    axis.invert_yaxis()
    axis.set(xlabel="seconds a step", title="What fills a step")
    axis.legend(loc="center left", bbox_to_anchor=(1, 0.5))


def timetable():
    """What the explorer's view of time shows: plans of many settings, and the runs.

    steps: {"model ranks gpu network strategy": [for each length: seconds of each part, as text]},
    of a sequence; of `once` those of a step, however many sequences it has. A number is left out
    where it is that of the first GPU and network; runs: [what a run was, tp, predicted, measured
    tokens/s a GPU].
    """
    lab, steps = load(LABS / "lab11_time.py"), {}
    models, ranks = [name for name in MODELS if name.startswith("llama")], [1, 2, 4, 8, 16, 32]
    lengths, once = [4096 * 2**i for i in range(9)], ["bubble", "gradients", "optimizer", "other"]
    networks = {"measured": {}, "ideal": {"network": 50e9, "hop": 0.0, "spread": 0.0}}
    for name, gpus, strategy in product(models, ranks, STRATEGIES):
        first = None
        for gpu, network in product(MEMORY, networks):
            cluster = dataclasses.replace(cluster_of(lab, gpu), **networks[network])
            setting = lab, MODELS[name], strategy, gpus
            rows = []
            for length in () if why_not(*setting[1:]) else lengths:
                part = strategy_parts(*setting, length, 1, cluster)
                rows.append([f"{part.get(key, 0):.4g}" for key in COLOURS])
            first = first or rows
            same = [
                ["" if x == y and rows is not first else x for x, y in zip(*two)]
                for two in zip(rows, first)
            ]
            steps[f"{name} {gpus} {gpu} {network} {strategy}"] = [",".join(row) for row in same]
    judge, dots = [row for row in read_runs() if judged(row) and half(row) == 1], []
    for row in judge:
        names = "model", "nodes", "dp", "tp", "mbs", "gradacc", "zero"
        told = ", ".join(f"{key} {row[key]}" for key in names).removeprefix("model ")
        dots.append([told, int(row["tp"]), significant(lab.predict_run(row)), measured(row)])
    flops = {name: [sum(lab.flops_per_token(MODELS[name], n)) for n in lengths] for name in models}
    data = {"models": models, "gpus": [*MEMORY], "ranks": ranks, "networks": [*networks]}
    data |= {"strategies": {key: words for key, (words, _) in STRATEGIES.items()}}
    data |= {"lengths": lengths, "counts": [4, 16, 64], "parts": [*COLOURS], "once": once}
    data |= {"steps": steps, "memory": {key: oom for key, (_, oom) in STRATEGIES.items()}}
    score = {name: float(value) for name, value in scored(lab, judge, lab.H100).items()}
    return data | {"runs": dots, "score": score, "flops": flops, "peak": lab.H100.peak}


def significant(number):
    """With 4 digits, to keep the page small."""
    return float(f"{number:.4g}")
