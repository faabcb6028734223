"""Lab 5's checks of the styles that torch lacks: gathering, rotary, norms of heads, fusion."""

import random

import torch
import torch.distributed as dist
from checks.models import Collectives, full, random_ids, tiny_model, uneven_length
from harness import LABS, Wrong, expect, expect_close, load, relative_error
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers.models.llama.modeling_llama import LlamaRMSNorm

finished = load(LABS / "lab5_tp_plans.py")  # not the learner's
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


def raised(function, *args, **kwargs):
    """The message of the ValueError that a call raises, or None; Wrong for any other error."""
    try:
        function(*args, **kwargs)
    except ValueError as problem:
        return str(problem)
    except NotImplementedError:  # an exercise not done
        raise
    except Exception as problem:
        hint = "raise ValueError, with a message that says what would do"
        raise Wrong(f"{type(problem).__name__}: {problem}", hint) from None
    return None


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
        with Collectives() as forward:
            out = model(mine)
        y = seen[0]
        found = f"{case}: the result is {getattr(y, 'placements', 'a plain tensor')}"
        hint = "redistribute it to [Replicate()], a DTensor: q, k and v's gradients meet in it"
        expect(isinstance(y, DTensor) and y.placements == (Replicate(),), found, hint)
        with Collectives() as backward:
            out.backward(dy.chunk(P, -1)[group.rank()])
        scattered = layout == Shard(1)
        expect_calls(f"{case}, forward", forward, **({"all_gather": 1} if scattered else {}))
        back = {"reduce_scatter": 1} if scattered else {"all_reduce": 1}
        expect_calls(f"{case}, backward", backward, **back)
        grads = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
        grads["x"] = full(DTensor.from_local(mine.grad, mesh, [layout]) if plain else mine.grad)
        errors = {name: relative_error(grads[name], right[name]) for name in right}
        worst = max(worst, expect_one_device(case, errors))
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
    worst = 0
    for given, positions in (False, torch.arange(12)[None]), (True, torch.arange(3, 15)[None]):
        model, ids = tiny_model("llama", seed), random_ids(seed, 12)
        options = {"position_ids": positions, "use_cache": False}
        logits = model(input_ids=ids, **options).logits.detach()
        cos, _ = model.model.rotary_emb(logits, positions)  # (1, 12, d)
        mesh = DeviceMesh.from_group(group, "cpu")
        finished.parallelize(model, mesh, plain_residual_plan(lab, model))
        seen = noted_outputs(model.model.rotary_emb)
        case = "positions given" if given else "positions counted by transformers"
        try:
            out = model(input_ids=ids, **options | {"position_ids": positions if given else None})
        except NotImplementedError:  # an exercise not done; it is a RuntimeError
            raise
        except (RuntimeError, IndexError) as problem:
            shape = tuple(seen[0][0].shape) if seen else ()
            hint = "gather the positions of all tokens: (1, s)"
            if shape[:1] != (1,):
                hint = "position_ids have two dimensions: (1, s)"
            found = f"{case}: cos of shape {shape}, q of 12 tokens"
            raise Wrong(f"{found}: {str(problem).partition(chr(10))[0]}", hint) from None
        hints = {"every rank counts from 0: add rank * n": torch.cat([cos[:, :6]] * 2, 1)}
        hints |= {} if not given else {"keep positions that are given": seen[0][0]}
        expect_close(f"{case}: cos", seen[0][0], cos, 1e-6, hints)
        worst = max(worst, expect_close("the logits", out.logits.full_tensor(), logits))
    return f"12 positions from 6 a rank, given ones kept; logits off by {worst:.0e}"


def run_mixed(case, module, x):
    """module(x); Wrong where plain tensors meet DTensors in it."""
    try:
        return module(x)
    except RuntimeError as problem:
        mixed = "mixed" in str(problem)
        found = f"{case}: {str(problem).partition(chr(10))[0]}"
        expect(not mixed, found, "the weight is a DTensor: x must enter as one")
        raise


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
                out = run_mixed(case, norm, mine)
                hint = "rotary and attention work on plain tensors"
                expect(not isinstance(out, DTensor), f"{case}: a DTensor comes out", hint)
                out.backward(dy.chunk(P, heads_dim)[rank])
        expect_close(f"{case}: y", out.detach(), y.chunk(P, heads_dim)[rank])
        expect_close(f"{case}: dx", mine.grad, x.grad.chunk(P, heads_dim)[rank])
        moved = sum(sent for _, sent in traffic.ops.values())
        expect(moved <= 8 * d, f"{case}: {moved} bytes are sent", "at most the weight's gradient")
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


def check_fused_style(lab, group, seed):
    torch.manual_seed(seed)
    mesh, P, rank, worst = DeviceMesh.from_group(group, "cpu"), group.size(), group.rank(), 0
    drawn = tuple(P * size for size in random.Random(seed).sample(range(1, 10), 4))
    for sizes in ((4 * P, 2 * P, 2 * P), (3 * P, 3 * P), drawn):
        case = f"blocks of {sizes} rows"
        order, rows = lab.fused_order(sizes, P), sum(sizes)
        each_once = torch.equal(order.sort().values, torch.arange(rows))
        expect(each_once, f"{case}: not every row once", "an order of all the rows")
        linear = nn.Linear(5, rows)
        x, dys = torch.randn(2, 3, 5), [torch.randn(2, 3, size) for size in sizes]
        y = linear(x)
        y.backward(torch.cat(dys, -1))
        before = {name: (p.detach().clone(), p.grad) for name, p in linear.named_parameters()}
        model = nn.Sequential(linear)
        parallelize_module(model, mesh, {"0": lab.FusedColwiseParallel(*sizes)})
        out = model(x)
        shares = [[block.chunk(P, -1)[r] for block in y.detach().split(sizes, -1)] for r in (0, 1)]
        wanted, others = torch.cat(shares[rank], -1), torch.cat(shares[1 - rank], -1)
        mixes = "a contiguous piece mixes the blocks: take a share of each"
        apart = torch.cat([block[..., rank::P] for block in y.detach().split(sizes, -1)], -1)
        hints = {mixes: y.detach().chunk(P, -1)[rank], "these are another rank's shares": others}
        hints["a share is contiguous: whole heads stay together"] = apart
        error = expect_close(f"{case}: [Q_r | K_r | V_r]", out.detach(), wanted, hints=hints)
        out.backward(torch.cat([dy.chunk(P, -1)[rank] for dy in dys], -1))
        for name, p in model.named_parameters():
            value, grad = before[name[2:]]
            again = {"back[order] = full: full[order] reorders once more": value[order][order]}
            again["the rows are in the ranks' order"] = value[order]
            mine = lab.whole(model, name, p.detach())
            expect_close(f"{case}: {name}, put back,", mine, value, 0, again)
            mine = lab.whole(model, name, p.grad)
            worst = max(worst, error, expect_close(f"{case}: its gradient", mine, grad))
    message = raised(lab.fused_order, (4 * P, 2 * P + 1, 2 * P + 1), P)
    found = f"a block of {2 * P + 1} rows is cut over {P} ranks"
    expect(message, found, "one rank would hold more of it")
    seen = "each rank its share of every block"
    return f"{seen}, off by {worst:.0e}; whole() restores weights and gradients"
