"""Pipeline parallelism for LLaMA in one file: GPipe, 1F1B, interleaved, Zero Bubble on HF's model.

Every rank holds some of the layers, a stage, and sends the hidden states on. P = 2, 8 layers:

    rank 0: embedding, layers 0..3          rank 1: layers 4..7, norm, head, loss
        ids (b, s)
        | (b, s, h)          -- activations (b, s, h) -->   |
        |                    <-- gradients (b, s, h) ---    loss

With one batch, one stage would wait while the other computes. So the batch is cut into M
microbatches, and a schedule is the order in which a rank works on them. F forward, B backward
(twice the work), microbatch 0 to 3, P = 2:

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
once a step. Weights, gradients and optimizer state shrink by P; time is lost to the bubble, in
which a rank waits: (P-1)/(M+P-1) of it with afab and 1f1b, (P-1)/(V M+P-1) interleaved,
(P-1)/(3 M+P-1) with zb where F, B and W take as long (M >= P; about so with --recompute none).

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
import weakref
from collections import Counter, defaultdict, deque
from contextlib import contextmanager, nullcontext
from functools import partial
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
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
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


# ---- 2. Communication: the schedules, and the engine that runs them ------------------------------


class Action(NamedTuple):
    """A unit of a rank's work: one of its stages, on one microbatch.

    kind F: forward; B: backward. With zb, B computes all gradients but those of the linear layers'
    weights, and W computes these (the names of the Zero Bubble paper).
    """

    kind: str
    stage: int  # of all stages: stage s is on rank s % P
    microbatch: int


def afab(rank, P, M, V=1):
    """All forward, all backward (GPipe, arXiv 1811.06965): a generator of this rank's actions."""
    for m in range(M):
        yield Action("F", rank, m)
    for m in range(M):
        yield Action("B", rank, m)


def one_f_one_b(rank, P, M, V=1):
    """One forward, one backward (1F1B; PipeDream-Flush, arXiv 2006.09503)."""
    warmup = min(P - rank - 1, M)  # forwards before the first: one for each later stage
    for m in range(warmup):
        yield Action("F", rank, m)
    for m in range(warmup, M):  # steady state
        yield Action("F", rank, m)
        yield Action("B", rank, m - warmup)
    for m in range(M - warmup, M):  # cooldown
        yield Action("B", rank, m)


def interleaved(rank, P, M, V):
    """Interleaved 1F1B (Megatron-LM, arXiv 2104.04473): a rank's stages are rank, rank + P, ..."""
    count = max(1, M // P)  # of groups: P microbatches or more in each keep all ranks busy
    groups = [range(*split(M, i, count)) for i in range(count)]
    stages = range(rank, V * P, P)
    forward = [Action("F", s, m) for group in groups for s in stages for m in group]
    backward = [Action("B", s, m) for group in groups for s in reversed(stages) for m in group]
    # The first group through all of the rank's stages but the last; and two for each later rank, as
    # a microbatch has to reach it and its gradient has to come back
    warmup = min((V - 1) * len(groups[0]) + 2 * (P - rank - 1), V * M)
    yield from forward[:warmup]
    for f, b in zip(forward[warmup:], backward):  # steady state
        yield f
        yield b
    yield from backward[V * M - warmup :]  # cooldown


def zero_bubble(rank, P, M, V=1):
    """ZB-H1 (arXiv 2401.10241): 1F1B in which W comes `rank` microbatches after its B."""
    for action in one_f_one_b(rank, P, M):
        yield action
        if action.kind == "B" and action.microbatch >= rank:
            yield Action("W", rank, action.microbatch - rank)
    for m in range(max(M - rank, 0), M):
        yield Action("W", rank, m)


SCHEDULES = {"afab": afab, "1f1b": one_f_one_b, "interleaved": interleaved, "zb": zero_bubble}


def all_schedules(args, P):
    """The actions of each of P ranks, lists in the order in which a rank runs them."""
    schedule, M, V = SCHEDULES[args.schedule], args.microbatches, args.virtual_stages
    return [list(schedule(rank, P, M, V)) for rank in range(P)]


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
    """The actions whose results an action needs. stages: how many there are."""
    kind, stage, m = action
    if kind == "F":
        return [Action("F", stage - 1, m)] if stage > 0 else []
    if kind == "W":
        return [Action("B", stage, m)]
    own = [Action("F", stage, m)]
    return own + [Action("B", stage + 1, m)] if stage < stages - 1 else own


def simulate(schedules, stages, cost):
    """When each action would run: [(rank, action, begin, end)], from every rank's list of actions.

    cost(action) is its time; messages take none. In a deadlock it ends with fewer rows than there
    are actions.
    """
    waiting, clock = [deque(actions) for actions in schedules], [0.0] * len(schedules)
    ended, rows, progress = {}, [], True
    while progress:
        progress = False
        for rank, actions in enumerate(waiting):
            while actions and all(need in ended for need in needs(actions[0], stages)):
                action = actions.popleft()
                begin = max([clock[rank], *(ended[need] for need in needs(action, stages))])
                clock[rank] = ended[action] = begin + cost(action)
                rows.append((rank, action, begin, clock[rank]))
                progress = True
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
    """The part of the time, from the first begin to the last end, that a rank waits on average."""
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

    One way, so that no message waits behind one in the opposite direction. Messages arrive in the
    order in which they were sent, and both ranks run their actions in the same order: no tags.
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
    """The engine: runs this rank's actions in the schedule's order.

    held: what a backward needs, {(stage, microbatch): (input, output)}
    received, sent: messages {the action that starts from it: (work, tensor)}. The tensor of a
    message must exist until work.wait() has returned.
    """

    def __init__(self, model, group, args):
        self.group, self.rank, self.P = group, group.rank(), group.size()
        self.stage_count, self.M = self.P * args.virtual_stages, args.microbatches
        self.dtype, self.hidden_size = model.dtype, model.config.hidden_size
        self.orders = all_schedules(args, self.P)
        self.channels = open_channels(group, self.stage_count, args)
        own = range(self.rank, self.stage_count, self.P)
        self.stages = {stage: Stage(model, stage, self.stage_count) for stage in own}
        self.timeline = None  # or a list, to which each action is added: (action, begin, end)

    def run(self, ids, labels, loss_fn, backward=True):
        """Run all actions, or the forwards alone, on ids and labels (b, s).

        After the last stage comes loss_fn(hidden (b/M, s, h), labels (b/M, s)). Returns the losses
        of the microbatches on the last stage's rank, [] on the others.
        """
        self.ids, self.labels, self.loss_fn, self.training = ids, labels, loss_fn, backward
        self.held, self.received, self.sent, self.losses, self.peak = {}, {}, {}, [], 0
        actions = [a for a in self.orders[self.rank] if backward or a.kind == "F"]
        for i, action in enumerate(actions):
            for upcoming in actions[i : i + 2]:  # the next message can arrive during this action
                self.post_receive(upcoming)
            message = self.receive(action)
            begin = self.now()
            if action.kind == "F":
                self.forward(action, message)
            elif action.kind == "B":
                self.backward(action, message)
            else:
                for linear in self.stages[action.stage].deferred:
                    linear.add_weight_gradient()
            if self.timeline is not None:
                self.timeline.append((action, begin, self.now()))
            self.peak = max(self.peak, self.in_flight())
        for work, _ in self.sent.values():
            work.wait()
        losses = self.losses
        self.ids = self.labels = self.loss_fn = self.losses = None  # nothing stays for the next run
        self.sent = {}
        return losses

    def forward(self, action, x):
        """F: x (b/M, s, h), or of the first stage ids, through the stage; the output is sent."""
        _, stage, m = action
        x = self.ids[self.rows(m)] if stage == 0 else x.requires_grad_()
        out = self.stages[stage](x)
        if stage == self.stage_count - 1:
            out = self.loss_fn(out, self.labels[self.rows(m)])
            self.losses.append(out.detach())
        else:
            self.send(out.detach(), Action("F", stage + 1, m))
        if self.training:
            self.held[stage, m] = x, out

    def backward(self, action, grad):
        """B: from the output's gradient (None for a loss) to that of x, which is sent."""
        _, stage, m = action
        x, out = self.held.pop((stage, m))
        for linear in self.stages[stage].deferred:
            linear.waiting.append([])
        torch.autograd.backward(out, grad)
        if stage > 0:
            self.send(x.grad, Action("B", stage - 1, m))

    def in_flight(self):
        """How many microbatches' activations are held: until B, with zb until W."""
        linears = [linear for stage in self.stages.values() for linear in stage.deferred]
        return len(self.held) + max((len(linear.waiting) for linear in linears), default=0)

    def rows(self, m):
        """The sequences of the batch that are microbatch m."""
        return slice(*split(len(self.ids), m, self.M))

    def sender(self, action):
        """The action of another stage from whose result an action starts; None if there is none."""
        for need in needs(action, self.stage_count):
            if need.stage != action.stage:
                return need
        return None

    def send(self, x, action):
        """Send x to the action that starts from it, without waiting for its arrival."""
        peer = action.stage % self.P
        if peer == self.rank:  # one rank has all stages
            self.received[action] = None, x
            return
        x, channel = x.contiguous(), self.channels[action.kind, self.rank, peer]
        work = dist.isend(x, dist.get_global_rank(self.group, peer), channel)
        self.sent[action] = work, x

    def post_receive(self, action):
        """Begin to receive what an action starts from. Its shape is known: no handshake."""
        sender = self.sender(action)
        peer = self.rank if sender is None else sender.stage % self.P
        if peer == self.rank or action in self.received:
            return
        rows = self.rows(action.microbatch)
        shape = rows.stop - rows.start, self.ids.shape[1], self.hidden_size
        x = torch.empty(shape, dtype=self.dtype, device=self.ids.device)
        channel = self.channels[action.kind, peer, self.rank]
        work = dist.irecv(x, dist.get_global_rank(self.group, peer), channel)
        self.received[action] = work, x

    def receive(self, action):
        """What an action starts from: activations (b/M, s, h), or their gradient; None if nothing.

        Before the peer sent this, it ran all its actions up to the sender: our messages to these
        have arrived, and are freed.
        """
        work, x = self.received.pop(action, (None, None))
        if work is not None:
            work.wait()
            sender = self.sender(action)
            order = self.orders[sender.stage % self.P]
            for arrived in self.sent.keys() & order[: order.index(sender) + 1]:
                work, _ = self.sent.pop(arrived)
                work.wait()
        return x

    def now(self):
        """Seconds; for a timeline, after all that the device has been given to do."""
        if self.timeline is not None:
            torch.get_device_module(self.ids.device).synchronize()
        return time.perf_counter()


class TorchPipeline:
    """--torch: the same stages in PyTorch's engine, torch.distributed.pipelining."""

    def __init__(self, model, group, args):
        self.rank, self.P, self.group, self.args = group.rank(), group.size(), group, args
        self.stage, self.dtype = Stage(model, self.rank, self.P), model.dtype
        self.current = SimpleNamespace(loss_fn=None)  # of a run; not self: no reference cycle
        self.schedules = {}  # {(length, backward): PyTorch's schedule}, as its shapes are fixed
        zeros = torch.zeros(args.batch, args.length, dtype=torch.int64, device=args.device)
        for backward in (True, False):  # the first step opens connections: not to be measured
            self.run(zeros, zeros, lambda hidden, labels: hidden.sum(), backward)
        model.zero_grad()

    def make_schedule(self, length, backward):
        """PyTorch's schedule for ids (b, length)."""
        args, current = self.args, self.current
        shape = args.batch // args.microbatches, length
        with torch.device("meta"):  # what crosses a boundary: else the ranks would ask each other
            hidden = torch.empty(*shape, args.config.hidden_size, dtype=self.dtype)
            hidden = hidden.requires_grad_(backward)
            first = torch.empty(shape, dtype=torch.int64) if self.rank == 0 else hidden
        stage = PipelineStage(
            self.stage, self.rank, self.P, args.device, first, hidden, group=self.group
        )
        engine = {"afab": ScheduleGPipe, "1f1b": Schedule1F1B}[args.schedule]
        how = {"loss_fn": lambda hidden, labels: current.loss_fn(hidden, labels)}
        return engine(stage, args.microbatches, **how, scale_grads=False)

    def run(self, ids, labels, loss_fn, backward=True):
        """As Pipeline.run()."""
        key, losses = (ids.shape[1], backward), []
        if key not in self.schedules:
            self.schedules[key] = self.make_schedule(*key)
        step = self.schedules[key].step if backward else self.schedules[key].eval
        inputs = [ids] if self.rank == 0 else []
        targets = {"target": labels, "losses": losses} if self.rank == self.P - 1 else {}
        self.current.loss_fn = loss_fn
        step(*inputs, **targets)
        self.current.loss_fn = None
        return losses


# ---- 3. Sharding LLaMA, and what the backward keeps of it ----------------------------------------


# Copied from tp.py
def split(n, rank, world):
    """[start, end) of the rank's share of n things: the first n % world ranks hold one more."""
    base, extra = divmod(n, world)
    return rank * base + min(rank, extra), (rank + 1) * base + min(rank + 1, extra)


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


class InputGradient(torch.autograd.Function):
    """A linear layer whose backward is B: dx alone. x and dy wait for W (arXiv 2401.10241)."""

    @staticmethod
    def forward(ctx, x, weight, bias, waiting):
        ctx.save_for_backward(x, weight)
        ctx.waiting = waiting
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        ctx.waiting[-1].append((x.detach(), grad))  # without x's history
        return grad @ weight, None, None, None


class DeferredLinear(nn.Module):
    """An nn.Linear for zb: the gradients of its weight and bias are computed in W."""

    def __init__(self, linear):
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.waiting = deque()  # of each microbatch between B and W: [(x, dy), ...], of each run

    def forward(self, x):  # (b/M, s, in) -> (b/M, s, out)
        return InputGradient.apply(x, self.weight, self.bias, self.waiting)

    def add_weight_gradient(self):
        """W, of the microbatch that has waited longest."""
        for x, grad in self.waiting.popleft():
            x, grad = x.flatten(0, -2), grad.flatten(0, -2)  # (tokens, in), (tokens, out)
            self.weight.backward(grad.T @ x)  # of a leaf: adds to its .grad
            if self.bias is not None:
                self.bias.backward(grad.sum(0))


def defer_weight_gradients(layer):
    """Put a DeferredLinear in the place of each linear of a layer of HF's; names stay HF's."""
    for block in (layer.self_attn, layer.mlp):
        for name, linear in list(block.named_children()):
            if isinstance(linear, nn.Linear):
                setattr(block, name, DeferredLinear(linear))


class Stage(nn.Module):
    """A stage of HF's LlamaModel: hidden states (b, s, h) -> (b, s, h); the first takes ids (b, s).

    It shares its modules with the model. HF's own forward makes positions, mask and rotary tables.
    """

    def __init__(self, model, stage, stages):
        super().__init__()
        self.input_name = "input_ids" if stage == 0 else "inputs_embeds"
        start, end = split(len(model.model.layers), stage, stages)
        self.decoder = copy.copy(model.model)
        self.decoder._modules = model.model._modules.copy()  # the lines below change only this one
        self.decoder.layers = model.model.layers[start:end]
        if stage < stages - 1:
            self.decoder.norm = nn.Identity()
        self.deferred = [m for m in self.modules() if isinstance(m, DeferredLinear)]

    def forward(self, x):
        return self.decoder(**{self.input_name: x}, use_cache=False).last_hidden_state


def parallelize(model, group, args):
    """Keep this rank's stages of HF's LlamaForCausalLM, in place; nn.Identity() for the others."""
    if args.recompute == "block":
        recompute_layers(model)
    rank, P, layers = group.rank(), group.size(), model.model.layers
    stages, first, last = P * args.virtual_stages, rank == 0, rank == P - 1
    own = {i for stage in range(rank, stages, P) for i in range(*split(len(layers), stage, stages))}
    for i, layer in enumerate(layers):
        if i not in own:
            layers[i] = nn.Identity()
        elif args.schedule == "zb":
            defer_weight_gradients(layer)
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    if not first and not (tied and last):  # the last has it as its head, under the embedding's name
        model.model.embed_tokens = nn.Identity()
    if not last:
        model.model.norm, model.lm_head = nn.Identity(), nn.Identity()
    for parameter in model.parameters():
        mark(parameter)
    if tied and P > 1:
        ranks = dist.get_process_group_ranks(group)
        ends = dist.new_group([ranks[0], ranks[-1]], args.wait)  # every rank has to make it
        if first or last:  # embedding and head each have a part of the gradient
            mark(model.model.embed_tokens.weight, replicas=2, sum_over=ends)
    engine = TorchPipeline if args.torch else Pipeline
    model.pipeline = engine(model, group, args)
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
    """A microbatch's summand of the mean loss over all `count` targets of the batch.

    hidden (b/M, s, h), targets (b/M, s). Divided by the whole batch's count, gradients are one
    device's whatever M is: a mean of the microbatches' means would weight a target by how few
    others its microbatch has.
    """
    size = hidden.shape[1] if args.loss == "full" else max(1, LOSS_CHUNK // len(hidden))
    total = 0
    for h, t in zip(hidden.split(size, 1), targets.split(size, 1)):
        if args.loss == "full":
            total += sum_of_losses(model, h, t)
        else:  # logits of one chunk at a time, recomputed in the backward
            total += checkpoint(sum_of_losses, model, h, t, use_reentrant=False)
    return total / count


def train_step(model, ids, labels, group, args, backward=True):
    """Loss of ids (b, s), the same on every rank; after it every .grad is complete."""
    targets = F.pad(labels[:, 1:], (0, 1), value=IGNORE)  # the target of a token is the next one
    count = (targets != IGNORE).sum()
    loss_fn = partial(microbatch_loss, model, count=count, args=args)
    losses = model.pipeline.run(ids, targets, loss_fn, backward)
    if backward:
        sum_gradients(model)
    loss = torch.zeros((), dtype=torch.promote_types(model.dtype, torch.float32), device=ids.device)
    for microbatch in losses:
        loss += microbatch.detach()
    return all_reduce(loss, group)


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
    """The logits (b, s, v), on the last stage's rank; None on the others."""
    logits = model.pipeline.run(ids, ids, lambda hidden, _: model.lm_head(hidden), backward=False)
    return mark(torch.cat(logits)) if logits else None


def token_range(length, group):
    """Tokens [start, end) that this rank has at the embedding; how many ranks have the same."""
    return 0, length, 1  # the first stage's rank alone has an embedding


def expected_traffic(config, group, args):
    """What one step must send: rows (phase, op, calls, message bytes), as Meter counts them."""
    P, rank, element = group.size(), group.rank(), getattr(torch, args.dtype).itemsize
    if P == 1:
        return []
    own = range(rank, P * args.virtual_stages, P)
    sends_forward = sum(stage < P * args.virtual_stages - 1 for stage in own)
    sends_back = sum(stage > 0 for stage in own)
    hidden = args.batch * args.length * config.hidden_size * element  # (b, s, h), all microbatches
    rows = [("forward", "send", sends_forward * args.microbatches, sends_forward * hidden)]
    rows += [("backward", "send", sends_back * args.microbatches, sends_back * hidden)]
    rows += [("forward", "all_reduce", 1, max(4, element))]  # the loss, in float32 or better
    if config.tie_word_embeddings and rank in (0, P - 1):
        rows += [("backward", "all_reduce", 1, config.vocab_size * config.hidden_size * element)]
    return rows


def print_timeline(rows, in_flight, bubbles):
    """Print each rank's times and microbatches in flight, and the bubble {how it was found: it}."""
    span = max(end for *_, end in rows) - min(begin for *_, begin, _ in rows)
    table = []
    for rank, most in enumerate(in_flight):
        busy = sum(end - begin for r, _, begin, end in rows if r == rank)
        table.append({"rank": rank, "busy": busy, "waiting": span - busy, "most in flight": most})
    print_table(table)
    print_table([{"bubble, part of the time": how, "": part} for how, part in bubbles.items()])


def show_schedule(args):
    """--mode schedule: check and time a schedule, without ranks; returns whether all held."""
    set_defaults(args)
    P, M, V = args.stages, args.microbatches, args.virtual_stages
    schedules = all_schedules(args, P)
    for fault in faults(schedules, P * V, M):
        print0(f"FAIL schedule: {fault}")
        return False
    cost = {"F": 1 / V, "B": 2 / V, "W": 0.0}  # B: a product for x, and one for the weight
    if args.schedule == "zb":
        cost = {"F": 1.0, "B": 1.0, "W": 1.0}
    rows = simulate(schedules, P * V, lambda action: cost[action.kind])
    idle, formula = bubble(rows, P), bubble_formula(args.schedule, P, M, V, *cost.values())
    passed = abs(idle - formula) < 1e-9
    print0(f"schedule: {args.schedule}, {P} ranks, {M} microbatches, {V} stage{'s' * (V > 1)} each")
    print0("  unit of time: the forward of a rank's layers on one microbatch")
    in_flight = [most_in_flight(actions) for actions in schedules]
    print_timeline(rows, in_flight, {"simulated": idle, "formula": formula})
    results = {"script": Path(__file__).name, "schedule": args.schedule, "ranks": P}
    results |= {"virtual_stages": V, "microbatches": M, "passed": passed, "bubble": idle}
    results |= {"bubble_formula": formula, "in_flight": in_flight}
    results["timeline"] = [[rank, *action, begin, end] for rank, action, begin, end in rows]
    summary = "every microbatch once a stage each way, no deadlock, bubble as the formula says"
    if not passed:
        summary = f"bubble {idle:.4f} where the formula says {formula:.4f}"
    print0(f"{'PASS' if passed else 'FAIL'} schedule: {summary}")
    if args.json:
        atomic_write(args.json, lambda draft: draft.write_text(json.dumps(results) + "\n"))
    return passed


def measure_bubble(model, step, args, group):
    """Benchmark's figures of this script alone: (timeline, bubble, in flight; what is wrong).

    Times are each rank's clock from a common start. The measured bubble contains messages and
    unequal stages; the simulation with the measured times contains unequal stages, the formula
    neither.
    """
    pipeline, P, V, runs = model.pipeline, group.size(), args.virtual_stages, []
    if args.torch or args.backend == "fake":
        return {}, []
    for _ in range(args.bench_iters):
        pipeline.timeline = []
        gather_objects(None, group)
        start = time.perf_counter()
        step()
        own = [(group.rank(), a, begin - start, end - start) for a, begin, end in pipeline.timeline]
        pipeline.timeline = None
        rows = sum(gather_objects(own, group), [])
        runs.append((bubble(rows, P), rows))
    idle, rows = sorted(runs, key=lambda run: run[0])[len(runs) // 2]  # the median
    seconds = {action: end - begin for _, action, begin, end in rows}
    mean = []
    for kind in ("F", "B", "W") if args.schedule == "zb" else ("F", "B"):
        mean.append(statistics.mean(t for action, t in seconds.items() if action.kind == kind))
    schedules = all_schedules(args, P)
    formula = bubble_formula(args.schedule, P, args.microbatches, V, *mean)
    simulated = bubble(simulate(schedules, P * V, seconds.get), P)
    shown = "none: W takes longer than F or B" if formula is None else formula
    bubbles = {"measured": idle, "formula: stages alike, messages take no time": shown}
    bubbles["simulated with the measured times of F, B, W"] = simulated
    expected = [most_in_flight(actions) for actions in schedules]
    in_flight = gather_objects(pipeline.peak, group)
    print_timeline(rows, in_flight, bubbles)
    figures = {"bubble": idle, "bubble_formula": formula, "bubble_simulated": simulated}
    figures |= {"in_flight": in_flight, "in_flight_expected": expected}
    figures["timeline"] = [[rank, *action, begin, end] for rank, action, begin, end in rows]
    return figures, ["microbatches in flight"] if in_flight != expected else []


# What sections 5 and 6, the same in all four scripts, ask of this one
OPTIONS = {
    "--schedule": {"choices": list(SCHEDULES), "default": "1f1b"},
    "--microbatches": {"type": int, "help": "parts of the batch (as many as sequences, or 4)"},
    "--virtual-stages": {"type": int, "help": "stages per rank, interleaved only (2)"},
    "--stages": {"type": int, "default": 4, "help": "ranks that --mode schedule is about (4)"},
    "--torch": {"action": "store_true", "help": "the stages by torch.distributed.pipelining"},
}
OWN_MODES, OWN_FIGURES = {"schedule": show_schedule}, measure_bubble


def set_defaults(args):
    """Fill in what depends on other options; UsageError where they contradict each other."""
    args.virtual_stages = args.virtual_stages or (2 if args.schedule == "interleaved" else 1)
    args.microbatches = args.microbatches or args.batch or 4
    args.batch = args.batch or args.microbatches
    if args.virtual_stages > 1 and args.schedule != "interleaved":
        raise UsageError(f"--virtual-stages {args.virtual_stages} needs --schedule interleaved")
    if args.microbatches > args.batch:
        raise UsageError(
            f"--batch {args.batch} cannot be cut into {args.microbatches} microbatches; "
            f"--microbatches {args.batch}, or a larger --batch, would do"
        )


def finalize_args(args, world):
    """set_defaults(); UsageError where model, schedule and batch do not suit so many ranks."""
    set_defaults(args)
    layers, V, M = args.config.num_hidden_layers, args.virtual_stages, args.microbatches
    if world * V > layers:
        most = layers // V
        problem = f"{layers} layers cannot fill {world * V} stages, {V} on each of {world} ranks"
        raise UsageError(f"{problem}; at most {most} rank{'s' if most > 1 else ''} would do")
    for fault in faults(all_schedules(args, world), world * V, M):  # better now than by a hang
        raise UsageError(f"--schedule {args.schedule}: {fault}")
    if args.torch and args.backend == "fake":
        raise UsageError("--torch waits for other ranks: --backend gloo or nccl would do")
    if args.torch and (args.schedule not in ("afab", "1f1b") or args.batch % M):
        raise UsageError("--torch runs --schedule afab and 1f1b, with microbatches of one size")
    if args.torch and args.schedule == "1f1b" and world > M:
        raise UsageError(f"--torch runs 1f1b with a microbatch a rank or more: {world} would do")


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
