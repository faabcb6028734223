"""The four scripts as a user runs them: exact for models as they come, all modes, to the byte."""

import functools
import itertools
import json
import re
from collections import Counter

import pytest
import torch
from conftest import CHUNK
from forks import MODELS, SMALL, STRATEGIES
from transformers import AutoConfig, AutoModelForCausalLM

import pp

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
    *((2, f"{s} --model olmo2", "of type olmo2; use one of llama, mistral,") for s in TP),
    (2, "pp.py --schedule interleaved --virtual-stages 5",
     "8 layers cannot fill 10 stages, 5 a rank; use --nproc_per_node 1 or fewer"),
    (3, "pp.py --schedule interleaved --microbatches 7",
     "cannot run 7 microbatches on 3 ranks; use --microbatches 9 --batch 9"),
]  # fmt: skip


@pytest.mark.parametrize("world,command,message", REFUSED)
def test_ranks_that_a_model_cannot_have_are_refused(ranks, world, command, message):
    run = ranks(world, command)
    assert run.codes[0] == 2 and run.output.startswith("error: ") and message in run.output
    assert run.output.count("\n") == 1


# ---- Pipelines -----------------------------------------------------------------------------------


@functools.cache
def measured(ranks, world, schedule, microbatches, mode="benchmark"):
    """Results of a mode, one run for all tests; a microbatch is 64 tokens."""
    options = f"--microbatches {microbatches} --length 64 --mode {mode} --bench-iters 1"
    run = ranks(world, f"pp.py --model deep_untied --schedule {schedule} {options}")
    return holds(run)[mode]


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_a_schedule_sends_and_when(ranks, schedule):
    benchmark, waits = measured(ranks, 2, schedule, 4), measured(ranks, 2, schedule, 4, "bubble")
    as_expected(benchmark)
    boundary = 4 * 64 * 48 * 4  # (b, s, h) in float32
    for phase in ("forward", "backward"):
        sends = [r for r in benchmark["traffic"] if (r["phase"], r["op"]) == (phase, "send")]
        boundaries = (phase == "forward") + (schedule == "interleaved")  # that rank 0 sends over
        assert sum(row["bytes"] for row in sends) == boundary * boundaries
    actions = {"afab": 2, "1f1b": 2, "interleaved": 4, "zb": 3}[schedule]  # of a microbatch
    assert len(waits["timeline"]) == 2 * 4 * actions
    assert 0 < waits["bubble"] < 1 and 0 < waits["bubble_simulated"] < 1
    assert waits["in_flight"] == waits["in_flight_expected"]


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
def test_one_f_one_b_bounds_what_is_in_flight(ranks, world):
    few, many = (
        {name: measured(ranks, world, name, m) for name in ("afab", "1f1b", "zb")} for m in (4, 8)
    )
    afab, one, zb = (measured(ranks, world, name, 8, "bubble")["in_flight"] for name in many)
    assert [afab, one, max(zb)] == [[8] * world, list(range(world, 0, -1)), world]

    def growth(schedule):  # bytes at the peak, from 4 microbatches to 8 of the same size
        peaks = (results[schedule]["peak_memory_bytes"] for results in (few, many))
        return max(b - a for a, b in zip(*peaks))

    boundary = 64 * 48 * 4  # one microbatch's (b, s, h) in float32; a layer's input is one such
    assert growth("afab") > 4 * boundary * (5 // world)
    assert max(growth("1f1b"), growth("zb")) < 2 * boundary  # a message may be on its way


@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("afab", marks=pytest.mark.slow)])
def test_torch_runs_the_same_stages(ranks, schedule):
    options = f"--mode all --length 37 --bench-iters 1 --model even --schedule {schedule}"
    holds(ranks(2, f"labs/torch_pipeline.py {options}"))


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedule_mode(ranks, schedule):
    command = f"pp.py --mode schedule --schedule {schedule} --ranks 8 --microbatches 32"
    formula = {"afab": 7 / 39, "1f1b": 7 / 39, "interleaved": 7 / 71, "zb": 7 / 103}
    results = holds(ranks(1, f"{command} --recompute none"))["schedule"]
    assert abs(results["bubble"] - formula[schedule]) < 1e-9
    formula["zb"] = 7 / 71  # with F 1, B 2, W 1
    results = holds(ranks(1, command))["schedule"]
    assert abs(results["bubble"] - formula[schedule]) < 1e-9
    peaks = {"afab": [32] * 8, "1f1b": list(range(8, 0, -1)), "zb": [8] * 8}
    assert results["in_flight"] == peaks.get(schedule, [2 * (7 - r) + 8 + 1 for r in range(8)])


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_docstrings_show_the_real_schedules(ranks, schedule):
    command = f"pp.py --mode schedule --schedule {schedule} --ranks 2 --microbatches 4"
    run = ranks(1, f"{command} --recompute none")
    grid, caption = r"rank [01] .*[FBW].*", f"\n{schedule}: "
    shown = re.findall(grid, pp.__doc__.partition(caption)[2])[:2]
    assert shown == re.findall(grid, run.output)


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_is_sound_and_its_bubble_is_the_formula(name):
    cost, weights = {"F": 1.0, "B": 2.0, "W": 1.0}, 0
    if name == "zb":
        cost["B"], weights = 1.0, cost["W"]
    for P, M in itertools.product(range(1, 9), range(1, 14)):
        if name == "interleaved" and M % P:
            continue  # refused
        for V in (2, 3) if name == "interleaved" else (1,):
            lists = [list(pp.SCHEDULES[name](rank, P, M, V)) for rank in range(P)]
            assert not pp.fault(lists, V, M), (P, M, V)
            rows = pp.simulate(lists, P * V, lambda action: cost[action.kind])
            formula, work = pp.bubble_formula(P, M, V, cost["F"], cost["B"], weights), 3 - weights
            slots = V * M + P - 1
            part = 1 - V * M * (work + weights) / (slots * work + max(1, M - P + 1) * weights)
            assert abs(pp.bubble(rows, P) - part) < 1e-9, (P, M, V)
            why = pp.no_formula(P, M, cost["F"], cost["B"], weights)
            assert bool(why) == (formula is None) == (name == "zb" and M < P), (P, M, V)
            assert why or abs(formula - part) < 1e-9, (P, M, V)


def test_a_schedule_that_is_unsound_is_told():
    lists = [list(pp.one_f_one_b(rank, 4, 8)) for rank in range(4)]
    lists[1].remove(("B", 1, 3))
    assert pp.fault(lists, 1, 8) == "rank 1 does not do each of its actions once"
    lists = [list(pp.one_f_one_b(rank, 4, 8)) for rank in range(4)]
    lists[3].reverse()
    waits = "deadlock: these wait for each other: rank 0 with B0 of stage 0, rank 1"
    assert pp.fault(lists, 1, 8).startswith(waits)
    lists = [list(pp.afab(rank, 2, 3)) for rank in range(2)]
    lists[1][:2] = lists[1][1::-1]  # its first two forwards: no deadlock, and another's tensor
    assert pp.fault(lists, 1, 3) == "rank 1 takes F in another order than rank 0 sends it"
    lists = [list(pp.zero_bubble(rank, 2, 3)) for rank in range(2)]
    lists[1][-2:] = lists[1][:-3:-1]
    assert pp.fault(lists, 1, 3) == "rank 1 runs W in another order than B"


def gets_stuck(lists, V, slots):
    """Whether pp.py's engine does, if a message leaves only when its receive is posted, and a rank
    waits before a send until fewer than `slots` of its kind have not left."""
    P = len(lists)
    sent, posted = Counter(), Counter()  # messages of a channel: (kind, the rank that receives)

    def receive(rank, action):
        if action is not None and pp.producer(action, P * V):
            posted[action.kind, rank] += 1

    def run(rank):  # yields while it waits
        for action, later in zip(lists[rank], [*lists[rank][1:], None]):
            if pp.producer(action, P * V):
                taken[action.kind, rank] += 1
                while sent[action.kind, rank] < taken[action.kind, rank]:
                    yield
            receive(rank, later)
            step = {"F": 1, "B": -1, "W": 0}[action.kind]
            if step and 0 <= action.stage + step < P * V:
                channel = action.kind, pp.rank_of(action.stage + step, P)
                while sent[channel] - posted[channel] >= slots:
                    yield
                sent[channel] += 1

    taken, left = Counter(), {rank: run(rank) for rank in range(P)}
    for rank in range(P):
        receive(rank, lists[rank][0])
    while left:
        before = sum(sent.values()), sum(posted.values())
        left = {rank: r for rank, r in left.items() if next(r, "done") != "done"}
        if left and before == (sum(sent.values()), sum(posted.values())):
            return True
    return False


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_schedule_deadlocks_where_sends_wait_for_their_receives(name):
    for P, M, V in itertools.product(range(2, 7), range(1, 13), (1, 2, 3)):
        if (V > 1) != (name == "interleaved") or (V > 1 and M % P):
            continue
        lists = [list(pp.SCHEDULES[name](rank, P, M, V)) for rank in range(P)]
        assert not gets_stuck(lists, V, slots=P), (P, M, V)
        last = [action for action in lists[0] if action.kind == "F"][-1]
        lists[0].append(lists[0].pop(lists[0].index(last)))  # it comes too late
        assert gets_stuck(lists, V, slots=P), (P, M, V)


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("how", ["full", "none"])
def test_what_a_rank_keeps_is_what_the_schedule_says(ranks, schedule, how):
    """The bytes alive between actions, but for messages, of which each kind has at most P + 1."""
    options = f"--schedule {schedule} --recompute {how} --length 64 --bench-iters 1"
    result = holds(ranks(2, f"pp.py --model deep_untied --mode bubble {options}"))["bubble"]
    message = 64 * 48 * 4
    for kept, expected in zip(result["kept_bytes"], result["kept_bytes_expected"], strict=True):
        assert -message < kept - expected <= 6 * message, (kept, expected)
    more = 6 if how == "none" or schedule == "zb" else 0.5  # than the inputs of a layer
    assert min(result["kept_bytes_expected"]) > more * 2 * message, "of its two layers at least"


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
    ({"peer, channel), tensor))": "peer, channel), None))"}, "freed before it was sent"),
    ({"sending.append((dist.isend": "((dist.isend"}, "not waited for"),
    ({'in [*sending["F"], *sending["B"]]': "in []"}, "not waited for"),
    ({"popleft()\n            work.wait()": "popleft()"}, "not waited for"),
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
