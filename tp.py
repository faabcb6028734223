"""Tensor parallelism for LLaMA in one file: Megatron-LM (arXiv 1909.08053) on Hugging Face's own model.

Every rank holds 1/P of each weight matrix, and between the blocks all activations. P = 2, one MLP block:

      x (b, s, h) on both ranks
        | f   forward: nothing           backward: all-reduce dx
        v
    rank 0: gate, up (i/2, h)   rank 1: gate, up (i/2, h)    column parallel: half of the features
        |                               |
    rank 0: (b, s, i/2)         rank 1: (b, s, i/2)
        |                               |
    rank 0: down (h, i/2)       rank 1: down (h, i/2)        row parallel: a partial sum of all of them
        | g   forward: all-reduce        backward: nothing
        v
      y (b, s, h) on both ranks

Attention is cut the same way, by heads: q, k, v are column parallel, o is row parallel. The embedding
table and the head are cut by vocabulary, and the loss is computed without ever gathering the logits.

Cost a layer: 2 all-reduces of (b, s, h) forward and 2 backward, and 1 more if the layer is run again in
the backward (--recompute). Weights, gradients and optimizer state shrink by P, but for k and v where there
are more ranks than KV heads; the activations between the blocks do not (that is what sp_megatron.py is for).

    torchrun --nproc_per_node=2 tp.py --mode correctness
    torchrun --nproc_per_node=2 tp.py --mode all --dtensor    # the same plan, by PyTorch
    torchrun --nproc_per_node=2 tp.py --length 20480 --mode benchmark --dtype bfloat16
    torchrun --nproc_per_node=2 tp.py --inject-bug list
"""

import argparse
import copy
import datetime
import gc
import importlib.util
import json
import math
import os
import re
import signal
import socket
import statistics
import sys
import threading
import time
import traceback
import types
import urllib.error
import urllib.request
import warnings
import weakref
from contextlib import ExitStack, contextmanager, nullcontext
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
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.testing._internal.distributed import fake_pg
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm
from transformers.models.llama import modeling_llama

STRATEGY = "tp"
IGNORE = -100  # a label that is no target: HF's and PyTorch's convention
LOSS_CHUNK = 2048  # --loss chunked: tokens a rank whose logits exist at the same time


# ---------------------------------------------------------------------------------------------------
# 2. Communication: f and g, each the other's conjugate
# ---------------------------------------------------------------------------------------------------


# Copied from tp.py
def all_reduce(x, group, op=dist.ReduceOp.SUM):
    """The sum (or max) of x over the ranks, in a new tensor: autograd may still need the old one."""
    if group.size() == 1:
        return x
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, op, group=group)
    return x


class CopyToTPRegion(torch.autograd.Function):
    """Megatron's f. Every rank's columns used the same x, so dx is the sum of what they send back."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x

    @staticmethod
    def backward(ctx, grad):
        return all_reduce(grad, ctx.group), None


class ReduceFromTPRegion(torch.autograd.Function):
    """Megatron's g. y is the sum of the ranks' partial results, so each of them receives dy as it is."""

    @staticmethod
    def forward(ctx, x, group):
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


copy_to_tp_region = CopyToTPRegion.apply  # (x, group) -> x
reduce_from_tp_region = ReduceFromTPRegion.apply


def expected_traffic(config, group, args):
    """What one step must send: rows (phase, op, calls, bytes), bytes counted as Meter counts them."""
    P, layers, element = group.size(), config.num_hidden_layers, args.torch_dtype.itemsize
    hidden = args.batch * args.length * config.hidden_size * element  # one (b, s, h)
    loss = args.batch * args.length * max(4, element)  # a number a token, in float32 or better
    chunks = math.ceil(args.length / loss_chunk(args, P)) if args.loss == "chunked" else 1
    projections = 5 if args.dtensor else 2  # an f for each of q, k, v, gate, up; or one a block
    reductions = 3 if args.dtensor else 2  # max, sum-exp, target logit; we send the last two as one
    head = chunks if args.dtensor else 1  # parallelize_module has an f inside the head: one a chunk
    rows = [("forward", "all_reduce", reductions * chunks, 3 * loss)]
    if args.loss == "chunked":  # made again in the backward
        rows += [("backward", "all_reduce", reductions * chunks, 3 * loss)]
    if P == 1:
        return rows if args.dtensor else []  # loss_parallel() reduces over one rank too
    rows += [
        ("forward", "all_reduce", 1 + 2 * layers, (1 + 2 * layers) * hidden),  # embedding, every g
        ("backward", "all_reduce", head + projections * layers, (1 + projections * layers) * hidden),
    ]
    if args.recompute != "none":  # a layer run again repeats attention's g, but not MLP's, its last step:
        # checkpoint() stops as soon as it has again all that the backward needs
        rows += [("backward", "all_reduce", layers, layers * hidden)]
    _, (k0, k1), copies = head_range(config, group.rank(), P)
    if copies > 1:  # replicated KV heads: their gradients are summed
        numbers = 2 * (k1 - k0) * config.head_dim * (config.hidden_size + config.attention_bias)
        calls = layers * 2 * (1 + config.attention_bias)
        rows += [("backward", "all_reduce", calls, layers * numbers * element)]
    return rows


# ---------------------------------------------------------------------------------------------------
# 3. Sharding LLaMA
# ---------------------------------------------------------------------------------------------------


# Copied from tp.py
def split(n, rank, world):
    """[start, end) of the rank's share of n things: contiguous, the first n % world ranks hold one more."""
    base, extra = divmod(n, world)
    return rank * base + min(rank, extra), (rank + 1) * base + min(rank + 1, extra)


# Copied from tp.py
def head_range(config, rank, world):
    """Query heads [q0, q1) and KV heads [k0, k1) of a rank, and how many ranks hold the same KV heads.

    With world <= kv_heads whole KV groups (a KV head and the query heads that read it) are dealt out;
    with more ranks than KV heads, `copies` ranks share one KV head and deal out its query heads.
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
    copies = world // kv_heads
    k = rank // copies
    q0, q1 = split(queries, rank % copies, copies)
    return (k * queries + q0, k * queries + q1), (k, k + 1), copies


# Copied from tp.py
def keep(parameter, dim, start, end, copies=1):
    """A Parameter of its own with rows (dim 0) or columns (dim 1) [start, end) of a full one.

    `part` says which slice of the full tensor it is, `copies` how many ranks hold that same slice.
    """
    shard = nn.Parameter(parameter.detach().narrow(dim, start, end - start).clone())
    shard.part, shard.copies = (dim, start, end), copies
    return shard


# Copied from tp.py
def column_parallel(linear, start, end, copies=1):
    """Megatron's ColumnParallelLinear: output features [start, end). torch keeps weight as (out, in)."""
    linear.weight = keep(linear.weight, 0, start, end, copies)
    if linear.bias is not None:
        linear.bias = keep(linear.bias, 0, start, end, copies)


# Copied from tp.py
def row_parallel(linear, start, end, rank):
    """Megatron's RowParallelLinear: input features [start, end); the outputs are partial sums."""
    linear.weight = keep(linear.weight, 1, start, end)
    if linear.bias is not None:  # on one rank only, so that it is added once
        linear.bias = keep(linear.bias, 0, 0, len(linear.bias)) if rank == 0 else None


class VocabParallelEmbedding(nn.Module):
    """Rows [start, end) of an nn.Embedding; a token of another rank's rows looks up nothing here."""

    def __init__(self, embedding, start, end, group):
        super().__init__()
        self.weight, self.start, self.end = keep(embedding.weight, 0, start, end), start, end
        self.group, pad = group, embedding.padding_idx  # HF gives the padding token's row no gradient
        self.padding_idx = pad - start if pad is not None and start <= pad < end else None

    def forward(self, ids):  # (b, s) -> (b, s, h)
        elsewhere = (ids < self.start) | (ids >= self.end)
        rows = (ids - self.start).masked_fill(elsewhere, 0)
        out = F.embedding(rows, self.weight, self.padding_idx).masked_fill(elsewhere[..., None], 0)
        return reduce_from_tp_region(out, self.group)


def parallel_block(block, group):
    """Run an attention or MLP block as leave(block(enter(x)))."""
    inner = block.forward

    def forward(hidden_states, **kwargs):  # (b, s, h) -> (b, s, h)
        out = inner(copy_to_tp_region(hidden_states, group), **kwargs)
        if isinstance(out, tuple):  # attention returns (output, weights)
            return reduce_from_tp_region(out[0], group), *out[1:]
        return reduce_from_tp_region(out, group)

    block.forward = forward


def check_shape(args, world):
    """Raise Unusable where this model cannot be cut over world ranks."""
    head_range(args.config, 0, world)
    if args.dtensor:  # no tiles: each would send its own small messages
        args.tile = args.batch * args.length * max(args.config.hidden_size, args.config.intermediate_size)
    if args.dtensor and args.inject_bug not in (None, "loss_by_local_count", "no_op_parallelize"):
        raise Unusable(
            f"--inject-bug {args.inject_bug} is a bug of our own code, which --dtensor does not run"
        )
    sizes = [args.config.num_key_value_heads, args.config.intermediate_size, args.config.vocab_size]
    if args.dtensor and any(size % world for size in sizes):
        works = ", ".join(str(w) for w in range(1, world) if not any(size % w for size in sizes))
        raise Unusable(f"--dtensor: {world} ranks do not divide KV heads, intermediate size and vocabulary "
                       f"{sizes}; {works} would do, and so would tp.py without --dtensor")  # fmt: skip


def parallelize(model, group, args):
    """Turn HF's LlamaForCausalLM into this rank's share of it, in place."""
    if args.dtensor:
        return parallelize_dtensor(model, group)
    config, rank, world = model.config, group.rank(), group.size()
    (q0, q1), (k0, k1), copies = head_range(config, rank, world)
    i0, i1 = split(config.intermediate_size, rank, world)
    v0, v1 = split(config.vocab_size, rank, world)
    same_kv, d = kv_group(group, copies, args), config.head_dim
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        column_parallel(attention.q_proj, q0 * d, q1 * d)
        column_parallel(attention.k_proj, k0 * d, k1 * d, copies)
        column_parallel(attention.v_proj, k0 * d, k1 * d, copies)
        row_parallel(attention.o_proj, q0 * d, q1 * d, rank)
        attention.num_key_value_groups = (q1 - q0) // (k1 - k0)
        column_parallel(mlp.gate_proj, i0, i1)
        column_parallel(mlp.up_proj, i0, i1)
        row_parallel(mlp.down_proj, i0, i1, rank)
        parallel_block(attention, group)
        parallel_block(mlp, group)
        for projection in (attention.k_proj, attention.v_proj):
            for parameter in projection.parameters():
                parameter.sum_over = same_kv
    embedding = VocabParallelEmbedding(model.model.embed_tokens, v0, v1, group)
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    model.lm_head.weight = embedding.weight if tied else keep(model.lm_head.weight, 0, v0, v1)
    model.model.embed_tokens = embedding
    for parameter in model.parameters():
        if not hasattr(parameter, "part"):  # the norms: whole, and the same on every rank
            parameter.copies = world


def parallelize_dtensor(model, group):
    """The same plan, told to PyTorch's parallelize_module. Whole heads and even shares only."""
    column, row = ColwiseParallel, RowwiseParallel
    plan = {f"self_attn.{name}_proj": column() for name in "qkv"} | {"self_attn.o_proj": row()}
    plan |= {"mlp.gate_proj": column(), "mlp.up_proj": column(), "mlp.down_proj": row()}
    plan = {f"model.layers.*.{name}": style for name, style in plan.items()}
    plan["model.embed_tokens"] = row(input_layouts=Replicate())
    plan["lm_head"] = column(output_layouts=Shard(-1), use_local_output=False)
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    parallelize_module(model, DeviceMesh.from_group(group, model.device.type), plan)
    if tied:  # parallelize_module makes two parameters of one
        model.lm_head.weight = model.model.embed_tokens.weight
    for name, parameter in model.named_parameters():  # a DTensor shows itself whole on every rank
        if isinstance(parameter, DTensor) or "norm" in name:
            parameter.copies = group.size()


# Copied from tp.py
def kv_group(group, copies, args):
    """The ranks that hold the same KV heads as this one; None where no other does."""
    if copies == 1:
        return None
    ranks = dist.get_process_group_ranks(group)
    groups = [dist.new_group(ranks[i : i + copies], args.wait) for i in range(0, len(ranks), copies)]
    return groups[group.rank() // copies]  # each rank has to take part in making all of them


# Copied from tp.py
def sum_shared_gradients(model):
    """Sum the gradients that each rank saw a part of (`sum_over`: the ranks that saw the others)."""
    for parameter in model.parameters():
        if getattr(parameter, "sum_over", None) is not None:  # in place: no copies
            dist.all_reduce(parameter.grad, group=parameter.sum_over)


# ---------------------------------------------------------------------------------------------------
# 4. Loss
# ---------------------------------------------------------------------------------------------------


# Copied from tp.py
class VocabParallelCrossEntropy(torch.autograd.Function):
    """-log softmax(logits)[target] with the vocabulary cut over the ranks (Megatron-LM).

    logits (n, v/P): columns [start, start + v/P); target (n): ids of the whole vocabulary. Returns the
    loss of each token, (n). Three numbers a token are reduced instead of gathering v of them.
    """

    @staticmethod
    def forward(ctx, logits, target, start, group):
        peak = all_reduce(logits.max(-1, keepdim=True).values.float(), group, dist.ReduceOp.MAX)
        shifted = logits.float() - peak
        elsewhere = (target < start) | (target >= start + logits.shape[-1])
        column = (target - start).masked_fill(elsewhere, 0)[:, None]
        target_logit = shifted.gather(-1, column)[:, 0].masked_fill(elsewhere, 0)
        target_logit, sum_exp = all_reduce(torch.stack([target_logit, shifted.exp_().sum(-1)]), group)
        # Not peak + log(sum_exp) as one number: rounded at the size of a logit, it would cost two digits of
        # the gradient of a confident prediction, where softmax - 1 is small.
        ctx.save_for_backward(logits, column, elsewhere, peak, sum_exp)
        return sum_exp.log() - target_logit

    @staticmethod
    def backward(ctx, grad):  # d loss / d logits = softmax - one_hot(target): no communication
        logits, column, elsewhere, peak, sum_exp = ctx.saved_tensors
        softmax = (logits.float() - peak).exp_().div_(sum_exp[:, None])
        softmax.scatter_add_(-1, column, -(~elsewhere)[:, None].to(softmax.dtype))
        return softmax.mul_(grad[:, None]).to(logits.dtype), None, None, None


# Copied from tp.py
def vocab_parallel_cross_entropy(logits, target, start, group):
    """Loss of each token, (b, s), from this rank's logits (b, s, v/P); 0 where target is IGNORE."""
    loss = VocabParallelCrossEntropy.apply(logits.flatten(0, 1), target.flatten(), start, group)
    return loss.view_as(target).masked_fill(target == IGNORE, 0)


def loss_chunk(args, world):
    """How many tokens of each sequence go through the head at once: its columns are cut over the ranks."""
    return max(1, LOSS_CHUNK * world // args.batch)


# Copied from tp.py
def shift(labels):
    """The target of each token is the next one; the last has none. (b, s) -> (b, s)"""
    return F.pad(labels[:, 1:], (0, 1), value=IGNORE)


def token_loss(model, hidden, targets, group):
    """Sum of the losses of tokens hidden (b, c, h), each rank holding its part of the vocabulary."""
    if isinstance(model.lm_head.weight, DTensor):  # inside loss_parallel()
        logits = model.lm_head(hidden).flatten(0, 1).float()
        return F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORE, reduction="sum")
    logits = F.linear(hidden, model.lm_head.weight)  # (b, c, v/P)
    start, _ = split(model.config.vocab_size, group.rank(), group.size())
    return vocab_parallel_cross_entropy(logits, targets, start, group).sum()


def mean_loss(model, hidden, labels, group, args):
    """Mean loss over all targets, the same on every rank, from hidden (b, s, h)."""
    targets = shift(labels)
    if not args.dtensor:
        hidden = copy_to_tp_region(hidden, group)  # the head is column parallel
    size = args.length if args.loss == "full" else loss_chunk(args, group.size())
    total = 0
    for h, t in zip(hidden.split(size, 1), targets.split(size, 1)):
        if args.loss == "full":
            total += token_loss(model, h, t, group)
        else:  # logits of one chunk at a time, made again in the backward
            total += checkpoint(token_loss, model, h, t, group, use_reentrant=False)
    return total / (targets != IGNORE).sum()


def hidden_states(model, ids):
    """What the last norm says of ids (b, s): (b, s, h)."""
    return model.model(input_ids=ids, use_cache=False).last_hidden_state


def train_step(model, ids, labels, group, args, backward=True):
    """Loss of ids (b, s), the same on every rank; after it every .grad is complete."""
    with loss_parallel() if args.dtensor else nullcontext():
        loss = mean_loss(model, hidden_states(model, ids), labels, group, args)
        if backward:
            loss.backward()
            sum_shared_gradients(model)
    return whole(loss.detach())


def local_logits(model, ids, group, args):
    """This rank's part of the logits (b, s, v), marked with `part` and `copies` as in keep()."""
    logits = whole(model.lm_head(hidden_states(model, ids)))  # (b, s, v/P); of a DTensor (b, s, v)
    start, end = split(model.config.vocab_size, group.rank(), group.size())
    logits.part, logits.copies = (None, group.size()) if args.dtensor else ((2, start, end), 1)
    return logits


def token_range(length, group):
    """Tokens [start, end) that this rank holds between the blocks, and how many ranks hold the same."""
    return 0, length, group.size()


# ---------------------------------------------------------------------------------------------------
# 5. Sabotage: what people really get wrong, for --inject-bug. Correctness has to catch every one.
# ---------------------------------------------------------------------------------------------------


def missing_backward_all_reduce():
    """f passes its own dx on: every gradient below a block lacks the other ranks' part."""
    CopyToTPRegion.backward = staticmethod(lambda ctx, grad: (grad, None))


def missing_forward_reduction():
    """g passes the partial sum on."""
    ReduceFromTPRegion.forward = staticmethod(lambda ctx, x, group: x)


def all_reduce_both_ways():
    """g all-reduces in the backward too: gradients P times too large at every block."""

    def forward(ctx, x, group):
        ctx.group = group
        return all_reduce(x, group)

    ReduceFromTPRegion.forward = staticmethod(forward)
    ReduceFromTPRegion.backward = CopyToTPRegion.backward


# Copied from tp.py
def wrong_shard():
    """One matrix is cut in the wrong place: layer 0's o_proj holds the next rank's columns."""
    global parallelize
    right = parallelize

    def parallelize(model, group, args):
        weight = model.model.layers[0].self_attn.o_proj.weight
        full = weight.detach().clone()
        right(model, group, args)
        shard = model.model.layers[0].self_attn.o_proj.weight
        shard.data = full.roll(-shard.shape[1], 1).narrow(1, shard.part[1], shard.shape[1]).clone()


# Copied from tp.py
def no_op_parallelize():
    """Nothing is sharded: every rank holds, and computes, everything. All numbers are right."""
    global parallelize, train_step, local_logits

    def parallelize(model, group, args):
        pass

    def train_step(model, ids, labels, group, args, backward=True):
        return reference_step(model, ids, labels)

    def local_logits(model, ids, group, args):
        return model(input_ids=ids, use_cache=False).logits


# Copied from tp.py
def local_softmax():
    """The loss normalises over the rank's own part of the vocabulary."""
    right, alone = VocabParallelCrossEntropy.forward, types.SimpleNamespace(size=lambda: 1)
    VocabParallelCrossEntropy.forward = staticmethod(
        lambda ctx, logits, target, start, group: right(ctx, logits, target, start, alone)
    )


def unmasked_embedding():
    """A token of another rank's rows adds this rank's first row."""
    VocabParallelEmbedding.forward = lambda self, ids: reduce_from_tp_region(
        F.embedding((ids - self.start).clamp(0, len(self.weight) - 1), self.weight), self.group
    )


def loss_by_local_count():
    """The loss is divided by the number of targets in the rank's own part of the vocabulary."""
    global mean_loss
    right = mean_loss

    def mean_loss(model, hidden, labels, group, args):
        start, end = split(args.config.vocab_size, group.rank(), group.size())
        targets = shift(labels)
        local = ((targets >= start) & (targets < end)).sum()
        return right(model, hidden, labels, group, args) * (targets != IGNORE).sum() / local


BUGS = [
    missing_backward_all_reduce,
    missing_forward_reduction,
    all_reduce_both_ways,
    wrong_shard,
    unmasked_embedding,
    local_softmax,
    loss_by_local_count,
    no_op_parallelize,
]


# ---------------------------------------------------------------------------------------------------
# 6. Harness: the modes, word for word the same in all four scripts. ("Copied from" stands in tp.py too,
#    so that a plain diff of two scripts shows what differs and nothing else.)
# ---------------------------------------------------------------------------------------------------

# Copied from tp.py
TOLERANCE = {"float64": 1e-10, "float32": 1e-5}  # correctness: ||a - b|| / ||b||
# Copied from tp.py
BF16_ALL, BF16_ANY = 1.5, 3.0  # error over that of bfloat16 on one device: all gradients, any one tensor
# Copied from tp.py
LEARNING_STEPS, LEARNING_TOLERANCE = 20, {"float64": 1e-9, "float32": 1e-4, "bfloat16": 2e-2}


# Copied from tp.py
class Unusable(Exception):
    """An argument or model that cannot work; its message says what would. Ends as `error: ...`, exit 2."""


# Copied from tp.py
@contextmanager
def float64_islands(dtype):
    """HF drops to float32 in norms, rotary tables, softmax and loss; with dtype float64, lift them to it."""
    wide = types.SimpleNamespace(**{**vars(torch), "float32": torch.float64, "float": torch.float64})
    with ExitStack() as patches:
        if dtype == "float64":
            patches.enter_context(mock.patch.object(modeling_llama, "torch", wide))
            patches.enter_context(mock.patch.object(torch.Tensor, "float", torch.Tensor.double))
        yield


# Copied from tp.py
class Meter(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts collectives and live bytes of all that runs inside it, from below, whoever calls them.

    traffic {op: [calls, bytes]}: bytes of the full message a rank takes part in (all_gather: what comes
    out; reduce_scatter: what goes in; all_to_all: the rank's own input). peak: most bytes of tensors
    alive at once, the model's included.
    """

    OPS = {"allreduce": "all_reduce", "allgather": "all_gather", "reducescatter": "reduce_scatter"}
    OPS |= {"alltoall": "all_to_all", "send": "send"}

    def __init__(self, model):
        super().__init__()
        self.traffic, self.live, self.now, self.peak = {}, {}, 0, 0
        self.hold([*model.parameters(), *model.buffers()])

    def hold(self, tensors):
        for tensor in tensors:
            storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
            if storage._cdata not in self.live:
                self.live[storage._cdata] = storage.nbytes()
                self.now += storage.nbytes()
                weakref.finalize(storage, self.release, storage._cdata)
        self.peak = max(self.peak, self.now)

    def release(self, key):
        self.now -= self.live.pop(key)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(hasattr(kind, "full_tensor") for kind in types):  # a DTensor: what it does underneath counts
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        if set(types) - {torch.Tensor, nn.Parameter}:  # FakeTensor: DTensor works out a shape
            return out
        given, results = ([t for t in tree_leaves(x) if isinstance(t, torch.Tensor)] for x in (args, out))
        self.hold(results)
        name = func._opname.replace("_", "")
        op = next((op for start, op in self.OPS.items() if name.startswith(start)), None)
        if op and func.namespace in ("c10d", "_c10d_functional"):
            if op == "all_to_all":  # c10d names the output before the input
                given, results = given[-1:], []
            entry = self.traffic.setdefault(op, [0, 0])
            entry[0] += 1
            entry[1] += max(t.nbytes for t in given + results)
        return out


# Copied from tp.py
def whole(tensor):
    """The full tensor of a DTensor; any other tensor is what it is."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


# Copied from tp.py
def speaks():
    """Whether this process prints and writes: rank 0, or one that was started by hand."""
    return "LOCAL_RANK" not in os.environ or os.environ["RANK"] == "0"


# Copied from tp.py
def say(*lines):
    """Print on the rank that speaks, with an empty line before."""
    if speaks():
        print("", *lines, sep="\n", flush=True)


# Copied from tp.py
def say_table(*rows):
    """Columns aligned: the first to the left, the others to the right."""
    cells = [[f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells)]
    columns = [f"{{:{'>' if i else '<'}{width}}}" for i, width in enumerate(widths)]
    say(*("  " + "   ".join(columns).format(*row) for row in cells))


# Copied from tp.py
def describe(args, group):
    """One phrase for what runs where."""
    where = f"{group.size()} ranks ({args.backend}, {args.device.type})"
    return f"{variant(args)}, {where}, {args.model}, {args.dtype}, {args.batch} x {args.length} tokens"


# Copied from tp.py
def load_model(args):
    """HF's LlamaForCausalLM, whole, on this rank's device; the same weights on every rank."""
    torch.manual_seed(args.seed)
    how = {"dtype": args.torch_dtype, "attn_implementation": args.attention}
    if args.source is None:
        with args.device:
            return transformers.AutoModelForCausalLM.from_config(args.config, **how).train()
    model = transformers.AutoModelForCausalLM.from_pretrained(**args.source, **how, use_safetensors=True)
    return model.to(args.device).train()


# Copied from tp.py
def run_in_tiles(block, forward, args, x):  # (b, s, h) -> (b, s, h)
    """Run a block that treats each token by itself on a tile of them at a time, each again in the backward.

    What it makes on the way, for an MLP several (b, s, intermediate), then exists for one tile only. The
    narrower a rank's part of the block, the more tokens. (Arctic Long Sequence Training, arXiv 2506.13996)
    """
    width = max(len(p) for p in block.parameters())
    size = max(1, args.tile * args.config.intermediate_size // width // len(x))
    if x.shape[1] <= size:
        return forward(x)
    return torch.cat([checkpoint(forward, tile, use_reentrant=False) for tile in x.split(size, 1)], 1)


# Copied from tp.py
def run_again(forward, args, x, **others):  # (b, s, h) -> (b, s, h)
    """Keep a layer's input only, and run the layer again in the backward; offload: in the host's memory."""
    host = args.recompute == "offload"
    with save_on_cpu(pin_memory=args.device.type == "cuda") if host else nullcontext():
        return checkpoint(forward, x, use_reentrant=False, **others)


# Copied from tp.py
def make_parallel(model, group, args):
    """This rank's share of model, in place, with the recomputation asked for."""
    if args.recompute != "none":
        layers = model.model.layers
        blocks = [b for x in layers for b in (x.input_layernorm, x.post_attention_layernorm, x.mlp)]
        for block in [*blocks, model.model.norm]:
            block.forward = partial(run_in_tiles, block, block.forward, args)
    parallelize(model, group, args)
    if args.recompute != "none":
        for layer in model.model.layers:
            layer.forward = partial(run_again, layer.forward, args)
    return model


# Copied from tp.py
def text_batch(args):
    """ids (b, s) of real text, by the model's own tokenizer where it has one, else its bytes."""
    text = Path(args.text).read_text(errors="replace") if args.text else "".join(topics.values())
    if args.source is None:
        tokens = list(text.encode())
    else:
        tokens = transformers.AutoTokenizer.from_pretrained(**args.source)(text)["input_ids"]
    need = args.batch * args.length
    tokens = (tokens * (need // len(tokens) + 1))[:need]  # a short text is read again
    return torch.tensor(tokens, device=args.device).view(args.batch, args.length) % args.config.vocab_size


# Copied from tp.py
def proof_batch(args):
    """ids and labels (b, s) to compare on: random tokens, or text where real weights make sense of it.

    The first quarter of a sequence is prompt, without targets, and of the next ones more: so that targets
    are spread evenly neither over a sequence nor over the batch.
    """
    if args.source is not None:
        ids = text_batch(args)
    else:
        generator = torch.Generator().manual_seed(args.seed)
        ids = torch.randint(args.config.vocab_size, (args.batch, args.length), generator=generator)
        ids = ids.to(args.device)
    labels = ids.clone()
    for i, row in enumerate(labels):
        row[: args.length * (1 + i % 3) // 4] = IGNORE
    return ids, labels


# Copied from tp.py
def reference_step(model, ids, labels):
    """The same step on the untouched HF model, one device: its own loss, taken to float64.

    PyTorch's float32 cross entropy on a CPU is no reference: with a vocabulary of 49152 and confident
    predictions it alone puts gradients off by up to 1e-3.
    """
    logits = model(input_ids=ids, use_cache=False).logits
    with mock.patch.object(torch.Tensor, "float", torch.Tensor.double):
        loss = model.loss_function(logits=logits, labels=labels, vocab_size=model.config.vocab_size)
    loss.backward()
    return loss.detach()


# Copied from tp.py
def grad_norm(model, group=None):
    """Norm of the gradient of the whole model: what several ranks hold (`copies`) counts once."""
    total = torch.zeros((), dtype=torch.float64)
    for p in model.parameters():
        norm = torch.linalg.vector_norm(whole(p.grad), dtype=torch.float64)
        total += norm.square().cpu() / getattr(p, "copies", 1)
    if group is not None:
        dist.all_reduce(total, group=group)
    return total.sqrt().item()


# Copied from tp.py
@torch.no_grad()
def sgd(model, lr):
    """Plain SGD: Adam would hide a gradient that is too large by a factor."""
    for p in model.parameters():
        p.sub_(p.grad, alpha=lr)
        p.grad = None


# Copied from tp.py
def observe(model, step, logits, tokens, group=None, lr=None):
    """All that correctness compares, in the order of computation.

    That is: the weights as they were sharded ("shard"), logits, loss, gradients from the last layer down,
    and the weights after two SGD steps.

    Tensors come as {(kind, name): (tensor, part, copies)}, part and copies as keep() defines them; tokens
    is what token_range() says. lr: the step that would lower the loss by 5%, were it a straight line.
    """
    seen, embedded, parameters = {}, [], list(model.named_parameters())

    def see(kind, name, tensor, owner):
        seen[kind, name] = whole(tensor.detach()), getattr(owner, "part", None), getattr(owner, "copies", 1)

    def see_embedding(module, ids, out):
        out.retain_grad()
        embedded.append(out)

    for name, p in parameters:
        see("shard", name, p.detach().clone(), p)
    with torch.no_grad():
        out = logits()
    if out is not None:
        see("logits", "logits", out, out)
    hook = model.get_input_embeddings().register_forward_hook(see_embedding)
    loss = step().item()
    hook.remove()
    for _, p in parameters:  # only a sabotaged step leaves one out
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
    norm = grad_norm(model, group)
    lr = lr or 0.05 * loss / norm**2
    for name, p in reversed(parameters):
        see("grad", name, p.grad, p)
    if embedded:
        start, end, copies = tokens
        inputs = torch.cat([e.grad for e in embedded])[:, : end - start]  # SP's last rank may hold padding
        seen["grad", "inputs_embeds"] = inputs, (1, start, end), copies
    sgd(model, lr)
    step()
    sgd(model, lr)
    for name, p in parameters:
        see("weight", name, p, p)
    return {"loss": loss, "grad_norm": norm, "lr": lr, "tensors": seen}


# Copied from tp.py
def compare(seen, expected, rounded, names):
    """Squared errors of this rank's tensors: {(kind, name): (error, size, error of rounded, share)}.

    share is the part of the full tensor that is held here, divided by the ranks that hold the same:
    over all ranks it must come to 1, or something is missing, or was never sharded.
    """

    def square(x):
        return torch.linalg.vector_norm(x, dtype=torch.float64).item() ** 2

    rows = {}
    for (kind, name), (tensor, part, copies) in seen.items():
        key = kind, names.get(name, name)
        full = expected[key][0]
        dim, start, end = part or (0, 0, full.shape[0])
        want = full.narrow(dim, start, end - start)
        own = square(rounded[key][0].narrow(dim, start, end - start).to(want.dtype) - want) if rounded else 0
        error = square(tensor.to(want.dtype) - want) if tensor.shape == want.shape else math.inf
        rows[key] = error, square(want), own, want.numel() / full.numel() / copies
    return rows


# Copied from tp.py
def check_correctness(args, group):
    """Every tensor of a training step on P ranks against the untouched HF model on one device."""
    reference, rounded = load_model(args), None
    model = copy.deepcopy(reference)
    ids, labels = proof_batch(args)
    first = {}  # tied weights go by the first of their names
    for name, p in reference.named_parameters(remove_duplicate=False):
        first.setdefault(p, name)
    names = {name: first[p] for name, p in reference.named_parameters(remove_duplicate=False)}
    if args.dtype == "bfloat16":  # judged by how far bfloat16 itself is from float32
        rounded = copy.deepcopy(reference)
        for p in reference.parameters():
            p.data = p.data.float()

    def alone(model, lr=None):
        def logits():
            return model(input_ids=ids, use_cache=False).logits

        return observe(model, lambda: reference_step(model, ids, labels), logits, (0, args.length, 1), lr=lr)

    expected = alone(reference)
    rounded = rounded and alone(rounded, expected["lr"])["tensors"]
    step = partial(train_step, make_parallel(model, group, args), ids, labels, group, args)
    logits = partial(local_logits, model, ids, group, args)
    seen = observe(model, step, logits, token_range(args.length, group), group, expected["lr"])
    ranks = [None] * group.size()
    dist.all_gather_object(ranks, compare(seen["tensors"], expected["tensors"], rounded, names), group=group)
    return judge(args, group, ranks, expected, seen)


# Copied from tp.py
def judge(args, group, ranks, expected, seen):
    """Put the squared errors of all ranks together, decide, and say so; returns the JSON."""
    bf16, tensors, grads = args.dtype == "bfloat16", [], [0.0, 0.0]
    for kind, name in expected["tensors"]:
        held = {r: rows[kind, name] for r, rows in enumerate(ranks) if (kind, name) in rows}
        error, size, own, owned = (math.fsum(row[i] for row in held.values()) for i in range(4))
        relative, own_relative = (math.sqrt(e / size) if size else float(e > 0) for e in (error, own))
        entry = {"name": name, "kind": kind, "rank": max(held, key=lambda r: held[r][0], default=0)}
        entry |= {"owned": owned, "relative_error": relative if relative >= 0 else math.inf}  # nan: inf
        entry["limit"] = BF16_ANY * own_relative if bf16 else TOLERANCE[args.dtype]
        entry["passed"] = entry["relative_error"] <= entry["limit"] and abs(owned - 1) < 1e-9
        tensors.append(entry)
        if kind == "grad":
            grads = [grads[0] + error, grads[1] + own]
    ratio = math.sqrt(grads[0] / grads[1]) if bf16 else None
    limit = torch.finfo(torch.bfloat16).eps if bf16 else TOLERANCE[args.dtype]
    scalars = [(name, expected[name], seen[name]) for name in ("loss", "grad_norm")]
    wrong = [t["name"] for t in tensors if not t["passed"]]  # still in the order of computation
    off = [name for name, a, b in scalars if not abs(b - a) <= limit * abs(a)]
    if "loss" in off:  # it comes after the logits
        wrong.insert(sum(not t["passed"] and t["kind"] in ("shard", "logits") for t in tensors), "loss")
    wrong += ["grad_norm"] if "grad_norm" in off else []
    wrong += ["all gradients together"] if bf16 and not ratio <= BF16_ALL else []
    worst = sorted(tensors, key=lambda t: -t["relative_error"] / max(t["limit"], 1e-99))

    say(f"correctness: {describe(args, group)}; reference: Hugging Face on one device")
    head = ["", "one device", f"{group.size()} ranks", "relative error"]
    say_table(head, *([name, f"{a:.8g}", f"{b:.8g}", f"{abs(b - a) / abs(a):.1e}"] for name, a, b in scalars))
    tables = {f"worst of {len(tensors)} tensors": worst[: 4 if wrong else 8]}
    if wrong:
        tables["first that are wrong, in order of computation"] = [t for t in tensors if not t["passed"]][:6]
    for title, rows in tables.items():
        head = [title, "kind", "rank", "owned", "relative error", "at most"]
        numbers = ("owned", ".2f"), ("relative_error", ".1e"), ("limit", ".1e")
        rows = [[t["name"], t["kind"], t["rank"], *(f"{t[k]:{form}}" for k, form in numbers)] for t in rows]
        say_table(head, *rows)
    within = f"within {limit:.0e} of one device"
    if bf16:
        within = f"as near to float32 as bfloat16 gets: {ratio:.2f} x one device's error (at most {BF16_ALL})"
    if wrong:
        say(f"FAIL correctness: {len(wrong)} of {len(tensors) + 2} values are wrong, the first: {wrong[0]}")
    else:
        say(f"PASS correctness: loss, logits, all gradients, weights after 2 SGD steps {within}")
    return {
        "passed": not wrong,
        "loss_reference": expected["loss"],
        "loss": seen["loss"],
        "grad_norm_reference": expected["grad_norm"],
        "grad_norm": seen["grad_norm"],
        "worst": {key: worst[0][key] for key in ("name", "relative_error")},
        "tolerance": BF16_ALL if bf16 else limit,
        "bfloat16_ratio": ratio,
        "tensors": tensors,
    }


# Copied from tp.py
def check_learning(args, group):
    """Train on one device (rank 0's) and on P ranks, on the same text: the same losses, and they fall."""
    reference = load_model(args)
    model = make_parallel(copy.deepcopy(reference), group, args)
    ids = text_batch(args)
    alone, ranks, lr = [None] * LEARNING_STEPS, [], None
    for i in tqdm(range(LEARNING_STEPS), "learning", disable=None if speaks() else True):
        ranks.append(train_step(model, ids, ids, group, args).item())
        lr = lr or 0.1 * ranks[0] / grad_norm(model, group) ** 2  # as in observe(), for a fall by 10%
        sgd(model, lr)
        if group.rank() == 0:
            alone[i] = reference_step(reference, ids, ids).item()
            sgd(reference, lr)
    dist.broadcast_object_list(alone, group=group)
    apart = [abs(b - a) / abs(a) for a, b in zip(alone, ranks)]
    fall, need = 1 - ranks[-1] / ranks[0], 0.2 if args.model == "tiny" else 0.0
    limit = LEARNING_TOLERANCE[args.dtype]
    passed = all(error <= limit for error in apart) and fall > need
    say(f"learning: {describe(args, group)}; {LEARNING_STEPS} steps of SGD on the same real text")
    shown = [*range(0, LEARNING_STEPS, 5), LEARNING_STEPS - 1]
    rows = ([str(i), f"{alone[i]:.6f}", f"{ranks[i]:.6f}", f"{apart[i]:.1e}"] for i in shown)
    say_table(["step", "one device", f"{group.size()} ranks", "relative error"], *rows)
    close = f"losses within {max(apart):.1e} of one device's (at most {limit:.0e})"
    say(f"{'PASS' if passed else 'FAIL'} learning: {close}, down by {fall:.0%} (over {need:.0%})")
    return {"passed": passed, "loss_reference": alone, "loss": ranks}


# Copied from tp.py
def synchronize(args, group=None):
    """Wait for the device, and for the other ranks of group."""
    if args.device.type == "cuda":
        torch.cuda.synchronize()
    if group is not None:
        dist.all_reduce(torch.zeros(1), group=group)


# Copied from tp.py
def timed(runs, args, group):
    """Seconds of each run {name: function}, in turn, a fixed number of times; each the slowest rank's.

    Adaptive timing would have ranks stop at different counts, and wait for each other for ever.
    """
    seconds = torch.zeros(args.bench_iters, len(runs), dtype=torch.float64)
    for i in tqdm(range(args.bench_iters), "benchmark", disable=None if speaks() else True):
        for j, run in enumerate(runs.values()):
            synchronize(args, group)
            begin = time.perf_counter()
            run()
            synchronize(args)
            seconds[i, j] = time.perf_counter() - begin
    dist.all_reduce(seconds, dist.ReduceOp.MAX, group=group)
    columns = zip(runs, seconds.T.tolist())
    return {n: {"median": statistics.median(s), "min": min(s), "max": max(s)} for n, s in columns}


# Copied from tp.py
def ledger(args, group, forward, both):
    """Measured beside expected traffic, as rows of the JSON; backward is the whole step less the forward.

    `ranks` says which ranks a row is true of.
    """
    rows = {}
    for phase, op, calls, size in expected_traffic(args.config, group, args):
        row = rows.setdefault((phase, op), [0, 0, 0, 0])
        row[2:] = row[2] + calls, row[3] + size
    for op, (calls, size) in both.traffic.items():
        first = forward.traffic.get(op, (0, 0))
        for phase, measured in (("forward", first), ("backward", (calls - first[0], size - first[1]))):
            if measured[0]:
                rows.setdefault((phase, op), [0, 0, 0, 0])[:2] = measured
    keys = ("count", "bytes", "expected_count", "expected_bytes")
    rows, ranks = [(p, op, *row) for (p, op), row in rows.items()], {}
    everyone = [rows]
    if args.backend != "fake":
        everyone *= group.size()
        dist.all_gather_object(everyone, rows, group=group)
    for rank, rows in enumerate(everyone):
        for row in rows:
            ranks.setdefault(row, []).append(rank)
    return [dict(zip(("phase", "op", *keys), row), ranks=held) for row, held in ranks.items()]


# Copied from tp.py
def check_benchmark(args, group):
    """Time, peak memory and traffic of a step. Traffic is held against expected_traffic(), to the byte."""
    model = make_parallel(load_model(args), group, args)
    ids, labels = proof_batch(args)

    def step(backward, model=model, args=args):
        train_step(model, ids, labels, group, args, backward)
        model.zero_grad()

    if args.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with Meter(model) as forward:  # these two steps warm up, too
        step(False)
    with Meter(model) as both:
        step(True)
    peak = torch.cuda.max_memory_allocated() if args.device.type == "cuda" else both.peak
    peaks = [peak] * (1 if args.backend == "fake" else group.size())
    if args.backend != "fake":
        dist.all_gather_object(peaks, peak, group=group)
    runs = {"forward": partial(step, False), "forward + backward": partial(step, True)}
    for name, other in rivals(args).items():
        rival = make_parallel(load_model(other), group, other)
        runs[f"{name}: forward + backward"] = partial(step, True, rival, other)
    seconds, traffic = timed(runs, args, group), ledger(args, group, forward, both)
    if args.profile:
        with torch.profiler.profile() as trace:
            step(True)
        if speaks():
            write_whole(args.profile, trace.export_chrome_trace)

    median = seconds["forward + backward"]["median"]
    wrong = [t for t in traffic if (t["count"], t["bytes"]) != (t["expected_count"], t["expected_bytes"])]
    say(f"benchmark: {describe(args, group)}; {args.bench_iters} iterations, each the slowest rank's time")
    say_table(["seconds", "median", "min", "max"], *([name, *s.values()] for name, s in seconds.items()))
    what = "allocator" if args.device.type == "cuda" else "live tensors"
    lines = [["tokens a second", f"{args.batch * args.length / median:.0f}"]]
    lines += [[f"time of {n} / this", s["median"] / median] for n, s in list(seconds.items())[2:]]
    lines += [[f"peak memory of each rank, MiB ({what})", " ".join(f"{p / 2**20:.1f}" for p in peaks)]]
    say_table(*lines)
    if traffic:
        head = ["traffic of a rank", "ranks", "calls", "expected", "bytes", "expected"]
        order = ("count", "expected_count", "bytes", "expected_bytes")
        rows = [[f"{t['phase']} {t['op']}", t["ranks"], *(t[key] for key in order)] for t in traffic]
        for row in rows:
            row[1] = "all" if len(row[1]) == len(peaks) else " ".join(map(str, row[1]))
        say_table(head, *rows)
    figures, problems = own_figures(model, partial(step, True), args, group)
    problems = [f"traffic, {t['phase']} {t['op']}" for t in wrong] + problems
    if args.device.type == "cpu":
        say("  (times on a CPU, over gloo: they do not predict a GPU's)")
    if problems:
        say(f"FAIL benchmark: not as expected: {'; '.join(problems)}")
    else:
        say(f"PASS benchmark: {'all traffic as the formula says' if traffic else 'one rank, no traffic'}")
    return {
        "passed": not problems,
        "forward_s": seconds.pop("forward"),
        "forward_backward_s": seconds.pop("forward + backward"),
        "rivals_s": seconds,
        "tokens_per_s": args.batch * args.length / median,
        "peak_memory_bytes": peaks,
        "traffic": traffic,
        **figures,
    }


# Copied from tp.py
def draw(results, path):
    """The picture of --plot: a panel for each mode that ran."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = [mode for mode in ("correctness", "learning", "benchmark") if mode in results]
    panels += [name for name in OWN_PANELS if name in results.get("benchmark", {})]
    figure, axes = pyplot.subplots(1, len(panels), figsize=(6 * len(panels), 4.5), squeeze=False)
    for axis, mode in zip(axes[0], panels):
        axis.spines[["top", "right"]].set_visible(False)
        if mode in OWN_PANELS:
            OWN_PANELS[mode](axis, results["benchmark"][mode])
            continue
        result = results[mode]
        axis.set_title(f"{mode}: {'PASS' if result['passed'] else 'FAIL'}", loc="left")
        if mode == "correctness":
            for kind, marker in (("shard", "v"), ("logits", "^"), ("grad", "o"), ("weight", "s")):
                rows = [
                    (i, t["relative_error"]) for i, t in enumerate(result["tensors"]) if t["kind"] == kind
                ]
                errors = [1e3 if error is None else max(error, 1e-17) for _, error in rows]  # 1e-17: none
                axis.plot([i for i, _ in rows], errors, marker, ms=4, label=kind)
            axis.plot([max(t["limit"], 1e-17) for t in result["tensors"]], "k--", lw=1, label="at most")
            axis.set(yscale="log", xlabel="tensors, in the order of computation")
            axis.set_ylabel("error relative to one device")
        elif mode == "learning":
            axis.plot(result["loss_reference"], lw=6, alpha=0.3, label="one device")
            axis.plot(result["loss"], label=f"{results['world_size']} ranks")
            axis.set(xlabel="step", ylabel="loss")
        elif result["traffic"]:
            places = range(len(result["traffic"]))
            for offset, key in ((-0.2, "bytes"), (0.2, "expected_bytes")):
                sizes = [t[key] / 2**20 for t in result["traffic"]]
                axis.barh([i + offset for i in places], sizes, 0.4, label=key.replace("_", " "))
            axis.set_yticks(places, [f"{t['phase']}\n{t['op']}" for t in result["traffic"]], fontsize=8)
            axis.set_xlabel("MiB a rank and step")
            axis.invert_yaxis()
        if axis.has_data():  # one rank has no traffic to draw
            axis.legend(frameon=False)
    world, model, dtype = (results[key] for key in ("world_size", "model", "dtype"))
    figure.suptitle(f"{results['script']}: {world} ranks, {model}, {dtype}")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


# ---------------------------------------------------------------------------------------------------
# 7. Command line
# ---------------------------------------------------------------------------------------------------

# Copied from tp.py
PRESETS = {  # hidden, intermediate, layers, heads, KV heads, head_dim, vocabulary, tied; weights are random
    "tiny": (64, 192, 8, 8, 4, 8, 256, True),
    "smollm2-135m": (576, 1536, 30, 9, 3, 64, 49152, True),
    "llama-3.2-1b": (2048, 8192, 16, 32, 8, 64, 128256, True),
    "llama-3.2-3b": (3072, 8192, 28, 24, 8, 128, 128256, True),
    "llama-3.1-8b": (4096, 14336, 32, 32, 8, 128, 128256, False),
}


# Copied from tp.py
def preset(name):
    """The LlamaConfig of a preset."""
    keys = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    keys += ("num_key_value_heads", "head_dim", "vocab_size", "tie_word_embeddings")
    sizes = dict(zip(keys, PRESETS[name]))
    spread = 0.8 / math.sqrt(sizes["hidden_size"])  # HF's 0.02 would leave attention of tiny nearly uniform
    return transformers.LlamaConfig(**sizes, initializer_range=spread, max_position_embeddings=1 << 20)


# Copied from tp.py
def find_model(name):
    """(config, from_pretrained's keywords) of a preset, directory, .gguf file or hub id.

    The keywords are None where there are no weights to load: a preset, or a config.json alone.
    """
    if name in PRESETS:
        return preset(name), None
    path, source, presets = (
        Path(name),
        {"pretrained_model_name_or_path": name},
        f"presets: {', '.join(PRESETS)}",
    )
    pickles = path.is_dir() and any(path.glob("*.bin")) and not any(path.glob("*.safetensors"))
    if name.endswith(".gguf"):
        source = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
        if not path.is_file():
            raise Unusable(f"no such file: {name}")
        if not (importlib.util.find_spec("gguf") and importlib.util.find_spec("accelerate")):
            raise Unusable("a .gguf file needs two packages more: pip install gguf accelerate")
    elif pickles:
        raise Unusable(f"the weights in {name} are pickles (.bin); give .safetensors or .gguf")
    elif path.is_dir() and not (path / "config.json").is_file():
        raise Unusable(f"no config.json in the directory {name}")
    elif not path.is_dir() and (name.startswith((".", "/", "~")) or name.count("/") != 1):
        raise Unusable(f"no such model directory: {name} ({presets})")
    elif not path.is_dir() and not hub_answers(name):
        raise Unusable(f"{name}: no such directory, and the hub does not answer ({presets})")
    try:
        config = transformers.AutoConfig.from_pretrained(**source)
    except Exception as problem:  # of many kinds, by what is wrong in the file
        raise Unusable(f"cannot read the model {name}: {first_line(problem)}") from None
    if config.model_type != "llama":
        raise Unusable(f"{name} has model_type {config.model_type}; these scripts take llama")
    for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"):
        size, least = getattr(config, key), 2 if key == "vocab_size" else 1  # of one word nothing is learnt
        if type(size) is not int or size < least:
            raise Unusable(f"{key} is {size} in {name}; a whole number of at least {least} would do")
    try:  # shapes without memory
        with torch.device("meta"), torch.no_grad():
            model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
            model(inputs_embeds=torch.empty(1, 2, config.hidden_size))
    except Exception as problem:
        raise Unusable(f"transformers cannot run the model {name}: {first_line(problem)}") from None
    return config, None if path.is_dir() and not any(path.glob("*.safetensors")) else source


# Copied from tp.py
def first_line(problem):
    """What an exception says, in one line."""
    return f"{type(problem).__name__}: {problem}".splitlines()[0]


# Copied from tp.py
def hub_answers(name):
    """Whether the hub can be asked for a model; one that is already in its cache needs no asking."""
    if isinstance(huggingface_hub.try_to_load_from_cache(name, "config.json"), str):
        return True
    try:
        urllib.request.urlopen(huggingface_hub.constants.ENDPOINT, timeout=10)
    except OSError as problem:
        return isinstance(problem, urllib.error.HTTPError)  # an answer, if not a friendly one
    return True


# Copied from tp.py
class Parser(argparse.ArgumentParser):
    """argparse, with its complaint raised instead of printed with the usage."""

    def error(self, message):
        raise Unusable(message)


# Copied from tp.py
def positive(text):
    """A whole number of at least 1, for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1")
    return int(text)


# Copied from tp.py
def parse(argv):
    """The arguments, checked as far as can be without starting anything."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--mode", choices=["correctness", "learning", "benchmark", "all", *OWN_MODES], default="correctness")
    add("--model", default="tiny", help=f"{', '.join(PRESETS)}, a hub id, a local directory, a .gguf file")
    add("--length", type=positive, default=256, help="tokens a sequence (256)")
    add("--batch", type=positive, default=1, help="sequences (1; pp.py: as many as microbatches)")
    add("--dtype", choices=["float32", "bfloat16", "float64"], default="float32")
    add("--attn", choices=["auto", "sdpa", "eager", "flash"], default="auto", help="auto: sdpa")
    add("--loss", choices=["chunked", "full"], default="chunked", help="chunked: full logits never exist")
    again = "block: keep only layers' inputs, and run layers again; offload: keep those in the host's memory"
    add("--recompute", choices=["block", "offload", "none"], default="block", help=again)
    add("--tile", type=positive, default=16384, help="tokens an MLP takes at a time, if recomputed (16384)")
    fake = "fake: this one process is rank $RANK of $WORLD_SIZE and its peers are silent"
    add("--backend", choices=["auto", "gloo", "nccl", "fake"], default="auto", help=fake)
    add("--bench-iters", type=positive, metavar="N", help="default 5; 1 on a CPU above 8192 tokens")
    add("--seed", type=int, default=0, help="of random weights and tokens (0)")
    add("--timeout", type=positive, default=600, metavar="S", help="seconds to wait for another rank (600)")
    add("--text", metavar="FILE", help="what to learn (Python's own help topics)")
    add("--json", metavar="FILE", help="write the results")
    add("--plot", metavar="FILE", help="draw them")
    add("--profile", metavar="FILE", help="benchmark: write a trace of one step, for ui.perfetto.dev")
    add("--inject-bug", metavar="NAME", help="run with a bug that correctness must catch; list: name them")
    add_options(parser)
    args = parser.parse_args(argv)
    args.store, args.over = None, threading.Event()
    if args.inject_bug not in (None, "list", *(bug.__name__ for bug in BUGS)):
        raise Unusable(f"no bug {args.inject_bug}; --inject-bug list names them")
    if args.length < 2:
        raise Unusable("--length 1 has no next token to predict; 2 would do")
    if args.backend == "fake" and args.mode != "benchmark":
        raise Unusable("--backend fake computes no real values: --mode benchmark only")
    if args.profile and args.mode not in ("benchmark", "all"):
        raise Unusable("--profile needs --mode benchmark or all")
    for path in (args.json, args.plot, args.profile):
        if path and (Path(path).is_dir() or not os.access(Path(path).absolute().parent, os.W_OK)):
            raise Unusable(f"cannot write {path}: a directory, or in none that can be written")
    if args.text and not (os.path.isfile(args.text) and os.path.getsize(args.text)):
        raise Unusable(f"--text {args.text}: no such file, or empty")
    return args


# Copied from tp.py
def start(args):
    """Choose the device, read the model's config, join the other ranks; returns the process group.

    Until args.over is set a thread says where this rank is, for the case that another waits for it in vain.
    """
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local, neighbours = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    gpus = torch.cuda.device_count()
    if args.backend == "auto":
        args.backend = "nccl" if gpus >= neighbours else "gloo"
    if args.backend == "nccl" and gpus < neighbours:
        raise Unusable(
            f"--backend nccl needs {neighbours} GPUs here, a GPU a rank, and there are {gpus}; try gloo"
        )
    if args.inject_bug and world == 1:
        raise Unusable("--inject-bug needs at least 2 ranks; on one nothing is parallel")
    cuda = args.backend == "nccl" or (args.backend == "fake" and gpus > 0)
    flash = importlib.util.find_spec("flash_attn") is not None
    if args.attn == "flash" and not (cuda and flash and args.dtype == "bfloat16"):
        raise Unusable("--attn flash needs a GPU, the package flash-attn and --dtype bfloat16; sdpa does not")
    args.attention = {"auto": "sdpa", "flash": "flash_attention_2"}.get(args.attn, args.attn)
    args.device = torch.device("cuda", local) if cuda else torch.device("cpu")
    args.torch_dtype = getattr(torch, args.dtype)
    args.bench_iters = args.bench_iters or (1 if not cuda and args.length > 8192 else 5)
    args.config, args.source = find_model(args.model)
    check_shape(args, world)
    if cuda:
        torch.cuda.set_device(args.device)
    args.wait = datetime.timedelta(seconds=args.timeout)
    if args.backend == "fake":
        store = fake_pg.FakeStore()
    elif "RANK" not in os.environ:
        store = dist.HashStore()
    else:
        store = next(dist.rendezvous("env://", timeout=args.wait))[0]
        args.store = dist.PrefixStore("signs", store)
        args.store.set(f"at {rank}", "start")
        args.store.set(f"process {rank}", f"{socket.gethostname()} {os.getpid()}")
        threading.Thread(target=give_signs, args=(args.store, rank, args.over), daemon=True).start()
    backend = "cpu:gloo,cuda:nccl" if args.backend == "nccl" else args.backend
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=args.wait)
    if world == 1:
        say(f"one rank; for more: torchrun --nproc_per_node=2 {' '.join(sys.argv)}")
    return dist.group.WORLD


# Copied from tp.py
def write_whole(path, write):
    """Have write(another path) make the file, then name it path: whole or not at all, or Unusable."""
    draft = f"{path}.{os.getpid()}{Path(path).suffix}"
    try:
        write(draft)
        os.replace(draft, path)
    except (OSError, ValueError) as problem:  # a full disk; a picture of a kind that matplotlib lacks
        raise Unusable(f"cannot write {path}: {problem}") from None
    finally:
        Path(draft).unlink(missing_ok=True)


# Copied from tp.py
def run(args, group):
    """Run the modes asked for and write what was asked for; returns whether all held."""
    for bug in BUGS:
        if bug.__name__ == args.inject_bug:
            say(f"with the bug {bug.__name__}: {bug.__doc__}")
            bug()
    modes = {"correctness": check_correctness, "learning": check_learning, "benchmark": check_benchmark}
    modes = modes if args.mode == "all" else {args.mode: modes[args.mode]}
    versions = {"python": sys.version.split()[0]} | {m.__name__: m.__version__ for m in (torch, transformers)}
    results = {
        "script": Path(__file__).name,
        "strategy": STRATEGY,
        "world_size": group.size(),
        "versions": versions,
    }
    results |= {k: v for k, v in vars(args).items() if isinstance(v, str | int | float | None)}
    with float64_islands(args.dtype):
        results |= {"device": args.device.type, **{mode: check(args, group) for mode, check in modes.items()}}
    results = json.loads(json.dumps(results), parse_constant=lambda name: None)  # JSON has no NaN: null
    failed = [mode for mode in modes if not results[mode]["passed"]]
    if len(modes) > 1:
        say(f"FAIL {STRATEGY}: {', '.join(failed)}" if failed else f"PASS {STRATEGY}: {', '.join(modes)}")
    if speaks() and args.json:
        write_whole(args.json, lambda path: Path(path).write_text(json.dumps(results, indent=1) + "\n"))
    if speaks() and args.plot:
        write_whole(args.plot, partial(draw, results))
    synchronize(args, group)  # no rank leaves, and ends the others, before rank 0 has written
    return not failed


# Copied from tp.py
def place(stack):
    """Where in this file a stack (of traceback.walk_tb) is: "check_correctness > observe > train_step"."""
    codes = [frame.f_code for frame, _ in stack]
    names = [code.co_name for code in codes if code.co_filename == place.__code__.co_filename]
    return " > ".join(name for name in names if name not in ("<module>", "main", "run", "<dictcomp>"))


# Copied from tp.py
def give_signs(store, rank, over):
    """A thread: says again and again, in the store that all ranks share, where this rank is."""
    thread = threading.main_thread().ident
    while not over.wait(0.2):
        # At once, and reading no file: the tensors of a frame that is looked at count in the peak memory
        here = place(reversed([*traceback.walk_stack(sys._current_frames()[thread])]))
        store.set(f"at {rank}", here)


# Copied from tp.py
def explain(problem, args):
    """Say why this rank cannot go on: by itself, or because it waited in vain, and for whom."""
    rank, world, text = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)), str(problem)
    here, store = place(traceback.walk_tb(problem.__traceback__)), getattr(args, "store", None)
    in_vain = re.search("timed? ?out", text, re.IGNORECASE)
    cut_off = re.search("peer|closed|reset|broken pipe", text, re.IGNORECASE)

    def known(key):
        return store.get(key).decode() if store.check([key]) else "no place"

    if store is not None and (in_vain or cut_off):
        store.set(f"gave up {rank}", f"{'waited' if in_vain else 'was cut off'} in {here}")
        time.sleep(3)  # the others give up at about the same time
        gave_up = [known(f"gave up {r}") for r in range(world)]
        if in_vain and not any(r.startswith("waited") for r in gave_up[:rank]):  # one speaks for all
            lost = [r for r in range(world) if gave_up[r] == "no place"]
            for r in lost:
                said = f"error: rank {r} did not answer for {args.timeout} s (--timeout)"
                said += f", last seen in {known(f'at {r}')}; rank {rank} waited in {here}"
                print(said, file=sys.stderr, flush=True)
                host, pid = known(f"process {r}").split()  # "no place" where it never came so far
                if host == socket.gethostname():  # torchrun would wait half a minute more for a stopped one
                    os.kill(int(pid), signal.SIGKILL)
            if not lost:  # they wait for one another, or one came too late
                said = "; ".join(f"rank {r} {other}" for r, other in enumerate(gave_up))
                said = f"error: no answer for {args.timeout} s (--timeout), yet all ranks live: {said}"
                print(said, file=sys.stderr, flush=True)
            return 1
        time.sleep(7)  # the rank that is to blame says so, or torchrun names it, and ends us
    traceback.print_exception(problem)
    print(f"error: rank {rank} failed in {here}: {type(problem).__name__}", file=sys.stderr, flush=True)
    return 1


# Copied from tp.py
def main(argv=None):
    """Returns the exit status: 0 all held, 1 a check failed, 2 unusable arguments or model."""
    transformers.logging.set_verbosity_error()
    if not speaks():
        transformers.logging.disable_progress_bar()
    # torch 2.13 renames all_gather_into_tensor and reduce_scatter_tensor; 2.11 knows only these names
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    args = None
    try:
        args = parse(argv)
        if args.inject_bug == "list":
            say(*(f"  {bug.__name__:28} {bug.__doc__}" for bug in BUGS))
            return 0
        if args.mode in OWN_MODES:
            return 0 if OWN_MODES[args.mode](args) else 1
        return 0 if run(args, start(args)) else 1
    except Unusable as problem:
        if speaks():
            print(f"error: {problem}", file=sys.stderr)
        else:
            time.sleep(30)  # torchrun ends all ranks as soon as one goes: let rank 0 speak first
        return 2
    except Exception as problem:
        return explain(problem, args)
    finally:
        if args:
            args.over.set()
        if dist.is_initialized():
            dist.destroy_process_group()
            gc.collect()  # gloo's threads must end before Python does, and garbage still holds the group


OWN_MODES, OWN_PANELS = {}, {}  # modes and pictures that no other script has


def add_options(parser):
    """The script's own options."""
    parser.add_argument("--dtensor", action="store_true", help="PyTorch's parallelize_module, same modes")


def variant(args):
    """What runs, in the report's words."""
    return "tp --dtensor" if args.dtensor else STRATEGY


# Copied from tp.py
def own_figures(model, step, args, group):
    """What benchmark mode measures in this script alone: nothing. (Figures for the JSON, what was wrong.)"""
    return {}, []


def rivals(args):
    """What benchmark mode times in turn with it: {name: arguments}."""
    return {"manual": argparse.Namespace(**{**vars(args), "dtensor": False})} if args.dtensor else {}


if __name__ == "__main__":
    sys.exit(main())
