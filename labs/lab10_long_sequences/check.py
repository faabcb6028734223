"""Lab 10's checks, each of which runs on every rank, and the bugs that they have to catch.

In float64, so that nothing but a mistake is off. Memory is counted in tensors
that are alive, and in runs of a block, never in seconds.
"""

import time
import weakref
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

from labs.kit.alive import Alive
from labs.kit.compare import close, drawn, expect_same, mistaken, tried
from labs.kit.harness import Traffic, expect
from labs.lab10_long_sequences.memory import check_predict, finished, gradients

IGNORE = finished.IGNORE


COUNT, SPLIT = "(targets != IGNORE).sum()", "targets.split(size, 1)"
MEANS = "add up the chunks' sums, and divide once by all targets: no mean of means"
LOSS = {  # hint: (a part of chunked_loss(), what usually stands there instead), ...
    "the target of a token is the next one": [("labels[:, 1:], (0, 1)", "labels, (0, 0)")],
    "the last token has no target: IGNORE, not the sequence's first token": [
        ("F.pad(labels[:, 1:], (0, 1), value=IGNORE)", "labels.roll(-1, 1)")
    ],
    "what is padded has no target: IGNORE": [("value=IGNORE", "value=0")],
    "divide by the number of targets, not of tokens": [(COUNT, "targets.numel()")],
    "return a mean: divide by the number of targets": [(f" / {COUNT}", "")],
    "count the shifted targets: a first label is nobody's target": [
        (COUNT, "(labels != IGNORE).sum()")
    ],
    "the last chunk is shorter, and counts": [(SPLIT, f"{SPLIT}[: labels.shape[1] // size]")],
    MEANS: [
        (COUNT, f"len({SPLIT})"),
        ("reentrant=False)", "reentrant=False) / (t != IGNORE).sum().clamp(min=1)"),
    ],
    "shift before you split: a chunk's last token has a target in the next": [
        (COUNT, "sum((t[:, 1:] != IGNORE).sum() for t in labels.split(size, 1)).clamp(min=1)"),
        (SPLIT, "[F.pad(t[:, 1:], (0, 1), value=IGNORE) for t in labels.split(size, 1)]"),
    ],
}


def check_chunked_loss(lab, group, seed):
    head = nn.Linear(6, 500, bias=False).double()
    for b, s in (2, 31), (1, 16), (3, 5):
        for chunk in 8, 1, b * s - 1, b * s, b * s + 1:
            follow_chunks(lab, head, b, s, chunk, seed)
    return "15 shapes, uneven targets: loss and gradients to 1e-10; the logits of a chunk alone"


def follow_chunks(lab, head, b, s, chunk, seed):
    """The loss, its gradients and the logits alive, of (b, s) tokens in chunks."""
    hidden = drawn(seed, b, s, 6).requires_grad_()
    labels = torch.randint(500, (b, s), generator=torch.Generator().manual_seed(seed))
    labels[0, s // 2 :] = IGNORE  # so that chunks have different numbers of targets
    targets = F.pad(labels[:, 1:], (0, 1), value=IGNORE)
    logits, before = head(hidden), [labels.clone(), hidden.detach().clone()]
    right = F.cross_entropy(logits.mT, targets)
    call = head, hidden.detach(), labels, chunk
    usual = {hint: mistaken(finished.chunked_loss, *parts) for hint, parts in LOSS.items()}
    hints = {hint: wrong(*call).detach() for hint, wrong in usual.items()}
    wanted = gradients(right, [hidden, head.weight])
    what, logits = f"the loss of {b} x {s} tokens in chunks of {chunk}", 8 * 500 * max(chunk, b)
    with Alive() as alive:
        hint = "chunk // b tokens of each sequence, at least 1; all chunks, the last one shorter"
        mine = tried(what, hint, lab.chunked_loss, head, hidden, labels, chunk)
        kept, peak = alive.now(), alive.peak
        nothing = "0 / 0: a chunk may be without targets; divide once, by all of them"
        hint = "the next token is the target; all chunks' sums, divided by the number of targets"
        expect(getattr(mine, "requires_grad", True), f"{what}: no gradient", "no detach(), item()")
        close(what, mine, right.detach(), hints, hint if mine.isfinite() else nothing)
        found = gradients(mine, [hidden, head.weight])
    for name, x, y in zip(("hidden", "head"), found, wanted):
        hint = "each chunk runs again with its own hidden and targets; nothing is detached"
        close(f"{what}: the gradient of {name}", x, y, None, hint)
    expect_same(f"{what}: labels or hidden", [labels, hidden], before)
    if chunk < b * s:
        hint = "run a chunk again in the backward: checkpoint(..., use_reentrant=False)"
        expect(kept < 4 * 500 * b * s, f"{what}: logits stay alive for the backward", hint)
        hint = "chunk counts the tokens of all sequences together: chunk // b of each"
        expect(peak <= 3 * logits + 10_000, f"{what}: more logits than those of a chunk", hint)
        hint = "a checkpoint for each chunk: one for all of them makes all logits again at once"
        most, found = 4 * logits + 60_000, f"{what}: in the backward {alive.peak} bytes of logits"
        expect(alive.peak <= most, found, hint)


class Counted(nn.Module):
    """An MLP that notes the tokens of its runs; all that is not over tokens is in dim -1."""

    def __init__(self, h, out):
        super().__init__()
        self.up, self.down, self.tokens = nn.Linear(h, 40), nn.Linear(40, out), []
        self.calls = []  # of hooks: all of them, if the module itself is called
        self.register_forward_pre_hook(lambda *_: self.calls.append(1))

    def forward(self, x):
        self.tokens.append(x.shape[-2])
        return self.down(F.gelu(self.up(x)))


def check_tiled(lab, group, seed):
    torch.manual_seed(seed)
    cases = ((2, 13, 6), 6, 5), ((1, 8, 6), 9, 4), ((1, 5, 6), 4, 4)  # whole tiles; one token more
    for shape, out, size in (*cases, ((2, 3, 7, 6), 5, 3), ((3, 4, 6), 6, 1)):
        block, most = Counted(6, out).double(), size * shape[0] + shape[0] - 1
        for recomputed in False, True:
            follow_tiles(lab, block, shape, size, lab.Tiled(block, most), recomputed, seed)
        x, whole = drawn(seed, *shape).requires_grad_(), shape[0] * shape[-2]
        for tokens, right in (whole, 1), (whole + 5, 1), (whole - 1, 2), (0, shape[-2]):
            block.tokens.clear()
            hint = "tiles are of dim -2, tokens // b of each sequence, 1 at least"
            y = tried(f"x {shape} in tiles of {tokens} tokens", hint, lab.Tiled(block, tokens), x)
            found = f"x {shape} in tiles of {tokens} tokens of all sequences: {block.tokens}"
            expect(len(block.tokens) == right, f"{found}, not {right} runs", hint)
            y.sum().backward()
            hint = "where all tokens are one tile the block runs as it is, and once"
            expect(right > 1 or len(block.tokens) == 1, f"{found} with the backward", hint)
    check_tiles_alive(lab, seed)
    return "5 shapes, alone and recomputed: gradients to 1e-10, each tile twice, a tile alive"


def follow_tiles(lab, block, shape, size, tiled, recomputed, seed):
    """Two forwards, then their backward: output, gradients and runs, in tiles of a size."""
    out, names = block.down.out_features, [n for n, _ in block.named_parameters()]
    xs, dys = ([drawn(seed + i, *shape[:-1], w) for i in (0, 1)] for w in (shape[-1], out))
    what = f"x {shape} in tiles of {size} tokens, {'recomputed' if recomputed else 'alone'}"
    given = [x.clone().requires_grad_() for x in xs]
    tensors = [*given, *block.parameters()]
    right = [block(x) for x in given]
    wanted = gradients(sum((y * dy).sum() for y, dy in zip(right, dys)), tensors)
    block.tokens.clear(), block.calls.clear()
    hint = "tiles are of dim -2, tokens // b of each sequence, the last one shorter; y is as wide"
    hint += " as the block gives it"
    run = partial(checkpoint, tiled, use_reentrant=False) if recomputed else tiled
    mine = [tried(what, hint, run, x) for x in given]
    expect(max(block.tokens) == size, f"{what}: a tile of {max(block.tokens)}", hint)
    for y, other in zip(mine, right):
        expect(y.dtype == other.dtype, f"{what}: the output is {y.dtype}", "y.new_empty(...)")
        close(f"{what}: the output", y.detach(), other.detach(), None, hint)
        expect(y.requires_grad, f"{what}: the output has no gradient", "RunTiles.apply(x, ...)")
    hint = "grad mode is off in a Function: torch.enable_grad() around the block, of a tile that"
    hint += " requires grad; x is what KeepInput saved"
    loss = sum((y * dy).sum() for y, dy in zip(mine, dys))
    found = tried(f"{what}: the backward", hint, gradients, loss, tensors)
    adds = "each tile's backward() adds to the weights' gradients: y.backward(dy)"
    other = "each forward has an x of its own: its tiles, its dy, its place in dx"
    for name, x, right in zip(("dx", "the second dx", *names), found, wanted):
        hints = {adds: torch.zeros_like(right)}
        close(f"{what}: the gradient of {name}", x, right, hints, other)
    expect_same(f"{what}: x", given, xs)
    hint, runs = "once forward, once backward for each tile", 4 * -(-shape[-2] // size)
    if recomputed:
        hint = "keep x by KeepInput, before the tiles run: the recomputation stops there"
    found = f"{what}: the block runs {len(block.tokens) / 2:g} times, not {runs // 2}"
    expect(len(block.tokens) == runs, found, hint)
    hint = "call the block, self.block(tile): its hooks are a part of it"
    expect(len(block.calls) == runs, f"{what}: {len(block.calls)} of {runs} runs of hooks", hint)


def check_tiles_alive(lab, seed):
    """What is alive between forward and backward, and at most in the backward: 64 tiles of 4."""
    block, x = Counted(6, 5).double(), drawn(seed, 1, 256, 6).requires_grad_()
    tiled = lab.Tiled(block, 4)
    weights, tile = sum(p.nbytes for p in block.parameters()), 4 * 40 * 8
    graph = "a tile's intermediates are not for the backward: no graph in the forward"
    attribute = "save_for_backward keeps x where a recomputed layer can drop it; ctx.x = x stays"
    cases = [("with grad mode off", 0, "nothing is for a backward"), ("alone", x.nbytes, graph)]
    for what, own, hint in [*cases, ("recomputed", 0, attribute)]:
        with Alive() as alive, torch.set_grad_enabled(own > 0 or hint == attribute):
            run = partial(checkpoint, use_reentrant=False) if hint == attribute else apply
            y = run(lambda x: tiled(2 * x), x)
            kept, most = alive.now(), own + y.nbytes
            found = f"{what}: {kept} bytes stay alive behind the forward, {most} do"
            expect(kept < most + x.nbytes / 2, found, hint)
            if y.requires_grad:
                alive.peak = 0
                y.backward(torch.ones_like(y))
        most = 7 * x.nbytes + 2 * y.nbytes + 2 * weights + 12 * tile
        found = f"{what}: {alive.peak} bytes at the peak of the backward: use {most}"
        hint = "each tile's y.backward(dy) before the next tile runs, not one graph of them all"
        expect(alive.peak <= most, found, hint)


def apply(function, *args):
    return function(*args)


SAVE = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE, True
KNOWN = bool, CheckpointPolicy


def check_policy(lab, group, seed):
    aten = torch.ops.aten
    column, row, other = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
    column.load_state_dict(row.state_dict())  # the same numbers, another parameter
    x, bias, q = torch.randn(3, 4), torch.randn(4), torch.randn(1, 2, 8, 8)
    policy = partial(lab.keep_expensive, (other, row), None)
    hint = "row_parallel: a partial sum is as large as x of all ranks; is it the weight's _base?"
    last = "addmm's last argument is the weight, as mm's is"
    rest = "EXPENSIVE lists what is kept, by operation.name(); all else runs again"
    same = "EXPENSIVE has operation.name(); a product is row parallel if its weight is (`is`) one "
    same += "of these, not if numbers agree"
    cases = [
        ("a product", True, same, aten.mm.default, x, column.weight.t()),
        ("a product with bias", True, same, aten.addmm.default, bias, x, column.weight.t()),
        ("o_proj's product", False, hint, aten.mm.default, x, other.weight.t()),
        ("down_proj's product", False, hint, aten.mm.default, x, row.weight.t()),
        ("o_proj's product with bias", False, last, aten.addmm.default, bias, x, row.weight.t()),
    ]
    cases += [("silu", False, rest, aten.silu.default, x)]
    cases += [("a product of each number", False, rest, aten.mul.Tensor, x, x)]
    cases += [("a sum", False, rest, aten.sum.dim_IntList, x, [1])]  # the last argument: no tensor
    cases += [("a batch of products", False, rest, aten.bmm.default, q[0], q[0])]
    for name in finished.EXPENSIVE[2:-1]:  # attention, in each of torch's ways
        call = getattr(aten, name.removeprefix("aten::")).default
        cases += [(name, True, "attention is expensive: EXPENSIVE lists it", call, q, q, q)]
    for name, keep, hint, *call in cases:
        found = tried(name, "args[-1] is a weight in a product alone", policy, *call)
        text = f"{name}: {found} is neither a CheckpointPolicy nor a bool"
        expect(isinstance(found, KNOWN), text, "MUST_SAVE or PREFER_RECOMPUTE, in every case")
        expect((found in SAVE) == keep, f"{name} is {'not kept' if keep else 'kept'}", hint)
        with torch.no_grad():
            found = policy(*call)
        hint = "without a graph (torch.is_grad_enabled()) nobody asks for it: a tile runs anew"
        expect(found not in SAVE, f"{name} inside a tile is kept", hint)
    return "products and attention kept, but for row parallel ones and what runs in tiles"


def check_offloaded(lab, group, seed):
    sent, back, runs = [], [], []

    def hooks():
        def pack(x):
            sent.append(x.shape)
            return x.detach().clone()

        def unpack(x):
            back.append(x.shape)
            return x

        return saved_tensors_hooks(pack, unpack)

    def layer(x, scale, number):
        runs.append(1)
        return (x * x * scale).sin().exp() * number

    leaves = [drawn(seed + i, 3, 4).requires_grad_() for i in (0, 1)]
    right = layer(leaves[0] * 3, leaves[1], 2)
    wanted, runs[:] = gradients(right.sum(), leaves), []
    there = weakref.ref(x := leaves[0] * 3)
    hint = "checkpoint(function, *args) inside `with hooks():` keeps function's inputs alone"
    y = tried("offloaded()", hint, lab.offloaded, hooks, layer, x, leaves[1], 2)
    expect(y is not None, "offloaded() returns None", hint)
    what = f"{len(sent)} tensors went to the host, not the 2 inputs alone"
    expect(sent == 2 * [x.shape], what, hint)
    del x
    hint = "nothing else may hold an input: no lambda, no partial, no list around it"
    expect(there() is None, "an input is on the device, too", hint)
    close("the output", y.detach(), right.detach())
    same = "function runs again with the args that were given, none of them detached"
    found = tried("the backward", same, gradients, y.sum(), leaves)
    for name, a, b in zip(("x", "the second input"), found, wanted):
        close(f"the gradient of {name}", a, b, None, same)
    expect(len(back) == 2, f"{len(back)} tensors came back, not 2")
    expect(len(runs) == 2, f"the layer ran {len(runs)} times, not twice", hint)
    with torch.no_grad():
        lab.offloaded(hooks, layer, *leaves, 2)
    expect(len(sent) == 2, "with grad mode off tensors go to the host", "no backward asks for them")
    return "the inputs alone go to the host and come back; the layer runs again"


def check_chunks_of_heads(lab, group, seed):
    pairs = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    group, peaks = pairs[group.rank() % 2], {}
    d, h, P = 8, 16, group.size()
    seed += dist.get_process_group_ranks(group)[0]  # the other pair has other numbers
    full, dout = drawn(seed, 2, 64 * P, h), drawn(seed + 1, 2, 64 * P, 12 * P * d)
    weights = [drawn(seed + n, n * d, h) for n in (12 * P, 6 * P, 6 * P)]
    right = [x.clone().requires_grad_() for x in (full, *weights)]
    heads = [F.linear(right[0], w).unflatten(-1, (-1, d)).transpose(1, 2) for w in right[1:]]
    out = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
    out = out.transpose(1, 2).flatten(2)
    wanted, out = gradients((out * dout).sum(), right), out.detach()
    mine = slice(64 * group.rank(), 64 * group.rank() + 64)
    for chunks in 1, 3, 6:
        own = [x.clone().requires_grad_() for x in (full[:, mine], *weights)]
        call = out[:, mine], dout[:, mine], d, chunks, group
        peaks[chunks], grads = follow_heads(lab, own, *call)
        expect_same("x, or a weight,", own, [full[:, mine], *weights])
        hint = "a chunk runs again in the backward: its own weights are arguments of checkpoint()"
        close(f"{chunks} chunks of heads: dx", grads[0], wanted[0][:, mine], None, hint)
        for name, a, b in zip("qkv", grads[1:], wanted[1:]):  # each rank has a part of it
            dist.all_reduce(a, group=group)
            hint = "a chunk's own weights of q, k, v in this order, none of them detached"
            close(f"{chunks} chunks of heads: the gradient of {name}_weight", a, b, None, hint)
    hints = "one chunk after another, each of them freed before the next"
    hints = hints, "a checkpoint for each chunk: one for all of them makes all again at once"
    for phase, hint, many, one in zip(("forward", "backward"), hints, peaks[6], peaks[1]):
        found = f"6 chunks take {many} bytes in the {phase}, 1 takes {one}"
        expect(many < 0.6 * one, found, hint)
    part = peaks[6][1] / peaks[1][1]
    return f"1, 3 and 6 chunks: exact; the peak of 6 is {part:.2f} of that of 1"


def follow_heads(lab, own, right, dout, d, chunks, group):
    """((bytes at the peak of the forward, of the backward), the gradients) of a rank's tokens."""
    hint = "chunk the rows of q_weight, k_weight, v_weight; the group is an argument"
    with Alive() as alive, Traffic() as traffic:
        y = tried("attend_by_chunks()", hint, lab.attend_by_chunks, *own, d, chunks, group)
    forward, most, end = alive.peak, 2.5 * 8 * right.numel(), time.time() + 2
    what = f"{chunks} chunks of heads"
    hint = "side by side, (b, s/P, heads d): torch.cat in the last dimension"
    expect(y.shape == right.shape, f"{what}: shape {tuple(y.shape)}", hint)
    hint = "chunk the rows of each weight: chunk c has KV heads and the query heads that read them"
    while alive.now() > most and time.time() < end:
        time.sleep(0.01)  # gloo's thread may hold the last message a moment longer
    kept = alive.now()
    if chunks == 1:
        hint = "attend() of all heads, in the group that is an argument"
    hints = {"heads stay in their order": torch.cat(right.chunk(chunks, -1)[::-1], -1)}
    close(what, y.detach(), right, hints, hint)
    calls = traffic.ops.get("all_to_all", [0])[0]
    expect(calls == 4 * chunks, f"{what}: {calls} all-to-alls, not {4 * chunks}")
    hint = "a chunk's q, k and v are for its backward: run it again, by checkpoint()"
    expect(kept <= most, f"{what}: {kept} bytes stay alive", hint)
    with alive:
        alive.peak = 0
        grads = gradients((y * dout).sum(), own)
    return (forward, alive.peak), grads


CHECKS = {
    "chunked_loss": (check_chunked_loss, 1),
    "tiled": (check_tiled, 1),
    "policy": (check_policy, 1),
    "offloaded": (check_offloaded, 1),
    "predict": (check_predict, 1),
    "chunks_of_heads": (check_chunks_of_heads, 4),
}


def mean_of_means(lab):
    """Each chunk's mean loss, and the mean of these: chunks with few targets count too much."""
    lab.chunked_loss = mistaken(finished.chunked_loss, *LOSS[MEANS])


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
