"""The longest sequence that fits: how many tokens a training step takes before memory is full.

    python oom_search.py --model llama-3.1-8b --gpu a100-80 --nproc 4  # on a laptop, too
    python oom_search.py --nproc 1 2 4 8 --memory-gib 40 --json 40.json
    python oom_search.py --strategy sp --at 4096 32768 --optimizer none  # two lengths, no training

A step is that of tp.py, sp_megatron.py, sp_ulysses.py or pp.py: forward, backward, and AdamW's
step with float32 weights and moments, 12 bytes a parameter. "plain" is what people have before
they parallelize: Hugging Face's model and loss, which makes all logits at once, on one GPU. Lab
10's techniques save memory (labs/memory/techniques.py):

    --recompute full       keep each layer's input, and run the layer again in the backward
                selective  keep matrix products and attention's output, too
                offload    as full, with the inputs in the host's memory
    --tile N               norms, MLPs, SP's projections: N tokens of a rank at a time (16384)
    --loss chunked         head and loss: about 2,048 tokens at a time
    --head-chunks N        attention: 1/N of a rank's heads at a time

    mode       what runs                       how the peak is counted          the budget
    measured   all ranks, a GPU for each       PyTorch's allocator, until it    the GPU's memory
                                               runs out of memory
    emulated   one rank of the job on a GPU,   the same                         the GPU's memory
               the others are silent                                            less OUTSIDE
    predicted  one rank on device "meta",      each tensor, from allocation to  --gpu's memory
               whose tensors have a size,      release, and attention kernels'  less OUTSIDE
               but no data                     scratch memory

The mode depends on the machine's GPUs, and every result names it. With --memory-gib that is the
budget in each. OUTSIDE is an estimate of what the allocator cannot have. The one rank is the first;
of a pipeline also a middle and the last one are tried, and the worst decides. A peak is that of the
tensors ("allocated"); on a GPU the allocator's cache ("reserved") has to fit, too.
"""

import argparse
import importlib
import json
import math
import multiprocessing
import os
import signal
import sys
import textwrap
import traceback
from contextlib import nullcontext
from multiprocessing.connection import wait
from pathlib import Path

import torch
import transformers
from torch.autograd.graph import save_on_cpu
from torch.utils._python_dispatch import _disable_current_modes

sys.path.insert(0, str(Path(__file__).resolve().parent))
from labs.memory import meta_device, techniques  # noqa: E402
from labs.memory.live_tensors import PARTS, LiveTensors  # noqa: E402

GIB = 2**30
# GiB of a GPU that its allocator lacks: CUDA's context and cuBLAS (0.7 of an H200, measured; 1.0 of
# an H100, nccl#1685); also, with peers, NCCL's rings (0.5 to 1.8: nccl#964, vllm#10511), or for an
# all-to-all its connections of all pairs of ranks (3.0 on 8 H100s, nccl#1685)
OUTSIDE = {"one rank": 1.0, "several": 2.0, "all-to-all": 4.0}
# GPUs: GiB, as torch.cuda.get_device_properties() has them; compute capability
GPUS = {"t4": (14.6, 7.5), "rtx4090": (23.5, 8.9), "a100-40": (39.4, 8.0)}
GPUS |= {"a100-80": (79.2, 8.0), "h100": (79.1, 9.0), "h200": (139.8, 9.0)}
FOUR = ["tp", "sp_megatron", "sp_ulysses", "pp"]
ALIASES = {"sp": ["sp_megatron"], "ulysses": ["sp_ulysses"], "all": FOUR}
SCRIPTS = {name: [name] for name in FOUR} | {"tp_dtensor": ["tp", "--dtensor"]}  # and options
SCRIPTS |= {"plain": ["sp_ulysses"]}  # only its command line, model and batch
TILE = 16384  # tokens
LONGEST = 2**24  # tokens: where the search ends for a tiny model; 15 million are published
VERSIONS = {"python": sys.version.split()[0], "torch": torch.__version__}
VERSIONS |= {"transformers": transformers.__version__}
PRELOAD = ["__main__", "torch.testing._internal.distributed.fake_pg"]  # once, before ranks fork
PRELOAD += ["torch.distributed.tensor.parallel", "transformers.models.llama.modeling_llama"]


# ---- 1. A step: the script's own, on a GPU or on meta --------------------------------------------


def start(script, case):
    """The script's arguments and group; a set to which a prediction's step adds its kernels."""
    args = script.parse(case["argv"])
    group = script.start(args)
    if case["how"] == "predicted":
        return args, group, meta_device.use_meta(args, case["capability"])
    if args.device.type == "cuda":
        share = case["budget_bytes"] / torch.cuda.get_device_properties(args.device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, share), args.device)
    return args, group, set()


def make_model(script, case, args, group):
    """The model, parallel and with the memory-saving techniques of the case."""
    model = script.load_model(args)
    if not case["plain"]:
        model = script.parallelize(model, group, args)
    hooks = meta_device.host_memory if case["how"] == "predicted" else save_on_cpu
    chosen = case["recompute"], case["tile"], case["head_chunks"], hooks
    techniques.save_memory(script, model, group, args, *chosen)
    return model


def take_step(script, case):
    """What a step takes: its verdict is "ran"; or it is "oom", and the stage says where."""
    args, group, kernels = start(script, case)
    on_host = case["optimizer"] == "adamw-host"
    # The host of a prediction is meta, too, and its tensors must not count
    uncounted = _disable_current_modes if on_host and case["how"] == "predicted" else nullcontext
    tensors, optimizers = LiveTensors(args, group.size()), []  # the former sees every operation
    stage = "loading"
    try:
        with tensors, script.upcasts_in_float64(args):
            model = make_model(script, case, args, group)
            loading_peak = tensors.restart_peak()
            stage = "AdamW"
            tensors.enter("optimizer step")
            with uncounted():
                if case["optimizer"] != "none":
                    optimizers = techniques.make_adamw(model, on_host)
            stage = "step"
            tensors.enter("forward")
            ids, labels = script.proof_batch(args, group)
            if case["plain"]:
                model(input_ids=ids, labels=labels).loss.backward()
            else:
                script.forward_backward(model, ids, labels, group, args)
            tensors.enter("optimizer step")
            with uncounted():
                techniques.optimizer_step(optimizers)
    except RuntimeError as problem:  # torch.OutOfMemoryError, and what cuBLAS and NCCL raise
        why = str(problem)
        if "out of memory" not in why and "CUBLAS_STATUS_ALLOC_FAILED" not in why:
            raise
        return {"verdict": "oom", "stage": stage, "why": why.splitlines()[0]}
    result = {"verdict": "ran", "attention": "; ".join(sorted(kernels))}
    result |= {"peak": tensors.allocated_peak(), "peak_moment": tensors.peak_moment}
    result["loading_peak_bytes"] = loading_peak
    result["max_position_embeddings"] = getattr(args.config, "max_position_embeddings", None)
    return result | {"breakdown": tensors.breakdown(model, optimizers)}


def run_step(case):
    """take_step(); where it has no result {"verdict": "unusable" or "error", "error": why}."""
    script = importlib.import_module(case["script"])
    try:
        return take_step(script, case)
    except (script.UsageError, meta_device.UnknownKernel) as problem:
        return {"verdict": "unusable", "error": " ".join(str(problem).split())}
    except SystemExit:  # argparse has said why
        return {"verdict": "unusable", "error": f"{case['script']}.py refuses these options"}
    except Exception as problem:
        traceback.print_exc()
        return {"verdict": "error", "error": f"{type(problem).__name__}: {problem}"}


# ---- 2. Processes: new ones for every step, because a full memory leaves traces ------------------


def rank_life(rank, case, port, sender):
    """The life of one rank's process: run the step, send the result, wait to be ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends this
    variables = {"RANK": rank, "WORLD_SIZE": case["world"]}  # what torchrun would set
    if case["how"] == "measured":
        variables |= {"LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": case["world"]}
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in variables.items()}
    transformers.logging.set_verbosity_error()
    sender.send(run_step(case))
    # The parent ends it. A rank that left first could end the connections of the others
    multiprocessing.parent_process().join()


def run_ranks(case, ranks):
    """{rank: result} of a step's ranks, at the same time, each in a process of its own. What is no
    result, but an error or a lack of memory, is returned alone, because other ranks wait for it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    port = 20000 + os.getpid() % 20000  # another one for each search
    results, processes, waiting = {}, [], {}
    try:
        for rank in ranks:
            receiver, sender = context.Pipe(duplex=False)
            processes.append(context.Process(target=rank_life, args=(rank, case, port, sender)))
            processes[-1].start()
            sender.close()  # now the pipe ends with the process
            waiting[receiver] = rank
        while waiting:
            for receiver in wait(waiting):
                rank = waiting.pop(receiver)
                try:
                    results[rank] = receiver.recv()
                except EOFError:
                    why = f"rank {rank}'s process was killed; has the host too little memory?"
                    results[rank] = {"verdict": "error", "error": why}
                if results[rank]["verdict"] != "ran":
                    return {rank: results[rank]}
    finally:  # no process stays behind
        for process in processes:
            process.kill()
            process.join()
    return results


# ---- 3. One length: what it takes, and what of it does not fit -----------------------------------


def ranks_to_try(name, world):
    """The ranks that may need most: of a pipeline the first, a middle, the last; else one."""
    return sorted({0, world // 2, world - 1}) if name == "pp" else [0]


def budget(name, world, options):
    """Bytes that a rank's allocator has."""
    if options.memory_gib or options.how == "measured":
        return options.memory_bytes
    kind = "one rank" if world == 1 else "all-to-all" if name == "sp_ulysses" else "several"
    return options.memory_bytes - int(OUTSIDE[kind] * GIB)


def settings_of(name, options):
    """The options that a step of this strategy depends on."""
    names = ["model", "batch", "dtype", "attn", "loss", "recompute", "tile", "head_chunks"]
    names += {"sp_ulysses": ["shard_weights"], "pp": ["schedule", "microbatches"]}.get(name, [])
    settings = {key: getattr(options, key) for key in [*names, "optimizer"]}
    return settings | ({"loss": "full", "tile": None} if name == "plain" else {})


def as_options(settings):
    """Settings as on a command line, a list of words. None and False are left out."""
    words = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items() if value]
    return [word.removesuffix("=True") for word in words]


def make_case(name, world, length, options):
    """All that decides a step's result."""
    case = {"how": options.how, "world": world, "plain": name == "plain"}
    case |= {"capability": options.capability, "budget_bytes": budget(name, world, options)}
    settings = settings_of(name, options)
    for key in ("recompute", "tile", "head_chunks", "optimizer"):  # the techniques', not a script's
        case[key] = settings.pop(key)
    case["script"], *argv = SCRIPTS[name]
    argv += ["--mode", "benchmark", "--length", str(length), *as_options(settings)]
    argv += ["--recompute", "none" if case["recompute"] == "none" else "full"]
    argv += [] if options.how == "measured" else ["--backend", "fake"]
    return case | {"argv": argv}


def try_length(name, world, length, options):
    """What a step of this length takes, as --json has it; or a verdict and an error."""
    case = make_case(name, world, length, options)
    ranks = range(world) if options.how == "measured" else ranks_to_try(name, world)
    at_once = [[rank] for rank in ranks] if options.how == "emulated" else [ranks]
    entry, results = {"length": length, "budget_bytes": case["budget_bytes"]}, {}
    for some in at_once:
        results |= run_ranks(case, some)
        for result in results.values():
            if "error" in result:
                return result
            if result["verdict"] == "oom":
                entry |= {"fits": False, "lacks": result["stage"], "why": result["why"]}
                entry |= {"ranks": [], "peak_memory_bytes": [], "breakdown": {}}
                return entry | {"peak_moment": None, "attention": ""}
    worst = max(results.values(), key=lambda result: result["peak"])
    for key in ("peak_moment", "breakdown", "attention", "max_position_embeddings"):
        entry[key] = worst[key]
    entry["ranks"] = sorted(results)
    entry["peak_memory_bytes"] = [results[rank]["peak"] for rank in sorted(results)]
    entry["loading_peak_bytes"] = max(r["loading_peak_bytes"] for r in results.values())
    too_much = [stage for stage, size in stage_bytes(entry).items() if size > case["budget_bytes"]]
    return entry | {"fits": not too_much, "lacks": (*too_much, None)[0]}


def stage_bytes(entry):
    """{stage: bytes that have to fit}. The first two are the same however short a sequence is."""
    parts = entry["breakdown"]
    sizes = {"loading": entry["loading_peak_bytes"]}
    sizes["AdamW"] = parts["weights"] + parts["optimizer state"]
    return sizes | {"step": max(entry["peak_memory_bytes"])}


def explain(entry):
    """Whether a length fits; if not, because of what, and what was tried to help."""
    if entry["fits"]:
        return "fits"
    what = {"loading": "loading, when each rank has the full model", "step": "the step"}
    what = what.get(entry["lacks"], "weights and optimizer state")
    size = entry.get("why") or f"{stage_bytes(entry)[entry['lacks']] / GIB:.2f} GiB"
    told = f"does not fit because of {what}: {size}"
    for remedy, fits in entry.get("remedies", {}).items():
        told += f"; tried: with {remedy} it {'fits' if fits else 'does not fit, either'}"
    return told


def try_remedies(name, world, options):
    """{options that leave less of weights and state on a GPU: whether the shortest length fits}."""
    now, fits = settings_of(name, options), {}
    host, shard = {"optimizer": "adamw-host"}, {"shard_weights": True}
    for remedy in (host, shard, host | shard):
        if all(now.get(key) in ("adamw", False) for key in remedy):  # it is not in use yet
            changed = argparse.Namespace(**vars(options) | remedy)
            entry = try_length(name, world, options.lowest, changed)
            fits[" ".join(as_options(remedy))] = entry.get("fits", False)
    return fits


# ---- 4. The search -------------------------------------------------------------------------------


def peaks_of(entries):
    """{length: bytes}, where memory did not run out. Length 0 has what is there however short a
    sequence is: weights and optimizer state, or all that AdamW's step takes."""
    peaks = {}
    for entry in entries:
        if entry["peak_memory_bytes"]:
            sizes = stage_bytes(entry)
            peaks[entry["length"]] = sizes["step"]
            peaks[0] = sizes["step" if entry["peak_moment"] == "optimizer step" else "AdamW"]
    return peaks


def line(peaks, limit):
    """Of the straight line through the two lengths whose peaks are nearest to the limit: one of
    them, and tokens a byte. None if memory does not rise between them."""
    a, b, *_ = [*sorted(peaks, key=lambda length: abs(peaks[length] - limit)), None, None]
    if b is None or (peaks[b] - peaks[a]) * (b - a) <= 0:
        return None
    return a, (b - a) / (peaks[b] - peaks[a])


def next_length(entries, limit, first, options):
    """The length to try next for the longest sequence that fits; None: it is known.

    Memory is nearly a straight line in the length, so two lengths tell where the limit (in bytes)
    should be, and most tries only confirm it. In the end both sides of it were tried, or --hi.
    """
    step, peaks = options.step, peaks_of(entries)
    near = None if len(entries) > 13 else line(peaks, limit)  # no straight line: halve
    low = max([options.lowest - step, *(e["length"] for e in entries if e["fits"])])
    failed = [e["length"] for e in entries if not e["fits"]]
    high = min([options.highest + step, *failed])
    if high - low <= step:
        return None
    if not entries:
        length = first
    elif near:
        length = near[0] + (limit - peaks[near[0]]) * near[1]
        if not failed:
            length = min(length, 32 * low + step)  # a line that begins at length 0 knows little
        elif length >= high:  # memory ran out there, and by how much is not known
            length = (low + high) / 2
    elif failed:
        length = (low + high) / 2 if low > 0 or near else high / 4
    else:
        length = 4 * low
    return min(max(int(length // step) * step, low + step), high - step)


def search(name, world, options):
    """What lengths take, until the longest sequence that fits is known."""
    # Where nothing is known: a prediction cannot run out of memory, a GPU can
    first = options.lo or (98304 if options.how == "predicted" else 16384) * world
    limit, entries = budget(name, world, options), []
    while length := next_length(entries, limit, first, options):
        entry = try_length(name, world, length, options)
        lacks = entry.get("lacks")
        if lacks == "AdamW" or (lacks == "step" and length == options.lowest):
            entry["remedies"] = try_remedies(name, world, options)
        entries.append(entry)
        yield entry
        if "error" in entry or lacks in ("loading", "AdamW"):  # for each length the same
            return


def limit_of(entries, options):
    """What the tries of a search say: the longest sequence that fits, and what it takes. Where none
    fits, what the shortest takes."""
    fit, rest = ([e for e in entries if e["fits"] is fits] for fits in (True, False))
    longest = max(fit, key=lambda entry: entry["length"], default=None)
    too_long = min(rest, key=lambda entry: entry["length"], default=None)
    found = {"longest": longest["length"] if longest else None, "bound": None}
    found["too_long"] = too_long["length"] if too_long else None
    found["tried"] = [[e["length"], max(e["peak_memory_bytes"], default=None)] for e in entries]
    if not too_long:
        found["bound"] = "hi"
    elif not longest and too_long["lacks"] == "step" and options.lo:
        found["bound"] = "lo"
    elif not longest and (too_long["lacks"] != "step" or too_long["length"] == options.lowest):
        found["longest"] = 0
    elif longest and (near := line(peaks_of(entries), longest["budget_bytes"])):
        found["tokens_per_gib"] = round(near[1] * GIB)
    return found | (longest or too_long or {})


def answer(name, world, options):
    """The row of --json of a strategy on so many ranks."""
    row = {"strategy": name, "nproc": world, "how": options.how, "step": options.step}
    row |= settings_of(name, options) | {"budget_bytes": budget(name, world, options)}
    row |= {"verdict": "found", "longest": None, "peak_memory_bytes": [], "breakdown": {}}
    at = (try_length(name, world, length, options) for length in options.at)
    entries = []
    for entry in at if options.at else search(name, world, options):
        if "error" in entry:
            row |= entry
            break
        entries.append(entry)
        told = f"{label(row)}, {entry['length']:,} tokens: {explain(entry)}"
        print(told, file=sys.stderr, flush=True)
    return row | ({"at": entries} if options.at else limit_of(entries, options))


# ---- 5. Report -----------------------------------------------------------------------------------


def label(row):
    """A strategy and its number of ranks, in words."""
    return f"{row['strategy']} on {row['nproc']} rank{'s' if row['nproc'] > 1 else ''}"


def say(before, text):
    """Print a text in lines of at most 100 columns behind what stands before it."""
    how = {"initial_indent": before, "subsequent_indent": " " * len(before)}
    print(textwrap.fill(text, 100, break_on_hyphens=False, **how))


def limit_in_words(row):
    """What came of a search."""
    told = f"{row['longest']:,} tokens" if row["longest"] else explain(row)
    bounds = {"hi": "; longer ones were not tried", "lo": "; shorter ones were not tried"}
    told += bounds.get(row["bound"], "")
    less = row.get("tokens_per_gib")
    return told + (f"; with 1 GiB less {less:,} fewer" if less else "")


def entries_of(rows):
    """[(row, what a length takes)]: of each limit that was found, or each length of --at."""
    pairs = [(row, entry) for row in rows for entry in row.get("at", [row])]
    return [(row, entry) for row, entry in pairs if "length" in entry]


def say_settings(rows, options):
    """What was asked, and all that decides the answer."""
    what = "peak memory" if options.at else "longest sequence"
    step = {"none": "forward and backward, no training"}.get(options.optimizer, "a training step")
    print(f"\n{what} of {step}, {options.how}")
    strategies = {}  # {settings: the strategies that have them}
    for row in rows:
        words = " ".join(as_options(settings_of(row["strategy"], options)))
        strategies.setdefault(words, {})[row["strategy"]] = None
    for words, names in strategies.items():
        say(f"  {', '.join(names)}: ", words)
    gpu = f"{options.gpu}{' (assumed: no --gpu was given)' if options.assumed else ''}"
    say("  ", f"GPU: {gpu}, {', '.join(f'{name} {version}' for name, version in VERSIONS.items())}")
    for kernel in sorted({entry["attention"] for _, entry in entries_of(rows)} - {""}):
        say("  attention: ", kernel)


def say_memory(rows):
    """What fills the memory at each length, beside the budget: a table in blocks of 5 columns."""
    entries = [(row, entry) for row, entry in entries_of(rows) if entry["breakdown"]]
    parts = [part for part in PARTS if any(entry["breakdown"][part] for _, entry in entries)]
    names = ["GiB at the peak", "", "tokens", *parts, "peak", "peak of loading", "budget"]
    columns = []
    for row, entry in entries:
        sizes = [*(entry["breakdown"][part] for part in parts), max(entry["peak_memory_bytes"])]
        sizes += [entry["loading_peak_bytes"], entry["budget_bytes"]]
        column = [*label(row).split(" on "), f"{entry['length']:,}"]
        column += [f"{size / GIB:.2f}" for size in sizes]
        columns.append([*column, entry["peak_moment"], "yes" if entry["fits"] else "no"])
    for block in range(0, len(columns), 5):
        print()
        for name, *cells in zip([*names, "peak in", "fits"], *columns[block : block + 5]):
            print(f"  {name:<21}" + "".join(f"{cell:>15}" for cell in cells))


def report(rows, options):
    """Print what came of all rows, and a verdict."""
    say_settings(rows, options)
    print()
    for row, entry in entries_of(rows):
        length = "" if entry is row else f", {entry['length']:,} tokens"
        told = limit_in_words(row) if entry is row else explain(entry)
        positions = entry.get("max_position_embeddings") or math.inf
        if entry["fits"] and entry["length"] > positions:
            told += f"; the model's max_position_embeddings are only {positions:,}"
        if told != "fits":
            say(f"  {label(row)}{length}: ", told)
    for row in rows:
        if "error" in row:
            say(f"  {label(row)}: ", row["error"])
    say_memory(rows)
    good = [entry["fits"] and not row.get("bound") for row, entry in entries_of(rows)]
    total = len(rows) * max(1, len(options.at))
    told = f"{sum(good)} of {total} {'steps fit' if options.at else 'limits found'}"
    failed = any(row["verdict"] == "error" for row in rows)
    print(f"\n{'FAIL' if failed else 'PASS'} oom_search: {told}")


# ---- 6. Command line -----------------------------------------------------------------------------


def parse(argv):
    """The options, checked as far as can be without running a step."""
    summary, details = __doc__.split("\n\n", 1)
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=summary, epilog=details, formatter_class=raw)
    add = parser.add_argument
    known, usual = [*SCRIPTS, *ALIASES], ["all", "plain"]
    add("--strategy", nargs="+", choices=known, default=usual, help="(all: the four; and plain)")
    add("--nproc", nargs="+", type=int, default=[1, 2], metavar="N", help="ranks (1 2); of plain 1")
    add("--at", nargs="+", type=int, default=[], metavar="N", help="no search: these lengths")
    add("--lo", type=int, metavar="N", help="search from here up; it is tried first")
    add("--hi", type=int, metavar="N", default=LONGEST, help=f"search up to here ({LONGEST})")
    add("--step", type=int, default=512, help="lengths of a search are multiples of it (512)")
    add("--model", default="llama-3.2-1b", help="as tp.py --help has it (llama-3.2-1b)")
    add("--batch", type=int, default=1, help="sequences (1)")
    add("--dtype", choices=["float32", "bfloat16", "float64"], default="bfloat16")
    add("--attn", choices=["sdpa", "eager", "flash"], default="sdpa", help="HF's functions (sdpa)")
    add("--loss", choices=["chunked", "full"], default="chunked", help="full: all logits at once")
    kinds = ["full", "selective", "offload", "none"]
    add("--recompute", choices=kinds, default="full", help="see below (full)")
    add("--tile", type=int, help=f"tokens in a tile ({TILE} with --recompute full or offload)")
    add("--head-chunks", type=int, default=1, metavar="N", help="of a rank's heads (1)")
    adamw = "AdamW, its state on the GPU or the host; none: forward and backward alone"
    add("--optimizer", choices=["adamw", "adamw-host", "none"], default="adamw", help=adamw)
    add("--shard-weights", action="store_true", help="sp_ulysses only: 1/P on each rank (ZeRO-3)")
    add("--schedule", choices=["afab", "1f1b", "interleaved", "zb"], help="pp only")
    add("--microbatches", type=int, help="pp only")
    add("--how", choices=["auto", "measured", "emulated", "predicted"], default="auto")
    add("--gpu", choices=GPUS, help="predict for this one: its kernels and memory (a100-40)")
    add("--memory-gib", type=float, metavar="X", help="the budget, in place of the GPU's memory")
    add("--json", type=argparse.FileType("a"), help="write the results; results/plot.py draws them")
    options = parser.parse_args(argv)
    for name, value in vars(options).items():
        for number in value if isinstance(value, list) else [value]:
            if type(number) in (int, float) and number <= 0:
                parser.error(f"--{name.replace('_', '-')} {number}: use a number above 0")
    names = sum((ALIASES.get(name, [name]) for name in options.strategy), [])
    options.strategies = list(dict.fromkeys(names))
    if options.recompute in ("full", "offload"):
        options.tile = options.tile or TILE
    lo, hi, step = options.lo or 1, options.hi, options.step
    options.lowest, options.highest = math.ceil(lo / step) * step, hi // step * step
    if lo > hi:
        parser.error(f"--lo {lo} is above --hi {hi}; swap them")
    if options.lowest > hi:
        parser.error(f"no multiple of --step {step} is in {lo} to {hi}; use a smaller --step")
    choose_machine(options, parser)
    return options


def choose_machine(options, parser):
    """Settle how to find out (measured, emulated, predicted), the GPU, and its memory."""
    gpus, most = torch.cuda.device_count(), max(options.nproc)
    if options.how == "auto":
        real = "measured" if gpus >= most else "emulated"
        options.how = "predicted" if options.gpu or not gpus else real
    needed = {"measured": most, "emulated": 1}.get(options.how, 0)
    if gpus < needed:
        parser.error(f"--how {options.how} needs {needed} GPUs, not {gpus}; use predicted")
    options.assumed = not needed and not options.gpu
    options.gpu = options.gpu or "a100-40"
    gib, options.capability = GPUS[options.gpu]
    if needed:
        options.gpu = torch.cuda.get_device_name()
        gib = torch.cuda.get_device_properties(0).total_memory / GIB
    options.memory_bytes = int((options.memory_gib or gib) * GIB)


def write_json(rows, options):
    """Write --json anew, after each row, so that a killed search has lost one row."""
    out = {k: v for k, v in vars(options).items() if isinstance(v, str | int | float | None)}
    options.json.truncate(0)
    options.json.write(json.dumps(out | {"versions": VERSIONS, "results": rows}, indent=1) + "\n")
    options.json.flush()


def main(argv=None):
    """Returns the exit status: 0 all answered, 1 an error in a step, 2 unusable, 130 stopped."""
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    options, rows, status = parse(argv), [], 0
    try:
        for name in options.strategies:
            for world in [1] if name == "plain" else options.nproc:
                rows.append(answer(name, world, options))
                if options.json:
                    write_json(rows, options)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        status = 130
    verdicts = {row["verdict"] for row in rows}
    if verdicts == {"unusable"}:
        print(f"error: {rows[0]['error']}", file=sys.stderr)
        return 2
    if rows:
        report(rows, options)
    return status or int("error" in verdicts)


if __name__ == "__main__":
    sys.exit(main())
