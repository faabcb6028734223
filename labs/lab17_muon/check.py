"""Lab 17's exercises: their cases. In float64, so that only a mistake is off by more than EXACT.

What is right comes from torch.optim.Muon on one device, with its one cast to bfloat16 taken out
(see muon.py), from torch's own count of operations, and beside these from the finished lab.
"""

import itertools
import math
import random
from contextlib import ExitStack, suppress
from functools import partial
from unittest import mock

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from labs.kit.eye import Most
from labs.kit.harness import Traffic
from labs.kit.inputs import drawn
from labs.kit.judge import checks
from labs.kit.tools import Products, noted_waits
from labs.lab17_muon.muon import EXACT, FAMILIES, LAYOUTS, finished, model_errors, tiny, torchs

SUBGROUP = True
GROUPS = [0, 1, 2], [0, 2], [1]
SHAPES = [  # (m, n), dim, blocks
    ((7, 5), 0, 1),
    ((4, 9), 1, 1),
    ((12, 5), 0, 4),  # heads of three rows, which ranks' borders cut
    ((2, 6), 0, 1),  # fewer rows than three ranks
    ((9, 4), 1, 3),
    ((5, 5), 0, 5),
]


def matrices_of(rank, world, seed, shapes=SHAPES):
    """(matrices, wholes): random updates (m, n), and of each the Matrix that a rank has."""
    matrices, wholes = [], []
    costs = [finished.flops(shape, blocks) for shape, _, blocks in shapes]
    dealt = zip(shapes, finished.owners(costs, world))
    for i, ((shape, dim, blocks), owner) in enumerate(dealt):
        shares = [finished.shard_range(shape[dim], r, world) for r in range(world)]
        sizes = [end - start for start, end in shares]
        sizes = sizes[::-1] if i % 2 else sizes  # the last rank has most
        whole = drawn(seed + i, *shape)
        own = nn.Parameter(whole.split(sizes, dim)[rank].clone())
        wholes.append(whole)
        matrices.append(finished.Matrix(own, torch.zeros_like(own), dim, sizes, blocks, owner))
    return matrices, wholes


# ---- One matrix, and who does what ---------------------------------------------------------------


def see_products(name, given, lab, eye):
    """A result in float64 and its operations; then the dtypes of products, asked for two."""
    with FlopCounterMode(display=False) as counter:
        eye.call(getattr(lab, name), given | {"dtype": torch.float64})
    eye.note("floating point operations", Most(counter.get_total_flops()))
    update, *blocks = given.values()
    for dtype in torch.bfloat16, torch.float64:
        with Products() as products:
            found = getattr(lab, name)(update.float(), *blocks, dtype)
        multiplied = ", ".join(sorted(map(str, products.dtypes)))
        eye.note(f"float32 as {dtype}: what is multiplied", multiplied)
        eye.note(f"float32 as {dtype}: the result's dtype", found.dtype)


def newton_schulz(group, seed):
    for i, (m, n) in enumerate(((5, 5), (3, 8), (8, 3), (1, 4), (4, 1), (6, 7))):
        matrix = drawn(seed + i, n, m).mT if i % 2 else drawn(seed + i, m, n)
        right = {"the result": torchs(matrix) / max(1, m / n) ** 0.5}
        yield f"({m}, {n})", partial(see_products, "newton_schulz", {"matrix": matrix}), right
    for title, length in {"zeros": 0, "numbers of 1e-9": 1e-9}.items():
        matrix = length * drawn(seed, 3, 4)
        right = {"the result": torchs(matrix)}
        yield title, partial(see_products, "newton_schulz", {"matrix": matrix}), right


def blocks(group, seed):
    sizes = (5, 7, 1), (7, 3, 1), (12, 5, 3), (12, 2, 4), (6, 6, 6)
    for i, (m, n, count) in enumerate(sizes):
        given = {"update": drawn(seed + i, m, n), "blocks": count}
        right = {"the result": torchs(*given.values())}
        title = f"({m}, {n}) in {count} block{'s' * (count > 1)}"
        yield title, partial(see_products, "orthogonalize", given), right


def choose(group, seed):
    def see(model, per_head, lab, eye):
        found = lab.choose(model, per_head)
        eye.note("the number of parameters", len(found))
        for name, count in found.items():
            eye.note(f"the number of blocks of {name}", count)

    for family, per_head in itertools.product(FAMILIES, [False, True]):
        model = tiny(family, seed)
        linears = [layer for layer in model.model.modules() if isinstance(layer, nn.Linear)]
        right = {"the number of parameters": len(linears)}
        yield f"{family}, per_head={per_head}", partial(see, model, per_head), right


def flops(group, seed):
    chosen = random.Random(seed)
    for count in 4 * (1, 1, 3, 8):
        given = {"shape": (count * chosen.randint(2, 12), chosen.randint(2, 12)), "blocks": count}
        with FlopCounterMode(display=False) as counter:
            finished.orthogonalize(drawn(seed, *given["shape"]), count, torch.float64)
        title = f"{given['shape']}, blocks: {count}"
        right = {"the number": counter.get_total_flops()}
        yield title, ("flops", given, "the number"), right


def owners(group, seed):
    def see(costs, lab, eye):
        for world in 3, 2, 5, 1:
            given = list(costs)
            eye.note(f"the list of owners on {world} ranks", [*lab.owners(given, world)])
            eye.note(f"{world} ranks: costs is overwritten", given != costs)

    chosen = random.Random(seed)
    drawn_costs = [[chosen.randint(1, 60) for _ in range(chosen.randint(1, 30))] for _ in range(9)]
    for costs in [*drawn_costs, [1, 9, 1, 1], [3] * 7, [5]]:
        yield f"costs {costs}", partial(see, costs)


def message_bytes(group, seed):
    for world in 4, 3, 2, 1:
        for rank, way, width in itertools.product(range(world), finished.WAYS, [2, 8]):
            matrices, _ = matrices_of(rank, world, seed)
            given = {"matrices": matrices, "rank": rank, "way": way, "width": width}
            title = f"{way}, rank {rank} of {world}, {width} bytes a number"
            yield title, ("message_bytes", given, "the dict")


# ---- The three ways ------------------------------------------------------------------------------


class Stopped(Exception):
    """Raised by a probe where messages of these sizes would wait for ever."""


def probes(lab, eye, traffic, order):
    """A context in which exchange() has its numbers noted, and sends none that are wrong.

    order: a list that gets, at each orthogonalize(), how often each collective has been called.
    """
    orthogonalize, exchange, calls = lab.orthogonalize, lab.exchange, itertools.count(1)

    def noting(*args, **named):
        order.append({op: count for op, (count, _) in traffic.ops.items()})
        return orthogonalize(*args, **named)

    def counting(sends, receives, *args):
        name = f"the numbers that go to the ranks by exchange() {next(calls)}, and come,"
        going = [sum(x.numel() for x in tensors) for tensors in sends]
        eye.note(name, (going, [sum(map(math.prod, shapes)) for shapes in receives]))
        if not eye.goes_on():
            raise Stopped
        return exchange(sends, receives, *args)

    stack = ExitStack()
    stack.enter_context(mock.patch.object(lab, "orthogonalize", noting))
    stack.enter_context(mock.patch.object(lab, "exchange", counting))
    return stack


def see_way(way, matrices, names, group, lab, eye):
    """A way in float64: its messages, its parts, its work; in float32 what is multiplied."""
    parts = [matrix.own.detach().clone() for matrix in matrices]
    given, order = [part.clone() for part in parts], []
    traffic, counter = Traffic(), FlopCounterMode(display=False)
    with suppress(Stopped), torch.no_grad(), probes(lab, eye, traffic, order):
        with traffic, counter, noted_waits(id) as waits:
            found = [*getattr(lab, way)(given, matrices, group, torch.float64)]
    if "skipped" in eye.seen:
        return
    calls = {op: count for op, (count, _) in traffic.ops.items()}
    eye.note("the number of calls of each collective", calls)
    eye.note_traffic("a step", traffic, waits)
    eye.note("the number of parts", len(found))
    for name, part in zip(names, found):
        eye.note(name, part)
    eye.note("parts is overwritten", not all(map(torch.equal, given, parts)))
    if way != "everywhere":  # where nobody waits for an owner
        eye.note("the list of calls before each orthogonalize()", order)
    eye.note("floating point operations", Most(counter.get_total_flops()))
    padded = sum(matrix.padded(part).nbytes for matrix, part in zip(matrices, parts))
    storages = [x.untyped_storage() for x in found if isinstance(x, torch.Tensor)]
    kept = {storage.data_ptr(): storage.nbytes() for storage in storages}
    eye.note("bytes that the parts keep alive", Most(max(padded, sum(kept.values()))))
    with torch.no_grad(), Products() as products:
        getattr(lab, way)(given, matrices, group, torch.float32)
    multiplied = ", ".join(sorted(map(str, products.dtypes)))
    eye.note("what is multiplied where float32 is asked for", multiplied)


def one_way(way, group, seed):
    for shapes in SHAPES, SHAPES[:1]:  # of one matrix most ranks own nothing
        rank = group.rank()
        matrices, wholes = matrices_of(rank, group.size(), seed, shapes)
        right = {
            f"a step: bytes that {op} moves": Most(nbytes)
            for op, nbytes in finished.message_bytes(matrices, rank, way, 8).items()
        }
        names = []
        for whole, matrix in zip(wholes, matrices):
            cut = f"{matrix.sizes} {('rows', 'columns')[matrix.dim]}"
            names.append(f"the part of the {matrix.shape} matrix, of which ranks have {cut},")
            right[names[-1]] = matrix.cut(torchs(whole, matrix.blocks))[rank]
        title = f"{len(shapes)} on {group.size()} rank{'s' * (group.size() > 1)}"
        yield title, partial(see_way, way, matrices, names, group), right


# ---- A step --------------------------------------------------------------------------------------


def step(group, seed):
    def see(lab, eye):
        """Two steps of two matrices, by a way that needs no other rank."""
        matrices, tensors = [], []
        for i in 0, 1:
            own, momentum = nn.Parameter(drawn(seed + i, 4, 3)), drawn(seed + 2 + i, 4, 3)
            matrices.append(lab.Matrix(own, momentum, 0, [4], 1))
            tensors.append((own.data_ptr(), momentum))

        def way(parts, theirs, *how):
            eye.note("the arguments that way() gets behind the matrices", how)
            eye.note("way() gets the matrices", theirs is matrices)
            updates.extend(part.clone() for part in parts)
            calls.append(len(parts))
            return [10 * part for part in parts]

        for number in 1, 2:
            updates, calls = [], []
            grads = [drawn(seed + 9 * number + i, 4, 3) for i in (0, 1)]
            for matrix, grad in zip(matrices, grads):
                matrix.own.grad = grad.clone()
            how = {"decay": 0.3, "beta": 0.9, "dtype": torch.float16}
            lab.step(matrices, way, "the group", 0.5, **how)
            eye.note("the list of how many parts way() gets in its calls", calls)
            for i, (matrix, (memory, momentum)) in enumerate(zip(matrices, tensors)):
                where = f"step {number}: matrix {i}:"
                eye.note(f"{where} momentum", matrix.momentum)
                eye.note(f"{where} the update", updates[i])
                eye.note(f"{where} own", matrix.own)
                eye.note(f"{where} momentum is a new tensor", matrix.momentum is not momentum)
                eye.note(f"{where} own has new memory", matrix.own.data_ptr() != memory)
                same = torch.equal(matrix.own.grad, grads[i])
                eye.note(f"{where} own.grad is overwritten", not same)

    def see_model(case, lab, eye):
        errors = model_errors(lab, *case, group, seed)
        off = [name for name, error in errors.items() if not error <= EXACT]
        eye.note("the list of tensors that are off", off[:3])

    yield "two matrices", see
    for i, (family, layout) in enumerate(itertools.product(FAMILIES, LAYOUTS)):
        way, per_head = [*finished.WAYS][(i + group.size()) % 3], (i + group.size()) % 2 > 0
        title = f"three steps of {family}, {layout} on {group.size()} ranks, {way}"
        see = partial(see_model, (family, layout, way, per_head))
        yield title, see, {"the list of tensors that are off": []}


ALONE = {"newton_schulz": newton_schulz, "blocks": blocks, "choose": choose, "flops": flops}
EXERCISES = {name: (cases, 1) for name, cases in (ALONE | {"owners": owners}).items()}
EXERCISES |= {way: (partial(one_way, way), 3, GROUPS) for way in finished.WAYS}
EXERCISES |= {"bytes": (message_bytes, 1), "step": (step, 3, GROUPS[:2])}
CHECKS, BUGS = checks(EXERCISES, finished, EXACT)
