"""Runs many command lines of the scripts on one set of ranks: a test suite starts torch only once.

    torchrun --nproc_per_node=2 tests/many.py CASES.json OUTCOMES.json

CASES.json: a list of command lines, each a list such as ["tp.py", "--mode", "all"]. Each runs as a
user would run it: the file as __main__, in a fresh namespace, on its own process group. With
"NAME=number" before the script that constant of it has another value. OUTCOMES.json: for each its
exit status, what rank 0 printed, and the results of its --json.
"""

import contextlib
import gc
import io
import json
import os
import re
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


def run_case(number, command, folder):
    """Run one command line on this rank; returns {"exit", "output", "json", "seconds"}."""
    constants = [word for word in command if re.fullmatch(r"[A-Z_]+=\d+", word)]
    script, *argv = command[len(constants) :]
    path, results = ROOT / script, Path(folder, "results.json")
    for constant in constants:
        name, source = constant.split("=")[0], path.read_text()
        source, count = re.subn(rf"^{name} = \d+", constant, source, flags=re.M)
        assert count == 1, f"{script} has no constant {name}"
        path = Path(folder, script)
        path.write_text(source)
    sys.argv = [str(path), *argv, *([] if "--json" in argv else ["--json", str(results)])]
    output, begin = io.StringIO(), time.time()
    own = dist.PrefixStore(f"case {number}", STORE)  # its keys: none may meet another's address
    joined = own, RANK, WORLD_SIZE
    dist.distributed_c10d.rendezvous = lambda *_, **__: iter([joined])
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
            status = 0
        except SystemExit as stop:
            status = stop.code or 0
    written = json.loads(results.read_text()) if results.exists() else None
    results.unlink(missing_ok=True)
    outcome = {"exit": status, "output": output.getvalue(), "json": written}
    return outcome | {"seconds": time.time() - begin}


def main(cases, outcomes):
    done = []
    warnings.filterwarnings("ignore", "Unable to enable fault handler")  # our stderr is no file
    # Nobody ends the ranks between cases, so none has to wait for rank 0 to speak.
    time.sleep = lambda seconds: None
    with tempfile.TemporaryDirectory() as folder:
        for number, command in enumerate(json.loads(Path(cases).read_text())):
            try:
                done.append(run_case(number, command, folder))
            except Exception:  # this rank is lost, and with it the others: torchrun ends them
                traceback.print_exc()
                os._exit(1)
            if number == 0:
                gc.freeze()  # what has been imported will stay: no collection need look at it
            if RANK == 0:
                Path(outcomes).write_text(json.dumps(done))


if __name__ == "__main__":
    main(*sys.argv[1:])
