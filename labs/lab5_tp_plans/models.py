"""Tiny random models of several families, a step of one, and styles in a few words, for lab 5."""

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    loss_parallel,
)
from transformers import AutoConfig, AutoModelForCausalLM

from labs.kit.harness import Traffic

FAMILIES = {  # what each needs beside SHAPE; mistral has no plan of its own here
    "llama": {"model_type": "llama"},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3"},
    "gemma3": {
        "model_type": "gemma3_text",
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 5,
        "query_pre_attn_scalar": 8,
    },
    "phi3": {"model_type": "phi3"},
    "mistral": {"model_type": "mistral", "sliding_window": 5},
}
MORE = {  # what the referee tries beside these
    "smollm3": {"model_type": "smollm3", "no_rope_layers": [1, 0], "tie_word_embeddings": True},
    "olmo2": {"model_type": "olmo2"},
    "glm4": {"model_type": "glm4"},
}
SHAPE = {"vocab_size": 101, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SHAPE |= {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8, "pad_token_id": None}


def tiny_model(family, **changes):
    """A random model of a family, the same on every rank; no norm's weight is all ones."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(**SHAPE | (FAMILIES | MORE)[family] | changes)
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape)
    return model


def random_ids(seed, length, vocab=SHAPE["vocab_size"]):
    """Tokens (2, length), the same on every rank."""
    return torch.randint(vocab, (2, length), generator=torch.Generator().manual_seed(seed + 1))


class Collectives(Traffic):
    """Traffic that sees what DTensor sends inside an operation: DTensor takes that apart first."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented
        return super().__torch_dispatch__(func, types, args, kwargs)


def step(model, ids):
    """(logits, loss, Collectives of the forward, of the backward) of a step on ids (b, s)."""
    forward, backward = Collectives(), Collectives()
    with loss_parallel():  # for sharded logits; others do not notice
        with forward:
            out = model(input_ids=ids, labels=ids, use_cache=False)
        with backward:
            out.loss.backward()
    return out.logits.detach(), out.loss.detach(), forward, backward


def full(x):
    """A tensor, or a DTensor, as one device has it."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def describe(style):
    """A style in a few words: layout of what goes in -> of what comes out."""
    name = type(style).__name__
    if not isinstance(style, ParallelStyle):
        return f"{name}, no style"
    if isinstance(style, ColwiseParallel | RowwiseParallel):
        there, back = style.input_layouts[0], style.output_layouts[0]
        return f"{name}: {there} -> {back}, {'plain' if style.use_local_output else 'DTensor'}"
    if hasattr(style, "layout"):
        return f"{name}: {style.layout} -> {Replicate()}, DTensor"
    return f"{name}{getattr(style, 'sizes', '')}"


def short(ops):
    """{op: [calls, bytes]} in a few letters: 5 AG 5 RS."""
    letters = {"all_gather": "AG", "reduce_scatter": "RS", "all_reduce": "AR", "all_to_all": "A2A"}
    return " ".join(f"{ops[op][0]} {letters.get(op, op)}" for op in sorted(ops)) or "none"
