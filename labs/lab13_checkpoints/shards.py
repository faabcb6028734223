"""Toy layouts, what their ranks hold, checkpoints of them: what lab 13's checks share.

And its checks of shards: where they lie, what two have in common, who saves them.
"""

import itertools
import random
from pathlib import Path

import torch

from labs.kit.compare import raised, tried
from labs.kit.harness import Wrong, expect
from labs.kit.usual import section, usual_hint, usual_results
from labs.lab7_ring_attention.lesson import split
from labs.lab13_checkpoints import lesson as finished
from labs.lab13_checkpoints.disk import on_turns

SHAPES = {"embedding": (7, 4), "q": (6, 4), "o": (4, 10), "norm": (4,), "head": (5, 4), "step": ()}
OF_BYTES = {8: torch.float64, 4: torch.float32, 2: torch.bfloat16}
LAYOUTS = [("tp", 2), ("tp", 3), ("pp", 2), ("zero3", 3), ("ulysses", 2), ("one", 1)]


def numbers_of(shard):
    """Where in the full tensor, in row-major order, each number of a rank's tensor lies."""
    starts = [shard.offset + run * shard.stride for run in range(shard.count)]
    runs = [range(start, start + shard.length) for start in starts]
    return torch.tensor(list(itertools.chain(*runs)), dtype=torch.int64)


def part_of(full, shard):
    """A rank's tensor: a copy of its numbers of the full one."""
    return full.flatten()[numbers_of(shard)].clone()


def layout_of(kind, shapes, rank, world):
    """{name: Shard} of a rank: tp cuts matrices, zero3 the flat vector; a pipeline deals names out,
    "step" to all ranks, the first tensor to the last rank, too."""
    names, found = list(shapes), {}
    if kind == "zero3":
        cuts = finished.flat_cut([shapes[name] for name in names], rank, world)
        return {name: shard for name, (shard, _) in zip(names, cuts) if shard}
    for i, name in enumerate(names):
        shape, dim = shapes[name], 1 if name == "o" else 0
        if kind == "tp" and len(shape) == 2:
            found[name] = finished.cut(shape, dim, *split(shape[dim], rank, world))
        elif kind != "pp" or not shape or i % world == rank or (i, rank) == (0, world - 1):
            found[name] = finished.whole(shape)
    return found


def layouts_of(kind, shapes, world):
    return [layout_of(kind, shapes, rank, world) for rank in range(world)]


def drawn(seed, shapes):
    """Random tensors {name: tensor}, of 8, 4 and 2 bytes a number in turn."""
    numbers, turns = torch.Generator().manual_seed(seed), itertools.cycle((8, 4, 2))
    found = {name: torch.randn(shape, generator=numbers) for name, shape in shapes.items()}
    return {name: x.to(OF_BYTES[next(turns)]) for name, x in found.items()}


def save_with(lab, folder, full, kind, world, backwards=False):
    """Save full tensors {name: tensor} by a lab's save(), from ranks in a layout; returns the
    number of the index (None: there is none) that each rank sees when it returns."""
    shapes = {name: tuple(x.shape) for name, x in full.items()}

    def on_rank(group):
        layout = layout_of(kind, shapes, group.rank(), world)
        tensors = {name: part_of(full[name], shard) for name, shard in layout.items()}
        # Shards of the lab's own class: only these are equal to those that it makes
        own = {name: lab.Shard(*vars(shard).values()) for name, shard in layout.items()}
        given = list(own), list(tensors)
        lab.save(folder, tensors, own, group)
        expect((list(own), list(tensors)) == given, "save() changes a dict", "it is the caller's")
        there = Path(folder, "index.json").exists()
        return finished.read_index(folder)["number"] if there else None

    return on_turns(lab, world, on_rank, backwards)


def read_full(folder):
    """{name: full tensor} of a checkpoint, by the finished lab; raises what is wrong with it."""
    index = finished.read_index(folder)
    problem = finished.damage(folder, index, index["files"])
    hint = "index.json names each file as it was written; kinds has the shapes of a rank's tensors"
    hint = "files that index.json names stay" if "missing" in str(problem) else hint
    expect(problem is None, problem, hint)
    full, layout = {}, {}
    for name, saved in index["tensors"].items():
        full[name] = torch.empty(saved["shape"], dtype=finished.DTYPES[saved["dtype"]])
        layout[name] = finished.whole(saved["shape"])
    finished.fill(folder, index, full, layout)
    return full


def same(mine, right):
    return mine.keys() == right.keys() and all(torch.equal(mine[n], right[n]) for n in right)


MISTAKES = """
== cut
start * inner, (end - start) * inner, -> start, end - start,  # offset, length: numbers, not rows
(end - start) * inner, *apart -> end * inner, *apart  # length: end - start of dim, in numbers
shape[dim + 1 :] -> shape[dim:]  # one index of dim has the numbers of all dimensions behind dim
(shape[dim] * inner, outer) -> (inner, outer)  # a run in each row, and a row apart
(shape[dim] * inner, outer) -> (shape[dim], outer)  # a run in each row, and a row apart
(shape[dim] * inner, -> ((end - start) * inner,  # stride: from run to run in the full tensor
(shape[dim] * inner, outer) -> (shape[dim] * inner, shape[0])  # a run for all dimensions before dim
(start, end) == (0, shape[dim]) -> False  # who holds all of a tensor has whole(shape)
if outer > 1 else (0, 1) ->  # one run: stride 0, count 1
tuple(shape) -> list(shape)  # shape is a tuple: a Shard is a key of dicts
offset: what lies before start; length: to end; stride: from run to run; count: all before dim
== flat_cut
-(-sum -> (sum  # c rounded up: the last rank has less
min(end, mine + size) -> mine + size  # padding, or the next tensor, is not a part of this one
(shard, first - mine) -> (shard, first)  # at counts from where the rank's part of the vector begins
(shard, first - mine) -> (shard, first - begin)  # at counts in the rank's vector, not in a tensor
(shard, first - mine) -> (shard, begin - mine)  # at: 0 where a tensor began on an earlier rank
return found -> return [pair for pair in found if pair[0]]  # (None, 0) where it has none
min(end, mine + size) -> end  # the next rank has what lies behind mine + size
first - begin, last -> first, last  # a Shard's offset counts in its own tensor
begin = end -> begin = -(-end // world) * world  # the vector is padded, not each tensor
what [rank c, rank c + c) has of each tensor, c rounded up, else (None, 0); at: from rank c to it
== overlap
a * mine.stride -> a * mine.length  # runs begin stride apart in the full tensor
y, end - start -> y, mine.length  # n: only the numbers that both runs have
min(x + mine.length, y + theirs.length) -> x + mine.length  # only the numbers that both runs have
y, end - start -> y, end - start; return  # one for each two runs that share numbers
if x + mine.length == end: -> if a + 1 < mine.count:  # when the earlier of two runs ends, go on
b += 1 -> a, b = a + 1, b + 1  # when the earlier of two runs ends, take the next of that alone
if start < end: -> if True:  # runs that share nothing: nothing to yield
one for each run of mine and run of theirs that share numbers, in order; runs, not single numbers
== owners
sorted(holders.items(), key=lambda item: len(item[1])) -> holders.items()  # fewest holders first
len(item[1])) -> -len(item[1]))  # fewest holders first
min(ranks, key=taken.__getitem__) -> ranks[0]  # the holder with the fewest numbers so far
min(ranks, -> min(reversed(ranks),  # of several such, the lowest rank
taken[rank] += numbers -> taken[rank] += 1  # the fewest numbers so far, not the fewest pieces
shard.length * shard.count -> shard.length  # a Shard has count runs of length numbers
fewest holders first, else as they are met; each to the holder with the fewest numbers so far
"""


def fields(shard):
    """A Shard's, or None: Shards of the learner's file are no finished ones."""
    return shard and (shard.shape, shard.offset, shard.length, shard.stride, shard.count)


def pairs(found):
    return [(fields(shard), at) for shard, at in found]


def check_cut(lab, group, seed):
    chosen = random.Random(seed)
    for _ in range(60):
        shape = tuple(chosen.randint(2, 6) for _ in range(chosen.randint(1, 3)))
        dim = chosen.randrange(len(shape))
        args = shape, dim, *sorted(chosen.sample(range(shape[dim] + 1), 2))
        what, right = f"cut{args}", fields(finished.cut(*args))
        mine = tried(what, "return a Shard", fields, lab.cut(*args))
        if mine != right:
            first = next((i for i, pair in enumerate(zip(mine, right)) if pair[0] != pair[1]), None)
            hint = usual_hint(MISTAKES, finished.cut, args, mine[first], first, fields)
            raise Wrong(f"{what}: shape, offset, length, stride, count {mine}, not {right}", hint)
    for world in range(1, 7):
        shapes = [tuple(chosen.randint(1, 4) for _ in range(chosen.randint(0, 2))) for _ in "abcd"]
        for rank in range(world):
            args = shapes, rank, world
            what, right = f"flat_cut{args}", pairs(finished.flat_cut(*args))
            mine = tried(what, "a pair (Shard or None, at) a tensor", pairs, lab.flat_cut(*args))
            if mine != right:
                hint = usual_hint(MISTAKES, finished.flat_cut, args, mine, view=pairs)
                raise Wrong(f"{what}: {mine}, not {right}", hint)
    return "rows, columns, blocks, flat parts: every run where it is in the full tensor"


def check_overlap(lab, group, seed):
    chosen, count = random.Random(seed), 0
    for _ in range(200):
        shape = chosen.randint(2, 6), chosen.randint(2, 6)
        pair = []
        for _ in "ab":
            dim = chosen.randrange(2)
            cut = finished.cut(shape, dim, *sorted(chosen.sample(range(shape[dim] + 1), 2)))
            ends = sorted(chosen.sample(range(shape[0] * shape[1] + 1), 2))
            pair.append(chosen.choice([cut, finished.Shard(shape, ends[0], ends[1] - ends[0])]))
        found = lab.overlap(*pair)
        expect(found is not None, "overlap() returns None", "yield")
        found = [tuple(each) for each in found]
        mine, theirs = ({n: i for i, n in enumerate(numbers_of(s).tolist())} for s in pair)
        right = sorted((mine[n], theirs[n]) for n in mine.keys() & theirs.keys())
        numbers = [(i + k, j + k) for i, j, n in found for k in range(n)]
        runs = list(finished.overlap(*pair))
        if numbers != right or len(found) != len(runs):
            hint = usual_hint(MISTAKES, finished.overlap, pair, found, view=list)
            if [n for *_, n in found] == [n for *_, n in runs]:  # only positions are wrong
                hint = "positions are in the ranks' own tensors, first mine, then theirs: all runs "
                hint += "before, of that tensor's length, then how far into the run"
            raise Wrong(f"{pair[0]} and {pair[1]}: {found}, not {runs}", hint)
        count += len(found)
    return f"200 pairs of shards, {count} runs in common"


def check_owners(lab, group, seed):
    chosen, cases = random.Random(seed), []
    for kind, world in LAYOUTS:
        layouts = []
        for layout in layouts_of(kind, SHAPES, world):  # each rank's in an order of its own
            layouts.append(dict(chosen.sample(list(layout.items()), len(layout))))
        before = [dict(layout) for layout in layouts]
        what, right = f"{kind} on {world} ranks", finished.owners(before)
        hint = "what several ranks hold counts once; a Shard has count runs of length numbers"
        found = tried(what, hint, lab.owners, layouts)
        orders = [list(layout) for layout in layouts] == [list(layout) for layout in before]
        expect(orders, "owners() changes the layouts", "no pop(): they are save()'s")
        there = isinstance(found, dict) and found.keys() == right.keys()
        hint = "{(name, Shard): one rank that holds it}"
        expect(there, f"{what}: owners() returns {found}", hint)
        cases.append((what, before, found, right))
    for what, _, found, right in cases:
        for (name, shard), rank in right.items():
            if (mine := found[name, shard]) != rank:
                usual = [usual_results(MISTAKES, finished.owners, (b,)) for _, b, *_ in cases]
                fits = [{h for h, x in xs if x == f} for xs, (_, _, f, _) in zip(usual, cases)]
                hint = min(set.intersection(*fits), default=section(MISTAKES, finished.owners)[-1])
                raise Wrong(f"{what}: rank {mine} saves {name}, not {rank}", hint)
    hole, twice = layouts_of("tp", SHAPES, 3), layouts_of("tp", SHAPES, 3)
    del hole[1]["o"]
    twice[0]["o"] = finished.whole(SHAPES["o"])
    for layouts, what in (hole, "a part of o on no rank"), (twice, "parts of o twice"):
        problem = raised(lab.owners, layouts, kind=lab.CheckpointError)
        expect(problem is not None, f"{what} is accepted", "pieces add up to the full shape")
        expect("o" in problem.split(":")[0].split(), f"{what}: {problem}", "name the tensor")
    return "every number has one owner, replicas are dealt out, a hole is refused"
