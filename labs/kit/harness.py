"""What all labs share: processes that are ranks, traffic, comparison, tables.

A lab is a folder, labs/labN_name/. In it are lesson.py, the lesson and its exercises; check.py,
what grade.py checks; show.py, what run.py shows. The last two import this file; it starts nothing.
"""

import gc
import importlib.util
import multiprocessing.connection
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from contextlib import nullcontext, suppress
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from labs.kit import blame
from labs.kit.cli import UsageError, escape_output, shorten_tempdir

LABS = Path(__file__).resolve().parents[1]
PRELOADED = ["torch.distributed", "torch._dynamo"]  # the first dispatch mode imports _dynamo: 1 s
MODEL = "transformers.models."  # what a lab has imported of these is preloaded too


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


def lab_name(file):
    """labN_name, of a lesson or of a learner's file; of any other file its own name."""
    return Path(file).parent.name if Path(file).name == "lesson.py" else Path(file).stem


def load(path):
    """The file of a lab, or of a learner's answers, as a module, which is called lab_name()."""
    spec = importlib.util.spec_from_file_location(lab_name(path), path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def companion(kind, file):
    """The module check or show (kind) of the lab of a lesson, or of a learner's labN_name.py."""
    [folder] = LABS.glob(lab_name(file).partition("_")[0] + "_*")
    return importlib.import_module(f"labs.{folder.name}.{kind}")


def rank_main(pipe, rank, world, apart, folder, limit):
    """A rank's process: join the others, run the task that comes through the pipe, answer."""
    gc.freeze()  # no rank need look for garbage among what has been imported
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # gloo complains there of ranks that were ended
    blame.listen(f"{folder}/{rank - apart}")
    escape_output()
    signal.alarm(limit)  # the parent ends it long before; this is for a parent that was killed
    torch.set_num_threads(1)
    # torch 2.13 renames all_gather_into_tensor and reduce_scatter_tensor; 2.11 has the old names
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    try:
        store = dist.FileStore(f"{folder}/store", world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
        group = dist.new_group(range(apart, world)) if apart else dist.group.WORLD
    except RuntimeError as problem:
        pipe.send((False, blame.no_network(problem)))
    else:
        with blame.default_group_refused() if apart else nullcontext():
            pipe.send(answer(pipe, group))
    with suppress(EOFError):
        pipe.recv()  # a rank that leaves early would break the others' connections
    os._exit(0)


def answer(pipe, group):
    """(True, what a task from the pipe returns on this rank) or (False, what was Wrong)."""
    file = exercise = None
    try:
        function, args, file, exercise = pipe.recv()
        args = [load(arg) if isinstance(arg, Path) else arg for arg in args]
        return True, function(group, *args)
    except BaseException as problem:  # whatever a learner's code may raise
        errors = problem, problem.__context__  # a check may have turned a learner's into its own
        frames = [f for e in errors for f in traceback.extract_tb(e and e.__traceback__)]
        own = blame.own_line([(frame.filename, frame.lineno) for frame in frames], file, exercise)
        if isinstance(problem, NotImplementedError):
            return False, Wrong(f"not done yet: {problem}")
        if isinstance(problem, Wrong):
            return False, Wrong(own + problem.found, problem.hint)
        first = str(problem).partition("\n")[0]
        return False, Wrong(f"{own}{type(problem).__name__}: {first}", blame.hint_at(first))


def on_ranks(world, function, *args, timeout=60, apart=False, exercise=None):
    """[function(group, *args) of each rank], run by `world` processes of this machine, over gloo.

    Raises Wrong: a rank's own, or one that names the ranks still busy after `timeout` seconds, and
    for each the line of the lab's file that it was in, if possible one of the exercise.
    apart: there is one more rank, and the group is ranks 1 to `world`; messages have to name it.
    function stands in a module, args and results can be pickled; a lab's module may be among args.
    Each call has processes of its own, so what a task leaves behind reaches no other task.
    """
    context = multiprocessing.get_context("forkserver")
    models = [name for name in sys.modules if name.startswith(MODEL) and ".modeling_" in name]
    context.set_forkserver_preload(PRELOADED + models)
    args = [Path(arg.__file__) if isinstance(arg, ModuleType) else arg for arg in args]
    file = next((str(arg) for arg in args if isinstance(arg, Path)), None)
    processes, pipes = [], []
    shorten_tempdir()
    with tempfile.TemporaryDirectory() as folder:
        try:
            for rank in range(world + apart):
                here, there = context.Pipe()
                how = there, rank, world + apart, apart, folder, int(timeout) + 60
                process = context.Process(target=rank_main, args=how, daemon=True)
                process.start()
                there.close()
                processes.append(process)
                pipes.append(here)
            for pipe in pipes[apart:]:  # if apart, rank 0 only has to be there
                pipe.send((function, args, file, exercise))
            return collect(processes[apart:], pipes[apart:], timeout, (folder, file, exercise))
        finally:
            for process in processes:
                process.kill()
                process.join()


def collect(processes, pipes, timeout, where):
    """The ranks' results in their order; raises Wrong. where: what blame.last_line() takes."""
    results, wrong, end = [None] * len(pipes), {}, time.monotonic() + timeout
    busy, died = {pipe: rank for rank, pipe in enumerate(pipes)}, set()
    while busy and (ready := multiprocessing.connection.wait(busy, max(0, end - time.monotonic()))):
        for pipe in ready:
            rank = busy.pop(pipe)
            try:
                fine, results[rank] = pipe.recv()
            except (EOFError, OSError):
                fine, (found, hint) = False, blame.death(processes[rank])
                results[rank] = Wrong(blame.last_line(*where, rank) + found, hint)
                died.add(rank)
            if not fine:
                wrong[rank] = results[rank]
                end = min(end, time.monotonic() + 0.5)  # the others may have died, or know more
    for problem in results:
        if isinstance(problem, UsageError):  # no group
            raise problem
    if wrong:  # a death first, which causes the others' errors; then what was seen, before errors
        rank = min(wrong, key=lambda rank: (rank not in died, "Error: " in wrong[rank].found))
        raise Wrong(f"rank {rank}: {wrong[rank].found}", wrong[rank].hint)
    if busy:
        for rank in busy.values():
            os.kill(processes[rank].pid, signal.SIGUSR1)
        time.sleep(0.2)  # till they have written their stacks
        lines = {rank: blame.last_line(*where, rank) for rank in busy.values()}
        said = [f"rank {rank} {line or 'after your code: '}" for rank, line in lines.items()]
        hint = "a send without its recv, a collective that some rank skips, or a loop without end"
        raise Wrong(f"{''.join(said)}no answer from ranks {[*busy.values()]} in {timeout} s", hint)
    return results


def check_on_rank(group, lab, exercise, seed, bug, compared):
    """The report of an exercise's check on this rank, of a lab's answers; raises Wrong."""
    if compared:
        dist.set_debug_level(dist.DebugLevel.DETAIL)
        group = dist.new_group(dist.get_process_group_ranks(group), use_local_synchronization=True)
    checks = companion("check", lab.__file__)
    if bug:
        next(plant for plant in checks.BUGS if plant.__name__ == bug)(lab)
    return str(checks.CHECKS[exercise][0](lab, group, seed))


def check(answers, exercise, seed=0, bug=None, timeout=60, compared=False):
    """(whether an exercise passes, what was seen, a hint), of the answers in a file.

    Checks that say SUBGROUP run in a group that is not the world. compared: torch compares calls.
    """
    checks = companion("check", answers)
    _, world = checks.CHECKS[exercise]
    how = {"apart": world > 1 and getattr(checks, "SUBGROUP", False), "exercise": exercise}
    args = Path(answers).absolute(), exercise, seed, bug, compared
    try:
        return True, on_ranks(world, check_on_rank, *args, timeout=timeout, **how)[0], ""
    except Wrong as wrong:
        if wrong.hint == blame.HINTS["SIGABRT"] and not compared:  # torch may say which differ
            again = check(answers, exercise, seed, bug, timeout, compared=True)
            return (False, wrong.found, wrong.hint) if again[0] or "died" in again[1] else again
        return False, *blame.in_short(wrong, answers, how["apart"])


def table(*rows):
    """Print columns aligned to the left, after an empty line."""
    texts = [[f"{x:.3g}" if isinstance(x, float) else str(x) for x in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts)]
    padded = ([text.ljust(width) for text, width in zip(row, widths)] for row in texts)
    print("", *("  " + "   ".join(row).rstrip() for row in padded), sep="\n")
