"""Pipeline parallelism for LLaMA in one file: GPipe, 1F1B, interleaved, Zero Bubble on HF's model.

Every rank holds some of the layers, a stage, and hands the hidden states on. P = 2, 8 layers:

    rank 0: embedding, layers 0..3          rank 1: layers 4..7, norm, head, loss
        ids (b, s)
        | (b, s, h)          -- activations (b, s, h) -->   |
        |                    <-- gradients (b, s, h) ---    loss

One stage alone would wait while the other computes. So the batch is cut into M microbatches, and a
schedule says which of them a rank works on next. F forward, B backward (twice the work), microbatch
0 to 3, P = 2:

    afab    rank 0  F0 F1 F2 F3 .  .  .  B0 -- B1 -- B2 -- B3 --   all forward, all backward: keeps
            rank 1  .  F0 F1 F2 F3 B0 -- B1 -- B2 -- B3 -- .  .    activations of all M microbatches
    1f1b    rank 0  F0 F1 .  .  B0 -- F2 B1 -- F3 B2 -- .  B3 --   one forward, one backward: as
            rank 1  .  F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 -- .  .    long, but at most P in flight
    zb      rank 0  F0 F1 .  B0 W0 F2 B1 W1 F3 B2 W2 B3 W3         B: the input's gradient, all that
            rank 1  .  F0 B0 F1 B1 W0 F2 B2 W1 F3 B3 W2 W3         rank 0 waits for; W: weights'

    interleaved: a rank has V stages of 1/V the size, rank 0 layers 0, 1, 4 and 5. 1/V of the
    waiting, for V P - 1 boundaries instead of P - 1.

Cost: one (b, s, h) sent forward and one back at each boundary: far less than tp.py's 4 all-reduces
a layer. Embeddings tied to the head are on the first and the last rank; their gradients are summed
once a step. Weights, gradients and optimizer state shrink by P; time is lost to the bubble, where a
rank waits: (P-1)/(M+P-1) of it with afab and 1f1b, (P-1)/(V M+P-1) interleaved, (P-1)/(3 M+P-1)
with zb where F, B and W take as long (M >= P; about so with --recompute none).

    torchrun --nproc_per_node=2 pp.py --mode correctness --schedule 1f1b --microbatches 4
    torchrun --nproc_per_node=2 pp.py --mode all --schedule zb
    torchrun --nproc_per_node=2 pp.py --mode benchmark --torch     # the same stages, by PyTorch
    python pp.py --mode schedule --schedule 1f1b --stages 8 --microbatches 32    # no ranks needed
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
import types
import warnings
import weakref
from collections import Counter, defaultdict
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics
from typing import NamedTuple
from unittest import mock

import huggingface_hub
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
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

STRATEGY = "pp"
IGNORE = -100  # a label that is no target: HF's and PyTorch's convention
LOSS_CHUNK = 2048  # --loss chunked: tokens a rank whose logits exist at the same time


# --------------------------------------------------------------------------------------------------
# 2. Communication: the schedules, and the engine that carries them out
# --------------------------------------------------------------------------------------------------


class Action(NamedTuple):
    """What a rank does next, with which of its stages, on which microbatch.

    kind F: forward. B: backward; where a schedule has W too, W is the gradients of the weights of
    the stage's linear layers, and B all the others, above all that of its input (the Zero Bubble
    paper's names).
    """

    kind: str
    stage: int  # of all: stage s is on rank s % P
    microbatch: int


def afab(rank, P, M, V=1):
    """All forward, all backward (GPipe, arXiv 1811.06965): a generator of this rank's actions."""
    for m in range(M):
        yield Action("F", rank, m)
    for m in range(M):
        yield Action("B", rank, m)


def one_f_one_b(rank, P, M, V=1):
    """1F1B (PipeDream-Flush, arXiv 2006.09503): as soon as a microbatch can go back, it does."""
    ahead = min(P - rank - 1, M)  # forwards before the first backward can arrive: one a stage below
    for m in range(ahead):
        yield Action("F", rank, m)
    for m in range(M):
        if ahead + m < M:
            yield Action("F", rank, ahead + m)
        yield Action("B", rank, m)


def interleaved(rank, P, M, V):
    """Interleaved 1F1B (Megatron-LM, arXiv 2104.04473): a microbatch goes round V times."""
    rounds = max(1, M // P)  # microbatches go round in groups of at least P: all ranks are busy
    groups = [range(*split(M, i, rounds)) for i in range(rounds)]
    forward = [(v, m) for group in groups for v in range(V) for m in group]
    backward = [(V - 1 - v, m) for v, m in forward]
    # Forwards before the first backward: the group's through all rounds but the last, and two for
    # each rank below, as a microbatch has to come there and its gradient back
    ahead = min(2 * (P - rank - 1) + (V - 1) * len(groups[0]), V * M)
    for i in range(V * M + ahead):
        if i < V * M:
            yield Action("F", forward[i][0] * P + rank, forward[i][1])
        if i >= ahead:
            yield Action("B", backward[i - ahead][0] * P + rank, backward[i - ahead][1])


def zero_bubble(rank, P, M, V=1):
    """ZB-H1 (arXiv 2401.10241): 1F1B with W held back on later ranks, so that their B is early."""
    for action in one_f_one_b(rank, P, M):
        yield action
        if action.kind == "B" and action.microbatch >= rank:
            yield Action("W", rank, action.microbatch - rank)
    for m in range(max(M - rank, 0), M):
        yield Action("W", rank, m)


SCHEDULES = {"afab": afab, "1f1b": one_f_one_b, "interleaved": interleaved, "zb": zero_bubble}


def bubble_formula(schedule, P, M, V, forward, backward, weights=0.0):
    """The part of the time that ranks wait, from the times of one stage's F, B and W.

    None where there is no closed form: zb with a W longer than F or B, which delays what waits for
    the F or B behind it.
    """
    if schedule == "zb" and weights > min(forward, backward):
        return None
    slots = V * max(M, P) + min(M, P) - 1 if schedule == "interleaved" else M + P - 1
    total = slots * (forward + backward)
    if schedule == "zb":
        total += max(1, M - P + 1) * weights
    return 1 - V * M * (forward + backward + weights) / total


def needs(action, stages):
    """The actions (one of them possibly on another rank) whose results an action needs."""
    kind, stage, m = action
    if kind == "F":
        return [Action("F", stage - 1, m)] if stage > 0 else []
    if kind == "W":
        return [Action("B", stage, m)]
    below = [Action("B", stage + 1, m)] if stage < stages - 1 else []
    return [Action("F", stage, m), *below]


def simulate(schedules, stages, cost):
    """When each action would run: [(rank, action, begin, end)], from every rank's list of actions.

    cost(action) is its time; messages take none. Ends early where ranks would wait for each other
    for ever.
    """
    todo, clock = [list(reversed(s)) for s in schedules], [0.0] * len(schedules)
    ended, rows, moved = {}, [], True
    while moved:
        moved = False
        for rank, actions in enumerate(todo):
            while actions and all(need in ended for need in needs(actions[-1], stages)):
                action, moved = actions.pop(), True
                begin = max([clock[rank], *(ended[need] for need in needs(action, stages))])
                clock[rank] = ended[action] = begin + cost(action)
                rows.append((rank, action, begin, clock[rank]))
    return rows


def faults(schedules, stages, M):
    """What is wrong with a schedule, given as every rank's list of actions: lines, or none."""
    kinds = {"F", "B"} | {action.kind for actions in schedules for action in actions}
    found = []
    for rank, actions in enumerate(schedules):
        own = range(rank, stages, len(schedules))
        wanted = {Action(kind, stage, m): 1 for kind in kinds for stage in own for m in range(M)}
        if Counter(actions) != wanted:
            found.append(f"rank {rank} does not do each of its actions once")
    rows = simulate(schedules, stages, lambda action: 1)
    if not found and len(rows) < sum(map(len, schedules)):
        done = Counter(rank for rank, *_ in rows)
        stuck = [(r, s[done[r]]) for r, s in enumerate(schedules) if done[r] < len(s)]
        waiting = ", ".join(f"rank {r} with {a.kind}{a.microbatch}" for r, a in stuck)
        found.append(f"deadlock: these wait for each other: {waiting}")
    return found


def bubble(rows, ranks):
    """The part of the time, first begin to last end, that a rank waits on average."""
    span = max(end for *_, end in rows) - min(begin for *_, begin, _ in rows)
    return 1 - sum(end - begin for *_, begin, end in rows) / (ranks * span)


def most_in_flight(actions):
    """Most (stage, microbatch) pairs whose activations a rank holds at once: from F to W or B."""
    last = "W" if any(a.kind == "W" for a in actions) else "B"
    held = peak = 0
    for action in actions:
        held += (action.kind == "F") - (action.kind == last)
        peak = max(peak, held)
    return peak


def open_channels(group, stages, args):
    """One-way process groups {(kind, from rank, to rank)}: activations by F, gradients by B.

    One way, so that no message waits behind one that goes in the opposite direction; and each is
    received in the order it was sent, since neighbours do the same actions in the same order: no
    tags, no handshake.
    """
    ranks, P, channels = dist.get_process_group_ranks(group), group.size(), {}
    for a, b in dict.fromkeys((s % P, (s + 1) % P) for s in range(stages - 1)):
        if a != b:
            channels["F", a, b] = dist.new_group([ranks[a], ranks[b]], args.wait)
            channels["B", b, a] = dist.new_group([ranks[a], ranks[b]], args.wait)
    return channels


# Copied from tp.py
def all_reduce(x, group, op=dist.ReduceOp.SUM):
    """The sum (or max) of x over ranks, in a new tensor: autograd may still need the old one."""
    if group.size() == 1:
        return x
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, op, group=group)
    return x


class Pipeline:
    """The engine: carries out this rank's actions, one after the other.

    held is what a backward will need, {(stage, microbatch): (input, output)}; deferred what W will.
    """

    def __init__(self, model, group, args):
        self.group, self.rank, self.P, self.args = group, group.rank(), group.size(), args
        self.count = self.P * args.virtual_stages
        self.stages = {s: Stage(model, s, self.count) for s in range(self.rank, self.count, self.P)}
        schedule, sizes = SCHEDULES[args.schedule], (self.P, args.microbatches, args.virtual_stages)
        self.orders = [list(schedule(rank, *sizes)) for rank in range(self.P)]
        self.channels = open_channels(group, self.count, args)
        self.late = defer_weight_gradients(self.stages) if args.schedule == "zb" else []
        self.timeline = None  # or a list, for (action, begin, end)

    def run(self, ids, labels, finish, backward=True):
        """Carry out all actions on ids and labels (b, s), or the forwards alone.

        Returns finish(hidden states, labels) of each microbatch, on the last stage's rank: losses.
        """
        self.ids, self.labels, self.finish, self.training = ids, labels, finish, backward
        self.held, self.deferred, self.inbox, self.sent = {}, {}, {}, {}
        self.results, self.peak = [], 0
        do = {"F": self.forward, "B": self.backward, "W": self.weights}
        actions = [a for a in self.orders[self.rank] if backward or a.kind == "F"]
        for i, action in enumerate(actions):
            for coming in actions[i : i + 2]:  # the next message may arrive while this one computes
                self.post_receive(coming)
            message = self.receive(action)
            begin = self.now()
            do[action.kind](action, message)
            if self.timeline is not None:
                self.timeline.append((action, begin, self.now()))
            self.peak = max(self.peak, len(self.held | self.deferred))
        for work, _ in self.sent.values():
            work.wait()
        results = self.results  # keep nothing until the next step; and finish knows the model,
        self.finish = self.sent = self.results = None  # which knows this engine: a reference cycle
        self.ids = self.labels = None
        return results

    def forward(self, action, x):
        _, stage, m = action
        x = self.ids[self.rows(m)] if stage == 0 else x.requires_grad_()
        out = self.stages[stage](x)  # (b/M, s, h)
        if stage == self.count - 1:
            out = self.finish(out, self.labels[self.rows(m)])
            self.results.append(out.detach())
        else:
            self.send(out.detach(), Action("F", stage + 1, m))
        if self.training:
            self.held[stage, m] = x, out

    def backward(self, action, grad):
        _, stage, m = action
        x, out = self.held.pop((stage, m))
        torch.autograd.backward(out, grad)
        if stage > 0:
            self.send(x.grad, Action("B", stage - 1, m))
        if self.late:
            self.deferred[stage, m] = self.late.copy()
            self.late.clear()

    def weights(self, action, _):
        with torch.no_grad():  # else the gradient would keep x, and with it all that x came from
            for linear, x, grad in self.deferred.pop(action[1:]):
                add_weight_gradient(linear, x, grad)

    def rows(self, m):
        """The part of the batch that microbatch m is."""
        return slice(*split(self.args.batch, m, self.args.microbatches))

    def sender(self, action):
        """The neighbouring stage's action whose result an action starts from; None if none."""
        return next((n for n in needs(action, self.count) if n.stage != action.stage), None)

    def post_receive(self, action):
        """Have an action's message received in the background. Its shape is known: no handshake."""
        sender = self.sender(action)
        peer = self.rank if sender is None else sender.stage % self.P
        if peer == self.rank or action in self.inbox:
            return
        rows, args = self.rows(action.microbatch), self.args
        shape = rows.stop - rows.start, args.length, args.config.hidden_size
        message = torch.empty(shape, dtype=args.torch_dtype, device=args.device)
        channel = self.channels[action.kind, peer, self.rank]
        work = dist.irecv(message, dist.get_global_rank(self.group, peer), channel)
        self.inbox[action] = work, message

    def receive(self, action):
        """The message that an action starts from: activations (b/M, s, h), or their gradient."""
        work, message = self.inbox.pop(action, (None, None))
        if work is not None:
            work.wait()
            sender = self.sender(action)
            order = self.orders[sender.stage % self.P]  # what it started from by then has arrived
            for taken in self.sent.keys() & order[: order.index(sender) + 1]:
                self.sent.pop(taken)[0].wait()
        return message

    def send(self, x, action):
        """Send x to the action that starts from it, without waiting for its arrival."""
        peer = action.stage % self.P
        if peer == self.rank:  # one rank has all the stages
            self.inbox[action] = None, x
            return
        channel = self.channels[action.kind, self.rank, peer]
        x = x.contiguous()
        self.sent[action] = dist.isend(x, dist.get_global_rank(self.group, peer), channel), x

    def now(self):
        """Seconds; for a timeline, not before the device has done what it was given."""
        if self.timeline is not None and self.args.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


class TorchPipeline:
    """The same stages under PyTorch's own engine, for --torch: a run() like Pipeline's."""

    def __init__(self, model, group, args):
        self.rank, self.P = group.rank(), group.size()
        stage = Stage(model, self.rank, self.P)
        shape = args.batch // args.microbatches, args.length
        engine = {"afab": ScheduleGPipe, "1f1b": Schedule1F1B}[args.schedule]
        self.finish = finish = []  # the function that run() was given last: not self, no cycle

        def make(backward):
            with torch.device("meta"):  # shapes that cross a boundary: torch would ask other ranks
                x = torch.empty(*shape, args.config.hidden_size, dtype=args.torch_dtype)
                x = x.requires_grad_(backward)
                first = torch.empty(shape, dtype=torch.int64) if self.rank == 0 else x
            part = PipelineStage(stage, self.rank, self.P, args.device, first, x, group=group)
            how = {"loss_fn": lambda *out: finish[-1](*out), "scale_grads": False}
            return engine(part, args.microbatches, **how)

        self.schedules = {backward: make(backward) for backward in (True, False)}
        nothing = torch.zeros(args.batch, args.length, dtype=torch.int64, device=args.device)
        for backward in self.schedules:  # its first step tries the connections: not to be measured
            self.run(nothing, nothing, lambda hidden, _: hidden.sum(), backward)
        model.zero_grad()

    def run(self, ids, labels, finish, backward=True):
        self.finish[:], results = [finish], []
        schedule = self.schedules[backward]
        step = schedule.step if backward else schedule.eval
        inputs = [ids] if self.rank == 0 else []
        last = {"target": labels, "losses": results} if self.rank == self.P - 1 else {}
        step(*inputs, **last)
        self.finish.clear()
        return results


# --------------------------------------------------------------------------------------------------
# 3. Sharding LLaMA
# --------------------------------------------------------------------------------------------------


# Copied from tp.py
def split(n, rank, world):
    """[start, end) of the rank's share of n things: the first n % world ranks hold one more."""
    base, extra = divmod(n, world)
    return rank * base + min(rank, extra), (rank + 1) * base + min(rank + 1, extra)


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


class Stage(nn.Module):
    """One stage of HF's model, as a model: (b, s, h) -> (b, s, h); the first takes ids (b, s).

    It shares model's layers, and runs them by HF's own code, which makes masks and rotary tables.
    """

    def __init__(self, model, stage, stages):
        super().__init__()
        self.input = "input_ids" if stage == 0 else "inputs_embeds"
        self.part = copy.copy(model.model)
        layers = model.model.layers[slice(*split(len(model.model.layers), stage, stages))]
        self.part._modules = {**model.model._modules, "layers": layers}
        if stage < stages - 1:
            self.part.norm = nn.Identity()

    def forward(self, x):
        return self.part(**{self.input: x}, use_cache=False).last_hidden_state


def parallelize(model, group, args):
    """Keep this rank's stages of HF's LlamaForCausalLM, in place; nn.Identity() for the others."""
    rank, P, layers = group.rank(), group.size(), model.model.layers
    stages = P * args.virtual_stages
    own = {i for stage in range(rank, stages, P) for i in range(*split(len(layers), stage, stages))}
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    for i in range(len(layers)):
        if i not in own:
            layers[i] = nn.Identity()
    if rank > 0:
        model.model.embed_tokens = nn.Identity()
    if rank < P - 1:
        model.model.norm, model.lm_head = nn.Identity(), nn.Identity()
    if tied and P > 1:  # on first and last stage: each sees a part of the gradient
        ranks = dist.get_process_group_ranks(group)
        ends = dist.new_group([ranks[0], ranks[-1]], args.wait)  # every rank has to make it
        for weight in (*model.model.embed_tokens.parameters(), *model.lm_head.parameters()):
            weight.replicas, weight.sum_over = 2, ends
    model.pipeline = (TorchPipeline if args.torch else Pipeline)(model, group, args)


class SplitLinear(torch.autograd.Function):
    """A linear layer whose backward leaves the weight's gradient for W (arXiv 2401.10241)."""

    @staticmethod
    def forward(ctx, x, linear, late):
        ctx.save_for_backward(x)
        ctx.linear, ctx.late = linear, late
        return F.linear(x, linear.weight, linear.bias)

    @staticmethod
    def backward(ctx, grad):
        ctx.late.append((ctx.linear, *ctx.saved_tensors, grad))
        return grad @ ctx.linear.weight, None, None


def defer_weight_gradients(stages):
    """Have every linear layer of the stages add what its weight's gradient needs to a list."""
    late = []

    def forward(inner, x):
        return SplitLinear.apply(x, inner.__self__, late)

    for stage in stages.values():
        for linear in stage.modules():
            if isinstance(linear, nn.Linear):
                wrap(linear, forward)
    return late


def add_weight_gradient(linear, x, grad):
    """What autograd would have done in B: add the gradients of a linear layer's weight and bias."""
    x, grad = x.flatten(0, -2), grad.flatten(0, -2)  # (tokens, in), (tokens, out)
    gradients = [(linear.weight, grad.T @ x)]
    if linear.bias is not None:
        gradients.append((linear.bias, grad.sum(0)))
    for parameter, gradient in gradients:
        parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)


def settle(args):
    """Fill in what depends on other options: batch and microbatches are as many, or 4."""
    args.virtual_stages = args.virtual_stages or (2 if args.schedule == "interleaved" else 1)
    args.microbatches = args.microbatches or args.batch or 4
    args.batch = args.batch or args.microbatches
    if args.virtual_stages > 1 and args.schedule != "interleaved":
        raise Unusable(f"--virtual-stages {args.virtual_stages} needs --schedule interleaved")
    if args.microbatches > args.batch:
        raise Unusable(
            f"--batch {args.batch} cannot be cut into {args.microbatches} microbatches; "
            f"--microbatches {args.batch}, or a larger --batch, would do"
        )


def check_shape(args, world):
    """Raise Unusable where this model, batch and schedule do not go together on world ranks."""
    layers, V, M = args.config.num_hidden_layers, args.virtual_stages, args.microbatches
    if world * V > layers:
        most = layers // V
        tell = f"{layers} layers cannot fill {world * V} stages, {V} on each of {world} ranks"
        raise Unusable(f"{tell}; at most {most} rank{'s' if most > 1 else ''} would do")
    every = [list(SCHEDULES[args.schedule](rank, world, M, V)) for rank in range(world)]
    for fault in faults(every, world * V, M):  # better now than by a hang
        raise Unusable(f"--schedule {args.schedule}: {fault}")
    if args.torch and (args.schedule not in ("afab", "1f1b") or args.batch % M):
        raise Unusable("--torch runs --schedule afab and 1f1b, with microbatches of the same size")
    if args.torch and args.schedule == "1f1b" and world > M:
        raise Unusable(f"--torch runs 1f1b with a microbatch a rank or more: {world} would do")


# --------------------------------------------------------------------------------------------------
# 4. Loss and step
# --------------------------------------------------------------------------------------------------


# Copied from tp.py
def shift(labels):
    """The target of each token is the next one; the last has none. (b, s) -> (b, s)"""
    return F.pad(labels[:, 1:], (0, 1), value=IGNORE)


# Copied from sp_ulysses.py
def token_loss(model, hidden, targets):
    """Sum of the losses of tokens hidden (b, c, h): -log softmax(logits)[target].

    By hand, since F.cross_entropy sums a large vocabulary too coarsely in float32 on a CPU.
    """
    logits = F.linear(hidden, model.lm_head.weight).float()  # (b, c, v)
    logits = logits - logits.detach().max(-1, keepdim=True).values  # at most 0: exp stays finite
    target_logit = logits.gather(-1, targets.clamp(min=0)[..., None])[..., 0]  # IGNORE < 0
    loss = logits.exp().sum(-1).log() - target_logit  # (b, c)
    return loss.masked_fill(targets == IGNORE, 0).sum()


def microbatch_loss(model, hidden, targets, count, args):
    """A microbatch's summand of the mean loss over all `count` targets of the batch.

    hidden (b/M, s, h), targets (b/M, s). Divided by the whole batch's count, gradients are one
    device's whatever M is: a mean of microbatch means would weight a target by how few others its
    microbatch has.
    """
    size = hidden.shape[1] if args.loss == "full" else max(1, LOSS_CHUNK // len(hidden))
    total = 0
    for h, t in zip(hidden.split(size, 1), targets.split(size, 1)):
        if args.loss == "full":
            total += token_loss(model, h, t)
        else:  # logits of one chunk at a time, recomputed in the backward
            total += checkpoint(token_loss, model, h, t, use_reentrant=False)
    return total / count


# Copied from tp.py
def sum_shared_gradients(model):
    """Sum the gradients of which each rank saw a part (`sum_over`: the ranks that saw the rest)."""
    for parameter in model.parameters():
        if getattr(parameter, "sum_over", None) is not None:  # in place: no second gradient
            dist.all_reduce(parameter.grad, group=parameter.sum_over)


def train_step(model, ids, labels, group, args, backward=True):
    """Loss of ids (b, s), the same on every rank; after it every .grad is complete."""
    targets = shift(labels)
    count = (targets != IGNORE).sum()

    def finish(hidden, targets):
        return microbatch_loss(model, hidden, targets, count, args)

    losses = model.pipeline.run(ids, targets, finish, backward)
    if backward:
        sum_shared_gradients(model)
    dtype = torch.promote_types(args.torch_dtype, torch.float32)
    loss = torch.zeros((), dtype=dtype, device=ids.device)
    return all_reduce(loss + sum(loss.detach() for loss in losses), group)


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
    """The logits (b, s, v), on the last stage's rank; None on the others."""
    logits = model.pipeline.run(ids, ids, lambda hidden, _: model.lm_head(hidden), backward=False)
    return torch.cat(logits) if logits else None


def token_range(length, group):
    """Tokens [start, end) that this rank holds at the embedding; how many ranks hold the same."""
    return 0, length, 1  # the first stage's rank alone has them


def expected_traffic(config, group, args):
    """What one step must send: rows (phase, op, calls, message bytes), as Meter counts them."""
    P, rank, element = group.size(), group.rank(), args.torch_dtype.itemsize
    if P == 1:
        return []
    own = range(rank, P * args.virtual_stages, P)
    below = sum(stage < P * args.virtual_stages - 1 for stage in own)  # their output goes on
    above = sum(stage > 0 for stage in own)  # their input came from another stage
    hidden = args.batch * args.length * config.hidden_size * element  # (b, s, h), all microbatches
    rows = [("forward", "send", below * args.microbatches, below * hidden)] if below else []
    rows += [("backward", "send", above * args.microbatches, above * hidden)] if above else []
    rows += [("forward", "all_reduce", 1, max(4, element))]  # the loss, in float32 or better
    if config.tie_word_embeddings and rank in (0, P - 1):
        rows += [("backward", "all_reduce", 1, config.vocab_size * config.hidden_size * element)]
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


# --------------------------------------------------------------------------------------------------
# What sections 6 and 7, the same in all four scripts, find of this script alone
# --------------------------------------------------------------------------------------------------


def show_schedule(args):
    """--mode schedule: check and time a schedule, without ranks; returns whether all held."""
    P, M, V = args.stages, args.microbatches, args.virtual_stages
    schedules = [list(SCHEDULES[args.schedule](rank, P, M, V)) for rank in range(P)]
    problems, W = faults(schedules, P * V, M), args.schedule == "zb"
    cost = {"F": 1 / V, "B": (1 if W else 2) / V, "W": 1 / V}  # B and W: a product each, as F
    rows = simulate(schedules, P * V, lambda action: cost[action.kind])
    end, idle = max(row[3] for row in rows), bubble(rows, P)
    formula = bubble_formula(args.schedule, P, M, V, cost["F"], cost["B"], cost["W"] * W)
    if abs(idle - formula) > 1e-9 and not problems:
        problems.append(f"bubble {idle:.4f} where the formula says {formula:.4f}")
    in_flight = [most_in_flight(actions) for actions in schedules]
    say(f"schedule: {args.schedule}, {P} ranks, {M} microbatches, {V} stage{'s' * (V > 1)} a rank")
    lines = []
    for rank in range(P):
        busy = sum(row[3] - row[2] for row in rows if row[0] == rank)
        line = {"rank": rank, "busy": busy, "waits": end - busy, "most in flight": in_flight[rank]}
        lines.append(line)
    table(lines)
    say("  time in forwards of a rank's layers on one microbatch; a stage's microbatches in flight")
    table([{"bubble": "simulated", "": f"{idle:.4f}"}, {"bubble": "formula", "": f"{formula:.4f}"}])
    results = {"script": Path(__file__).name, "schedule": args.schedule, "ranks": P}
    results |= {"virtual_stages": V, "microbatches": M, "passed": not problems, "bubble": idle}
    results |= {"bubble_formula": formula, "in_flight": in_flight}
    results["timeline"] = [[rank, *action, *times] for rank, action, *times in rows]
    right = "every microbatch once a stage each way, no deadlock, bubble as the formula says"
    say(f"FAIL schedule: {problems[0]}" if problems else f"PASS schedule: {right}")
    if args.json:
        write_whole(args.json, lambda draft: draft.write_text(json.dumps(results) + "\n"))
    return not problems


def own_figures(model, step, args, group):
    """What benchmark measures in this script alone: (the timeline and its bubble, what was wrong).

    Begins and ends are each rank's clock from a common start. A bubble of the measured times holds
    messages and unequal stages too; the formula knows neither, the simulation with the measured
    times unequal stages.
    """
    engine, P = model.pipeline, group.size()
    if args.torch or args.backend == "fake":
        return {}, []
    steps = []
    for _ in range(args.bench_iters):
        engine.timeline = []
        gather(None, group)
        start = time.perf_counter()
        step()
        line = [(action, begin - start, end - start) for action, begin, end in engine.timeline]
        everyone = gather((line, engine.peak), group)
        engine.timeline = None
        rows = [(rank, *row) for rank, (line, _) in enumerate(everyone) for row in line]
        steps.append((bubble(rows, P), rows))
    idle, rows = sorted(steps, key=lambda step: step[0])[len(steps) // 2]  # the median
    M, V, times = args.microbatches, args.virtual_stages, {"F": [], "B": [], "W": [0.0]}
    for _, action, begin, end in rows:
        times[action.kind].append(end - begin)
    mean = [statistics.mean(times[kind]) for kind in "FBW"]
    took = {action: end - begin for _, action, begin, end in rows}
    schedules = [list(SCHEDULES[args.schedule](rank, P, M, V)) for rank in range(P)]
    simulated = bubble(simulate(schedules, P * V, took.get), P)
    formula = bubble_formula(args.schedule, P, M, V, *mean)
    in_flight, expected = [peak for _, peak in everyone], list(map(most_in_flight, schedules))
    span, lines = max(row[3] for row in rows) - min(row[2] for row in rows), []
    for rank in range(P):
        busy = sum(row[3] - row[2] for row in rows if row[0] == rank)
        line = {"rank": rank, "busy_s": busy, "waits_s": span - busy}
        lines.append(line | {"most in flight": in_flight[rank], "by schedule": expected[rank]})
    table(lines)
    alike = "none for a W longer than F or B" if formula is None else f"{formula:.3f}"
    shares = {"measured": f"{idle:.3f}", "formula: stages alike, messages take no time": alike}
    shares["simulated with the measured times of F, B, W"] = f"{simulated:.3f}"
    table([{"bubble, part of the time": name, "": share} for name, share in shares.items()])
    figures = {"bubble": idle, "bubble_formula": formula, "bubble_simulated": simulated}
    figures |= {"in_flight": in_flight, "in_flight_expected": expected}
    figures["timeline"] = [[rank, *action, begin, end] for rank, action, begin, end in rows]
    return figures, ["microbatches in flight"] if in_flight != expected else []


OPTIONS = {
    "--schedule": {"choices": list(SCHEDULES), "default": "1f1b"},
    "--microbatches": {"type": int, "help": "parts of the batch (as many as sequences, or 4)"},
    "--virtual-stages": {"type": int, "help": "stages a rank, interleaved only (2)"},
    "--stages": {"type": int, "default": 4, "help": "ranks that --mode schedule is about (4)"},
    "--torch": {"action": "store_true", "help": "the stages by torch.distributed.pipelining"},
}
RIVAL = "torch"  # with this option benchmark mode times the script without it, too, in turn
FIGURES, OWN_MODES = own_figures, {"schedule": show_schedule}


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
