"""Ulysses sequence parallelism for LLaMA in one file: arXiv 2309.14509 on HF's model.

The lesson is the first 420 lines, to "The lesson ends here". Begin at ulysses_attention() and
final_hidden_states(). The rest proves and measures; sections 5 and 6 are the same in all four
scripts.

Each of P ranks holds the activations of s/P of the s tokens, and all weights. Norms, projections
and MLP treat each token by itself, and need no other rank. Attention alone mixes tokens, but treats
each head by itself, so a rank gets 1/P of the heads of all tokens. Here is an attention of b
sequences, P = 2; h is hidden_size, d is the size of a head; k and v have fewer heads, the KV heads:

    rank 0: tokens 0..s/2       rank 1: tokens s/2..s        (b, s/2, h)
    q, k, v projections         q, k, v projections          replicated weights, all heads
        |                               |
    (b, heads, s/2, d)          (b, heads, s/2, d)           q and k are rotated by position
        |        all-to-all, each of q, k, v    |            backward: all-to-all back
        v                                       v
    (b, heads/2, s, d)          (b, heads/2, s, d)           all tokens, own heads
    attention: heads 0..        attention: heads heads/2..   HF's own: sdpa, eager or flash
    (b, s, heads/2, d)          (b, s, heads/2, d)           returned with tokens before heads
        |        all-to-all                     |            backward: all-to-all back
        v                                       v
    (b, s/2, heads, d)          (b, s/2, heads, d)           all heads of own tokens
    o projection                o projection
        |                               |
    rank 0: tokens 0..s/2       rank 1: tokens s/2..s        (b, s/2, h)

    messages of a layer           forward          backward         recomputed
    q: (b, s/P, heads d)          all-to-all       all-to-all       all-to-all
    k, v: (b, s/P, KV heads d)    2 all-to-alls    2 all-to-alls    2 all-to-alls
    attention's output, as q      all-to-all       all-to-all       all-to-all

A rank sends (P-1)/P of each, and keeps the rest. They are of s/P tokens, not of all s as in tp.py
and sp_megatron.py, so they shrink as 1/P. These shapes assume that P divides the KV heads. If not,
each rank gets whole KV heads with their query heads, some ranks one KV head more. If P is a
multiple of the KV heads, k and v are repeated to P heads: several ranks have the same KV head, and
divide the query heads that read it.

    messages of a step            forward                      backward
    by default                    all-reduce of the loss       all-reduce of each gradient
    with --shard-weights          all-gather of all weights,   all-gather of all weights,
                                  all-reduce of the loss       reduce-scatter of all gradients

Each rank holds all weights and gradients. --shard-weights leaves 1/P of them on a rank, and so 1/P
of the optimizer's state (ZeRO-3). A layer's weights are whole only around the time when it runs,
those of embedding and head during all of the forward, and again during all of the backward.
--recompute full, the default, keeps only each layer's input, (b, s/P, h); none keeps all
activations.

    torchrun --nproc_per_node=2 sp_ulysses.py --mode correctness
    torchrun --nproc_per_node=4 sp_ulysses.py --mode all --length 1001
    torchrun --nproc_per_node=2 sp_ulysses.py --length 20480 --batch 1 --mode benchmark
    torchrun --nproc_per_node=2 sp_ulysses.py --mode all --shard-weights
    torchrun --nproc_per_node=2 labs/break_it.py sp_ulysses.py local_position_ids
    diff sp_megatron.py sp_ulysses.py     # two ways to give attention all tokens

notebooks/explorer.html#walk&sp_ulysses shows a step of this file line by line, on every rank.
"""

# ---- 1. Imports ----------------------------------------------------------------------------------

# For the lesson
import copy
import math
import sys
from functools import partial
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

# isort: split
# For the proof and the command line
import argparse
import datetime
import faulthandler
import gc
import importlib
import json
import os
import signal
import statistics
import time
import weakref
from collections import Counter
from itertools import product
from pathlib import Path
from unittest import mock

from torch.distributed.elastic.multiprocessing.errors import record
from torch.testing._internal.distributed import fake_pg  # noqa: F401  registers --backend fake
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

IGNORE = -100  # the label of a token that the loss skips, in PyTorch and Hugging Face
LOSS_CHUNK = 2048  # --loss chunked: tokens in a chunk, but at least one of each sequence


# ---- 2. Communication: an all-to-all, whose backward is another ----------------------------------


def all_to_all(x, send, receive, group):
    """send[r] rows of x (dim 0) go to rank r, receive[r] rows come from rank r."""
    if group.size() == 1:
        return x
    out = x.new_empty(sum(receive), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), receive, send, group=group)
    return out


class SeqAllToAll(torch.autograd.Function):
    """all_to_all(), whose backward swaps the counts, because a row's gradient returns to the rank
    that the row came from. (DeepSpeed's name.)"""

    @staticmethod
    def forward(ctx, x, send, receive, group):
        ctx.send, ctx.receive, ctx.group = send, receive, group
        return all_to_all(x, send, receive, group)

    @staticmethod
    def backward(ctx, grad):
        return all_to_all(grad, ctx.receive, ctx.send, ctx.group), None, None, None


def tokens_to_heads(x, counts, group):
    """(b, heads, s/P, d), all heads of own tokens -> (b, heads/P, s, d), own heads of all tokens.
    counts[r]: heads of rank r, not always equal: see head_range()."""
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


# ---- 3. Sharding LLaMA and its relatives, and what is kept for the backward ----------------------


# Copied from tp.py
def shard_range(n, rank, world):
    """[start, end): a rank's share of n things. The first n % world ranks have one more."""
    base, extra = divmod(n, world)
    return rank * base + min(rank, extra), (rank + 1) * base + min(rank + 1, extra)


# Copied from tp.py
def head_range(config, rank, world):
    """[q0, q1), [k0, k1): a rank's query heads, and the KV heads that these read. With more ranks
    than KV heads, several ranks have the same KV head, and divide its query heads."""
    kv_heads = config.num_key_value_heads
    per_kv = config.num_attention_heads // kv_heads  # query heads that read a KV head
    sharing = max(1, world // kv_heads)  # ranks that have the same KV head
    k0, k1 = shard_range(kv_heads, rank // sharing, world // sharing)
    q0, q1 = shard_range((k1 - k0) * per_kv, rank % sharing, sharing)
    return (k0 * per_kv + q0, k0 * per_kv + q1), (k0, k1)


def head_counts(config, world):
    """How many query heads, and how many KV heads, each rank attends with: two lists."""
    ranges = [head_range(config, rank, world) for rank in range(world)]
    return [q1 - q0 for (q0, q1), _ in ranges], [k1 - k0 for _, (k0, k1) in ranges]


def ulysses_attention(attend, own_heads, module, query, key, value, mask, **others):
    """HF's attention function `attend`, with all-to-alls before and after it. module is the layer's
    self_attn; own_heads is what attend gets in its place.

    query (b, heads, s/P, d), key and value (b, KV heads, s/P, d) -> (b, s/P, heads, d).
    """
    group = module.group  # set by attend_with_ulysses()
    q_counts, kv_counts = head_counts(module.config, group.size())
    # A KV head is repeated for each rank that has it; the backward sums their gradients
    sharing = max(1, group.size() // module.config.num_key_value_heads)
    if sharing > 1:
        key, value = (x.repeat_interleave(sharing, 1) for x in (key, value))
    query = tokens_to_heads(query, q_counts, group)
    key, value = (tokens_to_heads(x, kv_counts, group) for x in (key, value))
    out, probabilities = attend(own_heads, query, key, value, mask, **others)
    return heads_to_tokens(out, q_counts, group), probabilities  # out: (b, s, heads/P, d)


def attend_with_ulysses(model, group):
    """Have HF's model call ulysses_attention(). Who calls whom:

    layer.self_attn      projects q, k, v, rotates q and k, and calls the function with the
                         name in its config: "sdpa" before this call, "ulysses" after it
    ulysses_attention    all-to-alls around the function that was called before:
    attend               HF's own. It gets own_heads in the place of self_attn, with the original
                         config ("sdpa") and this rank's num_key_value_groups
    """
    config = model.config
    eager = sys.modules[type(model).__module__].eager_attention_forward  # each family's own
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(config._attn_implementation, eager)
    (q0, q1), (k0, k1) = head_range(config, group.rank(), group.size())
    own_heads = SimpleNamespace(config=config, is_causal=True, training=True)
    own_heads.num_key_value_groups = (q1 - q0) // (k1 - k0)  # of this rank
    attention = partial(ulysses_attention, attend, own_heads)
    transformers.AttentionInterface.register("ulysses", attention)
    with_ulysses = copy.copy(config)  # own_heads and layer_masks() need the kernel's name
    with_ulysses._attn_implementation = "ulysses"
    for layer in model.model.layers:
        layer.self_attn.config, layer.self_attn.group = with_ulysses, group


class UlyssesLlama(nn.Module):
    """HF's decoder and head under HF's names. The loss is computed inside forward(), since with
    --shard-weights the head is whole only during forward() and its backward."""

    def __init__(self, model):
        super().__init__()
        self.model, self.lm_head, self.config = model.model, model.lm_head, model.config

    def forward(self, ids, labels, group, args):
        """This rank's share of the mean loss of ids (b, s); without labels its logits."""
        hidden = final_hidden_states(self, ids, group)
        if labels is None:
            return self.lm_head(hidden)
        return mean_loss(self, hidden, labels, group, args)


def shard_weights(model, group, args):
    """Leave 1/P of every weight, and of its gradient, on each rank, by rows (arXiv 1910.02054).

    PyTorch's fully_shard gathers a layer's weights before its forward, frees them after it, gathers
    them again before its backward, and reduce-scatters the gradients after that. What is in no
    layer (embedding, last norm, head) is gathered for the forward and backward of the whole model.
    """
    mesh = DeviceMesh.from_group(group, args.device.type)
    for unit in (*model.model.layers, model):
        fully_shard(unit, mesh=mesh, reshard_after_forward=True)
        # A plain sum over ranks, because each has a share of the loss; the default is a mean
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum


def mark_gradients(model, group, args):
    """Mark each parameter with the number of ranks that hold it (replicas), and with the group over
    which its gradient has to be summed (sum_over; None if it is complete).

        weight                   held by     its gradient on a rank          summed over
        by default               all ranks   of its own tokens               all ranks
        with --shard-weights     by rows     complete: fully_shard sums it   -
    """
    for parameter in model.parameters():
        parameter.replicas, parameter.sum_over = group.size(), group
        if args.shard_weights:
            parameter.replicas, parameter.sum_over = 1, None
            # For the proof: which rows this rank has
            rows = math.ceil(len(parameter) / group.size())
            start, end = (min(r * rows, len(parameter)) for r in (group.rank(), group.rank() + 1))
            parameter.shard = 0, start, end  # dim 0


# Copied from tp.py
def recompute_layers(model):
    """Keep each layer's input only. The layer's backward first runs its forward again, collectives
    included, up to the last tensor that the backward needs (arXiv 1604.06174)."""
    for layer in model.model.layers:  # HF's layers checkpoint themselves if these two are set
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)


def parallelize(model, group, args):
    """Change HF's model so that its attention spans all ranks."""
    attend_with_ulysses(model, group)
    if args.recompute == "full":
        recompute_layers(model)
    model = UlyssesLlama(model)
    if args.shard_weights:
        shard_weights(model, group, args)
    mark_gradients(model, group, args)
    return model


# ---- 4. Loss and training ------------------------------------------------------------------------


def own_tokens(x, group, padding):
    """This rank's tokens (b, s/P) of x (b, s). If P does not divide s, padding is at the end, where
    the causal mask hides it from real tokens, and the loss ignores it."""
    x = F.pad(x, (0, -x.shape[1] % group.size()), value=padding)
    return x.chunk(group.size(), 1)[group.rank()]


def sum_of_losses(model, hidden, targets):
    """Sum of -log softmax(logits)[target] of hidden (b, c, h), c tokens of each sequence. A token
    whose target is IGNORE adds nothing. (F.cross_entropy rounds more: 3e-6 in float32 on CPUs.)"""
    logits = model.lm_head(hidden)  # (b, c, v)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logits = logits - logits.detach().max(-1, keepdim=True).values  # at most 0: exp stays finite
    ignored = targets == IGNORE
    target_logit = logits.gather(-1, targets.masked_fill(ignored, 0)[..., None])[..., 0]
    loss = logits.exp().sum(-1).log() - target_logit  # (b, c)
    return loss.masked_fill(ignored, 0).sum()


def mean_loss(model, hidden, labels, group, args):
    """This rank's share of the mean loss over all targets, from its hidden (b, s/P, h)."""
    chunk = hidden.shape[1] if args.loss == "full" else max(1, LOSS_CHUNK // len(hidden))
    # A token's target is the next token. Shift before the split, since a rank's last token predicts
    # the next rank's first
    targets = F.pad(labels[:, 1:], (0, 1), value=IGNORE)
    count = (targets != IGNORE).sum()  # of all s tokens, since each rank has all labels
    targets = own_tokens(targets, group, IGNORE)
    total = 0
    for some, target in zip(hidden.split(chunk, 1), targets.split(chunk, 1)):
        if args.loss == "full":
            total += sum_of_losses(model, some, target)
        else:  # logits of one chunk at a time, recomputed in the backward
            total += checkpoint(sum_of_losses, model, some, target, use_reentrant=False)
    return total / count


# Copied from sp_megatron.py
def layer_masks(config, hidden, s):
    """Each layer's attention mask for all s tokens, padding included, made by HF's own functions.
    It is None where the attention kernel masks by itself."""
    all_tokens = hidden.new_empty(len(hidden), s, 0)  # HF reads shape, dtype and device
    kinds = ["full_attention"] * config.num_hidden_layers
    if config.model_type == "mistral" and config.sliding_window is not None:  # has no layer_types
        kinds = ["sliding_attention"] * config.num_hidden_layers
    elif config.model_type in ("qwen2", "qwen3", "smollm3"):
        kinds = config.layer_types
    make = {"full_attention": create_causal_mask}
    make["sliding_attention"] = create_sliding_window_causal_mask
    masks = {kind: make[kind](config, all_tokens, None, None) for kind in set(kinds)}
    return [masks[kind] for kind in kinds]


def final_hidden_states(model, ids, group):
    """Output of the final norm for this rank's tokens, (b, s/P, h). ids (b, s): all tokens.

    This is the forward of HF's decoder, written out: attention sees all tokens, so the masks are of
    all tokens. HF's own forward would make them for the s/P that it sees, and number these from 0.
    """
    decoder, length, world = model.model, ids.shape[1], group.size()
    hidden = decoder.embed_tokens(own_tokens(ids, group, 0))  # (b, s/P, h)
    # Padding gets the last token's position, and cos and sin are computed for all tokens, because
    # some rotary embeddings (longrope, dynamic) choose frequencies by the largest position
    padded = world * hidden.shape[1]
    positions = torch.arange(padded, device=ids.device).clamp(max=length - 1)
    rotary = decoder.rotary_emb(hidden, positions[None])  # cos and sin, (1, s, d)
    # Own tokens; a copy, because a view would keep those of all s in memory
    rotary = [x.chunk(world, 1)[group.rank()].clone() for x in rotary]
    masks = layer_masks(model.config, hidden, padded)
    for layer, mask in zip(decoder.layers, masks):
        hidden = layer(hidden, attention_mask=mask, position_embeddings=rotary)  # (b, s/P, h)
    return decoder.norm(hidden)


def forward_backward(model, ids, labels, group, args, backward=True):
    """Mean loss of ids (b, s) and unshifted labels (b, s); it is the same on every rank. Leaves
    complete gradients in .grad, which has to be None before, or old parts would be summed again."""
    share = model(ids, labels, group, args)
    loss = share.detach().clone()
    if group.size() > 1:
        dist.all_reduce(loss, group=group)  # the sum of the ranks' shares
    if backward:
        share.backward()
        sum_gradients(model)
    return loss


# Copied from tp.py
def sum_gradients(model):
    """Sum each gradient of which a rank has only a part, over the group that it is marked with."""
    for parameter in model.parameters():
        if parameter.sum_over is not None and parameter.sum_over.size() > 1:
            dist.all_reduce(parameter.grad, group=parameter.sum_over)


def grad_norm(model, group):
    """Norm of the whole model's gradient, in which replicas count once."""
    total = 0
    for p in model.parameters():
        # With --shard-weights gradients are DTensors, PyTorch's tensors that are divided over ranks
        grad = p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
        total += torch.linalg.vector_norm(grad, dtype=torch.float64).square() / p.replicas
    dist.all_reduce(total, group=group)
    return total.sqrt()


# Copied from tp.py
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


# ---- What sections 5 and 6 need from this script -------------------------------------------------

STRATEGY = "sp_ulysses"
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "smollm3", "olmo2")  # model_type
OPTIONS = {"--shard-weights": {"action": "store_true", "help": "1/P on each rank (ZeRO-3)"}}
# Copied from tp.py
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
SIZES += ("num_key_value_heads", "vocab_size", "tie_word_embeddings")
# Copied from tp.py
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


# Copied from tp.py
class UsageError(Exception):
    """Arguments or a model that cannot work; the message says what to use instead."""


# Copied from tp.py
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
    if args.shard_weights and world == 1:
        raise UsageError("--shard-weights needs another rank to share weights with; use 2")


def local_logits(model, ids, group, args):
    """Logits of this rank's tokens, (b, s/P, v), marked as mark_gradients() marks a weight."""
    length = ids.shape[1]
    size = math.ceil(length / group.size())
    start, end = (min(rank * size, length) for rank in (group.rank(), group.rank() + 1))
    logits = model(ids, None, group, args)[:, : end - start]  # without padding
    logits.shard, logits.replicas = (1, start, end), 1
    return logits


def expected_traffic(model, group, args):
    """What one forward_backward() must send: rows (phase, op, calls, their message bytes)."""
    if group.size() == 1:
        return []
    world, layers = group.size(), model.config.num_hidden_layers
    element = getattr(torch, args.dtype).itemsize
    q_counts, kv_counts = head_counts(model.config, world)
    head_dim = model.model.layers[0].self_attn.head_dim
    head = args.batch * math.ceil(args.length / world) * head_dim * element  # of own tokens
    # The message of an all-to-all is its input. q, kv: all heads of own tokens; own_q, own_kv: own
    # heads of all tokens, which is another size if the ranks have unequal heads
    q, kv = sum(q_counts) * head, sum(kv_counts) * head
    own_q, own_kv = (n[group.rank()] * world * head for n in (q_counts, kv_counts))
    forward = layers * (q + 2 * kv + own_q)  # q, k, v; then the output of own heads
    rows = [
        ("forward", "all_to_all", 4 * layers, forward),
        ("backward", "all_to_all", 4 * layers, layers * (own_q + 2 * own_kv + q)),
        ("forward", "all_reduce", 1, max(4, element)),  # the loss, in float32 or wider
    ]
    if args.recompute == "full":  # the forward of each layer again, all 4
        rows.append(("backward", "all_to_all", 4 * layers, forward))
    weights = list(model.parameters())
    if args.shard_weights:  # a message for each layer, one for the rest; rows are padded
        rows_of = {p: math.ceil(len(p) / world) * world for p in weights}
        size = sum(p.numel() // len(p) * n for p, n in rows_of.items()) * element
        rows.append(("forward", "all_gather", layers + 1, size))
        rows.append(("backward", "all_gather", layers + 1, size))
        rows.append(("backward", "reduce_scatter", layers + 1, size))  # the gradients
    else:
        size = sum(p.numel() for p in weights) * element
        rows.append(("backward", "all_reduce", len(weights), size))  # each gradient
    return rows


# Copied from tp.py
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
