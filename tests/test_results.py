"""results/make.py: the tables are those of the JSON, and every kind of step gives a result."""

import functools
import importlib
import inspect
import json
import re
import sys

import make
import pytest
import torch.distributed as dist
from conftest import ROOT, python


def test_readme_shows_what_was_found():
    text = make.README.read_text()
    assert make.with_tables(text) == text
    for figure in (r"\d\.\d\d", r"\d+k"):
        changed = re.sub(rf"(?<=\| ){figure}(?= \|)", "9", text)
        assert changed != text and make.with_tables(changed) == text, "changed by hand: put right"


@pytest.mark.skipif(make.torch.cuda.is_available(), reason="there is a GPU")
def test_what_takes_a_gpu_is_refused_without_one(capsys):
    with pytest.raises(SystemExit) as ended:
        make.main(["gpu"])
    assert ended.value.code == 2 and capsys.readouterr().err.startswith("error: no GPU here: use")


def steps_of(part, trial, outcomes):
    """{step: command line} of a part whose steps come to these outcomes."""
    steps, lines, outcome = make.PARTS[part](trial), {}, None
    while True:
        try:
            step, line = steps.send(outcome)
        except StopIteration:
            return lines
        lines[step], outcome = line, outcomes.get(step)


@pytest.mark.parametrize("name", make.PARTS)
def test_what_was_found_has_its_command(name):
    for part in make.found(name):
        assert set(part["about"]) == {"date", "device", "cpu", "versions"}
        commands = {step: outcome["command"] for step, outcome in part["steps"].items()}
        assert list(commands.items()) == list(steps_of(name, False, part["steps"]).items())


KINDS = [  # part, step, its row in the part's table
    ("gpu", "correctness on 2, sp_megatron", r"\| sp_megatron \|  \| \d\.\de-\d\d \|"),
    ("lengths", "40 GiB", r"\| tp \| \d+k \| \d+k \| error \| error \| error, error \|"),
    ("plans", "verdicts", r"\| qwen3 \| right, 83 kB \| .* WRONG: q_norm, k_norm \| WRONG: "),
    ("cpu", "correctness bfloat16, tp", r"\| tp \|  \|  \| \d\.\de-\d\d \|"),
    ("cpu", "benchmark, pp", r"\| pp( \| ){4}\d+\.\d\d \| \d+ / \d+ \| \d+ \|"),
    ("gpu", "benchmark 512, plain", r"\| plain, 512 tokens \| full, full \| \d+ \|  \| 1\.000 \|"),
    ("gpu", "rank 0 of 1, sp_megatron", r"\| sp_megatron \| \d+ \| \d+\.\d\d \|"),
    ("gpu", "predicted, rank 0", r"\| tp \|  \| \(0\.\d\d\) \|  \| \(0\.\d\d\) \|"),
    ("gpu", "tiny on 2, pp zb", r"\| pp zb \|  \|  \| \d\.\de-\d\d \|  \|"),
]


@pytest.mark.ci(every=12)
@pytest.mark.parametrize("part,step,row", KINDS)
def test_a_step_of_each_kind(part, step, row):
    outcome = make.run(steps_of(part, True, {})[step])
    assert "result" in outcome, outcome
    text = make.TABLES[part]({"about": make.about(), "steps": {step: outcome}})
    assert text.startswith(("*Predicted", "*Measured"))
    assert re.search(row, text), text
    assert not re.search('"(tensors|timeline)"', json.dumps(outcome)), "too long to be kept"


def test_limits_are_tried_and_compared():
    """Without a GPU: the lines that would run, and the table of what they might have found."""

    def result(*rows):
        keys = ("strategy", "nproc", "longest", "too_long")
        return {"result": {"results": [dict(zip(keys, row)) for row in rows]}}

    outcomes = {"predicted, 6 GiB": result(("tp", 1, 50176, 50688), ("tp", 2, None, 512))}
    lines = steps_of("limits", False, outcomes)
    there = "--how emulated --strategy tp --nproc"
    assert lines["tp on 1, 6 GiB"].endswith(f"{there} 1 --lo 40140")
    assert lines["tp on 2, 6 GiB"].endswith(f"{there} 2 --lo 1")
    outcomes |= {"predicted, 40 GiB, no remedy": result(("tp", 1, 19456, 19968))}
    outcomes |= {"tp on 1, 6 GiB": result(("tp", 1, 51200, 51712))}
    outcomes |= {"tp on 1, 40 GiB, no remedy": result(("tp", 1, None, 15872))}
    text = make.TABLES["limits"]({"about": make.about(), "steps": outcomes})
    for row in ("6 GiB, 1 | 51,200 (50,176)", "6 GiB, 2 | error (0)", "1 | below 15,872 (19,456)"):
        assert f"{row} |" in text, text


def test_a_step_that_fails_says_why():
    outcome = make.run("python labs/four_layouts.py --tp 0")
    assert outcome["error"][-1].endswith("error: --tp 0: use 1 to 64")


def test_a_proof_that_failed_is_not_left_blank():
    steps = {"correctness float32, pp": {"error": ["FAIL correctness"]}}
    steps |= {"correctness bfloat16, pp": {"error": ["error: --attn flash needs a package"]}}
    row = "| pp |  | failed | not run |"
    assert row in make.TABLES["cpu"]({"about": make.about(), "steps": steps})


def rank_on_one_gpu(script):
    """A rank that, as on a GPU, can send no tensor of its own, only one_gpu.py's copies."""
    one_gpu = importlib.import_module("one_gpu")

    def refuse_a_gpu(function, *args, **options):
        assert sys._getframe(1).f_code.co_filename == one_gpu.__file__, function.__name__
        return function(*args, **options)

    for name in dist.distributed_c10d.__all__:
        function = getattr(dist, name)
        takes = inspect.signature(function).parameters if inspect.isfunction(function) else {}
        if re.search("tensor|output", next(iter(takes), "")):
            setattr(dist, name, functools.partial(refuse_a_gpu, function))
    sys.argv = ["one_gpu.py", script, "--length", "16"]
    one_gpu.main()


@pytest.mark.quick(every=4)
@pytest.mark.parametrize("script", ["pp.py", "tp.py", "sp_megatron.py", "sp_ulysses.py"])
def test_ranks_on_one_gpu_send_copies(ranks, script):
    codes, output = ranks.live(2, rank_on_one_gpu, script)
    assert codes == [0, 0] and "PASS correctness" in output, output


@pytest.mark.ci
@pytest.mark.parametrize("script", [[], ["nowhere.py"]])
def test_ranks_on_one_gpu_need_a_script(script):
    done = python("results/one_gpu.py", *script)
    said = "error: no script given: use results/one_gpu.py tp.py\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", said)


PUBLISHED = [*enumerate(make.PUBLISHED)]


def test_predictions_are_near_what_others_measured():
    """Within 20%, the goal, where no cause of a difference is named."""
    [part] = make.found("published")
    ratios = {i: make.predicted(part, row) / float(row["measured"]) for i, row in PUBLISHED}
    near = [abs(ratio - 1) <= 0.2 for ratio in ratios.values()]
    assert all(is_near or row["why"] for is_near, (_, row) in zip(near, PUBLISHED)), ratios
    told = (f"published {len(near)} such measurements", f"{sum(near)} predictions are within 20%")
    assert all(words in (ROOT / "README.md").read_text() for words in told)


@pytest.mark.slow
def test_published_predictions_are_what_the_code_says():
    """Those of eight ranks with SP: the slope of two runs, anew."""
    [part] = make.found("published")
    [row] = [row for _, row in PUBLISHED if row["what"].startswith("TP 8")]
    steps = {step: found for step, found in part["steps"].items() if row["what"] in step}
    assert len(steps) == 2
    anew = {step: make.run(found["command"]) for step, found in steps.items()}
    assert make.predicted({"steps": anew}, row) == pytest.approx(make.predicted(part, row), 1e-3)
