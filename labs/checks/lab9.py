"""Lab 9's checks, each of which runs on every rank, and the bugs that they have to catch.

In float64, so that nothing but a mistake is off by more than EXACT: a small LLaMA on P ranks, each
with its own sequences, against the same model on one device that has all of them. Gradients are
compared too, at every step: AdamW alone would hide one that is too large by a factor.
"""

import itertools
import time
import weakref
from collections import Counter
from functools import partial
from types import SimpleNamespace

import torch
import torch.distributed as dist
from checks.compare import attempt, expect_same
from checks.tools import noted_waits
from checks.zero import (
    EXACT,
    SIZES,
    STEPS,
    TOKENS,
    expect_equal,
    expect_messages,
    expected_bytes,
    finished,
    follow,
    follow_both,
    loss_of,
    own_pair,
    shard_of,
    start,
    unit_parameters,
    watch_layers,
)
from harness import Traffic, Wrong, expect, expect_close
from torch import nn
from torch.nn.utils import clip_grad_norm_
from transformers import LlamaConfig, LlamaForCausalLM


def check_flat(lab, group, seed):
    torch.manual_seed(seed)
    for world, shapes in (3, [(2, 3), (1,)]), (4, [(1,)]), (2, [(4,), (2, 2)]), (1, [(5,)]):
        kind = (torch.float32, torch.bfloat16, torch.float64)[world % 3]
        tensors = [torch.randn(shape).movedim(0, -1).to(kind) for shape in shapes]
        numbers = torch.cat([t.flatten() for t in tensors])
        size, c = len(numbers), -(-len(numbers) // world)
        zeros = numbers.new_zeros(world * c - size)
        name = f"flatten() of {size} numbers for {world} ranks"
        mine, before = lab.flatten(tensors, world), [x.clone() for x in tensors]
        expect(mine.dtype == kind, f"{name} is {mine.dtype}, not {kind}", "zeros of their dtype")
        hint = f"{world} shards of {c}: zeros up to that behind the numbers"
        shape = tuple(mine.shape)
        expect(shape == (world * c,), f"{name} has shape {shape}, not ({world * c},)", hint)
        expect_equal(name, mine, torch.cat([numbers, zeros]), {}, hint)
        expect_same("a tensor", tensors, before)
        own = mine.data_ptr() not in [t.data_ptr() for t in tensors]
        expect(own, f"{name} shares memory with a tensor", "a new vector, also of one tensor")
        for rank in range(world):
            wanted = (rank * c, (rank + 1) * c, max(0, min(c, size - rank * c)))
            found = tuple(lab.held(size, rank, world))
            hint = "shards are equally long, c = n / P rounded up: collectives want that"
            if found[:2] == wanted[:2]:
                hint = "own: without the padding, and never below 0"
            expect(found == wanted, f"held({size}, {rank}, {world}) is {found}, not {wanted}", hint)
    return "1 to 4 ranks, a unit smaller than P: equal shards, zeros behind, own numbers counted"


def drawn(seed):
    """number(low, high), drawn, the same on every rank."""
    numbers = torch.Generator().manual_seed(seed)
    return lambda low, high: int(torch.randint(low, high, (), generator=numbers))


def check_predict_memory(lab, group, seed):
    number = drawn(seed)
    for tied in False, True:
        kv, d, f, v = number(1, 4), 2 * number(2, 6), number(60, 90), number(100, 200)
        heads = kv * number(2, 4)
        h = heads * number(5, 9)
        sizes = {"num_key_value_heads": kv, "num_attention_heads": heads, "head_dim": d}
        sizes |= {"hidden_size": h, "intermediate_size": f, "num_hidden_layers": number(2, 5)}
        config = LlamaConfig(**sizes, vocab_size=v, tie_word_embeddings=tied)
        with torch.device("meta"):
            model = LlamaForCausalLM(config)
        right = [sum(p.numel() for p in unit) for unit in unit_parameters(model)]
        found = list(lab.unit_sizes(config))
        what = f"unit_sizes() of {config.num_hidden_layers} layers is {found}, not {right}"
        root, layer = (found[0] - right[0], found[-1] - right[-1]) if found else (0, 0)
        hints = {v * h: "tied embeddings are one Parameter: count it once"}
        hints |= {-v * h: "an untied head has weights of its own", -h: "the root has the last norm"}
        hint = hints.get(root, "[root unit, then each layer's]")
        hints = {2 * (heads - kv) * d * h: "K and V have num_key_value_heads heads"}
        hint = (hints | {-2 * h: "a layer has two norms"}).get(layer, hint)
        expect(found == right, what, hint)
        expect_memory(lab, config, right, number(40, 90))
    return "tied and not, GQA, 1 to 5 ranks, every stage and rank: all five parts"


def expect_memory(lab, config, sizes, tokens):
    """Raise Wrong unless memory() has every part right, on any rank of any world."""
    parts = "parameters", "gradients", "optimizer", "gathered", "activations"
    worlds = [(world, rank) for world in (1, 2, 3, 5) for rank in range(world)]
    for (world, rank), stage, width in itertools.product(worlds, range(4), (2, 8)):
        c = [(n + -n % world) // world for n in sizes]
        own = sum(last - first for first, last in (shard_of(n, rank, world) for n in sizes))
        right = [sum(c) * (world if stage < 3 else 1), sum(c) * (world if stage < 2 else 1)]
        right += [2 * (own if stage else sum(sizes)), world * c[0] if stage == 3 else 0]
        right.append(finished.activations(config, tokens))
        found = lab.memory(config, tokens, rank, world, stage, width)
        same = isinstance(found, dict) and set(found) == set(parts)
        expect(same, f"memory() returns {found}", f"a dict of {', '.join(parts)}")
        for part, numbers in zip(parts, right):
            what = f"ZeRO-{stage}, rank {rank} of {world}, {width} bytes a number: {part}"
            hint = memory_hint(part, found[part] / width, sizes, world, c)
            expect(
                found[part] == numbers * width, f"{what} {found[part]}, not {numbers * width}", hint
            )


def memory_hint(part, found, sizes, world, c):
    """What a wrong number of numbers comes of; c: the units' shards with padding."""
    n = sum(sizes)
    joined = -(-n // world)  # a shard of all units, if they were one
    usual = dict.fromkeys((n, n // world, joined, world * joined), "each unit is padded by itself")
    if part == "optimizer":
        usual = {sum(c): "AdamW has two averages", 2 * sum(c): "padding has no optimizer state"}
        usual |= {2 * n: "from ZeRO-1 on a rank updates its shard alone"}
    elif part == "gathered":
        usual = {(world - 1) * c[0]: "the vector is gathered whole, the own shard is in it too"}
        none = "of layers none is there then, only the root unit"
        usual |= {world * sum(c): none, world * (c[0] + c[-1]): none}
    return usual.get(found, "")


def check_predict_messages(lab, group, seed):
    number = drawn(seed)
    for world, backwards, width in (2, 1, 4), (3, 2, 8), (4, 3, 2), (1, 1, 4):
        sizes = [number(50, 99)] + [number(100, 200)] * number(2, 5)
        once, given = width * sum(n + -n % world for n in sizes), list(sizes)
        for stage in range(4):
            right = expected_bytes(sizes, world, stage, backwards, width)
            found = lab.messages(sizes, world, stage, backwards, width)
            what = f"ZeRO-{stage} on {world} ranks, {backwards} backwards: {found}, not {right}"
            expect(sizes == given, "the caller's sizes are changed", "no pop()")
            same = isinstance(found, dict) and set(found) == set(right)
            expect(same, what, "only the collectives that are used, by their names")
            hint = "each unit with its padding"
            if any(found[op] in (right[op] * backwards, right[op] / backwards) for op in right):
                hint = "stages 0 and 1 send once a step, stages 2 and 3 in each backward"
            hints = {2 * backwards * once: "the root unit is gathered once for both"}
            hints |= {backwards * once: "a layer is gathered twice: it is freed in between"}
            hint = hints.get(found.get("all_gather"), hint) if stage == 3 else hint
            expect(found == right, what, hint)
    return "1 to 4 ranks, 1 to 3 backwards a step: bytes of every collective"


def check_zero1(lab, group, seed):
    return follow_both(lab, group, 1, seed)


def watch_arrivals(model, units, traffic):
    """Hold each reduce-scatter against the gradients that have arrived; returns what judges it."""
    arrived, found = Counter(), []

    def note(p, i):
        arrived[i] += 1
        count, there = len(units[i].params), arrived[i] % len(units[i].params)
        complete = sum(arrived[j] // len(unit.params) for j, unit in enumerate(units))
        sent = traffic.ops.get("reduce_scatter", [0])[0]
        if sent > complete:
            what = f"unit {i} sends when {there} of {count} gradients are there"
            found.append((what, "the last gradient of the unit sends them all, no earlier one"))
        elif sent < complete:
            what = f"unit {i}: all its gradients are there, and none are sent"
            found.append((what, "send in the backward, when the unit's last gradient arrives"))
        elif there == 0 and any(p.grad is not None for p in units[i].params):
            what = f"unit {i}: its gradients stay after they were sent"
            found.append((what, "set every .grad to None: the full gradients are to be gone"))

    hooks = [  # they come after the learner's own
        p.register_post_accumulate_grad_hook(partial(note, i=i))
        for i, unit in enumerate(units)
        for p in unit.params
    ]

    def judge():
        for hook in hooks:
            hook.remove()
        if found:
            raise Wrong(*found[0])

    return judge


def check_zero2(lab, group, seed):
    report = follow_both(lab, group, 2, seed, watch_arrivals)
    return f"{report}; sent and dropped unit by unit"


def noted_lends(lab):
    """alive(most): the bytes of all that units ever lent and that still exist.

    It waits for them to be no more than `most`, up to 3 seconds in all: gloo's own thread holds
    what it gathered for a moment longer than wait() takes.
    """
    memory, lend, patience = {}, lab.Unit.lend, [3.0]

    def noting_lend(unit):
        storage = unit.full.untyped_storage()
        memory[storage._cdata] = weakref.ref(storage)
        lend(unit)

    def alive(most):
        begin = time.monotonic()
        while True:
            nbytes = sum(there().nbytes() for there in memory.values() if there() is not None)
            waited = time.monotonic() - begin
            if nbytes <= most or waited > patience[0]:
                patience[0] -= waited
                return nbytes
            time.sleep(0.001)

    lab.Unit.lend = noting_lend
    return alive


def check_freed(lab, group, seed):
    """After each layer, the forward and the backward: what was gathered and is still alive."""
    alive, peaks = noted_lends(lab), []
    model, units, _ = start(lab, group, 3, seed, False)
    root, layer = (len(unit.shard) * group.size() * 8 for unit in units[:2])
    for each in model.model.layers:
        each.mlp.register_forward_hook(lambda *_: peaks.append(alive(root + layer) - root))
    units[0].gather()
    loss = loss_of(model, torch.randint(SIZES["vocab_size"], (1, TOKENS)))
    for i, unit in enumerate(units[1:]):
        what, hint = f"after the forward layer {i}", "free() makes .data empty: a view keeps full"
        expect(unit.full is None, f"{what}'s full is there", "free() drops it")
        expect(not any(p.numel() for p in unit.params), f"{what}'s parameters are views", hint)
    left = alive(root) - root
    hint = "autograd saved views of full: pack() them all, transposed or not, as addresses"
    expect(left <= 0, f"after the forward {left} bytes of layers are alive", hint)
    found = f"{max(peaks)} bytes of layers at once, a layer has {layer}"
    expect(max(peaks) <= layer, found, "free() each behind its forward")
    loss.backward()
    expect(not alive(0), "after the backward gathered bytes are alive", "arrived() frees")
    unit = units[1]
    unit.gather()
    full = unit.full
    unit.gather()
    expect(unit.full is full, "gather() gathers what is here already", "do nothing then")
    expect(unit.params[0].numel(), "gather() leaves the parameters empty", "lend() fills them")
    expect(unit.coming is None, "after gather() coming is not None", "it has come")
    unit.free()


def check_zero3(lab, group, seed):
    hint = "a parameter is empty, or full None, where it is needed; or an address is misread"
    attempt("a forward or backward", hint, check_freed, lab, group, seed)
    return f"{follow_both(lab, group, 3, seed)}; each layer freed, and gathered again"


def check_prefetch(lab, group, seed):
    begun = [follow_prefetch(lab, each, seed) for each in (group, own_pair(group))][0]
    worst = follow(lab, group, 3, seed, True, 2)
    return f"{begun} gathers begun while a neighbour computes; off by {worst:.0e} in {STEPS} steps"


def follow_prefetch(lab, group, seed):
    """How many gathers begin while a neighbour computes; raises Wrong."""
    model, units, _ = start(lab, group, 3, seed, True)
    ids = torch.randint(30, (1, TOKENS))
    with noted_waits() as waits, Traffic() as traffic:
        wrong, begun = watch_layers(model, units[1:], waits)
        attempt("begin()", "the shard's length times the ranks of self.group", units[0].begin)
        units[0].begin()
        work = (units[0].coming or [None])[-1]
        hint = "coming is (full, work): async_op=True returns the work at once"
        expect(hasattr(work, "wait"), f"after begin() coming has no work, {type(work)}", hint)
        units[0].gather()
        units[0].begin()
        calls = traffic.ops["all_gather"][0]
        expect(calls == 1, f"{calls} gathers of one unit", "nothing where it is here, or coming")
        hint = "gather() before a layer computes, in the forward and in the backward"
        attempt("a step", hint, lambda: loss_of(model, ids).backward())
    if wrong:
        raise Wrong(*wrong[0])
    lost = [work for work in begun if not any(other is work for other in waits)]
    expect(not lost, f"{len(lost)} gathers are never awaited", "gather() waits for begin()'s work")
    wanted = expected_bytes([unit.size for unit in units], group.size(), 3, 1)
    expect_messages("a forward and backward", traffic, wanted)
    return len(begun)


def check_clip(lab, group, seed):
    for each in group, own_pair(group):
        follow_clip(lab, each, seed + dist.get_process_group_ranks(each)[0])
    worst = max(follow(lab, group, stage, seed, True, 1, max_norm=0.05) for stage in (1, 2, 3))
    return f"the same norm on every rank; {STEPS} clipped steps, weights off by {worst:.0e}"


def follow_clip(lab, group, seed):
    """The norm and the clipped gradients of three units, in each stage."""
    rank, world = group.rank(), group.size()
    numbers = torch.Generator().manual_seed(seed)
    for stage, small in itertools.product(range(4), (False, True)):
        whole = [torch.randn(n, generator=numbers, dtype=torch.float64) for n in (7, 1, 12)]
        ranks = [[g[slice(*shard_of(len(g), r, world))] for g in whole] for r in range(world)]
        given, right = ranks[rank] if stage else whole, torch.cat(whole).norm()
        limit = (2 * right if small else right / 3).item()
        units = []
        for grad in given:
            master = nn.Parameter(torch.zeros_like(grad))
            master.grad = grad.clone()
            units.append(SimpleNamespace(master=master, stage=stage, group=group))
        with Traffic() as traffic:
            norm = lab.clip(units, limit)
        name, norms = f"ZeRO-{stage}: norm", [torch.cat(shards).norm() for shards in ranks]
        expect(norm is not None, f"{name} is None", "return it")
        hints = {"every rank has its shard's part: the squares add up over ranks": norms[rank]}
        hints |= {"squares add up over the ranks, norms do not": sum(norms)}
        each = [sum(shard.norm() for shard in shards) for shards in (ranks if stage else [whole])]
        of_units = torch.stack(each).norm()
        hints |= {"squares add up over the units, norms do not": of_units}
        hints |= {"the root of the sum of squares": right.square()}
        hints |= {"in stage 0 every rank has all gradients": right * world**0.5}
        mine, where = torch.as_tensor(norm).reshape(()).double(), "summed over units[0].group"
        expect_equal(name, mine, right, hints, f"{where}, not over the whole job")
        expect_messages(f"ZeRO-{stage}, clip()", traffic, {"all_reduce": 8} if stage else {})
        scale = limit / (right + 1e-6)
        for i, (unit, grad) in enumerate(zip(units, given)):
            hints = {"not clipped": grad, "divided, but not times max_norm": grad / right}
            hints = {"small gradients stay as they are": grad * scale} if small else hints
            what = f"ZeRO-{stage}: gradient {i} of norm {right:.1f}, limit {limit:.1f},"
            expect_close(what, unit.master.grad, grad * (1 if small else scale), EXACT, hints)


CHECKS = {
    "flat": (check_flat, 1),
    "predict_memory": (check_predict_memory, 1),
    "predict_messages": (check_predict_messages, 1),
    "zero1": (check_zero1, 3),
    "zero2": (check_zero2, 4),
    "zero3": (check_zero3, 4),
    "prefetch": (check_prefetch, 4),
    "clip": (check_clip, 4),
}


# Bugs for --inject-bug: the checks have to catch every one


def averaged_twice(lab):
    """The reduced gradient is divided by P twice; AdamW's steps hardly show it."""
    right = lab.Unit.finish

    def finish(self):
        right(self)
        self.master.grad /= self.group.size()

    lab.Unit.finish = finish


def not_published(lab):
    """Each rank updates its shard, and nobody tells the others."""
    lab.Unit.publish = lambda self: None


def local_norm(lab):
    """Each rank clips by the norm of its own shards: another factor on every rank."""

    def clip(units, max_norm):
        return clip_grad_norm_([unit.master for unit in units], max_norm)

    lab.clip = clip


BUGS = [averaged_twice, not_published, local_norm]
