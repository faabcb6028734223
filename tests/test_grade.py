"""labs/grade.py: hands out, grades, and is neither fooled nor held up."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys

import pytest
from conftest import ROOT, python
from learner import LABS, run_lab
from learner import grade as grading

SMALL_LAB = '''
import torch
import torch.distributed as dist


def helper(x):
    return x


def twice(x):
    """2 x."""
    # exercise: twice
    return helper(x) + helper(x)
    # end exercise
'''
TOTAL = '''

def total(x, group):
    """The sum of x over the ranks, in a new tensor. x (n)."""
    # exercise: total
    x = x.clone()
    dist.all_reduce(x, group=group)

    return x  # comments and empty lines do not count
    # end exercise
'''
CHECKS = """
import torch
from labs.kit.harness import Wrong


def check_twice(lab, group, seed):
    if lab.twice(seed) != 2 * seed:
        raise Wrong("not twice")
    return "twice"


def check_total(name):
    def check(lab, group, seed):
        first = torch.arange(3.0) + seed %% 1000  # a seed has 31 bits, more than float32 can add
        x = first + group.rank()
        right = 2 * first + 1
        y = getattr(lab, name)(x, group)
        if torch.equal(y, x):
            raise Wrong("the sum is off", "every rank's x counts")
        if not torch.equal(y, right):
            raise Wrong("the sum is off")
        return "the sum is right"

    return check, 2


CHECKS = {"twice": (check_twice, 1)}
CHECKS |= {name: check_total(name) for name in (f"total{i}" for i in range(%d))}
"""
WRONG = {  # an answer to total, and what is said of it
    "    return x\n": "the sum is off",
    "    return x +\n": "SyntaxError",
    "  return x\n": "IndentationError",
    "    return y\n": "in \"return y\": NameError: name 'y' is not defined",
    "    while True:\n        x + x\n": 'rank 1 in "x + x": no answer from ranks',
    "    dist.recv(x, 1 - group.rank())\n    return x\n": 'in "dist.recv(x, 1 - group.rank())": no',
    "    import os\n    os._exit(5)\n": "died, exit code 5",
    "    import os\n    os.abort()\n": 'in "os.abort()": died of SIGABRT',
    "    raise SystemExit(0)\n": "SystemExit",
    "    print('noise')\n    return None\n": "TypeError",
    "    raise ValueError(str(x.tolist()))\n": "ValueError",
}
TOTALS = "".join(TOTAL.replace("total", f"total{i}") for i in range(len(WRONG)))  # one for each


RIGHT = re.compile(r"    x = x\.clone.*?return x  [^\n]*\n", re.S)


def grader(folder, *options):
    """labs/grade.py in a folder that has one small lab: what it printed, and its results."""
    results = folder / "results.json"
    run = python(folder / "labs" / "grade.py", *options, "--json", results)
    assert "Traceback" not in run.stdout + run.stderr
    return run, json.loads(results.read_text())["exercises"] if results.exists() else None


@pytest.fixture
def desk(tmp_path):
    """Such a folder."""
    labs, lab = tmp_path / "labs", tmp_path / "labs" / "lab0_small"
    (labs / "kit").mkdir(parents=True)
    lab.mkdir()
    for file in ("grade.py", "kit/harness.py", "kit/blame.py", "kit/cli.py"):
        shutil.copy(ROOT / "labs" / file, labs / file)
    (lab / "lesson.py").write_text(SMALL_LAB + TOTALS)
    (lab / "check.py").write_text(CHECKS % len(WRONG))
    return tmp_path


def test_hands_out_and_refuses_to_overwrite(desk):
    mine = desk / "my_labs" / "lab0_small.py"
    assert grader(desk, "start", "lab0")[0].returncode == 0
    text = mine.read_text()
    assert text.count("raise NotImplementedError") == 1 + len(WRONG) and "all_reduce" not in text
    task = "raise NotImplementedError('The sum of x over the ranks, in a new tensor.')"
    assert f"    # about 3 lines\n    {task}\n" in text
    assert "    # about 1 line\n    raise NotImplementedError('2 x.')\n" in text
    again, _ = grader(desk, "start", "lab0")
    assert again.returncode == 2
    assert again.stderr.startswith("error: ") and "--force" in again.stderr
    mine.write_text("")
    assert grader(desk, "start", "lab0", "--force")[0].returncode == 0 and mine.read_text() == text


@pytest.mark.ci
def test_right_answers_pass_and_checks_are_not_the_learners(desk):
    mine = desk / "mine.py"
    own = "CHECKS = {f'total{i}': (lambda *_: 'fine', 1) for i in range(99)}\n"
    mine.write_text(SMALL_LAB + TOTALS + own)
    run, results = grader(desk, "lab0", "--file", mine, "--seed", "5")
    reports = {result["report"] for result in results.values() if result["passed"]}
    assert run.returncode == 0 and reports == {"twice", "the sum is right"}
    assert run.stdout.splitlines()[-1] == "PASS lab0_small: 12 of 12 exercises pass"


@pytest.mark.slow
def test_each_wrong_answer_fails_alone(desk):
    answers = iter(WRONG)
    text = SMALL_LAB + RIGHT.sub(lambda match: next(answers), TOTALS)
    (desk / "my_labs").mkdir()
    (desk / "my_labs" / "lab0_small.py").write_text(text)
    run, results = grader(desk, "lab0", "--timeout", "5", "--seed", "5")
    assert run.returncode == 1
    for i, said in enumerate(WRONG.values()):
        assert not results[f"total{i}"]["passed"] and said in results[f"total{i}"]["report"]
    assert results["twice"]["passed"], "graded as if nothing else were wrong"
    assert results["total0"]["hint"] == "every rank's x counts"
    assert "hint: every rank's x counts" in run.stdout
    assert "calls differ" in results["total7"]["hint"]
    verdict = "FAIL lab0_small: 1 of 12 exercises pass (the same inputs"
    assert run.stdout.splitlines()[-1].startswith(verdict)
    drawn = results["total10"]["report"]
    assert re.search(r"\[([56])\.0, ", drawn), "--seed 5 is what the check drew from"
    _, again = grader(desk, "lab0", "--only", "total10")
    assert again["total10"]["report"] != drawn, "without --seed inputs are new"


@pytest.mark.slow
def test_a_class_is_a_table_and_no_file_harms_another(desk):
    """A hang, a file that kills its grader, one that is no text and one that is not there."""
    whole, folder = SMALL_LAB + TOTALS, desk / "submissions"
    broken = {
        "a": (whole, "1 of 1", ""),
        "b": (whole.replace("helper(x) + helper(x)", "x"), "0 of 1", "twice"),
        "c": ("while True:\n    pass\n" + whole, "error", "not done after 60 s"),
        "d": ("import os\nos.killpg(0, 9)\n" + whole, "error", "its grader ended, exit code -9"),
        "e": ("\0", "error", "submissions/e.py has null bytes, as UTF-16 has: save it as UTF-8"),
        "f": (whole, "1 of 1", ""),
    }
    folder.mkdir()
    for name, (text, *_) in broken.items():
        (folder / f"{name}.py").write_text(text)
    words = ["lab0", "--only", "twice", "--file", "submissions", "gone.py", "--limit", "60"]
    run = python("labs/grade.py", *words, "--timeout", "600", "--json", "class.json", cwd=desk)
    assert run.returncode == 1 and run.stderr == "", run.stderr
    *rows, gone, _, verdict = run.stdout.splitlines()[1:]
    seen = [f"  submissions/{file}.py   {row[1]:8}   {row[2]}" for file, row in broken.items()]
    assert rows == seen
    assert gone.split(maxsplit=2)[:2] == ["gone.py", "error"] and "no gone.py: use" in gone
    assert verdict.startswith("FAIL lab0_small: 2 of 7 submissions pass (the same inputs")
    found = json.loads((desk / "class.json").read_text())["submissions"]
    assert [one["passed"] for one in found.values()] == [True] + 4 * [False] + [True, False]
    assert found["submissions/b.py"]["exercises"]["twice"]["report"] == "rank 0: not twice"


LAB = SMALL_LAB + TOTAL


def test_what_a_learner_adds_outside_counts():
    """For every exercise: the grader puts our answers into the learner's file, but for one."""
    mine = LAB.replace("return x\n", "return 0\n", 1).replace("helper(x) + helper(x)", "x * 3")
    mine = RIGHT.sub("    return -x\n", mine)
    one = grading.spliced(LAB, mine, "twice")
    assert "return 0" in one and "x * 3" in one and "all_reduce" in one and "-x" not in one
    other = grading.spliced(LAB, mine, "total")
    assert "return 0" in other and "helper(x) + helper(x)" in other and "-x" in other


def test_lost_markers_are_named():
    with pytest.raises(grading.Wrong) as seen:
        grading.spliced(LAB, LAB.replace("    # end exercise\n", "", 1), "total")
    assert "without its other half" in seen.value.found
    with pytest.raises(grading.Wrong) as seen:
        grading.spliced(LAB, SMALL_LAB, "total")
    assert "0 places '# exercise: total', and there should be 1" in seen.value.found
    assert "all_reduce" not in grading.spliced(LAB, SMALL_LAB, "twice")


BAD = [
    ("lab99", "no lab lab99: use one of lab"),
    ("start lab99", "no lab lab99: use one of lab"),
    ("lab1 --file nowhere.py", "no nowhere.py: use python labs/grade.py start lab1"),
    ("finish lab1", "finish lab1: use list, start LAB, or LAB"),
    ("lab1 --timeout 0", "argument --timeout: use 1 to 2147483647, not 0"),
    (
        "lab1 --file labs/lab1_collectives/lesson.py --only x",
        "lab1_collectives has no exercise x: use one of",
    ),
    ("lab1 --file labs/notes", "no .py file in labs/notes"),
    ("", "the following arguments are required: LAB"),
]


def test_labs_are_listed_by_their_numbers(capsys):
    assert grading.main(["list"]) == 0
    listed = [line.partition("_")[0] for line in capsys.readouterr().out.splitlines()]
    assert listed[:5] == ["lab1", "lab2", "lab3", "lab3b", "lab4"]
    assert sorted(listed[4:], key=lambda lab: int(lab[3:])) == listed[4:]


@pytest.mark.parametrize("options,message", BAD)
def test_bad_input(options, message, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert grading.main(options.split()) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith(f"error: {message}")
    assert said.err.count("\n") == 1


def test_a_file_that_python_cannot_read_is_one_line(tmp_path, capsys):
    text, file = LABS["lab1"].read_text(), tmp_path / "mine.py"
    for data in (text.encode("utf-16"), text.encode("utf-16-le"), text.encode("utf-32")):
        file.write_bytes(data)
        assert grading.main(["lab1", "--file", str(file)]) == 2
        line = f"error: {file} has null bytes, as UTF-16 has: save it as UTF-8\n"
        assert capsys.readouterr() == ("", line)
    for data in (b"# r\xe9duit\n", b"\n\n# r\xe9duit\n", b"# coding: klingon\n"):
        file.write_bytes(data + text.encode())
        assert grading.main(["lab1", "--file", str(file)]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.endswith(f": save {file} as UTF-8\n") and err.count("\n") == 1


def test_what_cannot_be_written_is_said_before_the_work(tmp_path, capsys, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(grading, "MY_LABS", tmp_path / "file" / "my_labs")
    assert grading.main(["start", "lab1"]) == 2
    for path in (tmp_path, tmp_path / "file" / "x.json", f"{tmp_path}/no/", "/dev/null", 300 * "x"):
        assert grading.main(["lab1", "--json", str(path)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and re.fullmatch(r"(error: cannot write .*\n){6}", err), err
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


CLUSTER = {"PYTHONSAFEPATH": "1", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}


@pytest.mark.ci
def test_a_cluster_with_a_long_tmpdir_and_a_locale_of_ascii(tmp_path):
    """An answer that prints and raises what the locale has no letters for."""
    (deep := tmp_path / (90 * "a")).mkdir()
    answer = "    print('réduit')\n    raise ValueError('réduit')\n"
    text = re.sub(r"( *# exercise: overlap\n)", rf"\1{answer}", LABS["lab1"].read_text())
    (tmp_path / "mine.py").write_text(text, encoding="utf-8")
    words = "lab1", "--file", tmp_path / "mine.py", "--only", "overlap"
    run = python("labs/grade.py", *words, env=CLUSTER | {"TMPDIR": str(deep)})
    assert run.returncode == 1 and run.stderr == "", run.stderr
    assert "ValueError: r\\xe9duit\n" in run.stdout, run.stdout


LAB1 = "labs/lab1_collectives/lesson.py"
WITHOUT = [f"labs/grade.py lab1 --file {LAB1}", pytest.param(LAB1, marks=pytest.mark.slow)]


@pytest.mark.parametrize("words", WITHOUT)
def test_ranks_without_a_network_are_no_wrong_answer(words):
    run = python(*words.split(), env={"GLOO_SOCKET_IFNAME": "none0"})
    assert run.returncode == 2 and "FAIL" not in run.stdout
    assert re.fullmatch(r"error: no network between ranks \(.*\n", run.stderr), run.stderr


@pytest.mark.parametrize(
    "words", ["grade.py list", "break_it.py --list", "lab1_collectives/lesson.py"]
)
def test_a_reader_may_leave_early(words):
    reader, writer = os.pipe()
    os.close(reader)
    how = {"cwd": ROOT / "labs", "stdout": writer, "stderr": subprocess.PIPE}
    run = subprocess.run([sys.executable, *words.split()], **how)
    os.close(writer)
    assert run.returncode == -signal.SIGPIPE and run.stderr == b""


def test_windows_is_told_what_would_do(monkeypatch, capsys):
    monkeypatch.setattr(sys, "platform", "win32")
    assert grading.main(["list"]) == 2
    assert run_lab(LABS["lab1"], []) == 2
    line = "error: needs Linux or macOS; on Windows use WSL\n"
    assert capsys.readouterr() == ("", 2 * line)


def test_importing_the_harness_starts_nothing():
    code = "import multiprocessing.forkserver as f, labs.kit.harness; "
    code += "print(f._forkserver._forkserver_pid)"
    run = python("-c", code, cwd=ROOT)
    assert run.stdout == "None\n", run.stderr
