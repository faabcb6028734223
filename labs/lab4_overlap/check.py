"""Lab 4's exercises: their cases. mistakes.txt has the wrong answers.

Values and gradients are one device's; bytes, and what a backward keeps, the finished lab's.
On a Link a message travels only once it is waited for. Its log shows what starts and what
waits, and the order of that is judged, never how long something takes. All numbers are whole,
so that every order of their sums gives the same.
"""

import itertools
import random
import weakref
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn

from labs.kit.eye import Most, copied, unchanged
from labs.kit.judge import checks
from labs.kit.link import Link, comes_before
from labs.kit.tools import Kept, noted_waits
from labs.lab4_overlap import lesson as finished  # not the learner's

SUBGROUP = True  # the group is not the world, and has other rank numbers
GROUPS = [0, 1, 2], [0, 1]
EXACT = 1e-12
SCALE = {torch.float64: 2**21, torch.float32: 4, torch.bfloat16: 4}  # float32 rounds float64's


def draw_whole(seed, dtype):
    """randn(*shape): random whole numbers, the same on every rank."""
    numbers = torch.Generator().manual_seed(seed)

    def randn(*shape):
        x = torch.randn(shape, generator=numbers, dtype=torch.float64)
        return x.mul(SCALE[dtype]).round().to(dtype)

    return randn


# ---- Data parallelism ---------------------------------------------------------------------

SHAPES = (5, 6), (6,), (4, 5), (5,), (5, 5), (5,)  # of a model's parameters
LAYER = {1, 2, 3}  # the places of what a rank may not use: all of one bucket, a part of another
MOST = 40  # numbers a bucket


def see_buckets(sizes, most, kind, lab, eye):
    parameters = [nn.Parameter(torch.zeros(1, size)) for size in sizes]
    places = {id(p): place for place, p in enumerate(parameters)}
    given = kind(parameters)
    buckets = lab.make_buckets(given, most)
    eye.note("the list of buckets", [[places.get(id(p)) for p in each] for each in buckets])
    if kind is list:
        eye.note("parameters is overwritten", [*map(id, given)] != [*places])


def make_buckets(group, seed):
    numbers = torch.Generator().manual_seed(seed)
    sizes = [*torch.randint(1, 60, (7,), generator=numbers).tolist(), 100, 1, 2, 57, 60]
    for most, kind in (60, list), (10, iter), (10_000, tuple):
        yield f"at most {most}, sizes {sizes}", partial(see_buckets, sizes, most, kind)


def see_arrivals(orders, group, lab, eye):
    """Steps in a row, in each of which gradients arrive in another order."""
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    parallel = lab.DataParallel(parameters, group, MOST)
    for step, order in enumerate(orders):
        for p in parameters:
            p.grad = torch.ones_like(p)
        with parallel.no_sync():
            for place in order:
                parallel.on_gradient(parameters[place])
        eye.note(f"step {step}: the number of starts inside no_sync()", parallel.started)
        started = []
        with noted_waits(id) as waits:
            for place in order:
                parallel.on_gradient(parameters[place])
                started.append(parallel.started)
        eye.note(f"step {step}: how many have started after each gradient", started)
        eye.note(f"step {step}: the number of waits", len(waits))
        parallel.finish(1)


def on_gradient(group, seed):
    draw, places = random.Random(seed + group.rank()), range(len(SHAPES))
    shuffled = [draw.sample(places, len(places)) for _ in range(3)]  # another one on each rank
    orders = [[*places][::-1], [*places], *shuffled]
    yield "orders of arrival", partial(see_arrivals, orders, group)


def note_messages(when, link, eye):
    waits = [what for what, *_ in link.log if what.startswith("wait")]
    eye.note_traffic(when, link.traffic, waits)


def see_steps(steps, group, lab, eye):
    """steps [([each parameter's gradients in the first microbatches of 2], the rank's tokens)]"""
    dtype = steps[0][0][0].dtype
    parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in SHAPES]
    parallel = lab.DataParallel(parameters, group, MOST)
    with Link({}, mode="latest") as link:
        for step, (grads, tokens) in enumerate(steps):
            if not eye.goes_on():
                break
            for p in parameters:
                p.grad = None
            for batch in 0, 1:
                pairs = zip(parameters, grads)
                losses = [(p * grad[batch]).sum() for p, grad in pairs if batch < len(grad)]
                with nullcontext() if batch else parallel.no_sync():
                    sum(losses).backward()
            parallel.finish(tokens)
            for i, p in enumerate(parameters):
                eye.note(f"step {step}: .grad {i}", p.grad)
            left = [parallel.started, len(parallel.works), len(parallel.arrived)]
            eye.note(f"step {step}: what is left of started, works, arrived", left)
    note_messages("all steps", link, eye)


def finish(group, seed):
    P, rank = group.size(), group.rank()
    some = [set(), {0, 1, 2}, {0}, {1, 2}]  # of each step: the ranks that skip a layer ...
    for title, dtype, tokens, skips, uses in (  # ... but in so many microbatches, the first ones
        ("ranks that skip a layer", torch.float64, [3, 5, 8], some, 0),
        ("a layer that the last microbatch skips", torch.float64, [3, 5, 8], [{1}], 1),
        ("in float32", torch.float32, [3, 5, 8], [{1}], 0),
        ("rank 0 without tokens", torch.float64, [0, 1001, 777], [set()], 0),
    ):
        randn, steps, right = draw_whole(seed, dtype), [], {}
        tokens = tokens[:P]  # to divide by 8 or 16 tokens rounds nothing
        for step, without in enumerate(skips):
            grads = []
            for r, count in enumerate(tokens):
                used = [uses if r in without and i in LAYER else 2 for i in range(len(SHAPES))]
                grads.append([randn(n, *s) * (count > 0) for n, s in zip(used, SHAPES)])
            for i, parts in enumerate(zip(*grads)):
                right[f"step {step}: .grad {i}"] = torch.cat(parts).sum(0) / sum(tokens)
            steps.append((grads[rank], tokens[rank]))
        yield title, partial(see_steps, steps, group), right


# ---- Memory -------------------------------------------------------------------------------


def see_buffer(a, b, c, lab, eye):
    buffer = lab.GlobalMemoryBuffer()

    def get(*shape, dtype=torch.float32, name="mpu", of=buffer):
        x = of.get_tensor(shape, dtype, name)
        seen = f"{tuple(x.shape)} {x.dtype}" + ", not contiguous" * (not x.is_contiguous())
        eye.note(f"get_tensor({shape}, {dtype}, {name!r})", seen)
        return x

    get(a, b, dtype=torch.bfloat16, name="first")
    get()
    first = get(a, b, c).fill_(1)
    small = get(c, b - 1).fill_(2)
    eye.note("a smaller one is apart", small.data_ptr() != first.data_ptr())
    eye.note("a smaller one is a copy", first.flatten()[0].item() != 2)
    eye.note("another shape is apart", get(c, b, a).data_ptr() != first.data_ptr())
    eye.note("the list of keys in buffer", sorted(map(str, buffer.buffer)))
    old, first, small = weakref.ref(first.untyped_storage()), None, None
    large = get(a + 1, b, c)
    eye.note("memory that was too small is kept", old() is not None)
    eye.note("what is held, in bytes,", Most(large.untyped_storage().nbytes()))
    eye.note("a small one after it is apart", get(a, c).data_ptr() != large.data_ptr())
    get(0, a)
    others = [get(a, b, dtype=dtype) for dtype in (torch.bfloat16, torch.int32)]
    others += [get(a, b, name="other"), get(a, b, of=lab.GlobalMemoryBuffer())]
    shared = [x.data_ptr() == large.data_ptr() for x in others]
    eye.note("the list of whether another dtype, name or buffer shares memory", shared)


def memory_buffer(group, seed):
    numbers = torch.Generator().manual_seed(seed)
    sizes = torch.randint(2, 9, (3,), generator=numbers).tolist()
    yield "shapes of one buffer", partial(see_buffer, *sizes)


def see_sum(batches, main_grad, lab, eye):
    """weight_gradient() of microbatches, one after another, with a main_grad."""
    total = main_grad.clone()
    memory = total.data_ptr()
    for i, (grad, x) in enumerate(batches):
        given = grad.clone(), x.clone()
        out = lab.weight_gradient(*given, total)
        eye.note(f"main_grad after microbatch {i}", total)
        eye.note("something is returned beside main_grad", out is not None)
        eye.note("main_grad has other memory", total.data_ptr() != memory)
        eye.note("grad or x is overwritten", not all(map(torch.equal, given, (grad, x))))


def accumulation_fusion(group, seed):
    for dtype in torch.bfloat16, torch.float32, torch.float64:
        randn = draw_whole(seed, dtype)
        x, grad = randn(5, 2, 9), randn(5, 2, 7)
        if dtype == torch.float32:  # with other strides
            x, grad = (each.mT.contiguous().mT for each in (x, grad))
        right = torch.einsum("sbo,sbh->oh", grad.double(), x.double()).to(dtype)
        given = {"grad": grad, "x": x, "main_grad": None}
        yield f"{dtype}, no main_grad", ("weight_gradient", given, "dW"), {"dW": right}
        if dtype == torch.float64:  # main_grad is float32
            break
        # all of one sign: a sum in bfloat16 does not grow any more
        batches = [(randn(20, 2, 7).abs(), randn(20, 2, 9).abs()) for _ in range(9)]
        main_grad, total, right = 30 * randn(7, 9).float(), 0, {}
        for i, (grad, x) in enumerate(batches):
            total = total + torch.einsum("sbo,sbh->oh", grad.double(), x.double())
            right[f"main_grad after microbatch {i}"] = (main_grad + total).float()
        yield f"{dtype}, with main_grad", partial(see_sum, batches, main_grad), right


# ---- Layers -------------------------------------------------------------------------------

ORDER = {  # of what comes one after the other in a backward
    "TP": [["dgrad", "start all_reduce", "wgrad", "wait all_reduce"]],
    "SP": [
        ["start all_gather", "dgrad", "wait all_gather", "wgrad"],
        ["dgrad", "start reduce_scatter", "wgrad", "wait reduce_scatter"],
    ],
}


def one_device(randn, group, s, b, h, o, way, bias=True):
    """A linear layer on one device, and what this rank holds of it and should get.

    Returns x, weight, bias, dy: this rank's inputs; y, dx, dw, db: what one device gives there;
    gemms: the names of the backward's GEMMs, for a Link.
    """

    def own(full, dim=0):
        return full.tensor_split(group.size(), dim)[group.rank()].clone()

    tokens = own if way == "SP" else torch.clone
    x, full, dy = randn(s, b, h), randn(o, h), randn(s, b, o)
    offset = randn(o) if bias else None
    weight = own(full)
    return SimpleNamespace(
        x=tokens(x).requires_grad_(),
        weight=weight.requires_grad_(),
        bias=own(offset).requires_grad_() if bias else None,
        dy=own(dy, -1),
        y=own(F.linear(x, full, offset), -1),
        dx=tokens(dy @ full),
        dw=own(dy.flatten(0, 1).T @ x.flatten(0, 1)),
        db=own(dy.sum((0, 1))) if bias else None,
        way=way,
        gemms={s * b * h: "dgrad", weight.numel(): "wgrad"},
    )


def see_forward(what, function, layer, group, eye):
    """(y, {name: x, weight, bias}); the weight has a main_grad where layer.fused."""
    given = {name: copied(getattr(layer, name)) for name in ("x", "weight", "bias")}
    weight = given["weight"]
    if layer.fused:
        weight.main_grad = torch.ones_like(weight, requires_grad=False)
    with Kept(weight, getattr(weight, "main_grad", weight)) as kept:
        y = function(*given.values(), group)
    kept.note_attributes(y)
    eye.note(f"{what}: y", y)
    eye.note(f"{what}: what is kept, in bytes,", Most(kept.bytes))
    return y, given


def see_backward(what, y, given, layer, link, eye):
    dy = layer.dy.transpose(0, 1).contiguous().transpose(0, 1)  # with other strides
    link.gemms, begin = layer.gemms, len(link.log)
    y.backward(dy)
    eye.note(f"{what}: dx", given["x"].grad)
    for first, then in itertools.chain(*map(itertools.pairwise, ORDER[layer.way])):
        there = comes_before(link.log[begin:], first, then)
        eye.note(f"{what}: no '{then}' after '{first}'", not there)
    weight, bias = given["weight"], given["bias"]
    if layer.fused:
        eye.note(f"{what}: a dW is returned beside main_grad", weight.grad is not None)
    eye.note(f"{what}: dW", weight.main_grad if layer.fused else weight.grad)
    if bias is not None:
        eye.note(f"{what}: db", bias.grad)
    for name, mine in (given | {"dy": dy}).items():
        eye.note(f"{what}: {name} is overwritten", not unchanged(mine, getattr(layer, name)))


def see_layers(name, layers, group, lab, eye):
    """All layers forward, then all backward, and then what the others have left of each."""
    function, run = getattr(lab, name), []
    with mock.patch.object(lab, "BUFFER", lab.GlobalMemoryBuffer()):
        with Link({}, mode="latest") as link:
            for i, layer in enumerate(layers):
                run.append(see_forward(f"layer {i}", function, layer, group, eye))
        note_messages("forward", link, eye)
        eye.note("the list of keys in BUFFER", sorted(map(str, lab.BUFFER.buffer)))
        for memory in lab.BUFFER.buffer.values():
            memory.fill_(torch.nan)
        with Link({}, mode="latest") as link:
            for i, layer in reversed([*enumerate(layers)]):
                see_backward(f"layer {i}", *run[i], layer, link, eye)
        note_messages("backward", link, eye)
        used = [not memory.isnan().all() for memory in lab.BUFFER.buffer.values()]
        eye.note("the list of what the backward uses of BUFFER", used)
    for i, (y, given) in enumerate(run):
        eye.note(f"layer {i}, after the others' turn: y", y)
        eye.note(f"layer {i}, after the others' turn: dx", given["x"].grad)


def linear(group, seed, way):
    """Layers of uneven sizes: float32, with main_grad and no bias, float64.

    A rank has fewer output features than there are tokens, so no two GEMMs are as large.
    """
    numbers, layers, right = random.Random(seed), [], {}
    for i, dtype in enumerate((torch.float32, torch.float32, torch.float64)):
        sizes = [numbers.randint(3, 7) + more for more in (0, 5, 8)]
        shape = sizes[0] * group.size(), 2, *sizes[1:]
        layer = one_device(draw_whole(seed + i, dtype), group, *shape, way, bias=i != 1)
        layer.fused = i == 1
        layers.append(layer)
        for when in "", ", after the others' turn":
            right |= {f"layer {i}{when}: y": layer.y, f"layer {i}{when}: dx": layer.dx}
        right[f"layer {i}: dW"] = layer.dw + layer.fused
        if layer.bias is not None:
            right[f"layer {i}: db"] = layer.db
    see = partial(see_layers, f"{way.lower()}_linear", layers, group)
    yield f"{group.size()} ranks", see, right


EXERCISES = {
    "make_buckets": (make_buckets, 1),
    "on_gradient": (on_gradient, 2),
    "finish": (finish, 3, GROUPS),
    "memory_buffer": (memory_buffer, 1),
    "accumulation_fusion": (accumulation_fusion, 1),
    "tp_backward": (partial(linear, way="TP"), 3, GROUPS),
    "sp_linear": (partial(linear, way="SP"), 3, GROUPS),
}
CHECKS, BUGS = checks(EXERCISES, finished, EXACT)
