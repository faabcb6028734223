"""Lab 16's checks, each of which runs on every rank, and the bugs that they have to catch.

Sums are held against a tree of their own, to the bit. A model's values are held against plain
torch's and Hugging Face's; its bits against those of the same answers on one rank, and its products
against each other's: an answer may call another kernel than ours, but it has to be the same
call on any number of ranks. See bits.py.
"""

import itertools
from operator import itemgetter

import torch
import torch.distributed as dist
import torch.nn.functional as F

from labs.kit.compare import tried, unchanged
from labs.kit.harness import Traffic, Wrong, expect
from labs.kit.tools import Products, shared_folder
from labs.kit.usual import section, usual_hint, usual_results
from labs.lab16_bits.bits import (
    DTYPES,
    MISTAKES,
    ORDERS,
    Largest,
    alone,
    as_alone,
    batch_mask,
    beside_hugging_face,
    bits,
    coarse,
    data_of,
    drawn,
    drawn_order,
    finished,
    groups,
    layouts,
    mlp_case,
    near,
    one_by_one,
    own_part,
    same_calls,
    tree,
)

OF_BLOCK = "a product of each block for itself: a larger one adds up in another order"


def check_initial(lab, group, seed):
    for name in "layers.0.q", "layers.1.q", "layers.1.down", "layers.0.o", "embed", "layers.1.k":
        dim, (m, n) = finished.CUT[name.split(".")[-1]]
        full = finished.uniform(seed, name, torch.arange(m * n).view(m, n))
        full = (full - 0.5) * finished.SPREAD
        for block, right in enumerate(full.chunk(finished.BLOCKS, dim)):
            args = name, block, seed
            with Largest() as largest:
                found = lab.initial(*args)
            usual = MISTAKES, finished.initial, args
            bits(f"{name}, block {block}", found, right, usual=usual)
            made = f"a tensor of {largest.elements} numbers is made: make {right.numel()}"
            hint = "number the block's elements alone"
            expect(largest.elements < m * n, f"{name}: {made}", hint)
    return "every block as cut out of the full draw, which is never made"


def check_dropout(lab, group, seed):
    f = 12
    cases = (0, 0, 0, 0, "mlp", 8), (3, 7, 24, 1, "mlp", 8), (2, 1, 8, 1, "attention", 5)
    for dtype, case in itertools.product(DTYPES, cases):
        sequence, step, first, layer, site, s = case
        x = (1 + drawn(seed + step, s, f, spread=0).abs()).to(dtype).requires_grad_()
        start = sequence * finished.S
        kept = batch_mask(seed, f"{site} {layer}", step)[start : start + s, first : first + f]
        args = x, site, first, layer, sequence, step, seed
        told = f"{site} of layer {layer}, sequence {sequence}, step {step}, first {first}"
        usual = MISTAKES, finished.dropout, args
        with unchanged(x=x):
            found = tried(told, section(*usual[:2])[-1], lab.dropout, *args)
        expect(isinstance(found, torch.Tensor), f"{told}: no tensor", "return it")
        expect(found.dtype == dtype, f"{told}: {found.dtype}, not {dtype}", "as x's dtype")
        most = 1e-6 if dtype == torch.float32 else 1e-2
        right = x.detach() * kept / (1 - finished.DROP)
        near(told, found, right, tolerance=most, usual=usual)
        hint = "x times the mask: nothing is detached"
        [grad] = tried(f"{told}: the backward", hint, torch.autograd.grad, found.sum(), x)
        near(f"{told}: the gradient of x", grad, kept / (1 - finished.DROP), hint, 1e-2)
    return "any block of features of any sequence: as cut out of the batch's mask"


def check_batch_at(lab, group, seed):
    fine = finished.uniform
    for examples, size, uniform in (12, 4, fine), (24, 4, fine), (8, 8, fine), (96, 32, coarse):
        for module in lab, finished:
            module.EXAMPLES, module.B, module.uniform = examples, size, uniform
        each = examples // size
        for step in range(3 * each):
            epoch, place = divmod(step, each)
            right = drawn_order(uniform, seed, epoch, examples)[place * size : (place + 1) * size]
            what, usual = f"{examples} examples, step {step}", (MISTAKES, finished.batch_at)
            found = lab.batch_at(step, seed)
            bits(what, found, torch.tensor(right), usual=(*usual, (step, seed)))
    return "three epochs of several sizes: each sequence once, as drawn"


def check_tree_sum(lab, group, seed):
    for dtype in DTYPES:
        for count in 1, 2, 4, 8, 16:
            parts = [drawn(seed + i, 5, 7, dtype=dtype) for i in range(count)]
            with unchanged(parts=parts):
                hint = "1, 2, 4, 8, ... parts, in a list or, as autograd gives them, a tuple"
                found = tried(f"{count} parts", hint, lab.tree_sum, tuple(parts))
            hints = {text: order(parts) for text, order in ORDERS.items()}
            wide = tree([part.float() for part in parts]).to(dtype)
            hints["in the parts' dtype: each sum is rounded"] = wide
            hint = "neighbours first, as in the picture above"
            bits(f"{count} parts, {dtype}", found, tree(parts), hints, hint)
    return "1 to 16 parts, float32 and bfloat16: the tree's bits"


def watch_exchange(lab):
    """Hold the peers of lab.exchange() against those that are put into the list returned."""
    peers, exchange = [], lab.exchange

    def noting(x, peer, group):
        right = peers.pop(0) if peers else "none"
        found = f"exchange() with rank {peer}, and here it is {right}"
        hint = "at each distance d with rank ^ d: 1, 2, .. below P"
        hint += "; halving goes back from the largest to 1"
        expect(peer == right, f"rank {group.rank()} of {group.size()}: {found}", hint)
        return exchange(x, peer, group)

    lab.exchange = noting
    return peers


def check_reduce(name):
    """The check of doubling() or halving()."""
    twice, function = name == "halving", getattr(finished, name)

    def check(lab, group, seed):
        peers = watch_exchange(lab)
        shapes = ((8, 3), (4,)) if twice else ((8, 3), (4,), (5, 7), ())
        cases = itertools.product(DTYPES, groups(), shapes)
        for dtype, (members, rank, P), shape in cases:
            parts = [drawn(seed + 9 * i, *shape[::-1], dtype=dtype) for i in range(P)]
            parts = [part.mT if len(shape) == 2 else part for part in parts]  # not contiguous
            hints = usual_results(MISTAKES, function, (parts[rank], members))
            hints = dict(hints) | {text: order(parts) for text, order in ORDERS.items()}
            distances = [2**i for i in range(P.bit_length() - 1)]
            peers[:] = [rank ^ d for d in distances + distances[::-1] * twice]
            told = f"{name} of {shape} on {P} ranks, {dtype}"
            hint = section(MISTAKES, function)[-1]
            with Traffic() as traffic, unchanged(x=parts[rank]):
                found = tried(told, hint, getattr(lab, name), parts[rank], members)
            others = ", ".join({*traffic.ops} - {"send"})
            expect(not others, f"{told}: {others}", "exchange() is all it takes")
            bits(told, found, tree(parts), hints, hint)
            numbers = parts[0].numel()
            numbers = 2 * numbers * (P - 1) // P if twice else numbers * len(distances)
            moved = traffic.bytes("send") // dtype.itemsize
            hint = "doubling: log2(P) exchanges of x; halving: half as much at each distance"
            expect(moved == numbers, f"{told}: {moved} numbers are sent: send {numbers}", hint)
        return "1, 2 and 4 ranks, float32 and bfloat16: the tree's bits, and the formula's bytes"

    return check


def check_edges(lab, group, seed):
    for dtype in DTYPES:
        for members, rank, P in groups():
            count, told = finished.BLOCKS // P, f"on {P} ranks, {dtype}"
            own = slice(rank * count, (rank + 1) * count)
            parts = [drawn(seed + i, 4, 6, dtype=dtype) for i in range(finished.BLOCKS)]
            dy = drawn(seed + 99, 4, 6, dtype=dtype)
            leaves = [part.clone().requires_grad_() for part in parts[own]]
            out = lab.Leave.apply(members, *leaves)
            each = [one_by_one(parts[i : i + count]) for i in range(0, finished.BLOCKS, count)]
            hints = {"the sums of all ranks, too": tree(parts[own])}
            hints["own parts by tree_sum(), too"] = tree(each)
            hints |= {text: order(parts) for text, order in ORDERS.items()}
            hint = "tree_sum() of own parts, then all_reduce()"
            bits(f"Leave {told}", out, tree(parts), hints, hint)
            hint = "y is the sum of all parts: the gradient of each is dy, on every rank"
            grads = tried(f"Leave's backward {told}", hint, torch.autograd.grad, out, leaves, dy)
            for grad in grads:
                bits(f"Leave's gradient {told}", grad, dy, {"nothing is summed": P * dy}, hint)
            x = drawn(seed, 4, 6, dtype=dtype).requires_grad_()
            outs = lab.Enter.apply(x, count, members)
            hint = "x goes to all blocks: tree_sum() of own gradients, then all_reduce()"
            what = f"Enter's backward {told}"
            [grad] = tried(what, hint, torch.autograd.grad, outs, x, parts[own])
            bits(f"Enter's gradient {told}", grad, tree(parts), hints, hint)
    return "f and g on 1, 2 and 4 ranks: the tree over all 8 blocks, either way"


def check_mlp(lab, group, seed):
    for dtype in DTYPES:
        one, calls, right = mlp_case(lab, alone(lab), seed, dtype)
        hint = "part() of every own block, and Leave sums them over all ranks: layout.tp"
        near(f"one rank, {dtype}: out", one["out"], right, hint)
        for told, layout in layouts(lab, ((1, 2), (1, 4))):
            mine, others, _ = mlp_case(lab, layout, seed, dtype)
            near(f"{told}, {dtype}: out", mine["out"], right, hint)
            same_calls(told, others, calls, OF_BLOCK)
            as_alone(f"{told}, {dtype}", {"out": mine["out"]}, one, OF_BLOCK)
            enter = "Enter in front gives each own block its x, and adds their gradients as a tree"
            as_alone(f"{told}, {dtype}", mine, one, enter)
    return "1, 2 and 4 ranks, float32 and bfloat16: the same products, the same bits, both ways"


def check_loss(lab, group, seed):
    single = alone(finished)
    for dtype in DTYPES:
        for scale in 1, 100:
            logits = (scale * drawn(seed, 6, finished.VOCAB, spread=0)).to(dtype)
            targets = torch.tensor([0, 7, 8, 31, 63, 40])
            wide = logits.float().requires_grad_()
            right = F.cross_entropy(wide, targets, reduction="none")
            [slope] = torch.autograd.grad(right.sum(), wide)
            results = {}
            for told, layout in [("one rank", alone(lab)), *layouts(lab, ((1, 2), (1, 4)))]:
                parts = logits.chunk(finished.BLOCKS, 1)
                own = [parts[b].clone().requires_grad_() for b in layout.blocks]
                told = f"{told}, {dtype}, logits up to {logits.abs().max():.0f}"
                hint = "one number a token: sums are over the block's logits"
                found = tried(told, hint, lab.token_losses, own, targets, layout)
                expect(isinstance(found, torch.Tensor), f"{told}: no tensor")
                wide = found.dtype == torch.float32
                expect(wide, f"{told}: {found.dtype}", "in float32 at least")
                usual = MISTAKES, finished.token_losses, (parts, targets, single)
                near(told, found, right.detach(), "", 1e-5 if scale == 1 else 1e-4, usual)
                grads = torch.autograd.grad(found.sum(), own)
                blocks = slope.chunk(finished.BLOCKS, 1)
                for block, grad in zip(layout.blocks, grads):
                    results.setdefault(f"the gradient of block {block}", []).append(grad)
                    apart = (grad.float() - blocks[block]).abs().max().item()
                    off = f"{told}: the gradient of block {block} is off by {apart:.1e}"
                    expect(apart < 1e-2, off, "Leave's backward gives each block the gradient")
                results.setdefault("the losses", []).append(found.detach())
            hint = "each block's own sum, then Leave: the tree's"
            for what, (first, *others) in results.items():
                for other in others:
                    bits(f"{dtype}: {what} on several ranks", other, first, hint=hint)
    return "1, 2 and 4 ranks, float32 and bfloat16, large logits: cross entropy, and the same bits"


def check_gradients(lab, group, seed):
    data, one = data_of(seed), alone(lab)
    for dtype in DTYPES:
        state = finished.new_state(one, seed, dtype)
        batch = data[: finished.B]
        with Products() as products:
            loss, right = lab.gradients(batch, state["weights"], one, 5, seed)
        keys, calls = [*state["weights"]], products.calls
        both = isinstance(right, dict) and {*right} == {*keys}
        expect(both, "the second of the pair is no {key: gradient} with the keys of w")
        hint = "loss.detach(): else its whole graph stays"
        expect(not loss.requires_grad, "the loss still has its graph", hint)
        args = batch, state["weights"], one, 5, seed
        wanted, theirs = finished.gradients(*args)
        usual = MISTAKES, finished.gradients, args, itemgetter(0)
        rule = section(MISTAKES, finished.gradients)[-1]
        near(f"one rank, {dtype}: the loss", loss, wanted, "", 1e-4, usual)
        for key in keys:
            near(f"one rank, {dtype}: {key}'s gradient", right[key], theirs[key], rule)
        for told, layout in layouts(lab):
            w = finished.new_state(layout, seed, dtype)["weights"]
            with Products() as products, Traffic() as traffic:
                mine, grads = lab.gradients(batch, w, layout, 5, seed)
            same_calls(told, products.calls, calls, "one sequence at a time")
            divided = "the sequences' parts add up to the mean: nothing is to be divided"
            times = [(divided, 1 / layout.dp.size())]
            both = {"the loss": mine} | grads, {"the loss": loss} | right
            as_alone(f"{told}, {dtype}", *both, rule, times)
            with Traffic() as least:
                finished.gradients(batch, w, layout, 5, seed)
            found = f"{told}: messages {traffic.ops}, not {least.ops}"
            hint = "by this lab's all_reduce(): one message for all gradients, one for the loss"
            expect(traffic.ops == least.ops, found, hint)
    beside_hugging_face(lab, batch, one, seed)
    return "five layouts of 2 and 4 ranks as one rank, to the bit; one rank as Hugging Face's"


def check_resume(lab, group, seed):
    shapes, one = ((1, 1), (2, 1), (1, 2), (2, 2), (1, 4)), alone(lab)
    whole = finished.new_state(one, seed, torch.bfloat16)
    for i, kind in enumerate(("mean", "square")):
        whole[kind] = {key: drawn(seed + i, *x.shape) for key, x in whole[kind].items()}
    whole["step"] = 7
    given = [(told, layout) for told, layout in layouts(lab, shapes)]
    for old in shapes:
        with shared_folder(group) as folder:
            for _, layout in given:
                if (layout.dp.size(), layout.tp.size()) == old:
                    finished.save(own_part(whole, layout), layout, folder)
            dist.barrier(group)
            for told, layout in given:
                told, right = f"{told} from dp {old[0]} x tp {old[1]}", own_part(whole, layout)
                hint = "other ranks may have written: blocks are in any of the files"
                state = tried(told, hint, lab.resume, folder, layout)
                expect({*state} == {*right}, f"{told}: {[*state]}, not {[*right]}", "all four")
                expect(state["step"] == 7, f"{told}: step {state['step']}, not 7", "as saved")
                for kind in "weights", "mean", "square":
                    same = {*state[kind]} == {*right[kind]}
                    hint = "of each file the keys with a block of layout.blocks, or None"
                    counts = f"{len(state[kind])} {kind}, not {len(right[kind])}"
                    expect(same, f"{told}: {counts}", hint)
                    hint = f"{kind} of the same name and block"
                    as_alone(f"{told}, {kind}", state[kind], right[kind], hint)
                trained = all(x.requires_grad for x in state["weights"].values())
                expect(trained, f"{told}: weights require no gradient", "as they are in the file")
            dist.barrier(group)
    return "from any of five layouts to any other: weights, mean, square and step, to the bit"


def check_cost(lab, group, seed):
    data = data_of(seed)
    for dtype in DTYPES:
        for told, layout in [("one rank", alone(lab)), *layouts(lab)]:
            state = finished.new_state(layout, seed, dtype)
            with Traffic() as traffic, Products() as products:
                finished.train(state, data, 1, layout, seed)
            dp, tp = layout.dp.size(), layout.tp.size()
            found = lab.cost(dp, tp, dtype.itemsize)
            right = traffic.bytes("send"), len(products.calls)
            expect_cost(f"{told}, {dtype}", found, right, (dp, tp, dtype.itemsize))
    for args in (1, 8, 4), (2, 4, 2), (4, 2, 8):
        told = f"dp {args[0]} x tp {args[1]}, {args[2]} bytes a number"
        expect_cost(told, lab.cost(*args), finished.cost(*args), args)
    return "six layouts, both dtypes: bytes and products as counted"


def expect_cost(told, found, right, args):
    """Raise Wrong unless cost() has given the right (bytes, products)."""
    pair = isinstance(found, tuple | list) and len(found) == 2
    expect(pair, f"{told}: cost() is {found}", "(bytes, products)")
    for part, what in enumerate(("bytes are sent", "products are made")):
        if found[part] != right[part]:
            hint = usual_hint(MISTAKES, finished.cost, args, found[part], part)
            raise Wrong(f"{told}: {right[part]} {what}, not {found[part]}", hint)


CHECKS = {
    "initial": (check_initial, 1),
    "dropout": (check_dropout, 1),
    "batch_at": (check_batch_at, 1),
    "tree_sum": (check_tree_sum, 1),
    "doubling": (check_reduce("doubling"), 4),
    "halving": (check_reduce("halving"), 4),
    "edges": (check_edges, 4),
    "mlp": (check_mlp, 4),
    "loss": (check_loss, 4),
    "gradients": (check_gradients, 4),
    "resume": (check_resume, 4),
    "cost": (check_cost, 4),
}


# Bugs for --inject-bug: the checks have to catch every one


def initial_of_the_shard(lab):
    """Each rank numbers the elements of its own shard: all shards are equal."""
    right = lab.initial
    lab.initial = lambda name, block, seed: right(name, 0, seed)


def dropout_of_the_rank(lab):
    """Each rank numbers its own features from 0: the ranks' masks are equal."""
    right = lab.dropout

    def dropout(x, site, first, *args, **where):
        return right(x, site, 0, *args, **where)

    lab.dropout = dropout


def sums_in_any_order(lab):
    """A rank adds its own blocks from left to right, whatever the tree's order is."""
    lab.tree_sum = one_by_one


BUGS = [initial_of_the_shard, dropout_of_the_rank, sums_in_any_order]
