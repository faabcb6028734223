"""Toy layouts, what their ranks hold, and checkpoints of them: what lab 13's checks share."""

import itertools
from pathlib import Path

import torch
from checks.disk import on_turns
from harness import LABS, expect, load

finished = load(LABS / "lab13_checkpoints.py")
SHAPES = {"embedding": (7, 4), "q": (6, 4), "o": (4, 10), "norm": (4,), "head": (5, 4), "step": ()}
OF_BYTES = {8: torch.float64, 4: torch.float32, 2: torch.bfloat16}
LAYOUTS = [("tp", 2), ("tp", 3), ("pp", 2), ("zero3", 3), ("ulysses", 2), ("one", 1)]


def numbers_of(shard):
    """Where in the full tensor, in row-major order, each number of a rank's tensor lies."""
    starts = range(
        shard.offset, shard.offset + shard.count * max(1, shard.stride), shard.stride or 1
    )
    runs = [range(start, start + shard.length) for start in starts[: shard.count]]
    return torch.tensor(list(itertools.chain(*runs)), dtype=torch.int64)


def part_of(full, shard):
    """A rank's tensor: a copy of its numbers of the full one."""
    return full.flatten()[numbers_of(shard)].clone()


# Copied from tp.py
def split(n, rank, world):
    """[start, end) of the rank's share of n things: the first n % world ranks hold one more."""
    base, extra = divmod(n, world)
    return rank * base + min(rank, extra), (rank + 1) * base + min(rank + 1, extra)


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
        lab.save(folder, tensors, own, group)
        there = Path(folder, "index.json").exists()
        return finished.read_index(folder)["number"] if there else None

    return on_turns(lab, world, on_rank, backwards)


def read_full(folder):
    """{name: full tensor} of a checkpoint, by the finished lab; raises what is wrong with it."""
    index = finished.read_index(folder)
    problem = finished.damage(folder, index, index["files"])
    expect(problem is None, problem)
    full, layout = {}, {}
    for name, saved in index["tensors"].items():
        full[name] = torch.empty(saved["shape"], dtype=finished.DTYPES[saved["dtype"]])
        layout[name] = finished.whole(saved["shape"])
    finished.fill(folder, index, full, layout)
    return full


def same(mine, right):
    return mine.keys() == right.keys() and all(torch.equal(mine[n], right[n]) for n in right)
