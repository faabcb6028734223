"""A collective whose backward is another one, and three that give a new tensor."""

import torch
import torch.distributed as dist


class Exchange(torch.autograd.Function):
    """A collective, and the one that its backward is: y = there(x), dx = back(dy)."""

    @staticmethod
    def forward(ctx, x, there, back):
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx, grad):
        return ctx.back(grad), None, None


def all_gather(x, dim, group):
    """The ranks' x, one behind the other."""
    parts = [x.new_empty(x.shape) for _ in range(group.size())]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, dim)


def reduce_scatter(x, dim, group):
    """The rank's part of the sum of all ranks' x."""
    x = x.movedim(dim, 0).contiguous()
    out = x.new_empty(x.shape[0] // group.size(), *x.shape[1:])
    dist.reduce_scatter_tensor(out, x, group=group)
    return out.movedim(0, dim)


def all_to_all(x, cut, join, group):
    """Part r of dim cut goes to rank r; what arrives is joined along dim join."""
    x = torch.stack(x.chunk(group.size(), cut))
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x, group=group)
    return torch.cat(out.unbind(), join)
