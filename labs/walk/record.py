"""Record a script's training step line by line, on every rank: for "Step through" and --where.

The script is loaded untouched, and its train_step() runs on P ranks of this machine, or on one.
sys.settrace sees each line of the lesson (sections 2 to 4) that has run, a TorchDispatchMode sees
the collectives, and hooks of the parameters see their gradients. Autograd runs on the calling
thread, since all is on the CPU: so its calls of our backward() are seen as well.
"""

import argparse
import ast
import multiprocessing.connection
import os
import signal
import sys
import time
import traceback
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from labs.bugs import BUGS, load

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT = 10  # seconds that a rank waits for another: a broken script may never send
OPS = {"allreduce": "all-reduce", "allgather": "all-gather"}  # from the names of torch's operators
OPS |= {"reducescatter": "reduce-scatter", "alltoall": "all-to-all"}
HF = os.path.join("transformers", "models", ""), os.path.join("integrations", "sdpa_attention")


class Setting(NamedTuple):
    """What is recorded."""

    model: tuple  # a row of the script's PRESETS
    batches: tuple  # the token ids (b, s) of each training step
    options: tuple = ()  # of the script's command line
    parallelize: bool = False  # whether parallelize() is recorded, too
    config: dict = {}  # attributes that PRESETS has none for
    loss_chunk: int = 2048  # the script's LOSS_CHUNK


class Unfilled(NamedTuple):
    """Memory that was allocated for a message, which has not come yet."""

    shape: tuple


class Call:
    """A call of a function of the lesson, or of a forward of Hugging Face's model."""

    def __init__(self, number, frame, parent, module, phase, is_hf):
        code = frame.f_code
        owner = frame.f_locals.get("self")
        self.number, self.first_line = number, code.co_firstlineno
        self.name = code.co_qualname.replace("<locals>.", "")
        if is_hf and owner is not None:
            self.name = f"{type(owner).__name__}.forward"
        self.parent = None if parent is None else parent.number
        self.line = None if parent is None else parent.running  # the line that calls
        self.module, self.phase, self.is_hf = module, phase, is_hf
        self.running = None  # the line that has begun, and has not ended
        self.note = ""


class Step:
    """What one line has done: its changes {variable: value}, and its messages.

    kind: "line"; "call": a function begins; "hf", "hf exit": a forward of Hugging Face's begins or
    returns; "gradient": autograd has the gradient of a parameter, whose name is in note.
    """

    def __init__(self, kind, call, line, changed, messages=(), note=""):
        self.kind, self.call, self.line, self.note = kind, call.number, line, note
        self.changed, self.messages, self.time = changed, list(messages), time.monotonic()


class Source:
    """The lesson of a script: its first and last line, and the statement that a line belongs to."""

    def __init__(self, path):
        text = path.read_text()
        self.lines = text.splitlines()
        ends = "# ---- 2", "# The lesson ends"
        self.first, self.last = (i for i, line in enumerate(self.lines, 1) if line.startswith(ends))
        self.statement, self.functions, self.attributes = {}, {}, {}
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.stmt):
                last = node.end_lineno
                if isinstance(getattr(node, "body", None), list):  # an if: its first line alone
                    last = max(node.lineno, node.body[0].lineno - 1)
                for line in range(node.lineno, last + 1):
                    self.statement.setdefault(line, node.lineno)
            if isinstance(node, ast.FunctionDef | ast.Lambda):
                decorators = [d.lineno for d in getattr(node, "decorator_list", [])]
                first = min([node.lineno, *decorators])
                self.functions[first] = node
                # What it names, such as self.weight or parameter.grad
                dotted = {ast.unparse(n) for n in ast.walk(node) if isinstance(n, ast.Attribute)}
                dotted = [d for d in dotted if all(part.isidentifier() for part in d.split("."))]
                self.attributes[first] = sorted(dotted)


def same(a, b):
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return np.array_equal(a, b)
    return type(a) is type(b) and a == b


class Recorder(TorchDispatchMode):
    """The calls and steps of one rank, sent to the parent process as they come: a broken script
    may end this one at any time."""

    def __init__(self, path, parent):
        super().__init__()
        self.source, self.path, self.parent = Source(path), str(path), parent
        self.stack, self.frames, self.last = [], {}, None
        self.held = {}  # of each call, as of its last step
        self.messages = []  # those of the line that runs
        self.modules, self.parameters = {}, {}  # names by id
        self.unfilled = {}  # by the memory's address, so that it is not given away meanwhile
        self.module_of = {}  # of a ctx: backward() has the same one as forward()
        self.sent = {}  # how many messages went to, or came from, a rank

    def watch(self, model):
        self.modules = {id(module): name for name, module in model.named_modules()}
        for name, parameter in model.named_parameters():
            self.parameters[id(parameter)] = name
            parameter.register_post_accumulate_grad_hook(partial(self.gradient, name))

    # ---- What a variable holds -------------------------------------------------------------------

    def value(self, x):
        """A tensor's numbers; a number, name or group as text; None for all else."""
        if isinstance(x, torch.Tensor):
            if x.untyped_storage().data_ptr() in self.unfilled:
                return Unfilled(tuple(x.shape))
            with _disable_current_modes(), torch.no_grad():
                return x.detach().numpy().copy()
        if isinstance(x, dist.ProcessGroup):
            return f"ranks {dist.get_process_group_ranks(x)}"
        if isinstance(x, int | str | torch.dtype) or x is None:  # a float would differ by rounding
            return str(x)
        return str(x) + f" of stage {x.stage}" if type(x).__name__ == "Action" else None

    def values(self, name, x):
        """{name: value} of a variable, or of what a list or dict holds."""
        found = {}
        if isinstance(x, tuple | list) and not hasattr(x, "_fields"):
            if x and all(isinstance(i, int | str) for i in x):
                return {name: str(tuple(x))}
            for i, item in enumerate(x[:4]):
                if isinstance(item, torch.Tensor):
                    found[f"{name}[{i}]"] = self.value(item)
        elif isinstance(x, dict):
            for key, item in x.items():
                if isinstance(item, torch.Tensor) and isinstance(key, str):
                    found[f'{name}["{key}"]'] = self.value(item)
        elif (value := self.value(x)) is not None:
            found[name] = value
            if id(x) in self.parameters and "." not in name:
                found[f"name of {name}"] = self.parameters[id(x)]
        return found

    def variables(self, call, frame):
        """What a function's own variables hold, and the attributes that it names."""
        found = {}
        for name, x in frame.f_locals.items():
            if name not in ("_", "group", "ctx"):
                found |= self.values(name, x)
        for dotted in self.source.attributes.get(call.first_line, []):
            base, *rest = dotted.split(".")
            x = frame.f_locals.get(base)
            if base == "ctx" or rest == ["T"]:  # ctx.saved_tensors would recompute
                continue
            for attribute in rest:
                is_plain = isinstance(x, nn.Module | nn.Parameter | argparse.Namespace)
                is_plain = is_plain or type(x).__module__ == Path(self.path).stem
                x = getattr(x, attribute, KeyError) if is_plain else KeyError
            if rest[-1:] == ["saved"] and isinstance(x, dict):  # pp.py: from F to B
                found[dotted] = f"of microbatches {[m for _, m in x]}"
            elif x is not KeyError:
                found |= self.values(dotted, x)
        return found

    def step(self, call, kind, line, now, note=""):
        old, self.held[call.number] = self.held.get(call.number, {}), now
        changed = {n: v for n, v in now.items() if n not in old or not same(old[n], v)}
        for message in self.messages:  # gloo's operator returns before the data are there
            message["got"] = self.value(message["got"])
        self.add(Step(kind, call, line, changed, self.messages, note))
        self.messages = []

    def add(self, step):
        if self.last is not None:
            self.parent.send(self.last)
        self.last = step  # what a forward of Hugging Face's returns may be added

    # ---- What Python calls for each call, line and return ----------------------------------------

    def trace(self, frame, event, arg):
        code, owner = frame.f_code, frame.f_locals.get("self")
        is_ours = code.co_filename == self.path
        is_ours = is_ours and self.source.first <= code.co_firstlineno < self.source.last
        is_hf = any(part in code.co_filename for part in HF) and (
            (code.co_name == "forward" and isinstance(owner, nn.Module))
            or code.co_name == "sdpa_attention_forward"
        )
        if not (is_ours or is_hf):
            return None
        frame.f_trace_lines = is_ours
        if frame not in self.frames:  # a generator comes back with its own frame
            call, now = self.enter(frame, is_hf), {}
            if is_hf:
                for name, x in frame.f_locals.items():
                    if isinstance(x, torch.Tensor):
                        now |= self.values(name, x)
            else:
                now = self.variables(call, frame)
            node = None if is_hf else self.source.functions.get(code.co_firstlineno)
            self.step(call, "hf" if is_hf else "call", node and node.lineno, now)
        self.stack.append(self.frames[frame])
        return partial(self.inside, self.frames[frame])

    def enter(self, frame, is_hf):
        """A new Call: where in the model it is, and whether in the forward or the backward."""
        parent = self.stack[-1] if self.stack else None
        above = {above.f_code.co_name for above, _ in traceback.walk_stack(frame)}
        phase = "forward"
        if "_engine_run_backward" in above:
            phase = "recomputed" if any("recompute_fn" in name for name in above) else "backward"
        owner, ctx = frame.f_locals.get("self"), frame.f_locals.get("ctx")
        inner = self.modules.get(id(frame.f_locals.get("norm")))  # g, a forward hook of a norm
        module = self.modules.get(id(owner)) or inner or (parent.module if parent else "")
        if ctx is not None and phase != "backward":
            self.module_of[id(ctx)] = module
        elif ctx is not None:
            module = self.module_of.get(id(ctx), module)
        call = self.frames[frame] = Call(len(self.frames), frame, parent, module, phase, is_hf)
        self.parent.send(call)
        return call

    def inside(self, call, frame, event, arg):
        line = self.source.statement.get(frame.f_lineno, frame.f_lineno)
        if event == "line":
            if call.running not in (None, line):  # it has run, now that the next one begins
                self.step(call, "line", call.running, self.variables(call, frame))
            call.running = line
        elif event == "exception" and "StopRecomputation" in arg[0].__name__:
            call.note = "the recomputation ends here: autograd has all that it needs"
        elif event == "return":
            self.leave(call, frame, arg)
        return partial(self.inside, call)

    def leave(self, call, frame, arg):
        if hasattr(arg, "last_hidden_state"):
            arg = arg.last_hidden_state
        if isinstance(arg, tuple) and sum(x is not None for x in arg) == 1:  # dx, None, None
            arg = next(x for x in arg if x is not None)
        returned = {} if arg is None else self.values("returns", arg)
        if call.is_hf and isinstance(arg, torch.Tensor) and arg.requires_grad:
            arg.register_hook(lambda grad: self.parent.send(self.value(grad)))
        if call.is_hf and self.last.kind == "hf" and self.last.call == call.number:
            self.last.changed |= returned  # nothing of ours in it
        elif call.is_hf:
            self.step(call, "hf exit", None, self.held[call.number] | returned, call.note)
        else:
            now = self.variables(call, frame) | returned
            self.step(call, "line", call.running, now, call.note)
        call.running = None
        self.stack.pop()

    # ---- What PyTorch tells ----------------------------------------------------------------------

    def gradient(self, name, parameter):
        call = self.stack[-1]
        changed = {f"{name}.grad": self.value(parameter.grad)}
        self.add(Step("gradient", call, call.running, changed, note=name))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        inputs = [x for x in tree_leaves(args) if isinstance(x, torch.Tensor)]
        name = func._opname.replace("_", "")
        is_message = "c10d" in func.namespace
        op = next((op for part, op in OPS.items() if is_message and part in name), None)
        # Of (out, in); an all-reduce has one, and is in place
        sent = self.value(inputs[0 if op == "all-reduce" else -1]) if op else None
        out = func(*args, **(kwargs or {}))
        outputs = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        if func._opname in ("empty", "new_empty"):
            self.unfilled[outputs[0].untyped_storage().data_ptr()] = outputs[0]
        elif op or (func._schema.is_mutable and not is_message):
            for x in inputs + outputs:
                self.unfilled.pop(x.untyped_storage().data_ptr(), None)
        if op:
            # The full tensor: of all_to_all(out, in) the rank's own, else the larger of both
            full = inputs[-1:] if op == "all-to-all" else inputs
            size, counts = max(x.nbytes for x in full), [a for a in args if isinstance(a, list)]
            counts = [a for a in counts if a and isinstance(a[0], int)]
            message = {"op": op, "bytes": size, "sent": sent, "got": inputs[0]}
            self.messages.append(message | {"counts": counts[-1] if counts else None})
        return out

    def point_to_point(self, op, real, tensor, peer, group):
        """In the place of dist.isend and dist.irecv; a receive is seen when it has been awaited."""
        number = self.sent[op, peer] = self.sent.get((op, peer), -1) + 1
        message = {"op": op, "bytes": tensor.nbytes, "peer": peer, "number": number}
        work = real(tensor, peer, group)
        if op == "send":
            self.messages.append(message | {"sent": self.value(tensor), "got": tensor})

        def wait():
            work.wait()
            if op == "receive":
                self.unfilled.pop(tensor.untyped_storage().data_ptr(), None)
                self.messages.append(message | {"sent": self.value(tensor), "got": tensor})

        return SimpleNamespace(wait=wait)

    def failure(self, problem):
        """(time, function, line, what it says) of an exception: where the lesson raised it."""
        text = f"{type(problem).__name__}: {problem}".partition("\n")[0]
        for frame in reversed(traceback.extract_tb(problem.__traceback__)):
            if frame.filename == self.path:
                return time.monotonic(), frame.name, frame.lineno, text
        return time.monotonic(), "the file", getattr(problem, "lineno", 1), text  # SyntaxError


def draw_constants(model):
    """Random norm weights and biases: tensors of ones, or zeros, would fit every description."""
    numbers = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "norm" in name or "bias" in name:
            random = torch.rand(parameter.shape, generator=numbers, dtype=parameter.dtype)
            parameter.data = 0.5 + random


def record_rank(path, world, rank, port, setting, bug, parent):
    """Run the setting's steps as one rank, and send the parent calls, steps and an End."""
    signal.alarm(4 * TIMEOUT)  # nothing hangs, whatever the script does
    names = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world}
    names |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    names |= {"TORCHELASTIC_USE_AGENT_STORE": True}  # the parent has the store
    os.environ.update({name: str(value) for name, value in names.items()})
    torch.set_num_threads(1)
    recorder, error, notes, expected = Recorder(path, parent), None, {}, []
    try:
        script = load(path)
        if bug:
            BUGS[script.STRATEGY][bug](script)
        script.PRESETS["walk"], script.LOSS_CHUNK = setting.model, setting.loss_chunk
        batches = [torch.tensor(ids) for ids in setting.batches]
        size = "--batch", str(len(batches[0])), "--length", str(batches[0].shape[1])
        options = "--model", "walk", "--dtype", "float64", "--timeout", str(TIMEOUT)
        args = script.parse([*options, *size, *setting.options])
        group = script.start(args)
        args.config.update(setting.config)
        send = partial(recorder.point_to_point, "send", dist.isend)
        receive = partial(recorder.point_to_point, "receive", dist.irecv)
        with (
            script.upcasts_in_float64(args),
            mock.patch.object(dist, "isend", send),
            mock.patch.object(dist, "irecv", receive),
            recorder,
        ):
            with _disable_current_modes():
                model = script.load_model(args)
                draw_constants(model)
            sys.settrace(recorder.trace if setting.parallelize else None)
            model = script.parallelize(model, group, args)
            sys.settrace(None)
            recorder.watch(model)
            expected = script.expected_traffic(model, group, args)
            for name, p in model.named_parameters():
                is_summed = p.sum_over is not None
                notes[name] = getattr(p, "shard", None), p.replicas, is_summed
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
            for ids in batches:
                sys.settrace(recorder.trace)
                script.train_step(model, optimizer, ids, ids, group, args)
                sys.settrace(None)
                for parameter in model.parameters():
                    parent.send(recorder.value(parameter))
    except (Exception, SystemExit) as problem:
        sys.settrace(None)
        error = recorder.failure(problem)
    recorder.add(End(error, notes, expected))
    recorder.add(None)
    with suppress(Exception):
        dist.destroy_process_group()


class End(NamedTuple):
    """What is known after a rank's last step."""

    error: tuple | None  # (time, function, line, what it says)
    notes: dict  # {parameter: (shard, replicas, whether its gradient is summed)}
    expected: list  # rows of expected_traffic()


class Recording:
    """What one rank did: calls, steps, and what End has."""

    def __init__(self, parts):
        self.calls = [part for part in parts if isinstance(part, Call)]
        self.steps = [part for part in parts if isinstance(part, Step)]
        # Gradients inside of Hugging Face's code, and the new weights
        self.others = [part for part in parts if isinstance(part, np.ndarray)]
        error = 0.0, "the file", 1, "the process ended"  # if it was killed, there is no End
        if self.steps:
            last = self.steps[-1]
            error = last.time, self.calls[last.call].name, last.line, "the process ended here"
        ends = [part for part in parts if isinstance(part, End)]
        self.error, self.notes, self.expected = ends[0] if ends else (error, {}, [])


def record(path, world, setting, bug=None):
    """A Recording of each of `world` ranks. bug: a name of bugs.BUGS, planted before."""
    # Held here, as torchrun does: a port that was only looked up could be taken by another process
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("forkserver")  # its processes have torch already
    context.set_forkserver_preload(["torch", "transformers.models.llama.modeling_llama"])
    ranks, parts = [], {}
    for rank in range(world):
        reader, writer = context.Pipe(duplex=False)
        job = Path(path).resolve(), world, rank, store.port, setting, bug, writer
        ranks.append(context.Process(target=record_rank, args=job))
        ranks[-1].start()
        writer.close()  # so that the pipe ends with the rank
        parts[reader] = []
    running = list(parts)
    while running:
        for reader in multiprocessing.connection.wait(running):
            try:
                parts[reader].append(reader.recv())
            except EOFError:
                running.remove(reader)
    for process in ranks:
        process.join()
    return [Recording(of) for of in parts.values()]
