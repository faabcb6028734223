"""tp.py, sp_megatron.py, sp_ulysses.py as a user runs them: what holds, is refused, must be caught."""

import importlib
import json
import os
import re
import sys
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
BUGS = {
    "tp": "missing_backward_all_reduce missing_forward_reduction all_reduce_both_ways wrong_shard "
    "unmasked_embedding local_softmax loss_by_local_count no_op_parallelize",
    "sp_megatron": "missing_backward_reduction missing_forward_reduction unsummed_norm_gradient "
    "local_position_ids shift_after_split wrong_shard local_softmax loss_by_local_count no_op_parallelize",
    "sp_ulysses": "no_op_ulysses wrong_head_order missing_gradient_sum local_position_ids shift_after_split "
    "loss_by_local_count no_op_parallelize",
}
CULPRIT = {  # what each bug breaks first, in the order of computation
    "missing_backward_all_reduce": "model.norm.weight",
    "missing_backward_reduction": "model.norm.weight",
    "missing_forward_reduction": "logits",
    "all_reduce_both_ways": "model.layers.7.post_attention_layernorm.weight",
    "wrong_shard": "model.layers.0.self_attn.o_proj.weight",
    "unmasked_embedding": "logits",
    "local_softmax": "loss",
    "loss_by_local_count": "loss",
    "no_op_parallelize": "model.embed_tokens.weight",
    "unsummed_norm_gradient": "model.norm.weight",
    "local_position_ids": "logits",
    "shift_after_split": "loss",
    "no_op_ulysses": "logits",
    "wrong_head_order": "logits",
    "missing_gradient_sum": "model.norm.weight",
    ("sp_ulysses", "no_op_parallelize"): "logits",  # its weights are whole on every rank, as they should be
}

# LLaMA as it really comes. Nothing below divides by 2, 3 and 4: vocabulary 101, length 37, intermediate 46.
SHAPES = {f"kv{kv}": {"num_key_value_heads": kv, "tie_word_embeddings": kv % 2 == 0} for kv in (1, 2, 3, 4)}
SHAPES |= {
    "bias": {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True, "pad_token_id": 7},
    "bias_kv1": {"num_key_value_heads": 1, "attention_bias": True, "tie_word_embeddings": True},
    "head_dim": {"num_key_value_heads": 4, "head_dim": 10},
    "padding": {"num_key_value_heads": 4, "pad_token_id": 60, "tie_word_embeddings": False},
}
WORKS = {"kv1": (2, 3, 4), "kv2": (2, 4), "kv3": (2, 3), "kv4": (2, 3, 4)}  # by 12 heads; rest is refused
VARIANTS = {
    "kv4": ["--attn", "eager", "--batch", "3"],
    "kv2": ["--loss", "full", "--recompute", "none"],
    "kv1": ["--attn", "eager", "--loss", "full"],
    "bias": ["--batch", "3", "--recompute", "none"],
}
FAST = {(2, name) for name in SHAPES} | {(3, "kv2"), (3, "kv3"), (3, "bias_kv1"), (4, "kv1"), (4, "kv3")}
FOLDER = ROOT / "tests" / ".shapes"


def shape(name):
    """A directory with only a config.json, as --model takes it."""
    folder = FOLDER / name
    config = LlamaConfig(
        vocab_size=101, hidden_size=48, intermediate_size=46, num_hidden_layers=2, num_attention_heads=12,
        initializer_range=0.2, max_position_embeddings=4096, **SHAPES[name],
    )  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    text, file = config.to_json_string(), folder / "config.json"
    if not file.exists() or file.read_text() != text:  # several workers may write it: whole or not at all
        draft = folder / f"config.{os.getpid()}"
        draft.write_text(text)
        draft.replace(file)
    return str(folder)


def all_modes(script, dtype):
    length = "128" if dtype == "bfloat16" else "64"  # its errors differ less over more tokens
    return [*SCRIPTS[script], "--mode", "all", "--dtype", dtype, "--length", length, "--bench-iters", "1"]


def bfloat16(script):
    return [*SCRIPTS[script], "--dtype", "bfloat16", "--length", "128"]


def exact(script):
    return [*SCRIPTS[script], "--dtype", "float64"]


def again(script):
    return [*exact(script), "--seed", "0"]  # which is the default


def shaped(script, name):
    return [*SCRIPTS[script], "--model", shape(name), "--length", "37", *VARIANTS.get(name, [])]


def traffic(script, name):
    """A benchmark whose loss takes several chunks, at a length that no number of ranks divides."""
    return [
        *SCRIPTS[script],
        "--model",
        shape(name),
        "--mode",
        "benchmark",
        "--length",
        "37",
        "--batch",
        "300",
        "--bench-iters",
        "1",
    ]


def sabotaged(script, bug):
    return [*SCRIPTS[script], "--inject-bug", bug, "--length", "64"]


def chunked(script):
    """A loss of several chunks: of 2048 tokens a rank. DTensor cannot cut the odd sizes of shape()."""
    size = ["--batch", "115"] if script == "tp_dtensor" else ["--batch", "300", "--model", shape("kv4")]
    return [*SCRIPTS[script], "--length", "37", *size]


def tiled(script):
    """MLP and norms in tiles of which the last is shorter (not DTensor's), inputs in the host's memory."""
    model = [] if script == "tp_dtensor" else ["--model", shape("kv4")]
    options = ["--recompute", "offload", "--tile", "7", "--length", "64", "--bench-iters", "1"]
    return [*SCRIPTS[script], *model, *options, "--dtype", "float64", "--mode", "all"]


def by_token(script):
    """A tile smaller than the batch: a token of each sequence at a time."""
    return [*SCRIPTS[script], "--model", shape("kv4"), "--tile", "1", "--batch", "3", "--length", "13"]


def commands(ranks):
    """What is run on a set of ranks, in one go, by the tests that are not slow."""
    rows = [all_modes(script, "float32") for script in SCRIPTS if ranks in (1, 2)]
    rows += [exact(script) for script in SCRIPTS if ranks != 3]
    rows += [shaped(script, name) for script in MANUAL for name in SHAPES if (ranks, name) in FAST]
    if ranks in (2, 3):
        rows += [traffic(script, name) for script in MANUAL for name in ("kv1", "kv4")]
    if ranks == 2:
        rows += [again(script) for script in SCRIPTS] + [bfloat16(script) for script in SCRIPTS]
        rows += [sabotaged(script, bug) for script in MANUAL for bug in BUGS[script].split()]
        rows += [sabotaged("tp_dtensor", bug) for bug in BUGS["tp"].split()] + list(map(by_token, MANUAL))
        rows += [chunked(script) for script in SCRIPTS] + [tiled(script) for script in SCRIPTS]
    return rows


def slow_commands(ranks):
    """The rest of it, for 3 and 4 ranks."""
    rows = [shaped(script, name) for script in MANUAL for name in SHAPES if (ranks, name) not in FAST]
    rows += [sabotaged(script, bug) for script in MANUAL for bug in BUGS[script].split()]
    if ranks == 4:
        rows += [bfloat16(script) for script in SCRIPTS]
    return rows


@pytest.mark.parametrize("ranks,script", [[p, s] for p in (1, 2) for s in SCRIPTS])
def test_all_modes_hold(outcomes, ranks, script):
    all_modes_hold(outcomes(ranks, commands(ranks), all_modes(script, "float32")), ranks, script, "float32")


@pytest.mark.slow
@pytest.mark.parametrize("ranks,script", [[p, s] for p in (1, 2, 4) for s in SCRIPTS])
def test_all_modes_hold_in_bfloat16(outcomes, ranks, script):
    rows = [all_modes(s, "bfloat16") for s in SCRIPTS]
    all_modes_hold(outcomes(ranks, rows, all_modes(script, "bfloat16")), ranks, script, "bfloat16")


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_all_modes_hold_on_four_ranks(outcomes, script):
    rows = [all_modes(s, "float32") for s in SCRIPTS]
    all_modes_hold(outcomes(4, rows, all_modes(script, "float32")), 4, script, "float32")


def all_modes_hold(outcome, ranks, script, dtype):
    assert outcome["exit"] == 0, outcome["output"]
    results = outcome["json"]
    assert results["world_size"] == ranks and results["dtype"] == dtype
    correctness, learning, benchmark = (results[mode] for mode in ("correctness", "learning", "benchmark"))
    kinds = [tensor["kind"] for tensor in correctness["tensors"]]
    # 8 layers of 9 parameters, the embedding (tied to the head), the last norm; and the embeddings' gradient
    assert [kinds.count(kind) for kind in ("shard", "logits", "grad", "weight")] == [74, 1, 75, 74]
    assert all(abs(tensor["owned"] - 1) < 1e-9 for tensor in correctness["tensors"])
    assert correctness["passed"] and learning["passed"] and benchmark["passed"]
    if dtype == "float32":
        assert correctness["tolerance"] == 1e-5 >= correctness["worst"]["relative_error"]
        assert abs(correctness["loss"] / correctness["loss_reference"] - 1) < 1e-5
        pairs = zip(learning["loss"], learning["loss_reference"], strict=True)
        assert all(abs(a - b) <= 1e-4 * b for a, b in pairs)
    assert learning["loss"][-1] < 0.8 * learning["loss"][0]
    assert len(benchmark["peak_memory_bytes"]) == ranks
    assert all(row["bytes"] == row["expected_bytes"] for row in benchmark["traffic"])
    assert bool(benchmark["traffic"]) == (ranks > 1 or script == "tp_dtensor")  # PyTorch's reduces alone, too
    assert 0 < benchmark["forward_s"]["median"] < benchmark["forward_backward_s"]["median"]


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_same_seed_gives_the_same_numbers(outcomes, script):
    one, two = (outcomes(2, commands(2), make(script))["json"] for make in (exact, again))
    assert one["correctness"] == two["correctness"], "bit for bit"


@pytest.mark.parametrize("ranks,script", [[p, s] for p in (1, 2, 4) for s in SCRIPTS])
def test_float64_is_exact(outcomes, ranks, script):
    outcome = outcomes(ranks, commands(ranks), exact(script))
    assert outcome["exit"] == 0, outcome["output"]
    assert outcome["json"]["correctness"]["worst"]["relative_error"] < 1e-10


@pytest.mark.parametrize("script", SCRIPTS)
def test_bfloat16_is_as_good_as_on_one_device(outcomes, script):
    outcome = outcomes(2, commands(2), bfloat16(script))
    assert outcome["exit"] == 0, outcome["output"]
    assert outcome["json"]["correctness"]["bfloat16_ratio"] <= 1.5


@pytest.mark.parametrize("ranks,script,name", [[p, s, n] for p, n in sorted(FAST) for s in MANUAL])
def test_shapes_hold_or_are_refused(outcomes, ranks, script, name):
    shape_holds_or_is_refused(outcomes(ranks, commands(ranks), shaped(script, name)), ranks, name)


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
    """The shapes and bugs that the quick tests do not run on so many ranks, and bfloat16."""
    rows = slow_commands(ranks)
    for command in rows:
        outcome, script = outcomes(ranks, rows, command), command[0].removesuffix(".py")
        if "--inject-bug" in command:
            bug_is_caught(outcome, script, command[command.index("--inject-bug") + 1])
        elif "--model" in command:
            name = Path(command[command.index("--model") + 1]).name
            shape_holds_or_is_refused(outcome, ranks, name)
        else:
            assert outcome["exit"] == 0, outcome["output"]


@pytest.mark.parametrize(
    "ranks,script,name",
    [[p, s, n] for p in (2, 3) for s in MANUAL for n in ("kv1", "kv4")],
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
    assert outcome["json"]["correctness"]["worst"]["relative_error"] < 1e-10


@pytest.mark.parametrize("script", MANUAL)
def test_a_tile_is_never_empty(outcomes, script):
    outcome = outcomes(2, commands(2), by_token(script))
    assert outcome["exit"] == 0, outcome["output"]


def test_a_block_runs_on_a_tile_at_a_time():
    """4 of 10 tokens at once, for a block a fourth as wide as the model's MLP; again in the backward."""
    block, sizes = torch.nn.Linear(6, 3, bias=False), []
    args = SimpleNamespace(tile=2, config=SimpleNamespace(intermediate_size=12))

    def forward(x):
        sizes.append(x.shape[1])
        return block(x)

    x = torch.randn(2, 10, 6, requires_grad=True)
    out = tp.run_in_tiles(block, forward, args, x)
    assert torch.equal(out, block(x)) and sizes == [4, 4, 2]
    out.sum().backward()
    assert sizes[3:] == [2, 4, 4]


def test_dtensor_runs_in_no_tiles():
    """Each would send messages of its own. Here the block's widest matrix is not the model's MLP's."""
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 12, "hidden_size": 48}
    args = SimpleNamespace(dtensor=True, inject_bug=None, batch=2, length=10, tile=4)
    args.config = SimpleNamespace(**sizes, vocab_size=8)
    tp.check_shape(args, 2)
    x = torch.randn(2, 10, 12)
    assert tp.run_in_tiles(torch.nn.Linear(12, 48), lambda x: x, args, x) is x


def test_offloading_keeps_a_layers_input_in_the_hosts_memory(monkeypatch):
    """On a CPU both memories are one: what is seen here is what goes to save_on_cpu."""
    kept = []

    def save_on_cpu(pin_memory):
        assert not pin_memory, "of no use without a GPU"
        return torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.shape) or x, lambda x: x)

    monkeypatch.setattr(tp, "save_on_cpu", save_on_cpu)
    layer = torch.nn.Sequential(torch.nn.Linear(6, 50), torch.nn.ReLU(), torch.nn.Linear(50, 6))
    for recompute, expected in (("block", []), ("offload", [(4, 6)])):
        args = SimpleNamespace(recompute=recompute, device=torch.device("cpu"))
        tp.run_again(layer.forward, args, torch.randn(4, 6, requires_grad=True)).sum().backward()
        assert [tuple(shape) for shape in kept] == expected, "the input, nothing that it becomes"


@pytest.mark.parametrize("script,bug", [[s, b] for s in MANUAL for b in BUGS[s].split()])
def test_every_bug_is_caught_and_its_culprit_named(outcomes, script, bug):
    bug_is_caught(outcomes(2, commands(2), sabotaged(script, bug)), script, bug)


@pytest.mark.parametrize("bug", BUGS["tp"].split())
def test_a_bug_of_our_code_is_none_of_dtensors(outcomes, bug):
    outcome = outcomes(2, commands(2), sabotaged("tp_dtensor", bug))
    if bug in ("loss_by_local_count", "no_op_parallelize"):
        assert outcome["exit"] == 1, outcome["output"]
    else:
        said = f"error: --inject-bug {bug} is a bug of our own code, which --dtensor does not run\n"
        assert (outcome["exit"], outcome["output"]) == (2, said)


@pytest.mark.parametrize("rows,right", [(1, False), (2, True), (3, False)])
def test_a_tensor_is_as_large_as_its_part(rows, right):
    """Its first rows being right is not enough: rank 0 of 2 holds two of four."""
    key = "shard", "weight"
    seen = {key: (torch.ones(rows, 3), (0, 0, 2), 1)}
    error, *_ = tp.compare(seen, {key: (torch.ones(4, 3),)}, None, {})[key]
    assert error == (0 if right else float("inf"))


def test_signs_of_life_read_no_file(monkeypatch):
    """That takes long, and as long live the frames that are looked at, with their tensors: peak memory."""
    monkeypatch.setattr("linecache.checkcache", lambda *_: pytest.fail("source files are read"))
    said, over = {}, iter([False, True])
    tp.give_signs(SimpleNamespace(set=said.__setitem__), 0, SimpleNamespace(wait=lambda _: next(over)))
    assert said == {"at 0": "give_signs"}


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
    assert done.returncode == 1 and "mlp.gate_proj.weight" in done.stdout.splitlines()[-1], done.stdout


def bug_is_caught(outcome, script, bug):
    assert outcome["exit"] == 1, outcome["output"]
    verdict = outcome["output"].strip().splitlines()[-1]
    culprit = CULPRIT.get((script, bug), CULPRIT.get(bug))
    assert verdict.startswith("FAIL correctness") and verdict.endswith(f"the first: {culprit}")
    assert not outcome["json"]["correctness"]["passed"]


@pytest.mark.parametrize("script", MANUAL)
def test_the_bugs_listed_are_the_bugs_tested(script, capsys):
    assert importlib.import_module(script).main(["--inject-bug", "list"]) == 0
    listed = capsys.readouterr().out.strip().splitlines()
    assert [line.split()[0] for line in listed] == BUGS[script].split()


def test_results_can_be_drawn_and_are_strict_json(tmp_path):
    files = {kind: tmp_path / f"results.{kind}" for kind in ("json", "png", "trace")}
    run = python("tp.py", "--mode", "all", "--length", "64", "--bench-iters", "1", "--json", files["json"],
                 "--plot", files["png"], "--profile", files["trace"])  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    assert files["png"].read_bytes().startswith(b"\x89PNG")
    assert json.loads(files["trace"].read_text())["traceEvents"]
    results = json.loads(files["json"].read_text())
    assert set(results) >= {
        "script",
        "strategy",
        "world_size",
        "backend",
        "device",
        "model",
        "dtype",
        "batch",
    }
    assert set(results) >= {"length", "versions", "correctness", "learning", "benchmark"}
    assert sorted(tmp_path.iterdir()) == sorted(files.values())  # no draft is left


@pytest.mark.slow
@pytest.mark.parametrize("script", ["sp_megatron"])
def test_long_sequences_on_a_laptop(script, tmp_path):
    """No score matrix, s by s for each head: at 8192 tokens a rank's 4 heads would need 1 GiB for theirs."""
    options = ["--length", "8192", "--mode", "benchmark", "--bench-iters", "1", "--json", tmp_path / "l.json"]
    run = torchrun(2, *SCRIPTS[script], *options, timeout=900)
    assert run.returncode == 0, run.stdout + run.stderr
    benchmark = json.loads((tmp_path / "l.json").read_text())["benchmark"]
    assert all(row["bytes"] == row["expected_bytes"] for row in benchmark["traffic"])
    assert max(benchmark["peak_memory_bytes"]) < 2**28


PADDED = """
import sys
sys.path.insert(0, ".")
import torch, torch.distributed as dist, sp_ulysses as u
args = u.parse(["--length", "16", "--batch", "2", "--dtype", "float64", "--recompute", "none"])
group = u.start(args)
ids, _ = u.proof_batch(args)
own = slice(group.rank() * 8, (group.rank() + 1) * 8)
kept = torch.ones_like(ids)
kept[0, :9] = 0  # a short sequence, padded on the left: all of rank 0's tokens and one of rank 1's
kept[1, 13:] = 0  # and another on the right
with u.float64_islands(args.dtype):
    plain = u.load_model(args)(input_ids=ids, attention_mask=kept, use_cache=False).logits
    for args.attention in ("eager", "sdpa"):
        ours = u.make_parallel(u.load_model(args), group, args)(
            input_ids=ids[:, own], attention_mask=kept[:, own], use_cache=False,
            position_ids=torch.arange(16)[None, own],
        ).logits
        apart = (ours - plain[:, own])[kept[:, own] == 1].abs()
        print(f"{args.attention} {group.rank()} {len(apart)} tokens\\n", end="")
        assert apart.max() < 1e-12
u.synchronize(args, group)
args.over.set()
dist.destroy_process_group()
"""


def test_ulysses_keeps_a_padding_mask(tmp_path):
    """A mask of a rank's own tokens, as HF's model takes it, holds for the tokens of all."""
    (tmp_path / "padded.py").write_text(PADDED)
    done = torchrun(2, tmp_path / "padded.py")
    assert done.returncode == 0, done.stderr
    compared = re.findall(r"(\w+ \d \d+) tokens", done.stdout)
    assert sorted(compared) == ["eager 0 8", "eager 1 12", "sdpa 0 8", "sdpa 1 12"]
