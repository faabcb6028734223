"""Lab 13's exercises: their cases, to the bit. mistakes.txt has the wrong answers.

Threads take the ranks' place (disk.py). What is right comes from the finished lab, from the
full tensors, and from training that nothing stopped.
"""

import itertools
import json
import math
import os
import random
import re
import shutil
import tempfile
import tracemalloc
import weakref
import zlib
from contextlib import contextmanager
from dataclasses import astuple
from functools import partial
from pathlib import Path
from unittest import mock

import torch
from safetensors import safe_open
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from labs.kit.alive import Alive
from labs.kit.eye import Calls, Most
from labs.kit.judge import checks
from labs.kit.tools import refusal
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
    starts = [shard.offset + run * shard.stride for run in range(shard.count)]
    runs = [range(start, start + shard.length) for start in starts]
    return full.flatten()[list(itertools.chain(*runs))].clone()


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


def as_lab(lab, layout):
    """A layout in Shards of a lab's own class: only these are equal to those that it makes."""
    return {name: lab.Shard(*astuple(shard)) for name, shard in layout.items()}


def save_with(lab, folder, full, layouts, backwards=False):
    """Save full tensors {name: tensor} by a lab's save(), from ranks that have these layouts.

    Returns of each rank (the index's number as save() returns, whether a dict is changed,
    bytes of tensors made), and how often all ranks have met.
    """

    def on_rank(group):
        layout = as_lab(lab, layouts[group.rank()])
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
    folder = Path(tempfile.gettempdir(), f"lab13_{os.getpid()}")
    shutil.rmtree(folder, ignore_errors=True)  # of a process that was killed
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


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


def cut(group, seed):
    chosen = random.Random(seed)

    def see_cuts(calls, lab, eye):
        for shape, *how in calls:
            shard = lab.cut(shape, *how)
            eye.note(f"cut{shape, *how}", astuple(shard))
            numbers = part_of(torch.arange(math.prod(shape)), shard)
            eye.note(f"numbers of cut{shape, *how}", numbers)

    def see_flat(world, models, lab, eye):
        for shapes, rank in itertools.product(models, range(world)):
            found = lab.flat_cut(list(shapes), rank, world)
            found = [(shard and astuple(shard), at) for shard, at in found]
            eye.note(f"flat_cut({shapes}, {rank}, {world})", found)

    for dims in 1, 2, 3:
        calls, right = [((1, 3, 4)[:dims], dims - 1, 0, 1)], {}
        for _ in range(20):
            shape = tuple(chosen.randint(1, 6) for _ in range(dims))
            dim = chosen.randrange(dims)
            calls.append((shape, dim, *sorted(chosen.sample(range(shape[dim] + 1), 2))))
        for shape, dim, start, end in calls:
            full = torch.arange(math.prod(shape)).view(shape)
            part = full.narrow(dim, start, end - start)
            right[f"numbers of cut{shape, dim, start, end}"] = part.flatten()
        yield f"{dims} dimensions", partial(see_cuts, calls), right
    for world in range(1, 7):
        sizes = [[chosen.randint(1, 4) for _ in range(5)] for _ in range(9)]
        models = [[(a, b), (), (c,), (d, e)] for a, b, c, d, e in sizes]
        yield f"{world} ranks", partial(see_flat, world, models)


def overlap(group, seed):
    chosen = random.Random(seed)

    def see(saved, loaded, lab, eye):
        for mine, theirs in itertools.product(loaded, saved):
            for name in filter(theirs.__contains__, mine):
                shards = astuple(mine[name]), astuple(theirs[name])
                found = lab.overlap(*(lab.Shard(*each) for each in shards))
                eye.note(f"overlap{shards}", [tuple(each) for each in found])

    for number in range(9):
        layouts = any_layouts(chosen, 3), any_layouts(chosen, 3)
        yield f"layouts {number}", partial(see, *layouts)


def owners(group, seed):
    chosen = random.Random(seed)

    def see(cases, lab, eye):
        for title, layouts in cases.items():
            given = [as_lab(lab, layout) for layout in layouts]
            found = lab.owners(given)
            found = {(name, astuple(shard)): rank for (name, shard), rank in found.items()}
            eye.note(f"{title}: what is saved", sorted(found))
            for (name, shard), rank in sorted(found.items()):
                eye.note(f"{title}: the rank that saves {name}, {shard}", rank)
            eye.note(f"{title}: overwritten", [*map(list, given)] != [*map(list, layouts)])

    def see_refused(cases, lab, eye):
        for title, shards in cases.items():
            layouts = [as_lab(lab, {"q": q, "o": shard}) for shard in shards]
            said = refusal(lab.CheckpointError, lab.owners, layouts) or ""
            named = "o" in re.findall(r"\w+", said)
            eye.note(f"o has {title}: a CheckpointError names it", named)

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
    yield "holes, and parts that are there twice", partial(see_refused, cases)


def write(group, seed):
    def see(full, lab, eye):
        kinds = {n: (finished.DTYPE_NAMES[x.dtype], tuple(x.shape)) for n, x in full.items()}
        alive, most, asked = weakref.WeakSet(), [0], []

        def get(name):
            tensor = full[name].clone()
            asked.append(name)
            alive.add(tensor)
            most.append(len(alive))
            return tensor

        with empty_folder() as folder:
            path, disk = folder / "x.safetensors", Disk(folder)
            with disk.watching():
                found = lab.write_tensors(path, kinds, get)
            data = path.read_bytes()
            path.write_bytes(b"what a save that was killed has left" + data)
            with memory() as most_bytes, mock.patch.object(lab, "BLOCK", 4096):
                lab.write_tensors(str(path), kinds, full.get)
            again = path.read_bytes()
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8:][:size])
        eye.note("the header's length modulo 8", size % 8)
        eye.note("__metadata__", str(header.pop("__metadata__", "missing")))
        eye.note("the tensors in the header", list(header))
        for name, how in header.items():
            eye.note(f"{name} in the header", str(sorted(how.items())))
            begin, end = how["data_offsets"]
            numbers = bytearray(data[8 + size :][begin:end])
            x = torch.frombuffer(numbers, dtype=finished.DTYPES[how["dtype"]])
            eye.note(name, x.view(how["shape"]))
        eye.note("bytes behind the header", len(data) - 8 - size)
        eye.note('"bytes" is the file\'s length', found["bytes"] == len(data))
        eye.note('"crc32" is that of the file', found["crc32"] == zlib.crc32(data))
        places = {name: at - 8 - size for name, at in found["at"].items()}
        eye.note('"at", less 8 and the header', str(places))
        eye.note("what get() is asked for", asked)
        eye.note("tensors at once", Most(max(most)))
        eye.note("all of the file is in memory at once", most_bytes[0] > 120_000)
        eye.note("an older file of that name is written over", again == data)
        eye.note("the file is synced", f"os.fsync of {path.name}" in disk.steps)
        eye.note("a power failure leaves the bytes", disk.contents.get(path.name) == data)
        eye.note("a power failure leaves the name", path.name in disk.power_failure())

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
            saved, restart, bad = folder / "saved", folder / "restart", {}
            saved.mkdir()
            save_with(finished, saved, old, first)
            disk = Disk(saved)
            with disk.watching():
                save_with(lab, saved, new, second, backwards)
            for (way, files), step in disk.left.items():
                restart.mkdir()
                for name, data in files:
                    Path(restart, name).write_bytes(data)
                found, problem = read_full(restart)
                shutil.rmtree(restart)
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
    shapes = {"large": (256, 64), "q": (6, 4), "o": (4, 10)}
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

    def see_damage(changed, lab, eye):
        with empty_folder() as folder:
            for name, data in (saved | changed).items():
                if data is not None:
                    Path(folder, name).write_bytes(data)
            orders = [first, second], [second, first], [second]
            for block, files in itertools.product((5000, size, size - 1), orders):
                blocks = mock.patch.object(lab, "BLOCK", block)
                with blocks, counting() as read, memory() as most:
                    found = lab.damage(folder, index, files)
                named = [name for name in saved if str(folder / name) in (found or "")]
                said = f"{len(found.splitlines())} line on {named}" if found else "nothing"
                title = f"{', '.join(files)}, BLOCK {block}"
                eye.note(f"{title}: damage() returns", said)
                eye.note(f"{title}: all of a file is in memory", Most(most[0] > size))
                eye.note(f"{title}: bytes read", Most(read.total()))

    def see_mismatch(models, lab, eye):
        for title, (mine, where) in models.items():
            found = lab.mismatch(index, tensors | mine, as_lab(lab, layout | where))
            named = [n for n in [*shapes, "more"] if n in re.findall(r"\w+", found or "")]
            said = f"a line on {named}" if found else "nothing"
            eye.note(f"{title}: mismatch() returns", said)

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
    layout = {name: rows[0][name] for name in ("q", "o")}  # some other rank has large
    tensors = {name: part_of(full[name], shard) for name, shard in layout.items()}
    whole = {name: finished.whole(shape) for name, shape in shapes.items()}
    half = {"o": full["o"].half()}
    wider = {"q": finished.cut((12, 4), 0, 0, 3)}
    models = {
        "all fits": ({}, {}),
        "full tensors": (full, {name: whole[name] for name in layout}),
        "all names": (full, whole),
        "a name that was not saved": ({"more": full["q"]}, {"more": whole["q"]}),
        "rows of a larger matrix": ({}, wider),
        "as many numbers in another shape": ({}, {"q": finished.cut((4, 6), 0, 0, 2)}),
        "another dtype": (half, {}),
        "another dtype, more bytes": ({"o": full["o"].float()}, {}),
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
                    lab.fill(folder, index, tensors, as_lab(lab, layout))
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


def tied_model(seed, dtype):
    """(a model with a tied matrix and a parameter without gradient, AdamW in two groups)"""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 4), nn.Linear(4, 6, bias=False))
    model[2].weight = model[0].weight
    model.unused = nn.ParameterList([torch.ones(3)])
    order = [*model.to(dtype).parameters()][::-1]
    return model, torch.optim.AdamW([{"params": order[:1]}, {"params": order[1:]}], lr=0.1)


def optimizer(group, seed):
    def train(model, adam, steps):
        for step in steps:
            ids = torch.randint(6, (8,), generator=torch.Generator().manual_seed(seed + step))
            adam.zero_grad()
            model[:3](ids).logsumexp(-1).mean().backward()
            adam.step()

    def see_state(title, model, adam, lab, eye):
        found = lab.training_state(model, adam)
        eye.note(f"{title}: names", sorted(found))
        for name, x in found.items():
            eye.note(f"{title}: {name}", x)
            eye.note(f"{title}: {name} needs a gradient", x.requires_grad)
            parameter, _, key = name.partition("/")
            parameter = model.get_parameter(parameter)
            own = adam.state[parameter].get(key) if key else parameter
            used = own is not None and x.data_ptr() == own.data_ptr()
            eye.note(f"{title}: {name} is what training uses", used)
        return found

    def see(dtype, lab, eye):
        first, second = tied_model(seed, dtype), tied_model(seed + 9, dtype)
        train(*first, range(3))
        saved = see_state("after 3 steps", *first, lab, eye)
        for name, x in see_state("before the first step", *second, lab, eye).items():
            x.copy_(saved[name])
        train(*second, range(3, 6))
        for name, parameter in second[0].named_parameters():
            eye.note(f"3 steps, a copy, 3 steps: {name}", parameter)

    for dtype in torch.float64, torch.bfloat16:
        model, adam = tied_model(seed, dtype)
        train(model, adam, range(6))
        weights = model.named_parameters()
        right = {f"3 steps, a copy, 3 steps: {name}": p for name, p in weights}
        yield str(dtype), partial(see, dtype), right


def export(group, seed):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 90}
    sizes |= {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    older = b"what was exported before"
    logging.set_verbosity_error()
    logging.disable_progress_bar()

    def see_export(state, layouts, model, lab, eye):
        with empty_folder() as folder:
            save_with(finished, folder, state, layouts)
            model.config.save_pretrained(folder)
            path, there = folder / "model.safetensors", files_of(folder)
            path.write_bytes(older)
            disk, parts = Disk(folder), {}
            with disk.watching(), Alive() as alive:
                lab.export(folder, path)
            eye.note("new files", sorted(files_of(folder).keys() - there.keys()))
            for (way, files), step in disk.left.items():
                if dict(files)[path.name] not in (older, path.read_bytes()):
                    parts.setdefault(way, step)
            for way in "a kill", "a power failure":
                eye.note(f"{way} leaves a part of a file after", parts.get(way, "no step"))
            eye.note("names in the file", sorted(safe_open(path, "pt").keys()))
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
                eye.note(f"{name} in the index", str(sorted(how.items())))
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
