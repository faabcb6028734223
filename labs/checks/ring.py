"""Lab 7's checks of the ring: what a rank passes on, and attention that goes round."""

from datetime import timedelta
from functools import partial, reduce
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from checks.compare import expect_same
from checks.tools import noted_waits
from harness import LABS, Traffic, Wrong, expect, expect_close, load

finished = load(LABS / "lab7_ring_attention.py")  # not the learner's
CONTIGUOUS, ZIGZAG, TILE = finished.CONTIGUOUS, finished.ZIGZAG, finished.TILE
split, positions, tiles = finished.split, finished.positions, finished.tiles
attend, attend_backward, merge = finished.attend, finished.attend_backward, finished.merge

EXACT = 1e-10
PLACEMENTS = CONTIGUOUS, ZIGZAG
AHEAD = "in step t rank r has the keys of rank r - t: they travel to rank + 1"


def draw_from(seed):
    """number(low, high) and randn(*shape), of float64, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    randn = partial(torch.randn, generator=generator, dtype=torch.float64)
    return lambda low, high: int(torch.randint(low, high, (), generator=generator)), randn


def last_ranks(group):
    """[(P, the group of the last P ranks)] of those this rank is in; its rank 0 differs in each."""
    world = group.size()
    groups = [dist.new_group(list(range(world - P, world))) for P in range(1, world + 1)]
    return [(P, g) for P, g in enumerate(groups, 1) if group.rank() >= world - P]


def check_pass_on(lab, group, seed):
    rings = last_ranks(group)
    asides = dict(last_ranks(group))  # the same ranks by other connections
    for P, ring, uneven in [(*ring, False) for ring in rings] + [(*ring, True) for ring in rings]:
        number, randn = draw_from(seed + P)
        rank, sizes = ring.rank(), [number(1, 9) if uneven else 5 for _ in range(P)]
        blocks = [randn(2, size, 3).mT.contiguous().mT for size in sizes]
        before = blocks[rank].clone()
        if rank == 0 and P > 1:
            wait_for_others(asides[P])
        with Traffic() as traffic, noted_waits() as waits:
            wait = begin(lab.pass_on, blocks[rank], sizes[rank - 1], ring)
            if rank > 0:
                dist.monitored_barrier(asides[P])
            kind = type(wait).__name__
            expect(callable(wait), f"pass_on returns {kind}", "return the function that waits")
            arrived = wait()
        late = "call wait() on both: gloo forgives a transfer that is not awaited, NCCL does not"
        transfers = 2 if P > 1 else 0
        expect(len(waits) >= transfers, f"waits for {len(waits)} of 2 transfers", late)
        hints = {"send to rank + 1, receive from rank - 1": blocks[(rank + 1) % P]}
        hints["this is what was sent: receive into a tensor of its own"] = blocks[rank]
        expect_close("what arrived", arrived, blocks[rank - 1], 0, hints)
        expect_sent("pass_on", traffic, before.nbytes if P > 1 else 0)
        expect_same("x", blocks[rank : rank + 1], [before])
        dist.barrier(ring)
    return f"1 to {group.size()} ranks, any length: from rank - 1 to rank + 1; begun, then awaited"


def begin(pass_on, *args):
    """pass_on(*args); Wrong where it names a rank that is not in the group."""
    try:
        return pass_on(*args)
    except ValueError as problem:
        hint = "ranks count within the group: group_dst, group_src, in P2POp group_peer"
        expect("not part of group" not in str(problem), f"sends outside the group: {problem}", hint)
        raise


def wait_for_others(aside):
    """Rank 0 takes part once the others have returned from pass_on: Wrong where they wait in it."""
    try:
        dist.monitored_barrier(aside, timeout=timedelta(seconds=5))
    except RuntimeError as problem:
        found = "pass_on does not return before the others take part"
        raise Wrong(found, "isend and irecv begin; wait in the function returned") from problem


def draw_case(seed, P, placement, uneven):
    """A sequence, its causal attention on one device, and all gradients: dout -> dq, dk, dv."""
    number, randn = draw_from(seed)
    length = 2 * P * number(20, 40) + (number(1, 2 * P) if uneven else 0)
    kv, g, d = number(1, 4), number(2, 4), number(5, 9)
    # (b, s, heads, d) seen as (b, heads, s, d), as a model's projections give it
    heads = kv * g, kv, kv, kv * g
    q, k, v, dout = (randn(2, length, h, d).transpose(1, 2) for h in heads)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    out = F.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
    out.backward(dout)
    case = SimpleNamespace(length=length, q=q, k=k, v=v, dout=dout, out=out.detach())
    case.dq, case.dk, case.dv = (leaf.grad for leaf in leaves)
    case.held = [positions(length, rank, P, placement) for rank in range(P)]
    return case


def cases(group, seed):
    """(P, group, placement, whether all hold as many tokens, case); even first: their hints fit."""
    rings = last_ranks(group)
    for uneven in False, True:
        for P, ring in rings:
            for placement in ZIGZAG, CONTIGUOUS:  # where rank 0 needs no other's keys
                yield P, ring, placement, not uneven, draw_case(seed + P, P, placement, uneven)


def grouped(q, k):
    """(b, heads, n, d) -> (b, kv, g, n, d)"""
    return q.unflatten(1, (k.shape[1], -1))


def go_round(case, rank, steps):
    """out of a rank's queries that meet keys and take them for those of another rank.

    steps: [(whose keys, for whose they are taken)].
    """
    own = case.held[rank]
    q, parts = grouped(case.q[:, :, own], case.k), []
    for met, claimed in steps:
        keys = case.held[met % len(case.held)]
        k_pos = case.held[claimed % len(case.held)]
        parts.append(attend(q, case.k[:, :, keys], case.v[:, :, keys], own, k_pos))
    return reduce(lambda one, other: merge(*one, *other), parts)[0].flatten(1, 2)


def part_of_gradients(case, asking, holding):
    """(dq, dk, dv) of one rank's queries with one rank's keys."""
    own, keys = case.held[asking], case.held[holding]
    q, dout, out = (grouped(t[:, :, own], case.k) for t in (case.q, case.dout, case.out))
    _, lse = attend(q, case.k, case.v, own, torch.arange(case.length))
    k, v, delta = case.k[:, :, keys], case.v[:, :, keys], (dout * out).sum(-1)
    dq, dk, dv = attend_backward(q, k, v, dout, lse, delta, own, keys)
    return dq.flatten(1, 2), dk, dv


def block_bytes(case, rank):
    """K and V of a rank's tokens."""
    return 2 * case.k[:, :, case.held[rank]].nbytes


def expect_sent(what, traffic, nbytes, hint=""):
    """Raise Wrong unless so many bytes were sent, and nothing else moved."""
    others = ", ".join(sorted(set(traffic.ops) - {"send"}))
    neighbour = "a rank of a ring sends to its neighbour and to no other"
    expect(not others, f"{what} uses {others}", neighbour)
    sent = traffic.bytes("send")
    expect(sent == nbytes, f"{what} sends {sent} bytes, not {nbytes}", hint)


def watch(lab):
    """Have pass_on, its waits and attend note themselves: [(what, blocks sent, blocks arrived)]."""
    events, pass_on, attend = [], lab.pass_on, lab.attend

    def note(what):
        kinds = [kind for kind, _, _ in events]
        events.append((what, kinds.count("send"), kinds.count("wait")))

    def noting_pass_on(*args, **kwargs):
        wait = pass_on(*args, **kwargs)
        note("send")

        def noting_wait():
            note("wait")
            return wait()

        return noting_wait

    def noting_attend(*args, **kwargs):
        note("attend")
        return attend(*args, **kwargs)

    lab.pass_on, lab.attend = noting_pass_on, noting_attend
    return events


def check_ring_forward(lab, group, seed):
    worst, events = 0, watch(lab)
    for P, ring, placement, even, case in cases(group, seed):
        rank = ring.rank()
        own, following = case.held[rank], (rank + 1) % P
        given = [t[:, :, own].clone() for t in (case.q, case.k, case.v)]
        before = [t.clone() for t in given]
        events.clear()
        with Traffic() as traffic:
            out = lab.ring_attention(*given, case.length, placement, ring)
        hints, steps = {}, range(P)
        if even:
            taken = {"these are this rank's own keys only": [(rank, rank)]}
            taken[AHEAD] = [(rank - t, rank + t) for t in steps]
            taken["positions are those of the keys' owner"] = [(rank - t, rank) for t in steps]
            again = "send on the block that arrived, not the own one again"
            taken[again] = [(rank - min(t, 1), rank - t) for t in steps]
            hints = {text: go_round(case, rank, met) for text, met in taken.items()}
        name = f"out of {P} ranks, {placement}"
        worst = max(worst, expect_close(name, out, case.out[:, :, own], EXACT, hints))
        nbytes = sum(block_bytes(case, r) for r in range(P) if r != following)
        hint = "K and V of the KV heads, P - 1 times: the last block has been everywhere"
        expect_sent(f"the forward of {P} ranks", traffic, nbytes, hint)
        for what, sent, arrived in events:
            sent_on = what != "attend" or sent > min(arrived, P - 2)
            found = f"attend() on {P} ranks with {sent} blocks sent, {arrived} awaited"
            expect(sent_on, found, "pass_on(), then attend(), then wait")
        expect_same("q, k or v", given, before)
    seen = f"{P - 1} sends, {nbytes} bytes, before the work that hides them"
    return f"1 to {P} ranks, GQA, uneven: off by {worst:.0e}; {seen}"


def check_ring_backward(lab, group, seed):
    worst = 0
    for P, ring, placement, even, case in cases(group, seed):
        rank = ring.rank()
        own, following = case.held[rank], (rank + 1) % P
        leaves = [t[:, :, own].requires_grad_() for t in (case.q, case.k, case.v)]
        dout = case.dout[:, :, own]
        before = dout.clone()
        out = lab.ring_attention(*leaves, case.length, placement, ring)
        with Traffic() as traffic:
            out.backward(dout)
        mine = part_of_gradients(case, rank, rank)
        last = part_of_gradients(case, (rank - 1) % P, rank)
        for i, (name, leaf) in enumerate(zip(("dq", "dk", "dv"), leaves)):
            right, hints = getattr(case, name), {}
            if name == "dq":
                of_last = part_of_gradients(case, rank, following)[i]
                hints["dq of the own keys alone: add up what all steps give"] = mine[i]
                hints["dq of the last step's keys alone: add up what all give"] = of_last
            elif even:
                left = "what this rank holds at last is the next rank's: send it home"
                hints[left] = right[:, :, case.held[following]]
                hints["the own queries' part alone: the others read these keys too"] = mine[i]
                hints["one rank's part: add it to the gradient that follows the block"] = last[i]
            what = f"{name} of {P} ranks, {placement}"
            worst = max(worst, expect_close(what, leaf.grad, right[:, :, own], EXACT, hints))
        nbytes = sum(block_bytes(case, r) * (1 + (r != following)) for r in range(P) if P > 1)
        hint = "P - 1 times K and V, P times their gradient"
        expect_sent(f"the backward of {P} ranks", traffic, nbytes, hint)
        expect_same("dout", [dout], [before])
    seen = f"{2 * P - 1} sends, {nbytes} bytes"
    return f"1 to {P} ranks, GQA, uneven: dq, dk, dv off by {worst:.0e}; {seen}"
