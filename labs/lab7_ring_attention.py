"""Lab 7: Ring attention. One sequence, cut over P ranks, in front of one softmax (context parallelism).

A sequence is too long for one device. Everything in a transformer but attention works token by token, so
each rank takes s/P tokens. But a query needs the keys and values of all tokens before it: how does it see
them, when no rank may hold them all? The queries stay, the keys and values travel round a ring. P = 3:

              rank 0        rank 1        rank 2
    step 0    q0 x kv0      q1 x kv1      q2 x kv2      meanwhile each kv is on its way to rank + 1
    step 1    q0 x kv2      q1 x kv0      q2 x kv1      and again
    step 2    q0 x kv1      q1 x kv2      q2 x kv0      every query has met every key

One step gives the attention over a part of the keys: out (.., n, d), a mean of their values, and lse (.., n),
the log of the sum of exp(score) that the mean was divided by. Two such parts make the whole (online softmax):

    lse = log(exp(lse1) + exp(lse2))        out = exp(lse1 - lse) out1 + exp(lse2 - lse) out2

The backward goes round once more. Given the final lse, exp(score - lse) is the whole softmax's probability
from the first step on: gradients of parts are simply added. Those of kv0 travel with kv0, each rank adds
what its queries say, and one last send brings them home.

Causal attention makes the ring uneven. q0 may not see kv1 or kv2: placed in order, rank 0 idles while rank
2 works, and a ring is as slow as its busiest rank. Zigzag cuts 2P chunks; rank r holds r and 2P - 1 - r:

    chunk         0  1  2  3  4  5        rank 0 holds the least and the most expensive queries,
    contiguous    0  0  1  1  2  2        rank 2 two middle ones: all ranks have the same to do,
    zigzag        0  1  2  2  1  0        not only in sum but in every step

Cost, with KV = 2 b (s/P) kv_heads d numbers: forward P - 1 sends of KV; backward P - 1 sends of KV and P of
its gradient. All but the last travel while the rank computes. Heads are not cut: P may exceed them.

    python labs/lab7_ring_attention.py                       # checks and experiments, about 20 s
    python labs/lab7_ring_attention.py --plot lab7.png --json lab7.json
    python labs/lab7_ring_attention.py --inject-bug list
    python labs/lab7_ring_attention.py --length 1003         # no number has to divide another

Sources: Ring Attention, arXiv 2310.01889; online softmax and lse, FlashAttention-2, 2307.08691; uneven causal
rings, Striped Attention, 2311.09431; all-gather instead of a ring, Llama 3, 2407.21783 section 3.3.2. Zigzag:
zhuzilin/ring-flash-attention, ring_flash_attn/zigzag_ring_flash_attn.py. Megatron-LM deals the chunks in
get_batch_on_this_cp_rank; megatron/core/extensions/transformer_engine.py hands the ring to Transformer
Engine's context_parallel.py. Nanotron: src/nanotron/nn/ring_attention.py, llama3_ring_attention.py. NeMo
AutoModel: components/distributed/context_parallel/. DeepSpeed has Ulysses: deepspeed/sequence/layer.py.
"""

import argparse
import importlib.util
import inspect
import json
import math
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from contextlib import ExitStack, suppress
from datetime import timedelta
from functools import partial, reduce
from multiprocessing import connection
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

CONTIGUOUS, ZIGZAG = "contiguous", "zigzag"
TILE = 32  # queries that are multiplied by the same keys

# ---------------------------------------------------------------------------------------------------
# The lesson 1: who holds which tokens
# ---------------------------------------------------------------------------------------------------


# Copied from tp.py
def split(n, rank, world):
    """[start, end) of the rank's share of n things: the first n % world ranks hold one more."""
    base, extra = divmod(n, world)
    return rank * base + min(rank, extra), (rank + 1) * base + min(rank + 1, extra)


def positions(length, rank, world, placement):
    """The positions (n,) of the tokens that a rank holds, in ascending order; they are its position ids too.

    CONTIGUOUS: split(length, rank, world). ZIGZAG: split() into 2 * world chunks, of which it holds number
    rank and number 2 * world - 1 - rank. Nothing is padded: ranks may differ by one token.
    """
    # exercise: positions
    if placement == CONTIGUOUS:
        return torch.arange(*split(length, rank, world))
    early = torch.arange(*split(length, rank, 2 * world))
    late = torch.arange(*split(length, 2 * world - 1 - rank, 2 * world))
    return torch.cat([early, late])
    # end exercise


def work(length, world, placement):
    """(P, P) whole numbers: how many (query, key) pairs rank r has to multiply in step t, at [r, t].

    In step t rank r has the keys of rank (r - t) mod P. A query at position i sees the keys up to i.
    """
    # exercise: work
    held = [positions(length, rank, world, placement) for rank in range(world)]
    pairs = torch.zeros(world, world, dtype=torch.long)
    for rank in range(world):
        for step in range(world):
            seen = torch.searchsorted(
                held[(rank - step) % world], held[rank], right=True
            )  # keys, a query
            pairs[rank, step] = seen.sum()
    return pairs
    # end exercise


# ---------------------------------------------------------------------------------------------------
# The lesson 2: attention over a part of the keys
# ---------------------------------------------------------------------------------------------------

# Shapes: q and out (b, kv, g, n, d), of kv KV heads each is read by g query heads; k and v (b, kv, m, d).
# q_pos (n,) and k_pos (m,) are their positions, ascending.


def tiles(q_pos, k_pos):
    """Slices (rows, keys): TILE queries at a time, and the keys that the last of them sees.

    The other keys lie in the future of all. So FlashAttention skips half of a causal attention.
    """
    for start in range(0, len(q_pos), TILE):
        rows = slice(start, start + TILE)
        seen = int(torch.searchsorted(k_pos, q_pos[rows][-1], right=True))
        if seen:
            yield rows, slice(0, seen)


def scores(q, k, q_pos, k_pos):
    """(b, kv, g, n, m): q k / sqrt(d), and minus infinity where the key lies in the query's future."""
    s = q @ k.mT[:, :, None] / math.sqrt(q.shape[-1])
    return s.masked_fill(k_pos > q_pos[:, None], -torch.inf)


def attend(q, k, v, q_pos, k_pos):
    """Attention over these keys alone: out like q, lse (b, kv, g, n) = log of the sum of exp(scores).

    A query that sees none of the keys has out 0 and lse minus infinity. Write what a tile gives, from its
    scores(), to out[..., rows, :] and lse[..., rows]; other tiles stay as they are.
    """
    out, lse = torch.zeros_like(q), q.new_full(q.shape[:-1], -torch.inf)
    for rows, keys in tiles(q_pos, k_pos):
        # exercise: attend
        s = scores(
            q[..., rows, :], k[..., keys, :], q_pos[rows], k_pos[keys]
        )  # (b, kv, g, tile, m)
        lse[..., rows] = s.logsumexp(-1)
        finite = lse[..., rows, None].clamp(
            min=torch.finfo(s.dtype).min
        )  # inf - inf would be no number
        out[..., rows, :] = (s - finite).exp() @ v[:, :, None, keys]
        # end exercise
    return out, lse


def merge(out1, lse1, out2, lse2):
    """Attention over two sets of keys together, from that over each: (out, lse). Nothing given is written to.

    exp(lse) itself would overflow. Where neither set had a key to see, out is 0 and lse minus infinity.
    """
    # exercise: merge
    lse = torch.logaddexp(lse1, lse2)
    finite = lse.clamp(min=torch.finfo(lse.dtype).min)
    out = (lse1 - finite).exp()[..., None] * out1 + (lse2 - finite).exp()[..., None] * out2
    return out, lse
    # end exercise


def attend_backward(q, k, v, dout, lse, delta, q_pos, k_pos):
    """What these keys add to dq; and dk, dv as far as these queries know: (dq, dk, dv), like q, k, v.

    lse and delta = sum of dout * out (b, kv, g, n) are those of the whole attention, over all keys. With
    p = exp(scores - lse):   dv = p^T dout,   ds = p (dout v^T - delta),   dq = ds k / sqrt(d),
    dk = ds^T q / sqrt(d), and a KV head sums over the g heads that read it. Each query is in one tile: write
    dq[..., rows, :]; a key is in many: add to dk[..., keys, :] and dv[..., keys, :].
    """
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for rows, keys in tiles(q_pos, k_pos):
        q_tile, do_tile = q[..., rows, :], dout[..., rows, :]
        k_seen, v_seen = k[..., keys, :], v[..., keys, :]
        # exercise: attend_backward
        p = (scores(q_tile, k_seen, q_pos[rows], k_pos[keys]) - lse[..., rows, None]).exp()
        ds = p * (do_tile @ v_seen.mT[:, :, None] - delta[..., rows, None]) / math.sqrt(q.shape[-1])
        dq[..., rows, :] = ds @ k_seen[:, :, None]
        dk[..., keys, :] += (ds.mT @ q_tile).sum(2)
        dv[..., keys, :] += (p.mT @ do_tile).sum(2)
        # end exercise
    return dq, dk, dv


# ---------------------------------------------------------------------------------------------------
# The lesson 3: the ring
# ---------------------------------------------------------------------------------------------------


def pass_on(x, length, group):
    """Begin to send x (.., n, d) to the next rank and to receive (.., length, d) from the one before.

    Returns at once; the function that it returns waits, and returns what arrived. One rank alone sends
    nothing and receives its own x.
    """
    # exercise: pass_on
    rank, P = group.rank(), group.size()
    if P == 1:
        return lambda: x
    arriving = x.new_empty(*x.shape[:-2], length, x.shape[-1])
    send = dist.P2POp(dist.isend, x.contiguous(), group=group, group_peer=(rank + 1) % P)
    receive = dist.P2POp(dist.irecv, arriving, group=group, group_peer=(rank - 1) % P)
    under_way = dist.batch_isend_irecv([send, receive])  # NCCL wants the two begun together

    def wait():
        for message in under_way:
            message.wait()
        return arriving

    return wait
    # end exercise


def ring_forward(q, k, v, length, placement, group):
    """This rank's queries attend to the keys of all ranks: (out, lse) as of attend() over all of them.

    K and V go round by pass_on(), P - 1 times, as one message (2, b, kv, n, d), and each is sent on before
    it is used, so that it travels meanwhile. length: tokens of all ranks.
    """
    rank, P = group.rank(), group.size()
    held = [positions(length, other, P, placement) for other in range(P)]
    out, lse = torch.zeros_like(q), q.new_full(q.shape[:-1], -torch.inf)
    # exercise: ring_forward
    kv = torch.stack([k, v])
    for step in range(P):
        source = (rank - step) % P  # whose keys these are; those of source - 1 come next
        if step < P - 1:
            arriving = pass_on(kv, len(held[source - 1]), group)
        out, lse = merge(out, lse, *attend(q, *kv, held[rank], held[source]))
        if step < P - 1:
            kv = arriving()
    return out, lse
    # end exercise


def ring_backward(q, k, v, out, lse, dout, length, placement, group):
    """(dq, dk, dv) of this rank's tokens, from out and lse of ring_forward() and the gradient dout of out.

    K and V go round as in the forward; their gradient (2, b, kv, n, d) follows one step behind: while this
    rank works on a block, what the others found for it arrives. P sends, the last one takes it home.
    """
    rank, P = group.rank(), group.size()
    held = [positions(length, other, P, placement) for other in range(P)]
    delta, dq = (dout * out).sum(-1), torch.zeros_like(q)
    # exercise: ring_backward
    kv, following = (
        torch.stack([k, v]),
        lambda: 0,
    )  # behind a block that sets out follows no gradient
    for step in range(P):
        source = (rank - step) % P
        if step < P - 1:
            arriving = pass_on(kv, len(held[source - 1]), group)
        mine_q, *mine_kv = attend_backward(q, *kv, dout, lse, delta, held[rank], held[source])
        dq += mine_q
        dkv = torch.stack(mine_kv) + following()
        following = pass_on(dkv, len(held[source - 1]), group)
        if step < P - 1:
            kv = arriving()
    dk, dv = following()
    return dq, dk, dv
    # end exercise


class RingAttention(torch.autograd.Function):
    """Causal attention of a sequence of which each rank holds a part; see ring_attention()."""

    @staticmethod
    def forward(ctx, q, k, v, *where):
        q = q.unflatten(1, (k.shape[1], -1))  # (b, kv, g, n, d)
        out, lse = ring_forward(q, k, v, *where)
        ctx.save_for_backward(
            q, k, v, out, lse
        )  # own tokens only: the others' keys come round again
        ctx.where = where
        return out.flatten(1, 2)

    @staticmethod
    def backward(ctx, dout):
        q, k, v, out, lse = ctx.saved_tensors
        dout = dout.unflatten(1, (k.shape[1], -1))
        dq, dk, dv = ring_backward(q, k, v, out, lse, dout, *ctx.where)
        return dq.flatten(1, 2), dk, dv, None, None, None


def ring_attention(q, k, v, length, placement, group):
    """Causal attention, differentiable: q (b, heads, n, d) -> (b, heads, n, d).

    k and v (b, kv_heads, n, d): kv_heads divides heads. The n tokens are those at positions(length, rank, P,
    placement) of a sequence of length tokens. The group's size is free: heads are not cut.
    """
    return RingAttention.apply(q, k, v, length, placement, group)


# ---------------------------------------------------------------------------------------------------
# Checks: float64, so that nothing but a mistake is off by more than EXACT
# ---------------------------------------------------------------------------------------------------

EXACT = 1e-10
PLACEMENTS = CONTIGUOUS, ZIGZAG
AHEAD = "in step t rank r has the keys of rank r - t: they travel to rank + 1"


def draw_from(seed):
    """number(low, high) and randn(*shape), of float64, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    randn = partial(torch.randn, generator=generator, dtype=torch.float64)
    return lambda low, high: int(torch.randint(low, high, (), generator=generator)), randn


def last_ranks(group):
    """[(P, the group of the last P ranks)] of those this rank is in; their rank 0 is another one of group."""
    groups = [
        dist.new_group(list(range(group.size() - P, group.size())))
        for P in range(1, group.size() + 1)
    ]
    return [(P, g) for P, g in enumerate(groups, 1) if group.rank() >= group.size() - P]


def expect_finite(name, x):
    hint = "exp() of a large lse, or inf - inf where no key is seen"
    expect(x.isfinite().all(), f"{name} is not finite", hint)


def check_positions(lab, group, seed):
    number, _ = draw_from(seed)
    for world in 1, 2, 3, 4, 7:
        length = 2 * world * number(2, 9) + number(0, 2 * world)
        chunks = [list(range(*split(length, i, 2 * world))) for i in range(2 * world)]
        for rank in range(world):
            right = list(range(*split(length, rank, world)))
            mine = lab.positions(length, rank, world, CONTIGUOUS).tolist()
            expect(mine == right, f"contiguous: rank {rank} of {world} holds {mine}, not {right}")
            mine = lab.positions(length, rank, world, ZIGZAG).tolist()
            known = {"2P - 1 - r counts from the end": chunks[rank] + chunks[rank + world]}
            known |= {"the last chunk is number 2P - 1": chunks[rank] + chunks[-rank]}
            known["in ascending order: the early chunk first"] = chunks[-1 - rank] + chunks[rank]
            hint = next(
                (text for text, wrong in known.items() if wrong == mine), "chunks r and 2P - 1 - r"
            )
            right = chunks[rank] + chunks[-1 - rank]
            expect(mine == right, f"zigzag: rank {rank} of {world} holds {mine}, not {right}", hint)
    return f"1 to 7 ranks, the last of {length} tokens: each token once"


def check_work(lab, group, seed):
    number, _ = draw_from(seed)
    for world, placement in ((w, p) for w in (1, 2, 3, 4) for p in PLACEMENTS):
        length = 2 * world * number(3, 9) + number(0, 2 * world)
        held = [positions(length, rank, world, placement) for rank in range(world)]
        met = torch.tensor([[int((k <= q[:, None]).sum()) for k in held] for q in held]).double()
        size, r, t = (
            torch.tensor([len(h) for h in held]),
            torch.arange(world)[:, None],
            torch.arange(world),
        )
        right = met[r, (r - t) % world]
        hints = {AHEAD: met[r, (r + t) % world], "this is [step, rank]": right.mT}
        hints["this is [rank, whose keys]"] = met
        hints["a query sees no key of its future"] = (size[r] * size[(r - t) % world]).double()
        mine = lab.work(length, world, placement)
        expect_close(f"work of {world} ranks, {placement}", mine.double(), right, 0, hints)
    ranks = [lab.work(4096, 4, placement).sum(1) for placement in PLACEMENTS]
    spread = [(pairs.max() / pairs.min().clamp(min=1)).item() for pairs in ranks]
    return f"busiest over idlest of 4 ranks, 4096 tokens: contiguous {spread[0]:.3g}, zigzag {spread[1]:.3g}"


def draw_parts(seed):
    """Queries, two sets of keys and values, dout; query 0 sees no key, 1 to 7 see none of the second set."""
    number, randn = draw_from(seed)
    kv, g, n, d = number(1, 4), number(2, 4), TILE + number(5, 20), number(5, 9)
    mixed = torch.argsort(randn(3 * n))
    q_pos, *k_pos = (part.sort()[0] for part in mixed.split(n))
    q_pos, k_pos = q_pos.clamp(min=9), [k_pos[0].clamp(min=1), k_pos[1].clamp(min=10)]
    q_pos[0], q_pos[1:8], k_pos[0][0] = 0, 9, 1
    q, ks, vs = (
        randn(2, kv, g, n, d),
        [randn(2, kv, n, d) for _ in "12"],
        [randn(2, kv, n, d) for _ in "12"],
    )
    return q_pos, k_pos, q, ks, vs, randn(2, kv, g, n, d)


def softmax_attention(q, k, v, q_pos, k_pos):
    """(out, lse, scores) by torch's softmax; 0 and minus infinity where no key is seen."""
    s = q @ k.mT[:, :, None] / math.sqrt(q.shape[-1])
    s = s.masked_fill(k_pos > q_pos[:, None], -torch.inf)
    return s.softmax(-1).nan_to_num(0) @ v[:, :, None], s.logsumexp(-1), s


def pairs_in_tiles(q_pos, k_pos):
    """(query, key) pairs that attend() multiplies for each head: those seen, and what fills up the tiles."""
    return sum(len(q_pos[rows]) * len(k_pos[keys]) for rows, keys in tiles(q_pos, k_pos))


def check_attend(lab, group, seed):
    q_pos, k_pos, q, ks, vs, _ = draw_parts(seed)
    worst = 0
    for k, v, pos in zip(ks, vs, k_pos):
        given = [t.clone() for t in (q, k, v)]
        with FlopCounterMode(display=False) as counted:
            out, lse = lab.attend(*given, q_pos, pos)
        least = (
            4 * q[..., 0, :].numel() * pairs_in_tiles(q_pos, pos)
        )  # 2 matmuls of multiply and add
        enough = counted.get_total_flops() <= least
        expect(
            enough,
            f"{counted.get_total_flops()} operations; {least} do",
            "multiply only keys that are seen",
        )
        right_out, right_lse, s = softmax_attention(q, k, v, q_pos, pos)
        expect_finite("out", out)
        undivided = {"divide by the sum of exp(scores)": s.exp() @ v[:, :, None]}
        worst = max(worst, expect_close("out", out, right_out, EXACT, undivided))
        expect(
            torch.equal(lse.isinf(), right_lse.isinf()),
            "lse is not -inf just where a query sees no key",
        )
        seen = right_lse.isfinite()
        hints = {"the log of the sum, not the sum": s.exp().sum(-1)[seen]}
        expect_close("lse", lse[seen], right_lse[seen], EXACT, hints)
        expect(
            all(map(torch.equal, given, (q, k, v))),
            "q, k or v is overwritten",
            "work on a new tensor",
        )
    return (
        f"out, lse as of softmax, off by {worst:.0e}; {(~seen).sum()} queries see no key: 0, -inf"
    )


def check_merge(lab, group, seed):
    q_pos, k_pos, q, ks, vs, _ = draw_parts(seed)
    right, right_lse, _ = softmax_attention(
        q, torch.cat(ks, 2), torch.cat(vs, 2), q_pos, torch.cat(k_pos)
    )
    (out1, lse1), (out2, lse2) = (
        softmax_attention(q, k, v, q_pos, p)[:2] for k, v, p in zip(ks, vs, k_pos)
    )
    seen = right_lse.isfinite()
    for shift in 0, 2000, -2000:  # exp(lse) would not be finite, or zero
        given = [out1, lse1 + shift, out2, lse2 + shift]
        before = [t.clone() for t in given]
        out, lse = lab.merge(*given)
        expect_finite("out", out)
        share = torch.sigmoid(lse1 - lse2).nan_to_num(0)[..., None]
        hints = {"a part counts by exp(its lse - lse)": (out1 + out2) / 2}
        hints["the weights are exchanged"] = (1 - share) * out1 + share * out2
        hints["exp(lse) is infinite: take the larger lse off first"] = torch.zeros_like(right)
        error = expect_close("out", out, right, EXACT, hints)
        largest = {"log of the sum of both, not the larger one": torch.maximum(lse1, lse2)[seen]}
        expect_close("lse", lse[seen] - shift, right_lse[seen], EXACT, largest)
        expect((lse[~seen] == -torch.inf).all(), "lse is not -inf where no key is seen in either")
        expect(
            all(map(torch.equal, given, before)),
            "out or lse is overwritten",
            "work on a new tensor",
        )
    return f"two parts are the whole, off by {error:.0e}, with lse near 2000 too"


def check_attend_backward(lab, group, seed):
    q_pos, k_pos, q, ks, vs, dout = draw_parts(seed)
    k, v, pos = torch.cat(ks, 2), torch.cat(vs, 2), torch.cat(k_pos)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    out, lse, _ = softmax_attention(*leaves, q_pos, pos)
    # a query without any key is none of a real sequence's: every token sees itself
    seen = slice(1, None)
    out[..., seen, :].backward(dout[..., seen, :])
    q, dout, q_pos, lse = q[..., seen, :], dout[..., seen, :], q_pos[seen], lse[..., seen].detach()
    delta, dq, worst, root = (
        (dout * out[..., seen, :].detach()).sum(-1),
        0,
        0,
        math.sqrt(q.shape[-1]),
    )
    for k, v, pos, dk, dv in zip(
        ks, vs, k_pos, leaves[1].grad.chunk(2, 2), leaves[2].grad.chunk(2, 2)
    ):
        mine = lab.attend_backward(q, k, v, dout, lse, delta, q_pos, pos)
        _, part_lse, s = softmax_attention(q, k, v, q_pos, pos)
        own = (
            (s - part_lse[..., None]).exp().nan_to_num(0)
        )  # the softmax over this part of the keys
        p, dp = (s - lse[..., None]).exp(), dout @ v.mT[:, :, None]
        whole = "p is of the whole softmax: exp(scores - lse), lse as given"
        hints = {whole: (own.mT @ dout).sum(2)}
        worst = max(worst, expect_close("dv", mine[2], dv, EXACT, hints))
        hints = {"scores were divided by sqrt(d)": dk * root}
        hints["take delta off"] = ((p * dp).mT @ q).sum(2) / root
        ds = p * (dp - delta[..., None])
        hints["a KV head sums over the g heads that read it"] = (ds.mT @ q)[:, :, 0] / root
        hints[whole] = ((own * (dp - delta[..., None])).mT @ q).sum(2) / root
        worst = max(worst, expect_close("dk", mine[1], dk, EXACT, hints))
        dq = dq + mine[0]
    right = leaves[0].grad[..., seen, :]
    hints = {"scores were divided by sqrt(d)": right * root}
    worst = max(worst, expect_close("dq, summed over the parts", dq, right, EXACT, hints))
    return f"dq, dk, dv of two parts as autograd's of the whole, off by {worst:.0e}"


def check_pass_on(lab, group, seed):
    asides = dict(last_ranks(group))  # the same ranks by other connections
    for P, ring in last_ranks(group):
        number, randn = draw_from(seed + P)
        rank, blocks = ring.rank(), [randn(2, number(1, 9), 3).mT.contiguous().mT for _ in range(P)]
        length, before = blocks[rank - 1].shape[-2], blocks[rank].clone()
        if rank == 0 and P > 1:
            wait_for_others(asides[P])
        with Traffic() as traffic:
            wait = lab.pass_on(blocks[rank], length, ring)
        if rank > 0:
            dist.monitored_barrier(asides[P])
        hints = {"send to rank + 1, receive from rank - 1": blocks[(rank + 1) % P]}
        expect(
            callable(wait),
            f"pass_on returns {type(wait).__name__}",
            "return the function that waits",
        )
        expect_close("what arrived", wait(), blocks[rank - 1], 0, hints)
        expect_sent("pass_on", traffic, before.nbytes if P > 1 else 0)
        expect(torch.equal(blocks[rank], before), "x is overwritten", "receive into a new tensor")
        dist.barrier(ring)
    return f"1 to {group.size()} ranks, of any length: from rank - 1 to rank + 1; begun, then waited for"


def wait_for_others(aside):
    """Rank 0 takes part only after the others have returned from pass_on: Wrong where they wait in it."""
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
    q, k, v, dout = (
        randn(2, length, heads, d).transpose(1, 2) for heads in (kv * g, kv, kv, kv * g)
    )
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    out = F.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
    out.backward(dout)
    gradients = dict(zip(("dq", "dk", "dv"), (leaf.grad for leaf in leaves)))
    return SimpleNamespace(length=length, q=q, k=k, v=v, dout=dout, out=out.detach(), **gradients,
                           held=[positions(length, rank, P, placement) for rank in range(P)])  # fmt: skip


def cases(group, seed):
    """(P, group, placement, whether all hold as many tokens, case): even lengths first, their hints fit."""
    rings = last_ranks(group)
    for uneven in False, True:
        for P, ring in rings:
            for placement in (
                ZIGZAG,
                CONTIGUOUS,
            ):  # rank 0 of a contiguous ring needs no other's keys
                yield P, ring, placement, not uneven, draw_case(seed + P, P, placement, uneven)


def grouped(q, k):
    """(b, heads, n, d) -> (b, kv, g, n, d)"""
    return q.unflatten(1, (k.shape[1], -1))


def go_round(case, rank, claimed):
    """What rank's queries find on a ring where the keys met in step t are taken for rank claimed(t)'s."""
    own, P = case.held[rank], len(case.held)
    parts, q = [], grouped(case.q[:, :, own], case.k)
    for step in range(P):
        met = case.held[(rank - step) % P]
        parts.append(attend(q, case.k[:, :, met], case.v[:, :, met], own, case.held[claimed(step)]))
    return reduce(lambda one, other: merge(*one, *other), parts)[0].flatten(1, 2)


def block_bytes(case, rank):
    """K and V of a rank's tokens."""
    return 2 * case.k[:, :, case.held[rank]].nbytes


def expect_sent(what, traffic, nbytes, hint=""):
    """Raise Wrong unless so many bytes were sent, and nothing else moved."""
    others = ", ".join(sorted(set(traffic.ops) - {"send"}))
    expect(
        not others,
        f"{what} uses {others}",
        "a rank of a ring sends to its neighbour and to no other",
    )
    expect(
        traffic.bytes("send") == nbytes,
        f"{what} sends {traffic.bytes('send')} bytes, not {nbytes}",
        hint,
    )


def watch(lab):
    """Have pass_on, its waits and attend note themselves down: [(what, blocks sent, blocks arrived)]."""
    events, (pass_on, attend) = [], (lab.pass_on, lab.attend)

    def note(what):
        events.append(
            (what, *(sum(event[0] == kind for event in events) for kind in ("send", "wait")))
        )

    def noting_pass_on(*args):
        wait = pass_on(*args)
        note("send")
        return lambda: (note("wait"), wait())[1]

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
        hints = {}
        if even:
            alone = attend(grouped(given[0], case.k), *given[1:], own, own)[0].flatten(1, 2)
            hints = {"these are this rank's own keys only": alone}
            if P > 2:
                hints[AHEAD] = go_round(case, rank, lambda t, r=rank, P=P: (r + t) % P)
            hints["positions are those of the keys' owner"] = go_round(
                case, rank, lambda t, r=rank: r
            )
        name = f"out of {P} ranks, {placement}"
        worst = max(worst, expect_close(name, out, case.out[:, :, own], EXACT, hints))
        nbytes = sum(block_bytes(case, r) for r in range(P) if r != following)
        hint = "K and V of the KV heads, P - 1 times: the last block has been everywhere"
        expect_sent(f"the forward of {P} ranks", traffic, nbytes, hint)
        for what, sent, arrived in events:
            sent_on = what != "attend" or sent > min(arrived, P - 2)
            expect(
                sent_on,
                "a block is used before it is sent on",
                "pass_on(), then attend(), then wait",
            )
        expect(
            all(map(torch.equal, given, before)), "q, k or v is overwritten", "work on a new tensor"
        )
    return f"1 to {P} ranks, GQA, uneven: off by {worst:.0e}; {P - 1} sends, {nbytes} bytes, in good time"


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
        for name, leaf in zip(("dq", "dk", "dv"), leaves):
            right, hints = getattr(case, name), {}
            if even:
                left = "what this rank holds at last is the next rank's: send it home"
                hints = {left: right[:, :, case.held[following]]} if name != "dq" else {}
            what = f"{name} of {P} ranks, {placement}"
            worst = max(worst, expect_close(what, leaf.grad, right[:, :, own], EXACT, hints))
        nbytes = (
            sum(block_bytes(case, r) * (1 + (r != following)) for r in range(P)) if P > 1 else 0
        )
        hint = "P - 1 times K and V, P times their gradient"
        expect_sent(f"the backward of {P} ranks", traffic, nbytes, hint)
        expect(torch.equal(dout, before), "dout is overwritten", "work on a new tensor")
    return f"1 to {P} ranks, GQA, uneven: dq, dk, dv off by {worst:.0e}; {2 * P - 1} sends, {nbytes} bytes"


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


# ---------------------------------------------------------------------------------------------------
# Experiments
# ---------------------------------------------------------------------------------------------------

RANKS, LONG = 4, 131_072  # of the balance; LONG: tokens where only the formula is asked
TOKENS, HEAD = 256, 16  # of the comparison: tokens, numbers a head
SP, ULYSSES, RING, GATHER = "SP", "Ulysses", "CP, ring", "CP, all-gather"


def balance_on_rank(group, seed, length):
    """{placement: what this rank multiplied}: (query, key) pairs of one head, counted in torch's matmuls."""
    rank, P, found = group.rank(), group.size(), {}
    heads, kv = 2, 1
    for placement in PLACEMENTS:
        held = [positions(length, other, P, placement) for other in range(P)]
        _, randn = draw_from(seed + rank)
        q, k, v = (randn(1, h, len(held[rank]), HEAD).requires_grad_() for h in (heads, kv, kv))
        with FlopCounterMode(display=False) as forward:
            out = ring_attention(q, k, v, length, placement, group)
        with FlopCounterMode(display=False) as backward:
            out.sum().backward()
        # a pair: HEAD multiply-adds (2 operations) in each of 2 matmuls forward, 5 backward
        counted = [mode.get_total_flops() / (2 * HEAD * heads) for mode in (forward, backward)]
        found[placement] = {"forward": counted[0] / 2, "backward": counted[1] / 5}
        found[placement]["in_tiles"] = sum(pairs_in_tiles(held[rank], other) for other in held)
    return found


def lockstep(pairs):
    """How long the ring takes, in the time of an even share: each step lasts as long as its busiest rank."""
    return (pairs.max(0).values.sum() * len(pairs) / pairs.sum()).item()


def balance(args):
    """Both placements on RANKS ranks: pairs to multiply and pairs multiplied; returns (dict, failures)."""
    ranks = on_ranks(RANKS, balance_on_rank, args.seed, args.length)
    print(
        f"\ncausal attention of {args.length} tokens on {RANKS} ranks: (query, key) pairs of one head"
    )
    found, steps = {}, [f"step {t}" for t in range(RANKS)]
    rows = [["placement", "rank", *steps, "all", "share", "multiplied"]]
    for placement in PLACEMENTS:
        pairs = work(args.length, RANKS, placement)
        counted = [rank[placement] for rank in ranks]
        found[placement] = {
            "pairs": pairs.tolist(),
            "lockstep": lockstep(pairs),
            "counted": counted,
        }
        for rank, (steps, count) in enumerate(zip(pairs, counted)):
            total, share = steps.sum().item(), f"{steps.sum() * RANKS / pairs.sum():.2f}"
            rows.append([placement, rank, *steps.tolist(), total, share, round(count["forward"])])
    print_table(*rows)
    print(
        f"\n  share: of an even one. multiplied: counted in the matmuls, {TILE} queries with the same keys"
    )
    long = {
        P: [lockstep(work(LONG, P, placement)) for placement in PLACEMENTS] for P in (2, 4, 8, 16)
    }
    print(
        f"\n{LONG} tokens: a ring's time, every step as long as its busiest rank takes; 1 is an even share"
    )
    head = (
        ["ranks", *long],
        *([p, *(f"{long[P][i]:.3f}" for P in long)] for i, p in enumerate(PLACEMENTS)),
    )
    print_table(*head, ["(2P - 1) / P", *(f"{(2 * P - 1) / P:.3f}" for P in long)])
    counts = [count for placement in PLACEMENTS for count in found[placement]["counted"]]
    needed = [sum(steps) for placement in PLACEMENTS for steps in found[placement]["pairs"]]
    in_tiles = [n <= c["in_tiles"] == c["forward"] == c["backward"] for n, c in zip(needed, counts)]
    uneven = [a > (2 * P - 1) / P - 0.01 and b < 1.01 for P, (a, b) in long.items()]
    holds = {
        "only tiles with something to see are multiplied": all(in_tiles),
        "both placements have all pairs": sum(needed) == args.length * (args.length + 1),
        "zigzag is even, contiguous is not": all(uneven),
    }
    return found | {"long": long}, [text for text, held in holds.items() if not held]


class Exchange(torch.autograd.Function):
    """A collective, and the one that its backward is: y = there(x), dx = back(dy)."""

    @staticmethod
    def forward(ctx, x, there, back):
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx, grad):
        return ctx.back(grad), None, None


def all_gather(x, dim, group):
    """The ranks' x, one behind the other."""
    parts = [
        torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(group.size())
    ]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, dim)


def reduce_scatter(x, dim, group):
    """The rank's part of the sum of all ranks' x."""
    x = x.movedim(dim, 0).contiguous()
    out = x.new_empty(x.shape[0] // group.size(), *x.shape[1:])
    dist.reduce_scatter_tensor(out, x, group=group)
    return out.movedim(0, dim)


def all_to_all(x, cut, join, group):
    """Part r of dim cut goes to rank r; what arrives is joined along dim join."""
    x = torch.stack(x.chunk(group.size(), cut))
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x, group=group)
    return torch.cat(out.unbind(), join)


causal = partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=True)


def project(x, *weights):
    """x (b, n, h) by each weight (heads * HEAD, h): [(b, heads, n, HEAD)]."""
    return [F.linear(x, w).unflatten(-1, (-1, HEAD)).transpose(1, 2) for w in weights]


def attention_layer(way, x, weights, heads, kv_heads, length, group):
    """An attention layer on this rank's tokens, x (b, n, h) -> (b, n, h), parallel in one of four ways.

    weights: those of q, k, v (out, h) and of the output (h, out), whole; SP reads its heads' rows alone.
    Raises ValueError where a way that cuts the heads cannot give each rank as many.
    """
    rank, P = group.rank(), group.size()
    if way in (SP, ULYSSES) and kv_heads % P:
        raise ValueError(f"{heads} heads, {kv_heads} of K and V, cannot be dealt to {P} ranks")
    gather, scatter = (partial(f, dim=-2, group=group) for f in (all_gather, reduce_scatter))
    wq, wk, wv, wo = weights
    if way == SP:
        x = Exchange.apply(x, gather, scatter)  # (b, s, h)
        wq, wk, wv, wo = *(w.chunk(P)[rank] for w in (wq, wk, wv)), wo.chunk(P, 1)[rank]
    q, k, v = project(x, wq, wk, wv)
    if way == SP:
        out = causal(q, k, v)  # (b, heads/P, s, d)
    elif way == ULYSSES:
        to_heads, to_tokens = (
            partial(all_to_all, cut=c, join=j, group=group) for c, j in ((1, 2), (2, 1))
        )
        out = causal(
            *(Exchange.apply(t, to_heads, to_tokens) for t in (q, k, v))
        )  # (b, heads/P, s, d)
        out = Exchange.apply(out, to_tokens, to_heads)
    elif way == RING:
        out = ring_attention(q, k, v, length, ZIGZAG, group)  # (b, heads, s/P, d)
    else:  # Llama 3: K and V of all tokens for the rank's queries
        k, v = Exchange.apply(torch.stack([k, v]), gather, scatter)  # (b, kv, s, d)
        held = [positions(length, other, P, ZIGZAG) for other in range(P)]
        seen = torch.cat(held) <= held[rank][:, None]
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=seen, enable_gqa=True
        )  # (b, heads, s/P, d)
    out = F.linear(out.transpose(1, 2).flatten(2), wo)
    return Exchange.apply(out, scatter, gather) if way == SP else out


def expected_wire(way, heads, kv_heads, P):
    """Bytes that a rank puts on the wire in attention_layer(): (forward, backward), float64."""
    token, own = 8 * HEAD, TOKENS / P  # bytes of one head of one token
    if way == SP:  # all-gather of x, reduce-scatter of the output
        return (2 * heads * token * own * (P - 1),) * 2
    if way == ULYSSES:  # q, k, v and the output, of which 1/P stays
        return (2 * (heads + kv_heads) * token * own * (P - 1) / P,) * 2
    kv = 2 * kv_heads * token * own  # K and V of a rank
    return kv * (P - 1), kv * (P - 1 if way == GATHER else 2 * P - 1)


def on_the_wire(ops, P):
    """Bytes of a Traffic's ops that leave a rank: of a collective's message the part that is not its own."""
    return sum(nbytes if op == "send" else nbytes * (P - 1) / P for op, (_, nbytes) in ops.items())


def ways_on_rank(group, seed, heads, kv_heads):
    """Each way against one device: {way: error, bytes, calls, or why it is refused}."""
    rank, P, found = group.rank(), group.size(), {}
    _, randn = draw_from(seed)
    h, kv = heads * HEAD, kv_heads * HEAD
    weights = [randn(*size) / math.sqrt(h) for size in ((h, h), (kv, h), (kv, h), (h, h))]
    x, dy = randn(1, TOKENS, h), randn(1, TOKENS, h)
    alone = [t.clone().requires_grad_() for t in (x, *weights)]
    y = F.linear(causal(*project(*alone[:4])).transpose(1, 2).flatten(2), alone[4])
    y.backward(dy)
    for way in SP, ULYSSES, RING, GATHER:
        own = positions(TOKENS, rank, P, ZIGZAG if way in (RING, GATHER) else CONTIGUOUS)
        leaves = [t.clone().requires_grad_() for t in (x[:, own], *weights)]
        try:
            with Traffic() as forward:
                mine = attention_layer(way, leaves[0], leaves[1:], heads, kv_heads, TOKENS, group)
        except ValueError as problem:
            found[way] = {"refused": str(problem)}
            continue
        with Traffic() as backward:
            mine.backward(dy[:, own])
        for leaf in leaves[1:]:  # each rank saw its tokens, or its heads
            dist.all_reduce(leaf.grad, group=group)
        pairs = [(mine, y[:, own]), (leaves[0].grad, alone[0].grad[:, own])]
        pairs += [(leaf.grad, right.grad) for leaf, right in zip(leaves[1:], alone[1:])]
        found[way] = {"error": max((torch.norm(a - b) / torch.norm(b)).item() for a, b in pairs)}
        found[way] |= {"calls": {op: calls for op, (calls, _) in forward.ops.items()}}
        found[way] |= {
            "forward": on_the_wire(forward.ops, P),
            "backward": on_the_wire(backward.ops, P),
        }
    return found


SHARDED = {SP: "heads, weights", ULYSSES: "heads", RING: "queries; K, V on tour", GATHER: "queries"}
LIMIT = {SP: "KV heads*", ULYSSES: "KV heads*", RING: "tokens", GATHER: "tokens"}
SHORT = {"all_gather": "AG", "reduce_scatter": "RS", "all_to_all": "A2A", "send": "send"}


def side_by_side(args):
    """SP, Ulysses and CP on the same attention; returns (rows, failures)."""
    rows, failed = [], []
    table = [["heads, KV", "P", "", "cut in attention", "moves", "forward", "formula", "backward", "formula",
              "off by", "P is at most"]]  # fmt: skip
    for heads, kv_heads, P in (8, 8, 2), (8, 8, 4), (8, 4, 4), (3, 1, 4):
        ranks = on_ranks(P, ways_on_rank, args.seed, heads, kv_heads)
        for way, first in ranks[0].items():
            row = {"heads": heads, "kv_heads": kv_heads, "ranks": P, "way": way, **first}
            cells = [f"{heads}, {kv_heads}", P, way, SHARDED[way]]
            if "refused" in first:
                table.append([*cells, "refused", "-", "-", "-", "-", "-", LIMIT[way]])
            else:
                row["error"] = max(rank[way]["error"] for rank in ranks)
                row["expected"] = expected_wire(way, heads, kv_heads, P)
                moves = ", ".join(f"{calls} {SHORT[op]}" for op, calls in first["calls"].items())
                forward, backward = row["expected"]
                counted = map(round, (first["forward"], forward, first["backward"], backward))
                table.append([*cells, moves, *counted, f"{row['error']:.0e}", LIMIT[way]])
                sent = [(rank[way]["forward"], rank[way]["backward"]) for rank in ranks]
                name = f"{way} with {heads}, {kv_heads} heads on {P} ranks"
                failed += [f"{name} is one device's"] * (not row["error"] <= EXACT)
                failed += [f"{name} sends what the formula says"] * any(
                    s != row["expected"] for s in sent
                )
            rows.append(row)
    print(
        f"\none attention layer, {TOKENS} tokens, {HEAD} numbers a head, float64: bytes on the wire, a rank"
    )
    print_table(*table)
    print(
        "\n  AG all-gather, RS reduce-scatter, A2A all-to-all; moves: in the forward. refused: a rank"
    )
    print(
        "  would have no head. * up to the heads, if ranks hold copies of KV heads. Only a ring's sends"
    )
    print(
        "  hide behind attention. SP cuts the weights too; the others sum their gradients once a step."
    )
    refused = {row["way"] for row in rows if "refused" in row}
    failed += ["what cuts heads, and only that, is refused 4 ranks with 3 heads"] * (
        refused != {SP, ULYSSES}
    )
    return rows, failed


def experiment(args):
    """Both experiments; {"balance": dict, "ways": rows, "failed": what did not hold}."""
    (found, first), (rows, second) = balance(args), side_by_side(args)
    return {"length": args.length, "balance": found, "ways": rows, "failed": first + second}


# Okabe and Ito's colours: rank 0 to 3
COLOURS = "#0072B2", "#E69F00", "#009E73", "#CC79A7"


def draw(results, path):
    """The picture of --plot: who multiplies what and when, how long it takes, what each way sends."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure = pyplot.figure(figsize=(15, 8))
    grid = figure.add_gridspec(2, 3, width_ratios=[1, 1.4, 1.3])
    latest = max(sum(map(max, zip(*results["balance"][p]["pairs"]))) for p in PLACEMENTS) / 1000
    for i, placement in enumerate(PLACEMENTS):
        draw_owners(figure.add_subplot(grid[i, 0]), placement)
        draw_steps(figure.add_subplot(grid[i, 1]), results["balance"][placement], latest, placement)
    draw_wire(
        figure.add_subplot(grid[:, 2]),
        [r for r in results["ways"] if "error" in r and r["ranks"] == RANKS],
    )
    figure.suptitle(
        f"{results['lab']}: {results['length']} tokens on {RANKS} ranks; colours are ranks"
    )
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def draw_owners(axis, placement):
    """The causal matrix of 2P x 2P chunks: colour whose queries, number in which step."""
    chunks = 2 * RANKS
    owner = {
        p: rank for rank in range(RANKS) for p in positions(chunks, rank, RANKS, placement).tolist()
    }
    for query in range(chunks):
        for key in range(query + 1):
            axis.barh(
                query + 0.5, 1, 1, key, color=COLOURS[owner[query]], edgecolor="white", alpha=0.85
            )
            axis.text(
                key + 0.5,
                query + 0.5,
                (owner[query] - owner[key]) % RANKS,
                ha="center",
                va="center",
            )
    axis.set(
        xlim=(0, chunks),
        ylim=(chunks, 0),
        aspect="equal",
        xlabel="chunk of keys",
        ylabel="chunk of queries",
    )
    axis.set_title(f"{placement}: number = step")
    axis.spines[["top", "right"]].set_visible(False)


def draw_steps(axis, found, latest, placement):
    """Each rank's steps in time: a step begins when the slowest rank's last one ends."""
    start = 0
    for step, pairs in enumerate(zip(*found["pairs"])):
        pairs = [count / 1000 for count in pairs]
        for rank, count in enumerate(pairs):
            axis.barh(rank, count, left=start, color=COLOURS[rank], edgecolor="white", height=0.8)
            axis.barh(rank, max(pairs) - count, left=start + count, color="none", edgecolor="#BBBBBB",
                      hatch="///", height=0.8, linewidth=0)  # fmt: skip
        axis.axvline(start, color="black", linewidth=0.8)
        axis.text(start, -0.55, f" step {step}", ha="left", va="bottom", fontsize=9)
        start += max(pairs)
    axis.axvline(start, color="black", linewidth=0.8)
    axis.set(xlim=(0, latest * 1.02), ylim=(RANKS - 0.5, -0.9), yticks=range(RANKS), ylabel="rank")
    axis.set_xlabel("thousand (query, key) pairs of one head; hatched: waiting")
    axis.set_title(f"{placement}: {found['lockstep']:.2f} times an even share")
    axis.spines[["top", "right"]].set_visible(False)


def draw_wire(axis, rows):
    """Bytes on the wire of each way, measured, forward and backward."""
    labels = [f"{r['way']}\n{r['heads']} heads, {r['kv_heads']} KV" for r in rows]
    forward, backward = ([r[phase] / 1024 for r in rows] for phase in ("forward", "backward"))
    axis.barh(labels, forward, color="#555555", label="forward")
    axis.barh(labels, backward, left=forward, color="#BBBBBB", label="backward")
    axis.invert_yaxis()
    axis.set(
        xlabel="KiB on the wire, a rank", title=f"one attention layer, {TOKENS} tokens, measured"
    )
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False)


# ---------------------------------------------------------------------------------------------------
# Sabotage: bugs that the lab must catch
# ---------------------------------------------------------------------------------------------------


def edit(lab, name, changes):
    """Define a function of lab anew with pieces of its text replaced: {right: wrong}."""
    source = inspect.getsource(getattr(lab, name))
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
    """Keys that nobody may see are multiplied, then masked: every result is right, half of the work vain."""
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
    edit(lab, "ring_backward", {"+ following()": "+ 0 * following()"})


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


# ---------------------------------------------------------------------------------------------------
# Harness: the same in every lab
# ---------------------------------------------------------------------------------------------------


# Copied from labs/lab8_3d.py
class Unusable(Exception):
    """An argument that cannot work; its message says what would. Ends as `error: ...`, exit 2."""


# Copied from labs/lab8_3d.py
class Wrong(Exception):
    """What a check found wrong with an exercise, and a hint at what usually causes it."""

    def __init__(self, found, hint=""):
        super().__init__(found, hint)
        self.found, self.hint = found, hint


# Copied from labs/lab8_3d.py
def expect(holds, found, hint=""):
    """Raise Wrong where something does not hold."""
    if not holds:
        raise Wrong(found, hint)


# Copied from labs/lab8_3d.py
def expect_close(name, mine, right, tolerance=1e-5, hints=None):
    """Raise Wrong unless ||mine - right|| <= tolerance ||right||; returns the relative error.

    hints {text: tensor}: if mine is that tensor instead, the text is the hint.
    """
    expect(
        isinstance(mine, torch.Tensor),
        f"{name} is {type(mine).__name__}, not a tensor",
        "return the result",
    )
    expect(
        mine.shape == right.shape, f"{name} has shape {tuple(mine.shape)}, not {tuple(right.shape)}"
    )

    def error(other):
        apart = torch.linalg.vector_norm((mine - other).double())
        return (apart / torch.linalg.vector_norm(other.double()).clamp(min=1e-30)).item()

    known = [text for text, other in (hints or {}).items() if other.shape == right.shape]
    known = [text for text in known if error(hints[text]) <= tolerance < error(right)]
    hint = known[0] if known else ""
    expect(
        error(right) <= tolerance,
        f"{name} is off by {error(right):.1e} (at most {tolerance:.0e})",
        hint,
    )
    return error(right)


# Copied from labs/lab8_3d.py
class Traffic(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts what this rank's collectives and sends move while inside it: {op: [calls, bytes]}.

    Bytes of the whole message (all_gather: what comes out; reduce_scatter: what goes in; all_to_all: the
    rank's own input).
    """

    OPS = {"allreduce": "all_reduce", "allgather": "all_gather", "reducescatter": "reduce_scatter"}
    OPS |= {"alltoall": "all_to_all", "send": "send", "broadcast": "broadcast", "reduce": "reduce"}
    OPS |= {
        "gather": "gather",
        "scatter": "scatter",
    }  # a name starts with one of these, the first that fits

    def __init__(self):
        super().__init__()
        self.ops = {}

    def bytes(self, op):
        return self.ops.get(op, [0, 0])[1]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func._opname.replace("_", "")
        op = next((op for start, op in self.OPS.items() if name.startswith(start)), None)
        if op and func.namespace in ("c10d", "_c10d_functional"):
            tensors = [
                [t for t in tree_leaves(x) if isinstance(t, torch.Tensor)] for x in (*args, out)
            ]
            sizes = [sum(t.nbytes for t in ts) for ts in tensors]
            if op == "all_to_all":  # c10d names the output before the input
                sizes = [sizes[1 if func.namespace == "c10d" else 0]]
            entry = self.ops.setdefault(op, [0, 0])
            entry[0] += 1
            entry[1] += max(sizes)
        return out


# Copied from labs/lab8_3d.py
def load(path):
    """The file of a lab, or of a learner's answers to it, as a module."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# Copied from labs/lab8_3d.py
def rank_main(rank, world, rendezvous, pipe, limit, function, args):
    """A rank's process: join the others, run function(group, *args), send back what it returns."""
    os.dup2(
        os.open(os.devnull, os.O_WRONLY), 2
    )  # gloo complains there about ranks that others' errors ended
    signal.alarm(limit)  # its parent ends it long before; this is for a parent that was killed
    torch.set_num_threads(1)
    # torch 2.13 renames all_gather_into_tensor and reduce_scatter_tensor; 2.11 knows only these names
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    store = dist.FileStore(rendezvous, world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    try:
        answer = True, function(dist.group.WORLD, *args)
    except Wrong as wrong:
        answer = False, wrong
    except NotImplementedError as todo:
        answer = False, Wrong(f"not done yet: {todo}")
    except BaseException as problem:  # whatever a learner's code may raise
        frames = traceback.extract_tb(problem.__traceback__)
        ours = [frame.line for frame in frames if not frame.filename.startswith(torch.__path__[0])]
        first = str(problem).partition("\n")[0]
        answer = False, Wrong(f"{type(problem).__name__}: {first} (in: {ours[-1]})")
    pipe.send(answer)
    with suppress(EOFError):
        pipe.recv()  # stay till the end: a rank that leaves early breaks the others' connections


# Copied from labs/lab8_3d.py
def on_ranks(world, function, *args, timeout=60):
    """[function(group, *args) of each rank], run by `world` processes of this machine, over gloo.

    Raises Wrong: the first one that a rank raised, or one naming the ranks still busy after `timeout`
    seconds. function is one of a module's own, and args and results can be pickled.
    """
    context = multiprocessing.get_context(
        "forkserver"
    )  # forks ranks from a process that has torch already
    heavy = {"torch.distributed", "transformers.models.llama.modeling_llama"} & sys.modules.keys()
    context.set_forkserver_preload(
        [*heavy, "torch._dynamo"]
    )  # the first dispatch mode imports that: 2 s
    with tempfile.TemporaryDirectory() as folder, ExitStack() as ending:
        pipes = {}
        for rank in range(world):
            here, there = context.Pipe()
            start = (rank, world, f"{folder}/store", there, int(timeout) + 60, function, args)
            process = context.Process(target=rank_main, args=start, daemon=True)
            process.start()
            ending.callback(process.join)
            ending.callback(process.kill)
            there.close()
            pipes[here] = rank
        busy = dict(pipes)  # those that have not answered
        results, end = [None] * world, time.monotonic() + timeout
        while busy:
            ready = connection.wait(busy, max(0, end - time.monotonic()))
            silent = ", ".join(map(str, busy.values()))
            hint = (
                "a send without its recv, a collective that some rank skips, or a loop without end"
            )
            expect(ready, f"no answer from rank {silent} in {timeout} s", hint)
            wrong = []
            for pipe in ready:
                rank = busy.pop(pipe)
                try:
                    fine, results[rank] = pipe.recv()
                except EOFError:
                    fine, results[rank] = False, Wrong("died")
                wrong += [] if fine else [rank]
            if wrong:  # a death first: the others' errors come of it
                rank = min(wrong, key=lambda rank: results[rank].found != "died")
                raise Wrong(f"rank {rank}: {results[rank].found}", results[rank].hint)
        return results


# Copied from labs/lab8_3d.py
def check_on_rank(group, answers, bug, name, seed):
    """One exercise's check on this rank. answers: the file of the lab, or of a learner's copy of it."""
    lab = load(answers)
    if bug:
        globals()[bug](lab)
    check, _ = CHECKS[name]
    return check(lab, group, seed)


# Copied from labs/lab8_3d.py
def print_table(*rows):
    """Columns aligned to the left, after an empty line."""
    cells = [
        [f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in row] for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(*cells)]
    print(
        "",
        *("  " + "   ".join(c.ljust(w) for c, w in zip(row, widths)).rstrip() for row in cells),
        sep="\n",
    )


# Copied from labs/lab8_3d.py
def run_checks(args):
    """Run every exercise's check; returns {name: {"passed", "report"}}, and prints them as a table."""
    results, rows = {}, [["exercise", "ranks", "", "what was seen"]]
    for name, (_, world) in CHECKS.items():
        try:
            report, passed = (
                on_ranks(world, check_on_rank, __file__, args.inject_bug, name, args.seed)[0],
                True,
            )
        except Wrong as wrong:
            report, passed = wrong.found, False
        results[name] = {"passed": passed, "report": report}
        rows.append([name, world, "PASS" if passed else "FAIL", report])
    print_table(*rows)
    return results


# Copied from labs/lab8_3d.py
def main(argv=None):
    """Returns the exit status: 0 all held, 1 a check failed, 2 unusable arguments."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of the checks' inputs (0)")
    parser.add_argument("--json", metavar="FILE", help="write the results")
    parser.add_argument("--plot", metavar="FILE", help="draw them")
    parser.add_argument(
        "--inject-bug", metavar="NAME", help="run with a bug that must be caught; list: name them"
    )
    add_options(parser)
    try:
        args = parser.parse_args(argv)
        if args.inject_bug == "list":
            print(*(f"  {bug.__name__:28} {bug.__doc__}" for bug in BUGS), sep="\n")
            return 0
        if args.inject_bug not in (None, *(bug.__name__ for bug in BUGS)):
            raise Unusable(f"no bug {args.inject_bug}; --inject-bug list names them")
        for path in (args.json, args.plot):
            if path and (
                Path(path).is_dir() or not os.access(Path(path).absolute().parent, os.W_OK)
            ):
                raise Unusable(f"cannot write {path}: a directory, or in none that can be written")
        results = {"lab": Path(__file__).stem, "exercises": run_checks(args), **experiment(args)}
        failed = [name for name, result in results["exercises"].items() if not result["passed"]]
        failed += [name for name in results.get("failed", []) if name not in failed]
        results["passed"] = not failed
        count = f"all {len(results['exercises'])} exercises' checks hold"
        print(
            f"\n{'FAIL' if failed else 'PASS'} {results['lab']}: {', '.join(failed) or count}",
            flush=True,
        )
        if args.json:
            write_whole(
                args.json, lambda path: Path(path).write_text(json.dumps(results, indent=1) + "\n")
            )
        if args.plot:
            write_whole(args.plot, partial(draw, results))
        return 1 if failed else 0
    except Unusable as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    except Wrong as wrong:  # a rank of an experiment, which has nothing to compare
        print(f"\nFAIL {Path(__file__).stem}: {wrong.found}")
        return 1


# ---------------------------------------------------------------------------------------------------
# Command line
# ---------------------------------------------------------------------------------------------------


# Copied from tp.py
class Parser(argparse.ArgumentParser):
    """argparse, with its complaint raised instead of printed with the usage."""

    def error(self, message):
        raise Unusable(message)


# Copied from labs/lab8_3d.py
def positive(text):
    """A whole number of at least 1, for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1")
    return int(text)


# Copied from labs/lab8_3d.py
def write_whole(path, write):
    """Have write(another path) make the file, then name it path: whole or not at all, or Unusable."""
    draft = f"{path}.{os.getpid()}{Path(path).suffix}"
    try:
        write(draft)
        os.replace(draft, path)
    except (
        OSError,
        ValueError,
    ) as problem:  # a full disk; a picture of a kind that matplotlib lacks
        raise Unusable(f"cannot write {path}: {problem}") from None
    finally:
        Path(draft).unlink(missing_ok=True)


def token_each(text):
    """A number of tokens of which every rank has one, for argparse."""
    if positive(text) < RANKS:
        raise argparse.ArgumentTypeError(
            f"{text} tokens are too few for {RANKS} ranks; {RANKS} would do"
        )
    return int(text)


def add_options(parser):
    """The options of this lab's own."""
    parser.add_argument(
        "--length", type=token_each, default=1024, help="tokens of the balance experiment (1024)"
    )


if __name__ == "__main__":
    sys.exit(main())
