"""What the scripts lean on in transformers and torch: a change there has a name. And trust."""

import ast
import inspect
import re
import sys
import tomllib

import pytest
import torch
import transformers
from conftest import ROOT
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama

SOURCES = [*ROOT.glob("*.py"), *(ROOT / "labs").glob("**/*.py")]


@pytest.fixture(scope="module")
def model():
    config = transformers.LlamaConfig(
        vocab_size=11, hidden_size=8, intermediate_size=6, num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=True,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def parameters(function):
    return list(inspect.signature(function).parameters)


def test_an_attention_function_gets_and_returns_what_ours_do():
    eager = parameters(modeling_llama.eager_attention_forward)
    assert eager[:7] == ["module", "query", "key", "value", "attention_mask", "scaling", "dropout"]
    assert parameters(ALL_ATTENTION_FUNCTIONS["sdpa"])[:5] == eager[:5]
    assert callable(transformers.AttentionInterface.register)
    get = ALL_ATTENTION_FUNCTIONS.get_interface
    assert (
        get("eager", modeling_llama.eager_attention_forward)
        is modeling_llama.eager_attention_forward
    )
    assert tuple(modeling_llama.repeat_kv(torch.ones(2, 1, 3, 4), 2).shape) == (2, 2, 3, 4)


@pytest.mark.parametrize("make", [create_causal_mask, create_sliding_window_causal_mask])
def test_a_mask_reads_batch_length_dtype_and_device(model, make):
    """Of hidden states: their own size is not read."""
    config = transformers.MistralConfig(sliding_window=2, attn_implementation="eager")
    mask = make(config, torch.ones(2, 3, 0), None, None)
    assert mask.shape == (2, 1, 3, 3) and mask.dtype == torch.float32
    assert (mask[0, 0] == 0).sum() == (6 if make is create_causal_mask else 5)


def test_modules_have_the_names_and_results_we_expect(model):
    layer = model.model.layers[0]
    names = [name for name, _ in model.named_parameters()]
    block = [f"model.layers.0.self_attn.{p}_proj.weight" for p in "qkvo"]
    block += [f"model.layers.0.mlp.{p}_proj.weight" for p in ("gate", "up", "down")]
    block += [f"model.layers.0.{p}_layernorm.weight" for p in ("input", "post_attention")]
    assert set(block + ["model.embed_tokens.weight", "model.norm.weight"]) <= set(names)
    assert "lm_head.weight" not in names and model.lm_head.weight is model.model.embed_tokens.weight
    x, ids = torch.ones(1, 3, 8), torch.ones(1, 3, dtype=torch.long)
    rotary = model.model.rotary_emb(x, torch.arange(3)[None])
    assert layer.self_attn.num_key_value_groups == 2
    attention = layer.self_attn(hidden_states=x, position_embeddings=rotary, attention_mask=None)
    assert isinstance(attention, tuple) and len(attention) == 2 and attention[0].shape == x.shape
    assert isinstance(layer(x, position_embeddings=rotary, attention_mask=None), torch.Tensor)
    assert model.model(input_ids=ids, use_cache=False).last_hidden_state.shape == x.shape


def test_the_loss_counts_as_we_do(model):
    ids = torch.arange(6).view(2, 3)
    labels = ids.clone()
    labels[0, 1] = -100
    logits = model(input_ids=ids).logits
    targets = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    mean = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    torch.testing.assert_close(model(input_ids=ids, labels=labels).loss, mean)


def test_float32_islands_are_where_we_lift_them():
    norm = inspect.getsource(modeling_llama.LlamaRMSNorm.forward)
    rotary = inspect.getsource(modeling_llama.LlamaRotaryEmbedding.forward)
    eager = inspect.getsource(modeling_llama.eager_attention_forward)
    assert "torch.float32" in norm and ".float()" in rotary and "torch.float32" in eager


def test_nothing_is_trusted_that_could_run_code():
    """No remote code, no pickle: weights are safetensors or gguf. Only labs import our files."""
    every = {source.stem for source in SOURCES} | {"labs"}
    shared = {
        "labs",
        "sp_layout_sim",
        "pp",
    }  # labs/four_layouts.py, schedules.py, torch_pipeline.py
    for source in SOURCES:
        labs = "labs" in source.relative_to(ROOT).parts or source.stem == "oom_search"
        own = every - shared if labs else every
        text = source.read_text()
        trusting = r"trust_remote_code(?!=False|.: False)|import pickle|pickle\.load"
        trusting += r"|torch\.load\((?!\)|.*weights_only=True)"
        if (
            source.parent.name == "lab3b_hang"
        ):  # it reads torch's record of its own process, no more
            trusting = trusting.replace("import pickle|pickle", r"pickle(?!\.loads\(dump\))")
        assert not re.search(trusting, text), source
        assert "AutoModelForCausalLM.from_pretrained(" not in text.replace("_gguf", ""), source
        if "auto.from_pretrained(" in text:
            assert '"use_safetensors": True' in text, source
        for node in ast.walk(ast.parse(text)):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not own & {name.split(".")[0] for name in names}, f"{source} imports one of ours"


def test_what_is_imported_is_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = sum(project["optional-dependencies"].values(), project["dependencies"])
    declared = {re.match(r"[\w-]+", line)[0].replace("-", "_") for line in lines}
    files = [file for pattern in ("*.py", "[a-z]*/**/*.py") for file in ROOT.glob(pattern)]
    ours = {file.stem for file in files} | {file.parent.name for file in files}
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            packages = {name.partition(".")[0] for name in names}
            assert packages <= declared | ours | sys.stdlib_module_names, file
