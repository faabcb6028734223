"""Comparison to the bit, layouts of four ranks, and the calls of products: for lab 16.

A sum's bits come from a tree that is put together from halves, not from neighbours. A model's
values come from Hugging Face; its bits are compared with those of one rank of the same answers.
"""

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from checks.compare import tried
from harness import LABS, Wrong, expect, load, relative_error
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

finished = load(LABS / "lab16_bits.py")  # not the learner's
LAYOUTS = (2, 1), (1, 2), (2, 2), (4, 1), (1, 4)  # dp, tp, beside one rank
PLACES = {1: [2], 2: [1, 3], 4: [0, 1, 2, 3]}  # who takes part: not the first ranks of the world
DTYPES = torch.float32, torch.bfloat16
NEAR = {torch.float32: 1e-5, torch.bfloat16: 5e-2}  # of values: rounding alone stays below
PRODUCTS = "mm", "bmm", "addmm", "baddbmm", "mkldnn_linear", "mv", "dot"


def drawn(seed, *shape, dtype=torch.float32, spread=6):
    """Random numbers of very different sizes, so that another order gives another sum."""
    numbers = torch.Generator().manual_seed(seed)
    sizes = torch.rand(shape, generator=numbers) * spread
    return (torch.randn(shape, generator=numbers) * 2**sizes).to(dtype)


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


def crossing(parts):
    """A tree whose first sums are of parts that lie half of the row apart."""
    while len(parts) > 1:
        half = len(parts) // 2
        parts = [a + b for a, b in zip(parts[:half], parts[half:])]
    return parts[0]


ORDERS = {
    "neighbours first, then neighbouring sums: not one after the other": one_by_one,
    "neighbours first (0 and 1, 2 and 3), not those that lie far apart": crossing,
}


def bits(what, mine, right, hints=None, hint=""):
    """Raise Wrong unless a tensor has the right shape, dtype and every bit.

    hints {text: tensor}: if mine is that tensor instead, the text is the hint; else it is hint.
    """
    expect(isinstance(mine, torch.Tensor), f"{what} is {type(mine).__name__}, not a tensor", hint)
    found = f"{what} has shape {tuple(mine.shape)}, not {tuple(right.shape)}"
    expect(mine.shape == right.shape, found, hint)
    expect(mine.dtype == right.dtype, f"{what} is {mine.dtype}, not {right.dtype}", hint)
    if torch.equal(mine, right):
        return
    known = [text for text, x in (hints or {}).items() if torch.equal(mine, x)]
    apart = (mine.detach().double() - right.detach().double()).abs()
    count, most = int((mine != right).sum()), apart.max().item()
    found = f"{what}: {count} of {mine.numel()} numbers differ, by at most {most:.1e}"
    raise Wrong(found, known[0] if known else hint)


def near(what, mine, right, hints=None, hint="", tolerance=None):
    """Raise Wrong unless mine is right but for rounding in its dtype; as bits() otherwise."""
    expect(isinstance(mine, torch.Tensor), f"{what} is {type(mine).__name__}, not a tensor", hint)
    found = f"{what} has shape {tuple(mine.shape)}, not {tuple(right.shape)}"
    expect(mine.shape == right.shape, found, hint)
    most = tolerance or NEAR[mine.dtype]
    known = [t for t, x in (hints or {}).items() if relative_error(mine.detach(), x) <= most]
    error = relative_error(mine.detach(), right)
    expect(error <= most, f"{what} is off by {error:.1e}", known[0] if known else hint)


def batch_mask(seed, name, step):
    """(all tokens of a batch, 64): which of 64 features a dropout keeps."""
    token, feature = torch.arange(finished.B * finished.S)[:, None], torch.arange(64)
    return finished.uniform(seed, name, step, token, feature) >= finished.DROP


def drawn_order(seed, epoch, examples):
    """[example] of an epoch, by sorting pairs."""
    draws = finished.uniform(seed, "data", epoch, torch.arange(examples)).tolist()
    return sorted(range(examples), key=lambda i: (draws[i], i))


def groups(sizes=(1, 2, 4)):
    """[(group, rank, size)] of the groups of these sizes that this rank is in."""
    made = [dist.new_group(PLACES[size]) for size in sizes]
    inside = [group for group in made if group is not dist.GroupMember.NON_GROUP_MEMBER]
    return [(group, group.rank(), group.size()) for group in inside]


def alone(lab):
    """The layout of one rank, for each rank by itself."""
    made = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    own = made[dist.get_rank()]
    return lab.Layout(own, own)


def layouts(lab, shapes=LAYOUTS):
    """Yield ("dp x tp", layout) of those that this rank is in."""
    for dp, tp in shapes:
        ranks = PLACES[dp * tp]
        over_dp = [dist.new_group(ranks[i::tp]) for i in range(tp)]
        over_tp = [dist.new_group(ranks[i * tp : (i + 1) * tp]) for i in range(dp)]
        if dist.get_rank() in ranks:
            at = ranks.index(dist.get_rank())
            yield f"dp {dp} x tp {tp}", lab.Layout(over_dp[at % tp], over_tp[at // tp])


class Products(TorchDispatchMode):
    """Notes every matrix product while inside: its name, and of each operand the shape, the strides
    and the address modulo 64, by which a kernel may choose another order."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._opname in PRODUCTS:
            given = [x for x in args if isinstance(x, torch.Tensor)]
            how = ((tuple(x.shape), x.stride(), x.data_ptr() % 64) for x in given)
            self.calls.append((func._opname, *how))
        return func(*args, **(kwargs or {}))


def same_calls(told, mine, right, hint):
    """Raise Wrong unless the same kinds of products are made as on one rank."""
    other = sorted({*mine} ^ {*right})
    if other:
        name, *operands = other[0]
        sizes = " by ".join(str(shape) for shape, *_ in operands)
        where = "here" if other[0] in mine else "on one rank"
        raise Wrong(f"{told}: a product, {name} of {sizes}, only {where}", hint)


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that is made while inside."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.elements = max(self.elements, out.untyped_storage().nbytes() // out.itemsize)
        return out


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


def as_alone(what, found, right, hint=""):
    """Raise Wrong where {key: tensor} of a layout is not, to the bit, that of one rank."""
    for key, x in found.items():
        bits(f"{what}, beside one rank: {key}", x, right[key], hint=hint)


def mlp_case(lab, layout, seed, dtype):
    """({name: tensor} of an MLP: out and gradients, its products, the full float32 result)."""
    name, keys = "layers.1", ("gate", "up", "down")
    w = {
        (f"{name}.{k}", b): finished.initial(f"{name}.{k}", b, seed) for k in keys for b in range(8)
    }
    w = {key: (5 * x).to(dtype) for key, x in w.items()}
    full = full_weights({key: x.float() for key, x in w.items()})
    x, dy = (drawn(seed + i, finished.S, finished.H, spread=0).to(dtype) for i in (1, 2))
    w = {key: x.requires_grad_() for key, x in w.items() if key[1] in layout.blocks}

    def drop(y, site, first):
        return finished.dropout(y, site, first, layer=1, sequence=2, step=3, seed=seed)

    given = x.clone().requires_grad_()
    with Products() as products:
        out = lab.in_blocks(partial(lab.mlp, w, name, drop), given, layout)
        expect(isinstance(out, torch.Tensor), f"in_blocks() returns {type(out).__name__}")
        hint = "Enter in front, Leave behind, and nothing detached between them"
        leaves = [given, *w.values()]
        grads = tried("the MLP's backward", hint, torch.autograd.grad, out, leaves, dy)
    found = {"out": out.detach(), "x's gradient": grads[0]}
    found |= {f"the gradient of {key}": grad for key, grad in zip(w, grads[1:])}
    wide = x.float()
    gate, up, down = (full[f"{name}.{key}"] for key in keys)
    hidden = F.silu(wide @ gate.T) * (wide @ up.T)
    undropped = hidden @ down.T
    return found, products.calls, drop(hidden, "mlp", 0) @ down.T, undropped


def own_part(state, layout):
    """What a layout's rank holds of the state of one rank."""
    own = {"step": state["step"]}
    for kind in "weights", "mean", "square":
        kept = {k: x for k, x in state[kind].items() if k[1] is None or k[1] in layout.blocks}
        own[kind] = {k: x.detach().clone().requires_grad_(x.requires_grad) for k, x in kept.items()}
    return own
