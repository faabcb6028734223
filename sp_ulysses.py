"""Ulysses sequence parallelism for LLaMA in one file (DeepSpeed, arXiv 2309.14509) on HF's model.

Every rank holds all weights and s/P tokens of the activations. Norms, projections and MLP treat
each token by itself, and need no other rank. Attention alone mixes tokens, and it treats each head
by itself: so it gets all tokens of 1/P of the heads. P = 2, one attention block:

    rank 0: tokens 0..s/2       rank 1: tokens s/2..s        (b, s/2, h)
    q, k, v projections         q, k, v projections          replicated weights, all heads
        |                               |
    (b, heads, s/2, d)          (b, heads, s/2, d)
        |        all-to-all, each of q, k, v    |            backward: all-to-all back
        v                                       v
    (b, heads/2, s, d)          (b, heads/2, s, d)           all tokens, own heads
    attention, first half       attention, second half       HF's own: sdpa, eager or flash
    (b, s, heads/2, d)          (b, s, heads/2, d)
        |        all-to-all                     |            backward: all-to-all back
        v                                       v
    (b, s/2, heads, d)          (b, s/2, heads, d)           all heads of own tokens
    o projection                o projection
        |                               |
    rank 0: tokens 0..s/2       rank 1: tokens s/2..s        (b, s/2, h)

    message                       forward          backward         recomputed (--recompute block)
    q, of (b, s/P, h)             all-to-all       all-to-all       all-to-all
    k and v, smaller with GQA     2 all-to-alls    2 all-to-alls    2 all-to-alls
    attention's output, as q      all-to-all       all-to-all       all-to-all
    of a step, not of a layer:    nothing          all-reduce of all gradients
    with --shard-weights          all-gather of    all-gather of all weights,
                                  all weights      reduce-scatter of all gradients

    --recompute           kept of a layer for its backward                     messages of a layer
    none                  all; q, k, v and output of own heads and all tokens  8
    block (default)       the layer's input, (b, s/P, h)                       8, and 4 recomputed

What a rank sends for a layer shrinks with P; in tp.py and sp_megatron.py it does not. But weights,
gradients and optimizer state do not shrink, unless --shard-weights leaves 1/P of them on each rank
(ZeRO-3). As in tp.py, there can be no more ranks than heads.

    torchrun --nproc_per_node=2 sp_ulysses.py --mode correctness
    torchrun --nproc_per_node=4 sp_ulysses.py --mode all --length 1001
    torchrun --nproc_per_node=2 sp_ulysses.py --length 20480 --batch 1 --mode benchmark
    torchrun --nproc_per_node=2 sp_ulysses.py --mode all --shard-weights
    torchrun --nproc_per_node=2 labs/break_it.py sp_ulysses.py local_position_ids
    diff sp_megatron.py sp_ulysses.py     # two ways to give attention all tokens
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
import weakref
from collections import Counter, defaultdict
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics
from types import SimpleNamespace
from unittest import mock

import huggingface_hub
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama

STRATEGY = "sp_ulysses"
IGNORE = -100  # the label of a token that is no target: PyTorch's and Hugging Face's convention
LOSS_CHUNK = 2048  # --loss chunked: tokens per rank whose logits exist at the same time


# Copied from tp.py
class UsageError(Exception):
    """Arguments or a model that cannot work; the message says what would."""


# ---- 2. Communication: one all-to-all, its own conjugate -----------------------------------------


# Copied from tp.py
def all_reduce(x, group, op=dist.ReduceOp.SUM):
    """The sum (or max) of x over ranks, in a new tensor: autograd may still need the old one."""
    if group.size() == 1:
        return x
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, op, group=group)
    return x


def all_to_all(x, send, receive, group):
    """Rows (dim 0) of x go out, send[r] of them to rank r; receive[r] rows come in from rank r."""
    if group.size() == 1:
        return x
    out = x.new_empty(sum(receive), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), receive, send, group=group)
    return out


class SeqAllToAll(torch.autograd.Function):
    """DeepSpeed's. Every row went to one rank, unchanged: its gradient comes back the same way."""

    @staticmethod
    def forward(ctx, x, send, receive, group):
        ctx.send, ctx.receive, ctx.group = send, receive, group
        return all_to_all(x, send, receive, group)

    @staticmethod
    def backward(ctx, grad):
        return all_to_all(grad, ctx.receive, ctx.send, ctx.group), None, None, None


def tokens_to_heads(x, counts, group):
    """All heads of own tokens (b, heads, s/P, d) -> own heads of all tokens (b, heads/P, s, d).

    counts: how many heads each rank attends with; they may differ, where P does not divide heads.
    """
    own = [counts[group.rank()]] * group.size()
    rows = SeqAllToAll.apply(x.transpose(0, 1), counts, own, group)  # a row: (b, s/P, d), a head
    rows = rows.unflatten(0, (group.size(), -1))  # (P, heads/P, b, s/P, d): P in order of tokens
    return rows.permute(2, 1, 0, 3, 4).flatten(2, 3)


def heads_to_tokens(x, counts, group):
    """Own heads of all tokens (b, s, heads/P, d) -> all heads of own tokens (b, s/P, heads, d)."""
    own = [counts[group.rank()]] * group.size()
    rows = x.unflatten(1, (group.size(), -1)).permute(1, 3, 0, 2, 4)  # (P, heads/P, b, s/P, d)
    rows = SeqAllToAll.apply(rows.flatten(0, 1), own, counts, group)  # (heads, b, s/P, d)
    return rows.permute(1, 2, 0, 3)


# ---- 3. Sharding LLaMA, and what the backward keeps of it ----------------------------------------


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
    queries = heads // kv_heads  # query heads per KV head
    works = [w for w in range(1, heads + 1) if w <= kv_heads or w % kv_heads == 0]
    if world not in works:
        problem = f"{heads} heads with {kv_heads} KV heads cannot be split over {world} ranks"
        raise UsageError(f"{problem}; {', '.join(map(str, works))} ranks would work")
    if world <= kv_heads:
        k0, k1 = split(kv_heads, rank, world)
        return (k0 * queries, k1 * queries), (k0, k1), 1
    replicas = world // kv_heads
    k = rank // replicas
    q0, q1 = split(queries, rank % replicas, replicas)
    return (k * queries + q0, k * queries + q1), (k, k + 1), replicas


# Copied from tp.py
def mark(tensor, shard=None, replicas=1, sum_over=None):
    """Note on a tensor which slice (dim, start, end) of the full one it is (None: all of it), how
    many ranks hold the same slice, and over which group its gradient has to be summed (or None)."""
    tensor.shard, tensor.replicas, tensor.sum_over = shard, replicas, sum_over
    return tensor


def head_counts(config, world):
    """How many query heads, and how many KV heads, each rank attends with: two lists."""
    ranges = [head_range(config, rank, world) for rank in range(world)]
    return [q1 - q0 for (q0, q1), _, _ in ranges], [k1 - k0 for _, (k0, k1), _ in ranges]


def ulysses_attention(stock, own, group, module, query, key, value, mask, **others):
    """HF's attention function `stock` between all-to-alls, with the signature of HF's interface.

    query (b, heads, s/P, d), key and value (b, KV heads, s/P, d) -> (b, s/P, heads, d). `stock`
    gets `own` in the place of HF's module: there are fewer heads than the module has.
    """
    queries, keys = head_counts(module.config, group.size())
    replicas = sum(keys) // module.config.num_key_value_heads
    # A KV head is sent to every rank that needs it; the backward sums what these send back
    key, value = (modeling_llama.repeat_kv(x, replicas) for x in (key, value))
    query = tokens_to_heads(query, queries, group)
    key = tokens_to_heads(key, keys, group)
    value = tokens_to_heads(value, keys, group)
    out, weights = stock(own, query, key, value, mask, **others)  # (b, s, heads/P, d)
    return heads_to_tokens(out, queries, group), weights


def all_tokens_mask(stock, group, q_length, kv_length, attention_mask=None, **others):
    """HF's mask function `stock`, asked for the mask of all tokens, where HF asks for that of s/P.

    attention_mask (b, s): a padding mask, of all tokens on every rank.
    """
    length = group.size() * q_length
    if attention_mask is not None and attention_mask.shape[1] != length:
        raise ValueError(f"a padding mask needs all {length} tokens, on every rank")
    return stock(q_length=length, kv_length=length, attention_mask=attention_mask, **others)


# Copied from tp.py
def recompute_layers(model):
    """Keep each layer's input only, and run the layer again in the backward, with its hooks and
    collectives (arXiv 1604.06174)."""
    enable = getattr(model, "activation_checkpointing_enable", None)  # since transformers 5.23
    enable = enable or model.gradient_checkpointing_enable  # its name before
    enable({"use_reentrant": False})


class UlyssesLlama(nn.Module):
    """HF's LlamaModel and head under HF's names. Its forward is all of a step that needs weights:
    fully_shard gathers them when a module's forward begins, and frees them when it ends."""

    def __init__(self, model):
        super().__init__()
        self.model, self.lm_head, self.config = model.model, model.lm_head, model.config

    def forward(self, ids, labels, group, args):
        """This rank's summand of the mean loss of ids (b, s); without labels its logits."""
        hidden = final_hidden_states(self, ids, group, args)
        if labels is None:
            return self.lm_head(hidden)
        return mean_loss(self, hidden, labels, group, args)


def parallelize(model, group, args):
    """Have HF's LlamaForCausalLM attend across the ranks, in place; returns its UlyssesLlama."""
    if args.recompute == "block":
        recompute_layers(model)
    world, eager = group.size(), modeling_llama.eager_attention_forward
    queries, keys = (counts[group.rank()] for counts in head_counts(model.config, world))
    # All that HF's attention functions read of their module; flash finds its kernel by the name
    own = SimpleNamespace(num_key_value_groups=queries // keys, is_causal=True, training=True)
    own.config = SimpleNamespace(_attn_implementation=args.attention)
    stock = ALL_ATTENTION_FUNCTIONS.get_interface(args.attention, eager)
    attention = partial(ulysses_attention, stock, own, group)
    mask = partial(all_tokens_mask, ALL_MASK_ATTENTION_FUNCTIONS[args.attention], group)
    transformers.AttentionInterface.register("ulysses", attention)
    transformers.AttentionMaskInterface.register("ulysses", mask)
    model.set_attn_implementation("ulysses")
    model = UlyssesLlama(model)
    if args.shard_weights:
        shard_weights(model, group, args)
    for parameter in model.parameters():
        if not args.shard_weights:  # each rank has only its own tokens: a part of the gradient
            mark(parameter, replicas=world, sum_over=group if world > 1 else None)
        else:  # the proof gathers what is sharded; anything else counts once per rank: coverage P
            mark(parameter, replicas=world if isinstance(parameter, DTensor) else 1)
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
        unit.set_force_sum_reduction_for_comms(True)


# ---- 4. Loss and step ----------------------------------------------------------------------------


def own_tokens(x, group, padding):
    """This rank's tokens of x (b, s), padded at the end where P does not divide s: (b, s/P)."""
    x = F.pad(x, (0, -x.shape[1] % group.size()), value=padding)
    return x.chunk(group.size(), 1)[group.rank()]


# Copied from sp_ulysses.py
def sum_of_losses(model, hidden, targets):
    """Sum of -log softmax(logits)[target] of c tokens a sequence, hidden (b, c, h); 0 if IGNORE.

    By hand, since F.cross_entropy sums a large vocabulary too coarsely in float32 on a CPU.
    """
    logits = model.lm_head(hidden)  # (b, c, v)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logits = logits - logits.detach().max(-1, keepdim=True).values  # at most 0: exp stays finite
    target_logit = logits.gather(-1, targets.clamp(min=0)[..., None])[..., 0]  # IGNORE < 0
    loss = logits.exp().sum(-1).log() - target_logit  # (b, c)
    return loss.masked_fill(targets == IGNORE, 0).sum()


def mean_loss(model, hidden, labels, group, args):
    """This rank's summand of the mean loss over all targets, from its hidden (b, s/P, h)."""
    size = hidden.shape[1]  # tokens of a rank's share at a time
    size = size if args.loss == "full" else max(1, LOSS_CHUNK // args.batch)
    # The target of a token is the next one. Shifted before the split: a rank's last token predicts
    # the next rank's first
    targets = F.pad(labels[:, 1:], (0, 1), value=IGNORE)
    count = (targets != IGNORE).sum()  # all ranks': they are not evenly spread
    total = 0
    for h, t in zip(hidden.split(size, 1), own_tokens(targets, group, IGNORE).split(size, 1)):
        if args.loss == "full":
            total += sum_of_losses(model, h, t)
        else:  # logits of one chunk at a time, recomputed in the backward
            total += checkpoint(sum_of_losses, model, h, t, use_reentrant=False)
    return total / count


def final_hidden_states(model, ids, group, args):
    """Output of the final norm for this rank's tokens, (b, s/P, h). ids (b, s): all tokens."""
    ids = own_tokens(ids, group, 0)  # padding comes last: no token before it attends to it
    size = ids.shape[1]
    first = group.rank() * size
    positions = torch.arange(first, first + size, device=ids.device)[None]
    inputs = {"input_ids": ids, "position_ids": positions}
    return model.model(**inputs, use_cache=False).last_hidden_state


def train_step(model, ids, labels, group, args, backward=True):
    """Loss of ids (b, s), the same on every rank; after it every .grad is complete."""
    loss = model(ids, labels, group, args)
    if backward:
        loss.backward()
        sum_gradients(model)
    return all_reduce(loss.detach(), group)


# Copied from tp.py
def sum_gradients(model):
    """Sum the gradients of which each rank has a part over the ranks that have the others."""
    for parameter in model.parameters():
        if parameter.sum_over is not None:  # in place: no second gradient
            dist.all_reduce(parameter.grad, group=parameter.sum_over)


# Copied from tp.py
def grad_norm(model, group):
    """Norm of the gradient of the whole model: what several ranks hold (replicas) counts once."""
    total = torch.zeros((), dtype=torch.float64)
    for p in model.parameters():
        total += full_tensor(p.grad).double().square().sum().cpu() / p.replicas
    dist.all_reduce(total, group=group)
    return total.sqrt()


def local_logits(model, ids, group, args):
    """Logits of this rank's tokens, (b, s/P, v), marked as a parameter is."""
    start, end, replicas = token_range(ids.shape[1], group)
    logits = model(ids, None, group, args)[:, : end - start]  # without padding
    return mark(logits, (1, start, end), replicas)


# Copied from sp_megatron.py
def token_range(length, group):
    """Tokens [start, end) that this rank has between the blocks; how many ranks have the same."""
    size = math.ceil(length / group.size())
    return min(group.rank() * size, length), min((group.rank() + 1) * size, length), 1


def expected_traffic(config, group, args):
    """What one step must send: rows (phase, op, calls, message bytes), as Meter counts them."""
    P, layers, element = group.size(), config.num_hidden_layers, getattr(torch, args.dtype).itemsize
    if P == 1:
        return []
    queries, keys = head_counts(config, P)
    head = args.batch * math.ceil(args.length / P) * config.head_dim * element  # of own tokens
    q, kv = sum(queries) * head, sum(keys) * head  # all heads of own tokens
    own_q, own_kv = P * queries[group.rank()] * head, P * keys[group.rank()] * head  # of all tokens
    with torch.device("meta"):  # shapes without memory
        weights = [*transformers.AutoModelForCausalLM.from_config(config).parameters()]
    forward = 4 * layers, layers * (q + 2 * kv + own_q)  # all-to-alls of q, k, v; of the output
    rows = [
        ("forward", "all_to_all", *forward),
        ("backward", "all_to_all", 4 * layers, layers * (own_q + 2 * own_kv + q)),  # gradients back
        ("forward", "all_reduce", 1, max(4, element)),  # the loss, in float32 or better
    ]
    if args.recompute == "block":  # all of attention again; checkpoint() stops at the MLP's last
        # matrix, when it has all that the backward needs
        rows += [("backward", "all_to_all", *forward)]
    if args.shard_weights:  # a message for each layer, and one for the rest; rows that P divides
        size = sum(math.ceil(len(p) / P) * P * p[0].numel() for p in weights) * element
        rows += [("forward", "all_gather", layers + 1, size)]
        rows += [("backward", "all_gather", layers + 1, size)]
        rows += [("backward", "reduce_scatter", layers + 1, size)]  # the gradients
    else:
        size = sum(p.numel() for p in weights) * element
        rows += [("backward", "all_reduce", len(weights), size)]  # every gradient
    return rows


# What sections 5 and 6, the same in all four scripts, ask of this one
OPTIONS = {"--shard-weights": {"action": "store_true", "help": "1/P of them on each rank (ZeRO-3)"}}
OWN_MODES, OWN_FIGURES = {}, None  # modes that need no ranks; what benchmark measures besides


def finalize_args(args, world):
    """Fill in what depends on other options; UsageError where world ranks cannot do it."""
    args.batch = args.batch or 3
    head_range(args.config, 0, world)
    if args.shard_weights and world == 1:
        raise UsageError("--shard-weights needs another rank to shard weights with; 2 ranks would")


# Copied from tp.py
# ---- 5. Proof: the three modes, word for word the same in all four scripts -----------------------

EXACT = 1e-10  # float64: the relative error that each tensor may have
ROUNDING = 2.0  # float32, bfloat16: the error of all of a kind, in multiples of one device's,
LEAST = 4.0  # or of so many machine epsilons: of a few tokens one device may have less by chance
LEARNING_STEPS, LEARNING_TOLERANCE = 20, {"float64": 1e-9, "float32": 1e-2, "bfloat16": 2e-1}


def is_rank0():
    """Whether this process prints and writes: rank 0, or one that torchrun has not started."""
    return "LOCAL_RANK" not in os.environ or os.environ["RANK"] == "0"


def print0(*lines):
    """Print lines on rank 0, after an empty one."""
    if is_rank0():
        print("", *lines, sep="\n", flush=True)


def print_table(rows):
    """Print rows, dicts with the same keys, under these keys; the first column to the left."""
    cells = [[f"{x:.3g}" if isinstance(x, float) else str(x) for x in r.values()] for r in rows]
    cells.insert(0, [key.replace("_", " ") for key in rows[0]])
    widths = [max(map(len, column)) for column in zip(*cells)]
    lines = []
    for first, *others in cells:
        padded = [cell.rjust(width) for cell, width in zip(others, widths[1:])]
        lines.append("   ".join(["  " + first.ljust(widths[0]), *padded]))
    print0(*lines)


def gather_objects(value, group):
    """Every rank's value, in a list; a barrier, too. A fake rank is alone."""
    if dist.get_backend(group) == "fake":
        return [value]
    values = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


def full_tensor(tensor):
    """All of a DTensor, gathered; any other tensor is returned as it is."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


@contextmanager
def float64_islands(dtype):
    """For the proof only: HF computes norms and softmax in float32 even in a float64 model."""
    wide = SimpleNamespace(**vars(torch) | {"float32": torch.float64})
    with mock.patch.object(modeling_llama, "torch", wide if dtype == "float64" else torch):
        yield


def is_out_of_memory(problem):
    """Whether memory ran out: torch.OutOfMemoryError on a GPU, on a CPU only the message."""
    return isinstance(problem, torch.OutOfMemoryError) or "can't allocate memory" in str(problem)


@contextmanager
def readable(name):
    """Whatever is wrong with a model becomes a UsageError with transformers' own message."""
    try:
        yield
    except Exception as problem:  # of many kinds
        if is_out_of_memory(problem):
            raise
        raise UsageError(f"cannot read the model {name}: {problem}") from None


def load_model(args):
    """HF's LlamaForCausalLM on this rank's device; the same weights on every rank."""
    torch.manual_seed(args.seed)
    auto, pad = transformers.AutoModelForCausalLM, args.config.pad_token_id
    how = {"dtype": getattr(torch, args.dtype), "attn_implementation": args.attention}
    with readable(args.model), args.device if args.source is None else nullcontext():
        if args.source is not None:
            model = auto.from_pretrained(**args.source, **how, use_safetensors=True)
            return model.to(args.device).train()
        model = auto.from_config(args.config, **how).train()
    if pad is not None:  # HF's zeros: a norm's gradient of them is huge
        row = model.model.embed_tokens.weight.data[pad]
        row.normal_(std=args.config.initializer_range)
    return model


def proof_batch(args, group, step=0):
    """ids and labels (b, s) of a step, in which an error cannot cancel or hide.

    Steps differ in content and length: nothing kept from the first can serve the second. Of three
    sequences one has a hole in its targets, one ends early: targets are spread unevenly. Inputs and
    targets: token 0, the padding token, first and last row of each rank's share of the vocabulary.
    """
    length, vocabulary = args.length, args.config.vocab_size
    if step > 0:
        length = length + 1 if length < 3 else length * 2 // 3
    shape, generator = (args.batch, length), torch.Generator().manual_seed(args.seed + step)
    ids = torch.randint(vocabulary, shape, generator=generator)
    targets = torch.ones(shape, dtype=torch.bool)
    targets[0::3, max(1, length // 4) : length // 2] = False
    targets[2::3, (length + 1) // 2 :] = False
    ranges = [split(vocabulary, rank, group.size()) for rank in range(group.size())]
    edges = {row for start, end in ranges for row in (start, end - 1)}
    edges = torch.tensor(sorted(edges | {0, (args.config.pad_token_id or 0) % vocabulary}))
    places = targets[:, 1:].nonzero()[: len(edges)] + torch.tensor([0, 1])  # no target is first
    ids[tuple(places.T)] = edges[: len(places)]
    return ids.to(args.device), ids.where(targets, IGNORE).to(args.device)


def text_tokens(args):
    """All tokens of --text, by the model's own tokenizer where it has one, else its bytes."""
    text = Path(args.text).read_text(errors="replace") if args.text else "".join(topics.values())
    tokens = list(text.encode())
    if args.source is not None:
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(**args.source)
            tokens = tokenizer(text)["input_ids"]
        except Exception:  # of many kinds
            print0(f"  {args.model} has no tokenizer: its tokens are the text's bytes")
    return torch.tensor(tokens, device=args.device) % args.config.vocab_size


def reference_step(model, ids, labels, backward=True):
    """The step of the untouched model on one device, with PyTorch's own loss in float64."""
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1].double()
    loss = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORE)
    if backward:
        loss.backward()
    return loss.detach()


def sgd(model, lr):
    """Plain SGD: Adam would hide a gradient that is too large by a factor."""
    torch.optim.SGD(model.parameters(), lr, foreach=False).step()
    model.zero_grad()


def two_steps(model, args, group, sharded, lr=None):
    """({(kind, name): tensor} of all that correctness compares in two SGD steps, learning rate).

    sharded: each tensor is marked as mark() does it; else the model is HF's own on one device.
    """
    found, embedded, parameters = {}, [], list(model.named_parameters())
    batches = [proof_batch(args, group, step) for step in (0, 1)]
    on_all_ranks = SimpleNamespace(shard=None, replicas=group.size())

    def step(ids, labels):
        if sharded:
            return train_step(model, ids, labels, group, args)
        return reference_step(model, ids, labels)

    def keep(kind, name, tensor, marked=on_all_ranks):
        tensor = found[kind, name] = torch.atleast_1d(full_tensor(tensor.detach()))
        if sharded:
            mark(tensor, marked.shard, marked.replicas)

    def keep_embedded(module, ids, out):
        out.retain_grad()
        embedded.append(out)

    for name, p in parameters:
        keep("shard", name, p.clone(), p)
    ids = batches[0][0]
    with torch.no_grad():
        logits = local_logits(model, ids, group, args) if sharded else model(ids).logits
    if logits is not None:  # of a pipeline only the last stage has them
        keep("logits", "logits", logits, logits)
    hook = model.model.embed_tokens.register_forward_hook(keep_embedded)
    loss = step(*batches[0])
    hook.remove()
    keep("loss", "loss", loss)
    for name, p in reversed(parameters):
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        keep("grad", name, p.grad, p)
    if embedded:
        start, end, replicas = token_range(args.length, group) if sharded else (0, args.length, 1)
        inputs = torch.cat([x.grad for x in embedded])[:, : end - start]  # without padding
        keep("grad", "inputs_embeds", inputs, mark(inputs, (1, start, end), replicas))
    norm = torch.stack([p.grad.double().norm() for p in model.parameters()]).norm()
    norm = grad_norm(model, group) if sharded else norm
    keep("grad_norm", "grad_norm", norm)
    # 5% less loss if it fell along a straight line; with 10% training becomes unstable
    lr = lr or 0.05 * loss.item() / (norm.item() ** 2 or 1.0)
    sgd(model, lr)
    keep("loss", "loss of step 2", step(*batches[1]))
    sgd(model, lr)
    for name, p in parameters:
        keep("weight", name, p, p)
    # Logits of hundreds, whose exp() would be infinite
    hook = model.model.norm.register_forward_hook(lambda module, x, out: 512 * out)
    keep("loss", "loss of 512 x logits", step(*batches[0]))
    hook.remove()
    for _, p in model.model.norm.named_parameters():
        keep("large", "norm of 512 x logits", p.grad, p)
    return found, lr


def judge(found, expected, rounded, dtype, group):
    """Entries of the JSON, one per tensor; in float32 and bfloat16 also one per kind of tensors.

    In float64 each tensor's error counts, relative to its own norm, or to a thousandth of that of
    its kind: what is zero by construction has none. In other dtypes rounding hides small errors:
    all of a kind are held against `rounded`, one device in the same dtype. coverage is the part of
    a tensor that is here, divided by its replicas: over all ranks 1, or some of it was lost, or not
    sharded.
    """
    sums = torch.zeros(len(expected), 4, dtype=torch.float64)
    for row, key in zip(sums, expected):
        if key in found:  # a bias may be rank 0's alone, a layer another stage's
            tensor, full = found[key], expected[key]
            dim, start, end = tensor.shard or (0, 0, len(full))
            want, one_device = (x[key].narrow(dim, start, end - start) for x in (expected, rounded))
            error = tensor - want if tensor.shape == want.shape else torch.tensor(math.inf)
            for i, x in enumerate((error, want, one_device - want)):
                row[i] = x.double().square().sum() / tensor.replicas
            row[3] = want.numel() / full.numel() / tensor.replicas
    ranks = torch.stack(gather_objects(sums, group))
    sums, largest = ranks.sum(0), ranks[:, :, 0].argmax(0).tolist()
    kinds = {kind: sums[[k == kind for k, _ in expected]].sum(0).tolist() for kind, _ in expected}
    entries = []
    for (kind, name), (error, size, _, coverage), rank in zip(expected, sums.tolist(), largest):
        error = math.sqrt(error / (max(size, kinds[kind][1] / 1e6) or 1.0))
        limit = 0.0 if kind == "shard" else EXACT if dtype == "float64" else math.inf
        entries.append([name, kind, rank, coverage, error, limit])
    for kind in ("logits", "grad", "weight") if dtype != "float64" else ():
        error, size, rounding, _ = (math.sqrt(square) for square in kinds[kind])
        least = LEAST * torch.finfo(getattr(torch, dtype)).eps
        limit = ROUNDING * max(rounding / size, least)
        entries.append([f"all {kind}", kind, "all", 1.0, error / size, limit])
    keys = ("name", "kind", "rank", "coverage", "relative_error", "limit", "passed")
    return [dict(zip(keys, (*e, e[4] <= e[5] and abs(e[3] - 1) < 1e-9))) for e in entries]


def nearness(entry):
    """How near to its limit a tensor is; where it has none, its error."""
    return entry["relative_error"] / max(entry["limit"], 1e-99), entry["relative_error"]


def check_correctness(args, group):
    """Every tensor of two steps on P ranks against the untouched model on one device."""
    reference = load_model(args)
    model = parallelize(copy.deepcopy(reference), group, args)
    finer = {"bfloat16": "float32", "float32": "float64"}.get(args.dtype)
    one_device = copy.deepcopy(reference) if finer else reference
    rounded, lr = expected, _ = two_steps(one_device, args, group, sharded=False)
    if finer:
        with float64_islands(finer):
            reference.to(getattr(torch, finer))
            expected, _ = two_steps(reference, args, group, sharded=False, lr=lr)
    found, _ = two_steps(model, args, group, sharded=True, lr=lr)
    entries = judge(found, expected, rounded, args.dtype, group)
    wrong = [entry for entry in entries if not entry["passed"]]
    nearest = sorted(entries, key=nearness, reverse=True)
    numbers, rows = {}, []
    for name in ("loss", "grad_norm"):
        one_device, parallel = expected[name, name].item(), found[name, name].item()
        numbers |= {f"{name}_reference": one_device, name: parallel}
        rows.append({"": name, "one device": f"{one_device:.8g}", "parallel": f"{parallel:.8g}"})
    print_table(rows)
    print_table([{k: v for k, v in e.items() if k != "passed"} for e in (wrong or nearest)[:8]])
    print0("  coverage: how often a tensor exists over all ranks, replicas once; 1 is right")
    limit = f"{EXACT} of one device" if args.dtype == "float64" else f"{ROUNDING:g} x its rounding"
    summary = f"loss, logits, all gradients, weights after 2 SGD steps: within {limit}"
    if wrong:
        summary = f"{len(wrong)} of {len(entries)} values are wrong, the first: {wrong[0]['name']}"
    result = {"passed": not wrong, **numbers, "worst": nearest[0]}
    result["tolerance"] = EXACT if args.dtype == "float64" else ROUNDING
    return summary, result | {"tensors": entries}


def check_learning(args, group):
    """Train one device and P ranks on the same text: the same losses, and they fall."""
    reference, tokens, size = load_model(args), text_tokens(args), args.batch * args.length
    model, lr, rows = parallelize(copy.deepcopy(reference), group, args), None, []
    for i in tqdm(range(LEARNING_STEPS), "learning", disable=None if is_rank0() else True):
        places = torch.arange(i * size, (i + 1) * size) % len(tokens)  # a short text begins again
        ids = tokens[places].view(args.batch, args.length)
        loss = train_step(model, ids, ids, group, args).item()
        lr = lr or 0.07 * loss / (grad_norm(model, group).item() ** 2 or 1.0)
        alone = reference_step(reference, ids, ids).item()
        error = max(gather_objects(abs(loss - alone) / alone, group))  # the worst rank's
        rows.append({"step": i, "one device": alone, "parallel": loss, "relative error": error})
        sgd(model, lr)
        sgd(reference, lr)
    shown = [row | {k: f"{row[k]:.6f}" for k in ("one device", "parallel")} for row in rows]
    print_table([*shown[:-1:5], shown[-1]])
    apart, fall = max(row["relative error"] for row in rows), 1 - loss / rows[0]["parallel"]
    limit = LEARNING_TOLERANCE[args.dtype]
    summary = f"losses within {apart:.1e} of one device's (at most {limit:.0e}), down by {fall:.0%}"
    passed = apart <= limit
    if args.model == "tiny" and size >= 768:  # fewer tokens differ too much from step to step
        passed, summary = passed and fall > 0.2, f"{summary} (over 20%)"
    losses = {"loss_reference": [row["one device"] for row in rows]}
    return summary, {"passed": passed, **losses, "loss": [row["parallel"] for row in rows]}


class Meter(TorchDispatchMode):
    """Counts collectives, the bytes of their full tensors (of an all_to_all: of the rank's own
    input), and the bytes of all tensors that exist at the same time, whoever made them."""

    OPS = {"allreduce": "all_reduce", "allgather": "all_gather", "reducescatter": "reduce_scatter"}
    OPS |= {"alltoall": "all_to_all", "send": "send"}

    def __init__(self):
        super().__init__()
        self.calls, self.bytes, self.peak = Counter(), Counter(), 0
        self.alive = weakref.WeakValueDictionary()  # storages: several tensors may share one
        self.add(x for x in gc.get_objects() if type(x) in (torch.Tensor, nn.Parameter))

    def add(self, tensors):
        for storage in (tensor.untyped_storage() for tensor in tensors):
            if storage._cdata not in self.alive:
                self.alive[storage._cdata] = storage
                # Sizes anew: fully_shard empties and fills storages in place
                self.peak = max(self.peak, sum(x.nbytes() for x in self.alive.values()))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(hasattr(kind, "full_tensor") for kind in types):  # a DTensor: count what it calls
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        if set(types) - {torch.Tensor, nn.Parameter}:  # FakeTensor: DTensor infers a shape
            return out
        inputs = [x for x in tree_leaves(args) if isinstance(x, torch.Tensor)]
        outputs = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        self.add(outputs)
        name = func._opname.replace("_", "")
        op = next((op for start, op in self.OPS.items() if name.startswith(start)), None)
        if op and func.namespace in ("c10d", "_c10d_functional"):
            message = inputs[-1:] if op == "all_to_all" else inputs + outputs
            self.calls[op] += 1
            self.bytes[op] += max(x.nbytes for x in message)
        return out


def compare_traffic(args, group, forward, step):
    """Measured beside expected traffic: a row of the JSON each, with the ranks that have it."""
    rows, holders = defaultdict(lambda: [0, 0, 0, 0]), defaultdict(list)
    for op, calls in step.calls.items():  # a step less its forward is the backward
        rows["forward", op][:2] = forward.calls[op], forward.bytes[op]
        rows["backward", op][:2] = calls - forward.calls[op], step.bytes[op] - forward.bytes[op]
    for phase, op, calls, size in expected_traffic(args.config, group, args):
        rows[phase, op][2] += calls
        rows[phase, op][3] += size
    mine = [(*key, *row) for key, row in rows.items() if any(row)]
    for rank, found in enumerate(gather_objects(mine, group)):
        for row in found:
            holders[row].append(rank)
    keys = ("phase", "op", "count", "bytes", "expected_count", "expected_bytes")
    return [dict(zip(keys, row)) | {"ranks": ranks} for row, ranks in holders.items()]


def check_benchmark(args, group):
    """Time, peak memory and traffic of a step; the traffic must be as expected, to the byte."""
    model, batch = parallelize(load_model(args), group, args), proof_batch(args, group)
    device, cuda = torch.get_device_module(args.device), args.device.type == "cuda"

    def step(backward=True):
        train_step(model, *batch, group, args, backward)
        model.zero_grad()

    if cuda:
        device.reset_peak_memory_stats()
    with Meter() as forward:  # these two steps warm up, too
        step(backward=False)
    with Meter() as both:
        step()
    peaks = gather_objects(device.max_memory_allocated() if cuda else both.peak, group)
    traffic = compare_traffic(args, group, forward, both)
    seconds = {"forward": [], "forward + backward": []}
    for _ in tqdm(range(args.bench_iters), "benchmark", disable=None if is_rank0() else True):
        for name, times in seconds.items():  # in turn
            gather_objects(None, group)  # the ranks begin together
            begin = time.perf_counter()
            step(backward=name != "forward")
            device.synchronize()
            times.append(max(gather_objects(time.perf_counter() - begin, group)))  # the slowest
    if args.profile:
        with torch.profiler.profile() as trace:
            step()
        if is_rank0():
            atomic_write(args.profile, lambda draft: trace.export_chrome_trace(str(draft)))
    rows = {}
    for name, times in seconds.items():
        rows[name] = {"median": statistics.median(times), "min": min(times), "max": max(times)}
    label = "seconds (CPU, gloo: no GPU's)" if args.backend == "gloo" else "seconds"
    print_table([{label: name} | row for name, row in rows.items()])
    print_table([{"rank": r, "peak_memory_MiB": f"{p / 2**20:.1f}"} for r, p in enumerate(peaks)])
    if traffic:
        print_table(
            [{k.replace("bytes", "message_bytes"): v for k, v in r.items()} for r in traffic]
        )
    problems = []
    for row in traffic:
        if (row["count"], row["bytes"]) != (row["expected_count"], row["expected_bytes"]):
            problems.append(f"traffic, {row['phase']} {row['op']}")
    figures, more = OWN_FIGURES(model, step, args, group) if OWN_FIGURES else ({}, [])
    problems += more
    speed = args.batch * args.length / rows["forward + backward"]["median"]
    summary = f"{speed:.0f} tokens per second, all traffic as the formula says"
    if args.backend == "fake":
        summary = "all traffic as the formula says; no peer was waited for"
    if problems:
        summary = f"not as expected: {'; '.join(problems)}"
    result = {"passed": not problems, "forward_s": rows["forward"]}
    result |= {"forward_backward_s": rows["forward + backward"], "tokens_per_s": speed}
    return summary, result | {"peak_memory_bytes": peaks, "traffic": traffic} | figures


# ---- 6. Command line: the same in all four scripts -----------------------------------------------

MODES = {"correctness": check_correctness, "learning": check_learning, "benchmark": check_benchmark}


def llama(hidden_size, intermediate_size, layers, heads, kv_heads, vocab_size, **others):
    """Keywords of LlamaConfig."""
    sizes = {"hidden_size": hidden_size, "intermediate_size": intermediate_size}
    sizes |= {"num_hidden_layers": layers, "num_attention_heads": heads}
    sizes |= {"num_key_value_heads": kv_heads, "vocab_size": vocab_size}
    return {"tie_word_embeddings": True, "max_position_embeddings": 1 << 20} | sizes | others


PRESETS = {
    "tiny": llama(64, 192, 8, 8, 4, 256, pad_token_id=130),
    "smollm2-135m": llama(576, 1536, 30, 9, 3, 49152, pad_token_id=2),
    "llama-3.2-1b": llama(2048, 8192, 16, 32, 8, 128256),
    "llama-3.2-3b": llama(3072, 8192, 28, 24, 8, 128256),
    "llama-3.1-8b": llama(4096, 14336, 32, 32, 8, 128256, tie_word_embeddings=False),
}


def find_model(name, attention):
    """(config, from_pretrained's keywords) of a preset, directory, .gguf file or hub id.

    The keywords are None where there are no weights to load: a preset, or a config.json alone.
    """
    if name in PRESETS:
        spread = 0.8 / math.sqrt(PRESETS[name]["hidden_size"])  # HF's 0.02: uniform attention
        return transformers.LlamaConfig(**PRESETS[name], initializer_range=spread), None
    path, source = Path(name), {"pretrained_model_name_or_path": name}
    if name.endswith(".gguf"):
        source = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    elif not path.is_dir() and ("/" not in name or name[0] in "./~"):  # not a hub id either
        raise UsageError(f"no model {name}; these need no download: {', '.join(PRESETS)}")
    with readable(name):
        config = transformers.AutoConfig.from_pretrained(**source)
        if config.model_type != "llama":
            raise ValueError(f"model_type {config.model_type}; these scripts take llama")
        if config.vocab_size < 2:
            raise ValueError("one word in its vocabulary: nothing to predict")
        with torch.device("meta"), torch.no_grad():  # shapes without memory: can it run?
            auto = transformers.AutoModelForCausalLM
            model = auto.from_config(config, attn_implementation=attention)
            model(inputs_embeds=torch.empty(1, 2, config.hidden_size))
    weights = [*path.glob("*.safetensors"), *path.glob("*.bin")]
    return config, None if path.is_dir() and not weights else source


class Parser(argparse.ArgumentParser):
    """argparse, with its complaint raised instead of printed with the usage."""

    def error(self, message):
        raise UsageError(message)


def parse(argv):
    """The arguments, checked as far as can be without starting anything."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument_group("what runs").add_argument
    add("--mode", choices=[*MODES, "all", *OWN_MODES], default="correctness")
    models = f"{', '.join(PRESETS)} (random weights), a hub id, a directory, a .gguf file"
    add("--model", default="tiny", help=models)
    add("--length", type=int, default=256, help="tokens per sequence (256)")
    add("--batch", type=int, help="sequences (3; pp.py: as many as microbatches)")
    add("--text", metavar="FILE", help="what to learn (Python's own help topics)")
    add("--seed", type=int, default=0, help="of random weights and tokens (0)")
    add = parser.add_argument_group("how it runs").add_argument
    exact = "float64, in which the proof is exact; for benchmark float32"
    add("--dtype", choices=["float64", "float32", "bfloat16"], help=exact)
    add("--attn", choices=["auto", "sdpa", "eager", "flash"], default="auto", help="auto: sdpa")
    add("--loss", choices=["chunked", "full"], default="chunked", help="full: all logits at once")
    kept = "block: keep the input of each layer only, and recompute the rest; none: keep all"
    add("--recompute", choices=["block", "none"], default="block", help=kept)
    fake = "auto: nccl with a GPU per rank, else gloo; fake: rank $RANK of $WORLD_SIZE, alone"
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
            raise UsageError(
                f"--{name.replace('_', '-')} {value} is out of range; {least} would do"
            )
    if args.backend == "fake" and args.mode != "benchmark":
        raise UsageError("--backend fake computes no real values: --mode benchmark only")
    if args.profile and args.mode not in ("benchmark", "all"):
        raise UsageError("--profile needs --mode benchmark or all")
    if args.text and not Path(args.text).read_bytes():
        raise UsageError(f"--text {args.text} is empty")
    for path in filter(None, (args.json, args.profile)):
        if os.path.isdir(path) or not os.access(Path(path).absolute().parent, os.W_OK):
            raise UsageError(f"cannot write {path}: a directory, or in none that can be written")
    return args


def start(args):
    """Choose the device, read the model's config, join the other ranks; returns their group."""
    environment = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    rank, world, local, here = (int(os.environ.get(k, v)) for k, v in environment.items())
    gpus, store = torch.cuda.device_count(), None  # None: torchrun's
    if args.backend == "auto":
        args.backend = "nccl" if gpus >= here else "gloo"
    if args.backend == "nccl" and gpus < here:
        raise UsageError(f"--backend nccl needs {here} GPUs here, and there are {gpus}; try gloo")
    cuda = args.backend == "nccl" or (args.backend == "fake" and gpus > 0)
    args.device = torch.device("cuda", local) if cuda else torch.device("cpu")
    torch.get_device_module(args.device).set_device(args.device)
    args.attention = {"auto": "sdpa", "flash": "flash_attention_2"}.get(args.attn, args.attn)
    flash = args.dtype == "bfloat16" and transformers.utils.is_flash_attn_2_available()
    if args.attn == "flash" and not flash:
        raise UsageError("--attn flash needs --dtype bfloat16, a GPU, and the package flash-attn")
    args.bench_iters = args.bench_iters or (1 if not cuda and args.length > 8192 else 5)
    args.wait = datetime.timedelta(seconds=args.timeout)
    args.config, args.source = find_model(args.model, args.attention)
    finalize_args(args, world)
    if args.backend == "fake":
        store = FakeStore()
    elif "RANK" not in os.environ:
        print0(f"one rank; for more: torchrun --nproc_per_node=2 {' '.join(sys.argv)}")
        store = dist.HashStore()
    backend = "cpu:gloo,cuda:nccl" if args.backend == "nccl" else args.backend
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=args.wait)
    return dist.group.WORLD


def atomic_write(path, write):
    """Have write(another path) make the file, then rename it to path: all of it, or nothing."""
    with tempfile.TemporaryDirectory(dir=Path(path).absolute().parent) as folder:
        draft = Path(folder, "draft")
        write(draft)
        draft.replace(path)


def run(args, group):
    """Run the modes asked for, write --json; returns whether all passed."""
    modes, asked = list(MODES) if args.mode == "all" else [args.mode], args.dtype
    versions = {"python": sys.version.split()[0], "torch": torch.__version__}
    versions |= {"transformers": transformers.__version__}
    results = {"script": Path(sys.argv[0]).name, "strategy": STRATEGY, "versions": versions}
    results |= {"world_size": group.size(), "device": args.device.type}
    results |= {k: v for k, v in vars(args).items() if isinstance(v, str | int | float | None)}
    own = [name for name in OPTIONS if vars(args)[name[2:].replace("-", "_")] is True]
    ranks = f"{group.size()} rank{'s' if group.size() > 1 else ''}"
    what = f"{' '.join([STRATEGY, *own])}, {ranks} ({args.backend}, {args.device.type})"
    for mode in modes:
        args.dtype = asked or ("float32" if mode == "benchmark" else "float64")
        results.update(dtype=results["dtype"] or args.dtype)  # the first mode's
        print0(f"{mode}: {what}, {args.model}, {args.dtype}, {args.batch} x {args.length} tokens")
        with float64_islands(args.dtype):
            summary, result = MODES[mode](args, group)
        results[mode] = {"dtype": args.dtype} | result
        print0(f"{'PASS' if result['passed'] else 'FAIL'} {mode}: {summary}")
    failed = [mode for mode in modes if not results[mode]["passed"]]
    if len(modes) > 1:
        print0(f"{'FAIL' if failed else 'PASS'} {STRATEGY}: {', '.join(failed or modes)}")
    if is_rank0() and args.json:
        results = json.loads(json.dumps(results), parse_constant=lambda name: None)  # no NaN
        text = json.dumps(results, indent=1) + "\n"
        atomic_write(args.json, lambda draft: draft.write_text(text))
    gather_objects(None, group)  # no rank leaves, and ends the others, before rank 0 has written
    return not failed


def stop(*_):
    """Ctrl-C: end at once; an exception could be lost, or met by that of a peer that has left."""
    print0("stopped")
    os._exit(130)


def main(argv=None):
    """Returns the exit status: 0 all passed, 1 a check failed, 2 unusable arguments or model."""
    if sys.platform == "win32":
        print("error: needs Linux or macOS; on Windows use WSL", file=sys.stderr)
        return 2
    transformers.logging.set_verbosity_error()
    huggingface_hub.logging.set_verbosity_error()  # it would report each of its retries
    if not is_rank0():
        transformers.logging.disable_progress_bar()
    faulthandler.register(signal.SIGTERM, sys.__stderr__, chain=True)  # prints where a rank hung
    signal.signal(signal.SIGINT, stop)
    try:
        args = parse(argv)
        if args.mode in OWN_MODES:
            return 0 if OWN_MODES[args.mode](args) else 1
        return 0 if run(args, start(args)) else 1
    except (UsageError, OSError, RuntimeError) as problem:  # OSError: a full disk, a missing file
        if isinstance(problem, RuntimeError):
            if not is_out_of_memory(problem):
                raise
            problem = f"not enough memory; a smaller --length or --batch would do: {problem}"
        if not is_rank0():
            time.sleep(30)  # torchrun ends all ranks as soon as one exits: let rank 0 print first
        print(f"error: {' '.join(str(problem).split())}", file=sys.stderr)
        return 2
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
            gc.collect()  # gloo's threads must end before Python does; garbage holds the group


if __name__ == "__main__":
    sys.exit(record(main)())
