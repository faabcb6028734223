"""Lab 5's checks, each of which runs on every rank, and the bugs that they have to catch.

Logits and gradients of tiny random models are compared with one device's, in float32; what is sent
is compared with what will do.
"""

import random
import re
import sys
import tempfile
from collections import Counter
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
)

from labs.kit.compare import raised, tried
from labs.kit.harness import Wrong, expect
from labs.lab5_tp_plans import styles
from labs.lab5_tp_plans.models import (
    SHAPE,
    against_one_device,
    random_ids,
    tiny_model,
    uneven_length,
)
from labs.lab5_tp_plans.styles import LAYER, TOLERANCE, expect_calls, expect_one_device, finished

SUBGROUP = True  # the group is not the world, and has other rank numbers


def check_validate_heads(lab, group, seed):
    draw = random.Random(seed)
    for _ in range(40):
        kv, heads, world = draw.randint(1, 12), draw.randint(1, 24), draw.randint(1, 8)
        config = SimpleNamespace(num_attention_heads=heads, num_key_value_heads=kv, head_dim=64)
        message = raised(lab.validate_heads, config, world)
        case = f"{heads} heads, {kv} KV heads, {world} ranks"
        hint = "raise ValueError unless the ranks divide both, heads (not features) and KV heads"
        if kv % world == heads % world == 0:
            expect(message is None, f"{case}: refused: {message}", hint)
            continue
        expect(message, f"{case}: not refused", hint)
        fit = {n for n in range(1, kv + 1) if kv % n == heads % n == 0}
        named = Counter(map(int, re.findall(r"\d+", message)))
        wanted = Counter([*fit, heads, kv, world])
        lacks, more = [*(wanted - named)], [*(named.keys() - wanted)]  # kv ranks would do, too
        found = f"{case}: the message lacks {lacks}, should not name {more}: {message}"
        hint = "both numbers, the ranks, and what to use: all that divide both, from 1 to both"
        expect(not lacks and not more, found, hint)
    model = tiny_model("llama", seed, num_key_value_heads=1)
    mesh = DeviceMesh.from_group(group, "cpu")
    message = raised(lab.parallelize, model, mesh, {f"{LAYER}.self_attn.q_proj": ColwiseParallel()})
    cut = any(isinstance(p, DTensor) for p in model.parameters())
    found = "one KV head is cut over two ranks, or the model is cut before it is refused"
    expect(message and not cut, found, "raise ValueError: parallelize() calls it before it cuts")
    return "40 configs: refused where a rank would get part of a head, told what to use; none cut"


FAILS = "a plan that fails must not become another one"
CALL = "load_plan() a path; a function is called with (model, sequence_parallel), returns the plan"
LEVELS = "the first that applies: custom unless None, hf if asked, PLANS by the class's own name"


def chosen(lab, level, model, *args):
    """The plan of choose_plan(); Wrong unless it says that it is of this level."""
    pair = lab.choose_plan(model, *args)
    two = isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[1], str)
    expect(two, f"{level}: {type(pair).__name__} is returned", "return a pair: plan, reason")
    plan, reason = pair
    expect(isinstance(plan, dict), f"{level}: the plan is {type(plan).__name__}", CALL)
    found = f"(sequence_parallel, custom, hf) = {args}: {reason!r} is chosen, not {level}"
    hint = "the reason begins with the level's name" if level in reason else LEVELS
    expect(reason.startswith(level), found, hint)
    return plan


def check_choose_plan(lab, group, seed):
    llama, mistral = tiny_model("llama", seed), tiny_model("mistral", seed)
    plan, called = {"lm_head": lab.sharded_logits()}, []

    def function(model=None, sequence_parallel=None):
        called.append((model, sequence_parallel))
        return plan

    for sequence_parallel, hf in ((False, True), (True, False)):
        mine = chosen(lab, "custom", llama, sequence_parallel, plan, hf)
        expect(mine is plan, "not the dict that was given", "the caller's comes before all else")
        mine = chosen(lab, "custom", llama, sequence_parallel, function, hf)
        expect(mine is plan, "not what the function returns", CALL)
        given = called[-1][0] is llama and called[-1][1] is sequence_parallel
        expect(given, f"custom(..., {called[-1][1]}) is called, not {sequence_parallel}", CALL)
    chosen(lab, "custom", llama, True, {})
    check_import_paths(lab, llama, f"plans_of_seed_{seed}")
    mine = chosen(lab, "Hugging Face", llama, False, None, True)
    expect(mine.keys() == lab.hf_plan(llama).keys(), "not Hugging Face's plan")
    message = raised(lab.choose_plan, llama, True, None, True)
    hint = "it would run without SP, and say nothing"
    expect(message, "Hugging Face's plan with SP is not refused", hint)
    check_registered_plans(lab, llama, seed)
    mine = chosen(lab, "base", mistral, True)
    right = isinstance(mine["model.norm"], SequenceParallel)
    expect(right, "not base_plan()'s", "base_plan(model, sequence_parallel)")
    return "dict, function, paths; HF's; model-specific, wrapped too; base; failures are raised"


def check_registered_plans(lab, llama, seed):
    """Model-specific plans, by the class's name alone; one that fails is raised."""
    wrapped, renamed = tiny_model("llama", seed), tiny_model("llama", seed)
    wrapped.__class__ = type("LlamaForCausalLM", (type(llama),), {})
    wrapped.config.model_type = "of_a_framework"
    renamed.__class__ = type("OfAFramework", (type(llama),), {})
    chosen(lab, "base", renamed, False)
    for model, sequence_parallel in ((llama, True), (wrapped, False)):
        mine = chosen(lab, "model-specific", model, sequence_parallel)
        right = lab.PLANS["LlamaForCausalLM"](model, sequence_parallel)
        same = mine.keys() == right.keys()
        same = same and repr(mine["model.embed_tokens"]) == repr(right["model.embed_tokens"])
        found = f"not the plan of LlamaForCausalLM, SP {sequence_parallel}"
        expect(same, found, "PLANS[name of the class](model, sequence_parallel)")
    failing = tiny_model("qwen2", seed)
    lab.PLANS["Qwen2ForCausalLM"] = lambda model, sequence_parallel: {}["missing"]
    with suppress(KeyError):
        _, reason = lab.choose_plan(failing)
        raise Wrong(f"a model-specific plan that fails becomes {reason!r}", FAILS)


def check_import_paths(lab, model, name):
    """Plans by import path: a dict, a function, and none, from a module of that name."""
    with tempfile.TemporaryDirectory() as folder:
        source = "given = {'a': 1}\ndef made(model, sp):\n    return {'b': sp}\n"
        Path(folder, f"{name}.py").write_text(source)
        sys.path.insert(0, folder)
        for path, right in ((f"{name}.given", {"a": 1}), (f"{name}.made", {"b": True})):
            mine = chosen(lab, "custom", model, True, path)
            found = f"the plan at {path} is {mine}, not {right}"
            expect(mine == right, found, CALL)
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
        differ = min(plan.keys() ^ keys, default="")
        hint = "below model. stands what the config names; add the class's, and embed_tokens"
        expect(not differ, f"{family}: keys differ, as {differ}", hint)
        for name, style in plan.items():
            hint = "STYLES has classes and functions: call one, for a new style"
            expect(isinstance(style, ParallelStyle), f"{family}: {name} is {style}", hint)
        expect_head(family, plan["lm_head"], False)
        found = f"{family}: embed_tokens is {plan['model.embed_tokens']}"
        right = isinstance(plan["model.embed_tokens"], RowwiseParallel)
        expect(right, found, 'where it is missing, "embedding_rowwise"')
        shared = len(set(map(id, plan.values()))) < len(plan)
        expect(not shared, f"{family}: two modules share a style", "make a new object for each")
        hint = "each string becomes its style of STYLES; only the lm_head's may change"
        errors, forward, *_ = tried(family, hint, against_one_device, lab, model, plan, group, ids)
        worst = max(worst, expect_one_device(family, errors, hint))
    expect(not forward.bytes("all_gather"), "llama: something is gathered", SHARDED)
    check_other_strings(lab, model)
    return f"Qwen3, Phi3, tied Llama by HF's strings: gradients off by {worst:.0e}; unknown refused"


SHARDED = "lm_head's colwise_gather_output becomes sharded_logits(), which gathers nothing"


def expect_head(case, head, local):
    """Raise Wrong unless a style of lm_head leaves logits sharded, as a plain tensor if local."""
    right = head.output_layouts == (Shard(-1),) and head.use_local_output == local
    hint = "only an lm_head that gathers changes: this one's string is colwise, in the class's plan"
    expect(right, f"{case}: lm_head is {head}", hint if local else SHARDED)


def check_other_strings(lab, model):
    """Strings that transformers does not give this model, in its class and its configuration."""
    model.__class__ = type("Other", (type(model),), {"_tp_plan": {"lm_head": "colwise"}})
    model._tp_plan = {"lm_head": "colwise", "model.embed_tokens": "embedding_colwise"}
    model.config.base_model_tp_plan = {"embed_tokens": "embedding_colwise"}
    plan = lab.hf_plan(model)
    table = plan["model.embed_tokens"]
    hint = "embedding_rowwise only where it is missing"
    expect(isinstance(table, ColwiseParallel), f"embedding_colwise becomes {table}", hint)
    expect_head("colwise", plan["lm_head"], True)
    model.config.base_model_tp_plan = {"layers.*.mlp": "made_up_style"}
    message = raised(lab.hf_plan, model)
    named = message and "made_up_style" in message and "layers.*.mlp" in message
    hint = "left out, its module stays whole: raise ValueError, with the string and the module"
    expect(named, f"made_up_style: {message or 'nothing raised'}", hint)


def unlike(plan, right):
    """A hint at the first entry of a plan that has another style, or other layouts, or ""."""
    for name, style in right.items():
        mine = plan.get(name)
        if type(mine).__name__ != type(style).__name__:
            return f"see {name}: its style is {'missing' if mine is None else type(mine).__name__}"
        differ = [key for key, value in vars(style).items() if vars(mine)[key] != value]
        if differ:
            return (
                f"see {name}, its {differ[0]}: where x lies before and after, as a DTensor or not"
            )
    return ""


def expect_layouts(case, plan, right):
    """Raise Wrong where a plan's styles say that x lies elsewhere; the values may be right."""
    named = {"NormThenGather": "layout", "RowwiseParallel": "output_layouts"}
    hint = "o_proj and down_proj leave TOKENS, a norm has TOKENS, q, k, v and lm_head all of x"
    for name, style in right.items():
        attribute = named.get(type(style).__name__, "input_layouts")
        alike = type(plan.get(name)).__name__ == type(style).__name__
        mine, said = (getattr(one, attribute) for one in (plan[name] if alike else style, style))
        expect(mine == said, f"{case}: {name}'s {attribute}: {mine}, not {said}", hint)


def check_llama_plan(lab, group, seed):
    worst, layers = 0, SHAPE["num_hidden_layers"]
    edges, loss = 2 * layers + 1, 5  # the loss may take that many small all-reduces
    once = "NormThenGather: gathered once for q, k and v, reduced once in the backward"
    cases = ("llama", False, True), ("qwen2", True, False), ("llama", True, True)
    for family, sequence_parallel, tied in cases:
        case = f"{family}, {'SP' if sequence_parallel else 'TP'}"
        model = tiny_model(family, seed, tie_word_embeddings=tied)
        residual = styles.noted_outputs(model.model.layers[0])
        plan, right = (x.llama_plan(model, sequence_parallel) for x in (lab, finished))
        tokens = Shard(1) if sequence_parallel else Replicate()
        expect_layouts(case, plan, right)
        ids = random_ids(seed, uneven_length(DeviceMesh.from_group(group, "cpu")))
        hint = unlike(plan, right)
        step = tried(case, hint, against_one_device, lab, model, plan, group, ids)
        errors, forward, backward, norms = step
        worst = max(worst, expect_one_device(case, errors, hint))
        x = residual[-1]
        placed = x.placements if isinstance(x, DTensor) else "a plain tensor"
        kept = "see TOKENS" if isinstance(x, DTensor) else "use_local_output=False keeps a DTensor"
        expect(placed == (tokens,), f"{case}: the residual stream is {placed}, not {tokens}", kept)
        most = {"all_gather": edges, "reduce_scatter": edges} if sequence_parallel else {}
        small = {"all_reduce": loss if sequence_parallel else edges + loss}
        expect_calls(f"{case}, forward", forward, hint or once, **most, **small)
        small = {"all_reduce": 2 if sequence_parallel else edges}
        expect_calls(f"{case}, backward", backward, hint or once, **most, **small)
        hint = "clip_grad_norm_ refuses that: a style for every norm"
        expect(norms[1] is not None, f"{case}: some parameters are plain, some DTensors", hint)
        expect(abs(norms[1] / norms[0] - 1) < TOLERANCE, f"{case}: the gradient's norm is off")
        differ = sorted(plan.keys() ^ right.keys())
        hint = "one for each module of the table: other plans exchange some"
        expect(not differ, f"{case}: {len(differ)} keys differ, as {differ[:1]}", hint)
    return f"logits, every gradient off by {worst:.0e}, tied too; {edges} edges a way, TP and SP"


CHECKS = {
    "validate_heads": (check_validate_heads, 2),
    "all_gather_style": (styles.check_all_gather_style, 2),
    "qk_norm_style": (styles.check_qk_norm_style, 2),
    "rotary_style": (styles.check_rotary_style, 2),
    "fused_style": (styles.check_fused_style, 2),
    "llama_plan": (check_llama_plan, 2),
    "translate_hf_plan": (check_translate_hf_plan, 2),
    "choose_plan": (check_choose_plan, 1),
}


# Bugs for --inject-bug: the checks have to catch every one


def qk_norm_left_alone(lab):
    """The norms of q and k stay as they are, as in NeMo AutoModel's plans."""
    lab.QKNormParallel._apply = lambda style, module, mesh: module


def fused_cut_in_pieces(lab):
    """[Q | K | V] is cut in P contiguous pieces."""
    lab.fused_order = lambda sizes, world: torch.arange(sum(sizes))


def plain_residual(lab):
    """The residual stream is plain tensors of own tokens: as NeMo AutoModel's once was."""
    right = lab.llama_plan

    def llama_plan(model, sequence_parallel):
        tokens = Shard(1) if sequence_parallel else Replicate()
        embed = RowwiseParallel(input_layouts=Replicate(), output_layouts=tokens)
        return right(model, sequence_parallel) | {"model.embed_tokens": embed}

    lab.llama_plan = llama_plan


BUGS = [qk_norm_left_alone, fused_cut_in_pieces, plain_residual]
