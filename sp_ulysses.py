"""Ulysses sequence parallelism for LLaMA in one file (DeepSpeed, arXiv 2309.14509) on HF's model.

Each of P ranks holds the activations of s/P of the s tokens, and all weights. Norms, projections
and MLP treat each token by itself, and need no other rank. Attention alone mixes tokens, but treats
each head by itself, so a rank gets 1/P of the heads of all tokens. An attention, P = 2:

    rank 0: tokens 0..s/2       rank 1: tokens s/2..s        (b, s/2, h)
    q, k, v projections         q, k, v projections          replicated weights, all heads
        |                               |
    (b, heads, s/2, d)          (b, heads, s/2, d)           q, k rotated; k, v have KV heads
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

    messages of a layer           forward          backward         recomputed (--recompute full)
    q, (b, s/P, heads d)          all-to-all       all-to-all       all-to-all
    k and v, smaller with GQA     2 all-to-alls    2 all-to-alls    2 all-to-alls
    attention's output, like q    all-to-all       all-to-all       all-to-all

    of a step, besides            all-reduce loss  all-reduce of each gradient
    with --shard-weights          all-gather of    all-gather of all weights, and, instead of the
                                  all weights      all-reduces, reduce-scatter of all gradients

--recompute full, the default, keeps only each layer's input, (b, s/P, h); none keeps all its
activations. A layer's messages hold s/P tokens (in tp.py and sp_megatron.py they hold all s).
So they shrink with P (k and v, as long as each rank has a KV head of its own). Each rank holds all
weights and gradients; --shard-weights leaves it 1/P of them (ZeRO-3), but sends all of them. Heads
are divided as in tp.py: a rank has whole KV heads and the query heads that read them. If P is a
multiple of the number of KV heads, several ranks have one KV head, and divide its query heads.

    torchrun --nproc_per_node=2 sp_ulysses.py --mode correctness
    torchrun --nproc_per_node=4 sp_ulysses.py --mode all --length 1001
    torchrun --nproc_per_node=2 sp_ulysses.py --length 20480 --batch 1 --mode benchmark
    torchrun --nproc_per_node=2 sp_ulysses.py --mode all --shard-weights
    torchrun --nproc_per_node=2 labs/break_it.py sp_ulysses.py local_position_ids
    notebooks/explorer.html#walk&sp_ulysses     # a step of this file line by line, on every rank
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
    """Arguments or a model that cannot work; the message says what to use instead."""


# ---- 2. Communication: an all-to-all, whose backward is another ----------------------------------


class SeqAllToAll(torch.autograd.Function):
    """send[r] rows of x (dim 0) go to rank r, receive[r] rows come from rank r. The backward swaps
    the counts, as a row's gradient returns to where the row came from. (DeepSpeed's name.)"""

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


# ---- 3. Sharding LLaMA and its relatives, and what the backward keeps ----------------------------


# Copied from tp.py
def split(n, rank, world):
    """[start, end) of the rank's share of n things: the first n % world ranks hold one more."""
    base, extra = divmod(n, world)
    return rank * base + min(rank, extra), (rank + 1) * base + min(rank + 1, extra)


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


def head_counts(config, world):
    """How many query heads, and how many KV heads, each rank attends with: two lists."""
    ranges = [head_range(config, rank, world) for rank in range(world)]
    return [q1 - q0 for (q0, q1), _ in ranges], [k1 - k0 for _, (k0, k1) in ranges]


def ulysses_attention(stock, stand_in, module, query, key, value, mask, **others):
    """HF's attention function `stock`, with all-to-alls before and after it. `stock` reads head
    counts and the kernel's name from a module, so it gets `stand_in`, which has this rank's.

    query (b, heads, s/P, d), key and value (b, KV heads, s/P, d) -> (b, s/P, heads, d).
    """
    group = module.group
    q_counts, kv_counts = head_counts(module.config, group.size())
    # A KV head is repeated for each rank that has it; the backward sums their gradients
    sharing = max(1, group.size() // module.config.num_key_value_heads)
    if sharing > 1:
        key, value = (x.repeat_interleave(sharing, 1) for x in (key, value))
    query = tokens_to_heads(query, q_counts, group)
    key, value = (tokens_to_heads(x, kv_counts, group) for x in (key, value))
    out, probabilities = stock(stand_in, query, key, value, mask, **others)
    return heads_to_tokens(out, q_counts, group), probabilities  # out: (b, s, heads/P, d)


# Copied from sp_megatron.py
def all_tokens_mask(stock, world, q_length, kv_length, **others):
    """HF's mask function `stock` for all tokens. HF takes s/P from the embedding's output."""
    return stock(q_length=q_length * world, kv_length=kv_length * world, **others)


def attend_with_ulysses(model, group, args):
    """Register ulysses_attention() around HF's own attention, with the mask of all tokens."""
    eager = sys.modules[type(model).__module__].eager_attention_forward  # each family's own
    stock = ALL_ATTENTION_FUNCTIONS.get_interface(args.attn_implementation, eager)
    stock_mask = ALL_MASK_ATTENTION_FUNCTIONS[args.attn_implementation]
    (q0, q1), (k0, k1) = head_range(model.config, group.rank(), group.size())
    # HF's functions read from the module how many query heads read a KV head (fewer here, where KV
    # heads are repeated), and from its config the kernel's name (the model's is "ulysses" now)
    stand_in = SimpleNamespace(num_key_value_groups=(q1 - q0) // (k1 - k0), is_causal=True)
    stand_in.config = SimpleNamespace(_attn_implementation=args.attn_implementation)
    stand_in.training = True
    for layer in model.model.layers:  # HF's registries are no place for it: they outlive it
        layer.self_attn.group = group
    attention = partial(ulysses_attention, stock, stand_in)
    mask = partial(all_tokens_mask, stock_mask, group.size())
    transformers.AttentionInterface.register("ulysses", attention)
    transformers.AttentionMaskInterface.register("ulysses", mask)
    model.set_attn_implementation("ulysses")


class UlyssesLlama(nn.Module):
    """HF's decoder and head under HF's names. The loss is computed inside forward(), since with
    --shard-weights the head's weights are whole only during forward() and its backward."""

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
        unit.set_gradient_divide_factor(1.0)  # a sum over ranks, as without sharding; not a mean
        unit.set_force_sum_reduction_for_comms(True)  # a plain sum: gloo has no scaled one


def note_gradients(model, group, args):
    """Note on each parameter how many ranks hold it (replicas) and, where each of them computes
    only its own tokens' part of the gradient, the group that has to add the parts up (sum_over)."""
    world = group.size()
    for parameter in model.parameters():
        parameter.replicas, parameter.sum_over = world, group if world > 1 else None
        if args.shard_weights:  # fully_shard has summed the parts; a rank has rows of its own
            parameter.replicas, parameter.sum_over = 1, None
            rows = math.ceil(len(parameter) / world)
            start, end = (min(n * rows, len(parameter)) for n in (group.rank(), group.rank() + 1))
            parameter.shard = 0, start, end


# Copied from tp.py
def recompute_layers(model):
    """Keep each layer's input only. The layer's backward first runs its forward again, collectives
    included, up to the last tensor that the backward needs (arXiv 1604.06174)."""
    for layer in model.model.layers:  # two attributes of HF's layers
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)


def parallelize(model, group, args):
    """HF's model, in place, as this rank runs it: its attention spans the ranks."""
    attend_with_ulysses(model, group, args)
    if args.recompute == "full":
        recompute_layers(model)
    model = UlyssesLlama(model)
    if args.shard_weights:
        shard_weights(model, group, args)
    note_gradients(model, group, args)
    return model


# ---- 4. Loss and step ----------------------------------------------------------------------------


def own_tokens(x, group, padding):
    """This rank's tokens of x (b, s), padded at the end where P does not divide s: (b, s/P)."""
    x = F.pad(x, (0, -x.shape[1] % group.size()), value=padding)
    return x.chunk(group.size(), 1)[group.rank()]


def sum_of_losses(model, hidden, targets):
    """Sum of -log softmax(logits)[target] of hidden (b, c, h), c tokens of each sequence. A
    token whose target is IGNORE adds none. Written by hand, because F.cross_entropy's gradient
    in float32, with 128,256 words on a CPU, is off by up to 3e-6; this one is off by 3e-8."""
    logits = model.lm_head(hidden)  # (b, c, v)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logits = logits - logits.detach().max(-1, keepdim=True).values  # at most 0: exp stays finite
    target_logit = logits.gather(-1, targets.clamp(min=0)[..., None])[..., 0]  # IGNORE is negative
    loss = logits.exp().sum(-1).log() - target_logit  # (b, c)
    return loss.masked_fill(targets == IGNORE, 0).sum()


def mean_loss(model, hidden, labels, group, args):
    """This rank's share of the mean loss over all targets, from its hidden (b, s/P, h)."""
    chunk = hidden.shape[1] if args.loss == "full" else max(1, LOSS_CHUNK // args.batch)
    # A token's target is the next token. Shift before the split, since a rank's last token predicts
    # the next rank's first
    targets = F.pad(labels[:, 1:], (0, 1), value=IGNORE)
    count = (targets != IGNORE).sum()  # of all s tokens, since each rank has all labels
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
    ids = own_tokens(ids, group, 0)  # padding comes last, so no token before attends to it
    size = ids.shape[1]
    first = group.rank() * size
    positions = torch.arange(group.size() * size, device=ids.device)[None]  # of all tokens

    # The mask needs 0, 1, 2, ..., since HF takes a repeated position for the start of a document.
    # But some rotary embeddings (longrope) choose frequencies by the largest position that
    # they get. So the rotary embedding gets the last token's position for padding, too
    def clamp_padding(rotary, inputs, kwargs):
        return (inputs[0], positions.clamp(max=last)), {}  # hidden states, positions

    def own_rotations(rotary, inputs, out):  # cos and sin (1, s, d) -> (1, s/P, d)
        return tuple(x[:, first : first + size].clone() for x in out)  # a view would keep all s

    rotary = model.model.rotary_emb
    with rotary.register_forward_pre_hook(clamp_padding, with_kwargs=True):
        with rotary.register_forward_hook(own_rotations):
            outputs = model.model(input_ids=ids, position_ids=positions, use_cache=False)
    return outputs.last_hidden_state


def forward_backward(model, ids, labels, group, args, backward=True):
    """Mean loss of ids (b, s) and unshifted labels (b, s); it is the same on every rank.
    Before it each .grad has to be None, since sum_gradients() would sum an older one again.
    After it each .grad is complete."""
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
    """Logits of this rank's tokens, (b, s/P, v), and which part of all logits they are."""
    length = ids.shape[1]
    size = math.ceil(length / group.size())
    start, end = (min(rank * size, length) for rank in (group.rank(), group.rank() + 1))
    logits = model(ids, None, group, args)[:, : end - start]  # without padding
    logits.shard = 1, start, end
    logits.replicas = 1
    return logits


def expected_traffic(model, group, args):
    """What one forward_backward() must send: rows (phase, op, calls, their message bytes)."""
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
    if args.shard_weights and world == 1:
        raise UsageError("--shard-weights needs another rank to share weights with; use 2")


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
