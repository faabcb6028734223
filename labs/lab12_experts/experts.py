"""Small mixtures of experts of Hugging Face's, in float64, on one device: for lab 12."""

from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from labs.kit.models import Float64, random_model, relative_errors

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 31}
SIZES |= {"num_key_value_heads": 2, "head_dim": 4, "pad_token_id": None, "sliding_window": None}
FAMILIES = {  # the classes, and what they call the number of experts and the width of one
    "Qwen3-MoE": (Qwen3MoeConfig, Qwen3MoeForCausalLM, "num_experts", "moe_intermediate_size"),
    "Mixtral": (MixtralConfig, MixtralForCausalLM, "num_local_experts", "intermediate_size"),
}


def tiny(family, experts, k, seed, width=12, **changes):
    """A random_model() with so many experts."""
    config, causal, count_name, width_name = FAMILIES[family]
    sizes = SIZES | {count_name: experts, width_name: width, "num_experts_per_tok": k} | changes
    model = random_model(causal, config(**sizes), seed)
    model.set_experts_implementation("eager")  # the model's own lines, no kernel in their place
    return model


def one_device(model, ids, labels, coefficient):
    """(loss, {name: gradient}) of the untouched model on all ranks' sequences ids (b, s)."""
    with Float64():
        out = model(input_ids=ids, use_cache=False, output_router_logits=True)
        loss = F.cross_entropy(out.logits.flatten(0, 1), labels.flatten())
        loss = loss + coefficient * out.aux_loss
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    return loss.detach(), grads


def own_share(name, right, held):
    """One device's gradient, of it the rows of this rank's experts; the name in our model."""
    ours = name.replace("gate.weight", "router")
    ours = ours.replace("experts.gate_up_proj", "gate_up").replace("experts.down_proj", "down")
    return ours, right[held] if ours.endswith(("gate_up", "down")) else right


def model_errors(lab, case, rank, world, parallel):
    """Relative errors of a train_step on this rank, {"loss", each parameter's name: error}.

    case: family, experts, k, seed, and rows: how many sequences of `length` tokens each rank has.
    """
    total = sum(case.rows)
    numbers = torch.Generator().manual_seed(case.seed + 1)
    shape = total, case.length
    ids, labels = (torch.randint(31, shape, generator=numbers) for _ in range(2))
    model = tiny(case.family, case.experts, case.k, case.seed)
    loss, right = one_device(model, ids, labels, case.coefficient)
    group, replicas = lab.make_groups(world, parallel)
    blocks = lab.parallelize(model, group)
    mine = slice(sum(case.rows[:rank]), sum(case.rows[: rank + 1]))
    call = model, blocks, ids[mine], labels[mine], case.coefficient, dist.group.WORLD, replicas
    with Float64():
        found = lab.train_step(*call)
    held = slice(*lab.shard_range(case.experts, group.rank(), group.size()))
    grads = {name: p.grad for name, p in model.named_parameters()}
    right = dict(own_share(name, grad, held) for name, grad in right.items())
    return relative_errors(found, grads, loss, right)


def a_case(family, experts, k, seed, rows, length=5, coefficient=0.1):
    """What model_errors() runs."""
    sizes = {"family": family, "experts": experts, "k": k, "seed": seed, "rows": rows}
    return SimpleNamespace(**sizes, length=length, coefficient=coefficient)
