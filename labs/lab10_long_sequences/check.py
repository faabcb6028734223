"""Lab 10's exercises: their cases. In float64, so that only a mistake is off by more than 1e-10.

Memory is counted in tensors that are alive, and in runs of a block, never in seconds.
"""

import itertools
import weakref
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, checkpoint
from transformers import LlamaConfig

from labs.kit.alive import Alive, bytes_alive
from labs.kit.eye import Most
from labs.kit.harness import Traffic
from labs.kit.inputs import drawn
from labs.kit.judge import checks
from labs.lab10_long_sequences import lesson as finished  # not the learner's

IGNORE, VOCAB = finished.IGNORE, 500


def gradients(loss, tensors):
    """The gradients of a loss, by backward(), as tiles need it; zeros where there are none."""
    loss.backward()
    found = [torch.zeros_like(t) if t.grad is None else t.grad.clone() for t in tensors]
    for tensor in tensors:
        tensor.grad = None
    return found


def enough(nbytes, limit):
    """What is noted of bytes of which `limit` is no mistake."""
    return Most(max(nbytes, int(limit)))


# ---- The loss in chunks --------------------------------------------------------------------------


def chunked_loss(group, seed):
    torch.manual_seed(seed)
    head = nn.Linear(6, VOCAB, bias=False).double()

    def see(hidden, labels, chunk, lab, eye):
        (b, s), x, ids = labels.shape, hidden.clone().requires_grad_(), labels.clone()
        logits = 8 * VOCAB * max(chunk, b)
        with Alive() as alive:
            loss = lab.chunked_loss(head, x, ids, chunk)
            kept, peak = alive.now(), alive.peak
            eye.note("the loss", loss)
            found = gradients(loss, [x, head.weight])
        for name, grad in zip(("hidden", "head.weight"), found):
            eye.note(f"the gradient of {name}", grad)
        eye.note("hidden is overwritten", not torch.equal(x, hidden))
        eye.note("labels is overwritten", not torch.equal(ids, labels))
        if chunk < b * s:
            name = "bytes alive at the peak of the forward"
            eye.note("bytes kept for the backward", enough(kept, 4 * VOCAB * b * s))
            eye.note(name, enough(peak, 3 * logits + 10_000))
            name = "bytes alive at the peak of the backward"
            eye.note(name, enough(alive.peak, 4 * logits + 60_000))

    for b, s in (2, 31), (1, 16), (3, 5):
        hidden = drawn(seed, b, s, 6).requires_grad_()
        labels = torch.randint(VOCAB, (b, s), generator=torch.Generator().manual_seed(seed))
        labels[0, s // 2 :] = IGNORE  # so that chunks have different numbers of targets
        targets = F.pad(labels[:, 1:], (0, 1), value=IGNORE)
        loss = F.cross_entropy(head(hidden).mT, targets)
        dx, dw = gradients(loss, [hidden, head.weight])
        right = {"the loss": loss.detach(), "the gradient of hidden": dx}
        for chunk in 8, 1, b * s - 1, b * s, b * s + 1:
            title = f"{b} x {s} tokens in chunks of {chunk}"
            see_one = partial(see, hidden.detach(), labels, chunk)
            yield title, see_one, right | {"the gradient of head.weight": dw}


# ---- Tiles ---------------------------------------------------------------------------------------


class Counted(nn.Module):
    """An MLP that notes the tokens of its runs; all that is not over tokens is in dim -1."""

    def __init__(self, h, out):
        super().__init__()
        self.up, self.down, self.tokens = nn.Linear(h, 40), nn.Linear(40, out), []
        self.calls = []  # of hooks: all of them, if the module itself is called
        self.register_forward_pre_hook(lambda *_: self.calls.append(1))
        self.double()

    def forward(self, x):
        self.tokens.append(x.shape[-2])
        return self.down(F.gelu(self.up(x)))


class Rounded(Counted):
    """One whose output is float32, of a float64 input."""

    def forward(self, x):
        self.tokens.append(x.shape[-2])
        return x.float()


def see_tiles(block, xs, dys, tokens, recomputed, lab, eye):
    """Two forwards, then their backward."""
    block.tokens.clear(), block.calls.clear()
    given = [x.clone().requires_grad_() for x in xs]
    run = lab.Tiled(block, tokens)
    run = partial(checkpoint, run, use_reentrant=False) if recomputed else run
    ys = [run(x) for x in given]
    for name, y in zip(("the output", "the second output"), ys):
        eye.note(name, y)
    eye.note("the largest tile, in tokens", max(block.tokens))
    incoming = []
    for y in ys:
        y.register_hook(lambda grad: incoming.append((grad, grad.clone())))
    wanted = dict(zip(("x", "the second x"), given)) | dict(block.named_parameters())
    found = gradients(sum((y * dy).sum() for y, dy in zip(ys, dys)), [*wanted.values()])
    for name, grad in zip(wanted, found):
        eye.note(f"the gradient of {name}", grad)
    eye.note("x is overwritten", not all(map(torch.equal, given, xs)))
    same = all(torch.equal(*each) for each in incoming)
    eye.note("the output's gradient is overwritten", not same)
    eye.note("runs of the block in two forwards and backwards", len(block.tokens))
    eye.note("runs of the block's hooks", len(block.calls))


def tiled(group, seed):
    torch.manual_seed(seed)
    shapes = ((2, 13, 6), 6, 5), ((1, 8, 6), 9, 4), ((1, 5, 6), 4, 4), ((2, 3, 7, 6), 5, 3)
    for shape, out, size in *shapes, ((3, 4, 6), 6, 1):
        b, whole, block = shape[0], shape[0] * shape[-2], Counted(6, out)
        xs, dys = ([drawn(seed + i, *shape[:-1], width) for i in (0, 1)] for width in (6, out))
        given = [x.clone().requires_grad_() for x in xs]
        ys = [block(x) for x in given]
        names = ["x", "the second x", *dict(block.named_parameters())]
        loss = sum((y * dy).sum() for y, dy in zip(ys, dys))
        found = gradients(loss, [*given, *block.parameters()])
        right = {f"the gradient of {name}": grad for name, grad in zip(names, found)}
        right |= {"the output": ys[0].detach(), "the second output": ys[1].detach()}
        most = size * b + b - 1
        for recomputed, tokens in itertools.product((False, True), (most, whole, whole - 1, 0)):
            title = f"x {shape} in tiles of {tokens} tokens{', recomputed' * recomputed}"
            yield title, partial(see_tiles, block, xs, dys, tokens, recomputed), right
    yield "a block that gives float32", partial(see_tiles, Rounded(6, 6), xs, dys, 6, False)
    for way in "without a graph", "alone", "recomputed":
        yield f"64 tiles, {way}", partial(see_tiles_alive, Counted(6, 5), way, seed)


def see_tiles_alive(block, way, seed, lab, eye):
    """What is alive between forward and backward, and at most in the backward: 64 tiles of 4."""
    run, x = lab.Tiled(block, 4), drawn(seed, 1, 256, 6).requires_grad_()
    weights, tile = sum(p.nbytes for p in block.parameters()), 4 * 40 * 8
    with Alive() as alive, torch.set_grad_enabled(way != "without a graph"):
        if way == "recomputed":
            y = checkpoint(lambda x: run(2 * x), x, use_reentrant=False)
        else:
            y = run(2 * x)
        own = x.nbytes if way == "alone" else 0
        kept = alive.now() - own - y.nbytes
        eye.note("bytes that stay alive behind the forward", enough(kept, x.nbytes / 2))
        alive.peak = 0
        if y.requires_grad:
            y.backward(torch.ones_like(y))
    most = 7 * x.nbytes + 2 * y.nbytes + 2 * weights + 12 * tile
    eye.note("bytes alive at the peak of the backward", enough(alive.peak, most))


# ---- What is kept --------------------------------------------------------------------------------

SAVE = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE, True


def policy(group, seed):
    aten = torch.ops.aten
    column, row, other = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
    column.load_state_dict(row.state_dict())  # the same numbers, another parameter
    x, bias, q = torch.randn(3, 4), torch.randn(4), torch.randn(1, 2, 8, 8)
    calls = {
        "a product": (aten.mm.default, x, column.weight.t()),
        "a product with bias": (aten.addmm.default, bias, x, column.weight.t()),
        "o_proj's product": (aten.mm.default, x, other.weight.t()),
        "down_proj's product": (aten.mm.default, x, row.weight.t()),
        "o_proj's product with bias": (aten.addmm.default, bias, x, other.weight.t()),
        "silu": (aten.silu.default, x),
        "a product of each number": (aten.mul.Tensor, x, x),
        "a sum": (aten.sum.dim_IntList, x, [1]),  # the last argument is no tensor
        "a batch of products": (aten.bmm.default, q[0], q[0]),
    }
    for name in finished.EXPENSIVE[2:-1]:  # attention, in each of torch's ways
        calls[name] = getattr(aten, name.removeprefix("aten::")).default, q, q, q

    def see(grad, lab, eye):
        for name, call in calls.items():
            with torch.set_grad_enabled(grad):
                found = lab.keep_expensive((other, row), None, *call)
            known = isinstance(found, bool | CheckpointPolicy)
            eye.note(f"keep_expensive() of {name} gives a policy or a bool", known)
            eye.note(f"{name} is kept", found in SAVE)

    yield "in a layer", partial(see, True)
    yield "in a tile, without a graph", partial(see, False)


def offloaded(group, seed):
    def see(grad, lab, eye):
        sent, back, runs = [], [], []

        def pack(x):
            sent.append(1)
            return x.detach().clone()

        def unpack(x):
            back.append(1)
            return x

        def layer(x, scale, number):
            runs.append(1)
            return (x * x * scale).sin().exp() * number

        leaves = [drawn(seed + i, 3, 4).requires_grad_() for i in (0, 1)]
        hooks = partial(saved_tensors_hooks, pack, unpack)
        with torch.set_grad_enabled(grad):
            there = weakref.ref(x := leaves[0] * 3)
            y = lab.offloaded(hooks, layer, x, leaves[1], 2)
        eye.note("tensors that went to the host", len(sent))
        eye.note("the output", y)
        del x
        eye.note("an input is on the device, too", there() is not None)
        if grad:
            for name, found in zip(("x", "the second input"), gradients(y.sum(), leaves)):
                eye.note(f"the gradient of {name}", found)
        eye.note("tensors that came back", len(back))
        eye.note("runs of the layer", len(runs))

    yield "with a backward", partial(see, True)
    yield "with grad mode off", partial(see, False)


def predict(group, seed):
    def see(config, tokens, lab, eye):
        parts = None, 48, tokens, tokens + 9
        for way in itertools.product((8, 2), ("full", "none"), parts, parts):
            found = lab.predict_peak(config, tokens, *way)
            eye.note(f"what predict_peak() gives with {way}", sorted(found))
            for key, nbytes in found.items():
                itemsize, recompute, tile, chunk = way
                where = f"{recompute}, tile {tile}, chunk {chunk}, {itemsize} bytes a number"
                eye.note(f"{key}, {where},", nbytes)

    for tied, (L, h, i, v) in itertools.product((True, False), ((3, 8, 20, 900), (5, 12, 70, 40))):
        sizes = {"num_hidden_layers": L, "hidden_size": h, "intermediate_size": i, "vocab_size": v}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": tied}
        for tokens in 64, 1000:
            title = f"{tokens} tokens, h {h}, i {i}, v {v}{', tied' * tied}"
            yield title, partial(see, LlamaConfig(**sizes, **heads), tokens)


# ---- Ulysses by chunks of heads ------------------------------------------------------------------

WEIGHTS = "q_weight", "k_weight", "v_weight"


def see_heads(x, weights, dy, d, group, lab, eye):
    """Values, messages and memory of 1, 3 and 6 chunks of heads."""
    peaks = {}
    for chunks in 1, 3, 6:
        what = f"{chunks} chunk{'s' * (chunks > 1)} of heads"
        own = [t.clone().requires_grad_() for t in (x, *weights)]
        with Alive() as alive, Traffic() as traffic:
            y = lab.attend_by_chunks(*own, d, chunks, group)
        forward, most = alive.peak, int(2.5 * dy.nbytes)
        left = bytes_alive(alive.storages.valuerefs(), most, 1)
        eye.note(f"{what}, y", y)
        eye.note(f"{what}, all-to-alls in the forward", traffic.ops.get("all_to_all", [0])[0])
        eye.note(f"{what}, bytes alive until the backward", enough(left, most))
        if not eye.together(y.shape == dy.shape and y.requires_grad):
            eye.note("skipped", None)
            return
        alive.peak = 0
        with alive:
            found = gradients((y * dy).sum(), own)
        peaks[chunks] = forward, alive.peak
        for name, grad in zip(("x", *WEIGHTS), found):
            eye.note(f"{what}, the gradient of {name}", grad)
        same = all(map(torch.equal, own, (x, *weights)))
        eye.note(f"{what}, x, or a weight, is overwritten", not same)
    for phase, many, one in zip(("forward", "backward"), peaks[6], peaks[1]):
        eye.note(f"the {phase} of 6 chunks takes less than 0.6 of that of 1", many < 0.6 * one)


def chunks_of_heads(group, seed):
    d, h, P, rank = 8, 16, group.size(), group.rank()
    seed += dist.get_process_group_ranks(group)[0]  # the other pair has other numbers
    full, dout = drawn(seed, 2, 64 * P, h), drawn(seed + 1, 2, 64 * P, 12 * P * d)
    weights = [drawn(seed + i, n * P * d, h) for i, n in enumerate((12, 6, 6), 2)]
    x = full.clone().requires_grad_()
    products = [F.linear(x, weight) for weight in weights]
    for product in products:
        product.retain_grad()
    q, k, v = (product.unflatten(-1, (-1, d)).transpose(1, 2) for product in products)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    out = out.transpose(1, 2).flatten(2)
    out.backward(dout)
    mine = slice(64 * rank, 64 * rank + 64)
    right = {"y": out.detach()[:, mine], "the gradient of x": x.grad[:, mine]}
    for name, product in zip(WEIGHTS, products):  # this rank's tokens give their part of it
        dw = product.grad[:, mine].flatten(0, 1).T @ full[:, mine].flatten(0, 1)
        right[f"the gradient of {name}"] = dw
    each = "1 chunk of heads", "3 chunks of heads", "6 chunks of heads"
    right = {f"{what}, {name}": value for what in each for name, value in right.items()}
    own = full[:, mine].clone(), weights, dout[:, mine].clone()
    yield f"{P} ranks", partial(see_heads, *own, d, group), right


ALONE = chunked_loss, tiled, policy, offloaded, predict
EXERCISES = {cases.__name__: (cases, 1) for cases in ALONE}
EXERCISES["chunks_of_heads"] = chunks_of_heads, 4, [[0, 2], [1, 3]]
CHECKS, BUGS = checks(EXERCISES, finished, 1e-10)
