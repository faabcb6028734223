"""Tensor parallelism for LLaMA in one file: Megatron-LM (arXiv 1909.08053) on HF's model.

The lesson is the first 410 lines, to "The lesson ends here". Begin at parallelize() and
train_step(). The rest proves that the ranks compute what one device does, and measures; sections 5
and 6 are the same in all four scripts.

Each of P ranks holds 1/P of each weight matrix, but the activations between the blocks (a block is
attention or MLP) are whole on every rank. Here P = 2, and there are b sequences of s tokens; h is
hidden_size, i intermediate_size, v vocab_size; a weight is (out, in):

      x (b, s, h), the norm's output, on both ranks
        | f   forward: nothing           backward: all-reduce dx
        v
    rank 0: gate, up (i/2, h)   rank 1: gate, up (i/2, h)    column parallel: half the features
        |                               |
    silu(gate x) * (up x)       silu(gate x) * (up x)        (b, s, i/2): feature by feature
        |                               |
    rank 0: down (h, i/2)       rank 1: down (h, i/2)        row parallel: partial sums of y
        | g   forward: all-reduce        backward: nothing
        v
      y (b, s, h) on both ranks, to be added to the residual

Attention is cut the same way, by heads: q, k, v are column parallel, o is row parallel. Embedding
and head are cut by vocabulary, and the loss is computed without ever gathering the logits.

    messages of a layer   forward          backward         recomputed (--recompute full)
    attention             g: all-reduce    f: all-reduce    g: all-reduce
    MLP                   g: all-reduce    f: all-reduce    -

Each all-reduce is of a (b, s, h). The embedding has one more in the forward, and the head one in
the backward. The loss sends 3 numbers for each token; with --loss chunked, the default, again in
the backward. --recompute full, the default, keeps only each layer's input, and runs the layer's
forward again in the backward. That stops before the MLP's g, because no gradient needs what leaves
the MLP. --recompute none keeps all activations.

Weight matrices, their gradients and optimizer state shrink to 1/P (k and v to one KV head at
least). But each rank first loads all of the model, and then keeps its share. The activations
between the blocks do not shrink; sp_megatron.py divides those, too.

    torchrun --nproc_per_node=2 tp.py --mode correctness
    torchrun --nproc_per_node=2 tp.py --mode benchmark --length 20480 --dtype bfloat16
    torchrun --nproc_per_node=2 tp.py --dtensor                 # the same by PyTorch's DTensor
    torchrun --nproc_per_node=2 labs/break_it.py tp.py local_softmax    # see a bug caught

notebooks/explorer.html#walk&tp shows a step of this file line by line, on every rank.
"""

# ---- 1. Imports ----------------------------------------------------------------------------------

# For the lesson
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

# isort: split
# For the proof and the command line
import argparse
import copy
import datetime
import faulthandler
import gc
import importlib
import json
import math
import os
import signal
import statistics
import sys
import time
import weakref
from collections import Counter
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import transformers
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.tensor import DTensor, Replicate, parallel
from torch.testing._internal.distributed import fake_pg  # noqa: F401  registers --backend fake
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

IGNORE = -100  # the label of a token that the loss skips, in PyTorch and Hugging Face
LOSS_CHUNK = 2048  # --loss chunked: LOSS_CHUNK * vocabulary logits on a rank at once


# ---- 2. Communication: f and g, each the other's backward ----------------------------------------


def all_reduce(x, group, op=dist.ReduceOp.SUM):
    """The sum (or max) of x over ranks; not in place, because autograd may still need x itself."""
    if group.size() == 1:
        return x
    x = x.clone(memory_format=torch.contiguous_format)  # a gradient may be a transposed view
    dist.all_reduce(x, op, group=group)
    return x


class CopyToTPRegion(torch.autograd.Function):
    """The paper's f. Every rank uses the same x, so x's gradient is the sum of the ranks'."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x

    @staticmethod
    def backward(ctx, grad):
        return all_reduce(grad, ctx.group), None


class ReduceFromTPRegion(torch.autograd.Function):
    """The paper's g. y is the sum of the ranks' partial results, so the gradient of each is dy. No
    message is needed: dy comes over the residual and from the f of later blocks and of the head,
    which have summed their dx. So it is complete, and the same on every rank."""

    @staticmethod
    def forward(ctx, x, group):
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


# f and g under Megatron-LM's names
copy_to_tp_region = CopyToTPRegion.apply  # (x, group) -> x
reduce_from_tp_region = ReduceFromTPRegion.apply  # (partial sum, group) -> sum


# ---- 3. Sharding LLaMA and its relatives, and what is kept for the backward ----------------------


def shard_range(n, rank, world):
    """[start, end): a rank's share of n things. The first n % world ranks have one more."""
    base, extra = divmod(n, world)
    return rank * base + min(rank, extra), (rank + 1) * base + min(rank + 1, extra)


def head_range(config, rank, world):
    """[q0, q1), [k0, k1): a rank's query heads, and the KV heads that these read. With more ranks
    than KV heads, several ranks have the same KV head, and divide its query heads."""
    kv_heads = config.num_key_value_heads
    per_kv = config.num_attention_heads // kv_heads  # query heads that read a KV head
    sharing = max(1, world // kv_heads)  # ranks that have the same KV head
    k0, k1 = shard_range(kv_heads, rank // sharing, world // sharing)
    q0, q1 = shard_range((k1 - k0) * per_kv, rank % sharing, sharing)
    return (k0 * per_kv + q0, k0 * per_kv + q1), (k0, k1)


def make_shard(full, dim, start, end):
    """A Parameter with a copy of rows (dim 0) or columns (dim 1) [start, end) of full."""
    part = nn.Parameter(full.narrow(dim, start, end - start).clone())
    part.shard = dim, start, end  # for the proof: which part of full this is
    return part


class ColumnParallelLinear(nn.Module):
    """Output features [start, end) of an nn.Linear, whose weight is (out, in). The collective in
    front of it is a hook on the norm whose output it reads: see shard_model()."""

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
        if linear.bias is not None and group.rank() == 0:  # on one rank, to be added once
            self.bias = make_shard(linear.bias, 0, start=0, end=len(linear.bias))

    def forward(self, x):  # (b, s, in/P) -> (b, s, out)
        return reduce_from_tp_region(F.linear(x, self.weight, self.bias), self.group)


class VocabParallelEmbedding(nn.Module):
    """Rows [start, end) of an nn.Embedding; a token whose row is on another rank gives zeros."""

    def __init__(self, embedding, start, end, group):
        super().__init__()
        self.group, self.start, self.end = group, start, end
        self.vocab_size = embedding.num_embeddings
        self.weight = make_shard(embedding.weight, 0, start, end)
        self.padding_idx = None
        if embedding.padding_idx is not None and start <= embedding.padding_idx < end:
            self.padding_idx = embedding.padding_idx - start  # no gradient for it, as in HF

    def forward(self, ids):  # (b, s) -> (b, s, h)
        mine = (ids >= self.start) & (ids < self.end)
        known = (ids >= 0) & (ids < self.vocab_size)
        # An unknown id is looked up, and F.embedding raises, as on one device
        rows = (ids - self.start).masked_fill(known & ~mine, 0)
        out = F.embedding(rows, self.weight, self.padding_idx)
        return reduce_from_tp_region(out.masked_fill(~mine[..., None], 0), self.group)


def shard_model(model, group):
    """Turn HF's model into this rank's share of it, in place; parameters keep HF's names."""
    config, rank, world = model.config, group.rank(), group.size()
    (q0, q1), (k0, k1) = head_range(config, rank, world)
    i0, i1 = shard_range(config.intermediate_size, rank, world)
    v0, v1 = shard_range(config.vocab_size, rank, world)

    # A forward hook: what it returns takes the place of the norm's output. All column parallel
    # linears of a block read that, so autograd adds up their dx first, and f all-reduces once
    def f(norm, inputs, out):
        return copy_to_tp_region(out, group)

    for layer in model.model.layers:
        attention = layer.self_attn
        d = attention.head_dim
        layer.input_layernorm.register_forward_hook(f)
        attention.q_proj = ColumnParallelLinear(attention.q_proj, q0 * d, q1 * d)
        attention.k_proj = ColumnParallelLinear(attention.k_proj, k0 * d, k1 * d)
        attention.v_proj = ColumnParallelLinear(attention.v_proj, k0 * d, k1 * d)
        attention.o_proj = RowParallelLinear(attention.o_proj, q0 * d, q1 * d, group)
        attention.num_key_value_groups = (q1 - q0) // (k1 - k0)  # HF reads heads off shapes

        mlp = layer.mlp
        layer.post_attention_layernorm.register_forward_hook(f)
        mlp.gate_proj = ColumnParallelLinear(mlp.gate_proj, i0, i1)
        mlp.up_proj = ColumnParallelLinear(mlp.up_proj, i0, i1)
        mlp.down_proj = RowParallelLinear(mlp.down_proj, i0, i1, group)

    tied = model.lm_head.weight is model.model.embed_tokens.weight
    model.model.embed_tokens = VocabParallelEmbedding(model.model.embed_tokens, v0, v1, group)
    model.model.norm.register_forward_hook(f)
    model.lm_head = ColumnParallelLinear(model.lm_head, v0, v1)
    if tied:
        model.lm_head.weight = model.model.embed_tokens.weight


def make_kv_group(config, group, args):
    """The ranks that have the same KV head as this one; None where no other rank has it."""
    ranks_per_kv = group.size() // config.num_key_value_heads
    if ranks_per_kv < 2:
        return None
    kv_group, _ = dist.new_subgroups(ranks_per_kv, group=group, timeout=args.timeout)
    return kv_group


def mark_gradients(model, group, kv_group):
    """Mark each parameter with the number of ranks that hold it (replicas), and with the group over
    which its gradient has to be summed (sum_over; None if it is complete).

        weight                   held by               its gradient on a rank       summed over
        q_norm, k_norm (Qwen3)   all ranks             of its own heads             all ranks
        other norms              all ranks             complete, since f sums dx    -
        k, v                     ranks of a KV head    of its own query heads       these ranks
        any other                one rank              complete                     -
    """
    for name, parameter in model.named_parameters():
        parameter.replicas, parameter.sum_over = 1, None
        if "q_norm" in name or "k_norm" in name:
            parameter.replicas, parameter.sum_over = group.size(), group
        elif "norm" in name:
            parameter.replicas = group.size()
        elif ("k_proj" in name or "v_proj" in name) and kv_group is not None:
            parameter.replicas, parameter.sum_over = kv_group.size(), kv_group


def recompute_layers(model):
    """Keep each layer's input only. The layer's backward first runs its forward again, collectives
    included, up to the last tensor that the backward needs (arXiv 1604.06174)."""
    for layer in model.model.layers:  # HF's layers checkpoint themselves if these two are set
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)


def parallelize(model, group, args):
    """Turn HF's model, in place, into what this rank runs."""
    shard_model(model, group)
    mark_gradients(model, group, make_kv_group(model.config, group, args))
    if args.recompute == "full":
        recompute_layers(model)
    return model


# ---- 4. Loss and training ------------------------------------------------------------------------


class VocabParallelCrossEntropy(torch.autograd.Function):
    """-log softmax(logits)[target] with the vocabulary cut over the ranks (Megatron-LM).

    logits (n, v/P): this rank's columns; target (n): ids of the whole vocabulary, or IGNORE.
    Returns each token's loss, (n); the caller zeroes those of IGNORE. The ranks send 3 numbers for
    each token, and no logits.
    """

    @staticmethod
    def forward(ctx, logits, target, vocab_size, group):
        wide = torch.promote_types(logits.dtype, torch.float32)  # float32 at least
        peak = logits.max(-1, keepdim=True).values.to(wide)
        peak = all_reduce(peak, group, dist.ReduceOp.MAX)
        shifted = logits - peak  # at most 0, so exp() stays finite
        start, end = shard_range(vocab_size, group.rank(), group.size())
        mine = (target >= start) & (target < end)
        known = (target >= 0) & (target < vocab_size) | (target == IGNORE)
        # An unknown target is looked up, and gather() raises, as on one device
        column = (target - start).masked_fill(known & ~mine, 0)[:, None]
        target_logit = shifted.gather(-1, column)[:, 0].masked_fill(~mine, 0)
        sum_exp = shifted.exp_().sum(-1)  # in place, since nothing needs shifted any more
        target_logit, sum_exp = all_reduce(torch.stack([target_logit, sum_exp]), group)
        # Not saved as one number, peak + log(sum_exp): at a peak of 20 float32 rounds that by 1e-6,
        # as much as the whole gradient, softmax - 1, of a well predicted target
        ctx.save_for_backward(logits, column, mine, peak, sum_exp)
        return sum_exp.log() - target_logit

    @staticmethod
    def backward(ctx, grad):  # d loss / d logits = softmax - one_hot(target): no communication
        logits, column, mine, peak, sum_exp = ctx.saved_tensors
        softmax = (logits - peak).exp_().div_(sum_exp[:, None])
        softmax.scatter_add_(-1, column, -mine[:, None].to(softmax.dtype))
        return softmax.mul_(grad[:, None]).to(logits.dtype), None, None, None


def sum_of_losses(model, hidden, targets, group):
    """Sum of the losses of one chunk, c tokens of each sequence: hidden (b, c, h), targets (b, c).
    A token whose target is IGNORE adds nothing."""
    logits = model.lm_head(hidden).flatten(0, 1)  # (b c, v/P)
    vocab_size = model.config.vocab_size
    loss = VocabParallelCrossEntropy.apply(logits, targets.flatten(), vocab_size, group)
    return loss.masked_fill(targets.flatten() == IGNORE, 0).sum()


def tokens_per_chunk(length, group, args):
    """Tokens of each sequence in a chunk. All sequences together have at most P * LOSS_CHUNK: with
    v/P logits each, as many numbers as LOSS_CHUNK tokens have on one device."""
    return length if args.loss == "full" else max(1, LOSS_CHUNK * group.size() // args.batch)


def mean_loss(model, hidden, labels, group, args):
    """Mean loss over all targets, the same on every rank, from hidden (b, s, h)."""
    chunk = tokens_per_chunk(hidden.shape[1], group, args)
    targets = F.pad(labels[:, 1:], (0, 1), value=IGNORE)  # a token's target is the next token
    total = 0
    for some, target in zip(hidden.split(chunk, 1), targets.split(chunk, -1)):
        if args.loss == "full":
            total += sum_of_losses(model, some, target, group)
        else:  # logits of one chunk at a time, recomputed in the backward
            total += checkpoint(sum_of_losses, model, some, target, group, use_reentrant=False)
    return total / (targets != IGNORE).sum()


def final_hidden_states(model, ids):
    """Output of the final norm, (b, s, h), of ids (b, s)."""
    return model.model(input_ids=ids, use_cache=False).last_hidden_state


def forward_backward(model, ids, labels, group, args, backward=True):
    """Mean loss of ids (b, s) and unshifted labels (b, s); it is the same on every rank. Leaves
    complete gradients in .grad, which has to be None before, or old parts would be summed again."""
    # The hidden states get no name, because a name would keep them through the whole backward
    loss = mean_loss(model, final_hidden_states(model, ids), labels, group, args)
    if backward:
        loss.backward()
        sum_gradients(model)
    return loss.detach()


def sum_gradients(model):
    """Sum each gradient of which a rank has only a part, over the group that it is marked with."""
    for parameter in model.parameters():
        if parameter.sum_over is not None and parameter.sum_over.size() > 1:
            dist.all_reduce(parameter.grad, group=parameter.sum_over)


def grad_norm(model, group):
    """Norm of the whole model's gradient, in which replicas count once."""
    total = 0
    for p in model.parameters():
        total += torch.linalg.vector_norm(p.grad, dtype=torch.float64).square() / p.replicas
    dist.all_reduce(total, group=group)
    return total.sqrt()


def train_step(model, optimizer, ids, labels, group, args, max_norm=1.0):
    """A step of training; returns the loss. A gradient whose norm is above max_norm is scaled down
    to it, as by PyTorch's clip_grad_norm_. The norm is the whole model's, the same number on every
    rank, so all ranks scale alike and replicas stay equal."""
    loss = forward_backward(model, ids, labels, group, args)
    scale = (max_norm / (grad_norm(model, group) + 1e-6)).clamp(max=1.0).item()
    for parameter in model.parameters():
        parameter.grad.mul_(scale)
    optimizer.step()
    optimizer.zero_grad()
    return loss


# The lesson ends here.


# ---- --dtensor: the same by PyTorch's DTensor ----------------------------------------------------


def parallelize_by_dtensor(model, group, args):
    """parallelize() by PyTorch's parallelize_module. PrepareModuleInput is f: a block's input
    becomes a DTensor, whose gradient is a partial sum on each rank and is all-reduced once."""
    enter_attention = parallel.PrepareModuleInput(  # HF passes attention its input by keyword
        input_kwarg_layouts={"hidden_states": Replicate()},
        desired_input_kwarg_layouts={"hidden_states": Replicate()},
    )
    enter_mlp = parallel.PrepareModuleInput(
        input_layouts=Replicate(), desired_input_layouts=Replicate()
    )
    plan = {
        "model.embed_tokens": parallel.RowwiseParallel(input_layouts=Replicate()),
        "model.layers.*.self_attn": enter_attention,
        "model.layers.*.self_attn.q_proj": parallel.ColwiseParallel(),
        "model.layers.*.self_attn.k_proj": parallel.ColwiseParallel(),
        "model.layers.*.self_attn.v_proj": parallel.ColwiseParallel(),
        "model.layers.*.self_attn.o_proj": parallel.RowwiseParallel(),
        "model.layers.*.mlp": enter_mlp,
        "model.layers.*.mlp.gate_proj": parallel.ColwiseParallel(),
        "model.layers.*.mlp.up_proj": parallel.ColwiseParallel(),
        "model.layers.*.mlp.down_proj": parallel.RowwiseParallel(),
        "lm_head": parallel.ColwiseParallel(),  # its input is no DTensor yet: it has its own f
    }
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    parallel.parallelize_module(model, DeviceMesh.from_group(group, model.device.type), plan)
    if tied:  # parallelize_module makes two parameters of one
        model.lm_head.weight = model.model.embed_tokens.weight
    mark_gradients(model, group, kv_group=None)  # finalize_args() allows no shared KV heads
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.bias", "down_proj.bias")):  # here on every rank
            parameter.replicas = group.size()
        if isinstance(parameter, DTensor) and parameter.placements[0].is_shard():
            dim = parameter.placements[0].dim
            full_size = parameter.shape[dim]
            parameter.shard = dim, *shard_range(full_size, group.rank(), group.size())
    if args.recompute == "full":
        recompute_layers(model)
    return model


def grad_norm_by_dtensor(model, group):
    """grad_norm() of gradients that are DTensors, each first redistributed like its parameter."""
    total = 0
    for p in model.parameters():
        grad = p.grad
        if isinstance(grad, DTensor):
            grad = grad.redistribute(placements=p.placements).to_local()
        total += torch.linalg.vector_norm(grad, dtype=torch.float64).square() / p.replicas
    dist.all_reduce(total, group=group)
    return total.sqrt()


# ---- What sections 5 and 6 need from this script -------------------------------------------------

STRATEGY = "tp"
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "smollm3")  # model_type
OPTIONS = {"--dtensor": {"action": "store_true", "help": "by PyTorch's DTensor"}}
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
SIZES += ("num_key_value_heads", "vocab_size", "tie_word_embeddings")
PRESETS = {  # with random weights: model_type, then SIZES
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


class UsageError(Exception):
    """Arguments or a model that cannot work; the message says what to use instead."""


def check_heads(config, world):
    """UsageError where a model's heads cannot be divided among so many ranks."""
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    # Whole KV heads on each rank, or equally many ranks for each KV head
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
    if args.dtensor:  # sections 4 and 5 then call these
        global parallelize, grad_norm
        parallelize, grad_norm = parallelize_by_dtensor, grad_norm_by_dtensor
        config = args.config
        sizes = config.num_key_value_heads, config.intermediate_size, config.vocab_size
        if any(size % world for size in sizes):
            problem = f"--dtensor: {world} ranks do not divide KV heads, features and vocabulary"
            raise UsageError(f"{problem} {sizes}; use {math.gcd(*sizes)} ranks, or no --dtensor")


def local_logits(model, ids, group, args):
    """This rank's columns of the logits, (b, s, v/P), marked like a weight."""
    logits = model.lm_head(final_hidden_states(model, ids))
    logits.shard = 2, *shard_range(model.config.vocab_size, group.rank(), group.size())
    logits.replicas = 1
    return logits


def expected_traffic(model, group, args):
    """What one forward_backward() must send: rows (phase, op, calls, their message bytes)."""
    if group.size() == 1:
        return []
    layers = model.config.num_hidden_layers
    element = getattr(torch, args.dtype).itemsize
    tokens = args.batch * args.length
    hidden = tokens * model.config.hidden_size * element  # bytes of a (b, s, h)
    number = tokens * max(4, element)  # bytes of a (b, s), which is float32 or wider
    chunks = math.ceil(args.length / tokens_per_chunk(args.length, group, args))
    rows = [
        ("forward", "all_reduce", 1, hidden),  # g of the embedding
        ("forward", "all_reduce", 2 * layers, 2 * layers * hidden),  # g of each block
        ("forward", "all_reduce", 2 * chunks, 3 * number),  # peak; target_logit and sum_exp
        ("backward", "all_reduce", 2 * layers, 2 * layers * hidden),  # f of each block
        ("backward", "all_reduce", 1, hidden),  # f of the head
    ]
    if args.loss == "chunked":  # the forward of each chunk again
        rows.append(("backward", "all_reduce", 2 * chunks, 3 * number))
    if args.recompute == "full":  # the forward of each layer again, up to the MLP's g
        rows.append(("backward", "all_reduce", layers, layers * hidden))
    if args.dtensor:  # it calls the head's f for each chunk: the same bytes in more calls
        rows.append(("backward", "all_reduce", chunks - 1, 0))
    summed = ["q_norm", "k_norm"]  # gradients of this rank's heads
    if group.size() > model.config.num_key_value_heads:
        summed += ["k_proj", "v_proj"]  # of a KV head that several ranks have
    for name, parameter in model.named_parameters():
        if any(word in name for word in summed):
            rows.append(("backward", "all_reduce", 1, parameter.nbytes))
    return rows


# ---- 5. Proof: from here on the same in tp.py, sp_megatron.py, sp_ulysses.py and pp.py -----------

# LIMIT: the largest error that passes, relative to the tensor's norm, or to FLOOR times the norm of
# all tensors of its kind where that is larger (some gradients are zero except for rounding). Only
# float64 proves: with a FLOOR of 1 a small tensor can be wrong and pass
LIMIT = {"float64": 1e-10, "float32": 1e-3, "bfloat16": 2e-1}
FLOOR = {"float64": 1e-3, "float32": 1.0, "bfloat16": 1.0}
IS_RANK0 = os.environ.get("RANK", "0") == "0" or "LOCAL_RANK" not in os.environ


def print0(*words):
    """print() on rank 0, or in a process that torchrun did not start, which is alone."""
    if IS_RANK0:
        print(*words, flush=True)


def print_table(rows):
    """Print rows, dicts with the same keys, in columns, after a blank line."""
    table = [list(row) for row in rows[:1]]
    for row in rows:
        table.append([f"{x:.3g}" if isinstance(x, float) else str(x) for x in row.values()])
    widths = [max(map(len, column)) for column in zip(*table)]
    print0()
    for cells in table:
        print0(" ", *(cell.ljust(width + 2) for cell, width in zip(cells, widths)))


def gather_objects(value, group):
    """Every rank's value, in a list; with --backend fake only its own. It is a barrier, too."""
    if dist.get_backend(group) == "fake":
        return [value]
    values = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


def upcasts_in_float64(args):
    """HF's norms and softmax cast to torch.float32, which rounds too much for a float64 proof. In
    this context, with --dtype float64, HF's module sees a torch whose float32 is float64."""
    family = args.config.model_type
    modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    wide = torch.promote_types(getattr(torch, args.dtype), torch.float32)
    return mock.patch.object(modeling, "torch", SimpleNamespace(**vars(torch) | {"float32": wide}))


def load_model(args):
    """HF's model for causal language modeling on this rank's device: the same at every call."""
    torch.manual_seed(args.seed)
    auto, config = transformers.AutoModelForCausalLM, copy.deepcopy(args.config)
    kwargs = {"dtype": getattr(torch, args.dtype), "attn_implementation": args.attn_implementation}
    if args.weights is None:
        with args.device:
            return auto.from_config(config, **kwargs).train()
    kwargs |= {"use_safetensors": True, "output_loading_info": True}
    kwargs["ignore_mismatched_sizes"] = True  # they are in the report
    try:
        model, report = auto.from_pretrained(config=config, **args.weights, **kwargs)
    except Exception as problem:
        raise UsageError(f"cannot load {args.model}: {problem}") from problem
    misfits = [f"{kind} {min(map(str, names))}" for kind, names in report.items() if names]
    if misfits:  # HF fills missing weights with random numbers
        raise UsageError(f"weights of {args.model} do not fit its config: {', '.join(misfits)}")
    return model.to(args.device).train()


def proof_batch(args, group, step=1):
    """ids and labels (b, s) of a step. Step 2 has other tokens and another length, so that stale
    state from step 1 shows. Targets are uneven, so that a mean of means is wrong. Among the ids are
    the padding token, and the first and last row of each rank's share of the vocabulary."""
    vocabulary, length = args.config.vocab_size, args.length
    if step == 2:
        length = max(3, length * 2 // 3)
    generator = torch.Generator().manual_seed(args.seed + step)
    ids = torch.randint(vocabulary, (args.batch, length), generator=generator)
    first_rows = [shard_range(vocabulary, rank, group.size())[0] for rank in range(group.size())]
    special = [args.config.pad_token_id or 0, *first_rows, *(row - 1 for row in first_rows)]
    ids[0, 1 : 1 + len(special)] = torch.tensor(special)[: length - 1] % vocabulary
    labels = ids.clone()
    labels[0::3, length // 2 : length * 3 // 4] = IGNORE  # a quarter of sequences 0, 3, ...
    labels[2::3, length // 2 + 1 :] = IGNORE  # almost half of sequences 2, 5, ...
    return ids.to(args.device), labels.to(args.device)


def reference_step(model, ids, labels):
    """HF's model on one device: logits, loss (in float64), gradient norm; leaves .grad."""
    logits = model(input_ids=ids, use_cache=False).logits
    targets = labels[:, 1:].flatten()
    loss = F.cross_entropy(logits[:, :-1].double().flatten(0, 1), targets, ignore_index=IGNORE)
    loss.backward()
    norm = nn.utils.get_total_norm(p.grad.double().norm() for p in model.parameters())
    return logits.detach(), loss.detach(), norm


def own_part(marked, tensor, full, group):
    """What compare() needs of this rank's part of a full tensor: where it lies, how many ranks have
    it, its squared error. A tensor without marks is whole, and on every rank."""
    dim, start, end = getattr(marked, "shard", (0, 0, len(full)))
    replicas = getattr(marked, "replicas", group.size())
    expected = full.narrow(dim, start, end - start)
    error = math.inf
    if tensor.shape == expected.shape:
        error = (tensor - expected).double().square().sum().item()
    return SimpleNamespace(where=(dim, start, end - start), replicas=replicas, error=error)


def compare(step, kind, ours, expected, args, group):
    """One row of --json for each tensor. expected {name: tensor} is one device's, ours {name: part}
    is this rank's. For kind "grad" both are parameters, whose .grad is compared. The error is over
    all ranks. coverage: on how many ranks an element is, counting its replicas as one; the one
    farthest from 1 is reported (0: lost, 2: in two shards)."""

    def value(marked):
        tensor = (marked.grad if kind == "grad" else marked).detach()
        if isinstance(tensor, DTensor):  # a gradient can be placed in another way than its weight
            tensor = tensor.redistribute(placements=marked.placements).to_local()
        return torch.atleast_1d(tensor)

    expected = {name: value(tensor) for name, tensor in expected.items()}
    own = {}  # without what only other ranks have: a layer, a bias, logits
    for name, marked in ours.items():
        if marked is not None:
            own[name] = own_part(marked, value(marked), expected[name], group)
    of_ranks = gather_objects(own, group)
    squares = {name: full.double().square().sum().item() for name, full in expected.items()}
    least = FLOOR[args.dtype] ** 2 * sum(squares.values())
    rows = []
    for name, full in expected.items():
        parts = [own.get(name) for own in of_ranks]
        errors = [part.error / part.replicas if part else 0.0 for part in parts]
        coverage = torch.zeros(full.shape, dtype=torch.float64, device=full.device)
        for part in filter(None, parts):
            coverage.narrow(*part.where).add_(1 / part.replicas)
        coverage = coverage.take((coverage - 1).abs().argmax()).item()
        error = math.sqrt(sum(errors) / (max(squares[name], least) or 1.0))
        passed = error <= LIMIT[args.dtype] and abs(coverage - 1) < 1e-9  # False for NaN
        row = {"name": name, "kind": kind, "step": step, "rank": errors.index(max(errors))}
        row |= {"coverage": coverage, "relative_error": error, "limit": LIMIT[args.dtype]}
        rows.append(row | {"passed": passed})
    return rows


def check_correctness(args, group):
    """Compare weights, and logits, loss and gradients of three steps, with HF's on one device. Step
    3 has logits of up to thousands, whose exp() overflows. Only float64 has this step, since in the
    other dtypes rounding decides which logit is the largest."""
    reference, model = load_model(args), parallelize(load_model(args), group, args)
    expected, ours = (dict(m.named_parameters()) for m in (reference, model))
    backward_order = dict(reversed(expected.items()))  # the first wrong one is nearest its cause
    rows = compare(1, "weight", ours, expected, args, group)  # before any step
    result = {"tolerance": LIMIT[args.dtype]}
    for step in (1, 2, 3) if args.dtype == "float64" else (1, 2):
        if step == 3:
            for m in (reference, model):
                m.model.norm.register_forward_hook(lambda norm, x, out: 512 * out)
        ids, labels = proof_batch(args, group, step)
        logits, loss, norm = reference_step(reference, ids, labels)
        right = {"logits": logits, "loss": loss, "grad_norm": norm}
        with torch.no_grad():
            found = {"logits": local_logits(model, ids, group, args)}
        found["loss"] = forward_backward(model, ids, labels, group, args)
        found["grad_norm"] = grad_norm(model, group)
        for name in right:
            rows += compare(step, name, {name: found[name]}, {name: right[name]}, args, group)
        rows += compare(step, "grad", ours, backward_order, args, group)
        for name in ("loss", "grad_norm") if step == 1 else ():
            print0(f"  {name:10}  one device {right[name]:.8g}, parallel {found[name]:.8g}")
            result |= {f"{name}_reference": right[name].item(), name: found[name].item()}
        lr = 0.05 * loss.item() / (norm.item() ** 2 or 1.0)  # about 5% less loss
        for m in (reference, model):  # SGD, because Adam would hide a wrong factor
            torch.optim.SGD(m.parameters(), lr, foreach=False).step()
            m.zero_grad()
    rows.sort(key=lambda row: row["kind"] == "grad_norm")  # last, since a gradient says more
    wrong = [row for row in rows if not row["passed"]]
    by_error = sorted(rows, key=lambda row: (row["passed"], -row["relative_error"]))  # wrong first
    print0(f"\n  {'Wrong' if wrong else 'The largest errors'}, of {len(rows)} tensors in all steps")
    print0("  (coverage: how often each element exists over all ranks, replicas counted once):")
    print_table((wrong or by_error)[:8])
    summary = f"logits, loss and all gradients are within {LIMIT[args.dtype]} of one device's"
    if wrong:
        summary = f"{len(wrong)} of {len(rows)} tensors are wrong, the first: {wrong[0]['name']}"
    return summary, result | {"passed": not wrong, "worst": by_error[0], "tensors": rows}


def check_learning(args, group):
    """Train one device and P ranks on the text of this file: the losses have to agree and to fall.
    Every other step's gradient is clipped to half of its norm; the others are not clipped."""
    reference, model = load_model(args), parallelize(load_model(args), group, args)
    text = torch.tensor(list(Path(__file__).read_bytes())) % args.config.vocab_size
    ids = text[torch.arange(args.batch * args.length) % len(text)]  # the same at each step
    ids = ids.view(args.batch, args.length).to(args.device)
    _, loss, norm = reference_step(reference, ids, ids)
    lr = 0.07 * loss.item() / (norm.item() ** 2 or 1.0)
    one_device = torch.optim.SGD(reference.parameters(), lr, foreach=False)
    optimizer = torch.optim.SGD(model.parameters(), lr, foreach=False)
    ours, expected = torch.zeros(2, 20, dtype=torch.float64)
    for step in range(20):
        one_device.zero_grad()
        _, expected[step], norm = reference_step(reference, ids, ids)
        max_norm = norm.item() * (0.5 if step % 2 else 2.0)
        nn.utils.clip_grads_with_norm_(reference.parameters(), max_norm, norm)  # PyTorch's own
        one_device.step()
        ours[step] = train_step(model, optimizer, ids, ids, group, args, max_norm)
        print0(f"  step {step:2}  one device {expected[step]:.6f}, parallel {ours[step]:.6f}")
    [row] = compare(20, "loss", {"loss": ours}, {"loss": expected}, args, group)
    fall = 1 - ours[-1].item() / ours[0].item()
    result = {"passed": row["passed"] and fall > 0, "loss": ours.tolist()}
    summary = f"losses within {row['relative_error']:.1e} of one device's, and down by {fall:.0%}"
    return summary, result | {"loss_reference": expected.tolist()}


class Meter(TorchDispatchMode):
    """Sees every operation. Counts messages and their bytes, and (for CPUs) the most bytes that
    tensors have at once. A message has the full tensor's bytes; an all-to-all has its input's."""

    OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send", "broadcast")

    def __init__(self):
        super().__init__()
        self.messages, self.peak = Counter(), 0
        self.alive = weakref.WeakValueDictionary()  # an entry disappears with its storage
        self.see(gc.get_objects())  # what exists already

    def see(self, values):
        """Returns the tensors among values, and notes their storages. A DTensor has none itself."""
        tensors = [x for x in values if type(x) in (torch.Tensor, nn.Parameter)]
        self.alive |= {x.untyped_storage()._cdata: x.untyped_storage() for x in tensors}
        self.peak = max(self.peak, sum(storage.nbytes() for storage in self.alive.values()))
        return tensors

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # DTensor's own code runs; what it does to tensors comes here
        out = func(*args, **(kwargs or {}))
        tensors = self.see(tree_leaves((args, out)))
        name = func._opname.replace("_", "")  # of allreduce_, _allgather_base_, ...
        for op in self.OPS:
            if "c10d" in func.namespace and name.startswith(op.replace("_", "")):
                # all_to_all(out, in); of the others the larger tensor is the full one
                message = tensors[-1:] if op == "all_to_all" else tensors
                self.messages[op, "count"] += 1
                self.messages[op, "bytes"] += max(x.nbytes for x in message)
        return out


def compare_traffic(forward, step, expected):
    """Rows of --json: this rank's messages beside expected_traffic()'s. The backward's are those of
    a whole step, minus those of a forward."""
    rows = []
    backward = Counter(step.messages)
    backward.subtract(forward.messages)
    for phase, op in product(("forward", "backward"), Meter.OPS):
        sent = forward.messages if phase == "forward" else backward
        wanted = [entry for entry in expected if entry[:2] == (phase, op)]
        count, size = sum(entry[2] for entry in wanted), sum(entry[3] for entry in wanted)
        row = {"phase": phase, "op": op, "count": sent[op, "count"], "bytes": sent[op, "bytes"]}
        row |= {"expected_count": count, "expected_bytes": size}
        row["passed"] = row["count"] == count and row["bytes"] == size
        if row["count"] or count:
            rows.append(row)
    return rows


def check_benchmark(args, group):
    """Measures time and peak memory of forward and backward, checks messages to the byte."""
    model = parallelize(load_model(args), group, args)
    batch, device_module = proof_batch(args, group), torch.get_device_module(args.device)
    cuda = args.device.type == "cuda"

    def step(backward=True):
        forward_backward(model, *batch, group, args, backward)
        model.zero_grad()

    with Meter() as forward:  # these two steps warm up, too
        step(backward=False)
    if cuda:
        device_module.reset_peak_memory_stats()  # loading held the full model
    with Meter() as both:
        step()
    peaks = gather_objects(device_module.max_memory_allocated() if cuda else both.peak, group)
    traffic = compare_traffic(forward, both, expected_traffic(model, group, args))
    right = gather_objects(all(row["passed"] for row in traffic), group)
    result = {"passed": all(right), "peak_memory_bytes": peaks, "traffic": traffic}
    for name, backward in ("forward_s", False), ("forward_backward_s", True):
        times = []
        for _ in range(args.bench_iters):
            device_module.synchronize()
            gather_objects(None, group)  # the ranks begin together
            begin = time.perf_counter()
            step(backward)
            device_module.synchronize()
            times.append(max(gather_objects(time.perf_counter() - begin, group)))  # the slowest
        result[name] = {"median": statistics.median(times), "min": min(times), "max": max(times)}
    label = f"time on {args.device.type}" + " (says nothing about GPUs)" * (not cuda)
    print_table([{label: name} | result[name] for name in ("forward_s", "forward_backward_s")])
    print0("\n  peak memory of each rank, bytes:", *peaks)
    print0(f"\n  Messages of rank {group.rank()} in a step; bytes are those of the full tensor:")
    print_table(traffic)
    result["tokens_per_s"] = args.batch * args.length / result["forward_backward_s"]["median"]
    sent = "as expected_traffic() says" if all(right) else f"wrong on rank {right.index(False)}"
    return f"{result['tokens_per_s']:.0f} tokens per second; messages {sent}", result


# ---- 6. Command line -----------------------------------------------------------------------------

MODES = {"correctness": check_correctness, "learning": check_learning, "benchmark": check_benchmark}
MODELS = f"{', '.join(PRESETS)}, a hub id, a folder, a .gguf or a config.json file"


def find_model(name):
    """The config of --model, and from_pretrained's arguments (None: random weights)."""
    path = Path(name)
    if name in PRESETS:
        family, *sizes = PRESETS[name]
        sizes = dict(zip(SIZES, sizes), max_position_embeddings=1 << 20, pad_token_id=2)
        sizes["sliding_window"] = None  # as Mistral 7B has it since v0.2
        spread = 0.8 / math.sqrt(sizes["hidden_size"])  # HF's 0.02 hides errors of attention
        return transformers.AutoConfig.for_model(family, **sizes, initializer_range=spread), None
    if not path.exists() and name.count("/") != 1:  # a hub id has one slash
        raise UsageError("there is no such preset, folder or file")
    source = {"pretrained_model_name_or_path": name, "trust_remote_code": False}
    if path.suffix == ".gguf":
        source |= {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    config = transformers.AutoConfig.from_pretrained(**source)
    if config.model_type not in FAMILIES:
        raise UsageError(f"it is of type {config.model_type}, not of {', '.join(FAMILIES)}")
    config.attention_dropout = 0.0  # ranks and one device would draw different numbers
    with torch.device("meta"):  # HF accepts configs that fail in the forward: try two tokens
        model = transformers.AutoModelForCausalLM.from_config(config)
        if (config.rope_parameters or {}).get("rope_type") != "dynamic":  # which needs values
            model(input_ids=torch.zeros(1, 2, dtype=torch.long))
    lies_alone = path.is_dir() and os.listdir(path) == ["config.json"]
    return config, None if lies_alone or path.suffix == ".json" else source


def parse(argv):
    """The arguments, checked as far as possible before anything starts."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--mode", choices=[*MODES, "all"], default="correctness")
    add("--model", default="tiny", help=f"{MODELS} (tiny)")
    add("--length", type=int, default=256, help="tokens per sequence (256)")
    add("--batch", type=int, help="sequences (3; pp.py: as many as microbatches)")
    add("--dtype", choices=list(LIMIT), help="float64 (the proof); for benchmark float32")
    add("--attn", choices=["sdpa", "eager", "flash"], default="sdpa", help="HF's functions (sdpa)")
    add("--loss", choices=["chunked", "full"], default="chunked", help="full: all logits at once")
    add("--recompute", choices=["full", "none"], default="full", help="full: keep layers' inputs")
    add("--backend", choices=["auto", "gloo", "nccl", "fake"], default="auto", help="fake: 1 rank")
    add("--bench-iters", type=int, default=5, help="timed steps (5)")
    add("--seed", type=int, default=0, help="of random weights and tokens (0)")
    add("--timeout", type=int, default=600, help="seconds to wait for another rank (600)")
    add("--json", type=argparse.FileType("a"), help="write the results; results/plot.py draws them")
    for name, keywords in OPTIONS.items():  # of this script alone
        add(name, **keywords)
    args = parser.parse_args(argv)
    for name, value in vars(args).items():
        least = {"seed": 0, "length": 2}.get(name, 1)  # one token has no next one to predict
        if type(value) is int and value < least:
            parser.error(f"--{name.replace('_', '-')} {value}: use {least} or more")
    if args.backend == "fake" and args.mode != "benchmark":
        parser.error("--backend fake computes no real values; use it with --mode benchmark")
    if args.attn == "flash" and args.dtype != "bfloat16":
        parser.error("--attn flash needs --dtype bfloat16")
    args.timeout = datetime.timedelta(seconds=args.timeout)
    return args


def start(args):
    """Choose the device, read the model's config, join the other ranks; returns their group."""
    tasks = max(int(os.environ.get(name, 1)) for name in ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE"))
    if tasks > 1 and "WORLD_SIZE" not in os.environ:
        raise UsageError(f"{tasks} processes were started without torchrun; use torchrun")
    torchrun = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    rank, world, local_rank, local_world = (int(os.environ.get(*item)) for item in torchrun.items())
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
    try:
        args.config, args.weights = find_model(args.model)
    except Exception as problem:  # Hugging Face's
        raise UsageError(f"cannot use {args.model}: {problem}") from problem
    finalize_args(args, world)
    alone = world == 1 or args.backend == "fake"  # fake needs no network
    backend = "cpu:gloo,cuda:nccl" if args.backend == "nccl" else "fake" if alone else "gloo"
    store = dist.HashStore() if alone else None  # None: torchrun's
    dist.init_process_group(backend, timeout=args.timeout, world_size=world, rank=rank, store=store)
    return dist.group.WORLD


def run(args, group):
    """Run the modes asked for, write --json; returns whether all passed."""
    results = {"script": Path(__file__).name, "strategy": STRATEGY, "device": args.device.type}
    results |= {"world_size": group.size(), "versions": {"python": sys.version.split()[0]}}
    results["versions"] |= {module.__name__: module.__version__ for module in (torch, transformers)}
    results |= {k: v for k, v in vars(args).items() if isinstance(v, str | int | None)}
    dtype = args.dtype
    modes = list(MODES) if args.mode == "all" else [args.mode]
    ranks = "1 rank" if group.size() == 1 else f"{group.size()} ranks"
    job = f"{STRATEGY}, {ranks} ({args.backend}, {args.device.type})"
    job += f", {args.model} with {'its' if args.weights else 'random'} weights"
    for mode in modes:
        args.dtype = dtype or ("float32" if mode == "benchmark" else "float64")
        print0(f"\n{mode}: {job}, {args.dtype}, {args.batch} x {args.length} tokens")
        with upcasts_in_float64(args):
            summary, result = MODES[mode](args, group)
        results[mode] = {"dtype": args.dtype} | result
        print0(f"\n{'PASS' if result['passed'] else 'FAIL'} {mode}: {summary}")
    results["dtype"] = results[modes[0]]["dtype"]
    if args.json and IS_RANK0:
        args.json.truncate(0)
        print(json.dumps(results, indent=1), file=args.json, flush=True)
    gather_objects(None, group)  # rank 0 writes first, since torchrun ends all if one fails
    return all(results[mode]["passed"] for mode in modes)


def main(argv=None):
    """Returns the exit status: 0 all passed, 1 a check failed, 2 unusable arguments or model."""
    transformers.logging.set_verbosity_error()
    args = parse(argv)
    try:
        group = start(args)
        faulthandler.register(signal.SIGTERM, chain=True)  # torchrun's: shows where a rank hung
        return 0 if run(args, group) else 1
    except (UsageError, ImportError) as problem:  # ImportError: of flash-attn, say
        hint = f" (--model takes {MODELS})" if problem.__cause__ else ""  # HF's own message
        print(f"error: {' '.join(str(problem).split())}{hint}", file=sys.stderr)
        return 2
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
            gc.collect()  # garbage holds the group, whose threads must end before Python does


if __name__ == "__main__":
    sys.exit(record(main)())
