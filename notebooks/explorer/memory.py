"""What fills the memory: oom_search.py's predictions, for the explorer's memory and time."""

import math
from functools import partial
from itertools import pairwise, product
from types import SimpleNamespace

from tqdm import tqdm

import oom_search
import pp
from labs.lab11_time.plan import why_not

MODELS = {
    "llama-3.2-1b": "Llama 3.2 1B", "llama-3.2-3b": "Llama 3.2 3B", "llama-3.1-8b": "Llama 3.1 8B",
}  # fmt: skip
USUAL = {"mistral-7b": "Mistral 7B", "qwen3-0.6b": "Qwen3 0.6B", "qwen3-8b": "Qwen3 8B"}
USUAL |= {"smollm3-3b": "SmolLM3 3B"}  # of these no other way than the first of WAYS
LARGE = {"llama-3.1-70b": "Llama 3.1 70B"}
ALL = MODELS | USUAL | LARGE
STRATEGIES = {
    "tp": "tp", "sp_megatron": "sp", "sp_ulysses": "ulysses", "sp_ulysses --shard-weights":
    "ulysses_sharded", "pp": "pp",
}  # fmt: skip
# Recomputation, loss
WAYS = [("full", "chunked"), ("none", "chunked"), ("full", "full"), ("selective", "chunked")]
WAYS += [("offload", "chunked")]
SHORTEST, LONGEST = 2048, 2**20  # tokens; what is longer goes on as a straight line
EXACT = 0.01  # how far a straight line between two lengths may be from the prediction
MOST = 142 * 1024  # MiB, no GPU has more


def sizes(name):
    """Of a preset of the scripts."""
    _, hidden, _, layers, heads, *_ = pp.PRESETS[name]
    return SimpleNamespace(hidden=hidden, layers=layers, heads=heads)


def settings():
    """Whose memory is predicted: model, strategy, ranks, recomputation, loss."""
    yield from product(MODELS | USUAL, ["plain"], [1], ["full", "none"], ["full"])
    for way, world, strategy, model in product(WAYS, (4, 8, 2), STRATEGIES, MODELS | USUAL):
        if model in MODELS or way == WAYS[0]:
            yield model, strategy, world, *way


def more():
    """And with six lengths only: all models on the other numbers of ranks from 1 to 32.

    On one rank all strategies are the same, up to some buffers.
    """
    yield from ((name, "tp", 1, *WAYS[0]) for name in ALL)
    yield from product(LARGE, ["plain"], [1], ["full", "none"], ["full"])
    for name in ALL:
        worlds = (2, 4, 8, 16, 32) if name in LARGE else (16, 32)
        for world, strategy in product(worlds, STRATEGIES):
            asked = "tp", STRATEGIES[strategy]  # heads for all, and layers for a pipeline
            if not any(why_not(sizes(name), own, world) for own in asked):
                yield name, strategy, world, *WAYS[0]


def memory():
    """Peaks by length, in MiB of each of oom_search.PARTS.

    curves: for each of settings() and more(), and each rank that may need most, [[tokens, *parts],
    ...]. steps: the same at the peak inside AdamW's step, which does not depend on the length, nor
    on what is recomputed; of it the optimizer's state is there during forward and backward, too.
    Of more() there is no curve where no GPU could bear that step.
    All this takes hours of a laptop's core.
    """
    curves, steps = {}, {}
    asked = [(setting, True) for setting in settings()] + [(setting, False) for setting in more()]
    for (model, strategy, world, recompute, loss), exact in tqdm(asked, desc="memory"):
        ranks = oom_search.ranks_to_try(strategy, world)
        ranks = ranks if exact else sorted({ranks[0], ranks[-1]})
        ask = partial(predict, model, strategy, world)
        key = f"{model} {strategy} {world}"
        if key not in steps:
            steps[key] = [ask(rank, "full", "chunked", "adamw", 64) for rank in ranks]
        own = [partial(ask, rank, recompute, loss, "none") for rank in ranks]
        if exact or max(map(sum, steps[key])) < MOST:
            curves[f"{key} {recompute} {loss}"] = [(curve if exact else few)(ask) for ask in own]
    gpus = {name: gib for name, (gib, capability) in oom_search.GPUS.items() if capability >= 8}
    told = {"models": ALL, "gpus": gpus, "outside": oom_search.OUTSIDE, "exact": EXACT}
    told["sizes"] = {name: [sizes(name).layers, sizes(name).hidden] for name in ALL}
    return told | {"parts": oom_search.PARTS, "curves": curves, "steps": steps}


def predict(model, strategy, world, rank, recompute, loss, optimizer, length):
    """MiB of each part at the peak of a step, as oom_search.py --at finds it."""
    name, *own = strategy.split()
    argv = ["--how", "predicted", "--optimizer", optimizer, "--loss", loss, *own]
    options = oom_search.parse([*argv, "--model", model, "--recompute", recompute])
    case = oom_search.make_case(name, world, length, options)
    parts = oom_search.run_ranks(case, [rank])[rank]["breakdown"]
    return [round(parts[part] / 2**20) for part in oom_search.PARTS]


def curve(ask):
    """[[tokens, *parts], ...]: as many lengths as make straight lines between them good enough."""
    points = {length: ask(length) for length in (SHORTEST, oom_search.TILE, 4 * oom_search.TILE)}

    def refine(a, b):
        middle = round(math.sqrt(a * b) / 512) * 512
        if b < 1.1 * a:
            return
        straight = sum(points[a]) + (sum(points[b]) - sum(points[a])) * (middle - a) / (b - a)
        points[middle] = ask(middle)
        if abs(straight / sum(points[middle]) - 1) > EXACT:
            refine(a, middle)
            refine(middle, b)

    *_, a, b = points
    token = (sum(points[b]) - sum(points[a])) / (b - a)  # MiB
    top = int(min(LONGEST, b + (MOST - sum(points[b])) / token)) // 512 * 512
    if top > b:
        points[top] = ask(top)
    for a, b in pairwise(sorted(points)):
        refine(a, b)
    return [[length, *points[length]] for length in sorted(points)]


def few(ask):
    """The same with six lengths, which are a rank's tile on 1, 16 and 32 ranks, and others."""
    lengths = SHORTEST, 2**14, 2**16, 2**18, 2**19, LONGEST
    return [[length, *ask(length)] for length in lengths]
