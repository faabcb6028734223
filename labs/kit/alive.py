"""What tensors are alive on a rank after each operation of a step, and what they are."""

import gc
import time
import weakref
from collections import Counter

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from labs.kit.tools import storage_of

PARTS = "parameters", "gradients", "optimizer", "gathered", "activations"


class AliveParts(TorchDispatchMode):
    """The bytes of all tensors after each operation, and at the peak what they are.

    known: {part: tensors} that exist before; others that exist before do not count. "gathered" is
    what an all-gather writes to, and "activations" is all the rest.
    """

    def __init__(self, known):
        super().__init__()
        self.refs, self.part, self.curve, self.peak = {}, {}, [], {}
        for part in known:
            self.hold(known[part], part)
        old = [x for x in gc.get_objects() if type(x) in (torch.Tensor, nn.Parameter)]
        old = [x for x in old if storage_of(x).nbytes()]  # fully_shard keeps empty ones to fill
        self.hold(old, None)

    def hold(self, tensors, part):
        """Note the memory of tensors; what is noted already keeps its part."""
        for storage in map(storage_of, tensors):
            known = self.refs.get(storage._cdata)
            if known is None or known() is None:  # or an address that is used again
                self.refs[storage._cdata] = weakref.ref(storage)
                self.part[storage._cdata] = part

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(hasattr(kind, "full_tensor") for kind in types):  # DTensor: see what is below it
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        made = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        self.hold(made, "activations")
        name = func._opname.replace("_", "")
        if "allgather" in name or name == "splitwithsizescopy":  # the latter: fully_shard's copy
            touched = [x for x in tree_leaves([args, kwargs, out]) if isinstance(x, torch.Tensor)]
            self.hold(touched, "gathered")
            for key in {storage_of(x)._cdata for x in touched}:
                if self.part[key] == "activations":
                    self.part[key] = "gathered"
        self.sample()
        return out

    def sample(self):
        """Add to the curve what is alive; keep the parts at the peak."""
        alive = {key: there() for key, there in self.refs.items()}
        sizes = Counter()
        for key, storage in alive.items():
            if storage is None:
                del self.refs[key]
            elif self.part[key]:
                sizes[self.part[key]] += storage.nbytes()
        self.curve.append(sizes.total())
        if sizes.total() > sum(self.peak.values()):
            self.peak = {part: sizes[part] for part in PARTS}


class Alive(TorchDispatchMode):
    """Counts the bytes of the tensors made inside it that are alive; `peak`: the most so far."""

    def __init__(self):
        super().__init__()
        self.storages, self.peak = weakref.WeakValueDictionary(), 0

    def now(self):
        return sum(storage.nbytes() for storage in self.storages.values())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out) if not func.is_view else ():
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.storages[storage._cdata] = storage
        self.peak = max(self.peak, self.now())
        return out


def bytes_alive(storages, most, seconds=3.0):
    """The bytes of storages [weak references] that exist; waits so long for at most `most` of them.

    gloo's own thread holds what it has sent or gathered for a moment longer than wait() takes.
    """
    end = time.monotonic() + seconds
    while True:
        there = [storage for reference in storages if (storage := reference()) is not None]
        nbytes = sum({storage._cdata: storage.nbytes() for storage in there}.values())
        if nbytes <= most or time.monotonic() > end:
            return nbytes
        del there
        time.sleep(0.001)
