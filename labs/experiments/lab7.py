"""What the finished lab 7 shows: who multiplies what and when, and what each parallel way sends."""

import argparse
import math
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from checks.lab7 import EXACT, PLACEMENTS, draw_from, finished, pairs_in_tiles
from cli import positive
from harness import Traffic, on_ranks, table
from torch.utils.flop_counter import FlopCounterMode

CONTIGUOUS, ZIGZAG, TILE = finished.CONTIGUOUS, finished.ZIGZAG, finished.TILE
RANKS, LONG = 4, 131_072  # of the balance; LONG: tokens where only the formula is asked
TOKENS, HEAD = 256, 16  # of the comparison: tokens, numbers a head
SP, ULYSSES, RING, GATHER = "SP", "Ulysses", "CP, ring", "CP, all-gather"


def balance_on_rank(group, lab, seed, length):
    """{placement: (query, key) pairs of one head that this rank multiplied}, counted in matmuls."""
    rank, P, found = group.rank(), group.size(), {}
    heads, kv = 2, 1
    for placement in PLACEMENTS:
        held = [lab.positions(length, other, P, placement) for other in range(P)]
        _, randn = draw_from(seed + rank)
        q, k, v = (randn(1, h, len(held[rank]), HEAD).requires_grad_() for h in (heads, kv, kv))
        with FlopCounterMode(display=False) as forward:
            out = lab.ring_attention(q, k, v, length, placement, group)
        with FlopCounterMode(display=False) as backward:
            out.sum().backward()
        # a pair: HEAD multiply-adds (2 operations) in each of 2 matmuls forward, 5 backward
        counted = [mode.get_total_flops() / (2 * HEAD * heads) for mode in (forward, backward)]
        found[placement] = {"forward": counted[0] / 2, "backward": counted[1] / 5}
        found[placement]["in_tiles"] = sum(pairs_in_tiles(held[rank], other) for other in held)
    return found


def lockstep(pairs):
    """The ring's time over that of even shares: a step lasts as long as its busiest rank."""
    return (pairs.max(0).values.sum() * len(pairs) / pairs.sum()).item()


def balance(lab, args):
    """Both placements: pairs to multiply and pairs multiplied; returns (results, what is off)."""
    ranks = on_ranks(RANKS, balance_on_rank, lab, args.seed, args.length)
    print(f"\n{args.length} tokens on {RANKS} ranks: (query, key) pairs of one head")
    results, off = {}, []
    rows = [
        ["placement", "rank", *(f"step {t}" for t in range(RANKS)), "all", "share", "multiplied"]
    ]
    for placement in PLACEMENTS:
        pairs = lab.work(args.length, RANKS, placement).long()
        counted = [rank[placement] for rank in ranks]
        results[placement] = {"pairs": pairs.tolist(), "lockstep": lockstep(pairs)}
        results[placement]["counted"] = counted
        for rank, (steps, count) in enumerate(zip(pairs, counted)):
            total, share = steps.sum().item(), f"{steps.sum() * RANKS / pairs.sum():.2f}"
            rows.append([placement, rank, *steps.tolist(), total, share, round(count["forward"])])
            if count["forward"] > count["in_tiles"]:
                off.append(f"{placement}: rank {rank} multiplies {count['forward']:.0f} pairs")
    table(*rows)
    print("\n  share: of an even one")
    print(f"  multiplied: counted in the matmuls, {TILE} queries with the same keys")
    worlds = 2, 4, 8, 16
    long = {P: [lockstep(finished.work(LONG, P, place)) for place in PLACEMENTS] for P in worlds}
    print(f"\n{LONG} tokens: a ring's time, each step that of its busiest rank; 1 is an even share")
    columns = zip(PLACEMENTS, zip(*long.values()))
    rows = [[placement, *(f"{time:.3f}" for time in times)] for placement, times in columns]
    table(["ranks", *long], *rows, ["(2P - 1) / P", *(f"{(2 * P - 1) / P:.3f}" for P in long)])
    return results | {"long": long}, off


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
    parts = [x.new_empty(x.shape) for _ in range(group.size())]
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


def attention_layer(lab, way, x, weights, heads, kv_heads, group):
    """An attention layer on this rank's tokens, x (b, n, h) -> (b, n, h), parallel in a way.

    weights: those of q, k, v (out, h) and of the output (h, out), whole; SP reads its heads' rows.
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
        to_heads = partial(all_to_all, cut=1, join=2, group=group)
        to_tokens = partial(all_to_all, cut=2, join=1, group=group)
        q, k, v = (Exchange.apply(t, to_heads, to_tokens) for t in (q, k, v))
        out = causal(q, k, v)  # (b, heads/P, s, d)
        out = Exchange.apply(out, to_tokens, to_heads)
    elif way == RING:
        out = lab.ring_attention(q, k, v, TOKENS, ZIGZAG, group)  # (b, heads, s/P, d)
    else:  # Llama 3: K and V of all tokens for the rank's queries
        k, v = Exchange.apply(torch.stack([k, v]), gather, scatter)  # (b, kv, s, d)
        held = [lab.positions(TOKENS, other, P, ZIGZAG) for other in range(P)]
        seen = torch.cat(held) <= held[rank][:, None]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
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
    """Bytes of a Traffic's ops that leave a rank: of a collective all but the rank's own part."""
    return sum(nbytes if op == "send" else nbytes * (P - 1) / P for op, (_, nbytes) in ops.items())


def ways_on_rank(group, lab, seed, heads, kv_heads):
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
        own = lab.positions(TOKENS, rank, P, ZIGZAG if way in (RING, GATHER) else CONTIGUOUS)
        leaves = [t.clone().requires_grad_() for t in (x[:, own], *weights)]
        try:
            with Traffic() as forward:
                mine = attention_layer(lab, way, leaves[0], leaves[1:], heads, kv_heads, group)
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
        found[way]["forward"] = on_the_wire(forward.ops, P)
        found[way]["backward"] = on_the_wire(backward.ops, P)
    return found


SHARDED = {SP: "heads, weights", ULYSSES: "heads", RING: "queries; K, V on tour", GATHER: "queries"}
LIMIT = {SP: "KV heads*", ULYSSES: "KV heads*", RING: "tokens", GATHER: "tokens"}
SHORT = {"all_gather": "AG", "reduce_scatter": "RS", "all_to_all": "A2A", "send": "send"}


def side_by_side(lab, args):
    """SP, Ulysses and CP on the same attention; returns (rows, what is off)."""
    rows, off = [], []
    lines = [["heads, KV", "P", "", "cut in attention", "moves", "forward", "formula"]]
    lines[0] += ["backward", "formula", "off by", "P is at most"]
    for heads, kv_heads, P in (8, 8, 2), (8, 8, 4), (8, 4, 4), (3, 1, 4):
        ranks = on_ranks(P, ways_on_rank, lab, args.seed, heads, kv_heads)
        for way, first in ranks[0].items():
            row = {"heads": heads, "kv_heads": kv_heads, "ranks": P, "way": way, **first}
            rows.append(row)
            cells = [f"{heads}, {kv_heads}", P, way, SHARDED[way]]
            if "refused" in first:
                lines.append([*cells, "refused", "-", "-", "-", "-", "-", LIMIT[way]])
                continue
            row["error"] = max(rank[way]["error"] for rank in ranks)
            row["expected"] = expected_wire(way, heads, kv_heads, P)
            moves = ", ".join(f"{calls} {SHORT[op]}" for op, calls in first["calls"].items())
            forward, backward = row["expected"]
            counted = map(round, (first["forward"], forward, first["backward"], backward))
            lines.append([*cells, moves, *counted, f"{row['error']:.0e}", LIMIT[way]])
            name = f"{way} with {heads}, {kv_heads} heads on {P} ranks"
            if not row["error"] <= EXACT:
                off.append(f"{name} is off by {row['error']:.0e}")
            most = [max(rank[way][phase] for rank in ranks) for phase in ("forward", "backward")]
            if most[0] > forward or most[1] > backward:
                off.append(f"{name} sends {most[0]:.0f} and {most[1]:.0f} bytes")
    layer = f"one attention layer, {TOKENS} tokens, {HEAD} float64 numbers a head"
    print(f"\n{layer}: wire bytes of a rank")
    table(*lines)
    print("\n  AG all-gather, RS reduce-scatter, A2A all-to-all; moves: in the forward")
    print("  refused: a rank would have no head. * up to the heads, with replicas of KV heads")
    print("  Only a ring's sends hide behind attention. SP cuts the weights too; the others sum")
    print("  their gradients once a step.")
    return rows, off


def experiment(lab, args):
    """Both experiments: {"balance": dict, "ways": rows, "failed": what is off}."""
    (found, uneven), (rows, off) = balance(lab, args), side_by_side(lab, args)
    return {"length": args.length, "balance": found, "ways": rows, "failed": uneven + off}


# Okabe and Ito's colours: rank 0 to 3
COLOURS = "#0072B2", "#E69F00", "#009E73", "#CC79A7"


def draw(results, path):
    """Who multiplies what and when, how long it takes, what each way sends."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure = pyplot.figure(figsize=(15, 8))
    grid = figure.add_gridspec(2, 3, width_ratios=[1, 1.4, 1.3])
    found = [results["balance"][placement] for placement in PLACEMENTS]
    latest = max(sum(map(max, zip(*each["pairs"]))) for each in found) / 1000
    for i, placement in enumerate(PLACEMENTS):
        draw_owners(figure.add_subplot(grid[i, 0]), placement)
        draw_steps(figure.add_subplot(grid[i, 1]), found[i], latest, placement)
    rows = [row for row in results["ways"] if "error" in row and row["ranks"] == RANKS]
    draw_wire(figure.add_subplot(grid[:, 2]), rows)
    title = f"{results['lab']}: {results['length']} tokens on {RANKS} ranks; colours are ranks"
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def draw_owners(axis, placement):
    """The causal matrix of 2P x 2P chunks: colour whose queries, number in which step."""
    chunks, owner = 2 * RANKS, {}
    for rank in range(RANKS):
        held = finished.positions(chunks, rank, RANKS, placement).tolist()
        owner |= dict.fromkeys(held, rank)
    for query in range(chunks):
        look = {"color": COLOURS[owner[query]], "edgecolor": "white", "alpha": 0.85}
        for key in range(query + 1):
            axis.barh(query + 0.5, 1, 1, key, **look)
            step = (owner[query] - owner[key]) % RANKS
            axis.text(key + 0.5, query + 0.5, step, ha="center", va="center")
    axis.set(xlim=(0, chunks), ylim=(chunks, 0), aspect="equal")
    axis.set(xlabel="chunk of keys", ylabel="chunk of queries")
    axis.set_title(f"{placement}: number = step")
    axis.spines[["top", "right"]].set_visible(False)


def draw_steps(axis, found, latest, placement):
    """Each rank's steps in time: a step begins when the slowest rank's last one ends."""
    start = 0
    for step, pairs in enumerate(zip(*found["pairs"])):
        pairs = [count / 1000 for count in pairs]
        for rank, count in enumerate(pairs):
            axis.barh(rank, count, left=start, color=COLOURS[rank], edgecolor="white", height=0.8)
            idle = {"color": "none", "edgecolor": "#BBBBBB", "hatch": "///", "linewidth": 0}
            axis.barh(rank, max(pairs) - count, left=start + count, height=0.8, **idle)
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
    axis.set(xlabel="KiB on the wire, a rank", title=f"one attention layer, {TOKENS} tokens")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False)


PREDICT = (
    f"how many bytes does each of 4 ranks send in the ring's backward of {TOKENS} tokens, "
    f"8 heads, 4 KV heads, {HEAD} float64 numbers a head?",
    "(2P - 1) KV, KV = 2 (s/P) kv_heads d numbers of 8 bytes: P - 1 sends of K and V, P of dK, dV",
    lambda results: next(
        row["backward"]
        for row in results["ways"]
        if (row["way"], row["kv_heads"], row["ranks"]) == (RING, 4, 4)
    ),
)


def token_each(text):
    """A number of tokens of which every rank has one, for argparse."""
    if positive(text) < RANKS:
        problem = f"{text} tokens are too few for {RANKS} ranks; {RANKS} would do"
        raise argparse.ArgumentTypeError(problem)
    return int(text)


def add_options(parser):
    """The lab's own options."""
    tokens = "tokens of the balance experiment (1024)"
    parser.add_argument("--length", type=token_each, default=1024, help=tokens)
