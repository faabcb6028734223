"""Where a broken script goes wrong first: its run on P ranks beside that of the right script.

Both are recorded line by line (record.py). The first difference is a variable that holds something
else after the same line, a message that is not the same, or an exception. A rank runs its lines
in order. Of several ranks the clock says which was first, since a message arrives after it was
sent. The difference is then described as compare.py does it, beside a run of one device.
"""

import json
import sys
import types
from difflib import SequenceMatcher
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from labs.bugs import BUGS, load
from labs.walk.compare import OneDevice, badge, key, matched
from labs.walk.record import ROOT, Setting, record

IDS = [[5, 1, 6, 3, 10, 0, 7], [7, 3, 0, 4, 9, 2, 8], [1, 6, 6, 0, 8, 4, 3]]  # 2 is padding, or 7
SHORTER = [[3, 9, 1, 6, 0], [8, 8, 4, 1, 2], [10, 5, 0, 7, 2]]
LONG = IDS, SHORTER  # two steps: what remains of the first would make the second wrong
MANY = IDS + IDS[1:], SHORTER + SHORTER[1:]  # five sequences: microbatches differ in size
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 2.0, "attention_factor": 1.0}
LONGROPE |= {"short_factor": [1.0], "long_factor": [3.0], "original_max_position_embeddings": 6}
NONE, FULL = ("--recompute", "none"), ("--loss", "full")
BIAS = {"attention_bias": True, "mlp_bias": True}
WINDOWS = {"sliding_window": 2}
WINDOWS |= {"layer_types": ["full_attention"] * 2 + ["sliding_attention"] * 2}


def setting(model, batches=LONG, options=(), config=None):
    return Setting(model, batches, options, True, config or {}, 6)


PLAIN = [  # (ranks, what they run): sizes that ranks do not divide, since there mistakes show
    (2, setting(("llama", 12, 9, 2, 6, 3, 11, True))),
    (2, setting(("qwen3", 12, 9, 4, 6, 3, 11, True), config=WINDOWS | {"pad_token_id": 7})),
    # Ranks share KV heads; eager, since sdpa can do without num_key_value_groups
    (4, setting(("qwen2", 8, 9, 1, 4, 2, 11, False), options=(*NONE, "--attn", "eager"))),
    (3, setting(("llama", 6, 9, 1, 3, 3, 11, False), options=(*NONE, *FULL), config=BIAS)),
    (2, setting(("llama", 4, 4, 1, 2, 2, 11, False), config={"rope_parameters": LONGROPE})),
]
DEEP = "llama", 12, 9, 4, 6, 3, 11, True
CUT = "--microbatches", "3"
PIPELINES = [
    (2, setting(DEEP, MANY, ("--schedule", "1f1b", *CUT))),
    (2, setting(DEEP, MANY, ("--schedule", "zb", *CUT))),
    (2, setting(DEEP, MANY, ("--schedule", "interleaved", "--microbatches", "4"))),
    (4, setting(DEEP, MANY, ("--schedule", "zb", *CUT, *NONE, *FULL))),
    (3, setting(DEEP, MANY, ("--schedule", "afab", *CUT, *FULL))),
    (2, setting(("qwen3", *DEEP[1:]), MANY, ("--schedule", "1f1b", *CUT), WINDOWS)),
]
SETTINGS = {"tp": PLAIN, "sp_megatron": PLAIN, "sp_ulysses": PLAIN, "pp": PIPELINES}
NO_ERROR = "no error"
WORDS = {"=": "equal on all ranks, as one device has it", "+": "a partial sum"}
WORDS |= {"u": "not yet filled"}
WORDS |= {"max": "a partial maximum", "s": "equal on all ranks, and not as one device has it"}
WORDS |= {"x": "each rank's own", "r": "one device's rows in another order"}


class Difference(NamedTuple):
    """What is not as it should be, and where. Sorted by time."""

    time: float
    rank: int
    in_copy: bool  # whether line is the broken script's; else the right one's, which has it alone
    function: str
    line: int | None
    module: str
    phase: str
    name: str  # of the variable, or ""
    expected: object
    found: object
    parameter: str  # whose tensor it is, or ""
    right_place: int = -1  # the step in the right run
    place: int = -1  # and in the broken one; -1: it has none


def differs(a, b):
    """Whether two values are not the same, except for rounding in float64."""
    if not (isinstance(a, np.ndarray) and isinstance(b, np.ndarray)):
        return type(a) is not type(b) or a != b
    if a.shape != b.shape or a.dtype != b.dtype:
        return True
    scale = max(1e-30, float(np.abs(a).max(initial=0))) if a.dtype.kind == "f" else 1
    return not np.allclose(a, b, rtol=0, atol=1e-11 * scale, equal_nan=True)


def told(messages):
    """Messages in words."""
    parts = []
    for m in messages:
        peer = f" {'to' if m['op'] == 'send' else 'from'} rank {m['peer']}" if "peer" in m else ""
        parts.append(f"{m['op']}{peer}, {m['bytes']} bytes")
    return "; ".join(parts) or "no message"


def in_messages(right, found):
    """(expected, found) where two lines' messages are not the same; None where they are."""
    if told(right) != told(found):
        return told(right), told(found)
    for a, b in zip(right, found):
        for what in "sent", "got":
            if differs(a[what], b[what]):
                return a[what], b[what]
    return None


class Pair:
    """A rank's run beside the right one, and what each call's variables hold as of now."""

    def __init__(self, rank, right, found, line_of):
        self.rank, self.right, self.found = rank, right, found
        self.line_of = line_of  # {line of the broken script: the same line of the right one}
        self.held = {id(right): {}, id(found): {}}

    def blocks(self):
        """What has to be done to the right run's steps to get the broken one's."""
        keys = [key(step, self.right.calls) for step in self.right.steps]
        others = []
        for step in self.found.steps:
            kind, name, phase, line, *rest = key(step, self.found.calls)
            others.append((kind, name, phase, line and self.line_of.get(line, -line), *rest))
        return SequenceMatcher(None, keys, others, autojunk=False).get_opcodes()

    def go_on(self, run, steps):
        for step in steps:
            self.held[id(run)].setdefault(step.call, {}).update(step.changed)

    def difference(self, run, step, name, both, places, when=None):
        call, held = run.calls[step.call], self.held[id(run)].get(step.call, {})
        calls = [call]
        while calls[-1].is_hf and calls[-1].parent is not None:
            calls.append(run.calls[calls[-1].parent])
        line = step.line if len(calls) == 1 else calls[-2].line
        function = " in ".join(c.name for c in calls[:: len(calls) - 1 or 1])
        parameter = held.get(f"name of {name.split('.')[0]}", "")
        where = run is self.found, function, line, call.module, call.phase
        when = step.time if when is None else when
        return Difference(when, self.rank, *where, name, *both, parameter, *places)

    def first(self):
        """The first Difference, or None."""
        for tag, i1, i2, j1, j2 in self.blocks():
            old, new = self.right.steps[i1:i2], self.found.steps[j1:j2]
            if tag == "equal":
                for i, (a, b) in enumerate(zip(old, new)):
                    self.go_on(self.right, [a])
                    self.go_on(self.found, [b])
                    if one := self.of_step(a, b, (i1 + i, j1 + i)):
                        return one
            else:
                self.go_on(self.right, old)
                self.go_on(self.found, new)
                one = self.of_messages(old, new, self.found.steps[j1:], (i1, -1))
                if one or self.found.error and not any(s.messages for s in self.found.steps[j1:]):
                    return one  # else the error says where
        return None

    def of_step(self, a, b, places):
        """The Difference of a step that both runs have."""
        if pair := in_messages(a.messages, b.messages):
            return self.difference(self.found, b, "", pair, places)
        mine, others = self.held[id(self.right)][a.call], self.held[id(self.found)][b.call]
        for name in dict.fromkeys([*b.changed, *a.changed]):
            if name in mine and name in others and differs(mine[name], others[name]):
                return self.difference(self.found, b, name, (mine[name], others[name]), places)
        return None

    def of_messages(self, old, new, after, places):
        """The Difference of steps that one run alone has: in what they send."""
        old, new = ([step for step in steps if step.messages] for steps in (old, new))
        for a, b in zip(old, new):
            if pair := in_messages(a.messages, b.messages):
                return self.difference(self.found, b, "", pair, places)
        if len(old) > len(new) and (not self.found.error or any(s.messages for s in after)):
            missing = old[len(new)]
            when = (after or self.found.steps[-1:])[0].time
            both = told(missing.messages), "no message"
            return self.difference(self.right, missing, "", both, places, when)
        if len(new) > len(old):
            more = new[len(old)]
            both = "no message", told(more.messages)
            return self.difference(self.found, more, "", both, places)
        return None


def line_map(right_path, path):
    """{line of a copy: the same line of the script}; a changed line is the one that it replaces."""
    lines = [p.read_text().splitlines() for p in (path, right_path)]
    found = {}
    for tag, i1, i2, j1, j2 in SequenceMatcher(None, *lines, autojunk=False).get_opcodes():
        if tag == "equal" or (tag == "replace" and i2 - i1 == j2 - j1):
            found |= {i + 1: j + 1 for i, j in zip(range(i1, i2), range(j1, j2))}
    return found


def first_difference(right, found, line_of):
    """The first Difference of the ranks' runs, or None."""
    differences = []
    for rank, pair in enumerate(zip(right, found)):
        one = Pair(rank, *pair, line_of).first()
        differences += [one] if one else []
        if pair[1].error:
            when, function, line, text = pair[1].error
            where = True, function, line, "", "forward", ""
            differences.append(Difference(when, rank, *where, NO_ERROR, text, ""))
    first = min(differences, key=lambda d: d.time, default=None)
    # Ranks that go wrong at the same step do so in any order, so the lowest is named
    at = first and (first.right_place, first.line, first.name)
    return next((d for d in differences if (d.right_place, d.line, d.name) == at), None)


def original(path):
    """The script that a file is, or is a copy of, by its STRATEGY. Raises ValueError if none,
    SyntaxError if it is no Python."""
    text = path.read_text()
    compile(text, path, "exec")
    if "\n# ---- 2" in text and "\n# The lesson ends" in text:  # what record.py looks for
        for line in text.splitlines():
            if line.startswith("STRATEGY = ") and (name := line.split('"')[1]) in SETTINGS:
                return ROOT / f"{name}.py"
    raise ValueError(f"{path} is no copy of {', '.join(f'{name}.py' for name in SETTINGS)}")


@lru_cache(6)  # for a search of several bugs
def right_run(path, number):
    """The right script's Recordings of a setting."""
    return record(path, *SETTINGS[path.stem][number])


def find(path, bug=None):
    """Where a script with a bug, or a copy with a mistake, goes wrong first: (Difference,
    right recordings, broken recordings, what was recorded); None where nothing shows it."""
    right_path = original(path)
    line_of = line_map(right_path, path)
    for number, (world, what) in enumerate(SETTINGS[right_path.stem]):
        right, found = right_run(right_path, number), record(path, world, what, bug)
        difference = first_difference(right, found, line_of)
        if difference:
            return difference, right, found, what
    return None


def latest(run, place, name):
    """What a variable holds after the step at a place."""
    call = run.steps[place].call
    for step in run.steps[place::-1]:
        if step.call == call and name in step.changed:
            return step.changed[name]
    return None


def in_words(path, difference, right, found, what):
    """(what it should be, what it is), across ranks where they run the same lines."""
    if not isinstance(difference.expected, np.ndarray):
        return str(difference.expected), str(difference.found)
    numbers = differing_numbers(difference.expected, difference.found)
    if path.stem == "pp" or difference.place < 0 or not difference.name:
        return numbers
    world, place = len(right), difference.right_place
    one = record(path, 1, what)[0]
    step = right[0].steps[place]
    candidates = OneDevice(one, right[0]).candidates(place, step.call, difference.name)
    sharing = max(1, world // what.model[5])
    words = []
    for runs in right, found:
        parts = []
        for mine, run in zip(right, runs):
            at = matched(mine.steps, mine.calls, run.steps, run.calls).get(place)
            parts.append(None if at is None else latest(run, at, difference.name))
        if not all(isinstance(x, np.ndarray) for x in parts):
            return numbers
        mark, _ = badge(parts, candidates, sharing)
        words.append(WORDS.get(mark) or f"a shard of dimension {mark[-1]} on each rank")
    return words if words[0] != words[1] else numbers


def differing_numbers(expected, found):
    """The first number that differs, or the shapes."""
    if not isinstance(found, np.ndarray) or expected.shape != found.shape:
        return f"of shape {expected.shape}", f"of shape {getattr(found, 'shape', None)}"
    place = tuple(int(i) for i in np.argwhere(~np.isclose(expected, found, 1e-9, 0))[0])
    at = f" at {list(place)}" if place else ""
    return f"{expected[place]:.5g}{at}", f"{found[place]:.5g}{at}"


def facts(path, bug=None):
    """{what --where tells}, of a script with a bug or of a copy; {} where nothing shows it."""
    result = find(path, bug)
    if result is None:
        return {}
    difference, right, found, what = result
    source = path if difference.in_copy else original(path)
    expected, is_now = in_words(original(path), difference, right, found, what)
    line = difference.line and source.read_text().splitlines()[difference.line - 1].strip()
    sent = "its error" if isinstance(expected, str) and expected == NO_ERROR else "what it sends"
    return {
        "file": source.name, "line": difference.line, "function": difference.function,
        "text": line, "variable": difference.name or sent, "rank": difference.rank,
        "of": difference.parameter or difference.module, "expected": expected, "is": is_now,
        "run": f"{len(right)} ranks, a small {what.model[0]}, {difference.phase}",
    }  # fmt: skip


def said(told):
    """facts() as --where prints them."""
    if not told:
        return (
            "--where: no difference in two training steps of small models on 2 to 4 ranks.\n"
            "Look at the code that these options choose, and at what only the proof uses."
        )
    of = f" of {told['of']}" if told["of"] else ""
    return (
        f"--where: the first line at which the ranks part from one device ({told['run']})\n"
        f"  {told['file']}, line {told['line']}, in {told['function']}\n"
        f"      {told['text']}\n"
        f"  {told['variable']}{of}, on rank {told['rank']}\n"
        f"      should be:  {told['expected']}\n"
        f"      is:         {told['is']}"
    )


def after_failure(path, bug, script):
    """Have a script's run() say where, after FAIL. Rank 0 finds it on ranks of its own, while the
    others wait for it."""
    right = script.run

    def run(args, group):
        passed = right(args, group)
        if not passed and script.IS_RANK0:
            print(f"\n{said(facts(path.resolve(), bug))}", flush=True)
        script.gather_objects(None, group)
        return passed

    script.run = run


def planted(path, bug):
    """[(function, line)] that a bug replaces in a script."""

    def functions(script):
        found = dict(vars(script))
        for name, kind in vars(script).items():
            if isinstance(kind, type) and kind.__module__ == script.__name__:
                found |= {f"{name}.{method}": getattr(kind, method) for method in vars(kind)}
        return {name: f for name, f in found.items() if isinstance(f, types.FunctionType)}

    script = load(path)
    before = functions(script)
    BUGS[script.STRATEGY][bug](script)
    after = functions(script)
    changed = [name for name in before if before[name] is not after.get(name)]
    return [(name, before[name].__code__.co_firstlineno) for name in changed]


def main(argv):
    """--where FILE: a script with all of its bugs, or a copy; --json FILE: write it, too."""
    file = argv[argv.index("--json") + 1] if "--json" in argv else None
    path = Path(argv[0] if argv else "no file")
    try:
        is_script = path.resolve() == original(path)
    except (OSError, SyntaxError, ValueError) as problem:
        print(f"error: {problem}; give a copy of a script, such as my_tp.py", file=sys.stderr)
        return 2
    found = {}
    for bug in BUGS[path.stem] if is_script else [None]:
        told = found[bug] = facts(path.resolve(), bug)
        print(f"\n{bug}:" if bug else "", said(told), sep="\n", flush=True)
        if bug:
            told["planted"] = planted(path, bug)
    if file:
        Path(file).write_text(json.dumps({"where": found}))
    return 1 if any(found.values()) and not is_script else 0
