"""labs/lab4_overlap.py as a learner meets it: the run, its bugs, wrong answers."""

import json
import sys
from functools import partial

import conftest
import pytest
import torch
from conftest import REGION, ROOT, python

sys.path.insert(0, str(ROOT / "labs"))
import lab4_overlap as lab4  # noqa: E402

pytestmark = pytest.mark.slow  # minutes, with the other labs'

LAB = ROOT / "labs" / "lab4_overlap.py"
graded = partial(conftest.graded, lab4)
splice = partial(conftest.splice, lab4)


# The run


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lab4")
    run = python(LAB, "--pairs", 3, "--json", folder / "lab4.json", "--plot", folder / "lab4.png")
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stderr == "", "nothing but the report is printed"
    assert sorted(path.name for path in folder.iterdir()) == ["lab4.json", "lab4.png"]
    return run.stdout, json.loads((folder / "lab4.json").read_text()), folder / "lab4.png"


def test_the_lab_proves_itself(finished):
    printed, results, picture = finished
    assert printed.splitlines()[-1] == "PASS lab4_overlap: all 4 exercises' checks hold"
    assert results["passed"] and results["failed"] == []
    assert results["exercises"].keys() == lab4.CHECKS.keys()
    assert all(
        exercise["passed"] and exercise["report"] for exercise in results["exercises"].values()
    )
    assert picture.read_bytes()[:4] == b"\x89PNG" and picture.stat().st_size > 20_000


def test_messages_travel_under_gemms_only_where_they_may(finished):
    results = finished[1]
    assert [(row["way"], row["ratio"]) for row in results["gains"]] == [
        ("TP", 1),
        *(("SP", ratio) for ratio in lab4.RATIOS),
    ]
    for way, under in (
        ("TP", {"all_reduce": "wgrad"}),
        ("SP", {"all_gather": "dgrad", "reduce_scatter": "wgrad"}),
    ):
        for mode, run in results["timelines"][way].items():
            gemms = {what: (begin, end) for what, begin, end in run["log"]}
            assert [op for op, *_ in run["messages"]] == list(under)
            for op, begin, end in run["messages"]:
                first, last = gemms[under[op]]
                assert (begin < last and first < end) == (mode == "overlapped"), (way, mode, op)
            assert run["seconds"] >= max(end for _, _, end in run["messages"])


def test_the_gain_is_counted_from_the_log(finished):
    """How large it is says nothing on a busy machine."""
    for row in finished[1]["gains"]:
        assert 0 < row["hidden"] <= 1 and row["gain"] > 0
        assert 1 < row["at_best"] <= 2 * max(1, row["message_over_gemm"])
    slowest = finished[1]["gains"][-1]
    assert slowest["blocking_s"] > 8 * finished[1]["gemm_seconds"], (
        "two messages of 4 GEMMs each, at least"
    )
    gemms = [["dgrad", 0, 4], ["wait all_gather", 4, 9], ["wgrad", 9, 12]]
    run = {"log": gemms, "messages": [["all_gather", 1, 9], ["reduce_scatter", 9, 11]]}
    assert lab4.hidden(run) == (3 + 2) / (8 + 2)
    assert lab4.could_hide(run) == (4 + 2, 10 / 7)


def against_the_profiler(group):
    """Seconds of a backward's GEMMs: (as the link logs them, as torch.profiler does)."""
    layer = lab4.one_device(torch.Generator().manual_seed(0), group, 256, 1, 512, 640, "SP")
    y = lab4.sp_linear(layer.x, layer.weight, layer.bias, group)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run = lab4.run_backward(group, layer, y)
    logged = [end - begin for what, begin, end in run["log"] if what in ("dgrad", "wgrad")]
    gemms = [event for event in profile.events() if event.name == "aten::mm"]
    # each GEMM is there twice: on its way into the dispatch mode that logs it, and inside
    spans = sorted((event.time_range.start, event.time_range.end) for event in gemms)
    outer = [span for i, span in enumerate(spans) if i == 0 or span[0] >= spans[i - 1][1]]
    return logged, [(end - begin) / 1e6 for begin, end in outer]


def test_the_log_agrees_with_the_profiler():
    logged, profiled = lab4.on_ranks(1, against_the_profiler)[0]
    assert len(logged) == len(profiled) == 2
    for mine, theirs in zip(logged, profiled):
        assert 0.5 * theirs < mine < theirs + 0.1


def test_who_does_not_wait_reads_what_is_not_there(finished):
    rows = {(row["way"], row["waits"]): (row["dx"], row["dw"]) for row in finished[1]["unwaited"]}
    assert rows["TP", True] == rows["SP", True] == (0, 0)
    assert rows["TP", False][0] > 0.9 and rows["TP", False][1] == 0
    assert rows["SP", False] == (1, 1)


def test_shared_memory_is_not_to_be_kept(finished):
    shard, own, shared = finished[1]["aliasing"]
    x = 4 * 128 * 2 * 256  # bytes of all tokens, float32
    assert [row["bytes"] for row in (shard, own, shared)] == [
        x,
        2 * x,
        x,
    ]  # two layers: two halves, two, one
    assert max(shard["dw_errors"] + own["dw_errors"]) < 1e-5
    assert shared["dw_errors"][0] > 0.5 and shared["dw_errors"][1] < 1e-5


BAD = [
    (["--pairs", "0"], "argument --pairs: 0 is not a whole number of at least 1"),
    (["--inject-bug", "typo"], "no bug typo; --inject-bug list names them"),
    (["--json", "/nowhere/at/all.json"], "cannot write /nowhere/at/all.json"),
    (["--typo"], "unrecognized arguments: --typo"),
]


@pytest.mark.parametrize("options,message", BAD)
def test_bad_input_is_one_line(capsys, options, message):
    assert lab4.main(options) == 2
    printed = capsys.readouterr()
    assert (
        printed.out == ""
        and printed.err.startswith(f"error: {message}")
        and printed.err.count("\n") == 1
    )


# Its bugs: the exercise whose check catches each, and what it says

CAUGHT = {
    "waits_at_once": ("tp_backward", lab4.WAIT),
    "leaves_when_waited_for": ("sp_linear", "'dgrad' is before 'start all_gather'"),
    "never_waits": ("tp_backward", "no 'wait all_reduce' in the backward"),
    "dx_not_summed": ("tp_backward", "every rank's part of dx goes into the sum"),
    "gathered_input_kept": ("sp_linear", "keep the shard x"),
    "dx_in_shared_buffer": ("sp_linear", "dx, after another layer's turn, is off by"),
    "buffer_never_reused": ("memory_buffer", "what is there is large enough"),
    "buffer_ignores_name": ("memory_buffer", "another name shares memory"),
    "buffer_shrinks": ("memory_buffer", "a smaller tensor gets memory of its own"),
    "product_rounded": ("accumulation_fusion", "rounded to bfloat16 before it is added"),
    "main_grad_overwritten": ("accumulation_fusion", "add to what is there"),
}


def test_every_bug_is_here():
    assert [bug.__name__ for bug in lab4.BUGS] == list(CAUGHT)


@pytest.mark.parametrize("bug", CAUGHT)
def test_a_bug_is_caught(bug):
    exercise, expected = CAUGHT[bug]
    passed, report, hint = graded(LAB, exercise, bug)
    assert not passed and expected in f"{report} {hint}"


def test_a_bug_makes_the_lab_exit_1(capsys, tmp_path):
    assert (
        lab4.main(
            ["--pairs", "1", "--inject-bug", "waits_at_once", "--json", str(tmp_path / "bug.json")]
        )
        == 1
    )
    assert capsys.readouterr().out.splitlines()[-1] == "FAIL lab4_overlap: tp_backward, sp_linear"
    results = json.loads((tmp_path / "bug.json").read_text())
    assert not results["passed"] and not results["exercises"]["sp_linear"]["passed"]


# What a learner hands in: (exercise, its regions in their order (None: the right one), part of the verdict)

TP = """
dx = grad @ weight
handle = dist.all_reduce(dx, group=ctx.group, async_op=True)
dw = weight_gradient(grad, x, ctx.main_grad)
db = grad.sum((0, 1)) if ctx.needs_input_grad[2] else None
handle.wait()
return dx, dw, db, None
"""
SP = """
total = BUFFER.get_tensor((ctx.group.size() * x.shape[0], *x.shape[1:]), x.dtype, "mpu")
gather = dist.all_gather_into_tensor(total, x, group=ctx.group, async_op=True)
dx = grad @ weight
gather.wait()
mine = torch.empty_like(x)
scatter = dist.reduce_scatter_tensor(mine, dx, group=ctx.group, async_op=True)
dw = weight_gradient(grad, total, ctx.main_grad)
db = grad.sum((0, 1)) if ctx.needs_input_grad[2] else None
scatter.wait()
return mine, dw, db, None
"""


def changed(text, *pairs):
    for old, new in pairs:
        assert old in text
        text = text.replace(old, new)
    return text


WRONG_ANSWERS = [
    ("memory_buffer", ["return torch.empty(shape, dtype=dtype)"], "what is there is large enough"),
    (
        "memory_buffer",
        [
            """
            size = math.prod(shape)
            if name not in self.buffer or self.buffer[name].numel() < size:
                self.buffer[name] = torch.empty(size, dtype=dtype)
            return self.buffer[name][:size].view(shape)
            """
        ],
        "torch.float32, not (",
    ),
    (
        "memory_buffer",
        [
            """
            key = name, dtype, tuple(shape)
            if key not in self.buffer:
                self.buffer[key] = torch.empty(shape, dtype=dtype)
            return self.buffer[key]
            """
        ],
        "what is there is large enough",
    ),
    (
        "accumulation_fusion",
        [
            """
            dw = grad.T @ x
            if main_grad is None:
                return dw
            main_grad += dw
            """
        ],
        "the product is rounded to bfloat16 before it is added",
    ),
    (
        "accumulation_fusion",
        [
            """
            if main_grad is None:
                return grad.T @ x
            torch.mm(grad.T.float(), x.float(), out=main_grad)
            """
        ],
        "add to what is there",
    ),
    (
        "accumulation_fusion",
        [
            """
            if main_grad is None:
                return grad.T @ x
            main_grad.addmm_(grad.T.float(), x.float())
            return main_grad.to(x.dtype)
            """
        ],
        "return None where main_grad got it",
    ),
    ("tp_backward", [changed(TP, (", async_op=True", ""), ("handle.wait()\n", ""))], lab4.WAIT),
    ("tp_backward", [changed(TP, ("handle.wait()\n", ""))], "no 'wait all_reduce' in the backward"),
    (
        "tp_backward",
        [
            changed(
                TP, ("return dx", "return before"), ("handle =", "before = dx.clone()\nhandle =")
            )
        ],
        "every rank's part of dx goes into the sum",
    ),
    (
        "tp_backward",
        [
            """
            dw = weight_gradient(grad, x, ctx.main_grad)
            dx = grad @ weight
            handle = dist.all_reduce(dx, group=ctx.group, async_op=True)
            db = grad.sum((0, 1)) if ctx.needs_input_grad[2] else None
            handle.wait()
            return dx, dw, db, None
            """
        ],
        lab4.START,
    ),
    (
        "sp_linear",
        [
            None,
            changed(
                SP, ("gather.wait()\n", ""), ("scatter.wait()", "scatter.wait()\ngather.wait()")
            ),
        ],
        "wgrad reads what is gathered: wait for it",
    ),
    (
        "sp_linear",
        [
            None,
            changed(SP, ("dx = grad @ weight\ngather.wait()", "gather.wait()\ndx = grad @ weight")),
        ],
        lab4.WAIT,
    ),
    (
        "sp_linear",
        [
            """
            total = BUFFER.get_tensor((group.size() * x.shape[0], *x.shape[1:]), x.dtype, "mpu")
            dist.all_gather_into_tensor(total, x, group=group)
            ctx.save_for_backward(total, weight)
            return F.linear(total, weight, bias)
            """,
            None,
        ],
        "keep the shard x, not the gathered one",
    ),
    (
        "sp_linear",
        [None, changed(SP, ("torch.empty_like(x)", 'BUFFER.get_tensor(x.shape, x.dtype, "dx")'))],
        "dx, after another layer's turn, is off by",
    ),
    (
        "sp_linear",
        [
            None,
            changed(
                SP,
                ("mine = torch.empty_like(x)\n", ""),
                ("dist.reduce_scatter_tensor(mine, dx,", "dist.all_reduce(dx,"),
                ("return mine", "return dx.chunk(ctx.group.size())[ctx.group.rank()]"),
            ),
        ],
        "no 'start reduce_scatter' in the backward",
    ),
]


@pytest.mark.parametrize("exercise,regions,verdict", WRONG_ANSWERS)
def test_a_wrong_answer_is_recognised(tmp_path, exercise, regions, verdict):
    passed, report, hint = graded(splice(tmp_path / "answer.py", exercise, regions), exercise)
    assert not passed and verdict in f"{report} {hint}"


def test_another_right_answer_passes(tmp_path):
    later = changed(
        SP, ("gather.wait()\n", ""), ("dw =", "gather.wait()\ndw =")
    )  # still before wgrad
    passed, report, _ = graded(
        splice(tmp_path / "answer.py", "sp_linear", [None, later]), "sp_linear", seed=20
    )
    assert passed, report


def test_an_unfinished_exercise_says_so(tmp_path):
    regions = REGION.findall(LAB.read_text())
    assert {name for _, name, _ in regions} == lab4.CHECKS.keys()
    for exercise in lab4.CHECKS:
        todo = [
            f'raise NotImplementedError("{exercise}")' for _, name, _ in regions if name == exercise
        ]
        passed, report, _ = graded(splice(tmp_path / "answer.py", exercise, todo), exercise)
        assert not passed and f"not done yet: {exercise}" in report
