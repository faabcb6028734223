"""Lab 3 as a learner meets it: the run, what it shows, its bugs, wrong and other right answers."""

import re
from types import SimpleNamespace

import pytest
from learner import caught, lab_file, listed, ranks, run_answered, run_finished

pytestmark = pytest.mark.slow  # minutes, with the other labs'

LAB = lab_file("lab3")
shown = ranks.room("experiments", LAB)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    printed, results = run_finished(LAB, tmp_path_factory.mktemp("lab3"), "--predict", 163840)
    assert "\n  predicted 163840, measured 163840: right\n" in printed
    assert list(results["pitfalls"]) == list(results["exercises"])
    assert {row["verdict"] for row in results["pitfalls"].values()} == {"ok"}
    assert f"with torch {results['versions']['torch']}, transformers" in printed
    return results


SILENT = "transposed_weights", "returned_tuples", "local_positions", "local_mask", "chunk_boundary"
EXACT = "untied_weights", "loss_without_graph"


def test_the_loss_looks_right_where_the_gradient_is_not(finished):
    wrong = {name: row["wrong"] for name, row in finished["pitfalls"].items()}
    for name in (*SILENT, *EXACT, "adam_hides_scale"):
        loss, error = wrong[name]["loss"], wrong[name]["error"]
        assert loss < 0.05 and error > 0.1 > 4 * loss, name
    assert all(wrong[name]["loss"] < 1e-6 for name in (*EXACT, "f_per_projection"))


SEEN = {  # of the wrong way, of the right way
    "transposed_weights": (r"\(192, 64\) raises", "e-07 off"),
    "copy_without_no_grad": ("RuntimeError: a leaf Variable that requires grad", "still trains"),
    "parallelize_order": ("NotImplementedError: Cannot copy out of meta tensor", "all weights"),
    "untied_weights": (r"2 of \(v, h\)", r"1 of \(v, h\)"),
    "f_per_projection": ("e-07 off, 5 all-reduces a layer", "e-07 off, 2 all-reduces a layer"),
    "autograd_kwargs": ("TypeError: .*keyword argument", "gradients off by 0"),
    "retain_grad": ("no gradient to send back", "gradient there in 3 dtypes"),
    "chunk_boundary": ("124 of 126 targets", "126 of 126 targets"),
    "loss_without_graph": ("RuntimeError: element 0 of tensors does not require grad", "e-07 off"),
    "adam_hides_scale": (r"part by [\d.]+e-05", r"part by 0\.\d+"),
    "stale_result": (r"the sum is off by [67]\.\de-01", "sum off by 0e"),
    "adaptive_timing": ("the ranks (ran|say)", r"^\d+ steps on every rank"),
    "rank_0_clock": (r"^rank 0 says \d{1,3} of 200 ms", r"says [2-9]\d\d of 200 ms"),
}


def test_what_one_sees(finished):
    for name, (wrong, right) in SEEN.items():
        row = finished["pitfalls"][name]
        assert re.search(wrong, row["wrong"]["seen"]), row
        assert re.search(right, row["right"]["seen"]), row


def test_what_is_told_is_tried(finished):
    told = {name: row["told"] for name, row in finished["pitfalls"].items() if "told" in row}
    assert len(told) == 5
    assert told["returned_tuples"] == [False, "it returns 2"], "transformers 5"
    assert told["stale_result"][0] is False, "torch 2.11 and later wait"
    older = tuple(map(int, finished["versions"]["torch"].split(".")[:2])) < (2, 13)
    assert told["autograd_kwargs"][0] is older, "since then apply() takes what forward() names"


def test_a_wrong_way_that_works_and_a_right_one_that_does_not_are_said(tmp_path, capsys):
    text = LAB.read_text().replace("    parameter.copy_(", "    parameter.data.copy_(")
    text = text.replace("inner(copy_to_tp_region(hidden_states, group)", "inner(hidden_states")
    (tmp_path / LAB.name).write_text(text)
    lab = ranks.load(tmp_path / LAB.name)
    args = SimpleNamespace(only="copy_without_no_grad", seed=0)
    (failed,) = shown.experiment(lab, args)["failed"]
    printed = capsys.readouterr().out
    assert failed.startswith("f_per_projection: gradient 0.")
    assert re.search(r"copy_without_no_grad +1 +no longer in torch \d\.\d+", printed), printed
    assert re.search(r"f_per_projection .* FAIL: gradient 0\.", printed), printed


BUGS = {
    "next_ranks_rows": ("transposed_weights", "is off by"),
    "shared_memory": ("copy_without_no_grad", "copy the numbers"),
    "weights_after_the_cut": ("parallelize_order", "then the weights, then the cut"),
    "untied": ("untied_weights", "give the head the embedding's again"),
    "no_f": ("f_per_projection", "f sums dx over the ranks"),
    "g_sums_both_ways": ("returned_tuples", "g's backward sends nothing"),
    "tensors_in_the_dict": ("autograd_kwargs", "each tensor as an argument of its own"),
    "no_leaf": ("retain_grad", "after a cast it is no leaf"),
    "equal_chunks": ("local_positions", "is off by"),
    "no_mask": ("local_mask", "is off by"),
    "round_and_round": ("chunk_boundary", "no target: IGNORE"),
    "local_loss": ("loss_without_graph", "the rank's own tokens"),
    "rmsprop": ("adam_hides_scale", "whatever the gradient's scale"),
    "no_wait": ("stale_result", "wait() on the handle"),
    "every_rank_for_itself": ("adaptive_timing", "how often is decided once"),
    "own_clock": ("rank_0_clock", "all the maximum"),
}

ANSWERS = """
== transposed_weights: torch keeps a weight as (out, in)
return weight.chunk(world, dim=1)[rank].T.clone()
== transposed_weights: clone it
return weight.tensor_split(world)[rank]
== transposed_weights: rank 0's rows
return weight.tensor_split(world)[0].clone()
== transposed_weights
base, extra = divmod(len(weight), world)
start = rank * base + min(rank, extra)
return weight[start : start + base + (rank < extra)].clone()
== copy_without_no_grad: a name bound anew changes no parameter
parameter = torch.nn.Parameter(value)
== copy_without_no_grad: requires_grad has to stay True
parameter.requires_grad_(False).copy_(value)
== copy_without_no_grad: copy the numbers
parameter.data = value
== copy_without_no_grad
parameter.detach().copy_(value)
== parallelize_order: first memory on the device, then the weights, then the cut
return parallelize_module(model, mesh, plan).to_empty(device=mesh.device_type)
== parallelize_order: does not hold its weights
return parallelize_module(model.to_empty(device=mesh.device_type), mesh, plan)
== parallelize_order: cut by plan: parallelize_module
return parallelize_module(model, mesh, plan) -> return model
== parallelize_order
model.load_state_dict(weights, assign=True)
return parallelize_module(model, mesh, plan)
== untied_weights: give the head the embedding's again
return parallelize_module(model, mesh, plan)
== untied_weights: tie only what was tied before
if tied: -> if True:
== untied_weights: the embedding is not cut
return model
== untied_weights
tables = {model.get_input_embeddings().weight, model.get_output_embeddings().weight}
model = parallelize_module(model, mesh, plan)
if len(tables) == 1:
    model.get_output_embeddings().weight = model.get_input_embeddings().weight
return model
== f_per_projection: f sums dx over the ranks
return inner(hidden_states, **kwargs)
== f_per_projection: one f is enough
return inner(copy_to_tp_region(copy_to_tp_region(hidden_states, group), group), **kwargs)
== f_per_projection: forward: x as it is
return inner(reduce_from_tp_region(hidden_states, group), **kwargs)
== f_per_projection
x = CopyToTPRegion.apply(hidden_states, group)
return inner(x, **kwargs)
== returned_tuples: a sum in place
dist.all_reduce((out[0] if isinstance(out, tuple) else out).detach(), group=group)
return out
== returned_tuples: its first sequence
reduce_from_tp_region(out, group) -> torch.cat([reduce_from_tp_region(out[:1], group), out[1:]])
== returned_tuples: return a tuple
return reduce_from_tp_region(out[0] if isinstance(out, tuple) else out, group)
== returned_tuples
first, *rest = out if isinstance(out, tuple) else (out,)
first = ReduceFromTPRegion.apply(first, group)
return (first, *rest) if isinstance(out, tuple) else first
== autograd_kwargs: no gradient for a tensor among kwargs
kwargs = {k: v.detach() if isinstance(v, torch.Tensor) else v for k, v in kwargs.items()}
return Recompute.apply(block, kwargs, [], x)
== autograd_kwargs: by way of Recompute
return block(x, **kwargs)
== autograd_kwargs: no gradient for x
names, x, *tensors -> names, x.detach(), *tensors
== autograd_kwargs
tensors = {name: value for name, value in kwargs.items() if torch.is_tensor(value)}
others = {name: value for name, value in kwargs.items() if name not in tensors}
return Recompute.apply(block, others, list(tensors), x, *tensors.values())
== retain_grad: retain_grad(), or make it one
return received.requires_grad_().to(dtype)
== retain_grad: requires_grad_ on a leaf
return received.to(dtype)
== retain_grad: no gradient to send back
hidden.retain_grad() -> received.retain_grad()
== retain_grad
return received.detach().to(dtype).requires_grad_()
== local_positions: counted from 0
return torch.arange(length).tensor_split(world)[0]
== local_positions: chunks of two sizes
return rank * (length // world) + wrong_local_positions(length, rank, world)
== local_positions: chunks of two sizes, so
return rank * -(-length // world) + wrong_local_positions(length, rank, world)
== local_positions
base, extra = divmod(length, world)
return torch.arange(base + (rank < extra)) + rank * base + min(rank, extra)
== local_mask: the rank's first token
return torch.ones(queries, keys, dtype=torch.bool).tril()
== local_mask: a token sees itself
return torch.arange(keys) < torch.arange(start, start + queries)[:, None]
== local_mask: True is: may see
return torch.arange(keys) > torch.arange(start, start + queries)[:, None]
== local_mask
return torch.ones(keys, keys, dtype=torch.bool).tril()[start : start + queries]
== chunk_boundary: shift first, cut then
return shift(ids.tensor_split(world, 1)[rank])
== chunk_boundary: no target: IGNORE
return ids.roll(-1, 1).tensor_split(world, 1)[rank]
== chunk_boundary: not their successors
return ids.tensor_split(world, 1)[rank]
== chunk_boundary
targets = torch.full_like(ids, IGNORE)
targets[:, :-1] = ids[:, 1:]
return targets.tensor_split(world, dim=1)[rank]
== loss_without_graph: P times too large
from torch.distributed.nn.functional import all_gather
return mean_loss(all_gather(logits.contiguous(), group), targets)
== loss_without_graph: a mean of means
loss = mean_loss([logits], targets.chunk(group.size(), 1)[group.rank()])
return reduce_from_tp_region(loss, group) / group.size()
== loss_without_graph: put the rank's own logits back
return mean_loss(all_logits(logits, group), targets)
== loss_without_graph
own = targets.chunk(group.size(), 1)[group.rank()].flatten()
total = F.cross_entropy(logits.flatten(0, 1), own, ignore_index=IGNORE, reduction="sum")
return reduce_from_tp_region(total, group) / (targets != IGNORE).sum()
== adam_hides_scale: whatever the gradient's scale
return torch.optim.AdamW(parameters, lr=1e-2)
== adam_hides_scale: larger learning rate
return torch.optim.SGD(parameters, lr=1e-6)
== adam_hides_scale: take one proportional to it
return torch.optim.Adagrad(parameters, lr=0.1)
== adam_hides_scale
return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
== stale_result: start with async_op=True
total = all_reduce(x, group)
meanwhile()
return total
== stale_result: wait() on the handle
total = x.clone()
work = dist.all_reduce(total, group=group, async_op=True)
meanwhile()
early = total.clone()
work.wait()
return early
== stale_result: sum a copy
total = x.clone() -> total = x
== stale_result
total = torch.distributed._functional_collectives.all_reduce(x, "sum", group)
meanwhile()
return total.wait()
== adaptive_timing: how often is decided once
own = [seconds(step) for _ in range(1 + int(budget / seconds(step)))]
return all_reduce(torch.tensor(own).median(), group, dist.ReduceOp.MAX).item()
== adaptive_timing: on every rank
return torch.tensor([seconds(step) for _ in range(20)]).median().item()
== adaptive_timing: enough for a median
return all_reduce(torch.tensor(seconds(step)), group, dist.ReduceOp.MAX).item()
== adaptive_timing
times = torch.tensor([seconds(step) for _ in range(10)])
return all_reduce(times, group, dist.ReduceOp.MAX).median().item()
== rank_0_clock: all the maximum
dist.barrier(group)
return seconds(step)
== rank_0_clock: start together
dist.barrier(group) -> pass
== rank_0_clock: start together, after a barrier
both = seconds(lambda: (dist.barrier(group), step()))
return all_reduce(torch.tensor(both), group, dist.ReduceOp.MAX).item()
== rank_0_clock
dist.barrier(group)
everyone = [None] * group.size()
dist.all_gather_object(everyone, seconds(step), group=group)
return max(everyone)
"""
WRONG, RIGHT = listed(LAB, ANSWERS)
test_bugs_are_caught, test_wrong_answers_get_their_hint = caught(LAB, BUGS, WRONG)


def test_other_right_answers_pass_and_the_lab_accepts_them(tmp_path):
    run_answered(LAB, RIGHT, tmp_path, "--seed", 77)
