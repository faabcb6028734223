"""The explorer's questions: questions.toml, filled in from the data that the views show.

Which option is right is computed here, and an assert holds what the sentences claim beside that: if
the scripts change, either the answer does too, or this stops.
"""

import base64
import gzip
import json
import tomllib
from pathlib import Path

import pp
from labs import schedules

TEXT = Path(__file__).with_suffix(".toml")
SHORTEST, PREDICTED = 2048, 2**20  # tokens of explorer/memory.py: beyond, lines only go on


# ---- Where rounding would decide, a question has no answer ---------------------------------------


def below(values, limit):
    """The keys of what is below a limit, which nothing may come near."""
    near = {key: value for key, value in values.items() if abs(value / limit - 1) < 1e-9}
    assert not near, (near, limit)
    return [key for key in values if values[key] < limit]


def extreme(values, most=max):
    """The key of the largest, or with min of the least, which nothing else may come near."""
    best = most(values.values())
    [key] = [key for key, value in values.items() if abs(value - best) <= 1e-9 * abs(best)]
    return key


# ---- What the views' data say --------------------------------------------------------------------


def step_between(layouts, layout, phase, before):
    """(the number of the view's step from this tensor, its collective), on 4 ranks."""
    run = layouts["runs"][layout][3]
    for i, (own, a, _, collective, *_) in enumerate(run["moments"]):
        if own == phase and run["tensors"][a][0] == before and collective:
            return i + 1, "all_reduce" if layout == "tp" else collective  # TP's has two halves
    raise ValueError(f"{layout}: no message follows {before}")


def room(memory, gpu, strategy, P):
    """MiB that the allocator has."""
    several = "all-to-all" if strategy.startswith("sp_ulysses") else "several"
    kind = several if P > 1 else "one rank"
    return 1024 * (memory["gpus"][gpu] - memory["outside"][kind])


def peak(memory, key, way, optimizer, length, microbatches=1):
    """(MiB, MiB of each part), of the rank and the half of the step that need most."""
    state, saved = map(memory["parts"].index, ("optimizer state", "saved activations"))
    found, steps, P = [], memory["steps"][key], int(key.split(" ")[-1])
    if f"{key} {way}" not in memory["curves"]:  # no GPU could bear the optimizer's step alone
        return max((sum(step), step) for step in steps)
    ranks = [0, P // 2, P - 1] if len(steps) > 2 else [0, P - 1]  # of a pipeline
    for curve, step, rank in zip(memory["curves"][f"{key} {way}"], steps, ranks):
        after = sum(at < length for at, *_ in curve)
        (a, *low), (b, *high) = curve[max(0, min(after, len(curve) - 1) - 1) :][:2]
        parts = [x + (y - x) * (length - a) / (b - a) for x, y in zip(low, high)]
        parts[saved] += further(memory, key, rank, microbatches, length)
        if optimizer == "adamw":
            parts[state] = step[state]
            found.append((sum(step), step))
        found.append((sum(parts), parts))
    return max(found)


def further(memory, key, rank, microbatches, length):
    """MiB that a pipeline's rank keeps of the microbatches in flight beside one."""
    model, strategy, *_, P = key.split(" ")
    flight, (layers, hidden) = min(microbatches, int(P) - rank), memory["sizes"][model]
    own = layers // int(P) + (rank < layers % int(P))
    inputs = (flight - 1) * (own + 1) + 1
    return 2 * hidden * length * inputs / 2**20 if strategy == "pp" and flight > 1 else 0


def longest(memory, key, way="full chunked", optimizer="adamw", gpu="h100", microbatches=1):
    """The longest sequence that fits, a multiple of 512; 0: not even 2,048 tokens."""
    _, strategy, *_, P = key.split(" ")
    limit, low, high = room(memory, gpu, strategy, int(P)), 3, 2**16
    while high - low > 1:
        middle = (low + high) // 2
        fits = peak(memory, key, way, optimizer, 512 * middle, microbatches)[0] <= limit
        low, high = (middle, high) if fits else (low, middle)
    return 512 * low if low > 3 else 0


def clock(schedule, M, V=1, costs=(1, 1, 1)):
    """[(rank, action, begin, end)] of pp.py's simulator on 4 ranks."""
    F, B, W = (cost / V for cost in costs)
    cost = {"F": F, "B": B, "W": W} if schedule == "zb" else {"F": F, "B": B + W}
    ranks = [list(pp.SCHEDULES[schedule](rank, 4, M, V)) for rank in range(4)]
    return pp.simulate(ranks, 4 * V, lambda action: cost[action.kind])


def next_action(schedule, rank, number):
    """What a rank does after so many actions, and when it has done them."""
    own = [row for row in clock(schedule, 8) if row[0] == rank]
    action = own[number][1]
    return {"right": f"{action.kind}{action.microbatch}", "time": int(own[number - 1][3])}


def sent(collectives, op, P):
    """What a rank sends, in messages."""
    return sum(len(cells) for _, cells, _ in collectives[op][P - 2][0][1:]) / P


def parts_of(time, model, strategy, P, length, count):
    """Seconds of each part of a step on H100s; None if it cannot be split so."""
    rows = time["steps"][f"{model} {P} h100 measured {strategy}"]
    if not rows:
        return None
    seconds = map(float, rows[time["lengths"].index(length)].split(","))
    both = zip(time["parts"], seconds)
    return {part: x * (1 if part in time["once"] else count) for part, x in both}


def unsqueezed(walk):
    """{script: its recordings}, of explorer/walk.py."""
    return {s: json.loads(gzip.decompress(base64.b64decode(text))) for s, text in walk.items()}


def badge(walk, script, function, variable, module="", phase="f", run="none"):
    """What a variable of a call is across ranks, at the end of the call."""
    data, found = walk[script], None
    told = data["runs"][run]
    for _, call, _, *rest in told["tracks"][0]:
        name, _, _, where, when, _ = told["calls"][0][call]
        if (name, when) == (function, phase) and module in where:
            changes = {data["names"][x]: mark for x, _, mark, *_ in (rest[1:2] or [[]])[0]}
            found = changes.get(variable, found)
    return found


def gradient(walk, script, parameter):
    """What a parameter's gradient is across ranks when autograd has it."""
    data = walk[script]
    for kind, _, _, *rest in data["runs"]["none"]["tracks"][0]:
        if data["kinds"][kind] == "gradient" and rest[-1] == parameter:
            return rest[1][0][2]
    raise ValueError(parameter)


def sending_line(walk, script, function, module):
    """The line of a call that sends, and its text."""
    told = walk[script]["runs"]["none"]
    for _, call, line, *rest in told["tracks"][0]:
        name, _, _, where, *_ = told["calls"][0][call]
        if name == function and module in where and len(rest) > 2 and rest[2]:
            return line, walk[script]["lines"][str(line)].strip()
    raise ValueError(function)


# ---- Facts: {question: {right: the option, and whatever its sentences say}} ----------------------


def of_walk(walk):
    exit = "ReduceScatterToSPRegion.forward", "x", "o_proj"
    yield "w1", {"right": badge(walk, "sp_megatron", *exit)}
    line, text = sending_line(walk, "sp_megatron", "reduce_scatter", "o_proj")
    yield "w2", {"right": text.partition("(")[0], "line": line}
    entry = "GatherFromSPRegion.backward", "grad", "input_layernorm", "b"
    assert badge(walk, "sp_megatron", "all_gather", "returns", "input_layernorm") == "="
    yield "w5", {"right": badge(walk, "sp_megatron", *entry)}
    norm = "model.layers.0.input_layernorm.weight"
    both = [gradient(walk, script, norm) for script in ("tp", "sp_megatron")]
    assert both == ["=", "+"]
    yield "w6", {"right": both[0]}
    yield "w7", {"right": badge(walk, "sp_ulysses", "ulysses_attention", "query")}


def of_layouts(layouts):
    moments = {
        "l1": ("tp", "forward", "o"),
        "l2": ("sp", "forward", "down"),
        "l3": ("sp", "backward", "gradient of leave mlp"),
        "l4": ("ulysses", "forward", "qkv"),
    }
    for id, moment in moments.items():
        step, collective = step_between(layouts, *moment)
        yield id, {"right": collective, "step": step}
    run = layouts["runs"]["sp"][3]
    summed = {run["tensors"][m[1]][0] for m in run["moments"] if m[0] == "gradients"}
    assert any(name.startswith("gradient of down bias, and") for name in summed), summed
    yield "l6", {"right": "norms", "step": len(run["moments"])}
    kept = {layout: runs[3]["kept"][0] for layout, runs in layouts["runs"].items()}
    assert extreme(kept) == "tp"
    yield "l7", {"right": "tp", "kept": kept, "most": kept["tp"]}


def of_memory(memory):
    model, way = "llama-3.1-8b", "full chunked"
    strategies = "tp", "sp_megatron", "sp_ulysses --shard-weights", "pp"
    four = {name: longest(memory, f"{model} {name} 4") for name in strategies}
    assert max(four.values()) <= PREDICTED
    yield "m1", {"right": extreme(four), "four": four}
    _, parts = peak(memory, f"{model} plain 1", "full full", "adamw", SHORTEST)
    alone = "weights", "gradients", "optimizer state"
    one = sum(parts[memory["parts"].index(part)] for part in alone) / 1024
    limit = room(memory, "h100", "plain", 1) / 1024
    assert one > 1.2 * limit
    yield "m2", {"right": "none", "one": one, "limit": limit}
    for id, own in (("m3", "none chunked"), ("m4", way)):
        total, parts = peak(memory, f"{model} sp_megatron 4", own, "adamw", 131072)
        sizes = {name: part / 1024 for name, part in zip(memory["parts"], parts)}
        yield id, {"right": extreme(sizes), "parts": sizes, "total": total / 1024}
    ways = "full full", "full chunked"
    full, chunked = (longest(memory, f"{model} tp 4", own, "none") for own in ways)
    assert chunked <= PREDICTED
    near = extreme({x: abs(float(x) - chunked / full) for x in ("1.2", "1.7", "3")}, min)
    yield "m5", {"right": near, "ratio": chunked / full, "full": full, "chunked": chunked}


def of_pipelines(pipelines):
    yield "p1", next_action("1f1b", 0, 4)
    yield "p3", next_action("zb", 3, 2)
    stages = {"afab": 1, "1f1b": 1, "interleaved": 2, "zb": 1}
    idle = {name: schedules.bubble(clock(name, 8, V), 4) for name, V in stages.items()}
    assert idle["afab"] == idle["1f1b"]
    yield "p4", {"right": extreme(idle, min), "idle": idle, "least": min(idle.values())}
    rows = pipelines["schedules"]
    kept = {name: max(rows[f"{name} 4 8 1"]["in_flight"]) for name in ("afab", "1f1b")}
    assert kept["1f1b"] < kept["afab"]
    yield "p5", {"right": "memory", "idle": idle, "kept": kept}
    idle = {M: schedules.bubble(clock("1f1b", M), 4) for M in (4, 8, 12, 16)}
    yield "p6", {"right": str(min(below(idle, 0.25))), "idle": idle}


def of_collectives(collectives):
    first, second = ([rank[step][1] for rank in collectives["all_gather"][2]] for step in (1, 2))
    [right] = [way for way, x in (("own", first[0]), ("last", first[3])) if x == second[0]]
    yield "c1", {"right": right}
    [(_, added)] = collectives["reduce_scatter"][2][0][3][1]
    yield "c2", {"right": str(added.bit_count())}
    ring = {P: sent(collectives, "all_reduce", P) for P in (4, 8)}
    yield "c3", {"right": f"{ring[4]:g}", "sent": ring}
    for id, n in (("c5", 2**10), ("c6", 2**24)):
        us = {}
        for op in ("all_reduce", "gather_and_add"):
            steps = len(collectives[op][6][0]) - 1
            us[op] = 10 * steps + 1e6 * n * sent(collectives, op, 8) / 25e9
        yield id, {"right": extreme(us, min), "us": us, "sent": ring}


def of_time(time, memory, texts):
    for id in ("t1", "t3"):
        parts = parts_of(time, "llama-3.1-8b", *texts[id]["setting"])
        total, order = sum(parts.values()), sorted(parts, key=parts.get, reverse=True)
        share = {part: seconds / total for part, seconds in parts.items()}
        names = {part: words for part, words, _ in texts[id]["options"]}
        told = {"most": names[extreme(parts)], "second": names[order[1]], "parts": share}
        told |= {"right": order[0], "share": [share[part] for part in order]}
        yield id, told | {"total": total}
    for id in ("t4", "t5"):
        model, P, length = texts[id]["fastest"]
        seconds, gib, fit, names, shares = {}, {}, set(), time["strategies"], {}
        for strategy, oom in time["memory"].items():
            name = " ".join(oom[:2]) if "--shard-weights" in oom else oom[0]
            if parts := parts_of(time, model, strategy, P, length, 16):
                setting = f"{model} {name} {P}", "full chunked", "adamw", length, 16
                needs, _ = peak(memory, *setting)
                seconds[strategy], gib[strategy] = sum(parts.values()), needs / 1024
                shares[strategy] = parts
                fit |= set(below({strategy: needs}, room(memory, "h100", name, P)))
        right = extreme({strategy: seconds[strategy] for strategy in fit}, min)
        fastest = extreme(seconds, min)
        why = {}
        for name in seconds:
            apart = {part: x - shares[right][part] for part, x in shares[name].items()}
            most = max(apart, key=apart.get)
            two = [f"{seconds[x]:,.0f} s ({most} {shares[x][most]:,.0f} s)" for x in (name, right)]
            why[name] = f"It takes {two[0]}, and {names[right]} {two[1]}."
            if name not in fit:
                why[name] = f"It needs {gib[name]:,.0f} GiB a GPU: it does not fit."
        trap = f"{names[fastest]} would be faster, but needs {gib[fastest]:,.0f} GiB a GPU."
        options = [[name, names[name], why[name]] for name in seconds]
        told = {"right": right, "options": options, "trap": "" if fastest == right else trap}
        yield id, told | {"name": names[right], "seconds": seconds[right]}


def questions(data):
    """All of them, in the order of the file."""
    texts = tomllib.loads(TEXT.read_text())
    facts = dict(of_walk(unsqueezed(data["walk"])))
    facts |= dict(of_layouts(data["layouts"])) | dict(of_memory(data["memory"]))
    facts |= dict(of_pipelines(data["pipelines"])) | dict(of_collectives(data["collectives"]))
    facts |= dict(of_time(data["time"], data["memory"], texts))
    assert facts.keys() == texts.keys(), facts.keys() ^ texts.keys()
    return [question(id, text, facts[id]) for id, text in texts.items()]


def question(id, text, facts):
    """What the page gets of a question."""
    parts = [key for key in ("ask", "because", "see", "shows", "lab") if key in text]
    told = {"id": id} | {key: text[key].format(**facts) for key in parts}
    told["view"] = told["see"].split("&")[0]
    asked = facts.get("options") or text["options"]
    rows = [[name, words, why.format(**facts)] for name, words, why in asked]
    assert facts["right"] in [name for name, *_ in rows], (id, facts["right"])
    options = [[words, None if name == facts["right"] else why] for name, words, why in rows]
    assert all(why != "" for _, why in options), f"{id}: a wrong guess without a reason"
    return told | {"options": options}
