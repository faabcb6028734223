"""tp.py, sp_megatron.py, sp_ulysses.py as a user runs them: what holds, and what is refused."""

import json
import os
import re
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, python, torchrun
from transformers import LlamaConfig

sys.path.insert(0, str(ROOT))
import tp  # noqa: E402

SCRIPTS = {"tp": ["tp.py"], "tp_dtensor": ["tp.py", "--dtensor"]}
SCRIPTS |= {name: [f"{name}.py"] for name in ("sp_megatron", "sp_ulysses")}
MANUAL = ["tp", "sp_megatron", "sp_ulysses"]
KINDS = {"shard": 74, "logits": 1, "loss": 2, "grad": 75, "grad_norm": 1, "weight": 74}
# LLaMA as it really comes. 2, 3 and 4 divide none of vocabulary 101, length 37, intermediate 46.
SHAPES = {}
for kv in (1, 2, 3, 4):
    SHAPES[f"kv{kv}"] = {"num_key_value_heads": kv, "tie_word_embeddings": kv % 2 == 0}
SHAPES |= {
    "bias": {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True, "pad_token_id": 7},
    "bias_kv1": {"num_key_value_heads": 1, "attention_bias": True, "tie_word_embeddings": True},
    "head_dim": {"num_key_value_heads": 4, "head_dim": 10},
    "padding": {"num_key_value_heads": 4, "pad_token_id": 60, "tie_word_embeddings": False},
}
WORKS = {
    "kv1": (2, 3, 4),
    "kv2": (2, 4),
    "kv3": (2, 3),
    "kv4": (2, 3, 4),
}  # by 12 heads; rest is refused
VARIANTS = {
    "kv4": ["--attn", "eager", "--batch", "3"],
    "kv2": ["--loss", "full", "--recompute", "none"],
    "kv1": ["--attn", "eager", "--loss", "full"],
    "bias": ["--batch", "3", "--recompute", "none"],
}
FAST = {(2, name) for name in SHAPES} | {(3, "kv2"), (3, "kv3"), (3, "bias_kv1")}
CHUNK = "LOSS_CHUNK=15"  # so that a short sequence takes several chunks
FOLDER = ROOT / "tests" / ".shapes"


def shape(name):
    """A directory with only a config.json, as --model takes it."""
    folder = FOLDER / name
    config = LlamaConfig(
        vocab_size=101, hidden_size=48, intermediate_size=46, num_hidden_layers=2,
        num_attention_heads=12, initializer_range=0.2, max_position_embeddings=4096, **SHAPES[name],
    )  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    text, file = config.to_json_string(), folder / "config.json"
    if not file.exists() or file.read_text() != text:  # several workers may: whole or not at all
        draft = folder / f"config.{os.getpid()}"
        draft.write_text(text)
        draft.replace(file)
    return str(folder)


def all_modes(script, dtype):
    length = "128" if dtype == "bfloat16" else "64"  # its errors differ less over more tokens
    options = f"--mode all --dtype {dtype} --length {length} --bench-iters 1"
    return [*SCRIPTS[script], *options.split()]


def bfloat16(script):
    return [*SCRIPTS[script], "--dtype", "bfloat16", "--length", "128"]


def exact(script):
    return [*SCRIPTS[script], "--dtype", "float64", "--length", "64"]


def again(script):
    return [*exact(script), "--seed", "0"]  # which is the default


def shaped(script, name):
    return [*SCRIPTS[script], "--model", shape(name), "--length", "37", *VARIANTS.get(name, [])]


def traffic(script, name):
    """A benchmark whose loss takes several chunks, at a length that no number of ranks divides."""
    options = "--mode benchmark --length 37 --bench-iters 1"
    return [CHUNK, *SCRIPTS[script], "--model", shape(name), *options.split()]


def chunked(script):
    """A loss of several chunks. DTensor cannot cut the odd sizes of shape()."""
    model = [] if script == "tp_dtensor" else ["--model", shape("kv4")]
    return [CHUNK, *SCRIPTS[script], "--length", "37", *model]


def tiled(script):
    """MLP and norms in tiles (not DTensor's), the last one shorter; inputs in the host's memory."""
    model = [] if script == "tp_dtensor" else ["--model", shape("kv4")]
    options = "--recompute offload --tile 7 --length 64 --dtype float64"
    return [*SCRIPTS[script], *model, *options.split()]


def by_token(script):
    """A tile smaller than the batch: a token of each sequence at a time."""
    options = "--tile 1 --batch 3 --length 13"
    return [*SCRIPTS[script], "--model", shape("kv4"), *options.split()]


def commands(ranks):
    """What is run on a set of ranks, in one go, by the tests that are not slow."""
    rows = [all_modes(script, "float32") for script in SCRIPTS]
    rows += [exact(script) for script in SCRIPTS if ranks != 3]
    rows += [shaped(script, name) for script in MANUAL for name in SHAPES if (ranks, name) in FAST]
    if ranks in (2, 3):
        rows += [traffic(script, name) for script in MANUAL for name in ("kv1", "kv4")]
    if ranks == 2:
        rows += [again(script) for script in SCRIPTS] + [bfloat16(script) for script in SCRIPTS]
        rows += [chunked(script) for script in SCRIPTS] + [tiled(script) for script in SCRIPTS]
        rows += list(map(by_token, MANUAL))
    return rows


def slow_commands(ranks):
    """The rest of it, for 3 and 4 ranks."""
    rows = [shaped(script, name) for script in MANUAL for name in SHAPES]
    rows = [row for row in rows if (ranks, Path(row[-1]).name) not in FAST]
    return rows + [how(script) for script in SCRIPTS for how in (bfloat16, exact) if ranks == 4]


@pytest.mark.parametrize("ranks,script", [[p, s] for p in (1, 2, 3) for s in SCRIPTS])
def test_all_modes_hold(outcomes, ranks, script):
    outcome = outcomes(ranks, commands(ranks), all_modes(script, "float32"))
    if (ranks, script) == (3, "tp_dtensor"):  # tiny's 4 KV heads are not a multiple of 3
        assert outcome["exit"] == 2
        assert "; 1, 2 would do, or tp.py without --dtensor" in outcome["output"]
        return
    all_modes_hold(outcome, ranks, script, "float32")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("ranks,script", [[p, s] for p in (1, 2, 4) for s in SCRIPTS])
def test_all_modes_hold_on_more_ranks_and_in_bfloat16(outcomes, ranks, script, dtype):
    rows = [all_modes(s, dtype) for s in SCRIPTS]
    all_modes_hold(outcomes(ranks, rows, all_modes(script, dtype)), ranks, script, dtype)


def all_modes_hold(outcome, ranks, script, dtype):
    assert outcome["exit"] == 0, outcome["output"]
    results = outcome["json"]
    assert results["world_size"] == ranks and results["dtype"] == dtype
    modes = ("correctness", "learning", "benchmark")
    correctness, learning, benchmark = (results[mode] for mode in modes)
    kinds = Counter(tensor["kind"] for tensor in correctness["tensors"])
    # 8 layers of 9 parameters, the embedding (tied to the head), the last norm; the embeddings'
    # gradient; and the loss a second time, of large logits
    assert kinds == KINDS
    assert all(abs(tensor["owned"] - 1) < 1e-9 for tensor in correctness["tensors"])
    assert correctness["passed"] and learning["passed"] and benchmark["passed"]
    assert correctness["tolerance"] == 1.5
    assert 0 < correctness["rounding_ratio"] <= 1.5
    if dtype == "float32":
        assert abs(correctness["loss"] / correctness["loss_reference"] - 1) < 1e-5
        pairs = zip(learning["loss"], learning["loss_reference"], strict=True)
        assert all(abs(a - b) <= 1e-4 * b for a, b in pairs)
    assert learning["loss"][-1] < 0.8 * learning["loss"][0]
    assert len(benchmark["peak_memory_bytes"]) == ranks
    assert all(row["bytes"] == row["expected_bytes"] for row in benchmark["traffic"])
    alone = ranks == 1 and script != "tp_dtensor"  # PyTorch's reduces alone, too
    assert bool(benchmark["traffic"]) != alone
    assert benchmark["forward_s"]["median"] > 0


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_same_seed_gives_the_same_numbers(outcomes, script):
    one, two = (outcomes(2, commands(2), make(script))["json"] for make in (exact, again))
    assert one["correctness"] == two["correctness"], "bit for bit"


@pytest.mark.parametrize("ranks,script", [[p, s] for p in (1, 2) for s in SCRIPTS])
def test_float64_is_exact(outcomes, ranks, script):
    outcome = outcomes(ranks, commands(ranks), exact(script))
    assert outcome["exit"] == 0, outcome["output"]
    tensors = outcome["json"]["correctness"]["tensors"]
    assert max(tensor["relative_error"] for tensor in tensors) < 1e-10


@pytest.mark.parametrize("script", SCRIPTS)
def test_bfloat16_is_as_good_as_on_one_device(outcomes, script):
    outcome = outcomes(2, commands(2), bfloat16(script))
    assert outcome["exit"] == 0, outcome["output"]


@pytest.mark.parametrize("ranks,script,name", [[p, s, n] for p, n in sorted(FAST) for s in MANUAL])
def test_shapes_hold_or_are_refused(outcomes, ranks, script, name):
    outcome = outcomes(ranks, commands(ranks), shaped(script, name))
    shape_holds_or_is_refused(outcome, ranks, name)


def shape_holds_or_is_refused(outcome, ranks, name):
    if ranks in WORKS.get(name, (2, 3, 4)):
        assert outcome["exit"] == 0, outcome["output"]
        assert outcome["json"]["correctness"]["passed"]
    else:
        counts = {"kv2": "1, 2, 4, 6, 8, 10, 12", "kv3": "1, 2, 3, 6, 9, 12"}[name]
        kv = SHAPES[name]["num_key_value_heads"]
        assert outcome["exit"] == 2
        assert outcome["output"] == (
            f"error: 12 heads with {kv} KV heads cannot be split over {ranks} ranks; "
            f"these rank counts would do: {counts}\n"
        )


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [3, 4])
def test_more_ranks(outcomes, ranks):
    """The shapes that the quick tests do not run on so many ranks, and bfloat16."""
    rows = slow_commands(ranks)
    for command in rows:
        outcome = outcomes(ranks, rows, command)
        if "--model" in command:
            name = Path(command[command.index("--model") + 1]).name
            shape_holds_or_is_refused(outcome, ranks, name)
        else:
            assert outcome["exit"] == 0, outcome["output"]


@pytest.mark.parametrize(
    "ranks,script,name", [[p, s, n] for p in (2, 3) for s in MANUAL for n in ("kv1", "kv4")]
)
def test_traffic_is_as_the_formula_says(outcomes, ranks, script, name):
    outcome = outcomes(ranks, commands(ranks), traffic(script, name))
    assert outcome["exit"] == 0, outcome["output"]
    rows = outcome["json"]["benchmark"]["traffic"]
    assert rows and all(row["bytes"] == row["expected_bytes"] > 0 for row in rows)
    assert all(row["count"] == row["expected_count"] for row in rows)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_loss_in_several_chunks(outcomes, script):
    outcome = outcomes(2, commands(2), chunked(script))
    assert outcome["exit"] == 0, outcome["output"]


@pytest.mark.parametrize("script", SCRIPTS)
def test_tiles_and_offloading_change_nothing(outcomes, script):
    outcome = outcomes(2, commands(2), tiled(script))
    assert outcome["exit"] == 0, outcome["output"]


@pytest.mark.parametrize("script", MANUAL)
def test_a_tile_is_never_empty(outcomes, script):
    outcome = outcomes(2, commands(2), by_token(script))
    assert outcome["exit"] == 0, outcome["output"]


def tiled_linear(out_features, tile):
    """A linear layer that runs in tiles of a model whose MLP has 12 features: (it, tile sizes)."""
    sizes = []

    class Linear(torch.nn.Linear):
        def forward(self, x):
            sizes.append(x.shape[1])
            return super().forward(x)

    block = Linear(6, out_features, bias=False)
    args = SimpleNamespace(tile=tile, config=SimpleNamespace(intermediate_size=12))
    tp.wrap(block, partial(tp.run_in_tiles, args))
    return block, sizes


def test_a_block_runs_on_a_tile_at_a_time():
    """4 of 10 tokens at once, for a block a fourth as wide as the MLP; again in the backward."""
    block, sizes = tiled_linear(out_features=3, tile=2)
    x = torch.randn(2, 10, 6, requires_grad=True)
    out = block(x)
    assert sizes == [4, 4, 2]
    torch.testing.assert_close(out, torch.nn.functional.linear(x, block.weight))
    out.sum().backward()
    assert sizes[3:] == [2, 4, 4]


def test_dtensor_runs_in_no_tiles():
    """Each would send messages of its own."""
    args = tp.parse(["--dtensor", "--tile", "1"])
    block, sizes = tiled_linear(out_features=12, tile=args.tile)
    block(torch.randn(2, 10, 6))
    assert sizes == [10]


def test_offloading_keeps_a_layers_input_in_the_hosts_memory(monkeypatch):
    """On a CPU both memories are one: what is seen here is what goes to save_on_cpu."""
    kept = []

    def save_on_cpu(pin_memory):
        assert not pin_memory, "of no use without a GPU"
        pack = lambda x: kept.append(tuple(x.shape)) or x  # noqa: E731
        return torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x)

    monkeypatch.setattr(tp, "save_on_cpu", save_on_cpu)
    layers = torch.nn.Linear(6, 50), torch.nn.ReLU(), torch.nn.Linear(50, 6)
    for how, expected in (("block", []), ("offload", [(4, 6)])):
        args = SimpleNamespace(recompute=how, device=torch.device("cpu"))
        inner = torch.nn.Sequential(*layers).forward
        tp.recompute(args, inner, torch.randn(4, 6, requires_grad=True)).sum().backward()
        assert kept == expected, "the input, nothing that it becomes"


@pytest.mark.parametrize("rows,right", [(1, False), (2, True), (3, False)])
def test_a_tensor_is_as_large_as_its_shard(rows, right):
    """Its first rows being right is not enough: rank 0 of 2 holds two of four."""
    key, tensor = ("shard", "weight"), torch.ones(rows, 3)
    tensor.shard, tensor.replicas = (0, 0, 2), 1
    full = {key: torch.ones(4, 3)}
    error, *_ = tp.compare({key: tensor}, full, full)[key]
    assert error == (0 if right else float("inf"))


FORGETFUL = """
import sys
sys.path.insert(0, ".")
import tp
right = tp.parallelize_module
tp.parallelize_module = lambda model, mesh, plan: right(
    model, mesh, {name: style for name, style in plan.items() if "mlp" not in name}
)
sys.exit(tp.main(["--dtensor", "--length", "64"]))
"""


def test_a_plan_that_forgets_the_mlp_is_caught(tmp_path):
    """Every rank then computes all of it: all numbers are right, and nothing was gained."""
    (tmp_path / "forgetful.py").write_text(FORGETFUL)
    done = torchrun(2, tmp_path / "forgetful.py")
    assert done.returncode == 1 and "mlp.gate_proj.weight" in done.stdout.splitlines()[-1], (
        done.stdout
    )


def test_results_are_strict_json_and_nothing_else_is_left(tmp_path):
    files = {kind: tmp_path / f"results.{kind}" for kind in ("json", "trace")}
    options = ["--mode", "all", "--length", "64", "--bench-iters", "1"]
    run = python("tp.py", *options, "--json", files["json"], "--profile", files["trace"])
    assert run.returncode == 0, run.stdout + run.stderr
    assert json.loads(files["trace"].read_text())["traceEvents"]
    keys = "script strategy world_size backend device model dtype batch length versions"
    keys += " correctness learning benchmark"
    assert set(json.loads(files["json"].read_text())) >= set(keys.split())
    assert sorted(tmp_path.iterdir()) == sorted(files.values())


@pytest.mark.slow
@pytest.mark.parametrize("script", ["sp_megatron"])
def test_long_sequences_on_a_laptop(script, tmp_path):
    """No score matrix, s by s for each head: at 8192 tokens a rank's 4 would need 1 GiB."""
    file = tmp_path / "long.json"
    options = ["--length", "8192", "--batch", "1", "--mode", "benchmark", "--bench-iters", "1"]
    run = torchrun(2, *SCRIPTS[script], *options, "--json", file, timeout=900)
    assert run.returncode == 0, run.stdout + run.stderr
    benchmark = json.loads(file.read_text())["benchmark"]
    assert all(row["bytes"] == row["expected_bytes"] for row in benchmark["traffic"])
    assert max(benchmark["peak_memory_bytes"]) < 2**28


PADDED = """
import sys
sys.path.insert(0, ".")
import torch, sp_ulysses as u
def compare(args, group):
    ids, _ = u.proof_batch(args, group)
    own = slice(group.rank() * 8, (group.rank() + 1) * 8)
    kept = torch.ones_like(ids)
    kept[0, :9] = 0  # a short sequence, padded on the left: all of rank 0's tokens, one of rank 1's
    kept[1, 13:] = 0  # and another on the right
    plain = u.load_model(args)(input_ids=ids, attention_mask=kept, use_cache=False).logits
    for args.attention in ("eager", "sdpa"):
        ours = u.make_parallel(u.load_model(args), group, args)(
            input_ids=ids[:, own], attention_mask=kept[:, own], use_cache=False,
            position_ids=torch.arange(16)[None, own],
        ).logits
        apart = (ours - plain[:, own])[kept[:, own] == 1].abs()
        print(f"{args.attention} {group.rank()} {len(apart)} tokens\\n", end="")
        assert apart.max() < 1e-12
    return "", {"passed": True}
u.MODES["correctness"] = compare  # run as the script runs it, which leaves no thread behind
sys.exit(u.main("--length 16 --batch 2 --dtype float64 --recompute none".split()
                + ["--mode", "correctness"]))
"""


def test_ulysses_keeps_a_padding_mask(tmp_path):
    """A mask of a rank's own tokens, as HF's model takes it, holds for the tokens of all."""
    (tmp_path / "padded.py").write_text(PADDED)
    done = torchrun(2, tmp_path / "padded.py")
    assert done.returncode == 0, done.stderr
    compared = re.findall(r"(\w+ \d \d+) tokens", done.stdout)
    assert sorted(compared) == ["eager 0 8", "eager 1 12", "sdpa 0 8", "sdpa 1 12"]
