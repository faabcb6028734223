"""Lab 8: 3D parallelism. Data, pipeline and tensor parallelism on one device mesh: whose sum is it?

Each of the three is easy alone. Together, the mistakes are all of one kind: a sum over the wrong ranks. A
mesh is an array of ranks, and a group is a line in it. 8 ranks as dp x pp x tp = 2 x 2 x 2, tp innermost:

                 dp 0: half of the sequences        dp 1: the others
                    tp 0         tp 1                  tp 0         tp 1
    pp 0: ids,    [rank 0] --- [rank 1]   . . . .   [rank 4] --- [rank 5]     ---  tp, in every block:
    layers 0..2       |            |                    |            |             all-gather, reduce-scatter
                      |            |                    |            |         |   pp, every microbatch:
    pp 1: loss,   [rank 2] --- [rank 3]   . . . .   [rank 6] --- [rank 7]          send (b, s/tp, h)
    layers 3, 4                                                               . .  dp (0 and 4, 1 and 5, ...):
                                                                                   once a step, all gradients

tp talks most, so its ranks are neighbours on one node (NVLink). dp sends all gradients, but once a step, and
can hide that behind the backward; pp sends little. What each rank takes part in, in a step (N = b s tokens of
its replica, h hidden, L layers of its stage; the head and the embedding count as another half layer each):

    count       dp           how many targets all replicas have: one number
    forward     tp           2 L all-gathers and 2 L reduce-scatters of N h;  pp: a send of N h / tp
    backward    tp           the same;                                        pp: the same
    gradients   tp, kv       norms saw this rank's tokens; K, V that several ranks hold its query heads
                embedding    first and last stage hold one table, as embedding and as head
                dp           everything saw this replica's sequences
    norm        pp x tp      the sum of the squares of all gradients, *each counted once*: one number

The last row is the usual bug. A rank holds parts of some parameters, copies of others, and nothing of most.
Count the copies twice, and the norm is too large. Sum over too few ranks, and each has a norm of its own,
clips by a factor of its own, and the copies of a weight part from each other for good. No loss shows it.

    python labs/lab8_3d.py                              # 8 ranks, 2 x 2 x 2
    python labs/lab8_3d.py --dp 1 --pp 4 --tp 2 --plot lab8.png --json lab8.json
    python labs/lab8_3d.py --inject-bug list

Under torchrun the lab takes the ranks that torchrun started. On several nodes, run the same line on each
(HOST: one of them, PORT: a free one there); `sbatch labs/lab8_3d.slurm` does so:

    torchrun --nnodes=2 --nproc_per_node=4 --rdzv-backend=c10d --rdzv-endpoint=HOST:PORT labs/lab8_3d.py

To try it on one machine run that line twice, with --rdzv-endpoint=localhost:29400: two agents, two "nodes".

Sources: Megatron-LM on clusters, arXiv 2104.04473 (the three together, and in which order). Megatron-LM:
core/parallel_state.py (the groups), core/distributed/finalize_model_grads.py (norms, tied table),
core/optimizer/clip_grads.py (over parameters that are no duplicates). Nanotron: parallel/context.py,
parallel/tied_parameters.py, optim/clip_grads.py. NeMo AutoModel, torchtitan: DeviceMesh and DTensor, the norm
all-reduced over pp. DeepSpeed: runtime/pipe/topology.py, TiedLayerSpec in runtime/pipe/module.py.
"""

import argparse
import copy
import importlib.util
import itertools
import json
import math
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
import types
import warnings
import zlib
from contextlib import ExitStack, nullcontext, suppress
from functools import partial
from multiprocessing import connection
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.models.llama import modeling_llama

IGNORE = -100  # a target that does not count: HF's and PyTorch's convention

# ---------------------------------------------------------------------------------------------------
# The lesson 1: the mesh
# ---------------------------------------------------------------------------------------------------

AXES = "dp", "pp", "tp"  # from the outermost to the innermost


def coordinates(rank, sizes):
    """{"dp": d, "pp": p, "tp": t}: where a rank stands in a mesh of sizes {"dp": D, "pp": P, "tp": T}.

    Ranks are dealt out as the entries of an array (D, P, T) in memory: tp counts fastest, then pp, then dp.
    """
    # exercise: mesh
    rest, t = divmod(rank, sizes["tp"])
    d, p = divmod(rest, sizes["pp"])
    return {"dp": d, "pp": p, "tp": t}
    # end exercise


def group_ranks(rank, axis, sizes):
    """The ranks of a rank's group along an axis, in order: they differ in this one coordinate.

    For the axis "tp" of sizes 2, 2, 2, rank 5: [4, 5]. For "dp": [1, 5].
    """
    # exercise: mesh
    stride = {"dp": sizes["pp"] * sizes["tp"], "pp": sizes["tp"], "tp": 1}[axis]
    first = rank - coordinates(rank, sizes)[axis] * stride
    return [first + i * stride for i in range(sizes[axis])]
    # end exercise


def make_groups(sizes, config):
    """This rank's process groups {name: group}: the mesh's axes, and three more that are drawn in it.

    kv: the neighbours in tp that hold the same KV heads. embedding: first and last stage, None on the others.
    model: all ranks of a replica, pp x tp. Every rank has to take part in making every group.
    """
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=AXES)
    groups = {axis: mesh.get_group(axis) for axis in AXES}
    ranks = mesh.mesh  # (D, P, T)
    copies = head_range(config, 0, sizes["tp"])[2]
    ends = ranks[
        :, [0, -1][: sizes["pp"]]
    ]  # (D, 2, T); with one stage (D, 1, T): it is first and last
    lists = {
        "kv": ranks.view(-1, copies),
        "embedding": ends.transpose(1, 2).flatten(0, 1),
        "model": ranks.flatten(1),
    }
    for name, rows in lists.items():
        groups[name] = dist.new_subgroups_by_enumeration(rows.tolist())[0]
    return groups


# ---------------------------------------------------------------------------------------------------
# The lesson 2: tp with sequence parallelism, as in sp_megatron.py
# ---------------------------------------------------------------------------------------------------


# Copied from tp.py
def all_reduce(x, group, op=dist.ReduceOp.SUM):
    """The sum (or max) of x over ranks, in a new tensor: autograd may still need the old one."""
    if group.size() == 1:
        return x
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, op, group=group)
    return x


# Copied from sp_megatron.py
def all_gather(x, group):
    """Every rank's tokens (b, s/P, h) -> all tokens (b, s, h)."""
    if group.size() == 1:
        return x
    x = x.transpose(0, 1).contiguous()  # ranks are joined along dim 0: why Megatron has (s, b, h)
    out = x.new_empty(x.shape[0] * group.size(), *x.shape[1:])
    dist.all_gather_into_tensor(out, x, group=group)
    return out.transpose(0, 1)


# Copied from sp_megatron.py
def reduce_scatter(x, group):
    """Sum of all ranks' (b, s, h), of which each receives its own tokens (b, s/P, h)."""
    if group.size() == 1:
        return x
    x = x.transpose(0, 1).contiguous()
    out = x.new_empty(x.shape[0] // group.size(), *x.shape[1:])
    dist.reduce_scatter_tensor(out, x, group=group)
    return out.transpose(0, 1)


# Copied from sp_megatron.py
class GatherFromSPRegion(torch.autograd.Function):
    """Megatron's g. Every rank's columns used all tokens, so dx is a sum; each owns s/P of it."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return all_gather(x, group)

    @staticmethod
    def backward(ctx, grad):
        return reduce_scatter(grad, ctx.group), None


# Copied from sp_megatron.py
class ReduceScatterToSPRegion(torch.autograd.Function):
    """Megatron's g-bar. y sums the ranks' partial results, so each receives dy of all tokens."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return reduce_scatter(x, group)

    @staticmethod
    def backward(ctx, grad):
        return all_gather(grad, ctx.group), None


gather_from_sp_region = GatherFromSPRegion.apply  # (x (b, s/P, h), group) -> (b, s, h)
reduce_scatter_to_sp_region = ReduceScatterToSPRegion.apply  # (x (b, s, h), group) -> (b, s/P, h)


# Copied from tp.py
def split(n, rank, world):
    """[start, end) of the rank's share of n things: the first n % world ranks hold one more."""
    base, extra = divmod(n, world)
    return rank * base + min(rank, extra), (rank + 1) * base + min(rank + 1, extra)


# Copied from tp.py
def head_range(config, rank, world):
    """Query heads [q0, q1) and KV heads [k0, k1) of a rank; how many ranks hold the same KV heads.

    With world <= kv_heads whole KV groups (a KV head and the query heads that read it) are dealt
    out; with more ranks than KV heads, `replicas` ranks share one and deal out its query heads.
    """
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    queries = heads // kv_heads  # query heads a KV head
    works = [w for w in range(1, heads + 1) if w <= kv_heads or w % kv_heads == 0]
    if world not in works:
        raise Unusable(
            f"{heads} heads with {kv_heads} KV heads cannot be split over {world} ranks; "
            f"these rank counts would do: {', '.join(map(str, works))}"
        )
    if world <= kv_heads:
        k0, k1 = split(kv_heads, rank, world)
        return (k0 * queries, k1 * queries), (k0, k1), 1
    replicas = world // kv_heads
    k = rank // replicas
    q0, q1 = split(queries, rank % replicas, replicas)
    return (k * queries + q0, k * queries + q1), (k, k + 1), replicas


# Copied from tp.py
def keep(parameter, dim, start, end, replicas=1):
    """A Parameter of its own with rows (dim 0) or columns (dim 1) [start, end) of a full one.

    `shard` says which slice of the full tensor it is, `replicas` how many ranks hold that slice.
    """
    kept = nn.Parameter(parameter.narrow(dim, start, end - start).clone())
    kept.shard, kept.replicas = (dim, start, end), replicas
    return kept


# Copied from tp.py
def column_parallel(linear, start, end, replicas=1):
    """Megatron's ColumnParallelLinear: output features [start, end). A weight is (out, in)."""
    linear.weight = keep(linear.weight, 0, start, end, replicas)
    if linear.bias is not None:
        linear.bias = keep(linear.bias, 0, start, end, replicas)


# Copied from tp.py
def row_parallel(linear, start, end, rank):
    """Megatron's RowParallelLinear: input features [start, end); the outputs are partial sums."""
    linear.weight = keep(linear.weight, 1, start, end)
    if linear.bias is not None:  # on one rank only, so that it is added once
        linear.bias = keep(linear.bias, 0, 0, len(linear.bias)) if rank == 0 else None


# Copied from sp_megatron.py
class VocabParallelEmbedding(nn.Module):
    """Rows [start, end) of an nn.Embedding; another rank's token looks up nothing here."""

    def __init__(self, embedding, start, end, group):
        super().__init__()
        self.weight, self.start, self.end = keep(embedding.weight, 0, start, end), start, end
        self.group, pad = group, embedding.padding_idx  # HF gives this token's row no gradient
        self.padding_idx = pad - start if pad is not None and start <= pad < end else None

    def forward(self, ids):  # (b, s) -> (b, s/P, h)
        elsewhere = (ids < self.start) | (ids >= self.end)
        rows = (ids - self.start).masked_fill(elsewhere, 0)
        out = F.embedding(rows, self.weight, self.padding_idx)
        return reduce_scatter_to_sp_region(out.masked_fill(elsewhere[..., None], 0), self.group)


# Copied from tp.py
def wrap(module, forward):
    """Have a module run forward(inner, x, ...), inner being what it ran so far.

    The module gets a class of its own, as PyTorch's fully_shard does it. An object that holds its
    own method (module.forward = ...) would be a reference cycle: weights that are dropped later
    would stay in memory until Python happens to look for such cycles.
    """
    kind = type(module)

    def wrapped(self, *args, **kwargs):
        return forward(types.MethodType(kind.forward, self), *args, **kwargs)

    module.__class__ = type(kind.__name__, (kind,), {"forward": wrapped})


# Copied from sp_megatron.py
def parallel_block(block, group):
    """Run an attention or MLP block as leave(block(enter(x)))."""

    def forward(inner, hidden_states, **kwargs):  # (b, s/P, h) -> (b, s/P, h)
        out = inner(gather_from_sp_region(hidden_states, group), **kwargs)
        if isinstance(out, tuple):  # attention returns (output, weights)
            return reduce_scatter_to_sp_region(out[0], group), *out[1:]
        return reduce_scatter_to_sp_region(out, group)

    wrap(block, forward)


# Copied from tp.py
class VocabParallelCrossEntropy(torch.autograd.Function):
    """-log softmax(logits)[target] with the vocabulary cut over the ranks (Megatron-LM).

    logits (n, v/P): columns [start, start + v/P); target (n): ids of the whole vocabulary. Returns
    the loss of each token, (n). Three numbers a token are reduced instead of gathering v of them.
    """

    @staticmethod
    def forward(ctx, logits, target, start, group):
        largest = logits.max(-1, keepdim=True).values.float()
        peak = all_reduce(largest, group, dist.ReduceOp.MAX)
        shifted = logits.float() - peak  # at most 0: exp stays finite
        elsewhere = (target < start) | (target >= start + logits.shape[-1])
        column = (target - start).masked_fill(elsewhere, 0)[:, None]
        target_logit = shifted.gather(-1, column)[:, 0].masked_fill(elsewhere, 0)
        both = torch.stack([target_logit, shifted.exp_().sum(-1)])
        target_logit, sum_exp = all_reduce(both, group)
        # Not peak + log(sum_exp) as one number: rounded at the size of a logit, it would cost two
        # digits of the gradient of a confident prediction, where softmax - 1 is small.
        ctx.save_for_backward(logits, column, elsewhere, peak, sum_exp)
        return sum_exp.log() - target_logit

    @staticmethod
    def backward(ctx, grad):  # d loss / d logits = softmax - one_hot(target): no communication
        logits, column, elsewhere, peak, sum_exp = ctx.saved_tensors
        softmax = (logits.float() - peak).exp_().div_(sum_exp[:, None])
        softmax.scatter_add_(-1, column, -(~elsewhere)[:, None].to(softmax.dtype))
        return softmax.mul_(grad[:, None]).to(logits.dtype), None, None, None


# Copied from tp.py
def vocab_parallel_cross_entropy(logits, target, start, group):
    """Loss of each token, (b, s), from this rank's logits (b, s, v/P); 0 where target is IGNORE."""
    flat = logits.flatten(0, 1), target.flatten()
    loss = VocabParallelCrossEntropy.apply(*flat, start, group)
    return loss.view_as(target).masked_fill(target == IGNORE, 0)


# Copied from sp_megatron.py
def token_loss(model, hidden, targets, group):
    """Sum of the losses of every rank's tokens hidden (b, c/P, h), each with v/P columns."""
    hidden = gather_from_sp_region(hidden, group)  # (b, c, h): the head is column parallel
    logits = F.linear(hidden, model.lm_head.weight)  # (b, c, v/P)
    start, _ = split(model.config.vocab_size, group.rank(), group.size())
    return vocab_parallel_cross_entropy(logits, targets, start, group).sum()


# Copied from sp_megatron.py
def padded(length, world):
    """The length that world divides. Padding comes last: no token before it attends to it."""
    return length + -length % world


# ---------------------------------------------------------------------------------------------------
# The lesson 3: this rank's part of the model, and who else holds it
# ---------------------------------------------------------------------------------------------------


def parallelize(model, groups):
    """Cut HF's LlamaForCausalLM down to this rank's share of this rank's stage, in place.

    model.stage = (first layer, end), and every parameter has `shared`, the groups of copies_of(). Names stay
    HF's: nn.Identity() stands for what other stages have. The last stage has the table as lm_head.weight.
    """
    config, tp, pp = model.config, groups["tp"], groups["pp"]
    model.stage = split(config.num_hidden_layers, pp.rank(), pp.size())
    for i, layer in enumerate(model.model.layers):
        if i in range(*model.stage):
            parallelize_layer(layer, config, tp)
        else:
            model.model.layers[i] = nn.Identity()
    v0, v1 = split(config.vocab_size, tp.rank(), tp.size())
    embedding = VocabParallelEmbedding(model.model.embed_tokens, v0, v1, tp)
    first, last = pp.rank() == 0, pp.rank() == pp.size() - 1
    model.model.embed_tokens = embedding if first else nn.Identity()
    if last:
        model.lm_head.weight = embedding.weight
    else:
        model.model.norm, model.lm_head = nn.Identity(), nn.Identity()
    for name, parameter in model.named_parameters():
        parameter.shared = copies_of(name)


def parallelize_layer(layer, config, group):
    """Keep this rank's heads and features of a layer, and put g and g-bar around its two blocks."""
    rank, world, d = group.rank(), group.size(), config.head_dim
    (q0, q1), (k0, k1), copies = head_range(config, rank, world)
    i0, i1 = split(config.intermediate_size, rank, world)
    attention, mlp = layer.self_attn, layer.mlp
    column_parallel(attention.q_proj, q0 * d, q1 * d)
    column_parallel(attention.k_proj, k0 * d, k1 * d, copies)
    column_parallel(attention.v_proj, k0 * d, k1 * d, copies)
    row_parallel(attention.o_proj, q0 * d, q1 * d, rank)
    attention.num_key_value_groups = (q1 - q0) // (k1 - k0)
    column_parallel(mlp.gate_proj, i0, i1)
    column_parallel(mlp.up_proj, i0, i1)
    row_parallel(mlp.down_proj, i0, i1, rank)
    parallel_block(attention, group)
    parallel_block(mlp, group)


def copies_of(name):
    """The groups whose ranks all hold the same numbers of a parameter, of "kv", "tp", "embedding", "dp".

    Each of those ranks saw another part of what its gradient is a sum over. So this one table says what is
    still to be summed after the backward, and what the gradient norm must not count twice.

    name: as HF has it, such as model.layers.0.self_attn.k_proj.weight; the last stage's table is
    lm_head.weight. A list, each group once, in any order. A group may have one rank only: name it all the
    same. kv is a part of tp: what all of tp shares names tp alone. And dp has it all.
    """
    # exercise: copies_of
    if name.endswith(
        "norm.weight"
    ):  # input_layernorm, post_attention_layernorm, norm: whole, own tokens
        return ["tp", "dp"]
    if "k_proj" in name or "v_proj" in name:  # where T > KV heads: the same head, own query heads
        return ["kv", "dp"]
    if "embed_tokens" in name or "lm_head" in name:  # as embedding there, as head here
        return ["embedding", "dp"]
    return ["dp"]
    # end exercise


def run_stage(model, x, group):
    """(b, s/T, h) -> (b, s/T, h) through this rank's layers; the first stage takes ids (b, s)."""
    part = model.model
    x = part.embed_tokens(x)  # nn.Identity() but on the first stage
    positions = torch.arange(x.shape[1] * group.size())[
        None
    ]  # of all tokens: attention sees them all
    rotary = part.rotary_emb(x, positions)
    for layer in part.layers[slice(*model.stage)]:
        x = layer(x, position_embeddings=rotary)  # no mask: sdpa is causal by itself
    return part.norm(x)  # nn.Identity() but on the last stage


# ---------------------------------------------------------------------------------------------------
# The lesson 4: a step
# ---------------------------------------------------------------------------------------------------


def target_count(targets, groups):
    """How many targets the whole batch has, from this replica's (b, s); the same on every rank."""
    # exercise: loss_scale
    return all_reduce((targets != IGNORE).sum(), groups["dp"])
    # end exercise


def microbatch_loss(model, hidden, targets, count, groups):
    """This microbatch's part of the mean loss over all count targets: the parts of all replicas add up to it.

    hidden (b/M, s/T, h), targets (b/M, s). token_loss(model, hidden, targets, group) is the sum over a
    microbatch's targets, the same on every rank of tp.
    """
    # exercise: loss_scale
    return token_loss(model, hidden, targets, groups["tp"]) / count
    # end exercise


def neighbour(groups, step):
    """(global rank of the stage that many below, the group to send in)."""
    pp = groups["pp"]
    return dist.get_global_rank(pp, pp.rank() + step), pp


def forward_all(model, ids, targets, count, groups, microbatches):
    """The forward of every microbatch: [(input, output)], which the backward starts from.

    All forward, all backward (GPipe): sends may then simply wait until they are received. With 1F1B a stage
    would wait to send forward to one that waits to send back: see pp.py for this, and for the schedules.
    """
    tp, pp = groups["tp"], groups["pp"]
    first, last, held = pp.rank() == 0, pp.rank() == pp.size() - 1, []
    for m in range(microbatches):
        rows = slice(*split(len(ids), m, microbatches))
        x = ids[rows]  # (b/M, s)
        if not first:
            x = torch.empty(len(x), x.shape[1] // tp.size(), model.config.hidden_size)
            dist.recv(x, *neighbour(groups, -1))
            x.requires_grad_()
        out = run_stage(model, x, tp)  # (b/M, s/T, h)
        if last:
            out = microbatch_loss(model, out, targets[rows], count, groups)
        else:
            dist.send(out.detach().contiguous(), *neighbour(groups, 1))
        held.append((x, out))
    return held


def backward_all(held, groups):
    """The backward of every microbatch: .grad is then what this rank saw of it."""
    pp = groups["pp"]
    for x, out in held:
        grad = None
        if pp.rank() < pp.size() - 1:
            grad = torch.empty(out.shape)
            dist.recv(grad, *neighbour(groups, 1))
        out.backward(grad)
        if pp.rank() > 0:
            dist.send(x.grad.contiguous(), *neighbour(groups, -1))


def finish_gradients(model, groups):
    """Sum every .grad over the groups named in its parameter's `shared`; one message a group.

    Sums, not means: microbatch_loss has divided already. The order of the groups does not matter to the
    sums. all_reduce sends nothing in a group of one rank; groups["embedding"] is None on middle stages, where
    no parameter names it.
    """
    # exercise: finish_gradients
    for name in ("kv", "tp", "embedding", "dp"):
        grads = [p.grad for p in model.parameters() if name in p.shared]
        if not grads:
            continue
        total = all_reduce(torch.cat([grad.flatten() for grad in grads]), groups[name])
        for grad, part in zip(grads, total.split([grad.numel() for grad in grads])):
            grad.copy_(part.view_as(grad))
    # end exercise


def grad_norm(model, groups):
    """The norm of the whole model's gradient, a tensor of no dimension, the same on every rank.

    From finished gradients. Each number counts once: not once a copy within the replica (`shared` says who
    has copies; another way is to count on the first rank of each such group, as Megatron-LM does), and the
    replicas of dp have the same gradients. One message of one number, over groups["model"].
    """
    # exercise: grad_norm
    squares = torch.zeros((), dtype=torch.float64)
    for p in model.parameters():
        copies = math.prod(groups[name].size() for name in p.shared if name != "dp")
        squares += p.grad.double().square().sum() / copies
    return all_reduce(squares, groups["model"]).sqrt()
    # end exercise


def clip_gradients(model, norm, most):
    """Scale every .grad, in place, so that their norm is at most `most`; as torch's clip_grad_norm_ does.

    All ranks have the same norm and take the same factor. Gradients that are small enough stay as they are.
    """
    # exercise: clip
    factor = (most / (norm + 1e-6)).clamp(max=1)
    for p in model.parameters():
        p.grad.mul_(factor)
    # end exercise


def mean_loss(held, groups):
    """The batch's mean loss, on all ranks, for the log: only the last stages have parts of it."""
    pp = groups["pp"]
    own = torch.zeros(())
    if pp.rank() == pp.size() - 1:
        own = sum(loss.detach() for _, loss in held)
    return all_reduce(all_reduce(own, pp), groups["dp"])


def train_step(model, ids, targets, groups, microbatches, most):
    """A step up to where the optimizer takes over: (loss, gradient norm before clipping), on all ranks.

    ids, targets (b, s): this replica's sequences, s a multiple of T. The .grad of every parameter is None
    before; afterwards it is the whole batch's, clipped to the norm `most`. Put together, in the right order,
    target_count, forward_all, backward_all, finish_gradients, grad_norm, clip_gradients, mean_loss.
    """
    # exercise: train_step
    count = target_count(targets, groups)
    held = forward_all(model, ids, targets, count, groups, microbatches)
    backward_all(held, groups)
    finish_gradients(model, groups)
    norm = grad_norm(model, groups)
    clip_gradients(model, norm, most)
    return mean_loss(held, groups), norm
    # end exercise


def replica_rows(n, groups):
    """Which of n sequences are this replica's, a slice: all ranks of pp and tp take the same."""
    return slice(*split(n, groups["dp"].rank(), groups["dp"].size()))


# ---------------------------------------------------------------------------------------------------
# The proof: two steps beside one device's
# ---------------------------------------------------------------------------------------------------

LENGTH = 21  # tokens a sequence: no T but 3 and 7 divides it
SAME = {"lm_head.weight": "model.embed_tokens.weight"}  # tied: one device has it under this name


def tiny_config(stages):
    """A LLaMA whose sizes little divides: tied embeddings, 2 KV heads, at least a layer a stage."""
    return modeling_llama.LlamaConfig(
        vocab_size=131, hidden_size=32, intermediate_size=76, num_hidden_layers=max(5, stages),
        num_attention_heads=8, num_key_value_heads=2, head_dim=4, tie_word_embeddings=True,
        initializer_range=0.1, attn_implementation="sdpa",
    )  # fmt: skip


def tiny_model(stages, seed):
    """That LLaMA on one device, with random weights: the same on every rank."""
    torch.manual_seed(seed)
    return modeling_llama.LlamaForCausalLM(tiny_config(stages))


def random_batch(sizes, microbatches, seed):
    """ids and targets (B, s) of all replicas. Sequence i has its own number of targets, then IGNORE.

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
    """The slice of one device's tensor that this rank has a shard of; all of it where it has all: a norm."""
    dim, start, end = getattr(parameter, "shard", (0, 0, len(full)))
    return full.narrow(dim, start, end - start)


def relative(mine, right):
    """||mine - right|| / ||right||, of tensors or numbers."""
    mine, right = torch.as_tensor(mine).double(), torch.as_tensor(right).double()
    error = torch.linalg.vector_norm(mine - right) / torch.linalg.vector_norm(right).clamp(
        min=1e-30
    )
    return error.nan_to_num(1e30, 1e30).item()  # what is no number is far off


class Ledger(TorchDispatchMode):
    """Counts, as it happens, what a step sends: rows {(phase, op, group): [calls, bytes]}."""

    PHASES = {"target_count": "count", "forward_all": "forward", "backward_all": "backward"}
    PHASES |= {"finish_gradients": "gradients", "grad_norm": "norm", "mean_loss": "log"}

    def __init__(self, lab, groups):
        """Has the functions of the module lab that train_step calls say when they begin."""
        super().__init__()
        self.rows, self.phase = {}, "elsewhere"
        self.names = {
            group.group_name: name for name, group in groups.items() if group and group.size() > 1
        }
        for function, phase in self.PHASES.items():
            setattr(lab, function, partial(self.begin, phase, getattr(lab, function)))

    def begin(self, phase, function, *args):
        self.phase = phase
        return function(*args)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        with Traffic() if func.namespace == "c10d" else nullcontext() as traffic:
            out = func(*args, **(kwargs or {}))
        for op, (calls, sent) in (traffic.ops if traffic else {}).items():
            packed = next(
                arg for arg in args if isinstance(arg, torch.ScriptObject)
            )  # the process group
            group = self.names.get(dist.ProcessGroup.unbox(packed).group_name, "another")
            row = self.rows.setdefault((self.phase, op, group), [0, 0])
            row[0], row[1] = row[0] + calls, row[1] + sent
        return out


def expected_traffic(model, groups, rows, microbatches):
    """What a step must send, from this rank's place: {(phase, op, group): [calls, bytes]}, as Traffic counts.

    rows: this replica's sequences.
    """
    config, size = model.config, {name: group.size() for name, group in groups.items() if group}
    h, M, T = config.hidden_size, microbatches, size["tp"]
    first, last = groups["pp"].rank() == 0, groups["pp"].rank() == size["pp"] - 1
    layers = model.stage[1] - model.stage[0]
    tokens = rows * padded(LENGTH, T)
    hidden = 4 * tokens * h  # one (b, s, h) in float32, all microbatches together
    gathers, scatters = (
        2 * layers + last,
        2 * layers + first,
    )  # the head's input; the embedding's output
    own = {
        name: 4 * sum(p.numel() for p in model.parameters() if name in p.shared) for name in size
    }
    table = {
        ("count", "all_reduce", "dp"): [1, 8],
        ("forward", "all_gather", "tp"): [M * gathers, gathers * hidden],
        ("forward", "reduce_scatter", "tp"): [M * scatters, scatters * hidden],
        ("forward", "all_reduce", "tp"): [2 * M * last, 3 * 4 * tokens * last],  # cross entropy
        ("forward", "send", "pp"): [M * (not last), hidden // T * (not last)],
        ("backward", "reduce_scatter", "tp"): [M * gathers, gathers * hidden],
        ("backward", "all_gather", "tp"): [M * scatters, scatters * hidden],
        ("backward", "send", "pp"): [M * (not first), hidden // T * (not first)],
        **{("gradients", "all_reduce", name): [1, own[name]] for name in own if own[name]},
        ("norm", "all_reduce", "model"): [1, 8],
        ("log", "all_reduce", "pp"): [1, 4],
        ("log", "all_reduce", "dp"): [1, 4],
    }
    return {key: row for key, row in table.items() if row[0] and size[key[2]] > 1}


def usual_norms(model, groups):
    """{how it is computed: the norm that this rank gets}, from finished gradients: the right one first."""
    squares = [(p.shared, p.grad.double().square().sum()) for p in model.parameters()]

    def counted(*once):
        """The sum of squares; those that a group named here shares are divided by its size."""
        sizes = [
            math.prod(groups[name].size() for name in shared if name in once)
            for shared, _ in squares
        ]
        return sum(square / size for (_, square), size in zip(squares, sizes))

    once = counted("kv", "tp", "embedding")
    model_group = groups["model"]
    return {
        "each number once, over pp x tp": all_reduce(once, model_group),
        "every copy counted": all_reduce(counted(), model_group),
        "tied table counted at both ends": all_reduce(counted("kv", "tp"), model_group),
        "over tp alone": all_reduce(once, groups["tp"]),
        "over pp alone": all_reduce(once, groups["pp"]),
        "over all ranks, dp too": all_reduce(all_reduce(once, model_group), groups["dp"]),
        "this rank's part (torch's own clip)": counted(),
    }


def prove(lab, sizes, microbatches, seed):
    """Two steps of lab's model on this rank of the mesh, one unclipped and one clipped, beside one device's.

    Returns {"errors": {"loss", "gradient norm", parameter: relative error, of the worse step}, "loss",
    "norm", "one_device": the same two, "traffic", "expected": {(phase, op, group): [calls, bytes]}, "groups":
    {name: ranks}, "norms": usual_norms(), "held": numbers, a copy once, "whole": the model's, "node"}.
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
    norms = {text: square.sqrt().item() for text, square in usual_norms(cut, groups).items()}
    held = sum(
        p.numel() / math.prod(groups[name].size() for name in p.shared) for p in cut.parameters()
    )
    places = {name: dist.get_process_group_ranks(group) for name, group in groups.items() if group}
    return {
        "errors": errors, "norms": norms, "groups": places, "loss": my_loss.item(), "norm": my_norm.item(),
        "one_device": {"loss": loss, "norm": norm}, "traffic": ledger.rows,
        "expected": expected_traffic(cut, groups, len(mine[0]), microbatches),
        "held": held, "whole": sum(p.numel() for p in model.parameters()),
        "node": int(os.environ.get("GROUP_RANK", 0)),
    }  # fmt: skip


# ---------------------------------------------------------------------------------------------------
# Checks
# ---------------------------------------------------------------------------------------------------

CUBE = {"dp": 2, "pp": 2, "tp": 2}
TALL = {"dp": 1, "pp": 2, "tp": 4}  # more ranks in tp than KV heads: two hold the same
DEEP = {"dp": 2, "pp": 4, "tp": 1}  # stages that are neither first nor last


def say(sizes):
    return " x ".join(map(str, sizes.values()))


def check_mesh(lab, group, seed):
    """Against an array of ranks for several meshes, and against init_device_mesh for one, on real ranks."""
    random = torch.randint(1, 6, (4, 3), generator=torch.Generator().manual_seed(seed)).tolist()
    for shape in ((2, 2, 2), (2, 3, 4), *map(tuple, random)):
        sizes, ranks = dict(zip(AXES, shape)), torch.arange(math.prod(shape)).view(shape)
        for place in itertools.product(*map(range, shape)):
            rank, right = ranks[place].item(), dict(zip(AXES, place))
            mine, where = lab.coordinates(rank, dict(sizes)), f"rank {rank} of {say(sizes)}"
            inside_out = [
                rank % shape[0],
                rank // shape[0] % shape[1],
                rank // shape[0] // shape[1],
            ]
            hint = (
                "tp counts fastest: its ranks are neighbours"
                if list(mine.values()) == inside_out
                else ""
            )
            expect(mine == right, f"coordinates of {where}: {mine}, not {right}", hint)
            for axis, name in enumerate(AXES):
                mine = lab.group_ranks(rank, name, dict(sizes))
                line = ranks.movedim(axis, -1)[place[:axis] + place[axis + 1 :]].tolist()
                hints = {
                    "these share a coordinate that a group differs in": ranks.select(axis, place[axis]),
                    "only those of tp are neighbours": rank - place[axis] + torch.arange(shape[axis]),
                }  # fmt: skip
                hint = next(
                    (text for text, wrong in hints.items() if wrong.flatten().tolist() == mine), ""
                )
                expect(mine == line, f"the {name} group of {where}: {mine}, not {line}", hint)
    shape = [(2, 2, 2), (1, 4, 2), (4, 1, 2), (2, 4, 1), (2, 1, 4)][seed % 5]
    mesh, sizes = init_device_mesh("cpu", shape, mesh_dim_names=AXES), dict(zip(AXES, shape))
    mine, right = lab.coordinates(group.rank(), sizes), dict(zip(AXES, mesh.get_coordinate()))
    expect(mine == right, f"{mine} are not torch's coordinates, {right}")
    for axis in AXES:
        right = dist.get_process_group_ranks(mesh.get_group(axis))
        expect(
            lab.group_ranks(group.rank(), axis, sizes) == right, f"torch's {axis} group is {right}"
        )
    return f"{2 + len(random)} meshes; as init_device_mesh has it for {say(sizes)} on 8 ranks"


def check_copies_of(lab, group, seed):
    """Every name of HF's LLaMA, and the last stage's table."""
    hints = {
        "norm.weight": "a norm is whole on every rank of tp, and sees its rank's tokens only",
        "k_proj": "with more ranks in tp than KV heads several hold the same head, the group kv",
        "v_proj": "with more ranks in tp than KV heads several hold the same head, the group kv",
        "embed_tokens": "the table is on the first stage and, as head, on the last: the group embedding",
        "lm_head": "the head is the table of embed_tokens: the group embedding",
    }
    names = [*dict(tiny_model(1, seed).named_parameters()), *SAME]
    for name in names:
        mine, right = lab.copies_of(name), copies_of(name)
        expect(isinstance(mine, list | tuple | set), f"{name}: {mine} is no list of names")
        hint = "every rank of tp has its own rows or columns of it: only dp has them again"
        hint = next((text for key, text in hints.items() if key in name), hint)
        if "dp" not in mine:
            hint = "all replicas of dp hold every parameter, and each saw its own sequences"
        expect(sorted(mine) == sorted(right), f"{name}: {sorted(mine)}, not {sorted(right)}", hint)
    return f"{len(names)} parameters, each with the groups that hold the same numbers"


def drawn(shape, *key):
    """Random numbers that only the key decides: the same on every rank that asks for them."""
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(zlib.crc32(repr(key).encode()))
    )


def check_loss_scale(lab, group, seed):
    """2 x 1 x 2: replicas and microbatches with different numbers of targets."""
    sizes, microbatches = {"dp": 2, "pp": 1, "tp": 2}, 2
    model = tiny_model(1, seed)
    groups = make_groups(sizes, model.config)
    cut, (_, targets) = copy.deepcopy(model), random_batch(sizes, microbatches, seed)
    parallelize(cut, groups)
    targets = targets[:, : LENGTH - 1]  # an even length
    hidden = drawn((*targets.shape, 32), "hidden", seed).requires_grad_()
    logits = F.linear(hidden, model.lm_head.weight.detach())
    right = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE)
    right.backward()
    rows, tokens = (
        replica_rows(len(targets), groups),
        slice(*split(LENGTH - 1, groups["tp"].rank(), 2)),
    )
    own, total = (targets[rows] != IGNORE).sum().item(), (targets != IGNORE).sum().item()
    count = int(lab.target_count(targets[rows], groups))
    hint = {
        own: "these are this replica's: sum over dp",
        targets.numel(): "IGNORE is no target",
        2 * total: "the ranks of tp have the same targets: sum over dp alone",
    }.get(count, "")
    expect(count == total, f"{count} targets on rank {group.rank()}, not {total}", hint)
    mine = hidden.detach()[rows, tokens].clone().requires_grad_()
    parts, means, own_mean = [], [], []
    for m in range(microbatches):
        r = slice(*split(len(mine), m, microbatches))
        parts.append(lab.microbatch_loss(cut, mine[r], targets[rows][r], total, groups))
        with torch.no_grad():
            loss = token_loss(cut, mine[r], targets[rows][r], groups["tp"])
        means.append(loss / (targets[rows][r] != IGNORE).sum() / microbatches / 2)
        own_mean.append(loss / own / 2)
    sum(parts).backward()

    def batch(losses):
        return all_reduce(sum(losses).detach(), groups["dp"])

    whole, others = right.detach(), "weights a target by how few others it has beside it"
    hints = {
        f"a mean of the microbatches' means {others}": batch(means),
        f"a mean of the microbatches' means {others}; and they are added up undivided": 4
        * batch(means),
        f"a mean of the replicas' means {others}": batch(own_mean),
        "the sum is not divided by count": whole * total,
        "count is that of all microbatches already": whole / microbatches,
        "count is that of all replicas already": whole / 2,
    }
    error = expect_close("the sum of all parts", batch(parts), whole, hints=hints)
    expect_close("the gradient of hidden", mine.grad, hidden.grad[rows, tokens])
    return f"mean over {total} targets, {own} of them on this replica; off by {error:.0e}"


def shards(lab, sizes, seed):
    """(lab's cut model, its groups, {name: (key, [ranks that hold the same numbers])}), of random weights."""
    model = tiny_model(sizes["pp"], seed)
    groups = make_groups(sizes, model.config)
    parallelize(model, groups)
    keys = {
        name: (SAME.get(name, name), getattr(p, "shard", None))
        for name, p in model.named_parameters()
    }
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, set(keys.values()))
    return model, groups, {
        name: (key, [rank for rank, held in enumerate(everyone) if key in held]) for name, key in keys.items()
    }  # fmt: skip


def check_finish_gradients(lab, group, seed):
    """Random gradients on every rank; right is the sum over whoever really holds the same numbers."""
    moved, axis_of, worst = 0, {"kv": "tp", "tp": "tp", "embedding": "pp", "dp": "dp"}, 0
    why = {
        "kv": "two ranks hold the same KV head, each saw its own query heads",
        "tp": "norms: each rank of tp saw its own tokens",
        "embedding": "the tied table: the first stage saw it as embedding, the last as head",
        "dp": "each replica saw its own sequences",
    }
    for sizes in (CUBE, TALL, DEEP):
        model, groups, holders = shards(lab, sizes, seed)
        here, right = coordinates(group.rank(), sizes), {}
        for name, p in model.named_parameters():
            key, ranks = holders[name]
            parts = {rank: drawn(p.shape, seed, key, rank) for rank in ranks}
            p.grad = parts[group.rank()].clone()
            hints = {}
            for over in p.shared:
                if groups[over].size() > 1:
                    axis = axis_of[over]
                    some = [r for r in ranks if coordinates(r, sizes)[axis] == here[axis]]
                    hints[f"not summed over {over}: {why[over]}"] = sum(parts[r] for r in some)
                    mean = f"a mean, not the sum, over {over}: microbatch_loss has divided already"
                    hints[mean] = sum(parts.values()) / groups[over].size()
            means = sum(parts.values()) / math.prod(groups[over].size() for over in p.shared)
            right[name] = (
                sum(parts.values()),
                hints | {"a mean, not the sum, over every group": means},
            )
        with Traffic() as traffic:
            lab.finish_gradients(model, groups)
        for name, p in model.named_parameters():
            total, hints = right[name]
            title = f"{say(sizes)}, rank {group.rank()}: the gradient of {name}"
            worst = max(worst, expect_close(title, p.grad, total, hints=hints))
        over = {name for p in model.parameters() for name in p.shared if groups[name].size() > 1}
        most = sum(p.grad.nbytes for p in model.parameters() for name in p.shared if name in over)
        calls, sent = map(sum, zip(*traffic.ops.values())) if traffic.ops else (0, 0)
        expect(
            calls <= len(over),
            f"{calls} messages for {len(over)} groups",
            "join a group's gradients",
        )
        expect(sent <= most, f"{sent} bytes sent, {most} will do", "only what the group shares")
        moved = max(moved, sent)
    return f"{say(CUBE)}, {say(TALL)}, {say(DEEP)}: off by {worst:.0e}; one message a group, {moved} bytes"


def check_grad_norm(lab, group, seed):
    """Gradients that are one device's, cut; the norm of it all is known."""
    worst = 0
    for sizes in (CUBE, TALL, DEEP):
        model, groups, holders = shards(lab, sizes, seed)
        whole = dict(tiny_model(sizes["pp"], seed).named_parameters())
        full = {name: drawn(p.shape, seed, name) for name, p in whole.items()}
        for name, p in model.named_parameters():
            p.grad = part_of(full[holders[name][0][0]], p).clone()
        before = [p.grad.clone() for p in model.parameters()]
        squares = usual_norms(model, groups)
        right = torch.linalg.vector_norm(torch.cat([f.flatten() for f in full.values()]).double())
        with Traffic() as traffic:
            norm = lab.grad_norm(model, groups)
        reasons = {
            "every copy counted": "a parameter that several ranks hold is counted once for each of them",
            "tied table counted at both ends": "the tied table is counted on the first stage and on the last",
            "over tp alone": "the other stages' parameters are missing: groups['model'] is pp x tp",
            "over pp alone": "the other shards of tp are missing: groups['model'] is pp x tp",
            "over all ranks, dp too": "the replicas of dp have the same gradients: one of them counts",
            "this rank's part (torch's own clip)": "this is the norm of what this rank holds",
        }
        hints = {reason: squares[text].sqrt() for text, reason in reasons.items()}
        hints["the norm is the root of the sum of squares"] = right.square()
        sizes_of = {name: group.size() for name, group in groups.items() if group} | {"dp": 1}
        own = sum(
            p.grad.double().square().sum() / math.prod(map(sizes_of.get, p.shared))
            for p in model.parameters()
        )
        hints["this is this rank's share: sum the squares over groups['model']"] = own.sqrt()
        title = f"{say(sizes)}: the norm on rank {group.rank()}"
        worst = max(
            worst, expect_close(title, torch.as_tensor(norm).double().detach(), right, hints=hints)
        )
        sent = sum(sent for _, sent in traffic.ops.values())
        expect(sent <= 32, f"{sent} bytes sent for a norm", "send a sum of squares: one number")
        same = all(torch.equal(p.grad, old) for p, old in zip(model.parameters(), before))
        expect(same, "grad_norm changes the gradients")
    return f"{say(CUBE)}, {say(TALL)}, {say(DEEP)}: off by {worst:.0e} on every rank, {sent} bytes sent"


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
                "each tensor is clipped by itself: the gradient points elsewhere": f
                * (most / f.norm()),
                "nothing is clipped": f,
            }
            worst = max(worst, expect_close(f"{case}: a gradient", mine, wanted, hints=hints))
    return f"above and below the limit as torch's clip_grad_norm_, off by {worst:.0e}; nothing sent"


def check_train_step(lab, group, seed):
    """The whole step, on 2 x 2 x 2, beside one device."""
    found = prove(lab, CUBE, 2, seed)
    for name, error in found["errors"].items():
        hint = "first every .grad is finished, over all groups; then one norm of them; by it they are clipped"
        what = f"the gradient of {name}" if "." in name else name
        expect(
            error <= 1e-5,
            f"{what} on rank {group.rank()} is off by {error:.1e} (at most 1e-05)",
            hint,
        )
    expect(found["traffic"] == found["expected"], "the step sends something else than it should",
           "each of the functions once")  # fmt: skip
    worst = max(found["errors"].values())
    return f"loss, norm, every gradient, clipped and not: off by {worst:.0e} from one device, {say(CUBE)}"


CHECKS = {
    "mesh": (check_mesh, 8),
    "copies_of": (check_copies_of, 1),
    "loss_scale": (check_loss_scale, 4),
    "finish_gradients": (check_finish_gradients, 8),
    "grad_norm": (check_grad_norm, 8),
    "clip": (check_clip, 1),
    "train_step": (check_train_step, 8),
}


# ---------------------------------------------------------------------------------------------------
# Experiment: the whole model on the mesh that the command line asks for
# ---------------------------------------------------------------------------------------------------


def prove_on_rank(group, bug, sizes, microbatches, seed):
    """prove() on this rank, with the bug in place."""
    lab = load(__file__)
    if bug:
        globals()[bug](lab)
    return prove(lab, sizes, microbatches, seed)


def on_torchruns_ranks(task=None):
    """[prove_on_rank(*task) of each rank], on rank 0 of those that torchrun started; None on the others.

    Rank 0 comes here from main(), with the task; the others have waited for it.
    """
    torch.set_num_threads(1)
    warnings.filterwarnings(
        "ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning
    )  # rank_main
    dist.init_process_group("gloo")
    tasks, reports = [task], [None] * dist.get_world_size()
    dist.broadcast_object_list(tasks)
    report = prove_on_rank(dist.group.WORLD, *tasks[0])
    dist.gather_object(report, reports if dist.get_rank() == 0 else None)
    dist.destroy_process_group()
    return reports


def mesh_sizes(args):
    """{"dp", "pp", "tp"}: what the command line does not say, of torchrun's ranks or else of 8."""
    sizes = {axis: getattr(args, axis) for axis in AXES}
    left = (started() or 8) // math.prod(n for n in sizes.values() if n) or 1
    for axis in ("tp", "pp"):
        sizes[axis] = sizes[axis] or 2 - left % 2
        left //= 1 if getattr(args, axis) else sizes[axis]
    sizes["dp"] = sizes["dp"] or left
    world = math.prod(sizes.values())
    if started() not in (None, world):
        would = f"--dp {started()} --pp 1 --tp 1 would do"
        raise Unusable(f"{say(sizes)} is {world} ranks, and torchrun started {started()}; {would}")
    return sizes


def experiment(args):
    """The proof on all ranks, what they sent, and the usual norms; see prove() for the JSON's "ranks"."""
    sizes = mesh_sizes(args)
    task = args.inject_bug, sizes, args.microbatches, args.seed
    world = math.prod(sizes.values())
    reports = (
        on_torchruns_ranks(task) if "RANK" in os.environ else on_ranks(world, prove_on_rank, *task)
    )
    nodes = 1 + max(report["node"] for report in reports)
    on = f"{world} ranks" + (f" of {nodes} nodes" if nodes > 1 else "")
    print(f"\nLLaMA on {on}, dp x pp x tp = {say(sizes)}, beside one device")
    failed = print_errors(reports) + print_traffic(reports)
    print_norms(reports)
    held, whole = sum(report["held"] for report in reports), reports[0]["whole"]
    failed += [] if math.isclose(held, whole) else [f"the ranks hold {held} of {whole} numbers"]
    for report in reports:
        for key in ("traffic", "expected"):  # JSON has no tuples as keys
            report[key] = [[*place, *row] for place, row in sorted(report[key].items())]
    return {"mesh": sizes, "microbatches": args.microbatches, "ranks": reports, "failed": failed}


def print_errors(reports):
    """A line for loss, norm and each kind of parameter; returns those that are off."""
    worst = {}
    for rank, report in enumerate(reports):
        for name, error in report["errors"].items():
            kind = SAME.get(name, name).replace("model.", "").removesuffix(".weight")
            kind = ".".join(part for part in kind.split(".") if not part.isdigit())
            shared = ", ".join(copies_of(name)) if "." in name else "all"
            worst[kind] = max(worst.get(kind, (0, 0, shared)), (error, rank, shared))
    rows = [[kind, shared, f"{error:.1e}", rank] for kind, (error, rank, shared) in worst.items()]
    print_table(["", "the same on all ranks of", "off by at most", "on rank"], *rows)
    return [
        f"{kind} off by {error:.1e}" for kind, (error, *_) in worst.items() if not error <= 1e-5
    ]


def print_traffic(reports):
    """A line for each collective, its phase and its group; returns those that the formula has otherwise."""
    rows, failed = (
        [["phase", "what", "group", "groups x ranks", "calls", "bytes a rank", "as expected"]],
        [],
    )
    phases = list(Ledger.PHASES.values())

    def spread(numbers):
        return " to ".join(dict.fromkeys(map(str, (min(numbers), max(numbers)))))

    keys = {key for report in reports for key in report["traffic"] | report["expected"]}
    for key in sorted(keys, key=lambda key: (phases.index(key[0]), key)):
        phase, op, name = key
        took_part = [report for report in reports if key in report["traffic"] | report["expected"]]
        calls, sent = zip(*(report["traffic"].get(key, (0, 0)) for report in took_part))
        lines = {tuple(report["groups"].get(name, ())) for report in took_part}
        size = f"{len(lines)} x {max(map(len, lines))}"
        if any(len({reports[rank]["node"] for rank in line}) > 1 for line in lines):
            size += ", across nodes"
        right = all(report["traffic"].get(key) == report["expected"].get(key) for report in reports)
        failed += [] if right else [f"{phase} {op} {name}"]
        rows.append([phase, op, name, size, spread(calls), spread(sent), "yes" if right else "NO"])
    print_table(*rows)
    return failed


def print_norms(reports, most=0.5):
    """The gradient norm as it is usually got wrong, and what clipping to `most` would multiply by."""
    rows = [
        ["the norm, computed", "lowest rank", "highest rank", f"clipped to {most}: gradients times"]
    ]
    for text in reports[0]["norms"]:
        norms = [report["norms"][text] for report in reports]
        low, high = min(norms), max(norms)
        factors = dict.fromkeys(f"{min(1, most / norm):.4f}" for norm in (low, high))
        rows.append([text, f"{low:.5f}", f"{high:.5f}", " to ".join(factors)])
    print_table(*rows)


# Okabe and Ito's colours, rank 0 to 7
COLOURS = "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999"
DARK = COLOURS[0], COLOURS[2], COLOURS[5]  # on which text is white


def draw(results, path):
    """The picture of --plot: for each collective of the step, which ranks do it together."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    reports, sizes, phases = results["ranks"], results["mesh"], list(Ledger.PHASES.values())
    traffic = [{tuple(row[:3]): row[3:] for row in report["traffic"]} for report in reports]
    keys = sorted(
        {key for rows in traffic for key in rows}, key=lambda key: (phases.index(key[0]), key)
    )
    figure, axis = pyplot.subplots(figsize=(4.5 + 0.95 * len(reports), 1.9 + 0.42 * len(keys)))
    for y, key in enumerate(keys):
        op, name = key[1:]
        for rank, (report, rows) in enumerate(zip(reports, traffic)):
            if key not in rows and op != "send":
                continue
            ranks = report["groups"].get(name, [rank])
            colour = COLOURS[ranks[0] % len(COLOURS)]
            face, ink = (
                (colour, "white" if colour in DARK else "black")
                if key in rows
                else ("white", "black")
            )
            corner, text = (rank - 0.46, y - 0.4), " ".join(map(str, ranks))
            axis.add_patch(
                pyplot.Rectangle(corner, 0.92, 0.8, facecolor=face, edgecolor=colour, linewidth=2)
            )
            text = text if len(ranks) <= 4 else f"{ranks[0]} to {ranks[-1]}"
            text = text if key in rows else "receives"
            axis.text(rank, y, text, ha="center", va="center", color=ink, fontsize=9)
        most = max(rows[key][1] for rows in traffic if key in rows)
        size = f"{most / 1024:.1f} KiB" if most > 99 else f"{most} bytes"
        axis.text(len(reports) + 0.4, y, size, va="center", ha="right")
    places = [coordinates(rank, sizes).items() for rank in range(len(reports))]
    ticks = [
        "\n".join([f"rank {r}", *(f"{a} {n}" for a, n in place)]) for r, place in enumerate(places)
    ]
    axis.set_xticks([*range(len(reports)), len(reports)], [*ticks, "a rank,\nat most"])
    axis.set_yticks(
        range(len(keys)), [f"{phase}: {op.replace('_', '-')}, {name}" for phase, op, name in keys]
    )
    axis.set(xlim=(-0.5, len(reports) + 0.5), ylim=(max(1, len(keys)) - 0.5, -0.5))
    axis.xaxis.tick_top()
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)
    title = (
        f"Who talks to whom in a step, dp x pp x tp = {say(sizes)}. In a row: one colour, one group"
    )
    axis.set_title(title, loc="left", pad=12)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


# ---------------------------------------------------------------------------------------------------
# Sabotage: what people get wrong, for --inject-bug. A check has to catch every one.
# ---------------------------------------------------------------------------------------------------


def dp_axis_innermost(lab):
    """The ranks of dp are neighbours, and those of tp far apart."""

    def coordinates(rank, sizes):
        rest, d = divmod(rank, sizes["dp"])
        t, p = divmod(rest, sizes["pp"])
        return {"dp": d, "pp": p, "tp": t}

    lab.coordinates = coordinates


def dp_taken_for_tp(lab):
    """The norms' gradients are summed over the dp group where the tp group is meant: other ranks."""
    right = lab.finish_gradients
    lab.finish_gradients = lambda model, groups: right(model, {**groups, "tp": groups["dp"]})


def shuffled_by_rank(lab):
    """Each rank has its replica's sequences in an order of its own, from a seed that is its rank."""
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
    lab.copies_of = lambda name: [group for group in copies_of(name) if group != "embedding"]


def unsummed_norm_weights(lab):
    """The norms' gradients are not summed over tp: each rank saw its own tokens."""
    lab.copies_of = lambda name: [group for group in copies_of(name) if group != "tp"]


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
    """Each rank clips by the norm of what it holds: torch's own clip_grad_norm_, called on every rank."""

    def clip_gradients(model, norm, most):
        nn.utils.clip_grad_norm_(model.parameters(), most)

    lab.clip_gradients = clip_gradients


def norm_before_the_sums(lab):
    """The norm is taken before the gradients are finished."""

    def train_step(model, ids, targets, groups, microbatches, most):
        held = lab.forward_all(
            model, ids, targets, lab.target_count(targets, groups), groups, microbatches
        )
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


# ---------------------------------------------------------------------------------------------------
# Harness: the same in every lab
# ---------------------------------------------------------------------------------------------------


# Copied from labs/lab8_3d.py
class Unusable(Exception):
    """An argument that cannot work; its message says what would. Ends as `error: ...`, exit 2."""


# Copied from labs/lab8_3d.py
class Wrong(Exception):
    """What a check found wrong with an exercise, and a hint at what usually causes it."""

    def __init__(self, found, hint=""):
        super().__init__(found, hint)
        self.found, self.hint = found, hint


# Copied from labs/lab8_3d.py
def expect(holds, found, hint=""):
    """Raise Wrong where something does not hold."""
    if not holds:
        raise Wrong(found, hint)


# Copied from labs/lab8_3d.py
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


# Copied from labs/lab8_3d.py
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


# Copied from labs/lab8_3d.py
def load(path):
    """The file of a lab, or of a learner's answers to it, as a module."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# Copied from labs/lab8_3d.py
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


# Copied from labs/lab8_3d.py
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


# Copied from labs/lab8_3d.py
def check_on_rank(group, answers, bug, name, seed):
    """One exercise's check on this rank. answers: the file of the lab, or of a learner's copy of it."""
    lab = load(answers)
    if bug:
        globals()[bug](lab)
    check, _ = CHECKS[name]
    return check(lab, group, seed)


# Copied from labs/lab8_3d.py
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


# Copied from labs/lab8_3d.py
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


# Copied from labs/lab8_3d.py
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


# ---------------------------------------------------------------------------------------------------
# Command line
# ---------------------------------------------------------------------------------------------------


# Copied from tp.py
class Parser(argparse.ArgumentParser):
    """argparse, with its complaint raised instead of printed with the usage."""

    def error(self, message):
        raise Unusable(message)


def positive(text):
    """A whole number of at least 1, for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1")
    return int(text)


# Copied from labs/lab8_3d.py
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


def started():
    """How many ranks torchrun has started; None without it."""
    return int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ else None


def axis_size(text):
    """A whole number of at least 1 that divides torchrun's ranks, for argparse."""
    size = positive(text)
    if (started() or size) % size:
        raise argparse.ArgumentTypeError(
            f"{size} does not divide the {started()} ranks that torchrun started"
        )
    return size


def tp_size(text):
    """An axis_size over which the heads can be dealt out."""
    size = axis_size(text)
    head_range(tiny_config(1), 0, size)  # or says which sizes would do
    return size


def add_options(parser):
    """The lab's own options."""
    add = parser.add_argument
    add(
        "--dp",
        type=axis_size,
        help="replicas (what --pp and --tp leave of 8 ranks, or of torchrun's)",
    )
    add("--pp", type=axis_size, help="stages (2)")
    add("--tp", type=tp_size, help="ranks that share a layer (2)")
    add("--microbatches", type=positive, default=3, help="of a replica, in a step (3)")


if __name__ == "__main__":
    if int(os.environ.get("RANK", 0)) > 0:  # one of torchrun's: rank 0 will say what to do
        on_torchruns_ranks()
    else:
        sys.exit(main())
