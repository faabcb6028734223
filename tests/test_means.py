"""Lab 10's means against memory on every script's model: exact, and what they send, to the byte."""

import copy
import itertools
import json
import math
import os
import sys
from collections import Counter, defaultdict
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, changed
from forks import STRATEGIES

sys.path.insert(0, str(ROOT))
import oom_search  # noqa: E402

EXACT, TILE = 1e-10, 24  # a tile: 8 tokens of each of 3 sequences
RECOMPUTE, LOSS = ["block", "selective", "offload", "none"], ["full", "chunked"]
SCRIPTS = {  # their own options
    "tp.py": [],
    "sp_megatron.py": [],
    "sp_ulysses.py": ["--shard-weights"],
    "pp.py": ["--schedule zb --batch 4"],
}
RUNS = [
    (script, options)
    for script in STRATEGIES
    if "class UsageError" in (ROOT / script).read_text()
    for options in ["", *SCRIPTS[script]]
]


def lab_with(put):
    """Lab 10 as a module, with some of its text replaced."""
    lab = oom_search.load(oom_search.LAB)
    exec(compile(changed(oom_search.LAB, put), oom_search.LAB, "exec"), vars(lab))
    return lab


def expected(lab, script, group, args, recompute, tile):
    """What a step sends: {(phase, op): [calls, bytes]}."""
    args = copy.copy(args)
    args.recompute = "none" if recompute == "none" else "block"
    rows = script.expected_traffic(args.config, group, args)
    if tile and group.size() > 1:
        P, config = group.size(), args.config
        tokens = math.ceil(args.length / P) if script.STRATEGY == "sp_megatron" else args.length
        tiles = math.ceil(tokens / (tile // args.batch))
        size = P * math.ceil(args.length / P) if script.STRATEGY == "sp_megatron" else args.length
        size *= args.batch * config.hidden_size * 8  # bytes of one (b, s, h) in float64
        layers, again = config.num_hidden_layers, recompute != "none"
        rows += lab.tile_traffic(script.STRATEGY, layers, tiles, size, again)
    found = defaultdict(lambda: [0, 0])
    for phase, op, calls, size in rows:
        found[phase, op][0] += calls
        found[phase, op][1] += size
    return {key: value for key, value in found.items() if any(value)}


def measured(script, step):
    """The same of a step that runs: step(backward)."""
    with script.Meter() as forward:
        step(False)
    with script.Meter() as both:
        step(True)
    found = {}
    for op in both.calls:
        there = forward.calls[op], forward.bytes[op]
        back = both.calls[op] - there[0], both.bytes[op] - there[1]
        found |= {("forward", op): list(there), ("backward", op): list(back)}
    return {key: value for key, value in found.items() if any(value)}


def gradients(script, model, parameters, group, args):
    """Losses and gradients of two steps, whose batches differ in content and length."""
    found = []
    for i in (0, 1):
        loss = script.train_step(model, *script.proof_batch(args, group, i), group, args)
        grads = [0 * p.detach() if p.grad is None else p.grad.clone() for p in parameters]
        found += [loss.reshape(1), *map(script.full_tensor, grads)]
        for p in parameters:
            p.grad = None
    return found


def prove(name, options, model, put, file):
    """On every rank: with each combination of means the gradients without any; the traffic."""
    script, lab, problems = oom_search.load(name), lab_with(put), Counter()
    script.LOSS_CHUNK = 15  # several chunks
    length = {"pp.py": 36}.get(name, 37)
    args = script.parse(["--model", model, "--length", str(length), *options.split()])
    group, args.dtype = script.start(args), "float64"
    gather = getattr(script, "gather_from_sp_region", None)
    run = lab, script, group, args
    with script.float64_islands("float64"):
        reference, right = script.load_model(args), None
        for recompute, tile, loss in itertools.product(RECOMPUTE[::-1], (None, TILE), LOSS):
            args.recompute, args.loss = "none", loss
            model = script.parallelize(copy.deepcopy(reference), group, args)
            parameters = list(model.parameters())  # before modules move to other names
            if right is None:
                right = gradients(script, model, parameters, group, args)
            lab.apply_means(model, recompute, tile, gather, group)
            if tile and hasattr(model, "pipeline"):
                for stage in model.pipeline.stages.values():
                    lab.tile_norm(stage.decoder, tile)
            what = f"{recompute}, tile {tile}, {loss}"
            found = gradients(script, model, parameters, group, args)
            for a, b in zip(found, right, strict=True):
                error = (a - b).norm() / max(b.norm(), 1e-3 * right[0].norm())
                problems[f"gradients: {what}"] += not error <= EXACT
            if loss == "chunked":
                batch = script.proof_batch(args, group)
                step = partial(script.train_step, model, *batch, group, args)
                sent = measured(script, step)
                problems[f"traffic: {what}"] += sent != expected(*run, recompute, tile)
    all_ranks = script.gather_objects([p for p, n in problems.items() if n], group)
    if group.rank() == 0:
        tried = len(RECOMPUTE) * 2 * len(LOSS)
        Path(file).write_text(json.dumps([tried, sorted(set(sum(all_ranks, [])))]))


def try_all(ranks, world, name, options, model, tmp_path, put=None):
    """prove() on so many ranks; returns (how many combinations were tried, what was wrong)."""
    file = tmp_path / "found.json"
    model = str(ranks.folder / model)
    codes, output = ranks.live(world, prove, name, options, model, put, str(file))
    assert codes == [0] * world, output
    return json.loads(file.read_text())


QUICK = ("tp.py", 2), ("sp_megatron.py", 3)  # the others: make prove, and a sample of them CI
CASES = [(*run, world, model) for run in RUNS for world, model in ((2, "shared_kv"), (3, "bias"))]
CASES = [
    pytest.param(*case, marks=() if (case[0], case[2]) in QUICK else pytest.mark.slow)
    for case in CASES
]


@pytest.mark.parametrize("name,options,world,model", CASES)
def test_every_combination_is_exact(ranks, tmp_path, name, options, world, model):
    """37 tokens, 12 heads of 4 or of 1 KV head, on 2 and 3 ranks: nothing divides."""
    model = "deep" if name == "pp.py" else model  # as many layers as stages, and more
    tried, wrong = try_all(ranks, world, name, options, model, tmp_path)
    assert (tried, wrong) == (16, [])


NO_WEIGHT_GRADIENT = {"y.backward(dy)": "tile.grad = torch.autograd.grad(y, tile, dy)[0]"}
KEPT_TOO_LATE = {  # by the tiles themselves: a recomputed layer runs its MLP, too
    "ctx.keeper, ctx.block, ctx.size = keeper": "ctx.save_for_backward(x)\n"
    "        ctx.keeper, ctx.block, ctx.size = keeper",
    "ctx.keeper.saved_tensors": "ctx.saved_tensors",
}
OTHER_TOKENS = {
    "out.unflatten(1, (self.world, -1))": "out.unflatten(1, (-1, self.world)).transpose(1, 2)"
}
SABOTAGES = [
    ("tp.py", NO_WEIGHT_GRADIENT, "gradients: none, tile 24, full"),
    ("tp.py", KEPT_TOO_LATE, "traffic: block, tile 24, chunked"),
    ("sp_megatron.py", OTHER_TOKENS, "gradients: offload, tile 24, chunked"),
]


@pytest.mark.parametrize("name,put,said", SABOTAGES)
def test_what_is_wrong_is_seen(ranks, tmp_path, name, put, said):
    _, wrong = try_all(ranks, 2, name, "", "two_kv", tmp_path, put)
    assert said in wrong and all("tile 24" in problem for problem in wrong), wrong


def peaks(model, put, means, file):
    """On one rank: {means: live bytes at the peak of a step}, 1,024 tokens."""
    script, lab, found = oom_search.load("tp.py"), lab_with(put), {}
    args = script.parse(["--model", model, "--length", "1024", "--batch", "1"])
    group, args.dtype = script.start(args), "float32"
    for recompute, tile in means:
        model = script.parallelize(script.load_model(args), group, args)
        lab.apply_means(model, recompute, tile)
        batch = script.proof_batch(args, group)
        with script.Meter() as meter:
            script.train_step(model, *batch, group, args)
        found[f"{recompute} {tile}"] = meter.peak
        del model
    Path(file).write_text(json.dumps(found))


def test_each_means_takes_less(ranks, tmp_path):
    def found(put, means):
        file = str(tmp_path / "found.json")
        codes, output = ranks.live(1, peaks, "tiny", put, means, file)
        assert codes == [0], output
        return json.loads(Path(file).read_text())

    ours = found(None, list(itertools.product(RECOMPUTE, (None, 128))))
    assert ours["block None"] < ours["selective None"] < ours["none None"]
    for recompute in RECOMPUTE:
        assert ours[f"{recompute} 128"] < ours[f"{recompute} None"], ours
    # A policy that keeps what runs in tiles keeps what nobody asks for
    unasked = found({" and torch.is_grad_enabled()": ""}, [("selective", 128)])
    assert ours["selective 128"] < unasked["selective 128"]


def by_chunks(chunks, file):
    """On every rank: attention of 6 KV heads for 12 query heads by chunks, beside one device's."""
    tp, lab = oom_search.load("tp.py"), oom_search.load(oom_search.LAB)
    args = tp.parse([])
    group, P = tp.start(args), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    full = torch.randn(2, 5 * P, 16, dtype=torch.float64)
    weights = [torch.randn(n * 8, 16, dtype=torch.float64) for n in (12, 6, 6)]
    right = [x.clone().requires_grad_() for x in (full, *weights)]
    heads = [F.linear(right[0], w).unflatten(-1, (-1, 8)).transpose(1, 2) for w in right[1:]]
    out = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
    expected = out.transpose(1, 2).flatten(2)
    expected.square().sum().backward()
    mine = slice(5 * group.rank(), 5 * group.rank() + 5)
    own = [x.clone().requires_grad_() for x in (full[:, mine], *weights)]
    with tp.Meter() as meter:
        got = lab.attend_by_chunks(*own, 8, chunks, group)
        got.square().sum().backward()
    pairs = [(got, expected[:, mine]), (own[0].grad, right[0].grad[:, mine])]
    pairs += [(tp.all_reduce(a.grad, group), b.grad) for a, b in zip(own[1:], right[1:])]
    errors = [((a - b).norm() / b.norm()).item() for a, b in pairs]
    everyone = tp.gather_objects((max(errors), dict(meter.calls)), group)
    if group.rank() == 0:
        Path(file).write_text(json.dumps(everyone))


@pytest.mark.parametrize("world,chunks", [(1, 3), (2, 1), (2, 3), (3, 2)])
def test_chunks_of_heads_are_exact(ranks, tmp_path, world, chunks):
    file = str(tmp_path / "found.json")
    codes, output = ranks.live(world, by_chunks, chunks, file)
    assert codes == [0] * world, output
    for error, calls in json.loads(Path(file).read_text()):
        assert error <= EXACT
        # Forward, again, backward: q, k, v and the output each; what comes last does not run again
        assert calls["all_to_all"] == 11 * chunks
