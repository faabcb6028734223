"""The data of "Step through": recordings of the scripts' training steps, packed for the page.

walk.js has the form. Each number, text and tensor stands once in a script's pool, and a broken run
has of the right one's steps only those that differ.
"""

import ast
import base64
import gzip
import json
import re

import numpy as np

import pp
from labs.bugs import BUGS
from labs.walk.compare import OneDevice, badge, close, key
from labs.walk.record import ROOT, Setting, Source, Unfilled, record
from labs.walk.where import first_difference, in_words

IDS = [[5, 1, 6, 3], [7, 3, 0, 4]]  # of both halves of the vocabulary; 2 is padding
SMALL = "llama", 4, 8, 1, 2, 2, 8, False  # a layer of hidden 4, with 2 heads of 2 numbers
SHARED = "llama", 8, 8, 1, 4, 2, 8, False  # 4 heads, of which 2 have the same KV head
STAGES = "llama", 4, 8, 2, 2, 2, 8, True
RECOMPUTE = "none", "full"
KINDS = ["line", "call", "hf", "hf exit", "gradient"]


def runs(script):
    """{name of a run, as it stands in a link: (ranks, its Setting)}."""
    if script == "pp":
        return {
            f"{schedule}-{recompute}": (2, Setting(STAGES, (IDS,), (
                "--schedule", schedule, "--microbatches", "2", "--recompute", recompute)))
            for schedule in ("1f1b", "zb") for recompute in RECOMPUTE
        }  # fmt: skip
    found = {r: (2, Setting(SMALL, (IDS[:1],), ("--recompute", r))) for r in RECOMPUTE}
    if script != "sp_ulysses":
        found["shared"] = 4, Setting(SHARED, (IDS[:1],), ("--recompute", "none"))
    return found


def is_tensor(x):
    return isinstance(x, np.ndarray | Unfilled)


# ---- What is worth a step ------------------------------------------------------------------------

OF_EACH_PARAMETER = re.compile(r"\s*for (p|parameter) in ")
ONE_BLOCK = re.compile(r"input_layernorm|self_attn|\.(k|v)_proj")  # of 4 ranks: attention


def boring(recording, source):
    """Places of steps in the rounds of a loop over parameters that send nothing, but for the first
    two and the last: those show what it does."""
    found, rounds = set(), {}
    for place, step in enumerate(recording.steps):
        text = source.lines[step.line - 1] if step.line else ""
        if step.kind == "line" and OF_EACH_PARAMETER.match(text):
            rounds.setdefault((step.call, step.line), []).append(place)
    for begins in rounds.values():
        for begin, end in zip(
            begins[2:-2], begins[3:-1]
        ):  # a round begins when its first line has run
            inside = range(begin, end)
            if not any(recording.steps[i].messages for i in inside):
                found |= set(inside)
    return found


def kept_steps(recording, source, only=None):
    """[(place, step, lines before it that changed nothing)]: no calls that see no tensor."""
    calls, alive = recording.calls, set()
    for step in recording.steps:
        if step.messages or any(is_tensor(x) for x in step.changed.values()):
            at = step.call
            while at is not None:
                alive.add(at)
                at = calls[at].parent
    kept, quiet, skipped = [], {}, boring(recording, source)
    for place, step in enumerate(recording.steps):
        call = calls[step.call]
        about = step.note or call.module or " ".join(map(str, step.changed.values()))
        if place in skipped or (only and not only.search(about)):
            continue
        if step.kind == "line" and not (step.changed or step.messages or step.note):
            quiet.setdefault(step.call, []).append(step.line)
        elif step.messages or (step.call in alive and not call.name.endswith(">")):
            before = quiet.pop(step.call, []) if step.kind == "line" else []
            kept.append((place, step, before))
    return kept


# ---- Packing -------------------------------------------------------------------------------------


def pieces(rank, world, message, sent):
    """[(from, to, tensor)]: what a message brings to a rank, of what every rank sends."""
    if message["op"] == "send":
        return [(rank, message["peer"], message["sent"])]
    if message["op"] == "receive":
        return [(message["peer"], rank, message["sent"])]
    found = []
    for source, x in enumerate(sent):
        if message["op"] == "reduce-scatter":
            x = np.split(x, world)[rank]
        elif message["op"] == "all-to-all":
            counts = message["counts"] or [len(x) // world] * world
            x = np.split(x, np.cumsum(counts)[:-1])[rank]
        found.append((source, rank, x))
    return found


class Pack:
    """A script's pools of names and values, and its code."""

    def __init__(self, script):
        self.source = Source(ROOT / f"{script}.py")
        self.pool, self.names, self.functions, self.lines = {}, {}, {}, {}

    def name(self, name):
        return self.names.setdefault(name, len(self.names))

    def value(self, x):
        """Its place in the pool: a text, or "#shape|numbers"."""
        text = x
        if is_tensor(x):
            numbers = ""
            if isinstance(x, np.ndarray):
                numbers = " ".join(f"{float(number):.3g}" for number in x.flatten())
            text = "#" + "x".join(map(str, x.shape)) + "|" + re.sub(r"(?<!\d)0\.", ".", numbers)
        return self.pool.setdefault(text, len(self.pool))

    def values(self, values):
        """The same on all ranks: once."""
        places = [self.value(x) for x in values]
        return places[0] if len(set(places)) == 1 else places

    def step(self, step, before, changes, messages):
        cells = [KINDS.index(step.kind), step.call, step.line or 0, before, changes, messages]
        cells.append(step.note)
        while cells[-1] in ("", []):
            cells.pop()
        return cells

    def calls(self, recording):
        """[name, caller, the line that calls, module, phase, whether it is Hugging Face's]."""
        for call in recording.calls:
            node = self.source.functions.get(call.first_line)
            if node and not call.is_hf and call.name not in self.functions:
                extent = [call.first_line, node.end_lineno]
                if hasattr(node, "name") and ast.get_docstring(node):
                    extent += [node.body[0].lineno, node.body[0].end_lineno]
                self.functions[call.name] = extent
                for line in range(call.first_line, node.end_lineno + 1):
                    self.lines[line] = self.source.lines[line - 1]
        return [
            [c.name, c.parent, c.line or 0, c.module, c.phase[0], int(c.is_hf)]
            for c in recording.calls
        ]


def packed_together(recordings, one, pack, sharing=1, only=None):
    """Ranks that run the same lines: a list of steps, with what each rank holds. Returns it, the
    steps' places in the recording and {(function, variable): badge} of what is no known tensor."""
    first, world = recordings[0], len(recordings)
    keys = [[key(step, r.calls) for step in r.steps] for r in recordings]
    assert all(k == keys[0] for k in keys), "the ranks run different lines"
    device, steps, places, odd = OneDevice(one, first), [], [], {}
    for place, step, before in kept_steps(first, pack.source, only):
        peers = [r.steps[place] for r in recordings]
        changes = []
        for name in dict.fromkeys(name for peer in peers for name in peer.changed):
            values = [p.changed.get(name, peers[0].changed.get(name)) for p in peers]
            mark, full = "", None
            if all(map(is_tensor, values)):
                mark, full = badge(values, device.candidates(place, step.call, name), sharing)
                if mark in "xsr":
                    odd[first.calls[step.call].name, name] = mark
            change = [pack.name(name), pack.values(values), mark]
            changes.append(change if full is None else [*change, pack.value(full)])
        messages = []
        for m, message in enumerate(step.messages):
            sent, got = ([p.messages[m][k] for p in peers] for k in ("sent", "got"))
            how = "sum" if close(sum(sent), got[0]) else "max"
            coming = []
            for rank in range(world):
                parts = pieces(rank, world, message, sent)
                coming.append([[source, pack.value(x)] for source, _, x in parts])
            how = how if message["op"] == "all-reduce" else ""
            messages.append([message["op"], how, message["bytes"], coming])
        steps.append(pack.step(step, before, changes, messages))
        places.append(place)
    return steps, places, odd


def number(x):
    """A tensor, but for rounding and the sign of zero."""
    return x.shape, (np.round(x + 0, 9) + 0.0).tobytes()


def packed_apart(recordings, one, pack):
    """Ranks that run different lines: steps of each, whose tensors are looked up in all of one
    device's run; places and odd as in packed_together()."""
    known = {number(x) for s in one.steps for x in s.changed.values() if isinstance(x, np.ndarray)}
    known |= {number(x) for x in one.others}
    kept = [kept_steps(r, pack.source) for r in recordings]
    seen = [
        [x for _, step, _ in steps for x in step.changed.values() if isinstance(x, np.ndarray)]
        for steps in kept
    ]
    sent = {}  # of each rank, what it gave to its nth all-reduce
    for rank, steps in enumerate(kept):
        all_reduces = [m for _, s, _ in steps for m in s.messages if m["op"] == "all-reduce"]
        sent[rank] = [m["sent"] for m in all_reduces]
    tracks, odd = [], {}
    for rank, steps in enumerate(kept):
        told, calls, nth = [], recordings[rank].calls, 0
        others = [x for r, tensors in enumerate(seen) if r != rank for x in tensors]
        for _, step, before in steps:
            changes = []
            for name, x in step.changed.items():
                mark = "u" if isinstance(x, Unfilled) else ""
                if isinstance(x, np.ndarray):
                    mark = "=" if number(x) in known else "x"
                    same = (y for y in others if y.shape == x.shape and y.dtype == x.dtype)
                    if mark == "x" and x.dtype.kind == "f":
                        mark = "+" if any(number(x + y) in known for y in same) else "x"
                    if mark == "x":
                        odd[calls[step.call].name, name] = mark
                changes.append([pack.name(name), pack.value(x), mark])
            messages = []
            for message in step.messages:
                together = None
                if message["op"] == "all-reduce":
                    together, nth = [of[nth] for of in sent.values()], nth + 1
                parts = pieces(rank, len(recordings), message, together)
                parts = [[a, b, pack.value(x)] for a, b, x in parts]
                messages.append([message["op"], "sum", message["bytes"], [parts]])
            told.append(pack.step(step, before, changes, messages))
        tracks.append(told)
    return tracks, [[place for place, *_ in steps] for steps in kept], odd


def moments(recordings, places):
    """Of each rank when its steps have run: their places among all ranks' steps. A line that sends
    counts when it begins, since its message may come before it has ended."""
    times = []
    for rank, (recording, own) in enumerate(zip(recordings, places)):
        for place in own:
            sends = any(m["op"] == "send" for m in recording.steps[place].messages)
            times.append((recording.steps[place - sends].time, rank, place))
    order = [rank for _, rank, _ in sorted(times)]
    return [[i for i, r in enumerate(order) if r == rank] for rank in range(len(recordings))]


# ---- Landmarks, and all of it together -----------------------------------------------------------

PARTS = {  # by what stands in a function's or module's name; the first that fits
    "sum_gradients": "gradient sums", "grad_norm": "gradient norm",
    "CrossEntropy": "loss", "tokens_to_heads": "attention's entry",
    "heads_to_tokens": "attention's exit", "embed_tokens": "embedding",
    "input_layernorm": "attention's entry", "o_proj": "attention's exit",
    "post_attention_layernorm": "MLP's entry", "down_proj": "MLP's exit",
    "self_attn": "attention", "mlp": "MLP", "lm_head": "head", "sum_of_losses": "head",
}  # fmt: skip


def landmarks(recording, places, source):
    """[(place in the page's steps, phase, words)]: where another part of the model begins, or at an
    edge of a block the message that is sent there."""
    found, begun = [[0, "f", "start"]], set()
    for i, place in enumerate(places):
        step = recording.steps[place]
        call = recording.calls[step.call]
        phase, names = call.phase[0], f"{call.name} {call.module} {step.note}"
        part = next((words for name, words in PARTS.items() if name in names), "")
        if step.kind == "gradient":
            phase = "b"
        elif part in ("gradient sums", "gradient norm"):
            phase = "e"
        elif step.line and "optimizer.step()" in source.lines[step.line - 1]:
            phase, part = "e", "optimizer's step"
        if phase == "r":  # one landmark for what runs again
            part = re.sub(r".*layers\.(\d+).*", r"layer \1", call.module) if part else ""
            part = part if part.startswith("layer") else "head and loss"
        is_new = phase == "b" or (phase, part) not in begun
        if part and is_new and step.kind != "hf exit" and [phase, part] != found[-1][1:]:
            begun.add((phase, part))
            found.append([i, phase, part])
        if step.messages and found[-1][2][-5:] in ("entry", "'exit", " exit") and phase in "fb":
            first = found[-1][0]
            if not any(recording.steps[p].messages for p in places[first:i]):
                found[-1][0] = i
    return found


def spans(recording, places, rank):
    """[rank, action, its first and last place in the page's steps] of pp.py's actions."""
    found = []
    inside = {c.number: c.number for c in recording.calls if c.name == "Pipeline.compute"}
    names = {}
    for call in recording.calls:  # what an action calls belongs to it
        if call.parent in inside:
            inside.setdefault(call.number, inside[call.parent])
    for i, place in enumerate(places):
        step = recording.steps[place]
        if "action" in step.changed and step.call in inside:
            names[step.call] = step.changed["action"].split()[0]
        action = inside.get(step.call)
        if action is None:
            continue
        if found and found[-1][4] == action:
            found[-1][3] = i
        else:
            found.append([rank, names.get(action, ""), i, i, action])
    return [row[:4] for row in found]


def timeline(setting):
    """pp.simulate()'s: [rank, action, begin, end], in times of a rank's forward."""
    options = dict(zip(setting.options[::2], setting.options[1::2]))
    again = options["--recompute"] == "full"  # the backward begins with another forward
    cost = {"F": 1, "B": 2 + again}
    if options["--schedule"] == "zb":
        cost = {"F": 1, "B": 1 + again, "W": 1}
    schedule = pp.SCHEDULES[options["--schedule"]]
    schedules = [list(schedule(rank, 2, 2)) for rank in range(2)]
    rows = pp.simulate(schedules, 2, lambda action: cost[action.kind])
    return [[rank, str(action), begin, end] for rank, action, begin, end in rows]


def packed(script, pack, ranks, one, setting, only=None):
    """Recordings as the page reads them, the places of its steps in each, and what is odd."""
    run = {"P": len(ranks), "ends": None, "spans": [], "timeline": [], "marks": []}
    if script == "pp":
        run["tracks"], places, odd = packed_apart(ranks, one, pack)
        run["ends"], run["timeline"] = moments(ranks, places), timeline(setting)
        for rank, (recording, of) in enumerate(zip(ranks, places)):
            run["spans"] += spans(recording, of, rank)
        run["calls"] = [pack.calls(r) for r in ranks]
    else:
        sharing = max(1, len(ranks) // setting.model[5])
        steps, of, odd = packed_together(ranks, one, pack, sharing, only)
        run["tracks"], places, run["calls"] = [steps], [of], [pack.calls(ranks[0])]
        run["marks"] = landmarks(ranks[0], of, pack.source)
    return run, places, odd


def right_run(script, pack, name, world, setting, odd):
    """One run, as the page reads it, and what it was made of."""
    path = ROOT / f"{script}.py"
    ranks, (one,) = record(path, world, setting), record(path, 1, setting)
    only = ONE_BLOCK if name == "shared" else None
    run, places, found = packed(script, pack, ranks, one, setting, only)
    if script == "pp":
        marks = landmarks(ranks[0], places[0], pack.source)
        run["marks"] = [[run["ends"][0][i], p, words] for i, p, words in marks if p == "e"]
    odd.setdefault(script, {}).update(found)
    return run, ranks, one


def broken(script, pack, bug, ranks, one, setting):
    """A run with a bug of break_it.py, and the step at which it goes wrong; None: nowhere here."""
    found = record(ROOT / f"{script}.py", len(ranks), setting, bug)
    lines = {line: line for line in range(1, len(pack.source.lines) + 1)}
    first = first_difference(ranks, found, lines)
    if first is None or any(r.error for r in found):
        return None
    run, places, _ = packed(script, pack, found, one, setting)
    track = first.rank if script == "pp" else 0
    at = next(s for s in found[first.rank].steps if s.time >= first.time)
    at = found[first.rank].steps.index(at)
    i = next((i for i, place in enumerate(places[track]) if place >= at), len(places[track]) - 1)
    wrong = run["ends"][track][i] if run["ends"] else i
    words = in_words(ROOT / f"{script}.py", first, ranks, found, setting)
    name = first.name or "what it sends"
    run["wrong"] = [wrong, first.rank, first.function, first.line, name, *words]
    run["about"] = BUGS[script][bug].__doc__
    return run


def without_common_start(run, right):
    """A broken run without the steps that begin it as they begin the right one: `same` has how
    many of each rank; and without calls, where they are the same."""
    run["same"] = []
    for track, (mine, others) in enumerate(zip(run["tracks"], right["tracks"])):
        count = next((i for i, (a, b) in enumerate(zip(mine, others)) if a != b), len(mine))
        run["same"].append(min(count, len(others)))
        run["tracks"][track] = mine[run["same"][track] :]
    run["calls"] = None if run["calls"] == right["calls"] else run["calls"]
    return run


def walk(scripts=tuple(BUGS)):
    """{script: gzipped JSON in base64, which the page unpacks when it is first shown}, and for the
    questions and tests the same plainly, with what is no known tensor under "odd"."""
    data, odd = {}, {}
    for script in scripts:
        pack, told, broken_runs = Pack(script), {}, {}
        for name, (world, setting) in runs(script).items():
            told[name], *made = right_run(script, pack, name, world, setting, odd)
            if name in ("none", "1f1b-none"):
                for bug in BUGS[script]:
                    run = broken(script, pack, bug, *made, setting)
                    if run:
                        broken_runs[bug] = without_common_start(run, told[name])
        data[script] = {"functions": pack.functions, "lines": pack.lines, "kinds": KINDS}
        data[script] |= {"names": list(pack.names), "pool": list(pack.pool), "runs": told}
        data[script]["bugs"] = broken_runs
    return data, odd


def squeezed(data):
    """{script: its data as gzipped JSON in base64}."""
    found = {}
    for script, told in data.items():
        text = json.dumps(told, separators=(",", ":"), ensure_ascii=False)
        found[script] = base64.b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode()
    return found
