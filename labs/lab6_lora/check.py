"""Lab 6's checks, each of which runs on every rank, and the bugs that they have to catch."""

import itertools
import math
from collections import Counter
from functools import partial, partialmethod

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from labs.kit.compare import expect_same, raised, tried
from labs.kit.harness import Traffic, expect, expect_close
from labs.kit.tools import draw_from, expect_traffic, run_and_compare, subgroup
from labs.lab6_lora import lesson as finished  # not the learner's

SUBGROUP = True  # the group is not the world, and has other rank numbers
JOINED, APART, SHARDED = WAYS = finished.WAYS
all_reduce, share, split = finished.all_reduce, finished.share, finished.split

STILL = "still this rank's part: sum what partial names, of all layers, wait, and write it to .grad"
PARTIAL = "it is only this rank's part of a sum over the ranks: its name is missing in partial"
WHOLE = "it is whole already, on every rank: summed it is P times too large"
SUMMED = "the sum replaces what was there; joined they are flat: split() by numel(), and view_as()"
UNNAMED = "partial does not name it: it is whole already, or every rank has another shard of it"
COLUMNS = {
    JOINED: "W x + bias + scale B A x: A reads what W reads",
    APART: "W x + bias + scale B A x: A reads x as it comes, its result enters",
    SHARDED: "W x + bias + scale B A x: A x is gathered along r, gather_along()",
}
ROWS = {
    JOINED: "W x + scale B A x leaves as one, then comes the bias",
    APART: "W x and A x leave, each once; then scale B, then the bias",
    SHARDED: "A x is summed and cut along r, scatter_along(); W x + B's part leaves, then the bias",
}


class MLP(nn.Module):
    """x + down(gelu(up(x))), of whatever two layers."""

    def __init__(self, up, down):
        super().__init__()
        self.up, self.down = up, down

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))


def one_device(lab, randn, tokens, features_in, features_out, rank):
    """A LoRALinear, x (2, tokens, i), y (2, tokens, o), their gradients; A's and B's in .grad."""
    full = lab.LoRALinear(nn.Linear(features_in, features_out), rank, 1 + abs(randn(())).item())
    for parameter in full.parameters():
        parameter.data = randn(parameter.shape)
    x = randn(2, tokens, features_in).requires_grad_()
    y, dy = full(x), randn(2, tokens, features_out)
    y.backward(dy)
    return full, x.detach(), y.detach(), x.grad, dy


def expected_messages(column, way, parallel, tokens, features, rank, world):
    """({op: bytes} forward, backward) of a layer, with sequence parallelism where parallel.

    tokens: bytes of one feature of all tokens; features: those of the base's message, i of a column
    parallel layer, o of a row parallel one.
    """
    forward, backward = Counter(), Counter()
    there, back = ("all_gather", "reduce_scatter") if column else ("reduce_scatter", "all_gather")

    def edge(width, scattered):
        if scattered:
            forward[there] += tokens * width
            backward[back] += tokens * width
        else:
            (backward if column else forward)["all_reduce"] += tokens * width

    edge(features, parallel)
    if way == APART:
        edge(rank, parallel)
    if way == SHARDED:
        edge(math.ceil(rank / world) * world, True)  # with the zeros that make the shares equal
    return forward, backward


def check_layer(lab, group, seed, column):
    """A layer in every way, TP and SP, r = 4 on 3 ranks and r = 1 on 2."""
    pair = [(subgroup(group, ranks=[0, 1]), 1)] if group.rank() < 2 else []
    cases, worst = [(group, 4), *pair], 0
    Layer = lab.ColumnParallelLoRA if column else lab.RowParallelLoRA
    expected = column_parallel if column else row_parallel
    for (ranks, r), way, parallel in itertools.product(cases, WAYS, (False, True)):
        uneven, randn = draw_from(seed, ranks)
        P, i, o = ranks.size(), uneven(), uneven()
        known = one_device(lab, randn, P * uneven(), i, o, r)
        full, x = known[:2]
        case = f"{way}, {'SP' if parallel else 'TP'}, r = {r} on {P} ranks"
        layer, cuts = Layer(full, ranks, way, sequence_parallel=parallel), cuts_of(way, column)
        found = f"{case}: cuts() says {layer.cut}, not {cuts}"
        expect(layer.cut == cuts, found, "weights are (r, i), (o, r): W's cut dimension, and r")
        given, wanted, hints = expected(known, ranks, parallel)
        hints["otherwise"] = (COLUMNS if column else ROWS)[way]
        sizes = column, way, parallel, x[..., 0].nbytes, i if column else o, r, P
        wanted["forward"], wanted["backward"] = expected_messages(*sizes)
        worst = max(worst, run_and_compare(layer, given, wanted, hints, f"{case}: "))
        worst = max(worst, expect_gradients(case, layer, full))
        expect(not layer.weight.requires_grad, f"{case}: weight is trained", "the base is frozen")
    ways = f"{len(WAYS)} ways, TP and SP, r = 1 on 2 ranks"
    return f"y, dx, dA, dB, off by {worst:.0e}: {ways}; W frozen"


def without_adapter(full, x, y):
    """{hint: y} of an adapter that is missing, or not scaled."""
    low = x @ full.lora_A.weight.detach().T @ full.lora_B.weight.detach().T
    missing = y - full.scale * low
    return {"the adapter is missing": missing, "scale = alpha / r": missing + low}


def column_parallel(known, group, parallel):
    """given, wanted, hints of run_and_compare() for a column parallel layer; known: one_device()'s.

    parallel: whether it enters with its own tokens only.
    """
    full, x, y, dx, dy = known
    A, B, W = (p.detach() for p in (full.lora_A.weight, full.lora_B.weight, full.weight))
    tokens = partial(share, dim=1 if parallel else None, group=group)
    cut, P = partial(share, dim=-1, group=group), group.size()
    own = cut(dy) @ share(B, 0, group) @ A * full.scale  # dx through this rank's part of B
    wrong_dx = {
        "every rank's part goes into dx": cut(dy) @ share(W, 0, group) + own,
        "dx through A is summed over the ranks twice": dy @ W + P * dy @ B @ A * full.scale,
        "dx through A lacks the other ranks' part": dy @ W + own,
        "no gradient comes through the adapter: gather_along has a backward": dy @ W,
    }
    hints = {"y": {text: cut(t) for text, t in without_adapter(full, x, y).items()}}
    hints["dx"] = {text: tokens(t) for text, t in wrong_dx.items()}
    return {"x": tokens(x), "dy": cut(dy)}, {"y": cut(y), "dx": tokens(dx)}, hints


def row_parallel(known, group, parallel):
    """The same of a row parallel layer; parallel: whether it leaves its own tokens only."""
    full, x, y, dx, dy = known
    A, B = full.lora_A.weight.detach(), full.lora_B.weight.detach()
    tokens = partial(share, dim=1 if parallel else None, group=group)
    cut, P = partial(share, dim=-1, group=group), group.size()
    hints = without_adapter(full, x, y)
    partly = full.scale * (cut(x) @ cut(A).T) @ B.T  # by this rank's part of A
    hints["A's result is a sum over the ranks"] = hints["the adapter is missing"] + partly
    hints["the bias is added on every rank"] = y + (P - 1) * full.bias.detach()
    hints["the bias is missing"] = y - full.bias.detach()
    hints = {"y": {text: tokens(t) for text, t in hints.items()}}
    hints["dx"] = {"dy is the same on all ranks": P * cut(dx)}
    return {"x": cut(x), "dy": tokens(dy)}, {"y": tokens(y), "dx": cut(dx)}, hints


def cuts_of(way, column):
    """{name: the dimension of which a rank has its share, or None} of A and B."""
    cut, free = ("lora_B", "lora_A") if column else ("lora_A", "lora_B")
    return {cut: int(not column), free: int(not column) if way == SHARDED else None}


def expect_gradients(case, layer, full):
    """Raise Wrong unless parts and gradients of A and B are right, the partial ones once summed."""
    rank, worst = layer.group.rank(), 0
    for name, dim in layer.cut.items():
        mine, whole = getattr(layer, name), getattr(full, name).weight
        right = share(whole, dim, layer.group)
        expect_close(f"{case}: {name} on rank {rank}", mine.detach(), right, 0)
        summed = all_reduce(mine.grad, layer.group) if dim is None else mine.grad
        got, right = mine.grad, share(whole.grad, dim, layer.group)
        hints = {PARTIAL: got} if torch.allclose(summed, right, 1e-4, 1e-4) else {}
        if name in layer.partial:
            found = f"{case}: {name} is cut, and named partial"
            expect(dim is None, found, "other ranks hold other parts")
            hints, got = ({WHOLE: summed} if torch.allclose(got, right, 1e-4, 1e-4) else {}), summed
        worst = max(worst, expect_close(f"{case}: the gradient of {name}", got, right, hints=hints))
    return worst


def three_layers(lab, group, randn, way, parallel):
    """Column and row parallel layers that way, a sharded one; the LoRALinears they are made of."""
    row = lab.RowParallelLoRA
    kinds = (lab.ColumnParallelLoRA, way), (row, way), (row, SHARDED)
    sizes = (11, 13, 4) if parallel else (12, 15, 6)  # 3 ranks have equal shards, or not
    full = [one_device(lab, randn, 6, *sizes)[0] for _ in kinds]
    layers = [kind(one, group, of, parallel) for one, (kind, of) in zip(full, kinds)]
    return layers, full


def check_sum_partial_gradients(lab, group, seed):
    _, randn = draw_from(seed)
    P, moved = group.size(), 0
    for way, parallel in itertools.product(WAYS, (False, True)):
        layers, _ = three_layers(lab, group, randn, way, parallel)
        case, wanted, most = f"{way}, {'SP' if parallel else 'TP'}", [], 0
        named = [(layer, *pair) for layer in layers for pair in layer.named_parameters()]
        for layer, name, p in named:
            if p.requires_grad:
                grads = [share(randn(layer.shapes[name]), layer.cut[name], group) for _ in range(P)]
                p.grad = grads[group.rank()].clone()
                summed = name in layer.partial
                hints = {STILL: p.grad.clone(), "the mean is not the sum": sum(grads) / P}
                right, hints = (sum(grads), hints) if summed else (p.grad.clone(), {})
                wanted.append((name, p, right, hints, SUMMED if summed else UNNAMED))
                most += p.nbytes * summed
        with Traffic() as traffic:
            tried(case, SUMMED, lab.sum_partial_gradients, layers, group)
        for name, p, right, hints, hint in wanted:
            expect_close(f"{case}: the gradient of {name}", p.grad, right, hints=hints, hint=hint)
        hint = "what partial names and no more; where it names nothing, no message"
        expect_traffic(case, traffic, Counter(all_reduce=most), hint)
        calls = sum(calls for calls, _ in traffic.ops.values())
        expect(calls <= 1, f"{case}: {calls} messages", "one for all gradients: join them first")
        moved = max(moved, most)
    return f"summed where partial, untouched elsewhere; one message of {moved} bytes, or none"


def check_save_adapter(lab, group, seed):
    uneven, randn = draw_from(seed)
    worst = 0
    for way, parallel in itertools.product(WAYS, (False, True)):
        layers, full = three_layers(lab, group, randn, way, parallel)
        for layer, one in zip(layers, full):
            hint = "on every rank, detached; what is cut is gathered along dim: n of layer.shapes"
            adapter = tried(way, hint, lab.full_adapter, layer)
            expect(adapter.keys() == layer.shapes.keys(), f"{way}: saved is {[*adapter]}", hint)
            for name, shape in layer.shapes.items():
                mine, right = adapter[name], getattr(one, name).weight.detach()
                what = f"{way}: {name}, {tuple(shape)}, as saved"
                expect_close(what, mine, right, 0, hint=hint)
                expect(not mine.requires_grad, f"{way}: {name} as saved is trained", "save a copy")
                own = getattr(layer, name).untyped_storage().data_ptr()
                shared = mine.untyped_storage().data_ptr() == own
                expect(not shared, f"{way}: {name} as saved is the parameter", "save a copy")
            x, before = randn(2, uneven(), one.in_features), one.weight.clone()
            saved = {name: tensor.clone() for name, tensor in adapter.items()}
            y = one(x).detach()
            hint = "W + scale B A, without autograd"
            merged = tried("merging", hint, lab.merge_adapter, one, adapter, one.scale)
            expect_same("linear", [one.weight], [before])
            base = F.linear(x, one.weight, one.bias)
            unscaled = base + (y - base) / one.scale
            hints = {"W + scale B A: the scale is missing": unscaled, "nothing is merged": base}
            mine = merged(x).detach()
            worst = max(worst, expect_close(f"{way}: merged", mine, y, hints=hints, hint=hint))
            expect_same("the adapter", adapter.values(), saved.values())
    return f"shards of every way give A and B exactly; merged as one device, off by {worst:.0e}"


class Watched(ColwiseParallel):
    """Somebody's subclass: what its LoRA form would be, nobody knows."""


def adapted_mlps(lab, randn, rank):
    """Two MLPs 12 -> 16 -> 12, one after the other: the first with adapters, the second without."""
    layers = [nn.Linear(*shape) for shape in ((12, 16), (16, 12), (12, 16), (16, 12))]
    layers[:2] = [lab.LoRALinear(layer, rank, 2.0) for layer in layers[:2]]
    model = nn.Sequential(MLP(*layers[:2]), MLP(*layers[2:]))
    for parameter in model.parameters():
        parameter.data = randn(parameter.shape) / 2
    return model


def plain_plan(parallel):
    """The plan of MLPs without a word of LoRA; the tokens are cut over the ranks where parallel."""
    if parallel:
        up = ColwiseParallel(input_layouts=Shard(1), use_local_output=False)
        return {"*.up": up, "*.down": RowwiseParallel(output_layouts=Shard(1))}
    return {"*.up": ColwiseParallel(), "*.down": RowwiseParallel()}


def check_translate_to_lora(lab, group, seed):
    _, randn = draw_from(seed)
    mesh, worst = DeviceMesh.from_group(group, "cpu"), 0
    for r, parallel in itertools.product((1, 3), (False, True)):
        case = f"{'SP' if parallel else 'TP'}, r = {r}"
        model = adapted_mlps(lab, randn, r)
        plan = plain_plan(parallel)
        before = {key: (style, type(style), dict(vars(style))) for key, style in plan.items()}
        first = lab.translate_to_lora(plan, model)
        for key, (style, kind, attributes) in before.items():
            same = plan[key] is style and type(style) is kind and vars(style) == attributes
            found = f"{case}: the plan's {key} is not what it was"
            expect(same, found, "other models use it: a new object")
        styles = lab.translate_to_lora(plan, model)
        names = {"0.up": lab.ColwiseParallelLoRA, "0.down": lab.RowwiseParallelLoRA}
        names |= {"1.up": ColwiseParallel, "1.down": RowwiseParallel}
        found = f"{case}: styles for {', '.join(sorted(styles))}"
        expect(set(styles) == set(names), found, "one a module")
        for name, kind in names.items():
            style, source = styles[name], plan[f"*.{name[2:]}"]
            found = f"{case}: {name} gets {type(style).__name__}, not {kind.__name__}"
            expect(type(style) is kind, found, "new where there are adapters, else as it is")
            for attribute in ("input_layouts", "output_layouts", "use_local_output"):
                mine, right = getattr(style, attribute), getattr(source, attribute)
                found = f"{case}: {name} has {attribute} {mine}, not {right}"
                hint = "the layouts are the style's, in no further tuple: they say if it is SP"
                expect(mine == right, found, hint)
            new = name[0] == "1" or style is not first[name]
            expect(new, f"{case}: two calls share {name}", "no cache")
        worst = max(worst, compare_dtensor(case, model, mesh, styles, parallel, randn))
    style, model = Watched(), adapted_mlps(lab, randn, 1)
    hint = "no adapters: any style will do, as it is"
    styles = tried("a plain layer", hint, lab.translate_to_lora, {"1.up": style}, model)
    expect(styles == {"1.up": style}, "a plain layer's style is another one", hint)
    message = raised(lab.translate_to_lora, {"*.up": style}, model, kind=TypeError)
    hint = "look up its type, and raise TypeError"
    expect(message is not None, "a subclass of ColwiseParallel is translated", hint)
    return f"new styles, the plan as it was; off by {worst:.0e}, TP and SP, r = 1 and 3"


def compare_dtensor(case, model, mesh, styles, parallel, randn):
    """The largest error against one device of a model cut by styles."""
    x, dy = randn(2, 6, 12).requires_grad_(), randn(2, 6, 12)
    y = model(x)
    y.backward(dy)
    right = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    parallelize_module(model, mesh, styles)
    tokens = partial(share, dim=1 if parallel else None, group=mesh.get_group())
    given, wanted = {"x": tokens(x), "dy": tokens(dy)}, {"y": tokens(y), "dx": tokens(x.grad)}
    worst = run_and_compare(model, given, wanted, {}, f"{case}: ")
    for name, p in model.named_parameters():
        expect((p.grad is not None) == (name in right), f"{case}: {name} is trained, or should be")
        if name in right:
            grad = p.grad.full_tensor()
            worst = max(worst, expect_close(f"{case}: the gradient of {name}", grad, right[name]))
    return worst


CHECKS = {
    "column_lora": (partial(check_layer, column=True), 3),
    "row_lora": (partial(check_layer, column=False), 3),
    "sum_partial_gradients": (check_sum_partial_gradients, 3),
    "save_adapter": (check_save_adapter, 3),
    "translate_to_lora": (check_translate_to_lora, 2),
}


# Bugs for --inject-bug: the checks have to catch every one


def partial_forgotten_under_sp(lab):
    """Under sequence parallelism no gradient is named partial that is whole under TP."""

    def forgetful(self, right):
        cut, names = right(self)
        return cut, [] if self.way == APART else names

    for kind in lab.ColumnParallelLoRA, lab.RowParallelLoRA:
        kind.cuts = partialmethod(forgetful, kind.cuts)


def gradient_not_summed(lab):
    """sum_partial_gradients does nothing: all losses look right."""
    lab.sum_partial_gradients = lambda layers, group: None


def translates_in_place(lab):
    """The plan's own styles become LoRA styles, by their class: a later model gets them too."""
    right = lab.translate_to_lora

    def translate_to_lora(plan, model):
        translated = right(plan, model)
        for style in plan.values():
            style.__class__ = lab.LORA_STYLES.get(type(style), type(style))
        return translated

    lab.translate_to_lora = translate_to_lora


BUGS = [partial_forgotten_under_sp, gradient_not_summed, translates_in_place]
