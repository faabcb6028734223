"""Lab 15's programs as spmd_types sees them: its operations and moves on torch's own tensors."""

import importlib.util
import logging
import math
import warnings
from contextlib import contextmanager
from unittest.mock import patch

import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from labs.lab15_types.typed import CONSTANT, EACH, drawn, finished, split

INSTALLED = importlib.util.find_spec("spmd_types") is not None


@contextmanager
def fake_mesh(axes):
    """A mesh {axis: size} of the fake process group: this is rank 0, its peers are silent."""
    warnings.filterwarnings("ignore", r"`torch\.distributed\.", FutureWarning)  # of the package's
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)  # of refusals
    dist.init_process_group("fake", rank=0, world_size=math.prod(axes.values()))
    try:
        yield init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    finally:
        dist.destroy_process_group()


def of_package(spmd, type):
    """A type of the lab's, as the package writes it."""
    dim = finished.sharded_dim(type)
    return getattr(spmd, type) if dim is None else spmd.S(dim)


def functions(spmd, mesh):
    """{name: operation}, made of torch's and the package's."""

    def move(x, src, dst, axis="tp"):
        if src == dst:
            return x
        group = mesh.get_group(axis)
        here, there = of_package(spmd, src), of_package(spmd, dst)
        if op := finished.sent(src, dst):  # the package has the lab's names
            return getattr(spmd, op)(x, group, src=here, dst=there)
        return spmd.convert(x, group, src=here, dst=there, expert_mode=True)

    def reshape(x, shape):
        left = -x.numel() // math.prod(shape)
        shape = [left if n < 0 else n for n in shape]
        if len(shape) <= x.ndim:
            return x.reshape(shape)
        with spmd.no_typecheck():  # it does not split a dimension that is sharded: declared instead
            y = x.reshape(shape)
        spec = spmd.get_partition_spec(x)
        spec = None if spec is None else spmd.PartitionSpec(*spec, None)
        return spmd.assert_type(y, spmd.SpmdType(spmd.get_local_type(x), spec))

    return EACH | {"move": move, "reshape": reshape, "embedding": F.embedding}


def refused(mesh, lab, program, types, returns):
    """What spmd_types says against a program, or None; types and returns are {axis: type}."""
    import spmd_types as spmd
    import spmd_types.checker

    parts, sizes = {}, {axis: mesh[axis].size() for axis in returns}
    for name, full in drawn(types, 0).items():
        own = split(full, types[name], sizes)[0]
        parts[name] = own.clone().requires_grad_(name not in CONSTANT)
    with spmd.set_current_mesh(mesh), spmd_types.checker.typecheck(local=False):
        try:
            for name, x in parts.items():
                spmd.assert_type(x, written(spmd, mesh, types[name], x.ndim))
            with patch.dict(vars(lab), functions(spmd, mesh)):
                out = program(**parts)
            spmd.assert_type(out, written(spmd, mesh, returns, out.ndim))
        except (spmd.SpmdTypeError, ValueError, RuntimeError, IndexError) as problem:
            return str(problem).partition("\n")[0]
    return None


def written(spmd, mesh, types, ndim):
    """{axis: type} for assert_type(); where two axes cut one dimension it asks for their order."""
    own = {mesh.get_group(axis): of_package(spmd, type) for axis, type in types.items()}
    dims = [type.dim for type in own.values() if isinstance(type, spmd.Shard)]
    if len(dims) == len(set(dims)):
        return own
    spec = [tuple(g for g, type in own.items() if type == spmd.S(d)) or None for d in range(ndim)]
    letters = {g: spmd.V if isinstance(type, spmd.Shard) else type for g, type in own.items()}
    return spmd.SpmdType(letters, spmd.PartitionSpec(*spec))
