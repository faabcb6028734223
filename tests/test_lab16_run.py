"""Lab 16: its random numbers are Philox's, its bits and bytes a run's; the example of the notes."""

from types import SimpleNamespace

import pytest
import torch
from learner import LABS, harness, shown

from labs.lab16_bits import divergence, same_bits
from labs.lab16_bits.bits import finished, one_by_one, tree

lab = harness.load(LABS["lab16"])
F32 = 0xFFFFFFFF


@pytest.mark.parametrize(
    "counter,key,right",  # Random123's known answers (kat_vectors, philox4x32 10)
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([F32] * 4, [F32] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_gives_the_known_answers(counter, key, right):
    assert list(lab.philox(counter, key)) == right
    tensors = [torch.tensor([x]) for x in counter]
    assert [x.item() for x in lab.philox(tensors, key)] == right


def test_uniform_is_even_and_broadcasts():
    draws = lab.uniform(3, "q", torch.arange(100)[:, None], torch.arange(100))
    assert draws.shape == (100, 100) and draws.min() >= 0 and draws.max() < 1
    assert abs(draws.mean().item() - 0.5) < 0.02 and draws.unique().numel() > 9_900
    assert draws[7, 9] == lab.uniform(3, "q", torch.tensor(7), 9)
    assert not torch.equal(
        draws, lab.uniform(4, "q", torch.arange(100)[:, None], torch.arange(100))
    )


def test_the_example_of_the_notes():
    """Sums of 1, 1/256, ... in bfloat16, and who draws which element of a matrix (4, 8)."""
    small = 2.0**-8
    parts = torch.tensor([1, small, small, small], dtype=torch.bfloat16)
    assert one_by_one([*parts]).item() == 1
    assert tree([*parts]).item() == lab.tree_sum([*parts]).item() == 1 + 2 * small
    assert lab.tree_sum([*parts.flip(0)]).item() == 1 + 2 * small
    three = torch.tensor([small, small, small, 1], dtype=torch.bfloat16)
    assert one_by_one([*three]).item() == 1 + 4 * small


def test_a_message_that_ranks_do_not_divide_is_doubled():
    assert lab.cost(2, 1, 4)[0] - 4 == lab.cost(2, 1, 2)[0] * 2 - 8, "the loss is float32"
    assert lab.cost(1, 1, 4)[0] == 0
    for dp, tp in same_bits.LAYOUTS:  # products are shared out evenly
        assert lab.cost(dp, tp, 4)[1] * dp * tp == lab.cost(1, 1, 4)[1]


def test_orders_of_a_sum():
    sums = divergence.sums_in_every_order(32, 200, seed=0)
    assert set(sums) == {"float32", "bfloat16"}
    assert all(len({*found}) > 1 for found in sums.values()), "an order is another sum"


@pytest.mark.slow
def test_a_run_on_4_ranks(tmp_path):
    found = shown("lab16", tmp_path, "--ranks", 4)
    rows = {(r["dtype"], r["dp"], r["tp"], r["what"]): r for r in found["proof"]}
    assert len(rows) == 2 * 6 * 6 and not any(row["differ"] for row in rows.values())
    one = SimpleNamespace(blocks=range(8))
    weights = finished.new_state(one, 0, torch.float32)["weights"].values()
    count = sum(weight.numel() for weight in weights)
    assert rows["bfloat16", 1, 1, "gradients"]["of"] == 3 * 2 * count, "three steps, run twice"
    for row in found["costs"]:
        assert [row["bytes"], row["products"]] == row["formula"]
    over = {row["broken"]: row["size"] for row in found["broken"] if row["size"]}
    assert over["left_to_right"] < 1e-4 < 0.1 < over["dropout_of_generators"]
    apart = {(r["how"], r["dtype"], r["tp"]): r for r in found["divergence"]}
    assert not any(row["differ"] for key, row in apart.items() if key[0] == "tree")
    assert 0 < apart["plain", "float32", 2]["most"] < apart["plain", "bfloat16", 2]["mean"] < 0.5
    assert found["prediction"]["measured"] == 4 * 4 * (2 * (7 * 3 + 6) + 3)
