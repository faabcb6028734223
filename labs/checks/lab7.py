"""Lab 7's checks, each of which runs on every rank, and the bugs that they have to catch.

In float64, so that nothing but a mistake is off by more than EXACT. Values and gradients are
compared with one device's, bytes and multiplied pairs with the formulas.
"""

import inspect
import math
from datetime import timedelta
from functools import partial, reduce
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from checks.tools import noted_waits
from harness import LABS, Traffic, Wrong, expect, expect_close, load
from torch.utils.flop_counter import FlopCounterMode

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


def expect_finite(name, x):
    hint = "exp() of a large lse, or inf - inf where no key is seen"
    expect(x.isfinite().all(), f"{name} is not finite", hint)


def expect_unseen(lse):
    found = f"lse is {lse.max():g} where no key is seen"
    expect((lse == -torch.inf).all(), found, "the log of no exp(score) at all: minus infinity")


def expect_unchanged(names, given, before):
    same = all(map(torch.equal, given, before))
    expect(same, f"{names} is overwritten", "work on a new tensor")


def check_positions(lab, group, seed):
    number, _ = draw_from(seed)
    for world in 1, 2, 3, 4, 7:
        length = 2 * world * number(2, 9) + number(0, 2 * world)
        chunks = [list(range(*split(length, i, 2 * world))) for i in range(2 * world)]
        for rank in range(world):
            right = list(range(*split(length, rank, world)))
            mine = lab.positions(length, rank, world, CONTIGUOUS).tolist()
            hint = "split(length, rank, world), whole"
            expect(mine == right, f"contiguous: rank {rank} of {world} holds {mine}", hint)
            mine = lab.positions(length, rank, world, ZIGZAG).tolist()
            known = {"2P - 1 - r counts from the end": chunks[rank] + chunks[rank + world]}
            known |= {"the last chunk is number 2P - 1": chunks[rank] + chunks[-rank]}
            known["in ascending order: the early chunk first"] = chunks[-1 - rank] + chunks[rank]
            known["single tokens in turn: deal 2P chunks"] = list(range(rank, length, world))
            hints = [text for text, wrong in known.items() if wrong == mine]
            hint = hints[0] if hints else "chunks r and 2P - 1 - r"
            right = chunks[rank] + chunks[-1 - rank]
            expect(mine == right, f"zigzag: rank {rank} of {world} holds {mine}", hint)
    return f"1 to 7 ranks, the last of {length} tokens: each token once"


def check_work(lab, group, seed):
    number, _ = draw_from(seed)
    for world, placement in ((w, p) for w in (1, 2, 3, 4) for p in PLACEMENTS):
        length = 2 * world * number(3, 9) + number(0, 2 * world)
        held = [positions(length, rank, world, placement) for rank in range(world)]
        met = torch.tensor([[int((k <= q[:, None]).sum()) for k in held] for q in held]).double()
        size = torch.tensor([len(h) for h in held])
        r, t = torch.arange(world)[:, None], torch.arange(world)
        right = met[r, (r - t) % world]
        own = torch.zeros(world, world, dtype=torch.double)
        own[:, 0] = size
        hints = {AHEAD: met[r, (r + t) % world], "this is [step, rank]": right.mT}
        hints["this is [rank, whose keys]"] = met
        hints["a query sees no key of its future"] = (size[r] * size[(r - t) % world]).double()
        hints["a query sees its own key too"] = right - own
        mine = lab.work(length, world, placement)
        name = f"work of {world} ranks, {placement}"
        kind = type(mine).__name__
        expect(isinstance(mine, torch.Tensor), f"{name} is a {kind}", "return a (P, P) tensor")
        expect_close(name, mine.double(), right, 0, hints)
    ranks = [lab.work(4096, 4, placement).sum(1) for placement in PLACEMENTS]
    spread = [(pairs.max() / pairs.min().clamp(min=1)).item() for pairs in ranks]
    contiguous, zigzag = (f"{x:.3g}" for x in spread)
    return f"busiest over idlest of 4 ranks: contiguous {contiguous}, zigzag {zigzag}"


def draw_parts(seed):
    """Queries, two sets of keys and values, dout: q_pos, k_pos, q, ks, vs, dout.

    Query 0 sees no key, queries 1 to 7 see none of the second set.
    """
    number, randn = draw_from(seed)
    kv, g, n, d = number(1, 4), number(2, 4), TILE + number(5, 20), number(5, 9)
    mixed = torch.argsort(randn(3 * n))
    q_pos, *k_pos = (part.sort()[0] for part in mixed.split(n))
    q_pos, k_pos = q_pos.clamp(min=9), [k_pos[0].clamp(min=1), k_pos[1].clamp(min=10)]
    q_pos[0], q_pos[1:8], k_pos[0][0] = 0, 9, 1
    q, *keys_and_values = randn(2, kv, g, n, d), *(randn(2, kv, n, d) for _ in range(4))
    return q_pos, k_pos, q, keys_and_values[:2], keys_and_values[2:], randn(2, kv, g, n, d)


def softmax_attention(q, k, v, q_pos, k_pos):
    """(out, lse, scores) by torch's softmax; 0 and minus infinity where no key is seen."""
    s = q @ k.mT[:, :, None] / math.sqrt(q.shape[-1])
    s = s.masked_fill(k_pos > q_pos[:, None], -torch.inf)
    return s.softmax(-1).nan_to_num(0) @ v[:, :, None], s.logsumexp(-1), s


def pairs_in_tiles(q_pos, k_pos):
    """(query, key) pairs that attend() multiplies for each head: seen, or filling up the tiles."""
    return sum(len(q_pos[rows]) * len(k_pos[keys]) for rows, keys in tiles(q_pos, k_pos))


def check_attend(lab, group, seed):
    q_pos, k_pos, q, ks, vs, _ = draw_parts(seed)
    worst = 0
    for k, v, pos in zip(ks, vs, k_pos):
        given = [t.clone() for t in (q, k, v)]
        with FlopCounterMode(display=False) as counter:
            out, lse = lab.attend(*given, q_pos, pos)
        counted, pairs = counter.get_total_flops(), pairs_in_tiles(q_pos, pos)
        least = 4 * q[..., 0, :].numel() * pairs  # 2 matmuls of multiply and add
        hint = "multiply only keys that are seen"
        expect(counted <= least, f"{counted} operations; {least} do", hint)
        right_out, right_lse, s = softmax_attention(q, k, v, q_pos, pos)
        expect_finite("out", out)
        hints = {"divide by the sum of exp(scores)": s.exp() @ v[:, :, None]}
        worst = max(worst, expect_close("out", out, right_out, EXACT, hints))
        seen = right_lse.isfinite()
        hints = {"the log of the sum, not the sum": s.exp().sum(-1)[seen]}
        hints["the sum of exp(scores), not the largest score"] = s.amax(-1)[seen]
        expect_close("lse", lse[seen], right_lse[seen], EXACT, hints)
        expect_unseen(lse[~seen])
        expect_unchanged("q, k or v", given, (q, k, v))
    none = (~seen).sum()
    return f"out, lse as of softmax, off by {worst:.0e}; {none} queries see no key: 0, -inf"


def check_merge(lab, group, seed):
    q_pos, k_pos, q, ks, vs, _ = draw_parts(seed)
    whole = torch.cat(ks, 2), torch.cat(vs, 2), q_pos, torch.cat(k_pos)
    right, right_lse, _ = softmax_attention(q, *whole)
    parts = [softmax_attention(q, k, v, q_pos, p)[:2] for k, v, p in zip(ks, vs, k_pos)]
    (out1, lse1), (out2, lse2) = parts
    seen = right_lse.isfinite()
    for shift in 0, 2000, -2000:  # exp(lse) would not be finite, or zero
        given = [out1, lse1 + shift, out2, lse2 + shift]
        before = [t.clone() for t in given]
        out, lse = lab.merge(*given)
        expect_finite("out", out)
        share = torch.sigmoid(lse1 - lse2).nan_to_num(0)[..., None]
        hints = {"a part counts by exp(its lse - lse)": (out1 + out2) / 2}
        hints["each is a mean: it counts by exp(its lse - lse)"] = out1 + out2
        hints["the weights are exchanged"] = (1 - share) * out1 + share * out2
        hints["exp(lse) is infinite: take the larger lse off first"] = torch.zeros_like(right)
        error = expect_close("out", out, right, EXACT, hints)
        hints = {"log of the sum of both, not the larger one": torch.maximum(lse1, lse2)[seen]}
        hints["log of the sum of both, not the sum of logs"] = (lse1 + lse2)[seen] + shift
        expect_close("lse", lse[seen] - shift, right_lse[seen], EXACT, hints)
        expect_unseen(lse[~seen])
        expect_unchanged("out or lse", given, before)
    return f"two parts are the whole, off by {error:.0e}, with lse near 2000 too"


def check_attend_backward(lab, group, seed):
    q_pos, k_pos, q, ks, vs, dout = draw_parts(seed)
    leaves = [t.clone().requires_grad_() for t in (q, torch.cat(ks, 2), torch.cat(vs, 2))]
    out, lse, _ = softmax_attention(*leaves, q_pos, torch.cat(k_pos))
    # a query without any key is none of a real sequence's: every token sees itself
    q, dout, out = (t[..., 1:, :] for t in (q, dout, out))
    q_pos, lse = q_pos[1:], lse[..., 1:].detach()
    out.backward(dout)
    delta = (dout * out.detach()).sum(-1)
    dq, worst, root = 0, 0, math.sqrt(q.shape[-1])
    shares = (leaf.grad.chunk(2, 2) for leaf in leaves[1:])
    for k, v, pos, dk, dv in zip(ks, vs, k_pos, *shares):
        mine = lab.attend_backward(q, k, v, dout, lse, delta, q_pos, pos)
        _, part_lse, s = softmax_attention(q, k, v, q_pos, pos)
        own = (s - part_lse[..., None]).exp().nan_to_num(0)  # the softmax over this part alone
        p, dp = (s - lse[..., None]).exp(), dout @ v.mT[:, :, None]
        ds, last = p * (dp - delta[..., None]), [*tiles(q_pos, pos)][-1][0]  # its queries
        whole = "p is of the whole softmax: exp(scores - lse), lse as given"
        heads = "a KV head sums over the g heads that read it"
        tile = "a key is in many tiles: add to what is there"
        hints = {whole: (own.mT @ dout).sum(2), heads: (p.mT @ dout)[:, :, 0]}
        hints[tile] = (p[..., last, :].mT @ dout[..., last, :]).sum(2)
        worst = max(worst, expect_close("dv", mine[2], dv, EXACT, hints))
        hints = {"scores were divided by sqrt(d)": dk * root, heads: (ds.mT @ q)[:, :, 0] / root}
        hints["take delta off"] = ((p * dp).mT @ q).sum(2) / root
        hints[tile] = (ds[..., last, :].mT @ q[..., last, :]).sum(2) / root
        hints[whole] = ((own * (dp - delta[..., None])).mT @ q).sum(2) / root
        worst = max(worst, expect_close("dk", mine[1], dk, EXACT, hints))
        dq = dq + mine[0]
    right = leaves[0].grad[..., 1:, :]
    hints = {"scores were divided by sqrt(d)": right * root}
    worst = max(worst, expect_close("dq, summed over the parts", dq, right, EXACT, hints))
    return f"dq, dk, dv of two parts as autograd's of the whole, off by {worst:.0e}"


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
        expect_unchanged("x", blocks[rank : rank + 1], [before])
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

    def noting_pass_on(*args):
        wait = pass_on(*args)
        note("send")

        def noting_wait():
            note("wait")
            return wait()

        return noting_wait

    def noting_attend(*args):
        note("attend")
        return attend(*args)

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
        expect_unchanged("q, k or v", given, before)
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
        expect_unchanged("dout", [dout], [before])
    seen = f"{2 * P - 1} sends, {nbytes} bytes"
    return f"1 to {P} ranks, GQA, uneven: dq, dk, dv off by {worst:.0e}; {seen}"


CHECKS = {
    "positions": (check_positions, 1),
    "work": (check_work, 1),
    "attend": (check_attend, 1),
    "merge": (check_merge, 1),
    "attend_backward": (check_attend_backward, 1),
    "pass_on": (check_pass_on, 4),
    "ring_forward": (check_ring_forward, 4),
    "ring_backward": (check_ring_backward, 4),
}


# --------------------------------------------------------------------------------------------------
# Sabotage: bugs that the checks have to catch, for --inject-bug
# --------------------------------------------------------------------------------------------------


def edit(lab, name, changes):
    """Give lab the finished lab's function with pieces of its text replaced: {right: wrong}."""
    source = inspect.getsource(getattr(finished, name))
    for right, wrong in changes.items():
        assert right in source, f"{right} is not in {name}"
        source = source.replace(right, wrong)
    exec(source, vars(lab))


def zigzag_from_the_middle(lab):
    """Rank r holds chunks r and P + r: every result is right, the load is not."""
    edit(lab, "positions", {"2 * world - 1 - rank": "world + rank"})


def keys_of_the_next_rank(lab):
    """Step t is taken for one with the keys of rank r + t: the mask is another block's."""
    edit(lab, "ring_forward", {"(rank - step)": "(rank + step)"})


def local_mask(lab):
    """Every block is masked as if its keys stood where this rank's queries stand."""
    edit(lab, "ring_forward", {"held[source]))": "held[rank][: kv.shape[-2]]))"})


def parts_averaged(lab):
    """Partial attentions count alike, however much of the softmax each one has."""
    half = "torch.full_like(lse, 0.5)"
    edit(lab, "merge", {"(lse1 - finite).exp()": half, "(lse2 - finite).exp()": half})


def no_peak(lab):
    """lse is put together without taking a peak off: exp() overflows."""
    edit(lab, "merge", {"torch.logaddexp(lse1, lse2)": "(lse1.exp() + lse2.exp()).log()"})


def inf_minus_inf(lab):
    """A query that sees none of a block's keys gets what is no number."""
    edit(
        lab,
        "attend",
        {"lse[..., rows, None].clamp(min=torch.finfo(s.dtype).min)": "lse[..., rows, None]"},
    )


def future_multiplied(lab):
    """Keys that nobody may see are multiplied, then masked: results right, half the work vain."""
    edit(lab, "tiles", {"slice(0, seen)": "slice(0, len(k_pos))"})


def softmax_of_the_block(lab):
    """The backward takes the softmax over the block in hand for the whole one."""
    whole = "(scores(q_tile, k_seen, q_pos[rows], k_pos[keys]) - lse[..., rows, None]).exp()"
    block = "scores(q_tile, k_seen, q_pos[rows], k_pos[keys]).softmax(-1).nan_to_num(0)"
    edit(lab, "attend_backward", {whole: block})


def delta_forgotten(lab):
    """ds lacks - delta: the softmax's own derivative."""
    edit(lab, "attend_backward", {" - delta[..., rows, None]": ""})


def first_query_head_only(lab):
    """A KV head's gradient comes from one of the g query heads that read it."""
    edit(lab, "attend_backward", {"(ds.mT @ q_tile).sum(2)": "(ds.mT @ q_tile)[:, :, 0]"})


def global_peers(lab):
    """Neighbours are counted in the whole job, not in the group."""
    edit(lab, "pass_on", {"group_peer": "peer"})


def waits_at_once(lab):
    """pass_on waits before it returns: nothing travels while the rank computes."""
    edit(
        lab,
        "pass_on",
        {"    def wait():": "    [message.wait() for message in under_way]\n\n    def wait():"},
    )


def sent_on_after_use(lab):
    """A block is sent on when it has been used, and waited for at once."""
    send = "pass_on(kv, len(held[source - 1]), group)"
    edit(lab, "ring_forward", {f"arriving = {send}": "pass", "kv = arriving()": f"kv = {send}()"})


def one_send_too_many(lab):
    """K and V go all the way home, where nobody needs them."""
    edit(lab, "ring_forward", {"step < P - 1": "P > 1"})


def heads_repeated(lab):
    """KV heads are repeated for their query heads before they are sent: g times the bytes."""
    repeated = "torch.stack([k, v]).repeat_interleave(q.shape[2], 2)"
    edit(
        lab, "ring_forward", {"torch.stack([k, v])": repeated, "*kv,": "*kv[:, :, :: q.shape[2]],"}
    )


def not_sent_home(lab):
    """The gradient of K and V stays with the last rank that added to it."""
    edit(lab, "ring_backward", {"dk, dv = following()": "following()\n    dk, dv = dkv"})


def others_forgotten(lab):
    """A rank sends on its own part of a block's gradient without what the others found."""
    edit(lab, "ring_backward", {"+= following()": "+= 0 * following()"})


BUGS = [
    zigzag_from_the_middle,
    keys_of_the_next_rank,
    local_mask,
    parts_averaged,
    no_peak,
    inf_minus_inf,
    future_multiplied,
    softmax_of_the_block,
    delta_forgotten,
    first_query_head_only,
    global_peers,
    waits_at_once,
    sent_on_after_use,
    one_send_too_many,
    heads_repeated,
    not_sent_home,
    others_forgotten,
]
