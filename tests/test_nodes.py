"""Several nodes: two torchrun agents on this machine, which meet over loopback."""

import subprocess
import sys

import pytest
from conftest import ENVIRONMENT, ROOT
from forks import STRATEGIES
from torch.distributed import TCPStore

pytestmark = pytest.mark.slow


@pytest.mark.ci(every=4)
@pytest.mark.parametrize("script", STRATEGIES)
def test_two_agents_run_one_job(script):
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # on a free port
    nodes = ["--nnodes=2", "--nproc_per_node=1", "--rdzv-backend=c10d"]
    nodes.append(f"--rdzv-endpoint=127.0.0.1:{store.port}")
    command = [sys.executable, "-m", "torch.distributed.run", *nodes, script, "--length", "64"]
    how = {"cwd": ROOT, "env": ENVIRONMENT, "text": True}
    how |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    nodes = [subprocess.Popen(command, **how) for _ in range(2)]
    said = [node.communicate(timeout=200) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], said
    reports = [out for out, _ in said if out]
    assert len(reports) == 1, "rank 0 speaks, and it is on one node"
    assert "2 ranks (gloo, cpu)" in reports[0]
    assert reports[0].strip().splitlines()[-1].startswith("PASS correctness")
