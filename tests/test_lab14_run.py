"""Lab 14: its run's figures against a second way to them."""

import pytest
from learner import LABS, harness, shown
from pytest import approx

lab = harness.load(LABS["lab14"])


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lab14")
    return shown("lab14", folder, "--ranks", 4, "--tokens", 16384)


@pytest.mark.ci
def test_whole_models_are_those_of_each_document_alone(run):
    rows = run["proofs"]
    assert {row["way"] for row in rows} == {"ring", "Ulysses"} and len(rows) == 6
    for row in rows:
        assert len(row["errors"]) == 4 and 0 < max(row["errors"]) <= 1e-10
        assert row["arrives"] and not row["crosses"]


@pytest.mark.ci
def test_pairs_and_bytes(run):
    whole = sum(n * (n + 1) // 2 for n in (25, 1, 15, 3, 11, 9))
    rows = run["counts"]
    assert len(rows) == 8
    for row in rows:
        assert row["pairs"] == row["expected_pairs"] and row["bytes"] == row["expected_bytes"]
        assert sum(row["pairs"]) == 8 * whole, "4 KV heads, 2 query heads each"
        if row["way"] == "Ulysses":  # q, k, v there, the output back, and the backward
            assert len(set(row["pairs"])) == 1
            assert sum(row["bytes"]) == 64 * 4 * (2 + 2 + 2) * 2 * 8 * 8
    ring = {row["placement"]: sum(row["bytes"]) for row in rows if row["way"] == "ring"}
    assert 3 * ring["in order"] < ring["by document"] <= 64 * 3 * 2 * 2 * 4 * 8 * 8


@pytest.mark.ci
def test_a_windows_bytes_do_not_grow(run):
    for row in run["windows"]:
        own = row["length"] // 4  # without a window a rank's go on with those that have come
        ahead = [31, 31, 31, 0] if row["window"] else [own, 2 * own, 3 * own, 0]
        back = [0, *ahead[:3]]
        assert row["bytes"] == [(a + b) * 2 * 2 * 8 * 8 for a, b in zip(ahead, back)]
    assert run["prediction"]["measured"] == 31 * 2 * 2 * 8 * 8


@pytest.mark.ci
def test_mixtures(run):
    rows = {(row["mixture"], row["strategy"]): row for row in run["mixtures"]}
    alone = {how: row for (what, how), row in rows.items() if what == "one document"}
    assert alone["in order"]["pairs"] == approx(1.75, rel=1e-3), "(2P - 1) / P"
    for how in {"zigzag of the sequence"} | alone.keys() & {"by document (PyTorch)"}:
        assert alone[how] == alone["by document"] | {"strategy": how}
    assert alone["by document"]["pairs"] == alone["by document"]["ring"] == approx(1, rel=1e-3)
    for (what, how), row in rows.items():
        assert row["ring"] >= row["pairs"] >= 1 <= row["tokens"] and 0 <= row["sent"] <= 1
        if how in ("by document", "by work"):
            assert row["pairs"] < 1.1 and row["pairs"] <= rows[what, "in order"]["pairs"]
    assert rows["paragraphs", "in order"]["sent"] < 0.1 < rows["paragraphs", "by work"]["sent"]


def test_zigzag_of_one_document_is_pytorchs():
    """PyTorch's balancer, which is private, wants multiples of 2P."""
    theirs = pytest.importorskip("torch.distributed.tensor.experimental._context_parallel")
    balancer = getattr(theirs._load_balancer, "_PerDocumentHeadTailLoadBalancer", None)
    if balancer is None:
        pytest.skip("not in this version")
    for world, times in (1, 2), (2, 6), (3, 16):
        n = times * world
        indices = balancer([[n]], world, "cpu")._generate_indices()[0]
        right = [sorted(part.tolist()) for part in indices.chunk(world)]
        assert [at.tolist() for at in lab.by_document(lab.torch.arange(n), world)] == right


def test_the_example_of_the_notes():
    """9 tokens, 3 documents, 3 ranks."""
    ids = lab.torch.tensor([1, 2, 0, 0, 3, 4, 5, 6, 0])
    _, position = lab.documents(ids, 0)
    first, ordered = lab.first_seen(position, None), lab.in_order(9, 3)
    assert lab.work(ordered, first) == [6, 4, 12]
    assert lab.work(ordered, lab.first_seen(position, 3)) == [6, 4, 9]
    assert [lab.travels(ordered, rank, 1, first).tolist() for rank in range(3)] == [[], [4, 5], []]
    assert lab.travels(ordered, 1, 2, first).tolist() == []
    dealt = lab.by_document(position, 3)
    assert [at.tolist() for at in dealt] == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]
    assert lab.work(dealt, first) == [5, 7, 10]
    assert 4 in lab.travels(dealt, 1, 2, first).tolist()
