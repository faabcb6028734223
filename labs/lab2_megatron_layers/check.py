"""Lab 2's checks, each of which runs on every rank, and the bugs that they have to catch.

Values and gradients are compared with one device's, bytes with the formulas.
"""

import itertools
import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from labs.kit.compare import tried
from labs.kit.harness import Traffic, expect, expect_close
from labs.kit.tools import IN_PLACE, draw_from, expect_traffic, run_and_compare, subgroup
from labs.lab2_megatron_layers import lesson as finished  # not the learner's

SUBGROUP = True  # the group is not the world, and has other rank numbers
all_reduce, keep, split = finished.all_reduce, finished.keep, finished.split

SUM = "every rank's part goes into the sum"
MEAN = "the sum, not the mean"
MODE = "TP: ", "SP: "  # what messages begin with, by sequence_parallel
TOO_LARGE = "dy is the same on all ranks, and summed it is P times too large"


def on_groups(check):
    """The check on two of the ranks, then on all three: 3 divides no size."""

    def both(lab, group, seed):
        if group.rank() < 2:
            check(lab, subgroup(group, ranks=[0, 1]), seed)
        return check(lab, group, seed)

    return both


def tokens_of(x, group):
    """This rank's tokens of x (b, s, h): (b, s/P rounded up, h), filled up with zeros."""
    x = F.pad(x, (0, 0, 0, -x.shape[1] % group.size()))
    return x.chunk(group.size(), 1)[group.rank()].clone()


def real_tokens(length, group):
    """How many of this rank's tokens are not there to fill up."""
    share = math.ceil(length / group.size())
    return min(share, max(0, length - group.rank() * share))


def expect_parts(layer, full, parts):
    """Raise Wrong unless each parameter and gradient is its part of the full layer's, and no more.

    parts {name: slice}.
    """
    for name, part in parts.items():
        mine, right = getattr(layer, name), getattr(full, name)
        if right is None:
            expect(mine is None, f"there is a {name}, and the full layer has none")
            continue
        hint = "this rank's part of the full one, a Parameter of its own: keep()"
        expect_close(name, mine, right[part], 0, hint=hint)
        expect(mine is not right, f"{name} is the full layer's", hint)
        expect_close(f"the gradient of {name}", mine.grad, right.grad[part], hint=hint)
        held = mine.untyped_storage().nbytes()
        expect(held == mine.nbytes, f"{name} keeps {held} bytes", "a view keeps the whole")


def check_copy_to_tp_region(lab, group, seed):
    uneven, randn = draw_from(seed, group)
    x = randn(2, uneven(), uneven())
    dys = [randn(x.shape) for _ in range(group.size())]
    own = dys[group.rank()]
    hints = {"dx": {SUM: own, MEAN: sum(dys) / group.size()}}
    hints["otherwise"] = "forward x as it is, backward the sum of all ranks' gradients"
    wanted = {"y": x, "dx": sum(dys), "kept": 0}
    wanted |= {"forward": {}, "backward": {"all_reduce": x.nbytes}}
    region = lab.copy_to_tp_region
    error = run_and_compare(lambda x: region(x, group), {"x": x, "dy": own}, wanted, hints)
    return f"y is x; dx is the sum, off by {error:.0e}; {x.nbytes} bytes reduced"


def check_reduce_from_tp_region(lab, group, seed):
    uneven, randn = draw_from(seed, group)
    shape, P = (2, uneven(), uneven()), group.size()
    xs, dy = [randn(shape) for _ in range(P)], randn(shape)
    own = xs[group.rank()]
    wanted = {"y": sum(xs), "dx": dy, "kept": 0}
    wanted |= {"forward": {"all_reduce": dy.nbytes}, "backward": {}}
    hints = {"y": {SUM: own, MEAN: sum(xs) / P}, "dx": {TOO_LARGE: P * dy}}
    hints["otherwise"] = "forward the sum over the ranks, by an all-reduce; backward dy as it is"
    region = lab.reduce_from_tp_region
    error = run_and_compare(lambda x: region(x, group), {"x": own, "dy": dy}, wanted, hints)
    return f"y is the sum, off by {error:.0e}; dx is dy; {dy.nbytes} bytes reduced"


def check_gather_from_sp_region(lab, group, seed):
    uneven, randn = draw_from(seed, group)
    P, rank, n, h = group.size(), group.rank(), uneven(), uneven()  # n tokens a rank
    x, dys = randn(2, n * P, h), [randn(2, n * P, h) for _ in range(P)]
    own = slice(rank * n, (rank + 1) * n)
    wanted = {"y": x, "dx": sum(dys)[:, own], "kept": 0}
    wanted |= {"forward": {"all_gather": x.nbytes}, "backward": {"reduce_scatter": x.nbytes}}
    joined = torch.cat(x.chunk(P, 1)).reshape(x.shape)
    hints = {
        "y": {"ranks are joined along dim 0, tokens are dim 1": joined},
        "dx": {SUM: dys[rank][:, own], MEAN: wanted["dx"] / P},
        "otherwise": "all-gather along dim 1; backward reduce-scatter: own tokens of the sum",
    }
    given = {"x": x[:, own].clone(), "dy": dys[rank]}
    error = run_and_compare(lambda x: lab.gather_from_sp_region(x, group), given, wanted, hints)
    return f"all tokens; dx is summed, off by {error:.0e}; {x.nbytes} bytes each way"


def check_reduce_scatter_to_sp_region(lab, group, seed):
    uneven, randn = draw_from(seed, group)
    P, rank, h, region = group.size(), group.rank(), uneven(), lab.reduce_scatter_to_sp_region
    for length in uneven(), P * uneven():
        xs = [randn(2, length, h) for _ in range(P)]
        y, dy = tokens_of(sum(xs), group), randn(xs[0].shape)
        nbytes = P * y.nbytes  # with the zeros at the end
        sent = {"forward": {"reduce_scatter": nbytes}, "backward": {"all_gather": nbytes}}
        wanted = {"y": y, "dx": dy, **sent, "kept": 0}
        hints = {"y": {SUM: tokens_of(xs[rank], group), MEAN: y / P}, "dx": {TOO_LARGE: P * dy}}
        hints["otherwise"] = "reduce-scatter; backward all-gather: ctx.length tokens, as they are"
        given = {"x": xs[rank], "dy": tokens_of(dy, group)}
        error = run_and_compare(lambda x: region(x, group), given, wanted, hints)
    return f"own tokens of the sum, off by {error:.0e}; dx of all tokens; {nbytes} bytes each way"


def one_device(randn, tokens, features_in, features_out, bias):
    """An nn.Linear, x (2, tokens, in), y (2, tokens, out), dx, dy; the weight's is in .grad."""
    linear = nn.Linear(features_in, features_out, bias)
    for parameter in linear.parameters():
        parameter.data = randn(parameter.shape)
    x = randn(2, tokens, features_in).requires_grad_()
    y, dy = linear(x), randn(2, tokens, features_out)
    y.backward(dy)
    return linear, x.detach(), y.detach(), x.grad, dy


def check_gathered_linear(lab, group, seed):
    uneven, randn = draw_from(seed, group)
    P, rank, tokens = group.size(), group.rank(), uneven()  # tokens a rank
    linear, x, y, dx, dy = one_device(randn, tokens * P, uneven(), uneven(), True)
    start, end = split(linear.out_features, rank, P)
    weight, bias = (keep(p, 0, start, end) for p in (linear.weight, linear.bias))
    y, dy, mine = y[..., start:end], dy[..., start:end].clone(), tokens_of(x, group)
    wanted = {"y": y, "dx": tokens_of(dx, group), "forward": {"all_gather": x.nbytes}}
    wanted["backward"] = {"all_gather": x.nbytes, "reduce_scatter": x.nbytes}
    wanted["kept"] = mine.nbytes
    hints = {"dx": {SUM: tokens_of(dy @ weight.detach(), group)}}
    hints["otherwise"] = "y (with bias), dW, db: this rank's, of all tokens; dx: own of a sum"
    given, run = {"x": mine, "dy": dy}, lambda x: lab.gathered_linear(x, weight, bias, group)
    error = run_and_compare(run, given, wanted, hints, parameters=(weight, bias))
    hint = "own output features, summed over all tokens: no sum over the ranks"
    expect_close("gradient of weight", weight.grad, linear.weight.grad[start:end], hint=hint)
    expect_close("gradient of bias", bias.grad, linear.bias.grad[start:end], hint=hint)
    lab.gathered_linear(mine, weight, None, group).backward(dy)  # a layer without bias
    return f"y, dx, dW, db, off by {error:.0e}; {mine.nbytes} bytes kept of {x.nbytes}"


def check_column_parallel_linear(lab, group, seed):
    uneven, randn = draw_from(seed, group)
    P, tokens, worst = group.size(), uneven(), 0
    for parallel, bias in itertools.product([False, True], [True, False]):
        linear, x, y, dx, dy = one_device(randn, tokens, uneven(), uneven(), bias)
        start, end = split(linear.out_features, group.rank(), P)
        part, weight = slice(start, end), linear.weight.detach()
        hint = "rows split(out, rank, P) of weight and bias; x enters once, by f or g; y stays cut"
        layer = tried("it", hint, lab.ColumnParallelLinear.from_linear, linear, group, parallel)
        given = {"x": x, "dy": dy[..., part].clone()}
        wanted = {"y": y[..., part], "dx": dx, "forward": {}, "backward": {"all_reduce": x.nbytes}}
        lacking = given["dy"] @ weight[part]  # dx through this rank's part alone
        if parallel:
            given["x"], wanted["dx"], lacking = (tokens_of(t, group) for t in (x, dx, lacking))
            gathered = P * given["x"].nbytes
            wanted["forward"] = {"all_gather": gathered}
            wanted["backward"] = {"all_gather": gathered, "reduce_scatter": gathered}
        hints = {"y": {"the bias is missing": x @ weight[part].T}, "dx": {SUM: lacking}}
        hints["otherwise"] = hint
        run = partial(first_tokens, layer, tokens)
        worst = max(worst, run_and_compare(run, given, wanted, hints, MODE[parallel]))
        expect_parts(layer, linear, {"weight": part, "bias": part})
    return f"y, dx, dW, db, off by {worst:.0e}, with and without sequence parallelism, bias"


def check_row_parallel_linear(lab, group, seed):
    uneven, randn = draw_from(seed, group)
    P, rank, tokens, worst = group.size(), group.rank(), uneven(), 0
    for parallel, bias in itertools.product([False, True], [False, True]):
        linear, x, y, dx, dy = one_device(randn, tokens, uneven(), uneven(), bias)
        start, end = split(linear.in_features, rank, P)
        hint = "columns split(in, rank, P); no f; leave by g, or SP's; rank 0 adds the bias before"
        layer = tried("it", hint, lab.RowParallelLinear.from_linear, linear, group, parallel)
        given = {"x": x[..., start:end].clone(), "dy": dy}
        wanted = {"y": y, "dx": dx[..., start:end]}
        wanted |= {"forward": {"all_reduce": y.nbytes}, "backward": {}}
        count = tokens
        if parallel:
            share, count = tokens_of(y, group), real_tokens(tokens, group)
            wanted |= {"forward": {"reduce_scatter": P * share.nbytes}, "y": share[:, :count]}
            wanted |= {"backward": {"all_gather": P * share.nbytes}}
            given["dy"] = dy = tokens_of(dy, group)[:, :count]
        hints = {"dx": {TOO_LARGE: P * wanted["dx"]}, "otherwise": hint}
        if bias:
            more = (P - 1) * linear.bias.detach()
            hints["y"] = {"the bias is added on every rank": wanted["y"] + more}
        run = partial(first_tokens, layer, count)
        worst = max(worst, run_and_compare(run, given, wanted, hints, MODE[parallel]))
        if bias and layer.bias is not None:
            own = {"it saw this rank's tokens only": dy.sum((0, 1))}
            expect_close("the gradient of bias", layer.bias.grad, linear.bias.grad, hints=own)
        if rank == 0:
            expect_parts(layer, linear, {"bias": slice(None)})
        expect_parts(layer, linear, {"weight": (slice(None), slice(start, end))})
    expect(rank == 0 or layer.bias is None, "there is a bias on this rank", "only rank 0 adds it")
    return f"y, dx, dW, db, off by {worst:.0e}, with and without sequence parallelism, bias"


def first_tokens(layer, count, x):
    """layer(x) without the zeros that follow the last token."""
    return layer(x)[:, :count]


def draw_ids(randn, shape, vocab, world):
    """Token ids of that shape: at first those at the edges of every rank's range, then any."""
    ids = randn(shape).abs().mul(vocab).long() % vocab
    edges = [edge for rank in range(world) for edge in split(vocab, rank, world)]
    ids.view(-1)[: 2 * world] = torch.tensor(edges) - torch.tensor([0, 1] * world)
    return ids


def run_with_weight(layer, ids, weight):
    return functional_call(layer, {"weight": weight}, ids)


def check_vocab_parallel_embedding(lab, group, seed):
    uneven, randn = draw_from(seed, group)
    P, rank, tokens, vocab, h = group.size(), group.rank(), uneven(), uneven(), uneven()
    ids, worst = draw_ids(randn, (2, tokens), vocab, P), 0
    start, end = split(vocab, rank, P)
    elsewhere = (ids < start) | (ids >= end)
    for parallel, pad in itertools.product([False, True], [None, split(vocab, P - 1, P)[0]]):
        embedding = nn.Embedding(vocab, h, pad, _weight=randn(vocab, h))
        y, dy = embedding(ids), randn(2, tokens, h)
        y.backward(dy)
        y, full = y.detach(), dy
        layer = lab.VocabParallelEmbedding.from_embedding(embedding, group, parallel)
        weight = embedding.weight.detach()
        nearest = weight[ids.clamp(start, end - 1)].masked_fill(~elsewhere[..., None], 0)
        clamped = y + all_reduce(nearest, group)
        hints = {"a token of another rank's rows adds zeros: clamping is no mask": clamped}
        wanted = {"y": y, "forward": {"all_reduce": y.nbytes}, "backward": {}}
        if parallel:
            hints = {text: tokens_of(t, group) for text, t in hints.items()}
            dy, wanted["y"] = tokens_of(dy, group), tokens_of(y, group)
            nbytes = P * dy.nbytes
            wanted |= {"forward": {"reduce_scatter": nbytes}, "backward": {"all_gather": nbytes}}
        padded = torch.zeros_like(weight).index_add_(0, ids.flatten(), full.flatten(0, 1))
        learned = {"the row of padding_idx has no gradient": padded[start:end]}
        wanted["dx"], mine = embedding.weight.grad[start:end], ids.clone()
        run = partial(run_with_weight, layer, mine)
        given, hints = {"x": layer.weight.detach(), "dy": dy}, {"y": hints, "dx": learned}
        hints["otherwise"] = "row id - start, zero outside [start, end); leave by g, or SP's"
        worst = max(worst, run_and_compare(run, given, wanted, hints, MODE[parallel]))
        expect(torch.equal(ids, mine), "the ids are overwritten", IN_PLACE)
    return f"y, dW, off by {worst:.0e}, with and without sequence parallelism, padding row"


def draw_logits(randn, uneven, group):
    """Logits (2, s, v), targets (2, s), some ignored (-100), and this rank's range: start, end."""
    tokens, vocab = uneven(), uneven()
    logits = 3 * randn(2, tokens, vocab) + 200 * randn(2, tokens, 1)  # exp() of it is not finite
    target = draw_ids(randn, (2, tokens), vocab, group.size())
    target[-1, -2:] = -100
    return logits.float(), target, *split(vocab, group.rank(), group.size())


def check_cross_entropy_forward(lab, group, seed):
    uneven, randn = draw_from(seed, group)
    logits, target, start, end = draw_logits(randn, uneven, group)
    vocab, P, worst = logits.shape[-1], group.size(), 0
    ignore_first = target.masked_fill(target == -100, 0)  # with ignore_index=0
    cases = (0.0, -100, target), (0.1, -100, target), (0.3, 0, ignore_first)
    for smoothing, ignore, wanted in cases:
        x = logits.clone()
        if not smoothing:  # a padded vocabulary has logits of minus infinity
            x[..., vocab // 2].masked_fill_(wanted != vocab // 2, -torch.inf)
        right = one_device_loss(x, wanted, smoothing, ignore)
        shard = x[..., start:end].clone()
        hint = "column is the target's in this rank's logits: target - start, or 0 where elsewhere"
        loss = partial(lab.vocab_parallel_cross_entropy, shard, wanted, group, smoothing, ignore)
        with Traffic() as traffic:
            mine = tried("the loss", hint, loss)
        hint = "take the peak of all ranks off before exp(); 0 times minus infinity is no number"
        expect(mine.isfinite().all(), "the loss is not finite", hint)
        hints = usual_losses(x - x.amax(-1, keepdim=True), wanted, smoothing, ignore, group)
        hint = "wanted: all ranks' q (x - peak); q = 1 - smoothing at the target, + smoothing / v"
        worst = max(worst, expect_close("the loss", mine, right, hints=hints, hint=hint))
        expect(torch.equal(shard, x[..., start:end]), "the logits are overwritten", IN_PLACE)
        most, hint = {"all_reduce": 3 * right.nbytes + 8 * P}, "three numbers a token"
        expect_traffic("forward", traffic, most, hint)  # and P widths
    return f"off by {worst:.0e}, smoothed or not; 3 numbers a token sent, not {vocab}"


def one_device_loss(logits, target, smoothing, ignore):
    """torch's loss of each token, from logits (b, s, v)."""
    options = {"label_smoothing": smoothing, "ignore_index": ignore, "reduction": "none"}
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), **options).view_as(target)


def usual_losses(logits, target, smoothing, ignore, group):
    """{hint: the loss of that mistake}, from all logits (b, s, v), their peak taken off."""
    P, vocab = group.size(), logits.shape[-1]
    shards = [logits[..., slice(*split(vocab, rank, P))] for rank in range(P)]
    own_peaks = torch.cat([shard - shard.amax(-1, keepdim=True) for shard in shards], -1)
    right = one_device_loss(logits, target, smoothing, ignore)
    lacking = logits.logsumexp(-1) - shards[group.rank()].logsumexp(-1)
    own_softmax = (right - lacking).masked_fill(target == ignore, 0)
    return {
        "the softmax is over this rank's logits only": own_softmax,
        "the peak is that of all ranks": one_device_loss(own_peaks, target, smoothing, ignore),
    }


def usual_gradients(logits, target, smoothing, start, end):
    """{hint: d loss / d logits of that mistake}, (b, s, end - start), of a loss of each token."""
    vocab, here = logits.shape[-1], (target >= start) & (target < end)
    softmax = logits.softmax(-1)[..., start:end]
    column = (target - start).masked_fill(~here, 0)[..., None]
    hit = torch.zeros_like(softmax).scatter_(-1, column, 1)  # column 0 where it is another rank's
    own, even = hit * here[..., None], smoothing / vocab
    q, all_hits = ((1 - smoothing) * ones + even for ones in (own, hit))
    return {
        "only the rank that holds the target takes q off there": softmax - all_hits,
        "q is smoothed in the backward too": softmax - own,
        "the softmax is over this rank's logits only": logits[..., start:end].softmax(-1) - q,
    }


def check_cross_entropy_backward(lab, group, seed):
    uneven, randn = draw_from(seed, group)
    logits, target, start, end = draw_logits(randn, uneven, group)
    worst = 0
    for smoothing in 0.0, 0.1:
        dy, x = randn(target.shape).float(), logits.clone().requires_grad_()
        y = one_device_loss(x, target, smoothing, -100)
        y.backward(dy)
        scale = dy.masked_fill(target == -100, 0)[..., None]
        gradients = usual_gradients(logits, target, smoothing, start, end)
        hints = {hint: gradient * scale for hint, gradient in gradients.items()}
        wanted = {"y": y.detach(), "dx": x.grad[..., start:end], "backward": {}}
        wanted["forward"] = {"all_reduce": 3 * y.nbytes + 8 * group.size()}
        given = {"x": logits[..., start:end].clone(), "dy": dy}
        how = {"target": target, "group": group, "label_smoothing": smoothing}
        loss = partial(lab.vocab_parallel_cross_entropy, **how)
        hint = (
            "(softmax - q) times each token's grad; q: 1 - smoothing at the target, + smoothing / v"
        )
        hints = {"dx": hints, "otherwise": hint}
        worst = max(worst, run_and_compare(loss, given, wanted, hints))
    return f"d loss / d logits, off by {worst:.0e}, smoothed or not; nothing sent"


CHECKS = {
    name.removeprefix("check_"): (on_groups(check), 3)
    for name, check in list(globals().items())
    if name.startswith("check_")
}


# Bugs for --inject-bug: the checks have to catch every one


def no_backward_all_reduce(lab):
    """copy_to_tp_region does nothing: its backward passes each rank's own dx on."""
    lab.copy_to_tp_region = lambda x, group: x


def scatter_by_all_reduce(lab):
    """reduce_scatter_to_sp_region all-reduces and drops the others' tokens: all values right."""
    lab.reduce_scatter = lambda x, group: tokens_of(all_reduce(x, group), group)


def unmasked_embedding(lab):
    """A token of another rank's rows adds this rank's first row."""

    def forward(self, ids):
        rows = (ids - self.start) * ((ids >= self.start) & (ids < self.end))
        return lab.reduce_from_tp_region(F.embedding(rows, self.weight), self.group)

    lab.VocabParallelEmbedding.forward = forward


BUGS = [no_backward_all_reduce, scatter_by_all_reduce, unmasked_embedding]
