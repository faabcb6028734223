"""What all labs share: ranks that are processes of this machine, traffic, comparison, tables.

A lab has three rooms: labs/labN_name.py is the lesson and its exercises, labs/checks/labN.py what
the grader checks, labs/experiments/labN.py what the finished lab shows. A learner reads the first.
"""

import argparse
import copyreg
import importlib.util
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time
import traceback
import warnings
from contextlib import suppress
from multiprocessing import connection, forkserver
from pathlib import Path

LABS = Path(__file__).resolve().parent
PROCESSES = multiprocessing.get_context("forkserver")

# Ranks are forked from a process that has imported what they need. Where the command line names a
# lab it starts at once, and imports torch while this process does; else with the first on_ranks().
NAMED = [p for word in sys.argv[:2] for p in LABS.glob(f"{Path(word).stem.partition('_')[0]}_*.py")]
PRELOAD = ["torch.distributed", "torch._dynamo"]  # the first dispatch mode imports that: 1 s
LLAMA = "transformers.models.llama.modeling_llama"
CHECKED = [p for lab in NAMED for p in LABS.glob(f"checks/{lab.stem.partition('_')[0]}.py")]
if any(re.search(r"(from|import) transformers", p.read_text()) for p in NAMED + CHECKED):
    PRELOAD.append(LLAMA)
PROCESSES.set_forkserver_preload(PRELOAD)
FIRST = os.environ.get("RANK", "0") == "0"  # of torchrun's ranks, if it started this one
if NAMED and FIRST and multiprocessing.current_process().name == "MainProcess":  # and no rank
    forkserver.ensure_running()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402


class Unusable(Exception):
    """An argument that cannot work; its message says what would. Ends as `error: ...`, exit 2."""


class Wrong(Exception):
    """What a check found wrong with an exercise, and a hint at what usually causes it."""

    def __init__(self, found, hint=""):
        super().__init__(found, hint)  # both: exceptions are pickled by their arguments
        self.found, self.hint = found, hint


def expect(holds, found, hint=""):
    """Raise Wrong, with what was found, where something does not hold."""
    if not holds:
        raise Wrong(found, hint)


def expect_close(name, mine, right, tolerance=1e-5, hints=None):
    """Raise Wrong unless ||mine - right|| <= tolerance ||right||; returns the relative error.

    hints {text: tensor}: if mine is that tensor instead, the text is the hint.
    """
    kind, shape = type(mine).__name__, tuple(right.shape)
    expect(isinstance(mine, torch.Tensor), f"{name} is {kind}, not a tensor", "return the result")
    expect(mine.shape == shape, f"{name} has shape {tuple(mine.shape)}, not {shape}")

    def error(other):
        apart = torch.linalg.vector_norm((mine - other).double())
        return (apart / torch.linalg.vector_norm(other.double()).clamp(min=1e-30)).item()

    off = error(right)
    known = [t for t, x in (hints or {}).items() if x.shape == shape and error(x) <= tolerance]
    found = f"{name} is off by {off:.1e} (at most {tolerance:.0e})"
    expect(off <= tolerance, found, known[0] if known else "")
    return off


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


copyreg.pickle(type(sys), lambda lab: (load, (lab.__file__,)))  # a lab's module goes to ranks


def rank_main(pipe, rank, world, rendezvous, limit):
    """A rank's process: join the others, run the task that comes through the pipe, answer."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # gloo complains there of ranks that were ended
    signal.alarm(limit)  # the parent ends it long before; this is for one that was killed
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
    function is one of a module's own; args and results can be pickled, and a lab's module too.
    Each call has processes of its own, forks of one that was started once: whatever a task leaves
    behind (a thread, DTensor's caches) is nobody else's.
    """
    team = []
    PROCESSES.set_forkserver_preload(PRELOAD + [LLAMA] * (LLAMA in sys.modules))  # if not begun
    with tempfile.TemporaryDirectory() as folder:
        try:
            for rank in range(world):
                here, there = PROCESSES.Pipe()
                how = there, rank, world, f"{folder}/store", int(timeout) + 60
                team.append((PROCESSES.Process(target=rank_main, args=how, daemon=True), here))
                team[-1][0].start()
                there.close()
                here.send((function, args))
            return collect(team, {pipe: rank for rank, (_, pipe) in enumerate(team)}, timeout)
        finally:
            for process, _ in team:
                process.kill()
            for process, _ in team:
                process.join()


def collect(team, busy, timeout):
    """The ranks' results in their order, busy: {pipe: rank}; raises Wrong."""
    results, wrong, end = [None] * len(team), {}, time.monotonic() + timeout
    while busy and (ready := connection.wait(busy, max(0, end - time.monotonic()))):
        for pipe in ready:
            rank = busy.pop(pipe)
            try:
                fine, results[rank] = pipe.recv()
            except (EOFError, OSError):
                fine, results[rank] = False, death(team[rank][0])
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


def room(kind, lab_file):
    """labs/checks/labN.py or labs/experiments/labN.py of a lab's file, as a module."""
    name = Path(lab_file).stem.partition("_")[0]
    return importlib.import_module(f"{kind}.{name}")


def check_on_rank(group, answers, exercise, seed, bug=None):
    """The report of an exercise's check on this rank, of the answers in a file; raises Wrong."""
    lab, checks = load(answers), room("checks", answers)
    if bug:
        getattr(checks, bug)(lab)
    return str(checks.CHECKS[exercise][0](lab, group, seed))


def check(answers, exercise, seed=0, bug=None, timeout=60):
    """(whether an exercise passes, what was seen, a hint), of the answers in a file."""
    _, world = room("checks", answers).CHECKS[exercise]
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


# Copied from tp.py
class Parser(argparse.ArgumentParser):
    """argparse, with its complaint raised instead of printed with the usage."""

    def error(self, message):
        raise Unusable(message)


def positive(text):
    """A whole number of at least 1: a type for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1")
    return int(text)


def write_whole(path, write):
    """Have write(another path) make the file, then name it path: whole or not at all."""
    draft = f"{path}.{os.getpid()}{Path(path).suffix}"
    try:
        write(draft)
        os.replace(draft, path)
    except (OSError, ValueError) as problem:  # a full disk; a picture that matplotlib cannot write
        raise Unusable(f"cannot write {path}: {problem}") from None
    finally:
        Path(draft).unlink(missing_ok=True)


def main(file, argv=None):
    """The command line of a lab; returns its exit status."""
    import grade  # which imports this file

    follow = None if FIRST else getattr(room("experiments", file), "follow", None)
    if follow:  # rank 0 reads the command line
        return follow(load(file))
    return grade.run_lab(file, argv)
