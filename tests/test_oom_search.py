"""oom_search.py: predictions of the real scripts; the search against walls, kills and crashes."""

import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from conftest import ENVIRONMENT, ROOT, changed
from forks import STRATEGIES
from torch._subclasses import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import oom_search
import tp
from labs.memory import live_tensors, meta_device, techniques

GIB, NO_PARTS = 2**30, dict.fromkeys(live_tensors.PARTS, 0)
HALF, SINGLE, DOUBLE = torch.bfloat16, torch.float32, torch.float64

# As if there were so many GPUs: a search's arguments are the other words
MACHINE = """
import sys, torch, oom_search as o
o.PRELOAD.append("oom_search")
torch.cuda.device_count, torch.cuda.get_device_name = lambda: int(sys.argv[1]), lambda: "a GPU"
sys.exit(o.main(["--json", "out.json", "--step", "16", "--optimizer", "none", *sys.argv[2:]]))
"""


@pytest.fixture
def folder(tmp_path):
    """What oom_search.py needs, to be changed."""
    shutil.copytree(ROOT / "labs" / "memory", tmp_path / "labs" / "memory")
    (tmp_path / "labs" / "lab10_long_sequences").mkdir()
    for file in ("oom_search.py", "labs/lab10_long_sequences/lesson.py", *STRATEGIES):
        shutil.copy(ROOT / file, tmp_path / file)
    return tmp_path


def started(folder, gpus, line, **how):
    """The process of a search in a folder."""
    command = [sys.executable, "-c", MACHINE, str(gpus), *line.split()]
    how |= {"cwd": folder, "env": ENVIRONMENT | {"PYTHONPATH": str(folder)}, "text": True}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **how)


def run(folder, gpus, line):
    """A search's exit status, what it printed on stdout and on stderr, and the rows of --json."""
    search = started(folder, gpus, line)
    out, errors = search.communicate(timeout=300)
    return search.returncode, out, errors, json.loads((folder / "out.json").read_text())["results"]


@pytest.fixture
def searched(tmp_path, capfd, monkeypatch):
    """searched(command line) -> exit status, what was printed, the JSON: all in this process."""
    monkeypatch.setattr(oom_search.torch.cuda, "device_count", lambda: 0)
    file = tmp_path / "results.json"

    def search(line, results=True):
        status = oom_search.main(["--json", str(file), *line.split()])
        out, errors = capfd.readouterr()
        assert max(map(len, out.splitlines()), default=0) <= 100, out
        return status, out, json.loads(file.read_text()) if results else errors

    return search


# The search itself, against walls


def climb(wall, memory, first=192, lowest=1, highest=10**8, seen=True):
    """Where lengths up to wall fit, and one takes memory(length): {length: fits}, as tried."""
    options, entries = SimpleNamespace(step=1, lowest=lowest, highest=highest), []
    while length := oom_search.next_length(entries, memory(wall), first, options):
        assert length not in [e["length"] for e in entries] and lowest <= length <= highest
        entry = {"length": length, "fits": length <= wall, "peak_moment": "backward"}
        entry |= {"peak_memory_bytes": [memory(length)] if seen else [], "loading_peak_bytes": 0}
        entries.append(entry | {"breakdown": {"weights": memory(0), "optimizer state": 0}})
    return {entry["length"]: entry["fits"] for entry in entries}


LINE, CURVE = lambda k: 1000 + 7 * k, lambda k: k * k
STAIRS = lambda k: 1000 + k // 64 * 7000 + k % 64  # noqa: E731


@pytest.mark.parametrize("wall", [0, 1, 5, 191, 192, 193, 700, 12345, 10**7])
@pytest.mark.parametrize("memory", [LINE, CURVE, STAIRS])
@pytest.mark.parametrize("seen", [True, False])
def test_search_finds_any_wall(wall, memory, seen):
    tried = climb(wall, memory, seen=seen)
    assert {wall, wall + 1} - {0} <= set(tried), "both sides of the answer were tried"
    assert len(tried) <= 40
    if memory is LINE and seen and wall > 9:
        assert len(tried) <= 6


@pytest.mark.parametrize("seen", [True, False])
def test_bounds_hold(seen):
    assert climb(700, LINE, 100, 100, 900, seen).keys() >= {100, 700, 701}
    assert climb(99, LINE, 100, 100, 900, seen) == {100: False}, "below the lower one"
    tried = climb(7000, LINE, 100, 100, 900, seen)
    assert max(tried) == 900 and all(tried.values()), "the upper one fits, and nothing else counts"
    assert climb(7000, LINE, 192, 1, 8, seen) == {8: True}


# Processes that do not end as they should

STEP = "    # The hidden states get no name"  # in forward_backward()
CRASH = 'if args.length > 3000:\n        raise ValueError("not a matter of memory")'


def change(folder, script, line):
    (folder / script).write_text(changed(script, {STEP: f"    {line}\n{STEP}"}))


@pytest.mark.ci
def test_an_error_is_not_out_of_memory(folder):
    change(folder, "tp.py", CRASH)
    change(folder, "sp_megatron.py", "os._exit(1)")
    line = "--model tiny --memory-gib 0.1 --nproc 1 --strategy tp sp pp --lo 1024"
    status, out, errors, [tp_row, sp, pp] = run(folder, 0, line)
    assert status == 1 and "in forward_backward" in errors
    assert (tp_row["longest"], tp_row["error"]) == (1024, "ValueError: not a matter of memory")
    assert "rank 0's process was killed" in sp["error"] and sp["longest"] is None
    assert pp["too_long"] - pp["longest"] == 16, "an error stops its own search only"
    assert "  tp on 1 rank: ValueError: not a matter of memory\n" in out
    assert "FAIL oom_search: 1 of 3 limits found" in out


@pytest.mark.ci
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_search_that_is_ended_has_lost_one_row(folder, number):
    """sp_megatron waits; of tp everything is known."""
    waiting = folder / "waiting"
    change(folder, "sp_megatron.py", f"Path({str(waiting)!r}).touch(), time.sleep(5)")
    background = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a shell's job ignores it
    line = "--model tiny --memory-gib 0.1 --nproc 1 --strategy tp sp"
    job = started(folder, 0, line, preexec_fn=background)
    end = time.time() + 300
    while not waiting.exists():
        assert time.time() < end
        time.sleep(0.05)
    job.send_signal(number)
    out, errors = job.communicate(timeout=60)  # it comes when no process is left that could write
    if number == signal.SIGINT:
        assert re.search("  tp on 1 rank: [0-9,]+ tokens; with 1 GiB less", out), out
        assert job.returncode == 130 and errors.endswith("stopped\n") and "Traceback" not in errors
    [row] = json.loads((folder / "out.json").read_text())["results"]
    assert row["strategy"] == "tp" and row["too_long"] - row["longest"] == 16


# A search whose steps do not run


@pytest.fixture
def pretended(searched, monkeypatch):
    """pretended(takes, command line) -> what is printed, the rows of --json. There are 4 GPUs of 8
    GiB. takes(case, rank, length): what a rank's result has in another way than nothing."""
    card = SimpleNamespace(total_memory=8 * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU of this test")
    nothing = {"verdict": "ran", "loading_peak_bytes": 0, "peak_moment": "forward"}
    nothing |= {"attention": "", "max_position_embeddings": 4000, "breakdown": NO_PARTS}

    def pretend(takes, line):
        def run_ranks(case, ranks):
            length = int(case["argv"][case["argv"].index("--length") + 1])
            results = {rank: nothing | takes(case, rank, length) for rank in ranks}
            failed = {r: result for r, result in results.items() if result["verdict"] != "ran"}
            return failed or results

        monkeypatch.setattr(torch.cuda, "device_count", lambda: 0 if "predicted" in line else 4)
        monkeypatch.setattr(oom_search, "run_ranks", run_ranks)
        status, out, results = searched(f"{line} --step 16")
        assert status == 0
        return " ".join(out.split()), results["results"]

    return pretend


def test_the_worst_rank_decides(pretended):
    """A token takes 1 MiB, and 2 on the last stage of pp on 4."""

    def takes(case, rank, length):
        if case["script"] == "sp_megatron" and case["world"] == 2:
            return {"verdict": "unusable", "error": "use 1 rank"}
        return {"peak": (1 + (rank == 3)) * length * 2**20}

    line = "--how predicted --memory-gib 5 --nproc 1 2 4 --strategy tp sp pp"
    out, rows = pretended(takes, line)
    found = {(row["strategy"], row["nproc"]): row for row in rows}
    for cell in set(found) - {("sp_megatron", 2), ("pp", 4)}:
        row = found[cell]
        assert (row["longest"], row["too_long"], row["tokens_per_gib"]) == (5120, 5136, 1024), cell
    row = found["pp", 4]
    assert (row["longest"], row["ranks"]) == (2560, [0, 2, 3])
    assert row["peak_memory_bytes"] == [2.5 * GIB, 2.5 * GIB, 5 * GIB]
    tokens = "5,120 tokens; with 1 GiB less 1,024 fewer"
    assert f" tp on 2 ranks: {tokens}; the model's max_position_embeddings are only 4,000 " in out
    assert " pp on 4 ranks: 2,560 tokens; with 1 GiB less 512 fewer sp_meg" in out
    assert " sp_megatron on 2 ranks: use 1 rank " in out
    assert "PASS oom_search: 8 of 9 limits found" in out


def test_at_says_what_lengths_take_and_searches_nothing(pretended):
    line = "--how predicted --memory-gib 3 --strategy pp --nproc 4 --at 2048 512"
    out, [row] = pretended(lambda case, rank, n: {"peak": (2 - (rank > 0)) * n * 2**20}, line)
    assert [(entry["length"], entry["fits"]) for entry in row["at"]] == [(2048, False), (512, True)]
    assert row["at"][0]["peak_memory_bytes"] == [4 * GIB, 2 * GIB, 2 * GIB]
    assert "pp on 4 ranks, 2,048 tokens: does not fit because of the step: 4.00 GiB GiB" in out
    table = "peak 4.00 1.00 peak of loading 0.00 0.00 budget 3.00 3.00 peak in forward forward"
    assert f"{table} fits no yes PASS oom_search: 1 of 2 steps fit" in out


def test_on_gpus_memory_runs_out(pretended):
    """Of rank 1 first, by an unknown amount; an emulation sees rank 0 alone."""

    def takes(case, rank, length):
        ran_out = {"verdict": "oom", "stage": "step", "why": "CUDA out of memory."}
        return ran_out if length > [900, 500][rank] else {"peak": length * 2**20}

    for how, longest, ranks in ("measured", 496, [0, 1]), ("emulated", 896, [0]):
        line = f"--strategy tp --nproc 2 --how {how}"
        _, [row] = pretended(takes, line)
        assert (row["longest"], row["too_long"] - 16, row["ranks"]) == (longest, longest, ranks)
        assert [longest + 16, None] in row["tried"]
        out, _ = pretended(takes, f"{line} --at {longest + 16}")
        assert "tokens: does not fit because of the step: CUDA out of memory." in out
        assert "GPU: a GPU of this test" in out


BUDGETS = {"emulated": [7, 6, 7, 4], "emulated --memory-gib 6": [6] * 4, "measured": [8] * 4}
BUDGETS |= {"predicted --gpu t4": [13.6, 12.6, 13.6, 10.6], "predicted --memory-gib 9": [9] * 4}


@pytest.mark.parametrize("how", BUDGETS)
def test_the_budget(pretended, how):
    """Of 8 GiB an emulated job has what a real one has, whose peers have their buffers there."""
    line = f"--strategy tp ulysses --nproc 1 4 --at 16 --how {how}"
    _, rows = pretended(lambda case, rank, length: {"peak": 0}, line)
    assert [row["budget_bytes"] / GIB for row in rows] == pytest.approx(BUDGETS[how])


HOST, SHARD = "--optimizer=adamw-host", "--shard-weights"
BOTH = f"{HOST} {SHARD}"
LACKS = [  # GiB, what does not fit, the remedies of Ulysses, what is said of tp
    (2, "loading", None, "loading, when each rank has the full model: 3.00 GiB"),
    (4.9, "AdamW", {HOST: True, SHARD: False, BOTH: True}, "weights and optimizer state: 10.00"),
    (10.01, "step", {HOST: True, SHARD: True, BOTH: True}, "the step: 10.02 GiB; tried: with"),
]


@pytest.mark.parametrize("gib,lacks,remedies,told", LACKS)
def test_what_fits_at_no_length(pretended, gib, lacks, remedies, told):
    def takes(case, rank, length):
        weights = 1 if SHARD in case["argv"] else 2
        state = {"adamw": 4, "adamw-host": 0}[case["optimizer"]] * weights
        parts = NO_PARTS | {"weights": weights * GIB, "optimizer state": state * GIB}
        peak = sum(parts.values()) + length * 2**20
        return {"breakdown": parts, "peak": peak, "loading_peak_bytes": 3 * GIB}

    line = f"--how predicted --nproc 2 --strategy tp ulysses --memory-gib {gib}"
    out, rows = pretended(takes, line)
    assert [(row["longest"], row["lacks"]) for row in rows] == [(0, lacks)] * 2
    assert [row.get("remedies") for row in rows] == [remedies and {HOST: True}, remedies]
    assert f"tp on 2 ranks: does not fit because of {told}" in out
    assert f"with {SHARD} it does not fit, either" in out or lacks != "AdamW"
    assert "PASS oom_search: 0 of 2 limits found" in out


@pytest.mark.parametrize("bound,length", [("hi", 400), ("lo", 5008)])
def test_bounds_are_said_where_they_are_the_answer(pretended, bound, length):
    line = f"--how predicted --memory-gib 3 --strategy tp --nproc 1 --{bound} {length}"
    out, [row] = pretended(lambda case, rank, length: {"peak": length * 2**20}, line)
    known = {"hi": (400, None, "hi"), "lo": (None, 5008, "lo")}[bound]
    assert (row["longest"], row["too_long"], row["bound"]) == known
    told = {"hi": "400 tokens; longer", "lo": "the step: 4.89 GiB; tried: with"}[bound]
    assert told in out and "er ones were not tried" in out
    assert "PASS oom_search: 0 of 1 limits found" in out


# What a step takes


@pytest.mark.parametrize("dtype,state,gradients", [(HALF, 12, 3), (SINGLE, 8, 2)])
def test_adamw_steps_one_parameter_after_another(dtype, state, gradients):
    """As AdamW on float32 weights does; its state, and what a step takes for itself, by hand."""
    config = SimpleNamespace(vocab_size=9, hidden_size=1, intermediate_size=1, head_dim=1)
    args = SimpleNamespace(config=config, length=1, device=torch.device("cpu"))
    sizes, tensors = [512, 2048, 1024], live_tensors.LiveTensors(args, 1)
    with tensors:
        model = torch.nn.ParameterList(torch.full([n], 0.01, dtype=dtype) for n in sizes)
        model.append(model[0])  # tied
        optimizers = techniques.make_adamw(model, host=False)
        for parameter in model[:2]:  # the third has no gradient
            parameter.grad = torch.linspace(-1, 1, len(parameter), dtype=dtype)
        tensors.restart_peak()
        before = tensors.now
        tensors.enter("optimizer step")
        techniques.optimizer_step(optimizers)
    parts, size = tensors.breakdown(model, optimizers), dtype.itemsize
    assert parts["optimizer state"] - state * sum(sizes) in (0, 3 * 512), "and a counter each"
    assert (parts["weights"], parts["gradients"]) == (size * sum(sizes), size * sum(sizes[:2]))
    assert tensors.peak - before == gradients * 4 * max(sizes)
    assert tensors.peak_moment == "optimizer step"
    expected = [torch.full(p.shape, 0.01, dtype=dtype).float() for p in model[:2]]
    adamw = torch.optim.AdamW(expected, foreach=False)
    for scale in (0, 1):
        for master, parameter in zip(expected, model):
            master.grad = scale * parameter.grad.float()
        adamw.step()
    assert all(torch.equal(p, master.to(dtype)) for p, master in zip(model, expected))


# Attention: the kernel that a GPU would run

KERNELS = [
    ((HALF, 8, 2, 64, 8.0), "flash", "compute capability 8.0"),
    ((HALF, 8, 8, 64, 9.0), "flash", "cuDNN"),
    ((HALF, 8, 8, 64, 7.5), "math", "no other supports bfloat16 on compute capability 7.5"),
    ((SINGLE, 8, 8, 64, 8.0), "memory-efficient", "no float32"),
    ((SINGLE, 8, 8, 66, 8.0), "math", "no heads of 66"),
    ((SINGLE, 8, 2, 64, 9.0), "math", "no GQA before PyTorch 2.14"),
    ((SINGLE, 8, 2, 64, 9.0, "2.14.0"), "memory-efficient", "no float32"),
    ((DOUBLE, 8, 8, 64, 9.0, "2.14.0"), "math", "no other supports float64"),
    ((HALF, 8, 8, 288, 8.0), None, "no prediction for heads of 288; use a model with up to 256"),
]


@pytest.mark.parametrize("case,name,why", KERNELS)
def test_the_kernel_is_that_of_a_gpu(monkeypatch, case, name, why):
    dtype, heads, kv_heads, d, capability, *version = case
    version = torch.torch_version.TorchVersion(*version or ["2.13.0+cu130"])
    monkeypatch.setattr(torch, "__version__", version)
    query, key = (torch.empty(1, n, 4, d, dtype=dtype, device="meta") for n in (heads, kv_heads))
    try:
        found = meta_device.attention_kernel(query, key, capability)
    except meta_device.UnknownKernel as problem:
        found = None, str(problem)
    assert found[0] == name and why in found[1]


def test_what_kernels_take_for_themselves():
    """By hand, from PyTorch's sources: b = 2, 4 heads, 100 tokens, d = 80."""
    query, fewer = (torch.empty(2, n, 100, 80, device="meta") for n in (4, 1))
    tiles = 2 * 2 * (16 + 4 * 64 * 64)  # of 64 tokens x 64 numbers, with a lock and a counter
    efficient, flash = meta_device.efficient_scratch, meta_device.flash_scratch
    assert efficient(None, query, query) == 8 * (4 * 100 + tiles)
    assert efficient(None, query, fewer) == 8 * (4 * 100 + tiles + 2 * 100 * 320)  # dk, dv
    assert flash(None, query, query) == 8 * 4 * 128 * (96 + 1)


# The real scripts


def measure_and_predict(model, file):
    """As rank 1 of 4 on a CPU: what steps have alive at their peak, and predictions.

    A CPU's allocator knows no blocks, nor do its kernels take what a GPU's do.
    """
    os.environ |= {"RANK": "1", "WORLD_SIZE": "4"}
    del os.environ["LOCAL_RANK"]  # a fake rank is alone: it speaks
    live_tensors.BLOCK = 1
    meta_device.SCRATCH.clear()
    common = ["--model", model, "--dtype", "float32", "--attn", "eager", "--batch", "2"]
    common += ["--mode", "benchmark", "--backend", "fake"]
    case = {"how": "predicted", "capability": 8.0, "plain": False, "optimizer": "none"}
    case |= {"recompute": "full", "tile": None, "head_chunks": 1, "world": 4}
    found = []
    for name, length in ("tp", 512), ("tp", 4), ("sp_megatron", 512), ("sp_ulysses", 512):
        argv = [*common, "--length", str(length)]
        importlib.import_module(name).main([*argv, "--bench-iters", "1", "--json", file])
        real = json.loads(Path(file).read_text())["benchmark"]["peak_memory_bytes"][0]
        predicted = oom_search.run_step(case | {"script": name, "argv": argv})
        found.append((name, length, real, predicted))
        dist.destroy_process_group()
        del sys.modules[name]  # what a prediction changes in a script is not for a run
    Path(file).write_text(json.dumps(found))


def test_prediction_is_what_a_run_takes(ranks, tmp_path):
    """Each script's predicted peak against the live tensors of its own benchmark mode on a CPU.

    On 4 ranks, with 4 tokens, loading the model takes more than the step: it must not count.
    """
    file = str(tmp_path / "found.json")
    codes, output = ranks.live(1, measure_and_predict, str(ranks.folder / "even"), file)
    assert codes == [0], output
    for name, length, real, predicted in json.loads(Path(file).read_text()):
        assert abs(predicted["peak"] / real - 1) < 0.01, (name, length, predicted, real)
        assert sum(predicted["breakdown"].values()) == predicted["peak"]
        if (name, length) == ("tp", 4):
            assert predicted["loading_peak_bytes"] > predicted["peak"]


LENGTHS = json.loads((ROOT / "results" / "lengths.json").read_text())["steps"]
CELLS = [("40 GiB", "tp", 2), ("80 GiB, activation recomputation", "sp_megatron", 8)]
CELLS += [("80 GiB, no remedy", "pp", 8), ("80 GiB, logits in chunks", "sp_ulysses", 8)]


@pytest.mark.ci(every=2)
@pytest.mark.parametrize("step,name,world", CELLS)
def test_lengths_are_those_of_the_results(searched, step, name, world):
    """Some cells of results/lengths.json: the length fits, 512 tokens more do not."""
    result = LENGTHS[step]["result"]
    [row] = [r for r in result["results"] if (r["strategy"], r["nproc"]) == (name, world)]
    known = LENGTHS[step]["command"].partition("--memory-gib")[2]
    line = f"--strategy {name} --nproc {world} --at {row['longest']} {row['too_long']}"
    line += f" --optimizer {result['optimizer']} --how predicted --memory-gib {known}"
    status, text, out = searched(line)
    assert status == 0 and [e["fits"] for e in out["results"][0]["at"]] == [True, False], text


@pytest.mark.parametrize("layers", [2, pytest.param(16, marks=pytest.mark.slow)])
def test_pytorchs_own_tracker_agrees(searched, tmp_path, layers):
    """MemTracker on fake CPU tensors: Llama 3.2 1B without recomputation, 4,096 tokens."""
    llama, _ = tp.find_model("llama-3.2-1b")
    llama.num_hidden_layers = layers
    llama.save_pretrained(tmp_path / "model")
    line = f"--strategy plain --nproc 1 --recompute none --optimizer none --model {tmp_path}/model"
    status, text, out = searched(f"{line} --at 4096")
    assert status == 0, text
    [peak] = out["results"][0]["at"][0]["peak_memory_bytes"]
    # By another name HF makes no mask, as it makes none where values can be seen
    AttentionInterface.register("without_mask", sdpa_attention_forward)
    torch.set_default_dtype(HALF)
    try:
        with FakeTensorMode(), MemTracker() as tracker:
            model = AutoModelForCausalLM.from_config(llama, attn_implementation="without_mask")
            ids = torch.zeros(1, 4096, dtype=torch.long)
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    finally:
        torch.set_default_dtype(SINGLE)
    theirs = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    assert peak == pytest.approx(theirs, rel=1e-3)
    if layers == 16:
        assert f"{peak / 2**30:.2f}" == "14.87"


ONE = "--strategy tp --nproc 1"
CHUNKS = "--model tiny --at 64 --head-chunks"  # 8 heads, 4 KV heads
REFUSED = [  # by a step
    (f"{ONE} {CHUNKS} 3", "--head-chunks 3: use 1, 2, 4 or 8"),
    (f"--strategy ulysses --nproc 2 {CHUNKS} 4", "--head-chunks 4: use 1 or 2"),
    (f"--strategy ulysses --nproc 1 {CHUNKS} 8", "--head-chunks 8: use 1, 2 or 4"),
    (f"--strategy pp --nproc 2 --schedule zb {CHUNKS} 2", "--head-chunks 2: use 1"),
    (f"{ONE} --model ./nowhere --at 64", "cannot use ./nowhere"),
]
UNUSABLE = [  # before
    ("--nproc 2 0", "--nproc 0: use a number above 0"),
    ("--lo 9 --hi 8", "--lo 9 is above --hi 8; swap them"),
    ("--lo 8 --hi 9", "no multiple of --step 512 is in 8 to 9; use a smaller --step"),
    ("--how measured", "--how measured needs 2 GPUs, not 0; use predicted"),
    ("--json /nowhere/at/all.json", "can't open '/nowhere/at/all.json'"),
]


@pytest.mark.parametrize("line,why", UNUSABLE)
def test_arguments_that_cannot_be_end_as_argparses(searched, capfd, line, why):
    with pytest.raises(SystemExit) as stop:
        searched(line, results=False)
    assert stop.value.code == 2 and why in capfd.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("line,why", REFUSED)
def test_what_cannot_be_is_one_line(searched, line, why):
    status, out, errors = searched(line, results=False)
    assert (status, out, errors.count("\n")) == (2, "", 1) and errors.startswith(f"error: {why}")


def test_what_the_report_names(searched):
    """On a T4, whose attention makes the matrix; AdamW is there unless one asks for none."""
    status, text, out = searched(f"{ONE} --model tiny --gpu t4 --at 4096")
    assert status == 0 and text.startswith("\npeak memory of a training step, predicted\n"), text
    [entry], words = out["results"][0]["at"], " ".join(text.split())
    why = "no other supports bfloat16 on compute capability 7.5"
    assert entry["attention"] == f"math, which makes the s x s matrix ({why})"
    assert entry["peak_memory_bytes"][0] > 8 * 4096**2 * 2, "of 8 heads"
    assert entry["breakdown"]["optimizer state"] > 0
    named = {"recompute": "full", "tile": 16384, "head_chunks": 1, "attn": "sdpa"}
    for key, value in (named | {"loss": "chunked", "optimizer": "adamw"}).items():
        assert out[key] == out["results"][0][key] == value
        assert f"--{key.replace('_', '-')}={value}" in words
    assert f"GPU: t4, python {sys.version.split()[0]}, torch {torch.__version__}, tra" in words
    for gpu, said in ("", "a100-40 (assumed: no --gpu was given)"), ("--gpu h100", "h100"):
        words = " ".join(searched(f"{ONE} --model tiny --at 64 --memory-gib 7 {gpu}")[1].split())
        assert f"GPU: {said}, " in words and f"compute capability {9.0 if gpu else 8.0}" in words


def test_what_a_predictions_host_does_is_free(searched):
    parts = {}
    for optimizer, what in ("none", "forward and backward, no"), ("adamw-host", "a training step"):
        _, text, out = searched(f"{ONE} --model tiny --at 4096 --optimizer {optimizer}")
        assert text.startswith(f"\npeak memory of {what}")
        parts[optimizer] = out["results"][0]["at"][0]["breakdown"]
    assert parts["none"] == parts["adamw-host"]


@pytest.mark.ci
def test_scratch_of_kernels_is_inside_kernels(searched):
    """llama-3.2-1b: flash's backward sums dq in float32; dk and dv are of every query head."""
    _, text, out = searched(f"{ONE} --gpu h200 --at 262144")
    [entry] = out["results"][0]["at"]
    assert entry["peak_moment"] == "backward", text
    bytes_of_a_token = 4 * 32 * (64 + 1) + 2 * 2 * 2048
    assert entry["breakdown"]["inside kernels"] == bytes_of_a_token * 262144


def test_the_default_has_what_a_plain_trainer_gets(searched, tmp_path):
    """And its settings; and a length that the model was not made for."""
    llama, _ = tp.find_model("tiny")
    llama.max_position_embeddings = 1000
    llama.save_pretrained(tmp_path / "model")
    _, text, out = searched(f"--model {tmp_path}/model --nproc 2 --lo 1024 --hi 1024")
    [*rows, plain], words = out["results"], " ".join(text.split())
    assert [(row["strategy"], row["nproc"]) for row in rows] == [(s, 2) for s in oom_search.FOUR]
    assert [plain[key] for key in ("strategy", "nproc", "loss", "tile")] == [
        "plain",
        1,
        "full",
        None,
    ]
    assert re.search(r" plain: --model=\S+ .*--loss=full --recompute=full --head", words), text
    assert "tp, sp_megatron, sp_ulysses, pp: --model=" in words
    assert words.count("max_position_embeddings are only 1,000") == 5


@pytest.mark.ci
def test_plain_is_what_people_have(searched, tmp_path):
    """llama-3.2-1b: Hugging Face's loss makes all logits at once, whatever --loss says."""
    status, text, out = searched("--strategy plain --nproc 2 --at 64 16384")
    assert status == 0 and "PASS oom_search: 1 of 2 steps fit" in text, text
    [one] = out["results"]
    assert (one["nproc"], one["loss"]) == (1, "full")
    assert [row["peak_moment"] for row in one["at"]] == ["optimizer step", "backward"]
    parts, hidden = one["at"][1]["breakdown"], 2 * 16384 * 2048  # a layer's input
    assert parts["logits"] >= 10 * 16384 * 128256
    assert 17 * hidden < parts["saved activations"] < 21 * hidden, "checkpoints, and the last norm"
    (tmp_path / "config.json").write_text('{"model_type": "olmo2"}')  # tp.py refuses it
    own = f"--strategy plain --at 64 --model {tmp_path}"
    assert searched(own)[0] == 0 and searched(f"{own} --head-chunks 2", results=False)[0] == 2


def test_sharded_weights_are_gathered_a_layer_at_a_time(searched):
    """llama-3.2-1b: 2.5 GB of weights, of which a layer is 0.12 and what is in no layer 0.53."""
    status, text, out = searched("--strategy ulysses --nproc 4 --shard-weights --gpu t4 --at 64")
    assert status == 0, text
    [entry], numbers = out["results"][0]["at"], 1_235_814_400 / 4
    assert out["results"][0]["budget_bytes"] == pytest.approx((14.6 - 4) * 2**30)
    parts = entry["breakdown"]
    assert parts["weights"] == pytest.approx(2 * numbers, rel=1e-3)
    assert parts["optimizer state"] == pytest.approx(12 * numbers, rel=1e-3)
    # The latter four times (head and embedding each make its gradient), and no layer's
    assert sum(parts.values()) < 16 * numbers + 2.5e9
