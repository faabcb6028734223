"""Pipeline parallelism for LLaMA in one file: GPipe, 1F1B, interleaved, Zero Bubble.

The lesson is the first 590 lines, to "The lesson ends here". Begin at one_f_one_b() and
Pipeline.run(). The rest proves and measures; sections 5 and 6 are the same in all four scripts.

Each of P ranks holds some of the layers, a stage (or V of them), and sends hidden states on. There
are b sequences of s tokens, h is hidden_size; every rank has all ids and labels. With P = 2 and 8
layers:

    rank 0: embedding, layers 0..3          rank 1: layers 4..7, norm, head, loss
        ids (b, s)
        | (b, s, h)          -- activations (b, s, h) -->   |
        |                    <-- gradients (b, s, h) ---    loss

With the whole batch at once, one stage would wait while the other computes. So the batch is cut
into M microbatches, and a schedule is the order in which a rank works on them. Here P = 2 and M =
4, with --recompute none. F0 is the forward of microbatch 0. Its backward, "B0 --", takes twice as
long (three times with --recompute full, the default, which runs the forward again). A dot is idle
time.

afab: all forward, all backward.
    rank 0   F0 F1 F2 F3 .  .  .  B0 -- B1 -- B2 -- B3 --
    rank 1   .  F0 F1 F2 F3 B0 -- B1 -- B2 -- B3 -- .  .
1f1b: one forward, one backward. It takes as long as afab, and keeps fewer microbatches.
    rank 0   F0 F1 .  .  B0 -- F2 B1 -- F3 B2 -- .  B3 --
    rank 1   .  F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 -- .  .
interleaved: a rank has V = 2 stages (rank 0 has layers 0, 1 and 4, 5; lower case: its second
stage). Each stage is half as long, so a column is half as much time.
    rank 0   F0 F1 f0 f1 F2 .  b0 -- F3 b1 -- f2 B0 -- f3 B1 -- .  b2 -- .  b3 -- B2 -- B3 --
    rank 1   .  F0 F1 f0 b0 -- f1 b1 -- F2 B0 -- F3 B1 -- f2 b2 -- f3 b3 -- B2 -- B3 -- .  .
zb: the backward is cut in two. B computes the gradient of the stage's input, for which the
rank before it waits; W computes the gradients of the layers' weight matrices, which no other
rank needs. F, B and W take about equally long (B twice as long with --recompute full).
    rank 0   F0 F1 .  B0 W0 F2 B1 W1 F3 B2 W2 B3 W3
    rank 1   .  F0 B0 F1 B1 W0 F2 B2 W1 F3 B3 W2 W3

F, B, W: a rank's times for one microbatch, all its stages together. Without zb, B is the whole
backward, and W = 0. A rank works for M (F+B+W). If M >= P, W <= F, W <= B, messages take no time
and all stages take equally long (in fact the last has head and loss, too), its idle time is:

                  idle             messages of all     microbatches that rank r keeps at most
                                   ranks, each way     for their B              for their W
    afab          (P-1) (F+B)      M (P-1)             M                        -
    1f1b          (P-1) (F+B)      M (P-1)             P-r                      -
    interleaved   (P-1) (F+B)/V    M (V P-1)           min(M, P + (P-2r-1)/V)   -
    zb            (P-1) (F+B-W)    M (P-1)             P-r                      r+1

So the idle share of the total time is, for afab and 1f1b, (P-1) / (M+P-1), for interleaved (P-1) /
(V M+P-1), and for zb (P-1) / (2 M+P-1) with --recompute full, (P-1) / (3 M+P-1) with none. A
microbatch that is kept in one of V stages counts 1/V. With zb the two columns add up to P: after a
B, P-r-1 wait for B and r+1 for W.

Numbers kept for each token, layer and microbatch. For B: the layer's input, h, with --recompute
full; about 8 h + 4 intermediate + 2 KV heads * head size, 22 h in Llama-3.1-8B, with none. For W,
with both settings: the input and the output's gradient of each weight matrix, 6 h + 3 intermediate
+ 2 KV heads * head size, 17 h there. So with P = 4 and full, rank 3 keeps up to 4 * 17 h a layer
with zb, and h with 1f1b. Besides these a rank has each stage's output, h a token, until its B, a
gradient that it is sending, and a message received ahead.

A message is (b/M, s, h), so each boundary of two stages sends one (b, s, h) each way; tp.py sends 4
all-reduces of it a layer, 5 with recomputation. Weights, gradients and optimizer state shrink to
1/P, but the first rank has all of the embedding, and the last all of the head. Where these are one
matrix (tied), both ranks hold it and sum its gradients.

    torchrun --nproc_per_node=2 pp.py --mode correctness --schedule 1f1b --microbatches 4
    torchrun --nproc_per_node=2 pp.py --mode all --schedule zb
    python labs/schedules.py --schedule 1f1b --ranks 4 --microbatches 6  # drawn by one process
    torchrun --nproc_per_node=2 labs/schedules.py --schedule zb  # idle time, memory: measured
    torchrun --nproc_per_node=2 labs/torch_pipeline.py --mode benchmark  # PyTorch's engine
    torchrun --nproc_per_node=2 labs/break_it.py pp.py mean_of_means --microbatches 3
    python labs/lab18_schedules/lesson.py  # the lab that builds this, and a schedule in a V

notebooks/explorer.html#walk&pp shows a step of this file line by line, on every rank.
"""

# ---- 1. Imports ----------------------------------------------------------------------------------

# For the lesson
import math
from collections import deque
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

# isort: split
# For the proof and the command line
import argparse
import copy
import datetime
import faulthandler
import gc
import importlib
import json
import os
import signal
import statistics
import sys
import time
import weakref
from collections import Counter
from itertools import product
from pathlib import Path
from unittest import mock

import transformers
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed import fake_pg  # noqa: F401  registers --backend fake
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

IGNORE = -100  # the label of a token that the loss skips, in PyTorch and Hugging Face
LOSS_CHUNK = 2048  # --loss chunked: tokens in a chunk, but at least one of each sequence


# ---- 2. Communication: the schedules, and the channels for their messages ------------------------


class Action(NamedTuple):
    """A unit of a rank's work. kind: F forward; B backward; W (zb only) the gradients of layers'
    linear weights, which B then leaves out. (The Zero Bubble paper's names.)"""

    kind: str
    stage: int  # 0 to P V - 1; it is on rank stage % P
    microbatch: int

    def __str__(self):
        return f"{self.kind}{self.microbatch}"


def stages_of(rank, P, V):
    """A rank's stages: the first P are on ranks 0 to P - 1, and so are the next P, ..."""
    return range(rank, V * P, P)


def afab(rank, P, M, V=1):
    """All forward, all backward (GPipe, arXiv 1811.06965): a rank's actions. V is 1."""
    for m in range(M):
        yield Action("F", rank, m)
    for m in range(M):
        yield Action("B", rank, m)


def one_f_one_b(rank, P, M, V=1):
    """One forward, one backward (1F1B; PipeDream-Flush, arXiv 2006.09503)."""
    # The last rank can run each backward right after its forward. Every rank before it has to be
    # one forward further ahead: with P = 4 the warmup is 3, 2, 1, 0 forwards
    warmup = min(P - rank - 1, M)
    for m in range(warmup):
        yield Action("F", rank, m)
    for m in range(warmup, M):  # steady state
        yield Action("F", rank, m)
        yield Action("B", rank, m - warmup)
    for m in range(M - warmup, M):  # cooldown
        yield Action("B", rank, m)


def interleaved(rank, P, M, V):
    """Interleaved 1F1B (Megatron-LM, arXiv 2104.04473), where P divides M. P microbatches go
    through a rank's first stage, then through its second, and so on; then the next P."""
    stages = stages_of(rank, P, V)
    rounds = [range(m, m + P) for m in range(0, M, P)]
    forwards = [Action("F", s, m) for group in rounds for s in stages for m in group]
    backwards = [Action("B", s, m) for group in rounds for s in reversed(stages) for m in group]
    # The first P microbatches go through all stages of the rank but the last: (V - 1) P forwards.
    # Then two more for each rank after this one: one as in 1f1b, and one that gives messages time
    # to arrive. With P = 4 and V = 2 the warmup is 10, 8, 6, 4, as in Megatron (at most all)
    warmup = min((V - 1) * P + 2 * (P - rank - 1), V * M)
    yield from forwards[:warmup]
    for forward, backward in zip(forwards[warmup:], backwards):  # steady state
        yield forward
        yield backward
    yield from backwards[V * M - warmup :]  # cooldown


def zero_bubble(rank, P, M, V=1):
    """ZB-H1 (arXiv 2401.10241): 1F1B in which rank r runs W of m right after B of m + r. From B of
    r on, r microbatches wait for their W before each B, and r + 1 right after it. After its last B
    a rank still has these r + 1 W to run, while the ranks before it still have B to do."""
    for action in one_f_one_b(rank, P, M):
        yield action
        if action.kind == "B" and action.microbatch >= rank:
            yield Action("W", rank, action.microbatch - rank)
    for m in range(max(M - rank, 0), M):
        yield Action("W", rank, m)


SCHEDULES = {"afab": afab, "1f1b": one_f_one_b, "interleaved": interleaved, "zb": zero_bubble}


def producer(action, stage_count):
    """The action whose result this one receives: F of the stage before, B of the stage after. None
    for F of the first stage, which starts from ids, B of the last, and W."""
    if action.kind == "F" and action.stage > 0:
        return action._replace(stage=action.stage - 1)
    if action.kind == "B" and action.stage < stage_count - 1:
        return action._replace(stage=action.stage + 1)
    return None


def dependencies(action, stage_count):
    """The actions, of this stage or another, that have to end before an action can begin."""
    found = [producer(action, stage_count)]
    if action.kind == "B":
        found.append(action._replace(kind="F"))
    if action.kind == "W":
        found.append(action._replace(kind="B"))
    return [dependency for dependency in found if dependency is not None]


def simulate(schedules, stage_count, cost):
    """When each action would run: [(rank, action, begin, end)], from every rank's list of actions.
    cost(action) is its time; messages take none. Actions that can never run are left out."""
    rows = []
    ended = {}  # {action: when}
    free = [0.0] * len(schedules)  # when each rank can begin its next action
    waiting = [deque(actions) for actions in schedules]

    def can_begin(actions):
        return actions and all(d in ended for d in dependencies(actions[0], stage_count))

    while any(map(can_begin, waiting)):
        for rank, actions in enumerate(waiting):
            while can_begin(actions):
                action = actions.popleft()
                begin = max([free[rank], *(ended[d] for d in dependencies(action, stage_count))])
                free[rank] = ended[action] = begin + cost(action)
                rows.append((rank, action, begin, ended[action]))
    return rows


def all_schedules(args, P):
    """Every rank's list of actions, in the order in which it runs them."""
    schedule, M, V = SCHEDULES[args.schedule], args.microbatches, args.virtual_stages
    schedules = [list(schedule(rank, P, M, V)) for rank in range(P)]
    if len(simulate(schedules, P * V, lambda action: 1)) < sum(map(len, schedules)):
        raise UsageError(f"--schedule {args.schedule} would deadlock")
    return schedules


def open_channels(group, stage_count, args):
    """Two dicts {kind: (peer, process group)}: where an action of a kind receives from, and where
    it sends to. F sends to the next rank (the last to the first), B the other way."""
    ranks, P = dist.get_process_group_ranks(group), group.size()
    receive_channels, send_channels = {}, {}
    for stage in range(min(stage_count - 1, P)):  # from stage P on the pairs repeat
        before, after = ranks[stage % P], ranks[(stage + 1) % P]
        for kind, sender, receiver in ("F", before, after), ("B", after, before):
            channel = dist.new_group([sender, receiver], args.timeout)  # all ranks have to call it
            # NCCL connects two ranks at their first message, and both wait for each other then. So
            # every channel sends a zero now, all ranks in the same order
            if ranks[group.rank()] == sender:
                send_channels[kind] = receiver, channel
                dist.send(torch.zeros(1, device=args.device), receiver, channel)
            elif ranks[group.rank()] == receiver:
                receive_channels[kind] = sender, channel
                dist.recv(torch.zeros(1, device=args.device), sender, channel)
    return receive_channels, send_channels


# ---- 3. Sharding LLaMA: the stages, and the engine that runs them --------------------------------


# Copied from tp.py
def shard_range(n, rank, world):
    """[start, end): a rank's share of n things. The first n % world ranks have one more."""
    base, extra = divmod(n, world)
    return rank * base + min(rank, extra), (rank + 1) * base + min(rank + 1, extra)


def shard_model(model, group, args, tied):
    """Keep this rank's stages of HF's model, in place, and nn.Identity() for the others."""
    rank, P, V, layers = group.rank(), group.size(), args.virtual_stages, model.model.layers
    ranges = [shard_range(len(layers), stage, P * V) for stage in stages_of(rank, P, V)]
    for i in range(len(layers)):
        if not any(start <= i < end for start, end in ranges):
            layers[i] = nn.Identity()
    # If tied, the last rank keeps embed_tokens, too, though only its head reads the weight: HF has
    # the weight under this name
    if rank > 0 and not (tied and rank == P - 1):
        model.model.embed_tokens = nn.Identity()
    if rank < P - 1:
        model.model.norm, model.lm_head = nn.Identity(), nn.Identity()


class LinearWithDeferredWeightGrad(torch.autograd.Function):
    """F.linear, whose backward computes dx alone, and leaves x and dy to W."""

    @staticmethod
    def forward(ctx, x, weight, bias, pending):
        ctx.save_for_backward(x, weight)
        ctx.pending = pending
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        ctx.pending.append((x.detach(), dy))  # detached, so that it does not keep x's graph
        return dy @ weight, None, None, None


class DeferredLinear(nn.Module):
    """Replaces an nn.Linear, with zb. pending: x and dy of the microbatches that wait for W, the
    oldest first."""

    def __init__(self, linear):
        super().__init__()
        self.weight, self.bias, self.pending = linear.weight, linear.bias, deque()

    def forward(self, x):  # (b/M, s, in) -> (b/M, s, out)
        return LinearWithDeferredWeightGrad.apply(x, self.weight, self.bias, self.pending)

    def add_weight_gradient(self):
        x, dy = (tensor.flatten(0, -2) for tensor in self.pending.popleft())  # (tokens, ...)
        self.weight.backward(dy.T @ x)  # backward() of a leaf adds to its .grad
        if self.bias is not None:
            self.bias.backward(dy.sum(0))


def defer_weight_gradients(model):
    """zb: put a DeferredLinear in the place of each nn.Linear of the layers."""
    for layer in model.model.layers:
        for name, module in list(layer.named_modules()):
            if isinstance(module, nn.Linear):
                layer.set_submodule(name, DeferredLinear(module))


# Copied from tp.py
def recompute_layers(model):
    """Keep each layer's input only. The layer's backward first runs its forward again, collectives
    included, up to the last tensor that the backward needs (arXiv 1604.06174)."""
    for layer in model.model.layers:  # HF's layers checkpoint themselves if these two are set
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)


def mark_gradients(model, group, args, tied):
    """Mark each parameter with the number of ranks that hold it (replicas), and with the group over
    which its gradient has to be summed (sum_over; None if it is complete).

        weight                    held by               its gradient on a rank     summed over
        tied embedding and head   first and last rank   of embedding, or of head   these two
        any other                 one rank              complete                   -
    """
    for parameter in model.parameters():
        parameter.replicas, parameter.sum_over = 1, None
    if tied and group.size() > 1:
        ranks = dist.get_process_group_ranks(group)
        ends = ranks[0], ranks[-1]
        ends_group = dist.new_group(ends, args.timeout)  # all ranks have to call it
        if ranks[group.rank()] in ends:
            weight = model.model.embed_tokens.weight
            weight.replicas, weight.sum_over = 2, ends_group


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


class Stage(nn.Module):
    """A stage of HF's decoder: hidden states (b/M, s, h) -> (b/M, s, h); the first takes ids."""

    def __init__(self, model, stage, stage_count):
        super().__init__()
        decoder, self.config = model.model, model.config
        self.start, self.end = shard_range(len(decoder.layers), stage, stage_count)
        self.embed_tokens = decoder.embed_tokens if stage == 0 else nn.Identity()
        self.rotary_emb = decoder.rotary_emb
        self.layers = decoder.layers[self.start : self.end]
        self.norm = decoder.norm if stage == stage_count - 1 else nn.Identity()

    def forward(self, x):
        hidden = self.embed_tokens(x)
        positions = torch.arange(x.shape[1], device=x.device)
        rotary = self.rotary_emb(hidden, positions[None])  # cos and sin, (1, s, head size)
        masks = layer_masks(self.config, hidden, x.shape[1])
        for layer, mask in zip(self.layers, masks[self.start : self.end]):
            hidden = layer(hidden, attention_mask=mask, position_embeddings=rotary)
        return self.norm(hidden)


class Pipeline:
    """The engine. Runs this rank's actions in the schedule's order: receive, compute, send. model
    has been through shard_model() and, with zb, defer_weight_gradients().

    Why no rank waits for ever: before an action a rank waits for its message, and simulate() has
    shown that this order can run. Before a send it waits for the previous send of that kind to end.
    Its receive is posted one action ahead, and F and B have channels of their own. This is enough
    for these four schedules, but some other orders would hang (tried with messages that leave only
    when they are received, as NCCL's large ones do: P up to 8, V up to 4, M up to 19). Messages
    need no tags, because both ends of a channel have them in the same order.
    """

    def __init__(self, model, group, args):
        self.M, self.dtype = args.microbatches, model.dtype
        self.hidden_size = model.config.hidden_size
        rank, P, V = group.rank(), group.size(), args.virtual_stages
        self.stage_count = P * V
        self.stages = {s: Stage(model, s, self.stage_count) for s in stages_of(rank, P, V)}
        self.deferred = [m for m in model.modules() if isinstance(m, DeferredLinear)]  # zb
        self.actions = all_schedules(args, P)[rank]
        self.receive_channels, self.send_channels = open_channels(group, self.stage_count, args)
        self.saved = {}  # from F to B: {(stage, microbatch): (input, output or loss)}
        self.sending = {}  # {kind: (work, tensor)}

    def run(self, ids, targets, loss_fn, backward=True):
        """Run all actions, or only the forwards, on ids and targets (b, s). Returns loss_fn(hidden
        (b/M, s, h), targets (b/M, s)) of each microbatch on the last stage's rank, [] on others."""
        batch = SimpleNamespace(loss_fn=loss_fn, losses=[])
        batch.ids, batch.targets = ids.tensor_split(self.M), targets.tensor_split(self.M)
        actions = [action for action in self.actions if backward or action.kind == "F"]
        with torch.set_grad_enabled(backward):
            incoming = self.start_receiving(actions[0], batch)
            for action, next_action in zip(actions, [*actions[1:], None]):
                received = self.wait(incoming)
                incoming = self.start_receiving(next_action, batch)  # it can arrive meanwhile
                result = self.compute(action, received, batch)
                if result is not None:
                    self.send(result, action.kind)
        for kind in list(self.sending):
            self.wait(self.sending.pop(kind))
        return batch.losses

    def compute(self, action, received, batch):
        """Run an action on what it has received; returns what it has to send, or None."""
        if action.kind == "F":
            return self.forward(action, received, batch)
        if action.kind == "B":
            return self.backward(action, received)
        return self.add_weight_gradients()

    def forward(self, action, received, batch):
        """F: from ids, or hidden states received, to hidden states (b/M, s, h). The last stage
        appends its loss instead, and returns None."""
        x = batch.ids[action.microbatch] if received is None else received.requires_grad_()
        out = self.stages[action.stage](x)
        is_last = action.stage == self.stage_count - 1
        if is_last:
            out = batch.loss_fn(out, batch.targets[action.microbatch])
            batch.losses.append(out.detach())
        if torch.is_grad_enabled():
            self.saved[action.stage, action.microbatch] = x, out
        return None if is_last else out.detach()

    def backward(self, action, received):
        """B: from the output's gradient (None for a loss) to the input's (None for ids)."""
        x, out = self.saved.pop((action.stage, action.microbatch))
        torch.autograd.backward(out, received)
        return x.grad

    def add_weight_gradients(self):
        """W: for the oldest pending microbatch, which is the action's."""
        for linear in self.deferred:
            linear.add_weight_gradient()

    def start_receiving(self, action, batch):
        """Start to receive what an action needs: (work, tensor). None: it needs no message."""
        if action is None or producer(action, self.stage_count) is None:
            return None
        ids = batch.ids[action.microbatch]
        tensor = torch.empty(*ids.shape, self.hidden_size, dtype=self.dtype, device=ids.device)
        return dist.irecv(tensor, *self.receive_channels[action.kind]), tensor

    def send(self, tensor, kind):
        """Start to send a result, which is kept until it is sent; first wait for the last one."""
        self.wait(self.sending.get(kind))
        tensor = tensor.contiguous()
        self.sending[kind] = dist.isend(tensor, *self.send_channels[kind]), tensor

    def wait(self, started):
        """Wait until a message, (work, tensor), is received or sent; returns its tensor."""
        if started is None:
            return None
        work, tensor = started
        work.wait()
        return tensor


def parallelize(model, group, args):
    """Turn HF's model, in place, into what this rank runs."""
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    shard_model(model, group, args, tied)
    mark_gradients(model, group, args, tied)
    if args.schedule == "zb":
        defer_weight_gradients(model)
    if args.recompute == "full":
        recompute_layers(model)
    model.pipeline = Pipeline(model, group, args)
    return model


# ---- 4. Loss and training ------------------------------------------------------------------------


# Copied from sp_ulysses.py
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


def microbatch_loss(model, hidden, targets, count, args):
    """A microbatch's share of the mean loss over the batch's `count` targets, from its hidden (b/M,
    s, h). The mean of the microbatches' means is another number: it gives a target more weight in a
    microbatch that has few."""
    chunk = hidden.shape[1] if args.loss == "full" else max(1, LOSS_CHUNK // len(hidden))
    total = 0
    for some, target in zip(hidden.split(chunk, 1), targets.split(chunk, 1)):
        if args.loss == "full":
            total += sum_of_losses(model, some, target)
        else:  # logits of one chunk at a time, recomputed in the backward
            total += checkpoint(sum_of_losses, model, some, target, use_reentrant=False)
    return total / count


def forward_backward(model, ids, labels, group, args, backward=True):
    """Mean loss of ids (b, s) and unshifted labels (b, s); it is the same on every rank. Leaves
    complete gradients in .grad, which has to be None before, or old parts would be summed again."""
    targets = F.pad(labels[:, 1:], (0, 1), value=IGNORE)  # a token's target is the next token
    count = (targets != IGNORE).sum()
    loss_fn = partial(microbatch_loss, model, count=count, args=args)
    losses = model.pipeline.run(ids, targets, loss_fn, backward)
    if backward:
        sum_gradients(model)
    wide = torch.promote_types(model.dtype, torch.float32)
    loss = torch.zeros((), dtype=wide, device=ids.device)
    for share in losses:  # only the last rank has some
        loss += share
    dist.all_reduce(loss, group=group)
    return loss


# Copied from tp.py
def sum_gradients(model):
    """Sum each gradient of which a rank has only a part, over the group that it is marked with."""
    for parameter in model.parameters():
        if parameter.sum_over is not None and parameter.sum_over.size() > 1:
            dist.all_reduce(parameter.grad, group=parameter.sum_over)


# Copied from tp.py
def grad_norm(model, group):
    """Norm of the whole model's gradient, in which replicas count once."""
    total = 0
    for p in model.parameters():
        total += torch.linalg.vector_norm(p.grad, dtype=torch.float64).square() / p.replicas
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

STRATEGY = "pp"
# Copied from sp_ulysses.py
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "smollm3", "olmo2")  # model_type
OPTIONS = {
    "--schedule": {"choices": list(SCHEDULES), "default": "1f1b"},
    "--microbatches": {"type": int, "help": "parts of the batch (default: --batch, or 4 or more)"},
    "--virtual-stages": {"type": int, "help": "stages per rank, interleaved only (2)"},
}
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


def finalize_args(args, world):
    """The script's own defaults; UsageError where model and options do not fit together."""
    is_interleaved = args.schedule == "interleaved"
    args.virtual_stages = V = args.virtual_stages or (2 if is_interleaved else 1)
    default = world * math.ceil(4 / world) if is_interleaved else 4
    args.microbatches = M = args.microbatches or args.batch or default
    args.batch = args.batch or M
    if V > 1 and not is_interleaved:
        raise UsageError(f"--virtual-stages {V} needs --schedule interleaved")
    if is_interleaved and M % world:
        more = world * math.ceil(M / world)
        problem = f"--schedule interleaved cannot run {M} microbatches on {world} ranks"
        instead = f"--microbatches {more} --batch {max(more, args.batch)}"
        raise UsageError(f"{problem}; use {instead}")
    if args.batch < M:
        problem = f"--batch {args.batch} cannot be cut into {M} microbatches"
        raise UsageError(f"{problem}; use --microbatches {args.batch} or --batch {M}")
    layers = args.config.num_hidden_layers
    if world == 1:  # no rank to take turns with, so one stage
        args.virtual_stages = 1
    elif world * V > layers:
        problem = f"{layers} layers cannot fill {world * V} stages, {V} a rank"
        raise UsageError(f"{problem}; use --nproc_per_node {max(1, layers // V)} or fewer")


def local_logits(model, ids, group, args):
    """The logits (b, s, v), on the last stage's rank alone; None on the others."""

    def head(hidden, targets):  # takes the place of the loss
        return model.lm_head(hidden)

    logits = model.pipeline.run(ids, ids, head, backward=False)
    if not logits:
        return None
    logits = torch.cat(logits)
    logits.replicas = 1
    return logits


def expected_traffic(model, group, args):
    """What one forward_backward() must send: rows (phase, op, calls, their message bytes)."""
    M, P, V = args.microbatches, group.size(), args.virtual_stages
    element, h = model.dtype.itemsize, model.config.hidden_size
    hidden = args.batch * args.length * h * element  # bytes of a (b, s, h)
    rows = [("forward", "all_reduce", 1, max(4, element))]  # the loss
    for phase, end in ("forward", P * V - 1), ("backward", 0):  # stage `end` sends nothing
        senders = sum(stage != end for stage in stages_of(group.rank(), P, V))
        rows.append((phase, "send", senders * M, senders * hidden))
    if model.config.tie_word_embeddings and P > 1 and group.rank() in (0, P - 1):
        rows.append(("backward", "all_reduce", 1, model.model.embed_tokens.weight.nbytes))
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
