"""Lab 4 as a learner meets it: the run, its bugs, wrong and other right answers."""

import json
from textwrap import dedent

import pytest
import torch
from conftest import ROOT, python
from learner import REGION, answered, grade, graded, lab_file, ranks

pytestmark = pytest.mark.slow  # minutes, with the other labs'

LAB = lab_file("lab4")
lab4 = ranks.load(LAB)
checks = ranks.room("checks", LAB)
shown = ranks.room("experiments", LAB)


# The run


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lab4")
    files = "--json", folder / "lab4.json", "--plot", folder / "lab4.png"
    run = python(LAB, "--pairs", 3, "--predict", 1920, *files)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stderr == "", "nothing but the report is printed"
    assert sorted(path.name for path in folder.iterdir()) == ["lab4.json", "lab4.png"]
    return run.stdout, json.loads((folder / "lab4.json").read_text()), folder / "lab4.png"


def test_the_lab_proves_itself(finished):
    printed, results, picture = finished
    assert printed.splitlines()[-1] == "PASS lab4_overlap: all 4 exercises' checks hold"
    assert "\n  predicted 1920, measured 2048: off by -128\n" in printed
    assert results["passed"] and results["failed"] == []
    assert results["exercises"].keys() == checks.CHECKS.keys()
    assert all(seen["passed"] and seen["report"] for seen in results["exercises"].values())
    assert picture.read_bytes()[:4] == b"\x89PNG" and picture.stat().st_size > 20_000


ORDER = {
    ("TP", "blocking"): "dgrad, start all_reduce, wait all_reduce, wgrad, wait all_reduce",
    ("TP", "overlapped"): "dgrad, start all_reduce, wgrad, wait all_reduce",
    ("SP", "blocking"): "start all_gather, wait all_gather, dgrad, wait all_gather, "
    "start reduce_scatter, wait reduce_scatter, wgrad, wait reduce_scatter",
    ("SP", "overlapped"): "start all_gather, dgrad, wait all_gather, "
    "start reduce_scatter, wgrad, wait reduce_scatter",
}


def test_messages_travel_under_gemms_only_where_they_may(finished):
    results = finished[1]
    assert [(row["way"], row["ratio"]) for row in results["gains"]] == [
        ("TP", 1),
        *(("SP", ratio) for ratio in shown.RATIOS),
    ]
    for (way, mode), order in ORDER.items():
        run = results["timelines"][way][mode]
        assert ", ".join(what for what, *_ in run["log"]) == order
        carried = [op for op, *_ in run["messages"]]
        assert carried == (["all_reduce"] if way == "TP" else ["all_gather", "reduce_scatter"])
        assert run["wire_bytes"] == 4 * 512 * 1024, "as many for TP as for SP"
        assert run["seconds"] >= max(end for _, _, end in run["messages"])


def test_the_gain_is_counted_from_the_log(finished):
    """How large it is says nothing on a busy machine."""
    for row in finished[1]["gains"]:
        assert 0 <= row["hidden"] <= 1 and row["gain"] > 0
        assert 1 < row["at_best"] <= 2 * max(1, row["message_over_gemm"])
    slowest, gemm = finished[1]["gains"][-1], finished[1]["gemm_seconds"]
    assert slowest["blocking_s"] > 8 * gemm, "two messages of 4 GEMMs each, at least"
    gemms = [["dgrad", 0, 4], ["wait all_gather", 4, 9], ["wgrad", 9, 12]]
    run = {"log": gemms, "messages": [["all_gather", 1, 9], ["reduce_scatter", 9, 11]]}
    assert shown.hidden(run) == (3 + 2) / (8 + 2)
    assert shown.could_hide(run) == (4 + 2, 10 / 7)


def against_the_profiler(group):
    """A backward's GEMMs, in seconds: as the link logs them, as torch.profiler does.

    It has each GEMM twice: on its way into the dispatch mode that logs it, and inside.
    """
    layer = checks.one_device(torch.Generator().manual_seed(0), group, 256, 1, 512, 640, "SP")
    y = lab4.sp_linear(layer.x, layer.weight, layer.bias, group)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run = shown.run_backward(group, layer, y)
    logged = [end - begin for what, begin, end in run["log"] if what in ("dgrad", "wgrad")]
    gemms = [event.time_range for event in profile.events() if event.name == "aten::mm"]
    gemms.sort(key=lambda span: (span.start, -span.end))
    return logged, [(span.end - span.start) / 1e6 for span in gemms]


def test_the_log_agrees_with_the_profiler():
    logged, profiled = ranks.on_ranks(1, against_the_profiler)[0]
    assert len(logged) == 2 and len(profiled) == 4
    for mine, around, inside in zip(logged, profiled[::2], profiled[1::2]):
        assert 0.9 * inside - 1e-4 < mine < 1.1 * around + 1e-4


def test_who_does_not_wait_reads_what_is_not_there(finished):
    rows = {(row["way"], row["waits"]): (row["dx"], row["dw"]) for row in finished[1]["unwaited"]}
    assert rows["TP", True] == rows["SP", True] == (0, 0)
    assert rows["TP", False][0] > 0.9 and rows["TP", False][1] == 0
    assert rows["SP", False] == (1, 1)


def test_shared_memory_is_not_to_be_kept(finished):
    shard, own, shared = finished[1]["aliasing"]
    x = 4 * 128 * 2 * 256  # bytes of all tokens, float32; two layers: two halves, two, one
    assert [row["bytes"] for row in (shard, own, shared)] == [x, 2 * x, x]
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
    assert grade.run_lab(LAB, options) == 2
    out, errors = capsys.readouterr()
    assert out == "" and errors.startswith(f"error: {message}") and errors.count("\n") == 1


# Its bugs: the exercise whose check catches each, and what it says

BUGS = {
    "waits_at_once": ("tp_backward", checks.WAIT),
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


@pytest.mark.parametrize("bug", BUGS)
def test_bugs_are_caught(bug):
    exercise, said = BUGS[bug]
    passed, verdict = graded(LAB, exercise, bug=bug)
    assert not passed and said in verdict, verdict


def test_a_bug_makes_the_lab_exit_1(capsys, tmp_path):
    bug = ["--pairs", "1", "--inject-bug", "waits_at_once", "--json", str(tmp_path / "bug.json")]
    assert grade.run_lab(LAB, bug) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "FAIL lab4_overlap: tp_backward, sp_linear"
    results = json.loads((tmp_path / "bug.json").read_text())
    assert not results["passed"] and not results["exercises"]["sp_linear"]["passed"]


# What a learner hands in


def ours(exercise, *changes, region=0):
    """Our answer in one of an exercise's regions, pieces replaced: (ours, theirs)."""
    texts = [body for _, name, body in REGION.findall(LAB.read_text()) if name == exercise]
    text = dedent(texts[region])
    for right, other in changes:
        assert right in text, right
        text = text.replace(right, other)
    return text


def tp(*changes):
    return [ours("tp_backward", *changes)]


def sp(*changes):
    """With another backward."""
    return [None, ours("sp_linear", *changes, region=1)]


BY_NAME = """
size = math.prod(shape)
if name not in self.buffer or self.buffer[name].numel() < size:
    self.buffer[name] = torch.empty(size, dtype=dtype)
return self.buffer[name][:size].view(shape)
"""
BY_SHAPE = """
key = name, dtype, tuple(shape)
if key not in self.buffer:
    self.buffer[key] = torch.empty(shape, dtype=dtype)
return self.buffer[key]
"""
ROUNDED = """
dw = grad.T @ x
if main_grad is None:
    return dw
main_grad += dw
"""
WGRAD_FIRST = [
    ("dw = weight_gradient(grad, x, ctx.main_grad)\n", ""),
    ("dx = grad", "dw = weight_gradient(grad, x, ctx.main_grad)\ndx = grad"),
]
RETURNED_EARLY = [("return dx", "return before"), ("handle =", "before = dx.clone()\nhandle =")]
AFTER_SCATTER = [
    ("gather.wait()\n", ""),
    ("scatter.wait()", "scatter.wait()\ngather.wait()"),
]
BY_ALL_REDUCE = [
    ("mine = torch.empty_like(x)  # not of BUFFER: the caller keeps it\n", ""),
    ("dist.reduce_scatter_tensor(mine, dx,", "dist.all_reduce(dx,"),
    ("return mine", "return dx.chunk(ctx.group.size())[ctx.group.rank()]"),
]
DGRAD = "dx = grad @ weight  # (s, b, h)\n"
WRONG = [
    ("memory_buffer", ["return torch.empty(shape, dtype=dtype)"], "what is there is large enough"),
    ("memory_buffer", [BY_NAME], "the key is (name, dtype)"),
    ("memory_buffer", [BY_SHAPE], "what is there is large enough"),
    ("accumulation_fusion", [ROUNDED], "the product is rounded to bfloat16 before it is added"),
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
        [ours("accumulation_fusion", ("return None", "return main_grad.to(x.dtype)"))],
        "return None where main_grad got it",
    ),
    (
        "accumulation_fusion",
        [ours("accumulation_fusion", ("main_grad.addmm_(", "main_grad = main_grad.addmm("))],
        "nothing reached main_grad: work in place",
    ),
    ("tp_backward", tp((", async_op=True", ""), ("handle.wait()\n", "")), checks.WAIT),
    ("tp_backward", tp(("handle.wait()\n", "")), "no 'wait all_reduce' in the backward"),
    ("tp_backward", tp(*RETURNED_EARLY), "every rank's part of dx goes into the sum"),
    ("tp_backward", tp(*WGRAD_FIRST), checks.START),
    ("tp_backward", tp((" if ctx.needs_input_grad[2] else None", ""), ("db,", "None,")), "db = "),
    ("sp_linear", sp(*AFTER_SCATTER), "wgrad reads what is gathered: wait for it"),
    (
        "sp_linear",
        sp(("gather.wait()\n", ""), (DGRAD, f"gather.wait()\n{DGRAD}")),
        checks.WAIT,
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
        sp(("torch.empty_like(x)", 'BUFFER.get_tensor(x.shape, x.dtype, "dx")')),
        "dx, after another layer's turn, is off by",
    ),
    ("sp_linear", sp(*BY_ALL_REDUCE), "no 'start reduce_scatter' in the backward"),
    (
        "sp_linear",
        sp(('BUFFER.get_tensor(shape, x.dtype, "mpu")', "x.new_empty(shape)")),
        "gather into BUFFER.get_tensor",
    ),
]

RIGHT = {
    "memory_buffer": [
        """
        needed, key = torch.Size(shape).numel(), (name, dtype)
        if key not in self.buffer or len(self.buffer[key]) < needed:
            self.buffer[key] = torch.zeros(needed, dtype=dtype)
        return self.buffer[key].narrow(0, 0, needed).reshape(shape)
        """
    ],
    "accumulation_fusion": [
        """
        if main_grad is not None:
            main_grad += torch.einsum("to,th->oh", grad.float(), x.float())
        else:
            return torch.einsum("to,th->oh", grad, x)
        """
    ],
    "tp_backward": [
        """
        dx = torch.matmul(grad, weight)
        work = dist.all_reduce(dx, dist.ReduceOp.SUM, ctx.group, True)
        gradients = [dx, weight_gradient(grad, x, ctx.main_grad), None, None]
        work.wait()
        if ctx.needs_input_grad[2]:
            gradients[2] = grad.flatten(0, 1).sum(0)
        return tuple(gradients)
        """
    ],
    # the gather is waited for later, still before wgrad
    "sp_linear": sp(("gather.wait()\n", ""), ("dw =", "gather.wait()\ndw =")),
}


@pytest.mark.parametrize("exercise,regions,hint", WRONG)
def test_wrong_answers_get_their_hint(exercise, regions, hint):
    passed, verdict = graded(LAB, exercise, regions)
    assert not passed and hint in verdict, verdict


def test_other_right_answers_pass_and_the_lab_accepts_them(tmp_path):
    """In another folder's my_labs/, with other inputs."""
    (tmp_path / "labs").symlink_to(ROOT / "labs")
    (tmp_path / "my_labs").mkdir()
    mine = tmp_path / "my_labs" / LAB.name
    mine.write_text(answered(LAB, RIGHT))
    run = python(mine, "--seed", "20", "--pairs", "1", cwd=tmp_path)
    assert run.returncode == 0 and run.stdout.endswith("exercises' checks hold\n"), run.stdout
    assert "Predict, then run: how many KiB does each of 2 ranks send" in run.stdout
