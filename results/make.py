"""Makes the figures of results/: the JSON files, their pictures, and the tables of README.md.

    python results/make.py                 # all that this machine can measure
    python results/make.py lengths         # the longest sequences, predicted: needs no GPU
    python results/make.py published       # what others measured, predicted
    python results/make.py plans           # other people's tensor parallel plans, refereed
    python results/make.py cpu             # the scripts on two ranks of this machine
    python results/make.py gpu             # one GPU: proofs, throughput, one rank of several
    python results/make.py limits          # one GPU: the longest sequences, emulated and predicted
    python results/make.py tables          # only the tables anew, from the JSON there is
    python results/make.py gpu --trial     # its steps on a tiny model, to see that they run

A part is a row of steps, each a command line that anyone can run. Its JSON has the command beside
the result, and is written after every step (but by a trial); a step that fails costs no other.
"""

import argparse
import csv
import datetime
import json
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import transformers

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path[:0] = [str(ROOT), str(HERE)]  # PYTHONSAFEPATH leaves out either
import plot  # noqa: E402

import tp  # noqa: E402
from labs.lab11_time import lesson, plan  # noqa: E402

README = HERE / "README.md"  # where the tables stand
GIB, MIB = 2**30, 2**20
SCRIPTS = {"tp": "tp.py", "tp_dtensor": "tp.py --dtensor"}
SCRIPTS |= {name: f"{name}.py" for name in ("sp_megatron", "sp_ulysses", "pp")}
BARE = "--loss full --recompute none"
REMEDIES = {  # each has what those above it have
    "no remedy": BARE,
    "logits in chunks": "--recompute none",
    "activation recomputation": "--tile 1000000000",
    "MLPs, norms, SP's projections in tiles": "",
    "layers' inputs offloaded": "--recompute offload",
}
# What others measured on GPUs, and how to ask for the same. Columns: source, what, measured, unit;
# compared: the longest sequence, the peak, that less weights, gradients and optimizer state, or,
# a number, what the second of two runs takes more, divided by it; options, what differs between the
# runs (a bar between them); and why the prediction is off, where the cause is known
PUBLISHED = [*csv.DictReader((HERE / "published.csv").open(encoding="utf-8"))]
PEAK = {"H100": 989e12, "H200": 989e12, "A100": 312e12}  # bfloat16 FLOP/s, of the data sheets


# --------------------------------------------------------------------------------------------------
# 1. The steps of each part: generators of (name, command line), which are sent the step's outcome
# --------------------------------------------------------------------------------------------------


def lengths(trial):
    """The longest sequences, predicted."""
    model, large = "", "--model llama-3.1-8b"
    if trial:
        model = large = "--model tiny --nproc 1 2 --memory-gib 0.1"  # the last of an option counts
    search = "python oom_search.py --how predicted --optimizer none --strategy all"
    outcome = yield "40 GiB", f"{search} --nproc 1 2 4 8 --memory-gib 40 {model}"
    if not trial and "result" in outcome:
        plot.picture(outcome["result"]).savefig(HERE / "lengths.png", dpi=120)
    yield "40 GiB, offload", f"{search} --nproc 1 2 --memory-gib 40 --recompute offload {model}"
    for name, options in REMEDIES.items():
        yield f"80 GiB, {name}", f"{search} --nproc 1 8 --memory-gib 80 {options} {large}"


def published(trial):
    """What others measured, predicted."""
    cut = " --model tiny --memory-gib 0.1" if trial else ""
    for row in PUBLISHED:
        for i, more in enumerate(row["runs"].split("|")):
            options = f"--optimizer none {row['options']} {more}{cut}"  # the last of them counts
            command = f"python oom_search.py --how predicted {options}"
            yield f"{row['source']}: {row['what']}, {i}", command


def plans(trial):
    """Other people's tensor parallel plans beside this project's: lab 5's verdicts."""
    yield (
        "verdicts",
        f"python labs/lab5_tp_plans/lesson.py --referee{' --model qwen3' if trial else ''}",
    )


def cpu(trial):
    """Two ranks of this machine: proofs in each dtype; time, memory and traffic of a real size."""
    size = "--length 32 --batch 4" if trial else "--model smollm2-135m --length 128 --batch 4"
    launch = "torchrun --nproc_per_node=2"
    for dtype in ("float64", "float32", "bfloat16"):
        for name, script in SCRIPTS.items():
            yield f"correctness {dtype}, {name}", f"{launch} {script} --dtype {dtype}"
    runs = SCRIPTS | {f"pp {s}": f"pp.py --schedule {s}" for s in ("afab", "interleaved", "zb")}
    del runs["tp_dtensor"]  # 9 heads: DTensor's plan has no uneven groups
    for name, script in runs.items():
        yield f"benchmark, {name}", f"{launch} {script} --mode benchmark --bench-iters 3 {size}"


def gpu(trial):
    """One GPU: proofs; one rank beside Hugging Face's model; one of several, its peers silent."""
    model = "" if trial else "--model llama-3.2-1b --dtype bfloat16"
    small, middle, large = (128, 256, 512) if trial else (4096, 16384, 32768)
    launch, both = "torchrun --nproc_per_node=1", "torchrun --nproc_per_node=2 results/one_gpu.py"
    for world, start in ((1, launch), (2, both)):
        for name, script in SCRIPTS.items():
            how = f"{script} {model} --length 512 --batch 1"
            yield f"correctness on {world}, {name}", f"{start} {how}"
    for name, script in SCRIPTS.items():
        yield f"tiny on 2, {name}", f"{both} {script} --mode all --dtype float32"
        yield f"tiny on 4, {name}", f"torchrun --nproc_per_node=4 results/one_gpu.py {script}"
    for schedule in ("afab", "interleaved", "zb"):
        yield f"tiny on 2, pp {schedule}", f"{both} pp.py --mode all --schedule {schedule}"
    search = "python oom_search.py --how predicted --optimizer none --strategy all"
    search += f" tp_dtensor {model or '--model tiny --dtype float32'}"
    as_scripts = {"none": "--recompute none", "full": "--tile 1000000000"}  # which have no tiles
    for length, recompute in ((small, "none"), (middle, "none"), (large, "full")):
        how = f"{model} --length {length} --batch 1 --loss full --recompute {recompute}"
        yield f"benchmark {length}, plain", f"python results/make.py plain {how}"
        for name, script in SCRIPTS.items():
            yield f"benchmark {length}, {name}", f"{launch} {script} --mode benchmark {how}"
        how = f"--loss full {as_scripts[recompute]} --nproc 1 --at {length}"
        yield f"predicted, {length}", f"{search} {how}"
    how = f"{model} --batch 1 --attn flash"  # the package, where it is installed
    yield "correctness on 1, tp flash", f"{launch} tp.py {how} --length 512"
    how += f" --mode benchmark {BARE} --length {middle}"
    yield f"benchmark {middle}, tp flash", f"{launch} tp.py {how}"
    for world in (1, 2, 4, 8):
        for name, script in SCRIPTS.items():
            how = f"--backend fake --mode benchmark {model} --length {middle} --batch 1"
            yield f"rank 0 of {world}, {name}", f"RANK=0 WORLD_SIZE={world} python {script} {how}"
    yield "predicted, rank 0", f"{search} {as_scripts['full']} --nproc 1 2 4 8 --at {middle}"


def limits(trial):
    """One GPU: the longest sequences, predicted without it, then tried on it, a rank at a time.

    What the remedies reach at 40 GiB would take minutes a step: they are tried with less memory.
    """
    large = BARE if trial else f"{BARE} --model llama-3.1-8b"
    budgets = [("40 GiB, no remedy", 40, "1 2 8", BARE), ("6 GiB", 6, "1 4", "")]
    budgets += [("8B, 80 GiB, no remedy", 80, "8", large)]
    for name, gib, worlds, options in budgets:
        options += f" --memory-gib {gib / 400} --model tiny" if trial else f" --memory-gib {gib}"
        search = f"python oom_search.py --optimizer none {options}"
        every = f"{search} --how predicted --strategy all --nproc {worlds}"
        outcome = yield f"predicted, {name}", every
        for row in (outcome or {}).get("result", {}).get("results", []):
            there = f"--strategy {row['strategy']} --nproc {row['nproc']}"
            near = max(1, (row["longest"] or 0) * 4 // 5)  # from there it takes half of the tries
            how = f"{search} --how emulated {there} --lo {near}"
            yield f"{row['strategy']} on {row['nproc']}, {name}", how


def run(line):
    """A step's outcome: {command, seconds, result (what --json gave) or error (the last lines)}."""
    words = shlex.split(line)
    environment = {"OMP_NUM_THREADS": "1"} | os.environ
    while "=" in words[0]:
        name, value = words.pop(0).split("=")
        environment[name] = value
    launch = {"python": [], "torchrun": ["-m", "torch.distributed.run"]}[words.pop(0)]
    with tempfile.TemporaryDirectory() as folder:
        file, begin = Path(folder, "result.json"), time.time()
        command = [sys.executable, *launch, *words, "--json", str(file)]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        outcome = {"command": line, "seconds": round(time.time() - begin, 1)}
        if done.returncode == 0 and file.exists():
            return outcome | {"result": json.loads(file.read_bytes(), object_hook=slim)}
    lines = (done.stdout + done.stderr).strip().splitlines()
    verdicts = [line for line in lines if re.match("error:|FAIL", line)]
    return outcome | {"error": verdicts or lines[-5:]}


def slim(entry):
    """An object of the JSON without the longest rows, which nobody reads here."""
    return {key: value for key, value in entry.items() if key not in ("tensors", "timeline")}


def plain(argv):
    """Time Hugging Face's own model as the scripts time themselves, from the same weights."""
    args = tp.parse(argv)
    group = tp.start(args)
    args.dtype = args.dtype or "float32"
    model, (ids, labels) = tp.load_model(args), tp.proof_batch(args, group)
    if args.recompute == "full":
        tp.recompute_layers(model)

    def step(backward):
        loss = model(input_ids=ids, labels=labels, use_cache=False).loss
        if backward:
            loss.backward()
        model.zero_grad()
        torch.get_device_module(args.device).synchronize()

    times = torch.zeros(2, 1 + args.bench_iters, dtype=torch.float64)  # the first warms up
    for i in range(1 + args.bench_iters):
        for backward in (0, 1):  # in turn
            begin = time.perf_counter()
            step(backward)
            times[backward, i] = time.perf_counter() - begin
    result = {}
    for name, row in zip(("forward_s", "forward_backward_s"), times[:, 1:].tolist()):
        result[name] = {"median": statistics.median(row), "min": min(row), "max": max(row)}
    tokens, config = args.batch * args.length, args.config
    result["tokens_per_s"] = tokens / result["forward_backward_s"]["median"]
    # A weight is multiplied and added once for each token in the forward, twice in the backward; a
    # token sees half of the tokens, on average. Recomputation does not count as the model's work.
    weights = sum(p.numel() for p in model.parameters())
    if not config.tie_word_embeddings:  # a table that is only looked up
        weights -= model.model.embed_tokens.weight.numel()
    scores = config.num_hidden_layers * config.num_attention_heads * config.head_dim * args.length
    result["model_flop"] = 6 * tokens * (weights + scores)
    json.dump({"benchmark": result}, args.json)
    tp.dist.destroy_process_group()


def about():
    """Where and when."""
    return {
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU",
        "cpu": f"{os.cpu_count()} cores, {platform.machine()}",
        "versions": {"python": platform.python_version()}
        | {module.__name__: module.__version__ for module in (torch, transformers)},
    }


# --------------------------------------------------------------------------------------------------
# 2. README's tables
# --------------------------------------------------------------------------------------------------


def table(*rows):
    """Markdown; the first row is the head."""
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:], ""])


def made(part):
    """One line on where a part's figures come from."""
    where = part["about"]
    versions = ", ".join(f"{k} {v}" for k, v in where["versions"].items())
    device = "" if where["device"] == "no GPU" else f"{where['device']}, "
    return f"{where['date']}; {device}{where['cpu']}; {versions}"


def of(part, step):
    """A step's result; {} where it failed."""
    return part["steps"].get(step, {}).get("result", {})


def short(tokens):
    """190464 -> 190k."""
    if tokens is None:
        return "error"
    if tokens >= 1e6:
        return f"{tokens / 1e6:.2f}M"
    return f"{tokens / 1e3:.{0 if tokens >= 1e4 else 1}f}k"


def worst(part, step):
    """The relative error of a proof's worst tensor."""
    if proof := of(part, step).get("correctness"):
        return f"{proof['worst']['relative_error']:.1e}"
    why = part["steps"].get(step, {}).get("error", [""])
    return "not run" if why[0].startswith("error:") else "failed" if why[0] else ""


def longest(part, step):
    """{(strategy, GPUs): tokens} of a search."""
    rows = of(part, step).get("results", [])
    return {(row["strategy"], row["nproc"]): row["longest"] for row in rows}


def lengths_table(part):
    """What fits for a 1B model, and what each remedy buys an 8B."""

    def cells(step, name, worlds):
        found = longest(part, step)
        return [short(found.get((name, world))) for world in worlds]

    names = list(dict.fromkeys(name for name, _ in longest(part, "40 GiB")))
    offload = "layers' inputs offloaded: 1, 2 GPUs"
    rows = [["llama-3.2-1b, 40 GiB", "1 GPU", "2 GPUs", "4 GPUs", "8 GPUs", offload]]
    for name in names:
        offloaded = ", ".join(cells("40 GiB, offload", name, (1, 2)))
        rows.append([name, *cells("40 GiB", name, (1, 2, 4, 8)), offloaded])
    remedies = [["llama-3.1-8b, 80 GiB, on 1 and 8 GPUs", *names]]
    for remedy in REMEDIES:
        both = [", ".join(cells(f"80 GiB, {remedy}", name, (1, 8))) for name in names]
        remedies.append([remedy, *both])
    return f"*Predicted, bfloat16, batch 1 ({made(part)})*\n\n{table(*rows)}\n{table(*remedies)}"


def predicted(part, row):
    """What a row of PUBLISHED comes to, in its unit; None where a run of it failed."""
    steps = range(len(row["runs"].split("|")))
    results = [of(part, f"{row['source']}: {row['what']}, {i}") for i in steps]
    if not all(results):
        return None
    found, compared = [result["results"][0] for result in results], row["compared"]
    if compared == "longest":
        return found[0]["longest"] / 1e3
    entries = [entry["at"][0] for entry in found]
    peaks = [max(entry["peak_memory_bytes"]) / 1e9 for entry in entries]
    if compared == "less":
        static = ("weights", "gradients", "optimizer state")
        return peaks[0] - sum(entries[0]["breakdown"][name] for name in static) / 1e9
    return peaks[0] if compared == "peak" else (peaks[1] - peaks[0]) / float(compared)


def published_table(part):
    """What others measured beside what is predicted of it."""
    rows = [["measured by", "what", "measured", "predicted", "ratio", "why"]]
    for row in PUBLISHED:
        ours, measured = predicted(part, row), float(row["measured"])
        figures = ["", ""]
        if ours is not None:
            figures = [f"{ours:,.0f}" if ours >= 100 else f"{ours:.3g}", f"{ours / measured:.2f}"]
        figures.insert(0, f"{measured:,g} {row['unit']}")
        rows.append([row["source"], row["what"], *figures, row["why"]])
    return f"*Predicted ({made(part)})*\n\n{table(*rows)}"


def plans_table(part):
    """Whose plans give one device's gradients: a model a row, a plan a column."""
    found = of(part, "verdicts")
    verdicts = {}
    for row in found.get("referee", []):
        whose = row["plan"].replace("this lab's", "lab 5's")
        plan = f"{whose}, {'SP' if row['sequence_parallel'] else 'TP'}"
        verdicts.setdefault(row["model"], {})[plan] = verdict(row, found["limit"])
    plans = list(dict.fromkeys(plan for own in verdicts.values() for plan in own))
    rows = [[model, *(own.get(plan, "") for plan in plans)] for model, own in verdicts.items()]
    return f"*Measured ({made(part)})*\n\n{table(['model', *plans], *rows)}"


def verdict(row, limit):
    """A plan's verdict in a few words: what it sends, or which gradients it gets wrong."""
    if row["verdict"] == "right":
        sent = [size for phase in ("forward", "backward") for _, size in row[phase].values()]
        return f"right, {sum(sent) / 1e3:.0f} kB"
    names = dict.fromkeys(name.split(".")[-2] for name in row.get("wrong", {}))
    added = names and row["gradient"] <= limit  # one batch alone is right
    return (
        row["verdict"]
        + (" once 2 are added" if added else "")
        + ": " * bool(names)
        + ", ".join(names)
    )


def cpu_table(part):
    """How close to one device, how long, how much memory and traffic."""
    dtypes = ["float64", "float32", "bfloat16"]
    rows = [["2 ranks, gloo", *dtypes, "s a step", "peak MiB, ranks 0 / 1", "rank 0 sends, MiB"]]
    for name in SCRIPTS:
        row = [name, *(worst(part, f"correctness {dtype}, {name}") for dtype in dtypes)]
        bench = of(part, f"benchmark, {name}").get("benchmark")
        if bench:
            row.append(f"{bench['forward_backward_s']['median']:.2f}")
            row.append(" / ".join(f"{size / MIB:.0f}" for size in bench["peak_memory_bytes"]))
            row.append(f"{sum(t['bytes'] for t in bench['traffic']) / MIB:.0f}")
        rows.append(row + [""] * (len(rows[0]) - len(row)))
    return f"*Measured ({made(part)})*\n\n{table(*rows)}"


def gpu_table(part):
    """Proofs, throughput beside Hugging Face's own model, and what one rank of several takes."""
    peak = next((flops for name, flops in PEAK.items() if name in part["about"]["device"]), None)
    rows = [["1 rank", "loss, recomputation", "tokens/s", "MFU", "time / plain", "GiB"]]
    for step, outcome in part["steps"].items():
        kind, name = step.split(", ")
        bench = outcome.get("result", {}).get("benchmark")
        if not kind.startswith("benchmark") or not bench:
            continue
        beside, length = of(part, f"{kind}, plain").get("benchmark"), kind.split()[1]
        seconds = bench["forward_backward_s"]["median"]
        how = ", ".join(re.findall(r"--(?:loss|recompute) (\w+)", outcome["command"]))
        mfu = f"{beside['model_flop'] / seconds / peak:.0%}" if beside and peak else ""
        ratio = f"{seconds / beside['forward_backward_s']['median']:.3f}" if beside else ""
        gib = memory(bench, peaks(part, f"predicted, {length}").get((name, 1)))
        speed = f"{bench['tokens_per_s']:.0f}"
        rows.append([f"{name}, {length} tokens", how, speed, mfu, ratio, gib])
    return f"*Measured ({made(part)})*\n\n{proofs(part)}\n{table(*rows)}\n{one_of_several(part)}"


def proofs(part):
    """How close to one device, on one rank and on several that share the GPU."""
    kinds = {  # {a step: its column's head}
        "correctness on 1": "1 rank, bfloat16",
        "correctness on 2": "2 ranks, bfloat16",
        "tiny on 2": "tiny, 2 ranks, float32 (schedules float64)",
        "tiny on 4": "tiny, 4 ranks, float64",
    }
    rows = [["correctness, worst tensor", *kinds.values()]]
    for name in [*SCRIPTS, "tp flash", "pp afab", "pp interleaved", "pp zb"]:
        rows.append([name, *(worst(part, f"{kind}, {name}") for kind in kinds)])
    return table(*rows)


def peaks(part, step):
    """{(strategy, GPUs): bytes of rank 0's peak} of a prediction for one length."""
    rows = of(part, step).get("results", [])
    sizes = {(row["strategy"], row["nproc"]): row["at"][0]["peak_memory_bytes"] for row in rows}
    return {key: of_ranks[0] for key, of_ranks in sizes.items() if of_ranks}  # [] if unusable


def memory(bench, predicted):
    """Rank 0's peak, and in parentheses what was predicted."""
    measured = (bench or {}).get("peak_memory_bytes")
    cells = [f"{measured[0] / GIB:.2f}"] if measured else []
    cells += [f"({predicted / GIB:.2f})"] if predicted else []
    return " ".join(cells)


def one_of_several(part):
    """Time and memory of rank 0, peers silent, and in parentheses what was predicted of them."""
    worlds, heads = (1, 2, 4, 8), ("ms a step", "GiB")
    rows = [["rank 0, 16k tokens", *(f"{what}, of {w}" for w in worlds for what in heads)]]
    said = peaks(part, "predicted, rank 0")
    for name in SCRIPTS:
        row = [name]
        for world in worlds:
            outcome, seconds = of(part, f"rank 0 of {world}, {name}"), ""
            if bench := outcome.get("benchmark"):
                seconds = f"{1e3 * bench['forward_backward_s']['median']:.0f}"
                seconds += modelled(name, world, outcome, part["about"]["device"])
            row += [seconds, memory(bench, said.get((name, world)))]
        rows.append(row)
    return table(*rows)


def modelled(name, world, outcome, device):
    """Milliseconds of rank 0's step by lab 11's model, where it knows the model and the GPU.

    The first stage of a pipeline has no head. Silent peers take no time, so no message does. On
    Hopper PyTorch chooses cuDNN's attention.
    """
    strategies = {"tp": "tp", "sp_megatron": "sp", "sp_ulysses": "ulysses", "pp": "pp"}
    model = plan.MODELS.get(outcome["model"])
    gpu = next((gpu for gpu in plan.MEMORY if gpu.upper() in device), None)
    if not (name in strategies and model and gpu):
        return ""
    layers, head = model.layers, True
    if name == "pp":  # its first stages hold the layers that are left over
        layers, head = -(-layers // world), world == 1
    setting = world, outcome["length"], plan.cluster_of(lesson, gpu, "cudnn")
    parts = plan.rank_parts(lesson, model, strategies[name], layers, head, *setting)
    return f" ({1e3 * sum(parts.values()):.0f})"


def limits_table(part):
    """What a real GPU takes, and in parentheses what was predicted."""
    searches = [step for step in part["steps"] if step.startswith("predicted")]
    names = list(dict.fromkeys(name for step in searches for name, _ in longest(part, step)))
    rows = [["memory and remedies, GPUs", *names]]
    for step in searches:
        said, budget = longest(part, step), step.removeprefix("predicted, ")
        for world in dict.fromkeys(world for _, world in said):
            found = [tried(part, f"{name} on {world}, {budget}") for name in names]
            cells = [f"{real} ({said[name, world] or 0:,})" for name, real in zip(names, found)]
            rows.append([f"{budget}, {world}", *cells])
    return f"*Emulated, bfloat16, batch 1 ({made(part)})*\n\n{table(*rows)}"


def tried(part, step):
    """The longest sequence of a search of one row; below which it is, where the search ended so."""
    for row in of(part, step).get("results", []):
        if row["longest"] is not None:
            return f"{row['longest']:,}"
        if row["too_long"]:
            return f"below {row['too_long']:,}"
    return "error"


TABLES = {"lengths": lengths_table, "cpu": cpu_table, "gpu": gpu_table, "limits": limits_table}
TABLES |= {"published": published_table, "plans": plans_table}


def found(name):
    """What there is of a part: one, or for those of a GPU one for each GPU there was."""
    parts = [json.loads(file.read_bytes()) for file in sorted(HERE.glob("*.json"))]
    return [part for part in parts if part["part"] == name]


def with_tables(text):
    """README's text with its tables made anew; a part never run leaves its place as it is."""
    for name, render in TABLES.items():
        begin, end = f"<!-- {name}: made by results/make.py -->\n", f"<!-- end of {name} -->"
        made_anew = "\n".join(render(part) for part in found(name))
        if made_anew and begin in text:
            before, rest = text.split(begin)
            text = before + begin + made_anew + end + rest.split(end)[1]
    return text


# --------------------------------------------------------------------------------------------------
# 3. Command line
# --------------------------------------------------------------------------------------------------

PARTS = {"lengths": lengths, "published": published, "plans": plans}
PARTS |= {"cpu": cpu, "gpu": gpu, "limits": limits}
OF_A_GPU = ("gpu", "limits")


def make(name, trial):
    """Run a part's steps; returns whether all of them came to a result."""
    part, steps, outcome = {"part": name, "about": about(), "steps": {}}, PARTS[name](trial), None
    stem = name
    if name in OF_A_GPU:
        stem = re.sub(r"\W+", "_", part["about"]["device"].lower()) + f"_{name}"
    while True:
        try:
            step, line = steps.send(outcome)
        except StopIteration:
            return all("result" in outcome for outcome in part["steps"].values())
        outcome = part["steps"][step] = run(line)
        said = "" if "result" in outcome else f"  failed: {outcome['error'][-1:]}"
        print(f"{name}  {outcome['seconds']:6.1f} s  {step}{said}", flush=True)
        if not trial:
            text = json.dumps(part, indent=1) + "\n"
            (HERE / f"{stem}.json").write_text(text)


def main(argv):
    if argv[:1] == ["plain"]:
        return plain(argv[1:])
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("part", nargs="*", choices=[*PARTS, "tables", []], help="default: all")
    parser.add_argument("--trial", action="store_true", help="on a tiny model, and keep nothing")
    options = parser.parse_args(argv)
    if not options.trial and not all(os.access(path, os.W_OK) for path in (HERE, README)):
        parser.exit(2, f"error: cannot write to {HERE}: use --trial, which keeps nothing\n")
    has_gpu = torch.cuda.is_available()
    if not (has_gpu or options.trial) and set(options.part) & set(OF_A_GPU):
        parser.exit(2, "error: no GPU here: use cpu, or --trial, which runs a tiny model\n")
    every = [name for name in PARTS if has_gpu or name not in OF_A_GPU]
    good = [make(name, options.trial) for name in options.part or every if name != "tables"]
    if not options.trial:
        README.write_text(with_tables(README.read_text(encoding="utf-8")), encoding="utf-8")
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
