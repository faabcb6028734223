"""Lab 18's exercises: their cases. In float64, so that only a mistake is off by more than 1e-10.

What is right comes from the finished lab and, of gradients and losses, from one device. That the
finished lab's orders are PyTorch's, tests/test_lab18_run.py tests.
"""

import importlib
import itertools
import random
import weakref
from functools import partial
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import AutoConfig, AutoModelForCausalLM

from labs.kit.alive import Alive
from labs.kit.eye import Most
from labs.kit.harness import Traffic
from labs.kit.judge import checks
from labs.kit.tools import subgroup
from labs.lab18_schedules import lesson as finished

Action, SUBGROUP = finished.Action, True  # the group is not the world
SIZES = [(1, 1), (1, 3), (2, 1), (2, 3), (2, 4), (3, 2), (3, 6), (4, 8), (5, 3)]  # P, M
SHAPE = {"vocab_size": 31, "hidden_size": 16, "intermediate_size": 12, "num_hidden_layers": 6}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": None}
LAYERS = ["full_attention", "sliding_attention"]
QWEN3 = {"layer_types": LAYERS * 3, "sliding_window": 2}
QWEN3 |= {"use_sliding_window": True, "head_dim": 4}


def listed(actions, P=None):
    """Actions as a text: F0 B0, or with their stage, F0.1 B0.1."""
    return " ".join(f"{a.kind}{a.microbatch}" + f".{a.stage}" * (P is not None) for a in actions)


def tiny(family, tied, dtype=torch.float64, **sizes):
    """A model with random weights, the same on every rank, with biases."""
    shape = SHAPE | (QWEN3 if family == "qwen3" else {}) | sizes
    config = AutoConfig.for_model(family, **shape, tie_word_embeddings=tied, attention_bias=True)
    torch.manual_seed(0)
    with torch.device("cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).train()
    for parameter in model.parameters():  # so that no norm is 1 and no bias 0
        parameter.data += 0.2 * torch.randn(parameter.shape, dtype=dtype)
    return model


def batch(seed, M, length=5, more=None):
    """ids and targets (b, s), b = M + more; the microbatches have unequally many targets."""
    numbers = torch.Generator().manual_seed(seed + M)
    shape = M + (M // 2 + 1 if more is None else more), length
    ids, targets = (torch.randint(31, shape, generator=numbers) for _ in range(2))
    targets[::3, length // 2 :] = finished.IGNORE
    targets[:, -1] = finished.IGNORE
    return ids, targets


def in_float64(model):
    """A context in which HF's norms, float32 else, compute in float64: for the proof only."""
    family = model.config.model_type
    modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    wide = SimpleNamespace(**vars(torch) | {"float32": torch.float64})
    return mock.patch.object(modeling, "torch", wide)


def one_device(model, ids, targets):
    """(loss, {name: gradient}) of HF's untouched model."""
    with in_float64(model):
        logits = model(input_ids=ids, use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def dependencies(group, seed):
    def see(count, lab, eye):
        for action in itertools.product("FBW", range(count), [0, 3]):
            kind, stage, m = action = Action(*action)
            found = [(a.kind, a.stage, a.microbatch) for a in lab.dependencies(action, count)]
            eye.note(f"what {kind}{m} of stage {stage} needs", sorted(found))

    for count in 1, 2, 4:
        yield f"{count} stages", partial(see, count)


def simulate(group, seed):
    lists = {
        f"{name}, {P} ranks, {M} microbatches": finished.all_schedules(name, P, M)
        for name in ("1f1b", "zbv", "zb", "afab")
        for P, M in ((2, 3), (3, 5))
    }
    late = finished.all_schedules("1f1b", 2, 3)
    late[1].append(late[1].pop(0))
    lists["rank 1 has F0 at its end: ranks wait for each other"] = late
    lists["rank 1 has no action"] = [[Action("F", 0, 0), Action("F", 0, 1)], []]

    def see(schedules, lab, eye):
        count = 1 + max(action.stage for actions in schedules for action in actions)
        times = {"equal": lambda a: 1, "unequal": lambda a: 2 + (seed + 3 * a.stage) % 5}
        for title, cost in times.items():
            given = [list(actions) for actions in schedules]
            rows = lab.simulate(given, count, cost)
            rows = sorted((r, *a, float(begin), float(end)) for r, a, begin, end in rows)
            eye.note(f"rows (rank, kind, stage, microbatch, begin, end), {title} times", rows)
            eye.note(f"{title} times: schedules is overwritten", given != schedules)

    for title, schedules in lists.items():
        yield title, partial(see, schedules)


def bubble_formula(group, seed):
    def see(V, kinds, lab, eye):
        for (P, M), (f, b, w) in itertools.product([*SIZES, (3, 5), (4, 7), (4, 6)], kinds):
            found = lab.bubble_formula(P, M, V, f, b, w)
            found = "None" if found is None else round(found, 9)
            eye.note(f"P {P}, M {M}, V {V}, F {f}, B {b}, W {w}", found)

    yield "no W", partial(see, 1, [(1, 2, 0.0), (1, 3, 0.0), (2, 1.5, 0)])
    yield "no W, two stages", partial(see, 2, [(1, 2, 0.0), (1, 3, 0.0)])
    yield "W, one stage", partial(see, 1, [(1, 1, 1), (2, 3, 1), (1, 2, 1.5), (2, 1, 1.5)])
    yield "in a V", partial(see, 2, [(1, 1, 1), (2, 2, 2), (1, 2, 1), (2, 2, 1)])


def see_schedule(name, sizes, lab, eye):
    for P, M, V in sizes:
        for rank in range(P):
            actions = getattr(lab, name)(rank, P, M, V)
            eye.note(f"{name} of rank {rank}, P {P}, M {M}, V {V}", listed(actions, P))


def one_f_one_b(group, seed):
    sizes = [(P, M, 1) for P, M in SIZES]

    def see(lab, eye):
        forwards, backwards = ([Action(kind, 0, m) for m in range(4)] for kind in "FB")
        changed = False
        for warmup in range(5):
            given = list(forwards), list(backwards)
            actions = lab.in_turn(*given, warmup)
            eye.note(f"in_turn of 4, warmup {warmup}", listed(actions))
            changed |= given != (forwards, backwards)
        eye.note("an argument is overwritten", changed)

    yield "afab", partial(see_schedule, "afab", sizes)
    yield "in_turn", see
    yield "1f1b", partial(see_schedule, "one_f_one_b", sizes)


def interleaved(group, seed):
    sizes = [(2, 2, 1), (2, 4, 1), (2, 4, 2), (3, 6, 2), (4, 4, 3), (4, 8, 3), (1, 3, 2)]
    yield "interleaved", partial(see_schedule, "interleaved", sizes)


def zero_bubble(group, seed):
    yield "zb", partial(see_schedule, "zero_bubble", [(P, M, 1) for P, M in SIZES])


def zero_bubble_v(group, seed):
    sizes = [(P, M, 2) for P, M in [*SIZES, (3, 4), (3, 5), (4, 6), (4, 7)]]
    for title, few in {"M of 2 P - 1 or more": False, "M below 2 P - 1": True}.items():
        chosen = [(P, M, V) for P, M, V in sizes if (M < 2 * P - 1) == few]
        yield title, partial(see_schedule, "zero_bubble_v", chosen)


def kept_bytes(group, seed):
    def see(name, recompute, stage, lab, eye):
        dtype = torch.float32 if name == "zb" else torch.bfloat16
        model = tiny("llama", False, dtype)
        alone = subgroup(group, ranks=[group.rank()])
        pipe = lab.Pipeline(model, name, 1, alone, recompute)
        decoder = lab.make_stage(model, stage, 3)
        name = "inputs_embeds" if stage else "input_ids"
        hidden = torch.randn(2, 7, 16, dtype=dtype).requires_grad_()
        x = hidden if stage else torch.randint(31, (2, 7))

        def run(x):
            return decoder(**{name: x}, use_cache=False).last_hidden_state

        found = lab.kept_bytes(pipe.model, run, x, Alive())
        eye.note("the keys", sorted(found))
        for kind, nbytes in found.items():
            eye.note(f"bytes of {kind}", nbytes)

    kinds = [("1f1b", False), ("zb", False), ("zb", True)]
    for (name, how), stage in itertools.product(kinds, (0, 1)):
        title = f"{name}, stage {stage}, {'layers recomputed' if how else 'nothing recomputed'}"
        yield title, partial(see, name, how, stage)


def peak_kept(group, seed):
    numbers = random.Random(seed)

    def see(schedules, kept, lab, eye):
        for rank, actions in enumerate(schedules):
            eye.note(f"the peak of rank {rank}", lab.peak_kept(list(actions), dict(kept)))

    for name, (P, M) in itertools.product(finished.SCHEDULES, [(2, 4), (3, 6)]):
        pairs = itertools.product("FB", range(P * finished.SCHEDULES[name][1]))
        kept = {(k, s): numbers.randint(1, 90) * (k == "F" or "zb" in name) for k, s in pairs}
        yield f"{name}, {P} ranks", partial(see, finished.all_schedules(name, P, M), kept)
    actions = [Action(*each) for each in (("F", 0, 0), ("B", 0, 0), ("F", 0, 1), ("F", 0, 2))]
    yield "F0 B0 F1 F2", partial(see, [actions], {("F", 0): 5, ("B", 0): 0})


def messages_of(schedules, rank):
    """A rank's messages in its order, as deadlock() takes them."""
    home = {a.stage: r for r, actions in enumerate(schedules) for a in actions}
    found = []
    for action in schedules[rank]:
        source = finished.producer(action, len(home))
        if source and home[source.stage] != rank:
            found.append(("receive", source))
        to = action.stage + {"F": 1, "B": -1, "W": 0}[action.kind]
        if home.get(to, rank) != rank:
            found.append(("send", action))
    return found


def deadlock(group, seed):
    a, b, c = (Action("F", 0, m) for m in range(3))
    d, e = Action("F", 1, 3), Action("B", 0, 0)
    sends, takes = (
        (lambda *each: [("send", x) for x in each]),
        (lambda *each: [("receive", x) for x in each]),
    )
    pairs = {
        "both send two first": (sends(a, c) + takes(b, d), sends(b, d) + takes(a, c)),
        "send a, receive b; send b, receive a": (sends(a) + takes(b), sends(b) + takes(a)),
        "both receive first": (takes(b) + sends(a), takes(a) + sends(b)),
        "one that is never sent": ([], takes(a)),
        "taken in another order": (sends(a, b), takes(b, a)),
        "two kinds, taken in another order": (sends(a, e), takes(e, a)),
        "one that is never received": (sends(a, b), takes(a)),
        "nothing": ([], []),
        "in order": (sends(a, b, c), takes(a, b, c)),
    }
    for name, M in itertools.product(("1f1b", "afab", "interleaved", "zb", "zbv"), (2, 4)):
        schedules = finished.all_schedules(name, 2, M)
        pairs[f"{name} of {M}"] = tuple(messages_of(schedules, rank) for rank in (0, 1))

    def see(first, second, lab, eye):
        changed = False
        for slots in 0, 1, 2, 9:
            given = list(first), list(second)
            found = lab.deadlock(*given, slots)
            eye.note(f"slots {slots}", "None" if found is None else str(tuple(found)))
            changed |= given != (first, second)
        eye.note("an argument is overwritten", changed)

    for title, pair in pairs.items():
        yield title, partial(see, *pair)


def deferred_linear(group, seed):
    def see(bias, lab, eye):
        numbers = torch.Generator().manual_seed(seed)
        draw = partial(torch.randn, generator=numbers, dtype=torch.float64)
        linear = nn.Linear(3, 4, bias).double()
        linear.weight.data = draw(4, 3)
        layer = lab.DeferredLinear(linear)
        for m in range(3):
            leaf = draw(2, 5, 3).requires_grad_()
            dy = draw(2, 5, 4)
            x = 2 * leaf
            layer(x).backward(dy)
            eye.note(f"dx of microbatch {m}", leaf.grad)
            eye.note(f"weight.grad is there after B {m}", layer.weight.grad is not None)
            if bias:
                eye.note(f"bias.grad is there after B {m}", layer.bias.grad is not None)
            there = [x for pair in layer.pending for x in pair]
            eye.note(f"pairs that wait after B {m}", len(layer.pending))
            eye.note(f"x that waits has a graph after B {m}", any(x.requires_grad for x in there))
            if m == 0:
                for name, tensor in zip(("x", "dy"), there):
                    eye.note(f"{name} in pending", tensor.flatten(0, -2))
                places = [each.untyped_storage().data_ptr() for each in (x, there[0])]
                eye.note("x in pending is a copy", places[0] != places[1])
        for m in range(3):
            layer.add_weight_gradient()
            eye.note(f"weight.grad after W {m}", layer.weight.grad)
            if bias:
                eye.note(f"bias.grad after W {m}", layer.bias.grad)
            eye.note(f"pairs that wait after W {m}", len(layer.pending))

    for bias in False, True:
        yield f"bias {bias}", partial(see, bias)


class Sending:
    """In the place of dist.isend: a copy is sent, and the tensor is watched until wait()."""

    def __init__(self, isend):
        self.isend, self.on_their_way, self.most, self.count = isend, {}, 0, 0
        self.changed = self.dropped = self.skips = self.newest_first = False

    def __call__(self, tensor, *args, **kwargs):
        copy, number = tensor.detach().clone(), self.count
        work = self.isend(copy, *args, **kwargs)
        tensor, storage = weakref.ref(tensor), StorageWeakRef(tensor.untyped_storage())
        self.newest_first |= self.skips
        self.dropped |= any(storage.expired() for _, storage in self.on_their_way.values())
        self.count += 1
        self.on_their_way[number] = work, storage
        self.most = max(self.most, len(self.on_their_way))

        def wait(*timeout):
            self.skips |= number > min(self.on_their_way, default=number)
            self.on_their_way.pop(number, None)
            self.changed |= tensor() is not None and not torch.equal(tensor(), copy)
            return work.wait(*timeout)

        return SimpleNamespace(wait=wait, is_completed=work.is_completed)


def watched(eye, call):
    """What call() returns; notes how it sends, then waits for what call() did not wait for."""
    sending = Sending(dist.isend)
    with mock.patch.object(dist, "isend", sending), Traffic() as traffic:
        result = call()
    eye.note("messages by isend", sending.count)
    eye.note("a message is changed before it is sent", sending.changed)
    eye.note("a message is dropped before it is sent", sending.dropped)
    eye.note("a newer message is waited for before the oldest", sending.newest_first)
    eye.note("messages that nobody waits for", len(sending.on_their_way))
    for work, _ in sending.on_their_way.values():  # else gloo drops them, and their receivers hang
        work.wait()
    eye.note("the most messages on their way", Most(sending.most))
    eye.note("bytes sent", traffic.bytes("send"))
    eye.note("other collectives", sorted(op for op in traffic.ops if op != "send"))
    return result


def loss(group, seed):
    def see(targets, lab, eye):
        numbers = torch.Generator().manual_seed(seed)
        logits = torch.randn(*targets.shape, 7, generator=numbers, dtype=torch.float64)
        logits.requires_grad_()
        given = [each.clone() for each in targets.tensor_split(3)]
        count = (targets != finished.IGNORE).sum()
        parts = zip(logits.tensor_split(3), given)
        shares = [lab.microbatch_loss(x, t, count) for x, t in parts]
        for m, share in enumerate(shares):
            eye.note(f"the share of microbatch {m}", share)
        sum(shares).backward()
        eye.note("the gradient of the logits", logits.grad)
        eye.note("targets is overwritten", not torch.equal(torch.cat(given), targets))

    def see_tied(ends, lab, eye):
        weight = nn.Parameter(torch.zeros(5, 3, dtype=torch.float64))
        grad = weight.grad = torch.full((5, 3), 1.0 + group.rank(), dtype=torch.float64)
        watched(eye, lambda: lab.sum_tied_gradient(weight, ends, group))
        eye.note("weight.grad", weight.grad)
        eye.note("weight.grad is a new tensor", weight.grad is not grad)

    _, targets = batch(seed, 3, 4)
    yield "uneven microbatches", partial(see, torch.where(targets < 0, targets, targets % 7))
    targets = targets.clamp(max=6)
    targets[:2] = finished.IGNORE
    yield "a microbatch without targets", partial(see, targets)
    last = group.size() - 1
    for title, ends in {"first and last rank": (0, last), "one rank": (0, 0)}.items():
        yield title, partial(see_tied, ends)
    yield "the last stage on rank 0", partial(see_tied, (last, 0))


def engine(group, seed):
    def see(family, tied, name, M, more, lab, eye):
        ids, targets = batch(seed, M, more=more)
        pipe = lab.Pipeline(tiny(family, tied), name, M, group)
        order, inputs, kept = [], [], []

        def noted(compute, action, received):
            order.append(action)
            kept.append(sum(not storage.expired() for storage in inputs))
            if received is not None:
                inputs.append(StorageWeakRef(received.untyped_storage()))
            return compute(action, received)

        for method in "forward", "backward", "add_weight_gradients":
            setattr(pipe, method, partial(noted, getattr(pipe, method)))
        with in_float64(pipe.model):
            found = watched(eye, lambda: pipe.train_step(ids, targets))
        eye.note("the order of actions", listed(order, 0))
        eye.note("what was received is kept to the end", kept[-1] > 4)
        eye.note("the loss", torch.as_tensor(found, dtype=torch.float64))
        for parameter, p in pipe.model.named_parameters():
            if p.grad is not None:
                eye.note(f"the gradient of {parameter}", p.grad)
        eye.note("microbatches still kept", len(pipe.saved))

    cases = [("llama", False, "1f1b", 3, 0), ("qwen3", True, "zbv", 3, 3)]  # equal sizes
    cases += [("llama", True, "zb", 7, None), ("qwen3", False, "afab", 8, None)]
    cases += [("llama", False, "interleaved", group.size(), None)]
    for family, tied, name, M, more in cases:
        title = f"{name}, {M} microbatches, {family}{', tied embeddings' * tied}"
        loss, grads = one_device(tiny(family, tied), *batch(seed, M, more=more))
        pipe = finished.Pipeline(tiny(family, tied), name, M, group)
        last = pipe.rank_of[pipe.stage_count - 1] == group.rank()
        right = {"the loss": loss if last else 0 * loss}
        for stage in pipe.stages:
            count, layers = pipe.stage_count, SHAPE["num_hidden_layers"]
            own = range(stage * layers // count, (stage + 1) * layers // count)
            for layer in (f".{number}." for number in own):
                right |= {f"the gradient of {n}": g for n, g in grads.items() if layer in n}
        yield title, partial(see, family, tied, name, M, more), right


ALONE = [dependencies, simulate, bubble_formula, one_f_one_b, interleaved, zero_bubble]
ALONE += [zero_bubble_v, kept_bytes, peak_kept, deadlock, deferred_linear]
EXERCISES = {cases.__name__: (cases, 1) for cases in ALONE}
EXERCISES |= {cases.__name__: (cases, 3, [[0, 1, 2], [0, 1]]) for cases in (loss, engine)}
CHECKS, BUGS = checks(EXERCISES, finished, 1e-10)
