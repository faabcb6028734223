"""Lab 10. Long sequences: what fills the memory of a training step, and six techniques to save it.

Question: weights and gradients of a model with 1 billion parameters take 4 GB in bfloat16, and yet
40 GB are full at 16,000 tokens. What fills the rest, and what can be done without changing one
gradient?

Idea: the backward needs what the forward computed. Keep less of it and compute it again, or
keep it elsewhere. In numbers (not bytes), with N tokens of all sequences, h hidden, i
intermediate, v vocabulary, L layers (predict_peak() and the notes explain the factors):

    what is alive                     without            with these techniques
    logits, softmax, its gradient     3 N v              3 chunk v          1 the loss in chunks
    what L layers keep                L N (10 h + 4 i)   L N h              recomputing whole layers
    one layer's backward: its MLP     N (10 h + 7 i)     N 8 h + tile 7 i   2 tiles of tokens
        or, if that is more, attention                   N 11 h
    each layer's input                L N h              0                  4 inputs on the host
    8 h of attention's 11 h           N 8 h              N 8 h / C          6 C chunks of heads

The numbers on the right are the exercises'. 3 is a selective policy, a compromise: it keeps
what is expensive to compute, all else runs again. 5 predicts the peak from shapes alone.

Tiles: an MLP treats each token by itself, so it can run on one tile of tokens at a time, in
the forward and again in the backward. Each tile's intermediates are freed before the next
tile. A tile has tokens // b tokens of each of b sequences, 1 at least.

    forward    x (b, s, h):  [tile 0] [tile 1] [tile 2]     block(tile) -> y, nothing else is kept
    backward   dy(b, s, h):  [tile 0] [tile 1] [tile 2]     block(tile) again, then its backward;
                                                            the weights' gradients add up
A layer's recomputation stops once all that its backward needs is there. So x is kept before
the tiles run: the recomputation stops in front of them, and each tile runs twice, not thrice.
Where grad mode is off (in a Function's forward, in evaluation) autograd keeps nothing at all.

A module's forward hooks run with it, so a parallel MLP's gather and reduce-scatter lie inside
the tiles, and what is gathered exists for one tile only. Lesson 5 applies this to any script's
model; memory/techniques.py also runs attention in tiles and chunks of heads. oom_search.py
uses both to find the longest sequence that fits.

    python labs/lab10_long_sequences/lesson.py              # it starts its own ranks
    python labs/lab10_long_sequences/lesson.py --plot peak.png --json lab10.json
    python labs/lab10_long_sequences/lesson.py --predict 2  # first your guess; see the end
    python labs/lab10_long_sequences/lesson.py --inject-bug list
    python labs/grade.py start lab10                        # writes my_labs/lab10_long_sequences.py
    python oom_search.py --strategy sp --nproc 8 --recompute offload  # what it is good for

Sources: Chen et al., Training deep nets with sublinear memory cost, arXiv 1604.06174 (recomputing
layers). Korthikanti et al., arXiv 2205.05198 (selective). Arctic Long Sequence Training, arXiv
2506.13996 (tiles of MLP and loss, inputs on the host). Untied Ulysses, arXiv 2602.21196 (chunks of
heads). torchtitan: distributed/activation_checkpoint.py, where a list of operations is the policy.
PyTorch: torch/utils/checkpoint.py, torch/autograd/graph.py.
"""

import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
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
    target of a token is the next one. `chunk` counts the tokens of all sequences together.
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
    """x itself; its node keeps x for the backward, where y.grad_fn.saved_tensors returns it.

    Keep it by save_for_backward(), which lets a recomputed layer drop it; an attribute stays.
    """

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

    keeper: the node of KeepInput that has x. Intermediates of one tile only are alive at a time, in
    the backward, too. The block's parameters are no arguments, so add to their .grad.
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
    """Runs a block that treats each token by itself in tiles, hooks included.

    tokens: of a tile, tokens // b from each of all b sequences, 1 at least. If all tokens are
    one tile, the block runs as it is.
    """

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

    Returns CheckpointPolicy.MUST_SAVE or PREFER_RECOMPUTE; torch takes True or False, too. It
    keeps what EXPENSIVE names, if grad mode is on (tiles turn it off: they run again anyhow).
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

    hooks(): a context; what autograd saves inside it goes to the host. Nothing else keeps args.
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
    """Put a layer's norms and MLP in tiles; the norm beside the MLP is in the MLP's tiles."""
    if hasattr(layer, "input_layernorm"):
        layer.input_layernorm = Tiled(layer.input_layernorm, tokens)
        layer.mlp = Tiled(nn.Sequential(layer.post_attention_layernorm, layer.mlp), tokens)
        layer.post_attention_layernorm = nn.Identity()
    else:  # OLMo 2 normalizes what leaves attention and MLP
        layer.post_attention_layernorm = Tiled(layer.post_attention_layernorm, tokens)
        layer.mlp = Tiled(nn.Sequential(layer.mlp, layer.post_feedforward_layernorm), tokens)
        layer.post_feedforward_layernorm = nn.Identity()


def tile_norm(decoder, tokens):
    """Put the final norm of HF's LlamaModel in tiles, on the last stage of a pipeline."""
    if not isinstance(decoder.norm, nn.Identity):
        decoder.norm = Tiled(decoder.norm, tokens)


def apply_means(model, recompute, tile=None, hooks=save_on_cpu):
    """Recomputation and tiles for a model that a script has made parallel, in place.

    recompute: "full", "selective", "offload" or "none". tile: tokens of a rank in a tile; None: no
    tiles. hooks: as in offloaded().
    """
    layers = [layer for layer in model.model.layers if not isinstance(layer, nn.Identity)]
    recompute_layers(layers, recompute, hooks)
    if tile is not None:
        for layer in layers:
            tile_layer(layer, tile)
        tile_norm(model.model, tile)


# ---- The lesson 6: the peak, predicted from shapes -----------------------------------------------


def predict_peak(config, tokens, itemsize, recompute, tile=None, chunk=None):
    """Bytes alive at the peak of a step of LLaMA on one device: {what: bytes}, to be added up.

    config: HF's LlamaConfig, with as many KV heads as heads. tokens: of all sequences. recompute:
    "full" or "none"; tile: tokens of a tile, None without tiles; chunk: tokens whose logits exist
    at the same time, None: of all. The keys of the result:

      weights    all parameters; tied embeddings count once
      kept       what the layers keep: L layers' inputs (h a token), or these and all that they save
      peak       the larger of what the loss has alive (logits, softmax, gradient: 3 v a token) and
                 what one layer's backward has: all that it saves again, and gradients on top

    A layer saves, in numbers a token: the normalized input and the output of two norms (4 h);
    q, k, v and attention's output (4 h); the second norm's input (h); the MLP's gate,
    silu(gate), up and their product (4 i): 9 h + 4 i. The MLP's backward adds 3 i + h,
    attention's adds less. With tiles, norms and MLP save 2 h (the first norm's output, the
    MLP's input), which makes 6 h with attention's 4 h. Then attention's backward adds 5 h, the
    MLP's adds 2 h, and 7 i a token of one tile: the larger counts.
    """
    # exercise: predict
    h, i, v = config.hidden_size, config.intermediate_size, config.vocab_size
    L = config.num_hidden_layers
    layer = 4 * h * h + 3 * h * i + 2 * h
    weights = L * layer + h + v * h * (1 if config.tie_word_embeddings else 2)
    saved = 9 * h + 4 * i if tile is None else 6 * h
    kept = L * tokens * (h if recompute == "full" else h + saved)
    if tile is None:
        working = tokens * (3 * i + h)
    else:
        working = max(tokens * 5 * h, tokens * 2 * h + min(tile, tokens) * 7 * i)
    if recompute == "full":
        working += tokens * saved
    logits = 3 * v * (tokens if chunk is None else min(chunk, tokens))
    peak = max(logits, working)
    return {"weights": weights * itemsize, "kept": kept * itemsize, "peak": peak * itemsize}
    # end exercise


# ---- The lesson 7: Ulysses by chunks of heads ----------------------------------------------------


class AllToAll(torch.autograd.Function):
    """x (P, ...): row r goes to rank r. Its gradient comes back the same way."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group, out = group, torch.empty_like(x, memory_format=torch.contiguous_format)
        dist.all_to_all_single(out, x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx, grad):
        return AllToAll.apply(grad, ctx.group), None


def tokens_to_heads(x, group):
    """All n heads of my tokens (b, s/P, n, d) -> my heads of all tokens (b, n/P, s, d)."""
    x = x.unflatten(2, (group.size(), -1)).permute(2, 0, 3, 1, 4)  # (P, b, n/P, s/P, d)
    return AllToAll.apply(x, group).permute(1, 2, 0, 3, 4).flatten(2, 3)


def heads_to_tokens(x, group):
    """My heads of all tokens (b, n/P, s, d) -> all n heads of my tokens (b, s/P, n, d)."""
    x = x.unflatten(2, (group.size(), -1)).permute(2, 0, 3, 1, 4)  # (P, b, s/P, n/P, d)
    return AllToAll.apply(x, group).permute(1, 2, 0, 3, 4).flatten(2, 3)


def attend(x, q_weight, k_weight, v_weight, head_dim, group):
    """Causal attention of the heads whose rows of the weights are given, (b, s/P, n d).

    x (b, s/P, h): this rank's tokens; q_weight (n d, h). Rotary embedding is left out, because
    it treats each head by itself.
    """
    weights = q_weight, k_weight, v_weight
    heads = [F.linear(x, weight).unflatten(-1, (-1, head_dim)) for weight in weights]
    q, k, v = (tokens_to_heads(y, group) for y in heads)  # (b, n/P, s, d)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return heads_to_tokens(out, group).flatten(2)


def attend_by_chunks(x, q_weight, k_weight, v_weight, head_dim, chunks, group):
    """attend() of all heads, (b, s/P, heads d), a chunk of the heads at a time.

    q, k, v, what is exchanged, and what attention keeps then exist for one chunk only, in the
    forward and in the backward, where the chunk runs again. Chunks are KV heads and the query heads
    that read them; chunks x P divides the KV heads.
    """
    # exercise: chunks_of_heads
    parts = []
    for weights in zip(*(w.chunk(chunks) for w in (q_weight, k_weight, v_weight))):
        parts.append(checkpoint(attend, x, *weights, head_dim, group, use_reentrant=False))
    return torch.cat(parts, -1)
    # end exercise


if __name__ == "__main__":  # the lab's checks and experiments, of labs/ and of my_labs/
    sys.path[:0] = [str(folder) for folder in Path(__file__).resolve().parents[1:3]]
    from labs.kit.run import main

    sys.exit(main(__file__))
