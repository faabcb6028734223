"""The explorer's view of time: lab 11's plans of many settings, and the runs that it judges by."""

import dataclasses
from itertools import product

from labs.kit.harness import LABS, load
from labs.lab11_time import plan
from labs.lab11_time.runs import half, judged, measured, read_runs, scored


def timetable():
    """What the page gets.

    steps: {"model ranks gpu network strategy": [for each length: seconds of each part, as text]},
    of a sequence; of `once` those of a step, however many sequences it has. A number is left out
    where it is that of the first GPU and network; runs: [what a run was, tp, predicted, measured
    tokens/s a GPU].
    """
    lab, steps = load(LABS / "lab11_time" / "lesson.py"), {}
    models, ranks = [name for name in plan.MODELS if name.startswith("llama")], [1, 2, 4, 8, 16, 32]
    lengths, once = [4096 * 2**i for i in range(9)], ["bubble", "gradients", "optimizer", "other"]
    networks = {"measured": {}, "ideal": {"network": 50e9, "hop": 0.0, "spread": 0.0}}
    for name, gpus, strategy in product(models, ranks, plan.STRATEGIES):
        first = None
        for gpu, network in product(plan.MEMORY, networks):
            cluster = dataclasses.replace(plan.cluster_of(lab, gpu), **networks[network])
            setting = lab, plan.MODELS[name], strategy, gpus
            rows = []
            for length in () if plan.why_not(*setting[1:]) else lengths:
                part = plan.strategy_parts(*setting, length, 1, cluster)
                rows.append([f"{part.get(key, 0):.4g}" for key in plan.COLOURS])
            first = first or rows
            same = [
                ["" if x == y and rows is not first else x for x, y in zip(*two)]
                for two in zip(rows, first)
            ]
            steps[f"{name} {gpus} {gpu} {network} {strategy}"] = [",".join(row) for row in same]
    judge, dots = [row for row in read_runs() if judged(row) and half(row) == 1], []
    for row in judge:
        names = "model", "nodes", "dp", "tp", "mbs", "gradacc", "zero"
        told = ", ".join(f"{key} {row[key]}" for key in names).removeprefix("model ")
        dots.append([told, int(row["tp"]), significant(lab.predict_run(row)), measured(row)])
    flops = {
        name: [sum(lab.flops_per_token(plan.MODELS[name], n)) for n in lengths] for name in models
    }
    data = {"models": models, "gpus": [*plan.MEMORY], "ranks": ranks, "networks": [*networks]}
    data |= {"strategies": {key: words for key, (words, _) in plan.STRATEGIES.items()}}
    data |= {"lengths": lengths, "counts": [4, 16, 64], "parts": [*plan.COLOURS], "once": once}
    data |= {"steps": steps, "memory": {key: oom for key, (_, oom) in plan.STRATEGIES.items()}}
    score = {name: float(value) for name, value in scored(lab, judge, lab.H100).items()}
    return data | {"runs": dots, "score": score, "flops": flops, "peak": lab.H100.peak}


def significant(number):
    """With 4 digits, to keep the page small."""
    return float(f"{number:.4g}")
