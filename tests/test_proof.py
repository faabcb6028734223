"""What correctness has to see, put into the scripts on purpose; what it cannot see, tested.

Every case runs on ranks of its own, forks of one process that has loaded torch: see forks.py.
"""

import gc
import json
import time
from types import SimpleNamespace

import pytest
from conftest import ROOT, changed
from forks import STRATEGIES
from torch.utils.flop_counter import FlopCounterMode

TP, OWN_HEAD = STRATEGIES[:2], STRATEGIES[2:]  # vocabulary cut over the ranks; or not
COPIES = [pytest.param(name, marks=pytest.mark.slow) for name in ("tp.py", "sp_ulysses.py")]
END = 'if __name__ == "__main__":'  # a change put here comes after all definitions
SHIFT = "F.pad(labels[:, 1:], (0, 1), value=IGNORE)"
PREFIX = "torch.arange(labels.shape[1]) < (labels == IGNORE).sum(1, True)"
PREFIX = f"labels.clamp(min=0).masked_fill({PREFIX}, IGNORE)"
FLAT = "F.pad(labels.flatten()[1:], (0, 1), value=IGNORE).view_as(labels)"
COUNT, LABELS = "(targets != IGNORE).sum()", "(labels != IGNORE).sum()"
CUT = "    parallelize(model, group, args)\n"
MLP = {
    "column_parallel(mlp.gate_proj, i0, i1)": "pass",
    "column_parallel(mlp.up_proj, i0, i1)": "pass",
    "row_parallel(mlp.down_proj, i0, i1, rank)": "pass",
}
SUMMED = "for parameter in mlp.parameters(): parameter.sum_over = group"
LATER = """
def train_step(*args, right=train_step, calls=[], **more):
    calls.append(1)  # its first loss is right, from which the learning rate is made
    wrong = args[3].rank() > 0 and len(calls) > 1
    return right(*args, **more) * (1.01 if wrong else 1)
"""
GRADIENT = """
def sum_shared_gradients(model, right=sum_shared_gradients):
    right(model)
    if dist.get_rank() == {rank}:
        next(p for p in model.parameters() if p.grad is not None).grad.mul_(1.01)
"""
WEIGHT = """
def make_parallel(model, group, args, right=make_parallel, spare=[]):
    if group.rank() == {rank}:
        spare.append(nn.Parameter(torch.ones(1)))
    return right(model, group, args)
"""
# What is wrong, in which scripts, {the right text: the wrong one}. Where scripts share the text, as
# copies, one of them says as much as all: another in turn.
SABOTAGES = [
    ("targets are rolled, not shifted", ["tp.py", "pp.py"], {SHIFT: "labels.roll(-1, 1)"}),
    ("the loss is divided by the number of labels", [*TP, "pp.py"], {COUNT: LABELS}),
    (
        "the loss is divided by the number of labels",
        ["sp_ulysses.py"],
        {"(shift(labels) != IGNORE).sum()": LABELS},
    ),
    ("the batch is flattened before the shift", ["sp_megatron.py"], {SHIFT: FLAT}),
    ("what is ignored is a prefix", ["sp_ulysses.py"], {"labels[:, 1:]": f"{PREFIX}[:, 1:]"}),
    (
        "a softmax without its maximum",
        TP,
        {"all_reduce(largest, group, dist.ReduceOp.MAX)": "0 * largest"},
    ),
    (
        "a softmax without its maximum",
        OWN_HEAD,
        {"logits - logits.detach().max(-1, keepdim=True).values": "logits"},
    ),
    (
        "a row beyond a rank's range is looked up",
        TP,
        {
            "(ids >= self.end)": "(ids > self.end)",
            "(ids - self.start).masked_fill(elsewhere, 0)": "(ids - self.start).clamp(0, "
            "len(self.weight) - 1)",
        },
    ),
    (
        "a row beyond a rank's range is a target",
        ["sp_megatron.py"],
        {
            "(target >= start + logits.shape[-1])": "(target > start + logits.shape[-1])",
            "(target - start).masked_fill(elsewhere, 0)": "(target - start).clamp(0, "
            "logits.shape[-1] - 1)",
        },
    ),
    ("each rank's last row is not looked up", TP, {"(ids >= self.end)": "(ids >= self.end - 1)"}),
    (
        "each rank's last row is no target",
        TP,
        {"(target >= start + logits.shape[-1])": "(target >= start + logits.shape[-1] - 1)"},
    ),
    ("target 0 is ignored", ["sp_megatron.py"], {"(target == IGNORE, 0)": "(target <= 0, 0)"}),
    ("target 0 is ignored", OWN_HEAD, {"(targets == IGNORE, 0)": "(targets <= 0, 0)"}),
    (
        "the padding row has a gradient",
        STRATEGIES,
        {CUT: "    model.model.embed_tokens.padding_idx = None\n" + CUT},
    ),
    (
        "the gradient norm is of one tensor",
        ["tp.py", "pp.py"],
        {"        total += norm.square()": "        total = norm.square()"},
    ),
    ("no MLP is sharded", ["tp.py"], MLP | {"parallel_block(mlp, group)": "pass"}),
    ("no MLP is sharded", ["sp_megatron.py"], MLP | {"parallel_block(mlp, group)": SUMMED}),
    (
        "a shard keeps the full matrix",
        ["tp.py"],
        {"start, end - start).clone()": "start, end - start)"},
    ),
    ("the loss is right on rank 0 alone", ["sp_ulysses.py", "pp.py"], {END: LATER + END}),
    ("rank 0's gradient is wrong", ["tp.py"], {END: GRADIENT.format(rank=0) + END}),
    (
        "rank 1's gradient is wrong",
        ["sp_megatron.py", "pp.py"],
        {END: GRADIENT.format(rank=1) + END},
    ),
    ("rank 0 holds more", ["sp_ulysses.py"], {END: WEIGHT.format(rank=0) + END}),
    ("rank 1 holds more", ["pp.py"], {END: WEIGHT.format(rank=1) + END}),
]
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


@pytest.mark.parametrize("what,script,put", CASES, ids=IDS)
def test_correctness_sees(ranks, what, script, put):
    seen(ranks, script, put, SMALL)


@pytest.mark.slow
@pytest.mark.parametrize("what,script,put", CASES, ids=IDS)
def test_correctness_sees_with_its_default_options(ranks, what, script, put):
    seen(ranks, script, put, "")


# --------------------------------------------------------------------------------------------------
# The loss in bfloat16: correctness in bfloat16 cannot tell its softmax's rounding from all other
# --------------------------------------------------------------------------------------------------

COARSE = [  # a softmax in bfloat16; the gradient of one
    ("shifted.exp_()", "shifted.bfloat16().float().exp_()", TP),
    ("(logits - peak).exp_()", "(logits - peak.bfloat16()).float().exp_()", TP),
    ("model.lm_head.weight).float()", "model.lm_head.weight)", OWN_HEAD),
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
    start, end = script.split(vocabulary, group.rank(), group.size()) if cut else (0, vocabulary)
    head = torch.eye(vocabulary, dtype=torch.bfloat16)  # a token's hidden state is its logits
    model = SimpleNamespace(config=SimpleNamespace(vocab_size=vocabulary))
    model.lm_head = SimpleNamespace(weight=head[start:end])
    tokens = slice(None)
    if script.STRATEGY == "sp_megatron":
        tokens = slice(*script.split(12, group.rank(), group.size()))
    for logits in (
        plain,
        plain + 12 * sure,
        plain + 300 * half,
        plain - 300,
        plain * (1 + 60 * half),
    ):
        logits = logits.bfloat16()
        exact = logits.double().requires_grad_()
        expected = script.F.cross_entropy(exact.flatten(0, 1), targets.flatten(), reduction="sum")
        expected.backward()
        hidden = logits[:, tokens].clone().requires_grad_()
        loss = script.token_loss(model, hidden, targets, *([group] if cut else []))
        loss.backward()
        wanted, given = exact.grad[:, tokens], hidden.grad
        if script.STRATEGY == "tp":  # copy_to_tp_region, around token_loss, sums the ranks'
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


def small(ranks):
    return ["--model", f"{ranks.folder}/two_kv", "--length", "13"]


def alive(script):
    """Tensors of floating-point numbers in this process, by their storage."""
    tensors = [x for x in gc.get_objects() if issubclass(type(x), script.torch.Tensor)]
    return {x.untyped_storage()._cdata: x for x in tensors if x.is_floating_point()}


def only_its_own(script, put, argv, patience=5.0):
    """No tensor but the rank's own is alive, nor kept by a reference cycle."""
    script = load(script, put)
    args = script.parse(argv)
    group = script.start(args)
    gc.collect()
    gc.disable()
    before = set(alive(script))

    def look(when, model=None):
        own = [*model.parameters(), *model.buffers()] if model else []
        known = before | {x.untyped_storage()._cdata for x in own}
        others, end = [...], time.time() + patience
        while others and time.time() < end:  # gloo's threads let go of a message a moment later
            others = [tuple(x.shape) for key, x in alive(script).items() if key not in known]
        assert not others, f"{when} alive: {others}"

    model = script.make_parallel(script.load_model(args), group, args)
    look("after make_parallel", model)
    with script.Meter() as meter:  # it sees what no Python object holds, too
        weights = meter.now()
        script.train_step(model, *script.proof_batch(args, group), group, args)
        script.sgd(model, 0.0)
        look("after a step", model)
        assert meter.now() == weights, f"after a step alive: {meter.now() - weights} bytes"
    del model
    look("after the model")


CYCLE = "    module.forward = partial(forward, module.forward)\n"
WRAP = '    module.__class__ = type(kind.__name__, (kind,), {"forward": wrapped})\n'


@pytest.mark.parametrize("script", STRATEGIES)
@pytest.mark.parametrize("how", ["block", "selective", "none"])
def test_a_rank_holds_its_own_weights_and_nothing_else(ranks, script, how):
    argv = [*small(ranks), "--recompute", how]
    codes, output = ranks.live(2, only_its_own, script, {}, argv)
    assert codes == [0, 0], output
    if how == "block":
        codes, output = ranks.live(2, only_its_own, script, {WRAP: CYCLE}, argv, 0.2)
        assert 1 in codes and "alive" in output, output


def spares(script, argv):
    """With recomputation each layer runs twice, its MLP in tiles; offload says so to autograd."""
    script = load(script)
    args = script.parse(argv)
    group, offloads, runs, tokens = script.start(args), [], [], []
    keep = script.save_on_cpu
    script.recompute.__globals__["save_on_cpu"] = lambda **how: offloads.append(how) or keep(**how)
    model = script.make_parallel(script.load_model(args), group, args)
    layers = [layer for layer in model.model.layers if hasattr(layer, "mlp")]  # pp: a stage's
    for layer in layers:
        layer.self_attn.q_proj.register_forward_hook(lambda *_: runs.append(1))
        layer.mlp.act_fn.register_forward_hook(lambda _, x, y: tokens.append(y.shape[1]))
    script.train_step(model, *script.proof_batch(args, group), group, args)
    batches = getattr(args, "microbatches", 1)
    assert len(runs) == len(layers) * batches * (1 if args.recompute == "none" else 2), len(runs)
    assert (max(tokens) <= 2) == (args.recompute != "none"), f"tiles of {max(tokens)}"
    assert len(offloads) == (args.recompute == "offload") * len(layers) * batches, offloads


@pytest.mark.parametrize("script", STRATEGIES)
@pytest.mark.parametrize("how", ["offload", "none"])
def test_what_spares_memory_is_done(ranks, script, how):
    argv = [*small(ranks), "--tile", "1", "--recompute", how]
    codes, output = ranks.live(2, spares, script, argv)
    assert codes == [0, 0], output


def costs(script, argv):
    """FLOPs and peak memory of a step with each recomputation; rank 0 prints them."""
    script = load(script)
    args = script.parse(argv)
    group, found = script.start(args), {}
    for args.recompute in ("none", "selective", "block"):
        model = script.make_parallel(script.load_model(args), group, args)
        batch = script.proof_batch(args, group)
        with FlopCounterMode(display=False) as flops, script.Meter() as meter:
            script.train_step(model, *batch, group, args)
        found[args.recompute] = flops.get_total_flops(), meter.peak
    if group.rank() == 0:
        print(json.dumps(found))


@pytest.mark.parametrize("script", ["sp_megatron.py", "pp.py", *COPIES])
def test_selective_recomputation_keeps_what_is_dear(ranks, script):
    """No FLOPs more than without recomputation, norms' and the like apart, and less memory."""
    argv = ["--length", "256", "--batch", "4"]
    codes, output = ranks.live(2, costs, script, argv)
    assert codes == [0, 0], output
    (none, most), (selective, less), (block, _) = json.loads(output.splitlines()[-1]).values()
    assert none == selective < block and less < most


def test_a_tile_is_run_twice():
    """4 of 10 tokens at once; in the backward again, but not when its layer is recomputed."""
    script, sizes = load("tp.py"), []

    class Linear(script.nn.Linear):
        def forward(self, x):
            sizes.append(x.shape[1])
            return super().forward(x)

    args, block = SimpleNamespace(tile=8), Linear(6, 6, bias=False)
    x = script.torch.randn(2, 10, 6, requires_grad=True)

    def layer(x):
        return script.in_tiles(args, block, x.sin())

    script.checkpoint(layer, x, use_reentrant=False).sum().backward()
    assert sizes == [4, 4, 2, 4, 4, 2]


@pytest.mark.parametrize("rows,right", [(1, False), (2, True), (3, False)])
def test_a_tensor_is_as_large_as_its_shard(rows, right):
    """Its first rows being right is not enough: rank 0 of 2 holds two of four."""
    script = load("tp.py")
    key, tensor = ("shard", "weight"), script.torch.ones(rows, 3)
    tensor.shard, tensor.replicas = (0, 0, 2), 1
    full = {key: script.torch.ones(4, 3)}
    error, *_ = script.compare({key: tensor}, full, full)[key]
    assert error == (0 if right else float("inf"))
