"""A slow link for lab 4: it delays what the ranks send, and logs what starts and what waits."""

import inspect
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from labs.kit.harness import TorchDispatchMode, Traffic


class Link(TorchDispatchMode):
    """A slow wire beside the processor, and a log of what happens when (times in seconds).

    Inside it dist's collectives run on a thread of their own, one after the other, while the caller
    goes on. Each first calls delay(), if given, and takes seconds_per_byte for each of its bytes on
    the wire; then it reads and writes its tensors. What it receives into is NaN until then.

    mode "overlapped"; "latest": a message travels only once it, or a later one, is waited for, or
    at the end; "blocking": a start waits at once, as with async_op=False; "unwaited": wait() does
    not. gemms {elements of the output: name}. After it:
    log [(what, begin, end)]: "start all_gather", "wait all_gather", "dgrad", ..., in their order;
    messages [(op, begin, end)]: when they travelled; traffic: message bytes; wire: bytes sent.
    """

    OPS = {"all_reduce": "all_reduce", "all_gather_into_tensor": "all_gather"}
    OPS |= {"reduce_scatter_tensor": "reduce_scatter"}
    OPS |= {"all_gather": "all_gather", "reduce_scatter": "reduce_scatter"}  # of lists
    if hasattr(dist, "all_gather_single"):  # their names since torch 2.13
        OPS |= {"all_gather_single": "all_gather", "reduce_scatter_single": "reduce_scatter"}

    def __init__(self, gemms, seconds_per_byte=0.0, delay=None, mode="overlapped"):
        super().__init__()
        self.gemms, self.mode = gemms, mode
        self.seconds_per_byte, self.delay = seconds_per_byte, delay
        self.log, self.messages, self.traffic, self.wire = [], [], Traffic(), 0
        self.go = []  # an Event for each message

    def __enter__(self):
        self.thread, self.patches = ThreadPoolExecutor(1), ExitStack()
        for name, op in self.OPS.items():
            start = partial(self.start, getattr(dist, name), op)
            self.patches.enter_context(mock.patch.object(dist, name, start))
        return super().__enter__()

    def __exit__(self, *problem):
        super().__exit__(*problem)
        self.let_go(len(self.go))
        self.thread.shutdown()  # what nobody waited for arrives too
        self.patches.close()

    def start(self, collective, op, /, *args, **kwargs):
        given = inspect.signature(collective).bind(*args, **kwargs).arguments
        async_op, world = given.pop("async_op", False), dist.get_world_size(given.get("group"))
        leaves = [
            [x for x in tree_leaves(arg) if isinstance(x, torch.Tensor)] for arg in given.values()
        ]
        tensors = [each for each in leaves if each]  # what it gives, what it takes
        begin, message = time.perf_counter(), max(sum(x.nbytes for x in each) for each in tensors)
        factor = 2 if op == "all_reduce" else 1  # it is a reduce-scatter and an all-gather
        wire = factor * message * (world - 1) // world  # bytes that a rank sends
        first, last = (each[0].untyped_storage().data_ptr() for each in (tensors[0], tensors[-1]))
        for x in tensors[0] if first != last else []:
            x.fill_(torch.nan)

        def carry():
            go.wait()
            begin = time.perf_counter()
            if self.delay:
                self.delay()
            time.sleep(self.seconds_per_byte * wire)
            with self.traffic, torch.no_grad():  # a mode belongs to a thread
                collective(**given)
            self.wire += wire
            self.messages.append((op, begin, time.perf_counter()))

        self.go.append(go := threading.Event())
        arrival, number = self.thread.submit(carry), len(self.go)
        if self.mode != "latest":
            self.let_go(number)
        self.note(f"start {op}", begin)
        if self.mode == "blocking" or not async_op:
            self.wait(op, arrival, number)
        waits = partial(self.wait, op, arrival, number)
        handle = SimpleNamespace(wait=waits, is_completed=arrival.done)
        handle.get_future = lambda: handle
        return handle if async_op else None

    def let_go(self, count):
        """The first messages may travel, so many of them."""
        for go in self.go[:count]:
            go.set()

    def wait(self, op, arrival, number, timeout=None):
        begin = time.perf_counter()
        self.let_go(number)
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


def comes_before(log, first, then):
    """Whether a log has both, first before then."""
    order = [what for what, *_ in log]
    return {first, then} <= {*order} and order.index(first) < order.index(then)
