"""Lab 16's exercises: their cases. A sum is right to the bit: its tolerance is 0.

A model's values are Hugging Face's and plain torch's, but for rounding. Its bits are compared with
those of the same answers on one rank, and its products with each other's: an answer may call
another kernel than ours, but it has to be the same call on any number of ranks.
"""

import itertools
import queue
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import lru_cache, partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from labs.kit.eye import Most
from labs.kit.harness import Traffic, relative_error
from labs.kit.judge import checks
from labs.kit.tools import Products, subgroup
from labs.kit.tools import gradients as gradients_of
from labs.lab16_bits import bits
from labs.lab16_bits.bits import drawn, finished

GROUPS = [0, 1, 2, 3], [1, 3], [2]


# ---- What is drawn at random ---------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that is made while inside."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.elements = max(self.elements, out.untyped_storage().nbytes() // out.itemsize)
        return out


def initial(group, seed):
    def see(given, fewer, lab, eye):
        with Largest() as largest:
            eye.call(lab.initial, given, "the block")
        eye.note("the numbers of the largest tensor", Most(max(largest.elements, fewer)))

    for name in "layers.0.q", "layers.1.q", "layers.1.down", "layers.0.o", "embed", "layers.1.k":
        dim, (m, n) = finished.CUT[name.split(".")[-1]]
        full = finished.uniform(seed, name, torch.arange(m * n).view(m, n))
        parts = ((full - 0.5) * finished.SPREAD).chunk(finished.BLOCKS, dim)
        for block, right in enumerate(parts):
            given = {"name": name, "block": block, "seed": seed}
            yield f"{name}, block {block}", partial(see, given, m * n - 1), {"the block": right}


def dropout(group, seed):
    def see(x, where, right, mask, most, lab, eye):
        mine = x.clone().requires_grad_()
        found = lab.dropout(mine, *where, seed)
        eye.note("the result's dtype", found.dtype)
        eye.note("the tensor of what is kept", found != 0)
        eye.note("the result, but for rounding,", bits.about(found, right, most))
        [grad] = gradients_of(found.sum(), None, [mine])
        eye.note("the gradient of x, but for rounding,", bits.about(grad, mask, most))
        eye.note("x is overwritten", not torch.equal(mine, x))

    cases = ("mlp", 0, 0, 0, 0, 8), ("mlp", 24, 1, 3, 7, 8), ("attention", 8, 1, 2, 1, 5)
    for dtype, (*where, tokens) in itertools.product(bits.DTYPES, cases):
        x = (1 + drawn(seed, tokens, 12, spread=0).abs()).to(dtype)
        right = finished.dropout(x, *where, seed)
        mask = (right != 0).to(dtype) / (1 - finished.DROP)
        most = 1e-6 if dtype == torch.float32 else 1e-2
        site, first, layer, sequence, step = where
        title = f"{dtype}, {site} of layer {layer}, sequence {sequence}, step {step}"
        yield f"{title}, first {first}", partial(see, x, where, right, mask, most)


def batch_at(group, seed):
    fine = finished.uniform

    def coarse(*args):
        return (fine(*args) * 8).floor() / 8  # many are equal

    def see(sizes, lab, eye):
        with mock.patch.multiple(lab, **sizes):
            for step in range(sizes["EXAMPLES"] + 2):
                eye.note(f"the batch of step {step}", lab.batch_at(step, seed))

    for examples, size, uniform in (12, 4, fine), (24, 4, fine), (8, 8, fine), (96, 32, coarse):
        sizes = {"EXAMPLES": examples, "B": size, "uniform": uniform}
        yield f"{examples} examples, {size} a batch", partial(see, sizes)


# ---- Sums with a fixed order ---------------------------------------------------------------------


def tree_sum(group, seed):
    def see(parts, lab, eye):
        for kind in tuple, list:
            given = kind(part.clone() for part in parts)
            eye.note(f"the sum of a {kind.__name__}", lab.tree_sum(given))
            same = len(given) == len(parts) and all(map(torch.equal, given, parts))
            eye.note(f"the {kind.__name__} is overwritten", not same)

    for dtype, count in itertools.product(bits.DTYPES, [1, 2, 4, 8, 16]):
        parts = [drawn(seed + i, 5, 7, dtype=dtype) for i in range(count)]
        title = f"{count} part{'s' * (count > 1)}, {dtype}"
        yield title, partial(see, parts), {"the sum of a tuple": bits.tree(parts)}


class Stopped(Exception):
    """Raised by a probe where a message would wait for ever."""


@contextmanager
def watched_exchange(lab, eye):
    """exchange() has its peers noted, and sends nothing where one is wrong."""
    exchange, calls = lab.exchange, itertools.count(1)

    def noting(x, peer, group):
        eye.note(f"the peer of exchange() {next(calls)}", peer)
        if not eye.goes_on():
            raise Stopped
        return exchange(x, peer, group)

    with suppress(Stopped), mock.patch.object(lab, "exchange", noting):
        yield


def reduced(name, shapes, group, seed):
    """The cases of doubling() or halving(), of x of these shapes."""

    def see(x, lab, eye):
        mine = x.clone(memory_format=torch.preserve_format)
        with watched_exchange(lab, eye), Traffic() as traffic:
            found = getattr(lab, name)(mine, group)
        if "skipped" in eye.seen:
            return
        others = sorted({*traffic.ops} - {"send"})
        eye.note("the list of other collectives than exchange()", others)
        eye.note("the number of bytes sent", traffic.bytes("send"))
        eye.note("the sum", found)
        eye.note("x is overwritten", not torch.equal(mine, x))

    for dtype, shape in itertools.product(bits.DTYPES, shapes):
        parts = [drawn(seed + 9 * i, *shape[::-1], dtype=dtype) for i in range(group.size())]
        parts = [part.mT if len(shape) == 2 else part for part in parts]  # not contiguous
        title = f"{shape} on {group.size()} rank{'s' * (group.size() > 1)}, {dtype}"
        yield title, partial(see, parts[group.rank()]), {"the sum": bits.tree(parts)}
    if group.size() == 1:
        yield on_eight(name, seed)


def on_eight(name, seed):
    """The case of doubling() or halving() on 8 ranks: threads, which hand over in this process."""

    def see(parts, lab, eye):
        boxes = {pair: queue.Queue() for pair in itertools.product(range(8), repeat=2)}

        def exchange(x, peer, group):
            boxes[group.rank(), peer].put(x.clone())
            return boxes[peer, group.rank()].get(timeout=20)

        def play(rank):
            group = SimpleNamespace(rank=lambda: rank, size=lambda: 8)
            return getattr(lab, name)(parts[rank].clone(), group)

        with mock.patch.object(lab, "exchange", exchange), ThreadPoolExecutor(8) as threads:
            for rank, found in enumerate(threads.map(play, range(8))):
                eye.note(f"the sum on rank {rank}", found)

    parts = [drawn(seed + 9 * i, 8, 3) for i in range(8)]
    right = {f"the sum on rank {rank}": bits.tree(parts) for rank in range(8)}
    return "(8, 3) on 8 ranks", partial(see, parts), right


def doubling(group, seed):
    yield from reduced("doubling", [(8, 3), (4,), (5, 7), ()], group, seed)


def halving(group, seed):
    yield from reduced("halving", [(8, 3), (4,)], group, seed)


def edges(group, seed):
    count, rank = finished.BLOCKS // group.size(), group.rank()
    names = [f"part {i}" for i in range(count)]

    def leave(parts, dy, lab, eye):
        given = {name: part.clone().requires_grad_() for name, part in zip(names, parts)}
        eye.call(partial(lab.Leave.apply, group), given, "y", [dy])

    def enter(x, dys, lab, eye):
        given = {"x": x, "count": count, "group": group}
        eye.call(lab.Enter.apply, given, ", ".join(names), dys)

    for dtype in bits.DTYPES:
        parts = [drawn(seed + i, 4, 6, dtype=dtype) for i in range(finished.BLOCKS)]
        own, dy = parts[rank * count :][:count], drawn(seed + 99, 4, 6, dtype=dtype)
        where = f"on {group.size()} ranks, {dtype}"
        right = {"y": bits.tree(parts)} | {f"the gradient of {name}": dy for name in names}
        yield f"Leave {where}", partial(leave, own, dy), right
        x = drawn(seed, 4, 6, dtype=dtype).requires_grad_()
        right = dict.fromkeys(names, x.detach()) | {"the gradient of x": bits.tree(parts)}
        yield f"Enter {where}", partial(enter, x, own), right


# ---- LLaMA in blocks -----------------------------------------------------------------------------


def mlp(group, seed):
    name, x = "layers.1", drawn(seed + 1, finished.S, finished.H, spread=0)
    layout = finished.Layout(bits.one_rank().dp, group)
    kinds = [f"{name}.{each}" for each in ("gate", "up", "down")]

    def drop(y, site, first):
        return finished.dropout(y, site, first, layer=1, sequence=2, step=3, seed=seed)

    def see(weights, x, dy, right, lab, eye):
        block, results, products = layout.blocks[-1], [], []
        own = {key: w.clone().requires_grad_() for key, w in weights.items()}
        found = lab.mlp(own, name, drop, block, x)
        eye.note(f"the part of block {block}, but for rounding,", bits.about(found, right[block]))
        if not eye.goes_on():
            return
        for where in layout, bits.one_rank():
            given = x.clone().requires_grad_()
            with Products() as calls:
                y = lab.in_blocks(partial(lab.mlp, own, name, drop), given, where)
                keys = [key for key in own if key[1] in where.blocks]
                grads = gradients_of(y, dy, [given, *(own[key] for key in keys)])
            names = ["the gradient of x", *(f"the gradient of {key}" for key in keys)]
            results.append({"the result": y.detach()} | dict(zip(names, grads)))
            products.append(calls.calls)
        eye.note("the result, but for rounding,", bits.about(results[0]["the result"], sum(right)))
        bits.note_products(eye, *products)
        bits.note_bits(eye, *results)

    for dtype in bits.DTYPES:
        weights, each = {}, range(finished.BLOCKS)
        for key in itertools.product(kinds, each):
            weights[key] = (5 * finished.initial(*key, seed)).to(dtype)
        right = [finished.mlp(weights, name, drop, block, x.to(dtype)) for block in each]
        dy = drawn(seed + 2, finished.S, finished.H, spread=0).to(dtype)
        title = f"on {group.size()} ranks, {dtype}"
        yield title, partial(see, weights, x.to(dtype), dy, right)


def loss(group, seed):
    layout = finished.Layout(bits.one_rank().dp, group)
    targets = torch.tensor([0, 7, 8, 31, 63, 40])

    def see(logits, right, slope, most, lab, eye):
        parts, results = logits.chunk(finished.BLOCKS, 1), []
        for where in layout, bits.one_rank():
            given = [parts[block].clone().requires_grad_() for block in where.blocks]
            found = lab.token_losses(given, targets, where)
            grads = gradients_of(found.sum(), None, given)
            names = [f"the gradient of block {block}" for block in where.blocks]
            results.append({"the losses": found.detach()} | dict(zip(names, grads)))
            if where is layout:
                eye.note("the losses' dtype", found.dtype)
                if found.dtype == torch.float64:
                    exact = relative_error(found.detach(), right) < 1e-12
                    eye.note("the losses have float64's precision", exact)
                eye.note("the losses, but for rounding,", bits.about(found, right, most))
                blocks = slope.chunk(finished.BLOCKS, 1)
                own = torch.cat([blocks[block] for block in where.blocks], 1)
                grad = bits.about(torch.cat(grads, 1), own, 1e-2)
                eye.note("the logits' gradient, but for rounding,", grad)
        bits.note_bits(eye, *results)

    for dtype, scale in itertools.product([*bits.DTYPES, torch.float64], [1, 100]):
        logits = (scale * drawn(seed, 6, finished.VOCAB, spread=0).double()).to(dtype)
        wide = logits.to(torch.promote_types(dtype, torch.float32)).requires_grad_()
        right = F.cross_entropy(wide, targets, reduction="none")
        [slope] = torch.autograd.grad(right.sum(), wide)
        title = f"on {group.size()} ranks, {dtype}, logits up to {logits.abs().max():.0f}"
        yield title, partial(see, logits, right.detach(), slope, 1e-5 if scale == 1 else 1e-4)


# ---- Training ------------------------------------------------------------------------------------


def watched_gradients(lab, layout, dtype, seed):
    """(loss, {key: gradient}, products, Traffic) of a lab's gradients(), with dropout.

    Products and Traffic are of bfloat16 alone, because to watch takes longer than to compute.
    """
    weights = finished.new_state(layout, seed, dtype)["weights"]
    products, traffic = Products(), Traffic()
    with ExitStack() as watching:
        if dtype == torch.bfloat16:
            watching.enter_context(products)
            watching.enter_context(traffic)
        batch = bits.data_of(seed)[: finished.B]
        loss, grads = lab.gradients(batch, weights, layout, 5, seed)
    return loss, grads, products.calls, traffic


@lru_cache(4)
def on_one_rank(lab, dtype, seed):
    """What watched_gradients() gives on one rank, which each layout is compared with."""
    return watched_gradients(lab, bits.one_rank(), dtype, seed)


def gradients(group, seed):
    batch = bits.data_of(seed)[: finished.B]

    def see(layout, dtype, lab, eye):
        loss, grads, products, traffic = watched_gradients(lab, layout, dtype, seed)
        wanted, right, *_ = on_one_rank(finished, dtype, seed)
        eye.note("the loss has a graph", loss.requires_grad)
        most = 1e-4 if dtype == torch.float32 else 1e-3
        eye.note("the loss, but for rounding,", bits.about(loss, wanted, most))
        eye.note("the number of gradients", len(grads))
        for key, grad in grads.items():
            eye.note(f"the gradient of {key}, but for rounding,", bits.about(grad, right[key]))
        if not eye.goes_on():
            return  # bits of wrong values are not of interest
        eye.note("the number of messages", traffic.ops.get("send", [0])[0])
        eye.note("the number of bytes sent", traffic.bytes("send"))
        eye.note("the list of all collectives", sorted(traffic.ops))
        one, right, calls, _ = on_one_rank(lab, dtype, seed)
        bits.note_products(eye, products, calls)
        bits.note_bits(eye, {"the loss": loss} | grads, {"the loss": one} | right)

    def see_model(right, theirs, lab, eye):
        weights = finished.new_state(bits.one_rank(), seed, torch.float32)["weights"]
        with mock.patch.object(lab, "DROP", 0):
            loss, grads = lab.gradients(batch, weights, bits.one_rank(), 0, seed)
        eye.note("the loss, but for rounding,", bits.about(loss, right, 1e-4))
        for name, grad in bits.full_weights(grads).items():
            near = bits.about(grad, theirs[name], 1e-3)
            eye.note(f"the gradient of {name}, but for rounding,", near)

    P = group.size()
    for dtype in bits.DTYPES:
        for dp in [n for n in (1, 2, 4) if n <= P]:
            tp, rank = P // dp, group.rank()
            over_dp = subgroup(group, ranks=[*range(rank % tp, P, tp)])
            over_tp = subgroup(group, ranks=[*range(rank - rank % tp, rank - rank % tp + tp)])
            see_layout = partial(see, finished.Layout(over_dp, over_tp), dtype)
            sent = finished.cost(dp, tp, dtype.itemsize)[0] if dtype == torch.bfloat16 else 0
            yield f"dp {dp} x tp {tp}, {dtype}", see_layout, {"the number of bytes sent": sent}
    if P == 4:
        weights = finished.new_state(bits.one_rank(), seed, torch.float32)["weights"]
        right = bits.hugging_faces(weights, batch)
        yield "Hugging Face's, without dropout", partial(see_model, *right)


def resume(group, seed):
    whole = finished.new_state(bits.one_rank(), seed, torch.bfloat16) | {"step": 7}
    kinds = "weights", "mean", "square"
    for i, kind in enumerate(kinds[1:]):
        whole[kind] = {key: drawn(seed + i, *x.shape) for key, x in whole[kind].items()}
    layout = finished.Layout(bits.one_rank().dp, group)

    def part(blocks):
        """The state of a rank that has these blocks."""
        kept = [key for key in whole["weights"] if key[1] in (None, *blocks)]
        return {"step": 7} | {kind: {key: whole[kind][key] for key in kept} for kind in kinds}

    def see(old, lab, eye):
        with tempfile.TemporaryDirectory() as folder:
            size = finished.BLOCKS // old
            for rank in range(old):
                own = part(range(rank * size, (rank + 1) * size))
                torch.save(own, Path(folder) / f"{rank}.pt")  # as save() does
            state = lab.resume(Path(folder), layout)
        eye.note("the list of keys", sorted(state))
        eye.note("step", state["step"])
        for kind in kinds:
            eye.note(f"the number of {kind}", len(state[kind]))
            for key, x in state[kind].items():
                eye.note(f"{kind} of {key}", x)
        trained = all(x.requires_grad for x in state["weights"].values())
        eye.note("the weights require gradients", trained)

    for old in 1, 2, 4, 8:
        yield f"tp {group.size()} from tp {old}", partial(see, old)


def cost(group, seed):
    for dp, tp, itemsize in itertools.product([1, 2, 4], [1, 2, 4, 8], [4, 2, 8]):
        given = {"dp": dp, "tp": tp, "itemsize": itemsize}
        title = f"dp {dp} x tp {tp}, {itemsize} bytes a number"
        yield title, ("cost", given, "the bytes, the products")


VALUES = "dropout", "mlp", "loss", "gradients"  # whose mistakes are alike but for rounding
EXERCISES = {each.__name__: (each, 1) for each in (initial, dropout, batch_at, tree_sum)}
EXERCISES |= {each.__name__: (each, 4, GROUPS) for each in (doubling, halving, edges, mlp, loss)}
EXERCISES |= {"gradients": (gradients, 4, GROUPS[:2]), "resume": (resume, 4, GROUPS)}
EXERCISES |= {"cost": (cost, 1)}
CHECKS, BUGS = {}, []
for name, exercise in EXERCISES.items():
    found, bugs = checks({name: exercise}, finished, 1e-5 if name in VALUES else 0)
    CHECKS |= found
    BUGS += bugs
