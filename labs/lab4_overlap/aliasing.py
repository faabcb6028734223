"""What happens to lab 4's gradients where a layer keeps memory that all layers share."""

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F

from labs.kit.harness import on_ranks, table
from labs.kit.tools import Kept
from labs.lab4_overlap.check import one_device


class KeptLinear(torch.autograd.Function):
    """sp_linear, but what was gathered, into place(shape), is kept for the backward; no bias."""

    @staticmethod
    def forward(ctx, x, weight, bias, group, place):
        ctx.group, ctx.shape = group, x.shape
        total = place((group.size() * x.shape[0], *x.shape[1:]))
        dist.all_gather_into_tensor(total, x, group=group)
        ctx.save_for_backward(total, weight)
        return F.linear(total, weight)

    @staticmethod
    def backward(ctx, grad):
        total, weight = ctx.saved_tensors
        mine = grad.new_empty(ctx.shape)
        dist.reduce_scatter_tensor(mine, grad @ weight, group=ctx.group)
        return mine, grad.flatten(0, 1).T @ total.flatten(0, 1), None, None, None


SHARD, OWN, SHARED = "the shard, gathered again", "all of x", "all of x, in the shared buffer"


def ways_to_keep(lab):
    """{what is kept: a layer that keeps it}; the last, where Megatron gathers to read once."""

    def in_shared_memory(shape):
        return lab.BUFFER.get_tensor(shape, torch.float32, "mpu")

    return {
        SHARD: lab.sp_linear,
        OWN: lambda *given: KeptLinear.apply(*given, torch.empty),
        SHARED: lambda *given: KeptLinear.apply(*given, in_shared_memory),
    }


def aliasing_on_rank(group, lab, seed):
    """Two layers, each of which keeps its input for the backward, in three ways: rows."""
    rows = []
    for kept, function in ways_to_keep(lab).items():
        randn = partial(torch.randn, generator=torch.Generator().manual_seed(seed))
        layers = [one_device(randn, group, 128, 2, 256, 64, "SP", bias=False) for _ in range(2)]
        with Kept(*(layer.weight for layer in layers)) as memory:
            for layer in layers:
                layer.out = function(layer.x, layer.weight, layer.bias, group)
                memory.note_attributes(layer.out)
        for layer in reversed(layers):
            layer.out.backward(layer.dy)
        off = [(torch.norm(one.weight.grad - one.dw) / torch.norm(one.dw)).item() for one in layers]
        rows.append({"kept": kept, "bytes": memory.bytes, "dw_errors": off})
    return rows


def aliasing(lab, args):
    """What keeping shared memory does to the first layer's dW; returns (rows, what is off)."""
    rows = on_ranks(2, aliasing_on_rank, lab, args.seed)[0]
    print("\ntwo layers, each with an x (128, 2, 256) of its own: how far off is its dW?")
    lines, off = [["kept for the backward", "bytes", "first layer's dW", "second layer's dW"]], []
    for row in rows:
        errors = [f"{error:.0%}" for error in row["dw_errors"]]
        lines.append([row["kept"], row["bytes"], *errors])
        first, second = row["dw_errors"]
        if not second < 1e-5 or (first < 1e-5) == (row["kept"] == SHARED):
            off.append(f"{row['kept']}: the layers' dW are {' and '.join(errors)} off")
    table(*lines)
    return rows, off
