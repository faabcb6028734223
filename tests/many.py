"""Runs many command lines of the scripts on one set of ranks: a test suite starts torch only once.

    torchrun --nproc_per_node=2 tests/many.py CASES.json OUTCOMES.json

CASES.json: a list of command lines, each a list such as ["tp.py", "--mode", "all"]. Each runs as a
user would run it: the file as __main__, in a fresh namespace, on its own process group.
OUTCOMES.json: for each its
exit status, what rank 0 printed, and the results of its --json.
"""

import contextlib
import gc
import io
import json
import os
import runpy
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path

import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent
RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
STORE = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)


def run_case(number, command):
    """Run one command line on this rank; returns {"exit", "output", "json", "seconds"}."""
    script, *argv = command
    results = (
        Path(tempfile.gettempdir()) / f"many_{os.environ['TORCHELASTIC_RUN_ID']}_{number}.json"
    )
    sys.argv = [str(ROOT / script), *argv, *([] if "--json" in argv else ["--json", str(results)])]
    output, begin = io.StringIO(), time.time()
    own = dist.PrefixStore(
        f"case {number}", STORE
    )  # keys of its own: none may meet another's address
    joined = own, RANK, WORLD_SIZE
    dist.distributed_c10d.rendezvous = lambda *_, **__: iter([joined])
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
            status = 0
        except SystemExit as stop:
            status = stop.code or 0
    written = json.loads(results.read_text()) if results.exists() and RANK == 0 else None
    if written:
        results.unlink()
    return {
        "exit": status,
        "output": output.getvalue(),
        "json": written,
        "seconds": time.time() - begin,
    }


def main(cases, outcomes):
    done = []
    warnings.filterwarnings("ignore", "Unable to enable fault handler")  # our stderr is no file
    time.sleep = lambda seconds: (
        None
    )  # nobody ends the ranks between cases, so none has to wait for rank 0
    for number, command in enumerate(json.loads(Path(cases).read_text())):
        try:
            done.append(run_case(number, command))
        except Exception:  # this rank is lost, and with it the others: torchrun ends them
            traceback.print_exc()
            os._exit(1)
        if number == 0:
            gc.freeze()  # what has been imported will stay: no collection need look at it
        if RANK == 0:
            Path(outcomes).write_text(json.dumps(done))


if __name__ == "__main__":
    main(*sys.argv[1:])
