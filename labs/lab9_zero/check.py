"""Lab 9's checks, each of which runs on every rank, and the bugs that they have to catch.

In float64, so that nothing but a mistake is off by more than EXACT: a small LLaMA on P ranks, each
with its own sequences, against the same model on one device that has all of them. Gradients are
compared too, at every step: AdamW alone would hide one that is too large by a factor.
"""

import itertools
import weakref
from functools import partial
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from labs.kit.alive import Alive
from labs.kit.compare import draw_float64, expect_same, mistaken, tried
from labs.kit.harness import Traffic, Wrong, expect
from labs.kit.tools import noted_waits
from labs.kit.usual import bytes_alive, usual_hint
from labs.lab9_zero import zero
from labs.lab9_zero.zero import (
    STEPS,
    expect_equal,
    expected_bytes,
    finished,
    follow,
    shard_of,
    start,
)

SUBGROUP = True  # the group is not the world, and has other rank numbers
MISTAKES = """
== unit_sizes
2 * (heads + kv) -> 4 * heads  # K and V have num_key_value_heads heads
2 * (heads + kv) * config.head_dim -> 2 * (h + kv * config.head_dim)  # heads * head_dim is not h
3 * config -> 2 * config  # gate, up and down: three matrices
+ 2 * h -> + h  # a layer has two norms
+ 2 * h ->  # a layer has two norms
(1 if config.tie_word_embeddings else 2) -> 2  # tied embeddings are one Parameter: count it once
(1 if config.tie_word_embeddings else 2) -> 1  # an untied head has weights of its own
else 2) + h -> else 2)  # the root has the last norm
[root unit, then each layer's]: all weights of attention, MLP and norms
== memory
sharded if stage == 3 -> sharded if stage >= 2  # ZeRO-3 alone shards the parameters
sharded if stage > 1 -> sharded if stage > 2  # gradients are sharded from ZeRO-2 on
sharded if stage > 1 -> sharded if stage > 0  # gradients are sharded from ZeRO-2 on
stage == 0 else -> stage <= 1 else  # from ZeRO-1 on a rank updates its shard alone
2 * mine -> mine  # AdamW has two averages
sum(own for *_, own in shards) -> sharded  # padding has no optimizer state
sum(own for *_, own in shards) -> sum(sizes) // world  # what the rank updates: the last has less
padded = sum( -> padded = sum(sizes); (  # each unit is padded by itself
sharded = padded // world -> sharded = sum(sizes) // world  # each unit is padded by itself
(shards[0][1] - shards[0][0]) * world -> padded  # of layers none is there then, only the root unit
shards[0][0]) * world -> shards[0][0]) * (world - 1)  # the vector is whole, the own shard in it
* world if stage == 3 else 0 -> * world  # in stages 0 to 2 nothing is gathered then
activations(config, tokens) -> activations(config, tokens) // world  # each has its own sequence
number * width -> number  # bytes: width of each number
each unit padded by itself; gathered: the root unit; optimizer: 2 averages, no padding; in bytes
== messages
-(-size // world) * world -> size  # each unit with its padding
world) * world -> world)  # the message is the whole vector, not a rank's shard of it
world) * world -> world) * (world - 1)  # the message, not what a rank sends of it
* width -> * 4  # bytes: width of each number
if stage == 2 else 1 -> // backwards  # stages 0 and 1 send once a step, 2 and 3 in each backward
if stage == 2 else 1 ->  # stages 0 and 1 send once a step, 2 and 3 in each backward
backwards * sum -> sum  # stages 0 and 1 send once a step, 2 and 3 in each backward
backwards * (full -> (full  # stages 0 and 1 send once a step, 2 and 3 in each backward
"all_gather": sum(full)} -> "all_gather": reduced}  # parameters change once a step
full[0] + 2 * sum(full[1:]) -> 2 * sum(full)  # the root unit is gathered once for both
full[0] + 2 * sum(full[1:]) -> sum(full)  # a layer is gathered twice: it is freed in between
: gathered} -> : gathered + sum(full)}  # no gather after a step: the next forward has one
"all_reduce": sum -> "all_reduce": 2 * sum  # the message is n, whatever it takes to send it
each unit padded, each time that it is sent: stages 0, 1 once a step, 2 and 3 in each backward
"""


def check_flat(lab, group, seed):
    torch.manual_seed(seed)
    for world, shapes in (3, [(1,), (2, 2)]), (4, [(1,)]), (2, [(4,), (2, 2)]), (1, [(5,)]):
        kind = (torch.float32, torch.bfloat16, torch.float64)[world % 3]
        tensors = [torch.randn(shape).movedim(0, -1).to(kind) for shape in shapes]
        numbers = torch.cat([t.flatten() for t in tensors])
        size, c = len(numbers), -(-len(numbers) // world)
        zeros = numbers.new_zeros(world * c - size)
        name = f"flatten() of {size} numbers for {world} ranks"
        hint, before = "torch.cat of all, each flattened", [x.clone() for x in tensors]
        mine = tried(name, hint, lab.flatten, tensors, world)
        hint = f"{world} shards of {c}: the tensors in order, then {world * c - size} zeros"
        expect_equal(name, mine, torch.cat([numbers, zeros]), {}, hint)
        expect(mine.dtype == kind, f"{name} is {mine.dtype}, not {kind}", "zeros of their dtype")
        expect_same("a tensor", tensors, before)
        own = mine.data_ptr() not in [t.data_ptr() for t in tensors]
        expect(own, f"{name} shares memory with a tensor", "a new vector, also of one tensor")
        for rank in range(world):
            wanted = (rank * c, (rank + 1) * c, max(0, min(c, size - rank * c)))
            found = tuple(lab.held(size, rank, world))
            hint = "shards are equally long, c = n / P rounded up: collectives want that"
            if found[:2] == wanted[:2]:
                hint = "own: the shard's parameters, 0 to c: without padding, and never below 0"
            expect(found == wanted, f"held({size}, {rank}, {world}) is {found}, not {wanted}", hint)
    return "1 to 4 ranks, a unit smaller than P: equal shards, zeros behind, own numbers counted"


def check_predict_memory(lab, group, seed):
    number, _ = draw_float64(seed)
    for tied in False, True:
        kv, d, f, v = number(1, 4), 2 * number(2, 6), number(60, 90), number(100, 200)
        heads = kv * number(2, 4)
        h = heads * number(5, 9)
        sizes = {"num_key_value_heads": kv, "num_attention_heads": heads, "head_dim": d}
        sizes |= {"hidden_size": h, "intermediate_size": f, "num_hidden_layers": number(2, 5)}
        config = LlamaConfig(**sizes, vocab_size=v, tie_word_embeddings=tied)
        with torch.device("meta"):
            model = LlamaForCausalLM(config)
        right = [sum(p.numel() for p in unit) for unit in zero.unit_parameters(model)]
        found = tried("unit_sizes()", "return a list", list, lab.unit_sizes(config))
        if found != right:
            hint = usual_hint(MISTAKES, finished.unit_sizes, (config,), found)
            raise Wrong(f"unit_sizes() is {found}, not {right}", hint)
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
        args = config, tokens, rank, world, stage, width
        found = lab.memory(*args)
        same = isinstance(found, dict) and set(found) == set(parts)
        expect(same, f"memory() returns {found}", f"a dict of {', '.join(parts)}")
        for part, numbers in zip(parts, right):
            if found[part] != numbers * width:
                hint = usual_hint(MISTAKES, finished.memory, args, found[part], part)
                what = f"ZeRO-{stage}, rank {rank} of {world}, {width} bytes a number: {part}"
                raise Wrong(f"{what} {found[part]}, not {numbers * width}", hint)


def check_predict_messages(lab, group, seed):
    number, _ = draw_float64(seed)
    for world, backwards, width in (2, 1, 4), (3, 5, 16), (4, 3, 2), (1, 1, 4):
        sizes = [number(50, 99)] + [number(100, 200)] * number(2, 5)
        given = list(sizes)
        for stage in range(4):
            args = sizes, world, stage, backwards, width
            right = expected_bytes(*args)
            found = lab.messages(given, *args[1:])
            what = f"ZeRO-{stage} on {world} ranks, {backwards} backwards: {found}, not {right}"
            expect(sizes == given, "the caller's sizes are changed", "no pop()")
            same = isinstance(found, dict) and set(found) == set(right)
            expect(same, what, "stage 0: all_reduce alone; else reduce_scatter, all_gather")
            for op in [op for op in right if found[op] != right[op]]:
                raise Wrong(what, usual_hint(MISTAKES, finished.messages, args, found[op], op))
    return "1 to 4 ranks, 1 to 3 backwards a step: bytes of every collective"


def check_zero2(lab, group, seed):
    zero.check_arrivals(lab, group, seed)
    return f"{zero.follow_both(lab, group, seed, 2)}; sent and dropped when the last gradient comes"


def noted_lends(lab):
    """Weak references to the memory that units have lent to their parameters, as they lend it."""
    memory, lend = [], lab.Unit.lend

    def noting_lend(unit):
        memory.append(weakref.ref(unit.full.untyped_storage()))
        lend(unit)

    lab.Unit.lend = noting_lend
    return memory


def expect_unit(unit, memory):
    """Gathered, packed and freed, all by hand: Wrong where something is left, or not there."""
    unit.gather()
    full, view = unit.full, unit.params[0].detach().T
    expect(unit.coming is None, "after gather() coming is not None", "it has come: None again")
    expect(view.numel(), "gather() leaves the parameters empty", "free(): full None; then lend()")
    tried("gather() of what is here", "do nothing then", unit.gather)
    expect(unit.full is full, "gather() gathers what is here already", "do nothing then")
    with Alive() as alive:
        address = unit.pack(view)
    expect(not alive.now(), "pack() keeps a copy of a weight", "where it lies in full, no numbers")
    hint = "its address, as it has the untyped_storage().data_ptr() of full"
    expect(not isinstance(address, torch.Tensor), "pack() keeps a transposed weight itself", hint)
    found = torch.equal(unit.unpack(address), view)
    expect(found, "unpack() finds another tensor", "shape, strides, offset: as_strided()")
    del full, view
    unit.free()
    left = bytes_alive(memory, 0)
    expect(not left, f"after free() {left} bytes are alive", "full and all views of it: drop them")


def check_freed(lab, group, seed):
    """After each layer, the forward and the backward: what was gathered and is still alive."""
    memory, peaks = noted_lends(lab), []
    model, units, _ = start(lab, group, 3, seed, False)
    root, layer = (len(unit.shard) * group.size() * 8 for unit in units[:2])
    expect_unit(units[1], memory)
    gathered = partial(bytes_alive, memory, root + layer, 1)
    for each in model.model.layers:
        each.mlp.register_forward_hook(lambda *_: peaks.append(gathered()))
    units[0].gather()
    ids = torch.randint(zero.SIZES["vocab_size"], (1, zero.TOKENS))
    with torch.no_grad():
        hint = "y.requires_grad says if a backward comes"
        tried("a forward alone", hint, zero.loss_of, model, ids)
    loss = zero.loss_of(model, ids)
    for i, unit in enumerate(units[1:]):
        what, hint = f"after the forward layer {i}", "free() makes .data empty: a view keeps full"
        expect(unit.full is None, f"{what}'s full is there", "free() drops it")
        expect(not any(p.numel() for p in unit.params), f"{what}'s parameters are views", hint)
    left = bytes_alive(memory, root) - root
    hint = "autograd saved views of full: saved_tensors_hooks around the forward, and pack() makes "
    hint += "addresses of all that share its memory, transposed or not"
    expect(left <= 0, f"after the forward {left} bytes of layers are alive", hint)
    found = f"{max(peaks) - root} bytes of layers at once, a layer has {layer}"
    expect(max(peaks) <= root + layer, found, "free() each behind its forward")
    loss.backward()
    left = bytes_alive(memory, 0)
    expect(not left, f"after the backward {left} gathered bytes are alive", "arrived() frees")


def check_zero3(lab, group, seed):
    hint = "a parameter is empty, or full None, where it is needed; or an address is misread"
    tried("a forward or backward", hint, check_freed, lab, group, seed)
    return f"{zero.follow_both(lab, group, seed, 3)}; each layer freed, and gathered again"


GATHER = "gather() before a layer computes, in the forward and in the backward"


def check_prefetch(lab, group, seed):
    begun = [follow_prefetch(lab, each, seed) for each in (group, zero.own_pair(group))][0]
    tried("a forward or backward", GATHER, check_freed, lab, group, seed)
    worst = follow(lab, group, 3, seed, True, 2)
    return f"{begun} gathers begun while a neighbour computes; off by {worst:.0e} in {STEPS} steps"


def follow_prefetch(lab, group, seed):
    """How many gathers begin while a neighbour computes; raises Wrong."""
    model, units, _ = start(lab, group, 3, seed, True)
    ids = torch.randint(30, (1, zero.TOKENS))
    with noted_waits() as waits, Traffic() as traffic:
        wrong, begun = zero.watch_layers(model, units[1:], waits)
        tried("begin()", "the shard's length times the ranks of self.group", units[0].begin)
        units[0].begin()
        work = units[0].coming[-1] if isinstance(units[0].coming, tuple | list) else None
        hint = "coming is (full, work): async_op=True returns the work at once"
        expect(hasattr(work, "wait"), f"after begin() coming has no work, {type(work)}", hint)
        units[0].gather()
        units[0].begin()
        calls = traffic.ops["all_gather"][0]
        expect(calls == 1, f"{calls} gathers of one unit", "nothing where it is here, or coming")
        tried("a step", GATHER, lambda: zero.loss_of(model, ids).backward())
    if wrong:
        raise Wrong(*wrong[0])
    wanted = expected_bytes([unit.size for unit in units], group.size(), 3, 1)
    zero.expect_messages("a forward and backward", traffic, wanted, waits)
    return len(begun)


def check_clip(lab, group, seed):
    for each in group, zero.own_pair(group):
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
        with Traffic() as traffic, noted_waits() as waits:
            norm = lab.clip(units, limit)
        name, norms = f"ZeRO-{stage}: norm", [torch.cat(shards).norm() for shards in ranks]
        expect(isinstance(norm, torch.Tensor), f"{name} is {norm}", "return it, a tensor")
        hints = {"every rank has its shard's part: the squares add up over ranks": norms[rank]}
        hints |= {"squares add up over the ranks, norms do not": sum(norms)}
        each = [sum(shard.norm() for shard in shards) for shards in (ranks if stage else [whole])]
        hints |= {"squares add up over the units, norms do not": torch.stack(each).norm()}
        hints |= {"return the norm before clipping": right.clamp(max=limit)}
        hints |= {"the root of the sum of squares": right.square()}
        hints |= {"in stage 0 every rank has all gradients": right * world**0.5}
        hints |= {"the sum of squares over the ranks, not a mean": right / world**0.5}
        hint = "the squares of all units, summed over units[0].group"
        expect_equal(name, norm.reshape(()).double(), right, hints, hint)
        wanted = {"all_reduce": 8, "all_gather": 8 * world} if stage else {}
        zero.expect_messages(f"ZeRO-{stage}, clip()", traffic, wanted, waits)
        scale = limit / (right + 1e-6)
        for i, (unit, grad) in enumerate(zip(units, given)):
            hints = {"not clipped": grad, "divided, but not times max_norm": grad * scale / limit}
            hints["by the norm of all, not each by its own"] = grad * (limit / (grad.norm() + 1e-6))
            hints = {"small gradients stay as they are": grad * scale} if small else hints
            what = f"ZeRO-{stage}: gradient {i} of norm {right:.1f}, limit {limit:.1f},"
            mine, hint = unit.master.grad, "times max_norm / (norm + 1e-6), if that is less than 1"
            expect_equal(what, mine, grad * (1 if small else scale), hints, hint)


CHECKS = {
    "flat": (check_flat, 1),
    "predict_memory": (check_predict_memory, 1),
    "predict_messages": (check_predict_messages, 1),
    "zero1": (partial(zero.follow_both, stage=1), 3),
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
    lab.clip = mistaken(finished.clip, ("if sharded", "if False"))


BUGS = [averaged_twice, not_published, local_norm]
