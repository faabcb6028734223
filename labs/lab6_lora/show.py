"""What the finished lab 6 shows: what each way sends, and a forgotten sum."""

import itertools
import math
from collections import Counter
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from labs.kit.cli import positive
from labs.kit.harness import Traffic, on_ranks, relative_error, table
from labs.kit.pictures import RANKS, RED, SKY, draw_matrix, picture
from labs.kit.tools import Kept
from labs.lab6_lora.check import MLP
from labs.lab6_lora.lesson import APART, JOINED, SHARDED, WAYS, all_reduce, share

HIDDEN, FEATURES, TOKENS = 96, 130, 60  # of the MLP in the first; 3 does not divide 130
SMALL, STEPS, LEARN = (24, 50, 4), 80, 0.01  # h, features, r of the MLP that trains; learning rate
HELD_OUT = 1 << 20  # a step number that training never reaches


def lora_mlp(lab, seed, hidden, features, rank):
    """An MLP of two LoRALinears on one device; B is not zero, or A would have no gradient."""
    torch.manual_seed(seed)
    sizes = (hidden, features), (features, hidden)
    up, down = (lab.LoRALinear(nn.Linear(*size), rank, 2 * rank) for size in sizes)
    for layer in up, down:
        nn.init.normal_(layer.lora_B.weight, std=0.3)
    return MLP(up, down)


def parallel_mlp(lab, model, *how):
    """This rank's part of such an MLP."""
    return MLP(lab.ColumnParallelLoRA(model.up, *how), lab.RowParallelLoRA(model.down, *how))


def ways_on_rank(group, lab, seed, rank):
    """This rank's rows: each way with TP and SP, against one device."""
    numbers, rows = torch.Generator().manual_seed(seed + 1), []
    x, dy = (torch.randn(1, TOKENS, HIDDEN, generator=numbers) for _ in range(2))
    one = lora_mlp(lab, seed, HIDDEN, FEATURES, rank)
    right = one(x.requires_grad_())
    right.backward(dy)
    for way, parallel in itertools.product(WAYS, (False, True)):
        model = parallel_mlp(lab, one, group, way, parallel)
        tokens = partial(share, dim=1 if parallel else None, group=group)
        mine = tokens(x).requires_grad_()
        with Traffic() as forward:
            with Kept(*model.up.parameters()) as kept:
                inside = model.up(mine)
            y = mine + model.down(F.gelu(inside))
        with Traffic() as backward:
            y.backward(tokens(dy))
        with Traffic() as step:
            lab.sum_partial_gradients([model.up, model.down], group)
        pairs = [(y, tokens(right)), (mine.grad, tokens(x.grad))]
        for layer, full in (model.up, one.up), (model.down, one.down):
            for name, dim in layer.cut.items():
                grad = getattr(full, name).weight.grad
                pairs.append((getattr(layer, name).grad, share(grad, dim, group)))
        moved = [{op: sent for op, (_, sent) in t.ops.items()} for t in (forward, backward, step)]
        ops = ("all_gather", "reduce_scatter") if parallel else ("all_reduce",)
        base = Counter(dict.fromkeys(ops, 4 * TOKENS * HIDDEN))  # what the frozen layers send
        row = {"ranks": group.size(), "rank": group.rank(), "way": way}
        row |= {"sequence_parallel": parallel, "step": moved[2], "kept": kept.bytes}
        row["error"] = max(relative_error(a, b) for a, b in pairs)
        row["forward"], row["backward"] = (dict(Counter(sent) - base) for sent in moved[:2])
        row["trained"] = sum(p.numel() for p in model.parameters() if p.requires_grad)
        rows.append(row)
    return rows


def short(ops):
    """{op: bytes} in a few letters: AG 1920, RS 1920."""
    letters = {"all_reduce": "AR", "all_gather": "AG", "reduce_scatter": "RS"}
    return ", ".join(f"{letters[op]} {sent}" for op, sent in sorted(ops.items())) or "-"


def asked(rows):
    """The row of ways() that PREDICT asks about: SHARDED over 3 ranks, with TP."""
    where = {"ranks": 3, "way": SHARDED, "sequence_parallel": False}
    return next(row for row in rows if where.items() <= row.items())


def ways(lab, args):
    """Every way against one device: (rows, what is off)."""
    r, rows = args.lora_rank, []
    for world in 2, 3:
        ranks = on_ranks(world, ways_on_rank, lab, args.seed, r)
        rows += [row for case in zip(*ranks) for row in case]
    print(f"\nMLP {HIDDEN} -> {FEATURES} -> {HIDDEN}, r = {r}, {TOKENS} tokens: the adapters add")
    lines = [["ranks", "way", "", "off by", "forward, bytes", "backward", "once a step"]]
    lines[0] += ["kept", "trained"]
    for row in rows:
        if row["rank"] == 0:
            where = row["ranks"], row["way"], "SP" if row["sequence_parallel"] else "TP"
            sent = [short(row[when]) for when in ("forward", "backward", "step")]
            if (row["ranks"], row["way"]) == (3, SHARDED):
                sent[:2] = "??"  # PREDICT asks; forward and SP have the same number
            lines.append([*where, f"{row['error']:.0e}", *sent, row["kept"], row["trained"]])
    table(*lines)
    print("\n  AR all-reduce, AG all-gather, RS reduce-scatter; on the wire AR is RS and AG")
    print("  ?: the lab asks you, below")
    print("  off by: y, dx and every gradient; kept: bytes, by the column parallel layer")
    worst = max(row["error"] for row in rows)
    return rows, [] if worst < 1e-5 else [f"off by {worst:.0e} against one device"]


def task(lab, step):
    """Step's x (1, 24, h), what y should be, and the weight (1, 24, 1) of each token in the loss.

    y is the model's with other adapters than it starts with. Only the second half of the tokens
    counts, as in fine-tuning on answers, where the prompt is masked.
    """
    x = torch.randn(1, 24, SMALL[0], generator=torch.Generator().manual_seed(step))
    weight = torch.ones(1, 24, 1)
    weight[:, :12] = 0
    with torch.no_grad():
        return x, lora_mlp(lab, 0, *SMALL)(x), weight / weight.sum() / SMALL[0]


def weighted_loss(model, x, target, weight):
    """The rank's part of the mean square error: what the ranks have together adds up to it."""
    return (weight * (model(x) - target).square()).sum()


def student(lab):
    """The model that trains: the same base, and B at zero."""
    model = lora_mlp(lab, 0, *SMALL)
    for layer in model.up, model.down:
        nn.init.kaiming_uniform_(layer.lora_A.weight, a=5**0.5)
        nn.init.zeros_(layer.lora_B.weight)
    return model


def train(lab, model, tokens, finish, group):
    """(losses of the steps, optimizer). tokens(x): the rank's; finish(): done before AdamW."""
    adamw = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LEARN)
    losses = []
    for step in range(STEPS):
        loss = weighted_loss(model, *map(tokens, task(lab, step)))
        adamw.zero_grad()
        loss.backward()
        finish()
        adamw.step()
        losses.append((loss.detach() if group is None else all_reduce(loss.detach(), group)).item())
    return losses, adamw


def exported_loss(lab, adapters):
    """Loss on held out tokens of one device's model with the adapters (up, down) merged into it."""
    model = student(lab)
    up, down = (lab.merge_adapter(m, a, m.scale) for m, a in zip((model.up, model.down), adapters))
    with torch.no_grad():
        return weighted_loss(MLP(up, down), *task(lab, HELD_OUT)).item()


def train_on_rank(group, lab, seed, summed):
    """A run APART with sequence parallelism; summed: whether sum_partial_gradients is called."""
    torch.manual_seed(seed)
    model = parallel_mlp(lab, student(lab), group, APART, True)
    tokens = partial(share, dim=1, group=group)
    layers = [model.up, model.down]
    summing = partial(lab.sum_partial_gradients, layers, group)
    losses, adamw = train(lab, model, tokens, summing if summed else lambda: None, group)
    run = {"losses": losses}
    run["state"] = sum(t.numel() for s in adamw.state.values() for t in s.values() if t.dim())
    with torch.no_grad():
        loss = weighted_loss(model, *map(tokens, task(lab, HELD_OUT)))
        run["held_out"] = all_reduce(loss, group).item()
    replicas = model.up.lora_A.detach(), model.down.lora_B.detach()
    means = [all_reduce(p, group) / group.size() for p in replicas]
    drift = [torch.norm(p - mean) / torch.norm(mean) for p, mean in zip(replicas, means)]
    run["drift"] = max(drift).item()
    run["exported"] = exported_loss(lab, [lab.full_adapter(layer) for layer in layers])
    run["frozen"] = all(p.grad is None for p in model.parameters() if not p.requires_grad)
    return run


def training(lab, args):
    """Training with and without the sum: ({run: result}, what is off)."""
    torch.manual_seed(args.seed)
    model = student(lab)
    losses, _ = train(lab, model, lambda x: x, lambda: None, None)
    held_out = weighted_loss(model, *task(lab, HELD_OUT)).item()
    one = {"losses": losses, "held_out": held_out, "exported": held_out, "drift": 0.0}
    good = on_ranks(2, train_on_rank, lab, args.seed, True)[0]
    bad = on_ranks(2, train_on_rank, lab, args.seed, False)[0]
    runs = {"one device": one, "SP, summed": good, "SP, not summed": bad}
    print(f"\n{STEPS} steps of AdamW, {APART}, SP on 2 ranks; only answers count in the loss")
    lines = [["", "first loss", f"loss {STEPS}", "held out", "saved by rank 0", "replicas differ"]]
    for name, run in runs.items():
        found = run["losses"][0], run["losses"][-1], run["held_out"], run["exported"]
        lines.append([name, *(f"{loss:.6f}" for loss in found), f"{run['drift']:.0e}"])
    table(*lines)
    print("\n  held out: the model as it stands on the ranks; saved: merged, on one device")
    off = []
    same = partial(math.isclose, rel_tol=1e-3)  # many steps make rounding larger
    if not all(map(same, good["losses"], losses)):
        off.append("summed: other losses than one device's")
    if not same(good["exported"], held_out):
        off.append("summed: what is saved is not what was trained")
    return runs, off


def experiment(lab, args):
    """Both: {"ways": rows, "training": runs, "failed": what is off}."""
    rows, first = ways(lab, args)
    runs, second = training(lab, args)
    return {"ways": rows, "training": runs, "failed": first + second}


def draw(results, path):
    """Who holds what, what the adapters send, and the loss without the sum."""
    rows = [row for row in results["ways"] if row["rank"] == 0 and row["ranks"] == 2]
    with picture(path, [["held", "sent"], ["training"] * 2], (11, 9), height_ratios=[5, 4]) as axes:
        draw_held(axes["held"])
        draw_sent(axes["sent"], rows)
        draw_training(axes["training"], results["training"])


def draw_held(axis):
    """A and B of both layers in the three ways, in the colours of 3 ranks; grey: all on all."""
    r, i, o, P = 3, 6, 9, 3
    notes = {JOINED: "sum its gradient", APART: "sum it under SP only", SHARDED: "nothing to sum"}
    for place, way in enumerate(WAYS):
        y = -12 * place
        free = 0 if way == SHARDED else None
        draw_matrix(axis, 5, y + 6, r, i, P, free)  # column: A by rank features, B by outputs
        draw_matrix(axis, 13, y + 9, o, r, P, 0)
        draw_matrix(axis, 24, y + 6, r, i, P, 1)  # row: A by inputs, B by rank features
        draw_matrix(axis, 32, y + 9, o, r, P, None if free is None else 1)
        axis.text(-0.5, y + 4.5, way, weight="bold", va="center", ha="right")
        axis.text(10.5, y - 0.3, notes[way], ha="center", va="top", fontsize=8)
        axis.text(29.5, y - 0.3, notes[way], ha="center", va="top", fontsize=8)
    for x, name in ((8, "A"), (14.5, "B"), (27, "A"), (33.5, "B")):
        axis.text(x, 9.6, name, ha="center", style="italic")
    axis.text(20, 11.5, "column parallel                    row parallel", ha="center")
    for rank, colour in enumerate(RANKS[:3]):
        axis.text(2 + 8 * rank, -29, f"rank {rank}", color=colour, weight="bold")
    axis.text(26, -29, "all of it on every rank", color="0.5", weight="bold")
    axis.set(xlim=(-8, 45), ylim=(-30, 14), aspect="equal")
    axis.set_title("Three ways to cut an adapter", loc="left")
    axis.axis("off")


def draw_sent(axis, rows):
    """Bytes on the wire that the adapters add on rank 0 of 2: each direction, once a step."""
    left = [0] * len(rows)
    for when, colour in {"forward": "0.75", "backward": "0.45", "step": RED}.items():
        sent = [row[when].items() for row in rows]
        wire = [sum(n if op == "all_reduce" else n / 2 for op, n in ops) / 2**10 for ops in sent]
        axis.barh(range(len(rows)), wire, left=left, color=colour)
        left = [a + b for a, b in zip(left, wire)]
    names = [f"{row['way']}\n{'SP' if row['sequence_parallel'] else 'TP'}" for row in rows]
    axis.set_yticks(range(len(rows)), names)
    axis.invert_yaxis()
    axis.set(xlabel="KiB on the wire, rank 0 of 2", xlim=(0, 1.15 * max(left)))
    axis.set_title("What the adapters of an MLP send", loc="left")
    axis.legend(["forward", "backward", "once a step"], frameon=False, loc="lower right")


def draw_training(axis, runs):
    """Losses of the three runs, and what the adapter saved by rank 0 gives on one device."""
    styles = {"one device": ("black", 5, "-"), "SP, summed": (SKY, 2, "-")}
    for name, run in runs.items():
        colour, width, dash = styles.get(name, (RED, 2, "--"))
        axis.plot(run["losses"], dash, color=colour, lw=width, label=name)
        axis.plot(len(run["losses"]) + 4, run["exported"], "o", color=colour, ms=4 + width)
    axis.set(yscale="log", ylabel="loss", xlabel="step; dots: what rank 0 saves, held out tokens")
    axis.yaxis.set(major_formatter="{x:g}", minor_formatter="{x:g}")
    axis.set_title("The same losses, and another adapter saved", loc="left")
    axis.legend(frameon=False)


PREDICT = (
    f"{TOKENS} tokens, {HIDDEN} -> {FEATURES} -> {HIDDEN} features, r = {{lora_rank}}, way "
    "SHARDED over 3 ranks: how many bytes does a backward all-gather for the adapters alone?",
    "N ceil(r/P) P numbers of 4 bytes (message bytes): the row parallel layer's, zeros included",
    lambda results: asked(results["ways"])["backward"]["all_gather"],
)


def add_options(parser):
    """The option of this lab's own."""
    parser.add_argument("--lora-rank", type=positive, default=8, metavar="R", help="r (8)")
