"""Random inputs of checks and experiments, the same each time."""

from functools import partial

import torch
import torch.distributed as dist

UNEVEN = 5, 7, 11, 13, 17, 19, 23, 25, 29  # neither 2 nor 3 divides them


def drawn(seed, *shape, dtype=torch.float64):
    """Random numbers, the same on every rank."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


numbers = partial(drawn, dtype=torch.float32)


def draw_float64(seed):
    """number(low, high) and randn(*shape), of float64, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    randn = partial(torch.randn, generator=generator, dtype=torch.float64)
    return lambda low, high: int(torch.randint(low, high, (), generator=generator)), randn


def draw_from(seed, group=None):
    """(uneven, randn): uneven() is a size that neither 2 nor 3 divides, randn(*shape) a tensor.

    All ranks of a group draw the same. Another group draws equal sizes and other numbers, so that
    a collective that forgets its group gives a wrong result instead of waiting for ever; two ranks
    draw float64, so that an answer cannot count on one dtype.
    """
    first = dist.get_process_group_ranks(group)[0] if group else 0
    sizes = torch.Generator().manual_seed(seed)
    numbers = torch.Generator().manual_seed(seed + first)

    def uneven():
        return UNEVEN[torch.randint(len(UNEVEN), (), generator=sizes)]

    dtype = torch.float64 if group and group.size() == 2 else torch.float32
    return uneven, partial(torch.randn, generator=numbers, dtype=dtype)
