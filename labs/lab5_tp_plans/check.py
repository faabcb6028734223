"""Lab 5's exercises: their cases. mistakes.txt has the wrong answers.

A style is judged by what it makes of tensors, on ranks and beside one device. A plan is judged
by what it says of each module. That such a plan trains as one device, the lab's run shows.
"""

import random
import re
from collections import Counter
from functools import partial
from types import SimpleNamespace
from unittest import mock

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from labs.kit.eye import Most
from labs.kit.inputs import draw_from
from labs.kit.judge import checks
from labs.kit.tools import refusal
from labs.lab5_tp_plans import lesson as finished  # not the learner's
from labs.lab5_tp_plans.models import Collectives, describe, full, tiny_model, uneven_length

GROUPS = [0, 1, 2], [0, 2]  # the second is not the world, with other rank numbers


def validate_heads(group, seed):
    def see(lab, eye):
        draw = random.Random(seed)
        for _ in range(40):
            heads, kv, world = draw.randint(1, 24), draw.randint(1, 12), draw.randint(1, 8)
            sizes = {"num_attention_heads": heads, "num_key_value_heads": kv}
            config = SimpleNamespace(**sizes, head_dim=64, hidden_size=64 * heads)
            message = refusal(ValueError, lab.validate_heads, config, world)
            case = f"{heads} heads, {kv} KV heads, {world} ranks"
            eye.note(f"{case} are refused", message is not None)
            if message:
                fit = [n for n in range(1, kv + 1) if kv % n == heads % n == 0]
                wanted = Counter([heads, kv, world, *fit])
                named = Counter(map(int, re.findall(r"\d+", message)))
                lacks, more = (wanted - named).elements(), named.keys() - wanted
                eye.note(f"{case}: the list of what the message lacks", sorted(lacks))
                eye.note(f"{case}: the list of other numbers in the message", sorted(more))

    yield "40 configurations", see


# ---- Styles --------------------------------------------------------------------------------------


def norm_with(weight):
    """A norm over the last dimension with this weight."""
    norm = LlamaRMSNorm(len(weight))
    norm.weight = nn.Parameter(weight.clone())
    return norm


def placed(x):
    """How a tensor lies on the ranks, as a text."""
    return f"{x.placements if isinstance(x, DTensor) else 'a plain tensor'}, {tuple(x.shape)}"


def note_bytes(eye, when, traffic):
    for op, (_, nbytes) in traffic.ops.items():
        eye.note(f"{when}: bytes that {op} moves", Most(nbytes))


def read(y, q, k, v):
    """What attention does with a norm's result: three column parallel layers read it."""
    return y @ q + (y @ k) * (y @ v)


def all_gather_style(group, seed):
    mesh, (uneven, randn) = DeviceMesh.from_group(group, "cpu"), draw_from(seed, group)
    P, rank, h = group.size(), group.rank(), uneven()
    weight, *weights = randn(h), *(randn(h, 2 * P) for _ in range(3))

    def see(layout, x, dy, lab, eye):
        norm, mine = norm_with(weight), distribute_tensor(x, mesh, [layout]).requires_grad_()
        parallelize_module(norm, mesh, lab.NormThenGather(layout))
        with Collectives() as forward:
            y = norm(mine)
        eye.note("the norm's result lies as", placed(y))
        if not eye.goes_on():
            return
        eye.note("the norm's result", y.full_tensor())
        note_bytes(eye, "forward", forward)
        cut = [distribute_tensor(w, mesh, [Shard(1)]) for w in weights]
        with Collectives() as backward:
            read(y, *cut).to_local().backward(dy.chunk(P, -1)[rank])
        note_bytes(eye, "backward", backward)
        eye.note("the gradient of x", mine.grad.full_tensor())
        eye.note("the gradient of the norm's weight", full(norm.weight.grad))

    for layout, tokens in (Shard(1), uneven_length(mesh)), (Shard(1), 2 * P), (Replicate(), 7):
        x, dy, norm = randn(2, tokens, h), randn(2, tokens, 2 * P), norm_with(weight)
        y = norm(x.requires_grad_())
        read(y, *weights).backward(dy)
        right = {"the norm's result": y.detach(), "the gradient of x": x.grad}
        right["the gradient of the norm's weight"] = norm.weight.grad
        yield f"{layout}, {tokens} tokens", partial(see, layout, x.detach(), dy), right


def qk_norm_style(group, seed):
    """Two microbatches' backwards, whose gradients add up."""
    mesh, (uneven, randn) = DeviceMesh.from_group(group, "cpu"), draw_from(seed, group)
    P, rank, s, d = group.size(), group.rank(), uneven(), uneven()

    def see(x, weight, dys, lab, eye):
        norm, mine = norm_with(weight), x.clone().requires_grad_()
        parallelize_module(norm, mesh, lab.QKNormParallel())
        with Collectives() as traffic:
            for dy in dys:
                y = norm(mine)
                eye.note("y lies as", placed(y))
                if not eye.goes_on():
                    return
                y.backward(dy)
        eye.note("y", y)
        eye.note("the gradient of x", mine.grad)
        for op, (_, nbytes) in traffic.ops.items():  # the weight's gradient may be sent, twice
            eye.note(f"bytes that {op} moves", Most(max(0, nbytes - 2 * weight.nbytes)))
        eye.note("the weight is a DTensor", isinstance(norm.weight, DTensor))
        eye.note("the gradient of the weight", full(norm.weight.grad))
        eye.note("x is overwritten", not torch.equal(mine, x))
        eye.note("y in bfloat16", norm.bfloat16()(x.bfloat16()))

    cases = ("Qwen3, (b, s, heads/P, d)", 2), ("Gemma3, (b, heads/P, s, d)", 1)
    for title, cut in cases:
        x, weight = randn(2, 2 * P, s, d).movedim(1, cut).requires_grad_(), randn(d)
        norm, dys = norm_with(weight), [randn(x.shape), randn(x.shape)]
        for dy in dys:
            y = norm(x)
            y.backward(dy)
        own = [t.detach().chunk(P, cut)[rank].clone() for t in (x, *dys, y, x.grad)]
        right = {"y": own[3], "the gradient of x": own[4]}
        right["the gradient of the weight"] = norm.weight.grad
        yield title, partial(see, own[0], weight, own[1:3]), right


class Positions(nn.Module):
    """Returns the positions with which rotary embeddings would be made."""

    def forward(self, x, position_ids):
        return position_ids


def rotary_style(group, seed):
    mesh, P = DeviceMesh.from_group(group, "cpu"), group.size()

    def see(x, position_ids, lab, eye):
        rotary = Positions()
        parallelize_module(rotary, mesh, lab.RotaryParallel())
        given = position_ids.clone()
        became = rotary(x, given)
        eye.note("position_ids lie as", placed(became))
        if eye.goes_on():
            eye.note("position_ids", became)
        eye.note("position_ids is overwritten", not torch.equal(given, position_ids))

    for n in 4, 5 + seed % 3:  # tokens of a rank
        x, counted = torch.zeros(2, n, 4), torch.arange(P * n)[None]
        title = f"{n} tokens, counted from 0 on each rank"
        yield title, partial(see, x, counted[:, :n]), {"position_ids": counted}
    later, stream = counted + 3, DTensor.from_local(x, mesh, [Shard(1)])
    yield "given, of all tokens", partial(see, x, later), {"position_ids": later}
    yield "x is a DTensor", partial(see, stream, counted), {"position_ids": counted}


def fused_style(group, seed):
    def see(shares, world, lab, eye):
        sizes = tuple(world * share for share in shares)
        eye.call(lab.fused_order, {"sizes": sizes, "world": world}, "the order")
        model = nn.Sequential(nn.Linear(3, sum(sizes)))
        model[0].fused_order = finished.fused_order(sizes, world)
        for name, parameter in model.named_parameters():
            numbers = torch.Generator().manual_seed(seed)
            gathered = torch.randn(parameter.shape, generator=numbers).bfloat16()
            given = {"model": model, "name": name, "tensor": gathered}
            eye.call(lab.whole, given, f"whole() of {name[2:]}")
        for more in (1, 0, 0), (0, 1, 0), (0, 0, 1), (1, -1, 0):
            uneven = tuple(2 * world + rows for rows in more)
            refused = refusal(ValueError, lab.fused_order, uneven, world) is not None
            eye.note(f"blocks of {uneven} rows over {world} ranks are refused", refused)

    drawn = random.Random(seed).sample(range(1, 10), 4)
    for shares, world in ((4, 2, 2), 2), ((3, 3), 3), (drawn, 5):
        yield f"{shares} rows a rank of each block, {world} ranks", partial(see, shares, world)


# ---- Plans ---------------------------------------------------------------------------------------


def note_plan(eye, plan, right):
    """Note which modules a plan lacks or has too many, and what it says of each."""
    eye.note("the list of missing keys", sorted(right.keys() - plan.keys()))
    eye.note("the list of keys that do not belong", sorted(plan.keys() - right.keys()))
    for name, style in plan.items():
        eye.note(f"the style of {name}", describe(style).replace("S(2)", "S(-1)"))


def llama_plan(group, seed):
    def see(family, sequence_parallel, lab, eye):
        given = tiny_model(family), sequence_parallel
        note_plan(eye, lab.llama_plan(*given), finished.llama_plan(*given))

    yield "tensor parallelism", partial(see, "llama", False)
    yield "sequence parallelism", partial(see, "qwen2", True)


def with_strings(family, in_config, in_class):
    """A model whose plan has more strings than transformers', in dicts of its own."""
    model = tiny_model(family)
    strings = type(model)._tp_plan | in_class
    model.__class__ = type("Other", (type(model),), {"_tp_plan": strings})
    model._tp_plan = strings
    model.config.base_model_tp_plan = model.config.base_model_tp_plan | in_config
    return model


def translate_hf_plan(group, seed):
    def see(how, lab, eye):
        model = with_strings(*how)
        before = dict(model.config.base_model_tp_plan), dict(type(model)._tp_plan)
        plan = lab.hf_plan(model)
        note_plan(eye, plan, finished.hf_plan(with_strings(*how)))
        eye.note("two modules share a style", len(set(map(id, plan.values()))) < len(plan))
        after = model.config.base_model_tp_plan, type(model)._tp_plan
        eye.note("transformers' own plan is overwritten", before != after)

    def see_refusal(how, name, lab, eye):
        message = refusal(ValueError, lab.hf_plan, with_strings(*how)) or ""
        named = [word for word in ("made_up", name) if word in message]
        eye.note("the list of what a refusal names", named)

    table, mlp = {"embed_tokens": "embedding_colwise"}, "layers.*.mlp"
    yield "Qwen3", partial(see, ("qwen3", {}, {}))
    yield "Phi3", partial(see, ("phi3", {}, {}))
    yield "more strings", partial(see, ("llama", table, {"score": "rowwise"}))
    for style in "colwise", "colwise_rep":
        yield f"lm_head {style}", partial(see, ("llama", {}, {"lm_head": style}))
    yield "a made-up string", partial(see_refusal, ("llama", {mlp: "made_up"}, {}), mlp)
    of_class = "llama", {}, {"lm_head": "made_up"}
    yield "a made-up string of the class", partial(see_refusal, of_class, "lm_head")


LEVELS = "custom", "Hugging Face", "model-specific", "base"


def note_choice(eye, title, right, choose, *args):
    """Note the level of a choice and whether the plan is `right`, or the error."""
    try:
        plan, reason = choose(*args)
    except (ValueError, KeyError) as problem:
        eye.note(f"{title}: the error", type(problem).__name__)
        path = isinstance(args[-1], str) and args[-1] in str(problem)
        eye.note(f"{title}: the error names the path", path)
        return
    eye.note(f"{title}: the level", [level for level in LEVELS if reason.startswith(level)])
    eye.note(f"{title}: the plan's type", type(plan).__name__)
    if not isinstance(plan, dict):
        return
    said, other = ({n: describe(style) for n, style in p.items()} for p in (plan, right))
    eye.note(f"{title}: the plan is another", said != other)


def choose_plan(group, seed):
    llama, mistral = tiny_model("llama"), tiny_model("mistral")
    wrapped, renamed, failing = (tiny_model("llama") for _ in range(3))
    for model, name in (wrapped, "LlamaForCausalLM"), (renamed, "Other"), (failing, "Failing"):
        model.__class__ = type(name, (type(llama),), {})
    wrapped.config.model_type = "of_a_framework"
    given, made = {"norm": finished.sharded_logits()}, finished.qwen3_plan
    path = finished.__name__
    choices = {  # title: (the plan, or {} for an error, arguments of choose_plan())
        "a dict": (given, llama, True, given),
        "an empty dict, and hf": ({}, llama, False, {}, True),
        "a function": (made(llama, True), llama, True, made),
        "a function, and hf": (made(llama, False), llama, False, made, True),
        "the path of a dict, and hf": (finished.STYLES, llama, False, f"{path}.STYLES", True),
        "the path of a function": (made(llama, True), llama, True, f"{path}.qwen3_plan"),
        "a path that leads to nothing": ({}, llama, True, f"{path}.missing"),
        "a path without a module": ({}, llama, False, "no_such_module.plan"),
        "hf": (finished.hf_plan(llama), llama, False, None, True),
        "hf with SP": ({}, llama, True, None, True),
        "no options": (finished.llama_plan(llama, False), llama),
        "Llama with SP": (finished.llama_plan(llama, True), llama, True),
        "another class of its name": (finished.llama_plan(llama, True), wrapped, True),
        "its class by another name": (finished.base_plan(mistral, False), renamed, False),
        "a model without a plan, with SP": (finished.base_plan(mistral, True), mistral, True),
        "a model-specific plan that fails": ({}, failing, False),
    }

    def see(lab, eye):
        fails = {"Failing": lambda model, sequence_parallel: {}["missing"]}
        with mock.patch.dict(lab.PLANS, fails):
            for title, (right, *args) in choices.items():
                note_choice(eye, title, right, lab.choose_plan, *args)

    yield "every level", see


EXERCISES = {
    "validate_heads": (validate_heads, 1),
    "all_gather_style": (all_gather_style, 3, GROUPS),
    "qk_norm_style": (qk_norm_style, 3, GROUPS),
    "rotary_style": (rotary_style, 3, GROUPS),
    "fused_style": (fused_style, 1),
    "llama_plan": (llama_plan, 1),
    "translate_hf_plan": (translate_hf_plan, 1),
    "choose_plan": (choose_plan, 1),
}
CHECKS, BUGS = checks(EXERCISES, finished, 1e-5)
