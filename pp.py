"""Pipeline parallelism for LLaMA in one file: GPipe, 1F1B, interleaved, Zero Bubble on HF's model.

Every rank holds some of the layers, a stage, and sends the hidden states on. P = 2, 8 layers:

    rank 0: embedding, layers 0..3          rank 1: layers 4..7, norm, head, loss
        ids (b, s)
        | (b, s, h)          -- activations (b, s, h) -->   |
        |                    <-- gradients (b, s, h) ---    loss

With one batch, one stage would wait while the other computes. So the batch is cut into M
microbatches, and a schedule is the order in which a rank works on them. Here P = 2 and M = 4. F0 is
the forward of microbatch 0; B0 -- is its backward, which takes twice as long; a dot is waiting.

afab: all forward, all backward. Every rank keeps the activations of all M microbatches.
    rank 0   F0 F1 F2 F3 .  .  .  B0 -- B1 -- B2 -- B3 --
    rank 1   .  F0 F1 F2 F3 B0 -- B1 -- B2 -- B3 -- .  .
1f1b: one forward, one backward. It takes as long, but keeps at most P microbatches' activations.
    rank 0   F0 F1 .  .  B0 -- F2 B1 -- F3 B2 -- .  B3 --
    rank 1   .  F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 -- .  .
interleaved: a rank has V = 2 stages (rank 0 layers 0, 1, 4, 5; small letters are its second stage),
each half as long, so a column is half as much time. 1/V of the waiting, but more messages.
    rank 0   F0 F1 f0 f1 F2 .  b0 -- F3 b1 -- f2 B0 -- f3 B1 -- .  b2 -- .  b3 -- B2 -- B3 --
    rank 1   .  F0 F1 f0 b0 -- f1 b1 -- F2 B0 -- F3 B1 -- f2 b2 -- f3 b3 -- B2 -- B3 -- .  .
zb: B computes only the gradient of the stage's input, for which the rank before it waits, and W the
weights' gradients, for which no rank waits. F, B and W take equally long.
    rank 0   F0 F1 .  B0 W0 F2 B1 W1 F3 B2 W2 B3 W3
    rank 1   .  F0 B0 F1 B1 W0 F2 B2 W1 F3 B3 W2 W3

Cost: one (b, s, h) is sent forward and one back at each of the V P - 1 boundaries between stages:
far less than tp.py's 4 all-reduces a layer. Weights, gradients and optimizer state shrink by P.
Embeddings tied to the head are on the first and the last rank, and their gradients are summed once
a step. Time is lost to the bubble, in which a rank waits. For M >= P this is (P-1)/(M+P-1) of the
time with afab and 1f1b, (P-1)/(V M+P-1) interleaved, and (P-1)/(3 M+P-1) with zb.

    torchrun --nproc_per_node=2 pp.py --mode correctness --schedule 1f1b --microbatches 4
    torchrun --nproc_per_node=2 pp.py --mode all --schedule zb
    torchrun --nproc_per_node=2 pp.py --mode bubble --schedule zb  # measured beside simulated
    python pp.py --mode schedule --schedule 1f1b --ranks 8 --microbatches 32  # drawn, without ranks
    torchrun --nproc_per_node=2 labs/torch_pipeline.py --mode benchmark  # PyTorch runs the stages
    torchrun --nproc_per_node=2 labs/break_it.py pp.py mean_of_means --microbatches 3
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
from collections import Counter, defaultdict, deque
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import accumulate, product
from pathlib import Path
from pydoc_data.topics import topics
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import huggingface_hub
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm
from transformers.models.llama import modeling_llama

STRATEGY = "pp"
IGNORE = -100  # the label of a token that is no target: PyTorch's and Hugging Face's convention
LOSS_CHUNK = 2048  # --loss chunked: tokens per rank whose logits exist at the same time


# Copied from tp.py
class UsageError(Exception):
    """Arguments or a model that cannot work; the message says what would."""


# ---- 2. Communication: the schedules, and the channels for their messages ------------------------


class Action(NamedTuple):
    """A unit of a rank's work. kind F: forward; B: backward; W, only with zb: the gradients of the
    linear layers' weights, which B then leaves out (the names of the Zero Bubble paper)."""

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
    on; then the next group. Where P does not divide M, groups are larger: with P = 2, V = 2, M = 5
    they are microbatches 0, 1, 2 and 3, 4, and the ranks run (small letters: their second stage)
        rank 0   F0 F1 F2 f0 f1   f2 b0 F3 b1 F4 b2 f3 B0 f4 B1   B2 b3 b4 B3 B4
        rank 1   F0 F1 F2   f0 b0 f1 b1 f2 b2 F3 B0 F4 B1 f3 B2 f4 b3   b4 B3 B4
    The warmup: the first group's forwards in all stages but the last (here 3), and 2 more for each
    later rank, to which a microbatch has to go, and from which its gradient has to come back.
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
    """ZB-H1 (arXiv 2401.10241): 1F1B in which rank r runs r more B before a microbatch's W: other
    ranks wait for a B, none for a W. So some W are left for the gaps of the cooldown."""
    for action in one_f_one_b(rank, P, M):
        yield action
        if action.kind == "B" and action.microbatch >= rank:
            yield Action("W", rank, action.microbatch - rank)
    for m in range(max(M - rank, 0), M):
        yield Action("W", rank, m)


SCHEDULES = {"afab": afab, "1f1b": one_f_one_b, "interleaved": interleaved, "zb": zero_bubble}


def received_from(action, stages):
    """The action, of the stage before or after it, whose result an action starts from. None: the
    first F starts from ids, the last B from the loss, and W from what its B has kept."""
    if action.kind == "F" and action.stage > 0:
        return action._replace(stage=action.stage - 1)
    if action.kind == "B" and action.stage < stages - 1:
        return action._replace(stage=action.stage + 1)
    return None


def needs(action, stages):
    """The actions, of this stage or another, that have to end before an action can begin."""
    needed = [received_from(action, stages)]
    if action.kind == "B":
        needed.append(action._replace(kind="F"))
    elif action.kind == "W":
        needed.append(action._replace(kind="B"))
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
    stuck = [f"rank {rank} with {actions[0]}" for rank, actions in enumerate(left) if actions]
    if stuck:
        return [f"deadlock: these wait for each other: {', '.join(stuck)}"]
    # Messages carry no tags: they have to be received in the order in which they are sent
    for rank, kind in product(range(P), "FB"):
        sources = [received_from(a, stages) for a in schedules[rank] if a.kind == kind]
        sender = (rank - 1) % P if kind == "F" else (rank + 1) % P
        places = [schedules[sender].index(source) for source in sources if source is not None]
        if places != sorted(places):
            return [f"rank {rank} takes {kind} in another order than rank {sender} sends it"]
    return []


def all_schedules(args, P):
    """Every rank's list of actions, in the order in which it runs them; UsageError if it cannot."""
    schedule, M, V = SCHEDULES[args.schedule], args.microbatches, args.virtual_stages
    schedules = [list(schedule(rank, P, M, V)) for rank in range(P)]
    for fault in faults(schedules, P * V, M):  # better said now than met as a hang
        raise UsageError(f"--schedule {args.schedule}: {fault}")
    return schedules


def bubble(rows, ranks):
    """The part of the time, from the first begin to the last end, that a rank waits on average."""
    span = max(end for *_, end in rows) - min(begin for *_, begin, _ in rows)
    return 1 - sum(end - begin for *_, begin, end in rows) / (ranks * span)


def bubble_formula(P, M, V, forward, backward, weights=0.0):
    """bubble() in closed form, from the times of a stage's F, B, W: a rank waits for P - 1 F (the
    last rank: before its first) and P - 1 B (after its last). None: there is no closed form."""
    if M < P or weights > min(forward, backward):
        return None
    busy = V * M * (forward + backward + weights)
    waiting = (P - 1) * (forward + backward - weights)  # P - 1 of the W fill gaps
    return waiting / (busy + waiting)


def most_in_flight(actions):
    """Most (stage, microbatch) pairs whose activations a rank keeps at once: from F to B, or W."""
    last = "W" if any(action.kind == "W" for action in actions) else "B"
    change = {"F": 1, last: -1}
    return max(accumulate(change.get(action.kind, 0) for action in actions))


def open_channels(group, stages, args):
    """Two dicts {kind: (peer, process group)}: to receive what an action of a kind starts from, and
    to send its result. F sends to the next rank (the last to the first), B to the one before. One
    group a direction: no message waits behind one that goes the other way. NCCL connects two ranks
    at their first message, for which both wait: here, in one order on all ranks."""
    ranks, P = dist.get_process_group_ranks(group), group.size()
    receive_channels, send_channels = {}, {}
    timeout = datetime.timedelta(seconds=args.timeout)
    for stage in range(min(stages - 1, P)):  # boundaries with the next; later ones: same ranks
        before, after = ranks[stage % P], ranks[(stage + 1) % P]
        for kind, source, destination in ("F", before, after), ("B", after, before):
            channel = dist.new_group([source, destination], timeout)  # all ranks have to call it
            if ranks[group.rank()] == source:
                send_channels[kind] = destination, channel
                dist.send(torch.zeros(1, device=args.device), destination, channel)
            elif ranks[group.rank()] == destination:
                receive_channels[kind] = source, channel
                dist.recv(torch.zeros(1, device=args.device), source, channel)
    return receive_channels, send_channels


# ---- 3. Sharding LLaMA: the stages, and the engine that runs them --------------------------------


# Copied from tp.py
def mark(tensor, shard=None, replicas=1, sum_over=None):
    """Note on a tensor which slice (dim, start, end) of the full one it is (None: all of it), how
    many ranks hold the same slice, and over which group its gradient has to be summed (or None)."""
    tensor.shard, tensor.replicas, tensor.sum_over = shard, replicas, sum_over
    return tensor


# Copied from tp.py
def recompute_layers(model):
    """Keep each layer's input only, and run the layer again in the backward, with its hooks and
    collectives (arXiv 1604.06174)."""
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
    """In an nn.Linear's place, with zb. left_to_w: (linear, x, dy), in a list that all share."""

    def __init__(self, linear, left_to_w):
        super().__init__()
        self.weight, self.bias, self.left_to_w = linear.weight, linear.bias, left_to_w

    def forward(self, x):  # (b/M, s, in) -> (b/M, s, out)
        return LinearWithDeferredWeightGrad.apply(x, self.weight, self.bias, self)

    def add_weight_gradient(self, x, dy):
        x, dy = x.flatten(0, -2), dy.flatten(0, -2)  # (tokens, in), (tokens, out)
        self.weight.backward(dy.T @ x)  # of a leaf: adds to its .grad
        if self.bias is not None:
            self.bias.backward(dy.sum(0))


class Stage(nn.Module):
    """A stage of HF's LlamaModel: hidden states (b, s, h) -> (b, s, h); the first takes ids (b, s).
    HF's own forward runs the layers, and makes positions, mask and rotary tables for them."""

    def __init__(self, model, stage, stages):
        super().__init__()
        self.input_name = "input_ids" if stage == 0 else "inputs_embeds"
        start, end = split(len(model.model.layers), stage, stages)
        self.decoder = copy.copy(model.model)  # another LlamaModel of the same modules,
        self.decoder._modules = model.model._modules.copy()  # in a dict of its own
        self.decoder.layers = model.model.layers[start:end]
        if stage < stages - 1:
            self.decoder.norm = nn.Identity()
        if getattr(model.config, "layer_types", None):  # HF looks up a layer's by its position
            self.decoder.config = copy.copy(model.config)
            self.decoder.config.layer_types = model.config.layer_types[start:end]

    def forward(self, x):
        return self.decoder(**{self.input_name: x}, use_cache=False).last_hidden_state


def finish(message):
    """The tensor of a message (work, tensor), which has to exist until work.wait() has returned."""
    work, tensor = message
    work.wait()
    return tensor


class Pipeline:
    """The engine: runs this rank's actions in the schedule's order: receive, compute, send.
    After a run: timeline, rows as of simulate(), and peak, the most microbatches in flight."""

    def __init__(self, model, group, args, left_to_w):
        self.rank, self.P, self.M = group.rank(), group.size(), args.microbatches
        self.dtype, self.hidden_size = model.dtype, model.config.hidden_size
        self.stage_count = self.P * args.virtual_stages
        own = range(self.rank, self.stage_count, self.P)
        self.stages = {stage: Stage(model, stage, self.stage_count) for stage in own}
        self.actions = all_schedules(args, self.P)[self.rank]
        self.receive_channels, self.send_channels = open_channels(group, self.stage_count, args)
        self.held = {}  # from F to B: {(stage, microbatch): (input, output)}
        self.left_to_w = left_to_w  # during B
        self.waiting_for_w = {}  # from B to W: {(stage, microbatch): left_to_w}
        self.synchronize = False  # whether now() waits for the GPU

    def run(self, ids, labels, loss_fn, backward=True):
        """Run all actions, or only the forwards, on ids and labels (b, s); after the last stage
        loss_fn(hidden (b/M, s, h), labels (b/M, s)). The losses on that rank, [] on the others."""
        ids, labels = ids.tensor_split(self.M), labels.tensor_split(self.M)  # sizes as by split()
        actions = [action for action in self.actions if backward or action.kind == "F"]
        losses, self.timeline, self.peak = [], [], 0
        start = self.now()
        sending = {"F": deque(), "B": deque()}  # messages, the oldest first
        coming = self.start_receiving(actions[0], ids)
        for action, next_action in zip(actions, [*actions[1:], None]):
            received = finish(coming) if coming else None
            coming = self.start_receiving(next_action, ids)  # it can arrive during this action

            begin = self.now() - start
            if action.kind == "F":
                x = ids[action.microbatch] if action.stage == 0 else received.requires_grad_()
                result = self.forward(action, x, labels[action.microbatch], loss_fn, losses)
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
                self.held.clear()
        for message in [*sending["F"], *sending["B"]]:
            finish(message)
        return losses

    def forward(self, action, x, labels, loss_fn, losses):
        """F: from ids or hidden states x to hidden states (b/M, s, h), or to one more of losses."""
        out = self.stages[action.stage](x)
        is_last = action.stage == self.stage_count - 1
        if is_last:
            out = loss_fn(out, labels)
            losses.append(out.detach())
        self.held[action.stage, action.microbatch] = x, out
        return None if is_last else out.detach()

    def backward(self, action, grad):
        """B: from the output's gradient (None: of a loss) to the input's (None: of ids)."""
        x, out = self.held.pop((action.stage, action.microbatch))
        torch.autograd.backward(out, grad)
        if self.left_to_w:
            self.waiting_for_w[action.stage, action.microbatch] = self.left_to_w.copy()
            self.left_to_w.clear()
        return x.grad

    def start_receiving(self, action, ids):
        """Start to receive the message that an action needs, of known shape; None: it has none."""
        if action is None or received_from(action, self.stage_count) is None:
            return None
        shape = *ids[action.microbatch].shape, self.hidden_size
        tensor = torch.empty(shape, dtype=self.dtype, device=ids[0].device)
        return dist.irecv(tensor, *self.receive_channels[action.kind]), tensor

    def send(self, kind, tensor, sending):
        """Start to send a result. At most P of a kind are on their way, and in memory: as many as
        interleaved may have wait for a rank that has not ended a group's earlier stage."""
        if len(sending) == self.P:
            finish(sending.popleft())
        tensor = tensor.contiguous()
        sending.append((dist.isend(tensor, *self.send_channels[kind]), tensor))

    def now(self):
        if self.synchronize:  # not the device: its other streams wait for messages yet to be sent
            torch.cuda.current_stream().synchronize()
        return time.perf_counter()


def parallelize(model, group, args):
    """Keep this rank's stages of HF's LlamaForCausalLM, in place; nn.Identity() for the others."""
    if args.recompute == "full":
        recompute_layers(model)
    rank, P, layers = group.rank(), group.size(), model.model.layers
    stages = P * args.virtual_stages
    left_to_w = []
    own = [range(*split(len(layers), stage, stages)) for stage in range(rank, stages, P)]
    for i, layer in enumerate(layers):
        if not any(i in layers_of_stage for layers_of_stage in own):
            layers[i] = nn.Identity()
        elif args.schedule == "zb":
            for name, module in list(layer.named_modules()):
                if isinstance(module, nn.Linear):
                    layer.set_submodule(name, DeferredLinear(module, left_to_w))
    is_tied = model.lm_head.weight is model.model.embed_tokens.weight
    if rank > 0 and not (is_tied and rank == P - 1):  # there it stays: it is the lm_head's weight
        model.model.embed_tokens = nn.Identity()
    if rank < P - 1:
        model.model.norm, model.lm_head = nn.Identity(), nn.Identity()
    for parameter in model.parameters():
        mark(parameter)
    if is_tied and P > 1:
        ranks = dist.get_process_group_ranks(group)
        ends = dist.new_group([ranks[0], ranks[-1]], datetime.timedelta(seconds=args.timeout))
        if rank in (0, P - 1):  # the gradient as embedding is on one, that as lm_head on the other
            mark(model.model.embed_tokens.weight, replicas=2, sum_over=ends)
    model.pipeline = Pipeline(model, group, args, left_to_w)
    return model


# ---- 4. Loss and step ----------------------------------------------------------------------------


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


def microbatch_loss(model, hidden, targets, count, args):
    """The part that a microbatch, hidden (b/M, s, h), has of the mean loss over the batch's `count`
    targets. A mean of the microbatches' means would be another number: it would weight a target by
    how few others its microbatch has."""
    size = hidden.shape[1]
    chunk_loss = sum_of_losses
    if args.loss == "chunked":  # logits of one chunk at a time, recomputed in the backward
        size = max(1, LOSS_CHUNK // len(hidden))
        chunk_loss = partial(checkpoint, sum_of_losses, use_reentrant=False)
    chunks = zip(hidden.split(size, 1), targets.split(size, 1))
    return sum(chunk_loss(model, h, t) for h, t in chunks) / count


def train_step(model, ids, labels, group, args, backward=True):
    """Loss of ids (b, s), the same on every rank; after it every .grad is complete."""
    targets = F.pad(labels[:, 1:], (0, 1), value=IGNORE)  # the target of a token is the next one
    count = (targets != IGNORE).sum()
    loss_fn = partial(microbatch_loss, model, count=count, args=args)
    losses = model.pipeline.run(ids, targets, loss_fn, backward)
    if backward:
        sum_gradients(model)
    dtype = torch.promote_types(model.dtype, torch.float32)
    loss = sum(losses, torch.zeros((), dtype=dtype, device=ids.device))  # others than the last: 0
    if group.size() > 1:
        dist.all_reduce(loss, group=group)
    return loss


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


# What sections 5 and 6 ask of this script ---------------------------------------------------------


def local_logits(model, ids, group, args):
    """The logits (b, s, v), on the last stage's rank; None on the others."""
    logits = model.pipeline.run(ids, ids, lambda hidden, _: model.lm_head(hidden), backward=False)
    return mark(torch.cat(logits)) if logits else None


def expected_traffic(model, group, args):
    """What one step must send: rows (phase, op, calls, message bytes), as Meter counts them."""
    P, M, element = group.size(), args.microbatches, model.dtype.itemsize
    if P == 1:
        return []
    stage_count = P * args.virtual_stages
    hidden = args.batch * args.length * model.config.hidden_size * element  # (b, s, h)
    rows = [("forward", "all_reduce", 1, max(4, element))]  # the loss, in float32 or better
    for phase, end in ("forward", stage_count - 1), ("backward", 0):  # end: sends nothing on
        senders = sum(stage != end for stage in range(group.rank(), stage_count, P))
        rows.append((phase, "send", senders * M, senders * hidden))
    summed = [p for p in model.parameters() if p.sum_over is not None]  # the tied embedding
    return rows + [("backward", "all_reduce", 1, p.nbytes) for p in summed]


def report(rows, in_flight, bubbles):
    """Print each rank's times and microbatches in flight, and the bubble; these for --json."""
    span = max(end for *_, end in rows) - min(begin for *_, begin, _ in rows)
    table = []
    for rank, most in enumerate(in_flight):
        busy = sum(end - begin for r, _, begin, end in rows if r == rank)
        table.append({"rank": rank, "busy": busy, "waiting": span - busy, "most in flight": most})
    print_table(table)
    print_table([{"part of the time": how, "": part} for how, part in bubbles.items()])
    timeline = [[rank, *action, begin, end] for rank, action, begin, end in rows]
    return bubbles | {"in_flight": in_flight, "timeline": timeline}


def draw(rows, P, unit, width=88):
    """The begin of a timeline as lines of text, a line for a rank, a column for a unit of time."""
    grid = [["."] * round(max(end for *_, end in rows) / unit) for _ in range(P)]
    for rank, action, begin, end in rows:
        first, last = round(begin / unit), round(end / unit)
        name = str(action) if action.stage < P else str(action).lower()  # not the rank's first
        grid[rank][first:last] = [name] + ["--"] * (last - first - 1)
    cell = 1 + max(len(name) for names in grid for name in names)
    lines = ["".join(name.ljust(cell) for name in names[: width // cell]) for names in grid]
    return [f"  rank {rank:<3} {line}".rstrip() for rank, line in enumerate(lines)]


def show_schedule(args, group):
    """--mode schedule: draw and time the schedule of args.ranks ranks, simulated on one."""
    P, M, V = args.ranks, args.microbatches, args.virtual_stages
    times = {"F": 1 / V, "B": 2 / V, "W": 0.0}  # unit: the forward of all of a rank's layers
    if args.schedule == "zb":
        times = {"F": 1.0, "B": 1.0, "W": 1.0}
    schedules = all_schedules(args, P)
    rows = simulate(schedules, P * V, lambda action: times[action.kind])
    print0(*draw(rows, P, 1 / V))
    formula = bubble_formula(P, M, V, *times.values())
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
    ids, labels = proof_batch(args, group, 0)
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
    result = report(rows, in_flight, bubbles) | {"in_flight_expected": expected}
    summary = f"ranks wait {bubbles['bubble']:.0%}; in flight {in_flight}, expected {expected}"
    return summary, {"passed": in_flight == expected} | result


OPTIONS = {
    "--schedule": {"choices": list(SCHEDULES), "default": "1f1b"},
    "--microbatches": {"type": int, "help": "parts of the batch (as many as sequences, or 4)"},
    "--virtual-stages": {"type": int, "help": "stages per rank, interleaved only (2)"},
    "--ranks": {"type": int, "default": 4, "help": "how many --mode schedule is about (4)"},
}
OWN_MODES = {"schedule": show_schedule, "bubble": measure_bubble}


def finalize_args(args, world):
    """Fill in what depends on other options; UsageError where model and options do not suit."""
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
    elif world * V > layers:
        problem = f"{layers} layers cannot fill {world * V} stages, {V} a rank"
        raise UsageError(f"{problem}; --nproc_per_node {layers // V} or fewer would do")
    elif world == 1:  # no rank to take turns with: one stage
        args.virtual_stages = 1
    all_schedules(args, world)


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
        start, end, replicas = 0, args.length, 1
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


def compare_traffic(model, args, group, forward, step):
    """Measured beside expected traffic: a row of the JSON each, with the ranks that have it."""
    rows, holders = defaultdict(lambda: [0, 0, 0, 0]), defaultdict(list)
    for op, calls in step.calls.items():  # a step less its forward is the backward
        rows["forward", op][:2] = forward.calls[op], forward.bytes[op]
        rows["backward", op][:2] = calls - forward.calls[op], step.bytes[op] - forward.bytes[op]
    for phase, op, calls, size in expected_traffic(model, group, args):
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
    traffic = compare_traffic(model, args, group, forward, both)
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
    speed = args.batch * args.length / rows["forward + backward"]["median"]
    summary = f"{speed:.0f} tokens per second, all traffic as the formula says"
    if args.backend == "fake":
        summary = "all traffic as the formula says; no peer was waited for"
    if problems:
        summary = f"not as expected: {'; '.join(problems)}"
    result = {"passed": not problems, "forward_s": rows["forward"]}
    result |= {"forward_backward_s": rows["forward + backward"], "tokens_per_s": speed}
    return summary, result | {"peak_memory_bytes": peaks, "traffic": traffic}


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
    kept = "full: keep the input of each layer only, and recompute the rest; none: keep all"
    add("--recompute", choices=["full", "block", "none"], default="full", help=kept)
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
    args.recompute = args.recompute.replace("block", "full")
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
        args.dtype = asked or ("float32" if mode in ("benchmark", "bubble") else "float64")
        results.update(dtype=results["dtype"] or args.dtype)  # the first mode's
        print0(f"{mode}: {what}, {args.model}, {args.dtype}, {args.batch} x {args.length} tokens")
        with float64_islands(args.dtype):
            summary, result = (MODES | OWN_MODES)[mode](args, group)
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
