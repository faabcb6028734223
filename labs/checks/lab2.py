"""Lab 2's checks, each of which runs on every rank, and the bugs that they have to catch.

Values and gradients are compared with one device's, bytes with the formulas.
"""

import itertools
import math
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import LABS, Traffic, expect, expect_close, load
from torch import nn
from torch.func import functional_call

finished = load(LABS / "lab2_megatron_layers.py")  # not the learner's
all_reduce, keep, split = finished.all_reduce, finished.keep, finished.split

IN_PLACE = "a collective works in place, and so does -=; do it to a new tensor"
SUM = "every rank's part goes into the sum"
TOO_LARGE = "dy is the same on all ranks, and summed it is P times too large"


def on_groups(check):
    """The check on ranks 0-1 and 2-3 side by side, then on 0-2: 3 divides no size."""

    def both(lab, group, seed):
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]  # all ranks make each
        three = dist.new_group([0, 1, 2])
        check(lab, pairs[group.rank() // 2], seed)
        return check(lab, three, seed) if group.rank() < 3 else None

    return both


def draw_from(seed, group):
    """(uneven, randn): uneven() is a size, 5 to 29, that P does not divide, randn(*shape) a tensor.

    All ranks of a group draw the same. Another group draws equal sizes and other numbers: a
    collective that forgets its group then gives a wrong result instead of waiting for ranks that
    never come.
    """
    first = dist.get_process_group_ranks(group)[0]
    sizes = torch.Generator().manual_seed(seed)
    numbers = torch.Generator().manual_seed(seed + first)

    def uneven():
        whole, rest = torch.randint(2, 10, (2,), generator=sizes).tolist()
        return whole * group.size() + 1 + rest % (group.size() - 1)

    return uneven, partial(torch.randn, generator=numbers)


def tokens_of(x, group):
    """This rank's tokens of x (b, s, h): (b, s/P rounded up, h), filled up with zeros."""
    x = F.pad(x, (0, 0, 0, -x.shape[1] % group.size()))
    return x.chunk(group.size(), 1)[group.rank()].clone()


def real_tokens(length, group):
    """How many of this rank's tokens are not there to fill up."""
    share = math.ceil(length / group.size())
    return min(share, max(0, length - group.rank() * share))


def expect_traffic(when, traffic, **most):
    """Raise Wrong unless each collective moves at most so many bytes; those not named none."""
    for op, (calls, sent) in traffic.ops.items():
        allowed = most.get(op, 0)
        enough = f"{allowed} will do" if allowed else "none are needed"
        expect(sent <= allowed, f"{when}: {op} moves {sent} bytes, calls: {calls}; {enough}")


class Kept(torch.autograd.graph.saved_tensors_hooks):
    """Counts the bytes that autograd keeps for the backward of what runs inside, each storage once.

    Those of parameters are there anyway and not counted.
    """

    def __init__(self, *parameters):
        self.storages, known = {}, {p.untyped_storage().data_ptr() for p in parameters}

        def note(tensor):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in known:
                self.storages[storage.data_ptr()] = storage.nbytes()
            return tensor

        super().__init__(note, lambda tensor: tensor)

    def __enter__(self):
        super().__enter__()
        return self

    @property
    def bytes(self):
        return sum(self.storages.values())


def expect_parts(layer, full, parts):
    """Raise Wrong unless each parameter and gradient is its part of the full layer's, and no more.

    parts {name: slice}.
    """
    for name, part in parts.items():
        mine, right = getattr(layer, name), getattr(full, name)
        if right is None:
            expect(mine is None, f"there is a {name}, and the full layer has none")
            continue
        expect_close(name, mine, right[part], 0)
        expect_close(f"the gradient of {name}", mine.grad, right.grad[part])
        held = mine.untyped_storage().nbytes()
        found = f"{name} keeps {held} bytes, not {mine.nbytes}"
        expect(held == mine.nbytes, found, "a view keeps the whole")


def run_and_compare(layer, given, wanted, hints):
    """Run layer(x) and its backward; compare values, gradients and bytes. No input is written to.

    given {"x", "dy"}; wanted {"y", "dx", "forward", "backward"}, the last two {op: bytes}; hints
    {"y", "dx"}: as expect_close takes them. Returns the largest relative error.
    """
    x, dy = given["x"].clone().requires_grad_(), given["dy"].clone()
    with Traffic() as traffic:
        y = layer(x)
    error = expect_close("y", y, wanted["y"], hints=hints["y"])
    expect(torch.equal(x, given["x"]), "x is overwritten", IN_PLACE)
    expect_traffic("forward", traffic, **wanted["forward"])
    with Traffic() as traffic:
        y.backward(dy)
    found = "the gradient given to the backward is overwritten"
    expect(torch.equal(dy, given["dy"]), found, IN_PLACE)
    error = max(error, expect_close("dx", x.grad, wanted["dx"], hints=hints["dx"]))
    expect_traffic("backward", traffic, **wanted["backward"])
    return error


def apply_region(function, group, x):
    return function(x, group)


def check_copy_to_tp_region(lab, group, seed):
    uneven, randn = draw_from(seed, group)
    x = randn(2, uneven(), uneven())
    dys = [randn(x.shape) for _ in range(group.size())]
    own = dys[group.rank()]
    hints = {"y": {}, "dx": {SUM: own, "the mean is not the sum": sum(dys) / group.size()}}
    wanted = {"y": x, "dx": sum(dys), "forward": {}, "backward": {"all_reduce": x.nbytes}}
    region = partial(apply_region, lab.copy_to_tp_region, group)
    error = run_and_compare(region, {"x": x, "dy": own}, wanted, hints)
    return f"y is x; dx is the sum, off by {error:.0e}; {x.nbytes} bytes reduced"


def check_reduce_from_tp_region(lab, group, seed):
    uneven, randn = draw_from(seed, group)
    shape, P = (2, uneven(), uneven()), group.size()
    xs, dy = [randn(shape) for _ in range(P)], randn(shape)
    own = xs[group.rank()]
    wanted = {"y": sum(xs), "dx": dy, "forward": {"all_reduce": dy.nbytes}, "backward": {}}
    hints = {"y": {SUM: own}, "dx": {TOO_LARGE: P * dy}}
    region = partial(apply_region, lab.reduce_from_tp_region, group)
    error = run_and_compare(region, {"x": own, "dy": dy}, wanted, hints)
    return f"y is the sum, off by {error:.0e}; dx is dy; {dy.nbytes} bytes reduced"


def check_gather_from_sp_region(lab, group, seed):
    uneven, randn = draw_from(seed, group)
    P, rank, n, h = group.size(), group.rank(), uneven(), uneven()  # n tokens a rank
    x, dys = randn(2, n * P, h), [randn(2, n * P, h) for _ in range(P)]
    own = slice(rank * n, (rank + 1) * n)
    wanted = {"y": x, "dx": sum(dys)[:, own]}
    wanted |= {"forward": {"all_gather": x.nbytes}, "backward": {"reduce_scatter": x.nbytes}}
    joined = torch.cat(x.chunk(P, 1)).reshape(x.shape)
    hints = {
        "y": {"ranks are joined along dim 0, tokens are dim 1": joined},
        "dx": {SUM: dys[rank][:, own]},
    }
    given = {"x": x[:, own].clone(), "dy": dys[rank]}
    region = partial(apply_region, lab.gather_from_sp_region, group)
    error = run_and_compare(region, given, wanted, hints)
    return f"all tokens; dx is summed, off by {error:.0e}; {x.nbytes} bytes each way"


def check_reduce_scatter_to_sp_region(lab, group, seed):
    uneven, randn = draw_from(seed, group)
    P, rank, shape = group.size(), group.rank(), (2, uneven(), uneven())
    xs = [randn(shape) for _ in range(P)]
    y, dy = tokens_of(sum(xs), group), randn(shape)
    nbytes = P * y.nbytes  # with the zeros at the end
    sent = {"forward": {"reduce_scatter": nbytes}, "backward": {"all_gather": nbytes}}
    wanted = {"y": y, "dx": dy, **sent}
    hints = {"y": {SUM: tokens_of(xs[rank], group)}, "dx": {"dy is the same on all ranks": P * dy}}
    given = {"x": xs[rank], "dy": tokens_of(dy, group)}
    region = partial(apply_region, lab.reduce_scatter_to_sp_region, group)
    error = run_and_compare(region, given, wanted, hints)
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
    with Kept(weight, bias) as kept:
        lab.gathered_linear(mine.clone().requires_grad_(), weight, bias, group)
    found = f"{kept.bytes} bytes are kept for the backward; {mine.nbytes} will do"
    expect(kept.bytes <= mine.nbytes, found, "keep the shard x, not the gathered one")
    wanted = {"y": y, "dx": tokens_of(dx, group), "forward": {"all_gather": x.nbytes}}
    wanted["backward"] = {"all_gather": x.nbytes, "reduce_scatter": x.nbytes}
    hints = {"y": {}, "dx": {SUM: tokens_of(dy @ weight.detach(), group)}}

    def layer(x):
        return lab.gathered_linear(x, weight, bias, group)

    error = run_and_compare(layer, {"x": mine, "dy": dy}, wanted, hints)
    expect_close("gradient of weight", weight.grad, linear.weight.grad[start:end])
    expect_close("gradient of bias", bias.grad, linear.bias.grad[start:end])
    lab.gathered_linear(mine, weight, None, group).backward(dy)  # a layer without bias
    return f"y, dx, dW, db, off by {error:.0e}; {kept.bytes} bytes kept of {x.nbytes}"


def check_column_parallel_linear(lab, group, seed):
    uneven, randn = draw_from(seed, group)
    P, tokens, worst = group.size(), uneven(), 0
    for parallel, bias in itertools.product([False, True], [True, False]):
        linear, x, y, dx, dy = one_device(randn, tokens, uneven(), uneven(), bias)
        start, end = split(linear.out_features, group.rank(), P)
        part, weight = slice(start, end), linear.weight.detach()
        layer = lab.ColumnParallelLinear.from_linear(linear, group, sequence_parallel=parallel)
        given = {"x": x, "dy": dy[..., part].clone()}
        wanted = {"y": y[..., part], "dx": dx, "forward": {}, "backward": {"all_reduce": x.nbytes}}
        lacking = given["dy"] @ weight[part]  # dx through this rank's part alone
        if parallel:
            given["x"], wanted["dx"], lacking = (tokens_of(t, group) for t in (x, dx, lacking))
            gathered = P * given["x"].nbytes
            wanted["forward"] = {"all_gather": gathered}
            wanted["backward"] = {"all_gather": gathered, "reduce_scatter": gathered}
        hints = {"y": {"the bias is missing": x @ weight[part].T}, "dx": {SUM: lacking}}
        run = partial(first_tokens, layer, tokens)
        worst = max(worst, run_and_compare(run, given, wanted, hints))
        expect_parts(layer, linear, {"weight": part, "bias": part})
    return f"y, dx, dW, db, off by {worst:.0e}, with and without sequence parallelism, bias"


def check_row_parallel_linear(lab, group, seed):
    uneven, randn = draw_from(seed, group)
    P, rank, tokens, worst = group.size(), group.rank(), uneven(), 0
    for parallel, bias in itertools.product([False, True], [False, True]):
        linear, x, y, dx, dy = one_device(randn, tokens, uneven(), uneven(), bias)
        start, end = split(linear.in_features, rank, P)
        layer = lab.RowParallelLinear.from_linear(linear, group, sequence_parallel=parallel)
        given = {"x": x[..., start:end].clone(), "dy": dy}
        wanted = {"y": y, "dx": dx[..., start:end]}
        wanted |= {"forward": {"all_reduce": y.nbytes}, "backward": {}}
        count = tokens
        if parallel:
            share, count = tokens_of(y, group), real_tokens(tokens, group)
            wanted |= {"forward": {"reduce_scatter": P * share.nbytes}, "y": share[:, :count]}
            wanted |= {"backward": {"all_gather": P * share.nbytes}}
            given["dy"] = dy = tokens_of(dy, group)[:, :count]
        hints = {"y": {}, "dx": {TOO_LARGE: P * wanted["dx"]}}
        if bias:
            once = linear.bias.detach()
            hints["y"] = {"the bias is added on every rank": wanted["y"] + (P - 1) * once}
            hints["y"] |= {"the bias is missing": wanted["y"] - once}
        run = partial(first_tokens, layer, count)
        worst = max(worst, run_and_compare(run, given, wanted, hints))
        if bias and layer.bias is not None:
            own = {"it saw this rank's tokens only": dy.sum((0, 1))}
            expect_close("the gradient of bias", layer.bias.grad, linear.bias.grad, hints=own)
        if rank == 0:
            expect_parts(layer, linear, {"bias": slice(None)})
        expect_parts(layer, linear, {"weight": (slice(None), slice(start, end))})
    found = "there is a bias on this rank too"
    expect(rank == 0 or layer.bias is None, found, "only rank 0 adds it")
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
    for parallel, pad in itertools.product([False, True], [None, vocab - 1]):
        embedding = nn.Embedding(vocab, h, pad, _weight=randn(vocab, h))
        y, dy = embedding(ids), randn(2, tokens, h)
        y.backward(dy)
        y, full = y.detach(), dy
        layer = lab.VocabParallelEmbedding.from_embedding(embedding, group, parallel)
        hints = {SUM: y.masked_fill(elsewhere[..., None], 0)}
        weight = embedding.weight.detach()
        clamped = weight[ids.clamp(start, end - 1)]  # what others' tokens may add
        for added, how in (weight[start].expand_as(y), ""), (clamped, ": clamping is no mask"):
            extra = all_reduce(added.masked_fill(~elsewhere[..., None], 0), group)
            hints[f"a token of another rank's rows adds zeros{how}"] = y + extra
        wanted = {"y": y, "forward": {"all_reduce": y.nbytes}, "backward": {}}
        if parallel:
            hints = {text: tokens_of(t, group) for text, t in hints.items()}
            dy, wanted["y"] = tokens_of(dy, group), tokens_of(y, group)
            nbytes = P * dy.nbytes
            wanted |= {"forward": {"reduce_scatter": nbytes}, "backward": {"all_gather": nbytes}}
        padded = torch.zeros_like(weight).index_add_(0, ids.flatten(), full.flatten(0, 1))
        learned = {"the row of padding_idx has no gradient": padded[start:end]}
        wanted["dx"], mine = embedding.weight.grad[start:end], ids.clone()
        given = {"x": layer.weight.detach(), "dy": dy}
        run = partial(run_with_weight, layer, mine)
        worst = max(worst, run_and_compare(run, given, wanted, {"y": hints, "dx": learned}))
        expect(torch.equal(ids, mine), "the ids are overwritten", IN_PLACE)
    return f"y, dW, off by {worst:.0e}, with and without sequence parallelism, padding row"


def draw_logits(randn, uneven, group):
    """Logits (2, s, v), targets (2, s), some ignored (-100), and this rank's range: start, end."""
    tokens, vocab = uneven(), uneven()
    logits = 3 * randn(2, tokens, vocab) + 200 * randn(2, tokens, 1)  # exp() of it is not finite
    target = draw_ids(randn, (2, tokens), vocab, group.size())
    target[-1, -2:] = -100
    return logits, target, *split(vocab, group.rank(), group.size())


def megatron_label_smoothing(logits, target, start, end, alpha):
    """Megatron-LM's label smoothing on a rank with columns [start, end): loss (...), dx (..., v/P).

    It means 1 - alpha at the target and alpha / (v - 1) everywhere else, which is torch's
    definition with alpha v / (v - 1). But in megatron/core/tensor_parallel/cross_entropy.py K, its
    v, is the width of the rank's own shard, and the mean is over that shard alone. logits (..., v)
    are given whole here, because what it sums over all ranks it sums rightly.
    """
    K = end - start
    smoothing = alpha * K / (K - 1)
    log_probs = logits.log_softmax(-1)
    nll = -log_probs.gather(-1, target[..., None])[..., 0]
    own = log_probs[..., start:end]
    loss = (1 - smoothing) * nll - smoothing * own.mean(-1)
    at_target = F.one_hot(target, logits.shape[-1])[..., start:end]
    return loss, own.exp() - (1 - smoothing) * at_target - smoothing / K


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
        with Traffic() as traffic:
            mine = lab.vocab_parallel_cross_entropy(shard, wanted, group, smoothing, ignore)
        hint = "0 times a logit of minus infinity is none"
        expect(not mine.isnan().any(), "the loss is not a number", hint)
        expect(mine.isfinite().all(), "the loss is infinite", "take the peak off before exp()")
        hints = usual_losses(x - x.amax(-1, keepdim=True), wanted, smoothing, ignore, group)
        worst = max(worst, expect_close("the loss", mine, right, hints=hints))
        expect(torch.equal(shard, x[..., start:end]), "the logits are overwritten", IN_PLACE)
        expect_traffic("forward", traffic, all_reduce=3 * right.nbytes + 8 * P)  # and the P widths
    sent = f"3 numbers a token sent, not {vocab}"
    return f"the loss of each token, off by {worst:.0e}, smoothed or not; {sent}"


def one_device_loss(logits, target, smoothing, ignore):
    """torch's loss of each token, from logits (b, s, v)."""
    options = {"label_smoothing": smoothing, "ignore_index": ignore, "reduction": "none"}
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), **options).view_as(target)


def usual_losses(logits, target, smoothing, ignore, group):
    """{hint: the loss of that mistake}, from all logits (b, s, v), their peak taken off."""
    P, vocab, ignored = group.size(), logits.shape[-1], target == ignore
    target = target.masked_fill(ignored, 0)
    start, end = split(vocab, group.rank(), P)
    shards = [logits[..., slice(*split(vocab, rank, P))] for rank in range(P)]
    own, elsewhere = logits[..., start:end], (target < start) | (target >= end)
    log_sum, mean = logits.logsumexp(-1), logits.mean(-1) if smoothing else 0
    at_target = logits.gather(-1, target[..., None])[..., 0]
    known = at_target.masked_fill(elsewhere, 0)

    def look_up(shard):  # with the target as a column of its own
        column = target.clamp(max=shard.shape[-1] - 1)
        return shard.gather(-1, column[..., None])[..., 0].masked_fill(column != target, 0)

    def loss(log_sum=log_sum, at_target=at_target, mean=mean):
        return log_sum - (1 - smoothing) * at_target - smoothing * mean

    each_own_peak = torch.cat([shard - shard.amax(-1, keepdim=True) for shard in shards], -1)
    losses = {
        "the softmax is over this rank's logits only": loss(log_sum=own.logsumexp(-1)),
        "the target's column here is target - start": loss(at_target=sum(map(look_up, shards))),
        "only one rank knows the target's logit: sum it": loss(at_target=known),
        "the peak is that of all ranks": one_device_loss(each_own_peak, target, smoothing, -100),
    }
    if smoothing:
        theirs, _ = megatron_label_smoothing(logits, target, start, end, smoothing)
        losses |= {
            "the mean is over this rank's logits only": loss(mean=own.mean(-1)),
            "smoothing / vocab: the whole vocabulary": loss(mean=logits.sum(-1) / (end - start)),
            "K and the mean are of this rank's shard only, as in Megatron-LM's formula": theirs,
        }
    losses = {hint: loss.masked_fill(ignored, 0) for hint, loss in losses.items()}
    return losses | {"the loss of an ignored target is 0": loss()}


def check_cross_entropy_backward(lab, group, seed):
    uneven, randn = draw_from(seed, group)
    logits, target, start, end = draw_logits(randn, uneven, group)
    vocab, worst = logits.shape[-1], 0
    for smoothing in 0.0, 0.1:
        dy, x = randn(target.shape), logits.clone().requires_grad_()
        y = one_device_loss(x, target, smoothing, -100)
        y.backward(dy)
        right, here = x.grad[..., start:end], (target >= start) & (target < end)
        column = (target - start).masked_fill(~here, 0)[..., None]
        scale = dy.masked_fill(target == -100, 0)[..., None]
        softmax = logits.softmax(-1)[..., start:end]
        hit = torch.zeros_like(right).scatter_(-1, column, 1)  # wherever the target is
        own, even = hit * here[..., None], smoothing / vocab
        q = (1 - smoothing) * own + even
        gradients = {  # of a loss whose gradient is 1
            "only the rank that holds the target takes q off there": softmax
            - (1 - smoothing) * hit
            - even,
            "q is smoothed in the backward too": softmax - own,
            "q is 1 - smoothing at the target, and smoothing / vocab": softmax - own - even,
            "q is smoothing / vocab everywhere": softmax - (q - even),
            "smoothing / vocab: the whole vocabulary": softmax
            - (q - even)
            - smoothing / (end - start),
            "the softmax is over this rank's logits only": logits[..., start:end].softmax(-1) - q,
        }
        hints = {hint: gradient * scale for hint, gradient in gradients.items()}
        hints["times the gradient that arrives"] = softmax - q
        wanted = {"y": y.detach(), "dx": right, "backward": {}}
        wanted["forward"] = {"all_reduce": 3 * y.nbytes + 8 * group.size()}
        given = {"x": logits[..., start:end].clone(), "dy": dy}
        options = {"target": target, "group": group, "label_smoothing": smoothing}
        loss = partial(lab.vocab_parallel_cross_entropy, **options)
        worst = max(worst, run_and_compare(loss, given, wanted, {"y": {}, "dx": hints}))
    return f"d loss / d logits, off by {worst:.0e}, smoothed or not; nothing sent"


CHECKS = {
    name.removeprefix("check_"): (on_groups(check), 4)
    for name, check in list(globals().items())
    if name.startswith("check_")
}


# What people get wrong, for --inject-bug: the checks have to catch every one.


def overwrites_input(lab):
    """all_reduce works on the caller's tensor."""

    def all_reduce(x, group, op=dist.ReduceOp.SUM):
        dist.all_reduce(x, op, group=group)
        return x

    lab.all_reduce = all_reduce


def group_forgotten(lab):
    """all_reduce sums over all ranks there are, not over the group."""

    def all_reduce(x, group, op=dist.ReduceOp.SUM):
        x = x.clone()
        dist.all_reduce(x, op)
        return x

    lab.all_reduce = all_reduce


def gathers_features(lab):
    """all_gather's result is read as (b, s, h) while ranks are joined along dim 0."""

    def all_gather(x, group):
        out = x.new_empty(x.shape[0] * group.size(), *x.shape[1:])
        dist.all_gather_into_tensor(out, x.contiguous(), group=group)
        return out.view(x.shape[0], -1, x.shape[2])

    lab.all_gather = all_gather


def scatter_by_all_reduce(lab):
    """reduce_scatter_to_sp_region all-reduces and throws away what is others': all values right."""
    lab.reduce_scatter = lambda x, group: tokens_of(all_reduce(x, group), group)


def bias_on_every_rank(lab):
    """Every rank adds the row parallel layer's bias to its partial sum."""
    lab.RowParallelLinear.from_linear = classmethod(row_with_bias)


def bias_sees_own_tokens(lab):
    """Every rank adds the bias after the reduce-scatter; its gradients are never summed."""

    def forward(self, x):
        leave = (
            lab.reduce_scatter_to_sp_region if self.sequence_parallel else lab.reduce_from_tp_region
        )
        out = leave(F.linear(x, self.weight), self.group)
        return out if self.bias is None else out + self.bias

    lab.RowParallelLinear.from_linear = classmethod(row_with_bias)
    lab.RowParallelLinear.forward = forward


def row_with_bias(cls, linear, group, sequence_parallel=False):
    """RowParallelLinear.from_linear with a bias on every rank."""
    start, end = split(linear.in_features, group.rank(), group.size())
    bias = linear.bias if linear.bias is None else keep(linear.bias, 0, 0, linear.out_features)
    return cls(keep(linear.weight, 1, start, end), bias, group, sequence_parallel)


def next_ranks_columns(lab):
    """A rank holds the next rank's columns of a column parallel weight."""
    right = lab.ColumnParallelLinear.from_linear.__func__

    def from_linear(cls, linear, group, sequence_parallel=False):
        layer = right(cls, linear, group, sequence_parallel)
        layer.weight = keep(linear.weight.roll(-len(layer.weight), 0), 0, 0, len(layer.weight))
        return layer

    lab.ColumnParallelLinear.from_linear = classmethod(from_linear)


def shard_is_a_view(lab):
    """A shard is a view of the full weight, which stays in memory: all values right."""
    lab.keep = lambda parameter, dim, start, end: nn.Parameter(
        parameter.detach().narrow(dim, start, end - start)
    )


def unmasked_embedding(lab):
    """A token of another rank's rows adds this rank's first row."""
    lab.VocabParallelEmbedding.forward = lambda self, ids: lab.reduce_from_tp_region(
        F.embedding((ids - self.start) * ((ids >= self.start) & (ids < self.end)), self.weight),
        self.group,
    )


def target_offset_forgotten(lab):
    """A target's column is looked for as if every rank held the first tokens."""
    right = lab.shard_offset
    lab.shard_offset = lambda logits, group: (0, right(logits, group)[1])


def smoothing_per_shard(lab):
    """Megatron-LM's label smoothing: K and the mean are those of the rank's own shard."""
    right = lab.VocabParallelCrossEntropy.forward

    def forward(ctx, logits, target, start, vocab, group, smoothing):
        K = logits.shape[-1]
        smoothing *= K / (K - 1)
        nll = right(ctx, logits, target, start, vocab, group, 0)
        _, _, _, peak, sum_exp = ctx.to_save
        ctx.vocab, ctx.smoothing = K, smoothing
        log_probs = logits - peak[..., None] - sum_exp.log()[..., None]
        return (1 - smoothing) * nll - smoothing * log_probs.mean(-1) if smoothing else nll

    lab.VocabParallelCrossEntropy.forward = staticmethod(forward)


def logits_gathered(lab):
    """Every rank gathers all the logits and computes the whole loss: all values right."""

    def vocab_parallel_cross_entropy(
        logits_shard, target, group, label_smoothing=0.0, ignore_index=-100
    ):
        start, vocab = lab.shard_offset(logits_shard, group)
        logits = F.pad(logits_shard, (start, vocab - start - logits_shard.shape[-1]))
        logits = lab.reduce_from_tp_region(
            logits, group
        )  # zeros elsewhere: their sum is all of them
        return one_device_loss(logits, target, label_smoothing, ignore_index)

    lab.vocab_parallel_cross_entropy = vocab_parallel_cross_entropy


def ignored_targets_count(lab):
    """A target of ignore_index counts, as if it were token 0."""
    right = lab.vocab_parallel_cross_entropy

    def vocab_parallel_cross_entropy(
        logits_shard, target, group, label_smoothing=0.0, ignore_index=-100
    ):
        return right(
            logits_shard, target.masked_fill(target == ignore_index, 0), group, label_smoothing
        )

    lab.vocab_parallel_cross_entropy = vocab_parallel_cross_entropy


BUGS = [
    overwrites_input,
    group_forgotten,
    gathers_features,
    scatter_by_all_reduce,
    bias_on_every_rank,
    bias_sees_own_tokens,
    next_ranks_columns,
    shard_is_a_view,
    unmasked_embedding,
    target_offset_forgotten,
    smoothing_per_shard,
    logits_gathered,
    ignored_targets_count,
]
