"""Lab 1. Collectives from send and receive alone: adding, gathering, exchanging, and the cost.

Question: every rank holds n bytes of gradient and wants the sum of all of them. Rank 0 could
collect, add and send back, but then 2 (P-1) n bytes go through one wire. How does everyone get the
sum, with all wires equally busy?

Idea: cut x into P chunks and pass them around a ring; at any time every rank sends one chunk to the
next rank and receives one from the previous. With P = 3 (xr[c] is chunk c of rank r):

    reduce-scatter   x (n, ...) -> (n/P, ...)     chunk c leaves rank c + 1 and ends on rank c
                             step 1                      step 2
      chunk 0:     rank 1 --x1[0]-->  rank 2 --x1[0]+x2[0]-->  rank 0: x1[0]+x2[0]+x0[0]
      chunk 1:     rank 2 --x2[1]-->  rank 0 --x2[1]+x0[1]-->  rank 1: x2[1]+x0[1]+x1[1]
      chunk 2:     rank 0 --x0[2]-->  rank 1 --x0[2]+x1[2]-->  rank 2: x0[2]+x1[2]+x2[2]

    all-gather       (n/P, ...) -> (n, ...)       the same ring; every rank keeps what passes
    all-reduce       x (n, ...) -> (n, ...)       the first, then the second
    all-to-all       (n, ...) -> (n, ...)         chunk c of rank r becomes chunk r of rank c

    operation        steps       bytes that each rank sends; n bytes is the whole message
    reduce-scatter   P - 1       (P-1)/P n
    all-gather       P - 1       (P-1)/P n
    all-reduce       2 (P-1)     2 (P-1)/P n          below 2n for any number of ranks
    all-to-all       P - 1       (P-1)/P n            n: the rank's own input

A step costs a + b m seconds for m bytes: latency and bandwidth. The run measures a and b and
predicts the all-reduce from them. Last, it starts collectives in the background and shows what
a result read too early holds.

    python labs/lab1_collectives/lesson.py                 # it starts its own ranks
    python labs/lab1_collectives/lesson.py --ranks 2 --plot time.png --json lab1.json
    python labs/lab1_collectives/lesson.py --predict 4096  # first your guess; see the end
    python labs/lab1_collectives/lesson.py --inject-bug list
    python labs/grade.py start lab1                        # writes my_labs/lab1_collectives.py

Sources: Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations
(2009); Thakur, Rabenseifner and Gropp, Optimization of collective communication operations in MPICH
(2005). The same ideas live in Megatron-LM: megatron/core/tensor_parallel/mappings.py (the conjugate
pairs) and layers.py (LinearWithGradAccumulationAndAsyncCommunication: our linear_backward), on
which NeMo runs; in Nanotron: parallel/tensor_parallel/distributed_differentiable_primitives.py; in
DeepSpeed: sequence/layer.py (_SeqAllToAll).
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist


# Copied from tp.py
def shard_range(n, rank, world):
    """[start, end): a rank's share of n things. The first n % world ranks have one more."""
    base, extra = divmod(n, world)
    return rank * base + min(rank, extra), (rank + 1) * base + min(rank + 1, extra)


def chunk_sizes(n, world):
    """Rows of each rank's chunk of n rows."""
    return [end - start for start, end in (shard_range(n, rank, world) for rank in range(world))]


def exchange(x, to, source, shape, group):
    """Send x to rank `to` while receiving a tensor of that shape from rank `source`, and return it.

    It must not matter in which order the ranks come here, or how large x is. A blocking
    dist.send returns when its message is received: if all ranks send first, none receives and
    all wait for ever. So start both (dist.isend, dist.irecv, or dist.batch_isend_irecv), then
    wait for both. x need not be contiguous (what is sent has to be). `to` and `source` count
    within the group (in torch group_dst, group_src and, in P2POp, group_peer).
    """
    # exercise: exchange
    received = x.new_empty(shape)
    both = [
        dist.P2POp(dist.isend, x.contiguous(), group=group, group_peer=to),
        dist.P2POp(dist.irecv, received, group=group, group_peer=source),
    ]
    for work in dist.batch_isend_irecv(both):
        work.wait()
    return received
    # end exercise


def ring_reduce_scatter(x, group):
    """This rank's chunk of the sum of all ranks' x: (n, ...) -> (chunk_sizes[rank], ...).

    P - 1 exchanges with the neighbours: see the picture at the top. Chunk c sets out from rank c +
    1, so this rank first sends chunk rank - 1; it adds what comes to its own and sends the sum
    on next. x stays as it is. n may be any number, even below P (chunks may be empty).
    """
    rank, P = group.rank(), group.size()
    chunks = x.split(chunk_sizes(len(x), P))  # views of x
    # exercise: reduce_scatter
    total = chunks[(rank - 1) % P]
    for step in range(P - 1):
        own = chunks[(rank - 2 - step) % P]
        total = own + exchange(total, (rank + 1) % P, (rank - 1) % P, own.shape, group)
    return total
    # end exercise


def ring_all_gather(shard, n, group):
    """All ranks' shards in the order of the ranks: (chunk_sizes[rank], ...) -> (n, ...).

    P - 1 exchanges with the neighbours: each rank sends on what it received last.
    """
    rank, P = group.rank(), group.size()
    sizes = chunk_sizes(n, P)
    # exercise: all_gather
    chunks = [shard] * P
    for step in range(P - 1):
        sent, received = (rank - step) % P, (rank - step - 1) % P
        shape = sizes[received], *shard.shape[1:]
        chunks[received] = exchange(chunks[sent], (rank + 1) % P, (rank - 1) % P, shape, group)
    return torch.cat(chunks)
    # end exercise


def ring_all_reduce(x, group):
    """The sum of all ranks' x, (n, ...) -> (n, ...), the same bits on every rank; x stays as it is.

    It takes 2 (P-1) exchanges and sends 2 (P-1)/P of x. Build it from what you have.
    """
    # exercise: all_reduce
    return ring_all_gather(ring_reduce_scatter(x, group), len(x), group)
    # end exercise


def all_to_all(x, sends, receives, group):
    """Send each row of x to its rank: (sum(sends), ...) -> (sum(receives), ...).

    The first sends[0] rows of x go to rank 0, the next sends[1] to rank 1, ...; receives[r] rows
    come from rank r and stand in the result in the order of the ranks. (dist.all_to_all_single;
    Ulysses sends heads this way, a mixture of experts its tokens.) Exchange s of P - 1 sends s
    places ahead and receives from s places behind. What this rank keeps is not sent.
    """
    rank, P = group.rank(), group.size()
    # exercise: all_to_all
    parts = x.split(sends)
    arrived = [parts[rank]] * P
    for step in range(1, P):
        to, source = (rank + step) % P, (rank - step) % P
        arrived[source] = exchange(parts[to], to, source, (receives[source], *x.shape[1:]), group)
    return torch.cat(arrived)
    # end exercise


class AllGather(torch.autograd.Function):
    """ring_all_gather(shard, n, group) with its gradient, (n, ...) -> (chunk_sizes[rank], ...).

    The loss is the sum of all ranks' losses. All ranks read this rank's shard, so all have a
    gradient for it.
    """

    @staticmethod
    def forward(ctx, shard, n, group):
        ctx.group = group
        return ring_all_gather(shard, n, group)

    @staticmethod
    def backward(ctx, grad):
        """The gradient of each of forward's arguments; None where there is none."""
        # exercise: gradients
        return ring_reduce_scatter(grad, ctx.group), None, None
        # end exercise


class ReduceScatter(torch.autograd.Function):
    """ring_reduce_scatter(x, group) with its gradient, (chunk_sizes[rank], ...) -> (n, ...).

    Every row of x is added to a sum that one rank holds; that rank has the sum's gradient.
    """

    @staticmethod
    def forward(ctx, x, group):
        ctx.n, ctx.group = len(x), group
        return ring_reduce_scatter(x, group)

    @staticmethod
    def backward(ctx, grad):
        """The gradient of each of forward's arguments; None where there is none."""
        # exercise: gradients
        return ring_all_gather(grad, ctx.n, ctx.group), None
        # end exercise


class AllToAll(torch.autograd.Function):
    """all_to_all() with its gradient, (sum(receives), ...) -> (sum(sends), ...).

    A row's gradient is where the row went.
    """

    @staticmethod
    def forward(ctx, x, sends, receives, group):
        ctx.sends, ctx.receives, ctx.group = sends, receives, group
        return all_to_all(x, sends, receives, group)

    @staticmethod
    def backward(ctx, grad):
        """The gradient of each of forward's arguments; None where there is none."""
        # exercise: gradients
        return all_to_all(grad, ctx.receives, ctx.sends, ctx.group), None, None, None
        # end exercise


def linear_backward(x, weight, grad, group):
    """Backward of a column-parallel linear, y = x @ weight.T: returns (dx, dw).

    x (b, i) is the same on every rank, weight (o/P, i) and grad = dy (b, o/P) are the rank's own.
    dx (b, i) is the sum of all ranks' grad @ weight, dw (o/P, i) = grad.T @ x needs no other rank.
    So the sum of dx (dist.all_reduce with async_op=True, which returns work at once) has to be
    under way while dw is computed, and complete (work.wait()) when both are returned.
    Megatron-LM hides most of tensor parallelism's backward traffic like this.
    """
    # exercise: overlap
    dx = grad @ weight
    work = dist.all_reduce(dx, group=group, async_op=True)
    dw = grad.T @ x
    work.wait()
    return dx, dw
    # end exercise


if __name__ == "__main__":  # the lab's checks and experiments, of labs/ and of my_labs/
    sys.path[:0] = [str(folder) for folder in Path(__file__).resolve().parents[1:3]]
    from labs.kit.run import main

    sys.exit(main(__file__))
