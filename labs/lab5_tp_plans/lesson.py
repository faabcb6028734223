"""Lab 5: Tensor parallel plans. A dict from module names to styles; the model was never told.

torch's parallelize_module(model, mesh, plan) shards a stock Hugging Face model. The model's code
stays as it is: the weights become DTensors (which know their layout), and hooks convert what goes
in and comes out. How much of a real framework's parallelism fits in such a dict, and what does the
dict get wrong? A layer:

                     layout of x on P = 2 ranks                      the plan's entry
    embed_tokens     rows of the table -> partial sums -> TOKENS     RowwiseParallel
    input_layernorm  TOKENS -> norm -> every rank has all of x       NormThenGather(TOKENS)
    q, k, v_proj     x -> heads / P, plain tensors                   ColwiseParallel
    q_norm, k_norm   heads / P -> heads / P    (Qwen3, Gemma3)       QKNormParallel
    o_proj           heads / P -> partial sums -> TOKENS             RowwiseParallel
    + residual       TOKENS                                          (DTensors add up by themselves)
    post_..norm, mlp the same again: gate, up by columns, down by rows
    norm, lm_head    TOKENS -> all of x -> vocabulary / P            ..., with loss_parallel()

TOKENS is Replicate() in tensor parallelism: every rank has all tokens, partial sums are
all-reduced. It is Shard(1) in sequence parallelism (SP): each rank has (b, s/P, h), and
reduce-scatter and all-gather replace the all-reduce. The two plans differ in that word alone.

Where a plan goes wrong, the logits are often right:

- A norm inside attention sees its rank's heads. If a plan does not say so, each rank keeps the
  gradient of its own heads, as in NeMo AutoModel for Qwen3 and Gemma3. No logit shows it.
- Fused weights, [Q | K | V] in Phi3, cut in 2 pieces would give rank 0 none of V.
- Heads that P does not divide fail late or never, so validate_heads() comes first.
- torch skips a plan's key that fits no module, with a warning; parallelize() refuses it.

Which plan? choose_plan() has four levels, and says which one it took and why.

    python labs/lab5_tp_plans/lesson.py                     # checks, all families, memory
    python labs/lab5_tp_plans/lesson.py --model qwen3 --sp  # one plan: printed, why, and proved
    python labs/lab5_tp_plans/lesson.py --model phi3 --hf-plan
    python labs/lab5_tp_plans/lesson.py --model mistral     # a model without a plan of its own
    python labs/lab5_tp_plans/lesson.py --referee           # others' plans, proved in float64
    python labs/lab5_tp_plans/lesson.py --referee --model DIR --plan package.module.plan
    python labs/lab5_tp_plans/lesson.py --plot lab5.png --json lab5.json --predict 12
    python labs/grade.py start lab5                         # writes my_labs/lab5_tp_plans.py

Sources: NeMo AutoModel, nemo_automodel/components/distributed/: optimized_tp_plans.py (plans,
styles), parallelizer.py (the choice, Hugging Face's strings, the validation). transformers:
base_model_tp_plan in each model's configuration, integrations/tensor_parallel.py (what the strings
mean). torch: torch/distributed/tensor/parallel/style.py. Megatron-LM and Nanotron say all this in
their layers instead (lab 2); DeepSpeed's AutoTP (module_inject/auto_tp.py) guesses it from the
modules. SP: arXiv 2205.05198.
"""

import copy
import pkgutil
import sys
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

# --------------------------------------------------------------------------------------------------
# The lesson 1: before anything is cut
# --------------------------------------------------------------------------------------------------


def validate_heads(config, world):
    """Raise ValueError unless every rank gets whole query heads, and the KV heads they read.

    That is: world divides config.num_attention_heads and config.num_key_value_heads. The message
    names both numbers, world, and all numbers of ranks that work.
    """
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    # exercise: validate_heads
    if heads % world or kv_heads % world:
        fit = [str(n) for n in range(1, kv_heads + 1) if heads % n == 0 and kv_heads % n == 0]
        cut = f"{heads} heads and {kv_heads} KV heads cannot be cut over {world} ranks"
        raise ValueError(f"{cut}: use {', '.join(fit)} ranks")
    # end exercise


def parallelize(model, mesh, plan):
    """Cut a model over the ranks of a mesh, in place, by a plan {pattern of module names: style}.

    Raises ValueError, with the model as it was, for heads that cannot be cut and for a pattern that
    fits no module (parallelize_module only warns, and leaves that part whole). It ties tied
    weights again, because each module got a parameter of its own.
    """
    validate_heads(model.config, mesh.size())
    names = [name for name, _ in model.named_modules()]
    for pattern in plan:  # * stands for one step of a path
        alike = [name for name in names if name.count(".") == pattern.count(".")]
        if not any(fnmatchcase(name, pattern) for name in alike):
            raise ValueError(f"the plan's {pattern} fits no module of {type(model).__name__}")
    parallelize_module(model, mesh, plan)
    if model.config.tie_word_embeddings:  # rows of the vocabulary, both of them
        model.lm_head.weight = model.model.embed_tokens.weight
    return model


# --------------------------------------------------------------------------------------------------
# The lesson 2: styles that torch's Colwise-, Rowwise- and SequenceParallel do not cover
# --------------------------------------------------------------------------------------------------


def replicate_weights(name, module, mesh):
    """Make DTensors of a module's parameters, replicated on every rank."""
    for key, parameter in list(module.named_parameters(recurse=False)):
        full = distribute_tensor(parameter.detach(), mesh, [Replicate()])
        setattr(module, key, nn.Parameter(full, requires_grad=parameter.requires_grad))


class NormThenGather(ParallelStyle):
    """A norm of x in its layout; every rank gets the whole result, as one DTensor.

    layout Shard(1): SP. The norm sees the rank's tokens (b, s/P, h), then one all-gather. q, k and
    v read the same DTensor, so their partial gradients are added up first and reduce-scattered
    once. In NeMo AutoModel: SequenceParallelAllGatherActivation. With torch's plain
    SequenceParallel each of q, k and v does its own gathering.
    layout Replicate(): tensor parallelism. Nothing is gathered; the gradient is all-reduced once,
    not once for each of q, k and v (2 layers: 5 messages in the backward instead of NeMo's 11).
    """

    def __init__(self, layout):
        super().__init__()
        self.layout = layout

    def _apply(self, module, device_mesh):
        """Hooks: enter(module, args, mesh) makes x (a plain tensor or a DTensor) a DTensor laid out
        as self.layout; leave(module, y, mesh) returns a DTensor, the same on all ranks."""

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
    """A norm over the head dimension inside attention, on plain tensors of own heads.

    In and out: (b, s, heads/P, d) in Qwen3, (b, heads/P, s, d) in Gemma3. The weight (d) is
    the same for all heads, on all ranks, so its gradient is a sum over ranks, taken only if
    the plan says so. NeMo AutoModel's plans leave these norms out; Hugging Face's says
    replicated_with_grad_allreduce.
    """

    def _apply(self, module, device_mesh):
        """enter(module, args, mesh) and leave(module, y, mesh) as in NormThenGather.

        x enters as a DTensor of which this rank has a shard: then DTensor knows that the
        weight's gradient is Partial, a part of a sum. A norm over the last dimension may call
        any other one cut; 1 fits both models. Values need no message, forward or backward.
        """
        # exercise: qk_norm_style

        def enter(module, args, mesh):
            return DTensor.from_local(args[0], mesh, [Shard(1)], run_check=False)

        def leave(module, y, mesh):
            return y.to_local()

        # end exercise
        return distribute_module(module, device_mesh, replicate_weights, enter, leave)


class RotaryParallel(ParallelStyle):
    """Rotary embeddings of all tokens, if the residual stream is plain tensors (b, s/P, h).

    transformers counts positions from 0 to x.shape[1]. In our plans x is a DTensor, whose
    shape covers all tokens, so nothing is to be done. With plain tensors (NeMo AutoModel's
    plans at the start of 2026) every rank counts to s/P, but q and k have s tokens: at best
    "16 must match 8". P divides s here.
    """

    def _apply(self, module, device_mesh):
        def positions_of_all(rotary, args, kwargs):
            """position_ids (1, s/P) counted from 0 on each rank -> (1, s), those of all tokens.

            Left as they are if x is a DTensor or if they are not as many as x's own tokens.
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
    """The rows of a fused weight [Q | K | V] in the order [Q_0 | K_0 | V_0 | Q_1 | ...], int64.

    sizes: rows of each block, e.g. (q, k, v). Cut in `world` pieces, this order gives rank r
    its share of every block. Raises ValueError for a block that world does not divide.
    """
    # exercise: fused_style
    for size in sizes:
        if size % world:
            raise ValueError(f"a fused block of {size} rows cannot be cut over {world} ranks")
    blocks = torch.arange(sum(sizes)).split(list(sizes))
    return torch.cat([block.chunk(world)[rank] for rank in range(world) for block in blocks])
    # end exercise


class FusedColwiseParallel(ParallelStyle):
    """ColwiseParallel for fused projections: rank r computes [Q_r | K_r | V_r], as the model wants.

    The parameter and its gradient are then DTensors whose rows are in another order. whole()
    puts them back; a checkpoint must be written through whole().
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
    """Tell Phi3's attention that it has 1/P of the heads: it cuts [Q | K | V] by its config.

    NeMo AutoModel and Hugging Face do not, and let every rank compute all heads.
    """

    def _apply(self, module, device_mesh):
        module.config = copy.deepcopy(module.config)  # all layers share one
        module.config.num_attention_heads //= device_mesh.size()
        module.num_key_value_heads //= device_mesh.size()
        return module


# --------------------------------------------------------------------------------------------------
# The lesson 3: plans
# --------------------------------------------------------------------------------------------------

LAYER = "model.layers.*"


def sharded_logits(tokens=None):
    """lm_head: (b, s, h) -> (b, s, v/P), a DTensor that is never gathered; wants loss_parallel().

    tokens: the layout of x, if not Replicate(), whole on every rank.
    """
    return ColwiseParallel(input_layouts=tokens, output_layouts=Shard(-1), use_local_output=False)


def llama_plan(model, sequence_parallel):
    """The plan of Llama, Qwen2 and whatever is built like them: see the table at the top.

    The residual stream, from embed_tokens to the last norm, is a DTensor (use_local_output=False):
    its shape is that of all tokens, from which transformers makes positions and masks. All
    parameters become DTensors, because clip_grad_norm_ and AdamW's foreach refuse a mixture
    with plain ones. Each of the 12 modules has a key (in a layer f"{LAYER}.self_attn.q_proj"
    and so on), because other plans replace some.
    """
    tokens = Shard(1) if sequence_parallel else Replicate()
    # exercise: llama_plan
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
    """Qwen3's, and norms behind attention and MLP in the residual stream's layout."""
    before = NormThenGather(Shard(1) if sequence_parallel else Replicate())
    after = SequenceParallel() if sequence_parallel else NormThenGather(Replicate())
    return qwen3_plan(model, sequence_parallel) | {
        f"{LAYER}.post_attention_layernorm": after,
        f"{LAYER}.pre_feedforward_layernorm": before,
        f"{LAYER}.post_feedforward_layernorm": after,
    }


def phi3_plan(model, sequence_parallel):
    """Llama's, with fused projections [Q | K | V] and [gate | up], cut over the ranks, too."""
    config = model.config
    head_dim, features = model.model.layers[0].self_attn.head_dim, config.intermediate_size
    q, kv = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    separate = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    plan = llama_plan(model, sequence_parallel)
    return {name: style for name, style in plan.items() if not name.endswith(separate)} | {
        f"{LAYER}.self_attn": OwnHeads(),
        f"{LAYER}.self_attn.qkv_proj": FusedColwiseParallel(q, kv, kv),
        f"{LAYER}.mlp.gate_up_proj": FusedColwiseParallel(features, features),
    }


PLANS = {  # by the class's name: a framework may have a class of its own around it (NeMo-RL does)
    "LlamaForCausalLM": llama_plan,
    "Qwen2ForCausalLM": llama_plan,
    "Qwen3ForCausalLM": qwen3_plan,
    "Gemma3ForCausalLM": gemma3_plan,
    "Phi3ForCausalLM": phi3_plan,
}


def base_plan(model, sequence_parallel):
    """For a model without a plan of its own: Llama's, in a form that is sure to be right.

    Plain SequenceParallel, as in NeMo AutoModel; logits are gathered, for any loss. NeMo's
    also cuts qkv_proj and gate_up_proj row by row, whatever their layout; we refuse them.
    """
    for name, _ in model.named_modules():
        if name.endswith(("qkv_proj", "gate_up_proj")):
            raise ValueError(f"{name} is fused, in an unknown layout: pass a plan, or ask for HF's")
    tokens = Shard(1) if sequence_parallel else Replicate()
    norm = SequenceParallel() if sequence_parallel else NormThenGather(tokens)
    plan = llama_plan(model, sequence_parallel)
    plan |= {name: norm for name in plan if name.endswith("norm")}
    return plan | {"lm_head": ColwiseParallel(input_layouts=tokens, output_layouts=Replicate())}


# --------------------------------------------------------------------------------------------------
# The lesson 4: Hugging Face's plan, and the choice
# --------------------------------------------------------------------------------------------------


STYLES = {  # transformers 5.12 to 5.23; functions: parallelize_module writes to a style
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
    "embedding_colwise": lambda: ColwiseParallel(output_layouts=Replicate()),
    "replicated_with_grad_allreduce": QKNormParallel,
    # so called before transformers 5
    "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rowwise_rep": lambda: RowwiseParallel(input_layouts=Replicate()),
}


def hf_plan(model):
    """transformers' own plan of a model, in torch's styles. No sequence parallelism in it.

    Its strings are in config.base_model_tp_plan, with names below model.base_model_prefix
    ("model"), and in the class's _tp_plan, with whole names. Two changes, as in NeMo AutoModel:
    embed_tokens, where missing, is "embedding_rowwise" (a tied lm_head is cut like that); an
    lm_head that would gather its output gets sharded_logits(). Each module gets a style of its
    own. Raises ValueError with the string and the module, for a string that STYLES lacks.
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


def load_plan(path):
    """The dict or function at an import path, package.module.name. Raises ValueError for none."""
    try:
        return pkgutil.resolve_name(path)
    except Exception as problem:  # whatever the module raises
        raise ValueError(f"no plan at {path}: {problem}; use package.module.name") from None


def choose_plan(model, sequence_parallel=False, custom=None, hf=False):
    """(plan, reason): the first that applies. The reason begins with the level's name.

    "custom"           custom is a dict, a function(model, sequence_parallel) that returns one, or
                       the import path of either (load_plan)
    "Hugging Face"     hf: hf_plan(model). Raises ValueError with sequence_parallel: it has none
    "model-specific"   PLANS[name of the model's class](model, sequence_parallel)
    "base"             base_plan(model, sequence_parallel)

    What a level raises is raised: no other level may replace a plan that fails.
    """
    name = type(model).__name__
    # exercise: choose_plan
    if custom is not None:
        path = isinstance(custom, str)
        plan = load_plan(custom) if path else custom
        plan = plan(model, sequence_parallel) if callable(plan) else plan
        return plan, f"custom: {custom if path else getattr(custom, '__name__', 'a dict')}"
    if hf:
        if sequence_parallel:
            raise ValueError("Hugging Face's plan has no sequence parallelism: leave out one")
        return hf_plan(model), f"Hugging Face: {name}, as asked"
    if name in PLANS:
        return PLANS[name](model, sequence_parallel), f"model-specific: {name}"
    return base_plan(model, sequence_parallel), f"base: none for {name}"
    # end exercise


if __name__ == "__main__":  # the lab's checks and experiments, of labs/ and of my_labs/
    sys.path[:0] = [str(folder) for folder in Path(__file__).resolve().parents[1:3]]
    from labs.kit.run import main

    sys.exit(main(__file__))
