"""Lab 10's tools: bytes that are alive, gradients; and its check of the predicted peak."""

import itertools
import weakref

import torch
from checks.compare import mistaken
from harness import LABS, Wrong, expect, load
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig

finished = load(LABS / "lab10_long_sequences.py")  # not the learner's


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


def gradients(loss, tensors):
    """The gradients of a loss; zeros where there are none."""
    loss.backward()
    found = [torch.zeros_like(t) if t.grad is None else t.grad.clone() for t in tensors]
    for tensor in tensors:
        tensor.grad = None
    return found


def check_predict(lab, group, seed):
    models = itertools.product((True, False), ((3, 8, 20, 900), (5, 12, 70, 40)))
    for (tied, (L, h, i, v)), tokens in itertools.product(models, (64, 1000)):
        sizes = {"num_hidden_layers": L, "hidden_size": h, "intermediate_size": i, "vocab_size": v}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": tied}
        config, parts = LlamaConfig(**sizes, **heads), (None, 48, tokens, tokens + 9)
        ways = itertools.product(("full", "none"), parts, parts, (8, 2))
        for recompute, tile, chunk, itemsize in ways:
            call = tokens, itemsize, recompute, tile, chunk
            right, found = (x.predict_peak(config, *call) for x in (finished, lab))
            keys = isinstance(found, dict) and set(found) == set(right)
            expect(keys, f"predict_peak() returns {found}", f"a dict of {', '.join(right)}")
            for key, value in right.items():
                what = f"{key} of {sizes}, {tokens} tokens of {itemsize} bytes, {recompute}, tile "
                what += f"{tile}, chunk {chunk}"
                if found[key] != value:
                    hint = peak_hint(key, found[key], config, call)
                    raise Wrong(f"{what}: {found[key]}, not {value}", hint)
    return "512 steps: weights, what is kept, and the peak, to the byte"


PEAK = [  # what is usually forgotten: a hint, a part of predict_peak(), what stands there instead
    ("bytes: times itemsize", " * itemsize", ""),
    ("bytes: times itemsize", " * itemsize", " * 4"),
    ("tied embeddings are one matrix", "(1 if config.tie_word_embeddings else 2)", "2"),
    ("an untied head has weights of its own", "(1 if config.tie_word_embeddings else 2)", "1"),
    ("a layer has two norms", "+ 2 * h\n", "\n"),
    ("the last norm has weights, too", "L * layer + h", "L * layer"),
    ("of all L layers, not of one", "kept = L * ", "kept = "),
    ("each layer's input is kept, besides what it saves", "h + saved)", "saved)"),
    ("logits, softmax and its gradient: 3 v a token", "3 * v", "2 * v"),
    ("logits, softmax and its gradient: 3 v a token", "3 * v", "v"),
    ("of a chunk's tokens alone", "min(chunk, tokens)", "tokens"),
    ("a tile has no more tokens than there are: min()", "min(tile, tokens)", "tile"),
    ("a chunk has no more tokens than there are: min()", "min(chunk, tokens)", "chunk"),
    ("of the MLP a tile alone has 7 i", "min(tile, tokens)", "tokens"),
    (
        "attention's backward, or the MLP's: the larger",
        "max(tokens * 5 * h, tokens",
        "(tokens * 5 * h + tokens",
    ),
    (
        "attention's backward, or the MLP's: the larger",
        "max(tokens * 5 * h, tokens * 2 * h",
        "(tokens * 5 * h",
    ),
    ("the loss, or a layer's backward: the larger of them", "max(logits, working)", "logits"),
    ("the loss, or a layer's backward: the larger of them", "max(logits, working)", "working"),
    ("loss and layer are never alive together: no sum", "max(logits, working)", "logits + working"),
    ("what is recomputed is there again", "working += tokens * saved", "pass"),
]
OTHERWISE = {
    "weights": "q, k, v, o: 4 h h; gate, up, down: 3 h i; two norms a layer, and one",
    "kept": "block: each layer's input; none: that, and all that each layer saves",
    "peak": "in a layer's backward: what is saved, and on top what the docstring says",
}


def peak_hint(key, found, config, call):
    """What a part of predict_peak() that is wrong comes of."""
    for hint, ours, theirs in reversed(PEAK):
        if mistaken(finished.predict_peak, (ours, theirs))(config, *call)[key] == found:
            return hint
    return OTHERWISE[key]
