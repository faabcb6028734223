"""Lab 15: nothing wrong is accepted, the nets' table is the checker's, an error names its line."""

import json
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, python
from learner import CHECKS, LABS, harness, run_lab

from labs.lab15_types import nets, oracle, scripts, typed

lab = harness.load(LABS["lab15"])
NETS = json.loads((ROOT / "labs" / "lab15_types" / "nets.json").read_text())
BUGS = nets.break_it.BUGS


@pytest.mark.ci(every=2)  # half a minute
@pytest.mark.parametrize("options", [[], ["--everything"]])
def test_what_is_wrong_on_numbers_is_refused(options, monkeypatch, tmp_path):
    monkeypatch.setattr(CHECKS["lab15"], "CHECKS", {})  # test_labs.py runs them
    file = tmp_path / "results.json"
    assert run_lab(LABS["lab15"], ["--json", str(file), *options]) == 0
    found = json.loads(file.read_text())
    assert found["failed"] == []
    rows = found["mutants"].values()
    assert sum(row["mutants"] for row in rows) == 748 and sum(row["wrong"] for row in rows) == 746
    for row in rows:
        assert row["refused"] == row["wrong"]
        assert row["mended"] == row["dropped"] + row["doubled"]
        if oracle.INSTALLED:
            asked = row["mutants"] + 1 if options else row["mutants"] // 4 + 1
            assert row["same"] == row["asked"] == asked
    assert found["error"]["line"] == "y = lab.norm(x, norm1)"
    assert found["error"]["mend"] == [0, 1, "I", "R", None, "all_reduce"]
    assert found["prediction"]["measured"] == 2 * 4 + 2


def test_the_table_of_nets_is_what_the_checker_says():
    verdicts = nets.type_verdicts()
    assert {s: [*bugs] for s, bugs in NETS.items()} == {s: [*b] for s, b in verdicts.items()}
    for script, bugs in verdicts.items():
        for bug, problem in bugs.items():
            assert ("types" in NETS[script][bug]) == (problem is not None), (script, bug)
    for script in BUGS:
        assert scripts.script_says(script) is None, "without a bug it is accepted"
        assert all("parity" in row for row in NETS[f"{script}.py"].values()), "test_break_it.py"
    assert set(scripts.BUGS) <= {(script, bug) for script, bugs in BUGS.items() for bug in bugs}


@pytest.mark.slow  # half a minute
def test_bits_are_judged_anew():
    rows = {(s, bug): NETS[s][bug] for s, bugs in nets.BITS.items() for bug in bugs}
    listed = {(*names, net) for names, row in rows.items() for net in row.split(", ")}
    judged = {(*names, "bits") for names in rows} | {(*n, "parity") for n in rows if "lab16" in n}
    assert nets.bits_see(seed=0) == listed & judged


def test_the_list_names_the_nets():
    lines = python("labs/break_it.py", "--list").stdout.splitlines()
    at = lines.index("  wrong_shard")
    assert lines[at + 2] == "      lab 15: parity, bits"
    at = lines.index("  unsummed_norm_gradient")
    assert lines[at + 2] == "      lab 15: types, parity"


def test_one_rank_is_hugging_faces_layer():
    """tp_block on one rank of numbers, and LlamaDecoderLayer with the same weights."""
    from transformers import LlamaConfig, LlamaModel

    types, _ = typed.PROGRAMS["tp_block"]
    full = typed.drawn(types, 0)
    parts = {name: typed.Ranks([x]) for name, x in full.items()}
    functions = typed.on_numbers({"tp": 1})
    functions["rotary"] = lambda positions, x: x  # HF's own turn other pairs of numbers
    with mock.patch.dict(vars(lab), functions):
        (mine,) = lab.tp_block(**parts)
    sizes = {"hidden_size": lab.H, "intermediate_size": lab.WIDTH, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": lab.HEADS, "num_key_value_heads": lab.KV, "head_dim": lab.D}
    model = LlamaModel(LlamaConfig(**sizes, vocab_size=8, attn_implementation="sdpa")).double()
    layer = model.layers[0]
    names = {"norm1": "input_layernorm", "norm2": "post_attention_layernorm"}
    names |= {name: f"self_attn.{name}_proj" for name in "qkvo"}
    names |= {name: f"mlp.{name}_proj" for name in ("gate", "up", "down")}
    for name, path in names.items():
        layer.get_submodule(path).weight.data = full[name]
    shape = (1, lab.LENGTH, lab.D)
    unturned = torch.ones(shape, dtype=torch.double), torch.zeros(shape, dtype=torch.double)
    mask = torch.ones(lab.LENGTH, lab.LENGTH, dtype=torch.bool).tril()[None, None]
    right = layer(full["x"], attention_mask=mask, position_embeddings=unturned)
    assert harness.relative_error(mine, right.detach()) < 1e-6, "HF's norms are float32 inside"


def test_the_vocabulary_loss_is_torchs():
    full = typed.drawn(typed.PROGRAMS["vocabulary_loss"][0], 0)
    with mock.patch.dict(vars(lab), typed.on_numbers({"tp": 1})):
        (mine,) = lab.vocabulary_loss(**{name: typed.Ranks([x]) for name, x in full.items()})
    logits = full["x"] @ full["head"].mT
    right = F.cross_entropy(logits.flatten(0, 1), full["targets"].argmax(-1).flatten())
    assert harness.relative_error(mine, right) < 1e-12


def test_a_scalar_moves_and_an_unknown_dimension_does_not():
    x = lab.Typed((), {"tp": "P"})
    assert lab.moved(x, "P", "I", "tp").types == {"tp": "I"}
    with pytest.raises(lab.TypeProblem, match="no rank can move"):
        lab.moved(lab.Typed((4,), {"tp": "P"}), "P", "S(1)", "tp")
    with pytest.raises(lab.TypeProblem, match="no rank can move"):
        lab.moved(lab.Typed((4,), {"tp": "V"}), "V", "R", "tp")
