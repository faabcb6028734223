"""What the finished lab 12 shows: the proof, bytes, the slowest rank, what dropping costs, a way.

Everything is counted, in bytes and rows; nothing is timed.
"""

import math

import torch
import torch.distributed as dist

from labs.kit.cli import whole
from labs.kit.harness import Traffic, on_ranks, table
from labs.kit.inputs import drawn
from labs.kit.models import EXACT, Float64
from labs.kit.pictures import BLUE, GREEN, GREY, ORANGE, RED, picture
from labs.lab12_experts.experts import a_case, model_errors, tiny
from labs.lab12_experts.training import (
    WAY,
    draw_way,
    tensor_parallel,
    training_on_rank,
    way_on_rank,
)

PROOFS = [  # family, ranks, experts on so many of them, experts, sequences of each rank
    ("Qwen3-MoE", 2, 2, 5, [2, 1]),
    ("Mixtral", 3, 3, 37, [1, 0, 2]),
    ("Qwen3-MoE", 4, 2, 5, [2, 0, 1, 3]),
    ("Mixtral", 4, 4, 3, [1, 2, 1, 1]),
]
EXPERTS, TOKENS, MANY, HIDDEN, WIDTH, ITEM = 8, 64, 256, 32, 48, 8
MOST = (1, 2, 4, 8)  # experts a token
ASKED = 5  # the same in PREDICT: counted, and in no table
SKEWS = (0.0, 0.5, 1.0, 2.0, 4.0)
FACTORS = (0.5, 1.0, 1.25, 1.5, 2.0, None)
TRAININGS = [(0.0, None), (0.1, None), (0.0, 1.0), (0.1, 1.0)]  # coefficient, factor


def add_options(parser):
    """The option of this lab's own."""
    ranks = "of the experiments, 2 to 4 (4)"
    parser.add_argument("--ranks", type=whole(2, 4), default=4, help=ranks)


# ---- The proof -----------------------------------------------------------------------------------


def proof_on_rank(group, lab, seed, family, experts, rows, parallel):
    case = a_case(family, experts, 2, seed, rows)
    return model_errors(lab, case, group.rank(), group.size(), parallel)


def proofs(lab, seed):
    """Whole models on 2, 3 and 4 ranks against one device: (rows, what is off)."""
    rows, off = [], []
    lines = [["model", "ranks", "experts", "sequences of each rank", "tensors", "worst", "off by"]]
    for family, ranks, parallel, experts, sequences in PROOFS:
        args = lab, seed, family, experts, sequences, parallel
        errors = {}
        for found in on_ranks(ranks, proof_on_rank, *args):
            errors = {name: max(found[name], errors.get(name, 0)) for name in found}
        worst = max(errors, key=errors.get)
        split = f"{experts} on {parallel}"
        if ranks > parallel:
            split += f", {ranks // parallel} times"
        if not errors[worst] <= EXACT:
            off.append(f"{family} on {ranks} ranks: {worst} is off by {errors[worst]:.0e}")
        row = {"model": family, "ranks": ranks, "experts": experts, "worst": worst}
        rows.append(row | {"off_by": errors[worst], "tensors": len(errors)})
        cells = str(sequences), len(errors), worst, f"{errors[worst]:.0e}"
        lines.append([family, ranks, split, *cells])
    print("\nA step against Hugging Face's model on one device, float64: the loss, all gradients")
    table(*lines)
    return rows, off


# ---- Bytes, against tensor parallelism inside the experts ----------------------------------------


def wire(traffic, world):
    """Bytes that leave a rank, of rings."""
    return sum(sent for _, sent in traffic.ops.values()) * (world - 1) // world


def a_block(k, seed):
    """Hugging Face's block of Qwen3-MoE, the same on every rank."""
    sizes = {"width": WIDTH, "hidden_size": HIDDEN}
    return tiny("Qwen3-MoE", EXPERTS, k, seed, **sizes).model.layers[0].mlp


def bytes_on_rank(group, lab, seed):
    """[a dict for each k]: what both ways send on this rank, counted and by the formula."""
    blocks = [a_block(k, seed) for k in (*MOST, ASKED)]
    with Float64():
        return [bytes_of(lab, block, seed, group) for block in blocks]


def bytes_of(lab, block, seed, group):
    rank, world, k = group.rank(), group.size(), block.gate.top_k
    tokens = drawn(seed, world, TOKENS, HIDDEN)
    x, right = tokens[rank].requires_grad_(), block(tokens)[rank]
    ours = lab.ExpertParallel(block, group)
    with Traffic() as experts:
        y = ours(x[None])[0]
        y.sum().backward()
    with Traffic() as tensors:
        z = tensor_parallel(lab, block, x, group)
        z.sum().backward()
    choices = [None] * world
    sizes = lab.sort_choices(lab.route(ours.logits, k, False)[1], EXPERTS)[1]
    dist.all_gather_object(choices, sizes, group=group)
    formula, away = lab.message_bytes(torch.stack(choices), rank, HIDDEN, ITEM)
    row = {"k": k, "message": experts.bytes("all_to_all"), "formula": formula, "wire": away}
    row |= {"tp_message": sum(sent for _, sent in tensors.ops.values())}
    row["tp_wire"] = wire(tensors, world)
    row["off_by"] = max(((out - right).norm() / right.norm()).item() for out in (y, z))
    return row


def compare_bytes(lab, args):
    """Both ways for each of MOST, and ASKED: (rows, summed over the ranks, what is off)."""
    ranks, rows, off = on_ranks(args.ranks, bytes_on_rank, lab, args.seed), [], []
    lines = [["k", "EP message", "formula", "wire", "TP message", "wire", "EP / TP", "k / P"]]
    for each in zip(*ranks):
        names = "message", "formula", "wire", "tp_message", "tp_wire"
        row = {"k": each[0]["k"]} | {name: sum(one[name] for one in each) for name in names}
        if any(one["message"] != one["formula"] for one in each):
            off.append(f"k {row['k']}: a rank's messages are not what the formula says")
        if max(one["off_by"] for one in each) > EXACT:
            off.append(f"k {row['k']}: an output is not that of one device")
        row["ratio"] = row["wire"] / row["tp_wire"]
        rows.append(row)
        ratios = f"{row['ratio']:.2f}", f"{row['k'] / args.ranks:.2f}"
        lines.append([row["k"], *(f"{row[name]:,}" for name in names), *ratios])
    whose = f"{args.ranks} ranks together, {TOKENS} tokens each, h {HIDDEN}, float64"
    print(f"\nBytes of a block, forward and backward, {whose}:")
    print("each rank has some experts (EP), or a part of the width of each expert (TP)")
    table(*lines[:-1])
    return rows, off


# ---- The slowest rank; what dropping costs -------------------------------------------------------


def rows_here(lab, experts, group):
    """How many rows come to this rank, whose tokens choose experts (n, k)."""
    return int(lab.exchange_sizes(lab.sort_choices(experts, EXPERTS)[1], group).sum())


def skewed_on_rank(group, lab, seed):
    """By SKEWS: rows of this rank, balance loss; by FACTORS: rows, what is dropped and changes."""
    noise = drawn(seed + group.rank(), MANY, EXPERTS)
    x = drawn(seed + 10 + group.rank(), MANY, HIDDEN)
    liked = torch.linspace(1, -1, EXPERTS, dtype=torch.float64)
    found, block = {"skews": [], "factors": []}, a_block(2, seed)
    with Float64(), torch.no_grad():
        for skew in SKEWS:
            logits = noise + skew * liked
            total = lab.balance_losses([logits], 2, group)
            dist.all_reduce(total, group=group)
            rows = rows_here(lab, lab.route(logits, 2, False)[1], group)
            found["skews"].append([rows, total.item() / (MANY * group.size())])
        weights, experts = lab.route(noise + liked, 2, False)
        ours = lab.ExpertParallel(block, group)
        whole = ours.mix(x, weights, experts)
        for factor in FACTORS:
            capacity = math.ceil((factor or EXPERTS) * 2 * MANY / EXPERTS)
            kept = lab.drop(weights, experts, EXPERTS, capacity)
            lost, change = kept == EXPERTS, ours.mix(x, weights, kept) - whole
            counts = [rows_here(lab, kept, group), int(lost.sum()), int(lost.all(1).sum())]
            squares = [change.square().sum().item(), whole.square().sum().item()]
            found["factors"].append([*counts, *squares])
    return found


def slowest(lab, args):
    """The slowest rank's share by skew, and by capacity: {"skews": rows, "factors": rows}."""
    world = args.ranks
    ranks = on_ranks(world, skewed_on_rank, lab, args.seed)
    choices, skews, factors = 2 * MANY * world, [], []
    for skew, each in zip(SKEWS, zip(*(found["skews"] for found in ranks))):
        most = max(rows for rows, _ in each)
        row = {"skew": skew, "balance": each[0][1], "busiest": most * world / choices}
        skews.append(row)
    for factor, each in zip(FACTORS, zip(*(found["factors"] for found in ranks))):
        _, lost, alone, apart, whole = (sum(column) for column in zip(*each))
        row = {"factor": factor, "busiest": max(one[0] for one in each) * world / choices}
        row |= {"dropped": lost / choices, "alone": 2 * alone / choices}
        factors.append(row | {"changed": (apart / whole) ** 0.5})
    print(f"\nA router that prefers some experts (logits + skew x preference), {world} ranks")
    lines = [[r["skew"], f"{r['balance']:.2f}", f"{r['busiest']:.2f}"] for r in skews]
    table(["skew", "balance loss (2: even)", "busiest rank's rows, of an even share"], *lines)
    print("\nSkew 1 with a capacity: what an expert takes of a rank's tokens, in even shares")
    head = "capacity", "busiest rank", "choices dropped", "tokens left alone", "output changed by"
    lines = []
    for row in factors:
        shown = [f"{row[name]:.0%}" for name in ("dropped", "alone", "changed")]
        lines.append([row["factor"] or "none", f"{row['busiest']:.2f}", *shown])
    table(head, *lines)
    return {"skews": skews, "factors": factors}


def trainings(lab, seed):
    """A small model trained with and without balance loss and capacity: rows, one a training."""
    rows = []
    for coefficient, factor in TRAININGS:
        args = lab, seed, coefficient, factor
        names = "cross_entropy", "busiest", "dropped"
        row = dict(zip(names, on_ranks(2, training_on_rank, *args)[0]))
        rows.append(row | {"coefficient": coefficient, "factor": factor})
    print("\nA small Qwen3-MoE in training on 2 ranks, 8 experts: means of the last 10 of 60 steps")
    head = "balance loss x", "capacity", "cross entropy", "busiest rank", "choices dropped"
    lines = [
        [
            row["coefficient"],
            row["factor"] or "none",
            f"{row['cross_entropy']:.3f}",
            f"{row['busiest']:.2f}",
            f"{row['dropped']:.1%}",
        ]
        for row in rows
    ]
    table(head, *lines)
    return rows


def experiment(lab, args):
    """All of it: {"proofs", "bytes", "skews", ..., "way", "failed": what is off}."""
    rows, off = proofs(lab, args.seed)
    sent, wrong = compare_bytes(lab, args)
    results = {"ranks": args.ranks, "proofs": rows, "bytes": sent, **slowest(lab, args)}
    results["trainings"] = trainings(lab, args.seed)
    results["way"] = on_ranks(WAY["ranks"], way_on_rank, lab, args.seed)
    return results | {"failed": off + wrong}


def draw(results, path):
    """Tokens on their way; bytes by k; the slowest rank by skew; what dropping costs."""
    mosaic = [["way", "way", "way"], ["bytes", "skew", "drop"]]
    with picture(path, mosaic, (12, 9), height_ratios=[1.4, 1]) as axes:
        draw_way(axes["way"], results["way"])
        rows, axis = results["bytes"][:-1], axes["bytes"]
        names = [str(row["k"]) for row in rows]
        axis.plot(names, [row["wire"] / 1024 for row in rows], "o-", color=BLUE, label="EP")
        axis.plot(names, [row["tp_wire"] / 1024 for row in rows], "s--", color=RED, label="TP")
        axis.set(xlabel="experts a token", ylabel="KiB on the wire, all ranks")
        axis.set_title(f"Experts on {results['ranks']} ranks, or cut over them", loc="left")
        axis.set_ylim(0)
        axis.legend(frameon=False)
        rows, axis = results["skews"], axes["skew"]
        x = [row["balance"] for row in rows]
        axis.plot(x, [row["busiest"] for row in rows], "o-", color=ORANGE)
        axis.axhline(results["ranks"], color=GREY, ls=":")
        axis.set(xlabel="balance loss (2: even, 8: all on two)", ylabel="rows, of an even share")
        axis.set_title("The rank that the others wait for", loc="left")
        axis.set_ylim(0)
        rows, axis = results["factors"], axes["drop"]
        names = [str(row["factor"] or "none") for row in rows]
        for name, look, label in (
            ("dropped", {"color": RED, "marker": "o"}, "choices dropped"),
            ("changed", {"color": BLUE, "marker": "s"}, "output changed by"),
            ("alone", {"color": GREY, "marker": "^"}, "tokens left alone"),
        ):
            axis.plot(names, [100 * row[name] for row in rows], label=label, **look)
        axis.plot([], [], "d--", color=GREEN, label="busiest rank (right)")
        right = axis.twinx()
        right.plot(names, [row["busiest"] for row in rows], "d--", color=GREEN)
        right.set(ylim=(0, 3.5), ylabel="rows, of an even share")
        axis.set(xlabel="capacity, in even shares", ylabel="%", ylim=(0, 100))
        axis.set_title("What a capacity costs, at skew 1", loc="left")
        axis.legend(frameon=False)


PREDICT = (
    f"{{ranks}} ranks, {TOKENS} tokens a rank, {ASKED} experts a token, h {HIDDEN}, float64: "
    "how many message bytes of rows do one block's all-to-alls carry in a forward and its "
    "backward, summed over the ranks?",
    f"4 all-to-alls x ranks x {TOKENS} x {ASKED} rows x {HIDDEN} x 8 bytes, whatever the router "
    "chooses",
    lambda results: results["bytes"][-1]["message"] - 8 * EXPERTS * results["ranks"],
)
