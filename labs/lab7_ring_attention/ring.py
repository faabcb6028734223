"""Lab 7's checks of the ring: what a rank passes on, and attention that goes round."""

import itertools
import weakref
from datetime import timedelta
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F

from labs.kit.compare import draw_float64, expect_same
from labs.kit.harness import Traffic, Wrong, expect, expect_close
from labs.kit.tools import noted_waits, subgroup
from labs.kit.usual import bytes_alive, section, usual_results
from labs.lab7_ring_attention import lesson as finished  # not the learner's

CONTIGUOUS, ZIGZAG, TILE = finished.CONTIGUOUS, finished.ZIGZAG, finished.TILE
split, positions, tiles = finished.split, finished.positions, finished.tiles

EXACT = 1e-10
PLACEMENTS = CONTIGUOUS, ZIGZAG


def last_ranks(group):
    """[(P, the group of the last P ranks, the same again)] of those this rank is in.

    Rank 0 is another one in each. The largest is made first: torch names a group by its ranks, and
    by how many groups each of them has.
    """
    world = group.size()
    ranks = [range(world - P, world) for P in range(world, world - 1 - group.rank(), -1)]
    return [(len(r), subgroup(group, ranks=r), subgroup(group, ranks=r)) for r in ranks][::-1]


def check_pass_on(lab, group, seed):
    """Two blocks, of which the second is begun before the first is awaited."""
    for uneven, (P, ring, aside) in itertools.product((False, True), last_ranks(group)):
        number, randn = draw_float64(seed + P)
        rank, sizes = ring.rank(), [number(1, 9) if uneven else 5 for _ in range(P)]
        kind = torch.bfloat16 if uneven else torch.float64
        blocks = [randn(2, size, 3).mT.contiguous().mT.to(kind) for size in sizes]
        given = blocks[rank], 2 * blocks[rank]
        before = [x.clone() for x in given]
        if rank == 0 and P > 1:
            wait_for_others(aside)
        with Traffic() as traffic, noted_waits() as waits:
            begun = [lab.pass_on(x, sizes[rank - 1], ring) for x in given]
            if rank > 0:
                dist.monitored_barrier(aside)
            kind = type(begun[0]).__name__
            expect(callable(begun[0]), f"pass_on returns {kind}", "return the function that waits")
            arrived, second = (wait() for wait in begun)
        late = "call wait() on both: gloo forgives a transfer that is not awaited, NCCL does not"
        transfers = 4 if P > 1 else 0
        expect(len(waits) >= transfers, f"waits for {len(waits)} of 4 transfers", late)
        kind = getattr(arrived, "dtype", type(arrived).__name__)
        expect(kind == given[0].dtype, f"what arrived is {kind}", "a tensor of the dtype of x")
        hints = {"send to rank + 1, receive from rank - 1": blocks[(rank + 1) % P]}
        hints["this is what was sent: receive into a tensor of its own"] = blocks[rank]
        hint = "x goes to rank + 1; what arrives is rank - 1's x"
        expect_close("what arrived", arrived, blocks[rank - 1], 0, hints, hint)
        hint = "each call has messages and a tensor of its own"
        expect_close("the second that arrived", second, 2 * blocks[rank - 1], 0, {}, hint)
        nbytes, messages = (2 * before[0].nbytes, 2) if P > 1 else (0, 0)
        expect_sent("pass_on, twice,", traffic, nbytes, messages)
        expect_same("x", given, before)
        dist.barrier(ring)
    return f"1 to {group.size()} ranks, any length: from rank - 1 to rank + 1; begun, then awaited"


def wait_for_others(aside):
    """Rank 0 takes part once the others have returned from pass_on: Wrong where they wait in it."""
    try:
        dist.monitored_barrier(aside, timeout=timedelta(seconds=5))
    except RuntimeError as problem:
        found = "pass_on does not return before the others take part"
        raise Wrong(found, "isend and irecv begin; wait in the function returned") from problem


def draw_case(seed, P, placement, uneven):
    """A sequence, its causal attention on one device, and all gradients: dout -> dq, dk, dv."""
    number, randn = draw_float64(seed)
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
        for P, ring, _ in rings:
            for placement in ZIGZAG, CONTIGUOUS:  # where rank 0 needs no other's keys
                yield P, ring, placement, not uneven, draw_case(seed + P, P, placement, uneven)


def block_bytes(case, rank):
    """K and V of a rank's tokens."""
    return 2 * case.k[:, :, case.held[rank]].nbytes


def expect_sent(what, traffic, nbytes, messages, hint="one message a block, of K and V together"):
    """Raise Wrong unless so many bytes were sent, in so many messages, and nothing else moved."""
    others = ", ".join(sorted(set(traffic.ops) - {"send"}))
    neighbour = "a rank of a ring sends to its neighbour and to no other"
    expect(not others, f"{what} uses {others}", neighbour)
    calls, sent = traffic.ops.get("send", (0, 0))
    found = f"{what} sends {sent} bytes, not {nbytes}, in {calls} messages, not {messages}"
    expect((calls, sent) == (messages, nbytes), found, hint)


class Ring:
    """Has pass_on, its waits and attend in a lab note themselves; wrong: [Wrong] of what it saw."""

    def __init__(self, lab, attend, hint):
        self.pass_on, self.attend, self.hint = lab.pass_on, getattr(lab, attend), hint
        lab.pass_on = self.noting_pass_on
        setattr(lab, attend, self.noting_attend)

    def begin(self, blocks, flying, most):
        """A ring in whose steps at least so many messages travel while it works: [flying].

        blocks: the lengths of those that arrive; most: the bytes of one.
        """
        self.blocks, self.flying, self.most = blocks, flying, most
        self.sent, self.waited, self.step, self.used, self.wrong = 0, 0, 0, [], []

    def noting_pass_on(self, x, length, group):
        if self.sent < len(self.blocks) and length != self.blocks[self.sent]:
            found = f"a block of {self.blocks[self.sent]} tokens arrives, and length is {length}"
            raise Wrong(found, "what arrives is the block before this one: len(held[source - 1])")
        wait = self.pass_on(x, length, group)
        self.sent += 1

        def noting_wait():
            self.waited += 1
            return wait()

        return noting_wait

    def noting_attend(self, q, k, *rest, **named):
        travel, least = self.sent - self.waited, (self.flying[self.step :] or [0])[0]
        if travel < least:
            found = f"{travel} messages travel while a rank works on a block, {least} could"
            self.wrong.append(Wrong(found, self.hint))
        if bytes_alive(self.used, self.most) > self.most:  # one is still on its way
            found = f"in step {self.step} blocks of earlier steps are kept"
            self.wrong.append(Wrong(found, "let go of a block when it has been used and sent on"))
        if self.step > 0:  # the own block stays
            self.used.append(weakref.ref(k.untyped_storage()))
        self.step += 1
        return self.attend(q, k, *rest, **named)


MISTAKES = """
== ring_forward
held[rank], held[source]) -> held[rank], held[rank])  # positions are those of the keys' owner
(rank - step) -> (rank + step)  # rank r has the keys of rank r - t: they travel to rank + 1
held[rank], held[source]) -> held[source], held[rank])  # first the positions of the own queries
pass_on(kv, -> pass_on(torch.stack([k, v]),  # send on the block that arrived, not the own one again
kv = torch.stack([k, v]) -> kv = torch.stack([v, k])  # attend() takes K first, then V
(rank - step) -> (rank - step - 1)  # in step 0 a rank has its own keys
in range(P): -> in range(1):  # these are this rank's own keys only
in range(P): -> in range(P - 1):  # the block that came last is used, too, and not sent on
kv = arriving() -> arriving()  # go on with the block that arrived
merge(out, lse, * -> (  # merge() each part with those before: this is the last alone
merge() what attend() gives of each block, with the positions of its keys
== ring_backward
held[rank], held[source]) -> held[rank], held[rank])  # positions are those of the keys' owner
(rank - step) -> (rank + step)  # rank r has the keys of rank r - t: they travel to rank + 1
held[rank], held[source]) -> held[source], held[rank])  # first the positions of the own queries
pass_on(kv, -> pass_on(torch.stack([k, v]),  # send on the block that arrived, not the own one again
dq += mine_q -> dq = mine_q  # dq of the last step's keys alone: add up what all give
in range(P): -> in range(1):  # dq of the own keys alone: add up what all steps give
dkv += following() -> following()  # one rank's part: add it to the gradient that follows the block
dkv += following() -> dkv = following()  # add this rank's part to the gradient that follows
dk, dv = following() -> dk, dv = dkv; following()  # add, then send; send home what is held at last
dk, dv = following() -> dv, dk = following()  # dk and dv are exchanged
dq adds up what all steps give; a block's gradient is one step behind it, and adds up on its way
"""


def check_ring_forward(lab, group, seed):
    worst, watch = 0, Ring(lab, "attend", "pass_on(), then attend(), then wait")
    for P, ring, placement, even, case in cases(group, seed):
        rank, title = ring.rank(), f"the forward of {P} ranks"
        own, following = case.held[rank], (rank + 1) % P
        given = [t[:, :, own].clone() for t in (case.q, case.k, case.v)]
        before = [t.clone() for t in given]
        call, usual = finished.ring_forward, {}
        if even:  # all ranks together make each mistake
            args = before[0].unflatten(1, (case.k.shape[1], -1)), *before[1:]
            results = usual_results(MISTAKES, call, (*args, case.length, placement, ring))
            usual = {hint: out.flatten(1, 2) for hint, (out, _) in results}
        most = max(block_bytes(case, r) for r in range(P))
        blocks = [len(case.held[rank - t]) for t in range(1, P)]
        watch.begin(blocks, [int(t < P - 1) for t in range(P)], most)
        with Traffic() as traffic:
            out = lab.ring_attention(*given, case.length, placement, ring)
        name, hint = f"out of {P} ranks, {placement}", section(MISTAKES, call)[-1]
        worst = max(worst, expect_close(name, out, case.out[:, :, own], EXACT, usual, hint))
        nbytes = sum(block_bytes(case, r) for r in range(P) if r != following)
        hint = "K and V of the KV heads as one, P - 1 times: the last block has been everywhere"
        expect_sent(title, traffic, nbytes, P - 1, hint)
        expect_same("q, k or v", given, before)
        for wrong in watch.wrong:
            raise wrong
    seen = f"{P - 1} sends, {nbytes} bytes, before the work that hides them"
    return f"1 to {P} ranks, GQA, uneven: off by {worst:.0e}; {seen}"


def check_ring_backward(lab, group, seed):
    hint = "wait for keys, and for the gradient behind them, after attend_backward()"
    worst, watch = 0, Ring(lab, "attend_backward", hint)
    for P, ring, placement, even, case in cases(group, seed):
        rank, title = ring.rank(), f"the backward of {P} ranks"
        own, following = case.held[rank], (rank + 1) % P
        leaves = [t[:, :, own].requires_grad_() for t in (case.q, case.k, case.v)]
        dout = case.dout[:, :, own]
        before = [t.detach().clone() for t in (*leaves, dout)]
        watch.begin([], [], torch.inf)  # this is the backward's check
        out = lab.ring_attention(*leaves, case.length, placement, ring)
        call, usual = finished.ring_backward, []
        if even:
            saved = out.grad_fn.saved_tensors
            args = *saved, dout.unflatten(1, (case.k.shape[1], -1)), case.length, placement, ring
            results = usual_results(MISTAKES, call, args)
            usual = [(hint, dq.flatten(1, 2), *dkv) for hint, (dq, *dkv) in results]
        most = max(block_bytes(case, r) for r in range(P))
        blocks = [len(case.held[rank - t]) for t in range(1, P) for _ in range(2)]
        watch.begin(blocks, [(t < P - 1) + (t > 0) for t in range(P)], most)
        with Traffic() as traffic:
            out.backward(dout)
        for i, (name, leaf) in enumerate(zip(("dq", "dk", "dv"), leaves)):
            what, right = f"{name} of {P} ranks, {placement}", getattr(case, name)[:, :, own]
            hints = {hint: parts[i] for hint, *parts in usual}
            hint = section(MISTAKES, call)[-1]
            worst = max(worst, expect_close(what, leaf.grad, right, EXACT, hints, hint))
        nbytes = sum(block_bytes(case, r) * (1 + (r != following)) for r in range(P) if P > 1)
        messages = 2 * P - 1 if P > 1 else 0
        expect_sent(title, traffic, nbytes, messages, "P - 1 times K and V, P times their gradient")
        expect_same("q, k, v or dout", [*leaves, dout], before)
        for wrong in watch.wrong:
            raise wrong
    seen = f"{2 * P - 1} sends, {nbytes} bytes"
    return f"1 to {P} ranks, GQA, uneven: dq, dk, dv off by {worst:.0e}; {seen}"
