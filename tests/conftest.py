"""What the tests share: running the scripts as a user would, or as forks, which takes 0.3 s."""

import json
import multiprocessing
import os
import subprocess
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from forks import MODELS, ROOT, compiled, on_ranks, prepare, run_script

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
CHUNK = {"LOSS_CHUNK = 2048": "LOSS_CHUNK = 15"}  # so that a short sequence takes several chunks


def torchrun(ranks, *command, timeout=300, **options):
    """torchrun on this machine, from the project's folder; returns the CompletedProcess."""
    launch = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={ranks}"]
    options = {"cwd": ROOT, "env": ENVIRONMENT, "capture_output": True, "text": True, **options}
    return subprocess.run([*launch, *map(str, command)], timeout=timeout, **options)


def python(*command, timeout=300, env=None, cwd=ROOT):
    """A script without torchrun; returns the CompletedProcess, output as text."""
    options = {"cwd": cwd, "env": ENVIRONMENT | (env or {}), "capture_output": True, "text": True}
    return subprocess.run([sys.executable, *map(str, command)], timeout=timeout, **options)


def changed(script, put=None):
    """A script's text, with some of it replaced: {old: new}."""
    source = (ROOT / script).read_text()
    for old, new in (put or {}).items():
        assert source.count(old) == 1, f"{script} has this {source.count(old)} times: {old}"
        source = source.replace(old, new)
    return source


def live(world, folder, life, args):
    """In the process that forks: (exit codes, output) of life(*args) on so many ranks."""
    output = f"{folder}/output"
    if life is run_script:
        compiled(*args[:2])
    codes = on_ranks(world, partial(life, *args), output, patience=20)
    return codes, Path(output).read_text()


@pytest.fixture(scope="session")
def ranks(tmp_path_factory):
    """ranks(world, "tp.py --model deep", put) -> codes, output, json; ranks.live: see live().

    A model's name of forks.MODELS stands for its folder; put: what is changed in the script.
    """
    folder = tmp_path_factory.mktemp("ranks")
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn, prepare, [str(folder)]) as process:

        def run_life(world, life, *args):
            return process.submit(live, world, folder, life, args).result()

        def run(world, command, put=None, results=True):
            words = command if isinstance(command, list) else command.split()
            script, *argv = (f"{folder}/{w}" if w in MODELS else w for w in words)
            file = folder / "results.json"
            argv += ["--json", str(file)] if results else []
            codes, output = run_life(world, run_script, script, changed(script, put), argv)
            written = json.loads(file.read_text() or "null") if file.exists() else None
            file.unlink(missing_ok=True)
            return SimpleNamespace(codes=codes, output=output, json=written)

        run.live, run.folder = run_life, folder
        yield run


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: real weights, or minutes; make prove runs these")
    config.addinivalue_line("markers", "quick(every=n): every nth case is quick, the rest is slow")
    config.addinivalue_line("markers", "ci(every=n): slow, and every nth case is in CI")
    config.addinivalue_line("markers", "sample: what CI runs of the slow tests, by their ci marks")


def pytest_collection_modifyitems(items):
    """Mark what is slow, and the sample."""
    cases = Counter()  # of each test
    for item in items:
        test = item.path, item.originalname
        for mark in [m for m in item.iter_markers() if m.name in ("quick", "ci")]:
            nth = cases[test] % mark.kwargs.get("every", 1) == 0
            if mark.name == "ci" or not nth:
                item.add_marker("slow")
            if mark.name == "ci" and nth:
                item.add_marker("sample")
        cases[test] += 1
