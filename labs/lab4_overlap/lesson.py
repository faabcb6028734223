"""Lab 4: Overlap. A layer's backward whose messages travel while its GEMMs run.

y = x W^T, W sharded by output features: o/P of them on each of P ranks (lab 2's column parallel
layer). Its backward is two GEMMs and, under sequence parallelism (SP), two messages. How long does
it take?

    dgrad   dx = dy W       (s, b, h)     a partial sum: it has to be reduced over the ranks
    wgrad   dW = dy^T x     (o/P, h)      reads x of all tokens: only the shard (s/P, b, h) is saved

dgrad does not read x, and wgrad does not read dx. So each GEMM can run while the other's message
travels:

    blocking      link      |all-gather x|       |reduce-scatter dx|
                  compute                |-dgrad-|                 |-wgrad-|

    overlapped    link      |all-gather x|reduce-scatter dx|
                  compute   |---dgrad----|------wgrad------|
                            ^ start      ^ wait, start     ^ wait

Plain tensor parallelism (TP) holds x whole. Its one message, the all-reduce of dx, has as many
bytes as the two above and only one GEMM, wgrad, to hide under. With C seconds of GEMM and M of
message, C + M become max(C, M) in sequence parallelism, where every GEMM hides half of M, and
C/2 + max(C/2, M) in TP. If M = C, these are 1/2 and 3/4 of the time.

Megatron's layer has two more habits. All layers gather x into one shared buffer: a second call
of get_tensor() returns the same memory, so whoever keeps the first result silently reads the
second's data. And wgrad adds right into a float32 main_grad and makes no gradient tensor.

CUDA_DEVICE_MAX_CONNECTIONS=1. On a GPU "start" only queues a kernel, the message on one
stream, the GEMM on another; streams have no order. The host hands kernels over through several
hardware queues (8 by default), so the GEMM, although launched second, may be first. It then
fills all multiprocessors, and the message, which needs only a few, starts when the GEMM ends:
nothing overlaps. With one queue kernels are handed over in launch order: the message starts,
then the GEMM beside it. No value ever changes, only the time. Megatron-LM demands one queue
for TP and context parallelism up to Hopper (compute capability below 10), and no longer since
Blackwell. FSDP wants more queues, because its prefetches run on other streams. A CPU has no
such queues: here a thread carries the messages, over a simulated slow link.

Data parallelism (DP) overlaps the same way, over the whole backward: as soon as a bucket of
parameters has its gradients, their all-reduce starts, while earlier layers still compute:

    compute   |-layer 3-|-layer 2-|-layer 1-|
    link                |- bucket of 3 -|   |- bucket of 2 and 1 -|

    python labs/lab4_overlap/lesson.py                 # checks and experiments
    python labs/lab4_overlap/lesson.py --plot lab4.png --json lab4.json
    python labs/lab4_overlap/lesson.py --predict 1920  # first your guess; see the end
    python labs/lab4_overlap/lesson.py --inject-bug list
    python labs/lab4_overlap/lesson.py --pairs 15      # more timings
    python labs/grade.py start lab4                    # writes my_labs/lab4_overlap.py

Sources: Megatron-LM, arXiv 2205.05198 (the shard is saved, and gathered again). Megatron-LM:
megatron/core/tensor_parallel/layers.py (LinearWithGradAccumulationAndAsyncCommunication),
core/utils.py (GlobalMemoryBuffer), training/arguments.py (which GPUs need the one queue). Nanotron:
src/nanotron/parallel/tensor_parallel/functional.py. NeMo: tp_comm_overlap, Transformer
Engine's finer way, which cuts GEMMs and so hides messages in the forward, too. DeepSpeed:
runtime/domino/transformer.py, which cuts the batch in two for that.
"""

import math
import sys
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

# --------------------------------------------------------------------------------------------------
# The lesson 1: data parallelism, gradient buckets
# --------------------------------------------------------------------------------------------------


def make_buckets(parameters, most):
    """[[parameter]]: the parameters, last first, in buckets of at most `most` numbers together.

    A parameter with more than `most` numbers has a bucket of its own. Last first, because the
    backward reaches the last layer first: the first bucket is complete while most of the backward
    is still to come. Source: torch/nn/parallel/distributed.py, bucket_cap_mb.
    """
    # exercise: make_buckets
    buckets, room = [], 0
    for p in reversed(list(parameters)):
        if not buckets or p.numel() > room:
            buckets.append([])
            room = most
        buckets[-1].append(p)
        room -= p.numel()
    return buckets
    # end exercise


class DataParallel:
    """Replicas of a model whose gradients are summed over the ranks while the backward runs.

    A simple DistributedDataParallel. Each rank has all parameters and sequences of its own, and its
    loss is a sum over its tokens. A step: backward() for each microbatch, all but the last inside
    no_sync(); then finish(tokens), and the optimizer.

    started: how many buckets' all-reduces have started, always in the buckets' order, because
    the ranks' collectives meet in the order of their calls. works: (work, vector) of each.
    arrived: the parameters whose gradients of the last microbatch are complete.
    """

    def __init__(self, parameters, group, most):
        self.buckets, self.group, self.sync = make_buckets(parameters, most), group, True
        self.reset()
        for bucket in self.buckets:
            for p in bucket:
                p.register_post_accumulate_grad_hook(self.on_gradient)

    def reset(self):
        """No bucket has started, no gradient has arrived."""
        self.started, self.works, self.arrived = 0, [], set()

    @contextmanager
    def no_sync(self):
        """A backward inside it only adds to .grad."""
        self.sync = False
        yield
        self.sync = True

    def on_gradient(self, p):
        """Called when p.grad is complete: start every bucket that may go now, in their order.

        A bucket may go when all its gradients have arrived and those before it have gone.
        """
        # exercise: on_gradient
        if not self.sync:
            return
        self.arrived.add(p)
        while self.started < len(self.buckets) and self.arrived.issuperset(
            self.buckets[self.started]
        ):
            self.start()
        # end exercise

    def start(self):
        """Start the next bucket's all-reduce: one message, zeros for missing gradients."""
        grads = [
            torch.zeros_like(p) if p.grad is None else p.grad for p in self.buckets[self.started]
        ]
        vector = torch.cat([grad.flatten() for grad in grads])
        self.works.append((dist.all_reduce(vector, group=self.group, async_op=True), vector))
        self.started += 1

    def finish(self, tokens):
        """After the last backward: .grad of each parameter is the gradient of the mean loss.

        The mean is over the tokens of all ranks, of which this rank has `tokens`: ranks with fewer
        tokens count less. A parameter that a rank's loss did not use has no gradient there, so
        its bucket has not gone: send it now, or the other ranks' sums cannot end. At the end
        call reset(), for the next step.
        """
        # exercise: finish
        while self.started < len(self.buckets):
            self.start()
        count = torch.tensor(float(tokens), dtype=torch.float64)
        dist.all_reduce(count, group=self.group)
        for bucket, (work, vector) in zip(self.buckets, self.works):
            work.wait()
            for p, part in zip(bucket, vector.split([p.numel() for p in bucket])):
                p.grad = part.view_as(p) / count.item()
        self.reset()
        # end exercise


# --------------------------------------------------------------------------------------------------
# The lesson 2: where the gathered input lives, and where the weight's gradient goes
# --------------------------------------------------------------------------------------------------


class GlobalMemoryBuffer:
    """Memory that all layers share for what is needed only for a moment (Megatron-LM).

    buffer {(name, dtype): a flat tensor}: each grows to the largest size ever asked for, and stays.
    """

    def __init__(self):
        self.buffer = {}

    def get_tensor(self, shape, dtype, name):
        """A contiguous tensor of that shape, its values arbitrary, in the memory of (name, dtype).

        It allocates only if the memory there is too small; otherwise two calls return the same
        memory, and the first result is lost as soon as the second is written to.
        """
        # exercise: memory_buffer
        size = math.prod(shape)
        held = self.buffer.get((name, dtype))
        if held is None or held.numel() < size:
            held = self.buffer[name, dtype] = torch.empty(size, dtype=dtype)
        return held[:size].view(shape)
        # end exercise


BUFFER = GlobalMemoryBuffer()


def weight_gradient(grad, x, main_grad):
    """The wgrad GEMM: dW = grad^T x, summed over all tokens, from grad (s, b, o/P) and x (s, b, h).

    Without main_grad (None): returns dW (o/P, h) in the dtype of x. With it (float32, (o/P, h)):
    adds dW to main_grad in place and returns None. Products of two bfloat16 are exact in
    float32 and have to be added up in float32: nothing may be rounded to bfloat16 on the way.
    (On a GPU Apex's wgrad_gemm_accum_fp32 reads bfloat16 and adds in float32, in one kernel; a
    CPU's GEMM wants one dtype.)
    """
    grad, x = grad.flatten(0, 1), x.flatten(0, 1)  # (s * b, o/P), (s * b, h)
    # exercise: accumulation_fusion
    if main_grad is None:
        return grad.T @ x
    main_grad.addmm_(grad.T.float(), x.float())
    return None
    # end exercise


# --------------------------------------------------------------------------------------------------
# The lesson 3: linear layers
# --------------------------------------------------------------------------------------------------
# Shapes are Megatron's, (s, b, h): with the tokens first the ranks' shards are joined along dim 0,
# which is what all_gather_into_tensor and reduce_scatter_tensor do, right in the memory they get.


class TPLinear(torch.autograd.Function):
    """y = F.linear(x, weight, bias), x (s, b, h) the same on all ranks, -> (s, b, o/P).

    weight (o/P, h), bias (o/P) or None. If weight has a main_grad, see weight_gradient().
    """

    @staticmethod
    def forward(ctx, x, weight, bias, group):
        ctx.group, ctx.main_grad = group, getattr(weight, "main_grad", None)
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, grad):
        """grad (s, b, o/P) -> the gradients of forward's arguments: (dx, dW, db, None).

        dx (s, b, h) is summed over the ranks; db is None where ctx.needs_input_grad[2] is False.
        dist.all_reduce(tensor, group=..., async_op=True) returns a handle at once; the tensor
        belongs to the link until handle.wait() returns. The all-reduce of dx travels while
        weight_gradient() runs.
        """
        x, weight = ctx.saved_tensors
        # exercise: tp_backward
        dx = grad @ weight  # (s, b, h), of this rank's features alone
        handle = dist.all_reduce(dx, group=ctx.group, async_op=True)
        dw = weight_gradient(grad, x, ctx.main_grad)
        db = grad.sum((0, 1)) if ctx.needs_input_grad[2] else None
        handle.wait()
        return dx, dw, db, None
        # end exercise


class SPLinear(torch.autograd.Function):
    """y = F.linear(x of all tokens, weight, bias), x (s/P, b, h) the rank's tokens, -> (s, b, o/P).

    weight (o/P, h), bias (o/P) or None. Every rank has equally many tokens.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, group):
        """Gathers x into BUFFER's memory for "mpu" (Megatron's name) and saves only the shard."""
        ctx.group, ctx.main_grad = group, getattr(weight, "main_grad", None)
        x = x.contiguous()
        # exercise: sp_linear
        ctx.save_for_backward(x, weight)
        shape = group.size() * x.shape[0], *x.shape[1:]  # (s, b, h)
        total = BUFFER.get_tensor(shape, x.dtype, "mpu")
        dist.all_gather_into_tensor(total, x, group=group)  # nothing hides it: the GEMM reads it
        return F.linear(total, weight, bias)
        # end exercise

    @staticmethod
    def backward(ctx, grad):
        """grad (s, b, o/P) -> the gradients of forward's arguments, dx (s/P, b, h) of x.

        x is gathered again, into BUFFER, while dgrad runs; dx is reduce-scattered while wgrad runs.
        dist.all_gather_into_tensor(out, x, group=..., async_op=True) and
        dist.reduce_scatter_tensor(out, dx, group=..., async_op=True) return handles.
        """
        x, weight = ctx.saved_tensors
        # exercise: sp_linear
        shape = ctx.group.size() * x.shape[0], *x.shape[1:]
        total = BUFFER.get_tensor(shape, x.dtype, "mpu")
        gather = dist.all_gather_into_tensor(total, x, group=ctx.group, async_op=True)
        dx = grad @ weight  # (s, b, h)
        gather.wait()
        mine = torch.empty_like(x)  # not of BUFFER: the caller keeps it
        scatter = dist.reduce_scatter_tensor(mine, dx, group=ctx.group, async_op=True)
        dw = weight_gradient(grad, total, ctx.main_grad)
        db = grad.sum((0, 1)) if ctx.needs_input_grad[2] else None
        scatter.wait()
        return mine, dw, db, None
        # end exercise


tp_linear = TPLinear.apply  # (x (s, b, h), weight, bias, group) -> (s, b, o/P)
sp_linear = SPLinear.apply  # (x (s/P, b, h), weight, bias, group) -> (s, b, o/P)


if __name__ == "__main__":  # the lab's checks and experiments, of labs/ and of my_labs/
    sys.path[:0] = [str(folder) for folder in Path(__file__).resolve().parents[1:3]]
    from labs.kit.run import main

    sys.exit(main(__file__))
