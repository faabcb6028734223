"""What the tests share: running the scripts as a user would, many at a time where it helps."""

import json
import os
import re
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path
from textwrap import dedent, indent

import pytest

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
STRATEGIES = ["tp.py", "sp_megatron.py", "sp_ulysses.py", "pp.py"]
LONG = [
    "real_weights",
    "faults",
    "strategies",
    "notebooks",
    "mutants",
    "grade",
    "pp",
    "docs",
    "lab5",
]


def torchrun(ranks, *command, timeout=300, **options):
    """torchrun on this machine, from the project's folder; returns the CompletedProcess."""
    launch = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={ranks}"]
    options = {"cwd": ROOT, "env": ENVIRONMENT, "capture_output": True, "text": True, **options}
    return subprocess.run([*launch, *map(str, command)], timeout=timeout, **options)


def python(*command, timeout=300, env=None, cwd=ROOT):
    """A script without torchrun; returns the CompletedProcess, output as text."""
    options = {"cwd": cwd, "env": ENVIRONMENT | (env or {}), "capture_output": True, "text": True}
    return subprocess.run([sys.executable, *map(str, command)], timeout=timeout, **options)


def free_port():
    """A port of this machine that nobody listens at."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


REGION = re.compile(r"^( *)# exercise: (\w+)\n(.*?)^ *# end exercise\n", re.M | re.S)


def splice(lab, path, exercise, regions):
    """Write a lab (its module) to path, the exercise's regions replaced; None leaves one alone."""
    regions = iter(regions)

    def replaced(match):
        answer = next(regions) if match[2] == exercise else None
        return match[0] if answer is None else indent(dedent(answer).strip("\n"), match[1]) + "\n"

    path.write_text(REGION.sub(replaced, Path(lab.__file__).read_text()))
    assert next(regions, None) is None, "more answers than regions"
    return path


def graded(lab, file, exercise, bug=None, seed=1, timeout=120):
    """What a lab's check of an exercise says of a file: (passed, report, hint)."""
    check, world = lab.CHECKS[exercise]
    try:
        reports = lab.on_ranks(
            world, lab.check_on_rank, str(file), bug, exercise, seed, timeout=timeout
        )
    except lab.Wrong as wrong:
        return False, wrong.found, wrong.hint
    return True, reports[0], ""


def run_many(ranks, commands, folder, offline, timeout=1200):
    """Outcomes of command lines on one set of ranks, see many.py: {command: outcome}."""
    cases, outcomes = folder / "cases.json", folder / "outcomes.json"
    cases.write_text(json.dumps(commands))
    hub = {"HF_ENDPOINT": "http://127.0.0.1:9"} if offline else {}  # one that does not answer
    many = ROOT / "tests" / "many.py"
    process = torchrun(ranks, many, cases, outcomes, timeout=timeout, env=ENVIRONMENT | hub)
    done = json.loads(outcomes.read_text()) if outcomes.exists() else []
    lost = {"exit": None, "output": process.stderr[-4000:], "json": None, "seconds": 0}
    return {tuple(c): done[i] if i < len(done) else lost for i, c in enumerate(commands)}


SAMPLE = (  # of the slow tests, what CI runs: parts of their ids
    "test_lab", "grades_0[lab7", "grades_100[lab1", "committed", "bad_notebook", "full_disk",
    "two_agents_run_one_job[pp",
    "[2-kill-forward-", "[2-stop-collective-", "[2-raise-backward-", "[2-hang-backward-",
    "learns[sp_megatron.py-2-", "long_sequences", "under_torchrun_rank_0", "of_each_kind[lengths",
    "operators", "excuses",
)  # fmt: skip


def pytest_configure(config):
    config.addinivalue_line(
        "markers", "slow: real weights, or minutes; `make test-slow` runs these"
    )
    config.addinivalue_line("markers", "sample: of the slow tests those that CI runs")


def pytest_collection_modifyitems(items):
    """Mark the sample; the files that take longest first, so that two workers end together."""

    def turn(item):
        name = item.path.stem.removeprefix("test_")
        return [*LONG, name].index(name)

    cases = Counter()  # of a lab's tests
    for item in items:
        if item.get_closest_marker("slow") and any(part in item.nodeid for part in SAMPLE):
            one_of_many = "test_lab" in item.nodeid and "[" in item.name
            cases[item.path] += one_of_many
            if not one_of_many or cases[item.path] % 3 == 1:  # every third answer or bug
                item.add_marker("sample")
    items.sort(key=turn)


@pytest.fixture(scope="session")
def outcomes(tmp_path_factory):
    """outcome(ranks, commands, command): all commands run, once, when the first is asked for."""
    known = {}

    def outcome(ranks, commands, command, offline=False):
        key = ranks, json.dumps(commands)
        if key not in known:
            known[key] = run_many(
                ranks, commands, tmp_path_factory.mktemp(f"ranks{ranks}"), offline
            )
        return known[key][tuple(command)]

    return outcome
