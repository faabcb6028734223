"""What fills the memory: all tensors that are alive, on any device, and what they are."""

import math
import weakref
from types import SimpleNamespace

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from labs.memory import meta_device, techniques

BLOCK = 512  # bytes; the CUDA allocator rounds every size up to a multiple of it
PARTS = ["weights", "gradients", "optimizer state", "saved activations", "working set", "logits"]
PARTS += ["communication buffers", "inside kernels"]


class LiveTensors(TorchDispatchMode):
    """Counts the bytes of all tensors made inside it on one kind of device, by parts.

    live: {storage: Block(bytes, part, in_backward)}, whose part is one of PARTS. A tensor is
    logits if its rows are as long as (a rank's shard of) the vocabulary, a communication buffer
    if a collective reads or writes it, a saved activation if the forward made it and it is alive
    when a backward begins, else it belongs to the working set. The blocks alive at the peak are
    peak_blocks; it came in the peak_moment: "forward", "backward" or "optimizer step".
    """

    def __init__(self, args, world):
        """args: a script's arguments; world: its number of ranks."""
        super().__init__()
        self.device = args.device.type
        self.vocabulary = vocabulary_sizes(args.config, args.length, world)
        self.live, self.now = {}, 0
        self.peak, self.peak_moment, self.peak_blocks = 0, "forward", []
        self.at_peak = False  # nothing was released since the peak
        self.in_backward = False
        self.moment = "forward"  # what runs where no backward does
        self.shapes = {}  # of run_by_shape()
        resize, storage = torch.UntypedStorage.resize_, torch.UntypedStorage
        storage.resize_ = lambda *sizes: self.resized(*sizes) or resize(*sizes)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(hasattr(kind, "full_tensor") for kind in types):
            return NotImplemented  # a DTensor: what it does underneath counts
        in_backward = torch._C._current_graph_task_id() != -1
        if in_backward and not self.in_backward:
            self.note_saved()
        self.in_backward = in_backward
        if func.is_view:
            return func(*args, **(kwargs or {}))
        meta, out = self.device == "meta", None
        if meta and not kwargs:
            out = meta_device.run_by_shape(self.shapes, func, args)
        if out is None:
            out = func(*args, **(kwargs or {}))
        for tensor in self.own(out):
            self.count(tensor)
        if func.namespace in ("c10d", "_c10d_functional"):
            for tensor in self.own((args, out)):
                block = self.live[tensor.untyped_storage()._cdata]
                if block.part == "working set":
                    block.part = "communication buffers"
        if meta and func.name() in meta_device.SCRATCH:
            self.add("scratch", meta_device.SCRATCH[func.name()](*args), "inside kernels")
            self.remove("scratch")
        return out

    def own(self, tree):
        """The tensors of the device in it; a fake one is DTensor working out a shape."""
        for x in tree_leaves(tree):
            fake = isinstance(x, torch._subclasses.FakeTensor)
            if isinstance(x, torch.Tensor) and not fake and x.device.type == self.device:
                yield x

    def count(self, tensor):
        """Add the storage of a tensor, if it is new, until it is released."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self.live:
            logits = tensor.dim() > 1 and tensor.shape[-1] in self.vocabulary
            self.add(storage._cdata, storage.nbytes(), "logits" if logits else "working set")
            weakref.finalize(storage, self.remove, storage._cdata)

    def add(self, key, size, part):
        size = math.ceil(size / BLOCK) * BLOCK
        self.live[key] = SimpleNamespace(bytes=size, part=part, in_backward=self.in_backward)
        self.now += size
        if self.now > self.peak:
            self.peak, self.at_peak = self.now, True
            self.peak_moment = "backward" if self.in_backward else self.moment

    def remove(self, key):
        if self.at_peak:  # the first release since a new peak: everything is still there
            self.peak_blocks, self.at_peak = list(self.live.values()), False
        self.now -= self.live.pop(key).bytes

    def resized(self, storage, size):
        """fully_shard releases and fills gathered weights in place: this is a new block."""
        if old := self.live.get(storage._cdata):
            self.remove(storage._cdata)
            self.add(storage._cdata, size, "logits" if old.part == "logits" else "working set")

    def note_saved(self):
        """A backward begins: what the forward made and is still alive was saved for it."""
        for block in self.live.values():
            if not block.in_backward and block.part in ("working set", "communication buffers"):
                block.part = "saved activations"

    def allocated_peak(self):
        """In bytes. A GPU's allocator also knows what kernels took for themselves."""
        return torch.cuda.max_memory_allocated() if self.device == "cuda" else self.peak

    def enter(self, moment):
        """From now on "forward", or "optimizer step", runs where no backward does."""
        self.moment = moment

    def restart_peak(self):
        """Begin a new peak with what is alive now; returns the old one."""
        old = self.allocated_peak()
        self.peak, self.at_peak, self.peak_moment = self.now, True, self.moment
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        return old

    def breakdown(self, model, optimizers):
        """Bytes of each of PARTS at the peak. model: after the step, with its gradients."""
        states = [x for _, adamw in optimizers for x in (*adamw.state, *tree_leaves(adamw.state))]
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        lasting = {"optimizer state": states, "gradients": gradients}
        # The last word: AdamW's master of a float32 weight is the weight itself
        lasting["weights"] = [*model.parameters(), *model.buffers()]
        for part, tensors in lasting.items():
            for tensor in map(techniques.local, tensors):
                if block := self.live.get(tensor.untyped_storage()._cdata):
                    block.part = part
        parts = dict.fromkeys(PARTS, 0)
        for block in self.live.values() if self.at_peak else self.peak_blocks:
            parts[block.part] += block.bytes
        parts["inside kernels"] += self.allocated_peak() - self.peak
        return parts


def vocabulary_sizes(config, length, world):
    """How long rows of (a rank's shard of) the vocabulary are, unless other rows are as long."""
    sizes = {config.vocab_size, config.vocab_size // world, -(-config.vocab_size // world)}
    head_dim = getattr(config, "head_dim", None)
    head_dim = head_dim or config.hidden_size // config.num_attention_heads
    others = (config.hidden_size, config.intermediate_size, head_dim, length)
    return sizes - {size // n for size in others for n in (1, world)}
