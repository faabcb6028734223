"""Lab 5 as a learner meets it: the run, plans of one's own, its bugs, wrong and right answers."""

import re

import pytest
from conftest import python
from learner import caught, grade, lab_file, listed, ranks, refused, run_answered, run_finished

pytestmark = pytest.mark.slow  # minutes, with the other labs'

LAB = lab_file("lab5")
FAMILIES = ranks.room("checks", LAB).FAMILIES
shown = ranks.room("experiments", LAB)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    printed, results = run_finished(LAB, tmp_path_factory.mktemp("lab5"), "--predict", 20)
    assert "\n  predicted 20, measured 20: right\n" in printed
    return results


def test_every_family_is_one_device_by_our_plans_and_by_hugging_faces(finished):
    rows = [row for row in finished["families"] if row["plan"] != shown.NEMO]
    hugging_face = [row for row in rows if row["plan"].startswith("Hugging Face: ")]
    assert [row["family"] for row in hugging_face] == ["qwen3", "phi3"]
    ours = [row for row in rows if row not in hugging_face]
    both_ways = [(family, sp) for family in FAMILIES for sp in (False, True)]
    assert [(row["family"], row["sequence_parallel"]) for row in ours] == both_ways
    for row in ours:
        level = "base: " if row["family"] == "mistral" else "model-specific: "
        assert row["plan"].startswith(level)
        one, mine = row["gradient_norm"]  # there is one: all parameters are DTensors
        assert mine == pytest.approx(one, rel=1e-5)


def test_nemos_plans_lose_the_gradients_of_q_norm_and_k_norm(finished):
    rows = [row for row in finished["families"] if row["plan"] == shown.NEMO]
    cases = [(family, sp) for family in ("qwen3", "gemma3") for sp in (False, True)]
    assert [(row["family"], row["sequence_parallel"]) for row in rows] == cases
    names = "k_norm", "q_norm"
    norms = [f"model.layers.{i}.self_attn.{name}.weight" for i in (0, 1) for name in names]
    for row in rows:
        assert row["logits"] < 1e-5 and row["loss"] < 1e-5, "no logit shows it"
        assert row["wrong"] == norms and row["gradient"] > 1e-3


def test_gathering_after_the_norm_sends_at_5_edges(finished):
    rows = [row for row in finished["memory"] if row["way"] == shown.GATHERED]
    assert [row["ranks"] for row in rows] == [2, 4, 8]
    for row in rows:
        assert row["claim"] == 0.5 * (1 - 1 / row["ranks"])
        for phase in "forward", "backward":
            for op in "all_gather", "reduce_scatter":
                assert row[phase][op][0] == 2 * 2 + 1


def test_one_plan_is_printed_with_its_reason(capsys):
    assert grade.run_lab(LAB, ["--model", "qwen3", "--sp"]) == 0
    printed = capsys.readouterr().out
    assert "chosen: model-specific: Qwen3ForCausalLM" in printed
    assert re.search(r"model\.layers\.\*\.self_attn\.q_norm +QKNormParallel", printed)
    plans = re.findall(r"^  qwen3 +SP +([^\s:]+)", printed, re.M)
    assert plans == ["model-specific", "NeMo"]


def test_a_plan_of_ones_own(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel\n"
        "mlp = 'model.layers.*.mlp'\n"
        "part = {f'{mlp}.{name}_proj': ColwiseParallel() for name in ('gate', 'up')}\n"
        "part |= {f'{mlp}.down_proj': RowwiseParallel()}\n"
        "def typo(model, sequence_parallel):\n    return {f'{mlp}.gate': ColwiseParallel()}\n"
    )
    run = python(LAB, "--plan", "mine.part", cwd=tmp_path)
    assert run.returncode == 0 and "custom: mine.part" in run.stdout, run.stdout + run.stderr
    run = python(LAB, "--plan", "mine.typo", cwd=tmp_path)
    found = "error: the plan's model.layers.*.mlp.gate fits no module of LlamaForCausalLM\n"
    assert run.returncode == 2 and run.stderr == found


BAD = [
    (["--model", "gpt2"], "argument --model: invalid choice: 'gpt2'"),
    (["--sp", "--hf-plan"], "argument --hf-plan: not allowed with argument --sp"),
    (["--plan", "no_such.plan"], "argument --plan: no plan at no_such.plan"),
]


@pytest.mark.parametrize("options,message", BAD)
def test_bad_input_is_one_line(capsys, options, message):
    refused(LAB, options, message, capsys)


BUGS = {
    "kv_heads_forgotten": ("validate_heads", "whole query heads alone will not do"),
    "validated_too_late": ("validate_heads", "the model is cut before it is refused"),
    "falls_back": ("choose_plan", "a plan that fails must not become another one"),
    "hf_ignores_sp": ("choose_plan", "it would run without SP, and say nothing"),
    "unknown_style_skipped": ("translate_hf_plan", "made_up_style: nothing raised"),
    "logits_gathered": ("translate_hf_plan", "becomes sharded_logits()"),
    "never_gathered": ("all_gather_style", "redistribute it to [Replicate()]"),
    "positions_from_zero": ("rotary_style", "every rank counts from 0"),
    "qk_norm_left_alone": ("qk_norm_style", "each rank keeps the gradient of its own heads"),
    "gradient_summed_in_place": ("qk_norm_style", "summed again in the next backward"),
    "fused_cut_in_pieces": ("fused_style", "a contiguous piece mixes the blocks"),
    "fused_not_put_back": ("fused_style", "the rows are in the ranks' order"),
    "plain_residual": ("llama_plan", "a residual without use_local_output=False"),
    "sp_never_switched_on": ("llama_plan", "the residual stream is (Replicate(),), not"),
}

ANSWERS = """
== validate_heads: whole query heads alone will not do
heads % world or kv_heads % world -> heads % world
== validate_heads: it is heads that must be divided
heads % world or kv_heads % world -> kv_heads * config.head_dim % world
== validate_heads: AssertionError
assert heads % world == kv_heads % world == 0
== validate_heads
works = [n for n in range(1, heads + 1) if not (heads % n or kv_heads % n)]
if world not in works:
    raise ValueError(f"{heads}, {kv_heads} heads: {works} ranks, not {world}")
== choose_plan: the first level that applies
custom is not None: -> custom is not None and not hf:
== choose_plan: call it
if callable(plan) else plan -> if callable(plan) and not hf else plan
== choose_plan: it would run without SP, and say nothing
if sequence_parallel: -> if False:
== choose_plan
if custom is None and hf:
    if not sequence_parallel:
        return hf_plan(model), "Hugging Face"
    raise ValueError("Hugging Face's plan has no SP")
if custom is None:
    level = "model-specific" if name in PLANS else "base"
    return PLANS.get(name, base_plan)(model, sequence_parallel), level
plan = load_plan(custom) if isinstance(custom, str) else custom
return (plan if isinstance(plan, dict) else plan(model, sequence_parallel)), "custom"
== translate_hf_plan: left out, its module stays whole
raise ValueError(f"{name}: no style for transformers' {style}") -> continue
== translate_hf_plan: make a new object for each
plan = {} -> plan, made = {}, {text: make() for text, make in STYLES.items()}
STYLES[style]() -> made[style]
== translate_hf_plan: prefix: model.
f"{prefix}.{name}" -> name
== translate_hf_plan
plan = {"model.embed_tokens": STYLES["embedding_rowwise"]()}
below = [(f"model.{name}", text) for name, text in model.config.base_model_tp_plan.items()]
for name, text in below + list(model._tp_plan.items()):
    if STYLES.get(text) is None:
        raise ValueError(f"{text} of {name}")
    plan[name] = sharded_logits() if name == "lm_head" else STYLES[text]()
return plan
== all_gather_style: redistribute it to [Replicate()]
return y
== all_gather_style: q, k and v's gradients meet in it
return y.redistribute(placements=[Replicate()]).to_local()
== all_gather_style: the result is a plain tensor
return y.full_tensor()
== all_gather_style
return y.redistribute(mesh, (Replicate(),))
== rotary_style: gather the positions of all tokens
pass
== rotary_style: counts from 0: add rank
own = position_ids + device_mesh.get_local_rank() * n -> own = position_ids
== rotary_style: positions given
not isinstance(x, DTensor) and position_ids.shape[1] == n -> not isinstance(x, DTensor)
== rotary_style
if not isinstance(x, DTensor) and position_ids.shape == (1, x.shape[1]):
    position_ids = torch.arange(x.shape[1] * device_mesh.size())[None]
== qk_norm_style: x enters as Shard, not Replicate
[Shard(1)] -> [Replicate()]
== qk_norm_style: each rank keeps the gradient of its own heads
return module
== qk_norm_style: clip_grad_norm_ refuses a mixture of both kinds
group = device_mesh.get_group()
total = torch.distributed.nn.functional.all_reduce
module.weight.register_hook(lambda grad: total(grad.clone(), group=group))
return module
== qk_norm_style
def enter(module, args, mesh):
    return (DTensor.from_local(*args, mesh, (Shard(0),), run_check=False),)

def leave(module, y, mesh):
    return y.redistribute(placements=(Shard(0),)).to_local()
== fused_style: mixes the blocks
return torch.arange(sum(sizes))
--
...
== fused_style: full[order] reorders once more
...
--
return full[order]
== fused_style: one rank would hold more of it
if size % world: -> if False:
== fused_style
if any(size % world for size in sizes):
    raise ValueError(f"{sizes} over {world} ranks")
rows = torch.arange(sum(sizes)).split(sizes)
return torch.cat([block.view(world, -1) for block in rows], 1).flatten()
--
return full[order.argsort()]
== llama_plan: fits no module
.mlp.down_proj -> .mlp.down
== llama_plan: use_local_output=False keeps
{"output_layouts": tokens, "use_local_output": False} -> {"output_layouts": tokens}
== llama_plan: gathered once for q, k and v
layernorm": Norm -> layernorm": SequenceParallel() if tokens.is_shard() else Norm
== llama_plan
ColwiseParallel(), -> ColwiseParallel(input_layouts=Replicate()),
RowwiseParallel(**residual) -> RowwiseParallel(input_layouts=Shard(-1), **residual)
"""
WRONG, RIGHT = listed(LAB, ANSWERS)
test_bugs_are_caught, test_wrong_answers_get_their_hint = caught(LAB, BUGS, WRONG)


def test_other_right_answers_pass_and_the_lab_accepts_them(tmp_path):
    run_answered(LAB, RIGHT, tmp_path, "--seed", 20)
