"""oom_search.py: predictions of the real scripts; the search against walls, kills and crashes."""

import asyncio
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

import pytest
import torch
import torch.distributed as dist
from conftest import ENVIRONMENT, ROOT
from forks import MODELS, SMALL
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(ROOT))
import oom_search  # noqa: E402
from oom_search import gpu_kernels  # noqa: E402

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

class UsageError(Exception):
    pass

def parse(argv):
    if PLAN.get("refuse") == int(os.environ["WORLD_SIZE"]):
        raise UsageError("these rank counts would do: 1")
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

def train_step(model, ids, labels, group, args):
    if args.length > PLAN.get("crash_above", 1e9):
        print("a line before")
        raise ValueError("not a matter of memory")
    if args.length > PLAN.get("oom_above", [1e9] * 8)[RANK]:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")
    time.sleep(PLAN.get("sleep", 0))
    mib = args.length * PLAN.get("mib", [1] * 8)[RANK]
    torch.empty(mib, 2**20, dtype=torch.uint8, device=args.device)
"""
MACHINE = """
import json, sys, oom_search as o
o.PRELOAD, o.gpu_name = (), lambda: "a GPU of this test"
for gpus, options in json.loads(sys.argv[1]):
    o.gpu_count = lambda: gpus
    status = o.main(["--json", "out.json", "--step", "16", *options])
    print(f"exit {status}", flush=True)
    open("outs.json", "a").write(json.dumps(json.load(open("out.json"))) + chr(10))
"""  # several searches in one process, each on a machine with so many GPUs


@pytest.fixture
def folder(tmp_path):
    shutil.copy(ROOT / "oom_search.py", tmp_path)
    (tmp_path / "labs" / "experiments").mkdir(parents=True)
    for file in oom_search.LOADED:
        shutil.copy(ROOT / file, tmp_path / file)
    return tmp_path


def fake(folder, **plans):
    for name, plan in plans.items():
        (folder / f"{name}.py").write_text(FAKE)
        (folder / f"{name}.json").write_text(json.dumps(plan))


def command(*searches):
    """The command line of searches (number of GPUs, options) among the fakes of a folder."""
    return [sys.executable, "-c", MACHINE, json.dumps(searches)]


def run(folder, *searches):
    """Run them; returns the CompletedProcess and the --json of each."""
    (folder / "outs.json").unlink(missing_ok=True)
    how = {"cwd": folder, "env": ENVIRONMENT, "capture_output": True, "text": True}
    done = subprocess.run(command(*searches), **how, timeout=300)
    assert "Traceback" not in done.stderr, done.stderr
    return done, [json.loads(line) for line in (folder / "outs.json").read_text().splitlines()]


def journal(folder):
    lines = (folder / ".oom_search.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines if line.endswith("}")]


def lengths(folder, script="tp.py"):
    cases = [e["case"] for e in journal(folder) if e["case"]["script"] == script]
    return [int(c["argv"][c["argv"].index("--length") + 1]) for c in cases]


def alive(folder, name="tp"):
    """Processes of probes that are still there; one that has ended may wait to be reaped."""
    pids = [int(pid) for pid in (folder / f"{name}.pids").read_text().split()]
    states = [f"/proc/{pid}/stat" for pid in pids if os.path.exists(f"/proc/{pid}")]
    return [path for path in states if open(path).read().rsplit(")", 1)[1].split()[0] != "Z"]


# The search itself, against walls


def climb(wall, memory, first=192, second=None, seen=True):
    """Run search() where lengths up to wall fit, and k takes memory(k): (answer, tries)."""
    tries = []

    async def take(k):
        tries.append(k)
        return k <= wall, {k: memory(k)} if seen else {}

    return asyncio.run(oom_search.search(memory(wall), take, first, second)), tries


LINE, CURVE = lambda k: 1000 + 7 * k, lambda k: k * k
STAIRS = lambda k: 1000 + k // 64 * 7000 + k % 64  # noqa: E731


@pytest.mark.parametrize("wall", [0, 1, 5, 191, 192, 193, 700, 12345, 10**7])
@pytest.mark.parametrize("memory", [LINE, CURVE, STAIRS])
@pytest.mark.parametrize("seen", [True, False])
def test_search_finds_any_wall(wall, memory, seen):
    answer, tries = climb(wall, memory, seen=seen)
    assert answer == wall
    assert {wall, wall + 1} - {0} <= set(tries), "both sides of the answer were tried"
    assert len(tries) == len(set(tries)) <= 40, "nothing was tried twice"
    if memory is LINE and seen and wall > 9:
        assert len(tries) <= 6


def test_search_takes_the_bracket_it_is_given():
    assert climb(700, LINE, 100, 900)[1][:2] == [100, 900]
    assert climb(700, LINE, 800, 900)[0] == 700, "--lo does not fit: it is lowered"
    assert climb(7000, LINE, 100, 900)[0] == 7000, "--hi fits: it is raised"


# Among fake scripts


@pytest.mark.slow
def test_table_ranks_that_differ_and_what_the_journal_saves(folder):
    fake(folder, tp={}, sp_megatron={"refuse": 2}, pp={"mib": [1, 1, 1, 2]})
    asked = ["--memory-gib", "5", "--nproc", "1", "2", "4", "--strategy", "tp", "sp", "pp"]
    done, (out, again) = run(folder, (0, asked), (0, asked))
    assert done.stdout.count("exit 0") == 2
    found = {(r["strategy"], r["nproc"]): r for r in out["results"]}
    assert out["memory_bytes"] == 5 * 2**30
    for cell in set(found) - {("sp_megatron", 2), ("pp", 4)}:
        row = found[cell]  # 5120 tokens leave no room for the weight, of one number
        assert (row["longest"], row["too_long"], row["how"]) == (5104, 5120, "predicted"), cell
    assert found["pp", 4]["longest"] == 2544, "the last stage needs twice as much, and decides"
    assert found["pp", 4]["ranks"] == [0, 2, 3] and len(found["pp", 4]["peak_memory_bytes"]) == 3
    assert "these rank counts would do: 1" in found["sp_megatron", 2]["error"]
    assert re.search(r"strategy +1 rank +2 ranks +4 ranks\n", done.stdout)
    assert re.search(r"tp +5,104 +5,104 x1.00", done.stdout) and "unusable" in done.stdout
    said = r"tp on 1 rank: 5,104 fits, 5,120 does not"
    assert re.search(said, done.stderr)
    for row in found.values():
        if row["longest"]:
            peak = max(row["peak_memory_bytes"])
            assert sum(row["breakdown"].values()) == peak <= out["memory_bytes"]

    first = len(journal(folder))
    cases = [json.dumps(entry["case"], sort_keys=True) for entry in journal(folder)]
    assert len(set(cases)) == first, "what is known stays known"
    assert again == out
    other = ["--memory-gib", "5", "--strategy", "tp", "--dtype", "float32", "--nproc", "1"]
    run(folder, (0, other))
    more = len(journal(folder)) - first
    assert more > 0, "a changed option is another question"
    with open(folder / "tp.py", "a") as file:
        file.write("# changed\n")
    run(folder, (0, other), (0, other))
    assert len(journal(folder)) == first + 2 * more, "and so is a changed script"


def test_an_error_is_not_out_of_memory(folder):
    fake(folder, tp={"crash_above": 3000}, sp_megatron={}, sp_ulysses={"sleep": 60})
    crash = ["--memory-gib", "5", "--strategy", "tp", "sp", "--jobs", "1"]
    crash += ["--lo", "1024", "--hi", "4096"]
    late = ["--strategy", "ulysses", "--nproc", "1", "--timeout", "1.5"]
    done, (out, timeout) = run(folder, (0, crash), (0, late))
    assert done.stdout.count("exit 1") == 2
    one, _, sp, _ = out["results"]
    assert one["longest"] is None and "ended without a result" in one["error"]
    assert any("ValueError: not a matter of memory" in line for line in one["log"])
    assert "ValueError: not a matter of memory" in done.stdout
    assert sp["longest"] == 5104, "it stops its own search only"
    assert lengths(folder) == [1024, 1024], "what had an error is tried again the next time"
    assert "FAIL oom_search: tp on 1 rank: its process ended without a result" in done.stdout

    assert "no result after 1.5 s" in timeout["results"][0]["error"], "a timeout is an error, too"
    assert not lengths(folder, "sp_ulysses.py") and not alive(folder, "sp_ulysses")


def wait_for(true, seconds=60):
    end = time.time() + seconds
    while not true():
        assert time.time() < end
        time.sleep(0.05)


@pytest.mark.slow
def test_killed_and_resumed(folder):
    fake(folder, tp={"sleep": 0.4})
    search = (0, ["--memory-gib", "5", "--strategy", "tp", "--nproc", "1", "2", "--jobs", "1"])
    job = subprocess.Popen(command(search), cwd=folder, env=ENVIRONMENT, stderr=subprocess.DEVNULL)
    wait_for(lambda: (folder / ".oom_search.jsonl").exists() and len(journal(folder)) >= 2)
    job.kill()
    job.wait()
    with open(folder / ".oom_search.jsonl", "a") as file:
        file.write('{"case": {"how": "predi')  # as if the kill had come in the middle of a line
    before = len(journal(folder))
    wait_for(lambda: not alive(folder))
    _, (out,) = run(folder, search)
    assert [row["longest"] for row in out["results"]] == [5104, 5104]
    cases = [json.dumps(e["case"], sort_keys=True) for e in journal(folder)]
    assert len(cases) == len(set(cases)) > before, "no probe was repeated"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted(folder, number):
    fake(folder, tp={"sleep": 60})
    how = {"cwd": folder, "env": ENVIRONMENT, "stderr": subprocess.PIPE, "text": True}
    how["preexec_fn"] = partial(signal.signal, number, signal.SIG_DFL)  # a background job has none
    job = subprocess.Popen(command((0, ["--strategy", "tp"])), **how)
    pids = folder / "tp.pids"
    wait_for(lambda: pids.exists() and len(pids.read_text().split()) == 2)
    job.send_signal(number)
    _, said = job.communicate(timeout=60)
    assert "the same command goes on from here" in said
    assert not alive(folder)


@pytest.mark.slow
def test_on_gpus_every_rank_must_fit(folder):
    """Two ranks of one job, which meet over gloo: rank 1 runs out of memory, and rank 0 waits."""
    fake(folder, tp={"oom_above": [900, 500]})
    options = ["--strategy", "tp", "--memory-gib", "8"]
    measured = [*options, "--nproc", "2", "--lo", "496", "--hi", "512"]
    emulated = [*options, "--nproc", "4", "--lo", "896", "--hi", "912"]
    done, (real, alone) = run(folder, (2, measured), (1, emulated))
    row = real["results"][0]
    assert (row["longest"], row["how"], row["ranks"]) == (496, "measured", [0, 1]), done.stdout
    assert len(row["peak_memory_bytes"]) == 2
    assert [e["result"]["verdict"] for e in journal(folder)] == ["ran", "oom"] * 2
    row = alone["results"][0]
    assert (row["longest"], row["how"], row["ranks"]) == (896, "emulated", [0]), done.stdout
    assert not alive(folder)


def test_the_peak_is_the_steps_not_that_of_loading(folder):
    """Loading takes 6 GiB where there are 5: a prediction says so, on a GPU nothing can run."""
    fake(folder, tp={"loading_mib": 6000}, sp_megatron={"oom_loading": True})
    options = ["--memory-gib", "5", "--nproc", "1", "--lo", "5104", "--hi", "5120", "--strategy"]
    done, (predicted, real) = run(folder, (0, [*options, "tp"]), (1, [*options, "sp"]))
    row = predicted["results"][0]
    assert row["longest"] == 5104, done.stdout
    assert sum(row["breakdown"].values()) == row["peak_memory_bytes"][0] <= 5 * 2**30
    assert row["loading_peak_bytes"] == 6000 * 2**20
    assert "tp on 1 rank: loading, the whole model at once, takes more than there is" in done.stdout
    row = real["results"][0]
    assert (row["longest"], row["how"]) == (0, "measured")
    assert "sp_megatron on 1 rank: out of memory while loading model and opt" in done.stdout
    assert len(lengths(folder, "sp_megatron.py")) == 1, "a shorter sequence would not help"


def test_at_says_what_lengths_take_and_searches_nothing(folder):
    fake(folder, tp={"oom_above": [900]}, pp={"mib": [2, 1, 1, 1]})
    asked = ["--memory-gib", "3", "--strategy"]
    stages = (0, [*asked, "pp", "--nproc", "4", "--at", "2048", "512"])
    alone = (1, [*asked, "tp", "--nproc", "1", "--how", "emulated", "--at", "1024"])
    done, (out, _, real) = run(folder, stages, stages, alone)
    rows = out["results"][0]["at"]
    assert [(row["length"], row["fits"]) for row in rows] == [(2048, False), (512, True)]
    for row in rows:
        assert row["ranks"] == [0, 2, 3] and row["peak_moment"] == "forward"
        assert max(row["peak_memory_bytes"]) == sum(row["breakdown"].values())
        assert 0 <= max(row["peak_memory_bytes"]) - 2 * row["length"] * 2**20 < 4096
    assert len(lengths(folder, "pp.py")) == 6, "and the journal knows them the second time"
    assert re.search(r"pp on 4 ranks +2,048 .* 4.00 +0.00 +forward +no\n", done.stdout)
    assert "PASS oom_search: 1 of the 2 steps that were tried fit, 3 GiB" in done.stdout
    [row] = real["results"][0]["at"]
    assert (row["fits"], row["breakdown"], row["peak_moment"]) == (False, {}, None)
    assert re.search(r"tp on 1 rank +1,024 .* out of memory +no\n", done.stdout)
    assert "tp on 1 rank, 1,024 tokens: out of memory in the step: CUDA out" in done.stdout
    assert done.stdout.count("exit 0") == 3


@pytest.mark.parametrize("dtype,state,gradients", [(HALF, 12, 3), (SINGLE, 8, 2)])
def test_adamw_steps_one_parameter_after_another(dtype, state, gradients):
    """As AdamW on float32 weights does; its state, and what a step takes for itself, by hand."""
    sizes, tracker = [512, 2048, 1024], oom_search.Tracker("cpu", set(), set())
    with tracker:
        model = torch.nn.ParameterList(torch.full([n], 0.01, dtype=dtype) for n in sizes)
        model.append(model[0])  # tied
        optimizers = oom_search.make_adamw(model, host=False)
        for parameter in model[:2]:  # the third has no gradient
            parameter.grad = torch.linspace(-1, 1, len(parameter), dtype=dtype)
        tracker.restart()
        before, tracker.outside = tracker.now, "optimizer step"
        oom_search.optimizer_step(optimizers)
    parts, size = tracker.breakdown(model, optimizers), dtype.itemsize
    assert parts["optimizer state"] - state * sum(sizes) in (0, 3 * 512), "and a counter each"
    assert (parts["weights"], parts["gradients"]) == (size * sum(sizes), size * sum(sizes[:2]))
    assert tracker.peak - before == gradients * 4 * max(sizes) and tracker.moment == tracker.outside
    expected = [torch.full(p.shape, 0.01, dtype=dtype).float() for p in model[:2]]
    adamw = torch.optim.AdamW(expected, foreach=False)
    for scale in (0, 1):
        for master, parameter in zip(expected, model):
            master.grad = scale * parameter.grad.float()
        adamw.step()
    assert all(torch.equal(p, master.to(dtype)) for p, master in zip(model, expected))


# Attention: the kernel that a GPU would run


def kernel(monkeypatch, dtype, heads, kv_heads, d, capability, version="2.13.0+cu130"):
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion(version))
    query, key = (torch.empty(1, n, 4, d, dtype=dtype, device="meta") for n in (heads, kv_heads))
    return gpu_kernels.attention_kernel(query, key, capability)


KERNELS = [
    ((HALF, 8, 2, 64, 8.0), "flash", "compute capability 8.0"),
    ((HALF, 8, 8, 64, 9.0), "flash", "cuDNN"),
    ((HALF, 8, 8, 64, 7.5), "math", "none other knows bfloat16 on compute capability 7.5"),
    ((SINGLE, 8, 8, 64, 8.0), "memory-efficient", "no float32"),
    ((SINGLE, 8, 8, 66, 8.0), "math", "no heads of 66"),
    ((SINGLE, 8, 8, 66, 7.5), "memory-efficient", "no float32"),
    ((SINGLE, 8, 2, 64, 9.0), "math", "no GQA before PyTorch 2.14"),
    ((SINGLE, 8, 2, 64, 9.0, "2.14.0"), "memory-efficient", "no float32"),
    ((DOUBLE, 8, 8, 64, 9.0, "2.14.0"), "math", "none other knows float64"),
]


@pytest.mark.parametrize("case,name,why", KERNELS)
def test_the_kernel_is_that_of_a_gpu(monkeypatch, case, name, why):
    found = kernel(monkeypatch, *case)
    assert found[0] == name and why in found[1]


def test_no_prediction_for_a_kernel_that_is_not_known(monkeypatch):
    with pytest.raises(gpu_kernels.UnknownKernel, match="heads of 288; up to 256 would do"):
        kernel(monkeypatch, HALF, 8, 8, 288, 8.0)


def test_what_kernels_take_for_themselves():
    """By hand, from PyTorch's sources: b = 2, 4 heads, 100 tokens, d = 80."""
    query, fewer = (torch.empty(2, n, 100, 80, device="meta") for n in (4, 1))
    tiles = 2 * 2 * (16 + 4 * 64 * 64)  # of 64 tokens x 64 numbers, with a lock and a counter
    assert gpu_kernels.efficient_scratch(None, query, query) == 2 * 4 * (4 * 100 + tiles)
    assert gpu_kernels.efficient_scratch(None, query, fewer) == 2 * 4 * (
        400 + tiles + 2 * 100 * 320
    )
    assert gpu_kernels.flash_scratch(None, query, query) == 2 * 4 * 4 * 128 * (96 + 1)


# The real scripts


def measure_and_predict(model, file):
    """As rank 1 of 4, then alone, on a CPU: what steps have alive at their peak, and predictions.

    A CPU's allocator knows no blocks, nor do its kernels take what a GPU's do.
    """
    os.environ |= {"RANK": "1", "WORLD_SIZE": "4"}
    del os.environ["LOCAL_RANK"]  # a fake rank is alone: it speaks
    oom_search.BLOCK = 1
    gpu_kernels.SCRATCH.clear()
    common = ["--model", model, "--dtype", "float32", "--attn", "eager", "--batch", "2"]
    common += ["--mode", "benchmark", "--backend", "fake"]
    case = {"how": "predicted", "capability": 8.0, "plain": False, "optimizer": "none"}
    case |= {"recompute": "full", "tile": None, "head_chunks": 1}
    pairs, steps = [], []

    def leave(name):  # what a prediction changes in a script is not for a run
        dist.destroy_process_group()
        del sys.modules[name]

    for name, length in ("tp", 512), ("tp", 4), ("sp_megatron", 512), ("sp_ulysses", 512):
        argv = [*common, "--length", str(length)]
        importlib.import_module(name).main([*argv, "--bench-iters", "1", "--json", file])
        real = json.loads(Path(file).read_text())["benchmark"]["peak_memory_bytes"][0]
        predicted = oom_search.run_step(case | {"script": f"{name}.py", "argv": argv})
        pairs.append((name, length, real, predicted))
        leave(name)
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1"}
    case |= {"script": "tp.py", "argv": [*common, "--dtype", "bfloat16"]}
    for plain, optimizer in (True, "adamw"), (False, "adamw"), (False, "adamw-host"):
        for how in ("emulated", "predicted"):
            own = {"plain": plain, "optimizer": optimizer, "how": how}
            steps.append(oom_search.run_step(case | own))
            leave("tp")
    steps.append(oom_search.run_step(case))
    Path(file).write_text(json.dumps([pairs, steps]))


def test_prediction_is_what_a_run_takes(ranks, tmp_path):
    """Each script's predicted peak against the live tensors of its own benchmark mode on a CPU.

    On 4 ranks, with 4 tokens, loading the model takes more than the step: it must not count.
    """
    model, file = str(ranks.folder / "even"), str(tmp_path / "found.json")
    codes, output = ranks.live(1, measure_and_predict, model, file)
    assert codes == [0], output
    pairs, steps = json.loads(Path(file).read_text())
    for name, length, real, predicted in pairs:
        assert abs(predicted["peak"] / real - 1) < 0.01, (name, length, predicted, real)
        assert sum(predicted["breakdown"].values()) == predicted["peak"]
        if (name, length) == ("tp", 4):
            assert predicted["loading_peak_bytes"] > predicted["peak"]
    with torch.device("meta"):
        parameters = LlamaForCausalLM(LlamaConfig(**SMALL | MODELS["even"])).num_parameters()
    for real, predicted in (steps[:2], steps[2:4]):  # Hugging Face's own model; tp.py
        assert abs(predicted["peak"] / real["peak"] - 1) < 0.01
        assert predicted["breakdown"]["optimizer state"] == 12 * parameters
    assert steps[5] == steps[6], "what a prediction's host does is free"


ONE = "--strategy tp --nproc 1"
CHUNKS = "--model tiny --at 64 --head-chunks"  # 8 heads, 4 KV heads
UNUSABLE = {
    f"{ONE} {CHUNKS} 3": "--head-chunks 3: 1, 2, 4, 8 would do",
    f"--strategy ulysses --nproc 2 {CHUNKS} 4": "--head-chunks 4: 1, 2 would do",
    f"--strategy pp --nproc 2 --schedule zb {CHUNKS} 2": "--head-chunks 2: 1 would do",
    f"{ONE} --model ./nowhere": "no model ./nowhere: hub id, folder, .gguf, tiny, ",
    "--strategy plain --nproc 2 --model tiny --at 64": "plain runs on one GPU: --nproc 1 would do",
}


@pytest.fixture
def searched(ranks, tmp_path):
    """searched(command line) -> exit status, what was printed, the JSON."""

    def search(line):
        run = ranks(1, f"oom_search.py {line} --journal {tmp_path / 'journal'}")
        return run.codes[0], run.output, run.json

    return search


@pytest.mark.parametrize("kv_heads", [4, 1])
def test_the_matrix_is_made_only_where_a_gpu_would(searched, tmp_path, kv_heads):
    """1 GiB holds four matrices of 4 heads up to 4,096 tokens; without them there is more room."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "head_dim": 32, "num_key_value_heads": kv_heads}
    sizes |= {"vocab_size": 512, "model_type": "llama", "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    status, text, results = searched(f"{ONE} --dtype float32 --memory-gib 1 --model {tmp_path}")
    assert status == 0, text
    row = results["results"][0]
    said = re.search(r"^attention: (.*)", text, re.M)[1]
    assert said == row["attention"]
    if kv_heads == 4 or torch.__version__ >= (2, 14):
        assert said == "memory-efficient (flash knows no float32)" and row["longest"] > 100_000
    else:
        why = "math, which makes the s x s matrix (flash knows no float32, memory"
        assert said.startswith(why) and 3000 < row["longest"] <= 4096


@pytest.mark.slow
def test_a_t4_makes_the_matrix(searched):
    status, text, results = searched(f"{ONE} --model tiny --gpu t4 --step 4096")
    assert status == 0, text
    said = re.search(r"^attention: (.*)", text, re.M)[1]
    why = "math, which makes the s x s matrix (none other knows bfloat16 on compute capability 7.5)"
    assert said == results["results"][0]["attention"] == why


def test_full_logits_cost_what_they_weigh(searched):
    """llama-3.2-1b: SP doubles; full logits are most of the memory."""
    status, text, out = searched("--strategy sp --memory-gib 8 --step 1024 --loss full")
    assert status == 0, text
    one, two = out["results"]
    assert two["longest"] >= 1.8 * one["longest"]
    weigh = 8 * one["longest"] * 128256  # float32 once, and bfloat16 for them and their gradient
    assert one["breakdown"]["logits"] >= weigh
    assert one["peak_memory_bytes"][0] <= out["memory_bytes"]
    assert text.strip().splitlines()[-1].startswith("PASS oom_search: 2 of 2 limits found")


@pytest.mark.parametrize("line,why", UNUSABLE.items())
def test_what_no_strategy_can_is_unusable(searched, line, why):
    status, text, _ = searched(line)
    assert status == 2 and text.startswith(f"error: {why}") and text.count("\n") == 1, text


def test_plain_is_what_people_have(searched, tmp_path):
    """llama-3.2-1b: Hugging Face's loss makes all logits at once, whatever --loss says."""
    status, text, out = searched("--strategy plain --at 64 16384 --optimizer adamw")
    assert status == 0 and "PASS oom_search: 1 of the 2 steps that were tried fit" in text, text
    one, two = out["results"]
    assert (one["loss"], out["loss"], out["optimizer"]) == ("full", "chunked", "adamw")
    assert [row["peak_moment"] for row in one["at"]] == ["optimizer step", "backward"]
    parts, hidden = one["at"][1]["breakdown"], 2 * 16384 * 2048  # a layer's input
    assert parts["logits"] >= 10 * 16384 * 128256
    assert 17 * hidden < parts["saved activations"] < 21 * hidden, "checkpoints, and the last norm"
    assert two["verdict"] == "unusable" and "plain on 2 ranks: plain runs on one GPU" in text
    (tmp_path / "config.json").write_text('{"model_type": "olmo2"}')  # tp.py refuses it
    status, text, _ = searched(f"--strategy plain --nproc 1 --at 64 --model {tmp_path}")
    assert status == 0, text


def test_sharded_weights_are_gathered_a_layer_at_a_time(searched):
    """llama-3.2-1b: 2.5 GB of weights, of which a layer is 0.12 and what is in no layer 0.53."""
    line = "--strategy ulysses --nproc 4 --shard-weights --gpu t4 --optimizer adamw --at 64"
    status, text, out = searched(line)
    assert status == 0 and "(GiB for the allocator: one rank 13.6, several 12.6, all-to" in text
    [entry], numbers = out["results"][0]["at"], 1_235_814_400 / 4
    parts = entry["breakdown"]
    assert parts["weights"] == pytest.approx(2 * numbers, rel=1e-3)
    assert parts["optimizer state"] == pytest.approx(12 * numbers, rel=1e-3)
    # The latter four times (head and embedding each make its gradient), and no layer's
    assert sum(parts.values()) < 16 * numbers + 2.5e9


def test_peers_leave_a_card_less_memory():
    options = oom_search.parse(["--gpu", "h100"])
    one, several, all_to_all = (
        oom_search.budget(name, world, options) / 2**30
        for name, world in (("sp_ulysses", 1), ("tp", 2), ("sp_ulysses", 2))
    )
    assert (one, several, all_to_all) == pytest.approx((78.1, 77.1, 75.1))
    options = oom_search.parse(["--memory-gib", "40"])  # what the allocator has
    assert oom_search.budget("sp_ulysses", 8, options) == 40 * 2**30


BAD = [
    (["--nproc", "0"], "argument --nproc: 0 is not a whole number above 0"),
    (["--memory-gib", "none"], "argument --memory-gib: none is not a number above 0"),
    (["--lo", "9", "--hi", "8"], "--lo 9 is not below --hi 8"),
    (["--at", "9", "--hi", "8"], "--at searches nothing: without --lo and --hi it would do"),
    (["--strategy", "dp"], "argument --strategy: invalid choice: 'dp'"),
    (["--gpu", "h100", "--memory-gib", "9"], "give one of them"),
    (["--how", "measured"], "--how measured on 2 GPUs, and this machine has"),
    (["--how", "emulated"], "--how emulated needs one GPU; predicted needs none"),
    (["--json", "/nowhere/at/all.json"], "cannot write /nowhere/at/all.json"),
]


@pytest.mark.parametrize("options,message", BAD)
def test_bad_input_is_one_line(capsys, monkeypatch, options, message):
    monkeypatch.setattr(oom_search, "gpu_count", lambda: 0)
    assert oom_search.main(options) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("error: ") and said.err.count("\n") == 1
    assert message in said.err
