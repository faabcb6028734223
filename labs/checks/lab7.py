"""Lab 7's checks, each of which runs on every rank, and the bugs that they have to catch.

In float64, so that nothing but a mistake is off by more than EXACT. Values and gradients are
compared with one device's, bytes and multiplied pairs with the formulas.
"""

import itertools
import math

import torch
from checks import ring
from checks.compare import expect_same
from checks.ring import (
    AHEAD,
    CONTIGUOUS,
    EXACT,
    PLACEMENTS,
    TILE,
    ZIGZAG,
    draw_from,
    positions,
    split,
    tiles,
)
from harness import expect, expect_close
from torch.utils.flop_counter import FlopCounterMode


def expect_finite(name, x):
    hint = "exp() of a large lse, or inf - inf where no key is seen"
    expect(x.isfinite().all(), f"{name} is not finite", hint)


def expect_unseen(lse):
    found = f"lse is {lse.max():g} where no key is seen"
    expect((lse == -torch.inf).all(), found, "the log of no exp(score) at all: minus infinity")


def check_positions(lab, group, seed):
    number, _ = draw_from(seed)
    for world, least in itertools.product((1, 2, 3, 4, 7), (1, 0)):
        more = number(0, 2 * world)  # and as many tokens as chunks, or fewer
        length = 2 * world * number(2, 9) + more if least else 2 * world - more // 2
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
        expect_same("q, k or v", given, (q, k, v))
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
        expect_same("out or lse", given, before)
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
        given = q, k, v, dout, lse, delta
        before = [t.clone() for t in given]
        mine = lab.attend_backward(*given, q_pos, pos)
        expect_same("an argument", given, before)
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


CHECKS = {
    "positions": (check_positions, 1),
    "work": (check_work, 1),
    "attend": (check_attend, 1),
    "merge": (check_merge, 1),
    "attend_backward": (check_attend_backward, 1),
    "pass_on": (ring.check_pass_on, 4),
    "ring_forward": (ring.check_ring_forward, 4),
    "ring_backward": (ring.check_ring_backward, 4),
}


# Bugs for --inject-bug: the checks have to catch every one


def zigzag_from_the_middle(lab):
    """Rank r holds chunks r and P + r: every result is right, the load is not."""
    right = lab.positions

    def positions(length, rank, world, placement):
        chunks = torch.arange(length).tensor_split(2 * world)
        zigzag = torch.cat([chunks[rank], chunks[world + rank]])
        return zigzag if placement == ZIGZAG else right(length, rank, world, placement)

    lab.positions = positions


def no_peak(lab):
    """lse is put together without taking a peak off: exp() overflows."""

    def merge(out1, lse1, out2, lse2):
        lse = (lse1.exp() + lse2.exp()).log()
        share1, share2 = ((part - lse).exp()[..., None] for part in (lse1, lse2))
        return share1 * out1 + share2 * out2, lse

    lab.merge = merge


def waits_at_once(lab):
    """pass_on waits before it returns: nothing travels while the rank computes."""
    right = lab.pass_on

    def pass_on(x, length, group):
        arrived = right(x, length, group)()
        return lambda: arrived

    lab.pass_on = pass_on


BUGS = [zigzag_from_the_middle, no_peak, waits_at_once]
