"""Lab 7's checks, each of which runs on every rank, and the bugs that they have to catch.

In float64, so that nothing but a mistake is off by more than EXACT. Values and gradients are
compared with one device's, bytes and multiplied pairs with the formulas.
"""

import itertools
import math

import torch
from torch.utils.flop_counter import FlopCounterMode

from labs.kit.compare import draw_float64, expect_same, mistaken, tried
from labs.kit.harness import Wrong, expect, expect_close
from labs.kit.usual import close_or_usual, usual_hint
from labs.lab7_ring_attention import ring
from labs.lab7_ring_attention.ring import PLACEMENTS, finished, split

SUBGROUP = True  # the group is not the world, and has other rank numbers
SHAPES = "a tile's rows and keys; no g in k, v: k[:, :, None]; dk, dv of ds^T, p^T, .sum(2) over g"
MISTAKES = """
== positions
2 * world - 1 - rank -> world + rank  # 2P - 1 - r counts from the end
2 * world - 1 - rank -> 2 * world - rank  # the last chunk is number 2P - 1
[early, late] -> [late, early]  # in ascending order: the early chunk first
torch.cat([early, late]) -> torch.arange(rank, length, world)  # tokens in turn: deal 2P chunks
2 * world -> world  # zigzag cuts 2P chunks, of which a rank holds two
length, rank, 2 * -> length, rank,  # the early chunk, too, is one of 2P
placement == CONTIGUOUS -> True  # zigzag: chunks r and 2P - 1 - r
split() deals all tokens: share r of P, or zigzag's chunks r and 2P - 1 - r of 2P, ascending
== work
(rank - step) -> (rank + step)  # rank r has the keys of rank r - t: they travel to rank + 1
(rank - step) -> (step - rank)  # rank r has the keys of rank r - t: they travel to rank + 1
pairs[rank, step] -> pairs[step, rank]  # this is [step, rank]
pairs[rank, step] -> pairs[rank, (rank - step) % world]  # this is [rank, whose keys]
, right=True ->  # a query sees its own key too
True).sum() -> True).numel() * len(keys)  # a query sees no key of its future
of each query the keys up to its position, whichever rank holds them
== attend
None].clamp(min=torch.finfo(s.dtype).min) -> None]  # inf - inf where no key is seen
(s - finite).exp() -> s.exp()  # divide by the sum of exp(scores)
(s - finite).exp() -> s.exp() / s.exp().sum(-1, True)  # exp() of a large score is infinite
s.logsumexp(-1) -> s.exp().sum(-1)  # the log of the sum, not the sum
s.logsumexp(-1) -> s.amax(-1)  # divide by the sum of exp(scores), not by the largest of them alone
s.logsumexp(-1) -> (s.logsumexp(-1) - s.amax(-1))  # a peak that was taken off is added back
= scores( -> = q.shape[-1] ** -0.5 * scores(  # scores() has divided by sqrt(d)
out is the softmax times v, lse the log of the sum of exp(scores), whose exp() may be infinite
== merge
finite = lse.clamp(min=torch.finfo(lse.dtype).min) -> finite = lse  # inf - inf where no key is seen
torch.logaddexp(lse1, lse2) -> (lse1.exp() + lse2.exp()).log()  # exp(lse): take a peak off first
out = ( -> out = (out1 + out2) / 2; (  # a part counts by exp(its lse - lse)
out = ( -> out = out1 + out2; (  # each is a mean: it counts by exp(its lse - lse)
return out, -> return out1 + out2 - out,  # the weights are exchanged
- finite ->  # divide by exp(lse), the sum over both sets
finite = lse -> finite = torch.maximum(lse1, lse2)  # divide by exp(lse), the sum over both sets
logaddexp -> maximum  # log of the sum of both, not the larger one
logaddexp -> add  # log of the sum of both, not the sum of logs
out: each part counts by exp(its lse - lse), at most 1; lse: log of the sum of both
== attend_backward
- lse[..., rows, None]) -> ).log_softmax(-1).nan_to_num(-1e9)  # p is of the whole softmax
- lse[..., rows, None]).exp() -> - lse[..., rows, None])  # p = exp(scores - lse)
.sum(2) -> [:, :, 0]  # a KV head sums over the g heads that read it
.sum(2) -> .mean(2)  # a KV head sums over the g heads that read it
keys, :] += -> keys, :] =  # a key is in many tiles: add to what is there
/ math.sqrt(q.shape[-1]) ->  # scores were divided by sqrt(d)
@ q_tile) -> @ q_tile / math.sqrt(q.shape[-1]))  # ds is divided by sqrt(d) already
ds @ k_seen -> math.sqrt(q.shape[-1]) * ds @ k_seen  # scores were divided by sqrt(d)
- delta[..., rows, None] ->  # take delta off
- delta -> + delta  # take delta off
delta[..., rows, None] -> (do_tile * (p @ v_seen[:, :, None])).sum(-1, True)  # take delta as given
ds = p * -> ds =  # ds = p (dout v^T - delta)
(p.mT @ do_tile) -> (ds.mT @ do_tile)  # dv = p^T dout
dv = p^T dout, ds = p (dout v^T - delta) / sqrt(d), dq = ds k, dk = ds^T q, of this tile's rows
"""


def expect_lse(mine, right, *usual):
    """Raise Wrong unless lse is right, and minus infinity where no key is seen."""
    expect(mine.shape == right.shape, f"lse has shape {tuple(mine.shape)}", "as lse was given")
    unseen = mine[right.isinf()]
    found = f"lse is {unseen.max():g} where no key is seen"
    hint = "the log of no exp(score) at all: minus infinity"
    finite = (x.masked_fill(right.isinf(), 0) for x in (mine, right))
    close_or_usual("lse", *finite, *usual, 1)
    expect((unseen == -torch.inf).all(), found, hint)


def check_positions(lab, group, seed):
    number, _ = draw_float64(seed)
    for world, least in itertools.product((1, 2, 3, 4, 7), (1, 0)):
        more = number(0, 2 * world)  # and as many tokens as chunks, or fewer
        length = 2 * world * number(2, 9) + more if least else 2 * world - more // 2
        chunks = [list(range(*split(length, i, 2 * world))) for i in range(2 * world)]
        for rank, placement in itertools.product(range(world), PLACEMENTS):
            args = length, rank, world, placement
            right = chunks[rank] + chunks[-1 - rank]
            if placement == ring.CONTIGUOUS:
                right = list(range(*split(length, rank, world)))
            mine = lab.positions(*args)
            kind = type(mine).__name__
            expect(isinstance(mine, torch.Tensor), f"positions() is {kind}", "return a tensor (n,)")
            if mine.tolist() != right:
                hint = usual_hint(MISTAKES, finished.positions, args, mine)
                what = f"{placement}: rank {rank} of {world} holds"
                raise Wrong(f"{what} {mine.tolist()}, not {right}", hint)
    return f"1 to 7 ranks, the last of {length} tokens: each token once"


def check_work(lab, group, seed):
    number, _ = draw_float64(seed)
    for world, placement in itertools.product((1, 2, 3, 4), PLACEMENTS):
        args = 2 * world * number(3, 9) + number(0, 2 * world), world, placement
        held = [ring.positions(args[0], rank, world, placement) for rank in range(world)]
        met = torch.tensor([[int((k <= q[:, None]).sum()) for k in held] for q in held])
        r, t = torch.arange(world)[:, None], torch.arange(world)
        mine, name = lab.work(*args), f"work of {world} ranks, {placement}"
        kind = type(mine).__name__
        expect(isinstance(mine, torch.Tensor), f"{name} is a {kind}", "return a (P, P) tensor")
        if mine.tolist() != (right := met[r, (r - t) % world].tolist()):
            hint = usual_hint(MISTAKES, finished.work, args, mine)
            raise Wrong(f"{name} is {mine.tolist()}, not {right}", hint)
    ranks = [lab.work(4096, 4, placement).sum(1) for placement in PLACEMENTS]
    spread = [(pairs.max() / pairs.min().clamp(min=1)).item() for pairs in ranks]
    contiguous, zigzag = (f"{x:.3g}" for x in spread)
    return f"busiest over idlest of 4 ranks: contiguous {contiguous}, zigzag {zigzag}"


def draw_parts(seed):
    """Queries, two sets of keys and values, dout: q_pos, k_pos, q, ks, vs, dout.

    Query 0 sees no key, queries 1 to 7 see none of the second set.
    """
    number, randn = draw_float64(seed)
    kv, g, n, d = number(1, 4), number(2, 4), ring.TILE + number(5, 20), number(5, 9)
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
    return sum(len(q_pos[rows]) * len(k_pos[keys]) for rows, keys in ring.tiles(q_pos, k_pos))


def check_attend(lab, group, seed):
    q_pos, k_pos, q, ks, vs, _ = draw_parts(seed)
    worst = 0
    for size, (k, v, pos) in itertools.product((1, 1000), zip(ks, vs, k_pos)):
        large = q * size  # exp(score) would not be finite
        given = [t.clone() for t in (large, k, v)]
        with FlopCounterMode(display=False) as counter:
            out, lse = tried("attend()", SHAPES, lab.attend, *given, q_pos, pos)
        expect_same("q, k or v", given, (large, k, v))
        counted, pairs = counter.get_total_flops(), pairs_in_tiles(q_pos, pos)
        least = 4 * q[..., 0, :].numel() * pairs  # 2 matmuls of multiply and add
        hint = "multiply only keys that are seen"
        expect(counted <= least, f"{counted} operations; {least} do", hint)
        right_out, right_lse, s = softmax_attention(large, k, v, q_pos, pos)
        args = large, k, v, q_pos, pos
        usual = MISTAKES, finished.attend, args
        error = close_or_usual(f"out of scores up to {s.max():.0f}", out, right_out, *usual, 0)
        expect_lse(lse, right_lse, *usual)
        worst = max(worst, error)
    none = right_lse.isinf().sum()
    return f"out, lse as of softmax, off by {worst:.0e}; {none} queries see no key: 0, -inf"


def check_merge(lab, group, seed):
    q_pos, k_pos, q, ks, vs, _ = draw_parts(seed)
    whole = torch.cat(ks, 2), torch.cat(vs, 2), q_pos, torch.cat(k_pos)
    right, right_lse, _ = softmax_attention(q, *whole)
    parts = [softmax_attention(q, k, v, q_pos, p)[:2] for k, v, p in zip(ks, vs, k_pos)]
    (out1, lse1), (out2, lse2) = parts
    for shift in 0, 2000, -2000:  # exp(lse) would not be finite, or zero
        args = out1, lse1 + shift, out2, lse2 + shift
        given, usual = [t.clone() for t in args], (MISTAKES, finished.merge, args)
        hint = "return (out, lse); lse has no d: lse[..., None] beside out"
        out, lse = tried("merge()", hint, lab.merge, *given)
        expect_same("out or lse", given, args)
        expect(out.shape == out1.shape, f"out has shape {tuple(out.shape)}", "return (out, lse)")
        error = close_or_usual("out", out, right, *usual, 0)
        expect_lse(lse, right_lse + shift, *usual)
    return f"two parts are the whole, off by {error:.0e}, with lse near 2000 too"


def check_attend_backward(lab, group, seed):
    q_pos, k_pos, q, ks, vs, dout = draw_parts(seed)
    leaves = [t.clone().requires_grad_() for t in (q, torch.cat(ks, 2), torch.cat(vs, 2))]
    out, lse, _ = softmax_attention(*leaves, q_pos, torch.cat(k_pos))
    # a query without any key is none of a real sequence's: every token sees itself
    q, dout, out = (t[..., 1:, :] for t in (q, dout, out))
    q_pos, lse = q_pos[1:], lse[..., 1:].detach()
    out.backward(dout)
    delta, usual = (dout * out.detach()).sum(-1), (MISTAKES, finished.attend_backward)
    calls = [(q, k, v, dout, lse, delta, q_pos, pos) for k, v, pos in zip(ks, vs, k_pos)]
    mine, shares = [], [leaf.grad.chunk(2, 2) for leaf in leaves[1:]]
    for part, args in enumerate(calls):
        given = [t.clone() for t in args]
        mine.append(tried("attend_backward()", SHAPES, lab.attend_backward, *given))
        expect_same("an argument", given, args)
        for i in 2, 1:
            right, name = shares[i - 1][part], ("dq", "dk", "dv")[i]
            close_or_usual(name, mine[-1][i], right, *usual, args, i)
    right, dq = leaves[0].grad[..., 1:, :], mine[0][0] + mine[1][0]
    hint = usual_hint(*usual, calls[0], mine[0][0], 0)
    error = expect_close("dq, summed over the parts", dq, right, ring.EXACT, hint=hint)
    return f"dq, dk, dv of two parts as autograd's of the whole, dq off by {error:.0e}"


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
    lab.positions = mistaken(finished.positions, ("2 * world - 1 - rank", "world + rank"))


def no_peak(lab):
    """lse is put together without taking a peak off: exp() overflows."""
    peakless = "(lse1.exp() + lse2.exp()).log()"
    lab.merge = mistaken(finished.merge, ("torch.logaddexp(lse1, lse2)", peakless))


def waits_at_once(lab):
    """pass_on waits before it returns: nothing travels while the rank computes."""
    lab.pass_on = mistaken(finished.pass_on, ("return wait", "wait(); return wait"))


BUGS = [zigzag_from_the_middle, no_peak, waits_at_once]
