"""What the checks and experiments of several labs share: signals between ranks, counts."""

import tempfile
import time
from contextlib import contextmanager
from datetime import timedelta
from functools import wraps
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves


def subgroup(group, seconds=600, ranks=None):
    """A group of some of a group's ranks, or all; its calls fail after so many seconds."""
    members = dist.get_process_group_ranks(group)
    members = members if ranks is None else [members[rank] for rank in ranks]
    how = {"timeout": timedelta(seconds=seconds), "use_local_synchronization": True}
    return dist.new_group(members, **how)


@contextmanager
def shared_folder(group):
    """A folder that all ranks see, till all are done with it: for signals between them."""
    with tempfile.TemporaryDirectory() as own:
        names = [own]
        dist.broadcast_object_list(names, group=group, group_src=0)
        yield Path(names[0])
        dist.barrier(group)


def appears(path, seconds):
    """Wait till a file is there, for at most so long."""
    end = time.monotonic() + seconds
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.002)


@contextmanager
def noted_waits(what=lambda work: work):
    """A list to which every call of work.wait() or work.get_future() adds what(work).

    A work that is kept keeps its tensors.
    """
    waits = []

    def noting(method):
        @wraps(method)
        def noted(work, *args):
            waits.append(what(work))
            return method(work, *args)

        return mock.patch.object(dist.Work, method.__name__, noted)

    with noting(dist.Work.wait), noting(dist.Work.get_future):
        yield waits


def storage_of(tensor):
    """The memory of a tensor on this rank; of a DTensor, also of one that is still under way."""
    with torch.no_grad():
        tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        tensor = tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor
        return tensor.untyped_storage()


class Kept(torch.autograd.graph.saved_tensors_hooks):
    """Counts the bytes that autograd keeps for the backward of what runs inside, each storage once.

    Parameters exist anyway, and do not count. Of a DTensor only what this rank holds counts.
    storages {address: bytes}
    """

    def __init__(self, *parameters):
        self.storages, self.known = {}, {storage_of(p).data_ptr() for p in parameters}
        super().__init__(self.note, lambda tensor: tensor)

    def note(self, tensor):
        storage = storage_of(tensor)
        if storage.data_ptr() not in self.known:
            self.storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    def note_attributes(self, out):
        """Count what an autograd Function has written to its ctx, too: out is its result."""
        for x in tree_leaves(list(getattr(out.grad_fn, "__dict__", {}).values())):
            if isinstance(x, torch.Tensor):
                self.note(x)

    def __enter__(self):
        super().__enter__()
        return self

    @property
    def bytes(self):
        return sum(self.storages.values())


def refusal(kind, function, *args):
    """The message of an error of this kind that a call raises, or None."""
    try:
        function(*args)
    except kind as problem:
        return str(problem)
    return None


def gradients(y, dy, inputs):
    """Those of the sum of y dy; zeros where y does not depend on an input."""
    return torch.autograd.grad(y, inputs, dy, allow_unused=True, materialize_grads=True)


def on_every_rank(value, group):
    """The values of a Python object on all ranks, in order; no Traffic counts this."""
    values = [value] * group.size()
    if group.size() > 1:
        with _disable_current_modes():
            dist.all_gather_object(values, value, group=group)
    return values


PRODUCTS = "mm", "bmm", "addmm", "baddbmm", "mkldnn_linear", "mv", "dot"


class Products(TorchDispatchMode):
    """While inside, notes the dtypes of matrix products, and of each product the name and each
    operand's shape, strides and address modulo 64: by these a kernel may choose its order."""

    def __init__(self):
        super().__init__()
        self.calls, self.dtypes = [], set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._opname in PRODUCTS:
            given = [x for x in args if isinstance(x, torch.Tensor)]
            self.dtypes |= {x.dtype for x in given}
            how = ((tuple(x.shape), x.stride(), x.data_ptr() % 64) for x in given)
            self.calls.append((func._opname, *how))
        return func(*args, **(kwargs or {}))
