"""What the finished lab 10 shows: memory over a step; what each technique saves and costs."""

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from labs.kit.alive import Alive
from labs.kit.cli import positive
from labs.kit.harness import on_ranks, table
from labs.kit.inputs import drawn
from labs.kit.pictures import BLUE, GREEN, GREY, ORANGE, PINK, RED, SKY, picture

MIB, CHUNK, TILE, HEADS = 2**20, 128, 128, (1, 2, 4)
LAYERS, DEEP = 6, 12  # of the model; of that whose peak is to be predicted
POINTS = 300  # of a timeline
# Name, recomputation, tile, chunk of the loss: each row but the last adds one to that before
STACK = [
    ("nothing", "none", None, None),
    ("loss in chunks", "none", None, CHUNK),
    ("layers recomputed", "full", None, CHUNK),
    ("tiles", "full", TILE, CHUNK),
    ("inputs on the host", "offload", TILE, CHUNK),
    ("selective, no tiles", "selective", None, CHUNK),
]


class Timeline(Alive):
    """Alive that notes the bytes behind every operation."""

    def __init__(self):
        super().__init__()
        self.bytes = []

    def __torch_dispatch__(self, *args, **kwargs):
        out = super().__torch_dispatch__(*args, **kwargs)
        self.bytes.append(self.now())
        return out

    def points(self):
        """POINTS at most: the largest of each stretch of operations."""
        size = -(-len(self.bytes) // POINTS)
        return [max(self.bytes[i : i + size]) for i in range(0, len(self.bytes), size)]


class Host:
    """Memory beside the device's: arrays of numpy, which Alive does not count."""

    def __init__(self):
        self.bytes = 0

    def hooks(self):
        return saved_tensors_hooks(self.pack, lambda array: torch.from_numpy(array).clone())

    def pack(self, x):
        self.bytes += x.nbytes
        return x.detach().numpy().copy()


class Products(TorchDispatchMode):
    """Counts the FLOPs of matrix products: what linear layers compute, forward and backward."""

    def __init__(self):
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.name() in ("aten::mm", "aten::addmm"):  # args[-1]: (in, out)
            self.flops += 2 * out.numel() * args[-1].shape[0]
        return out


def step(lab, args, recompute, tile, chunk, layers=LAYERS):
    """A step in float32: (its row, {name: gradient})."""
    torch.manual_seed(args.seed)
    sizes = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": layers}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 2048}
    config = LlamaConfig(**sizes, tie_word_embeddings=True, attn_implementation="sdpa")
    host, products = Host(), Products()
    with Timeline() as alive, products:
        model = LlamaForCausalLM(config).train()
        named = dict(model.named_parameters())
        lab.apply_means(model, recompute, tile, hooks=host.hooks)
        ids = torch.randint(2048, (1, args.tokens))
        alive.peak, alive.bytes = alive.now(), []
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
        loss = lab.chunked_loss(model.lm_head, hidden, ids, chunk or args.tokens)
        forward = len(alive.bytes)
        loss.backward()
    row = {"peak": alive.peak, "host": host.bytes, "flops": products.flops}
    row |= {"alive": alive.points(), "forward": forward / len(alive.bytes)}
    if recompute in ("none", "full"):
        row["predicted"] = lab.predict_peak(config, args.tokens, 4, recompute, tile, chunk)
    return row, {name: p.grad for name, p in named.items()}


def stacked(lab, args):
    """The rows of STACK, printed; and what is off."""
    rows, off, right = [], [], None
    for name, *means in STACK:
        row, found = step(lab, args, *means)
        right = right or found
        errors = [(found[n] - right[n]).norm() / right[n].norm() for n in right]
        row |= {"name": name, "error": max(errors).item()}
        if row["error"] > 1e-4:  # float32: other orders of sums
            off.append(f"{name}: a gradient is off by {row['error']:.0e}")
        told = sum(row.get("predicted", {"peak": row["peak"]}).values())
        if args.tokens >= 1024 and abs(told / row["peak"] - 1) > 0.15:
            off.append(f"{name}: the prediction is {told / row['peak']:.2f} of the peak")
        rows.append(row)
    print(
        f"\nLLaMA, 6 layers, h 64, i 192, v 2048, {args.tokens} tokens, float32: each row adds one"
    )
    lines = [["", "peak, MiB", "predicted", "products", "on the host, MiB", "gradients off by"]]
    for row in rows:
        told = "-"
        if "predicted" in row:
            told = f"{sum(row['predicted'].values()) / MIB:.1f}"
        cost = f"x{row['flops'] / rows[0]['flops']:.2f}"
        sizes = f"{row['peak'] / MIB:.1f}", told, cost, f"{row['host'] / MIB:.1f}"
        lines.append([row["name"], *sizes, f"{row['error']:.0e}"])
    table(*lines)
    print("\n  products: FLOPs of matrix products in a step, against those of the first row")
    peaks = [row["peak"] for row in rows[:5]]
    if args.tokens >= 1024 and any(b > a for a, b in zip(peaks, peaks[1:])):
        off.append("a technique takes more memory than it saves")
    return rows, off


def heads_on_rank(group, lab, seed, tokens):
    """[(chunks, bytes at the peak of forward and backward)] of attention on this rank."""
    d, h, n = 16, 64, 8 * group.size()
    x = drawn(seed, 1, tokens, h).float()
    weights = [drawn(seed + i, n * d, h).float().requires_grad_() for i in range(3)]
    rows = []
    for chunks in HEADS:
        with Alive() as alive:
            own = x.clone().requires_grad_()
            lab.attend_by_chunks(own, *weights, d, chunks, group).sum().backward()
        rows.append({"chunks": chunks, "peak": alive.peak})
        for weight in weights:
            weight.grad = None
    return rows


def experiment(lab, args):
    """All of it: {"stack": rows, "heads": rows, "times_smaller": number, "failed": what is off}."""
    rows, off = stacked(lab, args)
    heads = on_ranks(2, heads_on_rank, lab, args.seed, args.tokens)[0]
    print(f"\nUlysses on 2 ranks, 16 heads of 16, {args.tokens} tokens a rank: rank 0")
    table(["chunks of heads", "peak, MiB"], *([r["chunks"], r["peak"] / MIB] for r in heads))
    if any(b["peak"] >= a["peak"] for a, b in zip(heads, heads[1:])):
        off.append("more chunks of heads take more memory")
    peaks = [step(lab, args, *means, layers=DEEP)[0]["peak"] for _, *means in (STACK[0], STACK[4])]
    return {"stack": rows, "heads": heads, "times_smaller": peaks[0] / peaks[1], "failed": off}


def draw_step(axis, rows):
    """Bytes alive over a step: a line for each technique; a dot where the forward ends."""
    for row, color in rows:
        n = len(row["alive"])
        at = [i / (n - 1) for i in range(n)]
        axis.plot(at, [x / MIB for x in row["alive"]], color=color, lw=1.5, label=row["name"])
        middle = round(row["forward"] * (n - 1))
        axis.plot(at[middle], row["alive"][middle] / MIB, "o", color=color)
    axis.set(ylim=0, xlabel="operations of the step; dot: the forward ends", ylabel="alive, MiB")
    axis.legend(frameon=False)


def draw(results, path):
    """Memory over a step, by technique; the peak of each beside the prediction; chunks of heads."""
    rows, mosaic = results["stack"], [["all", "small"], ["stack", "heads"]]
    with picture(path, mosaic, (12, 8), width_ratios=[3, 2]) as axes:
        lines = list(zip(rows, (GREY, BLUE, ORANGE, GREEN, PINK, SKY)))
        draw_step(axes["all"], lines[:3])
        axes["all"].set_title("Memory over one step, a technique more in each", loc="left")
        draw_step(axes["small"], lines[2:5])
        axes["small"].set_title("The last three, larger", loc="left")
        axis = axes["stack"]
        axis.barh(range(len(rows)), [row["peak"] / MIB for row in rows], color=BLUE)
        for y, row in enumerate(rows):
            if "predicted" in row:
                axis.plot(sum(row["predicted"].values()) / MIB, y, "d", color=RED)
        axis.set_yticks(range(len(rows)), [row["name"] for row in rows])
        axis.invert_yaxis()
        axis.set(xlabel="peak, MiB; red: predicted from shapes")
        axis.set_title("Each technique added to those above it", loc="left")
        axis = axes["heads"]
        names = [str(row["chunks"]) for row in results["heads"]]
        axis.bar(names, [row["peak"] / MIB for row in results["heads"]], color=GREY)
        axis.set(xlabel="chunks of heads", ylabel="peak, MiB")
        axis.set_title("Ulysses by chunks of heads", loc="left")


PREDICT = (
    f"with {DEEP} layers, not {LAYERS}, h 64, i 192, v 2048, {{tokens}} tokens: by what "
    "factor do chunked loss, recomputed layers, tiles and host inputs together cut the peak?",
    "(L N (10 h + 4 i) + 3 N v + weights) / (11 N h, one layer's attention, + weights + their "
    "gradients)",
    lambda results: results["times_smaller"],
)


def add_options(parser):
    """The option of this lab's own."""
    parser.add_argument("--tokens", type=positive, default=2048, metavar="N", help="N (2048)")
