"""Lab 5's checks, each of which runs on every rank, and the bugs that they have to catch.

Logits and gradients of tiny random models are compared with one device's, in float32; what is sent
is compared with what will do.
"""

import math
import random
import re
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from harness import LABS, Traffic, Wrong, expect, expect_close, load
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

finished = load(LABS / "lab5_tp_plans.py")  # not the learner's
LAYER = finished.LAYER

FAMILIES = {  # what each needs beside SHAPE; mistral has no plan of its own here
    "llama": {"model_type": "llama"},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3"},
    "gemma3": {
        "model_type": "gemma3_text",
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 5,
        "query_pre_attn_scalar": 8,
    },
    "phi3": {"model_type": "phi3"},
    "mistral": {"model_type": "mistral"},
}
SHAPE = {"vocab_size": 101, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SHAPE |= {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8, "pad_token_id": None}
TOLERANCE = 1e-5


def tiny_model(family, seed=0, **changes):
    """A random model of a family, the same on every rank; no norm's weight is all ones."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(**{**SHAPE, **FAMILIES[family], **changes})
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape)
    return model


def random_ids(seed, length, vocab=SHAPE["vocab_size"]):
    """Tokens (2, length), the same on every rank."""
    return torch.randint(vocab, (2, length), generator=torch.Generator().manual_seed(seed + 1))


class Collectives(Traffic):
    """Traffic that sees what DTensor sends inside an operation: DTensor takes that apart first."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented
        return super().__torch_dispatch__(func, types, args, kwargs)


def step(model, ids):
    """(logits, loss, Collectives of the forward, of the backward) of a step on ids (b, s)."""
    forward, backward = Collectives(), Collectives()
    with loss_parallel():  # for sharded logits; others do not notice
        with forward:
            out = model(input_ids=ids, labels=ids, use_cache=False)
        with backward:
            out.loss.backward()
    return out.logits.detach(), out.loss.detach(), forward, backward


def full(x):
    """A tensor, or a DTensor, as one device has it."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def relative_error(mine, right):
    """||mine - right|| / ||right||; what is no number is infinitely far off."""
    norm = torch.linalg.vector_norm
    error = (norm(mine - right) / norm(right).clamp(min=1e-30)).item()
    return math.inf if math.isnan(error) else error


def against_one_device(lab, model, plan, group, ids):
    """Step a model, shard it by the plan, step again: (errors, forward, backward, gradient norms).

    errors {name: relative error}: "logits", "loss", and each parameter's gradient; norms: that of
    one device, and ours, None where some parameters are no DTensors.
    """
    logits, loss, _, _ = step(model, ids)
    right = {"logits": logits, "loss": loss}
    right |= {name: p.grad for name, p in model.named_parameters()}
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()
    model.zero_grad()  # a parameter that stays as it is would add to the gradient it has
    lab.parallelize(model, DeviceMesh.from_group(group, "cpu"), plan)
    logits, loss, forward, backward = step(model, ids)
    parameters = dict(model.named_parameters())
    mine = {"logits": full(logits), "loss": full(loss)}
    mine |= {name: lab.whole(model, name, p.grad) for name, p in parameters.items()}
    errors = {name: relative_error(mine[name], right[name]) for name in right}
    norms = norm, None
    if all(isinstance(p, DTensor) for p in parameters.values()):
        total = nn.utils.get_total_norm([p.grad for p in parameters.values()])
        norms = norm, total.full_tensor().item()
    return errors, forward, backward, norms


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
    """The message of the ValueError that a call raises, or None."""
    try:
        function(*args, **kwargs)
    except ValueError as problem:
        return str(problem)
    return None


def noted_outputs(module):
    """A list to which everything that the module returns is added."""
    outputs = []
    module.register_forward_hook(lambda module, args, out: outputs.append(out))
    return outputs


def check_validate_heads(lab, group, seed):
    draw = random.Random(seed)
    for _ in range(40):
        kv, queries, world = draw.randint(1, 12), draw.randint(1, 4), draw.randint(1, 8)
        heads = kv * queries
        config = SimpleNamespace(num_attention_heads=heads, num_key_value_heads=kv, head_dim=64)
        message = raised(lab.validate_heads, config, world)
        case = f"{heads} heads, {kv} KV heads, {world} ranks"
        if kv % world == 0:
            hint = "every rank gets whole heads of both"
            expect(message is None, f"{case}: refused: {message}", hint)
            continue
        hint = "whole query heads alone will not do: the KV heads are cut too"
        if heads % world:
            hint = "64 features of each head are no help: it is heads that must be divided"
        expect(message, f"{case}: not refused", hint)
        fit = {n for n in range(1, kv + 1) if kv % n == 0}
        named = set(map(int, re.findall(r"\d+", message)))
        missing = sorted((fit | {heads, kv, world}) - named)
        found = f"{case}: the message does not name {missing}: {message}"
        expect(not missing, found, "say what would do")
        wrong = sorted(named - fit - {heads, kv, world})
        expect(not wrong, f"{case}: the message names {wrong}: {message}", "they would not do")
    model = tiny_model("llama", seed, num_key_value_heads=1)
    mesh = DeviceMesh.from_group(group, "cpu")
    message = raised(lab.parallelize, model, mesh, {f"{LAYER}.self_attn.q_proj": ColwiseParallel()})
    cut = any(isinstance(p, DTensor) for p in model.parameters())
    found = "one KV head is cut over two ranks, or the model is cut before it is refused"
    expect(message and not cut, found)
    return "40 configs: refused where a rank would get part of a head, told what would do; none cut"


FAILS = "a plan that fails must not become another one"


def chosen(lab, level, model, *args):
    """The plan of choose_plan(); Wrong unless it says that it is of this level."""
    plan, reason = lab.choose_plan(model, *args)
    found = f"{reason!r} is chosen, not {level}"
    expect(reason.startswith(level), found, "the first level that applies")
    return plan


def check_choose_plan(lab, group, seed):
    llama, mistral = tiny_model("llama", seed), tiny_model("mistral", seed)
    plan, called = {"lm_head": lab.sharded_logits()}, []

    def function(model, sequence_parallel):
        called.append((model, sequence_parallel))
        return plan

    for sequence_parallel, hf in ((False, True), (True, False)):
        mine = chosen(lab, "custom", llama, sequence_parallel, plan, hf)
        expect(mine is plan, "not the dict that was given", "the caller's comes before all else")
        mine = chosen(lab, "custom", llama, sequence_parallel, function, hf)
        hint = "call it: it returns the plan"
        expect(mine is plan, f"a function's plan is {type(mine).__name__}", hint)
        given = called[-1] == (llama, sequence_parallel)
        expect(given, "a function gets other arguments", "model, SP")
    check_import_paths(lab, llama, f"plans_of_seed_{seed}")
    mine = chosen(lab, "Hugging Face", llama, False, None, True)
    expect(mine.keys() == lab.hf_plan(llama).keys(), "not Hugging Face's plan")
    message = raised(lab.choose_plan, llama, True, None, True)
    hint = "it would run without SP, and say nothing"
    expect(message, "Hugging Face's plan with SP is not refused", hint)
    wrapped = tiny_model("llama", seed)
    wrapped.__class__ = type("LlamaForCausalLM", (type(llama),), {})
    hint = "it wants to know about SP"
    for model, sequence_parallel in ((llama, True), (wrapped, False)):
        mine = chosen(lab, "model-specific", model, sequence_parallel)
        right = lab.PLANS["LlamaForCausalLM"](model, sequence_parallel)
        same = mine.keys() == right.keys()
        same = same and repr(mine["model.embed_tokens"]) == repr(right["model.embed_tokens"])
        expect(same, f"not the plan of LlamaForCausalLM, SP {sequence_parallel}", hint)
    failing = tiny_model("qwen2", seed)
    lab.PLANS["Qwen2ForCausalLM"] = lambda model, sequence_parallel: {}["missing"]
    try:
        _, reason = lab.choose_plan(failing)
        raise Wrong(f"a model-specific plan that fails becomes {reason!r}", FAILS)
    except KeyError:
        pass
    mine = chosen(lab, "base", mistral, True)
    expect(isinstance(mine["model.norm"], SequenceParallel), "not the base plan", hint)
    return "dict, function, paths; HF's; model-specific, wrapped too; base; failures are raised"


def check_import_paths(lab, model, name):
    """Plans by import path: a dict, a function, and none, from a module of that name."""
    with tempfile.TemporaryDirectory() as folder:
        source = "given = {'a': 1}\ndef made(model, sp):\n    return {'b': sp}\n"
        Path(folder, f"{name}.py").write_text(source)
        sys.path.insert(0, folder)
        for path, right in ((f"{name}.given", {"a": 1}), (f"{name}.made", {"b": True})):
            mine = chosen(lab, "custom", model, True, path)
            found = f"the plan at {path} is {mine}, not {right}"
            expect(mine == right, found, "it may be a function")
        sys.path.remove(folder)
    for path in (f"{name}.missing", "no_such_module.plan", "llama"):
        message = raised(lab.choose_plan, model, False, path)
        expect(message and path in message, f"{path}: {message or 'nothing raised'}", FAILS)


def check_translate_hf_plan(lab, group, seed):
    ids, worst = random_ids(seed, 9), 0
    for family in ("qwen3", "phi3", "llama"):
        model = tiny_model(family, seed, tie_word_embeddings=family == "llama")
        before = dict(model.config.base_model_tp_plan), dict(type(model)._tp_plan)
        plan = lab.hf_plan(model)
        after = dict(model.config.base_model_tp_plan), dict(type(model)._tp_plan)
        expect(before == after, f"{family}: transformers' own plan was changed", "copy it")
        keys = {f"model.{name}" for name in before[0]} | before[1].keys() | {"model.embed_tokens"}
        found = f"{family}: keys differ: {sorted(plan.keys() ^ keys)}"
        expect(plan.keys() == keys, found, "prefix: model.")
        head, table = plan["lm_head"], plan["model.embed_tokens"]
        hint = "lm_head's colwise_gather_output becomes sharded_logits()"
        sharded = head.output_layouts == (Shard(-1),) and not head.use_local_output
        expect(sharded, f"{family}: lm_head is {head}", hint)
        found = f"{family}: embed_tokens is {table}"
        expect(isinstance(table, RowwiseParallel), found, "embedding_rowwise")
        shared = len(set(map(id, plan.values()))) < len(plan)
        expect(not shared, f"{family}: two modules share a style", "make a new object for each")
        errors, forward, _, _ = against_one_device(lab, model, plan, group, ids)
        gathered = forward.bytes("all_gather")
        worst = max(worst, expect_one_device(family, errors))
    expect(gathered == 0, f"llama: {gathered} bytes are gathered", hint)
    model.config.base_model_tp_plan = {"layers.*.mlp": "made_up_style"}
    message = raised(lab.hf_plan, model)
    named = message and "made_up_style" in message and "layers.*.mlp" in message
    found = f"made_up_style: {message or 'nothing raised'}"
    expect(named, found, "left out, its module stays whole")
    return f"Qwen3, Phi3, tied Llama by HF's strings: gradients off by {worst:.0e}; unknown refused"


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
    cases = (Shard(1), 7, False), (Shard(1), 8, True), (Replicate(), 7, True)
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


def check_rotary_style(lab, group, seed):
    """Llama with a residual stream of plain tensors."""
    worst = 0
    for given in (False, True):
        model, ids = tiny_model("llama", seed), random_ids(seed, 12)
        logits = model(input_ids=ids, use_cache=False).logits.detach()
        positions = torch.arange(12)[None]
        cos, _ = model.model.rotary_emb(logits, positions)  # (1, 12, d)
        own = {"output_layouts": Shard(1)}
        plan = finished.llama_plan(model, True) | {"model.rotary_emb": lab.RotaryParallel()}
        plan["model.embed_tokens"] = RowwiseParallel(input_layouts=Replicate(), **own)
        plan[f"{LAYER}.self_attn.o_proj"] = RowwiseParallel(**own)
        plan[f"{LAYER}.mlp.down_proj"] = RowwiseParallel(**own)
        finished.parallelize(model, DeviceMesh.from_group(group, "cpu"), plan)
        seen = noted_outputs(model.model.rotary_emb)
        case = "positions given" if given else "positions counted by transformers"
        try:
            options = {"position_ids": positions if given else None, "use_cache": False}
            out = model(input_ids=ids, **options)
        except NotImplementedError:  # an exercise not done; it is a RuntimeError
            raise
        except RuntimeError as problem:
            n = seen[0][0].shape[1] if seen else "no"
            found = f"{case}: cos has {n} tokens, q 12: {problem}"
            raise Wrong(found, "gather the positions of all tokens") from None
        hints = {"every rank counts from 0: add rank * n": torch.cat([cos[:, :6]] * 2, 1)}
        expect_close(f"{case}: cos", seen[0][0], cos, 1e-6, hints)
        errors = {"logits": relative_error(out.logits.full_tensor(), logits)}
        worst = max(worst, expect_one_device(case, errors))
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
                out = norm(mine)
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
        hints = {mixes: y.detach().chunk(P, -1)[rank], "these are another rank's shares": others}
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
    message = raised(lab.fused_order, (4 * P, 2 * P + 1), P)
    found = f"a block of {2 * P + 1} rows is cut over {P} ranks"
    expect(message, found, "one rank would hold more of it")
    seen = "each rank its share of every block"
    return f"{seen}, off by {worst:.0e}; whole() restores weights and gradients"


def check_llama_plan(lab, group, seed):
    worst, layers = 0, SHAPE["num_hidden_layers"]
    edges, loss = 2 * layers + 1, 5  # the loss may take that many small all-reduces
    once = "NormThenGather: gathered once for q, k and v, reduced once in the backward"
    cases = ("llama", False, True), ("qwen2", True, False), ("llama", True, True)
    for family, sequence_parallel, tied in cases:
        case = f"{family}, {'SP' if sequence_parallel else 'TP'}"
        model = tiny_model(family, seed, tie_word_embeddings=tied)
        residual = noted_outputs(model.model.layers[0])
        plan = lab.llama_plan(model, sequence_parallel)
        ids = random_ids(seed, 9)  # P does not divide that
        try:
            errors, forward, backward, norms = against_one_device(lab, model, plan, group, ids)
        except NotImplementedError:  # an exercise not done; it is a RuntimeError
            raise
        except RuntimeError as problem:
            hint = "a plain residual has s/P tokens, and transformers makes positions for so many"
            if "mixed" in str(problem):
                hint = "a module without style, or a residual without use_local_output=False"
            raise Wrong(f"{case}: {str(problem).partition(chr(10))[0]}", hint) from None
        worst = max(worst, expect_one_device(case, errors))
        x = residual[-1]
        placed = x.placements if isinstance(x, DTensor) else "a plain tensor"
        tokens = Shard(1) if sequence_parallel else Replicate()
        kept = "see TOKENS" if isinstance(x, DTensor) else "use_local_output=False keeps a DTensor"
        expect(placed == (tokens,), f"{case}: the residual stream is {placed}, not {tokens}", kept)
        most = {"all_gather": edges, "reduce_scatter": edges} if sequence_parallel else {}
        small = {"all_reduce": loss if sequence_parallel else edges + loss}
        expect_calls(f"{case}, forward", forward, once, **most, **small)
        small = {"all_reduce": 2 if sequence_parallel else edges}
        expect_calls(f"{case}, backward", backward, once, **most, **small)
        found = f"{case}: some parameters are plain, some DTensors"
        hint = "clip_grad_norm_ refuses that: a style for every norm"
        expect(norms[1] is not None, found, hint)
        expect(abs(norms[1] / norms[0] - 1) < TOLERANCE, f"{case}: the gradient's norm is off")
        differ = sorted(plan.keys() ^ finished.llama_plan(model, sequence_parallel).keys())
        hint = "one for each module of the table: other plans exchange some"
        expect(not differ, f"{case}: keys differ: {differ}", hint)
    return f"logits, every gradient off by {worst:.0e}, tied too; {edges} edges a way, TP and SP"


CHECKS = {
    "validate_heads": (check_validate_heads, 2),
    "choose_plan": (check_choose_plan, 1),
    "translate_hf_plan": (check_translate_hf_plan, 2),
    "all_gather_style": (check_all_gather_style, 2),
    "rotary_style": (check_rotary_style, 2),
    "qk_norm_style": (check_qk_norm_style, 2),
    "fused_style": (check_fused_style, 2),
    "llama_plan": (check_llama_plan, 2),
}


# --------------------------------------------------------------------------------------------------
# Sabotage: bugs that the checks have to catch, for --inject-bug
# --------------------------------------------------------------------------------------------------


def kv_heads_forgotten(lab):
    """The validation looks at the query heads alone."""
    right = lab.validate_heads

    def validate_heads(config, world):
        if config.num_attention_heads % world:
            right(config, world)

    lab.validate_heads = validate_heads


def validated_too_late(lab):
    """The heads are looked at when the model is cut already."""

    def parallelize(model, mesh, plan):
        parallelize_module(model, mesh, plan)
        lab.validate_heads(model.config, mesh.size())

    lab.parallelize = parallelize


def falls_back(lab):
    """A plan that cannot be had becomes the base plan."""
    right = lab.choose_plan

    def choose_plan(model, *args, **kwargs):
        try:
            return right(model, *args, **kwargs)
        except (ValueError, KeyError):
            return lab.base_plan(model, False), "base: the one asked for failed"

    lab.choose_plan = choose_plan


def hf_ignores_sp(lab):
    """Hugging Face's plan is taken although sequence parallelism was asked for."""
    right = lab.choose_plan

    def choose_plan(model, sequence_parallel=False, custom=None, hf=False):
        return right(model, sequence_parallel and not hf, custom, hf)

    lab.choose_plan = choose_plan


def unknown_style_skipped(lab):
    """A string of Hugging Face's that nobody knows leaves its module whole."""

    class Known(dict):
        def __contains__(self, style):
            return True

        def __missing__(self, style):
            return SequenceParallel

    lab.STYLES = Known(lab.STYLES)


def logits_gathered(lab):
    """lm_head keeps Hugging Face's colwise_gather_output: all logits on every rank."""
    lab.sharded_logits = lambda: ColwiseParallel(output_layouts=Replicate())


def never_gathered(lab):
    """The norm's result stays cut along the tokens, as with torch's SequenceParallel."""
    right = lab.NormThenGather
    lab.NormThenGather = lambda layout: SequenceParallel() if layout == Shard(1) else right(layout)


def positions_from_zero(lab):
    """Every rank's positions start at 0."""

    def _apply(style, module, mesh):
        def repeated(rotary, args, kwargs):
            counted = torch.cat([kwargs["position_ids"]] * mesh.size(), 1)
            return args, kwargs | {"position_ids": counted}

        module.register_forward_pre_hook(repeated, with_kwargs=True)
        return module

    lab.RotaryParallel._apply = _apply


def qk_norm_left_alone(lab):
    """The norms of q and k stay as they are, as in NeMo AutoModel's plans."""
    lab.QKNormParallel._apply = lambda style, module, mesh: module


def gradient_summed_in_place(lab):
    """q_norm's .grad is summed over the ranks after every backward, with what was summed before."""

    def _apply(style, module, mesh):
        def hook(p):
            dist.all_reduce(p.grad, group=mesh.get_group())

        module.weight.register_post_accumulate_grad_hook(hook)
        return module

    lab.QKNormParallel._apply = _apply


def fused_cut_in_pieces(lab):
    """[Q | K | V] is cut in P contiguous pieces."""
    lab.fused_order = lambda sizes, world: torch.arange(sum(sizes))


def fused_not_put_back(lab):
    """A fused weight is saved with its rows in the ranks' order."""
    lab.whole = lambda model, name, tensor: tensor.full_tensor()


def plain_residual(lab):
    """The residual stream is plain tensors of own tokens: as NeMo AutoModel's once was."""
    right = lab.llama_plan

    def llama_plan(model, sequence_parallel):
        tokens = Shard(1) if sequence_parallel else Replicate()
        embed = RowwiseParallel(input_layouts=Replicate(), output_layouts=tokens)
        return right(model, sequence_parallel) | {"model.embed_tokens": embed}

    lab.llama_plan = llama_plan


def sp_never_switched_on(lab):
    """The plan with SP is the one without: everything is right, and nothing is saved."""
    right = lab.llama_plan
    lab.llama_plan = lambda model, sequence_parallel: right(model, False)


BUGS = [
    kv_heads_forgotten,
    validated_too_late,
    falls_back,
    hf_ignores_sp,
    unknown_style_skipped,
    logits_gathered,
    never_gathered,
    positions_from_zero,
    qk_norm_left_alone,
    gradient_summed_in_place,
    fused_cut_in_pieces,
    fused_not_put_back,
    plain_residual,
    sp_never_switched_on,
]
