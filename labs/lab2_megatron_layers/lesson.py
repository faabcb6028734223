"""Lab 2: Megatron's layers. One matrix, one table and one softmax, each cut over P ranks.

How do you cut a linear layer, an embedding and the loss so that every rank holds 1/P of the
weights, and outputs, gradients and loss stay those of one device? An MLP, h -> i -> h, on P = 2
ranks:

    tensor parallel                       with sequence parallelism
      x (b, s, h)      on both ranks        x (b, s/2, h)    half of the tokens each
        | copy_to_tp_region       (f)         | gather_from_sp_region         (g)
      W1 (i/2, h)      column parallel      W1 (i/2, h)      all tokens, half of the features
      gelu (b, s, i/2)                      gelu (b, s, i/2)
      W2 (h, i/2)      row parallel         W2 (h, i/2)      a partial sum of the whole output
        | reduce_from_tp_region   (g)         | reduce_scatter_to_sp_region   (g-bar)
      y (b, s, h)      on both ranks        y (b, s/2, h)    half of the tokens each

Columns first, rows second: gelu needs no communication between them. (Columns and rows are those of
the paper's x W; torch keeps W transposed, as (out, in).) The functions at the edges come in
pairs: one's forward is the other's backward.

    region function                forward           backward          message
    copy_to_tp_region              nothing           all-reduce        (b, s, h)
    reduce_from_tp_region          all-reduce        nothing           (b, s, h)
    gather_from_sp_region          all-gather        reduce-scatter    (b, s, h)
    reduce_scatter_to_sp_region    reduce-scatter    all-gather        (b, s, h)

The vocabulary is cut by tokens. A rank looks up the tokens whose rows it holds and takes zeros
for the others; a sum over the ranks completes them. The logits (b, s, v/P) are never gathered.
With x a token's logits, and q what softmax(x) should be (1 at the target, or smoothed),

    loss = log(sum of exp(x)) - sum of q x           d loss / d x = softmax(x) - q

and each sum is a sum of P partial sums: two all-reduces send three numbers a token instead of
v.

    python labs/lab2_megatron_layers/lesson.py                 # checks and experiments
    python labs/lab2_megatron_layers/lesson.py --plot lab2.png --json lab2.json
    python labs/lab2_megatron_layers/lesson.py --predict 4096  # first your guess; see the end
    python labs/lab2_megatron_layers/lesson.py --inject-bug list
    python labs/lab2_megatron_layers/lesson.py --length 1001   # no number has to divide another

Sources: Megatron-LM, arXiv 1909.08053 (columns, rows, vocabulary) and 2205.05198 (sequence
parallelism). Megatron-LM: megatron/core/tensor_parallel/{layers,mappings,cross_entropy}.py.
Nanotron: src/nanotron/parallel/tensor_parallel/ (ALL_REDUCE is our tensor parallel, REDUCE_SCATTER
adds sequence parallelism). NeMo AutoModel: the same by DTensor plans,
components/distributed/optimized_tp_plans.py. DeepSpeed: module_inject/layers.py (LinearLayer,
LinearAllreduce).
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

# --------------------------------------------------------------------------------------------------
# 1. The regions' edges
# --------------------------------------------------------------------------------------------------


# Copied from tp.py
def all_reduce(x, group, op=dist.ReduceOp.SUM):
    """The sum (or max) of x over ranks; not in place, because autograd may still need x itself."""
    if group.size() == 1:
        return x
    x = x.clone(memory_format=torch.contiguous_format)  # a gradient may be a transposed view
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

    x (b, s, h), whole on every rank, enters layers of which each rank holds a part. grad (b, s, h)
    is what came back through this rank's part alone. Write to no tensor that is given.
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

    x (b, s, h) is this rank's partial sum. y is x plus the other ranks' partial sums, so the
    gradient of x is that of y, and every rank has it.
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
    """Forward all tokens (b, s, h), backward the sum of all gradients for own tokens (b, s/P, h).

    Megatron's g: x (b, s/P, h) is the rank's tokens, equally many on each rank. Every rank
    computes with all tokens, so every rank has a part of each token's gradient.
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
    """Forward own tokens (b, s/P, h) of the sum of all x, backward the gradient of all tokens.

    Megatron's g-bar: x (b, s, h) is this rank's partial sum for all tokens, and so its
    gradient is (b, s, h). P need not divide s = ctx.length: reduce_scatter() then puts zeros
    behind the last token, and their gradient is dropped.
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


# --------------------------------------------------------------------------------------------------
# 2. Linear layers
# --------------------------------------------------------------------------------------------------


# Copied from tp.py
def shard_range(n, rank, world):
    """[start, end): a rank's share of n things. The first n % world ranks have one more."""
    base, extra = divmod(n, world)
    return rank * base + min(rank, extra), (rank + 1) * base + min(rank + 1, extra)


def keep(parameter, dim, start, end):
    """A Parameter of its own with rows (dim 0) or columns (dim 1) [start, end) of a full one.

    A clone: a view would keep the whole tensor in memory.
    """
    return nn.Parameter(parameter.detach().narrow(dim, start, end - start).clone())


class GatheredLinear(torch.autograd.Function):
    """F.linear(gather_from_sp_region(x), weight, bias), keeping only the shard x for the backward.

    x (b, s/P, in), weight (out/P, in), bias (out/P) or None -> (b, s, out/P). Autograd would keep
    the gathered (b, s, in) for the gradient of the weight; here the backward gathers x again.
    Megatron-LM's LinearWithGradAccumulationAndAsyncCommunication does so, too, and hides the
    messages behind its matmuls.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, group):
        ctx.group = group
        # exercise: gathered_linear
        ctx.save_for_backward(x, weight)
        return F.linear(all_gather(x, group), weight, bias)
        # end exercise

    @staticmethod
    def backward(ctx, grad):
        """From grad (b, s, out/P) the gradients of x, weight, bias (None without one) and None."""
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

    weight (out/P, in), bias (out/P) or None. x (b, s, in), the same on every rank, -> (b, s,
    out/P); under sequence parallelism x is the rank's tokens (b, s/P, in), and the output
    still covers all s tokens.
    """

    def __init__(self, weight, bias, group, sequence_parallel):
        super().__init__()
        self.weight, self.bias = weight, bias
        self.group, self.sequence_parallel = group, sequence_parallel

    @classmethod
    def from_linear(cls, linear, group, sequence_parallel=False):
        """This rank's part of an nn.Linear(in, out): output features shard_range(out, rank, P)."""
        # exercise: column_parallel_linear
        start, end = shard_range(linear.out_features, group.rank(), group.size())
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

    weight (out, in/P); bias (out) on rank 0, None on the others. x (b, s, in/P), a column
    parallel layer's output, -> (b, s, out), the same on every rank; under sequence parallelism
    -> (b, s/P, out), the rank's tokens.

    The bias is added once: by rank 0 and before the sum, as in Nanotron. Its gradient is then
    complete with and without sequence parallelism. Megatron-LM adds it on every rank after the sum;
    under sequence parallelism a rank's bias gradient then covers its own tokens only, so the
    ranks' are summed afterwards.
    """

    def __init__(self, weight, bias, group, sequence_parallel):
        super().__init__()
        self.weight, self.bias = weight, bias
        self.group, self.sequence_parallel = group, sequence_parallel

    @classmethod
    def from_linear(cls, linear, group, sequence_parallel=False):
        """This rank's part of an nn.Linear(in, out): input features shard_range(in, rank, P)."""
        # exercise: row_parallel_linear
        start, end = shard_range(linear.in_features, group.rank(), group.size())
        mine = linear.bias is not None and group.rank() == 0
        bias = keep(linear.bias, 0, 0, linear.out_features) if mine else None
        return cls(keep(linear.weight, 1, start, end), bias, group, sequence_parallel)
        # end exercise

    def forward(self, x):
        # exercise: row_parallel_linear
        leave = reduce_scatter_to_sp_region if self.sequence_parallel else reduce_from_tp_region
        return leave(F.linear(x, self.weight, self.bias), self.group)
        # end exercise


# --------------------------------------------------------------------------------------------------
# 3. The vocabulary
# --------------------------------------------------------------------------------------------------


def vocab_range(vocab, rank, world):
    """Token ids [start, end) whose embeddings and logits a rank holds.

    Megatron-LM pads the vocabulary until P divides it; here the first ranks hold one more instead.
    Raises ValueError where a rank would hold none.
    """
    if vocab < world:
        raise ValueError(f"{vocab} tokens cannot be cut over {world} ranks: use {vocab} ranks")
    return shard_range(vocab, rank, world)


class VocabParallelEmbedding(nn.Module):
    """Rows [start, end) of an nn.Embedding (Megatron-LM). weight (v/P, h).

    ids (b, s), the same on every rank, -> (b, s, h); under sequence parallelism the output is
    the rank's tokens (b, s/P, h), from a reduce-scatter: half of the all-reduce's wire bytes.
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

        F.embedding(rows, weight, padding_idx) wants row numbers in this rank's weight.
        """
        if ((ids < 0) | (ids >= self.vocab)).any():  # no rank holds it: zeros, silently
            raise IndexError(f"a token is not in [0, {self.vocab})")
        # exercise: vocab_parallel_embedding
        elsewhere = (ids < self.start) | (ids >= self.end)
        rows = (ids - self.start).masked_fill(elsewhere, 0)
        out = F.embedding(rows, self.weight, self.padding_idx).masked_fill(elsewhere[..., None], 0)
        leave = reduce_scatter_to_sp_region if self.sequence_parallel else reduce_from_tp_region
        return leave(out, self.group)
        # end exercise


def shard_offset(logits, group):
    """(start, vocab): the token id of the rank's first column, the size of the vocabulary.

    It takes one all-reduce of P integers, because the loss is given only the shard. A trainer
    knows both.
    """
    widths = torch.zeros(group.size(), dtype=torch.int64, device=logits.device)
    widths[group.rank()] = logits.shape[-1]
    widths = all_reduce(widths, group).tolist()
    return sum(widths[: group.rank()]), sum(widths)


class VocabParallelCrossEntropy(torch.autograd.Function):
    """loss = log(sum of exp(x)) - sum of q x, a token's logits x cut over the ranks (Megatron-LM).

    logits (..., v/P), columns [start, start + v/P) of v; target (...). Returns the loss of each
    token (...), the same on every rank. q, the wanted probabilities, is 1 - smoothing at the
    target plus smoothing / v everywhere (as in torch). Its sum over the vocabulary is 1,
    whatever P is.
    """

    @staticmethod
    def forward(ctx, logits, target, start, vocab, group, smoothing):
        """Find column, elsewhere, peak, sum_exp and wanted, all of them (...).

        elsewhere (bool): another rank holds the target. column (int64): the target's in this
        shard, 0 if elsewhere. peak: the largest logit of all v, taken off every logit so that
        exp() stays finite. sum_exp, wanted: the sums of exp(x - peak) and of q (x - peak) over
        all v. With smoothing 0 a logit may be minus infinity.
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
        """Own columns of (softmax - q) grad: dx (..., v/P), in float32 or better. Send nothing."""
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

    logits_shard (..., v/P): columns vocab_range(v, rank, world). target (...): ids of the whole
    vocabulary, the same on every rank. Returns the loss of each token (...), in float32 or better,
    the same on every rank; 0 where target is ignore_index. Raises IndexError for a target that no
    rank holds, ValueError for a label_smoothing outside [0, 1].
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


if __name__ == "__main__":  # the lab's checks and experiments, of labs/ and of my_labs/
    sys.path[:0] = [str(folder) for folder in Path(__file__).resolve().parents[1:3]]
    from labs.kit.run import main

    sys.exit(main(__file__))
