"""What correctness has to see, put into the scripts on purpose; what it cannot see, tested.

Every case runs on ranks of its own, forks of one process that has loaded torch: see forks.py.
"""

import gc
import math
import time
from types import SimpleNamespace

import pytest
from conftest import ROOT, changed
from forks import STRATEGIES

TP, OWN_HEAD = STRATEGIES[:2], STRATEGIES[2:]  # vocabulary cut over the ranks; or not
END = 'if __name__ == "__main__":'  # a change put here comes after all definitions
SHIFT = "F.pad(labels[:, 1:], (0, 1), value=IGNORE)"
PREFIX = "torch.arange(labels.shape[1]) < (labels == IGNORE).sum(1, True)"
PREFIX = f"labels.clamp(min=0).masked_fill({PREFIX}, IGNORE)"
FLAT = "F.pad(labels.flatten()[1:], (0, 1), value=IGNORE).view_as(labels)"
EACH = "    for p in model.parameters():\n        total"
COUNT = "(targets != IGNORE).sum()"
MLP = {
    "mlp.gate_proj = ColumnParallelLinear(mlp.gate_proj, i0, i1)": "pass",
    "mlp.up_proj = ColumnParallelLinear(mlp.up_proj, i0, i1)": "pass",
    "mlp.down_proj = RowParallelLinear(mlp.down_proj, i0, i1, group)": "pass",
}
F_OR_G = "        layer.post_attention_layernorm.register_forward_hook({})\n"
WHOLE = MLP | {F_OR_G.format("f"): ""}
SUMMED = "parameter.sum_over = 1, {} if 'mlp' in name else None"
WHOLE_SUMMED = MLP | {F_OR_G.format("g"): ""}
WHOLE_SUMMED |= {"parameter.sum_over = 1, None": SUMMED.format("group")}
LATER = """
def forward_backward(*args, right=forward_backward, calls=[], **more):
    calls.append(1)
    wrong = args[3].rank() > 0 and len(calls) > 1
    return right(*args, **more) * (1.01 if wrong else 1)
"""
GRADIENT = """
def sum_gradients(model, right=sum_gradients):
    right(model)
    if dist.get_rank() == {rank}:
        next(p for p in model.parameters() if p.grad is not None).grad.mul_(1.01)
"""
KEPT = """
def forward_backward(model, ids, labels, *others, right=forward_backward, kept=[]):
    kept.append(({what}).detach())
    {what} = kept[0][:, : ids.shape[1]]  # the first step's, as long as this one's
    return right(model, ids, labels, *others)
"""
# What is wrong, in which scripts, {the right text: the wrong one}. Where scripts share the text, as
# copies, one of them says as much as all: another in turn.
SABOTAGES = [
    ("targets are rolled, not shifted", ["tp.py", "pp.py"], {SHIFT: "labels.roll(-1, 1)"}),
    ("the batch is flattened before the shift", ["sp_ulysses.py"], {SHIFT: FLAT}),
    ("what is ignored is a prefix", ["pp.py"], {"labels[:, 1:], (0": f"{PREFIX}[:, 1:], (0"}),
    ("each rank's last row is not looked up", TP, {"(ids < self.end)": "(ids < self.end - 1)"}),
    ("each rank's last row is no target", TP, {"(target < end)": "(target < end - 1)"}),
    ("target 0 is ignored", ["sp_megatron.py"], {"() == IGNORE, 0)": "() <= 0, 0)"}),
    ("target 0 is ignored", OWN_HEAD, {"ignored = targets == IGNORE": "ignored = targets <= 0"}),
    ("the gradient norm is of one tensor", ["tp.py", "pp.py"], {f"{EACH} +=": f"{EACH} ="}),
    ("no MLP is sharded", ["tp.py"], WHOLE),
    ("no MLP is sharded", ["sp_megatron.py"], WHOLE_SUMMED),
    ("the loss is right on rank 0 alone", ["sp_ulysses.py", "pp.py"], {END: LATER + END}),
    ("rank 0's gradient is wrong", ["tp.py"], {END: GRADIENT.format(rank=0) + END}),
    ("rank 1's gradient is wrong", ["sp_megatron.py", "pp.py"],
     {END: GRADIENT.format(rank=1) + END}),
    ("the first step's ids are kept", STRATEGIES, {END: KEPT.format(what="ids") + END}),
    ("the first step's labels are kept", STRATEGIES, {END: KEPT.format(what="labels") + END}),
    ("the first step's number of targets is kept", STRATEGIES,
     {COUNT: f"globals().setdefault('kept', {COUNT})"}),
]  # fmt: skip
CASES = [(what, script, put) for what, scripts, put in SABOTAGES for script in scripts]
IDS = [f"{what}-{script}".replace(" ", "_") for what, script, _ in CASES]


def load(script, put=None):
    """A script as a module."""
    names = {"__name__": "loaded", "__file__": str(ROOT / script)}
    exec(compile(changed(script, put), script, "exec"), names)
    return SimpleNamespace(**names)


SMALL = "--model two_kv --length 13"


@pytest.mark.parametrize("script", STRATEGIES)
def test_what_is_changed_below_passes_unchanged(ranks, script):
    run = ranks(2, f"{script} {SMALL}")
    assert run.codes == [0, 0] and "\nPASS correctness" in run.output, run.output


def seen(ranks, script, put, options):
    """Have a changed script prove itself; all ranks have to say that it fails."""
    run = ranks(2, f"{script} {options} --timeout 60", put)
    assert run.codes == [1, 1], run.output
    assert "\nFAIL " in run.output and "PASS" not in run.output, run.output


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("what,script,put", CASES, ids=IDS)
def test_correctness_sees(ranks, what, script, put):
    seen(ranks, script, put, SMALL)


@pytest.mark.slow
@pytest.mark.parametrize("what,script,put", CASES, ids=IDS)
def test_correctness_sees_with_its_default_options(ranks, what, script, put):
    seen(ranks, script, put, "")


@pytest.mark.parametrize("script", TP)
def test_traffic_sees_a_sum_that_is_left_out(ranks, script):
    """The formula asks names, not the notes by which sum_gradients() knows what to sum."""
    put = {"replicas, parameter.sum_over = group.size(), group": "replicas = group.size()"}
    seen(ranks, script, put, "--model own_kv --mode benchmark --length 8 --bench-iters 1")


def test_traffic_sees_a_message_of_another_kind(ranks):
    backward = "        loss.backward()"
    put = {backward: f"        dist.broadcast(ids, 0, group)\n{backward}"}
    seen(ranks, "tp.py", put, "--model even --mode benchmark --length 8 --bench-iters 1")


NORM = "grad_norm(model, group) + 1e-6"
SQUARES = "sum(p.grad.double().square().sum(){} for p in model.parameters())"
CLIPS = [  # by another norm than that of all gradients of all ranks, each counted once
    ("not at all", {".clamp(max=1.0).item()": ".clamp(1.0, 1.0).item()"}),
    ("upwards, too", {".clamp(max=1.0).item()": ".item()"}),
    ("by a rank's own norm", {NORM: f"{SQUARES.format(' / p.replicas')}.sqrt()"}),
    ("replicas count each time",
     {NORM: f"sum(gather_objects({SQUARES.format('')}, group)).sqrt()"}),
    ("but for the first tensor", {"    for parameter in model.parameters():\n        "
     "parameter.grad.mul_": "    for parameter in [*model.parameters()][1:]:\n        "
     "parameter.grad.mul_"}),
]  # fmt: skip


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("script", STRATEGIES)
@pytest.mark.parametrize("what,put", CLIPS, ids=[what.replace(" ", "_") for what, _ in CLIPS])
def test_learning_sees_a_gradient_that_is_clipped(ranks, script, what, put):
    model = "even" if script == "pp.py" else "two_kv"  # tied: replicas in pp.py, too
    seen(ranks, script, put, f"--model {model} --length 13 --mode learning")


TOO_LARGE = """
def sum_gradients(model, right=sum_gradients):
    right(model)
    if dist.get_rank() == 1:
        for parameter in model.parameters():
            parameter.grad.mul_(1.5)
"""


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("script", STRATEGIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_wrong_gradient_is_seen_in_any_dtype(ranks, script, dtype):
    seen(ranks, script, {END: TOO_LARGE + END}, f"{SMALL} --dtype {dtype}")


# --------------------------------------------------------------------------------------------------
# The loss in bfloat16: correctness in bfloat16 cannot tell its softmax's rounding from all other
# --------------------------------------------------------------------------------------------------

COARSE = [  # a softmax in bfloat16; the gradient of one
    ("shifted.exp_()", "shifted.bfloat16().float().exp_()", TP),
    ("(logits - peak).exp_()", "(logits - peak.bfloat16()).float().exp_()", TP),
    ("logits.to(torch.promote_types(logits.dtype, torch.float32))", "logits", OWN_HEAD),
    ("logits.exp().sum(-1)", "logits.bfloat16().exp().sum(-1).float()", OWN_HEAD),
]


def bfloat16_loss(script, put):
    """Sum of the losses, and its gradient, against float64 of the same bfloat16 logits."""
    script = load(script, put)
    torch, cut = script.torch, script.STRATEGY in ("tp", "sp_megatron")
    torch.distributed.init_process_group("gloo")
    group, vocabulary = torch.distributed.group.WORLD, 33
    torch.manual_seed(0)
    plain, targets = 3 * torch.randn(2, 12, vocabulary), torch.randint(vocabulary, (2, 12))
    targets[0, 5], half = script.IGNORE, torch.arange(12)[:, None] % 2
    sure = half * script.F.one_hot(targets.clamp(min=0), vocabulary)
    start, end = (
        script.shard_range(vocabulary, group.rank(), group.size()) if cut else (0, vocabulary)
    )
    model = SimpleNamespace(config=SimpleNamespace(vocab_size=vocabulary))
    model.lm_head = lambda hidden: 1 * hidden[..., start:end]  # a hidden state is its logits
    tokens = slice(None)
    if script.STRATEGY == "sp_megatron":  # which gathers all ranks' tokens
        tokens = slice(*script.shard_range(12, group.rank(), group.size()))
    others = plain + 12 * sure, plain + 300 * half, plain - 300, plain * (1 + 60 * half)
    for logits in (plain, *others):
        logits = logits.bfloat16()
        exact = logits.double().requires_grad_()
        expected = script.F.cross_entropy(exact.flatten(0, 1), targets.flatten(), reduction="sum")
        expected.backward()
        hidden = logits[:, tokens].clone().requires_grad_()
        loss = script.sum_of_losses(model, hidden, targets, *([group] if cut else []))
        loss.backward()
        wanted, given = exact.grad[:, tokens], hidden.grad
        if script.STRATEGY == "tp":  # copy_to_tp_region, around it, sums the ranks'
            wanted, given = wanted[..., start:end], given[..., start:end]
        apart = abs(loss.item() / expected.item() - 1)
        assert apart < 1e-5, f"the loss is off by {apart}"
        apart = ((given - wanted).abs() / (wanted.abs() / 2**8 + 1e-6)).max()
        assert apart < 1, f"the gradient is off by {apart} roundings"


@pytest.mark.parametrize("script", STRATEGIES)
@pytest.mark.parametrize("world", [1, 2])
def test_the_loss_is_in_float32_where_the_model_is_in_bfloat16(ranks, script, world):
    codes, output = ranks.live(world, bfloat16_loss, script, {})
    assert codes == [0] * world, output
    for old, new, scripts in COARSE:
        if script in scripts:
            codes, output = ranks.live(world, bfloat16_loss, script, {old: new})
            assert codes == [1] * world and "is off by" in output, (new, output)


# --------------------------------------------------------------------------------------------------
# What stays in memory
# --------------------------------------------------------------------------------------------------


def small(ranks, *options):
    return ["--model", f"{ranks.folder}/even", "--length", "13", *options]


def alive(script):
    """Tensors of floating-point numbers in this process, by their storage; DTensors' shards."""
    tensors = [x for x in gc.get_objects() if issubclass(type(x), script.torch.Tensor)]
    tensors = [x for x in tensors if not hasattr(x, "full_tensor") and x.is_floating_point()]
    return {x.untyped_storage()._cdata: x for x in tensors if x.untyped_storage().nbytes()}


def bytes_alive(meter):
    return sum(storage.nbytes() for storage in meter.alive.values())


def own(model):
    """Storages that a rank has to hold: its shards, and HF's rotary frequencies."""
    shards = [p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()]
    rotary = [b for name, b in model.named_buffers() if name.endswith("inv_freq")]
    return {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in [*shards, *rotary]}


def only_its_own(script, put, argv, patience=5.0):
    """No tensor but the rank's own is alive, nor kept by a reference cycle; and all ranks together
    hold the model about once."""
    script = load(script, put)
    args = script.parse(argv)
    group = script.start(args)
    args.dtype = "float32"
    full = sum(p.nbytes for p in script.load_model(args).parameters())
    gc.collect()
    gc.disable()
    before = set(alive(script))

    def look(when, model=None):
        known = before | set(own(model) if model else {})
        others, end = [...], time.time() + patience
        while others and time.time() < end:  # gloo's threads let go of a message a moment later
            others = [tuple(x.shape) for key, x in alive(script).items() if key not in known]
        assert not others, f"{when} alive: {others}"

    model = script.parallelize(script.load_model(args), group, args)
    held = sum(own(model).values())
    shares = 1 if script.STRATEGY == "sp_ulysses" and not args.shard_weights else group.size()
    tied = script.STRATEGY == "pp" and group.size() > 1  # on first and last stage
    most = full / shares * 1.1 + (model.config.vocab_size * model.config.hidden_size * 4) * tied
    assert held <= most, f"alive: {held} bytes of {full}"
    look("after parallelize", model)
    with script.Meter() as meter:  # it sees what no Python object holds, too
        weights = bytes_alive(meter)
        optimizer = script.torch.optim.SGD(model.parameters(), 0.0, foreach=False)
        script.train_step(model, optimizer, *script.proof_batch(args, group), group, args)
        look("after a step", model)
        more = bytes_alive(meter) - weights
        assert more == 0, f"after a step alive: {more} bytes"
    del model, optimizer
    if "shard_weights" in args and args.shard_weights:
        gc.collect()  # fully_shard makes cycles
    look("after the model")


FULL = {
    "tp.py": "    for layer in model.model.layers:\n        attention = ",
    "sp_ulysses.py": "    if args.shard_weights:\n        shard_weights(model",
    "pp.py": "    for i in range(len(layers)):",
}
STAYS = [  # a full weight, or another stage's
    "    model.full = [p.detach().clone() for p in model.model.layers[0].mlp.parameters()]\n",
    "    model.model.register_buffer('full', model.model.layers[0].mlp.gate_proj.weight.clone())\n",
    "    model.model.register_buffer('full', model.model.layers[-1].mlp.up_proj.weight.clone())\n",
]
VIEW = {"start, end - start).clone()": "start, end - start)"}


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("script", STRATEGIES)
@pytest.mark.parametrize("how", ["full", "none"])
def test_a_rank_holds_its_own_weights_and_nothing_else(ranks, script, how):
    argv = small(ranks, "--recompute", how)
    codes, output = ranks.live(2, only_its_own, script, {}, argv)
    assert codes == [0, 0], output
    where = FULL.get(script, FULL["tp.py"])
    for more in STAYS if how == "none" else ():
        put = {where: more + where}
        codes, output = ranks.live(2, only_its_own, script, put, argv, 0.2)
        assert 1 in codes and "alive" in output, output


@pytest.mark.parametrize(
    "command", ["tp.py --dtensor", "pp.py --schedule zb", "sp_ulysses.py --shard-weights"]
)
def test_so_it_does_with_other_options(ranks, command):
    script, *options = command.split()
    codes, output = ranks.live(2, only_its_own, script, {}, small(ranks, *options))
    assert codes == [0, 0], output


@pytest.mark.parametrize("script", TP)
def test_a_shard_is_no_view(ranks, script):
    codes, output = ranks.live(2, only_its_own, script, VIEW, small(ranks), 0.2)
    assert codes == [1, 1] and "alive" in output, output


def recomputes(script, argv):
    """With recomputation each layer runs twice."""
    script = load(script)
    args = script.parse(argv)
    group, runs = script.start(args), []
    args.dtype = "float32"
    model = script.parallelize(script.load_model(args), group, args)
    layers = [layer for layer in model.model.layers if hasattr(layer, "mlp")]  # pp: a stage's
    for layer in layers:
        layer.self_attn.q_proj.register_forward_hook(lambda *_: runs.append(1))
    script.forward_backward(model, *script.proof_batch(args, group), group, args)
    batches = getattr(args, "microbatches", 1)
    assert len(runs) == len(layers) * batches * (1 if args.recompute == "none" else 2), len(runs)


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("script", STRATEGIES)
@pytest.mark.parametrize("how", ["full", "none"])
def test_layers_are_recomputed(ranks, script, how):
    codes, output = ranks.live(2, recomputes, script, small(ranks, "--recompute", how))
    assert codes == [0, 0], output


# --------------------------------------------------------------------------------------------------
# Masks; compare()
# --------------------------------------------------------------------------------------------------


def same_mask(script, argv, put):
    """Eager attention gets the mask that HF makes on one device, its lowest value included."""
    script = load(script, put)
    args = script.parse([*argv, "--attn", "eager"])
    group, masks = script.start(args), []
    args.dtype = "float32"
    ids, _ = script.proof_batch(args, group)

    def watch(decoder):
        decoder.layers[0].self_attn.register_forward_pre_hook(
            lambda module, args, kwargs: masks.append(kwargs["attention_mask"]), with_kwargs=True
        )

    model = script.load_model(args)
    watch(model.model)
    with script.torch.no_grad():
        model(input_ids=ids, use_cache=False)
        model = script.parallelize(script.load_model(args), group, args)
        watch(model.model)
        script.local_logits(model, ids, group, args)
    one_device, parallel = masks
    length = ids.shape[1]
    parallel = parallel[:1, ..., :length, :length]  # without padding
    assert script.torch.equal(parallel, one_device[:1]), "another mask"


@pytest.mark.parametrize("script", ["sp_megatron.py", "sp_ulysses.py"])
def test_eager_attention_gets_the_mask_of_one_device(ranks, script):
    codes, output = ranks.live(2, same_mask, script, small(ranks), {})
    assert codes == [0, 0], output
    put = {"return [masks[kind] for": "return [0.5 * masks[kind] for"}
    codes, output = ranks.live(2, same_mask, script, small(ranks), put)
    assert codes == [1, 1] and "another mask" in output, output


def judged(tensor, shard=(0, 0, 4), ranks=1):
    """What compare() makes of a weight, (4, 3) in full, of which as many ranks have this shard."""
    script = load("tp.py")
    script.compare.__globals__["gather_objects"] = lambda value, group: [value] * ranks
    full = script.torch.ones(4, 3, dtype=script.torch.float64)
    tensor.shard, tensor.replicas = shard, 1
    args, group = SimpleNamespace(dtype="float64"), SimpleNamespace(size=lambda: ranks)
    [row] = script.compare(1, "weight", {"weight": tensor}, {"weight": full}, args, group)
    return row


@pytest.mark.parametrize("rows,right", [(1, False), (2, True), (3, False)])
def test_a_tensor_is_as_large_as_its_shard(rows, right):
    """Its first rows being right is not enough: rank 0 of 2 holds two of four."""
    tensor = load("tp.py").torch.ones(rows, 3, dtype=load("tp.py").torch.float64)
    entry = judged(tensor, (0, 0, 2))
    assert entry["relative_error"] == (0 if right else math.inf)
    assert not entry["passed"], "the other two rows are nowhere"


def test_an_overlap_does_not_make_up_for_a_gap():
    """Two ranks with the same half: as many elements as in full."""
    tensor = load("tp.py").torch.ones(2, 3, dtype=load("tp.py").torch.float64)
    entry = judged(tensor, (0, 0, 2), ranks=2)
    assert entry["relative_error"] == 0 and entry["coverage"] in (0, 2) and not entry["passed"]


def test_a_number_that_is_none_fails():
    script = load("tp.py")
    tensor = script.torch.ones(4, 3, dtype=script.torch.float64)
    assert judged(tensor)["passed"]
    tensor[1, 1] = math.nan
    assert not judged(tensor)["passed"]
    tensor[1, 1] = 1 + 1e-8
    assert not judged(tensor)["passed"]
