"""Sums in two orders, comparison to the bit, and Hugging Face's LLaMA beside it: for lab 16."""

from functools import cache

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from labs.kit.harness import relative_error
from labs.kit.tools import subgroup
from labs.lab16_bits import lesson as finished  # not the learner's

DTYPES = torch.float32, torch.bfloat16
NEAR = {torch.float32: 1e-5, torch.bfloat16: 5e-2}  # of values: rounding alone stays below


def tree(parts):
    """The tree's sum: that of the first half, and that of the second."""
    half = len(parts) // 2
    return tree(parts[:half]) + tree(parts[half:]) if half else parts[0]


def one_by_one(parts):
    """The sum from left to right."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def drawn(seed, *shape, dtype=torch.float32, spread=6):
    """Random numbers of very different sizes, so that another order gives another sum."""
    numbers = torch.Generator().manual_seed(seed)
    sizes = torch.rand(shape, generator=numbers) * spread
    return (torch.randn(shape, generator=numbers) * 2**sizes).to(dtype)


def about(mine, right, most=None):
    """right, where mine is right but for rounding in its dtype; else mine."""
    error = relative_error(mine.detach(), right)
    return right if error <= (most or NEAR.get(mine.dtype, 1e-5)) else mine


def note_bits(eye, mine, one):
    """Note of {name: tensor} how many numbers are not those of one rank."""
    for name, x in mine.items():
        same = x.shape == one[name].shape and x.dtype == one[name].dtype
        count = int((x != one[name]).sum()) if same else x.numel()
        eye.note(f"the count of numbers of {name} that one rank has not", count)


def note_products(eye, mine, one):
    """Note the products that are made here alone, or on one rank alone."""
    kinds = sorted({*mine} ^ {*one})
    shapes = [f"{name} of {' by '.join(str(x[0]) for x in given)}" for name, *given in kinds]
    eye.note("the list of products made here or on one rank alone", shapes[:1])


@cache
def one_rank():
    """The layout of one rank, for each rank by itself."""
    own = subgroup(dist.group.WORLD, ranks=[dist.get_rank()])
    return finished.Layout(own, own)


def full_weights(w):
    """{name: the full tensor} of one rank's w {(name, block): tensor}."""
    found = {}
    for name in dict.fromkeys(name for name, _ in w):
        dim, _ = finished.CUT[name.split(".")[-1]]
        blocks = [None] if dim is None else range(finished.BLOCKS)
        parts = [w[name, block].detach() for block in blocks]
        found[name] = parts[0] if dim is None else torch.cat(parts, dim)
    return found


def hugging_faces(w, batch):
    """(mean loss, {name: gradient}) of Hugging Face's LLaMA with the weights w of one rank."""
    f = finished
    sizes = {"hidden_size": f.H, "intermediate_size": f.WIDTH, "num_hidden_layers": f.LAYERS}
    sizes |= {"num_attention_heads": f.HEADS, "num_key_value_heads": f.KV, "head_dim": f.D}
    sizes |= {"vocab_size": f.VOCAB, "tie_word_embeddings": False, "rms_norm_eps": f.EPS}
    model, names = LlamaForCausalLM(LlamaConfig(**sizes)), {}
    for name in dict.fromkeys(name for name, _ in w):
        *layer, last = name.split(".")
        where = "self_attn." if last in "qkvo" else "mlp."
        theirs = {"embed": "model.embed_tokens", "head": "lm_head", "norm": "model.norm"}
        theirs |= {"norm1": "input_layernorm", "norm2": "post_attention_layernorm"}
        path = theirs.get(last, f"{where}{last}_proj")
        names[name] = f"model.{'.'.join(layer)}.{path}" if layer else path
    for name, weight in full_weights(w).items():
        model.get_submodule(names[name]).weight.data = weight.float()
    loss = model(input_ids=batch, labels=batch, use_cache=False).loss
    loss.backward()
    return loss.detach(), {n: model.get_submodule(p).weight.grad for n, p in names.items()}


def data_of(seed, count=finished.EXAMPLES):
    """Token ids (count, S), the same on every rank."""
    numbers = torch.Generator().manual_seed(seed + 1)
    return torch.randint(finished.VOCAB, (count, finished.S), generator=numbers)
