"""Several ranks on one GPU, for the proofs: NCCL refuses that, so messages go through the host.

    torchrun --nproc_per_node=2 results/one_gpu.py tp.py [its options]

The ranks, their arithmetic on the GPU and what they send are real; times mean nothing.
"""

import os
import runpy
import sys
from functools import partial

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

SENDS = dist.send, dist.isend


class Message:
    """What isend or irecv began; wait() for its arrival also brings it to where it belongs."""

    def __init__(self, work, arrive):
        self.work, self.arrive = work, arrive

    def wait(self):
        self.work.wait()
        self.arrive()


def through_the_host(function):
    """A function of torch.distributed whose first argument is its result, on copies on the host."""

    def call(results, *args, **options):
        def arrive():
            for result, copy in zip(pytree.tree_leaves(results), pytree.tree_leaves(copies)):
                if function not in SENDS:
                    result.copy_(copy)

        copies, args = pytree.tree_map_only(torch.Tensor, to_host, (results, args))
        work = function(copies, *args, **options)
        return arrive() if work is None else Message(work, arrive)

    def to_host(tensor):
        return tensor.to("cpu", copy=True)

    return call


def main():
    join = dist.init_process_group
    dist.init_process_group = lambda backend, **options: join("gloo", **options)
    names = ["all_reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter_tensor"]
    names += ["all_gather_single", "reduce_scatter_single"]  # since torch 2.13
    names += ["all_to_all_single", "send", "recv", "isend", "irecv"]
    for name in filter(partial(hasattr, dist), names):
        setattr(dist, name, through_the_host(getattr(dist, name)))
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}  # each has the one GPU for its own
    sys.argv = sys.argv[1:]
    if not sys.argv or not os.path.exists(sys.argv[0]):
        if os.environ.get("RANK", "0") == "0":
            print("error: no script given: use results/one_gpu.py tp.py", file=sys.stderr)
        sys.exit(2)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
