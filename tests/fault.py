"""Runs a script with a fault in one rank, so that tests can see what becomes of the job.

    torchrun --nproc_per_node=2 tests/fault.py KIND WHERE RANK SCRIPT.py [its options]

KIND: kill (SIGKILL), stop (SIGSTOP), raise (an exception), hang (never returns). WHERE: start (as
the ranks join), forward and backward (of an MLP in the middle of the model), collective (instead of
sending).
"""

import os
import runpy
import signal
import sys
import time

import torch.distributed as dist
from transformers.models.llama import modeling_llama

KIND, WHERE, RANK, SCRIPT = sys.argv[1:5]
CALLS = 12  # of the tiny model's 8 layers


def fault(*_):
    print(f"fault at {time.time()}", file=sys.stderr, flush=True)
    if KIND == "raise":
        raise ValueError("a fault of this test")
    if KIND in ("kill", "stop"):
        os.kill(os.getpid(), signal.SIGKILL if KIND == "kill" else signal.SIGSTOP)
    while True:
        time.sleep(1)


def at_call(number, function, then):
    """function, but for its call of that number, where then() comes first."""
    calls = []

    def counted(*args, **kwargs):
        calls.append(1)
        if len(calls) == number:
            then()
        return function(*args, **kwargs)

    return counted


def in_backward(forward):
    def counted(*args, **kwargs):
        out = forward(*args, **kwargs)
        if out.requires_grad:
            out.register_hook(hook)
        return out

    hook = at_call(CALLS, lambda grad: grad, fault)
    return counted


if os.environ["RANK"] == RANK:
    MLP = modeling_llama.LlamaMLP
    if WHERE == "start":
        dist.init_process_group = at_call(1, dist.init_process_group, fault)
    elif WHERE == "forward":
        MLP.forward = at_call(CALLS, MLP.forward, fault)
    elif WHERE == "backward":
        MLP.forward = in_backward(MLP.forward)
    else:
        for name in ("all_reduce", "all_to_all_single", "isend"):
            setattr(dist, name, at_call(3, getattr(dist, name), fault))
sys.argv = sys.argv[4:]
runpy.run_path(SCRIPT, run_name="__main__")
