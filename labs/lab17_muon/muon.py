"""Muon on one device by torch.optim.Muon, sharded matrices, small models: for lab 17."""

import math
from functools import cache
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import AdamW, Muon
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from labs.kit.compare import drawn
from labs.kit.harness import LABS, Wrong, expect, load, relative_error
from labs.kit.models import Float64, expect_exact, random_model
from labs.kit.tools import subgroup
from labs.lab17_muon import lesson as finished  # not the learner's

EXACT = 1e-9
STEPS, RATE, SEQUENCES, TOKENS = 3, 0.02, 2, 9
# Neither 2 nor 3 divides KV heads, width of the MLP, vocabulary; there are tall and wide matrices
SIZES = {"hidden_size": 20, "intermediate_size": 13, "num_hidden_layers": 2, "vocab_size": 37}
SIZES |= {"num_attention_heads": 10, "num_key_value_heads": 5, "head_dim": 4, "pad_token_id": None}
TIED = {"tie_word_embeddings": True, "attention_bias": True}
FAMILIES = {
    "LLaMA": (LlamaConfig, LlamaForCausalLM, TIED),
    "Qwen3": (Qwen3Config, Qwen3ForCausalLM, {"tie_word_embeddings": False}),
}
LAYOUTS = "ZeRO-1", "TP"
COLLECTIVES = {"everywhere": ["all_gather"], "by_owner": ["gather", "scatter"]}
COLLECTIVES |= {"at_once": ["all_to_all"]}


# ---- One device ----------------------------------------------------------------------------------


class Exact(Float64):
    """Inside, torch.optim.Muon computes in float64, too: for the proof only.

    Its Newton-Schulz casts the update to bfloat16 in one line, whatever the parameters are. Inside
    that cast is a copy; all else is torch's. casts: how often that was, so that nothing is compared
    in bfloat16 unnoticed, if another torch casts in another way.
    """

    def __init__(self):
        super().__init__()
        self.casts = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.bfloat16 or (func is torch.Tensor.to and torch.bfloat16 in args):
            self.casts += 1
            func, args = torch.Tensor.clone, args[:1]
        return super().__torch_function__(func, types, args, kwargs)


def torchs(matrix, blocks=1):
    """What torch.optim.Muon subtracts for an update (m, n), each block of rows a parameter."""
    params = [nn.Parameter(torch.zeros_like(rows)) for rows in matrix.chunk(blocks)]
    for p, rows in zip(params, matrix.chunk(blocks)):
        p.grad = rows.clone()
    with Exact() as exact:
        Muon(params, lr=1.0, weight_decay=0.0, momentum=0.0).step()
    expect(exact.casts == blocks, "torch.optim.Muon casts in another way: see muon.py")
    return -torch.cat([p.detach() for p in params])


def tiny(family, seed, **changes):
    """Hugging Face's model with random weights, in float64, the same on every rank."""
    config, causal, more = FAMILIES[family]
    return random_model(causal, config(**SIZES | more | changes), seed)


def linears(model):
    """{name: Parameter} of the layers' linears' weights, by their modules."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and module is not model.lm_head:
            found[f"{name}.weight"] = module.weight
    return found


def heads_of(model, name):
    """How many heads a linear's rows are, by its name; 1 where they are none."""
    config = model.config
    if "q_proj" in name:
        return config.num_attention_heads
    return config.num_key_value_heads if "k_proj" in name or "v_proj" in name else 1


def one_device(family, seed, world, per_head):
    """STEPS steps of torch.optim.Muon, and AdamW for the rest, on all ranks' sequences.

    ids [rank] (b, s); losses; weights, momentum {name: tensor} after the last step.
    """
    model, numbers = tiny(family, seed), torch.Generator().manual_seed(seed)
    shape = world, SEQUENCES, TOKENS
    ids = torch.randint(SIZES["vocab_size"], shape, generator=numbers)
    blocks = {}  # views of the weights: a block of rows is a parameter of torch's Muon
    for name, p in linears(model).items():
        count = heads_of(model, name) if per_head else 1
        blocks[name] = [nn.Parameter(rows) for rows in p.detach().chunk(count)]
    rest = [p for name, p in model.named_parameters() if name not in blocks]
    muon = Muon([p for parts in blocks.values() for p in parts], lr=RATE)
    adamw, losses = AdamW(rest, lr=RATE, foreach=False), []
    with Exact() as exact:
        for _ in range(STEPS):
            model.zero_grad()
            loss = finished.loss_of(model, ids.flatten(0, 1))
            loss.backward()
            losses.append(loss.item())
            for name, parts in blocks.items():
                for p, rows in zip(parts, model.get_parameter(name).grad.chunk(len(parts))):
                    p.grad = rows
            muon.step()
            adamw.step()
    counted = STEPS * sum(map(len, blocks.values()))
    expect(exact.casts == counted, "torch.optim.Muon casts in another way: see muon.py")
    momentum = {
        name: torch.cat([muon.state[p]["momentum_buffer"] for p in parts])
        for name, parts in blocks.items()
    }
    weights = {name: p.detach() for name, p in model.named_parameters()}
    return SimpleNamespace(ids=ids, losses=losses, weights=weights, momentum=momentum)


# ---- The same on ranks ---------------------------------------------------------------------------


@cache
def tp_script():
    return load(LABS.parent / "tp.py")


def parallelized(model, group):
    """(model, backward(ids of all ranks) -> loss) by tp.py: .grad is of own rows or columns."""
    script = tp_script()
    args = {"recompute": "none", "loss": "full", "dtensor": False, "timeout": 60}
    args |= {"batch": group.size() * SEQUENCES, "length": TOKENS, "config": model.config}
    args = SimpleNamespace(**args)
    model = script.parallelize(model, group, args)

    def forward_backward(ids):
        model.zero_grad()
        flat = ids.flatten(0, 1)
        return script.forward_backward(model, flat, flat, group, args)

    return model, forward_backward


def model_errors(lab, family, layout, way, per_head, group, seed):
    """After STEPS steps, on this rank: {what: relative error} of losses, weights, momentum.

    Momentum first: Newton-Schulz divides by the gradient's length, so weights hardly show one that
    is P times too large. way: its name.
    """
    rank, world = group.rank(), group.size()
    right, model = one_device(family, seed, world, per_head), tiny(family, seed)
    chosen, losses = finished.choose(model, per_head), []
    how = {"lr": RATE, "dtype": torch.float64}
    with Exact():
        if layout == "ZeRO-1":
            zero = lab.Zero1(model, group)
            own = zero.own
        else:
            model, forward_backward = parallelized(model, group)
            own = lab.tensor_parallel(model)
        matrices, adamw = lab.make_optimizers(own, chosen, group, RATE)
        for _ in range(STEPS):
            if layout == "ZeRO-1":
                ids = right.ids[rank]
                loss = lab.train_step(zero, matrices, adamw, lab.WAYS[way], ids, **how)
                dist.all_reduce(loss, group=group)
                loss /= world
            else:
                loss = forward_backward(right.ids)
                lab.step(matrices, lab.WAYS[way], group, **how)
                adamw.step()
            losses.append(loss.item())
    errors = {}
    for name, matrix in zip(chosen, matrices):
        errors[f"momentum of {name}"] = relative_error(
            matrix.momentum, right.momentum[name].split(matrix.sizes, matrix.dim)[rank]
        )
    errors["loss"] = max(abs(a - b) / b for a, b in zip(losses, right.losses))
    for name, (part, dim) in own.items():
        whole = right.weights[name]
        if layout == "ZeRO-1":
            start, end = finished.split(len(whole), rank, world)
            own_copy = model.get_parameter(name).detach()
            errors[f"{name}, all of it"] = relative_error(own_copy, whole)
        else:
            _, start, end = getattr(part, "shard", (0, 0, len(whole)))
        errors[name] = relative_error(part.detach(), whole.narrow(dim, start, end - start))
    return errors


def expect_model(lab, what, *case):
    """Raise Wrong unless model_errors() are all at most EXACT; the largest."""
    return expect_exact(what, model_errors(lab, *case), EXACT)


# ---- Matrices without a model --------------------------------------------------------------------


SHAPES = [  # (m, n), dim, blocks
    ((7, 5), 0, 1),
    ((4, 9), 1, 1),
    ((12, 5), 0, 4),  # heads of three rows, which ranks' borders cut
    ((2, 6), 0, 1),  # fewer rows than three ranks
    ((9, 4), 1, 3),
    ((5, 5), 0, 5),
]


def sizes_of(length, world, last_has_most):
    """How many rows or columns each rank has: as split() deals them, or the other way round."""
    sizes = [end - start for start, end in (finished.split(length, r, world) for r in range(world))]
    return sizes[::-1] if last_has_most else sizes


def matrix_case(lab, rank, world, seed, count=None):
    """(matrices, wholes): random updates (m, n), and of each a Matrix of the lab's on a rank."""
    shapes = SHAPES[:count]
    matrices, wholes = [], []
    for i, ((m, n), dim, blocks) in enumerate(shapes):
        whole, sizes = drawn(seed + i, m, n), sizes_of((m, n)[dim], world, i % 2)
        part = whole.split(sizes, dim)[rank].clone()
        matrices.append(lab.Matrix(nn.Parameter(part), torch.zeros_like(part), dim, sizes, blocks))
        wholes.append(whole)
    costs = [right_flops(shape, blocks) for shape, _, blocks in shapes]
    for matrix, owner in zip(matrices, dealt(costs, world)):
        matrix.owner = owner
    return matrices, wholes


def right_flops(shape, blocks):
    """Operations of the products of Newton-Schulz, of a matrix in blocks of rows."""
    rows, columns = shape[0] // blocks, shape[1]
    low = min(rows, columns)
    return blocks * finished.ITERATIONS * (4 * low * rows * columns + 2 * low * low * low)


def dealt(costs, world):
    """owners()'s answer: a rank at a time."""
    rank_of, sums = {}, [0] * world
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        _, rank_of[i] = min((total, rank) for rank, total in enumerate(sums))
        sums[rank_of[i]] += costs[i]
    return [rank_of[i] for i in range(len(costs))]


def right_bytes(matrices, rank, way, width):
    """{collective: bytes} of a rank, from the sizes of parts."""
    found = dict.fromkeys(COLLECTIVES[way], 0)
    for matrix in matrices:
        other = [*matrix.own.shape]
        own = other.pop(matrix.dim)
        across, (other,) = len(matrix.sizes), other
        most, every = other * max(matrix.sizes), other * sum(matrix.sizes)
        if way == "everywhere":
            found["all_gather"] += across * most * width
        elif way == "at_once":
            found["all_to_all"] += (own * other + every * (rank == matrix.owner)) * width
        else:
            for op in found:
                found[op] += most * width * (across if rank == matrix.owner else 1)
    return found


def both_groups(group):
    """[this rank's groups]: all ranks, and if this is the first or last one, these two alone."""
    ends = [0, group.size() - 1]
    return [group] if group.rank() not in ends else [subgroup(group, ranks=ends), group]


def tensors_of(what, found, count):
    """A way's result as a list; raises Wrong."""
    expect(found is not None, f"{what} returns None", "return the parts of all matrices")
    if not isinstance(found, list | tuple) or len(found) != count:
        raise Wrong(f"{what} returns no list of {count} parts", "one for each matrix, in order")
    return list(found)


def expect_freed(what, found, matrices):
    """Raise Wrong where the parts keep more memory alive than padded parts have."""
    kept = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in found}
    right = sum(8 * m.padded(m.own.detach()).numel() for m in matrices)
    seen = f"{what}: its parts keep {sum(kept.values())} bytes alive, {right} will do"
    expect(sum(kept.values()) <= right, seen, "a view keeps the whole matrix: return a copy")


def expect_sent(what, way, traffic, matrices, rank):
    """Raise Wrong unless a step took the way's collectives, and their bytes."""
    count, right = len(matrices), right_bytes(matrices, rank, way, 8)
    calls = {op: 2 if way == "at_once" else count for op in COLLECTIVES[way]}
    mine = {op: made for op, (made, _) in traffic.ops.items()}
    once = f"{' and '.join(COLLECTIVES[way])}, once for each matrix"
    hint = "one message for all matrices there, one back" if way == "at_once" else once
    expect(mine == calls, f"{what}: calls {mine}; {calls} will do", hint)
    for op, nbytes in right.items():
        sent = traffic.bytes(op)
        found = f"{what}: {op} moves {sent} bytes, not {nbytes}"
        hint = "each part once, padded() to the largest" * (way != "at_once")
        expect(sent == nbytes, found, hint)


def watched_exchange(lab, matrices, rank):
    """A context in which exchange() refuses other numbers than what goes to owners, and back."""
    ranks, exchange = range(len(matrices[0].sizes)), lab.exchange
    there = [sum(m.own.numel() for m in matrices if m.owner == r) for r in ranks]
    own = [m for m in matrices if m.owner == rank]
    back = [sum(math.prod(m.part_shape(r)) for m in own) for r in ranks]
    rights = [(there, back), (back, there)]

    def counting(sends, receives, *args):
        found = [sum(x.numel() for x in xs) for xs in sends]
        found = found, [sum(map(math.prod, shapes)) for shapes in receives]
        right = rights.pop(0) if rights else ([], [])
        numbers = f"exchange() sends and receives numbers {found} of the ranks, not {right}"
        hint = "one message for all matrices there, one back: parts to their owners and from them"
        expect(found == right, numbers, hint)
        return exchange(sends, receives, *args)

    return mock.patch.object(lab, "exchange", counting)


def expect_work(what, way, counted, matrices, rank):
    """Raise Wrong unless a rank multiplied what is its own, or everything."""
    own = [m for m in matrices if way == "everywhere" or m.owner == rank]
    right = sum(right_flops(matrix.shape, matrix.blocks) for matrix in own)
    hint = "orthogonalize() the own matrices alone" if way != "everywhere" else "each matrix once"
    expect(counted <= right, f"{what}: {counted} operations, {right} will do", hint)


def expect_order(what, way, seen, count):
    """Raise Wrong where a matrix is worked on before all have arrived, or after some went back."""
    first = COLLECTIVES[way][0]
    right = {first: 1 if way == "at_once" else count}
    for calls in seen if way != "everywhere" else []:
        found = f"{what}: a matrix is orthogonalized after {calls}, not {right}"
        expect(calls == right, found, "all there, then the work, then all back: none waits for one")
