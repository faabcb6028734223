"""Lab 12's exercises: their cases. mistakes.txt has the wrong answers.

In float64, so that nothing but a mistake is off by more than EXACT. What is right comes from
Hugging Face's own router, experts, block and balance loss, untouched, and beside these from the
finished lab.
"""

import math
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from labs.kit.alive import Alive, bytes_alive
from labs.kit.eye import Most
from labs.kit.harness import Traffic
from labs.kit.inputs import drawn
from labs.kit.judge import checks
from labs.kit.models import EXACT, Float64
from labs.kit.tools import gradients, noted_waits, subgroup
from labs.lab12_experts import lesson as finished  # not the learner's
from labs.lab12_experts.experts import a_case, model_errors, own_share, tiny

GROUPS = [1, 3], [0, 2, 3], [0, 1, 2, 3], [2]
shard_range = finished.shard_range


def some_choices(seed, n, k, count):
    """(weights (n, k), experts (n, k)): random, no expert twice for a token."""
    return drawn(seed, n, count).softmax(1).topk(k, 1)


def some_dropped(seed, n, k, count):
    """(weights (n, k), experts (n, k)), some choices dropped: all of the last token."""
    weights, experts = some_choices(seed, n, k, count)
    experts[-1:] = count
    return weights, experts.masked_fill(drawn(seed + 2, n, k) > 0.8, count)


# ---- On one rank ---------------------------------------------------------------------------------


def routing(group, seed):
    kinds = ("Qwen3-MoE", 1, False), ("Qwen3-MoE", 3, False), ("Qwen3-MoE", 2, True)
    for family, k, renormalise in (*kinds, ("Mixtral", 3, True), ("Mixtral", 1, True)):
        more = {"norm_topk_prob": renormalise} if family == "Qwen3-MoE" else {}
        gate = tiny(family, 7, k, seed, **more).model.layers[0].mlp.gate
        with Float64(), torch.no_grad():
            logits, weights, experts = gate(drawn(seed, 9, 16))
        logits.requires_grad_(not renormalise or k > 1)  # what is 1 has none but rounding
        given = {"logits": logits, "k": k, "renormalise": renormalise}
        title = f"{family}, {k} of 7 experts, renormalise={renormalise}"
        right = {"weights": weights, "experts": experts}
        yield title, ("route", given, "weights, experts"), right


def capacity(group, seed):
    sizes = (9, 2, 4, 3), (6, 1, 5, 1), (0, 2, 3, 1), (4, 2, 3, 9), (3, 2, 2, 3), (12, 3, 4, 4)
    for n, k, count, most in sizes:
        weights, experts = some_choices(seed, n, k, count)
        given = {"weights": weights.requires_grad_(), "experts": experts}
        given |= {"count": count, "capacity": most}
        yield f"{n} tokens, {k} of {count} experts, capacity {most}", ("drop", given, "experts")


def permutation(group, seed):
    for n, k, count in (7, 2, 5), (1, 3, 4), (0, 2, 3), (6, 1, 9), (60, 2, 3):
        weights, experts = some_dropped(seed + n, n, k, count)
        title = f"{n} tokens, {k} of {count} experts, some choices dropped"
        yield title, ("sort_choices", {"experts": experts, "count": count}, "order, sizes")
        order, _ = finished.sort_choices(experts, count)
        x, y = drawn(seed + 3, n, 4), drawn(seed + 4, len(order), 4)
        taken = {"x": x.requires_grad_(), "source": order // k}
        yield f"{title}: TakeRows", ("TakeRows.apply", taken, "rows")
        summed = {"y": y.requires_grad_(), "weights": weights.requires_grad_(), "order": order}
        yield f"{title}: WeightedSum", ("WeightedSum.apply", summed, "the sum")


def experts(group, seed):
    for ranks, own, most in (3, 4, 4), (2, 1, 3), (2, 3, 1), (3, 0, 1), (3, 3, 30):
        numbers = torch.Generator().manual_seed(seed)
        arriving = torch.randint(most, (ranks, own), generator=numbers)
        arriving[:, 1:2] = 0  # an expert without rows
        sizes = arriving.sum(0)
        title = f"{sizes.sum()} rows of {ranks} ranks for {own} experts"
        yield title, ("by_expert", {"arriving": arriving}, "places")
        module = tiny("Qwen3-MoE", max(own, 1), 1, seed).model.layers[0].mlp.experts
        rows = drawn(seed, int(sizes.sum()), 16)
        index = torch.arange(own).repeat_interleave(sizes)[:, None]
        with Float64(), torch.no_grad():
            right = module(rows, index, torch.ones(index.shape)) if own else rows
        given = {"rows": rows.requires_grad_(), "sizes": sizes}
        for name, weight in zip(("gate_up", "down"), module.parameters()):
            given[name] = weight.detach()[:own].clone().requires_grad_()
        yield title, ("run_experts", given, "the output"), {"the output": right}


def message_bytes(group, seed):
    for tokens, count, k in ([5, 3, 0, 4], 5, 2), ([9, 2, 6, 1], 6, 3), ([4, 4, 4, 4], 3, 1):
        for P, itemsize in (1, 4), (2, 8), (3, 2), (4, 8):
            experts = [some_dropped(seed + r, n, k, count)[1] for r, n in enumerate(tokens[:P])]
            choices = torch.stack([finished.sort_choices(e, count)[1] for e in experts])
            for rank in range(P):
                given = {"choices": choices, "rank": rank, "h": 16, "itemsize": itemsize}
                title = f"rank {rank} of {P}, choices {choices.tolist()}, {itemsize} bytes a number"
                yield title, ("message_bytes", given, "message, wire")


# ---- On several ranks ----------------------------------------------------------------------------


def all_to_all(group, seed):
    rank, P = group.rank(), group.size()
    for count in 5, 3:  # of 3 experts the last of 4 ranks has none
        numbers = torch.Generator().manual_seed(seed + P)
        table = torch.randint(1, 5, (P, count), generator=numbers)  # from a rank to an expert
        table[1:][-1:] = 0  # a rank without tokens, and of 3 experts
        title, given = f"{P} ranks, {count} experts", {"sizes": table[rank].clone(), "group": group}
        right = {"sizes": table[:, slice(*shard_range(count, rank, P))]}
        yield title, ("exchange_sizes", given, "sizes"), right
        parts = table.split(finished.shares(count, P), 1)
        rows = torch.stack([part.sum(1) for part in parts], 1)  # (from, to)
        xs = [drawn(seed + r, int(rows[r].sum()), 3) for r in range(P)]
        given = {"x": xs[rank].clone().requires_grad_(), "sends": rows[rank].tolist()}
        given |= {"receives": rows[:, rank].tolist(), "group": group}
        right = torch.cat([x.split(own.tolist())[rank] for x, own in zip(xs, rows)])
        yield title, ("AllToAll.apply", given, "rows", None, {}, True), {"rows": right}


BLOCKS = [  # family, experts, k, tokens of each rank: of 1, 2, 3, 4 ranks
    ("Qwen3-MoE", 3, 2, [3]),
    ("Qwen3-MoE", 5, 2, [3, 5]),
    ("Qwen3-MoE", 8, 1, [4, 0, 2]),  # two experts at least have no tokens
    ("Mixtral", 3, 2, [1, 6, 0, 3]),  # and rank 3 no expert
]
LEFT = "bytes that a step leaves"


def see_block(theirs, group, factor, x, dy, lab, eye):
    """A block made parallel: its output, gradients, and what it leaves behind."""
    ours = lab.ExpertParallel(theirs, group, factor)
    with Float64():
        with Alive() as alive:  # half the tokens at first: the next step has other sizes
            ours(x[:, : x.shape[1] // 2].clone().requires_grad_()).sum().backward()
            ours.zero_grad()
            most = eye.right.get(LEFT)  # None: it is the finished lab, of which no number is known
            seconds = 0.2 if most is None else 3.0
            left = bytes_alive(alive.storages.valuerefs(), most or 0, seconds)
        given = {"x": x.clone().requires_grad_()}
        eye.call(ours, given, "the output", [dy], dict(ours.named_parameters()))
    if "the gradient of router" in eye.seen:
        dist.all_reduce(eye.seen["the gradient of router"], group=group)
    eye.note(LEFT, Most(left))


def one_device(theirs, x, factor):
    """The block on a rank's tokens (1, n, h); what an expert cannot take weighs 0."""
    if factor is None:
        return theirs(x)
    count = len(theirs.gate.weight)
    _, weights, experts = theirs.gate(x[0])
    capacity = math.ceil(factor * experts.numel() / count)
    kept = finished.drop(weights, experts, count, capacity) != count
    return theirs.experts(x[0], experts, weights * kept)[None]


def block(group, seed):
    family, count, k, tokens = BLOCKS[group.size() - 1]
    theirs, rank = tiny(family, count, k, seed).model.layers[0].mlp, group.rank()
    x, dy = ([drawn(seed + r + i, 1, n, 16) for r, n in enumerate(tokens)] for i in (0, 9))
    for part in x:
        part.requires_grad_()
    for factor in None, 1.0:
        with Float64():
            ys = [one_device(theirs, part, factor) for part in x]
        names, parameters = zip(*theirs.named_parameters())
        right = {"the output": ys[rank].detach()}
        grads = gradients(torch.cat(ys, 1), torch.cat(dy, 1), [x[rank], *parameters])
        for name, grad in zip(("x", *names), grads):
            name, grad = own_share(name, grad, slice(*shard_range(count, rank, group.size())))
            right[f"the gradient of {name}"] = grad
        title = f"{family}, {count} experts on {group.size()} ranks with {tokens} tokens"
        how = theirs, group, factor, x[rank].detach(), dy[rank]
        yield f"{title}, capacity {factor}", partial(see_block, *how), right


def balance(group, seed):
    tokens, rank = [5, 4, 0, 3][: group.size()], group.rank()

    def see(given, lab, eye):
        def losses(*layers):
            return lab.balance_losses(list(layers), k, group)

        with Float64():
            total = eye.call(losses, given, "the balance losses", [torch.ones(())]).detach()
        dist.all_reduce(total, group=group)
        eye.note("the losses of all ranks", total)

    for count, k in (1, 1), (3, 2):
        logits = [drawn(seed + i, sum(tokens), 6).requires_grad_() for i in range(count)]
        with Float64():
            loss = load_balancing_loss_func(tuple(logits), 6, k) * sum(tokens)
        right, given = {"the losses of all ranks": loss.detach()}, {}
        for i, grad in enumerate(gradients(loss, torch.ones_like(loss), logits)):
            own = logits[i].detach().split(tokens)[rank]
            given[f"logits {i}"] = own.clone().requires_grad_()
            right[f"the gradient of logits {i}"] = grad.split(tokens)[rank]
        title = f"{count} layers, {k} of 6 experts, {tokens[rank]} tokens"
        yield title, partial(see, given), right


def average_gradients(group, seed):
    rank, tokens = group.rank(), [70001, 0, 5, 2]
    odd, pairs = rank in (1, 2), ([0, 3], [1, 2])
    _, replicas = finished.make_groups(4, 2)
    own = [subgroup(group, ranks=ranks) for ranks in (pairs[odd], [rank])]
    grads = [[drawn(seed + 10 * r + i, 3, 2) for i in range(2)] for r in range(4)]

    def see(names, everyone, replicas, lab, eye):
        parameters = [nn.Parameter(torch.zeros_like(grad)) for grad in grads[rank]]
        own_grads = [grad.clone() for grad in grads[rank]]
        for parameter, grad in zip(parameters, own_grads):
            parameter.grad = grad
        lists = [[parameter] for parameter in parameters]
        with Float64(), Traffic() as traffic, noted_waits() as waits:
            lab.average_gradients(*lists, tokens[rank], everyone, replicas)
        eye.note_traffic("the averaging", traffic, waits)
        for name, parameter, grad in zip(names, parameters, own_grads):
            eye.note(name, parameter.grad)
            eye.note(f"{name}: .grad is another tensor", parameter.grad is not grad)
        eye.note("lists is overwritten", [len(each) for each in lists] != [1, 1])

    def see_model(lab, eye):
        case = a_case("Qwen3-MoE", 5, 2, seed, [2, 0, 1, 3])  # sequences of each rank
        errors = model_errors(lab, case, rank, 4, 2)
        off = [name for name, error in errors.items() if not error <= EXACT]
        eye.note("the list of tensors that are off", off)

    for title, groups, everyone, same_experts in (
        ("4 ranks, experts on 2", (group, replicas), range(4), range(rank % 2, 4, 2)),
        ("2 ranks of a larger job", own, pairs[odd], [rank]),
    ):
        total = sum(tokens[r] for r in everyone)
        right = {"a gradient that all ranks have": sum(grads[r][0] for r in everyone) / total}
        right["an expert's gradient"] = sum(grads[r][1] for r in same_experts) / total
        yield title, partial(see, right, *groups), right
    yield "a model on 4 ranks", see_model, {"the list of tensors that are off": []}


EXERCISES = {
    "routing": (routing, 1),
    "capacity": (capacity, 1),
    "permutation": (permutation, 1),
    "all_to_all": (all_to_all, 4, GROUPS),
    "experts": (experts, 1),
    "block": (block, 4, GROUPS),
    "bytes": (message_bytes, 1),
    "balance": (balance, 4, GROUPS),
    "gradients": (average_gradients, 4),
}
CHECKS, BUGS = checks(EXERCISES, finished, EXACT)
