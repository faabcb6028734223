"""labs/lab6_lora.py as a learner meets it: the run, its bugs, and wrong answers."""

import importlib.util
import json
import sys
from functools import partial

import conftest
import pytest
from conftest import ROOT, python

sys.path.insert(0, str(ROOT / "labs"))
import lab6_lora as lab6  # noqa: E402

pytestmark = pytest.mark.slow  # minutes, with the other labs'

LAB = ROOT / "labs" / "lab6_lora.py"
graded = partial(conftest.graded, lab6)
splice = partial(conftest.splice, lab6)


# The run


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lab6")
    run = python(
        LAB, "--json", folder / "lab6.json", "--plot", folder / "lab6.png", "--lora-rank", 1
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stderr == "", "nothing but the report is printed"
    assert sorted(path.name for path in folder.iterdir()) == ["lab6.json", "lab6.png"]
    return run.stdout, json.loads((folder / "lab6.json").read_text()), folder / "lab6.png"


def test_the_lab_proves_itself(finished):
    printed, results, picture = finished
    assert printed.splitlines()[-1] == "PASS lab6_lora: all 5 exercises' checks hold"
    assert results["passed"] and results["failed"] == []
    assert results["exercises"].keys() == lab6.CHECKS.keys()
    assert all(
        exercise["passed"] and exercise["report"] for exercise in results["exercises"].values()
    )
    assert picture.read_bytes()[:4] == b"\x89PNG" and picture.stat().st_size > 20_000


def test_every_way_is_one_device_and_sends_what_the_table_says(finished):
    rows = finished[1]["ways"]
    assert len(rows) == 3 * 2 * (2 + 3)
    tokens, hidden = 60, 96
    for row in rows:
        assert all(error < 1e-5 for error in row["errors"].values())
        world, way, parallel = row["ranks"], row["way"], row["sequence_parallel"]
        low, cut = (
            4 * tokens,
            4 * tokens * world,
        )  # r = 1; cut over the ranks it is one feature each, mostly zeros
        scattered = {"all_gather": low, "reduce_scatter": low}
        own = {"joined": {}, "apart": scattered if parallel else {"all_reduce": low}}.get(
            way, {"all_gather": cut, "reduce_scatter": cut}
        )
        assert row["forward"] == row["backward"] == own
        summed = way == "joined" or (way == "apart" and parallel)
        assert row["step"] == ({"all_reduce": 4 * 2 * hidden} if summed else {})
    kept = {
        row["way"]: row["kept"] for row in rows if row["sequence_parallel"] and row["ranks"] == 3
    }
    assert kept["joined"] == kept["sharded"] > 2.9 * (kept["apart"] - 4 * tokens), (
        "apart keeps own tokens only"
    )
    trained = [sum(r["trained"] for r in rows[i : i + 2]) for i in (8, 10)]
    assert rows[8]["way"] == "sharded" and trained == [2 * (96 + 130)] * 2, (
        "sharded: no number is held twice"
    )


def test_rank_one_leaves_a_rank_without_its_share(finished):
    first, second = [row["trained"] for row in finished[1]["ways"] if row["ranks"] == 2][8:10]
    assert first - second == 2 * 96, (
        "of r = 1 the second rank holds no row of A, and no column of B"
    )


def test_peft_is_compared_where_it_is_installed(finished):
    printed, results, _ = finished
    installed = importlib.util.find_spec("peft") is not None
    assert results["peft_installed"] == installed
    assert all(("peft" in row["errors"]) == installed for row in results["ways"])
    assert ("against peft's layers: not run, peft is not installed" in printed) != installed


def test_without_the_sum_the_loss_looks_right_and_the_saved_adapter_is_wrong(finished):
    for counts, runs in finished[1]["training"].items():
        one, good, bad = (runs[name] for name in ("one device", "SP, summed", "SP, not summed"))
        assert good["losses"] == pytest.approx(one["losses"], rel=1e-3)
        assert good["exported"] == pytest.approx(one["held_out"], rel=1e-3) and good["drift"] < 1e-6
        assert bad["losses"][0] == pytest.approx(one["losses"][0], rel=1e-6)
        assert bad["unsummed_gradient_error"] > 0.3 and bad["drift"] > 0.01
        assert bad["losses"][-1] < bad["losses"][0] / 2, "the loss falls"
        if counts == "answers only":  # rank 0 has the prompt: its replicas never saw a gradient
            assert bad["losses"] == pytest.approx(one["losses"], rel=1e-3)
            assert bad["exported"] > 2 * bad["held_out"], "what is saved is not what was trained"


def test_translating_in_place_leaks_into_a_later_model(finished):
    found = finished[1]["translation"]
    good, bad = found["translate_to_lora"], found["translate_in_place"]
    assert good["adapted_error"] < 1e-5 and bad["adapted_error"] < 1e-5, (
        "the adapted model shows nothing"
    )
    assert good["plan"] == ["ColwiseParallel", "RowwiseParallel"]
    assert good["later_model"].startswith("as on one device")
    assert bad["later_model"] == "AttributeError: 'Linear' object has no attribute 'lora_A'"


BAD = [
    (["--lora-rank", "0"], "argument --lora-rank: 0 is not a whole number of at least 1"),
    (["--inject-bug", "typo"], "no bug typo; --inject-bug list names them"),
    (["--json", "/nowhere/at/all.json"], "cannot write /nowhere/at/all.json"),
]


@pytest.mark.parametrize("options,message", BAD)
def test_bad_input_is_one_line(capsys, options, message):
    assert lab6.main(options) == 2
    printed = capsys.readouterr()
    assert (
        printed.out == ""
        and printed.err.startswith(f"error: {message}")
        and printed.err.count("\n") == 1
    )


# Its bugs: the exercise whose check catches each, and what it says

CAUGHT = {
    "partial_forgotten_under_sp": ("column_lora", "its name is missing in partial"),
    "whole_gradient_summed": ("column_lora", "summed it is P times too large"),
    "gradient_not_summed": ("sum_partial_gradients", "its name is missing in partial"),
    "gradient_averaged": ("sum_partial_gradients", "the mean is not the sum"),
    "gradients_one_by_one": ("sum_partial_gradients", "join them first"),
    "low_rank_gradient_not_summed": ("column_lora", "dx is off by"),
    "adapter_on_partial_sums": ("row_lora", "A's result is a sum over the ranks"),
    "enters_twice": ("column_lora", "summed over the ranks twice"),
    "base_is_trained": ("row_lora", "the base is frozen"),
    "saves_own_shard": ("save_adapter", "has shape"),
    "merged_without_scale": ("save_adapter", "the scale is missing"),
    "translates_in_place": ("translate_to_lora", "other models use it: a new object"),
    "styles_cached": ("translate_to_lora", "no cache"),
    "layouts_forgotten": ("translate_to_lora", "sequence parallelism is in them"),
}


def test_every_bug_is_here():
    assert [bug.__name__ for bug in lab6.BUGS] == list(CAUGHT)


@pytest.mark.parametrize("bug", CAUGHT)
def test_its_bugs_are_caught(bug):
    exercise, expected = CAUGHT[bug]
    passed, report, hint = graded(LAB, exercise, bug)
    assert not passed and expected in f"{report} ({hint})", (report, hint)


# Wrong answers: (exercise, its regions, part of the hint)

CUTS = """
return {{"lora_A": 0 if self.way == SHARDED else None, "lora_B": 0}}, {}
"""
WRONG_ANSWERS = [
    (
        "column_lora",
        [CUTS.format('["lora_A"] if self.way == JOINED else []'), None],
        "missing in partial",
    ),
    (
        "column_lora",
        [CUTS.format('["lora_A"] if self.way != SHARDED else []'), None],
        "P times too large",
    ),
    (
        "row_lora",
        [
            None,
            """
            low = F.linear(x, self.lora_A)
            y = F.linear(x, self.weight, self.bias) + self.scale * F.linear(low, self.lora_B)
            return leave(y, self.group, self.sequence_parallel)
            """,
        ],
        "the bias is added on every rank",
    ),
    (
        "sum_partial_gradients",
        [
            """
            whole = [(layer, name) for layer in layers for name, dim in layer.cut.items() if dim is None]
            grads = [getattr(layer, name).grad for layer, name in whole]
            if grads:
                total = all_reduce(torch.cat([grad.flatten() for grad in grads]), group)
                for grad, part in zip(grads, total.split([grad.numel() for grad in grads])):
                    grad.copy_(part.view_as(grad))
            """
        ],
        "it is whole already",
    ),
    (
        "save_adapter",
        [None, 'merged.weight.data += adapter["lora_B"] @ adapter["lora_A"]'],
        "scale is missing",
    ),
    (
        "translate_to_lora",
        ["style.__class__ = LORA_STYLES.get(type(style), type(style))\ntranslated[name] = style"],
        "a new object",
    ),
    (
        "translate_to_lora",
        [
            """
            adapted = isinstance(module, LoRALinear)
            translated[name] = LORA_STYLES[type(style)]() if adapted else style
            """
        ],
        "the layouts are the style's",
    ),
]


@pytest.mark.parametrize("exercise,regions,expected", WRONG_ANSWERS)
def test_wrong_answers_get_their_hint(tmp_path, exercise, regions, expected):
    passed, report, hint = graded(splice(tmp_path / LAB.name, exercise, regions), exercise)
    assert not passed and expected in hint, (report, hint)
