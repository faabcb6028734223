"""Lab 10's tools: bytes that are alive, gradients; and its check of the predicted peak."""

import itertools
import weakref

import torch
from harness import LABS, expect, load
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


def drawn(seed, *shape):
    numbers = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=numbers, dtype=torch.float64)


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
        ways = itertools.product(("block", "none"), parts, parts, (8, 2))
        for recompute, tile, chunk, itemsize in ways:
            call = tokens, itemsize, recompute, tile, chunk
            right, found = (x.predict_peak(config, *call) for x in (finished, lab))
            keys = isinstance(found, dict) and set(found) == set(right)
            expect(keys, f"predict_peak() returns {found}", f"a dict of {', '.join(right)}")
            for key, value in right.items():
                what = f"{key} of {sizes}, {tokens} tokens of {itemsize} bytes, {recompute}, tile "
                what += f"{tile}, chunk {chunk}"
                hint = peak_hint(key, found[key], config, call)
                expect(found[key] == value, f"{what}: {found[key]}, not {value}", hint)
    return "512 steps: weights, what is kept, and the peak, to the byte"


def peak_hint(key, found, config, call):
    """What a part of predict_peak() that is wrong comes of."""
    (tokens, itemsize, recompute, tile, chunk), L = call, config.num_hidden_layers
    h, i, v = config.hidden_size, config.intermediate_size, config.vocab_size
    right = finished.predict_peak(config, *call)
    off = (found - right[key]) / itemsize  # numbers
    if found in (right[key] // itemsize, right[key] // itemsize * 4):
        return "bytes: times itemsize"
    if key == "weights":
        usual = {v * h: "tied embeddings are one matrix", -v * h: "an untied head has its own"}
        usual |= {-2 * h * L: "a layer has two norms", -h: "the last norm has weights, too"}
        return usual.get(
            off, "q, k, v, o: 4 h h; gate, up, down: 3 h i; two norms a layer, and one"
        )
    if key == "kept":
        usual = {-L * tokens * h: "each layer's input is kept, besides what it saves"}
        usual |= {right["kept"] / itemsize * (1 / L - 1): "of all L layers, not of one"}
        return usual.get(
            off, "block: each layer's input; none: that, and all that each layer saves"
        )
    n, t = min(chunk or tokens, tokens), min(tile or tokens, tokens)
    again, logits, attention = tokens * (9 * h + 4 * i), 3 * v * n, 0
    mlp = tokens * (3 * i + h)
    if tile is not None:
        again, attention, mlp = tokens * 6 * h, tokens * 5 * h, tokens * 2 * h + t * 7 * i
    if recompute != "block":
        again = 0
    layer = again + max(attention, mlp)
    few = "a tile, or a chunk, has no more tokens than there are: min()"
    ways = [  # hint, logits, a layer's backward
        ("in a layer's backward: what is saved, and on top what the docstring says", 0, 0),
        ("a chunk's tokens alone have logits", 3 * v * tokens, layer),
        ("logits, softmax and its gradient: 3 v a token", 2 * v * n, layer),
        ("logits, softmax and its gradient: 3 v a token", v * n, layer),
        ("of the MLP a tile alone has 7 i", logits, again + tokens * (2 * h + 7 * i)),
        (
            few,
            v * 3 * (chunk or tokens),
            layer,
        ),
        (
            few,
            logits,
            layer + ((tile or t) - t) * 7 * i,
        ),
        ("attention's backward, or the MLP's: the larger", logits, again + attention + mlp),
        ("attention's backward, or the MLP's: the larger", logits, again + attention + t * 7 * i),
        ("loss and layer are never alive together: no sum, the larger", logits + layer, 0),
        ("the loss, or a layer's backward: the larger of them", logits, 0),
        ("the loss, or a layer's backward: the larger of them", 0, layer),
        ("what is recomputed is there again, when its backward begins", logits, layer - again),
    ]
    usual = {max(parts) * itemsize: hint for hint, *parts in ways}
    return usual.get(found, ways[0][0])
