"""What the finished lab 16 shows: the proof by torch.equal, costs, what breaks it, and rounding.

One job of 8 ranks (--ranks) runs all of it: see same_bits.py and divergence.py. No time is judged.
"""

from collections import defaultdict

import torch

from labs.kit.harness import on_ranks, table
from labs.kit.pictures import BLUE, GREY, ORANGE, PINK, picture
from labs.lab16_bits import divergence, same_bits
from labs.lab16_bits.bits import finished

COUNT, TRIES = 64, 5_000  # numbers of a sum, orders in which they are added
SIZE = 256  # rows, columns and depth of a product


def add_options(parser):
    """The options of this lab's own."""
    parser.add_argument(
        "--ranks", type=int, choices=(2, 4, 8), default=8, help="at most so many ranks (8)"
    )


def show_proof(ranks):
    """[{"dtype", "dp", "tp", "what", "differ", "of"}] over all ranks, and what is off."""
    counts = defaultdict(lambda: [0, 0])
    for dtype, dp, tp, what, count, total in sum((rank["proof"] for rank in ranks), []):
        entry = counts[dtype, dp, tp, what]
        entry[0] += count
        entry[1] += total
    kinds = list(dict.fromkeys(what for *_, what in counts))
    names = "dtype", "dp", "tp", "what", "differ", "of"
    rows = [dict(zip(names, (*key, *entry))) for key, entry in counts.items()]
    print("\nNumbers that differ from those of one rank, of how many on all ranks (torch.equal):")
    lines = [["", "ranks", "dp x tp", *kinds]]
    for dtype, dp, tp in dict.fromkeys(key[:3] for key in counts):
        cells = [counts[dtype, dp, tp, what] for what in kinds]
        shown = [f"{differ} of {of:,}" for differ, of in cells]
        lines.append([dtype, dp * tp, f"{dp} x {tp}", *shown])
    table(*lines)
    print(
        "  a resume: after 2 of 3 steps, from what the layout in the line above has saved. One rank"
    )
    print("  comes first, and resumes last, from the largest")
    off = [f"{row}" for row in rows if row["differ"] or not row["of"]]
    return rows, off


def show_costs(ranks, lab):
    """[{"dp", "tp", "bytes", "products", ...}] beside the formula, and what is off."""
    rows, off = [], []
    lines = [["dp x tp", "bytes sent", "formula", "products", "formula", "plain has"]]
    for dp, tp, *_ in ranks[0]["costs"]:
        every = [each[2:4] for rank in ranks for each in rank["costs"] if each[:2] == (dp, tp)]
        sent, products = every[0]
        formula = lab.cost(dp, tp, 4)
        row = {"dp": dp, "tp": tp, "bytes": sent, "products": products, "formula": formula}
        row["plain"] = products * tp // lab.BLOCKS
        rows.append(row)
        if any(tuple(each) != tuple(formula) for each in every):
            off.append(f"dp {dp} x tp {tp}: {every}, not {formula}")
        counts = products, formula[1], row["plain"]
        cells = counts if dp * tp != 2 else "???"  # PREDICT asks
        lines.append([f"{dp} x {tp}", f"{sent:,}", f"{formula[0]:,}", *cells])
    print("\nA step in float32: bytes that a rank sends, and its matrix products (?: asked below)")
    table(*lines)
    kinds = [each[4] for rank in ranks for each in rank["costs"]]
    if any(other != kinds[0] for other in kinds):
        off.append("a layout has other kinds of products than one rank")
    print(
        f"  {len(kinds[0])} kinds of products, by shape, strides and address modulo 64 of what is"
    )
    print("  multiplied: the same in every layout, on every rank")
    times = ranks[0]["seconds"]
    more = times[lab.BLOCKS] / times[1]
    print(
        "  plain: one product of all that a rank has. The FLOPs are the same; on one rank of this"
    )
    print(f"  machine a step with blocks takes {more:.1f} times as long")
    return rows, off, more


def show_broken(ranks):
    """[{"broken", "dp", "tp", "what", "share", "size"}], share of all that differ; what is off."""
    counts = defaultdict(lambda: [0, 0, 0.0])
    for *key, count, total, size in sum((rank["broken"] for rank in ranks), []):
        entry = counts[tuple(key)]
        entry[0] += count
        entry[1] += total
        entry[2] = max(entry[2], size)
    rows = []
    for (name, dp, tp, what), (count, total, size) in counts.items():
        row = {"broken": name, "dp": dp, "tp": tp, "what": what}
        rows.append(row | {"share": count / total, "size": size})
    shapes = list(dict.fromkeys((dp, tp) for _, dp, tp, _ in counts))
    print("\nBroken on purpose, float32: largest difference from one rank, of the largest number;")
    print("0 is the same bits")
    lines = [["", "what", *(f"{dp} x {tp}" for dp, tp in shapes)]]
    for change in same_bits.BREAKS:
        for what in ("weights at first", "logits", "gradients"):
            cells = [counts[change.__name__, dp, tp, what] for dp, tp in shapes]
            told = ["0" if not count else f"{size:.0e}" for count, _, size in cells]
            if any(cell != "0" for cell in told):
                lines.append([change.__doc__, what, *told])
    table(*lines)
    broken = {row["broken"] for row in rows if row["share"]}
    off = [f"{b.__name__} breaks nothing" for b in same_bits.SURE if b.__name__ not in broken]
    return rows, off


def show_divergence(found):
    """[{"how", "dtype", "tp", "differ", "mean", "most", "product", "apart"}], and what is off."""
    rows, off = [], []
    lines = [
        ["", "dtype", "tp", "differ", "mean |difference|", "largest", "mean exp(|difference|)"]
    ]
    for (how, dtype, tp), mine in found.items():
        apart = torch.tensor(mine) - torch.tensor(found[how, dtype, 1])
        size, count = apart.abs(), len(mine)
        row = {"how": how, "dtype": dtype, "tp": tp, "differ": int((apart != 0).sum())}
        row |= {"mean": size.mean().item(), "most": size.max().item()}
        rows.append(row | {"product": size.exp().mean().item(), "apart": apart.tolist()})
        shown = [f"{row[key]:.1e}" if row[key] else "0" for key in ("mean", "most")]
        cells = f"{row['differ']} of {count}", *shown, f"{rows[-1]['product']:.6f}"
        lines.append([how, dtype, tp, *cells])
        if how == "tree" and row["differ"]:
            off.append(f"the tree's log probabilities on {tp} ranks, {dtype}")
    sizes = ", ".join(f"{name} {n}" for name, n in divergence.WIDER.items())
    print(f"\nLog probabilities of the same tokens beside tp 1 ({sizes}):")
    table(*lines)
    return rows, off


def show_rows(seed):
    """What a batch size does to a product on this machine: divergence.rows_alone()."""
    found = divergence.rows_alone(SIZE, seed)
    print(
        f"\n  A product of {SIZE} rows beside one of its first rows alone: numbers that differ here"
    )
    sizes = [*next(iter(found.values()))]
    lines = [["", *(f"{n} row{'s' * (n > 1)}" for n in sizes)]]
    for dtype, row in found.items():
        lines.append([dtype, *(f"{differ} of {of:,}" for differ, of in row.values())])
    table(*lines)
    return found


def experiment(lab, args):
    """All of it: {"proof", "costs", "broken", "divergence", "orders", "failed": what is off}."""
    ranks = on_ranks(args.ranks, same_bits.everything, lab, args.seed, args.ranks, timeout=600)
    found = {"ranks": args.ranks}
    found["proof"], off = show_proof(ranks)
    found["costs"], more, found["slower"] = show_costs(ranks, lab)
    off += more
    found["broken"], more = show_broken(ranks)
    off += more
    found["divergence"], more = show_divergence(ranks[0]["log probabilities"])
    off += more
    found["orders"] = divergence.sums_in_every_order(COUNT, TRIES, args.seed)
    for dtype, sums in found["orders"].items():
        print(
            f"\n  {COUNT} numbers in {TRIES:,} orders, {dtype}: {len({*sums})} different sums, ",
            end="",
        )
        print(
            f"{min(sums):+.1f} to {max(sums):+.1f} units in the last place off the exact one",
            end="",
        )
    print()
    found["rows"] = show_rows(args.seed)
    for line in off:
        print(f"  {line}")
    return found | {"failed": off}


def draw(results, path):
    """Histograms of one sum's orders and of log probabilities' differences; bytes by layout."""
    with picture(path, [["orders", "log"], ["bytes", "broken"]], (13, 9)) as axes:
        axis = axes["orders"]
        for (dtype, sums), colour in zip(results["orders"].items(), (BLUE, ORANGE)):
            look = {"histtype": "step", "lw": 2, "color": colour, "label": dtype}
            axis.hist(sums, bins=21, range=(-10.5, 10.5), **look)
        axis.set(xlabel="off the exact sum, in units of the last place", ylabel="orders")
        axis.set_title(f"One sum of {COUNT} numbers in {TRIES:,} orders", loc="left")
        axis.legend(frameon=False)
        draw_log(axes["log"], results["divergence"])
        draw_bytes(axes["bytes"])
        draw_broken(axes["broken"], results["broken"])


def draw_log(axis, rows):
    """Differences of log probabilities in bfloat16, plain; the tree's are all in one bar."""
    rows = [row for row in rows if row["dtype"] == "bfloat16" and row["tp"] > 1]
    plain = [row for row in rows if row["how"] == "plain"]
    most, count = max(row["most"] for row in plain), len(plain[0]["apart"])
    for row, colour in zip(plain, (BLUE, ORANGE, PINK)):
        look = {"histtype": "step", "lw": 2, "color": colour, "label": f"plain, tp {row['tp']}"}
        axis.hist(row["apart"], bins=25, range=(-most, most), **look)
    axis.axvline(0, color="black", lw=3, label=f"tree, any tp: all {count} at 0")
    axis.set(xlabel="log probability less that of tp 1", ylabel="tokens")
    axis.set_title("The same model and tokens in bfloat16", loc="left")
    axis.legend(frameon=False, fontsize=8, loc="upper left")


def draw_bytes(axis):
    """What an all-reduce of n bytes makes a rank send, by the way it is done."""
    ranks = [2, 4, 8, 16, 32]
    doubling = [rank.bit_length() - 1 for rank in ranks]
    halving = [2 * (rank - 1) / rank for rank in ranks]
    axis.plot(ranks, doubling, "o-", color=ORANGE, label="tree, doubling")
    axis.plot(ranks, halving, "o-", color=BLUE, label="tree, halving: as a ring")
    axis.set_xscale("log", base=2)
    axis.set_xticks(ranks, ranks)
    axis.set(xlabel="ranks", ylabel="bytes sent, of the message", ylim=0)
    axis.set_title("An all-reduce with the tree's order", loc="left")
    axis.legend(frameon=False)


def draw_broken(axis, rows):
    """The largest difference of gradients by what is broken, on a logarithmic scale."""
    names = list(dict.fromkeys(row["broken"] for row in rows))
    sizes = [max(r["size"] for r in rows if r["broken"] == n) for n in names]
    colours = [ORANGE if "generators" in name else GREY for name in names]
    axis.barh([name.replace("_", " ") for name in names], sizes, color=colours)
    axis.set(xscale="log", xlabel="largest difference from one rank, relative", xlim=(1e-9, 10))
    axis.invert_yaxis()
    axis.set_title("Broken on purpose: rounding (grey), mistakes (orange)", loc="left")


PREDICT = (
    "how many matrix products does a rank of dp 1 x tp 2 make in a step, forward and backward?",
    f"{finished.B} sequences x {finished.BLOCKS // 2} blocks x ({finished.LAYERS} layers x "
    "(7 linears x 3 + attention 2 + 4) + the head's 3)",
    lambda results: next(
        row["products"] for row in results["costs"] if (row["dp"], row["tp"]) == (1, 2)
    ),
)
