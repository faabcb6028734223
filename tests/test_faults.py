"""A rank that dies, stops, raises or hangs ends the job in time, is named, and leaves nothing behind."""

import os
import re
import resource
import subprocess
import sys
import time
from functools import partial

import pytest
from conftest import ENVIRONMENT, ROOT, STRATEGIES

pytestmark = pytest.mark.slow  # each waits for a timeout, or starts a job of its own
TIMEOUT = 6
CASES = [  # every kind and every place meets all four scripts
    (ranks, kind, where, STRATEGIES[(k + w + ranks // 2) % 4])
    for ranks in (2, 4)
    for k, kind in enumerate(["kill", "stop", "raise", "hang"])
    for w, where in enumerate(["start", "forward", "backward", "collective"])
] + [(2, "wait", "collective", "tp.py"), (2, "late", "forward", "sp_megatron.py")]


def processes(mark):
    """Ids of processes whose environment has this mark; one that has ended may wait to be reaped."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/environ") as environment, open(f"/proc/{pid}/stat") as stat:
                if mark in environment.read() and stat.read().rsplit(")", 1)[1].split()[0] != "Z":
                    found.append(int(pid))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return found


@pytest.mark.parametrize("ranks,kind,where,script", CASES)
def test_a_fault_ends_the_job_and_is_named(ranks, kind, where, script, tmp_path):
    mark = f"FAULT_TEST={tmp_path}"
    env = ENVIRONMENT | dict([mark.split("=")])
    options = ["--length", "64", "--timeout", TIMEOUT, "--json", tmp_path / "results.json"]
    launch = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={ranks}", "tests/fault.py"]
    command = [*launch, kind, where, "1", script, *options]
    run = subprocess.run(
        list(map(str, command)), cwd=ROOT, env=env, capture_output=True, text=True, timeout=120
    )
    end = time.time()
    begin = float(re.search(r"fault at ([\d.]+)", run.stderr)[1])
    assert run.returncode != 0
    assert end - begin < 15 + (0 if kind in ("kill", "raise") else TIMEOUT), run.stderr
    assert not processes(mark), "no process is left"
    assert list(tmp_path.iterdir()) == [], "nor a file"
    ours = [line for line in run.stderr.splitlines() if line.startswith("error: ")]
    steps = "(start|check_correctness > .*)"
    if kind == "raise":
        assert "ValueError: a fault of this test" in run.stderr
        assert len(ours) == 1 and re.match(f"error: rank 1 failed in {steps}: ValueError$", ours[0]), ours
        assert where != "backward" or re.search("train_step|reference_step", ours[0])
    elif kind == "kill":
        assert re.search(r"rank\s*: 1 \(local_rank: 1\)\s*exitcode\s*: -9", run.stderr)
    elif kind in ("wait", "late"):  # the first to give up closes connections, and so cuts the other off
        said = rf"error: no answer for {TIMEOUT} s \(--timeout\), yet all ranks live: "
        said += f"rank 0 waited in {steps}; rank 1 (waited|was cut off) in {steps}$"
        assert len(ours) == 1 and re.match(said, ours[0]), run.stderr
    else:
        # A stopped rank's last sign of life may be older than its step; one that hangs still gives signs
        seen = "(start|check_correctness( > .*)?)" if kind == "stop" else steps
        said = (
            rf"error: rank 1 did not answer for {TIMEOUT} s \(--timeout\), last seen in {seen}; rank \d wai"
        )
        assert len(ours) == 1 and re.match(said, ours[0]), run.stderr
        assert (kind, where) != ("hang", "backward") or re.search("train_step|reference_step", ours[0])


FULL = [
    (["tp.py", "--length", "64"], "--json", "PASS correctness"),
    (["pp.py", "--mode", "schedule"], "--plot", "PASS schedule"),
    (["sp_layout_sim.py"], "--plot", "PASS"),
    (["labs/lab2_megatron_layers.py"], "--plot", "PASS lab2"),
    (["oom_search.py", "--strategy", "tp", "--nproc", "1", "--memory-gib", "8"], "--plot", "PASS oom"),
]


@pytest.mark.parametrize("command,option,verdict", FULL, ids=lambda value: "" if value[0] == "-" else None)
def test_a_full_disk_is_said_and_the_verdict_stands(command, option, verdict, tmp_path):
    """No file may grow beyond 15 kB: a disk that is full, as far as the script can tell."""
    file = tmp_path / ("out" + {"--json": ".json", "--plot": ".png"}[option])
    full = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (15000, 15000))
    journal = ["--journal", tmp_path / "journal"] if command[0] == "oom_search.py" else []
    command = [sys.executable, *command, option, file, *journal]
    env = ENVIRONMENT | {"MPLCONFIGDIR": str(tmp_path / "matplotlib")}
    run = subprocess.run(
        list(map(str, command)),
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        preexec_fn=full,
    )
    assert run.returncode == 2 and verdict in run.stdout, run.stdout + run.stderr
    assert f"error: cannot write {file}: " in run.stderr and "Traceback" not in run.stderr
    assert not list(tmp_path.glob("out*")), "nothing half-written is left"
