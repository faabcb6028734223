"""Lab 12. Experts: a mixture of experts (MoE), spread over ranks, and how tokens get to them.

Question: Qwen3-30B-A3B has 128 small MLPs in each layer, its experts, and a router that sends each
token through 8 of them: the parameters of a 30B model for the FLOPs of a 3B model. Which rank holds
which expert? How does a token get there, if only the router knows how many go where? And what
are the gradients divided by, if an expert has seen every rank's tokens?

Idea: each rank has its own sequences (data parallelism) and some of the experts (expert
parallelism, EP). The tokens travel. n tokens of a rank, k experts a token, E experts, P ranks:

    router             (n, h) -> (n, k)     which experts, with which weights
    sort by expert     (n, h) -> (n k, h)   a row for each choice; a rank's experts lie together
    sizes              (E,) -> (P, own)     how many rows will come from each rank, for each expert
    all-to-all         (n k, h) -> (m, h)   uneven: m is whatever the routers chose
    sort by expert     (m, h)               they have come rank by rank
    experts            (m, h)               gate, up, silu, down
    and all the way back: the order of arrival, all-to-all with the sizes swapped, (n k, h)
    weighted sum       (n k, h) -> (n, h)   of each token's k rows; the layer adds its input to it

2 ranks; experts A and B on rank 0, C on rank 1; k = 1:

    rank 0    a0 a1 a2 choose C A C         rank 1    b0 b1 choose B A
      sorted     a1 | a0 a2                   sorted     b1 b0 |         | is where the next rank's
      sizes      A 1, B 0 | C 2               sizes      A 1, B 1 | C 0
      arrived    a1   b1 b0                   arrived    a0 a2
      experts    A: a1 b1   B: b0             experts    C: a0 a2

The backward takes the same two ways: a row's gradient comes from where the row went.

What is summed over which ranks. Let R groups of P ranks each hold all experts once. The loss
is the mean over the tokens of all P R ranks. A parameter that every rank has
(router, attention, ...) has a gradient from this rank's tokens, so it is summed over all P R
ranks. The all-to-all has collected an expert's gradient from the P ranks of its group, so it
is summed over its R replicas only. Both are divided by the number of all tokens. DDP averages
over the replicas and so divides an expert's by R instead of P R: it is P times too large. The
loss of that step is right, and AdamW hides the factor. See Megatron-LM's pull requests 5956
and 6450, PyTorch's issue 160285, megablocks' issue 86.

Without a remedy a router comes to prefer few experts, and every step waits for the rank that has
them. One remedy is a balance loss, which is smallest if all experts are used alike; another is
a capacity: what an expert cannot take is dropped, and only the token's residual goes on.

    python labs/lab12_experts/lesson.py                   # it starts its own ranks
    python labs/lab12_experts/lesson.py --ranks 3 --plot experts.png --json lab12.json
    python labs/lab12_experts/lesson.py --predict 100000  # first your guess; see the end
    python labs/lab12_experts/lesson.py --inject-bug list
    python labs/grade.py start lab12                      # writes my_labs/lab12_experts.py

Sources: Shazeer et al., Outrageously large neural networks, arXiv 1701.06538. GShard, arXiv
2006.16668 (experts on ranks, capacity). Switch Transformers, arXiv 2101.03961 (the balance loss).
Mixtral, arXiv 2401.04088. Megatron-LM: megatron/core/transformer/moe/token_dispatcher.py,
moe_utils.py. The reference is Hugging Face's models/qwen3_moe and models/mixtral.
"""

import math
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh


# Copied from tp.py
def shard_range(n, rank, world):
    """[start, end): a rank's share of n things. The first n % world ranks have one more."""
    base, extra = divmod(n, world)
    return rank * base + min(rank, extra), (rank + 1) * base + min(rank + 1, extra)


def shares(n, world):
    """How many of n experts each rank holds; 0 where there are more ranks than experts."""
    return [end - start for start, end in (shard_range(n, rank, world) for rank in range(world))]


# ---- The lesson 1: the router's choices ----------------------------------------------------------


def route(logits, k, renormalise):
    """Choose k experts for each token: (weights (n, k), experts (n, k)) of router logits (n, E).

    The weights are the k largest of the softmax over all E experts, largest first; with
    renormalise (Mixtral) they are divided by their sum, so that a token's weights add up to 1.
    Their gradient goes to the logits.
    """
    # exercise: routing
    weights, experts = logits.softmax(-1).topk(k, -1)
    if renormalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, experts
    # end exercise


def drop(weights, experts, count, capacity):
    """experts (n, k) with the number `count` (E) in place of each choice that is dropped.

    Of this rank's tokens an expert takes `capacity` choices at most: those with the largest
    weights. A token may lose some of its choices, or all.
    """
    # exercise: capacity
    scores = weights.new_zeros(len(weights), count).scatter(1, experts, weights.detach())
    heaviest = scores.topk(min(capacity, len(scores)), 0).indices  # (capacity, E): tokens
    kept = torch.zeros_like(scores, dtype=torch.bool).scatter(0, heaviest, True)
    return experts.where(kept.gather(1, experts), count)
    # end exercise


# ---- The lesson 2: rows in the order of their experts --------------------------------------------


def sort_choices(experts, count):
    """(order (rows,), sizes (E,)) of experts (n, k), whose n k choices count token by token.

    order: the choices' numbers (token x k + place), sorted by expert, for the same expert by
    token. sizes: how many choices each of the `count` experts has, perhaps 0. Both are tensors
    of integers. A choice of expert number `count` has been dropped and is in neither.
    """
    # exercise: permutation
    sizes = experts.flatten().bincount(minlength=count)[:count]
    order = experts.flatten().argsort(stable=True)
    return order[: sizes.sum()], sizes
    # end exercise


class TakeRows(torch.autograd.Function):
    """Row i of the result is row source[i] of x: x (n, h), source (rows,) -> (rows, h).

    A row of x may be taken several times, or not at all. What is its gradient?
    """

    @staticmethod
    def forward(ctx, x, source):
        ctx.save_for_backward(source)
        ctx.count = len(x)
        return x[source]

    @staticmethod
    def backward(ctx, grad):
        """The gradient of each of forward's arguments; None where there is none."""
        # exercise: permutation
        dx = grad.new_zeros(ctx.count, grad.shape[1])
        return dx.index_add(0, *ctx.saved_tensors, grad), None
        # end exercise


class WeightedSum(torch.autograd.Function):
    """Each token's rows times their weights, added up: y (rows, h), weights (n, k) -> (n, h).

    order (rows,): the choice (token x k + place) that a row is for, from sort_choices(). A choice
    that is not in it adds nothing, and its weight's gradient is 0.
    """

    @staticmethod
    def forward(ctx, y, weights, order):
        ctx.save_for_backward(y, weights, order)
        # exercise: permutation
        rows = y * weights.flatten()[order, None]
        return y.new_zeros(len(weights), y.shape[1]).index_add(0, order // weights.shape[1], rows)
        # end exercise

    @staticmethod
    def backward(ctx, grad):
        """The gradients of y and of weights, None for order."""
        y, weights, order = ctx.saved_tensors
        # exercise: permutation
        rows = grad[order // weights.shape[1]]
        dweights = torch.zeros_like(weights).flatten()
        dweights[order] = (rows * y).sum(1)
        return rows * weights.flatten()[order, None], dweights.view_as(weights), None
        # end exercise


# ---- The lesson 3: to the experts' ranks and back ------------------------------------------------


def exchange_sizes(sizes, group):
    """Tell each rank how many rows it will get: sizes (E,) of this rank -> (P, own), tensors.

    Entry (r, e) of the result: how many rows rank r sends to this rank's expert e. Ranks
    hold shares(E, P) experts. One collective: only sizes travel here.
    """
    held = shares(len(sizes), group.size())
    # exercise: all_to_all
    own = held[group.rank()]
    arriving = sizes.new_empty(group.size(), own)
    splits = [own] * group.size(), held
    dist.all_to_all_single(arriving.view(-1), sizes, *splits, group=group)
    return arriving
    # end exercise


class AllToAll(torch.autograd.Function):
    """Rows to other ranks: x (sum(sends), h) -> (sum(receives), h); both are lists of P numbers.

    The first sends[0] rows go to rank 0, the next sends[1] to rank 1, ...; rank r sends receives[r]
    rows here, and they stand in the result in the order of the ranks. Any of these may be 0.
    """

    @staticmethod
    def forward(ctx, x, sends, receives, group):
        ctx.sizes, ctx.group = (sends, receives), group
        # exercise: all_to_all
        out = x.new_empty(sum(receives), x.shape[1])
        dist.all_to_all_single(out, x.contiguous(), receives, sends, group=group)
        return out
        # end exercise

    @staticmethod
    def backward(ctx, grad):
        """The gradient of each of forward's arguments; None where there is none."""
        sends, receives = ctx.sizes
        # exercise: all_to_all
        return AllToAll.apply(grad, receives, sends, ctx.group), None, None, None
        # end exercise


# ---- The lesson 4: the experts -------------------------------------------------------------------


def by_expert(arriving):
    """(rows,): the places of rows that have arrived, sorted by expert, then by rank.

    arriving (P, own): from exchange_sizes(). Rows lie rank by rank, within a rank by expert.
    """
    # exercise: experts
    ranks, own = arriving.shape
    experts = torch.arange(own).repeat(ranks).repeat_interleave(arriving.flatten())
    return experts.argsort(stable=True)
    # end exercise


def run_experts(rows, sizes, gate_up, down):
    """down(silu(gate x) * up x) of the expert of each row: rows (m, h) -> (m, h).

    sizes (own,): a tensor; the first sizes[0] rows are expert 0's, ... gate_up (own, 2 i, h): an
    expert's gate matrix above its up matrix; down (own, h, i). An expert may have no rows, a
    rank may have no expert. The result belongs to the graph all the same, because every rank
    joins each all-to-all of the backward.
    """
    # exercise: experts
    out = [rows[:0]]
    for x, first, second in zip(rows.split(sizes.tolist()), gate_up, down):
        gate, up = (x @ first.T).chunk(2, -1)
        out.append((F.silu(gate) * up) @ second.T)
    return torch.cat(out)
    # end exercise


class ExpertParallel(nn.Module):
    """A rank's share of the experts, with the router, in place of Hugging Face's block.

    factor: of a rank's n tokens an expert takes factor times its even share, n k / E, rounded
    up; None: it has no limit. logits: the router's (n, E) of the last forward.
    """

    def __init__(self, block, group, factor=None):
        super().__init__()
        start, end = shard_range(len(block.experts.gate_up_proj), group.rank(), group.size())
        self.router = block.gate.weight  # (E, h)
        self.gate_up = nn.Parameter(block.experts.gate_up_proj[start:end].detach().clone())
        self.down = nn.Parameter(block.experts.down_proj[start:end].detach().clone())
        self.k, self.renormalise = block.gate.top_k, getattr(block.gate, "norm_topk_prob", True)
        self.group, self.factor, self.logits = group, factor, None

    def forward(self, hidden_states):  # (b, s, h) -> (b, s, h), without the residual
        x, count = hidden_states.flatten(0, 1), len(self.router)
        self.logits = F.linear(x, self.router)
        weights, experts = route(self.logits, self.k, self.renormalise)
        if self.factor is not None:
            capacity = math.ceil(self.factor * experts.numel() / count)
            experts = drop(weights, experts, count, capacity)
        return self.mix(x, weights, experts).view_as(hidden_states)

    def mix(self, x, weights, experts):
        """Send x (n, h) to its experts (n, k), wherever they are; the weighted sum (n, h)."""
        # exercise: block
        order, sizes = sort_choices(experts, len(self.router))
        arriving = exchange_sizes(sizes, self.group)
        receives = arriving.sum(1).tolist()
        held = shares(len(sizes), self.group.size())
        sends = [part.sum().item() for part in sizes.split(held)]
        rows = TakeRows.apply(x, order // self.k)
        rows = AllToAll.apply(rows, sends, receives, self.group)
        places = by_expert(arriving)
        rows = TakeRows.apply(rows, places)
        rows = run_experts(rows, arriving.sum(0), self.gate_up, self.down)
        rows = TakeRows.apply(rows, places.argsort())
        rows = AllToAll.apply(rows, receives, sends, self.group)
        return WeightedSum.apply(rows, weights, order)
        # end exercise


def message_bytes(choices, rank, h, itemsize):
    """A rank's (message, wire) bytes of a block's all-to-alls, forward and backward together.

    choices (P, E): how many choices of each rank's tokens fall on each expert, without dropped
    ones. message: all input of this rank's collectives; wire: the part of it that goes to
    other ranks. Sizes are int64, rows have h numbers of `itemsize` bytes. What the backward
    sends follows from where the rows went.
    """
    held = shares(choices.shape[1], len(choices))
    # exercise: bytes
    rows = torch.stack([part.sum(1) for part in choices.split(held, 1)], 1)  # (from, to)
    sent, received, stay = rows[rank].sum(), rows[:, rank].sum(), rows[rank, rank]
    sizes, row = 8 * sum(held), h * itemsize
    message = sizes + 2 * (sent + received) * row
    wire = sizes - 8 * held[rank] + 2 * (sent + received - 2 * stay) * row
    return int(message), int(wire)
    # end exercise


# ---- The lesson 5: sums over ranks ---------------------------------------------------------------


def balance_losses(logits, k, group):
    """The sum of the balance losses of this rank's tokens, from router logits [(n, E) of a layer].

    A token's loss in a layer: E times the sum over the experts of its probability (softmax)
    times the expert's share, which is the expert's choices over the tokens, both counted over
    all layers and all ranks of the group, without a gradient. A token's loss is the mean of
    its layers'. The mean over all tokens is then Hugging Face's aux_loss: k if even, up to E
    if not. One collective, of E numbers; a rank may have no tokens.
    """
    # exercise: balance
    probabilities = torch.cat(logits).softmax(-1)  # (L n, E)
    count = probabilities.shape[1]
    chosen = probabilities.topk(k, -1).indices.flatten().bincount(minlength=count)
    dist.all_reduce(chosen, group=group)
    share = k * chosen / chosen.sum().to(probabilities.dtype)
    return count * (probabilities @ share).sum() / len(logits)
    # end exercise


def average_gradients(dense, experts, tokens, everyone, replicas):
    """Turn the gradient of this rank's sum of losses into that of the mean over all ranks' tokens.

    dense: parameters that all ranks have; experts: those of this rank's experts, after a backward
    through the all-to-alls. tokens: how many this rank has. everyone: the group of all ranks;
    replicas: of those with the same experts. Changes each .grad in place; no .grad is None.
    """
    # exercise: gradients
    total = torch.tensor(tokens)
    dist.all_reduce(total, group=everyone)
    for parameters, group in (dense, everyone), (experts, replicas):
        for parameter in parameters:
            dist.all_reduce(parameter.grad, group=group)
            parameter.grad /= total
    # end exercise


# ---- The lesson 6: a model and its step ----------------------------------------------------------


def make_groups(ranks, parallel):
    """This rank's groups: (the ranks that together hold all experts, its experts' replicas).

    Ranks 0 to P - 1 (P: parallel) hold all experts, the next P again, ...
    """
    mesh = init_device_mesh("cpu", (ranks // parallel, parallel))
    return mesh.get_group(1), mesh.get_group(0)


def parallelize(model, group, factor=None):
    """Replace each block of experts of Hugging Face's model; returns [ExpertParallel]."""
    layers = [layer for layer in model.model.layers if hasattr(layer.mlp, "experts")]
    for layer in layers:
        layer.mlp = ExpertParallel(layer.mlp, group, factor)
    return [layer.mlp for layer in layers]


def train_step(model, blocks, ids, labels, coefficient, everyone, replicas):
    """Forward and backward on ids (b, s), b may be 0; returns the mean loss of all tokens.

    labels (b, s): each token's target. A token's loss is its cross entropy and `coefficient` times
    its balance loss.
    """
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    if len(ids):
        logits = model(input_ids=ids, use_cache=False).logits.flatten(0, 1)
        loss = F.cross_entropy(logits, labels.flatten(), reduction="sum")
    else:  # attention refuses an empty batch, but each all-to-all is among all ranks
        x = blocks[0].router.new_zeros(1, 0, blocks[0].router.shape[1], requires_grad=True)
        for block in blocks:
            x = block(x)
        loss = x.sum()
    gates = [block.logits for block in blocks]
    loss = loss + coefficient * balance_losses(gates, blocks[0].k, everyone)
    loss.backward()
    experts = [p for block in blocks for p in (block.gate_up, block.down)]
    others = {id(p) for p in experts}
    dense = [p for p in model.parameters() if id(p) not in others]
    average_gradients(dense, experts, ids.numel(), everyone, replicas)
    sums = torch.tensor([loss.item(), ids.numel()], dtype=torch.float64)
    dist.all_reduce(sums, group=everyone)
    return sums[0] / sums[1]


if __name__ == "__main__":  # the lab's checks and experiments, of labs/ and of my_labs/
    sys.path[:0] = [str(folder) for folder in Path(__file__).resolve().parents[1:3]]
    from labs.kit.run import main

    sys.exit(main(__file__))
