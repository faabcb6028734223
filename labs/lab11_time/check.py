"""Lab 11's checks: numbers, compared with the finished lab's. They need no ranks."""

import copy
import dataclasses
import itertools
import random
import statistics
from functools import partial
from numbers import Real

import numpy as np

from labs.kit.compare import mistaken, tried
from labs.kit.harness import Wrong, expect
from labs.kit.usual import alike, section, usual_hint
from labs.lab11_time import lesson as finished  # not the learner's
from labs.lab11_time.runs import consistent, measured, read_runs

H100 = finished.H100

FORMS = {  # what a function returns, if not a number
    "flops_per_token": "(layers, attention, head)",
    "pipeline_seconds": "(work, bubble)",
    "waiting": "(a, b)",
    "score": "{median, within_10, within_20, ordered, picks}",
    "strategy_messages": "[(op, calls, bytes), ...]",
}
MISTAKES = """
== flops_per_token
3 * model.layers -> model.layers  # the forward alone: the backward has two matmuls for each
6 * model. -> 2 * model.  # the forward alone: the backward has two matmuls for each
6 * model. -> 3 * model.  # a multiplication and an addition are two operations
(2 * length -> (length  # half: two products; the convention counts every position
model.layers * ->  # of all layers, not of one
hidden) -> hidden * model.kv_heads / model.heads)  # every query head multiplies
hidden) -> hidden / model.heads)  # every query head multiplies
hidden) -> hidden * model.heads)  # hidden is the features of all heads together
6 * model.head -> 12 * model.head  # the embedding is a lookup: it multiplies nothing
6 * -> 6 * length *  # for a token, not for a sequence
(2 * length -> (2 * length * length  # for a token, not for a sequence
6 * model.head_weights -> 6 * model.head_weights * (not model.tied)  # a tied head multiplies, too
6 * model. -> 8 * model.  # what training needs: nothing is recomputed
6 * model. -> 4 * model.  # the backward has two matmuls for each of the forward
3 * model.layers -> 2 * model.layers  # the backward has two matmuls for each of the forward
(layers, attention, head): 6 for each weight; 3 times two products of 2 * length * hidden a layer
== mfu
(gpus * peak) -> peak  # the tokens are of all GPUs, the peak is of one
return -> return 1 / gpus *  # tokens_per_second is of all GPUs already
return -> return 100 *  # a fraction, not percent
return -> return length *  # flops_per_token() is of one token: nothing to multiply by length
)) / -> )[::2]) /  # layers, attention and head together
(gpus * peak) -> gpus * peak  # a / b * c is (a / b) * c: parentheses
* peak -> * H100.peak  # the peak is an argument
layers, attention and head together, of all tokens of a second; over gpus * peak
== matmul_seconds
max(compute, -> (compute +  # the slower limit decides, not their sum
max( -> min(  # the slower limit is the larger time
BF16 * -> 1 *  # a bf16 number has 2 bytes
BF16 -> FP32  # a bf16 number has 2 bytes
/ cluster.matmul -> / cluster.memory  # operations over cluster.matmul, bytes over cluster.memory
2 * rows -> rows  # a multiplication and an addition are two operations
cluster.matmul -> cluster.peak  # cluster.matmul is what matmuls reach, peak is the data sheet's
cluster. -> H100.  # the cluster is an argument
both factors are read, the result is written: bytes over cluster.memory
== ring_seconds
* (ranks - 1) / ranks ->  # a rank sends (ranks - 1) / ranks of the message
return sent -> return (ranks - 1) * cluster.hop + sent  # a ring inside a node has no hop
(ranks - 1) * c -> 0 * c  # each step of a ring that leaves the node costs a hop
(ranks - 1) * c -> c  # each step of a ring that leaves the node costs a hop
(ranks - 1) * c -> ranks * c  # a ring has ranks - 1 steps
(nodes - 1) * -> nodes *  # spread: for each node after the first
(nodes - 1) * -> 1 *  # spread: for each node after the first
if nodes <= 1 -> if False  # inside one node: nvlink, no network and no hop
/ cluster.nvlink -> / (in_node * cluster.nvlink)  # nvlink is the rate of the whole ring
(in_node * cluster.network) -> cluster.network  # each of the in_node GPUs has an adapter of its own
ranks / in_node -> ranks / cluster.node  # in_node says how many of the ranks share a node
in a node bytes over nvlink; else a hop a step, and for each byte the network and the spread
== exposed_seconds
return message + b -> return message + max(0, message - matmul); b  # hidden by its own 1/tp of dx
matmul / tp -> matmul  # in the forward its own tokens' matmul alone hides the gather
2 * max( -> max(  # the backward gathers again and scatters
return message + b -> return beside_own + b  # nothing hides the forward's reduce-scatter
return message + beside_own -> return message  # the backward gathers dy
2 * max(0.0, message -> max(0.0, 2 * message  # dx hides one message, dW another
beside_own + 2 * max(0.0, message -> max(0.0, 3 * message - 2 *  # each by itself, at least 0
way == "row" -> way != "row"  # row and column are exchanged
- matmul) -> - matmul / tp)  # in the backward whole matmuls hide a column's messages
of each message of the table what is longer than what it runs beside, at least 0
== host_gap
forward + backward -> max(0, host - device)  # forward and backward apart: 1/3 and 2/3, each >= 0
return forward -> return max(forward, backward); forward  # both may wait: the sum
return -> return device +  # how long the device waits, not how long it takes in all
device * 2 -> device  # the forward has a third of the device's work, the backward two
host / 2 - device / 3 -> host / 3 - device / 3  # each has half of the host's work
half of the host's work against a third of the device's, then two thirds; each at least 0
== pipeline_seconds
(stages - 1) -> stages  # the stage itself is none of the others
(stages - 1) -> microbatches * (stages - 1)  # once a step, not once a microbatch
return microbatches -> return (microbatches + stages - 1)  # without the bubble, the second number
(stages - 1) -> 2 * (stages - 1)  # slowest is a forward and a backward together
microbatches * slowest -> microbatches * slowest * stages  # the stages work at the same time
microbatches * slowest -> slowest  # of all microbatches
(stages - 1) * slowest -> (stages - 1) * slowest / microbatches  # slowest is of one microbatch
(stages - 1) * slowest -> (stages - 1) / (microbatches + stages - 1)  # seconds, not a fraction
(work, bubble): each of all microbatches; once for each other stage
== gradient_seconds
2 * ring - last_backward -> 2 * ring  # the last microbatch's backward hides some of it
max(0.0, 2 * ring - last_backward) -> max(0.0, ring - last_backward) + ring  # both are hidden
2 * ring -> ring  # an all-reduce is a reduce-scatter and an all-gather
zero == 0 -> zero == 1  # zero 0 has the all-reduce, zero 1 gathers weights
max(0.0, 2 * ring -> 2 * max(0.0, ring  # last_backward seconds are hidden of both together
max(0.0, -> max(-1e9,  # no more can be hidden than there is
return ring -> return -last_backward + ring  # the runs show nothing that hides zero 1's messages
FP32 -> BF16  # gradients are float32: 4 bytes; zero 1 gathers 2 bytes of weights besides
BF16 -> FP32  # zero 1 gathers weights in bf16: 2 bytes
BF16 * weights, -> BF16 * weights / dp,  # the message is the full tensor, not a shard
// tp ->  # a node's GPUs are shared by its tp ranks
max(1, -> max(0,  # at least one rank is in a node
cluster.node -> 8  # cluster.node GPUs are in a node
two rings over dp, of 1 to dp ranks a node; zero 0 alone hides up to last_backward seconds
== predict_run
/ (dp * pp * tp) ->  # a GPU's tokens, not all GPUs'
(dp * pp * tp) -> dp  # a GPU's tokens, not all GPUs'
(dp * pp * tp) -> (pp * tp)  # a replica has pp * tp GPUs, and there are dp of them
return dp * -> return  # of all dp replicas
* 4096 ->  # a sequence has 4096 tokens
dp * mbs * gradacc -> int(row["gbs"])  # count the sequences that dp, mbs and gradacc make
tp, mbs, gradacc, zero= -> tp, mbs, zero=  # gradacc microbatches, each of mbs sequences
tp, mbs, gradacc, zero= -> tp, gradacc, mbs, zero=  # gradacc microbatches, each of mbs sequences
cluster, dp, pp, tp -> cluster, dp, tp, pp  # predict() takes dp, pp, tp in this order
, zero=zero ->  # zero is in the row: pass it by its name, behind microbatches stands length
cluster, dp -> H100, dp  # the cluster is an argument: pass it on
tokens of dp * mbs * gradacc sequences, over the seconds of predict() and all GPUs
== score
abs(p -> (p  # off by as much, above or below: abs()
predicted / measured -> measured / predicted  # relative to what was measured
predicted / measured - 1 -> predicted - measured  # relative to what was measured
statistics.mean( -> sum(  # a fraction, not a count
(a[1] > b[1]) -> (a[1] < b[1])  # right: the faster run was predicted to be the faster
statistics.median -> statistics.mean  # a median, not a mean
statistics.median(errors) -> sorted(errors)[len(errors) // 2]  # of two in the middle the mean
setdefault(case, -> setdefault(0,  # pairs and picks within one case
combinations(case, 2) -> combinations(sum(cases, []), 2)  # pairs within one case
if len(case) > 1 ->  # picks are of cases with two runs or more
* 1.05 ->  # at most 1.05 times as long as the fastest
max(case)[1] * -> max(case)[0] *  # judged by what was measured, not by what was predicted
max(case)[1] * -> min(case)[1] *  # tokens a second: the fastest has the most
fractions: of all runs, of all pairs of one case, of the cases with two runs or more
== waiting
stages - 1] -> stages]  # (stages - 1), not the stages
microbatches, stages - 1] -> stages - 1, microbatches]  # a belongs to microbatches, b to stages - 1
least squares of all runs at once: two unknowns, no constant
== strategy_messages
5 * layers + 2 -> 4 * layers + 2  # what a layer sends again when it is recomputed
6 * layers + 3 -> 4 * layers + 3  # what a layer sends again when it is recomputed
12 * layers, 3 * -> 8 * layers, 2 *  # what a layer sends again when it is recomputed
12 * layers, -> 3 * layers,  # one call each for q, k, v and attention's output
12 * layers, -> 6 * layers,  # one call each for q, k, v and attention's output
12 * layers, 3 * -> 4 * layers, 1 *  # forward, recomputed, and the gradients
5 * layers + 2 -> 5 * layers + 1  # embedding and head send, too
6 * layers + 3 -> 6 * layers + 2  # the head's gather is recomputed, too
5 * layers + 2 -> 6 * layers + 3  # no scatter behind the last matmul is recomputed: a layer has 5
5 * layers + 2 -> 6 * layers + 2  # no scatter behind the last matmul is recomputed: a layer has 5
units, 2 * weights -> units, 2 * weights / ranks  # the message is the full tensor, not a shard
layers + 2) * hidden) -> layers + 2) * hidden / (5 * layers + 2))  # of all calls together
layers + 3) * hidden) -> layers + 3) * hidden / (6 * layers + 3))  # of all calls together
2 * hidden)] -> 2 * hidden / ranks)]  # a stage has all tokens
* hidden) -> * hidden / ranks)  # H has all tokens: (length, hidden)
6 * layers + 3 -> 5 * layers + 2  # a layer gathers 2 forward, 2 backward, 2 recomputed; head 2
"send", 2, 2 * -> "send", 1, 1 *  # 1 forward, 1 backward
"send", 2, 2 * -> "send", 2 * (ranks - 1), 2 * (ranks - 1) *  # what one rank sends, not all
hidden / ranks -> hidden  # of the rank's own length / ranks tokens
2 * model.kv_heads / model.heads -> 2  # k and v have kv_heads heads
2 * units, 2 * -> units, 1 *  # weights are gathered for the forward and for the backward
2 * units, 2 * -> 3 * units, 3 *  # recomputation is a part of the backward: gathered once for it
tensors, weights -> 1, weights  # a call for each of the `tensors`
tensors, weights -> tensors, weights / ranks  # each rank has all gradients
units = layers + 1 -> units = layers  # a call for the rest, too
a row for each op: its calls in all layers, embedding and head, and the bytes of all of them
"""


def parts_of(name, result):
    """{part: number} of what a function returns; {} where it is nothing of the kind."""
    if name == "strategy_messages":
        rows = result if isinstance(result, tuple | list) else ()
        result = [row for row in rows if isinstance(row, tuple | list) and len(row) == 3]
        calls = {f"{op}'s calls": count for op, count, _ in result}
        return calls | {f"{op}'s bytes": float(size) for op, _, size in result}
    names = FORMS.get(name, "it").strip("(){}").split(", ")
    if name == "score":
        right = isinstance(result, dict) and set(result) == set(names)
        result = [result[each] for each in names] if right else ()
    result = [result] if isinstance(result, Real) else result
    right = isinstance(result, tuple | list | np.ndarray) and len(result) == len(names)
    return dict(zip(names, map(float, result))) if right else {}


def compare(lab, name, *args):
    """What the learner's function gives; Wrong where the finished one gives something else."""
    given, function = copy.deepcopy(args), getattr(finished, name)
    right = parts_of(name, function(*args))
    mine = tried(f"{name}()", section(MISTAKES, function)[-1], getattr(lab, name), *given)
    found, form = parts_of(name, mine), FORMS.get(name, "a number")
    shown = [f"{x:.5g}" if isinstance(x, Real) else x for x in args if isinstance(x, Real | str)]
    what = f"{name}({', '.join(shown)})"
    expect(found.keys() == right.keys(), f"{what} returns {mine}, not {form}", f"return {form}")
    for part, number in right.items():
        if not alike(found[part], number):
            view = partial(parts_of, name)
            hint = usual_hint(MISTAKES, function, args, found[part], part, view=view)
            raise Wrong(f"{what}: {part} is {found[part]:.6g}, not {number:.6g}", hint)
    expect(given == args, f"{name}() changes what it is given", "it is the caller's: take a copy")
    return mine


def some_model(rng, turn):
    """A model of random sizes: as many KV heads as heads, or fewer; tied or not, in turns."""
    heads = rng.choice([8, 16, 32])
    kv_heads, hidden = heads // (1, 4)[turn % 2], 128 * rng.randint(8, 64)
    layers, ffn, vocab = rng.randint(4, 60), 256 * rng.randint(8, 64), 1024 * rng.randint(8, 128)
    return finished.Model(layers, hidden, heads, kv_heads, ffn, vocab, turn % 4 < 2)


def some_cluster(rng):
    """Other rates than H100's, and 4, 8 or 16 GPUs in a node."""
    names = "matmul", "memory", "nvlink", "spread", "network", "hop", "other"
    rates = {name: getattr(H100, name) * rng.uniform(0.5, 2) for name in names}
    return dataclasses.replace(H100, node=rng.choice([4, 8, 16]), **rates)


def check_flops(lab, group, seed):
    rng = random.Random(seed)
    for turn in range(8):
        compare(lab, "flops_per_token", some_model(rng, turn), 512 * rng.randint(1, 32))
    parts = finished.flops_per_token(finished.MODELS["8B"], 4096)
    return f"8B, 4096 tokens: {sum(parts) / 1e9:.1f} GFLOP a token"


def check_mfu(lab, group, seed):
    rng = random.Random(seed)
    for turn in range(8):
        model, gpus, length = some_model(rng, turn), 2 ** rng.randint(1, 9), 512 * (turn + 1)
        speed, peak = rng.uniform(1e3, 1e6), rng.choice([312e12, 125e12])
        compare(lab, "mfu", model, length, speed, gpus, peak)
    row = next(row for row in read_runs() if row["nodes"] == row["pp"] == row["tp"] == "1")
    mine = lab.mfu(finished.MODELS[row["model"]], 4096, 8 * float(row["tok_s_gpu"]), 8, H100.peak)
    return f"a run of {row['model']}: {mine:.1%}; it logged {row['mfu_percent']}%"


def check_roofline(lab, group, seed):
    rng = random.Random(seed)
    for rows in (1, 8, 64, 4096, 65536):
        inputs, outputs = 128 * rng.randint(8, 64), 128 * rng.randint(8, 64)
        mine = compare(lab, "matmul_seconds", rows, inputs, outputs, some_cluster(rng))
    return f"1 row is bound by memory; {rows}, bound by compute, take {mine:.2g} s"


def check_ring(lab, group, seed):
    rng = random.Random(seed)
    for ranks, in_node in (2, 2), (8, 8), (16, 8), (64, 4), (32, 1), (24, 8), (1, 1), (4, 2):
        message = rng.uniform(1e5, 1e10)
        compare(lab, "ring_seconds", message, ranks, in_node, some_cluster(rng))
    small, large = (1e3 * finished.ring_seconds(size, 16, 8, H100) for size in (1e3, 1e9))
    return f"16 ranks of 2 nodes: 1 kB takes {small:.2f} ms, 1 GB {large:.2f}"


def check_overlap(lab, group, seed):
    rng = random.Random(seed)
    draws = [(rng.uniform(0, 4), rng.uniform(0, 4), 2 ** rng.randint(0, 4)) for _ in range(20)]
    for message, matmul, tp in sorted(draws, key=lambda d: (d[2] == 1, d[1] - d[0])):
        for way in "column", "row":  # 0, and tp 1, have many causes
            compare(lab, "exposed_seconds", way, message, matmul, tp)
    column, row = (lab.exposed_seconds(way, 1.0, 1.0, 8) for way in ("column", "row"))
    return f"messages as long as a matmul, tp 8: exposed {column:.2f} of 3 (column), {row:.2f} of 2"


def check_host(lab, group, seed):
    rng = random.Random(seed)
    pairs = [(rng.uniform(0.1, 2), rng.uniform(0.1, 2)) for _ in range(20)]
    for device, host in sorted(pairs, key=lambda pair: pair[0] - pair[1]):  # 0 has many causes
        compare(lab, "host_gap", device, host)
    return f"host and device 12 s each: the device waits {lab.host_gap(12, 12):.0f}"


def check_bubble(lab, group, seed):
    rng = random.Random(seed)
    for _ in range(8):
        slowest, stages, count = rng.uniform(0.1, 2), rng.randint(2, 32), rng.randint(1, 64)
        compare(lab, "pipeline_seconds", slowest, stages, count)
    work, bubble = lab.pipeline_seconds(1.0, 4, 12)
    return f"4 stages, 12 microbatches: {bubble / (work + bubble):.0%} of the step is bubble"


def check_gradients(lab, group, seed):
    rng, saved = random.Random(seed), []
    for tp, dp in itertools.product((1, 2, 8, 16), (1, 2, 16, 64)):
        cluster, weights = some_cluster(rng), rng.uniform(1e8, 1e10)
        both = finished.gradient_seconds(weights, dp, tp, 0, 0.0, cluster)  # nothing hidden
        backward = both * (1.5 if dp == 64 else rng.uniform(0.1, 0.2))
        for zero in 1, 0:
            args = weights, dp, tp, zero, backward, cluster
            saved.append(compare(lab, "gradient_seconds", *args))
    return f"{len(saved)} groups of ranks, up to {max(saved):.2f} s"


def check_predict_run(lab, group, seed):
    rng, off, rows = random.Random(seed), [], read_runs()
    chosen = rng.sample(rows, 30)
    chosen.sort(key=lambda row: -len({row[name] for name in ("dp", "pp", "tp", "mbs", "gradacc")}))
    for row in [*chosen, *(row for row in rows if not consistent(row))]:
        shuffled = dict(rng.sample(list(row.items()), len(row)))
        compare(lab, "predict_run", shuffled, some_cluster(rng))
        if row["pp"] == "1":
            off.append(abs(lab.predict_run(row) / measured(row) - 1))
    return f"{len(off)} without a pipeline: half are off by {statistics.median(off):.0%} or less"


def check_score(lab, group, seed):
    rng = random.Random(seed)
    for _ in range(10):
        runs = [("alone", 1.0, 1.5)]
        for case in "abcde":
            speeds = [rng.uniform(1, 10) for _ in range(rng.randint(2, 6))]
            runs += [(case, speed * rng.uniform(0.75, 1.3), speed) for speed in speeds]
        rng.shuffle(runs)
        mine = compare(lab, "score", runs)
    return ", ".join(f"{key} {value:.2f}" for key, value in mine.items())


def check_waiting(lab, group, seed):
    rng = random.Random(seed)
    for noise in 0.0, 0.5:
        a, b = rng.uniform(0.2, 2), rng.uniform(0.1, 1)
        runs = [(rng.choice([16, 32, 64]), rng.choice([2, 4, 8, 16])) for _ in range(20)]
        runs = [(m, p, a * m + b * (p - 1) + rng.uniform(-noise, noise)) for m, p in runs]
        a, b = compare(lab, "waiting", runs)
    return f"a {a:.2f}, b {b:.2f}"


def check_strategies(lab, group, seed):
    rng = random.Random(seed)
    for turn, ranks in enumerate((8, 4, 2, 6, 3, 5)):
        model, length = some_model(rng, turn), 1024 * rng.randint(1, 64)
        for name in "tp", "sp", "ulysses", "ulysses_sharded", "pp":
            compare(lab, "strategy_messages", model, name, ranks, length)
    return "tp, sp, ulysses, ulysses_sharded, pp: every message"


def embedding_counted(lab):
    """The FLOPs count the embedding as if it were a matmul."""
    lab.flops_per_token = mistaken(finished.flops_per_token, ("6 * model.head", "12 * model.head"))


def network_without_latency(lab):
    """A ring between nodes is as fast for one byte as its bandwidth says."""
    lab.ring_seconds = mistaken(finished.ring_seconds, ("(ranks - 1) * cluster.hop", "0"))


def one_gpus_peak(lab):
    """MFU: the tokens of all GPUs over the peak of one."""
    lab.mfu = mistaken(finished.mfu, ("(gpus * peak)", "peak"))


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
