"""A small LLaMA, and what one device makes of a few steps with it: for lab 9."""

import functools
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, parameters_to_vector
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from labs.lab9_zero import lesson as finished  # not the learner's

EXACT = 1e-9
STEPS, RATE, TOKENS = 2, 1e-2, 12
SIZES = {"hidden_size": 20, "intermediate_size": 27, "num_hidden_layers": 3, "vocab_size": 37}
SIZES |= {"num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 4}


class Norm(LlamaRMSNorm):
    """RMSNorm in the dtype of its input; HF's computes in float32 whatever comes."""

    def forward(self, x):
        return self.weight * x * (x.square().mean(-1, keepdim=True) + self.variance_epsilon).rsqrt()


class Scaled(LlamaForCausalLM):
    """LLaMA whose logits are scaled by one more parameter, of one number: less than a rank each."""

    def __init__(self, config):
        super().__init__(config)
        self.scale = nn.Parameter(torch.tensor([1.3]))

    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        out.logits = out.logits * self.scale
        return out


def build(seed, tied):
    """The small model in float64, the same on every rank."""
    torch.manual_seed(seed)
    model = Scaled(LlamaConfig(**SIZES, tie_word_embeddings=tied)).double()
    for module in model.modules():
        if isinstance(module, LlamaRMSNorm):
            module.__class__ = Norm
            nn.init.normal_(module.weight, mean=1, std=0.1)
    return model


def unit_parameters(model):
    """[parameters of the root unit, of each layer's], as make_units() takes them."""
    layers = [list(layer.parameters()) for layer in model.model.layers]
    inside = {id(p) for layer in layers for p in layer}
    return [[p for p in model.parameters() if id(p) not in inside], *layers]


@functools.cache
def one_device(seed, world, tied, backwards, max_norm=None):
    """What one device makes of all ranks' sequences in STEPS steps of AdamW: a list of steps.

    A step has ids (rank, backward, 1, s) and the losses of the ranks; by unit, flat: grads, the
    mean gradients before clipping, and weights, those after the step.
    """
    model, steps = build(seed, tied), []
    units = unit_parameters(model)
    numbers = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, foreach=False)
    for number in range(STEPS):
        shape = world, backwards, 1, TOKENS - number
        ids = torch.randint(SIZES["vocab_size"], shape, generator=numbers)
        losses = [sum(finished.loss_of(model, each) for each in mine) / backwards for mine in ids]
        optimizer.zero_grad()
        (sum(losses) / world).backward()
        grads = [parameters_to_vector([p.grad for p in unit]).clone() for unit in units]
        if max_norm:
            clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        weights = [parameters_to_vector(unit).detach().clone() for unit in units]
        losses = [loss.detach() for loss in losses]
        steps.append(SimpleNamespace(ids=ids, losses=losses, grads=grads, weights=weights))
    return steps
