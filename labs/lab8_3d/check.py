"""Lab 8's exercises: their cases. mistakes.txt has the wrong answers.

What is right comes from the finished lab and, of norms, losses and a step, from one device.
"""

import copy
import itertools
import math
import random
import weakref
import zlib
from functools import cache, partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from labs.kit.blame import default_group_refused
from labs.kit.eye import Calls, Most
from labs.kit.harness import Traffic
from labs.kit.judge import checks
from labs.kit.tools import noted_waits
from labs.lab8_3d import mesh as proof
from labs.lab8_3d.mesh import AXES, IGNORE, SAME, finished, shard_range, tiny_config, tiny_model

CUBE = 2, 2, 2  # dp, pp, tp
TALL = 1, 2, 4  # more ranks in tp than KV heads: two hold the same
DEEP = 2, 4, 1  # stages that are neither first nor last


def say(shape):
    return " x ".join(map(str, shape))


@cache
def groups_of(shape):
    groups = finished.make_groups(dict(zip(AXES, shape)), tiny_config(shape[1]))
    if groups["embedding"] is None:  # torch names a group by how many a rank has: all get as many
        dist.new_group([dist.get_rank()], use_local_synchronization=True)
    return groups


@cache
def cut_model(shape, seed):
    """(this rank's part of the model, its groups); `shared` lists its groups in any order."""
    model, groups = tiny_model(shape[1], seed), groups_of(shape)
    finished.parallelize(model, groups)
    for p in model.parameters():
        random.Random(f"{seed} {sorted(p.shared)}").shuffle(p.shared)
    return model, groups


def drawn(shape, *key):
    """Random numbers that only the key decides: the same on every rank that asks for them."""
    numbers = torch.Generator().manual_seed(zlib.crc32(repr(key).encode()))
    return torch.randn(shape, generator=numbers)


def set_gradients(model, grads):
    for p, grad in zip(model.parameters(), grads):
        p.grad = grad.clone()
    return [p.grad for p in model.parameters()]


# ---- The mesh ------------------------------------------------------------------------------------


def see_mesh(sizes, lab, eye):
    for rank in range(math.prod(sizes.values())):
        eye.note(f"the coordinates of rank {rank}", lab.coordinates(rank, dict(sizes)))
        for axis in AXES:
            given = dict(sizes)
            ranks = list(lab.group_ranks(rank, axis, given))
            eye.note(f"the {axis} group of rank {rank}", ranks)
            eye.note(f"sizes, given with {axis} and rank {rank}, is overwritten", given != sizes)


def mesh(group, seed):
    numbers = torch.Generator().manual_seed(seed)
    shapes = [(2, 3, 4), *torch.randint(1, 6, (4, 3), generator=numbers).tolist()]
    for shape in (CUBE, TALL, DEEP, (1, 1, 1), *shapes):
        ranks, right = torch.arange(math.prod(shape)).view(*shape), {}
        for place in itertools.product(*map(range, shape)):
            rank = ranks[place].item()
            right[f"the coordinates of rank {rank}"] = dict(zip(AXES, place))
            for i, axis in enumerate(AXES):
                line = ranks.movedim(i, -1)[place[:i] + place[i + 1 :]]
                right[f"the {axis} group of rank {rank}"] = line.tolist()
        yield say(shape), partial(see_mesh, dict(zip(AXES, shape))), right


def copies_of(group, seed):
    def see(lab, eye):
        for name in names:
            eye.note(f"{name}:", sorted(lab.copies_of(name)))

    names = [*dict(tiny_model(1, seed).named_parameters()), *SAME]
    yield "all parameters of HF's LLaMA", see


# ---- Counts, losses, gradients -------------------------------------------------------------------


def see_losses(model, groups, rows, given, lab, eye):
    def losses(hidden, targets, count):
        parts = ((model, hidden[r], targets[r]) for r in rows)
        return [lab.microbatch_loss(*part, count, groups) for part in parts]

    names = ", ".join(f"loss {m}" for m in range(len(rows)))
    ones = [torch.ones(())] * len(rows)
    eye.call(losses, given, names, ones, {"lm_head.weight": model.lm_head.weight})


def loss_scale(group, seed):
    def count(lab, targets):
        found = lab.target_count(targets, groups)
        return "None" if found is None else float(found)

    def see_count(targets, lab, eye):
        eye.call(partial(count, lab), {"targets": targets}, "the count")

    for shape in (2, 1, 2), (4, 1, 1):
        model, groups = cut_model(shape, seed)
        dp, tp = groups["dp"], groups["tp"]
        lengths = torch.arange(5, 9)[:, None] * 250 + dp.rank()  # 6,504 targets and more
        many = torch.zeros(4, 2048, dtype=torch.int64).masked_fill(
            torch.arange(2048) >= lengths, IGNORE
        )
        total = dp.size() * 6500 + 4 * sum(range(dp.size()))
        yield f"{say(shape)}, many targets", partial(see_count, many), {"the count": float(total)}

        s, (_, targets) = 20, proof.random_batch(dict(zip(AXES, shape)), 2, seed)
        rows = finished.replica_rows(len(targets), groups)
        own = targets[rows, :s].clone()
        halves = [slice(*shard_range(len(own), m, 2)) for m in range(2)]
        if dp.rank():
            own[halves[1]] = IGNORE  # a microbatch without targets
        hidden = drawn((len(own), s, 32), "hidden", seed, dp.rank()).requires_grad_()
        weight = tiny_model(1, seed).lm_head.weight.detach()
        logits = F.linear(hidden, weight).movedim(-1, 1)
        each = F.cross_entropy(logits, own, ignore_index=IGNORE, reduction="none") / 95
        each.sum().backward()
        part = slice(*shard_range(s, tp.rank(), tp.size()))
        right = {f"loss {m}": each[half].sum() for m, half in enumerate(halves)}
        right["the gradient of hidden"] = hidden.grad[:, part]
        given = {"hidden": hidden.detach()[:, part].clone().requires_grad_(), "targets": own}
        given["count"] = torch.tensor(95)
        yield f"{say(shape)}", partial(see_losses, model, groups, halves, given), right


def see_finished(model, groups, grads, lab, eye):
    shared = {name: [*p.shared] for name, p in model.named_parameters()}
    set_gradients(model, grads)
    with default_group_refused():
        eye.call(partial(lab.finish_gradients, model, groups), {})
    for name, p in model.named_parameters():
        eye.note(f"the gradient of {name}", p.grad)
    same = all(p.shared == shared[name] for name, p in model.named_parameters())
    eye.note("a parameter's shared is overwritten", not same)


def finish_gradients(group, seed):
    for shape in CUBE, TALL, DEEP:
        model, groups = cut_model(shape, seed)
        model.to(torch.float64 if shape == TALL else torch.float32)
        places = enumerate(model.parameters())
        grads = [drawn(p.shape, seed, i, group.rank()).to(p.dtype) for i, p in places]
        yield say(shape), partial(see_finished, model, groups, grads)


def see_norm(model, groups, grads, lab, eye):
    mine = set_gradients(model, grads)
    with Traffic() as traffic, noted_waits() as waits, default_group_refused():
        norm = lab.grad_norm(model, groups)
    eye.note("the norm", norm.double() if isinstance(norm, torch.Tensor) else norm)
    calls, sent = map(sum, zip((0, 0), *traffic.ops.values()))
    eye.note("the norm: bytes that grad_norm() moves", Most(sent))
    eye.note_unwaited("messages that nobody waits for", traffic, waits)
    eye.note("messages", Calls(calls))
    eye.note("a gradient is overwritten", not all(map(torch.equal, mine, grads)))


def grad_norm(group, seed):
    for shape in CUBE, TALL, DEEP:
        model, groups = cut_model(shape, seed)
        whole = dict(tiny_model(shape[1], seed).named_parameters())
        full = {name: drawn(p.shape, seed, name) for name, p in whole.items()}
        parts = [
            proof.part_of(full[SAME.get(name, name)], p) for name, p in model.named_parameters()
        ]
        right = torch.cat([x.flatten() for x in full.values()]).double().norm()
        gather = 8 * groups["model"].size()  # bytes that will do, too
        right = {"the norm": right, "the norm: bytes that grad_norm() moves": gather}
        yield say(shape), partial(see_norm, model, groups, parts), right


def see_clipped(model, grads, norm, most, lab, eye):
    mine, weights = set_gradients(model, grads), [p.detach().clone() for p in model.parameters()]
    eye.call(partial(lab.clip_gradients, model), {"norm": norm, "most": most})
    eye.note("a weight is overwritten", not all(map(torch.equal, model.parameters(), weights)))
    for (name, p), grad in zip(model.named_parameters(), mine):
        eye.note(f"the gradient of {name}", p.grad)
        eye.note(f".grad of {name} is another tensor", p.grad is not grad)


def clip(group, seed):
    model = tiny_model(1, seed)
    everything = [*model.parameters(), nn.Parameter(torch.zeros(9000))]  # the last is elsewhere
    full = [drawn(p.shape, seed, i) for i, p in enumerate(everything)]
    norm = torch.cat([x.flatten() for x in full]).double().norm()
    for times in 0.01, 3, 0.5:  # below and above every tensor of it
        most = norm.item() * times
        for p, x in zip(everything, full):
            p.grad = x.clone()
        nn.utils.clip_grad_norm_(everything, most)
        right = {f"the gradient of {name}": p.grad for name, p in model.named_parameters()}
        yield f"at most {times} norms", partial(see_clipped, model, full, norm, most), right


# ---- The step ------------------------------------------------------------------------------------


def see_steps(model, groups, batch, limits, lab, eye):
    """A step with each limit of the norm: loss, norm, gradients, what is sent, what is alive."""
    cut = copy.deepcopy(model)
    lab.parallelize(cut, groups)
    ledger, outputs = proof.Ledger(lab, groups), []
    forward_all = lab.forward_all

    def noted(*args):
        held = forward_all(*args)
        outputs.extend(weakref.ref(out) for _, out in held)
        return held

    lab.forward_all = noted
    for most in limits:
        cut.zero_grad()
        ledger.rows.clear()
        given = [x.clone() for x in batch]
        with ledger:
            loss, norm = lab.train_step(cut, *given, groups, 2, most)
        at = f"at most {most:.3g}"
        eye.note(f"the loss, {at},", torch.as_tensor(loss).double())
        eye.note(f"the gradient norm, {at},", torch.as_tensor(norm).double())
        for name, p in cut.named_parameters():
            eye.note(f"the gradient of {name}, {at},", p.grad)
        for name in sorted({name for *_, name in ledger.rows}):
            rows = [row for (*_, where), row in ledger.rows.items() if where == name]
            calls, sent = map(sum, zip(*rows))
            eye.note(f"a step: bytes that {name} moves", Most(sent))
            eye.note(f"a step: messages in {name}", calls if name == "pp" else Calls(calls))
        alive = sum(out() is not None for out in outputs)
        eye.note("outputs that are alive after the step", Most(alive))
        eye.note("ids or targets is overwritten", not all(map(torch.equal, given, batch)))
    lab.forward_all = forward_all


@cache
def two_steps(seed):
    """The case of train_step, which takes seconds: it is made once."""
    sizes, model, groups = dict(zip(AXES, CUBE)), tiny_model(2, seed), groups_of(CUBE)
    ids, targets = proof.random_batch(sizes, 2, seed)
    pad, rows = -proof.LENGTH % sizes["tp"], finished.replica_rows(len(ids), groups)
    batch = F.pad(ids, (0, pad))[rows], F.pad(targets, (0, pad), value=IGNORE)[rows]
    cut = copy.deepcopy(model)
    finished.parallelize(cut, groups)
    limits, right = (proof.one_device_step(model, ids, targets, math.inf)[1] / 2, math.inf), {}
    for most in limits:
        loss, norm, grads = proof.one_device_step(model, ids, targets, most)
        at = f"at most {most:.3g}"
        found = {"loss": loss, "gradient norm": norm}.items()
        right |= {f"the {what}, {at},": torch.tensor(x, dtype=torch.float64) for what, x in found}
        for name, p in cut.named_parameters():
            part = proof.part_of(grads[SAME.get(name, name)], p)
            right[f"the gradient of {name}, {at},"] = part
    return say(CUBE), partial(see_steps, model, groups, batch, limits), right


def train_step(group, seed):
    yield two_steps(seed)


EXERCISES = {"mesh": (mesh, 1), "copies_of": (copies_of, 1), "loss_scale": (loss_scale, 4)}
EXERCISES |= {cases.__name__: (cases, 8) for cases in (finish_gradients, grad_norm)}
EXERCISES |= {"clip": (clip, 1), "train_step": (train_step, 8)}
CHECKS, BUGS = checks(EXERCISES, finished, proof.TOLERANCE)
