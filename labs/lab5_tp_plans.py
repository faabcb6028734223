"""Lab 5: Tensor parallel plans. A dict from module names to styles, and a model that was never told.

torch's parallelize_module(model, mesh, plan) cuts a stock Hugging Face model. The model's code stays as it
is: the weights become DTensors (which know their layout), and hooks convert what goes in and comes out. How
much of a real framework's parallelism fits in such a dict, and what does the dict get wrong? A layer:

                     layout of x on P = 2 ranks                       the plan's entry
    embed_tokens     rows of the table -> partial sums -> TOKENS      RowwiseParallel
    input_layernorm  TOKENS -> norm -> every rank has all of x        NormThenGather(TOKENS)
    q, k, v_proj     x -> heads / P, plain tensors                    ColwiseParallel
    q_norm, k_norm   heads / P -> heads / P    (Qwen3, Gemma3)        QKNormParallel
    o_proj           heads / P -> partial sums -> TOKENS              RowwiseParallel
    + residual       TOKENS                                           (DTensors add up by themselves)
    post_..norm, mlp the same again: gate, up by columns, down by rows
    norm, lm_head    TOKENS -> all of x -> vocabulary / P             ..., the loss under loss_parallel()

TOKENS is Replicate() in tensor parallelism: every rank has all tokens, partial sums are all-reduced. It is
Shard(1) in sequence parallelism (SP): (b, s/P, h) each, and reduce-scatter and all-gather take the place of
the all-reduce. That one word is the whole difference between the two plans.

Where a plan goes wrong, the logits are often right:

- A norm inside attention sees its rank's heads. If nothing says so, each rank keeps the gradient of its own
  heads: NeMo AutoModel's plans for Qwen3 and Gemma3. The logits show nothing, the lab does.
- Fused weights, [Q | K | V] in Phi3, are not to be cut in P pieces: rank 0 would get Q and some of K.
- Heads that P does not divide fail late or never: validate_heads() comes before anything is cut.
- A plan's key that fits no module is skipped, with a warning: parallelize() refuses.

Which plan? choose_plan() has four levels and says why: what the caller gives (a dict, a function, the
import path of either); Hugging Face's own, if asked for; the model's in PLANS; a plan for anything that is
built like Llama.

    python labs/lab5_tp_plans.py                          # checks, all families, memory
    python labs/lab5_tp_plans.py --model qwen3 --sp       # one plan: printed, with the reason, and proved
    python labs/lab5_tp_plans.py --model phi3 --hf-plan
    python labs/lab5_tp_plans.py --model mistral          # a model without a plan of its own
    python labs/lab5_tp_plans.py --model llama --plan package.module.plan
    python labs/lab5_tp_plans.py --plot lab5.png --json lab5.json
    python labs/lab5_tp_plans.py --inject-bug list

Sources: NeMo AutoModel, nemo_automodel/components/distributed/: optimized_tp_plans.py (plans, styles),
parallelizer.py (the choice, Hugging Face's strings, the validation). transformers: base_model_tp_plan in each
model's configuration, integrations/tensor_parallel.py (what the strings mean). torch:
torch/distributed/tensor/parallel/style.py. Megatron-LM and Nanotron say all this in their layers instead (lab
2); DeepSpeed's AutoTP (module_inject/auto_tp.py) guesses it from the modules. SP: arXiv 2205.05198.
"""

import argparse
import copy
import importlib.util
import json
import math
import multiprocessing
import os
import pkgutil
import random
import re
import signal
import sys
import tempfile
import time
import traceback
import warnings
from contextlib import ExitStack, suppress
from fnmatch import fnmatchcase
from functools import partial
from multiprocessing import connection
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.testing._internal.distributed import fake_pg
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

# ---------------------------------------------------------------------------------------------------
# The lesson 1: before anything is cut
# ---------------------------------------------------------------------------------------------------


def validate_heads(config, world):
    """Raise ValueError unless every rank gets whole query heads, and the KV heads that belong to them.

    That is: world divides config.num_attention_heads and config.num_key_value_heads. The message names both
    numbers, world, and all numbers of ranks that would do. (NeMo AutoModel: validate_tp_mesh.)
    """
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    # exercise: validate_heads
    if heads % world or kv_heads % world:
        fit = [str(n) for n in range(1, kv_heads + 1) if heads % n == 0 and kv_heads % n == 0]
        cut = f"{heads} heads and {kv_heads} KV heads cannot be cut over {world} ranks"
        raise ValueError(f"{cut}; ranks that would do: {', '.join(fit)}")
    # end exercise


# Copied from labs/lab6_lora.py
def matches(name, pattern):
    """Whether a module's name fits a key such as "layers.*.up": * is one step of the path."""
    steps, patterns = name.split("."), pattern.split(".")
    return len(steps) == len(patterns) and all(map(fnmatchcase, steps, patterns))


def parallelize(model, mesh, plan):
    """Cut a model over the ranks of a mesh, in place, by a plan {pattern of module names: style}.

    Raises ValueError, with the model as it was, for heads that cannot be cut and for a pattern that fits no
    module (parallelize_module only warns, and leaves that part whole). Tied weights are tied again: both
    modules got a parameter of their own.
    """
    validate_heads(model.config, mesh.size())
    names = [name for name, _ in model.named_modules()]
    for pattern in plan:
        if not any(matches(name, pattern) for name in names):
            raise ValueError(f"the plan's {pattern} fits no module of {type(model).__name__}")
    parallelize_module(model, mesh, plan)
    if model.config.tie_word_embeddings:
        model.lm_head.weight = (
            model.model.embed_tokens.weight
        )  # rows of the vocabulary, both of them
    return model


# ---------------------------------------------------------------------------------------------------
# The lesson 2: styles. What torch's ColwiseParallel, RowwiseParallel and SequenceParallel do not cover
# ---------------------------------------------------------------------------------------------------


def replicate_weights(name, module, mesh):
    """Make DTensors of a module's parameters, all of them whole on every rank."""
    for key, parameter in list(module.named_parameters(recurse=False)):
        full = distribute_tensor(parameter.detach(), mesh, [Replicate()])
        setattr(module, key, nn.Parameter(full, requires_grad=parameter.requires_grad))


class NormThenGather(ParallelStyle):
    """A norm of x as it lies, whose result every rank gets whole, as one DTensor.

    layout Shard(1): SP. The norm sees the rank's tokens (b, s/P, h), then one all-gather. q, k and v read
    the same DTensor, so their partial gradients are added up first and reduce-scattered once. In NeMo
    AutoModel: SequenceParallelAllGatherActivation. With torch's plain SequenceParallel each of q, k and v
    does its own gathering.
    layout Replicate(): tensor parallelism. Nothing is gathered; the gradient is all-reduced once, not once
    for each of q, k and v (2 layers: 5 messages in the backward instead of NeMo's 11).
    """

    def __init__(self, layout):
        super().__init__()
        self.layout = layout

    def _apply(self, module, device_mesh):
        """Hooks: enter(module, args, mesh) makes x (a plain tensor or a DTensor) a DTensor laid out as
        self.layout; leave(module, y, mesh) returns a DTensor, the same on all ranks."""

        def enter(module, args, mesh):
            x = args[0]
            if not isinstance(x, DTensor):
                x = DTensor.from_local(x, mesh, [self.layout], run_check=False)
            return x.redistribute(placements=[self.layout])

        def leave(module, y, mesh):
            # exercise: all_gather_style
            return y.redistribute(placements=[Replicate()])
            # end exercise

        return distribute_module(module, device_mesh, replicate_weights, enter, leave)


class QKNormParallel(ParallelStyle):
    """A norm over the head dimension inside attention: plain tensors in and out, of the rank's own heads.

    (b, s, heads/P, d) in Qwen3, (b, heads/P, s, d) in Gemma3. The weight (d) is the same for all heads, on
    all ranks, so its gradient is a sum over ranks that nobody takes unless told: NeMo AutoModel leaves these
    norms out of its plans; Hugging Face's says replicated_with_grad_allreduce.
    """

    def _apply(self, module, device_mesh):
        """enter(module, args, mesh) and leave(module, y, mesh) as in NormThenGather.

        x enters as a DTensor of which this rank has a shard: then DTensor knows the weight's gradient to be
        Partial, a part of a sum. Which dimension is called cut does not matter to a norm over the last one:
        1 fits both models. Values need no message, forward or backward.
        """
        # exercise: qk_norm_style

        def enter(module, args, mesh):
            return DTensor.from_local(args[0], mesh, [Shard(1)], run_check=False)

        def leave(module, y, mesh):
            return y.to_local()

        return distribute_module(module, device_mesh, replicate_weights, enter, leave)
        # end exercise


class RotaryParallel(ParallelStyle):
    """Rotary embeddings of all tokens where the residual stream is plain tensors of own tokens (b, s/P, h).

    transformers counts positions from 0 to x.shape[1]. In our plans x is a DTensor, whose shape is that of
    all tokens, and nothing is to be done. With plain tensors (NeMo AutoModel's plans at the start of 2026)
    every rank counts to s/P, while q and k are of s tokens: at best "16 must match 8". P divides s here.
    """

    def _apply(self, module, device_mesh):
        def positions_of_all(rotary, args, kwargs):
            """position_ids (1, s/P) counted from 0 on each rank -> (1, s), those of all tokens.

            Only where they are as many as x's own tokens, and x is no DTensor: a caller may have given all.
            """
            named = dict(zip(("x", "position_ids", "layer_type"), args)) | kwargs
            x, position_ids = named["x"], named["position_ids"]
            # exercise: rotary_style
            n = x.shape[1]
            if not isinstance(x, DTensor) and position_ids.shape[1] == n:
                own = position_ids + device_mesh.get_local_rank() * n
                position_ids = DTensor.from_local(own, device_mesh, [Shard(1)]).full_tensor()
            # end exercise
            return (), named | {"position_ids": position_ids}

        module.register_forward_pre_hook(positions_of_all, with_kwargs=True)
        return module


def fused_order(sizes, world):
    """The rows of a fused weight [Q | K | V] in the order [Q_0 | K_0 | V_0 | Q_1 | K_1 | V_1 ...]: int64.

    sizes: rows of each block, e.g. (q, k, v). Cut in `world` pieces, that gives rank r its share of every
    block. Raises ValueError for a block that world does not divide.
    """
    # exercise: fused_style
    for size in sizes:
        if size % world:
            raise ValueError(f"a fused block of {size} rows cannot be cut over {world} ranks")
    blocks = torch.arange(sum(sizes)).split(list(sizes))
    return torch.cat([block.chunk(world)[rank] for rank in range(world) for block in blocks])
    # end exercise


class FusedColwiseParallel(ParallelStyle):
    """ColwiseParallel for fused projections: rank r computes [Q_r | K_r | V_r], as the model's code expects.

    The parameter, and its gradient, are then a DTensor of the rows in another order: whole() puts them back.
    A checkpoint must be written through that.
    """

    def __init__(self, *sizes):
        super().__init__()
        self.sizes = sizes

    def _apply(self, module, device_mesh):
        module.fused_order = fused_order(self.sizes, device_mesh.size())
        for parameter in module.parameters():
            parameter.data = parameter.data[module.fused_order]
        return ColwiseParallel()._apply(module, device_mesh)


def whole(model, name, tensor):
    """A parameter's value or gradient as one device has it, from this rank's part of it."""
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    order = getattr(model.get_submodule(name.rpartition(".")[0]), "fused_order", None)
    if order is None:
        return full
    # exercise: fused_style
    back = torch.empty_like(full)
    back[order] = full
    return back
    # end exercise


class OwnHeads(ParallelStyle):
    """Tell Phi3's attention that it has 1/P of the heads: it cuts [Q | K | V] where its config says.

    NeMo AutoModel and Hugging Face do not, and let every rank compute all heads.
    """

    def _apply(self, module, device_mesh):
        module.config = copy.deepcopy(module.config)  # all layers share one
        module.config.num_attention_heads //= device_mesh.size()
        module.num_key_value_heads //= device_mesh.size()
        return module


# ---------------------------------------------------------------------------------------------------
# The lesson 3: plans
# ---------------------------------------------------------------------------------------------------

LAYER = "model.layers.*"


def sharded_logits(tokens=None):
    """lm_head: (b, s, h) -> (b, s, v/P), a DTensor that is never gathered; the loss wants loss_parallel().

    tokens: where x lies, if not whole on every rank (Replicate()).
    """
    return ColwiseParallel(input_layouts=tokens, output_layouts=Shard(-1), use_local_output=False)


def llama_plan(model, sequence_parallel):
    """The plan of Llama, Qwen2 and whatever is built like them: see the table at the top.

    The residual stream, from embed_tokens to the last norm, is a DTensor (use_local_output=False): its shape
    is that of all tokens, from which transformers makes positions and masks. All parameters become
    DTensors: clip_grad_norm_ and AdamW's foreach refuse a mixture with plain ones.
    """
    # exercise: llama_plan
    tokens = Shard(1) if sequence_parallel else Replicate()
    residual = {"output_layouts": tokens, "use_local_output": False}
    return {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), **residual),
        f"{LAYER}.input_layernorm": NormThenGather(tokens),
        f"{LAYER}.self_attn.q_proj": ColwiseParallel(),
        f"{LAYER}.self_attn.k_proj": ColwiseParallel(),
        f"{LAYER}.self_attn.v_proj": ColwiseParallel(),
        f"{LAYER}.self_attn.o_proj": RowwiseParallel(**residual),
        f"{LAYER}.post_attention_layernorm": NormThenGather(tokens),
        f"{LAYER}.mlp.gate_proj": ColwiseParallel(),
        f"{LAYER}.mlp.up_proj": ColwiseParallel(),
        f"{LAYER}.mlp.down_proj": RowwiseParallel(**residual),
        "model.norm": NormThenGather(tokens),
        "lm_head": sharded_logits(),
    }
    # end exercise


def qwen3_plan(model, sequence_parallel):
    """Llama's, and the norms of q and k."""
    norms = {f"{LAYER}.self_attn.{name}": QKNormParallel() for name in ("q_norm", "k_norm")}
    return llama_plan(model, sequence_parallel) | norms


def gemma3_plan(model, sequence_parallel):
    """Qwen3's, with a norm behind attention and MLP, too: in the residual stream's layout."""
    before = NormThenGather(Shard(1) if sequence_parallel else Replicate())
    after = SequenceParallel() if sequence_parallel else NormThenGather(Replicate())
    return qwen3_plan(model, sequence_parallel) | {
        f"{LAYER}.post_attention_layernorm": after,
        f"{LAYER}.pre_feedforward_layernorm": before,
        f"{LAYER}.post_feedforward_layernorm": after,
    }


def phi3_plan(model, sequence_parallel):
    """Llama's, with fused projections [Q | K | V] and [gate | up], heads and features cut all the same."""
    config = model.config
    head_dim = model.model.layers[0].self_attn.head_dim
    q, kv = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    separate = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    plan = llama_plan(model, sequence_parallel)
    return {name: style for name, style in plan.items() if not name.endswith(separate)} | {
        f"{LAYER}.self_attn": OwnHeads(),
        f"{LAYER}.self_attn.qkv_proj": FusedColwiseParallel(q, kv, kv),
        f"{LAYER}.mlp.gate_up_proj": FusedColwiseParallel(
            config.intermediate_size, config.intermediate_size
        ),
    }


PLANS = {  # by the class's name: a framework may have wrapped the class in one of its own (NeMo-RL does)
    "LlamaForCausalLM": llama_plan,
    "Qwen2ForCausalLM": llama_plan,
    "Qwen3ForCausalLM": qwen3_plan,
    "Gemma3ForCausalLM": gemma3_plan,
    "Phi3ForCausalLM": phi3_plan,
}


def base_plan(model, sequence_parallel):
    """For a model that nobody made a plan for: Llama's, by what is sure to be right.

    Plain SequenceParallel, as in NeMo AutoModel; logits gathered, so that any loss will do. NeMo's also cuts
    qkv_proj and gate_up_proj row by row; whether that is right depends on their layout, so we refuse them.
    """
    for name, _ in model.named_modules():
        if name.endswith(("qkv_proj", "gate_up_proj")):
            raise ValueError(f"{name} is fused, in an unknown layout: pass a plan, or ask for HF's")
    tokens = Shard(1) if sequence_parallel else Replicate()
    norm = SequenceParallel() if sequence_parallel else NormThenGather(tokens)
    plan = llama_plan(model, sequence_parallel)
    plan |= {name: norm for name in plan if name.endswith("norm")}
    return plan | {"lm_head": ColwiseParallel(input_layouts=tokens, output_layouts=Replicate())}


# ---------------------------------------------------------------------------------------------------
# The lesson 4: Hugging Face's plan
# ---------------------------------------------------------------------------------------------------

STYLES = {  # transformers 5.12 to 5.23; a new object each time: parallelize_module writes to it
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
    "embedding_colwise": lambda: ColwiseParallel(output_layouts=Replicate()),
    "replicated_with_grad_allreduce": QKNormParallel,
    "colwise_rep": lambda: ColwiseParallel(
        output_layouts=Replicate()
    ),  # so called before transformers 5
    "rowwise_rep": lambda: RowwiseParallel(input_layouts=Replicate()),
}


def hf_plan(model):
    """transformers' own plan of a model, in torch's styles. No sequence parallelism in it.

    Its strings are in config.base_model_tp_plan, with names below model.base_model_prefix ("model"), and in
    the class's _tp_plan, with whole names. Two changes, as in NeMo AutoModel: embed_tokens, where missing,
    is "embedding_rowwise" (a tied lm_head is cut like that); an lm_head that gathers its output does not
    (sharded_logits). Raises ValueError for a string that STYLES lacks: it says the module, too.
    """
    # exercise: translate_hf_plan
    prefix = model.base_model_prefix
    strings = {f"{prefix}.{name}": style for name, style in model.config.base_model_tp_plan.items()}
    strings = {f"{prefix}.embed_tokens": "embedding_rowwise"} | strings | type(model)._tp_plan
    plan = {}
    for name, style in strings.items():
        if style not in STYLES:
            raise ValueError(f"{name}: no style for transformers' {style}")
        plan[name] = STYLES[style]()
    if strings["lm_head"] in ("colwise_gather_output", "colwise_rep"):
        plan["lm_head"] = sharded_logits()
    return plan
    # end exercise


# ---------------------------------------------------------------------------------------------------
# The lesson 5: the choice
# ---------------------------------------------------------------------------------------------------


def load_plan(path):
    """The dict or function at an import path, package.module.name. Raises ValueError if there is none."""
    try:
        return pkgutil.resolve_name(path)
    except (ImportError, AttributeError, ValueError) as problem:
        raise ValueError(f"no plan at {path}: {problem}; package.module.name would do") from None


def choose_plan(model, sequence_parallel=False, custom=None, hf=False):
    """(plan, reason): the first that applies. The reason begins with the level's name.

    "custom"           custom is a dict, a function(model, sequence_parallel) that returns one, or the import
                       path of either (load_plan)
    "Hugging Face"     hf: hf_plan(model). Raises ValueError with sequence_parallel, which it does not have
    "model-specific"   PLANS[name of the model's class](model, sequence_parallel)
    "base"             base_plan(model, sequence_parallel)

    What a level raises is raised: a plan that fails must not become another plan, which would be wrong later
    and elsewhere. (NeMo AutoModel: _get_parallel_plan.)
    """
    name = type(model).__name__
    # exercise: choose_plan
    if custom is not None:
        plan = load_plan(custom) if isinstance(custom, str) else custom
        plan = plan(model, sequence_parallel) if callable(plan) else plan
        return (
            plan,
            f"custom: {custom if isinstance(custom, str) else getattr(custom, '__name__', 'a dict')}",
        )
    if hf:
        if sequence_parallel:
            raise ValueError(
                "Hugging Face's plan has no sequence parallelism; leave one of the two out"
            )
        return hf_plan(model), f"Hugging Face: {name}, as asked"
    if name in PLANS:
        return PLANS[name](model, sequence_parallel), f"model-specific: {name}"
    return base_plan(model, sequence_parallel), f"base: none for {name}"
    # end exercise


# ---------------------------------------------------------------------------------------------------
# Checks
# ---------------------------------------------------------------------------------------------------

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
    "mistral": {"model_type": "mistral"},
}
SHAPE = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "head_dim": 8,
}
SHAPE |= {"num_attention_heads": 8, "num_key_value_heads": 4, "pad_token_id": None}
TOLERANCE = 1e-5


def tiny_model(family, seed=0, **changes):
    """A random model of a family, the same on every rank; no norm's weight is all ones."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(**{**SHAPE, **FAMILIES[family], **changes})
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape)
    return model


def random_ids(seed, length, vocab=SHAPE["vocab_size"]):
    """Tokens (2, length), the same on every rank."""
    return torch.randint(vocab, (2, length), generator=torch.Generator().manual_seed(seed + 1))


def step(model, ids):
    """(logits, loss, Collectives of the forward, of the backward) of one training step on ids (b, s)."""
    forward, backward = Collectives(), Collectives()
    with loss_parallel():  # for sharded logits; others do not notice
        with forward:
            out = model(input_ids=ids, labels=ids, use_cache=False)
        with backward:
            out.loss.backward()
    return out.logits.detach(), out.loss.detach(), forward, backward


# Copied from tp.py
def all_reduce(x, group, op=dist.ReduceOp.SUM):
    """The sum (or max) of x over ranks, in a new tensor: autograd may still need the old one."""
    if group.size() == 1:
        return x
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, op, group=group)
    return x


def relative_error(mine, right):
    return (
        torch.linalg.vector_norm(mine - right) / torch.linalg.vector_norm(right).clamp(min=1e-30)
    ).item()


def against_one_device(lab, model, plan, group, ids):
    """Step a model, cut it by the plan, step it again. Returns (errors, forward, backward, gradient norms).

    errors {name: relative error}: "logits", "loss", and each parameter's gradient; norms (one device, ours).
    """
    logits, loss, _, _ = step(model, ids)
    right = {"logits": logits, "loss": loss}
    right |= {name: p.grad for name, p in model.named_parameters()}
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()
    model.zero_grad()  # a parameter that stays as it is would add to the gradient it has
    lab.parallelize(model, DeviceMesh.from_group(group, "cpu"), plan)
    logits, loss, forward, backward = step(model, ids)
    mine = {"logits": logits, "loss": loss}
    mine = {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in mine.items()}
    parameters = dict(model.named_parameters())
    mine |= {name: lab.whole(model, name, p.grad) for name, p in parameters.items()}
    errors = {name: relative_error(mine[name], right[name]) for name in right}
    plain = [name for name, p in parameters.items() if not isinstance(p, DTensor)]
    norms = norm, None
    if not plain:
        total = nn.utils.get_total_norm([p.grad for p in parameters.values()])
        norms = norm, total.full_tensor().item()
    return errors, forward, backward, norms


def worst_of(errors):
    """(name, error) of the largest; what is not a number counts as the largest."""
    return max(errors.items(), key=lambda item: math.inf if math.isnan(item[1]) else item[1])


def expect_one_device(case, errors, hint=""):
    """Raise Wrong unless logits, loss, every gradient are one device's; returns the largest error."""
    name, error = worst_of(errors)
    what = name if name in ("logits", "loss") else f"the gradient of {name}"
    expect(
        error <= TOLERANCE, f"{case}: {what} is off by {error:.1e} (at most {TOLERANCE:.0e})", hint
    )
    return error


def expect_calls(case, traffic, **most):
    """Raise Wrong unless there are at most so many calls of each collective; those not named none."""
    for op, (calls, _) in traffic.ops.items():
        enough = f"{most[op]} will do" if op in most else "none is needed"
        expect(
            calls <= most.get(op, 0),
            f"{case}: calls of {op}: {calls}; {enough}",
            most.get("hint", ""),
        )


def raised(function, *args, **kwargs):
    """The message of the ValueError that a call raises, or None."""
    try:
        function(*args, **kwargs)
    except ValueError as problem:
        return str(problem)
    return None


def noted_outputs(module):
    """A list to which everything that the module returns is added."""
    outputs = []
    module.register_forward_hook(lambda module, args, out: outputs.append(out))
    return outputs


def check_validate_heads(lab, group, seed):
    draw = random.Random(seed)
    for _ in range(40):
        kv, group_size, world = draw.randint(1, 12), draw.randint(1, 4), draw.randint(1, 8)
        config = SimpleNamespace(
            num_attention_heads=kv * group_size, num_key_value_heads=kv, head_dim=64
        )
        heads, message = config.num_attention_heads, raised(lab.validate_heads, config, world)
        case = f"{heads} heads, {kv} KV heads, {world} ranks"
        if kv % world == 0:
            expect(
                message is None,
                f"{case}: refused: {message}",
                "every rank gets whole heads of both",
            )
            continue
        hint = "whole query heads alone will not do: the KV heads are cut too"
        if heads % world:
            hint = "64 features of each head are no help: it is heads that must be divided"
        expect(message, f"{case}: not refused", hint)
        fit = {n for n in range(1, kv + 1) if kv % n == 0}
        named = set(map(int, re.findall(r"\d+", message)))
        missing = sorted((fit | {heads, kv, world}) - named)
        expect(
            not missing,
            f"{case}: the message does not name {missing}: {message}",
            "say what would do",
        )
        wrong = sorted(named - fit - {heads, kv, world})
        expect(not wrong, f"{case}: the message names {wrong}: {message}", "they would not do")
    model = tiny_model("llama", seed, num_key_value_heads=1)
    mesh = DeviceMesh.from_group(group, "cpu")
    message = raised(lab.parallelize, model, mesh, {f"{LAYER}.self_attn.q_proj": ColwiseParallel()})
    cut = any(isinstance(p, DTensor) for p in model.parameters())
    expect(
        message and not cut,
        "one KV head is cut over two ranks, or the model is cut before it is refused",
    )
    return "40 configs: refused where a rank would get part of a head, and told what would do; nothing cut"


def check_choose_plan(lab, group, seed):
    llama, mistral = tiny_model("llama", seed), tiny_model("mistral", seed)
    plan, called = {"lm_head": lab.sharded_logits()}, []

    def function(model, sequence_parallel):
        called.append((model, sequence_parallel))
        return plan

    def chosen(level, model, *args, **kwargs):
        mine, reason = lab.choose_plan(model, *args, **kwargs)
        expect(
            reason.startswith(level),
            f"{reason!r} is chosen, not {level}",
            "the first level that applies",
        )
        return mine

    first = "what the caller gives comes before everything else"
    for sequence_parallel, hf in ((False, True), (True, False)):
        mine = chosen("custom", llama, sequence_parallel, plan, hf)
        expect(mine is plan, "not the dict that was given", first)
        mine = chosen("custom", llama, sequence_parallel, function, hf)
        expect(
            mine is plan,
            f"a function's plan is {type(mine).__name__}",
            "call it: it returns the plan",
        )
        expect(
            called[-1] == (llama, sequence_parallel), "a function gets other arguments", "model, SP"
        )
    name = f"plans_of_seed_{seed}"
    with tempfile.TemporaryDirectory() as folder:
        source = "given = {'a': 1}\ndef made(model, sp):\n    return {'b': sp}\n"
        Path(folder, f"{name}.py").write_text(source)
        sys.path.insert(0, folder)
        for path, right in ((f"{name}.given", {"a": 1}), (f"{name}.made", {"b": True})):
            mine = chosen("custom", llama, True, path)
            expect(
                mine == right, f"the plan at {path} is {mine}, not {right}", "it may be a function"
            )
        sys.path.remove(folder)
    hint = "a plan that fails must not become another one"
    for path in (f"{name}.missing", "no_such_module.plan", "llama"):
        message = raised(lab.choose_plan, llama, False, path)
        expect(message and path in message, f"{path}: {message or 'nothing raised'}", hint)
    mine = chosen("Hugging Face", llama, False, None, True)
    expect(mine.keys() == lab.hf_plan(llama).keys(), "not Hugging Face's plan")
    message = raised(lab.choose_plan, llama, True, None, True)
    expect(
        message,
        "Hugging Face's plan with SP is not refused",
        "it would run without SP, and say nothing",
    )
    wrapped = tiny_model("llama", seed)
    wrapped.__class__ = type("LlamaForCausalLM", (type(llama),), {})
    for model, sequence_parallel in ((llama, True), (wrapped, False)):
        mine = chosen("model-specific", model, sequence_parallel)
        right = lab.PLANS["LlamaForCausalLM"](model, sequence_parallel)
        same = mine.keys() == right.keys()
        same = same and repr(mine["model.embed_tokens"]) == repr(right["model.embed_tokens"])
        expect(
            same,
            f"not the plan of LlamaForCausalLM, SP {sequence_parallel}",
            "it wants to know about SP",
        )
    failing = tiny_model("qwen2", seed)
    lab.PLANS["Qwen2ForCausalLM"] = lambda model, sequence_parallel: {}["missing"]
    try:
        _, reason = lab.choose_plan(failing)
        raise Wrong(f"a model-specific plan that fails becomes {reason!r}", hint)
    except KeyError:
        pass
    mine = chosen("base", mistral, True)
    expect(
        isinstance(mine["model.norm"], SequenceParallel),
        "not the base plan",
        "it wants to know about SP",
    )
    return (
        "dict, function, paths; HF's; model-specific, wrapped class too; base; failures are raised"
    )


def check_translate_hf_plan(lab, group, seed):
    ids, worst = random_ids(seed, 9), 0
    for family in ("qwen3", "phi3", "llama"):
        model = tiny_model(family, seed, tie_word_embeddings=family == "llama")
        before = dict(model.config.base_model_tp_plan), dict(type(model)._tp_plan)
        plan = lab.hf_plan(model)
        after = dict(model.config.base_model_tp_plan), dict(type(model)._tp_plan)
        expect(before == after, f"{family}: transformers' own plan was changed", "copy it")
        keys = {f"model.{name}" for name in before[0]} | before[1].keys() | {"model.embed_tokens"}
        expect(
            plan.keys() == keys,
            f"{family}: keys differ: {sorted(plan.keys() ^ keys)}",
            "prefix: model.",
        )
        head, table = plan["lm_head"], plan["model.embed_tokens"]
        hint = "lm_head's colwise_gather_output becomes sharded_logits()"
        sharded = head.output_layouts == (Shard(-1),) and not head.use_local_output
        expect(sharded, f"{family}: lm_head is {head}", hint)
        expect(
            isinstance(table, RowwiseParallel),
            f"{family}: embed_tokens is {table}",
            "embedding_rowwise",
        )
        styles = list(plan.values())
        shared = len({id(style) for style in styles}) < len(styles)
        expect(not shared, f"{family}: two modules share a style", "make a new object for each")
        errors, forward, _, _ = against_one_device(lab, model, plan, group, ids)
        gathered = forward.bytes("all_gather")
        worst = max(worst, expect_one_device(family, errors))
    expect(gathered == 0, f"llama: {gathered} bytes are gathered", hint)
    model.config.base_model_tp_plan = {"layers.*.mlp": "made_up_style"}
    message = raised(lab.hf_plan, model)
    named = message and "made_up_style" in message and "layers.*.mlp" in message
    expect(
        named, f"made_up_style: {message or 'nothing raised'}", "left out, its module stays whole"
    )
    return f"Qwen3, Phi3, tied Llama by HF's strings: gradients off by {worst:.0e}; unknown refused"


class Reads(nn.Module):
    """What attention does with a norm's result: three column parallel layers read it."""

    def __init__(self, norm, h):
        super().__init__()
        self.norm = norm
        self.q, self.k, self.v = (nn.Linear(h, 6, bias=False) for _ in range(3))

    def forward(self, x):
        y = self.norm(x)
        return self.q(y) + self.k(y) * self.v(y)


def check_all_gather_style(lab, group, seed):
    torch.manual_seed(seed)
    mesh, P, h, worst = DeviceMesh.from_group(group, "cpu"), group.size(), 10, 0
    for layout, tokens, plain in (
        (Shard(1), 7, False),
        (Shard(1), 8, True),
        (Replicate(), 7, True),
    ):
        case = f"{layout}, {tokens} tokens, {'plain tensors' if plain else 'DTensors'}"
        model = Reads(LlamaRMSNorm(h), h)
        for parameter in model.parameters():
            nn.init.normal_(parameter)
        x, dy = torch.randn(2, tokens, h, requires_grad=True), torch.randn(2, tokens, 6)
        model(x).backward(dy)
        right = {name: p.grad for name, p in model.named_parameters()} | {"x": x.grad}
        model.zero_grad()
        plan = {"norm": lab.NormThenGather(layout)} | {name: ColwiseParallel() for name in "qkv"}
        parallelize_module(model, mesh, plan)
        mine = distribute_tensor(x.detach(), mesh, [layout])
        mine = (mine.to_local() if plain else mine).requires_grad_()
        seen = noted_outputs(model.norm)
        with Collectives() as forward:
            out = model(mine)
        y = seen[0]
        whole = isinstance(y, DTensor) and y.placements == (Replicate(),)
        found = f"{case}: the result is {getattr(y, 'placements', 'a plain tensor')}"
        hint = "redistribute it to [Replicate()], and let it be a DTensor: q, k and v's gradients meet in it"
        expect(whole, found, hint)
        with Collectives() as backward:
            out.backward(dy.chunk(P, -1)[group.rank()])
        scattered = layout == Shard(1)
        expect_calls(f"{case}, forward", forward, **({"all_gather": 1} if scattered else {}))
        back = {"reduce_scatter": 1} if scattered else {"all_reduce": 1}
        expect_calls(f"{case}, backward", backward, **back)
        grads = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
        own = (
            mine.grad
            if isinstance(mine.grad, DTensor)
            else DTensor.from_local(mine.grad, mesh, [layout])
        )
        grads["x"] = own.full_tensor()
        errors = {name: relative_error(grads[name], right[name]) for name in right}
        worst = max(worst, expect_one_device(case, errors))
    return f"one all-gather, one reduce-scatter for q, k, v; without SP one all-reduce; off by {worst:.0e}"


def check_rotary_style(lab, group, seed):
    """Llama with a residual stream of plain tensors."""
    worst = 0
    for given in (False, True):
        model, ids = tiny_model("llama", seed), random_ids(seed, 12)
        logits = model(input_ids=ids, use_cache=False).logits.detach()
        cos, _ = model.model.rotary_emb(logits, torch.arange(12)[None])  # (1, 12, d)
        own = {"output_layouts": Shard(1)}
        plan = llama_plan(model, True) | {"model.rotary_emb": lab.RotaryParallel()}
        plan["model.embed_tokens"] = RowwiseParallel(input_layouts=Replicate(), **own)
        plan |= {
            f"{LAYER}.{name}": RowwiseParallel(**own)
            for name in ("self_attn.o_proj", "mlp.down_proj")
        }
        parallelize(model, DeviceMesh.from_group(group, "cpu"), plan)
        seen = noted_outputs(model.model.rotary_emb)
        position_ids = torch.arange(12)[None] if given else None
        case = "positions given" if given else "positions counted by transformers"
        try:
            out = model(input_ids=ids, position_ids=position_ids, use_cache=False)
        except NotImplementedError:  # an exercise not done; it is a RuntimeError
            raise
        except RuntimeError as problem:
            n = seen[0][0].shape[1] if seen else "no"
            found = f"{case}: cos has {n} tokens, q 12: {problem}"
            raise Wrong(found, "gather the positions of all tokens") from None
        right = relative_error(seen[0][0], cos)
        repeated = torch.cat([cos[:, :6]] * 2, 1)
        hint = (
            "every rank counts from 0: add rank * n"
            if relative_error(seen[0][0], repeated) < 1e-6
            else ""
        )
        expect(right < 1e-6, f"{case}: cos is off by {right:.1e}", hint)
        errors = {"logits": relative_error(out.logits.full_tensor(), logits)}
        worst = max(worst, expect_one_device(case, errors))
    return f"12 positions from 6 a rank, given ones kept; logits off by {worst:.0e}"


def check_qk_norm_style(lab, group, seed):
    torch.manual_seed(seed)
    mesh, P, rank, d, worst = DeviceMesh.from_group(group, "cpu"), group.size(), group.rank(), 6, 0
    for heads_dim, shape in ((2, (2, 7, 2 * P, d)), (1, (2, 2 * P, 7, d))):
        case = "Qwen3, (b, s, heads/P, d)" if heads_dim == 2 else "Gemma3, (b, heads/P, s, d)"
        norm, x = LlamaRMSNorm(d), torch.randn(shape, requires_grad=True)
        nn.init.normal_(norm.weight)
        dys = torch.randn(2, *shape)  # of two micro-batches
        for dy in dys:
            norm(x).backward(dy)
        right, y = norm.weight.grad, norm(x).detach()
        norm.zero_grad()
        mine = x.detach().chunk(P, heads_dim)[rank].clone().requires_grad_()
        parallelize_module(norm, mesh, lab.QKNormParallel())
        with Collectives() as traffic:
            for dy in dys:
                out = norm(mine)
                plain = not isinstance(out, DTensor)
                expect(
                    plain,
                    f"{case}: a DTensor comes out",
                    "rotary and attention work on plain tensors",
                )
                out.backward(dy.chunk(P, heads_dim)[rank])
        expect_close(f"{case}: y", out.detach(), y.chunk(P, heads_dim)[rank])
        expect_close(f"{case}: dx", mine.grad, x.grad.chunk(P, heads_dim)[rank])
        moved = sum(sent for _, sent in traffic.ops.values())
        expect(moved <= 8 * d, f"{case}: {moved} bytes are sent", "at most the weight's gradient")
        grad, hint = (
            norm.weight.grad,
            "a gradient summed in place is summed again in the next backward",
        )
        kept = grad.to_local() if isinstance(grad, DTensor) else grad
        parts = all_reduce(kept, group)
        if torch.allclose(parts, right, 1e-4, 1e-4):
            hint = (
                "each rank keeps the gradient of its own heads: x enters as Shard, not as Replicate"
            )
        full = grad.full_tensor() if isinstance(grad, DTensor) else grad
        error = relative_error(full, right)
        expect(error < TOLERANCE, f"{case}: the gradient of the weight is off by {error:.1e}", hint)
        found = f"{case}: the weight is a plain tensor"
        expect(
            isinstance(norm.weight, DTensor),
            found,
            "clip_grad_norm_ refuses a mixture of both kinds",
        )
        worst = max(worst, error)
    return f"gradient of all heads, off by {worst:.0e}, over two backwards; nothing sent for it"


def check_fused_style(lab, group, seed):
    torch.manual_seed(seed)
    draw = random.Random(seed)
    mesh, P, rank, worst = DeviceMesh.from_group(group, "cpu"), group.size(), group.rank(), 0
    for sizes in (
        (4 * P, 2 * P, 2 * P),
        (3 * P, 3 * P),
        tuple(P * draw.randint(1, 9) for _ in range(4)),
    ):
        case = f"blocks of {sizes} rows"
        order, rows = lab.fused_order(sizes, P), sum(sizes)
        right = torch.equal(order.sort().values, torch.arange(rows))
        expect(right, f"{case}: not every row once", "an order of all the rows")
        linear = nn.Linear(5, rows)
        x, dys = torch.randn(2, 3, 5), [torch.randn(2, 3, size) for size in sizes]
        y = linear(x)
        y.backward(torch.cat(dys, -1))
        before = {name: (p.detach().clone(), p.grad) for name, p in linear.named_parameters()}
        model = nn.Sequential(linear)
        parallelize_module(model, mesh, {"0": lab.FusedColwiseParallel(*sizes)})
        out = model(x)
        wanted = torch.cat([block.chunk(P, -1)[rank] for block in y.detach().split(sizes, -1)], -1)
        hints = {
            "a contiguous piece mixes the blocks: take a share of each": y.detach().chunk(P, -1)[
                rank
            ]
        }
        mixed = torch.cat(
            [block.chunk(P, -1)[rank - 1] for block in y.detach().split(sizes, -1)], -1
        )
        hints["these are another rank's shares"] = mixed
        worst = max(
            worst, expect_close(f"{case}: [Q_r | K_r | V_r]", out.detach(), wanted, hints=hints)
        )
        out.backward(torch.cat([dy.chunk(P, -1)[rank] for dy in dys], -1))
        for name, p in model.named_parameters():
            value, grad = before[name[2:]]
            again = {"back[order] = full: full[order] reorders once more": value[order][order]}
            again["the rows are in the ranks' order"] = value[order]
            mine = lab.whole(model, name, p.detach())
            expect_close(f"{case}: {name}, put back,", mine, value, 0, hints=again)
            error = expect_close(f"{case}: its gradient", lab.whole(model, name, p.grad), grad)
            worst = max(worst, error)
    message = raised(lab.fused_order, (4 * P, 2 * P + 1), P)
    expect(
        message,
        f"a block of {2 * P + 1} rows is cut over {P} ranks",
        "one rank would hold more of it",
    )
    return f"each rank its share of every block, off by {worst:.0e}; whole() restores weights and gradients"


def check_llama_plan(lab, group, seed):
    worst, layers = 0, SHAPE["num_hidden_layers"]
    cases = ("llama", False, True), ("qwen2", True, False), ("llama", True, True)
    for family, sequence_parallel, tied in cases:
        case = f"{family}, {'SP' if sequence_parallel else 'TP'}"
        model = tiny_model(family, seed, tie_word_embeddings=tied)
        residual = noted_outputs(model.model.layers[0])
        plan = lab.llama_plan(model, sequence_parallel)
        ids = random_ids(seed, 9)  # P does not divide that
        try:
            errors, forward, backward, norms = against_one_device(lab, model, plan, group, ids)
        except RuntimeError as problem:
            hint = "a plain residual has s/P tokens, and transformers makes positions for so many"
            if "mixed" in str(problem):
                hint = (
                    "some module has no style, or a residual no use_local_output=False: it is plain"
                )
            raise Wrong(f"{case}: {str(problem).partition(chr(10))[0]}", hint) from None
        worst = max(worst, expect_one_device(case, errors))
        x = residual[-1]
        placed = x.placements if isinstance(x, DTensor) else "a plain tensor"
        tokens = Shard(1) if sequence_parallel else Replicate()
        hint = (
            "see TOKENS" if isinstance(x, DTensor) else "use_local_output=False keeps it a DTensor"
        )
        expect(placed == (tokens,), f"{case}: the residual stream is {placed}, not {tokens}", hint)
        edges, loss = 2 * layers + 1, 5  # the loss may take that many small all-reduces
        hint = "NormThenGather: gathered once for q, k and v, reduced once in the backward"
        if sequence_parallel:
            expect_calls(
                f"{case}, forward", forward, all_gather=edges, reduce_scatter=edges, all_reduce=loss
            )
            wanted = {"all_gather": edges, "reduce_scatter": edges, "all_reduce": 2, "hint": hint}
            expect_calls(f"{case}, backward", backward, **wanted)
        else:
            expect_calls(f"{case}, forward", forward, all_reduce=edges + loss)
            expect_calls(f"{case}, backward", backward, all_reduce=edges, hint=hint)
        plain = norms[1] is None
        found = f"{case}: some parameters are plain, some DTensors"
        expect(not plain, found, "clip_grad_norm_ refuses that: a style for every norm")
        expect(abs(norms[1] / norms[0] - 1) < TOLERANCE, f"{case}: the gradient's norm is off", "")
    return f"logits and every gradient off by {worst:.0e}, tied too; {edges} edges a way, TP and SP"


CHECKS = {
    "validate_heads": (check_validate_heads, 2),
    "choose_plan": (check_choose_plan, 1),
    "translate_hf_plan": (check_translate_hf_plan, 2),
    "all_gather_style": (check_all_gather_style, 2),
    "rotary_style": (check_rotary_style, 2),
    "qk_norm_style": (check_qk_norm_style, 2),
    "fused_style": (check_fused_style, 2),
    "llama_plan": (check_llama_plan, 2),
}


# ---------------------------------------------------------------------------------------------------
# Experiments
# ---------------------------------------------------------------------------------------------------


def nemo_plan(model, sequence_parallel):
    """What NeMo AutoModel's plans of Qwen3 and Gemma3 say: ours, but q_norm and k_norm are left alone.

    Without SP all norms are; Gemma3's have torch's plain SequenceParallel with it. (Its style for Gemma3's
    rotary_emb is left out: with a residual stream of DTensors it changes nothing.)
    """
    plan, _ = choose_plan(model, sequence_parallel)
    plan = {name: style for name, style in plan.items() if not name.endswith(("q_norm", "k_norm"))}
    norms = [name for name in plan if name.endswith("norm")]
    if not sequence_parallel:
        plain = {"model.embed_tokens": RowwiseParallel(input_layouts=Replicate())}
        plain |= {
            f"{LAYER}.{name}": RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")
        }
        return {name: style for name, style in plan.items() if name not in norms} | plain
    if type(model).__name__ == "Gemma3ForCausalLM":
        plan |= {name: SequenceParallel() for name in norms} | {"lm_head": sharded_logits(Shard(1))}
    return plan


def plain_norms_plan(model):
    """Llama's plan with torch's SequenceParallel: nothing is gathered until a projection needs it."""
    plan = llama_plan(model, True)
    plan |= {name: SequenceParallel() for name in plan if name.endswith("norm")}
    return plan | {"lm_head": sharded_logits(Shard(1))}


def prove(group, family, sequence_parallel, custom, hf, seed):
    """A row of the families' table: a plan chosen, applied, held against one device."""
    model = tiny_model(family, seed)
    if custom == "NeMo":
        plan, reason = nemo_plan(model, sequence_parallel), "NeMo AutoModel's"
    else:
        plan, reason = choose_plan(model, sequence_parallel, custom, hf)
    entries = {name: describe(style) for name, style in plan.items()}
    this = sys.modules[__name__]
    errors, forward, backward, norms = against_one_device(
        this, model, plan, group, random_ids(seed, 16)
    )
    name, error = worst_of(
        {name: error for name, error in errors.items() if name not in ("logits", "loss")}
    )
    return {
        "family": family, "sequence_parallel": sequence_parallel, "plan": reason, "entries": entries,
        "logits": errors["logits"], "loss": errors["loss"], "gradient": error, "worst": name,
        "wrong": sorted(name for name, error in errors.items() if not error <= TOLERANCE),
        "gradient_norm": norms, "forward": forward.ops, "backward": backward.ops,
    }  # fmt: skip


def prove_all(group, cases, seed):
    """prove() for each (family, sequence_parallel, custom, hf)."""
    return [prove(group, *case, seed) for case in cases]


def describe(style):
    """A style in a few words: layout of what goes in -> of what comes out."""
    name = type(style).__name__
    if isinstance(style, ColwiseParallel | RowwiseParallel):
        there, back = style.input_layouts[0], style.output_layouts[0]
        return f"{name}: {there} -> {back}, {'plain' if style.use_local_output else 'DTensor'}"
    if isinstance(style, NormThenGather):
        return f"{name}: {style.layout} -> {Replicate()}, DTensor"
    return f"{name}{style.sizes}" if isinstance(style, FusedColwiseParallel) else name


def families(args):
    """Which plan each family gets and what comes out; returns (rows, what failed)."""
    single = args.model or args.sp or args.plan or args.hf_plan
    if single:
        family = args.model or "llama"
        cases = [(family, args.sp, args.plan, args.hf_plan)]
        cases += [(family, args.sp, "NeMo", False)] * (family in ("qwen3", "gemma3"))
    else:
        cases = [(family, sp, None, False) for family in FAMILIES for sp in (False, True)]
        cases += [(family, False, None, True) for family in ("qwen3", "phi3")]
        cases += [
            (family, sp, "NeMo", False) for family in ("qwen3", "gemma3") for sp in (False, True)
        ]
    try:
        rows = on_ranks(2, prove_all, cases, args.seed, timeout=120)[0]
    except Wrong as wrong:
        if args.plan and "ValueError: " in wrong.found:  # the user's plan, not the lab's
            raise Unusable(
                wrong.found.partition("ValueError: ")[2].rpartition(" (in: ")[0]
            ) from None
        raise
    if single:
        print(f"\nThe plan of {family}{' with sequence parallelism' if args.sp else ''}")
        print(f"  chosen: {rows[0]['plan']}")
        print_table(["module", "style"], *rows[0]["entries"].items())
    else:
        print("\nEvery family on 2 ranks, against one device: relative errors")
    print_table(["model", "", "which plan, and why", "logits", "gradients", "worst", "messages"], *(
        [r["family"], "SP" if r["sequence_parallel"] else "TP", r["plan"], f"{r['logits']:.0e}",
         f"{r['gradient']:.0e}", r["worst"].removeprefix("model."),
         f"{short(r['forward'])} | {short(r['backward'])}"]
        for r in rows
    ))  # fmt: skip
    print(
        "\n  messages: forward | backward. AR all-reduce, AG all-gather, RS reduce-scatter; 3 AR are the"
    )
    print("  sharded loss's, of a number a token")
    if not single:
        gathered, sharded = logits_bytes(rows)
        print(
            f"\n  logits of 32 tokens, {SHAPE['vocab_size']} words: gathered (base plan) {gathered} bytes,"
        )
        print(f"  sharded under loss_parallel() {sharded}: three numbers a token")
    failed = []
    for row in rows:
        name = f"{row['family']} {'SP' if row['sequence_parallel'] else 'TP'}, {kind_of(row)}"
        if row["plan"] == "NeMo AutoModel's":  # the lab says that these, and only these, are wrong
            norms = all(
                wrong.endswith(("q_norm.weight", "k_norm.weight")) for wrong in row["wrong"]
            )
            failed += (
                []
                if row["wrong"] and norms
                else [f"{name}: wrong q_norm and k_norm, the rest right"]
            )
        elif row["wrong"]:
            failed.append(f"{name}: {', '.join(row['wrong'][:3])}")
    return rows, failed


def logits_bytes(rows):
    """(gathered, sharded): what a lm_head and its loss send. All else is the same in both plans."""
    sharded, gathered = (
        next(r["forward"] for r in rows if r["family"] == name) for name in ("llama", "mistral")
    )
    return gathered["all_gather"][1], sharded["all_reduce"][1] - gathered["all_reduce"][1]


def short(ops):
    """{op: [calls, bytes]} in a few letters: 5 AG 5 RS."""
    letters = {"all_gather": "AG", "reduce_scatter": "RS", "all_reduce": "AR", "all_to_all": "A2A"}
    return " ".join(f"{ops[op][0]} {letters.get(op, op)}" for op in sorted(ops)) or "none"


class Saved(torch.autograd.graph.saved_tensors_hooks):
    """Counts the bytes that autograd keeps on this rank for the backward: each storage once, no weights."""

    def __init__(self, model):
        self.storages = {}
        known = {on_this_rank(p).untyped_storage().data_ptr() for p in model.parameters()}

        def note(tensor):
            storage = on_this_rank(tensor).untyped_storage()
            if storage.data_ptr() not in known:
                self.storages[storage.data_ptr()] = storage.nbytes()
            return tensor

        super().__init__(note, lambda tensor: tensor)

    def __enter__(self):
        super().__enter__()
        return self

    @property
    def bytes(self):
        return sum(self.storages.values())


def on_this_rank(tensor):
    """The plain tensor behind a DTensor, and behind one that is still under way."""
    with torch.no_grad():
        tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


MEASURED = {"hidden_size": 128, "intermediate_size": 448, "head_dim": 8, "num_attention_heads": 16}
MEASURED |= {"num_key_value_heads": 8, "vocab_size": 64}  # the proportions of Llama 3 8B
TP, GATHERED, PLAIN = WAYS = "TP", "SP, gathered after the norm", "SP, plain"


def saved_and_sent(group):
    """{way: {"saved", "forward", "backward"}} of a Llama; saved: bytes without lm_head and loss."""
    mesh, ids, found = init_device_mesh("cpu", (dist.get_world_size(),)), random_ids(0, 128, 64), {}
    for way in WAYS:
        model = tiny_model("llama", **MEASURED)
        parallelize(
            model,
            mesh,
            plain_norms_plan(model) if way == PLAIN else llama_plan(model, way == GATHERED),
        )
        with Saved(model) as saved:
            out = model.model(input_ids=ids, use_cache=False)  # whose graph keeps them
        found[way] = {"saved": saved.bytes}
        del out
        _, _, forward, backward = step(model, ids)
        found[way] |= {"forward": forward.ops, "backward": backward.ops}
    return found


def saved_on_many(group, worlds):
    """{P: saved_and_sent()} as rank 0 of P with silent peers: real shapes and messages, no values."""
    dist.destroy_process_group()
    found = {}
    for world in worlds:
        dist.init_process_group("fake", store=fake_pg.FakeStore(), rank=0, world_size=world)
        found[world] = saved_and_sent(None)
        dist.destroy_process_group()
    return found


def memory():
    """What SP saves, in two styles, beside what is claimed of it; returns (rows, what failed)."""
    real = on_ranks(2, saved_and_sent)[0]
    many = on_ranks(1, saved_on_many, [2, 4, 8], timeout=120)[0]
    rows = []
    for world, ways in many.items():
        for way, found in ways.items():
            saving = 1 - found["saved"] / ways[TP]["saved"]
            claim = 0.5 * (1 - 1 / world) if way != TP else 0.0
            rows.append({"ranks": world, "way": way, "saving": saving, "claim": claim, **found})
    print("\nWhat autograd keeps on a rank of a Llama's layers, and the messages of a step")
    print_table(["ranks", "way", "bytes", "less than TP by", "claimed", "forward", "backward"], *(
        [r["ranks"], r["way"], r["saved"], f"{r['saving']:.1%}", f"{r['claim']:.2%}", short(r["forward"]),
         short(r["backward"])]
        for r in rows
    ))  # fmt: skip
    print("\n  claimed: 0.5 (1 - 1/P), half of it all divided by P: a model that knows no style")
    measured = {way: found["saved"] for way, found in real.items()}
    holds = {
        "2 real ranks keep what 1 of 2 with silent peers does": real == many[2],
        "plain SP keeps least, TP most": all(
            ways[PLAIN]["saved"] < ways[GATHERED]["saved"] < ways[TP]["saved"]
            for ways in many.values()
        ),
        "gathering after the norm sends fewer messages than plain SP": all(
            calls(ways[GATHERED]) < calls(ways[PLAIN]) for ways in many.values()
        ),
    }
    print(f"  2 real ranks keep {', '.join(map(str, measured.values()))} bytes")
    return rows, [text for text, held in holds.items() if not held]


def calls(found):
    """How many messages a step takes."""
    return sum(count for phase in ("forward", "backward") for count, _ in found[phase].values())


def experiment(args):
    """The families, and what sequence parallelism saves and sends."""
    if args.inject_bug:
        return {}  # these run the right code
    rows, failed = families(args)
    saved, more = memory()
    return {"failed": failed + more, "families": rows, "memory": saved}


def draw(results, path):
    """Left: whose gradients are right. Right: what sequence parallelism saves, beside the claim."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.8), width_ratios=(1.25, 1))
    rows = results["families"]
    labels = [f"{r['family']} {'SP' if r['sequence_parallel'] else 'TP'}" for r in rows]
    names = list(dict.fromkeys(labels))
    kinds = {
        "NeMo AutoModel's plan": "#D55E00",
        "Hugging Face's": "#009E73",
        "this lab's": "#0072B2",
    }
    for kind, color in kinds.items():
        picked = [
            (names.index(label), r["gradient"])
            for label, r in zip(labels, rows)
            if kind_of(r) == kind
        ]
        if picked:
            left.plot(
                *zip(*((x, y) for y, x in picked)), "o", color=color, label=kind, ms=8, alpha=0.85
            )
    left.axvline(TOLERANCE, color="#999999", lw=1, ls="--")
    left.text(TOLERANCE, len(names) - 0.4, " tolerance", color="#666666", va="center")
    left.set(xscale="log", yticks=range(len(names)), yticklabels=names, ylim=(len(names), -0.6))
    left.set(xlabel="largest relative error of a parameter's gradient")
    left.set_title("Plans: every gradient against one device", loc="left")
    left.legend(frameon=False, loc="lower right")
    ways = {GATHERED: "#56B4E9", PLAIN: "#E69F00"}
    worlds = sorted({r["ranks"] for r in results["memory"]})
    for i, (way, color) in enumerate(ways.items()):
        savings = [r["saving"] for r in results["memory"] if r["way"] == way]
        at = [x + 0.3 * (i - 1) for x in range(len(worlds))]
        bars = right.bar(at, [100 * s for s in savings], 0.28, color=color, label=way)
        right.bar_label(bars, fmt="%.0f%%", label_type="center")
    for x, world in enumerate(worlds):
        right.hlines(50 * (1 - 1 / world), x - 0.5, x + 0.2, color="black", lw=2)
    right.plot([], [], "k-", lw=2, label="claimed: 0.5 (1 - 1/P)")
    at = [x - 0.15 for x in range(len(worlds))]
    right.set(
        xticks=at, xticklabels=[f"{world} ranks" for world in worlds], ylabel="less than TP, %"
    )
    right.set_ylim(top=1.3 * right.get_ylim()[1])
    right.set_title("Saved activations: it depends on the norm's style", loc="left")
    right.legend(frameon=False, loc="upper left")
    for axis in left, right:
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def kind_of(row):
    """Whose plan a row is about."""
    if row["plan"].startswith("NeMo"):
        return "NeMo AutoModel's plan"
    return "Hugging Face's" if row["plan"].startswith("Hugging Face") else "this lab's"


# ---------------------------------------------------------------------------------------------------
# Sabotage: what people really get wrong, for --inject-bug. The checks have to catch every one.
# ---------------------------------------------------------------------------------------------------


def kv_heads_forgotten(lab):
    """The validation looks at the query heads alone."""
    right = lab.validate_heads

    def validate_heads(config, world):
        if config.num_attention_heads % world:
            right(config, world)

    lab.validate_heads = validate_heads


def validated_too_late(lab):
    """The heads are looked at when the model is cut already."""

    def parallelize(model, mesh, plan):
        parallelize_module(model, mesh, plan)
        lab.validate_heads(model.config, mesh.size())

    lab.parallelize = parallelize


def falls_back(lab):
    """A plan that cannot be had becomes the base plan."""
    right = lab.choose_plan

    def choose_plan(model, *args, **kwargs):
        try:
            return right(model, *args, **kwargs)
        except (ValueError, KeyError):
            return lab.base_plan(model, False), "base: the one asked for failed"

    lab.choose_plan = choose_plan


def hf_ignores_sp(lab):
    """Hugging Face's plan is taken although sequence parallelism was asked for."""
    right = lab.choose_plan

    def choose_plan(model, sequence_parallel=False, custom=None, hf=False):
        return right(model, sequence_parallel and not hf, custom, hf)

    lab.choose_plan = choose_plan


def unknown_style_skipped(lab):
    """A string of Hugging Face's that nobody knows leaves its module whole."""

    class Known(dict):
        def __contains__(self, style):
            return True

        def __missing__(self, style):
            return SequenceParallel

    lab.STYLES = Known(lab.STYLES)


def logits_gathered(lab):
    """lm_head keeps Hugging Face's colwise_gather_output: the logits of the vocabulary on every rank."""
    lab.sharded_logits = lambda: ColwiseParallel(output_layouts=Replicate())


def never_gathered(lab):
    """The norm's result stays cut along the tokens, as with torch's SequenceParallel."""
    lab.NormThenGather = lambda layout: (
        SequenceParallel() if layout == Shard(1) else NormThenGather(layout)
    )


def positions_from_zero(lab):
    """Every rank's positions start at 0."""

    def _apply(style, module, mesh):
        def repeated(rotary, args, kwargs):
            return args, kwargs | {
                "position_ids": torch.cat([kwargs["position_ids"]] * mesh.size(), 1)
            }

        module.register_forward_pre_hook(repeated, with_kwargs=True)
        return module

    lab.RotaryParallel._apply = _apply


def qk_norm_left_alone(lab):
    """The norms of q and k stay as they are, as in NeMo AutoModel's plans."""
    lab.QKNormParallel._apply = lambda style, module, mesh: module


def gradient_summed_in_place(lab):
    """q_norm's .grad is summed over the ranks after every backward, with what was summed before."""

    def _apply(style, module, mesh):
        hook = partial(lambda group, p: dist.all_reduce(p.grad, group=group), mesh.get_group())
        module.weight.register_post_accumulate_grad_hook(hook)
        return module

    lab.QKNormParallel._apply = _apply


def fused_cut_in_pieces(lab):
    """[Q | K | V] is cut in P contiguous pieces."""
    lab.fused_order = lambda sizes, world: torch.arange(sum(sizes))


def fused_not_put_back(lab):
    """A fused weight is saved with its rows in the ranks' order."""
    lab.whole = lambda model, name, tensor: tensor.full_tensor()


def plain_residual(lab):
    """The residual stream is plain tensors of own tokens: as NeMo AutoModel's once was."""
    right = lab.llama_plan

    def llama_plan(model, sequence_parallel):
        plan, tokens = (
            right(model, sequence_parallel),
            Shard(1) if sequence_parallel else Replicate(),
        )
        embed = RowwiseParallel(input_layouts=Replicate(), output_layouts=tokens)
        return plan | {"model.embed_tokens": embed}

    lab.llama_plan = llama_plan


def sp_never_switched_on(lab):
    """The plan with sequence parallelism is the one without: everything is right, and nothing is saved."""
    right = lab.llama_plan
    lab.llama_plan = lambda model, sequence_parallel: right(model, False)


BUGS = [
    kv_heads_forgotten,
    validated_too_late,
    falls_back,
    hf_ignores_sp,
    unknown_style_skipped,
    logits_gathered,
    never_gathered,
    positions_from_zero,
    qk_norm_left_alone,
    gradient_summed_in_place,
    fused_cut_in_pieces,
    fused_not_put_back,
    plain_residual,
    sp_never_switched_on,
]


# ---------------------------------------------------------------------------------------------------
# Harness: the same in every lab
# ---------------------------------------------------------------------------------------------------


# Copied from labs/lab8_3d.py
class Unusable(Exception):
    """An argument that cannot work; its message says what would. Ends as `error: ...`, exit 2."""


# Copied from labs/lab8_3d.py
class Wrong(Exception):
    """What a check found wrong with an exercise, and a hint at what usually causes it."""

    def __init__(self, found, hint=""):
        super().__init__(found, hint)
        self.found, self.hint = found, hint


# Copied from labs/lab8_3d.py
def expect(holds, found, hint=""):
    """Raise Wrong where something does not hold."""
    if not holds:
        raise Wrong(found, hint)


# Copied from labs/lab8_3d.py
def expect_close(name, mine, right, tolerance=1e-5, hints=None):
    """Raise Wrong unless ||mine - right|| <= tolerance ||right||; returns the relative error.

    hints {text: tensor}: if mine is that tensor instead, the text is the hint.
    """
    expect(
        isinstance(mine, torch.Tensor),
        f"{name} is {type(mine).__name__}, not a tensor",
        "return the result",
    )
    expect(
        mine.shape == right.shape, f"{name} has shape {tuple(mine.shape)}, not {tuple(right.shape)}"
    )

    def error(other):
        apart = torch.linalg.vector_norm((mine - other).double())
        return (apart / torch.linalg.vector_norm(other.double()).clamp(min=1e-30)).item()

    known = [text for text, other in (hints or {}).items() if other.shape == right.shape]
    known = [text for text in known if error(hints[text]) <= tolerance < error(right)]
    hint = known[0] if known else ""
    expect(
        error(right) <= tolerance,
        f"{name} is off by {error(right):.1e} (at most {tolerance:.0e})",
        hint,
    )
    return error(right)


# Copied from labs/lab8_3d.py
class Traffic(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts what this rank's collectives and sends move while inside it: {op: [calls, bytes]}.

    Bytes of the whole message (all_gather: what comes out; reduce_scatter: what goes in; all_to_all: the
    rank's own input).
    """

    OPS = {"allreduce": "all_reduce", "allgather": "all_gather", "reducescatter": "reduce_scatter"}
    OPS |= {"alltoall": "all_to_all", "send": "send", "broadcast": "broadcast", "reduce": "reduce"}
    OPS |= {
        "gather": "gather",
        "scatter": "scatter",
    }  # a name starts with one of these, the first that fits

    def __init__(self):
        super().__init__()
        self.ops = {}

    def bytes(self, op):
        return self.ops.get(op, [0, 0])[1]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func._opname.replace("_", "")
        op = next((op for start, op in self.OPS.items() if name.startswith(start)), None)
        if op and func.namespace in ("c10d", "_c10d_functional"):
            tensors = [
                [t for t in tree_leaves(x) if isinstance(t, torch.Tensor)] for x in (*args, out)
            ]
            sizes = [sum(t.nbytes for t in ts) for ts in tensors]
            if op == "all_to_all":  # c10d names the output before the input
                sizes = [sizes[1 if func.namespace == "c10d" else 0]]
            entry = self.ops.setdefault(op, [0, 0])
            entry[0] += 1
            entry[1] += max(sizes)
        return out


class Collectives(Traffic):
    """Traffic that sees what DTensor sends inside an operation too: DTensor has to take it apart first."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented
        return super().__torch_dispatch__(func, types, args, kwargs)


# Copied from labs/lab8_3d.py
def load(path):
    """The file of a lab, or of a learner's answers to it, as a module."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# Copied from labs/lab8_3d.py
def rank_main(rank, world, rendezvous, pipe, limit, function, args):
    """A rank's process: join the others, run function(group, *args), send back what it returns."""
    os.dup2(
        os.open(os.devnull, os.O_WRONLY), 2
    )  # gloo complains there about ranks that others' errors ended
    signal.alarm(limit)  # its parent ends it long before; this is for a parent that was killed
    torch.set_num_threads(1)
    # torch 2.13 renames all_gather_into_tensor and reduce_scatter_tensor; 2.11 knows only these names
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    store = dist.FileStore(rendezvous, world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    try:
        answer = True, function(dist.group.WORLD, *args)
    except Wrong as wrong:
        answer = False, wrong
    except NotImplementedError as todo:
        answer = False, Wrong(f"not done yet: {todo}")
    except BaseException as problem:  # whatever a learner's code may raise
        frames = traceback.extract_tb(problem.__traceback__)
        ours = [frame.line for frame in frames if not frame.filename.startswith(torch.__path__[0])]
        first = str(problem).partition("\n")[0]
        answer = False, Wrong(f"{type(problem).__name__}: {first} (in: {ours[-1]})")
    pipe.send(answer)
    with suppress(EOFError):
        pipe.recv()  # stay till the end: a rank that leaves early breaks the others' connections


# Copied from labs/lab8_3d.py
def on_ranks(world, function, *args, timeout=60):
    """[function(group, *args) of each rank], run by `world` processes of this machine, over gloo.

    Raises Wrong: the first one that a rank raised, or one naming the ranks still busy after `timeout`
    seconds. function is one of a module's own, and args and results can be pickled.
    """
    context = multiprocessing.get_context(
        "forkserver"
    )  # forks ranks from a process that has torch already
    heavy = {"torch.distributed", "transformers.models.llama.modeling_llama"} & sys.modules.keys()
    context.set_forkserver_preload(
        [*heavy, "torch._dynamo"]
    )  # the first dispatch mode imports that: 2 s
    with tempfile.TemporaryDirectory() as folder, ExitStack() as ending:
        pipes = {}
        for rank in range(world):
            here, there = context.Pipe()
            start = (rank, world, f"{folder}/store", there, int(timeout) + 60, function, args)
            process = context.Process(target=rank_main, args=start, daemon=True)
            process.start()
            ending.callback(process.join)
            ending.callback(process.kill)
            there.close()
            pipes[here] = rank
        busy = dict(pipes)  # those that have not answered
        results, end = [None] * world, time.monotonic() + timeout
        while busy:
            ready = connection.wait(busy, max(0, end - time.monotonic()))
            silent = ", ".join(map(str, busy.values()))
            hint = (
                "a send without its recv, a collective that some rank skips, or a loop without end"
            )
            expect(ready, f"no answer from rank {silent} in {timeout} s", hint)
            wrong = []
            for pipe in ready:
                rank = busy.pop(pipe)
                try:
                    fine, results[rank] = pipe.recv()
                except EOFError:
                    fine, results[rank] = False, Wrong("died")
                wrong += [] if fine else [rank]
            if wrong:  # a death first: the others' errors come of it
                rank = min(wrong, key=lambda rank: results[rank].found != "died")
                raise Wrong(f"rank {rank}: {results[rank].found}", results[rank].hint)
        return results


# Copied from labs/lab8_3d.py
def check_on_rank(group, answers, bug, name, seed):
    """One exercise's check on this rank. answers: the file of the lab, or of a learner's copy of it."""
    lab = load(answers)
    if bug:
        globals()[bug](lab)
    check, _ = CHECKS[name]
    return check(lab, group, seed)


# Copied from labs/lab8_3d.py
def print_table(*rows):
    """Columns aligned to the left, after an empty line."""
    cells = [
        [f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in row] for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(*cells)]
    print(
        "",
        *("  " + "   ".join(c.ljust(w) for c, w in zip(row, widths)).rstrip() for row in cells),
        sep="\n",
    )


# Copied from labs/lab8_3d.py
def run_checks(args):
    """Run every exercise's check; returns {name: {"passed", "report"}}, and prints them as a table."""
    results, rows = {}, [["exercise", "ranks", "", "what was seen"]]
    for name, (_, world) in CHECKS.items():
        try:
            report, passed = (
                on_ranks(world, check_on_rank, __file__, args.inject_bug, name, args.seed)[0],
                True,
            )
        except Wrong as wrong:
            report, passed = wrong.found, False
        results[name] = {"passed": passed, "report": report}
        rows.append([name, world, "PASS" if passed else "FAIL", report])
    print_table(*rows)
    return results


# Copied from labs/lab8_3d.py
def main(argv=None):
    """Returns the exit status: 0 all held, 1 a check failed, 2 unusable arguments."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of the checks' inputs (0)")
    parser.add_argument("--json", metavar="FILE", help="write the results")
    parser.add_argument("--plot", metavar="FILE", help="draw them")
    parser.add_argument(
        "--inject-bug", metavar="NAME", help="run with a bug that must be caught; list: name them"
    )
    add_options(parser)
    try:
        args = parser.parse_args(argv)
        if args.inject_bug == "list":
            print(*(f"  {bug.__name__:28} {bug.__doc__}" for bug in BUGS), sep="\n")
            return 0
        if args.inject_bug not in (None, *(bug.__name__ for bug in BUGS)):
            raise Unusable(f"no bug {args.inject_bug}; --inject-bug list names them")
        for path in (args.json, args.plot):
            if path and (
                Path(path).is_dir() or not os.access(Path(path).absolute().parent, os.W_OK)
            ):
                raise Unusable(f"cannot write {path}: a directory, or in none that can be written")
        results = {"lab": Path(__file__).stem, "exercises": run_checks(args), **experiment(args)}
        failed = [name for name, result in results["exercises"].items() if not result["passed"]]
        failed += [name for name in results.get("failed", []) if name not in failed]
        results["passed"] = not failed
        count = f"all {len(results['exercises'])} exercises' checks hold"
        print(
            f"\n{'FAIL' if failed else 'PASS'} {results['lab']}: {', '.join(failed) or count}",
            flush=True,
        )
        if args.json:
            write_whole(
                args.json, lambda path: Path(path).write_text(json.dumps(results, indent=1) + "\n")
            )
        if args.plot:
            write_whole(args.plot, partial(draw, results))
        return 1 if failed else 0
    except Unusable as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    except Wrong as wrong:  # a rank of an experiment, which has nothing to compare
        print(f"\nFAIL {Path(__file__).stem}: {wrong.found}")
        return 1


# ---------------------------------------------------------------------------------------------------
# Command line
# ---------------------------------------------------------------------------------------------------


# Copied from tp.py
class Parser(argparse.ArgumentParser):
    """argparse, with its complaint raised instead of printed with the usage."""

    def error(self, message):
        raise Unusable(message)


# Copied from labs/lab8_3d.py
def write_whole(path, write):
    """Have write(another path) make the file, then name it path: whole or not at all, or Unusable."""
    draft = f"{path}.{os.getpid()}{Path(path).suffix}"
    try:
        write(draft)
        os.replace(draft, path)
    except (
        OSError,
        ValueError,
    ) as problem:  # a full disk; a picture of a kind that matplotlib lacks
        raise Unusable(f"cannot write {path}: {problem}") from None
    finally:
        Path(draft).unlink(missing_ok=True)


def plan_path(text):
    """The import path of a plan, for argparse."""
    sys.path.insert(0, os.getcwd())
    try:
        load_plan(text)
    except ValueError as problem:
        raise argparse.ArgumentTypeError(problem) from None
    return text


def add_options(parser):
    """The lab's own options: without any of them, every family is run."""
    parser.add_argument("--model", choices=FAMILIES, help="one family, its plan printed")
    one = parser.add_mutually_exclusive_group()
    one.add_argument("--sp", action="store_true", help="with sequence parallelism")
    one.add_argument("--hf-plan", action="store_true", help="Hugging Face's plan, which has none")
    parser.add_argument("--plan", type=plan_path, metavar="PATH", help="import path of a plan")


if __name__ == "__main__":
    sys.exit(main())
