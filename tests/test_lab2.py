"""Lab 2 as a learner meets it: the run, bugs, wrong answers, what no check draws."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from learner import caught, lab_file, listed, ranks, refused, run_answered, run_finished
from torch import nn

pytestmark = pytest.mark.slow  # minutes, with the other labs'

LAB = lab_file("lab2")
lab2 = ranks.load(LAB)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    printed, results = run_finished(LAB, tmp_path_factory.mktemp("lab2"), "--predict", 65000)
    assert "\n  predicted 65000, measured 65664: off by -664\n" in printed
    return results


def test_megatrons_label_smoothing_is_wrong_on_more_than_one_rank(finished):
    """Each rank hands out alpha K / (K - 1) of its own, and the target gets 1 minus one of them."""
    rows = finished["label_smoothing"]
    assert [row["ranks"] for row in rows] == [1, 2, 2, 3, 3, 3]
    for row in rows:
        assert row["loss"] == pytest.approx(row["torch"], rel=1e-6)
        assert row["megatron_target_mass"] == pytest.approx(1 + 0.1 * (row["ranks"] - 1), abs=1e-3)
    assert abs(rows[1]["megatron"] - rows[2]["megatron"]) > 0.1, "the ranks disagree"


ONCE, TWICE = {"all_gather": 1, "reduce_scatter": 1}, {"all_gather": 2, "reduce_scatter": 1}
CALLS = {  # of the forward, of the backward
    "tensor parallel": [{"all_reduce": 1}, {"all_reduce": 1}],
    "+ sequence parallel": [ONCE, ONCE],
    "+ x gathered again": [ONCE, TWICE],
}


def test_only_gathering_again_keeps_a_share_of_x(finished):
    for row in finished["mlp"]:
        share = -(-512 // row["ranks"])  # of the tokens, rounded up
        tokens = {"tensor parallel": 512, "+ x gathered again": share}
        assert row["kept_x"] == tokens.get(row["way"], row["ranks"] * share) * 96 * 4
        ops = row["forward"], row["backward"]
        assert CALLS[row["way"]] == [{op: way[op][0] for op in way} for way in ops]


@pytest.mark.parametrize("smoothing", ["1", "nan"])
def test_bad_input_is_one_line(capsys, smoothing):
    found = f"argument --label-smoothing: {smoothing} is not a number above 0 and below 1"
    refused(LAB, ["--label-smoothing", smoothing], found, capsys)


BUGS = {
    "overwrites_input": ("copy_to_tp_region", "the gradient given to the backward is overwritten"),
    "group_forgotten": ("copy_to_tp_region", "dx is off by"),
    "gathers_features": ("gather_from_sp_region", "ranks are joined along dim 0"),
    "scatter_by_all_reduce": ("reduce_scatter_to_sp_region", "all_reduce moves"),
    "bias_on_every_rank": ("row_parallel_linear", "the bias is added on every rank"),
    "bias_sees_own_tokens": ("row_parallel_linear", "it saw this rank's tokens only"),
    "next_ranks_columns": ("column_parallel_linear", "y is off by"),
    "shard_is_a_view": ("row_parallel_linear", "a view keeps the whole"),
    "unmasked_embedding": ("vocab_parallel_embedding", "a token of another rank's rows adds zeros"),
    "target_offset_forgotten": ("cross_entropy_forward", "target - start"),
    "smoothing_per_shard": ("cross_entropy_forward", "Megatron-LM's formula"),
    "logits_gathered": ("cross_entropy_forward", "all_reduce moves"),
    "ignored_targets_count": ("cross_entropy_forward", "the loss of an ignored target is 0"),
}

ANSWERS = """
== copy_to_tp_region: every rank's part goes into the sum
all_reduce(grad, ctx.group) -> grad
== copy_to_tp_region: a collective works in place
...
--
dist.all_reduce(grad, group=ctx.group)
return grad, None
== copy_to_tp_region: dx is off by
all_reduce(grad, ctx.group) -> all_reduce(grad, dist.group.WORLD)
== copy_to_tp_region
return x.view_as(x)
--
dx = grad.clone()
dist.all_reduce(dx, group=ctx.group)
return dx, None
== reduce_from_tp_region: P times too large
ctx.group = group
return all_reduce(x, group)
--
return all_reduce(grad, ctx.group), None
== reduce_from_tp_region: every rank's part goes into the sum
all_reduce(x, group) -> x
== reduce_from_tp_region: a collective works in place
dist.all_reduce(x, group=group)
return x
--
...
== reduce_from_tp_region
y = x.clone()
dist.all_reduce(y, group=group)
return y
--
return grad.clone(), None
== gather_from_sp_region: ranks are joined along dim 0
ctx.parts = group.size()
out = x.new_empty(x.shape[0] * ctx.parts, *x.shape[1:])
dist.all_gather_into_tensor(out, x.contiguous(), group=group)
return out.view(x.shape[0], -1, x.shape[2])
--
...
== gather_from_sp_region: all_reduce moves
reduce_scatter(grad -> all_reduce(grad
ctx.group), None -> ctx.group).chunk(ctx.group.size(), 1)[ctx.group.rank()], None
== gather_from_sp_region: every rank's part goes into the sum
reduce_scatter(grad, ctx.group) -> grad.chunk(ctx.group.size(), 1)[ctx.group.rank()]
== gather_from_sp_region
parts = [torch.empty_like(x) for _ in range(group.size())]
dist.all_gather(parts, x.contiguous(), group=group)
return torch.cat(parts, 1)
--
parts = [part.contiguous() for part in grad.chunk(ctx.group.size(), 1)]
dx = torch.empty_like(parts[0])
dist.reduce_scatter(dx, parts, group=ctx.group)
return dx, None
== reduce_scatter_to_sp_region: every rank's part goes into the sum
x = F.pad(x, (0, 0, 0, -x.shape[1] % group.size()))
return x.chunk(group.size(), 1)[group.rank()].clone()
--
...
== reduce_scatter_to_sp_region: y has shape
parts = [part.contiguous() for part in x.tensor_split(group.size(), 1)]
y = torch.empty_like(parts[group.rank()])
dist.reduce_scatter(y, parts, group=group)
return y
--
...
== reduce_scatter_to_sp_region: invalid gradient
all_gather(grad, ctx.group)[:, : ctx.length] -> all_gather(grad, ctx.group)
== reduce_scatter_to_sp_region
[:, : ctx.length] -> .narrow(1, 0, ctx.length)
== gathered_linear: every rank's part goes into the sum
reduce_scatter(grad @ weight, ctx.group) -> grad @ weight
return dx -> return dx.chunk(ctx.group.size(), 1)[ctx.group.rank()]
== gathered_linear: gradient of bias is NoneType
grad.sum(0) if ctx.needs_input_grad[2] else None -> None
== gathered_linear: keep the shard x, not the gathered one
save_for_backward(x, weight) -> save_for_backward(all_gather(x, group), weight)
all_gather(x, ctx.group).flatten -> x.flatten
== gathered_linear
y = all_gather(x, group) @ weight.T
ctx.save_for_backward(x, weight)
return y if bias is None else y + bias
--
shard, weight = ctx.saved_tensors
dw = torch.einsum("bso,bsi->oi", grad, all_gather(shard, ctx.group))
db = grad.sum((0, 1)) if ctx.needs_input_grad[2] else None
return reduce_scatter(torch.einsum("bso,oi->bsi", grad, weight), ctx.group), dw, db, None
== column_parallel_linear: every rank's part goes into the sum
copy_to_tp_region(x, self.group) -> x
== column_parallel_linear: the bias is missing
keep(linear.bias, 0, start, end) if linear.bias is not None else None -> None
== column_parallel_linear: RuntimeError
split(linear.out_features -> split(linear.in_features
keep(linear.weight, 0 -> keep(linear.weight, 1
== column_parallel_linear
...
--
enter = gather_from_sp_region if self.sequence_parallel else copy_to_tp_region
return F.linear(enter(x, self.group), self.weight, self.bias)
== row_parallel_linear: it saw this rank's tokens only
linear.bias is not None and group.rank() == 0 -> linear.bias is not None
self.bias), self.group) -> None), self.group) + (0 if self.bias is None else self.bias)
== row_parallel_linear: a view keeps the whole
keep(linear.weight, 1, start, end) -> nn.Parameter(linear.weight.detach()[:, start:end])
== row_parallel_linear: the bias is added on every rank
linear.bias is not None and group.rank() == 0 -> linear.bias is not None
== row_parallel_linear
first, last = split(linear.in_features, group.rank(), group.size())
weight, bias = keep(linear.weight, 1, first, last), None
if linear.bias is not None and group.rank() == 0:
    bias = nn.Parameter(linear.bias.detach().clone())
return cls(weight, bias, group, sequence_parallel)
--
y = x @ self.weight.T
y = y if self.bias is None else y + self.bias
if self.sequence_parallel:
    return reduce_scatter_to_sp_region(y, self.group)
return reduce_from_tp_region(y, self.group)
== vocab_parallel_embedding: a token of another rank's rows adds zeros
self.padding_idx).masked_fill(elsewhere[..., None], 0) -> self.padding_idx)
== vocab_parallel_embedding: clamping is no mask
masked_fill(elsewhere, 0) -> clamp(0, self.end - self.start - 1)
self.padding_idx).masked_fill(elsewhere[..., None], 0) -> self.padding_idx)
== vocab_parallel_embedding: the row of padding_idx has no gradient
self.weight, self.padding_idx -> self.weight
== vocab_parallel_embedding
here = (ids >= self.start) & (ids < self.end)
rows = torch.where(here, ids - self.start, 0)
y = here[..., None] * F.embedding(rows, self.weight, self.padding_idx)
if self.sequence_parallel:
    return reduce_scatter_to_sp_region(y, self.group)
return reduce_from_tp_region(y, self.group)
== cross_entropy_forward: the peak is that of all ranks
all_reduce(wide.max(-1).values, group, dist.ReduceOp.MAX) -> wide.amax(-1)
== cross_entropy_forward: take the peak off before exp()
all_reduce(wide.max(-1).values, group, dist.ReduceOp.MAX) -> 0 * wide.amax(-1)
== cross_entropy_forward: the softmax is over this rank's logits only
all_reduce(torch.stack([wanted -> (all_reduce(wanted, group)
.sum(-1)]), group) -> .sum(-1))
== cross_entropy_forward
elsewhere = (target < start) | (target >= start + logits.shape[-1])
column = torch.where(elsewhere, 0, target - start)
peak = all_reduce(wide.amax(-1), group, dist.ReduceOp.MAX)
shifted = wide - peak.unsqueeze(-1)
wanted = torch.where(elsewhere, 0, shifted.gather(-1, column[..., None]).squeeze(-1))
if smoothing:
    wanted = (1 - smoothing) * wanted + smoothing / vocab * shifted.sum(-1)
wanted, sum_exp = all_reduce(wanted, group), all_reduce(shifted.exp().sum(-1), group)
== cross_entropy_backward: q is smoothed in the backward too
dx -= ctx.smoothing / ctx.vocab -> pass
(ctx.smoothing - 1) -> -1
== cross_entropy_backward: the softmax is over this rank's logits only
(logits - peak[..., None]).exp() / sum_exp[..., None] -> logits.softmax(-1)
== cross_entropy_backward: only the rank that holds the target takes q off there
(~elsewhere)[..., None].to(dx.dtype) -> torch.ones_like(dx)
== cross_entropy_backward
softmax = (logits - peak[..., None]).exp() / sum_exp[..., None]
q = torch.full_like(softmax, ctx.smoothing / ctx.vocab)
q.scatter_add_(-1, column[..., None], (1 - ctx.smoothing) * (~elsewhere)[..., None].float())
dx = (softmax - q) * grad[..., None]
"""
WRONG, RIGHT = listed(LAB, ANSWERS)
test_bugs_are_caught, test_wrong_answers_get_their_hint = caught(LAB, BUGS, WRONG)


def test_other_right_answers_pass_and_the_lab_accepts_them(tmp_path):
    run_answered(LAB, RIGHT, tmp_path, "--length", 2)  # fewer tokens than ranks


# What the checks do not draw


def test_vocab_range():
    for vocab, world in [(7, 3), (3, 3), (50257, 8), (5, 1)]:
        ranges = [range(*lab2.vocab_range(vocab, rank, world)) for rank in range(world)]
        assert [token for tokens in ranges for token in tokens] == list(range(vocab))
        assert len(ranges[0]) - len(ranges[-1]) <= 1
    with pytest.raises(ValueError, match="2 tokens cannot be cut over 3 ranks; 2 ranks would do"):
        lab2.vocab_range(2, 0, 3)


def losses(group, dtype, smoothing, vocab):
    """Errors of vocab_parallel_cross_entropy, value and gradient, of logits (n, v)."""
    torch.manual_seed(3)
    logits = (3 * torch.randn(40, vocab)).to(dtype)
    target = torch.randint(vocab, (40,))
    full = logits.clone().requires_grad_()
    right = F.cross_entropy(full.double(), target, reduction="none", label_smoothing=smoothing)
    right.sum().backward()
    start, end = lab2.vocab_range(vocab, group.rank(), group.size())
    shard = logits[:, start:end].clone().requires_grad_()
    mine = lab2.vocab_parallel_cross_entropy(shard, target, group, smoothing)
    mine.sum().backward()
    assert shard.grad.dtype == dtype
    gradients = shard.grad.double() - full.grad[:, start:end].double()
    return ((mine - right).abs().max() / right.abs().max()).item(), gradients.abs().max().item()


@pytest.mark.parametrize("smoothing", [0.0, 0.2, 1.0])
def test_loss_on_other_ranks_and_dtypes(smoothing):
    for errors in ranks.on_ranks(5, losses, torch.float64, smoothing, 13):
        assert max(errors) < 1e-14
    for value, gradient in ranks.on_ranks(3, losses, torch.bfloat16, smoothing, 3):
        assert value < 1e-6 and gradient <= 2**-8, "half a bfloat16 epsilon"


def test_what_cannot_work_is_said():
    alone, logits = SimpleNamespace(rank=lambda: 0, size=lambda: 1), torch.zeros(2, 6)
    loss, target = lab2.vocab_parallel_cross_entropy, torch.tensor([0, 1])
    embedding = lab2.VocabParallelEmbedding.from_embedding(nn.Embedding(6, 4), alone)
    with pytest.raises(IndexError, match=r"a target is neither in \[0, 6\) nor -100"):
        loss(logits, target - 1, alone)
    with pytest.raises(ValueError, match=r"label_smoothing 1.5 is not in \[0, 1\]"):
        loss(logits, target, alone, label_smoothing=1.5)
    with pytest.raises(IndexError, match=r"a token is not in \[0, 6\)"):
        embedding(torch.tensor([[6]]))
