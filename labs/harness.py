"""What all labs share: processes that are ranks, traffic, comparison, tables.

A lab is three files: labs/labN_name.py is the lesson and its exercises, labs/checks/labN.py what
the grader checks, labs/experiments/labN.py what the finished lab shows. run.py runs a lab, grade.py
hands it out and grades it. Both import this file; importing it starts nothing.
"""

import gc
import importlib.util
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from contextlib import suppress
from multiprocessing import connection
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

LABS = Path(__file__).resolve().parent
PRELOADED = ["torch.distributed", "torch._dynamo"]  # the first dispatch mode imports _dynamo: 1 s
LLAMA = "transformers.models.llama.modeling_llama"  # preloaded too where a lab has imported it


class Wrong(Exception):
    """What a check found wrong with an exercise, and a hint at what usually causes it."""

    def __init__(self, found, hint=""):
        super().__init__(found, hint)  # both: exceptions are pickled by their arguments
        self.found, self.hint = found, hint


def expect(holds, found, hint=""):
    """Raise Wrong, with what was found, where something does not hold."""
    if not holds:
        raise Wrong(found, hint)


def relative_error(mine, right):
    """||mine - right|| / ||right||; infinite for another shape, and for what is no number."""
    if mine.shape != right.shape:
        return float("inf")
    apart = torch.linalg.vector_norm((mine - right).double())
    error = (apart / torch.linalg.vector_norm(right.double()).clamp(min=1e-30)).item()
    return error if error == error else float("inf")


def expect_close(name, mine, right, tolerance=1e-5, hints=None):
    """Raise Wrong unless ||mine - right|| <= tolerance ||right||; returns the relative error.

    hints {text: tensor}: if mine is that tensor instead, the text is the hint.
    """
    expect(isinstance(mine, torch.Tensor), f"{name} is {type(mine).__name__}, not a tensor")
    known = [text for text, x in (hints or {}).items() if relative_error(mine, x) <= tolerance]
    hint, error = known[0] if known else "", relative_error(mine, right)
    found = f"{name} has shape {tuple(mine.shape)}, not {tuple(right.shape)}"
    expect(mine.shape == right.shape, found, hint)
    expect(error <= tolerance, f"{name} is off by {error:.1e} (at most {tolerance:.0e})", hint)
    return error


class Traffic(TorchDispatchMode):
    """Counts what this rank's collectives and sends move while inside: {op: [calls, bytes]}.

    Bytes of the whole message: all_gather's output; reduce_scatter's and all_to_all's own input.
    """

    OPS = "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"
    OPS += "broadcast", "reduce", "gather", "scatter"  # the first that a name starts with counts

    def __init__(self):
        super().__init__()
        self.ops = {}

    def bytes(self, op):
        return self.ops.get(op, [0, 0])[1]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func._opname.replace("_", "")
        op = next((op for op in self.OPS if name.startswith(op.replace("_", ""))), None)
        if op and func.namespace in ("c10d", "_c10d_functional"):
            leaves = [tree_leaves(x) for x in (*args, out)]
            sizes = [sum(t.nbytes for t in ts if isinstance(t, torch.Tensor)) for ts in leaves]
            if op == "all_to_all":  # c10d names the output before the input
                sizes = [sizes[1 if func.namespace == "c10d" else 0]]
            entry = self.ops.setdefault(op, [0, 0])
            entry[0] += 1
            entry[1] += max(sizes)
        return out


def load(path):
    """The file of a lab, or of a learner's answers, as a module."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def companion(kind, lab_file):
    """labs/checks/labN.py or labs/experiments/labN.py (kind) of a lab's file, as a module."""
    name = Path(lab_file).stem.partition("_")[0]
    return importlib.import_module(f"{kind}.{name}")


def rank_main(pipe, rank, world, rendezvous, limit):
    """A rank's process: join the others, run the task that comes through the pipe, answer."""
    gc.freeze()  # no rank need look for garbage among what has been imported
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # gloo complains there of ranks that were ended
    signal.alarm(limit)  # the parent ends it long before; this is for a parent that was killed
    torch.set_num_threads(1)
    # torch 2.13 renames all_gather_into_tensor and reduce_scatter_tensor; 2.11 has the old names
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    store = dist.FileStore(rendezvous, world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    pipe.send(answer(pipe))
    with suppress(EOFError):
        pipe.recv()  # a rank that leaves early would break the others' connections
    os._exit(0)


def answer(pipe):
    """(True, what a task from the pipe returns on this rank) or (False, what was Wrong)."""
    try:
        function, args = pipe.recv()
        args = [load(arg) if isinstance(arg, Path) else arg for arg in args]
        return True, function(dist.group.WORLD, *args)
    except BaseException as problem:  # whatever a learner's code may raise
        if isinstance(problem, Wrong):
            return False, problem
        if isinstance(problem, NotImplementedError):
            return False, Wrong(f"not done yet: {problem}")
        frames = traceback.extract_tb(problem.__traceback__)
        ours = [frame.line for frame in frames if not frame.filename.startswith(torch.__path__[0])]
        first = str(problem).partition("\n")[0]
        return False, Wrong(f"{type(problem).__name__}: {first} (in: {ours[-1]})")


def on_ranks(world, function, *args, timeout=60):
    """[function(group, *args) of each rank], run by `world` processes of this machine, over gloo.

    Raises Wrong: that of a rank, or one naming the ranks still busy after `timeout` seconds.
    function stands in a module, args and results can be pickled; a lab's module may be among args.
    Each call has processes of its own, forked from one server that has imported torch: whatever a
    task leaves behind (a thread, DTensor's caches) reaches no other task.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED + [LLAMA] * (LLAMA in sys.modules))
    args = [Path(arg.__file__) if isinstance(arg, ModuleType) else arg for arg in args]
    processes, pipes = [], []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for rank in range(world):
                here, there = context.Pipe()
                how = there, rank, world, f"{folder}/store", int(timeout) + 60
                process = context.Process(target=rank_main, args=how, daemon=True)
                process.start()
                processes.append(process)
                pipes.append(here)
                there.close()
                here.send((function, args))
            return collect(processes, pipes, timeout)
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.join()


def collect(processes, pipes, timeout):
    """The ranks' results in their order; raises Wrong."""
    results, wrong, end = [None] * len(pipes), {}, time.monotonic() + timeout
    busy = {pipe: rank for rank, pipe in enumerate(pipes)}
    while busy and (ready := connection.wait(busy, max(0, end - time.monotonic()))):
        for pipe in ready:
            rank = busy.pop(pipe)
            try:
                fine, results[rank] = pipe.recv()
            except (EOFError, OSError):
                fine, results[rank] = False, death(processes[rank])
            if not fine:
                wrong[rank] = results[rank]
                end = min(end, time.monotonic() + 0.5)  # the others may have died, or know more
    if wrong:  # a death first: the others' errors come of it
        rank = min(wrong, key=lambda rank: not wrong[rank].found.startswith("died"))
        raise Wrong(f"rank {rank}: {wrong[rank].found}", wrong[rank].hint)
    hint = "a send without its recv, a collective that some rank skips, or a loop without end"
    expect(not busy, f"no answer from ranks {[*busy.values()]} in {timeout} s", hint)
    return results


def death(process):
    """What a process died of, as Wrong."""
    process.join()
    if process.exitcode >= 0:
        return Wrong(f"died, exit code {process.exitcode}", "your code ended the whole process")
    name, hint = signal.Signals(-process.exitcode).name, "tensors of a collective differ in size?"
    return Wrong(f"died of {name}", "out of memory?" if name == "SIGKILL" else hint)


def check_on_rank(group, answers, exercise, seed, bug=None):
    """The report of an exercise's check on this rank, of the answers in a file; raises Wrong."""
    lab, checks = load(answers), companion("checks", answers)
    if bug:
        getattr(checks, bug)(lab)
    return str(checks.CHECKS[exercise][0](lab, group, seed))


def check(answers, exercise, seed=0, bug=None, timeout=60):
    """(whether an exercise passes, what was seen, a hint), of the answers in a file."""
    _, world = companion("checks", answers).CHECKS[exercise]
    args = str(answers), exercise, seed, bug
    try:
        return True, on_ranks(world, check_on_rank, *args, timeout=timeout)[0], ""
    except Wrong as wrong:
        return False, wrong.found, wrong.hint


def table(*rows):
    """Print columns aligned to the left, after an empty line."""
    texts = [[f"{x:.3g}" if isinstance(x, float) else str(x) for x in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts)]
    padded = ([text.ljust(width) for text, width in zip(row, widths)] for row in texts)
    print("", *("  " + "   ".join(row).rstrip() for row in padded), sep="\n")
