"""results/plot.py: draws what every mode wrote, marks exact zeros, refuses the rest in one line."""

import json
import re

import plot
import pytest

KINDS = {"shard": 0.0, "logits": 1e-7, "loss": 0.0, "grad": None, "grad_norm": 2e-3, "weight": 1e-8}
TENSORS = [{"kind": kind, "coverage": 1, "relative_error": error} for kind, error in KINDS.items()]
for t in TENSORS:
    t |= {"limit": 1e-5 * (t["kind"] != "shard"), "passed": "grad" not in t["kind"]}
TENSORS[-1]["limit"] = None  # judged with all of its kind
TRAFFIC = {"phase": "forward", "op": "all_reduce", "bytes": 3072, "expected_bytes": 4096}
TIMELINE = [[0, "F", 0, 7, 0.0, 1.0], [1, "F", 1, 7, 1.0, 2.0], [1, "B", 3, 7, 2.0, 4.0]]
PIPELINE = {"timeline": TIMELINE, "in_flight": [1, 2], "bubble": 0.25, "bubble_formula": None}
RUN = {"script": "pp.py", "world_size": 2, "model": "tiny", "dtype": "float32", "batch": 1}
MODES = {
    "correctness": {"passed": False, "tensors": TENSORS},
    "learning": {"passed": True, "loss_reference": [3.0, 2.0], "loss": [3.0, None]},
    "benchmark": {"passed": False, "traffic": [TRAFFIC, TRAFFIC | {"op": "send", "ranks": [1]}]},
}
PIPELINE |= {"schedule": "zb", "ranks": 2, "passed": True}
RUNS = {mode: RUN | {mode: result} for mode, result in MODES.items()}
RUNS |= {"all": RUN | MODES | {"schedule": "zb"}, "schedule": RUN | {"schedule": PIPELINE}}
RUNS["timeline"] = RUNS["benchmark"] | {"schedule": "zb", "bubble": PIPELINE}
LIMIT = {"strategy": "tp", "nproc": 2, "how": "predicted", "longest": 512}
LIMIT |= {"breakdown": {"weights": 2**29, "logits": 0, "saved activations": 2**28}}
NONE = {"strategy": "pp", "nproc": 8, "how": "predicted", "longest": None}  # unusable
SEARCH = {"results": [LIMIT, NONE], "memory_bytes": 2**30, "loss": "full", "recompute": "none"}
RUNS["limits"] = RUN | SEARCH
RUNS["at"] = RUN | SEARCH | {"results": [NONE, LIMIT | {"at": [LIMIT | {"length": 9}] * 2}]}
RUNS["1 rank"] = RUN | {"world_size": 1, "benchmark": {"passed": True, "traffic": []}}


@pytest.mark.parametrize("name", RUNS)
def test_draws(name, tmp_path):
    (tmp_path / "run.json").write_text(json.dumps(RUNS[name]))
    plot.main([str(tmp_path / "run.json")])
    assert {file.name for file in tmp_path.iterdir()} == {"run.json", "run.png"}


def test_zeros_and_what_is_no_number_are_marked():
    axis = plot.picture(RUNS["correctness"]).axes[0]
    marks = [(line.get_marker(), *point) for line in axis.lines for point in line.get_xydata()]
    place = {label.get_text(): y for label, y in zip(axis.get_yticklabels(), axis.get_yticks())}
    assert {m[1] for m in marks if m[0] == "|" and m[2] == place["exactly 0"]} == {0, 2}
    assert {m[1] for m in marks if m[0] == "x" and m[2] == place["not a number"]} == {3}
    assert place["exactly 0"] < 1e-8 and 2e-3 < place["not a number"] < axis.get_ylim()[1]
    assert {m[2] for m in marks if m[1] == 4} == {2e-3}, "an error stands where it is, ringed"


def test_timeline_numbers_and_bytes():
    bars, timeline = plot.picture(RUNS["timeline"]).axes
    assert [text.get_text() for text in timeline.texts] == ["7", "7", "7"]
    assert [text.get_text() for text in bars.texts] == ["3,072 B"] * 2 + ["4,096 B"] * 2
    assert "message bytes per rank and step: FAIL" in bars.get_title(loc="left")


def test_limits_are_what_the_search_found():
    lengths, memory = plot.picture(RUNS["limits"]).axes
    assert [text.get_text() for text in lengths.texts] == ["512"]
    assert [(bar.get_x(), bar.get_width()) for bar in memory.patches] == [(0, 0.5), (0.5, 0.25)]
    assert memory.lines[0].get_xdata() == [1, 1]
    assert lengths.get_title().startswith("longest sequence in tokens")
    asked = plot.picture(RUNS["at"]).axes[0]
    assert asked.get_title().startswith("tokens in the sequence")
    assert [label.get_text() for label in asked.get_yticklabels()] == ["tp, 2 ranks, 9 tokens"]


BAD = {"run.json": "{}", "list.json": "[1]", "text.json": "no", "other.json": '{"results": []}'}
BAD |= {"none.json": None, "run.png": "{}", "run.json -o no/run.png": "", "run.json -o x.xyz": ""}


@pytest.mark.parametrize("words", BAD)
def test_refuses_in_one_line(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run, *options = words.split()
    if BAD[words] is not None:
        (tmp_path / run).write_text(BAD[words] or json.dumps(RUNS["all"]))
    with pytest.raises(SystemExit, match="2"):
        plot.main([run, *options])
    assert re.fullmatch(r"error: .+\n", capsys.readouterr().err), "one line"
    assert {file.name for file in tmp_path.iterdir()} <= {run}, "nothing half-written is left"
