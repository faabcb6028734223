"""Muon on one device by torch.optim.Muon, and small models on ranks beside it: for lab 17."""

from datetime import timedelta
from functools import cache
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import AdamW, Muon
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from labs.kit.harness import LABS, expect, load, relative_error
from labs.kit.models import Float64, random_model
from labs.lab17_muon import lesson as finished  # not the learner's

EXACT = 1e-9
STEPS, RATE, SEQUENCES, TOKENS = 3, 0.02, 2, 9
# Neither 2 nor 3 divides KV heads, width of the MLP, vocabulary; there are tall and wide matrices
SIZES = {"hidden_size": 20, "intermediate_size": 13, "num_hidden_layers": 2, "vocab_size": 37}
SIZES |= {"num_attention_heads": 10, "num_key_value_heads": 5, "head_dim": 4, "pad_token_id": None}
TIED = {"tie_word_embeddings": True, "attention_bias": True}
FAMILIES = {
    "LLaMA": (LlamaConfig, LlamaForCausalLM, TIED),
    "Qwen3": (Qwen3Config, Qwen3ForCausalLM, {"tie_word_embeddings": False}),
}
LAYOUTS = "ZeRO-1", "TP"


# ---- One device ----------------------------------------------------------------------------------


class Exact(Float64):
    """Inside, torch.optim.Muon computes in float64, too: for the proof only.

    Its Newton-Schulz casts the update to bfloat16 in one line, whatever the parameters are. Inside
    that cast is a copy; all else is torch's. casts: how often that was, so that nothing is compared
    in bfloat16 unnoticed, if another torch casts in another way.
    """

    def __init__(self):
        super().__init__()
        self.casts = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.bfloat16 or (func is torch.Tensor.to and torch.bfloat16 in args):
            self.casts += 1
            func, args = torch.Tensor.clone, args[:1]
        return super().__torch_function__(func, types, args, kwargs)


def torchs(matrix, blocks=1):
    """What torch.optim.Muon subtracts for an update (m, n), each block of rows a parameter."""
    params = [nn.Parameter(torch.zeros_like(rows)) for rows in matrix.chunk(blocks)]
    for p, rows in zip(params, matrix.chunk(blocks)):
        p.grad = rows.clone()
    with Exact() as exact:
        Muon(params, lr=1.0, weight_decay=0.0, momentum=0.0).step()
    expect(exact.casts == blocks, "torch.optim.Muon casts in another way: see muon.py")
    return -torch.cat([p.detach() for p in params])


def tiny(family, seed):
    """Hugging Face's model with random weights, in float64, the same on every rank."""
    config, causal, more = FAMILIES[family]
    return random_model(causal, config(**SIZES | more), seed)


@cache  # nothing changes what it gives
def one_device(family, seed, world, per_head):
    """STEPS steps of torch.optim.Muon, and AdamW for the rest, on all ranks' sequences.

    ids [rank] (b, s); losses; weights, momentum {name: tensor} after the last step.
    """
    model, numbers = tiny(family, seed), torch.Generator().manual_seed(seed)
    shape = world, SEQUENCES, TOKENS
    ids = torch.randint(SIZES["vocab_size"], shape, generator=numbers)
    blocks = {}  # views of the weights: a block of rows is a parameter of torch's Muon
    for name, count in finished.choose(model, per_head).items():
        whole = model.get_parameter(name).detach()
        blocks[name] = [nn.Parameter(rows) for rows in whole.chunk(count)]
    rest = [p for name, p in model.named_parameters() if name not in blocks]
    muon = Muon([p for parts in blocks.values() for p in parts], lr=RATE)
    adamw, losses = AdamW(rest, lr=RATE, foreach=False), []
    with Exact() as exact:
        for _ in range(STEPS):
            model.zero_grad()
            loss = finished.loss_of(model, ids.flatten(0, 1))
            loss.backward()
            losses.append(loss.item())
            for name, parts in blocks.items():
                for p, rows in zip(parts, model.get_parameter(name).grad.chunk(len(parts))):
                    p.grad = rows
            muon.step()
            adamw.step()
    counted = STEPS * sum(map(len, blocks.values()))
    expect(exact.casts == counted, "torch.optim.Muon casts in another way: see muon.py")
    momentum = {
        name: torch.cat([muon.state[p]["momentum_buffer"] for p in parts])
        for name, parts in blocks.items()
    }
    weights = {name: p.detach() for name, p in model.named_parameters()}
    return SimpleNamespace(ids=ids, losses=losses, weights=weights, momentum=momentum)


# ---- The same on ranks ---------------------------------------------------------------------------


@cache
def tp_script():
    return load(LABS.parent / "tp.py")


def parallelized(model, group):
    """(model, backward(ids of all ranks) -> loss) by tp.py: .grad is of own rows or columns."""
    script = tp_script()
    args = {"recompute": "none", "loss": "full", "timeout": timedelta(seconds=60)}
    args |= {"batch": group.size() * SEQUENCES, "length": TOKENS, "config": model.config}
    args = SimpleNamespace(**args)
    model = script.parallelize(model, group, args)

    def forward_backward(ids):
        model.zero_grad()
        flat = ids.flatten(0, 1)
        return script.forward_backward(model, flat, flat, group, args)

    return model, forward_backward


def model_errors(lab, family, layout, way, per_head, group, seed):
    """After STEPS steps, on this rank: {what: relative error} of losses, weights, momentum.

    Momentum first: Newton-Schulz divides by the gradient's length, so weights hardly show one that
    is P times too large. way: its name.
    """
    rank, world = group.rank(), group.size()
    right, model = one_device(family, seed, world, per_head), tiny(family, seed)
    chosen, losses = lab.choose(model, per_head), []
    how = {"lr": RATE, "dtype": torch.float64}
    with Exact():
        if layout == "ZeRO-1":
            zero = lab.Zero1(model, group)
            own = zero.own
        else:
            model, forward_backward = parallelized(model, group)
            own = lab.tensor_parallel(model)
        matrices, adamw = lab.make_optimizers(own, chosen, group, RATE)
        for _ in range(STEPS):
            if layout == "ZeRO-1":
                ids = right.ids[rank]
                loss = lab.train_step(zero, matrices, adamw, lab.WAYS[way], ids, **how)
                dist.all_reduce(loss, group=group)
                loss /= world
            else:
                loss = forward_backward(right.ids)
                lab.step(matrices, lab.WAYS[way], group, **how)
                adamw.step()
            losses.append(loss.item())
    errors = {}
    for name, matrix in zip(chosen, matrices):
        errors[f"momentum of {name}"] = relative_error(
            matrix.momentum, right.momentum[name].split(matrix.sizes, matrix.dim)[rank]
        )
    errors["loss"] = max(abs(a - b) / b for a, b in zip(losses, right.losses))
    for name, (part, dim) in own.items():
        whole = right.weights[name]
        if layout == "ZeRO-1":
            start, end = finished.shard_range(len(whole), rank, world)
            own_copy = model.get_parameter(name).detach()
            errors[f"{name}, all of it"] = relative_error(own_copy, whole)
        else:
            _, start, end = getattr(part, "shard", (0, 0, len(whole)))
        errors[name] = relative_error(part.detach(), whole.narrow(dim, start, end - start))
    return errors
