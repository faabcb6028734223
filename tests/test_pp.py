"""pp.py: every schedule proven, its traffic and its memory as they should be."""

from collections import Counter

import pytest
from conftest import python
from test_strategies import CHUNK, KINDS, SHAPES, shape

SCHEDULES = ["afab", "1f1b", "interleaved", "zb"]


def step(schedule, microbatches, dtype):
    options = f"--schedule {schedule} --microbatches {microbatches} --dtype {dtype} --length 64"
    return ["pp.py", *options.split()]


def all_modes(schedule, microbatches, dtype):
    return [*step(schedule, microbatches, dtype), "--mode", "all", "--bench-iters", "1"]


def shaped(schedule, name):
    """LLaMA as it comes, in microbatches of unequal size: 5 sequences in 3."""
    options = f"--schedule {schedule} --virtual-stages 1 --length 37 --attn eager"
    return ["pp.py", "--model", shape(name), *f"{options} --batch 5 --microbatches 3".split()]


PLAIN = {
    "full": ["--loss", "full", "--recompute", "none"],
    "chunks": ["--length", "37", "--batch", "12", "--microbatches", "4"],
    "tiles": ["--length", "64", "--recompute", "offload", "--tile", "7"],
}


def plain(name):
    """No recomputation and the loss in one piece, several chunks of it, tiles."""
    chunk = [CHUNK] if name == "chunks" else []
    return [*chunk, "pp.py", *PLAIN[name], "--schedule", "zb"]


def in_flight(schedule, microbatches):
    return [*step(schedule, microbatches, "float32"), "--mode", "benchmark", "--bench-iters", "1"]


def by_torch(schedule):
    options = f"--torch --mode all --schedule {schedule} --length 64 --bench-iters 1"
    return ["pp.py", *options.split()]


def simulated(schedule):
    what = ["--mode", "schedule", "--schedule", schedule, "--stages", "8", "--microbatches", "32"]
    return ["pp.py", *what]


BAD = [
    (["--schedule", "gpipe"], "argument --schedule: invalid choice: 'gpipe'"),
    (
        ["--batch", "2", "--microbatches", "4"],
        "--batch 2 cannot be cut into 4 microbatches; --microbatches 2",
    ),
    (["--virtual-stages", "2"], "--virtual-stages 2 needs --schedule interleaved"),
    (
        ["--schedule", "interleaved", "--virtual-stages", "9"],
        "8 layers cannot fill 9 stages, 9 on each of 1 ranks",
    ),
    (["--schedule", "zb", "--torch"], "--torch runs --schedule afab and 1f1b"),
    (["--mode", "schedule", "--stages", "0"], "--stages 0 is too small; 1 would do"),
]


TOO_MANY = ["pp.py", "--schedule", "interleaved", "--virtual-stages", "5"]


def commands(ranks):
    """All that is run on a set of ranks, in one go."""
    rows = [step(s, m, "float64") for s in SCHEDULES for m in ("1", "7") if ranks == 2 or m == "7"]
    if ranks == 1:
        rows += [simulated(s) for s in SCHEDULES] + [["pp.py", *options] for options, _ in BAD]
    if ranks == 2:
        rows += [all_modes(s, "4", "float32") for s in SCHEDULES]
        rows += [step(s, "7", "bfloat16") for s in SCHEDULES]
        rows += [shaped(s, name) for s in ("1f1b", "zb") for name in SHAPES] + list(
            map(plain, PLAIN)
        )
        rows += [by_torch(s) for s in ("afab", "1f1b")] + [TOO_MANY]
    if ranks in (2, 3):
        rows += [in_flight(s, m) for s in ("afab", "1f1b", "zb") for m in ("4", "12")]
    return rows


# tiny's 8 layers: 3 stages, or 6, do not divide them
@pytest.mark.parametrize("ranks,microbatches", [(2, "1"), (1, "7"), (2, "7"), (3, "7")])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_float64_is_exact(outcomes, ranks, schedule, microbatches):
    outcome = outcomes(ranks, commands(ranks), step(schedule, microbatches, "float64"))
    assert outcome["exit"] == 0, outcome["output"]
    tensors = outcome["json"]["correctness"]["tensors"]
    assert max(tensor["relative_error"] for tensor in tensors) < 1e-10
    assert Counter(tensor["kind"] for tensor in tensors) == KINDS
    assert all(abs(tensor["owned"] - 1) < 1e-9 for tensor in tensors)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_all_modes_hold(outcomes, schedule):
    outcome = outcomes(2, commands(2), all_modes(schedule, "4", "float32"))
    assert outcome["exit"] == 0, outcome["output"]
    benchmark = outcome["json"]["benchmark"]
    assert all(row["bytes"] == row["expected_bytes"] > 0 for row in benchmark["traffic"])
    boundary = (
        4 * 64 * 64 * 4 * (3 if schedule == "interleaved" else 1)
    )  # (b, s, h) float32, a boundary
    for phase in ("forward", "backward"):
        sends = [r for r in benchmark["traffic"] if (r["phase"], r["op"]) == (phase, "send")]
        assert sum(row["bytes"] * len(row["ranks"]) for row in sends) == boundary
    assert (
        len(benchmark["timeline"])
        == 2 * 4 * {"afab": 2, "1f1b": 2, "interleaved": 4, "zb": 3}[schedule]
    )
    assert 0 < benchmark["bubble"] < 1 and 0 < benchmark["bubble_formula"] < 1


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_bfloat16(outcomes, schedule):
    outcome = outcomes(2, commands(2), step(schedule, "7", "bfloat16"))
    assert outcome["exit"] == 0, outcome["output"]


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("schedule", ["1f1b", "zb"])
def test_shapes(outcomes, schedule, name):
    outcome = outcomes(2, commands(2), shaped(schedule, name))
    assert outcome["exit"] == 0, outcome["output"]


@pytest.mark.parametrize("name", ["full", "chunks"])
def test_losses_and_recomputation(outcomes, name):
    outcome = outcomes(2, commands(2), plain(name))
    assert outcome["exit"] == 0, outcome["output"]


@pytest.mark.parametrize("ranks", [2, 3])
def test_one_f_one_b_bounds_what_is_in_flight(outcomes, ranks):
    def measured(schedule, microbatches):
        outcome = outcomes(ranks, commands(ranks), in_flight(schedule, microbatches))
        assert outcome["exit"] == 0, outcome["output"]
        return outcome["json"]["benchmark"]

    for schedule in ("1f1b", "zb"):
        assert max(measured(schedule, "12")["in_flight"]) == ranks
    assert measured("1f1b", "12")["in_flight"] == list(range(ranks, 0, -1))
    assert [measured("afab", m)["in_flight"] for m in ("4", "12")] == [[4] * ranks, [12] * ranks]

    def growth(schedule):  # bytes at the peak, from 4 microbatches to 12 of the same size
        few, many = (measured(schedule, m)["peak_memory_bytes"] for m in ("4", "12"))
        return max(b - a for a, b in zip(few, many))

    boundary = 64 * 64 * 4  # one microbatch's (b, s, h) in float32; a layer's input is one such
    assert growth("afab") > 8 * boundary * (8 // ranks)
    assert growth("1f1b") < growth("afab") / 4
    assert growth("zb") < growth("afab") / 4


@pytest.mark.parametrize("schedule", ["afab", "1f1b"])
def test_torch_runs_the_same_stages(outcomes, schedule):
    outcome = outcomes(2, commands(2), by_torch(schedule))
    assert outcome["exit"] == 0, outcome["output"]
    assert "manual: forward + backward" in outcome["json"]["benchmark"]["rivals_s"]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedule_mode(outcomes, schedule):
    outcome = outcomes(1, commands(1), simulated(schedule))
    assert outcome["exit"] == 0, outcome["output"]
    results = outcome["json"]
    assert results["passed"]
    formula = {"afab": 7 / 39, "1f1b": 7 / 39, "interleaved": 7 / 71, "zb": 7 / 103}[schedule]
    assert abs(results["bubble"] - formula) < 1e-9
    peaks = {"afab": [32] * 8, "1f1b": list(range(8, 0, -1)), "zb": [8] * 8}
    assert results["in_flight"] == peaks.get(schedule, [2 * (7 - r) + 8 + 1 for r in range(8)])


CHECK_ALL = """
import runpy
pp = runpy.run_path("pp.py")
for name, schedule in pp["SCHEDULES"].items():
    for P in range(1, 9):
        for M in range(1, 20):
            for V in (2, 3) if name == "interleaved" else (1,):
                lists = [list(schedule(rank, P, M, V)) for rank in range(P)]
                assert pp["faults"](lists, P * V, M) == [], (name, P, M, V)
                cost = {"F": 1.0, "B": 1.0 if name == "zb" else 2.0, "W": 1.0}
                rows = pp["simulate"](lists, P * V, lambda action: cost[action.kind])
                weights = cost["W"] if name == "zb" else 0
                formula = pp["bubble_formula"](name, P, M, V, cost["F"], cost["B"], weights)
                assert abs(pp["bubble"](rows, P) - formula) < 1e-9, (name, P, M, V)
lists = [list(pp["one_f_one_b"](rank, 4, 8)) for rank in range(4)]
wrong = [actions.copy() for actions in lists]
wrong[1].remove(("B", 1, 3))
assert pp["faults"](wrong, 4, 8) == ["rank 1 does not do each of its actions once"]
wrong = [actions.copy() for actions in lists]
wrong[3].reverse()
waits = "deadlock: these wait for each other: rank 0 with B0, rank 1"
assert pp["faults"](wrong, 4, 8)[0].startswith(waits)
"""


def test_every_schedule_is_sound_and_its_bubble_is_the_formula():
    run = python("-c", CHECK_ALL)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("options,message", BAD)
def test_bad_input_is_refused_in_one_line(outcomes, options, message):
    outcome = outcomes(1, commands(1), ["pp.py", *options])
    assert outcome["exit"] == 2 and outcome["output"].count("\n") == 1
    assert outcome["output"].startswith(f"error: {message}")


def test_more_stages_than_layers(outcomes):
    outcome = outcomes(2, commands(2), TOO_MANY)
    said = "8 layers cannot fill 10 stages, 5 on each of 2 ranks; at most 1 rank would do"
    assert (outcome["exit"], outcome["output"]) == (2, f"error: {said}\n")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_schedule_in_all_modes(outcomes, ranks):
    rows = [
        all_modes(s, *rest) for s in SCHEDULES for rest in (("7", "float32"), ("1", "bfloat16"))
    ]
    for command in rows:
        outcome = outcomes(ranks, rows, command)
        assert outcome["exit"] == 0, outcome["output"]
