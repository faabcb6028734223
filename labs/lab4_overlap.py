"""Lab 4: Overlap. A layer's backward whose messages travel while its GEMMs run.

y = x W^T, W cut by output features: o/P of them on each of P ranks (lab 2's column parallel layer). Its
backward is two GEMMs and, under sequence parallelism (SP), two messages. How long does it take?

    dgrad   dx = dy W       (s, b, h)     a partial sum: it has to be reduced over the ranks
    wgrad   dW = dy^T x     (o/P, h)      reads x of all tokens: only the shard (s/P, b, h) was saved

dgrad does not read x, and wgrad does not read dx. So each GEMM can run while the other's message travels:

    blocking      link      |all-gather x|       |reduce-scatter dx|
                  compute                |-dgrad-|                 |-wgrad-|

    overlapped    link      |all-gather x|reduce-scatter dx|
                  compute   |---dgrad----|------wgrad------|
                            ^ start      ^ wait, start     ^ wait

Plain tensor parallelism (TP) holds x whole. It has one message, the all-reduce of dx, under wgrad: as many
bytes as the two above, under one GEMM instead of two. With C seconds of GEMM and M of message, C + M become
max(C, M): twice as fast at best, where M = C, and never slower than either alone.

Two more habits of Megatron's layer: the gathered x lives in one buffer that all layers share (a second
get() of it is the same memory: whoever keeps the first one reads the second's data, and nobody complains),
and wgrad adds right into a float32 main_grad, which makes no gradient tensor at all.

CUDA_DEVICE_MAX_CONNECTIONS=1. On a GPU "start" only queues a kernel: the message on one stream, the GEMM on
another, and streams have no order. The host hands kernels over through several hardware queues (8 by
default), so the GEMM, although launched second, may be first. It then fills all multiprocessors, and the
message, which needs a few, starts when the GEMM ends: nothing overlaps. With one queue kernels are handed
over as they were launched: message first, GEMM around it. No value ever changes, only the time. Megatron-LM
demands it for TP and context parallelism up to Hopper (compute capability below 10), and no longer since
Blackwell. FSDP wants more than one queue: what it prefetches is independent work on other streams. A CPU
has no such queues: here a thread carries the messages, over a simulated slow link.

    python labs/lab4_overlap.py                      # checks and experiments, about half a minute
    python labs/lab4_overlap.py --plot lab4.png --json lab4.json
    python labs/lab4_overlap.py --inject-bug list
    python labs/lab4_overlap.py --pairs 15           # more timings

Sources: Megatron-LM, arXiv 2205.05198 (the shard is saved, and gathered again). Megatron-LM:
megatron/core/tensor_parallel/layers.py (LinearWithGradAccumulationAndAsyncCommunication), core/utils.py
(GlobalMemoryBuffer), training/arguments.py (which GPUs need the one queue). Nanotron:
src/nanotron/parallel/tensor_parallel/functional.py. NeMo: tp_comm_overlap, Transformer Engine's finer way:
GEMMs cut into pieces, which hides messages in the forward too. DeepSpeed: runtime/domino/transformer.py,
which cuts the batch in two for that.
"""

import argparse
import importlib.util
import json
import math
import multiprocessing
import os
import signal
import statistics
import sys
import tempfile
import time
import traceback
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from multiprocessing import connection
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves

# ---------------------------------------------------------------------------------------------------
# The lesson 1: where the gathered input lives, and where the weight's gradient goes
# ---------------------------------------------------------------------------------------------------


class GlobalMemoryBuffer:
    """Memory that all layers share for what is needed only for a moment (Megatron-LM).

    buffer {(name, dtype): a flat tensor}: each grows to the largest size ever asked for, and stays.
    """

    def __init__(self):
        self.buffer = {}

    def get_tensor(self, shape, dtype, name):
        """A contiguous tensor of that shape, its values arbitrary, in the memory of (name, dtype).

        It allocates only where what is there is too small; otherwise two calls return the same memory:
        what the first returned is lost as soon as the second is written to.
        """
        # exercise: memory_buffer
        size = math.prod(shape)
        held = self.buffer.get((name, dtype))
        if held is None or held.numel() < size:
            held = self.buffer[name, dtype] = torch.empty(size, dtype=dtype)
        return held[:size].view(shape)
        # end exercise


BUFFER = GlobalMemoryBuffer()


def weight_gradient(grad, x, main_grad):
    """The wgrad GEMM: dW = grad^T x, summed over all tokens, from grad (s, b, o/P) and x (s, b, h).

    Without main_grad (None): returns dW (o/P, h) in the dtype of x. With it (float32, (o/P, h)): adds dW to
    main_grad in place and returns None. Products of two bfloat16 are exact in float32 and are to be added up
    there: nothing may be rounded to bfloat16 on the way. (On a GPU Apex's wgrad_gemm_accum_fp32 reads
    bfloat16 and adds in float32, in one kernel; a CPU's GEMM wants one dtype.)
    """
    grad, x = grad.flatten(0, 1), x.flatten(0, 1)  # (s * b, o/P), (s * b, h)
    # exercise: accumulation_fusion
    if main_grad is None:
        return grad.T @ x
    main_grad.addmm_(grad.T.float(), x.float())
    return None
    # end exercise


# ---------------------------------------------------------------------------------------------------
# The lesson 2: linear layers
# ---------------------------------------------------------------------------------------------------
# Shapes are Megatron's, (s, b, h): with the tokens first the ranks' shards are joined along dim 0, which is
# what all_gather_into_tensor and reduce_scatter_tensor do, right in the memory they are given.


class TPLinear(torch.autograd.Function):
    """y = F.linear(x, weight, bias), x (s, b, h) the same on all ranks, -> (s, b, o/P).

    weight (o/P, h), bias (o/P) or None. A weight with a main_grad gets its gradient there, see above.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, group):
        ctx.group, ctx.main_grad = group, getattr(weight, "main_grad", None)
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, grad):
        """grad (s, b, o/P) -> the gradients of x (s, b, h), summed over the ranks, of weight, and of bias or
        None (ctx.needs_input_grad[2] is False).

        dist.all_reduce(tensor, group=..., async_op=True) returns a handle at once; the tensor belongs to the
        link until handle.wait() returns. The all-reduce of dx travels while weight_gradient() runs.
        """
        x, weight = ctx.saved_tensors
        # exercise: tp_backward
        dx = grad @ weight  # (s, b, h), of this rank's features alone
        handle = dist.all_reduce(dx, group=ctx.group, async_op=True)
        dw = weight_gradient(grad, x, ctx.main_grad)
        db = grad.sum((0, 1)) if ctx.needs_input_grad[2] else None
        handle.wait()
        return dx, dw, db, None
        # end exercise


class SPLinear(torch.autograd.Function):
    """y = F.linear(x of all tokens, weight, bias), x (s/P, b, h) the rank's tokens, -> (s, b, o/P).

    weight (o/P, h), bias (o/P) or None. Every rank brings as many tokens.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, group):
        """Gathers x into BUFFER's memory for "mpu" (Megatron's name) and saves only the shard."""
        ctx.group, ctx.main_grad = group, getattr(weight, "main_grad", None)
        x = x.contiguous()
        # exercise: sp_linear
        ctx.save_for_backward(x, weight)
        total = BUFFER.get_tensor(
            (group.size() * x.shape[0], *x.shape[1:]), x.dtype, "mpu"
        )  # (s, b, h)
        dist.all_gather_into_tensor(
            total, x, group=group
        )  # nothing to hide it under: the GEMM reads it
        return F.linear(total, weight, bias)
        # end exercise

    @staticmethod
    def backward(ctx, grad):
        """grad (s, b, o/P) -> the gradients of x (s/P, b, h), of weight, and of bias or None.

        x is gathered again, into BUFFER, while dgrad runs; dx is reduce-scattered while wgrad runs.
        dist.all_gather_into_tensor(out, x, group=..., async_op=True) and
        dist.reduce_scatter_tensor(out, dx, group=..., async_op=True) return handles.
        """
        x, weight = ctx.saved_tensors
        # exercise: sp_linear
        total = BUFFER.get_tensor((ctx.group.size() * x.shape[0], *x.shape[1:]), x.dtype, "mpu")
        gather = dist.all_gather_into_tensor(total, x, group=ctx.group, async_op=True)
        dx = grad @ weight  # (s, b, h)
        gather.wait()
        mine = torch.empty_like(x)  # not of BUFFER: the caller keeps it
        scatter = dist.reduce_scatter_tensor(mine, dx, group=ctx.group, async_op=True)
        dw = weight_gradient(grad, total, ctx.main_grad)
        db = grad.sum((0, 1)) if ctx.needs_input_grad[2] else None
        scatter.wait()
        return mine, dw, db, None
        # end exercise


tp_linear = TPLinear.apply  # (x (s, b, h), weight, bias, group) -> (s, b, o/P)
sp_linear = SPLinear.apply  # (x (s/P, b, h), weight, bias, group) -> (s, b, o/P)


# ---------------------------------------------------------------------------------------------------
# The link: what a GPU's communication stream is to these layers
# ---------------------------------------------------------------------------------------------------


class Link(torch.utils._python_dispatch.TorchDispatchMode):
    """A slow wire beside the processor, and a log of what happens when (times in seconds).

    Inside it dist's collectives run on a thread of their own, one after the other, while the caller goes on.
    Each takes seconds_per_byte for each of its bytes on the wire, and `late` more because this rank is
    late; only then does it read and write its tensors. What it will receive into is NaN until then.

    mode "overlapped"; "blocking": a start waits at once, as with async_op=False; "unwaited": wait() does not.
    gemms {elements of the output: name}. After it:
    log [(what, begin, end)]: "start all_gather", "wait all_gather", "dgrad", ..., in their order;
    messages [(op, begin, end)]: when they travelled; traffic: how many bytes.
    """

    OPS = {"all_reduce": "all_reduce", "all_gather_into_tensor": "all_gather"}
    OPS |= {"reduce_scatter_tensor": "reduce_scatter"}

    def __init__(self, gemms, seconds_per_byte=0.0, late=0.0, mode="overlapped"):
        super().__init__()
        self.gemms, self.seconds_per_byte, self.late, self.mode = (
            gemms,
            seconds_per_byte,
            late,
            mode,
        )
        self.log, self.messages, self.traffic = [], [], Traffic()

    def __enter__(self):
        self.thread, self.patches = ThreadPoolExecutor(1), ExitStack()
        for name, op in self.OPS.items():
            start = partial(self.start, getattr(dist, name), op)
            self.patches.enter_context(mock.patch.object(dist, name, start))
        return super().__enter__()

    def __exit__(self, *problem):
        super().__exit__(*problem)
        self.thread.shutdown()  # what nobody waited for arrives too
        self.patches.close()

    def start(self, collective, op, *given, group, async_op=False, **options):
        tensors = [tensor for tensor in given if isinstance(tensor, torch.Tensor)]
        begin, message = time.perf_counter(), max(tensor.nbytes for tensor in tensors)
        factor = 2 if op == "all_reduce" else 1  # it is a reduce-scatter and an all-gather
        wire = factor * message * (group.size() - 1) / group.size()  # bytes that a rank sends
        if tensors[0].untyped_storage().data_ptr() != tensors[-1].untyped_storage().data_ptr():
            tensors[0].fill_(torch.nan)

        def carry():
            begin = time.perf_counter()
            time.sleep(self.late + self.seconds_per_byte * wire)
            with self.traffic:  # a dispatch mode belongs to a thread
                collective(*given, group=group, **options)
            self.messages.append((op, begin, time.perf_counter()))

        arrival = self.thread.submit(carry)
        self.note(f"start {op}", begin)
        if self.mode == "blocking" or not async_op:
            self.wait(op, arrival)
        return SimpleNamespace(wait=partial(self.wait, op, arrival)) if async_op else None

    def wait(self, op, arrival):
        begin = time.perf_counter()
        if self.mode != "unwaited":
            arrival.result()
        self.note(f"wait {op}", begin)

    def note(self, what, begin):
        self.log.append((what, begin, time.perf_counter()))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        begin = time.perf_counter()
        out = func(*args, **(kwargs or {}))
        if func._opname in ("mm", "addmm", "addmm_", "bmm", "baddbmm", "baddbmm_"):
            self.note(self.gemms.get(out.numel(), "another GEMM"), begin)
        return out


# ---------------------------------------------------------------------------------------------------
# Checks
# ---------------------------------------------------------------------------------------------------

LATE = 0.1  # seconds that one of the ranks joins each message late
START = "start the message before the GEMM that hides it"
WAIT = (
    "wait after the GEMM, which then hides the message, and before its result is read or returned"
)
TP_ORDER = [  # (first, then, hint)
    ("dgrad", "start all_reduce", "it sends dx"),
    ("start all_reduce", "wgrad", START),
    ("wgrad", "wait all_reduce", WAIT),
]
SP_ORDER = [
    ("start all_gather", "dgrad", START),
    ("dgrad", "wait all_gather", WAIT),
    ("wait all_gather", "wgrad", "wgrad reads what is gathered: wait for it"),
    ("dgrad", "start reduce_scatter", "it sends dx"),
    ("start reduce_scatter", "wgrad", START),
    ("wgrad", "wait reduce_scatter", WAIT),
]


# Copied from tp.py
def split(n, rank, world):
    """[start, end) of the rank's share of n things: the first n % world ranks hold one more."""
    base, extra = divmod(n, world)
    return rank * base + min(rank, extra), (rank + 1) * base + min(rank + 1, extra)


def one_device(generator, group, s, b, h, o, way, bias=True):
    """A linear layer on one device, and what this rank holds of it and should get.

    Returns x, weight, bias, dy: this rank's inputs; y, dx, dw, db: what one device gives there; own_dx: dx
    without the other ranks; gemms: the names of the layer's GEMMs, for a Link.
    """

    def randn(*shape):
        return torch.randn(*shape, generator=generator)

    x, weight, dy = randn(s, b, h), randn(o, h), randn(s, b, o)
    offset = randn(o) if bias else torch.zeros(o)
    start, end = split(o, group.rank(), group.size())
    weight_shard, dy_shard = weight[start:end].clone(), dy[..., start:end].clone()
    tokens = slice(None) if way == "TP" else slice(*split(s, group.rank(), group.size()))
    return SimpleNamespace(
        x=x[tokens].clone().requires_grad_(),
        weight=weight_shard.requires_grad_(),
        bias=offset[start:end].clone().requires_grad_() if bias else None,
        dy=dy_shard,
        y=(x @ weight.T + offset)[..., start:end],
        dx=(dy @ weight)[tokens],
        own_dx=(dy_shard @ weight_shard.detach())[tokens],
        dw=(dy.flatten(0, 1).T @ x.flatten(0, 1))[start:end],
        db=dy.sum((0, 1))[start:end] if bias else None,
        gemms={s * b * h: "dgrad", (end - start) * h: "wgrad", s * b * (end - start): "forward"},
    )


def draw_layers(seed, group, way):
    """Two layers of different uneven sizes, the second without bias, as one_device() describes them.

    A rank has fewer output features than inputs, and fewer of those than tokens: no two GEMMs are as large.
    """
    generator = torch.Generator().manual_seed(seed)
    layers = []
    for bias in True, False:
        n, h, o = (
            torch.randint(low, low + 5, (), generator=generator).item() for low in (3, 8, 11)
        )
        layers.append(one_device(generator, group, n * group.size(), 2, h, o, way, bias))
    return layers


def kept_storages(layer, function, group):
    """(y, {address: bytes}) of the memory that function keeps for its backward, the weight's not counted."""
    kept = []

    def note(tensor):
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        y = function(layer.x, layer.weight, layer.bias, group)
    kept += [t for t in tree_leaves(list(vars(y.grad_fn).values())) if isinstance(t, torch.Tensor)]
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}
    sizes.pop(layer.weight.untyped_storage().data_ptr(), None)
    return y, sizes


def expect_order(log, wanted):
    """Raise Wrong unless the log has, for each (first, then, hint), first before then."""
    order = [what for what, _, _ in log]
    for first, then, hint in wanted:
        for what in first, then:
            expect(what in order, f"no '{what}' in the backward: {', '.join(order)}", hint)
        found = f"'{then}' is before '{first}': {', '.join(order)}"
        expect(order.index(first) < order.index(then), found, hint)


def check_layers(function, group, seed, way, order, forward, backward):
    """Both layers forward, then both backward, one rank late, and only then compared with one device.

    order: of the backward, as expect_order() takes it; forward, backward: the collectives allowed.
    """
    layers, worst = draw_layers(seed, group, way), 0
    late = LATE if group.rank() == seed % group.size() else 0

    def expect_moved(link, ops):
        """Each of ops once, all tokens in it."""
        wanted = {op: [1, layer.x.nbytes * group.size() ** (way == "SP")] for op in ops}
        expect(
            link.traffic.ops == wanted, f"[calls, bytes] moved: {link.traffic.ops}, not {wanted}"
        )

    for layer in layers:
        layer.given = [t.detach().clone() for t in (layer.x, layer.weight, layer.dy)]
        with Link(layer.gemms, late=late) as link:
            layer.out, sizes = kept_storages(layer, function, group)
        expect_moved(link, forward)
        kept = sum(sizes.values())
        found = f"{kept} bytes are kept for the backward; {layer.x.nbytes} will do"
        expect(kept <= layer.x.nbytes, found, "keep the shard x, not the gathered one")
    for layer in reversed(layers):
        with Link(layer.gemms, late=late) as link:
            layer.out.backward(layer.dy)
            early = layer.x.grad.clone()  # before what was not waited for arrives
        expect_order(link.log, order)
        expect_moved(link, backward)
        summed = {"every rank's part of dx goes into the sum, before it is returned": layer.own_dx}
        worst = max(worst, expect_close("dx", early, layer.dx, hints=summed))
    for layer in layers:  # after the other layer has used the buffer
        got = [
            ("y", layer.out, layer.y),
            ("dx", layer.x.grad, layer.dx),
            ("dW", layer.weight.grad, layer.dw),
        ]
        got += [("db", layer.bias.grad, layer.db)] if layer.bias is not None else []
        for name, mine, right in got:
            expect(mine is not None, f"{name} is None")
            with suppress(Wrong):
                worst = max(worst, expect_close(name, mine, right))
                continue
            expect_close(f"{name}, after another layer's turn,", mine, right)
        for name, now, before in zip(
            ["x", "weight", "dy"], (layer.x, layer.weight, layer.dy), layer.given
        ):
            expect(
                torch.equal(now, before), f"{name} is overwritten", "a collective works in place"
            )
    return worst, layers[0]


def check_memory_buffer(lab, group, seed):
    generator = torch.Generator().manual_seed(seed)
    a, b, c = (torch.randint(2, 9, (), generator=generator).item() for _ in range(3))
    buffer = lab.GlobalMemoryBuffer()

    def get(*shape, dtype=torch.float32, name="mpu", of=buffer):
        tensor = of.get_tensor(shape, dtype, name)
        expect(isinstance(tensor, torch.Tensor), f"get_tensor returns {type(tensor).__name__}")
        found = f"{tuple(tensor.shape)} {tensor.dtype}, not {shape} {dtype}"
        expect(tensor.shape == shape and tensor.dtype == dtype, found)
        expect(tensor.is_contiguous(), "it is not contiguous", "a collective wants it so")
        return tensor

    first = get(a, b, c).fill_(1)
    small = get(c, b - 1).fill_(2)
    aliased = small.data_ptr() == first.data_ptr()
    expect(aliased, "a smaller tensor gets memory of its own", "what is there is large enough")
    expect(first.flatten()[0] == 2, "what is written to the second is not seen in the first")
    again = get(c, b, a).data_ptr() == first.data_ptr()
    expect(again, "another shape gets memory of its own", "the key is (name, dtype)")
    large = get(a + 1, b, c)
    held = large.untyped_storage().nbytes()
    expect(held == large.nbytes, f"{held} bytes are held for {large.nbytes}")
    expect(get(a, c).data_ptr() == large.data_ptr(), "it shrinks again", "it only grows")
    others = {
        "another dtype": get(a, b, dtype=torch.bfloat16),
        "another name": get(a, b, name="other"),
        "another buffer": get(a, b, of=lab.GlobalMemoryBuffer()),
    }
    for what, other in others.items():
        expect(other.data_ptr() != large.data_ptr(), f"{what} shares memory")
    get(0, c)
    return f"6 tensors share {held} bytes; another dtype, name or buffer has its own"


def check_accumulation_fusion(lab, group, seed):
    generator = torch.Generator().manual_seed(seed)
    s, b, h, o, batches = 5, 2, 9, 7, 64

    def randn(*shape):
        return torch.randn(*shape, generator=generator)

    weight, main_grad = randn(o, h).bfloat16().requires_grad_(), randn(o, h)
    right, rounded = main_grad.double(), main_grad.clone()
    in_bfloat16, before = main_grad.bfloat16(), main_grad.clone()
    x, grad = randn(s, b, h).bfloat16(), randn(s, b, o).bfloat16()
    alone = grad.flatten(0, 1).T @ x.flatten(0, 1)
    expect_close("dW without main_grad", lab.weight_gradient(grad, x, None), alone, 1e-2)
    weight.main_grad = main_grad
    for _ in range(
        batches
    ):  # the same sign in all microbatches: as gradients are, and where bfloat16 stalls
        x, grad = randn(s, b, h).abs().bfloat16(), randn(s, b, o).abs().bfloat16()
        y = lab.tp_linear(x.requires_grad_(), weight, None, group)
        y.backward(grad)
        x, grad = x.detach().flatten(0, 1), grad.flatten(0, 1)
        right += grad.double().T @ x.double()
        rounded += (grad.T @ x).float()
        in_bfloat16 += grad.T @ x
    expect(
        weight.grad is None, "a gradient tensor is made too", "return None where main_grad got it"
    )
    hints = {
        "the product is rounded to bfloat16 before it is added": rounded,
        "it is added up in bfloat16": in_bfloat16.float(),
        "add to what is there": (grad.float().T @ x.float()),
        "nothing reached main_grad: work in place": before,
    }
    error = expect_close("main_grad", main_grad, right.float(), 1e-6, hints=hints)
    apart = (in_bfloat16.double() - right).norm() / right.norm()
    return f"{batches} microbatches: off by {error:.0e}; added up in bfloat16: {apart:.0e}"


def check_tp_backward(lab, group, seed):
    error, layer = check_layers(lab.tp_linear, group, seed, "TP", TP_ORDER, [], ["all_reduce"])
    return f"off by {error:.0e}; all-reduce of {layer.x.nbytes} bytes started before wgrad, waited after"


def check_sp_linear(lab, group, seed):
    moved = ["all_gather"], ["all_gather", "reduce_scatter"]
    error, layer = check_layers(lab.sp_linear, group, seed, "SP", SP_ORDER, *moved)
    kept = f"{layer.x.nbytes} bytes kept of {layer.x.nbytes * group.size()}"
    return f"off by {error:.0e}; {kept}; all-gather under dgrad, reduce-scatter under wgrad"


CHECKS = {
    "memory_buffer": (check_memory_buffer, 1),
    "accumulation_fusion": (check_accumulation_fusion, 1),
    "tp_backward": (check_tp_backward, 3),
    "sp_linear": (check_sp_linear, 3),
}


# ---------------------------------------------------------------------------------------------------
# Experiments
# ---------------------------------------------------------------------------------------------------

TOKENS, HIDDEN, FEATURES = 512, 1024, 1920  # of the timed layer: 2 ranks, 960 output features each
RATIOS = 0.25, 0.5, 1, 2, 4  # of the time of an all-gather to that of a GEMM
LATE_RANK_1 = 0.4  # seconds, in the experiment of who does not wait
LAYERS = {"TP": (tp_linear, TP_ORDER), "SP": (sp_linear, SP_ORDER)}


def gemm_seconds(group, layer):
    """Median time of the layer's dgrad GEMM while every rank runs its own, on the slowest rank."""
    times = []
    for _ in range(7):
        dist.barrier(group)
        begin = time.perf_counter()
        layer.dy @ layer.weight.detach()
        times.append(time.perf_counter() - begin)
    slowest = torch.tensor(statistics.median(times[1:]))  # the first one warms up
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
    return slowest.item()


def run_backward(group, layer, y, **link):
    """One backward through a Link: {"seconds", "log", "messages"}, whose times count from its start."""
    layer.x.grad = layer.weight.grad = layer.bias.grad = None
    with Link(layer.gemms, **link) as link:
        dist.barrier(group)
        begin = time.perf_counter()
        y.backward(layer.dy, retain_graph=True)
        run = {"seconds": time.perf_counter() - begin}
    for name in "log", "messages":
        run[name] = [[what, start - begin, end - begin] for what, start, end in getattr(link, name)]
    return run


def hidden(run):
    """The fraction of a run's message time during which a GEMM runs."""
    gemms = [(begin, end) for what, begin, end in run["log"] if what in ("dgrad", "wgrad")]
    under = sum(
        max(0, min(end, e) - max(begin, b)) for _, begin, end in run["messages"] for b, e in gemms
    )
    return under / sum(end - begin for _, begin, end in run["messages"])


def timings_on_rank(group, seed, pairs):
    """Blocking and overlapped backwards in turn: TP once, SP at each ratio.

    Returns (seconds of a GEMM, {(way, ratio): [(blocking run, overlapped run), ...]}).
    """
    generator, runs, gemm = torch.Generator().manual_seed(seed), {}, None
    wire = 4 * TOKENS * HIDDEN * (group.size() - 1) / group.size()  # bytes of an all-gather
    for way, (function, order) in LAYERS.items():
        layer = one_device(generator, group, TOKENS, 1, HIDDEN, FEATURES, way)
        y = function(layer.x, layer.weight, layer.bias, group)
        gemm = gemm or gemm_seconds(group, layer)
        for ratio in RATIOS if way == "SP" else [1]:
            runs[way, ratio], pace = [], ratio * gemm / wire
            for i in range(pairs if ratio == 1 else 3):
                pair = {}
                for mode in ("blocking", "overlapped")[
                    :: (-1) ** i
                ]:  # they take turns at going first
                    pair[mode] = run_backward(group, layer, y, seconds_per_byte=pace, mode=mode)
                    expect_close("dx", layer.x.grad, layer.dx)
                    expect_close("dW", layer.weight.grad, layer.dw)
                expect_order(pair["overlapped"]["log"], order)
                runs[way, ratio].append((pair["blocking"], pair["overlapped"]))
    return gemm, runs


UNDER = {"all_reduce": "wgrad", "all_gather": "dgrad", "reduce_scatter": "wgrad"}


def could_hide(run):
    """(seconds that would be gained were each message of a blocking run under its GEMM, messages / GEMMs)."""
    gemms = {what: end - begin for what, begin, end in run["log"]}
    messages = [(end - begin, gemms[UNDER[op]]) for op, begin, end in run["messages"]]
    return sum(map(min, messages)), sum(m for m, _ in messages) / (gemms["dgrad"] + gemms["wgrad"])


def timings(args):
    """The gain by overlap; returns {"gemm_seconds", "gains": rows, "timelines": {way: runs of rank 0}}."""
    ranks = on_ranks(2, timings_on_rank, args.seed, args.pairs, timeout=120)
    gemm, rows, timelines = ranks[0][0], [], {}
    for way, ratio in ranks[0][1]:
        pairs = list(
            zip(*(runs[way, ratio] for _, runs in ranks))
        )  # [pair][rank][blocking, overlapped]
        seconds = [
            [max(rank[mode]["seconds"] for rank in pair) for mode in (0, 1)] for pair in pairs
        ]
        gains = [blocking / overlapped for blocking, overlapped in seconds]
        blocking, overlapped = (statistics.median(column) for column in zip(*seconds))
        row = {"way": way, "ratio": ratio, "blocking_s": blocking, "overlapped_s": overlapped}
        row["gain"] = statistics.median(gains)
        could = [could_hide(rank[0]) for pair in pairs for rank in pair]
        row["at_best"] = blocking / (blocking - statistics.median(gained for gained, _ in could))
        row["message_over_gemm"] = statistics.median(over for _, over in could)
        row["hidden"] = statistics.median(hidden(rank[1]) for pair in pairs for rank in pair)
        rows.append(row)
        if ratio == 1:
            middle = gains.index(statistics.median_low(gains))
            timelines[way] = dict(zip(["blocking", "overlapped"], pairs[middle][0]))
    print(
        f"\na backward on 2 ranks, {TOKENS} tokens, {HIDDEN} -> {FEATURES // 2} features each;",
        end=" ",
    )
    print(f"a GEMM takes {1000 * gemm:.0f} ms; medians of {args.pairs} pairs, or 3")
    print("(messages / GEMMs and at best: of the blocking runs, were each message under its GEMM)")
    head = [
        "",
        "messages / GEMMs",
        "blocking ms",
        "overlapped ms",
        "gain",
        "at best",
        "message time hidden",
    ]
    print_table(head, *(
        [r["way"], f"{r['message_over_gemm']:.2f}", f"{1000 * r['blocking_s']:.0f}",
         f"{1000 * r['overlapped_s']:.0f}", f"{r['gain']:.2f}", f"{r['at_best']:.2f}", f"{r['hidden']:.0%}"]
        for r in rows
    ))  # fmt: skip
    return {"gemm_seconds": gemm, "gains": rows, "timelines": timelines}


def unwaited_on_rank(group, seed):
    """Rows of what a late message does to who does not wait: fractions of elements that are wrong."""
    rows, generator = [], torch.Generator().manual_seed(seed)

    def wrong(mine, right):
        return (~torch.isclose(mine, right, rtol=1e-3, atol=1e-3)).double().mean().item()

    for way, (function, _) in LAYERS.items():
        for mode in "overlapped", "unwaited":
            layer = one_device(generator, group, 8, 2, 16, 10, way)
            y = function(layer.x, layer.weight, layer.bias, group)
            with Link(layer.gemms, late=LATE_RANK_1 * group.rank(), mode=mode):
                y.backward(layer.dy)
                row = {
                    "way": way,
                    "waits": mode == "overlapped",
                    "dx": wrong(layer.x.grad, layer.dx),
                }
                rows.append(row | {"dw": wrong(layer.weight.grad, layer.dw)})
    return rows


def unwaited(args):
    """The same backward, waiting and not, rank 1 late; returns (rows, what did not hold)."""
    rows = on_ranks(2, unwaited_on_rank, args.seed)[0]
    print(
        f"\nrank 1 joins every message {1000 * LATE_RANK_1:.0f} ms late: wrong elements of rank 0's gradients"
    )
    head = ["", "handle.wait()", "dx", "dW"]
    print_table(head, *(
        [r["way"], "called" if r["waits"] else "left out", f"{r['dx']:.0%}", f"{r['dw']:.0%}"] for r in rows
    ))  # fmt: skip
    holds = {
        "who waits reads the right gradients": all(
            r["dx"] == r["dw"] == 0 for r in rows if r["waits"]
        ),
        "who does not wait reads a wrong dx": all(r["dx"] > 0.9 for r in rows if not r["waits"]),
    }
    return rows, [text for text, held in holds.items() if not held]


class KeptLinear(torch.autograd.Function):
    """sp_linear, but what was gathered, into place(shape), is kept for the backward. bias is None."""

    @staticmethod
    def forward(ctx, x, weight, bias, group, place):
        ctx.group, ctx.shape = group, x.shape
        total = place((group.size() * x.shape[0], *x.shape[1:]))
        dist.all_gather_into_tensor(total, x, group=group)
        ctx.save_for_backward(total, weight)
        return F.linear(total, weight)

    @staticmethod
    def backward(ctx, grad):
        total, weight = ctx.saved_tensors
        mine = grad.new_empty(ctx.shape)
        dist.reduce_scatter_tensor(mine, grad @ weight, group=ctx.group)
        return mine, weight_gradient(grad, total, None), None, None, None


def in_shared_memory(shape):
    """Where Megatron gathers x. Right for what is read at once, wrong for what is kept."""
    return BUFFER.get_tensor(shape, torch.float32, "mpu")


SHARD, OWN, SHARED = "the shard, gathered again", "all of x", "all of x, in the shared buffer"
WAYS_TO_KEEP = {
    SHARD: sp_linear,
    OWN: lambda *given: KeptLinear.apply(*given, torch.empty),
    SHARED: lambda *given: KeptLinear.apply(*given, in_shared_memory),
}


def aliasing_on_rank(group, seed):
    """Rows of the aliasing experiment: two layers, of which each keeps its input for the backward."""
    rows = []
    for kept in WAYS_TO_KEEP:
        generator, memory = torch.Generator().manual_seed(seed), {}
        layers = [one_device(generator, group, 128, 2, 256, 64, "SP", bias=False) for _ in range(2)]
        for layer in layers:
            layer.out, sizes = kept_storages(layer, WAYS_TO_KEEP[kept], group)
            memory |= sizes
        for layer in reversed(layers):
            layer.out.backward(layer.dy)
        errors = [
            (torch.norm(one.weight.grad - one.dw) / torch.norm(one.dw)).item() for one in layers
        ]
        rows.append({"kept": kept, "bytes": sum(memory.values()), "dw_errors": errors})
    return rows


def aliasing(args):
    """What keeping shared memory does to the first layer's gradient; returns (rows, what did not hold)."""
    rows = on_ranks(2, aliasing_on_rank, args.seed)[0]
    print("\ntwo layers, each with an x (128, 2, 256) of its own: how far off is its dW?")
    head = ["kept for the backward", "bytes", "first layer's dW", "second layer's dW"]
    print_table(
        head, *([r["kept"], r["bytes"], *(f"{e:.0%}" for e in r["dw_errors"])] for r in rows)
    )
    shard, own, (first, second) = (row["dw_errors"] for row in rows)
    holds = {
        "what is gathered again, or kept in its own memory, is right": max(shard + own) < 1e-5,
        "what is kept in the shared buffer is the last layer's": first > 0.1 and second < 1e-5,
    }
    return rows, [text for text, held in holds.items() if not held]


def experiment(args):
    """{"gemm_seconds", "gains", "timelines", "unwaited", "aliasing", "failed": what did not hold}."""
    results = timings(args)
    (results["unwaited"], first), (results["aliasing"], second) = unwaited(args), aliasing(args)
    return results | {"failed": first + second}


# Okabe and Ito's colours
DGRAD, WGRAD, MESSAGE, OTHER = "#0072B2", "#56B4E9", "#E69F00", "#999999"


def draw(results, path):
    """The picture of --plot: when rank 0's messages and GEMMs ran, and the gain at each speed of the link."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(14, 5.5), width_ratios=[2.2, 1])
    draw_timelines(left, results["timelines"])
    rows = [row for row in results["gains"] if row["way"] == "SP"]
    finer = [2 ** (i / 16) for i in range(-40, 41)]
    curve = [(1 + ratio) / max(1, ratio) for ratio in finer]
    right.plot(finer, curve, color=OTHER, label="at best: (C + M) / max(C, M)")
    measured = [row["message_over_gemm"] for row in rows], [row["gain"] for row in rows]
    right.plot(*measured, "o", color=DGRAD, label="measured, medians")
    right.set_xscale("log", base=2)
    right.set_xticks(RATIOS, [f"{ratio:g}" for ratio in RATIOS])
    right.set(
        xlabel="M / C: time of the messages / of the GEMMs", ylabel="blocking / overlapped time"
    )
    right.set(ylim=(0.7, 2.1), title="SP: the gain at other speeds of the link")
    right.legend(loc="lower center")
    for axis in left, right:
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def draw_timelines(axis, timelines):
    """A row for the link and one for the processor, of each way and mode, over time in ms."""
    colours, ticks, row = {"dgrad": DGRAD, "wgrad": WGRAD}, [], 0
    for way, runs in timelines.items():
        for mode, run in runs.items():
            events = [(*event, 0) for event in run["messages"]]
            events += [(*event, 1) for event in run["log"] if event[0] in colours]
            for what, begin, end, lane in events:
                box = {"color": colours.get(what, MESSAGE), "edgecolor": "white", "height": 0.9}
                axis.barh(row + lane, 1000 * (end - begin), left=1000 * begin, **box)
                label = what.replace("_", "-")
                colour = "white" if what == "dgrad" else "black"
                axis.text(
                    500 * (begin + end), row + lane, label, ha="center", va="center", color=colour
                )
            axis.plot([1000 * run["seconds"]] * 2, [row - 0.5, row + 1.5], color="black", lw=1.5)
            ticks += [(row, f"{way}, {mode}: link"), (row + 1, "processor")]
            row += 3 if mode == "overlapped" else 2.4
    axis.set_yticks(*zip(*ticks))
    axis.invert_yaxis()
    axis.set(
        xlabel="ms since the backward began (black: it returns)",
        title="rank 0's backward, as it was logged",
    )


# ---------------------------------------------------------------------------------------------------
# Sabotage
# ---------------------------------------------------------------------------------------------------


class OtherDist:
    """torch.distributed for a lab, with some functions replaced."""

    def __init__(self, **replaced):
        vars(self).update(replaced)

    def __getattr__(self, name):
        return getattr(dist, name)


def replace_collectives(lab, change):
    """Have the lab call change(name, *tensors, **options) for each of the link's collectives."""
    lab.dist = OtherDist(**{name: partial(change, name) for name in Link.OPS})


def waits_at_once(lab):
    """Every message is waited for where it starts: nothing overlaps, all values right."""

    def change(name, *tensors, **options):
        getattr(dist, name)(*tensors, **options | {"async_op": False})
        return SimpleNamespace(wait=lambda: None)

    replace_collectives(lab, change)


def leaves_when_waited_for(lab):
    """A message starts only when it is waited for: nothing overlaps, all values right."""

    def change(name, *tensors, async_op=False, **options):
        send = partial(getattr(dist, name), *tensors, **options)
        return SimpleNamespace(wait=send) if async_op else send()

    replace_collectives(lab, change)


def never_waits(lab):
    """Nothing waits for a message."""

    def change(name, *tensors, **options):
        getattr(dist, name)(*tensors, **options)
        return SimpleNamespace(wait=lambda: None)

    replace_collectives(lab, change)


def dx_not_summed(lab):
    """The all-reduce brings every rank its own dx."""

    def change(name, *tensors, **options):
        tensors = [torch.clone(t) for t in tensors] if name == "all_reduce" else tensors
        return getattr(dist, name)(*tensors, **options)

    replace_collectives(lab, change)


def gathered_input_kept(lab):
    """The gathered x is kept for the backward beside the shard."""
    right = lab.SPLinear.forward

    def forward(ctx, x, weight, bias, group):
        y = right(ctx, x, weight, bias, group)
        ctx.total = x.repeat(group.size(), 1, 1)
        return y

    lab.SPLinear.forward = staticmethod(forward)


def dx_in_shared_buffer(lab):
    """The dx that the backward returns lives in the buffer that the next layer gathers into."""
    right = lab.SPLinear.backward

    def backward(ctx, grad):
        dx, *rest = right(ctx, grad)
        return lab.BUFFER.get_tensor(dx.shape, dx.dtype, "mpu").copy_(dx), *rest

    lab.SPLinear.backward = staticmethod(backward)


def buffer_never_reused(lab):
    """Every get_tensor() allocates."""
    lab.GlobalMemoryBuffer.get_tensor = lambda self, shape, dtype, name: torch.empty(
        shape, dtype=dtype
    )


def buffer_ignores_name(lab):
    """Two names share memory."""
    right = lab.GlobalMemoryBuffer.get_tensor
    lab.GlobalMemoryBuffer.get_tensor = lambda self, shape, dtype, name: right(
        self, shape, dtype, "mpu"
    )


def buffer_shrinks(lab):
    """Memory is held for the latest shape instead of the largest."""
    right = lab.GlobalMemoryBuffer.get_tensor

    def get_tensor(self, shape, dtype, name):
        if (name, dtype) in self.buffer and self.buffer[name, dtype].numel() > 2 * math.prod(shape):
            del self.buffer[name, dtype]
        return right(self, shape, dtype, name)

    lab.GlobalMemoryBuffer.get_tensor = get_tensor


def product_rounded(lab):
    """wgrad's product is rounded to bfloat16 before float32 adds it up."""
    right = lab.weight_gradient

    def weight_gradient(grad, x, main_grad):
        dw = right(grad, x, None)
        if main_grad is None:
            return dw
        main_grad += dw

    lab.weight_gradient = weight_gradient


def main_grad_overwritten(lab):
    """Each microbatch's gradient replaces what main_grad had."""
    right = lab.weight_gradient

    def weight_gradient(grad, x, main_grad):
        return right(grad, x, main_grad if main_grad is None else main_grad.zero_())

    lab.weight_gradient = weight_gradient


BUGS = [
    waits_at_once,
    leaves_when_waited_for,
    never_waits,
    dx_not_summed,
    gathered_input_kept,
    dx_in_shared_buffer,
    buffer_never_reused,
    buffer_ignores_name,
    buffer_shrinks,
    product_rounded,
    main_grad_overwritten,
]


# ---------------------------------------------------------------------------------------------------
# Harness: the same in every lab
# ---------------------------------------------------------------------------------------------------


# Copied from labs/lab8_3d.py
class Unusable(Exception):
    """An argument that cannot work; its message says what would. Ends as `error: ...`, exit 2."""


# Copied from labs/lab8_3d.py
class Wrong(Exception):
    """What a check found wrong with an exercise, and a hint at what usually causes it."""

    def __init__(self, found, hint=""):
        super().__init__(found, hint)
        self.found, self.hint = found, hint


# Copied from labs/lab8_3d.py
def expect(holds, found, hint=""):
    """Raise Wrong where something does not hold."""
    if not holds:
        raise Wrong(found, hint)


# Copied from labs/lab8_3d.py
def expect_close(name, mine, right, tolerance=1e-5, hints=None):
    """Raise Wrong unless ||mine - right|| <= tolerance ||right||; returns the relative error.

    hints {text: tensor}: if mine is that tensor instead, the text is the hint.
    """
    expect(
        isinstance(mine, torch.Tensor),
        f"{name} is {type(mine).__name__}, not a tensor",
        "return the result",
    )
    expect(
        mine.shape == right.shape, f"{name} has shape {tuple(mine.shape)}, not {tuple(right.shape)}"
    )

    def error(other):
        apart = torch.linalg.vector_norm((mine - other).double())
        return (apart / torch.linalg.vector_norm(other.double()).clamp(min=1e-30)).item()

    known = [text for text, other in (hints or {}).items() if other.shape == right.shape]
    known = [text for text in known if error(hints[text]) <= tolerance < error(right)]
    hint = known[0] if known else ""
    expect(
        error(right) <= tolerance,
        f"{name} is off by {error(right):.1e} (at most {tolerance:.0e})",
        hint,
    )
    return error(right)


# Copied from labs/lab8_3d.py
class Traffic(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts what this rank's collectives and sends move while inside it: {op: [calls, bytes]}.

    Bytes of the whole message (all_gather: what comes out; reduce_scatter: what goes in; all_to_all: the
    rank's own input).
    """

    OPS = {"allreduce": "all_reduce", "allgather": "all_gather", "reducescatter": "reduce_scatter"}
    OPS |= {"alltoall": "all_to_all", "send": "send", "broadcast": "broadcast", "reduce": "reduce"}
    OPS |= {
        "gather": "gather",
        "scatter": "scatter",
    }  # a name starts with one of these, the first that fits

    def __init__(self):
        super().__init__()
        self.ops = {}

    def bytes(self, op):
        return self.ops.get(op, [0, 0])[1]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func._opname.replace("_", "")
        op = next((op for start, op in self.OPS.items() if name.startswith(start)), None)
        if op and func.namespace in ("c10d", "_c10d_functional"):
            tensors = [
                [t for t in tree_leaves(x) if isinstance(t, torch.Tensor)] for x in (*args, out)
            ]
            sizes = [sum(t.nbytes for t in ts) for ts in tensors]
            if op == "all_to_all":  # c10d names the output before the input
                sizes = [sizes[1 if func.namespace == "c10d" else 0]]
            entry = self.ops.setdefault(op, [0, 0])
            entry[0] += 1
            entry[1] += max(sizes)
        return out


# Copied from labs/lab8_3d.py
def load(path):
    """The file of a lab, or of a learner's answers to it, as a module."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# Copied from labs/lab8_3d.py
def rank_main(rank, world, rendezvous, pipe, limit, function, args):
    """A rank's process: join the others, run function(group, *args), send back what it returns."""
    os.dup2(
        os.open(os.devnull, os.O_WRONLY), 2
    )  # gloo complains there about ranks that others' errors ended
    signal.alarm(limit)  # its parent ends it long before; this is for a parent that was killed
    torch.set_num_threads(1)
    # torch 2.13 renames all_gather_into_tensor and reduce_scatter_tensor; 2.11 knows only these names
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    store = dist.FileStore(rendezvous, world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    try:
        answer = True, function(dist.group.WORLD, *args)
    except Wrong as wrong:
        answer = False, wrong
    except NotImplementedError as todo:
        answer = False, Wrong(f"not done yet: {todo}")
    except BaseException as problem:  # whatever a learner's code may raise
        frames = traceback.extract_tb(problem.__traceback__)
        ours = [frame.line for frame in frames if not frame.filename.startswith(torch.__path__[0])]
        first = str(problem).partition("\n")[0]
        answer = False, Wrong(f"{type(problem).__name__}: {first} (in: {ours[-1]})")
    pipe.send(answer)
    with suppress(EOFError):
        pipe.recv()  # stay till the end: a rank that leaves early breaks the others' connections


# Copied from labs/lab8_3d.py
def on_ranks(world, function, *args, timeout=60):
    """[function(group, *args) of each rank], run by `world` processes of this machine, over gloo.

    Raises Wrong: the first one that a rank raised, or one naming the ranks still busy after `timeout`
    seconds. function is one of a module's own, and args and results can be pickled.
    """
    context = multiprocessing.get_context(
        "forkserver"
    )  # forks ranks from a process that has torch already
    heavy = {"torch.distributed", "transformers.models.llama.modeling_llama"} & sys.modules.keys()
    context.set_forkserver_preload(
        [*heavy, "torch._dynamo"]
    )  # the first dispatch mode imports that: 2 s
    with tempfile.TemporaryDirectory() as folder, ExitStack() as ending:
        pipes = {}
        for rank in range(world):
            here, there = context.Pipe()
            start = (rank, world, f"{folder}/store", there, int(timeout) + 60, function, args)
            process = context.Process(target=rank_main, args=start, daemon=True)
            process.start()
            ending.callback(process.join)
            ending.callback(process.kill)
            there.close()
            pipes[here] = rank
        busy = dict(pipes)  # those that have not answered
        results, end = [None] * world, time.monotonic() + timeout
        while busy:
            ready = connection.wait(busy, max(0, end - time.monotonic()))
            silent = ", ".join(map(str, busy.values()))
            hint = (
                "a send without its recv, a collective that some rank skips, or a loop without end"
            )
            expect(ready, f"no answer from rank {silent} in {timeout} s", hint)
            wrong = []
            for pipe in ready:
                rank = busy.pop(pipe)
                try:
                    fine, results[rank] = pipe.recv()
                except EOFError:
                    fine, results[rank] = False, Wrong("died")
                wrong += [] if fine else [rank]
            if wrong:  # a death first: the others' errors come of it
                rank = min(wrong, key=lambda rank: results[rank].found != "died")
                raise Wrong(f"rank {rank}: {results[rank].found}", results[rank].hint)
        return results


# Copied from labs/lab8_3d.py
def check_on_rank(group, answers, bug, name, seed):
    """One exercise's check on this rank. answers: the file of the lab, or of a learner's copy of it."""
    lab = load(answers)
    if bug:
        globals()[bug](lab)
    check, _ = CHECKS[name]
    return check(lab, group, seed)


# Copied from labs/lab8_3d.py
def print_table(*rows):
    """Columns aligned to the left, after an empty line."""
    cells = [
        [f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in row] for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(*cells)]
    print(
        "",
        *("  " + "   ".join(c.ljust(w) for c, w in zip(row, widths)).rstrip() for row in cells),
        sep="\n",
    )


# Copied from labs/lab8_3d.py
def run_checks(args):
    """Run every exercise's check; returns {name: {"passed", "report"}}, and prints them as a table."""
    results, rows = {}, [["exercise", "ranks", "", "what was seen"]]
    for name, (_, world) in CHECKS.items():
        try:
            report, passed = (
                on_ranks(world, check_on_rank, __file__, args.inject_bug, name, args.seed)[0],
                True,
            )
        except Wrong as wrong:
            report, passed = wrong.found, False
        results[name] = {"passed": passed, "report": report}
        rows.append([name, world, "PASS" if passed else "FAIL", report])
    print_table(*rows)
    return results


# Copied from labs/lab8_3d.py
def main(argv=None):
    """Returns the exit status: 0 all held, 1 a check failed, 2 unusable arguments."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of the checks' inputs (0)")
    parser.add_argument("--json", metavar="FILE", help="write the results")
    parser.add_argument("--plot", metavar="FILE", help="draw them")
    parser.add_argument(
        "--inject-bug", metavar="NAME", help="run with a bug that must be caught; list: name them"
    )
    add_options(parser)
    try:
        args = parser.parse_args(argv)
        if args.inject_bug == "list":
            print(*(f"  {bug.__name__:28} {bug.__doc__}" for bug in BUGS), sep="\n")
            return 0
        if args.inject_bug not in (None, *(bug.__name__ for bug in BUGS)):
            raise Unusable(f"no bug {args.inject_bug}; --inject-bug list names them")
        for path in (args.json, args.plot):
            if path and (
                Path(path).is_dir() or not os.access(Path(path).absolute().parent, os.W_OK)
            ):
                raise Unusable(f"cannot write {path}: a directory, or in none that can be written")
        results = {"lab": Path(__file__).stem, "exercises": run_checks(args), **experiment(args)}
        failed = [name for name, result in results["exercises"].items() if not result["passed"]]
        failed += [name for name in results.get("failed", []) if name not in failed]
        results["passed"] = not failed
        count = f"all {len(results['exercises'])} exercises' checks hold"
        print(
            f"\n{'FAIL' if failed else 'PASS'} {results['lab']}: {', '.join(failed) or count}",
            flush=True,
        )
        if args.json:
            write_whole(
                args.json, lambda path: Path(path).write_text(json.dumps(results, indent=1) + "\n")
            )
        if args.plot:
            write_whole(args.plot, partial(draw, results))
        return 1 if failed else 0
    except Unusable as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    except Wrong as wrong:  # a rank of an experiment, which has nothing to compare
        print(f"\nFAIL {Path(__file__).stem}: {wrong.found}")
        return 1


# ---------------------------------------------------------------------------------------------------
# Command line
# ---------------------------------------------------------------------------------------------------


# Copied from tp.py
class Parser(argparse.ArgumentParser):
    """argparse, with its complaint raised instead of printed with the usage."""

    def error(self, message):
        raise Unusable(message)


# Copied from labs/lab8_3d.py
def positive(text):
    """A whole number of at least 1, for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1")
    return int(text)


# Copied from labs/lab8_3d.py
def write_whole(path, write):
    """Have write(another path) make the file, then name it path: whole or not at all, or Unusable."""
    draft = f"{path}.{os.getpid()}{Path(path).suffix}"
    try:
        write(draft)
        os.replace(draft, path)
    except (
        OSError,
        ValueError,
    ) as problem:  # a full disk; a picture of a kind that matplotlib lacks
        raise Unusable(f"cannot write {path}: {problem}") from None
    finally:
        Path(draft).unlink(missing_ok=True)


def add_options(parser):
    """The options of this lab's own."""
    parser.add_argument(
        "--pairs", type=positive, default=7, help="timings of each way, blocking and not (7)"
    )


if __name__ == "__main__":
    sys.exit(main())
