"""PyTorch's fully_shard beside lab 9's stages: how it is applied, and what it should take."""

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from transformers import LlamaForCausalLM

from labs.kit.alive import PARTS
from labs.lab9_zero.zero import finished, unit_parameters


def shard_fully(model, group):
    """fully_shard every layer and the rest, with a mean that gloo can form."""
    mesh = DeviceMesh.from_group(group, "cpu")
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(float(group.size()))
            module.set_force_sum_reduction_for_comms(True)


def fully_shard_memory(lab, config, tokens, rank, world):
    """memory() and messages() of fully_shard, which pads each parameter's rows."""
    with torch.device("meta"):
        units = unit_parameters(LlamaForCausalLM(config))
    padded, own = [], 0
    for unit in units:
        rows = [-(-p.shape[0] // world) for p in unit]  # of a rank
        padded.append(sum(n * p.shape[1:].numel() for n, p in zip(rows, unit)))
        for n, p in zip(rows, unit):
            own += min(max(p.shape[0] - rank * n, 0), n) * p.shape[1:].numel()
    numbers = [sum(padded), sum(padded), 2 * own, world * padded[0]]
    numbers.append(lab.activations(config, tokens))
    sent = finished.messages([world * n for n in padded], world, 3, 1)
    return {part: 4 * n for part, n in zip(PARTS, numbers)}, sent
