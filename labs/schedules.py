"""pp.py's schedules: drawn, timed and counted on paper, or measured on real ranks.

    python labs/schedules.py --schedule 1f1b --ranks 4 --microbatches 6  # on paper, one process
    torchrun --nproc_per_node=2 labs/schedules.py --schedule zb          # measured

On paper (--mode schedule) it draws a schedule, checks its order, times it by pp.simulate() and by a
formula, and counts what each rank keeps. Under torchrun (--mode bubble) it measures how long ranks
are idle, and what they keep. Other options are pp.py's; results/plot.py draws what --json writes.
"""

import math
import os
import statistics
import sys
import time
from itertools import product
from pathlib import Path

import torch
import transformers
from torch.distributed.elastic.multiprocessing.errors import record

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import pp  # noqa: E402

pp_finalize_args = pp.finalize_args


# ---- A schedule on paper -------------------------------------------------------------------------


def fault(schedules, V, M):
    """What is wrong with a schedule, given as every rank's list of actions; "" if nothing is."""
    P = len(schedules)
    kinds = {"F", "B"} | {action.kind for actions in schedules for action in actions}
    for rank, actions in enumerate(schedules):
        each = product(sorted(kinds), pp.stages_of(rank, P, V), range(M))
        if sorted(actions) != list(each):
            return f"rank {rank} does not do each of its actions once"
        b_order = [action for action in actions if action.kind == "B"]
        w_order = [action._replace(kind="B") for action in actions if action.kind == "W"]
        if w_order not in ([], b_order):  # W takes the microbatch that has waited longest
            return f"rank {rank} runs W in another order than B"
    if len(pp.simulate(schedules, P * V, lambda action: 1)) < sum(map(len, schedules)):
        return "deadlock: ranks wait for each other"
    # Messages have no tags, so they have to be received in the order in which they are sent
    for rank, kind in product(range(P), "FB"):
        received = [pp.producer(a, P * V) for a in schedules[rank] if a.kind == kind]
        sender = (rank - 1 if kind == "F" else rank + 1) % P
        places = [schedules[sender].index(action) for action in received if action is not None]
        if places != sorted(places):
            return f"rank {rank} takes {kind} in another order than rank {sender} sends it"
    return ""


def bubble(rows, ranks):
    """The part of the time, from the first begin to the last end, that ranks are idle (a mean)."""
    _, _, begins, ends = zip(*rows)
    return 1 - (sum(ends) - sum(begins)) / (ranks * (max(ends) - min(begins)))


def bubble_formula(P, M, V, forward, backward, weights=0.0):
    """bubble() in closed form, from the times of a stage's F, B, W. The last rank is idle for P - 1
    F before its first F, and for P - 1 B after its last B, until the first rank's last B ends. With
    zb it still has P W to run then, and the first rank has one, so it is idle for P - 1 W less. In
    all every rank is idle equally long. None where zb's W do not fit between its F and B."""
    if weights and (M < P or weights > min(forward, backward)):
        return None
    busy = V * M * (forward + backward + weights)
    idle = (P - 1) * (forward + backward - weights)
    return idle / (busy + idle)


def peak_kept(actions, kept):
    """The most that a rank keeps at once while it runs its actions. kept["F", stage]: what a
    microbatch keeps there from its F to its B; kept["B", stage]: from its B to its W."""
    now, most = 0, 0
    for action in actions:
        if action.kind == "F":
            now += kept["F", action.stage]
        elif action.kind == "B":
            now += kept["B", action.stage] - kept["F", action.stage]
        else:
            now -= kept["B", action.stage]
        most = max(most, now)
    return most


def most_in_flight(actions):
    """Most (stage, microbatch) pairs that a rank keeps at once: from F to B, and with zb to W."""
    has_w = any(action.kind == "W" for action in actions)
    kept = {("F", action.stage): 1 for action in actions}
    return peak_kept(actions, kept | {("B", action.stage): int(has_w) for action in actions})


def draw(rows, P, unit, width=88):
    """The start of a timeline as lines of text, a line for a rank, a column for a unit of time."""
    grid = [["."] * round(max(end for *_, end in rows) / unit) for _ in range(P)]
    for rank, action, begin, end in rows:
        first, last = round(begin / unit), round(end / unit)
        name = str(action) if action.stage == rank else str(action).lower()  # a later stage
        grid[rank][first:last] = [name] + ["--"] * (last - first - 1)
    cell = 1 + max(len(name) for names in grid for name in names)
    more = " ..." if len(grid[0]) > width // cell else ""
    lines = ["".join(name.ljust(cell) for name in names[: width // cell]) for names in grid]
    return [f"  rank {rank:<3} {line}".rstrip() + more for rank, line in enumerate(lines)]


# ---- What a microbatch keeps ---------------------------------------------------------------------


def alive(meter):
    """Bytes of all tensors alive."""
    return sum(storage.nbytes() for storage in meter.alive.values())


def attention_on_meta(module, query, key, value, mask, **others):
    """The kernel that a CPU takes. On meta PyTorch would choose one that keeps all scores."""
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return flash(query, key, value, 0.0, True)[0].transpose(1, 2), None


def kept_bytes(args, stage_count):
    """{(kind, stage): bytes} for peak_kept(): what the largest microbatch keeps in a stage. The
    stages run on the device "meta", whose tensors have shapes and no data."""
    transformers.AttentionInterface.register("on_meta", attention_on_meta)
    attention = "eager" if args.attn == "eager" else "on_meta"
    how = {"dtype": getattr(torch, args.dtype), "attn_implementation": attention}
    shape = math.ceil(args.batch / args.microbatches), args.length
    kept = {}
    with torch.device("meta"):
        ids = torch.zeros(shape, dtype=torch.int64)
        model = transformers.AutoModelForCausalLM.from_config(args.config, **how).train()
        if args.schedule == "zb":
            pp.defer_weight_gradients(model)
        if args.recompute == "full":
            pp.recompute_layers(model)
        for number in range(stage_count):
            stage = pp.Stage(model, number, stage_count)
            with pp.Meter() as meter:
                before = alive(meter)
                x = ids
                if number > 0:
                    x = torch.zeros(*shape, args.config.hidden_size, dtype=model.dtype)
                    x.requires_grad_()
                out = stage(x)
                if number == stage_count - 1:
                    out = pp.microbatch_loss(model, out, ids, 1, args)
                kept["F", number] = alive(meter) - before
                torch.autograd.backward(out, torch.zeros_like(out))
                x = out = None
                model.zero_grad()
                kept["B", number] = alive(meter) - before  # in DeferredLinears, for W; else nothing
    return kept


def by_schedule(schedules, args):
    """What each rank keeps at most: (stage, microbatch) pairs, and bytes."""
    kept = kept_bytes(args, len(schedules) * args.virtual_stages)
    in_flight = [most_in_flight(actions) for actions in schedules]
    return in_flight, [peak_kept(actions, kept) for actions in schedules]


# ---- The two modes -------------------------------------------------------------------------------


def report(rows, columns):
    """Print each rank's times, and columns {title: a number for each rank}."""
    _, _, begins, ends = zip(*rows)
    span = max(ends) - min(begins)
    table = []
    for rank, numbers in enumerate(zip(*columns.values())):
        busy = sum(end - begin for r, _, begin, end in rows if r == rank)
        row = {"rank": rank, "busy": busy, "idle": span - busy}
        table.append(row | dict(zip(columns, numbers)))
    pp.print_table(table)


def show_schedule(args, group):
    """--mode schedule: draw and time the schedule of args.ranks ranks, on one."""
    P, M, V = args.ranks, args.microbatches, args.virtual_stages
    times = {"F": 1 / V, "B": 2 / V}  # the unit is the forward of all of a rank's stages
    if args.schedule == "zb":
        times = {"F": 1.0, "B": 1.0, "W": 1.0}
    if args.recompute == "full":
        times["B"] += times["F"]  # the backward begins with another forward
    shown = [f"{kind} {number:.3g}" for kind, number in times.items()]
    pp.print0(f"  {P} ranks on paper, --recompute {args.recompute}, times:", *shown)
    schedules = pp.all_schedules(args, P)
    rows = pp.simulate(schedules, P * V, lambda action: times[action.kind])
    pp.print0("\n".join(draw(rows, P, 1 / V)))
    in_flight, peaks = by_schedule(schedules, args)
    columns = {"most kept: microbatches": [n / V for n in in_flight]}
    report(rows, columns | {"MiB": [n / 2**20 for n in peaks]})
    simulated, formula = bubble(rows, P), bubble_formula(P, M, V, *times.values())
    by_formula = "there is no formula" if formula is None else f"by the formula {formula:.4f}"
    wrong = fault(schedules, V, M)
    result = {
        "passed": not wrong and (formula is None or abs(simulated - formula) < 1e-9),
        "schedule": args.schedule,
        "ranks": P,
        "virtual_stages": V,
        "bubble": simulated,
        "bubble_formula": formula,
        "in_flight": in_flight,
        "kept_bytes": peaks,
        "timeline": [[rank, *action, begin, end] for rank, action, begin, end in rows],
    }
    return f"{wrong or 'no deadlock'}; the bubble is {simulated:.4f}, {by_formula}", result


class TimedPipeline(pp.Pipeline):
    """Leaves a timeline, rows like simulate()'s, and peak, which most_in_flight() predicts."""

    def __init__(self, model, group, args):
        super().__init__(model, group, args)
        self.rank, self.device = group.rank(), args.device
        self.after_action = lambda: None  # measure_bubble() looks at the memory

    def run(self, *batch):
        self.timeline, self.peak, self.start = [], 0, self.now()
        return super().run(*batch)

    def compute(self, action, received, batch):
        begin = self.now() - self.start
        result = super().compute(action, received, batch)
        self.timeline.append((self.rank, action, begin, self.now() - self.start))
        # In each DeferredLinear the same microbatches wait for W, so look at the first
        waiting_for_w = len(self.deferred[0].pending) if self.deferred else 0
        self.peak = max(self.peak, len(self.saved) + waiting_for_w)
        self.after_action()
        return result

    def now(self):
        if self.device.type == "cuda":  # only this stream: others may wait for the next message
            torch.cuda.current_stream().synchronize()
        return time.perf_counter()


def measure_times(model, batch, group, args):
    """Rows like simulate()'s, of all ranks: of the timed steps that with the median bubble."""
    steps = []
    for _ in range(1 + args.bench_iters):  # the first warms up
        model.zero_grad()
        pp.gather_objects(None, group)  # the ranks begin together
        pp.forward_backward(model, *batch, group, args)
        steps.append(sum(pp.gather_objects(model.pipeline.timeline, group), []))
    return sorted(steps[1:], key=lambda rows: bubble(rows, group.size()))[args.bench_iters // 2]


def measure_bubble(args, group):
    """--mode bubble: how long ranks are idle in a step, and what each keeps at its peak. The
    verdict is about the number of microbatches that a rank keeps."""
    P, M, V = group.size(), args.microbatches, args.virtual_stages
    model = pp.parallelize(pp.load_model(args), group, args)
    batch, schedules = pp.proof_batch(args, group), pp.all_schedules(args, P)
    rows = measure_times(model, batch, group, args)
    seconds = {action: end - begin for _, action, begin, end in rows}
    kinds = "FBW" if args.schedule == "zb" else "FB"
    means = [statistics.mean(t for a, t in seconds.items() if a.kind == kind) for kind in kinds]
    measured, formula = bubble(rows, P), bubble_formula(P, M, V, *means)
    simulated = bubble(pp.simulate(schedules, P * V, seconds.get), P)
    with pp.Meter() as meter:
        meter.see([p.grad for p in model.parameters()])  # of the last step, so they do not count
        before, kept = alive(meter), []
        model.pipeline.after_action = lambda: kept.append(alive(meter) - before)
        pp.forward_backward(model, *batch, group, args)
    peaks = pp.gather_objects(max(kept), group)
    in_flight = pp.gather_objects(model.pipeline.peak, group)
    expected, expected_peaks = by_schedule(schedules, args)
    columns = {"most kept: microbatches": [n / V for n in in_flight]}
    columns["expected"] = [n / V for n in expected]
    columns["MiB"] = [n / 2**20 for n in peaks]  # with the messages that are under way
    report(rows, columns | {"expected MiB": [n / 2**20 for n in expected_peaks]})
    bubbles = {
        "measured: with the wait for messages": measured,
        "simulated from the measured times: without messages, but stages differ": simulated,
        "by formula: neither": formula,
    }
    pp.print_table([{"idle, of all time": how, "": part} for how, part in bubbles.items()])
    result = {
        "passed": in_flight == expected,
        "bubble": measured,
        "bubble_simulated": simulated,
        "bubble_formula": formula,
        "in_flight": in_flight,
        "in_flight_expected": expected,
        "kept_bytes": peaks,
        "kept_bytes_expected": expected_peaks,
        "timeline": [[rank, *action, begin, end] for rank, action, begin, end in rows],
    }
    return f"ranks are idle {measured:.0%}; in flight {in_flight}, expected {expected}", result


def finalize_args(args, world):
    """pp.finalize_args(); --mode schedule has --ranks ranks, of which some may have no layer."""
    layers = args.config.num_hidden_layers
    if args.mode == "all":
        raise pp.UsageError("--mode all is not for this script; use schedule or bubble")
    if args.mode == "schedule":
        world = args.ranks
        args.config.num_hidden_layers = max(layers, world * (args.virtual_stages or 2))
    pp_finalize_args(args, world)
    args.config.num_hidden_layers = layers


def main():
    """pp.main() with these modes."""
    pp.OPTIONS["--ranks"] = {"type": int, "default": 4, "help": "ranks for --mode schedule (4)"}
    pp.MODES = {"schedule": show_schedule, "bubble": measure_bubble}
    pp.Pipeline, pp.finalize_args = TimedPipeline, finalize_args
    mode = "bubble" if "LOCAL_RANK" in os.environ else "schedule"
    return pp.main(["--mode", mode, "--dtype", "float32", *sys.argv[1:]])  # the last of each counts


if __name__ == "__main__":
    sys.exit(record(main)())
