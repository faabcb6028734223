"""Lab 3's checks of the right ways, and for each pitfall a bug that its check has to catch."""

import time
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from checks.tools import appears, shared_folder
from harness import LABS, Traffic, expect, expect_close, load
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

finished = load(LABS / "lab3_pitfalls.py")  # not the learner's
IGNORE, all_reduce = finished.IGNORE, finished.all_reduce
copy_to_tp_region = finished.copy_to_tp_region


def numbers(seed, *shape):
    """The same random numbers on every rank."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def on_every_rank(value, group):
    """The values of a Python object on all ranks, in order."""
    values = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


def short_lived(group, seconds):
    """A group of the same ranks; its collectives fail after so many seconds instead of hanging."""
    return dist.new_group(dist.get_process_group_ranks(group), timeout=timedelta(seconds=seconds))


def check_transposed_weights(lab, group, seed):
    """Square and not, 2 ranks and a number that does not divide the rows."""
    for weight, world in ((numbers(seed, 8, 8), 2), (numbers(seed, 10, 6), 4)):
        for rank in range(world):
            shard = lab.right_transposed_weights(weight, rank, world)
            right = weight.tensor_split(world)[rank]
            columns = weight.T.tensor_split(world)[rank]
            hints = {"these are columns, inputs: torch keeps a weight as (out, in)": columns}
            hints |= {"rank 0's rows": weight.tensor_split(world)[0]}
            error = expect_close(f"the shard of rank {rank} of {world}", shard, right, hints=hints)
            alone = shard.untyped_storage().nbytes() == shard.nbytes
            expect(alone, "the shard is a view", "it keeps the whole matrix in memory: clone it")
    return f"off by {error:.0e} on 2 and 4 ranks"


def check_copy_without_no_grad(lab, group, seed):
    """The same Parameter, trained by an optimizer that had it before."""
    linear, value = nn.Linear(6, 4), numbers(seed, 4, 6)
    before, parameter = linear.weight.detach().clone(), linear.weight
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    lab.right_copy_without_no_grad(parameter, value)
    hints = {"nothing arrived: a name bound anew changes no parameter": before}
    expect_close("the parameter", parameter.detach(), value, hints=hints)
    hint = "requires_grad has to stay True"
    expect(parameter.requires_grad, "the parameter is not trained any more", hint)
    hint = "keep the copy out of its graph: no_grad"
    expect(parameter.is_leaf, "the parameter is no leaf any more", hint)
    apart = parameter.data_ptr() != value.data_ptr()
    hint = "the next step would change both: copy the numbers"
    expect(apart, "parameter and value share memory", hint)
    linear(numbers(seed + 1, 3, 6)).sum().backward()
    optimizer.step()
    expect_close("the parameter after a step", parameter.detach(), value - parameter.grad)
    return "the optimizer still trains it"


def check_parallelize_order(lab, group, seed):
    """An MLP from meta to a mesh of these ranks: weights, output, the size of the shards."""
    whole = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6))
    weights = {
        name: numbers(seed + i, *t.shape) for i, (name, t) in enumerate(whole.state_dict().items())
    }
    whole.load_state_dict(weights)
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6))
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    mesh = DeviceMesh.from_group(short_lived(group, 10), "cpu")
    model = lab.right_parallelize_order(model, mesh, plan, dict(weights))
    for name, parameter in model.named_parameters():
        hint = "cut by plan: parallelize_module"
        expect(hasattr(parameter, "full_tensor"), f"{name} is a plain tensor", hint)
        hint = "first memory on the device, then the weights, then the cut"
        expect(parameter.device.type == "cpu", f"{name} is on {parameter.device}", hint)
        same = torch.equal(parameter.full_tensor().detach(), weights[name])
        expect(same, f"{name} does not hold its weights", hint)
    x = numbers(seed, 3, 6)
    error = expect_close("the output", model(x).detach() + 0, whole(x).detach())
    rows = len(model[0].weight.to_local())
    expect(rows == 8 // group.size(), f"rank {group.rank()} holds {rows} of 8 rows", "cut by plan")
    return f"all weights there, output off by {error:.0e}"


class TinyModel(nn.Module):
    """An embedding (v, h) and a head, tied or not."""

    def __init__(self, seed, tied):
        super().__init__()
        self.embed, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
        self.embed.weight = nn.Parameter(numbers(seed, 8, 4))
        self.head.weight = self.embed.weight if tied else nn.Parameter(numbers(seed + 1, 8, 4))

    def get_input_embeddings(self):
        return self.embed

    def get_output_embeddings(self):
        return self.head

    def forward(self, ids):  # (n) -> (n, v)
        return self.head(self.embed(ids).tanh())


def check_untied_weights(lab, group, seed):
    """Tied stays tied, untied untied; the gradient is that of one device."""
    mesh = DeviceMesh.from_group(short_lived(group, 10), "cpu")
    plan = {"embed": RowwiseParallel(input_layouts=Replicate())}
    plan["head"] = ColwiseParallel(output_layouts=Replicate())
    ids, target = torch.tensor([1, 5, 6, 1]), torch.tensor([5, 6, 1, 0])
    for tied in (True, False):
        model, whole = TinyModel(seed, tied), TinyModel(seed, tied)
        model = lab.right_untied_weights(model, mesh, plan)
        for each in (model, whole):
            F.cross_entropy(each(ids), target).backward()
        for name, module in (("embedding", model.embed), ("head", model.head)):
            cut = hasattr(module.weight, "full_tensor")
            expect(cut, f"the {name} is not cut", "parallelize_module")
        count = len(list(model.parameters()))
        hint = "parallelize_module makes a Parameter for each: give the head the embedding's again"
        expect(not tied or count == 1, f"{count} parameters where one was shared", hint)
        expect(tied or count == 2, "weights that were two are one", "tie only what was tied before")
        grad = model.embed.weight.grad.full_tensor()
        error = expect_close("the embedding's gradient", grad, whole.embed.weight.grad)
    return f"one Parameter, gradient off by {error:.0e}"


def check_f_per_projection(lab, group, seed):
    """Three projections of one x, which comes by name and by position; what the backward sends."""
    shards = numbers(seed + 1 + group.rank(), 3, 4, 6)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.q_proj, self.k_proj, self.v_proj = (nn.Linear(6, 4, bias=False) for _ in range(3))
            for linear, shard in zip(self.children(), shards):
                linear.weight = nn.Parameter(shard.clone())

        def forward(self, hidden_states, scale):
            return sum(linear(hidden_states) for linear in self.children()) * scale

    class MLP(Block):
        def forward(self, x, scale):  # another name, as in HF's
            return super().forward(x, scale)

    x = numbers(seed, 2, 5, 6).requires_grad_()
    dy = numbers(seed + 9, 2, 5, 4)  # (b, s, out/P)
    mine = (dy * 3) @ shards.sum(0)
    total = all_reduce(mine, group)
    attention, mlp = Block(), MLP()
    for block in (attention, mlp):
        lab.right_f_per_projection(block, group)
    for call in (lambda: mlp(x, scale=3), lambda: attention(hidden_states=x, scale=3)):
        x.grad = None
        with Traffic() as forward:
            out = call()
        expect(not forward.ops, "f sends something in the forward", "forward: x as it is")
        expect_close("the output", out, x @ shards.sum(0).T * 3)
        with Traffic() as backward:
            out.backward(dy)
        hints = {"one rank's part only: f sums dx over the ranks in the backward": mine}
        hints |= {"summed twice: one f is enough": total * group.size()}
        error = expect_close("dx", x.grad, total, hints=hints)
        calls, moved = backward.ops.get("all_reduce", [0, 0])
        hint = "one f for the block, at its entrance: dx of q, k and v is added up before it"
        found = f"{calls} all-reduces, {moved} bytes of {x.nbytes}"
        expect(calls == 1 and moved == x.nbytes, found, hint)
    return f"1 all-reduce for 3 projections, dx off by {error:.0e}"


def check_returned_tuples(lab, group, seed):
    """A tuple and a tensor, batch 3: value, gradient, bytes, and the partial sum left as it was."""
    parts, dy = numbers(seed, group.size(), 3, 4, 5), numbers(seed + 1, 3, 4, 5)
    weights, total, mine = numbers(seed + 2, 3, 4, 4), parts.sum(0), parts[group.rank()]
    for name in ("attention", "the MLP"):
        leaf = mine.clone().requires_grad_()
        out = leaf * 1
        given = (out, weights) if name == "attention" else out
        with Traffic() as traffic:
            result = lab.right_returned_tuples(given, group)
        if name == "attention":
            whole = isinstance(result, tuple) and len(result) == 2 and result[1] is weights
            expect(whole, "attention's weights are lost", "return a tuple: (the sum, *the rest)")
            result = result[0]
        hints = {"out[0] of a tensor is its first sequence": torch.cat([total[:1], mine[1:]])}
        hints |= {"one rank's part: sum over the ranks": mine}
        error = expect_close(f"{name}'s output", result.detach(), total, hints=hints)
        same = torch.equal(out, mine)
        expect(same, f"{name}'s own output is overwritten", "a sum in place: use g")
        hint = "use g, not a bare dist.all_reduce"
        expect(result.requires_grad, f"{name}'s output has no graph", hint)
        (grad,) = torch.autograd.grad(result, leaf, dy)
        hints = {"P times too large: g's backward sends nothing": dy * group.size()}
        expect_close(f"{name}'s gradient", grad, dy, hints=hints)
        moved = traffic.bytes("all_reduce")
        found = f"{name} moved {moved} bytes, not {out.nbytes}"
        expect(moved == out.nbytes, found, "one all-reduce will do")
    return f"tuple and tensor off by {error:.0e}"


def check_autograd_kwargs(lab, group, seed):
    """Two blocks that share a computed tensor, as layers share cos and sin; and a number."""
    linear, calls = nn.Linear(5, 5), []

    def block(x, scale, power):
        calls.append(power)
        return (linear(x) * scale).tanh() ** power

    def gradients(run):
        x, base = numbers(seed, 3, 5).requires_grad_(), numbers(seed + 1, 5).requires_grad_()
        scale = base * 2
        out = run(block, run(block, x, scale=scale, power=2), power=3, scale=scale)
        linear.zero_grad()
        out.sum().backward()
        grads = {"x": x.grad, "a tensor among kwargs": base.grad, "the block": linear.weight.grad}
        return out.detach(), grads

    right_out, right = gradients(lambda block, x, **kwargs: block(x, **kwargs))
    calls.clear()
    out, mine = gradients(lab.right_autograd_kwargs)
    expect_close("the output", out, right_out)
    for name, grad in mine.items():
        hint = "give apply() each tensor as an argument of its own"
        expect(grad is not None, f"no gradient for {name}", hint)
        error = expect_close(f"the gradient of {name}", grad, right[name])
    expect(len(calls) == 4, f"the block ran {len(calls)} times, not 4", "by way of Recompute")
    return f"gradients off by {error:.0e}"


def check_retain_grad(lab, group, seed):
    """With and without a cast: the .grad of the stage's input after its backward."""
    weight, dy = numbers(seed, 6, 4), numbers(seed + 1, 3, 4)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        received = numbers(seed + 2, 3, 6)
        hidden = lab.right_retain_grad(received.clone(), dtype)
        expect(isinstance(hidden, torch.Tensor), "nothing is returned", "return the stage's input")
        found = f"the stage's input is {hidden.dtype}, not {dtype}"
        expect(hidden.dtype == dtype, found, "cast it")
        expect_close("the stage's input", hidden.detach(), received.to(dtype))
        expect(hidden.requires_grad, "the stage's input has no graph", "requires_grad_ on a leaf")
        hidden.matmul(weight.to(dtype)).backward(dy.to(dtype))
        got = hidden.grad if hidden.is_leaf or hidden.retains_grad else None
        hint = "after a cast it is no leaf: retain_grad(), or make it one with detach()"
        expect(got is not None, f"no gradient to send back ({dtype})", hint)
        right = dy.to(dtype) @ weight.to(dtype).T
        error = expect_close("the gradient to send back", got, right, 1e-2)
    return f"gradient there in 3 dtypes, off by {error:.0e}"


def check_local_positions(lab, group, seed):
    """Whole sequences, that P divides and that it does not."""
    for length, world in ((8, 2), (4 * (2 + seed % 5) + 1 + seed % 3, 4)):
        for rank in range(world):
            mine = lab.right_local_positions(length, rank, world)
            local = finished.wrong_local_positions(length, rank, world)
            right = torch.arange(length).tensor_split(world)[rank]
            chunk = -(-length // world)
            hints = {"counted from 0 on every rank": local}
            hints |= {"the ranks before hold chunks of two sizes": local + rank * (length // world)}
            hints |= {"the ranks before hold chunks of two sizes, so": local + rank * chunk}
            name = f"positions of rank {rank} of {world}, {length} tokens,"
            expect_close(name, mine, right, hints=hints)
    return "each token at its own place"


def check_local_mask(lab, group, seed):
    """All chunks of a sequence, of different lengths, laid under each other: one triangle."""
    for length, world in ((8, 2), (3 * (2 + seed % 5) + 1 + seed % 2, 3)):
        for rows in torch.arange(length).tensor_split(world):
            start, queries = rows[0].item(), len(rows)
            mine = lab.right_local_mask(start, queries, length)
            hint = "True: may see; F.scaled_dot_product_attention takes that, or numbers to add"
            boolean = isinstance(mine, torch.Tensor) and mine.dtype == torch.bool
            expect(boolean, "the mask is not bool", hint)
            right = torch.ones(length, length).tril()[rows]
            local = finished.wrong_local_mask(start, queries, length)
            hints = {"the triangle starts at the rank's first token": local}
            hints |= {"a token sees itself as well": torch.ones(length, length).tril(-1)[rows]}
            hints |= {"True is: may see": 1 - right}
            hints = {text: mask.float() for text, mask in hints.items()}
            expect_close(f"the mask of queries from {start}", mine.float(), right, hints=hints)
    return "one triangle over all chunks"


def check_chunk_boundary(lab, group, seed):
    """The targets of all chunks beside each other are those of one device."""
    for length, world in ((8, 2), (3 * (2 + seed % 5) + 1 + seed % 2, 3)):
        ids = torch.randint(1, 99, (2, length), generator=torch.Generator().manual_seed(seed))
        before = ids.clone()
        for rank in range(world):
            mine = lab.right_chunk_boundary(ids, rank, world)
            right = F.pad(ids[:, 1:], (0, 1), value=IGNORE).tensor_split(world, 1)[rank]
            local = finished.wrong_chunk_boundary(ids, rank, world)
            hints = {"each chunk's last token has a target too: shift first, cut then": local}
            own = ids.tensor_split(world, 1)[rank]
            hints |= {"these are the tokens, not their successors": own}
            around = ids.roll(-1, 1).tensor_split(world, 1)[rank]
            hints |= {"the last token of all has no target: IGNORE": around}
            hints = {text: t.float() for text, t in hints.items()}
            expect(isinstance(mine, torch.Tensor), "no targets", "return them")
            name = f"targets of rank {rank} of {world}"
            expect_close(name, mine.float(), right.float(), hints=hints)
        expect(torch.equal(ids, before), "the tokens are overwritten", "the model still needs them")
    return "one target lost in all, on 2 and 3 ranks"


def check_loss_without_graph(lab, group, seed):
    """The loss of all tokens, the gradient of the rank's own; ranks with unequal targets."""
    rank, world = group.rank(), group.size()
    logits = numbers(seed, 2, 3 * world, 7)
    targets = torch.randint(0, 7, (2, 3 * world), generator=torch.Generator().manual_seed(seed))
    targets[:, -1], targets[0, 0] = IGNORE, IGNORE
    whole = logits.clone().requires_grad_()
    right = F.cross_entropy(whole.flatten(0, 1), targets.flatten())
    right.backward()
    chunk = logits.chunk(world, 1)[rank].clone().requires_grad_()
    alone = F.cross_entropy(chunk.detach().flatten(0, 1), targets.chunk(world, 1)[rank].flatten())
    loss = lab.right_loss_without_graph(chunk, targets, group)
    hints = {"this is the mean over the rank's own tokens": alone}
    mean = all_reduce(alone, group) / world
    hints |= {"a mean of means: ranks have different numbers of targets": mean}
    error = expect_close("the loss", loss, right.detach(), hints=hints)
    hint = "gathered tensors have no graph: put the rank's own logits back among them"
    expect(loss.requires_grad, "the loss has no graph", hint)
    loss.backward()
    grad = whole.grad.chunk(world, 1)[rank]
    hint = "P times too large: P ranks compute this loss and the gather's backward sums them"
    hints = {hint: grad * world}
    expect_close("the gradient of the rank's logits", chunk.grad, grad, hints=hints)
    return f"loss off by {error:.0e}, with its gradient"


def check_adam_hides_scale(lab, group, seed):
    """A small model, its gradients right, doubled, halved: the loss falls, the curves part."""
    x, target = numbers(seed, 64, 8), numbers(seed, 64, 8).argmax(1)

    def losses(scale):
        torch.manual_seed(seed)
        model, seen = nn.Linear(8, 8), []
        optimizer = lab.right_adam_hides_scale(model.parameters())
        for _ in range(20):
            loss = F.cross_entropy(model(x), target)
            optimizer.zero_grad()
            loss.backward()
            for parameter in model.parameters():
                parameter.grad *= scale
            optimizer.step()
            seen.append(loss.detach())
        return torch.stack(seen)

    right = losses(1)
    expect(right[-1] < 0.95 * right[0], "the loss does not fall", "choose a larger learning rate")
    for scale in (2, 0.5):
        apart = ((losses(scale) - right) / right).abs().max().item()
        hint = "its step is the same whatever the gradient's scale: take one proportional to it"
        expect(apart > 0.01, f"gradients times {scale} move the loss by {apart:.1e} only", hint)
    return f"gradients times {scale} move the loss by {apart:.0%}"


def check_stale_result(lab, group, seed):
    """Rank 1 comes once rank 0's meanwhile() has run, or late; rank 0 has the whole sum."""
    rank, world = group.rank(), group.size()
    parts = numbers(seed, world, 1000)
    x, calls = parts[rank].clone(), []
    with shared_folder(group) as folder:
        worked = folder / f"rank {rank}"

        def meanwhile():
            calls.append(rank)
            worked.touch()

        before = True
        if rank == 1:
            appears(folder / "rank 0", 2)
            before = (folder / "rank 0").exists()
        result = lab.right_stale_result(x, group, meanwhile)
    before = all(on_every_rank(before, group))
    total, stale = parts.sum(0), parts[rank]
    if isinstance(result, torch.Tensor) and result.shape == total.shape:
        stale = torch.where(result == total, total, stale)  # some of the sum may have been there
    hints = {"read before it was there: wait() on the handle": stale}
    error = expect_close("the sum", result, total, hints=hints)
    same = torch.equal(x, parts[rank])
    expect(same, "x is overwritten", "autograd may still need it: sum a copy")
    found = f"meanwhile() was called {len(calls)} times"
    expect(len(calls) == 1, found, "once, while the sum is under way")
    hint = "start with async_op=True, work, then wait"
    expect(before, "rank 0 waited for rank 1, then worked", hint)
    return f"sum off by {error:.0e}; rank 0's meanwhile() ran before rank 1 came"


def check_adaptive_timing(lab, group, seed):
    """Ranks that start at different times and need different times: all make as many steps."""
    rank, calls, own = group.rank(), 0, short_lived(group, 3)
    slow = 0.0002 + 0.0001 * (seed % 4)

    def step():
        nonlocal calls
        calls += 1
        dist.all_reduce(torch.ones(1), group=own)
        if rank == 1:
            time.sleep(slow)

    time.sleep(0.2 * rank)
    hung, seconds = False, None
    try:
        seconds = lab.right_adaptive_timing(step, own)
    except RuntimeError as problem:
        if "Timed out" not in str(problem):
            raise
        hung = True
    counts, told, waits = zip(*on_every_rank((calls, seconds, hung), group))
    hint = "how often is decided once, from a number all ranks share: the maximum of their clocks"
    found = f"the ranks ran {counts} steps" + ", and one waited in vain" * any(waits)
    expect(len(set(counts)) == 1 and not any(waits), found, hint)
    expect(counts[0] >= 3, f"only {counts[0]} steps", "one to warm up, then enough for a median")
    hint = "return the slowest rank's time, on every rank"
    expect(len(set(told)) == 1, f"the ranks say {told} s", hint)
    found = f"{seconds:.4f} s, and rank 1 needs {slow} s"
    expect(seconds >= slow, found, "take the maximum over the ranks")
    return f"{counts[0]} steps on every rank, {seconds * 1e3:.1f} ms each"


def check_rank_0_clock(lab, group, seed):
    """A pipeline's forward: rank 0 sends and is done, rank 1 comes late, and works on."""
    rank, work, late = group.rank(), 0.1 + 0.01 * (seed % 5), 0.4
    span = [0.0, 0.0]  # begin and end of step(), by a clock that all processes of a machine share

    def step():
        begin = time.monotonic()
        if rank > 0:
            dist.recv(torch.empty(1), rank - 1, group=group)
            time.sleep(work)
        else:
            dist.send(torch.ones(1), 1, group=group)
        span[:] = begin, time.monotonic()

    dist.barrier(group)  # late by this much, not by what a process took to start
    time.sleep(late * rank)
    seconds = lab.right_rank_0_clock(step, group)
    everyone, spans = on_every_rank(seconds, group), on_every_rank(span, group)
    numeric = all(isinstance(s, float) for s in everyone)
    expect(numeric, f"the ranks say {everyone}", "return seconds")
    found = f"the ranks say {[round(s, 3) for s in everyone]} s"
    expect(len(set(everyone)) == 1, found, "all the maximum")
    found = f"{seconds:.3f} s for work of {work:.3f} s"
    hint = "rank 0 stops its clock when it has sent: take the maximum over the ranks"
    expect(seconds >= work, found, hint)
    begins, ends = zip(*spans)
    hint = "the clock ran while rank 1 was still on its way: start together, after a barrier"
    expect(seconds < max(ends) - max(begins) + late / 2, found, hint)
    return f"{seconds:.2f} s on every rank"


CHECKS = {
    "transposed_weights": (check_transposed_weights, 1),
    "copy_without_no_grad": (check_copy_without_no_grad, 1),
    "parallelize_order": (check_parallelize_order, 2),
    "untied_weights": (check_untied_weights, 2),
    "f_per_projection": (check_f_per_projection, 2),
    "returned_tuples": (check_returned_tuples, 2),
    "autograd_kwargs": (check_autograd_kwargs, 1),
    "retain_grad": (check_retain_grad, 1),
    "local_positions": (check_local_positions, 1),
    "local_mask": (check_local_mask, 1),
    "chunk_boundary": (check_chunk_boundary, 1),
    "loss_without_graph": (check_loss_without_graph, 2),
    "adam_hides_scale": (check_adam_hides_scale, 1),
    "stale_result": (check_stale_result, 2),
    "adaptive_timing": (check_adaptive_timing, 2),
    "rank_0_clock": (check_rank_0_clock, 2),
}


# The bugs: an exercise done wrong, in a way of its own


def next_ranks_rows(lab):
    """transposed_weights: each rank holds the rows of the next one."""
    right = lab.right_transposed_weights
    lab.right_transposed_weights = lambda weight, rank, world: right(
        weight, (rank + 1) % world, world
    )


def shared_memory(lab):
    """copy_without_no_grad: the parameter is the value's memory, not a copy of it."""
    lab.right_copy_without_no_grad = lambda parameter, value: setattr(parameter, "data", value)


def weights_after_the_cut(lab):
    """parallelize_order: memory comes after the cut, and the weights never."""

    def right_parallelize_order(model, mesh, plan, weights):
        return parallelize_module(model, mesh, plan).to_empty(device=mesh.device_type)

    lab.right_parallelize_order = right_parallelize_order


def untied(lab):
    """untied_weights: left as parallelize_module leaves them."""
    lab.right_untied_weights = lab.wrong_untied_weights


def no_f(lab):
    """f_per_projection: dx is never summed over the ranks."""
    lab.right_f_per_projection = lambda block, group: None


def g_sums_both_ways(lab):
    """returned_tuples: the gradient is all-reduced too."""
    right = lab.right_returned_tuples

    def right_returned_tuples(out, group):
        if isinstance(out, tuple):
            return right((copy_to_tp_region(out[0], group), *out[1:]), group)
        return right(copy_to_tp_region(out, group), group)

    lab.right_returned_tuples = right_returned_tuples


def tensors_in_the_dict(lab):
    """autograd_kwargs: all keywords go in as one dict, detached, where autograd does not look."""
    lab.right_autograd_kwargs = lambda block, x, **kwargs: lab.Recompute.apply(
        block,
        {k: v.detach() if isinstance(v, torch.Tensor) else v for k, v in kwargs.items()},
        [],
        x,
    )


def no_leaf(lab):
    """retain_grad: requires_grad_() after the cast."""
    lab.right_retain_grad = lab.wrong_retain_grad


def equal_chunks(lab):
    """local_positions: every rank before is taken to hold as many tokens as this one."""
    local = lab.wrong_local_positions
    lab.right_local_positions = lambda length, rank, world: (
        local(length, rank, world) + rank * len(local(length, rank, world))
    )


def no_mask(lab):
    """local_mask: every token sees every other."""
    lab.right_local_mask = lambda start, queries, keys: torch.ones(queries, keys, dtype=torch.bool)


def round_and_round(lab):
    """chunk_boundary: the last token of all is to predict the first."""
    lab.right_chunk_boundary = lambda ids, rank, world: ids.roll(-1, 1).tensor_split(world, 1)[rank]


def local_loss(lab):
    """loss_without_graph: the mean over the rank's own tokens."""

    def right_loss_without_graph(logits, targets, group):
        own = targets.chunk(group.size(), 1)[group.rank()]
        return F.cross_entropy(logits.flatten(0, 1), own.flatten(), ignore_index=IGNORE)

    lab.right_loss_without_graph = right_loss_without_graph


def rmsprop(lab):
    """adam_hides_scale: another optimizer that divides by the gradient's size."""
    lab.right_adam_hides_scale = partial(torch.optim.RMSprop, lr=1e-2)


def no_wait(lab):
    """stale_result: read without waiting."""
    lab.right_stale_result = lab.wrong_stale_result


def every_rank_for_itself(lab):
    """adaptive_timing: runs till its own clock says 0.1 s."""

    def right_adaptive_timing(step, group):
        end, count = time.perf_counter() + 0.1, 0
        while time.perf_counter() < end:
            step()
            count += 1
        return 0.1 / count

    lab.right_adaptive_timing = right_adaptive_timing


def own_clock(lab):
    """rank_0_clock: no maximum over the ranks."""
    lab.right_rank_0_clock = lab.wrong_rank_0_clock


BUGS = [
    next_ranks_rows,
    shared_memory,
    weights_after_the_cut,
    untied,
    no_f,
    g_sums_both_ways,
    tensors_in_the_dict,
    no_leaf,
    equal_chunks,
    no_mask,
    round_and_round,
    local_loss,
    rmsprop,
    no_wait,
    every_rank_for_itself,
    own_clock,
]
