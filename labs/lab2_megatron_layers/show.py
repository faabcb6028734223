"""What the finished lab 2 shows: label smoothing on ranks, what an MLP keeps and sends."""

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from labs.kit.cli import number, positive
from labs.kit.harness import Traffic, on_ranks, table
from labs.kit.pictures import RANKS, draw_matrix, picture
from labs.kit.tools import Kept
from labs.lab2_megatron_layers.check import real_tokens, tokens_of
from labs.lab2_megatron_layers.lesson import all_reduce, shard_range

HIDDEN, FEATURES = 96, 383  # of the MLP; nothing divides 383
VOCAB, TOKENS = 1000, 64  # of the label smoothing


def megatron_label_smoothing(logits, target, start, end, alpha):
    """Megatron-LM's label smoothing on a rank with columns [start, end): loss (...), dx (..., v/P).

    It means 1 - alpha at the target and alpha / (v - 1) everywhere else, which is torch's
    definition with alpha v / (v - 1). But in megatron/core/tensor_parallel/cross_entropy.py K, its
    v, is the width of the rank's own shard, and the mean is over that shard alone. logits (..., v)
    are given whole here, because what it sums over all ranks it sums rightly.
    """
    K = end - start
    smoothing = alpha * K / (K - 1)
    log_probs = logits.log_softmax(-1)
    nll = -log_probs.gather(-1, target[..., None])[..., 0]
    own = log_probs[..., start:end]
    loss = (1 - smoothing) * nll - smoothing * own.mean(-1)
    at_target = F.one_hot(target, logits.shape[-1])[..., start:end]
    return loss, own.exp() - (1 - smoothing) * at_target - smoothing / K


def smoothing_on_rank(group, lab, seed, alpha):
    """This rank's row of the label smoothing experiment."""
    generator = torch.Generator().manual_seed(seed)
    zipf = -torch.arange(1, VOCAB + 1).log()  # frequent tokens have low ids, as in BPE
    logits = zipf + torch.randn(TOKENS, VOCAB, generator=generator)
    target = torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]
    start, end = lab.vocab_range(VOCAB, group.rank(), group.size())
    shard = logits[:, start:end].clone().requires_grad_()
    loss = lab.vocab_parallel_cross_entropy(shard, target, group, alpha)
    loss.sum().backward()
    torch_loss = partial(F.cross_entropy, logits, target)
    theirs, their_dx = megatron_label_smoothing(logits, target, start, end, alpha)

    def target_mass(dx):  # sum of q = sum of softmax - dx, over the whole vocabulary
        return 1 - all_reduce(dx.sum(-1), group).mean().item()

    return {
        "ranks": group.size(),
        "rank": group.rank(),
        "K": end - start,
        "torch": torch_loss(label_smoothing=alpha).item(),
        "loss": loss.mean().item(),
        "target_mass": target_mass(shard.grad),
        "meant_by_megatron": torch_loss(label_smoothing=alpha * VOCAB / (VOCAB - 1)).item(),
        "megatron": theirs.mean().item(),
        "megatron_target_mass": target_mass(their_dx),
    }


def label_smoothing(lab, args):
    """Our loss and Megatron-LM's formula on 1, 2 and 3 ranks; returns (rows, what is off)."""
    rows = []
    for world in 1, 2, 3:
        rows += on_ranks(world, smoothing_on_rank, lab, args.seed, args.label_smoothing)
    for row in rows:
        row["megatron_error"] = row["megatron"] / row["meant_by_megatron"] - 1
    what = f"vocabulary {VOCAB}, mean loss of {TOKENS} tokens"
    print(f"\nlabel smoothing {args.label_smoothing}, {what}")
    meant, right = rows[0]["meant_by_megatron"], rows[0]["torch"]
    print(f"one device: {right:.6f} as torch defines it, {meant:.6f} as Megatron does")
    head = ["tp", "rank", "K", "ours", "sum of q", "Megatron's formula", "off by", "its sum of q"]
    table(head, *(
        [r["ranks"], r["rank"], r["K"], f"{r['loss']:.6f}", f"{r['target_mass']:.4f}",
         f"{r['megatron']:.6f}", f"{round(r['megatron_error'], 4) + 0.0:+.1%}",
         f"{r['megatron_target_mass']:.4f}"]
        for r in rows
    ))  # fmt: skip
    ours = max(abs(r["loss"] / r["torch"] - 1) + abs(r["target_mass"] - 1) for r in rows)
    wrong = [abs(r["megatron_error"]) + abs(r["megatron_target_mass"] - 1) for r in rows]
    off = [f"the loss is off torch's by {ours:.0e}"] if ours >= 1e-4 else []
    if wrong[0] >= 1e-5:
        off.append(f"Megatron's formula is off by {wrong[0]:.0e} on one rank")
    if min(wrong[1:]) <= args.label_smoothing / 2:
        off.append(f"Megatron's formula is off by {min(wrong[1:]):.0e} only on more ranks")
    return rows, off


# Ways to cut an MLP
TP, SP, SP_AGAIN = "tensor parallel", "+ sequence parallel", "+ x gathered again"


def mlp_expected(way, length, world, width):
    """What a way keeps ("kept_x", "kept_inside", bytes) and sends each way, {op: [calls, bytes]}.

    width: of the MLP's features those that the rank holds. Inside, gelu keeps its input and the
    second layer what gelu puts out.
    """
    tokens = length if way == TP else math.ceil(length / world) * world  # with those that fill up
    x, inside = 4 * tokens * HIDDEN, 2 * 4 * tokens * width  # bytes, float32
    reduced, scattered = {"all_reduce": [1, x]}, {"all_gather": [1, x], "reduce_scatter": [1, x]}
    if way == TP:
        return {"kept_x": x, "kept_inside": inside, "forward": reduced, "backward": reduced}
    if way == SP:
        return {"kept_x": x, "kept_inside": inside, "forward": scattered, "backward": scattered}
    backward = scattered | {"all_gather": [2, 2 * x]}
    kept = {"kept_x": x // world, "kept_inside": inside}
    return kept | {"forward": scattered, "backward": backward}


def mlp_on_rank(group, lab, seed, length):
    """This rank's rows of the MLP experiment: each way to cut it, against one device."""
    torch.manual_seed(seed)
    rank, world = group.rank(), group.size()
    up, down = nn.Linear(HIDDEN, FEATURES), nn.Linear(FEATURES, HIDDEN)
    x, dy = torch.randn(1, length, HIDDEN, requires_grad=True), torch.randn(1, length, HIDDEN)
    y = down(F.gelu(up(x)))
    y.backward(dy)
    start, end = shard_range(FEATURES, rank, world)
    rows = []
    for way in TP, SP, SP_AGAIN:
        first = lab.ColumnParallelLinear.from_linear(up, group, sequence_parallel=way == SP_AGAIN)
        second = lab.RowParallelLinear.from_linear(down, group, sequence_parallel=way != TP)
        own = torch.clone if way == TP else partial(tokens_of, group=group)
        mine = own(x.detach()).requires_grad_()
        with Traffic() as forward:
            with Kept(*first.parameters()) as kept_x:
                if way == SP:  # the short way: autograd keeps what was gathered
                    gathered = lab.gather_from_sp_region(mine, group)
                    hidden = F.linear(gathered, first.weight, first.bias)
                elif way == SP_AGAIN:
                    hidden = lab.gathered_linear(mine, first.weight, first.bias, group)
                else:
                    hidden = first(mine)
            with Kept(*second.parameters()) as kept_inside:
                out = second(F.gelu(hidden))
        with Traffic() as backward:
            out.backward(own(dy))
        measured = {"kept_x": kept_x.bytes, "kept_inside": kept_inside.bytes}
        measured |= {"forward": forward.ops, "backward": backward.ops}
        count = length if way == TP else real_tokens(length, group)
        pairs = [(out[:, :count], own(y)[:, :count]), (mine.grad, own(x.grad))]
        pairs += [(first.weight.grad, up.weight.grad[start:end])]
        pairs += [(first.bias.grad, up.bias.grad[start:end])]
        pairs += [(second.weight.grad, down.weight.grad[:, start:end])]
        pairs += [(second.bias.grad, down.bias.grad)] if rank == 0 else []
        errors = [(torch.norm(a - b) / torch.norm(b).clamp(min=1e-30)).item() for a, b in pairs]
        most = mlp_expected(way, length, world, end - start)
        as_expected = way != SP_AGAIN or measured["kept_x"] <= most["kept_x"]
        for phase in "forward", "backward":
            for op, (_, nbytes) in measured[phase].items():
                as_expected &= nbytes <= most[phase].get(op, [0, 0])[1]
        rows.append({"ranks": world, "rank": rank, "way": way, "error": max(errors)})
        rows[-1] |= measured | {"as_expected": as_expected}
    return rows


def short(ops):
    """A Traffic's calls in a few letters: 1 AG, 1 RS."""
    letters = {"all_reduce": "AR", "all_gather": "AG", "reduce_scatter": "RS"}
    return ", ".join(f"{calls} {letters[op]}" for op, (calls, _) in ops.items())


def mlp(lab, args):
    """The MLP on 2 and 3 ranks, cut in three ways; returns (rows, what is off).

    Of 3 ranks the table has nothing, because PREDICT asks about them.
    """
    rows = []
    for world in 2, 3:
        ranks = on_ranks(world, mlp_on_rank, lab, args.seed, args.length)
        rows += [row for way in zip(*ranks) for row in way]
    x, inside = 4 * args.length * HIDDEN, 2 * 4 * args.length * FEATURES
    print(f"\nMLP {HIDDEN} -> {FEATURES} -> {HIDDEN}, {args.length} tokens: bytes of rank 0 of 2")
    print(f"one device keeps {x} of x and {inside} inside")

    def sent(ops):
        return sum(nbytes for _, nbytes in ops.values())

    head = ["", "off by", "x kept", "inside", "forward", "bytes", "backward", "bytes"]
    table(head, *(
        [r["way"], f"{r['error']:.0e}", r["kept_x"], r["kept_inside"],
         short(r["forward"]), sent(r["forward"]), short(r["backward"]), sent(r["backward"])]
        for r in rows if (r["ranks"], r["rank"]) == (2, 0)
    ))  # fmt: skip
    print("\n  AR all-reduce, AG all-gather, RS reduce-scatter; on the wire AR is an RS and an AG")
    off = []
    for row in rows:
        where = f"{row['way']} on rank {row['rank']} of {row['ranks']}"
        if row["error"] >= 1e-4:
            off.append(f"{where}: off one device by {row['error']:.0e}")
        if not row["as_expected"]:
            kept = f"{row['kept_x']} bytes of x and {row['kept_inside']} inside"
            off.append(f"{where}: keeps {kept}, sends {row['forward']} and {row['backward']}")
    return rows, off


def experiment(lab, args):
    """Both experiments; {"label_smoothing": rows, "mlp": rows, "failed": what did not hold}."""
    smoothing_rows, first = label_smoothing(lab, args)
    mlp_rows, second = mlp(lab, args)
    return {"label_smoothing": smoothing_rows, "mlp": mlp_rows, "failed": first + second}


PREDICT = (
    f"how many bytes of x (1, {{length}}, {HIDDEN}), float32, does rank 0 of 3 keep for the "
    "backward under sequence parallelism, if the backward gathers x again?",
    "4 bytes x ceil(s/P) tokens x h: its own tokens, with the padding",
    lambda results: next(
        row["kept_x"] for row in results["mlp"] if row["ranks"] == 3 and row["way"] == SP_AGAIN
    ),
)


def draw(results, path):
    """The picture of --plot: who holds what, what the MLP keeps, Megatron's smoothing."""
    mosaic = [["held", "kept"], ["losses", "masses"]]
    with picture(path, mosaic, (12, 8)) as axes:
        draw_held(axes["held"])
        draw_kept(axes["kept"], [row for row in results["mlp"] if row["rank"] == 0])
        draw_smoothing(axes["losses"], axes["masses"], results["label_smoothing"])
        axes["held"].figure.suptitle("Colours are ranks")


def draw_held(axis):
    """The matrices as in x W, rows from the top, in the colours of the 3 ranks that hold them."""
    h, i, v, x = 3, 7, 8, 0
    sizes = {h: "h", i: "i", v: "v"}
    matrices = [("embedding", v, h, 0), ("$W_1$: columns", h, i, 1)]
    matrices += [("$W_2$: rows", i, h, 0), ("head", h, v, 1)]
    for name, height, width, dim in matrices:
        draw_matrix(axis, x, 0, height, width, 3, dim)
        axis.text(x + width / 2, 0.9, name, ha="center")
        axis.text(x + width / 2, 0.15, sizes[width], ha="center", style="italic")
        axis.text(x - 0.2, -height / 2, sizes[height], ha="right", va="center", style="italic")
        x += width + 2
    for rank, colour in enumerate(RANKS[:3]):
        axis.text(5 + 6 * rank, -v - 1.2, f"rank {rank}", color=colour, weight="bold")
    axis.set(xlim=(-1, x - 1), ylim=(-v - 1.5, 2), aspect="equal")
    axis.set_title("3 ranks share an MLP and a vocabulary", loc="left")
    axis.axis("off")


def draw_kept(axis, rows):
    """What rank 0 keeps in each way, and beside it what it sends forward and backward."""
    places, left = range(len(rows)), [0] * len(rows)
    parts = ("kept_inside", "inside", "0.8"), ("kept_x", "the MLP's input x", "0.4")
    for key, label, grey in parts:
        sizes = [row[key] / 2**10 for row in rows]
        axis.barh(places, sizes, left=left, color=grey, label=label)
        left = [a + b for a, b in zip(left, sizes)]
    for place, end, row in zip(places, left, rows):
        axis.text(end, place, f"  {short(row['forward'])} | {short(row['backward'])}", va="center")
    axis.set_yticks(places, [f"{row['ranks']} ranks\n{row['way']}" for row in rows])
    axis.set_xlim(0, 1.5 * max(left))
    axis.set_xlabel("KiB kept by rank 0; beside the bars: collectives, forward | backward")
    axis.set_title("An MLP keeps 1/P of x only if it gathers again", loc="left")
    axis.legend(frameon=False, loc="lower right", ncols=2)
    axis.set_ylim(len(rows) + 0.3, -0.6)  # from the top, with room for the legend


def draw_smoothing(losses, masses, rows):
    """Megatron's loss of each rank, and the sum of the probabilities that it trains towards."""
    worlds, meant = sorted({row["ranks"] for row in rows}), rows[0]["meant_by_megatron"]
    losses.axhline(meant, color="black", lw=1)
    losses.text(1.1, meant, "one device", va="bottom")
    for row in rows:
        losses.plot(row["ranks"], row["megatron"], "o", ms=9, color=RANKS[row["rank"]])
    losses.set(xticks=worlds, xlim=(0.5, 3.5), xlabel="ranks", ylabel="mean loss")
    losses.set_title("Label smoothing by Megatron's formula: every rank another loss", loc="left")
    first = [row["megatron_target_mass"] for row in rows if row["rank"] == 0]
    masses.plot(worlds, first, "o--", ms=9, color="0.4", label="Megatron's formula")
    ours = [row["target_mass"] for row in rows if row["rank"] == 0]
    masses.plot(worlds, ours, "ks-", label="here, and torch")
    for world, mass in zip(worlds[1:], first[1:]):
        masses.text(world - 0.06, mass, f"{mass:.3f}", ha="right", va="bottom")
    masses.set(xticks=worlds, xlim=(0.5, 3.5), xlabel="ranks")
    masses.set_ylabel("sum of q over the vocabulary")
    masses.set_title("Its target probabilities q add up to more than 1", loc="left")
    masses.legend(frameon=False)


def add_options(parser):
    """The options of this lab's own."""
    add = parser.add_argument
    add("--length", type=positive, default=512, help="tokens of the MLP experiment (512)")
    add("--label-smoothing", type=number(0, 1), default=0.1, help="of that experiment (0.1)")
