"""Pitfalls: sixteen ways to get parallel training wrong, each beside the right way, and what one sees of it.

The question: a parallel model runs and its loss looks right. Is it right? Mostly the loss cannot tell. Here
are the places of one training step where people fall, P ranks, s tokens, h features:

    setting up          weights (out, h) cut to (out/P, h)       transposed_weights, copy_without_no_grad
                        parallelize_module                       parallelize_order, untied_weights
    tokens (b, s)       cut to (b, s/P)                          local_positions, chunk_boundary
        v
    x (b, s, h)
        | f                                                      f_per_projection
        v
    attention or MLP    q of s/P tokens, k and v of s            local_mask
        |               run as an autograd.Function              autograd_kwargs
        | g             all-reduce of what the block returns     returned_tuples
        v
    next stage          recv (b, s, h), cast                     retain_grad
        v
    logits (b, s/P, v)  -> one loss of all s tokens              loss_without_graph
        v
    optimizer                                                    adam_hides_scale
    watching it         clocks, numbers read on the way          adaptive_timing, rank_0_clock, stale_result

Each pitfall NAME is a pair: wrong_NAME as people write it, right_NAME, which is the exercise. `try_NAME` lets
both loose, most of them in a real LLaMA (Hugging Face's, tiny, 2 ranks), and measures two things: how far the
loss is from that of one device, and how far the gradient is. The distance between the two is the lesson.
What is told of some of them, and may have been true of older versions, `told_NAME` tries here and now.

What they cost: four raise, one hangs, one misleads a clock, one costs only traffic (2.5 times the backward's
all-reduces), and nine silently train a model that is not the one you meant.

    python labs/lab3_pitfalls.py                          # exercises' checks, then all pitfalls as a table
    python labs/lab3_pitfalls.py --only local_positions
    python labs/lab3_pitfalls.py --plot pitfalls.png      # what the loss shows beside what is wrong
    python labs/lab3_pitfalls.py --inject-bug list

Sources: Megatron-LM (arXiv 1909.08053; 2205.05198 for sequence parallelism), megatron/core/tensor_parallel;
PyTorch's notes "Extending PyTorch", "Autograd mechanics" and torch.distributed; HF transformers'
modeling_llama.py; context parallelism that gathers k and v: Llama 3 (arXiv 2407.21783, section 3.3.2).
"""

import argparse
import importlib.metadata
import importlib.util
import json
import math
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from contextlib import ExitStack, suppress
from datetime import timedelta
from functools import cache, partial
from multiprocessing import connection
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.benchmark import Timer

# torch.distributed.tensor and transformers take seconds to import: only the functions that need them do.

IGNORE = -100  # a label that is no target: HF's and PyTorch's convention


# ---------------------------------------------------------------------------------------------------
# 1. Communication: f and g of tp.py, and a gather of the sequence
# ---------------------------------------------------------------------------------------------------


# Copied from tp.py
def all_reduce(x, group, op=dist.ReduceOp.SUM):
    """The sum (or max) of x over ranks, in a new tensor: autograd may still need the old one."""
    if group.size() == 1:
        return x
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, op, group=group)
    return x


class CopyToTPRegion(torch.autograd.Function):
    """Megatron's f: forward nothing, backward the sum of dx over the ranks."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x

    @staticmethod
    def backward(ctx, grad):
        return all_reduce(grad, ctx.group), None


class ReduceFromTPRegion(torch.autograd.Function):
    """Megatron's g: forward the sum of y over the ranks, backward nothing."""

    @staticmethod
    def forward(ctx, x, group):
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class GatherTokens(torch.autograd.Function):
    """(b, heads, s/P, d) -> (b, heads, s, d); backward: the sum over the ranks, one's own tokens of it."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        parts = [
            torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(group.size())
        ]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, 2)

    @staticmethod
    def backward(ctx, grad):
        return all_reduce(grad, ctx.group).chunk(ctx.group.size(), 2)[ctx.group.rank()], None


copy_to_tp_region = CopyToTPRegion.apply  # (x, group) -> x
reduce_from_tp_region = ReduceFromTPRegion.apply
gather_tokens = GatherTokens.apply


# Copied from tp.py
def shift(labels):
    """The target of each token is the next one; the last has none. (b, s) -> (b, s)"""
    return F.pad(labels[:, 1:], (0, 1), value=IGNORE)


# ---------------------------------------------------------------------------------------------------
# 2. The pitfalls. Cutting the weights
# ---------------------------------------------------------------------------------------------------


def wrong_transposed_weights(weight, rank, world):
    """Cuts columns, as if torch kept a weight as (in, out), and turns the piece over until it fits.

    A square matrix (q_proj; k and v too without GQA) fits without complaint: half of the wrong features, of
    the same size and spread. Any other raises "mat1 and mat2 shapes cannot be multiplied".
    """
    return weight.chunk(world, dim=1)[rank].T.contiguous()


def right_transposed_weights(weight, rank, world):
    """A rank's output features of a linear layer: (out, in) -> (out/P, in), a tensor of its own.

    nn.Linear computes x @ weight.T, so dim 0 of weight is the output (column parallel, in Megatron's words,
    which thinks of x @ A) and dim 1 the input (row parallel). Where P does not divide out, the first ranks
    hold one row more. A view would keep the whole matrix in memory.
    Source: torch.nn.Linear; ColumnParallelLinear in Megatron's tensor_parallel/layers.py.
    """
    # exercise: transposed_weights
    return weight.tensor_split(world, dim=0)[rank].clone()
    # end exercise


def wrong_copy_without_no_grad(parameter, value):
    """Writes into a parameter in the open: "a leaf Variable that requires grad is being used in-place".

    Autograd would have to record a step that overwrites the very thing to be differentiated.
    """
    parameter.copy_(value)


def right_copy_without_no_grad(parameter, value):
    """Puts a shard's values into a parameter that exists: the same Parameter, still trained afterwards.

    A new Parameter would be unknown to an optimizer that already holds the old one, and `.data = value`
    would share memory with value. Source: PyTorch's "Autograd mechanics", in-place operations.
    """
    # exercise: copy_without_no_grad
    with torch.no_grad():
        parameter.copy_(value)
    # end exercise


def wrong_parallelize_order(model, mesh, plan, weights):
    """Cuts the model where it was built and moves it then: the shards have nothing in them to move.

    The other device is here `meta`, the one that every machine has.
    """
    from torch.distributed.tensor.parallel import parallelize_module

    parallelize_module(model, mesh, plan)
    return model.to(mesh.device_type)


def right_parallelize_order(model, mesh, plan, weights):
    """A model on the meta device, cut by plan, on mesh's device, with weights {name: whole tensor} in it.

    Memory on the device, then the weights, then parallelize_module: it is a collective call (rank 0's
    weights are scattered), so every rank has to arrive, and with the weights. torchtitan cuts first and
    fills then, from a checkpoint that knows DTensors; plain weights have to come before.
    """
    from torch.distributed.tensor.parallel import parallelize_module

    # exercise: parallelize_order
    model.to_empty(device=mesh.device_type)
    model.load_state_dict(weights)
    return parallelize_module(model, mesh, plan)
    # end exercise


def wrong_untied_weights(model, mesh, plan):
    """parallelize_module on a model whose head is its embedding: afterwards they are two.

    The first loss is exactly right: both still hold the same numbers. But the embedding's gradient lacks the
    head's part, so from the first step on they drift apart, and both take memory.
    """
    from torch.distributed.tensor.parallel import parallelize_module

    return parallelize_module(model, mesh, plan)


def right_untied_weights(model, mesh, plan):
    """Cuts a model that has get_input_embeddings() and get_output_embeddings(), as HF's do, by plan.

    If their weights were one Parameter before, they are one afterwards; if not, not.
    Source: _allreduce_word_embedding_grads in Megatron's finalize_model_grads.py, for the same thing over
    pipeline stages; tied_parameters.py in Nanotron; TiedLayerSpec in DeepSpeed.
    """
    from torch.distributed.tensor.parallel import parallelize_module

    # exercise: untied_weights
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head.weight is embedding.weight
    parallelize_module(model, mesh, plan)
    if tied:
        head.weight = embedding.weight
    return model
    # end exercise


# ---------------------------------------------------------------------------------------------------
# 3. Around a block: what goes in, what comes out
# ---------------------------------------------------------------------------------------------------


def wrong_f_per_projection(block, group):
    """An f at each column parallel matrix: everything is right, and q, k, v, gate, up reduce one by one.

    5 all-reduces a layer in the backward where 2 would do. No number but the traffic shows it.
    """
    for name, linear in block.named_children():
        if name in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"):
            linear.register_forward_pre_hook(
                lambda module, args: (copy_to_tp_region(args[0], group),)
            )


def right_f_per_projection(block, group):
    """Changes block.forward so that its hidden_states (b, s, h) go through one f, whatever reads them inside.

    HF calls the MLP with hidden_states by position and attention with hidden_states=. The gradients of q, k
    and v add up on the rank first, for nothing, and then one sum over the ranks is enough.
    Source: Megatron-LM (arXiv 1909.08053), figure 3: one f a block, its q, k and v being one matrix.
    """
    inner = block.forward

    def forward(hidden_states, **kwargs):
        # exercise: f_per_projection
        return inner(copy_to_tp_region(hidden_states, group), **kwargs)
        # end exercise

    block.forward = forward


def wrong_returned_tuples(out, group):
    """Sums out[0]: attention's output, but of the MLP, which returns no tuple, the first sequence.

    With a batch of 1 it is right. With more the others silently keep one rank's partial sum.
    """
    dist.all_reduce(out[0].detach(), group=group)
    return out


def right_returned_tuples(out, group):
    """What a block returns, its partial sum (b, s, h) summed over the ranks by g, which has a backward.

    HF's attention returns (output, weights), its MLP the output alone; the rest of a tuple stays as it is,
    and so does the tensor given. Backward: dy as it is, for every rank's part entered the sum once.
    Source: LlamaAttention.forward in modeling_llama.py.
    """
    # exercise: returned_tuples
    if isinstance(out, tuple):
        return reduce_from_tp_region(out[0], group), *out[1:]
    return reduce_from_tp_region(out, group)
    # end exercise


class Recompute(torch.autograd.Function):
    """block(x, **tensors by names, **others), run again in the backward: its activations are not kept.

    Autograd knows the tensors that apply() is given one by one, and no others.
    """

    @staticmethod
    def forward(ctx, block, others, names, x, *tensors):
        ctx.block, ctx.others, ctx.names = block, others, names
        ctx.save_for_backward(x, *tensors)
        return block(x, **others, **dict(zip(names, tensors)))

    @staticmethod
    def backward(ctx, grad):
        x, *tensors = (t.detach().requires_grad_(t.requires_grad) for t in ctx.saved_tensors)
        with torch.enable_grad():
            out = ctx.block(x, **ctx.others, **dict(zip(ctx.names, tensors)))
        torch.autograd.backward(out, grad)  # the block's own parameters get their gradients here
        return None, None, None, x.grad, *(t.grad for t in tensors)


def wrong_autograd_kwargs(block, x, **kwargs):
    """Hands the block's keywords on to apply(): a TypeError, for it does not take them.

    The usual way out, the dict as one argument, runs. But autograd does not look into a dict.
    """
    return Recompute.apply(block, {}, [], x, **kwargs)


def right_autograd_kwargs(block, x, **kwargs):
    """block(x, **kwargs) by way of Recompute, with a gradient for every tensor among kwargs that wants one.

    HF calls its layers by keywords: tensors (position_embeddings' cos and sin, a mask) and plain values.
    Source: "Extending PyTorch", torch.autograd.Function; CheckpointFunction in Megatron's
    tensor_parallel/random.py takes its inputs by position.
    """
    # exercise: autograd_kwargs
    names = [name for name, value in kwargs.items() if isinstance(value, torch.Tensor)]
    tensors = [kwargs.pop(name) for name in names]
    return Recompute.apply(block, kwargs, names, x, *tensors)
    # end exercise


def wrong_retain_grad(received, dtype):
    """Wants a gradient of what came in, and casts: the stage's input is no leaf, its .grad stays None.

    requires_grad_() on it changes nothing, and says nothing. Where the dtypes agree, .to() returns the
    tensor itself and all is well: it breaks with bfloat16.
    """
    return received.requires_grad_().to(dtype).requires_grad_()


def right_retain_grad(received, dtype):
    """What recv filled as the stage's input, in dtype; its .grad after the backward is what to send back.

    Either a tensor inside the graph that keeps its gradient, or a new leaf: both will do.
    Source: Tensor.retain_grad, Tensor.is_leaf; recv_forward in Megatron's pipeline_parallel.
    """
    # exercise: retain_grad
    hidden = received.requires_grad_().to(dtype)
    hidden.retain_grad()
    return hidden
    # end exercise


# ---------------------------------------------------------------------------------------------------
# 4. Cutting the sequence
# ---------------------------------------------------------------------------------------------------


def wrong_local_positions(length, rank, world):
    """Every rank counts its tokens from 0, as HF does when position_ids is left out. Rank 0 is exact."""
    return torch.arange(len(torch.arange(length).tensor_split(world)[rank]))


def right_local_positions(length, rank, world):
    """Positions of a rank's tokens in the whole sequence, (s/P); the first ranks may hold one token more.

    Rotary embeddings turn q and k by their positions, so that attention sees how far apart two tokens are:
    counted from 0 on every rank, tokens s/P apart look like the same one.
    Source: RoFormer (arXiv 2104.09864); get_pos_emb_on_this_cp_rank in Megatron's rotary_pos_embedding.py.
    """
    # exercise: local_positions
    return torch.arange(length).tensor_split(world)[rank]
    # end exercise


def wrong_local_mask(start, queries, keys):
    """The triangle of a sequence that starts at 0: is_causal=True with fewer queries than keys is this.

    A later rank's first query sees the first key and nothing else. The model's own mask, of s/P by s/P, would
    raise (eager adds it to scores of s/P by s); is_causal is silent.
    """
    return torch.ones(queries, keys, dtype=torch.bool).tril()


def right_local_mask(start, queries, keys):
    """Causal mask (queries, keys), True: may see. Query i is token start + i; keys are tokens 0 to keys - 1.

    Source: F.scaled_dot_product_attention on is_causal with sizes that differ (the triangle begins at the top
    left); Llama 3 (arXiv 2407.21783), section 3.3.2: gathered k and v.
    """
    # exercise: local_mask
    return torch.arange(keys) <= torch.arange(start, start + queries)[:, None]
    # end exercise


def wrong_chunk_boundary(ids, rank, world):
    """Cuts, then shifts: each chunk's last token loses its target, P of them and not 1."""
    return shift(ids.tensor_split(world, 1)[rank])


def right_chunk_boundary(ids, rank, world):
    """Targets of a rank's tokens: (b, s) -> (b, s/P), IGNORE for the last token of the whole sequence only.

    The target of a chunk's last token is the next chunk's first.
    Source: HF's own loss shifts its labels inside; with a cut sequence it takes shift_labels instead.
    """
    # exercise: chunk_boundary
    return shift(ids).tensor_split(world, 1)[rank]
    # end exercise


def wrong_loss_without_graph(logits, targets, group):
    """Gathers all logits and takes the loss of them: the right number, and no way back to the model."""
    parts = [torch.empty_like(logits) for _ in range(group.size())]
    dist.all_gather(parts, logits.detach(), group=group)
    return F.cross_entropy(
        torch.cat(parts, 1).flatten(0, 1), targets.flatten(), ignore_index=IGNORE
    )


def right_loss_without_graph(logits, targets, group):
    """Mean loss of all tokens, the same on each rank, from its logits (b, s/P, v) and all targets (b, s).

    Its gradient is that of the rank's own logits. Gathered tensors have no graph, so the rank's own logits go
    back in their place. (tp.py and its like gather nothing: they sum the tokens' losses and the counts. A
    differentiable gather is a trap: every rank computes this loss, and its backward would sum all P of them.)
    Source: torch.distributed.all_gather.
    """
    # exercise: loss_without_graph
    parts = [torch.empty_like(logits) for _ in range(group.size())]
    dist.all_gather(parts, logits.detach(), group=group)
    parts[group.rank()] = logits
    return F.cross_entropy(
        torch.cat(parts, 1).flatten(0, 1), targets.flatten(), ignore_index=IGNORE
    )
    # end exercise


# ---------------------------------------------------------------------------------------------------
# 5. Watching it
# ---------------------------------------------------------------------------------------------------


def wrong_adam_hides_scale(parameters):
    """Adam divides by the gradient's own size: a gradient that is P times too large trains the same."""
    return torch.optim.Adam(parameters, lr=1e-2)


def right_adam_hides_scale(parameters):
    """An optimizer that learns, and whose loss curve betrays a gradient that is wrong by a factor.

    Clipping to a norm hides the factor just as well. Better still: compare the gradient's norm.
    Source: Adam (arXiv 1412.6980), section 2.1: its step does not change when gradients are scaled.
    """
    # exercise: adam_hides_scale
    return torch.optim.SGD(parameters, lr=0.3)
    # end exercise


def wrong_stale_result(x, group, meanwhile):
    """Starts an all-reduce, works, and reads without waiting: what is there by then, mostly one's own x."""
    total = x.clone()
    dist.all_reduce(total, group=group, async_op=True)
    meanwhile()
    return total.clone()


def right_stale_result(x, group, meanwhile):
    """The sum of x over the ranks, x itself untouched, with meanwhile() called while it is under way.

    The functional collectives (and DTensor) return an AsyncCollectiveTensor, which waits by itself when torch
    reads it. c10d's async_op=True returns a handle, and nothing waits for you.
    Source: torch.distributed, "Synchronous and asynchronous collective operations".
    """
    # exercise: stale_result
    total = x.clone()
    work = dist.all_reduce(total, group=group, async_op=True)
    meanwhile()
    work.wait()
    return total
    # end exercise


def wrong_adaptive_timing(step, group):
    """Timer.adaptive_autorange on every rank: each decides by its own clock how often to run the step.

    They never agree to the last one, and step() holds a collective: one waits for ranks that have finished.
    """
    return Timer("step()", globals={"step": step}).adaptive_autorange(max_run_time=1).median


def right_adaptive_timing(step, group, budget=0.1):
    """Median seconds of step(), the slowest rank's of each, the same number on every rank, in about budget s.

    All ranks call step() equally often. A count that is fixed beforehand does it; so does one that is
    computed from a number all ranks share.
    Source: megatron/core/timers.py takes the maximum over ranks; triton's do_bench decides by its own clock
    too.
    """

    def seconds():
        begin = time.perf_counter()
        step()
        return time.perf_counter() - begin

    # exercise: adaptive_timing
    seconds()  # the first one is slow, and ranks come to it at different times
    slowest = all_reduce(torch.tensor(seconds()), group, dist.ReduceOp.MAX).item()
    times = torch.tensor([seconds() for _ in range(1 + int(budget / slowest))])
    return all_reduce(times, group, dist.ReduceOp.MAX).median().item()
    # end exercise


def wrong_rank_0_clock(step, group):
    """Rank 0's own seconds: in a pipeline it sends its activations and stops, the others still work."""
    begin = time.perf_counter()
    step()
    return time.perf_counter() - begin


def right_rank_0_clock(step, group):
    """Seconds from a common start until the last rank has finished step(): the same on every rank.

    Source: megatron/core/timers.py: barrier=True, and the maximum over ranks.
    """
    # exercise: rank_0_clock
    dist.barrier(group)
    begin = time.perf_counter()
    step()
    return all_reduce(torch.tensor(time.perf_counter() - begin), group, dist.ReduceOp.MAX).item()
    # end exercise


# ---------------------------------------------------------------------------------------------------
# 6. Checks of the exercises
# ---------------------------------------------------------------------------------------------------


def numbers(seed, *shape):
    """The same random numbers on every rank."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def on_every_rank(value, group):
    """The values of a Python object on all ranks, in order."""
    values = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


def short_lived(group, seconds):
    """A group of the same ranks whose collectives fail after so many seconds: a hang becomes an exception."""
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
    expect(
        parameter.requires_grad,
        "the parameter is not trained any more",
        "requires_grad has to stay True",
    )
    expect(
        parameter.is_leaf,
        "the parameter is no leaf any more",
        "keep the copy out of its graph: no_grad",
    )
    apart = parameter.data_ptr() != value.data_ptr()
    expect(
        apart,
        "parameter and value share memory",
        "the next step would change both: copy the numbers",
    )
    linear(numbers(seed + 1, 3, 6)).sum().backward()
    optimizer.step()
    expect_close("the parameter after a step", parameter.detach(), value - parameter.grad)
    return "the optimizer still trains it"


def check_parallelize_order(lab, group, seed):
    """An MLP from meta to a mesh of these ranks: its weights, its output, the size of the shards."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

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
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

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
            expect(
                hasattr(module.weight, "full_tensor"),
                f"the {name} is not cut",
                "parallelize_module",
            )
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

    x = numbers(seed, 2, 5, 6).requires_grad_()
    dy = numbers(seed + 9, 2, 5, 4)  # (b, s, out/P)
    mine = (dy * 3) @ shards.sum(0)
    total = all_reduce(mine, group)
    block = Block()
    lab.right_f_per_projection(block, group)
    for call in (lambda: block(x, scale=3), lambda: block(hidden_states=x, scale=3)):
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
        expect(
            calls == 1 and moved == x.nbytes,
            f"{calls} all-reduces, {moved} bytes of {x.nbytes}",
            hint,
        )
    return f"1 all-reduce for 3 projections, dx off by {error:.0e}"


def check_returned_tuples(lab, group, seed):
    """A tuple and a tensor, batch 3: value, gradient, bytes, and the partial sum left as it was."""
    parts, dy = numbers(seed, group.size(), 3, 4, 5), numbers(seed + 1, 3, 4, 5)
    weights, total, mine = numbers(seed + 2, 3, 4, 4), parts.sum(0), parts[group.rank()]
    for name in ("attention", "the MLP"):
        leaf = mine.clone().requires_grad_()
        out = leaf * 1
        with Traffic() as traffic:
            result = lab.right_returned_tuples(
                (out, weights) if name == "attention" else out, group
            )
        if name == "attention":
            whole = isinstance(result, tuple) and len(result) == 2 and result[1] is weights
            expect(whole, "attention's weights are lost", "return a tuple: (the sum, *the rest)")
            result = result[0]
        hints = {"out[0] of a tensor is its first sequence": torch.cat([total[:1], mine[1:]])}
        hints |= {"one rank's part: sum over the ranks": mine}
        error = expect_close(f"{name}'s output", result.detach(), total, hints=hints)
        expect(
            torch.equal(out, mine), f"{name}'s own output is overwritten", "a sum in place: use g"
        )
        expect(
            result.requires_grad,
            f"{name}'s output has no graph",
            "use g, not a bare dist.all_reduce",
        )
        (grad,) = torch.autograd.grad(result, leaf, dy)
        hints = {"P times too large: g's backward sends nothing": dy * group.size()}
        expect_close(f"{name}'s gradient", grad, dy, hints=hints)
        moved = traffic.bytes("all_reduce")
        expect(
            moved == out.nbytes,
            f"{name} moved {moved} bytes, not {out.nbytes}",
            "one all-reduce will do",
        )
    return f"tuple and tensor off by {error:.0e}"


def check_autograd_kwargs(lab, group, seed):
    """Two blocks that share a computed tensor, as layers share cos and sin; a tensor and a number by name."""
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
        expect(
            hidden.dtype == dtype, f"the stage's input is {hidden.dtype}, not {dtype}", "cast it"
        )
        expect_close("the stage's input", hidden.detach(), received.to(dtype))
        expect(hidden.requires_grad, "the stage's input has no graph", "requires_grad_ on a leaf")
        hidden.matmul(weight.to(dtype)).backward(dy.to(dtype))
        got = hidden.grad if hidden.is_leaf or hidden.retains_grad else None
        hint = "after a cast it is no leaf: retain_grad(), or make it one with detach()"
        expect(got is not None, f"no gradient to send back ({dtype})", hint)
        error = expect_close(
            "the gradient to send back", got, dy.to(dtype) @ weight.to(dtype).T, 1e-2
        )
    return f"gradient there in 3 dtypes, off by {error:.0e}"


def check_local_positions(lab, group, seed):
    """Whole sequences, that P divides and that it does not."""
    for length, world in ((8, 2), (5 + seed % 9, 4)):
        for rank in range(world):
            mine = lab.right_local_positions(length, rank, world)
            local = wrong_local_positions(length, rank, world)
            right = torch.arange(length).tensor_split(world)[rank]
            chunk = -(-length // world)
            hints = {"counted from 0 on every rank": local}
            hints |= {"the ranks before hold chunks of two sizes": local + rank * (length // world)}
            hints |= {"the ranks before hold chunks of two sizes, so": local + rank * chunk}
            expect_close(
                f"positions of rank {rank} of {world}, {length} tokens,", mine, right, hints=hints
            )
    return "each token at its own place"


def check_local_mask(lab, group, seed):
    """All chunks of a sequence, of different lengths, laid under each other: one triangle."""
    for length, world in ((8, 2), (7 + seed % 5, 3)):
        for rows in torch.arange(length).tensor_split(world):
            start, queries = rows[0].item(), len(rows)
            mine = lab.right_local_mask(start, queries, length)
            hint = "True: may see; F.scaled_dot_product_attention takes that, or numbers to add"
            expect(
                isinstance(mine, torch.Tensor) and mine.dtype == torch.bool,
                "the mask is not bool",
                hint,
            )
            right = torch.ones(length, length).tril()[rows]
            local = wrong_local_mask(start, queries, length)
            hints = {"the triangle starts at the rank's first token": local}
            hints |= {"a token sees itself as well": torch.ones(length, length).tril(-1)[rows]}
            hints |= {"True is: may see": 1 - right}
            hints = {text: mask.float() for text, mask in hints.items()}
            expect_close(f"the mask of queries from {start}", mine.float(), right, hints=hints)
    return "one triangle over all chunks"


def check_chunk_boundary(lab, group, seed):
    """The targets of all chunks beside each other are those of one device."""
    for length, world in ((8, 2), (7 + seed % 5, 3)):
        ids = torch.randint(1, 99, (2, length), generator=torch.Generator().manual_seed(seed))
        before = ids.clone()
        for rank in range(world):
            mine = lab.right_chunk_boundary(ids, rank, world)
            right = F.pad(ids[:, 1:], (0, 1), value=IGNORE).tensor_split(world, 1)[rank]
            local = wrong_chunk_boundary(ids, rank, world)
            hints = {"each chunk's last token has a target too: shift first, cut then": local}
            hints |= {
                "these are the tokens, not their successors": ids.tensor_split(world, 1)[rank]
            }
            around = ids.roll(-1, 1).tensor_split(world, 1)[rank]
            hints |= {"the last token of all has no target: IGNORE": around}
            hints = {text: t.float() for text, t in hints.items()}
            expect(isinstance(mine, torch.Tensor), "no targets", "return them")
            expect_close(
                f"targets of rank {rank} of {world}", mine.float(), right.float(), hints=hints
            )
        expect(torch.equal(ids, before), "the tokens are overwritten", "the model still needs them")
    return "one target lost in all, on 2 and 3 ranks"


def check_loss_without_graph(lab, group, seed):
    """The loss of all tokens, and the gradient of the rank's own, with different numbers of targets."""
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
    hints |= {
        "a mean of means: ranks have different numbers of targets": all_reduce(alone, group) / world
    }
    error = expect_close("the loss", loss, right.detach(), hints=hints)
    hint = "gathered tensors have no graph: put the rank's own logits back among them"
    expect(loss.requires_grad, "the loss has no graph", hint)
    loss.backward()
    grad = whole.grad.chunk(world, 1)[rank]
    hints = {
        "P times too large: P ranks compute this loss and the gather's backward sums them": grad
        * world
    }
    expect_close("the gradient of the rank's logits", chunk.grad, grad, hints=hints)
    return f"loss off by {error:.0e}, with its gradient"


def check_adam_hides_scale(lab, group, seed):
    """A small model, its gradients right, doubled and halved: the loss falls, and the curves part."""
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
        hint = "its step is the same whatever the gradient's scale: take one that is proportional to it"
        expect(apart > 0.01, f"gradients times {scale} move the loss by {apart:.1e} only", hint)
    return f"gradients times {scale} move the loss by {apart:.0%}"


def check_stale_result(lab, group, seed):
    """Rank 1 comes late: rank 0's meanwhile() must have run before, and its sum be whole all the same."""
    rank, world = group.rank(), group.size()
    parts = numbers(seed, world, 1000)
    x, done = parts[rank].clone(), []
    dist.barrier(group)
    begin = time.perf_counter()
    if rank == 1:
        time.sleep(0.5)
    result = lab.right_stale_result(x, group, lambda: done.append(time.perf_counter() - begin))
    total, stale = parts.sum(0), parts[rank]
    if isinstance(result, torch.Tensor) and result.shape == total.shape:
        stale = torch.where(result == total, total, stale)  # some of the sum may have been there
    hints = {"read before it was there: wait() on the handle": stale}
    error = expect_close("the sum", result, total, hints=hints)
    expect(
        torch.equal(x, parts[rank]), "x is overwritten", "autograd may still need it: sum a copy"
    )
    expect(
        len(done) == 1,
        f"meanwhile() was called {len(done)} times",
        "once, while the sum is under way",
    )
    early = rank == 1 or done[0] < 0.4
    expect(
        early, f"meanwhile() ran {done[0]:.1f} s late", "start with async_op=True, work, then wait"
    )
    return f"sum off by {error:.0e}; meanwhile() after {done[0]:.2f} s, before rank 1 came"


def check_adaptive_timing(lab, group, seed):
    """Ranks that start at different times and need different times: all make the same number of steps."""
    rank, calls, own = group.rank(), 0, short_lived(group, 3)
    slow = 0.002 + 0.001 * (seed % 4)

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
    everyone = on_every_rank((calls, seconds), group)
    counts = [count for count, _ in everyone]
    hint = "how often is decided once, from a number all ranks share: the maximum of their clocks"
    waits = ", and a rank waited in vain" if hung else ""
    expect(len(set(counts)) == 1 and not hung, f"the ranks ran {counts} steps{waits}", hint)
    expect(counts[0] >= 3, f"only {counts[0]} steps", "one to warm up, then enough for a median")
    told = [seconds for _, seconds in everyone]
    expect(
        len(set(told)) == 1,
        f"the ranks say {told} s",
        "return the slowest rank's time, on every rank",
    )
    expect(
        seconds >= slow,
        f"{seconds:.4f} s, and rank 1 needs {slow} s",
        "take the maximum over the ranks",
    )
    return f"{counts[0]} steps on every rank, {seconds * 1e3:.1f} ms each"


def check_rank_0_clock(lab, group, seed):
    """A pipeline's forward: rank 0 sends and is done, the last rank works on; and rank 1 comes late."""
    rank, world = group.rank(), group.size()
    work, late = 0.1 + 0.01 * (seed % 5), 0.4

    def step():
        if rank > 0:
            dist.recv(torch.empty(1), rank - 1, group=group)
            time.sleep(work)
        if rank < world - 1:
            dist.send(torch.ones(1), rank + 1, group=group)

    dist.barrier(group)  # late by this much, not by what a process took to start
    time.sleep(late * (rank == 1))
    everyone = on_every_rank(lab.right_rank_0_clock(step, group), group)
    expect(
        all(isinstance(s, float) for s in everyone), f"the ranks say {everyone}", "return seconds"
    )
    expect(
        len(set(everyone)) == 1,
        f"the ranks say {[round(s, 3) for s in everyone]} s",
        "all the maximum",
    )
    seconds, least = everyone[0], work * (world - 1)
    hint = "rank 0 stops its clock when it has sent: take the maximum over the ranks"
    expect(seconds >= least, f"{seconds:.3f} s for work of {least:.3f} s", hint)
    hint = "the clock ran while rank 1 was still on its way: start together, after a barrier"
    expect(seconds < late, f"{seconds:.3f} s for work of {least:.3f} s", hint)
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


# ---------------------------------------------------------------------------------------------------
# 7. The pitfalls let loose: in a tiny LLaMA of Hugging Face's where there is something to train
# ---------------------------------------------------------------------------------------------------


def tiny_llama(seed):
    """Two layers, tied weights, as many KV heads as heads: q, k and v are square, as in the first LLaMA."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
    }
    sizes |= {"vocab_size": 256, "tie_word_embeddings": True, "initializer_range": 0.1}
    return LlamaForCausalLM(LlamaConfig(**sizes))


def tokens(seed):
    """(b, s) = (2, 64)"""
    return torch.randint(0, 256, (2, 64), generator=torch.Generator().manual_seed(seed))


@cache
def one_device(seed):
    """Loss and {name: gradient} of the untouched model."""
    model, ids = tiny_llama(seed), tokens(seed)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


def deviation(model, loss, group, seed):
    """What a wrong or right way did to a training step: {"loss", "error", "seen"}, relative to one device.

    error: ||gradient - one device's|| / ||one device's|| over all parameters and ranks, shards held against
    the part of the whole that they are.
    """
    right_loss, gradients = one_device(seed)
    sums = torch.zeros(2)
    for name, parameter in model.named_parameters():
        if name in gradients:  # not: a head that on one device is the embedding
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            grad = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
            right = gradients[name]
            for dim in range(grad.dim()):
                if grad.shape[dim] != right.shape[dim]:
                    right = right.chunk(group.size(), dim)[group.rank()]
            sums += torch.stack([(grad - right).square().sum(), right.square().sum()])
    wrong, right = all_reduce(sums, group).tolist()
    error = math.sqrt(wrong / right)
    return {
        "loss": abs(loss - right_loss) / right_loss,
        "error": error,
        "seen": f"gradient {error:.2g} off",
    }


def tensor_parallel_step(
    group,
    seed,
    cut=right_transposed_weights,
    enter=right_f_per_projection,
    leave=right_returned_tuples,
):
    """One step of the LLaMA cut as in tp.py, head whole; returns (model, loss, the backward's Traffic)."""
    model, ids = tiny_llama(seed), tokens(seed)
    rank, world = group.rank(), group.size()
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for linear in (attention.q_proj, attention.k_proj, attention.v_proj):
            linear.weight = nn.Parameter(cut(linear.weight.detach(), rank, world))
        for linear in (mlp.gate_proj, mlp.up_proj):
            linear.weight = nn.Parameter(
                right_transposed_weights(linear.weight.detach(), rank, world)
            )
        for linear in (attention.o_proj, mlp.down_proj):  # row parallel
            linear.weight = nn.Parameter(linear.weight.detach().chunk(world, dim=1)[rank].clone())
        for block in (attention, mlp):
            enter(block, group)
            block.register_forward_hook(lambda block, args, out: leave(out, group))
    loss = model(input_ids=ids, labels=ids).loss
    with Traffic() as traffic:
        loss.backward()
    return model, loss.item(), traffic


def sequence_parallel_step(
    group,
    seed,
    positions=right_local_positions,
    mask=right_local_mask,
    targets=right_chunk_boundary,
    mean_loss=right_loss_without_graph,
):
    """One step of the LLaMA with its sequence cut, k and v gathered in attention; returns (model, loss)."""
    from transformers import AttentionInterface

    model, ids = tiny_llama(seed), tokens(seed)
    rank, world = group.rank(), group.size()

    def attention(module, q, k, v, attention_mask, scaling, **kwargs):  # q (b, heads, s/P, d)
        k, v = gather_tokens(k, group), gather_tokens(v, group)  # (b, kv heads, s, d)
        seen = mask(rank * q.shape[2], q.shape[2], k.shape[2])
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=seen, scale=scaling, enable_gqa=True
        )
        return out.transpose(1, 2).contiguous(), None

    AttentionInterface.register("gathered", attention)
    model.set_attn_implementation("gathered")
    mine = ids.chunk(world, dim=1)[rank]  # (b, s/P)
    own = positions(ids.shape[1], rank, world)[None]
    logits = model(input_ids=mine, position_ids=own).logits  # (b, s/P, v)
    loss = mean_loss(
        logits, torch.cat([targets(ids, r, world) for r in range(world)], dim=1), group
    )
    loss.backward()
    for parameter in model.parameters():  # whole on every rank, but each saw its own tokens only
        parameter.grad = all_reduce(parameter.grad, group)
    return model, loss.item()


def try_transposed_weights(way, group, seed):
    """In q, k and v, which are square here; and gate_proj, which is not."""
    model, loss, _ = tensor_parallel_step(group, seed, cut=way)
    seen = deviation(model, loss, group, seed)
    try:
        F.linear(torch.ones(1, 64), way(torch.ones(192, 64), group.rank(), group.size()))
    except RuntimeError:
        seen["seen"] += "; (192, 64) raises"
    return seen


def try_copy_without_no_grad(way, group, seed):
    """No ranks needed."""
    parameter, value = nn.Parameter(numbers(seed, 4, 6)), numbers(seed + 1, 4, 6)
    way(parameter, value)
    error = (parameter.detach() - value).norm() / value.norm()
    return plain(error, "parameter {:.2g} off")


def plain(error, seen):
    """What is seen where no loss is at hand."""
    return {"loss": None, "error": float(error), "seen": seen.format(float(error))}


def try_parallelize_order(way, group, seed):
    """The weights of an MLP after it."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6))
    weights = {name: numbers(seed, *t.shape) for name, t in model.state_dict().items()}
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    model = way(model, DeviceMesh.from_group(group, "cpu"), plan, weights)
    weight = model[0].weight.full_tensor().detach()
    return plain((weight - weights["0.weight"]).norm() / weight.norm(), "weights {:.2g} off")


def try_untied_weights(way, group, seed):
    """Embedding and head of the LLaMA cut by the vocabulary."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    model, ids = tiny_llama(seed), tokens(seed)
    plan = {"model.embed_tokens": RowwiseParallel(input_layouts=Replicate())}
    plan["lm_head"] = ColwiseParallel(output_layouts=Replicate())
    model = way(model, DeviceMesh.from_group(group, "cpu"), plan)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    seen = deviation(model, loss.item(), group, seed)
    tables = len({id(model.lm_head.weight), id(model.model.embed_tokens.weight)})
    return seen | {"seen": f"{seen['seen']}; {tables} of (v, h) kept"}


def try_f_per_projection(way, group, seed):
    """What the backward of the LLaMA sends: 2 all-reduces a layer are needed."""
    model, loss, traffic = tensor_parallel_step(group, seed, enter=way)
    seen = deviation(model, loss, group, seed)
    calls = traffic.ops.get("all_reduce", [0])[0] / len(model.model.layers)
    text = f"{calls:g} all-reduces a layer; {seen['seen']}"
    return seen | {
        "error": max(calls / 2 - 1, seen["error"]),
        "gradient": seen["error"],
        "seen": text,
    }


def try_returned_tuples(way, group, seed):
    """In both blocks of the LLaMA, batch 2."""
    model, loss, _ = tensor_parallel_step(group, seed, leave=way)
    return deviation(model, loss, group, seed)


def try_autograd_kwargs(way, group, seed):
    """No ranks needed: a block with a learned tensor among its keywords."""
    x, scale = numbers(seed, 3, 5), numbers(seed + 1, 5).requires_grad_()
    way(lambda x, scale: (x * scale).tanh(), x, scale=scale).sum().backward()
    (right,) = torch.autograd.grad((x * scale).tanh().sum(), scale)
    return plain((scale.grad - right).norm() / right.norm(), "gradient {:.2g} off")


def try_retain_grad(way, group, seed):
    """No ranks needed: what recv filled is a plain tensor. The stage computes in bfloat16."""
    received, weight = numbers(seed, 3, 6), numbers(seed + 1, 6, 4).bfloat16()
    hidden = way(received, torch.bfloat16)
    (hidden @ weight).sum().backward()
    if not hidden.is_leaf and not hidden.retains_grad:
        return {"loss": None, "error": 1.0, "seen": "silent; .grad is None: nothing to send back"}
    right = weight.sum(1).expand(3, 6)
    return plain((hidden.grad - right).norm() / right.norm(), "gradient {:.2g} off")


def try_local_positions(way, group, seed):
    """In the LLaMA with its sequence cut."""
    return deviation(*sequence_parallel_step(group, seed, positions=way), group, seed)


def try_local_mask(way, group, seed):
    """In the LLaMA with its sequence cut."""
    return deviation(*sequence_parallel_step(group, seed, mask=way), group, seed)


def try_chunk_boundary(way, group, seed):
    """In the LLaMA with its sequence cut; and how many tokens are learned."""
    seen = deviation(*sequence_parallel_step(group, seed, targets=way), group, seed)
    ids = tokens(seed)
    learned = sum((way(ids, r, group.size()) != IGNORE).sum().item() for r in range(group.size()))
    return seen | {"seen": f"{seen['seen']}; {learned} of {ids.numel() - len(ids)} targets"}


def try_loss_without_graph(way, group, seed):
    """In the LLaMA with its sequence cut."""
    losses = []

    def mean_loss(*args):
        loss = way(*args)
        losses.append(loss.item())
        return loss

    try:
        return deviation(*sequence_parallel_step(group, seed, mean_loss=mean_loss), group, seed)
    except RuntimeError as problem:  # from loss.backward(): there is no gradient at all
        right, _ = one_device(seed)
        seen = f"RuntimeError: {problem}"
        return {"loss": abs(losses[0] - right) / right, "error": 1.0, "seen": seen}


def try_adam_hides_scale(way, group, seed):
    """No ranks needed: ten steps of the LLaMA with right gradients, and with gradients times 2.

    loss: how far the two loss curves are apart at most. error: the gradient's, 1, if that went unnoticed.
    """

    def losses(scale):
        model, ids = tiny_llama(seed), tokens(seed)
        optimizer, seen = way(model.parameters()), []
        for _ in range(10):
            loss = model(input_ids=ids, labels=ids).loss
            optimizer.zero_grad()
            loss.backward()
            for parameter in model.parameters():
                parameter.grad *= scale
            optimizer.step()
            seen.append(loss.detach())
        return torch.stack(seen)

    right, double = losses(1), losses(2)
    apart = ((double - right) / right).abs().max().item()
    noticed = apart > 0.01
    seen = f"gradients x 2: loss curves part by {apart:.2g}"
    return {"loss": apart, "error": 0.0 if noticed else 1.0, "seen": seen}


def try_stale_result(way, group, seed):
    """Rank 1 comes 0.2 s late; what the others read."""
    parts = numbers(seed, group.size(), 1000)
    dist.barrier(group)
    time.sleep(0.2 * (group.rank() == 1))
    got, right = way(parts[group.rank()], group, lambda: None), parts.sum(0)
    return plain((got - right).norm() / right.norm(), "the sum is {:.2g} off")


def try_adaptive_timing(way, group, seed):
    """A step that is one all-reduce; rank 1 comes 0.2 s late, as ranks do. A rank waits 2 s at most."""
    own, calls, begin = short_lived(group, 2), 0, time.perf_counter()

    def step():
        nonlocal calls, begin
        calls, begin = calls + 1, time.perf_counter()
        dist.all_reduce(torch.ones(1000), group=own)

    time.sleep(0.2 * (group.rank() == 1))
    try:
        way(step, own)
        waited = 0.0
    except RuntimeError:  # gloo's timeout
        waited = time.perf_counter() - begin
    counts, waits = zip(*on_every_rank((calls, waited), group))
    seen = f"{' and '.join(map(str, counts))} steps"
    if max(waits):
        seen += f"; rank {waits.index(max(waits))} waited {max(waits):.1f} s in vain"
    return {"loss": None, "error": float(max(counts) - min(counts)), "seen": seen}


def try_rank_0_clock(way, group, seed):
    """Two stages: rank 0 sends at once, rank 1 receives and works for 0.2 s."""

    def step():
        if group.rank() == 0:
            dist.send(torch.ones(1000), 1, group=group)
        else:
            dist.recv(torch.empty(1000), 0, group=group)
            time.sleep(0.2)

    seconds = on_every_rank(way(step, group), group)[0]
    seen = f"rank 0 says {seconds * 1e3:.0f} of 200 ms"
    return {"loss": None, "error": max(0.0, 1 - seconds / 0.2), "seen": seen}


def told_autograd_kwargs(group):
    """apply() takes no keywords at all"""

    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, factor):
            return x * factor

    try:
        Scale.apply(torch.ones(1), factor=2)
    except TypeError as problem:
        return True, str(problem)
    return False, "it takes those that forward() names, not **kwargs"


def told_returned_tuples(group):
    """LLaMA's attention returns 3 things"""
    model, seen = tiny_llama(0), []
    model.model.layers[0].self_attn.register_forward_hook(
        lambda module, args, out: seen.append(len(out))
    )
    model(tokens(0))
    return seen == [3], f"it returns {seen[0]}"


def told_retain_grad(group):
    """requires_grad_() raises if not a leaf"""
    inner = torch.ones(1, requires_grad=True) * 2
    try:
        inner.requires_grad_()
    except RuntimeError as problem:
        return True, str(problem)
    return False, "silent, without effect; only requires_grad_(False) raises"


def told_stale_result(group):
    """.item() of an AsyncCollectiveTensor is stale"""
    from torch.distributed._functional_collectives import all_reduce as functional_all_reduce

    dist.barrier(group)
    time.sleep(0.2 * (group.rank() == 1))
    total = functional_all_reduce(torch.ones(1), "sum", group).item()
    totals = on_every_rank(total, group)
    return min(totals) < group.size(), f"it waits: {totals[0]:g} of {group.size()}"


def told_parallelize_order(group):
    """it hangs on a model that is not on the device"""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(6, 8))
    begin = time.perf_counter()
    try:
        parallelize_module(model, DeviceMesh.from_group(group, "cpu"), {"0": ColwiseParallel()})
    except RuntimeError as problem:
        return True, str(problem)
    return False, f"back after {time.perf_counter() - begin:.2f} s, from meta to a CPU's mesh"


PITFALLS = {  # name: (both ways let loose, ranks that takes, what is told of it)
    "transposed_weights": (try_transposed_weights, 2, None),
    "copy_without_no_grad": (try_copy_without_no_grad, 1, None),
    "parallelize_order": (try_parallelize_order, 2, told_parallelize_order),
    "untied_weights": (try_untied_weights, 2, None),
    "f_per_projection": (try_f_per_projection, 2, None),
    "returned_tuples": (try_returned_tuples, 2, told_returned_tuples),
    "autograd_kwargs": (try_autograd_kwargs, 1, told_autograd_kwargs),
    "retain_grad": (try_retain_grad, 1, told_retain_grad),
    "local_positions": (try_local_positions, 2, None),
    "local_mask": (try_local_mask, 2, None),
    "chunk_boundary": (try_chunk_boundary, 2, None),
    "loss_without_graph": (try_loss_without_graph, 2, None),
    "adam_hides_scale": (try_adam_hides_scale, 1, None),
    "stale_result": (try_stale_result, 2, told_stale_result),
    "adaptive_timing": (try_adaptive_timing, 2, None),
    "rank_0_clock": (try_rank_0_clock, 2, None),
}
RIGHT, WRONG = 1e-5, 1e-4  # error of a right way at most, of a wrong way at least


def try_all(group, answers, bug, names, seed):
    """On this rank: {name: {"wrong", "right": what was seen, "told": (so it is, what is seen)}}."""
    lab, rows = load(answers), {}
    if bug:
        globals()[bug](lab)
    for name in names:
        trial, ranks, told = PITFALLS[name]
        row = rows[name] = {}
        for kind in ("wrong", "right"):
            own = short_lived(group, 20)  # what goes wrong in it stays in it
            if group.rank() < ranks:
                try:
                    row[kind] = trial(getattr(lab, f"{kind}_{name}"), own, seed)
                except Exception as problem:  # what the wrong way is there to show
                    first = str(problem).partition("\n")[0]
                    row[kind] = {
                        "loss": None,
                        "error": None,
                        "seen": f"{type(problem).__name__}: {first}",
                    }
        if told:
            row["told"] = told(short_lived(group, 20))
    return rows


def size(seen):
    """How wrong it went; what raised went wrong altogether."""
    return math.inf if seen["error"] is None else seen["error"]


def verdict(row):
    """Of {"wrong", "right"}: "ok", "right way fails", or "no longer": the wrong way does no harm here."""
    if not size(row["right"]) <= RIGHT:
        return "right way fails"
    return "ok" if size(row["wrong"]) >= WRONG else "no longer"


def short(text, width=48):
    """A text that fits a table's column."""
    return text if len(text) <= width else text[: width - 3] + "..."


def experiment(args):
    """Let both ways of each pitfall loose, and print what is seen of them."""
    names = [args.only] if args.only else list(PITFALLS)
    world = max(2 if PITFALLS[name][2] else PITFALLS[name][1] for name in names)
    ranks = on_ranks(world, try_all, __file__, args.inject_bug, names, args.seed, timeout=120)
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
    pitfalls, failed = {}, []
    rows, told = [["pitfall", "ranks", "the wrong way", "its loss", "the right way"]], []
    for name in names:
        row = {}
        for kind in ("wrong", "right"):  # of the rank that is worst off
            seen = [rank[name][kind] for rank in ranks if kind in rank[name]]
            row[kind] = max(seen, key=size)
        row["verdict"] = verdict(row)
        loss, seen = row["wrong"]["loss"], row["wrong"]["seen"]
        if row["verdict"] == "no longer":
            seen = f"no longer in torch {versions['torch']}: {seen}"
        if row["verdict"] == "right way fails":
            failed.append(name)
        right = ("" if name not in failed else "FAIL: ") + row["right"]["seen"]
        off = "" if loss is None else f"{loss:.1g} off"
        rows.append([name, PITFALLS[name][1], short(seen), off, short(right)])
        if "told" in ranks[0][name]:
            so, seen = row["told"] = ranks[0][name]["told"]
            told.append(
                [name, PITFALLS[name][2].__doc__, "so it is" if so else "not so", short(seen, 58)]
            )
        pitfalls[name] = row
    print_table(*rows)
    if told:
        here = f"with torch {versions['torch']}, transformers {versions['transformers']}"
        print_table(["pitfall", "as it is told", "", here], *told)
    return {"versions": versions, "pitfalls": pitfalls, "failed": failed}


def draw(results, path):
    """The picture: for each pitfall with numbers, how far the loss is off beside how far the gradient is."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    floor = 1e-8  # float32: below it nothing can be seen
    rows = []
    for name, row in results.get("pitfalls", {}).items():
        wrong = row["wrong"]
        if (
            wrong["loss"] is not None and "gradient" not in wrong
        ):  # f_per_projection costs, it is not wrong
            rows.append(
                (name, max(wrong["loss"], floor), 1.0 if wrong["error"] is None else wrong["error"])
            )
    rows.sort(key=lambda row: row[2] / row[1])
    figure, axis = pyplot.subplots(figsize=(9, 1.8 + 0.45 * len(rows)))
    for place, (_, loss, error) in enumerate(rows):
        axis.plot([loss, error], [place, place], color="#999999", lw=2, zorder=1)
    places = range(len(rows))
    axis.scatter(
        [loss for _, loss, _ in rows], places, s=70, color="#0072B2", label="the loss is off by"
    )
    axis.scatter(
        [e for *_, e in rows],
        places,
        s=70,
        color="#D55E00",
        marker="D",
        label="the gradient is off by",
    )
    axis.set_yticks(places, [name for name, *_ in rows])
    axis.set(
        xscale="log", xlim=(floor / 2, 10), xlabel="relative to one device (1e-8 stands for exact)"
    )
    axis.set_title("What the loss would have shown, and what is wrong", loc="left")
    axis.set_axisbelow(True)
    axis.grid(axis="x", color="#dddddd", lw=0.5)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=2, frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


# ---------------------------------------------------------------------------------------------------
# 8. Sabotage: an exercise done wrong, in a way of its own
# ---------------------------------------------------------------------------------------------------


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
        from torch.distributed.tensor.parallel import parallelize_module

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
    lab.right_autograd_kwargs = lambda block, x, **kwargs: Recompute.apply(
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


# ---------------------------------------------------------------------------------------------------
# Harness: the same in every lab
# ---------------------------------------------------------------------------------------------------


# Copied from labs/lab6_lora.py
class Unusable(Exception):
    """An argument that cannot work; its message says what would. Ends as `error: ...`, exit 2."""


# Copied from labs/lab6_lora.py
class Wrong(Exception):
    """What a check found wrong with an exercise, and a hint at what usually causes it."""

    def __init__(self, found, hint=""):
        super().__init__(found, hint)
        self.found, self.hint = found, hint


# Copied from labs/lab6_lora.py
def expect(holds, found, hint=""):
    """Raise Wrong where something does not hold."""
    if not holds:
        raise Wrong(found, hint)


# Copied from labs/lab6_lora.py
def expect_close(name, mine, right, tolerance=1e-5, hints=None):
    """Raise Wrong unless ||mine - right|| <= tolerance ||right||; returns the relative error.

    hints {text: tensor}: if mine is that tensor instead, the text is the hint.
    """
    expect(
        isinstance(mine, torch.Tensor),
        f"{name} is {type(mine).__name__}, not a tensor",
        "return the result",
    )
    expect(
        mine.shape == right.shape, f"{name} has shape {tuple(mine.shape)}, not {tuple(right.shape)}"
    )

    def error(other):
        apart = torch.linalg.vector_norm((mine - other).double())
        return (apart / torch.linalg.vector_norm(other.double()).clamp(min=1e-30)).item()

    known = [text for text, other in (hints or {}).items() if other.shape == right.shape]
    known = [text for text in known if error(hints[text]) <= tolerance < error(right)]
    hint = known[0] if known else ""
    expect(
        error(right) <= tolerance,
        f"{name} is off by {error(right):.1e} (at most {tolerance:.0e})",
        hint,
    )
    return error(right)


# Copied from labs/lab6_lora.py
class Traffic(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts what this rank's collectives and sends move while inside it: {op: [calls, bytes]}.

    Bytes of the whole message (all_gather: what comes out; reduce_scatter: what goes in; all_to_all: the
    rank's own input).
    """

    OPS = {"allreduce": "all_reduce", "allgather": "all_gather", "reducescatter": "reduce_scatter"}
    OPS |= {"alltoall": "all_to_all", "send": "send", "broadcast": "broadcast", "reduce": "reduce"}
    OPS |= {
        "gather": "gather",
        "scatter": "scatter",
    }  # a name starts with one of these, the first that fits

    def __init__(self):
        super().__init__()
        self.ops = {}

    def bytes(self, op):
        return self.ops.get(op, [0, 0])[1]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func._opname.replace("_", "")
        op = next((op for start, op in self.OPS.items() if name.startswith(start)), None)
        if op and func.namespace in ("c10d", "_c10d_functional"):
            tensors = [
                [t for t in tree_leaves(x) if isinstance(t, torch.Tensor)] for x in (*args, out)
            ]
            sizes = [sum(t.nbytes for t in ts) for ts in tensors]
            if op == "all_to_all":  # c10d names the output before the input
                sizes = [sizes[1 if func.namespace == "c10d" else 0]]
            entry = self.ops.setdefault(op, [0, 0])
            entry[0] += 1
            entry[1] += max(sizes)
        return out


# Copied from labs/lab6_lora.py
def load(path):
    """The file of a lab, or of a learner's answers to it, as a module."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# Copied from labs/lab6_lora.py
def rank_main(rank, world, rendezvous, pipe, limit, function, args):
    """A rank's process: join the others, run function(group, *args), send back what it returns."""
    os.dup2(
        os.open(os.devnull, os.O_WRONLY), 2
    )  # gloo complains there about ranks that others' errors ended
    signal.alarm(limit)  # its parent ends it long before; this is for a parent that was killed
    torch.set_num_threads(1)
    # torch 2.13 renames all_gather_into_tensor and reduce_scatter_tensor; 2.11 knows only these names
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    store = dist.FileStore(rendezvous, world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    try:
        answer = True, function(dist.group.WORLD, *args)
    except Wrong as wrong:
        answer = False, wrong
    except NotImplementedError as todo:
        answer = False, Wrong(f"not done yet: {todo}")
    except BaseException as problem:  # whatever a learner's code may raise
        frames = traceback.extract_tb(problem.__traceback__)
        ours = [frame.line for frame in frames if not frame.filename.startswith(torch.__path__[0])]
        first = str(problem).partition("\n")[0]
        answer = False, Wrong(f"{type(problem).__name__}: {first} (in: {ours[-1]})")
    pipe.send(answer)
    with suppress(EOFError):
        pipe.recv()  # stay till the end: a rank that leaves early breaks the others' connections


# Copied from labs/lab6_lora.py
def on_ranks(world, function, *args, timeout=60):
    """[function(group, *args) of each rank], run by `world` processes of this machine, over gloo.

    Raises Wrong: the first one that a rank raised, or one naming the ranks still busy after `timeout`
    seconds. function is one of a module's own, and args and results can be pickled.
    """
    context = multiprocessing.get_context(
        "forkserver"
    )  # forks ranks from a process that has torch already
    heavy = {"torch.distributed", "transformers.models.llama.modeling_llama"} & sys.modules.keys()
    context.set_forkserver_preload(
        [*heavy, "torch._dynamo"]
    )  # the first dispatch mode imports that: 2 s
    with tempfile.TemporaryDirectory() as folder, ExitStack() as ending:
        pipes = {}
        for rank in range(world):
            here, there = context.Pipe()
            start = (rank, world, f"{folder}/store", there, int(timeout) + 60, function, args)
            process = context.Process(target=rank_main, args=start, daemon=True)
            process.start()
            ending.callback(process.join)
            ending.callback(process.kill)
            there.close()
            pipes[here] = rank
        busy = dict(pipes)  # those that have not answered
        results, end = [None] * world, time.monotonic() + timeout
        while busy:
            ready = connection.wait(busy, max(0, end - time.monotonic()))
            silent = ", ".join(map(str, busy.values()))
            hint = (
                "a send without its recv, a collective that some rank skips, or a loop without end"
            )
            expect(ready, f"no answer from rank {silent} in {timeout} s", hint)
            wrong = []
            for pipe in ready:
                rank = busy.pop(pipe)
                try:
                    fine, results[rank] = pipe.recv()
                except EOFError:
                    fine, results[rank] = False, Wrong("died")
                wrong += [] if fine else [rank]
            if wrong:  # a death first: the others' errors come of it
                rank = min(wrong, key=lambda rank: results[rank].found != "died")
                raise Wrong(f"rank {rank}: {results[rank].found}", results[rank].hint)
        return results


# Copied from labs/lab6_lora.py
def check_on_rank(group, answers, bug, name, seed):
    """One exercise's check on this rank. answers: the file of the lab, or of a learner's copy of it."""
    lab = load(answers)
    if bug:
        globals()[bug](lab)
    check, _ = CHECKS[name]
    return check(lab, group, seed)


# Copied from labs/lab6_lora.py
def print_table(*rows):
    """Columns aligned to the left, after an empty line."""
    cells = [
        [f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in row] for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(*cells)]
    print(
        "",
        *("  " + "   ".join(c.ljust(w) for c, w in zip(row, widths)).rstrip() for row in cells),
        sep="\n",
    )


# Copied from labs/lab6_lora.py
def run_checks(args):
    """Run every exercise's check; returns {name: {"passed", "report"}}, and prints them as a table."""
    results, rows = {}, [["exercise", "ranks", "", "what was seen"]]
    for name, (_, world) in CHECKS.items():
        try:
            report, passed = (
                on_ranks(world, check_on_rank, __file__, args.inject_bug, name, args.seed)[0],
                True,
            )
        except Wrong as wrong:
            report, passed = wrong.found, False
        results[name] = {"passed": passed, "report": report}
        rows.append([name, world, "PASS" if passed else "FAIL", report])
    print_table(*rows)
    return results


# Copied from labs/lab6_lora.py
def main(argv=None):
    """Returns the exit status: 0 all held, 1 a check failed, 2 unusable arguments."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of the checks' inputs (0)")
    parser.add_argument("--json", metavar="FILE", help="write the results")
    parser.add_argument("--plot", metavar="FILE", help="draw them")
    parser.add_argument(
        "--inject-bug", metavar="NAME", help="run with a bug that must be caught; list: name them"
    )
    add_options(parser)
    try:
        args = parser.parse_args(argv)
        if args.inject_bug == "list":
            print(*(f"  {bug.__name__:28} {bug.__doc__}" for bug in BUGS), sep="\n")
            return 0
        if args.inject_bug not in (None, *(bug.__name__ for bug in BUGS)):
            raise Unusable(f"no bug {args.inject_bug}; --inject-bug list names them")
        for path in (args.json, args.plot):
            if path and (
                Path(path).is_dir() or not os.access(Path(path).absolute().parent, os.W_OK)
            ):
                raise Unusable(f"cannot write {path}: a directory, or in none that can be written")
        results = {"lab": Path(__file__).stem, "exercises": run_checks(args), **experiment(args)}
        failed = [name for name, result in results["exercises"].items() if not result["passed"]]
        failed += [name for name in results.get("failed", []) if name not in failed]
        results["passed"] = not failed
        count = f"all {len(results['exercises'])} exercises' checks hold"
        print(
            f"\n{'FAIL' if failed else 'PASS'} {results['lab']}: {', '.join(failed) or count}",
            flush=True,
        )
        if args.json:
            write_whole(
                args.json, lambda path: Path(path).write_text(json.dumps(results, indent=1) + "\n")
            )
        if args.plot:
            write_whole(args.plot, partial(draw, results))
        return 1 if failed else 0
    except Unusable as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    except Wrong as wrong:  # a rank of an experiment, which has nothing to compare
        print(f"\nFAIL {Path(__file__).stem}: {wrong.found}")
        return 1


# Copied from tp.py
class Parser(argparse.ArgumentParser):
    """argparse, with its complaint raised instead of printed with the usage."""

    def error(self, message):
        raise Unusable(message)


# Copied from labs/lab6_lora.py
def write_whole(path, write):
    """Have write(another path) make the file, then name it path: whole or not at all, or Unusable."""
    draft = f"{path}.{os.getpid()}{Path(path).suffix}"
    try:
        write(draft)
        os.replace(draft, path)
    except (
        OSError,
        ValueError,
    ) as problem:  # a full disk; a picture of a kind that matplotlib lacks
        raise Unusable(f"cannot write {path}: {problem}") from None
    finally:
        Path(draft).unlink(missing_ok=True)


# ---------------------------------------------------------------------------------------------------
# 9. Command line
# ---------------------------------------------------------------------------------------------------


def only(name):
    """One pitfall, for argparse; the others' checks are not run either."""
    if name not in PITFALLS:
        raise argparse.ArgumentTypeError(f"no pitfall {name}; there are {', '.join(PITFALLS)}")
    for other in set(CHECKS) - {name}:
        del CHECKS[other]
    return name


def add_options(parser):
    """The lab's own options."""
    parser.add_argument("--only", metavar="NAME", type=only, help="one pitfall")


if __name__ == "__main__":
    sys.exit(main())
