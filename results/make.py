"""Makes README's figures: results/*.json, their pictures, and the tables in README.

    python results/make.py                 # all that this machine can measure
    python results/make.py lengths         # the longest sequences, predicted: needs no GPU
    python results/make.py cpu             # the scripts on two ranks of this machine
    python results/make.py gpu             # one GPU: proofs, throughput, one rank of several
    python results/make.py limits          # one GPU: the longest sequences, emulated, beside the prediction
    python results/make.py tables          # only README's tables anew, from the JSON there is
    python results/make.py gpu --trial     # its steps on a tiny model, to see that they run; keeps nothing

A part is a row of steps, each a command line that anyone can run. Its JSON has the command beside the
result, and is written after every step; a step that fails leaves its last lines there and costs no other.
"""

import argparse
import datetime
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
import transformers

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path.insert(0, str(ROOT))
import tp  # noqa: E402

GIB, MIB = 2**30, 2**20
SCRIPTS = {
    "tp": "tp.py",
    "tp_dtensor": "tp.py --dtensor",
    "sp_megatron": "sp_megatron.py",
    "sp_ulysses": "sp_ulysses.py",
    "pp": "pp.py",
}
FIRST = {"tp": "19k, 21k", "sp_megatron": "19k, 41k", "pp": "15k, 26k"}  # on 1 and 2 GPUs, where this began
REMEDIES = {  # each has what those above it have
    "as it comes": "--loss full --recompute none",
    "the loss in chunks": "--recompute none",
    "layers run again": "--tile 1000000000",
    "MLPs and norms in tiles": "",
    "layers' inputs in the host's memory": "--recompute offload",
}
PEAK = {"H100": 989e12, "H200": 989e12, "A100": 312e12}  # FLOP/s in bfloat16, dense, of NVIDIA's data sheets


# ---------------------------------------------------------------------------------------------------
# 1. The steps of each part: generators of (name, command line), which are sent the step's outcome
# ---------------------------------------------------------------------------------------------------


def lengths(trial):
    """The longest sequences, predicted."""
    model, large = "", "--model llama-3.1-8b"
    picture = " --plot results/lengths.png"
    if trial:
        model = large = "--model tiny --nproc 1 2 --memory-gib 0.1"  # the last of an option counts
        picture = ""
    search = "python oom_search.py --how predicted --fresh --strategy all"
    bare = REMEDIES["as it comes"]
    yield "40 GiB", f"{search} --nproc 1 2 4 8 --memory-gib 40 {model}{picture}"
    yield "57 GiB, as it comes", f"{search} --nproc 1 2 --memory-gib 57 --step 256 {bare} {model}"
    yield "40 GiB, offload", f"{search} --nproc 1 2 --memory-gib 40 --recompute offload {model}"
    for name, options in REMEDIES.items():
        yield f"80 GiB, {name}", f"{search} --nproc 1 8 --memory-gib 80 {options} {large}"


def cpu(trial):
    """Two ranks of this machine: the proof in each dtype, then time, memory and traffic of a real size."""
    size = "--length 32 --batch 4" if trial else "--model smollm2-135m --length 128 --batch 4"
    launch = "torchrun --nproc_per_node=2"
    for dtype in ("float64", "float32", "bfloat16"):
        for name, script in SCRIPTS.items():
            yield f"correctness {dtype}, {name}", f"{launch} {script} --dtype {dtype}"
    runs = SCRIPTS | {f"pp {kind}": f"pp.py --schedule {kind}" for kind in ("afab", "interleaved", "zb")}
    del runs["tp_dtensor"]  # 9 heads: DTensor's plan has no uneven groups
    for name, script in runs.items():
        yield f"benchmark, {name}", f"{launch} {script} --mode benchmark --bench-iters 3 {size}"


def gpu(trial):
    """One GPU: proofs; one rank beside Hugging Face's own model; the first of several ranks, peers silent."""
    model = "" if trial else "--model llama-3.2-1b --dtype bfloat16"
    sizes = {4096: "none", 16384: "none", 32768: "block"}
    sizes = {128: "none", 256: "none", 512: "block"} if trial else sizes
    launch = "torchrun --nproc_per_node=1"
    for name, script in SCRIPTS.items():
        yield f"correctness on 1, {name}", f"{launch} {script} {model} --length 512 --batch 1"
    for name, script in SCRIPTS.items():
        there = f"torchrun --nproc_per_node=2 results/one_gpu.py {script} {model} --length 512 --batch 1"
        yield f"correctness on 2, {name}", there
    for length, recompute in sizes.items():
        how = f"{model} --length {length} --batch 1 --loss full --recompute {recompute}"
        yield f"benchmark {length}, plain", f"python results/make.py plain {how}"
        for name, script in SCRIPTS.items():
            yield f"benchmark {length}, {name}", f"{launch} {script} --mode benchmark {how}"
    length = list(sizes)[1]
    how = f"{model} --batch 1 --attn flash"  # the package, where it is installed
    yield "correctness on 1, tp flash", f"{launch} tp.py {how} --length 512"
    bare = f"--mode benchmark --loss full --recompute none --length {length}"
    yield f"benchmark {length}, tp flash", f"{launch} tp.py {how} {bare}"
    for world in (1, 2, 4, 8):
        for name, script in SCRIPTS.items():
            how = f"--backend fake --mode benchmark {model} --length {length} --batch 1"
            yield f"rank 0 of {world}, {name}", f"RANK=0 WORLD_SIZE={world} python {script} {how}"


def limits(trial):
    """One GPU: the longest sequences, predicted without it, then tried on it, one real rank at a time.

    A search begins where the prediction says that it ends: two tries, if the prediction is right. The lengths
    that the remedies reach at 40 GiB would take minutes a step, so they are tried where less memory is full.
    """
    bare, model = REMEDIES["as it comes"], "--model tiny" if trial else ""
    budgets = [("40 GiB, as it comes", 40, "1 2 4 8", bare), ("12 GiB", 12, "1 8", "")]
    budgets += [(f"{gib} GiB, as it comes", gib, "1 8", bare) for gib in (80, 139)]
    for name, gib, worlds, options in budgets:
        search = f"python oom_search.py --fresh --memory-gib {gib / 400 if trial else gib} {options} {model}"
        outcome = yield f"predicted, {name}", f"{search} --how predicted --strategy all --nproc {worlds}"
        for row in (outcome or {}).get("result", {}).get("results", []):
            there = f"--strategy {row['strategy']} --nproc {row['nproc']}"
            there += f" --lo {row['longest']} --hi {row['too_long']}" if row["longest"] else ""
            yield f"{row['strategy']} on {row['nproc']}, {name}", f"{search} --how emulated {there}"


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
        if "oom_search.py" in words:
            command += ["--journal", f"{folder}/journal"]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        outcome = {"command": line, "seconds": round(time.time() - begin, 1)}
        if done.returncode == 0 and file.exists():
            return outcome | {"result": slim(json.loads(file.read_text()))}
    lines = (done.stdout + done.stderr).strip().splitlines()
    return outcome | {"error": [line for line in lines if re.match("error:|FAIL", line)] or lines[-5:]}


def slim(result):
    """Without the rows of every tensor and the timeline of every action, which nobody reads here."""
    long = ("tensors", "timeline")
    return {
        key: {k: v for k, v in value.items() if k not in long} if isinstance(value, dict) else value
        for key, value in result.items()
    }


def plain(argv):
    """Time Hugging Face's own model as the scripts time themselves: same weights, loss and recomputation."""
    args = tp.parse(argv)
    group = tp.start(args)
    model, (ids, labels) = tp.load_model(args), tp.proof_batch(args)
    if args.recompute != "none":
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()  # or it would not

    def step(backward):
        loss = model(input_ids=ids, labels=labels, use_cache=False).loss
        if backward:
            loss.backward()
        model.zero_grad()

    step(True)
    runs = {"forward": partial(step, False), "forward + backward": partial(step, True)}
    seconds = tp.timed(runs, args, group)
    result = {"forward_s": seconds["forward"], "forward_backward_s": seconds["forward + backward"]}
    tokens, config = args.batch * args.length, args.config
    result["tokens_per_s"] = tokens / seconds["forward + backward"]["median"]
    # A weight is multiplied and added once for each token in the forward, twice in the backward; a token sees
    # half of the tokens, on average. What is run again does not count: this is the model's work, not ours.
    weights = sum(
        p.numel() for name, p in model.named_parameters() if "embed" not in name or config.tie_word_embeddings
    )
    scores = config.num_hidden_layers * config.num_attention_heads * config.head_dim * args.length
    result["model_flop"] = 6 * tokens * (weights + scores)
    tp.write_whole(args.json, lambda path: Path(path).write_text(json.dumps({"benchmark": result})))
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


# ---------------------------------------------------------------------------------------------------
# 2. README's tables
# ---------------------------------------------------------------------------------------------------


def table(*rows):
    """Markdown; the first row is the head."""
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:], ""])


def made(part):
    """One line on where a part's figures come from."""
    where, versions = part["about"], ", ".join(f"{k} {v}" for k, v in part["about"]["versions"].items())
    device = "" if where["device"] == "no GPU" else f"{where['device']}, "
    return f"{where['date']}; {device}{where['cpu']}; {versions}"


def of(part, step):
    """A step's result; {} where it failed."""
    return part["steps"].get(step, {}).get("result", {})


def short(tokens):
    """190464 -> 190k."""
    if tokens is None:
        return "error"
    return f"{tokens / 1e6:.2f}M" if tokens >= 1e6 else f"{tokens / 1e3:.{0 if tokens >= 1e4 else 1}f}k"


def worst(part, step):
    """The relative error of a proof's worst tensor."""
    proof = of(part, step).get("correctness")
    if not proof:
        return "failed" if step in part["steps"] else ""
    return f"{proof['worst']['relative_error']:.1e}"


def longest(part, step):
    """{(strategy, GPUs): tokens} of a search."""
    return {(row["strategy"], row["nproc"]): row["longest"] for row in of(part, step).get("results", [])}


def lengths_table(part):
    """What fits for a 1B model, beside what the first version reached, and what each remedy buys an 8B."""
    best, bare, away = (longest(part, step) for step in ("40 GiB", "57 GiB, as it comes", "40 GiB, offload"))
    names = list(dict.fromkeys(name for name, _ in best))
    head = ["llama-3.2-1b; on 1, 2 GPUs", "first version", "57 GiB, as it comes"]
    head += [*(f"40 GiB, {world}" for world in (1, 2, 4, 8)), "40 GiB, inputs on the host"]
    rows = [head]
    for name in names:
        twice = [", ".join(short(found.get((name, w))) for w in (1, 2)) for found in (bare, away)]
        cells = [short(best.get((name, world))) for world in (1, 2, 4, 8)]
        rows.append([name, FIRST.get(name, ""), twice[0], *cells, twice[1]])
    remedies = [["llama-3.1-8b, 80 GiB; on 1, 8 GPUs", *names]]
    for remedy in REMEDIES:
        found = longest(part, f"80 GiB, {remedy}")
        remedies.append([remedy, *(", ".join(short(found.get((name, w))) for w in (1, 8)) for name in names)])
    return f"*Predicted, bfloat16, batch 1 ({made(part)})*\n\n{table(*rows)}\n{table(*remedies)}"


def cpu_table(part):
    """How close to one device, how long, how much memory and traffic."""
    dtypes = ["float64", "float32", "bfloat16"]
    rows = [["2 ranks, gloo", *dtypes, "s a step", "peak MiB, ranks 0 / 1", "MiB of messages"]]
    for name in [*SCRIPTS, "pp afab", "pp interleaved", "pp zb"]:
        row = [name, *(worst(part, f"correctness {dtype}, {name}") for dtype in dtypes)]
        bench = of(part, f"benchmark, {name}").get("benchmark")
        if bench:
            peaks = " / ".join(f"{peak / MIB:.0f}" for peak in bench["peak_memory_bytes"])
            sent = [sum(t["bytes"] for t in bench["traffic"] if rank in t["ranks"]) for rank in range(2)]
            sent = " / ".join(f"{size / MIB:.0f}" for size in sent)
            row += [f"{bench['forward_backward_s']['median']:.2f}", peaks, sent]
        rows.append(row + [""] * (len(rows[0]) - len(row)))
    return f"*Measured ({made(part)})*\n\n{table(*rows)}"


def gpu_table(part):
    """Proofs, throughput beside Hugging Face's own model, and what one rank of several takes."""
    peak = next((flops for name, flops in PEAK.items() if name in part["about"]["device"]), None)
    rows = [["1 rank", "loss, recomputation", "tokens a second", "of the GPU's FLOP/s", "time / plain"]]
    for step, outcome in part["steps"].items():
        kind, name = step.split(", ")
        bench = outcome.get("result", {}).get("benchmark")
        if not kind.startswith("benchmark") or not bench:
            continue
        beside = of(part, f"{kind}, plain").get("benchmark")
        seconds = bench["forward_backward_s"]["median"]
        how = ", ".join(re.findall(r"--(?:loss|recompute) (\w+)", outcome["command"]))
        used = f"{beside['model_flop'] / seconds / peak:.0%}" if beside and peak else ""
        ratio = f"{seconds / beside['forward_backward_s']['median']:.3f}" if beside else ""
        rows.append([f"{name}, {kind.split()[1]} tokens", how, f"{bench['tokens_per_s']:.0f}", used, ratio])
    return f"*Measured ({made(part)})*\n\n{proofs(part)}\n{table(*rows)}\n{one_of_several(part)}"


def proofs(part):
    """How close to the model on one device, on one rank and on two that share the GPU."""
    rows = [["correctness, worst tensor", "1 rank", "2 ranks, over the host"]]
    for name in [*SCRIPTS, "tp flash"]:
        rows.append([name, *(worst(part, f"correctness on {ranks}, {name}") for ranks in (1, 2))])
    return table(*rows)


def one_of_several(part):
    """Time and memory of rank 0 with silent peers; in parentheses the memory beside 1 rank's, at best 1/P."""
    worlds = (1, 2, 4, 8)
    rows = [["rank 0, 16k tokens", *(f"{what}, of {w}" for w in worlds for what in ("s a step", "GiB"))]]
    for name in SCRIPTS:
        benches = [of(part, f"rank 0 of {world}, {name}").get("benchmark") for world in worlds]
        row, alone = [name], benches[0] and benches[0]["peak_memory_bytes"][0]
        for bench in benches:
            peak = bench and bench["peak_memory_bytes"][0]
            row.append(f"{bench['forward_backward_s']['median']:.2f}" if bench else "")
            row.append(f"{peak / GIB:.1f} ({peak / alone:.2f})" if peak and alone else "")
        rows.append(row)
    return table(*rows)


def limits_table(part):
    """What a real GPU takes, and how far off the prediction was."""
    budgets = [step.removeprefix("predicted, ") for step in part["steps"] if step.startswith("predicted")]
    said = {budget: longest(part, f"predicted, {budget}") for budget in budgets}
    worlds = {budget: list(dict.fromkeys(world for _, world in said[budget])) for budget in budgets}
    heads = [f"{budget}, on {', '.join(map(str, worlds[budget]))}" for budget in budgets]
    rows = [["longest", *heads, "prediction off by at most"]]
    for name in dict.fromkeys(name for cells in said.values() for name, _ in cells):
        row, off = [name], []
        for budget in budgets:
            real = {w: longest(part, f"{name} on {w}, {budget}").get((name, w)) for w in worlds[budget]}
            off += [
                abs(said[budget][name, w] / n - 1) for w, n in real.items() if n and said[budget][name, w]
            ]
            row.append(", ".join(map(short, real.values())))
        rows.append([*row, f"{max(off):.1%}" if off else ""])
    return f"*Emulated, bfloat16, batch 1 ({made(part)})*\n\n{table(*rows)}"


TABLES = {"lengths": lengths_table, "cpu": cpu_table, "gpu": gpu_table, "limits": limits_table}


def found(name):
    """What there is of a part: one, or for those of a GPU one for each GPU there was."""
    parts = [json.loads(file.read_text()) for file in sorted(HERE.glob("*.json"))]
    return [part for part in parts if part["part"] == name]


def with_tables(text):
    """README's text with its tables made anew; a part that was never run leaves its place as it is."""
    for name, render in TABLES.items():
        begin, end = f"<!-- {name}: made by results/make.py -->\n", f"<!-- end of {name} -->"
        made_anew = "\n".join(render(part) for part in found(name))
        if made_anew:
            before, rest = text.split(begin)
            text = before + begin + made_anew + end + rest.split(end)[1]
    return text


# ---------------------------------------------------------------------------------------------------
# 3. Command line
# ---------------------------------------------------------------------------------------------------

PARTS = {"lengths": lengths, "cpu": cpu, "gpu": gpu, "limits": limits}
OF_A_GPU = ("gpu", "limits")


def make(name, trial):
    """Run a part's steps; returns whether all of them came to a result."""
    part, steps, outcome = {"part": name, "about": about(), "steps": {}}, PARTS[name](trial), None
    stem = re.sub(r"\W+", "_", part["about"]["device"].lower()) + f"_{name}" if name in OF_A_GPU else name
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
            tp.write_whole(HERE / f"{stem}.json", lambda path, text=text: Path(path).write_text(text))


def main(argv):
    if argv[:1] == ["plain"]:
        return plain(argv[1:])
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "part", nargs="*", choices=[*PARTS, "tables", []], help="all that this machine can measure"
    )
    parser.add_argument("--trial", action="store_true", help="on a tiny model, and keep nothing")
    options = parser.parse_args(argv)
    every = [name for name in PARTS if name not in OF_A_GPU or torch.cuda.is_available()]
    good = [make(name, options.trial) for name in options.part or every if name != "tables"]
    if not options.trial:
        (ROOT / "README.md").write_text(with_tables((ROOT / "README.md").read_text()))
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
