"""labs/schedules.py: pp.py's schedules are sound, and drawn and measured as they run."""

import functools
import itertools
import re
from collections import Counter, defaultdict

import pytest
from conftest import python

import pp
from labs import schedules

SCHEDULES = ["afab", "1f1b", "interleaved", "zb"]


def holds(run):
    assert run.codes == [0] * len(run.codes), run.output
    assert "\nPASS " in run.output and "FAIL" not in run.output
    return run.json


def all_settings(name, most_ranks, most_stages, most_microbatches):
    """(P, V, M, every rank's list of actions) of a schedule."""
    sizes = most_ranks, most_stages, most_microbatches
    for P, V, M in itertools.product(*(range(1, most + 1) for most in sizes)):
        if (V > 1) == (name == "interleaved") and (V == 1 or M % P == 0):
            yield P, V, M, [list(pp.SCHEDULES[name](rank, P, M, V)) for rank in range(P)]


# ---- On paper ------------------------------------------------------------------------------------


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedule_mode(ranks, schedule):
    command = f"labs/schedules.py --mode schedule --schedule {schedule} --ranks 8 --microbatches 32"
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
    command = f"labs/schedules.py --mode schedule --schedule {schedule} --ranks 2 --microbatches 4"
    run = ranks(1, f"{command} --recompute none")
    grid, caption = r"rank [01] .*[FBW].*", f"\n{schedule}: "
    shown = re.findall(grid, pp.__doc__.partition(caption)[2])[:2]
    assert shown == re.findall(grid, run.output)


def test_a_user_draws_one_without_ranks(tmp_path):
    """And results/plot.py draws what it writes."""
    file = tmp_path / "zb.json"
    command = "labs/schedules.py --schedule zb --ranks 3 --microbatches 2 --model qwen3-0.6b --json"
    run = python(*command.split(), file)
    assert run.returncode == 0 and "there is no formula" in run.stdout, run.stdout + run.stderr
    assert len(re.findall("rank [012] .*F0.*W1", run.stdout)) == 3
    assert python("results/plot.py", file).returncode == 0 and file.with_suffix(".png").exists()


REFUSED = {
    "--mode all": "use schedule or bubble",
    "--mode schedule --schedule interleaved --microbatches 6": "use --microbatches 8 --batch 8",
    "--mode bubble --virtual-stages 2": "needs --schedule interleaved",
}


@pytest.mark.parametrize("options", REFUSED)
def test_what_cannot_work_is_said_in_a_line(ranks, options):
    run = ranks(1, f"labs/schedules.py {options}", results=False)
    assert run.codes == [2] and re.fullmatch(f"error: .*{REFUSED[options]}.*\n", run.output)


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_is_sound_and_its_bubble_is_the_formula(name):
    cost, weights = {"F": 1.0, "B": 2.0, "W": 1.0}, 0
    if name == "zb":
        cost["B"], weights = 1.0, cost["W"]
    assert schedules.bubble([(0, "", 5, 6), (1, "", 6, 7)], 2) == 0.5
    for P, V, M, lists in all_settings(name, 8, 3, 13):
        assert not schedules.fault(lists, V, M), (P, M, V)
        rows = pp.simulate(lists, P * V, lambda action: cost[action.kind])
        work, slots = 3 - weights, V * M + P - 1
        part = 1 - V * M * (work + weights) / (slots * work + max(1, M - P + 1) * weights)
        assert abs(schedules.bubble(rows, P) - part) < 1e-9, (P, M, V)
        formula = schedules.bubble_formula(P, M, V, cost["F"], cost["B"], weights)
        assert (formula is None) == (name == "zb" and M < P), (P, M, V)
        assert formula is None or abs(formula - part) < 1e-9, (P, M, V)


def test_the_formula_holds_where_it_says_so():
    """For other times, too. Where W is the longest, or microbatches are few, none would hold."""
    for times in itertools.product((1, 2, 3), repeat=3):
        for P, V, M, lists in all_settings("zb", 5, 1, 9):
            rows = pp.simulate(lists, P, lambda action, t=times: t["FBW".index(action.kind)])
            formula = schedules.bubble_formula(P, M, V, *times)
            assert (formula is None) == (M < P or times[2] > min(times[:2]))
            assert formula is None or abs(formula - schedules.bubble(rows, P)) < 1e-9, (P, M, times)


def test_a_schedule_that_is_unsound_is_told():
    lists = [list(pp.one_f_one_b(rank, 4, 8)) for rank in range(4)]
    lists[1].remove(("B", 1, 3))
    assert schedules.fault(lists, 1, 8) == "rank 1 does not do each of its actions once"
    lists = [[a for a in pp.afab(rank, 2, 3) if a.kind == "F"] for rank in range(2)]
    assert schedules.fault(lists, 1, 3) == "rank 0 does not do each of its actions once"
    lists = [list(pp.one_f_one_b(rank, 4, 8)) for rank in range(4)]
    lists[3].reverse()
    assert schedules.fault(lists, 1, 8) == "deadlock: ranks wait for each other"
    lists = [list(pp.afab(rank, 2, 3)) for rank in range(2)]
    lists[1][:2] = lists[1][1::-1]  # its first two forwards: no deadlock, and another's tensor
    assert schedules.fault(lists, 1, 3) == "rank 1 takes F in another order than rank 0 sends it"
    lists = [list(pp.zero_bubble(rank, 2, 3)) for rank in range(2)]
    lists[1][-2:] = lists[1][:-3:-1]
    assert schedules.fault(lists, 1, 3) == "rank 1 runs W in another order than B"


# ---- Messages ------------------------------------------------------------------------------------


def receiver(action, P, V):
    """The rank to which an action's result goes; None: it sends nothing."""
    stage = action.stage + {"F": 1, "B": -1}.get(action.kind, P * V)
    return stage % P if 0 <= stage < P * V else None


@pytest.mark.parametrize("name", SCHEDULES)
def test_messages_are_received_in_the_order_in_which_they_are_sent(name):
    """They have no tags: the nth that a rank takes from a channel has to be the one it needs."""
    for P, V, M, lists in all_settings(name, 4, 3, 9):
        sent, received = defaultdict(list), defaultdict(list)
        for rank, action in ((rank, a) for rank, actions in enumerate(lists) for a in actions):
            if needed := pp.producer(action, P * V):
                received[action.kind, needed.stage % P, rank].append(needed)
            if (to := receiver(action, P, V)) is not None:
                sent[action.kind, rank, to].append(action)
        assert sent == received and sum(map(len, sent.values())) == 2 * M * (P * V - 1), (P, V, M)


def gets_stuck(lists, V, slots):
    """Whether pp.py's engine does, if a message leaves only when its receive is posted, and a rank
    waits at a send until at most `slots` of its kind have not left (Pipeline.send: 1)."""
    P = len(lists)
    sent, posted, taken = Counter(), Counter(), Counter()  # of a channel: kind, who receives

    def run(rank):  # a step of the simulation at a time, or a wait
        actions = lists[rank]
        post(rank, actions[0])
        for action, later in zip(actions, [*actions[1:], None]):
            if pp.producer(action, P * V):
                taken[action.kind, rank] += 1
                while sent[action.kind, rank] < taken[action.kind, rank]:
                    yield
            post(rank, later)
            if (to := receiver(action, P, V)) is not None:
                channel = action.kind, to
                while slots and sent[channel] - posted[channel] >= slots:
                    yield
                sent[channel] += 1
                while not slots and sent[channel] > posted[channel]:
                    yield

    def post(rank, action):
        if action is not None and pp.producer(action, P * V):
            posted[action.kind, rank] += 1

    left, before = [run(rank) for rank in range(P)], None
    while left and before != (state := (len(left), sent.total(), posted.total())):
        before = state
        left = [rank for rank in left if next(rank, "done") != "done"]
    return bool(left)


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_schedule_deadlocks_where_sends_wait_for_their_receives(name):
    for P, V, M, lists in all_settings(name, 5, 3, 9):
        assert not gets_stuck(lists, V, slots=1), (P, V, M)
        if P > 1:
            last = [action for action in lists[0] if action.kind == "F"][-1]
            lists[0].append(lists[0].pop(lists[0].index(last)))  # it comes too late
            assert gets_stuck(lists, V, slots=1), (P, V, M)


def test_interleaved_needs_a_send_that_is_not_waited_for():
    for P, V, M, lists in all_settings("interleaved", 5, 3, 9):
        assert P == 1 or gets_stuck(lists, V, slots=0) == (M > P), (P, V, M)


# ---- On real ranks -------------------------------------------------------------------------------


@functools.cache
def measured(ranks, world, schedule, microbatches=4, how="full"):
    """Results of --mode bubble, one run for all tests; a microbatch is 64 tokens."""
    options = f"--schedule {schedule} --microbatches {microbatches} --recompute {how}"
    command = f"labs/schedules.py --model deep_untied --length 64 --bench-iters 1 {options}"
    return holds(ranks(world, command))["bubble"]


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_measured_step_has_each_action_and_waits(ranks, schedule):
    waits = measured(ranks, 2, schedule)
    actions = {"afab": 2, "1f1b": 2, "interleaved": 4, "zb": 3}[schedule]  # of a microbatch
    assert len(waits["timeline"]) == 2 * 4 * actions
    assert 0 < waits["bubble"] < 1 and 0 < waits["bubble_simulated"] < 1
    assert waits["in_flight"] == waits["in_flight_expected"]


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
def test_one_f_one_b_bounds_what_is_in_flight(ranks, world):
    afab, one, zb = (
        measured(ranks, world, name, 8)["in_flight"] for name in ("afab", "1f1b", "zb")
    )
    assert [afab, one, max(zb)] == [[8] * world, list(range(world, 0, -1)), world]


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("how", ["full", "none"])
def test_what_a_rank_keeps_is_what_the_schedule_says(ranks, schedule, how):
    """The bytes alive between actions, but for messages: to be received, and of each kind sent."""
    result = measured(ranks, 2, schedule, how=how)
    message = 64 * 48 * 4
    for kept, expected in zip(result["kept_bytes"], result["kept_bytes_expected"], strict=True):
        assert -message < kept - expected <= 3 * message, (kept, expected)
    more = 6 if how == "none" or schedule == "zb" else 0.5  # than the inputs of a layer
    assert min(result["kept_bytes_expected"]) > more * 2 * message, "of its two layers at least"
