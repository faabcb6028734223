"""Ulysses sequence parallelism for LLaMA in one file (DeepSpeed, arXiv 2309.14509) on HF's model.

Each of P ranks holds the activations of s/P of the s tokens, and all weights. Norms, projections
and MLP treat each token by itself, and need no other rank. Attention alone mixes tokens, and it
treats each head by itself: so it gets all tokens of 1/P of the heads. One attention block, P = 2:

    rank 0: tokens 0..s/2       rank 1: tokens s/2..s        (b, s/2, h)
    q, k, v projections         q, k, v projections          replicated weights, all heads
        |                               |
    (b, heads, s/2, d)          (b, heads, s/2, d)           q, k rotated by their positions
        |        all-to-all, each of q, k, v    |            backward: all-to-all back
        v                                       v
    (b, heads/2, s, d)          (b, heads/2, s, d)           all tokens, own heads
    attention, first half       attention, second half       HF's own: sdpa, eager or flash
    (b, s, heads/2, d)          (b, s, heads/2, d)           returned with tokens before heads
        |        all-to-all                     |            backward: all-to-all back
        v                                       v
    (b, s/2, heads, d)          (b, s/2, heads, d)           all heads of own tokens
    o projection                o projection
        |                               |
    rank 0: tokens 0..s/2       rank 1: tokens s/2..s        (b, s/2, h)

    messages of a layer           forward          backward         recomputed (--recompute full)
    q, (b, s/P, heads d)          all-to-all       all-to-all       all-to-all
    k and v, smaller with GQA     2 all-to-alls    2 all-to-alls    2 all-to-alls
    attention's output, like q    all-to-all       all-to-all       all-to-all

    once a step                   all-reduce loss  all-reduce of each gradient
    with --shard-weights          all-gather of    all-gather of all weights, and, instead of the
                                  all weights      all-reduces, reduce-scatter of all gradients

--recompute none keeps all activations of a layer; full, the default, only its input, (b, s/P, h).
Messages are of s/P tokens, and shrink with P (k, v: as long as each rank has a KV head of its own);
those of tp.py and sp_megatron.py are of all s. But weights and gradients do not shrink, unless
--shard-weights leaves 1/P on each rank (ZeRO-3). Heads are divided as in tp.py: whole KV heads; or,
if P is a multiple of their number, each KV head goes to several ranks, which divide its queries.

    torchrun --nproc_per_node=2 sp_ulysses.py --mode correctness
    torchrun --nproc_per_node=4 sp_ulysses.py --mode all --length 1001
    torchrun --nproc_per_node=2 sp_ulysses.py --length 20480 --batch 1 --mode benchmark
    torchrun --nproc_per_node=2 sp_ulysses.py --mode all --shard-weights
    torchrun --nproc_per_node=2 labs/break_it.py sp_ulysses.py local_position_ids
    diff sp_megatron.py sp_ulysses.py     # two ways to give attention all tokens
"""

# ---- 1. Imports, constants, models ---------------------------------------------------------------

import argparse
import contextlib
import copy
import datetime
import faulthandler
import gc
import importlib
import io
import json
import math
import os
import signal
import statistics
import sys
import time
import weakref
from collections import Counter
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed import fake_pg  # noqa: F401  registers --backend fake
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

STRATEGY = "sp_ulysses"
IGNORE = -100  # the label of a token that is no target: PyTorch's and Hugging Face's convention
LOSS_CHUNK = 2048  # --loss chunked: at most LOSS_CHUNK * vocabulary logits on a rank at once

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "smollm3", "olmo2")  # model_type
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
SIZES += ("num_key_value_heads", "vocab_size", "tie_word_embeddings")
# Copied from tp.py
PRESETS = {  # with random weights: the model_type, then SIZES
    "tiny": ("llama", 64, 192, 8, 8, 4, 256, True),
    "smollm2-135m": ("llama", 576, 1536, 30, 9, 3, 49152, True),
    "llama-3.2-1b": ("llama", 2048, 8192, 16, 32, 8, 128256, True),
    "llama-3.2-3b": ("llama", 3072, 8192, 28, 24, 8, 128256, True),
    "llama-3.1-8b": ("llama", 4096, 14336, 32, 32, 8, 128256, False),
    "llama-3.1-70b": ("llama", 8192, 28672, 80, 64, 8, 128256, False),
    "mistral-7b": ("mistral", 4096, 14336, 32, 32, 8, 32768, False),
    "qwen3-0.6b": ("qwen3", 1024, 3072, 28, 16, 8, 151936, True),
    "qwen3-8b": ("qwen3", 4096, 12288, 36, 32, 8, 151936, False),
    "smollm3-3b": ("smollm3", 2048, 11008, 36, 16, 4, 128256, True),
}


# Copied from tp.py
class UsageError(Exception):
    """Arguments or a model that cannot work; the message says what would."""


# ---- 2. Communication: an all-to-all, whose backward is another ----------------------------------


class SeqAllToAll(torch.autograd.Function):
    """Of x's rows (dim 0) send[r] go to rank r, and receive[r] rows come from rank r. The backward
    swaps the counts: a row's gradient returns to where the row came from. (DeepSpeed's name.)"""

    @staticmethod
    def forward(ctx, x, send, receive, group):
        ctx.send, ctx.receive, ctx.group = send, receive, group
        if group.size() == 1:
            return x
        out = x.new_empty(sum(receive), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), receive, send, group=group)
        return out

    @staticmethod
    def backward(ctx, grad):
        return SeqAllToAll.apply(grad, ctx.receive, ctx.send, ctx.group), None, None, None


def tokens_to_heads(x, counts, group):
    """(b, heads, s/P, d), all heads of own tokens -> (b, heads/P, s, d), own heads of all tokens.
    counts[r]: heads of rank r; they may differ (whole KV groups)."""
    receive = [counts[group.rank()]] * group.size()
    rows = SeqAllToAll.apply(x.transpose(0, 1), counts, receive, group)  # a row: (b, s/P, d)
    rows = rows.unflatten(0, (group.size(), -1))  # (P, heads/P, b, s/P, d)
    return rows.permute(2, 1, 0, 3, 4).flatten(2, 3)  # ranks in order have the tokens in order


def heads_to_tokens(x, counts, group):
    """The inverse, with tokens before heads, as HF's attention returns them: (b, s, heads/P, d),
    own heads of all tokens -> (b, s/P, heads, d), all heads of own tokens."""
    send = [counts[group.rank()]] * group.size()
    rows = x.unflatten(1, (group.size(), -1)).permute(1, 3, 0, 2, 4)  # (P, heads/P, b, s/P, d)
    rows = SeqAllToAll.apply(rows.flatten(0, 1), send, counts, group)  # (heads, b, s/P, d)
    return rows.permute(1, 2, 0, 3)


# ---- 3. Sharding LLaMA and its relatives, and recomputation --------------------------------------


# Copied from tp.py
def split(n, rank, world):
    """[start, end) of the rank's share of n things: the first n % world ranks hold one more."""
    base, extra = divmod(n, world)
    return rank * base + min(rank, extra), (rank + 1) * base + min(rank + 1, extra)


# Copied from tp.py
def head_range(config, rank, world):
    """Returns (q0, q1), (k0, k1), replicas: a rank has query heads [q0, q1) and KV heads [k0, k1),
    and `replicas` ranks have these same KV heads.

    With world <= kv_heads whole KV groups (a KV head and the query heads that read it) are dealt
    out; with more ranks than KV heads, `replicas` ranks share one and deal out its query heads.
    """
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    per_kv = heads // kv_heads  # query heads that read a KV head
    possible = [w for w in range(1, heads + 1) if w <= kv_heads or w % kv_heads == 0]
    if world not in possible:
        problem = f"{heads} heads with {kv_heads} KV heads cannot be split over {world} ranks"
        raise UsageError(f"{problem}; {', '.join(map(str, possible))} ranks would work")
    if world <= kv_heads:
        k0, k1 = split(kv_heads, rank, world)
        return (k0 * per_kv, k1 * per_kv), (k0, k1), 1
    replicas = world // kv_heads
    k = rank // replicas
    q0, q1 = split(per_kv, rank % replicas, replicas)
    return (k * per_kv + q0, k * per_kv + q1), (k, k + 1), replicas


# Copied from tp.py
def mark(tensor, shard=None, replicas=1, sum_over=None):
    """Attach to a tensor what later code reads. Training reads sum_over, the group over which its
    gradient is summed (None: no sum). The proof reads shard, which (dim, start, end) of the full
    tensor it is (None: all of it), and replicas, how many ranks hold the same."""
    tensor.shard, tensor.replicas, tensor.sum_over = shard, replicas, sum_over
    return tensor


def head_counts(config, world):
    """How many query heads, and how many KV heads, each rank attends with: two lists."""
    ranges = [head_range(config, rank, world) for rank in range(world)]
    return [q1 - q0 for (q0, q1), _, _ in ranges], [k1 - k0 for _, (k0, k1), _ in ranges]


def ulysses_attention(stock, stand_in, group, module, query, key, value, mask, **others):
    """HF's attention function `stock` between all-to-alls; it gets `stand_in` in module's place.

    query (b, heads, s/P, d), key and value (b, KV heads, s/P, d) -> (b, s/P, heads, d).
    """
    q_counts, kv_counts = head_counts(module.config, group.size())
    # A KV head is repeated for each rank that has it: repeat_interleave's backward sums over them
    repeats = head_range(module.config, group.rank(), group.size())[2]
    if repeats > 1:
        key, value = (x.repeat_interleave(repeats, 1) for x in (key, value))
    query = tokens_to_heads(query, q_counts, group)
    key = tokens_to_heads(key, kv_counts, group)
    value = tokens_to_heads(value, kv_counts, group)
    out, probabilities = stock(stand_in, query, key, value, mask, **others)
    return heads_to_tokens(out, q_counts, group), probabilities  # out: (b, s, heads/P, d)


# Copied from sp_megatron.py
def all_tokens_mask(stock, group, q_length, kv_length, **others):
    """HF's mask function `stock` for all tokens. HF asks for s/P, which the embedding returned."""
    return stock(q_length=q_length * group.size(), kv_length=kv_length * group.size(), **others)


def attend_with_ulysses(model, group, args):
    """Register ulysses_attention() around HF's own attention, with the mask of all tokens."""
    eager = sys.modules[type(model).__module__].eager_attention_forward  # each family's own
    stock = ALL_ATTENTION_FUNCTIONS.get_interface(args.attn_implementation, eager)
    mask = partial(all_tokens_mask, ALL_MASK_ATTENTION_FUNCTIONS[args.attn_implementation], group)
    (q0, q1), (k0, k1), _ = head_range(model.config, group.rank(), group.size())
    # HF's functions ask the module that they get how many query heads read a KV head (here fewer,
    # where KV heads are repeated), and its config for the kernel's name (there now "ulysses")
    stand_in = SimpleNamespace(num_key_value_groups=(q1 - q0) // (k1 - k0), is_causal=True)
    stand_in.config = SimpleNamespace(_attn_implementation=args.attn_implementation)
    stand_in.training = True
    attention = partial(ulysses_attention, stock, stand_in, group)
    transformers.AttentionInterface.register("ulysses", attention)
    transformers.AttentionMaskInterface.register("ulysses", mask)
    model.set_attn_implementation("ulysses")


# Copied from tp.py
def recompute_layers(model):
    """Keep each layer's input only. The layer's backward first runs its forward again, hooks and
    collectives included, up to the last tensor that it needs (arXiv 1604.06174)."""
    enable = getattr(model, "activation_checkpointing_enable", None)  # since transformers 5.23
    enable = enable or model.gradient_checkpointing_enable  # its name before
    enable({"use_reentrant": False})


class UlyssesLlama(nn.Module):
    """HF's decoder and head under HF's names. forward() computes the loss, too: --shard-weights
    gathers embedding, last norm and head for forward() and its backward only."""

    def __init__(self, model):
        super().__init__()
        self.model, self.lm_head, self.config = model.model, model.lm_head, model.config

    def forward(self, ids, labels, group, args):
        """This rank's share of the mean loss of ids (b, s); without labels its logits."""
        hidden = final_hidden_states(self, ids, group)
        if labels is None:
            return self.lm_head(hidden)
        return mean_loss(self, hidden, labels, group, args)


def parallelize(model, group, args):
    """Have HF's model attend across the ranks, in place; returns its UlyssesLlama."""
    if args.recompute == "full":
        recompute_layers(model)
    attend_with_ulysses(model, group, args)
    model = UlyssesLlama(model)
    if args.shard_weights:
        shard_weights(model, group, args)
    # A rank's tokens give a part of each gradient; fully_shard sums the parts itself. Each of P
    # ranks has the full tensor (a DTensor's: in full_tensor())
    sum_over = None if args.shard_weights or group.size() == 1 else group
    for parameter in model.parameters():
        mark(parameter, replicas=group.size(), sum_over=sum_over)
    return model


def shard_weights(model, group, args):
    """Leave 1/P of every weight, and of its gradient, on each rank, by rows (arXiv 1910.02054).

    PyTorch's fully_shard gathers a layer's weights before its forward, frees them after it, gathers
    them again before its backward, and reduce-scatters the gradients after that. What is in no
    layer (embedding, last norm, head) is gathered for the forward and backward of the whole model.
    """
    mesh = DeviceMesh.from_group(group, args.device.type)
    for unit in (*model.model.layers, model):
        fully_shard(unit, mesh=mesh, reshard_after_forward=True)
        unit.set_gradient_divide_factor(1.0)  # a sum over ranks, as without sharding; not a mean
        unit.set_force_sum_reduction_for_comms(True)  # not scaled: gloo cannot


# ---- 4. Loss and step ----------------------------------------------------------------------------


def own_tokens(x, group, padding):
    """This rank's tokens of x (b, s), padded at the end where P does not divide s: (b, s/P)."""
    x = F.pad(x, (0, -x.shape[1] % group.size()), value=padding)
    return x.chunk(group.size(), 1)[group.rank()]


def sum_of_losses(model, hidden, targets):
    """Sum of -log softmax(logits)[target] of hidden (b, c, h), c tokens of each sequence. A token
    whose target is IGNORE adds none. By hand: in float32 F.cross_entropy sums a large vocabulary
    too coarsely on a CPU."""
    logits = model.lm_head(hidden)  # (b, c, v)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logits = logits - logits.detach().max(-1, keepdim=True).values  # at most 0: exp stays finite
    target_logit = logits.gather(-1, targets.clamp(min=0)[..., None])[..., 0]  # IGNORE is negative
    loss = logits.exp().sum(-1).log() - target_logit  # (b, c)
    return loss.masked_fill(targets == IGNORE, 0).sum()


def mean_loss(model, hidden, labels, group, args):
    """This rank's share of the mean loss over all targets, from its hidden (b, s/P, h)."""
    chunk = hidden.shape[1] if args.loss == "full" else max(1, LOSS_CHUNK // args.batch)
    # The target of a token is the next one. Shifted before the split: a rank's last token predicts
    # the next rank's first
    targets = F.pad(labels[:, 1:], (0, 1), value=IGNORE)
    count = (targets != IGNORE).sum()  # of all s tokens: each rank has all labels
    targets = own_tokens(targets, group, IGNORE)
    total = 0
    for h, t in zip(hidden.split(chunk, 1), targets.split(chunk, 1)):
        if args.loss == "full":
            total += sum_of_losses(model, h, t)
        else:  # logits of one chunk at a time, recomputed in the backward
            total += checkpoint(sum_of_losses, model, h, t, use_reentrant=False)
    return total / count


def final_hidden_states(model, ids, group):
    """Output of the final norm for this rank's tokens, (b, s/P, h). ids (b, s): all tokens."""
    last = ids.shape[1] - 1
    ids = own_tokens(ids, group, 0)  # padding comes last: no token before it attends to it
    size = ids.shape[1]
    first = group.rank() * size
    positions = torch.arange(group.size() * size, device=ids.device)[None]  # of all, for the mask

    # Some rotary embeddings (longrope) choose frequencies by the largest position: so padding gets
    # the last token's position. Not in the mask: HF takes a repeated position for a new document
    def without_padding(rotary, args, kwargs):
        return (args[0], positions.clamp(max=last)), {}  # hidden states, positions

    def own_rotations(rotary, args, out):  # cos and sin (1, s, d) -> (1, s/P, d)
        return tuple(x[:, first : first + size].clone() for x in out)  # a view would keep all

    rotary = model.model.rotary_emb
    with rotary.register_forward_pre_hook(without_padding, with_kwargs=True):
        with rotary.register_forward_hook(own_rotations):
            outputs = model.model(input_ids=ids, position_ids=positions, use_cache=False)
    return outputs.last_hidden_state


def train_step(model, ids, labels, group, args, backward=True):
    """Loss of ids (b, s), the same on every rank. .grad is None before, and complete after."""
    loss = model(ids, labels, group, args)
    if backward:
        loss.backward()
        sum_gradients(model)
    loss = loss.detach()
    if group.size() > 1:
        dist.all_reduce(loss, group=group)  # the ranks' shares
    return loss


# Copied from tp.py
def sum_gradients(model):
    """Sum each gradient of which a rank has only a part, over the group that mark() noted."""
    for parameter in model.parameters():
        if parameter.sum_over is not None:  # every parameter is marked
            dist.all_reduce(parameter.grad, group=parameter.sum_over)


# The lesson ends here. The rest proves and measures it; from section 5 on all scripts are alike.


# Copied from tp.py
def full_tensor(tensor):
    """A DTensor (tp.py --dtensor, sp_ulysses.py --shard-weights) gathered; any other as it is."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


# Copied from tp.py
def grad_norm(model, group):
    """Norm of the gradient of the whole model: what several ranks hold (replicas) counts once."""
    total = torch.zeros((), dtype=torch.float64)
    for p in model.parameters():
        total += full_tensor(p.grad).double().square().sum().cpu() / p.replicas
    dist.all_reduce(total, group=group)  # on the CPU: by gloo, which start() puts beside NCCL
    return total.sqrt()


def local_logits(model, ids, group, args):
    """Logits of this rank's tokens, (b, s/P, v), marked as a parameter is."""
    length = ids.shape[1]
    size = math.ceil(length / group.size())
    start, end = (min(rank * size, length) for rank in (group.rank(), group.rank() + 1))
    logits = model(ids, None, group, args)[:, : end - start]  # without padding
    return mark(logits, (1, start, end))


def expected_traffic(model, group, args):
    """What one step must send: rows (phase, op, calls, message bytes of all calls together)."""
    if group.size() == 1:
        return []
    world, layers = group.size(), model.config.num_hidden_layers
    element = getattr(torch, args.dtype).itemsize
    q_counts, kv_counts = head_counts(model.config, world)
    head_dim = model.model.layers[0].self_attn.head_dim
    head_bytes = args.batch * math.ceil(args.length / world) * head_dim * element  # of own tokens
    # The message of an all-to-all is its input. q, kv: all heads of own tokens; own_q, own_kv: own
    # heads of all tokens
    q, kv = sum(q_counts) * head_bytes, sum(kv_counts) * head_bytes
    own_q = q_counts[group.rank()] * world * head_bytes
    own_kv = kv_counts[group.rank()] * world * head_bytes
    forward_bytes = layers * (q + 2 * kv + own_q)  # q, k, v; then the output of own heads
    rows = [
        ("forward", "all_to_all", 4 * layers, forward_bytes),
        ("backward", "all_to_all", 4 * layers, layers * (own_q + 2 * own_kv + q)),  # gradients back
        ("forward", "all_reduce", 1, max(4, element)),  # the loss, in float32 or wider
    ]
    if args.recompute == "full":  # every layer's forward again, up to the MLP's last matrix product
        rows += [("backward", "all_to_all", 4 * layers, forward_bytes)]
    weights = list(model.parameters())
    if args.shard_weights:  # a message for each layer, one for the rest; dim 0 padded for P
        padded = {p: math.ceil(len(p) / world) * world for p in weights}
        size = sum(n * p.numel() // len(p) for p, n in padded.items()) * element
        rows += [("forward", "all_gather", layers + 1, size)]
        rows += [("backward", "all_gather", layers + 1, size)]
        rows += [("backward", "reduce_scatter", layers + 1, size)]  # the gradients
    else:  # every gradient
        size = sum(p.numel() for p in weights) * element
        rows += [("backward", "all_reduce", len(weights), size)]
    return rows


OPTIONS = {"--shard-weights": {"action": "store_true", "help": "1/P of them on each rank (ZeRO-3)"}}
OWN_MODES = {}  # of this script alone: {name: function(args, group) -> (summary, result)}


def finalize_args(args, world):
    """The script's own defaults; UsageError where world ranks cannot do it."""
    args.batch = args.batch or 3
    head_range(args.config, 0, world)  # raises where they cannot
    if args.shard_weights and world == 1:
        raise UsageError("--shard-weights needs another rank to share weights with; 2 would do")


# Copied from tp.py
# ---- 5. Proof: from here on the same in tp.py, sp_megatron.py, sp_ulysses.py and pp.py -----------

# Allowed relative errors. float64 is the proof; the others' rounding hides small mistakes
LIMIT = {"float64": 1e-10, "float32": 1e-3, "bfloat16": 2e-1}
IS_RANK0 = os.environ.get("RANK", "0") == "0" or "LOCAL_RANK" not in os.environ  # or it is alone


def print_table(rows):
    """Print rows, dicts with the same keys, in columns."""
    table = [list(rows[0])]
    for row in rows:
        table.append([f"{x:.3g}" if isinstance(x, float) else str(x) for x in row.values()])
    widths = [max(map(len, column)) for column in zip(*table)]
    print()
    for cells in table:
        print(" ", *(cell.ljust(width + 2) for cell, width in zip(cells, widths)))


def gather_objects(value, group):
    """Every rank's value, in a list; it is a barrier, too. With --backend fake only its own."""
    if dist.get_backend(group) == "fake":
        return [value]
    values = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


def upcasts_in_float64(args):
    """A context for --dtype float64. HF computes norms and softmax in torch.float32 whatever the
    model's dtype; in the context its code finds float64 under that name."""
    if args.dtype != "float64":
        return contextlib.nullcontext()
    family = args.config.model_type
    modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    names = vars(torch) | {"float32": torch.float64}
    return mock.patch.object(modeling, "torch", SimpleNamespace(**names))


def load_model(args):
    """HF's model for causal language modeling on this rank's device: the same at every call."""
    torch.manual_seed(args.seed)
    auto, config = transformers.AutoModelForCausalLM, copy.deepcopy(args.config)
    how = {"dtype": getattr(torch, args.dtype), "attn_implementation": args.attn_implementation}
    try:
        if args.source is None:
            with args.device:
                return auto.from_config(config, **how).train()
        how |= {"use_safetensors": True, "ignore_mismatched_sizes": True}  # reported below
        how |= {"output_loading_info": True, "trust_remote_code": False}
        model, loading = auto.from_pretrained(config=config, **args.source, **how)
    except torch.OutOfMemoryError:  # oom_search.py looks for it
        raise
    except Exception as problem:  # of many kinds
        raise UsageError(f"cannot load {args.model}: {type(problem).__name__}: {problem}") from None
    for kind, names in loading.items():  # missing, unexpected or mismatched keys
        if names:
            first = f"{len(names)} {kind}, {min(map(str, names))}"
            raise UsageError(f"weights of {args.model} do not fit its config: {first}")
    return model.to(args.device).train()


def proof_batch(args, group, step=1):
    """ids and labels (b, s) of a step, such that an error is unlikely to cancel or hide.

    Step 2 has other tokens and another length, so that stale state from step 1 shows. Targets are
    spread unevenly over sequences and tokens. Inputs, and in a long sequence targets, include the
    padding token and the first and last row of each rank's share of the vocabulary.
    """
    vocabulary, length = args.config.vocab_size, args.length
    if step == 2:
        length = length * 2 // 3 if length > 2 else 3
    generator = torch.Generator().manual_seed(args.seed + step)
    ids = torch.randint(vocabulary, (args.batch, length), generator=generator)
    first_rows = [split(vocabulary, rank, group.size())[0] for rank in range(group.size())]
    special = [args.config.pad_token_id or 0, *first_rows, *(row - 1 for row in first_rows)]
    special = torch.tensor(special) % vocabulary  # the row before the first is the last
    ids[0, 1 : 1 + len(special)] = special[: length - 1]
    labels = ids.clone()
    labels[0::3, length // 2 : length * 3 // 4] = IGNORE  # a quarter of sequences 0, 3, ...
    labels[2::3, length // 2 + 1 :] = IGNORE  # almost half of sequences 2, 5, ...
    return ids.to(args.device), labels.to(args.device)


def reference_step(model, ids, labels, group, args):
    """train_step() of HF's untouched model on one device, with PyTorch's own loss in float64."""
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1].double()
    loss = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORE)
    loss.backward()
    return loss.detach()


def sgd(model, lr):
    """Plain SGD: Adam would hide a gradient that is too large by a factor."""
    torch.optim.SGD(model.parameters(), lr, foreach=False).step()
    model.zero_grad()


def take_steps(model, args, group, parallel):
    """{(step, kind, name): tensor} of three SGD steps, by this script (parallel) or HF's model.

    Each has mark()'s notes: which part of the full tensor it is. Step 3 has logits of up to
    thousands, whose exp() overflows; it is in float64 only, since elsewhere rounding decides.
    """
    found = {}
    step_function = train_step if parallel else reference_step

    def keep(step, kind, name, tensor, marked):  # marked: p for p.grad, whose shard it is
        shard = getattr(marked, "shard", None)
        replicas = getattr(marked, "replicas", group.size())  # not marked: every rank has all of it
        tensor = torch.atleast_1d(full_tensor(tensor.detach()).to("cpu", copy=True))
        found[step, kind, name] = mark(tensor, shard, replicas)

    for name, p in model.named_parameters():  # before any step
        keep(1, "weight", name, p, p)
    for step in (1, 2, 3) if args.dtype == "float64" else (1, 2):
        if step == 3:
            model.model.norm.register_forward_hook(lambda module, x, out: 512 * out)
        ids, labels = proof_batch(args, group, step)
        with torch.no_grad():
            logits = local_logits(model, ids, group, args) if parallel else model(ids).logits
        if logits is not None:  # in pp.py only the last stage has them
            keep(step, "logits", "logits", logits, logits)
        loss = step_function(model, ids, labels, group, args)
        keep(step, "loss", "loss", loss, loss)
        # In the backward's order: the first wrong gradient is the nearest to its cause
        for name, p in reversed(list(model.named_parameters())):
            keep(step, "grad", name, p.grad, p)
        norms = (p.grad.double().norm() for p in model.parameters())
        norm = grad_norm(model, group) if parallel else nn.utils.get_total_norm(norms)
        keep(step, "grad_norm", "grad_norm", norm, norm)
        sgd(model, 0.05 * loss.item() / (norm.item() ** 2 or 1.0))  # about 5% less loss
    return found


def compare(found, expected, args, group):
    """Rows of --json: the error of each tensor over all ranks, and its coverage.

    Coverage: how often a tensor exists, replicas counted once. Below 1 a part is lost; above 1
    shards overlap, or a rank has more than is noted.
    """
    errors = torch.zeros(len(expected), dtype=torch.float64)  # squared, on this rank
    coverage = torch.zeros(len(expected), dtype=torch.float64)
    squares = [full.double().square().sum().item() for full in expected.values()]
    of_kind = Counter()  # {(step, kind): sum of squares}
    for i, ((step, kind, name), full) in enumerate(expected.items()):
        of_kind[step, kind] += squares[i]
        if (step, kind, name) in found:  # it may be another rank's alone: a layer, a bias
            tensor = found[step, kind, name]
            dim, start, end = tensor.shard or (0, 0, len(full))
            part = full.narrow(dim, start, end - start)
            error = tensor - part if tensor.shape == part.shape else torch.tensor(math.inf)
            errors[i] = error.double().square().sum() / tensor.replicas
            coverage[i] = part.numel() / full.numel() / tensor.replicas
    by_rank = torch.stack(gather_objects(errors, group))  # (P, tensors)
    coverage = sum(gather_objects(coverage, group))
    rows = []
    for i, (step, kind, name) in enumerate(expected):
        # Relative to the tensor's norm. Some gradients are zero but for rounding: so divide by at
        # least 1e-3 (float64) or 1 (else) times the norm of all of its kind. Norms are squared here
        least = of_kind[step, kind] * (1e-6 if args.dtype == "float64" else 1)
        error = math.sqrt(by_rank[:, i].sum() / (max(squares[i], least) or 1.0))
        row = {"name": name, "kind": kind, "step": step, "rank": by_rank[:, i].argmax().item()}
        row |= {"coverage": coverage[i].item(), "relative_error": error, "limit": LIMIT[args.dtype]}
        close = error <= row["limit"]  # False for NaN
        rows.append(row | {"passed": close and abs(row["coverage"] - 1) < 1e-9})
    return rows


def check_correctness(args, group):
    """Compare tensors of all steps on P ranks with those of HF's untouched model on every rank."""
    expected = take_steps(load_model(args), args, group, parallel=False)
    model = parallelize(load_model(args), group, args)
    found = take_steps(model, args, group, parallel=True)
    rows = compare(found, expected, args, group)
    wrong = [row for row in rows if not row["passed"]]
    by_error = sorted(rows, key=lambda row: (row["passed"], -row["relative_error"]))  # wrong first
    result = {"tolerance": LIMIT[args.dtype], "passed": not wrong, "worst": by_error[0]}
    for name in ("loss", "grad_norm"):
        one_device, parallel = (x[1, name, name].item() for x in (expected, found))
        result |= {f"{name}_reference": one_device, name: parallel}
        print(f"  {name:10}  one device {one_device:.8g}, parallel {parallel:.8g}")
    print(f"\n  {'Wrong' if wrong else 'The largest errors'}, of {len(rows)} tensors in all steps")
    print("  (coverage: how often a tensor exists over all ranks, replicas counted once):")
    print_table((wrong or by_error)[:8])
    summary = f"logits, loss and all gradients are within {LIMIT[args.dtype]} of one device's"
    if wrong:
        summary = f"{len(wrong)} of {len(rows)} tensors are wrong, the first: {wrong[0]['name']}"
    return summary, result | {"tensors": rows}


def check_learning(args, group):
    """Train one device and P ranks on the text of this file: the same losses, and they fall."""
    reference = load_model(args)
    model = parallelize(load_model(args), group, args)
    text = torch.tensor(list(Path(__file__).read_bytes())) % args.config.vocab_size
    ids = text[torch.arange(args.batch * args.length) % len(text)]  # the same at each step
    ids = ids.view(args.batch, args.length).to(args.device)
    losses, references = [], []
    for step in range(20):
        references.append(reference_step(reference, ids, ids, group, args).item())
        losses.append(train_step(model, ids, ids, group, args).item())
        print(f"  step {step:2}  one device {references[-1]:.6f}, parallel {losses[-1]:.6f}")
        if step == 0:
            lr = 0.07 * losses[0] / (grad_norm(model, group).item() ** 2 or 1.0)
        sgd(model, lr)
        sgd(reference, lr)
    errors = [abs(ours / theirs - 1) for ours, theirs in zip(losses, references)]
    errors = sum(gather_objects(errors, group), [])
    fall = 1 - losses[-1] / losses[0]
    close = all(error <= LIMIT[args.dtype] for error in errors)  # False for NaN
    summary = f"losses within {max(errors):.1e} of one device's, and down by {fall:.0%}"
    return summary, {"passed": close and fall > 0, "loss": losses, "loss_reference": references}


class Meter(TorchDispatchMode):
    """Sees every operation: counts messages and their bytes, and the peak of the bytes of all
    tensors alive (for CPUs). A message has the full tensor's bytes; an all-to-all, its input's."""

    OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")
    OPS += ("broadcast", "barrier")  # which no script sends

    def __init__(self):
        super().__init__()
        self.calls, self.bytes = Counter(), Counter()
        self.peak = 0
        # PyTorch keeps a storage's Python object until it frees the storage: then it leaves this
        self.alive = weakref.WeakValueDictionary()
        self.see(gc.get_objects())  # what exists already

    def see(self, values):
        """Returns the tensors among values, and notes their storages. A DTensor has none itself."""
        tensors = [x for x in values if type(x) in (torch.Tensor, nn.Parameter)]
        for storage in (x.untyped_storage() for x in tensors):
            if storage._cdata not in self.alive:
                self.alive[storage._cdata] = storage
                # Summed anew, since fully_shard empties and fills storages in place
                self.peak = max(self.peak, sum(x.nbytes() for x in self.alive.values()))
        return tensors

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(hasattr(kind, "full_tensor") for kind in types):
            return NotImplemented  # DTensor's own code runs; what it does to tensors comes here
        out = func(*args, **(kwargs or {}))
        inputs = self.see(tree_leaves(args))
        outputs = self.see(tree_leaves(out))
        name = func._opname.replace("_", "")  # allreduce_, _allgather_base_, all_reduce
        for op in self.OPS:
            if "c10d" in func.namespace and name.startswith(op.replace("_", "")):
                # all_to_all(out, in); of the others the larger tensor is the full one
                message = inputs[-1:] if op == "all_to_all" else inputs + outputs
                self.calls[op] += 1
                self.bytes[op] += max(x.nbytes for x in message)
        return out


def compare_traffic(forward, step, expected):
    """Rows of --json: the messages of this rank, beside the rows of expected_traffic(). The
    backward's: those of a whole step minus those of a forward."""
    rows = []
    for phase, op in product(("forward", "backward"), Meter.OPS):
        calls, size = forward.calls[op], forward.bytes[op]
        if phase == "backward":
            calls, size = step.calls[op] - calls, step.bytes[op] - size
        wanted = [entry[2:] for entry in expected if entry[:2] == (phase, op)]
        row = {"phase": phase, "op": op, "count": calls, "bytes": size}
        row["expected_count"] = sum(n for n, _ in wanted)
        row["expected_bytes"] = sum(n for _, n in wanted)
        row["passed"] = (calls, size) == (row["expected_count"], row["expected_bytes"])
        if calls or row["expected_count"]:
            rows.append(row)
    return rows


def check_benchmark(args, group):
    """Time, peak memory and messages of forward and backward; messages as expected, to the byte."""
    model = parallelize(load_model(args), group, args)
    batch = proof_batch(args, group)
    accelerator = torch.get_device_module(args.device)
    cuda = args.device.type == "cuda"

    def step(backward=True):
        train_step(model, *batch, group, args, backward)
        model.zero_grad()

    with Meter() as forward:  # these two steps warm up, too
        step(backward=False)
    if cuda:
        accelerator.reset_peak_memory_stats()  # loading had the full model
    with Meter() as both:
        step()
    ranks = gather_objects(group.rank(), group)  # 0 to P - 1; with --backend fake this one
    peaks = gather_objects(accelerator.max_memory_allocated() if cuda else both.peak, group)
    traffic = compare_traffic(forward, both, expected_traffic(model, group, args))
    right = gather_objects(all(row["passed"] for row in traffic), group)
    result = {"passed": all(right), "peak_memory_bytes": peaks, "traffic": traffic}
    for name, backward in ("forward_s", False), ("forward_backward_s", True):
        times = []
        for _ in range(args.bench_iters):
            accelerator.synchronize()
            gather_objects(None, group)  # the ranks begin together
            begin = time.perf_counter()
            step(backward)
            accelerator.synchronize()
            times.append(max(gather_objects(time.perf_counter() - begin, group)))  # the slowest
        result[name] = {"median": statistics.median(times), "min": min(times), "max": max(times)}
    label = "time" if cuda else "time (of a CPU: says nothing about GPUs)"
    print_table([{label: name} | result[name] for name in ("forward_s", "forward_backward_s")])
    print_table([{"rank": rank, "peak memory, bytes": n} for rank, n in zip(ranks, peaks)])
    if traffic:
        print(f"\n  What rank {group.rank()} sends in a step; bytes are message bytes:")
        print_table(traffic)
    result["tokens_per_s"] = args.batch * args.length / result["forward_backward_s"]["median"]
    summary = f"{result['tokens_per_s']:.0f} tokens per second; messages as expected_traffic() says"
    if not all(right):
        summary = f"messages not as expected_traffic() says on rank {ranks[right.index(False)]}"
    return summary, result


# ---- 6. Command line -----------------------------------------------------------------------------

MODES = {"correctness": check_correctness, "learning": check_learning, "benchmark": check_benchmark}


def find_model(name):
    """The config of what --model names, and from_pretrained's keywords (None: random weights)."""
    if name in PRESETS:
        family, *sizes = PRESETS[name]
        sizes = dict(zip(SIZES, sizes), max_position_embeddings=1 << 20, pad_token_id=2)
        sizes["sliding_window"] = None  # as Mistral 7B has it since v0.2
        spread = 0.8 / math.sqrt(sizes["hidden_size"])  # HF's 0.02 hides errors of attention
        return transformers.AutoConfig.for_model(family, **sizes, initializer_range=spread), None
    path = Path(name)
    source = {"pretrained_model_name_or_path": name}
    if path.suffix == ".gguf":
        source = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    is_hub_id = "/" in name and name[0] not in "./~" and not path.exists()
    if not (path.is_dir() or path.suffix == ".gguf" or is_hub_id):
        raise UsageError(f"no model {name}: hub id, folder, .gguf, {', '.join(PRESETS)} would do")
    try:  # the entries of config.json; no code that the model brings is run
        entries, _ = transformers.PreTrainedConfig.get_config_dict(**source)
        family = entries.get("model_type")
        config = transformers.AutoConfig.for_model(**entries) if family in FAMILIES else None
    except Exception as problem:  # of many kinds
        raise UsageError(f"cannot read {name}: {type(problem).__name__}: {problem}") from None
    if config is None:
        would = f"{', '.join(FAMILIES)} would do (sp_ulysses.py and pp.py also take olmo2)"
        raise UsageError(f"{name} is a model of type {family}; {would}")
    if "quantization_config" in entries or (path / "adapter_config.json").exists():
        raise UsageError(f"{name} is quantized or has an adapter; plain weights would do")
    if entries.get("attention_dropout"):
        print("attention_dropout is set to 0: ranks would not draw what one device draws")
        config.attention_dropout = 0.0
    weights = [*path.glob("*.safetensors*"), *path.glob("*.bin*")]
    return config, (None if path.is_dir() and not weights else source)


def parse(argv):
    """The arguments, checked as far as can be without starting anything."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--mode", choices=[*MODES, "all", *OWN_MODES], default="correctness")
    add("--model", default="tiny", help=f"{', '.join(PRESETS)}, a hub id, directory or .gguf file")
    add("--length", type=int, default=256, help="tokens per sequence (256)")
    add("--batch", type=int, help="sequences (3; pp.py: as many as microbatches)")
    add("--dtype", choices=list(LIMIT), help="float64 (the proof); for benchmark float32")
    add("--attn", choices=["sdpa", "eager", "flash"], default="sdpa", help="HF's functions (sdpa)")
    add("--loss", choices=["chunked", "full"], default="chunked", help="full: all logits at once")
    add("--recompute", choices=["full", "none"], default="full", help="full: keep layers' inputs")
    add("--backend", choices=["auto", "gloo", "nccl", "fake"], default="auto", help="fake: 1 of P")
    add("--bench-iters", type=int, default=5, help="timed steps (5)")
    add("--seed", type=int, default=0, help="of random weights and tokens (0)")
    add("--timeout", type=int, default=600, help="seconds to wait for another rank (600)")
    add("--json", metavar="FILE", help="write the results; results/plot.py draws them")
    for name, keywords in OPTIONS.items():  # of this script alone
        add(name, **keywords)
    args = parser.parse_args(argv)
    for name, value in vars(args).items():
        least = {"seed": 0, "length": 2}.get(name, 1)  # one token has no next one to predict
        if type(value) is int and not least <= value < 1 << 31:
            parser.error(f"--{name.replace('_', '-')} {value}: {least} to 2**31 - 1 would do")
    if args.backend == "fake" and args.mode != "benchmark":
        parser.error("--backend fake computes no real values: --mode benchmark only")
    if args.attn == "flash" and args.dtype != "bfloat16":
        parser.error("--attn flash needs --dtype bfloat16")
    return args


def start(args):
    """Choose the device, read the model's config, join the other ranks; returns their group."""
    torchrun = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    given = [name for name in torchrun if name in os.environ]
    if len(given) not in (0, 4) and args.backend != "fake":  # with fake some are set by hand
        raise UsageError(f"of {', '.join(torchrun)} only {', '.join(given)} set; all would do")
    rank, world, local_rank, local_world = (int(os.environ.get(k, n)) for k, n in torchrun.items())
    gpus = torch.cuda.device_count()
    if args.backend == "auto":
        args.backend = "nccl" if gpus >= local_world else "gloo"
    if args.backend == "nccl" and gpus < local_world:
        raise UsageError(f"--backend nccl needs {local_world} GPUs, here are {gpus}; try gloo")
    args.device = torch.device("cpu")
    if gpus and args.backend in ("nccl", "fake"):
        args.device = torch.device("cuda", local_rank)
        torch.cuda.set_device(args.device)
    args.attn_implementation = "flash_attention_2" if args.attn == "flash" else args.attn
    args.config, args.source = find_model(args.model)
    finalize_args(args, world)
    store = None if given and args.backend != "fake" else dist.HashStore()  # None: torchrun's
    if args.backend == "fake":
        print(f"rank {rank} of {world} with silent peers: times exclude communication")
    elif not given:
        print(f"1 process; for more ranks: torchrun --nproc_per_node=2 {' '.join(sys.argv)}")
    backend = "cpu:gloo,cuda:nccl" if args.backend == "nccl" else args.backend
    timeout = datetime.timedelta(seconds=args.timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
    return dist.group.WORLD


def run(args, group):
    """Run the modes asked for, write --json; returns whether all passed."""
    results = {"script": Path(__file__).name, "strategy": STRATEGY, "device": args.device.type}
    results |= {"world_size": group.size(), "versions": {"python": sys.version.split()[0]}}
    results["versions"] |= {module.__name__: module.__version__ for module in (torch, transformers)}
    results |= {k: v for k, v in vars(args).items() if isinstance(v, str | int | None)}
    dtype = args.dtype
    modes = list(MODES) if args.mode == "all" else [args.mode]
    for mode in modes:
        args.dtype = dtype or ("float64" if mode in ("correctness", "learning") else "float32")
        job = f"{group.size()} rank{'s' * (group.size() > 1)} ({args.backend}, {args.device.type})"
        size = f"{args.model}, {args.dtype}, {args.batch} x {args.length} tokens"
        print(f"\n{mode}: {STRATEGY}, {job}, {size}")
        with upcasts_in_float64(args):
            summary, result = (MODES | OWN_MODES)[mode](args, group)
        results[mode] = {"dtype": args.dtype} | result
        print(f"\n{'PASS' if result['passed'] else 'FAIL'} {mode}: {summary}", flush=True)
    results["dtype"] = results[modes[0]]["dtype"]
    if args.json and IS_RANK0:
        Path(args.json).write_text(json.dumps(results, indent=1) + "\n")
    gather_objects(None, group)  # rank 0 has written; torchrun ends all when one fails
    return all(results[mode]["passed"] for mode in modes)


def main(argv=None):
    """Returns the exit status: 0 all passed, 1 a check failed, 2 unusable arguments or model."""
    transformers.logging.set_verbosity_error()
    if not IS_RANK0:
        sys.stdout = io.StringIO()  # rank 0 alone prints
        transformers.logging.disable_progress_bar()
    try:
        if sys.platform == "win32":
            raise UsageError("needs Linux or macOS; on Windows use WSL")
        faulthandler.register(signal.SIGTERM, sys.__stderr__, chain=True)  # shows where a rank hung
        args = parse(argv)
        return 0 if run(args, start(args)) else 1
    except (UsageError, OSError, ImportError) as problem:  # OSError: a full disk, a missing file
        if not IS_RANK0:
            faulthandler.unregister(signal.SIGTERM)  # it does not hang
            time.sleep(30)  # torchrun ends all ranks as soon as one exits: let rank 0 print first
        print(f"error: {' '.join(str(problem).split())}", file=sys.stderr)
        return 2
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
            gc.collect()  # garbage holds the group, whose threads must end before Python does


if __name__ == "__main__":
    sys.exit(record(main)())
