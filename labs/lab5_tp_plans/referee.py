"""Lab 5's referee: does a tensor parallel plan, anyone's, train the model that one device trains?

Every parameter's gradient on every rank is compared with one device's, in float64, where rounding
hides nothing: after one microbatch, and after a second has been added to it. Beside the verdict
stands what the first sent. The model is a folder that transformers can load, a family's is tiny.
"""

import tempfile
from importlib.util import find_spec
from pathlib import Path

import torch
import transformers
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, RowwiseParallel, SequenceParallel
from transformers import AutoConfig, AutoModelForCausalLM

from labs.kit.cli import UsageError
from labs.kit.harness import Wrong, on_ranks, relative_error, table
from labs.kit.models import Float64
from labs.lab5_tp_plans.lesson import LAYER
from labs.lab5_tp_plans.models import (
    FAMILIES,
    MORE,
    describe,
    full,
    random_ids,
    short,
    step,
    tiny_model,
)

LIMIT, RANKS, TOKENS = 1e-10, 2, 16
OURS, NEMO = "this lab's", "NeMo AutoModel's"
STRINGS = "Hugging Face's, by torch's styles"  # base_model_tp_plan, translated
OWN = "Hugging Face's DistributedConfig"  # the same strings, by transformers' own styles
REFEREED = [*FAMILIES, *MORE]
BY_NEMO = [family for family in REFEREED if family not in ("phi3", "glm4", "olmo2")]


def plain_residual(plan):
    """A plan without SP whose residual stream is plain tensors; no norm has a style."""
    plan = {name: style for name, style in plan.items() if not name.endswith("norm")}
    plan["model.embed_tokens"] = RowwiseParallel(input_layouts=Replicate())
    blocks = f"{LAYER}.self_attn.o_proj", f"{LAYER}.mlp.down_proj"
    return plan | {name: RowwiseParallel() for name in blocks}


def nemo_plan(lab, model, sequence_parallel):
    """What NeMo AutoModel's plans say: ours, but q_norm, k_norm left alone.

    Without SP all norms are; Gemma3's have torch's plain SequenceParallel with it. (Its style for
    Gemma3's rotary_emb is left out: with a residual stream of DTensors it changes nothing.)
    """
    plan, _ = lab.choose_plan(model, sequence_parallel)
    if not sequence_parallel:
        return plain_residual(plan)
    plan = {name: style for name, style in plan.items() if not name.endswith(("q_norm", "k_norm"))}
    if type(model).__name__ == "Gemma3ForCausalLM":
        plan |= {name: SequenceParallel() for name in plan if name.endswith("norm")}
        plan["lm_head"] = lab.sharded_logits(Shard(1))
    return plan


class NormOverHeads(ParallelStyle):
    """OLMo2's norm of q or k, over all heads, of which a rank has some: (b, s, features/P) in, out.

    DTensor knows the mean of squares to be a part of a mean: one number a token is all-reduced.
    """

    def _apply(self, module, device_mesh):
        def cut(name, module, mesh):
            weight = distribute_tensor(module.weight.detach(), mesh, [Shard(0)])
            module.weight = nn.Parameter(weight)

        def enter(module, args, mesh):
            return DTensor.from_local(args[0], mesh, [Shard(-1)], run_check=False)

        def leave(module, y, mesh):
            return y.to_local()

        return distribute_module(module, device_mesh, cut, enter, leave)


def olmo2_plan(lab, model, sequence_parallel):
    """Llama's, with the norms behind the blocks, and those of q and k over all heads."""
    norms = {f"{LAYER}.self_attn.{name}_norm": NormOverHeads() for name in ("q", "k")}
    plan = lab.llama_plan(model, sequence_parallel)
    if not sequence_parallel:  # q, k and v read the residual stream, no norm's one result
        return plain_residual(plan) | norms
    del plan[f"{LAYER}.input_layernorm"]
    after = {f"{LAYER}.post_{block}_layernorm" for block in ("attention", "feedforward")}
    return plan | norms | {name: SequenceParallel() for name in after}


def as_plan(found, path):
    """A plan; raises ValueError, which says what to use, for what is none."""
    use = "use {'model.layers.*.mlp.up_proj': ColwiseParallel(), ...}"
    if not isinstance(found, dict):
        kind = type(found).__name__
        raise ValueError(f"{path} is no plan, of type {kind}: {use}, or a function that returns it")
    for name, style in found.items():
        if not isinstance(name, str) or not isinstance(style, ParallelStyle):
            strings = "; for transformers' strings use --hf-plan" * isinstance(style, str)
            raise ValueError(f"{path} is no plan: {name!r}: {style!r}; {use}{strings}")
    return found


def plan_of(lab, model, plan, sequence_parallel):
    """(styles, which and why) of a plan that has one of the names above, or an import path.

    Raises ValueError where the caller's plan is none, whatever it does.
    """
    if plan == NEMO:
        return nemo_plan(lab, model, sequence_parallel), NEMO
    if plan == OURS and model.config.model_type == "olmo2":
        return olmo2_plan(lab, model, sequence_parallel), "the referee's"
    custom = None if plan in (OURS, STRINGS) else plan
    try:
        styles, why = lab.choose_plan(model, sequence_parallel, custom, plan == STRINGS)
    except Exception as problem:
        if custom is None or isinstance(problem, ValueError):
            raise
        what = f"{type(problem).__name__}: {problem}"
        how = "use a function(model, sequence_parallel) that returns a dict"
        raise ValueError(f"{custom} is no plan: {what}; {how}") from None
    return styles if custom is None else as_plan(styles, custom), why


def be_quiet():
    """No warnings and no bars from transformers."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def read(folder, **how):
    """The model of a folder, in float64; the same numbers on every rank."""
    be_quiet()
    torch.manual_seed(0)
    how |= {"dtype": torch.float64, "attn_implementation": "sdpa", "local_files_only": True}
    how |= {"use_safetensors": True, "trust_remote_code": False}  # no code of the folder is run
    auto = AutoModelForCausalLM
    return auto.from_pretrained(folder, **how).eval()


def gradients(model, whole):
    """{name: gradient as one device has it}; tied weights by both of their names."""
    found = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        grad = torch.zeros_like(p) if p.grad is None else p.grad
        found[name] = whole(name, grad).detach().clone()
    return found


def two_steps(model, whole):
    """[{name: tensor} after one microbatch, after two], and what the first sent."""
    vocabulary, found, sent = model.config.get_text_config().vocab_size, [], []
    for seed in (0, 1):
        ids = random_ids(seed, TOKENS, vocabulary)
        logits, loss, forward, backward = step(model, ids)
        sent.append((forward.ops, backward.ops))
        found.append({"logits": full(logits), "loss": full(loss)} | gradients(model, whole))
    return found, sent[0]


def total_norm(model):
    """The norm of all gradients, or None: torch refuses DTensors beside plain tensors."""
    grads = [p.grad for p in model.parameters()]
    if len({isinstance(grad, DTensor) for grad in grads}) > 1:
        return None
    return full(nn.utils.get_total_norm(grads)).item()


def judge(group, lab, folder, plan, sequence_parallel):
    """A row of this rank: which plan, what it sent, and every tensor's error on this rank.

    "errors": [{name: relative error} after one microbatch, after two].
    """
    row = {"plan": plan, "chosen": plan, "sequence_parallel": sequence_parallel}
    with Float64():
        one = read(folder)
        right, _ = two_steps(one, lambda name, x: x)
        if plan == OWN:
            config = transformers.distributed.DistributedConfig(tp_size=group.size())
            model = read(folder, distributed_config=config)
        else:
            model = read(folder)
            styles, row["chosen"] = plan_of(lab, model, plan, sequence_parallel)
            row["entries"] = {name: describe(style) for name, style in styles.items()}
            lab.parallelize(model, DeviceMesh.from_group(group, "cpu"), styles)
        mine, (row["forward"], row["backward"]) = two_steps(
            model, lambda name, x: lab.whole(model, name, x)
        )
    pairs = zip(mine, right)
    row["errors"] = [{name: relative_error(m[name], r[name]) for name in r} for m, r in pairs]
    row["gradient_norm"] = total_norm(one), total_norm(model)
    return row


def verdict_of(ranks):
    """Of the ranks' rows one: the largest errors of all ranks, "wrong" {name: both}, "verdict"."""
    row = {name: value for name, value in ranks[0].items() if name != "errors"}
    many = [rank["errors"] for rank in ranks]
    worst = {n: [max(e[i][n] for e in many) for i in (0, 1)] for n in many[0][0]}
    row["wrong"] = {name: both for name, both in worst.items() if not max(both) <= LIMIT}
    row["verdict"] = "WRONG" if row["wrong"] else "right"
    for name in "logits", "loss":
        row[name] = max(worst.pop(name))
    row["gradient"], row["accumulated"] = map(max, zip(*worst.values()))
    return row


def verdict(lab, folder, plan, sequence_parallel):
    """A row: "right", "WRONG", or, without a gradient, "refused", "fails", "absent"; and why."""
    row = {"plan": plan, "chosen": plan, "sequence_parallel": sequence_parallel}
    if plan == OWN and not find_spec("transformers.distributed.tensor_parallel"):
        why = f"transformers {transformers.__version__} has none"
        return row | {"verdict": "absent", "why": why}
    if plan == OWN and not find_spec("accelerate"):
        return row | {"verdict": "absent", "why": "it needs accelerate, which is not installed"}
    try:
        return verdict_of(on_ranks(RANKS, judge, lab, folder, plan, sequence_parallel, timeout=300))
    except Wrong as wrong:
        _, refused, why = wrong.found.partition("ValueError: ")
        return row | {"verdict": "refused" if refused else "fails", "why": why or wrong.found}


def make_folder(model, scratch):
    """A folder with a model's config and weights: a family's, or those that are in a folder."""
    be_quiet()
    folder = Path(scratch, Path(model).name)
    if folder.exists():
        return str(folder)
    if model in REFEREED:
        made = tiny_model(model)
    else:
        try:
            how = {"local_files_only": True, "trust_remote_code": False}
            config = AutoConfig.from_pretrained(model, **how)
            if [*Path(model).glob("*.safetensors")]:
                return str(model)
            torch.manual_seed(0)
            made = AutoModelForCausalLM.from_config(config)  # random weights: none are there
        except Exception as problem:  # of many kinds
            first = str(problem).partition("\n")[0]
            use = "use a folder whose config.json is of a causal language model of transformers"
            raise UsageError(f"--model {model}: {first}; {use}") from None
    made.double().save_pretrained(folder)
    return str(folder)


def asked_for(args):
    """[(model, plan, sequence_parallel)] that the command line asks for."""
    for name in ("plot", "predict", "inject_bug", "hf_plan"):
        if getattr(args, name) not in (None, False):
            option = name.replace("_", "-")
            raise UsageError(f"--referee tries every plan: leave out --{option}")
    if args.plan:
        return [(args.model or "llama", args.plan, args.sp)]
    if args.sp:
        raise UsageError("--referee without --plan tries both: leave out --sp")
    cases = []
    for model in [args.model] if args.model else REFEREED:
        cases += [(model, OURS, sp) for sp in (False, True)]
        cases += [(model, STRINGS, False), (model, OWN, False)]
        by_nemo = model in BY_NEMO or model not in REFEREED
        cases += [(model, NEMO, sp) for sp in (False, True) if by_nemo]
    return cases


def tp_or_sp(row):
    return "SP" if row["sequence_parallel"] else "TP"


def cells(row):
    """A row's columns, below HEAD."""
    begin = [row["model"], tp_or_sp(row), row["chosen"], row["verdict"]]
    if "why" in row:  # which may be long
        return [*begin, "", "", "", row["why"][:64], ""]
    names = [name.removeprefix("model.") for name in row["wrong"]]
    errors = [f"{row[name]:.0e}" for name in ("logits", "gradient", "accumulated")]
    more = f" and {len(names) - 1} more" if names[1:] else ""
    messages = f"{short(row['forward'])} | {short(row['backward'])}"
    return [*begin, *errors, f"{names[0]}{more}" if names else "", messages]


HEAD = ["model", "", "which plan, and why", "verdict", "logits", "1 batch", "2 added"]
HEAD += ["wrong, or why", "messages"]


def print_verdicts(rows):
    print(f"\n{RANKS} ranks, float64, beside one device: the largest relative error of the logits,")
    print("and of a parameter's gradient after one microbatch, and after a second has been added")
    table(HEAD, *map(cells, rows))
    print(f"\n  right: at most {LIMIT:.0e}. messages: forward | backward. AR all-reduce,")
    print("  AG all-gather, RS reduce-scatter; 3 AR are the sharded loss's, of a number a token")


def referee(lab, args):
    """Every case's verdict, printed; "passed": no plan of this lab or the caller is WRONG."""
    rows, bad = [], {args.plan: ("WRONG", "fails", "refused"), OURS: ("WRONG", "fails")}
    with tempfile.TemporaryDirectory() as scratch:
        for model, *case in asked_for(args):
            row = verdict(lab, make_folder(model, scratch), *case)
            rows.append({"model": model} | row)
            if row["plan"] == args.plan and row["verdict"] == "refused":
                raise UsageError(row["why"])
    print_verdicts(rows)
    off = [row for row in rows if row["verdict"] in bad.get(row["plan"], ())]
    said = [f"{row['model']}, {row['plan']}, {row['verdict']}" for row in off]
    print(f"\n{'FAIL' if off else 'PASS'} referee: {'; '.join(said) or f'{len(rows)} verdicts'}")
    return {"referee": rows, "limit": LIMIT, "passed": not off}
