"""Lab 6: LoRA under tensor and sequence parallelism. Two small matrices beside a large frozen one.

    y = x W^T + scale (x A^T) B^T      W (o, i) frozen      A (r, i), B (o, r) trained      scale = alpha / r

W is cut over P ranks as ever. How are A and B cut, what is sent for them, and whose gradient is only a part
of a sum? One factor always has W's cut dimension and is cut with it: B's outputs in a column parallel layer,
A's inputs in a row parallel one. The other factor is free, and there are three ways:

    column parallel, W (o/P, i), B (o/P, r)           row parallel, W (o, i/P), A (r, i/P)

    joined    x -> enter -> A (r, i)   -> B           x -> A -> B (o, r)                      + W x -> leave
    apart     x -> A (r, i) -> enter   -> B           x -> A -> leave -> B (o, r)             + leave(W x)
    sharded   x -> enter -> A (r/P, i) -> gather -> B     x -> A -> scatter -> B (o, r/P)     + W x -> leave

(enter, leave) are Megatron's pair at the edges of the region: (copy, all-reduce) in tensor parallelism,
(all-gather, reduce-scatter) along the tokens with sequence parallelism. gather and scatter are the latter
two along the r features between A and B. For N tokens the adapter alone adds these messages:

                 column                     row                        gradient to be summed, once a step
    joined       none                       none                       the free factor's, always
    apart   TP   AR N r backward            AR N r forward             none
            SP   AG N r, RS N r backward    RS N r, AG N r backward    the free factor's: it saw N/P tokens
    sharded      AG N r, RS N r backward    RS N r, AG N r backward    none

The trap is in the middle. `apart` needs no sum under tensor parallelism. Switch sequence parallelism on, and
the same lines give every rank a gradient from its own tokens. Each then trains a factor of its own, and
rank 0's copy is what gets saved. The loss need not show it: where only the answer counts and rank 0 has the
prompt, every loss of the run is exactly right, and the adapter that is saved has learned nothing.

W is frozen: no gradient, no optimizer state, x is not kept for it, and under sequence parallelism it is not
gathered again in the backward for W's gradient. What remains is dx, which earlier layers need.

Who does what. vLLM, which only serves: joined, and sharded in columns with fully_sharded_loras
(in rows it then cuts B's outputs and adds them into a slice of W x). ms-swift's mcore-bridge: apart; the trap
was its bug (modelscope/mcore-bridge, pull request 173). NeMo AutoModel: sharded, by DTensor plans.
Megatron-Bridge: sharded in columns; in rows it cuts B's outputs and gathers them, which sends N o, not N r.

    python labs/lab6_lora.py                        # checks and experiments, about 20 s
    python labs/lab6_lora.py --plot lab6.png --json lab6.json
    python labs/lab6_lora.py --inject-bug list
    python labs/lab6_lora.py --lora-rank 1          # fewer than there are ranks
    pip install peft                                # then the lab compares itself with it, too

Sources: LoRA, arXiv 2106.09685. S-LoRA, arXiv 2311.03285, section 6 (tensor parallel adapters). Megatron-LM:
finalize_model_grads.py sums the gradients of parameters marked `sequence_parallel`. NeMo AutoModel:
components/distributed/parallel_styles.py. Megatron-Bridge: peft/utils.py. vLLM: lora/layers/.
"""

import argparse
import importlib.util
import itertools
import json
import math
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from contextlib import ExitStack, suppress
from fnmatch import fnmatchcase
from functools import partial
from multiprocessing import connection
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._pytree import tree_leaves

# ---------------------------------------------------------------------------------------------------
# The lesson 1: the edges
# ---------------------------------------------------------------------------------------------------


# Copied from tp.py
def all_reduce(x, group, op=dist.ReduceOp.SUM):
    """The sum (or max) of x over ranks, in a new tensor: autograd may still need the old one."""
    if group.size() == 1:
        return x
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, op, group=group)
    return x


# Copied from tp.py
def split(n, rank, world):
    """[start, end) of the rank's share of n things: the first n % world ranks hold one more."""
    base, extra = divmod(n, world)
    return rank * base + min(rank, extra), (rank + 1) * base + min(rank + 1, extra)


def all_gather_along(x, dim, n, group):
    """Every rank's share of a dimension, split(n, rank, P), -> all n of it, e.g. (b, s, r/P) -> (b, s, r).

    Shares may differ by one, or be empty (r = 1 on 2 ranks): each is sent with zeros up to the largest.
    """
    shares = [split(n, rank, group.size()) for rank in range(group.size())]
    x = x.movedim(dim, 0)  # ranks are joined along dim 0
    padded = x.new_zeros(shares[0][1], *x.shape[1:])
    padded[: len(x)] = x
    out = x.new_empty(group.size() * len(padded), *x.shape[1:])
    dist.all_gather_into_tensor(out, padded, group=group)
    parts = [part[: end - start] for part, (start, end) in zip(out.chunk(group.size()), shares)]
    return torch.cat(parts).movedim(0, dim)


def reduce_scatter_along(x, dim, group):
    """The sum of all ranks' x, of which each receives its share of a dimension, split(n, rank, P)."""
    shares = [split(x.shape[dim], rank, group.size()) for rank in range(group.size())]
    x = x.movedim(dim, 0)
    parts = x.new_zeros(group.size(), shares[0][1], *x.shape[1:])
    for part, (start, end) in zip(parts, shares):
        part[: end - start] = x[start:end]
    out = torch.empty_like(parts[0])
    dist.reduce_scatter_tensor(out, parts.flatten(0, 1), group=group)
    start, end = shares[group.rank()]
    return out[: end - start].movedim(0, dim)


class CopyToTPRegion(torch.autograd.Function):
    """x as it is. Every rank used the whole x for its part of the work, so dx is the sum over the ranks."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x

    @staticmethod
    def backward(ctx, grad):
        return all_reduce(grad, ctx.group), None


class ReduceFromTPRegion(torch.autograd.Function):
    """The sum of the ranks' partial x. Each added to the same y, so dx is dy, which all ranks have."""

    @staticmethod
    def forward(ctx, x, group):
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class GatherAlong(torch.autograd.Function):
    """all_gather_along. Every rank used all of it: dx is the sum over the ranks, of the rank's own share."""

    @staticmethod
    def forward(ctx, x, dim, n, group):
        ctx.dim, ctx.group = dim, group
        return all_gather_along(x, dim, n, group)

    @staticmethod
    def backward(ctx, grad):
        return reduce_scatter_along(grad, ctx.dim, ctx.group), None, None, None


class ReduceScatterAlong(torch.autograd.Function):
    """reduce_scatter_along. Each rank added to all shares: dx are the gradients of all of them, gathered."""

    @staticmethod
    def forward(ctx, x, dim, group):
        ctx.dim, ctx.n, ctx.group = dim, x.shape[dim], group
        return reduce_scatter_along(x, dim, group)

    @staticmethod
    def backward(ctx, grad):
        return all_gather_along(grad, ctx.dim, ctx.n, ctx.group), None, None


gather_along = GatherAlong.apply  # (x, dim, n, group): of dimension dim n/P -> n
scatter_along = ReduceScatterAlong.apply  # (x, dim, group): of dimension dim n -> n/P, summed


def enter(x, group, sequence_parallel):
    """Into the region: x (b, s, i), or the rank's tokens (b, s/P, i), -> (b, s, i) on every rank."""
    if sequence_parallel:
        return gather_along(x, 1, x.shape[1] * group.size(), group)
    return CopyToTPRegion.apply(x, group)


def leave(x, group, sequence_parallel):
    """Out of the region: partial sums (b, s, o) -> their sum (b, s, o), or the rank's tokens (b, s/P, o)."""
    return scatter_along(x, 1, group) if sequence_parallel else ReduceFromTPRegion.apply(x, group)


# ---------------------------------------------------------------------------------------------------
# The lesson 2: layers
# ---------------------------------------------------------------------------------------------------

JOINED, APART, SHARDED = WAYS = "joined", "apart", "sharded"


class LoRALinear(nn.Linear):
    """LoRA on one device: a frozen linear layer, and lora_B(lora_A(x)) beside it, times alpha / rank.

    A starts at random, B at zero (as in the paper), so that at first nothing is added.
    """

    def __init__(self, linear, rank, alpha):
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None)
        self.load_state_dict(linear.state_dict())
        self.requires_grad_(False)
        self.scale = alpha / rank
        self.lora_A = nn.Linear(linear.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, linear.out_features, bias=False)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x):
        return super().forward(x) + self.scale * self.lora_B(self.lora_A(x))


def share(tensor, dim, group):
    """A copy of the rank's share of a dimension; of all, where dim is None. (A view would keep all.)"""
    if dim is None:
        return tensor.detach().clone()
    start, end = split(tensor.shape[dim], group.rank(), group.size())
    return tensor.detach().narrow(dim, start, end - start).clone()


class ParallelLoRA(nn.Module):
    """This rank's part of a LoRALinear: weight, bias (frozen), lora_A, lora_B (trained).

    way: JOINED, APART or SHARDED. Under sequence parallelism P divides the number of tokens, as Megatron-LM
    wants it. cuts() says how A and B are cut, and names those whose gradient, after backward(), is only this
    rank's part of a sum over the ranks: sum_partial_gradients() is for these.
    """

    def __init__(self, full, group, way, sequence_parallel=False):
        super().__init__()
        self.scale, self.group, self.way, self.sequence_parallel = (
            full.scale,
            group,
            way,
            sequence_parallel,
        )
        self.shapes = {"lora_A": full.lora_A.weight.shape, "lora_B": full.lora_B.weight.shape}
        self.cut, self.partial = self.cuts()
        self.weight = nn.Parameter(share(full.weight, self.base_cut, group), requires_grad=False)
        bias = None if full.bias is None else share(full.bias, None if self.base_cut else 0, group)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.lora_A = nn.Parameter(share(full.lora_A.weight, self.cut["lora_A"], group))
        self.lora_B = nn.Parameter(share(full.lora_B.weight, self.cut["lora_B"], group))


class ColumnParallelLoRA(ParallelLoRA):
    """weight (o/P, i), bias (o/P), lora_B (o/P, r); lora_A (r, i), or (r/P, i) where SHARDED."""

    base_cut = 0

    def cuts(self):
        """({"lora_A": dim or None, "lora_B": dim or None}, [names of partial gradients]).

        dim: the dimension of which a rank holds split(n, rank, P); None: every rank holds all.
        """
        # exercise: column_lora
        cut = {"lora_A": 0 if self.way == SHARDED else None, "lora_B": 0}
        summed = self.way == JOINED or (self.way == APART and self.sequence_parallel)
        return cut, ["lora_A"] if summed else []
        # end exercise

    def forward(self, x):
        """x (b, s, i), or the rank's tokens (b, s/P, i), -> (b, s, o/P); messages: the table at the top.

        APART sends A's result (b, s, r) through an enter() of its own; the others let A read what W reads.
        """
        # exercise: column_lora
        inside = enter(x, self.group, self.sequence_parallel)  # (b, s, i)
        if self.way == APART:
            low = enter(F.linear(x, self.lora_A), self.group, self.sequence_parallel)  # (b, s, r)
        else:
            low = F.linear(inside, self.lora_A)
        if self.way == SHARDED:  # (b, s, r/P) -> (b, s, r)
            low = gather_along(low, -1, self.shapes["lora_A"][0], self.group)
        return F.linear(inside, self.weight, self.bias) + self.scale * F.linear(low, self.lora_B)
        # end exercise


class RowParallelLoRA(ParallelLoRA):
    """weight (o, i/P), lora_A (r, i/P); lora_B (o, r), or (o, r/P) where SHARDED. bias (o), the same on all
    ranks and added after the sum: it is frozen, so that no gradient of it can be wrong."""

    base_cut = 1

    def cuts(self):
        """As ColumnParallelLoRA.cuts()."""
        # exercise: row_lora
        cut = {"lora_A": 1, "lora_B": 1 if self.way == SHARDED else None}
        summed = self.way == JOINED or (self.way == APART and self.sequence_parallel)
        return cut, ["lora_B"] if summed else []
        # end exercise

    def forward(self, x):
        """x (b, s, i/P) -> (b, s, o), or the rank's tokens (b, s/P, o); messages: the table at the top.

        JOINED and SHARDED add to W x before it is summed over the ranks, APART to the sum.
        """
        # exercise: row_lora
        base, low = (
            F.linear(x, self.weight),
            F.linear(x, self.lora_A),
        )  # (b, s, o), (b, s, r): partial sums
        if self.way == APART:
            base = leave(base, self.group, self.sequence_parallel)
            low = leave(low, self.group, self.sequence_parallel)
        if self.way == SHARDED:  # (b, s, r) -> (b, s, r/P), summed
            low = scatter_along(low, -1, self.group)
        y = base + self.scale * F.linear(low, self.lora_B)
        if self.way != APART:
            y = leave(y, self.group, self.sequence_parallel)
        return y if self.bias is None else y + self.bias
        # end exercise


def sum_partial_gradients(layers, group):
    """Sum .grad of what each layer's .partial names over the ranks, after the last backward of a step.

    One message for all of them, and none where there are none: it has to be waited for before the optimizer
    may step. Megatron-LM does this in finalize_model_grads().
    """
    # exercise: sum_partial_gradients
    grads = [getattr(layer, name).grad for layer in layers for name in layer.partial]
    if grads:
        total = all_reduce(torch.cat([grad.flatten() for grad in grads]), group)
        for grad, part in zip(grads, total.split([grad.numel() for grad in grads])):
            grad.copy_(part.view_as(grad))
    # end exercise


def full_adapter(layer):
    """{"lora_A": (r, i), "lora_B": (o, r)}: the adapter as one device has it, to be saved.

    Copies, on every rank. layer.shapes are the full shapes, layer.cut says what was cut.
    """
    # exercise: save_adapter
    adapter = {}
    for name, dim in layer.cut.items():
        mine = getattr(layer, name).detach()
        n = None if dim is None else layer.shapes[name][dim]
        adapter[name] = mine.clone() if dim is None else all_gather_along(mine, dim, n, layer.group)
    return adapter
    # end exercise


def merge_adapter(linear, adapter, scale):
    """A new nn.Linear on one device that is linear with its adapter: W + scale B A. linear stays as it is."""
    merged = nn.Linear(linear.in_features, linear.out_features, linear.bias is not None)
    merged.load_state_dict(
        {name: p for name, p in linear.state_dict().items() if "lora" not in name}
    )
    # exercise: save_adapter
    merged.weight.data += scale * adapter["lora_B"] @ adapter["lora_A"]
    # end exercise
    return merged


# ---------------------------------------------------------------------------------------------------
# The lesson 3: the same by DTensor, from a plan that knows nothing of LoRA
# ---------------------------------------------------------------------------------------------------


def distribute(module, mesh, **placements):
    """Make DTensors of a module's parameters, {name: placement}. What is frozen stays frozen."""
    for name, placement in placements.items():
        full = getattr(module, name)
        if full is not None:
            tensor = distribute_tensor(full.detach(), mesh, [placement])
            setattr(module, name, nn.Parameter(tensor, requires_grad=full.requires_grad))


def convert_at_edges(style, module, mesh, wanted):
    """Hooks: the input, laid out as the style says, to the layout wanted; the output to the style's."""

    def before(_, args):
        x = args[0]
        x = (
            x
            if isinstance(x, DTensor)
            else DTensor.from_local(x, mesh, style.input_layouts, run_check=False)
        )
        return (x.redistribute(placements=[wanted]), *args[1:])

    def after(_, args, y):
        y = y.redistribute(placements=style.output_layouts)
        return y.to_local() if style.use_local_output else y

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after)
    return module


class ColwiseParallelLoRA(ColwiseParallel):
    """ColwiseParallel for a LoRALinear: SHARDED, whose gather is a change of layout between A and B."""

    def _apply(self, module, device_mesh):
        distribute(module, device_mesh, weight=Shard(0), bias=Shard(0))
        distribute(module.lora_A, device_mesh, weight=Shard(0))
        distribute(module.lora_B, device_mesh, weight=Shard(0))
        module.lora_A.register_forward_hook(
            lambda _, x, low: low.redistribute(placements=[Replicate()])
        )
        return convert_at_edges(self, module, device_mesh, Replicate())


class RowwiseParallelLoRA(RowwiseParallel):
    """RowwiseParallel for a LoRALinear: SHARDED. A's result is a partial sum, which B wants cut along r."""

    def _apply(self, module, device_mesh):
        distribute(module, device_mesh, weight=Shard(1), bias=Replicate())
        distribute(module.lora_A, device_mesh, weight=Shard(1))
        distribute(module.lora_B, device_mesh, weight=Shard(1))
        module.lora_A.register_forward_hook(
            lambda _, x, low: low.redistribute(placements=[Shard(-1)])
        )
        return convert_at_edges(self, module, device_mesh, Shard(-1))


LORA_STYLES = {ColwiseParallel: ColwiseParallelLoRA, RowwiseParallel: RowwiseParallelLoRA}


def matches(name, pattern):
    """Whether a module's name fits a plan's key, such as "layers.*.up": * stands for one step of the path."""
    steps, patterns = name.split("."), pattern.split(".")
    return len(steps) == len(patterns) and all(map(fnmatchcase, steps, patterns))


def translate_to_lora(plan, model):
    """{module's name: style} for parallelize_module, from a plan {pattern: style} made for the plain model.

    A LoRALinear gets a new object of LORA_STYLES[type of its style], with that one's input_layouts,
    output_layouts and use_local_output (the layouts are kept as tuples of one, the constructor wants what is
    inside). Every other module gets its style as it is: only some layers may have adapters. The plan and
    its styles are the caller's, and other models use them: they stay as they are. Raises TypeError for a
    style of a LoRALinear that LORA_STYLES does not have: a subclass may do anything.
    """
    translated = {}
    for (name, module), (pattern, style) in itertools.product(model.named_modules(), plan.items()):
        if not matches(name, pattern):
            continue
        # exercise: translate_to_lora
        if not isinstance(module, LoRALinear):
            translated[name] = style
            continue
        if type(style) not in LORA_STYLES:
            raise TypeError(f"{name}: no LoRA style for {type(style).__name__}")
        translated[name] = LORA_STYLES[type(style)](
            input_layouts=style.input_layouts[0],
            output_layouts=style.output_layouts[0],
            use_local_output=style.use_local_output,
        )
        # end exercise
    return translated


# ---------------------------------------------------------------------------------------------------
# Checks
# ---------------------------------------------------------------------------------------------------

PARTIAL = "it is only this rank's part of a sum over the ranks: its name is missing in partial"
WHOLE = "it is whole already, on every rank: summed it is P times too large"


class MLP(nn.Module):
    """x + down(gelu(up(x))), of whatever two layers."""

    def __init__(self, up, down):
        super().__init__()
        self.up, self.down = up, down

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))


def draw_from(seed):
    """(uneven, randn): uneven() is a size that neither 2 nor 3 divides, randn(*shape) a tensor."""
    numbers = torch.Generator().manual_seed(seed)
    sizes = [11, 13, 17, 19, 23, 25, 29]
    pick = partial(torch.randint, len(sizes), (), generator=numbers)
    return lambda: sizes[pick()], partial(torch.randn, generator=numbers)


def one_device(lab, randn, tokens, features_in, features_out, rank):
    """A LoRALinear, x (2, tokens, i), y (2, tokens, o) and their gradients; those of A and B are in .grad."""
    full = lab.LoRALinear(nn.Linear(features_in, features_out), rank, 1 + abs(randn(())).item())
    for parameter in full.parameters():
        parameter.data = randn(parameter.shape)
    x = randn(2, tokens, features_in).requires_grad_()
    y, dy = full(x), randn(2, tokens, features_out)
    y.backward(dy)
    return full, x.detach(), y.detach(), x.grad, dy


def expected_messages(column, way, parallel, tokens, features, rank, world):
    """({op: bytes} forward, backward) of a layer, with sequence parallelism where parallel.

    features: those of the base's message, i of a column parallel layer, o of a row parallel one.
    """
    forward, backward = Counter(), Counter()
    there, back = ("all_gather", "reduce_scatter") if column else ("reduce_scatter", "all_gather")

    def edge(width, scattered):
        if scattered:
            forward[there] += 4 * tokens * width  # bytes, float32
            backward[back] += 4 * tokens * width
        else:
            (backward if column else forward)["all_reduce"] += 4 * tokens * width

    edge(features, parallel)
    if way == APART:
        edge(rank, parallel)
    if way == SHARDED:
        edge(math.ceil(rank / world) * world, True)  # with the zeros that make the shares equal
    return forward, backward


def expect_traffic(when, traffic, most):
    """Raise Wrong unless each collective moves at most so many bytes; those not named none."""
    for op, (calls, sent) in traffic.ops.items():
        enough = f"{most[op]} will do" if most[op] else "none are needed"
        expect(sent <= most[op], f"{when}: {op} moves {sent} bytes, calls: {calls}; {enough}")


def check_layer(lab, group, seed, column):
    """A layer in every way, with and without sequence parallelism, r = 4 on 3 ranks and r = 1 on 2."""
    uneven, randn = draw_from(seed)
    pair = dist.new_group([0, 1])
    cases, worst = [(group, 4)] + ([(pair, 1)] if group.rank() < 2 else []), 0
    for (ranks, r), way, parallel in itertools.product(cases, lab.WAYS, (False, True)):
        P, i, o = ranks.size(), uneven(), uneven()
        full, x, y, dx, dy = one_device(lab, randn, P * uneven(), i, o, r)
        A, B, W, scale = full.lora_A.weight, full.lora_B.weight, full.weight, full.scale
        A, B, W = A.detach(), B.detach(), W.detach()
        case = f"{way}, {'SP' if parallel else 'TP'}, r = {r} on {P} ranks"
        tokens = partial(share, dim=1 if parallel else None, group=ranks)
        cut = partial(share, dim=-1, group=ranks)
        hints = {"the adapter is missing": y - scale * x @ A.T @ B.T, "scale = alpha / r": None}
        hints["scale = alpha / r"] = hints["the adapter is missing"] + x @ A.T @ B.T
        if column:
            layer = lab.ColumnParallelLoRA(full, ranks, way, sequence_parallel=parallel)
            given, sent = tokens(x), cut(dy)
            own = (
                cut(dy) @ share(B, 0, ranks) @ A * scale
            )  # dx through this rank's part of the adapter
            base = dy @ W
            wrong_dx = {
                "every rank's part goes into dx": cut(dy) @ share(W, 0, ranks) + own,
                "dx through A is summed over the ranks twice": base + P * dy @ B @ A * scale,
                "dx through A lacks the other ranks' part": base + own,
            }
            hints, wanted = {text: cut(t) for text, t in hints.items()}, cut(y)
            wrong_dx, wanted_dx = {text: tokens(t) for text, t in wrong_dx.items()}, tokens(dx)
        else:
            layer = lab.RowParallelLoRA(full, ranks, way, sequence_parallel=parallel)
            given, sent = cut(x), tokens(dy)
            low = cut(x) @ cut(A).T  # this rank's part of it
            hints["A's result is a sum over the ranks"] = (
                hints["the adapter is missing"] + scale * low @ B.T
            )
            hints["the bias is added on every rank"] = y + (P - 1) * full.bias.detach()
            hints, wanted = {text: tokens(t) for text, t in hints.items()}, tokens(y)
            wrong_dx = {"dy is the same on all ranks": P * cut(dx)}
            wanted_dx = cut(dx)
        expect(not layer.weight.requires_grad, f"{case}: weight is trained", "the base is frozen")
        mine = given.clone().requires_grad_()
        sizes = column, way, parallel, x[..., 0].numel(), i if column else o, r, P
        forward, backward = expected_messages(*sizes)
        with Traffic() as traffic:
            out = layer(mine)
        worst = max(worst, expect_close(f"{case}: y", out, wanted, hints=hints))
        expect_traffic(f"{case}: forward", traffic, forward)
        with Traffic() as traffic:
            out.backward(sent)
        worst = max(worst, expect_close(f"{case}: dx", mine.grad, wanted_dx, hints=wrong_dx))
        expect_traffic(f"{case}: backward", traffic, backward)
        expect(torch.equal(mine, given), f"{case}: x is overwritten")
        worst = max(worst, expect_gradients(case, layer, full, column))
    return f"y, dx, dA, dB, off by {worst:.0e}: {len(lab.WAYS)} ways, TP and SP, r = 1 on 2 ranks; W frozen"


def expect_gradients(case, layer, full, column):
    """Raise Wrong unless A's and B's parts and gradients are right, once those named partial are summed."""
    rank, worst = layer.group.rank(), 0
    free = "lora_A" if column else "lora_B"
    cuts = {"lora_A": 0 if column else 1, "lora_B": 0 if column else 1}
    if layer.way != "sharded":
        cuts[free] = None
    for name, dim in cuts.items():
        mine, whole = getattr(layer, name), getattr(full, name).weight
        right = share(whole, dim, layer.group)
        expect_close(f"{case}: {name} on rank {rank}", mine.detach(), right, 0)
        summed = all_reduce(mine.grad, layer.group) if dim is None else mine.grad
        got, right = mine.grad, share(whole.grad, dim, layer.group)
        hints = {PARTIAL: got} if torch.allclose(summed, right, 1e-4, 1e-4) else {}
        if name in layer.partial:
            expect(
                dim is None,
                f"{case}: {name} is cut, and named partial",
                "other ranks hold other parts",
            )
            hints, got = ({WHOLE: summed} if torch.allclose(got, right, 1e-4, 1e-4) else {}), summed
        worst = max(worst, expect_close(f"{case}: the gradient of {name}", got, right, hints=hints))
    return worst


def three_layers(lab, group, randn, way, parallel):
    """A column and a row parallel layer that way, a sharded one, and the LoRALinears they are made of."""
    kinds = (
        (lab.ColumnParallelLoRA, way),
        (lab.RowParallelLoRA, way),
        (lab.RowParallelLoRA, SHARDED),
    )
    full = [one_device(lab, randn, 6, 11, 13, 4)[0] for _ in kinds]
    layers = [kind(one, group, of, parallel) for one, (kind, of) in zip(full, kinds)]
    return layers, full


def check_sum_partial_gradients(lab, group, seed):
    _, randn = draw_from(seed)
    P, moved = group.size(), 0
    for way, parallel in itertools.product(lab.WAYS, (False, True)):
        layers, _ = three_layers(lab, group, randn, way, parallel)
        case, wanted, most = f"{way}, {'SP' if parallel else 'TP'}", [], 0
        named = [(layer, *pair) for layer in layers for pair in layer.named_parameters()]
        for layer, name, p in named:
            if p.requires_grad:
                grads = [share(randn(layer.shapes[name]), layer.cut[name], group) for _ in range(P)]
                p.grad = grads[group.rank()].clone()
                summed = name in layer.partial
                hints = {WHOLE: sum(grads)} if not summed else {PARTIAL: p.grad.clone()}
                hints["the mean is not the sum"] = sum(grads) / P
                wanted.append((name, p, sum(grads) if summed else p.grad.clone(), hints))
                most += p.nbytes * summed
        with Traffic() as traffic:
            lab.sum_partial_gradients(layers, group)
        for name, p, right, hints in wanted:
            expect_close(f"{case}: the gradient of {name}", p.grad, right, hints=hints)
        expect_traffic(case, traffic, Counter(all_reduce=most))
        calls = sum(calls for calls, _ in traffic.ops.values())
        expect(calls <= 1, f"{case}: {calls} messages", "one for all gradients: join them first")
        moved = max(moved, most)
    return f"summed where partial, untouched elsewhere; one message of {moved} bytes, or none"


def check_save_adapter(lab, group, seed):
    uneven, randn = draw_from(seed)
    worst = 0
    for way, parallel in itertools.product(lab.WAYS, (False, True)):
        layers, full = three_layers(lab, group, randn, way, parallel)
        for layer, one in zip(layers, full):
            adapter = lab.full_adapter(layer)
            for name, shape in layer.shapes.items():
                mine, right = adapter[name], getattr(one, name).weight.detach()
                expect_close(f"{way}: {name}, {tuple(shape)}, as saved", mine, right, 0)
                expect(not mine.requires_grad, f"{way}: {name} as saved is trained", "save a copy")
                own = getattr(layer, name).untyped_storage().data_ptr()
                shared = mine.untyped_storage().data_ptr() == own
                expect(not shared, f"{way}: {name} as saved is the parameter", "save a copy")
            x, before = randn(2, uneven(), one.in_features), one.weight.clone()
            y = one(x).detach()
            merged = lab.merge_adapter(one, adapter, one.scale)
            base = F.linear(x, one.weight, one.bias)
            unscaled = base + (y - base) / one.scale
            hints = {"W + scale B A: the scale is missing": unscaled, "nothing is merged": base}
            worst = max(worst, expect_close(f"{way}: merged", merged(x).detach(), y, hints=hints))
            expect(
                torch.equal(one.weight, before),
                "merging overwrites the base",
                "merge into the copy",
            )
    return f"shards of every way give A and B exactly; merged as one device, off by {worst:.0e}"


class Watched(ColwiseParallel):
    """Somebody's subclass: what its LoRA form would be, nobody knows."""


def adapted_mlps(lab, randn, rank):
    """Two MLPs 12 -> 16 -> 12, one after the other, of which the first has adapters and the second none."""
    layers = [nn.Linear(*shape) for shape in ((12, 16), (16, 12), (12, 16), (16, 12))]
    layers[:2] = [lab.LoRALinear(layer, rank, 2.0) for layer in layers[:2]]
    model = nn.Sequential(MLP(*layers[:2]), MLP(*layers[2:]))
    for parameter in model.parameters():
        parameter.data = randn(parameter.shape) / 2
    return model


def plain_plan(parallel):
    """The plan of MLPs without a word of LoRA; the tokens are cut over the ranks where parallel."""
    if parallel:
        up, down = ColwiseParallel(input_layouts=Shard(1)), RowwiseParallel(output_layouts=Shard(1))
        return {"*.up": up, "*.down": down}
    return {"*.up": ColwiseParallel(), "*.down": RowwiseParallel()}


def check_translate_to_lora(lab, group, seed):
    _, randn = draw_from(seed)
    mesh, worst = DeviceMesh.from_group(group, "cpu"), 0
    for r, parallel in itertools.product((1, 3), (False, True)):
        case = f"{'SP' if parallel else 'TP'}, r = {r}"
        model = adapted_mlps(lab, randn, r)
        plan = plain_plan(parallel)
        before = {key: (style, type(style), dict(vars(style))) for key, style in plan.items()}
        first = lab.translate_to_lora(plan, model)
        for key, (style, kind, attributes) in before.items():
            same = plan[key] is style and type(style) is kind and vars(style) == attributes
            expect(
                same,
                f"{case}: the plan's {key} is not what it was",
                "other models use it: a new object",
            )
        styles = lab.translate_to_lora(plan, model)
        names = {"0.up": lab.ColwiseParallelLoRA, "0.down": lab.RowwiseParallelLoRA}
        names |= {"1.up": ColwiseParallel, "1.down": RowwiseParallel}
        expect(
            set(styles) == set(names),
            f"{case}: styles for {', '.join(sorted(styles))}",
            "one a module",
        )
        for name, kind in names.items():
            style, source = styles[name], plan[f"*.{name[2:]}"]
            expect(
                type(style) is kind,
                f"{case}: {name} gets {type(style).__name__}, not {kind.__name__}",
            )
            for attribute in ("input_layouts", "output_layouts", "use_local_output"):
                mine, right = getattr(style, attribute), getattr(source, attribute)
                found = f"{case}: {name} has {attribute} {mine}, not {right}"
                expect(
                    mine == right,
                    found,
                    "the layouts are the style's: sequence parallelism is in them",
                )
            expect(
                name[0] == "1" or style is not first[name],
                f"{case}: two calls share {name}",
                "no cache",
            )
        worst = max(worst, compare_dtensor(case, model, mesh, styles, parallel, randn)[0])
    with suppress(TypeError):
        lab.translate_to_lora({"*.up": Watched()}, adapted_mlps(lab, randn, 1))
        raise Wrong(
            "a subclass of ColwiseParallel is translated", "look up its type, and raise TypeError"
        )
    return f"new styles, the plan as it was; y, dx, gradients off by {worst:.0e}, TP and SP, r = 1 and 3"


def compare_dtensor(case, model, mesh, styles, parallel, randn):
    """(largest error against one device, Traffic forward, backward) of a model cut by DTensor styles."""
    group, x, dy = mesh.get_group(), randn(2, 6, 12), randn(2, 6, 12)
    whole = x.clone().requires_grad_()
    y = model(whole)
    y.backward(dy)
    right = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    parallelize_module(model, mesh, styles)
    tokens = partial(share, dim=1 if parallel else None, group=group)
    mine = tokens(x).requires_grad_()
    with Traffic() as forward:
        out = model(mine)
    with Traffic() as backward:
        out.backward(tokens(dy))
    worst = expect_close(f"{case}: y", out.detach(), tokens(y))
    worst = max(worst, expect_close(f"{case}: dx", mine.grad, tokens(whole.grad)))
    for name, p in model.named_parameters():
        expect((p.grad is not None) == (name in right), f"{case}: {name} is trained, or should be")
        if name in right:
            grad = p.grad.full_tensor()
            worst = max(worst, expect_close(f"{case}: the gradient of {name}", grad, right[name]))
    return worst, forward, backward


CHECKS = {
    "column_lora": (partial(check_layer, column=True), 3),
    "row_lora": (partial(check_layer, column=False), 3),
    "sum_partial_gradients": (check_sum_partial_gradients, 3),
    "save_adapter": (check_save_adapter, 3),
    "translate_to_lora": (check_translate_to_lora, 2),
}


# ---------------------------------------------------------------------------------------------------
# Experiments
# ---------------------------------------------------------------------------------------------------

HIDDEN, FEATURES, TOKENS = 96, 130, 60  # of the MLP in the first; 3 does not divide 130
SMALL, STEPS, LEARN = (
    (24, 50, 4),
    80,
    0.01,
)  # h, features, r of the one that trains; steps, learning rate
HELD_OUT = 1 << 20  # a step number that training never reaches


# Copied from labs/checks/lab2.py
class Kept(torch.autograd.graph.saved_tensors_hooks):
    """Counts the bytes that autograd keeps for the backward of what runs inside, each storage once.

    Those of parameters are there anyway and not counted.
    """

    def __init__(self, *parameters):
        self.storages, known = {}, {p.untyped_storage().data_ptr() for p in parameters}

        def note(tensor):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in known:
                self.storages[storage.data_ptr()] = storage.nbytes()
            return tensor

        super().__init__(note, lambda tensor: tensor)

    def __enter__(self):
        super().__enter__()
        return self

    @property
    def bytes(self):
        return sum(self.storages.values())


def lora_mlp(seed, hidden, features, rank):
    """An MLP of two LoRALinears on one device; B is not zero, or A would have no gradient."""
    torch.manual_seed(seed)
    up, down = (
        LoRALinear(nn.Linear(*s), rank, 2 * rank) for s in ((hidden, features), (features, hidden))
    )
    for layer in up, down:
        nn.init.normal_(layer.lora_B.weight, std=0.3)
    return MLP(up, down)


def parallel_mlp(model, group, way, parallel):
    """This rank's part of such an MLP."""
    up = ColumnParallelLoRA(model.up, group, way, parallel)
    return MLP(up, RowParallelLoRA(model.down, group, way, parallel))


def peft_mlp(model, rank):
    """The same MLP with peft's own layers."""
    from peft import LoraConfig, get_peft_model

    plain = MLP(*(merge_adapter(layer, {"lora_A": torch.zeros(1, 1), "lora_B": torch.zeros(1, 1)}, 0.0)
                  for layer in (model.up, model.down)))  # fmt: skip
    config = LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules=["up", "down"], lora_dropout=0.0
    )
    theirs = get_peft_model(plain, config).base_model.model
    for mine, layer in (model.up, theirs.up), (model.down, theirs.down):
        layer.lora_A["default"].weight.data.copy_(mine.lora_A.weight)
        layer.lora_B["default"].weight.data.copy_(mine.lora_B.weight)
    return theirs


def inputs(seed):
    """x and dy (1, tokens, hidden) of the first experiment."""
    numbers = torch.Generator().manual_seed(seed + 1)
    return [torch.randn(1, TOKENS, HIDDEN, generator=numbers) for _ in range(2)]


def reference(model, seed):
    """{name: tensor}: y, dx, every adapter's gradient on one device, with LoRALinears or peft's layers."""
    x, dy = inputs(seed)
    x.requires_grad_()
    y = model(x)
    y.backward(dy)
    grads = {
        name.replace(".default", ""): p.grad
        for name, p in model.named_parameters()
        if p.requires_grad
    }
    return {"y": y.detach(), "dx": x.grad, **grads}


def ways_on_rank(group, seed, rank, references):
    """This rank's rows: each way with TP and SP, against each reference, {name: reference()}."""
    world, (x, dy), rows = group.size(), inputs(seed), []
    for way, parallel in itertools.product(WAYS, (False, True)):
        model = parallel_mlp(lora_mlp(seed, HIDDEN, FEATURES, rank), group, way, parallel)
        layers = {"up": model.up, "down": model.down}
        tokens = partial(share, dim=1 if parallel else None, group=group)
        mine = tokens(x).requires_grad_()
        with Traffic() as forward:
            with Kept(*model.up.parameters()) as kept:
                inside = model.up(mine)
            y = mine + model.down(F.gelu(inside))
        with Traffic() as backward:
            y.backward(tokens(dy))
        with Traffic() as step:
            sum_partial_gradients(layers.values(), group)
        parts = {"y": (y.detach(), tokens), "dx": (mine.grad, tokens)}
        for name, layer in layers.items():
            for factor, dim in layer.cut.items():
                cut = partial(share, dim=dim, group=group)
                parts[f"{name}.{factor}.weight"] = getattr(layer, factor).grad, cut
        errors = {}
        for source, right in references.items():
            pairs = [(part, cut(right[name])) for name, (part, cut) in parts.items()]
            errors[source] = max(
                (torch.norm(a - b) / torch.norm(b).clamp(min=1e-9)).item() for a, b in pairs
            )
        moved = [{op: sent for op, (_, sent) in t.ops.items()} for t in (forward, backward, step)]
        whole, base = (
            [sum(both, Counter()) for both in zip(
                expected_messages(True, kind, parallel, TOKENS, HIDDEN, rank, world),
                expected_messages(False, kind, parallel, TOKENS, HIDDEN, rank, world),
            )]
            for kind in (way, JOINED)
        )  # fmt: skip
        summed = {JOINED: True, APART: parallel, SHARDED: False}[way]
        per_step = {"all_reduce": 4 * rank * 2 * HIDDEN} if summed else {}
        x_kept = mine.nbytes if way == APART or not parallel else x.nbytes
        rows.append({
            "ranks": world, "rank": group.rank(), "way": way, "sequence_parallel": parallel, "errors": errors,
            "forward": dict(Counter(moved[0]) - base[0]), "backward": dict(Counter(moved[1]) - base[1]),
            "step": moved[2], "kept": kept.bytes, "trained": sum(
                p.numel() for p in model.parameters() if p.requires_grad
            ),
            "as_expected": moved == [*map(dict, whole), per_step]
            and kept.bytes == x_kept + 4 * TOKENS * rank,  # and not a byte for the frozen W
        })  # fmt: skip
    return rows


def short(ops):
    """{op: bytes} in a few letters: AG 1920, RS 1920."""
    letters = {"all_reduce": "AR", "all_gather": "AG", "reduce_scatter": "RS"}
    return ", ".join(f"{letters[op]} {sent}" for op, sent in sorted(ops.items())) or "-"


def ways(args):
    """Every way on 2 and 3 ranks against one device, and against peft; (rows, whether peft, what failed)."""
    model = lora_mlp(args.seed, HIDDEN, FEATURES, args.lora_rank)
    references = {"one device": reference(model, args.seed)}
    installed = importlib.util.find_spec("peft") is not None
    if installed:
        references["peft"] = reference(peft_mlp(model, args.lora_rank), args.seed)
    rows = []
    for world in 2, 3:
        ranks = on_ranks(world, ways_on_rank, args.seed, args.lora_rank, references)
        rows += [row for case in zip(*ranks) for row in case]
    shape = f"MLP {HIDDEN} -> {FEATURES} -> {HIDDEN}, r = {args.lora_rank}, {TOKENS} tokens"
    print(f"\n{shape}: what the adapters add")
    head = [
        "ranks",
        "way",
        "",
        "off by",
        "forward, bytes",
        "backward",
        "once a step",
        "kept",
        "trained",
    ]
    print_table(head, *(
        [r["ranks"], r["way"], "SP" if r["sequence_parallel"] else "TP", f"{r['errors']['one device']:.0e}",
         short(r["forward"]), short(r["backward"]), short(r["step"]), r["kept"], r["trained"]]
        for r in rows if r["rank"] == 0
    ))  # fmt: skip
    print(
        "\n  AR all-reduce, AG all-gather, RS reduce-scatter; on the wire an AR is an RS and an AG"
    )
    print(
        "  off by: y, dx and every gradient; kept: by the column parallel layer for its backward, bytes"
    )
    worst = {name: max(row["errors"][name] for row in rows) for name in references}
    seen = f"off by {worst['peft']:.0e}" if installed else "not run, peft is not installed"
    print(f"  against peft's layers: {seen}")
    holds = {f"{name}: y, dx and gradients agree": error < 1e-5 for name, error in worst.items()}
    holds["messages and what is kept are the formulas'"] = all(row["as_expected"] for row in rows)
    return rows, installed, [text for text, held in holds.items() if not held]


def task(step, answer):
    """Step's x (1, 24, h), what y should be, and the weight (1, 24, 1) of each token in the loss.

    y is the model's with other adapters than it starts with. answer: only the second half of the tokens
    counts, as in fine-tuning on answers, where the prompt is masked.
    """
    x = torch.randn(1, 24, SMALL[0], generator=torch.Generator().manual_seed(step))
    weight = torch.ones(1, 24, 1)
    weight[:, :12] *= not answer
    with torch.no_grad():
        return x, lora_mlp(0, *SMALL)(x), weight / weight.sum() / SMALL[0]


def weighted_loss(model, x, target, weight):
    """The rank's part of the mean square error: what the ranks have together adds up to it."""
    return (weight * (model(x) - target).square()).sum()


def student():
    """The model that trains: the same base, and B at zero."""
    model = lora_mlp(0, *SMALL)
    for layer in model.up, model.down:
        nn.init.kaiming_uniform_(layer.lora_A.weight, a=5**0.5)
        nn.init.zeros_(layer.lora_B.weight)
    return model


def train(model, answer, tokens, finish, group):
    """(losses of the steps, optimizer). tokens(x): the rank's; finish(): what a step does before AdamW."""
    adamw = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LEARN)
    losses = []
    for step in range(STEPS):
        loss = weighted_loss(model, *map(tokens, task(step, answer)))
        adamw.zero_grad()
        loss.backward()
        finish()
        adamw.step()
        losses.append((loss.detach() if group is None else all_reduce(loss.detach(), group)).item())
    return losses, adamw


def exported_loss(adapters, answer):
    """Loss on held out tokens of one device's model with the adapters (up, down) merged into it."""
    model = student()
    layers = (merge_adapter(one, a, one.scale) for one, a in zip((model.up, model.down), adapters))
    with torch.no_grad():
        return weighted_loss(MLP(*layers), *task(HELD_OUT, answer)).item()


def train_on_rank(group, seed, answer, summed):
    """This rank's run APART with sequence parallelism; summed: whether sum_partial_gradients is called."""
    torch.manual_seed(seed)
    one = student()
    model, tokens = parallel_mlp(one, group, APART, True), partial(share, dim=1, group=group)
    layers, first = [model.up, model.down], []

    def finish():
        own = model.down.lora_B.grad.clone()
        right = all_reduce(own, group)
        first.append((torch.norm(own - right) / torch.norm(right)).item())
        if summed:
            sum_partial_gradients(layers, group)

    losses, adamw = train(model, answer, tokens, finish, group)
    state = sum(t.numel() for s in adamw.state.values() for t in s.values() if t.dim())
    with torch.no_grad():
        held_out = all_reduce(
            weighted_loss(model, *map(tokens, task(HELD_OUT, answer))), group
        ).item()
    replicas = [(p.detach(), all_reduce(p.detach(), group) / group.size())
                for p in (model.up.lora_A, model.down.lora_B)]  # fmt: skip
    drift = max((torch.norm(p - mean) / torch.norm(mean)).item() for p, mean in replicas)
    exported = exported_loss([full_adapter(layer) for layer in layers], answer)
    frozen = all(p.grad is None for p in model.parameters() if not p.requires_grad)
    return {"losses": losses, "held_out": held_out, "exported": exported, "drift": drift, "state": state,
            "unsummed_gradient_error": first[0], "frozen": frozen}  # fmt: skip


def one_device_run(seed, answer):
    """What train_on_rank returns, of one device."""
    torch.manual_seed(seed)
    model = student()
    losses, _ = train(model, answer, lambda x: x, lambda: None, None)
    factors = "lora_A", "lora_B"
    layers = model.up, model.down
    adapters = [
        {name: getattr(layer, name).weight.detach() for name in factors} for layer in layers
    ]
    with torch.no_grad():
        held_out = weighted_loss(model, *task(HELD_OUT, answer)).item()
    return {
        "losses": losses,
        "held_out": held_out,
        "exported": exported_loss(adapters, answer),
        "drift": 0.0,
    }


def training(args):
    """Training with and without the sum, against one device; returns (results, what did not hold).

    {"all tokens": {run: result}, "answers only": the same}.
    """
    results, holds = {}, {}
    for counts, answer in (("all tokens", False), ("answers only", True)):
        runs = results[counts] = {"one device": one_device_run(args.seed, answer)}
        for name, summed in (("SP, summed", True), ("SP, not summed", False)):
            runs[name] = on_ranks(2, train_on_rank, args.seed, answer, summed)[0]
        one, good, bad = runs.values()
        bad_losses = zip(bad["losses"], one["losses"])
        holds[f"{counts}, summed: the losses are one device's"] = all(
            map(close, good["losses"], one["losses"])
        )
        holds[f"{counts}, summed: saved as trained"] = close(good["exported"], one["held_out"])
        holds[f"{counts}, summed: the replicas stay the same"] = good["drift"] < 1e-6
        holds[f"{counts}, not summed: the replicas drift apart"] = bad["drift"] > 1e-2
        looks = (
            all(close(*pair) for pair in bad_losses)
            if answer
            else close(bad["losses"][0], one["losses"][0])
        )
        holds[f"{counts}, not summed: the loss looks right"] = looks
        state = 2 * SMALL[2] * (2 * SMALL[0] + SMALL[1])  # two numbers for each of A, B: none for W
        holds[f"{counts}: the base is frozen"] = good["frozen"] and good["state"] <= state
    bad = results["answers only"]["SP, not summed"]
    holds["answers only, not summed: what is saved is wrong"] = (
        bad["exported"] > 2 * bad["held_out"]
    )
    print(
        f"\n{STEPS} steps of AdamW, {APART}, sequence parallel on 2 ranks: with and without the sum"
    )
    head = [
        "the loss counts",
        "",
        "first loss",
        f"loss {STEPS}",
        "held out",
        "saved by rank 0",
        "replicas apart by",
    ]
    print_table(head, *(
        [counts, name, f"{run['losses'][0]:.6f}", f"{run['losses'][-1]:.6f}", f"{run['held_out']:.6f}",
         f"{run['exported']:.6f}", f"{run['drift']:.0e}"]
        for counts, runs in results.items() for name, run in runs.items()
    ))  # fmt: skip
    print("\n  held out: loss of the model as it stands on the ranks; saved: merged, on one device")
    return results, [text for text, held in holds.items() if not held]


def close(a, b):
    """Whether two losses are the same but for rounding, which many steps make larger."""
    return abs(a / b - 1) < 1e-3


def translate_in_place(plan):
    """What to avoid: turns the styles of a plan into LoRA styles by their class, wherever they are used."""
    for style in plan.values():
        style.__class__ = LORA_STYLES.get(type(style), type(style))
    return plan


def translation_on_rank(group, seed):
    """{translation: the plan after it, and what a later model without adapters gets from that plan}."""
    mesh, found = DeviceMesh.from_group(group, "cpu"), {}
    for translate in (translate_to_lora, translate_in_place):
        randn = partial(torch.randn, generator=torch.Generator().manual_seed(seed))
        plan, this = (
            plain_plan(False),
            sys.modules[__name__],
        )  # a plan as a registry keeps it, for all models
        model = adapted_mlps(this, randn, 3)
        model = model[:1]  # the MLP with adapters
        styles = translate(plan, model) if translate is translate_to_lora else translate(plan)
        error, forward, backward = compare_dtensor("adapted", model, mesh, styles, False, randn)
        later = nn.Sequential(adapted_mlps(this, randn, 3)[1])
        try:
            plain_error, *_ = compare_dtensor("plain", later, mesh, plan, False, randn)
            outcome = f"as on one device, off by {plain_error:.0e}"
        except AttributeError as problem:
            outcome = f"AttributeError: {problem}"
        found[translate.__name__] = {
            "adapted_error": error, "plan": [type(style).__name__ for style in plan.values()],
            "later_model": outcome, "forward": forward.ops, "backward": backward.ops,
        }  # fmt: skip
    return found


def translation(args):
    """The plan after translating it rightly and by class; returns (what was seen, what did not hold)."""
    found = on_ranks(2, translation_on_rank, args.seed)[0]
    print("\none plan, first for a model with adapters, then for one without (DTensor, 2 ranks)")
    print_table(["", "adapted model off by", "the plan afterwards", "a later model without adapters"], *(
        [name, row["adapted_error"], ", ".join(row["plan"]), row["later_model"]]
        for name, row in found.items()
    ))  # fmt: skip
    good, bad = found.values()
    holds = {
        "translate_to_lora leaves the plan alone": good["plan"]
        == ["ColwiseParallel", "RowwiseParallel"]
        and good["later_model"].startswith("as on one device"),
        "translating in place leaks": bad["plan"] == ["ColwiseParallelLoRA", "RowwiseParallelLoRA"]
        and bad["later_model"].startswith("AttributeError"),
    }
    return found, [text for text, held in holds.items() if not held]


def experiment(args):
    """All three; {"ways", "peft_installed", "training", "translation", "failed": what did not hold}."""
    rows, installed, first = ways(args)
    (runs, second), (found, third) = training(args), translation(args)
    return {"ways": rows, "peft_installed": installed, "training": runs, "translation": found,
            "failed": first + second + third}  # fmt: skip


# Okabe and Ito's colours: rank 0, 1, 2
COLOURS = "#0072B2", "#E69F00", "#009E73"


def draw(results, path):
    """The picture of --plot: who holds what, what the adapters send, and the loss without the sum."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(17, 5.5), width_ratios=[1.25, 1, 1])
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    draw_owned(axes[0], pyplot.Rectangle)
    draw_sent(axes[1], [row for row in results["ways"] if row["rank"] == 0 and row["ranks"] == 2])
    draw_training(axes[2], results["training"]["answers only"])
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def draw_owned(axis, rectangle):
    """A and B of both layers in the three ways, in the colours of the 3 ranks; grey: all of it on all."""
    r, i, o = 3, 6, 9

    def matrix(x, y, height, width, dim):
        if dim is None:
            axis.add_patch(rectangle((x, y), width, height, facecolor="0.8", edgecolor="white"))
            return
        for rank, colour in enumerate(COLOURS):
            start, end = split((height, width)[dim], rank, 3)
            corner = (x + start, y) if dim else (x, y + height - end)  # rows from the top
            size = (end - start, height) if dim else (width, end - start)
            axis.add_patch(rectangle(corner, *size, facecolor=colour, edgecolor="white"))

    notes = {JOINED: "sum its gradient", APART: "sum it under SP only", SHARDED: "nothing to sum"}
    for place, way in enumerate(WAYS):
        y = -12 * place
        free = 0 if way == SHARDED else None
        matrix(5, y + 3, r, i, free)  # column: A by rank features, B by outputs
        matrix(13, y, o, r, 0)
        matrix(24, y + 3, r, i, 1)  # row: A by inputs, B by rank features
        matrix(32, y, o, r, None if free is None else 1)
        axis.text(-0.5, y + 4.5, way, weight="bold", va="center", ha="right")
        axis.text(10.5, y - 0.3, notes[way], ha="center", va="top", fontsize=8)
        axis.text(29.5, y - 0.3, notes[way], ha="center", va="top", fontsize=8)
    for x, name in ((8, "A"), (14.5, "B"), (27, "A"), (33.5, "B")):
        axis.text(x, 9.6, name, ha="center", style="italic")
    axis.text(10.5, 11.5, "column parallel", ha="center")
    axis.text(29.5, 11.5, "row parallel", ha="center")
    for rank, colour in enumerate(COLOURS):
        axis.text(2 + 8 * rank, -29, f"rank {rank}", color=colour, weight="bold")
    axis.text(26, -29, "all of it on every rank", color="0.5", weight="bold")
    axis.set(xlim=(-8, 45), ylim=(-30, 14), aspect="equal")
    axis.set_title("Three ways to cut an adapter", loc="left")
    axis.axis("off")


def draw_sent(axis, rows):
    """Bytes on the wire that the adapters add on rank 0 of 2: each direction, and the sum of once a step."""
    places = range(len(rows))
    left = [0] * len(rows)
    for key, label, colour in (("forward", "forward", "0.75"), ("backward", "backward", "0.45"),
                               ("step", "once a step", "#D55E00")):  # fmt: skip
        sizes = [sum(sent * (2 if op == "all_reduce" else 1) / 2 for op, sent in row[key].items()) / 2**10
                 for row in rows]  # fmt: skip
        axis.barh(places, sizes, left=left, color=colour, label=label)
        left = [a + b for a, b in zip(left, sizes)]
    axis.set_yticks(
        places, [f"{row['way']}\n{'SP' if row['sequence_parallel'] else 'TP'}" for row in rows]
    )
    axis.invert_yaxis()
    axis.set(xlabel="KiB on the wire, rank 0 of 2", xlim=(0, 1.15 * max(left)))
    axis.set_title("What the adapters of an MLP send", loc="left")
    axis.legend(frameon=False, loc="lower right")


def draw_training(axis, runs):
    """Losses of the three runs, and what the adapter saved by rank 0 gives on one device."""
    styles = {"one device": ("black", 5, "-"), "SP, summed": ("#56B4E9", 2, "-")}
    for name, run in runs.items():
        colour, width, dash = styles.get(name, ("#D55E00", 2, "--"))
        axis.plot(run["losses"], dash, color=colour, lw=width, label=name)
        axis.plot(len(run["losses"]) + 4, run["exported"], "o", color=colour, ms=4 + width)
    axis.set(
        yscale="log",
        ylabel="loss",
        xlabel="step; dots: saved by rank 0 and merged, on held out tokens",
    )
    axis.set_title("The same losses, and another adapter saved", loc="left")
    axis.legend(frameon=False)


# ---------------------------------------------------------------------------------------------------
# Sabotage: what people get wrong, for --inject-bug. A check has to catch every one.
# ---------------------------------------------------------------------------------------------------


def partial_forgotten_under_sp(lab):
    """Under sequence parallelism no factor's gradient is named partial where it is not so under TP."""
    for kind in lab.ColumnParallelLoRA, lab.RowParallelLoRA:
        right = kind.cuts

        def cuts(self, right=right):
            cut, names = right(self)
            return cut, [] if self.way == APART else names

        kind.cuts = cuts


def whole_gradient_summed(lab):
    """A factor that every rank holds is always summed, also where its gradient is whole already."""
    right = lab.ColumnParallelLoRA.cuts

    def cuts(self):
        cut, _ = right(self)
        return cut, [name for name, dim in cut.items() if dim is None]

    lab.ColumnParallelLoRA.cuts = cuts


def gradient_not_summed(lab):
    """sum_partial_gradients does nothing: all losses look right."""
    lab.sum_partial_gradients = lambda layers, group: None


def gradient_averaged(lab):
    """The ranks' gradients are averaged, as between data parallel replicas."""
    right = lab.all_reduce
    lab.all_reduce = lambda x, group: right(x, group) / group.size()


def gradients_one_by_one(lab):
    """A message for each factor instead of one for all: all values right."""
    right = lab.sum_partial_gradients
    lab.sum_partial_gradients = lambda layers, group: [right([layer], group) for layer in layers]


def low_rank_gradient_not_summed(lab):
    """The gather along r takes its own share of the gradient in the backward, and sums nothing."""
    right = lab.GatherAlong.backward

    def backward(ctx, grad):
        return (
            (share(grad, ctx.dim, ctx.group), None, None, None)
            if ctx.dim == -1
            else right(ctx, grad)
        )

    lab.GatherAlong.backward = staticmethod(backward)


def adapter_on_partial_sums(lab):
    """A row parallel layer's B reads this rank's part of A's result, and adds to the sum of W x."""

    def forward(self, x):
        low = lab.F.linear(x, self.lora_A)
        base = lab.leave(F.linear(x, self.weight), self.group, self.sequence_parallel)
        low = share_tokens(low, self.group) if self.sequence_parallel else low
        return base + self.scale * F.linear(low, self.lora_B) + self.bias

    lab.RowParallelLoRA.forward = forward


def share_tokens(x, group):
    """This rank's tokens of x (b, s, r)."""
    return x.chunk(group.size(), 1)[group.rank()]


def enters_twice(lab):
    """A column parallel layer, APART: A reads x inside the region, and its result enters again."""
    right = lab.ColumnParallelLoRA.forward

    def forward(self, x):
        if self.way != APART or self.sequence_parallel:
            return right(self, x)
        inside = lab.enter(x, self.group, False)
        low = lab.enter(F.linear(inside, self.lora_A), self.group, False)
        return F.linear(inside, self.weight, self.bias) + self.scale * F.linear(low, self.lora_B)

    lab.ColumnParallelLoRA.forward = forward


def base_is_trained(lab):
    """The base weight has a gradient, and x is kept for it: all values right."""
    right = lab.ParallelLoRA.__init__

    def __init__(self, *args, **options):
        right(self, *args, **options)
        self.weight.requires_grad_()

    lab.ParallelLoRA.__init__ = __init__


def saves_own_shard(lab):
    """What is saved is this rank's shard of A and B."""
    lab.full_adapter = lambda layer: {
        name: getattr(layer, name).detach().clone() for name in layer.cut
    }


def merged_without_scale(lab):
    """Merging adds B A, without alpha / r."""
    right = lab.merge_adapter
    lab.merge_adapter = lambda linear, adapter, scale: right(linear, adapter, 1.0)


def translates_in_place(lab):
    """The plan's own styles become LoRA styles, by their class."""
    right = lab.translate_to_lora

    def translate_to_lora(plan, model):
        translated = right(plan, model)
        lab.translate_in_place(plan)
        return translated

    lab.translate_to_lora = translate_to_lora


def styles_cached(lab):
    """One LoRA style per type, for all models and layouts."""
    right, cache = lab.translate_to_lora, {}

    def translate_to_lora(plan, model):
        return {
            name: cache.setdefault(type(style), style) for name, style in right(plan, model).items()
        }

    lab.translate_to_lora = translate_to_lora


def layouts_forgotten(lab):
    """The new styles have the layouts of their kind, not those of the plan: sequence parallelism is lost."""
    right = lab.translate_to_lora

    def translate_to_lora(plan, model):
        return {name: type(style)() for name, style in right(plan, model).items()}

    lab.translate_to_lora = translate_to_lora


BUGS = [
    partial_forgotten_under_sp,
    whole_gradient_summed,
    gradient_not_summed,
    gradient_averaged,
    gradients_one_by_one,
    low_rank_gradient_not_summed,
    adapter_on_partial_sums,
    enters_twice,
    base_is_trained,
    saves_own_shard,
    merged_without_scale,
    translates_in_place,
    styles_cached,
    layouts_forgotten,
]


# ---------------------------------------------------------------------------------------------------
# Harness: the same in every lab
# ---------------------------------------------------------------------------------------------------


# Copied from labs/lab6_lora.py
class Unusable(Exception):
    """An argument that cannot work; its message says what would. Ends as `error: ...`, exit 2."""


# Copied from labs/lab6_lora.py
class Wrong(Exception):
    """What a check found wrong with an exercise, and a hint at what usually causes it."""

    def __init__(self, found, hint=""):
        super().__init__(found, hint)
        self.found, self.hint = found, hint


# Copied from labs/lab6_lora.py
def expect(holds, found, hint=""):
    """Raise Wrong where something does not hold."""
    if not holds:
        raise Wrong(found, hint)


# Copied from labs/lab6_lora.py
def expect_close(name, mine, right, tolerance=1e-5, hints=None):
    """Raise Wrong unless ||mine - right|| <= tolerance ||right||; returns the relative error.

    hints {text: tensor}: if mine is that tensor instead, the text is the hint.
    """
    expect(
        isinstance(mine, torch.Tensor),
        f"{name} is {type(mine).__name__}, not a tensor",
        "return the result",
    )
    expect(
        mine.shape == right.shape, f"{name} has shape {tuple(mine.shape)}, not {tuple(right.shape)}"
    )

    def error(other):
        apart = torch.linalg.vector_norm((mine - other).double())
        return (apart / torch.linalg.vector_norm(other.double()).clamp(min=1e-30)).item()

    known = [text for text, other in (hints or {}).items() if other.shape == right.shape]
    known = [text for text in known if error(hints[text]) <= tolerance < error(right)]
    hint = known[0] if known else ""
    expect(
        error(right) <= tolerance,
        f"{name} is off by {error(right):.1e} (at most {tolerance:.0e})",
        hint,
    )
    return error(right)


# Copied from labs/lab6_lora.py
class Traffic(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts what this rank's collectives and sends move while inside it: {op: [calls, bytes]}.

    Bytes of the whole message (all_gather: what comes out; reduce_scatter: what goes in; all_to_all: the
    rank's own input).
    """

    OPS = {"allreduce": "all_reduce", "allgather": "all_gather", "reducescatter": "reduce_scatter"}
    OPS |= {"alltoall": "all_to_all", "send": "send", "broadcast": "broadcast", "reduce": "reduce"}
    OPS |= {
        "gather": "gather",
        "scatter": "scatter",
    }  # a name starts with one of these, the first that fits

    def __init__(self):
        super().__init__()
        self.ops = {}

    def bytes(self, op):
        return self.ops.get(op, [0, 0])[1]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func._opname.replace("_", "")
        op = next((op for start, op in self.OPS.items() if name.startswith(start)), None)
        if op and func.namespace in ("c10d", "_c10d_functional"):
            tensors = [
                [t for t in tree_leaves(x) if isinstance(t, torch.Tensor)] for x in (*args, out)
            ]
            sizes = [sum(t.nbytes for t in ts) for ts in tensors]
            if op == "all_to_all":  # c10d names the output before the input
                sizes = [sizes[1 if func.namespace == "c10d" else 0]]
            entry = self.ops.setdefault(op, [0, 0])
            entry[0] += 1
            entry[1] += max(sizes)
        return out


# Copied from labs/lab6_lora.py
def load(path):
    """The file of a lab, or of a learner's answers to it, as a module."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# Copied from labs/lab6_lora.py
def rank_main(rank, world, rendezvous, pipe, limit, function, args):
    """A rank's process: join the others, run function(group, *args), send back what it returns."""
    os.dup2(
        os.open(os.devnull, os.O_WRONLY), 2
    )  # gloo complains there about ranks that others' errors ended
    signal.alarm(limit)  # its parent ends it long before; this is for a parent that was killed
    torch.set_num_threads(1)
    # torch 2.13 renames all_gather_into_tensor and reduce_scatter_tensor; 2.11 knows only these names
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    store = dist.FileStore(rendezvous, world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    try:
        answer = True, function(dist.group.WORLD, *args)
    except Wrong as wrong:
        answer = False, wrong
    except NotImplementedError as todo:
        answer = False, Wrong(f"not done yet: {todo}")
    except BaseException as problem:  # whatever a learner's code may raise
        frames = traceback.extract_tb(problem.__traceback__)
        ours = [frame.line for frame in frames if not frame.filename.startswith(torch.__path__[0])]
        first = str(problem).partition("\n")[0]
        answer = False, Wrong(f"{type(problem).__name__}: {first} (in: {ours[-1]})")
    pipe.send(answer)
    with suppress(EOFError):
        pipe.recv()  # stay till the end: a rank that leaves early breaks the others' connections


# Copied from labs/lab6_lora.py
def on_ranks(world, function, *args, timeout=60):
    """[function(group, *args) of each rank], run by `world` processes of this machine, over gloo.

    Raises Wrong: the first one that a rank raised, or one naming the ranks still busy after `timeout`
    seconds. function is one of a module's own, and args and results can be pickled.
    """
    context = multiprocessing.get_context(
        "forkserver"
    )  # forks ranks from a process that has torch already
    heavy = {"torch.distributed", "transformers.models.llama.modeling_llama"} & sys.modules.keys()
    context.set_forkserver_preload(
        [*heavy, "torch._dynamo"]
    )  # the first dispatch mode imports that: 2 s
    with tempfile.TemporaryDirectory() as folder, ExitStack() as ending:
        pipes = {}
        for rank in range(world):
            here, there = context.Pipe()
            start = (rank, world, f"{folder}/store", there, int(timeout) + 60, function, args)
            process = context.Process(target=rank_main, args=start, daemon=True)
            process.start()
            ending.callback(process.join)
            ending.callback(process.kill)
            there.close()
            pipes[here] = rank
        busy = dict(pipes)  # those that have not answered
        results, end = [None] * world, time.monotonic() + timeout
        while busy:
            ready = connection.wait(busy, max(0, end - time.monotonic()))
            silent = ", ".join(map(str, busy.values()))
            hint = (
                "a send without its recv, a collective that some rank skips, or a loop without end"
            )
            expect(ready, f"no answer from rank {silent} in {timeout} s", hint)
            wrong = []
            for pipe in ready:
                rank = busy.pop(pipe)
                try:
                    fine, results[rank] = pipe.recv()
                except EOFError:
                    fine, results[rank] = False, Wrong("died")
                wrong += [] if fine else [rank]
            if wrong:  # a death first: the others' errors come of it
                rank = min(wrong, key=lambda rank: results[rank].found != "died")
                raise Wrong(f"rank {rank}: {results[rank].found}", results[rank].hint)
        return results


# Copied from labs/lab6_lora.py
def check_on_rank(group, answers, bug, name, seed):
    """One exercise's check on this rank. answers: the file of the lab, or of a learner's copy of it."""
    lab = load(answers)
    if bug:
        globals()[bug](lab)
    check, _ = CHECKS[name]
    return check(lab, group, seed)


# Copied from labs/lab6_lora.py
def print_table(*rows):
    """Columns aligned to the left, after an empty line."""
    cells = [
        [f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in row] for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(*cells)]
    print(
        "",
        *("  " + "   ".join(c.ljust(w) for c, w in zip(row, widths)).rstrip() for row in cells),
        sep="\n",
    )


# Copied from labs/lab6_lora.py
def run_checks(args):
    """Run every exercise's check; returns {name: {"passed", "report"}}, and prints them as a table."""
    results, rows = {}, [["exercise", "ranks", "", "what was seen"]]
    for name, (_, world) in CHECKS.items():
        try:
            report, passed = (
                on_ranks(world, check_on_rank, __file__, args.inject_bug, name, args.seed)[0],
                True,
            )
        except Wrong as wrong:
            report, passed = wrong.found, False
        results[name] = {"passed": passed, "report": report}
        rows.append([name, world, "PASS" if passed else "FAIL", report])
    print_table(*rows)
    return results


# Copied from labs/lab6_lora.py
def main(argv=None):
    """Returns the exit status: 0 all held, 1 a check failed, 2 unusable arguments."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of the checks' inputs (0)")
    parser.add_argument("--json", metavar="FILE", help="write the results")
    parser.add_argument("--plot", metavar="FILE", help="draw them")
    parser.add_argument(
        "--inject-bug", metavar="NAME", help="run with a bug that must be caught; list: name them"
    )
    add_options(parser)
    try:
        args = parser.parse_args(argv)
        if args.inject_bug == "list":
            print(*(f"  {bug.__name__:28} {bug.__doc__}" for bug in BUGS), sep="\n")
            return 0
        if args.inject_bug not in (None, *(bug.__name__ for bug in BUGS)):
            raise Unusable(f"no bug {args.inject_bug}; --inject-bug list names them")
        for path in (args.json, args.plot):
            if path and (
                Path(path).is_dir() or not os.access(Path(path).absolute().parent, os.W_OK)
            ):
                raise Unusable(f"cannot write {path}: a directory, or in none that can be written")
        results = {"lab": Path(__file__).stem, "exercises": run_checks(args), **experiment(args)}
        failed = [name for name, result in results["exercises"].items() if not result["passed"]]
        failed += [name for name in results.get("failed", []) if name not in failed]
        results["passed"] = not failed
        count = f"all {len(results['exercises'])} exercises' checks hold"
        print(
            f"\n{'FAIL' if failed else 'PASS'} {results['lab']}: {', '.join(failed) or count}",
            flush=True,
        )
        if args.json:
            write_whole(
                args.json, lambda path: Path(path).write_text(json.dumps(results, indent=1) + "\n")
            )
        if args.plot:
            write_whole(args.plot, partial(draw, results))
        return 1 if failed else 0
    except Unusable as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    except Wrong as wrong:  # a rank of an experiment, which has nothing to compare
        print(f"\nFAIL {Path(__file__).stem}: {wrong.found}")
        return 1


# ---------------------------------------------------------------------------------------------------
# Command line
# ---------------------------------------------------------------------------------------------------


# Copied from tp.py
class Parser(argparse.ArgumentParser):
    """argparse, with its complaint raised instead of printed with the usage."""

    def error(self, message):
        raise Unusable(message)


def positive(text):
    """A whole number of at least 1, for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1")
    return int(text)


# Copied from labs/lab6_lora.py
def write_whole(path, write):
    """Have write(another path) make the file, then name it path: whole or not at all, or Unusable."""
    draft = f"{path}.{os.getpid()}{Path(path).suffix}"
    try:
        write(draft)
        os.replace(draft, path)
    except (
        OSError,
        ValueError,
    ) as problem:  # a full disk; a picture of a kind that matplotlib lacks
        raise Unusable(f"cannot write {path}: {problem}") from None
    finally:
        Path(draft).unlink(missing_ok=True)


def add_options(parser):
    """The option of this lab's own."""
    rank = {"type": positive, "default": 8, "metavar": "R", "help": "r of the first experiment (8)"}
    parser.add_argument("--lora-rank", **rank)


if __name__ == "__main__":
    sys.exit(main())
