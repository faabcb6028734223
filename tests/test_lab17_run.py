"""Lab 17: its run's figures against a second way to them."""

from math import prod
from statistics import mean

import pytest
from learner import LABS, harness, shown
from pytest import approx

lab = harness.load(LABS["lab17"])
torch = lab.torch
LAYER = {"q": (4, 4), "k": (2, 4), "v": (2, 4), "o": (4, 4), "gate": (6, 4), "up": (6, 4)}
LAYER |= {"down": (4, 6)}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return shown("lab17", tmp_path_factory.mktemp("lab17"))


@pytest.mark.slow  # a minute and a half
def test_every_way_is_one_devices_muon(run):
    rows = run["proofs"]
    assert len({tuple(row[:3]) for row in rows}) == 2 * 2 * 3
    assert all(0 < error <= 1e-9 for row in rows for error in row[3:])
    assert run["untouched"]["matrices"] == 56 and run["untouched"]["off"] < 0.05
    for kind in run["shards"].values():
        assert kind["2"] > 0.3 and kind["4"] > 0.3, "a shard's own is another matrix"
        assert 1 < kind["moved"] < 485 and 0.001 < kind["bfloat16"] < 0.5


@pytest.mark.slow  # a minute and a half
def test_what_a_way_costs(run):
    shapes = 4 * [*2 * [(192, 192)], *2 * [(64, 192)], *3 * [(192, 512)]]
    numbers, work = sum(map(prod, shapes)), [4 * m * m * n + 2 * m**3 for m, n in shapes]
    ways = {row["way"]: row for row in run["ways"]}
    assert [set(ways[way]["calls"]) for way in lab.WAYS] == [{28}, {56}, {2}]
    assert ways["everywhere"]["flops"] == [5 * sum(work)] * 3
    for way in ways["by_owner"], ways["at_once"]:
        assert sum(way["flops"]) == 5 * sum(work) and max(way["flops"]) < 1.02 * 5 * sum(work) / 3
    peaks = [max(ways[way]["peak"]) for way in lab.WAYS]
    assert min(ways["at_once"]["peak"]) > 1.1 * max(peaks[:2]), "all own matrices at once"
    sent = [sum(nbytes.values()) for nbytes in ways["at_once"]["bytes"]]
    assert sum(sent) == 4 * 2 * numbers
    assert run["prediction"]["measured"] == 15 // 3 + 10 // 3 + 10 // 2  # MLPs; q, o; k, v
    for row in run["balance"]:
        assert 1 <= row["greedy"] <= row["in_turn"] and 0 < row["of_training"] < 0.02


@pytest.mark.slow  # a minute and a half
def test_the_losses(run):
    ends = [[mean(each[-10:]) for each in runs.values()] for runs in run["losses"].values()]
    assert max(ends[1]) < min(ends[0]) < 4, "Muon's, AdamW's"


def test_the_example_of_the_notes():
    whole = torch.tensor([[2.0, 1.0], [1.0, 2.0]], dtype=torch.float64)
    found = lab.newton_schulz(whole, torch.float64).flatten().tolist()
    assert found == approx([0.94, -0.19, -0.19, 0.94], abs=5e-3)
    assert lab.newton_schulz(whole[:1], torch.float64)[0].tolist() == approx([0.62, 0.31], abs=5e-3)
    costs = [lab.flops(shape, 1) for shape in LAYER.values()]
    assert costs == [1920, 400, 400, 1920, 2560, 2560, 2560]
    owner = lab.owners(costs, 2)
    assert owner == [1, 0, 0, 1, 0, 1, 0]
    assert sum(cost for rank, cost in zip(owner, costs) if rank == 0) == 5920
    parts = [torch.empty(m // 2, n) for m, n in LAYER.values()]
    matrices = [lab.Matrix(p, p, 0, [len(p)] * 2, 1, rank) for p, rank in zip(parts, owner)]
    sent = [lab.message_bytes(matrices, 0, way, 1) for way in lab.WAYS]
    assert sent == [{"all_gather": 120}, {"gather": 92, "scatter": 92}, {"all_to_all": 124}]
