"""Lab 6's exercises: their cases. What one device says of the layers, the lab's run compares.

3 ranks have unequal shares of every size; of 2, which compute in float64, one has nothing of r = 1.
"""

import itertools
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from labs.kit.eye import Most
from labs.kit.inputs import draw_from
from labs.kit.judge import checks
from labs.kit.tools import refusal
from labs.lab6_lora import lesson as finished  # not the learner's

SUBGROUP = True  # the group is not the world, and has other rank numbers
GROUPS = [0, 1, 2], [0, 1]
SHARDED, WAYS = finished.SHARDED, finished.WAYS
all_reduce, share = finished.all_reduce, finished.share
EACH_WAY = list(itertools.product(WAYS, (False, True)))  # with TP and SP


class MLP(nn.Module):
    """x + down(gelu(up(x))), of whatever two layers."""

    def __init__(self, up, down):
        super().__init__()
        self.up, self.down = up, down

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))


def named(way, parallel):
    return f"{way}, {'SP' if parallel else 'TP'}"


def lora_linear(randn, features_in, features_out, rank, bias=True):
    """A LoRALinear of random numbers: B is not zero."""
    linear = nn.Linear(features_in, features_out, bias)
    full = finished.LoRALinear(linear, rank, 1 + abs(randn(())).item())
    for parameter in full.parameters():
        parameter.data = randn(parameter.shape)
    return full


# ---- Layers --------------------------------------------------------------------------------------


def see_layer(kind, full, group, way, parallel, x, dy, lab, eye):
    """A layer made of the full one, then a forward and backward, twice."""
    layer = getattr(lab, kind)(full, group, way, sequence_parallel=parallel)
    eye.note("what cuts() says", dict(layer.cut))
    trained = [name for name, p in layer.named_parameters() if p.requires_grad]
    eye.note("the list of what is trained", trained)
    eye.note("the list of partial gradients", sorted(layer.partial))
    if not eye.goes_on():
        return
    layer(x.detach().flip(1))  # of which nothing may be left
    eye.call(layer, {"x": x}, "y", [dy], {"lora_A": layer.lora_A, "lora_B": layer.lora_B})
    for name in layer.partial:
        summed = all_reduce(eye.seen.pop(f"the gradient of {name}"), group)
        eye.note(f"the gradient of {name}, summed", summed)


def layer_cases(kind, group, seed):
    """A layer in every way, with TP and SP: r = 4 and a bias on 3 ranks, r = 1 and none on 2."""
    for way, parallel in EACH_WAY:
        uneven, randn = draw_from(seed, group)
        P, i, o = group.size(), uneven(), uneven()
        full = lora_linear(randn, i, o, 4 if P == 3 else 1, bias=P == 3)
        s = P * uneven()
        tokens = partial(share, dim=1 if parallel else None, group=group)
        features = partial(share, dim=-1, group=group)
        column = kind == "ColumnParallelLoRA"
        enters, leaves = (tokens, features) if column else (features, tokens)
        x, dy = enters(randn(2, s, i)).requires_grad_(), leaves(randn(2, s, o))
        yield named(way, parallel), partial(see_layer, kind, full, group, way, parallel, x, dy)


# ---- Gradients to be summed, and the adapter as it is saved --------------------------------------


def three_layers(randn, parallel):
    """[(kind, way or None for the case's, LoRALinear)]: layers of two kinds, and a sharded one."""
    sizes = (11, 13, 4) if parallel else (12, 15, 6)  # 3 ranks have equal shards, or not
    kinds = ("ColumnParallelLoRA", None), ("RowParallelLoRA", None), ("RowParallelLoRA", SHARDED)
    return [(kind, way, lora_linear(randn, *sizes)) for kind, way in kinds]


def made(lab, layers, group, way, parallel):
    return [getattr(lab, kind)(full, group, of or way, parallel) for kind, of, full in layers]


def sum_partial_gradients(group, seed):
    _, randn = draw_from(seed, group)

    def see(layers, way, parallel, lab, eye):
        mine = made(lab, layers, group, way, parallel)
        numbers = torch.Generator().manual_seed(seed + group.rank())
        for layer in mine:
            for p in layer.lora_A, layer.lora_B:
                p.grad = torch.randn(p.shape, generator=numbers, dtype=p.dtype)
        eye.call(lab.sum_partial_gradients, {"layers": mine, "group": group})
        calls = [calls for name, calls in eye.seen.items() if name.startswith("forward: calls")]
        eye.note("messages", Most(sum(calls)))
        for number, layer in enumerate(mine):
            for name in layer.cut:
                what = "summed" if name in layer.partial else "not summed"
                eye.note(f"layer {number}, {name}: grad, {what}", getattr(layer, name).grad)

    for way, parallel in EACH_WAY:
        layers = three_layers(randn, parallel)
        yield named(way, parallel), partial(see, layers, way, parallel)


def save_adapter(group, seed):
    uneven, randn = draw_from(seed)  # float32, as nn.Linear, which merge_adapter() makes

    def see(layers, way, parallel, x, lab, eye):
        for number, layer in enumerate(made(lab, layers, group, way, parallel)):
            what, full = f"layer {number}", layers[number][2]
            adapter = lab.full_adapter(layer)
            eye.note(f"{what}: what the adapter names", sorted(adapter))
            for name, saved in adapter.items():
                getattr(layer, name).data.zero_()  # of which a copy sees nothing
                eye.note(f"{what}: {name} as saved", saved)
                eye.note(f"{what}: {name} as saved is trained", saved.requires_grad)
            given = {name: getattr(full, name).weight.detach() for name in layer.cut}
            for which in "the merged layer", "a second one of the same linear and adapter":
                merged = lab.merge_adapter(full, given, full.scale)
                eye.note(f"{what}: y of {which}", merged(x))
                eye.note(f"{what}: a graph is at merged.weight", not merged.weight.is_leaf)

    for way, parallel in EACH_WAY:
        layers, right = three_layers(randn, parallel), {}
        x = randn(2, uneven(), layers[0][2].in_features)
        for number, (_, _, full) in enumerate(layers):
            for name in "lora_A", "lora_B":
                whole = getattr(full, name).weight.detach().clone()
                right[f"layer {number}: {name} as saved"] = whole
            right[f"layer {number}: y of the merged layer"] = full(x).detach()
        yield named(way, parallel), partial(see, layers, way, parallel, x), right


# ---- DTensor -------------------------------------------------------------------------------------


class Watched(ColwiseParallel):
    """Somebody's subclass: what its LoRA form would be, nobody knows."""


def adapted_mlps(lab, seed, rank):
    """Two MLPs 12 -> 16 -> 12, one after the other: the first with adapters, the second without."""
    numbers = torch.Generator().manual_seed(seed)
    layers = [nn.Linear(*shape) for shape in ((12, 16), (16, 12), (12, 16), (16, 12))]
    layers[:2] = [lab.LoRALinear(layer, rank, 2.0) for layer in layers[:2]]
    model = nn.Sequential(MLP(*layers[:2]), MLP(*layers[2:]))
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=numbers) / 2
    return model


def plain_plan(parallel):
    """The plan of MLPs without a word of LoRA; the tokens are cut over the ranks where parallel."""
    if parallel:
        up = ColwiseParallel(input_layouts=Shard(1), use_local_output=False)
        return {"*.up": up, "*.down": RowwiseParallel(output_layouts=Shard(1))}
    return {"*.up": ColwiseParallel(), "*.down": RowwiseParallel()}


def see_translated(r, parallel, x, dy, mesh, seed, lab, eye):
    model, plan = adapted_mlps(lab, seed, r), plain_plan(parallel)
    before = {key: (style, type(style), dict(vars(style))) for key, style in plan.items()}
    first, styles = (lab.translate_to_lora(plan, model) for _ in range(2))
    for key, (style, kind, attributes) in before.items():
        same = plan[key] is style and type(style) is kind and vars(style) == attributes
        eye.note(f"the plan's {key} is what it was", same)
    eye.note("the names that have a style", sorted(styles))
    for name, style in sorted(styles.items()):
        eye.note(f"the style of {name}", type(style).__name__)
        for attribute in "input_layouts", "output_layouts", "use_local_output":
            eye.note(f"{attribute} of {name}'s style", str(getattr(style, attribute)))
        if name.startswith("0"):
            eye.note(f"{name} has the same style object in two calls", style is first[name])
    if not eye.goes_on():
        return
    parallelize_module(model, mesh, styles)
    eye.call(model, {"x": x}, "y", [dy])
    model(x).backward(dy)
    for name, p in model.named_parameters():
        eye.note(f"{name} is trained", p.grad is not None)
        if p.grad is not None:
            eye.note(f"the gradient of {name}", p.grad.full_tensor())


def see_others(seed, lab, eye):
    """A style for a plain layer, of any kind, and a kind that no LoRA style is for."""
    style, model = Watched(), adapted_mlps(lab, seed, 1)
    same = lab.translate_to_lora({"1.up": style}, model) == {"1.up": style}
    eye.note("a plain layer keeps its style", same)
    message = refusal(TypeError, lab.translate_to_lora, {"*.up": style}, model)
    raised = {None: "no error", "": "a TypeError without a message"}.get(message, "a TypeError")
    eye.note("a subclass of ColwiseParallel for a LoRALinear ends in", raised)


def translate_to_lora(group, seed):
    mesh, numbers = DeviceMesh.from_group(group, "cpu"), torch.Generator().manual_seed(seed)
    for r, parallel in itertools.product((1, 3), (False, True)):
        x, dy = (torch.randn(2, 6, 12, generator=numbers) for _ in range(2))
        model = adapted_mlps(finished, seed, r)
        y = model(x.requires_grad_())
        y.backward(dy)
        tokens = partial(share, dim=1 if parallel else None, group=group)
        right = {"y": tokens(y), "the gradient of x": tokens(x.grad)}
        for name, p in model.named_parameters():
            right |= {} if p.grad is None else {f"the gradient of {name}": p.grad}
        how = r, parallel, tokens(x).requires_grad_(), tokens(dy), mesh, seed
        title = f"r = {r}, {'SP' if parallel else 'TP'}"
        yield title, partial(see_translated, *how), right
    yield "other styles", partial(see_others, seed)


EXERCISES = {
    "column_lora": (partial(layer_cases, "ColumnParallelLoRA"), 3, GROUPS),
    "row_lora": (partial(layer_cases, "RowParallelLoRA"), 3, GROUPS),
    "sum_partial_gradients": (sum_partial_gradients, 3, GROUPS),
    "save_adapter": (save_adapter, 3, GROUPS),
    "translate_to_lora": (translate_to_lora, 2),
}
CHECKS, BUGS = checks(EXERCISES, finished, 1e-5)
