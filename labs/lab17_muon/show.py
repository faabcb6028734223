"""What the finished lab 17 shows: the proof, shards beside wholes, each way's costs, the loss."""

import statistics
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from labs.kit.alive import AliveParts
from labs.kit.cli import whole
from labs.kit.harness import Traffic, on_ranks, table
from labs.kit.pictures import BLUE, GREEN, ORANGE, PALE, RANKS, picture
from labs.kit.tools import subgroup
from labs.lab17_muon.muon import EXACT, FAMILIES, LAYOUTS, finished, model_errors
from labs.lab17_muon.tiny import losses, shards, untouched

WAYS = [*finished.WAYS]
# The model whose step is counted: 4 layers, 28 matrices
HIDDEN, WIDTH, KV, LAYERS = 192, 512, 64, 4
REPEATS = 5
KINDS = {  # (m, n), and the dimension that tensor parallelism cuts
    "q_proj": ((HIDDEN, HIDDEN), 0),
    "k_proj": ((KV, HIDDEN), 0),
    "v_proj": ((KV, HIDDEN), 0),
    "o_proj": ((HIDDEN, HIDDEN), 1),
    "gate_proj": ((WIDTH, HIDDEN), 0),
    "up_proj": ((WIDTH, HIDDEN), 0),
    "down_proj": ((HIDDEN, WIDTH), 1),
}
LARGE = {  # hidden size, width of the MLP, numbers of k's rows, layers
    "llama-3.1-8b": (4096, 14336, 1024, 32),
    "qwen3-0.6b": (1024, 3072, 1024, 28),
}
WORLDS = 8, 32, 128


def add_options(parser):
    """The lab's own options."""
    parser.add_argument(
        "--ranks", type=whole(2, 4), default=3, help="of a step that is counted, 2 to 4 (3)"
    )


# ---- The proof -----------------------------------------------------------------------------------


def proofs_on_rank(group, lab, seed):
    """[(family, layout, way, ranks, error)] of this rank: on all 3 ranks, and on 2 of them."""
    found, inside = [], group.rank() != 1
    for each in [group, subgroup(group, ranks=[0, 2])] if inside else [group]:
        for family in FAMILIES:
            for layout in LAYOUTS:
                for i, way in enumerate(WAYS):
                    per_head = (i + each.size()) % 2 == 0
                    case = family, layout, way, per_head, each, seed
                    error = max(model_errors(lab, *case).values())
                    found.append((family, layout, way, each.size(), error))
    return found


def proofs(lab, seed):
    """Each way against torch.optim.Muon on one device: (rows, what is off)."""
    ranks, rows, off = on_ranks(3, proofs_on_rank, lab, seed, timeout=240), {}, []
    for family, layout, way, world, error in sum(ranks, []):
        row = rows.setdefault((family, layout, way), {2: 0.0, 3: 0.0})
        row[world] = max(row[world], error)
    lines = [["model", "layout", "way", "2 ranks", "3 ranks"]]
    for key, errors in rows.items():
        lines.append([*key, *(f"{errors[world]:.0e}" for world in (2, 3))])
        if not max(errors.values()) <= EXACT:
            off.append(", ".join(key))
    print("\nThree steps in float64 beside one device's torch.optim.Muon (without its cast to")
    print("bfloat16) and AdamW: the largest relative error of all weights and momenta; in half of")
    print("the rows q, k and v are cut into heads")
    table(*lines)
    return [[*key, errors[2], errors[3]] for key, errors in rows.items()], off


# ---- What a way costs ----------------------------------------------------------------------------


def matrices_of(lab, group, seed):
    """[Matrix] of a model of 4 layers on a rank, with random gradients, cut as tp.py cuts them."""
    rank, own, numbers = group.rank(), {}, torch.Generator().manual_seed(seed)
    for layer in range(LAYERS):
        for kind, ((m, n), dim) in KINDS.items():
            start, end = lab.shard_range((m, n)[dim], rank, group.size())
            part = torch.randn(m, n, generator=numbers).narrow(dim, start, end - start).clone()
            own[f"{layer}.{kind}"] = nn.Parameter(part), dim
            own[f"{layer}.{kind}"][0].grad = torch.randn(part.shape, generator=numbers)
    return lab.make_matrices(own, dict.fromkeys(own, 1), group)


def costs_on_rank(group, lab, seed):
    """{way: what a step took on this rank}"""
    found = {}
    for way in WAYS:
        matrices, times = matrices_of(lab, group, seed), []
        step = lab.step, matrices, getattr(lab, way), group, 0.02
        run(*step)
        for _ in range(REPEATS):
            dist.barrier(group)
            begin = time.perf_counter()
            run(*step)
            times.append(time.perf_counter() - begin)
        with Traffic() as traffic, FlopCounterMode(display=False) as counter:
            run(*step)
        peaks = []
        for _ in range(3):  # gloo's own thread may hold what it gathered for a moment longer
            dist.barrier(group)
            with AliveParts({}) as alive:
                run(*step)
            peaks.append(max(alive.curve))
        own = [m for m in matrices if way == "everywhere" or m.owner == group.rank()]
        found[way] = {
            "calls": sum(calls for calls, _ in traffic.ops.values()),
            "bytes": {op: nbytes for op, (_, nbytes) in traffic.ops.items()},
            "expected_bytes": lab.message_bytes(matrices, group.rank(), way, 4),
            "flops": counter.get_total_flops(),
            "expected_flops": sum(lab.flops(m.shape, m.blocks) for m in own),
            "matrix_flops": [lab.flops(m.shape, m.blocks) for m in matrices],
            "seconds": statistics.median(times),
            "peak": min(peaks),
            "owners": [m.owner for m in matrices],
        }
    return found


def run(step, matrices, way, group, lr):
    step(matrices, way, group, lr, dtype=torch.float32)


def costs(lab, args):
    """Each way's step on ranks: ([{"way", and lists over ranks}], what is off)."""
    ranks, rows, off = on_ranks(args.ranks, costs_on_rank, lab, args.seed, timeout=240), [], []
    lines = [["way", "collectives", "MB", "MFLOP", "ms", "peak, MB"]]
    for way in WAYS:
        row = {key: [rank[way][key] for rank in ranks] for key in ranks[0][way]}
        rows.append({"way": way, **row})
        for measured, formula in ("bytes", "expected_bytes"), ("flops", "expected_flops"):
            if row[measured] != row[formula]:
                off.append(f"{way}: {measured} {row[measured]}, not {row[formula]}")
        sent = [f"{sum(nbytes.values()) / 1e6:.1f}" for nbytes in row["bytes"]]
        work = ", ".join(f"{flops / 1e6:.0f}" for flops in row["flops"])
        peak = ", ".join(f"{peak / 1e6:.1f}" for peak in row["peak"])
        calls, ms = row["calls"][0], f"{1000 * max(row['seconds']):.0f}"
        lines.append([way, calls, ", ".join(sent), work, ms, peak])
    print(f"\nA step of {LAYERS * len(KINDS)} matrices on {args.ranks} ranks, float32 (hidden size")
    print(f"{HIDDEN}, width {WIDTH}, {KV} rows of k, v). Bytes and operations of each rank, as in")
    print("the formulas; the slowest rank's time; peak bytes alive beside weights and momenta")
    table(*lines)
    print("\n  times: this machine's cores, over gloo; they predict nothing about GPUs")
    return rows, off


def balance(lab):
    """[{"model", "ranks", "greedy", "in_turn"}]: the busiest rank's work in even shares."""
    rows, lines = [], [["in even shares", "matrices", "ranks", "greedy", "in turn", "of training"]]
    for model, (hidden, width, kv, layers) in LARGE.items():
        shapes = [(hidden, hidden)] * 2 + [(kv, hidden)] * 2 + [(width, hidden)] * 3
        work = [lab.flops(shape, 1) for _ in range(layers) for shape in shapes]
        numbers = layers * sum(m * n for m, n in shapes)
        share = sum(work) / (6 * numbers * 2**20)  # of a step of so many tokens
        for world in WORLDS:
            row = {"model": model, "ranks": world, "of_training": share}
            turns = [i % world for i in range(len(work))]
            for how, owner in ("greedy", lab.owners(work, world)), ("in_turn", turns):
                load = [sum(c for c, o in zip(work, owner) if o == r) for r in range(world)]
                row[how] = max(load) * world / sum(load)
            rows.append(row)
            cells = [f"{row['greedy']:.2f}", f"{row['in_turn']:.2f}", f"{share:.1%}"]
            lines.append([model, len(work), world, *cells])
    print("\nThe busiest rank's Newton-Schulz, predicted, by how owners are chosen; and all of it")
    print("beside a training step of 2^20 tokens")
    table(*lines)
    return rows


def asked(lab, args):
    """How many matrices the last rank owns with a layer more than the picture has."""
    work = [lab.flops(shape, 1) for _ in range(LAYERS + 1) for shape, _ in KINDS.values()]
    return lab.owners(work, args.ranks).count(args.ranks - 1)


# ---- All of it, and the picture ------------------------------------------------------------------


def experiment(lab, args):
    """All of it; "failed": what is off."""
    rows, off = proofs(lab, args.seed)
    apart, bits = shards(lab), untouched(lab)
    ways, wrong = costs(lab, args)
    shares, runs = balance(lab), losses(lab)
    for name, rates in runs.items():
        flat = [rate for rate, each in rates.items() if each[-1] >= each[0]]
        wrong += [f"{name} {rate}: the loss does not fall" for rate in flat]
    found = {"ranks": args.ranks, "proofs": rows, "shards": apart, "untouched": bits}
    found |= {"ways": ways, "balance": shares, "losses": runs, "asked": asked(lab, args)}
    return found | {"failed": off + wrong}


def draw(results, path):
    """Singular values; who owns which matrix; what a way costs; the losses."""
    mosaic = [["values", "owners"], ["ways", "losses"]]
    with picture(path, mosaic, (12, 8.5)) as axes:
        draw_values(axes["values"])
        draw_owners(axes["owners"], results["ways"][1])
        draw_ways(axes["ways"], results)
        draw_losses(axes["losses"], results["losses"])


def draw_values(axis):
    """What Newton-Schulz makes of a singular value, after 1 to 5 iterations."""
    a, b, c = finished.COEFFICIENTS
    start = value = torch.logspace(-4, 0, 800)
    for i in range(finished.ITERATIONS):
        value = a * value + b * value**3 + c * value**5
        last = i == finished.ITERATIONS - 1
        axis.semilogx(start, value, color=BLUE if last else PALE, lw=2 if last else 1)
    axis.set(xlabel="singular value of G / |G|", ylabel="what it becomes", xlim=(1e-4, 1), ylim=0)
    axis.set_title("five iterations take nearly all of them to about 1", loc="left")
    axis.text(0.98, 0.06, "grey: after 1 to 4", ha="right", transform=axis.transAxes, color="0.4")


def draw_owners(axis, row):
    """The matrices that each rank owns, one on another, by their cost."""
    tops = [0] * len(row["flops"])
    owned = zip(row["matrix_flops"][0], row["owners"][0])
    for flops, rank in sorted(owned, key=lambda pair: -pair[0]):
        cost = flops / 1e6
        axis.bar(rank, cost, 0.7, tops[rank], color=RANKS[rank], edgecolor="white", lw=0.5)
        tops[rank] += cost
    axis.axhline(sum(tops) / len(tops), color="black", linestyle="--", lw=1)
    axis.set_ylim(0, 1.15 * max(tops))
    axis.text(-0.35, 1.04 * max(tops), "dashed: an even share")
    axis.set(xticks=range(len(tops)), xlabel="rank", ylabel="MFLOP of a step")
    axis.set_title("who owns which matrix: the most expensive first", loc="left")


def draw_ways(axis, results):
    """Work of the busiest rank, collectives, bytes and time of each way."""
    for i, row in enumerate(results["ways"]):
        work = max(row["flops"]) / 1e6
        axis.barh(i, work, 0.5, color=BLUE)
        sent = max(sum(nbytes.values()) for nbytes in row["bytes"]) / 1e6
        told = f" {row['calls'][0]} collectives\n {sent:.1f} MB"
        axis.text(work, i, f"{told}, {max(row['seconds']) * 1000:.0f} ms", va="center")
    axis.set(yticks=range(3), yticklabels=WAYS, xlabel="MFLOP of the busiest rank")
    axis.set_xlim(0, 1.4 * max(max(row["flops"]) for row in results["ways"]) / 1e6)
    axis.invert_yaxis()
    count = LAYERS * len(KINDS)
    axis.set_title(f"a step of {count} matrices on {results['ranks']} ranks", loc="left")


def draw_losses(axis, runs):
    """The loss of every run, by optimizer."""
    for (name, each), colour in zip(runs.items(), (ORANGE, GREEN)):
        for (rate, curve), style in zip(each.items(), (":", "-", "--")):
            axis.plot(curve, style, color=colour, label=f"{name}, {rate}")
    axis.set(xlabel="step, of 512 tokens", ylabel="loss")
    axis.set_title("tiny, the same tokens", loc="left")
    axis.legend(frameon=False, ncols=2)


PREDICT = (
    "with a fifth such layer, 35 matrices, how many would the last of {ranks} ranks own?",
    "the MLPs' 15 go first, then q and o; the cheapest, k and v, go to whichever has least",
    lambda results: results["asked"],
)
