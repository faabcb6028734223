"""Lab 13. Checkpoints: saved in one layout, loaded in another.

Question: tensor parallelism on 2 GPUs saved a run. Tomorrow there are 3 GPUs, or only one, or
a pipeline. How does each rank find its numbers, and what if the job is killed while it saves?

Idea: a file says which numbers of which *full* tensor it holds, in any layout. In row-major
order these are `count` runs of `length` numbers, `stride` apart. In a (4, 6) matrix # is held:

    rows 1, 2         ......        columns 2, 3    ..##..        numbers 8..14   ......
    (tp.py: q, k, v,  ######        (tp.py: o_proj, ..##..        (ZeRO-3: a flat ..####
     embedding, head) ######         down_proj)     ..##..         vector is cut) ###...
                      ......                        ..##..                        ......
    offset 6, length 12, count 1    offset 2, length 2,           offset 8, length 7, count 1
                                    stride 6, count 4

A pipeline's rank holds whole tensors. The third save in a folder:

    each rank    save3-rank0.safetensors, save3-rank1.safetensors, ...     its own pieces, once
                     | only when every file is on the disk
    rank 0       index.json: {tensor: shape, dtype, pieces: [file, at, runs]}, written beside the
                 old one, renamed over it: now the new one counts. Then save2's files are removed

What several ranks hold (norms; in Ulysses all; a pipeline's tied embedding) one of them saves;
none saves padding. To load, a rank reads what overlaps with its own straight into place, so
none has the whole model. AdamW's averages are cut like their parameter, its step count is not.

    python labs/lab13_checkpoints/lesson.py --plot lab13.png  # checks and experiments
    python labs/lab13_checkpoints/lesson.py --pairs all       # every layout into every other
    python labs/lab13_checkpoints/lesson.py --predict 50      # first your guess; see the end
    python labs/grade.py start lab13                          # writes my_labs/lab13_checkpoints.py

Sources: safetensors, README.md (the format). PyTorch: torch/distributed/checkpoint/. Megatron-LM:
core/dist_checkpointing/mapping.py. Universal Checkpointing, arXiv 2406.18820. Pillai et al., OSDI
2014: what a crash leaves of writes and renames.
"""

import json
import math
import os
import sys
import zlib
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

FORMAT = "lab13 checkpoint"
DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}  # as safetensors calls them
STATE = "step", "exp_avg", "exp_avg_sq"  # AdamW's, of each parameter
BLOCK = 1 << 20  # bytes that are checked at a time


class CheckpointError(Exception):
    """A checkpoint that cannot be used: one line, with the file or the tensor."""


# ---- The lesson 1: what a rank holds of a tensor -------------------------------------------------


class Shard(NamedTuple):
    """Numbers of a full tensor, in row-major order: `count` runs of `length`, `stride` apart, the
    first at `offset`. The rank's own tensor has the runs one behind the other."""

    shape: tuple
    offset: int
    length: int
    stride: int = 0
    count: int = 1


def whole(shape):
    """The Shard of a rank that holds all of a tensor; also of a number, shape ()."""
    return Shard(tuple(shape), 0, math.prod(shape))


def cut(shape, dim, start, end):
    """The Shard with [start, end) of dimension `dim`. If that is all of `dim`: whole(shape).

    It is one run, with stride 0 and count 1, if no gap is between the numbers (as in dim 0).
    """
    # exercise: cut
    inner, outer = math.prod(shape[dim + 1 :]), math.prod(shape[:dim])
    if (start, end) == (0, shape[dim]):
        return whole(shape)
    apart = (shape[dim] * inner, outer) if outer > 1 else (0, 1)
    return Shard(tuple(shape), start * inner, (end - start) * inner, *apart)
    # end exercise


def flat_cut(shapes, rank, world):
    """A rank's share of tensors of these shapes in ZeRO-3: [(Shard or None, at)], one each.

    The tensors lie one behind the other in a flat vector, padded until P divides its length; a rank
    holds a P-th of it (lab 9). at: where the Shard's numbers begin in that. (None, 0): it has
    none of this tensor. Padding belongs to no tensor.
    """
    # exercise: cut
    size = -(-sum(math.prod(shape) for shape in shapes) // world)
    mine, begin, found = rank * size, 0, []
    for shape in shapes:
        end = begin + math.prod(shape)
        first, last = max(begin, mine), min(end, mine + size)
        shard = Shard(tuple(shape), first - begin, last - first)
        found.append((shard, first - mine) if first < last else (None, 0))
        begin = end
    return found
    # end exercise


def overlap(mine, theirs):
    """Yield (i, j, n): n numbers from position i of my tensor are those from position j of theirs.

    Both are Shards of one full tensor; positions count the numbers that each holds. In order,
    one triple for each run of mine and run of theirs that share numbers.
    """
    # exercise: overlap
    a = b = 0  # a run of mine, a run of theirs
    while a < mine.count and b < theirs.count:
        x, y = mine.offset + a * mine.stride, theirs.offset + b * theirs.stride
        start, end = max(x, y), min(x + mine.length, y + theirs.length)
        if start < end:
            yield a * mine.length + start - x, b * theirs.length + start - y, end - start
        if x + mine.length == end:
            a += 1
        else:
            b += 1
    # end exercise


# ---- The lesson 2: saving ------------------------------------------------------------------------


def owners(layouts):
    """{(name, Shard): the rank that saves it}. layouts: of each rank {name: Shard}.

    First deal out what one rank alone holds, then what two hold, and so on; what equally many
    ranks hold in the order of the layouts, rank 0's first. Each goes to the holder with the
    fewest numbers to save so far; of several such, to the lowest. Raises CheckpointError, with
    the tensor's name, unless the pieces cover the tensor exactly once.
    """
    # exercise: owners
    holders, taken, owner, runs = {}, [0] * len(layouts), {}, {}
    for rank, layout in enumerate(layouts):
        for name, shard in layout.items():
            holders.setdefault((name, shard), []).append(rank)
    for (name, shard), ranks in sorted(holders.items(), key=lambda item: len(item[1])):
        owner[name, shard] = rank = min(ranks, key=taken.__getitem__)
        taken[rank] += shard.length * shard.count
        starts = [shard.offset + run * shard.stride for run in range(shard.count)]
        runs.setdefault(name, []).extend((start, shard.length) for start in starts)
    for name, shape in dict.fromkeys((name, shard.shape) for name, shard in owner):
        end = 0
        for start, length in sorted(runs[name]):
            end = start + length if start == end else math.inf
        if end != math.prod(shape):
            raise CheckpointError(f"{name}: the pieces do not cover {shape} exactly once")
    return owner
    # end exercise


def bytes_of(tensor):
    """The memory of a contiguous CPU tensor, to read from or to write to; nothing is copied."""
    return memoryview(tensor.detach().view(-1).view(torch.uint8).numpy())


def sync_folder(folder):
    """Put a folder's names on the disk, after files were made, renamed or removed."""
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def write_tensors(path, kinds, get):
    """Write a safetensors file, down to the disk; returns {"bytes", "crc32", "at"}.

    kinds {name: (dtype as DTYPES names it, shape)}. get(name) makes the tensor: call it when
    the tensors before are written, so that one exists at a time. The file:

        8 bytes    n, little-endian
        n bytes    JSON: {"__metadata__": {"format": "pt"}, name: {"dtype": .., "shape": [..],
                   "data_offsets": [begin, end]}, ..}, filled up with spaces until 8 divides n
        the rest   the tensors' numbers, one tensor behind the other; data_offsets count from here

    "at" {name: where its numbers begin, from the file's start}; "crc32": zlib.crc32 of all bytes.
    It is on the disk after os.fsync of the open file, then sync_folder.
    """
    # exercise: write
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, (dtype, shape) in kinds.items():
        begin, end = end, end + math.prod(shape) * DTYPES[dtype].itemsize
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    first = len(text).to_bytes(8, "little") + text
    crc = zlib.crc32(first)
    with open(path, "wb") as file:
        file.write(first)
        for name in kinds:
            data = bytes_of(get(name))
            file.write(data)
            crc = zlib.crc32(data, crc)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(Path(path).parent)
    at = {name: len(first) + header[name]["data_offsets"][0] for name in kinds}
    return {"bytes": len(first) + end, "crc32": crc, "at": at}
    # end exercise


def read_index(folder):
    """The index of the checkpoint in a folder; CheckpointError where there is none."""
    path = Path(folder, "index.json")
    try:
        index = json.loads(path.read_bytes())
    except (OSError, ValueError):
        index = None
    if not isinstance(index, dict) or index.get("format") != FORMAT:
        raise CheckpointError(f"{path} is missing, or no index of a checkpoint of this lab")
    return index


def gather_objects(value, group):
    """Every rank's value, in a list; a barrier, too: all ranks have called it when it returns."""
    values = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


def gather_layouts(layout, group):
    """Every rank's {name: Shard}; sent as tuples, because pickle finds no class of a lab."""
    plain = {name: tuple(shard) for name, shard in layout.items()}
    everyone = gather_objects(plain, group)
    return [{name: Shard(*fields) for name, fields in each.items()} for each in everyone]


def make_index(number, layouts, everyone):
    """The index, from each rank's layout and (file, kinds, what write_tensors returned)."""
    index = {"format": FORMAT, "number": number, "files": {}, "tensors": {}}
    for layout, (file, kinds, written) in zip(layouts, everyone):
        index["files"][file] = {"bytes": written["bytes"], "crc32": written["crc32"]}
        for name, (dtype, _) in kinds.items():
            shape, *runs = layout[name]
            piece = {"file": file, "at": written["at"][name], "runs": runs}
            entry = {"dtype": dtype, "shape": shape, "pieces": []}
            index["tensors"].setdefault(name, entry)["pieces"].append(piece)
    return index


def commit(folder, index):
    """Make index.json this index, then remove all save*.safetensors that it does not name.

    At any moment a kill or a power failure (which takes what is not on the disk) has to leave
    the old index or this one, and all files that it names. So write index.json.draft, os.fsync
    it, os.replace index.json by it, sync_folder; only then Path.unlink files.
    """
    # exercise: save
    draft = Path(folder, "index.json.draft")
    with open(draft, "w") as file:
        file.write(json.dumps(index))
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, Path(folder, "index.json"))
    sync_folder(folder)
    for path in Path(folder).glob("save*.safetensors"):
        if path.name not in index["files"]:
            path.unlink()
    # end exercise


def save(folder, tensors, layout, group):
    """Save what all ranks hold, each number once, in a folder that may have a checkpoint.

    tensors {name: what this rank holds}, layout {name: Shard}. Each rank writes what owners() gives
    it to save{number}-rank{rank}.safetensors; number: the old index's plus 1, else 1. When all
    files are there, rank 0 commits make_index(); no rank returns before that. Ranks communicate by
    gather_layouts and gather_objects.
    """
    # exercise: save
    rank, older = group.rank(), Path(folder, "index.json").exists()
    number = read_index(folder)["number"] + 1 if older else 1
    layouts = gather_layouts(layout, group)
    owner = owners(layouts)
    own = [name for name, shard in layout.items() if owner[name, shard] == rank]
    kinds = {name: (DTYPE_NAMES[tensors[name].dtype], tensors[name].shape) for name in own}
    file = f"save{number}-rank{rank}.safetensors"
    written = write_tensors(Path(folder, file), kinds, tensors.get)
    everyone = gather_objects((file, kinds, written), group)
    if rank == 0:
        commit(folder, make_index(number, layouts, everyone))
    gather_objects(None, group)
    # end exercise


# ---- The lesson 3: loading -----------------------------------------------------------------------


def damage(folder, index, files):
    """A line on the first of these files that is not as the index has it, or None.

    It has the path and says: missing, or another size, or another crc32 (damaged, or another
    checkpoint's). Read in blocks of BLOCK bytes, never whole."""
    # exercise: verify
    for name in files:
        path, known, crc, size = Path(folder, name), index["files"][name], 0, 0
        if not path.is_file():
            return f"{path} is missing"
        with open(path, "rb") as file:
            while block := file.read(BLOCK):
                crc, size = zlib.crc32(block, crc), size + len(block)
        if size != known["bytes"]:
            return f"{path} has {size} bytes, not {known['bytes']}"
        if crc != known["crc32"]:
            return f"{path} is damaged, or another checkpoint's: its crc32 is not the index's"
    return None
    # end exercise


def mismatch(index, tensors, layout):
    """A line on the first name that the index lacks, or has in another shape or dtype; or None."""
    # exercise: verify
    for name, shard in layout.items():
        if name not in index["tensors"]:
            return f"{name} is not in the checkpoint"
        saved, ours = index["tensors"][name], (DTYPE_NAMES[tensors[name].dtype], shard.shape)
        theirs = saved["dtype"], tuple(saved["shape"])
        if theirs != ours:
            return f"{name} is {theirs} in the checkpoint, {ours} in the model"
    return None
    # end exercise


def read_into(file, at, view):
    """Read the bytes at a place of a file into a view of a tensor's memory."""
    file.seek(at)
    if file.readinto(view) != len(view):
        raise CheckpointError(f"{file.name} ends too early")


def fill(folder, index, tensors, layout):
    """Read this rank's numbers of every tensor of the layout, in place, from whatever files.

    A piece's "runs": a Shard's fields after its shape; "at": in bytes. Read only what
    overlaps, by read_into() from open(path, "rb", buffering=0), into bytes_of() the tensor.
    """
    # exercise: fill
    for name, shard in layout.items():
        view, size = bytes_of(tensors[name]), tensors[name].itemsize
        for piece in index["tensors"][name]["pieces"]:
            with open(Path(folder, piece["file"]), "rb", buffering=0) as file:
                for i, j, n in overlap(shard, Shard(shard.shape, *piece["runs"])):
                    read_into(file, piece["at"] + j * size, view[i * size : (i + n) * size])
    # end exercise


def load(folder, tensors, layout, group, index=None):
    """Fill all ranks' tensors from a checkpoint; index: that of import_index(), else the folder's.

    First each rank checks a part of the files, and its own names. All raise what one finds.
    """
    index = index or read_index(folder)
    files = sorted(index["files"])[group.rank() :: group.size()]
    problem = mismatch(index, tensors, layout) or damage(folder, index, files)
    problems, names = zip(*gather_objects((problem, set(layout)), group))
    left = sorted(set(index["tensors"]).difference(*names))
    foreign = [f"{name} is in the checkpoint, and in no rank's model" for name in left]
    for problem in filter(None, [*problems, *foreign]):
        raise CheckpointError(f"{folder}: {problem}")
    fill(folder, index, tensors, layout)


# ---- The lesson 4: the state of training, and Hugging Face's files -------------------------------


def training_state(model, optimizer):
    """{name: data, "name/step": .., "name/exp_avg": .., "name/exp_avg_sq": ..} of all parameters.

    The tensors are no copies, because training goes on with what is read into them. Tied
    parameters are named once, by the first name. A parameter without a state yet gets AdamW's
    first: zeros; "step" is a tensor of shape (), float32.
    """
    # exercise: optimizer
    found = {}
    for name, parameter in model.named_parameters():  # state_dict() names tied tensors twice
        state = optimizer.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state |= {key: torch.zeros_like(parameter) for key in STATE[1:]}
        found |= {name: parameter.data} | {f"{name}/{key}": state[key] for key in STATE}
    return found
    # end exercise


def state_layout(layout):
    """The layout of training_state(), from that of the parameters, {name: Shard}."""
    found = dict(layout)
    for name, own in layout.items():
        found |= {f"{name}/step": whole(()), f"{name}/exp_avg": own, f"{name}/exp_avg_sq": own}
    return found


def export(folder, path):
    """Write the parameters of a checkpoint as one safetensors file that HF's from_pretrained reads.

    Leave out optimizer state ("/" in names). Make one full tensor at a time; rename a draft.
    """
    # exercise: export
    index, kinds = read_index(folder), {}
    for name, how in index["tensors"].items():
        if "/" not in name:
            kinds[name] = how["dtype"], how["shape"]

    def get(name):
        full = torch.empty(kinds[name][1], dtype=DTYPES[kinds[name][0]])
        fill(folder, index, {name: full}, {name: whole(full.shape)})
        return full

    write_tensors(f"{path}.draft", kinds, get)
    os.replace(f"{path}.draft", path)
    # end exercise


def import_index(folder):
    """An index for load() of a folder with HF's *.safetensors; no number is read or copied.

    Like make_index()'s, with "number" 0, no "files" (HF has no checksums), one piece a tensor.
    """
    index = {"format": FORMAT, "number": 0, "files": {}, "tensors": {}}
    for path in sorted(Path(folder).glob("*.safetensors")):
        try:
            with open(path, "rb") as file:
                size = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(min(size, path.stat().st_size)))
        except ValueError:
            raise CheckpointError(f"{path} is no safetensors file") from None
        header.pop("__metadata__", None)
        # exercise: export
        for name, how in header.items():
            runs, at = [0, math.prod(how["shape"]), 0, 1], 8 + size + how["data_offsets"][0]
            piece = {"file": path.name, "at": at, "runs": runs}
            saved = {"dtype": how["dtype"], "shape": how["shape"]}
            index["tensors"][name] = saved | {"pieces": [piece]}
        # end exercise
    return index


if __name__ == "__main__":  # the lab's checks and experiments, of labs/ and of my_labs/
    sys.path[:0] = [str(folder) for folder in Path(__file__).resolve().parents[1:3]]
    from labs.kit.run import main

    sys.exit(main(__file__))
