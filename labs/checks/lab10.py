"""Lab 10's checks, each of which runs on every rank, and the bugs that they have to catch.

In float64, so that nothing but a mistake is off by more than EXACT. Memory is counted in tensors
that are alive, and in runs of a block, never in seconds.
"""

import itertools
import time
import weakref
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import LABS, Traffic, expect, expect_close, load
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, checkpoint
from transformers import LlamaConfig

EXACT = 1e-10
finished = load(LABS / "lab10_long_sequences.py")


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


def check_chunked_loss(lab, group, seed):
    h, v = 6, 500
    head = nn.Linear(h, v, bias=False).double()
    for (b, s), chunk in itertools.product([(2, 31), (1, 16), (3, 5)], (1, 8, 200)):
        hidden = drawn(seed, b, s, h).requires_grad_()
        labels = torch.randint(v, (b, s), generator=torch.Generator().manual_seed(seed))
        labels[0, s // 2 :] = lab.IGNORE  # so that chunks have different numbers of targets
        targets = F.pad(labels[:, 1:], (0, 1), value=lab.IGNORE).flatten()
        logits = head(hidden).flatten(0, 1)
        right = F.cross_entropy(logits, targets, ignore_index=lab.IGNORE)
        right_grads = gradients(right, [hidden, head.weight])
        with Alive() as alive:
            mine = lab.chunked_loss(head, hidden, labels, chunk)
            kept = alive.now()
        other = F.cross_entropy(head(hidden).flatten(0, 1), labels.flatten(), ignore_index=-100)
        count = (targets != lab.IGNORE).sum()
        hints = {
            "the target of a token is the next one: shift the labels": other.detach(),
            "divide by the number of targets, not of tokens": right.detach() * count / (b * s),
            "return a mean: divide by the number of targets": right.detach() * count,
        }
        what = f"the loss of {b} x {s} tokens in chunks of {chunk}"
        expect_close(what, mine.detach(), right.detach(), EXACT, hints)
        if chunk < b * s:
            hint = "run a chunk again in the backward: checkpoint(..., use_reentrant=False)"
            expect(kept < 8 * v * b * s / 2, f"{what}: logits stay alive for the backward", hint)
            hint = "chunk counts the tokens of all sequences together: chunk // b of each"
            most = 8 * v * max(chunk, b) * 3 + 8 * 4 * b * s * h
            expect(alive.peak <= most, f"{what}: more logits than those of a chunk", hint)
        for name, a, b_ in zip(
            ("hidden", "head"), gradients(mine, [hidden, head.weight]), right_grads
        ):
            expect_close(f"{what}: the gradient of {name}", a, b_, EXACT)
    return "9 shapes, uneven targets: loss and gradients to 1e-10; the logits of a chunk alone"


class Counted(nn.Module):
    """An MLP that counts its runs and their tokens; all that is not over tokens is in dim -1."""

    def __init__(self, h, out):
        super().__init__()
        self.up, self.down, self.tokens = nn.Linear(h, 40), nn.Linear(40, out), []

    def forward(self, x):
        self.tokens.append(x.shape[-2])
        return self.down(F.gelu(self.up(x)))


def check_tiled(lab, group, seed):
    torch.manual_seed(seed)
    for shape, out, size in ((2, 13, 6), 6, 5), ((1, 8, 6), 9, 4), ((2, 3, 7, 6), 5, 3):
        block = Counted(6, out).double()
        x, dy = drawn(seed, *shape).requires_grad_(), drawn(seed + 1, *shape[:-1], out)
        tensors, what = [x, *block.parameters()], f"x {shape} in tiles of {size} tokens"
        right = block(x)
        wanted = [right.detach(), *gradients((right * dy).sum(), tensors)]
        tiles = -(-shape[-2] // size)
        tiled = lab.Tiled(block, size * shape[0])  # tokens of all sequences
        runs = 2 * tiles
        for recomputed in False, True:
            block.tokens.clear()
            with Alive() as alive:
                y = checkpoint(tiled, x, use_reentrant=False) if recomputed else tiled(x)
                kept = alive.now()
            hint = "tiles are of dim -2, tokens // b of each sequence, the last one shorter"
            expect(max(block.tokens) == size, f"{what}: a tile of {max(block.tokens)}", hint)
            found = [y.detach(), *gradients((y * dy).sum(), tensors)]
            hint = "each tile's backward() adds to the weights' gradients: y.backward(dy)"
            names = (
                "the output",
                "dx",
                *(f"the gradient of {n}" for n, _ in block.named_parameters()),
            )
            for name, a, b in zip(names, found, wanted):
                expect_close(f"{what}: {name}", a, b, EXACT, {hint: torch.zeros_like(b)})
            hint = "a tile's intermediates are not for the backward: no graph in the forward"
            most = 8 * (x.numel() + 2 * y.numel())
            expect(kept <= most, f"{what}: {kept} bytes stay alive, at most {most} would", hint)
            found = f"{what}, {'recomputed' if recomputed else 'alone'}: the block runs "
            found += f"{len(block.tokens)} times, not {runs}"
            hint = "once forward, once backward for each tile"
            if recomputed:
                hint = "keep x by KeepInput, before the tiles run: the recomputation stops there"
            expect(len(block.tokens) == runs, found, hint)
    block.tokens.clear()
    lab.Tiled(block, 1000)(x)
    expect(block.tokens == [shape[-2]], "a tile longer than x is not one run of the block")
    return "3 shapes, alone and recomputed: gradients to 1e-10, each tile twice, nothing kept"


SAVE = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE


def check_policy(lab, group, seed):
    aten = torch.ops.aten
    column, row = nn.Linear(4, 4), nn.Linear(4, 4)
    x, bias = torch.randn(3, 4), torch.randn(4)
    q = torch.randn(1, 2, 8, 8)
    policy = partial(lab.keep_expensive, (row,), None)
    flash = aten._scaled_dot_product_flash_attention_for_cpu.default
    cases = [
        ("a product", True, aten.mm.default, x, column.weight.t()),
        ("a product with bias", True, aten.addmm.default, bias, x, column.weight.t()),
        ("attention", True, flash, q, q, q),
        ("o_proj's product", False, aten.mm.default, x, row.weight.t()),
        ("o_proj's product with bias", False, aten.addmm.default, bias, x, row.weight.t()),
        ("silu", False, aten.silu.default, x),
        ("a product of normed tokens", False, aten.mul.Tensor, x, x),
    ]
    hints = {
        "o_proj's product with": "addmm's last argument is the weight, as mm's is",
        "o_proj's": "row_parallel: a partial sum is as large as x of all ranks; is it the weight's "
        "_base?",
        "silu": "EXPENSIVE lists what is kept, by operation.name(); all else runs again",
    }
    for name, keep, *call in cases:
        found = policy(*call)
        known = isinstance(found, CheckpointPolicy)
        expect(known, f"{name}: {found} is no CheckpointPolicy", "MUST_SAVE or PREFER_RECOMPUTE")
        hint = next((text for start, text in hints.items() if name.startswith(start)), "")
        what = f"{name} is {'not kept' if keep else 'kept'}"
        expect((found in SAVE) == keep, what, hint)
    with torch.no_grad():
        found = policy(aten.mm.default, x, column.weight.t())
    hint = "without a graph (torch.is_grad_enabled()) nobody asks for it: a tile runs again anyhow"
    expect(found not in SAVE, "a product inside a tile is kept", hint)
    return "products and attention kept, but for row parallel ones and what runs in tiles"


def check_offloaded(lab, group, seed):
    sent, back, runs = [], [], []

    def hooks():
        def pack(x):
            sent.append(x.shape)
            return x

        def unpack(x):
            back.append(x.shape)
            return x

        return saved_tensors_hooks(pack, unpack)

    def layer(x):
        runs.append(1)
        return (x * x).sin().exp()

    x = drawn(seed, 3, 4).requires_grad_()
    [right] = gradients(layer(x).sum(), [x])
    runs.clear()
    y = lab.offloaded(hooks, layer, x)
    hint = "checkpoint(function, *args) inside `with hooks():` keeps function's inputs alone"
    expect(sent == [x.shape], f"{len(sent)} tensors went to the host, not x alone", hint)
    expect_close("the output", y.detach(), layer(x).detach(), EXACT)
    [found] = gradients(y.sum(), [x])
    expect_close("the gradient", found, right, EXACT)
    expect(len(back) == 1, f"{len(back)} tensors came back, not x once")
    expect(len(runs) == 3, f"the layer ran {len(runs) - 1} times, not twice", hint)
    return "x alone goes to the host and comes back; the layer runs again"


def check_predict(lab, group, seed):
    for tied, (L, h, i, v), tokens in itertools.product(
        (True, False), ((2, 8, 20, 90), (5, 12, 70, 4000)), (64, 1000)
    ):
        sizes = {"num_hidden_layers": L, "hidden_size": h, "intermediate_size": i, "vocab_size": v}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": tied}
        config = LlamaConfig(**sizes, **heads)
        for recompute, tile, chunk in itertools.product(("block", "none"), (None, 48), (None, 32)):
            call = config, tokens, 4, recompute, tile, chunk
            right, found = finished.predict_peak(*call), lab.predict_peak(*call)
            keys = isinstance(found, dict) and set(found) == set(right)
            expect(keys, f"predict_peak() returns {found}", f"a dict of {', '.join(right)}")
            hints = {
                "weights": "q, k, v, o: 4 h h; gate, up, down: 3 h i; two norms a layer, and one",
                "kept": "block: each layer's input; none: that, and all that each layer saves",
                "peak": "the larger of loss and layer; in it, what is recomputed is there again",
            }
            for key, value in right.items():
                what = f"{key} of {sizes}, {tokens} tokens, {recompute}, tile {tile}, chunk {chunk}"
                expect(found[key] == value, f"{what}: {found[key]}, not {value}", hints[key])
    return "64 steps: weights, what is kept, and the peak, to the byte"


def check_chunks_of_heads(lab, group, seed):
    P, d, h = group.size(), 8, 16
    full = drawn(seed, 2, 64 * P, h)
    weights = [drawn(seed + n, n * d, h) for n in (12 * P, 6 * P, 6 * P)]
    right = [x.clone().requires_grad_() for x in (full, *weights)]
    heads = [F.linear(right[0], w).unflatten(-1, (-1, d)).transpose(1, 2) for w in right[1:]]
    out = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
    out = out.transpose(1, 2).flatten(2)
    wanted = gradients(out.square().sum(), right)
    mine, peaks = slice(64 * group.rank(), 64 * group.rank() + 64), {}
    for chunks in 1, 3, 6:
        own = [x.clone().requires_grad_() for x in (full[:, mine], *weights)]
        with Alive() as alive, Traffic() as traffic:
            y = lab.attend_by_chunks(*own, d, chunks, group)
        what = f"{chunks} chunks of heads"
        hint = (
            "chunk the rows of each weight: chunk c has KV heads and the query heads that read them"
        )
        expect(y.shape == out[:, mine].shape, f"{what}: shape {tuple(y.shape)}", hint)
        peaks[chunks], most, end = alive.peak, 2.5 * 8 * y.numel(), time.time() + 2
        while alive.now() > most and time.time() < end:
            time.sleep(0.01)  # gloo's thread may hold the last message a moment longer
        kept = alive.now()
        expect_close(what, y.detach(), out[:, mine].detach(), EXACT)
        found = gradients(y.square().sum(), own)
        expect_close(f"{what}: dx", found[0], wanted[0][:, mine], EXACT)
        for name, a, b in zip("qkv", found[1:], wanted[1:]):  # each rank has a part of it
            dist.all_reduce(a, group=group)
            expect_close(f"{what}: the gradient of {name}_weight", a, b, EXACT)
        calls = traffic.ops["all_to_all"][0]
        expect(calls == 4 * chunks, f"{what}: {calls} all-to-alls, not {4 * chunks}")
        hint = "a chunk's q, k and v are for its backward: run it again, by checkpoint()"
        expect(kept <= most, f"{what}: {kept} bytes stay alive", hint)
    hint = "one chunk after another, each of them freed before the next"
    expect(peaks[6] < 0.6 * peaks[1], f"6 chunks take {peaks[6]} bytes, 1 {peaks[1]}", hint)
    return f"1, 3 and 6 chunks: exact; the peak of 6 is {peaks[6] / peaks[1]:.2f} of that of 1"


CHECKS = {
    "chunked_loss": (check_chunked_loss, 1),
    "tiled": (check_tiled, 1),
    "policy": (check_policy, 1),
    "offloaded": (check_offloaded, 1),
    "predict": (check_predict, 1),
    "chunks_of_heads": (check_chunks_of_heads, 2),
}


def mean_of_means(lab):
    """Each chunk's mean loss, and the mean of these: chunks with few targets count too much."""

    def chunked_loss(head, hidden, labels, chunk):
        targets = F.pad(labels[:, 1:], (0, 1), value=lab.IGNORE)
        size, losses = max(1, chunk // len(hidden)), []
        for h, t in zip(hidden.split(size, 1), targets.split(size, 1)):
            count = (t != lab.IGNORE).sum().clamp(min=1)
            losses.append(checkpoint(lab.sum_of_losses, head, h, t, use_reentrant=False) / count)
        return sum(losses) / len(losses)

    lab.chunked_loss = chunked_loss


def tiles_run_thrice(lab):
    """Each tile in a checkpoint of its own: where a layer is recomputed, all tiles run again."""

    def forward(self, x):
        tiles = x.split(max(1, self.tokens // len(x)), -2)
        return torch.cat([checkpoint(self.block, t, use_reentrant=False) for t in tiles], -2)

    lab.Tiled.forward = forward


def all_chunks_at_once(lab):
    """q, k, v and what is exchanged of all chunks stay alive for the backward."""
    lab.checkpoint = lambda function, *args, use_reentrant: function(*args)


BUGS = [mean_of_means, tiles_run_thrice, all_chunks_at_once]
