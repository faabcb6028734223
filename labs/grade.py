"""Exercises of the labs: hands them out, and grades what comes back.

A lab is one finished file. Where it says `# exercise: NAME` ... `# end exercise` stands what you could have
written yourself, under a docstring that says what to build:

    python labs/grade.py list                # the labs and their exercises
    python labs/grade.py start lab1          # my_labs/lab1_collectives.py: the lab with those places empty
    python labs/grade.py lab1                # grade what you wrote there
    python labs/grade.py lab1 --only all_to_all
    python labs/grade.py lab1 --seed 7       # the same inputs again; otherwise they are new each time

Each exercise is graded for itself: your answer to it in a file where all the others are finished, on as many
ranks of this machine as the check asks for, by the checks of the lab in labs/. So one wrong answer, or one
that never ends, hides no other. Exit status: 0 all pass, 1 not yet, 2 unusable arguments.
"""

import argparse
import ast
import importlib.util
import json
import multiprocessing
import os
import re
import secrets
import signal
import sys
import tempfile
import time
import traceback
import warnings
from contextlib import ExitStack, suppress
from multiprocessing import connection
from pathlib import Path

import torch
import torch.distributed as dist

LABS = Path(__file__).resolve().parent
MY_LABS = LABS.parent / "my_labs"


# ---------------------------------------------------------------------------------------------------
# Regions
# ---------------------------------------------------------------------------------------------------


def regions(text):
    """[(exercise, first line, end)] of a lab's text: the lines [first, end) between the two markers, from 0.

    Raises Wrong where a marker lacks the other one.
    """
    found, name = [], None
    for i, line in enumerate(text.splitlines()):
        start = re.fullmatch(r"\s*# exercise: (\w+)\s*", line)
        end = line.strip() == "# end exercise"
        if (start and name) or (end and not name):
            raise Wrong(
                f"line {i + 1}: {line.strip()!r} without its other half",
                "restore the markers, or start anew",
            )
        if start:
            name, first = start[1], i + 1
        elif end:
            found.append((name, first, i))
            name = None
    if name:
        raise Wrong(
            f"'# exercise: {name}' has no '# end exercise'", "restore the markers, or start anew"
        )
    return found


def replace(text, change):
    """The text with change(exercise, number, lines) for the lines of each region; number: of its regions."""
    lines, count, done, out = text.splitlines(), {}, 0, []
    for name, first, end in regions(text):
        number = count[name] = count.get(name, -1) + 1
        out += [*lines[done:first], *change(name, number, lines[first:end])]
        done = end
    return "\n".join([*out, *lines[done:]]) + "\n"


def task(text, line):
    """What the docstring around a line asks for: its first sentence."""
    inside = [
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    ]
    inside = [
        node
        for node in inside
        if node.lineno <= line <= node.end_lineno and ast.get_docstring(node)
    ]
    text = " ".join(ast.get_docstring(inside[-1]).split()) if inside else "see above"
    return re.split(r"(?<=\.)\s", text)[0]


def emptied(text):
    """The lab as a learner gets it: each region raises NotImplementedError with its task."""
    places = iter(regions(text))

    def change(name, number, lines):
        _, first, _ = next(places)
        indent = re.match(r"\s*", text.splitlines()[first - 1])[0]
        return [f"{indent}raise NotImplementedError({task(text, first)!r})"]

    return replace(text, change)


def spliced(finished, answers, exercise):
    """The answers' text with every region but those of one exercise replaced by the finished lab's."""
    right = {}
    lines = finished.splitlines()
    for name, first, end in regions(finished):
        right.setdefault(name, []).append(lines[first:end])
    count = [name for name, *_ in regions(answers)].count(exercise)
    if count != len(right[exercise]):
        hint = "restore the markers, or start anew"
        raise Wrong(
            f"{count} places '# exercise: {exercise}', and there should be {len(right[exercise])}",
            hint,
        )

    def change(name, number, lines):
        known = name != exercise and number < len(right.get(name, []))
        return right[name][number] if known else lines

    return replace(answers, change)


# ---------------------------------------------------------------------------------------------------
# Ranks
# ---------------------------------------------------------------------------------------------------


# Copied from tp.py
class Unusable(Exception):
    """An argument or a model that cannot work; its message says what would."""


# Copied from labs/lab1_collectives.py
class Wrong(Exception):
    """What a check found wrong with an exercise, and a hint at what usually causes it."""

    def __init__(self, found, hint=""):
        super().__init__(found, hint)
        self.found, self.hint = found, hint


# Copied from labs/lab1_collectives.py
def expect(holds, found, hint=""):
    """Raise Wrong where something does not hold."""
    if not holds:
        raise Wrong(found, hint)


# Copied from labs/lab1_collectives.py
def load(path):
    """The file of a lab, or of a learner's answers to it, as a module."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# Copied from labs/lab1_collectives.py
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


# Copied from labs/lab1_collectives.py
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


def check_answers(group, lab_file, answers, name, seed):
    """A check of the finished lab on this rank, for the answers in another file; returns its report."""
    lab = load(lab_file)
    check, _ = lab.CHECKS[name]
    try:
        return str(check(load(answers), group, seed))
    except lab.Wrong as wrong:  # the lab's own class: this process alone knows it
        raise Wrong(wrong.found, wrong.hint) from None


# ---------------------------------------------------------------------------------------------------
# Command line
# ---------------------------------------------------------------------------------------------------


# Copied from tp.py
class Parser(argparse.ArgumentParser):
    """argparse, with its complaint raised instead of printed with the usage."""

    def error(self, message):
        raise Unusable(message)


# Copied from labs/grade.py
def positive(text):
    """A whole number of at least 1, for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1")
    return int(text)


# Copied from labs/grade.py
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


def find_lab(name):
    """The file of a lab: lab1, or lab1_collectives."""
    labs = {path.stem: path for path in sorted(LABS.glob("lab*.py"))}
    for stem, path in labs.items():
        if name == stem or stem.startswith(f"{name}_"):
            return path
    raise Unusable(f"no lab {name}; there are {', '.join(labs)}")


def show_labs():
    """List the labs and their exercises."""
    for path in sorted(LABS.glob("lab*.py")):
        print(
            f"{path.stem}: {', '.join(dict.fromkeys(name for name, *_ in regions(path.read_text())))}"
        )


def start(lab_file, force):
    """Write the lab with its places empty to my_labs/."""
    target = MY_LABS / lab_file.name
    if target.exists() and not force:
        raise Unusable(
            f"{target} is there already; --force writes it anew, and what you wrote is lost"
        )
    MY_LABS.mkdir(exist_ok=True)
    write_whole(target, lambda path: Path(path).write_text(emptied(lab_file.read_text())))
    print(
        f"{target}: look for NotImplementedError; then python labs/grade.py {lab_file.stem.split('_')[0]}"
    )


def grade_one(lab_file, world, answers, name, seed, timeout):
    """(whether one exercise passes, what was seen, a hint), of the answers' text."""
    try:
        text = spliced(lab_file.read_text(), answers, name)
        compile(text, lab_file.name, "exec")
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / lab_file.name
            file.write_text(text)
            arguments = str(lab_file), str(file), name, seed
            return True, on_ranks(world, check_answers, *arguments, timeout=timeout)[0], ""
    except SyntaxError as problem:
        return False, f"{type(problem).__name__}: {problem.msg}: {(problem.text or '').strip()}", ""
    except ValueError as problem:  # Python 3.11's compile, of a null byte
        return False, f"ValueError: {problem}", ""
    except Wrong as wrong:
        return False, wrong.found, wrong.hint


def grade(args, lab_file):
    """Grade the learner's answers, a line an exercise; returns whether all pass."""
    answers_file = Path(args.file or MY_LABS / lab_file.name)
    if not answers_file.is_file():
        raise Unusable(
            f"no {answers_file}; python labs/grade.py start {args.what[0]} writes one to fill in"
        )
    seed = secrets.randbelow(1 << 31) if args.seed is None else args.seed
    checks, answers, results = load(lab_file).CHECKS, answers_file.read_text(errors="replace"), {}
    if args.only not in (None, *checks):
        raise Unusable(f"{lab_file.stem} has no exercise {args.only}; it has {', '.join(checks)}")
    names = [args.only] if args.only else list(checks)
    width = max(map(len, names))
    for name in names:
        passed, seen, hint = grade_one(lab_file, checks[name][1], answers, name, seed, args.timeout)
        results[name] = {"passed": passed, "report": seen, "hint": hint}
        print(f"  {name:{width}}   {'PASS' if passed else 'FAIL'}   {seen}", flush=True)
        if hint:
            print(f"  {'':{width}}          hint: {hint}", flush=True)
    count = sum(result["passed"] for result in results.values())
    again = "" if count == len(names) else f" (the same inputs again: --seed {seed})"
    verdict = "PASS" if count == len(names) else "FAIL"
    print(f"\n{verdict} {lab_file.stem}: {count} of {len(names)} exercises pass{again}")
    if args.json:
        whole = {
            "lab": lab_file.stem,
            "seed": seed,
            "passed": count == len(names),
            "exercises": results,
        }
        write_whole(
            args.json, lambda path: Path(path).write_text(json.dumps(whole, indent=1) + "\n")
        )
    return count == len(names)


def main(argv=None):
    """Returns the exit status: 0 all pass, 1 not yet, 2 unusable arguments."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "what", nargs="+", metavar="LAB", help="list, start LAB, or LAB alone, to grade it"
    )
    parser.add_argument("--force", action="store_true", help="start: write over what is there")
    parser.add_argument("--file", help="the answers (my_labs/LAB.py)")
    parser.add_argument("--only", metavar="NAME", help="grade one exercise")
    parser.add_argument("--seed", type=int, help="of the inputs (a new one each time)")
    parser.add_argument("--timeout", type=positive, default=60, help="seconds for an exercise (60)")
    parser.add_argument("--json", metavar="FILE", help="write the results")
    try:
        args = parser.parse_args(argv)
        if args.what == ["list"]:
            show_labs()
            return 0
        if args.json and not os.access(Path(args.json).absolute().parent, os.W_OK):
            raise Unusable(f"cannot write {args.json}")
        if args.what[0] == "start" and len(args.what) == 2:
            start(find_lab(args.what[1]), args.force)
            return 0
        if len(args.what) > 1:
            raise Unusable(f"{' '.join(args.what)}: list, start LAB, or LAB would do")
        return 0 if grade(args, find_lab(args.what[0])) else 1
    except Unusable as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
