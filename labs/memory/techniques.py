"""Memory-saving techniques for the model of any script: lab 10's, and attention in parts.

Lab 10 (lab10_long_sequences/) recomputes layers and takes norms and MLPs in tiles of tokens: each
token is treated by itself there, however the model is made parallel. Attention needs all tokens at
once, so here its heads are taken in turn, as lab 10's attend_by_chunks() does for Ulysses: for each
chunk of heads its own rows of q_proj, k_proj, v_proj, attention, and its own columns of o_proj,
whose products add up to the output. Each chunk is recomputed in the backward, so that q, k, v, the
output and their gradients exist for one chunk only:

    forward    x -> [heads 0, 1] -> y0    x -> [heads 2, 3] -> y1    y0 + y1; nothing else is kept
    backward   dy -> [heads 2, 3] again, then its backward -> dx;  [heads 0, 1] the same; dx adds up

Where layers are recomputed, attention then runs three times in a step, not twice, because the
layer's own recomputation needs its output. What an attention block sends, it sends for each chunk.

Megatron SP's attention block gathers all tokens. With tiles its gather and its reduce-scatter lie
inside the tiles of its projections, and what is gathered exists for one tile only.

Lab 10 ends with these techniques; oom_search.py applies them (save_memory() below) and searches.
"""

import copy
import sys
from pathlib import Path

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

sys.path.append(str(Path(__file__).resolve().parents[2]))
from labs.lab10_long_sequences import lesson as lab10  # noqa: E402

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

    Attention itself needs all tokens at once, with 1/P of the heads.
    """

    def __init__(self, attention, tokens, gather, group):
        super().__init__()
        linears = attention.q_proj, attention.k_proj, attention.v_proj
        start = 0
        for name, linear in zip(("q_proj", "k_proj", "v_proj"), linears):
            end = start + len(linear.weight)
            setattr(attention, name, Columns(start, end))
            start = end
        self.projections = lab10.Tiled(Projections(linears, gather, group), tokens)
        self.output = lab10.Tiled(Output(attention.o_proj), tokens)
        attention.o_proj = nn.Identity()
        self.attention, self.world = attention, group.size()

    def forward(self, hidden_states, **kwargs):  # (b, s/P, h) -> (b, s/P, h)
        qkv = self.projections(hidden_states).flatten(1, 2)  # (b, s, q + k + v)
        # forward(), not a call, because attention's own pre-hook would gather
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


def possible_chunks(model, sharing=None):
    """In how many chunks a rank's heads can be taken: of whole KV groups, or of parts of one.

    sharing: ranks among which Ulysses deals out the KV heads of each chunk; None without Ulysses.
    """
    attention = next(layer.self_attn for layer in model.model.layers if list(layer.children()))
    if hasattr(attention, "q_norm") and len(attention.q_norm.weight) > attention.head_dim:
        return [1]  # OLMo 2 has one norm over all heads
    linears = attention.q_proj, attention.k_proj
    queries, keys = (len(linear.weight) // attention.head_dim for linear in linears)
    if sharing:
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


# ---- The optimizer, one parameter after another, its state on the host ----------------------


def local(tensor):
    """What this rank has of a tensor: a DTensor's shard; all of any other."""
    return getattr(tensor, "_local_tensor", tensor)


def make_adamw(model, host):
    """The optimizer of a run in its steady state: [(parameter, its own AdamW)].

    Each parameter (of a DTensor this rank's shard) has an AdamW of its own, so that a step needs
    temporaries of one parameter only. The state is master weight, exp_avg and exp_avg_sq in
    float32, 12 bytes a number; a weight of float32 or float64 is its own master. host: all of it
    is in the host's memory.
    """
    optimizers = []
    for parameter in model.parameters():  # tied weights: once
        weight = local(parameter).detach()
        device = "cpu" if host and weight.device.type != "meta" else weight.device
        master = weight.to(device).to(torch.promote_types(weight.dtype, torch.float32))
        adamw = torch.optim.AdamW([master], foreach=False)
        master.grad = torch.zeros_like(master)  # a first step makes exp_avg and exp_avg_sq
        adamw.step()
        master.grad = None
        optimizers.append((parameter, adamw))
    return optimizers


def optimizer_step(optimizers):
    """Gradients go to where the state is, one by one; new weights come back."""
    for parameter, adamw in optimizers:
        if parameter.grad is not None:
            [master] = adamw.state
            gradient = local(parameter.grad).to(master.device)
            master.grad = gradient.to(master.dtype)  # apart, because a host converts by itself
            adamw.step()
            master.grad = None
            local(parameter).detach().copy_(master)


# ---- All of them, and what they send -------------------------------------------------------------


def take_hooks(module):
    """The forward hooks of a module, removed from it: on norms tp.py has f, sp_megatron.py g."""
    hooks = list(module._forward_hooks.values())
    module._forward_hooks.clear()
    return hooks


def enter_attention_itself(layer):
    """Move f or g from the norm before attention to attention.

    A tile of the norm has a rank's own tokens, and each chunk of heads enters by itself.
    """
    for hook in take_hooks(getattr(layer, "input_layernorm", nn.Identity())):  # OLMo 2 has none

        def enter(attention, args, kwargs, hook=hook):
            if args:  # a chunk of heads
                return (hook(None, None, args[0]), *args[1:]), kwargs
            return args, kwargs | {"hidden_states": hook(None, None, kwargs["hidden_states"])}

        layer.self_attn.register_forward_pre_hook(enter, with_kwargs=True)


def check_chunks(script, model, group, args, chunks):
    """Raise the script's UsageError where a rank's heads cannot be taken in so many chunks."""
    ulysses = script.STRATEGY == "sp_ulysses"
    works = possible_chunks(model, group.size() if ulysses else None)
    if getattr(args, "dtensor", False) or getattr(args, "schedule", None) == "zb":
        works = [1]  # neither DTensor nor DeferredLinear knows parts of a weight
    if chunks not in works:
        use = ", ".join(map(str, works[:-1])) + " or " * (len(works) > 1) + str(works[-1])
        raise script.UsageError(f"--head-chunks {chunks}: use {use}")


def join_tiles(pipeline):
    """zb: a microbatch waits for its W as one pair of x and dy in each linear, not one a tile."""
    backward = pipeline.backward

    def backward_and_join(action, received):
        waiting = [len(linear.pending) for linear in pipeline.deferred]
        dx = backward(action, received)
        for linear, before in zip(pipeline.deferred, waiting):
            tiles = [linear.pending.pop() for _ in range(len(linear.pending) - before)]
            tiles = [[tensor.flatten(0, -2) for tensor in tile] for tile in tiles]  # (tokens, any)
            linear.pending.append(tuple(map(torch.cat, zip(*tiles))))
        return dx

    pipeline.backward = backward_and_join


def save_memory(script, model, group, args, recompute, tile=None, chunks=1, hooks=save_on_cpu):
    """Recomputation, tiles and chunks of heads, for the model that a script made, in place.

    recompute, tile, hooks: as lab 10's apply_means() takes them. chunks: of a rank's heads.
    """
    if tile and tile >= args.batch * args.length:  # a tile as long as all tokens is none
        tile = None
    if chunks > 1:
        check_chunks(script, model, group, args, chunks)
    layers = [layer for layer in model.model.layers if not isinstance(layer, nn.Identity)]
    for layer in layers:  # nn.Identity: another stage's
        enter_attention_itself(layer)
    head_hooks = take_hooks(model.model.norm)
    lab10.apply_means(model, recompute, tile, hooks)
    for hook in head_hooks:  # once for all tokens, not for each tile
        model.model.norm.register_forward_hook(hook)
    gather = getattr(script, "gather_from_sp_region", None)  # Megatron SP's g
    for layer in layers:
        parts = [layer.self_attn]
        if chunks > 1:
            parts = [part_of_attention(layer.self_attn, i, chunks) for i in range(chunks)]
        if gather is not None and tile is not None:
            parts = [TiledAttention(part, tile, gather, group) for part in parts]
        layer.self_attn = ChunksOfHeads(parts) if chunks > 1 else parts[0]
    if tile is not None and hasattr(model, "pipeline"):  # each stage is a decoder of its own
        for stage in model.pipeline.stages.values():
            lab10.tile_norm(stage, tile)
        join_tiles(model.pipeline)


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
