"""Lab 10's tools: bytes that are alive, gradients; and its check of the predicted peak."""

import itertools

import torch
from transformers import LlamaConfig

from labs.kit.harness import Wrong, expect
from labs.kit.usual import usual_hint
from labs.lab10_long_sequences import lesson as finished  # not the learner's


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
                    usual = MISTAKES, finished.predict_peak, (config, *call), found[key], key
                    raise Wrong(f"{what}: {found[key]}, not {value}", usual_hint(*usual))
    return "512 steps: weights, what is kept, and the peak, to the byte"


MISTAKES = """
== predict_peak
working += tokens * saved -> pass  # what is recomputed is there again
max(logits, working) -> logits + working  # loss and layer are never alive together: no sum
max(logits, working) -> working  # here the loss has more; yours is what a layer's backward has
max(logits, working) -> logits  # here a layer's backward has more; yours is what the loss has
max(tokens * 5 * h, tokens * 2 * h -> (tokens * 5 * h  # attention's or the MLP's: the larger
max(tokens * 5 * h, tokens -> (tokens * 5 * h + tokens  # attention's or the MLP's: the larger
min(tile, tokens) -> tokens  # of the MLP a tile alone has 7 i
min(chunk, tokens) -> chunk  # a chunk has no more tokens than there are: min()
min(tile, tokens) -> tile  # a tile has no more tokens than there are: min()
min(chunk, tokens) -> tokens  # of a chunk's tokens alone
3 * v -> v  # logits, softmax and its gradient: 3 v a token
3 * v -> 2 * v  # logits, softmax and its gradient: 3 v a token
h + saved) -> saved)  # each layer's input is kept, besides what it saves
kept = L * -> kept =  # of all L layers, not of one
L * layer + h -> L * layer  # the last norm has weights, too
+ 2 * h ->  # a layer has two norms
(1 if config.tie_word_embeddings else 2) -> 1  # an untied head has weights of its own
(1 if config.tie_word_embeddings else 2) -> 2  # tied embeddings are one matrix
 * itemsize -> * 4  # bytes: times itemsize
 * itemsize ->  # bytes: times itemsize
weights: 4 h h, 3 h i, norms, tables; kept: each layer's input, or all saved, too; peak: the larger
"""
