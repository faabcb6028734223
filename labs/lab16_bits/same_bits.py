"""Lab 16's program run in every layout, and broken in every way: what runs on the ranks.

Ranks 0 to P - 1 of a job of 8 take part in a layout of P; one rank's results are written to a
folder, and every rank compares what it has with them.
"""

import copy
import random
import statistics
import time

import torch
import torch.distributed as dist

from labs.kit.harness import Traffic
from labs.kit.tools import Products, shared_folder
from labs.lab16_bits.bits import data_of, one_by_one
from labs.lab16_bits.divergence import library, log_probabilities, plain

STEPS, SAVED = 3, 2  # a run's steps; after how many it is saved, in the middle of an epoch
LAYOUTS = (1, 1), (1, 2), (2, 1), (2, 2), (1, 4), (4, 1), (1, 8), (2, 4), (4, 2)  # dp, tp
FEW = (1, 1), (1, 2), (2, 1), (1, 8)  # where something is broken
KINDS = "weights", "mean", "square"


def possible(ranks):
    """The layouts of at most so many ranks."""
    return [(dp, tp) for dp, tp in LAYOUTS if dp * tp <= ranks]


def all_groups(group, shapes):
    """{(dp, tp): this rank's groups (dp, tp)}, tp innermost; None where it takes no part."""
    found, rank = {}, group.rank()
    for dp, tp in shapes:
        over_dp = [dist.new_group([*range(i, dp * tp, tp)]) for i in range(tp)]
        over_tp = [dist.new_group([*range(i * tp, (i + 1) * tp)]) for i in range(dp)]
        inside = rank < dp * tp
        found[dp, tp] = (over_dp[rank % tp], over_tp[rank // tp]) if inside else None
    return found


def kept(state):
    """Copies of what a state holds, {(kind, key): tensor}."""
    return {(kind, key): x.detach().clone() for kind in KINDS for key, x in state[kind].items()}


def logits_of(lab, layout, state, data, seed):
    """{(sequence, block): logits} of the first step's batch, with its dropout."""
    batch, found = data[lab.batch_at(0, seed)], {}
    with torch.no_grad():
        for i in layout.sequences:
            logits = lab.forward(batch[i], state["weights"], layout, i, 0, seed)
            found |= {(i, block): x for block, x in zip(layout.blocks, logits)}
    return found


def watched(lab, layout, data, seed, dtype):
    """(state after STEPS, the one to be saved, {what: {key: tensor}}) of a run in a layout."""
    state = lab.new_state(layout, seed, dtype)
    seen = {"weights at first": kept(state)}
    seen["logits"] = logits_of(lab, layout, state, data, seed)
    steps = lab.train(state, data, SAVED, layout, seed)
    middle = copy.deepcopy(state)
    steps += lab.train(state, data, STEPS - SAVED, layout, seed)
    seen["loss"] = {i: loss for i, (loss, _) in enumerate(steps)}
    seen["gradients"] = {(i, k): g for i, (_, grads) in enumerate(steps) for k, g in grads.items()}
    seen[f"weights after {STEPS} steps"] = kept(state)
    return middle, seen


def differing(mine, right):
    """(how many numbers differ, of how many, the largest difference beside the largest number)."""
    count, total, most, largest = 0, 0, 0.0, 1e-30
    for key, x in mine.items():
        same = x.shape == right[key].shape and x.dtype == right[key].dtype
        apart = (x.double() - right[key].double()).abs() if same else torch.full(x.shape, torch.inf)
        count += int((apart != 0).sum())
        total += x.numel()
        most, largest = max(most, apart.max().item()), max(largest, right[key].abs().max().item())
    return count, total, most / largest


def proof(group, groups, lab, seed):
    """[(dtype, dp, tp, what, numbers that differ, of how many)] of this rank."""
    data, found = data_of(seed), []
    for dtype in torch.float32, torch.bfloat16:
        with shared_folder(group) as folder:
            before = None
            for dp, tp in [*groups, (1, 1)]:  # the last resumes what the largest has saved
                own = folder / f"{dp}x{tp}"
                if groups[dp, tp]:
                    layout = lab.Layout(*groups[dp, tp])
                    middle, seen = watched(lab, layout, data, seed, dtype)
                    if before is None:
                        torch.save(seen, folder / "one_rank")
                        own.mkdir()
                    right = torch.load(folder / "one_rank", weights_only=True)
                    if before is not None:
                        state = lab.resume(before, layout)
                        lab.train(state, data, STEPS - state["step"], layout, seed)
                        seen["weights after a resume"] = kept(state)
                        right["weights after a resume"] = right[f"weights after {STEPS} steps"]
                        own.mkdir(exist_ok=True)
                    for what, mine in seen.items():
                        count, total, _ = differing(mine, right[what])
                        name = str(dtype).removeprefix("torch.")
                        found.append((name, dp, tp, what, count, total))
                    lab.save(middle, layout, own)
                dist.barrier(group)
                before = own
    return found


def costs(group, groups, lab, seed):
    """[(dp, tp, bytes sent, products, kinds of products)] of this rank, a step in float32."""
    data, found = data_of(seed), []
    for dp, tp in groups:
        if groups[dp, tp]:
            layout = lab.Layout(*groups[dp, tp])
            state = lab.new_state(layout, seed, torch.float32)
            with Traffic() as traffic, Products() as products:
                lab.train(state, data, 1, layout, seed)
            kinds = sorted({*products.calls})
            found.append((dp, tp, traffic.bytes("send"), len(products.calls), kinds))
        dist.barrier(group)
    return found


def seconds(group, groups, lab, seed):
    """{blocks: processor seconds of a step on one rank, the median of 5}."""
    found, right = {}, lab.BLOCKS
    for blocks in (right, 1) if group.rank() == 0 else ():
        lab.BLOCKS, times = blocks, []
        layout = lab.Layout(*groups[1, 1])
        state = lab.new_state(layout, seed, torch.float32)
        for _ in range(5):
            start = time.process_time()
            lab.train(state, data_of(seed), 1, layout, seed)
            times.append(time.process_time() - start)
        found[blocks] = statistics.median(times)
    lab.BLOCKS = right
    dist.barrier(group)
    return found


# ---- Broken on purpose ---------------------------------------------------------------------------


def library_all_reduce(lab, dp, tp):
    """blocks as they are, the library's all-reduce"""
    lab.all_reduce = library


def left_to_right(lab, dp, tp):
    """a rank adds its own blocks from left to right"""
    lab.tree_sum = one_by_one


def as_they_come(lab, dp, tp):
    """a rank adds its own blocks as they come, another order each time (atomics)"""
    lab.tree_sum = lambda parts: one_by_one(random.sample(parts, len(parts)))


def whole_batch(lab, dp, tp):
    """one backward for all of a rank's sequences: autograd adds up"""

    def gradients(batch, w, layout, step, seed):
        losses = [lab.sequence_loss(batch[i], w, layout, i, step, seed) for i in layout.sequences]
        grads = torch.autograd.grad(sum(losses), list(w.values()))
        loss = lab.all_reduce(lab.tree_sum([loss.detach() for loss in losses]), layout.dp)
        return loss, {key: lab.all_reduce(grad, layout.dp) for key, grad in zip(w, grads)}

    lab.gradients = gradients


def dropout_of_generators(lab, dp, tp):
    """dropout by a generator, seeded alike on every rank"""
    numbers = torch.Generator().manual_seed(1)

    def dropout(x, *_, **__):
        kept = torch.rand(x.shape, generator=numbers) >= lab.DROP
        return x * (kept / (1 - lab.DROP)).to(x.dtype)

    lab.dropout = dropout


def shards_of_generators(lab, dp, tp):
    """initial shards by a generator, seeded with the rank"""

    numbers = torch.Generator().manual_seed(dist.get_rank() % tp)

    def initial(name, block, seed):
        dim, shape = lab.CUT[name.split(".")[-1]]
        shape = [n // lab.BLOCKS if i == dim else n for i, n in enumerate(shape)]
        return (torch.rand(shape, generator=numbers) - 0.5) * lab.SPREAD

    lab.initial = initial


BREAKS = plain, library_all_reduce, left_to_right, as_they_come, whole_batch
BREAKS += dropout_of_generators, shards_of_generators
SURE = BREAKS[2:]  # on any machine; of the others nothing is known about the kernels' orders


def briefly(lab, layout, data, seed):
    """{what: {key: tensor}} of one step in float32."""
    state = lab.new_state(layout, seed, torch.float32)
    seen = {"weights at first": kept(state), "logits": logits_of(lab, layout, state, data, seed)}
    _, grads = lab.train(state, data, 1, layout, seed)[0]
    return seen | {"gradients": {(0, key): grad for key, grad in grads.items()}}


def shards(lab, seen):
    """{(what, name, dim): this rank's shard} of {(what, (name, block)): block}; of logits, too."""
    parts = {}
    for (what, key), x in seen.items():
        name, block = key if isinstance(key, tuple) else ("logits", key)
        dim = 1 if name == "logits" else lab.CUT[name.split(".")[-1]][0]
        parts.setdefault((what, name, dim), []).append(x.detach())
    return {key: torch.cat(blocks, key[2] or 0) for key, blocks in parts.items()}


def broken(group, groups, lab, seed):
    """[(break, dp, tp, what, differ, of, relative size)] beside the same break on one rank."""
    data, found, right = data_of(seed), [], dict(vars(lab))
    for change in BREAKS:
        with shared_folder(group) as folder:
            for dp, tp in [(1, 1), *groups]:
                if groups[dp, tp]:
                    change(lab, dp, tp)
                    layout, one = lab.Layout(*groups[dp, tp]), folder / "one_rank"
                    seen = briefly(lab, layout, data, seed)
                    seen = {what: shards(lab, mine) for what, mine in seen.items()}
                    vars(lab).update(right)
                    if not one.exists():
                        torch.save(seen, one)
                    for what, full in torch.load(one, weights_only=True).items():
                        cut = {key: part_of(x, key[2], layout.tp) for key, x in full.items()}
                        counts = differing(seen[what], cut)
                        found.append((change.__name__, dp, tp, what, *counts))
                dist.barrier(group)
    return found


def part_of(x, dim, group):
    """A rank's part of a full tensor that is cut along dim; None: all of it."""
    return x if dim is None else x.chunk(group.size(), dim)[group.rank()]


def everything(group, lab, seed, ranks):
    """{what: its results on this rank}."""
    groups = all_groups(group, possible(ranks))
    found = {"proof": proof(group, groups, lab, seed), "costs": costs(group, groups, lab, seed)}
    found["seconds"] = seconds(group, groups, lab, seed)
    few = {shape: groups[shape] for shape in groups if shape in FEW}
    found["broken"] = broken(group, few, lab, seed)
    found["log probabilities"] = log_probabilities(group, groups, lab, seed)
    return found
