"""Small mixtures of experts of Hugging Face's, in float64, on one device: the reference of lab 12."""

from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import Wrong, expect_close
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM

EXACT = 1e-10
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 31}
SIZES |= {"num_key_value_heads": 2, "head_dim": 4, "pad_token_id": None, "sliding_window": None}
FAMILIES = {  # name: model type, the names of the number of experts and of their width, more
    "Qwen3-MoE": ("qwen3_moe", "num_experts", "moe_intermediate_size", {"norm_topk_prob": False}),
    "Mixtral": ("mixtral", "num_local_experts", "intermediate_size", {}),
}


class Float64(TorchFunctionMode):
    """Inside, what asks for float32 gets float64: for the proof only.

    Hugging Face computes norms, the router's softmax and its balance loss in float32, whatever the
    model's dtype. That would be off by 1e-7 on either side, and in another way on each.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        args = [torch.float64 if arg is torch.float32 else arg for arg in args]
        kwargs = kwargs or {}
        if kwargs.get("dtype") is torch.float32:
            kwargs = kwargs | {"dtype": torch.float64}
        return func(*args, **kwargs)


def tiny(family, experts, k, seed, width=12, dtype=torch.float64, **changes):
    """Hugging Face's model with random weights, the same on every rank."""
    kind, count_name, width_name, more = FAMILIES[family]
    sizes = SIZES | {count_name: experts, width_name: width, "num_experts_per_tok": k} | more
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**sizes, **changes}))
    model.set_experts_implementation("eager")  # the model's own lines, no kernel in their place
    model = model.to(dtype).eval()
    for parameter in model.parameters():  # so that no norm is 1 and no two choices are alike
        parameter.data += 0.2 * torch.randn(parameter.shape, dtype=dtype)
    return model


def drawn(seed, *shape):
    """Random numbers, the same on every rank."""
    numbers = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=numbers, dtype=torch.float64)


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


def own_share(name, right, blocks, held):
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
    held = slice(*lab.split(case.experts, group.rank(), group.size()))
    grads = {name: p.grad for name, p in model.named_parameters()}
    norm = torch.stack([grad.norm() for grad in right.values()]).norm()
    errors = {"loss": abs(found - loss).item() / loss.item()}
    for name, grad in right.items():
        ours, grad = own_share(name, grad, blocks, held)
        # what is zero by construction is held against a thousandth of all gradients' norm
        error = (grads[ours] - grad).norm() / torch.maximum(grad.norm(), norm / 1000)
        errors[ours] = error.item()
    return errors


def a_case(family, experts, k, seed, rows, length=5, coefficient=0.1):
    """What model_errors() runs."""
    sizes = {"family": family, "experts": experts, "k": k, "seed": seed, "rows": rows}
    return SimpleNamespace(**sizes, length=length, coefficient=coefficient)


def same(what, mine, right, hints=None, otherwise=""):
    """expect_close() of EXACT, with a hint too where the tensor is none of the known wrong ones."""
    try:
        return expect_close(what, mine, right, EXACT, hints)
    except Wrong as wrong:
        raise Wrong(wrong.found, wrong.hint or otherwise) from None
