"""Lab 12: its run's figures against a second way to them, and what its checks must not let pass."""

import json

import pytest
from conftest import changed
from learner import FILES, LABS, harness, run_lab
from pytest import approx

TOKENS, HIDDEN, EXPERTS = 64, 32, 8


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The results of a run on 3 ranks, and its picture's size; its checks run elsewhere."""
    folder, checks = tmp_path_factory.mktemp("lab12"), harness.companion("check", LABS["lab12"])
    files = folder / "lab12.json", folder / "lab12.png"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checks, "CHECKS", {})
        options = ["--ranks", "3", "--json", *files[:1], "--plot", *files[1:]]
        assert run_lab(LABS["lab12"], [*map(str, options)]) == 0
    return json.loads(files[0].read_text()), files[1].stat().st_size


@pytest.mark.ci
def test_whole_models_are_those_of_one_device(run):
    rows = run[0]["proofs"]
    assert [row["ranks"] for row in rows] == [2, 3, 4, 4]
    assert {row["model"] for row in rows} == {"Mixtral", "Qwen3-MoE"}
    # embedding, head, last norm, the loss; a layer: 4 projections, 2 norms, router, 2 of experts
    for row in rows:
        norms = 2 if row["model"] == "Qwen3-MoE" else 0
        assert row["off_by"] <= 1e-10 and row["tensors"] == 4 + 2 * (9 + norms)


@pytest.mark.ci
def test_bytes(run):
    for row in run[0]["bytes"]:
        sizes = 3 * 8 * EXPERTS
        assert row["message"] == row["formula"] == sizes + 4 * 3 * TOKENS * row["k"] * HIDDEN * 8
        assert row["tp_message"] == 4 * 3 * 3 * TOKENS * HIDDEN * 8
        assert 3 * row["tp_wire"] == 2 * row["tp_message"]
        assert row["ratio"] == row["wire"] / row["tp_wire"] == approx(row["k"] / 3, rel=0.1)
    assert run[0]["prediction"]["measured"] == 4 * 3 * TOKENS * 5 * HIDDEN * 8


@pytest.mark.ci
def test_the_slowest_rank_and_what_dropping_costs(run):
    skews, factors = run[0]["skews"], run[0]["factors"]
    assert skews[0]["balance"] == approx(2, rel=0.05) and skews[0]["busiest"] < 1.2
    for name in "balance", "busiest":
        values = [row[name] for row in skews]
        assert values == sorted(values) and values[-1] > 2 * values[0]
    for row in factors[:-1]:
        assert row["busiest"] <= row["factor"] * 3 * 3 / EXPERTS + 1e-9  # a rank has 3 experts
        assert 0 <= row["alone"] <= row["dropped"] < 1 and row["dropped"] >= 1 - row["factor"]
    assert [factors[-1][name] for name in ("dropped", "alone", "changed")] == [0, 0, 0]
    dropped = [row["dropped"] for row in factors]
    assert dropped == sorted(dropped, reverse=True)


@pytest.mark.ci
def test_training_and_the_picture(run):
    plain, balanced, dropping, both = run[0]["trainings"]
    assert balanced["busiest"] < plain["busiest"] and both["dropped"] < dropping["dropped"]
    assert plain["dropped"] == balanced["dropped"] == 0 and dropping["busiest"] <= 1
    assert all(row["cross_entropy"] < 4 for row in run[0]["trainings"])  # log 128 is 4.9
    assert run[1] > 50_000
    for rank in run[0]["way"]:
        assert sorted(rank["order"]) == [*range(8)] and sum(rank["sends"]) == 8


BACK = "return AllToAll.apply(grad, receives, sends, ctx.group), None, None, None"
MIX = "return self.mix(x, weights, experts).view_as(hidden_states)"
KEPT = "kept = (experts < count).any(1).view(*hidden_states.shape[:2], 1)"
BROKEN = [  # what is wrong, {ours: theirs}, the check that has to say so, and what
    (
        "one rank's gradients come back doubled",
        {BACK: BACK.replace("grad,", "grad * (1 + (ctx.group.rank() == 1)),")},
        "all_to_all",
        "the gradient of x is off by",
    ),
    (
        "one rank doubles what it averages",
        {"parameter.grad /= total": "parameter.grad *= (1 + (everyone.rank() == 2)) / total"},
        "gradients",
        "a gradient that all ranks have is off by 1.0e+00",
    ),
    (
        "an expert's gradient alone is doubled, on one rank",
        {
            "parameter.grad /= total": "parameter.grad /= total\n"
            "            parameter.grad *= 1 + (group is replicas and everyone.rank() == 3)"
        },
        "gradients",
        "an expert's gradient is off by 1.0e+00",
    ),
    (
        "a token that keeps no choice is passed through",
        {MIX: f"{KEPT}\n        {MIX} + ~kept * hidden_states"},
        "block",
        "the output is off",
    ),
    (
        "rows travel in float32",
        {"out, x.contiguous()": "out, x.float().to(x.dtype)"},
        "all_to_all",
        "rows is off by",
    ),
    (
        "a rank without tokens joins no all-to-all",
        {"            x = block(x)": "            block.logits = x @ block.router.T"},
        "gradients",
        "",
    ),
]


@pytest.mark.ci(every=4)
@pytest.mark.parametrize("what,put,exercise,said", BROKEN, ids=[case[0] for case in BROKEN])
def test_broken_on_purpose(what, put, exercise, said, tmp_path):
    file = tmp_path / FILES["lab12"]
    file.write_text(changed("labs/lab12_experts/lesson.py", put))
    passed, found, hint = harness.check(file, exercise, seed=7, timeout=20)
    assert not passed and said in found, found
