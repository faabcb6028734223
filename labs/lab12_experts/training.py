"""For lab 12: tensor parallelism inside the experts, a training, tokens on their way."""

import math
import pydoc_data.topics

import torch
import torch.distributed as dist

from labs.kit.inputs import drawn
from labs.kit.models import Float64
from labs.kit.pictures import RANKS
from labs.lab12_experts.experts import tiny

WAY = {"ranks": 3, "tokens": 4, "experts": 5, "k": 2}


class Gather(torch.autograd.Function):
    """All ranks' tokens, (n, h) -> (P n, h); the gradient: a reduce-scatter."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group, out = group, x.new_empty(group.size() * len(x), x.shape[1])
        dist.all_gather_into_tensor(out, x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx, grad):
        return Scatter.apply(grad, ctx.group), None


class Scatter(torch.autograd.Function):
    """This rank's tokens of the ranks' sum, (P n, h) -> (n, h); the gradient: an all-gather."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group, out = group, x.new_empty(len(x) // group.size(), x.shape[1])
        dist.reduce_scatter_tensor(out, x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx, grad):
        return Gather.apply(grad, ctx.group), None


def tensor_parallel(lab, block, x, group):
    """Hugging Face's block, with every expert's width cut over the ranks: x (n, h) -> (n, h).

    Each rank has a part of all experts, so all tokens have to come to each rank.
    """
    count, k = len(block.gate.weight), block.gate.top_k
    gate, up = block.experts.gate_up_proj.chunk(2, 1)
    part = slice(*lab.shard_range(gate.shape[1], group.rank(), group.size()))
    gate_up = torch.cat([gate[:, part], up[:, part]], 1)
    x = Gather.apply(x, group)
    weights, experts = lab.route(x @ block.gate.weight.T, k, False)
    order, sizes = lab.sort_choices(experts, count)
    rows = lab.TakeRows.apply(x, order // k)
    rows = lab.run_experts(rows, sizes, gate_up, block.experts.down_proj[:, :, part])
    return Scatter.apply(lab.WeightedSum.apply(rows, weights, order), group)


def training_on_rank(group, lab, seed, coefficient, factor, steps=60):
    """[cross entropy, busiest rank's rows in even shares, share of choices that are dropped].

    Means of the last 10 steps of a training on the text of Python's own documentation.
    """
    rank, world, experts = group.rank(), group.size(), 8
    text = "".join(pydoc_data.topics.topics.values()).encode("ascii", "replace")
    text = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    model = tiny("Qwen3-MoE", experts, 2, seed, width=48, vocab_size=128, hidden_size=32)
    own, replicas = lab.make_groups(world, world)
    blocks = lab.parallelize(model, own, factor)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, foreach=False)
    numbers, seen = torch.Generator().manual_seed(seed), []
    for step in range(steps):
        starts = torch.randint(len(text) - 65, (4 * world,), generator=numbers).tolist()
        mine = torch.stack([text[start : start + 65] for start in starts[4 * rank :][:4]])
        call = mine[:, :-1], mine[:, 1:], coefficient, group, replicas
        with Float64():
            loss = lab.train_step(model, blocks, *call)
            if step >= steps - 10:
                seen.append(count_step(lab, blocks, factor, loss, coefficient, group))
        optimizer.step()
    return torch.stack(seen).mean(0).tolist()


def count_step(lab, blocks, factor, loss, coefficient, group):
    """[cross entropy, busiest rank's rows in even shares, share of choices dropped] of a step."""
    balance = lab.balance_losses([block.logits for block in blocks], blocks[0].k, group)
    lost, rows, choices = 0, [], sum(block.logits[:, : block.k].numel() for block in blocks)
    for block in blocks:
        (tokens, count), k = block.logits.shape, block.k
        weights, experts = lab.route(block.logits, k, block.renormalise)
        if factor is not None:
            experts = lab.drop(weights, experts, count, math.ceil(factor * tokens * k / count))
        sizes = lab.sort_choices(experts, count)[1]
        lost += tokens * k - int(sizes.sum())
        rows.append(lab.exchange_sizes(sizes, group).sum() * len(blocks) / choices)
    sums = torch.stack([balance.detach() / len(blocks[0].logits), torch.tensor(lost / choices)])
    most = torch.stack(rows)
    dist.all_reduce(sums, group=group)
    dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
    balance, lost = sums / group.size()
    return torch.stack([loss - coefficient * balance, most.mean(), lost])


def way_on_rank(group, lab, seed):
    """This rank's tokens: {"experts" (n, k), "order", "sends", "places", "own"} as lists."""
    logits = drawn(seed + group.rank(), WAY["tokens"], WAY["experts"])
    _, experts = lab.route(logits, WAY["k"], True)
    order, sizes = lab.sort_choices(experts, WAY["experts"])
    arriving = lab.exchange_sizes(sizes, group)
    held = lab.shares(WAY["experts"], group.size())
    sends = [int(part.sum()) for part in sizes.split(held)]
    found = {"experts": experts.tolist(), "order": order.tolist(), "sends": sends}
    return found | {"places": lab.by_expert(arriving).tolist(), "own": held[group.rank()]}


def stations(way):
    """The four columns of the picture: [each a list of ranks' lists of (rank, choice)]."""
    k, ranks = WAY["k"], range(len(way))
    tokens = [[(r, choice) for choice in range(k * WAY["tokens"])] for r in ranks]
    ordered = [[(r, choice) for choice in way[r]["order"]] for r in ranks]
    arrived = [[] for _ in ranks]
    for rows, found in zip(ordered, way):
        start = 0
        for to, size in enumerate(found["sends"]):
            arrived[to] += rows[start : start + size]
            start += size
    by_expert = [[rows[i] for i in found["places"]] for rows, found in zip(arrived, way)]
    return tokens, ordered, arrived, by_expert


def draw_way(axis, way):
    """Each choice as a line, in the colour of its token's rank, from its token to its expert."""
    columns, heights = stations(way), []
    for ranks in columns:
        y, height = 0.0, {}
        for rows in ranks:
            for row in rows:
                height[row] = -y
                y += 1
            y += 1.5
        heights.append(height)
    for rank, choice in heights[0]:  # a token's choices leave from one point
        heights[0][rank, choice] = heights[0][rank, choice // WAY["k"] * WAY["k"]]
    for row in heights[0]:
        line = [height[row] for height in heights]
        axis.plot(range(4), line, color=RANKS[row[0]], lw=1.4, alpha=0.8)
    for x, height in enumerate(heights):
        for (rank, choice), y in height.items():
            expert = way[rank]["experts"][choice // WAY["k"]][choice % WAY["k"]]
            name = f"{'abc'[rank]}{choice // WAY['k']}" if x == 0 else "ABCDE"[expert]
            box = {"boxstyle": "round,pad=0.15", "fc": "white", "ec": RANKS[rank], "lw": 1}
            axis.text(x, y, name, ha="center", va="center", fontsize=7, bbox=box)
    steps = "tokens", "sorted by expert", "arrived: all-to-all", "sorted by expert again"
    axis.set_xticks(range(4), steps)
    names = iter("ABCDE")
    for rank, rows in enumerate(columns[3]):
        own = ", ".join(next(names) for _ in range(way[rank]["own"]))
        middle = sum(heights[3][row] for row in rows) / max(1, len(rows))
        axis.text(3.15, middle, f"rank {rank}: {own}", color=RANKS[rank], va="center")
    axis.set(yticks=[], xlim=(-0.2, 3.8))
    axis.spines[["left", "bottom"]].set_visible(False)
    axis.set_title(
        "Tokens on their way: 3 ranks, 4 tokens each, 2 of 5 experts a token", loc="left"
    )
