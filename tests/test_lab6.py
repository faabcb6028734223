"""Lab 6 as a learner meets it: the run, its bugs, wrong and other right answers."""

import importlib.util
import json

import pytest
from conftest import ROOT, python
from learner import answered, graded, lab_file, listed, ranks

pytestmark = pytest.mark.slow  # minutes, with the other labs'

LAB = lab_file("lab6")
CHECKS = ranks.room("checks", LAB).CHECKS
shown = ranks.room("experiments", LAB)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The lab, run once: what it prints, its JSON, its picture."""
    folder = tmp_path_factory.mktemp("lab6")
    files = "--json", folder / "lab6.json", "--plot", folder / "lab6.png"
    done = python(LAB, "--lora-rank", 1, "--predict", 720, *files)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == "", "nothing but the report is printed"
    return done.stdout, json.loads((folder / "lab6.json").read_text()), folder / "lab6.png"


def test_the_lab_proves_itself(run):
    printed, found, picture = run
    assert printed.endswith("\nPASS lab6_lora: all 5 exercises' checks hold\n")
    assert "\n  predicted 720, measured 720: right\n" in printed
    assert found["passed"] and found["failed"] == []
    assert found["exercises"].keys() == CHECKS.keys()
    assert all(seen["passed"] and seen["report"] for seen in found["exercises"].values())
    assert picture.read_bytes()[:4] == b"\x89PNG" and picture.stat().st_size > 20_000


def test_every_way_is_one_device_and_sends_what_the_table_says(run):
    """r = 1: cut over the ranks it is one feature each, mostly zeros."""
    rows, tokens, hidden = run[1]["ways"], 60, 96
    assert len(rows) == 3 * 2 * (2 + 3)
    low = 4 * tokens
    for row in rows:
        assert all(error < 1e-5 for error in row["errors"].values())
        world, way, parallel = row["ranks"], row["way"], row["sequence_parallel"]
        sent = {"all_gather": low, "reduce_scatter": low} if parallel else {"all_reduce": low}
        cut = {"all_gather": low * world, "reduce_scatter": low * world}
        assert row["forward"] == row["backward"] == {"joined": {}, "apart": sent}.get(way, cut)
        summed = way == "joined" or (way == "apart" and parallel)
        assert row["step"] == ({"all_reduce": 4 * 2 * hidden} if summed else {})
        own = tokens // world if way == "apart" and parallel else tokens
        assert row["kept"] == 4 * (own * hidden + tokens), "and not a byte for the frozen W"
    first, second = [row["trained"] for row in rows if row["ranks"] == 2][8:10]
    assert first + second == 2 * (96 + 130), "sharded: no number is held twice"
    assert first - second == 2 * 96, "the second rank holds no row of A, and no column of B"


def test_peft_is_compared_where_it_is_installed(run):
    printed, found, _ = run
    installed = importlib.util.find_spec("peft") is not None
    assert found["peft_installed"] == installed
    assert all(("peft" in row["errors"]) == installed for row in found["ways"])
    assert ("against peft's layers: not run, peft is not installed" in printed) != installed


def test_without_the_sum_the_loss_looks_right_and_the_saved_adapter_is_wrong(run):
    h, features, r = shown.SMALL
    for counts, runs in run[1]["training"].items():
        one, good, bad = (runs[name] for name in ("one device", "SP, summed", "SP, not summed"))
        assert good["losses"] == pytest.approx(one["losses"], rel=1e-3)
        assert good["exported"] == pytest.approx(one["held_out"], rel=1e-3) and good["drift"] < 1e-6
        assert good["frozen"] and good["state"] <= 2 * r * (2 * h + features), "none for W"
        assert bad["losses"][0] == pytest.approx(one["losses"][0], rel=1e-6)
        assert bad["unsummed_gradient_error"] > 0.3 and bad["drift"] > 0.01
        assert bad["losses"][-1] < bad["losses"][0] / 2, "the loss falls"
        if counts == "answers only":  # rank 0 has the prompt: its replicas never saw a gradient
            assert bad["losses"] == pytest.approx(one["losses"], rel=1e-3)
            assert bad["exported"] > 2 * bad["held_out"], "what is saved is not what was trained"


def test_translating_in_place_leaks_into_a_later_model(run):
    good, bad = run[1]["translation"].values()
    assert good["adapted_error"] < 1e-5 and bad["adapted_error"] < 1e-5, "that one shows nothing"
    assert good["plan"] == ["ColwiseParallel", "RowwiseParallel"]
    assert bad["plan"] == ["ColwiseParallelLoRA", "RowwiseParallelLoRA"]
    assert good["later_model"].startswith("as on one device")
    assert bad["later_model"] == "AttributeError: 'Linear' object has no attribute 'lora_A'"


BUGS = {
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


@pytest.mark.parametrize("bug", BUGS)
def test_bugs_are_caught(bug):
    exercise, said = BUGS[bug]
    passed, verdict = graded(LAB, exercise, bug=bug)
    assert not passed and said in verdict, verdict


WRONG, RIGHT = listed(LAB, '''
== column_lora: missing in partial
cut = {"lora_A": 0 if self.way == SHARDED else None, "lora_B": 0}
return cut, ["lora_A"] if self.way == JOINED else []
--
...
== column_lora: P times too large
cut = {"lora_A": 0 if self.way == SHARDED else None, "lora_B": 0}
return cut, ["lora_A"] if self.way != SHARDED else []
--
...
== column_lora: scale = alpha / r
...
--
inside = enter(x, self.group, self.sequence_parallel)
low = F.linear(inside, self.lora_A)
return F.linear(inside, self.weight, self.bias) + F.linear(low, self.lora_B)
== column_lora
partial = self.way == JOINED or (self.way == APART and self.sequence_parallel)
return {"lora_A": {SHARDED: 0}.get(self.way), "lora_B": 0}, ["lora_A"] * partial
--
whole = enter(x, self.group, self.sequence_parallel)
low = (x if self.way == APART else whole) @ self.lora_A.T
if self.way == APART:
    low = enter(low, self.group, self.sequence_parallel)
elif self.way == SHARDED:
    low = gather_along(low, 2, self.lora_B.shape[1], self.group)
return F.linear(whole, self.weight, self.bias) + low @ (self.scale * self.lora_B).T
== row_lora: the bias is added on every rank
...
--
low = F.linear(x, self.lora_A)
y = F.linear(x, self.weight, self.bias) + self.scale * F.linear(low, self.lora_B)
return leave(y, self.group, self.sequence_parallel)
== row_lora: missing in partial
return {"lora_A": 1, "lora_B": 1 if self.way == SHARDED else None}, []
--
...
== row_lora: the adapter is missing
...
--
y = leave(F.linear(x, self.weight), self.group, self.sequence_parallel)
return y if self.bias is None else y + self.bias
== row_lora
partial = self.way == JOINED or (self.way == APART and self.sequence_parallel)
return {"lora_A": 1, "lora_B": {SHARDED: 1}.get(self.way)}, ["lora_B"] * partial
--
low, base = x @ self.lora_A.T, x @ self.weight.T
if self.way == APART:
    low, base = (leave(t, self.group, self.sequence_parallel) for t in (low, base))
elif self.way == SHARDED:
    low = scatter_along(low, 2, self.group)
y = base + low @ (self.scale * self.lora_B).T
y = y if self.way == APART else leave(y, self.group, self.sequence_parallel)
return y + (0 if self.bias is None else self.bias)
== sum_partial_gradients: it is whole already
whole = [(layer, name) for layer in layers for name, dim in layer.cut.items() if dim is None]
grads = [getattr(layer, name).grad for layer, name in whole]
if grads:
    total = all_reduce(torch.cat([grad.flatten() for grad in grads]), group)
    for grad, part in zip(grads, total.split([grad.numel() for grad in grads])):
        grad.copy_(part.view_as(grad))
== sum_partial_gradients: join them first
for layer in layers:
    for name in layer.partial:
        dist.all_reduce(getattr(layer, name).grad, group=group)
== sum_partial_gradients: the mean is not the sum
for grad in [getattr(layer, name).grad for layer in layers for name in layer.partial]:
    grad.copy_(all_reduce(grad, group) / group.size())
== sum_partial_gradients
partial = [getattr(layer, name) for layer in layers for name in layer.partial]
if partial:
    joined = torch.nn.utils.parameters_to_vector([p.grad for p in partial])
    dist.all_reduce(joined, group=group)
    for p in partial:
        p.grad, joined = joined[: p.numel()].view_as(p).clone(), joined[p.numel() :]
== save_adapter: the scale is missing
...
--
merged.weight.data += adapter["lora_B"] @ adapter["lora_A"]
== save_adapter: nothing is merged
...
--
merged.weight.data + scale * adapter["lora_B"] @ adapter["lora_A"]
== save_adapter: as saved is the parameter
adapter = {}
for name, dim in layer.cut.items():
    mine = getattr(layer, name).detach()
    n = layer.shapes[name][dim or 0]
    adapter[name] = mine if dim is None else all_gather_along(mine, dim, n, layer.group)
return adapter
--
...
== save_adapter
adapter = {name: torch.zeros(shape) for name, shape in layer.shapes.items()}
for name, dim in layer.cut.items():
    mine = getattr(layer, name).detach()
    if dim is None:
        adapter[name] += mine
    else:
        where = split(layer.shapes[name][dim], layer.group.rank(), layer.group.size())
        adapter[name].narrow(dim, where[0], where[1] - where[0]).copy_(mine)
        dist.all_reduce(adapter[name], group=layer.group)
return adapter
--
with torch.no_grad():
    merged.weight.addmm_(adapter["lora_B"], adapter["lora_A"], alpha=scale)
== translate_to_lora: a new object
style.__class__ = LORA_STYLES.get(type(style), type(style))
translated[name] = style
== translate_to_lora: the layouts are the style's
adapted = isinstance(module, LoRALinear)
translated[name] = LORA_STYLES[type(style)]() if adapted else style
== translate_to_lora: new where there are adapters
translated[name] = style
== translate_to_lora
translated[name] = style
if isinstance(module, LoRALinear):
    kind = LORA_STYLES.get(type(style))
    if kind is None:
        raise TypeError(f"{type(style).__name__} has no LoRA style")
    translated[name] = kind(use_local_output=style.use_local_output)
    vars(translated[name]).update(vars(style))
''')  # fmt: skip


@pytest.mark.parametrize("exercise,regions,said", WRONG)
def test_wrong_answers_get_their_hint(exercise, regions, said):
    passed, verdict = graded(LAB, exercise, regions)
    assert not passed and said in verdict, verdict


def test_other_right_answers_pass_and_the_lab_accepts_them(tmp_path):
    """In another folder's my_labs/, with other inputs."""
    (tmp_path / "labs").symlink_to(ROOT / "labs")
    (tmp_path / "my_labs").mkdir()
    mine = tmp_path / "my_labs" / LAB.name
    mine.write_text(answered(LAB, RIGHT))
    run = python(mine, "--seed", "77", cwd=tmp_path)
    assert run.returncode == 0 and run.stdout.endswith("exercises' checks hold\n"), run.stdout
    assert "Predict, then run: how many bytes does the backward of a step" in run.stdout
