"""Lab 2's exercises: their cases. mistakes.txt has the wrong answers.

Values and gradients are one device's; bytes, and what the backward keeps, are the finished lab's.
"""

import itertools
import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from labs.kit.eye import Most
from labs.kit.inputs import draw_from
from labs.kit.judge import checks
from labs.lab2_megatron_layers import lesson as finished  # not the learner's

SUBGROUP = True  # the group is not the world, and has other rank numbers
GROUPS = [0, 1, 2], [0, 1]  # 3 divides no size
shard_range = finished.shard_range
DX, MODE = "the gradient of x", ("TP", "SP")


def tokens_of(x, group):
    """This rank's tokens of x (b, s, h): (b, s/P rounded up, h), filled up with zeros."""
    x = F.pad(x, (0, 0, 0, -x.shape[1] % group.size()))
    return x.chunk(group.size(), 1)[group.rank()].clone()


def real_tokens(length, group):
    """How many of this rank's tokens are not there to fill up."""
    share = math.ceil(length / group.size())
    return min(share, max(0, length - group.rank() * share))


# ---- f, g, and those of sequence parallelism -----------------------------------------------------


def region(name, group, x, y, dy, dx):
    """A case: a region's x on this rank, and what y, and by dy the gradient of x, should be."""
    given = {"x": x.clone().requires_grad_(), "group": group}
    return name, (name, given, "y", [dy], {}, True), {"y": y, DX: dx}


def copy_to_tp_region(group, seed):
    uneven, randn = draw_from(seed, group)
    x = randn(2, uneven(), uneven())
    dys = [randn(x.shape) for _ in range(group.size())]
    yield region("copy_to_tp_region", group, x, x, dys[group.rank()], sum(dys))


def reduce_from_tp_region(group, seed):
    uneven, randn = draw_from(seed, group)
    shape = 2, uneven(), uneven()
    xs, dy = [randn(shape) for _ in range(group.size())], randn(shape)
    yield region("reduce_from_tp_region", group, xs[group.rank()], sum(xs), dy, dy)


def gather_from_sp_region(group, seed):
    uneven, randn = draw_from(seed, group)
    P, rank, n, h = group.size(), group.rank(), uneven(), uneven()  # n tokens a rank
    x, dys = randn(2, n * P, h), [randn(2, n * P, h) for _ in range(P)]
    mine = tokens_of(x, group), x, dys[rank], tokens_of(sum(dys), group)
    yield region("gather_from_sp_region", group, *mine)


def reduce_scatter_to_sp_region(group, seed):
    uneven, randn = draw_from(seed, group)
    h = uneven()
    for length in uneven(), group.size() * uneven():
        xs, dy = [randn(2, length, h) for _ in range(group.size())], randn(2, length, h)
        mine = xs[group.rank()], tokens_of(sum(xs), group), tokens_of(dy, group), dy
        yield region("reduce_scatter_to_sp_region", group, *mine)


# ---- Linear layers -------------------------------------------------------------------------------


def one_device(randn, tokens, features_in, features_out, bias):
    """An nn.Linear, x (2, tokens, in), y (2, tokens, out), dx, dy; the weight's is in .grad."""
    linear = nn.Linear(features_in, features_out, bias)
    for parameter in linear.parameters():
        parameter.data = randn(parameter.shape)
    x = randn(2, tokens, features_in).requires_grad_()
    y, dy = linear(x), randn(2, tokens, features_out)
    y.backward(dy)
    return linear, x.detach(), y.detach(), x.grad, dy


def gathered_linear(group, seed):
    uneven, randn = draw_from(seed, group)
    tokens, sizes = uneven(), (uneven(), uneven())
    for bias in True, False:
        linear, x, y, dx, dy = one_device(randn, tokens * group.size(), *sizes, bias)
        own = slice(*shard_range(linear.out_features, group.rank(), group.size()))
        given = {"x": tokens_of(x, group).requires_grad_()}
        right = {"y": y[..., own], DX: tokens_of(dx, group)}
        for name in "weight", "bias":
            full = getattr(linear, name)
            given[name] = full if full is None else full.detach()[own].clone().requires_grad_()
            right |= {} if full is None else {f"the gradient of {name}": full.grad[own]}
        given["group"] = group
        call = given, "y", [dy[..., own].clone()], {}, True
        yield "with a bias" if bias else "without one", ("gathered_linear", *call), right


def see_layer(kind, full, group, parallel, count, x, dy, lab, eye):
    """A layer made of the full one, its parts, and a forward and backward of `count` tokens."""
    made_from = "from_embedding" if x.dtype == torch.int64 else "from_linear"
    layer = getattr(getattr(lab, kind), made_from)(full, group, parallel)
    parameters = dict(layer.named_parameters())
    for name, mine in parameters.items():
        eye.note(name, mine)
        eye.note(f"{name}'s memory, in bytes,", Most(mine.untyped_storage().nbytes()))
        eye.note(f"{name} is the full layer's", mine is getattr(full, name))
    layer(x.detach().flip(1))  # of which nothing may be left
    eye.call(lambda x: layer(x)[:, :count], {"x": x}, "y", [dy], parameters)
    eye.note("the list of its parameters", [*parameters])


def parts_of(full, parts):
    """{name: what a rank has of a full layer's parameters and gradients}; parts {name: slice}."""
    there = {name: p for name, p in full.named_parameters() if name in parts}
    right = {name: p.detach()[parts[name]] for name, p in there.items()}
    return right | {f"the gradient of {n}": p.grad[parts[n]] for n, p in there.items()}


def column_parallel_linear(group, seed):
    uneven, randn = draw_from(seed, group)
    tokens = uneven()
    for parallel, bias in itertools.product([False, True], [True, False]):
        linear, x, y, dx, dy = one_device(randn, tokens, uneven(), uneven(), bias)
        own = slice(*shard_range(linear.out_features, group.rank(), group.size()))
        x, dx = (tokens_of(t, group) if parallel else t for t in (x, dx))
        right = {"y": y[..., own], DX: dx, **parts_of(linear, {"weight": own, "bias": own})}
        how = linear, group, parallel, tokens, x.requires_grad_(), dy[..., own].clone()
        yield MODE[parallel], partial(see_layer, "ColumnParallelLinear", *how), right


def row_parallel_linear(group, seed):
    uneven, randn = draw_from(seed, group)
    tokens = uneven()
    for parallel, bias in itertools.product([False, True], [False, True]):
        linear, x, y, dx, dy = one_device(randn, tokens, uneven(), uneven(), bias)
        own = slice(*shard_range(linear.in_features, group.rank(), group.size()))
        count = real_tokens(tokens, group) if parallel else tokens
        y, dy = (tokens_of(t, group)[:, :count] if parallel else t for t in (y, dy))
        parts = {"weight": (slice(None), own)} | ({} if group.rank() else {"bias": slice(None)})
        right = {"y": y, DX: dx[..., own], **parts_of(linear, parts)}
        how = linear, group, parallel, count, x[..., own].clone().requires_grad_(), dy
        yield MODE[parallel], partial(see_layer, "RowParallelLinear", *how), right


# ---- The vocabulary ------------------------------------------------------------------------------


def draw_ids(randn, shape, vocab, world):
    """Token ids of that shape: at first those at the edges of every rank's range, then any."""
    ids = randn(shape).abs().mul(vocab).long() % vocab
    edges = [edge for rank in range(world) for edge in shard_range(vocab, rank, world)]
    ids.view(-1)[: 2 * world] = torch.tensor(edges) - torch.tensor([0, 1] * world)
    return ids


def vocab_parallel_embedding(group, seed):
    uneven, randn = draw_from(seed, group)
    P, tokens, h = group.size(), uneven(), uneven()
    for vocab, parallel in itertools.product([17, 19], [False, True]):  # 3 leaves 2, and 1
        ids = draw_ids(randn, (2, tokens), vocab, P)
        own = slice(*shard_range(vocab, group.rank(), P))
        for pad in None, shard_range(vocab, P - 1, P)[0]:
            embedding = nn.Embedding(vocab, h, pad, _weight=randn(vocab, h))
            y, dy = embedding(ids), randn(2, tokens, h)
            y.backward(dy)
            y, dy = (tokens_of(t, group) if parallel else t for t in (y.detach(), dy))
            right = {"y": y, **parts_of(embedding, {"weight": own})}
            how = embedding, group, parallel, tokens, ids, dy
            yield MODE[parallel], partial(see_layer, "VocabParallelEmbedding", *how), right


def cross_entropy(group, seed, cases, backward=False):
    """Logits (2, s, v) or (2 s, v), some of minus infinity; targets, some of them ignored.

    cases: (smoothing, ignore_index, dtype of the logits, dimensions of the targets).
    """
    uneven, randn = draw_from(seed, group)
    tokens, vocab = uneven(), uneven()
    logits = 3 * randn(2, tokens, vocab) + 200 * randn(2, tokens, 1)  # exp() of it is not finite
    target = draw_ids(randn, (2, tokens), vocab, group.size())
    target[-1, -2:] = -100
    own = slice(*shard_range(vocab, group.rank(), group.size()))
    for smoothing, ignore, dtype, dimensions in cases:
        x, wanted = logits.to(dtype, copy=True), target.masked_fill(target == -100, ignore)
        if not smoothing and not backward:  # a padded vocabulary has logits of minus infinity
            x[..., vocab // 2].masked_fill_(wanted != vocab // 2, -torch.inf)
        if dimensions == 1:
            x, wanted = x.flatten(0, 1), wanted.flatten()
        full, dy = x.detach().float().requires_grad_(), randn(wanted.shape).float()
        how = {"label_smoothing": smoothing, "ignore_index": ignore}
        y = F.cross_entropy(full.movedim(-1, 1), wanted, **how, reduction="none")
        y.backward(dy)
        right = {"the loss": y.detach()} | ({DX: full.grad[..., own]} if backward else {})
        given = {"x": x[..., own].clone().requires_grad_(backward), "target": wanted}
        call = given | {"group": group} | how, "the loss", [dy]
        title = f"logits {tuple(x.shape)}, {x.dtype}, smoothing {smoothing}"
        yield title, ("vocab_parallel_cross_entropy", *call), right


def cross_entropy_forward(group, seed):
    cases = (0.0, -100, torch.float32, 2), (0.1, -100, torch.float32, 1)
    return cross_entropy(group, seed, (*cases, (0.3, 0, torch.bfloat16, 2)))


def cross_entropy_backward(group, seed):
    cases = (0.0, -100, torch.float32, 2), (0.1, -100, torch.float32, 1)
    return cross_entropy(group, seed, cases, backward=True)


EACH = [copy_to_tp_region, reduce_from_tp_region, gather_from_sp_region]
EACH += [reduce_scatter_to_sp_region, gathered_linear, column_parallel_linear]
EACH += [row_parallel_linear, vocab_parallel_embedding]
EACH += [cross_entropy_forward, cross_entropy_backward]
EXERCISES = {cases.__name__: (cases, 3, GROUPS) for cases in EACH}
CHECKS, BUGS = checks(EXERCISES, finished, 1e-5)
