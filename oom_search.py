"""The longest sequence that fits: how many tokens one training step takes before memory runs out.

    python oom_search.py                                # all strategies, 1 and 2 GPUs, on a laptop
    python oom_search.py --strategy all --nproc 1 2 4 8 --memory-gib 40 --json 40.json
    python oom_search.py --strategy sp --nproc 2 --lo 14000 --hi 40000 --step 512
    python oom_search.py --strategy plain sp --optimizer adamw      # as one trains
    python oom_search.py --strategy plain --nproc 1 --at 4096 32768    # no search: what these take

A step is a forward and a backward: the scripts' own train_step(), with lab 10's means against
memory (--recompute, --tile, --head-chunks). --optimizer adamw adds PyTorch's AdamW, one parameter
after another, its state in float32 on the device or (adamw-host) on the host. "plain" is what
people have before they parallelize: Hugging Face's own model and loss, on one GPU. What runs
depends on what the machine has, and every result says what it was:

  measured    the real job: --nproc ranks on as many GPUs
  emulated    one GPU: the script's --backend fake, one real rank with silent peers; of a pipeline
              the first, a middle and the last stage in turn, and the worst decides
  predicted   no GPU: the same code on PyTorch's device "meta", whose tensors have a size but no
              data. Every tensor is counted from its making to its end, as a GPU's allocator would.

The peak that decides is the step's. Loading comes before it and has a peak of its own, the whole
model beside its shards, which is reported apart: a real GPU has to bear that too.

A prediction counts every tensor that PyTorch makes, in the CUDA allocator's blocks of 512 bytes,
with the attention kernel that a GPU would run and what that takes for itself. It does not count:

  - What lies outside the allocator: the CUDA context, cuBLAS, NCCL's buffers. --gpu leaves OUTSIDE
    for them; --memory-gib is what the allocator itself may take.
  - Fragmentation. Runs on a GPU ask for its remedy, PYTORCH_CUDA_ALLOC_CONF=
    expandable_segments:True; without it expect some percent less.
  - Scratch memory of other kernels (a GEMM's workspace, a sort in the embedding's backward): some
    MiB. Nor cuDNN's attention, which PyTorch may take on an H100: flash attention's is counted.
"""

import argparse
import asyncio
import hashlib
import importlib.util
import json
import math
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import warnings
import weakref
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed._tools.fake_collectives  # collectives of meta tensors: nothing moves
import transformers
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

HERE = Path(__file__).resolve().parent
# The means against memory beside recomputing whole layers, in two; what attention takes on a GPU
LOADED = ["labs/lab10_long_sequences.py", "labs/experiments/means.py"]
LOADED += ["labs/experiments/gpu_kernels.py"]
GIB = 2**30
BLOCK = 512  # bytes: the CUDA allocator's smallest block, of which it deals out whole ones
# GiB of a card that the allocator never has. CUDA's context and cuBLAS: 1.1 GB with NCCL just begun
# (NVIDIA/nccl#1685), 1.8 of an H100 with all of vLLM (vllm-project/vllm#10511). NCCL's rings: 0.5
# to 0.7 a group of A100s (nccl#964), 1.8 of H100s (vllm#10511). Its all-to-all connects each pair
# by up to 32 channels: 4.3 GB in all on 8 H100s (nccl#1685)
OUTSIDE = {"one rank": 1.0, "several": 2.0, "all-to-all": 4.0}
# GPUs: GiB, as torch.cuda.get_device_properties() has them; compute capability
GPUS = {"t4": (14.6, 7.5), "rtx4090": (23.5, 8.9), "a100-40": (39.4, 8.0)}
GPUS |= {"a100-80": (79.2, 8.0), "h100": (79.1, 9.0), "h200": (139.8, 9.0)}
PARTS = ["weights", "gradients", "optimizer state", "saved activations", "working set", "logits"]
PARTS += ["communication buffers", "inside kernels"]
# What the scripts import: a forked probe then has it
PRELOAD = ["torch.distributed.tensor.parallel", "torch.testing._internal.distributed.fake_pg"]
PRELOAD += ["transformers.models.llama.modeling_llama"]
STRATEGIES = {  # the script, and the options that make it this strategy
    "tp": ("tp.py",),
    "tp_dtensor": ("tp.py", "--dtensor"),
    "sp_megatron": ("sp_megatron.py",),
    "sp_ulysses": ("sp_ulysses.py",),
    "pp": ("pp.py",),
    "plain": ("sp_ulysses.py",),  # only its command line, model and batch
}
ALIASES = {"sp": "sp_megatron", "ulysses": "sp_ulysses"}
COMMON = ("model", "batch", "dtype", "attn", "loss")  # every script has them
OWN = {"pp": ("schedule", "microbatches"), "sp_ulysses": ("shard_weights",)}
TILE = 16384
NOTHING = {"ranks": [], "peak_memory_bytes": [], "peak_moment": None, "breakdown": {}}
as_key = partial(json.dumps, sort_keys=True)  # a case, as a key of what is known
gpu_count, gpu_name = torch.cuda.device_count, torch.cuda.get_device_name  # all GPUs are the same


# Copied from tp.py
class UsageError(Exception):
    """Arguments or a model that cannot work; the message says what would."""


def load(path):
    """A file of this project as a module, under its own name."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, HERE / path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


lab, means, gpu_kernels = map(load, LOADED)


# ---- 1. A probe: one step of one rank, in a process of its own -----------------------------------


class Tracker(TorchDispatchMode):
    """Counts the live bytes of all tensors made inside it on one kind of device, and sorts them.

    A block is the storage of a tensor: {bytes, backward: made in the backward, kept: made in the
    forward and alive when a backward began, logits: its rows are as long as (a rank's shard of) the
    vocabulary, communication: a collective read or wrote it}. `blocks` are those alive at the peak,
    `moment` is when it came: "forward", "backward" or "optimizer step".
    """

    def __init__(self, device, vocabulary, others):
        super().__init__()
        self.device, self.now, self.peak, self.live, self.blocks = device, 0, 0, {}, []
        self.vocabulary = vocabulary - others  # not those that by chance are another tensor's too
        self.in_backward = self.at_peak = False
        self.outside = self.moment = "forward"  # outside: what runs when no backward does
        self.shapes = {}  # what a pointwise operation returns: shape, strides, dtype, device
        resize, storage = torch.UntypedStorage.resize_, torch.UntypedStorage
        storage.resize_ = lambda *how: self.resized(*how) or resize(*how)

    def restart(self):
        """Begin a new peak with what is alive now; returns the old one, in bytes."""
        old, self.peak, self.at_peak, self.moment = self.peak, self.now, True, self.outside
        return old

    def add(self, key, size, logits=False):
        size = math.ceil(size / BLOCK) * BLOCK
        what = {"backward": self.in_backward, "kept": False, "communication": False}
        self.live[key] = SimpleNamespace(bytes=size, logits=logits, **what)
        self.now += size
        if self.now > self.peak:
            self.peak, self.at_peak = self.now, True
            self.moment = "backward" if self.in_backward else self.outside

    def resized(self, storage, size):
        """fully_shard drops and fills gathered weights in place: as if it were a new block."""
        if old := self.live.get(storage._cdata):
            self.remove(storage._cdata)
            self.add(storage._cdata, size, old.logits)

    def remove(self, key):
        if self.at_peak:  # the first to go after a new peak: until now everything was there
            self.blocks, self.at_peak = list(self.live.values()), False
        self.now -= self.live.pop(key).bytes

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(hasattr(kind, "full_tensor") for kind in types):
            return NotImplemented  # a DTensor: what it does underneath counts
        backward = torch._C._current_graph_task_id() != -1
        if backward and not self.in_backward:
            for block in self.live.values():
                block.kept = not block.backward
        self.in_backward = backward
        if func.is_view:
            return func(*args, **(kwargs or {}))
        meta = self.device == "meta"
        out = self.pointwise(func, args) if meta and not kwargs else None
        out = func(*args, **(kwargs or {})) if out is None else out
        for tensor in self.own(out):
            storage = tensor.untyped_storage()
            if storage._cdata not in self.live:
                logits = tensor.dim() > 1 and tensor.shape[-1] in self.vocabulary
                self.add(storage._cdata, storage.nbytes(), logits)
                weakref.finalize(storage, self.remove, storage._cdata)
        if func.namespace in ("c10d", "_c10d_functional"):
            for tensor in self.own((args, out)):
                self.live[tensor.untyped_storage()._cdata].communication = True
        if meta and func.name() in gpu_kernels.SCRATCH:
            self.add("scratch", gpu_kernels.SCRATCH[func.name()](*args))
            self.remove("scratch")
        return out

    def pointwise(self, func, args):
        """The result of x * y and the like, by that of operands of the same kind; else None.

        PyTorch works out a meta result in Python, which takes half of a prediction's time.
        """
        aten = torch.ops.aten
        alike = torch.Tag.pointwise in func.tags and not func._schema.is_mutable
        if not alike and func not in (aten.mm.default, aten.mean.dim, aten.sum.dim_IntList):
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
        for x in tree_leaves(tree):
            fake = isinstance(x, torch._subclasses.FakeTensor)
            if isinstance(x, torch.Tensor) and not fake and x.device.type == self.device:
                yield x

    def breakdown(self, model, optimizers):
        """Bytes of each of PARTS at the peak. model: after the step, with its gradients."""
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        states = [x for _, adamw in optimizers for x in (*adamw.state, *tree_leaves(adamw.state))]
        lasting = [("optimizer state", states), ("gradients", gradients)]
        lasting += [("weights", [*model.parameters(), *model.buffers()])]  # also if AdamW's master
        owners = {}
        for owner, tensors in lasting:
            for tensor in map(local, tensors):
                owners[id(self.live.get(tensor.untyped_storage()._cdata))] = owner
        parts = dict.fromkeys(PARTS, 0)
        for block in self.blocks if not self.at_peak else self.live.values():
            owner = "working set"
            if id(block) in owners:
                owner = owners[id(block)]
            elif block.logits:
                owner = "logits"
            elif block.kept and not block.backward:
                owner = "saved activations"
            elif block.communication:
                owner = "communication buffers"
            parts[owner] += block.bytes
        return parts


def local(tensor):
    """What this rank has of a tensor: a DTensor's shard; all of any other."""
    return getattr(tensor, "_local_tensor", tensor)


def host_memory():
    """What save_on_cpu does to tensors without data: off the device, and back as new ones."""
    return torch.autograd.graph.saved_tensors_hooks(
        lambda x: (x.shape, x.stride(), x.dtype),
        lambda kept: torch.empty_strided(kept[0], kept[1], dtype=kept[2], device="meta"),
    )


class MetaStream(torch.cpu.Stream):
    """What fully_shard of PyTorch 2.15 asks of a stream, besides what a CPU's has."""

    stream_id = device_index = device_type = 0


def on_meta(args, attend):
    """Have a script compute nothing: its tensors are meta, nobody looks at the values they lack."""
    args.device, args.source = torch.device("meta"), None  # weights of the right shape will do
    args.config.rope_parameters |= {"rope_type": "default"}  # a dynamic one looks at positions
    torch.library.impl("aten::scaled_dot_product_attention", "AutogradMeta", attend)
    # Positions that start anew would be several texts in one: HF looks at the values, ours never do
    transformers.masking_utils.find_packed_sequence_indices = lambda position_ids: None
    # DTensor and fully_shard ask torch.<device> for devices, of which fully_shard refuses meta
    device = {"current_device": lambda: 0, "current_stream": lambda *_: MetaStream()}
    torch.meta = SimpleNamespace(**vars(torch.cpu) | device)
    FSDPParamGroup._validate_no_meta_params = lambda self: None


def plain_step(model, ids, labels, group, args):
    """A step of Hugging Face's own model, with its own loss."""
    model(input_ids=ids, labels=labels).loss.backward()


def make_adamw(model, host):
    """The optimizer of a run in its steady state: [(parameter, its own AdamW)].

    One for each parameter (of a DTensor this rank's shard), stepped one after another: a step takes
    a gradient and two more of one parameter for itself, not of the model. The state is master
    weight, exp_avg and exp_avg_sq, in float32: 12 bytes a number. A weight of float32 or float64 is
    its own master. host: all of it is in the host's memory.
    """
    optimizers = []
    for parameter in model.parameters():  # tied weights: once
        weight = local(parameter).detach()
        device = "cpu" if host and weight.device.type != "meta" else weight.device
        master = weight.to(device).to(torch.promote_types(weight.dtype, torch.float32))
        adamw = torch.optim.AdamW([master], foreach=False)
        master.grad = torch.zeros_like(master)  # a first step makes exp_avg and exp_avg_sq
        adamw.step()
        master.grad = None
        optimizers.append((parameter, adamw))
    return optimizers


def optimizer_step(optimizers):
    """Gradients go to where the state is, one by one; new weights come back."""
    for parameter, adamw in optimizers:
        if parameter.grad is not None:
            [master] = adamw.state
            gradient = local(parameter.grad).to(master.device)  # in two: a host converts it itself
            master.grad = gradient.to(master.dtype)
            adamw.step()
            master.grad = None
            local(parameter).detach().copy_(master)


def sizes_of(config, length, world):
    """How long rows of (a rank's shard of) the vocabulary are, and how long others are."""
    vocabulary = {config.vocab_size, config.vocab_size // world, -(-config.vocab_size // world)}
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    others = (config.hidden_size, config.intermediate_size, head_dim, length)
    return vocabulary, {size // n for size in others for n in (1, world)}


def apply_means(script, model, group, args, case):
    """Recomputation, tiles and chunks of heads, for the model of any script, in place."""
    tile, chunks, own = case["tile"], case["head_chunks"], {}
    if tile and tile >= args.batch * args.length:  # a tile as long as all tokens is none
        tile = None
    if chunks > 1:
        ulysses = script.__name__ == "sp_ulysses"
        works = means.possible_chunks(model, group.size() if ulysses else 1)
        if getattr(args, "dtensor", False) or getattr(args, "schedule", None) == "zb":
            works = [1]  # neither DTensor nor DeferredLinear knows parts of a weight
        if chunks not in works:
            raise UsageError(f"--head-chunks {chunks}: {', '.join(map(str, works))} would do")
    if hasattr(script, "gather_from_sp_region") and not case["plain"]:
        own = {"gather": script.gather_from_sp_region, "group": group}
    if case["how"] == "predicted":
        own["hooks"] = host_memory
    means.apply_means(lab, model, case["recompute"], tile, chunks, **own)


def run_step(case):
    """One training step, as the script itself runs it; returns the result.

    Its verdict: ran, with the peak, its breakdown, and the peak of loading; oom, and whether it was
    while loading; unusable, and why; and of a process that ends without a verdict: error.
    """
    script, kernels, loading = load(case["script"]), set(), None
    predicted, plain = case["how"] == "predicted", case["plain"]
    try:
        args = script.parse(case["argv"])
        group = script.start(args)
        if plain and group.size() > 1:
            raise UsageError("plain runs on one GPU: --nproc 1 would do")
        cuda = args.device.type == "cuda"
        if predicted:
            on_meta(args, partial(gpu_kernels.attention, case["capability"], kernels))
        elif cuda:
            total = torch.cuda.get_device_properties(args.device).total_memory
            share = min(1.0, case["memory_bytes"] / total)
            torch.cuda.set_per_process_memory_fraction(share, args.device)
        host = case["optimizer"] == "adamw-host"
        # A prediction's host is meta, too: what it does is not counted
        there = _disable_current_modes if host and predicted else nullcontext
        tracker = Tracker(args.device.type, *sizes_of(args.config, args.length, group.size()))
        with tracker, script.upcasts_in_float64(args):
            model = script.load_model(args)
            if not plain:
                model = script.parallelize(model, group, args)
            apply_means(script, model, group, args, case)
            with there():
                optimizers = make_adamw(model, host) if case["optimizer"] != "none" else []
            loading = tracker.restart()
            if cuda:
                loading = torch.cuda.max_memory_allocated()
                torch.cuda.reset_peak_memory_stats()
            ids, labels = script.proof_batch(args, group)
            step = plain_step if plain else script.train_step
            step(model, ids, labels, group, args)
            tracker.outside = "optimizer step"
            with there():
                optimizer_step(optimizers)
        if cuda:
            torch.cuda.synchronize()
    except (script.UsageError, UsageError, gpu_kernels.UnknownKernel) as problem:
        return {"verdict": "unusable", "why": str(problem)}
    except RuntimeError as problem:  # torch.OutOfMemoryError is one; cuBLAS and NCCL raise no other
        why = str(problem)
        if "out of memory" not in why and "CUBLAS_STATUS_ALLOC_FAILED" not in why:
            raise
        return {"verdict": "oom", "loading": loading is None, "why": why.splitlines()[0]}
    peak = torch.cuda.max_memory_allocated() if cuda else tracker.peak
    parts = tracker.breakdown(model, optimizers) | {PARTS[-1]: peak - tracker.peak}
    found = {"verdict": "ran", "peak": peak, "breakdown": parts, "loading_peak_bytes": loading}
    return found | {"peak_moment": tracker.moment, "attention": "; ".join(sorted(kernels))}


def probe(case, rank, folder):
    """The life of a probe's process: run the step, leave log and result in a folder."""

    def watch():  # a search that was killed must not leave a step on the GPU
        multiprocessing.parent_process().join()
        os._exit(1)

    os.setsid()  # Ctrl-C is for the search, which ends its probes
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    threading.Thread(target=watch, daemon=True).start()
    log = os.open(f"{folder}/log_{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    ours = {"RANK": rank, "WORLD_SIZE": case["world"]}  # what torchrun would set
    if case["how"] == "measured":
        ours |= {"LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": case["world"]}
        ours |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 20000 + os.getppid() % 20000}
    os.environ |= {name: str(value) for name, value in ours.items()}
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=FutureWarning)
    transformers.logging.set_verbosity_error()
    found = json.dumps(run_step(case))
    atomic_write(f"{folder}/result_{rank}", lambda draft: draft.write_text(found))
    if case["how"] == "measured":  # whoever leaves first may take the connection with it
        torch.distributed.barrier()


def atomic_write(path, write):
    """Have write(another path) make the file, then rename it to path: all of it, or nothing."""
    with tempfile.TemporaryDirectory(dir=Path(path).absolute().parent) as folder:
        draft = Path(folder, "draft")
        write(draft)
        draft.replace(path)


# ---- 2. Processes: a fresh one for every probe, and none that stays ------------------------------


def launch(case, folder, timeout):
    """Start the processes of a probe; logs and results go to folder."""
    ranks = range(case["world"]) if case["how"] == "measured" else [case["rank"]]
    # A fork has torch loaded already; but CUDA does not survive one
    context = multiprocessing.get_context("fork" if case["how"] == "predicted" else "spawn")
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    job = SimpleNamespace(folder=folder, timeout=timeout, processes={}, begin=time.time())
    for rank in ranks:
        process = context.Process(target=probe, args=(case, rank, folder), daemon=True)
        process.start()
        job.processes[rank] = process
    return job


def results(job):
    """The result of a probe, None before there is one. Bad news ends it: other ranks may hang."""
    ended = [rank for rank, process in job.processes.items() if process.exitcode is not None]
    files = {rank: Path(job.folder, f"result_{rank}") for rank in job.processes}
    found = {rank: json.loads(file.read_text()) for rank, file in files.items() if file.exists()}
    bad = next((r for r in found.values() if r["verdict"] != "ran"), None)
    lost = [rank for rank in ended if rank not in found]
    if not bad and (lost or time.time() - job.begin > job.timeout):
        log = Path(job.folder, f"log_{lost[0] if lost else next(iter(job.processes))}")
        tail = log.read_text(errors="replace").strip().splitlines()[-5:] if log.exists() else []
        why = f"no result after {job.timeout} s (--timeout)"
        why = "its process ended without a result" if lost else why
        bad = {"verdict": "error", "why": why, "log": tail}
    if not bad and len(ended) < len(job.processes):
        return None
    end(job)
    worst = bad or max(found.values(), key=lambda r: r["peak"])
    return worst | {"peaks": [found[r].get("peak") for r in sorted(found)]}


def end(job):
    """Leave no process of a probe behind."""
    for process in job.processes.values():
        process.kill()
        process.join()


# ---- 3. The search -------------------------------------------------------------------------------


async def search(budget, take, first, second=None):
    """Find the largest k that fits; `fits, peaks = await take(k)` tries one.

    peaks: {k: bytes}, what is known of the memory that lengths take; it may be empty. Returns k (0:
    not even 1), which was tried, as was k + 1, which does not fit. Memory is close to a straight
    line in the length: two peaks tell where the limit should be, and most tries only confirm it.
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
        fits, new = await take(k)
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


def ranks_to_try(name, world):
    """Those that may need most: of a pipeline the first, a middle and the last; else the first."""
    return sorted({0, world // 2, world - 1}) if name == "pp" else [0]


def budget(name, world, options):
    """Bytes that the allocator has. Of a whole card (--gpu) it has less where there are peers."""
    kind = "one rank" if world == 1 else "all-to-all" if name == "sp_ulysses" else "several"
    peers = OUTSIDE[kind] - OUTSIDE["one rank"]
    return options.memory_bytes - (int(peers * GIB) if options.gpu else 0)


def takes(found, world, room, options):
    """What a length takes, by the rank that needs most; found: {rank: result of its probe}."""
    out = next((result for result in found.values() if result["verdict"] == "oom"), None)
    if out:
        when = "while loading model and optimizer, before any" if out["loading"] else "in the"
        return NOTHING | {"fits": False, "note": f"out of memory {when} step: {out['why']}"}
    worst = max(found.values(), key=lambda r: r["peak"])
    fits = worst["peak"] <= room
    keys = ("peak_moment", "breakdown", "loading_peak_bytes", "attention")
    row = {"fits": fits} | {key: worst[key] for key in keys}
    row["ranks"] = list(range(world)) if options.how == "measured" else list(found)
    row["peak_memory_bytes"] = [peak for result in found.values() for peak in result["peaks"]]
    if fits and worst["loading_peak_bytes"] > room:
        row["note"] = "loading, the whole model at once, takes more than there is"
    return row


class Ended(Exception):
    """A search that cannot go on: (what it adds to the row of the --json)."""


async def answer(name, world, options, ask):
    """The row of the --json of one strategy on `world` GPUs: a search, or the lengths of --at.

    ask(case): the result of a probe, awaited.
    """
    step, tried, room = 1 if options.at else options.step, {}, budget(name, world, options)
    bracket = [0, None]  # longest known to fit, shortest known not to
    row = {"strategy": name, "nproc": world, "how": options.how, "step": step, "verdict": "found"}
    row["loss"] = options.loss if name != "plain" else "full"

    async def take(k):
        found, peaks = {}, {}
        for rank in [0] if options.how == "measured" else ranks_to_try(name, world):
            found[rank] = result = await ask(make_case(name, world, rank, k * step, options))
            if result["verdict"] in ("error", "unusable"):
                why = {"error": result["why"], "log": result.get("log", [])}
                raise Ended({"longest": None, "verdict": result["verdict"]} | why)
            fits = result["verdict"] == "ran" and result["peak"] <= room
            if result["verdict"] == "oom" or not (fits or options.at):  # a search knows enough
                break
        tried[k] = entry = takes(found, world, room, options)
        bracket[0 if entry["fits"] else 1] = k * step
        progress(row, bracket)
        if result.get("loading") and not options.at:  # no matter how long the sequence is
            raise Ended({"longest": 0, "too_long": k * step} | entry)
        if parts := entry["breakdown"]:
            peaks[k] = max(entry["peak_memory_bytes"])
            # The optimizer's step takes as much, however short the sequence is
            flat = entry["peak_moment"] == "optimizer step"
            peaks[0] = peaks[k] if flat else parts["weights"] + parts["optimizer state"]
        return entry["fits"], peaks

    try:
        if options.at:
            entries = [{"length": k} | (await take(k), tried[k])[1] for k in options.at]
            return row | {"at": entries}
        start = 98304 if options.how == "predicted" else 16384  # one of them may run out of memory
        first = max(1, (options.lo or start * world) // step)
        longest = await search(room, take, first, options.hi and max(first + 1, options.hi // step))
    except Ended as end:
        return row | end.args[0]
    kernel = next(iter(tried.values())).get("attention")
    entry = tried.get(longest, NOTHING | {"attention": kernel})
    return row | {"longest": longest * step, "too_long": bracket[1]} | entry


def make_case(name, world, rank, length, options):
    """All that decides a probe's result, and nothing else: equal cases need no second probe."""
    script, *argv = STRATEGIES[name]
    argv += ["--mode", "benchmark", "--length", str(length)]
    for option in COMMON + OWN.get(name, ()):
        value, flag = getattr(options, option), f"--{option.replace('_', '-')}"
        argv += [] if value in (None, False) else [flag] if value is True else [flag, str(value)]
    if options.how != "measured":
        argv += ["--backend", "fake"]
    argv += ["--recompute", "none" if options.recompute == "none" else "full"]
    model = Path(options.model).absolute()
    files = [HERE / file for file in (*LOADED, script, "oom_search.py", model / "config.json")]
    contents = b"".join(file.read_bytes() for file in files if file.is_file())
    contents += str(model.stat().st_mtime_ns).encode() if model.is_file() else b""  # a .gguf
    case = {"how": options.how, "script": script, "argv": argv, "world": world, "rank": rank}
    case |= {"plain": name == "plain", "versions": [torch.__version__, transformers.__version__]}
    for own in ("optimizer", "recompute", "tile", "head_chunks"):
        case[own] = getattr(options, own)
    if not options.tile and name != "plain" and options.recompute in ("full", "offload"):
        case["tile"] = TILE
    case["sha256"] = hashlib.sha256(contents).hexdigest()
    if options.how == "predicted":  # a peak serves any budget
        return case | {"capability": options.capability}
    return case | {"gpu": gpu_name(), "memory_bytes": options.memory_bytes}


# ---- 4. Running many: the journal, the progress line, Ctrl-C -------------------------------------


def read_journal(path):
    """{case as text: result} of what was probed before. What a kill cut short is passed over."""
    known = {}
    for line in Path(path).read_text().splitlines() if Path(path).exists() else []:
        with suppress(ValueError):
            entry = json.loads(line)
            known[as_key(entry["case"])] = entry["result"]
    return known


def append(path, entry):
    """An entry more, at once and on a line of its own, whatever a kill has left before it."""
    try:
        with open(path, "a") as file:
            file.write(f"\n{json.dumps(entry)}\n")
    except OSError as problem:  # a full disk: the search can do without, its resumption cannot
        print(f"error: cannot write the journal {path}: {problem.strerror}", file=sys.stderr)


async def run_all(options, stop):
    """Search every strategy on every number of GPUs; returns the rows in the order asked for.

    stop: an Event, set by Ctrl-C; then no probe stays behind.
    """
    cells = [(name, world) for name in options.strategies for world in options.nproc]
    known = {} if options.fresh else read_journal(options.journal)
    turns = asyncio.Semaphore(options.jobs)

    async def ask(folder, case):
        """The result of a probe: from the journal, or by running it."""
        if as_key(case) in known:
            return known[as_key(case)]
        job = launch(case, tempfile.mkdtemp(dir=folder), options.timeout)
        try:
            while not (result := results(job)):
                if stop.is_set():
                    raise InterruptedError
                await asyncio.sleep(0.02)
        finally:
            end(job)
        if result["verdict"] in ("ran", "oom"):  # an error may not come again
            known[as_key(case)] = result
            append(options.journal, {"case": case, "result": result})
        return result

    async def run_cell(cell, folder):
        async with turns:
            return await answer(*cell, options, partial(ask, folder))

    if options.how == "predicted":
        for name in PRELOAD:
            importlib.import_module(name)
    with tempfile.TemporaryDirectory(prefix="oom_search_") as folder:
        return await asyncio.gather(*(run_cell(cell, folder) for cell in cells))


def count(world):
    """A number of ranks, in words."""
    return f"{world} rank{'s' if world > 1 else ''}"


def label(row):
    """A strategy and its number of ranks, in words."""
    return f"{row['strategy']} on {count(row['nproc'])}"


def progress(row, bracket):
    """One line: what is known of a search."""
    line = f"{label(row)}: {bracket[0]:,} fits"
    line += f", {bracket[1]:,} does not" if bracket[1] else ""
    print(f"{line:<100}", end="\r" if sys.stderr.isatty() else "\n", file=sys.stderr, flush=True)


# ---- 5. Report -----------------------------------------------------------------------------------


def say_table(*rows):
    """Columns aligned: the first to the left, the others to the right; an empty line before."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    columns = [f"{{:{'>' if i else '<'}{width}}}" for i, width in enumerate(widths)]
    print("", *("  " + "   ".join(columns).format(*row) for row in rows), sep="\n")


def answers(rows):
    """(label, tokens, what they take), of each limit that was found, or of all of --at."""
    entries = [(label(row), entry) for row in rows for entry in row.get("at", [row])]
    found = [(name, e.get("length") or e.get("longest"), e) for name, e in entries]
    return [answer for answer in found if answer[1]]


def say_limits(rows, options):
    """Strategies by number of ranks."""
    found = {(row["strategy"], row["nproc"]): row for row in rows}
    lines = [["strategy", *map(count, options.nproc)]]
    for name in options.strategies:
        one, cells = (found.get((name, 1)) or {}).get("longest"), [name]
        for world in options.nproc:
            longest = found[name, world]["longest"]
            cell = found[name, world]["verdict"] if longest is None else f"{longest:,}"
            cells.append(cell + (f" x{longest / one:.2f}" if one and longest and world > 1 else ""))
        lines.append(cells)
    say_table(*lines)


def say_parts(rows, options):
    """What fills the memory at each length."""
    found = answers(rows)
    parts = [part for part in PARTS if any(x["breakdown"].get(part) for *_, x in found)]
    lines = [["GiB", "tokens", *parts, "peak", "(loading)", "peak in", "fits"]]
    for name, tokens, entry in found:
        cells = ["-"] * (len(parts) + 2) + ["out of memory"]
        if entry["breakdown"]:
            sizes = [entry["breakdown"][part] for part in parts]
            sizes += [max(entry["peak_memory_bytes"]), entry["loading_peak_bytes"]]
            cells = [*(f"{size / GIB:.2f}" for size in sizes), entry["peak_moment"]]
        lines.append([name, f"{tokens:,}", *cells, "yes" if entry["fits"] else "no"])
    if found:
        say_table(*(line if options.at else line[:-1] for line in lines))
        print("  peak: the step's; (loading): the one before, of the whole model beside its shards")
        print("  gradients: those that were complete at the peak; 0.00: it came before them")


def report(rows, options):
    """The tables; returns whether every search came to an answer."""
    what = f"{options.model}, {options.dtype}, batch {options.batch}, --loss {options.loss}, "
    what += f"--optimizer {options.optimizer}, {options.where}"
    asked = "peak memory of a step" if options.at else "longest sequence in tokens"
    print(f"\n{asked}, {options.how}: {what}")
    if "plain" in options.strategies:
        print("plain: Hugging Face's own model and loss, all logits at once whatever --loss says")
    entries = [(label(row), entry) for row in rows for entry in row.get("at", [row])]
    for kernel in sorted({e["attention"] for _, e in entries if e.get("attention")}):
        print(f"attention: {kernel}")
    if not options.at:
        say_limits(rows, options)
    say_parts(rows, options)
    for name, entry in entries:
        if why := entry.get("error") or entry.get("note"):
            where = f", {entry['length']:,} tokens" if "length" in entry else ""
            log = [f"    {line}" for line in entry.get("log", [])]
            print(f"\n  {name}{where}: {why}", *log, sep="\n")
    if wrong := [row for row in rows if row["verdict"] == "error"]:
        print(f"\nFAIL oom_search: {label(wrong[0])}: {wrong[0]['error']}")
        return False
    searched = f"each length was tried and fits, {options.step} tokens more were tried and do not"
    limits = [row for row in rows if row["verdict"] == "found"]
    told = f"{len(limits)} of {len(rows)} limits found: {searched}"
    if options.at:
        fit = [entry["fits"] for *_, entry in answers(rows)]
        told = f"{sum(fit)} of the {len(fit)} steps that were tried fit, {options.where}"
    print(f"\nPASS oom_search: {told}")
    return True


# ---- 6. Command line -----------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    """argparse, with its complaint raised instead of printed with the usage."""

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
    """The options, checked as far as can be without a probe."""
    scripts = [name for name, (script, *_) in STRATEGIES.items() if (HERE / script).exists()]
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add, number = parser.add_argument, partial(positive, kind=float)
    names, four = [*scripts, *ALIASES, "all"], "all: the four scripts; plain: Hugging Face's model"
    add("--strategy", nargs="+", choices=names, default=["all"], help=four)
    add("--nproc", nargs="+", type=positive, default=[1, 2], metavar="N", help="ranks (1 2)")
    add("--at", nargs="+", type=positive, default=[], metavar="N", help="no search, these lengths")
    add("--lo", type=positive, help="try this length first; found by itself")
    add("--hi", type=positive, help="and then this one; found by itself")
    add("--step", type=positive, default=512, help="lengths are multiples of it (512)")
    add("--model", default="llama-3.2-1b", help="as the scripts take it (llama-3.2-1b)")
    add("--batch", type=positive, default=1, help="sequences (1)")
    add("--dtype", choices=["float32", "bfloat16", "float64"], default="bfloat16")
    add("--attn", choices=["sdpa", "eager", "flash"], default="sdpa", help="PyTorch's sdpa")
    add("--loss", choices=["chunked", "full"], default="chunked", help="full: all logits at once")
    again = "full: keep layers' inputs; selective: and slow results; offload: inputs, on the host"
    kinds = ["full", "selective", "offload", "none"]
    add("--recompute", choices=kinds, default="full", help=again)
    add("--tile", type=positive, help=f"a rank's tokens in a tile ({TILE} where layers recompute)")
    add("--head-chunks", type=positive, default=1, metavar="N", help="of attention's heads (1)")
    add("--optimizer", choices=["none", "adamw", "adamw-host"], default="none", help="its step too")
    add("--shard-weights", action="store_true", help="sp_ulysses only")
    add("--schedule", help="pp only")
    add("--microbatches", type=positive, help="pp only")
    add("--how", choices=["auto", "measured", "emulated", "predicted"], default="auto")
    add("--gpu", choices=GPUS, help="predict for this one (a100-40)")
    add("--memory-gib", type=number, metavar="X", help="the allocator's; caps a real GPU too")
    add("--jobs", type=positive, default=min(2, os.cpu_count()), help="predictions at a time (2)")
    add("--timeout", type=number, default=600.0, metavar="S", help="seconds a probe may take (600)")
    add("--journal", default=".oom_search.jsonl", metavar="FILE", help="all probes (%(default)s)")
    add("--fresh", action="store_true", help="do not use what the journal knows")
    add("--json", metavar="FILE", help="write the results; results/plot.py draws them")
    options = parser.parse_args(argv)
    four = [name for name in scripts if name not in ("tp_dtensor", "plain")]
    asked = [four if name == "all" else [ALIASES.get(name, name)] for name in options.strategy]
    options.strategies = list(dict.fromkeys(sum(asked, [])))
    options.nproc, options.at = (list(dict.fromkeys(x)) for x in (options.nproc, options.at))
    if options.at and (options.lo or options.hi):
        raise UsageError("--at searches nothing: without --lo and --hi it would do")
    if options.lo and options.hi and options.lo >= options.hi:
        raise UsageError(f"--lo {options.lo} is not below --hi {options.hi}")
    for path in filter(None, (options.json, options.journal)):
        if Path(path).is_dir() or not os.access(Path(path).absolute().parent, os.W_OK):
            raise UsageError(f"cannot write {path}: a directory, or in none that can be written")
    choose_machine(options)
    return options


def choose_machine(options):
    """Settle how to find out (measured, emulated, predicted), and the memory there is to fill."""
    gpus, most = gpu_count(), max(options.nproc)
    if options.how == "auto":
        real = "measured" if gpus >= most else "emulated"
        options.how = "predicted" if options.gpu or not gpus else real
    if options.how == "measured" and gpus < most:
        raise UsageError(f"--how measured on {most} GPUs, and this machine has {gpus}: too few")
    if options.how == "emulated" and not gpus:
        raise UsageError("--how emulated needs one GPU; predicted needs none")
    if options.how != "predicted" and options.gpu:
        raise UsageError(f"--gpu {options.gpu} is for predictions; --memory-gib caps a real GPU")
    if options.gpu and options.memory_gib:
        raise UsageError("--gpu and --memory-gib both say how much there is: give one of them")
    options.capability, gib = 8.0, options.memory_gib
    options.where = f"{gib:g} GiB" if gib else ""
    if options.how == "predicted" and not gib:
        options.gpu = options.gpu or "a100-40"
        total, options.capability = GPUS[options.gpu]
        gib = total - OUTSIDE["one rank"]
        rooms = ", ".join(f"{kind} {total - size:.1f}" for kind, size in OUTSIDE.items())
        options.where = f"{options.gpu} (GiB for the allocator: {rooms})"
    elif not gib:
        gib = torch.cuda.get_device_properties(0).total_memory / GIB
        options.where = f"{gpu_name()} ({gib:.1f} GiB)"
    options.memory_bytes = int(gib * GIB)
    options.jobs = options.jobs if options.how == "predicted" else 1


def main(argv=None):
    """Returns the exit status: 0 all answered, 1 a strategy had an error, 2 unusable options."""
    if sys.platform == "win32":
        print("error: needs Linux or macOS; on Windows use WSL", file=sys.stderr)
        return 2
    try:
        options = parse(argv)
        stop = threading.Event()  # an exception would be lost where it meets a fork
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: stop.set())
        rows = asyncio.run(run_all(options, stop))
        if all(row["verdict"] == "unusable" for row in rows):
            raise UsageError(rows[0]["error"])
        answered = report(rows, options)
        keys = ("model", "dtype", "batch", "loss", "recompute", "optimizer", "memory_bytes", "step")
        out = {key: getattr(options, key) for key in keys} | {"results": rows}
        if options.json:
            text = json.dumps(out, indent=1) + "\n"
            try:
                atomic_write(options.json, lambda draft: draft.write_text(text))
            except OSError as problem:  # a full disk
                raise UsageError(f"cannot write {options.json}: {problem}") from None
        return 0 if answered else 1
    except UsageError as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    except (KeyboardInterrupt, InterruptedError):
        print("\nstopped; the same command goes on from here", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
