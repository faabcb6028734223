"""Lab 8's checks, each of which runs on every rank, and the bugs that they have to catch.

prove() of mesh.py runs a tiny LLaMA on a mesh beside one device's; the other checks take one
function each.
"""

import copy
import itertools
import math
import random
import zlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from labs.kit import compare
from labs.kit.blame import default_group_refused
from labs.kit.compare import expect_same, mistaken, tried
from labs.kit.harness import Traffic, Wrong, expect, expect_close
from labs.kit.usual import section, usual_results
from labs.lab8_3d import mesh
from labs.lab8_3d.mesh import AXES, IGNORE, SAME, all_reduce, finished, split, tiny_model

CUBE = {"dp": 2, "pp": 2, "tp": 2}
TALL = {"dp": 1, "pp": 2, "tp": 4}  # more ranks in tp than KV heads: two hold the same
DEEP = {"dp": 2, "pp": 4, "tp": 1}  # stages that are neither first nor last
MESHES = CUBE, TALL, DEEP
MISTAKES = """
== grad_norm
name != "dp") -> name not in ("dp", "kv"))  # a KV head that two ranks hold is counted twice
/ copies -> * (groups["dp"].rank() == 0)  # dp is no part of it: each replica has a groups["model"]
if name != "dp") -> )  # groups["model"] is one replica: dp divides nothing
groups["model"]).sqrt() -> groups["model"])  # the norm is the root of the sum of squares
all_reduce(squares, groups["model"]) -> squares  # one rank's share: sum over groups["model"]
(squares, groups["model"]).sqrt() -> (squares.sqrt(), groups["model"])  # add up squares, not norms
the root of the squares of all the model's numbers, each once, over groups["model"]
"""


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
    theirs, sizes = init_device_mesh("cpu", shape, mesh_dim_names=AXES), dict(zip(AXES, shape))
    mine, right = lab.coordinates(group.rank(), sizes), dict(zip(AXES, theirs.get_coordinate()))
    expect(mine == right, f"{mine} are not torch's coordinates, {right}")
    for axis in AXES:
        mine = list(lab.group_ranks(group.rank(), axis, sizes))
        right = dist.get_process_group_ranks(theirs.get_group(axis))
        expect(mine == right, f"{mine}, but torch's {axis} group is {right}")
    return f"{len(meshes)} meshes; as init_device_mesh has it for {say(sizes)} on 8 ranks"


def check_place(lab, sizes, ranks, place):
    """Coordinates and groups of the rank at a place of the mesh; ranks: a tensor of all."""
    rank, right, (D, P, _) = ranks[place].item(), dict(zip(AXES, place)), ranks.shape
    mine, where = lab.coordinates(rank, dict(sizes)), f"rank {rank} of {say(sizes)}"
    inside_out, hint = [rank % D, rank // D % P, rank // D // P], "rank is (d P + p) T + t"
    if mine == dict(zip(AXES, inside_out)):
        hint = "tp counts fastest: its ranks are neighbours"
    expect(mine == right, f"coordinates of {where}: {mine}, not {right}", hint)
    for axis, name in enumerate(AXES):
        ranks_of = lab.group_ranks(rank, name, dict(sizes))
        mine = tried("group_ranks()", "return a list of ranks", list, ranks_of)
        line = ranks.movedim(axis, -1)[place[:axis] + place[axis + 1 :]].tolist()
        alike = ranks.select(axis, place[axis]).flatten().tolist()
        neighbours = (rank - place[axis] + torch.arange(ranks.shape[axis])).tolist()
        hints = {"these share a coordinate that a group differs in": alike}
        hints["only those of tp are neighbours"] = neighbours
        apart = "from its coordinate 0 on, as far apart as the axes inside it have ranks together"
        hint = next((text for text, wrong in hints.items() if wrong == mine), apart)
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
        elif set(mine) >= set(right):
            hint = f"too many; once each of {' and '.join(right)}"
        expect(sorted(mine) == right, f"{name}: {sorted(mine)}, not {right}", hint)
    return f"{len(names)} parameters, each with the groups that hold the same numbers"


def drawn(shape, *key):
    """Random numbers that only the key decides: the same on every rank that asks for them."""
    return compare.drawn(zlib.crc32(repr(key).encode()), *shape).float()


def check_loss_scale(lab, group, seed):
    """2 x 1 x 2: replicas and microbatches with different numbers of targets."""
    sizes, s = {"dp": 2, "pp": 1, "tp": 2}, mesh.LENGTH - 1  # an even length
    model = tiny_model(1, seed)
    groups = finished.make_groups(sizes, model.config)
    cut, (_, targets) = copy.deepcopy(model), mesh.random_batch(sizes, 2, seed)
    finished.parallelize(cut, groups)
    targets, before = targets[:, :s], targets[:, :s].clone()
    hidden = drawn((*targets.shape, 32), "hidden", seed).requires_grad_()
    logits = F.linear(hidden, model.lm_head.weight.detach())
    right = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE)
    right.backward()
    rows = finished.replica_rows(len(targets), groups)
    tokens = slice(*split(s, groups["tp"].rank(), 2))
    own, total = expect_target_count(lab, targets, rows, groups)
    mine = hidden.detach()[rows, tokens].clone().requires_grad_()
    parts, means = microbatch_losses(lab, cut, mine, targets[rows], total, groups)
    parts.backward()
    expect_same("targets", [targets], [before])
    whole = right.detach()
    hint = "a mean of the microbatches' means weights a target by how few others it has beside it"
    hints = {hint: means, f"{hint}; and they are added up undivided": 4 * means}
    hints["the sum is not divided by count"] = whole * total
    hints["count has all replicas' targets already, and the ranks of tp the same sum"] = whole / 2
    loss = all_reduce(parts.detach(), groups["dp"])
    hint = "token_loss() over groups['tp'], divided by count"
    error = expect_close("the sum of all parts", loss, whole, hints=hints, hint=hint)
    expect_close("the gradient of hidden", mine.grad, hidden.grad[rows, tokens], hint=hint)
    return f"mean over {total} targets, {own} of them on this replica; off by {error:.0e}"


def expect_target_count(lab, targets, rows, groups):
    """(targets of this replica's rows, of all); raises Wrong unless the learner's count is that."""
    own, total = (targets[rows] != IGNORE).sum().item(), (targets != IGNORE).sum().item()
    count = lab.target_count(targets[rows], groups)
    hint = "return the sum: dist.all_reduce() works in place and returns nothing"
    expect(count is not None, "target_count() returns None", hint)
    hints = {own: "these are this replica's: sum over dp", targets.numel(): "IGNORE is no target"}
    hints[2 * total] = hints[2 * own] = "the ranks of tp have the same targets: sum over dp alone"
    found = f"{float(count):g} targets on a rank with {own} of its own, not {total}"
    hint = "a sum over dp, of this replica's targets that are not IGNORE"
    expect(float(count) == total, found, hints.get(int(count), hint))
    return own, total


def microbatch_losses(lab, model, hidden, targets, count, groups):
    """(the sum of a replica's two losses, the mean of all replicas' means); as little is sent."""
    parts, means = [], []
    for m in range(2):
        r = slice(*split(len(hidden), m, 2))
        with Traffic() as traffic:
            parts.append(lab.microbatch_loss(model, hidden[r], targets[r], count, groups))
        follows = isinstance(parts[m], torch.Tensor) and parts[m].requires_grad
        hint = "the backward starts from it: no item(), no detach()"
        expect(follows, f"no gradient reaches the model from the loss {parts[m]}", hint)
        with torch.no_grad(), Traffic() as enough:
            loss = finished.token_loss(model, hidden[r], targets[r], groups["tp"])
        sent, least = (sum(b for _, b in t.ops.values()) for t in (traffic, enough))
        expect(sent <= least, f"{sent} bytes sent for a loss; {least} do", "token_loss, once")
        means.append(loss / (targets[r] != IGNORE).sum())
    return sum(parts), all_reduce(sum(means), groups["dp"]) / 4


def shards(sizes, seed):
    """(the cut model, its groups, {name: (key, [ranks that hold the same numbers])})."""
    model = tiny_model(sizes["pp"], seed)
    groups = finished.make_groups(sizes, model.config)
    finished.parallelize(model, groups)
    keys = {}
    for name, p in model.named_parameters():
        random.Random(f"{seed} {sorted(p.shared)}").shuffle(p.shared)  # a list in any order
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
    for over in sorted(shared, key=lambda name: name == "dp"):
        if groups[over].size() > 1:
            axis = axis_of[over]
            alike = [r for r in parts if finished.coordinates(r, sizes)[axis] == here[axis]]
            hint = f"not summed over {over}: {WHY[over]}; or the sum is not written into .grad"
            hints[hint] = sum(parts[r] for r in alike)
            mean = f"a mean, not the sum, over {over}: microbatch_loss has divided already"
            hints[mean] = total / groups[over].size()
    hints["a mean, not the sum, over every group"] = total / len(parts)
    hints["this rank's part alone: write the sum into .grad"] = parts[dist.get_rank()]
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
        with Traffic() as traffic, default_group_refused():
            hint = "split as they were joined: numel() of each"
            tried("finish_gradients()", hint, lab.finish_gradients, model, groups)
        for name, p in sorted(model.named_parameters(), key=lambda item: len(item[1].shared)):
            total, hints = right[name]
            title = f"{say(sizes)}, rank {group.rank()}: the gradient of {name}"
            hint = f"the sum over {' and '.join(p.shared)}, no others, each at its place"
            worst = max(worst, expect_close(title, p.grad, total, hints=hints, hint=hint))
        over = {name for p in model.parameters() for name in p.shared}
        most = sum(p.grad.nbytes * len(p.shared) for p in model.parameters())
        calls, sent = map(sum, zip((0, 0), *traffic.ops.values()))
        found = f"{calls} messages for {len(over)} groups"
        expect(calls <= len(over), found, "join a group's gradients")
        expect(sent <= most, f"{sent} bytes sent, {most} will do", "only what the group shares")
        moved = max(moved, sent)
    seen = f"off by {worst:.0e}; one message a group, {moved} bytes"
    return f"{', '.join(map(say, MESHES))}: {seen}"


def check_grad_norm(lab, group, seed):
    """Gradients that are one device's, cut; the norm of it all is known."""
    worst = 0
    for sizes in MESHES:
        model, groups, holders = shards(sizes, seed)
        whole = dict(tiny_model(sizes["pp"], seed).named_parameters())
        full = {name: drawn(p.shape, seed, name) for name, p in whole.items()}
        for name, p in model.named_parameters():
            p.grad = mesh.part_of(full[holders[name][0][0]], p).clone()
        before = [p.grad.clone() for p in model.parameters()]
        right = torch.linalg.vector_norm(torch.cat([f.flatten() for f in full.values()]).double())
        once = section(MISTAKES, finished.grad_norm)[-1]
        hints = {f"{text}; {once}": x for text, x in mesh.usual_norms(model, groups).items()}
        hints |= usual_results(MISTAKES, finished.grad_norm, (model, groups))
        with Traffic() as traffic, default_group_refused():
            norm = lab.grad_norm(model, groups)
        title = f"{say(sizes)}: the norm on rank {group.rank()}"
        expect(isinstance(norm, torch.Tensor), f"{title} is {norm}", "return a tensor, no item()")
        norm = norm.double().detach()
        worst = max(worst, expect_close(title, norm, right, hints=hints, hint=once))
        sent = sum(sent for _, sent in traffic.ops.values())
        most = 8 * groups["model"].size()  # of an all-gather
        expect(sent <= most, f"{sent} bytes sent for a norm", "send a sum of squares: one number")
        same = all(torch.equal(p.grad, old) for p, old in zip(model.parameters(), before))
        expect(same, "grad_norm changes the gradients", "square and add up: no *=")
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
            hints = {
                "gradients that are small enough stay as they are": f * (most / norm.float()),
                "that clips by the norm of what this rank holds": f * (most / own).clamp(max=1),
                "each tensor is clipped by itself, not all by one factor": f * (most / f.norm()),
                "nothing is clipped": f,
            }
            what, hint = f"{case}: a gradient", "times most / norm, where that is less than 1"
            worst = max(worst, expect_close(what, mine, wanted, hints=hints, hint=hint))
    return f"above and below the limit as torch's clip_grad_norm_, off by {worst:.0e}; nothing sent"


def check_train_step(lab, group, seed):
    """The whole step, on 2 x 2 x 2, beside one device."""
    hint = "all the functions, in this order; then (loss, norm), one number each"
    found = tried("a step", hint, mesh.prove, lab, CUBE, 2, seed)
    hint = "finish every .grad, over all groups; then one norm of them; by that they are clipped"
    wrong = [name for name, error in found["errors"].items() if error > mesh.TOLERANCE]
    hints = {"loss": "mean_loss() of what forward_all() returned"}
    hints["gradient norm"] = "return the norm before clipping, by which they are clipped"
    hints["loss gradient norm"] = "(loss, norm), in this order"
    if any("." in name for name in wrong) and "loss" in wrong:
        hint = "the loss is wrong, too: count is target_count()'s, of all replicas"
    for name in wrong:
        what = f"the gradient of {name}" if "." in name else name
        off = f"{what} on rank {group.rank()} is off by {found['errors'][name]:.1e}"
        raise Wrong(f"{off} (at most {mesh.TOLERANCE:.0e})", hints.get(" ".join(wrong), hint))
    more = mesh.sent_too_much(found)
    expect(not more, f"rank {group.rank()}: {', '.join(more)}", "each of the functions once")
    for key, (calls, _) in found["expected"].items():
        sends = found["traffic"].get(key, [0])[0]
        what = f"rank {group.rank()} sends {sends} messages in the {key[0]}, not {calls}"
        expect(key[1] != "send" or sends == calls, what, "pass microbatches on")
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


# Bugs for --inject-bug: the checks have to catch every one


def untied_table(lab):
    """First and last stage keep their own part of the tied table's gradient."""
    lab.copies_of = mistaken(finished.copies_of, ('["embedding", "dp"]', '["dp"]'))


def norm_over_tp_alone(lab):
    """The norm is that of the rank's own stage."""
    lab.grad_norm = mistaken(finished.grad_norm, ('groups["model"]', 'groups["tp"]'))


def clipped_by_own_norm(lab):
    """Each rank clips by the norm of what it holds: torch's own clip_grad_norm_ on every rank."""
    own = "nn.utils.get_total_norm([p.grad for p in model.parameters()])"
    lab.clip_gradients = mistaken(finished.clip_gradients, ("(norm +", f"({own} +"))


BUGS = [untied_table, norm_over_tp_alone, clipped_by_own_norm]
