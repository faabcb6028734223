"""Lab 8 as a learner meets it: the run, other meshes, two nodes, bugs, wrong and right answers."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import ENVIRONMENT, ROOT
from learner import caught, lab_file, listed, ranks, refused, run_answered, run_finished

pytestmark = pytest.mark.slow  # minutes, with the other labs'

LAB = lab_file("lab8")
lab8 = ranks.load(LAB)
shown = ranks.room("experiments", LAB)


def holds(reports):
    """Each rank's loss, norm and gradients are one device's, its messages the formula's."""
    for report in reports:
        assert len(report["errors"]) > 5, "loss, norm, and a layer at least"
        assert max(report["errors"].values()) <= 1e-5 and report["traffic"] == report["expected"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    printed, results = run_finished(LAB, tmp_path_factory.mktemp("lab8"), "--predict", 1.414)
    assert "\n  predicted 1.414, measured 1.41421: right\n" in printed
    assert results["mesh"] == {"dp": 2, "pp": 2, "tp": 2} and len(results["ranks"]) == 8
    return results["ranks"]


def test_the_model_is_one_devices(finished):
    holds(finished)
    names = {name for report in finished for name in report["errors"]}
    assert len(names) == 2 + 1 + 9 * 5 + 2, "loss, norm; table, 5 layers, norm, table as head"


def test_which_group_does_what(finished):
    """Of rank 5: replica 1, the first of 2 stages, the second half of tp."""
    groups, traffic = finished[5]["groups"], finished[5]["traffic"]
    assert [groups[name] for name in ("dp", "pp", "tp")] == [[1, 5], [5, 7], [4, 5]]
    assert groups["embedding"] == [5, 7] and groups["model"] == [4, 5, 6, 7]
    layers, microbatches = 3, 3
    own, embedded = 2 * layers * microbatches, (2 * layers + 1) * microbatches
    assert {tuple(row[:3]): row[3] for row in traffic} == {
        ("count", "all_reduce", "dp"): 1,
        ("forward", "all_gather", "tp"): own,
        ("forward", "reduce_scatter", "tp"): embedded,
        ("forward", "send", "pp"): microbatches,
        ("backward", "reduce_scatter", "tp"): own,
        ("backward", "all_gather", "tp"): embedded,
        ("gradients", "all_reduce", "tp"): 1,
        ("gradients", "all_reduce", "embedding"): 1,
        ("gradients", "all_reduce", "dp"): 1,
        ("norm", "all_reduce", "model"): 1,
        ("log", "all_reduce", "pp"): 1,
        ("log", "all_reduce", "dp"): 1,
    }


def test_the_usual_norms_are_wrong(finished):
    (right, *wrong), one = finished[0]["norms"], finished[0]["one_device"]["norm"]
    for report in finished:
        assert report["norms"][right] == pytest.approx(one, rel=1e-5)
        assert all(abs(report["norms"][name] / one - 1) > 1e-3 for name in wrong)
    own = [report["norms"]["this rank's part (torch's own clip)"] for report in finished]
    assert len(set(own)) == 4 and own[:4] == own[4:], "each of a replica clips by another factor"


MESHES = [(1, 4, 2), (1, 2, 4), (1, 1, 8), (1, 8, 1), (8, 1, 1), (3, 1, 2)]


@pytest.mark.parametrize("shape", MESHES, ids=lambda shape: "x".join(map(str, shape)))
def test_any_mesh_is_one_device(shape):
    sizes = dict(zip(("dp", "pp", "tp"), shape))
    holds(ranks.on_ranks(math.prod(shape), shown.prove_on_rank, lab8, sizes, 2, 5))


def test_what_the_command_line_does_not_say(monkeypatch):
    def sizes(dp=None, pp=None, tp=None):
        return tuple(shown.mesh_sizes(SimpleNamespace(dp=dp, pp=pp, tp=tp)).values())

    assert sizes() == (2, 2, 2) and sizes(1, 1, 1) == (1, 1, 1)
    assert sizes(pp=4) == (1, 4, 2) and sizes(tp=4) == (1, 2, 4) and sizes(dp=8) == (8, 1, 1)
    monkeypatch.setenv("RANK", "0")
    for world, shape in ((1, (1, 1, 1)), (2, (1, 1, 2)), (6, (3, 1, 2)), (16, (4, 2, 2))):
        monkeypatch.setenv("WORLD_SIZE", str(world))
        assert sizes() == shape
    found = "2 x 2 x 2 is 8 ranks, and torchrun started 16; --dp 16 --pp 1"
    with pytest.raises(ranks.Unusable, match=found):
        sizes(2, 2, 2)


def test_heads_that_cannot_be_split(capsys):
    found = "argument --tp: 8 heads with 2 KV heads cannot be split over 3 ranks; these rank"
    refused(LAB, ["--tp", "3"], found, capsys)


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
    reports = json.loads((tmp_path / "lab8.json").read_text())["ranks"]
    holds(reports)
    assert [report["node"] for report in reports] == [0, 0, 1, 1]
    rows = [line.split()[2] for line in printed.splitlines() if "across nodes" in line]
    assert set(rows) == {"pp", "embedding", "model"}, "tp stays on its node"


def test_bad_input_ends_both_agents(tmp_path):
    """Rank 0 alone reads the command line: the others, on either node, must not wait for it."""
    status, printed = slurm(tmp_path, "--tp", 3)
    found = "error: argument --tp: 3 does not divide the 4 ranks that torchrun started"
    assert status == 1 and printed.count(found) == 1


BUGS = {
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

ANSWERS = """
== mesh: tp counts fastest: its ranks are neighbours
d, rest = rank % sizes["dp"], rank // sizes["dp"]
return {"dp": d, "pp": rest % sizes["pp"], "tp": rest // sizes["pp"]}
--
...
== mesh: group of rank
first + i * stride -> first + i
== mesh: these share a coordinate that a group differs in
...
--
mine, world = coordinates(rank, sizes)[axis], math.prod(sizes.values())
return [r for r in range(world) if coordinates(r, sizes)[axis] == mine]
== mesh
place = {}
for name in "tp", "pp", "dp":
    place[name], rank = rank % sizes[name], rank // sizes[name]
return place
--
own, every = coordinates(rank, sizes), range(math.prod(sizes.values()))
del own[axis]
return [r for r in every if own.items() <= coordinates(r, sizes).items()]
== copies_of: the group embedding
["embedding", "dp"] -> ["dp"]
== copies_of: dp hold every parameter
return ["tp"] if "norm" in name else []
== copies_of: several hold the same head, the group kv
["kv", "dp"] -> ["dp"]
== copies_of
shared = {"k_proj": "kv", "v_proj": "kv", "embed_tokens": "embedding", "lm_head": "embedding"}
part = name.split(".")[-2]
axis = "tp" if part.endswith("norm") else shared.get(part)
return {axis, "dp"} if axis else ("dp",)
== loss_scale: this replica's: sum over dp
return (targets != IGNORE).sum()
--
...
== loss_scale: the ranks of tp have the same targets
groups["dp"] -> dist.group.WORLD
== loss_scale: a mean of the microbatches' means
/ count -> / (targets != IGNORE).sum()
== loss_scale
count = torch.tensor(float(targets.ne(IGNORE).sum()))
dist.all_reduce(count, group=groups["dp"])
return int(count)
--
return (1 / count) * token_loss(model, hidden, targets, groups["tp"])
== finish_gradients: not summed over embedding: the tied table
("kv", "tp", "embedding", "dp") -> ("kv", "tp", "dp")
== finish_gradients: a mean, not the sum, over
part.view_as(grad) -> part.view_as(grad) / groups[name].size()
== finish_gradients: join a group's gradients
for p in model.parameters():
    for name in p.shared:
        p.grad.copy_(all_reduce(p.grad, groups[name]))
== finish_gradients
for name in "dp", "embedding", "kv", "tp":
    grads = [p.grad for p in model.parameters() if name in p.shared]
    if grads:
        vector = all_reduce(nn.utils.parameters_to_vector(grads), groups[name])
        nn.utils.vector_to_parameters(vector, grads)
== grad_norm: counted once for each of them
.sum() / copies -> .sum()
== grad_norm: the tied table is counted on the first and the last stage
if name != "dp" -> if name not in ("dp", "embedding")
== grad_norm: the root of the sum of squares
groups["model"]).sqrt() -> groups["model"])
== grad_norm
squares = torch.zeros(())
for p in model.parameters():
    if all(groups[name].rank() == 0 for name in p.shared if name != "dp"):
        squares += p.grad.square().sum()
return all_reduce(all_reduce(squares, groups["tp"]), groups["pp"]).sqrt()
== clip: gradients that are small enough stay as they are
(most / (norm + 1e-6)).clamp(max=1) -> most / (norm + 1e-6)
== clip: what this rank holds
nn.utils.clip_grad_norm_(model.parameters(), most)
== clip: each tensor is clipped by itself
for p in model.parameters():
    nn.utils.clip_grad_norm_([p], most)
== clip
for p in model.parameters():
    p.grad *= min(1, most / norm.item())
== train_step: finish every .grad, over all groups
finish_gradients(model, groups) -> norm = too_early
norm = grad_norm(model, groups) -> finish_gradients(model, groups)
too_early -> grad_norm(model, groups)
== train_step: finish every .grad, over all groups
finish_gradients(model, groups) -> pass
== train_step: then one norm of them
finish_gradients(model, groups) -> pass
clip_gradients(model, norm, most) -> finish_gradients(model, groups)
== train_step
total = target_count(targets, groups)
outputs = forward_all(model, ids, targets, total, groups, microbatches)
backward_all(outputs, groups)
loss = mean_loss(outputs, groups)
finish_gradients(model, groups)
clip_gradients(model, norm := grad_norm(model, groups), most)
return loss, norm
"""
WRONG, RIGHT = listed(LAB, ANSWERS)
test_bugs_are_caught, test_wrong_answers_get_their_hint = caught(LAB, BUGS, WRONG)


def test_other_right_answers_pass_and_the_lab_accepts_them(tmp_path):
    run_answered(LAB, RIGHT, tmp_path, "--seed", 20, "--pp", 4, "--dp", 2, "--tp", 1)
