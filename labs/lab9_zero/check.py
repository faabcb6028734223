"""Lab 9's exercises: their cases. In float64, so that only a mistake is off by more than 1e-9.

A small LLaMA on P ranks, each with its own sequences, is held against one device that has all of
them. Gradients are noted at every step: AdamW alone would hide one that is too large by a factor.
"""

import itertools
import random
import weakref
from functools import partial
from unittest import mock

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from labs.kit.alive import Alive, bytes_alive
from labs.kit.eye import Most
from labs.kit.harness import Traffic
from labs.kit.inputs import draw_float64, drawn
from labs.kit.judge import checks
from labs.kit.tools import noted_waits
from labs.lab9_zero import zero
from labs.lab9_zero.zero import finished

SUBGROUP = True  # the group is not the world, and has other rank numbers


def flat(group, seed):
    def see(world, given, lab, eye):
        tensors = [x.clone() for x in given]
        vector, size = lab.flatten(tensors, world), sum(x.numel() for x in given)
        eye.note("the vector", vector)
        memory = [x.untyped_storage().data_ptr() for x in (vector, *tensors)]
        eye.note("the vector has a tensor's memory", memory[0] in memory[1:])
        eye.note("a tensor is overwritten", not all(map(torch.equal, tensors, given)))
        for rank in range(world):
            found = [int(number) for number in lab.held(size, rank, world)]
            eye.note(f"held({size}, {rank}, {world})", found)

    kinds = torch.float32, torch.bfloat16, torch.float64
    edges = (3, [(1,), (2, 2)]), (4, [(1,)]), (2, [(4,), (2, 2)]), (1, [(5,)])
    for world, shapes in *edges, (5, [(2, 3)]):  # of the last two ranks have no number
        tensors = [drawn(seed, *shape).movedim(0, -1).to(kinds[world % 3]) for shape in shapes]
        yield f"{shapes} for {world} ranks", partial(see, world, tensors)


def predict_memory(group, seed):
    number, _ = draw_float64(seed)
    worlds = [(world, rank) for world in (1, 2, 3, 5) for rank in range(world)]

    def see(config, tokens, lab, eye):
        eye.note("unit_sizes()", list(lab.unit_sizes(config)))
        for (world, rank), stage, width in itertools.product(worlds, range(4), (2, 8)):
            found = lab.memory(config, tokens, rank, world, stage, width)
            for part, nbytes in found.items():
                eye.note(f"ZeRO-{stage}, rank {rank} of {world}, {width} bytes: {part}", nbytes)

    for tied in False, True:
        heads = [kv := number(1, 4), kv * number(2, 4), 2 * number(2, 6)]
        sizes = dict(zip(("num_key_value_heads", "num_attention_heads", "head_dim"), heads))
        sizes |= {"hidden_size": heads[1] * number(5, 9), "intermediate_size": number(60, 90)}
        sizes |= {"num_hidden_layers": number(2, 5), "vocab_size": number(100, 200)}
        config = LlamaConfig(**sizes, tie_word_embeddings=tied)
        with torch.device("meta"):
            units = zero.unit_parameters(LlamaForCausalLM(config))
        right = {"unit_sizes()": [sum(p.numel() for p in unit) for unit in units]}
        title = "tied embeddings" if tied else "a head of its own"
        yield title, partial(see, config, number(40, 90)), right


def predict_messages(group, seed):
    number, _ = draw_float64(seed)
    for world, backwards, width in (3, 5, 16), (2, 1, 4), (4, 3, 2), (1, 1, 4):
        sizes = [number(8, 16)] + [number(16, 33)] * number(2, 5)
        sizes = [6 * size + 1 for size in sizes]  # which no world but 1 divides
        for stage in range(4):
            given = {"sizes": sizes, "world": world, "stage": stage, "backwards": backwards}
            call = "messages", given | {"width": width}, "messages()"
            yield f"ZeRO-{stage} on {world} ranks, {backwards} backwards", call


# ---- Steps of a model, and of a unit -------------------------------------------------------------


def see_steps(steps, stage, tied, max_norm, group, seed, lab, eye):
    """Steps of AdamW in a stage: losses, gradients, parameters, messages."""
    units = lab.make_units(model := zero.build(seed, tied), group, stage)
    masters, seen = [unit.master for unit in units], []
    memory = [[x.untyped_storage().data_ptr() for x in (u.shard, u.master)] for u in units]
    fine = all(isinstance(x, nn.Parameter) for x in masters) and all(a == b for a, b in memory)
    eye.note("each master is a Parameter, with the shard's memory", fine)
    if not eye.together(fine):
        eye.note("skipped", None)
        return
    optimizer = torch.optim.AdamW(masters, lr=zero.RATE, foreach=False)

    def look(*_):
        grads = [master.grad for master in masters]
        eye.note("units without a gradient", sum(grad is None for grad in grads))
        seen[:] = [grad.clone() for grad in grads if grad is not None]

    optimizer.register_step_pre_hook(look)
    with Traffic() as traffic, noted_waits() as waits:
        for number, step in enumerate(steps, 1):
            sequences = [ids.clone() for ids in step.ids[group.rank()]]
            loss = lab.train_step(model, units, optimizer, sequences, max_norm)
            eye.note(f"the loss of step {number}", loss)
            eye.note(f"the gradients of step {number}", torch.cat(seen))
            shards = torch.cat([unit.shard[: unit.own] for unit in units])
            eye.note(f"the own shards after step {number}", shards)
            if stage < 3:
                full = torch.cat([p.detach().flatten() for unit in units for p in unit.params])
                eye.note(f"all parameters after step {number}", full)
    eye.note_traffic("the steps", traffic, waits)


def train(stage, group, seed, tied, backwards, max_norm=None):
    """A case: steps in a stage, and what one device makes of all ranks' sequences."""
    rank, P, right = group.rank(), group.size(), {}
    steps = zero.one_device(seed, P, tied, backwards, max_norm)
    sizes = [len(unit) for unit in steps[0].weights]
    parts = [finished.held(size, rank, P) for size in sizes]

    def own(units):
        return torch.cat([x[start:][:count] for x, (start, _, count) in zip(units, parts)])

    for number, step in enumerate(steps, 1):
        right[f"the loss of step {number}"] = step.losses[rank]
        right[f"the own shards after step {number}"] = own(step.weights)
        if stage < 3:
            right[f"all parameters after step {number}"] = torch.cat(step.weights)
        if not max_norm:
            right[f"the gradients of step {number}"] = own(step.grads)
    for op, nbytes in {} if max_norm else finished.messages(sizes, P, stage, backwards, 8).items():
        right[f"the steps: bytes that {op} moves"] = Most(nbytes * len(steps))
    title = f"steps of ZeRO-{stage} on {P} rank{'s' * (P > 1)}"
    return title, partial(see_steps, steps, stage, tied, max_norm, group, seed), right


def see_unit(stage, shapes, orders, group, seed, lab, eye):
    """A step of SGD of a unit, whose gradients come in these orders, one for each backward."""
    unit = lab.Unit([nn.Parameter(drawn(seed, *shape)) for shape in shapes], group, stage)
    eye.note("numbers in master", unit.master.numel())
    if not eye.together(unit.master.numel() == unit.own):
        eye.note("skipped", None)
        return
    for backward, order in enumerate(orders):
        if stage == 3:
            unit.gather()
        parts = unit.views(drawn(seed + 10 * backward + group.rank(), unit.size))
        with Alive() as alive:
            for place, i in enumerate(order, 1):
                if stage < 2:
                    unit.params[i].grad += parts[i]
                    continue
                unit.params[i].grad = parts[i].clone()
                with Traffic() as traffic, noted_waits() as waits:
                    unit.arrived(unit.params[i])
                eye.note_traffic(f"gradient {place} of {len(order)}", traffic, waits)
                waits.clear()  # a work holds its tensors
        if stage == 2:
            kept = sum(p.grad is not None for p in unit.params)
            eye.note("gradients that stay after they were sent", kept)
            left = bytes_alive(alive.storages.valuerefs(), unit.shard_grad.nbytes)
            eye.note("bytes that stay alive after arrived()", Most(left))
            eye.note(f"shard_grad after backward {backward + 1}", unit.shard_grad[: unit.own])
    with Traffic() as traffic, noted_waits() as waits:
        unit.finish()
    eye.note_traffic("finish()", traffic, waits)
    eye.note("master.grad", unit.master.grad)
    unit.master.data -= unit.master.grad
    unit.zero()
    with Traffic() as traffic, noted_waits() as waits:
        unit.publish()
    eye.note_traffic("publish()", traffic, waits)
    if stage == 3:
        unit.gather()
    eye.note("the parameters after a step", torch.cat([p.detach().flatten() for p in unit.params]))


def stage_of(stage, group, seed):
    """Units of 11 numbers, and 1; two backwards a step on all ranks, tied embeddings on fewer."""
    shuffled, of_two = random.Random(seed), group.size() < 3
    for _ in range(3 if stage == 2 else 1):
        orders = [shuffled.sample(range(3), 3) for _ in range(2)]
        shapes = [(2, 3), (4,), (1,)]
        yield "gradients in any order", partial(see_unit, stage, shapes, orders, group, seed)
    one = partial(see_unit, stage, [(1,)], [[0], [0]], group, seed)
    yield "a unit of one number", one  # of which all ranks but the first own none
    yield train(stage, group, seed, of_two, 1 if of_two else 2)


# ---- ZeRO-3: what is here while a layer computes, and what is alive ------------------------------


def noted_lends(lab, memory):
    """Inside, weak references to what units have lent to their parameters are added to memory."""
    lend = lab.Unit.lend

    def noting(unit):
        memory.append(weakref.ref(unit.full.untyped_storage()))
        lend(unit)

    return mock.patch.object(lab.Unit, "lend", noting)


def see_by_hand(group, seed, lab, eye):
    """A unit that is begun and gathered, twice each, packed and freed."""
    memory = []
    with noted_lends(lab, memory), Traffic() as traffic, noted_waits() as waits:
        unit = lab.Unit([nn.Parameter(drawn(seed, 5, 3)), nn.Parameter(drawn(seed, 4))], group, 3)
        unit.begin()
        unit.begin()
        coming = unit.coming if isinstance(unit.coming, tuple | list) else [None]
        eye.note("coming is (vector, work) after begin()", hasattr(coming[-1], "wait"))
        eye.note("begin() waits", bool(waits))
        if not eye.together(hasattr(coming[-1], "wait")):
            eye.note("skipped", None)
            return
        unit.gather()
        eye.note("coming is None after gather()", unit.coming is None)
        eye.note("a parameter after gather()", unit.params[0])
        full, other = unit.full, torch.ones(2)
        unit.gather()
        unit.begin()
        eye.note("gather() makes another full of what is here", unit.full is not full)
        first, second = (p.detach() for p in unit.params)
        packed, views = [], {"weight": first.T, "part": second[1:]}
        for name, view in views.items():
            with Alive() as alive:
                kept = unit.pack(view)
            eye.note(f"bytes that pack() of a {name} makes", Most(alive.now()))
            eye.note(f"pack() gives a {name} itself", isinstance(kept, torch.Tensor))
            eye.note(f"unpack() of a {name}", unit.unpack(kept))
            packed.append(kept)
        eye.note("pack() gives another tensor itself", unit.unpack(unit.pack(other)) is other)
        del full, first, second, view, views, coming  # packed stays, because it must hold no memory
        waits.clear()
        unit.free()
        numbers = sum(p.numel() for p in unit.params)
        eye.note("numbers in the parameters after free()", numbers)
        eye.note("bytes that are alive after free()", Most(bytes_alive(memory, 0)))
    eye.note("gathers of one unit", traffic.ops["all_gather"][0])


def see_model(grad, group, seed, lab, eye):
    """What is here, and what is on its way, while a layer computes; what is alive afterwards."""
    memory, model = [], zero.build(seed, False)
    units = lab.make_units(model, group, 3)
    layers = units[1:]

    def look(phase, i, other, *_):
        where, their = f"{phase}: while layer {i} computes", f"the weights of layer {other}"
        coming = layers[other].coming if other in range(len(layers)) else None
        there = [j for j, u in enumerate(layers) if u.full is not None or u.coming is not None]
        eye.note(f"{where} its own weights are here", layers[i].full is not None)
        eye.note(f"{where} {their} are on their way", coming is not None)
        awaited = coming is not None and any(work is coming[1] for work in waits)
        eye.note(f"{where} {their} have been awaited", awaited)
        eye.note(f"{where} the list of gathered layers", there)

    def look_behind(i, module, args, y):
        if grad:
            y.register_hook(partial(look, "backward", i, i - 1))

    for i, layer in enumerate(model.model.layers):
        layer.self_attn.register_forward_pre_hook(partial(look, "forward", i, i + 1))
        layer.mlp.register_forward_hook(partial(look_behind, i))
    with noted_lends(lab, memory):
        with Traffic() as traffic, noted_waits() as waits, torch.set_grad_enabled(grad):
            units[0].gather()
            loss = finished.loss_of(model, torch.arange(zero.TOKENS)[None])
        eye.note_traffic("the forward", traffic, waits)
        waits.clear()  # a work holds its tensors
        numbers = sum(p.numel() for unit in layers for p in unit.params)
        eye.note("numbers in the layers' parameters after the forward", numbers)
        root = 8 * len(units[0].shard) * group.size()
        left = bytes_alive(memory, root) - root
        eye.note("bytes of layers that are alive after the forward", Most(left))
        if grad:
            with Traffic() as traffic, noted_waits() as waits:
                loss.backward()
            eye.note_traffic("the backward", traffic, waits)
            waits.clear()
            eye.note("bytes that are alive after the backward", Most(bytes_alive(memory, 0)))


def freed(group, seed):
    yield "a unit by hand", partial(see_by_hand, group, seed)
    yield "a forward alone", partial(see_model, False, group, seed)
    yield "a forward and backward", partial(see_model, True, group, seed)


def zero3(group, seed):
    yield from freed(group, seed)
    yield from stage_of(3, group, seed)


def prefetch(group, seed):
    yield from freed(group, seed)
    yield train(3, group, seed, True, 2)


def see_clip(stage, gradients, max_norm, group, lab, eye):
    units = [lab.Unit([nn.Parameter(0 * gradient)], group, stage) for gradient in gradients]
    for unit, gradient in zip(units, gradients):
        start, _, own = finished.held(len(gradient), group.rank(), group.size())
        unit.master.grad = (gradient[start:][:own] if stage else gradient).clone()
    with Traffic() as traffic, noted_waits() as waits:
        norm = lab.clip(units, max_norm)
    eye.note("norm", norm.reshape(()).double() if isinstance(norm, torch.Tensor) else norm)
    for i, unit in enumerate(units):
        eye.note(f"gradient {i}", unit.master.grad)
    calls, nbytes = (sum(each) for each in zip((0, 0), *traffic.ops.values()))
    eye.note("collectives", Most(calls))
    eye.note("bytes of collectives", Most(max(nbytes, 8 * group.size())))  # an all-gather will do
    eye.note_unwaited("collectives that nobody waits for", traffic, waits)


def clip(group, seed):
    for stage, factor in itertools.product(range(4), (1 / 3, 2, 0)):
        gradients = [drawn(seed + n, n) * bool(factor) for n in (7, 1, 12)]
        norm = torch.cat(gradients).norm().item()
        limit = factor * norm or 1.0
        title = f"ZeRO-{stage}, norm {norm:.1f}, limit {limit:.1f}"
        right = {"norm": torch.tensor(norm, dtype=torch.float64)}
        yield title, partial(see_clip, stage, gradients, limit, group), right
    for stage in 1, 3:
        yield train(stage, group, seed, True, 1, max_norm=0.05)


EXERCISES = {cases.__name__: (cases, 1) for cases in (flat, predict_memory, predict_messages)}
EXERCISES["zero1"] = partial(stage_of, 1), 3, [[0, 1, 2], [1, 2]]
ALL_AND_TWO, PAIRS = [[0, 1, 2, 3], [1, 2]], [[0, 3], [1, 2]]
EXERCISES["zero2"] = partial(stage_of, 2), 4, ALL_AND_TWO
EXERCISES["zero3"] = zero3, 4, ALL_AND_TWO
EXERCISES["prefetch"] = prefetch, 4, PAIRS
EXERCISES["clip"] = clip, 4, PAIRS
CHECKS, BUGS = checks(EXERCISES, finished, zero.EXACT)
