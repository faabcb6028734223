"""Pipeline parallelism for LLaMA in one file: GPipe, 1F1B, interleaved, Zero Bubble on HF's model.

Each of P ranks holds some of the layers, a stage, and sends hidden states on. P = 2, 8 layers:

    rank 0: embedding, layers 0..3          rank 1: layers 4..7, norm, head, loss
        ids (b, s)
        | (b, s, h)          -- activations (b, s, h) -->   |
        |                    <-- gradients (b, s, h) ---    loss

With one batch, one stage would wait while the other computes. So the batch is cut into M
microbatches, and a schedule is the order in which a rank works on them. Here P = 2 and M = 4, with
--recompute none. F0 is the forward of microbatch 0. Its backward, "B0 --", takes twice as long
(three times with --recompute full, the default, which runs the forward again). A dot is idle time.

afab: all forward, all backward.
    rank 0   F0 F1 F2 F3 .  .  .  B0 -- B1 -- B2 -- B3 --
    rank 1   .  F0 F1 F2 F3 B0 -- B1 -- B2 -- B3 -- .  .
1f1b: one forward, one backward. It takes as long as afab, and keeps less.
    rank 0   F0 F1 .  .  B0 -- F2 B1 -- F3 B2 -- .  B3 --
    rank 1   .  F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 -- .  .
interleaved: a rank has V = 2 stages (rank 0 has layers 0, 1 and 4, 5; small letters are its
second stage). Each stage is half as long, so a column is half as much time.
    rank 0   F0 F1 f0 f1 F2 .  b0 -- F3 b1 -- f2 B0 -- f3 B1 -- .  b2 -- .  b3 -- B2 -- B3 --
    rank 1   .  F0 F1 f0 b0 -- f1 b1 -- F2 B0 -- F3 B1 -- f2 b2 -- f3 b3 -- B2 -- B3 -- .  .
zb: the backward is cut in two. B computes the gradient of the stage's input, for which the rank
before it waits; W computes the gradients of the layers' weight matrices, which no other rank needs.
F, B and W take equally long.
    rank 0   F0 F1 .  B0 W0 F2 B1 W1 F3 B2 W2 B3 W3
    rank 1   .  F0 B0 F1 B1 W0 F2 B2 W1 F3 B3 W2 W3

For M >= P, if all stages take equally long (in fact the last has head and loss, too):

                  idle, of all time   messages of all     microbatches that rank r keeps at most
                                      ranks, each way     for their B              for their W
    afab          (P-1) / (M+P-1)     M (P-1)             M                        -
    1f1b          (P-1) / (M+P-1)     M (P-1)             P-r                      -
    interleaved   (P-1) / (V M+P-1)   M (V P-1)           min(M, P + (P-2r-1)/V)   -
    zb            (P-1) / (3 M+P-1)   M (P-1)             P-r                      r

zb keeps P in all: right after a B it keeps P-r-1 of them for their B and r+1 for their W. A
microbatch that is kept in one of V stages counts 1/V. The idle time of the first three is the same
for any lengths of F and B. zb's is that for F = B = W; bubble_formula() has it for other times.

For each token and layer (of a LLaMA) a microbatch keeps for its B the layer's input, h
numbers, with --recompute full, and 19 to 27 h with none. With either it keeps for its W the
input and the output's gradient of each weight matrix, 14 to 19 h. So with full, zb needs much
more memory than 1f1b. --mode schedule counts the bytes, --mode bubble measures them.

A message is (b/M, s, h), so each boundary of two stages sends one (b, s, h) each way, where tp.py
all-reduces 4 a layer (5 with recomputation). Weights, gradients and optimizer state shrink by P,
except for embedding and head; if these are tied, first and last rank have both, and sum gradients.

    torchrun --nproc_per_node=2 pp.py --mode correctness --schedule 1f1b --microbatches 4
    torchrun --nproc_per_node=2 pp.py --mode all --schedule zb
    torchrun --nproc_per_node=2 pp.py --mode bubble --schedule zb  # measured beside simulated
    python pp.py --mode schedule --schedule 1f1b --ranks 4 --microbatches 6  # drawn by one process
    torchrun --nproc_per_node=2 labs/torch_pipeline.py --mode benchmark  # PyTorch runs the stages
    torchrun --nproc_per_node=2 labs/break_it.py pp.py mean_of_means --microbatches 3
    python labs/lab18_schedules/lesson.py  # the lab that builds this, and a schedule in a V
    notebooks/explorer.html#walk&pp      # a step of this file line by line, on every rank
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
from collections import Counter, deque
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple
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

STRATEGY = "pp"
IGNORE = -100  # the label of a token that is no target: PyTorch's and Hugging Face's convention
LOSS_CHUNK = 2048  # --loss chunked: at most LOSS_CHUNK * vocabulary logits on a rank at once

# Copied from sp_ulysses.py
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


# ---- 2. Communication: the schedules, and the channels for their messages ------------------------


class Action(NamedTuple):
    """A unit of a rank's work. kind F: forward; B: backward; W, only with zb: the gradients of the
    layers' linear weights, which B then leaves out (the names of the Zero Bubble paper)."""

    kind: str
    stage: int  # 0 to P V - 1
    microbatch: int

    def __str__(self):
        return f"{self.kind}{self.microbatch}"


# Copied from tp.py
def split(n, rank, world):
    """[start, end) of the rank's share of n things: the first n % world ranks hold one more."""
    base, extra = divmod(n, world)
    return rank * base + min(rank, extra), (rank + 1) * base + min(rank + 1, extra)


def stages_of(rank, P, V):
    """A rank's stages: the first P are on ranks 0 to P - 1, and so are the next P, ..."""
    return range(rank, V * P, P)


def rank_of(stage, P):
    """The rank that has a stage."""
    return stage % P


def afab(rank, P, M, V=1):
    """All forward, all backward (GPipe, arXiv 1811.06965): a rank's actions. V is not used."""
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
    groups = [range(m, m + P) for m in range(0, M, P)]
    forwards = [Action("F", s, m) for group in groups for s in stages for m in group]
    backwards = [Action("B", s, m) for group in groups for s in reversed(stages) for m in group]
    # As in Megatron, P forwards in each stage but the last, and 2 for each rank after this
    # one. With 1 the bubble is the same if messages take no time, but 2 leave time for
    # messages. With P = 4 and V = 2 the warmup is 10, 8, 6, 4
    warmup = min((V - 1) * P + 2 * (P - rank - 1), V * M)
    yield from forwards[:warmup]
    for forward, backward in zip(forwards[warmup:], backwards):  # steady state
        yield forward
        yield backward
    yield from backwards[V * M - warmup :]  # cooldown


def zero_bubble(rank, P, M, V=1):
    """ZB-H1 (arXiv 2401.10241): 1F1B in which rank r runs W of microbatch m after B of m + r. So
    r microbatches wait for their W, and between that B and W one more does. After its last B a
    rank runs r + 1 W, while the ranks before it still have B to do."""
    for action in one_f_one_b(rank, P, M):
        yield action
        if action.kind == "B" and action.microbatch >= rank:
            yield Action("W", rank, action.microbatch - rank)
    for m in range(max(M - rank, 0), M):
        yield Action("W", rank, m)


SCHEDULES = {"afab": afab, "1f1b": one_f_one_b, "interleaved": interleaved, "zb": zero_bubble}


def producer(action, stage_count):
    """The action in a neighboring stage whose result an action receives, or None: F of the first
    stage starts from ids, B of the last from the loss, and W from what its B has kept."""
    if action.kind == "F" and action.stage > 0:
        return action._replace(stage=action.stage - 1)
    if action.kind == "B" and action.stage < stage_count - 1:
        return action._replace(stage=action.stage + 1)
    return None


def dependencies(action, stage_count):
    """The actions, of this stage or another, that have to end before an action can begin."""
    found = [producer(action, stage_count)]
    if action.kind in "BW":
        found.append(action._replace(kind={"B": "F", "W": "B"}[action.kind]))
    return [dependency for dependency in found if dependency is not None]


def simulate(schedules, stage_count, cost):
    """When each action would run: [(rank, action, begin, end)], from every rank's list of actions.
    cost(action) is its time; messages take none. Actions that a deadlock holds up are left out."""
    rows = []
    ended = {}  # {action: when}
    free = [0.0] * len(schedules)  # when each rank can begin its next action
    waiting = [deque(actions) for actions in schedules]
    progress = True
    while progress:
        progress = False
        for rank, actions in enumerate(waiting):
            while actions and all(d in ended for d in dependencies(actions[0], stage_count)):
                action = actions.popleft()
                begin = max([free[rank], *(ended[d] for d in dependencies(action, stage_count))])
                free[rank] = ended[action] = begin + cost(action)
                rows.append((rank, action, begin, ended[action]))
                progress = True
    return rows


def fault(schedules, V, M):
    """What is wrong with a schedule, given as every rank's list of actions; "" if nothing is."""
    P = len(schedules)
    kinds = {"F", "B"} | {action.kind for actions in schedules for action in actions}
    for rank, actions in enumerate(schedules):
        if sorted(actions) != list(product(sorted(kinds), stages_of(rank, P, V), range(M))):
            return f"rank {rank} does not do each of its actions once"
        b_order = [action for action in actions if action.kind == "B"]
        w_order = [action._replace(kind="B") for action in actions if action.kind == "W"]
        if w_order not in ([], b_order):  # each W is of the microbatch that has waited longest
            return f"rank {rank} runs W in another order than B"
    ran = {action for _, action, _, _ in simulate(schedules, P * V, lambda action: 1)}
    left = [[action for action in actions if action not in ran] for actions in schedules]
    stuck = [(rank, actions[0]) for rank, actions in enumerate(left) if actions]
    if stuck:
        each = ", ".join(f"rank {rank} with {a} of stage {a.stage}" for rank, a in stuck)
        return f"deadlock: these wait for each other: {each}"
    # NCCL's messages have no tags: they have to be received in the order in which they are sent
    for rank, kind in product(range(P), "FB"):
        received = [producer(a, P * V) for a in schedules[rank] if a.kind == kind]
        sender = rank_of(rank - 1 if kind == "F" else rank + 1, P)
        places = [schedules[sender].index(action) for action in received if action is not None]
        if places != sorted(places):
            return f"rank {rank} takes {kind} in another order than rank {sender} sends it"
    return ""


def all_schedules(args, P):
    """Every rank's list of actions, in the order in which it runs them. Raises UsageError."""
    schedule, M, V = SCHEDULES[args.schedule], args.microbatches, args.virtual_stages
    schedules = [list(schedule(rank, P, M, V)) for rank in range(P)]
    if problem := fault(schedules, V, M):  # fail now rather than hang
        raise UsageError(f"--schedule {args.schedule}: {problem}")
    return schedules


def open_channels(group, stage_count, args):
    """Two dicts {kind: (peer, process group)}: where an action of a kind receives from, and where
    it sends to. F sends to the next rank (the last to the first), B to the one before. Each kind
    and pair has a group, so no message waits behind one of the other kind. Here each sends a
    zero in a fixed order, because NCCL connects two ranks at the first message, and blocks both."""
    ranks, P = dist.get_process_group_ranks(group), group.size()
    receive_channels, send_channels = {}, {}
    timeout = datetime.timedelta(seconds=args.timeout)
    for stage in range(min(stage_count - 1, P)):  # to stage + 1; later ones join the same ranks
        before, after = ranks[rank_of(stage, P)], ranks[rank_of(stage + 1, P)]
        for kind, sender, receiver in ("F", before, after), ("B", after, before):
            channel = dist.new_group([sender, receiver], timeout)  # all ranks have to call it
            if ranks[group.rank()] == sender:
                send_channels[kind] = receiver, channel
                dist.send(torch.zeros(1, device=args.device), receiver, channel)
            elif ranks[group.rank()] == receiver:
                receive_channels[kind] = sender, channel
                dist.recv(torch.zeros(1, device=args.device), sender, channel)
    return receive_channels, send_channels


# ---- 3. Sharding LLaMA: the stages, and the engine that runs them --------------------------------


class LinearWithDeferredWeightGrad(torch.autograd.Function):
    """F.linear, whose backward computes dx alone and leaves x and dy to W (arXiv 2401.10241)."""

    @staticmethod
    def forward(ctx, x, weight, bias, pending):
        ctx.save_for_backward(x, weight)
        ctx.pending = pending
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        ctx.pending.append((x.detach(), dy))  # without the graph behind x
        return dy @ weight, None, None, None


class DeferredLinear(nn.Module):
    """Takes an nn.Linear's place, with zb. pending: x and dy of each microbatch that waits for W,
    the oldest first."""

    def __init__(self, linear):
        super().__init__()
        self.weight, self.bias, self.pending = linear.weight, linear.bias, deque()

    def forward(self, x):  # (b/M, s, in) -> (b/M, s, out)
        return LinearWithDeferredWeightGrad.apply(x, self.weight, self.bias, self.pending)

    def add_weight_gradient(self):
        x, dy = (tensor.flatten(0, -2) for tensor in self.pending.popleft())  # (tokens, in or out)
        self.weight.backward(dy.T @ x)  # backward() of a leaf adds to its .grad
        if self.bias is not None:
            self.bias.backward(dy.sum(0))


class Stage(nn.Module):
    """A stage of HF's LlamaModel: hidden states (b/M, s, h) -> (b/M, s, h); the first takes ids.
    HF's own forward runs the layers, and makes positions, mask and rotary tables for them."""

    def __init__(self, model, stage, stage_count):
        super().__init__()
        self.input_name = "input_ids" if stage == 0 else "inputs_embeds"
        start, end = split(len(model.model.layers), stage, stage_count)
        # A second LlamaModel that shares the modules; with its own _modules it can replace some
        self.decoder = copy.copy(model.model)
        self.decoder._modules = model.model._modules.copy()
        self.decoder.layers = model.model.layers[start:end]
        if stage < stage_count - 1:
            self.decoder.norm = nn.Identity()
        if getattr(model.config, "layer_types", None):  # HF looks up a layer's type by its index
            self.decoder.config = copy.copy(model.config)
            self.decoder.config.layer_types = model.config.layer_types[start:end]

    def forward(self, x):
        return self.decoder(**{self.input_name: x}, use_cache=False).last_hidden_state


class Pipeline:
    """The engine. Runs this rank's actions in the schedule's order: receive, compute, send. A
    run leaves timeline, rows like simulate()'s, and peak, which most_in_flight() predicts."""

    def __init__(self, model, group, args):
        self.rank, self.P, self.M = group.rank(), group.size(), args.microbatches
        self.dtype, self.hidden_size = model.dtype, model.config.hidden_size
        self.stage_count = self.P * args.virtual_stages
        own = stages_of(self.rank, self.P, args.virtual_stages)
        self.stages = {stage: Stage(model, stage, self.stage_count) for stage in own}
        self.deferred = [m for m in model.modules() if isinstance(m, DeferredLinear)]  # zb
        self.actions = all_schedules(args, self.P)[self.rank]
        self.receive_channels, self.send_channels = open_channels(group, self.stage_count, args)
        self.saved = {}  # from F to B: {(stage, microbatch): (input, output)}
        self.synchronize = False  # whether now() waits for the GPU
        self.after_action = lambda: None  # --mode bubble looks at the memory

    def run(self, ids, targets, loss_fn, backward=True):
        """Run all actions, or only the forwards, on ids and targets (b, s). Returns loss_fn(hidden
        (b/M, s, h), targets (b/M, s)) of each microbatch on the last stage's rank, [] on others."""
        ids, targets = ids.tensor_split(self.M), targets.tensor_split(self.M)  # sizes may differ
        self.batch = SimpleNamespace(ids=ids, targets=targets, loss_fn=loss_fn, losses=[])
        self.timeline, self.peak = [], 0
        compute = {"F": self.forward, "B": self.backward, "W": self.add_weight_gradients}
        actions = [action for action in self.actions if backward or action.kind == "F"]
        start = self.now()
        sending = {"F": deque(), "B": deque()}  # (work, tensor), the oldest first
        incoming = self.start_receiving(actions[0])
        for action, next_action in zip(actions, [*actions[1:], None]):
            received = None
            if incoming is not None:
                work, received = incoming
                work.wait()
            incoming = self.start_receiving(next_action)  # it can arrive during this action

            begin = self.now() - start
            result = compute[action.kind](action, received)
            self.timeline.append((self.rank, action, begin, self.now() - start))

            if result is not None:
                self.send(result, sending[action.kind], *self.send_channels[action.kind])
            # In each DeferredLinear the same microbatches wait for W, so look at the first
            waiting_for_w = len(self.deferred[0].pending) if self.deferred else 0
            self.peak = max(self.peak, len(self.saved) + waiting_for_w)
            self.after_action()
            if not backward:
                self.saved.clear()  # no B takes it out
        for work, _ in [*sending["F"], *sending["B"]]:
            work.wait()
        losses, self.batch = self.batch.losses, None  # its loss_fn keeps the model alive
        return losses

    def forward(self, action, received):
        """F: from ids, or hidden states received, to hidden states (b/M, s, h). The last stage
        adds to losses instead, and returns None."""
        batch = self.batch
        x = batch.ids[action.microbatch] if action.stage == 0 else received.requires_grad_()
        out = self.stages[action.stage](x)
        is_last = action.stage == self.stage_count - 1
        if is_last:
            out = batch.loss_fn(out, batch.targets[action.microbatch])
            batch.losses.append(out.detach())
        self.saved[action.stage, action.microbatch] = x, out
        return None if is_last else out.detach()

    def backward(self, action, received):
        """B: from the output's gradient (None for a loss) to the input's (None for ids)."""
        x, out = self.saved.pop((action.stage, action.microbatch))
        torch.autograd.backward(out, received)
        return x.grad

    def add_weight_gradients(self, action, received):
        """W: of the oldest microbatch that waits for it."""
        for linear in self.deferred:
            linear.add_weight_gradient()

    def start_receiving(self, action):
        """Start to receive what an action needs: (work, tensor). None: it needs no message."""
        if action is None or producer(action, self.stage_count) is None:
            return None
        ids = self.batch.ids[action.microbatch]
        tensor = torch.empty(*ids.shape, self.hidden_size, dtype=self.dtype, device=ids.device)
        return dist.irecv(tensor, *self.receive_channels[action.kind]), tensor

    def send(self, tensor, sending, peer, channel):
        """Start to send a result. `sending` keeps it until it is sent, but at most P of a
        kind, to save memory: the next one first waits for the oldest. This could deadlock
        where a message leaves only when it is received, as NCCL's large ones do. The tests
        simulate that, and no schedule of this file deadlocks."""
        if len(sending) == self.P:
            work, _ = sending.popleft()
            work.wait()
        tensor = tensor.contiguous()
        sending.append((dist.isend(tensor, peer, channel), tensor))

    def now(self):
        if self.synchronize:  # only this stream; others may still wait for the next message
            torch.cuda.current_stream().synchronize()
        return time.perf_counter()


def shard_model(model, group, args):
    """Keep this rank's stages of HF's model, in place, and nn.Identity() in the others' places."""
    rank, P, V, layers = group.rank(), group.size(), args.virtual_stages, model.model.layers
    ranges = [split(len(layers), stage, P * V) for stage in stages_of(rank, P, V)]
    for i in range(len(layers)):
        if not any(start <= i < end for start, end in ranges):
            layers[i] = nn.Identity()
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    if rank > 0 and not (tied and rank == P - 1):  # there it is lm_head's weight, under HF's name
        model.model.embed_tokens = nn.Identity()
    if rank < P - 1:
        model.model.norm, model.lm_head = nn.Identity(), nn.Identity()
    note_gradients(model, group, args, tied and P > 1)


def note_gradients(model, group, args, tied):
    """Note on each parameter how many ranks hold it (replicas) and, where each of them computes
    only a part of its gradient, the group that has to add the parts up (sum_over)."""
    for parameter in model.parameters():
        parameter.replicas, parameter.sum_over = 1, None
    if tied:  # the first rank has its gradient as embedding, the last as lm_head
        ranks = dist.get_process_group_ranks(group)
        ends = dist.new_group([ranks[0], ranks[-1]], datetime.timedelta(seconds=args.timeout))
        if group.rank() in (0, group.size() - 1):
            weight = model.model.embed_tokens.weight
            weight.replicas, weight.sum_over = 2, ends


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
    for layer in model.model.layers:  # two attributes of HF's layers
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)


def parallelize(model, group, args):
    """HF's model, in place, as this rank runs it."""
    shard_model(model, group, args)
    if args.schedule == "zb":
        defer_weight_gradients(model)
    if args.recompute == "full":
        recompute_layers(model)
    model.pipeline = Pipeline(model, group, args)
    return model


# ---- 4. Loss and step ----------------------------------------------------------------------------


# Copied from sp_ulysses.py
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


def microbatch_loss(model, hidden, targets, count, args):
    """A microbatch's share of the mean loss over the batch's `count` targets, from its hidden
    (b/M, s, h). The mean of the microbatches' means is another number, because a target in a
    microbatch of few targets weighs more in it."""
    size = hidden.shape[1]
    chunk_loss = sum_of_losses
    if args.loss == "chunked":  # logits of one chunk at a time, recomputed in the backward
        size = max(1, LOSS_CHUNK // len(hidden))
        chunk_loss = partial(checkpoint, sum_of_losses, use_reentrant=False)
    chunks = zip(hidden.split(size, 1), targets.split(size, 1))
    return sum(chunk_loss(model, h, t) for h, t in chunks) / count


def forward_backward(model, ids, labels, group, args, backward=True):
    """Mean loss of ids (b, s) and unshifted labels (b, s); it is the same on every rank.
    Before it each .grad has to be None, since sum_gradients() would sum an older one again.
    After it each .grad is complete."""
    targets = F.pad(labels[:, 1:], (0, 1), value=IGNORE)  # a token's target is the next token
    count = (targets != IGNORE).sum()
    loss_fn = partial(microbatch_loss, model, count=count, args=args)
    losses = model.pipeline.run(ids, targets, loss_fn, backward)
    if backward:
        sum_gradients(model)
    dtype = torch.promote_types(model.dtype, torch.float32)
    loss = sum(
        losses, torch.zeros((), dtype=dtype, device=ids.device)
    )  # 0 on ranks before the last
    dist.all_reduce(loss, group=group)
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


# ---- What sections 5 and 6 need from this script: logits, messages, --mode schedule, --mode bubble


def local_logits(model, ids, group, args):
    """The logits (b, s, v), on the last stage's rank alone; None on the others."""
    logits = model.pipeline.run(ids, ids, lambda hidden, _: model.lm_head(hidden), backward=False)
    if not logits:
        return None
    logits = torch.cat(logits)
    logits.replicas = 1
    return logits


def expected_traffic(model, group, args):
    """What one step must send: rows (phase, op, calls, message bytes), as Meter counts them."""
    P, M, element = group.size(), args.microbatches, model.dtype.itemsize
    stage_count = P * args.virtual_stages
    hidden_bytes = args.batch * args.length * model.config.hidden_size * element  # of (b, s, h)
    rows = [("forward", "all_reduce", 1, max(4, element))]  # the loss
    for phase, end in ("forward", stage_count - 1), ("backward", 0):  # stage `end` sends none
        own = stages_of(group.rank(), P, args.virtual_stages)
        senders = sum(stage != end for stage in own)
        rows.append((phase, "send", senders * M, senders * hidden_bytes))
    summed = [p for p in model.parameters() if p.sum_over is not None]  # the tied embedding
    return rows + [("backward", "all_reduce", 1, p.nbytes) for p in summed]


def bubble(rows, ranks):
    """The mean part of the time, from first begin to last end, in which a rank is idle."""
    _, _, begins, ends = zip(*rows)
    return 1 - (sum(ends) - sum(begins)) / (ranks * (max(ends) - min(begins)))


def bubble_formula(P, M, V, forward, backward, weights=0.0):
    """bubble() in closed form, from the times of a stage's F, B, W; None where no_formula() says
    why. The last rank is idle for P - 1 F before its first F, and for P - 1 B after its last B,
    until the first rank's last B ends. With zb it still has P W to run then, and the first
    rank has one, so it is idle for P - 1 W less. In all every rank is idle equally long."""
    if no_formula(P, M, forward, backward, weights):
        return None
    busy = V * M * (forward + backward + weights)
    idle = (P - 1) * (forward + backward - weights)
    return idle / (busy + idle)


def no_formula(P, M, forward, backward, weights):
    """Why bubble_formula() does not hold, or "": zb's W have to fit between F and B."""
    if weights and M < P:
        return "zb has too few microbatches"
    return "a W is longer than an F or a B" if weights > min(forward, backward) else ""


def peak_kept(actions, kept):
    """The most that a rank keeps at once while it runs its actions. kept["F", stage]: what a
    microbatch keeps there from its F to its B; kept["B", stage]: from its B to its W."""
    now, most = 0, 0
    for action in actions:
        if action.kind == "F":
            now += kept["F", action.stage]
        elif action.kind == "B":
            now += kept["B", action.stage] - kept["F", action.stage]
        else:
            now -= kept["B", action.stage]
        most = max(most, now)
    return most


def most_in_flight(actions):
    """Most (stage, microbatch) pairs that a rank keeps at once: from F to B, and with zb to W."""
    has_w = any(action.kind == "W" for action in actions)
    kept = {("F", action.stage): 1 for action in actions}
    return peak_kept(actions, kept | {("B", action.stage): int(has_w) for action in actions})


def kept_bytes(args, stage_count):
    """{(kind, stage): bytes}: what the largest microbatch keeps in a stage, for peak_kept(). The
    stages run on the device "meta", whose tensors have shapes and no data."""
    kept = {}
    shape = math.ceil(args.batch / args.microbatches), args.length
    transformers.AttentionInterface.register("on_meta", attention_on_meta)
    how = {"dtype": getattr(torch, args.dtype), "attn_implementation": "on_meta"}
    if args.attn == "eager":
        how["attn_implementation"] = "eager"
    # HF would look at the positions' values: are several documents packed into a sequence?
    packed = mock.patch.object(
        transformers.masking_utils, "find_packed_sequence_indices", lambda positions: None
    )
    with torch.device("meta"), packed:
        model = transformers.AutoModelForCausalLM.from_config(args.config, **how).train()
        if args.schedule == "zb":
            defer_weight_gradients(model)
        if args.recompute == "full":
            recompute_layers(model)
        for stage in range(stage_count):
            run = Stage(model, stage, stage_count)
            with Meter() as meter:
                before = meter.now()
                x = torch.zeros(shape, dtype=torch.int64)
                if stage > 0:
                    x = torch.zeros(*shape, args.config.hidden_size, dtype=model.dtype)
                    x.requires_grad_()
                out = run(x)
                if stage == stage_count - 1:
                    targets = torch.zeros(shape, dtype=torch.int64)
                    out = microbatch_loss(model, out, targets, 1, args)
                kept["F", stage] = meter.now() - before
                torch.autograd.backward(out, torch.zeros_like(out))
                x = out = targets = None
                model.zero_grad()
                kept["B", stage] = meter.now() - before  # in DeferredLinears, for W; else nothing
            for module in run.modules():
                if isinstance(module, DeferredLinear):
                    module.pending.clear()
    return kept


def attention_on_meta(module, query, key, value, mask, **others):
    """The kernel that a CPU takes. On meta PyTorch would choose one that keeps all scores."""
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return flash(query, key, value, 0.0, True)[0].transpose(1, 2), None


def report(rows, bubbles, columns):
    """Print each rank's times and columns {title: a value for each rank}; and the bubbles."""
    _, _, begins, ends = zip(*rows)
    span = max(ends) - min(begins)
    table = []
    for rank, values in enumerate(zip(*columns.values())):
        busy = sum(end - begin for r, _, begin, end in rows if r == rank)
        table.append({"rank": rank, "busy": busy, "idle": span - busy} | dict(zip(columns, values)))
    print_table(table)
    print_table([{"part of the time": how, "": part} for how, part in bubbles.items()])


def draw(rows, P, unit, width=88):
    """The start of a timeline as lines of text, a line for a rank, a column for a unit of time."""
    grid = [["."] * round(max(end for *_, end in rows) / unit) for _ in range(P)]
    for rank, action, begin, end in rows:
        first, last = round(begin / unit), round(end / unit)
        name = str(action) if action.stage == rank else str(action).lower()  # a later stage
        grid[rank][first:last] = [name] + ["--"] * (last - first - 1)
    cell = 1 + max(len(name) for names in grid for name in names)
    end = " ..." if len(grid[0]) > width // cell else ""
    lines = ["".join(name.ljust(cell) for name in names[: width // cell]) for names in grid]
    return [f"  rank {rank:<3} {line}".rstrip() + end for rank, line in enumerate(lines)]


def show_schedule(args, group):
    """--mode schedule: draw and time the schedule of args.ranks ranks, simulated on one."""
    P, M, V = args.ranks, args.microbatches, args.virtual_stages
    again = args.recompute == "full"  # the backward begins with another forward
    times = {"F": 1 / V, "B": (2 + again) / V, "W": 0.0}  # unit: the forward of all a rank's stages
    if args.schedule == "zb":
        times = {"F": 1.0, "B": 1.0 + again, "W": 1.0}
    print(
        f"  --recompute {args.recompute}, times:", *(f"{k} {n:.3g}" for k, n in times.items() if n)
    )
    schedules = all_schedules(args, P)
    rows = simulate(schedules, P * V, lambda action: times[action.kind])
    print(*draw(rows, P, 1 / V), sep="\n")
    formula = bubble_formula(P, M, V, *times.values())
    bubbles = {"bubble": bubble(rows, P), "bubble_formula": formula}
    in_flight = [most_in_flight(actions) for actions in schedules]
    kept = kept_bytes(args, P * V)
    peaks = [peak_kept(actions, kept) for actions in schedules]
    columns = {"most kept: microbatches": [n / V for n in in_flight]}
    report(rows, bubbles, columns | {"MiB": [n / 2**20 for n in peaks]})
    result = bubbles | {"in_flight": in_flight, "kept_bytes": peaks, "schedule": args.schedule}
    result |= {"timeline": [[rank, *action, begin, end] for rank, action, begin, end in rows]}
    result |= {"ranks": P, "virtual_stages": V}
    result["passed"] = formula is None or abs(result["bubble"] - formula) < 1e-9
    by_formula = f"no formula: {no_formula(P, M, *times.values())}"
    if formula is not None:
        by_formula = f"by the formula {formula:.4f}"
    return f"no deadlock; the bubble is {result['bubble']:.4f}, {by_formula}", result


def measure_bubble(args, group):
    """--mode bubble: the part of a step in which ranks are idle. Measured, it includes the
    messages' time and that of unequal stages (each rank's clock begins with its step).
    Simulated with the measured times it includes that of unequal stages, by the formula
    neither. Also what each rank keeps at its peak, measured (with messages that come and go)
    and by the schedule. The verdict is about the number of microbatches."""
    P, V = group.size(), args.virtual_stages
    model = parallelize(load_model(args), group, args)
    model.pipeline.synchronize = args.device.type == "cuda"
    ids, labels = proof_batch(args, group)
    runs = []
    for _ in range(1 + args.bench_iters):  # the first warms up
        gather_objects(None, group)  # the ranks begin together
        forward_backward(model, ids, labels, group, args)
        model.zero_grad()
        runs.append(sum(gather_objects(model.pipeline.timeline, group), []))
    rows = sorted(runs[1:], key=lambda rows: bubble(rows, P))[args.bench_iters // 2]  # the median
    seconds = {action: end - begin for _, action, begin, end in rows}
    kinds = "FBW" if args.schedule == "zb" else "FB"
    means = [statistics.mean(t for a, t in seconds.items() if a.kind == kind) for kind in kinds]
    schedules = all_schedules(args, P)
    bubbles = {"bubble": bubble(rows, P)}
    bubbles["bubble_simulated"] = bubble(simulate(schedules, P * V, seconds.get), P)
    bubbles["bubble_formula"] = bubble_formula(P, args.microbatches, V, *means)

    kept = []
    with Meter() as meter:
        before = meter.now()

        def look():
            grads = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
            kept.append(meter.now() - before - grads)

        model.pipeline.after_action = look
        forward_backward(model, ids, labels, group, args)
    peaks = gather_objects(max(kept), group)
    in_flight = gather_objects(model.pipeline.peak, group)
    by_schedule = kept_bytes(args, P * V)
    expected = [most_in_flight(actions) for actions in schedules]
    expected_bytes = [peak_kept(actions, by_schedule) for actions in schedules]
    columns = {"most kept: microbatches": [n / V for n in in_flight]}
    columns |= {"expected": [n / V for n in expected], "MiB": [n / 2**20 for n in peaks]}
    report(rows, bubbles, columns | {"expected MiB": [n / 2**20 for n in expected_bytes]})
    result = bubbles | {"in_flight": in_flight, "in_flight_expected": expected}
    result |= {"kept_bytes": peaks, "kept_bytes_expected": expected_bytes}
    result |= {"timeline": [[rank, *action, begin, end] for rank, action, begin, end in rows]}
    summary = f"ranks are idle {bubbles['bubble']:.0%}; in flight {in_flight}, expected {expected}"
    return summary, result | {"passed": in_flight == expected}


OPTIONS = {
    "--schedule": {"choices": list(SCHEDULES), "default": "1f1b"},
    "--microbatches": {"type": int, "help": "parts of the batch (--batch, else 4 or more)"},
    "--virtual-stages": {"type": int, "help": "stages per rank, interleaved only (2)"},
    "--ranks": {"type": int, "default": 4, "help": "ranks that --mode schedule simulates (4)"},
}
OWN_MODES = {"schedule": show_schedule, "bubble": measure_bubble}


def finalize_args(args, world):
    """The script's own defaults; UsageError where model and options do not fit together."""
    if args.mode == "schedule":  # of any number of ranks and layers
        world = args.ranks
    args.virtual_stages = V = args.virtual_stages or (2 if args.schedule == "interleaved" else 1)
    default = world * math.ceil(4 / world) if args.schedule == "interleaved" else 4
    args.microbatches = M = args.microbatches or args.batch or default
    args.batch = args.batch or M
    if V > 1 and args.schedule != "interleaved":
        raise UsageError(f"--virtual-stages {V} needs --schedule interleaved")
    if args.schedule == "interleaved" and M % world:
        M, problem = world * math.ceil(M / world), f"cannot run {M} microbatches on {world} ranks"
        instead = f"--microbatches {M} --batch {max(M, args.batch)}"
        raise UsageError(f"--schedule interleaved {problem}; use {instead}")
    if args.batch < M:
        problem = f"--batch {args.batch} cannot be cut into {M} microbatches"
        raise UsageError(f"{problem}; use --microbatches {args.batch} or --batch {M}")
    layers = args.config.num_hidden_layers
    if world == 1:  # no rank to take turns with, so one stage
        args.virtual_stages = 1
    elif args.mode != "schedule" and world * V > layers:
        problem = f"{layers} layers cannot fill {world * V} stages, {V} a rank"
        raise UsageError(f"{problem}; use --nproc_per_node {max(1, layers // V)} or fewer")
    all_schedules(args, world)  # raises UsageError where they cannot run


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
