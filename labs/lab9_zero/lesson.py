"""Lab 9: Memory. Predict the peak, then shard the state: ZeRO-1, ZeRO-2, ZeRO-3.

In plain data parallelism every rank has its own sequences, and a replica of all else, the
model state. For n parameters of w bytes it has 4 n w bytes: parameters, gradients, and AdamW's
two averages. It is the same on all P ranks, which need it only for a moment. ZeRO gives each
rank a shard of it, more in each stage:

    stage        parameters      gradients      optimizer state      what a rank sends for a step
    0  plain     n               n              2 n                  all-reduce n
    1  ZeRO-1    n               n              2 n/P                reduce-scatter n, all-gather n
    2  ZeRO-2    n               n/P            2 n/P                the same
    3  ZeRO-3    n/P             n/P            2 n/P                and the layers once more

An all-reduce is a reduce-scatter and an all-gather (lab 1), so ZeRO-1 and 2 cost no bytes:
between the two, a rank updates only the shard whose summed gradients it has. ZeRO-2 reduces a
layer's gradients once the backward has made them, and drops them. ZeRO-3 gathers a layer's
parameters before its forward, drops them after it, and does so again for its backward:

    rank r            forward                                   backward
    layer 1    gather -> compute -> free                  gather -> compute -> reduce, free
    layer 2               gather -> compute -> free   gather -> compute -> reduce, free
                          (begun while layer 1 computes: prefetch)

What is gathered and reduced together is a unit: each decoder layer is one, and the rest (embedding,
last norm, head) is the root unit, which stays gathered from the forward's start to the backward's
end. A unit is one flat vector, with zeros behind it until P divides its length:

    unit of 7 numbers, P = 3       x x x | y y z | z . .       c = ceil(7 / 3): padded shard size
                                   rank 0  rank 1  rank 2      . padding, of which nobody has state

Cuts may fall anywhere: in the middle of a matrix's row, or in a parameter of two numbers like
z. Tied embeddings are one Parameter, so they are once in the vector.

Autograd is what makes ZeRO-3 hard. It saves weights for the backward (for y = x W^T it needs
W), and so would keep every gathered layer alive. Here saved_tensors_hooks replace such a
tensor by its address in the flat vector. Before the backward looks up an address, the layer
has been gathered once more. FSDP instead resizes the gathered storage to 0; DeepSpeed has its
own Linear, which saves the Parameter and not its transposed view.

    python labs/lab9_zero/lesson.py --plot lab9.png    # checks and experiments
    python labs/lab9_zero/lesson.py --predict 1000000  # first your guess; see the end
    python labs/lab9_zero/lesson.py --inject-bug list
    python labs/lab9_zero/lesson.py --ranks 3          # no size has to divide another
    python labs/grade.py start lab9                    # writes my_labs/lab9_zero.py

Sources: ZeRO, arXiv 1910.02054. PyTorch FSDP, arXiv 2304.11277; fully_shard (FSDP2):
torch/distributed/fsdp/_fully_shard/, which cuts each parameter along its first dimension.
DeepSpeed: runtime/zero/stage_1_and_2.py, stage3.py, linear.py (what the backward saves).
Megatron-LM: core/optimizer/distrib_optimizer.py and core/distributed/param_and_grad_buffer.py.
Saved tensors of a layer: Reducing Activation Recomputation, arXiv 2205.05198, section 4.
"""

import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

# --------------------------------------------------------------------------------------------------
# The lesson 1: a flat vector, and who holds which part of it
# --------------------------------------------------------------------------------------------------


def flatten(tensors, world):
    """One new vector (P c,) of all tensors' numbers in their order, zeros up to a multiple of P."""
    # exercise: flat
    flat = torch.cat([t.flatten() for t in tensors])
    return F.pad(flat, (0, -len(flat) % world))
    # end exercise


def held(size, rank, world):
    """(start, end, own) of a rank's shard of `size` numbers, which are padded to P c.

    The shard is [start, end) of the padded vector, c numbers on every rank. Its first `own`
    numbers (0 to c of them) are parameters, the others are padding.
    """
    # exercise: flat
    c = -(-size // world)
    start = rank * c
    return start, start + c, min(max(size - start, 0), c)
    # end exercise


# --------------------------------------------------------------------------------------------------
# The lesson 2: predict, then run
# --------------------------------------------------------------------------------------------------


def unit_sizes(config):
    """[numbers of the root unit, of each layer's unit] of HF's LLaMA, from its LlamaConfig.

    config: hidden_size, head_dim, intermediate_size, num_attention_heads, num_key_value_heads,
    vocab_size, num_hidden_layers, tie_word_embeddings. Linear layers have no bias; a layer has
    two norms, the root has one. Tied embeddings are one Parameter.
    """
    # exercise: predict_memory
    h, heads, kv = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
    attention = 2 * (heads + kv) * config.head_dim * h
    layer = attention + 3 * config.intermediate_size * h + 2 * h
    root = config.vocab_size * h * (1 if config.tie_word_embeddings else 2) + h
    return [root] + [layer] * config.num_hidden_layers
    # end exercise


def activations(config, tokens):
    """Numbers alive beside the model's state when the head's backward begins, in any stage.

    One sequence in the model's own dtype, attention by a fused kernel (sdpa), no recomputation. All
    that the forward saved is there, and three tensors like the logits: their log softmax, its
    gradient and their own gradient, all for the tokens that have a next one.
    """
    h, d, f, v = config.hidden_size, config.head_dim, config.intermediate_size, config.vocab_size
    heads, kv = config.num_attention_heads, config.num_key_value_heads
    norm = 3 * h + 1  # input, input / its length, that times the weight; the length
    attention = 2 * heads * d + 2 * kv * d + heads  # q, k, v, the output, the log of summed exp
    mlp = 4 * f  # gate, silu(gate), up, their product
    layer = 2 * norm + attention + mlp
    rotary = 2 * d  # cos and sin, for all layers
    return tokens * (config.num_hidden_layers * layer + norm + rotary) + 3 * (tokens - 1) * v


def memory(config, tokens, rank, world, stage, width=4):
    """A rank's bytes at the peak: {"parameters", "gradients", "optimizer", "gathered", ...}.

    The fifth key is "activations". The peak is when the head's backward begins: while the
    logits outweigh the work on a layer, no other moment has more. width: bytes of a number. Of
    the gradients count what lives all the time: a full vector, or shards. The optimizer's
    state is two averages of what the rank updates, without padding. "gathered" is what ZeRO-3
    has gathered then: the root unit's whole vector, beside its shard.
    """
    sizes = unit_sizes(config)
    shards = [held(size, rank, world) for size in sizes]
    # exercise: predict_memory
    padded = sum((end - start) * world for start, end, _ in shards)
    sharded = padded // world
    mine = sum(sizes) if stage == 0 else sum(own for *_, own in shards)
    numbers = {
        "parameters": sharded if stage == 3 else padded,
        "gradients": sharded if stage > 1 else padded,
        "optimizer": 2 * mine,
        "gathered": (shards[0][1] - shards[0][0]) * world if stage == 3 else 0,
        "activations": activations(config, tokens),
    }
    return {name: number * width for name, number in numbers.items()}
    # end exercise


def messages(sizes, world, stage, backwards, width=4):
    """{collective: message bytes of a step}: "all_reduce", "reduce_scatter", "all_gather".

    sizes: unit_sizes(). backwards: how many a step has (micro-batches, whose gradients add up).
    Stages 0 and 1 send gradients once a step, stages 2 and 3 in each backward. In ZeRO-3 a layer is
    gathered for its forward and for its backward, the root unit once for both. A unit is sent with
    its padding. Collectives that are not used are not named; clip()'s one number is not counted.
    """
    # exercise: predict_messages
    full = [-(-size // world) * world * width for size in sizes]
    if stage == 0:
        return {"all_reduce": sum(full)}
    if stage < 3:
        reduced = sum(full) * (backwards if stage == 2 else 1)
        return {"reduce_scatter": reduced, "all_gather": sum(full)}
    gathered = backwards * (full[0] + 2 * sum(full[1:]))
    return {"reduce_scatter": backwards * sum(full), "all_gather": gathered}
    # end exercise


# --------------------------------------------------------------------------------------------------
# The lesson 3: a unit, in each stage
# --------------------------------------------------------------------------------------------------


class Unit:
    """Parameters that are gathered and reduced together. What a rank has of them:

    full        (P c,) the flat vector; the parameters are views of it. Stage 3: None if not here
    coming      stage 3: (vector, work) of a gather that has begun, else None
    shard       (c,) of full: a view of it, in stage 3 a tensor of its own
    own         how many numbers of the shard are no padding
    full_grad   stages 0, 1: (P c,); the parameters' .grad are views of it, backwards add to it
    shard_grad  stages 2, 3: (c,), the mean over the ranks
    master      the Parameter that the optimizer updates
    before, after    stage 3: the units of the neighbouring layers, None at the ends
    """

    def __init__(self, parameters, group, stage):
        rank, world = group.rank(), group.size()
        self.params, self.group, self.stage = list(parameters), group, stage
        self.shapes = [p.shape for p in self.params]
        self.size = sum(shape.numel() for shape in self.shapes)
        self.full = flatten([p.data for p in self.params], world)
        start, end, self.own = held(self.size, rank, world)
        self.shard = self.full[start:end]
        self.coming = self.before = self.after = None
        self.lend()
        if stage == 3:
            self.shard = self.shard.clone()
            self.free()
        if stage < 2:
            self.full_grad = self.shard.new_zeros(world * len(self.shard))
            for p, view in zip(self.params, self.views(self.full_grad)):
                p.grad = view
        else:
            self.shard_grad = torch.zeros_like(self.shard)
            for p in self.params:
                p.register_post_accumulate_grad_hook(self.arrived)
        self.set_master()

    def views(self, flat):
        """The parts of a flat vector that are the parameters, in their shapes."""
        parts = flat[: self.size].split([shape.numel() for shape in self.shapes])
        return [part.view(shape) for part, shape in zip(parts, self.shapes)]

    def lend(self):
        """Make the parameters views of full."""
        for p, view in zip(self.params, self.views(self.full)):
            p.data = view

    def set_master(self):
        """Make .master, a Parameter that shares memory with what this rank updates.

        The optimizer's state has its size. In stages 1 to 3 it is a shard without padding.
        """
        if self.stage == 0:
            self.master = nn.Parameter(self.full[: self.size])
        else:
            # exercise: zero1
            self.master = nn.Parameter(self.shard[: self.own])
            # end exercise

    def finish(self):
        """After a step's last backward: master.grad is the mean of the ranks' gradients.

        Stage 1: one reduce-scatter. In stages 2 and 3 arrived() has done it.
        """
        world = self.group.size()
        if self.stage == 0:
            dist.all_reduce(self.full_grad, group=self.group)
            self.full_grad /= world
            self.master.grad = self.full_grad[: self.size]
        elif self.stage == 1:
            # exercise: zero1
            mine = torch.empty_like(self.shard)
            dist.reduce_scatter_tensor(mine, self.full_grad, group=self.group)
            self.master.grad = mine[: self.own] / world
            # end exercise
        else:
            self.master.grad = self.shard_grad[: self.own]

    def publish(self):
        """After the optimizer's step: gather the updated shards of all ranks into full.

        Nothing to do in stage 0, where a rank updates all, and in stage 3, where gather() comes.
        """
        if self.stage in (1, 2):
            # exercise: zero1
            dist.all_gather_into_tensor(self.full, self.shard, group=self.group)
            # end exercise

    def zero(self):
        """Forget a step's gradients."""
        self.master.grad = None
        (self.full_grad if self.stage < 2 else self.shard_grad).zero_()

    def arrived(self, parameter):
        """Stages 2 and 3: in the backward, each time that a parameter's .grad is complete.

        After the unit's last one: one reduce-scatter of all of them; add the mean over the
        ranks to shard_grad, which may hold earlier backwards' means; set every .grad to None.
        """
        # exercise: zero2
        if any(p.grad is None for p in self.params):
            return
        flat = flatten([p.grad for p in self.params], self.group.size())
        mine = torch.empty_like(self.shard_grad)
        dist.reduce_scatter_tensor(mine, flat, group=self.group)
        self.shard_grad += mine / self.group.size()
        for p in self.params:
            p.grad = None
        # end exercise
        if self.stage == 3:
            self.free()

    def gather(self):
        """Wait for full; make the parameters views of it. Nothing if they are here already.

        begin() starts the gather if it has not yet; afterwards .coming is None again.
        """
        # exercise: zero3
        if self.full is None:
            self.begin()
            (self.full, work), self.coming = self.coming, None
            work.wait()
            self.lend()
        # end exercise

    def begin(self):
        """Begin to gather full: set .coming (async_op=True), unless full is here or coming."""
        # exercise: prefetch
        if self.full is None and self.coming is None:
            vector = self.shard.new_empty(self.group.size() * len(self.shard))
            how = {"group": self.group, "async_op": True}
            self.coming = vector, dist.all_gather_into_tensor(vector, self.shard, **how)
        # end exercise

    def free(self):
        """Drop full, and all that keeps its memory: the parameters become empty, their .data (0,).

        To delete a tensor is to drop the last reference to its memory. Views count.
        """
        # exercise: zero3
        self.full = None
        for p in self.params:
            p.data = p.data.new_empty(0)
        # end exercise

    def pack(self, tensor):
        """What autograd keeps instead of a tensor that it saves in the layer's forward.

        For a view of full (a transposed weight, say), its address there: whatever unpack()
        needs to find it again. Memory is the same if untyped_storage().data_ptr() is. For any
        other tensor, itself.
        """
        # exercise: zero3
        if tensor.untyped_storage().data_ptr() != self.full.untyped_storage().data_ptr():
            return tensor
        return tensor.size(), tensor.stride(), tensor.storage_offset()
        # end exercise

    def unpack(self, kept):
        """The tensor of which pack() returned this; full has been gathered again, elsewhere."""
        # exercise: zero3
        return kept if isinstance(kept, torch.Tensor) else self.full.as_strided(*kept)
        # end exercise

    def run(self, forward, *args, **kwargs):
        """A layer's forward, and the hook for its backward: returns y (b, s, h).

        This layer's parameters are here only while it computes; before that, begin to gather
        the next layer's, which travel meanwhile. In the backward, as soon as y's gradient is
        there, gather this layer's and begin the previous layer's; arrived() frees them.
        """
        # exercise: prefetch
        self.gather()
        if self.after:
            self.after.begin()
        with saved_tensors_hooks(self.pack, self.unpack):
            y = forward(*args, **kwargs)
        self.free()

        def before_backward(grad):
            self.gather()
            if self.before:
                self.before.begin()

        if y.requires_grad:
            y.register_hook(before_backward)
        return y
        # end exercise


# --------------------------------------------------------------------------------------------------
# The lesson 4: a model and its step
# --------------------------------------------------------------------------------------------------


def make_units(model, group, stage):
    """[root unit, each layer's unit] of a LlamaForCausalLM, which they change in place."""
    layers = model.model.layers
    inside = {id(p) for p in layers.parameters()}
    rest = [p for p in model.parameters() if id(p) not in inside]  # a tied one is named once
    units = [Unit(rest, group, stage)] + [Unit(each.parameters(), group, stage) for each in layers]
    for unit, other in zip(units[1:], units[2:]):
        unit.after, other.before = other, unit
    if stage == 3:
        for unit, layer in zip(units[1:], layers):
            layer.forward = partial(unit.run, layer.forward)
    return units


def loss_of(model, ids):
    """The mean cross entropy of one sequence, ids (1, s): each token predicts the next."""
    logits = model(ids, use_cache=False).logits[0, :-1]
    return F.cross_entropy(logits, ids[0, 1:])


def clip(units, max_norm):
    """Scale each master.grad by max_norm / (norm + 1e-6), if that is less than 1; returns norm.

    norm (a tensor) is that of the mean gradient of all parameters, on every rank the same. In
    stages 1 to 3 a rank has a shard of it. One collective, of one number, for all units.
    """
    group, sharded = units[0].group, units[0].stage > 0
    # exercise: clip
    squares = sum(unit.master.grad.square().sum() for unit in units)
    if sharded:
        dist.all_reduce(squares, group=group)
    norm = squares.sqrt()
    for unit in units:
        unit.master.grad *= (max_norm / (norm + 1e-6)).clamp(max=1)
    return norm
    # end exercise


def train_step(model, units, optimizer, sequences, max_norm=None):
    """One step on this rank's sequences [ids (1, s)], one after the other; returns the mean loss.

    optimizer: of the units' masters. Every rank has equally many sequences, all of one length.
    """
    losses = []
    for ids in sequences:
        if units[0].stage == 3:
            units[0].gather()  # the root unit; its arrived() frees it
        loss = loss_of(model, ids) / len(sequences)
        loss.backward()
        losses.append(loss.detach())
    for unit in units:
        unit.finish()
    if max_norm is not None:
        clip(units, max_norm)
    optimizer.step()
    for unit in units:
        unit.zero()
        unit.publish()
    return torch.stack(losses).sum()


if __name__ == "__main__":  # the lab's checks and experiments, of labs/ and of my_labs/
    sys.path[:0] = [str(folder) for folder in Path(__file__).resolve().parents[1:3]]
    from labs.kit.run import main

    sys.exit(main(__file__))
