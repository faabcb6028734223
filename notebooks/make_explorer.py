"""Makes explorer.html: one file with the page (explorer/) and the data that it shows.

    python notebooks/make_explorer.py                         # all six views: hours, for memory
    python notebooks/make_explorer.py --only walk time        # these; the others' data stay

The questions (explorer/questions.py) are made of these data, each time.

The page computes no layout, memory or schedule: the scripts that it is about run here.
"""

import argparse
import json
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, pairwise, product
from pathlib import Path
from queue import Queue
from types import SimpleNamespace

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
import torch  # noqa: E402
from explorer.memory import memory  # noqa: E402
from explorer.questions import questions  # noqa: E402
from explorer.timetable import timetable  # noqa: E402
from explorer.walk import squeezed, walk  # noqa: E402

import pp  # noqa: E402
import sp_layout_sim  # noqa: E402
from labs import four_layouts, schedules  # noqa: E402
from labs.kit.harness import LABS, load  # noqa: E402
from labs.lab1_collectives.show import gather_and_add  # noqa: E402

PAGE, PARTS = HERE / "explorer.html", HERE / "explorer"
DATA = re.compile(r'(?<=<script type="application/json" id="data">).*?(?=</script>)', re.DOTALL)
SCRIPTS = ["shell.js", "controls.js", "ask.js", "walk_data.js", "walk.js", "layouts_words.js"]
SCRIPTS += ["layouts.js", "memory.js", "pipelines.js", "collectives.js", "time.js"]


# ---- Layouts: four_layouts.py's own run, watched -------------------------------------------------

SIZES = {"batch": 1, "seq": 64, "hidden": 64, "heads": 8, "ffn": 256}
BLOCK = [f"--{name}={size}" for name, size in SIZES.items()]


HOLDS = {"Replicate": "replicated", "Partial": "partial sum", "Shard(1)": "tokens"}
AXIS = {"tokens": 1, "features": 2, "heads": 2}


class Watched(sp_layout_sim.Ranks):
    """Keeps what each exchange sends, beside counting it."""

    def __init__(self, placements):
        super().__init__(placements)
        self.exchanges = []  # (collective, pieces, wire bytes of all ranks)

    def exchange(self, pieces, collective, calls=1):
        before = self.counts.get((self.phase, collective), [0, 0])[1]
        got = super().exchange(pieces, collective, calls)
        sent = self.counts[self.phase, collective][1] - before
        self.exchanges.append((collective, pieces, sent))
        return got


def message_bytes(collective, pieces):
    """Of all ranks together: what is summed, gathered, exchanged or sent."""
    arrays = [{id(x): x.size for x in row} for row in pieces]
    total = sp_layout_sim.BF16 * sum(sum(sizes.values()) for sizes in arrays)
    return total * len(pieces) if collective == "all_gather" else total


def word(placement, step):
    """The page's word. Shard(2) is of heads in (b, s, heads, d), of features in (b, s, f)."""
    several = len(step["shapes"][0]) > 3
    return HOLDS.get(placement, "heads" if several else "features")


class Story:
    """A layout as the page tells it: tensors, and moments, each of which makes one of another."""

    def __init__(self, steps, full, exchanges):
        self.steps, self.full, self.exchanges = steps, full, exchanges
        self.tensors, self.moments, self.P = [], [], len(steps["x"]["slices"])

    def add(self, label, holds, size, places, shapes, owners=None):
        """The number of a tensor. owners: whose tokens or features a rank has now."""
        shapes = [list(shape) for shape in shapes]
        tensor = [label, holds, size, places, shapes, owners or list(range(self.P))]
        if tensor not in self.tensors:
            self.tensors.append(tensor)
        return self.tensors.index(tensor)

    def tensor(self, step, gradient=False):
        """A step's value, or its gradient."""
        found, size = self.steps[step], list(self.full[step]["shapes"][0][1:3])
        holds = word(found["gradient_placement" if gradient else "placement"], found)
        places = [[0, size[0], 0, size[1]] for _ in range(self.P)]
        for place, cut in zip(places, found["slices"] if holds in AXIS else []):
            axis = AXIS[holds]
            place[2 * axis - 2 : 2 * axis] = map(int, cut.split(":"))
        name = f"gradient of {step}" if gradient else step
        return self.add(name, holds, size, places, found["shapes"])

    def move(self, phase, before, after, calls=1, part=(1, 1)):
        """The next exchange. calls: 0 for the second half of an all-reduce: it is one message."""
        collective, pieces, wire = self.exchanges.pop(0)
        flights = ""  # sender and receiver, a digit each; what flies is what both hold of it
        for r, to in product(range(self.P), repeat=2):
            if r != to and pieces[r][to].size:
                flights += f"{r}{to}"
        sent = calls, message_bytes(collective, pieces) if calls else 0, wire
        self.moments.append([phase, before, after, collective, *sent, flights, *part])

    def all_reduce(self, phase, before, after):
        """A reduce-scatter and an all-gather; between them each rank has the sum of its tokens."""
        size, row = self.tensors[before][2], self.exchanges[0][1][0]
        ends = accumulate((x.shape[1] for x in row), initial=0)
        places = [[*cut, 0, size[1]] for cut in pairwise(ends)]
        holds = "shard" if phase == "gradients" else "tokens"
        between = self.add("sum", holds, size, places, [x.shape for x in row])
        self.move(phase, before, between, 1, (1, 2))
        self.move(phase, between, after, 0, (2, 2))

    def ring(self, phase, sends):
        """Keys and values go round, in the backward by turns with their gradients."""
        *_, size, homes, shapes, _ = self.tensors[self.tensor("qkv")]
        both = [[*shape[:3], 2, shape[4]] for shape in shapes]
        for i in range(sends):
            gradients, turn = (i % 2 == 0, i // 2) if phase == "backward" else (False, i)
            name = "gradients of keys and values" if gradients else "keys and values"
            tensors = []
            for turns in (turn, turn + 1):
                owners = [(r - turns) % self.P for r in range(self.P)]
                here = [homes[r] for r in owners], [both[r] for r in owners], owners
                tensors.append(self.add(name, "tokens", size, *here))
            self.move(phase, *tensors, 1, (i + 1, sends))

    def step(self, phase, before, after):
        """From one step to the next; in the backward from one gradient to the next."""
        backward = phase == "backward"
        both = self.steps[before if backward else after]["moved_by"] or ("nothing", "nothing")
        move, tensors = both[backward], [self.tensor(name, backward) for name in (before, after)]
        if move == "all_reduce":
            self.all_reduce(phase, *tensors)
        elif move == "nothing" or move.endswith("send"):
            sends = {"nothing": 0, "P - 1 send": self.P - 1, "2 P - 1 send": 2 * self.P - 1}
            self.ring(phase, sends[move])
            self.moments.append([phase, *tensors, "", 0, 0, 0, "", 1, 1])
        else:
            self.move(phase, *tensors, 3 if move.startswith("3") else 1)

    def gradients(self, weight, shape):
        """All-reduces of replicated weights' gradients, in one bucket; the first is drawn."""
        what = [shape[0], 1], [[0, shape[0], 0, 1]] * self.P, [shape] * self.P
        label = f"gradient of {weight}, and {len(self.exchanges) // 2 - 1} more weights"
        tensors = [self.add(label, holds, *what) for holds in ("partial sum", "replicated")]
        self.all_reduce("gradients", *tensors)
        for i, (collective, pieces, wire) in enumerate(self.exchanges):
            half = self.moments[i % 2 - 2]
            half[5] += 0 if i % 2 else message_bytes(collective, pieces)
            half[6] += wire


def layouts():
    """runs: {layout: [{tensors, moments, weights, kept: bytes of each rank} for 1 to 8 ranks]}."""
    data, full = {}, {}
    for P in range(1, 9):
        args = four_layouts.parse([*BLOCK, "--tp", str(P)])
        results = four_layouts.run(args)["layouts"]
        for layout, result in results.items():
            full |= result["steps"] if P == 1 else {}
            problem, first = four_layouts.make_problem(args), "down bias"  # of the gradients
            watched = four_layouts.simulate(layout, problem, P, Watched)
            story = Story(result["steps"], full, watched.ranks.exchanges)
            shown = list(result["steps"])
            for before, after in pairwise(shown):
                story.step("forward", before, after)
            for before, after in pairwise(shown[::-1]):
                if after.startswith("enter") and layout == "sp":  # gathered again
                    kept = shown[shown.index(after) - 1]
                    story.move("backward", story.tensor(kept), story.tensor(after))
                story.step("backward", before, after)
            if story.exchanges:
                story.gradients(first, watched.dW[first][0].shape)
            for tensor in story.tensors:  # of all ranks alike: once
                tensor[3:5] = [x[:1] if x.count(x[0]) == P else x for x in tensor[3:5]]
            told = {"weights": result["weight_bytes"], "kept": result["kept_bytes"]}
            told |= {"tensors": story.tensors, "moments": story.moments}
            data.setdefault(layout, []).append(told)
    return {"runs": data, "block": SIZES}


# ---- Pipelines: pp.py's own schedules and simulator ----------------------------------------------

# Times of F, B and W, for a rank's layers; attention, without weights, has no W
COSTS = {"1:1:1": "all kept", "1:2:1": "recomputed", "2:3:1": "much attention", "1:1:2": "long W"}
RANKS, MICROBATCHES = range(2, 9), [1, 2, 3, 4, 6, 8, 12, 16]


def line_of(rows, rank, P, V):
    """What a rank does, as text: F2, or with V stages a rank F20; a dot is a unit of idle time. The
    microbatch is in hexadecimal (M is 16 at most), the last digit is the rank's stage."""
    text, now = "", 0
    for _, action, begin, end in (row for row in rows if row[0] == rank):
        stage = action.stage // P if V > 1 else ""
        text += "." * int(begin - now) + f"{action.kind}{action.microbatch:x}{stage}"
        now = end
    return text


def pipelines():
    """Of every schedule, for COSTS: each rank's line, the bubble, and the formula's; and how many
    microbatches are in flight at most."""
    found = {}
    cases = [
        (schedule, P, M) for schedule in ("afab", "1f1b", "zb") for P in RANKS for M in MICROBATCHES
    ]
    cases += [("interleaved", P, M) for P in RANKS for M in range(P, 17, P)]  # multiples alone
    for schedule, P, M in cases:
        for V in (2, 3, 4) if schedule == "interleaved" else (1,):
            ranks = [list(pp.SCHEDULES[schedule](rank, P, M, V)) for rank in range(P)]
            row = {"in_flight": [schedules.most_in_flight(actions) for actions in ranks]}
            for costs in COSTS:
                F, B, W = map(int, costs.split(":"))  # in units of 1 / V
                cost = {"F": F, "B": B, "W": W} if schedule == "zb" else {"F": F, "B": B + W}
                rows = pp.simulate(ranks, P * V, lambda action, cost=cost: cost[action.kind])
                formula = schedules.bubble_formula(P, M, V, *cost.values())
                row[":".join(map(str, cost.values()))] = {
                    "lines": [line_of(rows, rank, P, V) for rank in range(P)],
                    "bubble": round(schedules.bubble(rows, P), 6),
                    "formula": formula and round(formula, 6),  # None: no closed form
                }
            found[f"{schedule} {P} {M} {V}"] = row
    return {"costs": COSTS, "microbatches": MICROBATCHES, "schedules": found}


# ---- Collectives: lab 1's own functions, each rank a thread, every send recorded -----------------


def on_threads(P, function):
    """function(lab, x, group) on P ranks: [(its result, [(to, sent, received)])] of each.

    Row c of a rank's x is chunk c: zeros, and a 1 in a column that belongs to this rank and chunk.
    """
    mail = {pair: Queue() for pair in product(range(P), repeat=2)}

    def run(rank):
        log = []

        def exchange(x, to, source, shape, group):
            mail[rank, to].put(x)
            log.append((to, x, mail[source, rank].get(timeout=60)))
            return log[-1][2]

        lab, group = (
            load(LABS / "lab1_collectives" / "lesson.py"),
            SimpleNamespace(rank=lambda: rank),
        )
        lab.exchange, group.size = exchange, lambda: P  # each rank has a lab with its own exchange
        return function(lab, torch.eye(P * P)[rank * P : (rank + 1) * P], group), log

    with ThreadPoolExecutor(P) as ranks:
        return list(ranks.map(run, range(P)))


def cells(rows, P):
    """{(chunk, bit mask of the ranks whose chunks were added)}."""
    parts = [[divmod(int(i), P) for i in row.nonzero()] for row in rows]
    return {(part[0][1], sum(1 << rank for rank, _ in part)) for part in parts}


OPERATIONS = {
    "reduce_scatter": lambda lab, x, group: lab.ring_reduce_scatter(x, group),
    "all_gather": lambda lab, x, group: lab.ring_all_gather(x[[group.rank()]], len(x), group),
    "all_reduce": lambda lab, x, group: lab.ring_all_reduce(x, group),
    "all_to_all": lambda lab, x, group: lab.all_to_all(x, [1] * len(x), [1] * len(x), group),
    "gather_and_add": gather_and_add,
}


def collectives():
    """{operation: [its run on P ranks, for P from 2 to 8]}.

    A run is, of each rank, the cells of its result at the start, and of each step [to, cells sent,
    cells of its result afterwards]: a running sum, or what it has gathered so far.
    """
    data = {name: [] for name in OPERATIONS}
    for name, P in product(OPERATIONS, range(2, 9)):
        run = []
        for result, log in on_threads(P, OPERATIONS[name]):
            got = [cells(received, P) for *_, received in log]
            sent = [cells(x, P) for _, x, _ in log] + [cells(result.reshape(-1, P * P), P)]
            has = sent[-1].difference(*got) if name in ("all_gather", "all_to_all") else set()
            steps = [sorted(has)]
            for i, (to, *_) in enumerate(log):
                if name == "gather_and_add":
                    has = cells(log[0][1] + sum(received for *_, received in log[: i + 1]), P)
                elif i < P - 1 and name in ("reduce_scatter", "all_reduce"):
                    has = sent[i + 1]  # what a rank has added up it sends next, or it is the result
                else:
                    has = has | got[i]
                steps.append([to, sorted(sent[i]), sorted(has)])
            run.append(steps)
        data[name].append(run)
    return data


VIEWS = {f.__name__: f for f in (layouts, memory, pipelines, collectives)}
VIEWS |= {"time": timetable, "walk": lambda: squeezed(walk()[0])}


def embedded(page):
    """The data of a page that was made before."""
    return json.loads(DATA.search(page.read_text())[0])


def assemble(data):
    """explorer.html's text."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False)
    scripts = [(PARTS / name).read_text() for name in SCRIPTS if (PARTS / name).exists()]
    parts = {"css": (PARTS / "page.css").read_text().strip(), "js": "\n".join(scripts).strip()}
    parts["data"] = text.replace("<", r"\u003c")  # nothing in it may look like the element's end
    return re.sub(r"\{(css|js|data)\}", lambda m: parts[m[1]], (PARTS / "page.html").read_text())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=VIEWS, default=list(VIEWS), metavar="VIEW")
    args = parser.parse_args()
    old = embedded(PAGE) if PAGE.exists() else {}
    data = {name: make() if name in args.only else old.get(name) for name, make in VIEWS.items()}
    data["questions"] = questions(data)
    PAGE.write_text(assemble(data))
    print(f"{PAGE}: {PAGE.stat().st_size / 1024:,.0f} KiB")


if __name__ == "__main__":
    main()
