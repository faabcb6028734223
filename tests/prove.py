"""What takes too long for CI, run whole: hours. Writes results/proved.json, which README quotes.

    make prove                              # all parts, in an environment of its own
    python tests/prove.py slow oldest       # some parts

Exit status: 0 if all passed, 1 if not.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "results"))
import make  # noqa: E402

FILE = ROOT / "results" / "proved.json"


def half_of_the_mutants(first):
    """Every second mutant: (exit status, the lines that are said of each)."""
    command = [sys.executable, ROOT / "tests" / "mutants.py", "--every", "2", "--start", str(first)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as run:
        lines = []
        for line in run.stdout:
            print(line, end="", flush=True)
            lines.append(line.rstrip().split("  "))
    return run.returncode, lines


def mutants():
    """Every mutant: how many were caught, how many are known to compute the same, which others."""
    with ThreadPoolExecutor() as threads:  # two at once: a mutant's ranks wait for one another
        (one, some), (two, others) = threads.map(half_of_the_mutants, (0, 1))
    said = Counter(line[0] for line in some + others)
    return one or two, {
        "caught": said["caught"],
        "equivalent": said["equivalent"],
        "survived": [line[1] for line in some + others if line[0] == "SURVIVED"],
    }


def slow(*which):
    """Every slow test of test_labs.py (wrong and right answers), or of all other files."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        pytest = ["-m", "pytest", "-m", "slow", "-n", "2", "--dist", "worksteal", *which]
        pytest += ["--durations=20", f"--junitxml={report}"]
        run = subprocess.run([sys.executable, *pytest], cwd=ROOT)
        cases = list(ElementTree.parse(report).iter("testcase"))
    files = Counter(case.get("classname").removeprefix("tests.") for case in cases)
    failed = [case.get("name") for case in cases if case.find("failure") is not None]
    skipped = [case.get("name") for case in cases if case.find("skipped") is not None]
    return run.returncode, {"tests": dict(files), "failed": failed, "skipped": skipped}


def soak():
    """200 correct runs of any seed, length, batch, dtype, model, number of ranks: none may fail."""
    return subprocess.run([sys.executable, ROOT / "tests" / "soak.py"]).returncode, {"runs": 200}


def oldest():
    """The four scripts and what they lean on, with the oldest transformers that is supported."""
    return subprocess.run(["make", "test-oldest"], cwd=ROOT).returncode, {}


def oldest_torch():
    """The quick tests with the oldest torch that pyproject.toml admits, in a second environment."""
    version = re.search(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())[1]
    free = {name: value for name, value in os.environ.items() if name != "PIP_CONSTRAINT"}
    command = ["make", "test", "VENV=.venv-oldest", f"TORCH=torch=={version}"]
    return subprocess.run(command, cwd=ROOT, env=free).returncode, {"torch": version}


PARTS = {
    "mutants": mutants,
    "labs": partial(slow, "tests/test_labs.py"),
    "slow": partial(slow, "--ignore=tests/test_labs.py"),
    "soak": soak,
    "oldest": oldest,
    "oldest_torch": oldest_torch,
}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", nargs="*", choices=[*PARTS, []], help="default: all")
    names = parser.parse_args().part or list(PARTS)
    os.environ["OMP_NUM_THREADS"] = "1"
    git = partial(subprocess.run, cwd=ROOT, capture_output=True, text=True)
    commit = git(["git", "rev-parse", "--short", "HEAD"]).stdout.strip()
    others = ["git", "diff", "--quiet", "HEAD", "--", ".", ":!results/proved.json"]
    commit += "-dirty" if git(others).returncode else ""
    steps = json.loads(FILE.read_text())["steps"] if FILE.exists() else {}
    for name in names:
        begin = time.time()
        status, found = PARTS[name]()
        steps[name] = {"passed": status == 0, "commit": commit, "about": make.about()}
        steps[name] |= {"seconds": round(time.time() - begin), **found}
        FILE.write_text(json.dumps({"part": "proved", "steps": steps}, indent=1) + "\n")
        print(f"{'PASS' if status == 0 else 'FAIL'} {name}", flush=True)
    return 0 if all(steps[name]["passed"] for name in names) else 1


if __name__ == "__main__":
    sys.exit(main())
