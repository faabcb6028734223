"""Would a script hang on NCCL? The host calls of all ranks, recorded from the script itself without
GPUs or peers (PyTorch's fake process group), are put in order by NCCL's rules, of which gloo has
none: it buffers messages, waits on the host, and connects all ranks beforehand.

1. A communicator is made when it is first used, for which all its ranks have to come: "a blocking
   operation on the cpu" (PyTorch's issue 136248). A single send or receive has one for its two
   ranks: "Regular P2P Ops, creates (or use existing) dedicated 2-rank communicators" (pull request
   160342). Not so in eager mode, with init_process_group's device_id: "all p2p communication would
   use the same collective communicator" (154132; it began with RFC 129140 and 132900).
2. A communicator's operations run in the order of issue, each after what the current stream had
   been given before: "any p2p operations that are issued on that PG would be serialized" (154132).
3. A send has no buffer: it "needs two NCCL calls: a call to ncclSend() on one rank and a
   corresponding ncclRecv() on the other rank, with the same count and data type" (NCCL's user
   guide, Point-to-point communication), and each "is blocking for the GPU" (its API). Nor does a
   collective end before all of the communicator's ranks have come to it, with the same size.
4. work.wait() does not block the host: it is "letting the current stream block on the completion of
   the NCCL work" (torch.distributed.Work.wait). The host waits in .item() and the like, for the
   current stream, and in torch.cuda.synchronize(), for all streams.

Left out: that kernels of several communicators need room on a GPU at the same time, and whatever
takes time. grad_norm's sum counts as NCCL's, though gloo does it: its .item() follows at once. A
collective's wait stands where it is issued, though fully_shard waits later.
"""

import contextlib
import io
import json
import os
import sys
from collections import Counter, defaultdict
from functools import partial
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from forks import ROOT, compiled
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Of operations whose result the host needs: .item(), equal, nonzero
READ_BY_HOST = torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape


class Call(NamedTuple):
    """A host's call: send, recv, wait; a collective, by PyTorch's name; item and sync, which wait
    for the current stream and for all; meet: the hosts of all ranks wait for each other."""

    what: str
    group: tuple = ()  # name, ranks
    ends: tuple = ()  # of a message: its sender, its receiver
    note: object = ""  # bytes, if they are the same on all ranks; what a meeting is for
    begun: int = -1  # of a wait: the number of the call that it waits for


class Recorder(TorchDispatchMode):
    """Adds a rank's calls to a list."""

    def __init__(self, calls):
        super().__init__()
        self.calls = calls

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(hasattr(kind, "full_tensor") for kind in types):
            return NotImplemented  # DTensor's own code runs; what it does to tensors comes here
        out = func(*args, **(kwargs or {}))
        if "empty" in func._opname:
            out.zero_()  # silent peers send nothing: not what memory happens to hold
        if "c10d" in func.namespace:
            names = [argument.name for argument in func._schema.arguments]
            self.note(func._opname.strip("_"), dict(zip(names, args)), tree_leaves((args, out)))
        elif any(tag in func.tags for tag in READ_BY_HOST):
            self.calls.append(Call("item"))
        return out

    def note(self, what, given, tensors):
        group = given.get("process_group", given.get("group_name"))
        if isinstance(group, str):
            group = c10d._resolve_process_group(group)
        elif isinstance(group, torch.ScriptObject):
            group = dist.ProcessGroup.unbox(group)
        if group is None or group.size() == 1:  # wait_tensor has none
            return
        ranks = tuple(dist.get_process_group_ranks(group))
        ends = {"send": (dist.get_rank(), ranks[given.get("dst", 0)])}
        ends["recv"] = ranks[given.get("src", 0)], dist.get_rank()
        size = max(x.nbytes for x in tensors if isinstance(x, torch.Tensor))
        size = "" if what.startswith("alltoall") else f"{size} bytes"
        self.calls.append(Call(what, (group.group_name, ranks), ends.get(what, ()), size))


def record(script, source, argv, rank, world):
    """The calls of one rank in SCRIPT ARGV, and what it prints."""
    calls, module, output = [], ModuleType("recorded"), io.StringIO()
    module.__file__ = str(ROOT / script)
    isend, irecv, new_group, cpu = dist.isend, dist.irecv, dist.new_group, torch.Tensor.cpu
    stream = SimpleNamespace(synchronize=lambda: note("item"))

    def note(what, result=None, **more):
        calls.append(Call(what, **more))
        return result

    def begin(message, *how):
        message(*how)  # Recorder notes it
        return SimpleNamespace(wait=partial(note, "wait", begun=len(calls) - 1))

    def group_of(ranks, *how, **more):  # in eager mode all ranks make it together
        return note("meet", new_group(ranks, *how, **more), note=f"new group {ranks}")

    def init(backend, store, **how):
        c10d.init_process_group("fake", store=dist.HashStore(), **how)

    messages = {"isend": partial(begin, isend), "irecv": partial(begin, irecv)}
    messages |= {"send": lambda *how: begin(isend, *how).wait()}
    messages |= {"recv": lambda *how: begin(irecv, *how).wait()}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world)}
    with (
        mock.patch.multiple(dist, init_process_group=init, new_group=group_of, **messages),
        mock.patch.object(c10d, "new_group", group_of),  # of new_subgroups
        mock.patch.object(torch.Tensor, "cpu", lambda x: note("item", cpu(x))),
        mock.patch.object(torch.cpu, "synchronize", lambda *_: note("sync")),
        mock.patch.object(torch.cuda, "synchronize", lambda *_: note("sync")),
        mock.patch.object(torch.cuda, "current_stream", lambda: stream),
        contextlib.redirect_stdout(output),
    ):
        exec(compiled(script, source), vars(module))
        whose = getattr(
            module, "pp", module
        )  # labs/schedules.py runs pp.py, with pipelines of its own
        whose.gather_objects = lambda value, group: note("meet", [value] * world)  # over gloo
        with Recorder(calls), mock.patch.object(sys, "argv", [script, *argv, "--backend", "gloo"]):
            assert module.main() != 2
    return calls, output.getvalue()


def hang(programs, eager=False, syncing=False):
    """Why ranks with these lists of calls hang: lines, the cycle of what waits for each other, or
    what ranks miss each other in; [] if they do not. syncing: an .item() before every call."""
    after = defaultdict(list)  # {event: the events that it has to wait for}
    members = {}  # {event of several ranks: these}
    came = defaultdict(dict)  # {the same: {rank: what for}}

    def join(event, ranks, rank, what, *before):
        members[event] = set(ranks)
        came[event][rank] = what
        after[event] += before

    for rank, calls in enumerate(programs):
        host = stream = "the begin"  # the last events of the host and of the current stream,
        last, begun, count = {}, {}, Counter()  # and of each communicator; operations by number
        for number, call in enumerate(calls):
            before = host
            host = f"call {number} of rank {rank}'s host, {call.what}{call.ends or ''}"
            after[host].append(before)
            if syncing or call.what in ("item", "sync"):
                after[host].append(stream)
            if call.what == "sync":
                after[host] += last.values()
            if call.what == "meet":
                count["meet"] += 1
                meeting = f"meeting {count['meet']} of all hosts"
                join(meeting, range(len(programs)), rank, call.note, before)
                after[host].append(meeting)
            if call.group:
                where = call.group
                if call.ends and not eager:
                    where = call.group[0], tuple(sorted(call.ends))
                if not eager and where not in last:  # rule 1
                    making = f"the making of communicator {where}"
                    join(making, where[1], rank, "", before)
                    after[host].append(making)
                name, what = "collective", f"{call.what} of {call.note}"
                if call.ends:
                    name, what = "message from rank {} to {}".format(*call.ends), call.note
                count[where, name] += 1
                begun[number] = f"{name}, number {count[where, name]} in communicator {where}"
                previous = last.get(where, host)  # rules 2 and 3
                join(begun[number], call.ends or where[1], rank, what, host, stream, previous)
                last[where] = begun[number]
            if call.what == "wait" or (call.group and not call.ends):  # rule 4
                waited = begun[number if call.group else call.begun]
                stream, previous = f"rank {rank}'s stream, waiting in call {number}", stream
                after[stream] += [previous, waited]
    for event, what in came.items():
        if set(what) != members[event] or len(set(what.values())) > 1:
            return [f"{event}: {sorted(members[event])} have to come, there come {what}"]
    try:
        TopologicalSorter(after).prepare()
    except CycleError as problem:
        return problem.args[1]
    return []


def report(script, source, argv, world, file):
    """Into a file, from a process of its own: hang() of all ranks, with communicators made lazily
    and eagerly, and with an .item() before every call; the calls and the output of rank 0."""
    recorded = [record(script, source, argv, rank, world) for rank in range(world)]
    programs = [calls for calls, _ in recorded]
    found = {"lazy": hang(programs), "eager": hang(programs, eager=True)}
    found |= {f"{how}, items": hang(programs, how == "eager", syncing=True) for how in found}
    found |= {"calls": programs[0], "output": recorded[0][1]}
    Path(file).write_text(json.dumps(found))
