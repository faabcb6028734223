"""Lab 14: its run's figures against a second way to them, and what its checks must not let pass."""

import json

import pytest
from conftest import changed
from learner import FILES, LABS, harness, run_lab
from pytest import approx

lab = harness.load(LABS["lab14"])


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The results of a run, and its picture's size; its checks run elsewhere."""
    folder, checks = tmp_path_factory.mktemp("lab14"), harness.companion("check", LABS["lab14"])
    files = folder / "lab14.json", folder / "lab14.png"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checks, "CHECKS", {})
        options = ["--ranks", "4", "--tokens", "16384", "--json", files[0], "--plot", files[1]]
        assert run_lab(LABS["lab14"], [*map(str, options)]) == 0
    return json.loads(files[0].read_text()), files[1].stat().st_size


@pytest.mark.ci
def test_whole_models_are_those_of_each_document_alone(run):
    rows = run[0]["proofs"]
    assert {row["way"] for row in rows} == {"ring", "Ulysses"} and len(rows) == 6
    for row in rows:
        assert len(row["errors"]) == 4 and 0 < max(row["errors"]) <= 1e-10
        assert row["arrives"] and not row["crosses"]


@pytest.mark.ci
def test_pairs_and_bytes(run):
    whole = sum(n * (n + 1) // 2 for n in (25, 1, 15, 3, 11, 9))
    rows = run[0]["counts"]
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
    for row in run[0]["windows"]:
        own = row["length"] // 4  # without a window a rank's go on with those that have come
        ahead = [31, 31, 31, 0] if row["window"] else [own, 2 * own, 3 * own, 0]
        back = [0, *ahead[:3]]
        assert row["bytes"] == [(a + b) * 2 * 2 * 8 * 8 for a, b in zip(ahead, back)]
    assert run[0]["prediction"]["measured"] == 31 * 2 * 2 * 8 * 8


@pytest.mark.ci
def test_mixtures(run):
    rows = {(row["mixture"], row["strategy"]): row for row in run[0]["mixtures"]}
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
    assert run[1] > 50_000


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


@pytest.mark.parametrize(
    "options,message",
    [
        ("--ranks 1", "argument --ranks: use 2 to 64, not 1"),
        ("--tokens 100", "argument --tokens: use 8192 to 1048576, not 100"),
    ],
)
def test_bad_input_is_one_line(options, message, capsys):
    assert run_lab(LABS["lab14"], options.split()) == 2
    out, err = capsys.readouterr()
    assert out == "" and err == f"error: {message}\n"


FORWARD = "out, lse = merge(out, lse, *attend(q, *kv, held[rank], at, first))"
LOCAL = "f = first.clone()\n        f[held[rank]] = f[held[rank]].clamp(min=held[rank][0])\n"
BROKEN = [  # what is wrong, {ours: theirs}, the check that has to say so, and what
    (
        "a rank counts from its own first token",
        {FORWARD: f"{LOCAL}        {FORWARD.replace('first', 'f')}"},
        "ring_forward",
        "out is off by",
    ),
    (
        "keys travel in float32",
        {"isend, x.contiguous()": "isend, x.float().to(x.dtype).contiguous()"},
        "ring_forward",
        "is off by",
    ),
    (
        "the ring's ranks are those of the world",
        {
            "dist.isend, x.contiguous(), group=group, group_peer=": "dist.isend, x.contiguous(), ",
            "dist.irecv, arriving, group=group, group_peer=": "dist.irecv, arriving, ",
        },
        "ring_backward",
        "",
    ),
    (
        "the targets of the world are counted",
        {"dist.all_reduce(count, group=group)": "dist.all_reduce(count)"},
        "loss",
        "all_reduce in the default group",
    ),
    (
        "another document's keys count a little",
        {"first), -torch.inf)": "first), -1e2)"},
        "loss",
        "a gradient in another document's embeddings is there",
    ),
    (
        "no layer has a window",
        {'others.get("sliding_window")': "None"},
        "loss",
        "tensors that are off",
    ),
]


@pytest.mark.ci(every=3)
@pytest.mark.parametrize("what,put,exercise,said", BROKEN, ids=[case[0] for case in BROKEN])
def test_broken_on_purpose(what, put, exercise, said, tmp_path):
    file = tmp_path / FILES["lab14"]
    file.write_text(changed("labs/lab14_documents/lesson.py", put))
    passed, found, hint = harness.check(file, exercise, seed=7, timeout=60)
    assert not passed and said in found, found
