"""What the finished lab 3 shows: both ways of each pitfall, let loose, and what the loss says.

Where there is something to train it is a tiny LLaMA of Hugging Face's, compared with one device;
else the exercise's check, which is given both ways.
"""

import importlib.metadata
import math
from functools import cache, partial
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from labs.kit.collectives import Exchange, all_gather, reduce_scatter
from labs.kit.harness import Traffic, Wrong, on_ranks, table
from labs.kit.judge import judge
from labs.kit.pictures import BLUE, GREY, RED, picture
from labs.kit.tools import subgroup
from labs.lab3_pitfalls.check import CHECKS, EXERCISES, IGNORE, TOLERANCE, finished
from labs.lab3_pitfalls.watching import loss_curve

RIGHT, WRONG = 1e-5, 1e-4  # error of a right way at most, of a wrong way at least
ASKED = "f_per_projection"  # what the question at the end is about
HIDDEN, BATCH, LENGTH = 64, 2, 64  # of the LLaMA


def gather_tokens(x, group):
    """(b, heads, s/P, d) -> (b, heads, s, d); backward: the sum over the ranks, of own tokens."""
    there, back = (partial(f, dim=2, group=group) for f in (all_gather, reduce_scatter))
    return Exchange.apply(x, there, back)


def tiny_llama(seed):
    """Two layers, tied weights, as many KV heads as heads: q, k and v are square."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 192, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 8, "vocab_size": 256}
    return LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=True, initializer_range=0.1))


def tokens(seed):
    """(b, s)"""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (BATCH, LENGTH), generator=generator)


@cache
def one_device(seed):
    """Loss and {name: gradient} of the untouched model."""
    model, ids = tiny_llama(seed), tokens(seed)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


def deviation(model, loss, group, seed):
    """{"loss", "error", "seen"} of a training step, relative to one device.

    error: ||gradient - one device's|| / ||one device's||, over all parameters and ranks.
    """
    right_loss, gradients = one_device(seed)
    sums = torch.zeros(2)
    for name, parameter in model.named_parameters():
        if name in gradients:  # not: a head that on one device is the embedding
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            grad = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
            right = gradients[name]
            for dim in range(grad.dim()):
                if grad.shape[dim] != right.shape[dim]:
                    right = right.chunk(group.size(), dim)[group.rank()]
            sums += torch.stack([(grad - right).square().sum(), right.square().sum()])
    wrong, right = finished.all_reduce(sums, group).tolist()
    error, loss = math.sqrt(wrong / right), abs(loss - right_loss) / right_loss
    return {"loss": loss, "error": error, "seen": f"gradient {error:.2g} off"}


def tensor_parallel(way, group, seed):
    """A step of the LLaMA cut as in tp.py, head whole. 2 all-reduces a layer are needed."""
    model, ids = tiny_llama(seed), tokens(seed)
    rank, world = group.rank(), group.size()
    cut, enter, leave = map(way.get, ("transposed_weights", "f_per_projection", "returned_tuples"))
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for linear in (attention.q_proj, attention.k_proj, attention.v_proj):
            linear.weight = nn.Parameter(cut(linear.weight.detach(), rank, world))
        for linear in (mlp.gate_proj, mlp.up_proj):
            linear.weight = nn.Parameter(linear.weight.detach().chunk(world)[rank].clone())
        for linear in (attention.o_proj, mlp.down_proj):  # row parallel
            linear.weight = nn.Parameter(linear.weight.detach().chunk(world, dim=1)[rank].clone())
        for block in (attention, mlp):
            enter(block, group)
            block.register_forward_hook(lambda block, args, out: leave(out, group))
    loss = model(input_ids=ids, labels=ids).loss
    with Traffic() as traffic:
        loss.backward()
    seen = deviation(model, loss.item(), group, seed)
    calls, moved = (x / len(model.model.layers) for x in traffic.ops.get("all_reduce", [0, 0]))
    text = f"{seen['seen']}, {calls:g} all-reduces a layer"
    seen |= {"gradient": seen["error"], "bytes": int(moved), "seen": text}
    return seen | {"error": max(calls / 2 - 1, seen["error"])}


def sequence_parallel(way, group, seed):
    """A step of the LLaMA with its sequence cut, k and v gathered in attention."""
    from transformers import AttentionInterface

    model, ids = tiny_llama(seed), tokens(seed)
    rank, world = group.rank(), group.size()

    def attention(module, q, k, v, attention_mask, scaling, **kwargs):  # q (b, heads, s/P, d)
        k, v = gather_tokens(k, group), gather_tokens(v, group)  # (b, heads, s, d)
        seen = way["local_mask"](rank * q.shape[2], q.shape[2], k.shape[2])
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scaling)
        return out.transpose(1, 2).contiguous(), None

    AttentionInterface.register("gathered", attention)
    model.set_attn_implementation("gathered")
    mine = ids.chunk(world, dim=1)[rank]  # (b, s/P)
    own = way["local_positions"](LENGTH, rank, world)[None]
    logits = model(input_ids=mine, position_ids=own).logits  # (b, s/P, v)
    targets = torch.cat([way["chunk_boundary"](ids, r, world) for r in range(world)], dim=1)
    loss, problem = way["loss_without_graph"](logits, targets, group), None
    try:
        loss.backward()
    except RuntimeError as found:  # it has no graph: there is no gradient at all
        problem = f"RuntimeError: {found}"
    for parameter in model.parameters():  # whole on every rank, but each saw its own tokens only
        if parameter.grad is not None:
            parameter.grad = finished.all_reduce(parameter.grad, group)
    seen = deviation(model, loss.item(), group, seed)
    text = f"{seen['seen']}, {(targets != IGNORE).sum()} of {BATCH * (LENGTH - 1)} targets"
    return seen | {"seen": problem or text}


def try_transposed_weights(way, group, seed):
    """In q, k and v, which are square here; and in gate_proj, which is not."""
    seen, gate = tensor_parallel(way, group, seed), torch.ones(192, HIDDEN)
    try:
        F.linear(torch.ones(1, HIDDEN), way["transposed_weights"](gate, group.rank(), group.size()))
    except RuntimeError:
        seen["seen"] += "; (192, 64) raises"
    return seen


def try_untied_weights(way, group, seed):
    """Embedding and head of the LLaMA cut by the vocabulary."""
    model, ids = tiny_llama(seed), tokens(seed)
    plan = {"model.embed_tokens": RowwiseParallel(input_layouts=Replicate())}
    plan["lm_head"] = ColwiseParallel(output_layouts=Replicate())
    model = way["untied_weights"](model, DeviceMesh.from_group(group, "cpu"), plan)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    seen = deviation(model, loss.item(), group, seed)
    tables = len({id(model.lm_head.weight), id(model.model.embed_tokens.weight)})
    return seen | {"seen": f"{seen['seen']}; {tables} of (v, h) kept"}


def try_adam_hides_scale(way, group, seed):
    """Ten steps of the LLaMA with right gradients, and with gradients times 2.

    loss: how far the loss curves are apart at most. error: the gradient's, 1, if that is not seen.
    """

    def losses(scale):
        model, ids = tiny_llama(seed), tokens(seed)
        optimizer = way["adam_hides_scale"](model.parameters())
        return loss_curve(model, optimizer, lambda m: m(input_ids=ids, labels=ids).loss, scale, 10)

    right, double = losses(1), losses(2)
    apart = ((double - right) / right).abs().max().item()
    seen = f"gradients x 2: loss curves part by {apart:.2g}"
    return {"loss": apart, "error": 1.0 if apart <= 0.01 else 0.0, "seen": seen}


TRIALS = {  # how both ways of a pitfall are let loose, on 2 ranks; of the others the check does it
    "transposed_weights": try_transposed_weights,
    "untied_weights": try_untied_weights,
    "f_per_projection": tensor_parallel,
    "returned_tuples": tensor_parallel,
    "local_positions": sequence_parallel,
    "local_mask": sequence_parallel,
    "chunk_boundary": sequence_parallel,
    "loss_without_graph": sequence_parallel,
    "adam_hides_scale": try_adam_hides_scale,
}
RANKS = {name: 2 if name in TRIALS else world for name, (_, world) in CHECKS.items()}


def let_loose(lab, name, kind, group, seed):
    """{"loss", "error", "seen"} of the wrong or the right way, all others being right."""
    way = getattr(lab, f"{kind}_{name}")
    ways = {other: getattr(lab, f"right_{other}") for other in CHECKS} | {name: way}
    seen = {"loss": None, "error": 0.0}
    try:
        if name in TRIALS:
            return TRIALS[name](ways, group, seed)
        changed = SimpleNamespace(**vars(lab) | {f"right_{name}": way})
        what = EXERCISES[name][0], finished, ([], {"": ""}), TOLERANCE  # no hints: no mistakes
        return seen | {"seen": judge(name, *what, changed, group, seed)}
    except Wrong as wrong:
        return seen | {"error": 1.0, "seen": wrong.found}
    except Exception as problem:  # what the wrong way is there to show
        first = str(problem).partition("\n")[0]
        return seen | {"error": None, "seen": f"{type(problem).__name__}: {first}"}


def try_all(group, lab, names, seed):
    """On this rank: {name: {"wrong", "right": what was seen}}."""
    rows = {}
    for name in names:
        rows[name] = row = {}
        for kind in ("wrong", "right"):
            alone = [group.rank()] if RANKS[name] == 1 else None
            own = subgroup(group, 20, alone)  # what goes wrong in it stays in it
            if group.rank() < RANKS[name]:
                row[kind] = let_loose(lab, name, kind, own, seed)
    return rows


def size(seen):
    """How wrong it went; what raised went wrong altogether."""
    return math.inf if seen["error"] is None else seen["error"]


def short(text, width=48):
    """A text that fits a table's column."""
    return text if len(text) <= width else text[: width - 3] + "..."


def experiment(lab, args):
    """Both ways of each pitfall, and what is seen: {"versions", "pitfalls", "failed"}."""
    names = list(dict.fromkeys([args.only, ASKED])) if args.only else list(CHECKS)
    ranks = on_ranks(2, try_all, lab, names, args.seed, timeout=120)
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
    pitfalls, failed = {}, []
    rows = [["pitfall", "ranks", "the wrong way", "its loss", "the right way"]]
    for name in names:
        row = pitfalls[name] = {}
        for kind in ("wrong", "right"):  # of the rank that is worst off
            row[kind] = max((rank[name][kind] for rank in ranks if kind in rank[name]), key=size)
        loss, wrong, right = row["wrong"]["loss"], row["wrong"]["seen"], row["right"]["seen"]
        row["verdict"] = "ok"
        if not size(row["right"]) <= RIGHT:
            row["verdict"] = "right way fails"
            failed.append(f"{name}: {right}")
            right = f"FAIL: {right}"
        elif size(row["wrong"]) < WRONG:  # it does no harm here
            row["verdict"] = "no longer"
            wrong = f"no longer in torch {versions['torch']}: {wrong}"
        off = "" if loss is None else f"{loss:.1g} off"
        rows.append([name, RANKS[name], short(wrong), off, short(right)])
    table(*rows)
    print(f"\n  with torch {versions['torch']}, transformers {versions['transformers']}")
    return {"versions": versions, "pitfalls": pitfalls, "failed": failed}


def draw(results, path):
    """For each pitfall with numbers, how far the loss is off beside how far the gradient is."""
    floor, rows = 1e-8, []  # float32: below it nothing can be seen
    for name, row in results["pitfalls"].items():
        loss, error = row["wrong"]["loss"], row["wrong"]["error"]
        if loss is not None and name != ASKED:  # that one costs, it is not wrong
            rows.append((max(loss, floor), error, name))
    rows.sort(key=lambda row: row[1] / row[0])
    places = range(len(rows))
    losses, errors, names = zip(*rows) if rows else ((), (), ())
    with picture(path, [["pitfalls"]], (9, 1.8 + 0.45 * len(rows))) as axes:
        axis = axes["pitfalls"]
        axis.hlines(places, losses, errors, color=GREY, lw=2, zorder=1)
        axis.scatter(losses, places, s=70, color=BLUE, label="the loss is off by")
        axis.scatter(errors, places, s=70, color=RED, marker="D", label="the gradient is off by")
        axis.set_yticks(places, names)
        axis.set(xscale="log", xlim=(floor / 2, 10), xlabel="relative error (1e-8: exact)")
        axis.set_title("What the loss would have shown, and what is wrong", loc="left")
        axis.set_axisbelow(True)
        axis.grid(axis="x", color="#dddddd", lw=0.5)
        axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=2, frameon=False)


PREDICT = (
    f"with {BATCH} sequences of {LENGTH} tokens, {HIDDEN} float32 numbers a token: how many "
    "bytes does a layer's backward all-reduce, if q, k, v, gate and up have an f each?",
    "5 b s h numbers of 4 bytes (message bytes); with one f a block 2 b s h",
    lambda results: results["pitfalls"][ASKED]["wrong"]["bytes"],
)


def add_options(parser):
    """The lab's own option."""
    parser.add_argument("--only", metavar="NAME", choices=CHECKS, help="let one pitfall loose")
