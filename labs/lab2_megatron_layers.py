"""Lab 2: Megatron's layers. One matrix, one table and one softmax, each cut over P ranks.

How do you cut a linear layer, an embedding and the loss so that every rank holds 1/P of the weights, and
outputs, gradients and loss stay those of one device? An MLP, h -> i -> h, on P = 2 ranks:

    tensor parallel                       with sequence parallelism
      x (b, s, h)      on both ranks        x (b, s/2, h)    half of the tokens each
        | copy_to_tp_region       (f)         | gather_from_sp_region         (g)
      W1 (i/2, h)      column parallel      W1 (i/2, h)      all tokens, half of the features
      gelu (b, s, i/2)                      gelu (b, s, i/2)
      W2 (h, i/2)      row parallel         W2 (h, i/2)      a partial sum of the whole output
        | reduce_from_tp_region   (g)         | reduce_scatter_to_sp_region   (g*)
      y (b, s, h)      on both ranks        y (b, s/2, h)    half of the tokens each

Columns first, rows second: gelu needs no communication between them. (Columns and rows are those of the
paper's x W; torch keeps W transposed, as (out, in).) The functions at the edges come in pairs, each the
other's mirror image in the backward:

    region function                forward           backward          message
    copy_to_tp_region              nothing           all-reduce        (b, s, h)
    reduce_from_tp_region          all-reduce        nothing           (b, s, h)
    gather_from_sp_region          all-gather        reduce-scatter    (b, s, h)
    reduce_scatter_to_sp_region    reduce-scatter    all-gather        (b, s, h)

The vocabulary is cut by tokens. A rank looks up the tokens whose rows it holds, zeros stand for the others,
and a sum puts them together. The logits (b, s, v/P) are never gathered: with q the distribution wanted of
the model (1 at the target, or smoothed) and x the logits of a token,

    loss = log(sum of exp(x)) - sum of q x           d loss / d x = softmax(x) - q

and each of the sums is a sum of P partial sums: two all-reduces, three numbers a token instead of v.

    python labs/lab2_megatron_layers.py                       # checks and experiments, about 20 s
    python labs/lab2_megatron_layers.py --plot lab2.png --json lab2.json
    python labs/lab2_megatron_layers.py --inject-bug list
    python labs/lab2_megatron_layers.py --length 1001         # no number has to divide another

Sources: Megatron-LM, arXiv 1909.08053 (columns, rows, vocabulary) and 2205.05198 (sequence parallelism).
Megatron-LM: megatron/core/tensor_parallel/{layers,mappings,cross_entropy}.py. Nanotron:
src/nanotron/parallel/tensor_parallel/ (ALL_REDUCE is our tensor parallel, REDUCE_SCATTER adds sequence
parallelism). NeMo AutoModel: the same by DTensor plans, components/distributed/optimized_tp_plans.py.
DeepSpeed: module_inject/layers.py (LinearLayer, LinearAllreduce).
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
from contextlib import ExitStack, suppress
from functools import partial
from multiprocessing import connection
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves

# ---------------------------------------------------------------------------------------------------
# The lesson 1: the regions' edges
# ---------------------------------------------------------------------------------------------------


# Copied from tp.py
def all_reduce(x, group, op=dist.ReduceOp.SUM):
    """The sum (or max) of x over ranks, in a new tensor: autograd may still need the old one."""
    if group.size() == 1:
        return x
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, op, group=group)
    return x


def all_gather(x, group):
    """Every rank's tokens (b, s/P, h), as many on each -> all tokens (b, s, h)."""
    x = x.transpose(0, 1).contiguous()  # ranks are joined along dim 0: why Megatron keeps (s, b, h)
    out = x.new_empty(x.shape[0] * group.size(), *x.shape[1:])
    dist.all_gather_into_tensor(out, x, group=group)
    return out.transpose(0, 1)


def reduce_scatter(x, group):
    """The sum of all ranks' (b, s, h), of which each rank receives its own tokens (b, s/P, h).

    Where P does not divide s, zeros follow the last token: each rank receives s/P rounded up.
    """
    x = F.pad(x, (0, 0, 0, -x.shape[1] % group.size())).transpose(0, 1).contiguous()
    out = x.new_empty(x.shape[0] // group.size(), *x.shape[1:])
    dist.reduce_scatter_tensor(out, x, group=group)
    return out.transpose(0, 1)


class CopyToTPRegion(torch.autograd.Function):
    """Forward x as it is, backward the sum of the ranks' gradients (Megatron's f).

    x (b, s, h), whole on every rank, enters layers of which each rank holds a part. grad (b, s, h) is what
    came back through this rank's part alone. Tensors that are given are not written to.
    """

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        # exercise: copy_to_tp_region
        return x
        # end exercise

    @staticmethod
    def backward(ctx, grad):
        # exercise: copy_to_tp_region
        return all_reduce(grad, ctx.group), None
        # end exercise


class ReduceFromTPRegion(torch.autograd.Function):
    """Forward the sum of the ranks' x, backward the gradient as it is (Megatron's g).

    x (b, s, h) is this rank's partial sum. y is x plus what others brought: the gradient of x is that of y,
    and every rank has it.
    """

    @staticmethod
    def forward(ctx, x, group):
        # exercise: reduce_from_tp_region
        return all_reduce(x, group)
        # end exercise

    @staticmethod
    def backward(ctx, grad):
        # exercise: reduce_from_tp_region
        return grad, None
        # end exercise


class GatherFromSPRegion(torch.autograd.Function):
    """Forward all tokens (b, s, h), backward the sum of the ranks' gradients for own tokens (b, s/P, h).

    f under sequence parallelism: x (b, s/P, h) is the rank's tokens, as many on each. Every rank goes on
    with all of them, so each has a part of the gradient of each.
    """

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        # exercise: gather_from_sp_region
        return all_gather(x, group)
        # end exercise

    @staticmethod
    def backward(ctx, grad):
        # exercise: gather_from_sp_region
        return reduce_scatter(grad, ctx.group), None
        # end exercise


class ReduceScatterToSPRegion(torch.autograd.Function):
    """Forward own tokens (b, s/P, h) of the sum of the ranks' x, backward the gradient of all tokens.

    g under sequence parallelism: x (b, s, h) is this rank's partial sum for all tokens, and so its gradient
    is (b, s, h). P need not divide s = ctx.length: reduce_scatter() then puts zeros behind the last token,
    whose gradient belongs to nobody.
    """

    @staticmethod
    def forward(ctx, x, group):
        ctx.group, ctx.length = group, x.shape[1]
        # exercise: reduce_scatter_to_sp_region
        return reduce_scatter(x, group)
        # end exercise

    @staticmethod
    def backward(ctx, grad):
        # exercise: reduce_scatter_to_sp_region
        return all_gather(grad, ctx.group)[:, : ctx.length], None
        # end exercise


copy_to_tp_region = CopyToTPRegion.apply  # (x (b, s, h), group) -> (b, s, h)
reduce_from_tp_region = ReduceFromTPRegion.apply  # (x (b, s, h), group) -> (b, s, h)
gather_from_sp_region = GatherFromSPRegion.apply  # (x (b, s/P, h), group) -> (b, s, h)
reduce_scatter_to_sp_region = ReduceScatterToSPRegion.apply  # (x (b, s, h), group) -> (b, s/P, h)


# ---------------------------------------------------------------------------------------------------
# The lesson 2: linear layers
# ---------------------------------------------------------------------------------------------------


# Copied from tp.py
def split(n, rank, world):
    """[start, end) of the rank's share of n things: the first n % world ranks hold one more."""
    base, extra = divmod(n, world)
    return rank * base + min(rank, extra), (rank + 1) * base + min(rank + 1, extra)


def keep(parameter, dim, start, end):
    """A Parameter of its own with rows (dim 0) or columns (dim 1) [start, end) of a full one.

    A clone: a view would keep the whole tensor in memory.
    """
    return nn.Parameter(parameter.detach().narrow(dim, start, end - start).clone())


class GatheredLinear(torch.autograd.Function):
    """F.linear(gather_from_sp_region(x), weight, bias), of which only the shard x is kept for the backward.

    x (b, s/P, in), weight (out/P, in), bias (out/P) or None -> (b, s, out/P). Autograd would keep the
    gathered (b, s, in) for the gradient of the weight; here the backward gathers x again. Megatron-LM's
    LinearWithGradAccumulationAndAsyncCommunication does, and hides the messages behind its matmuls.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, group):
        ctx.group = group
        # exercise: gathered_linear
        ctx.save_for_backward(x, weight)
        return F.linear(all_gather(x, group), weight, bias)
        # end exercise

    @staticmethod
    def backward(
        ctx, grad
    ):  # (b, s, out/P); returns the gradients of x, weight, bias (None if it has none)
        # exercise: gathered_linear
        x, weight = ctx.saved_tensors
        dx = reduce_scatter(grad @ weight, ctx.group)  # (b, s/P, in)
        grad = grad.flatten(0, 1)  # (b * s, out/P)
        dw = grad.T @ all_gather(x, ctx.group).flatten(0, 1)  # (out/P, in)
        db = grad.sum(0) if ctx.needs_input_grad[2] else None
        return dx, dw, db, None
        # end exercise


gathered_linear = GatheredLinear.apply  # (x (b, s/P, in), weight, bias, group) -> (b, s, out/P)


class ColumnParallelLinear(nn.Module):
    """A linear layer of which each rank computes some of the output features (Megatron-LM).

    weight (out/P, in), bias (out/P) or None. x (b, s, in), the same on every rank, -> (b, s, out/P); under
    sequence parallelism x is the rank's tokens (b, s/P, in), and the output still of all of them.
    """

    def __init__(self, weight, bias, group, sequence_parallel):
        super().__init__()
        self.weight, self.bias = weight, bias
        self.group, self.sequence_parallel = group, sequence_parallel

    @classmethod
    def from_linear(cls, linear, group, sequence_parallel=False):
        """This rank's part of an nn.Linear(in, out): output features split(out, rank, world)."""
        # exercise: column_parallel_linear
        start, end = split(linear.out_features, group.rank(), group.size())
        bias = keep(linear.bias, 0, start, end) if linear.bias is not None else None
        return cls(keep(linear.weight, 0, start, end), bias, group, sequence_parallel)
        # end exercise

    def forward(self, x):
        # exercise: column_parallel_linear
        if self.sequence_parallel:
            return gathered_linear(x, self.weight, self.bias, self.group)
        return F.linear(copy_to_tp_region(x, self.group), self.weight, self.bias)
        # end exercise


class RowParallelLinear(nn.Module):
    """A linear layer of which each rank reads some of the input features (Megatron-LM).

    weight (out, in/P); bias (out) on rank 0, None on the others. x (b, s, in/P), what a column parallel
    layer puts out, -> (b, s, out), the same on every rank; under sequence parallelism the rank's tokens
    (b, s/P, out).

    The bias is added once: by rank 0 and before the sum, as in Nanotron. Its gradient is then complete with
    and without sequence parallelism. Megatron-LM adds it on every rank after the sum; under sequence
    parallelism each rank's bias then sees its own tokens only, and the gradients are summed afterwards.
    """

    def __init__(self, weight, bias, group, sequence_parallel):
        super().__init__()
        self.weight, self.bias = weight, bias
        self.group, self.sequence_parallel = group, sequence_parallel

    @classmethod
    def from_linear(cls, linear, group, sequence_parallel=False):
        """This rank's part of an nn.Linear(in, out): input features split(in, rank, world)."""
        # exercise: row_parallel_linear
        start, end = split(linear.in_features, group.rank(), group.size())
        mine = linear.bias is not None and group.rank() == 0
        bias = keep(linear.bias, 0, 0, linear.out_features) if mine else None
        return cls(keep(linear.weight, 1, start, end), bias, group, sequence_parallel)
        # end exercise

    def forward(self, x):
        # exercise: row_parallel_linear
        leave = reduce_scatter_to_sp_region if self.sequence_parallel else reduce_from_tp_region
        return leave(F.linear(x, self.weight, self.bias), self.group)
        # end exercise


# ---------------------------------------------------------------------------------------------------
# The lesson 3: the vocabulary
# ---------------------------------------------------------------------------------------------------


def vocab_range(vocab, rank, world):
    """Token ids [start, end) whose embeddings and logits a rank holds.

    Megatron-LM pads the vocabulary until P divides it; here the first ranks hold one more instead.
    Raises ValueError where a rank would hold none.
    """
    if vocab < world:
        raise ValueError(f"{vocab} tokens cannot be cut over {world} ranks; {vocab} ranks would do")
    return split(vocab, rank, world)


class VocabParallelEmbedding(nn.Module):
    """Rows [start, end) of an nn.Embedding (Megatron-LM). weight (v/P, h).

    ids (b, s), the same on every rank, -> (b, s, h); under sequence parallelism the rank's tokens
    (b, s/P, h), by a reduce-scatter instead of the all-reduce: half of the bytes on the wire.
    """

    def __init__(self, weight, vocab, padding_idx, group, sequence_parallel):
        super().__init__()
        self.weight, self.vocab, self.padding_idx = weight, vocab, padding_idx
        self.group, self.sequence_parallel = group, sequence_parallel
        self.start, self.end = vocab_range(vocab, group.rank(), group.size())

    @classmethod
    def from_embedding(cls, embedding, group, sequence_parallel=False):
        """This rank's part of an nn.Embedding(v, h): rows vocab_range(v, rank, world)."""
        start, end = vocab_range(embedding.num_embeddings, group.rank(), group.size())
        pad = embedding.padding_idx  # a row that nn.Embedding gives no gradient
        pad = pad - start if pad is not None and start <= pad < end else None
        weight = keep(embedding.weight, 0, start, end)
        return cls(weight, embedding.num_embeddings, pad, group, sequence_parallel)

    def forward(self, ids):
        """Look up the ids that this rank holds, let the others be zero, and sum over the ranks.

        F.embedding(rows, weight, padding_idx) wants rows of this rank's weight.
        """
        if ((ids < 0) | (ids >= self.vocab)).any():  # no rank would hold it: silently a zero
            raise IndexError(f"a token is not in [0, {self.vocab})")
        # exercise: vocab_parallel_embedding
        elsewhere = (ids < self.start) | (ids >= self.end)
        rows = (ids - self.start).masked_fill(elsewhere, 0)
        out = F.embedding(rows, self.weight, self.padding_idx).masked_fill(elsewhere[..., None], 0)
        leave = reduce_scatter_to_sp_region if self.sequence_parallel else reduce_from_tp_region
        return leave(out, self.group)
        # end exercise


def shard_offset(logits, group):
    """(start, vocab): the token of this rank's first column, and how many tokens there are on all ranks.

    One all-reduce of P whole numbers, because the loss is given nothing but the shard. A trainer knows.
    """
    widths = torch.zeros(group.size(), dtype=torch.int64, device=logits.device)
    widths[group.rank()] = logits.shape[-1]
    widths = all_reduce(widths, group).tolist()
    return sum(widths[: group.rank()]), sum(widths)


class VocabParallelCrossEntropy(torch.autograd.Function):
    """loss = log(sum of exp(x)) - sum of q x, with the logits x of a token cut over the ranks (Megatron-LM).

    logits (..., v/P), columns [start, start + v/P) of v; target (...). Returns the loss of each token (...),
    the same on every rank. q, what the model should say, is 1 - smoothing at the target plus smoothing / v
    everywhere: torch's definition. Its sum over the vocabulary is 1, whatever P is.
    """

    @staticmethod
    def forward(ctx, logits, target, start, vocab, group, smoothing):
        """Find column, elsewhere, peak, sum_exp and wanted, all of them (...).

        column (int64) is the target's in this shard, 0 where another rank holds it (elsewhere, bool); peak
        the largest logit of the whole vocabulary, taken off every logit so that exp() stays finite; sum_exp
        the sum of exp(x - peak) and wanted that of q (x - peak), over the whole vocabulary. A logit may be
        minus infinity where nothing is smoothed.
        """
        wide = logits.to(
            torch.promote_types(logits.dtype, torch.float32)
        )  # bfloat16 has too few digits
        # exercise: cross_entropy_forward
        elsewhere = (target < start) | (target >= start + logits.shape[-1])
        column = (target - start).masked_fill(elsewhere, 0)
        peak = all_reduce(wide.max(-1).values, group, dist.ReduceOp.MAX)
        shifted = wide - peak[..., None]  # not in place: wide may be the caller's logits
        wanted = shifted.gather(-1, column[..., None])[..., 0].masked_fill(elsewhere, 0)
        if smoothing:  # 0 times a logit of minus infinity would be no number
            wanted = (1 - smoothing) * wanted + smoothing / vocab * shifted.sum(-1)
        wanted, sum_exp = all_reduce(torch.stack([wanted, shifted.exp().sum(-1)]), group)
        # end exercise
        ctx.save_for_backward(logits, column, elsewhere, peak, sum_exp)
        ctx.vocab, ctx.smoothing = vocab, smoothing
        return sum_exp.log() - wanted

    @staticmethod
    def backward(ctx, grad):
        """Make dx (..., v/P), this rank's columns of (softmax - q) grad, in float32; nothing is sent."""
        logits, column, elsewhere, peak, sum_exp = ctx.saved_tensors
        # exercise: cross_entropy_backward
        dx = (logits - peak[..., None]).exp() / sum_exp[..., None]  # softmax
        dx -= ctx.smoothing / ctx.vocab
        dx.scatter_add_(
            -1, column[..., None], (ctx.smoothing - 1) * (~elsewhere)[..., None].to(dx.dtype)
        )
        dx *= grad[..., None]
        # end exercise
        return dx.to(logits.dtype), None, None, None, None, None


def vocab_parallel_cross_entropy(
    logits_shard, target, group, label_smoothing=0.0, ignore_index=-100
):
    """F.cross_entropy(logits, target, reduction="none"), from this rank's columns of the logits.

    logits_shard (..., v/P): columns vocab_range(v, rank, world). target (...): ids of the whole vocabulary,
    the same on every rank. Returns the loss of each token (...), in float32 or better, the same on every
    rank; 0 where target is ignore_index. Raises IndexError for a target that no rank holds, ValueError for a
    label_smoothing outside [0, 1].
    """
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing {label_smoothing} is not in [0, 1]")
    start, vocab = shard_offset(logits_shard, group)
    ignored = target == ignore_index
    if (~ignored & ((target < 0) | (target >= vocab))).any():
        raise IndexError(f"a target is neither in [0, {vocab}) nor {ignore_index}")
    loss = VocabParallelCrossEntropy.apply(
        logits_shard, target, start, vocab, group, label_smoothing
    )
    return loss.masked_fill(ignored, 0)


# ---------------------------------------------------------------------------------------------------
# Checks
# ---------------------------------------------------------------------------------------------------

IN_PLACE = "a collective works in place, and so does -=; do it to a new tensor"
SUM = "every rank's part goes into the sum"


def on_groups(check):
    """The check on ranks 0-1 and 2-3 side by side, then on ranks 0-2, whose number divides no size."""

    def both(lab, group, seed):
        pairs = [
            dist.new_group([0, 1]),
            dist.new_group([2, 3]),
        ]  # every rank takes part in making each
        three = dist.new_group([0, 1, 2])
        check(lab, pairs[group.rank() // 2], seed)
        return check(lab, three, seed) if group.rank() < 3 else None

    return both


def draw_from(seed, group):
    """(uneven, randn): uneven() is a size of 5 to 29 that the group does not divide, randn(*shape) a tensor.

    All ranks of a group draw the same. Another group draws equal sizes and other numbers: a collective that
    forgets its group then gives a wrong result instead of waiting for ranks that never come.
    """
    first = dist.get_process_group_ranks(group)[0]
    sizes = torch.Generator().manual_seed(seed)
    numbers = torch.Generator().manual_seed(seed + first)

    def uneven():
        whole, rest = torch.randint(2, 10, (2,), generator=sizes).tolist()
        return whole * group.size() + 1 + rest % (group.size() - 1)

    return uneven, partial(torch.randn, generator=numbers)


def tokens_of(x, group):
    """This rank's tokens of x (b, s, h) under sequence parallelism: (b, s/P rounded up, h), with zeros."""
    x = F.pad(x, (0, 0, 0, -x.shape[1] % group.size()))
    return x.chunk(group.size(), 1)[group.rank()].clone()


def real_tokens(length, group):
    """How many of this rank's tokens are not there to fill up."""
    share = math.ceil(length / group.size())
    return min(share, max(0, length - group.rank() * share))


def expect_traffic(when, traffic, **most):
    """Raise Wrong unless each collective moves at most so many bytes; those not named none."""
    for op, (calls, sent) in traffic.ops.items():
        allowed = most.get(op, 0)
        enough = f"{allowed} will do" if allowed else "none are needed"
        expect(sent <= allowed, f"{when}: {op} moves {sent} bytes, calls: {calls}; {enough}")


class Kept(torch.autograd.graph.saved_tensors_hooks):
    """Counts the bytes that autograd keeps for the backward of what runs inside it, each storage once.

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


def expect_parts(layer, full, parts):
    """Raise Wrong unless each parameter is its part of the full layer's and no more, and so its gradient.

    parts {name: slice}.
    """
    for name, part in parts.items():
        mine, right = getattr(layer, name), getattr(full, name)
        if right is None:
            expect(mine is None, f"there is a {name}, and the full layer has none")
            continue
        expect_close(name, mine, right[part], 0)
        expect_close(f"the gradient of {name}", mine.grad, right.grad[part])
        held = mine.untyped_storage().nbytes()
        expect(
            held == mine.nbytes,
            f"{name} keeps {held} bytes, not {mine.nbytes}",
            "a view keeps the whole",
        )


def run_and_compare(layer, given, wanted, hints):
    """Run layer(x) and its backward, compare values and gradients, and see that no input is written to.

    given {"x", "dy"}; wanted {"y", "dx", "forward", "backward"}, the last two {op: bytes}; hints {"y", "dx"}:
    as expect_close takes them. Returns the largest relative error.
    """
    x, dy = given["x"].clone().requires_grad_(), given["dy"].clone()
    with Traffic() as traffic:
        y = layer(x)
    error = expect_close("y", y, wanted["y"], hints=hints["y"])
    expect(torch.equal(x, given["x"]), "x is overwritten", IN_PLACE)
    expect_traffic("forward", traffic, **wanted["forward"])
    with Traffic() as traffic:
        y.backward(dy)
    expect(
        torch.equal(dy, given["dy"]), "the gradient given to the backward is overwritten", IN_PLACE
    )
    error = max(error, expect_close("dx", x.grad, wanted["dx"], hints=hints["dx"]))
    expect_traffic("backward", traffic, **wanted["backward"])
    return error


def check_copy_to_tp_region(lab, group, seed):
    uneven, randn = draw_from(seed, group)
    x = randn(2, uneven(), uneven())
    dys = [randn(x.shape) for _ in range(group.size())]
    own = dys[group.rank()]
    hints = {"y": {}, "dx": {SUM: own, "the mean is not the sum": sum(dys) / group.size()}}
    wanted = {"y": x, "dx": sum(dys), "forward": {}, "backward": {"all_reduce": x.nbytes}}
    error = run_and_compare(
        lambda x: lab.copy_to_tp_region(x, group), {"x": x, "dy": own}, wanted, hints
    )
    return f"y is x; dx is the sum, off by {error:.0e}; {x.nbytes} bytes reduced"


def check_reduce_from_tp_region(lab, group, seed):
    uneven, randn = draw_from(seed, group)
    shape, P = (2, uneven(), uneven()), group.size()
    xs, dy = [randn(shape) for _ in range(P)], randn(shape)
    own = xs[group.rank()]
    too_large = {"dy is the same on all ranks, and summed it is P times too large": P * dy}
    wanted = {"y": sum(xs), "dx": dy, "forward": {"all_reduce": dy.nbytes}, "backward": {}}
    hints = {"y": {SUM: own}, "dx": too_large}
    error = run_and_compare(
        lambda x: lab.reduce_from_tp_region(x, group), {"x": own, "dy": dy}, wanted, hints
    )
    return f"y is the sum, off by {error:.0e}; dx is dy; {dy.nbytes} bytes reduced"


def check_gather_from_sp_region(lab, group, seed):
    uneven, randn = draw_from(seed, group)
    P, rank, n, h = group.size(), group.rank(), uneven(), uneven()  # n tokens a rank
    x, dys = randn(2, n * P, h), [randn(2, n * P, h) for _ in range(P)]
    own = slice(rank * n, (rank + 1) * n)
    wanted = {"y": x, "dx": sum(dys)[:, own]}
    wanted |= {"forward": {"all_gather": x.nbytes}, "backward": {"reduce_scatter": x.nbytes}}
    joined = torch.cat(x.chunk(P, 1)).reshape(x.shape)
    hints = {
        "y": {"ranks are joined along dim 0, tokens are dim 1": joined},
        "dx": {SUM: dys[rank][:, own]},
    }
    given = {"x": x[:, own].clone(), "dy": dys[rank]}
    error = run_and_compare(lambda x: lab.gather_from_sp_region(x, group), given, wanted, hints)
    return f"all tokens; dx is the sum of own tokens' parts, off by {error:.0e}; {x.nbytes} bytes each way"


def check_reduce_scatter_to_sp_region(lab, group, seed):
    uneven, randn = draw_from(seed, group)
    P, rank, shape = (
        group.size(),
        group.rank(),
        (2, uneven(), uneven()),
    )  # P does not divide the tokens
    xs = [randn(shape) for _ in range(P)]
    y, dy = tokens_of(sum(xs), group), randn(shape)
    nbytes = P * y.nbytes  # with the zeros at the end
    wanted = {
        "y": y,
        "dx": dy,
        "forward": {"reduce_scatter": nbytes},
        "backward": {"all_gather": nbytes},
    }
    hints = {"y": {SUM: tokens_of(xs[rank], group)}, "dx": {"dy is the same on all ranks": P * dy}}
    given = {"x": xs[rank], "dy": tokens_of(dy, group)}
    error = run_and_compare(
        lambda x: lab.reduce_scatter_to_sp_region(x, group), given, wanted, hints
    )
    return f"own tokens of the sum, off by {error:.0e}; dx of all tokens; {nbytes} bytes each way"


def one_device(randn, tokens, features_in, features_out, bias):
    """An nn.Linear, x (2, tokens, in), y (2, tokens, out), and their gradients dx, dy; W's is in .grad."""
    linear = nn.Linear(features_in, features_out, bias)
    for parameter in linear.parameters():
        parameter.data = randn(parameter.shape)
    x = randn(2, tokens, features_in).requires_grad_()
    y, dy = linear(x), randn(2, tokens, features_out)
    y.backward(dy)
    return linear, x.detach(), y.detach(), x.grad, dy


def check_gathered_linear(lab, group, seed):
    uneven, randn = draw_from(seed, group)
    P, rank, tokens = group.size(), group.rank(), uneven()  # tokens a rank
    linear, x, y, dx, dy = one_device(randn, tokens * P, uneven(), uneven(), True)
    start, end = split(linear.out_features, rank, P)
    weight, bias = (keep(p, 0, start, end) for p in (linear.weight, linear.bias))
    y, dy, mine = y[..., start:end], dy[..., start:end].clone(), tokens_of(x, group)
    with Kept(weight, bias) as kept:
        lab.gathered_linear(mine.clone().requires_grad_(), weight, bias, group)
    expect(
        kept.bytes <= mine.nbytes,
        f"{kept.bytes} bytes are kept for the backward; {mine.nbytes} will do",
        "keep the shard x, not the gathered one",
    )
    wanted = {"y": y, "dx": tokens_of(dx, group), "forward": {"all_gather": x.nbytes}}
    wanted["backward"] = {"all_gather": x.nbytes, "reduce_scatter": x.nbytes}
    hints = {"y": {}, "dx": {SUM: tokens_of(dy @ weight.detach(), group)}}
    error = run_and_compare(
        lambda x: lab.gathered_linear(x, weight, bias, group), {"x": mine, "dy": dy}, wanted, hints
    )
    expect_close("gradient of weight", weight.grad, linear.weight.grad[start:end])
    expect_close("gradient of bias", bias.grad, linear.bias.grad[start:end])
    lab.gathered_linear(mine, weight, None, group).backward(dy)  # a layer without bias
    return f"y, dx, dW, db, off by {error:.0e}; {kept.bytes} bytes kept of {x.nbytes}"


def check_column_parallel_linear(lab, group, seed):
    uneven, randn = draw_from(seed, group)
    P, tokens, worst = group.size(), uneven(), 0
    for parallel, bias in itertools.product([False, True], [True, False]):
        linear, x, y, dx, dy = one_device(randn, tokens, uneven(), uneven(), bias)
        start, end = split(linear.out_features, group.rank(), P)
        part, weight = slice(start, end), linear.weight.detach()
        layer = lab.ColumnParallelLinear.from_linear(linear, group, sequence_parallel=parallel)
        given = {"x": x, "dy": dy[..., part].clone()}
        wanted = {"y": y[..., part], "dx": dx, "forward": {}, "backward": {"all_reduce": x.nbytes}}
        lacking = given["dy"] @ weight[part]  # dx through this rank's part alone
        if parallel:
            given["x"], wanted["dx"], lacking = (tokens_of(t, group) for t in (x, dx, lacking))
            gathered = P * given["x"].nbytes
            wanted["forward"] = {"all_gather": gathered}
            wanted["backward"] = {"all_gather": gathered, "reduce_scatter": gathered}
        hints = {"y": {"the bias is missing": x @ weight[part].T}, "dx": {SUM: lacking}}
        run = partial(first_tokens, layer, tokens)
        worst = max(worst, run_and_compare(run, given, wanted, hints))
        expect_parts(layer, linear, {"weight": part, "bias": part})
    return f"y, dx, dW, db, off by {worst:.0e}, with and without sequence parallelism, bias"


def check_row_parallel_linear(lab, group, seed):
    uneven, randn = draw_from(seed, group)
    P, rank, tokens, worst = group.size(), group.rank(), uneven(), 0
    for parallel, bias in itertools.product([False, True], [False, True]):
        linear, x, y, dx, dy = one_device(randn, tokens, uneven(), uneven(), bias)
        start, end = split(linear.in_features, rank, P)
        layer = lab.RowParallelLinear.from_linear(linear, group, sequence_parallel=parallel)
        given = {"x": x[..., start:end].clone(), "dy": dy}
        wanted = {
            "y": y,
            "dx": dx[..., start:end],
            "forward": {"all_reduce": y.nbytes},
            "backward": {},
        }
        count = tokens
        if parallel:
            share, count = tokens_of(y, group), real_tokens(tokens, group)
            wanted |= {"forward": {"reduce_scatter": P * share.nbytes}, "y": share[:, :count]}
            wanted |= {"backward": {"all_gather": P * share.nbytes}}
            given["dy"] = dy = tokens_of(dy, group)[:, :count]
        hints = {
            "dx": {
                "dy is the same on all ranks, and summed it is P times too large": P * wanted["dx"]
            }
        }
        hints["y"] = {}
        if bias:
            once = linear.bias.detach()
            hints["y"] = {"the bias is added on every rank": wanted["y"] + (P - 1) * once}
            hints["y"] |= {"the bias is missing": wanted["y"] - once}
        run = partial(first_tokens, layer, count)
        worst = max(worst, run_and_compare(run, given, wanted, hints))
        if bias and layer.bias is not None:
            own_tokens = {"it saw this rank's tokens only": dy.sum((0, 1))}
            expect_close(
                "the gradient of bias", layer.bias.grad, linear.bias.grad, hints=own_tokens
            )
        if rank == 0:
            expect_parts(layer, linear, {"bias": slice(None)})
        expect_parts(layer, linear, {"weight": (slice(None), slice(start, end))})
    expect(
        rank == 0 or layer.bias is None, "there is a bias on this rank too", "only rank 0 adds it"
    )
    return f"y, dx, dW, db, off by {worst:.0e}, with and without sequence parallelism, bias"


def first_tokens(layer, count, x):
    """layer(x) without the zeros that follow the last token."""
    return layer(x)[:, :count]


def draw_ids(randn, shape, vocab, world):
    """Token ids of that shape: at first those at the edges of every rank's range, then any."""
    ids = randn(shape).abs().mul(vocab).long() % vocab
    edges = [edge for rank in range(world) for edge in split(vocab, rank, world)]
    ids.view(-1)[: 2 * world] = torch.tensor(edges) - torch.tensor([0, 1] * world)
    return ids


def check_vocab_parallel_embedding(lab, group, seed):
    uneven, randn = draw_from(seed, group)
    P, rank, tokens, vocab, h = group.size(), group.rank(), uneven(), uneven(), uneven()
    ids, worst = draw_ids(randn, (2, tokens), vocab, P), 0
    start, end = split(vocab, rank, P)
    elsewhere = (ids < start) | (ids >= end)
    for parallel, pad in itertools.product([False, True], [None, vocab - 1]):
        embedding = nn.Embedding(vocab, h, pad, _weight=randn(vocab, h))
        y, dy = embedding(ids), randn(2, tokens, h)
        y.backward(dy)
        y = y.detach()
        layer = lab.VocabParallelEmbedding.from_embedding(
            embedding, group, sequence_parallel=parallel
        )
        first = embedding.weight.detach()[start].expand_as(
            y
        )  # what a token of another rank's rows may add
        hints = {SUM: y.masked_fill(elsewhere[..., None], 0)}
        hints["a token of another rank's rows adds zeros"] = y + all_reduce(
            elsewhere[..., None] * first, group
        )
        wanted = {"y": y, "forward": {"all_reduce": y.nbytes}, "backward": {}}
        if parallel:
            hints = {text: tokens_of(t, group) for text, t in hints.items()}
            dy, wanted["y"] = tokens_of(dy, group), tokens_of(y, group)
            nbytes = P * dy.nbytes
            wanted |= {"forward": {"reduce_scatter": nbytes}, "backward": {"all_gather": nbytes}}
        wanted["dx"] = embedding.weight.grad[start:end]
        mine = ids.clone()
        worst = max(
            worst,
            run_and_compare(
                lambda weight, layer=layer, ids=mine: functional_call(
                    layer, {"weight": weight}, ids
                ),
                {"x": layer.weight.detach(), "dy": dy},
                wanted,
                {"y": hints, "dx": {}},
            ),
        )
        expect(torch.equal(ids, mine), "the ids are overwritten", IN_PLACE)
    return f"y, dW, off by {worst:.0e}, with and without sequence parallelism, padding row"


def draw_logits(randn, uneven, group):
    """Logits (2, s, v), targets (2, s), some of them ignored (-100), and this rank's range: start, end."""
    tokens, vocab = uneven(), uneven()
    logits = 3 * randn(2, tokens, vocab) + 200 * randn(2, tokens, 1)  # exp() of it is not finite
    target = draw_ids(randn, (2, tokens), vocab, group.size())
    target[-1, -2:] = -100
    return logits, target, *split(vocab, group.rank(), group.size())


def check_cross_entropy_forward(lab, group, seed):
    uneven, randn = draw_from(seed, group)
    logits, target, start, end = draw_logits(randn, uneven, group)
    vocab, P, worst = logits.shape[-1], group.size(), 0
    ignore_first = target.masked_fill(target == -100, 0)  # with ignore_index=0
    for smoothing, ignore, wanted in (
        (0.0, -100, target),
        (0.1, -100, target),
        (0.3, 0, ignore_first),
    ):
        x = logits.clone()
        if not smoothing:  # a padded vocabulary has logits of minus infinity
            x[..., vocab // 2].masked_fill_(wanted != vocab // 2, -torch.inf)
        right = one_device_loss(x, wanted, smoothing, ignore)
        shard = x[..., start:end].clone()
        with Traffic() as traffic:
            mine = lab.vocab_parallel_cross_entropy(shard, wanted, group, smoothing, ignore)
        expect(
            not mine.isnan().any(),
            "the loss is not a number",
            "0 times a logit of minus infinity is none",
        )
        expect(mine.isfinite().all(), "the loss is infinite", "take the peak off before exp()")
        hints = usual_losses(x - x.amax(-1, keepdim=True), wanted, smoothing, ignore, group)
        worst = max(worst, expect_close("the loss", mine, right, hints=hints))
        expect(torch.equal(shard, x[..., start:end]), "the logits are overwritten", IN_PLACE)
        expect_traffic("forward", traffic, all_reduce=3 * right.nbytes + 8 * P)  # and the P widths
    return f"the loss of each token, off by {worst:.0e}, smoothed or not; 3 numbers a token sent, not {vocab}"


def one_device_loss(logits, target, smoothing, ignore):
    """torch's loss of each token, from logits (b, s, v)."""
    options = {"label_smoothing": smoothing, "ignore_index": ignore, "reduction": "none"}
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), **options).view_as(target)


def usual_losses(logits, target, smoothing, ignore, group):
    """{hint: the loss which that mistake gives}, from all logits (b, s, v), their peak taken off."""
    P, vocab, ignored = group.size(), logits.shape[-1], target == ignore
    target = target.masked_fill(ignored, 0)
    start, end = split(vocab, group.rank(), P)
    shards = [logits[..., slice(*split(vocab, rank, P))] for rank in range(P)]
    own, elsewhere = logits[..., start:end], (target < start) | (target >= end)
    log_sum, mean = logits.logsumexp(-1), logits.mean(-1) if smoothing else 0
    at_target = logits.gather(-1, target[..., None])[..., 0]

    def look_up(shard):  # with the target as a column of its own
        column = target.clamp(max=shard.shape[-1] - 1)
        return shard.gather(-1, column[..., None])[..., 0].masked_fill(column != target, 0)

    def loss(log_sum=log_sum, at_target=at_target, mean=mean):
        return log_sum - (1 - smoothing) * at_target - smoothing * mean

    each_own_peak = torch.cat([shard - shard.amax(-1, keepdim=True) for shard in shards], -1)
    losses = {
        "the softmax is over this rank's logits only": loss(log_sum=own.logsumexp(-1)),
        "the target's column here is target - start": loss(at_target=sum(map(look_up, shards))),
        "only one rank knows the target's logit: sum it": loss(
            at_target=at_target.masked_fill(elsewhere, 0)
        ),
        "the peak is that of all ranks": one_device_loss(each_own_peak, target, smoothing, -100),
    }
    if smoothing:
        theirs, _ = megatron_label_smoothing(logits, target, start, end, smoothing)
        losses |= {
            "the mean is over this rank's logits only": loss(mean=own.mean(-1)),
            "smoothing / vocab: the whole vocabulary": loss(mean=logits.sum(-1) / (end - start)),
            "K and the mean are of this rank's shard only, as in Megatron-LM's formula": theirs,
        }
    losses = {hint: loss.masked_fill(ignored, 0) for hint, loss in losses.items()}
    return losses | {"the loss of an ignored target is 0": loss()}


def check_cross_entropy_backward(lab, group, seed):
    uneven, randn = draw_from(seed, group)
    logits, target, start, end = draw_logits(randn, uneven, group)
    vocab, worst = logits.shape[-1], 0
    for smoothing in 0.0, 0.1:
        dy, x = randn(target.shape), logits.clone().requires_grad_()
        y = one_device_loss(x, target, smoothing, -100)
        y.backward(dy)
        right, here = x.grad[..., start:end], (target >= start) & (target < end)
        column = (target - start).masked_fill(~here, 0)[..., None]
        scale = dy.masked_fill(target == -100, 0)[..., None]
        softmax = logits.softmax(-1)[..., start:end]
        hit = torch.zeros_like(right).scatter_(
            -1, column, 1
        )  # also where another rank holds the target
        own_hit, everywhere = hit * here[..., None], smoothing / vocab
        gradients = {  # of a loss whose gradient is 1
            "only the rank that holds the target takes q off there": softmax
            - (1 - smoothing) * hit
            - everywhere,
            "q is smoothed in the backward too": softmax - own_hit,
            "q is 1 - smoothing at the target, and smoothing / vocab": softmax
            - own_hit
            - everywhere,
            "q is smoothing / vocab everywhere": softmax - (1 - smoothing) * own_hit,
            "smoothing / vocab: the whole vocabulary": softmax
            - (1 - smoothing) * own_hit
            - smoothing / (end - start),
        }
        hints = {hint: gradient * scale for hint, gradient in gradients.items()}
        hints["times the gradient that arrives"] = softmax - (1 - smoothing) * own_hit - everywhere
        wanted = {"y": y.detach(), "dx": right, "backward": {}}
        wanted["forward"] = {"all_reduce": 3 * y.nbytes + 8 * group.size()}
        given = {"x": logits[..., start:end].clone(), "dy": dy}
        worst = max(
            worst,
            run_and_compare(
                lambda x, alpha=smoothing: lab.vocab_parallel_cross_entropy(
                    x, target, group, alpha
                ),
                given,
                wanted,
                {"y": {}, "dx": hints},
            ),
        )
    return f"d loss / d logits, off by {worst:.0e}, smoothed or not; nothing sent"


CHECKED = [
    check_copy_to_tp_region,
    check_reduce_from_tp_region,
    check_gather_from_sp_region,
    check_reduce_scatter_to_sp_region,
    check_gathered_linear,
    check_column_parallel_linear,
    check_row_parallel_linear,
    check_vocab_parallel_embedding,
    check_cross_entropy_forward,
    check_cross_entropy_backward,
]
CHECKS = {check.__name__.removeprefix("check_"): (on_groups(check), 4) for check in CHECKED}


# ---------------------------------------------------------------------------------------------------
# Experiments
# ---------------------------------------------------------------------------------------------------

HIDDEN, FEATURES = 96, 383  # of the MLP; nothing divides 383
VOCAB, TOKENS = 1000, 64  # of the label smoothing


def megatron_label_smoothing(logits, target, start, end, alpha):
    """Megatron-LM's label smoothing on the rank that holds columns [start, end): loss (...), dx (..., v/P).

    It means 1 - alpha at the target and alpha / (v - 1) everywhere else, which is torch's definition with
    alpha v / (v - 1). But in megatron/core/tensor_parallel/cross_entropy.py K, its v, is the width of the
    rank's own shard, and the mean is over that shard alone. logits (..., v) are given whole here, because
    what it sums over all ranks it sums rightly.
    """
    K = end - start
    smoothing = alpha * K / (K - 1)
    log_probs = logits.log_softmax(-1)
    nll = -log_probs.gather(-1, target[..., None])[..., 0]
    own = log_probs[..., start:end]
    loss = (1 - smoothing) * nll - smoothing * own.mean(-1)
    at_target = F.one_hot(target, logits.shape[-1])[..., start:end]
    return loss, own.exp() - (1 - smoothing) * at_target - smoothing / K


def smoothing_on_rank(group, seed, alpha):
    """This rank's row of the label smoothing experiment."""
    generator = torch.Generator().manual_seed(seed)
    zipf = -torch.arange(
        1, VOCAB + 1
    ).log()  # frequent tokens have low ids, as in the vocabularies of BPE
    logits = zipf + torch.randn(TOKENS, VOCAB, generator=generator)
    target = torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]
    start, end = vocab_range(VOCAB, group.rank(), group.size())
    shard = logits[:, start:end].clone().requires_grad_()
    loss = vocab_parallel_cross_entropy(shard, target, group, alpha)
    loss.sum().backward()
    torch_loss = partial(F.cross_entropy, logits, target)
    theirs, their_dx = megatron_label_smoothing(logits, target, start, end, alpha)

    def target_mass(dx):  # sum of q = sum of softmax - dx, over the whole vocabulary
        return 1 - all_reduce(dx.sum(-1), group).mean().item()

    return {
        "ranks": group.size(),
        "rank": group.rank(),
        "K": end - start,
        "torch": torch_loss(label_smoothing=alpha).item(),
        "loss": loss.mean().item(),
        "target_mass": target_mass(shard.grad),
        "meant_by_megatron": torch_loss(label_smoothing=alpha * VOCAB / (VOCAB - 1)).item(),
        "megatron": theirs.mean().item(),
        "megatron_target_mass": target_mass(their_dx),
    }


def label_smoothing(args):
    """Our loss and Megatron-LM's formula on 1, 2 and 3 ranks; returns (rows, what did not hold)."""
    rows = []
    for world in 1, 2, 3:
        rows += on_ranks(world, smoothing_on_rank, args.seed, args.label_smoothing)
    for row in rows:
        row["megatron_error"] = row["megatron"] / row["meant_by_megatron"] - 1
    print(
        f"\nlabel smoothing {args.label_smoothing}, vocabulary {VOCAB}, mean loss of {TOKENS} tokens"
    )
    meant, right = rows[0]["meant_by_megatron"], rows[0]["torch"]
    print(f"one device: {right:.6f} as torch defines it, {meant:.6f} as Megatron does")
    head = ["tp", "rank", "K", "ours", "sum of q", "Megatron's formula", "off by", "its sum of q"]
    print_table(head, *(
        [r["ranks"], r["rank"], r["K"], f"{r['loss']:.6f}", f"{r['target_mass']:.4f}", f"{r['megatron']:.6f}",
         f"{round(r['megatron_error'], 4) + 0.0:+.1%}", f"{r['megatron_target_mass']:.4f}"]
        for r in rows
    ))  # fmt: skip
    ours = max(abs(r["loss"] / r["torch"] - 1) + abs(r["target_mass"] - 1) for r in rows)
    wrong = [abs(r["megatron_error"]) + abs(r["megatron_target_mass"] - 1) for r in rows]
    holds = {
        "our loss is torch's on 1, 2 and 3 ranks": ours < 1e-5,
        "Megatron's formula is right on one rank": wrong[0] < 1e-5,
        "and wrong on more": min(wrong[1:]) > args.label_smoothing / 2,
    }
    return rows, [text for text, held in holds.items() if not held]


TP, SP, SP_AGAIN = (
    "tensor parallel",
    "+ sequence parallel",
    "+ x gathered again",
)  # ways to cut an MLP


def mlp_expected(way, length, world, width):
    """What a way keeps, in bytes ("kept_x", "kept_inside"), and sends, {op: [calls, bytes]} each way.

    width: of the MLP's features those that the rank holds. Inside, gelu keeps its input and the second
    layer what gelu puts out.
    """
    tokens = length if way == TP else math.ceil(length / world) * world  # with those that fill up
    x, inside = 4 * tokens * HIDDEN, 2 * 4 * tokens * width  # bytes, float32
    reduced, scattered = {"all_reduce": [1, x]}, {"all_gather": [1, x], "reduce_scatter": [1, x]}
    if way == TP:
        return {"kept_x": x, "kept_inside": inside, "forward": reduced, "backward": reduced}
    if way == SP:
        return {"kept_x": x, "kept_inside": inside, "forward": scattered, "backward": scattered}
    gathered_again = scattered | {"all_gather": [2, 2 * x]}
    return {
        "kept_x": x // world,
        "kept_inside": inside,
        "forward": scattered,
        "backward": gathered_again,
    }


def mlp_on_rank(group, seed, length):
    """This rank's rows of the MLP experiment: each way to cut it, against one device."""
    torch.manual_seed(seed)
    rank, world = group.rank(), group.size()
    up, down = nn.Linear(HIDDEN, FEATURES), nn.Linear(FEATURES, HIDDEN)
    x, dy = torch.randn(1, length, HIDDEN, requires_grad=True), torch.randn(1, length, HIDDEN)
    y = down(F.gelu(up(x)))
    y.backward(dy)
    start, end = split(FEATURES, rank, world)
    rows = []
    for way in TP, SP, SP_AGAIN:
        first = ColumnParallelLinear.from_linear(up, group, sequence_parallel=way == SP_AGAIN)
        second = RowParallelLinear.from_linear(down, group, sequence_parallel=way != TP)
        own = torch.clone if way == TP else partial(tokens_of, group=group)
        mine = own(x.detach()).requires_grad_()
        with Traffic() as forward:
            with Kept(*first.parameters()) as kept_x:
                if way == SP:  # the short way: autograd keeps what was gathered
                    hidden = F.linear(gather_from_sp_region(mine, group), first.weight, first.bias)
                else:
                    hidden = first(mine)
            with Kept(*second.parameters()) as kept_inside:
                out = second(F.gelu(hidden))
        with Traffic() as backward:
            out.backward(own(dy))
        measured = {"kept_x": kept_x.bytes, "kept_inside": kept_inside.bytes}
        measured |= {"forward": forward.ops, "backward": backward.ops}
        count = length if way == TP else real_tokens(length, group)
        pairs = [(out[:, :count], own(y)[:, :count]), (mine.grad, own(x.grad))]
        pairs += [
            (first.weight.grad, up.weight.grad[start:end]),
            (first.bias.grad, up.bias.grad[start:end]),
        ]
        pairs += [(second.weight.grad, down.weight.grad[:, start:end])]
        pairs += [(second.bias.grad, down.bias.grad)] if rank == 0 else []
        errors = [(torch.norm(a - b) / torch.norm(b).clamp(min=1e-30)).item() for a, b in pairs]
        as_expected = measured == mlp_expected(way, length, world, end - start)
        rows.append({"ranks": world, "rank": rank, "way": way, "error": max(errors)})
        rows[-1] |= measured | {"as_expected": as_expected}
    return rows


def short(ops):
    """A Traffic's calls in a few letters: 1 AG, 1 RS."""
    letters = {"all_reduce": "AR", "all_gather": "AG", "reduce_scatter": "RS"}
    return ", ".join(f"{calls} {letters[op]}" for op, (calls, _) in ops.items())


def mlp(args):
    """The MLP on 2 and 3 ranks, with and without sequence parallelism; returns (rows, what did not hold)."""
    rows = []
    for world in 2, 3:
        ranks = on_ranks(world, mlp_on_rank, args.seed, args.length)
        rows += [row for way in zip(*ranks) for row in way]
    x, inside = 4 * args.length * HIDDEN, 2 * 4 * args.length * FEATURES
    print(
        f"\nMLP {HIDDEN} -> {FEATURES} -> {HIDDEN}, {args.length} tokens: bytes that rank 0 keeps and sends"
    )
    print(f"one device keeps {x} of x and {inside} inside")

    def sent(ops):
        return sum(nbytes for _, nbytes in ops.values())

    head = ["ranks", "", "off by", "x kept", "inside", "forward", "bytes", "backward", "bytes"]
    print_table(head, *(
        [r["ranks"], r["way"], f"{r['error']:.0e}", r["kept_x"], r["kept_inside"],
         short(r["forward"]), sent(r["forward"]), short(r["backward"]), sent(r["backward"])]
        for r in rows if r["rank"] == 0
    ))  # fmt: skip
    print(
        "\n  AR all-reduce, AG all-gather, RS reduce-scatter; on the wire an AR is an RS and an AG"
    )
    holds = {
        "the MLP is one device's": all(row["error"] < 1e-5 for row in rows),
        "it keeps and sends what the formula says": all(row["as_expected"] for row in rows),
    }
    return rows, [text for text, held in holds.items() if not held]


def experiment(args):
    """Both experiments; {"label_smoothing": rows, "mlp": rows, "failed": what did not hold}."""
    (smoothing_rows, first), (mlp_rows, second) = label_smoothing(args), mlp(args)
    return {"label_smoothing": smoothing_rows, "mlp": mlp_rows, "failed": first + second}


# Okabe and Ito's colours: rank 0, 1, 2
COLOURS = "#0072B2", "#E69F00", "#009E73"


def draw(results, path):
    """The picture of --plot: who holds what, what the MLP keeps, and what Megatron's smoothing gives."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(13, 9))
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
    draw_owned(axes[0, 0], pyplot.Rectangle)
    draw_kept(axes[0, 1], [row for row in results["mlp"] if row["rank"] == 0])
    draw_smoothing(axes[1, 0], axes[1, 1], results["label_smoothing"])
    figure.suptitle(f"{results['lab']}: colours are ranks")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def draw_owned(axis, rectangle):
    """The matrices as in x W, rows from the top, in the colours of the 3 ranks that hold them."""
    h, i, v, x = 3, 7, 8, 0
    sizes = {h: "h", i: "i", v: "v"}
    matrices = [
        ("embedding", v, h, 0),
        ("$W_1$: columns", h, i, 1),
        ("$W_2$: rows", i, h, 0),
        ("head", h, v, 1),
    ]
    for name, height, width, cut in matrices:
        for rank, colour in enumerate(COLOURS):
            start, end = split((height, width)[cut], rank, 3)
            corner = (x + start, -h) if cut else (x, -end)
            extent = (end - start, h) if cut else (width, end - start)
            axis.add_patch(rectangle(corner, *extent, facecolor=colour, edgecolor="white", lw=2))
        axis.text(x + width / 2, 0.9, name, ha="center")
        axis.text(x + width / 2, 0.15, sizes[width], ha="center", style="italic")
        axis.text(x - 0.2, -height / 2, sizes[height], ha="right", va="center", style="italic")
        x += width + 2
    for rank, colour in enumerate(COLOURS):
        axis.text(5 + 6 * rank, -v - 1.2, f"rank {rank}", color=colour, weight="bold")
    axis.set(xlim=(-1, x - 1), ylim=(-v - 1.5, 2), aspect="equal")
    axis.set_title("3 ranks share an MLP and a vocabulary", loc="left")
    axis.axis("off")


def draw_kept(axis, rows):
    """What rank 0 keeps in each way, and beside it what it sends forward and backward."""
    places, left = range(len(rows)), [0] * len(rows)
    for key, label, grey in (
        ("kept_inside", "inside", "0.8"),
        ("kept_x", "the MLP's input x", "0.4"),
    ):
        sizes = [row[key] / 2**10 for row in rows]
        axis.barh(places, sizes, left=left, color=grey, label=label)
        left = [a + b for a, b in zip(left, sizes)]
    for place, end, row in zip(places, left, rows):
        axis.text(end, place, f"  {short(row['forward'])} | {short(row['backward'])}", va="center")
    axis.set_yticks(places, [f"{row['ranks']} ranks\n{row['way']}" for row in rows])
    axis.set(
        xlim=(0, 1.45 * max(left)), xlabel="KiB kept by rank 0; beside: sent forward | backward"
    )
    axis.set_title("An MLP keeps 1/P of x only if it gathers again", loc="left")
    axis.legend(frameon=False, loc="lower right", ncols=2)
    axis.set_ylim(len(rows) + 0.3, -0.6)  # from the top, with room for the legend


def draw_smoothing(losses, masses, rows):
    """Megatron's loss of each rank, and the sum of the probabilities it trains towards, against the ranks."""
    worlds, meant = sorted({row["ranks"] for row in rows}), rows[0]["meant_by_megatron"]
    losses.axhline(meant, color="black", lw=1)
    losses.text(1.1, meant, "one device", va="bottom")
    for row in rows:
        losses.plot(row["ranks"], row["megatron"], "o", ms=9, color=COLOURS[row["rank"]])
    losses.set(xticks=worlds, xlim=(0.5, 3.5), xlabel="ranks", ylabel="mean loss")
    losses.set_title("Label smoothing by Megatron's formula: every rank another loss", loc="left")
    first = [row["megatron_target_mass"] for row in rows if row["rank"] == 0]
    masses.plot(worlds, first, "o--", ms=9, color="0.4", label="Megatron's formula")
    masses.plot(
        worlds,
        [row["target_mass"] for row in rows if row["rank"] == 0],
        "ks-",
        label="here, and torch",
    )
    for world, mass in zip(worlds[1:], first[1:]):
        masses.text(world - 0.06, mass, f"{mass:.3f}", ha="right", va="bottom")
    masses.set(
        xticks=worlds, xlim=(0.5, 3.5), xlabel="ranks", ylabel="sum of q over the vocabulary"
    )
    masses.set_title("and probabilities to learn that add up to more than 1", loc="left")
    masses.legend(frameon=False)


# ---------------------------------------------------------------------------------------------------
# Sabotage: what people get wrong, for --inject-bug. A check has to catch every one.
# ---------------------------------------------------------------------------------------------------


def f_without_all_reduce(lab):
    """copy_to_tp_region passes the rank's own dx on."""
    lab.CopyToTPRegion.backward = staticmethod(lambda ctx, grad: (grad, None))


def all_reduce_both_ways(lab):
    """reduce_from_tp_region sums dy in the backward too: gradients P times too large."""

    def forward(ctx, x, group):
        ctx.group = group
        return lab.all_reduce(x, group)

    lab.ReduceFromTPRegion.forward = staticmethod(forward)
    lab.ReduceFromTPRegion.backward = lab.CopyToTPRegion.backward


def overwrites_input(lab):
    """all_reduce works on the caller's tensor."""

    def all_reduce(x, group, op=dist.ReduceOp.SUM):
        dist.all_reduce(x, op, group=group)
        return x

    lab.all_reduce = all_reduce


def group_forgotten(lab):
    """all_reduce sums over all ranks there are, not over the group."""

    def all_reduce(x, group, op=dist.ReduceOp.SUM):
        x = x.clone()
        dist.all_reduce(x, op)
        return x

    lab.all_reduce = all_reduce


def gather_without_sum(lab):
    """gather_from_sp_region's backward takes its own tokens' dx and sums nothing."""
    lab.GatherFromSPRegion.backward = staticmethod(
        lambda ctx, grad: (tokens_of(grad, ctx.group), None)
    )


def gathers_features(lab):
    """all_gather's result is read as (b, s, h) while ranks are joined along dim 0."""

    def all_gather(x, group):
        out = x.new_empty(x.shape[0] * group.size(), *x.shape[1:])
        dist.all_gather_into_tensor(out, x.contiguous(), group=group)
        return out.view(x.shape[0], -1, x.shape[2])

    lab.all_gather = all_gather


def scatter_by_all_reduce(lab):
    """reduce_scatter_to_sp_region all-reduces and throws away what is others': all values right."""
    lab.reduce_scatter = lambda x, group: tokens_of(all_reduce(x, group), group)


def gathered_input_kept(lab):
    """gathered_linear lets autograd keep the gathered input: all values right."""
    lab.gathered_linear = lambda x, weight, bias, group: F.linear(
        lab.gather_from_sp_region(x, group), weight, bias
    )


def bias_on_every_rank(lab):
    """Every rank adds the row parallel layer's bias to its partial sum."""
    lab.RowParallelLinear.from_linear = classmethod(row_with_bias)


def bias_sees_own_tokens(lab):
    """Every rank adds the bias after the reduce-scatter, and the bias's gradients are never summed."""

    def forward(self, x):
        leave = (
            lab.reduce_scatter_to_sp_region if self.sequence_parallel else lab.reduce_from_tp_region
        )
        out = leave(F.linear(x, self.weight), self.group)
        return out if self.bias is None else out + self.bias

    lab.RowParallelLinear.from_linear = classmethod(row_with_bias)
    lab.RowParallelLinear.forward = forward


def row_with_bias(cls, linear, group, sequence_parallel=False):
    """RowParallelLinear.from_linear with a bias on every rank."""
    start, end = split(linear.in_features, group.rank(), group.size())
    bias = linear.bias if linear.bias is None else keep(linear.bias, 0, 0, linear.out_features)
    return cls(keep(linear.weight, 1, start, end), bias, group, sequence_parallel)


def next_ranks_columns(lab):
    """A rank holds the next rank's columns of a column parallel weight."""
    right = lab.ColumnParallelLinear.from_linear.__func__

    def from_linear(cls, linear, group, sequence_parallel=False):
        layer = right(cls, linear, group, sequence_parallel)
        layer.weight = keep(linear.weight.roll(-len(layer.weight), 0), 0, 0, len(layer.weight))
        return layer

    lab.ColumnParallelLinear.from_linear = classmethod(from_linear)


def shard_is_a_view(lab):
    """A shard is a view of the full weight, which stays in memory: all values right."""
    lab.keep = lambda parameter, dim, start, end: nn.Parameter(
        parameter.detach().narrow(dim, start, end - start)
    )


def unmasked_embedding(lab):
    """A token of another rank's rows adds this rank's first row."""
    lab.VocabParallelEmbedding.forward = lambda self, ids: lab.reduce_from_tp_region(
        F.embedding((ids - self.start) * ((ids >= self.start) & (ids < self.end)), self.weight),
        self.group,
    )


def target_offset_forgotten(lab):
    """A target's column is looked for as if every rank held the first tokens."""
    right = lab.shard_offset
    lab.shard_offset = lambda logits, group: (0, right(logits, group)[1])


def softmax_over_own_shard(lab):
    """The sum of exp() is that of the rank's own logits."""
    right = lab.VocabParallelCrossEntropy.forward

    def forward(ctx, logits, target, start, vocab, group, smoothing):
        loss = right(ctx, logits, target, start, vocab, group, smoothing)
        *saved, peak, sum_exp = ctx.to_save
        own = (logits - peak[..., None]).exp().sum(-1)
        ctx.save_for_backward(*saved, peak, own)
        return loss - sum_exp.log() + own.log()

    lab.VocabParallelCrossEntropy.forward = staticmethod(forward)


def own_peak(lab):
    """Each rank takes its own largest logit off, and the sums that are put together do not match."""
    right = lab.all_reduce
    lab.all_reduce = lambda x, group, op=dist.ReduceOp.SUM: (
        x if op == dist.ReduceOp.MAX else right(x, group)
    )


def no_peak(lab):
    """exp() of the logits as they are: infinite above 88."""
    right = lab.all_reduce
    lab.all_reduce = lambda x, group, op=dist.ReduceOp.SUM: (
        0 * x if op == dist.ReduceOp.MAX else right(x, group)
    )


def smoothing_per_shard(lab):
    """Megatron-LM's label smoothing: K and the mean are those of the rank's own shard."""
    right = lab.VocabParallelCrossEntropy.forward

    def forward(ctx, logits, target, start, vocab, group, smoothing):
        K = logits.shape[-1]
        smoothing *= K / (K - 1)
        nll = right(ctx, logits, target, start, vocab, group, 0)
        _, _, _, peak, sum_exp = ctx.to_save
        ctx.vocab, ctx.smoothing = K, smoothing
        log_probs = logits - peak[..., None] - sum_exp.log()[..., None]
        return (1 - smoothing) * nll - smoothing * log_probs.mean(-1) if smoothing else nll

    lab.VocabParallelCrossEntropy.forward = staticmethod(forward)


def unsmoothed_gradient(lab):
    """The loss is smoothed, its gradient is not."""
    right = lab.VocabParallelCrossEntropy.backward

    def backward(ctx, grad):
        ctx.smoothing = 0
        return right(ctx, grad)

    lab.VocabParallelCrossEntropy.backward = staticmethod(backward)


def target_on_every_rank(lab):
    """Ranks that do not hold the target take q off at their first column."""
    right = lab.VocabParallelCrossEntropy.forward

    def forward(ctx, *args):
        loss = right(ctx, *args)
        logits, column, elsewhere, *rest = ctx.to_save
        ctx.save_for_backward(logits, column, torch.zeros_like(elsewhere), *rest)
        return loss

    lab.VocabParallelCrossEntropy.forward = staticmethod(forward)


def logits_overwritten(lab):
    """The peak is taken off the caller's logits, in place, as Megatron-LM does with float32 ones."""
    right = lab.VocabParallelCrossEntropy.forward

    def forward(ctx, logits, *args):
        loss = right(ctx, logits, *args)
        logits -= ctx.to_save[3][..., None]
        return loss

    lab.VocabParallelCrossEntropy.forward = staticmethod(forward)


def logits_gathered(lab):
    """Every rank gathers all the logits and computes the whole loss: all values right."""

    def vocab_parallel_cross_entropy(
        logits_shard, target, group, label_smoothing=0.0, ignore_index=-100
    ):
        start, vocab = lab.shard_offset(logits_shard, group)
        logits = F.pad(logits_shard, (start, vocab - start - logits_shard.shape[-1]))
        logits = lab.reduce_from_tp_region(
            logits, group
        )  # zeros elsewhere: their sum is all of them
        return one_device_loss(logits, target, label_smoothing, ignore_index)

    lab.vocab_parallel_cross_entropy = vocab_parallel_cross_entropy


def ignored_targets_count(lab):
    """A target of ignore_index counts, as if it were token 0."""
    right = lab.vocab_parallel_cross_entropy

    def vocab_parallel_cross_entropy(
        logits_shard, target, group, label_smoothing=0.0, ignore_index=-100
    ):
        return right(
            logits_shard, target.masked_fill(target == ignore_index, 0), group, label_smoothing
        )

    lab.vocab_parallel_cross_entropy = vocab_parallel_cross_entropy


BUGS = [
    f_without_all_reduce,
    all_reduce_both_ways,
    overwrites_input,
    group_forgotten,
    gather_without_sum,
    gathers_features,
    scatter_by_all_reduce,
    gathered_input_kept,
    bias_on_every_rank,
    bias_sees_own_tokens,
    next_ranks_columns,
    shard_is_a_view,
    unmasked_embedding,
    target_offset_forgotten,
    softmax_over_own_shard,
    own_peak,
    no_peak,
    smoothing_per_shard,
    unsmoothed_gradient,
    target_on_every_rank,
    logits_overwritten,
    logits_gathered,
    ignored_targets_count,
]


# ---------------------------------------------------------------------------------------------------
# Harness: the same in every lab
# ---------------------------------------------------------------------------------------------------


# Copied from labs/lab8_3d.py
class Unusable(Exception):
    """An argument that cannot work; its message says what would. Ends as `error: ...`, exit 2."""


# Copied from labs/lab8_3d.py
class Wrong(Exception):
    """What a check found wrong with an exercise, and a hint at what usually causes it."""

    def __init__(self, found, hint=""):
        super().__init__(found, hint)
        self.found, self.hint = found, hint


# Copied from labs/lab8_3d.py
def expect(holds, found, hint=""):
    """Raise Wrong where something does not hold."""
    if not holds:
        raise Wrong(found, hint)


# Copied from labs/lab8_3d.py
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


# Copied from labs/lab8_3d.py
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


# Copied from labs/lab8_3d.py
def load(path):
    """The file of a lab, or of a learner's answers to it, as a module."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# Copied from labs/lab8_3d.py
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


# Copied from labs/lab8_3d.py
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


# Copied from labs/lab8_3d.py
def check_on_rank(group, answers, bug, name, seed):
    """One exercise's check on this rank. answers: the file of the lab, or of a learner's copy of it."""
    lab = load(answers)
    if bug:
        globals()[bug](lab)
    check, _ = CHECKS[name]
    return check(lab, group, seed)


# Copied from labs/lab8_3d.py
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


# Copied from labs/lab8_3d.py
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


# Copied from labs/lab8_3d.py
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


# Copied from labs/lab8_3d.py
def positive(text):
    """A whole number of at least 1, for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1")
    return int(text)


# Copied from labs/lab8_3d.py
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


def fraction(text):
    """A number above 0 and below 1, for argparse."""
    with suppress(ValueError):
        if 0 < float(text) < 1:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text} is not a number above 0 and below 1")


def add_options(parser):
    """The options of this lab's own."""
    parser.add_argument(
        "--length", type=positive, default=512, help="tokens of the MLP experiment (512)"
    )
    parser.add_argument(
        "--label-smoothing", type=fraction, default=0.1, help="of that experiment (0.1)"
    )


if __name__ == "__main__":
    sys.exit(main())
