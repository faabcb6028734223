"""sp_layout_sim.py, labs/four_layouts.py: against PyTorch and the papers, at any size, broken."""

import importlib.util
import json
import subprocess
import sys

import numpy as np
import plot
import pytest
import torch
from conftest import ENVIRONMENT, ROOT, python
from torch.nn import functional

SIM, FOUR = "sp_layout_sim.py", "labs/four_layouts.py"
LAYOUTS = ["tp", "sp", "ulysses", "cp"]


def load(script):
    """A script as a module of its own, so that a test may break it."""
    spec = importlib.util.spec_from_file_location(script[:-3].split("/")[-1], ROOT / script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def sim():
    return load(SIM)


@pytest.fixture
def four(sim, monkeypatch):
    monkeypatch.setitem(sys.modules, "sp_layout_sim", sim)
    return load(FOUR)


def said(module, capsys, options=""):
    """main()'s (exit status, lines of output, lines of stderr)."""
    try:
        status = module.main(options.split())
    except SystemExit as exit:  # argparse's
        status = exit.code
    found = capsys.readouterr()
    return status, found.out.splitlines(), found.err.splitlines()


def test_the_output_begins_with_three_answers_and_ends_with_one_verdict():
    run = python(SIM)
    assert run.returncode == 0 and run.stderr == ""
    lines = run.stdout.splitlines()
    assert max(map(len, lines)) <= 100
    assert lines[0] == "1. Which tp_mode switches sequence parallelism on?"
    assert lines[-1].startswith("PASS sp_layout_sim: ")
    mode, store, norm = run.stdout.split("\n\n")[0].split("?\n")[1:]
    assert mode.strip().startswith("reduce_scatter, in Nanotron")
    assert "(2, 12, 16), on every rank" in store and "(2, 6, 16) on rank 0" in store
    assert "a rank keeps 4,992 bytes in tp, 4,032 in sp" in store
    assert "forward it sends 768 bytes in tp, 768 in sp" in store
    assert "backward it sends 768 bytes in tp, 1,152 in sp" in store
    assert "(2, 6, 16) norm is that of one device (ok)" in norm
    assert float(norm.split("the relative error is ")[1].split()[0].rstrip(".")) > 0.05


def test_the_table_says_where_every_tensor_lies(sim, capsys):
    """The same words in code and report; what moves a tensor stands between its two placements."""
    _, lines, _ = said(sim, capsys)
    rows = [line.split() for line in lines if line.startswith("  ")]
    rows = {row[0]: row[1:] for row in rows if row[-1] == "ok"}
    assert list(rows) == list(sim.placements("sp"))
    for step, (lies, gradient) in sim.placements("sp").items():
        in_tp = sim.placements("tp")[step][0]
        assert rows[step][:2] == [in_tp, lies]
        assert rows[step][2] == (gradient if gradient != lies else f"({sim.BF16},")
    moves = [line.split()[1:] for line in lines if line.startswith(("    v", "    ^"))]
    assert moves[:2] == [["nothing", "all_gather"], ["all_reduce", "reduce_scatter"]]
    assert moves[2:] == moves[1::-1], "the conjugates"


def test_numpy_alone_is_loaded():
    code = "import sys; sys.path.insert(0, '.'); import sp_layout_sim as sim; sim.main([]); "
    code += "print([m for m in ('torch', 'matplotlib') if m in sys.modules])"
    assert python("-c", code).stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("script", [SIM, FOUR])
def test_a_reader_that_leaves_and_a_full_disk(script):
    how = {"shell": True, "cwd": ROOT, "env": ENVIRONMENT, "capture_output": True, "text": True}
    early = subprocess.run(f"{sys.executable} {script} | head -n 1", **how)
    assert early.stderr == "" and early.stdout.count("\n") == 1
    full = subprocess.run(f"{sys.executable} {script} > /dev/full", **how)
    assert full.returncode == 2 and full.stderr.startswith("error: ")
    assert full.stderr.count("\n") == 1


SIZES = [
    "--tp 1",
    "--tp 3 --seq 13 --batch 1 --hidden 20 --ffn 7",
    "--tp 4 --seq 4 --ffn 5 --batch 3",
    "--tp 8 --seq 31 --hidden 64 --ffn 200",
    "--tp 1 --batch 1 --seq 1 --hidden 4 --ffn 1",
]


@pytest.mark.parametrize("size", SIZES)
def test_holds_at_any_size(sim, four, capsys, size):
    assert said(sim, capsys, size)[0] == 0
    heads = 8 if "--tp 8" in size else 4
    args = four.parse(f"{size} --heads {heads}".split())
    for layout, found in four.run(args)["layouts"].items():
        assert found["wrong"] == []
        step = found["steps"]["residual"]
        if layout != "tp":  # between blocks each token is on one rank, with all of its features
            parts = [range(*map(int, piece.split(":"))) for piece in step["slices"]]
            assert [token for part in parts for token in part] == list(range(args.seq))
            sizes = [len(part) for part in parts]
            assert len(sizes) == args.tp and max(sizes) - min(sizes) <= 1
            assert step["shapes"] == [(args.batch, size, args.hidden) for size in sizes]


def mlp_in_torch(x, W, mask, norm="norm"):
    """The block as PyTorch writes it."""
    entered = functional.layer_norm(x, x.shape[-1:], W[norm])
    inside = functional.silu(functional.linear(entered, W["up"].T, W["up bias"]))
    return x + functional.linear(inside, W["down"].T, W["down bias"]) * mask * 2


def block_in_torch(x, W, masks):
    heads, size = W["qkv"].shape[1], W["qkv"].shape[3]
    entered = functional.layer_norm(x, x.shape[-1:], W["norm 1"])
    qkv = entered @ W["qkv"].flatten(1)
    q, k, v = qkv.unflatten(-1, (heads, 3, size)).permute(3, 0, 2, 1, 4)
    out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    o = out.transpose(1, 2).flatten(2) @ W["o"].flatten(0, 1) + W["o bias"]
    return mlp_in_torch(x + o * masks[0] * 2, W, masks[1], "norm 2")


def assert_torch_agrees(run, problem, block):
    """y, the gradient of x and those of all weights, of a block, by autograd."""
    x, W, masks, dy = problem
    x = torch.tensor(x, requires_grad=True)
    W = {name: torch.tensor(w, requires_grad=True) for name, w in W.items()}
    y = block(x, W, torch.tensor(np.array(masks)))
    y.backward(torch.tensor(dy))
    assert set(run.dW) == set(W)
    pairs = [(run.v["y"], y.detach()), (run.g["x"], x.grad)]
    for found, expected in [*pairs, *((run.dW[name], W[name].grad) for name in W)]:
        np.testing.assert_allclose(found[0], expected.numpy(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("size", SIZES[:3])
def test_one_device_is_pytorchs(sim, four, size):
    """One rank is the reference of P: what is wrong there no comparison would show."""
    problem = sim.make_problem(sim.parse(size.split(), sim.Parser()))
    assert_torch_agrees(sim.simulate("tp", problem, 1), problem, mlp_in_torch)
    problem = four.make_problem(four.parse(size.split()))
    for layout in LAYOUTS:
        assert_torch_agrees(four.simulate(layout, problem, 1), problem, block_in_torch)


@pytest.mark.parametrize("tp", [2, 4])
def test_bytes_are_those_of_the_papers(sim, four, tp):
    args = four.parse(f"--tp {tp} --seq 16 --heads 8 --hidden 32 --ffn 128".split())
    run = four.run(args)["layouts"]
    b, s, h, f, t, lse = 2, 16, 32, 128, tp, 4 * 2 * 16 * 8 / tp
    # Korthikanti et al. 2022 without attention's probabilities: sbh (10 + 24/t) and sbh 34/t
    assert set(run["tp"]["kept_bytes"]) == {b * s * h * (10 + 24 / t) + lse}
    assert set(run["sp"]["kept_bytes"]) == {b * s * h * 34 / t + lse}
    assert run["cp"]["kept_bytes"] == run["sp"]["kept_bytes"]
    assert set(run["ulysses"]["kept_bytes"]) == {b * s * h * 36 / t + lse}
    tensor = 2 * b * s * h * (t - 1)  # what all ranks send to gather one (b, s, h) in bf16

    def sent(layout, phase, op=None):
        rows = [row for row in run[layout]["traffic"] if row["phase"] == phase]
        return sum(row["sent_bytes"] for row in rows if op in (None, row["op"]))

    assert sent("tp", "forward") == sent("sp", "forward") == 4 * tensor
    assert (sent("tp", "backward"), sent("sp", "backward")) == (4 * tensor, 6 * tensor)
    assert sent("sp", "backward", "all_gather") == 2 * sent("sp", "forward", "all_gather")
    assert sent("ulysses", "forward") == sent("ulysses", "backward") == 4 * tensor / t
    assert sent("cp", "forward") == 2 * tensor
    assert sent("cp", "backward") == 2 * tensor + 2 * t * 2 * b * s * h
    counts = [row["count"] for row in run["ulysses"]["traffic"] if row["op"] == "all_to_all"]
    assert counts == [4, 4], "q, k, v and out: one each, as README counts them"
    weights = 4 * h * h + 2 * h * f + f + 4 * h
    for layout in ("ulysses", "cp"):
        assert set(run[layout]["weight_bytes"]) == {2 * weights}
        assert sent(layout, "gradients") == 2 * (t - 1) * 2 * weights
    assert (sent("tp", "gradients"), sent("sp", "gradients")) == (0, 2 * (t - 1) * 2 * 4 * h)
    for layout in ("tp", "sp"):  # half of it is the MLP block: sp_layout_sim.py's formulas
        for (phase, op), ((_, size), _) in sim.expected(layout, args).items():
            assert phase == "kept" or 2 * size == sent(layout, phase, op)


def test_the_table_of_four_layouts(four, capsys):
    status, lines, _ = said(four, capsys)
    rows = {line.split()[0]: line.split()[1:] for line in lines if line.startswith("  ")}
    assert status == 0 and lines[-1].startswith("PASS four_layouts: ")
    assert max(map(len, lines)) <= 100 and rows["tp"][:3] == ["Replicate", "Shard(2)", "Shard(2)"]
    assert rows["ulysses"][:3] == ["Shard(1)", "Shard(2)", "Shard(1)"]
    assert rows["cp"][:3] == ["Shard(1)", "Shard(1)", "Shard(1)"]
    assert rows["sp"][3:] == ["4.25", "8.75", "2.00", "3.00", "0.17", "ok"]


CULPRIT = {  # the first thing that each fault makes wrong, in the order of computation
    "forgot_reduction": "leave",
    "forgot_backward_reduction": "gradient of norm",
    "bias_before_reduction": "dropout",
    "wrong_dropout_seed": "dropout",
    "unsummed_gradients": "gradient of weight down bias",
}


@pytest.mark.parametrize("size", ["--tp 2", "--tp 3 --seq 7 --batch 1"])
@pytest.mark.parametrize("fault", CULPRIT)
def test_faults_are_caught_and_leave_nothing_behind(sim, capsys, fault, size):
    right = said(sim, capsys, size)
    status, lines, errors = said(sim, capsys, f"{size} --break {fault}")
    assert status == 1 and errors == []
    assert lines[0].startswith(f"{CULPRIT[fault]} is wrong.")
    assert lines[-1].startswith(f"FAIL sp_layout_sim: {CULPRIT[fault]}, ")
    assert not any("PASS" in line or "1. Which" in line for line in lines)
    assert said(sim, capsys, size) == right
    assert sorted(sim.FAULTS) == sorted(CULPRIT)


def test_the_worst_rank_counts_and_the_last_digits_do(sim, capsys, monkeypatch):
    full = np.ones((1, 4, 2))
    assert sim.error([full[:, :2], 2 * full[:, 2:]], full, "Shard(1)") > 0.5
    monkeypatch.setitem(sim.MOVES, ("Partial", "Shard(1)"), lambda xs, ranks: [
        (1 + 1e-11) * x for x in sim.reduce_scatter(xs, ranks)])  # fmt: skip
    assert said(sim, capsys)[1][0].startswith("leave is wrong.")


def test_statistics_over_the_wrong_axis_are_caught(sim, capsys, monkeypatch):
    """Over the tokens too: tp, with all tokens on each rank, cannot tell; sp can."""
    right = sim.layer_norm
    monkeypatch.setattr(sim, "layer_norm", lambda x, w: right(x, w) + x.mean(-2, keepdims=True))
    assert said(sim, capsys)[1][0].startswith("norm is wrong.")


def test_what_is_kept_and_sent_is_counted(sim, capsys, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(sim, "KEPT", [*sim.KEPT, "down"])
        assert said(sim, capsys)[1][-1].endswith(": what tp keeps or sends, what sp keeps or sends")
    with monkeypatch.context() as patch:
        patch.setitem(sim.MOVES, ("Shard(1)", "Replicate"), lambda xs, ranks: sim.all_gather(
            sim.all_gather(xs, ranks) and xs, ranks))  # fmt: skip
        assert said(sim, capsys)[1][-1].endswith("FAIL sp_layout_sim: what sp keeps or sends")
    monkeypatch.setattr(sim, "KEPT", [name for name in sim.KEPT if name != "up"])
    with pytest.raises(KeyError, match="up"):  # the backward gets nothing else
        sim.main([])


@pytest.mark.parametrize("name,wrong", [
    ("turns", lambda four: lambda qkv, ranks: [  # own tokens only
        [(r, (*np.moveaxis(x, 3, 0), 0)) for r, x in enumerate(qkv)]]),
    ("scores", lambda four: lambda q, k, ahead, right=four.scores: right(q, k, 0)),
    ("send_next", lambda four: lambda xs, ranks: xs),
])  # fmt: skip
def test_ring_attention_gone_wrong_is_caught(four, monkeypatch, name, wrong):
    monkeypatch.setattr(four, name, wrong(four))
    found = four.run(four.parse([]))["layouts"]
    assert found["cp"]["wrong"][0] == "attention" and found["tp"]["wrong"] == []


BAD = [
    (SIM, "--tp 0", "--tp 0: use 1 to 64"),
    (SIM, "--tp 13", "--seq 12 on 13 ranks: use 13 or more"),
    (SIM, "--ffn 1", "--ffn 1 on 2 ranks: use 2 or more"),
    (SIM, "--seq 500000", "use smaller sizes: all ranks' tensors may have 4,194,304 numbers"),
    (SIM, "--break nothing", "argument --break: invalid choice: 'nothing' (choose from "),
    (SIM, "--break forgot_reduction --tp 1", "sends nothing: use --tp 2"),
    (SIM, "--tp x", "argument --tp: invalid int value: 'x'"),
    (FOUR, "--heads 3", "--heads 3: use 2 or more that divide 16"),
    (FOUR, "--tp 5", "--heads 4: use 5 or more that divide 16"),
    (FOUR, "--seq 5000", "--seq 5000: use less"),
    (FOUR, "--json /nowhere/at/all.json", "cannot write /nowhere/at/all.json: "),
]


@pytest.mark.parametrize("script,options,message", BAD)
def test_bad_input_is_one_line(four, sim, capsys, script, options, message):
    status, lines, errors = said(sim if script == SIM else four, capsys, options)
    assert status == 2 and lines == [] and len(errors) == 1, "before the work"
    assert errors[0].startswith("error: ") and message in errors[0]


OWNERS = {  # on rank 1 of 2: the ranks that made the pieces of each column; 2: replicated
    "tp": {"norm 1": [2], "qkv": [1], "attention": [1], "o": [1], "leave attention": [2]},
    "sp": {"norm 1": [1], "enter attention": [0, 1], "qkv": [1], "attention": [1], "o": [1]},
    "ulysses": {"norm 1": [1], "qkv": [1], "qkv of heads": [0, 1], "attention of heads": [1]},
    "cp": {"norm 1": [1], "qkv": [1], "keys, values": [0], "attention": [1], "o": [1]},
}
OWNERS["sp"]["leave attention"] = OWNERS["ulysses"]["o"] = [1]
OWNERS["ulysses"]["attention"] = [0, 1]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_picture(four, tmp_path, capsys, layout):
    from matplotlib import colors, image

    assert four.main(f"--layout {layout} --json {tmp_path}/layout.json".split()) == 0
    columns = plot.layout_columns(json.loads((tmp_path / "layout.json").read_text()))
    makers = {title.split("\n")[-1]: set(made[1][made[1] >= 0]) for title, _, made in columns}
    assert makers == {title: set(ranks) for title, ranks in OWNERS[layout].items()}
    plot.main([str(tmp_path / "layout.json")])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["layout.json", "layout.png"], "no draft"
    pixels = image.imread(tmp_path / "layout.png")[..., :3]
    for rank, colour in enumerate(plot.RANKS[:7]):  # the eighth is a grey, as edges of letters
        share = (np.abs(pixels - colors.to_rgb(colour)).max(-1) < 0.001).mean()
        assert share > 0.03 if rank < 2 else share == 0, f"{colour} fills {share:.3f}"
