"""Lab 4 as a learner meets it: the run, its bugs, wrong and other right answers."""

import pytest
from learner import caught, lab_file, listed, ranks, run_answered, run_finished

pytestmark = pytest.mark.slow  # minutes, with the other labs'

LAB = lab_file("lab4")
checks = ranks.room("checks", LAB)
shown = ranks.room("experiments", LAB)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    options = "--pairs", 3, "--predict", 1920
    printed, results = run_finished(LAB, tmp_path_factory.mktemp("lab4"), *options)
    assert "\n  predicted 1920, measured 2048: off by -128\n" in printed
    return results


ORDER = {
    ("TP", "blocking"): "dgrad, start all_reduce, wait all_reduce, wgrad, wait all_reduce",
    ("TP", "overlapped"): "dgrad, start all_reduce, wgrad, wait all_reduce",
    ("SP", "blocking"): "start all_gather, wait all_gather, dgrad, wait all_gather, "
    "start reduce_scatter, wait reduce_scatter, wgrad, wait reduce_scatter",
    ("SP", "overlapped"): "start all_gather, dgrad, wait all_gather, "
    "start reduce_scatter, wgrad, wait reduce_scatter",
}


@pytest.mark.parametrize("way,mode", ORDER)
def test_messages_travel_under_gemms_only_where_they_may(finished, way, mode):
    run = finished["timelines"][way][mode]
    assert ", ".join(what for what, *_ in run["log"]) == ORDER[way, mode]
    carried = [op for op, *_ in run["messages"]]
    assert carried == (["all_reduce"] if way == "TP" else ["all_gather", "reduce_scatter"])
    assert run["wire_bytes"] == 4 * 512 * 1024, "as many for TP as for SP"
    assert run["seconds"] >= max(end for _, _, end in run["messages"])


def test_the_gain_is_counted_from_the_log(finished):
    """How large it is says nothing on a busy machine."""
    for row in finished["gains"]:
        assert 0 <= row["hidden"] <= 1 and row["gain"] > 0
        assert 1 < row["at_best"] <= 2 * max(1, row["message_over_gemm"])
    gemms = [["dgrad", 0, 4], ["wait all_gather", 4, 9], ["wgrad", 9, 12]]
    run = {"log": gemms, "messages": [["all_gather", 1, 9], ["reduce_scatter", 9, 11]]}
    assert shown.hidden(run) == (3 + 2) / (8 + 2)
    assert shown.could_hide(run) == (4 + 2, 10 / 7)


def test_what_is_kept(finished):
    shard, own, shared = (row["bytes"] for row in finished["aliasing"])
    x = 4 * 128 * 2 * 256  # bytes of all tokens, float32; two layers: two halves, two, one
    assert (shard, own, shared) == (x, 2 * x, x)


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

ANSWERS = """
== memory_buffer: what is there is large enough
return torch.empty(shape, dtype=dtype)
== memory_buffer: the key is (name, dtype)
self.buffer.get((name, dtype)) -> self.buffer.get(name)
self.buffer[name, dtype] -> self.buffer[name]
== memory_buffer: what is there is large enough
self.buffer.get((name, dtype)) -> self.buffer.get((name, dtype, tuple(shape)))
self.buffer[name, dtype] -> self.buffer[name, dtype, tuple(shape)]
== memory_buffer
needed, key = torch.Size(shape).numel(), (name, dtype)
if key not in self.buffer or len(self.buffer[key]) < needed:
    self.buffer[key] = torch.zeros(needed, dtype=dtype)
return self.buffer[key].narrow(0, 0, needed).reshape(shape)
== accumulation_fusion: the product is rounded to bfloat16 before it is added
main_grad.addmm_(grad.T.float(), x.float()) -> main_grad += grad.T @ x
== accumulation_fusion: return None where main_grad got it
return None -> return main_grad.to(x.dtype)
== accumulation_fusion: nothing reached main_grad: work in place
main_grad.addmm_( -> main_grad = main_grad.addmm(
== accumulation_fusion
if main_grad is None:
    return torch.einsum("to,th->oh", grad, x)
main_grad += torch.einsum("to,th->oh", grad.float(), x.float())
== tp_backward: no 'wait all_reduce' in the backward
handle.wait() -> pass
== tp_backward: start the message before the GEMM that hides it
dw = weight_gradient(grad, x, ctx.main_grad) -> pass
dx = grad @ weight -> dw, dx = weight_gradient(grad, x, ctx.main_grad), grad @ weight
== tp_backward: db is None
grad.sum((0, 1)) if ctx.needs_input_grad[2] else None -> None
== tp_backward
dx = torch.matmul(grad, weight)
work = dist.all_reduce(dx, dist.ReduceOp.SUM, ctx.group, True)
gradients = [dx, weight_gradient(grad, x, ctx.main_grad), None, None]
work.wait()
if ctx.needs_input_grad[2]:
    gradients[2] = grad.flatten(0, 1).sum(0)
return tuple(gradients)
== sp_linear: wgrad reads what is gathered: wait for it
gather.wait() -> pass
scatter.wait() -> gather.wait(), scatter.wait()
== sp_linear: no 'start reduce_scatter' in the backward
dist.reduce_scatter_tensor(mine, dx, -> dist.all_reduce(dx,
return mine -> return dx.chunk(ctx.group.size())[ctx.group.rank()]
== sp_linear: gather into BUFFER.get_tensor
BUFFER.get_tensor(shape, x.dtype, "mpu") -> x.new_empty(shape)
== sp_linear
...
--
total = BUFFER.get_tensor((ctx.group.size() * len(x), *x.shape[1:]), x.dtype, "mpu")
gather = dist.all_gather_into_tensor(total, x, group=ctx.group, async_op=True)
dx, mine = torch.matmul(grad, weight), torch.zeros_like(x)
scatter = dist.reduce_scatter_tensor(mine, dx, group=ctx.group, async_op=True)
gather.wait()
dw = weight_gradient(grad, total, ctx.main_grad)
scatter.wait()
return mine, dw, grad.sum((0, 1)) if ctx.needs_input_grad[2] else None, None
"""
WRONG, RIGHT = listed(LAB, ANSWERS)
test_bugs_are_caught, test_wrong_answers_get_their_hint = caught(LAB, BUGS, WRONG)


def test_other_right_answers_pass_and_the_lab_accepts_them(tmp_path):
    run_answered(LAB, RIGHT, tmp_path, "--seed", 20, "--pairs", 1)
