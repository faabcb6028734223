"""What the finished lab 9 shows: what fills a rank's memory in each stage, predicted and measured.

Beside the four stages PyTorch's fully_shard, on the same model and the same sequences.
"""

import gc

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

from labs.kit.alive import PARTS, AliveParts
from labs.kit.cli import whole
from labs.kit.harness import Traffic, on_ranks, table
from labs.kit.pictures import BLUE, GREEN, ORANGE, PALE, PINK, RED, picture
from labs.lab9_zero.fsdp import fully_shard_memory, shard_fully
from labs.lab9_zero.zero import EXACT, STEPS, build, finished, one_device, unit_parameters

TOKENS, SEED_OF_RANK = 96, 1000
SIZES = {"hidden_size": 60, "intermediate_size": 101, "num_hidden_layers": 4, "vocab_size": 512}
SIZES |= {"num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 12}
LARGE = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}  # Llama-3.1-8B
LARGE |= {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
LARGE |= {"vocab_size": 128256}
WORLDS = 1, 2, 4, 8, 16, 32, 64
STATE = PARTS[:4]
FSDP = "fully_shard"
WAYS = {0: "plain", 1: "ZeRO-1", 2: "ZeRO-2", 3: "ZeRO-3", FSDP: FSDP}


def prepare(lab, model, group, way):
    """(step, parts) of a model in a way: step(sequences) trains, parts() are {part: tensors}."""
    how = {"lr": 1e-2, "foreach": False}
    if way == FSDP:
        shard_fully(model, group)
        masters = list(model.parameters())
        optimizer = torch.optim.AdamW(masters, **how)

        def step(sequences):
            optimizer.zero_grad(set_to_none=False)  # as the stages' gradients, which stay
            for ids in sequences:
                (lab.loss_of(model, ids) / len(sequences)).backward()
            optimizer.step()

        units = []
    else:
        units = lab.make_units(model, group, way)
        masters = [unit.master for unit in units]
        optimizer = torch.optim.AdamW(masters, **how)

        def step(sequences):
            lab.train_step(model, units, optimizer, sequences)

    def parts():
        state = [optimizer.state[p] for p in masters]
        found = {"optimizer": [s[key] for s in state for key in ("exp_avg", "exp_avg_sq")]}
        if way == FSDP:
            return found | {"parameters": masters, "gradients": [p.grad for p in masters]}
        grads = [unit.full_grad if way < 2 else unit.shard_grad for unit in units]
        return found | {"parameters": [unit.shard for unit in units], "gradients": grads}

    return step, parts


def all_ways_on_rank(group, lab, seed):
    """{way: the largest relative error of a rank's weights after STEPS steps, tied and not}."""
    return {way: one_device_on_rank(group, lab, seed, way) for way in WAYS}


def one_device_on_rank(group, lab, seed, way):
    """The largest relative error of a rank's weights after STEPS steps in a way, tied and not."""
    rank, world, worst = group.rank(), group.size(), 0
    for tied in False, True:
        steps, model = one_device(seed, world, tied, 2), build(seed, tied)
        train, parts = prepare(lab, model, group, way)
        for step in steps:
            train(list(step.ids[rank]))
        right, units = steps[-1].weights, unit_parameters(model)
        if way == 3:
            mine = parts()["parameters"]  # the own shards; behind the last number is padding
            right = [w[rank * len(s) :][: len(s)] for w, s in zip(right, mine)]
            mine = [s[: len(w)] for s, w in zip(mine, right)]
        else:  # full_tensor() is a collective, which all ranks call in the same order
            full = DTensor.full_tensor if way == FSDP else torch.Tensor.detach
            mine = [torch.cat([full(p).flatten() for p in unit]) for unit in units]
        off = [torch.norm(a.detach() - b) / torch.norm(b) for a, b in zip(mine, right)]
        worst = max(worst, torch.stack(off).max().item())
    return worst


def memory_on_rank(group, lab, seed, way):
    """What a rank's second step takes: its peak by parts, its curve, its messages."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True))
    step, parts = prepare(lab, model, group, way)
    numbers = torch.Generator().manual_seed(seed + SEED_OF_RANK + group.rank())
    ids = torch.randint(SIZES["vocab_size"], (1, TOKENS), generator=numbers)
    step([ids])
    gc.collect()
    steps = []
    for _ in range(3):  # gloo's own thread may hold what it gathered for a moment longer
        with Traffic() as traffic, AliveParts(parts()) as one:
            step([ids])
        steps.append(one)
        dist.barrier(group)
    alive = min(steps, key=lambda one: sum(one.peak.values()))
    bins = torch.tensor(alive.curve, dtype=torch.float64).tensor_split(200)
    sent = {op: nbytes for op, (_, nbytes) in traffic.ops.items()}
    return {"peak": alive.peak, "curve": [int(b.max()) for b in bins if len(b)], "sent": sent}


def against_one_device(lab, args):
    """Each way's weights after STEPS steps: ({way: error}, what is off)."""
    ranks = on_ranks(args.ranks, all_ways_on_rank, lab, args.seed, timeout=120)
    errors = {name: max(rank[way] for rank in ranks) for way, name in WAYS.items()}
    wrong = [(name, error) for name, error in errors.items() if not error <= EXACT]
    return errors, [f"{name}: weights are off by {error:.0e}" for name, error in wrong]


def predictions(lab, rank, world, way):
    """(bytes of each part, bytes of each collective) that the formulas give."""
    config = LlamaConfig(**SIZES, tie_word_embeddings=True)
    if way == FSDP:
        return fully_shard_memory(lab, config, TOKENS, rank, world)
    memory = lab.memory(config, TOKENS, rank, world, way)
    return memory, lab.messages(lab.unit_sizes(config), world, way, 1)


def memories(lab, args):
    """Each way's peak and messages: (rows of rank 0, what is off on any rank)."""
    rows, off = [], []
    for way, name in WAYS.items():
        for rank, found in enumerate(on_ranks(args.ranks, memory_on_rank, lab, args.seed, way)):
            memory, sent = predictions(lab, rank, args.ranks, way)
            row = {"way": name, "predicted": memory, "predicted_sent": sent, **found}
            total, wanted = sum(found["peak"].values()), sum(memory.values())
            for part in STATE:
                if found["peak"][part] > memory[part]:
                    off.append(f"{name}, rank {rank}: {part} take {found['peak'][part]} bytes")
            if total > 1.05 * wanted:
                off.append(f"{name}, rank {rank}: the peak is {total} bytes, not {wanted}")
            for op, nbytes in found["sent"].items():
                if nbytes > sent.get(op, 0):
                    off.append(f"{name}, rank {rank}: {op} moves {nbytes} bytes")
            if rank == 0:
                rows.append(row)
    return rows, off


def show(errors, rows, args):
    """Print who has what at the peak, predicted and measured, and what is sent."""
    sizes = ", ".join(f"{name} {size}" for name, size in SIZES.items())
    print(f"\n{args.ranks} ranks, {TOKENS} tokens each, float32; tied LLaMA: {sizes}")
    lines = [["KiB on rank 0 at the peak", *PARTS, "sum", "predicted", "off by", "weights off by"]]
    for row in rows:
        kib = [f"{row['peak'][part] / 1024:.1f}" for part in PARTS]
        total, wanted = (sum(row[name].values()) for name in ("peak", "predicted"))
        error = f"{errors[row['way']]:.0e}"
        cells = [f"{total / 1024:.1f}", f"{wanted / 1024:.1f}", f"{total / wanted - 1:+.2%}", error]
        lines.append([row["way"], *kib, *cells])
    table(*lines)
    print(f"\n  weights off by: from one device after {STEPS} AdamW steps in float64, tied and not")
    ops = "all_reduce", "reduce_scatter", "all_gather"
    lines = [["message bytes of a step", *ops, "predicted", "wire bytes of a rank"]]
    for row in rows:
        sent, wanted = row["sent"], row["predicted_sent"]
        row["wire"] = {op: wire({op: nbytes}, args.ranks) for op, nbytes in sent.items()}
        formula = " + ".join(str(wanted[op]) for op in ops if op in wanted)
        lines.append(
            [row["way"], *(sent.get(op, 0) for op in ops), formula, round(wire(sent, args.ranks))]
        )
    table(*lines)


def wire(sent, world):
    """Bytes that leave a rank, of rings."""
    return sum((2 if op == "all_reduce" else 1) * n * (world - 1) / world for op, n in sent.items())


def scaling():
    """{stage: GiB of model state of Llama-3.1-8B on rank 0 of each of WORLDS}, predicted."""
    config = LlamaConfig(**LARGE, tie_word_embeddings=False)
    # By our memory(), because a learner's held() may make a list of all that a rank has
    found, gib = {}, 1 << 30
    for stage in range(4):
        each = [finished.memory(config, 1, 0, world, stage) for world in WORLDS]
        found[stage] = [sum(memory[part] for part in STATE) / gib for memory in each]
    print("\nllama-3.1-8b, float32: GiB of model state on rank 0, predicted")
    rows = [[WAYS[stage], *(f"{size:.1f}" for size in sizes)] for stage, sizes in found.items()]
    table(["ranks", *WORLDS], *rows)
    return found


def experiment(lab, args):
    """All of it: {"memory": rows, "errors", "scaling", "failed": what is off}."""
    errors, wrong = against_one_device(lab, args)
    rows, off = memories(lab, args)
    show(errors, rows, args)
    results = {"ranks": args.ranks, "errors": errors, "memory": rows, "scaling": scaling()}
    return results | {"failed": wrong + off}


COLOURS = dict(zip(PARTS, (BLUE, ORANGE, GREEN, PINK, PALE)))
OPS = {"all_reduce": RED, "reduce_scatter": ORANGE, "all_gather": PINK}


def draw(results, path):
    """What fills the memory, predicted beside measured; a step in time; messages; many ranks."""
    mosaic = [["peaks", "curves"], ["messages", "scaling"]]
    with picture(path, mosaic, (12, 9), width_ratios=[1.2, 1]) as axes:
        draw_peaks(axes["peaks"], results["memory"])
        draw_curves(axes["curves"], results["memory"])
        draw_messages(axes["messages"], results["memory"])
        draw_scaling(axes["scaling"], results["scaling"])
        title = f"{results['lab']}: rank 0 of {results['ranks']}, {TOKENS} tokens each"
        axes["peaks"].figure.suptitle(title)


def draw_peaks(axis, rows):
    """Two bars a way, predicted (pale) above measured, cut by what fills them."""
    for i, row in enumerate(rows):
        for name, shift, alpha in ("predicted", -0.2, 0.45), ("peak", 0.2, 1):
            left = 0
            for part in PARTS:
                size = row[name][part] / 2**20
                label = part if (i, name) == (0, "peak") else None
                look = {"color": COLOURS[part], "alpha": alpha, "edgecolor": "white"}
                axis.barh(i + shift, size, 0.36, left, label=label, **look)
                left += size
            word = "predicted" if name == "predicted" else "measured"
            axis.text(left, i + shift, f" {left:.2f} {word}", va="center", fontsize=8)
    axis.set(yticks=range(len(rows)), yticklabels=[row["way"] for row in rows])
    axis.set(xlabel="MiB at the peak of a step", title="what fills the memory")
    axis.set_xlim(0, axis.get_xlim()[1] * 1.12)
    axis.invert_yaxis()
    axis.legend(frameon=False, ncols=3, loc="upper center", bbox_to_anchor=(0.45, -0.12))


def draw_curves(axis, rows):
    """The bytes alive during one step, drawn so that the peaks of all ways are at 0."""
    for row, colour in zip(rows, ("black", BLUE, GREEN, RED, PINK)):
        mib = [size / 2**20 for size in row["curve"]]
        peak, style = mib.index(max(mib)), ":" if row["way"] == FSDP else "-"
        axis.plot(range(-peak, len(mib) - peak), mib, style, color=colour, label=row["way"])
    axis.set(xlabel="operations; left of 0 the forward, right backward, update", ylabel="MiB alive")
    axis.set(ylim=(0, None), title="a step: most is alive where the backward begins")
    axis.legend(frameon=False)


def draw_messages(axis, rows):
    """Wire bytes of a rank in a step, by collective."""
    for i, row in enumerate(rows):
        left = 0
        for op, colour in OPS.items():
            size = row["wire"].get(op, 0) / 2**20
            label = op.replace("_", "-") if i == 0 else None
            axis.barh(i, size, 0.6, left, color=colour, label=label, edgecolor="white")
            left += size
    axis.set(yticks=range(len(rows)), yticklabels=[row["way"] for row in rows])
    axis.set(xlabel="MiB on the wire, a rank, a step", title="what it costs in messages")
    axis.set_xlim(0, axis.get_xlim()[1] * 1.3)
    axis.invert_yaxis()
    axis.legend(frameon=False, loc="upper right")


def draw_scaling(axis, found):
    """Model state of a large model over the number of ranks."""
    for (stage, sizes), colour in zip(found.items(), ("black", BLUE, GREEN, RED)):
        axis.loglog(WORLDS, sizes, "o-", base=2, color=colour, label=WAYS[int(stage)])
    axis.axhline(80, color=PALE, linestyle="--")
    axis.text(WORLDS[-1], 80, "80 GiB", ha="right", va="bottom", color="#777777")
    axis.set(xlabel="ranks", ylabel="GiB of model state, float32")
    axis.set(title="llama-3.1-8b, predicted", xticks=WORLDS, xticklabels=WORLDS)
    axis.set(yticks=[4, 8, 16, 32, 64, 128], yticklabels=[4, 8, 16, 32, 64, 128])
    axis.legend(frameon=False)


PREDICT = (
    "how many bytes of parameters, gradients, optimizer state and gathered weights are alive on "
    "rank 0 of {ranks} at the peak of a ZeRO-3 step of that LLaMA, in float32?",
    "4 bytes x (4 shards of every unit, and the root unit once more, gathered whole)",
    lambda results: sum(
        row["peak"][part] for row in results["memory"] if row["way"] == WAYS[3] for part in STATE
    ),
)


def add_options(parser):
    """The lab's own options."""
    ranks = "of the experiments, 2 to 4 (3)"
    parser.add_argument("--ranks", type=whole(2, 4), default=3, help=ranks)
