"""The longest sequence that fits: how many tokens a training step takes before memory is full.

    python oom_search.py                           # the four scripts, 1 and 2 GPUs, on a laptop
    python oom_search.py --strategy all --nproc 1 2 4 8 --memory-gib 40 --json 40.json
    python oom_search.py --strategy sp --nproc 2 --lo 14000 --hi 40000 --step 512
    python oom_search.py --strategy sp --at 4096 32768 --optimizer none  # two lengths, no training

It runs the other scripts. A step is their own forward and backward, with lab 10's techniques to
save memory (labs/memory/techniques.py; by default every layer is recomputed, in tiles), and then
AdamW's step, one parameter after another, with float32 weights and moments. AdamW is the default
because most models are trained with it, and without its 12 bytes a parameter the answer is too
long for them. With --optimizer none the report's first line says "no training". The strategy
"plain" is what people have before they parallelize: Hugging Face's model and loss, on one GPU.

What runs depends on the machine's GPUs, and every result says which of these it is:

  measured    the real job: --nproc ranks on as many GPUs
  emulated    one GPU: the script's --backend fake, one real rank with silent peers; of a
              pipeline the first, a middle and the last stage in turn, and the worst decides
  predicted   no GPU: the same code on PyTorch's device "meta" (labs/memory/meta_device.py),
              whose tensors have a size but no data. Each is counted from allocation to release
              (labs/memory/live_tensors.py), and so is the scratch memory of attention kernels.

Loading comes before the step and has a peak of its own, the full model beside its shards, so what
cannot be loaded does not fit. A prediction leaves out what lies outside PyTorch's allocator (the
CUDA context, cuBLAS, NCCL's buffers), for which --gpu subtracts OUTSIDE; --memory-gib is the
allocator's alone. It also leaves out fragmentation (against which runs on a GPU set
PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True) and cuBLAS's workspaces, 64 MiB on an H200.
"""

import argparse
import hashlib
import importlib
import io
import itertools
import json
import logging
import math
import multiprocessing
import os
import signal
import sys
import tempfile
import textwrap
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import nullcontext, redirect_stderr, suppress
from functools import partial
from pathlib import Path

import torch
import transformers
from torch.autograd.graph import save_on_cpu
from torch.multiprocessing.spawn import ProcessException, start_processes
from torch.utils._python_dispatch import _disable_current_modes

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
from labs.memory import live_tensors, meta_device, techniques  # noqa: E402
from labs.memory.live_tensors import PARTS, LiveTensors  # noqa: E402

GIB = 2**30
# GiB of a card that the allocator never has. CUDA's context and cuBLAS: 0.7 of an H200 (measured),
# 1.1 GB (nccl#1685), 1.8 of an H100 with all of vLLM (vllm#10511). NCCL's rings: 0.5 of an H200
# with one rank (measured), 0.5 to 0.7 a group of A100s (nccl#964), 1.8 of H100s (vllm#10511).
# Its all-to-all, of all pairs of ranks: 4.3 GB on 8 H100s (nccl#1685)
OUTSIDE = {"one rank": 1.0, "several": 2.0, "all-to-all": 4.0}
# GPUs: GiB, as torch.cuda.get_device_properties() has them; compute capability
GPUS = {"t4": (14.6, 7.5), "rtx4090": (23.5, 8.9), "a100-40": (39.4, 8.0)}
GPUS |= {"a100-80": (79.2, 8.0), "h100": (79.1, 9.0), "h200": (139.8, 9.0)}
STRATEGIES = {  # the script, and the options that make it this strategy
    "tp": ("tp",),
    "tp_dtensor": ("tp", "--dtensor"),
    "sp_megatron": ("sp_megatron",),
    "sp_ulysses": ("sp_ulysses",),
    "pp": ("pp",),
    "plain": ("sp_ulysses",),  # only its command line, model and batch
}
ALIASES = {"sp": "sp_megatron", "ulysses": "sp_ulysses"}
COMMON = ("model", "batch", "dtype", "attn", "loss")  # options of every script
OWN = {"pp": ("schedule", "microbatches"), "sp_ulysses": ("shard_weights",)}
TILE = 16384  # tokens
LONGEST = 2**24  # tokens: where the search ends for a tiny model; 15 million are published
JOURNAL = ".oom_search.jsonl"
VERSIONS = {"python": sys.version.split()[0], "torch": torch.__version__}
VERSIONS |= {"transformers": transformers.__version__}
WIDTH = 100  # columns of the report
SETTINGS = ("model", "batch", "dtype", "attn", "loss", "recompute", "tile", "head_chunks")
SETTINGS += ("optimizer", "shard_weights", "schedule", "microbatches", "how", "gpu")
PRELOAD = ["__main__", "torch.testing._internal.distributed.fake_pg"]  # once, before ranks fork
PRELOAD += ["torch.distributed.tensor.parallel", "transformers.models.llama.modeling_llama"]
as_key = partial(json.dumps, sort_keys=True)  # a case, as a key of what is known
SHARED = live_tensors, meta_device, techniques, techniques.lab10


# Copied from tp.py
class UsageError(Exception):
    """Arguments or a model that cannot work; the message says what to use instead."""


# ---- 1. A step: the script's own, on a GPU or on meta ---------------------------------------


def start(script, case, kernels):
    """The script's arguments and group, and the memory of the case."""
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            args = script.parse(case["argv"])
    except SystemExit:  # argparse has said why
        raise UsageError(said.getvalue().rpartition("error: ")[2]) from None
    group = script.start(args)
    if case["plain"] and case["world"] > 1:
        raise UsageError("plain runs on one GPU; use --nproc 1")
    if case["how"] == "predicted":
        meta_device.use_meta(args, case["capability"], kernels)
    elif args.device.type == "cuda":
        share = case["memory_bytes"] / torch.cuda.get_device_properties(args.device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, share), args.device)
    return args, group


def make_model(script, case, args, group):
    """The model, parallel and with the memory-saving techniques of the case."""
    model = script.load_model(args)
    if not case["plain"]:
        model = script.parallelize(model, group, args)
    hooks = meta_device.host_memory if case["how"] == "predicted" else save_on_cpu
    chosen = case["recompute"], case["tile"], case["head_chunks"], hooks
    techniques.save_memory(script, model, group, args, *chosen)
    return model


def take_step(script, case, result):
    """One step, which fills in the result. Where memory runs out it ends in a RuntimeError."""
    kernels, host = set(), case["optimizer"] == "adamw-host"
    args, group = start(script, case, kernels)
    # A prediction's host is meta, too, and what happens there does not count
    there = _disable_current_modes if host and case["how"] == "predicted" else nullcontext
    tensors, optimizers = LiveTensors(args, group.size()), []
    with tensors, script.upcasts_in_float64(args):
        model = make_model(script, case, args, group)
        if case["optimizer"] != "none":
            with there():
                optimizers = techniques.make_adamw(model, host)
        result["loading_peak_bytes"] = tensors.restart_peak()
        ids, labels = script.proof_batch(args, group)
        if case["plain"]:
            model(input_ids=ids, labels=labels).loss.backward()
        else:
            script.forward_backward(model, ids, labels, group, args)
        tensors.otherwise = "optimizer step"
        with there():
            techniques.optimizer_step(optimizers)
    if args.device.type == "cuda":
        torch.cuda.synchronize()
    result |= {"peak": tensors.allocated_peak(), "peak_moment": tensors.peak_moment}
    result |= {"breakdown": tensors.breakdown(model, optimizers)}
    result |= {"attention": "; ".join(sorted(kernels))}


def run_step(case):
    """The result of a step: its verdict is "ran", with what it took, "oom" or "unusable"."""
    script, result = importlib.import_module(case["script"]), {"verdict": "ran"}
    try:
        take_step(script, case, result)
    except (script.UsageError, UsageError, meta_device.UnknownKernel) as problem:
        return {"verdict": "unusable", "error": " ".join(str(problem).split())}
    except RuntimeError as problem:  # torch.OutOfMemoryError, and what cuBLAS and NCCL raise
        why = str(problem)
        if "out of memory" not in why and "CUBLAS_STATUS_ALLOC_FAILED" not in why:
            raise
        result |= {"verdict": "oom", "why": why.splitlines()[0]}
    return result


# ---- 2. Processes: new ones for every step, because a full memory leaves traces -------------

LOCK = threading.Lock()  # any thread that calls multiprocessing looks after all processes
logging.getLogger("torch.multiprocessing.spawn").setLevel("ERROR")  # of ranks that it ends


class NoAnswer(Exception):
    """A search ends without an answer. Its argument is what the row gets: a verdict, a reason."""


def rank_life(index, case, results):
    """The life of one rank's process: run the step, put (rank, result) into the queue."""
    several = case["how"] == "measured"
    rank = index if several else case["rank"]
    variables = {"RANK": rank, "WORLD_SIZE": case["world"]}  # what torchrun would set
    if several:
        variables |= {"LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": case["world"]}
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 20000 + os.getppid() % 20000}
    os.environ |= {name: str(value) for name, value in variables.items()}
    parent = multiprocessing.parent_process()  # if it is killed, no step stays on the GPU
    threading.Thread(target=lambda: parent.join() or os._exit(1), daemon=True).start()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    results.put((rank, run_step(case)))
    if several:  # a rank that leaves first may end the others' connections
        torch.distributed.barrier()


def run_case(case, timeout, stop):
    """The result of a step, in processes of its own: that of the rank that needs most memory.

    Raises NoAnswer, also where the event `stop` is set. No process stays behind.
    """
    world = case["world"] if case["how"] == "measured" else 1
    results = multiprocessing.get_context("forkserver").SimpleQueue()
    end, by_rank, ended = time.monotonic() + timeout, {}, False
    with LOCK:
        ranks = start_processes(rank_life, (case, results), world, False, False, "forkserver")
    try:
        while not ended:
            time.sleep(0.02)
            failure = None
            with LOCK:
                try:
                    ended = ranks.join(timeout=0)
                except ProcessException as problem:
                    failure = problem.msg.strip().splitlines()
            while not results.empty():
                rank, by_rank[rank] = results.get()
                if by_rank[rank]["verdict"] == "oom":  # the cause; it may make others fail
                    return by_rank[rank]
                if "error" in by_rank[rank]:
                    raise NoAnswer(by_rank[rank])
            if failure:
                *log, why = failure
                raise NoAnswer({"verdict": "error", "error": why, "log": log[-5:]})
            if time.monotonic() > end:
                why = f"no result after {timeout:g} s; use a longer --timeout"
                raise NoAnswer({"verdict": "error", "error": why})
            if stop.is_set() or (ended and len(by_rank) < world):  # Ctrl-C ends ranks, too
                raise NoAnswer({"verdict": "stopped"})
    finally:
        with LOCK:
            for process in ranks.processes:
                process.kill()
                process.join()
    worst = max(by_rank.values(), key=lambda result: result["peak"])
    return worst | {"peaks": [by_rank[rank]["peak"] for rank in sorted(by_rank)]}


def read_journal(path):
    """{case as text: result} of earlier steps. What a kill cut short is passed over."""
    known, file = {}, Path(path)
    for line in file.read_bytes().splitlines() if file.is_file() else []:
        with suppress(ValueError, TypeError, KeyError):
            entry = json.loads(line)
            known[as_key(entry["case"])] = entry["result"]
    return known


def append(path, case, result):
    """Add a step to the journal, on a new line whatever a kill has left before it."""
    with open(path, "a") as file:
        file.write(f"\n{json.dumps({'case': case, 'result': result})}\n")


# ---- 3. The search --------------------------------------------------------------------------


def ranks_to_try(name, world):
    """The ranks that may need most: of a pipeline the first, a middle, the last; else one."""
    return sorted({0, world // 2, world - 1}) if name == "pp" else [0]


def budget(name, world, options):
    """Bytes that a rank's allocator has. With peers it has less of a whole card (--gpu)."""
    kind = "one rank" if world == 1 else "all-to-all" if name == "sp_ulysses" else "several"
    peers = OUTSIDE[kind] - OUTSIDE["one rank"]
    return options.memory_bytes - (int(peers * GIB) if options.gpu in GPUS else 0)


def make_case(name, world, rank, length, options):
    """All that decides a step's result, and nothing else: equal cases need no second run."""
    script, *argv = STRATEGIES[name]
    argv += ["--mode", "benchmark", "--length", str(length)]
    argv += as_options(options, COMMON + OWN.get(name, ()))
    argv += ["--recompute", "none" if options.recompute == "none" else "full"]
    if options.how != "measured":
        argv += ["--backend", "fake"]
    model = Path(options.model).absolute()
    files = [HERE / "oom_search.py", HERE / f"{script}.py", model / "config.json"]
    files += [Path(module.__file__) for module in SHARED]
    contents = b"".join(file.read_bytes() for file in files if file.is_file())
    contents += str(model.stat().st_mtime_ns).encode() if model.is_file() else b""  # a .gguf
    case = {"how": options.how, "script": script, "argv": argv, "world": world, "rank": rank}
    case |= {"plain": name == "plain", "versions": VERSIONS, "optimizer": options.optimizer}
    case |= {"recompute": options.recompute, "head_chunks": options.head_chunks}
    case |= {"tile": None if name == "plain" else options.tile}
    case["sha256"] = hashlib.sha256(contents).hexdigest()
    if options.how == "predicted":  # a peak serves any budget
        return case | {"capability": options.capability}
    return case | {"gpu": options.gpu, "memory_bytes": options.memory_bytes}


def as_options(options, names):
    """Options as they stand on a command line."""
    argv = []
    for name in names:
        if value := getattr(options, name):
            argv += [f"--{name.replace('_', '-')}"]
            argv += [str(value)] if value is not True else []
    return argv


def try_length(row, length, options, result_of):
    """What a step of this length takes, as --json has it."""
    results, most, measured = {}, row["budget_bytes"], options.how == "measured"
    for rank in [0] if measured else ranks_to_try(row["strategy"], row["nproc"]):
        result = result_of(make_case(row["strategy"], row["nproc"], rank, length, options))
        if result["verdict"] == "oom":
            loads = "loading_peak_bytes" in result
            when = "in the step" if loads else "while loading the full model"
            return NOTHING | {"loads": loads, "note": f"out of memory {when}: {result['why']}"}
        results[rank] = result
        if result["peak"] > most and not options.at:  # a search knows enough
            break
    worst = max(results.values(), key=lambda result: result["peak"])
    loading = max(result["loading_peak_bytes"] for result in results.values())
    entry = {key: worst[key] for key in ("peak_moment", "breakdown", "attention")}
    entry |= {"loading_peak_bytes": loading, "loads": loading <= most}
    entry["fits"] = max(loading, worst["peak"]) <= most
    if loading > most:
        entry["note"] = f"loading the full model takes {loading / GIB:.2f} GiB, too much"
    entry["ranks"] = list(range(row["nproc"])) if measured else list(results)
    return entry | {"peak_memory_bytes": [n for r in results.values() for n in r["peaks"]]}


def next_try(tried, most, start, lowest, highest):
    """The k to try next for the largest in [lowest, highest] that fits; None: it is known.

    tried: {k: (fits, its bytes or None)}, also for 0; most: the bytes there are. Memory is nearly a
    straight line in the length, so two lengths tell where the limit should be, and most tries
    only confirm it. In the end both sides of the limit were tried, or `highest`.
    """
    low = max([lowest - 1, *(k for k in tried if tried[k][0])])
    high = min((k for k in tried if not tried[k][0]), default=None)
    longest = highest if high is None else high - 1  # that may still fit
    if low >= longest:
        return None
    peaks = {k: size for k, (_, size) in tried.items() if size is not None}
    a, b, *_ = [*sorted(peaks, key=lambda k: abs(peaks[k] - most)), 0, 0]
    rising = len(peaks) > 1 and (peaks[a] - peaks[b]) * (a - b) > 0
    if not tried:
        k = start
    elif high is not None and (len(tried) > 13 or not rising):  # no straight line: halve
        k = (low + high) // 2 if low or rising else high // 4
    elif not rising:
        k = 4 * low
    else:
        k = a + math.floor((most - peaks[a]) * (b - a) / (peaks[b] - peaks[a]))
        if high is None:
            k = min(k, 32 * low + 1)
        elif k >= high:  # it ran out of memory, by an unknown amount
            k = (low + high) // 2
    return min(max(k, low + 1), longest)


NOTHING = {"fits": False, "loads": True, "ranks": [], "peak_memory_bytes": [], "breakdown": {}}
NOTHING |= {"peak_moment": None, "attention": ""}


def new_row(name, world, options):
    """The row of the --json of one strategy on `world` GPUs, before anything is known."""
    row = {"strategy": name, "nproc": world, "how": options.how, "step": options.step}
    row |= {"loss": "full" if name == "plain" else options.loss}
    row |= {"verdict": "stopped", "budget_bytes": budget(name, world, options)}
    row |= {"longest": None, "too_long": None, "bound": None if options.at else "unfinished"}
    return row | NOTHING | {"tries": 0}


def search_row(row, rows, options, result_of):
    """Find the longest sequence of a row; at any time the row has what is known."""
    step, most, tried = options.step, row["budget_bytes"], {}
    lowest, highest = math.ceil((options.lo or 1) / step), options.hi // step
    first = 98304 if options.how == "predicted" else 16384  # a real GPU may run out of memory
    start = lowest if options.lo else max(1, first * row["nproc"] // step)
    while (k := next_try(tried, most, start, lowest, highest)) is not None:
        entry = try_length(row, k * step, options, result_of)
        if entry["fits"]:
            row |= entry | {"longest": k * step}
        else:
            row |= {"too_long": k * step, "attention": entry["attention"]}
        if not entry["loads"]:  # no matter how long the sequence is
            row |= entry | {"longest": 0}
            break
        peak = max(entry["peak_memory_bytes"], default=None)
        tried[k] = entry["fits"], peak
        if parts := entry["breakdown"]:
            # The optimizer's step takes as much, however short the sequence is
            flat = entry["peak_moment"] == "optimizer step"
            tried[0] = True, peak if flat else parts["weights"] + parts["optimizer state"]
        say_progress(row, rows, options)
    row |= {"verdict": "found", "bound": None}
    if row["too_long"] is None:
        row |= {"bound": "hi", "note": "--hi is the answer; longer sequences were not tried"}
    elif row["longest"] is None and options.lo:
        row |= {"bound": "lo", "note": "--lo does not fit; shorter sequences were not tried"}
    else:
        row["longest"] = row["longest"] or 0


def try_row(row, rows, options, result_of):
    """Try the lengths of --at."""
    for length in options.at:
        row["at"] = [*row.get("at", []), entry := NOTHING | {"length": length}]
        try:
            entry |= try_length(row, length, options, result_of)
        except NoAnswer as none:
            entry |= none.args[0]
            raise
        say_progress(row, rows, options)
    row["verdict"] = "found"


def say_progress(row, rows, options):
    """A line on stderr after each length: about how long it will take, and what is known."""
    row["tries"] += 1
    tries, usual = sum(each["tries"] for each in rows), len(rows) * (len(options.at) or 5)
    left = (time.monotonic() - options.begin) * max(0, usual / tries - 1)
    done = sum(each["verdict"] != "stopped" for each in rows)
    known = f"{row['longest'] or 0:,} fits"
    if row["too_long"]:
        known += f", {row['too_long']:,} does not"
    if options.at:
        known = f"{len(row['at'])} of {len(options.at)} lengths"
    line = f"{done} of {len(rows)} done, about {left:.0f} s to go; {label(row)}: {known}"
    end = "\r" if sys.stderr.isatty() else "\n"
    print(f"{line:<{WIDTH - 1}}", end=end, file=sys.stderr, flush=True)


def run_rows(rows, options):
    """Fill in all rows. Ctrl-C or SIGTERM stops it; rows then have what is known so far."""
    known = read_journal(options.journal) if options.journal and not options.fresh else {}
    stop, options.begin = threading.Event(), time.monotonic()

    def result_of(case):
        """The result of a step: from the journal, or by running it."""
        if as_key(case) not in known:
            known[as_key(case)] = result = run_case(case, options.timeout, stop)
            try:
                append(options.journal or os.devnull, case, result)
            except OSError as problem:  # a full disk
                print(f"cannot write {options.journal}: {problem.strerror}", file=sys.stderr)
                options.journal = None
        return known[as_key(case)]

    def fill(row):
        try:
            (try_row if options.at else search_row)(row, rows, options, result_of)
        except NoAnswer as none:
            row |= none.args[0]

    with ThreadPoolExecutor(options.jobs) as pool:
        futures = [pool.submit(fill, row) for row in rows]
        try:
            for future in as_completed(futures):
                future.result()
        except KeyboardInterrupt:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # once is enough
            stop.set()
            pool.shutdown(cancel_futures=True)


# ---- 4. Report ------------------------------------------------------------------------------


def count(world):
    """A number of ranks, in words."""
    return f"{world} rank{'s' if world > 1 else ''}"


def label(row):
    """A strategy and its number of ranks, in words."""
    return f"{row['strategy']} on {count(row['nproc'])}"


def say(text):
    """Print a text in lines of at most WIDTH columns."""
    print(textwrap.fill(text, WIDTH, subsequent_indent=" " * 4, break_on_hyphens=False))


def say_table(names, columns):
    """Print columns of strings behind the names of their lines, in blocks as wide as WIDTH."""
    left = max(map(len, names)) + 2
    while columns:
        widths = [max(map(len, column)) + 3 for column in columns]
        n = max(1, sum(left + width <= WIDTH for width in itertools.accumulate(widths)))
        print()
        for name, *cells in zip(names, *columns[:n]):
            line = "".join(map(str.rjust, cells, widths))
            print(f"  {name:<{left - 2}}{line}".rstrip())
        columns = columns[n:]


def entries_of(rows):
    """[(row, what a length takes)]: of each limit that was found, or each length of --at."""
    return [(row, entry) for row in rows for entry in row.get("at", [row])]


def say_settings(rows, options):
    """What was asked, and all that decides the answer."""
    what = "peak memory" if options.at else "longest sequence in tokens"
    step = {"none": "forward, backward, no training"}.get(options.optimizer, "a training step")
    print(f"\n{what} of {step}, {options.how}")
    say("  " + " ".join(as_options(options, (*SETTINGS, "memory_gib"))))
    say("  " + ", ".join(f"{name} {version}" for name, version in VERSIONS.items()))
    for kernel in sorted({entry["attention"] for _, entry in entries_of(rows)} - {""}):
        say(f"  attention: {kernel}")


def limit_text(row, rows):
    """A cell of say_limits()."""
    if row["verdict"] in ("error", "unusable"):
        return row["verdict"]
    if row["longest"] is None:
        return f"below {row['too_long']:,}" if row["too_long"] else "stopped"
    text = f"{row['longest']:,}"
    if row["bound"]:
        return f"{text} or more"
    for one in rows:
        if one["strategy"] == row["strategy"] and one["nproc"] == 1 < row["nproc"]:
            text += f" x{row['longest'] / one['longest']:.2f}" if one["longest"] else ""
    return text


def say_limits(rows, options):
    """The longest sequences: strategies by numbers of ranks."""
    columns = []
    for world in options.nproc:
        cells = [limit_text(row, rows) for row in rows if row["nproc"] == world]
        columns.append([count(world), *cells])
    say_table(["strategy", *options.strategies], columns)


def say_memory(rows):
    """What fills the memory at each length, beside the budget. Equal columns stand once."""
    entries = [(row, e) for row, e in entries_of(rows) if e.get("length") or e.get("longest")]
    parts = [part for part in PARTS if any(e["breakdown"].get(part) for _, e in entries)]
    columns = {}  # text: the strategies of which it is true
    for row, entry in entries:
        sizes = [entry["breakdown"].get(part) for part in parts]
        sizes += [max(entry["peak_memory_bytes"], default=None), row["budget_bytes"]]
        text = [count(row["nproc"]), f"{entry.get('length') or entry['longest']:,}"]
        text += ["-" if size is None else f"{size / GIB:.2f}" for size in sizes]
        text += [entry["peak_moment"] or "-", "yes" if entry["fits"] else "no"]
        columns.setdefault(tuple(text), []).append(row["strategy"])
    if not columns:
        return
    high = max(map(len, columns.values()))
    names = ["GiB at the peak", *[""] * high, "tokens", *parts, "peak", "budget", "in", "fits"]
    say_table(names, [[""] * (high - len(who)) + who + list(c) for c, who in columns.items()])
    loading = max(entry.get("loading_peak_bytes", 0) for _, entry in entries) / GIB
    print("\n  gradients: those that were complete at the peak")
    print(f"  loading the full model, before the step: up to {loading:.2f} GiB")


def report(rows, options):
    """Print the tables and a verdict; returns whether every row came to an answer."""
    say_settings(rows, options)
    if not options.at:
        say_limits(rows, options)
    say_memory(rows)
    for row, entry in entries_of(rows):
        if why := entry.get("error") or entry.get("note"):
            where = f", {entry['length']:,} tokens" if "length" in entry else ""
            print()
            say(f"  {label(row)}{where}: {why}")
            for line in entry.get("log", []):
                print(f"    {line[: WIDTH - 4]}")
    wrong = [f"{label(row)}: {row['error']}" for row in rows if row["verdict"] == "error"]
    good = [entry["fits"] and not row["bound"] for row, entry in entries_of(rows)]
    told = f"{sum(good)} of {len(good)} {'steps fit' if options.at else 'limits found'}"
    told += f": {options.step} tokens more do not fit" * (any(good) and not options.at)
    stopped = any(row["verdict"] == "stopped" for row in rows)
    verdict = "FAIL" if wrong else "stopped" if stopped else "PASS" if all(good) else "done"
    print(f"\n{verdict} oom_search: {wrong[0] if wrong else told}"[: WIDTH + 1])
    return not wrong


# ---- 5. Command line ------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise UsageError(message)


def positive(text, kind=int):
    """A number above 0, for argparse; whole, unless kind is float."""
    with suppress(ValueError):
        if 0 < kind(text) < math.inf:
            return kind(text)
    what = "whole number" if kind is int else "number"
    raise argparse.ArgumentTypeError(f"{text} is not a {what} above 0")


def parse(argv):
    """The options, checked as far as can be without running a step."""
    scripts = [name for name, own in STRATEGIES.items() if (HERE / f"{own[0]}.py").exists()]
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add, number = parser.add_argument, partial(positive, kind=float)
    names, what = [*scripts, *ALIASES, "all"], "all: the scripts; plain: Hugging Face's model"
    add("--strategy", nargs="+", choices=names, default=["all"], help=what)
    add("--nproc", nargs="+", type=positive, default=[1, 2], metavar="N", help="ranks (1 2)")
    add("--at", nargs="+", type=positive, default=[], metavar="N", help="these lengths alone")
    add("--lo", type=positive, metavar="N", help="the least answer; tried first")
    add("--hi", type=positive, metavar="N", default=LONGEST, help=f"the largest ({LONGEST})")
    add("--step", type=positive, default=512, help="lengths are multiples of it (512)")
    add("--model", default="llama-3.2-1b", help="as the scripts take it (llama-3.2-1b)")
    add("--batch", type=positive, default=1, help="sequences (1)")
    add("--dtype", choices=["float32", "bfloat16", "float64"], default="bfloat16")
    add("--attn", choices=["sdpa", "eager", "flash"], default="sdpa", help="PyTorch's sdpa")
    add("--loss", choices=["chunked", "full"], default="chunked", help="full: logits at once")
    kept = "full: layers' inputs; selective: expensive results, too; offload: on the host"
    kinds = ["full", "selective", "offload", "none"]
    add("--recompute", choices=kinds, default="full", help=kept)
    add("--tile", type=positive, help=f"tokens in a tile ({TILE} where layers recompute)")
    add("--head-chunks", type=positive, default=1, metavar="N", help="of attention (1)")
    adamw = "AdamW, its state on the device or the host; none: forward and backward alone"
    add("--optimizer", choices=["adamw", "adamw-host", "none"], default="adamw", help=adamw)
    add("--shard-weights", action="store_true", help="sp_ulysses only")
    add("--schedule", help="pp only")
    add("--microbatches", type=positive, help="pp only")
    add("--how", choices=["auto", "measured", "emulated", "predicted"], default="auto")
    add("--gpu", choices=GPUS, help="predict for this one (a100-40)")
    add("--memory-gib", type=number, metavar="X", help="the allocator's; caps a real GPU too")
    add("--jobs", type=positive, default=min(2, os.cpu_count() or 1), help="steps at a time (2)")
    add("--timeout", type=number, default=600.0, metavar="S", help="seconds for a step (600)")
    add("--journal", metavar="FILE", help=f"all steps, to go on from ({JOURNAL})")
    add("--fresh", action="store_true", help="do not use what the journal knows")
    add("--json", metavar="FILE", help="write the results; results/plot.py draws them")
    options = parser.parse_args(argv)
    four = [name for name in scripts if name not in ("tp_dtensor", "plain")]
    asked = [four if name == "all" else [ALIASES.get(name, name)] for name in options.strategy]
    options.strategies = list(dict.fromkeys(sum(asked, [])))
    options.nproc, options.at = (list(dict.fromkeys(x)) for x in (options.nproc, options.at))
    if options.recompute in ("full", "offload"):
        options.tile = options.tile or TILE
    if options.at and (options.lo or options.hi != LONGEST):
        raise UsageError("--at tries its lengths only; leave out --lo and --hi")
    lo, hi, step = options.lo or 1, options.hi, options.step
    if math.ceil(lo / step) * step > hi:
        raise UsageError(f"no multiple of --step {step} in {lo} to {hi}; use a smaller --step")
    choose_machine(options)
    choose_files(options)
    return options


def choose_machine(options):
    """Settle how to find out (measured, emulated, predicted), and how much memory there is."""
    gpus, most = torch.cuda.device_count(), max(options.nproc)
    if options.how == "auto":
        real = "measured" if gpus >= most else "emulated"
        options.how = "predicted" if options.gpu or not gpus else real
    needed = {"measured": most, "emulated": 1}.get(options.how, 0)
    if gpus < needed:
        raise UsageError(f"--how {options.how} needs {needed} GPUs, not {gpus}; use predicted")
    if options.gpu and (options.memory_gib or options.how != "predicted"):
        raise UsageError("--gpu is for predictions of a whole card; use --memory-gib alone")
    gib, options.capability = options.memory_gib, 8.0
    if options.how != "predicted":
        options.jobs, options.gpu = 1, torch.cuda.get_device_name()
        gib = gib or torch.cuda.get_device_properties(0).total_memory / GIB
    elif not gib:
        options.gpu = options.gpu or "a100-40"
        card, options.capability = GPUS[options.gpu]
        gib = card - OUTSIDE["one rank"]
    options.memory_bytes = int(gib * GIB)


def choose_files(options):
    """Settle the journal. Raises UsageError where an asked for file cannot be written."""
    for path in (options.json, options.journal, JOURNAL):
        file = Path(path or os.devnull)
        place = file if file.exists() else file.absolute().parent
        writable = os.access(place, os.R_OK | os.W_OK) and not file.is_dir()
        if not writable and path in (options.json, options.journal):
            raise UsageError(f"cannot write {path}; use a file that you can write")
    if writable:
        options.journal = options.journal or JOURNAL


def write_json(rows, options):
    """Write --json; raises UsageError where that fails, and leaves no half of a file."""
    out = {name: getattr(options, name) for name in (*SETTINGS, "memory_bytes", "step")}
    out |= {"versions": VERSIONS, "results": rows}
    file = Path(options.json)
    try:
        file.write_text(json.dumps(out, indent=1) + "\n")
    except OSError as problem:  # a full disk
        if file.is_file():
            file.unlink()
        raise UsageError(f"cannot write {file}: {problem.strerror}") from None


def main(argv=None):
    """Returns the exit status: 0 all answered, 1 an error in a step, 2 unusable, 130 stopped."""
    if sys.platform == "win32":
        print("error: needs Linux or macOS; on Windows use WSL", file=sys.stderr)
        return 2
    try:
        options = parse(argv)
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends it as Ctrl-C does
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it without a traceback
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
        if len(tempfile.gettempdir()) > 70:  # forkserver's socket is there and needs a short name
            tempfile.tempdir = "/tmp"
        multiprocessing.set_forkserver_preload(PRELOAD)
        cells = itertools.product(options.strategies, options.nproc)
        rows = [new_row(*cell, options) for cell in cells]
        run_rows(rows, options)
        if all(entry.get("verdict") == "unusable" for _, entry in entries_of(rows)):
            raise UsageError(rows[0]["error"])
        answered = report(rows, options)
        if options.json:
            write_json(rows, options)
        if any(row["verdict"] == "stopped" for row in rows):
            again = options.journal and "the same command goes on from here"
            print(f"stopped; {again or 'nothing is kept'}", file=sys.stderr)
            return 130
        return 0 if answered else 1
    except UsageError as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
