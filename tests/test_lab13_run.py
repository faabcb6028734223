"""Lab 13: every layout into every other, what is read and written, what is said of bad files."""

import json
import re
from types import SimpleNamespace

import pytest
from learner import LABS, harness, shown
from pytest import approx

from labs.lab13_checkpoints import check, suite

lab = harness.load(LABS["lab13"])
ALONE = SimpleNamespace(rank=lambda: 0, size=lambda: 1)
# Tied embedding; in a layer q and o, k and v, three of the MLP, two norms; the last norm
H, V, MLP, KV, LAYERS = 24, 50, 20, 12, 5
NUMBERS = V * H + LAYERS * (2 * H * H + 2 * KV * H + 3 * MLP * H + 2 * H) + H
TENSORS = 1 + LAYERS * 9 + 1


@pytest.mark.slow  # half a minute; all: two minutes
@pytest.mark.parametrize("which,count", [("some", suite.SOME), ("all", len(suite.LAYOUTS))])
def test_every_layout_into_every_other(which, count, tmp_path):
    found = shown("lab13", tmp_path, "--pairs", which, "--seed", "3")
    assert len({(row["saved"], row["loaded"]) for row in found["pairs"]}) == count**2
    for row in found["pairs"]:  # the run itself judges errors, and what is read
        assert max(row["peak"]) < 100_000  # the whole is four times that
    for row in found["saves"]:
        assert sum(row["written"]) == 3 * 8 * NUMBERS + 4 * TENSORS, "each number once"
    written = {row["layout"]: row["written"] for row in found["saves"]}
    assert max(written["ulysses 2"]) - min(written["ulysses 2"]) <= 8 * V * H
    dcp = found["dcp"]
    assert all(ours == held and theirs > held for held, theirs, ours in dcp["loaded"])
    assert dcp["plain"] == [True, False], "DCP keeps one rank's plain tensor for all"
    assert found["prediction"]["measured"] == approx(100 * 8 / 25)


def test_the_example_of_the_page(tmp_path):
    """Two tensors on two ranks: who saves what, the bytes of rank 1's file, the index's pieces."""
    page = (LABS["lab13"].parent / "README.md").read_text()
    layouts = [
        {"w": lab.cut((4, 6), 1, *columns), "b": lab.whole((6,))} for columns in [(0, 4), (4, 6)]
    ]
    owner = lab.owners(layouts)
    assert [owner["w", layout["w"]] for layout in layouts] == [0, 1] and owner[
        "b", layouts[0]["b"]
    ] == 1
    kinds = [{"w": ("F64", (4, 4))}, {"w": ("F64", (4, 2)), "b": ("F64", (6,))}]
    everyone = []
    for rank, own in enumerate(kinds):
        tensors = {
            name: lab.torch.zeros(shape, dtype=lab.DTYPES["F64"])
            for name, (_, shape) in own.items()
        }
        file = f"save3-rank{rank}.safetensors"
        everyone.append((file, own, lab.write_tensors(tmp_path / file, own, tensors.get)))
    data = (tmp_path / file).read_bytes()
    rows = [re.split(r" *\| *", line)[1:-1] for line in page.splitlines() if line.startswith("| ")]
    rows = [row for row in rows if row[0].isdecimal() and row[1].isdecimal()]
    assert [[int(n) for n in row[:2]] for row in rows] == [[0, 8], [8, 168], [176, 64], [240, 48]]
    assert data[:8].hex(" ") in rows[0][2] and len(data) == 240 + 48
    assert data[8:176].decode() == rows[1][2].split("`")[1] + 5 * " "
    for piece in lab.make_index(3, layouts, everyone)["tensors"]["w"]["pieces"]:
        assert f"\n{json.dumps(piece)}\n" in page


@pytest.fixture
def saved(tmp_path, monkeypatch):
    """(folder, full tensors, load) of a checkpoint; load() on one rank: tensors, or the error."""
    full = {name: x.double() for name, x in check.drawn(0).items()}
    rows = [{name: lab.whole(x.shape) for name, x in full.items()} for _ in range(2)]
    rows[0]["q"], rows[1]["q"] = lab.cut((6, 4), 0, 0, 3), lab.cut((6, 4), 0, 3, 6)
    check.save_with(lab, tmp_path, full, rows)
    monkeypatch.setattr(lab, "gather_objects", lambda value, group: [value])

    def load(tensors=full):
        layout = {name: lab.whole(x.shape) for name, x in tensors.items()}
        tensors = {name: x.clone() for name, x in tensors.items()}
        try:
            lab.load(tmp_path, tensors, layout, ALONE)
        except lab.CheckpointError as problem:
            return str(problem)
        return tensors

    return tmp_path, full, load


def test_what_is_whole_loads(saved):
    folder, full, load = saved
    assert check.same(load(), full)
    (folder / "save1-rank1.safetensors").unlink()  # check_verify() has other damage
    assert load().endswith("save1-rank1.safetensors is missing")


@pytest.mark.parametrize("text", [None, "", "[]", "{}", '{"format": "pt"}', "\x00\xff"])
def test_a_bad_index_is_named(saved, text):
    folder, _, load = saved
    index = folder / "index.json"
    index.unlink()
    if text is not None:
        index.write_text(text)
    said = load()
    assert str(index) in said and "\n" not in said


def test_another_model_is_refused(saved):
    _, full, load = saved
    assert "more is not in the checkpoint" in load(full | {"more": full["q"]})
    assert "q is ('F64', (6, 4)) in the checkpoint" in load(full | {"q": full["q"][:3]})
    assert "o is ('F64'" in load(full | {"o": full["o"].float()})
    less = {name: x for name, x in full.items() if name != "head"}
    assert "head is in the checkpoint, and in no rank's model" in load(less)


def test_a_file_of_hugging_faces_loads(saved):
    folder, full, _ = saved
    hf = folder / "hf"
    hf.mkdir()
    kinds = {name: ("F64", tuple(x.shape)) for name, x in full.items()}
    lab.write_tensors(hf / "model.safetensors", kinds, full.get)
    mine = {name: lab.torch.zeros_like(x) for name, x in full.items()}
    layout = {name: lab.whole(x.shape) for name, x in full.items()}
    lab.load(hf, mine, layout, ALONE, lab.import_index(hf))
    assert check.same(mine, full)


def test_what_is_no_safetensors_file_is_named(tmp_path):
    for text in b"", b"12345678", b"\xff" * 100, b"hello, world, no header":
        (tmp_path / "x.safetensors").write_bytes(text)
        with pytest.raises(lab.CheckpointError, match="x.safetensors is no safetensors file"):
            lab.import_index(tmp_path)
