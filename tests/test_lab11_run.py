"""Lab 11: its model against the runs, its messages against the scripts, its command line."""

import csv
import dataclasses
import json
import re
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT
from learner import LABS, SHOWN, harness, run_lab
from pytest import approx

SHOWN["lab11"]  # its import found experiments/
from experiments import plan, runs  # noqa: E402

lab = harness.load(LABS["lab11"])
ROWS = runs.read_runs()
JUDGED = [row for row in ROWS if runs.judged(row)]
MINE, JUDGE = ([row for row in JUDGED if runs.half(row) == side] for side in (0, 1))


def test_the_half_that_nothing_is_fitted_to():
    assert abs(len(MINE) - len(JUDGE)) < 20 and len(lab.READ_OFF) <= 10
    seen = runs.scored(lab, JUDGE, lab.H100)
    assert seen["median"] <= 0.05 and seen["within_10"] >= 0.75 and seen["within_20"] >= 0.85
    assert seen["ordered"] >= 0.9 and seen["picks"] >= 16 / 20
    other = runs.fit(lab, JUDGE, lab.H100)  # and the other way round
    seen = runs.scored(lab, MINE, other)
    assert seen["median"] <= 0.05 and seen["within_10"] >= 0.75 and seen["within_20"] >= 0.85


@pytest.mark.slow  # 3 s
def test_the_constants_are_what_the_fit_gives():
    fitted = runs.fit(lab, MINE, dataclasses.replace(lab.H100, **runs.FIRST_GUESS))
    for name in lab.READ_OFF:
        assert getattr(lab.H100, name) == approx(getattr(fitted, name), rel=0.05), name


def test_every_part_earns_its_place():
    for left_out, seen in SHOWN["lab11"].ablation(lab, JUDGE).items():
        if left_out != "nothing":
            assert seen["median"] > 1.2 * runs.scored(lab, JUDGE, lab.H100)["median"], left_out


def test_parts_are_the_step():
    for row in ROWS:
        names = "dp", "pp", "tp", "mbs", "gradacc"
        split = lab.MODELS[row["model"]], lab.H100, *(int(row[name]) for name in names)
        parts = lab.step_parts(*split, zero=int(row["zero"]))
        assert min(parts.values()) >= 0
        tokens = int(row["dp"]) * int(row["mbs"]) * int(row["gradacc"]) * 4096
        speed = tokens / sum(parts.values()) / (8 * int(row["nodes"]))
        assert lab.predict_run(row) == approx(speed)


def test_what_the_data_says_of_itself():
    with open(ROOT / "labs" / "data" / "published_runs.csv") as file:
        assert len(list(csv.reader(file))) == 839
    text = (ROOT / "labs" / "data" / "README.md").read_text()
    assert all(f"| {name}" in text or f", {name}" in text for name in ROWS[0])
    for row in ROWS:
        assert int(row["dp"]) * int(row["pp"]) * int(row["tp"]) == 8 * int(row["nodes"])
    assert sum(not runs.consistent(row) for row in ROWS) == 4 and "Four rows" in text
    ratios = {}
    for row in ROWS:
        if float(row["mfu_percent"]) >= 10:
            mine = lab.mfu(lab.MODELS[row["model"]], 4096, runs.measured(row), 1, 989e12)
            stored = row["model"] in ("8B", "80B") or row["pp"] != "1"
            ratio = float(row["mfu_percent"]) / 100 / mine
            ratios.setdefault((row["model"], stored), []).append(ratio)
    middle = {key: sorted(values)[len(values) // 2] for key, values in ratios.items()}
    expected = {("1B", True): 1.17, ("3B", True): 1.09, ("8B", True): 1.06}
    for key, value in (expected | {("1B", False): 1, ("3B", False): 1}).items():
        assert middle[key] == approx(value, abs=0.01), key


SCRIPTS = {
    "tp": "tp.py",
    "sp": "sp_megatron.py",
    "ulysses": "sp_ulysses.py",
    "ulysses_sharded": "sp_ulysses.py",
    "pp": "pp.py",
}


@pytest.mark.parametrize("strategy", SCRIPTS)
@pytest.mark.parametrize("model,ranks", [("llama-3.2-1b", 4), ("llama-3.1-8b", 8)])
def test_messages_are_the_scripts(strategy, model, ranks):
    script = harness.load(ROOT / SCRIPTS[strategy])
    ours, length = lab.MODELS[model], 8192
    sizes = {"hidden_size": ours.hidden, "num_hidden_layers": ours.layers}
    sizes |= {"num_attention_heads": ours.heads, "num_key_value_heads": ours.kv_heads}
    sizes |= {"intermediate_size": ours.ffn, "vocab_size": ours.vocab}
    config = script.transformers.LlamaConfig(tie_word_embeddings=ours.tied, **sizes)
    args = {"batch": 1, "length": length, "dtype": "bfloat16", "loss": "chunked"}
    args |= {"recompute": "full", "dtensor": False, "virtual_stages": 1}
    args |= {"shard_weights": strategy == "ulysses_sharded", "microbatches": 1}
    group = SimpleNamespace(size=lambda: ranks, rank=lambda: 1)
    theirs = Counter()
    with torch.device("meta"):
        model = script.transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for parameter in model.parameters():
        script.mark(parameter)
    for _, op, _, size in script.expected_traffic(model, group, SimpleNamespace(**args)):
        theirs[op] += size
    for op, _, size in lab.strategy_messages(ours, strategy, ranks, length):
        assert size == approx(theirs.pop(op), rel=0.01), op
    assert sum(theirs.values()) < 0.01 * size  # what is left out hardly counts


BAD = [
    ("--split 8B:2:4x1x2", "argument --split: 4 x 1 x 2 is 8, and 2 nodes have 16 GPUs"),
    ("--split 1B:4:1x32x1", "argument --split: 32 stages are more than the 16 layers of 1B"),
    ("--split 8B:6:1x1x48", "argument --split: tp 48 does not divide the 32 heads of 8B"),
    ("--split 8B:4x1x2", "argument --split: 8B:4x1x2: MODEL:NODES:DPxPPxTP, such as 8B:2:4x1x4"),
    ("--split 9B:1:8x1x1", "argument --split: 9B:1:8x1x1: MODEL:NODES:DPxPPxTP"),
    ("--plan --gpu b300", "argument --gpu: invalid choice: 'b300'"),
    ("--plan --model gpt2", "argument --model: invalid choice: 'gpt2'"),
    ("--plan --nodes 0", "argument --nodes: 0 is not a whole number of at least 1"),
]


@pytest.mark.parametrize("options,message", BAD)
def test_bad_input_is_one_line(options, message, capsys):
    assert run_lab(LABS["lab11"], options.split()) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"error: {message}") and err.count("\n") == 1


@pytest.fixture
def fast(monkeypatch):
    """No checks, and a memory that is not oom_search.py's."""
    monkeypatch.setattr(harness.companion("checks", LABS["lab11"]), "CHECKS", {})
    memory = {name: {"peak_bytes": None, "fits": None, "why": "a test"} for name in plan.STRATEGIES}
    for name, peak, fits in ("tp", 44e9, True), ("sp", 13e9, True), ("ulysses", 125e9, False):
        memory[name] = {"peak_bytes": peak, "fits": fits, "why": None}
    monkeypatch.setattr(plan, "peak_memory", lambda *_: memory)


def test_plan(fast, capsys, tmp_path):
    files = tmp_path / "plan.json", tmp_path / "plan.png"
    options = ["--plan", "--length", "131072", "--json", files[0], "--plot", files[1]]
    assert run_lab(LABS["lab11"], list(map(str, options))) == 0
    ranked = json.loads(files[0].read_text())["plan"]
    assert sorted(row["strategy"] for row in ranked) == sorted(plan.STRATEGIES)
    fitting = [row["seconds"] for row in ranked if row["fits"]]
    assert fitting == sorted(fitting) and [row["fits"] for row in ranked[:2]] == [True, True]
    assert ranked[-1]["strategy"] == "ulysses"  # what does not fit is last
    for row in ranked:
        assert sum(row["parts"].values()) == approx(row["seconds"])
    shown = capsys.readouterr().out
    assert re.search(r"\n  Ulysses +[\d.]+ +[\d,]+ +[\d.]+% .* 116.4 +no\n", shown)
    assert "How far off?" in shown and "Nobody has checked here: all_to_all" in shown
    assert files[1].stat().st_size > 10_000


def test_what_cannot_run_says_why(fast, capsys):
    assert run_lab(LABS["lab11"], ["--plan", "--nodes", "8", "--length", "65536"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"PP, 1F1B .*more stages than its 32 layers", shown)
    assert re.search(r"TP .*64 does not divide 32 heads", shown)


@pytest.mark.slow  # oom_search.py, once
def test_memory_is_oom_searchs():
    found = plan.peak_memory(["tp"], "llama-3.2-1b", 2, 4096, 1, "h100")["tp"]
    assert 2e9 < found["peak_bytes"] < 40e9 and found["fits"]


def test_readme_says_how_long_a_step_takes():
    """Its table is what --plan predicts of the two settings in its head."""
    text = (ROOT / "README.md").read_text()
    names = {"`--shard-weights`": "ulysses_sharded", "Megatron SP": "sp", "TP": "tp", "PP": "pp"}
    rows = re.findall(r"^\| (.*) \| ([\d.]+), (\d+)% \| ([\d.]+), (\d+)% \| (.*) \|$", text, re.M)
    assert len(rows) == 4
    model = lab.MODELS["llama-3.1-8b"]
    for label, *figures, fills in rows:
        strategy = next(key for name, key in names.items() if name in label)
        settings = zip((8, 16), (8192, 131072), figures[::2], figures[1::2])
        for gpus, length, seconds, used in settings:
            parts = plan.strategy_parts(lab, model, strategy, gpus, length, 16, lab.H100)
            step = sum(parts.values())
            speed = 16 * length / step
            rounding = 0.051 if "." in seconds else 0.51
            assert step == approx(float(seconds), abs=rounding), label
            share = lab.mfu(model, length, speed, gpus, lab.H100.peak)
            assert share == approx(int(used) / 100, abs=0.0051), label
        for name, share in re.findall(r"(\w+) (\d+)%", fills):
            assert parts[name] / step == approx(int(share) / 100, abs=0.0051), (label, name)
