"""Which strategy, how fast, and does it fit? This project's strategies by lab 11's model of time.

Called by show.py (--plan). A step is `sequences` sequences of `length` tokens,
one at a time through all GPUs (PP: as its microbatches), layers recomputed, and an AdamW step.
Messages are those that the scripts send, one after the other, and nothing hides them.
"""

import dataclasses
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from labs.kit.harness import LABS, table
from labs.lab11_time import lesson as lesson

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
# cuDNN's attention on an H100 at 16k tokens, by head size: FLOP/s of the forward (causal) and of
# the backward (no mask), by figures 5 and 6 of FlashAttention-3's paper, arXiv 2407.08608
CUDNN = {64: (388e12, 433e12), 128: (539e12, 516e12)}
ATTENTION = {  # of both, as in Cluster: the backward has 2.5 times the operations of the forward
    "flash": lesson.H100.attention,
    "cudnn": tuple((size, 3.5 / (1 / f + 2.5 / b)) for size, (f, b) in CUDNN.items()),
}
KERNELS = {"flash": "FlashAttention-2", "cudnn": "cuDNN's, PyTorch's choice on Hopper"}
# Seconds a step that others measured: huggingface/trl's pull request 6846, transformers' 48324
PUBLISHED = {"flash": 606, "cudnn": 380}


def cluster_of(lab, gpu, attention="flash"):
    return dataclasses.replace(lab.H100, memory=MEMORY[gpu], attention=ATTENTION[attention])


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
    layer = lab.layer_parts(model, tokens, length, tp, cluster)
    if strategy == "tp":  # norms and residual sums of all tokens, on every rank: 22 passes
        unsharded = 22 * lab.BF16 * tokens * model.hidden * (1 - 1 / tp)
        layer = lab.add_up(layer, {"memory": unsharded / cluster.memory})
    again = recomputed_parts(lab, model, layer, tokens, tp, cluster)
    # Not layer's communication: it is nanotron's, which hides some of it
    parts = {name: layers * (layer[name] + again[name]) for name in again}
    if head:  # its forward, a third of its work, is recomputed
        work = lab.head_parts(model, tokens, tp, cluster)
        parts = lab.add_up(parts, {name: 4 / 3 * work[name] for name in ("matmul", "memory")})
    launches, redone = layers * cluster.host, layers * sum(again.values())
    gap = lab.host_gap(sum(parts.values()) - redone, launches)
    return parts | {"host": gap + max(0.0, launches / 2 - redone)}


def recomputed_parts(lab, model, layer, tokens, tp, cluster):
    """{part: device seconds} of a layer's recomputation: its forward, up to its last matmul.

    layer: seconds of forward and backward. The forward is a third of matmuls and about a third of
    memory traffic; of attention, whose backward computes the scores again, it is 1 of 3.5.
    """
    last = lab.linear_parts(*model.linear[-1], tokens, tp, cluster)["matmul"]
    again = {"matmul": (layer["matmul"] - last) / 3, "memory": layer["memory"] / 3}
    return again | {"attention": layer["attention"] / 3.5}


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


def published_run(lab):
    """{attention: {part: seconds}} of PUBLISHED's step: Qwen3-8B, 1,048,576 tokens, 8 H100.

    It was ring attention, with weights sharded and layers' inputs on the host. This is Ulysses
    with sharded weights: its ranks compute the same.
    """
    setting = lab, MODELS["qwen3-8b"], "ulysses_sharded", 8, 1 << 20, 1
    return {name: strategy_parts(*setting, cluster_of(lab, "h100", name)) for name in PUBLISHED}


END = "end of a run\n"
PREDICTIONS = f"""
import json, sys
sys.path.insert(0, sys.argv[1])
import oom_search
for words in json.load(sys.stdin):
    oom_search.main(words)
    print({END.strip()!r}, file=sys.stderr)
"""


def peak_memory(strategies, name, gpus, length, sequences, gpu):
    """{strategy: {"peak_bytes", "fits", "why"}} of the worst rank, as oom_search.py predicts them.

    With AdamW, its state on the device; of PP as many microbatches as 1F1B has in flight. fits: a
    step does. (oom_search.py's own "fits" is for the scripts, which load the full model first.)
    why: what oom_search.py says where it has no answer; then peak_bytes and fits are None. One
    process makes all predictions: to load PyTorch takes longer than most of them.
    """
    calls, flight = {}, str(min(sequences, gpus))
    for strategy in strategies:
        own, *options = STRATEGIES[strategy][1]
        options += ["--batch", flight, "--microbatches", flight] if strategy == "pp" else []
        calls.setdefault(tuple(options), {})[own] = strategy
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config_of(MODELS[name])))
        every = ["--how", "predicted", "--model", name if "-" in name else folder, "--at"]
        every += [str(length), "--nproc", str(gpus), "--gpu", gpu, "--optimizer", "adamw"]
        runs, found = [], {}
        for options, names in calls.items():
            own = ["--strategy", *names, *options, "--json", f"{len(runs)}.json"]
            runs.append([*every, *own])
        streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
        call = [sys.executable, "-c", PREDICTIONS, str(LABS.parent)]
        done = subprocess.run(call, cwd=folder, text=True, input=json.dumps(runs), **streams)
        said = [*done.stderr.split(END), *[""] * len(runs)]
        for number, names in enumerate(calls.values()):
            errors = re.findall("^error: (.*)", said[number], re.M)
            unknown = {"peak_bytes": None, "fits": None, "why": (errors or ["no answer"])[-1]}
            found |= dict.fromkeys(names.values(), unknown)
            file = Path(folder, f"{number}.json")
            for row in json.loads(file.read_text())["results"] if file.exists() else []:
                answer = unknown | {"why": row.get("error")}
                for entry in row.get("at", []):
                    peak = max(entry["peak_memory_bytes"])
                    answer = {"peak_bytes": peak, "fits": peak <= row["budget_bytes"], "why": None}
                found[names[row["strategy"]]] = answer
    return found


def ranking(row):
    """What fits comes first, the fastest of it first; then what is not known; then the rest."""
    if row["fits"] is False:
        return 2, row["peak_bytes"]  # the first is nearest to fitting
    return 0 if row["fits"] else 1, row["seconds"]


def both_mfus(lab, model, length, speed, gpus):
    """(full, causal): MFU with the half of attention that is masked, and without it.

    speed: tokens a second of all GPUs.
    """
    layers, attention, head = lab.flops_per_token(model, length)
    used = lab.mfu(model, length, speed, gpus, lab.H100.peak)
    return used, used * (1 - attention / 2 / (layers + attention + head))


def plan(lab, args, off):
    """Rank the strategies; off: score() of the model where it could be checked."""
    model, cluster = MODELS[args.model], cluster_of(lab, args.gpu, args.attention)
    gpus = args.nodes * cluster.node
    tokens, rows = args.sequences * args.length, []
    reasons = {strategy: why_not(model, strategy, gpus) for strategy in STRATEGIES}
    able = [strategy for strategy, reason in reasons.items() if not reason]
    print("\n  Predicting the memory takes 10 to 30 s.", file=sys.stderr, flush=True)
    memory = peak_memory(able, args.model, gpus, args.length, args.sequences, args.gpu)
    for strategy in able:
        parts = strategy_parts(lab, model, strategy, gpus, args.length, args.sequences, cluster)
        seconds = sum(parts.values())
        full, causal = both_mfus(lab, model, args.length, tokens / seconds, gpus)
        row = {"strategy": strategy, "seconds": seconds, "mfu": full, "mfu_causal": causal}
        rows.append(row | {"parts": parts} | memory[strategy])
    rows.sort(key=ranking)
    print(
        f"\n{args.model} on {args.nodes} x 8 {args.gpu}, {args.length:,} tokens a sequence, "
        f"{args.sequences} a step, bf16, AdamW\nattention: {KERNELS[args.attention]}"
    )
    if rows and not any(row["fits"] for row in rows):
        print("  Nothing is known to fit: more nodes, an H200 or a shorter sequence may help.")
    lines = [["", "s a step", "tokens/s", "MFU: full", "causal", "what fills the time"]]
    lines[0] += ["GiB", "fits"]
    for row in rows:
        largest = sorted(row["parts"].items(), key=lambda part: -part[1])[:4]
        fills = [f"{name} {part / row['seconds']:.0%}" for name, part in largest]
        size = f"{row['peak_bytes'] / 2**30:.1f}" if row["peak_bytes"] else "-"
        fits = {True: "yes", False: "no", None: f"not known: {row['why']}"}[row["fits"]]
        speed = [f"{row['seconds']:.1f}", f"{tokens / row['seconds']:,.0f}"]
        speed += [f"{row['mfu']:.1%}", f"{row['mfu_causal']:.1%}"]
        lines.append([STRATEGIES[row["strategy"]][0], *speed, ", ".join(fills), size, fits])
    for strategy, reason in reasons.items():
        if reason:
            lines.append([STRATEGIES[strategy][0], *"------", f"cannot run: {reason}"])
    table(*lines)
    long = {name: sum(parts.values()) for name, parts in published_run(lab).items()}
    runs = [f"{PUBLISHED[name]} s ({x:.0f} predicted)" for name, x in long.items()]
    print(
        "\n  What fits comes first. GiB: the peak of a step on the worst rank, by oom_search.py."
        "\n  MFU: full counts attention over all positions, causal not the half that is masked."
        f"\n  How far off? Where runs could check it (dp x tp of 4096 tokens, not fitted to) half"
        f"\n  were off by {off['median']:.0%} or less, {1 - off['within_20']:.0%} by over 20%; "
        f"{off['ordered']:.0%} of pairs were in order."
        "\n  One long run was published: qwen3-8b, 1,048,576 tokens, ring attention on 8 H100."
        f"\n  A step took {runs[0]} with FlashAttention, {runs[1]} with cuDNN's."
        "\n  Nobody has checked here: all_to_all, GPUs other than H100 and H200."
    )
    return rows


def draw_plan(axis, rows):
    """A bar for each row of plan(), and what fills it."""
    labels, ends = [], [0.0] * len(rows)
    for row in rows:
        label = STRATEGIES.get(row["strategy"], [row["strategy"]])[0]
        labels.append(label + (" (does not fit)" if row["fits"] is False else ""))
    for name, colour in COLOURS.items():
        widths = [row["parts"].get(name, 0.0) for row in rows]
        if any(widths):
            axis.barh(labels, widths, left=ends, color=colour, label=name)
        ends = [end + width for end, width in zip(ends, widths)]
    axis.invert_yaxis()
    axis.set(xlabel="seconds a step", title="What fills a step")
    axis.legend(loc="center left", bbox_to_anchor=(1, 0.5))
