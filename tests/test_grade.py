"""labs/grade.py: hands out, grades, and is neither fooled nor held up."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from conftest import ROOT, python
from learner import LABS, Mistake, harness, run_lab, with_mistake
from learner import grade as grading

LESSON = LABS["lab1"].read_text()
DRAWN = "dist.all_reduce(shard, group=group)\nraise ValueError(str(shard.flatten().tolist()))"
RECEIVE = "dist.recv(x.new_empty(1), group=group, group_src=group.rank() ^ 1)"
WRONG = {  # an answer to all_reduce, and what is said of it
    "return x": "the result is off by",
    "return x +": "SyntaxError",
    "return y": "it fails, NameError: name 'y' is not defined",
    "while True:\n    x + x": 'in "x + x": no answer from ranks',
    f"{RECEIVE}\nreturn x": f'in "{RECEIVE}": no answer',
    "import os\nos._exit(5)": "died, exit code 5",
    "import os\nos.abort()": 'in "os.abort()": died of SIGABRT calls differ: in kind',
    "raise SystemExit(0)": "SystemExit",
    "print('noise')\nreturn None": "TypeError",
}


def answering(**answers):
    """Lab 1 with other answers to some of its exercises."""
    text = LESSON
    for exercise, answer in answers.items():
        text = with_mistake(text, exercise, Mistake("", [], [answer], None))
    return text


def test_hands_out_and_refuses_to_overwrite(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(grading, "MY_LABS", tmp_path / "my_labs")
    mine = tmp_path / "my_labs" / "lab1_collectives.py"
    assert grading.main(["start", "lab1"]) == 0
    text = mine.read_text()
    task = """raise NotImplementedError("The sum of all ranks' x, (n, ...) -> (n, ...), the ...")"""
    assert f"    # about 1 line\n    {task}\n" in text and "    # about 8 lines\n" in text
    assert grading.main(["start", "lab1"]) == 2
    assert re.match("error: .*--force", capsys.readouterr().err)
    mine.write_text("")
    assert grading.main(["start", "lab1", "--force"]) == 0 and mine.read_text() == text


@pytest.mark.slow
@pytest.mark.parametrize("answer,said", WRONG.items())
def test_what_is_said_of_a_wrong_answer(answer, said):
    answers = answering(all_reduce=answer), "utf-8"
    passed, seen, hint = grading.grade_one(LABS["lab1"], answers, "all_reduce", 5, 5)
    assert not passed and said in f"{seen} {hint}"


def errs_or_sees(group):
    """Rank 1 has an error at once; what rank 0 sees, a little later, is its cause."""
    time.sleep(0.2 * (group.rank() == 0))
    raise harness.Wrong(("sends 3 numbers", "it fails, ValueError: 3")[group.rank()])


def test_what_a_rank_has_seen_is_said_before_an_error_of_another():
    with pytest.raises(harness.Wrong) as told:
        harness.on_ranks(2, errs_or_sees)
    assert told.value.found == "rank 0: sends 3 numbers"


@pytest.mark.ci
def test_wrong_answers_fail_alone_and_checks_are_not_the_learners(tmp_path, capsys):
    """all_reduce calls reduce_scatter, and is graded as if nothing else were wrong."""
    mine, results = tmp_path / "mine.py", tmp_path / "results.json"
    own = "CHECKS = {'all_gather': (lambda *_: 'fine', 1)}\n"
    mine.write_text(answering(reduce_scatter="return x", all_gather=DRAWN) + own)
    asked = ["lab1", "--file", str(mine), "--json", str(results)]

    def graded(*options):
        assert grading.main([*asked, *options]) == 1
        return json.loads(results.read_text())["exercises"], capsys.readouterr().out

    found, printed = graded("--seed", "5")
    wrong = {name: one for name, one in found.items() if not one["passed"]}
    assert list(wrong) == ["reduce_scatter", "all_gather"]
    assert f"hint: {wrong['reduce_scatter']['hint']}\n" in printed
    verdict = f"FAIL lab1_collectives: {len(found) - 2} of {len(found)} exercises pass"
    assert printed.endswith(f"\n{verdict} (the same inputs again: --seed 5)\n")
    again, anew = (graded("--only", "all_gather", *how)[0] for how in (["--seed", "5"], []))
    rows = [results["all_gather"]["report"] for results in (found, again, anew)]
    first, second, third = (re.search(r"ValueError: \[.*", row)[0] for row in rows)
    assert first == second != third, "inputs are the seed's"


@pytest.mark.slow
def test_a_class_is_a_table_and_no_file_harms_another(tmp_path):
    """A hang, a file that kills its grader, one that is no text and one that is not there."""
    folder = tmp_path / "submissions"
    broken = {
        "a": (LESSON, "1 of 1", ""),
        "b": (answering(all_reduce="return x"), "0 of 1", "all_reduce"),
        "c": ("while True:\n    pass\n" + LESSON, "error", "not done after 60 s"),
        "d": ("import os\nos.killpg(0, 9)\n" + LESSON, "error", "its grader ended, exit code -9"),
        "e": ("\0", "error", "submissions/e.py has null bytes, as UTF-16 has: save it as UTF-8"),
        "f": (LESSON, "1 of 1", ""),
    }
    folder.mkdir()
    for name, (text, *_) in broken.items():
        (folder / f"{name}.py").write_text(text)
    words = ["lab1", "--only", "all_reduce", "--file", "submissions", "gone.py", "--limit", "60"]
    words += ["--timeout", "600", "--json", "class.json"]
    run = python(ROOT / "labs" / "grade.py", *words, cwd=tmp_path)
    assert run.returncode == 1 and run.stderr == "", run.stderr
    *rows, gone, _, verdict = run.stdout.splitlines()[1:]
    seen = [f"  submissions/{file}.py   {row[1]:8}   {row[2]}" for file, row in broken.items()]
    assert rows == seen
    assert gone.split(maxsplit=2)[:2] == ["gone.py", "error"] and "no gone.py: use" in gone
    assert verdict.startswith("FAIL lab1_collectives: 2 of 7 submissions pass (the same inputs")
    found = json.loads((tmp_path / "class.json").read_text())["submissions"]
    assert [one["passed"] for one in found.values()] == [True] + 4 * [False] + [True, False]


def test_what_a_learner_adds_outside_counts_and_lost_markers_are_named():
    """For every exercise: the grader puts our answers into the learner's file, but for one."""
    mine = answering(all_gather="return 0", all_reduce="return -x") + "MORE = 1\n"
    one = grading.spliced(LESSON, mine, "all_reduce")
    assert "return -x" in one and "return 0" not in one and one.endswith("MORE = 1\n")
    with pytest.raises(grading.Wrong) as seen:
        grading.spliced(LESSON, LESSON.replace("    # end exercise\n", "", 1), "all_reduce")
    assert "without its other half" in seen.value.found
    without = LESSON.replace("# exercise: all_reduce\n", "# exercise: all_gather\n")
    with pytest.raises(grading.Wrong) as seen:
        grading.spliced(LESSON, without, "all_reduce")
    assert "0 places '# exercise: all_reduce', and there should be 1" in seen.value.found
    assert grading.spliced(LESSON, without, "exchange").count("# exercise: all_gather") == 2


BAD = [
    ("start lab99", "no lab lab99: use one of lab"),
    ("lab1 --file nowhere.py", "no nowhere.py: use python labs/grade.py start lab1"),
    ("finish lab1", "finish lab1: use list, start LAB, or LAB"),
    ("lab1 --timeout 0", "argument --timeout: use 1 to 2147483647, not 0"),
    (
        "lab1 --file labs/lab1_collectives/lesson.py --only x",
        "lab1_collectives has no exercise x: use one of",
    ),
    ("lab1 --file labs/notes", "no .py file in labs/notes"),
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
    file = tmp_path / "mine.py"
    for data in (b"# r\xe9duit\n", b"\n\n# r\xe9duit\n", b"# coding: klingon\n"):
        file.write_bytes(data + LESSON.encode())
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
    answer = "print('réduit')\nraise ValueError('réduit')"
    (tmp_path / "mine.py").write_text(answering(overlap=answer), encoding="utf-8")
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
