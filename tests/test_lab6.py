"""Lab 6 as a learner meets it: the run, its bugs, wrong and other right answers."""

import importlib.util

import pytest
from learner import caught, lab_file, listed, ranks, run_answered, run_finished

pytestmark = pytest.mark.slow  # minutes, with the other labs'

LAB = lab_file("lab6")
shown = ranks.room("experiments", LAB)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    options = "--lora-rank", 1, "--predict", 720
    printed, results = run_finished(LAB, tmp_path_factory.mktemp("lab6"), *options)
    assert "\n  predicted 720, measured 720: right\n" in printed
    return printed, results


def test_every_way_is_one_device_and_sends_what_the_table_says(finished):
    """r = 1: cut over the ranks it is one feature each, mostly zeros."""
    rows, tokens, hidden = finished[1]["ways"], 60, 96
    assert len(rows) == 3 * 2 * (2 + 3)
    low = 4 * tokens
    for row in rows:
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


def test_peft_is_compared_where_it_is_installed(finished):
    printed, found = finished
    installed = importlib.util.find_spec("peft") is not None
    assert found["peft_installed"] == installed
    assert ("against peft's layers: not run, peft is not installed" in printed) != installed


def test_without_the_sum_the_loss_looks_right_and_the_saved_adapter_is_wrong(finished):
    h, features, r = shown.SMALL
    for counts, runs in finished[1]["training"].items():
        one, good, bad = (runs[name] for name in ("one device", "SP, summed", "SP, not summed"))
        assert good["drift"] < 1e-6 and good["frozen"]
        assert good["state"] <= 2 * r * (2 * h + features), "none for W"
        assert bad["losses"][0] == pytest.approx(one["losses"][0], rel=1e-6)
        assert bad["unsummed_gradient_error"] > 0.3 and bad["drift"] > 0.01
        assert bad["losses"][-1] < bad["losses"][0] / 2, "the loss falls"
        if counts == "answers only":  # rank 0 has the prompt: its replicas never saw a gradient
            assert bad["losses"] == pytest.approx(one["losses"], rel=1e-3)
            assert bad["exported"] > 2 * bad["held_out"], "what is saved is not what was trained"


def test_translating_in_place_leaks_into_a_later_model(finished):
    good, bad = finished[1]["translation"].values()
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

ANSWERS = """
== column_lora: missing in partial
self.way == JOINED or (self.way == APART and self.sequence_parallel) -> self.way == JOINED
== column_lora: P times too large
self.way == JOINED or (self.way == APART and self.sequence_parallel) -> self.way != SHARDED
== column_lora: scale = alpha / r
self.scale * F.linear -> F.linear
== column_lora
{"lora_A": 0 if self.way == SHARDED else None, "lora_B": 0} -> {"lora_A": None, "lora_B": 0}
return cut, -> return cut | {"lora_A": 0} if self.way == SHARDED else cut,
low = F.linear(inside, self.lora_A) -> low = inside @ self.lora_A.T
self.scale * F.linear(low, self.lora_B) -> low @ (self.scale * self.lora_B).T
== row_lora: the bias is added on every rank
base, low = F.linear(x, self.weight), -> base, low = F.linear(x, self.weight, self.bias),
return y if self.bias is None else y + self.bias -> return y
== row_lora: missing in partial
["lora_B"] if summed else [] -> []
== row_lora: the adapter is missing
y = base + self.scale * F.linear(low, self.lora_B) -> y = base
== row_lora
"lora_B": 1 if self.way == SHARDED else None -> "lora_B": {SHARDED: 1}.get(self.way)
F.linear(x, self.weight), F.linear(x, self.lora_A) -> x @ self.weight.T, x @ self.lora_A.T
low = scatter_along(low, -1, self.group) -> low = scatter_along(low, 2, self.group)
self.scale * F.linear(low, self.lora_B) -> low @ (self.scale * self.lora_B).T
== sum_partial_gradients: it is whole already
for name in layer.partial -> for name, dim in layer.cut.items() if dim is None
== sum_partial_gradients: join them first
for layer in layers:
    for name in layer.partial:
        dist.all_reduce(getattr(layer, name).grad, group=group)
== sum_partial_gradients: the mean is not the sum
part.view_as(grad) -> part.view_as(grad) / group.size()
== sum_partial_gradients
partial = [getattr(layer, name) for layer in layers for name in layer.partial]
if partial:
    joined = torch.nn.utils.parameters_to_vector([p.grad for p in partial])
    dist.all_reduce(joined, group=group)
    for p in partial:
        p.grad, joined = joined[: p.numel()].view_as(p).clone(), joined[p.numel() :]
== save_adapter: the scale is missing
+= scale * adapter["lora_B"] -> += adapter["lora_B"]
== save_adapter: nothing is merged
merged.weight.data += -> merged.weight.data +
== save_adapter: as saved is the parameter
mine.clone() -> mine
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
"""
WRONG, RIGHT = listed(LAB, ANSWERS)
test_bugs_are_caught, test_wrong_answers_get_their_hint = caught(LAB, BUGS, WRONG)


def test_other_right_answers_pass_and_the_lab_accepts_them(tmp_path):
    run_answered(LAB, RIGHT, tmp_path, "--seed", 77)
