"""Lab 15: nothing wrong is accepted, an error names its line."""

from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from learner import LABS, harness, shown

from labs.lab15_types import typed

lab = harness.load(LABS["lab15"])


@pytest.mark.ci
def test_what_is_wrong_on_numbers_is_refused(tmp_path):
    found = shown("lab15", tmp_path)
    assert found["failed"] == []
    rows = found["mutants"].values()
    assert sum(row["mutants"] for row in rows) == 748 and sum(row["wrong"] for row in rows) == 746
    for row in rows:
        assert row["refused"] == row["wrong"]
        assert row["mended"] == row["dropped"] + row["doubled"]
    assert found["error"]["line"] == "y = lab.norm(x, norm1)"
    assert found["error"]["mend"] == [0, 1, "I", "R", None, "all_reduce"]
    assert found["prediction"]["measured"] == 2 * 4 + 2


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
