"""A small LLaMA trained in a stage of ZeRO, each step held against one device's: for lab 9."""

import random
from functools import partial
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, parameters_to_vector
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from labs.kit.compare import close, drawn, tried
from labs.kit.harness import Traffic, expect, expect_close
from labs.kit.tools import noted_waits, subgroup
from labs.lab9_zero import lesson as finished  # not the learner's

loss_of = finished.loss_of

EXACT = 1e-9
expect_equal = partial(close, tolerance=EXACT)
SIZE = "a collective's input or output is P times the other; master.grad has `own` numbers"
STEPS, RATE, TOKENS = 3, 1e-2, 12
SIZES = {"hidden_size": 20, "intermediate_size": 27, "num_hidden_layers": 3, "vocab_size": 37}
SIZES |= {"num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 4}


class Norm(LlamaRMSNorm):
    """RMSNorm in the dtype of its input; HF's computes in float32 whatever comes."""

    def forward(self, x):
        return self.weight * x * (x.square().mean(-1, keepdim=True) + self.variance_epsilon).rsqrt()


class Scaled(LlamaForCausalLM):
    """LLaMA whose logits are scaled by one more parameter, of one number: less than a rank each."""

    def __init__(self, config):
        super().__init__(config)
        self.scale = nn.Parameter(torch.tensor([1.3]))

    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        out.logits = out.logits * self.scale
        return out


def build(seed, tied):
    """The small model in float64, the same on every rank."""
    torch.manual_seed(seed)
    model = Scaled(LlamaConfig(**SIZES, tie_word_embeddings=tied)).double()
    for module in model.modules():
        if isinstance(module, LlamaRMSNorm):
            module.__class__ = Norm
            nn.init.normal_(module.weight, mean=1, std=0.1)
    return model


def unit_parameters(model):
    """[parameters of the root unit, of each layer's], as make_units() takes them."""
    layers = [list(layer.parameters()) for layer in model.model.layers]
    inside = {id(p) for layer in layers for p in layer}
    return [[p for p in model.parameters() if id(p) not in inside], *layers]


def one_device(seed, world, tied, backwards, max_norm=None):
    """What one device makes of all ranks' sequences in STEPS steps of AdamW.

    ids [rank][backward] (1, s), sizes of the units; of each step: its loss, by unit the flat
    gradient before clipping, that of each rank's sequences alone, the weights after the step.
    """
    model = build(seed, tied)
    units = unit_parameters(model)
    numbers = torch.Generator().manual_seed(seed)
    draw = partial(torch.randint, SIZES["vocab_size"], (1, TOKENS), generator=numbers)
    case = SimpleNamespace(ids=[[draw() for _ in range(backwards)] for _ in range(world)], steps=[])
    case.sizes = [sum(p.numel() for p in unit) for unit in units]
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, foreach=False)
    for _ in range(STEPS):
        step = SimpleNamespace(own=[], losses=[])
        for mine in case.ids:
            loss = sum(loss_of(model, ids) for ids in mine) / backwards
            grads = iter(torch.autograd.grad(loss, [p for unit in units for p in unit]))
            step.own.append([torch.cat([next(grads).flatten() for _ in unit]) for unit in units])
            step.losses.append(loss.detach())
        step.grads = [sum(parts) / world for parts in zip(*step.own)]
        for unit, flat in zip(units, step.grads):
            for p, part in zip(unit, flat.split([p.numel() for p in unit])):
                p.grad = part.view_as(p).clone()
        if max_norm:
            clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        step.weights = [parameters_to_vector(unit).detach().clone() for unit in units]
        case.steps.append(step)
    return case


def shard_of(size, rank, world):
    """(start, end) of a rank's shard without its padding."""
    c = -(-size // world)
    return min(rank * c, size), min((rank + 1) * c, size)


def expected_bytes(sizes, world, stage, backwards, width=8):
    """{collective: message bytes of a step}; the root unit is the first."""
    padded = [width * (size + -size % world) for size in sizes]
    if stage == 0:
        return {"all_reduce": sum(padded)}
    times = backwards if stage > 1 else 1
    gathered = times * (2 * sum(padded) - padded[0]) if stage == 3 else sum(padded)
    return {"reduce_scatter": times * sum(padded), "all_gather": gathered}


def expect_messages(what, traffic, wanted, waits):
    """Raise Wrong where a collective moves more than wanted, is not wanted, or is not awaited."""
    for op, (calls, nbytes) in traffic.ops.items():
        found = f"{what}: {op} moves {nbytes} bytes in {calls} calls; {wanted.get(op, 0)} will do"
        hint = "a unit as one message, once; what is one number for all units, once for all"
        if "all_reduce" in traffic.ops and "reduce_scatter" in wanted:
            hint = "a reduce-scatter brings a rank its shard of the sum, and no more"
        expect(nbytes <= wanted.get(op, 0), found, hint)
    begun = sum(calls for calls, _ in traffic.ops.values())
    found = f"{what}: {begun} collectives begin, {len(waits)} are awaited"
    expect(len(waits) >= begun, found, "work.wait() before the result is used")


def gradient_hints(step, unit, rank, part):
    """{hint: the gradient that a usual mistake gives}, of a rank's shard of a unit."""
    world, right, own = len(step.own), step.grads[unit][part], step.own[rank][unit][part]
    hints = {"divided by P twice: it is the mean already": right / world}
    hints |= {"the mean over the ranks is wanted, not the sum": right * world}
    alone = "these are the own sequences' gradients: reduce-scatter those of all ranks"
    return hints | {alone: own, f"{alone}, then divide": own / world}


def start(lab, group, stage, seed, tied):
    """(model, units, optimizer) of the learner's, in a stage."""
    model = build(seed, tied)
    units = lab.make_units(model, group, stage)
    masters = [unit.master for unit in units]
    for i, (unit, master) in enumerate(zip(units, masters)):
        first, last = shard_of(unit.size, group.rank(), group.size())
        name, kind = f"master of unit {i}", type(master).__name__
        expect(isinstance(master, nn.Parameter), f"{name} is {kind}", "a Parameter")
        found = f"{name} has {master.numel()} numbers, {last - first} are parameters"
        expect(master.numel() == last - first, found, "no optimizer state for padding or others")
        shard, mine = (t.untyped_storage().data_ptr() for t in (unit.shard, master))
        view = mine == shard and master.storage_offset() == unit.shard.storage_offset()
        hint = "a step has to change the shard: a view of it, not a copy"
        expect(view, f"{name} has memory of its own", hint)
    return model, units, torch.optim.AdamW(masters, lr=RATE, foreach=False)


def follow(lab, group, stage, seed, tied, backwards, max_norm=None):
    """Train STEPS steps in a stage, each held against one device; returns the largest error."""
    rank, world, worst = group.rank(), group.size(), 0
    case = one_device(seed, world, tied, backwards, max_norm)
    model, units, optimizer = start(lab, group, stage, seed, tied)
    parts = [slice(*shard_of(size, rank, world)) for size in case.sizes]
    kept = []  # the gradients that AdamW sees

    def note(*_):
        kept[:] = [None if u.master.grad is None else u.master.grad.clone() for u in units]

    optimizer.register_step_pre_hook(note)
    hint = "a parameter is empty, or full None, where it is needed" if stage == 3 else SIZE
    wanted = expected_bytes(case.sizes, world, stage, backwards)
    if max_norm:  # one number more, by either of these
        wanted |= {"all_reduce": 8, "all_gather": wanted["all_gather"] + 8 * world}
    for number, step in enumerate(case.steps):
        where = f"ZeRO-{stage} on {world} ranks, step {number + 1}"
        with Traffic() as traffic, noted_waits() as waits:
            args = model, units, optimizer, case.ids[rank], max_norm
            loss = tried(where, hint, lab.train_step, *args)
        expect_messages(where, traffic, wanted, waits)
        right = step.losses[rank]
        expect_equal(f"{where}: the loss", loss, right, {}, astray(stage, number, "loss"))
        if not max_norm:  # check_clip compares what is clipped
            worst = max(worst, expect_gradients(where, stage, number, kept, step, rank, parts))
        worst = max(worst, expect_weights(where, units, step.weights, parts))
    expect_state(optimizer, units, 2 * sum(part.stop - part.start for part in parts))
    return worst


def expect_gradients(where, stage, number, kept, step, rank, parts):
    """Raise Wrong unless each unit's gradient is one device's, the rank's part of it; the error."""
    worst = 0
    for i, (mine, part) in enumerate(zip(kept, parts)):
        what = f"{where}: the gradient of unit {i}"
        expect(mine is not None, f"{what} is missing", "set master.grad to the own part")
        hints, otherwise = gradient_hints(step, i, rank, part), astray(stage, number, "")
        worst = max(worst, expect_equal(what, mine, step.grads[i][part], hints, otherwise))
    return worst


def check_arrivals(lab, group, seed):
    """Units of ZeRO-2, whose gradients arrive in any order, in two backwards."""
    rank, world, draw = group.rank(), group.size(), random.Random(seed)
    shapes = [(2, 3), (4,), (1,)]
    for _ in range(4):
        unit = lab.Unit([nn.Parameter(drawn(seed, *shape)) for shape in shapes], group, 2)
        own = slice(*shard_of(unit.size, rank, world))
        wanted = expected_bytes([unit.size], world, 2, 1) | {"all_gather": 0}
        means = []
        for backward in range(2):
            parts = [drawn(seed + 10 * backward + r, unit.size) for r in range(world)]
            means.append(sum(parts)[own] / world)
            with Traffic() as traffic, noted_waits() as waits:
                for place, i in enumerate(draw.sample(range(len(shapes)), len(shapes))):
                    found = f"a reduce-scatter when {place} of {len(shapes)} gradients are there"
                    hint = "send when none is missing, whatever their order; flatten() pads for it"
                    expect(not traffic.ops, found, hint)
                    unit.params[i].grad = unit.views(parts[rank])[i].clone()
                    what = f"backward {backward + 1}: arrived() of gradient {place + 1}"
                    tried(what, hint, unit.arrived, unit.params[i])
            expect(traffic.ops, "all gradients of a unit are there, and none are sent", hint)
            left = [p for p in unit.params if p.grad is not None]
            hint = "set every .grad to None: the full gradients are to be gone"
            expect(not left, f"{len(left)} gradients stay after they were sent", hint)
            expect_messages("arrived()", traffic, wanted, waits)
            hints = {"the mean over the ranks is wanted, not the sum": sum(means) * world}
            hints["reduce-scatter the gradients of all ranks"] = parts[rank][own]
            hints["divided by P twice"] = sum(means) / world
            if backward:
                hints["add to what earlier backwards left: all the step's"] = means[-1]
            what, mine = f"shard_grad after {backward + 1} backwards", unit.shard_grad[: unit.own]
            hint = "the mean over the ranks, padded as flatten() does it; added to what is there"
            expect_equal(what, mine, sum(means), hints, hint)


def expect_state(optimizer, units, most):
    """Raise Wrong unless AdamW's averages of the masters have so many numbers."""
    state = [optimizer.state[unit.master] for unit in units]
    averages = sum(each[key].numel() for each in state for key in ("exp_avg", "exp_avg_sq"))
    expect(averages == most, f"{averages} numbers of optimizer state, not {most}")


def astray(stage, number, what):
    """A hint for a loss or gradient ("what") that is wrong in step number, from 0, first of all."""
    if what == "loss":
        return "the parameters are not all ranks' shards in their order, as they are now"
    if stage < 3:
        return "the gradients of all the step's backwards, of all parameters, once each"
    if number == 0:
        return "the loss is right: unpack() finds another tensor than was saved (strides, offset)"
    return "right before the first update: the backward uses weights that were gathered before it"


def expect_weights(what, units, weights, parts):
    """Raise Wrong unless all that a rank holds of the parameters is as on one device; the error."""
    worst = 0
    for i, (unit, right, part) in enumerate(zip(units, weights, parts)):
        name, mine = f"{what}: unit {i}, the own shard", unit.shard[: unit.own]
        hint = "it is the optimizer's alone: nothing else writes to it"
        worst = max(worst, expect_close(name, mine, right[part], EXACT, hint=hint))
        if unit.stage < 3:
            full = torch.cat([p.detach().flatten() for p in unit.params])
            hint = "the own shard is right, the others are not: every rank needs all shards in full"
            expect_equal(f"{what}: unit {i} after publish()", full, right, {}, hint)
    return worst


def watch_layers(model, layers, waits):
    """(wrong, begun), filled while the model runs: [(found, hint)], the gathers under way.

    While a layer computes its weights are there, and its neighbour's gather has begun and is not
    awaited: it is not among waits.
    """
    wrong, begun = [], []

    def look(i, other, phase):
        there = {j for j, u in enumerate(layers) if u.full is not None or u.coming is not None}
        where, coming = f"{phase}: while layer {i} computes", None
        if other in range(len(layers)):
            coming = layers[other].coming
        if layers[i].full is None:
            wrong.append((f"{where} its weights are not there", "gather() first"))
        elif there - {i, other}:
            kept = f"{where} layers {sorted(there)} are gathered"
            wrong.append((kept, "free() behind the forward; begin() one neighbour, no more"))
        elif other in there and (not coming or any(w is coming[1] for w in waits)):
            awaited = f"{where} layer {other}'s gather has been awaited"
            wrong.append((awaited, "begin() returns at once; gather() waits, in its turn"))
        elif coming:
            begun.append(coming[1])
        elif other in range(len(layers)):
            late = f"{where} layer {other}'s gather has not begun"
            wrong.append((late, "begin() the neighbour's before this layer's work"))

    for i, layer in enumerate(model.model.layers):
        layer.self_attn.register_forward_pre_hook(lambda *_, i=i: look(i, i + 1, "forward"))

        def at_output(module, args, y, i=i):
            y.register_hook(lambda _: look(i, i - 1, "backward"))

        layer.mlp.register_forward_hook(at_output)
    return wrong, begun


def own_pair(group):
    """Of 4 ranks 0 and 3, or 1 and 2: the group that this rank is in."""
    return subgroup(group, ranks=[0, 3] if group.rank() in (0, 3) else [1, 2])


def follow_both(lab, group, seed, stage):
    """On all ranks with two backwards a step, and on two of them with tied embeddings: a report."""
    worst = follow(lab, group, stage, seed, False, 2)
    if group.rank() in (1, 2):
        pair = subgroup(group, ranks=[1, 2])  # its rank 0 is rank 1 of all
        worst = max(worst, follow(lab, pair, stage, seed, True, 1))
    return f"{STEPS} steps on 2 and {group.size()} ranks, gradients, weights off by {worst:.0e}"
