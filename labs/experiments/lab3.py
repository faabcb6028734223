"""What the finished lab 3 shows: both ways of each pitfall, let loose, and what the loss says.

Where there is something to train it is a tiny LLaMA of Hugging Face's, compared with one device;
else the exercise's check, which is given both ways.
"""

import importlib.metadata
import math
import time
from functools import cache, partial
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from checks.lab3 import CHECKS, IGNORE, all_reduce, on_every_rank, short_lived
from experiments.lab7 import Exchange, all_gather, reduce_scatter
from harness import Traffic, Wrong, on_ranks, table
from torch import nn
from torch.distributed import _functional_collectives
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

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
    wrong, right = all_reduce(sums, group).tolist()
    error, loss = math.sqrt(wrong / right), abs(loss - right_loss) / right_loss
    return {"loss": loss, "error": error, "seen": f"gradient {error:.2g} off"}


def tensor_parallel(way, group, seed):
    """A step of the LLaMA cut as in tp.py, head whole. 2 all-reduces a layer are needed."""
    model, ids = tiny_llama(seed), tokens(seed)
    rank, world = group.rank(), group.size()
    cut, enter = way["transposed_weights"], way["f_per_projection"]
    leave = way["returned_tuples"]
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
            parameter.grad = all_reduce(parameter.grad, group)
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
        optimizer, seen = way["adam_hides_scale"](model.parameters()), []
        for _ in range(10):
            loss = model(input_ids=ids, labels=ids).loss
            optimizer.zero_grad()
            loss.backward()
            for parameter in model.parameters():
                parameter.grad *= scale
            optimizer.step()
            seen.append(loss.detach())
        return torch.stack(seen)

    right, double = losses(1), losses(2)
    apart = ((double - right) / right).abs().max().item()
    seen = f"gradients x 2: loss curves part by {apart:.2g}"
    return {"loss": apart, "error": 1.0 if apart <= 0.01 else 0.0, "seen": seen}


def try_rank_0_clock(way, group, seed):
    """Two stages: rank 0 sends at once, rank 1 receives and works for 0.2 s."""

    def step():
        if group.rank() == 0:
            dist.send(torch.ones(1000), 1, group=group)
        else:
            dist.recv(torch.empty(1000), 0, group=group)
            time.sleep(0.2)

    seconds = on_every_rank(way["rank_0_clock"](step, group), group)[0]
    seen = f"rank 0 says {seconds * 1e3:.0f} of 200 ms"
    return {"loss": None, "error": max(0.0, 1 - seconds / 0.2), "seen": seen}


def told_autograd_kwargs(group):
    """apply() takes no keywords at all"""

    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, factor):
            return x * factor

    try:
        Scale.apply(torch.ones(1), factor=2)
    except TypeError as problem:
        return True, str(problem)
    return False, "it takes those that forward() names, not **kwargs"


def told_returned_tuples(group):
    """LLaMA's attention returns 3 things"""
    model, seen = tiny_llama(0), []
    attention = model.model.layers[0].self_attn
    attention.register_forward_hook(lambda module, args, out: seen.append(len(out)))
    model(tokens(0))
    return seen == [3], f"it returns {seen[0]}"


def told_retain_grad(group):
    """requires_grad_() raises if not a leaf"""
    inner = torch.ones(1, requires_grad=True) * 2
    try:
        inner.requires_grad_()
    except RuntimeError as problem:
        return True, str(problem)
    return False, "silent, without effect; only requires_grad_(False) raises"


def told_stale_result(group):
    """.item() of an AsyncCollectiveTensor is stale"""
    dist.barrier(group)
    time.sleep(0.2 * (group.rank() == 1))
    total = _functional_collectives.all_reduce(torch.ones(1), "sum", group)
    totals = on_every_rank(total.item(), group)
    return min(totals) < group.size(), f"it waits: {totals[0]:g} of {group.size()}"


def told_parallelize_order(group):
    """it hangs on a model that is not on the device"""
    model = nn.Sequential(nn.Linear(6, 8, device="meta"))
    mesh = DeviceMesh.from_group(group, "cpu")
    begin = time.perf_counter()
    try:
        parallelize_module(model, mesh, {"0": ColwiseParallel()})
    except RuntimeError as problem:
        return True, str(problem)
    return False, f"back after {time.perf_counter() - begin:.2f} s, from meta to a CPU's mesh"


PITFALLS = {  # name: (how both ways are let loose, the ranks that takes, what is told of it)
    "transposed_weights": (try_transposed_weights, 2, None),
    "copy_without_no_grad": (None, 1, None),  # None: by its check
    "parallelize_order": (None, 2, told_parallelize_order),
    "untied_weights": (try_untied_weights, 2, None),
    "f_per_projection": (tensor_parallel, 2, None),
    "returned_tuples": (tensor_parallel, 2, told_returned_tuples),
    "autograd_kwargs": (None, 1, told_autograd_kwargs),
    "retain_grad": (None, 1, told_retain_grad),
    "local_positions": (sequence_parallel, 2, None),
    "local_mask": (sequence_parallel, 2, None),
    "chunk_boundary": (sequence_parallel, 2, None),
    "loss_without_graph": (sequence_parallel, 2, None),
    "adam_hides_scale": (try_adam_hides_scale, 1, None),
    "stale_result": (None, 2, told_stale_result),
    "adaptive_timing": (None, 2, None),
    "rank_0_clock": (try_rank_0_clock, 2, None),
}


def let_loose(lab, name, kind, group, seed):
    """{"loss", "error", "seen"} of the wrong or the right way, all others being right."""
    trial, way = PITFALLS[name][0], getattr(lab, f"{kind}_{name}")
    ways = {other: getattr(lab, f"right_{other}") for other in PITFALLS} | {name: way}
    seen = {"loss": None, "error": 0.0}
    try:
        if trial:
            return trial(ways, group, seed)
        changed = SimpleNamespace(**vars(lab) | {f"right_{name}": way})
        return seen | {"seen": CHECKS[name][0](changed, group, seed)}
    except Wrong as wrong:
        return seen | {"error": 1.0, "seen": wrong.found}
    except Exception as problem:  # what the wrong way is there to show
        first = str(problem).partition("\n")[0]
        return seen | {"error": None, "seen": f"{type(problem).__name__}: {first}"}


def try_all(group, lab, names, seed):
    """On this rank: {name: {"wrong", "right": what was seen, "told": (so it is, what is seen)}}."""
    rows = {}
    for name in names:
        _, ranks, told = PITFALLS[name]
        rows[name] = row = {}
        for kind in ("wrong", "right"):
            own = short_lived(group, 20)  # what goes wrong in it stays in it
            if group.rank() < ranks:
                row[kind] = let_loose(lab, name, kind, own, seed)
        if told:
            row["told"] = told(short_lived(group, 20))
    return rows


def size(seen):
    """How wrong it went; what raised went wrong altogether."""
    return math.inf if seen["error"] is None else seen["error"]


def short(text, width=48):
    """A text that fits a table's column."""
    return text if len(text) <= width else text[: width - 3] + "..."


def experiment(lab, args):
    """Both ways of each pitfall, and what is seen: {"versions", "pitfalls", "failed"}."""
    names = list(dict.fromkeys([args.only, ASKED])) if args.only else list(PITFALLS)
    ranks = on_ranks(2, try_all, lab, names, args.seed, timeout=120)
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
    here = f"torch {versions['torch']}, transformers {versions['transformers']}"
    pitfalls, failed = {}, []
    rows = [["pitfall", "ranks", "the wrong way", "its loss", "the right way"]]
    told = [["pitfall", "as it is told", "", f"with {here}"]]
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
        rows.append([name, PITFALLS[name][1], short(wrong), off, short(right)])
        if "told" in ranks[0][name]:
            so, seen = row["told"] = ranks[0][name]["told"]
            claim = PITFALLS[name][2].__doc__
            told.append([name, claim, "so it is" if so else "not so", short(seen, 58)])
    table(*rows)
    if len(told) > 1:
        table(*told)
    return {"versions": versions, "pitfalls": pitfalls, "failed": failed}


def draw(results, path):
    """For each pitfall with numbers, how far the loss is off beside how far the gradient is."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    floor, rows = 1e-8, []  # float32: below it nothing can be seen
    for name, row in results["pitfalls"].items():
        loss, error = row["wrong"]["loss"], row["wrong"]["error"]
        if loss is not None and name != ASKED:  # that one costs, it is not wrong
            rows.append((max(loss, floor), error, name))
    rows.sort(key=lambda row: row[1] / row[0])
    places = range(len(rows))
    losses, errors, names = zip(*rows) if rows else ((), (), ())
    figure, axis = pyplot.subplots(figsize=(9, 1.8 + 0.45 * len(rows)))
    axis.hlines(places, losses, errors, color="#999999", lw=2, zorder=1)
    axis.scatter(losses, places, s=70, color="#0072B2", label="the loss is off by")
    axis.scatter(errors, places, s=70, color="#D55E00", marker="D", label="the gradient is off by")
    axis.set_yticks(places, names)
    label = "relative to one device (1e-8 stands for exact)"
    axis.set(xscale="log", xlim=(floor / 2, 10), xlabel=label)
    axis.set_title("What the loss would have shown, and what is wrong", loc="left")
    axis.set_axisbelow(True)
    axis.grid(axis="x", color="#dddddd", lw=0.5)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=2, frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


PREDICT = (
    "how many bytes does the backward of a layer all-reduce where q, k, v, gate and up have an f "
    f"each, for {BATCH} sequences of {LENGTH} tokens, {HIDDEN} float32 numbers each?",
    "5 b s h numbers of 4 bytes (message bytes); with one f a block 2 b s h",
    lambda results: results["pitfalls"][ASKED]["wrong"]["bytes"],
)


def add_options(parser):
    """The lab's own option."""
    asked = f"let one pitfall loose, and {ASKED}, which the question is about"
    parser.add_argument("--only", metavar="NAME", choices=PITFALLS, help=asked)
