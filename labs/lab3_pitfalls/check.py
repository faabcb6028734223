"""Lab 3's exercises: their cases. mistakes.txt has the wrong answers.

Values and gradients are one device's; bytes, and all else a case notes, the finished lab's.
watching.py has the cases of what one watches in training.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from labs.kit.eye import Most
from labs.kit.inputs import numbers
from labs.kit.judge import checks
from labs.kit.tools import subgroup
from labs.lab3_pitfalls import lesson as finished  # not the learner's
from labs.lab3_pitfalls import watching

SUBGROUP = True  # the group is not the world, and has other rank numbers
IGNORE = finished.IGNORE
CHUNKS = (8, 2), (13, 4), (3, 4)  # tokens, or rows, and ranks: more, and fewer

# ---- Cutting the weights ------------------------------------------------------------------


def see_shard(given, lab, eye):
    shard = eye.call(lab.right_transposed_weights, given, "the shard")
    eye.note("the memory it keeps, in bytes,", Most(shard.untyped_storage().nbytes()))


def transposed_weights(group, seed):
    for rows, world in CHUNKS:
        weight = numbers(seed, rows, 8)
        for rank in range(world):
            given = {"weight": weight, "rank": rank, "world": world}
            right = {"the shard": weight.tensor_split(world)[rank]}
            yield f"rank {rank} of {world}, {rows} rows", partial(see_shard, given), right


def see_copy(value, lab, eye):
    """The same Parameter, trained by an optimizer that had it before."""
    linear, given = nn.Linear(6, 4), value.clone()
    parameter = linear.weight
    nn.init.ones_(parameter)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    lab.right_copy_without_no_grad(parameter, given)
    eye.note("the parameter", parameter)
    trained = parameter.requires_grad and parameter.is_leaf
    eye.note("the parameter is not trained any more", not trained)
    eye.note("parameter and value share memory", parameter.data_ptr() == given.data_ptr())
    linear(torch.ones(3, 6)).sum().backward()
    optimizer.step()
    eye.note("the parameter after a step", parameter)
    eye.note("value is overwritten", not torch.equal(given, value))


def copy_without_no_grad(group, seed):
    for dtype in torch.float32, torch.bfloat16:
        value = numbers(seed, 4, 6).to(dtype)
        right = {"the parameter": value.float()}
        right["the parameter after a step"] = value.float() - 3  # of x's 3 rows of ones
        yield f"{dtype}", partial(see_copy, value), right


def full(x):
    """The whole of a DTensor; any other tensor as it is."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def make_mlp():
    return nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6), nn.LayerNorm(6))


def see_parallelize(weights, x, group, lab, eye):
    """An MLP from meta to a mesh of these ranks."""
    with torch.device("meta"):
        model = make_mlp()
    given = {name: tensor.clone() for name, tensor in weights.items()}
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    mesh = DeviceMesh.from_group(subgroup(group, 10), "cpu")
    model = lab.right_parallelize_order(model, mesh, plan, given)
    parameters = dict(model.named_parameters())
    cut = [name for name, p in parameters.items() if hasattr(p, "full_tensor")]
    eye.note("the list of what is cut", cut)
    if eye.goes_on():  # else some ranks may wait for the others
        whole = {name: full(parameter).detach() for name, parameter in parameters.items()}
        lost = [name for name in whole if not torch.equal(whole[name], weights[name])]
        eye.note("the list of what does not hold its weights", lost)
        eye.note("the output", model(x) + 0)
        eye.note("how many rows a rank holds", len(model[0].weight.to_local()))
    same = all(torch.equal(given.get(name, x), weights[name]) for name in weights)
    eye.note("weights is overwritten", not same)


def parallelize_order(group, seed):
    whole, x = make_mlp(), numbers(seed, 3, 6)
    weights = {name: numbers(seed, *t.shape) for name, t in whole.state_dict().items()}
    whole.load_state_dict(weights)
    right = {"the output": whole(x).detach()}
    yield "an MLP from meta", partial(see_parallelize, weights, x, group), right


class TinyModel(nn.Module):
    """An embedding (v, h) and a head: tied, of equal numbers, or of others."""

    def __init__(self, seed, kind):
        super().__init__()
        self.embed, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
        self.embed.weight = nn.Parameter(numbers(seed, 8, 4))
        self.head.weight = nn.Parameter(numbers(seed + (kind == "apart"), 8, 4))
        if kind == "tied":
            self.head.weight = self.embed.weight

    def get_input_embeddings(self):
        return self.embed

    def get_output_embeddings(self):
        return self.head

    def forward(self, ids):  # (n) -> (n, v)
        return self.head(self.embed(ids).tanh())


def tied_step(model):
    """{name: what it is} of a step's gradients."""
    ids, target = torch.tensor([1, 5, 6, 1]), torch.tensor([5, 6, 1, 0])
    F.cross_entropy(model(ids), target).backward()
    pairs = (("the embedding's", model.embed.weight), ("the head's", model.head.weight))
    return {f"{name} gradient": full(weight.grad) for name, weight in pairs}


def see_tied(kind, seed, group, lab, eye):
    plan = {"embed": RowwiseParallel(input_layouts=Replicate())}
    plan["head"] = ColwiseParallel(output_layouts=Replicate())
    mesh = DeviceMesh.from_group(subgroup(group, 10), "cpu")
    model = lab.right_untied_weights(TinyModel(seed, kind), mesh, plan)
    for name, module in ("embedding", model.embed), ("head", model.head):
        eye.note(f"the {name} is not cut", not hasattr(module.weight, "full_tensor"))
    eye.note("the number of parameters", len(list(model.parameters())))
    if eye.goes_on():
        for name, grad in tied_step(model).items():
            eye.note(name, grad)


def untied_weights(group, seed):
    for kind in "tied", "apart", "of equal numbers":
        yield kind, partial(see_tied, kind, seed, group), tied_step(TinyModel(seed, kind))


# ---- Around a block -----------------------------------------------------------------------


class Attention(nn.Module):
    """Three projections of one x, which comes by name, as in HF's attention."""

    def __init__(self, shards):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(6, 4, bias=False) for _ in shards)
        for linear, shard in zip(self.children(), shards):
            linear.weight = nn.Parameter(shard.clone())

    def forward(self, hidden_states, scale):
        return sum(linear(hidden_states) for linear in self.children()) * scale


class MLP(Attention):
    """The same, but x has another name and comes by position, as in HF's MLP."""

    def forward(self, x, scale):
        return super().forward(x, scale)


def see_enter(kind, shards, x, dy, group, lab, eye):
    block = kind(shards)
    lab.right_f_per_projection(block, group)

    def call(x):
        out = block(x, scale=3) if kind is MLP else block(hidden_states=x, scale=3)
        return out + x[..., :4]  # a residual connection, whose gradient every rank has

    eye.call(call, {"x": x}, "y", [dy], dict(block.named_parameters()))


def f_per_projection(group, seed):
    x = numbers(seed, 2, 5, 6).requires_grad_()
    every_rank = numbers(seed + 1, 2, 3, 4, 6), numbers(seed + 2, 2, 2, 5, 4)  # dy (b, s, o/P)
    dx = sum(3 * dy @ shards.sum(0) for shards, dy in zip(*every_rank))
    shards, dy = (each[group.rank()] for each in every_rank)
    right = {"y": 3 * x.detach() @ shards.sum(0).T + x.detach()[..., :4]}
    right["the gradient of x"] = dx + F.pad(dy, (0, 2))
    for kind in Attention, MLP:
        yield kind.__name__, partial(see_enter, kind, shards, x, dy, group), right


def see_leave(x, rest, dy, group, lab, eye):
    """A block that returns a tuple, if there is a rest, or a tensor."""

    def block(x):
        out = x * 1
        result = lab.right_returned_tuples((out, *rest) if rest else out, group)
        eye.note("the output given is overwritten", not torch.equal(out, x))
        eye.note("a tuple is returned", isinstance(result, tuple))
        if isinstance(result, tuple):
            same = [*map(id, result[1:])] == [*map(id, rest)]
            eye.note("the rest of the tuple is another one", not same)
        return result[0] if isinstance(result, tuple) else result

    eye.call(block, {"x": x}, "y", [dy])


def returned_tuples(group, seed):
    parts, dy = numbers(seed, group.size(), 3, 4, 5), numbers(seed + 1, 3, 4, 5)
    right = {"y": parts.sum(0), "the gradient of x": dy}
    x = parts[group.rank()].requires_grad_()
    for rest in (numbers(seed + 2, 3, 4, 4), "cache"), (None,), ():
        title = f"a tuple of {1 + len(rest)}" if rest else "a tensor"
        yield title, partial(see_leave, x, rest, dy, group), right


def kwargs_step(seed, run, eye=None):
    """{name: gradient} of two blocks that share two computed tensors, as layers do cos and sin.

    run(block, x, **kwargs). kwargs have a number, too.
    """
    linear = nn.Linear(5, 5, bias=False)
    linear.weight.data = numbers(seed + 2, 5, 5)

    def block(x, scale, power, bias):
        return (linear(x) * scale + bias).tanh() ** power

    x, base = numbers(seed, 3, 5).requires_grad_(), numbers(seed + 1, 5).requires_grad_()
    scale, bias = base * 2, base**2
    inner = run(block, x, scale=scale, power=2, bias=bias)
    out = run(block, inner, bias=bias, power=3, scale=scale)
    if eye:
        eye.note("what made the output", type(out.grad_fn).__name__)
    out.sum().backward()
    return {
        "the output": out.detach(),
        "the gradient of x": x.grad,
        "the gradient of a tensor among kwargs": base.grad,
        "the gradient of the block": linear.weight.grad,
    }


def autograd_kwargs(group, seed):
    def see(lab, eye):
        for name, x in kwargs_step(seed, lab.right_autograd_kwargs, eye).items():
            eye.note(name, x if x is not None else "None")

    right = kwargs_step(seed, lambda block, x, **kwargs: block(x, **kwargs))
    yield "two blocks", see, right


def see_stage(seed, dtype, lab, eye):
    """With and without a cast: the .grad of the stage's input after its backward."""
    weight, dy = numbers(seed, 6, 4).to(dtype), numbers(seed + 1, 3, 4).to(dtype)
    hidden = lab.right_retain_grad(numbers(seed + 2, 3, 6), dtype)
    eye.note("the stage's input", hidden)
    eye.note("the stage's input has no graph", not hidden.requires_grad)
    if hidden.requires_grad:
        hidden.matmul(weight).backward(dy)
    grad = hidden.grad if hidden.is_leaf or hidden.retains_grad else None
    eye.note("there is no gradient to send back", grad is None)
    if grad is not None:
        eye.note("the gradient to send back", grad)


def retain_grad(group, seed):
    for dtype in torch.float32, torch.float64, torch.bfloat16:
        yield f"{dtype}", partial(see_stage, seed, dtype)


# ---- Cutting the sequence -----------------------------------------------------------------


def local_positions(group, seed):
    for length, world in CHUNKS:
        for rank, right in enumerate(torch.arange(length).tensor_split(world)):
            given = {"length": length, "rank": rank, "world": world}
            call = "right_local_positions", given, "the positions"
            title = f"{length} tokens, rank {rank} of {world}"
            yield title, call, {"the positions": right}


def local_mask(group, seed):
    for length, world in CHUNKS:
        whole, start = torch.ones(length, length, dtype=torch.bool).tril(), 0
        for rows in whole.tensor_split(world):
            given = {"start": start, "queries": len(rows), "keys": length}
            call = "right_local_mask", given, "the mask"
            yield f"queries from {start} of {length}", call, {"the mask": rows}
            start += len(rows)


def chunk_boundary(group, seed):
    for length, world in CHUNKS:
        ids = torch.randint(1, 99, (2, length), generator=torch.Generator().manual_seed(seed))
        targets = F.pad(ids[:, 1:], (0, 1), value=IGNORE)
        for rank, right in enumerate(targets.tensor_split(world, 1)):
            given = {"ids": ids, "rank": rank, "world": world}
            call = "right_chunk_boundary", given, "the targets"
            title = f"{length} tokens, rank {rank} of {world}"
            yield title, call, {"the targets": right}


def see_loss(logits, targets, group, lab, eye):
    """Nothing is said of messages: to sum losses and counts is right, too."""
    mine, given = logits.clone().requires_grad_(), targets.clone()
    loss = lab.right_loss_without_graph(mine, given, group)
    eye.note("the loss", loss)
    eye.note("the loss has no graph", not loss.requires_grad)
    if loss.requires_grad:
        loss.backward()
        eye.note("the gradient of the rank's logits", mine.grad)
    eye.note("logits is overwritten", not torch.equal(mine, logits))
    eye.note("targets is overwritten", not torch.equal(given, targets))


def loss_without_graph(group, seed):
    """The loss of all tokens, the gradient of the rank's own; ranks with unequal targets."""
    rank, world = group.rank(), group.size()
    logits = numbers(seed, 2, 3 * world, 7).requires_grad_()
    targets = numbers(seed + 1, 2, 3 * world, 7).argmax(-1)
    targets[:, -1], targets[0, 0] = IGNORE, IGNORE
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    loss.backward()
    right = {"the loss": loss.detach()}
    right["the gradient of the rank's logits"] = logits.grad.chunk(world, 1)[rank]
    own = logits.detach().chunk(world, 1)[rank]
    yield f"{world} ranks", partial(see_loss, own, targets, group), right


ALONE = [transposed_weights, copy_without_no_grad, autograd_kwargs, retain_grad]
ALONE += [local_positions, local_mask, chunk_boundary, watching.adam_hides_scale]
EACH = [transposed_weights, copy_without_no_grad, parallelize_order, untied_weights]
EACH += [f_per_projection, returned_tuples, autograd_kwargs, retain_grad]
EACH += [local_positions, local_mask, chunk_boundary, loss_without_graph]
EACH += [watching.adam_hides_scale, watching.stale_result]
EACH += [watching.adaptive_timing, watching.rank_0_clock]
EXERCISES = {cases.__name__: (cases, 1 if cases in ALONE else 2) for cases in EACH}
TOLERANCE = 1e-5
CHECKS, BUGS = checks(EXERCISES, finished, TOLERANCE)
