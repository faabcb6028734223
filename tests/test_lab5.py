"""labs/lab5_tp_plans.py as a learner meets it: the run, its bugs, and wrong answers."""

import json
import re
import sys
from functools import partial
from textwrap import dedent, indent

import conftest
import pytest
from conftest import REGION, ROOT, python

sys.path.insert(0, str(ROOT / "labs"))
import lab5_tp_plans as lab5  # noqa: E402

pytestmark = pytest.mark.slow  # minutes, with the other labs'

LAB = ROOT / "labs" / "lab5_tp_plans.py"
graded = partial(conftest.graded, lab5)
splice = partial(conftest.splice, lab5)


# The run


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lab5")
    run = python(LAB, "--json", folder / "lab5.json", "--plot", folder / "lab5.png")
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stderr == "", "nothing but the report is printed"
    assert sorted(path.name for path in folder.iterdir()) == ["lab5.json", "lab5.png"]
    return run.stdout, json.loads((folder / "lab5.json").read_text()), folder / "lab5.png"


def test_the_lab_proves_itself(finished):
    printed, results, picture = finished
    assert printed.splitlines()[-1] == "PASS lab5_tp_plans: all 8 exercises' checks hold"
    assert results["passed"] and results["failed"] == []
    assert results["exercises"].keys() == lab5.CHECKS.keys()
    assert all(
        exercise["passed"] and exercise["report"] for exercise in results["exercises"].values()
    )
    assert picture.read_bytes()[:4] == b"\x89PNG" and picture.stat().st_size > 20_000


def test_every_family_is_one_device_by_our_plans_and_by_hugging_faces(finished):
    rows = [row for row in finished[1]["families"] if not row["plan"].startswith("NeMo")]
    ours = {
        (row["family"], row["sequence_parallel"])
        for row in rows
        if not row["plan"].startswith("Hugging")
    }
    assert ours == {(family, sp) for family in lab5.FAMILIES for sp in (False, True)}
    assert {row["family"] for row in rows if row["plan"].startswith("Hugging Face: ")} == {
        "qwen3",
        "phi3",
    }
    for row in rows:
        assert max(row["logits"], row["loss"], row["gradient"]) < 1e-5 and row["wrong"] == []
        level = "base: " if row["family"] == "mistral" else ("model-specific: ", "Hugging Face: ")
        assert row["plan"].startswith(level)
        if not row["plan"].startswith("Hugging Face"):
            one, mine = row["gradient_norm"]
            assert mine == pytest.approx(one, rel=1e-5), (
                "all parameters are DTensors, and have one norm"
            )


def test_nemos_plans_lose_the_gradients_of_q_norm_and_k_norm(finished):
    rows = [row for row in finished[1]["families"] if row["plan"].startswith("NeMo")]
    assert [(row["family"], row["sequence_parallel"]) for row in rows] == [
        ("qwen3", False), ("qwen3", True), ("gemma3", False), ("gemma3", True)
    ]  # fmt: skip
    norms = {
        f"model.layers.{i}.self_attn.{name}.weight" for i in (0, 1) for name in ("q_norm", "k_norm")
    }
    for row in rows:
        assert row["logits"] < 1e-5 and row["loss"] < 1e-5, "no logit shows it"
        assert set(row["wrong"]) == norms and row["gradient"] > 1e-3


def test_gathering_after_the_norm_sends_less_often_and_keeps_more(finished):
    rows = finished[1]["memory"]
    assert [row["ranks"] for row in rows] == [2] * 3 + [4] * 3 + [8] * 3
    for world in 2, 4, 8:
        tp, gathered, plain = (row for row in rows if row["ranks"] == world)
        assert plain["saved"] < gathered["saved"] < tp["saved"]
        assert lab5.calls(gathered) < lab5.calls(plain)
        assert gathered["claim"] == plain["claim"] == 0.5 * (1 - 1 / world)
        edges = 2 * 2 + 1
        assert (
            gathered["forward"]["all_gather"][0]
            == gathered["backward"]["reduce_scatter"][0]
            == edges
        )
        assert (
            gathered["forward"]["reduce_scatter"][0]
            == gathered["backward"]["all_gather"][0]
            == edges
        )


def test_one_plan_is_printed_with_its_reason(tmp_path):
    run = python(LAB, "--model", "qwen3", "--sp", "--json", tmp_path / "one.json")
    assert run.returncode == 0, run.stdout + run.stderr
    assert "chosen: model-specific: Qwen3ForCausalLM" in run.stdout
    assert re.search(r"model\.layers\.\*\.self_attn\.q_norm +QKNormParallel", run.stdout)
    rows = json.loads((tmp_path / "one.json").read_text())["families"]
    assert [row["plan"].partition(":")[0] for row in rows] == ["model-specific", "NeMo AutoModel's"]
    assert all(row["sequence_parallel"] for row in rows)


def test_a_plan_of_ones_own(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel\n"
        "part = {'model.layers.*.mlp.gate_proj': ColwiseParallel(), 'model.layers.*.mlp.up_proj':\n"
        "        ColwiseParallel(), 'model.layers.*.mlp.down_proj': RowwiseParallel()}\n"
        "def typo(model, sequence_parallel):\n    return {'model.layers.*.mlp.gate': ColwiseParallel()}\n"
    )
    env = {"PYTHONPATH": str(tmp_path)}
    run = python(LAB, "--plan", "mine.part", env=env)
    assert run.returncode == 0 and "custom: mine.part" in run.stdout, run.stdout + run.stderr
    run = python(LAB, "--plan", "mine.typo", env=env)
    assert run.returncode == 2
    assert (
        run.stderr
        == "error: the plan's model.layers.*.mlp.gate fits no module of LlamaForCausalLM\n"
    )


BAD = [
    (["--model", "gpt2"], "argument --model: invalid choice: 'gpt2'"),
    (["--sp", "--hf-plan"], "argument --hf-plan: not allowed with argument --sp"),
    (["--plan", "no_such.plan"], "argument --plan: no plan at no_such.plan"),
    (["--inject-bug", "typo"], "no bug typo; --inject-bug list names them"),
    (["--json", "/nowhere/at/all.json"], "cannot write /nowhere/at/all.json"),
    (["--typo"], "unrecognized arguments: --typo"),
]


@pytest.mark.parametrize("options,message", BAD)
def test_bad_input_is_one_line(capsys, options, message):
    assert lab5.main(options) == 2
    printed = capsys.readouterr()
    assert (
        printed.out == ""
        and printed.err.startswith(f"error: {message}")
        and printed.err.count("\n") == 1
    )


# Its bugs: the exercise whose check catches each, and what it says

CAUGHT = {
    "kv_heads_forgotten": ("validate_heads", "whole query heads alone will not do"),
    "validated_too_late": ("validate_heads", "the model is cut before it is refused"),
    "falls_back": ("choose_plan", "a plan that fails must not become another one"),
    "hf_ignores_sp": ("choose_plan", "it would run without SP, and say nothing"),
    "unknown_style_skipped": ("translate_hf_plan", "made_up_style: nothing raised"),
    "logits_gathered": (
        "translate_hf_plan",
        "lm_head's colwise_gather_output becomes sharded_logits()",
    ),
    "never_gathered": ("all_gather_style", "redistribute it to [Replicate()]"),
    "positions_from_zero": ("rotary_style", "every rank counts from 0"),
    "qk_norm_left_alone": ("qk_norm_style", "each rank keeps the gradient of its own heads"),
    "gradient_summed_in_place": ("qk_norm_style", "summed again in the next backward"),
    "fused_cut_in_pieces": ("fused_style", "a contiguous piece mixes the blocks"),
    "fused_not_put_back": ("fused_style", "the rows are in the ranks' order"),
    "plain_residual": ("llama_plan", "a residual no use_local_output=False"),
    "sp_never_switched_on": ("llama_plan", "the residual stream is (Replicate(),), not"),
}


def test_every_bug_is_here():
    assert [bug.__name__ for bug in lab5.BUGS] == list(CAUGHT)


@pytest.mark.parametrize("bug", CAUGHT)
def test_a_bug_is_caught(bug):
    exercise, expected = CAUGHT[bug]
    passed, report, hint = graded(LAB, exercise, bug)
    assert not passed and expected in f"{report} {hint}"


def test_a_bug_makes_the_lab_exit_1(capsys, tmp_path):
    assert (
        lab5.main(["--inject-bug", "positions_from_zero", "--json", str(tmp_path / "bug.json")])
        == 1
    )
    assert capsys.readouterr().out.splitlines()[-1] == "FAIL lab5_tp_plans: rotary_style"
    results = json.loads((tmp_path / "bug.json").read_text())
    assert not results["passed"] and not results["exercises"]["rotary_style"]["passed"]


# What a learner hands in: (exercise, its regions in their order (None: the right one), part of the verdict)


def region(exercise):
    """The right answer to an exercise of one region."""
    return dedent(
        next(body for _, name, body in REGION.findall(LAB.read_text()) if name == exercise)
    )


def changed(exercise, old, new):
    text = region(exercise)
    assert old in text
    return text.replace(old, new)


QK_NORM = "return DTensor.from_local(args[0], mesh, [Shard(1)], run_check=False)"
GATHER = "return y.redistribute(placements=[Replicate()])"
WRONG_ANSWERS = [
    (
        "validate_heads",
        [changed("validate_heads", "heads % world or kv_heads % world", "heads % world")],
        "whole query heads alone will not do",
    ),
    (
        "validate_heads",
        [
            changed(
                "validate_heads",
                "heads % world or kv_heads % world",
                "kv_heads * config.head_dim % world",
            )
        ],
        "refused",
    ),
    ("validate_heads", ["assert heads % world == kv_heads % world == 0"], "AssertionError"),
    (
        "choose_plan",
        [changed("choose_plan", "if custom is not None:", "if custom is not None and not hf:")],
        "the first level that applies",
    ),
    (
        "choose_plan",
        [
            changed(
                "choose_plan",
                "plan = plan(model, sequence_parallel) if callable(plan) else plan",
                "pass",
            )
        ],
        "call it: it returns the plan",
    ),
    (
        "choose_plan",
        [
            "try:\n"
            + indent(region("choose_plan"), "    ")
            + "except Exception:\n    return hf_plan(model), 'Hugging Face'"
        ],
        "a plan that fails must not become another one",
    ),
    (
        "translate_hf_plan",
        [
            changed(
                "translate_hf_plan",
                'raise ValueError(f"{name}: no style for transformers\' {style}")',
                "continue",
            )
        ],
        "left out, its module stays whole",
    ),
    (
        "translate_hf_plan",
        [
            "made = {style: make() for style, make in STYLES.items()}\n"
            + changed("translate_hf_plan", "STYLES[style]()", "made[style]")
        ],
        "make a new object for each",
    ),
    (
        "translate_hf_plan",
        [changed("translate_hf_plan", 'f"{prefix}.{name}": style', "name: style")],
        "prefix: model.",
    ),
    (
        "translate_hf_plan",
        ['type(model)._tp_plan["lm_head"] = "colwise"\n' + region("translate_hf_plan")],
        "transformers' own plan was changed",
    ),
    ("all_gather_style", ["return y"], "redistribute it to [Replicate()]"),
    ("all_gather_style", [f"{GATHER}.to_local()"], "q, k and v's gradients meet in it"),
    ("all_gather_style", ["return y.full_tensor()"], "the result is a plain tensor"),
    ("rotary_style", ["pass"], "gather the positions of all tokens"),
    (
        "rotary_style",
        [changed("rotary_style", " + device_mesh.get_local_rank() * n", "")],
        "every rank counts from 0: add rank * n",
    ),
    (
        "rotary_style",
        [changed("rotary_style", " and position_ids.shape[1] == n", "")],
        "positions given",
    ),
    (
        "qk_norm_style",
        [changed("qk_norm_style", "[Shard(1)]", "[Replicate()]")],
        "x enters as Shard, not as Replicate",
    ),
    ("qk_norm_style", ["return module"], "each rank keeps the gradient of its own heads"),
    (
        "qk_norm_style",
        ["return SequenceParallel()._apply(module, device_mesh)"],
        "rotary and attention work on plain tensors",
    ),
    (
        "qk_norm_style",
        [
            """
            group = device_mesh.get_group()
            module.weight.register_hook(lambda grad: all_reduce(grad, group))
            return module
            """
        ],
        "clip_grad_norm_ refuses a mixture of both kinds",
    ),
    (
        "fused_style",
        ["return torch.arange(sum(sizes))", None],
        "a contiguous piece mixes the blocks",
    ),
    ("fused_style", [None, "return full[order]"], "full[order] reorders once more"),
    (
        "fused_style",
        [
            "blocks = torch.arange(sum(sizes)).split(list(sizes))\n"
            "return torch.cat([block.chunk(world)[rank] for rank in range(world) for block in blocks])",
            None,
        ],
        "one rank would hold more of it",
    ),
    ("llama_plan", [changed("llama_plan", ".mlp.down_proj", ".mlp.down")], "fits no module"),
    (
        "llama_plan",
        [changed("llama_plan", ', "use_local_output": False', "")],
        "use_local_output=False keeps it",
    ),
    (
        "llama_plan",
        [
            changed(
                "llama_plan",
                '_layernorm": NormThenGather(tokens)',
                '_layernorm": SequenceParallel() if sequence_parallel else NormThenGather(tokens)',
            )
        ],
        "calls of all_gather",
    ),
    (
        "llama_plan",
        [changed("llama_plan", "return {", "plan = {") + "del plan['model.norm']\nreturn plan"],
        "some module has no style",
    ),
]


@pytest.mark.parametrize("exercise,regions,verdict", WRONG_ANSWERS)
def test_a_wrong_answer_is_recognised(tmp_path, exercise, regions, verdict):
    passed, report, hint = graded(splice(tmp_path / "answer.py", exercise, regions), exercise)
    assert not passed and verdict in f"{report} {hint}"


def test_an_unfinished_exercise_says_so(tmp_path):
    regions = REGION.findall(LAB.read_text())
    assert {name for _, name, _ in regions} == lab5.CHECKS.keys()
    for exercise in lab5.CHECKS:
        todo = [
            f'raise NotImplementedError("{exercise}")' for _, name, _ in regions if name == exercise
        ]
        passed, report, _ = graded(splice(tmp_path / "answer.py", exercise, todo), exercise)
        assert not passed and f"not done yet: {exercise}" in report


def test_another_seed_draws_another_check():
    for name in lab5.CHECKS:
        passed, report, _ = graded(LAB, name, seed=20)
        assert passed, report
