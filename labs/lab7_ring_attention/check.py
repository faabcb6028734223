"""Lab 7's exercises: their cases. mistakes.txt has the wrong answers.

In float64, so that nothing but a mistake is off by more than EXACT. Values and gradients are one
device's; bytes, operations and what travels while a rank computes are the finished lab's.
"""

import itertools
import math
import weakref
from datetime import timedelta
from functools import partial
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from labs.kit.alive import bytes_alive
from labs.kit.eye import Most
from labs.kit.harness import Traffic, Wrong
from labs.kit.inputs import draw_float64
from labs.kit.judge import checks
from labs.kit.tools import noted_waits, subgroup
from labs.lab7_ring_attention import lesson as finished  # not the learner's

SUBGROUP = True  # the group is not the world, and has other rank numbers
GROUPS = [0, 1, 2, 3], [1, 2, 3], [2, 3], [3]  # rank 0 is another one in each
EXACT = 1e-10
CONTIGUOUS, ZIGZAG, TILE = finished.CONTIGUOUS, finished.ZIGZAG, finished.TILE
PLACEMENTS = CONTIGUOUS, ZIGZAG
shard_range = finished.shard_range


# ---- Who holds which tokens ----------------------------------------------------------------------


def see_positions(length, world, lab, eye):
    for placement, rank in itertools.product(PLACEMENTS, range(world)):
        mine = lab.positions(length, rank, world, placement)
        eye.note(f"{placement}: what rank {rank} holds", mine)


def positions(group, seed):
    number, _ = draw_float64(seed)
    for world in 1, 2, 3, 4, 7:
        lengths = 2 * world * number(2, 9) + number(0, 2 * world), 2 * world - number(0, world)
        for length in (*lengths, 2 * world, 1):  # as many tokens as chunks, and fewer
            chunks = [torch.arange(*shard_range(length, i, 2 * world)) for i in range(2 * world)]
            right = {}
            for rank in range(world):
                own = torch.arange(*shard_range(length, rank, world))
                right[f"{CONTIGUOUS}: what rank {rank} holds"] = own
                own = torch.cat([chunks[rank], chunks[-1 - rank]])
                right[f"{ZIGZAG}: what rank {rank} holds"] = own
            yield f"{length} tokens, {world} ranks", partial(see_positions, length, world), right


def work(group, seed):
    def see(args, lab, eye):
        eye.note("[rank][step]", lab.work(*args).tolist())

    number, _ = draw_float64(seed)
    for world, placement in itertools.product((1, 2, 3, 4), PLACEMENTS):
        for length in 2 * world * number(3, 9) + number(0, 2 * world), world - 1:
            held = [finished.positions(length, rank, world, placement) for rank in range(world)]
            met = [[int((k <= q[:, None]).sum()) for k in held] for q in held]
            right = [[met[r][(r - t) % world] for t in range(world)] for r in range(world)]
            title = f"{length} tokens, {world} ranks, {placement}"
            yield title, partial(see, (length, world, placement)), {"[rank][step]": right}


# ---- Attention over a part of the keys -----------------------------------------------------------


def draw_parts(seed):
    """Queries, two sets of keys and values, dout: q_pos, k_pos, q, ks, vs, dout.

    Query 0 sees no key, queries 1 to 7 see none of the second set.
    """
    number, randn = draw_float64(seed)
    kv, g, n, d = number(1, 4), number(2, 4), TILE + number(5, 20), number(5, 9)
    mixed = torch.argsort(randn(3 * n))
    q_pos, *k_pos = (part.sort()[0] for part in mixed.split(n))
    q_pos, k_pos = q_pos.clamp(min=9), [k_pos[0].clamp(min=1), k_pos[1].clamp(min=10)]
    q_pos[0], q_pos[1:8], k_pos[0][0] = 0, 9, 1
    q, *keys_and_values = randn(2, kv, g, n, d), *(randn(2, kv, n, d) for _ in range(4))
    return q_pos, k_pos, q, keys_and_values[:2], keys_and_values[2:], randn(2, kv, g, n, d)


def softmax_attention(q, k, v, q_pos, k_pos):
    """(out, lse) by torch's softmax; 0 and minus infinity where no key is seen."""
    s = q @ k.mT[:, :, None] / math.sqrt(q.shape[-1])
    s = s.masked_fill(k_pos > q_pos[:, None], -torch.inf)
    return s.softmax(-1).nan_to_num(0) @ v[:, :, None], s.logsumexp(-1)


def see_attend(given, lab, eye):
    with FlopCounterMode(display=False) as counter:
        eye.call(lab.attend, given, "out, lse")
    eye.note("operations", Most(counter.get_total_flops()))


def attend(group, seed):
    q_pos, k_pos, q, ks, vs, _ = draw_parts(seed)
    for size, part in itertools.product((1, 1000), (0, 1)):  # exp(score) would not be finite
        given = {"q": q * size, "k": ks[part], "v": vs[part], "q_pos": q_pos, "k_pos": k_pos[part]}
        right = dict(zip(("out", "lse"), softmax_attention(*given.values())))
        yield f"scores times {size}", partial(see_attend, given), right


def merge(group, seed):
    q_pos, k_pos, q, ks, vs, _ = draw_parts(seed)
    whole = torch.cat(ks, 2), torch.cat(vs, 2), q_pos, torch.cat(k_pos)
    out, lse = softmax_attention(q, *whole)
    parts = (softmax_attention(q, k, v, q_pos, pos) for k, v, pos in zip(ks, vs, k_pos))
    (out1, lse1), (out2, lse2) = parts
    for shift in 0, 2000, -2000:  # exp(lse) would not be finite, or zero
        given = {"out1": out1, "lse1": lse1 + shift, "out2": out2, "lse2": lse2 + shift}
        right = {"out": out, "lse": lse + shift}
        yield f"lse near {shift}", ("merge", given, "out, lse"), right


def see_gradients(parts, lab, eye):
    total = 0
    for part, given in enumerate(parts):
        names = ", ".join(f"{name} of part {part}" for name in ("dq", "dk", "dv"))
        total = total + eye.call(lab.attend_backward, given, names)[0]
    eye.note("dq of both parts", total)


def attend_backward(group, seed):
    q_pos, k_pos, q, ks, vs, dout = draw_parts(seed)
    leaves = [t.clone().requires_grad_() for t in (q, torch.cat(ks, 2), torch.cat(vs, 2))]
    out, lse = softmax_attention(*leaves, q_pos, torch.cat(k_pos))
    # a query without any key is none of a real sequence's: every token sees itself
    q, dout, out = (t[..., 1:, :] for t in (q, dout, out))
    q_pos, lse = q_pos[1:], lse[..., 1:].detach()
    out.backward(dout)
    known = {"dout": dout, "lse": lse, "delta": (dout * out.detach()).sum(-1), "q_pos": q_pos}
    dq, *both = (leaf.grad for leaf in leaves)
    parts, right = [], {"dq of both parts": dq[..., 1:, :]}
    for part, (k, v, pos) in enumerate(zip(ks, vs, k_pos)):
        parts.append({"q": q, "k": k, "v": v} | known | {"k_pos": pos})
        for name, grad in zip(("dk", "dv"), both):
            right[f"{name} of part {part}"] = grad.chunk(2, 2)[part]
    yield "two parts", partial(see_gradients, parts), right


# ---- The ring ------------------------------------------------------------------------------------


def wait_for_all(aside, hint):
    """All ranks come here within 5 seconds. Raises Wrong where they do not."""
    try:
        dist.monitored_barrier(aside, timeout=timedelta(seconds=5))
    except RuntimeError as problem:
        raise Wrong("pass_on does not return before the others take part", hint) from problem


def see_pass_on(x, length, group, aside, lab, eye):
    """Two blocks, of which the second is begun before the first is awaited; rank 0 is late."""
    late = "pass_on() must begin isend and irecv, and wait in the function that it returns."
    given = x, 2 * x
    before = [x.clone() for x in given]
    if group.rank() == 0 and group.size() > 1:
        wait_for_all(aside, late)
    with Traffic() as traffic, noted_waits() as waits:
        begun = [lab.pass_on(x, length, group) for x in given]
        eye.note("the number of sends before a wait", traffic.ops.get("send", [0])[0])
        if group.rank() > 0:
            wait_for_all(aside, late)
        eye.note("what it returns can be called", all(map(callable, begun)))
        first, second = (wait() for wait in begun)
    transfers = 4 if group.size() > 1 else 0
    missing = transfers - len(set(map(id, waits)))
    eye.note("transfers that nobody waits for", Most(max(0, missing)))
    eye.note("what arrives", first)
    eye.note("what arrives second", second)
    eye.note_traffic("twice", traffic, waits)
    eye.note("x is overwritten", not all(map(torch.equal, given, before)))


def pass_on(group, seed):
    number, randn = draw_float64(seed)
    rank, P, aside = group.rank(), group.size(), subgroup(group)
    for kind in torch.float64, torch.bfloat16:
        sizes = [5] * P if kind == torch.float64 else [number(0, 9) for _ in range(P)]
        blocks = [randn(2, size, 3).mT.contiguous().mT.to(kind) for size in sizes]
        right = {"what arrives": blocks[rank - 1], "what arrives second": 2 * blocks[rank - 1]}
        see = partial(see_pass_on, blocks[rank], sizes[rank - 1], group, aside)
        yield f"{P} ranks, {sizes} tokens", see, right


class Ring:
    """Watches pass_on, its waits, and the work of each step in a lab: what travels, what is kept.

    least: so many messages could travel in each step. lengths: of the blocks that arrive. most:
    the bytes of one.
    """

    def __init__(self, eye, worker, least, lengths, most):
        self.eye, self.worker, self.least = eye, worker, least
        self.lengths, self.most = lengths, most
        self.sent, self.waited, self.step, self.used = 0, 0, 0, []

    def watch(self, lab):
        changes = {"pass_on": partial(self.pass_on, lab.pass_on)}
        changes[self.worker] = partial(self.work, getattr(lab, self.worker))
        return mock.patch.multiple(lab, **changes)

    def pass_on(self, pass_on, x, length, group):
        expected = self.lengths[self.sent : self.sent + 1] or [length]
        if length != expected[0]:
            found = f"a block of {expected[0]} tokens arrives, and length is {length}"
            hint = "pass_on() needs the length of the block before this one: len(held[source - 1])."
            raise Wrong(found, hint)
        self.sent += 1
        wait = pass_on(x, length, group)

        def waited():
            self.waited += 1
            return wait()

        return waited

    def work(self, work, q, k, *rest, **named):
        least = (self.least[self.step :] or [0])[0]
        missing = max(0, least - (self.sent - self.waited))
        self.eye.note(f"step {self.step}: messages that could travel meanwhile", Most(missing))
        kept = bytes_alive(self.used, self.most) - self.most  # one is still on its way
        self.eye.note(f"step {self.step}: bytes of used blocks", Most(max(0, kept)))
        if self.step > 0:  # the own block stays
            self.used.append(weakref.ref(k.untyped_storage()))
        self.step += 1
        return work(q, k, *rest, **named)


def see_ring(given, dy, ring, lab, eye):
    ring = Ring(eye, *ring)
    with ring.watch(lab):
        eye.call(lab.ring_attention, given, "out", dy)
    eye.note("blocks that are passed on", Most(ring.sent))


def ring_cases(group, seed, backward):
    """A sequence on the ring, its causal attention on one device, and its gradients."""
    number, randn = draw_float64(seed)
    rank, P = group.rank(), group.size()
    lengths = 2 * P * number(20, 40), 2 * P * number(20, 40) + number(1, 2 * P), max(1, P - 1)
    if backward:  # where a query sees its own key alone, its gradient is zero but for rounding
        lengths = lengths[:2]
    for length, placement in itertools.product(lengths, PLACEMENTS):
        kv, g, d = number(1, 4), number(2, 4), number(5, 9)
        # (b, s, heads, d) seen as (b, heads, s, d), as a model's projections give it
        full = [randn(2, length, h, d).transpose(1, 2) for h in (kv * g, kv, kv, kv * g)]
        leaves = {name: t.clone().requires_grad_() for name, t in zip("qkv", full)}
        out = F.scaled_dot_product_attention(*leaves.values(), is_causal=True, enable_gqa=True)
        out.backward(full[3])
        held = [finished.positions(length, r, P, placement) for r in range(P)]
        own, right = held[rank], {"out": out.detach()[:, :, held[rank]]}
        given = {name: t.detach()[:, :, own] for name, t in leaves.items()}
        where = {"length": length, "placement": placement, "group": group}
        most = max(2 * full[1][:, :, each].nbytes for each in held)
        blocks = [len(held[rank - t]) for t in range(1, P)]
        least, worker = [int(t < P - 1) for t in range(P)], "attend"
        if backward:
            blocks += [n for n in blocks for _ in range(2)]
            least, worker = [(t < P - 1) + (t > 0) for t in range(P)], "attend_backward"
            given = {name: t.requires_grad_() for name, t in given.items()}
            for name, leaf in leaves.items():
                right[f"the gradient of {name}"] = leaf.grad[:, :, own]
        dy = [full[3][:, :, own]] if backward else None
        see = partial(see_ring, given | where, dy, (worker, least, blocks, most))
        yield f"{P} ranks, {length} tokens, {placement}", see, right


ALONE = [positions, work, attend, merge, attend_backward]
EXERCISES = {cases.__name__: (cases, 1) for cases in ALONE}
EXERCISES |= {
    "pass_on": (pass_on, 4, GROUPS),
    "ring_forward": (partial(ring_cases, backward=False), 4, GROUPS),
    "ring_backward": (partial(ring_cases, backward=True), 4, GROUPS),
}
CHECKS, BUGS = checks(EXERCISES, finished, EXACT)
