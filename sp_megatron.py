"""Megatron sequence parallelism for LLaMA in one file (arXiv 2205.05198) on Hugging Face's model.

Tensor parallelism replicates the activations between the blocks (a block: attention or MLP) on each
of P ranks. Here a rank holds s/P of the s tokens. It has all tokens only inside a block: all their
features at the entry, 1/P of them between the matrices. Below is an MLP, P = 2, b sequences; h is
hidden_size, i is intermediate_size, weights are (out, in), g and g-bar are the paper's names:

    rank 0: tokens 0..s/2       rank 1: tokens s/2..s        residual, norm: (b, s/2, h)
        |        g   forward: all-gather        |            backward: reduce-scatter dx
        v                                       v
      x (b, s, h)                             x (b, s, h)
    gate, up (i/2, h)           gate, up (i/2, h)            column parallel: half of the features
        |                                       |
    silu(gate x) * (up x)       silu(gate x) * (up x)        (b, s, i/2): each feature by itself
    down (h, i/2)               down (h, i/2)                row parallel: partial sums (b, s, h)
        |      g-bar  forward: reduce-scatter   |            backward: all-gather dy
        v                                       v
    rank 0: tokens 0..s/2       rank 1: tokens s/2..s        (b, s/2, h)

An all-reduce is a reduce-scatter and then an all-gather. Where a block ends, tp.py all-reduces.
Here a block's end reduce-scatters, and the next block's entry gathers (in the backward the
other way round). Both together send as much; what lies between (residuals, norms) is 1/P as
large. Each rank applies a norm's weight to s/P tokens, so sum_gradients() sums its gradient.

    messages of a layer   forward                 backward          recomputed (--recompute full)
    entering a block      g: all-gather           reduce-scatter    all-gather
    leaving a block       g-bar: reduce-scatter   all-gather        reduce-scatter, attention only

Each message moves one (b, s, h). The embedding has a g-bar, and the head has a g (with --loss
chunked it has one per chunk; together they move one (b, s, h), and one more in the backward).
A layer's recomputation ends before the MLP's g-bar, since no gradient needs what leaves the
MLP. So it sends all-gather, reduce-scatter, all-gather; tp.py sends one all-reduce.

--recompute full, the default, keeps only each layer's input, (b, s/P, h). --recompute none keeps
everything, also each block's gathered input (b, s, h). Of that Megatron-LM keeps only a rank's own
tokens, and gathers again in the backward; so does labs/lab2_megatron_layers/lesson.py.

    torchrun --nproc_per_node=2 sp_megatron.py --mode correctness
    torchrun --nproc_per_node=4 sp_megatron.py --mode all --length 1001     # 1001 gets padding
    torchrun --nproc_per_node=2 sp_megatron.py --length 20480 --batch 1 --mode benchmark
    torchrun --nproc_per_node=2 labs/break_it.py sp_megatron.py unsummed_norm_gradient   # must FAIL
    diff -I '# Copied' tp.py sp_megatron.py     # what sequence parallelism changes
    notebooks/explorer.html#walk&sp_megatron    # a step of this file line by line, on every rank
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
import re
import signal
import statistics
import sys
import time
import traceback
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
from torch.distributed.elastic.multiprocessing.errors import record
from torch.testing._internal.distributed import fake_pg  # noqa: F401  registers --backend fake
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

STRATEGY = "sp_megatron"
IGNORE = -100  # the label of a token that is no target: PyTorch's and Hugging Face's convention
LOSS_CHUNK = 2048  # --loss chunked: at most LOSS_CHUNK * vocabulary logits on a rank at once

# Copied from tp.py
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "smollm3")  # model_type
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
    """Arguments or a model that cannot work; the message says what to use instead."""


# ---- 2. Communication: g and g-bar, each the other's backward ------------------------------------


# Copied from tp.py
def all_reduce(x, group, op=dist.ReduceOp.SUM):
    """The sum (or max) of x over ranks; not in place, since a forward must not change its input."""
    if group.size() == 1:
        return x
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, op, group=group)
    return x


# The collectives' names since torch 2.13, or those before
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather(x, group):
    """Every rank's tokens (b, s/P, h) -> all tokens (b, s, h)."""
    if group.size() == 1:
        return x
    x = x.transpose(0, 1).contiguous()  # collectives join along dim 0: hence Megatron's (s, b, h)
    out = x.new_empty(x.shape[0] * group.size(), *x.shape[1:])
    all_gather_single(out, x, group=group)
    return out.transpose(0, 1).contiguous()


def reduce_scatter(x, group):
    """The sum of all ranks' (b, s, h), of which each rank receives its own tokens (b, s/P, h)."""
    if group.size() == 1:
        return x
    x = x.transpose(0, 1).contiguous()
    out = x.new_empty(x.shape[0] // group.size(), *x.shape[1:])
    reduce_scatter_single(out, x, group=group)
    return out.transpose(0, 1).contiguous()


class GatherFromSPRegion(torch.autograd.Function):
    """The paper's g. Every rank uses every token, so a token's gradient is a sum over ranks."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return all_gather(x, group)

    @staticmethod
    def backward(ctx, grad):
        return reduce_scatter(grad, ctx.group), None


class ReduceScatterToSPRegion(torch.autograd.Function):
    """The paper's g-bar. y is the sum of the ranks' partial results, so the gradient of each is all
    of dy. A rank has dy of its own tokens, and gathers the rest."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return reduce_scatter(x, group)

    @staticmethod
    def backward(ctx, grad):
        return all_gather(grad, ctx.group), None


gather_from_sp_region = GatherFromSPRegion.apply  # (x (b, s/P, h), group) -> (b, s, h)
reduce_scatter_to_sp_region = ReduceScatterToSPRegion.apply  # (x (b, s, h), group) -> (b, s/P, h)


# ---- 3. Sharding LLaMA and its relatives, and what the backward keeps ----------------------------


# Copied from tp.py
def split(n, rank, world):
    """[start, end) of the rank's share of n things: the first n % world ranks hold one more."""
    base, extra = divmod(n, world)
    return rank * base + min(rank, extra), (rank + 1) * base + min(rank + 1, extra)


# Copied from tp.py
def make_shard(full, dim, start, end):
    """A Parameter with rows (dim 0) or columns (dim 1) [start, end) of full: a copy, not a view."""
    part = nn.Parameter(full.narrow(dim, start, end - start).clone())
    part.shard = dim, start, end  # a note for the proof: which part of the full tensor this is
    return part


# Copied from tp.py
class ColumnParallelLinear(nn.Module):
    """Output features [start, end) of an nn.Linear, whose weight is (out, in)."""

    def __init__(self, linear, start, end):
        super().__init__()
        self.weight = make_shard(linear.weight, 0, start, end)
        self.bias = None
        if linear.bias is not None:
            self.bias = make_shard(linear.bias, 0, start, end)

    def forward(self, x):  # (b, s, in) -> (b, s, out/P)
        return F.linear(x, self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """Input features [start, end) of an nn.Linear; the ranks' partial sums are added up."""

    def __init__(self, linear, start, end, group):
        super().__init__()
        self.group = group
        self.weight = make_shard(linear.weight, 1, start, end)
        self.bias = None
        if linear.bias is not None and group.rank() == 0:  # on one rank, so that it is added once
            self.bias = make_shard(linear.bias, 0, start=0, end=len(linear.bias))

    def forward(self, x):  # (b, s, in/P) -> (b, s/P, out)
        return reduce_scatter_to_sp_region(F.linear(x, self.weight, self.bias), self.group)


class VocabParallelEmbedding(nn.Module):
    """Rows [start, end) of an nn.Embedding; tokens of other ranks' rows are masked to zero."""

    def __init__(self, embedding, start, end, group):
        super().__init__()
        self.group, self.start, self.end = group, start, end
        self.weight = make_shard(embedding.weight, 0, start, end)
        self.padding_idx = None
        if embedding.padding_idx is not None and start <= embedding.padding_idx < end:
            self.padding_idx = embedding.padding_idx - start  # its row gets no gradient, as in HF

    def forward(self, ids):  # (b, s) -> (b, s/P, h)
        not_mine = (ids < self.start) | (ids >= self.end)
        rows = (ids - self.start).masked_fill(not_mine, 0)
        out = F.embedding(rows, self.weight, self.padding_idx)
        return reduce_scatter_to_sp_region(out.masked_fill(not_mine[..., None], 0), self.group)


def shard_model(model, group):
    """Turn HF's model into this rank's share of it, in place; parameters keep HF's names."""
    config, rank, world = model.config, group.rank(), group.size()
    (q0, q1), (k0, k1) = head_range(config, rank, world)
    i0, i1 = split(config.intermediate_size, rank, world)
    v0, v1 = split(config.vocab_size, rank, world)

    # A hook on the norm, because all column parallel linears of a block read the norm's output.
    # So it is gathered once; their dx are added up first, and the sum is reduce-scattered once
    def g(norm, inputs, out):
        return gather_from_sp_region(out, group)

    for layer in model.model.layers:
        attention = layer.self_attn
        d = attention.head_dim
        layer.input_layernorm.register_forward_hook(g)
        attention.q_proj = ColumnParallelLinear(attention.q_proj, q0 * d, q1 * d)
        attention.k_proj = ColumnParallelLinear(attention.k_proj, k0 * d, k1 * d)
        attention.v_proj = ColumnParallelLinear(attention.v_proj, k0 * d, k1 * d)
        attention.o_proj = RowParallelLinear(attention.o_proj, q0 * d, q1 * d, group)
        attention.num_key_value_groups = (q1 - q0) // (k1 - k0)  # for HF's repeat_kv

        mlp = layer.mlp
        layer.post_attention_layernorm.register_forward_hook(g)
        mlp.gate_proj = ColumnParallelLinear(mlp.gate_proj, i0, i1)
        mlp.up_proj = ColumnParallelLinear(mlp.up_proj, i0, i1)
        mlp.down_proj = RowParallelLinear(mlp.down_proj, i0, i1, group)

    tied = model.lm_head.weight is model.model.embed_tokens.weight
    model.model.embed_tokens = VocabParallelEmbedding(model.model.embed_tokens, v0, v1, group)
    model.lm_head = ColumnParallelLinear(
        model.lm_head, v0, v1
    )  # its g is in sum_of_losses(), for each chunk
    if tied:
        model.lm_head.weight = model.model.embed_tokens.weight


# Copied from tp.py
def head_range(config, rank, world):
    """[q0, q1), [k0, k1): a rank's query heads and KV heads. A KV head and the query heads that
    read it stay on one rank."""
    kv_heads = config.num_key_value_heads
    per_kv = config.num_attention_heads // kv_heads  # query heads that read a KV head
    if world > kv_heads:
        return shared_head_range(kv_heads, per_kv, rank, world)
    k0, k1 = split(kv_heads, rank, world)
    return (k0 * per_kv, k1 * per_kv), (k0, k1)


# Copied from tp.py
def shared_head_range(kv_heads, per_kv, rank, world):
    """The same with more ranks than KV heads. Several ranks then have the same KV head, and
    divide the query heads that read it."""
    sharing = world // kv_heads  # ranks per KV head; check_heads() allows no remainder
    k = rank // sharing
    q0, q1 = split(per_kv, rank % sharing, sharing)
    return (k * per_kv + q0, k * per_kv + q1), (k, k + 1)


def note_gradients(model, group, args):
    """Note on each parameter how many ranks hold it (replicas) and, where each of them computes
    only a part of its gradient, the group that has to add the parts up (sum_over)."""
    world = group.size()
    all_ranks = group if world > 1 else None
    sharing = max(1, world // model.config.num_key_value_heads)
    kv_group = None
    if sharing > 1:
        timeout = datetime.timedelta(seconds=args.timeout)
        kv_group, _ = dist.new_subgroups(sharing, group=group, timeout=timeout)
    for name, parameter in model.named_parameters():
        parameter.replicas, parameter.sum_over = 1, None  # a shard, and all of its gradient
        if "norm" in name:  # a rank's own tokens give a part (in q_norm and k_norm: its heads)
            parameter.replicas, parameter.sum_over = world, all_ranks
        elif "k_proj" in name or "v_proj" in name:  # a rank's own query heads give a part
            parameter.replicas, parameter.sum_over = sharing, kv_group


def see_all_tokens(model, group, args):
    """Have HF's model make its mask for all tokens. HF looks a mask function up by the attention's
    name, and calls it with the length of its input, s/P. So HF's attention, unchanged, gets a
    second name, to which a mask function for all tokens belongs. Flash attention needs no mask."""
    if args.attn == "flash":
        return
    eager = sys.modules[type(model).__module__].eager_attention_forward
    stock = ALL_ATTENTION_FUNCTIONS.get_interface(args.attn_implementation, eager)
    stock_mask = ALL_MASK_ATTENTION_FUNCTIONS[args.attn_implementation]
    mask = partial(all_tokens_mask, stock_mask, group.size())
    transformers.AttentionInterface.register("all_tokens", stock)
    transformers.AttentionMaskInterface.register("all_tokens", mask)
    model.set_attn_implementation("all_tokens")


def all_tokens_mask(stock, world, q_length, kv_length, **others):
    """HF's mask function `stock` for all tokens. HF takes s/P from the embedding's output."""
    return stock(q_length=q_length * world, kv_length=kv_length * world, **others)


# Copied from tp.py
def recompute_layers(model):
    """Keep each layer's input only. The layer's backward first runs its forward again, collectives
    included, up to the last tensor that the backward needs (arXiv 1604.06174)."""
    for layer in model.model.layers:  # two attributes of HF's layers
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)


def parallelize(model, group, args):
    """HF's model, in place, as this rank runs it."""
    shard_model(model, group)
    see_all_tokens(model, group, args)
    note_gradients(model, group, args)
    if args.recompute == "full":
        recompute_layers(model)
    return model


# ---- 4. Loss and step ----------------------------------------------------------------------------


# Copied from tp.py
class VocabParallelCrossEntropy(torch.autograd.Function):
    """-log softmax(logits)[target] with the vocabulary cut over the ranks (Megatron-LM).

    logits (n, v/P): columns [start, start + v/P); target (n): ids of the whole vocabulary. Returns
    the loss of each token, (n). The ranks reduce three numbers per token and do not gather v.
    """

    @staticmethod
    def forward(ctx, logits, target, start, group):
        wide = torch.promote_types(logits.dtype, torch.float32)
        peak = all_reduce(logits.max(-1, keepdim=True).values.to(wide), group, dist.ReduceOp.MAX)
        shifted = logits - peak  # at most 0, so exp() stays finite
        not_mine = (target < start) | (target >= start + logits.shape[-1])
        local_target = (target - start).masked_fill(not_mine, 0)[:, None]
        target_logit = shifted.gather(-1, local_target)[:, 0].masked_fill(not_mine, 0)
        both = torch.stack([target_logit, shifted.exp_().sum(-1)])
        target_logit, sum_exp = all_reduce(both, group)
        # Save peak and sum_exp apart, since rounding a single number, peak + log(sum_exp), can
        # change it by more than a target's whole gradient, softmax - 1
        ctx.save_for_backward(logits, local_target, not_mine, peak, sum_exp)
        return sum_exp.log() - target_logit

    @staticmethod
    def backward(ctx, grad):  # d loss / d logits = softmax - one_hot(target): no communication
        logits, local_target, not_mine, peak, sum_exp = ctx.saved_tensors
        softmax = (logits - peak).exp_().div_(sum_exp[:, None])
        is_mine = (~not_mine[:, None]).to(softmax.dtype)  # (n, 1): 1 or 0
        softmax.scatter_add_(-1, local_target, -is_mine)
        return softmax.mul_(grad[:, None]).to(logits.dtype), None, None, None


def sum_of_losses(model, hidden, targets, group):
    """Sum of the losses of one chunk, c tokens of each sequence on each rank: hidden (b, c, h) of
    this rank, targets (b, P, c) of all ranks. A token whose target is IGNORE adds none."""
    hidden = gather_from_sp_region(hidden, group)  # (b, P c, h)
    logits = model.lm_head(hidden).flatten(0, 1)  # (b P c, v/P)
    start, _ = split(model.config.vocab_size, group.rank(), group.size())
    loss = VocabParallelCrossEntropy.apply(logits, targets.flatten(), start, group)
    return loss.masked_fill(targets.flatten() == IGNORE, 0).sum()


def tokens_per_chunk(length, args):
    """Tokens of each sequence that a chunk takes from each rank. The head gathers P times as
    many, each with v/P logits, which makes LOSS_CHUNK * v logits on a rank."""
    return length if args.loss == "full" else max(1, LOSS_CHUNK // args.batch)


def mean_loss(model, hidden, labels, group, args):
    """Mean loss over all targets, the same on every rank, from each rank's hidden (b, s/P, h).

    Example: there are tokens 0 to 4, and 5 is padding. Rank 0 has [0 1 2], rank 1 has [3 4 5].
    Their targets are [1 2 3] and [4 IGNORE IGNORE]. With chunks of c = 2 the head gathers the
    hidden states of tokens 0 1 3 4, and then those of 2 and 5.
    """
    world, local = group.size(), hidden.shape[1]
    chunk = tokens_per_chunk(local, args)
    # A token's target is the next token. Shift before the split, since a rank's last token predicts
    # the next rank's first
    padding = world * local - labels.shape[1]
    targets = F.pad(labels[:, 1:], (0, 1 + padding), value=IGNORE)
    targets = targets.unflatten(1, (world, local))  # (b, P, s/P)
    total = 0
    for h, t in zip(hidden.split(chunk, 1), targets.split(chunk, -1)):
        if args.loss == "full":
            total += sum_of_losses(model, h, t, group)
        else:  # logits of one chunk at a time, recomputed in the backward
            total += checkpoint(sum_of_losses, model, h, t, group, use_reentrant=False)
    return total / (targets != IGNORE).sum()


def final_hidden_states(model, ids, group):
    """Output of the final norm for this rank's tokens, (b, s/P, h). ids (b, s): all tokens."""
    last = ids.shape[1] - 1
    ids = F.pad(ids, (0, -ids.shape[1] % group.size()))  # last, so none before attends to it
    positions = torch.arange(ids.shape[1], device=ids.device)[None]  # HF would number s/P tokens

    # The mask needs 0, 1, 2, ..., since HF takes a repeated position for the start of a document.
    # But some rotary embeddings (longrope) choose frequencies by the largest position that
    # they get. So the rotary embedding gets the last token's position for padding, too
    def clamp_padding(rotary, inputs, kwargs):
        return (inputs[0], positions.clamp(max=last)), {}  # hidden states, positions

    with model.model.rotary_emb.register_forward_pre_hook(clamp_padding, with_kwargs=True):
        outputs = model.model(input_ids=ids, position_ids=positions, use_cache=False)
    return outputs.last_hidden_state


# Copied from tp.py
def forward_backward(model, ids, labels, group, args, backward=True):
    """Mean loss of ids (b, s) and unshifted labels (b, s); it is the same on every rank.
    Before it each .grad has to be None, since sum_gradients() would sum an older one again.
    After it each .grad is complete."""
    # The hidden states get no name, because a name would keep them in memory in the backward
    loss = mean_loss(model, final_hidden_states(model, ids, group), labels, group, args)
    if backward:
        loss.backward()
        sum_gradients(model)
    return loss.detach()


# Copied from tp.py
def sum_gradients(model):
    """Sum each gradient of which a rank has only a part, over the group that was noted for it."""
    for parameter in model.parameters():
        if parameter.sum_over is not None:
            dist.all_reduce(parameter.grad, group=parameter.sum_over)


# Copied from tp.py
def local_tensor(tensor, parameter):
    """This rank's shard of a parameter or its gradient. A DTensor (of tp.py --dtensor or
    sp_ulysses.py --shard-weights) is first redistributed as the parameter is placed. Any other
    tensor is returned as it is."""
    if hasattr(tensor, "to_local"):
        tensor = tensor.redistribute(placements=parameter.placements).to_local()
    return tensor


# Copied from tp.py
def grad_norm(model, group):
    """Norm of the whole model's gradient. What several ranks hold counts once, not once a rank."""
    squares = []
    for p in model.parameters():
        squares.append(local_tensor(p.grad, p).double().square().sum() / p.replicas)
    total = torch.stack(squares).sum()
    dist.all_reduce(total, group=group)
    return total.sqrt()


# Copied from tp.py
def train_step(model, optimizer, ids, labels, group, args, max_norm=1.0):
    """A step of training; returns the loss. If the gradient's norm is larger than max_norm,
    the gradient is scaled down to that, as PyTorch's clip_grad_norm_ does. But the norm is
    that over all ranks, which is the same on each, so that replicas stay equal."""
    loss = forward_backward(model, ids, labels, group, args)
    scale = (max_norm / (grad_norm(model, group) + 1e-6)).clamp(max=1.0).item()
    for parameter in model.parameters():
        parameter.grad.mul_(scale)
    optimizer.step()
    optimizer.zero_grad()
    return loss


# The lesson ends here.


# ---- What sections 5 and 6 need from this script: logits, messages, options ----------------------


def local_logits(model, ids, group, args):
    """This rank's columns of the logits, (b, s, v/P), and which part of all logits they are."""
    hidden = gather_from_sp_region(final_hidden_states(model, ids, group), group)
    logits = model.lm_head(hidden)[:, : ids.shape[1]]  # no padding
    logits.shard = 2, *split(model.config.vocab_size, group.rank(), group.size())
    logits.replicas = 1
    return logits


def expected_traffic(model, group, args):
    """What one forward_backward() must send: rows (phase, op, calls, their message bytes)."""
    if group.size() == 1:
        return []
    layers = model.config.num_hidden_layers
    element = getattr(torch, args.dtype).itemsize
    local = math.ceil(args.length / group.size())  # tokens of a sequence on a rank
    tokens = args.batch * group.size() * local
    hidden_bytes = tokens * model.config.hidden_size * element  # of (b, s, h)
    number_bytes = tokens * max(4, element)  # of (b, s), in float32 or wider
    chunks = math.ceil(local / tokens_per_chunk(local, args))
    blocks = 2 * layers  # an attention or an MLP: g where it begins, g-bar where it ends
    rows = [  # the head's are in chunks; 1: the embedding
        ("forward", "all_gather", blocks + chunks, (blocks + 1) * hidden_bytes),
        ("forward", "reduce_scatter", blocks + 1, (blocks + 1) * hidden_bytes),
        ("forward", "all_reduce", 2 * chunks, 3 * number_bytes),  # max; target logit and sum-exp
        ("backward", "reduce_scatter", blocks + chunks, (blocks + 1) * hidden_bytes),
        ("backward", "all_gather", blocks + 1, (blocks + 1) * hidden_bytes),
    ]
    if args.loss == "chunked":  # every chunk's forward again
        rows += [("backward", "all_gather", chunks, hidden_bytes)]
        rows += [("backward", "all_reduce", 2 * chunks, 3 * number_bytes)]
    if args.recompute == "full":  # every layer's forward again, up to the MLP's g-bar (see the top)
        rows += [("backward", "all_gather", blocks, blocks * hidden_bytes)]
        rows += [("backward", "reduce_scatter", layers, layers * hidden_bytes)]
    summed = ["norm"]  # a rank's tokens give a part (Qwen3's q_norm and k_norm: its heads)
    if group.size() > model.config.num_key_value_heads:
        summed += ["k_proj", "v_proj"]  # of a KV head that several ranks share
    for name, parameter in model.named_parameters():
        if any(word in name for word in summed):
            rows += [("backward", "all_reduce", 1, parameter.nbytes)]
    return rows


OPTIONS = {}
OWN_MODES = {}  # of this script alone: {name: function(args, group) -> (summary, result)}


# Copied from tp.py
def check_heads(config, world):
    """UsageError where a model's heads cannot be dealt out to so many ranks."""
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    possible = [w for w in range(1, heads + 1) if w <= kv_heads or w % kv_heads == 0]
    if world not in possible:
        problem = f"{heads} heads with {kv_heads} KV heads cannot be split over {world} ranks"
        raise UsageError(f"{problem}; use one of {', '.join(map(str, possible))} ranks")


def finalize_args(args, world):
    """The script's own defaults; UsageError where world ranks cannot do it."""
    args.batch = args.batch or 3
    check_heads(args.config, world)
    if world > args.config.vocab_size:
        raise UsageError(f"more ranks than vocabulary; use at most {args.config.vocab_size}")


# Copied from tp.py
# ---- 5. Proof: from here on the same in tp.py, sp_megatron.py, sp_ulysses.py and pp.py -----------

# Allowed relative errors. float64 is the proof. In the others rounding hides small mistakes, and a
# small tensor can be all wrong and pass, since compare() relates its error to all of its kind
LIMIT = {"float64": 1e-10, "float32": 1e-3, "bfloat16": 2e-1}
# A process that torchrun did not start is the only one, so it prints, too
IS_RANK0 = os.environ.get("RANK", "0") == "0" or "LOCAL_RANK" not in os.environ


def print_table(rows):
    """Print rows, dicts with the same keys, in columns."""
    table = [list(row) for row in rows[:1]]
    for row in rows:
        table.append([f"{x:.3g}" if isinstance(x, float) else str(x) for x in row.values()])
    widths = [max(map(len, column)) for column in zip(*table)]
    print()
    for cells in table:
        print(" ", *(cell.ljust(width + 2) for cell, width in zip(cells, widths)))


def gather_objects(value, group):
    """Every rank's value, in a list; of a fake group only its own. It is a barrier, too."""
    if dist.get_backend(group) == "fake":
        return [value]
    values = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


def upcasts_in_float64(args):
    """A context for the proof. HF computes norms and softmax in torch.float32; with --dtype
    float64 its code finds float64 under that name. Nothing else in HF's model changes."""
    family = args.config.model_type
    modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    wide = torch.promote_types(getattr(torch, args.dtype), torch.float32)
    return mock.patch.object(modeling, "torch", SimpleNamespace(**vars(torch) | {"float32": wide}))


@contextlib.contextmanager
def as_usage_error(what):
    """A context, or decorator, that turns any exception (of broken files) into a UsageError. To
    Python's own messages, which say little (KeyError: 'factor'), it adds the line of code."""
    try:
        yield
    except (UsageError, torch.OutOfMemoryError):  # oom_search.py looks for the latter
        raise
    except Exception as problem:
        said = f"{what}: {type(problem).__name__}: {problem}"
        if isinstance(problem, LookupError | TypeError | AttributeError | ArithmeticError):
            said += f", in: {traceback.extract_tb(problem.__traceback__)[-1].line}"
        raise UsageError(said) from None


@as_usage_error("cannot load the model")
def load_model(args):
    """HF's model for causal language modeling on this rank's device: the same at every call."""
    torch.manual_seed(args.seed)
    auto, config = transformers.AutoModelForCausalLM, copy.deepcopy(args.config)
    how = {"dtype": getattr(torch, args.dtype), "attn_implementation": args.attn_implementation}
    if args.source is None:
        with args.device:
            return auto.from_config(config, **how).train()
    how |= {"use_safetensors": True, "ignore_mismatched_sizes": True}  # reported below
    how |= {"output_loading_info": True, "trust_remote_code": False}
    model, loading = auto.from_pretrained(config=config, **args.source, **how)
    for kind, names in loading.items():  # missing, unexpected or mismatched keys
        if names:
            first = f"{len(names)} {kind}, {min(map(str, names))}"
            raise UsageError(f"weights of {args.model} do not fit its config: {first}")
    return model.to(args.device).train()


def proof_batch(args, group, step=1):
    """ids and labels (b, s) of a step, such that an error is unlikely to cancel or hide.

    Step 2 has other tokens and another length, so that stale state from step 1 shows. Targets are
    spread unevenly over sequences and tokens. Inputs include the padding token, and the first
    and last row of each rank's share of the vocabulary; so do the targets of a long sequence.
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


def reference_step(model, ids, labels):
    """Logits, loss and norm of the gradient, by HF's untouched model on one device, with PyTorch's
    own loss in float64."""
    logits = model(input_ids=ids, use_cache=False).logits
    targets = labels[:, 1:].flatten()
    loss = F.cross_entropy(logits[:, :-1].double().flatten(0, 1), targets, ignore_index=IGNORE)
    loss.backward()
    # The norm of all tensors' norms, in float64
    norm = nn.utils.get_total_norm(p.grad.double().norm() for p in model.parameters())
    return logits.detach(), loss.detach(), norm


def own_part(noted, tensor, full, group):
    """What compare() has to know of this rank's part of a tensor: where in the full tensor it lies,
    how many ranks have the same part, and its squared error. A tensor without notes is whole, and
    on every rank."""
    dim, start, end = getattr(noted, "shard", (0, 0, len(full)))
    replicas = getattr(noted, "replicas", group.size())
    right = full.narrow(dim, start, end - start)
    error = tensor - right if tensor.shape == right.shape else torch.tensor(math.inf)
    error = error.double().square().sum().item()
    return SimpleNamespace(dim=dim, start=start, end=end, replicas=replicas, error=error)


def compare(step, kind, found, expected, args, group):
    """Rows of --json. found {name: tensor} is this rank's, expected is one device's; of kind grad
    they have parameters, whose .grad are compared. A row has a tensor's error over all ranks, and
    its coverage: how often an element exists over all ranks, replicas counted once. It is that of
    the element farthest from 1: below 1 the element is lost, above 1 shards overlap."""

    def value(noted):
        tensor = noted.grad if kind == "grad" else noted
        return torch.atleast_1d(local_tensor(tensor.detach(), noted))

    expected = {name: value(tensor) for name, tensor in expected.items()}
    own = {}  # without what only other ranks have: a layer, a bias, logits
    for name, noted in found.items():
        if noted is not None:
            own[name] = own_part(noted, value(noted), expected[name], group)
    of_ranks = gather_objects(own, group)
    squares = {name: full.double().square().sum().item() for name, full in expected.items()}
    # Errors are divided by the tensor's norm, but by at least 1e-3 (float64) or 1 (else) times
    # the norm of all of its kind, since some are zero but for rounding. All is squared here
    least = sum(squares.values()) * (1e-6 if args.dtype == "float64" else 1)
    rows = []
    for name, full in expected.items():
        errors = torch.zeros(len(of_ranks), dtype=torch.float64)
        exists = torch.zeros(full.shape, dtype=torch.float64, device=full.device)
        for rank, parts in enumerate(of_ranks):
            if part := parts.get(name):
                errors[rank] = part.error / part.replicas
                exists.narrow(part.dim, part.start, part.end - part.start).add_(1 / part.replicas)
        coverage = exists.take((exists - 1).abs().argmax()).item()
        error = math.sqrt(errors.sum() / (max(squares[name], least) or 1.0))
        row = {"name": name, "kind": kind, "step": step, "rank": errors.argmax().item()}
        row |= {"coverage": coverage, "relative_error": error, "limit": LIMIT[args.dtype]}
        close = error <= row["limit"]  # False for NaN
        rows.append(row | {"passed": close and abs(coverage - 1) < 1e-9})
    return rows


def check_correctness(args, group):
    """Compare all tensors of three steps on P ranks with those of HF's model on every rank.

    Step 3 has logits of up to thousands, whose exp() overflows. Only float64 has this step,
    since in the other dtypes rounding decides which word wins.
    """
    reference, model = load_model(args), parallelize(load_model(args), group, args)
    expected, found = (dict(m.named_parameters()) for m in (reference, model))
    # In the backward's order, so that the first wrong gradient is the nearest to its cause
    backward_order = dict(reversed(expected.items()))
    rows = compare(1, "weight", found, expected, args, group)  # before any step
    result = {"tolerance": LIMIT[args.dtype]}
    for step in (1, 2, 3) if args.dtype == "float64" else (1, 2):
        if step == 3:
            for m in (reference, model):
                m.model.norm.register_forward_hook(lambda norm, x, out: 512 * out)
        ids, labels = proof_batch(args, group, step)
        right_logits, right_loss, right_norm = reference_step(reference, ids, labels)
        with torch.no_grad():
            logits = local_logits(model, ids, group, args)
        loss = forward_backward(model, ids, labels, group, args)
        norm = grad_norm(model, group)
        rows += compare(step, "logits", {"logits": logits}, {"logits": right_logits}, args, group)
        rows += compare(step, "loss", {"loss": loss}, {"loss": right_loss}, args, group)
        rows += compare(step, "grad", found, backward_order, args, group)
        rows += compare(
            step, "grad_norm", {"grad_norm": norm}, {"grad_norm": right_norm}, args, group
        )
        if step == 1:
            print(f"  loss        one device {right_loss:.8g}, parallel {loss:.8g}")
            print(f"  grad_norm   one device {right_norm:.8g}, parallel {norm:.8g}")
            result |= {"loss_reference": right_loss.item(), "loss": loss.item()}
            result |= {"grad_norm_reference": right_norm.item(), "grad_norm": norm.item()}
        lr = 0.05 * right_loss.item() / (right_norm.item() ** 2 or 1.0)  # about 5% less loss
        for m in (reference, model):  # SGD, because Adam would hide a wrong factor
            torch.optim.SGD(m.parameters(), lr, foreach=False).step()
            m.zero_grad()
    wrong = [row for row in rows if not row["passed"]]
    by_error = sorted(rows, key=lambda row: (row["passed"], -row["relative_error"]))  # wrong first
    print(f"\n  {'Wrong' if wrong else 'The largest errors'}, of {len(rows)} tensors in all steps")
    print("  (coverage: how often each element exists over all ranks, replicas counted once):")
    print_table((wrong or by_error)[:8])
    summary = f"logits, loss and all gradients are within {LIMIT[args.dtype]} of one device's"
    if wrong:
        summary = f"{len(wrong)} of {len(rows)} tensors are wrong, the first: {wrong[0]['name']}"
    return summary, result | {"passed": not wrong, "worst": by_error[0], "tensors": rows}


def check_learning(args, group):
    """Train one device and P ranks on the text of this file: losses have to agree and to fall.
    Every other step's gradient is clipped to half of its norm; the rest are below the limit."""
    reference, model = load_model(args), parallelize(load_model(args), group, args)
    text = torch.tensor(list(Path(__file__).read_bytes())) % args.config.vocab_size
    ids = text[torch.arange(args.batch * args.length) % len(text)]  # the same at each step
    ids = ids.view(args.batch, args.length).to(args.device)
    _, loss, norm = reference_step(reference, ids, ids)
    lr = 0.07 * loss.item() / (norm.item() ** 2 or 1.0)
    one_device = torch.optim.SGD(reference.parameters(), lr, foreach=False)
    p_ranks = torch.optim.SGD(model.parameters(), lr, foreach=False)
    ours, right = torch.zeros(2, 20, dtype=torch.float64)
    for step in range(20):
        one_device.zero_grad()
        _, right[step], norm = reference_step(reference, ids, ids)
        max_norm = norm.item() * (0.5 if step % 2 else 2.0)
        nn.utils.clip_grads_with_norm_(reference.parameters(), max_norm, norm)  # PyTorch's own
        one_device.step()
        ours[step] = train_step(model, p_ranks, ids, ids, group, args, max_norm)
        print(f"  step {step:2}  one device {right[step]:.6f}, parallel {ours[step]:.6f}")
    [row] = compare(20, "loss", {"loss": ours}, {"loss": right}, args, group)
    fall = 1 - ours[-1].item() / ours[0].item()
    result = {"passed": row["passed"] and fall > 0, "loss": ours.tolist()}
    summary = f"losses within {row['relative_error']:.1e} of one device's, and down by {fall:.0%}"
    return summary, result | {"loss_reference": right.tolist()}


class Meter(TorchDispatchMode):
    """Sees every operation. Counts messages and their bytes, and (for CPUs) the most bytes that
    tensors have at once. A message has the full tensor's bytes; an all-to-all has its input's."""

    OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")
    OPS += ("broadcast", "barrier")  # which no script sends

    def __init__(self):
        super().__init__()
        self.messages, self.peak = Counter(), 0
        # PyTorch keeps a storage's Python object as long as the storage itself, so an entry
        # disappears when PyTorch frees the memory
        self.alive = weakref.WeakValueDictionary()
        self.see(gc.get_objects())  # what exists already

    def see(self, values):
        """Returns the tensors among values, and notes their storages. A DTensor has none itself."""
        tensors = [x for x in values if type(x) in (torch.Tensor, nn.Parameter)]
        self.alive |= {x.untyped_storage()._cdata: x.untyped_storage() for x in tensors}
        self.peak = max(self.peak, self.now())
        return tensors

    def now(self):
        """Bytes of all tensors alive."""
        return sum(storage.nbytes() for storage in self.alive.values())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(hasattr(kind, "full_tensor") for kind in types):
            return NotImplemented  # DTensor's own code runs; what it does to tensors comes here
        out = func(*args, **(kwargs or {}))
        tensors = self.see(tree_leaves((args, out)))
        name = func._opname.replace("_", "")  # allreduce_, _allgather_base_, all_reduce
        for op in self.OPS:
            if "c10d" in func.namespace and name.startswith(op.replace("_", "")):
                # all_to_all(out, in); of the others the larger tensor is the full one
                message = tensors[-1:] if op == "all_to_all" else tensors
                self.messages[op, "count"] += 1
                self.messages[op, "bytes"] += max(x.nbytes for x in message)
        return out


def compare_traffic(forward, step, expected):
    """Rows of --json: this rank's messages, beside the rows of expected_traffic(). The
    backward has the messages of a whole step without those of a forward."""
    rows = []
    backward = Counter(step.messages)
    backward.subtract(forward.messages)
    for phase, op in product(("forward", "backward"), Meter.OPS):
        sent = forward.messages if phase == "forward" else backward
        wanted = [entry[2:] for entry in expected if entry[:2] == (phase, op)]
        row = {"phase": phase, "op": op, "count": sent[op, "count"], "bytes": sent[op, "bytes"]}
        row["expected_count"] = sum(count for count, _ in wanted)
        row["expected_bytes"] = sum(size for _, size in wanted)
        same_count = row["count"] == row["expected_count"]
        row["passed"] = same_count and row["bytes"] == row["expected_bytes"]
        if row["count"] or row["expected_count"]:
            rows.append(row)
    return rows


def check_benchmark(args, group):
    """Measures time and peak memory of forward and backward, checks messages to the byte."""
    model = parallelize(load_model(args), group, args)
    batch = proof_batch(args, group)
    device = torch.get_device_module(args.device)
    cuda = args.device.type == "cuda"

    def step(backward=True):
        forward_backward(model, *batch, group, args, backward)
        model.zero_grad()

    with Meter() as forward:  # these two steps warm up, too
        step(backward=False)
    if cuda:
        device.reset_peak_memory_stats()  # loading had the full model
    with Meter() as both:
        step()
    peaks = gather_objects(device.max_memory_allocated() if cuda else both.peak, group)
    traffic = compare_traffic(forward, both, expected_traffic(model, group, args))
    right = gather_objects(all(row["passed"] for row in traffic), group)
    result = {"passed": all(right), "peak_memory_bytes": peaks, "traffic": traffic}
    for name, backward in ("forward_s", False), ("forward_backward_s", True):
        times = []
        for _ in range(args.bench_iters):
            device.synchronize()
            gather_objects(None, group)  # the ranks begin together
            begin = time.perf_counter()
            step(backward)
            device.synchronize()
            times.append(max(gather_objects(time.perf_counter() - begin, group)))  # the slowest
        result[name] = {"median": statistics.median(times), "min": min(times), "max": max(times)}
    label = f"time on {args.device.type}" + " (says nothing about GPUs)" * (not cuda)
    print_table([{label: name} | result[name] for name in ("forward_s", "forward_backward_s")])
    print("\n  peak memory of each rank, bytes:", *peaks)
    print(f"\n  What rank {group.rank()} sends in a step; bytes are message bytes:")
    print_table(traffic)
    result["tokens_per_s"] = args.batch * args.length / result["forward_backward_s"]["median"]
    sent = "as expected_traffic() says" if all(right) else f"wrong on rank {right.index(False)}"
    return f"{result['tokens_per_s']:.0f} tokens per second; messages {sent}", result


# ---- 6. Command line -----------------------------------------------------------------------------

MODES = {"correctness": check_correctness, "learning": check_learning, "benchmark": check_benchmark}
# Names of files without weights; a folder that has no others gets random weights
NO_WEIGHTS = re.compile(
    r".*config\.json|.*token.*|vocab.*|merges.*|.*template.*|.*\.md|LICENSE.*|\..*"
)


@as_usage_error("cannot use the model")
def find_model(name):
    """The config of what --model names, and from_pretrained's keywords (None: random weights)."""
    path, source = Path(name), {"pretrained_model_name_or_path": name}
    has_config = (path / "config.json").exists()
    if name in PRESETS and not has_config:
        family, *sizes = PRESETS[name]
        sizes = dict(zip(SIZES, sizes), max_position_embeddings=1 << 20, pad_token_id=2)
        sizes["sliding_window"] = None  # as Mistral 7B has it since v0.2
        spread = 0.8 / math.sqrt(sizes["hidden_size"])  # HF's 0.02 hides errors of attention
        return transformers.AutoConfig.for_model(family, **sizes, initializer_range=spread), None
    if path.is_file():  # a .gguf
        source = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    elif path.is_dir() and not has_config:
        there = ", ".join(sorted(file.name for file in path.iterdir())[:4])
        deeper = [*path.glob("*/config.json"), *path.glob("*/*/config.json")]
        instead = deeper[0].parent if deeper else "a folder that has it"
        raise UsageError(f"no config.json in {name} ({there}); use {instead}")
    elif not path.is_dir() and (name.count("/") != 1 or path.parent.exists()):  # no hub id
        raise UsageError(f"no folder or file {name}; use one, a hub id or {', '.join(PRESETS)}")
    config = transformers.AutoConfig.from_pretrained(**source, trust_remote_code=False)
    if config.model_type not in FAMILIES:
        raise UsageError(f"{name} is of type {config.model_type}; use one of {', '.join(FAMILIES)}")
    if hasattr(config, "quantization_config") or (path / "adapter_config.json").exists():
        raise UsageError(f"{name} is quantized or has an adapter; use plain weights")
    if config.attention_dropout:
        print("attention_dropout is set to 0, since ranks and one device draw different numbers")
        config.attention_dropout = 0.0
    check_config(config)
    files = [file for file in path.glob("*") if not NO_WEIGHTS.fullmatch(file.name)]
    return config, (None if has_config and not files else source)


def check_config(config):
    """Raises where Hugging Face takes a config, but cannot compute with it. This is tried on two
    tokens, on the device "meta", whose tensors have shapes and no data."""
    numbers = vars(config) | (config.rope_parameters or {})
    for key in (*SIZES[:-1], "sliding_window", "rope_theta", "factor"):  # HF lets some of them pass
        number = numbers.get(key)
        if number is not None and not (isinstance(number, int | float) and number >= 1):
            raise UsageError(f"{key} is {number!r} in config.json; use a number, 1 or more")
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if heads % kv_heads:
        raise UsageError(f"{heads} heads are no multiple of {kv_heads} KV heads in config.json")
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
        if numbers.get("rope_type") != "dynamic":  # which looks at the positions' values
            model(input_ids=torch.zeros(1, 2, dtype=torch.long))


def parse(argv):
    """The arguments, checked as far as can be without starting anything."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--mode", choices=[*MODES, "all", *OWN_MODES], default="correctness")
    add("--model", default="tiny", help=f"{', '.join(PRESETS)}, a hub id, folder or .gguf file")
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
            parser.error(f"--{name.replace('_', '-')} {value}: use {least} to 2**31 - 1")
    if args.backend == "fake" and args.mode != "benchmark":
        parser.error("--backend fake computes no real values; use it with --mode benchmark")
    if args.attn == "flash" and args.dtype != "bfloat16":
        parser.error("--attn flash needs --dtype bfloat16")
    if args.json is not None and IS_RANK0:
        is_new = not Path(args.json).exists()
        with as_usage_error(f"cannot write --json {args.json}; use a file in a writable folder"):
            open(args.json, "a").close()
        if is_new:
            Path(args.json).unlink()
    return args


@as_usage_error("cannot start; use torchrun --nproc_per_node=2")
def start(args):
    """Choose the device, read the model's config, join the other ranks; returns their group."""
    torchrun = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    if args.mode != "schedule":  # a mode of pp.py alone, of one process
        torchrun = {name: os.environ.get(name, number) for name, number in torchrun.items()}
    rank, world, local_rank, local_world = map(int, torchrun.values())
    if not (0 <= rank < world and 0 <= local_rank < local_world):
        raise UsageError(f"{torchrun} do not fit each other; use torchrun --nproc_per_node=2")
    gpus = torch.cuda.device_count()
    if args.backend == "auto":
        args.backend = "nccl" if gpus >= local_world else "gloo"
    if args.backend == "nccl" and gpus < local_world:
        raise UsageError(f"--backend nccl needs {local_world} GPUs, not {gpus}; use gloo")
    args.device = torch.device("cpu")
    if gpus and args.backend in ("nccl", "fake"):
        args.device = torch.device("cuda", local_rank)
        torch.cuda.set_device(args.device)
    args.attn_implementation = "flash_attention_2" if args.attn == "flash" else args.attn
    args.config, args.source = find_model(args.model)
    finalize_args(args, world)
    alone = world == 1 or args.backend == "fake"
    backend = "fake" if alone else "gloo"  # on one CPU no network is needed
    if args.backend == "nccl":
        backend = "cpu:gloo,cuda:nccl"
    store = dist.HashStore() if alone else None  # None: torchrun's
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
    model = f"{args.model} with {'its' if args.source else 'random'} weights"
    for mode in modes:
        args.dtype = dtype or ("float64" if mode in ("correctness", "learning") else "float32")
        job = f"{group.size()} rank{'s' * (group.size() > 1)} ({args.backend}, {args.device.type})"
        size = f"{args.dtype}, {args.batch} x {args.length} tokens"
        if mode == "schedule":  # of pp.py alone
            job = "simulated"
        print(f"\n{mode}: {STRATEGY}, {job}, {model}, {size}")
        with upcasts_in_float64(args):
            summary, result = (MODES | OWN_MODES)[mode](args, group)
        results[mode] = {"dtype": args.dtype} | result
        print(f"\n{'PASS' if result['passed'] else 'FAIL'} {mode}: {summary}", flush=True)
    results["dtype"] = results[modes[0]]["dtype"]
    if args.json and IS_RANK0:
        Path(args.json).write_text(json.dumps(results, indent=1) + "\n")
    gather_objects(None, group)  # until rank 0 has written, since torchrun ends all if one fails
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
    except Exception as problem:
        is_usage = isinstance(problem, UsageError | OSError | ImportError)  # OSError: a full disk
        if not IS_RANK0:  # torchrun ends all ranks when one exits, so rank 0 prints first
            faulthandler.unregister(signal.SIGTERM)  # this rank does not hang
            time.sleep(30 if is_usage else 2)  # 2: rank 0 may be about to say what caused this
        if not is_usage:
            raise
        print(f"error: {' '.join(str(problem).split())}", file=sys.stderr)
        return 2
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
            gc.collect()  # garbage holds the group, whose threads must end before Python does


if __name__ == "__main__":
    sys.exit(record(main)())
