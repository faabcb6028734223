"""Lab 5's checks of the styles that torch lacks: gathering, rotary, norms of heads, fusion."""

import random
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from labs.kit.compare import expect_same, raised, tried
from labs.kit.harness import expect, expect_close, relative_error
from labs.lab5_tp_plans import lesson as finished  # not the learner's
from labs.lab5_tp_plans.models import Collectives, full, random_ids, tiny_model, uneven_length

LAYER, TOLERANCE = finished.LAYER, 1e-5


def expect_one_device(case, errors, hint=""):
    """Raise Wrong unless logits, loss, every gradient are one device's; returns the largest."""
    name, error = max(errors.items(), key=lambda item: item[1])
    what = name if name in ("logits", "loss") else f"the gradient of {name}"
    found = f"{case}: {what} is off by {error:.1e} (at most {TOLERANCE:.0e})"
    expect(error <= TOLERANCE, found, hint)
    return error


def expect_calls(case, traffic, hint="", **most):
    """Raise Wrong for more calls of a collective than named; of those not named, for any."""
    for op, (calls, _) in traffic.ops.items():
        enough = f"{most[op]} will do" if op in most else "none is needed"
        expect(calls <= most.get(op, 0), f"{case}: calls of {op}: {calls}; {enough}", hint)


def noted_outputs(module):
    """A list to which everything that the module returns is added."""
    outputs = []
    module.register_forward_hook(lambda module, args, out: outputs.append(out))
    return outputs


class Reads(nn.Module):
    """What attention does with a norm's result: three column parallel layers read it."""

    def __init__(self, norm, h):
        super().__init__()
        self.norm = norm
        self.q, self.k, self.v = (nn.Linear(h, 6, bias=False) for _ in range(3))

    def forward(self, x):
        y = self.norm(x)
        return self.q(y) + self.k(y) * self.v(y)


def check_all_gather_style(lab, group, seed):
    torch.manual_seed(seed)
    mesh, P, h, worst = DeviceMesh.from_group(group, "cpu"), group.size(), 10, 0
    uneven = uneven_length(mesh)
    cases = (Shard(1), uneven, False), (Shard(1), 8, True), (Replicate(), 7, True)
    for layout, tokens, plain in cases:
        case = f"{layout}, {tokens} tokens, {'plain tensors' if plain else 'DTensors'}"
        model = Reads(LlamaRMSNorm(h), h)
        for parameter in model.parameters():
            nn.init.normal_(parameter)
        x, dy = torch.randn(2, tokens, h, requires_grad=True), torch.randn(2, tokens, 6)
        model(x).backward(dy)
        right = {name: p.grad for name, p in model.named_parameters()} | {"x": x.grad}
        model.zero_grad()
        plan = {"norm": lab.NormThenGather(layout)} | {name: ColwiseParallel() for name in "qkv"}
        parallelize_module(model, mesh, plan)
        mine = distribute_tensor(x.detach(), mesh, [layout])
        mine = (mine.to_local() if plain else mine).requires_grad_()
        seen = noted_outputs(model.norm)
        hint = "redistribute it to [Replicate()], a DTensor: q, k and v's gradients meet in it"
        with Collectives() as forward:
            out = tried(case, hint, model, mine)
        y = seen[0]
        found = f"{case}: the result is {getattr(y, 'placements', 'a plain tensor')}"
        expect(isinstance(y, DTensor) and y.placements == (Replicate(),), found, hint)
        expect(y.shape == x.shape, f"{case}: the result is {tuple(y.shape)}", hint)
        with Collectives() as backward:
            out.backward(dy.chunk(P, -1)[group.rank()])
        there, back = {"all_gather": 1}, {"reduce_scatter": 1}
        there, back = (there, back) if layout == Shard(1) else ({}, {"all_reduce": 1})
        hint = "redistribute() alone, which knows its backward"
        expect_calls(f"{case}, forward", forward, hint, **there)
        expect_calls(f"{case}, backward", backward, hint, **back)
        expect(mine.grad is not None, f"{case}: no gradient for x", hint)
        grads = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
        grads["x"] = full(DTensor.from_local(mine.grad, mesh, [layout]) if plain else mine.grad)
        errors = {name: relative_error(grads[name], right[name]) for name in right}
        worst = max(worst, expect_one_device(case, errors, hint))
    seen = "one all-gather, one reduce-scatter for q, k, v; without SP one all-reduce"
    return f"{seen}; off by {worst:.0e}"


def plain_residual_plan(lab, model):
    """Llama's plan with a residual stream of plain tensors, and RotaryParallel."""
    own = {"output_layouts": Shard(1)}
    plan = finished.llama_plan(model, True) | {"model.rotary_emb": lab.RotaryParallel()}
    plan["model.embed_tokens"] = RowwiseParallel(input_layouts=Replicate(), **own)
    plan[f"{LAYER}.self_attn.o_proj"] = RowwiseParallel(**own)
    plan[f"{LAYER}.mlp.down_proj"] = RowwiseParallel(**own)
    return plan


def check_rotary_style(lab, group, seed):
    """Positions counted by transformers, and given ones, which do not begin at 0."""
    worst, mesh, given, case, hint = 0, DeviceMesh.from_group(group, "cpu"), [], "", ""

    def note(module, args, kwargs):
        given.extend((x, x.clone()) for x in (*args, *kwargs.values()) if not x.is_floating_point())

    def compare(module, args, kwargs):
        mine, right = kwargs["position_ids"], positions.tolist()
        found = "a DTensor" if isinstance(mine, DTensor) else mine.tolist()
        expect(found == right, f"{case}: position_ids become {found}, not {right}", hint)

    for own, positions in (False, torch.arange(12)[None]), (True, torch.arange(3, 15)[None]):
        model, ids = tiny_model("llama", seed), random_ids(seed, 12)
        options, rotary = {"position_ids": positions, "use_cache": False}, model.model.rotary_emb
        logits = model(input_ids=ids, **options).logits.detach()
        rotary.register_forward_pre_hook(note, with_kwargs=True)
        finished.parallelize(model, mesh, plain_residual_plan(lab, model))
        rotary.register_forward_pre_hook(compare, with_kwargs=True)
        case = "positions given" if own else "positions counted by transformers"
        options |= {} if own else {"position_ids": None}
        hint = "rank r has the tokens from r * n, n = x.shape[1]: count from there, gather (1, s)"
        hint = "these are of all tokens already: keep positions that are given" if own else hint
        out = tried(case, hint, partial(model, input_ids=ids, **options))
        worst = max(worst, expect_close("the logits", out.logits.full_tensor(), logits, hint=hint))
        expect_same("position_ids", *zip(*given))
    stream = distribute_tensor(torch.zeros(1, 12, 32), mesh, [Shard(1)])
    case = "x a DTensor"
    rotary(stream, positions)
    return f"12 positions from 6 a rank, given ones kept; logits off by {worst:.0e}"


def check_qk_norm_style(lab, group, seed):
    torch.manual_seed(seed)
    mesh, P, rank, d, worst = DeviceMesh.from_group(group, "cpu"), group.size(), group.rank(), 6, 0
    for heads_dim, shape in ((2, (2, 7, 2 * P, d)), (1, (2, 2 * P, 7, d))):
        case = "Qwen3, (b, s, heads/P, d)" if heads_dim == 2 else "Gemma3, (b, heads/P, s, d)"
        norm, x = LlamaRMSNorm(d), torch.randn(shape, requires_grad=True)
        nn.init.normal_(norm.weight)
        dys = torch.randn(2, *shape)  # of two micro-batches
        for dy in dys:
            norm(x).backward(dy)
        right, y = norm.weight.grad, norm(x).detach()
        norm.zero_grad()
        mine = x.detach().chunk(P, heads_dim)[rank].clone().requires_grad_()
        parallelize_module(norm, mesh, lab.QKNormParallel())
        with Collectives() as traffic:
            for dy in dys:
                hint = "the weight is a DTensor: x must enter as one, cut along dimension 1"
                out = tried(case, hint, norm, mine)
                hint = "rotary and attention work on plain tensors"
                expect(not isinstance(out, DTensor), f"{case}: a DTensor comes out", hint)
                own = y.chunk(P, heads_dim)[rank]
                hint = "the rank's own heads go in and come out, as they are: to_local()"
                expect_close(f"{case}: y", out.detach(), own, hint=hint)
                tried(f"{case}: the backward", hint, out.backward, dy.chunk(P, heads_dim)[rank])
        expect_close(f"{case}: dx", mine.grad, x.grad.chunk(P, heads_dim)[rank], hint=hint)
        moved = sum(sent for _, sent in traffic.ops.values())
        expect(moved <= 8 * d, f"{case}: {moved} bytes are sent", "x and y need no message")
        grad = norm.weight.grad
        parts = (grad.to_local() if isinstance(grad, DTensor) else grad).clone()
        dist.all_reduce(parts, group=group)
        hint = "a gradient summed in place is summed again in the next backward"
        if torch.allclose(parts, right, 1e-4, 1e-4):
            hint = "each rank keeps the gradient of its own heads: x enters as Shard, not Replicate"
        error = relative_error(full(grad), right)
        expect(error < TOLERANCE, f"{case}: the gradient of the weight is off by {error:.1e}", hint)
        hint = "clip_grad_norm_ refuses a mixture of both kinds"
        plain = not isinstance(norm.weight, DTensor)
        expect(not plain, f"{case}: the weight is a plain tensor", hint)
        worst = max(worst, error)
    return f"gradient of all heads, off by {worst:.0e}, over two backwards; nothing sent for it"


def expect_order(lab, sizes, world):
    """Raise Wrong unless fused_order() has every rank's share of each block, rank by rank."""
    rows = torch.arange(sum(sizes))
    blocks = rows.split(sizes)
    right = torch.cat([block.view(world, -1) for block in blocks], 1).flatten()
    hints = {"a contiguous piece mixes the blocks: take a share of each": rows}
    case = f"blocks of {sizes} rows on {world} ranks"
    hint = "rank by rank, of each block one contiguous share; a block begins where the last ends"
    order = tried(case, hint, lab.fused_order, sizes, world)
    kind = getattr(order, "dtype", type(order).__name__)
    expect(kind == torch.int64, f"{case}: the order is {kind}", "an int64 tensor: rows by number")
    expect_close(f"{case}: {order.tolist()}, not {right.tolist()},", order, right, 0, hints, hint)
    for more in ((1, 0, 0), (0, 1, 0), (0, 0, 1), (1, -1, 0)):
        uneven = tuple(2 * world + rows for rows in more)
        found = f"blocks of {uneven} rows are cut over {world} ranks"
        hint = "raise ValueError unless world divides each of them: one rank would hold more of it"
        expect(raised(lab.fused_order, uneven, world), found, hint)


def check_fused_style(lab, group, seed):
    torch.manual_seed(seed)
    mesh, P, rank, worst = DeviceMesh.from_group(group, "cpu"), group.size(), group.rank(), 0
    drawn = random.Random(seed).sample(range(1, 10), 4)
    for shares in ((4, 2, 2), (3, 3), drawn):
        for world in (P, P + 1):
            expect_order(lab, tuple(world * share for share in shares), world)
        sizes = tuple(P * share for share in shares)
        case, linear = f"blocks of {sizes} rows", nn.Linear(5, sum(sizes))
        x, dys = torch.randn(2, 3, 5), [torch.randn(2, 3, size) for size in sizes]
        y = linear(x)
        y.backward(torch.cat(dys, -1))
        before = {name: (p.detach().clone(), p.grad) for name, p in linear.named_parameters()}
        model = nn.Sequential(linear)
        parallelize_module(model, mesh, {"0": lab.FusedColwiseParallel(*sizes)})
        out = model(x)
        wanted = torch.cat([block.chunk(P, -1)[rank] for block in y.detach().split(sizes, -1)], -1)
        error = expect_close(f"{case}: [Q_r | K_r | V_r]", out.detach(), wanted)
        out.backward(torch.cat([dy.chunk(P, -1)[rank] for dy in dys], -1))
        for name, p in model.named_parameters():
            (value, grad), order = before[name[2:]], linear.fused_order
            again = {"back[order] = full: full[order] reorders once more": value[order][order]}
            hint = "row i of what is gathered is row order[i] of one device's, of a bias as well"
            mine = tried(f"{case}: whole()", hint, lab.whole, model, name, p.detach())
            expect_close(f"{case}: {name}, put back,", mine, value, 0, again, hint)
            mine = lab.whole(model, name, p.grad)
            worst = max(worst, error, expect_close(f"{case}: its gradient", mine, grad, hint=hint))
    seen = "each rank its share of every block"
    return f"{seen}, off by {worst:.0e}; whole() restores weights and gradients"
