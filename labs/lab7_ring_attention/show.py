"""What the finished lab 7 shows: who multiplies what and when, and what each parallel way sends."""

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from labs.kit.cli import MOST, whole
from labs.kit.harness import Traffic, on_ranks, table
from labs.kit.inputs import draw_float64
from labs.kit.pictures import PALE, picture
from labs.kit.pictures import RANKS as COLOURS
from labs.lab7_ring_attention.attention import (
    GATHER,
    HEAD,
    RING,
    SP,
    TOKENS,
    ULYSSES,
    attention_layer,
    causal,
    expected_wire,
    project,
)
from labs.lab7_ring_attention.check import EXACT, PLACEMENTS, finished

CONTIGUOUS, ZIGZAG, TILE = finished.CONTIGUOUS, finished.ZIGZAG, finished.TILE
RANKS, LONG = 4, 131_072  # of the balance; LONG: tokens where only the formula is asked


def pairs_in_tiles(q_pos, k_pos):
    """(query, key) pairs that attend() multiplies for each head: seen, or filling up the tiles."""
    return sum(len(q_pos[rows]) * len(k_pos[keys]) for rows, keys in finished.tiles(q_pos, k_pos))


def balance_on_rank(group, lab, seed, length):
    """{placement: (query, key) pairs of one head that this rank multiplied}, counted in matmuls."""
    rank, P, found = group.rank(), group.size(), {}
    heads, kv = 2, 1
    for placement in PLACEMENTS:
        held = [lab.positions(length, other, P, placement) for other in range(P)]
        _, randn = draw_float64(seed + rank)
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
        chunks = [lab.positions(2 * RANKS, rank, RANKS, placement) for rank in range(RANKS)]
        results[placement]["chunks"] = [held.tolist() for held in chunks]
        for rank, (steps, count) in enumerate(zip(pairs, counted)):
            total, share = steps.sum().item(), f"{steps.sum() * RANKS / pairs.sum():.2f}"
            rows.append([placement, rank, *steps.tolist(), total, share, round(count["forward"])])
            if count["forward"] > count["in_tiles"]:
                off.append(f"{placement}: rank {rank} multiplies {count['forward']:.0f} pairs")
    table(*rows)
    print("\n  share: of an even one")
    print(f"  multiplied: counted in the matmuls, {TILE} queries with the same keys")
    worlds = 2, 4, 8, 16  # by the finished lab: an answer by the mask may take gigabytes
    long = {P: [lockstep(finished.work(LONG, P, place)) for place in PLACEMENTS] for P in worlds}
    print(f"\n{LONG} tokens: a ring's time, each step that of its busiest rank; 1 is an even share")
    columns = zip(PLACEMENTS, zip(*long.values()))
    rows = [[placement, *(f"{time:.3f}" for time in times)] for placement, times in columns]
    table(["ranks", *long], *rows, ["(2P - 1) / P", *(f"{(2 * P - 1) / P:.3f}" for P in long)])
    return results | {"long": long}, off


def on_the_wire(ops, P):
    """Bytes of a Traffic's ops that leave a rank: of a collective all but the rank's own part."""
    return sum(nbytes if op == "send" else nbytes * (P - 1) / P for op, (_, nbytes) in ops.items())


def ways_on_rank(group, lab, seed, heads, kv_heads):
    """Each way against one device: {way: error, bytes, calls, or why it is refused}."""
    rank, P, found = group.rank(), group.size(), {}
    _, randn = draw_float64(seed)
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


ASKED = RING, 4, 4  # way, KV heads and ranks of PREDICT: its table lacks the backward's bytes
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
            counted = [round(x) for x in (first["forward"], forward, first["backward"], backward)]
            if (way, kv_heads, P) == ASKED:
                counted[2:] = "??"
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
    print("  ?: the lab asks you, below")
    print("  refused: a rank would have no head. * up to the heads, with replicas of KV heads")
    print("  Only a ring's sends hide behind attention. SP cuts the weights too; the others sum")
    print("  their gradients once a step.")
    return rows, off


def experiment(lab, args):
    """Both experiments: {"balance": dict, "ways": rows, "failed": what is off}."""
    (found, uneven), (rows, off) = balance(lab, args), side_by_side(lab, args)
    return {"length": args.length, "balance": found, "ways": rows, "failed": uneven + off}


def draw(results, path):
    """Who multiplies what and when, how long it takes, what each way sends."""
    found = [results["balance"][placement] for placement in PLACEMENTS]
    latest = max(sum(map(max, zip(*each["pairs"]))) for each in found) / 1000
    mosaic = [["owners 0", "steps 0"], ["owners 1", "steps 1"], ["wire", "wire"]]
    with picture(path, mosaic, (11, 12), width_ratios=[1, 1.6], height_ratios=[4, 4, 5]) as axes:
        for i, placement in enumerate(PLACEMENTS):
            draw_owners(axes[f"owners {i}"], placement, found[i]["chunks"])
            draw_steps(axes[f"steps {i}"], found[i], latest, placement)
        rows = [row for row in results["ways"] if "error" in row and row["ranks"] == RANKS]
        rows = [row for row in rows if (row["way"], row["kv_heads"], RANKS) != ASKED]
        draw_wire(axes["wire"], rows)
        title = f"{results['lab']}: {results['length']} tokens on {RANKS} ranks; colours are ranks"
        axes["wire"].figure.suptitle(title)


def draw_owners(axis, placement, ranks):
    """The causal matrix of 2P x 2P chunks: colour whose queries, number in which step."""
    chunks, owner = 2 * RANKS, {}
    for rank, held in enumerate(ranks):
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


def draw_steps(axis, found, latest, placement):
    """Each rank's steps in time: a step begins when the slowest rank's last one ends."""
    start = 0
    for step, pairs in enumerate(zip(*found["pairs"])):
        pairs = [count / 1000 for count in pairs]
        for rank, count in enumerate(pairs):
            axis.barh(rank, count, left=start, color=COLOURS[rank], edgecolor="white", height=0.8)
            idle = {"color": "none", "edgecolor": PALE, "hatch": "///", "linewidth": 0}
            axis.barh(rank, max(pairs) - count, left=start + count, height=0.8, **idle)
        axis.axvline(start, color="black", linewidth=0.8)
        axis.text(start, -0.55, f" step {step}", ha="left", va="bottom", fontsize=9)
        start += max(pairs)
    axis.axvline(start, color="black", linewidth=0.8)
    axis.set(xlim=(0, latest * 1.02), ylim=(RANKS - 0.5, -0.9), yticks=range(RANKS), ylabel="rank")
    axis.set_xlabel("thousand (query, key) pairs of one head; hatched: waiting")
    axis.set_title(f"{placement}: {found['lockstep']:.2f} times an even share")


def draw_wire(axis, rows):
    """Bytes on the wire of each way, measured, forward and backward."""
    labels = [f"{r['way']}; {r['heads']} heads, {r['kv_heads']} KV" for r in rows]
    forward, backward = ([r[phase] / 1024 for r in rows] for phase in ("forward", "backward"))
    axis.barh(labels, forward, color="#555555", label="forward")
    axis.barh(labels, backward, left=forward, color=PALE, label="backward")
    axis.invert_yaxis()
    axis.set(xlabel="KiB on the wire, a rank", title=f"one attention layer, {TOKENS} tokens")
    axis.legend(frameon=False)


PREDICT = (
    f"how many bytes does each of 4 ranks send in the ring's backward of {TOKENS} tokens, "
    f"8 heads, 4 KV heads, {HEAD} float64 numbers a head?",
    "(2P - 1) KV, KV = 2 (s/P) kv_heads d numbers of 8 bytes: P - 1 sends of K and V, P of dK, dV",
    lambda results: next(
        row["backward"]
        for row in results["ways"]
        if (row["way"], row["kv_heads"], row["ranks"]) == ASKED
    ),
)


def add_options(parser):
    """The lab's own options."""
    tokens = "tokens of the balance experiment (1024)"
    parser.add_argument("--length", type=whole(RANKS, MOST), default=1024, help=tokens)
