"""Lab 2 as a learner meets it: the run, bugs, wrong answers, what no check draws."""

import json

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, python
from learner import answered, grade, graded, lab_file, ranks
from torch import nn

pytestmark = pytest.mark.slow  # minutes, with the other labs'

LAB = lab_file("lab2")
lab2 = ranks.load(LAB)
CHECKS = ranks.room("checks", LAB).CHECKS


# The run


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lab2")
    run = python(
        LAB, "--predict", "65000", "--json", folder / "lab2.json", "--plot", folder / "lab2.png"
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stderr == "", "nothing but the report is printed"
    assert sorted(path.name for path in folder.iterdir()) == ["lab2.json", "lab2.png"]
    return run.stdout, json.loads((folder / "lab2.json").read_text()), folder / "lab2.png"


def test_the_lab_proves_itself(finished):
    printed, results, picture = finished
    assert printed.splitlines()[-1] == "PASS lab2_megatron_layers: all 10 exercises' checks hold"
    assert "\n  predicted 65000, measured 65664: off by -664\n" in printed
    assert results["passed"] and results["failed"] == []
    assert results["exercises"].keys() == CHECKS.keys()
    assert all(
        exercise["passed"] and exercise["report"] for exercise in results["exercises"].values()
    )
    assert picture.read_bytes()[:4] == b"\x89PNG" and picture.stat().st_size > 20_000


def test_megatrons_label_smoothing_is_wrong_on_more_than_one_rank(finished):
    rows = finished[1]["label_smoothing"]
    assert [(row["ranks"], row["rank"]) for row in rows] == [
        (1, 0),
        (2, 0),
        (2, 1),
        (3, 0),
        (3, 1),
        (3, 2),
    ]
    for row in rows:
        assert row["loss"] == pytest.approx(row["torch"], rel=1e-6)
        assert row["target_mass"] == pytest.approx(1, abs=1e-5)
        # each rank hands out alpha K / (K - 1) of its own, and the target gets 1 minus one of them
        assert row["megatron_target_mass"] == pytest.approx(1 + 0.1 * (row["ranks"] - 1), abs=1e-3)
    assert rows[0]["megatron"] == pytest.approx(rows[0]["meant_by_megatron"], rel=1e-6)
    for world in 2, 3:
        losses = [row["megatron"] for row in rows if row["ranks"] == world]
        assert max(losses) - min(losses) > 0.1, "the ranks disagree"


def test_only_gathering_again_keeps_a_share_of_x(finished):
    rows = finished[1]["mlp"]
    assert len(rows) == 3 * (2 + 3) and all(row["error"] < 1e-6 for row in rows)
    for world in 2, 3:
        tokens = -(-512 // world) * world
        x = 512 * 96 * 4
        shares = dict.fromkeys(["tensor parallel", "+ sequence parallel", "+ x gathered again"], 0)
        for row in (row for row in rows if row["ranks"] == world):
            shares[row["way"]] += row["kept_x"]
        assert list(shares.values()) == [world * x, world * tokens * 96 * 4, tokens * 96 * 4]
    calls = {
        row["way"]: [
            {op: count for op, (count, _) in row[way].items()} for way in ("forward", "backward")
        ]
        for row in rows
    }
    once = {"all_gather": 1, "reduce_scatter": 1}
    assert calls["tensor parallel"] == [{"all_reduce": 1}] * 2
    assert calls["+ sequence parallel"] == [once, once]
    assert calls["+ x gathered again"] == [once, {"all_gather": 2, "reduce_scatter": 1}]


BAD = [
    (
        ["--label-smoothing", "1"],
        "argument --label-smoothing: 1 is not a number above 0 and below 1",
    ),
    (
        ["--label-smoothing", "nan"],
        "argument --label-smoothing: nan is not a number above 0 and below 1",
    ),
    (["--length", "0"], "argument --length: 0 is not a whole number of at least 1"),
    (["--inject-bug", "typo"], "no bug typo; --inject-bug list names them"),
    (["--json", "/nowhere/at/all.json"], "cannot write /nowhere/at/all.json"),
    (["--typo"], "unrecognized arguments: --typo"),
]


@pytest.mark.parametrize("options,message", BAD)
def test_bad_input_is_one_line(capsys, options, message):
    assert grade.run_lab(LAB, options) == 2
    printed = capsys.readouterr()
    assert (
        printed.out == ""
        and printed.err.startswith(f"error: {message}")
        and printed.err.count("\n") == 1
    )


# Its bugs: the exercise whose check catches each, and what it says

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


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_is_caught(bug):
    exercise, expected = BUGS[bug]
    passed, verdict = graded(LAB, exercise, bug=bug)
    assert not passed and expected in verdict, verdict


def test_a_bug_makes_the_lab_exit_1(capsys, tmp_path):
    options = ["--inject-bug", "bias_on_every_rank", "--json", str(tmp_path / "bug.json")]
    assert grade.run_lab(LAB, options) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "FAIL lab2_megatron_layers: row_parallel_linear"
    results = json.loads((tmp_path / "bug.json").read_text())
    assert not results["passed"] and not results["exercises"]["row_parallel_linear"]["passed"]


# What a learner hands in, see learner.py

FORWARD = """
elsewhere = (target < start) | (target >= start + logits.shape[-1])
column = (target - start).masked_fill(elsewhere, 0)
peak = all_reduce(wide.max(-1).values, group, dist.ReduceOp.MAX)
shifted = wide - peak[..., None]
wanted = shifted.gather(-1, column[..., None])[..., 0].masked_fill(elsewhere, 0)
if smoothing:
    wanted = (1 - smoothing) * wanted + smoothing / vocab * shifted.sum(-1)
wanted, sum_exp = all_reduce(torch.stack([wanted, shifted.exp().sum(-1)]), group)
"""
BACKWARD = """
softmax = (logits - peak[..., None]).exp() / sum_exp[..., None]
q = torch.full_like(softmax, ctx.smoothing / ctx.vocab)
q.scatter_add_(-1, column[..., None], (1 - ctx.smoothing) * (~elsewhere)[..., None].float())
dx = (softmax - q) * grad[..., None]
"""


def changed(text, old, new):
    assert old in text
    return text.replace(old, new)


WRONG = [
    ("copy_to_tp_region", [None, "return grad, None"], "every rank's part goes into the sum"),
    (
        "copy_to_tp_region",
        [None, "dist.all_reduce(grad, group=ctx.group)\nreturn grad, None"],
        "a collective works in place",
    ),
    (
        "copy_to_tp_region",
        [None, "return all_reduce(grad, dist.group.WORLD), None"],
        "dx is off by",
    ),
    (
        "reduce_from_tp_region",
        [
            "ctx.group = group\nreturn all_reduce(x, group)",
            "return all_reduce(grad, ctx.group), None",
        ],
        "P times too large",
    ),
    ("reduce_from_tp_region", ["return x", None], "every rank's part goes into the sum"),
    (
        "reduce_from_tp_region",
        ["dist.all_reduce(x, group=group)\nreturn x", None],
        "a collective works in place",
    ),
    (
        "gather_from_sp_region",  # joined along the batch
        [
            """
            ctx.parts = group.size()
            out = x.new_empty(x.shape[0] * ctx.parts, *x.shape[1:])
            dist.all_gather_into_tensor(out, x.contiguous(), group=group)
            return out.view(x.shape[0], -1, x.shape[2])
            """,
            None,
        ],
        "ranks are joined along dim 0",
    ),
    (
        "gather_from_sp_region",  # all reduced, of which most is thrown away
        [
            None,
            """
            P, rank = ctx.group.size(), ctx.group.rank()
            return all_reduce(grad, ctx.group).chunk(P, 1)[rank], None
            """,
        ],
        "all_reduce moves",
    ),
    (
        "reduce_scatter_to_sp_region",  # the own part of the own x
        [
            """
            x = F.pad(x, (0, 0, 0, -x.shape[1] % group.size()))
            return x.chunk(group.size(), 1)[group.rank()].clone()
            """,
            None,
        ],
        "every rank's part goes into the sum",
    ),
    (
        "reduce_scatter_to_sp_region",  # uneven chunks
        [
            """
            parts = [part.contiguous() for part in x.tensor_split(group.size(), 1)]
            y = torch.empty_like(parts[group.rank()])
            dist.reduce_scatter(y, parts, group=group)
            return y
            """,
            None,
        ],
        "y has shape",
    ),
    (
        "gathered_linear",  # the gradient of x is not summed
        [
            None,
            """
            x, weight = ctx.saved_tensors
            grad = grad.contiguous()
            dx = (grad @ weight).chunk(ctx.group.size(), 1)[ctx.group.rank()]
            dw = grad.flatten(0, 1).T @ all_gather(x, ctx.group).flatten(0, 1)
            return dx, dw, grad.sum((0, 1)) if ctx.needs_input_grad[2] else None, None
            """,
        ],
        "every rank's part goes into the sum",
    ),
    (
        "gathered_linear",  # a gradient for a bias that is not there
        [
            None,
            """
            x, weight = ctx.saved_tensors
            dw = grad.flatten(0, 1).T @ all_gather(x, ctx.group).flatten(0, 1)
            return reduce_scatter(grad @ weight, ctx.group), dw, None, None
            """,
        ],
        "gradient of bias is NoneType",
    ),
    (
        "gather_from_sp_region",
        [None, "return grad.chunk(ctx.group.size(), 1)[ctx.group.rank()], None"],
        "every rank's part goes into the sum",
    ),
    (
        "reduce_scatter_to_sp_region",
        [None, "return all_gather(grad, ctx.group), None"],
        "invalid gradient",
    ),
    (
        "gathered_linear",
        [
            """
            total = all_gather(x, group)
            ctx.save_for_backward(total, weight)
            return F.linear(total, weight, bias)
            """,
            """
            total, weight = ctx.saved_tensors
            dx = reduce_scatter(grad @ weight, ctx.group)
            grad = grad.flatten(0, 1)
            db = grad.sum(0) if ctx.needs_input_grad[2] else None
            return dx, grad.T @ total.flatten(0, 1), db, None
            """,
        ],
        "keep the shard x, not the gathered one",
    ),
    (
        "column_parallel_linear",
        [None, "return F.linear(x, self.weight, self.bias)"],
        "every rank's part goes into the sum",
    ),
    (
        "column_parallel_linear",
        [
            """
            start, end = split(linear.out_features, group.rank(), group.size())
            return cls(keep(linear.weight, 0, start, end), None, group, sequence_parallel)
            """,
            None,
        ],
        "the bias is missing",
    ),
    (
        "column_parallel_linear",  # rows and columns mixed up
        [
            """
            start, end = split(linear.in_features, group.rank(), group.size())
            return cls(keep(linear.weight, 1, start, end), None, group, sequence_parallel)
            """,
            None,
        ],
        "RuntimeError",
    ),
    (
        "row_parallel_linear",  # the bias after the sum, and on every rank
        [
            """
            start, end = split(linear.in_features, group.rank(), group.size())
            bias = None if linear.bias is None else keep(linear.bias, 0, 0, linear.out_features)
            return cls(keep(linear.weight, 1, start, end), bias, group, sequence_parallel)
            """,
            """
            leave = reduce_scatter_to_sp_region if self.sequence_parallel else reduce_from_tp_region
            y = leave(F.linear(x, self.weight), self.group)
            return y if self.bias is None else y + self.bias
            """,
        ],
        "it saw this rank's tokens only",
    ),
    (
        "row_parallel_linear",  # a view
        [
            """
            start, end = split(linear.in_features, group.rank(), group.size())
            mine = linear.bias is not None and group.rank() == 0
            bias = keep(linear.bias, 0, 0, linear.out_features) if mine else None
            weight = nn.Parameter(linear.weight.detach()[:, start:end])
            return cls(weight, bias, group, sequence_parallel)
            """,
            None,
        ],
        "a view keeps the whole",
    ),
    (
        "row_parallel_linear",
        [
            """
            start, end = split(linear.in_features, group.rank(), group.size())
            return cls(keep(linear.weight, 1, start, end), linear.bias, group, sequence_parallel)
            """,
            None,
        ],
        "the bias is added on every rank",
    ),
    (
        "vocab_parallel_embedding",
        [
            """
            rows = (ids - self.start).masked_fill((ids < self.start) | (ids >= self.end), 0)
            y = F.embedding(rows, self.weight, self.padding_idx)
            return reduce_from_tp_region(y, self.group)
            """
        ],
        "a token of another rank's rows adds zeros",
    ),
    (
        "vocab_parallel_embedding",  # clamped, not masked
        [
            """
            rows = (ids - self.start).clamp(0, self.end - self.start - 1)
            y = F.embedding(rows, self.weight, self.padding_idx)
            return reduce_from_tp_region(y, self.group)
            """
        ],
        "clamping is no mask",
    ),
    (
        "vocab_parallel_embedding",  # padding_idx forgotten
        [
            """
            elsewhere = (ids < self.start) | (ids >= self.end)
            rows = (ids - self.start).masked_fill(elsewhere, 0)
            y = F.embedding(rows, self.weight).masked_fill(elsewhere[..., None], 0)
            leave = reduce_scatter_to_sp_region if self.sequence_parallel else reduce_from_tp_region
            return leave(y, self.group)
            """
        ],
        "the row of padding_idx has no gradient",
    ),
    (
        "cross_entropy_forward",  # each rank's own peak
        [
            changed(
                FORWARD,
                "all_reduce(wide.max(-1).values, group, dist.ReduceOp.MAX)",
                "wide.amax(-1)",
            )
        ],
        "the peak is that of all ranks",
    ),
    (
        "cross_entropy_forward",  # none
        [
            changed(
                FORWARD,
                "all_reduce(wide.max(-1).values, group, dist.ReduceOp.MAX)",
                "0 * wide.amax(-1)",
            )
        ],
        "take the peak off before exp()",
    ),
    (
        "cross_entropy_backward",  # the loss is smoothed, its gradient is not
        [changed(BACKWARD, "ctx.smoothing", "0.0")],
        "q is smoothed in the backward too",
    ),
    (
        "cross_entropy_backward",  # the own softmax
        [
            changed(
                BACKWARD,
                "(logits - peak[..., None]).exp() / sum_exp[..., None]",
                "logits.softmax(-1)",
            )
        ],
        "the softmax is over this rank's logits only",
    ),
    ("cross_entropy_forward", [changed(FORWARD, "(target - start)", "target")], "out of bounds"),
    (
        "cross_entropy_forward",
        [
            changed(
                FORWARD, "shifted = wide - peak[..., None]", "shifted = wide.sub_(peak[..., None])"
            )
        ],
        "the logits are overwritten",
    ),
    (
        "cross_entropy_forward",
        [changed(FORWARD, "smoothing / vocab * shifted.sum(-1)", "smoothing * shifted.mean(-1)")],
        "the loss is off by",
    ),
    (
        "cross_entropy_forward",
        [changed(FORWARD, "if smoothing:", "if True:")],
        "0 times a logit of minus infinity is none",
    ),
    (
        "cross_entropy_forward",
        [FORWARD + "sum_exp = shifted.exp().sum(-1)"],
        "the softmax is over this rank's logits only",
    ),
    (
        "cross_entropy_backward",
        [changed(BACKWARD, "(~elsewhere)[..., None].float()", "torch.ones_like(q)")],
        "only the rank that holds the target takes q off there",
    ),
    (
        "cross_entropy_backward",
        [changed(BACKWARD, " * grad[..., None]", "")],
        "times the gradient that arrives",
    ),
    (
        "cross_entropy_backward",
        [changed(BACKWARD, "/ ctx.vocab", "/ logits.shape[-1]")],
        "smoothing / vocab: the whole vocabulary",
    ),
]


@pytest.mark.parametrize("exercise,regions,hint", WRONG)
def test_a_wrong_answer_is_recognised(exercise, regions, hint):
    passed, verdict = graded(LAB, exercise, regions)
    assert not passed and hint in verdict, verdict


RIGHT = {
    "copy_to_tp_region": [
        "return x.view_as(x)",
        "dx = grad.clone()\ndist.all_reduce(dx, group=ctx.group)\nreturn dx, None",
    ],
    "reduce_from_tp_region": [
        "y = x.clone()\ndist.all_reduce(y, group=group)\nreturn y",
        "return grad.clone(), None",
    ],
    "gather_from_sp_region": [
        """
        parts = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, 1)
        """,
        """
        parts = [part.contiguous() for part in grad.chunk(ctx.group.size(), 1)]
        dx = torch.empty_like(parts[0])
        dist.reduce_scatter(dx, parts, group=ctx.group)
        return dx, None
        """,
    ],
    "reduce_scatter_to_sp_region": [
        "total = reduce_scatter(x, group)\nreturn total",
        "dx = all_gather(grad, ctx.group)\nreturn dx.narrow(1, 0, ctx.length), None",
    ],
    "gathered_linear": [
        """
        y = all_gather(x, group) @ weight.T
        ctx.save_for_backward(x, weight)
        return y if bias is None else y + bias
        """,
        """
        shard, weight = ctx.saved_tensors
        x = all_gather(shard, ctx.group)
        dw = torch.einsum("bso,bsi->oi", grad, x)
        db = grad.sum((0, 1)) if ctx.needs_input_grad[2] else None
        return reduce_scatter(torch.einsum("bso,oi->bsi", grad, weight), ctx.group), dw, db, None
        """,
    ],
    "column_parallel_linear": [
        None,
        """
        if self.sequence_parallel:
            x = gather_from_sp_region(x, self.group)
        else:
            x = copy_to_tp_region(x, self.group)
        return F.linear(x, self.weight, self.bias)
        """,
    ],
    "row_parallel_linear": [
        """
        first, last = split(linear.in_features, group.rank(), group.size())
        weight, bias = keep(linear.weight, 1, first, last), None
        if linear.bias is not None and group.rank() == 0:
            bias = nn.Parameter(linear.bias.detach().clone())
        return cls(weight, bias, group, sequence_parallel)
        """,
        """
        y = x @ self.weight.T
        if self.bias is not None:
            y = y + self.bias
        if self.sequence_parallel:
            return reduce_scatter_to_sp_region(y, self.group)
        return reduce_from_tp_region(y, self.group)
        """,
    ],
    "vocab_parallel_embedding": [
        """
        here = (ids >= self.start) & (ids < self.end)
        rows = torch.where(here, ids - self.start, 0)
        y = here[..., None] * F.embedding(rows, self.weight, self.padding_idx)
        if self.sequence_parallel:
            return reduce_scatter_to_sp_region(y, self.group)
        return reduce_from_tp_region(y, self.group)
        """
    ],
    "cross_entropy_forward": [FORWARD],
    "cross_entropy_backward": [BACKWARD],
}


@pytest.mark.parametrize("exercise", RIGHT)
def test_other_right_answers_pass(exercise):
    passed, verdict = graded(LAB, exercise, RIGHT[exercise])
    assert passed, verdict


def test_what_the_grader_passes_the_lab_accepts(tmp_path):
    """Other right answers in another folder's my_labs/."""
    (tmp_path / "labs").symlink_to(ROOT / "labs")
    (tmp_path / "my_labs").mkdir()
    mine = tmp_path / "my_labs" / LAB.name
    mine.write_text(answered(LAB, RIGHT))
    run = python(mine, "--length", "7", cwd=tmp_path)
    assert run.returncode == 0 and run.stdout.endswith("exercises' checks hold\n"), run.stdout


# What the checks do not draw


def test_vocab_range():
    for vocab, world in [(7, 3), (6, 3), (3, 3), (50257, 8), (5, 1)]:
        ranges = [lab2.vocab_range(vocab, rank, world) for rank in range(world)]
        assert [token for start, end in ranges for token in range(start, end)] == list(range(vocab))
        assert (
            max(end - start for start, end in ranges) - min(end - start for start, end in ranges)
            <= 1
        )
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
    error = (mine - right).abs().max() / right.abs().max()
    return error.item(), (shard.grad.double() - full.grad[:, start:end].double()).abs().max().item()


@pytest.mark.parametrize(
    "world,dtype,vocab", [(1, "float64", 11), (5, "float64", 13), (3, "bfloat16", 3)]
)
@pytest.mark.parametrize("smoothing", [0.0, 0.2, 1.0])
def test_loss_on_other_ranks_and_dtypes(world, dtype, vocab, smoothing):
    dtype = getattr(torch, dtype)
    value, gradient = (
        (1e-14, 1e-14) if dtype == torch.float64 else (1e-6, 2**-8)
    )  # half a bfloat16 epsilon
    for errors in ranks.on_ranks(world, losses, dtype, smoothing, vocab):
        assert errors[0] < value and errors[1] <= gradient


def refusals(group):
    """What is raised where no rank could hold the token."""
    shard, raised = torch.zeros(2, 3), []
    embedding = lab2.VocabParallelEmbedding.from_embedding(nn.Embedding(6, 4), group)
    loss = lab2.vocab_parallel_cross_entropy
    for call in (
        lambda: loss(shard, torch.tensor([5, 6]), group),
        lambda: loss(shard, torch.tensor([0, -1]), group),
        lambda: loss(shard, torch.tensor([0, 1]), group, label_smoothing=1.5),
        lambda: embedding(torch.tensor([[6]])),
    ):
        try:
            call()
        except (IndexError, ValueError) as problem:
            raised.append(str(problem))
    return raised


def test_what_cannot_work_is_said():
    expected = ["a target is neither in [0, 6) nor -100"] * 2
    expected += ["label_smoothing 1.5 is not in [0, 1]", "a token is not in [0, 6)"]
    assert ranks.on_ranks(2, refusals) == [expected] * 2


def tiny_model(group, tokens):
    """The worst error of embedding, MLP, head and loss where P divides nothing."""
    torch.manual_seed(4)
    layers = nn.Embedding(11, 5), nn.Linear(5, 7), nn.Linear(7, 5), nn.Linear(5, 11, bias=False)
    embedding, up, down, head = (layer.double() for layer in layers)
    ids, target = torch.randint(11, (2, tokens)), torch.randint(11, (2, tokens))
    hidden = embedding(ids)
    right = F.cross_entropy(head(hidden + down(F.gelu(up(hidden)))).flatten(0, 1), target.flatten())
    right.backward()
    table = lab2.VocabParallelEmbedding.from_embedding(embedding, group, sequence_parallel=True)
    first = lab2.ColumnParallelLinear.from_linear(up, group, sequence_parallel=True)
    second = lab2.RowParallelLinear.from_linear(down, group, sequence_parallel=True)
    last = lab2.ColumnParallelLinear.from_linear(head, group, sequence_parallel=True)
    hidden = table(ids)  # (2, s/P rounded up, 5)
    logits = last(hidden + second(F.gelu(first(hidden))))[:, :tokens]
    loss = lab2.vocab_parallel_cross_entropy(logits, target, group).mean()
    loss.backward()
    features, tokens = (lab2.split(n, group.rank(), group.size()) for n in (7, 11))
    pairs = [(loss, right), (table.weight.grad, embedding.weight.grad[slice(*tokens)])]
    pairs += [(first.weight.grad, up.weight.grad[slice(*features)])]
    pairs += [(second.weight.grad, down.weight.grad[:, slice(*features)])]
    pairs += [(last.weight.grad, head.weight.grad[slice(*tokens)])]
    pairs += [(second.bias.grad, down.bias.grad)] if group.rank() == 0 else []
    return max((mine - whole).abs().max().item() for mine, whole in pairs)


@pytest.mark.parametrize("tokens", [2, 4, 7])
def test_a_whole_model_with_tokens_that_only_fill_up(tokens):
    assert max(ranks.on_ranks(3, tiny_model, tokens)) < 1e-14


@pytest.mark.parametrize("exercise", CHECKS)
def test_another_seed_draws_another_check(exercise):
    passed, verdict = graded(LAB, exercise, seed=20)
    assert passed, verdict
