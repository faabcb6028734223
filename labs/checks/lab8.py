"""Lab 8's checks, each of which runs on every rank, and the bugs that they have to catch.

prove() runs a tiny LLaMA on a mesh beside one device's; the other checks take one function each.
"""

import copy
import itertools
import math
import os
import zlib
from contextlib import nullcontext
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import LABS, Traffic, expect, expect_close, load
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.llama import modeling_llama

finished = load(LABS / "lab8_3d.py")  # not the learner's
AXES, IGNORE, split = finished.AXES, finished.IGNORE, finished.split
all_reduce = finished.all_reduce

# --------------------------------------------------------------------------------------------------
# The proof: two steps beside one device's
# --------------------------------------------------------------------------------------------------

LENGTH = 21  # tokens a sequence: no T but 3 and 7 divides it
SAME = {"lm_head.weight": "model.embed_tokens.weight"}  # tied: one device has it under this name
TOLERANCE = 1e-5


def tiny_config(stages):
    """A LLaMA whose sizes little divides: tied embeddings, 2 KV heads, at least a layer a stage."""
    sizes = {"vocab_size": 131, "hidden_size": 32, "intermediate_size": 76, "head_dim": 4}
    sizes |= {"num_hidden_layers": max(5, stages), "initializer_range": 0.1}
    sizes |= {"num_attention_heads": 8, "num_key_value_heads": 2, "tie_word_embeddings": True}
    return modeling_llama.LlamaConfig(**sizes, attn_implementation="sdpa")


def tiny_model(stages, seed):
    """That LLaMA on one device, with random weights: the same on every rank."""
    torch.manual_seed(seed)
    return modeling_llama.LlamaForCausalLM(tiny_config(stages))


def random_batch(sizes, microbatches, seed):
    """ids and targets (B, s) of all replicas: each sequence's first so many targets, then IGNORE.

    So no two replicas or microbatches have as many, and a mean of means is not the mean.
    """
    numbers = torch.Generator().manual_seed(seed)
    sequences = 2 * sizes["dp"] * microbatches + 1
    ids = torch.randint(131, (sequences, LENGTH + 1), generator=numbers)
    lengths = torch.randint(1, LENGTH + 1, (sequences, 1), generator=numbers)
    return ids[:, :-1], ids[:, 1:].masked_fill(torch.arange(LENGTH) >= lengths, IGNORE)


def one_device_step(model, ids, targets, most):
    """(loss, gradient norm, {name: gradient}) of HF's model as it is, clipped by torch."""
    model.zero_grad()
    loss = F.cross_entropy(model(ids).logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), most)
    return loss.item(), norm.item(), {name: p.grad.clone() for name, p in model.named_parameters()}


def part_of(full, parameter):
    """The slice of one device's tensor that this rank has a shard of; of a norm, all of it."""
    dim, start, end = getattr(parameter, "shard", (0, 0, len(full)))
    return full.narrow(dim, start, end - start)


def relative(mine, right):
    """||mine - right|| / ||right||, of tensors or numbers; what is no number is far off."""
    mine, right = torch.as_tensor(mine).double(), torch.as_tensor(right).double()
    norm = torch.linalg.vector_norm
    return (norm(mine - right) / norm(right).clamp(min=1e-30)).nan_to_num(1e30, 1e30).item()


class Ledger(TorchDispatchMode):
    """Counts, as it happens, what a step sends: rows {(phase, op, group): [calls, bytes]}."""

    PHASES = {"target_count": "count", "forward_all": "forward", "backward_all": "backward"}
    PHASES |= {"finish_gradients": "gradients", "grad_norm": "norm", "mean_loss": "log"}

    def __init__(self, lab, groups):
        """Has the functions of the module lab that train_step calls say when they begin."""
        super().__init__()
        self.rows, self.phase = {}, "elsewhere"
        real = {name: group for name, group in groups.items() if group and group.size() > 1}
        self.names = {group.group_name: name for name, group in real.items()}
        for function, phase in self.PHASES.items():
            setattr(lab, function, partial(self.begin, phase, getattr(lab, function)))

    def begin(self, phase, function, *args):
        self.phase = phase
        return function(*args)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        with Traffic() if func.namespace == "c10d" else nullcontext() as traffic:
            out = func(*args, **(kwargs or {}))
        for op, (calls, sent) in (traffic.ops if traffic else {}).items():
            packed = next(arg for arg in args if isinstance(arg, torch.ScriptObject))  # the group
            group = self.names.get(dist.ProcessGroup.unbox(packed).group_name, "another")
            row = self.rows.setdefault((self.phase, op, group), [0, 0])
            row[0], row[1] = row[0] + calls, row[1] + sent
        return out


def expected_traffic(model, groups, rows, microbatches):
    """What a step must send, from this rank's place, as Ledger counts. rows: its sequences."""
    config, size = model.config, {name: group.size() for name, group in groups.items() if group}
    h, M, T = config.hidden_size, microbatches, size["tp"]
    first, last = groups["pp"].rank() == 0, groups["pp"].rank() == size["pp"] - 1
    layers = model.stage[1] - model.stage[0]
    tokens = rows * (LENGTH + -LENGTH % T)
    hidden = 4 * tokens * h  # one (b, s, h) in float32, all microbatches together
    # the head gathers what it reads, the embedding scatters what it looked up
    gathers, scatters = 2 * layers + last, 2 * layers + first
    table = {
        ("count", "all_reduce", "dp"): [1, 8],
        ("forward", "all_gather", "tp"): [M * gathers, gathers * hidden],
        ("forward", "reduce_scatter", "tp"): [M * scatters, scatters * hidden],
        ("forward", "all_reduce", "tp"): [2 * M * last, 3 * 4 * tokens * last],  # cross entropy
        ("forward", "send", "pp"): [M * (not last), hidden // T * (not last)],
        ("backward", "reduce_scatter", "tp"): [M * gathers, gathers * hidden],
        ("backward", "all_gather", "tp"): [M * scatters, scatters * hidden],
        ("backward", "send", "pp"): [M * (not first), hidden // T * (not first)],
        ("norm", "all_reduce", "model"): [1, 8],
        ("log", "all_reduce", "pp"): [1, 4],
        ("log", "all_reduce", "dp"): [1, 4],
    }
    for name in size:
        numbers = sum(p.numel() for p in model.parameters() if name in p.shared)
        table["gradients", "all_reduce", name] = [int(numbers > 0), 4 * numbers]
    return {key: row for key, row in table.items() if row[0] and size[key[2]] > 1}


def usual_norms(model, groups):
    """{how it is computed: the norm that this rank gets}; the right one first."""
    squares = [(p.shared, p.grad.double().square().sum()) for p in model.parameters()]

    def counted(*once):
        """The sum of squares; those that a group named here shares are divided by its size."""
        total = 0
        for shared, square in squares:
            total += square / math.prod(groups[name].size() for name in shared if name in once)
        return total

    once, model_group = counted("kv", "tp", "embedding"), groups["model"]
    squares_of = {
        "each number once, over pp x tp": all_reduce(once, model_group),
        "every replica counted": all_reduce(counted(), model_group),
        "tied table counted at both ends": all_reduce(counted("kv", "tp"), model_group),
        "over tp alone": all_reduce(once, groups["tp"]),
        "over pp alone": all_reduce(once, groups["pp"]),
        "over all ranks, dp too": all_reduce(all_reduce(once, model_group), groups["dp"]),
        "this rank's part (torch's own clip)": counted(),
    }
    return {text: square.sqrt() for text, square in squares_of.items()}


def prove(lab, sizes, microbatches, seed):
    """Two steps of lab's model on this rank of the mesh, one unclipped, one clipped.

    Returns {"errors": {"loss", "gradient norm", parameter: relative error to one device's, of the
    worse step}, "loss", "norm", "one_device": the same two, "traffic", "expected": {(phase, op,
    group): [calls, bytes]}, "groups": {name: ranks}, "norms": usual_norms(), "held": numbers, of
    replicas the share, "whole": the model's, "node"}.
    """
    model = tiny_model(sizes["pp"], seed)
    groups = lab.make_groups(sizes, model.config)
    cut = copy.deepcopy(model)
    lab.parallelize(cut, groups)
    ids, targets = random_batch(sizes, microbatches, seed)
    pad = -LENGTH % sizes["tp"]
    rows = lab.replica_rows(len(ids), groups)
    mine = F.pad(ids, (0, pad))[rows], F.pad(targets, (0, pad), value=IGNORE)[rows]
    errors, ledger = {}, Ledger(lab, groups)
    norm = one_device_step(model, ids, targets, math.inf)[1]
    for most in (norm / 2, math.inf):
        loss, norm, grads = one_device_step(model, ids, targets, most)
        cut.zero_grad()
        ledger.rows.clear()
        with ledger:
            my_loss, my_norm = lab.train_step(cut, *mine, groups, microbatches, most)
        found = {"loss": relative(my_loss, loss), "gradient norm": relative(my_norm, norm)}
        for name, p in cut.named_parameters():
            found[name] = relative(p.grad, part_of(grads[SAME.get(name, name)], p))
        errors = {name: max(error, errors.get(name, 0)) for name, error in found.items()}
    replicas = [math.prod(groups[name].size() for name in p.shared) for p in cut.parameters()]
    real = {name: group for name, group in groups.items() if group}
    return {
        "errors": errors,
        "loss": my_loss.item(),
        "norm": my_norm.item(),
        "one_device": {"loss": loss, "norm": norm},
        "traffic": ledger.rows,
        "expected": expected_traffic(cut, groups, len(mine[0]), microbatches),
        "groups": {name: dist.get_process_group_ranks(group) for name, group in real.items()},
        "norms": {text: norm.item() for text, norm in usual_norms(cut, groups).items()},
        "held": sum(p.numel() / count for p, count in zip(cut.parameters(), replicas)),
        "whole": sum(p.numel() for p in model.parameters()),
        "node": int(os.environ.get("GROUP_RANK", 0)),
    }


def sent_too_much(report):
    """The phases of prove()'s step that send more bytes than expected, by whatever collectives."""

    def total(key, phase):
        return sum(sent for place, (_, sent) in report[key].items() if place[0] == phase)

    phases = "forward", "backward", "gradients"
    sums = [(phase, total("traffic", phase), total("expected", phase)) for phase in phases]
    return [f"{phase}: {sent} bytes, {do} do" for phase, sent, do in sums if sent > do]


# --------------------------------------------------------------------------------------------------
# Checks
# --------------------------------------------------------------------------------------------------

CUBE = {"dp": 2, "pp": 2, "tp": 2}
TALL = {"dp": 1, "pp": 2, "tp": 4}  # more ranks in tp than KV heads: two hold the same
DEEP = {"dp": 2, "pp": 4, "tp": 1}  # stages that are neither first nor last
MESHES = CUBE, TALL, DEEP


def say(sizes):
    return " x ".join(map(str, sizes.values()))


def check_mesh(lab, group, seed):
    """Against an array of ranks for several meshes, and init_device_mesh for one, on real ranks."""
    random = torch.randint(1, 6, (4, 3), generator=torch.Generator().manual_seed(seed)).tolist()
    meshes = [(2, 2, 2), (2, 3, 4), *map(tuple, random)]
    for shape in meshes:
        sizes, ranks = dict(zip(AXES, shape)), torch.arange(math.prod(shape)).view(shape)
        for place in itertools.product(*map(range, shape)):
            check_place(lab, sizes, ranks, place)
    shape = [(2, 2, 2), (1, 4, 2), (4, 1, 2), (2, 4, 1), (2, 1, 4)][seed % 5]
    mesh, sizes = init_device_mesh("cpu", shape, mesh_dim_names=AXES), dict(zip(AXES, shape))
    mine, right = lab.coordinates(group.rank(), sizes), dict(zip(AXES, mesh.get_coordinate()))
    expect(mine == right, f"{mine} are not torch's coordinates, {right}")
    for axis in AXES:
        mine = lab.group_ranks(group.rank(), axis, sizes)
        right = dist.get_process_group_ranks(mesh.get_group(axis))
        expect(mine == right, f"{mine}, but torch's {axis} group is {right}")
    return f"{len(meshes)} meshes; as init_device_mesh has it for {say(sizes)} on 8 ranks"


def check_place(lab, sizes, ranks, place):
    """Coordinates and groups of the rank at a place of the mesh; ranks: a tensor of all."""
    rank, right, (D, P, _) = ranks[place].item(), dict(zip(AXES, place)), ranks.shape
    mine, where = lab.coordinates(rank, dict(sizes)), f"rank {rank} of {say(sizes)}"
    inside_out = [rank % D, rank // D % P, rank // D // P]
    hint = "tp counts fastest: its ranks are neighbours"
    hint = hint if list(mine.values()) == inside_out else ""
    expect(mine == right, f"coordinates of {where}: {mine}, not {right}", hint)
    for axis, name in enumerate(AXES):
        mine = lab.group_ranks(rank, name, dict(sizes))
        line = ranks.movedim(axis, -1)[place[:axis] + place[axis + 1 :]].tolist()
        alike = ranks.select(axis, place[axis]).flatten().tolist()
        neighbours = (rank - place[axis] + torch.arange(ranks.shape[axis])).tolist()
        hints = {"these share a coordinate that a group differs in": alike}
        hints["only those of tp are neighbours"] = neighbours
        hint = next((text for text, wrong in hints.items() if wrong == mine), "")
        expect(mine == line, f"the {name} group of {where}: {mine}, not {line}", hint)


def check_copies_of(lab, group, seed):
    """Every name of HF's LLaMA, and the last stage's table."""
    heads = "with more ranks in tp than KV heads several hold the same head, the group kv"
    hints = {
        "norm.weight": "a norm is replicated over tp, and each rank sees its own tokens only",
        "k_proj": heads,
        "v_proj": heads,
        "embed_tokens": "the first stage has it and, as head, the last: the group embedding",
        "lm_head": "the head is the table of embed_tokens: the group embedding",
    }
    names = [*dict(tiny_model(1, seed).named_parameters()), *SAME]
    for name in names:
        mine, right = lab.copies_of(name), sorted(finished.copies_of(name))
        expect(isinstance(mine, list | tuple | set), f"{name}: {mine} is no list of names")
        hint = "every rank of tp has its own rows or columns of it: only dp has them again"
        hint = next((text for key, text in hints.items() if key in name), hint)
        if "dp" not in mine:
            hint = "all replicas of dp hold every parameter, and each saw its own sequences"
        expect(sorted(mine) == right, f"{name}: {sorted(mine)}, not {right}", hint)
    return f"{len(names)} parameters, each with the groups that hold the same numbers"


def drawn(shape, *key):
    """Random numbers that only the key decides: the same on every rank that asks for them."""
    numbers = torch.Generator().manual_seed(zlib.crc32(repr(key).encode()))
    return torch.randn(shape, generator=numbers)


def check_loss_scale(lab, group, seed):
    """2 x 1 x 2: replicas and microbatches with different numbers of targets."""
    sizes, microbatches, s = {"dp": 2, "pp": 1, "tp": 2}, 2, LENGTH - 1  # an even length
    model = tiny_model(1, seed)
    groups = finished.make_groups(sizes, model.config)
    cut, (_, targets) = copy.deepcopy(model), random_batch(sizes, microbatches, seed)
    finished.parallelize(cut, groups)
    targets = targets[:, :s]
    hidden = drawn((*targets.shape, 32), "hidden", seed).requires_grad_()
    logits = F.linear(hidden, model.lm_head.weight.detach())
    right = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE)
    right.backward()
    rows = finished.replica_rows(len(targets), groups)
    tokens = slice(*split(s, groups["tp"].rank(), 2))
    own, total = (targets[rows] != IGNORE).sum().item(), (targets != IGNORE).sum().item()
    count = int(lab.target_count(targets[rows], groups))
    hints = {own: "these are this replica's: sum over dp", targets.numel(): "IGNORE is no target"}
    hints[2 * total] = "the ranks of tp have the same targets: sum over dp alone"
    found = f"{count} targets on rank {group.rank()}, not {total}"
    expect(count == total, found, hints.get(count, ""))
    mine = hidden.detach()[rows, tokens].clone().requires_grad_()
    parts, means, own_mean = [], [], []
    for m in range(microbatches):
        r = slice(*split(len(mine), m, microbatches))
        with Traffic() as traffic:
            parts.append(lab.microbatch_loss(cut, mine[r], targets[rows][r], total, groups))
        with torch.no_grad(), Traffic() as enough:
            loss = finished.token_loss(cut, mine[r], targets[rows][r], groups["tp"])
        sent, least = (sum(b for _, b in t.ops.values()) for t in (traffic, enough))
        expect(sent <= least, f"{sent} bytes sent for a loss; {least} do", "token_loss, once")
        means.append(loss / (targets[rows][r] != IGNORE).sum() / microbatches / 2)
        own_mean.append(loss / own / 2)
    sum(parts).backward()

    def batch(losses):
        return all_reduce(sum(losses).detach(), groups["dp"])

    whole, others = right.detach(), "weights a target by how few others it has beside it"
    mean_of_means = f"a mean of the microbatches' means {others}"
    hints = {
        mean_of_means: batch(means),
        f"{mean_of_means}; and they are added up undivided": 4 * batch(means),
        f"a mean of the replicas' means {others}": batch(own_mean),
        "the sum is not divided by count": whole * total,
        "count is that of all microbatches already": whole / microbatches,
        "count is that of all replicas already": whole / 2,
    }
    error = expect_close("the sum of all parts", batch(parts), whole, hints=hints)
    expect_close("the gradient of hidden", mine.grad, hidden.grad[rows, tokens])
    return f"mean over {total} targets, {own} of them on this replica; off by {error:.0e}"


def shards(sizes, seed):
    """(the cut model, its groups, {name: (key, [ranks that hold the same numbers])})."""
    model = tiny_model(sizes["pp"], seed)
    groups = finished.make_groups(sizes, model.config)
    finished.parallelize(model, groups)
    keys = {}
    for name, p in model.named_parameters():
        keys[name] = SAME.get(name, name), getattr(p, "shard", None)
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, set(keys.values()))
    holders = {}
    for name, key in keys.items():
        holders[name] = key, [rank for rank, held in enumerate(everyone) if key in held]
    return model, groups, holders


WHY = {
    "kv": "two ranks hold the same KV head, each saw its own query heads",
    "tp": "norms: each rank of tp saw its own tokens",
    "embedding": "the tied table: the first stage saw it as embedding, the last as head",
    "dp": "each replica saw its own sequences",
}


def sums_of(parts, shared, groups, sizes):
    """(the sum of the ranks' parts {rank: gradient}, {hint: what another sum would give})."""
    total, here, hints = sum(parts.values()), finished.coordinates(dist.get_rank(), sizes), {}
    axis_of = {"kv": "tp", "tp": "tp", "embedding": "pp", "dp": "dp"}
    for over in shared:
        if groups[over].size() > 1:
            axis = axis_of[over]
            alike = [r for r in parts if finished.coordinates(r, sizes)[axis] == here[axis]]
            hints[f"not summed over {over}: {WHY[over]}"] = sum(parts[r] for r in alike)
            mean = f"a mean, not the sum, over {over}: microbatch_loss has divided already"
            hints[mean] = total / groups[over].size()
    hints["a mean, not the sum, over every group"] = total / len(parts)
    return total, hints


def check_finish_gradients(lab, group, seed):
    """Random gradients on every rank; right is the sum over those that hold the same numbers."""
    moved, worst = 0, 0
    for sizes in MESHES:
        model, groups, holders = shards(sizes, seed)
        right = {}
        for name, p in model.named_parameters():
            key, ranks = holders[name]
            parts = {rank: drawn(p.shape, seed, key, rank) for rank in ranks}
            p.grad = parts[group.rank()].clone()
            right[name] = sums_of(parts, p.shared, groups, sizes)
        with Traffic() as traffic:
            lab.finish_gradients(model, groups)
        for name, p in model.named_parameters():
            total, hints = right[name]
            title = f"{say(sizes)}, rank {group.rank()}: the gradient of {name}"
            worst = max(worst, expect_close(title, p.grad, total, hints=hints))
        over = {name for p in model.parameters() for name in p.shared if groups[name].size() > 1}
        most = sum(p.grad.nbytes for p in model.parameters() for name in p.shared if name in over)
        calls, sent = map(sum, zip((0, 0), *traffic.ops.values()))
        found = f"{calls} messages for {len(over)} groups"
        expect(calls <= len(over), found, "join a group's gradients")
        expect(sent <= most, f"{sent} bytes sent, {most} will do", "only what the group shares")
        moved = max(moved, sent)
    seen = f"off by {worst:.0e}; one message a group, {moved} bytes"
    return f"{', '.join(map(say, MESHES))}: {seen}"


REASONS = {
    "every replica counted": "what several ranks hold is counted once for each of them",
    "tied table counted at both ends": "the tied table is counted on the first and the last stage",
    "over tp alone": "the other stages' parameters are missing: groups['model'] is pp x tp",
    "over pp alone": "the other shards of tp are missing: groups['model'] is pp x tp",
    "over all ranks, dp too": "the replicas of dp have the same gradients: one of them counts",
    "this rank's part (torch's own clip)": "this is the norm of what this rank holds",
}


def check_grad_norm(lab, group, seed):
    """Gradients that are one device's, cut; the norm of it all is known."""
    worst = 0
    for sizes in MESHES:
        model, groups, holders = shards(sizes, seed)
        whole = dict(tiny_model(sizes["pp"], seed).named_parameters())
        full = {name: drawn(p.shape, seed, name) for name, p in whole.items()}
        for name, p in model.named_parameters():
            p.grad = part_of(full[holders[name][0][0]], p).clone()
        before = [p.grad.clone() for p in model.parameters()]
        norms = usual_norms(model, groups)
        right = torch.linalg.vector_norm(torch.cat([f.flatten() for f in full.values()]).double())
        with Traffic() as traffic:
            norm = lab.grad_norm(model, groups)
        hints = {reason: norms[text] for text, reason in REASONS.items()}
        hints["the norm is the root of the sum of squares"] = right.square()
        own = 0
        for name, p in model.named_parameters():
            own += p.grad.double().square().sum() / len(holders[name][1]) * groups["dp"].size()
        hints["this is this rank's share: sum the squares over groups['model']"] = own.sqrt()
        title = f"{say(sizes)}: the norm on rank {group.rank()}"
        norm = torch.as_tensor(norm).double().detach()
        worst = max(worst, expect_close(title, norm, right, hints=hints))
        sent = sum(sent for _, sent in traffic.ops.values())
        expect(sent <= 32, f"{sent} bytes sent for a norm", "send a sum of squares: one number")
        same = all(torch.equal(p.grad, old) for p, old in zip(model.parameters(), before))
        expect(same, "grad_norm changes the gradients")
    seen = f"off by {worst:.0e} on every rank, {sent} bytes sent"
    return f"{', '.join(map(say, MESHES))}: {seen}"


def check_clip(lab, group, seed):
    """As torch clips on one device, where this rank holds a part of the model."""
    model, worst = tiny_model(1, seed), 0
    elsewhere = nn.Parameter(torch.zeros(9000))  # what other ranks hold
    everything = [*model.parameters(), elsewhere]
    full = [drawn(p.shape, seed, i) for i, p in enumerate(everything)]
    norm = torch.linalg.vector_norm(torch.cat([f.flatten() for f in full]).double())
    own = torch.linalg.vector_norm(torch.cat([f.flatten() for f in full[:-1]]))
    for most in (norm.item() / 100, norm.item() * 3):  # below and above every tensor of it
        for p, f in zip(everything, full):
            p.grad = f.clone()
        nn.utils.clip_grad_norm_(everything, most)
        right = [p.grad for p in model.parameters()]
        given = [f.clone() for f in full[:-1]]
        for p, grad in zip(model.parameters(), given):
            p.grad = grad
        with Traffic() as traffic:
            lab.clip_gradients(model, norm, most)
        expect(not traffic.ops, "clipping sends something", "the norm is the whole model's already")
        case = f"norm {norm:.1f}, at most {most:.1f}"
        for p, mine, wanted, f in zip(model.parameters(), given, right, full):
            expect(p.grad is mine, f"{case}: .grad is another tensor", "in place: mul_")
            apart = "each tensor is clipped by itself: the gradient points elsewhere"
            hints = {
                "gradients that are small enough stay as they are": f * (most / norm.float()),
                "that clips by the norm of what this rank holds": f * (most / own).clamp(max=1),
                apart: f * (most / f.norm()),
                "nothing is clipped": f,
            }
            worst = max(worst, expect_close(f"{case}: a gradient", mine, wanted, hints=hints))
    return f"above and below the limit as torch's clip_grad_norm_, off by {worst:.0e}; nothing sent"


def check_train_step(lab, group, seed):
    """The whole step, on 2 x 2 x 2, beside one device."""
    found = prove(lab, CUBE, 2, seed)
    hint = "finish every .grad, over all groups; then one norm of them; by that they are clipped"
    for name, error in found["errors"].items():
        what = f"the gradient of {name}" if "." in name else name
        off = f"{what} on rank {group.rank()} is off by {error:.1e} (at most {TOLERANCE:.0e})"
        expect(error <= TOLERANCE, off, hint)
    more = sent_too_much(found)
    expect(not more, f"rank {group.rank()}: {', '.join(more)}", "each of the functions once")
    worst = max(found["errors"].values())
    return f"loss, norm, gradients, clipped or not: off by {worst:.0e} from one device, {say(CUBE)}"


CHECKS = {
    "mesh": (check_mesh, 8),
    "copies_of": (check_copies_of, 1),
    "loss_scale": (check_loss_scale, 4),
    "finish_gradients": (check_finish_gradients, 8),
    "grad_norm": (check_grad_norm, 8),
    "clip": (check_clip, 1),
    "train_step": (check_train_step, 8),
}


# --------------------------------------------------------------------------------------------------
# Sabotage: bugs that the checks have to catch, for --inject-bug
# --------------------------------------------------------------------------------------------------


def dp_axis_innermost(lab):
    """The ranks of dp are neighbours, and those of tp far apart."""

    def coordinates(rank, sizes):
        rest, d = divmod(rank, sizes["dp"])
        t, p = divmod(rest, sizes["pp"])
        return {"dp": d, "pp": p, "tp": t}

    lab.coordinates = coordinates


def dp_taken_for_tp(lab):
    """The norms' gradients are summed over the dp group instead of the tp group: other ranks."""
    right = lab.finish_gradients
    lab.finish_gradients = lambda model, groups: right(model, {**groups, "tp": groups["dp"]})


def shuffled_by_rank(lab):
    """Each rank has its replica's sequences in an order of its own, shuffled by its rank."""
    right = lab.replica_rows

    def replica_rows(n, groups):
        return torch.arange(n)[right(n, groups)].roll(dist.get_rank())

    lab.replica_rows = replica_rows


def mean_over_replicas(lab):
    """Each replica divides by its own count, and dp takes the mean, as DDP does."""
    right = lab.finish_gradients

    def finish_gradients(model, groups):
        right(model, groups)
        for p in model.parameters():
            p.grad /= groups["dp"].size()

    lab.finish_gradients = finish_gradients
    lab.target_count = lambda targets, groups: (targets != IGNORE).sum()


def untied_table(lab):
    """First and last stage keep their own part of the tied table's gradient."""
    right = lab.copies_of
    lab.copies_of = lambda name: [group for group in right(name) if group != "embedding"]


def unsummed_norm_weights(lab):
    """The norms' gradients are not summed over tp: each rank saw its own tokens."""
    right = lab.copies_of
    lab.copies_of = lambda name: [group for group in right(name) if group != "tp"]


def summed_twice(lab):
    """The gradients of norms and tied table are summed twice."""
    right = lab.finish_gradients

    def finish_gradients(model, groups):
        right(model, groups)
        right(model, {**groups, "dp": groups["kv"]})

    lab.finish_gradients = finish_gradients


def every_copy_counts(lab):
    """The norm counts a parameter once for every rank of the replica that holds it."""

    def grad_norm(model, groups):
        squares = sum(p.grad.double().square().sum() for p in model.parameters())
        return all_reduce(squares, groups["model"]).sqrt()

    lab.grad_norm = grad_norm


def norm_over_tp_alone(lab):
    """The norm is that of the rank's own stage."""
    right = lab.grad_norm
    lab.grad_norm = lambda model, groups: right(model, {**groups, "model": groups["tp"]})


def norm_over_all_ranks(lab):
    """The norm adds up the replicas of dp, too."""
    right = lab.grad_norm
    lab.grad_norm = lambda model, groups: right(model, {**groups, "model": dist.group.WORLD})


def clipped_by_own_norm(lab):
    """Each rank clips by the norm of what it holds: torch's own clip_grad_norm_ on every rank."""

    def clip_gradients(model, norm, most):
        nn.utils.clip_grad_norm_(model.parameters(), most)

    lab.clip_gradients = clip_gradients


def norm_before_the_sums(lab):
    """The norm is taken before the gradients are finished."""

    def train_step(model, ids, targets, groups, microbatches, most):
        count = lab.target_count(targets, groups)
        held = lab.forward_all(model, ids, targets, count, groups, microbatches)
        lab.backward_all(held, groups)
        norm = lab.grad_norm(model, groups)
        lab.finish_gradients(model, groups)
        lab.clip_gradients(model, norm, most)
        return lab.mean_loss(held, groups), norm

    lab.train_step = train_step


BUGS = [
    dp_axis_innermost,
    dp_taken_for_tp,
    shuffled_by_rank,
    mean_over_replicas,
    untied_table,
    unsummed_norm_weights,
    summed_twice,
    every_copy_counts,
    norm_over_tp_alone,
    norm_over_all_ranks,
    clipped_by_own_norm,
    norm_before_the_sums,
]
