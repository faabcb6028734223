"""Lab 8: 3D parallelism. Data, pipeline and tensor parallelism on one device mesh: whose sum is it?

Each of the three is easy alone. Together, all mistakes are of one kind: a sum over the wrong ranks.
A mesh is an array of ranks, a group is a line in it. 8 ranks, dp x pp x tp, tp innermost:

                dp 0: half of the sequences     dp 1: the others
                   tp 0         tp 1               tp 0         tp 1
    pp 0: ids    [rank 0] --- [rank 1]  . . .   [rank 4] --- [rank 5]   --- tp, in every block: all-
    layers 0..2      |            |                 |            |        gather, reduce-scatter
                     |            |                 |            |     |  pp, every microbatch:
    pp 1: loss   [rank 2] --- [rank 3]  . . .   [rank 6] --- [rank 7]     send (b, s/tp, h)
    layers 3, 4                . . .  dp (0 and 4, 1 and 5, ...), once a step: all gradients

tp sends most, so its ranks are neighbours on one node (NVLink). dp sends all gradients, but
once a step, and can hide that behind the backward; pp sends little. A rank's messages in a
step (N = b s tokens of its replica, h hidden, L layers of its stage; the embedding adds a
reduce-scatter, the head adds an all-gather and, for the loss, 2 all-reduces, 3 N numbers in all):

    count       dp           how many targets all replicas have: one number
    forward     tp           2 L all-gathers and 2 L reduce-scatters of N h;  pp: a send of N h / tp
    backward    tp           the same;                                        pp: the same
    gradients   tp, kv       norms saw own tokens only; replicated K, V saw own query heads
                embedding    first and last stage hold one table, as embedding and as head
                dp           everything saw this replica's sequences
    norm        pp x tp      the sum of the squares of all gradients, *counted once*: one number
    log         pp, dp       the mean loss: one number each

The usual bug is in the norm. A rank holds shards of some parameters, replicas of others, and
nothing of the other stages'. Count the replicas twice, and the norm is too large. Sum over too few
ranks, and each clips by its own norm, so the replicas of a weight drift apart for good. No loss
shows it.

    python labs/lab8_3d/lesson.py                # 8 ranks, 2 x 2 x 2
    python labs/lab8_3d/lesson.py --dp 1 --pp 4 --tp 2 --plot lab8.png --json lab8.json
    python labs/lab8_3d/lesson.py --predict 1.1  # first your guess; see the end
    python labs/lab8_3d/lesson.py --inject-bug list
    python labs/grade.py start lab8              # writes my_labs/lab8_3d.py

Under torchrun the lab takes the ranks that torchrun started, on several nodes too: the line to run
on each is in README.md, and `sbatch labs/lab8_3d/job.slurm` runs it.

Sources: Megatron-LM on clusters, arXiv 2104.04473 (the three together, and in which order).
Megatron-LM: core/parallel_state.py (the groups), core/distributed/finalize_model_grads.py (norms,
tied table), core/optimizer/clip_grads.py (over parameters that are no duplicates). Nanotron:
parallel/context.py, parallel/tied_parameters.py, optim/clip_grads.py. NeMo AutoModel, torchtitan:
DeviceMesh and DTensor, the norm all-reduced over pp. DeepSpeed: runtime/pipe/topology.py,
TiedLayerSpec in runtime/pipe/module.py.
"""

import math
import sys
import types
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

Unusable = ValueError  # sizes that cannot work; the message says which to use
IGNORE = -100  # a target that does not count: HF's and PyTorch's convention

# --------------------------------------------------------------------------------------------------
# The lesson 1: the mesh
# --------------------------------------------------------------------------------------------------

AXES = "dp", "pp", "tp"  # from the outermost to the innermost


def coordinates(rank, sizes):
    """{"dp": d, "pp": p, "tp": t}: where a rank is in a mesh of sizes {"dp": D, "pp": P, "tp": T}.

    As the entries of an array (D, P, T) in memory: tp counts fastest, then pp, then dp.
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
    """This rank's process groups {name: group}: the mesh's axes, and three more that lie in it.

    kv: neighbours in tp that hold the same KV heads. embedding: first and last stage, None on the
    others. model: all ranks of a replica of the model, pp x tp. All ranks make every group.
    """
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=AXES)
    groups = {axis: mesh.get_group(axis) for axis in AXES}
    ranks = mesh.mesh  # (D, P, T)
    replicas = head_range(config, 0, sizes["tp"])[2]
    ends = ranks[:, [0, -1][: sizes["pp"]]]  # (D, 2, T); one stage is first and last: (D, 1, T)
    lists = {
        "kv": ranks.view(-1, replicas),
        "embedding": ends.transpose(1, 2).flatten(0, 1),
        "model": ranks.flatten(1),
    }
    for name, rows in lists.items():
        groups[name] = dist.new_subgroups_by_enumeration(rows.tolist())[0]
    return groups


# --------------------------------------------------------------------------------------------------
# The lesson 2: tp with sequence parallelism, as in sp_megatron.py
# --------------------------------------------------------------------------------------------------


# Copied from tp.py
def all_reduce(x, group, op=dist.ReduceOp.SUM):
    """The sum (or max) of x over ranks; not in place, because autograd may still need x itself."""
    if group.size() == 1:
        return x
    x = x.clone(memory_format=torch.contiguous_format)  # a gradient may be a transposed view
    dist.all_reduce(x, op, group=group)
    return x


def all_gather(x, group):
    """Every rank's tokens (b, s/P, h) -> all tokens (b, s, h)."""
    if group.size() == 1:
        return x
    x = x.transpose(0, 1).contiguous()  # ranks are joined along dim 0: why Megatron has (s, b, h)
    out = x.new_empty(x.shape[0] * group.size(), *x.shape[1:])
    dist.all_gather_into_tensor(out, x, group=group)
    return out.transpose(0, 1).contiguous()


def reduce_scatter(x, group):
    """Sum of all ranks' (b, s, h), of which each receives its own tokens (b, s/P, h)."""
    if group.size() == 1:
        return x
    x = x.transpose(0, 1).contiguous()
    out = x.new_empty(x.shape[0] // group.size(), *x.shape[1:])
    dist.reduce_scatter_tensor(out, x, group=group)
    return out.transpose(0, 1).contiguous()


# Copied from sp_megatron.py
class GatherFromSPRegion(torch.autograd.Function):
    """The paper's g. Each rank uses every token, so a token's gradient is the sum of the ranks'."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return all_gather(x, group)

    @staticmethod
    def backward(ctx, grad):
        return reduce_scatter(grad, ctx.group), None


# Copied from sp_megatron.py
class ReduceScatterToSPRegion(torch.autograd.Function):
    """The paper's g-bar. y is the sum of the ranks' partial results, so the gradient of each is all
    of dy. A rank has dy of its own tokens, and gathers the rest."""

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
def shard_range(n, rank, world):
    """[start, end): a rank's share of n things. The first n % world ranks have one more."""
    base, extra = divmod(n, world)
    return rank * base + min(rank, extra), (rank + 1) * base + min(rank + 1, extra)


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
            f"{heads} heads with {kv_heads} KV heads cannot be split over {world} ranks: "
            f"use {', '.join(map(str, works))} ranks"
        )
    if world <= kv_heads:
        k0, k1 = shard_range(kv_heads, rank, world)
        return (k0 * queries, k1 * queries), (k0, k1), 1
    replicas = world // kv_heads
    k = rank // replicas
    q0, q1 = shard_range(queries, rank % replicas, replicas)
    return (k * queries + q0, k * queries + q1), (k, k + 1), replicas


def keep(parameter, dim, start, end, replicas=1):
    """A Parameter of its own with rows (dim 0) or columns (dim 1) [start, end) of a full one.

    `shard` says which slice of the full tensor it is, `replicas` how many ranks hold that slice.
    """
    kept = nn.Parameter(parameter.narrow(dim, start, end - start).clone())
    kept.shard, kept.replicas = (dim, start, end), replicas
    return kept


class VocabParallelEmbedding(nn.Module):
    """Rows [start, end) of an nn.Embedding; another rank's token is masked to zero here."""

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

    logits (n, v/P): this rank's columns; target (n): ids of the whole vocabulary, or IGNORE.
    Returns each token's loss, (n); the caller zeroes those of IGNORE. The ranks send 3 numbers for
    each token, and no logits.
    """

    @staticmethod
    def forward(ctx, logits, target, vocab_size, group):
        wide = torch.promote_types(logits.dtype, torch.float32)  # float32 at least
        peak = logits.max(-1, keepdim=True).values.to(wide)
        peak = all_reduce(peak, group, dist.ReduceOp.MAX)
        shifted = logits - peak  # at most 0, so exp() stays finite
        start, end = shard_range(vocab_size, group.rank(), group.size())
        mine = (target >= start) & (target < end)
        known = (target >= 0) & (target < vocab_size) | (target == IGNORE)
        # An unknown target is looked up, and gather() raises, as on one device
        column = (target - start).masked_fill(known & ~mine, 0)[:, None]
        target_logit = shifted.gather(-1, column)[:, 0].masked_fill(~mine, 0)
        sum_exp = shifted.exp_().sum(-1)  # in place, since nothing needs shifted any more
        target_logit, sum_exp = all_reduce(torch.stack([target_logit, sum_exp]), group)
        # Not saved as one number, peak + log(sum_exp): at a peak of 20 float32 rounds that by 1e-6,
        # as much as the whole gradient, softmax - 1, of a well predicted target
        ctx.save_for_backward(logits, column, mine, peak, sum_exp)
        return sum_exp.log() - target_logit

    @staticmethod
    def backward(ctx, grad):  # d loss / d logits = softmax - one_hot(target): no communication
        logits, column, mine, peak, sum_exp = ctx.saved_tensors
        softmax = (logits - peak).exp_().div_(sum_exp[:, None])
        softmax.scatter_add_(-1, column, -mine[:, None].to(softmax.dtype))
        return softmax.mul_(grad[:, None]).to(logits.dtype), None, None, None


def vocab_parallel_cross_entropy(logits, target, vocab_size, group):
    """Loss of each token, (b, s), from this rank's logits (b, s, v/P); 0 where target is IGNORE."""
    flat = logits.flatten(0, 1), target.flatten()
    loss = VocabParallelCrossEntropy.apply(*flat, vocab_size, group)
    return loss.view_as(target).masked_fill(target == IGNORE, 0)


def token_loss(model, hidden, targets, group):
    """Sum of the losses of every rank's tokens hidden (b, c/P, h), each with v/P columns."""
    hidden = gather_from_sp_region(hidden, group)  # (b, c, h): the head is column parallel
    logits = F.linear(hidden, model.lm_head.weight)  # (b, c, v/P)
    vocab_size = model.config.vocab_size
    return vocab_parallel_cross_entropy(logits, targets, vocab_size, group).sum()


# --------------------------------------------------------------------------------------------------
# The lesson 3: this rank's part of the model, and who else holds it
# --------------------------------------------------------------------------------------------------


def parallelize(model, groups):
    """Cut HF's LlamaForCausalLM down to this rank's share of this rank's stage, in place.

    model.stage = (first layer, end), and every parameter has `shared`, the groups of copies_of().
    Names stay HF's, nn.Identity() is other stages' parts; the last stage's head is the table.
    """
    config, tp, pp = model.config, groups["tp"], groups["pp"]
    model.stage = shard_range(config.num_hidden_layers, pp.rank(), pp.size())
    for i, layer in enumerate(model.model.layers):
        if i in range(*model.stage):
            parallelize_layer(layer, config, tp)
        else:
            model.model.layers[i] = nn.Identity()
    v0, v1 = shard_range(config.vocab_size, tp.rank(), tp.size())
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
    """Keep this rank's heads and features of a layer; put g and g-bar around its two blocks.

    Columns of a layer are rows of its weight, (out, in). No biases here.
    """
    rank, world, d = group.rank(), group.size(), config.head_dim
    (q0, q1), (k0, k1), replicas = head_range(config, rank, world)
    i0, i1 = shard_range(config.intermediate_size, rank, world)
    attention, mlp = layer.self_attn, layer.mlp
    attention.q_proj.weight = keep(attention.q_proj.weight, 0, q0 * d, q1 * d)
    attention.k_proj.weight = keep(attention.k_proj.weight, 0, k0 * d, k1 * d, replicas)
    attention.v_proj.weight = keep(attention.v_proj.weight, 0, k0 * d, k1 * d, replicas)
    attention.o_proj.weight = keep(attention.o_proj.weight, 1, q0 * d, q1 * d)
    attention.num_key_value_groups = (q1 - q0) // (k1 - k0)
    mlp.gate_proj.weight = keep(mlp.gate_proj.weight, 0, i0, i1)
    mlp.up_proj.weight = keep(mlp.up_proj.weight, 0, i0, i1)
    mlp.down_proj.weight = keep(mlp.down_proj.weight, 1, i0, i1)
    parallel_block(attention, group)
    parallel_block(mlp, group)


def copies_of(name):
    """Those of the groups "kv", "tp", "embedding", "dp" whose ranks all hold a parameter.

    Each rank of such a group computes another part of its gradient. So this one table says
    what has to be summed after the backward, and what the gradient norm must not count twice.

    name: as HF has it, such as model.layers.0.self_attn.k_proj.weight; the last stage's table is
    lm_head.weight. A list, each group once, in any order. A group may have one rank only: name it
    all the same. kv is a part of tp: name tp, and not kv, for what all of tp holds. Every
    parameter names dp, too.
    """
    # exercise: copies_of
    if name.endswith("norm.weight"):  # replicated, and each rank saw its own tokens
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
    positions = torch.arange(x.shape[1] * group.size())[None]  # of all tokens, as attention is
    rotary = part.rotary_emb(x, positions)
    for layer in part.layers[slice(*model.stage)]:
        x = layer(x, position_embeddings=rotary)  # no mask: sdpa is causal by itself
    return part.norm(x)  # nn.Identity() but on the last stage


# --------------------------------------------------------------------------------------------------
# The lesson 4: a step
# --------------------------------------------------------------------------------------------------


def target_count(targets, groups):
    """How many targets the whole batch has, from this replica's (b, s); the same on every rank."""
    # exercise: loss_scale
    return all_reduce((targets != IGNORE).sum(), groups["dp"])
    # end exercise


def microbatch_loss(model, hidden, targets, count, groups):
    """This microbatch's part of the mean loss over all count targets: the parts add up to it.

    hidden (b/M, s/T, h), targets (b/M, s). token_loss(model, hidden, targets, group) is the sum
    over a microbatch's targets, the same on every rank of tp.
    """
    # exercise: loss_scale
    return token_loss(model, hidden, targets, groups["tp"]) / count
    # end exercise


def neighbour(groups, step):
    """(global rank of the stage that is `step` stages further down, the group to send in)."""
    pp = groups["pp"]
    return dist.get_global_rank(pp, pp.rank() + step), pp


def forward_all(model, ids, targets, count, groups, microbatches):
    """The forward of every microbatch: [(input, output)], which the backward starts from.

    All forwards, then all backwards (GPipe), so a send may simply wait until it is received.
    In 1F1B a stage could wait to send forward to one that waits to send back, see pp.py.
    """
    tp, pp = groups["tp"], groups["pp"]
    first, last, held = pp.rank() == 0, pp.rank() == pp.size() - 1, []
    for m in range(microbatches):
        rows = slice(*shard_range(len(ids), m, microbatches))
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
    """The backward of every microbatch: .grad is then this rank's part of the gradient."""
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

    Sums, not means, because microbatch_loss divides. The order of the groups does not matter.
    all_reduce sends nothing in a group of one rank; groups["embedding"] is None on middle stages,
    where no parameter names it.
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

    The gradients are finished. Each number counts once, however many ranks of pp x tp hold it
    (`shared` names their groups; Megatron-LM instead counts only on the first rank of each
    such group). The replicas of dp have the same gradients. One message of one
    number, over groups["model"].
    """
    # exercise: grad_norm
    squares = torch.zeros((), dtype=torch.float64)
    for p in model.parameters():
        copies = math.prod(groups[name].size() for name in p.shared if name != "dp")
        squares += p.grad.double().square().sum() / copies
    return all_reduce(squares, groups["model"]).sqrt()
    # end exercise


def clip_gradients(model, norm, most):
    """Scale every .grad, in place, so that their norm is at most `most`, as clip_grad_norm_ does.

    All ranks have the same norm and take the same factor. Small gradients stay as they are.
    """
    # exercise: clip
    factor = (most / (norm + 1e-6)).clamp(max=1)
    for p in model.parameters():
        p.grad.mul_(factor)
    # end exercise


def mean_loss(held, groups):
    """The batch's mean loss, on all ranks, for the log: only the last stages have parts of it."""
    pp = groups["pp"]
    last = pp.rank() == pp.size() - 1
    own = sum(loss.detach() for _, loss in held) if last else torch.zeros(())
    return all_reduce(all_reduce(own, pp), groups["dp"])


def train_step(model, ids, targets, groups, microbatches, most):
    """A step up to the optimizer: (loss, gradient norm before clipping), on all ranks.

    ids, targets (b, s): this replica's sequences, s a multiple of T. The .grad of every parameter
    is None before; afterwards it is the whole batch's, clipped to the norm `most`. Put together, in
    the right order, target_count, forward_all, backward_all, finish_gradients, grad_norm,
    clip_gradients, mean_loss.
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
    return slice(*shard_range(n, groups["dp"].rank(), groups["dp"].size()))


if __name__ == "__main__":  # the lab's checks and experiments, of labs/ and of my_labs/
    sys.path[:0] = [str(folder) for folder in Path(__file__).resolve().parents[1:3]]
    from labs.kit.run import main

    sys.exit(main(__file__))
