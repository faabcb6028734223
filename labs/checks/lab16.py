"""Lab 16's checks, each of which runs on every rank, and the bugs that they have to catch.

Sums are held against a tree of their own, to the bit. A model's values are held against plain
torch's and Hugging Face's; its bits against those of the same answers on one rank, and its products
against each other's: an answer may call another kernel than ours, but it has to be the same
call on any number of ranks. See bits.py.
"""

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from checks.bits import (
    DTYPES,
    ORDERS,
    Largest,
    Products,
    alone,
    as_alone,
    batch_mask,
    bits,
    data_of,
    drawn,
    drawn_order,
    finished,
    full_weights,
    groups,
    hugging_faces,
    layouts,
    mlp_case,
    near,
    one_by_one,
    own_part,
    same_calls,
    tree,
)
from checks.compare import tried
from checks.documents import Unchanged
from checks.tools import shared_folder
from harness import Traffic, expect

OF_BLOCK = "a product of each block for itself: a larger one adds up in another order"


def check_initial(lab, group, seed):
    for name in "layers.0.q", "layers.1.q", "layers.1.down", "layers.0.o", "embed", "layers.1.k":
        dim, (m, n) = finished.CUT[name.split(".")[-1]]
        index = torch.arange(m * n).view(m, n)
        full = (finished.uniform(seed, name, index) - 0.5) * finished.SPREAD
        shifted = finished.uniform(seed, name, index) * finished.SPREAD
        across = torch.arange(m * n).view(n, m).T
        across = (finished.uniform(seed, name, across) - 0.5) * finished.SPREAD
        for block, right in enumerate(full.chunk(finished.BLOCKS, dim)):
            with Largest() as largest:
                found = lab.initial(name, block, seed)
            local = torch.arange(right.numel()).view(right.shape)
            local = (finished.uniform(seed, name, local) - 0.5) * finished.SPREAD
            hints = {"the number in the full matrix, not in the block": local}
            hints["element (i, j) has the number i n + j"] = across.chunk(finished.BLOCKS, dim)[
                block
            ]
            hints["uniform() - 0.5, times SPREAD"] = shifted.chunk(finished.BLOCKS, dim)[block]
            hint = f"block {block} of dim {dim}: its own rows or columns"
            bits(f"{name}, block {block}", found, right, hints, hint)
            made = (
                f"{name}: a tensor of {largest.elements} numbers is made, {right.numel()} would do"
            )
            expect(largest.elements < m * n, made, "number the block's elements alone")
    return "every block as cut out of the full draw, which is never made"


def check_dropout(lab, group, seed):
    s, f = finished.S, 12
    for dtype in DTYPES:
        for sequence, step, first, layer, site in (
            (0, 0, 0, 0, "mlp"),
            (3, 7, 24, 1, "mlp"),
            (2, 1, 8, 1, "attention"),
        ):
            x = (1 + drawn(seed + step, s, f, spread=0).abs()).to(dtype).requires_grad_()

            def masked(name, step, sequence, first, layer):
                whole = batch_mask(seed, f"{name} {layer}", step)
                return whole[sequence * s : (sequence + 1) * s, first : first + f]

            kept = masked(site, step, sequence, first, layer)
            found = lab.dropout(x, site, first, layer, sequence, step, seed)
            told = f"{site} of layer {layer}, sequence {sequence}, step {step}, first {first}"
            expect(isinstance(found, torch.Tensor), f"{told}: no tensor")
            expect(found.dtype == dtype, f"{told}: {found.dtype}, not {dtype}", "as x's dtype")
            hints = {"features are counted from first": masked(site, step, sequence, 0, layer)}
            hints["tokens are counted through the batch"] = masked(site, step, 0, first, layer)
            hints["another mask in each step"] = masked(site, 0, sequence, first, layer)
            hints["another mask in each layer"] = masked(site, step, sequence, first, 0)
            hints["kept where the number is at least DROP"] = ~kept
            hints = {text: mask.float() for text, mask in hints.items()}
            bits(f"{told}: kept", (found != 0).float(), kept.float(), hints)
            right = x.detach() * kept / (1 - finished.DROP)
            hints = {"what is kept is times 1 / (1 - DROP)": x.detach() * kept}
            near(told, found, right, hints, tolerance=1e-6 if dtype == torch.float32 else 1e-2)
            [grad] = torch.autograd.grad(found.sum(), x)
            near(f"{told}: the gradient of x", grad, kept / (1 - finished.DROP), tolerance=1e-2)
    return "any block of features of any sequence: as cut out of the batch's mask"


def check_batch_at(lab, group, seed):
    for examples, size in (12, 4), (24, 4), (8, 8):
        lab.EXAMPLES, lab.B = examples, size
        each = examples // size
        for step in range(3 * each):
            epoch, place = divmod(step, each)
            start = place * size
            found = lab.batch_at(step, seed)
            right = torch.tensor(drawn_order(seed, epoch, examples)[start : start + size])
            wrong = {"another order in each epoch": drawn_order(seed, 0, examples)[start:]}
            wrong["ascending"] = drawn_order(seed, epoch, examples)[::-1][start:]
            hint = "an order for each epoch, not for each step"
            wrong[hint] = drawn_order(seed, step, examples)
            wrong["in a random order"] = [*range(start, start + size)]
            hints = {text: torch.tensor(numbers[:size]) for text, numbers in wrong.items()}
            hint = f"{each} steps are an epoch"
            bits(f"{examples} examples, step {step}", found, right, hints, hint)
    return "three epochs of several sizes: each sequence once, as drawn"


def check_tree_sum(lab, group, seed):
    for dtype in DTYPES:
        for count in 1, 2, 4, 8, 16:
            parts = [drawn(seed + i, 5, 7, dtype=dtype) for i in range(count)]
            with Unchanged(parts=parts):
                found = lab.tree_sum(tuple(parts))  # a tuple, as autograd gives
            hints = {text: order(parts) for text, order in ORDERS.items()}
            wide = tree([part.float() for part in parts]).to(dtype)
            hints["in the parts' dtype: each sum is rounded"] = wide
            bits(f"{count} parts, {dtype}", found, tree(parts), hints, "as in the picture above")
    return "1 to 16 parts, float32 and bfloat16: the tree's bits"


def check_reduce(name, sent):
    """The check of doubling() or halving(); sent(numbers, P): what it has to send."""

    def check(lab, group, seed):
        for dtype in DTYPES:
            for members, rank, P in groups():
                for shape in ((8, 3), (4,)) + (((5, 7), ()) if name == "doubling" else ()):
                    parts = [drawn(seed + 9 * i, *shape[::-1], dtype=dtype) for i in range(P)]
                    parts = [
                        part.mT if len(shape) == 2 else part for part in parts
                    ]  # not contiguous
                    with Traffic() as traffic, Unchanged(x=parts[rank]):
                        found = getattr(lab, name)(parts[rank], members)
                    told = f"{name} of {shape} on {P} ranks, {dtype}"
                    right, hints = tree(parts), {t: order(parts) for t, order in ORDERS.items()}
                    hints["all ranks have to add"] = parts[rank]
                    hint = (
                        "the peer at a distance is rank ^ distance: the one half of the pair, ..."
                    )
                    bits(told, found, right, hints, hint)
                    numbers, others = sent(parts[0].numel(), P), {*traffic.ops} - {"send"}
                    expect(not others, f"{told}: {', '.join(others)}", "exchange() is all it takes")
                    moved = traffic.bytes("send") // dtype.itemsize
                    found = f"{told}: {moved} numbers are sent, {numbers} would do"
                    hint = (
                        "doubling: log2(P) exchanges of x; halving: half as much at each distance"
                    )
                    expect(moved == numbers, found, hint)
        return (
            "1, 2 and 4 ranks, float32 and bfloat16: the tree's bits, and the bytes of the formula"
        )

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
            bits(
                f"Leave {told}",
                out,
                tree(parts),
                hints,
                "tree_sum() of own parts, then all_reduce()",
            )
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
        one, calls, right, undropped = mlp_case(lab, alone(lab), seed, dtype)
        hints = {"drop() between the two, of each block": undropped}
        hint = "down drop(silu(gate x) (up x)); drop's first is block WIDTH / BLOCKS"
        near(f"one rank, {dtype}: out", one["out"], right, hints, hint)
        for told, layout in layouts(lab, ((1, 2), (1, 4))):
            mine, others, *_ = mlp_case(lab, layout, seed, dtype)
            hint = "Leave sums over all ranks, block by block"
            near(f"{told}, {dtype}: out", mine["out"], right, hints, hint)
            same_calls(told, others, calls, OF_BLOCK)
            as_alone(f"{told}, {dtype}", mine, one, OF_BLOCK)
    return "1, 2 and 4 ranks, float32 and bfloat16: the same products, the same bits, both ways"


def check_loss(lab, group, seed):
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
                found = lab.token_losses(own, targets, layout)
                told = f"{told}, {dtype}, logits up to {logits.abs().max():.0f}"
                expect(isinstance(found, torch.Tensor), f"{told}: no tensor")
                hints = {"a target is in one block, and counts on no other one": right * 0}
                hint = "the logs of the sum over all blocks and ranks, less the target's logit"
                expect(
                    found.dtype == torch.float32, f"{told}: {found.dtype}", "in float32 at least"
                )
                near(told, found, right.detach(), hints, hint, 1e-5 if scale == 1 else 1e-4)
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
        keys = [*state["weights"]]
        both = isinstance(right, dict) and {*right} == {*keys}
        expect(both, "the second of the pair is no {key: gradient} with the keys of w")
        calls = products.calls
        wanted, theirs = finished.gradients(batch, state["weights"], one, 5, seed)
        hint = "dropout counts tokens through the batch: it needs the sequence's number, i"
        near(f"one rank, {dtype}: the loss", loss, wanted, None, hint, 1e-4)
        for key in keys:
            near(f"one rank, {dtype}: {key}'s gradient", right[key], theirs[key], None, hint)
        for told, layout in layouts(lab):
            w = finished.new_state(layout, seed, dtype)["weights"]
            with Products() as products:
                mine, grads = lab.gradients(batch, w, layout, 5, seed)
            hint = "own sequences, then tree_sum() of them and all_reduce() over layout.dp"
            same_calls(told, products.calls, calls, "one sequence at a time")
            as_alone(f"{told}, {dtype}", {"the loss": mine}, {"the loss": loss}, hint)
            as_alone(f"{told}, {dtype}", grads, right, hint)
    lab.DROP, state = 0, finished.new_state(one, seed, torch.float32)
    w = state["weights"]
    mine, grads = lab.gradients(batch, w, one, 0, seed)
    loss, theirs = hugging_faces(w, batch)
    hint = "the mean over the batch's targets is the sum of the sequences' parts"
    near("the loss, beside Hugging Face's", mine, loss, {"all sequences": loss / 4}, hint, 1e-4)
    for name, grad in full_weights(grads).items():
        near(f"{name}'s gradient, beside Hugging Face's", grad, theirs[name], None, hint, 1e-3)
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
                state = tried(told, "see new_state()", lab.resume, folder, layout)
                expect({*state} == {*right}, f"{told}: {[*state]}, not {[*right]}", "all four")
                expect(state["step"] == 7, f"{told}: step {state['step']}, not 7", "as saved")
                for kind in "weights", "mean", "square":
                    same = {*state[kind]} == {*right[kind]}
                    hint = "of each file the keys with a block of layout.blocks, or None"
                    counts = f"{len(state[kind])} {kind}, not {len(right[kind])}"
                    expect(same, f"{told}: {counts}", hint)
                    hint = f"{kind} of the same name and block"
                    as_alone(f"{told}, {kind}", state[kind], right[kind], hint)
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
            pair = isinstance(found, tuple) and len(found) == 2
            expect(pair, f"{told}: cost() is {found}", "(bytes, products)")
            sent, count = traffic.bytes("send"), len(products.calls)
            hint = (
                "halving sends 2 (P - 1) / P, doubling log2(P) times the tensor; see all_reduce()"
            )
            hint = "what enters and leaves, of each own sequence" if tp > 1 == dp else hint
            hint = "gradients are summed over dp, block by block" if dp > 1 == tp else hint
            expect(found[0] == sent, f"{told}, {dtype}: {found[0]} bytes, sent are {sent}", hint)
            hint = "of each own sequence and block: 7 linears and attention a layer, and the head"
            made = f"{told}: {found[1]} products, made are {count}"
            expect(found[1] == count, made, hint)
    for dp, tp in (1, 8), (2, 4), (4, 2):
        same = lab.cost(dp, tp, 4) == finished.cost(dp, tp, 4)
        expect(same, f"dp {dp} x tp {tp}: {lab.cost(dp, tp, 4)}", "for any number of ranks")
    return "six layouts, both dtypes: bytes and products as counted"


def log2_times(numbers, P):
    return numbers * int(math.log2(P))


def ring_like(numbers, P):
    return 2 * numbers * (P - 1) // P


CHECKS = {
    "initial": (check_initial, 1),
    "dropout": (check_dropout, 1),
    "batch_at": (check_batch_at, 1),
    "tree_sum": (check_tree_sum, 1),
    "doubling": (check_reduce("doubling", log2_times), 4),
    "halving": (check_reduce("halving", ring_like), 4),
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
