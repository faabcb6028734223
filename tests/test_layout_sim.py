"""sp_layout_sim.py: it holds in every layout and size, counts what is there, and catches bugs."""

import importlib.util
import json
import sys

import numpy as np
import pytest
from conftest import ROOT, python

sys.path.insert(0, str(ROOT / "results"))
import plot  # noqa: E402

SCRIPT = "sp_layout_sim.py"
LAYOUTS = ["tp", "sp", "ulysses", "cp"]


@pytest.fixture
def sim():
    """The script as a module of its own, so that a test may break it."""
    spec = importlib.util.spec_from_file_location("sp_layout_sim", ROOT / SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def results(sim, options=""):
    return sim.run(sim.parse(options.split()))


def sent(result, phase, op=None):
    rows = [t for t in result["traffic"] if t["phase"] == phase and op in (None, t["op"])]
    return sum(t["sent_bytes"] for t in rows)


def test_first_command():
    run = python(SCRIPT)
    assert run.returncode == 0 and run.stderr == ""
    lines = run.stdout.splitlines()
    assert lines[-1].startswith("PASS sp_layout_sim: tp, sp, ulysses, cp: all values and gradients")
    rows = {line[:17].strip(): line.split() for line in lines if line.startswith("  ")}
    assert rows["norm 1"][2:8] == ["tokens", "0:6", "6:12", "(2,", "6,", "16)"]
    assert rows["enter attention"][2:5] == ["replicated", "all", "all"]
    assert rows["qkv"][1:4] == ["heads", "0:2", "2:4"]
    assert rows["o"][1:3] == ["partial", "sum"] and rows["o"][-2] == "replicated", "its gradient"
    moves = [line.split()[1::2] for line in lines if line.startswith("    v")]
    assert moves == [["all_gather", "reduce_scatter"], ["reduce_scatter", "all_gather"]] * 2
    assert max(map(len, lines[:-1])) <= 100
    assert " whole" not in run.stdout and " copies" not in run.stdout, "the words are the field's"
    assert "  wire bytes  formula" in run.stdout
    assert "on 1 simulated rank, " in python(SCRIPT, "--tp", 1).stdout
    assert python(SCRIPT, "--tp", 0).returncode == 2


def test_the_three_questions_are_answered():
    text = python(SCRIPT).stdout
    mode, store, norm = text[text.index("1. Which") :].split("?\n")[1:]
    assert mode.strip().startswith("reduce_scatter, in Nanotron")
    assert "leaves (2, 12, 16) on every rank" in store and "(2, 6, 16) on rank 0" in store
    assert "keeps for the backward:\n   8,640 bytes in tp, 6,720 in sp" in store
    assert "sends in the forward:  1,536 wire bytes in tp, 1,536 in sp" in store
    assert "sends in the backward: 1,536 wire bytes in tp, 2,304 in sp" in store
    errors = [float(part.split()[0].rstrip(".")) for part in norm.split("error ")[1:]]
    assert errors[0] < 1e-15 and errors[1] > 0.05


def test_numpy_alone_is_loaded():
    code = "import sys; sys.path.insert(0, '.'); import sp_layout_sim as sim; sim.main([]); "
    code += "print([m for m in ('torch', 'matplotlib') if m in sys.modules])"
    assert python("-c", code).stdout.splitlines()[-1] == "[]"


SIZES = [
    "--tp 1",
    "--tp 3 --seq 13 --batch 1 --hidden 20 --ffn 7",
    "--tp 4 --seq 4 --ffn 5 --batch 3",
    "--tp 8 --heads 8 --seq 31 --hidden 64 --ffn 200",
    "--tp 2 --hidden 4 --heads 4 --seq 2",
    "--tp 8 --hidden 4 --heads 2 --layout cp",  # cp alone takes more ranks than heads
]


@pytest.mark.parametrize("size", SIZES)
def test_holds_at_any_size(sim, size):
    run = results(sim, size)
    layouts = LAYOUTS if run["tp"] <= run["heads"] else ["cp"]
    assert run["passed"] and run["wrong"] == [] and list(run["layouts"]) == layouts
    for result in run["layouts"].values():
        errors = [e for s in result["steps"].values() for e in (s["error"], s["gradient_error"])]
        errors += result["weight_gradients"].values()
        assert len(errors) == 2 * 19 + 9 and max(errors) < 1e-12
    assert max(run["finite_differences"].values()) < 1e-6 and len(run["finite_differences"]) == 10
    for layout in {"sp", "cp"} & {*layouts}:  # between blocks each token is on one rank, all of it
        step = run["layouts"][layout]["steps"]["residual"]
        ends = [tuple(map(int, piece.split(":"))) for piece in step["slices"]]
        assert [t for start, end in ends for t in range(start, end)] == list(range(run["seq"]))
        sizes = [end - start for start, end in ends]
        assert len(sizes) == run["tp"] and max(sizes) - min(sizes) <= 1
        assert step["shapes"] == [(run["batch"], size, run["hidden"]) for size in sizes]


@pytest.mark.parametrize("tp", [2, 4])
def test_bytes_are_those_of_the_papers(sim, tp):
    run = results(sim, f"--tp {tp} --seq 16 --heads 8 --hidden 32 --ffn 128")["layouts"]
    b, s, h, heads, t = 2, 16, 32, 8, tp
    lse = 4 * b * s * heads / t
    # Korthikanti et al. 2022 without attention's probabilities: sbh (10 + 24/t) and sbh 34/t
    assert set(run["tp"]["kept_bytes"]) == {b * s * h * (10 + 24 / t) + lse}
    assert set(run["sp"]["kept_bytes"]) == {b * s * h * 34 / t + lse}
    assert run["cp"]["kept_bytes"] == run["sp"]["kept_bytes"]
    assert set(run["ulysses"]["kept_bytes"]) == {b * s * h * 36 / t + lse}
    tensor = 2 * b * s * h * (t - 1)  # what all ranks send to gather one (b, s, h) in bf16
    assert sent(run["tp"], "forward") == sent(run["sp"], "forward") == 4 * tensor
    assert (sent(run["tp"], "backward"), sent(run["sp"], "backward")) == (4 * tensor, 6 * tensor)
    assert sent(run["sp"], "backward", "all_gather") == 2 * sent(run["sp"], "forward", "all_gather")
    assert sent(run["ulysses"], "forward") == sent(run["ulysses"], "backward") == 4 * tensor / t
    assert sent(run["cp"], "forward") == 2 * tensor
    for phase in ("forward", "backward"):  # q, k, v and out: one each, as README counts them
        assert [t["count"] for t in run["ulysses"]["traffic"] if t["phase"] == phase] == [4]
    weights = 3 * h * h + h * h + 2 * h * 128 + 128 + 2 * h + 2 * h
    assert set(run["cp"]["weight_bytes"]) == {2 * weights}
    assert sent(run["cp"], "gradients") == 2 * (t - 1) * 2 * weights
    assert sent(run["tp"], "gradients") == 0
    assert sent(run["sp"], "gradients") == 2 * (t - 1) * 2 * 4 * h


def test_what_each_layout_shards(sim):
    shards = {"tp": "replicated heads features", "sp": "tokens heads features"}
    shards |= {"ulysses": "tokens heads tokens", "cp": "tokens tokens tokens"}
    for layout, result in results(sim)["layouts"].items():
        held = [result["steps"][step]["holds"] for step in ("x", "attention of heads", "up")]
        assert " ".join(held) == shards[layout]


@pytest.mark.parametrize("mode,layout", [("all_reduce", "tp"), ("reduce_scatter", "sp")])
def test_tp_mode_is_nanotrons_name_of_a_layout(mode, layout):
    by_mode, by_layout = python(SCRIPT, "--tp-mode", mode), python(SCRIPT, "--layout", layout)
    assert by_mode.stdout == by_layout.stdout
    assert f"--layout {layout}, Nanotron's tp_mode {mode}." in by_mode.stdout


CULPRIT = {  # the first thing that each bug makes wrong, in the order of computation
    "forgot_reduction": {"tp": "leave attention, forward", "sp": "leave attention, forward"},
    "forgot_backward_reduction": {"tp": "norm 2, gradient", "sp": "norm 2, gradient"},
    "reduced_both_ways": {"tp": "down, gradient"},
    "bias_before_reduction": {"tp": "dropout 1, forward", "sp": "dropout 1, forward"},
    "wrong_dropout_seed": dict.fromkeys(LAYOUTS, "dropout 1, forward"),
    "unsummed_gradients": dict.fromkeys(LAYOUTS[1:], "gradient of weight norm 1"),
    "own_tokens_only": {"ulysses": "qkv of heads, forward", "cp": "attention of heads, forward"},
    "local_positions": {"cp": "attention of heads, forward"},
    "unscaled_merge": {"cp": "attention of heads, forward"},
}
CASES = [(bug, layout) for bug, where in CULPRIT.items() for layout in where]


@pytest.mark.parametrize("size", ["--tp 2", "--tp 3 --seq 7 --batch 1"])
@pytest.mark.parametrize("bug,layout", CASES)
def test_bugs_are_caught(sim, bug, layout, size):
    run = results(sim, f"--break {bug} --layout {layout} {size}")
    assert not run["passed"] and run["wrong"][0] == f"{layout}: {CULPRIT[bug][layout]}"
    assert all(r["wrong"] == [] for name, r in run["layouts"].items() if name != layout)


def test_every_bug_is_tested():
    listed = python(SCRIPT, "--break", "list")
    rows = [line.split(maxsplit=1) for line in listed.stdout.splitlines() if line]
    found = {bug: what.split(":")[0].split(", ") for bug, what in rows}
    assert listed.returncode == 0 and found == {bug: list(CULPRIT[bug]) for bug in CULPRIT}


def test_a_forgotten_reduction_exits_1(tmp_path):
    run = python(SCRIPT, "--break", "forgot_reduction", "--json", tmp_path / "out.json")
    assert run.returncode == 1 and run.stderr == ""
    assert "\nWith the bug forgot_reduction: a block is left without the sum" in run.stdout
    assert run.stdout.splitlines()[-1].endswith("checks, the first: sp: leave attention, forward")
    steps = json.loads((tmp_path / "out.json").read_text())["layouts"]["sp"]["steps"]
    assert steps["o"]["error"] < 1e-12 < 0.1 < steps["leave attention"]["error"]


@pytest.mark.parametrize("bug,layout", CASES)
def test_a_broken_run_is_not_described_as_the_right_one(sim, capsys, bug, layout):
    assert sim.main(["--break", bug, "--layout", layout]) == 1
    text = capsys.readouterr().out
    assert "What the ranks should hold at every step" in text and "  ranks should hold  " in text
    assert "1. Which tp_mode" not in text and "Both add up" not in text and "PASS" not in text
    if (bug, layout) == ("forgot_reduction", "tp"):  # the step that it breaks is in the table
        assert float(text.split("\n  leave attention ")[1].split(")")[1].split()[0]) > 0.1
        assert "  0 all_reduce, not 2  0           1,536 " in text
    sends = layout == "ulysses" and bug != "own_tokens_only"
    assert ("v 3 all_to_all" in text) == ("v 1 all_to_all" in text) == sends
    titles = [title for title, *_ in plot.layout_columns(results(sim, "--layout tp"))]
    assert ("leave attention" in titles) == (bug == "forgot_reduction"), "not: all_reduce, leave"


def scaled(function, factor):
    def wrong(*arguments):
        out = function(*arguments)
        return (factor * out[0], *out[1:]) if isinstance(out, tuple) else factor * out

    return wrong


PARTS = ["layer_norm", "rms_norm", "linear", "silu", "attend", "dropout"]


@pytest.mark.parametrize("name", [*(f"{part}_backward" for part in PARTS), "attend"])
def test_what_is_wrong_on_one_rank_too_is_caught(sim, monkeypatch, name):
    """One rank is the reference of P: finite differences hold its gradients, one_device its y."""
    monkeypatch.setattr(sim, name, scaled(getattr(sim, name), 1.001))
    proof = "finite differences" if name.endswith("backward") else "one device"
    assert any(wrong.endswith(f", against {proof}") for wrong in results(sim)["wrong"])


def test_the_worst_rank_counts_and_the_last_digits_do(sim, monkeypatch):
    full = np.ones((1, 4, 2))
    assert sim.error([full[:, :2], 2 * full[:, 2:]], full, "tokens") > 0.5
    enter, enter_backward, _, leave_backward = sim.BOUNDARY["sp"]

    def nearly(xs, net):
        return [(1 + 1e-11) * x for x in sim.reduce_scatter(xs, net)]

    monkeypatch.setitem(sim.BOUNDARY, "sp", (enter, enter_backward, nearly, leave_backward))
    assert "sp: leave attention, forward" in results(sim)["wrong"]


def test_attention_is_pytorchs(sim):
    """One device and P ranks share scores(): a scale that both forget no comparison shows."""
    from torch import from_numpy
    from torch.nn.functional import scaled_dot_product_attention

    q, k, v = np.random.default_rng(0).normal(size=(3, 2, 5, 3, 4))  # (b, s, heads, d)
    heads_first = (from_numpy(x.swapaxes(1, 2).copy()) for x in (q, k, v))
    expected = scaled_dot_product_attention(*heads_first, is_causal=True).numpy().swapaxes(1, 2)
    np.testing.assert_allclose(sim.attend(q, k, v)[0], expected, rtol=1e-12)


def test_statistics_over_the_wrong_axis_are_caught(sim, monkeypatch):
    """Statistics over the tokens too: tp, with all tokens on each rank, cannot tell; sp can."""
    axis, right = -2, sim.layer_norm
    monkeypatch.setattr(sim, "layer_norm", lambda x, w: right(x, w) + x.mean(axis, keepdims=True))
    run = results(sim)
    assert "sp: norm 1, forward" in run["wrong"] and "tp: norm 1, forward" not in run["wrong"]


@pytest.mark.parametrize("kept,layout", [("qkv", "ulysses"), ("enter mlp", "sp")])
def test_an_activation_kept_too_many_is_caught(sim, monkeypatch, kept, layout):
    monkeypatch.setattr(sim, "KEPT", [*sim.KEPT, kept])
    assert f"{layout}: bytes kept" in results(sim)["wrong"]


def test_a_message_too_many_is_caught(sim, monkeypatch):
    monkeypatch.setitem(sim.BOUNDARY, "sp", (lambda xs, net: sim.all_gather(sim.all_gather(
        xs, net) and xs, net), *sim.BOUNDARY["sp"][1:]))  # fmt: skip
    phases = "forward", "backward"
    assert results(sim)["wrong"] == [f"sp: bytes of all_gather, {phase}" for phase in phases]


def test_the_backward_gets_nothing_but_what_is_kept(sim, monkeypatch):
    monkeypatch.setattr(sim, "KEPT", [name for name in sim.KEPT if name != "up"])
    with pytest.raises(KeyError, match="up"):
        results(sim)


BAD = [
    ("--tp 0", "--heads and --ffn must be at least 1"),
    ("--tp 5", "--tp 5: too few heads; 4 or --layout cp would do"),
    ("--tp 13 --layout cp", "--seq 12 leaves some of 13 ranks without a token; 13 would do"),
    ("--ffn 1", "--ffn 1 leaves some of 2 ranks without a feature; 2 would do"),
    ("--hidden 18", "--hidden 18 must be a multiple of --heads 4"),
    ("--hidden 2 --heads 2", "--hidden 2: norms of so few features are all alike; 4 would do"),
    ("--seq 5000", "a tensor of 200,000,000 numbers is too large; 4,194,304 would do"),
    ("--tp 65 --seq 65 --ffn 65 --layout cp", "--tp 65 is too much for one process; 64 would do"),
    ("--break unscaled_merge", "--break unscaled_merge breaks cp, not sp"),
    ("--break forgot_reduction --tp 1", "--break needs at least --tp 2"),
    ("--json /nowhere/at/all.json", "cannot write /nowhere/at/all.json: "),
]


@pytest.mark.parametrize("options,message", BAD)
def test_bad_input_is_one_line(sim, capsys, options, message):
    try:
        status = sim.main(options.split())
    except SystemExit as exit:  # argparse's
        status = exit.code
    said = capsys.readouterr()
    assert status == 2 and "error: " in said.err and message in said.err.splitlines()[-1]
    assert said.out == "" or ("cannot write" in message and "\nPASS" in said.out)


OWNERS = {  # on rank 1 of 2: the ranks that made the pieces of each column; 2: replicated
    "tp": {"norm 1": [2], "qkv": [1], "attention": [1], "o": [1], "leave attention": [2]},
    "sp": {"norm 1": [1], "enter attention": [0, 1], "qkv": [1], "attention": [1], "o": [1]},
    "ulysses": {"norm 1": [1], "qkv": [1], "qkv of heads": [0, 1], "attention of heads": [1]},
    "cp": {"norm 1": [1], "qkv": [1], "keys, values": [0], "attention": [1], "o": [1]},
}
OWNERS["sp"]["leave attention"] = OWNERS["ulysses"]["o"] = [1]
OWNERS["ulysses"]["attention"] = [0, 1]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_picture(sim, tmp_path, capsys, layout):
    from matplotlib import colors, image

    assert sim.main(f"--layout {layout} --json {tmp_path}/layout.json".split()) == 0
    columns = plot.layout_columns(json.loads((tmp_path / "layout.json").read_text()))
    makers = {title.split("\n")[-1]: set(made[1][made[1] >= 0]) for title, _, made in columns}
    assert makers == {title: set(ranks) for title, ranks in OWNERS[layout].items()}
    plot.main([str(tmp_path / "layout.json")])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["layout.json", "layout.png"], "no draft"
    pixels = image.imread(tmp_path / "layout.png")[..., :3]
    for colour in plot.RANKS[:2]:
        share = (np.abs(pixels - colors.to_rgb(colour)).max(-1) < 0.01).mean()
        assert share > 0.03, f"{colour} fills {share:.3f} of the picture"
    for colour in plot.RANKS[2:7]:  # the eighth is a grey, as the edges of letters are
        assert not (np.abs(pixels - colors.to_rgb(colour)).max(-1) < 0.001).any()
