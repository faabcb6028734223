"""Which bugs lab 15's net "bits" sees: a program on 2 ranks, to the last bit as itself on one.

Only a program that gives the same bits without a bug can be judged so: lab 16's. A bug of
break_it.py is written into it where it has the place for that: tensor parallelism, and Ulysses'
sums of gradients as those of data parallelism. Its own bugs, of order and of random numbers, are
also held against one device as parity does it: float64, given weights, no dropout.
"""

import torch
import torch.distributed as dist

from labs.kit.compare import mistaken
from labs.kit.harness import LABS, load, on_ranks, relative_error
from labs.lab16_bits.bits import data_of, finished
from labs.lab16_bits.same_bits import SURE, all_groups, briefly, differing

SHAPES = (1, 2), (2, 1)  # dp, tp
EXACT = 1e-10
BUGS = {}  # {(script, name of the bug): function(lab, dp, tp), which changes the lab}


def bug_of(*scripts):
    """Enter a bug under the scripts whose bug of this name it is."""

    def enter(bug):
        BUGS.update({(f"{script}.py", bug.__name__): bug for script in scripts})
        return bug

    return enter


@bug_of("tp")
def missing_backward_all_reduce(lab, dp, tp):
    lab.Enter.backward = staticmethod(lambda ctx, *grads: (lab.tree_sum(grads), None, None))


@bug_of("tp")
def missing_forward_reduction(lab, dp, tp):
    def forward(ctx, group, *parts):
        ctx.count = len(parts)
        return lab.tree_sum(parts)

    lab.Leave.forward = staticmethod(forward)


@bug_of("tp")
def all_reduce_both_ways(lab, dp, tp):
    right = lab.Leave.forward

    def forward(ctx, group, *parts):
        ctx.group = group
        return right(ctx, group, *parts)

    def backward(ctx, grad):
        return None, *[lab.all_reduce(grad, ctx.group)] * ctx.count

    lab.Leave.forward, lab.Leave.backward = staticmethod(forward), staticmethod(backward)


@bug_of("tp")
def wrong_shard(lab, dp, tp):
    right = lab.initial

    def initial(name, block, seed):
        moved = lab.BLOCKS // tp if name == "layers.0.o" else 0
        return right(name, (block + moved) % lab.BLOCKS, seed)

    lab.initial = initial


@bug_of("tp")
def unmasked_embedding(lab, dp, tp):
    lab.embed = mistaken(lab.embed, (".masked_fill(elsewhere[:, None], 0)", ""))


@bug_of("tp")
def local_softmax(lab, dp, tp):
    lab.token_losses = mistaken(
        lab.token_losses, ("Leave.apply(layout.tp, *sums)", "tree_sum(sums)")
    )


@bug_of("sp_ulysses")
def missing_gradient_sum(lab, dp, tp):
    ours = "all_reduce(tree_sum(parts), layout.dp)"
    lab.gradients = mistaken(lab.gradients, (ours, "tree_sum(parts)"))


@bug_of("tp", "sp_ulysses")
def loss_by_local_count(lab, dp, tp):
    right = lab.sequence_loss

    def sequence_loss(ids, w, layout, *where):
        start, end = (
            n * lab.VOCAB // lab.BLOCKS for n in (layout.blocks[0], layout.blocks[-1] + 1)
        )
        own = ((ids[1:] >= start) & (ids[1:] < end)).sum() if tp > 1 else len(ids) - 1
        own = own * len(layout.sequences) / lab.B
        return right(ids, w, layout, *where) * (len(ids) - 1) / own

    lab.sequence_loss = sequence_loss


@bug_of("tp", "sp_ulysses")
def no_op_parallelize(lab, dp, tp):
    lab.own, lab.all_reduce = lambda n, group: range(n), lambda x, group: x


def changed(change, dp, tp):
    """The finished lab as a new module, with a change."""
    lab = load(LABS / "lab16_bits" / "lesson.py")
    change(lab, dp, tp)
    return lab


def given(lab, layout, seed):
    """{key: gradient} of a step in float64 from given weights, without dropout."""
    lab.initial, lab.dropout = finished.initial, lambda x, *_, **__: x
    w = lab.new_state(layout, seed, torch.float64)["weights"]
    return lab.gradients(data_of(seed, lab.B), w, layout, 0, seed)[1]


def judged_on_rank(group, seed):
    """{(script, bug): the nets that see it} on this rank: bits, and for lab 16's own parity."""
    groups, found = all_groups(group, SHAPES), {}
    single = [dist.new_group([rank]) for rank in range(group.size())][group.rank()]
    own = {("lab16", change.__name__): change for change in SURE}
    for key, change in (BUGS | own).items():
        row = found[key] = set()
        for dp, tp in SHAPES:
            if change.__name__ in ONLY and (dp, tp) != ONLY[change.__name__][key[0]]:
                continue
            several, one = changed(change, dp, tp), changed(change, 1, 1)
            layouts = several.Layout(*groups[dp, tp]), one.Layout(single, single)
            data = data_of(seed)
            pair = [briefly(lab, at, data, seed) for lab, at in zip((several, one), layouts)]
            if any(differing(pair[0][what], pair[1][what])[0] for what in pair[1]):
                row.add("bits")
            if key in own:
                mine, right = given(several, layouts[0], seed), given(finished, layouts[1], seed)
                if max(relative_error(x, right[k]) for k, x in mine.items()) > EXACT:
                    row.add("parity")
            dist.barrier(group)
    return found


ONLY = {  # a bug that two scripts have, here each in its own way of sharing
    name: {"tp.py": (1, 2), "sp_ulysses.py": (2, 1)}
    for name in ("loss_by_local_count", "no_op_parallelize")
}
JUDGED = {*BUGS, *(("lab16", change.__name__) for change in SURE)}


def judge(seed):
    """{script or lab16: {bug: the nets, of bits and parity, that see it on any of 2 ranks}}."""
    found = {}
    ranks = on_ranks(2, judged_on_rank, seed, timeout=300)
    for script, bug in ranks[0]:
        seen = set.union(*(rank[script, bug] for rank in ranks))
        found.setdefault(script, {})[bug] = [net for net in ("parity", "bits") if net in seen]
    return found
