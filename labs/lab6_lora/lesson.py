"""Lab 6: LoRA under tensor and sequence parallelism. Two small matrices beside a large frozen one.

    y = x W^T + scale (x A^T) B^T
    W (o, i) frozen      A (r, i), B (o, r) trained      scale = alpha / r

W is cut over P ranks as ever. How are A and B cut, what is sent for them, and whose gradient is
only a part of a sum? One factor always has W's cut dimension and is cut with it: B's outputs in a
column parallel layer, A's inputs in a row parallel one. The other factor is free, and there are
three ways:

    column parallel, W (o/P, i), B (o/P, r)
        joined    x -> enter -> A (r, i) -> B
        apart     x -> A (r, i) -> enter -> B
        sharded   x -> enter -> A (r/P, i) -> gather -> B
    row parallel, W (o, i/P), A (r, i/P)
        joined    x -> A -> B (o, r)                 + W x -> leave
        apart     x -> A -> leave -> B (o, r)        + leave(W x)
        sharded   x -> A -> scatter -> B (o, r/P)    + W x -> leave

(enter, leave) are Megatron's pair at the edges of the region: (copy, all-reduce) in tensor
parallelism, (all-gather, reduce-scatter) along the tokens with sequence parallelism. gather
and scatter are the last two along r. For N tokens the adapter alone adds these messages:

                 column                     row                       sum of a gradient, once a step
    joined       none                       none                      the free factor's, always
    apart   TP   AR N r backward            AR N r forward            none
            SP   AG N r, RS N r backward    RS N r, AG N r backward   the free factor's: N/P tokens
    sharded      AG N r, RS N r backward    RS N r, AG N r backward   none

The trap is in `apart`: it needs no sum under tensor parallelism. Switch sequence
parallelism on, and the same lines give every rank a gradient from its own tokens. Each then trains
a factor of its own, and rank 0's copy is what gets saved. The loss need not show it: if only
the answer counts and rank 0 has the prompt, every loss of the run is right, but the saved
adapter has learned nothing.

W is frozen, so it has no gradient and no optimizer state; x is not kept for it and, under
sequence parallelism, not gathered again in the backward. Only dx remains, which earlier layers
need.

Who does what. vLLM, which only serves: joined, and sharded in columns with fully_sharded_loras (in
rows it then cuts B's outputs and adds them into a slice of W x). ms-swift's mcore-bridge: apart;
the trap was its bug (modelscope/mcore-bridge, pull request 173). NeMo AutoModel: sharded, by
DTensor plans. Megatron-Bridge: sharded in columns; in rows it cuts B's outputs and gathers them,
which sends N o, not N r.

    python labs/lab6_lora/lesson.py --plot lab6.png  # checks and experiments
    python labs/lab6_lora/lesson.py --predict 4096   # first your guess; see the end
    python labs/lab6_lora/lesson.py --inject-bug list
    python labs/lab6_lora/lesson.py --lora-rank 1    # fewer than there are ranks
    python labs/grade.py start lab6                  # writes my_labs/lab6_lora.py

Sources: LoRA, arXiv 2106.09685. S-LoRA, arXiv 2311.03285, section 6. Megatron-LM:
finalize_model_grads.py sums the gradients of parameters marked `sequence_parallel`. NeMo AutoModel:
components/distributed/parallel_styles.py. Megatron-Bridge: peft/utils.py. vLLM: lora/layers/.
"""

import itertools
import sys
from fnmatch import fnmatchcase
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

# --------------------------------------------------------------------------------------------------
# The lesson 1: the edges
# --------------------------------------------------------------------------------------------------


# Copied from tp.py
def all_reduce(x, group, op=dist.ReduceOp.SUM):
    """The sum (or max) of x over ranks; not in place, because autograd may still need x itself."""
    if group.size() == 1:
        return x
    x = x.clone(memory_format=torch.contiguous_format)  # a gradient may be a transposed view
    dist.all_reduce(x, op, group=group)
    return x


# Copied from tp.py
def shard_range(n, rank, world):
    """[start, end): a rank's share of n things. The first n % world ranks have one more."""
    base, extra = divmod(n, world)
    return rank * base + min(rank, extra), (rank + 1) * base + min(rank + 1, extra)


def all_gather_along(x, dim, n, group):
    """Every rank's shard_range(n, rank, P) of a dimension -> all n: (b, s, r/P) -> (b, s, r).

    Shares may differ by one, or be empty (r = 1 on 2 ranks); zeros fill each up to the
    largest.
    """
    shares = [shard_range(n, rank, group.size()) for rank in range(group.size())]
    x = x.movedim(dim, 0)  # ranks are joined along dim 0
    padded = x.new_zeros(shares[0][1], *x.shape[1:])
    padded[: len(x)] = x
    out = x.new_empty(group.size() * len(padded), *x.shape[1:])
    dist.all_gather_into_tensor(out, padded, group=group)
    parts = [part[: end - start] for part, (start, end) in zip(out.chunk(group.size()), shares)]
    return torch.cat(parts).movedim(0, dim)


def reduce_scatter_along(x, dim, group):
    """The sum of all ranks' x, of which each receives its share of a dimension: shard_range()."""
    shares = [shard_range(x.shape[dim], rank, group.size()) for rank in range(group.size())]
    x = x.movedim(dim, 0)
    parts = x.new_zeros(group.size(), shares[0][1], *x.shape[1:])
    for part, (start, end) in zip(parts, shares):
        part[: end - start] = x[start:end]
    out = torch.empty_like(parts[0])
    dist.reduce_scatter_tensor(out, parts.flatten(0, 1), group=group)
    start, end = shares[group.rank()]
    return out[: end - start].movedim(0, dim)


class CopyToTPRegion(torch.autograd.Function):
    """x as it is. Every rank uses the whole x, so dx is the sum over the ranks."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x

    @staticmethod
    def backward(ctx, grad):
        return all_reduce(grad, ctx.group), None


class ReduceFromTPRegion(torch.autograd.Function):
    """y, the sum of the ranks' partial x. So every rank's dx is dy, which all ranks have."""

    @staticmethod
    def forward(ctx, x, group):
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class GatherAlong(torch.autograd.Function):
    """all_gather_along. Every rank uses all of it, so dx is the own share of a sum."""

    @staticmethod
    def forward(ctx, x, dim, n, group):
        ctx.dim, ctx.group = dim, group
        return all_gather_along(x, dim, n, group)

    @staticmethod
    def backward(ctx, grad):
        return reduce_scatter_along(grad, ctx.dim, ctx.group), None, None, None


class ReduceScatterAlong(torch.autograd.Function):
    """reduce_scatter_along. A rank adds to all shares, so dx gathers all their gradients."""

    @staticmethod
    def forward(ctx, x, dim, group):
        ctx.dim, ctx.n, ctx.group = dim, x.shape[dim], group
        return reduce_scatter_along(x, dim, group)

    @staticmethod
    def backward(ctx, grad):
        return all_gather_along(grad, ctx.dim, ctx.n, ctx.group), None, None


gather_along = GatherAlong.apply  # (x, dim, n, group): n/P -> n in dimension dim
scatter_along = ReduceScatterAlong.apply  # (x, dim, group): n -> n/P in dimension dim, summed


def enter(x, group, sequence_parallel):
    """Into the region: x (b, s, i), or the rank's tokens (b, s/P, i) -> (b, s, i) everywhere."""
    if sequence_parallel:
        return gather_along(x, 1, x.shape[1] * group.size(), group)
    return CopyToTPRegion.apply(x, group)


def leave(x, group, sequence_parallel):
    """Out of the region: partial sums (b, s, o) -> their sum, or the rank's tokens (b, s/P, o)."""
    return scatter_along(x, 1, group) if sequence_parallel else ReduceFromTPRegion.apply(x, group)


# --------------------------------------------------------------------------------------------------
# The lesson 2: layers
# --------------------------------------------------------------------------------------------------

JOINED, APART, SHARDED = WAYS = "joined", "apart", "sharded"


class LoRALinear(nn.Linear):
    """LoRA on one device: a frozen linear layer plus lora_B(lora_A(x)) times alpha / rank.

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
    """A copy of the rank's share of dimension dim, or of the whole tensor if dim is None."""
    if dim is None:
        return tensor.detach().clone()
    start, end = shard_range(tensor.shape[dim], group.rank(), group.size())
    return tensor.detach().narrow(dim, start, end - start).clone()


class ParallelLoRA(nn.Module):
    """This rank's part of a LoRALinear: weight, bias (frozen), lora_A, lora_B (trained).

    way: JOINED, APART or SHARDED. Under sequence parallelism P divides the number of tokens. cuts()
    says how A and B are cut, and names those whose gradient, after backward(), is only this
    rank's part of a sum over the ranks; sum_partial_gradients() sums these.
    """

    def __init__(self, full, group, way, sequence_parallel=False):
        super().__init__()
        self.scale, self.group = full.scale, group
        self.way, self.sequence_parallel = way, sequence_parallel
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

        dim: the dimension of which a rank holds shard_range(n, rank, P); None: all ranks hold all.
        """
        # exercise: column_lora
        cut = {"lora_A": 0 if self.way == SHARDED else None, "lora_B": 0}
        summed = self.way == JOINED or (self.way == APART and self.sequence_parallel)
        return cut, ["lora_A"] if summed else []
        # end exercise

    def forward(self, x):
        """x (b, s, i), or the rank's tokens (b, s/P, i), -> (b, s, o/P).

        APART sends A's result (b, s, r) through an enter() of its own; else A reads what W reads.
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
    """weight (o, i/P), lora_A (r, i/P); lora_B (o, r), or (o, r/P) where SHARDED; bias (o).

    The bias is the same on all ranks and added after the sum; frozen, it has no gradient.
    """

    base_cut = 1

    def cuts(self):
        """As ColumnParallelLoRA.cuts()."""
        # exercise: row_lora
        cut = {"lora_A": 1, "lora_B": 1 if self.way == SHARDED else None}
        summed = self.way == JOINED or (self.way == APART and self.sequence_parallel)
        return cut, ["lora_B"] if summed else []
        # end exercise

    def forward(self, x):
        """x (b, s, i/P) -> (b, s, o), or the rank's tokens (b, s/P, o).

        JOINED and SHARDED add B's result to W x before the sum over the ranks, APART after it.
        """
        # exercise: row_lora
        # partial sums (b, s, o), (b, s, r)
        base, low = F.linear(x, self.weight), F.linear(x, self.lora_A)
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
    """After a step's last backward, sum over the ranks .grad of what each layer.partial names.

    One message for all of them, and none if there are none. It has to be complete before the
    optimizer may step. Megatron-LM does this in finalize_model_grads().
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

    Returns copies, on every rank. layer.shapes: the full shapes; layer.cut: what was cut.
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
    """A new nn.Linear on one device: W + scale B A. linear itself stays as it is."""
    merged = nn.Linear(linear.in_features, linear.out_features, linear.bias is not None)
    base = {name: p for name, p in linear.state_dict().items() if "lora" not in name}
    merged.load_state_dict(base)
    # exercise: save_adapter
    merged.weight.data += scale * adapter["lora_B"] @ adapter["lora_A"]
    # end exercise
    return merged


# --------------------------------------------------------------------------------------------------
# The lesson 3: the same by DTensor, from a plan that knows nothing of LoRA
# --------------------------------------------------------------------------------------------------


def distribute(module, mesh, **placements):
    """Make DTensors of a module's parameters, {name: placement}. What is frozen stays frozen."""
    for name, placement in placements.items():
        full = getattr(module, name)
        if full is not None:
            tensor = distribute_tensor(full.detach(), mesh, [placement])
            setattr(module, name, nn.Parameter(tensor, requires_grad=full.requires_grad))


def convert_at_edges(style, module, mesh, wanted):
    """Hooks: take the input from the style's layout to wanted, the output to the style's."""

    def before(_, args):
        x = args[0]
        if not isinstance(x, DTensor):
            x = DTensor.from_local(x, mesh, style.input_layouts, run_check=False)
        return (x.redistribute(placements=[wanted]), *args[1:])

    def after(_, args, y):
        y = y.redistribute(placements=style.output_layouts)
        return y.to_local() if style.use_local_output else y

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after)
    return module


def distribute_lora(module, mesh, dim, bias, low):
    """Make DTensors of a LoRALinear, SHARDED along dim; A's result gets the layout low."""
    distribute(module, mesh, weight=Shard(dim), bias=bias)
    for factor in module.lora_A, module.lora_B:
        distribute(factor, mesh, weight=Shard(dim))
    module.lora_A.register_forward_hook(lambda _, x, y: y.redistribute(placements=[low]))


class ColwiseParallelLoRA(ColwiseParallel):
    """ColwiseParallel for a LoRALinear: its gather is a change of layout between A and B."""

    def _apply(self, module, device_mesh):
        distribute_lora(module, device_mesh, 0, Shard(0), Replicate())
        return convert_at_edges(self, module, device_mesh, Replicate())


class RowwiseParallelLoRA(RowwiseParallel):
    """RowwiseParallel for a LoRALinear: A's result is a partial sum, which B wants cut along r."""

    def _apply(self, module, device_mesh):
        distribute_lora(module, device_mesh, 1, Replicate(), Shard(-1))
        return convert_at_edges(self, module, device_mesh, Shard(-1))


LORA_STYLES = {ColwiseParallel: ColwiseParallelLoRA, RowwiseParallel: RowwiseParallelLoRA}


def matches(name, pattern):
    """Whether a module's name fits a key such as "layers.*.up": * is one step of the path."""
    steps, patterns = name.split("."), pattern.split(".")
    return len(steps) == len(patterns) and all(map(fnmatchcase, steps, patterns))


def translate_to_lora(plan, model):
    """{module's name: style} for parallelize_module, from a plan {pattern: style} without LoRA.

    A LoRALinear gets a new LORA_STYLES[type of its style], with that style's input_layouts,
    output_layouts and use_local_output (a style keeps layouts as tuples of one; the
    constructor wants what is inside). Other modules get their style as it is: only some layers
    may have adapters. Change neither plan nor styles, which other models use. Raises TypeError
    for a LoRALinear's style that LORA_STYLES lacks: a subclass may do anything.
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


if __name__ == "__main__":  # the lab's checks and experiments, of labs/ and of my_labs/
    sys.path[:0] = [str(folder) for folder in Path(__file__).resolve().parents[1:3]]
    from labs.kit.run import main

    sys.exit(main(__file__))
