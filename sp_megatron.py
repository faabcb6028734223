"""Megatron sequence parallelism for LLaMA in one file (arXiv 2205.05198) on Hugging Face's model.

Tensor parallelism replicates the activations between the blocks on every rank. Here each rank holds
s/P tokens of them; only inside a block are all tokens there, and then with 1/P of the features.
P = 2, one MLP:

    rank 0: tokens 0..s/2       rank 1: tokens s/2..s        residual, norm: (b, s/2, h)
        |        g   forward: all-gather        |            backward: reduce-scatter dx
        v                                       v
      x (b, s, h)                             x (b, s, h)
    gate, up (i/2, h)           gate, up (i/2, h)            column parallel: half of the features
        |                                       |
    (b, s, i/2)                 (b, s, i/2)
    down (h, i/2)               down (h, i/2)                row parallel: a partial sum of all
        |      g-bar  forward: reduce-scatter   |            backward: all-gather dy
        v                                       v
    rank 0: tokens 0..s/2       rank 1: tokens s/2..s        (b, s/2, h)

An all-reduce is a reduce-scatter and an all-gather: the forward sends what tp.py sends, cut in two,
and what lies between the two halves (residuals, norms) is 1/P as large. A block's gathered input is
not: with --recompute none autograd keeps it for the backward. Megatron-LM keeps the shard and
gathers again, 2 all-gathers more, and so does --recompute selective (labs/lab2_megatron_layers.py
builds it by hand). Recomputing whole layers, the default, keeps only 1/P of each layer's input, and
repeats a reduce-scatter, too; what a block gathers, if long, then exists in tiles only (section 5).

    torchrun --nproc_per_node=2 sp_megatron.py --mode correctness
    torchrun --nproc_per_node=4 sp_megatron.py --mode all --length 1001
    torchrun --nproc_per_node=2 sp_megatron.py --length 20480 --batch 1 --mode benchmark
    torchrun --nproc_per_node=2 labs/break_it.py sp_megatron.py unsummed_norm_gradient
    diff tp.py sp_megatron.py     # what sequence parallelism changes
"""

import argparse
import copy
import datetime
import faulthandler
import gc
import json
import math
import os
import signal
import statistics
import sys
import tempfile
import time
import types
import warnings
import weakref
from collections import Counter, defaultdict
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics
from unittest import mock

import huggingface_hub
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.distributed.elastic.multiprocessing.errors import record
from torch.testing._internal.distributed import fake_pg
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from tqdm import tqdm
from transformers.models.llama import modeling_llama

STRATEGY = "sp_megatron"
IGNORE = -100  # a label that is no target: HF's and PyTorch's convention
LOSS_CHUNK = 2048  # --loss chunked: tokens a rank whose logits exist at the same time


# --------------------------------------------------------------------------------------------------
# 2. Communication: g and g-bar, each the other's conjugate
# --------------------------------------------------------------------------------------------------


# Copied from tp.py
def all_reduce(x, group, op=dist.ReduceOp.SUM):
    """The sum (or max) of x over ranks, in a new tensor: autograd may still need the old one."""
    if group.size() == 1:
        return x
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, op, group=group)
    return x


def all_gather(x, group):
    """Every rank's tokens (b, s/P, h) -> all tokens (b, s, h)."""
    if group.size() == 1:
        return x
    x = x.transpose(0, 1).contiguous()  # ranks are joined along dim 0: why Megatron has (s, b, h)
    out = x.new_empty(x.shape[0] * group.size(), *x.shape[1:])
    dist.all_gather_into_tensor(out, x, group=group)
    return out.transpose(0, 1).contiguous()


def reduce_scatter(x, group):
    """Sum of all ranks' (b, s, h), of which each receives its own tokens (b, s/P, h)."""
    if group.size() == 1:
        return x
    x = x.transpose(0, 1).contiguous()
    out = x.new_empty(x.shape[0] // group.size(), *x.shape[1:])
    dist.reduce_scatter_tensor(out, x, group=group)
    return out.transpose(0, 1).contiguous()


class GatherFromSPRegion(torch.autograd.Function):
    """Megatron's g. Every rank's columns used all tokens, so dx is a sum; each owns s/P of it."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return all_gather(x, group)

    @staticmethod
    def backward(ctx, grad):
        return reduce_scatter(grad, ctx.group), None


class ReduceScatterToSPRegion(torch.autograd.Function):
    """Megatron's g-bar. y sums the ranks' partial results, so each receives dy of all tokens."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return reduce_scatter(x, group)

    @staticmethod
    def backward(ctx, grad):
        return all_gather(grad, ctx.group), None


gather_from_sp_region = GatherFromSPRegion.apply  # (x (b, s/P, h), group) -> (b, s, h)
reduce_scatter_to_sp_region = ReduceScatterToSPRegion.apply  # (x (b, s, h), group) -> (b, s/P, h)


# --------------------------------------------------------------------------------------------------
# 3. Sharding LLaMA
# --------------------------------------------------------------------------------------------------


# Copied from tp.py
def split(n, rank, world):
    """[start, end) of the rank's share of n things: the first n % world ranks hold one more."""
    base, extra = divmod(n, world)
    return rank * base + min(rank, extra), (rank + 1) * base + min(rank + 1, extra)


# Copied from tp.py
def head_range(config, rank, world):
    """Query heads [q0, q1) and KV heads [k0, k1) of a rank; how many ranks hold the same KV heads.

    With world <= kv_heads whole KV groups (a KV head and the query heads that read it) are dealt
    out; with more ranks than KV heads, `replicas` ranks share one and deal out its query heads.
    """
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    queries = heads // kv_heads  # query heads a KV head
    works = [w for w in range(1, heads + 1) if w <= kv_heads or w % kv_heads == 0]
    if world not in works:
        raise Unusable(
            f"{heads} heads with {kv_heads} KV heads cannot be split over {world} ranks; "
            f"these rank counts would do: {', '.join(map(str, works))}"
        )
    if world <= kv_heads:
        k0, k1 = split(kv_heads, rank, world)
        return (k0 * queries, k1 * queries), (k0, k1), 1
    replicas = world // kv_heads
    k = rank // replicas
    q0, q1 = split(queries, rank % replicas, replicas)
    return (k * queries + q0, k * queries + q1), (k, k + 1), replicas


# Copied from tp.py
def keep(parameter, dim, start, end, replicas=1):
    """A Parameter of its own with rows (dim 0) or columns (dim 1) [start, end) of a full one.

    `shard` says which slice of the full tensor it is, `replicas` how many ranks hold that slice.
    """
    kept = nn.Parameter(parameter.narrow(dim, start, end - start).clone())
    kept.shard, kept.replicas = (dim, start, end), replicas
    return kept


# Copied from tp.py
def column_parallel(linear, start, end, replicas=1):
    """Megatron's ColumnParallelLinear: output features [start, end). A weight is (out, in)."""
    linear.weight = keep(linear.weight, 0, start, end, replicas)
    if linear.bias is not None:
        linear.bias = keep(linear.bias, 0, start, end, replicas)


# Copied from tp.py
def row_parallel(linear, start, end, rank):
    """Megatron's RowParallelLinear: input features [start, end); the outputs are partial sums."""
    linear.weight = keep(linear.weight, 1, start, end)
    if linear.bias is not None:  # on one rank only, so that it is added once
        linear.bias = keep(linear.bias, 0, 0, len(linear.bias)) if rank == 0 else None


class VocabParallelEmbedding(nn.Module):
    """Rows [start, end) of an nn.Embedding; another rank's token looks up nothing here."""

    def __init__(self, embedding, start, end, group):
        super().__init__()
        self.weight, self.start, self.end = keep(embedding.weight, 0, start, end), start, end
        self.group, pad = group, embedding.padding_idx  # HF gives this token's row no gradient
        self.padding_idx = pad - start if pad is not None and start <= pad < end else None

    def forward(self, ids):  # (b, s) -> (b, s/P, h)
        elsewhere = (ids < self.start) | (ids >= self.end)
        rows = (ids - self.start).masked_fill(elsewhere, 0)
        out = F.embedding(rows, self.weight, self.padding_idx)
        return reduce_scatter_to_sp_region(out.masked_fill(elsewhere[..., None], 0), self.group)


# Copied from tp.py
def wrap(module, forward):
    """Have a module run forward(inner, x, ...), inner being what it ran so far.

    The module gets a class of its own, as PyTorch's fully_shard does it. An object that holds its
    own method (module.forward = ...) would be a reference cycle: weights that are dropped later
    would stay in memory until Python happens to look for such cycles.
    """
    kind = type(module)

    def wrapped(self, *args, **kwargs):
        return forward(types.MethodType(kind.forward, self), *args, **kwargs)

    module.__class__ = type(kind.__name__, (kind,), {"forward": wrapped})


def parallel_block(block, group):
    """Run an attention or MLP block as leave(block(enter(x)))."""

    def forward(inner, hidden_states, **kwargs):  # (b, s/P, h) -> (b, s/P, h)
        out = inner(gather_from_sp_region(hidden_states, group), **kwargs)
        if isinstance(out, tuple):  # attention returns (output, weights)
            return reduce_scatter_to_sp_region(out[0], group), *out[1:]
        return reduce_scatter_to_sp_region(out, group)

    wrap(block, forward)


# Copied from tp.py
def kv_group(group, replicas, args):
    """The ranks that hold the same KV heads as this one; None where no other does."""
    if replicas == 1:
        return None
    ranks = dist.get_process_group_ranks(group)
    shared = [ranks[i : i + replicas] for i in range(0, len(ranks), replicas)]
    groups = [dist.new_group(same, args.wait) for same in shared]  # every rank has to make all
    return groups[group.rank() // replicas]


def parallelize(model, group, args):
    """Turn HF's LlamaForCausalLM into this rank's share of it, in place."""
    config, rank, world = model.config, group.rank(), group.size()
    (q0, q1), (k0, k1), replicas = head_range(config, rank, world)
    i0, i1 = split(config.intermediate_size, rank, world)
    v0, v1 = split(config.vocab_size, rank, world)
    same_kv, d = kv_group(group, replicas, args), config.head_dim
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        column_parallel(attention.q_proj, q0 * d, q1 * d)
        column_parallel(attention.k_proj, k0 * d, k1 * d, replicas)
        column_parallel(attention.v_proj, k0 * d, k1 * d, replicas)
        row_parallel(attention.o_proj, q0 * d, q1 * d, rank)
        attention.num_key_value_groups = (q1 - q0) // (k1 - k0)
        column_parallel(mlp.gate_proj, i0, i1)
        column_parallel(mlp.up_proj, i0, i1)
        row_parallel(mlp.down_proj, i0, i1, rank)
        if args.recompute in ("block", "offload"):
            attention_in_tiles(attention, group, args)
        else:
            parallel_block(attention, group)
        parallel_block(mlp, group)
        for projection in (attention.k_proj, attention.v_proj):
            for parameter in projection.parameters():
                parameter.sum_over = same_kv
    embedding = VocabParallelEmbedding(model.model.embed_tokens, v0, v1, group)
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    model.lm_head.weight = embedding.weight if tied else keep(model.lm_head.weight, 0, v0, v1)
    model.model.embed_tokens = embedding
    for name, parameter in model.named_parameters():
        if "norm" in name:  # replicated, but each rank sees only its tokens: a part of the gradient
            parameter.replicas, parameter.sum_over = world, group if world > 1 else None


# Copied from sp_megatron.py
def settle(args):
    """Fill in what depends on other options."""
    args.batch = args.batch or 3


def check_shape(args, world):
    """Raise Unusable where this model cannot be cut over world ranks."""
    head_range(args.config, 0, world)


# --------------------------------------------------------------------------------------------------
# 4. Loss and step
# --------------------------------------------------------------------------------------------------


# Copied from tp.py
class VocabParallelCrossEntropy(torch.autograd.Function):
    """-log softmax(logits)[target] with the vocabulary cut over the ranks (Megatron-LM).

    logits (n, v/P): columns [start, start + v/P); target (n): ids of the whole vocabulary. Returns
    the loss of each token, (n). Three numbers a token are reduced instead of gathering v of them.
    """

    @staticmethod
    def forward(ctx, logits, target, start, group):
        largest = logits.max(-1, keepdim=True).values.float()
        peak = all_reduce(largest, group, dist.ReduceOp.MAX)
        shifted = logits - peak  # float32, as peak is; at most 0: exp stays finite
        elsewhere = (target < start) | (target >= start + logits.shape[-1])
        column = (target - start).masked_fill(elsewhere, 0)[:, None]
        target_logit = shifted.gather(-1, column)[:, 0].masked_fill(elsewhere, 0)
        both = torch.stack([target_logit, shifted.exp_().sum(-1)])
        target_logit, sum_exp = all_reduce(both, group)
        # Not peak + log(sum_exp) as one number: rounded at the size of a logit, it would cost two
        # digits of the gradient of a confident prediction, where softmax - 1 is small.
        ctx.save_for_backward(logits, column, elsewhere, peak, sum_exp)
        return sum_exp.log() - target_logit

    @staticmethod
    def backward(ctx, grad):  # d loss / d logits = softmax - one_hot(target): no communication
        logits, column, elsewhere, peak, sum_exp = ctx.saved_tensors
        softmax = (logits - peak).exp_().div_(sum_exp[:, None])
        softmax.scatter_add_(-1, column, -(~elsewhere)[:, None].to(softmax.dtype))
        return softmax.mul_(grad[:, None]).to(logits.dtype), None, None, None


# Copied from tp.py
def vocab_parallel_cross_entropy(logits, target, start, group):
    """Loss of each token, (b, s), from this rank's logits (b, s, v/P); 0 where target is IGNORE."""
    flat = logits.flatten(0, 1), target.flatten()
    loss = VocabParallelCrossEntropy.apply(*flat, start, group)
    return loss.view_as(target).masked_fill(target == IGNORE, 0)


# Copied from sp_megatron.py
def padded(length, world):
    """The length that world divides. Padding comes last: no token before it attends to it."""
    return length + -length % world


def loss_chunk(args):
    """Tokens of each rank's part of a sequence that go through the head at once."""
    return max(1, LOSS_CHUNK // args.batch)


# Copied from tp.py
def shift(labels):
    """The target of each token is the next one; the last has none. (b, s) -> (b, s)"""
    return F.pad(labels[:, 1:], (0, 1), value=IGNORE)


def token_loss(model, hidden, targets, group):
    """Sum of the losses of every rank's tokens hidden (b, c/P, h), each with v/P columns."""
    hidden = gather_from_sp_region(hidden, group)  # (b, c, h): the head is column parallel
    logits = F.linear(hidden, model.lm_head.weight)  # (b, c, v/P)
    start, _ = split(model.config.vocab_size, group.rank(), group.size())
    return vocab_parallel_cross_entropy(logits, targets, start, group).sum()


def split_targets(labels, size, group):
    """Targets of the full sequence, and those of each chunk of `size` tokens a rank: (b, P size).

    Shifted before they are split: a rank's last token predicts the first of the next rank's.
    """
    targets = F.pad(shift(labels), (0, -labels.shape[1] % group.size()), value=IGNORE)
    by_rank = targets.unflatten(1, (group.size(), -1))  # (b, P, s/P): the order after a gather
    return targets, [chunk.flatten(1) for chunk in by_rank.split(size, 2)]


def mean_loss(model, hidden, labels, group, args):
    """Mean loss over all targets, the same on every rank, from each rank's hidden (b, s/P, h)."""
    size = hidden.shape[1] if args.loss == "full" else loss_chunk(args)
    targets, chunks = split_targets(labels, size, group)
    total = 0
    for h, t in zip(hidden.split(size, 1), chunks):
        if args.loss == "full":
            total += token_loss(model, h, t, group)
        else:  # logits of one chunk at a time, recomputed in the backward
            total += checkpoint(token_loss, model, h, t, group, use_reentrant=False)
    return total / (targets != IGNORE).sum()


def hidden_states(model, ids, group, args):
    """What the last norm says of this rank's tokens, (b, s/P, h). ids (b, s): all tokens."""
    ids = F.pad(ids, (0, -ids.shape[1] % group.size()))
    length, mask = ids.shape[1], None  # sdpa and flash need no mask for causal attention
    if args.attention == "eager":  # HF would build one for the s/P tokens that it sees
        lowest = torch.finfo(args.torch_dtype).min
        mask = torch.full((1, 1, length, length), lowest, dtype=args.torch_dtype)
        mask = mask.to(ids.device).triu(1)
    positions = torch.arange(length, device=ids.device)[None]  # attention sees all tokens
    inputs = {"input_ids": ids, "position_ids": positions, "attention_mask": mask}
    return model.model(**inputs, use_cache=False).last_hidden_state


# Copied from tp.py
def sum_shared_gradients(model):
    """Sum the gradients of which each rank saw a part (`sum_over`: the ranks that saw the rest)."""
    for parameter in model.parameters():
        if getattr(parameter, "sum_over", None) is not None:  # in place: no second gradient
            dist.all_reduce(parameter.grad, group=parameter.sum_over)


def train_step(model, ids, labels, group, args, backward=True):
    """Loss of ids (b, s), the same on every rank; after it every .grad is complete."""
    loss = mean_loss(model, hidden_states(model, ids, group, args), labels, group, args)
    if backward:
        loss.backward()
        sum_shared_gradients(model)
    return loss.detach()


# Copied from tp.py
def whole(tensor):
    """The full tensor of a DTensor; any other tensor is what it is."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


# Copied from tp.py
def grad_norm(model, group):
    """Norm of the gradient of the whole model: what several ranks hold (replicas) counts once."""
    total = torch.zeros((), dtype=torch.float64)
    for p in model.parameters():
        norm = torch.linalg.vector_norm(whole(p.grad), dtype=torch.float64)
        total += norm.square().cpu() / getattr(p, "replicas", 1)
    dist.all_reduce(total, group=group)
    return total.sqrt()


def local_logits(model, ids, group, args):
    """This rank's logits of (b, s, v), marked with `shard` and `replicas` as in keep()."""
    hidden = gather_from_sp_region(hidden_states(model, ids, group, args), group)
    logits = F.linear(hidden[:, : args.length], model.lm_head.weight)  # (b, s, v/P)
    start, end = split(model.config.vocab_size, group.rank(), group.size())
    logits.shard, logits.replicas = (2, start, end), 1
    return logits


# Copied from sp_megatron.py
def token_range(length, group):
    """Tokens [start, end) that this rank holds between the blocks; how many ranks hold the same."""
    size = padded(length, group.size()) // group.size()
    return min(group.rank() * size, length), min((group.rank() + 1) * size, length), 1


# Copied from tp.py
def mlp_tiles(args, tokens):
    """In how many tiles an MLP takes so many tokens a sequence: see in_tiles()."""
    tiled = args.recompute in ("block", "offload")
    return math.ceil(tokens / max(1, args.tile // args.batch)) if tiled else 1


def expected_traffic(config, group, args):
    """What one step must send: rows (phase, op, calls, message bytes), as Meter counts them."""
    P, layers, element = group.size(), config.num_hidden_layers, args.torch_dtype.itemsize
    if P == 1:
        return []
    size = padded(args.length, P) // P
    hidden = args.batch * P * size * config.hidden_size * element  # one (b, s, h)
    loss = args.batch * P * size * max(4, element)  # a number a token, in float32 or better
    chunks = math.ceil(size / loss_chunk(args)) if args.loss == "chunked" else 1
    blocks, norms = 1 + 2 * layers, (1 + 2 * layers) * config.hidden_size * element
    tiles = mlp_tiles(args, size)
    calls = 2 * layers * tiles
    rows = [
        ("forward", "all_gather", chunks + calls, blocks * hidden),  # every g, the head's
        ("forward", "reduce_scatter", 1 + calls, blocks * hidden),  # embedding, every g-bar
        ("forward", "all_reduce", 2 * chunks, 3 * loss),  # max; sum-exp and target logit
        ("backward", "reduce_scatter", chunks + calls, blocks * hidden),
        ("backward", "all_gather", 1 + calls, blocks * hidden),
        ("backward", "all_reduce", blocks, norms),
    ]
    if args.recompute != "none":  # both g again
        rows += [("backward", "all_gather", calls, 2 * layers * hidden)]
    if args.recompute in ("block", "offload"):  # attention's g-bar again. Not MLP's: checkpoint()
        # stops before a layer's last one, with all that backward needs
        rows += [("backward", "reduce_scatter", layers * tiles, layers * hidden)]
        if tiles > 1:  # backward runs each tile itself: MLP's g-bar, and attention's g and g-bar
            rows += [("backward", "all_gather", layers * tiles, layers * hidden)]
            rows += [("backward", "reduce_scatter", calls, 2 * layers * hidden)]
    if args.loss == "chunked":  # recomputed, too
        rows += [("backward", "all_gather", chunks, hidden)]
        rows += [("backward", "all_reduce", 2 * chunks, 3 * loss)]
    _, (k0, k1), replicas = head_range(config, group.rank(), P)
    if replicas > 1:  # replicated KV heads: their gradients are summed
        numbers = 2 * (k1 - k0) * config.head_dim * (config.hidden_size + config.attention_bias)
        calls = layers * 2 * (1 + config.attention_bias)
        rows += [("backward", "all_reduce", calls, layers * numbers * element)]
    return rows


# --------------------------------------------------------------------------------------------------
# 5. Memory: what the backward needs is kept, or computed again
# --------------------------------------------------------------------------------------------------


# Copied from tp.py
class Keep(torch.autograd.Function):
    """x itself; its node keeps x for the backward, where y.grad_fn.saved_tensors returns it."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad


# Copied from tp.py
class InTiles(torch.autograd.Function):
    """run(x), a tile of `size` tokens at a time; each tile is run again in the backward."""

    @staticmethod
    def forward(ctx, x, keeper, run, size):
        ctx.keeper, ctx.run, ctx.size = keeper, run, size
        return torch.cat([run(tile) for tile in x.split(size, -2)], -2)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.keeper.saved_tensors
        dx = torch.empty_like(x)
        for tile, dy, place in zip(*(t.split(ctx.size, -2) for t in (x, grad, dx))):
            tile = tile.detach().requires_grad_()
            with torch.enable_grad():
                out = ctx.run(tile)
            out.backward(dy)  # the weights' gradients add up
            place.copy_(tile.grad)
        return dx, None, None, None


# Copied from tp.py
def in_tiles(args, run, x):  # (b, ..., s, h) -> (b, ..., s, any)
    """run(x) by tiles of tokens, for what treats each token by itself: a norm, an MLP.

    What it makes on the way, for an MLP several (b, s, intermediate) and what is communicated, then
    exists for one tile only. (Arctic Long Sequence Training, arXiv 2506.13996.) x is kept before
    anything runs: when a layer is recomputed, checkpoint() then has all it needs, and stops here.
    """
    size = max(1, args.tile // len(x))
    if x.shape[-2] <= size:
        return run(x)
    x = Keep.apply(x)
    return InTiles.apply(x, x.grad_fn, run, size)


def attention_in_tiles(attention, group, args):
    """An attention block whose gather and reduce-scatter lie inside its projections' tiles.

    Attention needs all tokens at once, with 1/P of the heads; projections, as an MLP, do not. HF
    asks for q, k and v one by one: they are made side by side, of tokens gathered once, and what HF
    calls as q_proj, k_proj and v_proj takes its columns of them.
    """

    def projections(attention):
        return attention.q_proj, attention.k_proj, attention.v_proj

    sizes, ranks = [len(linear.weight) for linear in projections(attention)], (group.size(), -1)

    def project(attention, x):  # (b, t, h) -> (b, P, t, q + k + v)
        x = gather_from_sp_region(x, group)
        qkv = [F.linear(x, linear.weight, linear.bias) for linear in projections(attention)]
        return torch.cat(qkv, -1).unflatten(1, ranks)

    def columns(i, inner, qkv):  # a copy: a view of v would keep q and k in memory
        return qkv.split(sizes, -1)[i].contiguous()

    def attend(inner, hidden_states, **kwargs):  # (b, s/P, h) -> (b, s/P, h)
        run = partial(project, inner.__self__)  # not of attention: its class would hold it, a cycle
        qkv = in_tiles(args, run, hidden_states)  # (b, P, s/P, q + k + v)
        return inner(hidden_states=qkv.flatten(1, 2), **kwargs)

    def output(inner, out):  # (b, s, h/P) -> (b, s/P, h)
        def run(tile):  # (b, P, t, h/P) -> (b, t, h)
            return reduce_scatter_to_sp_region(inner(tile.flatten(1, 2)), group)

        return in_tiles(args, run, out.unflatten(1, ranks))

    for i, linear in enumerate(projections(attention)):
        wrap(linear, partial(columns, i))
    wrap(attention.o_proj, output)
    wrap(attention, attend)


# Copied from tp.py
def keep_dear(layer):
    """What selective recomputation (arXiv 2205.05198) keeps: a policy, asked for each operation.

    What q, k, v, gate and up return, and attention's result, are dear to compute. Norms, rotary
    embedding, silu(gate) * up and what is communicated before them run again: cheap, but large.
    """
    attention, mlp = layer.self_attn, layer.mlp
    linears = attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj
    weights = {linear.weight.untyped_storage()._cdata for linear in linears}

    def policy(context, operator, *inputs, **options):
        name = operator.name()
        product = name in ("aten::mm", "aten::addmm")
        product = product and inputs[-1].untyped_storage()._cdata in weights
        keep = product or "attention" in name or "flash_attn" in name
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


# Copied from tp.py
def recompute(args, inner, x, **others):  # (b, s, h) -> (b, s, h)
    """Keep a layer's input only, and run the layer again in the backward (arXiv 1604.06174).

    --recompute offload keeps that input in the host's memory; selective keeps the input of either
    block, and what is dear.
    """
    layer = inner.__self__  # HF's LlamaDecoderLayer, whose forward is x + attend, + feed_forward

    def attend(x):
        return layer.self_attn(hidden_states=in_tiles(args, layer.input_layernorm, x), **others)[0]

    def feed_forward(x):
        return layer.mlp(layer.post_attention_layernorm(x))

    def both(x):
        x = x + attend(x)
        return x + in_tiles(args, feed_forward, x)

    if args.recompute == "selective":
        contexts = partial(create_selective_checkpoint_contexts, keep_dear(layer))
        for block in (attend, feed_forward):
            x = x + checkpoint(block, x, use_reentrant=False, context_fn=contexts)
        return x
    offload = args.recompute == "offload"
    with save_on_cpu(pin_memory=args.device.type == "cuda") if offload else nullcontext():
        return checkpoint(both, x, use_reentrant=False)


# Copied from tp.py
def make_parallel(model, group, args):
    """This rank's share of model, in place, with the recomputation asked for."""
    parallelize(model, group, args)
    if args.recompute != "none":
        for layer in model.model.layers:
            wrap(layer, partial(recompute, args))
        wrap(model.model.norm, partial(in_tiles, args))
    return model


# What sections 6 and 7, the same in all four scripts, find of this script alone
OPTIONS = {}
RIVAL = None  # with this option benchmark mode times the script without it, too, in turn
FIGURES, OWN_MODES = None, {}  # what benchmark measures besides; modes that need no ranks


# Copied from tp.py
# --------------------------------------------------------------------------------------------------
# 6. Proof: the three modes, word for word the same in all four scripts
# --------------------------------------------------------------------------------------------------

EXACT = 1e-10  # float64: the relative error that is allowed; nothing is finer to hold it against
ALL, ANY, LEAST = 1.5, 4.0, 3.0  # float32, bfloat16: of one device's rounding error; see judge()
LEARNING_STEPS, LEARNING_TOLERANCE = 20, {"float64": 1e-9, "float32": 1e-4, "bfloat16": 2e-2}
SPEAKS = "LOCAL_RANK" not in os.environ or os.environ["RANK"] == "0"  # this rank prints and writes


class Unusable(Exception):
    """An argument or a model that cannot work; its message says what would."""


def say(*lines):
    """Print on the rank that speaks, after an empty line."""
    if SPEAKS:
        print("", *lines, sep="\n", flush=True)


def table(rows):
    """Print rows, dicts with the same keys, under these keys; the first column to the left."""
    cells = [[f"{x:.3g}" if isinstance(x, float) else str(x) for x in r.values()] for r in rows]
    cells.insert(0, [key.replace("_", " ") for key in rows[0]])
    widths = [max(map(len, column)) for column in zip(*cells)]
    columns = [f"{{:{'>' if i else '<'}{width}}}" for i, width in enumerate(widths)]
    say(*("  " + "   ".join(columns).format(*row) for row in cells))


def gather(value, group):
    """Every rank's value, in a list; a barrier, too. A fake rank is alone."""
    if dist.get_backend(group) == "fake":
        return [value]
    values = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


@contextmanager
def float64_islands(dtype):
    """HF computes norms, rotary tables, softmax in float32 whatever the dtype; not in float64."""
    if dtype != "float64":
        yield
        return
    wide = {**vars(torch), "float32": torch.float64, "float": torch.float64}
    with mock.patch.object(modeling_llama, "torch", types.SimpleNamespace(**wide)):
        with mock.patch.object(torch.Tensor, "float", torch.Tensor.double):
            yield


@contextmanager
def readable(name):
    """Whatever is wrong with a model: transformers' own message, in one line."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as problem:  # of many kinds
        raise Unusable(f"cannot read the model {name}: {' '.join(str(problem).split())}") from None


def load_model(args):
    """HF's LlamaForCausalLM on this rank's device; the same weights on every rank."""
    torch.manual_seed(args.seed)
    auto = transformers.AutoModelForCausalLM
    how = {"dtype": args.torch_dtype, "attn_implementation": args.attention}
    with readable(args.model), args.device if args.source is None else nullcontext():
        if args.source is None:
            model = auto.from_config(args.config, **how)
        else:
            model = auto.from_pretrained(**args.source, **how, use_safetensors=True)
    rows, pad = model.model.embed_tokens.weight.data, args.config.pad_token_id
    if args.source is None and pad is not None:  # HF's zeros: a norm's gradient of them is huge
        rows[pad].normal_(std=args.config.initializer_range)
    return model.to(args.device).train()


def text_batch(args):
    """ids (b, s) of real text, by the model's own tokenizer where it has one, else its bytes."""
    text = Path(args.text).read_text(errors="replace") if args.text else "".join(topics.values())
    tokens, need = list(text.encode()), args.batch * args.length
    if args.source is not None:
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(**args.source)
            tokens = tokenizer(text)["input_ids"]
        except Exception:  # of many kinds
            say(f"  {args.model} has no tokenizer: its tokens are the text's bytes")
    tokens = (tokens * (need // len(tokens) + 1))[:need]  # a short text is read again
    return torch.tensor(tokens).view(args.batch, args.length) % args.config.vocab_size


def proof_batch(args, group):
    """ids and labels (b, s) that leave a wrong step no place to hide.

    The labels have a hole in the middle, none, or an ignored tail, in turn: targets are spread
    evenly neither over ranks nor over sequences. Token 0, the padding token, and the first and last
    row of every rank's share of the vocabulary are among inputs and targets.
    """
    shape, vocabulary = (args.batch, args.length), args.config.vocab_size
    generator = torch.Generator().manual_seed(args.seed)
    random = torch.randint(vocabulary, shape, generator=generator)
    ids = random if args.source is None else text_batch(args)  # real weights make sense of text
    targets = torch.ones(shape, dtype=torch.bool)
    targets[0::3, max(1, args.length // 4) : args.length // 2] = False
    targets[2::3, (args.length + 1) // 2 :] = False
    ranges = [split(vocabulary, rank, group.size()) for rank in range(group.size())]
    edges = {row for start, end in ranges for row in (start, end - 1)}
    edges = torch.tensor(sorted(edges | {0, (args.config.pad_token_id or 0) % vocabulary}))
    places = targets[:, 1:].nonzero()[: len(edges)] + torch.tensor([0, 1])  # no target is first
    ids[tuple(places.T)] = edges[: len(places)]
    return ids.to(args.device), ids.where(targets, IGNORE).to(args.device)


def reference_step(model, ids, labels, backward=True):
    """The step of the untouched HF model on one device."""
    logits = model(input_ids=ids, use_cache=False).logits
    # In float64: on a CPU its float32 loss is off by 1e-3 in gradients of confident predictions
    with mock.patch.object(torch.Tensor, "float", torch.Tensor.double):
        loss = model.loss_function(logits=logits, labels=labels, vocab_size=logits.shape[-1])
    if backward:
        loss.backward()
    return loss.detach()


def sgd(model, lr):
    """Plain SGD: Adam would hide a gradient that is too large by a factor."""
    torch.optim.SGD(model.parameters(), lr, foreach=False).step()
    model.zero_grad()


def observe(model, batch, args, group=None):
    """Two steps of SGD: {(kind, name): tensor}, all that correctness compares, as it is computed.

    Each tensor has `shard` and `replicas`, as keep() sets them. Without a group the model is HF's.
    """
    seen, embedded, parameters = {}, [], list(model.named_parameters())

    def see(kind, name, tensor, owner=None):
        seen[kind, name] = tensor = torch.atleast_1d(whole(tensor.detach()))
        replicas = group.size() if group and owner is None else 1  # without an owner: all have it
        tensor.shard = getattr(owner, "shard", None)
        tensor.replicas = getattr(owner, "replicas", replicas)

    def see_embedding(module, ids, out):
        out.retain_grad()
        embedded.append(out)

    def step(backward=True):
        if group is None:
            return reference_step(model, *batch, backward)
        return train_step(model, *batch, group, args, backward)

    for name, p in parameters:
        see("shard", name, p.clone(), p)
    with torch.no_grad():
        out = local_logits(model, batch[0], group, args) if group else model(batch[0]).logits
    if out is not None:  # of a pipeline only the last stage has them
        see("logits", "logits", out, out)
    hook = model.get_input_embeddings().register_forward_hook(see_embedding)
    loss = step()
    hook.remove()
    see("loss", "loss", loss)
    with torch.no_grad():  # once more with logits of hundreds: exp() of them would be infinite
        for weight in model.model.norm.parameters():
            weight *= 512
        see("loss", "loss of 512 x logits", step(backward=False))
        for weight in model.model.norm.parameters():
            weight /= 512
    for name, p in reversed(parameters):
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad  # if the step forgot it
        see("grad", name, p.grad, p)
    if embedded:
        start, end, replicas = token_range(args.length, group) if group else (0, args.length, 1)
        inputs = torch.cat([x.grad for x in embedded])[:, : end - start]  # without SP's padding
        inputs.shard, inputs.replicas = (1, start, end), replicas
        see("grad", "inputs_embeds", inputs, inputs)
    if group is None:
        norm = torch.stack([p.grad.double().norm() for p in model.parameters()]).norm()
    else:
        norm = grad_norm(model, group)
    see("grad_norm", "grad_norm", norm)
    lr = 0.05 * loss.item() / (norm.item() ** 2 or 1.0)  # a straight line would fall by 5%
    sgd(model, lr)
    step()
    sgd(model, lr)
    for name, p in parameters:
        see("weight", name, p, p)
    return seen


def compare(seen, expected, rounded):
    """Squared norms of what this rank holds: {(kind, name): (error, size, rounding, share)}.

    rounding is the error of one device in the same dtype. share is the part of the full tensor that
    is held here, divided by its replicas: over all ranks it must come to 1, or something is
    missing, or was never sharded.
    """

    def square(x):
        return torch.linalg.vector_norm(x, dtype=torch.float64).item() ** 2 / tensor.replicas

    rows = dict.fromkeys(expected, (0.0, 0.0, 0.0, 0.0))
    for key, tensor in seen.items():
        if key not in expected:  # a tied head on a rank that has no embedding
            key = key[0], "model.embed_tokens.weight"
        dim, start, end = tensor.shard or (0, 0, len(expected[key]))
        want, one_device = (x[key].narrow(dim, start, end - start) for x in (expected, rounded))
        error = square(tensor - want) if tensor.shape == want.shape else math.inf
        share = want.numel() / expected[key].numel() / tensor.replicas
        rows[key] = error, square(want), square(one_device - want), share
    return rows


def judge(ranks, dtype):
    """Entries of the JSON, one a tensor; and the ratio of all gradients' error to one device's.

    A tensor may be off by ANY times the rounding error that one device makes in this dtype, all
    gradients together by ALL times: correct runs came to 2 and 1.4 times, wrong gradients come to
    hundreds. One device may by chance have next to none: it counts as LEAST roundings (eps), at
    least. Loss and gradient norm, single numbers, go by logits and gradients. What should be zero
    has no relative error: a tensor is at least a hundredth of a rounding of all of its kind.
    """
    eps = torch.finfo(getattr(torch, dtype)).eps
    if dtype == "float64":
        eps = EXACT / ANY / LEAST
    sums = {key: [math.fsum(c) for c in zip(*(rows[key] for rows in ranks))] for key in ranks[0]}
    kinds = defaultdict(lambda: [0.0, 0.0, 0.0])  # error, size, rounding of a kind: squares
    for (kind, _), (*squares, _) in sums.items():
        kinds[kind] = [a + b for a, b in zip(kinds[kind], squares)]
    tensors = []
    for (kind, name), (*squares, owned) in sums.items():
        error, size, rounding = map(math.sqrt, squares)
        if kind in ("loss", "grad_norm"):
            squares = kinds["logits" if kind == "loss" else "grad"]
            rounding = size * math.sqrt(squares[2] / squares[1])
        noise = eps * math.sqrt(kinds[kind][1]) / 100
        limit = 0.0 if kind == "shard" else ANY * max(rounding, LEAST * eps * size) + noise
        size = max(size, noise) or 1.0
        error = math.inf if math.isnan(error) else error / size
        rank = max(range(len(ranks)), key=lambda r: ranks[r][kind, name][0])  # furthest off
        entry = {"name": name, "kind": kind, "rank": rank, "owned": owned}
        entry |= {"relative_error": error, "limit": limit / size}
        tensors.append(entry | {"passed": error <= limit / size and abs(owned - 1) < 1e-9})
    error, size, rounding = map(math.sqrt, kinds["grad"])
    return tensors, error / max(rounding, LEAST * eps * size)


def weight_bytes():
    """Bytes of all weights in this process, whether a model uses them or not."""
    weights = [x for x in gc.get_objects() if type(x) is nn.Parameter]
    storages = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in weights}
    return sum(storages.values())


def check_correctness(args, group):
    """Every tensor of two steps on P ranks against the untouched HF model on one device."""
    reference, batch = load_model(args), proof_batch(args, group)
    gc.collect()
    others = weight_bytes()
    model = make_parallel(copy.deepcopy(reference), group, args)
    shards = sum(p.nbytes for p in model.parameters() if type(p) is nn.Parameter)
    memory = gather((weight_bytes() - others, shards), group)
    finer = {"bfloat16": "float32"}.get(args.dtype, "float64")
    rounded = observe(copy.deepcopy(reference), batch, args)
    with float64_islands(finer):
        expected = observe(reference.to(getattr(torch, finer)), batch, args)
    seen = observe(model, batch, args, group)
    tensors, ratio = judge(gather(compare(seen, expected, rounded), group), args.dtype)
    wrong = []
    for rank, (held, shards) in enumerate(memory):
        if held != shards:
            wrong.append(f"rank {rank} holds weights of {held} bytes, its shards are {shards}")
    wrong += [entry["name"] for entry in tensors if not entry["passed"]]
    if args.dtype != "float64" and not ratio <= ALL:
        wrong.append("all gradients together")

    numbers, rows = {}, []
    for name in ("loss", "grad_norm"):
        a, b = expected[name, name].item(), seen[name, name].item()
        numbers |= {f"{name}_reference": a, name: b}
        rows.append({"": name, "one device": f"{a:.8g}", "parallel": f"{b:.8g}"})
    table(rows)
    worst = sorted(tensors, key=lambda x: -x["relative_error"] / max(x["limit"], 1e-99))
    shown = [entry for entry in tensors if not entry["passed"]] or worst
    table([{k: v for k, v in entry.items() if k != "passed"} for entry in shown[:8]])
    say("  owned: how often a tensor exists over all ranks, replicas counted once; 1 is right")
    close = f"{ratio:.2f} x one device's error from {finer} (at most {ALL})"
    if args.dtype == "float64":
        close = f"within {EXACT} of one device"
    summary = f"loss, logits, all gradients, weights after 2 SGD steps: {close}"
    if wrong:
        summary = f"{len(wrong)} of {len(tensors)} values are wrong, the first: {wrong[0]}"
    result = {"passed": not wrong, **numbers, "worst": worst[0], "tensors": tensors}
    result["tolerance"] = EXACT if args.dtype == "float64" else ALL
    return summary, result | {"rounding_ratio": ratio}


def check_learning(args, group):
    """Train one device (rank 0's) and P ranks on the same text: the same losses, and they fall."""
    reference, ids = load_model(args), text_batch(args).to(args.device)
    model = make_parallel(copy.deepcopy(reference), group, args)
    alone, losses, lr = [], [], None
    for _ in tqdm(range(LEARNING_STEPS), "learning", disable=None if SPEAKS else True):
        losses.append(train_step(model, ids, ids, group, args).item())
        lr = lr or 0.1 * losses[0] / (grad_norm(model, group).item() ** 2 or 1.0)
        sgd(model, lr)
        if group.rank() == 0:
            alone.append(reference_step(reference, ids, ids).item())
            sgd(reference, lr)
    alone, ranks = gather(alone, group)[0], gather(losses, group)
    rows = []
    for step, (a, *everyone) in enumerate(zip(alone, *ranks)):
        rows.append({"step": step, "one device": f"{a:.6f}", "rank 0": f"{everyone[0]:.6f}"})
        rows[-1]["worst rank's relative error"] = max(abs(b - a) / abs(a) for b in everyone)
    table([*rows[:-1:5], rows[-1]])
    apart = max(row["worst rank's relative error"] for row in rows)
    fall, need = min(1 - r[-1] / r[0] for r in ranks), 0.2 if args.model == "tiny" else 0.0
    limit = LEARNING_TOLERANCE[args.dtype]
    summary = f"losses within {apart:.1e} of one device's (at most {limit:.0e})"
    summary += f", down by {fall:.0%} (over {need:.0%})"
    passed = apart <= limit and fall > need
    return summary, {"passed": passed, "loss_reference": alone, "loss": losses}


class Meter(TorchDispatchMode):
    """Counts collectives, and the bytes of all tensors alive at once (peak), whoever made them.

    Message bytes of a collective are those of the full tensor: what comes out of an all_gather,
    what goes into a reduce_scatter; of an all_to_all the rank's own input.
    """

    OPS = {"allreduce": "all_reduce", "allgather": "all_gather", "reducescatter": "reduce_scatter"}
    OPS |= {"alltoall": "all_to_all", "send": "send"}

    def __init__(self):
        super().__init__()
        self.calls, self.bytes, self.peak = Counter(), Counter(), 0
        self.alive = weakref.WeakValueDictionary()  # of storages: several tensors may share one
        self.hold(x for x in gc.get_objects() if type(x) in (torch.Tensor, nn.Parameter))

    def hold(self, tensors):
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage._cdata not in self.alive:
                self.alive[storage._cdata] = storage
                self.peak = max(self.peak, self.now())

    def now(self):  # sizes anew: fully_shard drops and fills gathered weights' storages in place
        return sum(storage.nbytes() for storage in self.alive.values())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(hasattr(kind, "full_tensor") for kind in types):  # a DTensor: see what is below it
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        if set(types) - {torch.Tensor, nn.Parameter}:  # FakeTensor: DTensor works out a shape
            return out
        inputs = [x for x in tree_leaves(args) if isinstance(x, torch.Tensor)]
        outputs = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        self.hold(outputs)
        name = func._opname.replace("_", "")
        op = next((op for start, op in self.OPS.items() if name.startswith(start)), None)
        if op and func.namespace in ("c10d", "_c10d_functional"):
            message = inputs[-1:] if op == "all_to_all" else inputs + outputs
            self.calls[op] += 1
            self.bytes[op] += max(x.nbytes for x in message)
        return out


def ledger(args, group, forward, step):
    """Measured beside expected traffic, a row of the JSON each, and of which ranks it is true."""
    rows, holders = defaultdict(lambda: [0, 0, 0, 0]), defaultdict(list)
    for op in step.calls:  # a step less its forward is the backward
        calls, size = forward.calls[op], forward.bytes[op]
        rows["forward", op][:2] = calls, size
        rows["backward", op][:2] = step.calls[op] - calls, step.bytes[op] - size
    for phase, op, calls, size in expected_traffic(args.config, group, args):
        rows[phase, op][2] += calls
        rows[phase, op][3] += size
    mine = [(*key, *row) for key, row in rows.items() if any(row)]
    for rank, found in enumerate(gather(mine, group)):
        for row in found:
            holders[row].append(rank)
    keys = ("phase", "op", "count", "bytes", "expected_count", "expected_bytes")
    return [dict(zip(keys, row)) | {"ranks": ranks} for row, ranks in holders.items()]


def check_benchmark(args, group):
    """Time, peak memory and traffic of a step; the traffic must be as expected, to the byte."""
    model, batch = make_parallel(load_model(args), group, args), proof_batch(args, group)
    device = torch.get_device_module(args.device)

    def step(backward=True, model=model, args=args):
        train_step(model, *batch, group, args, backward)
        model.zero_grad()

    if args.device.type == "cuda":
        device.reset_peak_memory_stats()
    with Meter() as forward:  # these two steps warm up, too
        step(backward=False)
    with Meter() as both:
        step()
    peak = device.max_memory_allocated() if args.device.type == "cuda" else both.peak
    peaks, traffic = gather(peak, group), ledger(args, group, forward, both)
    runs = {"forward": partial(step, False), "forward + backward": step}
    if RIVAL and vars(args)[RIVAL]:
        other = argparse.Namespace(**vars(args) | {RIVAL: False})
        rival = make_parallel(load_model(other), group, other)
        runs["manual: forward + backward"] = partial(step, True, rival, other)
    times = torch.zeros(len(runs), args.bench_iters, dtype=torch.float64)
    for i in tqdm(range(args.bench_iters), "benchmark", disable=None if SPEAKS else True):
        for row, run in zip(times, runs.values()):  # in turn
            gather(None, group)  # the ranks begin together
            begin = time.perf_counter()
            run()
            device.synchronize()
            row[i] = time.perf_counter() - begin
    dist.all_reduce(times, dist.ReduceOp.MAX, group=group)  # the slowest rank's
    seconds = {}
    for name, row in zip(runs, times.tolist()):
        seconds[name] = {"median": statistics.median(row), "min": min(row), "max": max(row)}
    if args.profile:
        with torch.profiler.profile() as trace:
            step()
        if SPEAKS:
            write_whole(args.profile, lambda draft: trace.export_chrome_trace(str(draft)))

    table([{"seconds": name} | row for name, row in seconds.items()])
    table([{"rank": r, "peak_memory_MiB": f"{p / 2**20:.1f}"} for r, p in enumerate(peaks)])
    if traffic:
        table([{k.replace("bytes", "message_bytes"): v for k, v in r.items()} for r in traffic])
    if args.backend == "gloo":
        say("  (times on a CPU, over gloo: they do not predict a GPU's)")
    pairs = ("count", "expected_count"), ("bytes", "expected_bytes")
    wrong = [row for row in traffic if any(row[a] != row[b] for a, b in pairs)]
    figures, more = FIGURES(model, step, args, group) if FIGURES else ({}, [])
    problems = [f"traffic, {row['phase']} {row['op']}" for row in wrong] + more
    speed = args.batch * args.length / seconds["forward + backward"]["median"]
    summary = f"{speed:.0f} tokens a second, all traffic as the formula says"
    if args.backend == "fake":
        summary = "all traffic as the formula says; no peer was waited for"
    if problems:
        summary = f"not as expected: {'; '.join(problems)}"
    result = {"passed": not problems, "forward_s": seconds.pop("forward")}
    result |= {"forward_backward_s": seconds.pop("forward + backward"), "rivals_s": seconds}
    result |= {"tokens_per_s": speed, "peak_memory_bytes": peaks, "traffic": traffic}
    return summary, result | figures


# --------------------------------------------------------------------------------------------------
# 7. Command line
# --------------------------------------------------------------------------------------------------

MODES = {"correctness": check_correctness, "learning": check_learning, "benchmark": check_benchmark}
PRESETS = {  # hidden, intermediate, layers, heads, KV heads, head_dim, vocabulary, tied, pad
    "tiny": (64, 192, 8, 8, 4, 8, 256, True, 130, 1 << 20),
    "smollm2-135m": (576, 1536, 30, 9, 3, 64, 49152, True, 2, 1 << 20),
    "llama-3.2-1b": (2048, 8192, 16, 32, 8, 64, 128256, True, None, 1 << 20),
    "llama-3.2-3b": (3072, 8192, 28, 24, 8, 128, 128256, True, None, 1 << 20),
    "llama-3.1-8b": (4096, 14336, 32, 32, 8, 128, 128256, False, None, 1 << 20),
}


def find_model(name, attention):
    """(config, from_pretrained's keywords) of a preset, directory, .gguf file or hub id.

    The keywords are None where there are no weights to load: a preset, or a config.json alone.
    """
    if name in PRESETS:
        keys = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        keys += ("num_key_value_heads", "head_dim", "vocab_size", "tie_word_embeddings")
        sizes = dict(zip((*keys, "pad_token_id", "max_position_embeddings"), PRESETS[name]))
        spread = 0.8 / math.sqrt(PRESETS[name][0])  # HF's 0.02: tiny's attention would be uniform
        return transformers.LlamaConfig(**sizes, initializer_range=spread), None
    path, source = Path(name), {"pretrained_model_name_or_path": name}
    if name.endswith(".gguf"):
        source = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    elif not path.is_dir() and (name.count("/") != 1 or name[0] in "./~"):  # nor a hub id
        raise Unusable(f"no such model directory: {name} (presets: {', '.join(PRESETS)})")
    with readable(name):
        config = transformers.AutoConfig.from_pretrained(**source)
        if config.model_type != "llama":
            raise ValueError(f"model_type {config.model_type}; these scripts take llama")
        if config.vocab_size < 2 or config.intermediate_size < 1:
            raise ValueError("nothing to predict, or MLPs of no width")
        with torch.device("meta"), torch.no_grad():  # shapes without memory: can it run?
            auto = transformers.AutoModelForCausalLM
            model = auto.from_config(config, attn_implementation=attention)
            model(inputs_embeds=torch.empty(1, 2, config.hidden_size))
    weights = [file for end in ("safetensors", "bin") for file in path.glob(f"*.{end}")]
    return config, None if path.is_dir() and not weights else source


class Parser(argparse.ArgumentParser):
    """argparse, with its complaint raised instead of printed with the usage."""

    def error(self, message):
        raise Unusable(message)


def parse(argv):
    """The arguments, checked as far as can be without starting anything."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument_group("what runs").add_argument
    add("--mode", choices=[*MODES, "all", *OWN_MODES], default="correctness")
    models = f"{', '.join(PRESETS)} (random weights), a hub id, a directory, a .gguf file"
    add("--model", default="tiny", help=models)
    add("--length", type=int, default=256, help="tokens a sequence (256)")
    add("--batch", type=int, help="sequences (3; pp.py: as many as microbatches)")
    add("--text", metavar="FILE", help="what to learn (Python's own help topics)")
    add("--seed", type=int, default=0, help="of random weights and tokens (0)")
    add = parser.add_argument_group("how it runs").add_argument
    add("--dtype", choices=["float32", "bfloat16", "float64"], default="float32")
    add("--attn", choices=["auto", "sdpa", "eager", "flash"], default="auto", help="auto: sdpa")
    add("--loss", choices=["chunked", "full"], default="chunked", help="full: all logits at once")
    kept = "block: keep layers' inputs only; offload: and that in the host's memory; "
    kept += "selective: keep what is dear to compute; none: keep all"
    ways = ["block", "offload", "selective", "none"]
    add("--recompute", choices=ways, default="block", help=kept)
    tile = "tokens of a rank in a tile (of an MLP, a norm, SP's projections) if recomputed (16384)"
    add("--tile", type=int, default=16384, help=tile)
    fake = "auto: nccl with a GPU a rank; fake: this is rank $RANK of $WORLD_SIZE, peers are silent"
    add("--backend", choices=["auto", "gloo", "nccl", "fake"], default="auto", help=fake)
    add("--timeout", type=int, default=600, help="seconds to wait for another rank (600)")
    add = parser.add_argument_group("what comes out").add_argument
    add("--bench-iters", type=int, help="timed steps (5; 1 on a CPU above 8192 tokens)")
    add("--json", metavar="FILE", help="write the results; results/plot.py draws them")
    add("--profile", metavar="FILE", help="benchmark: write a trace of a step, for ui.perfetto.dev")
    add = parser.add_argument_group(f"{STRATEGY} alone").add_argument
    for name, how in OPTIONS.items():
        add(name, **how)
    args = parser.parse_args(argv)
    for name, value in vars(args).items():
        least = {"seed": 0, "length": 2}.get(name, 1)  # one token has no next one to predict
        if type(value) is int and not least <= value < 1 << 31:
            raise Unusable(f"--{name.replace('_', '-')} {value} is out of range; {least} would do")
    if args.backend == "fake" and args.mode != "benchmark":
        raise Unusable("--backend fake computes no real values: --mode benchmark only")
    if args.profile and args.mode not in ("benchmark", "all"):
        raise Unusable("--profile needs --mode benchmark or all")
    if args.text and not Path(args.text).read_bytes():
        raise Unusable(f"--text {args.text} is empty")
    for path in filter(None, (args.json, args.profile)):
        if os.path.isdir(path) or not os.access(Path(path).absolute().parent, os.W_OK):
            raise Unusable(f"cannot write {path}: a directory, or in none that can be written")
    settle(args)
    return args


def start(args):
    """Choose the device, read the model's config, join the other ranks; returns their group."""
    environment = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    rank, world, local, here = (int(os.environ.get(k, v)) for k, v in environment.items())
    gpus = torch.cuda.device_count()
    if args.backend == "auto":
        args.backend = "nccl" if gpus >= here else "gloo"
    if args.backend == "nccl" and gpus < here:
        raise Unusable(f"--backend nccl needs {here} GPUs here, and there are {gpus}; try gloo")
    cuda = args.backend == "nccl" or (args.backend == "fake" and gpus > 0)
    args.device = torch.device("cuda", local) if cuda else torch.device("cpu")
    torch.get_device_module(args.device).set_device(args.device)
    args.torch_dtype = getattr(torch, args.dtype)
    args.attention = {"auto": "sdpa", "flash": "flash_attention_2"}.get(args.attn, args.attn)
    args.bench_iters = args.bench_iters or (1 if not cuda and args.length > 8192 else 5)
    args.wait = datetime.timedelta(seconds=args.timeout)
    args.config, args.source = find_model(args.model, args.attention)
    check_shape(args, world)
    store = None  # torchrun's
    if args.backend == "fake":
        store = fake_pg.FakeStore()
    elif "RANK" not in os.environ:
        say(f"one rank; for more: torchrun --nproc_per_node=2 {' '.join(sys.argv)}")
        store = dist.HashStore()
    backend = "cpu:gloo,cuda:nccl" if args.backend == "nccl" else args.backend
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=args.wait)
    return dist.group.WORLD


def write_whole(path, write):
    """Have write(another path) make the file, then name it path: whole or not at all."""
    with tempfile.TemporaryDirectory(dir=Path(path).absolute().parent) as folder:
        draft = Path(folder, "draft")
        write(draft)
        draft.replace(path)


def run(args, group):
    """Run the modes asked for, write --json; returns whether all held."""
    modes = list(MODES) if args.mode == "all" else [args.mode]
    versions = {"python": sys.version.split()[0], "torch": torch.__version__}
    versions |= {"transformers": transformers.__version__}
    results = {"script": Path(sys.argv[0]).name, "strategy": STRATEGY, "versions": versions}
    results |= {"world_size": group.size(), "device": args.device.type}
    results |= {k: v for k, v in vars(args).items() if isinstance(v, str | int | float | None)}
    own = [name for name in OPTIONS if vars(args)[name[2:].replace("-", "_")] is True]
    ranks = f"{group.size()} rank{'s' if group.size() > 1 else ''}"
    what = f"{' '.join([STRATEGY, *own])}, {ranks} ({args.backend}, {args.device.type}), "
    what += f"{args.model}, {args.dtype}"
    for mode in modes:
        say(f"{mode}: {what}, {args.batch} x {args.length} tokens")
        with float64_islands(args.dtype):
            summary, results[mode] = MODES[mode](args, group)
        say(f"{'PASS' if results[mode]['passed'] else 'FAIL'} {mode}: {summary}")
    failed = [mode for mode in modes if not results[mode]["passed"]]
    if len(modes) > 1:
        say(f"{'FAIL' if failed else 'PASS'} {STRATEGY}: {', '.join(failed or modes)}")
    if SPEAKS and args.json:
        results = json.loads(json.dumps(results), parse_constant=lambda name: None)  # no NaN
        write_whole(args.json, lambda draft: draft.write_text(json.dumps(results, indent=1) + "\n"))
    gather(None, group)  # no rank leaves, and ends the others, before rank 0 has written
    return not failed


def stop(*_):
    """Ctrl-C: end here and now; an exception could be lost, or met by that of a peer's leaving."""
    say("stopped")
    os._exit(130)


def main(argv=None):
    """Returns the exit status: 0 all held, 1 a check failed, 2 unusable arguments or model."""
    transformers.logging.set_verbosity_error()
    huggingface_hub.logging.set_verbosity_error()  # it would report each of its retries
    if not SPEAKS:
        transformers.logging.disable_progress_bar()
    # torch 2.13 renames all_gather_into_tensor and reduce_scatter_tensor; 2.11 knows only these
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    faulthandler.register(signal.SIGTERM, sys.__stderr__, chain=True)  # where did it hang?
    before = signal.signal(signal.SIGINT, stop)
    try:
        args = parse(argv)
        if args.mode in OWN_MODES:
            return 0 if OWN_MODES[args.mode](args) else 1
        return 0 if run(args, start(args)) else 1
    except (Unusable, OSError) as problem:  # OSError: a full disk, a file that cannot be read
        if SPEAKS:
            print(f"error: {problem}", file=sys.stderr)
        else:
            time.sleep(30)  # torchrun ends all ranks as soon as one goes: let rank 0 speak first
        return 2
    finally:
        signal.signal(signal.SIGINT, before)
        if dist.is_initialized():
            dist.destroy_process_group()
            gc.collect()  # gloo's threads must end before Python does; garbage holds the group


if __name__ == "__main__":
    sys.exit(record(main)())
