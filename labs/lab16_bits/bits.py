"""Comparison to the bit, layouts of four ranks, and the calls of products: for lab 16.

A sum's bits come from a tree that is put together from halves, not from neighbours. A model's
values come from Hugging Face; its bits are compared with those of one rank of the same answers.
"""

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from labs.kit.compare import tried
from labs.kit.harness import Wrong, expect, relative_error
from labs.kit.tools import Products
from labs.kit.usual import section, usual_hint
from labs.lab16_bits import lesson as finished  # not the learner's

LAYOUTS = (2, 1), (1, 2), (2, 2), (4, 1), (1, 4)  # dp, tp, beside one rank
PLACES = {1: [2], 2: [1, 3], 4: [0, 1, 2, 3]}  # who takes part: not the first ranks of the world
DTYPES = torch.float32, torch.bfloat16
NEAR = {torch.float32: 1e-5, torch.bfloat16: 5e-2}  # of values: rounding alone stays below
MISTAKES = """
== initial
- 0.5) * SPREAD -> - 0.5)  # times SPREAD
 - 0.5) * SPREAD -> * SPREAD - 0.5)  # uniform() - 0.5, then times SPREAD
 - 0.5) -> )  # uniform() - 0.5, times SPREAD
rows[:, None] * n + columns -> rows[:, None] * m + columns  # i n + j: there are n columns
rows[:, None] * n + columns -> rows[:, None] + columns * m  # i n + j: row by row
rows[:, None] * n + columns -> rows[:, None] * len(columns) + columns  # n, as in the full matrix
(block * size, (block + 1) * size) -> (size)  # i and j count in the full matrix, not in the block
uniform(seed -> uniform(seed + block  # the seed is the same for all blocks
name, rows -> name.split(".")[-1], rows  # the whole name: layers differ
dim == 0 -> True  # a block of dim 1 has all rows, and its own columns
of each element i n + j in the full matrix; the rows, or columns, from block (size / BLOCKS) on
== dropout
first + torch -> torch  # features are counted from first
sequence * S + torch -> torch  # tokens are counted through the batch
>= DROP -> < DROP  # kept where the number is at least DROP
kept / (1 - DROP) -> kept.float()  # what is kept is times 1 / (1 - DROP)
kept / (1 - DROP) -> kept / DROP  # what is kept is times 1 / (1 - DROP)
step, token -> 0 * step, token  # another mask in each step
 {layer}" -> "  # the name is f"{site} {layer}": another mask in each layer
 {layer}" -> {layer}"  # the name is f"{site} {layer}", with a space
step, token[:, None] -> token[:, None], step  # step, token, feature in this order
x / (1 - DROP) where uniform(seed, name, step, token, feature) >= DROP, of the batch's token numbers
== batch_at
EXAMPLES // B) -> EXAMPLES)  # EXAMPLES // B steps are an epoch
"data", epoch -> "data", 0 * epoch  # another order in each epoch
"data", epoch -> "data", step  # an order for each epoch, not for each step
epoch, torch.arange(EXAMPLES) -> torch.arange(EXAMPLES), epoch  # epoch, then example
uniform(seed, "data", epoch -> uniform(seed + epoch, "data", 0  # seed stays; epoch is an argument
(stable=True) -> (stable=True).argsort()  # the sequences in order, not their places
stable=True -> stable=True, descending=True  # ascending
.argsort(stable=True) -> .argsort()  # of equals the lower number first: stable=True
place * B : (place + 1) * B -> place : place + B  # batch number `place` begins at place B
place * B : (place + 1) * B -> step * B : (step + 1) * B  # its place in the epoch
place * B : (place + 1) * B -> place :: EXAMPLES // B  # B that follow each other in the order
return order -> return epoch * EXAMPLES + order  # sequences have the numbers 0 to EXAMPLES - 1
epochs count from 0; step's place in its epoch, times B, is where the batch begins in the order
== doubling
x + exchange( -> exchange(  # add what comes to what is there
the sum so far goes to the peer, what comes is added: at distance 1, then 2, then 4
== halving
if not rank & distance -> if rank & distance  # the lower rank has the first half, there and back
[other, mine] if rank & distance else [mine, other] -> [mine, other]  # the lower's comes first
cat([other, mine] if rank -> cat([other, mine] if ~rank  # the lower rank has the first half
keep + exchange( -> exchange(  # add what comes to the half that is kept
.view(x.shape) ->  # in x's shape
a half is given, what comes is added to the other; back from the largest distance on, in x's shape
== mlp
block * (WIDTH // BLOCKS) -> 0  # the first feature of block b is b WIDTH / BLOCKS
block * (WIDTH // BLOCKS) -> block  # the first feature of block b is b WIDTH / BLOCKS
drop(F.silu(gate) * up, -> (lambda x, *_: x)(F.silu(gate) * up,  # drop() between the two
F.silu(gate) * up -> F.silu(gate * up)  # silu of gate y alone, then times up y
F.silu(gate) * up -> F.silu(up) * gate  # silu of gate y, not of up y
F.silu(gate) * up -> gate * up  # silu of gate y
F.silu(gate) * up -> F.gelu(gate) * up  # silu, not gelu
"mlp", -> f"{name} mlp",  # the site is "mlp"
down drop(silu(gate y) (up y)), of this block's weights
== token_losses
shifted.exp().sum(-1) -> x.to(wide).exp().sum(-1)  # both sums are of logits less peak
shifted.gather -> x.to(wide).gather  # both sums are of logits less peak
.masked_fill(elsewhere, 0) ->  # a target is in one block, and counts on no other one
masked_fill(elsewhere, 0) -> masked_fill(elsewhere, -torch.inf)  # elsewhere 0: it is a summand
return Leave -> return -Leave  # minus the target's logit alone
*sums).log() -> *(x.log() for x in sums))  # the log of the sum over all blocks
column[:, None])[:, 0] -> column[:, None] * 0)[:, 0]  # the target's logit
.log() ->  # the log of the sum
 - Leave.apply(layout.tp, *chosen) -> + Leave.apply(layout.tp, *chosen)  # less the target's logit
one number a token: the log of Leave(own sums of exp) - Leave(own targets' logits)
== gradients
layout, i, step -> layout, 0, step  # dropout counts tokens through the batch: it needs the number i
i, step, seed -> i, 0, seed  # the step is in dropout's numbers, too
in layout.sequences -> in range(1)  # every own sequence
all_reduce(tree_sum(parts) -> all_reduce(tree_sum(parts) / B  # each loss is a part of the mean
all_reduce(tree_sum(parts) -> all_reduce(tree_sum(parts) * B  # the parts add up to the mean
every own sequence i (dropout needs it), then tree_sum() of them, then all_reduce() over layout.dp
== cost
activations = (4 * LAYERS + 2) -> activations = (2 * LAYERS + 1)  # and in the backward as much
activations = (4 * LAYERS + 2) -> activations = (4 * LAYERS + 1)  # embed's and the head's
activations = (4 * LAYERS + 2) -> activations = 4 * LAYERS  # embed's and the head's
2 * 4 * sent -> 2 * itemsize * sent  # sums over the vocabulary are float32: 4 bytes
2 * 4 * sent(S - 1, tp) -> 4 * sent(S - 1, tp)  # the loss has two sums over the vocabulary
 + 2 * 4 * sent(S - 1, tp) ->  # the loss has two sums over the vocabulary
sent(S - 1, tp) -> sent(S, tp)  # the last token has no target: S - 1 losses
sequences * (activations -> 1 * (activations  # of each own sequence
sequences * (activations -> B * (activations  # of own sequences, B / dp
sent(S * H, tp) * itemsize -> sent(S * H, tp) * 4  # x has `itemsize` bytes a number
4 * sent(1, dp) + itemsize -> itemsize  # the loss is summed over dp, too
4 * sent(1, dp) -> itemsize * sent(1, dp)  # the loss is float32: 4 bytes
 // BLOCKS * blocks ->  # of a cut weight a rank has its blocks
LAYERS * size -> size  # each layer has weights
sent(weights, dp) -> weights  # what all_reduce() sends
numbers * P.bit_length() - numbers if numbers % P else ->  # doubling where P does not divide
sequences * blocks * (LAYERS -> sequences * BLOCKS * (LAYERS  # of own blocks
sequences * blocks * (LAYERS -> blocks * (LAYERS  # of each own sequence
sequences * blocks * (LAYERS -> sequences * (LAYERS  # of each own block
+ 6) + 3 -> + 6)  # the head's three products
7 * 3 + 6 -> 7 * 3 + 2  # attention has 2 forward and 4 backward
7 * 3 + 6 -> 7 * 3  # attention has 2 forward and 4 backward
(7 * 3 + 6) + 3 -> (7 + 2) + 1  # a product has two more in the backward
over tp 4 a layer, embed and head, and two sums of the loss; over dp all gradients and the loss
"""


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


def hint_for(usual, mine, tolerance):
    """usual_hint() of (mistakes, function, args) and, if there is one, the view of its result."""
    mistakes, function, args, *view = usual
    return usual_hint(mistakes, function, args, mine, None, *view, tolerance=tolerance)


def bits(what, mine, right, hints=None, hint="", usual=()):
    """Raise Wrong unless a tensor has the right shape, dtype and every bit.

    hints {text: tensor}: if mine is that tensor instead, the text is the hint; usual: what
    hint_for() takes first, to find one; else it is hint.
    """
    expect(isinstance(mine, torch.Tensor), f"{what} is {type(mine).__name__}, not a tensor", hint)
    same = mine.shape == right.shape and mine.dtype == right.dtype
    if same and torch.equal(mine, right):
        return
    found = f"{what} is {mine.dtype} {tuple(mine.shape)}, not {right.dtype} {tuple(right.shape)}"
    if same:
        apart = (mine.detach().double() - right.detach().double()).abs().max().item()
        count = int((mine != right).sum())
        found = f"{what}: {count} of {mine.numel()} numbers differ, by at most {apart:.1e}"
    known = [text for text, x in (hints or {}).items() if torch.equal(mine, x)]
    raise Wrong(found, known[0] if known else hint_for(usual, mine, 1e-6) if usual else hint)


def near(what, mine, right, hint="", tolerance=None, usual=()):
    """Raise Wrong unless mine is right but for rounding in its dtype; as bits() otherwise."""
    expect(isinstance(mine, torch.Tensor), f"{what} is {type(mine).__name__}, not a tensor", hint)
    most, error = tolerance or NEAR[mine.dtype], relative_error(mine.detach(), right)
    if error > most:
        same = mine.shape == right.shape
        off = f"off by {error:.1e}" if same else f"{tuple(mine.shape)}, not {tuple(right.shape)}"
        raise Wrong(f"{what} is {off}", hint_for(usual, mine, most) if usual else hint)


def batch_mask(seed, name, step):
    """(all tokens of a batch, 64): which of 64 features a dropout keeps."""
    token, feature = torch.arange(finished.B * finished.S)[:, None], torch.arange(64)
    return finished.uniform(seed, name, step, token, feature) >= finished.DROP


def coarse(*args, fine=finished.uniform):
    """uniform(), of 8 numbers alone: many are equal."""
    return (fine(*args) * 8).floor() / 8


def drawn_order(uniform, seed, epoch, examples):
    """[example] of an epoch, by sorting pairs."""
    draws = uniform(seed, "data", epoch, torch.arange(examples)).tolist()
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


def beside_hugging_face(lab, batch, one, seed):
    """Raise Wrong unless loss and gradients are, without dropout, Hugging Face's."""
    lab.DROP, w = 0, finished.new_state(one, seed, torch.float32)["weights"]
    mine, grads = lab.gradients(batch, w, one, 0, seed)
    loss, theirs = hugging_faces(w, batch)
    hint = "the mean over the batch's targets is the sum of the sequences' parts"
    near("the loss, beside Hugging Face's", mine, loss, hint, 1e-4)
    for name, grad in full_weights(grads).items():
        near(f"{name}'s gradient, beside Hugging Face's", grad, theirs[name], hint, 1e-3)


def data_of(seed, count=finished.EXAMPLES):
    """Token ids (count, S), the same on every rank."""
    numbers = torch.Generator().manual_seed(seed + 1)
    return torch.randint(finished.VOCAB, (count, finished.S), generator=numbers)


def as_alone(what, found, right, hint="", times=()):
    """Raise Wrong where {key: tensor} of a layout is not, to the bit, that of one rank.

    times: pairs (hint, factor), where it is a multiple of it.
    """
    for key, x in found.items():
        hints = {text: factor * right[key] for text, factor in times}
        bits(f"{what}, beside one rank: {key}", x, right[key], hints, hint)


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

    gate, up, down = (full[f"{name}.{key}"] for key in keys)
    hidden = F.silu(x.float() @ gate.T) * (x.float() @ up.T)
    last = layout.blocks[-1]
    args = {key: x.detach() for key, x in w.items()}, name, drop, last, x
    size = finished.WIDTH // finished.BLOCKS
    part = slice(last * size, (last + 1) * size)
    part = drop(hidden, "mlp", 0)[:, part] @ down.T[part]
    usual = MISTAKES, finished.mlp, args
    mine = tried("mlp()", section(*usual[:2])[-1], lab.mlp, *args)
    near(f"the part of block {last}, {dtype}", mine, part, usual=usual)
    given = x.clone().requires_grad_()
    with Products() as products:
        hint = "part(block, y) of the numbers in layout.blocks"
        part = partial(lab.mlp, w, name, drop)
        out = tried("in_blocks()", hint, lab.in_blocks, part, given, layout)
        expect(isinstance(out, torch.Tensor), f"in_blocks() returns {type(out).__name__}")
        hint = "Enter in front, Leave behind, and nothing detached between them"
        leaves = [given, *w.values()]
        grads = tried("the MLP's backward", hint, torch.autograd.grad, out, leaves, dy)
    found = {"out": out.detach(), "x's gradient": grads[0]}
    found |= {f"the gradient of {key}": grad for key, grad in zip(w, grads[1:])}
    return found, products.calls, drop(hidden, "mlp", 0) @ down.T


def own_part(state, layout):
    """What a layout's rank holds of the state of one rank."""
    own = {"step": state["step"]}
    for kind in "weights", "mean", "square":
        kept = {k: x for k, x in state[kind].items() if k[1] is None or k[1] in layout.blocks}
        own[kind] = {k: x.detach().clone().requires_grad_(x.requires_grad) for k, x in kept.items()}
    return own
