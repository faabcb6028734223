"""Pipeline parallelism for LLaMA in one file: GPipe, 1F1B, interleaved, Zero Bubble on HF's model.

Each of P ranks holds some of the layers, a stage, and sends hidden states on. P = 2, 8 layers:

    rank 0: embedding, layers 0..3          rank 1: layers 4..7, norm, head, loss
        ids (b, s)
        | (b, s, h)          -- activations (b, s, h) -->   |
        |                    <-- gradients (b, s, h) ---    loss

With one batch, one stage would wait while the other computes. So the batch is cut into M
microbatches, and a schedule is the order in which a rank works on them. Here P = 2 and M = 4. F0 is
the forward of microbatch 0; B0 -- is its backward, which takes twice as long (three times with
--recompute full, the default, which runs the forward again); a dot is waiting.

afab: all forward, all backward. Every rank keeps the activations of all M microbatches.
    rank 0   F0 F1 F2 F3 .  .  .  B0 -- B1 -- B2 -- B3 --
    rank 1   .  F0 F1 F2 F3 B0 -- B1 -- B2 -- B3 -- .  .
1f1b: one forward, one backward. Takes as long as afab, keeps at most P microbatches' activations.
    rank 0   F0 F1 .  .  B0 -- F2 B1 -- F3 B2 -- .  B3 --
    rank 1   .  F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 -- .  .
interleaved: a rank has V = 2 stages (rank 0 layers 0, 1, 4, 5; small letters are its second stage),
each half as long, so a column is half as much time. 1/V of the waiting, but more messages.
    rank 0   F0 F1 f0 f1 F2 .  b0 -- F3 b1 -- f2 B0 -- f3 B1 -- .  b2 -- .  b3 -- B2 -- B3 --
    rank 1   .  F0 F1 f0 b0 -- f1 b1 -- F2 B0 -- F3 B1 -- f2 b2 -- f3 b3 -- B2 -- B3 -- .  .
zb: the backward is cut in two. B computes the gradient of the stage's input, for which the rank
before it waits; W computes those of its layers' matrices, for which no rank waits. F, B and W take
equally long (with --recompute none).
    rank 0   F0 F1 .  B0 W0 F2 B1 W1 F3 B2 W2 B3 W3
    rank 1   .  F0 B0 F1 B1 W0 F2 B2 W1 F3 B3 W2 W3

Cost: one (b, s, h) is sent forward and one back at each of the V P - 1 boundaries between stages:
far less than tp.py's 4 all-reduces a layer. Weights, gradients and optimizer state shrink by P; but
embeddings tied to the head are on the first and the last rank, and their gradients are summed once
a step. Time is lost to the bubble, in which a rank waits. For M >= P this is (P-1)/(M+P-1) of the
time with afab and 1f1b, (P-1)/(V M+P-1) interleaved, and (P-1)/(3 M+P-1) with zb as drawn here.

    torchrun --nproc_per_node=2 pp.py --mode correctness --schedule 1f1b --microbatches 4
    torchrun --nproc_per_node=2 pp.py --mode all --schedule zb
    torchrun --nproc_per_node=2 pp.py --mode bubble --schedule zb  # measured beside simulated
    python pp.py --mode schedule --schedule 1f1b --ranks 8 --microbatches 32  # drawn by one process
    torchrun --nproc_per_node=2 labs/torch_pipeline.py --mode benchmark  # PyTorch runs the stages
    torchrun --nproc_per_node=2 labs/break_it.py pp.py mean_of_means --microbatches 3
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
from collections import Counter, deque
from functools import partial
from itertools import accumulate, product
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
    """Arguments or a model that cannot work; the message says what would."""


# ---- 2. Communication: the schedules, and the channels for their messages ------------------------


class Action(NamedTuple):
    """A unit of a rank's work. kind F: forward; B: backward; W, only with zb: the gradients of the
    layers' linear weights, which B then leaves out (the names of the Zero Bubble paper)."""

    kind: str
    stage: int  # 0 to P V - 1; stage s is on rank s % P
    microbatch: int

    def __str__(self):
        return f"{self.kind}{self.microbatch}"


# Copied from tp.py
def split(n, rank, world):
    """[start, end) of the rank's share of n things: the first n % world ranks hold one more."""
    base, extra = divmod(n, world)
    return rank * base + min(rank, extra), (rank + 1) * base + min(rank + 1, extra)


def afab(rank, P, M, V=1):
    """All forward, all backward (GPipe, arXiv 1811.06965): a rank's actions. V is always 1."""
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
    """Interleaved 1F1B (Megatron-LM, arXiv 2104.04473): a rank's stages are rank, rank + P, ...
    A group of P microbatches goes through the rank's first stage, then through its second, and so
    on; then the next group. With fewer than P in a group a rank ends its first stage before
    microbatch 0 is back from the last rank, and waits: so if P does not divide M > P, groups are
    larger. P = 2, V = 2, M = 5: groups 0 1 2 and 3 4 (gaps: the ends of warmup and steady state)
        rank 0   F0 F1 F2 f0 f1   f2 b0 F3 b1 F4 b2 f3 B0 f4 B1   B2 b3 b4 B3 B4
        rank 1   F0 F1 F2   f0 b0 f1 b1 f2 b2 F3 B0 F4 B1 f3 B2 f4 b3   b4 B3 B4
    Warmup: the first group's forwards in all of the rank's stages but the last (here 3), and 2 more
    for each later rank. 1F1B has one of the two: it covers a microbatch's way to the last rank, and
    the rank waits while the gradient comes back. Here the second fills that wait.
    """
    group_count = max(1, M // P)
    groups = [range(*split(M, i, group_count)) for i in range(group_count)]
    stages = range(rank, V * P, P)
    forwards = [Action("F", s, m) for group in groups for s in stages for m in group]
    backwards = [Action("B", s, m) for group in groups for s in reversed(stages) for m in group]
    warmup = min((V - 1) * len(groups[0]) + 2 * (P - rank - 1), V * M)
    yield from forwards[:warmup]
    for forward, backward in zip(forwards[warmup:], backwards):  # steady state
        yield forward
        yield backward
    yield from backwards[V * M - warmup :]  # cooldown


def zero_bubble(rank, P, M, V=1):
    """ZB-H1 (arXiv 2401.10241): 1F1B in which rank r runs W of microbatch m after B of m + r.
    It holds at most P microbatches: P - r that wait for their B, r for their W (with each linear's
    x and dy). After its last B come r + 1 W, while ranks before it still have B to do."""
    for action in one_f_one_b(rank, P, M):
        yield action
        if action.kind == "B" and action.microbatch >= rank:
            yield Action("W", rank, action.microbatch - rank)
    for m in range(max(M - rank, 0), M):
        yield Action("W", rank, m)


SCHEDULES = {"afab": afab, "1f1b": one_f_one_b, "interleaved": interleaved, "zb": zero_bubble}


def source(action, stages):
    """The action of a neighboring stage whose result an action receives. None: F of the first stage
    starts from ids, B of the last from the loss, W from what its B has kept."""
    if action.kind == "F" and action.stage > 0:
        return action._replace(stage=action.stage - 1)
    if action.kind == "B" and action.stage < stages - 1:
        return action._replace(stage=action.stage + 1)
    return None


def needs(action, stages):
    """The actions, of this stage or another, that have to end before an action can begin."""
    needed = [source(action, stages)]
    if action.kind in "BW":
        needed.append(action._replace(kind={"B": "F", "W": "B"}[action.kind]))
    return [need for need in needed if need is not None]


def simulate(schedules, stages, cost):
    """When each action would run: [(rank, action, begin, end)], from every rank's list of actions.
    cost(action) is its time; messages take none. Actions that a deadlock holds up are left out."""
    rows = []
    ended = {}  # {action: when}
    free = [0.0] * len(schedules)  # when each rank can begin its next action
    left = [deque(actions) for actions in schedules]
    progress = True
    while progress:
        progress = False
        for rank, actions in enumerate(left):
            while actions and all(need in ended for need in needs(actions[0], stages)):
                action = actions.popleft()
                begin = max([free[rank], *(ended[need] for need in needs(action, stages))])
                free[rank] = ended[action] = begin + cost(action)
                rows.append((rank, action, begin, ended[action]))
                progress = True
    return rows


def faults(schedules, stages, M):
    """What is wrong with a schedule, given as every rank's list of actions: [] if nothing is."""
    P = len(schedules)
    kinds = {"F", "B"} | {action.kind for actions in schedules for action in actions}
    for rank, actions in enumerate(schedules):
        if sorted(actions) != list(product(sorted(kinds), range(rank, stages, P), range(M))):
            return [f"rank {rank} does not do each of its actions once"]
    ran = {action for _, action, _, _ in simulate(schedules, stages, lambda action: 1)}
    left = [[action for action in actions if action not in ran] for actions in schedules]
    first = [(rank, actions[0]) for rank, actions in enumerate(left) if actions]
    if first:
        stuck = [f"rank {rank} with {action} of stage {action.stage}" for rank, action in first]
        return [f"deadlock: these wait for each other: {', '.join(stuck)}"]
    # NCCL's messages have no tags: they have to be received in the order in which they are sent
    for rank, kind in product(range(P), "FB"):
        sources = [source(a, stages) for a in schedules[rank] if a.kind == kind]
        sender = (rank - 1) % P if kind == "F" else (rank + 1) % P
        sent_at = [schedules[sender].index(sent) for sent in sources if sent is not None]
        if sent_at != sorted(sent_at):
            return [f"rank {rank} takes {kind} in another order than rank {sender} sends it"]
    return []


def all_schedules(args, P):
    """Every rank's list of actions, in the order in which it runs them. Raises UsageError."""
    schedule, M, V = SCHEDULES[args.schedule], args.microbatches, args.virtual_stages
    schedules = [list(schedule(rank, P, M, V)) for rank in range(P)]
    for fault in faults(schedules, P * V, M):  # at most one; better said now than met as a hang
        raise UsageError(f"--schedule {args.schedule}: {fault}")
    return schedules


def bubble(rows, ranks):
    """The part of the time, from the first begin to the last end, that a rank waits on average."""
    _, _, begins, ends = zip(*rows)
    return 1 - (sum(ends) - sum(begins)) / (ranks * (max(ends) - min(begins)))


def bubble_formula(P, M, V, forward, backward, weights=0.0):
    """bubble() in closed form, from the times of a stage's F, B, W. The last rank waits for P - 1 F
    before its first F and for P - 1 B after its last B; each other rank waits as long. None where
    that need not hold: too few microbatches, or a W that is too long for the gaps."""
    if M < P or weights > min(forward, backward):
        return None
    busy = V * M * (forward + backward + weights)
    waiting = (P - 1) * (forward + backward - weights)  # last rank: P - 1 W while it waits for B
    return waiting / (busy + waiting)


def most_in_flight(actions):
    """Most (stage, microbatch) pairs whose activations a rank keeps at once: from F to B, or W."""
    last = "W" if any(action.kind == "W" for action in actions) else "B"
    change = {"F": 1, last: -1}
    return max(accumulate(change.get(action.kind, 0) for action in actions))


def open_channels(group, stages, args):
    """Two dicts {kind: (peer, process group)}: where an action of a kind receives from, and where
    it sends to. F sends to the next rank (the last to the first), B to the one before. A group for
    each kind and pair: no message waits behind one of the other kind. NCCL connects two ranks at
    their first message, which blocks both: so here each channel sends a zero, in a fixed order."""
    ranks, P = dist.get_process_group_ranks(group), group.size()
    receive_channels, send_channels = {}, {}
    timeout = datetime.timedelta(seconds=args.timeout)
    for stage in range(min(stages - 1, P)):  # boundary to stage + 1; from P on pairs repeat
        before, after = ranks[stage % P], ranks[(stage + 1) % P]
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


# Copied from tp.py
def mark(tensor, shard=None, replicas=1, sum_over=None):
    """Attach to a tensor what later code reads. Training reads sum_over, the group over which its
    gradient is summed (None: no sum). The proof reads shard, which (dim, start, end) of the full
    tensor it is (None: all of it), and replicas, how many ranks hold the same."""
    tensor.shard, tensor.replicas, tensor.sum_over = shard, replicas, sum_over
    return tensor


# Copied from tp.py
def recompute_layers(model):
    """Keep each layer's input only. The layer's backward first runs its forward again, hooks and
    collectives included, up to the last tensor that it needs (arXiv 1604.06174)."""
    enable = getattr(model, "activation_checkpointing_enable", None)  # since transformers 5.23
    enable = enable or model.gradient_checkpointing_enable  # its name before
    enable({"use_reentrant": False})


class LinearWithDeferredWeightGrad(torch.autograd.Function):
    """F.linear, whose backward computes dx alone and leaves x and dy to W (arXiv 2401.10241)."""

    @staticmethod
    def forward(ctx, x, weight, bias, linear):
        ctx.save_for_backward(x, weight)
        ctx.linear = linear
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        ctx.linear.left_to_w.append((ctx.linear, x.detach(), dy))  # without the graph behind x
        return dy @ weight, None, None, None


class DeferredLinear(nn.Module):
    """Takes an nn.Linear's place, with zb. left_to_w: a list, shared by all of them, of what one B
    leaves to its W: tuples (linear, x, dy)."""

    def __init__(self, linear, left_to_w):
        super().__init__()
        self.weight, self.bias, self.left_to_w = linear.weight, linear.bias, left_to_w

    def forward(self, x):  # (b/M, s, in) -> (b/M, s, out)
        return LinearWithDeferredWeightGrad.apply(x, self.weight, self.bias, self)

    def add_weight_gradient(self, x, dy):
        x, dy = x.flatten(0, -2), dy.flatten(0, -2)  # (tokens, in), (tokens, out)
        self.weight.backward(dy.T @ x)  # backward() of a leaf adds to its .grad
        if self.bias is not None:
            self.bias.backward(dy.sum(0))


class Stage(nn.Module):
    """A stage of HF's LlamaModel: hidden states (b/M, s, h) -> (b/M, s, h); the first takes ids.
    HF's own forward runs the layers, and makes positions, mask and rotary tables for them."""

    def __init__(self, model, stage, stages):
        super().__init__()
        self.input_name = "input_ids" if stage == 0 else "inputs_embeds"
        start, end = split(len(model.model.layers), stage, stages)
        self.decoder = copy.copy(model.model)  # another LlamaModel, which shares the modules
        self.decoder._modules = model.model._modules.copy()  # but can put others in their place
        self.decoder.layers = model.model.layers[start:end]
        if stage < stages - 1:
            self.decoder.norm = nn.Identity()
        if getattr(model.config, "layer_types", None):  # HF looks up a layer's type by its index
            self.decoder.config = copy.copy(model.config)
            self.decoder.config.layer_types = model.config.layer_types[start:end]

    def forward(self, x):
        return self.decoder(**{self.input_name: x}, use_cache=False).last_hidden_state


class Pipeline:
    """The engine: runs this rank's actions in the schedule's order: receive, compute, send.
    After a run: timeline, rows like simulate()'s, and peak, what most_in_flight() predicts."""

    def __init__(self, model, group, args, left_to_w):
        self.rank, self.P, self.M = group.rank(), group.size(), args.microbatches
        self.dtype, self.hidden_size = model.dtype, model.config.hidden_size
        self.stage_count = self.P * args.virtual_stages
        stages = range(self.rank, self.stage_count, self.P)
        self.stages = {stage: Stage(model, stage, self.stage_count) for stage in stages}
        self.actions = all_schedules(args, self.P)[self.rank]
        self.receive_channels, self.send_channels = open_channels(group, self.stage_count, args)
        self.held = {}  # from F to B: {(stage, microbatch): (input, output)}
        self.left_to_w = left_to_w  # what the running B has left so far
        self.waiting_for_w = {}  # from B to W: {(stage, microbatch): what it left}
        self.synchronize = False  # whether now() waits for the GPU

    def run(self, ids, targets, loss_fn, backward=True):
        """Run all actions, or only the forwards, on ids and targets (b, s). Returns loss_fn(hidden
        (b/M, s, h), targets (b/M, s)) of each microbatch on the last stage's rank, [] on others."""
        ids, targets = ids.tensor_split(self.M), targets.tensor_split(self.M)  # sizes may differ
        actions = [action for action in self.actions if backward or action.kind == "F"]
        losses, self.timeline, self.peak = [], [], 0
        start = self.now()
        sending = {"F": deque(), "B": deque()}  # (work, tensor), the oldest first
        coming = self.start_receiving(actions[0], ids)
        for action, next_action in zip(actions, [*actions[1:], None]):
            received = None
            if coming is not None:
                work, received = coming
                work.wait()
            coming = self.start_receiving(next_action, ids)  # it can arrive during this action

            begin = self.now() - start
            if action.kind == "F":
                x = ids[action.microbatch] if action.stage == 0 else received.requires_grad_()
                result = self.forward(action, x, targets[action.microbatch], loss_fn, losses)
            elif action.kind == "B":
                result = self.backward(action, received)
            else:
                result = None
                for linear, x, dy in self.waiting_for_w.pop((action.stage, action.microbatch)):
                    linear.add_weight_gradient(x, dy)
            self.timeline.append((self.rank, action, begin, self.now() - start))

            if result is not None:
                self.send(action.kind, result, sending[action.kind])
            self.peak = max(self.peak, len(self.held) + len(self.waiting_for_w))
            if not backward:
                self.held.clear()  # no B takes it out
        for work, _ in [*sending["F"], *sending["B"]]:
            work.wait()
        return losses

    def forward(self, action, x, targets, loss_fn, losses):
        """F: from ids or hidden states x to hidden states (b/M, s, h); the last stage adds to
        losses instead, and returns None."""
        out = self.stages[action.stage](x)
        is_last = action.stage == self.stage_count - 1
        if is_last:
            out = loss_fn(out, targets)
            losses.append(out.detach())
        self.held[action.stage, action.microbatch] = x, out
        return None if is_last else out.detach()

    def backward(self, action, grad):
        """B: from the output's gradient (None for a loss) to the input's (None for ids)."""
        x, out = self.held.pop((action.stage, action.microbatch))
        torch.autograd.backward(out, grad)
        if self.left_to_w:
            self.waiting_for_w[action.stage, action.microbatch] = self.left_to_w.copy()
            self.left_to_w.clear()  # not a new list: the linears add to this one
        return x.grad

    def start_receiving(self, action, ids):
        """Start to receive what an action needs: (work, tensor). None: it needs no message."""
        if action is None or source(action, self.stage_count) is None:
            return None
        shape = *ids[action.microbatch].shape, self.hidden_size
        tensor = torch.empty(shape, dtype=self.dtype, device=ids[0].device)
        return dist.irecv(tensor, *self.receive_channels[action.kind]), tensor

    def send(self, kind, tensor, sending):
        """Start to send a result. `sending` keeps it until it is sent: at most P of a kind, for the
        memory. The next one first waits for the oldest (tried: no schedule here deadlocks so)."""
        if len(sending) == self.P:
            work, _ = sending.popleft()
            work.wait()
        tensor = tensor.contiguous()
        sending.append((dist.isend(tensor, *self.send_channels[kind]), tensor))

    def now(self):
        if self.synchronize:  # this stream alone: others wait for messages not yet sent
            torch.cuda.current_stream().synchronize()
        return time.perf_counter()


def parallelize(model, group, args):
    """Keep this rank's stages of HF's LlamaForCausalLM, in place; nn.Identity() for the others."""
    if args.recompute == "full":
        recompute_layers(model)
    rank, P, layers = group.rank(), group.size(), model.model.layers
    stages = P * args.virtual_stages
    left_to_w = []
    own = [i for stage in range(rank, stages, P) for i in range(*split(len(layers), stage, stages))]
    for i, layer in enumerate(layers):
        if i not in own:
            layers[i] = nn.Identity()
        elif args.schedule == "zb":
            for name, module in list(layer.named_modules()):
                if isinstance(module, nn.Linear):
                    layer.set_submodule(name, DeferredLinear(module, left_to_w))
    is_tied = model.lm_head.weight is model.model.embed_tokens.weight
    if rank > 0 and not (is_tied and rank == P - 1):  # whose lm_head uses it
        model.model.embed_tokens = nn.Identity()
    if rank < P - 1:
        model.model.norm, model.lm_head = nn.Identity(), nn.Identity()
    for parameter in model.parameters():
        mark(parameter)
    if is_tied and P > 1:
        ranks = dist.get_process_group_ranks(group)
        ends = dist.new_group([ranks[0], ranks[-1]], datetime.timedelta(seconds=args.timeout))
        if rank in (0, P - 1):  # one has its gradient as embedding, the other as lm_head
            mark(model.model.embed_tokens.weight, replicas=2, sum_over=ends)
    model.pipeline = Pipeline(model, group, args, left_to_w)
    return model


# ---- 4. Loss and step ----------------------------------------------------------------------------


# Copied from sp_ulysses.py
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


def microbatch_loss(model, hidden, targets, count, args):
    """A microbatch's share of the mean loss over the batch's `count` targets, from its hidden
    (b/M, s, h). A mean of the microbatches' means would be another number: it would weight a target
    by how few others its microbatch has."""
    size = hidden.shape[1]
    chunk_loss = sum_of_losses
    if args.loss == "chunked":  # logits of one chunk at a time, recomputed in the backward
        size = max(1, LOSS_CHUNK // len(hidden))
        chunk_loss = partial(checkpoint, sum_of_losses, use_reentrant=False)
    chunks = zip(hidden.split(size, 1), targets.split(size, 1))
    return sum(chunk_loss(model, h, t) for h, t in chunks) / count


def train_step(model, ids, labels, group, args, backward=True):
    """Loss of ids (b, s), the same on every rank. .grad is None before, and complete after."""
    targets = F.pad(labels[:, 1:], (0, 1), value=IGNORE)  # the target of a token is the next one
    count = (targets != IGNORE).sum()
    loss_fn = partial(microbatch_loss, model, count=count, args=args)
    losses = model.pipeline.run(ids, targets, loss_fn, backward)
    if backward:
        sum_gradients(model)
    dtype = torch.promote_types(model.dtype, torch.float32)
    loss = sum(losses, torch.zeros((), dtype=dtype, device=ids.device))  # 0 but on the last rank
    dist.all_reduce(loss, group=group)
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
    """The logits (b, s, v), on the last stage's rank; None on the others."""
    logits = model.pipeline.run(ids, ids, lambda hidden, _: model.lm_head(hidden), backward=False)
    return mark(torch.cat(logits)) if logits else None


def expected_traffic(model, group, args):
    """What one step must send: rows (phase, op, calls, message bytes), as Meter counts them."""
    P, M, element = group.size(), args.microbatches, model.dtype.itemsize
    stage_count = P * args.virtual_stages
    hidden = args.batch * args.length * model.config.hidden_size * element  # (b, s, h)
    rows = [("forward", "all_reduce", 1, max(4, element))]  # the loss
    for phase, end in ("forward", stage_count - 1), ("backward", 0):  # stage `end` sends none
        senders = sum(stage != end for stage in range(group.rank(), stage_count, P))
        rows.append((phase, "send", senders * M, senders * hidden))
    summed = [p for p in model.parameters() if p.sum_over is not None]  # the tied embedding
    return rows + [("backward", "all_reduce", 1, p.nbytes) for p in summed]


def report(rows, in_flight, bubbles):
    """Print each rank's times and most microbatches in flight, and bubbles; returns all of it."""
    _, _, begins, ends = zip(*rows)
    span = max(ends) - min(begins)
    table = []
    for rank, most in enumerate(in_flight):
        busy = sum(end - begin for r, _, begin, end in rows if r == rank)
        table.append({"rank": rank, "busy": busy, "waiting": span - busy, "most in flight": most})
    print_table(table)
    print_table([{"part of the time": how, "": part} for how, part in bubbles.items()])
    timeline = [[rank, *action, begin, end] for rank, action, begin, end in rows]
    return bubbles | {"in_flight": in_flight, "timeline": timeline}


def draw(rows, P, unit, width=88):
    """The start of a timeline as lines of text, a line for a rank, a column for a unit of time."""
    grid = [["."] * round(max(end for *_, end in rows) / unit) for _ in range(P)]
    for rank, action, begin, end in rows:
        first, last = round(begin / unit), round(end / unit)
        name = str(action) if action.stage < P else str(action).lower()  # not the rank's first
        grid[rank][first:last] = [name] + ["--"] * (last - first - 1)
    cell = 1 + max(len(name) for names in grid for name in names)
    end = " ..." if len(grid[0]) > width // cell else ""
    lines = ["".join(name.ljust(cell) for name in names[: width // cell]) for names in grid]
    return [f"  rank {rank:<3} {line}".rstrip() + end for rank, line in enumerate(lines)]


def show_schedule(args, group):
    """--mode schedule: draw and time the schedule of args.ranks ranks, simulated on one."""
    P, M, V = args.ranks, args.microbatches, args.virtual_stages
    times = {"F": 1 / V, "B": 2 / V, "W": 0.0}  # unit: a rank's forward; nothing recomputed
    if args.schedule == "zb":
        times = {"F": 1.0, "B": 1.0, "W": 1.0}
    schedules = all_schedules(args, P)
    rows = simulate(schedules, P * V, lambda action: times[action.kind])
    print(*draw(rows, P, 1 / V), sep="\n")
    formula = bubble_formula(P, M, V, times["F"], times["B"], times["W"])
    bubbles = {"bubble": bubble(rows, P), "bubble_formula": formula}
    result = report(rows, [most_in_flight(actions) for actions in schedules], bubbles)
    result |= {"schedule": args.schedule, "ranks": P, "virtual_stages": V}
    result["passed"] = formula is None or abs(result["bubble"] - formula) < 1e-9
    by_formula = "no formula for it" if formula is None else f"by the formula {formula:.4f}"
    return f"no deadlock; the bubble is {result['bubble']:.4f}, {by_formula}", result


def measure_bubble(args, group):
    """--mode bubble: the part of a step that ranks wait: measured (messages take time, stages
    differ), simulated with the measured times (stages differ), and by the formula."""
    P, V = group.size(), args.virtual_stages
    model = parallelize(load_model(args), group, args)
    model.pipeline.synchronize = args.device.type == "cuda"
    ids, labels = proof_batch(args, group)
    runs = []
    for _ in range(1 + args.bench_iters):  # the first warms up
        gather_objects(None, group)  # the ranks begin together
        train_step(model, ids, labels, group, args)
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
    in_flight = gather_objects(model.pipeline.peak, group)
    expected = [most_in_flight(actions) for actions in schedules]
    result = report(rows, in_flight, bubbles)
    result |= {"in_flight_expected": expected, "passed": in_flight == expected}
    summary = f"ranks wait {bubbles['bubble']:.0%}; in flight {in_flight}, expected {expected}"
    return summary, result


OPTIONS = {
    "--schedule": {"choices": list(SCHEDULES), "default": "1f1b"},
    "--microbatches": {"type": int, "help": "parts of the batch (as many as --batch, or 4)"},
    "--virtual-stages": {"type": int, "help": "stages per rank, interleaved only (2)"},
    "--ranks": {"type": int, "default": 4, "help": "ranks that --mode schedule simulates (4)"},
}
OWN_MODES = {"schedule": show_schedule, "bubble": measure_bubble}


def finalize_args(args, world):
    """The script's own defaults; UsageError where model and options do not fit together."""
    args.virtual_stages = V = args.virtual_stages or (2 if args.schedule == "interleaved" else 1)
    args.microbatches = M = args.microbatches or args.batch or 4
    args.batch = args.batch or M
    if V > 1 and args.schedule != "interleaved":
        raise UsageError(f"--virtual-stages {V} needs --schedule interleaved")
    if args.batch < M:
        problem = f"--batch {args.batch} cannot be cut into {M} microbatches"
        raise UsageError(f"{problem}; --microbatches {args.batch} or --batch {M} would do")
    layers = args.config.num_hidden_layers
    if args.mode == "schedule":  # of any number of ranks and layers
        world = args.ranks
    elif world == 1:  # no rank to take turns with: one stage
        args.virtual_stages = 1
    elif world * V > layers:
        problem = f"{layers} layers cannot fill {world * V} stages, {V} a rank"
        raise UsageError(f"{problem}; --nproc_per_node {max(1, layers // V)} or fewer would do")
    all_schedules(args, world)  # raises UsageError where they cannot run


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
