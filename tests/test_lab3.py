"""labs/lab3_pitfalls.py: wrong ways are wrong, right ways right, and usual mistakes are told apart."""

import importlib
import json
import re
import subprocess
import sys

import pytest
from conftest import ENVIRONMENT, ROOT, splice

sys.path.insert(0, str(ROOT / "labs"))  # the ranks' processes import the lab by its name
lab = importlib.import_module("lab3_pitfalls")

pytestmark = pytest.mark.slow  # minutes, with the other labs'

FILE = ROOT / "labs" / "lab3_pitfalls.py"


def run(*options):
    """The lab as a user runs it."""
    command = [sys.executable, str(FILE), *map(str, options)]
    return subprocess.run(
        command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=300
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """(the finished run, its JSON, the picture's path) of the lab with all its pitfalls."""
    folder = tmp_path_factory.mktemp("lab3")
    done = run("--json", folder / "lab3.json", "--plot", folder / "lab3.png")
    assert done.returncode == 0, done.stdout + done.stderr
    return done, json.loads((folder / "lab3.json").read_text()), folder / "lab3.png"


def test_all_pitfalls_are_wrong_and_all_right_ways_right(whole):
    done, results, picture = whole
    assert done.stdout.splitlines()[-1] == "PASS lab3_pitfalls: all 16 exercises' checks hold"
    assert done.stderr == "", "nothing but the report is printed"
    assert results["passed"] and all(e["passed"] for e in results["exercises"].values())
    assert (
        list(results["exercises"]) == list(results["pitfalls"]) and len(results["pitfalls"]) == 16
    )
    for name, row in results["pitfalls"].items():
        assert row["verdict"] == "ok", (name, row)
        assert row["right"]["error"] <= 1e-5 and row["right"]["seen"], (name, row)
        assert row["wrong"]["error"] is None or row["wrong"]["error"] > 1e-2, (name, row)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_loss_looks_right_where_the_gradient_is_not(whole):
    silent = [
        "untied_weights",
        "returned_tuples",
        "local_positions",
        "local_mask",
        "chunk_boundary",
    ]
    silent += ["loss_without_graph", "adam_hides_scale", "transposed_weights"]
    for name in silent:
        wrong = whole[1]["pitfalls"][name]["wrong"]
        assert wrong["loss"] < 0.05 and wrong["error"] > 0.1 > 4 * wrong["loss"], (name, wrong)
    for name in ("untied_weights", "loss_without_graph", "f_per_projection"):
        assert whole[1]["pitfalls"][name]["wrong"]["loss"] < 1e-6


@pytest.mark.parametrize(
    "name,wrong,right",
    [
        ("transposed_weights", r"\(192, 64\) raises", "gradient"),
        (
            "copy_without_no_grad",
            "RuntimeError: a leaf Variable that requires grad",
            "parameter 0 off",
        ),
        (
            "parallelize_order",
            "NotImplementedError: Cannot copy out of meta tensor",
            "weights 0 off",
        ),
        ("untied_weights", r"2 of \(v, h\)", r"1 of \(v, h\)"),
        (
            "f_per_projection",
            "^5 all-reduces a layer; gradient .*e-07 off",
            "^2 all-reduces a layer",
        ),
        ("autograd_kwargs", "TypeError: .*keyword argument", "gradient 0 off"),
        ("retain_grad", "grad is None", "gradient 0 off"),
        ("chunk_boundary", "124 of 126 targets", "126 of 126 targets"),
        (
            "loss_without_graph",
            "RuntimeError: element 0 of tensors does not require grad",
            "gradient",
        ),
        ("adam_hides_scale", r"part by [\d.]+e-05", r"part by 0\.\d+"),
        ("stale_result", "0.[67].* off", "the sum is 0 off"),
        ("adaptive_timing", r"rank \d waited [2-9]\.\d s in vain", r"^(\d+) and \1 steps$"),
        ("rank_0_clock", r"^rank 0 says \d{1,3} of 200 ms", r"says [2-9]\d\d of 200 ms"),
    ],
)
def test_what_one_sees(whole, name, wrong, right):
    row = whole[1]["pitfalls"][name]
    assert re.search(wrong, row["wrong"]["seen"]), row
    assert re.search(right, row["right"]["seen"]), row


def test_what_is_told_is_tried(whole):
    done, results, _ = whole
    told = {name: row["told"] for name, row in results["pitfalls"].items() if "told" in row}
    assert set(told) == {
        "parallelize_order",
        "returned_tuples",
        "autograd_kwargs",
        "retain_grad",
        "stale_result",
    }
    assert told["returned_tuples"] == [False, "it returns 2"], "transformers 5"
    assert told["stale_result"][0] is False, "torch 2.11 and later wait"
    version = tuple(map(int, results["versions"]["torch"].split("+")[0].split(".")[:2]))
    assert told["autograd_kwargs"][0] is (version < (2, 13)), (
        "since 2.13 apply() takes what forward() names"
    )
    assert f"with torch {results['versions']['torch']}, transformers" in done.stdout


def main_of(text, name, folder, monkeypatch, *options):
    """Exit status of a changed lab, run in this process, whose ranks start faster."""
    (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(folder)
    return importlib.import_module(name).main(list(options))


def test_a_pitfall_that_is_gone_says_so(tmp_path, monkeypatch, capsys):
    text = FILE.read_text().replace(
        "\n    parameter.copy_(value)\n", "\n    parameter.data.copy_(value)\n"
    )
    assert main_of(text, "mended", tmp_path, monkeypatch, "--only", "copy_without_no_grad") == 0
    printed = capsys.readouterr().out
    assert re.search(r"copy_without_no_grad +1 +no longer in torch \d\.\d+", printed), printed


def test_a_bug_fails_its_pitfall(tmp_path, monkeypatch, capsys):
    options = ["--only", "stale_result", "--inject-bug", "no_wait"]
    assert main_of(FILE.read_text(), "same_lab", tmp_path, monkeypatch, *options) == 1
    printed = capsys.readouterr().out
    assert printed.splitlines()[-1] == "FAIL same_lab: stale_result"
    assert "FAIL: the sum is" in printed, "the table sees it too, not only the check"


@pytest.mark.parametrize(
    "options,message",
    [
        (
            ["--only", "typo"],
            f"argument --only: no pitfall typo; there are {', '.join(lab.PITFALLS)}",
        ),
        (["--inject-bug", "typo"], "no bug typo; --inject-bug list names them"),
        (
            ["--json", "/nowhere/at/all.json"],
            "cannot write /nowhere/at/all.json: a directory, or in none that can be written",
        ),
    ],
)
def test_bad_input_is_one_line(options, message, capsys):
    assert lab.main(options) == 2
    seen = capsys.readouterr()
    assert seen.out == "" and seen.err == f"error: {message}\n"


def check(name, file=FILE, bug=None, seed=5):
    """What an exercise's check reports on a file; raises lab.Wrong."""
    _, world = lab.CHECKS[name]
    return lab.on_ranks(world, lab.check_on_rank, str(file), bug, name, seed, timeout=120)[0]


@pytest.mark.parametrize("bug", lab.BUGS, ids=lambda bug: bug.__name__)
def test_every_bug_is_caught_by_its_check(bug):
    name = bug.__doc__.split(":")[0]
    with pytest.raises(lab.Wrong) as caught:
        check(name, bug=bug.__name__)
    assert "not done yet" not in caught.value.found


def test_every_pitfall_has_a_bug_and_an_exercise():
    assert sorted(bug.__doc__.split(":")[0] for bug in lab.BUGS) == sorted(lab.PITFALLS)
    regions = re.findall(r"# exercise: (\w+)\n", FILE.read_text())
    assert sorted(regions) == sorted(lab.PITFALLS) == sorted(lab.CHECKS)


def answer(name, source, folder):
    """The finished file with one exercise's region replaced by source, as a grader does it."""
    return splice(lab, folder / f"{name}.py", name, [source])


WRONG_ANSWERS = [
    (
        "transposed_weights",
        "return weight.chunk(world, dim=1)[rank].T.clone()",
        "torch keeps a weight as (out, in)",
    ),
    ("transposed_weights", "return weight.tensor_split(world)[rank]", "clone it"),
    (
        "copy_without_no_grad",
        "parameter = nn.Parameter(value)",
        "a name bound anew changes no parameter",
    ),
    (
        "copy_without_no_grad",
        "parameter.requires_grad_(False).copy_(value)",
        "requires_grad has to stay True",
    ),
    ("copy_without_no_grad", "parameter.data = value", "copy the numbers"),
    (
        "parallelize_order",
        "parallelize_module(model, mesh, plan)\nreturn model.to_empty(device=mesh.device_type)",
        "first memory on the device, then the weights, then the cut",
    ),
    (
        "parallelize_order",
        "model.to_empty(device=mesh.device_type)\nmodel.load_state_dict(weights)\nreturn model",
        "parallelize_module",
    ),
    (
        "untied_weights",
        "return parallelize_module(model, mesh, plan)",
        "give the head the embedding's again",
    ),
    (
        "untied_weights",
        """
parallelize_module(model, mesh, plan)
model.get_output_embeddings().weight = model.get_input_embeddings().weight
return model
""",
        "tie only what was tied before",
    ),
    ("f_per_projection", "return inner(hidden_states, **kwargs)", "f sums dx over the ranks"),
    (
        "f_per_projection",
        """
x = copy_to_tp_region(copy_to_tp_region(hidden_states, group), group)
return inner(x, **kwargs)
""",
        "one f is enough",
    ),
    (
        "f_per_projection",
        "return inner(reduce_from_tp_region(hidden_states, group), **kwargs)",
        "forward: x as it is",
    ),
    (
        "returned_tuples",
        "dist.all_reduce((out[0] if isinstance(out, tuple) else out).detach(), group=group)\nreturn out",
        "a sum in place",
    ),
    (
        "returned_tuples",
        """
if isinstance(out, tuple):
    return reduce_from_tp_region(out[0], group), *out[1:]
return torch.cat([reduce_from_tp_region(out[:1], group), out[1:]])
""",
        "its first sequence",
    ),
    (
        "returned_tuples",
        "return reduce_from_tp_region(out[0] if isinstance(out, tuple) else out, group)",
        "return a tuple",
    ),
    (
        "autograd_kwargs",
        "kwargs = {k: v.detach() if isinstance(v, torch.Tensor) else v for k, v in kwargs.items()}\n"
        "return Recompute.apply(block, kwargs, [], x)",
        "give apply() each tensor as an argument of its own",
    ),
    ("autograd_kwargs", "return block(x, **kwargs)", "by way of Recompute"),
    (
        "retain_grad",
        "return received.requires_grad_().to(dtype)",
        "retain_grad(), or make it one",
    ),
    ("retain_grad", "return received.to(dtype)", "requires_grad_ on a leaf"),
    ("local_positions", "return torch.arange(length).tensor_split(world)[0]", "counted from 0"),
    (
        "local_positions",
        "chunk = len(torch.arange(length).tensor_split(world)[rank])\n"
        "return rank * (length // world) + torch.arange(chunk)",
        "chunks of two sizes",
    ),
    (
        "local_mask",
        "return torch.ones(queries, keys, dtype=torch.bool).tril()",
        "the rank's first token",
    ),
    (
        "local_mask",
        "return torch.arange(keys) < torch.arange(start, start + queries)[:, None]",
        "a token sees itself",
    ),
    (
        "local_mask",
        "return torch.arange(keys) > torch.arange(start, start + queries)[:, None]",
        "True is: may see",
    ),
    ("chunk_boundary", "return shift(ids.tensor_split(world, 1)[rank])", "shift first, cut then"),
    ("chunk_boundary", "return ids.roll(-1, 1).tensor_split(world, 1)[rank]", "no target: IGNORE"),
    (
        "loss_without_graph",
        """
from torch.distributed.nn.functional import all_gather
whole = torch.cat(all_gather(logits.contiguous(), group), 1)
return F.cross_entropy(whole.flatten(0, 1), targets.flatten(), ignore_index=IGNORE)
""",
        "P times too large",
    ),
    (
        "loss_without_graph",
        """
own = targets.chunk(group.size(), 1)[group.rank()]
loss = F.cross_entropy(logits.flatten(0, 1), own.flatten(), ignore_index=IGNORE)
return reduce_from_tp_region(loss, group) / group.size()
""",
        "a mean of means",
    ),
    (
        "loss_without_graph",
        """
parts = [torch.empty_like(logits) for _ in range(group.size())]
dist.all_gather(parts, logits.detach(), group=group)
return F.cross_entropy(torch.cat(parts, 1).flatten(0, 1), targets.flatten(), ignore_index=IGNORE)
""",
        "put the rank's own logits back",
    ),
    (
        "adam_hides_scale",
        "return torch.optim.AdamW(parameters, lr=1e-2)",
        "whatever the gradient's scale",
    ),
    ("adam_hides_scale", "return torch.optim.SGD(parameters, lr=1e-6)", "larger learning rate"),
    (
        "stale_result",
        "total = x.clone()\ndist.all_reduce(total, group=group)\nmeanwhile()\nreturn total",
        "start with async_op=True",
    ),
    (
        "stale_result",
        "total = x.clone()\nwork = dist.all_reduce(total, group=group, async_op=True)\nmeanwhile()\n"
        "early = total.clone()\nwork.wait()\nreturn early",
        "wait() on the handle",
    ),
    (
        "stale_result",
        "work = dist.all_reduce(x, group=group, async_op=True)\nmeanwhile()\nwork.wait()\nreturn x",
        "sum a copy",
    ),
    (
        "adaptive_timing",
        "return Timer('step()', globals={'step': step}).adaptive_autorange(max_run_time=1).median",
        "how often is decided once",
    ),
    (
        "adaptive_timing",
        "return torch.tensor([seconds() for _ in range(20)]).median().item()",
        "on every rank",
    ),
    (
        "rank_0_clock",
        "dist.barrier(group)\nreturn wrong_rank_0_clock(step, group)",
        "all the maximum",
    ),
    (
        "rank_0_clock",
        "own = wrong_rank_0_clock(step, group)\n"
        "return all_reduce(torch.tensor(own), group, dist.ReduceOp.MAX).item()",
        "start together",
    ),
]

OTHER_RIGHT_ANSWERS = [
    ("copy_without_no_grad", "parameter.detach().copy_(value)"),
    ("retain_grad", "return received.detach().to(dtype).requires_grad_()"),
    ("local_positions", "return torch.tensor_split(torch.arange(length), world)[rank].clone()"),
    (
        "local_mask",
        "return torch.ones(keys, keys, dtype=torch.bool).tril()[start : start + queries]",
    ),
    (
        "loss_without_graph",
        """
own = targets.chunk(group.size(), 1)[group.rank()]
total = F.cross_entropy(logits.flatten(0, 1), own.flatten(), ignore_index=IGNORE, reduction="sum")
return reduce_from_tp_region(total, group) / (targets != IGNORE).sum()
""",
    ),
    (
        "adaptive_timing",
        "times = torch.tensor([seconds() for _ in range(10)])\n"
        "return all_reduce(times, group, dist.ReduceOp.MAX).median().item()",
    ),
]


@pytest.mark.parametrize("name,source,hint", WRONG_ANSWERS)
def test_a_wrong_answer_gets_its_hint(name, source, hint, tmp_path):
    with pytest.raises(lab.Wrong) as caught:
        check(name, answer(name, source, tmp_path))
    assert hint in caught.value.hint, (caught.value.found, caught.value.hint)
    assert "Error" not in caught.value.found, "judged, not crashed"


@pytest.mark.parametrize("name,source", OTHER_RIGHT_ANSWERS)
def test_another_right_answer_is_right(name, source, tmp_path):
    assert check(name, answer(name, source, tmp_path))


@pytest.mark.parametrize("name", ["local_mask", "f_per_projection"])
def test_an_empty_answer_is_not_done(name, tmp_path):
    with pytest.raises(lab.Wrong, match="not done yet"):
        check(name, answer(name, f'raise NotImplementedError("{name}")', tmp_path))
