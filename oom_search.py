"""The longest sequence that fits: how many tokens one training step takes before memory runs out.

    python oom_search.py                                      # all strategies, 1 and 2 GPUs, on a laptop
    python oom_search.py --strategy all --nproc 1 2 4 8 --memory-gib 40 --plot limits.png
    python oom_search.py --strategy sp --nproc 2 --lo 14000 --hi 40000 --step 512
    python oom_search.py --strategy tp --nproc 1 2 --loss full    # what the full logits cost

A step is a forward and a backward: the scripts' own train_step(), no optimizer. What runs depends on what
the machine has, and every result says what it was:

  measured    the real job: --nproc ranks on as many GPUs
  emulated    one GPU: the script's --backend fake, one real rank with silent peers; where ranks differ (the
              first, a middle and the last stage of a pipeline) each of them in turn, and the worst decides
  predicted   no GPU: the same code on PyTorch's device "meta", whose tensors have a shape and a size but no
              data. Every tensor is counted from its making to its end, as a GPU's allocator would.

What a prediction counts: every tensor that PyTorch makes, in blocks of 512 bytes as the CUDA allocator does,
and what flash attention's backward takes for itself inside its kernel (read from PyTorch's flash_api.cpp:
float32 sums of dq, and dk and dv for every query head). What it does not count:

  - What lies outside the allocator: the CUDA context, cuBLAS, NCCL's channels. --gpu leaves OUTSIDE for them;
    --memory-gib is what the allocator itself may take.
  - Fragmentation: memory that the allocator holds and cannot use. Runs on a GPU ask for its remedy,
    PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True; without it expect some percent less.
  - Scratch memory of other kernels (a GEMM's workspace, a sort in the embedding's backward): some MiB.

MemTracker, PyTorch's own, is not used: it refuses a module that is called twice (as chunks and tiles are),
cannot tell logits or communication from the rest, and needs FakeTensorMode, which is three times slower than
meta and takes the host's memory for the device's.
"""

import argparse
import hashlib
import importlib.util
import json
import math
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
import weakref
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.distributed._tools.fake_collectives  # collectives of meta tensors: nothing moves
import torch.nn.functional as F
import transformers
from torch.utils._pytree import tree_leaves

HERE = Path(__file__).resolve().parent
GIB = 2**30
BLOCK = 512  # bytes: the CUDA allocator's smallest block, of which it deals out whole ones
OUTSIDE = 1.0  # GiB of a GPU that the allocator never has: CUDA's context, cuBLAS, NCCL; about 0.5 each
GPUS = {  # GiB, as torch.cuda.get_device_properties() has them; and whether flash attention runs (Ampere on)
    "t4": (14.6, False),
    "rtx4090": (23.5, True),
    "a100-40": (39.4, True),
    "a100-80": (79.2, True),
    "h100": (79.1, True),
    "h200": (139.8, True),
}
PRELOAD = (  # what the scripts import: a forked probe then has it
    "torch.distributed.tensor.parallel",
    "torch.testing._internal.distributed.fake_pg",
    "transformers.models.llama.modeling_llama",
)
PARTS = ("weights", "gradients", "saved activations", "working set", "logits", "communication buffers")


def strategy(script, *options, own=(), ranks=lambda world: [0]):
    """A line of STRATEGIES: the script, options that make it this strategy, options that only it has.

    ranks: which of `world` ranks may need the most memory. What the world does not divide goes to the first.
    """
    return SimpleNamespace(script=script, options=options, own=own, ranks=ranks)


STRATEGIES = {
    "tp": strategy("tp.py"),
    "tp_dtensor": strategy("tp.py", "--dtensor"),
    "sp_megatron": strategy("sp_megatron.py"),
    "sp_ulysses": strategy("sp_ulysses.py"),
    "pp": strategy(
        "pp.py", own=("schedule", "microbatches"), ranks=lambda world: sorted({0, world // 2, world - 1})
    ),
}
ALIASES = {"sp": "sp_megatron", "ulysses": "sp_ulysses"}
COMMON = ("model", "batch", "dtype", "attn", "loss", "recompute", "tile")  # every script has them


class Unusable(Exception):
    """An argument that cannot work; its message says what would. Ends as `error: ...`, exit 2."""


# ---------------------------------------------------------------------------------------------------
# 1. A probe: one step of one rank, in a process of its own
# ---------------------------------------------------------------------------------------------------


class Tracker(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts the live bytes of all tensors made inside it on one kind of device, and says what they are.

    A block is the storage of a tensor: {bytes, backward: made in the backward, kept: made in the forward and
    alive when a backward began, logits: its rows are as long as (a rank's part of) the vocabulary,
    communication: a collective read or wrote it}. `peak` is in bytes, `blocks` are those alive then.
    """

    def __init__(self, device, vocabulary, others):
        super().__init__()
        self.device, self.now, self.peak, self.live, self.blocks = device, 0, 0, {}, []
        self.vocabulary = set(vocabulary) - set(others)  # sizes that by chance are also another tensor's
        self.in_backward = self.at_peak = False
        self.shapes = {}  # what a pointwise operation returns: shape, strides, dtype, device

    def add(self, key, size, **what):
        size = math.ceil(size / BLOCK) * BLOCK
        self.live[key] = SimpleNamespace(bytes=size, backward=self.in_backward, kept=False, **what)
        self.now += size
        if self.now > self.peak:
            self.peak, self.at_peak = self.now, True

    def remove(self, key):
        if self.at_peak:  # the first to go after a new peak: until now everything was there
            self.blocks, self.at_peak = list(self.live.values()), False
        self.now -= self.live.pop(key).bytes

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(hasattr(kind, "full_tensor") for kind in types):  # a DTensor: what it does underneath counts
            return NotImplemented
        backward = torch._C._current_graph_task_id() != -1
        if backward and not self.in_backward:
            for block in self.live.values():
                block.kept = not block.backward
        self.in_backward = backward
        if func.is_view:
            return func(*args, **(kwargs or {}))
        out = self.pointwise(func, args) if self.device == "meta" and not kwargs else None
        out = func(*args, **(kwargs or {})) if out is None else out
        for tensor in self.own(out):
            storage = tensor.untyped_storage()
            if storage._cdata not in self.live:
                logits = tensor.dim() > 1 and tensor.shape[-1] in self.vocabulary
                self.add(storage._cdata, storage.nbytes(), logits=logits, communication=False)
                weakref.finalize(storage, self.remove, storage._cdata)
        if func.namespace in ("c10d", "_c10d_functional"):
            for tensor in self.own((args, out)):
                self.live[tensor.untyped_storage()._cdata].communication = True
        if self.device == "meta" and func.name() == "aten::_scaled_dot_product_flash_attention_backward":
            self.add("flash", flash_scratch(*args[1:3]), logits=False, communication=False)
            self.remove("flash")
        return out

    def pointwise(self, func, args):
        """The result of x * y and the like; None where there is none yet to go by.

        PyTorch works out a meta result in Python, in 0.4 ms; operands of the same kind have the same result.
        """
        aten = torch.ops.aten
        if func not in (aten.mm.default, aten.mean.dim, aten.sum.dim_IntList) and (
            torch.Tag.pointwise not in func.tags or func._schema.is_mutable
        ):
            return None
        key = [func]
        for x in args:
            tensor = isinstance(x, torch.Tensor)
            key += [x.shape, x.stride(), x.dtype, x.device] if tensor else [type(x), str(x)]
        if (key := tuple(key)) not in self.shapes:
            out = func(*args)
            self.shapes[key] = out.shape, out.stride(), out.dtype, out.device
            return out
        shape, stride, dtype, device = self.shapes[key]
        return torch.empty_strided(shape, stride, dtype=dtype, device=device)

    def own(self, tree):
        """The tensors of the device in it; a fake one is DTensor working out a shape."""
        fake = torch._subclasses.FakeTensor
        return (
            t
            for t in tree_leaves(tree)
            if isinstance(t, torch.Tensor) and not isinstance(t, fake) and t.device.type == self.device
        )

    def breakdown(self, model):
        """Bytes of each of PARTS at the peak. model: after the step, with its gradients."""

        def blocks(tensors):
            tensors = [getattr(t, "_local_tensor", t) for t in tensors if t is not None]
            return {id(self.live.get(t.untyped_storage()._cdata)) for t in tensors}

        weights = blocks([*model.parameters(), *model.buffers()])
        gradients = blocks(p.grad for p in model.parameters())
        parts = dict.fromkeys(PARTS, 0)
        for block in self.blocks if not self.at_peak else self.live.values():
            owner = (
                "weights" if id(block) in weights
                else "gradients" if id(block) in gradients
                else "logits" if block.logits
                else "saved activations" if block.kept and not block.backward
                else "communication buffers" if block.communication
                else "working set"
            )  # fmt: skip
            parts[owner] += block.bytes
        return parts


def flash_scratch(query, key):
    """Bytes that flash attention's backward takes inside its kernel: PyTorch's flash_api.cpp, mha_bwd().

    query (b, heads, s, d), key (b, KV heads, s, d): float32 sums of dq, of a number a row too, and dk and dv
    for every query head where several share a KV head.
    """
    (b, heads, s, d), element = query.shape, query.element_size()
    rows, columns = math.ceil(s / 128) * 128, math.ceil(d / 32) * 32
    grouped = 2 * b * heads * key.shape[2] * d * element if key.shape[1] != heads else 0
    return 4 * b * heads * rows * (columns + 1) + grouped


def flash_attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, **kwargs):
    """What scaled_dot_product_attention calls on a GPU in bfloat16 without a mask; meta alone would not."""
    out = torch.ops.aten._scaled_dot_product_flash_attention(
        query, key, value, dropout_p, is_causal, scale=scale
    )
    return out[0]


def host_memory(pin_memory):
    """What save_on_cpu does to tensors without data: off the device, and back as new ones of their size."""

    def to_host(x):
        return x.shape, x.stride(), x.dtype

    def from_host(kept):
        shape, stride, dtype = kept
        return torch.empty_strided(shape, stride, dtype=dtype, device="meta")

    return torch.autograd.graph.saved_tensors_hooks(to_host, from_host)


def on_meta(script, args, flash):
    """Have a script compute nothing: its tensors are meta, and nobody looks at values that they lack."""
    script.save_on_cpu = host_memory
    args.device, args.source = torch.device("meta"), None  # weights of the right shape will do
    torch.meta = torch.cpu  # DTensor's mesh asks torch.<device> how many devices there are
    # Positions that start anew would be several texts in one: HF looks at the values, ours never do
    transformers.masking_utils.find_packed_sequence_indices = lambda position_ids: None
    if flash and args.attention != "eager" and args.torch_dtype == torch.bfloat16:
        F.scaled_dot_product_attention = flash_attention


def load_script(path):
    """A strategy script as a module, under a name that is not __main__."""
    spec = importlib.util.spec_from_file_location("strategy_script", path)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


def run_step(case):
    """One training step, as the script itself runs it; returns the result: verdict, peak, breakdown.

    Verdicts: ran, oom, unusable (the script says why), and of a process that ends without one: error.
    """
    script = load_script(HERE / case["script"])
    try:
        args = script.parse(case["argv"])
        group = script.start(args)
    except script.Unusable as problem:
        return {"verdict": "unusable", "why": str(problem)}
    cuda = args.device.type == "cuda"
    if case["how"] == "predicted":
        on_meta(script, args, case["flash"])
    elif cuda:
        total = torch.cuda.get_device_properties(args.device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, case["memory_bytes"] / total), args.device)
    vocabulary = {math.ceil(args.config.vocab_size / n) for n in (1, group.size())}
    vocabulary |= {args.config.vocab_size // group.size()}
    others = (args.config.hidden_size, args.config.intermediate_size, args.config.head_dim, args.length)
    others = {size // n for size in others for n in (1, group.size())}
    tracker = Tracker(args.device.type, vocabulary, others)
    try:
        with tracker, script.float64_islands(args.dtype):
            model = script.make_parallel(script.load_model(args), group, args)
            ids, labels = script.proof_batch(args)
            script.train_step(model, ids, labels, group, args)
        if cuda:
            torch.cuda.synchronize()
    except RuntimeError as problem:  # torch.OutOfMemoryError is one; cuBLAS and NCCL have none of their own
        if not any(text in str(problem) for text in ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED")):
            raise
        return {"verdict": "oom", "why": str(problem).splitlines()[0]}
    parts = tracker.breakdown(model)
    peak = torch.cuda.max_memory_allocated() if cuda else tracker.peak
    return {"verdict": "ran", "peak": peak, "breakdown": parts | {"inside kernels": peak - tracker.peak}}


def probe(case, result):
    """The life of a probe's process: run the step, leave the result in a file."""
    parent = os.getppid()

    def watch():  # a search that was killed must not leave a step on the GPU
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    warnings.filterwarnings("ignore", category=FutureWarning)
    transformers.logging.set_verbosity_error()
    found = json.dumps(run_step(case))
    write_whole(result, lambda path: Path(path).write_text(found))
    if case["how"] == "measured":  # whoever leaves first may take the connection with it
        dist.barrier()


# Copied from tp.py
def write_whole(path, write):
    """Have write(another path) make the file, then name it path: whole or not at all, or Unusable."""
    draft = f"{path}.{os.getpid()}{Path(path).suffix}"
    try:
        write(draft)
        os.replace(draft, path)
    except (OSError, ValueError) as problem:  # a full disk; a picture of a kind that matplotlib lacks
        raise Unusable(f"cannot write {path}: {problem}") from None
    finally:
        Path(draft).unlink(missing_ok=True)


# ---------------------------------------------------------------------------------------------------
# 2. Processes: a fresh one for every probe, and none that stays
# ---------------------------------------------------------------------------------------------------


def launch(case, folder, timeout):
    """Start the processes of a probe, in sessions of their own; logs and results go to folder."""
    world, port = case["world"], 20000 + os.getpid() % 20000
    ranks = range(world) if case["how"] == "measured" else [case["rank"]]
    pids = {}
    for rank in ranks:
        sys.stdout.flush()
        pid = os.fork()
        if pid:
            pids[pid] = rank
            continue
        try:  # from here on this is the probe
            os.setsid()
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            log = os.open(f"{folder}/log_{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "OMP_NUM_THREADS": "1"}
            if case["how"] == "measured":  # what torchrun would set
                os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world)}
                os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            if case["how"] == "predicted":  # torch is loaded already, and no GPU has been touched
                probe(case, f"{folder}/result_{rank}")
                os._exit(0)
            os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
            command = [sys.executable, __file__, "--probe", json.dumps(case), f"{folder}/result_{rank}"]
            os.execv(sys.executable, command)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return SimpleNamespace(case=case, pids=pids, folder=folder, begin=time.time(), timeout=timeout, ended={})


def results(job):
    """The result of a probe once it has one, else None. The first bad news ends it: other ranks may hang."""
    for pid in [pid for pid in job.pids if pid not in job.ended]:
        if os.waitpid(pid, os.WNOHANG)[0]:
            job.ended[pid] = True
    found = {}
    for rank in job.pids.values():
        path = Path(job.folder, f"result_{rank}")
        if path.exists():
            found[rank] = json.loads(path.read_text())
    bad = next((r for r in found.values() if r["verdict"] != "ran"), None)
    lost = [rank for pid, rank in job.pids.items() if pid in job.ended and rank not in found]
    late = time.time() - job.begin > job.timeout
    if not bad and (lost or late):
        log = Path(job.folder, f"log_{lost[0] if lost else next(iter(job.pids.values()))}")
        tail = log.read_text(errors="replace").strip().splitlines()[-5:] if log.exists() else []
        why = "its process ended without a result" if lost else f"no result after {job.timeout} s (--timeout)"
        bad = {"verdict": "error", "why": why, "log": tail}
    if bad or len(job.ended) == len(job.pids):
        end(job)
        worst = bad or max(found.values(), key=lambda r: r["peak"])
        return worst | {"peaks": [found[r].get("peak") for r in sorted(found)]}
    return None


def end(job):
    """Leave no process of a probe behind."""
    for pid in job.pids:
        if pid not in job.ended:
            try:
                os.killpg(pid, signal.SIGKILL)
            except ProcessLookupError:  # not yet in a session of its own
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            job.ended[pid] = True


# ---------------------------------------------------------------------------------------------------
# 3. The search
# ---------------------------------------------------------------------------------------------------


def search(budget, first, second=None):
    """Find the largest k that fits: a generator of k to try, which is sent (fits, peaks) for each.

    peaks: {k: bytes}, what is known of the memory that lengths take; it may be empty. Returns k (0: not even
    1), which was tried, as was k + 1, which does not fit. Memory is close to a straight line in the length:
    two peaks tell where the limit should be, and most tries only confirm it.
    """
    low, high, peaks, tries = 0, None, {}, 0
    while high is None or high - low > 1:
        if tries < 2 and (first, second)[tries]:
            k = (first, second)[tries]
        elif tries > 12 and high is not None:  # no straight line: halve
            k = (low + high) // 2
        else:
            k = guess(budget, low, high, peaks)
        k = max(k, low + 1) if high is None else min(max(k, low + 1), high - 1)
        fits, new = yield k
        peaks |= new
        low, high = (k, high) if fits else (low, k)
        tries += 1
    return low


def guess(budget, low, high, peaks):
    """Where the limit should be, from the two known peaks nearest to the budget."""
    a, b = sorted(peaks, key=lambda k: abs(peaks[k] - budget))[:2] if len(peaks) > 1 else (0, 0)
    if (peaks.get(a, 0) - peaks.get(b, 0)) * (a - b) <= 0:  # nothing to go by
        return 4 * low if high is None else (low + high) // 2 if low else high // 4
    k = a + math.floor((budget - peaks[a]) * (b - a) / (peaks[b] - peaks[a]))
    return k if high is not None else min(k, 32 * low + 1)


def limit(name, world, options, bracket):
    """Search for one strategy on `world` GPUs: a generator of probes (cases), which is sent their results.

    Returns the row of the --json. bracket: [longest known to fit, shortest known not to], kept up to date.
    """
    line, step = STRATEGIES[name], options.step
    start = 98304 if options.how == "predicted" else 16384  # to run out of memory is cheap in one of them
    first = max(1, (options.lo or start * world) // step)
    second = options.hi and max(first + 1, options.hi // step)
    walk, fitting = search(options.memory_bytes, first, second), {}
    row = {"strategy": name, "nproc": world, "how": options.how, "step": step}
    k = next(walk)
    while True:
        found = {}
        for rank in [0] if options.how == "measured" else line.ranks(world):
            result = yield make_case(name, world, rank, k * step, options)
            if result["verdict"] in ("error", "unusable"):
                why = {"verdict": result["verdict"], "error": result["why"], "log": result.get("log", [])}
                return row | {"longest": None} | why
            found[rank] = result
            fits = result["verdict"] == "ran" and result["peak"] <= options.memory_bytes
            if not fits:
                break
        ran = [r for r in found.values() if r["verdict"] == "ran"]
        peaks = {}
        if len(ran) == len(found):
            worst = max(ran, key=lambda r: r["peak"])
            peaks = {0: worst["breakdown"]["weights"], k: worst["peak"]}
        bracket[0 if fits else 1] = k * step
        if fits:
            fitting[k] = found
        try:
            k = walk.send((fits, peaks))
        except StopIteration as stop:
            row |= {"longest": stop.value * step, "too_long": bracket[1], "verdict": "found"}
            if stop.value == 0:
                return row | {"peak_memory_bytes": [], "ranks": [], "breakdown": {}}
            found = fitting[stop.value]
            worst = max(found.values(), key=lambda r: r["peak"])
            measured = options.how == "measured"
            return row | {
                "ranks": list(range(world)) if measured else list(found),
                "peak_memory_bytes": worst["peaks"] if measured else [r["peak"] for r in found.values()],
                "breakdown": worst["breakdown"],
            }


def make_case(name, world, rank, length, options):
    """All that decides a probe's result, and nothing else: equal cases need no second probe."""
    line, argv = STRATEGIES[name], ["--mode", "benchmark", "--length", str(length), *STRATEGIES[name].options]
    for option in COMMON + line.own:
        value = getattr(options, option)
        argv += [] if value is None else [f"--{option.replace('_', '-')}", str(value)]
    if options.how != "measured":
        argv += ["--backend", "fake"]
    files = [HERE / line.script, Path(__file__), Path(options.model) / "config.json"]
    case = {
        "how": options.how,
        "script": line.script,
        "argv": argv,
        "world": world,
        "rank": rank,
        "sha256": hashlib.sha256(b"".join(f.read_bytes() for f in files if f.is_file())).hexdigest(),
        "versions": [torch.__version__, transformers.__version__],
    }
    if options.how == "predicted":  # a peak serves any budget
        return case | {"flash": options.flash}
    return case | {"gpu": gpu_name(), "memory_bytes": options.memory_bytes}


# ---------------------------------------------------------------------------------------------------
# 4. Running many: the journal, the progress line, Ctrl-C
# ---------------------------------------------------------------------------------------------------


def read_journal(path):
    """{case as text: result} of what was probed before. A line that a kill cut short is passed over."""
    known = {}
    for line in Path(path).read_text().splitlines() if Path(path).exists() else []:
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        known[json.dumps(entry["case"], sort_keys=True)] = entry["result"]
    return known


def append(path, entry):
    """One line more, at once and whole; after a line that was cut short it begins a new one."""
    try:
        with open(path, "ab+") as file:
            start = b""
            if file.tell():
                file.seek(-1, os.SEEK_END)
                start = b"" if file.read(1) == b"\n" else b"\n"
            file.write(start + json.dumps(entry).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as problem:  # a full disk: the search can do without, its resumption cannot
        print(f"error: cannot write the journal {path}: {problem.strerror}", file=sys.stderr)


def run_all(options):
    """Search every strategy on every number of GPUs; returns the rows in the order asked for.

    An error stops its strategy: sizes of it that have not begun are not tried.
    """
    cells = [(name, world) for name in options.strategies for world in options.nproc]
    waiting, active, rows, seconds, counts = list(cells), {}, {}, [], Counter()
    brackets = {cell: [0, None] for cell in cells}
    known = {} if options.fresh else read_journal(options.journal)
    if options.how == "predicted":
        for name in PRELOAD:
            importlib.import_module(name)

    def advance(cell, walk, result=None):
        """Give a search its result; start the next probe that is not known already, or take the row."""
        try:
            case = walk.send(result)
            while text(case) in known:
                case = walk.send(known[text(case)])
        except StopIteration as stop:
            rows[cell] = stop.value
        else:
            active[cell] = walk, launch(case, tempfile.mkdtemp(dir=folder), options.timeout)

    with tempfile.TemporaryDirectory(prefix="oom_search_") as folder:
        try:
            while waiting or active:
                while waiting and len(active) < options.jobs:
                    cell = name, world = waiting.pop(0)
                    if any(row["verdict"] == "error" for (other, _), row in rows.items() if other == name):
                        why = {"verdict": "not tried", "error": f"not tried after {name}'s error", "log": []}
                        rows[cell] = {"strategy": name, "nproc": world, "longest": None} | why
                    else:
                        advance(cell, limit(name, world, options, brackets[cell]))
                time.sleep(0.02)
                for cell, (walk, job) in list(active.items()):
                    result = results(job)
                    if result:
                        del active[cell]
                        seconds.append(time.time() - job.begin)
                        counts[cell] += 1
                        if result["verdict"] in ("ran", "oom"):  # an error may be gone the next time
                            known[text(job.case)] = result
                            append(options.journal, {"case": job.case, "result": result})
                        advance(cell, walk, result)
                        progress(cell, brackets[cell], seconds, counts, active, waiting, options.jobs)
        finally:  # Ctrl-C comes through here too
            for _, job in active.values():
                end(job)
    return [rows[cell] for cell in cells]


def text(case):
    """A case as a key."""
    return json.dumps(case, sort_keys=True)


def progress(cell, bracket, seconds, counts, active, waiting, jobs):
    """One line: what is known of a search, and for about how long all of them will go on."""
    done = [counts[c] for c in counts if c not in active]
    usual = sum(done) / len(done) if done else 6  # probes a search takes
    left = sum(max(1, usual - counts[c]) for c in active) + usual * len(waiting)
    minutes = left * sum(seconds) / len(seconds) / jobs / 60
    low, high = bracket
    bounds = f"{low:,} fits" + (f", {high:,} does not" if high else "")
    line = f"{cell[0]} on {cell[1]}: {bounds} | {sum(counts.values())} probes, about {minutes:.1f} min left"
    end = "\r" if sys.stderr.isatty() else "\n"
    print(f"{line:<100}", end=end, file=sys.stderr, flush=True)


# ---------------------------------------------------------------------------------------------------
# 5. Report
# ---------------------------------------------------------------------------------------------------


def say_table(*rows):
    """Columns aligned: the first to the left, the others to the right; an empty line before."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    columns = [f"{{:{'>' if i else '<'}{width}}}" for i, width in enumerate(widths)]
    print("", *("  " + "   ".join(columns).format(*row) for row in rows), sep="\n")


def report(rows, options):
    """The tables; returns whether every search came to an answer."""
    what = f"{options.model}, {options.dtype}, batch {options.batch}, --loss {options.loss}"
    print(f"\nlongest sequence in tokens, {options.how}: {what}, {options.where}")
    found = {(row["strategy"], row["nproc"]): row for row in rows}
    head = ["strategy", *(f"{world} GPU{'s' if world > 1 else ''}" for world in options.nproc)]
    lines = []
    for name in options.strategies:
        one = (found.get((name, 1)) or {}).get("longest")
        cells = [found[name, world] for world in options.nproc]
        shown = [f"{r['longest']:,}" if r["longest"] is not None else r["verdict"] for r in cells]
        ratios = [f" x{r['longest'] / one:.2f}" if one and r["longest"] else "" for r in cells]
        lines.append([name, *(s + (x if r["nproc"] > 1 else "") for s, x, r in zip(shown, ratios, cells))])
    say_table(head, *lines)
    full = [row for row in rows if row["longest"]]
    if full:
        parts = [*PARTS, "inside kernels"]
        parts = [p for p in parts if any(row["breakdown"][p] for row in full)]
        lines = [
            [f"{row['strategy']} on {row['nproc']}"]
            + [f"{row['breakdown'][p] / GIB:.2f}" for p in parts]
            + [f"{max(row['peak_memory_bytes']) / GIB:.2f}"]
            for row in full
        ]
        say_table(["GiB at the limit", *parts, "peak"], *lines)
    failed = [row for row in rows if row["longest"] is None]
    for row in failed:
        print("", f"  {row['strategy']} on {row['nproc']}: {row['error']}", sep="\n")
        print(*(f"    {line}" for line in row["log"]), sep="\n")
    good = len(rows) - len(failed)
    wrong = [row for row in failed if row["verdict"] == "error"]
    if wrong:
        print(f"\nFAIL oom_search: {wrong[0]['strategy']} on {wrong[0]['nproc']}: {wrong[0]['error']}")
    else:
        tried = f"each length was tried and fits, and {options.step} tokens more were tried and do not"
        print(f"\nPASS oom_search: {good} of {len(rows)} limits found: {tried}")
    return not wrong


COLOURS = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999"]


def draw(rows, options, path):
    """The picture of --plot: lengths as bars, and what fills the memory at the limit."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in rows if row["longest"]]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(13, 2.2 + 0.32 * max(len(rows), 6)))
    width = 0.8 / len(options.nproc)
    for i, world in enumerate(options.nproc):
        bars = [(options.strategies.index(r["strategy"]), r["longest"]) for r in rows if r["nproc"] == world]
        places = [n + (i - (len(options.nproc) - 1) / 2) * width for n, _ in bars]
        label = f"{world} GPU{'s' if world > 1 else ''}"
        drawn = left.bar(places, [b for _, b in bars], 0.92 * width, color=COLOURS[i % 8], label=label)
        left.bar_label(drawn, [short(b) for _, b in bars], fontsize=8)
    left.set_xticks(range(len(options.strategies)), options.strategies)
    left.set_title(f"longest sequence, {options.how}", loc="left")
    left.set_ylabel("tokens")
    left.yaxis.set_major_formatter(lambda value, _: short(value))
    left.legend(frameon=False)
    names = [f"{row['strategy']} on {row['nproc']}" for row in rows]
    begin = [0.0] * len(rows)
    for part, colour in zip((*PARTS, "inside kernels"), COLOURS):
        sizes = [row["breakdown"][part] / GIB for row in rows]
        if any(sizes):
            right.barh(names, sizes, 0.7, left=begin, color=colour, label=part)
        begin = [a + b for a, b in zip(begin, sizes)]
    right.axvline(options.memory_bytes / GIB, color="black", lw=1, ls="--")
    right.invert_yaxis()
    right.set_title("what fills the memory there", loc="left")
    right.set_xlabel("GiB (dashed: all there is)")
    right.legend(frameon=False, fontsize=8, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.12))
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{options.model}, {options.dtype}, batch {options.batch}, {options.where}")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def short(tokens):
    """190464 -> 190k."""
    return f"{tokens / 1e6:.2f}M" if tokens >= 1e6 else f"{tokens / 1e3:.0f}k"


# ---------------------------------------------------------------------------------------------------
# 6. Command line
# ---------------------------------------------------------------------------------------------------


# Copied from tp.py
class Parser(argparse.ArgumentParser):
    """argparse, with its complaint raised instead of printed with the usage."""

    def error(self, message):
        raise Unusable(message)


def positive(text, kind=int):
    """A number above 0, for argparse; whole, unless kind is float."""
    try:
        number = kind(text)
    except ValueError:
        number = 0
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a {'whole ' if kind is int else ''}number above 0")
    return number


def gpu_count():
    """How many GPUs this machine has."""
    return torch.cuda.device_count()


def gpu_name():
    """Which they are; all of one machine's are taken to be the same."""
    return torch.cuda.get_device_name()


def parse(argv):
    """The options, checked as far as can be without a probe."""
    scripts = [name for name, line in STRATEGIES.items() if (HERE / line.script).exists()]
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    names = [*scripts, *ALIASES, "all"]
    add("--strategy", nargs="+", choices=names, default=["all"], metavar="NAME", help=", ".join(names))
    add("--nproc", type=positive, nargs="+", default=[1, 2], metavar="N", help="numbers of GPUs (1 2)")
    add("--lo", type=positive, help="try this length first; found by itself")
    add("--hi", type=positive, help="and then this one; found by itself")
    add("--step", type=positive, default=512, help="lengths are multiples of it (512)")
    add("--model", default="llama-3.2-1b", help="as the scripts take it (llama-3.2-1b)")
    add("--batch", type=positive, default=1, help="sequences (1)")
    add("--dtype", choices=["float32", "bfloat16", "float64"], default="bfloat16")
    add("--attn", choices=["auto", "sdpa", "eager", "flash"], default="auto", help="auto: sdpa")
    add("--loss", choices=["chunked", "full"], default="chunked", help="chunked: full logits never exist")
    again = "block: keep only layers' inputs, and run layers again; offload: keep those in the host's memory"
    add("--recompute", choices=["block", "offload", "none"], default="block", help=again)
    add("--tile", type=positive, default=16384, help="tokens an MLP takes at a time, if recomputed (16384)")
    add("--schedule", help="pp only")
    add("--microbatches", type=positive, help="pp only")
    ways = ["auto", "measured", "emulated", "predicted"]
    add("--how", choices=ways, default="auto", help="auto: by the GPUs there are; predicted with --gpu")
    add("--gpu", choices=GPUS, help="predict for this one (a100-40)")
    number = partial(positive, kind=float)
    add("--memory-gib", type=number, metavar="X", help="what the allocator may take; caps a real GPU too")
    add("--jobs", type=positive, default=min(2, os.cpu_count()), help="predictions at the same time (2)")
    add("--timeout", type=number, default=600.0, metavar="S", help="seconds a probe may take (600)")
    add("--journal", default=".oom_search.jsonl", metavar="FILE", help="of all probes (.oom_search.jsonl)")
    add("--fresh", action="store_true", help="do not use what the journal knows")
    add("--json", metavar="FILE", help="write the results")
    add("--plot", metavar="FILE", help="draw them")
    options = parser.parse_args(argv)
    asked = [ALIASES.get(name, name) for name in options.strategy]
    plain = [name for name in scripts if name != "tp_dtensor"]  # the same plan as tp
    options.strategies = list(dict.fromkeys(n for a in asked for n in (plain if a == "all" else [a])))
    options.nproc = list(dict.fromkeys(options.nproc))
    if options.lo and options.hi and options.lo >= options.hi:
        raise Unusable(f"--lo {options.lo} is not below --hi {options.hi}")
    for path in (options.json, options.plot, options.journal):
        if path and (Path(path).is_dir() or not os.access(Path(path).absolute().parent, os.W_OK)):
            raise Unusable(f"cannot write {path}: a directory, or in none that can be written")
    choose_machine(options)
    return options


def choose_machine(options):
    """Settle how to find out (measured, emulated, predicted) and how much memory there is to fill."""
    gpus, most = gpu_count(), max(options.nproc)
    if options.how == "auto":
        real = "measured" if gpus >= most else "emulated"
        options.how = "predicted" if options.gpu or not gpus else real
    if options.how == "measured" and gpus < most:
        raise Unusable(f"--how measured on {most} GPUs, and this machine has {gpus}; predicted would do")
    if options.how == "emulated" and not gpus:
        raise Unusable("--how emulated needs one GPU; predicted needs none")
    if options.how != "predicted" and options.gpu:
        raise Unusable(f"--gpu {options.gpu} is for predictions; --memory-gib caps a real GPU")
    if options.gpu and options.memory_gib:
        raise Unusable("--gpu and --memory-gib both say how much memory there is: give one of them")
    options.flash, gib = True, options.memory_gib
    options.where = f"{gib:g} GiB" if gib else ""
    if options.how == "predicted" and not gib:
        options.gpu = options.gpu or "a100-40"
        total, options.flash = GPUS[options.gpu]
        gib = total - OUTSIDE
        options.where = f"{options.gpu} ({gib:.1f} GiB for the allocator)"
    elif not gib:
        gib = torch.cuda.get_device_properties(0).total_memory / GIB
        options.where = f"{gpu_name()} ({gib:.1f} GiB)"
    options.memory_bytes = int(gib * GIB)
    if options.how != "predicted":
        options.jobs = 1


def main(argv=None):
    """Returns the exit status: 0 all answered, 1 a strategy had an error, 2 unusable options."""
    try:
        options = parse(argv)
    except Unusable as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends like Ctrl-C: no probe stays behind
    try:
        rows = run_all(options)
    except KeyboardInterrupt:
        print("\nstopped; the same command goes on from here", file=sys.stderr)
        return 130
    if all(row["verdict"] == "unusable" for row in rows):
        print(f"error: {rows[0]['error']}", file=sys.stderr)
        return 2
    answered = report(rows, options)
    keys = ("model", "dtype", "batch", "loss", "recompute", "memory_bytes", "step")
    text = json.dumps({key: getattr(options, key) for key in keys} | {"results": rows}, indent=1) + "\n"
    try:
        if options.json:
            write_whole(options.json, lambda path: Path(path).write_text(text))
        if options.plot:
            write_whole(options.plot, partial(draw, rows, options))
    except Unusable as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    return 0 if answered else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--probe"]:
        probe(json.loads(sys.argv[2]), sys.argv[3])
    else:
        sys.exit(main())
