"""Lab 3: Pitfalls. Sixteen ways to get parallel training wrong, each beside the right way.

The question: a parallel model runs and its loss looks right. Is it right? Mostly the loss cannot
tell. Here are a training step's places where people fall, with P ranks, s tokens, h features:

    setting up          weights (out, h) cut to (out/P, h)  transposed_weights, copy_without_no_grad
                        parallelize_module                  parallelize_order, untied_weights
    tokens (b, s)       cut to (b, s/P)                     local_positions, chunk_boundary
        v
    x (b, s, h)
        | f                                                 f_per_projection
        v
    attention or MLP    q of s/P tokens, k and v of s       local_mask
        |               run as an autograd.Function         autograd_kwargs
        | g             all-reduce of what a block returns  returned_tuples
        v
    next stage          recv (b, s, h), cast                retain_grad
        v
    logits (b, s/P, v)  -> one loss of all s tokens         loss_without_graph
        v
    optimizer                                               adam_hides_scale
    watching it         clocks, numbers read on the way     adaptive_timing, rank_0_clock,
                                                            stale_result

Each pitfall NAME is a pair: wrong_NAME as people write it, right_NAME, which is the exercise. The
experiment runs both, most of them in a real LLaMA (Hugging Face's, tiny, 2 ranks), and
measures how far the loss is from one device's, and how far the gradient is from one device's.
The distance between the two is the lesson.

What they cost: four raise, one hangs, one misleads a clock, one costs only traffic (2.5 times the
backward's all-reduces), one leaves no gradient to send back, one hides a wrong factor from the loss
curve, and seven silently train a model that is not the one you meant.

    python labs/lab3_pitfalls/lesson.py                      # checks, then all pitfalls as a table
    python labs/lab3_pitfalls/lesson.py --only local_positions
    python labs/lab3_pitfalls/lesson.py --plot pitfalls.png  # what the loss shows, what is wrong
    python labs/lab3_pitfalls/lesson.py --predict 65536      # first your guess; see the end
    python labs/lab3_pitfalls/lesson.py --inject-bug list
    python labs/grade.py start lab3                          # writes my_labs/lab3_pitfalls.py

Sources: Megatron-LM (arXiv 1909.08053; 2205.05198 for sequence parallelism),
megatron/core/tensor_parallel; PyTorch's notes "Extending PyTorch", "Autograd mechanics" and
torch.distributed; HF transformers' modeling_llama.py; context parallelism that gathers k and v:
Llama 3 (arXiv 2407.21783, section 3.3.2).
"""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor.parallel import parallelize_module

IGNORE = -100  # a label that is no target: HF's and PyTorch's convention


# --------------------------------------------------------------------------------------------------
# 1. Communication: f and g of tp.py
# --------------------------------------------------------------------------------------------------


# Copied from tp.py
def all_reduce(x, group, op=dist.ReduceOp.SUM):
    """The sum (or max) of x over ranks; not in place, because autograd may still need x itself."""
    if group.size() == 1:
        return x
    x = x.clone(memory_format=torch.contiguous_format)  # a gradient may be a transposed view
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


copy_to_tp_region = CopyToTPRegion.apply  # (x, group) -> x
reduce_from_tp_region = ReduceFromTPRegion.apply


def shift(labels):
    """The target of each token is the next one; the last has none. (b, s) -> (b, s)"""
    return F.pad(labels[:, 1:], (0, 1), value=IGNORE)


# --------------------------------------------------------------------------------------------------
# 2. The pitfalls. Cutting the weights
# --------------------------------------------------------------------------------------------------


def wrong_transposed_weights(weight, rank, world):
    """Cuts columns, as if torch kept a weight as (in, out), and transposes the piece to fit.

    A square matrix (q_proj; k and v too without GQA) fits without complaint: its piece holds
    half of the wrong features, in numbers of the same size. Any other raises "mat1 and mat2
    shapes cannot be multiplied".
    """
    return weight.chunk(world, dim=1)[rank].T.contiguous()


def right_transposed_weights(weight, rank, world):
    """A rank's output features of a linear layer: (out, in) -> (out/P, in), a tensor of its own.

    nn.Linear computes x @ weight.T, so dim 0 of weight is the output (column parallel in
    Megatron, which writes x @ A) and dim 1 is the input (row parallel). Where P does not
    divide out, the first ranks hold one row more. A view would keep the whole matrix in memory.
    Source: torch.nn.Linear; ColumnParallelLinear in Megatron's tensor_parallel/layers.py.
    """
    # exercise: transposed_weights
    return weight.tensor_split(world, dim=0)[rank].clone()
    # end exercise


def wrong_copy_without_no_grad(parameter, value):
    """Writes into a parameter while autograd records.

    "A leaf Variable that requires grad is being used in an in-place operation": autograd would have
    to record a step that overwrites the very thing to be differentiated.
    """
    parameter.copy_(value)


def right_copy_without_no_grad(parameter, value):
    """Puts a shard's values into an existing Parameter, which the optimizer still trains.

    A new Parameter would be unknown to an optimizer that already holds the old one, and `.data =
    value` would share memory with value. Source: PyTorch's "Autograd mechanics", in-place
    operations.
    """
    # exercise: copy_without_no_grad
    with torch.no_grad():
        parameter.copy_(value)
    # end exercise


def wrong_parallelize_order(model, mesh, plan, weights):
    """Cuts the model where it was built, then moves it, but its shards hold no values.

    It was built on `meta`, because every machine has that device.
    """
    return parallelize_module(model, mesh, plan).to(mesh.device_type)


def right_parallelize_order(model, mesh, plan, weights):
    """Takes a model on the meta device to mesh's device: with its weights, cut by plan.

    weights: {name: whole tensor}. First memory on the device, then the weights, then
    parallelize_module: that is a collective call (it scatters rank 0's weights), so every rank
    has to come to it with the weights loaded. torchtitan cuts first and fills then, from a
    checkpoint that knows DTensors; plain weights must come first.
    """
    # exercise: parallelize_order
    model.to_empty(device=mesh.device_type)
    model.load_state_dict(weights)
    return parallelize_module(model, mesh, plan)
    # end exercise


def wrong_untied_weights(model, mesh, plan):
    """parallelize_module on a model whose head is its embedding; then they are two tensors.

    The first loss is exactly right: both still hold the same numbers. But the embedding's gradient
    lacks the head's part, so from the first step on they drift apart, and both take memory.
    """
    return parallelize_module(model, mesh, parallelize_plan=plan)


def right_untied_weights(model, mesh, plan):
    """Cuts a model by plan; it has get_input_embeddings() and get_output_embeddings(), as HF's do.

    If their weights were one Parameter before, they are one afterwards; two stay two. Source:
    _allreduce_word_embedding_grads in Megatron's finalize_model_grads.py, for the same thing over
    pipeline stages; tied_parameters.py in Nanotron; TiedLayerSpec in DeepSpeed.
    """
    # exercise: untied_weights
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head.weight is embedding.weight
    parallelize_module(model, mesh, plan)
    if tied:
        head.weight = embedding.weight
    return model
    # end exercise


# --------------------------------------------------------------------------------------------------
# 3. Around a block: what goes in, what comes out
# --------------------------------------------------------------------------------------------------


def wrong_f_per_projection(block, group):
    """An f at each column parallel matrix: q, k, v, gate and up reduce one by one.

    All values are right, but the backward has 5 all-reduces a layer where 2 are enough. Only
    the traffic shows it.
    """
    for name, linear in block.named_children():
        if name in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"):
            linear.register_forward_pre_hook(
                lambda module, args: (copy_to_tp_region(args[0], group),)
            )


def right_f_per_projection(block, group):
    """Changes block.forward so that its hidden_states (b, s, h) go through one f.

    HF calls the MLP with hidden_states by position and attention with hidden_states=. The
    gradients of q, k and v first add up on the rank, without a message; then one sum over the
    ranks is enough. Source: Megatron-LM (arXiv 1909.08053), figure 3 (one f a block, where q,
    k and v are one matrix).
    """
    inner = block.forward

    def forward(hidden_states, **kwargs):
        # exercise: f_per_projection
        return inner(copy_to_tp_region(hidden_states, group), **kwargs)
        # end exercise

    block.forward = forward


def wrong_returned_tuples(out, group):
    """Sums out[0]: attention's output, but only one sequence of the MLP's, which is no tuple.

    With a batch of 1 it is right. In larger ones the other sequences silently stay partial.
    """
    dist.all_reduce(out[0].detach(), group=group)
    return out


def right_returned_tuples(out, group):
    """A block's return value, with its partial sum (b, s, h) summed over the ranks by g.

    HF's attention returns (output, weights), its MLP returns the output alone. The rest of a
    tuple and the tensor given stay as they are. The backward passes dy on, because every
    rank's part entered the sum once. Source: LlamaAttention.forward in modeling_llama.py.
    """
    # exercise: returned_tuples
    if isinstance(out, tuple):
        return reduce_from_tp_region(out[0], group), *out[1:]
    return reduce_from_tp_region(out, group)
    # end exercise


class Recompute(torch.autograd.Function):
    """block(x, **tensors by names, **others), its activations recomputed in the backward.

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
    """Hands the block's keywords on to apply(), which takes none: a TypeError.

    The usual way out, to hand over the dict, runs. But autograd does not look into a dict.
    """
    return Recompute.apply(block, {}, [], x, **kwargs)


def right_autograd_kwargs(block, x, **kwargs):
    """block(x, **kwargs) by way of Recompute; every tensor among kwargs gets its gradient.

    HF calls its layers with keywords, both tensors (position_embeddings' cos and sin, a mask)
    and plain values. Source: "Extending PyTorch", torch.autograd.Function; CheckpointFunction
    in Megatron's tensor_parallel/random.py takes its inputs by position.
    """
    # exercise: autograd_kwargs
    names = [name for name, value in kwargs.items() if isinstance(value, torch.Tensor)]
    tensors = [kwargs.pop(name) for name in names]
    return Recompute.apply(block, kwargs, names, x, *tensors)
    # end exercise


def wrong_retain_grad(received, dtype):
    """Asks for a gradient, then casts: the result is no leaf, and its .grad stays None.

    requires_grad_() on the result silently changes nothing. Where the dtypes agree, .to()
    returns the tensor itself and all is well; with bfloat16 it breaks.
    """
    return received.requires_grad_().to(dtype).requires_grad_()


def right_retain_grad(received, dtype):
    """The tensor that recv filled, in dtype, as the stage's input; its .grad is sent back.

    It may be a tensor inside the graph that keeps its gradient, or a new leaf.
    Source: Tensor.retain_grad, Tensor.is_leaf; recv_forward in Megatron's pipeline_parallel.
    """
    # exercise: retain_grad
    hidden = received.requires_grad_().to(dtype)
    hidden.retain_grad()
    return hidden
    # end exercise


# --------------------------------------------------------------------------------------------------
# 4. Cutting the sequence
# --------------------------------------------------------------------------------------------------


def wrong_local_positions(length, rank, world):
    """Counts from 0 on every rank, as HF does when position_ids is left out. Rank 0 is exact."""
    return torch.arange(length // world + (rank < length % world))


def right_local_positions(length, rank, world):
    """Positions of a rank's tokens in the whole sequence, (s/P).

    Where P does not divide s, the first ranks hold one token more.

    Rotary embeddings turn q and k by their positions, so that attention sees how far apart two
    tokens are. If every rank counts from 0, tokens s/P apart seem to be at one place. Source:
    RoFormer (arXiv 2104.09864); get_pos_emb_on_this_cp_rank in Megatron's rotary_pos_embedding.py.
    """
    # exercise: local_positions
    return torch.arange(length).tensor_split(world)[rank]
    # end exercise


def wrong_local_mask(start, queries, keys):
    """The triangle of a sequence that starts at 0.

    is_causal=True with fewer queries than keys gives this mask. A later rank's first query
    sees the first key and nothing else. The model's own mask, of s/P by s/P, would raise
    (eager adds it to scores of s/P by s); is_causal is silent.
    """
    return torch.ones(queries, keys, dtype=torch.bool).tril()


def right_local_mask(start, queries, keys):
    """Causal mask (queries, keys), True where a query may see a key.

    Query i is token start + i; the keys are tokens 0 to keys - 1.
    Source: F.scaled_dot_product_attention on is_causal with sizes that differ (the triangle begins
    at the top left); Llama 3 (arXiv 2407.21783), section 3.3.2: gathered k and v.
    """
    # exercise: local_mask
    return torch.arange(keys) <= torch.arange(start, start + queries)[:, None]
    # end exercise


def wrong_chunk_boundary(ids, rank, world):
    """Cuts, then shifts: P tokens lose their target, the last of each chunk, not 1."""
    return shift(ids.tensor_split(world, 1)[rank])


def right_chunk_boundary(ids, rank, world):
    """Targets of a rank's tokens, (b, s) -> (b, s/P); IGNORE for the last of all tokens only.

    The target of a chunk's last token is the next chunk's first. Source: HF's own loss shifts its
    labels inside; with a cut sequence it takes shift_labels instead.
    """
    # exercise: chunk_boundary
    return shift(ids).tensor_split(world, 1)[rank]
    # end exercise


def all_logits(logits, group):
    """The logits (b, s/P, v) of each rank, as a list."""
    parts = [torch.empty_like(logits) for _ in range(group.size())]
    dist.all_gather(parts, logits.detach(), group=group)
    return parts


def mean_loss(parts, targets):
    """Mean cross entropy of the ranks' logits [(b, s/P, v)] over all targets (b, s)."""
    logits = torch.cat(parts, 1).flatten(0, 1)
    return F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORE)


def wrong_loss_without_graph(logits, targets, group):
    """Gathers all logits and takes their loss: the right number, and no way back to the model."""
    return mean_loss(all_logits(logits, group), targets)


def right_loss_without_graph(logits, targets, group):
    """Mean loss of all tokens on each rank, from its logits (b, s/P, v) and all targets (b, s).

    Its backward reaches the rank's own logits alone. Gathered tensors have no graph, so the
    own logits go back in their place. (tp.py and its like gather nothing: they sum the tokens'
    losses and the counts. A differentiable gather is a trap, because all ranks compute this
    loss and the gather's backward sums P gradients.) Source: torch.distributed.all_gather.
    """
    # exercise: loss_without_graph
    parts = all_logits(logits, group)
    parts[group.rank()] = logits
    return mean_loss(parts, targets)
    # end exercise


# --------------------------------------------------------------------------------------------------
# 5. Watching it
# --------------------------------------------------------------------------------------------------


def wrong_adam_hides_scale(parameters):
    """Adam divides by the gradient's size, so one P times too large trains the same."""
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
    """Starts an all-reduce, works, reads without waiting, and mostly reads x itself."""
    total = x.clone()
    dist.all_reduce(total, group=group, async_op=True)
    meanwhile()
    return total.clone()


def right_stale_result(x, group, meanwhile):
    """The sum of x over the ranks, x untouched, with meanwhile() called while it is under way.

    The functional collectives (and DTensor) return an AsyncCollectiveTensor, which waits by itself
    when torch reads it. c10d's async_op=True returns a handle, and nothing waits for you. Source:
    torch.distributed, "Synchronous and asynchronous collective operations".
    """
    # exercise: stale_result
    total = x.clone()
    work = dist.all_reduce(total, group=group, async_op=True)
    meanwhile()
    work.wait()
    return total
    # end exercise


def seconds(step):
    """What step() takes by this rank's own clock."""
    begin = time.perf_counter()
    step()
    return time.perf_counter() - begin


def wrong_adaptive_timing(step, group):
    """Timer.adaptive_autorange: each rank decides by its own clock how often to run the step.

    Their counts differ, and step() holds a collective, so one rank waits for ranks that have
    finished.
    """
    from torch.utils.benchmark import Timer  # here, because its import prints

    return Timer("step()", globals={"step": step}).adaptive_autorange(max_run_time=1).median


def right_adaptive_timing(step, group, budget=0.1):
    """Median seconds of step(), each as long as its slowest rank: a float, the same on every rank.

    One call warms up. Then time at least 5, in about budget seconds: take the slowest rank's
    time of each call, and the median of those. All ranks call step() equally often: the count
    is fixed beforehand, or computed from a number that all ranks share. Source: Megatron's
    core/timers.py takes the maximum over ranks; triton's do_bench decides by its own clock too.
    """
    # exercise: adaptive_timing
    seconds(step)  # the first one is slow, and ranks come to it at different times
    slowest = all_reduce(torch.tensor(seconds(step)), group, dist.ReduceOp.MAX).item()
    times = torch.tensor([seconds(step) for _ in range(max(5, int(budget / slowest)))])
    return all_reduce(times, group, dist.ReduceOp.MAX).median().item()
    # end exercise


def wrong_rank_0_clock(step, group):
    """Rank 0's own clock: in a pipeline it stops after its send, while others still work."""
    return seconds(step)


def right_rank_0_clock(step, group):
    """Seconds from a common start to the last rank's end of step(): a float, the same on all ranks.

    Source: megatron/core/timers.py: barrier=True, and the maximum over ranks.
    """
    # exercise: rank_0_clock
    dist.barrier(group)
    return all_reduce(torch.tensor(seconds(step)), group, dist.ReduceOp.MAX).item()
    # end exercise


if __name__ == "__main__":  # the lab's checks and experiments, of labs/ and of my_labs/
    sys.path[:0] = [str(folder) for folder in Path(__file__).resolve().parents[1:3]]
    from labs.kit.run import main

    sys.exit(main(__file__))
