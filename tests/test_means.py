"""Lab 10's memory-saving techniques on every script's model: exact, and what they send."""

import copy
import importlib
import itertools
import json
import math
from collections import Counter, defaultdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import ROOT, changed
from forks import STRATEGIES

from labs.memory import techniques

EXACT, TILE = 1e-10, 24  # a tile: 8 tokens of each of 3 sequences
RECOMPUTE, LOSS = ["full", "selective", "offload", "none"], ["full", "chunked"]
SCRIPTS = {  # their own options
    "tp.py": [],
    "sp_megatron.py": [],
    "sp_ulysses.py": ["--shard-weights"],
    "pp.py": ["--schedule zb --batch 4"],
}
RUNS = [(script, options) for script in STRATEGIES for options in ["", *SCRIPTS[script]]]


TEXTS = {"labs/lab10_long_sequences/lesson.py": techniques.lab10}
TEXTS |= {"labs/memory/techniques.py": techniques}


def change(put):
    """Replace some text of the techniques, in this process."""
    for file, module in TEXTS.items():
        own = {old: new for old, new in (put or {}).items() if old in (ROOT / file).read_text()}
        exec(compile(changed(file, own), file, "exec"), vars(module))


def expected(script, group, args, model, recompute, tile, chunks):
    """What a step sends: {(phase, op): [calls, bytes]}."""
    args, P, tiles, again = copy.copy(args), group.size(), 1, recompute != "none"
    args.recompute = "full" if again else "none"
    rows, tokens = script.expected_traffic(model, group, args), args.length
    if script.STRATEGY == "sp_megatron":
        tokens = math.ceil(tokens / P)
    if tile:
        tiles = math.ceil(tokens / (tile // args.batch))
    if script.STRATEGY == "sp_megatron":
        tokens *= P
    size = args.batch * tokens * args.config.hidden_size * 8  # bytes of one (b, s, h) in float64
    if P > 1:
        layers = args.config.num_hidden_layers
        rows += techniques.added_traffic(script.STRATEGY, layers, size, again, tiles, chunks)
    if chunks > 1 and script.STRATEGY == "sp_ulysses":  # each chunk as if it were all heads
        config = copy.copy(args.config)
        config.num_attention_heads //= chunks
        config.num_key_value_heads //= chunks
        rows = [row for row in rows if row[1] != "all_to_all"]
        part = SimpleNamespace(**vars(model) | {"config": config})
        for phase, op, *sizes in script.expected_traffic(part, group, args):
            if op == "all_to_all":  # and its forward once more, in the backward
                rows.append((phase, op, *(chunks * size for size in sizes)))
                if phase == "forward":
                    rows.append(("backward", op, *(chunks * size for size in sizes)))
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
    for op in script.Meter.OPS:
        there, all_of_it = (
            [m.messages[op, n] for n in ("count", "bytes")] for m in (forward, both)
        )
        back = [n - m for n, m in zip(all_of_it, there)]
        found |= {("forward", op): there, ("backward", op): back}
    return {key: value for key, value in found.items() if any(value)}


def gradients(script, model, parameters, group, args):
    """Losses and gradients of two steps, whose batches differ in content and length."""
    found = []
    for i in (1, 2):
        loss = script.forward_backward(model, *script.proof_batch(args, group, i), group, args)
        grads = [0 * p.detach() if p.grad is None else p.grad.clone() for p in parameters]
        found += [loss.reshape(1), *map(techniques.local, grads)]
        for p in parameters:
            p.grad = None
    return found


def chunks_of_all_ranks(script, model, group, args):
    """In how many chunks of heads attention is taken: 1, and if it can be, more, on every rank."""
    if getattr(args, "schedule", None) == "zb":
        return [1]
    model = script.parallelize(model, group, args)
    sharing = group.size() if script.STRATEGY == "sp_ulysses" else None
    works = script.gather_objects(techniques.possible_chunks(model, sharing), group)
    works = sorted(set(works[0]).intersection(*works))
    return sorted({1, works[len(works) // 2]})


def prove(name, options, model, put, recomputes, file):
    """On every rank: with each combination the gradients without any technique; the traffic."""
    script, problems = importlib.import_module(name.removesuffix(".py")), Counter()
    change(put)
    script.LOSS_CHUNK = 15  # several chunks
    length = {"pp.py": 36}.get(name, 37)
    args = script.parse(["--model", model, "--length", str(length), *options.split()])
    group, args.dtype = script.start(args), "float64"
    tried = 0
    with script.upcasts_in_float64(args):
        reference, right = script.load_model(args), None
        works = chunks_of_all_ranks(script, copy.deepcopy(reference), group, args)
        kinds = recomputes, (None, TILE), LOSS, works
        for recompute, tile, loss, chunks in itertools.product(*kinds):
            if loss == "full" and chunks > 1:  # attention does not know of the loss
                continue
            args.recompute, args.loss, tried = "none", loss, tried + 1
            model = script.parallelize(copy.deepcopy(reference), group, args)
            named = list(model.named_parameters())  # before modules move to other names
            parameters = [p for _, p in named]
            plain = {"named_parameters": lambda n=named: n, "parameters": lambda p=parameters: p}
            attention = getattr(model.model.layers[0], "self_attn", None)  # pp: maybe not here
            decoder = SimpleNamespace(layers=[SimpleNamespace(self_attn=attention)])
            decoder.embed_tokens = model.model.embed_tokens
            plain = SimpleNamespace(config=args.config, model=decoder, **plain)
            plain.dtype = parameters[0].dtype
            if right is None:
                right = gradients(script, model, parameters, group, args)
            techniques.save_memory(script, model, group, args, recompute, tile, chunks)
            what = f"{recompute}, tile {tile}, {loss}, {chunks}"
            found = gradients(script, model, parameters, group, args)
            for a, b in zip(found, right, strict=True):
                error = (a - b).norm() / max(b.norm(), 1e-3 * right[0].norm())
                problems[f"gradients: {what}"] += not error <= EXACT
            if loss == "chunked":
                batch = script.proof_batch(args, group)
                step = partial(script.forward_backward, model, *batch, group, args)
                sent = measured(script, step)
                told = expected(script, group, args, plain, recompute, tile, chunks)
                problems[f"traffic: {what}"] += sent != told
    all_ranks = script.gather_objects([p for p, n in problems.items() if n], group)
    if group.rank() == 0:
        Path(file).write_text(json.dumps([tried, sorted(set(sum(all_ranks, [])))]))


def try_all(ranks, world, name, options, model, tmp_path, put=None, recomputes=RECOMPUTE):
    """prove() on so many ranks; returns (how many combinations were tried, what was wrong)."""
    file = tmp_path / "found.json"
    model = str(ranks.folder / model)
    codes, output = ranks.live(world, prove, name, options, model, put, recomputes, str(file))
    assert codes == [0] * world, output
    return json.loads(file.read_text())


MODELS = (2, "shared_kv"), (2, "own_kv"), (3, "six_kv")
CASES = [(*run, *case) for run in RUNS for case in MODELS]


@pytest.mark.ci(every=21)
@pytest.mark.parametrize("name,options,world,model", CASES)
def test_every_combination_is_exact(ranks, tmp_path, name, options, world, model):
    """37 tokens, 12 heads of 1, 3 or 6 KV heads, on 2 and 3 ranks: little divides."""
    if name == "pp.py":  # as many layers as stages, and more
        model = "deep_untied" if model == "own_kv" else "deep"
    tried, wrong = try_all(ranks, world, name, options, model, tmp_path)
    chunks = "zb" not in options and (name, world) != ("sp_ulysses.py", 2)
    assert (tried, wrong) == (24 if chunks else 16, [])


NO_WEIGHT_GRADIENT = {"y.backward(dy)": "tile.grad = torch.autograd.grad(y, tile, dy)[0]"}
KEPT_TOO_LATE = {  # by the tiles themselves: a recomputed layer runs its MLP, too
    "ctx.keeper, ctx.block, ctx.size = keeper": "ctx.save_for_backward(x)\n"
    "        ctx.keeper, ctx.block, ctx.size = keeper",
    "ctx.keeper.saved_tensors": "ctx.saved_tensors",
}
OTHER_TOKENS = {
    "out.unflatten(1, (self.world, -1))": "out.unflatten(1, (-1, self.world)).transpose(1, 2)"
}
OTHER_HEADS = {"o_proj, 1, part, parts": "o_proj, 1, parts - 1 - part, parts"}
SABOTAGES = [  # and what those combinations have in common in which it is seen
    ("tp.py", NO_WEIGHT_GRADIENT, "gradients: none, tile 24, full, 1", "tile 24"),
    ("tp.py", KEPT_TOO_LATE, "traffic: block, tile 24, chunked, 1", "tile 24"),
    ("sp_megatron.py", OTHER_TOKENS, "gradients: offload, tile 24, chunked, 1", "tile 24"),
    ("sp_megatron.py", OTHER_HEADS, "gradients: none, tile None, chunked, 3", "chunked, 3"),
]


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("name,put,said,where", SABOTAGES)
def test_what_is_wrong_is_seen(ranks, tmp_path, name, put, said, where):
    recompute = said.split()[1].strip(",")
    _, wrong = try_all(ranks, 2, name, "", "two_kv", tmp_path, put, [recompute])
    assert said in wrong and all(where in problem for problem in wrong), wrong


def peaks(model, put, combinations, file):
    """On one rank: {combination: live bytes at the peak of a step}, 1,024 tokens."""
    script, found = importlib.import_module("tp"), {}
    change(put)
    args = script.parse(["--model", model, "--length", "1024", "--batch", "1"])
    group, args.dtype = script.start(args), "float32"
    for recompute, tile, *chunks in combinations:
        model = script.parallelize(script.load_model(args), group, args)
        techniques.save_memory(script, model, group, args, recompute, tile, *chunks)
        batch = script.proof_batch(args, group)
        with script.Meter() as meter:
            script.forward_backward(model, *batch, group, args)
        found[" ".join(map(str, (recompute, tile, *chunks)))] = meter.peak
        del model
    Path(file).write_text(json.dumps(found))


@pytest.mark.ci
def test_each_means_takes_less(ranks, tmp_path):
    def found(put, combinations):
        file = str(tmp_path / "found.json")
        codes, output = ranks.live(1, peaks, "tiny", put, combinations, file)
        assert codes == [0], output
        return json.loads(Path(file).read_text())

    chunks = [("full", 128, 4)]
    ours = found(None, [*itertools.product(RECOMPUTE, (None, 128)), *chunks])
    assert ours["full 128 4"] < ours["full 128"]
    # By keyword an input is kept by checkpoint() itself, for every layer
    by_name = {"checkpoint(chunk, hidden": "checkpoint(chunk, hidden_states=hidden"}
    assert ours["full 128 4"] < found(by_name, chunks)["full 128 4"]
    assert ours["full None"] < ours["selective None"] < ours["none None"]
    for recompute in RECOMPUTE:
        assert ours[f"{recompute} 128"] < ours[f"{recompute} None"], ours
    # A policy that keeps what runs in tiles keeps what nobody asks for
    unasked = found({" and torch.is_grad_enabled()": ""}, [("selective", 128)])
    assert ours["selective 128"] < unasked["selective 128"]
