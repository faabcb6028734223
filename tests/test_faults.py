"""A rank that dies, stops, raises or hangs ends the job in time; Ctrl-C does; nothing is left."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest
from conftest import ENVIRONMENT, ROOT

pytestmark = pytest.mark.slow  # each waits for a timeout, or starts a job of its own
TIMEOUT = 20  # seconds; a busy machine's ranks start that far apart
CASES = [
    (2, "kill", "backward", "tp.py"),
    (2, "raise", "forward", "sp_megatron.py"),
    (2, "stop", "collective", "sp_ulysses.py"),
    (4, "hang", "backward", "pp.py"),
]


def processes(mark):
    """Ids of processes whose environment has this mark, and that have not ended."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/environ") as environment, open(f"/proc/{pid}/stat") as stat:
                if mark in environment.read() and stat.read().rsplit(")", 1)[1].split()[0] != "Z":
                    found.append(int(pid))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return found


def job(ranks, mark, *command):
    """A job of so many ranks, in a session of its own, as a terminal would start it."""
    launch = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={ranks}"]
    how = {"cwd": ROOT, "env": ENVIRONMENT | dict([mark.split("=")]), "text": True}
    how |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "start_new_session": True}
    return subprocess.Popen(list(map(str, [*launch, *command])), **how)


@pytest.mark.ci
def test_ctrl_c_ends_a_run(tmp_path):
    mark = f"FAULT_TEST={tmp_path}"
    run = job(2, mark, "tp.py", "--mode", "learning", "--length", "4096")
    while not run.stdout.readline().strip():  # rank 0 has begun
        assert run.poll() is None
    time.sleep(3)
    os.killpg(run.pid, signal.SIGINT)  # as a terminal does: to torchrun and its ranks
    said, _ = run.communicate(timeout=60)
    assert "PASS" not in said and run.returncode != 0
    assert not processes(mark), "no process is left"


@pytest.mark.ci(every=2)
@pytest.mark.parametrize("ranks,kind,where,script", CASES)
def test_a_fault_ends_the_job_and_is_shown(ranks, kind, where, script, tmp_path):
    mark = f"FAULT_TEST={tmp_path}"
    logs = tmp_path / "logs"
    apart = ["--redirects", 2, "--log-dir", logs]  # else a rank writes amid another's line
    fault = [*apart, "tests/fault.py", kind, where, "1", script]
    wait = TIMEOUT if kind in ("stop", "hang") else 0  # else the job ends long before its own 600 s
    options = ["--length", "64", "--json", tmp_path / "results.json"]
    options += ["--timeout", wait] if wait else []
    run = job(ranks, mark, *fault, *options)
    _, errors = run.communicate(timeout=180)
    end = time.time()
    errors += "".join(log.read_text() for log in logs.rglob("stderr.log"))
    begin = re.search(r"fault at ([\d.]+)", errors)
    assert begin and run.returncode != 0, errors
    assert end - float(begin[1]) < wait + 45, errors
    assert not processes(mark), "no process is left"
    assert (tmp_path / "results.json").read_text() == "", "nor results"
    if kind == "kill":
        assert re.search(r"rank\s*: 1 \(local_rank: 1\)\s*exitcode\s*: -9", errors)
    if kind == "raise":
        assert "ValueError: a fault of this test" in errors
    if kind == "hang":  # every rank shows where it was, in its own log
        stacks = [log.read_text() for log in logs.rglob("stderr.log")]
        assert len(stacks) == ranks and all(f'{script}", line ' in stack for stack in stacks)
        assert re.search(r'File ".*tests/fault.py", line \d+ in fault\n', errors), errors
    if kind in ("kill", "stop"):  # the other waited for it in our code
        assert re.search(rf'File ".*{script}",? line \d+,? in \w+', errors)
