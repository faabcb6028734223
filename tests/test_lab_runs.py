"""Each finished lab, run: PASS, prediction, picture, and a figure of its lesson, by hand.

What a run judges itself (gradients beside one device, bytes beside its formulas, who hangs) is
not judged here once more: its verdict is PASS.
"""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ENVIRONMENT, ROOT
from learner import CHECKS, FILES, LABS, SHOWN, UsageError, harness, run_lab
from pytest import approx

pytestmark = [
    pytest.mark.slow,  # minutes
    pytest.mark.filterwarnings("error::UserWarning", "error::FutureWarning"),  # a reader sees these
]

lab2, lab8 = harness.load(LABS["lab2"]), harness.load(LABS["lab8"])


@pytest.fixture
def run(tmp_path, capfd):
    """run(name, "predicted N, measured M: ...", *options) -> what is printed, and the results.

    In this process, which has imported what takes seconds; test_labs.py runs a lab as a script.
    """
    files = tmp_path / "results.json", tmp_path / "picture.png"

    def run(name, prediction, *options):
        predicted = re.search(r"predicted (\S+),", prediction)[1]
        options = [*options, "--predict", predicted, "--json", files[0], "--plot", files[1]]
        status = run_lab(LABS[name], list(map(str, options)))
        printed, errors = capfd.readouterr()
        assert status == 0 and errors == "", printed + errors
        results, checks = json.loads(files[0].read_text()), CHECKS[name].CHECKS
        exercises, verdict = results["exercises"], f"all {len(checks)} exercises' checks hold"
        assert printed.endswith(f"\nPASS {LABS[name].parent.name}: {verdict}\n")
        assert results["passed"] and results["failed"] == [] and exercises.keys() == checks.keys()
        assert all(seen["passed"] and seen["report"] for seen in exercises.values())
        assert files[1].read_bytes()[:4] == b"\x89PNG" and files[1].stat().st_size > 20_000
        assert sorted(tmp_path.iterdir()) == sorted(files)
        assert f"\n  {prediction}\n" in printed
        return printed, results

    return run


@pytest.mark.slow
def test_lab1(run):
    _, results = run("lab1", "predicted 4480, measured 4480: right", "--ranks", 3)
    counts = {row["operation"]: row for row in results["counts"] if row["ranks"] == 3}
    sent = {name: row["bytes"] / row["message"] for name, row in counts.items()}
    assert sent["all-reduce"] == approx(4 / 3) and sent["gather and add"] == 2
    assert [row["steps"] for row in counts.values()] == [2, 2, 4, 2, 2]
    assert results["overwritten"] == 0
    sizes = [4**k for k in range(4, 12)]
    a, b = SHOWN["lab1"].fit(sizes, [20e-6 + n / 5e9 for n in sizes])
    assert (a, 1 / b) == (approx(20e-6), approx(5e9))


@pytest.mark.ci
def test_lab2(run):
    """Each rank hands out alpha K / (K - 1) of its own, and so the ranks disagree."""
    _, results = run("lab2", "predicted 65000, measured 65664: off by -664")
    rows = results["label_smoothing"]
    assert [row["ranks"] for row in rows] == [1, 2, 2, 3, 3, 3]
    for row in rows:
        assert row["megatron_target_mass"] == approx(1 + 0.1 * (row["ranks"] - 1), abs=1e-3)
    assert abs(rows[1]["megatron"] - rows[2]["megatron"]) > 0.1


@pytest.mark.ci
def test_what_lab2_refuses():
    alone, logits = SimpleNamespace(rank=lambda: 0, size=lambda: 1), torch.zeros(2, 6)
    loss, target = lab2.vocab_parallel_cross_entropy, torch.tensor([0, 1])
    embedding = lab2.VocabParallelEmbedding.from_embedding(torch.nn.Embedding(6, 4), alone)
    with pytest.raises(ValueError, match="2 tokens cannot be cut over 3 ranks: use 2 ranks"):
        lab2.vocab_range(2, 0, 3)
    with pytest.raises(IndexError, match=r"a target is neither in \[0, 6\) nor -100"):
        loss(logits, target - 1, alone)
    with pytest.raises(ValueError, match=r"label_smoothing 1.5 is not in \[0, 1\]"):
        loss(logits, target, alone, label_smoothing=1.5)
    with pytest.raises(IndexError, match=r"a token is not in \[0, 6\)"):
        embedding(torch.tensor([[6]]))


SILENT = "transposed_weights", "returned_tuples", "local_positions", "local_mask", "chunk_boundary"
EXACT = "untied_weights", "loss_without_graph"
FIGURES = {  # of the wrong way, of the right way
    "untied_weights": ("2 of (v, h)", "1 of (v, h)"),
    "f_per_projection": ("5 all-reduces a layer", "2 all-reduces a layer"),
    "chunk_boundary": ("124 of 126 targets", "126 of 126 targets"),
}


@pytest.mark.slow
def test_lab3(run):
    printed, results = run("lab3", "predicted 163840, measured 163840: right")
    pitfalls, versions = results["pitfalls"], results["versions"]
    assert {row["verdict"] for row in pitfalls.values()} == {"ok"}
    assert f"with torch {versions['torch']}, transformers" in printed
    for name in (*SILENT, *EXACT, "adam_hides_scale"):  # no loss shows it
        wrong = pitfalls[name]["wrong"]
        assert wrong["error"] > 0.1 > 4 * wrong["loss"], name
        assert wrong["loss"] < (1e-6 if name in EXACT else 0.05), name
    for name, figures in FIGURES.items():
        for way, figure in zip(("wrong", "right"), figures):
            assert figure in pitfalls[name][way]["seen"]


@pytest.mark.ci
def test_lab3_says_which_wrong_way_works_and_which_right_one_does_not(tmp_path, capsys):
    text = LABS["lab3"].read_text().replace("    parameter.copy_(", "    parameter.data.copy_(")
    text = text.replace("inner(copy_to_tp_region(hidden_states, group)", "inner(hidden_states")
    mine = tmp_path / FILES["lab3"]
    mine.write_text(text)
    args = SimpleNamespace(only="copy_without_no_grad", seed=0)
    (failed,) = SHOWN["lab3"].experiment(harness.load(mine), args)["failed"]
    printed = capsys.readouterr().out
    assert failed.startswith("f_per_projection: gradient 0.")
    assert re.search(r"copy_without_no_grad +1 +no longer in torch \d\.\d+", printed), printed
    assert re.search(r"f_per_projection .* FAIL: gradient 0\.", printed), printed


@pytest.mark.slow
def test_lab3b(run):
    printed, results = run("lab3b", "predicted 6, measured 6: right", "--dump", "two_orders")
    reduced = "all_reduce [[4]]"
    assert {name: seen["difference"] for name, seen in results["programs"].items()} == {
        "skipped_collective": [4, [reduced, "barrier []"]],
        "two_orders": [1, [reduced, "broadcast [[4]]"]],
        "uneven_batches": [4, ["all_reduce [[5]]", None]],
        "crossed_messages": None,
    }
    source = LABS["lab3b"].read_text().splitlines()
    for seen in results["programs"].values():
        for waits_in, line in filter(None, seen["frames"]):
            assert f"dist.{waits_in}(" in source[line - 1]
    assert printed.count("most recent call first") == 2
    assert re.search(r"\n +1 +gloo:broadcast +\[\[4\]\] +\d+\n", printed)


@pytest.mark.ci
def test_lab4(run):
    """How large the gain is says nothing on a busy machine."""
    _, results = run("lab4", "predicted 1920, measured 2048: off by -128", "--pairs", 3)
    assert [row["messages"] for row in results["buckets"]] == [2, 4, 7]
    for row in results["gains"]:
        assert 0 <= row["hidden"] <= 1 and row["gain"] > 0
        assert row["gain"] <= row["at_best"], "no run is shorter than what it is made of"
    x = 4 * 128 * 2 * 256  # bytes of all tokens, float32; two layers: two halves, two, one
    assert [row["bytes"] for row in results["aliasing"]] == [x, 2 * x, x]
    gemms = [["dgrad", 0, 4], ["wait all_gather", 4, 9], ["wgrad", 9, 12]]
    log = {"log": gemms, "messages": [["all_gather", 1, 9], ["reduce_scatter", 9, 11]]}
    assert SHOWN["lab4"].hidden(log) == (3 + 2) / (8 + 2)
    assert SHOWN["lab4"].at_shortest(log) == (8 + 3, 10 / 7)


@pytest.mark.slow
def test_lab5(run):
    _, results = run("lab5", "predicted 20, measured 20: right")
    shown = SHOWN["lab5"]
    theirs = [row for row in results["families"] if row["plan"] == shown.NEMO]
    assert [row["model"] for row in theirs] == ["qwen3", "qwen3", "gemma3", "gemma3"]
    for row in theirs:
        assert row["logits"] < 1e-10 and row["loss"] < 1e-10, "no logit shows it"
        assert row["gradient"] > 1e-3
    for row in (row for row in results["families"] if row["plan"] == shown.OURS):
        level = "base: " if row["model"] == "mistral" else "model-specific: "
        assert row["chosen"].startswith(level)
        one, mine = row["gradient_norm"]  # there is one: all parameters are DTensors
        assert mine == approx(one, rel=1e-9)
    for row in (row for row in results["memory"] if row["way"] == shown.GATHERED):
        for phase in "forward", "backward":
            assert row[phase]["all_gather"][0] == row[phase]["reduce_scatter"][0] == 2 * 2 + 1


@pytest.mark.ci
def test_lab5_takes_a_plan_and_prints_one(tmp_path, capsys, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel\n"
        "mlp = 'model.layers.*.mlp'\n"
        "part = {f'{mlp}.{name}_proj': ColwiseParallel() for name in ('gate', 'up')}\n"
        "part |= {f'{mlp}.down_proj': RowwiseParallel()}\n"
        "def typo(model, sequence_parallel):\n    return {f'{mlp}.gate': ColwiseParallel()}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(CHECKS["lab5"], "CHECKS", {})  # the experiments alone
    measured = {"way": SHOWN["lab5"].GATHERED, "forward": {}, "backward": {}}  # by test_lab5
    monkeypatch.setattr(SHOWN["lab5"], "memory", lambda lab: ([measured], []))
    assert run_lab(LABS["lab5"], ["--plan", "mine.part"]) == 0
    assert "custom: mine.part" in capsys.readouterr().out
    assert run_lab(LABS["lab5"], ["--plan", "mine.typo"]) == 2
    found = "error: the plan's model.layers.*.mlp.gate fits no module of LlamaForCausalLM\n"
    assert capsys.readouterr().err == found
    assert run_lab(LABS["lab5"], ["--model", "qwen3", "--sp"]) == 0
    printed = capsys.readouterr().out
    assert "chosen: model-specific: Qwen3ForCausalLM" in printed
    assert re.search(r"model\.layers\.\*\.self_attn\.q_norm +QKNormParallel", printed)
    plans = re.findall(r"^  qwen3 +SP +([^\s:]+)", printed, re.M)
    assert plans == ["model-specific", "NeMo"]


@pytest.mark.ci
def test_lab6(run):
    """r = 1: cut over the ranks it is one feature each, mostly zeros."""
    _, results = run("lab6", "predicted 720, measured 720: right", "--lora-rank", 1)
    rows = results["ways"]
    first, second = [row["trained"] for row in rows if row["ranks"] == 2][8:10]
    assert first + second == 2 * (96 + 130), "sharded: no number is held twice"
    assert first - second == 2 * 96, "the second rank holds no row of A, and no column of B"
    for row in rows:
        if row["way"] == "joined":
            assert row["kept"] == 4 * 60 * (96 + 1), "and not a byte for the frozen W"
    h, features, r = SHOWN["lab6"].SMALL
    one, good, bad = results["training"].values()
    assert good["drift"] < 1e-6 and good["frozen"]
    assert good["state"] <= 2 * r * (2 * h + features), "none for W"
    # rank 0 has the prompt, which does not count: its replicas never saw a gradient
    assert bad["drift"] > 0.01 and bad["losses"] == approx(one["losses"], rel=1e-3)
    assert bad["exported"] > 2 * bad["held_out"], "what is saved is not what was trained"


@pytest.mark.ci
def test_lab7(run):
    """By hand. 1024 tokens on 4 ranks: 256 queries have 256 * 257 / 2 pairs with their own keys,
    256^2 with earlier ones; zigzag has half of those in every step. Bytes that a rank of 4 sends
    for 256 tokens, 8 heads of 16 numbers, float64."""
    _, results = run("lab7", "predicted 458752, measured 458752: right")
    balance, own, earlier = results["balance"], 256 * 257 // 2, 256 * 256
    contiguous = [[own] + [earlier] * r + [0] * (3 - r) for r in range(4)]
    assert balance["contiguous"]["pairs"] == contiguous
    in_itself = 2 * (128 * 129 // 2) + 128 * 128
    assert balance["zigzag"]["pairs"] == [[in_itself] + [earlier // 2] * 3] * 4
    ways = {(r["heads"], r["kv_heads"], r["ranks"], r["way"]): r for r in results["ways"]}
    tokens = 256 * 128 * 8  # all of them, as bytes
    names = "SP", "Ulysses", "CP, ring", "CP, all-gather"
    sent = [ways[8, 8, 4, way]["forward"] / tokens for way in names]
    assert sent == [2 * 3 / 4, 4 / 4 * 3 / 4, 2 * 3 / 4, 2 * 3 / 4]
    assert ways[8, 4, 4, "CP, ring"]["forward"] == tokens * 3 / 4, "half of the KV heads"
    assert ways[8, 8, 4, "CP, ring"]["backward"] == 2 * tokens * 7 / 4


def one_devices(reports):
    """Each rank's loss, norm and gradients are one device's, its messages the formula's."""
    for report in reports:
        assert len(report["errors"]) > 5, "loss, norm, and a layer at least"
        assert max(report["errors"].values()) <= 1e-5 and report["traffic"] == report["expected"]


LAYERS = MICROBATCHES = 3
OWN, EMBEDDED = 2 * LAYERS * MICROBATCHES, (2 * LAYERS + 1) * MICROBATCHES
MESSAGES = {  # of the first of 2 stages
    ("count", "all_reduce", "dp"): 1,
    ("forward", "all_gather", "tp"): OWN,
    ("forward", "reduce_scatter", "tp"): EMBEDDED,
    ("forward", "send", "pp"): MICROBATCHES,
    ("backward", "reduce_scatter", "tp"): OWN,
    ("backward", "all_gather", "tp"): EMBEDDED,
    ("gradients", "all_reduce", "tp"): 1,
    ("gradients", "all_reduce", "embedding"): 1,
    ("gradients", "all_reduce", "dp"): 1,
    ("norm", "all_reduce", "model"): 1,
    ("log", "all_reduce", "pp"): 1,
    ("log", "all_reduce", "dp"): 1,
}


@pytest.mark.ci
def test_lab8(run):
    _, results = run("lab8", "predicted 1.414, measured 1.41421: right")
    reports = results["ranks"]
    assert results["mesh"] == {"dp": 2, "pp": 2, "tp": 2} and len(reports) == 8
    assert {tuple(row[:3]): row[3] for row in reports[5]["traffic"]} == MESSAGES
    (right, *wrong), one = reports[0]["norms"], reports[0]["one_device"]["norm"]
    for report in reports:
        assert report["norms"][right] == approx(one, rel=1e-5)
        assert all(abs(report["norms"][name] / one - 1) > 1e-3 for name in wrong)
    own = [report["norms"]["this rank's part (torch's own clip)"] for report in reports]
    assert len(set(own)) == 4 and own[:4] == own[4:], "each of a replica clips by another factor"


MESHES = [(1, 4, 2), (1, 2, 4), (1, 1, 8), (1, 8, 1), (8, 1, 1), (3, 1, 2)]


@pytest.mark.ci(every=6)
@pytest.mark.parametrize("shape", MESHES, ids=lambda shape: "x".join(map(str, shape)))
def test_lab8_on_any_mesh_is_one_device(shape):
    sizes = dict(zip(("dp", "pp", "tp"), shape))
    one_devices(harness.on_ranks(math.prod(shape), SHOWN["lab8"].prove_on_rank, lab8, sizes, 2, 5))


@pytest.mark.ci
def test_lab8s_mesh_where_the_command_line_does_not_say(monkeypatch):
    def sizes(dp=None, pp=None, tp=None):
        return tuple(SHOWN["lab8"].mesh_sizes(SimpleNamespace(dp=dp, pp=pp, tp=tp)).values())

    assert sizes() == (2, 2, 2) and sizes(1, 1, 1) == (1, 1, 1)
    assert sizes(pp=4) == (1, 4, 2) and sizes(tp=4) == (1, 2, 4) and sizes(dp=8) == (8, 1, 1)
    monkeypatch.setenv("RANK", "0")
    for world, shape in ((1, (1, 1, 1)), (2, (1, 1, 2)), (6, (3, 1, 2)), (16, (4, 2, 2))):
        monkeypatch.setenv("WORLD_SIZE", str(world))
        assert sizes() == shape
    found = "2 x 2 x 2 is 8 ranks, and torchrun started 16: use --dp 16 --pp 1"
    with pytest.raises(UsageError, match=found):
        sizes(2, 2, 2)


SRUN = """#!/bin/bash
# srun: the command once for each node, here all of them on this machine
while [[ $1 == --* ]]; do shift; done
for ((node = 0; node < SLURM_NNODES; node++)); do
    "$@" > "$SLURM_TEST/node$node.out" 2>&1 &
    agents+=($!)
done
for agent in "${agents[@]}"; do wait "$agent" || status=1; done
exit "${status:-0}"
"""


def slurm(folder, *options, cpus="2"):
    """labs/lab8_3d/job.slurm under a Slurm of ours; returns (exit status, what all agents printed).

    cpus: ranks on each of the two nodes.
    """
    for name, text in {"srun": SRUN, "scontrol": "#!/bin/bash\necho localhost\n"}.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    path = os.pathsep.join([str(folder), str(Path(sys.executable).parent), os.environ["PATH"]])
    job = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NNODES": "2"}
    job |= {"SLURM_CPUS_PER_TASK": cpus, "SLURM_TEST": str(folder), "PATH": path}
    command = ["bash", ROOT / "labs" / "lab8_3d" / "job.slurm", *map(str, options)]
    run = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT | job, timeout=300)
    return run.returncode, "".join((folder / f"node{node}.out").read_text() for node in (0, 1))


@pytest.mark.slow
def test_lab8_on_two_nodes(tmp_path):
    status, printed = slurm(tmp_path, "--json", tmp_path / "lab8.json")
    assert status == 0, printed
    assert "LLaMA on 4 ranks of 2 nodes, dp x pp x tp = 1 x 2 x 2, beside one device" in printed
    assert printed.count("PASS lab8_3d: all 7 exercises' checks hold") == 1, "rank 0 alone speaks"
    reports = json.loads((tmp_path / "lab8.json").read_text())["ranks"]
    assert [report["node"] for report in reports] == [0, 0, 1, 1]
    rows = [line.split()[2] for line in printed.splitlines() if "across nodes" in line]
    assert set(rows) == {"pp", "embedding", "model"}, "tp stays on its node"


@pytest.mark.ci
def test_bad_input_ends_lab8_on_both_nodes(tmp_path):
    """Rank 0 alone reads the command line: the others, on either node, must not wait for it."""
    status, printed = slurm(tmp_path, "--tp", 3, cpus="1")
    found = "error: argument --tp: use a divisor of the 2 ranks that torchrun started, not 3"
    assert status == 1 and printed.count(found) == 1
    for question in (["--help"], ["--inject-bug", "list"]):
        assert slurm(tmp_path, *question, cpus="1")[0] == 0


@pytest.mark.slow
def test_lab9(run):
    """3 ranks divide both units."""
    layer, root = 60 * 12 * (5 + 5 + 1 + 1) + 3 * 60 * 101 + 2 * 60, 512 * 60 + 60
    state = 4 * (4 * (root + 4 * layer) // 3 + root)
    _, results = run("lab9", f"predicted {state:g}, measured {state:g}: right")
    plain, one, two, three, fsdp = results["memory"]
    n = plain["sent"]["all_reduce"]
    assert plain["peak"]["optimizer"] == 2 * n == 3 * one["peak"]["optimizer"]
    assert one["sent"] == two["sent"] == {"reduce_scatter": n, "all_gather": n}
    assert n < three["sent"]["all_gather"] < 2 * n
    assert fsdp["peak"]["parameters"] > three["peak"]["parameters"], "its rows are padded"
