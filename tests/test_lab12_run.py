"""Lab 12: its run's figures against a second way to them."""

import pytest
from learner import shown
from pytest import approx

TOKENS, HIDDEN, EXPERTS = 64, 32, 8


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return shown("lab12", tmp_path_factory.mktemp("lab12"), "--ranks", 3)


@pytest.mark.slow
def test_whole_models_are_those_of_one_device(run):
    rows = run["proofs"]
    assert [row["ranks"] for row in rows] == [2, 3, 4, 4]
    assert {row["model"] for row in rows} == {"Mixtral", "Qwen3-MoE"}
    # embedding, head, last norm, the loss; a layer: 4 projections, 2 norms, router, 2 of experts
    for row in rows:
        norms = 2 if row["model"] == "Qwen3-MoE" else 0
        assert row["off_by"] <= 1e-10 and row["tensors"] == 4 + 2 * (9 + norms)


@pytest.mark.slow
def test_bytes(run):
    for row in run["bytes"]:
        sizes = 3 * 8 * EXPERTS
        assert row["message"] == row["formula"] == sizes + 4 * 3 * TOKENS * row["k"] * HIDDEN * 8
        assert row["tp_message"] == 4 * 3 * 3 * TOKENS * HIDDEN * 8
        assert 3 * row["tp_wire"] == 2 * row["tp_message"]
        assert row["ratio"] == row["wire"] / row["tp_wire"] == approx(row["k"] / 3, rel=0.1)
    assert run["prediction"]["measured"] == 4 * 3 * TOKENS * 5 * HIDDEN * 8


@pytest.mark.slow
def test_the_slowest_rank_and_what_dropping_costs(run):
    skews, factors = run["skews"], run["factors"]
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


@pytest.mark.slow
def test_training_and_the_picture(run):
    plain, balanced, dropping, both = run["trainings"]
    assert balanced["busiest"] < plain["busiest"] and both["dropped"] < dropping["dropped"]
    assert plain["dropped"] == balanced["dropped"] == 0 and dropping["busiest"] <= 1
    assert all(row["cross_entropy"] < 4 for row in run["trainings"])  # log 128 is 4.9
    for rank in run["way"]:
        assert sorted(rank["order"]) == [*range(8)] and sum(rank["sends"]) == 8
