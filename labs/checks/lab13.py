"""Lab 13's checks and the bugs that they have to catch. No ranks: threads take their place.

What an answer reads or writes is compared to the bit. Where a full tensor's numbers lie is worked
out number by number (numbers_of), not by runs. disk.py has the disk that fails, shards.py the toy
layouts, state.py the checks of AdamW's state and of Hugging Face's files.
"""

import gc
import itertools
import json
import math
import random
import shutil
import tempfile
import tracemalloc
import weakref
import zlib
from pathlib import Path
from types import SimpleNamespace

import torch
from checks.disk import Disk, Killed, counting
from checks.memory import Alive
from checks.shards import (
    LAYOUTS,
    SHAPES,
    drawn,
    finished,
    layouts_of,
    numbers_of,
    part_of,
    read_full,
    same,
    save_with,
)
from checks.state import check_export, check_optimizer
from harness import Wrong, expect


def check_cut(lab, group, seed):
    chosen = random.Random(seed)
    for _ in range(60):
        shape = tuple(chosen.randint(2, 6) for _ in range(chosen.randint(1, 3)))
        dim = chosen.randrange(len(shape))
        start, end = sorted(chosen.sample(range(shape[dim] + 1), 2))
        right, found = finished.cut(shape, dim, start, end), lab.cut(shape, dim, start, end)
        hint = "dim 1 of a matrix: a run in each row, as long as the columns, a row apart"
        if dim == 0:
            hint = "dim 0: one run, and of a matrix a row has as many numbers as it has columns"
        if (start, end) == (0, shape[dim]):
            hint = "who holds all of a tensor has whole(shape), however it was cut"
        expect(found is not None, "cut() returns None")
        mine = found.offset, found.length, found.stride, found.count
        wanted = right.offset, right.length, right.stride, right.count
        what = f"[{start}, {end}) of dim {dim} of {shape}: offset, length, stride, count"
        expect(mine == wanted and found.shape == shape, f"{what} {mine}, not {wanted}", hint)
    for world in range(1, 7):
        shapes = [tuple(chosen.randint(1, 4) for _ in range(chosen.randint(0, 2))) for _ in "abcd"]
        for rank in range(world):
            found, right = (x.flat_cut(shapes, rank, world) for x in (lab, finished))
            what = f"tensors {shapes}, rank {rank} of {world}"
            expect(found is not None and len(found) == 4, f"{what}: {found}", "a pair a tensor")
            for (mine, at), (wanted, right_at), shape in zip(found, right, shapes):
                hint = (
                    "from the flat vector's [rank c, rank c + c), c rounded up, to the tensor's own"
                )
                if mine and mine.offset + mine.length > math.prod(shape):
                    hint = "padding, or the next tensor, is not a part of this one: end with it"
                elif mine and at != right_at:
                    hint = "at counts from where the rank's part of the vector begins"
                right_one = (wanted, right_at) if wanted else (None, 0)
                mine = (finished.Shard(*vars(mine).values()) if mine else None, at)
                expect(mine == right_one, f"{what}: {mine} of {shape}, not {right_one}", hint)
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
        found = list(found)
        mine, theirs = ({n: i for i, n in enumerate(numbers_of(s).tolist())} for s in pair)
        right = {(mine[n], theirs[n]) for n in mine.keys() & theirs.keys()}
        pairs = [(i + k, j + k) for i, j, n in found for k in range(n)]
        what = f"{pair[0]} and {pair[1]}"
        hint = "positions are in the ranks' own tensors: a run behind another, without the gaps"
        if len(pairs) < len(right):
            hint = "when the earlier of two runs ends, go on with the next of that tensor alone"
        least = min((n for *_, n in found), default=1)
        expect(least > 0, f"{what}: {least} numbers", "runs that share nothing: nothing to yield")
        expect(set(pairs) == right and len(pairs) == len(right), f"{what}: {found}", hint)
        most = len(list(finished.overlap(*pair)))
        hint = "runs, not single numbers: a read each"
        expect(len(found) <= most, f"{what}: {len(found)} reads, {most} would do", hint)
        count += len(found)
    return f"200 pairs of shards, {count} runs in common"


def check_owners(lab, group, seed):
    for kind, world in LAYOUTS:
        layouts, before = (layouts_of(kind, SHAPES, world) for _ in "ab")
        found, right = lab.owners(layouts), finished.owners(before)
        expect(layouts == before, "owners() changes the layouts", "no pop(): they are save()'s")
        what = f"{kind} on {world} ranks"
        expect(isinstance(found, dict), f"{what}: owners() returns {type(found).__name__}")
        for (name, shard), rank in right.items():
            mine = found.get((name, shard))
            known = isinstance(mine, int) and shard == layouts[mine].get(name)
            expect(known, f"{what}: {mine} saves {shard} of {name}", "one rank that holds it")
            hint = "fewest holders first; each to the holder with the fewest numbers so far"
            expect(mine == rank, f"{what}: rank {mine} saves {name}, not {rank}", hint)
        expect(len(found) == len(right), f"{what}: {len(found)} pieces, not {len(right)}")
    hole, twice = layouts_of("tp", SHAPES, 3), layouts_of("tp", SHAPES, 3)
    del hole[1]["o"]
    twice[0]["o"] = finished.whole(SHAPES["o"])
    for layouts, what in (hole, "a part of o on no rank"), (twice, "parts of o twice"):
        hint = "add up the numbers of a tensor's pieces: they are those of its full shape"
        try:
            lab.owners(layouts)
        except lab.CheckpointError as problem:
            expect("o" in str(problem).split(":")[0].split(), f"{what}: {problem}", "name it")
        else:
            raise Wrong(f"{what} is accepted", hint)
    return "every number has one owner, replicas are dealt out, a hole is refused"


def check_write(lab, group, seed):
    full = drawn(seed, {"a.weight": (3, 5), "b": (7,), "c/step": ()})
    kinds = {name: (finished.DTYPE_NAMES[x.dtype], tuple(x.shape)) for name, x in full.items()}
    alive, most = weakref.WeakSet(), []

    def get(name):
        tensor = full[name].clone()
        alive.add(tensor)
        gc.collect()
        most.append(len(alive))
        return tensor

    with tempfile.TemporaryDirectory() as folder:
        path, disk = Path(folder, "x.safetensors"), Disk()
        with disk.inside():
            found = lab.write_tensors(path, kinds, get)
        data = path.read_bytes()
        disk.lose_power()
        kept = path.read_bytes() if path.exists() else b""
    size, header = header_of(data)
    found = found if isinstance(found, dict) else {}
    expect(list(header) == list(full), f"the header has {list(header)}, not {list(full)}")
    end, hint = 0, "data_offsets count bytes from behind the header: [begin, end] of each"
    for name, x in full.items():
        right = {"dtype": kinds[name][0], "shape": list(x.shape)}
        right["data_offsets"] = [end, end + x.nbytes]
        expect(header[name] == right, f"{name} is {header[name]}, not {right}", hint)
        mine, end = data[8 + size + end :][: x.nbytes], end + x.nbytes
        numbers = bytes(finished.bytes_of(x))
        expect(mine == numbers, f"the bytes of {name} are not its numbers", "bytes_of(get(name))")
    right = {"bytes": len(data), "crc32": zlib.crc32(data)}
    right["at"] = {name: 8 + size + header[name]["data_offsets"][0] for name in full}
    for key, value in right.items():
        hint = {"at": "from the file's start: with 8, and the header"}.get(key, "of all the file")
        expect(found.get(key) == value, f"{key}: {found.get(key)}, not {value}", hint)
    expect(max(most) <= 2, "all tensors are there at once", "get(name) when it is its turn")
    hint = "flush, os.fsync(file.fileno()) before it is closed; sync_folder(parent) for its name"
    expect(kept == data, "a power failure behind it leaves no whole file", hint)
    return f"a header of {size} bytes, {end} bytes of numbers, one tensor at a time, on the disk"


def header_of(data):
    """(bytes of the header, {name: what it says}) of a file in the format of safetensors."""
    size = int.from_bytes(data[:8], "little")
    hint = "the length of the header, 8 bytes, little-endian, with the spaces behind it"
    expect(0 < size < len(data), f"the file begins with the number {size}", hint)
    try:
        header = json.loads(data[8 : 8 + size])
    except ValueError:
        raise Wrong(f"bytes 8 to {8 + size} are no JSON", hint) from None
    expect(size % 8 == 0, f"the header has {size} bytes", "spaces until 8 divides its length")
    meta = header.pop("__metadata__", None)
    expect(meta == {"format": "pt"}, f"__metadata__ is {meta}", "HF refuses a file without it")
    return size, header


def check_save(lab, group, seed):
    old, new = drawn(seed, SHAPES), drawn(seed + 1, SHAPES)
    with tempfile.TemporaryDirectory() as folder:
        first = Path(folder, "first")
        for i, (kind, world) in enumerate(LAYOUTS):
            first.mkdir(exist_ok=True)
            values = (old, new)[i % 2]
            seen = save_with(lab, first, values, kind, world, backwards=True)
            what = f"save() from {kind} on {world} ranks"
            expect(same(read_full(first), values), f"{what}: other numbers come back")
            index, files = finished.read_index(first), list(first.glob("save*"))
            pieces = [x for saved in index["tensors"].values() for x in saved["pieces"]]
            count = sum(piece["runs"][1] * piece["runs"][3] for piece in pieces)
            right = sum(x.numel() for x in values.values())
            expect(count == right, f"{what}: {count} numbers, not {right}", "owners() says whose")
            names = sorted(f"save{i + 1}-rank{rank}.safetensors" for rank in range(world))
            found = sorted(path.name for path in files)
            expect(found == names, f"{what}: files {found}, not {names}", "number + 1 each time")
            early = [rank for rank, number in enumerate(seen) if number != i + 1]
            hint = "all wait for rank 0 in a last gather_objects"
            expect(not early, f"{what}: ranks {early} return before the new index is there", hint)
        shutil.rmtree(first)
        first.mkdir()
        save_with(finished, first, old, "tp", 2)
        events = stop_at(lab, first, Path(folder, "second"), old, new, None, "a kill")
        for what, stop in itertools.product(("a kill", "a power failure"), range(events)):
            stop_at(lab, first, Path(folder, "second"), old, new, stop, what)
    return f"6 layouts; a kill and a power failure at each of {events} events: old or new, whole"


def stop_at(lab, first, second, old, new, stop, what):
    """Save `new` over a copy of a checkpoint of `old`, on 3 ranks, and stop at an event; what is
    left has to be one of the two. Returns how many events there were."""
    shutil.rmtree(second, ignore_errors=True)
    shutil.copytree(first, second)
    disk = Disk(stop)
    try:
        with disk.inside():
            save_with(lab, second, new, "tp", 3)
    except Killed:
        if what == "a power failure":
            disk.lose_power()
    after = f"{what} after {disk.log[-1] if disk.log else 'nothing'}"
    hint = "the new index comes when every rank's file is there, the old files go after that"
    if what == "a power failure":
        hint = "os.fsync the draft, os.replace, sync_folder, and only then remove what is old"
    try:
        found = read_full(second)
    except (Wrong, finished.CheckpointError, OSError) as problem:
        text = getattr(problem, "found", problem)
        raise Wrong(
            f"{after}: neither checkpoint is whole ({Path(str(text)).name})", hint
        ) from None
    expect(same(found, old) or same(found, new), f"{after}: a mixture of old and new", hint)
    expect(stop is not None or same(found, new), "save() returns, and the old one is there", hint)
    return disk.events


def check_fill(lab, group, seed):
    large = SHAPES | {f"layer{i}": (64, 64) for i in range(12)}
    full, size = drawn(seed, large), 0
    hint = "n numbers from the piece's j-th to this tensor's i-th, each of itemsize bytes"
    with tempfile.TemporaryDirectory() as folder:
        for (kind, world), (to, count) in itertools.product(LAYOUTS, LAYOUTS):
            if (kind, world) == (to, count):
                continue
            for path in Path(folder).iterdir():
                path.unlink()
            save_with(finished, folder, full, kind, world)
            index = finished.read_index(folder)
            for rank, layout in enumerate(layouts_of(to, large, count)):
                tensors = {
                    n: torch.full((len(numbers_of(s)),), torch.nan, dtype=full[n].dtype)
                    for n, s in layout.items()
                }
                what = f"{kind} on {world} ranks to {to} on {count}, rank {rank}"
                tracemalloc.start()
                with counting() as read, Alive() as alive:
                    lab.fill(folder, index, tensors, layout)
                peak = alive.peak + tracemalloc.get_traced_memory()[1]
                tracemalloc.stop()
                for name, x in tensors.items():
                    right = torch.equal(x, part_of(full[name], layout[name]))
                    expect(right, f"{what}: {name} has other numbers", hint)
                own = sum(x.nbytes for x in tensors.values())
                text = "seek to what overlaps, and read no more"
                expect(read.total <= own, f"{what}: {read.total} bytes read for {own}", text)
                text = "read_into() a view of the tensor itself: no file, no full tensor in memory"
                expect(peak < 100_000, f"{what}: {peak} bytes beside the rank's own", text)
                size = max(size, peak)
    return f"30 pairs of layouts, to the bit; no byte too many read; {size} bytes beside the own"


def check_verify(lab, group, seed):
    full, lab.BLOCK = drawn(seed, SHAPES), 256
    with tempfile.TemporaryDirectory() as folder:
        save_with(finished, folder, full, "tp", 2)
        index = finished.read_index(folder)
        path, other = (Path(folder, name) for name in index["files"])
        data, foreign = path.read_bytes(), other.read_bytes()
        middle = len(data) // 2
        flipped = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
        cases = {
            "as it was saved": (data, None, ""),
            "missing": (None, path, "Path(path).is_file()"),
            "cut short": (data[:-3], path, 'its size is not index["files"][name]["bytes"]'),
            "one bit flipped": (flipped, path, "zlib.crc32 of all blocks, each from that before"),
            "another rank's": (foreign, path, "size and crc32 are in the index"),
        }
        for what, (bytes_now, named, hint) in cases.items():
            path.unlink(missing_ok=True)
            if bytes_now is not None:
                path.write_bytes(bytes_now)
            with counting() as read:
                found = lab.damage(folder, index, list(index["files"]))
            if named is None:
                expect(found is None, f"a file that is fine: {found}", "None")
            else:
                known = isinstance(found, str) and str(path) in found and "\n" not in found
                expect(known, f"a file that is {what}: {found}", hint)
            expect(read.most <= 256, f"{read.most} bytes at once", "blocks of BLOCK bytes")
    check_mismatch(lab, index, full)
    return "missing, short, damaged, foreign: the file; a name, shape or dtype that does not fit"


def check_mismatch(lab, index, full):
    """What fits is None, what does not is named."""
    layout = layouts_of("tp", SHAPES, 2)[0]
    tensors = {name: part_of(full[name], shard) for name, shard in layout.items()}
    expect(lab.mismatch(index, tensors, layout) is None, "mismatch() of what fits is not None")
    wider = layout | {"q": finished.cut((12, 4), 0, 0, 3)}
    cases = [
        ("more", tensors | {"more": full["norm"]}, layout | {"more": layout["norm"]}),
        ("q", tensors, wider),  # a rank's part has the same size
        ("o", tensors | {"o": tensors["o"].float()}, layout),
    ]
    for name, mine, where in cases:
        found = lab.mismatch(index, mine, where)
        hint = "its name, full shape and dtype: is each what the index has?"
        known = isinstance(found, str) and name in found.replace(":", " ").split()
        expect(known, f"{name} does not fit, and mismatch() gives {found}", hint)


CHECKS = {
    "cut": (check_cut, 1),
    "overlap": (check_overlap, 1),
    "owners": (check_owners, 1),
    "write": (check_write, 1),
    "save": (check_save, 1),
    "verify": (check_verify, 1),
    "fill": (check_fill, 1),
    "optimizer": (check_optimizer, 1),
    "export": (check_export, 1),
}


def padding_saved(lab):
    """A rank's flat shard counts as the last tensor's to its end: the padding is saved, too."""
    right = lab.flat_cut

    def flat_cut(shapes, rank, world):
        *found, (shard, at) = right(shapes, rank, world)
        size = -(-sum(map(math.prod, shapes)) // world)
        if shard:
            shard = lab.dataclasses.replace(shard, length=size - at)
        return [*found, (shard, at)]

    lab.flat_cut = flat_cut


def rename_without_fsync(lab):
    """The draft is renamed before it is on the disk: a power failure shows it, a kill does not."""
    lab.os = SimpleNamespace(**vars(lab.os) | {"fsync": lambda descriptor: None})


def step_count_lost(lab):
    """The step counts are copies: AdamW's bias correction begins anew after loading."""
    right = lab.training_state

    def training_state(model, optimizer):
        found = right(model, optimizer)
        return {n: x.clone() if n.endswith("/step") else x for n, x in found.items()}

    lab.training_state = training_state


BUGS = [padding_saved, rename_without_fsync, step_count_lost]
