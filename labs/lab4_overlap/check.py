"""Lab 4's checks, each of which runs on every rank, and the bugs that they have to catch.

Values and gradients are compared with one device's; a Link logs what starts and what waits, and
its order is what is judged, never how long something took.
"""

import time
import weakref
from contextlib import suppress
from functools import partial
from types import SimpleNamespace

import torch
import torch.distributed as dist

from labs.kit.compare import expect_same, tried
from labs.kit.harness import Wrong, expect, expect_close
from labs.kit.link import Link, expect_order
from labs.kit.tools import Kept
from labs.lab4_overlap import buckets

SUBGROUP = True  # the group is not the world, and has other rank numbers

LATE = 0.1  # seconds that one of the ranks joins each message late
START = "start the message before the GEMM that hides it"
WAIT = "wait after the GEMM, which then hides the message, and before its result is read"
TP_ORDER = [  # (first, then, hint)
    ("dgrad", "start all_reduce", "it sends dx"),
    ("start all_reduce", "wgrad", START),
    ("wgrad", "wait all_reduce", WAIT),
]
SP_ORDER = [
    ("start all_gather", "dgrad", START),
    ("dgrad", "wait all_gather", WAIT),
    ("wait all_gather", "wgrad", "wgrad reads what is gathered: wait for it"),
    ("dgrad", "start reduce_scatter", "it sends dx"),
    ("start reduce_scatter", "wgrad", START),
    ("wgrad", "wait reduce_scatter", WAIT),
]


def one_device(generator, group, s, b, h, o, way, bias=True, dtype=torch.float32):
    """A linear layer on one device, and what this rank holds of it and should get.

    Returns x, weight, bias, dy: this rank's inputs; y, dx, dw, db: what one device gives there;
    own_dx: dx without the other ranks; gemms: the names of the layer's GEMMs, for a Link.
    """

    def randn(*shape):
        return torch.randn(*shape, generator=generator, dtype=dtype)

    def own(full, dim=0):
        return full.tensor_split(group.size(), dim)[group.rank()].clone()

    def tokens(full):
        return own(full) if way == "SP" else full.clone()

    x, full, dy = randn(s, b, h), randn(o, h), randn(s, b, o)
    offset = randn(o) if bias else torch.zeros(o, dtype=dtype)
    weight = own(full)
    return SimpleNamespace(
        x=tokens(x).requires_grad_(),
        weight=weight.clone().requires_grad_(),
        bias=own(offset).requires_grad_() if bias else None,
        dy=own(dy, -1),
        y=own(x @ full.T + offset, -1),
        dx=tokens(dy @ full),
        own_dx=tokens(own(dy, -1) @ weight),
        dw=own(dy.flatten(0, 1).T @ x.flatten(0, 1)),
        db=own(dy.sum((0, 1))) if bias else None,
        gemms={s * b * h: "dgrad", weight.numel(): "wgrad", s * b * len(weight): "forward"},
    )


def draw_layers(seed, group, way):
    """Layers of one_device(), of uneven sizes: float32, with main_grad and no bias, float64.

    A rank has fewer output features than inputs, and fewer of those than tokens: no two GEMMs are
    as large.
    """
    generator = torch.Generator().manual_seed(seed)
    layers = []
    for dtype in torch.float32, torch.float32, torch.float64:
        bias = len(layers) != 1
        sizes = [torch.randint(3, 8, (), generator=generator).item() + more for more in (0, 5, 8)]
        shape = sizes[0] * group.size(), 2, *sizes[1:]
        layers.append(one_device(generator, group, *shape, way, bias, dtype))
    layers[1].weight.main_grad = torch.ones_like(layers[1].weight)
    layers[1].dw += 1
    return layers


def kept_storages(layer, function, group):
    """(y, {address: bytes}) of what function keeps for its backward, the weight's not counted."""
    with Kept(layer.weight, getattr(layer.weight, "main_grad", layer.weight)) as kept:
        y = function(layer.x, layer.weight, layer.bias, group)
    kept.note_attributes(y)
    return y, kept.storages


def expect_moved(link, nbytes, ops):
    """Raise Wrong unless the link carried each of ops once, with so many message bytes in it."""
    moved, wanted = link.traffic.ops, {op: [1, nbytes] for op in ops}
    expect(moved == wanted, f"[calls, bytes]: {moved}, not {wanted}", "all tokens, once; no dW, db")


def weight_gradient_of(layer):
    """Where the layer's dW is; raises Wrong if it is not there."""
    main_grad = getattr(layer.weight, "main_grad", None)
    if main_grad is None:
        expect(layer.weight.grad is not None, "dW is None", "backward returns it after dx")
        return layer.weight.grad
    hint = "hand ctx.main_grad on to weight_gradient(), and return what that returns"
    expect(layer.weight.grad is None, "a dW is returned beside main_grad", hint)
    return main_grad


def expect_same_as_one_device(layer):
    """Raise Wrong unless y and all gradients are one device's; returns the worst error."""
    named = [("y", layer.out, layer.y), ("dx", layer.x.grad, layer.dx)]
    named.append(("dW", weight_gradient_of(layer), layer.dw))
    if layer.bias is not None:
        named.append(("db", layer.bias.grad, layer.db))
    worst = 0
    for name, mine, right in named:
        expect(mine is not None, f"{name} is None", "db = grad.sum((0, 1)) where it is needed")
        with suppress(Wrong):
            worst = max(worst, expect_close(name, mine, right))
            continue
        hint = "memory of BUFFER is the next layer's: never keep or return it"
        late = "read before it had arrived: wait() for it first"
        expect_close(f"{name}, after another layer's turn,", mine, right, 1e-5, {hint: mine}, late)
    expect_same("x, weight or dy", (layer.x, layer.weight, layer.dy), layer.given)
    return worst


def check_layers(function, group, seed, way, order, forward, backward):
    """All layers forward, then all backward, one rank late, and only then compared.

    order: of the backward, as expect_order() takes it; forward, backward: the collectives allowed.
    Returns the worst error and the first layer.
    """
    layers, worst = draw_layers(seed, group, way), 0
    delay = partial(time.sleep, LATE) if group.rank() == seed % group.size() else None
    shards = group.size() if way == "SP" else 1  # x holds one of them
    for layer in layers:
        layer.given = [t.detach().clone() for t in (layer.x, layer.weight, layer.dy)]
        with Link(layer.gemms, delay=delay) as link:
            layer.out, sizes = kept_storages(layer, function, group)
        expect_moved(link, shards * layer.x.nbytes, forward)
        kept = sum(sizes.values())
        found = f"{kept} bytes are kept for the backward; {layer.x.nbytes} will do"
        expect(kept <= layer.x.nbytes, found, "keep the shard x, not the gathered one")
    for layer in reversed(layers):
        with Link(layer.gemms, delay=delay) as link:
            hint = "dW is of all tokens; returned are dx, dW, db, None, as large as x, weight, bias"
            tried("the backward", hint, layer.out.backward, layer.dy)
            expect(layer.x.grad is not None, "dx is None", "backward returns it first")
            early = layer.x.grad.clone()  # before what was not waited for arrives
        expect_order(link.log, order)
        expect_moved(link, shards * layer.x.nbytes, backward)
        hints = {"every rank's part of dx goes into the sum, before it is returned": layer.own_dx}
        hints["a sum over the ranks, not a mean"] = layer.dx / group.size()
        hint = "grad @ weight, summed over the ranks, in memory that no other message uses"
        worst = max(worst, expect_close("dx", early, layer.dx, hints=hints, hint=hint))
        mine, hint = weight_gradient_of(layer), "dy^T x, both of all tokens"
        if not mine.isfinite().all():
            hint = "wgrad has read what a message is still writing: is dx in BUFFER, too?"
        expect_close("dW", mine, layer.dw, hint=hint)
    for layer in layers:  # after the other layer has used the buffer
        worst = max(worst, expect_same_as_one_device(layer))
    return worst, layers[0]


def check_memory_buffer(lab, group, seed):
    generator = torch.Generator().manual_seed(seed)
    a, b, c = (torch.randint(2, 9, (), generator=generator).item() for _ in range(3))
    buffer = lab.GlobalMemoryBuffer()

    def get(*shape, dtype=torch.float32, name="mpu", of=buffer, hint="the key is (name, dtype)"):
        call = of.get_tensor, shape, dtype, name
        tensor = tried(f"get_tensor{shape}", "as many numbers as the shape has", *call)
        expect(isinstance(tensor, torch.Tensor), f"get_tensor returns {type(tensor).__name__}")
        found = f"{tuple(tensor.shape)} {tensor.dtype}, not {shape} {dtype}"
        expect(tensor.shape == shape and tensor.dtype == dtype, found, hint)
        expect(tensor.is_contiguous(), "it is not contiguous", "a collective wants it so")
        return tensor

    get(a, b, dtype=torch.bfloat16, name="first", hint="allocate it in that dtype")
    first = get(a, b, c).fill_(1)
    small = get(c, b - 1).fill_(2)
    same = small.data_ptr() == first.data_ptr()
    expect(same, "a smaller tensor gets memory of its own", "what is there is large enough: a view")
    seen = first.flatten()[0] == 2
    expect(seen, "what is written to the second is not seen in the first", "a view: no copy")
    again = get(c, b, a).data_ptr() == first.data_ptr()
    expect(again, "another shape gets memory of its own", "as many numbers fit")
    old = buffer.buffer.get(("mpu", torch.float32))
    found = f"buffer has the keys {[*buffer.buffer]}"
    expect(old is not None, found, "the key is (name, dtype), the value a flat tensor")
    old, first, small = weakref.ref(old), None, None
    large = get(a + 1, b, c)
    expect(old() is None, "memory that was too small is kept", "the largest asked for, alone")
    held = large.untyped_storage().nbytes()
    expect(held == large.nbytes, f"{held} bytes are held for {large.nbytes}", "the largest alone")
    expect(get(a, c).data_ptr() == large.data_ptr(), "it shrinks again", "it only grows")
    expect_apart(get, lab, a, b, large)
    return f"6 tensors share {held} bytes; another dtype, name or buffer has its own"


def expect_apart(get, lab, a, b, large):
    """Raise Wrong where another dtype, name or buffer has the memory that large has."""
    get(0, a)
    others = {
        "another dtype": get(a, b, dtype=torch.bfloat16),
        "a dtype of the same size": get(a, b, dtype=torch.int32),
        "another name": get(a, b, name="other"),
        "another buffer": get(a, b, of=lab.GlobalMemoryBuffer()),
    }
    for what, other in others.items():
        hint = "the key is (name, dtype), of a dict that each buffer has for itself"
        expect(other.data_ptr() != large.data_ptr(), f"{what} shares memory", hint)


def check_accumulation_fusion(lab, group, seed):
    generator = torch.Generator().manual_seed(seed)
    s, b, h, o, batches = 5, 2, 9, 7, 64
    randn = partial(torch.randn, generator=generator)
    weight, main_grad = randn(o, h).bfloat16().requires_grad_(), randn(o, h)
    right, rounded = main_grad.double(), main_grad.clone()
    in_bfloat16, before = main_grad.bfloat16(), main_grad.clone()
    x, grad = randn(s, b, h).bfloat16(), randn(s, b, o).bfloat16()
    alone = grad.flatten(0, 1).T @ x.flatten(0, 1)
    mine, given = lab.weight_gradient(grad, x, None), (grad.clone(), x.clone())
    expect_close("dW without main_grad", mine, alone, 1e-2, hint="dW (o/P, h) = grad^T x")
    expect(mine.dtype == x.dtype, f"dW is {mine.dtype}", "without main_grad in the dtype of x")
    lab.weight_gradient(grad, x, main_grad.clone())
    expect_same("grad or x", (grad, x), given)
    weight.main_grad = main_grad
    for _ in range(batches):  # the same sign in all: as gradients are, and where bfloat16 stalls
        x, grad = randn(s, b, h).abs().bfloat16(), randn(s, b, o).abs().bfloat16()
        y = lab.tp_linear(x.requires_grad_(), weight, None, group)
        y.backward(grad)
        x, grad = x.detach().flatten(0, 1), grad.flatten(0, 1)
        right += grad.double().T @ x.double()
        rounded += (grad.T @ x).float()
        in_bfloat16 += grad.T @ x
    hint = "return None where main_grad got it"
    expect(weight.grad is None, "a gradient tensor is made too", hint)
    hint = "a sum over all tokens, added to what is there"
    hints = {
        "the product is rounded to bfloat16 before it is added": rounded,
        "it is added up in bfloat16": in_bfloat16.float(),
        "add to what is there": grad.float().T @ x.float(),
        "nothing reached main_grad: work in place": before,
    }
    error = expect_close("main_grad", main_grad, right.float(), 1e-6, hints, hint)
    apart = (in_bfloat16.double() - right).norm() / right.norm()
    return f"{batches} microbatches: off by {error:.0e}; added up in bfloat16: {apart:.0e}"


def check_tp_backward(lab, group, seed):
    error, layer = check_layers(lab.tp_linear, group, seed, "TP", TP_ORDER, [], ["all_reduce"])
    moved = f"all-reduce of {layer.x.nbytes} bytes"
    return f"off by {error:.0e}; {moved} started before wgrad, waited after"


def check_sp_linear(lab, group, seed):
    asked, get_tensor = [], lab.BUFFER.get_tensor

    def noting_get_tensor(*args, **kwargs):
        asked.append(args)
        return get_tensor(*args, **kwargs)

    lab.BUFFER.get_tensor = noting_get_tensor
    moved = ["all_gather"], ["all_gather", "reduce_scatter"]
    error, layer = check_layers(lab.sp_linear, group, seed, "SP", SP_ORDER, *moved)
    found = f"3 layers, forward and backward, take memory of BUFFER {len(asked)} times"
    expect(len(asked) >= 6, found, "gather into BUFFER.get_tensor(shape, dtype, 'mpu')")
    kept = f"{layer.x.nbytes} bytes kept of {layer.x.nbytes * group.size()}"
    return f"off by {error:.0e}; {kept}; all-gather under dgrad, reduce-scatter under wgrad"


CHECKS = {
    "make_buckets": (buckets.check_make_buckets, 1),
    "on_gradient": (buckets.check_on_gradient, 2),
    "finish": (buckets.check_finish, 3),
    "memory_buffer": (check_memory_buffer, 1),
    "accumulation_fusion": (check_accumulation_fusion, 1),
    "tp_backward": (check_tp_backward, 3),
    "sp_linear": (check_sp_linear, 3),
}


# Bugs for --inject-bug: the checks have to catch every one


def waits_at_once(lab):
    """Every message is waited for where it starts: nothing overlaps, all values right."""

    def at_once(name, *tensors, **options):
        getattr(dist, name)(*tensors, **options | {"async_op": False})
        return SimpleNamespace(wait=lambda: None)

    replaced = {name: partial(at_once, name) for name in Link.OPS}
    lab.dist = SimpleNamespace(**vars(dist) | replaced)


def dx_in_shared_buffer(lab):
    """The dx that the backward returns lives in the buffer that the next layer gathers into."""
    right = lab.SPLinear.backward

    def backward(ctx, grad):
        dx, *rest = right(ctx, grad)
        return lab.BUFFER.get_tensor(dx.shape, dx.dtype, "mpu").copy_(dx), *rest

    lab.SPLinear.backward = staticmethod(backward)


def product_rounded(lab):
    """wgrad's product is rounded to bfloat16 before float32 adds it up."""
    right = lab.weight_gradient

    def weight_gradient(grad, x, main_grad):
        dw = right(grad, x, None)
        if main_grad is None:
            return dw
        main_grad += dw

    lab.weight_gradient = weight_gradient


BUGS = [waits_at_once, dx_in_shared_buffer, product_rounded]
