"""Lab 9 as a learner meets it: the run, its bugs, wrong and other right answers."""

import pytest
from learner import caught, grade, lab_file, listed, ranks, run_answered, run_finished

pytestmark = pytest.mark.slow  # minutes, with the other labs'

LAB = lab_file("lab9")
shown = ranks.room("experiments", LAB)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The lab, run once; 3 divides both units."""
    layer, root = 60 * 12 * (5 + 5 + 1 + 1) + 3 * 60 * 101 + 2 * 60, 512 * 60 + 60
    state = 4 * (4 * (root + 4 * layer) // 3 + root)
    printed, results = run_finished(LAB, tmp_path_factory.mktemp("lab9"), "--predict", state)
    assert f"\n  predicted {state:g}, measured {state:g}: right\n" in printed
    return results


def test_every_way_is_one_device_with_the_peaks_and_messages_of_the_formulas(finished):
    assert list(finished["errors"]) == ["plain", "ZeRO-1", "ZeRO-2", "ZeRO-3", "fully_shard"]
    assert all(error < 1e-9 for error in finished["errors"].values())
    plain, one, two, three, fsdp = rows = finished["memory"]
    for row in rows:
        assert all(row["peak"][part] == row["predicted"][part] for part in shown.STATE)
        assert sum(row["peak"].values()) == pytest.approx(sum(row["predicted"].values()), rel=0.02)
        assert max(row["curve"]) == sum(row["peak"].values())
        assert row["sent"] == row["predicted_sent"]
    n = plain["sent"]["all_reduce"]
    assert plain["peak"]["optimizer"] == 2 * n == 3 * one["peak"]["optimizer"]
    assert one["sent"] == two["sent"] == {"reduce_scatter": n, "all_gather": n}
    assert n < three["sent"]["all_gather"] < 2 * n
    assert fsdp["peak"]["parameters"] > three["peak"]["parameters"], "its rows are padded"


def test_bad_input_is_one_line(capsys):
    assert grade.run_lab(LAB, ["--ranks", "9"]) == 2
    assert capsys.readouterr() == ("", "error: argument --ranks: 9 ranks: 2, 3 or 4 would do\n")


BUGS = {
    "padding_counted": ("flat", "own: without the padding"),
    "averaged_twice": ("zero1", "divided by P twice: it is the mean already"),
    "state_of_the_padding": ("zero1", "no optimizer state for padding"),
    "not_published": ("zero1", "every rank needs all shards in full"),
    "sent_too_early": ("zero2", "the last gradient of the unit sends them all"),
    "last_backward_only": ("zero2", "the gradients of all the step's backwards"),
    "autograd_keeps_all": ("zero3", "pack() them all, transposed or not, as addresses"),
    "stale_weight": ("zero3", "uses weights that were gathered before it"),
    "waits_at_once": ("prefetch", "begin() returns at once; gather() waits"),
    "gathered_late": ("prefetch", "begin() the neighbour's before this layer's work"),
    "local_norm": ("clip", "every rank has its shard's part"),
}

WRONG, RIGHT = listed(
    LAB,
    """
== flat: shards are equally long
...
--
return rank * size // world, (rank + 1) * size // world, size // world
== flat: never below 0
...
--
c = -(-size // world)
return rank * c, (rank + 1) * c, min(size - rank * c, c)
== flat
numbers = torch.cat([t.reshape(-1) for t in tensors])
return torch.cat([numbers, numbers.new_zeros(-numbers.numel() % world)])
--
mine = torch.arange(size + (-size) % world).chunk(world)[rank].tolist()
return mine[0], mine[-1] + 1, sum(i < size for i in mine)
== predict_memory
h, d, table = config.hidden_size, config.head_dim, config.vocab_size * config.hidden_size
attention = h * d * 2 * (config.num_attention_heads + config.num_key_value_heads)
layer = attention + sum([h * config.intermediate_size] * 3) + h + h
return [table * (2 - config.tie_word_embeddings) + h, *[layer] * config.num_hidden_layers]
--
c = [end - start for start, end, _ in shards]
optimizer = 2 * sum(own for *_, own in shards) if stage else 2 * sum(sizes)
state = [[world, world, 0], [world, world, 0], [world, 1, 0], [1, 1, world * c[0]]][stage]
found = sum(c) * state[0], sum(c) * state[1], optimizer, state[2], activations(config, tokens)
names = "parameters", "gradients", "optimizer", "gathered", "activations"
return dict(zip(names, (width * n for n in found)))
== predict_messages
root, *layers = [held(size, 0, world)[1] * world * width for size in sizes]
n, times = root + sum(layers), backwards if stage > 1 else 1
gathers = [n, n, n, backwards * (n + sum(layers))][stage]
return {"reduce_scatter": times * n, "all_gather": gathers} if stage else {"all_reduce": n}
== zero1: all_reduce moves
...
--
dist.all_reduce(self.full_grad, group=self.group)
self.master.grad = self.full_grad.chunk(world)[self.group.rank()][: self.own] / world
--
...
== zero1
self.master = nn.Parameter(self.shard.narrow(0, 0, self.own))
--
mine = torch.empty_like(self.shard)
dist.reduce_scatter(mine, list((self.full_grad / world).chunk(world)), group=self.group)
self.master.grad = mine[: self.own].clone()
--
parts = [torch.empty_like(self.shard) for _ in range(self.group.size())]
dist.all_gather(parts, self.shard.clone(), group=self.group)
self.full.copy_(torch.cat(parts))
== zero2
grads, P, mine = [p.grad for p in self.params], self.group.size(), torch.empty_like(self.shard)
if not all(grad is not None for grad in grads):
    return
dist.reduce_scatter(mine, list(flatten(grads, P).chunk(P)), group=self.group)
self.shard_grad.add_(mine, alpha=1 / P)
for p in self.params:
    p.grad = None
== zero3: autograd saved views of full
...
--
...
--
return tensor if tensor.data_ptr() != self.full.data_ptr() else (tensor.shape, tensor.stride(), 0)
--
...
== zero3
self.begin()
if self.coming:
    self.coming[1].wait()
    self.full, self.coming = self.coming[0], None
    self.lend()
--
for p in self.params:
    p.data = torch.empty(0, dtype=p.dtype)
self.full = None
--
ours = self.full.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
return ("at", tensor.shape, tensor.stride(), tensor.storage_offset()) if ours else tensor
--
return torch.as_strided(self.full, *kept[1:]) if isinstance(kept, tuple) else kept
== prefetch
if self.full is None and not self.coming:
    parts = torch.empty(self.group.size() * self.shard.numel(), dtype=self.shard.dtype)
    work = dist.all_gather(list(parts.chunk(self.group.size())), self.shard, self.group, True)
    self.coming = parts, work
--
self.gather()
if self.after is not None:
    self.after.begin()
with saved_tensors_hooks(self.pack, self.unpack):
    y = forward(*args, **kwargs)
self.free()
if torch.is_grad_enabled():
    y.register_hook(lambda _: self.gather())
    y.register_hook(lambda _: self.before and self.before.begin())
return y
== clip
grads = [unit.master.grad for unit in units]
norm = torch.cat(grads).norm() ** 2
if sharded:
    dist.all_reduce(norm, group=group)
torch.nn.utils.clip_grads_with_norm_([unit.master for unit in units], max_norm, norm.sqrt())
return norm.sqrt()
== flat: zeros up to that behind
F.pad(flat, (0, -len(flat) % world)) -> flat
== predict_memory: K and V have num_key_value_heads
2 * (heads + kv) -> 4 * heads
== predict_memory: count it once
(1 if config.tie_word_embeddings else 2) -> 2
== predict_memory: is padded by itself
padded // world -> sum(sizes) // world
== predict_messages: each unit with its padding
-(-size // world) * world -> size
== predict_messages: 2 and 3 in each backward
backwards if stage == 2 else 1 -> 1
== predict_messages: once for both
full[0] + 2 * sum(full[1:]) -> 2 * sum(full)
== zero1: the mean over the ranks is wanted, not the sum
 / world ->
== zero1: not a copy
self.shard[: self.own] -> self.shard[: self.own].clone()
== zero2: its gradients stay after they were sent
    p.grad = None ->     pass
== zero2: divided by P twice
mine / self.group.size() -> mine / self.group.size() ** 2
== zero2: all the step's
self.shard_grad += mine -> self.shard_grad[:] = mine
== zero3: a view keeps full
p.data = p.data.new_empty(0) -> pass
== zero3: unpack() finds another tensor than was saved
self.full.as_strided(*kept) -> self.full[kept[2] :][: kept[0].numel()].view(kept[0])
== prefetch: returns the work at once
"async_op": True -> "async_op": False
== prefetch: free() behind the forward
self.free() -> pass
== prefetch: in the backward
...
--
self.gather()
if self.after:
    self.after.begin()
with saved_tensors_hooks(self.pack, self.unpack):
    y = forward(*args, **kwargs)
self.free()
if self.before and y.requires_grad:
    y.register_hook(lambda grad: self.before.begin())
return y
== clip: its shard's part
dist.all_reduce(squares, group=group) -> pass
== clip: small gradients stay as they are
.clamp(max=1) ->
== clip: squares add up over the ranks, norms do not
dist.all_reduce(squares, -> dist.all_reduce(squares.sqrt_(),
norm = squares.sqrt() -> norm = squares if sharded else squares.sqrt()
""",
)

test_bugs_are_caught, test_wrong_answers_get_their_hint = caught(LAB, BUGS, WRONG)


def test_other_right_answers_pass_and_the_lab_accepts_them(tmp_path):
    run_answered(LAB, RIGHT, tmp_path, "--seed", "20", "--ranks", "2")
