"""Lab 13's exercises: their cases, to the bit. mistakes.txt has the wrong answers.

Threads take the ranks' place (disk.py). What is right comes from the finished lab, from the
full tensors, and from training that nothing stopped.
"""

import itertools
import json
import math
import random
import re
import tempfile
import tracemalloc
import zlib
from contextlib import chdir, contextmanager
from functools import partial
from pathlib import Path
from unittest import mock

import torch
from safetensors.torch import load as read_safetensors
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from labs.kit.alive import Alive
from labs.kit.eye import Calls, Most
from labs.kit.judge import checks
from labs.lab13_checkpoints import lesson as finished
from labs.lab13_checkpoints.disk import Disk, counting, files_of, on_turns

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
SHAPES = {"q": (6, 4), "o": (4, 10), "norm": (4,), "head": (5, 4), "x": (3, 2, 4), "step": ()}
LARGE = SHAPES | {f"layer{i}": (64, 64) for i in range(12)}


def drawn(seed, shapes=SHAPES):
    """Random tensors {name: tensor}, of 8, 4, 2 and 2 bytes a number in turn."""
    numbers, turns = torch.Generator().manual_seed(seed), itertools.cycle(DTYPES)
    found = {name: torch.randn(shape, generator=numbers) for name, shape in shapes.items()}
    return {name: x.to(next(turns)) for name, x in found.items()}


def part_of(full, shard):
    """A rank's tensor: a copy of its numbers of the full one."""
    runs = (shard.count, shard.length), (shard.stride, 1)
    return full.flatten()[shard.offset :].as_strided(*runs).flatten().clone()


def any_layouts(chosen, world, shapes=SHAPES):
    """Each rank's {name: Shard}, drawn from chosen, a random.Random.

    A tensor is cut along a dimension, or flat as in ZeRO-3, or not at all; one rank or more
    have each piece, and a rank may have none. Names are in no order.
    """
    layouts = [{} for _ in range(world)]
    for name, shape in shapes.items():
        dim = chosen.choice([None, *range(len(shape))])  # None: flat
        size = math.prod(shape) if dim is None else shape[dim]
        count = chosen.randint(1, min(world, size))
        ends = [0, *sorted(chosen.sample(range(1, size), count - 1)), size]
        ranks = chosen.sample(range(world), chosen.randint(count, world))
        for i, rank in enumerate(ranks):
            begin, end = ends[i % count :][:2]
            flat = finished.Shard(shape, begin, end - begin)
            layouts[rank][name] = flat if dim is None else finished.cut(shape, dim, begin, end)
    return [dict(chosen.sample([*layout.items()], len(layout))) for layout in layouts]


def save_with(lab, folder, full, layouts, backwards=False):
    """Save full tensors {name: tensor} by a lab's save(), from ranks that have these layouts.

    Returns of each rank (the index's number as save() returns, whether a dict is changed,
    bytes of tensors made), and how often all ranks have met.
    """

    def on_rank(group):
        layout = dict(layouts[group.rank()])
        tensors = {name: part_of(full[name], shard) for name, shard in layout.items()}
        given = [*layout, *tensors]
        with Alive() as alive:
            lab.save(folder, tensors, layout, group)
        there = Path(folder, "index.json").exists()
        number = finished.read_index(folder)["number"] if there else "none"
        return number, given != [*layout, *tensors], alive.peak

    return on_turns(lab, len(layouts), on_rank, backwards)


def read_full(folder):
    """({name: full tensor} of a checkpoint, what is wrong with it or ""), by the finished lab."""
    full = {}
    try:
        index = finished.read_index(folder)
        problem = finished.damage(folder, index, index["files"]) or ""
        for name, saved in index["tensors"].items() if not problem else ():
            full[name] = torch.empty(saved["shape"], dtype=finished.DTYPES[saved["dtype"]])
            finished.fill(folder, index, full, {name: finished.whole(saved["shape"])})
    except (finished.CheckpointError, OSError) as error:
        problem = str(error)
    return full, problem.replace(f"{folder}/", "")


def same(mine, right):
    return mine.keys() == right.keys() and all(torch.equal(mine[n], right[n]) for n in right)


@contextmanager
def empty_folder():
    """A folder that has the same name each time, because errors name it."""
    with tempfile.TemporaryDirectory() as parent, chdir(parent):
        Path("saved").mkdir()
        yield Path("saved")


@contextmanager
def memory():
    """[the most bytes of Python objects that are made inside], at its end."""
    most = []
    tracemalloc.start()
    try:
        yield most
    finally:
        most.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()


def see_calls(calls, lab, eye):
    """Note what functions return, [(name, argument, ..)]; a Shard as a list of its fields."""
    for name, *given in calls:
        eye.note(f"{name}{(*given,)}", [*getattr(lab, name)(*given)])


def cut(group, seed):
    chosen, calls = random.Random(seed), []
    for shape in (4,), (1, 4), (3, 1), (3, 4), (1, 2, 3), (2, 3, 2):
        full = torch.arange(math.prod(shape)).view(shape)
        for dim, size in enumerate(shape):
            for start, end in itertools.combinations(range(size + 1), 2):
                calls.append(("cut", shape, dim, start, end))
                right = full.narrow(dim, start, end - start).flatten()
                shard = finished.cut(shape, dim, start, end)
                assert torch.equal(part_of(full, shard), right), "our cut() is wrong"
    yield "parts of a dimension", partial(see_calls, calls)
    calls = []
    for world in range(1, 7):
        for rank, _ in itertools.product(range(world), range(9)):
            a, b, c, d, e = (chosen.randint(1, 4) for _ in range(5))
            calls.append(("flat_cut", [(a, b), (), (c,), (d, e)], rank, world))
    yield "shares of a flat vector", partial(see_calls, calls)


def overlap(group, seed):
    chosen, calls = random.Random(seed), []
    for _ in range(9):
        for mine, theirs in itertools.product(any_layouts(chosen, 3), any_layouts(chosen, 3)):
            calls += [("overlap", mine[n], theirs[n]) for n in mine if n in theirs]
    yield "all kinds of Shards", partial(see_calls, calls)


def owners(group, seed):
    chosen = random.Random(seed)

    def see(cases, lab, eye):
        for title, layouts in cases.items():
            given = [dict(layout) for layout in layouts]
            try:
                found, said = lab.owners(given), ""
            except lab.CheckpointError as problem:
                found, said = {}, str(problem)
            eye.note(f"{title}: a CheckpointError names o", "o" in re.findall(r"\w+", said))
            eye.note(f"{title}: what is saved", sorted(found))
            for (name, shard), rank in sorted(found.items()):
                eye.note(f"{title}: the rank that saves {name}, {shard}", rank)
            eye.note(f"{title}: overwritten", given != layouts)

    cases = {"replicas": [{name: finished.whole(shape) for name, shape in SHAPES.items()}] * 3}
    for number, world in enumerate((1, 2, 3, 4) * 5):
        cases[f"layouts {number}, {world} ranks"] = any_layouts(chosen, world)
    yield "layouts", partial(see, cases)
    q, o, turned = (finished.whole(shape) for shape in [(6, 4), (4, 10), (10, 4)])
    rows, columns = (partial(finished.cut, (4, 10), dim) for dim in (0, 1))
    cases = {
        "a hole": [columns(0, 4), columns(7, 10)],
        "a hole at the end": [rows(0, 2), rows(2, 3)],
        "a part twice": [columns(0, 5), columns(4, 7), columns(7, 10)],
        "a hole, and as much twice": [columns(0, 4), columns(3, 6), columns(7, 10)],
        "rows and columns": [rows(0, 2), columns(0, 5)],
        "two shapes": [o, turned],
    }
    cases = {title: [{"q": q, "o": o} for o in shards] for title, shards in cases.items()}
    yield "holes, and parts that are there twice", partial(see, cases)


def write(group, seed):
    def see(full, lab, eye):
        kinds = {n: (finished.DTYPE_NAMES[x.dtype], tuple(x.shape)) for n, x in full.items()}
        asked = []

        def get(name):
            asked.append(name)
            return full[name].clone()

        with empty_folder() as folder:
            path, disk = folder / "x.safetensors", Disk(folder)
            with disk.watching(), Alive() as alive:
                found = lab.write_tensors(path, kinds, get)
            data = path.read_bytes()
            path.write_bytes(b"what a save that was killed has left" + data)
            with memory() as most, mock.patch.object(lab, "BLOCK", 4096):
                lab.write_tensors(str(path), kinds, full.get)
            again = path.read_bytes()
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8:][:size])
        eye.note("the header's length modulo 8", size % 8)
        eye.note("__metadata__", header.pop("__metadata__", "missing"))
        eye.note("the tensors in the header", list(header))
        for name, how in header.items():
            eye.note(f"{name} in the header", sorted(how.items()))
        for name, x in read_safetensors(data).items():
            eye.note(name, x)
        eye.note('"bytes" is the file\'s length', found["bytes"] == len(data))
        eye.note('"crc32" is that of the file', found["crc32"] == zlib.crc32(data))
        places = {name: at - 8 - size for name, at in found["at"].items()}
        eye.note('"at", less 8 and the header', places)
        eye.note("what get() is asked for", asked)
        eye.note("bytes of tensors at once", Most(alive.peak))
        eye.note("all of the file is in memory at once", most[0] > 120_000)
        eye.note("an older file of that name is written over", again == data)
        left = disk.power_failure().get(path.name)
        lost = "the file" if left is None else f"{len(data) - len(left)} bytes"
        eye.note("what a power failure takes", lost)

    full = drawn(seed, {"größe": (7,), **LARGE})
    yield "four dtypes", partial(see, full), full
    yield "no tensor", partial(see, {})


def save(group, seed):
    old, new, chosen = drawn(seed), drawn(seed + 1), random.Random(seed)

    def see(saves, lab, eye):
        with empty_folder() as folder:
            for name in "model.safetensors", "config.json", "save9-rank0.safetensors":
                Path(folder, name).write_bytes(b"two of other programs, one that a kill left")
            for i, (title, full, layouts) in enumerate(saves):
                ranks, meetings = save_with(lab, folder, full, layouts, backwards=i % 2)
                numbers, changed, made = zip(*ranks)
                eye.note(f"{title}: the index's number, as ranks return", list(numbers))
                eye.note(f"{title}: files", sorted(files_of(folder)))
                found, problem = read_full(folder)
                eye.note(f"{title}: what is wrong with the checkpoint", problem)
                for name, x in found.items():
                    eye.note(f"{title}: {name}", x)
                for name, saved in finished.read_index(folder)["tensors"].items():
                    runs = sorted(piece["runs"] for piece in saved["pieces"])
                    eye.note(f"{title}: pieces of {name}", runs)
                eye.note(f"{title}: a dict is overwritten", any(changed))
                eye.note(f"{title}: bytes of tensors made", Most(max(made)))
                eye.note(f"{title}: calls of gather_objects", Calls(meetings))

    def see_stops(first, second, backwards, lab, eye):
        with empty_folder() as folder:
            save_with(finished, folder, old, first)
            disk, bad = Disk(folder), {}
            with disk.watching():
                save_with(lab, folder, new, second, backwards)
            for number, ((way, files), step) in enumerate(disk.left.items()):
                restart = Path(f"restart{number}")
                restart.mkdir()
                for name, data in files:
                    Path(restart, name).write_bytes(data)
                found, problem = read_full(restart)
                if not same(found, old) and not same(found, new):
                    bad.setdefault(way, f"{step}: {problem or 'a mixture of old and new'}")
        renamed = "index.json is replaced"
        before = itertools.takewhile(renamed.__ne__, disk.steps)
        synced = any(step.startswith("os.fsync of index") for step in before)
        eye.note("the new index is synced before it is renamed", synced)
        for way in "a kill", "a power failure":
            eye.note(f"{way} leaves neither checkpoint after", bad.get(way, "no step"))
        eye.note("renamings of the index", Most(disk.steps.count(renamed)))

    saves, right = [], {}
    for i, world in enumerate((2, 3, 1, 4, 2)):
        title, full = f"save {i + 1}, {world} ranks", (old, new)[i % 2]
        saves.append((title, full, any_layouts(chosen, world)))
        right |= {f"{title}: {name}": x for name, x in full.items()}
    yield "five saves in a folder", partial(see, saves), right
    few = [{"q": finished.whole(SHAPES["q"])}] * 2 + [{}]
    saves = [("ranks 1 and 2", old, few), ("rank 0", new, few[::-1])]
    yield "ranks that save nothing", partial(see, saves)
    for backwards in False, True:
        title = f"a save that is stopped, rank {2 * backwards} ahead"
        first, second = (any_layouts(chosen, world) for world in (2, 3))
        yield title, partial(see_stops, first, second, backwards)


def verify(group, seed):
    shapes = {"large": (256, 64), "query": (6, 4), "output": (4, 10)}
    full = drawn(seed, shapes)
    rows = [{}, {}]
    for (name, shape), rank in itertools.product(shapes.items(), (0, 1)):
        half = shape[0] // 2
        rows[rank][name] = finished.cut(shape, 0, rank * half, (rank + 1) * half)
    with empty_folder() as folder:
        save_with(finished, folder, full, rows)
        index, saved = finished.read_index(folder), files_of(folder)
    first, second = index["files"]
    size = len(saved[first])

    def said(line, names):
        named = [name for name in names if name in (line or "")]
        return f"{len(line.splitlines())} line on {named}" if line else "nothing"

    def see_damage(changed, lab, eye):
        with empty_folder() as folder:
            for name, data in (saved | changed).items():
                if data is not None:
                    Path(folder, name).write_bytes(data)
            orders = [first, second], [second, first], [second]
            for block, files in itertools.product((5000, size, size - 1), orders):
                title = f"{', '.join(files)}, BLOCK {block}"
                blocks = mock.patch.object(lab, "BLOCK", block)
                with blocks, counting() as read, memory() as most:
                    found = lab.damage(folder, index, files)
                paths = [str(folder / name) for name in saved]
                eye.note(f"{title}: damage() returns", said(found, paths))
                eye.note(f"{title}: all of a file is in memory", Most(most[0] > size))
                eye.note(f"{title}: bytes read", Most(read.total()))

    def see_mismatch(models, lab, eye):
        for title, (mine, where) in models.items():
            found = lab.mismatch(index, tensors | mine, layout | where)
            eye.note(f"{title}: mismatch() returns", said(found, [*shapes, "bias"]))

    def flipped(place):
        data = bytearray(saved[first])
        data[place] ^= 1
        return bytes(data)

    damages = {
        "files as they were saved": {},
        "a file is missing": {first: None},
        "a file is cut short": {first: saved[first][:-3]},
        "a file is too long": {first: saved[first] + b"\0"},
        "a bit is flipped": {first: flipped(size // 2)},
        "the last bit is flipped": {first: flipped(-1)},
        "another rank's file": {first: saved[second]},
        "one is missing, one is damaged": {first: None, second: saved[first]},
    }
    for title, changed in damages.items():
        yield title, partial(see_damage, changed)
    layout = {name: rows[0][name] for name in ("query", "output")}  # some other rank has large
    tensors = {name: part_of(full[name], shard) for name, shard in layout.items()}
    whole = {name: finished.whole(shape) for name, shape in shapes.items()}
    half = {"output": full["output"].half()}
    wider = {"query": finished.cut((12, 4), 0, 0, 3)}
    models = {
        "all fits": ({}, {}),
        "full tensors": (full, {name: whole[name] for name in layout}),
        "all names": (full, whole),
        "a name that was not saved": ({"bias": full["query"]}, {"bias": whole["query"]}),
        "rows of a larger matrix": ({}, wider),
        "as many numbers in another shape": ({}, {"query": finished.cut((4, 6), 0, 0, 2)}),
        "another dtype": (half, {}),
        "another dtype, more bytes": ({"output": full["output"].float()}, {}),
        "two that do not fit": (half, wider),
    }
    yield "models", partial(see_mismatch, models)


def fill(group, seed):
    chosen = random.Random(seed)

    def see(full, saved, loaded, lab, eye):
        with empty_folder() as folder:
            save_with(finished, folder, full, saved)
            index = finished.read_index(folder)
            for rank, layout in enumerate(loaded):
                tensors = {n: part_of(full[n], s) * torch.nan for n, s in layout.items()}
                given = dict(tensors)
                with memory() as most, counting() as read, Alive() as alive:
                    lab.fill(folder, index, tensors, layout)
                changed = [*map(id, given.values())] != [*map(id, tensors.values())]
                eye.note(f"rank {rank}: tensors is overwritten", changed)
                for name, x in given.items():
                    eye.note(f"rank {rank}: {name}", x)
                eye.note(f"rank {rank}: bytes read", Most(read.total()))
                more = alive.peak + most[0] > 100_000
                eye.note(f"rank {rank}: more than its own is in memory", more)
            eye.note("index is overwritten", index != finished.read_index(folder))

    worlds = [(1, 1), *itertools.product((3, 2, 4), (2, 3, 1)), (2, 3)]
    for shapes, (before, now) in zip([SHAPES] * 10 + [LARGE], worlds):
        full, right = drawn(seed, shapes), {}
        saved, loaded = (any_layouts(chosen, world, shapes) for world in (before, now))
        for rank, layout in enumerate(loaded):
            right |= {f"rank {rank}: {n}": part_of(full[n], s) for n, s in layout.items()}
        title = f"from {before} to {now} ranks, {len(shapes)} tensors"
        yield title, partial(see, full, saved, loaded), right


def optimizer(group, seed):
    def model_of(seed, dtype):
        """(a model with a tied matrix and an unused parameter, AdamW in two groups)"""
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 4), nn.Linear(4, 6, bias=False))
        model[2].weight = model[0].weight
        model.unused = nn.ParameterList([torch.ones(3)])
        order = [*model.to(dtype).parameters()][::-1]
        groups = [{"params": order[:1]}, {"params": order[1:]}]
        return model, torch.optim.AdamW(groups, lr=0.1)

    def train(model, adam, steps):
        for step in steps:
            ids = torch.randint(6, (8,), generator=torch.Generator().manual_seed(seed + step))
            adam.zero_grad()
            model[:3](ids).logsumexp(-1).mean().backward()
            adam.step()

    def see(dtype, lab, eye):
        first, second = model_of(seed, dtype), model_of(seed + 9, dtype)
        train(*first, range(3))
        saved, new = lab.training_state(*first), lab.training_state(*second)
        for when, state in ("after 3 steps", saved), ("before the first step", new):
            eye.note(f"{when}: names", sorted(state))
            for name, x in state.items():
                eye.note(f"{when}: {name}", x)
        for name, x in new.items():
            x.copy_(saved[name])
        train(*second, range(3, 6))
        for name, parameter in second[0].named_parameters():
            eye.note(f"3 steps, a copy, 3 steps: {name}", parameter)

    for dtype in torch.float64, torch.bfloat16:
        model, adam = model_of(seed, dtype)
        train(model, adam, range(6))
        weights = model.named_parameters()
        right = {f"3 steps, a copy, 3 steps: {name}": p for name, p in weights}
        yield str(dtype), partial(see, dtype), right


def export(group, seed):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 90}
    sizes |= {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    older = b"what was exported before"

    def see_export(state, layouts, model, lab, eye):
        with empty_folder() as folder:
            save_with(finished, folder, state, layouts)
            model.config.save_pretrained(folder)
            path, there = folder / "model.safetensors", files_of(folder)
            path.write_bytes(older)
            disk = Disk(folder)
            with disk.watching(), Alive() as alive:
                lab.export(folder, path)
            eye.note("new files", sorted(files_of(folder).keys() - there.keys()))
            complete = older, path.read_bytes()
            parts = {way for way, files in disk.left if dict(files)[path.name] not in complete}
            eye.note("what leaves a part of a file", sorted(parts))
            eye.note("names in the file", sorted(read_safetensors(path.read_bytes())))
            theirs = LlamaForCausalLM.from_pretrained(folder, dtype=model.dtype)
        for name, parameter in theirs.named_parameters():
            eye.note(f"HF's {name}", parameter)
        most = 2 * max(p.nbytes for p in model.parameters()) + 64
        eye.note("more than two tensors are alive at once", alive.peak > most)

    def see_import(model, lab, eye):
        with empty_folder() as folder:
            model.save_pretrained(folder, max_shard_size="40KB")
            with counting() as read:
                index = lab.import_index(folder)
            eye.note("names in the index", sorted(index["tensors"]))
            for name, parameter in model.named_parameters():
                how = json.loads(json.dumps(index["tensors"][name]))  # lists or tuples
                eye.note(f"{name} in the index", how)
                x = torch.zeros_like(parameter)
                finished.fill(folder, index, {name: x}, {name: finished.whole(x.shape)})
                eye.note(f"HF's {name}", x)
        eye.note("bytes read", Most(read.total()))

    for tied, dtype in (True, torch.float64), (False, torch.bfloat16):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=tied)).to(dtype)
        state = {name: p.data for name, p in model.named_parameters()}
        right = {f"HF's {name}": x for name, x in state.items()}
        for (name, x), key in itertools.product([*state.items()], finished.STATE):
            state[f"{name}/{key}"] = x + 1
        shapes = {name: tuple(x.shape) for name, x in state.items()}
        layouts = any_layouts(random.Random(seed), 3, shapes)
        title = f"embeddings {'tied' if tied else 'not tied'}, {dtype}"
        yield f"{title}, export()", partial(see_export, state, layouts, model), right
        yield f"{title}, import_index()", partial(see_import, model), right


CASES = cut, overlap, owners, write, save, verify, fill, optimizer, export
EXERCISES = {cases.__name__: (cases, 1) for cases in CASES}
CHECKS, BUGS = checks(EXERCISES, finished, 0)
