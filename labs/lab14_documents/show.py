"""What the finished lab 14 shows: the proof, pairs and bytes counted, imbalance of real mixtures.

Nothing is timed.
"""

import torch
from torch.utils.flop_counter import FlopCounterMode

from labs.kit.cli import whole
from labs.kit.harness import Traffic, on_ranks, table
from labs.kit.models import EXACT
from labs.kit.pictures import BLUE, ORANGE, RANKS, picture
from labs.lab14_documents import mixtures
from labs.lab14_documents.documents import (
    groups_of_all_sizes,
    mask_of,
    packings,
    placements,
    position_of,
)
from labs.lab14_documents.packed import FAMILIES, attention_case, gradient_elsewhere, model_errors

WORLD, KV, G, D, ITEM = 4, 2, 2, 8, 8  # ranks of what is counted; a rank of Ulysses has a KV head
LENGTHS = [25, 1, 15, 3, 11, 9]
LONGER, WINDOW = (128, 256, 512), 32
SHOWN = [17, 1, 6, 13, 3, 8]  # of the picture


def add_options(parser):
    """The options of this lab's own."""
    add = parser.add_argument
    add("--ranks", type=whole(2, 64), default=8, help="of the mixtures, which are only counted (8)")
    tokens = whole(64 * mixtures.BLOCK, 1 << 20)  # at least a block for each rank
    add("--tokens", type=tokens, default=131_072, help="of a mixture (131072)")


# ---- The proof -----------------------------------------------------------------------------------


def proofs_on_rank(world, lab, seed):
    """[(family, way, ranks, error, whether no gradient crosses documents)] of this rank."""
    found, ways = [], {"ring": lab.RingAttention.apply, "Ulysses": lab.ulysses_attention}
    for group in groups_of_all_sizes():
        P = group.size()
        for i, family in enumerate(FAMILIES):
            for j, (name, way) in enumerate(ways.items()):
                lengths = [*packings(seed).values()][(i + j + P) % 4]
                held = [*placements(lengths, P, seed, lab).values()][(i + 2 * j + 3 * P) % 4]
                case = lab, family, way, lengths, held, group, seed
                error = max(model_errors(*case).values())
                own, elsewhere = gradient_elsewhere(*case)
                apart = torch.equal(elsewhere, torch.zeros_like(elsewhere))
                found.append((family, name, P, error, apart, own.abs().sum().item() > 0))
    return found


def proofs(lab, seed):
    """Whole models on 1 to 4 ranks against each document alone: (rows, what is off)."""
    rows, off = {}, []
    for family, way, P, error, apart, some in sum(on_ranks(4, proofs_on_rank, lab, seed), []):
        row = rows.setdefault((family, way), {"family": family, "way": way, "errors": [0.0] * 4})
        row["errors"][P - 1] = max(row["errors"][P - 1], error)
        row["crosses"] = row.get("crosses", False) or not apart
        row["arrives"] = row.get("arrives", False) or some
    lines = [["model", "way", *(f"on {P}" for P in (1, 2, 3, 4)), "gradient across documents"]]
    for row in rows.values():
        crosses = "not 0" if row["crosses"] else "exactly 0"
        lines.append([row["family"], row["way"], *(f"{e:.0e}" for e in row["errors"]), crosses])
        if not max(row["errors"]) <= EXACT or row["crosses"] or not row["arrives"]:
            off.append(f"{row['family']}, {row['way']}")
    print("\nWhole models in float64 against Hugging Face's, which sees each document alone:")
    print("the loss and every gradient; another packing and placement for each number of ranks")
    table(*lines)
    return [*rows.values()], off


# ---- Pairs and bytes of one attention, counted ---------------------------------------------------


def counted_on_rank(group, lab, seed):
    """[(placement, way, pairs, bytes)] of this rank; a pair of each head counts."""
    found, rank = [], group.rank()
    lab.TILE = 1  # one query at a time: then no pair is multiplied that the mask would drop
    case = attention_case(seed, LENGTHS, None, KV * WORLD // 2, G, D)
    for where, held in placements(LENGTHS, WORLD, seed, lab).items():
        own = held[rank]
        for name, way in ("ring", lab.RingAttention.apply), ("Ulysses", lab.ulysses_attention):
            leaves = [x[..., own, :].requires_grad_() for x in (case.q, case.k, case.v)]
            with Traffic() as traffic, FlopCounterMode(display=False) as flops:
                way(*leaves, held, case.first, group).backward(case.dout[..., own, :])
            # a pair: D multiply-adds (2 operations) in each of 2 matmuls forward, 5 backward
            pairs = flops.get_total_flops() / (2 * D * 7)
            sent = traffic.bytes("send") + traffic.bytes("all_to_all")
            found.append((where, name, pairs, sent))
    return found


def counts(lab, seed):
    """Both ways in four placements, beside the formulas: (rows, what is off)."""
    kv, first = KV * WORLD // 2, lab.first_seen(position_of(LENGTHS), None)
    heads, total = kv * G, int(mask_of(LENGTHS, None).sum())
    rows, off = [], []
    lines = [["placement", "way", *(f"rank {r}" for r in range(WORLD)), "bytes of the ranks"]]
    for each in zip(*on_ranks(WORLD, counted_on_rank, lab, seed)):
        where, way, held = *each[0][:2], placements(LENGTHS, WORLD, seed, lab)[each[0][0]]
        pairs, sent = [one[2] for one in each], [one[3] for one in each]
        ring = [int(count) * heads for count in lab.work(held, first)]
        right = ring if way == "ring" else [total * heads / WORLD] * WORLD
        figures = [lab.message_bytes(held, first, r, kv, G, D, ITEM) for r in range(WORLD)]
        formula = [int(figure[way == "Ulysses"]) for figure in figures]
        row = {"placement": where, "way": way, "pairs": pairs, "bytes": sent}
        rows.append(row | {"expected_pairs": right, "expected_bytes": formula})
        if [*map(float, right)] != pairs or formula != sent:
            off.append(f"{way} {where}: pairs or bytes are not those of the formula")
        cells = [f"{count:,.0f}" for count in pairs]
        lines.append([where, way, *cells, ", ".join(f"{n:,}" for n in sent)])
    print(f"\n{len(LENGTHS)} documents of {sum(LENGTHS)} tokens on {WORLD} ranks, {heads} heads:")
    print("pairs of query and key that each rank multiplied, forward and backward; and bytes")
    table(*lines)
    print("\n  both as lab.work() and message_bytes() say")
    return rows, off


# ---- A window ------------------------------------------------------------------------------------


def window_on_rank(group, lab, seed):
    """{window: bytes of this rank's ring by LONGER}, of one document in order."""
    found = {}
    for window in None, WINDOW:
        found[window] = []
        for s in LONGER:
            first, held = lab.first_seen(torch.arange(s), window), lab.in_order(s, group.size())
            own = len(held[group.rank()])
            q = torch.ones(KV, 1, own, D, dtype=torch.float64)
            k = v = torch.ones(KV, own, D, dtype=torch.float64)
            q.requires_grad_()
            with Traffic() as traffic:
                lab.RingAttention.apply(q, k, v, held, first, group).sum().backward()
            found[window].append(traffic.bytes("send"))
    return found


def windows(lab, seed):
    """[{"window", "length", "bytes" of each rank}]"""
    ranks, rows = on_ranks(WORLD, window_on_rank, lab, seed), []
    for window in None, WINDOW:
        for i, length in enumerate(LONGER):
            row = {"window": window, "length": length}
            rows.append(row | {"bytes": [rank[window][i] for rank in ranks]})
    print(f"\nOne document in order on {WORLD} ranks, {KV} KV heads of {D}: bytes of rank 1's ring")
    lines = [["window", *LONGER]]
    for window in None, WINDOW:
        mine = [f"{row['bytes'][1]:,}" for row in rows if row["window"] == window]
        lines.append([window or "none", *mine])
    table(*lines)
    return rows


def pictured(lab):
    """Of the documents SHOWN, as lists: {"first", "placements": {how: {"held", "pairs"}}}."""
    ids = torch.zeros(sum(SHOWN), dtype=torch.long)
    ids[torch.tensor(SHOWN).cumsum(0) - 1] = 1  # each document's end
    _, position = lab.documents(ids, 1)
    first = lab.first_seen(position, None)
    held = {
        "in order": lab.in_order(len(first), WORLD),
        "zigzag of the sequence": lab.by_document(torch.arange(len(first)), WORLD),
        "by document": lab.by_document(position, WORLD),
        "by work, blocks of 3": lab.by_work(first, WORLD, 3),
    }
    found = {}
    for how, ranks in held.items():
        pairs = [int(count) for count in lab.work(ranks, first)]
        found[how] = {"held": [at.tolist() for at in ranks], "pairs": pairs}
    return {"first": first.tolist(), "placements": found}


def experiment(lab, args):
    """{"proofs", "counts", "windows", "mixtures", "pictured", "failed": what is off}."""
    rows, off = proofs(lab, args.seed)
    counted, wrong = counts(lab, args.seed)
    found = {"ranks": args.ranks, "tokens": args.tokens, "proofs": rows, "counts": counted}
    found["windows"] = windows(lab, args.seed)
    found["mixtures"] = mixtures.compare(lab, args)
    mixtures.show(found["mixtures"], args)
    found["pictured"] = pictured(lab)
    if any(len({*row["bytes"]}) > 2 for row in found["windows"] if row["window"]):
        wrong.append("with a window a rank sends more than its neighbours")
    return found | {"failed": off + wrong}


def draw(results, path):
    """Who computes which pairs, by strategy; the busiest rank of mixtures; bytes of a window."""
    mosaic = [["0", "1", "2", "3"], ["mixtures", "mixtures", "mixtures", "bytes"]]
    with picture(path, mosaic, (13, 8), height_ratios=[1.1, 1]) as axes:
        first = results["pictured"]["first"]
        for axis, (how, row) in zip("0123", results["pictured"]["placements"].items()):
            draw_pairs(axes[axis], how, row, first)
        axes["0"].figure.suptitle(
            "Who computes which pairs: colours are ranks, of queries at the left"
        )
        where = f"{results['tokens']:,} tokens on {results['ranks']} ranks"
        mixtures.draw(axes["mixtures"], results["mixtures"], where)
        draw_bytes(axes["bytes"], results["windows"])


def draw_pairs(axis, how, row, first):
    """The mask, a row a query, in the colour of the rank that holds the query."""
    for rank, at in enumerate(row["held"]):
        for query in at:
            start = first[query]
            axis.barh(query, query + 1 - start, 1, start, align="edge", color=RANKS[rank], lw=0)
            axis.barh(query, 1.5, 1, -3, align="edge", color=RANKS[rank], lw=0)
    axis.set(xlim=(-3, len(first)), ylim=(len(first), 0), aspect="equal", xticks=[], yticks=[])
    axis.set_title(f"{how}\npairs {', '.join(map(str, row['pairs']))}", loc="left", fontsize=10)
    axis.set(xlabel="key", ylabel="query")


def draw_bytes(axis, rows):
    """Bytes of a ring by length, with and without a window."""
    for window, colour in (None, ORANGE), (WINDOW, BLUE):
        mine = [row["bytes"][1] / 1024 for row in rows if row["window"] == window]
        label = f"window {window}" if window else "no window"
        axis.plot(LONGER, mine, "o-", color=colour, label=label)
    axis.set(xlabel="tokens", ylabel="KiB of rank 1's ring", ylim=0, xlim=0, xticks=LONGER)
    axis.set_title("In order, 4 ranks", loc="left")
    axis.legend(frameon=False)


PREDICT = (
    f"how many bytes does rank 0 of {WORLD} send in the forward and backward of a ring, with one "
    f"document of {LONGER[-1]} tokens in order, a window of {WINDOW}, {KV} KV heads, {D} float64 "
    "numbers a head?",
    "w - 1 keys and values go to the next rank: (w - 1) x 2 x KV heads x d x 8 bytes for any "
    "length; unlike others, rank 0 received no keys and so sends no gradients back",
    lambda results: results["windows"][-1]["bytes"][0],
)
