"""Lab 17. Muon: an optimizer that needs whole matrices.

Question: AdamW updates each number by itself, so if its state is sharded (ZeRO, tensor
parallelism), no rank needs another's. Muon makes all singular values of a matrix nearly 1. A
shard's are not the matrix's. What has to be sent, who computes, and what does it cost?

Idea: for a matrix's averaged gradient G = U S V^T Muon subtracts U V^T, times the learning
rate, so large and small in G count alike. Newton-Schulz needs no singular vectors for it, only
products: X = G / |G|, five times X = (a + b A + c A A) X with A = X X^T. Each takes a singular
value s to a s + b s^3 + c s^5; in the end all are about 0.7 to 1.2. A needs all rows:

    G = [2 1]    whole     [1 0]    row by row    [0.9 0.4]      each on its own rank:
        [1 2]              [0 1]                  [0.4 0.9]      another direction

Momentum is again kept number by number, so it stays sharded. There are three ways to join the
shards of N matrices; rank r has sizes[r] rows (or columns) of one, and sizes differ:

    way          sent                                              a rank orthogonalizes
    everywhere   N all-gathers                                     all N matrices, as do all others
    by owner     N gathers to a matrix's owner, N scatters back    its own
    at once      2 all-to-alls, of all matrices together           its own

Owners are chosen by work: the most expensive matrix first, each to the rank with the least so far.
AdamW updates all but the layers' matrices (norms, biases, embedding, head), in any shard.

    ZeRO-1    gradients -- reduce-scatter --> own rows --> momentum --> a way --> own rows updated
              own rows -- all-gather --> parameters of all ranks
    TP        own rows or columns, with their whole gradient --> the same, and nothing to gather

    python labs/lab17_muon/lesson.py --plot lab17.png  # checks and experiments
    python labs/lab17_muon/lesson.py --predict 10      # first your guess; see the end
    python labs/lab17_muon/lesson.py --ranks 2         # no size has to divide another
    python labs/grade.py start lab17                   # writes my_labs/lab17_muon.py

Sources: Muon, kellerjordan.github.io/posts/muon; on many ranks, arXiv 2502.16982; torch.optim.Muon.
Megatron-LM's pull request 6683: its modes duplicated and layer_sharded are the first and third way.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

COEFFICIENTS = 3.4445, -4.7750, 2.0315  # a, b, c
ITERATIONS = 5
TINY = 1e-7  # the least that |G| counts as: a gradient may be 0


# Copied from tp.py
def shard_range(n, rank, world):
    """[start, end): a rank's share of n things. The first n % world ranks have one more."""
    base, extra = divmod(n, world)
    return rank * base + min(rank, extra), (rank + 1) * base + min(rank + 1, extra)


# ---- The lesson 1: one matrix --------------------------------------------------------------------


def newton_schulz(matrix, dtype):
    """A matrix (m, n) with its singular values taken to about 1, computed in dtype.

    X = matrix / max(|matrix|, TINY), |matrix| being the root of the sum of squares. ITERATIONS
    times: A = X X^T, X = a X + (b A + c A A) X. A matrix with more rows than columns is
    transposed before and after, which keeps A small. The result has the matrix's own dtype.
    """
    # exercise: newton_schulz
    a, b, c = COEFFICIENTS
    tall = matrix.shape[0] > matrix.shape[1]
    x = (matrix.mT if tall else matrix).to(dtype)
    x = x / x.norm().clamp(min=TINY)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).to(matrix.dtype)
    # end exercise


def orthogonalize(update, blocks, dtype):
    """What Muon subtracts, times the learning rate, from a whole matrix for an update (m, n).

    Cut the rows into `blocks` blocks of m / blocks rows. Take each block by itself through
    newton_schulz(), and multiply it by the root of (its rows / n) if that is more than 1.
    """
    # exercise: blocks
    cut = update.chunk(blocks)
    factor = max(1, cut[0].shape[0] / cut[0].shape[1]) ** 0.5
    return torch.cat([factor * newton_schulz(block, dtype) for block in cut])
    # end exercise


def choose(model, per_head):
    """{name: blocks} of Muon's parameters in a whole Hugging Face model, not yet sharded.

    Muon's are the layers' matrices (q_proj to down_proj), not what is 1-D, not embedding and
    head. blocks is 1; but if per_head, it is model.config's num_attention_heads for q_proj,
    and num_key_value_heads for k_proj and v_proj.
    """
    # exercise: choose
    queries, kv = model.config.num_attention_heads, model.config.num_key_value_heads
    heads = {"q_proj": queries, "k_proj": kv, "v_proj": kv} if per_head else {}
    layers = model.model.layers.named_parameters(prefix="model.layers")
    return {name: heads.get(name.split(".")[-2], 1) for name, p in layers if p.ndim == 2}
    # end exercise


# ---- The lesson 2: what it costs, and who does it ------------------------------------------------


def flops(shape, blocks):
    """Floating point operations of the products in orthogonalize() for a shape (m, n).

    A product of (i, j) and (j, k) has 2 i j k.
    """
    # exercise: flops
    short, long = sorted([shape[0] // blocks, shape[1]])
    products = 2 * short * short * long, 2 * short**3, 2 * short * short * long
    return blocks * ITERATIONS * sum(products)
    # end exercise


def owners(costs, world):
    """[the rank that owns each matrix], for the costs of all matrices.

    The most expensive matrix goes first, each to the rank whose matrices cost least so far. Of
    equals (matrices, ranks) the lower number comes first.
    """
    # exercise: owners
    load, owner = [0] * world, [0] * len(costs)
    for i in sorted(range(len(costs)), key=costs.__getitem__, reverse=True):
        owner[i] = min(range(world), key=load.__getitem__)
        load[owner[i]] += costs[i]
    return owner
    # end exercise


@dataclass
class Matrix:
    """A parameter of Muon's; each rank of a group has some of its rows or columns, or none."""

    own: nn.Parameter  # this rank's part; before a step, .grad is this part of one device's
    momentum: torch.Tensor  # of the same shape, 0 at first
    dim: int  # 0: rows are dealt out, 1: columns
    sizes: list  # how many of them each rank has
    blocks: int  # see orthogonalize()
    owner: int = 0

    @property
    def shape(self):
        """(m, n) of the whole matrix."""
        shape = list(self.own.shape)
        shape[self.dim] = sum(self.sizes)
        return tuple(shape)

    def part_shape(self, rank):
        """The shape of a rank's part."""
        shape = list(self.own.shape)
        shape[self.dim] = self.sizes[rank]
        return tuple(shape)

    def padded(self, part):
        """A part with zeros behind it, up to the largest part's number of rows (columns)."""
        missing = max(self.sizes) - part.shape[self.dim]
        edges = (0, missing) if self.dim else (0, 0, 0, missing)
        return F.pad(part, edges).contiguous()

    def joined(self, parts):
        """The whole matrix from all ranks' parts; each part may have padding behind it."""
        parts = [part.narrow(self.dim, 0, size) for part, size in zip(parts, self.sizes)]
        return torch.cat(parts, self.dim)

    def cut(self, whole):
        """[each rank's part of a whole matrix]"""
        return whole.split(self.sizes, self.dim)


def make_matrices(own, chosen, group):
    """[Matrix] of the chosen parameters. own {name: (this rank's part, dim)}, chosen: choose()."""
    found, everyones = [], [None] * group.size()
    mine = {name: own[name][0].shape[own[name][1]] for name in chosen}
    dist.all_gather_object(everyones, mine, group=group)
    for name, blocks in chosen.items():
        part, dim = own[name]
        sizes = [theirs[name] for theirs in everyones]
        found.append(Matrix(part, torch.zeros_like(part), dim, sizes, blocks))
    costs = [flops(matrix.shape, matrix.blocks) for matrix in found]
    for matrix, owner in zip(found, owners(costs, group.size())):
        matrix.owner = owner
    return found


# ---- The lesson 3: three ways to orthogonalize what is sharded -----------------------------------

# parts: this rank's part of each matrix's update; each way returns them orthogonalized.


def everywhere(parts, matrices, group, dtype):
    """One all-gather a matrix, of padded parts; then every rank has all, and takes its part.

    Return parts as tensors of their own: a view would keep its whole matrix alive.
    """
    rank, found = group.rank(), []
    for part, matrix in zip(parts, matrices):
        # exercise: everywhere
        mine = matrix.padded(part)
        gathered = [torch.empty_like(mine) for _ in matrix.sizes]
        dist.all_gather(gathered, mine, group=group)
        whole = orthogonalize(matrix.joined(gathered), matrix.blocks, dtype)
        found.append(matrix.cut(whole)[rank].clone())
        # end exercise
    return found


def by_owner(parts, matrices, group, dtype):
    """dist.gather() the padded parts of each matrix to its owner, dist.scatter() them back, padded.

    First all gathers, then the own matrices, then all scatters, so owners compute together.
    The owner is group_dst and group_src; dst and src would count ranks in the whole job.
    """
    rank = group.rank()
    # exercise: by_owner
    wholes = {}
    for i, (part, matrix) in enumerate(zip(parts, matrices)):
        mine = matrix.padded(part)
        gathered = [torch.empty_like(mine) for _ in matrix.sizes] if rank == matrix.owner else None
        dist.gather(mine, gathered, group=group, group_dst=matrix.owner)
        if gathered:
            wholes[i] = matrix.joined(gathered)
    for i, whole in wholes.items():
        wholes[i] = orthogonalize(whole, matrices[i].blocks, dtype)
    found = []
    for i, (part, matrix) in enumerate(zip(parts, matrices)):
        back = torch.empty_like(matrix.padded(part))
        pieces = [matrix.padded(x) for x in matrix.cut(wholes[i])] if i in wholes else None
        dist.scatter(back, pieces, group=group, group_src=matrix.owner)
        found.append(back.narrow(matrix.dim, 0, matrix.sizes[rank]))
    return found
    # end exercise


def exchange(sends, receives, like, group):
    """One all-to-all: the tensors in list sends[r] go to rank r; returns lists of what comes.

    receives[r]: the shapes of the tensors that come from rank r, in their order. like: a tensor of
    their dtype. A list may be empty.
    """
    nothing = like.new_empty(0)
    going = [torch.cat([nothing, *(x.flatten() for x in tensors)]) for tensors in sends]
    numbers = [[shape[0] * shape[1] for shape in shapes] for shapes in receives]
    counts = [sum(each) for each in numbers]
    coming = like.new_empty(sum(counts))
    dist.all_to_all_single(coming, torch.cat(going), counts, [*map(len, going)], group=group)
    found = []
    for flat, each, shapes in zip(coming.split(counts), numbers, receives):
        found.append([piece.view(shape) for piece, shape in zip(flat.split(each), shapes)])
    return found


def at_once(parts, matrices, group, dtype):
    """exchange() all parts to the owners, orthogonalize own matrices, exchange() parts back.

    There are two messages a step, however many matrices there are. Nothing is padded.
    """
    rank, ranks = group.rank(), range(group.size())
    # exercise: at_once
    owned = [[i for i, matrix in enumerate(matrices) if matrix.owner == r] for r in ranks]
    mine = [matrices[i] for i in owned[rank]]
    sends = [[parts[i] for i in indices] for indices in owned]
    receives = [[matrix.part_shape(r) for matrix in mine] for r in ranks]
    came = exchange(sends, receives, parts[0], group)
    wholes = [matrix.joined(pieces) for matrix, *pieces in zip(mine, *came)]
    wholes = [orthogonalize(x, matrix.blocks, dtype) for x, matrix in zip(wholes, mine)]
    pieces = [matrix.cut(whole) for matrix, whole in zip(mine, wholes)]
    sends = [[cut[r] for cut in pieces] for r in ranks]
    receives = [[matrices[i].part_shape(rank) for i in indices] for indices in owned]
    came = exchange(sends, receives, parts[0], group)
    back = {i: x for indices, tensors in zip(owned, came) for i, x in zip(indices, tensors)}
    return [back[i] for i in range(len(parts))]
    # end exercise


def message_bytes(matrices, rank, way, width):
    """{collective: bytes of a rank's messages in a step} of a way; width: bytes of a number.

    everywhere: "all_gather", all that comes, padded. by_owner: "gather" (at the owner all that
    comes, elsewhere what goes) and "scatter" (at the owner all that goes, elsewhere what comes),
    padded. at_once: "all_to_all", all input, there and back, even what stays on the rank.
    """
    # exercise: bytes
    padded = in_and_out = alone = 0
    for matrix in matrices:
        largest = max(matrix.sizes) * matrix.shape[1 - matrix.dim] * width
        padded += largest * len(matrix.sizes)
        in_and_out += matrix.own.numel() * width
        if matrix.owner == rank:
            alone += largest * len(matrix.sizes)
            in_and_out += matrix.shape[0] * matrix.shape[1] * width
        else:
            alone += largest
    if way == "everywhere":
        return {"all_gather": padded}
    if way == "by_owner":
        return {"gather": alone, "scatter": alone}
    return {"all_to_all": in_and_out}
    # end exercise


WAYS = {"everywhere": everywhere, "by_owner": by_owner, "at_once": at_once}


# ---- The lesson 4: a step ------------------------------------------------------------------------


@torch.no_grad()
def step(matrices, way, group, lr, decay=0.1, beta=0.95, dtype=torch.bfloat16):
    """Muon's step on what this rank has. Only way() needs other ranks.

    momentum becomes beta momentum + (1 - beta) gradient. The update is the same sum once more, of
    the new momentum and the gradient (Nesterov). own becomes (1 - lr decay) own - lr (way() of
    all updates). momentum and own change in place.
    """
    # exercise: step
    for matrix in matrices:
        matrix.momentum.lerp_(matrix.own.grad, 1 - beta)
    parts = [matrix.own.grad.lerp(matrix.momentum, beta) for matrix in matrices]
    for matrix, update in zip(matrices, way(parts, matrices, group, dtype)):
        matrix.own.mul_(1 - lr * decay).sub_(update, alpha=lr)
    # end exercise


class Zero1:
    """A model; a rank updates its own rows of each parameter (its numbers, if 1-D), and has
    momentum and AdamW's averages of these alone.

    Lab 9 cuts one flat vector; here every rank has rows of every matrix, as with fully_shard. own
    {name: (Parameter, 0)}, which shares memory with the model's.
    """

    def __init__(self, model, group):
        self.model, self.group = model, group
        self.own = {}
        for name, p in model.named_parameters():
            start, end = shard_range(len(p), group.rank(), group.size())
            self.own[name] = nn.Parameter(p.detach()[start:end]), 0

    def by_rank(self, tensors):
        """(P, c): the rows of each rank, of all tensors, one after the other; zeros behind."""
        world = self.group.size()
        flats = []
        for rank in range(world):
            rows = [t[slice(*shard_range(len(t), rank, world))].flatten() for t in tensors]
            flats.append(torch.cat(rows))
        return nn.utils.rnn.pad_sequence(flats, batch_first=True)

    def reduce(self):
        """After the backward: own's .grad are means over the ranks. One reduce-scatter."""
        world, rank = self.group.size(), self.group.rank()
        flats = self.by_rank([p.grad for p in self.model.parameters()])
        mine = torch.empty_like(flats[rank])
        dist.reduce_scatter_tensor(mine, flats.flatten(), group=self.group)
        for part, _ in self.own.values():
            part.grad = (mine[: part.numel()] / world).view(part.shape)
            mine = mine[part.numel() :]
        self.model.zero_grad()

    def publish(self):
        """After the step: gather all ranks' rows into the parameters. One all-gather."""
        world = self.group.size()
        flats = self.by_rank([p.detach() for p in self.model.parameters()])
        mine = flats[self.group.rank()].clone()
        dist.all_gather_into_tensor(flats.view(-1), mine, group=self.group)
        for rank, flat in enumerate(flats):
            for p in self.model.parameters():
                rows = p.detach()[slice(*shard_range(len(p), rank, world))]
                rows.copy_(flat[: rows.numel()].view(rows.shape))
                flat = flat[rows.numel() :]


def make_optimizers(own, chosen, group, lr):
    """([Matrix], AdamW of all else) of what this rank has, own {name: (Parameter, dim)}."""
    rest = [part for name, (part, _) in own.items() if name not in chosen]
    return make_matrices(own, chosen, group), torch.optim.AdamW(rest, lr=lr, foreach=False)


def tensor_parallel(model):
    """own of a model that tp.py has sharded: its shards have .shard, (dim, start, end).

    With more ranks than KV heads some have the same rows of k, v, which would be joined twice.
    """
    return {name: (p, getattr(p, "shard", (0,))[0]) for name, p in model.named_parameters()}


def loss_of(model, ids):
    """The mean cross entropy of sequences ids (b, s): each token predicts the next."""
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def train_step(zero, matrices, adamw, way, ids, **how):
    """A step of ZeRO-1 on ids (b, s), equally many on each rank. how: options of step().

    Returns the rank's mean loss.
    """
    loss = loss_of(zero.model, ids)
    loss.backward()
    zero.reduce()
    step(matrices, way, zero.group, **how)
    adamw.step()
    zero.publish()
    return loss.detach()


if __name__ == "__main__":  # the lab's checks and experiments, of labs/ and of my_labs/
    sys.path[:0] = [str(folder) for folder in Path(__file__).resolve().parents[1:3]]
    from labs.kit.run import main

    sys.exit(main(__file__))
