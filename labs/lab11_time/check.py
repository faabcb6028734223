"""Lab 11's exercises: their cases, numbers of random models, clusters and runs, without ranks.

What is right is what the finished lab gives, to six digits. That it fits the published runs
and the scripts, tests/test_lab11_run.py tests.
"""

import copy
import dataclasses
import itertools
import random
from functools import partial
from numbers import Real

from labs.kit.judge import checks
from labs.lab11_time import lesson as finished  # not the learner's
from labs.lab11_time.runs import consistent, read_runs

H100 = finished.H100
PARTS = {  # the names of what a function returns, where that is more than a number
    "flops_per_token": ["layers", "attention", "head"],
    "pipeline_seconds": ["work", "bubble"],
    "waiting": ["a", "b"],
}


def numbers_of(name, result):
    """{part: number} of what a function returns."""
    if name == "strategy_messages":
        parts = {f"{op}'s calls": calls for op, calls, _ in result}
        parts |= {f"{op}'s bytes": nbytes for op, _, nbytes in result}
    elif name == "score":
        parts = result
    else:
        result = [result] if isinstance(result, Real) else result
        parts = dict(zip(PARTS.get(name, ["the result"]), result))
    return {"the number of results": len(result)} | parts


def see(name, calls, lab, eye):
    """Note what a function returns for each of many arguments: by all, a mistake is known."""
    for i, args in enumerate(calls):
        given = copy.deepcopy(args)
        result = getattr(lab, name)(*given)
        shown = [
            f"{x:.5g}" if isinstance(x, Real) else x for x in args if isinstance(x, Real | str)
        ]
        what = f"{name}({', '.join(shown)}), call {i}"
        for part, number in numbers_of(name, result).items():
            eye.note(f"{what}: {part}", f"{float(number):.6g}")
        eye.note(f"{what}: an argument is overwritten", given != args)


def some_model(rng, turn):
    """A model of random sizes: as many KV heads as heads, or fewer; tied or not, in turns."""
    heads = rng.choice([8, 16, 32])
    kv_heads, hidden = heads // (1, 4)[turn % 2], 128 * rng.randint(8, 64)
    layers, ffn, vocab = rng.randint(4, 60), rng.randint(8, 64), rng.randint(8, 128)
    sizes = layers, hidden, heads, kv_heads, 256 * ffn, 1024 * vocab
    return finished.Model(*sizes, turn % 4 < 2)


def some_cluster(rng):
    """Other rates than H100's, and 4, 8 or 16 GPUs in a node."""
    names = "matmul", "memory", "nvlink", "spread", "network", "hop", "other"
    rates = {name: getattr(H100, name) * rng.uniform(0.5, 2) for name in names}
    return dataclasses.replace(H100, node=rng.choice([4, 8, 16]), **rates)


# ---- The arguments of each function --------------------------------------------------------------


def flops_per_token(rng):
    return [(some_model(rng, turn), 512 * rng.randint(1, 32)) for turn in range(8)]


def mfu(rng):
    for turn in range(8):
        speed, peak = rng.uniform(1e3, 1e6), rng.uniform(1e14, 1e15)
        yield some_model(rng, turn), 512 * (turn + 1), speed, 2 ** rng.randint(1, 9), peak


def matmul_seconds(rng):
    for rows in 1, 8, 64, 4096, 65536:
        inputs, outputs = 128 * rng.randint(8, 64), 128 * rng.randint(8, 64)
        yield rows, inputs, outputs, some_cluster(rng)


def ring_seconds(rng):
    for ranks, in_node in (2, 2), (8, 8), (16, 8), (64, 4), (32, 1), (24, 8), (1, 1), (4, 2):
        yield rng.uniform(1e5, 1e10), ranks, in_node, some_cluster(rng)


def exposed_seconds(rng):
    draws = [(rng.uniform(0, 4), rng.uniform(0, 4), 2 ** rng.randint(0, 4)) for _ in range(20)]
    draws.sort(key=lambda draw: draw[-1] == 1)  # with tp 1 many mistakes look alike
    return [(way, *draw) for draw in draws for way in ("column", "row")]


def host_gap(rng):
    return [(rng.uniform(0.1, 2), rng.uniform(0.1, 2)) for _ in range(20)]


def pipeline_seconds(rng):
    sizes = [(rng.randint(2, 32), rng.randint(1, 64)) for _ in range(8)]
    return [(rng.uniform(0.1, 2), stages, count) for stages, count in [*sizes, (1, 5)]]


def gradient_seconds(rng):
    for tp, dp in itertools.product((1, 2, 8, 16), (1, 2, 16, 64)):
        cluster, weights = some_cluster(rng), rng.uniform(1e8, 1e10)
        both = finished.gradient_seconds(weights, dp, tp, 0, 0.0, cluster)  # nothing hidden
        backward = both * (1.5 if dp == 64 else rng.uniform(0.1, 0.2))
        for zero in 1, 0:
            yield weights, dp, tp, zero, backward, cluster


def predict_run(rng):
    rows = read_runs()
    for row in [*rng.sample(rows, 30), *(row for row in rows if not consistent(row))]:
        yield dict(rng.sample(list(row.items()), len(row))), some_cluster(rng)


def score(rng):
    for _ in range(10):
        runs = [("alone", 1.0, 1.5), ("near", 2.0, 0.951), ("near", 1.0, 1.0)]  # 1 / 1.05: 0.952
        for case in "abcdefgh":
            speeds = [rng.uniform(1, 10) for _ in range(rng.randint(2, 9))]
            runs += [(case, speed * rng.uniform(0.75, 1.3), speed) for speed in speeds]
        rng.shuffle(runs)
        yield (runs,)


def waiting(rng):
    for noise in 0.0, 0.5:
        a, b = rng.uniform(0.2, 2), rng.uniform(0.1, 1)
        runs = [(rng.choice([16, 32, 64]), rng.choice([1, 2, 4, 8])) for _ in range(20)]
        yield ([(m, p, a * m + b * (p - 1) + rng.uniform(-noise, noise)) for m, p in runs],)


def strategy_messages(rng):
    for turn, ranks in enumerate((8, 4, 2, 6, 3, 5)):
        model, length = some_model(rng, turn), 1024 * rng.randint(1, 64)
        for name in "tp", "sp", "ulysses", "ulysses_sharded", "pp":
            yield model, name, ranks, length


def cases_of(draw, group, seed):
    yield "random numbers", partial(see, draw.__name__, [*draw(random.Random(seed))])


FUNCTIONS = {"flops": flops_per_token, "mfu": mfu, "roofline": matmul_seconds}
FUNCTIONS |= {"ring": ring_seconds, "overlap": exposed_seconds, "host": host_gap}
FUNCTIONS |= {"bubble": pipeline_seconds, "gradients": gradient_seconds}
FUNCTIONS |= {"predict_run": predict_run, "score": score, "waiting": waiting}
FUNCTIONS |= {"strategies": strategy_messages}
EXERCISES = {name: (partial(cases_of, draw), 1) for name, draw in FUNCTIONS.items()}
CHECKS, BUGS = checks(EXERCISES, finished, 1e-9)
