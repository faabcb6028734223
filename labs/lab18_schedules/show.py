"""What the finished lab 18 shows: bubble, bytes and messages of each schedule, and timelines."""

import time
from functools import partial
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.distributed.pipelining import schedules as torchs_schedules

from labs.kit.alive import Alive
from labs.kit.harness import Traffic, on_ranks, table
from labs.kit.pictures import BLUE, GREEN, ORANGE, SKY, YELLOW, picture
from labs.lab18_schedules.check import messages_of, tiny

P, M, LENGTH, UNIT = 4, 8, 64, 0.1  # UNIT: seconds of a microbatch's forward in a whole rank
SIZES = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 8}
HIDDEN_BYTES = 4 * LENGTH * SIZES["hidden_size"]  # of a message: one sequence, float32
EAGER = "eager 1f1b"  # whose peak the reader predicts
TORCHS = {"afab": "GPipe", "1f1b": "1F1B", "interleaved": "Interleaved1F1B"}
TORCHS |= {"zbv": "ZBVZeroBubble", "dualpipev": "DualPipeV"}
HOW = {"peak_bytes": False, "peak_bytes_recomputed": True}  # whether layers are recomputed


def torchs_order(lab, name, P, M, V):
    """Every rank's actions by torch.distributed.pipelining's table, or None where it has none."""
    made = getattr(torchs_schedules, f"Schedule{TORCHS[name]}", None)
    if made is None:
        return None
    rounds = max(1, M // P)
    schedule = SimpleNamespace(pp_group_size=P, _num_stages=P, num_stages=P * V, n_local_stages=V)
    schedule._n_microbatches, schedule.microbatches_per_round = M, M // rounds
    if hasattr(made, "_calculate_single_rank_operations"):
        orders = [made._calculate_single_rank_operations(schedule, rank) for rank in range(P)]
    else:
        orders = made._get_pipeline_order(schedule).values()
    return [converted(lab, order) for order in orders]


def converted(lab, order):
    """A rank's actions by torch's: I is our B; a B beside some I is a B and its W."""
    parts = [part for action in order if action for part in action.sub_actions or [action]]
    parts = [
        (part.computation_type.value, part.stage_index, part.microbatch_index) for part in parts
    ]
    split = any(kind == "I" for kind, _, _ in parts)
    first = min(m for kind, _, m in parts if kind == "F")  # the table of 1F1B counts from 1 on the
    actions = []  # last rank (torch 2.13; its engine does not read it)
    for kind, stage, m in parts:
        if kind in "FIBW":
            m -= first if kind == "F" else 0
            actions.append(lab.Action(kind.replace("I", "B"), stage, m))
            if kind == "B" and split:
                actions.append(lab.Action("W", stage, m))
    return actions


def bubble(rows, ranks):
    """The part of the time, from the first begin to the last end, that ranks are idle (a mean)."""
    *_, begins, ends = zip(*rows)
    return 1 - (sum(ends) - sum(begins)) / (ranks * (max(ends) - min(begins)))


def cost(schedules, action):
    """An action's time, where a microbatch's forward in all stages of a rank takes 1, B as W."""
    own = next(actions for actions in schedules if action in actions)
    V, has_w = len({a.stage for a in own}), any(a.kind == "W" for a in own)
    return (1 if has_w or action.kind == "F" else 2) / V


def kept(lab, group, name, stage_count, recompute):
    """{(kind, stage): bytes} of a microbatch, for peak_kept()."""
    model = tiny("llama", False, torch.float32, **SIZES)
    lab.Pipeline(model, name, M, group, recompute)
    found = {}
    for stage in range(stage_count):
        decoder = lab.make_stage(model, stage, stage_count)
        x = torch.zeros(1, LENGTH, dtype=torch.long)
        targets, name = x, "input_ids"
        if stage:
            x, name = torch.zeros(1, LENGTH, SIZES["hidden_size"]).requires_grad_(), "inputs_embeds"

        def run(x, decoder=decoder, stage=stage, name=name, targets=targets):
            out = decoder(**{name: x}, use_cache=False).last_hidden_state
            if stage < stage_count - 1:
                return out
            return lab.microbatch_loss(model.lm_head(out), targets, 1)

        for kind, nbytes in lab.kept_bytes(model, run, x, Alive()).items():
            found[kind, stage] = nbytes
        for module in model.modules():
            getattr(module, "pending", []).clear()
    return found


def simulated(group, lab):
    """{schedule: what its order says}; DualPipeV's order is torch's."""
    orders = {name: lab.all_schedules(name, P, M) for name in lab.SCHEDULES}
    orders["dualpipev"] = torchs_order(lab, "dualpipev", P, M, 2)
    results, sizes = {}, {}
    for name, schedules in orders.items():
        if schedules is None:
            continue
        home = {a.stage: r for r, actions in enumerate(schedules) for a in actions}
        V, count = len(home) // P, len(home)
        times = {a.kind: cost(schedules, a) for a in schedules[0]}
        rows = lab.simulate(schedules, count, partial(cost, schedules))
        row = {"bubble": bubble(rows, P), "formula": None}
        row["simulated"] = [[rank, *action, begin, end] for rank, action, begin, end in rows]
        if name in lab.SCHEDULES:
            row["formula"] = lab.bubble_formula(P, M, V, times["F"], times["B"], times.get("W", 0))
        row["messages"] = M * sum(home[s] != home[s + 1] for s in range(count - 1))
        for how in HOW:
            key = "zb" if "W" in times else "1f1b", count, HOW[how]
            sizes[key] = sizes.get(key) or kept(lab, group, *key)
            row[how] = [lab.peak_kept(actions, sizes[key]) for actions in schedules]
        results[name] = row
    return results


def measured(group, lab, name):
    """A step of this rank: {"peak": bytes, "most": microbatches, "sent", "rows"}."""
    lab.SCHEDULES[EAGER] = (partial(eager, lab), 1)
    schedules = lab.all_schedules(name, group.size(), M)
    model = tiny("llama", False, torch.float32, **SIZES)
    pipe = lab.Pipeline(model, name, M, group)
    plain = {kind: getattr(pipe, kind) for kind in ("forward", "backward", "add_weight_gradients")}
    ids = torch.zeros(M, LENGTH, dtype=torch.long)
    seen, rows, most = [], [], []

    def looked(compute, action, received):
        result = compute(action, received)
        passing = (received, result) if action.kind == "B" else ()  # messages, not kept
        grads = [p.grad for p in model.parameters()]
        others = sum(x.nbytes for x in (*passing, *grads) if x is not None)
        seen.append(alive.now() - others)
        most.append(len(pipe.saved))
        return result

    def stretched(compute, action, received):
        begin = time.perf_counter()
        result = compute(action, received)
        end = begin + UNIT * cost(schedules, action)
        time.sleep(max(0, end - time.perf_counter()))
        rows.append([group.rank(), *action, begin, time.perf_counter()])
        return result

    for watch in (looked, stretched) if name != EAGER else (looked,):
        for kind, compute in plain.items():
            setattr(pipe, kind, partial(watch, compute))
        model.zero_grad()
        dist.barrier(group)
        with Traffic() as traffic, Alive() as alive:
            pipe.train_step(ids, ids)
    sent = traffic.ops.get("send")
    return {"peak": max(seen), "most": max(most), "sent": sent, "rows": rows}


def eager(lab, rank, P, M, V=1):
    """1F1B whose warmup is twice as long."""
    forwards, backwards = ([lab.Action(kind, rank, m) for m in range(M)] for kind in "FB")
    return lab.in_turn(forwards, backwards, min(2 * (P - 1 - rank), M))


def all_measured(group, lab):
    return {name: measured(group, lab, name) for name in (*lab.SCHEDULES, EAGER)}


def experiment(lab, args):
    """{"schedules": {name: what is simulated and measured}, "eager": microbatches, "failed"}."""
    results, failed = on_ranks(1, simulated, lab, timeout=120)[0], []
    ranks = on_ranks(P, all_measured, lab, timeout=180)
    print(f"\n{P} ranks, {M} microbatches of 1 x {LENGTH} tokens, 8 layers, float32")
    lines = [["schedule", "bubble", "formula", "messages", "KiB kept at the peak on each rank"]]
    lines[0] += ["layers recomputed"]
    for name, row in results.items():
        formula = "" if row["formula"] is None else f"{row['formula']:.4f}"
        line = [name, f"{row['bubble']:.4f}", formula, f"{row['messages']} each way"]
        lines.append(line + [in_kib(row[how]) for how in HOW])
        if row["formula"] and abs(row["formula"] - row["bubble"]) > 1e-9:
            failed.append(f"{name}: the formula is not what simulate() gives")
    table(*lines)
    lines = [["schedule", "bubble measured", "simulated with its times", "KiB measured", "sent"]]
    for name, row in results.items():
        if name not in lab.SCHEDULES:
            continue
        seen = [rank[name] for rank in ranks]
        row["measured"] = [each for one in seen for each in one["rows"]]
        row["measured_peaks"] = [one["peak"] for one in seen]
        seconds = {tuple(action): end - begin for _, *action, begin, end in row["measured"]}
        schedules = lab.all_schedules(name, P, M)
        again = lab.simulate(schedules, 1 + max(stage for _, stage, _ in seconds), seconds.get)
        sent = sum(one["sent"][0] for one in seen)
        line = [name, f"{bubble(row['measured'], P):.4f}", f"{bubble(again, P):.4f}"]
        lines.append([*line, in_kib(row["measured_peaks"]), f"{sent} messages"])
        if sent != 2 * row["messages"]:
            failed.append(f"{name}: {sent} messages sent, not {2 * row['messages']}")
        if sum(one["sent"][1] for one in seen) != sent * HIDDEN_BYTES:
            failed.append(f"{name}: messages of other bytes than (b, s, h)")
    table(*lines)
    afab, one = (results[name]["measured_peaks"][0] for name in ("afab", "1f1b"))
    print(f"\n1f1b saves {in_kib([afab - one])} of afab's {in_kib([afab])} KiB on rank 0")
    messages = [messages_of(lab.all_schedules("1f1b", 2, M), rank) for rank in (0, 1)]
    for slots, how in enumerate(("waits for its receive", "into a buffer ends at once")):
        stuck = lab.deadlock(*messages, slots)
        ends = f"ranks wait for ever in their messages {stuck}" if stuck else "both ranks end"
        print(f"1f1b on 2 ranks, where a send {how}: {ends}")
    results = {"schedules": results, "eager": ranks[0][EAGER]["most"], "failed": failed}
    return results


def in_kib(sizes):
    return " ".join(f"{size / 1024:.0f}" for size in sizes)


COLOURS = {("F", False): BLUE, ("F", True): SKY, ("B", False): ORANGE, ("B", True): YELLOW}
UNITS = {"simulated": 1, "measured": UNIT}
COLOURS |= {("W", False): GREEN, ("W", True): "#7FCFB6"}


def draw(results, path):
    """Each schedule's timeline, simulated and measured."""
    found = results["schedules"]
    mosaic = [[f"{name}, {how}" for how in UNITS] for name in found]
    with picture(path, mosaic, (16, 1.5 * len(found))) as axes:
        for name, row in found.items():
            for how, unit in UNITS.items():
                axis = axes[f"{name}, {how}"]
                axis.set_axis_off()
                if how in row:
                    draw_timeline(axis, row[how], unit)
                    axis.set_title(f"{name}, {how}: idle {bubble(row[how], P):.1%}", fontsize=9)


def draw_timeline(axis, rows, unit):
    """A row for each rank; the second of a rank's stages is paler."""
    start = min(begin for *_, begin, _ in rows)
    for rank, kind, stage, m, begin, end in rows:
        left, width = (begin - start) / unit, (end - begin) / unit
        colour = COLOURS[kind, stage >= P]
        axis.barh(rank, width, 0.9, left, color=colour, edgecolor="white", lw=0.5)
        look = {"ha": "center", "va": "center", "fontsize": 6}
        axis.text(left + width / 2, rank, m, **look)
    for rank in range(P):
        axis.text(-0.3, rank, f"rank {rank}", ha="right", va="center", fontsize=7)
    axis.set_xlim(0, 1.02 * max((end - start) / unit for *_, end in rows))
    axis.invert_yaxis()


PREDICT = (
    f"1F1B has a warmup twice as long, 2 (P - 1 - r) forwards: how many of {M} microbatches "
    f"does rank 0 of {P} keep at most?",
    "after the warmup each forward is followed by a backward: 2 (P - 1) + 1, where 1F1B keeps P; "
    "the bubble is the same, and messages have twice as long to arrive",
    lambda results: results["eager"],
)


def add_options(parser):
    """None of its own."""
