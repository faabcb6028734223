"""The four scripts as a user runs them: exact for models as they come, all modes, to the byte."""

import json
import re
from collections import Counter

import pytest
import torch
from conftest import CHUNK
from forks import MODELS, SMALL, STRATEGIES
from transformers import AutoConfig, AutoModelForCausalLM

TP, SHARDED, SCHEDULES = STRATEGIES[:2], STRATEGIES[:3], ["afab", "1f1b", "interleaved", "zb"]
# All that correctness is asked for: every model, attention, loss and recomputation, in float64
MODEL = [
    (2, "shared_kv --attn eager --loss full"),
    (2, "two_kv --batch 2 --loss full --recompute none"),
    (2, "own_kv --attn eager --batch 4"),  # two KV heads on a rank, and one
    (2, "bias"),
    (2, "head_dim --recompute none"),
    (3, "shared_kv --length 7"),
    (3, "own_kv --loss full"),
    (1, "one_layer --length 3 --batch 1"),
    (4, "uneven_kv --length 9"),
    (2, "deep --attn eager"),
    (2, "longrope --length 20 --attn eager"),
    (4, "longrope --length 20"),
    (2, "dynamic --length 20"),
]
SAME_M = ["afab", "1f1b", "zb"]  # of any number of microbatches
SEQUENCES = "--length 37 --batch 6 --microbatches 4"  # of 2, 2, 1 and 1 sequences
PIPELINE = [
    (2, f"shared_kv --schedule 1f1b --attn eager {SEQUENCES}"),
    (2, f"two_kv --schedule zb --loss full --recompute none {SEQUENCES}"),
    (2, f"own_kv --schedule afab {SEQUENCES}"),
    (2, f"bias --schedule zb {SEQUENCES}"),
    (2, f"head_dim --schedule 1f1b --recompute none {SEQUENCES}"),
    (1, "one_layer --length 2 --batch 1"),
    *((ranks, f"deep --schedule {s} --microbatches 5") for s in SAME_M for ranks in (1, 2, 3)),
    *((ranks, "deep --schedule interleaved --batch 7 --microbatches 6") for ranks in (1, 2, 3)),
    *((2, f"deep_untied --schedule {s} --microbatches 1") for s in SAME_M),
    (2, "deep_untied --schedule interleaved --microbatches 2"),
    (2, "deep --schedule interleaved --virtual-stages 3 --microbatches 4"),
    (2, f"olmo2 --schedule zb {SEQUENCES}"),
    (2, "deep --schedule 1f1b --attn eager"),
    *((2, f"{model} --length 20") for model in ("longrope", "dynamic")),
]
EXACT = [(ranks, f"{s} --length 37 --model {m}") for s in SHARDED for ranks, m in MODEL]
EXACT += [(3, "sp_ulysses.py --length 37 --model olmo2 --attn eager")]
EXACT += [(ranks, f"pp.py --length 37 --model {m}") for ranks, m in PIPELINE]
ZERO3 = "sp_ulysses.py --shard-weights --length 37 --model"
EXACT += [(ranks, f"{ZERO3} {m}") for ranks, m in MODEL[:5]]
DTENSOR = ["even --loss full", "even_bias", "even_qwen3"]
EXACT += [(2, f"tp.py --dtensor --length 37 --model {model}") for model in DTENSOR]
EXACT += [  # on more ranks
    *((4, f"{s} --length 37 --model {m}") for s in SHARDED for _, m in MODEL[:5] if m[:3] != "own"),
    (4, f"{ZERO3} two_kv"),
    *((4, f"pp.py --length 64 --model deep --schedule {s}") for s in ("afab", "1f1b", "zb")),
]
TWO = [*STRATEGIES, "tp.py --dtensor", "sp_ulysses.py --shard-weights"]


def holds(run):
    assert run.codes == [0] * len(run.codes), run.output
    assert "\nPASS " in run.output and "FAIL" not in run.output
    return run.json


def proves(correctness, model):
    """In each step the gradient of each of the model's parameters was compared, and all else."""
    sizes = MODELS.get(model) and SMALL | MODELS[model]
    if model == "tiny":
        sizes = SMALL | {"num_hidden_layers": 8, "tie_word_embeddings": True}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**sizes))
    names = [name for name, _ in model.named_parameters()]
    found = Counter((row["step"], row["kind"], row["name"]) for row in correctness["tensors"])
    wanted = [("grad", name) for name in names]
    wanted += [(kind, kind) for kind in ("logits", "loss", "grad_norm")]
    steps = (1, 2, 3) if correctness["dtype"] == "float64" else (1, 2)
    expected = Counter((step, *pair) for step in steps for pair in wanted)
    assert found == expected + Counter((1, "weight", name) for name in names)
    assert all(abs(row["coverage"] - 1) < 1e-9 for row in correctness["tensors"])
    assert correctness["passed"]


@pytest.mark.quick(every=5)
@pytest.mark.parametrize("world,command", EXACT)
def test_float64_is_exact(ranks, world, command):
    run = ranks(world, command, CHUNK)
    assert run.json["dtype"] == "float64"  # by default
    correctness = holds(run)["correctness"]
    proves(correctness, command.partition("--model ")[2].split()[0])
    assert max(row["relative_error"] for row in correctness["tensors"]) < 1e-10


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("script", [script for script in TWO if script != "pp.py"])
def test_the_group_need_not_be_the_world(ranks, script):
    """Two groups of two at once: of ranks 0 and 2, and of ranks 1 and 3."""
    groups = "dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])[0]"
    command = f"{script} --model even_bias --length 13"
    holds(ranks(4, command, {"dist.group.WORLD": groups}))


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("script", TWO)
def test_sequences_and_ranks_without_a_target(ranks, script):
    """A mean of their own would be 0 / 0. Rank 0's tokens have none, and no token of sequence 1."""
    put = "    return ids.to(args.device), labels"
    few = "    labels[1] = labels[:, : length // 2 + 1] = IGNORE\n"
    holds(ranks(2, f"{script} --model even --length 13", {put: few + put}))


@pytest.mark.quick(every=5)
@pytest.mark.parametrize("script", TWO)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rounding_is_as_on_one_device(ranks, script, dtype):
    command = f"{script} --model even --dtype {dtype} --length 64"
    first, second = (holds(ranks(2, command))["correctness"] for _ in range(2))
    assert first == second, "the same seed gives the same numbers, bit for bit"
    proves(first, "even")
    assert 0 < first["worst"]["relative_error"] < first["tolerance"]


@pytest.mark.quick(every=5)
@pytest.mark.parametrize("script", STRATEGIES)
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_what_is_zero_by_construction_is_no_false_alarm(ranks, script, dtype):
    """Two tokens, one target: the first token attends to itself alone, so q and k of the last layer
    have no gradient but rounding noise."""
    world = 1 if script == "pp.py" else 2  # one layer: one stage
    run = ranks(world, f"{script} --model one_layer --length 2 --batch 1 --dtype {dtype}")
    rows = [r for r in holds(run)["correctness"]["tensors"] if "q_proj" in r["name"]]
    assert rows and all(row["relative_error"] < 0.02 for row in rows)


MODES = [(2, f"{s} --length 64 --model even", "even") for s in ("tp.py", "sp_ulysses.py")]
MODES += [(3, "sp_megatron.py --length 37 --model shared_kv", "shared_kv")]
MODES += [(3, "pp.py --length 37 --model deep --schedule interleaved", "deep")]
MORE_MODES = [(2, "tp.py --dtensor --length 64 --model even", "even")]
MORE_MODES += [(2, "pp.py --length 64 --model even", "even"), (3, f"{ZERO3} own_kv", "own_kv")]
MORE_MODES += [(1, f"{s} --length 64", "tiny") for s in TWO[:-1]]  # no other rank to shard to
MORE_MODES += [(P, f"{s} --length 64", "tiny") for s in TWO for P in (2, 4)]
MORE_MODES += [(2, f"{s} --length 128 --dtype bfloat16", "tiny") for s in TWO]
MORE_MODES += [(4, f"pp.py --length 64 --schedule {s}", "tiny") for s in SCHEDULES]
MODES += [pytest.param(*row, marks=pytest.mark.slow) for row in MORE_MODES]


@pytest.mark.parametrize("world,command,model", MODES)
def test_all_modes_hold(ranks, world, command, model):
    fewer = {"in range(20)": "in range(5)"} if model != "tiny" else {}
    results = holds(ranks(world, f"{command} --mode all --bench-iters 1", fewer))
    correctness, learning, benchmark = map(results.get, ("correctness", "learning", "benchmark"))
    assert results["world_size"] == world and learning["passed"] and benchmark["passed"]
    proves(correctness, model)
    if results["dtype"] == "float64":
        assert abs(correctness["loss"] / correctness["loss_reference"] - 1) < 1e-10
        pairs = zip(learning["loss"], learning["loss_reference"], strict=True)
        assert all(abs(a - b) <= 1e-9 * b for a, b in pairs)
    assert learning["loss"][-1] < learning["loss"][0]
    assert len(benchmark["peak_memory_bytes"]) == world
    assert benchmark["forward_s"]["median"] > 0
    as_expected(benchmark, world > 1 or command.startswith("pp.py"))  # it sums the loss alone, too


def as_expected(benchmark, some=True):
    for row in benchmark["traffic"]:
        assert row["bytes"] == row["expected_bytes"] > 0 < row["count"] == row["expected_count"]
    assert bool(benchmark["traffic"]) == some


TRAFFIC = [(3, f"{s} --model shared_kv") for s in SHARDED]
TRAFFIC += [(2, f"{s} --model bias --recompute none") for s in SHARDED]
TRAFFIC += [(2, f"{s} --model own_kv") for s in SHARDED]
TRAFFIC += [(2, "tp.py --dtensor --model even")]
TRAFFIC += [(5 - p, command) for p, command in TRAFFIC[:-1]]


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("world,command", TRAFFIC)
def test_traffic_is_as_the_formula_says(ranks, world, command):
    """At a length that no P divides, the loss in chunks."""
    run = ranks(world, f"{command} --mode benchmark --length 37 --bench-iters 1", CHUNK)
    as_expected(holds(run)["benchmark"])


REFUSED = [
    (3, "sp_ulysses.py --model two_kv", "; use one of 1, 2, 4, 6, 8, 10, 12 ranks"),
    (4, "tp.py --model own_kv",
     "12 heads with 3 KV heads cannot be split over 4 ranks; use one of 1, 2, 3"),
    (3, "tp.py --dtensor", "; use 4 ranks, or no --dtensor"),
    *((2, f"{s} --model olmo2", "is of type olmo2, not of llama, mistral, ") for s in TP),
    (2, "pp.py --schedule interleaved --virtual-stages 5",
     "8 layers cannot fill 10 stages, 5 a rank; use --nproc_per_node 1 or fewer"),
    (3, "pp.py --schedule interleaved --microbatches 7",
     "cannot run 7 microbatches on 3 ranks; use --microbatches 9 --batch 9"),
]  # fmt: skip


@pytest.mark.parametrize("world,command,message", REFUSED)
def test_ranks_that_a_model_cannot_have_are_refused(ranks, world, command, message):
    run = ranks(world, command)
    [said] = set(run.output.splitlines())  # by each rank
    assert 2 in run.codes and said.startswith("error: ") and message in said, run.output


# ---- Pipelines -----------------------------------------------------------------------------------


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_a_schedule_sends(ranks, schedule):
    options = "--microbatches 4 --length 64 --mode benchmark --bench-iters 1"
    run = ranks(2, f"pp.py --model deep_untied --schedule {schedule} {options}")
    benchmark = holds(run)["benchmark"]
    as_expected(benchmark)
    boundary = 4 * 64 * 48 * 4  # (b, s, h) in float32
    for phase in ("forward", "backward"):
        sends = [r for r in benchmark["traffic"] if (r["phase"], r["op"]) == (phase, "send")]
        boundaries = (phase == "forward") + (schedule == "interleaved")  # that rank 0 sends over
        assert sum(row["bytes"] for row in sends) == boundary * boundaries


def test_a_schedule_that_would_hang_is_refused(ranks):
    order = (
        'Action("{}", rank, m)\n    for m in range(M):\n        yield Action("{}", rank, m)\n\n\n'
    )
    put = {f"{order}def one".format("F", "B"): f"{order}def one".format("B", "F")}
    run = ranks(2, "pp.py --length 8 --schedule afab", put)
    assert 2 in run.codes and "would deadlock" in run.output, run.output


@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("afab", marks=pytest.mark.slow)])
def test_torch_runs_the_same_stages(ranks, schedule):
    options = f"--mode all --length 37 --bench-iters 1 --model even --schedule {schedule}"
    holds(ranks(2, f"labs/torch_pipeline.py {options}"))


WATCHED = """
class Send:  # in the place of dist.isend: a copy is sent, and x is watched until wait()
    def __init__(self, x, peer, channel):
        self.storage, self.copy = weakref.ref(x.untyped_storage()), x.clone()
        self.x = weakref.ref(x)
        self.work = isend(self.copy, peer, channel)
        pending.append(self)

    def wait(self):
        assert self.storage() is not None, "freed before it was sent"
        assert self.x() is None or self.x().equal(self.copy), "overwritten before it was sent"
        self.work.wait()
        pending.remove(self)


def run_all(*args, **options):
    results = right(*args, **options)
    assert not pending, "not waited for"
    return results


pending, isend, right = [], dist.isend, Pipeline.run
dist.isend, Pipeline.run = Send, run_all
if __name__ == "__main__":"""
DROPPED = [  # a message, and the complaint
    ({}, None),
    ({"*self.send_channels[kind]), tensor": "*self.send_channels[kind]), None"}, "freed before"),
    ({"self.sending[kind] = dist": "dist"}, "not waited for"),
    ({"in list(self.sending)": "in []"}, "not waited for"),
    ({"        self.wait(self.sending.get(kind))\n": ""}, "not waited for"),
]


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("put,complaint", DROPPED)
def test_a_message_exists_until_it_is_sent(ranks, put, complaint):
    watched = put | {'if __name__ == "__main__":': WATCHED}
    run = ranks(2, "pp.py --length 8 --model deep_untied --schedule interleaved", watched)
    if complaint is None:
        holds(run)
    else:
        assert set(run.codes) != {0} and complaint in run.output, run.output


ENDED = """
def main(right=main):  # and its exit status is 1 if a thread is left
    status, threads, end = right(), Path("/proc/self/task"), time.time() + 3
    while len(list(threads.glob("*"))) > 1 and time.time() < end:
        time.sleep(0.01)  # one that has ended is listed for a moment longer
    return status or int(len(list(threads.glob("*"))) > 1)
if __name__ == "__main__":"""
KEPT = {"    return all(results[": "    sys.kept = group\n    return all(results["}


@pytest.mark.parametrize("script", STRATEGIES)
def test_the_groups_threads_end_before_python(ranks, script):
    """Else one that is late in freeing a tensor, as on a busy machine, aborts a run that passed."""
    command, watched = f"{script} --length 8", {'if __name__ == "__main__":': ENDED}
    holds(ranks(2, command, watched))
    assert ranks(2, command, watched | KEPT).codes == [1, 1]


W_ADDS = "        self.weight.backward(dy.T @ x)"
W_OVERWRITES = "        self.weight.grad = None\n" + W_ADDS
W_OVERWRITES_A_ROW = "        if len(self.weight) == 1:\n    " + W_OVERWRITES


@pytest.mark.parametrize("wrong", [W_OVERWRITES, W_OVERWRITES_A_ROW])
def test_weight_gradients_of_zero_bubble_are_added(ranks, tmp_path, wrong):
    """Also where a weight has one row: W that overwrites what other microbatches left is caught."""
    config = SMALL | {"intermediate_size": 1, "num_key_value_heads": 1, "mlp_bias": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    command = f"pp.py --model {tmp_path} --length 8 --schedule zb --microbatches 3"
    holds(ranks(2, command))
    run = ranks(2, command, {W_ADDS: wrong})
    assert run.codes == [1, 1] and "FAIL correctness" in run.output, run.output


# ---- What else a user may meet -------------------------------------------------------------------

OUTSIDE = [("ids", "vocabulary"), ("ids", "-1"), ("labels", "vocabulary"), ("labels", "-5")]
MASKED = {  # {whether the vocabulary is cut: what hides such an id or label}
    True: {
        "(ids - self.start).masked_fill(known & ~mine": "(ids - self.start).masked_fill(~mine",
        "(target - start).masked_fill(known & ~mine": "(target - start).masked_fill(~mine",
    },
    False: {
        "def forward_backward(model, ids, labels, group, args, backward=True):\n": "def "
        "forward_backward(model, ids, labels, group, args, backward=True):\n    ids, labels = "
        "ids.clamp(0, 100), labels.where((labels >= 0) & (labels < 101), IGNORE)\n",
    },
}


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("script", STRATEGIES)
@pytest.mark.parametrize("what,number", OUTSIDE)
def test_what_is_outside_the_vocabulary_is_an_error(ranks, script, what, number):
    """On every rank that sees it. In benchmark, since one device's model would raise first."""
    where = "    return ids.to(args.device), labels"
    put = {where: f"    {what}[1, 3] = {number}\n{where}"}
    command = f"{script} --model two_kv --length 13 --mode benchmark --bench-iters 1"
    run = ranks(2, command, put)
    raised = re.findall("Error: .*(?:out of range in self|out of bounds)", run.output)
    assert 1 in run.codes and len(raised) == (2 if script in TP else 1), run.output[-3000:]
    holds(ranks(2, command, put | MASKED[script in TP]))


def test_results_are_json_and_nothing_else_is_left(ranks, tmp_path):
    file = tmp_path / "results.json"
    options = f"--length 8 --bench-iters 1 --json {file}"
    run = ranks(1, f"tp.py --model one_layer --mode all {options}", results=False)
    assert run.codes == [0], run.output
    keys = "script strategy world_size backend device model dtype batch length versions"
    keys += " correctness learning benchmark"
    assert set(json.loads(file.read_text())) >= set(keys.split())
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.ci(every=4)
@pytest.mark.parametrize("script", STRATEGIES)
def test_what_is_computed_again_is_not_kept(ranks, script):
    """Of 2,048 tokens neither all logits (33 MB), nor what all layers keep (38 MB), nor scores."""
    options = "--model wide --length 2048 --batch 1 --mode benchmark --bench-iters 1"
    benchmark = holds(ranks(2, f"{script} {options}", CHUNK))["benchmark"]
    assert max(benchmark["peak_memory_bytes"]) < 2**24


def test_what_dtensor_forgets_is_seen(ranks):
    """A plan without its MLPs: right numbers, and nothing of them is sharded."""
    names = {f"mlp.{name}": f"none.{name}" for name in ("gate_proj", "up_proj", "down_proj")}
    plan = {f'"model.layers.*.{old}"': f'"model.layers.*.{new}"' for old, new in names.items()}
    plan |= {'"model.layers.*.mlp"': '"model.layers.*.none"'}
    run = ranks(2, "tp.py --dtensor --length 64", plan)
    assert run.codes == [1, 1] and "mlp.gate_proj.weight" in run.output.splitlines()[-1], run.output


def test_what_dtensor_replicates_is_seen(ranks):
    """A matrix that is a DTensor, but all of it on every rank: right numbers."""
    plan = "    if tied:  # parallelize_module makes two parameters of one\n"
    down = "layer.mlp.down_proj"
    replicated = f"nn.Parameter({down}.weight.redistribute(placements=[Replicate()]))"
    replicate = f"    for layer in model.model.layers:\n        {down}.weight = {replicated}\n"
    run = ranks(2, "tp.py --dtensor --length 64", {plan: replicate + plan})
    assert run.codes == [1, 1] and "mlp.down_proj.weight" in run.output.splitlines()[-1], run.output
