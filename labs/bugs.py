"""What people really get wrong in parallel training: 34 bugs of the four scripts.

A bug is a function that replaces something right in a script's module with something wrong.
break_it.py runs a script with a bug, and labs/walk names the first line at which it shows.
"""

import importlib.util
import sys
from unittest import mock

import torch.nn.functional as F
from torch import nn

BUGS = {"tp": {}, "sp_megatron": {}, "sp_ulysses": {}, "pp": {}}  # {script: {name: bug}}


def load(path):
    """A script as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    script = sys.modules[path.stem] = importlib.util.module_from_spec(spec)  # pickle looks there
    spec.loader.exec_module(script)
    return script


def bug_of(*scripts):
    """Enter a bug under each of the scripts that can have it."""

    def enter(bug):
        for script in scripts:
            BUGS[script][bug.__name__] = bug
        return bug

    return enter


def instead_of(owner):
    """Put a function in the place of its namesake in owner, which it gets first: `right`."""

    def put(wrong):
        right = getattr(owner, wrong.__name__)
        setattr(owner, wrong.__name__, lambda *args, **kwargs: wrong(right, *args, **kwargs))

    return put


# ---- tp.py, sp_megatron.py: matrices are cut, and what leaves a block is a partial sum -----------


@bug_of("tp")
def missing_backward_all_reduce(script):
    """f's backward returns the rank's own dx, so gradients below lack the other ranks' parts."""

    @instead_of(script.CopyToTPRegion)
    def backward(right, ctx, grad):
        return grad, None


@bug_of("sp_megatron")
def missing_backward_reduction(script):
    """g's backward only cuts dx by tokens, so gradients below lack the other ranks' parts."""

    @instead_of(script.GatherFromSPRegion)
    def backward(right, ctx, grad):  # (b, s, h) -> (b, s/P, h)
        return grad.chunk(ctx.group.size(), 1)[ctx.group.rank()], None


@bug_of("tp", "sp_megatron")
def missing_forward_reduction(script):
    """What leaves a block is not summed, so each rank goes on with its own partial sum."""
    tp = script.STRATEGY == "tp"

    @instead_of(script.ReduceFromTPRegion if tp else script.ReduceScatterToSPRegion)
    def forward(right, ctx, x, group):
        ctx.group = group
        return x if tp else x.chunk(group.size(), 1)[group.rank()]


@bug_of("tp")
def all_reduce_both_ways(script):
    """g all-reduces in the backward, too, so each block sends P times its gradient back."""

    @instead_of(script.ReduceFromTPRegion)
    def forward(right, ctx, x, group):
        ctx.group = group
        return right(ctx, x, group)

    script.ReduceFromTPRegion.backward = script.CopyToTPRegion.backward


@bug_of("tp", "sp_megatron")
def wrong_shard(script):
    """One matrix is cut in the wrong place: layer 0's o_proj has the columns of the next rank."""

    @instead_of(script)
    def parallelize(right, model, group, args):
        full = model.model.layers[0].self_attn.o_proj.weight.detach().clone()
        right(model, group, args)
        weight = model.model.layers[0].self_attn.o_proj.weight
        (_, start, _), size = weight.shard, weight.shape[1]
        weight.data = full.roll(-size, 1)[:, start : start + size].clone()
        return model


@bug_of("tp")
def unmasked_embedding(script):
    """A token whose row is on another rank is not masked, so this rank adds a row of its own."""

    @instead_of(script.VocabParallelEmbedding)
    def forward(right, self, ids):
        rows = (ids - self.start).clamp(0, len(self.weight) - 1)
        return script.reduce_from_tp_region(F.embedding(rows, self.weight), self.group)


@bug_of("tp", "sp_megatron")
def local_softmax(script):
    """The loss's softmax is over each rank's shard of the vocabulary, not over all of it."""

    @instead_of(script.VocabParallelCrossEntropy)
    def forward(right, ctx, *args):
        with mock.patch.object(script, "all_reduce", lambda x, *_: x):
            return right(ctx, *args)


def leave_unsummed(script, *words):
    """Parameters with one of the words in their names keep their own rank's gradient."""

    @instead_of(script)
    def parallelize(right, model, group, args):
        right(model, group, args)
        for name, parameter in model.named_parameters():
            if any(word in name for word in words):
                parameter.sum_over = None
        return model


@bug_of("tp")
def unsummed_qk_norm_gradient(script):
    """Each rank keeps the gradient that its own heads give Qwen3's q_norm and k_norm."""
    leave_unsummed(script, "q_norm", "k_norm")


# ---- sp_megatron.py, sp_ulysses.py: each rank has tokens of its own ------------------------------


@bug_of("sp_megatron")
def unsummed_norm_gradient(script):
    """Each rank keeps the gradient that its own tokens give a norm: the replicas drift apart."""
    leave_unsummed(script, "norm")


@bug_of("sp_ulysses")
def missing_gradient_sum(script):
    """Each rank keeps the gradients that its own tokens give: the replicas drift apart."""
    script.sum_gradients = lambda model: None


@bug_of("sp_megatron", "sp_ulysses")
def local_position_ids(script):
    """Each rank counts its own tokens' positions from 0, so their rotary embedding is wrong."""

    @instead_of(script)
    def parallelize(right, model, group, args):
        model = right(model, group, args)

        @instead_of(model.model.rotary_emb)
        def forward(right, hidden, positions):  # hidden: (b, s/P, h)
            return right(hidden, positions % hidden.shape[1])

        return model


@bug_of("sp_megatron", "sp_ulysses")
def shift_after_split(script):
    """Labels are shifted after they are split, so each rank's last token has no target."""

    @instead_of(script)
    def mean_loss(right, model, hidden, labels, group, args):
        labels, size = labels.clone(), hidden.shape[1]  # s/P tokens a rank
        labels[:, size::size] = script.IGNORE  # a rank's first label: the rank before needs it
        return right(model, hidden, labels, group, args)


@bug_of("sp_ulysses")
def no_op_ulysses(script):
    """The model keeps its stock attention, so a token attends only to tokens of its own rank."""

    @instead_of(script)
    def parallelize(right, model, group, args):
        model = right(model, group, args)
        for layer in model.model.layers:
            layer.self_attn.config = model.config
        return model


@bug_of("sp_ulysses")
def wrong_head_order(script):
    """The all-to-all of attention's output returns each head in the place of the next."""

    @instead_of(script)
    def heads_to_tokens(right, x, counts, group):  # -> (b, s/P, heads, d)
        return right(x, counts, group).roll(1, 2)


# ---- pp.py: stages, microbatches, and gradients that accumulate ----------------------------------


@bug_of("pp")
def unscaled_loss(script):
    """Each microbatch's loss is its own mean, and these are summed: about M times too large."""

    @instead_of(script)
    def microbatch_loss(right, model, hidden, targets, count, args):
        return right(model, hidden, targets, (targets != script.IGNORE).sum(), args)


@bug_of("pp")
def mean_of_means(script):
    """The loss is the mean of the microbatches' means, though they differ in number of targets."""

    @instead_of(script)
    def microbatch_loss(right, model, hidden, targets, count, args):
        own = (targets != script.IGNORE).sum()
        return right(model, hidden, targets, own * args.microbatches, args)


@bug_of("pp")
def overwritten_gradients(script):
    """A microbatch's gradients replace those of the one before instead of adding to them."""

    @instead_of(script.Pipeline)
    def backward(right, self, action, received):
        for name, parameter in self.stages[action.stage].named_parameters():
            if "embed_tokens" not in name:  # tied to the head, it is in other stages, too
                parameter.grad = None
        return right(self, action, received)


@bug_of("pp")
def untied_gradient(script):
    """First and last stage each keep their own summand of the tied embedding's gradient."""
    script.sum_gradients = lambda model: None


@bug_of("pp")
def dropped_boundary_gradient(script):
    """The gradient that the second stage sends to the first is lost, so zeros arrive."""

    @instead_of(script.Pipeline)
    def backward(right, self, action, received):
        return right(self, action, received * 0 if action.stage == 0 else received)


@bug_of("pp")
def wrong_layers(script):
    """First and last layer are swapped before the layers are dealt out to the stages."""

    @instead_of(script)
    def parallelize(right, model, group, args):
        first, *others, last = model.model.layers
        model.model.layers = nn.ModuleList([last, *others, first])
        return right(model, group, args)


@bug_of("pp")
def swapped_labels(script):
    """The last stage holds each sequence against the labels of the one before it."""

    @instead_of(script.Pipeline)
    def run(right, self, ids, targets, loss_fn, backward=True):
        return right(self, ids, targets.roll(1, 0), loss_fn, backward)


@bug_of("pp")
def local_layer_types(script):
    """Each stage gives its layers the types, full or sliding, of the model's first layers."""

    @instead_of(script.Stage)
    def __init__(right, self, model, stage, stage_count):
        right(self, model, stage, stage_count)
        self.start, self.end = 0, self.end - self.start


# ---- Everywhere ----------------------------------------------------------------------------------


@bug_of("tp", "sp_megatron", "sp_ulysses")
def loss_by_local_count(script):
    """Each rank divides the loss by the number of its own targets, not of all targets."""

    def own(targets, group, args):  # of its vocabulary; where tokens are split, of its tokens
        if script.STRATEGY == "tp":
            start, end = script.shard_range(args.config.vocab_size, group.rank(), group.size())
            return (targets >= start) & (targets < end)
        size = -(-targets.shape[1] // group.size())
        return targets[:, group.rank() * size :][:, :size] != script.IGNORE

    @instead_of(script)
    def mean_loss(right, model, hidden, labels, group, args):
        loss = right(model, hidden, labels, group, args)
        targets = F.pad(labels[:, 1:], (0, 1), value=script.IGNORE)
        return loss * (targets != script.IGNORE).sum() / own(targets, group, args).sum()


@bug_of(*BUGS)
def no_op_parallelize(script):
    """Nothing is sharded: every rank holds and computes everything. The loss is right."""

    @instead_of(script)
    def parallelize(right, model, group, args):
        for parameter in model.parameters():  # in Ulysses they are replicated, as they should be
            parameter.replicas = group.size() if script.STRATEGY == "sp_ulysses" else 1
            parameter.sum_over = None
        return model

    @instead_of(script)
    def forward_backward(right, model, ids, labels, group, args, backward=True):
        _, loss, _ = script.reference_step(model, ids, labels)
        return loss

    @instead_of(script)
    def local_logits(right, model, ids, group, args):
        logits = model(input_ids=ids, use_cache=False).logits
        logits.replicas = 1
        return logits
