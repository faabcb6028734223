"""Lab 10: long sequences. What fills the memory, and six means against it.

IN_PROGRESS
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

IGNORE = -100  # the label of a token that is no target: PyTorch's and Hugging Face's convention
TILE = 16384  # tokens of a rank in a tile


# ---- The lesson 1: the loss in chunks ------------------------------------------------------------


def sum_of_losses(head, hidden, targets):
    """Sum of -log softmax(logits)[target] of hidden (b, c, h). head: nn.Linear(h, v)."""
    logits = head(hidden).flatten(0, 1)  # (b c, v)
    return F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORE, reduction="sum")


def chunked_loss(head, hidden, labels, chunk):
    """Mean loss over all targets; only the logits of `chunk` tokens exist at the same time.

    head: nn.Linear(h, v); hidden (b, s, h); labels (b, s): IGNORE where a token is no target. The
    target of a token is the next one. `chunk` tokens, those of all sequences together.
    """
    # exercise: chunked_loss
    targets = F.pad(labels[:, 1:], (0, 1), value=IGNORE)
    size, total = max(1, chunk // len(hidden)), 0
    for h, t in zip(hidden.split(size, 1), targets.split(size, 1)):
        total = total + checkpoint(sum_of_losses, head, h, t, use_reentrant=False)
    return total / (targets != IGNORE).sum()
    # end exercise


# ---- The lesson 2: tiles of tokens ---------------------------------------------------------------


class KeepInput(torch.autograd.Function):
    """x itself; its node keeps x for the backward, where y.grad_fn.saved_tensors returns it."""

    @staticmethod
    def forward(ctx, x):
        # exercise: tiled
        ctx.save_for_backward(x)
        return x.view_as(x)
        # end exercise

    @staticmethod
    def backward(ctx, grad):
        # exercise: tiled
        return grad
        # end exercise


class RunTiles(torch.autograd.Function):
    """block(x), a tile of `size` tokens (dim -2) at a time; each tile runs again in the backward.

    keeper: the node of KeepInput that has x.
    """

    @staticmethod
    def forward(ctx, x, keeper, block, size):
        # exercise: tiled
        ctx.keeper, ctx.block, ctx.size = keeper, block, size
        out = None
        for i, tile in enumerate(x.split(size, -2)):
            y = block(tile)
            if out is None:
                out = y.new_empty(*y.shape[:-2], x.shape[-2], y.shape[-1])
            out.narrow(-2, i * size, tile.shape[-2]).copy_(y)
        return out
        # end exercise

    @staticmethod
    def backward(ctx, grad):
        # exercise: tiled
        (x,) = ctx.keeper.saved_tensors
        dx = torch.empty_like(x)
        for tile, dy, place in zip(*(t.split(ctx.size, -2) for t in (x, grad, dx))):
            tile = tile.detach().requires_grad_()
            with torch.enable_grad():
                y = ctx.block(tile)
            y.backward(dy)  # adds to the weights' gradients
            place.copy_(tile.grad)
        return dx, None, None, None
        # end exercise


class Tiled(nn.Module):
    """Runs a block that treats each token by itself in tiles of `tokens` tokens, hooks included."""

    def __init__(self, block, tokens):
        super().__init__()
        self.block, self.tokens = block, tokens

    def forward(self, x):  # (b, ..., s, h) -> (b, ..., s, any)
        # exercise: tiled
        size = max(1, self.tokens // len(x))
        if x.shape[-2] <= size:
            return self.block(x)
        x = KeepInput.apply(x)
        return RunTiles.apply(x, x.grad_fn, self.block, size)
        # end exercise


# ---- The lesson 3: a selective policy ------------------------------------------------------------

PRODUCTS = ("aten::mm", "aten::addmm")
EXPENSIVE = (  # operations whose results are kept, by PyTorch's names
    *PRODUCTS,
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "flash_attn::_flash_attn_forward",
)


def keep_expensive(row_parallel, context, operation, *args, **kwargs):
    """The policy of selective recomputation: is the result of this operation kept?

    row_parallel: linears whose products are not kept. args[-1] of a product: the transposed weight.
    """
    # exercise: policy
    name = operation.name()
    keep = name in EXPENSIVE and torch.is_grad_enabled()
    if name in PRODUCTS and any(args[-1]._base is linear.weight for linear in row_parallel):
        keep = False
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE
    # end exercise


# ---- The lesson 4: inputs kept in the host's memory ----------------------------------------------


def offloaded(hooks, function, *args):
    """checkpoint(function, *args), whose kept inputs are in the host's memory until the backward.

    hooks(): a context; what autograd saves inside it goes to the host.
    """
    # exercise: offloaded
    with hooks():
        return checkpoint(function, *args, use_reentrant=False)
    # end exercise


# ---- The lesson 5: applied to a model ------------------------------------------------------------


def recompute_layers(layers, recompute, hooks):
    """--recompute of each layer: HF's layers have a switch, and take any function for it."""
    for layer in layers:
        layer.gradient_checkpointing = recompute != "none"
        how = partial(checkpoint, use_reentrant=False)
        if recompute == "offload":
            how = partial(offloaded, hooks)
        elif recompute == "selective":
            rows = layer.self_attn.o_proj, layer.mlp.down_proj
            policy = partial(keep_expensive, rows)
            contexts = partial(create_selective_checkpoint_contexts, policy)
            how = partial(checkpoint, use_reentrant=False, context_fn=contexts)
        layer._gradient_checkpointing_func = how


def tile_layer(layer, tokens):
    """Norms and MLP of a layer in tiles; the norm before the MLP in the MLP's."""
    layer.input_layernorm = Tiled(layer.input_layernorm, tokens)
    layer.mlp = Tiled(nn.Sequential(layer.post_attention_layernorm, layer.mlp), tokens)
    layer.post_attention_layernorm = nn.Identity()


def tile_norm(decoder, tokens):
    """The final norm of HF's LlamaModel in tiles; of a pipeline only the last stage has it."""
    if not isinstance(decoder.norm, nn.Identity):
        decoder.norm = Tiled(decoder.norm, tokens)


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
        self.projections = Tiled(Projections(linears, gather, group), tokens)
        self.output = Tiled(Output(attention.o_proj), tokens)
        attention.o_proj = nn.Identity()
        self.attention, self.world = attention, group.size()

    def forward(self, hidden_states, **kwargs):  # (b, s/P, h) -> (b, s/P, h)
        qkv = self.projections(hidden_states).flatten(1, 2)  # (b, s, q + k + v)
        # forward(), not a call: attention's own pre-hook would gather
        out, weights = self.attention.forward(qkv, **kwargs)  # (b, s, h/P)
        return self.output(out.unflatten(1, (self.world, -1))), weights


def apply_means(model, recompute, tile=None, gather=None, group=None, hooks=save_on_cpu):
    """Recomputation and tiles for a model that a script has made parallel, in place.

    recompute: "block", "selective", "offload" or "none". tile: tokens of a rank in a tile; None: no
    tiles. gather(x, group): Megatron SP's g, whose attention block it enters. hooks: as in
    offloaded(). Returns the model.
    """
    layers = [layer for layer in model.model.layers if not isinstance(layer, nn.Identity)]
    recompute_layers(layers, recompute, hooks)
    if tile is None:
        return model
    for layer in layers:
        tile_layer(layer, tile)
        if gather is not None:
            layer.self_attn = TiledAttention(layer.self_attn, tile, gather, group)
    tile_norm(model.model, tile)
    return model


def tile_traffic(strategy, layers, tiles, size, recomputed):
    """What tiles add to the traffic of a step: rows (phase, collective, calls, message bytes).

    tiles: of an MLP; size: message bytes of one (b, s, h); recomputed: whether layers are. A tile
    sends its share of the bytes in a call of its own, and again when it runs in the backward. Where
    a layer is recomputed, the recomputation stops before its MLP.
    """
    more, again = (tiles - 1) * layers, tiles * layers
    if tiles == 1:
        return []
    if strategy == "tp":  # MLPs
        return [
            ("forward", "all_reduce", more, 0),  # g
            ("backward", "all_reduce", more + again, layers * size),  # f, and g again
        ]
    if strategy == "sp_megatron":  # MLPs, and the projections of attention
        rows = [
            ("forward", "all_gather", 2 * more, 0),
            ("forward", "reduce_scatter", 2 * more, 0),
            ("backward", "all_gather", 2 * (more + again), 2 * layers * size),
            ("backward", "reduce_scatter", 2 * (more + again), 2 * layers * size),
        ]
        if recomputed:  # attention's gather and reduce-scatter, each in tiles; the MLP's gather not
            rows += [("backward", "all_gather", again - 2 * layers, -layers * size)]
            rows += [("backward", "reduce_scatter", more, 0)]
        return rows
    return []
