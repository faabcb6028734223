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

from labs.kit.inputs import draw_from
from labs.kit.judge import checks
from labs.kit.tools import refusal
from labs.lab5_tp_plans import lesson as finished  # not the learner's
from labs.lab5_tp_plans.models import describe, full, tiny_model

GROUPS = [0, 1, 2], [0, 2]  # the second is not the world, with other rank numbers


def numbers(message):
    """The numbers in a message, which may be None."""
    return Counter(map(int, re.findall(r"\d+", message or "")))


def validate_heads(group, seed):
    def see(lab, eye):
        draw = random.Random(seed)
        for _ in range(40):
            heads, kv, world = draw.randint(1, 24), draw.randint(1, 12), draw.randint(1, 8)
            sizes = {"num_attention_heads": heads, "num_key_value_heads": kv}
            config = SimpleNamespace(**sizes, head_dim=64, hidden_size=64 * heads)
            wanted = numbers(refusal(ValueError, finished.validate_heads, config, world))
            message = refusal(ValueError, lab.validate_heads, config, world)
            case = f"{heads} heads, {kv} KV heads, {world} ranks"
            eye.note(f"{case} are refused", message is not None)
            lacks, more = wanted - numbers(message), numbers(message).keys() - wanted
            eye.note(f"{case}: the list of what the message lacks", sorted(lacks.elements()))
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


def all_gather_style(group, seed):
    mesh, (uneven, randn) = DeviceMesh.from_group(group, "cpu"), draw_from(seed, group)
    P, h = group.size(), uneven()
    weight, *projections = randn(h), *(randn(h, 2 * P) for _ in range(3))
    cut = [distribute_tensor(w, mesh, [Shard(1)]) for w in projections]

    def own(tensor, layout):
        return distribute_tensor(tensor.detach(), mesh, [layout]).to_local()

    def read(y, q, k, v):
        """What attention does with a norm's result: three column parallel layers read it."""
        return y @ q + (y @ k) * (y @ v)

    def see(layout, x, dy, lab, eye):
        norm = norm_with(weight)
        parallelize_module(norm, mesh, lab.NormThenGather(layout))

        def attention(x):
            return read(norm(x), *cut).to_local()

        eye.note("the norm's result lies as", placed(norm(x)))
        if not eye.goes_on():
            return
        eye.call(attention, {"x": x}, "what attention makes of it", [dy])
        attention(x).backward(dy)
        eye.note("the gradient of the norm's weight", full(norm.weight.grad))

    for layout, tokens in (Shard(1), 2 * P), (Replicate(), 7):
        x, dy, norm = randn(2, tokens, h), randn(2, tokens, 2 * P), norm_with(weight)
        y = read(norm(x.requires_grad_()), *projections)
        y.backward(dy)
        right = {"what attention makes of it": own(y, Shard(-1))}
        right["the gradient of x"] = own(x.grad, layout)
        right["the gradient of the norm's weight"] = norm.weight.grad
        mine = own(x, layout).requires_grad_()
        yield f"{layout}, {tokens} tokens", partial(see, layout, mine, own(dy, Shard(-1))), right


def qk_norm_style(group, seed):
    """Two microbatches' backwards, whose gradients add up."""
    mesh, (uneven, randn) = DeviceMesh.from_group(group, "cpu"), draw_from(seed, group)
    P, rank, s, d = group.size(), group.rank(), uneven(), uneven()

    def see(x, weight, dys, lab, eye):
        norm = norm_with(weight)
        parallelize_module(norm, mesh, lab.QKNormParallel())
        eye.note("y lies as", placed(norm(x)))
        if not eye.goes_on():
            return
        eye.call(norm, {"x": x.requires_grad_()}, "y", dys[:1])
        for dy in dys:
            norm(x).backward(dy)
        eye.note("the weight is a DTensor", isinstance(norm.weight, DTensor))
        eye.note("the gradient of the weight", full(norm.weight.grad))
        eye.note("y in bfloat16", norm.bfloat16()(x.bfloat16()))

    for title, cut in ("Qwen3, (b, s, heads/P, d)", 2), ("Gemma3, (b, heads/P, s, d)", 1):
        x, weight = randn(2, 2 * P, s, d).movedim(1, cut).requires_grad_(), randn(d)
        norm, dys = norm_with(weight), [randn(x.shape), randn(x.shape)]
        for dy in reversed(dys):
            x.grad, y = None, norm(x)
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
            uneven = [2 * world + rows for rows in more]
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
        try:
            plan = lab.hf_plan(model)
        except ValueError as problem:
            named = [word for change in how[1:] for word in change if word in str(problem)]
            eye.note("the list of what a refusal names", named)
            eye.note("the refusal names made_up", "made_up" in str(problem))
            return
        note_plan(eye, plan, finished.hf_plan(with_strings(*how)))
        eye.note("two modules share a style", len(set(map(id, plan.values()))) < len(plan))
        after = model.config.base_model_tp_plan, type(model)._tp_plan
        eye.note("transformers' own plan is overwritten", before != after)

    cases = {  # title: (family, strings more in its config, in its class)
        "Qwen3": ("qwen3", {}, {}),
        "Phi3": ("phi3", {}, {}),
        "more strings": ("llama", {"embed_tokens": "embedding_colwise"}, {"score": "rowwise"}),
        "lm_head colwise": ("llama", {}, {"lm_head": "colwise"}),
        "lm_head colwise_rep": ("llama", {}, {"lm_head": "colwise_rep"}),
        "a made-up string": ("llama", {"layers.*.mlp": "made_up"}, {}),
        "a made-up string of the class": ("llama", {}, {"lm_head": "made_up"}),
    }
    for title, how in cases.items():
        yield title, partial(see, how)


LEVELS = "custom", "Hugging Face", "model-specific", "base"


def outcome(choose, *args):
    """(level, {module: style in words}) of a choice; (error, None); (level, False) for no dict."""
    try:
        plan, reason = choose(*args)
    except (ValueError, KeyError) as problem:
        return type(problem).__name__, None
    level = [level for level in LEVELS if reason.startswith(level)]
    return level, isinstance(plan, dict) and {n: describe(style) for n, style in plan.items()}


def choose_plan(group, seed):
    llama, mistral = tiny_model("llama"), tiny_model("mistral")
    wrapped, renamed, failing = (tiny_model("llama") for _ in range(3))
    for model, name in (wrapped, "LlamaForCausalLM"), (renamed, "Other"), (failing, "Failing"):
        model.__class__ = type(name, (type(llama),), {})
    wrapped.config.model_type = "of_a_framework"
    made, path = finished.qwen3_plan, finished.__name__
    choices = {  # title: arguments of choose_plan()
        "a dict": (llama, True, {"norm": finished.sharded_logits()}),
        "an empty dict, and hf": (llama, False, {}, True),
        "a function": (llama, True, made),
        "a function, and hf": (llama, False, made, True),
        "the path of a dict, and hf": (llama, False, f"{path}.STYLES", True),
        "the path of a function": (llama, True, f"{path}.qwen3_plan"),
        "a path that leads to nothing": (llama, True, f"{path}.missing"),
        "a path without a module": (llama, False, "no_such_module.plan"),
        "hf": (llama, False, None, True),
        "hf with SP": (llama, True, None, True),
        "no options": (llama,),
        "Llama with SP": (llama, True),
        "another class of its name": (wrapped, True),
        "its class by another name": (renamed, False),
        "a model without a plan, with SP": (mistral, True),
        "a model-specific plan that fails": (failing, False),
    }

    def see(lab, eye):
        fails = {"Failing": lambda model, sequence_parallel: {}["missing"]}
        with mock.patch.dict(lab.PLANS, fails), mock.patch.dict(finished.PLANS, fails):
            for title, args in choices.items():
                level, plan = outcome(lab.choose_plan, *args)
                _, right = outcome(finished.choose_plan, *args)
                eye.note(f"{title}: the level, or the error", level)
                eye.note(f"{title}: the plan is another", plan != right)

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
