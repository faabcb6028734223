"""labs/lab8_3d.py as a learner meets it: the run, other meshes, two nodes, its bugs, and wrong answers."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import conftest
import pytest
from conftest import ENVIRONMENT, REGION, ROOT, python

sys.path.insert(0, str(ROOT / "labs"))
import lab8_3d as lab8  # noqa: E402

pytestmark = pytest.mark.slow  # minutes, with the other labs'

LAB = ROOT / "labs" / "lab8_3d.py"
graded = partial(conftest.graded, lab8)
splice = partial(conftest.splice, lab8)


def holds(ranks):
    """Assert that every rank's loss, norm and gradients are one device's, and its messages the formula's."""
    for rank, report in enumerate(ranks):
        assert len(report["errors"]) > 5, "loss, norm, and a layer at least"
        wrong = {name: error for name, error in report["errors"].items() if not error <= 1e-5}
        assert not wrong, f"rank {rank}"
        assert report["traffic"] == report["expected"]
    assert sum(report["held"] for report in ranks) == pytest.approx(ranks[0]["whole"], abs=1e-6)


# The run


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lab8")
    run = python(LAB, "--json", folder / "lab8.json", "--plot", folder / "lab8.png")
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stderr == "", "nothing but the report is printed"
    assert sorted(path.name for path in folder.iterdir()) == ["lab8.json", "lab8.png"]
    return run.stdout, json.loads((folder / "lab8.json").read_text()), folder / "lab8.png"


def test_the_lab_proves_itself(finished):
    printed, results, picture = finished
    assert printed.splitlines()[-1] == "PASS lab8_3d: all 7 exercises' checks hold"
    assert results["passed"] and results["failed"] == []
    assert results["exercises"].keys() == lab8.CHECKS.keys()
    assert all(
        exercise["passed"] and exercise["report"] for exercise in results["exercises"].values()
    )
    assert picture.read_bytes()[:4] == b"\x89PNG" and picture.stat().st_size > 20_000
    assert results["mesh"] == {"dp": 2, "pp": 2, "tp": 2} and len(results["ranks"]) == 8
    holds(results["ranks"])
    names = {name for report in results["ranks"] for name in report["errors"]}
    assert len(names) == 2 + 1 + 9 * 5 + 2, (
        "loss, norm; the table, 5 layers, norm, and the table as head"
    )


def test_which_group_does_what(finished):
    """Of rank 5: replica 1, the first of 2 stages, the second half of tp."""
    report = finished[1]["ranks"][5]
    expected = {
        "dp": [1, 5],
        "pp": [5, 7],
        "tp": [4, 5],
        "embedding": [5, 7],
        "model": [4, 5, 6, 7],
    }
    assert {name: report["groups"][name] for name in expected} == expected
    calls = {tuple(row[:3]): row[3] for row in report["traffic"]}
    layers, microbatches = 3, 3
    assert calls == {
        ("count", "all_reduce", "dp"): 1,
        ("forward", "all_gather", "tp"): 2 * layers * microbatches,
        ("forward", "reduce_scatter", "tp"): (2 * layers + 1) * microbatches,
        ("forward", "send", "pp"): microbatches,
        ("backward", "reduce_scatter", "tp"): 2 * layers * microbatches,
        ("backward", "all_gather", "tp"): (2 * layers + 1) * microbatches,
        ("gradients", "all_reduce", "tp"): 1,
        ("gradients", "all_reduce", "embedding"): 1,
        ("gradients", "all_reduce", "dp"): 1,
        ("norm", "all_reduce", "model"): 1,
        ("log", "all_reduce", "pp"): 1,
        ("log", "all_reduce", "dp"): 1,
    }


def test_the_usual_norms_are_wrong(finished):
    ranks = finished[1]["ranks"]
    right, *wrong = ranks[0]["norms"]
    one = ranks[0]["one_device"]["norm"]
    for report in ranks:
        assert report["norms"][right] == pytest.approx(one, rel=1e-5)
        assert all(abs(report["norms"][name] / one - 1) > 1e-3 for name in wrong)
    assert ranks[0]["norms"]["over all ranks, dp too"] == pytest.approx(one * 2**0.5, rel=1e-5)
    own = [report["norms"]["this rank's part (torch's own clip)"] for report in ranks]
    assert len(set(own)) == 4 and own[:4] == own[4:], (
        "every rank of a replica clips by another factor"
    )


MESHES = [(1, 1, 1), (1, 4, 2), (1, 2, 4), (1, 1, 8), (1, 8, 1), (8, 1, 1), (3, 1, 2)]


@pytest.mark.parametrize("shape", MESHES, ids=lambda shape: "x".join(map(str, shape)))
def test_any_mesh_is_one_device(shape):
    sizes = dict(zip(lab8.AXES, shape))
    holds(lab8.on_ranks(shape[0] * shape[1] * shape[2], lab8.prove_on_rank, None, sizes, 2, 5))


def test_what_the_command_line_does_not_say(monkeypatch):
    def sizes(**given):
        return tuple(
            lab8.mesh_sizes(
                SimpleNamespace(**{"dp": None, "pp": None, "tp": None} | given)
            ).values()
        )

    assert sizes() == (2, 2, 2)
    assert sizes(pp=4) == (1, 4, 2) and sizes(tp=4) == (1, 2, 4) and sizes(dp=8) == (8, 1, 1)
    assert sizes(dp=1, pp=2, tp=2) == (1, 2, 2) and sizes(dp=1, pp=1, tp=1) == (1, 1, 1)
    monkeypatch.setenv("RANK", "0")
    for world, shape in ((1, (1, 1, 1)), (2, (1, 1, 2)), (6, (3, 1, 2)), (16, (4, 2, 2))):
        monkeypatch.setenv("WORLD_SIZE", str(world))
        assert sizes() == shape
    with pytest.raises(
        lab8.Unusable, match="2 x 2 x 2 is 8 ranks, and torchrun started 16; --dp 16 --pp 1"
    ):
        sizes(dp=2, pp=2, tp=2)


BAD = [
    (["--dp", "0"], {}, "argument --dp: 0 is not a whole number of at least 1"),
    (
        ["--tp", "3"],
        {},
        "8 heads with 2 KV heads cannot be split over 3 ranks; these rank counts would do: 1, 2,",
    ),
    (
        ["--pp", "3"],
        {"RANK": "0", "WORLD_SIZE": "8"},
        "argument --pp: 3 does not divide the 8 ranks that torch",
    ),
    (["--inject-bug", "typo"], {}, "no bug typo; --inject-bug list names them"),
    (["--json", "/nowhere/at/all.json"], {}, "cannot write /nowhere/at/all.json"),
]


@pytest.mark.parametrize("options,environment,message", BAD)
def test_bad_input_is_one_line(capsys, monkeypatch, options, environment, message):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert lab8.main(options) == 2
    printed = capsys.readouterr()
    assert (
        printed.out == ""
        and printed.err.startswith(f"error: {message}")
        and printed.err.count("\n") == 1
    )


# Two nodes: the Slurm file as it is, on a machine that plays both

SRUN = """#!/bin/bash
# srun: the command once for each node, here all of them on this machine
while [[ $1 == --* ]]; do shift; done
for ((node = 0; node < SLURM_NNODES; node++)); do
    "$@" > "$SLURM_TEST/node$node.out" 2>&1 &
    agents+=($!)
done
for agent in "${agents[@]}"; do wait "$agent" || status=1; done
exit "${status:-0}"
"""


def slurm(folder, *options):
    """labs/lab8_3d.slurm under a Slurm of ours; returns (exit status, what all agents printed)."""
    for name, text in {"srun": SRUN, "scontrol": "#!/bin/bash\necho localhost\n"}.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    path = os.pathsep.join([str(folder), str(Path(sys.executable).parent), os.environ["PATH"]])
    job = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NNODES": "2"}
    job |= {"SLURM_CPUS_PER_TASK": "2", "SLURM_TEST": str(folder), "PATH": path}
    command = ["bash", ROOT / "labs" / "lab8_3d.slurm", *map(str, options)]
    run = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT | job, timeout=300)
    return run.returncode, "".join((folder / f"node{node}.out").read_text() for node in (0, 1))


def test_two_agents_are_two_nodes(tmp_path):
    status, printed = slurm(tmp_path, "--json", tmp_path / "lab8.json")
    assert status == 0, printed
    assert "LLaMA on 4 ranks of 2 nodes, dp x pp x tp = 1 x 2 x 2, beside one device" in printed
    assert printed.count("PASS lab8_3d: all 7 exercises' checks hold") == 1, "rank 0 alone speaks"
    results = json.loads((tmp_path / "lab8.json").read_text())
    holds(results["ranks"])
    assert [report["node"] for report in results["ranks"]] == [0, 0, 1, 1]
    rows = [line.split()[2] for line in printed.splitlines() if "across nodes" in line]
    assert set(rows) == {"pp", "embedding", "model"}, "tp stays on its node"


def test_bad_input_ends_both_agents(tmp_path):
    """Rank 0 alone reads the command line: the others, on either node, must not wait for it."""
    status, printed = slurm(tmp_path, "--tp", 3)
    assert status == 1
    assert (
        printed.count("error: argument --tp: 3 does not divide the 4 ranks that torchrun started")
        == 1
    )


# Its bugs: the exercise whose check catches each, and what it says

CAUGHT = {
    "dp_axis_innermost": ("mesh", "tp counts fastest"),
    "dp_taken_for_tp": ("finish_gradients", "norm.weight is off by"),
    "shuffled_by_rank": ("train_step", "is off by"),
    "mean_over_replicas": ("train_step", "is off by"),
    "untied_table": ("train_step", "is off by"),
    "unsummed_norm_weights": ("train_step", "is off by"),
    "summed_twice": ("finish_gradients", "is off by"),
    "every_copy_counts": ("grad_norm", "counted once for each of them"),
    "norm_over_tp_alone": ("grad_norm", "the other stages' parameters are missing"),
    "norm_over_all_ranks": ("grad_norm", "the replicas of dp have the same gradients"),
    "clipped_by_own_norm": ("clip", "that clips by the norm of what this rank holds"),
    "norm_before_the_sums": ("train_step", "gradient norm on rank"),
}


def test_every_bug_is_here():
    assert [bug.__name__ for bug in lab8.BUGS] == list(CAUGHT)


@pytest.mark.parametrize("bug", CAUGHT)
def test_a_bug_is_caught(bug):
    exercise, expected = CAUGHT[bug]
    passed, report, hint = graded(LAB, exercise, bug)
    assert not passed and expected in f"{report} {hint}"


def test_a_bug_makes_the_lab_exit_1(capsys, monkeypatch, tmp_path):
    """The model on the ranks asked for catches it too, without the exercises' checks."""
    monkeypatch.setattr(lab8, "CHECKS", {"clip": lab8.CHECKS["clip"]})
    options = ["--inject-bug", "every_copy_counts", "--dp", "1", "--pp", "1", "--tp", "2"]
    assert lab8.main([*options, "--json", str(tmp_path / "bug.json")]) == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("FAIL lab8_3d: gradient norm off by")
    results = json.loads((tmp_path / "bug.json").read_text())
    assert not results["passed"] and results["exercises"]["clip"]["passed"]


# What a learner hands in: (exercise, its regions in their order (None: the right one), part of the verdict)

SUMS = """
for name in ("kv", "tp", "embedding", "dp"):
    grads = [p.grad for p in model.parameters() if name in p.shared]
    if grads:
        total = all_reduce(torch.cat([grad.flatten() for grad in grads]), groups[name])
        for grad, part in zip(grads, total.split([grad.numel() for grad in grads])):
            grad.copy_(part.view_as(grad))
"""
NORM = """
squares = torch.zeros(())
for p in model.parameters():
    copies = math.prod(groups[name].size() for name in p.shared if name != "dp")
    squares += p.grad.square().sum() / copies
return all_reduce(squares, groups["model"]).sqrt()
"""
FIRST_COPY = """
squares = torch.zeros(())
for p in model.parameters():
    if all(groups[name].rank() == 0 for name in p.shared if name != "dp"):
        squares += p.grad.square().sum()
return all_reduce(all_reduce(squares, groups["tp"]), groups["pp"]).sqrt()
"""
STEP = """
count = target_count(targets, groups)
held = forward_all(model, ids, targets, count, groups, microbatches)
backward_all(held, groups)
finish_gradients(model, groups)
norm = grad_norm(model, groups)
clip_gradients(model, norm, most)
return mean_loss(held, groups), norm
"""


def changed(text, old, new):
    assert old in text
    return text.replace(old, new)


WRONG_ANSWERS = [
    ("mesh", ["d, rest = rank % sizes['dp'], rank // sizes['dp']\n"
              "return {'dp': d, 'pp': rest % sizes['pp'], 'tp': rest // sizes['pp']}", None],
     "tp counts fastest: its ranks are neighbours"),
    ("mesh", [None, "first = rank - coordinates(rank, sizes)[axis]\n"
                    "return [first + i for i in range(sizes[axis])]"],
     "only those of tp are neighbours"),
    ("mesh", [None, "world = math.prod(sizes.values())\nmine = coordinates(rank, sizes)[axis]\n"
                    "return [r for r in range(world) if coordinates(r, sizes)[axis] == mine]"],
     "these share a coordinate that a group differs in"),
    ("copies_of", ["return ['tp', 'dp'] if 'norm' in name else ['dp']"], "the group embedding"),
    ("copies_of", ["return ['tp'] if 'norm' in name else []"], "all replicas of dp hold every parameter"),
    ("loss_scale", ["return (targets != IGNORE).sum()", None], "these are this replica's: sum over dp"),
    ("loss_scale", ["return all_reduce((targets != IGNORE).sum(), dist.group.WORLD)", None],
     "the ranks of tp have the same targets"),
    ("loss_scale", [None, "mine = (targets != IGNORE).sum()\n"
                          "return token_loss(model, hidden, targets, groups['tp']) / mine"],
     "a mean of the microbatches' means"),
    ("finish_gradients", [changed(SUMS, '"embedding", ', "")], "not summed over embedding: the tied table"),
    ("finish_gradients", [changed(SUMS, '"kv", ', "")], "not summed over kv: two ranks hold"),
    ("finish_gradients", [changed(SUMS, "part.view_as(grad)", "part.view_as(grad) / groups[name].size()")],
     "a mean, not the sum, over"),
    ("finish_gradients", ["for p in model.parameters():\n    for name in p.shared:\n"
                          "        p.grad.copy_(all_reduce(p.grad, groups[name]))"],
     "join a group's gradients"),
    ("grad_norm", [changed(NORM, " / copies", "")], "counted once for each of them"),
    ("grad_norm", [changed(NORM, 'if name != "dp"', 'if name not in ("dp", "embedding")')],
     "the tied table is counted on the first stage and on the last"),
    ("grad_norm", [changed(NORM, 'all_reduce(squares, groups["model"])', "squares")],
     "this is this rank's share: sum the squares"),
    ("grad_norm", [changed(NORM, 'groups["model"]', 'groups["tp"]')], "the other stages' parameters"),
    ("grad_norm", [changed(NORM, ".sqrt()", "")], "the root of the sum of squares"),
    ("clip", ["for p in model.parameters():\n    p.grad.mul_(most / (norm + 1e-6))"],
     "gradients that are small enough stay as they are"),
    ("clip", ["nn.utils.clip_grad_norm_(model.parameters(), most)"],
     "that clips by the norm of what this rank holds"),
    ("clip", ["for p in model.parameters():\n    nn.utils.clip_grad_norm_([p], most)"],
     "each tensor is clipped by itself"),
    ("train_step", [changed(STEP, "finish_gradients(model, groups)\nnorm = grad_norm(model, groups)\n",
                            "norm = grad_norm(model, groups)\nfinish_gradients(model, groups)\n")],
     "first every .grad is finished"),
    ("train_step", [changed(STEP, "finish_gradients(model, groups)\n", "")], "first every .grad is finished"),
]  # fmt: skip


@pytest.mark.parametrize("exercise,regions,verdict", WRONG_ANSWERS)
def test_a_wrong_answer_is_recognised(tmp_path, exercise, regions, verdict):
    passed, report, hint = graded(splice(tmp_path / "answer.py", exercise, regions), exercise)
    assert not passed and verdict in f"{report} {hint}"


def test_megatrons_way_to_count_is_right_too(tmp_path):
    passed, report, _ = graded(
        splice(tmp_path / "answer.py", "grad_norm", [FIRST_COPY]), "grad_norm", seed=7
    )
    assert passed, report


def test_an_unfinished_exercise_says_so(tmp_path):
    regions = REGION.findall(LAB.read_text())
    assert {name for _, name, _ in regions} == lab8.CHECKS.keys()
    for exercise in lab8.CHECKS:
        todo = [
            f'raise NotImplementedError("{exercise}")' for _, name, _ in regions if name == exercise
        ]
        passed, report, _ = graded(splice(tmp_path / "answer.py", exercise, todo), exercise)
        assert not passed and f"not done yet: {exercise}" in report
