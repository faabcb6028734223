"""Lab 10's means against memory on the attention of any script's model, and what they send.

Norms and MLPs treat each token by itself, and lab 10's tiles need not know how the model is made
parallel. Attention needs all tokens at once, so here its heads are taken in turn, as lab 10's
attend_by_chunks() does for Ulysses: for each chunk of heads its own rows of q_proj, k_proj, v_proj,
attention, and its own columns of o_proj, whose products add up to the output. Each chunk runs again
in the backward, so that q, k, v, the output and their gradients exist for one chunk only:

    forward    x -> [heads 0, 1] -> y0    x -> [heads 2, 3] -> y1    y0 + y1; nothing else is kept
    backward   dy -> [heads 2, 3] again, then its backward -> dx;  [heads 0, 1] the same; dx adds up

Where layers are recomputed, attention then runs three times in a step, not twice: the layer's own
recomputation needs its output. And what an attention block sends, it sends for every chunk.

Megatron SP's attention block gathers all tokens. With tiles its gather and its reduce-scatter lie
inside the tiles of its projections, and what is gathered exists for one tile only.
"""

import copy

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

# ---- Tiles of Megatron SP's attention block ------------------------------------------------------


class Projections(nn.Module):
    """q, k and v side by side, of tokens gathered once: (b, t, h) -> (b, P, t, q + k + v)."""

    def __init__(self, linears, gather, group):
        super().__init__()
        self.linears, self.gather, self.group = nn.ModuleList(linears), gather, group

    def forward(self, x):
        x = self.gather(x, self.group)  # (b, P t, h)
        qkv = torch.cat([linear(x) for linear in self.linears], -1)
        return qkv.unflatten(1, (self.group.size(), -1))


class Columns(nn.Module):
    """In the place of q_proj, k_proj or v_proj: columns [start, end) of q, k and v side by side."""

    def __init__(self, start, end):
        super().__init__()
        self.start, self.end = start, end

    def forward(self, qkv):
        return qkv[..., self.start : self.end].contiguous()  # a view would keep all of qkv


class Output(nn.Module):
    """o_proj of all ranks' tokens (b, P, t, h/P) -> (b, t, h)."""

    def __init__(self, linear):
        super().__init__()
        self.linear = linear

    def forward(self, x):
        return self.linear(x.flatten(1, 2))


class TiledAttention(nn.Module):
    """Megatron SP's attention: gather and reduce-scatter lie inside the tiles of its projections.

    Attention itself needs all tokens at once, with 1/P of the heads. tiled: lab 10's Tiled.
    """

    def __init__(self, attention, tiled, tokens, gather, group):
        super().__init__()
        linears = attention.q_proj, attention.k_proj, attention.v_proj
        start = 0
        for name, linear in zip(("q_proj", "k_proj", "v_proj"), linears):
            end = start + len(linear.weight)
            setattr(attention, name, Columns(start, end))
            start = end
        self.projections = tiled(Projections(linears, gather, group), tokens)
        self.output = tiled(Output(attention.o_proj), tokens)
        attention.o_proj = nn.Identity()
        self.attention, self.world = attention, group.size()

    def forward(self, hidden_states, **kwargs):  # (b, s/P, h) -> (b, s/P, h)
        qkv = self.projections(hidden_states).flatten(1, 2)  # (b, s, q + k + v)
        # forward(), not a call: attention's own pre-hook would gather
        out, weights = self.attention.forward(qkv, **kwargs)  # (b, s, h/P)
        return self.output(out.unflatten(1, (self.world, -1))), weights


# ---- Chunks of heads -----------------------------------------------------------------------------


class PartOfLinear(nn.Module):
    """A linear with some rows (dim 0) or columns (dim 1) of its weight; its collective remains."""

    def __init__(self, linear, dim, part, parts):
        super().__init__()
        self.linear, self.dim, self.part, self.parts = linear, dim, part, parts

    @property
    def weight(self):
        return self.linear.weight.chunk(self.parts, self.dim)[self.part]

    def forward(self, x):
        tensors, bias = {"weight": self.weight}, self.linear.bias
        if bias is not None:  # with some columns it adds a share of the bias
            tensors["bias"] = bias / self.parts if self.dim else bias.chunk(self.parts)[self.part]
        return torch.func.functional_call(self.linear, tensors, x)


def part_of_attention(attention, part, parts):
    """HF's attention with 1 / parts of a rank's query heads, and the KV heads that these read."""
    keys = len(attention.k_proj.weight) // attention.head_dim
    k_parts = min(parts, keys)  # where chunks share a KV head, each of them computes it
    k_part = part * k_parts // parts
    own = copy.copy(attention)
    own._modules = attention._modules.copy()  # the lines below change only this one
    own.q_proj = PartOfLinear(attention.q_proj, 0, part, parts)
    own.k_proj = PartOfLinear(attention.k_proj, 0, k_part, k_parts)
    own.v_proj = PartOfLinear(attention.v_proj, 0, k_part, k_parts)
    own.o_proj = PartOfLinear(attention.o_proj, 1, part, parts)
    own.num_key_value_groups = attention.num_key_value_groups * k_parts // parts
    own.config = copy.copy(attention.config)  # where Ulysses finds how many heads there are
    own.config.num_attention_heads //= parts
    own.config.num_key_value_heads //= k_parts
    return own


def possible_chunks(model, sharing=1):
    """In how many chunks a rank's heads can be taken: of whole KV groups, or of parts of one.

    sharing: ranks among which Ulysses deals out the KV heads of each chunk; 1 without Ulysses.
    """
    attention = next(layer.self_attn for layer in model.model.layers if list(layer.children()))
    linears = attention.q_proj, attention.k_proj
    queries, keys = (len(linear.weight) // attention.head_dim for linear in linears)
    if sharing > 1:
        return [1, *(n for n in range(2, keys // sharing + 1) if keys % n == 0)]
    return [n for n in range(1, queries + 1) if queries % n == 0 == max(n, keys) % min(n, keys)]


class ChunksOfHeads(nn.Module):
    """Attention a chunk of heads at a time, the sum of their outputs."""

    def __init__(self, chunks):
        super().__init__()
        self.chunks = nn.ModuleList(chunks)

    def forward(self, hidden_states, **kwargs):  # (b, s, h) -> (b, s, h)
        total = 0
        for chunk in self.chunks:
            out, _ = checkpoint(chunk, hidden_states, use_reentrant=False, **kwargs)
            total = total + out
        return total, None


# ---- All of them, and what they send -------------------------------------------------------------


def apply_means(lab, model, recompute, tile=None, chunks=1, gather=None, group=None, **hooks):
    """Lab 10's recomputation and tiles, and chunks of heads, for a script's model, in place.

    lab: the module; recompute, tile, hooks: of its apply_means(). chunks: of a rank's heads.
    gather(x, group): Megatron SP's g, whose attention block it enters.
    """
    lab.apply_means(model, recompute, tile, **hooks)
    for layer in model.model.layers:
        if isinstance(layer, nn.Identity):  # another stage's
            continue
        parts = [layer.self_attn]
        if chunks > 1:
            parts = [part_of_attention(layer.self_attn, i, chunks) for i in range(chunks)]
        if gather is not None and tile is not None:
            parts = [TiledAttention(part, lab.Tiled, tile, gather, group) for part in parts]
        layer.self_attn = ChunksOfHeads(parts) if chunks > 1 else parts[0]
    if tile is not None and hasattr(model, "pipeline"):  # each stage is a decoder of its own
        for stage in model.pipeline.stages.values():
            lab.tile_norm(stage.decoder, tile)


def added_traffic(strategy, layers, size, recomputed, tiles=1, chunks=1):
    """What tiles and chunks add to the traffic of a step: rows (phase, op, calls, message bytes).

    size: message bytes of one (b, s, h); recomputed: whether layers are. tiles: of an MLP. A tile
    sends its share of the bytes in a call of its own, and again when it runs in the backward. The
    recomputation of a layer stops before tiles of its MLP, that of a chunk before its o_proj's g.
    """
    again, anew = int(tiles > 1), int(chunks > 1)
    rows = []  # phase, op; how often a layer sends (b, s, h), in so many calls each; before: in one
    if strategy == "tp":  # f and g
        rows += [("forward", "all_reduce", chunks, 1, 1)]
        rows += [("backward", "all_reduce", chunks * (1 + recomputed), 1, 1 + recomputed)]
        rows += [("forward", "all_reduce", 1, tiles, 1)]  # MLP
        rows += [("backward", "all_reduce", 1 + again, tiles, 1)]
    elif strategy == "sp_megatron":
        gathers, scatters = 1 + again + anew + recomputed, 1 + again + recomputed
        for op, times in ("all_gather", gathers), ("reduce_scatter", scatters):
            rows += [("forward", op, chunks, tiles, 1)]
            rows += [("backward", op, chunks * times, tiles, 1 + recomputed)]
            rows += [("forward", op, 1, tiles, 1)]  # MLP
            if again:
                before = 1 + (recomputed and op == "all_gather")
                rows += [("backward", op, 2, tiles, before)]
    return [
        (phase, op, layers * (times * calls - before), layers * (times - before) * size)
        for phase, op, times, calls, before in rows
    ]
