"""Lab 12's checks, each of which runs on every rank, and the bugs that they have to catch.

In float64, so that nothing but a mistake is off by more than EXACT: Hugging Face's own router,
experts, block, balance loss and whole models, untouched, against what the learner builds.
"""

from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from labs.kit.compare import close, drawn, expect_same, gradients, tried
from labs.kit.harness import Traffic, Wrong, expect
from labs.kit.models import Float64, expect_exact
from labs.kit.tools import expect_traffic, members
from labs.kit.usual import usual_hint
from labs.lab12_experts import lesson as finished  # not the learner's
from labs.lab12_experts.experts import (
    a_case,
    check_dropped_model,
    check_rows,
    follow_averages,
    follow_balance,
    kept_choices,
    model_errors,
    own_share,
    subgroups,
    tiny,
)

split = finished.split
MISTAKES = """
== message_bytes
message = sizes + 2 * -> message = sizes +  # the backward sends each row's gradient, both ways, too
message = sizes + -> message =  # the sizes are sent, too: int64, 8 bytes an expert
8 * sum(held) -> itemsize * sum(held)  # sizes are int64, whatever the rows are: 8 bytes
8 * sum(held) -> 16 * sum(held)  # the sizes are sent once: they have no gradient
8 * sum(held) -> 8 * len(choices)  # a size for each expert, not for each rank
rows[:, rank].sum() -> rows[rank].sum()  # on the way back a rank sends what it had received
sent + received - 2 * stay -> sent + received  # what a rank keeps does not go over the wire
sent + received - 2 * stay -> sent + received - stay  # it stays on both ways, and in the backward
sizes - 8 * held[rank] -> sizes  # the sizes for itself stay, too
sizes - 8 * held[rank] + 2 * -> sizes - 8 * held[rank] +  # the backward goes over the wire, too
int64 sizes; rows of h numbers there and back, backward too; wire: no sizes, rows for own experts
"""


def expect_list(what, mine, right, hint):
    """Raise Wrong unless mine is a tensor of the whole numbers of a list."""
    is_tensor = isinstance(mine, torch.Tensor)
    expect(is_tensor, f"{what} is {type(mine).__name__}, not a tensor")
    expect(mine.tolist() == right, f"{what} is {mine.tolist()}, not {right}", hint)


def some_choices(seed, n, k, count):
    """(weights (n, k), experts (n, k)): random, no expert twice for a token."""
    scores, experts = drawn(seed, n, count).softmax(1).topk(k, 1)
    return scores, experts


def check_routing(lab, group, seed):
    kinds = ("Qwen3-MoE", False, 1), ("Qwen3-MoE", False, 3), ("Qwen3-MoE", True, 2)
    for family, renormalise, k in (*kinds, ("Mixtral", True, 3)):
        more = {"norm_topk_prob": renormalise} if family == "Qwen3-MoE" else {}
        gate = tiny(family, 7, k, seed, **more).model.layers[0].mlp.gate
        x, dy = drawn(seed, 9, 16).requires_grad_(), drawn(seed + 1, 9, k)
        with Float64():
            logits, right, chosen = gate(x)
            mine = F.linear(x, gate.weight)
            found = lab.route(mine, k, renormalise)
        expect_same("logits", [mine], [logits])
        both = isinstance(found, tuple | list) and len(found) == 2
        expect(both, "route() does not return a pair", "(weights, experts)")
        weights, experts = found
        what = f"{family}, {k} of 7 experts, renormalise={renormalise}"
        hint = "of a token's E probabilities the k largest, the largest first: topk(k, -1)"
        expect_list(f"{what}: experts", experts, chosen.tolist(), hint)
        plain = logits.softmax(-1).topk(k, -1).values
        hints = {"the probabilities are softmax's over all E experts": logits.topk(k, -1).values}
        if renormalise:
            hints["renormalise: divide a token's weights by their sum"] = plain
        else:
            shared = "softmax over all E experts, and the k largest as they are: no sum of 1"
            hints[shared] = plain / plain.sum(-1, keepdim=True)
        hint = "softmax over all E experts; if renormalise, divided by the sum of its token's k"
        close(f"{what}: weights", weights, right, hints, hint)
        hint = "the router learns through the weights: no detach()"
        expect(weights.requires_grad, f"{what}: the weights have no gradient", hint)
        [mine], [right] = gradients(weights, dy, x), gradients(right, dy, x)
        close(f"{what}: the gradient", mine, right, None, hint)
    return "Hugging Face's own routers, Mixtral's and Qwen3-MoE's: choices, weights, gradients"


def check_permutation(lab, group, seed):
    for n, k, count in (7, 2, 5), (1, 3, 4), (0, 2, 3), (6, 1, 9), (60, 2, 3):
        weights, experts = some_choices(seed + n, n, k, count)
        dropped = drawn(seed + 2, n, k) > 0.8
        experts = experts.masked_fill(dropped, count)
        flat = experts.flatten().tolist()
        right = [c for _, c in sorted((e, c) for c, e in enumerate(flat) if e < count)]
        what = f"{n} tokens, {k} of {count} experts, {sum(e == count for e in flat)} dropped"
        before = experts.clone()
        order, sizes = lab.sort_choices(experts, count)
        expect_same(f"{what}: experts", [experts], [before])
        hint = "one for each expert, 0 where it has none; dropped choices are not counted"
        expect_list(f"{what}: sizes", sizes, [flat.count(e) for e in range(count)], hint)
        hint = "choices' numbers, sorted by expert (stable: tokens in order), without dropped ones"
        if sorted(order.tolist()) == sorted(right):
            hint = "sorted by expert, and of one expert in the order of tokens: stable=True"
        expect_list(f"{what}: order", order, right, hint)
        check_rows(lab, what, seed, weights, torch.tensor(right, dtype=torch.long))
    return "stable, with empty experts, dropped choices and no tokens: rows, sums, gradients exact"


def check_all_to_all(lab, world, seed):
    for group, rank, P in members(subgroups()):
        count, numbers = 5 if P < 4 else 3, torch.Generator().manual_seed(seed + P)
        table = torch.randint(4, (P, count), generator=numbers)  # rows of each rank for each expert
        table[1] = 0  # a rank without tokens
        start, end = split(count, rank, P)
        with Traffic() as traffic:
            hint = "held[r] sizes go to rank r: a rank gets those of its experts, from each rank"
            what, call = f"{P} ranks, {count} experts", (sizes := table[rank].clone(), group)
            arriving = tried(f"{what}: exchange_sizes()", hint, lab.exchange_sizes, *call)
        expect_list(f"{what}: sizes", arriving, table[:, start:end].tolist(), hint)
        expect_all_to_all(f"{what}: sizes", traffic, 8 * count)
        expect_same(f"{what}: sizes", [sizes], [table[rank]])
        rows = torch.stack([t[slice(*split(count, r, P))].sum() for t in table for r in range(P)])
        rows = rows.view(P, P)  # (from, to)
        xs = [drawn(seed + r, int(rows[r].sum()), 3) for r in range(P)]
        dys = [drawn(seed + P + r, int(rows[:, r].sum()), 3) for r in range(P)]
        cut = [x.split(own.tolist()) for x, own in zip(xs, rows)]
        back = [dy.split(own.tolist()) for dy, own in zip(dys, rows.T)]
        x, sends, receives = xs[rank].requires_grad_(), rows[rank].tolist(), rows[:, rank].tolist()
        with Traffic() as traffic:
            call = lab.AllToAll.apply, x, sends, receives, group
            hint = "output sizes: receives; input: sends; group=group"
            mine = tried(f"{what}: AllToAll", hint, *call)
        right = torch.cat([parts[rank] for parts in cut])
        hint = "the first sends[0] rows go to rank 0; what comes stands in the order of ranks"
        close(f"{what}: rows", mine.detach(), right.detach(), None, hint)
        expect_all_to_all(f"{what}: rows", traffic, x.nbytes)
        hint = "a gradient goes back where its row came from: the sizes are swapped"
        [dx] = tried(f"{what}: the backward", hint, gradients, mine, dys[rank], x)
        close(f"{what}: the gradient", dx, torch.cat([parts[rank] for parts in back]), None, hint)
    return "2, 3 and 4 ranks, uneven, none, a rank without experts: sizes, rows, gradients exact"


def expect_all_to_all(what, traffic, right):
    """Raise Wrong unless one all-to-all of so many bytes is all there was."""
    others = ", ".join(op for op in traffic.ops if op != "all_to_all")
    expect(not others, f"{what}: calls {others}", "dist.all_to_all_single sends each its rows")
    calls, sent = traffic.ops.get("all_to_all", [0, 0])
    expect((calls, sent) == (1, right), f"{what}: {calls} calls, {sent} bytes, not 1 and {right}")


def check_experts(lab, group, seed):
    for ranks, own, most in (3, 4, 4), (2, 1, 3), (2, 3, 1), (3, 0, 1), (3, 3, 30):
        numbers = torch.Generator().manual_seed(seed)
        arriving = torch.randint(most, (ranks, own), generator=numbers)
        arriving[:, 1:2] = 0  # an expert without rows
        lie = [e for row in arriving.tolist() for e, size in enumerate(row) for _ in range(size)]
        right = sorted(range(len(lie)), key=lie.__getitem__)
        what = f"{len(lie)} rows of {ranks} ranks for {own} experts"
        hint = "they lie rank by rank, a rank's by expert: which expert is each for? Then argsort"
        places = lab.by_expert(arriving)
        if [lie[i] for i in places.tolist()] == sorted(lie):
            hint = "of one expert the rows stay in the order of ranks: stable=True"
        elif places.argsort().tolist() == right:
            hint = "this is where each row goes; wanted is which row stands at each place"
        expect_list(f"{what}: by_expert()", places, right, hint)
        follow_experts(lab, what, own, lie, arriving.sum(0), seed)
    return "Hugging Face's own experts, some without rows, a rank without experts: gradients exact"


def follow_experts(lab, what, own, lie, sizes, seed):
    """Outputs and gradients of `own` experts, against Hugging Face's; lie: each row's expert."""
    module = tiny("Qwen3-MoE", max(own, 1), 1, seed).model.layers[0].mlp.experts
    weights = [w[:own].detach().requires_grad_() for w in module.parameters()]
    rows = drawn(seed, len(lie), 16).requires_grad_()
    inputs, dy = [*weights, rows], drawn(seed + 1, len(lie), 16)
    before = [t.detach().clone() for t in inputs]
    hint = "down(silu(gate x) * up x), of each expert's own sizes[e] rows and two matrices"
    mine = tried(f"{what}: run_experts()", hint, lab.run_experts, rows, sizes, *weights)
    expect_same(f"{what}: rows or weights", inputs, before)
    index = torch.tensor(sorted(lie), dtype=torch.long)[:, None]
    ones = torch.ones_like(index, dtype=rows.dtype)
    with Float64():
        out = module(rows, index, ones) + 0 * rows
        wanted = gradients(out, dy, [*module.parameters(), rows])
        halves = module.gate_up_proj.data.chunk(2, 1)
        module.gate_up_proj.data = torch.cat(halves[::-1], 1)
        swapped = module(rows, index, ones)
        module.gate_up_proj.data = torch.cat(halves, 1)
        module.act_fn = nn.Identity()
        linear = module(rows, index, ones)
    hints = {"gate's rows are above up's, and silu is for the gate": swapped.detach()}
    hints["silu of the gate, times up"] = linear.detach()
    close(f"{what}: the outputs", mine.detach(), out.detach(), hints, hint)
    hint = "also no rows belong to the graph, or the backward's all-to-alls wait for this rank"
    expect(mine.requires_grad, f"{what}: the output has no gradient", hint)
    hint = "rows, gate_up and down all have gradients, none of them is detached"
    for name, a, b in zip(("gate_up", "down", "rows"), gradients(mine, dy, inputs), wanted):
        close(f"{what}: the gradient of {name}", a, b if name == "rows" else b[:own], None, hint)


BLOCKS = [  # family, experts, k, tokens of each rank: of 2, 3, 4 ranks
    ("Qwen3-MoE", 5, 2, [3, 5]),
    ("Qwen3-MoE", 8, 1, [4, 0, 2]),  # two experts at least have no tokens
    ("Mixtral", 3, 2, [1, 6, 0, 3]),  # and rank 3 no expert
]


SENDS = "a row's token is order // k; sends and receives have a number for each rank, of the "
SENDS += "shares() experts that it holds, of this call's sizes; on the way back they change places"


def check_block(lab, world, seed):
    groups, worst = subgroups(), 0
    for group, rank, P in members(groups):
        family, count, k, tokens = BLOCKS[P - 2]
        block = tiny(family, count, k, seed).model.layers[0].mlp
        x, dy = (drawn(seed + i, 1, sum(tokens), 16) for i in range(2))
        x.requires_grad_()
        mine = slice(sum(tokens[:rank]), sum(tokens[: rank + 1]))
        with Float64():
            right = block(x)
            _, weights, experts = block.gate(x[0])
            plain = block.experts(x[0], experts, torch.ones_like(weights))[mine]
        names = ["x", *(name for name, _ in block.named_parameters())]
        wanted = dict(zip(names, gradients(right, dy, [x, *block.parameters()])))
        ours = lab.ExpertParallel(block, group)
        own = x[:, mine].detach().requires_grad_()
        what = f"{family}, {count} experts on {P} ranks with {tokens} tokens"
        with Float64():
            tried(what, SENDS, ours, own.detach()[:, : tokens[rank] // 2])  # then other sizes
        with Float64(), Traffic() as traffic:
            out = tried(what, SENDS, ours, own)
        hint = "order // k; there; by_expert() before the experts, its argsort() behind them; back"
        hints = {"each row times the router's weights": plain[None].detach()}
        close(f"{what}: the output", out.detach(), right[:, mine].detach(), hints, hint)
        parameters = {"x": own, **dict(ours.named_parameters())}
        with traffic:
            grads = tried(what, hint, gradients, out, dy[:, mine], [*parameters.values()])
        choices = [part.flatten().bincount(minlength=count) for part in experts.split(tokens)]
        most, _ = finished.message_bytes(torch.stack(choices), rank, 16, 8)
        expect_traffic(what, traffic, {"all_to_all": most})
        found = dict(zip(parameters, grads))
        dist.all_reduce(found["router"], group=group)
        held = slice(*split(count, rank, P))
        for name, grad in wanted.items():
            name, grad = own_share(name, grad, held)
            grad = grad[:, mine] if name == "x" else grad
            hint = "through every TakeRows, AllToAll and WeightedSum, with the router's weights"
            worst = max(worst, close(f"{what}: {name}'s gradient", found[name], grad, None, hint))
    return f"2, 3 and 4 ranks against Hugging Face's block: output, gradients off by {worst:.0e}"


def check_bytes(lab, world, seed):
    for group, rank, P in members(subgroups()):
        for tokens, count, k in ([5, 3, 0, 4], 5, 2), ([9, 2, 6, 1], 6, 3), ([4, 4, 4, 4], 3, 1):
            routed = [some_choices(seed + r, n, k, count) for r, n in enumerate(tokens[:P])]
            routed[0][1][:2] = count  # dropped
            flat = [experts.flatten() for _, experts in routed]
            choices = torch.stack([e.bincount(minlength=count)[:count] for e in flat])
            block = tiny("Mixtral", count, k, seed).model.layers[0].mlp
            x = drawn(seed + rank, tokens[rank], 16).requires_grad_()
            with Traffic() as traffic:
                finished.ExpertParallel(block, group).mix(x, *routed[rank]).sum().backward()
            what = f"rank {rank} of {P} with choices {choices.tolist()}"
            held = slice(*split(count, rank, P))
            stay = int(choices[rank, held].sum())
            sent, received = int(choices[rank].sum()), int(choices[:, held].sum())
            away, own = sent + received - 2 * stay, held.stop - held.start
            for itemsize in 8, 2:
                args = choices, rank, 16, itemsize
                mine = lab.message_bytes(*args)
                pair = isinstance(mine, tuple | list) and len(mine) == 2
                expect(pair, f"message_bytes() returns {mine}", "(message, wire)")
                rows = traffic.bytes("all_to_all") - 8 * count
                right = 8 * count + rows * itemsize // 8, 8 * (count - own) + 32 * itemsize * away
                for part, name in enumerate(("message", "wire")):
                    if mine[part] != right[part]:
                        found = f"{mine[part]} {name} bytes, not {right[part]}"
                        hint = usual_hint(MISTAKES, finished.message_bytes, args, mine[part], part)
                        raise Wrong(f"{what}, {itemsize} bytes a number: {found}", hint)
    return "2, 3 and 4 ranks, with and without a capacity: message bytes as counted, to the byte"


def check_balance(lab, world, seed):
    for group, rank, P in members(subgroups()):
        for layers, k in (1, 1), (3, 2):
            follow_balance(lab, group, rank, [3, 0, 5, 4][-P:], layers, k, seed + P)
    return "2, 3, 4 ranks, one without tokens: Hugging Face's aux_loss, gradient, one all-reduce"


def check_gradients(lab, group, seed):
    rank = group.rank()
    _, replicas = finished.make_groups(4, 2)
    follow_averages(lab, seed, group, replicas, range(4), range(rank % 2, 4, 2))
    pairs = [dist.new_group(ranks) for ranks in ([0, 3], [1, 2])]
    alone = [dist.new_group([r]) for r in range(4)]
    inside = [0, 3] if rank in (0, 3) else [1, 2]
    follow_averages(lab, seed, pairs[rank in (1, 2)], alone[rank], inside, [rank])
    worst = 0
    for case, parallel in (
        (a_case("Qwen3-MoE", 5, 2, seed, [2, 0, 1, 3]), 2),
        (a_case("Mixtral", 37, 2, seed, [1, 1, 0, 1]), 4),  # 30 choices: 7 experts have none
    ):
        what = f"{case.family} on 4 ranks, experts on {parallel}"
        worst = max(worst, expect_exact(what, model_errors(lab, case, rank, 4, parallel)))
    return f"whole models on 4 ranks, 2 x 2 and 4: loss, every gradient, off by {worst:.0e}"


def check_capacity(lab, group, seed):
    sizes = (9, 2, 4, 3), (6, 1, 5, 1), (0, 2, 3, 1), (4, 2, 3, 9), (3, 2, 2, 3), (12, 3, 4, 4)
    for n, k, count, capacity in sizes:
        weights, experts = some_choices(seed, n, k, count)
        before, hint = [weights.clone(), experts.clone()], "fewer tokens than that: all stay"
        what = f"{n} tokens, {k} of {count} experts, capacity {capacity}: experts"
        found = tried(what, hint, lab.drop, weights, experts, count, capacity)
        kept = kept_choices(weights, experts, count, capacity)
        first = kept_choices(weights, experts, count, capacity, lambda weight, token: token)
        masks = (torch.tensor(keep, dtype=torch.bool).view(n, k) for keep in (kept, first))
        right, early = (experts.masked_fill(~mask, count).tolist() for mask in masks)
        expect_same(f"{what}: weights or experts", [weights, experts], before)
        hint = f"of each expert's choices the {capacity} with the largest weights stay"
        hint += ", not the first" if found.tolist() == early else ", so many if it has them"
        expect_list(what, found, right, f"{hint}; the others get the number {count}")
    lost = check_dropped_model(lab, group, seed)
    return f"the heaviest stay; {lost} tokens come back as their residual alone, gradients exact"


CHECKS = {
    "routing": (check_routing, 1),
    "capacity": (check_capacity, 2),
    "permutation": (check_permutation, 1),
    "all_to_all": (check_all_to_all, 4),
    "experts": (check_experts, 1),
    "block": (check_block, 4),
    "bytes": (check_bytes, 4),
    "balance": (check_balance, 4),
    "gradients": (check_gradients, 4),
}


# Bugs for --inject-bug: the checks have to catch every one


def sizes_assumed(lab):
    """Each rank takes it that it receives what it sends: no sizes are exchanged."""

    def exchange_sizes(sizes, group):
        own = lab.shares(len(sizes), group.size())[group.rank()]
        return sizes[:own].repeat(group.size(), 1)

    lab.exchange_sizes = exchange_sizes


def balance_of_own_tokens(lab):
    """Each rank balances its own tokens: the ranks' losses are averaged, not their tokens."""
    right = lab.balance_losses
    alone = SimpleNamespace(all_reduce=lambda *args, **how: None)

    def balance_losses(logits, k, group):
        everyone, lab.dist = lab.dist, alone
        loss = right(logits, k, group)
        lab.dist = everyone
        return loss

    lab.balance_losses = balance_losses


def experts_times_group(lab):
    """Experts' gradients are averaged over the replicas, as DDP would: too large by the group."""
    right = lab.average_gradients

    def average_gradients(dense, experts, tokens, everyone, replicas):
        right(dense, [], tokens, everyone, replicas)
        right(experts, [], tokens, replicas, replicas)

    lab.average_gradients = average_gradients


BUGS = [sizes_assumed, balance_of_own_tokens, experts_times_group]
