"""sp_layout_sim.py, labs/four_layouts.py: against PyTorch and the papers, at any size, broken."""

import json
import re

import numpy as np
import plot
import pytest
import torch
from conftest import python
from torch.nn import functional

import sp_layout_sim as sim
from labs import four_layouts as four


def said(module, capsys, options=""):
    """main()'s (exit status, lines of output, lines of stderr)."""
    try:
        status = module.main(options.split())
    except SystemExit as exit:  # argparse's
        status = exit.code
    found = capsys.readouterr()
    return status, found.out.splitlines(), found.err.splitlines()


def rows_of(lines):
    """{first cell: the other cells} of the report's tables."""
    rows = [re.split(r"  +", line.strip()) for line in lines if line.startswith("  ")]
    return {row[0]: row[1:] for row in rows}


def test_the_output_begins_with_three_answers_and_ends_with_one_verdict():
    run = python("sp_layout_sim.py")
    assert run.returncode == 0 and run.stderr == ""
    lines = run.stdout.splitlines()
    assert max(map(len, lines)) <= 100 and lines[-1].startswith("PASS sp_layout_sim: ")
    answers = run.stdout.split("\n\n")[0]
    for number in "123":  # the docstring asks the same questions
        asked, answered = (re.search(f"{number}. (Wh.+)", x)[1] for x in (sim.__doc__, answers))
        assert asked.startswith(answered.rstrip("?"))
    mode, store, norm = answers.split("?\n")[1:]
    assert mode.strip().startswith("REDUCE_SCATTER; ALL_REDUCE is tensor parallelism alone.")
    assert "a rank has the whole sum, (2, 12, 16)" in store and "(2, 6, 16) on rank 0" in store
    sizes = re.findall(r"([\d,]+) bytes in tp, ([\d,]+) in sp", store)
    assert sizes == [("4,992", "4,032"), ("768", "768"), ("768", "1,152"), ("0", "64")]
    assert "(2, 6, 16) norm is as on one device" in norm
    assert float(re.search(r"relative error of norm is ([\d.]+)\.", norm)[1]) > 0.05
    assert "gather(reduce_scatter(partials)) = sum(partials) = full output: ok" in lines
    assert "Its first number: -0.0864 - 0.0984 = -0.1848 in sp, -0.1848 on one device." in lines


def test_the_table_says_where_every_tensor_lies(capsys):
    """A step and a weight have a row each; what moves a tensor stands between two steps."""
    _, lines, _ = said(sim, capsys)
    rows = rows_of(lines)
    for step, (lies, gradient) in sim.placements("sp").items():
        places = [sim.placements("tp")[step][0], lies, *[gradient] * (gradient != lies)]
        *found, shape, value, of_gradient = rows[step]
        assert found == places and shape.startswith("(2, ") and value == of_gradient == "ok"
    for weight, lies in sim.WEIGHTS.items():
        *places, shape, of_gradient = rows[f"weight {weight}"]
        assert places == [lies, lies, *["Partial in sp"] * (lies == "Replicate")]
        assert shape.startswith("(") and of_gradient == "ok"
    moves = [line.split() for line in lines if line.startswith(("    v", "    ^"))]
    entering = [["v", "nothing", "all_gather"], ["^", "nothing", "all_gather"]]
    leaving = [["v", "all_reduce", "reduce_scatter"], ["^", "nothing", "all_gather"]]
    assert moves == [*entering, ["^", "all_reduce", "reduce_scatter"], *leaving]


def test_numpy_alone_is_loaded():
    code = "import sys; sys.path.insert(0, '.'); import sp_layout_sim as sim; sim.main([]); "
    code += "print([m for m in ('torch', 'matplotlib') if m in sys.modules])"
    assert python("-c", code).stdout.splitlines()[-1] == "[]"


SIZES = [
    "--tp 1",
    "--tp 3 --seq 13 --batch 1 --hidden 20 --ffn 7",
    "--tp 4 --seq 4 --ffn 5 --batch 3",
    "--tp 8 --seq 31 --hidden 64 --ffn 200",
    "--tp 1 --batch 1 --seq 1 --hidden 4 --ffn 1",
]


@pytest.mark.parametrize("size", SIZES)
def test_holds_at_any_size(capsys, size):
    assert "--tp 1" in size or said(sim, capsys, size)[0] == 0
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
def test_one_device_is_pytorchs(size):
    """One rank is the reference of P: what is wrong there no comparison would show."""
    args = four.parse(size.split())
    problem = sim.make_problem(args)
    assert_torch_agrees(sim.simulate("tp", problem, 1), problem, mlp_in_torch)
    problem = four.make_problem(args)
    for layout in four.ATTENTION:
        assert_torch_agrees(four.simulate(layout, problem, 1), problem, block_in_torch)


MOVED = {  # what makes a step, and what its gradient goes through
    ("tp", "enter mlp"): ["nothing", "all_reduce"],
    ("sp", "leave attention"): ["reduce_scatter", "all_gather"],
    ("ulysses", "qkv of heads"): ["3 all_to_all"] * 2,
    ("ulysses", "attention"): ["1 all_to_all"] * 2,
    ("cp", "attention"): ["P - 1 send", "2 P - 1 send"],
}


@pytest.mark.parametrize("tp", [2, 4])
def test_bytes_are_those_of_the_papers(tp):
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
    counts = [[row["count"] for row in run[x]["traffic"][:2]] for x in ("ulysses", "cp")]
    assert counts == [[4, 4], [t - 1, 2 * t - 1]], "q, k, v and out: one each, as README counts"
    assert {(x, step): run[x]["steps"][step]["moved_by"] for x, step in MOVED} == MOVED
    weights = 4 * h * h + 2 * h * f + f + 4 * h
    for layout in ("ulysses", "cp"):
        assert set(run[layout]["weight_bytes"]) == {2 * weights}
        assert sent(layout, "gradients") == 2 * (t - 1) * 2 * weights
    assert (sent("tp", "gradients"), sent("sp", "gradients")) == (0, 2 * (t - 1) * 2 * 4 * h)
    for (layout, phase, op), (_, size, _) in sim.expected(args).items():
        assert phase == "kept" or 2 * size == sent(layout, phase, op), "the MLP is half of it"


def test_the_table_of_four_layouts(capsys):
    status, lines, _ = said(four, capsys)
    rows = rows_of(lines)
    assert status == 0 and lines[-1].startswith("PASS four_layouts: ")
    assert max(map(len, lines)) <= 100 and rows["tp"][:3] == ["Replicate", "Shard(2)", "Shard(2)"]
    assert rows["ulysses"][:3] == ["Shard(1)", "Shard(2)", "Shard(1)"]
    assert rows["cp"][:3] == ["Shard(1)", "Shard(1)", "Shard(1)"]
    assert rows["sp"][3:] == ["4.25", "8.75", "2.00", "3.00", "0.17", "ok"]


CULPRIT = {  # the first thing that each fault makes wrong, in the order of computation; where
    "forgot_reduction": ("leave", "tp sp"),
    "forgot_backward_reduction": ("gradient of norm", "tp sp"),
    "bias_before_reduction": ("leave", "tp sp"),
    "wrong_dropout_seed": ("dropout", "tp sp"),
    "unsummed_gradients": ("gradient of weight down bias", "sp"),
}


@pytest.mark.parametrize("size", ["--tp 2", "--tp 3 --seq 7 --batch 1"])
@pytest.mark.parametrize("fault", CULPRIT)
def test_faults_are_caught_and_leave_nothing_behind(capsys, fault, size):
    right = said(sim, capsys, size)
    status, lines, errors = said(sim, capsys, f"{size} --break {fault}")
    assert status == 1 and errors == [] and list(sim.FAULTS) == list(CULPRIT)
    name, layouts = CULPRIT[fault]
    found = re.fullmatch(rf"FAIL sp_layout_sim: {name} is wrong \((.+)\), no step .+", lines[-1])[1]
    assert re.findall("[a-z]+", found) == layouts.split()
    cells = rows_of(lines)[name.removeprefix("gradient of ")]
    assert cells[-1 if "gradient" in name else -2] == found, "value and gradient: a column each"
    assert not any("PASS" in line or "1. Which" in line for line in lines)
    assert said(sim, capsys, size) == right


@pytest.mark.parametrize("P", [2, 3])
@pytest.mark.parametrize("layout", ["tp", "sp"])
def test_two_faults_are_what_they_are_called(layout, P):
    problem, between = sim.make_problem(four.parse(["--seq=13"])), sim.BETWEEN[layout]
    full, bias = sim.simulate(layout, problem, 1).v["leave"][0], problem[1]["down bias"]
    v = sim.simulate(layout, problem, P, "bias_before_reduction").v
    rows = zip(sim.place(full, between, P), v["leave"], v["mask"], v["dropout"])
    for right, leave, mask, dropout in rows:  # P biases, and none is added after the reduction
        np.testing.assert_allclose(leave, right + P * bias)
        np.testing.assert_allclose(dropout, sim.dropout(leave, mask))
    first, *others = sim.simulate(layout, problem, P, "wrong_dropout_seed").v["mask"]
    assert (first == sim.place(problem[2], between, P)[0]).all(), "rank 0's is right"
    for mask in others:  # tp: other masks of the same tokens; sp: one mask of other tokens
        same = (mask == first[:, : mask.shape[1]]).all()
        assert same == (layout == "sp") and 0.4 < mask.mean() < 0.6


@pytest.mark.parametrize("factor,size", [(1 + 1e-11, "7e-12"), (np.nan, "nan")])
def test_the_worst_rank_counts_and_the_last_digits_do(capsys, monkeypatch, factor, size):
    full = np.ones((1, 4, 2))
    assert sim.error([full[:, :2], 2 * full[:, 2:]], full, "Shard(1)") > 0.5
    monkeypatch.setitem(sim.MOVES, ("Partial", "Shard(1)"), lambda xs, ranks: [
        factor * x for x in sim.reduce_scatter(xs, ranks)])  # fmt: skip
    assert said(sim, capsys)[1][-1].startswith(f"FAIL sp_layout_sim: leave is wrong (sp {size})")


def test_statistics_over_the_wrong_axis_are_caught(capsys, monkeypatch):
    """Over the tokens too: tp, with all tokens on each rank, cannot tell; sp can."""
    right = sim.layer_norm
    monkeypatch.setattr(sim, "layer_norm", lambda x, w: right(x, w) + x.mean(-2, keepdims=True))
    assert said(sim, capsys)[1][-1].startswith("FAIL sp_layout_sim: norm is wrong (sp ")


def test_what_is_kept_and_sent_is_counted(capsys, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(sim, "KEPT", [*sim.KEPT, "down"])
        assert said(sim, capsys)[1][-1] == "FAIL sp_layout_sim: what tp keeps or sends is wrong"
    for gather in (  # a call too many; a message too many
        lambda xs, ranks: sim.all_gather(xs, ranks, calls=2),
        lambda xs, ranks: sim.all_gather(xs, ranks) and sim.all_gather(xs, ranks, calls=0),
    ):
        with monkeypatch.context() as patch:
            patch.setitem(sim.MOVES, ("Shard(1)", "Replicate"), gather)
            assert said(sim, capsys)[1][-1] == "FAIL sp_layout_sim: what sp keeps or sends is wrong"
    monkeypatch.setattr(sim, "KEPT", [name for name in sim.KEPT if name != "up"])
    with pytest.raises(KeyError, match="up"):  # the backward gets nothing else
        sim.main([])


@pytest.mark.parametrize("name,wrong", [
    ("turn_of_ring", lambda turn, qkv, kv: [  # own tokens only
        (r, (*np.moveaxis(x, 3, 0), 0)) for r, x in enumerate(qkv)]),
    ("scores", lambda q, k, ahead, right=four.scores: right(q, k, 0)),
    ("send_next", lambda xs, ranks: xs),
])  # fmt: skip
def test_ring_attention_gone_wrong_is_caught(monkeypatch, name, wrong):
    monkeypatch.setattr(four, name, wrong)
    found = four.run(four.parse([]))["layouts"]
    assert found["cp"]["wrong"][0] == "attention" and found["tp"]["wrong"] == []


BAD = [
    (sim, "--tp 0", "--tp 0: use 2 to 64"),
    (sim, "--tp 1 --break forgot_reduction", "--tp 1: use 2 to 64"),
    (sim, "--tp 13", "--seq 12 on 13 ranks: use 13 or more"),
    (sim, "--ffn 1", "--ffn 1 on 2 ranks: use 2 or more"),
    (sim, "--seq 500000", "use smaller sizes: a tensor on all ranks may have 4,194,304 numbers"),
    (four, "--heads 3", "--heads 3: use 2 or more that divide 16"),
    (four, "--tp 5", "--heads 4: use 5 or more that divide 16"),
    (four, "--seq 5000", "--seq 5000: use less"),
    (four, "--json /nowhere/at/all.json", "argument --json: can't open '/nowhere/at/all.json'"),
]


@pytest.mark.parametrize("module,options,message", BAD)
def test_bad_input_is_refused_before_the_work(capsys, module, options, message):
    status, lines, errors = said(module, capsys, options)
    assert status == 2 and lines == [] and f"error: {message}" in errors[-1]


OWNERS = {  # on rank 1 of 2: the ranks that made the pieces of each column; 2: replicated
    "tp": {"norm 1": [2], "qkv": [1], "attention": [1], "o": [1], "leave attention": [2]},
    "sp": {"norm 1": [1], "enter attention": [0, 1], "qkv": [1], "attention": [1], "o": [1]},
    "ulysses": {"norm 1": [1], "qkv": [1], "qkv of heads": [0, 1], "attention of heads": [1]},
    "cp": {"norm 1": [1], "qkv": [1], "keys, values": [0], "attention": [1], "o": [1]},
}
OWNERS["sp"]["leave attention"] = OWNERS["ulysses"]["o"] = [1]
OWNERS["ulysses"]["attention"] = [0, 1]


@pytest.mark.parametrize("layout", four.ATTENTION)
def test_the_picture(tmp_path, layout):
    from matplotlib import colors, image

    assert four.main(f"--layout {layout} --json {tmp_path}/layout.json".split()) == 0
    columns = plot.layout_columns(json.loads((tmp_path / "layout.json").read_text()))
    makers = {title.split("\n")[-1]: set(made[1][made[1] >= 0]) for title, _, made in columns}
    assert makers == {title: set(ranks) for title, ranks in OWNERS[layout].items()}
    plot.main([str(tmp_path / "layout.json")])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["layout.json", "layout.png"]
    pixels = image.imread(tmp_path / "layout.png")[..., :3]
    for rank, colour in enumerate(plot.RANKS[:7]):  # the eighth is a grey, as edges of letters
        share = (np.abs(pixels - colors.to_rgb(colour)).max(-1) < 0.001).mean()
        assert share > 0.03 if rank < 2 else share == 0, f"{colour} fills {share:.3f}"
