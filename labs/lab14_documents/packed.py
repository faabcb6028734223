"""Attention of packed documents on ranks, and whole models of Hugging Face's: for lab 14."""

from functools import partial
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from transformers import (
    AttentionInterface,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from labs.kit.inputs import drawn
from labs.kit.models import Float64, random_model, relative_errors
from labs.kit.tools import gradients
from labs.lab14_documents.documents import (
    END,
    IGNORE,
    VOCAB,
    document_of,
    finished,
    first_of,
    mask_of,
    packed_ids,
    position_of,
)

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 8, "vocab_size": VOCAB}
SIZES |= {"num_key_value_heads": 4, "head_dim": 4, "intermediate_size": 12, "pad_token_id": None}
MIXED = {"layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": True}
FAMILIES = {
    "LLaMA": (LlamaConfig, LlamaForCausalLM, {"attention_bias": True}),
    "Mistral, window 4": (MistralConfig, MistralForCausalLM, {"sliding_window": 4}),
    "Qwen3, window 3 and none": (Qwen3Config, Qwen3ForCausalLM, MIXED | {"sliding_window": 3}),
}


# ---- Attention on one device ---------------------------------------------------------------------


def attention_case(seed, lengths, window, kv=5, g=3, d=2):
    """q (kv, g, s, d), k, v, dout of a packed sequence; on one device out, dq, dk, dv."""
    s = sum(lengths)
    q, dout = drawn(seed, kv, g, s, d), drawn(seed + 1, kv, g, s, d)
    k, v = drawn(seed + 2, 2, kv, s, d)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    mask = mask_of(lengths, window)
    out = dense(*leaves, mask)
    dq, dk, dv = gradients(out, dout, leaves)
    case = SimpleNamespace(q=q, k=k, v=v, dout=dout, out=out.detach(), dq=dq, dk=dk, dv=dv)
    case.mask, case.first = mask, first_of(lengths, window)
    return case


def dense(q, k, v, mask):
    """Attention with a mask (n, m) by PyTorch's own function, without a scale."""
    k, v = (x[:, None].expand(-1, q.shape[1], -1, -1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=1.0)


# ---- Whole models --------------------------------------------------------------------------------


def tiny(family, seed):
    """Hugging Face's model with random weights, in float64, the same on every rank."""
    config, causal, more = FAMILIES[family]
    return random_model(causal, config(**SIZES, **more), seed)


def each_document_alone(model, ids, lengths):
    """(loss, {name: gradient}) of the untouched model, which sees one document at a time."""
    total = sum(n - 1 for n in lengths)
    loss = torch.zeros((), dtype=torch.float64)
    with Float64():
        for document in ids.split(lengths):
            logits = model(input_ids=document[None], use_cache=False).logits[0]
            loss = loss + F.cross_entropy(logits[:-1], document[1:], reduction="sum") / total
    loss.backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    return loss.detach(), grads


def model_errors(lab, family, way, lengths, held, group, seed):
    """Relative errors of a train_step on this rank: {"loss", each parameter's name: error}."""
    model, ids = tiny(family, seed), packed_ids(lengths, seed)
    loss, right = each_document_alone(model, ids, lengths)
    with Float64():
        found = lab.train_step(model, ids, END, way, held, group)
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    return relative_errors(found, grads, loss, right)


def gradient_elsewhere(lab, family, way, lengths, held, group, seed):
    """Of one document's loss: (the gradient in its own embeddings, in all others), on this rank."""
    model, ids, own = tiny(family, seed), packed_ids(lengths, seed), held[group.rank()]
    document, position = document_of(lengths)[own], position_of(lengths)
    chosen = lengths.index(max(lengths))
    attention = partial(lab.attention_of, way, position, held, group)
    AttentionInterface.register("documents", attention)
    model.set_attn_implementation("documents")
    x = model.get_input_embeddings()(ids[own]).detach().requires_grad_()
    labels = finished.targets(ids, END)[own].masked_fill(document != chosen, IGNORE)
    with Float64():
        given = {"inputs_embeds": x[None], "position_ids": position[own][None]}
        logits = model(**given, use_cache=False).logits[0]
        lab.mean_loss(logits, labels, group).backward()
    return x.grad[document == chosen], x.grad[document != chosen]
