"""PyTorch's distributed checkpoint (DCP) beside lab 13's: the same tensors, 2 ranks to 3."""

from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from labs.lab13_checkpoints.disk import counting


class CountingReader(dcp.FileSystemReader):
    """numbers: bytes of the pieces in a rank's plan; read_data loads each whole, and narrows it."""

    def read_data(self, plan, planner):
        sizes = {}
        for name, saved in planner.metadata.state_dict_metadata.items():
            for chunk in saved.chunks:
                size = chunk.sizes.numel() * saved.properties.dtype.itemsize
                sizes[name, chunk.offsets] = size
        places = [item.storage_index for item in plan.items]
        self.numbers = sum(sizes[place.fqn, place.offset] for place in places)
        return super().read_data(plan, planner)


def by_rows(group, full):
    """Every tensor as a DTensor cut by rows, as fully_shard does it; {name: DTensor}."""
    mesh = DeviceMesh.from_group(group, "cpu")
    return {name: distribute_tensor(x, mesh, [Shard(0)]) for name, x in full.items()}


def rows_layout(lab, group, full):
    """The same for the lab: {name: Shard}, without the tensors of which this rank has no row."""
    found = {}
    for name, x in full.items():
        rows = -(-len(x) // group.size())
        start, end = (min(r * rows, len(x)) for r in (group.rank(), group.rank() + 1))
        if start < end:
            found[name] = lab.cut(tuple(x.shape), 0, start, end)
    return found


def save_both(group, lab, full, folder):
    """The same rows by DCP and by the lab: (bytes that this rank holds, its file's by each)."""
    sharded, layout = by_rows(group, full), rows_layout(lab, group, full)
    dcp.save(sharded, checkpoint_id=Path(folder, "dcp"))
    own = {name: sharded[name].to_local() for name in layout}
    lab.save(Path(folder, "ours"), own, layout, group)
    rank, sizes = group.rank(), []
    for pattern in f"dcp/__{rank}_*.distcp", f"ours/save*-rank{rank}.safetensors":
        sizes.append(sum(path.stat().st_size for path in Path(folder).glob(pattern)))
    return sum(x.nbytes for x in own.values()), *sizes


def load_both(group, lab, full, folder):
    """Into this rank's rows: (bytes held, read by DCP, by the lab; whether all are as saved)."""
    zeros = {name: torch.zeros_like(x) for name, x in full.items()}
    theirs, layout = by_rows(group, zeros), rows_layout(lab, group, full)
    reader = CountingReader(Path(folder, "dcp"))
    dcp.load(theirs, storage_reader=reader)
    ours = by_rows(group, zeros)
    own = {name: ours[name].to_local() for name in layout}
    index = lab.read_index(Path(folder, "ours"))
    with counting() as read:
        lab.fill(Path(folder, "ours"), index, own, layout)
    right = by_rows(group, full)
    found = [(theirs[n].to_local(), own.get(n), right[n].to_local()) for n in full]
    same = all(torch.equal(a, c) and (b is None or torch.equal(b, c)) for a, b, c in found)
    return sum(x.nbytes for x in own.values()), reader.numbers, read.total(), same


def plain_tensors(group, full, folder):
    """DCP with a rank's columns as plain tensors, as tp.py has them, saved and loaded in one
    layout: whether this rank gets back what it saved. Nothing says that they are shards."""
    own = {name: x.chunk(group.size(), 1)[group.rank()].clone() for name, x in full.items()}
    dcp.save(own, checkpoint_id=folder)
    back = {name: torch.zeros_like(x) for name, x in own.items()}
    dcp.load(back, checkpoint_id=folder)
    return all(torch.equal(back[name], own[name]) for name in own)
