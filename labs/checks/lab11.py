"""Lab 11's checks: numbers, compared with the finished lab's. They need no ranks."""

import dataclasses
import random
import statistics

from experiments.runs import read_runs
from harness import LABS, expect, load

finished = load(LABS / "lab11_time.py")  # not the learner's
H100 = finished.H100


def expect_number(name, mine, right, hints=None):
    """Raise Wrong unless mine is right to 1e-9; hints {text: what a usual mistake gives}."""

    def close(other):
        return abs(mine - other) <= 1e-9 * max(abs(other), 1e-12)

    fine = isinstance(mine, int | float) and not isinstance(mine, bool)
    expect(fine, f"{name} is {type(mine).__name__}, not a number", "return the result")
    known = [text for text, other in (hints or {}).items() if close(other)]
    expect(close(right), f"{name} is {mine:.6g}, not {right:.6g}", known[0] if known else "")


def expect_numbers(name, mine, names, rights):
    """The same for a tuple or list of numbers, in order."""
    kind = type(mine).__name__
    expect(isinstance(mine, tuple | list), f"{name} returns {kind}, not {names}")
    expect(len(mine) == len(rights), f"{name} returns {len(mine)} numbers, not {names}")
    for part, one, right in zip(names.strip("()").split(", "), mine, rights):
        expect_number(part, one, right)


def some_model(rng):
    """A model of random sizes: as many KV heads as heads, or fewer."""
    heads = rng.choice([8, 16, 32])
    kv_heads, hidden = rng.choice([heads, heads // 4]), 128 * rng.randint(8, 64)
    layers, ffn, vocab = rng.randint(4, 60), 256 * rng.randint(8, 64), 1024 * rng.randint(8, 128)
    return finished.Model(layers, hidden, heads, kv_heads, ffn, vocab, rng.random() < 0.5)


def check_flops(lab, group, seed):
    rng = random.Random(seed)
    for _ in range(8):
        model, length = some_model(rng), 512 * rng.randint(1, 32)
        right = finished.flops_per_token(model, length)
        mine = lab.flops_per_token(model, length)
        if isinstance(mine, tuple | list) and len(mine) == 3:
            forward = "that is the forward alone; the backward has two matmuls for each of its"
            expect_number("layers", mine[0], right[0], {forward: right[0] / 3})
            masked = "without the mask's half; the convention counts every position"
            expect_number("attention", mine[1], right[1], {masked: right[1] / 2})
            twice = "the embedding is a lookup: it multiplies nothing"
            expect_number("head", mine[2], right[2], {twice: 2 * right[2]})
        expect_numbers("flops_per_token", mine, "(layers, attention, head)", right)
    parts = finished.flops_per_token(finished.MODELS["8B"], 4096)
    return f"8B, 4096 tokens: {sum(parts) / 1e9:.1f} GFLOP a token"


def check_mfu(lab, group, seed):
    rng = random.Random(seed)
    for _ in range(8):
        model, length, gpus = some_model(rng), 512 * rng.randint(1, 32), 2 ** rng.randint(1, 9)
        speed, peak = rng.uniform(1e3, 1e6), rng.choice([312e12, 989e12])
        right = finished.mfu(model, length, speed, gpus, peak)
        hints = {"the tokens are of all GPUs, the peak is of one": right * gpus}
        hints |= {"tokens_per_second is of all GPUs already": right / gpus}
        hints["a fraction, not percent"] = 100 * right
        expect_number("mfu", lab.mfu(model, length, speed, gpus, peak), right, hints)
    rows = read_runs()
    row = next(row for row in rows if row["nodes"] == row["pp"] == row["tp"] == "1")
    mine = lab.mfu(finished.MODELS[row["model"]], 4096, 8 * float(row["tok_s_gpu"]), 8, H100.peak)
    return f"a run of {row['model']}: {mine:.1%}; it logged {row['mfu_percent']}%"


def check_roofline(lab, group, seed):
    rng, bound = random.Random(seed), {"compute": 0, "memory": 0}
    for rows in (1, 8, 64, 4096, 65536):
        inputs, outputs = 128 * rng.randint(8, 64), 128 * rng.randint(8, 64)
        compute = 2 * rows * inputs * outputs / H100.matmul
        memory = 2 * (rows * inputs + inputs * outputs + rows * outputs) / H100.memory
        bound["compute" if compute > memory else "memory"] += 1
        hints = {"the slower limit decides, not their sum": compute + memory}
        hints |= {"the slower limit is the larger time": min(compute, memory)}
        hints |= {"a bf16 number has 2 bytes": max(compute, memory / 2)}
        name = f"the matmul ({rows}, {inputs}) x ({inputs}, {outputs})"
        mine = lab.matmul_seconds(rows, inputs, outputs, H100)
        expect_number(name, mine, max(compute, memory), hints)
    return f"{bound['compute']} matmuls bound by compute, {bound['memory']} by memory"


def check_ring(lab, group, seed):
    rng = random.Random(seed)
    for ranks, in_node in (2, 2), (8, 8), (16, 8), (64, 4), (32, 1), (24, 8), (1, 1):
        message, nodes = rng.uniform(1e5, 1e10), ranks // in_node
        right = finished.ring_seconds(message, ranks, in_node, H100)
        hops = (ranks - 1) * H100.hop
        whole = message / (ranks - 1) * ranks if ranks > 1 else message
        all_of_it = finished.ring_seconds(whole, ranks, in_node, H100)
        hints = {"a rank sends (ranks - 1) / ranks of the message": all_of_it}
        hints["a ring inside a node has no hop"] = right + hops
        hints["each step of a ring that leaves the node costs a hop"] = right - hops * (nodes > 1)
        hints["a ring has ranks - 1 steps"] = right + H100.hop
        sent = message * (ranks - 1) / ranks
        hints["spread: for each node after the first"] = right + sent * H100.spread
        alone = 1 / H100.network - 1 / (in_node * H100.network)
        hints["each of the in_node GPUs has an adapter of its own"] = right + sent * alone
        name = f"{message / 1e6:.3g} MB over {ranks} ranks, {in_node} a node,"
        expect_number(name, lab.ring_seconds(message, ranks, in_node, H100), right, hints)
    small, large = (1e3 * finished.ring_seconds(size, 16, 8, H100) for size in (1e3, 1e9))
    return f"16 ranks of 2 nodes: 1 kB takes {small:.2f} ms, 1 GB {large:.2f}"


def check_overlap(lab, group, seed):
    rng = random.Random(seed)
    for _ in range(20):
        message, matmul, tp = rng.uniform(0, 4), rng.uniform(0, 4), 2 ** rng.randint(0, 4)
        own, full = max(0, message - matmul / tp), max(0, message - matmul)
        column = {"in the forward its own tokens' matmul alone hides the gather": 3 * full}
        column["the backward gathers again and scatters"] = own + full
        row = {"the backward's gather runs beside its own 1/tp of dx": message + full}
        row["nothing hides the forward's reduce-scatter"] = 2 * own
        row["the backward gathers dy"] = message
        hints = {"column": column, "row": row}
        for way in "column", "row":
            mine = lab.exposed_seconds(way, message, matmul, tp)
            right = finished.exposed_seconds(way, message, matmul, tp)
            name = f"{way}, message {message:.3g} s, matmul {matmul:.3g} s, tp {tp}: exposed"
            expect_number(name, mine, right, hints[way])
    column, row = (lab.exposed_seconds(way, 1.0, 1.0, 8) for way in ("column", "row"))
    return f"messages as long as a matmul, tp 8: exposed {column:.2f} of 3 (column), {row:.2f} of 2"


def check_host(lab, group, seed):
    rng = random.Random(seed)
    for _ in range(20):
        device, host = rng.uniform(0.1, 2), rng.uniform(0.1, 2)
        right = finished.host_gap(device, host)
        hints = {"forward and backward apart: one may wait for the host": max(0, host - device)}
        hints["how long the device waits, not how long it takes in all"] = device + right
        name = f"device {device:.3g} s, host {host:.3g} s: the gap"
        expect_number(name, lab.host_gap(device, host), right, hints)
    return f"host and device 12 s each: the device waits {lab.host_gap(12, 12):.0f}"


def check_bubble(lab, group, seed):
    rng = random.Random(seed)
    for _ in range(8):
        slowest, stages, count = rng.uniform(0.1, 2), rng.randint(2, 32), rng.randint(1, 64)
        work, bubble = count * slowest, (stages - 1) * slowest
        mine = lab.pipeline_seconds(slowest, stages, count)
        if isinstance(mine, tuple | list) and len(mine) == 2:
            hints = {"without the bubble, which is the second number": work + bubble}
            expect_number("work", mine[0], work, hints)
            hints = {"the stage itself is none of the others": stages * slowest}
            hints |= {"once a step, not once a microbatch": count * bubble}
            expect_number("bubble", mine[1], bubble, hints)
        expect_numbers("pipeline_seconds", mine, "(work, bubble)", (work, bubble))
    work, bubble = lab.pipeline_seconds(1.0, 4, 12)
    return f"4 stages, 12 microbatches: {bubble / (work + bubble):.0%} of the step is bubble"


def check_gradients(lab, group, seed):
    rng, saved = random.Random(seed), []
    for tp in 1, 2, 8, 16:
        for dp in 1, 2, 16, 64:
            weights = rng.uniform(1e8, 1e10)
            both = finished.gradient_seconds(weights, dp, tp, 0, 0.0, H100)  # nothing hidden
            backward = both * (1.5 if dp == 64 else rng.uniform(0.1, 0.2))
            for zero in 0, 1:
                args = weights, dp, tp, zero, backward, H100
                right, hints = finished.gradient_seconds(*args), {}
                if zero:
                    hidden = max(0, right - backward)
                    hints["the runs show nothing that hides zero 1's messages"] = hidden
                else:
                    hints["the last microbatch's backward hides some of it"] = both
                    one = max(0, both / 2 - backward)
                    hints["an all-reduce is a reduce-scatter and an all-gather"] = one
                    hints["no more can be hidden than there is"] = both - backward
                fewer = finished.gradient_seconds(weights / 2, *args[1:])
                hints["gradients are float32: 4 bytes"] = fewer
                every = finished.gradient_seconds(weights, dp, 1, *args[3:])
                hints["a node's GPUs are shared by its tp ranks"] = every
                name = f"tp {tp}, dp {dp}, zero {zero}: gradients' seconds"
                expect_number(name, lab.gradient_seconds(*args), right, hints)
                saved.append(right)
    return f"{len(saved)} groups of ranks, up to {max(saved):.2f} s"


def check_predict_run(lab, group, seed):
    rng, off = random.Random(seed), []
    rows = read_runs()
    odd = [r for r in rows if int(r["dp"]) * int(r["mbs"]) * int(r["gradacc"]) != int(r["gbs"])]
    for row in [*rng.sample(rows, 30), *odd]:
        right, mine = finished.predict_run(row), lab.predict_run(row)
        gpus = 8 * int(row["nodes"])
        hints = {"a GPU's tokens, not all GPUs'": right * gpus}
        made = int(row["dp"]) * int(row["mbs"]) * int(row["gradacc"])
        hints["count the sequences that dp, mbs and gradacc make"] = right * 256 / made
        hints["of all dp replicas"] = right / int(row["dp"])
        hints["zero is in the row"] = finished.predict_run(row | {"zero": "0"})
        name = ", ".join(f"{key} {row[key]}" for key in ("model", "dp", "pp", "tp", "mbs"))
        expect_number(f"{name}: tokens a second a GPU", mine, right, hints)
        slower = dataclasses.replace(H100, other=1e3)
        expect(lab.predict_run(row, slower) < mine, "the cluster changes nothing", "pass it on")
        if row["pp"] == "1":
            off.append(abs(mine / float(row["tok_s_gpu"]) - 1))
    return f"{len(off)} without a pipeline: half are off by {statistics.median(off):.0%} or less"


def check_score(lab, group, seed):
    rng = random.Random(seed)
    for _ in range(10):
        runs = [("alone", 1.0, 1.5)]
        for case in "abcde":
            speeds = [rng.uniform(1, 10) for _ in range(rng.randint(2, 6))]
            runs += [(case, speed * rng.uniform(0.75, 1.3), speed) for speed in speeds]
        rng.shuffle(runs)
        before = list(runs)
        right, mine = finished.score(runs), lab.score(runs)
        expect(runs == before, "score() changes the list of runs", "sorted(), not sort()")
        expect(isinstance(mine, dict), f"score is {type(mine).__name__}, not a dict")
        expect(set(mine) == set(right), f"score has {sorted(mine)}, not {sorted(right)}")
        slow = [(case, 1 / p, 1 / m) for case, p, m in runs]
        inverse, mixed = finished.score(slow), finished.score([("", p, m) for _, p, m in runs])
        hints = {"relative to what was measured": "median"}
        for key, value in right.items():
            said = {text: inverse[key] for text in hints}
            said["pairs and picks within one case"] = mixed[key]
            expect_number(key, float(mine[key]), float(value), said)
    return ", ".join(f"{key} {value:.2f}" for key, value in right.items())


def check_waiting(lab, group, seed):
    rng = random.Random(seed)
    for noise in 0.0, 0.5:
        a, b = rng.uniform(0.2, 2), rng.uniform(0.1, 1)
        runs = [(rng.choice([16, 32, 64]), rng.choice([2, 4, 8, 16])) for _ in range(20)]
        runs = [(m, p, a * m + b * (p - 1) + rng.uniform(-noise, noise)) for m, p in runs]
        before = list(runs)
        right, mine = finished.waiting(runs), lab.waiting(runs)
        expect(runs == before, "waiting() changes the list of runs", "a list of its own")
        all_stages = finished.waiting([(m, p + 1, seconds) for m, p, seconds in runs])
        kind = f"waiting returns {mine}"
        expect(isinstance(mine, tuple | list) and len(mine) == 2, kind, "return (a, b)")
        counted = "(stages - 1), not the stages"
        for name, one, value, other in zip("ab", mine, right, all_stages):
            near = abs(one - value) <= 1e-6 * abs(value)
            hint = counted if abs(one - other) <= 1e-6 * abs(other) else "all runs at once"
            expect(near, f"{name} is {one:.6g}, not {value:.6g}", hint)
    return f"a {mine[0]:.2f}, b {mine[1]:.2f}"


def check_strategies(lab, group, seed):
    rng = random.Random(seed)
    for _ in range(6):
        model, ranks, length = some_model(rng), 2 ** rng.randint(1, 3), 1024 * rng.randint(1, 64)
        for name in "tp", "sp", "ulysses", "ulysses_sharded", "pp":
            right = finished.strategy_messages(model, name, ranks, length)
            mine = lab.strategy_messages(model, name, ranks, length)
            ops = sorted(op for op, *_ in right)
            expect(sorted(op for op, *_ in mine) == ops, f"{name}: {mine}, not {ops}")
            for (op, calls, size), (_, count, total) in zip(sorted(right), sorted(mine)):
                again = {"a layer is recomputed: what its forward sends, again": calls * 2 / 3}
                expect_number(f"{name}'s calls of {op}", count, calls, again)
                hints = {"of all calls together": size / calls}
                hints["what a layer sends again when it is recomputed"] = size * 2 / 3
                if op == "all_to_all":
                    hints["of the rank's own length / ranks tokens"] = size * ranks
                    hints["k and v have kv_heads heads"] = (
                        size * 4 / (2 + 2 * model.kv_heads / model.heads)
                    )
                expect_number(f"{name}'s bytes of {op}", total, size, hints)
    return "tp, sp, ulysses, ulysses_sharded, pp: every message"


def embedding_counted(lab):
    """The FLOPs count the embedding as if it were a matmul."""

    def wrong(model, length):
        layers, attention, head = finished.flops_per_token(model, length)
        return layers, attention, 2 * head

    lab.flops_per_token = wrong


def network_without_latency(lab):
    """A ring between nodes is as fast for one byte as its bandwidth says."""

    def wrong(message, ranks, in_node, cluster):
        hops = (ranks - 1) * cluster.hop * (ranks > in_node)
        return finished.ring_seconds(message, ranks, in_node, cluster) - hops

    lab.ring_seconds = wrong


def one_gpus_peak(lab):
    """MFU: the tokens of all GPUs over the peak of one."""

    def wrong(model, length, tokens_per_second, gpus, peak):
        return finished.mfu(model, length, tokens_per_second, 1, peak)

    lab.mfu = wrong


CHECKS = {
    "flops": (check_flops, 1),
    "mfu": (check_mfu, 1),
    "roofline": (check_roofline, 1),
    "ring": (check_ring, 1),
    "overlap": (check_overlap, 1),
    "host": (check_host, 1),
    "bubble": (check_bubble, 1),
    "gradients": (check_gradients, 1),
    "predict_run": (check_predict_run, 1),
    "score": (check_score, 1),
    "waiting": (check_waiting, 1),
    "strategies": (check_strategies, 1),
}
BUGS = [embedding_counted, network_without_latency, one_gpus_peak]
