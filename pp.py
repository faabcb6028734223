"""Pipeline parallelism for LLaMA in one file (GPipe, PipeDream, Megatron-LM, Zero Bubble) on HF's own model.

Every rank holds whole layers, one stage of the model, and hands the hidden states on. P = 2, 8 layers:

    rank 0: embedding, layers 0..3          rank 1: layers 4..7, norm, head, loss
        ids (b, s)
        | (b, s, h)          -- activations (b, s, h) -->   |
        |                    <-- gradients (b, s, h) ---    loss

One stage alone would wait while the other computes. So the batch is cut into M microbatches, and a schedule
says which of them a rank works on next. F forward, B backward (twice the work; the default, --recompute
block, does F's again in it), microbatch 0 to 3, P = 2:

    afab    rank 0  F0 F1 F2 F3 .  .  .  B0 -- B1 -- B2 -- B3 --   all forward, all backward (GPipe): keeps
            rank 1  .  F0 F1 F2 F3 B0 -- B1 -- B2 -- B3 -- .  .    the activations of all M microbatches
    1f1b    rank 0  F0 F1 .  .  B0 -- F2 B1 -- F3 B2 -- .  B3 --   one forward, one backward: as long, but
            rank 1  .  F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 -- .  .    with at most P microbatches in flight
    zb      rank 0  F0 F1 .  B0 W0 F2 B1 W1 F3 B2 W2 B3 W3         B: the input's gradient, all that rank 0
            rank 1  .  F0 B0 F1 B1 W0 F2 B2 W1 F3 B3 W2 W3         waits for; W, the weights', fills gaps

    interleaved: a rank has V stages of 1/V the size, rank 0 layers 0, 1, 4 and 5. 1/V of the waiting, for
    V P - 1 boundaries instead of P - 1.

Cost: one (b, s, h) sent forward and one back at each boundary: far less than tp.py's 4 all-reduces a layer.
Embeddings tied to the head are on the first and the last rank; their gradients are summed once a step.
Weights, gradients and optimizer state shrink by P; time is lost to the bubble: (P-1)/(M+P-1) of it with afab
and 1f1b, (P-1)/(V M+P-1) interleaved, (P-1)/(3 M+P-1) with zb where F, B and W take as long (M >= P; about so
with --recompute none).

    torchrun --nproc_per_node=2 pp.py --mode correctness --schedule 1f1b --microbatches 4
    torchrun --nproc_per_node=2 pp.py --mode all --schedule zb
    torchrun --nproc_per_node=2 pp.py --mode benchmark --torch     # the same stages, by PyTorch
    python pp.py --mode schedule --schedule 1f1b --stages 8 --microbatches 32 --plot timeline.png
    torchrun --nproc_per_node=2 pp.py --inject-bug list
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
from collections import Counter
from contextlib import ExitStack, contextmanager, nullcontext
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
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.testing._internal.distributed import fake_pg
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm
from transformers.models.llama import modeling_llama

STRATEGY = "pp"
IGNORE = -100  # a label that is no target: HF's and PyTorch's convention
LOSS_CHUNK = 2048  # --loss chunked: tokens a rank whose logits exist at the same time


# ---------------------------------------------------------------------------------------------------
# 2. Communication: the schedules, and the engine that carries them out
# ---------------------------------------------------------------------------------------------------


class Action(NamedTuple):
    """What a rank does next, with which of its stages, on which microbatch.

    kind F: forward. B: backward; where a schedule has W too, W is the gradients of the weights of the stage's
    linear layers, and B all the others, above all that of its input (the Zero Bubble paper's names).
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
    """Interleaved 1F1B (Megatron-LM, arXiv 2104.04473): a microbatch goes round the ranks V times."""
    rounds = max(1, M // P)  # microbatches go round in groups of at least P: as many as keep all ranks busy
    groups = [range(*split(M, i, rounds)) for i in range(rounds)]
    forward = [(v, m) for group in groups for v in range(V) for m in group]
    backward = [(V - 1 - v, m) for v, m in forward]
    # Forwards before the first backward: the group's through all rounds but the last, and two for each rank
    # below, as a microbatch has to come there and its gradient back
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
    """The part of the time that ranks wait, from the times of one stage's F, B and W on a microbatch."""
    slots = V * max(M, P) + min(M, P) - 1 if schedule == "interleaved" else M + P - 1
    total = slots * (forward + backward) + (max(1, M - P + 1) * weights if schedule == "zb" else 0)
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

    cost(action) is its time; messages take none. Ends early where ranks would wait for each other for ever.
    """
    ended, clock, todo, rows = {}, [0.0] * len(schedules), [list(reversed(s)) for s in schedules], []
    moved = True
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
    """What is wrong with a schedule, given as every rank's list of actions: lines, none if it is right."""
    kinds = "FBW" if any(action.kind == "W" for actions in schedules for action in actions) else "FB"
    found = []
    for rank, actions in enumerate(schedules):
        own = range(rank, stages, len(schedules))
        wanted = {Action(kind, stage, m): 1 for kind in kinds for stage in own for m in range(M)}
        if Counter(actions) != wanted:
            found.append(f"rank {rank} does not do each of its actions once")
    rows = simulate(schedules, stages, lambda action: 1)
    if not found and len(rows) < sum(map(len, schedules)):
        stuck = [s[sum(r == rank for r, *_ in rows) :] for rank, s in enumerate(schedules)]
        waiting = ", ".join(f"rank {r} with {a[0].kind}{a[0].microbatch}" for r, a in enumerate(stuck) if a)
        found.append(f"deadlock: these wait for each other: {waiting}")
    return found


def bubble(rows, ranks):
    """The part of the time, first begin to last end, that a rank waits on average."""
    span = max(end for *_, end in rows) - min(begin for *_, begin, _ in rows)
    return 1 - sum(end - begin for *_, begin, end in rows) / (ranks * span)


def most_in_flight(actions):
    """The most (stage, microbatch) pairs whose activations a rank holds at once: from F to W, or B."""
    last = "W" if any(a.kind == "W" for a in actions) else "B"
    held = peak = 0
    for action in actions:
        held += (action.kind == "F") - (action.kind == last)
        peak = max(peak, held)
    return peak


def open_channels(group, stages, args):
    """One-way process groups {(kind, from rank, to rank)}: activations go by F, gradients come by B.

    One way, so that no message waits behind one that goes in the opposite direction; and each is received
    in the order it was sent, since neighbours do the same actions in the same order: no tags, no handshake.
    """
    ranks, P, channels = dist.get_process_group_ranks(group), group.size(), {}
    for a, b in dict.fromkeys((s % P, (s + 1) % P) for s in range(stages - 1)):
        if a != b:
            channels["F", a, b] = dist.new_group([ranks[a], ranks[b]], args.wait)
            channels["B", b, a] = dist.new_group([ranks[a], ranks[b]], args.wait)
    return channels


# Copied from tp.py
def all_reduce(x, group, op=dist.ReduceOp.SUM):
    """The sum (or max) of x over the ranks, in a new tensor: autograd may still need the old one."""
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
        schedule = SCHEDULES[args.schedule]
        self.actions = list(schedule(self.rank, self.P, args.microbatches, args.virtual_stages))
        self.channels = open_channels(group, self.count, args)
        self.late = defer_weight_gradients(self.stages) if args.schedule == "zb" else []
        self.timeline = None  # or a list, for (action, begin, end)

    def run(self, ids, labels, finish, backward=True):
        """Carry out all actions on ids and labels (b, s), or the forwards alone.

        Returns finish(hidden states, labels) of each microbatch, on the last stage's rank: its losses.
        """
        self.ids, self.labels, self.finish, self.training = ids, labels, finish, backward
        self.held, self.deferred, self.inbox, self.sent, self.results, self.peak = {}, {}, {}, {}, [], 0
        do = {"F": self.forward, "B": self.backward, "W": self.weights}
        actions = [action for action in self.actions if backward or action.kind == "F"]
        for i, action in enumerate(actions):
            for coming in actions[i : i + 2]:  # the next one's message may arrive while this one computes
                self.post_receive(coming)
            message = self.receive(action)
            begin = self.now()
            do[action.kind](action, message)
            if self.timeline is not None:
                self.timeline.append((action, begin, self.now()))
            self.peak = max(self.peak, len(self.held | self.deferred))
        for work, _ in self.sent.values():
            work.wait()
        return self.results

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
        if Action("F", stage + 1, m) in self.sent:  # arrived, since its gradient did: let go of it
            self.sent.pop(Action("F", stage + 1, m))[0].wait()
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

    def peer(self, action):
        """The rank that sends what an action starts from; None if nobody has to."""
        stage = {"F": action.stage - 1, "B": action.stage + 1}.get(action.kind, -1)
        return stage % self.P if 0 <= stage < self.count else None

    def post_receive(self, action):
        """Have an action's message received in the background. Its shape is known: no handshake."""
        peer = self.peer(action)
        if peer in (None, self.rank) or action in self.inbox:
            return
        rows, args, channel = (
            self.rows(action.microbatch),
            self.args,
            self.channels[action.kind, peer, self.rank],
        )
        shape = rows.stop - rows.start, args.length, args.config.hidden_size
        message = torch.empty(shape, dtype=args.torch_dtype, device=args.device)
        work = dist.irecv(message, dist.get_global_rank(self.group, peer), channel)
        self.inbox[action] = work, message

    def receive(self, action):
        """The message that an action starts from: activations (b/M, s, h), or their gradient."""
        work, message = self.inbox.pop(action, (None, None))
        if work is not None:
            work.wait()
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
        stage, shape = Stage(model, self.rank, self.P), (args.batch // args.microbatches, args.length)
        engine = {"afab": ScheduleGPipe, "1f1b": Schedule1F1B}[args.schedule]

        def make(backward):
            with torch.device("meta"):  # the shapes that cross a boundary: torch would ask the other ranks
                x = torch.empty(*shape, args.config.hidden_size, dtype=args.torch_dtype).requires_grad_(
                    backward
                )
                first = torch.empty(shape, dtype=torch.int64) if self.rank == 0 else x
            part = PipelineStage(stage, self.rank, self.P, args.device, first, x, group=group)
            return engine(part, args.microbatches, loss_fn=lambda *out: self.finish(*out), scale_grads=False)

        self.schedules = {backward: make(backward) for backward in (True, False)}
        nothing = torch.zeros(args.batch, args.length, dtype=torch.int64, device=args.device)
        for backward in self.schedules:  # its first step tries the connections: not in what is measured
            self.run(nothing, nothing, lambda hidden, _: hidden.sum(), backward)
        model.zero_grad()

    def run(self, ids, labels, finish, backward=True):
        self.finish, results = finish, []
        schedule = self.schedules[backward]
        step = schedule.step if backward else schedule.eval
        inputs = [ids] if self.rank == 0 else []
        step(*inputs, **({"target": labels, "losses": results} if self.rank == self.P - 1 else {}))
        return results


def expected_traffic(config, group, args):
    """What one step must send: rows (phase, op, calls, bytes), bytes counted as Meter counts them."""
    P, rank, element = group.size(), group.rank(), args.torch_dtype.itemsize
    if P == 1:
        return []
    own = range(rank, P * args.virtual_stages, P)
    below = sum(stage < P * args.virtual_stages - 1 for stage in own)  # stages whose output goes to another
    above = sum(stage > 0 for stage in own)  # stages whose input came from another
    hidden = args.batch * args.length * config.hidden_size * element  # one (b, s, h), in all microbatches
    rows = [("forward", "send", below * args.microbatches, below * hidden)] if below else []
    rows += [("backward", "send", above * args.microbatches, above * hidden)] if above else []
    rows += [("forward", "all_reduce", 1, max(4, element))]  # the loss, in float32 or better, for all to see
    if config.tie_word_embeddings and rank in (0, P - 1):
        rows += [("backward", "all_reduce", 1, config.vocab_size * config.hidden_size * element)]
    return rows


# ---------------------------------------------------------------------------------------------------
# 3. Sharding LLaMA
# ---------------------------------------------------------------------------------------------------


# Copied from tp.py
def split(n, rank, world):
    """[start, end) of the rank's share of n things: contiguous, the first n % world ranks hold one more."""
    base, extra = divmod(n, world)
    return rank * base + min(rank, extra), (rank + 1) * base + min(rank + 1, extra)


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


def check_shape(args, world):
    """Raise Unusable where this model, batch and schedule do not go together on world ranks."""
    settle(args)
    layers, stages = args.config.num_hidden_layers, world * args.virtual_stages
    if stages > layers:
        raise Unusable(f"{layers} layers cannot fill {stages} stages, {args.virtual_stages} on each of "
                       f"{world} ranks; at most {layers // args.virtual_stages} ranks would do")  # fmt: skip
    every = [
        SCHEDULES[args.schedule](rank, world, args.microbatches, args.virtual_stages) for rank in range(world)
    ]
    for fault in faults(list(map(list, every)), stages, args.microbatches):  # better now than by a hang
        raise Unusable(f"--schedule {args.schedule}: {fault}")
    if args.torch and (args.schedule not in ("afab", "1f1b") or args.batch % args.microbatches):
        raise Unusable("--torch runs --schedule afab and 1f1b, with microbatches of the same size")
    if args.torch and args.schedule == "1f1b" and args.microbatches < world:
        raise Unusable(f"--torch runs 1f1b with at least as many microbatches as ranks: {world} would do")
    bug = args.inject_bug
    if bug in ("unscaled_loss", "mean_of_means", "overwritten_gradients") and args.microbatches == 1:
        raise Unusable(f"--inject-bug {bug} needs at least 2 microbatches: with one it is right")
    if bug == "mean_of_means" and args.batch % (3 * args.microbatches) == 0:  # as proof_batch() has targets
        raise Unusable(f"--inject-bug {bug}: the {args.microbatches} microbatches of {args.batch} sequences "
                       f"have as many targets each; --batch {args.batch + 1} would do")  # fmt: skip
    if bug == "swapped_labels" and args.batch == 1:
        raise Unusable(f"--inject-bug {bug} needs at least 2 sequences")
    if args.torch and bug in ("overwritten_gradients", "dropped_boundary_gradient", "swapped_labels"):
        raise Unusable(f"--inject-bug {bug} is a bug of our own engine, which --torch does not run")
    if bug == "untied_gradient" and not args.config.tie_word_embeddings:
        raise Unusable(
            f"--inject-bug untied_gradient: the embeddings of {args.model} are not tied; tiny's are"
        )


def parallelize(model, group, args):
    """Keep this rank's stages of HF's LlamaForCausalLM, in place: nn.Identity() stands for the others."""
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
    if tied and P > 1:  # first and last stage hold the same weight; each sees a part of its gradient
        ranks = dist.get_process_group_ranks(group)
        ends = dist.new_group([ranks[0], ranks[-1]], args.wait)  # every rank has to take part in making it
        for weight in (*model.model.embed_tokens.parameters(), *model.lm_head.parameters()):
            weight.copies, weight.sum_over = 2, ends
    model.pipeline = (TorchPipeline if args.torch else Pipeline)(model, group, args)


class SplitLinear(torch.autograd.Function):
    """A linear layer whose backward leaves the weight's gradient for W (Zero Bubble's WeightGradStore)."""

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
    """Have every linear layer of the stages put what its weight's gradient needs into the list returned."""
    late = []

    def forward(linear, x):
        return SplitLinear.apply(x, linear, late)

    for stage in stages.values():
        for linear in stage.modules():
            if isinstance(linear, nn.Linear):
                linear.forward = partial(forward, linear)
    return late


def add_weight_gradient(linear, x, grad):
    """What autograd would have done in B: add the gradients of a linear layer's weight and bias."""
    x, grad = x.flatten(0, -2), grad.flatten(0, -2)  # (tokens, in), (tokens, out)
    gradients = [(linear.weight, grad.T @ x)]
    if linear.bias is not None:
        gradients.append((linear.bias, grad.sum(0)))
    for parameter, gradient in gradients:
        parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)


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
def shift(labels):
    """The target of each token is the next one; the last has none. (b, s) -> (b, s)"""
    return F.pad(labels[:, 1:], (0, 1), value=IGNORE)


# Copied from sp_ulysses.py
def token_loss(model, hidden, targets):
    """Sum of the losses of tokens hidden (b, c, h): -log softmax(logits)[target], the vocabulary is whole.

    By hand, since F.cross_entropy sums a large vocabulary too coarsely in float32 on a CPU.
    """
    logits = F.linear(hidden, model.lm_head.weight).float()  # (b, c, v)
    logits = logits - logits.detach().max(-1, keepdim=True).values  # the largest is 0: exp stays finite
    target_logit = logits.gather(-1, targets.clamp(min=0)[..., None])[..., 0]  # IGNORE is negative
    return (logits.exp().sum(-1).log() - target_logit).masked_fill(targets == IGNORE, 0).sum()


def microbatch_loss(model, hidden, targets, count, args):
    """A microbatch's part of the mean loss over all count targets of the batch; the sum is the loss.

    hidden (b/M, s, h), targets (b/M, s). Divided by the whole batch's count, gradients are one device's
    whatever M is: a mean of microbatch means would weight a target by how few others its microbatch has.
    """
    size = hidden.shape[1] if args.loss == "full" else max(1, LOSS_CHUNK // len(hidden))
    total = 0
    for h, t in zip(hidden.split(size, 1), targets.split(size, 1)):
        if args.loss == "full":
            total += token_loss(model, h, t)
        else:  # logits of one chunk at a time, made again in the backward
            total += checkpoint(token_loss, model, h, t, use_reentrant=False)
    return total / count


def train_step(model, ids, labels, group, args, backward=True):
    """Loss of ids (b, s), the same on every rank; after it every .grad is complete."""
    targets = shift(labels)
    count = (targets != IGNORE).sum()

    def finish(hidden, targets):
        return microbatch_loss(model, hidden, targets, count, args)

    losses = model.pipeline.run(ids, targets, finish, backward)
    if backward:
        sum_shared_gradients(model)
    loss = torch.zeros((), dtype=torch.promote_types(args.torch_dtype, torch.float32), device=ids.device)
    return all_reduce(loss + sum(loss.detach() for loss in losses), group)


def local_logits(model, ids, group, args):
    """The logits (b, s, v), on the last stage's rank; None on the others."""
    logits = model.pipeline.run(ids, ids, lambda hidden, _: model.lm_head(hidden), backward=False)
    return torch.cat(logits) if logits else None


def token_range(length, group):
    """Tokens [start, end) of the embeddings that this rank holds, and how many ranks hold the same."""
    return 0, length, 1  # the first stage's rank alone has them


# ---------------------------------------------------------------------------------------------------
# 5. Sabotage: what people really get wrong, for --inject-bug. Correctness has to catch every one.
# ---------------------------------------------------------------------------------------------------


def unscaled_loss():
    """Every microbatch's loss is its own mean, and their sum is not divided: M times too large."""
    global microbatch_loss
    right = microbatch_loss

    def microbatch_loss(model, hidden, targets, count, args):
        return right(model, hidden, targets, (targets != IGNORE).sum(), args)


def mean_of_means():
    """The loss is the mean of the microbatches' means, though their targets are not as many."""
    global microbatch_loss
    right = microbatch_loss

    def microbatch_loss(model, hidden, targets, count, args):
        return right(model, hidden, targets, (targets != IGNORE).sum() * args.microbatches, args)


def overwritten_gradients():
    """A microbatch's gradients replace those of the one before instead of adding to them."""
    right = Pipeline.backward

    def backward(self, action, grad):
        for parameter in self.stages[action.stage].parameters():
            parameter.grad = None
        right(self, action, grad)

    Pipeline.backward = backward


def untied_gradient():
    """First and last stage each keep their own part of the tied embedding's gradient."""
    global sum_shared_gradients

    def sum_shared_gradients(model):
        pass


def dropped_boundary_gradient():
    """The gradient that goes from the second stage to the first is lost: zeros arrive."""
    right = Pipeline.receive

    def receive(self, action):
        message = right(self, action)
        return message * 0 if action.kind == "B" and action.stage == 0 else message

    Pipeline.receive = receive


def wrong_layers():
    """The stages hold the layers in the wrong order: the first one has the last."""
    global parallelize
    right = parallelize

    def parallelize(model, group, args):
        layers = list(model.model.layers)
        model.model.layers = nn.ModuleList([layers[-1], *layers[1:-1], layers[0]])
        right(model, group, args)


def swapped_labels():
    """The last stage holds each sequence against the labels of the one before it."""
    right = Pipeline.run

    def run(self, ids, labels, finish, backward=True):
        return right(self, ids, labels.roll(1, 0), finish, backward)

    Pipeline.run = run


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


BUGS = [
    unscaled_loss,
    mean_of_means,
    overwritten_gradients,
    untied_gradient,
    dropped_boundary_gradient,
    wrong_layers,
    swapped_labels,
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


def settle(args):
    """Fill in what was left to default; raise Unusable where schedule and batch do not go together."""
    args.virtual_stages = args.virtual_stages or (2 if args.schedule == "interleaved" else 1)
    args.microbatches = args.microbatches or args.batch or 4
    args.batch = args.batch or args.microbatches
    if args.virtual_stages > 1 and args.schedule != "interleaved":
        raise Unusable(f"--virtual-stages {args.virtual_stages} needs --schedule interleaved")
    if args.microbatches > args.batch:
        raise Unusable(f"--batch {args.batch} cannot be cut into {args.microbatches} microbatches; "
                       f"--microbatches {args.batch}, or a larger --batch, would do")  # fmt: skip


def draw_timeline(axis, timeline):
    """Ranks from top to bottom, time to the right; rows are (rank, kind, stage, microbatch, begin, end)."""
    colours, ranks = {"F": "#56B4E9", "B": "#E69F00", "W": "#009E73"}, 1 + max(row[0] for row in timeline)
    busiest = len(timeline) / ranks
    for rank, kind, stage, m, begin, end in timeline:
        shade = 1 - 0.5 * (stage // ranks) / (1 + max(row[2] for row in timeline) // ranks)
        axis.barh(rank, end - begin, 0.9, begin, color=colours[kind], alpha=shade, edgecolor="white", lw=0.5)
        if busiest <= 40:
            axis.text(
                (begin + end) / 2, rank, m, ha="center", va="center", fontsize=8 if busiest <= 20 else 5
            )
    for kind, meaning in (("F", "forward"), ("B", "backward"), ("W", "weights' gradients")):
        if any(row[1] == kind for row in timeline):
            axis.barh(0, 0, color=colours[kind], label=meaning)
    axis.set(xlabel="time", ylabel="rank", yticks=range(ranks))
    axis.invert_yaxis()
    axis.legend(frameon=False, ncols=3, loc="lower right", bbox_to_anchor=(1, 1))


def draw_schedule(results, path):
    """The picture of --mode schedule --plot."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    ranks = len(results["in_flight"])
    figure, axis = pyplot.subplots(figsize=(12, 1.2 + 0.4 * ranks))
    draw_timeline(axis, results["timeline"])
    axis.set_title(f"{results['schedule']}: bubble {results['bubble']:.1%}", loc="left")
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_xlabel("time, in forwards of a rank's layers on one microbatch")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def show_schedule(args):
    """--mode schedule: check, time and draw a schedule, without ranks; returns whether all held."""
    settle(args)
    P, M, V = args.stages, args.microbatches, args.virtual_stages
    schedules = [list(SCHEDULES[args.schedule](rank, P, M, V)) for rank in range(P)]
    problems = faults(schedules, P * V, M)
    split_backward = any(action.kind == "W" for action in schedules[0])
    cost = {
        "F": 1 / V,
        "B": (1 if split_backward else 2) / V,
        "W": 1 / V,
    }  # a backward is two products, a forward one
    rows = simulate(schedules, P * V, lambda action: cost[action.kind])
    end, idle = max(row[3] for row in rows), bubble(rows, P)
    formula = bubble_formula(args.schedule, P, M, V, cost["F"], cost["B"], cost["W"] * split_backward)
    if abs(idle - formula) > 1e-9 and not problems:
        problems.append(f"bubble {idle:.4f} where the formula says {formula:.4f}")
    in_flight = [most_in_flight(actions) for actions in schedules]
    say(
        f"schedule: {args.schedule}, {P} ranks, {V} stages each, {M} microbatches; time in forwards of a rank"
    )
    busy = [sum(row[3] - row[2] for row in rows if row[0] == rank) for rank in range(P)]
    table = [[r, len(schedules[r]), f"{busy[r]:g}", f"{end - busy[r]:g}", in_flight[r]] for r in range(P)]
    held = "most in flight" if V == 1 else f"most in flight (1/{V} of the layers each)"
    say_table(["rank", "actions", "busy", "waits", held], *table)
    say_table(["bubble", "", ""], ["simulated", f"{idle:.4f}", ""], ["formula", f"{formula:.4f}", ""])
    results = {"script": Path(__file__).name, "schedule": args.schedule, "ranks": P, "virtual_stages": V}
    results |= {"microbatches": M, "passed": not problems, "bubble": idle, "bubble_formula": formula}
    results |= {
        "in_flight": in_flight,
        "timeline": [[rank, *action, *times] for rank, action, *times in rows],
    }
    if problems:
        say(f"FAIL schedule: {problems[0]}" + f" (and {len(problems) - 1} more)" * (len(problems) > 1))
    else:
        say("PASS schedule: every microbatch once a stage each way, no deadlock, bubble as the formula says")
    if speaks() and args.json:
        write_whole(args.json, lambda path: Path(path).write_text(json.dumps(results) + "\n"))
    if speaks() and args.plot:
        write_whole(args.plot, partial(draw_schedule, results))
    return not problems


def own_figures(model, step, args, group):
    """What benchmark mode measures in this script alone: (the timeline and its bubble, what was wrong).

    Begins and ends are each rank's clock from a common start. A bubble of the measured times holds messages
    and unequal stages too; the formula knows neither, the simulation with the measured times unequal stages.
    """
    engine, P = getattr(model, "pipeline", None), group.size()
    if not isinstance(engine, Pipeline) or args.backend == "fake":
        return {}, []
    steps = []
    for _ in range(args.bench_iters):
        engine.timeline = []
        synchronize(args, group)
        start = time.perf_counter()
        step()
        everyone = [None] * P
        dist.all_gather_object(
            everyone, ([(a, b - start, e - start) for a, b, e in engine.timeline], engine.peak)
        )
        engine.timeline = None
        rows = [(rank, *row) for rank, (line, _) in enumerate(everyone) for row in line]
        steps.append((bubble(rows, P), rows))
    idle, rows = sorted(steps, key=lambda step: step[0])[len(steps) // 2]  # the median
    M, V, times = args.microbatches, args.virtual_stages, {"F": [], "B": [], "W": []}
    for _, action, begin, end in rows:
        times[action.kind].append(end - begin)
    mean = {kind: sum(seconds) / max(1, len(seconds)) for kind, seconds in times.items()}
    took = {action: end - begin for _, action, begin, end in rows}
    schedules = [list(SCHEDULES[args.schedule](rank, P, M, V)) for rank in range(P)]
    simulated = bubble(simulate(schedules, P * V, took.get), P)
    formula = bubble_formula(args.schedule, P, M, V, mean["F"], mean["B"], mean["W"])
    in_flight, expected = [peak for _, peak in everyone], [most_in_flight(actions) for actions in schedules]
    span = max(row[3] for row in rows) - min(row[2] for row in rows)
    busy = [sum(row[3] - row[2] for row in rows if row[0] == rank) for rank in range(P)]
    table = [[r, busy[r], span - busy[r], in_flight[r], expected[r]] for r in range(P)]
    say_table(["rank", "busy, s", "waits, s", "most in flight", "by schedule"], *table)
    say_table(
        ["bubble, part of the time", ""],
        ["measured", f"{idle:.3f}"],
        ["formula: stages alike, messages take no time", f"{formula:.3f}"],
        ["simulated with the measured times of F, B, W", f"{simulated:.3f}"],
    )
    timeline = [[rank, *action, begin, end] for rank, action, begin, end in rows]
    figures = {"bubble": idle, "bubble_formula": formula, "bubble_simulated": simulated, "timeline": timeline}
    figures |= {"in_flight": in_flight, "in_flight_expected": expected}
    return figures, ["microbatches in flight"] if in_flight != expected else []


OWN_MODES, OWN_PANELS = {"schedule": show_schedule}, {"timeline": draw_timeline}


def add_options(parser):
    """The script's own options. Batch and microbatches are as many as each other, or 4, where not given."""
    add = parser.add_argument
    add("--schedule", choices=list(SCHEDULES), default="1f1b")
    add("--microbatches", type=positive, metavar="M", help="parts of the batch (as many as sequences, or 4)")
    add("--virtual-stages", type=positive, metavar="V", help="stages a rank, interleaved only (2)")
    add("--stages", type=positive, metavar="P", default=4, help="ranks that --mode schedule is about (4)")
    add("--torch", action="store_true", help="the same stages under torch.distributed.pipelining")
    parser.set_defaults(batch=None)


def variant(args):
    """What runs, in the report's words."""
    how = f"pp --schedule {args.schedule}" + (" --torch" if args.torch else "")
    return how + f", {args.microbatches} microbatches"


def rivals(args):
    """What benchmark mode times in turn with it: {name: arguments}."""
    return {"manual": argparse.Namespace(**{**vars(args), "torch": False})} if args.torch else {}


if __name__ == "__main__":
    sys.exit(main())
