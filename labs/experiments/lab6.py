"""What the finished lab 6 shows: what each way sends, a forgotten sum, a plan that leaks."""

import importlib.util
import itertools
import math
from collections import Counter
from functools import partial

import torch
import torch.nn.functional as F
from checks import lab6 as checks
from checks.lab2 import Kept
from checks.lab6 import APART, JOINED, MLP, SHARDED, WAYS, all_reduce, share
from cli import positive
from experiments.lab2 import COLOURS
from harness import Traffic, on_ranks, table
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

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


def peft_mlp(model, rank):
    """The same MLP with peft's own layers."""
    from peft import LoraConfig, get_peft_model

    plain = MLP(nn.Linear(HIDDEN, FEATURES), nn.Linear(FEATURES, HIDDEN))
    adapted = {"r": rank, "lora_alpha": 2 * rank, "target_modules": ["up", "down"]}
    theirs = get_peft_model(plain, LoraConfig(**adapted, lora_dropout=0.0)).base_model.model
    for mine, layer in (model.up, theirs.up), (model.down, theirs.down):
        layer.base_layer.load_state_dict(mine.state_dict(), strict=False)
        layer.lora_A["default"].weight.data.copy_(mine.lora_A.weight)
        layer.lora_B["default"].weight.data.copy_(mine.lora_B.weight)
    return theirs


def inputs(seed):
    """x and dy (1, tokens, hidden) of the first experiment."""
    numbers = torch.Generator().manual_seed(seed + 1)
    return [torch.randn(1, TOKENS, HIDDEN, generator=numbers) for _ in range(2)]


def reference(model, seed):
    """{name: tensor}: y, dx, every adapter's gradient on one device, peft's layers or the lab's."""
    x, dy = inputs(seed)
    x.requires_grad_()
    y = model(x)
    y.backward(dy)
    grads = {name.replace(".default", ""): p.grad for name, p in model.named_parameters()}
    return {"y": y.detach(), "dx": x.grad, **grads}


def mlp_messages(way, parallel, rank, world):
    """({op: bytes} forward, backward) of such an MLP's two layers."""
    where = way, parallel, TOKENS, HIDDEN, rank, world
    columns, rows = checks.expected_messages(True, *where), checks.expected_messages(False, *where)
    return [column + row for column, row in zip(columns, rows)]


def ways_on_rank(group, lab, seed, rank, references):
    """This rank's rows: each way with TP and SP, against each reference, {name: reference()}."""
    world, (x, dy), rows = group.size(), inputs(seed), []
    for way, parallel in itertools.product(WAYS, (False, True)):
        one = lora_mlp(lab, seed, HIDDEN, FEATURES, rank)
        model = parallel_mlp(lab, one, group, way, parallel)
        layers = {"up": model.up, "down": model.down}
        tokens = partial(share, dim=1 if parallel else None, group=group)
        mine = tokens(x).requires_grad_()
        with Traffic() as forward:
            with Kept(*model.up.parameters()) as kept:
                inside = model.up(mine)
            y = mine + model.down(F.gelu(inside))
        with Traffic() as backward:
            y.backward(tokens(dy))
        with Traffic() as step:
            lab.sum_partial_gradients(layers.values(), group)
        parts = {"y": (y.detach(), tokens), "dx": (mine.grad, tokens)}
        for name, layer in layers.items():
            for factor, dim in layer.cut.items():
                cut = partial(share, dim=dim, group=group)
                parts[f"{name}.{factor}.weight"] = getattr(layer, factor).grad, cut
        errors = {}
        for source, right in references.items():
            pairs = [(part, cut(right[name])) for name, (part, cut) in parts.items()]
            off = [torch.norm(a - b) / torch.norm(b).clamp(min=1e-9) for a, b in pairs]
            errors[source] = max(off).item()
        moved = [{op: sent for op, (_, sent) in t.ops.items()} for t in (forward, backward, step)]
        base = mlp_messages(JOINED, parallel, rank, world)
        row = {"ranks": world, "rank": group.rank(), "way": way, "sequence_parallel": parallel}
        row |= {"errors": errors, "step": moved[2], "kept": kept.bytes}
        row["forward"], row["backward"] = (dict(Counter(a) - b) for a, b in zip(moved, base))
        row["trained"] = sum(p.numel() for p in model.parameters() if p.requires_grad)
        rows.append(row)
    return rows


def short(ops):
    """{op: bytes} in a few letters: AG 1920, RS 1920."""
    letters = {"all_reduce": "AR", "all_gather": "AG", "reduce_scatter": "RS"}
    return ", ".join(f"{letters[op]} {sent}" for op, sent in sorted(ops.items())) or "-"


def ways(lab, args):
    """Every way against one device, and against peft: (rows, whether peft, what is off)."""
    seed, r, rows = args.seed, args.lora_rank, []
    model = lora_mlp(lab, seed, HIDDEN, FEATURES, r)
    references = {"one device": reference(model, seed)}
    installed = importlib.util.find_spec("peft") is not None
    if installed:
        references["peft"] = reference(peft_mlp(model, r), seed)
    for world in 2, 3:
        ranks = on_ranks(world, ways_on_rank, lab, seed, r, references)
        rows += [row for case in zip(*ranks) for row in case]
    print(f"\nMLP {HIDDEN} -> {FEATURES} -> {HIDDEN}, r = {r}, {TOKENS} tokens: the adapters add")
    lines = [["ranks", "way", "", "off by", "forward, bytes", "backward", "once a step"]]
    lines[0] += ["kept", "trained"]
    for row in rows:
        if row["rank"] == 0:
            where = row["ranks"], row["way"], "SP" if row["sequence_parallel"] else "TP"
            sent = (short(row[when]) for when in ("forward", "backward", "step"))
            off = f"{row['errors']['one device']:.0e}"
            lines.append([*where, off, *sent, row["kept"], row["trained"]])
    table(*lines)
    print("\n  AR all-reduce, AG all-gather, RS reduce-scatter; on the wire AR is RS and AG")
    print("  off by: y, dx and every gradient; kept: bytes, by the column parallel layer")
    worst = {name: max(row["errors"][name] for row in rows) for name in references}
    seen = f"off by {worst['peft']:.0e}" if installed else "not run, peft is not installed"
    print(f"  against peft's layers: {seen}")
    off = [f"off by {e:.0e} against {name}" for name, e in worst.items() if not e < 1e-5]
    return rows, installed, off


def task(lab, step, answer):
    """Step's x (1, 24, h), what y should be, and the weight (1, 24, 1) of each token in the loss.

    y is the model's with other adapters than it starts with. answer: only the second half of the
    tokens counts, as in fine-tuning on answers, where the prompt is masked.
    """
    x = torch.randn(1, 24, SMALL[0], generator=torch.Generator().manual_seed(step))
    weight = torch.ones(1, 24, 1)
    weight[:, :12] *= not answer
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


def train(lab, model, answer, tokens, finish, group):
    """(losses of the steps, optimizer). tokens(x): the rank's; finish(): done before AdamW."""
    adamw = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LEARN)
    losses = []
    for step in range(STEPS):
        loss = weighted_loss(model, *map(tokens, task(lab, step, answer)))
        adamw.zero_grad()
        loss.backward()
        finish()
        adamw.step()
        losses.append((loss.detach() if group is None else all_reduce(loss.detach(), group)).item())
    return losses, adamw


def exported_loss(lab, adapters, answer):
    """Loss on held out tokens of one device's model with the adapters (up, down) merged into it."""
    model = student(lab)
    pairs = zip((model.up, model.down), adapters)
    layers = (lab.merge_adapter(one, adapter, one.scale) for one, adapter in pairs)
    with torch.no_grad():
        return weighted_loss(MLP(*layers), *task(lab, HELD_OUT, answer)).item()


def train_on_rank(group, lab, seed, answer, summed):
    """A run APART with sequence parallelism; summed: whether sum_partial_gradients is called."""
    torch.manual_seed(seed)
    model = parallel_mlp(lab, student(lab), group, APART, True)
    tokens = partial(share, dim=1, group=group)
    layers, first = [model.up, model.down], []

    def finish():
        own = model.down.lora_B.grad.clone()
        right = all_reduce(own, group)
        first.append((torch.norm(own - right) / torch.norm(right)).item())
        if summed:
            lab.sum_partial_gradients(layers, group)

    losses, adamw = train(lab, model, answer, tokens, finish, group)
    run = {"losses": losses, "unsummed_gradient_error": first[0]}
    run["state"] = sum(t.numel() for s in adamw.state.values() for t in s.values() if t.dim())
    with torch.no_grad():
        loss = weighted_loss(model, *map(tokens, task(lab, HELD_OUT, answer)))
        run["held_out"] = all_reduce(loss, group).item()
    replicas = [p.detach() for p in (model.up.lora_A, model.down.lora_B)]
    means = [all_reduce(p, group) / group.size() for p in replicas]
    drift = [torch.norm(p - mean) / torch.norm(mean) for p, mean in zip(replicas, means)]
    run["drift"] = max(drift).item()
    run["exported"] = exported_loss(lab, [lab.full_adapter(layer) for layer in layers], answer)
    run["frozen"] = all(p.grad is None for p in model.parameters() if not p.requires_grad)
    return run


def training(lab, args):
    """Training with and without the sum: ({what counts: {run: result}}, what is off)."""
    results, off = {}, []
    same = partial(math.isclose, rel_tol=1e-3)  # many steps make rounding larger
    for counts, answer in (("all tokens", False), ("answers only", True)):
        torch.manual_seed(args.seed)
        model = student(lab)
        losses, _ = train(lab, model, answer, lambda x: x, lambda: None, None)
        held_out = weighted_loss(model, *task(lab, HELD_OUT, answer)).item()
        one = {"losses": losses, "held_out": held_out, "exported": held_out, "drift": 0.0}
        runs = results[counts] = {"one device": one}
        for name, summed in (("SP, summed", True), ("SP, not summed", False)):
            runs[name] = on_ranks(2, train_on_rank, lab, args.seed, answer, summed)[0]
        good = runs["SP, summed"]
        if not all(map(same, good["losses"], one["losses"])):
            off.append(f"{counts}, summed: other losses than one device's")
        if not same(good["exported"], one["held_out"]):
            off.append(f"{counts}, summed: what is saved is not what was trained")
    print(f"\n{STEPS} steps of AdamW, {APART}, SP on 2 ranks: with and without the sum")
    lines = [["the loss counts", "", "first loss", f"loss {STEPS}", "held out", "saved by rank 0"]]
    lines[0].append("replicas apart by")
    for counts, runs in results.items():
        for name, run in runs.items():
            losses = run["losses"][0], run["losses"][-1], run["held_out"], run["exported"]
            lines.append([counts, name, *(f"{loss:.6f}" for loss in losses), f"{run['drift']:.0e}"])
    table(*lines)
    print("\n  held out: the model as it stands on the ranks; saved: merged, on one device")
    return results, off


def translation_on_rank(group, lab, seed):
    """{translation: the plan after it, what a later model without adapters gets from that plan}."""
    mesh, found = DeviceMesh.from_group(group, "cpu"), {}
    in_place = partial(checks.translate_in_place, lab)
    ways = {"translate_to_lora": lab.translate_to_lora, "translate_in_place": in_place}
    for name, translate in ways.items():
        randn = partial(torch.randn, generator=torch.Generator().manual_seed(seed))
        compare = partial(checks.compare_dtensor, mesh=mesh, parallel=False, randn=randn)
        plan = checks.plain_plan(False)  # as a registry keeps it, for all models
        model = checks.adapted_mlps(lab, randn, 3)[:1]  # the MLP with adapters
        error, forward, backward = compare("adapted", model, styles=translate(plan, model))
        later = nn.Sequential(checks.adapted_mlps(lab, randn, 3)[1])
        try:
            plain_error, *_ = compare("plain", later, styles=plan)
            outcome = f"as on one device, off by {plain_error:.0e}"
        except AttributeError as problem:
            outcome = f"AttributeError: {problem}"
        kinds = [type(style).__name__ for style in plan.values()]
        found[name] = {"adapted_error": error, "later_model": outcome, "plan": kinds}
        found[name] |= {"forward": forward.ops, "backward": backward.ops}
    return found


def translation(lab, args):
    """The plan after translating it rightly and by class: (what was seen, what is off)."""
    found = on_ranks(2, translation_on_rank, lab, args.seed)[0]
    print("\none plan, first for a model with adapters, then for one without (DTensor, 2 ranks)")
    lines = [["", "adapted off by", "the plan afterwards", "a later model without adapters"]]
    for name, row in found.items():
        lines.append([name, row["adapted_error"], ", ".join(row["plan"]), row["later_model"]])
    table(*lines)
    later = found["translate_to_lora"]["later_model"]
    return found, [] if later.startswith("as on one") else [f"a later model: {later}"]


def experiment(lab, args):
    """All three: {"ways", "peft_installed", "training", "translation", "failed": what is off}."""
    rows, installed, first = ways(lab, args)
    (runs, second), (found, third) = training(lab, args), translation(lab, args)
    results = {"ways": rows, "peft_installed": installed, "training": runs, "translation": found}
    return results | {"failed": first + second + third}


def draw(results, path):
    """Who holds what, what the adapters send, and the loss without the sum."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(17, 5.5), width_ratios=[1.25, 1, 1])
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    draw_owned(axes[0], pyplot.Rectangle)
    draw_sent(axes[1], [row for row in results["ways"] if row["rank"] == 0 and row["ranks"] == 2])
    draw_training(axes[2], results["training"]["answers only"])
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def draw_owned(axis, rectangle):
    """A and B of both layers in the three ways, in the colours of 3 ranks; grey: all on all."""
    r, i, o = 3, 6, 9

    def matrix(x, y, height, width, dim):
        if dim is None:
            axis.add_patch(rectangle((x, y), width, height, facecolor="0.8", edgecolor="white"))
            return
        for rank, colour in enumerate(COLOURS):
            start, end = checks.split((height, width)[dim], rank, 3)
            corner = (x + start, y) if dim else (x, y + height - end)  # rows from the top
            size = (end - start, height) if dim else (width, end - start)
            axis.add_patch(rectangle(corner, *size, facecolor=colour, edgecolor="white"))

    notes = {JOINED: "sum its gradient", APART: "sum it under SP only", SHARDED: "nothing to sum"}
    for place, way in enumerate(WAYS):
        y = -12 * place
        free = 0 if way == SHARDED else None
        matrix(5, y + 3, r, i, free)  # column: A by rank features, B by outputs
        matrix(13, y, o, r, 0)
        matrix(24, y + 3, r, i, 1)  # row: A by inputs, B by rank features
        matrix(32, y, o, r, None if free is None else 1)
        axis.text(-0.5, y + 4.5, way, weight="bold", va="center", ha="right")
        axis.text(10.5, y - 0.3, notes[way], ha="center", va="top", fontsize=8)
        axis.text(29.5, y - 0.3, notes[way], ha="center", va="top", fontsize=8)
    for x, name in ((8, "A"), (14.5, "B"), (27, "A"), (33.5, "B")):
        axis.text(x, 9.6, name, ha="center", style="italic")
    axis.text(10.5, 11.5, "column parallel", ha="center")
    axis.text(29.5, 11.5, "row parallel", ha="center")
    for rank, colour in enumerate(COLOURS):
        axis.text(2 + 8 * rank, -29, f"rank {rank}", color=colour, weight="bold")
    axis.text(26, -29, "all of it on every rank", color="0.5", weight="bold")
    axis.set(xlim=(-8, 45), ylim=(-30, 14), aspect="equal")
    axis.set_title("Three ways to cut an adapter", loc="left")
    axis.axis("off")


def draw_sent(axis, rows):
    """Bytes on the wire that the adapters add on rank 0 of 2: each direction, once a step."""
    left = [0] * len(rows)
    for when, colour in {"forward": "0.75", "backward": "0.45", "step": "#D55E00"}.items():
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
    styles = {"one device": ("black", 5, "-"), "SP, summed": ("#56B4E9", 2, "-")}
    for name, run in runs.items():
        colour, width, dash = styles.get(name, ("#D55E00", 2, "--"))
        axis.plot(run["losses"], dash, color=colour, lw=width, label=name)
        axis.plot(len(run["losses"]) + 4, run["exported"], "o", color=colour, ms=4 + width)
    below = "step; dots: saved by rank 0 and merged, on held out tokens"
    axis.set(yscale="log", ylabel="loss", xlabel=below)
    axis.set_title("The same losses, and another adapter saved", loc="left")
    axis.legend(frameon=False)


PREDICT = (
    "how many bytes does the backward of a step all-gather for the adapters alone, SHARDED over 3 "
    f"ranks: {TOKENS} tokens, {HIDDEN} -> {FEATURES} -> {HIDDEN} features, r = {{lora_rank}}?",
    "N ceil(r/P) P numbers of 4 bytes (message bytes): the row parallel layer's, zeros included",
    lambda results: next(
        row["backward"]["all_gather"]
        for row in results["ways"]
        if (row["ranks"], row["way"], row["sequence_parallel"]) == (3, SHARDED, False)
    ),
)


def add_options(parser):
    """The option of this lab's own."""
    use = "r of the first experiment (8)"
    parser.add_argument("--lora-rank", type=positive, default=8, metavar="R", help=use)
