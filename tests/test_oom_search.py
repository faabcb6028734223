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
from conftest import ENVIRONMENT, ROOT, python
from torch._subclasses import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import oom_search
import tp
from labs.memory import live_tensors, meta_device, techniques

HALF, SINGLE, DOUBLE = torch.bfloat16, torch.float32, torch.float64

# A strategy script with a memory wall in place of a model: PLAN says what a token takes, and what
# goes wrong.
FAKE = """
import contextlib, json, os, time
from pathlib import Path
from types import SimpleNamespace
import torch
import torch.distributed as dist

PLAN = json.loads(Path(__file__).with_suffix(".json").read_text())
RANK = int(os.environ["RANK"])
STRATEGY = ""

class UsageError(Exception):
    pass

def parse(argv):
    if PLAN.get("refuse") == int(os.environ["WORLD_SIZE"]):
        raise UsageError("use 1 rank")
    return SimpleNamespace(length=int(argv[argv.index("--length") + 1]), batch=1, dtype="bfloat16")

def start(args):
    with open(Path(__file__).with_suffix(".pids"), "a") as file:
        print(os.getpid(), file=file)
    args.config = SimpleNamespace(vocab_size=9, hidden_size=1, intermediate_size=1, head_dim=1)
    args.config.rope_parameters = {}
    args.device, args.attn_implementation = torch.device("cpu"), "sdpa"
    if "MASTER_ADDR" in os.environ:
        dist.init_process_group("gloo")
    return SimpleNamespace(size=lambda: int(os.environ["WORLD_SIZE"]))

upcasts_in_float64 = lambda args: contextlib.nullcontext()
parallelize = lambda model, group, args: model
proof_batch = lambda args, group: (None, None)

def load_model(args):
    if PLAN.get("oom_loading"):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB")
    torch.empty(PLAN.get("loading_mib", 0), 2**20, dtype=torch.uint8, device=args.device)
    model = torch.nn.Linear(1, 1, device=args.device)
    model.model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList()})
    model.model.norm = torch.nn.Identity()
    return model

def forward_backward(model, ids, labels, group, args):
    if args.length > PLAN.get("crash_above", 1e9):
        raise ValueError("not a matter of memory")
    if args.length > PLAN.get("oom_above", [1e9] * 8)[RANK]:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")
    time.sleep(PLAN.get("sleep", 0))
    mib = args.length * PLAN.get("mib", [1] * 8)[RANK]
    torch.empty(mib, 2**20, dtype=torch.uint8, device=args.device)
"""
MACHINE = """
import json, sys, torch, oom_search as o
o.PRELOAD, torch.cuda.get_device_name = ["oom_search"], lambda: "a GPU of this test"
for gpus, options in json.loads(sys.argv[1]):
    torch.cuda.device_count = lambda: gpus
    status = o.main(["--json", "out.json", "--step", "16", "--optimizer", "none", *options.split()])
    print(f"exit {status}", flush=True)
    open("outs.json", "a").write(json.dumps(json.load(open("out.json"))) + chr(10))
"""  # several searches in one process, each on a machine with so many GPUs


@pytest.fixture
def folder(tmp_path):
    shutil.copytree(ROOT / "labs" / "memory", tmp_path / "labs" / "memory")
    (tmp_path / "labs" / "lab10_long_sequences").mkdir()
    for file in ("oom_search.py", "labs/lab10_long_sequences/lesson.py"):
        shutil.copy(ROOT / file, tmp_path / file)
    return tmp_path


def fake(folder, **plans):
    for name, plan in plans.items():
        (folder / f"{name}.py").write_text(FAKE)
        (folder / f"{name}.json").write_text(json.dumps(plan))


def started(folder, *searches, **how):
    """The process of searches (number of GPUs, options) among the fakes of a folder."""
    command = [sys.executable, "-c", MACHINE, json.dumps(searches)]
    how |= {"cwd": folder, "env": ENVIRONMENT | {"PYTHONPATH": str(folder)}, "text": True}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **how)


def run(folder, *searches):
    """What searches printed, on stdout and on stderr, and the --json of each."""
    (folder / "outs.json").unlink(missing_ok=True)
    out, errors = started(folder, *searches).communicate(timeout=300)
    assert "Traceback" not in errors, errors
    written = (folder / "outs.json").read_text().splitlines()
    return out, errors, [json.loads(line) for line in written]


def journal(folder):
    lines = (folder / ".oom_search.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines if line.endswith("}")]


def lengths(folder, script="tp"):
    cases = [e["case"] for e in journal(folder) if e["case"]["script"] == script]
    return [int(c["argv"][c["argv"].index("--length") + 1]) for c in cases]


def alive(folder, name="tp"):
    """Processes of steps that are still there; one that has ended may wait to be reaped."""
    pids = [int(pid) for pid in (folder / f"{name}.pids").read_text().split()]
    states = [f"/proc/{pid}/stat" for pid in pids if os.path.exists(f"/proc/{pid}")]
    return [path for path in states if open(path).read().rsplit(")", 1)[1].split()[0] != "Z"]


def wait_for(true, seconds=60):
    end = time.time() + seconds
    while not true():
        assert time.time() < end
        time.sleep(0.05)


# The search itself, against walls


def climb(wall, memory, start=192, lowest=1, highest=10**8, seen=True):
    """Where lengths up to wall fit, and k takes memory(k): {k: fits} in the order of the tries."""
    tried = {}
    while (k := oom_search.next_try(tried, memory(wall), start, lowest, highest)) is not None:
        assert k not in tried and lowest <= k <= highest
        tried[k] = k <= wall, memory(k) if seen else None
        if seen:
            tried[0] = True, memory(0)
    return {k: fits for k, (fits, _) in tried.items() if k}


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


# Among fake scripts


@pytest.mark.slow
def test_table_ranks_that_differ_and_what_the_journal_saves(folder):
    fake(folder, tp={}, sp_megatron={"refuse": 2}, pp={"mib": [1, 1, 1, 2]})
    asked = "--memory-gib 5 --nproc 1 2 4 --strategy tp sp pp"
    out, errors, (results, again) = run(folder, (0, asked), (0, asked))
    assert out.count("exit 0") == 2
    found = {(r["strategy"], r["nproc"]): r for r in results["results"]}
    for cell in set(found) - {("sp_megatron", 2), ("pp", 4)}:
        row = found[cell]  # 5120 tokens leave no room for the weight, of one number
        assert (row["longest"], row["too_long"], row["how"]) == (5104, 5120, "predicted"), cell
        assert sum(row["breakdown"].values()) == row["peak_memory_bytes"][0] <= 5 * 2**30
    assert found["pp", 4]["longest"] == 2544, "the last stage needs twice as much, and decides"
    assert found["pp", 4]["ranks"] == [0, 2, 3] and len(found["pp", 4]["peak_memory_bytes"]) == 3
    assert found["sp_megatron", 2]["error"] == "use 1 rank"
    assert re.search(r"tp +5,104 +5,104 x1.00", out) and "unusable" in out
    assert re.search(r" tp .*\n +sp_megatron .*\n +pp ", out), "equal columns stand once"
    assert "done oom_search: 8 of 9 limits found" in out
    assert re.search(r"[0-8] of 9 done, about \d+ s to go; tp on 1 rank: 5,104 fits", errors)

    cases = [json.dumps(entry["case"], sort_keys=True) for entry in journal(folder)]
    assert len(set(cases)) == len(cases) and again == results, "what is known stays known"
    with open(folder / "pp.py", "a") as file:
        file.write("# changed\n")
    run(folder, (0, "--memory-gib 5 --nproc 1 --strategy tp pp"))
    more = [entry["case"]["script"] for entry in journal(folder)[len(cases) :]]
    assert set(more) == {"pp"}, "a changed script is another question"


@pytest.mark.ci
def test_an_error_is_not_out_of_memory(folder):
    fake(folder, tp={"crash_above": 3000}, sp_megatron={}, sp_ulysses={"sleep": 60})
    crash = "--memory-gib 5 --strategy tp sp --jobs 1 --lo 1024"
    late = "--strategy ulysses --nproc 1 --timeout 1.5"
    out, _, (results, timeout) = run(folder, (0, crash), (0, late))
    assert out.count("exit 1") == 2
    one, _, sp, _ = results["results"]
    assert (one["longest"], one["error"]) == (1024, "ValueError: not a matter of memory")
    assert any("in forward_backward" in line for line in one["log"])
    assert sp["longest"] == 5104, "it stops its own search only"
    assert lengths(folder) == [1024, 1024], "what had an error is tried again the next time"
    assert "FAIL oom_search: tp on 1 rank: ValueError: not a matter of memory" in out
    assert "no result after 1.5 s; use a longer --timeout" in timeout["results"][0]["error"]
    assert not lengths(folder, "sp_ulysses") and not alive(folder, "sp_ulysses")


@pytest.mark.ci(every=3)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_interrupted_and_resumed(folder, number):
    """sp_megatron waits; of tp everything is known. Then somebody makes sp_megatron faster."""
    fake(folder, tp={}, sp_megatron={"sleep": 60})
    background = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a shell's job ignores it
    search = 0, "--memory-gib 5 --strategy tp sp --nproc 1 --jobs 1"
    job = started(folder, search, preexec_fn=background)
    pids = folder / "sp_megatron.pids"
    wait_for(lambda: pids.exists() and pids.read_text(), 300)
    job.send_signal(number)
    out, errors = job.communicate(timeout=60)
    if number != signal.SIGKILL:
        assert re.search(r"tp +5,104\n +sp_megatron +stopped\n", out), out
        assert "stopped oom_search: 1 of 2 limits found" in out and "exit 130" in out
        assert errors.splitlines()[-1] == "stopped; the same command goes on from here"
        assert not alive(folder, "sp_megatron")
    wait_for(lambda: not alive(folder, "sp_megatron"), 10)
    with open(folder / ".oom_search.jsonl", "a") as file:
        file.write('{"case": {"how": "predi')  # as if a kill had come in the middle of a line
    (folder / "sp_megatron.json").write_text("{}")
    [results] = run(folder, search)[2]
    assert [row["longest"] for row in results["results"]] == [5104, 5104]
    cases = [json.dumps(e["case"], sort_keys=True) for e in journal(folder)]
    assert len(cases) == len(set(cases)), "no step was repeated"


@pytest.mark.slow
def test_on_gpus_every_rank_must_fit(folder):
    """Two ranks of one job, which meet over gloo: rank 1 runs out of memory, and rank 0 waits."""
    fake(folder, tp={"oom_above": [900, 500]})
    measured = 2, "--strategy tp --memory-gib 8 --nproc 2 --lo 496 --hi 512"
    emulated = 1, "--strategy tp --memory-gib 8 --nproc 4 --lo 896 --hi 912"
    out, _, (real, alone) = run(folder, measured, emulated)
    row = real["results"][0]
    assert (row["longest"], row["how"], row["ranks"]) == (496, "measured", [0, 1]), out
    assert len(row["peak_memory_bytes"]) == 2 and real["gpu"] == "a GPU of this test"
    assert [e["result"]["verdict"] for e in journal(folder)] == ["ran", "oom"] * 2
    row = alone["results"][0]
    assert (row["longest"], row["how"], row["ranks"]) == (896, "emulated", [0]), out
    assert not alive(folder)


@pytest.mark.ci
def test_what_cannot_be_loaded_does_not_fit(folder):
    """Loading takes 6 GiB where there are 5."""
    fake(folder, tp={"loading_mib": 6000}, sp_megatron={"oom_loading": True})
    options = "--memory-gib 5 --nproc 1 --strategy"
    searches = (0, f"{options} tp"), (1, f"{options} sp"), (0, f"{options} tp --at 64")
    out, _, results = run(folder, *searches)
    predicted, real, at = (result["results"][0] for result in results)
    for row in (predicted, real):
        assert (row["longest"], row["fits"], row["loads"]) == (0, False, False), out
    assert predicted["loading_peak_bytes"] == 6000 * 2**20
    assert "tp on 1 rank: loading the full model takes 5.86 GiB, too much" in out
    assert "sp_megatron on 1 rank: out of memory while loading the full model: CUDA out" in out
    assert len(lengths(folder, "sp_megatron")) == 1, "a shorter sequence would not help"
    [entry] = at["at"]
    assert max(entry["peak_memory_bytes"]) < 5 * 2**30 and not entry["fits"]


@pytest.mark.ci
def test_at_says_what_lengths_take_and_searches_nothing(folder):
    fake(folder, tp={"oom_above": [900]}, pp={"mib": [2, 1, 1, 1]})
    stages = 0, "--memory-gib 3 --strategy pp --nproc 4 --at 2048 512"
    alone = 1, "--memory-gib 3 --strategy tp --nproc 1 --how emulated --at 1024"
    out, _, (results, _, real) = run(folder, stages, stages, alone)
    rows = results["results"][0]["at"]
    assert [(row["length"], row["fits"]) for row in rows] == [(2048, False), (512, True)]
    for row in rows:
        assert row["ranks"] == [0, 2, 3] and row["peak_moment"] == "forward"
        assert 0 <= max(row["peak_memory_bytes"]) - 2 * row["length"] * 2**20 < 4096
    assert len(lengths(folder, "pp")) == 6, "and the journal knows them the second time"
    assert re.search(r"peak +4.00 +1.00\n  budget +3.00 +3.00\n.*\n  fits +no +yes", out), out
    assert "done oom_search: 1 of 2 steps fit\n" in out and out.count("exit 0") == 3
    [row] = real["results"][0]["at"]
    assert (row["fits"], row["breakdown"], row["peak_moment"]) == (False, {}, None)
    assert "tp on 1 rank, 1,024 tokens: out of memory in the step: CUDA out" in out


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
        before, tensors.otherwise = tensors.now, "optimizer step"
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


@pytest.fixture
def searched(tmp_path, capfd, monkeypatch):
    """searched(command line) -> exit status, what was printed, the JSON: all in this process."""
    monkeypatch.setattr(oom_search.torch.cuda, "device_count", lambda: 0)
    file = tmp_path / "results.json"

    def search(line, results=True):
        own = ["--journal", str(tmp_path / "journal"), "--json", str(file)]
        status = oom_search.main([*own, *line.split()])
        out, errors = capfd.readouterr()
        assert max(map(len, out.splitlines()), default=0) <= 100, out
        return status, out, json.loads(file.read_text()) if results else errors

    return search


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
    (f"{ONE} --model ./nowhere --at 64", "no folder or file ./nowhere"),
    (f"{ONE} --model tiny --at 3000000000", "--length 3000000000"),
    ("--strategy plain --nproc 2 --model tiny --at 64", "plain runs on one GPU; use --nproc 1"),
]
REFUSED += [  # before
    ("--memory-gib none", "argument --memory-gib: none is not a number above 0"),
    ("--lo 9 --hi 8", "no multiple of --step 512 in 9 to 8; use a smaller --step"),
    ("--at 9 --hi 8", "--at tries its lengths only; leave out --lo and --hi"),
    ("--gpu h100 --memory-gib 9", "--gpu is for predictions of a whole card; use --memory-gib"),
    ("--how measured", "--how measured needs 2 GPUs, not 0; use predicted"),
    ("--json /nowhere/at/all.json", "cannot write /nowhere/at/all.json"),
    ("--journal /nowhere/at/all", "cannot write /nowhere/at/all"),
]


@pytest.mark.parametrize("line,why", REFUSED)
def test_what_cannot_be_is_one_line(searched, line, why):
    status, out, errors = searched(line, results=False)
    assert (status, out, errors.count("\n")) == (2, "", 1) and errors.startswith(f"error: {why}")


def test_what_the_report_names(searched):
    """On a T4, whose attention makes the matrix; AdamW is there unless one asks for none."""
    status, text, out = searched(f"{ONE} --model tiny --gpu t4 --at 4096")
    assert status == 0 and text.startswith("\npeak memory of a training step, predicted\n"), text
    row = out["results"][0]
    assert row["budget_bytes"] == int(13.6 * 2**30)
    why = "no other supports bfloat16 on compute capability 7.5"
    assert row["at"][0]["attention"] == f"math, which makes the s x s matrix ({why})"
    assert row["at"][0]["peak_memory_bytes"][0] > 8 * 4096**2 * 2, "of 8 heads"
    assert row["at"][0]["breakdown"]["optimizer state"] > 0
    named = {"recompute": "full", "tile": 16384, "head_chunks": 1, "attn": "sdpa", "gpu": "t4"}
    named |= {"loss": "chunked", "optimizer": "adamw", "how": "predicted"}
    assert {key: out[key] for key in named} == named
    for key, value in named.items():
        assert f"--{key.replace('_', '-')} {value}" in " ".join(text.split()), text
    assert out["versions"]["torch"] == torch.__version__ and f"torch {torch.__version__}" in text


def test_what_a_predictions_host_does_is_free(searched):
    parts = {}
    for optimizer, what in ("none", "forward, backward, no"), ("adamw-host", "a training step"):
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


BOUNDS = [
    ("--hi 40000", (39936, None, "hi"), "39,936 or more", "--hi is the answer"),
    ("--memory-gib 0.01 --lo 5000", (None, 5120, "lo"), "below 5,120", "--lo does not fit"),
]


@pytest.mark.parametrize("bounds,answer,text,why", BOUNDS)
def test_bounds_are_said_where_they_are_the_answer(searched, bounds, answer, text, why):
    status, out, results = searched(f"{ONE} --model tiny {bounds}")
    row = results["results"][0]
    assert status == 0 and (row["longest"], row["too_long"], row["bound"]) == answer
    assert text in out and why in out and "done oom_search: 0 of 1 limits found" in out


@pytest.mark.ci
def test_plain_is_what_people_have(searched, tmp_path):
    """llama-3.2-1b: Hugging Face's loss makes all logits at once, whatever --loss says."""
    status, text, out = searched("--strategy plain --at 64 16384")
    assert status == 0 and "done oom_search: 1 of 3 steps fit" in text, text
    one, two = out["results"]
    assert (one["loss"], out["loss"], out["optimizer"]) == ("full", "chunked", "adamw")
    assert [row["peak_moment"] for row in one["at"]] == ["optimizer step", "backward"]
    parts, hidden = one["at"][1]["breakdown"], 2 * 16384 * 2048  # a layer's input
    assert parts["logits"] >= 10 * 16384 * 128256
    assert 17 * hidden < parts["saved activations"] < 21 * hidden, "checkpoints, and the last norm"
    assert two["verdict"] == "unusable" and "tokens: plain runs on one GPU" in text
    (tmp_path / "config.json").write_text('{"model_type": "olmo2"}')  # tp.py refuses it
    own = f"--strategy plain --nproc 1 --at 64 --model {tmp_path}"
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


def test_a_journal_that_nobody_asked_for_is_done_without(monkeypatch):
    monkeypatch.setattr(oom_search, "JOURNAL", "/nowhere/at/all")
    assert oom_search.main(f"{ONE} --model tiny --at 64".split()) == 0


@pytest.mark.ci
def test_a_reader_may_leave_early(tmp_path):
    command = f"{sys.executable} {ROOT}/oom_search.py {ONE} --model tiny --at 64 | head -n 1"
    how = {"shell": True, "cwd": tmp_path, "env": ENVIRONMENT, "capture_output": True}
    done = subprocess.run(command, **how, text=True, timeout=120)
    assert done.stdout == "\n" and "Traceback" not in done.stderr and "rror" not in done.stderr


@pytest.mark.slow
def test_a_temporary_folder_of_a_long_name(tmp_path):
    """Slurm's: a socket in it would have a name that is too long."""
    deep = tmp_path / ("a" * 100)
    deep.mkdir()
    options = ["--strategy", "tp", "--nproc", 1, "--at", 64, "--model", "tiny"]
    options += ["--journal", tmp_path / "journal"]
    run = python("oom_search.py", *options, env={"TMPDIR": str(deep)})
    assert run.returncode == 0, run.stderr
