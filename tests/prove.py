"""What takes too long for CI, run whole: hours. Writes results/proved.json, which README quotes.

    make prove                              # all parts, in an environment of its own
    python tests/prove.py soak test_labs    # some: names of PARTS and of test files

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
from collections import Counter, defaultdict
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


def slow(files):
    """Every slow test of some test files, in one run, which keeps both cores busy: outcomes()."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        pytest = ["-m", "pytest", "-m", "slow", "-n", "2", "--dist", "worksteal", "--durations=20"]
        pytest += [f"--junitxml={report}", *(f"tests/{name}.py" for name in files)]
        status = subprocess.run([sys.executable, *pytest], cwd=ROOT).returncode
        if status > 1:  # not what tests say: a file that cannot be imported, Ctrl-C
            sys.exit(status)
        return outcomes(report)


def outcomes(report):
    """{test file: {"tests": how many, "seconds": their sum, "failed", "skipped": names}}."""
    files = defaultdict(lambda: {"tests": 0, "seconds": 0, "failed": [], "skipped": []})
    for case in ElementTree.parse(report).iter("testcase"):
        step = files[case.get("classname").removeprefix("tests.")]
        step["tests"] += 1
        step["seconds"] = round(step["seconds"] + float(case.get("time")), 1)
        tags = {outcome.tag for outcome in case}
        step["failed"] += [case.get("name")] if tags & {"failure", "error"} else []
        step["skipped"] += [case.get("name")] if "skipped" in tags else []
    return dict(sorted(files.items()))


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


PARTS = {"mutants": mutants, "soak": soak, "oldest": oldest, "oldest_torch": oldest_torch}
TESTS = sorted(file.stem for file in (ROOT / "tests").glob("test_*.py"))


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", nargs="*", choices=[*PARTS, *TESTS, []], metavar="PART")
    names = parser.parse_args().part or [*PARTS, *TESTS]
    os.environ["OMP_NUM_THREADS"] = "1"
    git = partial(subprocess.run, cwd=ROOT, capture_output=True, text=True)
    commit = git(["git", "rev-parse", "--short", "HEAD"]).stdout.strip()
    mine = [":!results/proved.json", ":!results/README.md"]
    others = ["git", "diff", "--quiet", "HEAD", "--", ".", *mine]
    commit += "-dirty" if git(others).returncode else ""
    steps = json.loads(FILE.read_text())["steps"]

    def keep(name, passed, step):
        steps[name] = {"passed": passed, "commit": commit, "about": make.about(), **step}
        FILE.write_text(json.dumps({"part": "proved", "steps": steps}, indent=1) + "\n")
        make.README.write_text(make.with_tables(make.README.read_text()))  # a test compares them
        print(f"{'PASS' if passed else 'FAIL'} {name}", flush=True)

    for name in [name for name in names if name in PARTS]:
        begin = time.time()
        status, found = PARTS[name]()
        keep(name, status == 0, {"seconds": round(time.time() - begin), **found})
    if files := [name for name in names if name in TESTS]:
        for name, step in slow(files).items():
            keep(name, not step["failed"], step)
    return 0 if all(steps[name]["passed"] for name in names if name in steps) else 1


if __name__ == "__main__":
    sys.exit(main())
