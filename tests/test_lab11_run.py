"""Lab 11: its model against the runs, its messages against the scripts, its command line."""

import dataclasses
import json
import re
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from conftest import ROOT
from learner import LABS, SHOWN, harness, run_lab
from pytest import approx
from torch.utils.flop_counter import FlopCounterMode

from labs.lab11_time import plan, runs

lab = harness.load(LABS["lab11"])
ROWS = runs.read_runs()
MINE, JUDGE = ([r for r in ROWS if runs.judged(r) and runs.half(r) == side] for side in (0, 1))


def test_the_half_that_nothing_is_fitted_to():
    assert abs(len(MINE) - len(JUDGE)) < 20 and len(lab.READ_OFF) <= 10
    other = runs.fit(lab, JUDGE, lab.H100)  # and the other way round
    for rows, cluster in (MINE, other), (JUDGE, lab.H100):
        seen = runs.scored(lab, rows, cluster)
        assert seen["median"] <= 0.05 and seen["within_10"] >= 0.75 and seen["within_20"] >= 0.85
    assert seen["ordered"] >= 0.9 and seen["picks"] >= 16 / 20


@pytest.mark.ci  # 3 s
def test_the_constants_are_what_the_fit_gives():
    fitted = runs.fit(lab, MINE, dataclasses.replace(lab.H100, **runs.FIRST_GUESS))
    for name in lab.READ_OFF:
        assert getattr(lab.H100, name) == approx(getattr(fitted, name), rel=0.05), name


def test_every_part_earns_its_place():
    for left_out, seen in SHOWN["lab11"].ablation(lab, JUDGE).items():
        if left_out != "nothing":
            assert seen["median"] > 1.2 * runs.scored(lab, JUDGE, lab.H100)["median"], left_out


def test_what_the_data_says_of_itself():
    text = (ROOT / "labs" / "lab11_time" / "published_runs.md").read_text()
    assert len(ROWS) == 838 and all(f"| {name}" in text or f", {name}" in text for name in ROWS[0])
    assert sum(not runs.consistent(row) for row in ROWS) == 4 and "Four rows" in text
    for row in ROWS:
        assert int(row["dp"]) * int(row["pp"]) * int(row["tp"]) == 8 * int(row["nodes"])


@pytest.mark.parametrize("strategy", plan.STRATEGIES)
@pytest.mark.parametrize("model,ranks", [("llama-3.2-1b", 4), ("llama-3.1-8b", 8)])
def test_messages_are_the_scripts(strategy, model, ranks):
    script = harness.load(ROOT / f"{plan.STRATEGIES[strategy][1][0]}.py")
    ours, length = lab.MODELS[model], 8192
    config = script.transformers.LlamaConfig(**plan.config_of(ours))
    args = {"batch": 1, "length": length, "dtype": "bfloat16", "loss": "chunked"}
    args |= {"recompute": "full", "dtensor": False, "virtual_stages": 1}
    args |= {"shard_weights": strategy == "ulysses_sharded", "microbatches": 1}
    group = SimpleNamespace(size=lambda: ranks, rank=lambda: 1)
    theirs = Counter()
    with torch.device("meta"):
        model = script.transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for parameter in model.parameters():
        parameter.sum_over = None  # pp.py's tied embedding: hardly counts
    for _, op, _, size in script.expected_traffic(model, group, SimpleNamespace(**args)):
        theirs[op] += size
    for op, _, size in lab.strategy_messages(ours, strategy, ranks, length):
        assert size == approx(theirs.pop(op), rel=0.01), op
    assert sum(theirs.values()) < 0.01 * size  # what is left out hardly counts


def test_matmuls_are_the_scripts():
    """What PyTorch counts in tp.py's step, layers recomputed, is what the plan takes time for."""
    script, ours = harness.load(ROOT / "tp.py"), lab.Model(2, 64, 4, 2, 256, 512, False)
    config = script.transformers.LlamaConfig(**plan.config_of(ours))
    args = SimpleNamespace(config=config, recompute="full", loss="chunked", batch=1, length=32)
    vars(args).update(dtensor=False, device=torch.device("cpu"), attn_implementation="sdpa")
    ids, model = torch.zeros(1, 32, dtype=int), script.transformers.LlamaForCausalLM(config)
    dist.init_process_group("fake", rank=0, world_size=2)  # its peer is silent
    try:
        with FlopCounterMode(display=False) as counter:
            model = script.parallelize(model, dist.group.WORLD, args).train()
            script.forward_backward(model, ids, ids, dist.group.WORLD, args)
    finally:
        dist.destroy_process_group()
    cluster = dataclasses.replace(lab.H100, memory=float("inf"))
    parts = plan.rank_parts(lab, ours, "tp", 2, True, 2, 32, cluster)
    counted = counter.get_flop_counts()["Global"][torch.ops.aten.mm]
    assert parts["matmul"] * cluster.matmul == approx(counted)


def test_the_published_long_run():
    """Predicted within 5%, nothing fitted to it; README and the notes say what the plan says."""
    readme, notes = (
        (ROOT / name).read_text() for name in ("README.md", "labs/lab11_time/README.md")
    )
    for name, parts in plan.published_run(lab).items():
        measured, predicted = plan.PUBLISHED[name], sum(parts.values())
        assert predicted == approx(measured, rel=0.05)
        assert re.search(rf"{measured} s with [^(]*\({predicted:.0f} predicted\)", readme)
        rate, share = dict(plan.ATTENTION[name])[128] / 1e12, parts["attention"] / predicted
        row = f"| {name} | {rate:.0f} TFLOP/s | {predicted:.0f} | {measured} "
        assert f"{row}| {predicted / measured - 1:+.1%} | {share:.0%} |\n" in notes
    for seconds, printed in (373, 0.347), (606, 0.214):  # by its authors: causal, with embedding
        setting = plan.MODELS["qwen3-8b"], 1 << 20, (1 << 20) / seconds, 8
        full, causal = plan.both_mfus(lab, *setting)
        assert causal == approx(printed, abs=0.002)
        assert f"{full:.1%}" in notes and f"{causal:.1%}" in notes
    assert all(f"{rate / 1e12:.0f}" in notes for rate in plan.CUDNN[128])


@pytest.fixture
def fast(monkeypatch):
    """No checks, and a memory that is not oom_search.py's."""
    monkeypatch.setattr(harness.companion("check", LABS["lab11"]), "CHECKS", {})
    memory = {name: {"peak_bytes": None, "fits": None, "why": "a test"} for name in plan.STRATEGIES}
    for name, peak, fits in ("tp", 44e9, True), ("sp", 13e9, True), ("ulysses", 125e9, False):
        memory[name] = {"peak_bytes": peak, "fits": fits, "why": None}
    monkeypatch.setattr(plan, "peak_memory", lambda *_: memory)


@pytest.mark.parametrize("attention,kernel", plan.KERNELS.items())
def test_plan(fast, capsys, tmp_path, attention, kernel):
    files = tmp_path / "plan.json", tmp_path / "plan.png"
    options = f"--plan --length 131072 --attention {attention} --json {files[0]} --plot {files[1]}"
    assert run_lab(LABS["lab11"], options.split()) == 0
    ranked = json.loads(files[0].read_text())["plan"]
    assert sorted(row["strategy"] for row in ranked) == sorted(plan.STRATEGIES)
    fitting = [row["seconds"] for row in ranked if row["fits"]]
    assert fitting == sorted(fitting) and [row["fits"] for row in ranked[:2]] == [True, True]
    assert ranked[-1]["strategy"] == "ulysses"  # what does not fit is last
    layers, half, head = lab.flops_per_token(plan.MODELS["llama-3.1-8b"], 131072 / 2)
    for row in ranked:
        assert sum(row["parts"].values()) == approx(row["seconds"])
        assert row["mfu_causal"] / row["mfu"] == approx(1 - half / (layers + 2 * half + head))
    shown, told = capsys.readouterr()
    assert re.search(r"\n  Ulysses +[\d.]+ +[\d,]+ +[\d.]+% +[\d.]+% .* 116.4 +no\n", shown)
    assert f"\nattention: {kernel}\n" in shown and "takes 10 to 30 s" in told
    assert "How far off?" in shown and "Nobody has checked here: all_to_all" in shown
    assert files[1].stat().st_size > 10_000


def test_what_cannot_run_says_why(fast, capsys):
    assert run_lab(LABS["lab11"], ["--plan", "--nodes", "8", "--length", "65536"]) == 0
    assert run_lab(LABS["lab11"], ["--split", "qwen3-8b:2:4x1x4"]) == 0  # one of --plan's models
    shown = capsys.readouterr().out
    assert re.search(r"PP, 1F1B .*more stages than its 32 layers", shown)
    assert re.search(r"TP .*64 does not divide 32 heads", shown)
    assert re.search(r"MFU [\d.]+%\n\([\d.]+% if the half", shown)


@pytest.mark.slow  # oom_search.py, for all strategies
def test_memory_is_oom_searchs():
    found = plan.peak_memory(plan.STRATEGIES, "llama-3.2-1b", 2, 4096, 2, "h100")
    assert all(2e9 < found[name]["peak_bytes"] < 40e9 for name in plan.STRATEGIES)
    assert found["ulysses_sharded"]["peak_bytes"] < 0.7 * found["ulysses"]["peak_bytes"]
    found = plan.peak_memory(["tp", "pp"], "llama-3.2-1b", 12, 4096, 1, "h100")
    assert found["pp"]["fits"] and not found["tp"]["fits"] and "12 ranks" in found["tp"]["why"]


def test_readme_says_how_long_a_step_takes():
    """Its table is what --plan predicts of the two settings in its head."""
    text, model = (ROOT / "README.md").read_text(), lab.MODELS["llama-3.1-8b"]
    labels = {"ulysses_sharded": "Ulysses, `--shard-weights`", "sp": "Megatron SP", "tp": "TP"}
    for strategy, label in (labels | {"pp": "PP, 1F1B"}).items():
        row = f"| {label} |"
        for gpus, length, digits in (8, 8192, 1), (16, 131072, 0):
            parts = plan.strategy_parts(lab, model, strategy, gpus, length, 16, lab.H100)
            step = sum(parts.values())
            full, causal = plan.both_mfus(lab, model, length, 16 * length / step, gpus)
            row += f" {step:.{digits}f}, {full:.0%} ({causal:.0%}) |"
        fills = re.search(rf"^{re.escape(row)} (.*) \|$", text, re.M)[1]
        for name, share in re.findall(r"(\w+) (\d+%)", fills):
            assert f"{parts[name] / step:.0%}" == share, (label, name)
