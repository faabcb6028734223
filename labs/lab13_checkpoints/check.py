"""Lab 13's checks and the bugs that they have to catch. No ranks: threads take their place.

What an answer reads or writes is compared to the bit. Where a full tensor's numbers lie is worked
out number by number (numbers_of), not by runs. disk.py has the disk that fails, shards.py the toy
layouts, state.py the checks of AdamW's state and of Hugging Face's files.
"""

import gc
import itertools
import json
import shutil
import tempfile
import tracemalloc
import weakref
import zlib
from pathlib import Path
from types import SimpleNamespace

import torch

from labs.kit.alive import Alive
from labs.kit.compare import mistaken, tried
from labs.kit.harness import Wrong, expect
from labs.kit.usual import alike, section, usual_results
from labs.lab13_checkpoints import shards, state
from labs.lab13_checkpoints.disk import Disk, Killed, counting
from labs.lab13_checkpoints.shards import (
    LAYOUTS,
    SHAPES,
    drawn,
    finished,
    layouts_of,
    part_of,
    same,
    save_with,
)


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
        kept = path.read_bytes() if path.exists() else None
        path.write_bytes(b"what a save that was killed has left")
        lab.write_tensors(path, kinds, full.get)
        again = path.read_bytes()
    size = expect_file(data, found if isinstance(found, dict) else {}, full, kinds)
    once = max(most) <= 2 and len(most) == len(full)
    expect(once, "tensors are made at once, or twice", "get(name) when it is its turn")
    expect(again == data, "behind an older file's bytes", 'open(path, "wb") begins anew')
    hint = "flush, then os.fsync(file.fileno()), before it is closed"
    hint = "sync_folder(parent) for its name" if kept is None else hint
    expect(kept == data, "a power failure behind it leaves no whole file", hint)
    return f"a header of {size} bytes, {len(data)} in all, one tensor at a time, on the disk"


def expect_file(data, found, full, kinds):
    """Raise Wrong unless a file has full {name: tensor}, and found says so; the header's bytes."""
    size, header = header_of(data)
    expect(list(header) == list(full), f"the header has {list(header)}, not {list(full)}")
    end = 0
    for name, x in full.items():
        hint = "as kinds has it; data_offsets count bytes from behind the header: [begin, end]"
        right = {"dtype": kinds[name][0], "shape": list(x.shape)}
        right["data_offsets"] = [end, end + x.nbytes]
        expect(header[name] == right, f"{name} is {header[name]}, not {right}", hint)
        mine, end = data[8 + size + end :][: x.nbytes], end + x.nbytes
        hint = "bytes_of(get(name)), in the order of kinds"
        numbers = bytes(finished.bytes_of(x))
        expect(mine == numbers, f"the bytes of {name} are not its numbers", hint)
    right = {"bytes": len(data), "crc32": zlib.crc32(data)}
    right["at"] = {name: 8 + size + header[name]["data_offsets"][0] for name in full}
    for key, value in right.items():
        hint = {"at": "from the file's start: with 8, and the header"}.get(key, "of all the file")
        expect(found.get(key) == value, f"{key}: {found.get(key)}, not {value}", hint)
    return size


def header_of(data):
    """(bytes of the header, {name: what it says}) of a file in the format of safetensors."""
    size = int.from_bytes(data[:8], "little")
    hint = "the length of the header, 8 bytes, little-endian, with the spaces behind it"
    expect(0 < size < len(data), f"the file begins with the number {size}", hint)
    try:
        header = json.loads(data[8 : 8 + size])
    except ValueError:
        raise Wrong(f"bytes 8 to {8 + size} are no JSON", hint) from None
    hint = "spaces until 8 divides its length; the number in front of it counts them, too"
    expect(size % 8 == 0, f"the header has {size} bytes", hint)
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
            hint = "make_index() of what every rank wrote, by rank; kinds has a rank's own shapes"
            expect(same(shards.read_full(first), values), f"{what}: other numbers come back", hint)
            index, files = finished.read_index(first), list(first.glob("save*"))
            pieces = [x for saved in index["tensors"].values() for x in saved["pieces"]]
            count = sum(piece["runs"][1] * piece["runs"][3] for piece in pieces)
            right = sum(x.numel() for x in values.values())
            expect(count == right, f"{what}: {count} numbers, not {right}", "owners() says whose")
            names = sorted(f"save{i + 1}-rank{rank}.safetensors" for rank in range(world))
            found = sorted(path.name for path in files)
            hint = "number + 1 each time, one file a rank"
            if len(found) > len(names):
                hint = "commit() removes every save*.safetensors that the index does not name"
            expect(found == names, f"{what}: files {found}, not {names}", hint)
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
    hint = "the new index comes when every rank's file is there, by os.replace of a draft; "
    hint += "the old files go after that"
    if what == "a power failure":
        hint = "os.fsync the draft, os.replace, sync_folder, and only then remove what is old"
    try:
        found = shards.read_full(second)
    except (Wrong, finished.CheckpointError, OSError) as problem:
        text = getattr(problem, "found", problem)
        found = f"{after}: neither checkpoint is whole ({Path(str(text)).name})"
        raise Wrong(found, hint) from None
    expect(same(found, old) or same(found, new), f"{after}: a mixture of old and new", hint)
    commits = disk.log.count("index.json is replaced")
    expect(commits <= 1, f"{commits} ranks commit", "rank 0 alone, when all files are there")
    expect(stop is not None or same(found, new), "save() returns, and the old one is there", hint)
    return disk.events


MISTAKES = """
== fill
bytes_of(tensors[name]) -> bytearray(9999)  # the tensor stays as it was: a copy is filled, or none
["pieces"]: -> ["pieces"][:1]:  # every piece may have some of a tensor's numbers
tensors[name].itemsize -> 8  # a number has itemsize bytes
tensors[name].itemsize -> 4  # a number has itemsize bytes
piece["at"] + j * size -> piece["at"] + j  # j counts numbers, `at` bytes: itemsize of each
i * size : (i + n) * size -> i : i + n * size  # i counts numbers, a view bytes: itemsize of each
i * size : (i + n) * size -> i * size : n * size  # all of overlap(); a view ends at i + n
piece["at"] + j * size -> piece["at"]  # n numbers from the piece's j-th on
piece["at"] + j -> piece["at"] + i  # from the piece's j-th number to this tensor's i-th
i * size : (i + n) * size -> j * size : (j + n) * size  # to this tensor's i-th; j is the piece's
for i, j, n in -> for j, i, n in  # i: the position in this tensor, j: in the piece
piece["at"] + ->  # `at`: where in the file the piece begins
of each piece: n numbers, from its j-th behind `at` to this tensor's i-th, each of itemsize bytes
"""


def usual_fill(folder, index, name, mine, shard):
    """The hint of the mistake in fill() that leaves the same numbers in a rank's tensor."""
    tensors = {name: mine * torch.nan}
    for hint, _ in usual_results(MISTAKES, finished.fill, (folder, index, tensors, {name: shard})):
        if alike(tensors[name], mine):
            return hint
        tensors[name].fill_(torch.nan)
    return section(MISTAKES, finished.fill)[-1]


def check_fill(lab, group, seed):
    large = SHAPES | {f"layer{i}": (64, 64) for i in range(12)}
    full, size = drawn(seed, large), 0
    hint = section(MISTAKES, finished.fill)[-1]
    with tempfile.TemporaryDirectory() as folder:
        for (kind, world), (to, count) in itertools.product(LAYOUTS, LAYOUTS):
            if (kind, world) == (to, count):
                continue
            for path in Path(folder).iterdir():
                path.unlink()
            save_with(finished, folder, full, kind, world)
            index = finished.read_index(folder)
            for rank, layout in enumerate(layouts_of(to, large, count)):
                tensors = {n: part_of(full[n], s) * torch.nan for n, s in layout.items()}
                what = f"{kind} on {world} ranks to {to} on {count}, rank {rank}"
                given = tensors.copy()
                tracemalloc.start()
                with counting() as read, Alive() as alive:
                    tried(what, hint, lab.fill, folder, index, tensors, layout)
                peak = alive.peak + tracemalloc.get_traced_memory()[1]
                tracemalloc.stop()
                for name, x in given.items():
                    if not torch.equal(x, part_of(full[name], layout[name])):
                        hint = usual_fill(folder, index, name, x, layout[name])
                        raise Wrong(f"{what}: {name} has other numbers", hint)
                own = sum(x.nbytes for x in tensors.values())
                text = "seek to what overlaps, and read no more"
                expect(read.total <= own, f"{what}: {read.total} bytes read for {own}", text)
                text = "read_into() a view of the tensor itself: no file, no full tensor in memory"
                expect(peak < 100_000, f"{what}: {peak} bytes beside the rank's own", text)
                size = max(size, peak)
    return f"30 pairs of layouts, to the bit; no byte too many read; {size} bytes beside the own"


def check_verify(lab, group, seed):
    full = drawn(seed, SHAPES)
    with tempfile.TemporaryDirectory() as folder:
        save_with(finished, folder, full, "tp", 2)
        index = finished.read_index(folder)
        path, other = (Path(folder, name) for name in index["files"])
        data, foreign = path.read_bytes(), other.read_bytes()
        middle = len(data) // 2
        flipped = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
        fine = "crc32 goes on from block to block, and the size, until read() brings nothing"
        cases = {
            "as it was saved": (data, None, fine),
            "missing": (None, path, "Path(path).is_file()"),
            "cut short": (data[:-3], path, 'its size is not index["files"][name]["bytes"]'),
            "one bit flipped": (flipped, path, "zlib.crc32 of all blocks, each from that before"),
            "another rank's": (foreign, path, "size and crc32 are in the index"),
        }
        sizes = 256, len(data), len(data) - 1  # the last block is full, or one byte
        for (what, case), lab.BLOCK in itertools.product(cases.items(), sizes):
            bytes_now, named, hint = case
            path.unlink(missing_ok=True)
            if bytes_now is not None:
                path.write_bytes(bytes_now)
            title, returned = f"a file that is {what}", f"a line with its path, or None; {hint}"
            files = [path.name, other.name][:: 1 if lab.BLOCK == 256 else -1]
            with counting() as read:
                found = tried(title, returned, lab.damage, folder, index, files)
            known = isinstance(found, str) and str(path) in found and "\n" not in found
            expect(known if named else found is None, f"{title}: {found}", returned)
            expect(read.most <= lab.BLOCK, f"{read.most} bytes at once", "blocks of BLOCK bytes")
            found = tried(title, returned, lab.damage, folder, index, [other.name])
            expect(found is None, f"another file was asked for: {found}", "look at `files` alone")
    check_mismatch(lab, index, full)
    return "missing, short, damaged, foreign: the file; a name, shape or dtype that does not fit"


def check_mismatch(lab, index, full):
    """What fits is None, what does not is named."""
    layout = layouts_of("tp", SHAPES, 2)[0]
    tensors = {name: part_of(full[name], shard) for name, shard in layout.items()}
    wider = layout | {"q": finished.cut((12, 4), 0, 0, 3)}
    cases = [
        (None, tensors, layout),
        ("more", tensors | {"more": full["norm"]}, layout | {"more": layout["norm"]}),
        ("q", tensors, wider),  # a rank's part has the same size
        ("o", tensors | {"o": tensors["o"].float()}, layout),
    ]
    for name, mine, where in cases:
        hint = "its name, full shape and dtype: is each what the index has?"
        if name is None:
            hint = "the index has DTYPE_NAMES, and full shapes as lists: shard.shape is a tuple"
        found = tried(f"mismatch() of {name}", hint, lab.mismatch, index, mine, where)
        known = isinstance(found, str) and name and name in found.replace(":", " ").split()
        what = f"{name} does not fit" if name else "all fits"
        expect(known or found is name, f"{what}, and mismatch() gives {found}", hint)


CHECKS = {
    "cut": (shards.check_cut, 1),
    "overlap": (shards.check_overlap, 1),
    "owners": (shards.check_owners, 1),
    "write": (check_write, 1),
    "save": (check_save, 1),
    "verify": (check_verify, 1),
    "fill": (check_fill, 1),
    "optimizer": (state.check_optimizer, 1),
    "export": (state.check_export, 1),
}


def padding_saved(lab):
    """A rank's flat shard counts as the last tensor's to its end: the padding is saved, too."""
    lab.flat_cut = mistaken(finished.flat_cut, ("min(end, mine + size)", "mine + size"))


def rename_without_fsync(lab):
    """The draft is renamed before it is on the disk: a power failure shows it, a kill does not."""
    lab.os = SimpleNamespace(**vars(lab.os) | {"fsync": lambda descriptor: None})


def step_count_lost(lab):
    """The step counts are copies: AdamW's bias correction begins anew after loading."""
    copy = 'state[key].clone() if key == "step" else state[key]'
    lab.training_state = mistaken(finished.training_state, ("state[key] for", f"{copy} for"))


BUGS = [padding_saved, rename_without_fsync, step_count_lost]
