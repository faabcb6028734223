"""Makes explorer.html: one file with the page (explorer/) and the data that it shows.

    python notebooks/make_explorer.py                         # all four views
    python notebooks/make_explorer.py --only layouts          # these; the others' data stay

The page computes no layout, memory or schedule: all of that comes from the scripts that it is
about, which run here.
"""

import argparse
import json
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise, product
from pathlib import Path
from queue import Queue
from types import SimpleNamespace

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "labs")]
import torch  # noqa: E402
from checks.lab1 import gather_and_add  # noqa: E402
from ranks import LABS, load  # noqa: E402

import sp_layout_sim  # noqa: E402

PAGE, PARTS = HERE / "explorer.html", HERE / "explorer"
DATA = re.compile(r'(?<=<script type="application/json" id="data">).*?(?=</script>)', re.DOTALL)
SCRIPTS = ["shell.js", "layouts.js", "memory.js", "pipelines.js", "collectives.js"]


# Layouts: sp_layout_sim.py's own run, watched
# --------------------------------------------------------------------------------------------------

BLOCK = ["--batch", "1", "--seq", "64", "--hidden", "64", "--heads", "8", "--ffn", "256"]


class Watched(sp_layout_sim.Network):
    """Keeps what each exchange sends, beside counting it."""

    def __init__(self):
        super().__init__()
        self.exchanges = []  # (collective, pieces, wire bytes of all ranks)

    def exchange(self, pieces, collective, calls=1):
        before = self.traffic.get((self.phase, collective), [0, 0])[1]
        got = super().exchange(pieces, collective, calls)
        sent = self.traffic[self.phase, collective][1] - before
        self.exchanges.append((collective, pieces, sent))
        return got


def rectangle(piece, first, place):
    """[token, end, feature, end] of a piece in the full tensor.

    piece, first: views of what a rank holds, first of its beginning; place: where that lies.
    """
    offset = piece.__array_interface__["data"][0] - first.__array_interface__["data"][0]
    token, rest = divmod(offset, piece.strides[1])
    feature, features = (rest // piece.strides[2], piece.shape[2]) if piece.ndim > 2 else (0, 1)
    token, feature = token + place[0], feature + place[2]
    return [token, token + piece.shape[1], feature, feature + features]


def message_bytes(collective, pieces):
    """Of all ranks together: what is summed, gathered, exchanged or sent."""
    arrays = [{id(x): x.size for x in row if x is not None} for row in pieces]
    total = sp_layout_sim.BF16 * sum(sum(sizes.values()) for sizes in arrays)
    return total * len(pieces) if collective == "all_gather" else total


class Story:
    """A layout as the page tells it: tensors, and moments, each of which makes one of another."""

    def __init__(self, steps, full, exchanges):
        self.steps, self.full, self.exchanges = steps, full, exchanges
        self.tensors, self.moments = [], []

    def add(self, label, holds, size, places, shapes, owners=None):
        """The number of a tensor. owners: whose tokens or features a rank has now."""
        owners = owners or list(range(len(places)))
        tensor = [label, holds, size, places, [list(shape) for shape in shapes], owners]
        if tensor not in self.tensors:
            self.tensors.append(tensor)
        return self.tensors.index(tensor)

    def tensor(self, step, gradient=False):
        """A step's value, or its gradient."""
        found, size = self.steps[step], list(self.full[step]["shapes"][0][1:3])
        holds = found["gradient_holds"] if gradient else found["holds"]
        places = [[0, size[0], 0, size[1]] for _ in found["slices"]]
        shapes = found["shapes"]
        if holds not in ("replicated", "partial sum"):
            axis = sp_layout_sim.AXIS[holds]
            for place, cut in zip(places, found["slices"]):
                place[2 * axis - 2 : 2 * axis] = map(int, cut.split(":"))
        return self.add(f"gradient of {step}" if gradient else step, holds, size, places, shapes)

    def tell(self, phase, before, after, collective="", sent=(0, 0, 0), pieces=(), part=(1, 1)):
        """sent: calls, and message and wire bytes of all ranks together."""
        self.moments.append([phase, before, after, collective, *sent, list(pieces), *part])

    def move(self, phase, before, after, calls=1, part=(1, 1)):
        """The next exchange. calls: 0 for the second half of an all-reduce: it is one message."""
        collective, pieces, wire = self.exchanges.pop(0)
        places, flights = self.tensors[before][3], []
        for r, row in enumerate(pieces):
            first = next(x for x in row if x is not None)
            for to, x in enumerate(row):
                if x is not None and to != r:
                    flights.append([r, to, *rectangle(x, first, places[r])])
        sent = calls, message_bytes(collective, pieces) if calls else 0, wire
        self.tell(phase, before, after, collective, sent, flights, part)

    def all_reduce(self, phase, before, after):
        """A reduce-scatter and an all-gather; between them each rank has the sum of its tokens."""
        row, size = self.exchanges[0][1][0], self.tensors[before][2]
        places = [rectangle(x, row[0], (0, 0, 0, 0)) for x in row]
        between = self.add("sum", "tokens", size, places, [x.shape for x in row])
        self.move(phase, before, between, 1, (1, 2))
        self.move(phase, between, after, 0, (2, 2))

    def ring(self, phase, sends):
        """Keys and values go round, in the backward between the steps of their gradients."""
        size = list(self.full["qkv"]["shapes"][0][1:3])
        homes = self.tensors[self.tensor("qkv")][3]
        ranks = list(range(len(homes)))
        owners = {"keys and values": ranks, "gradients of keys and values": ranks}
        for i in range(sends):
            name = list(owners)[phase == "backward" and i % 2 == 0]
            pieces = self.exchanges[0][1]
            shapes = [next(x.shape for x in row if x is not None) for row in pieces]
            source = [next(r for r in ranks if pieces[r][to] is not None) for to in ranks]
            tensors = []
            for order in (ranks, source):  # before and after: whose a rank has now
                owners[name] = [owners[name][r] for r in order]
                places = [homes[owner] for owner in owners[name]]
                now = [shapes[r] for r in order]
                tensors.append(self.add(name, "tokens", size, places, now, owners[name]))
            self.move(phase, *tensors, 1, (i + 1, sends))

    def step(self, phase, before, after):
        """From one step to the next; in the backward from one gradient to the next."""
        backward = phase == "backward"
        move = self.steps[before if backward else after]["moved_by"] or ("nothing", "nothing")
        tensors = self.tensor(before, backward), self.tensor(after, backward)
        if move[backward] == "nothing":
            self.tell(phase, *tensors)
        elif move[backward] == "all_reduce":
            self.all_reduce(phase, *tensors)
        elif move[backward].endswith("send"):
            ranks = len(self.steps["x"]["shapes"])
            self.ring(phase, 2 * ranks - 1 if backward else ranks - 1)
            self.tell(phase, *tensors)
        else:
            calls = move[backward].split()[0]
            self.move(phase, *tensors, int(calls) if calls.isdigit() else 1)

    def gradients(self):
        """The all-reduce of what is left: the gradients of replicated weights, in one bucket."""
        if not self.exchanges:
            return
        ranks = len(self.steps["x"]["shapes"])
        message = sum(message_bytes(name, pieces) for name, pieces, _ in self.exchanges[::2])
        sent = 1, message, sum(wire for *_, wire in self.exchanges)
        places, shapes = [[0, 1, 0, 1]] * ranks, [[message // ranks // sp_layout_sim.BF16]] * ranks
        what = [1, 1], places, shapes
        before = self.add("gradients of replicated weights", "partial sum", *what)
        after = self.add("gradients of replicated weights", "replicated", *what)
        self.tell("gradients", before, after, self.exchanges[0][0], sent)
        self.exchanges.clear()


def layouts():
    """runs: {layout: [{tensors, moments, weights, kept: bytes of each rank} for 1 to 8 ranks]}."""
    sp_layout_sim.Network = Watched
    data, full = {layout: [] for layout in sp_layout_sim.LAYOUTS}, None
    for P in range(1, 9):
        args = sp_layout_sim.parse([*BLOCK, "--tp", str(P)])
        results = sp_layout_sim.run(args)["layouts"]
        full = full or results["tp"]["steps"]  # of 1 rank
        for layout, result in results.items():
            problem = sp_layout_sim.make_problem(args)
            net = sp_layout_sim.simulate(layout, problem, P)[-1]
            story = Story(result["steps"], full, net.exchanges)
            shown = [name for name, step in result["steps"].items() if step["shown"]]
            for before, after in pairwise(shown):
                story.step("forward", before, after)
            for before, after in pairwise(shown[::-1]):
                if after.startswith("enter") and layout == "sp":  # gathered again
                    kept = shown[shown.index(after) - 1]
                    story.move("backward", story.tensor(kept), story.tensor(after))
                story.step("backward", before, after)
            story.gradients()
            part = {"tensors": story.tensors, "moments": story.moments}
            part |= {"weights": result["weight_bytes"], "kept": result["kept_bytes"]}
            data[layout].append(part)
    computes = {"norm 1": "layer_norm", "norm 2": "rms_norm", "silu": "silu"}
    computes |= {"dropout 1": "dropout", "dropout 2": "dropout"}
    words = {step: getattr(sp_layout_sim, f).__doc__ for step, f in computes.items()}
    sizes = "b = {batch}, s = {seq}, h = {hidden}, {heads} heads, f = {ffn}".format(**vars(args))
    note = f"A block of {sizes}, in bfloat16. Shapes are (b, s, h) and so on"
    return {"runs": data, "words": words, "note": f"{note}: sp_layout_sim.py says more."}


def memory():
    return {}


def pipelines():
    return {}


# Collectives: lab 1's own functions, each rank a thread, every send recorded
# --------------------------------------------------------------------------------------------------


def on_threads(P, function):
    """function(x, group) on P ranks. Returns [(its result, [(to, sent, received)])] of each.

    Row c of a rank's x is chunk c, with a 1 in the column that belongs to this rank and this chunk:
    so the numbers of a sum say whose chunks are in it.
    """
    mail = {pair: Queue() for pair in product(range(P), repeat=2)}

    def run(rank):
        log = []

        def exchange(x, to, source, shape, group):
            mail[rank, to].put(x)
            log.append((to, x, mail[source, rank].get(timeout=60)))
            return log[-1][2]

        lab = load(LABS / "lab1_collectives.py")  # its own, with an exchange between threads
        lab.exchange = exchange
        group = SimpleNamespace(rank=lambda: rank, size=lambda: P)
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
    for name, operation in OPERATIONS.items():
        for P in range(2, 9):
            adding = {"reduce_scatter": P - 1, "all_reduce": P - 1}
            run = []
            for result, log in on_threads(P, operation):
                got = [cells(received, P) for *_, received in log]
                sent = [cells(x, P) for _, x, _ in log] + [cells(result.reshape(-1, P * P), P)]
                has = sent[-1].difference(*got) if name in ("all_gather", "all_to_all") else set()
                steps = [sorted(has)]
                for i, (to, *_) in enumerate(log):
                    # What a rank of a ring has added up is what it sends next, or its result.
                    has = sent[i + 1] if i < adding.get(name, 0) else has | got[i]
                    if name == "gather_and_add":
                        has = cells(log[0][1] + sum(received for *_, received in log[: i + 1]), P)
                    steps.append([to, sorted(sent[i]), sorted(has)])
                run.append(steps)
            data[name].append(run)
    return data


VIEWS = {f.__name__: f for f in (layouts, memory, pipelines, collectives)}


def embedded(page):
    """The data of a page that was made before."""
    return json.loads(DATA.search(page.read_text())[0])


def assemble(data):
    """explorer.html's text."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False)
    scripts = [(PARTS / name).read_text() for name in SCRIPTS if (PARTS / name).exists()]
    parts = {
        "css": (PARTS / "page.css").read_text().strip(),
        "js": "\n".join(scripts).strip(),
        "data": text.replace("<", r"\u003c"),  # nothing in it may look like the element's end
    }
    return re.sub(r"\{(css|js|data)\}", lambda m: parts[m[1]], (PARTS / "page.html").read_text())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=VIEWS, default=list(VIEWS), metavar="VIEW")
    only = parser.parse_args().only
    data = embedded(PAGE) if PAGE.exists() else {}
    for name, make in VIEWS.items():
        data[name] = make() if name in only else data.get(name, {})
    PAGE.write_text(assemble(data))
    sizes = [f"{name} {len(json.dumps(part)) / 1024:,.0f}" for name, part in data.items()]
    print(f"{PAGE}: {PAGE.stat().st_size / 1024:,.0f} KiB (data: {', '.join(sizes)})")


if __name__ == "__main__":
    main()
