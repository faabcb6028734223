"""Step through and --where: what is recorded of the scripts, and what is said of it."""

import importlib
import json
import re
import sys
from collections import Counter

import mutants
import numpy as np
import pytest
from conftest import torchrun
from forks import ROOT, STRATEGIES

sys.path.insert(0, str(ROOT / "notebooks"))
from explorer import walk as page  # noqa: E402
from explorer.questions import unsqueezed  # noqa: E402

from labs.bugs import BUGS  # noqa: E402
from labs.walk import where  # noqa: E402
from labs.walk.compare import OneDevice, badge  # noqa: E402
from labs.walk.record import record  # noqa: E402

SCRIPTS = [script.removesuffix(".py") for script in STRATEGIES]
RUNS = [(script, name) for script in SCRIPTS for name in page.runs(script)]

# What is no tensor of one device's run, in any way: of which a rank's lookups and masks are made
OWN = {("VocabParallelEmbedding.forward", name): "x" for name in ("mine", "rows", "out")}
for phase in "forward", "backward":
    OWN |= {(f"VocabParallelCrossEntropy.{phase}", name): "x" for name in ("mine", "column")}
# Padded with IGNORE, cut by ranks: one device has targets of another shape
TARGETS = {("mean_loss", "targets"): "s", ("mean_loss", "target"): "s"}
TARGETS |= {("sum_of_losses", "targets"): "s"}
# An all-to-all's buffers hold a rank's tokens or heads in the order of the ranks
BUFFERS = {("tokens_to_heads", "rows"): "r", ("heads_to_tokens", "rows"): "r"}
BUFFERS |= {("all_to_all", name): "r" for name in ("x", "out", "returns")}
BUFFERS |= {("SeqAllToAll.forward", name): "r" for name in ("x", "returns")}
BUFFERS |= {("SeqAllToAll.backward", name): "r" for name in ("grad", "returns")}
UNKNOWN = {"tp": OWN, "sp_megatron": OWN | TARGETS, "sp_ulysses": BUFFERS, "pp": {}}


@pytest.fixture(scope="module")
def recorded():
    """recorded(script, run): the ranks' recordings, one device's, and the number of KV heads."""
    kept = {}

    def get(script, name):
        if (script, name) not in kept:
            world, setting = page.runs(script)[name]
            path = ROOT / f"{script}.py"
            both = record(path, world, setting), record(path, 1, setting)[0]
            kept[script, name] = *both, setting.model[5]
        return kept[script, name]

    return get


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("script,name", RUNS)
def test_messages_are_those_that_the_script_expects(recorded, script, name):
    ranks, *_ = recorded(script, name)
    for rank in ranks:
        assert rank.error is None
        sent, expected = Counter(), Counter()
        for step in rank.steps:
            for message in step.messages:
                if rank.calls[step.call].name != "grad_norm" and message["op"] != "receive":
                    op = message["op"].replace("-", "_")
                    sent[op, "count"] += 1
                    sent[op, "bytes"] += message["bytes"]
        for _, op, count, size in rank.expected:
            expected[op, "count"] += count
            expected[op, "bytes"] += size
        assert sent == expected


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("script,name", [run for run in RUNS if run[0] != "pp"])
def test_badges_of_parameters_are_the_scripts_notes(recorded, script, name):
    """A shard of the dimension that it was cut along, or equal; its gradient a partial sum until it
    has been summed, where the script says that it will be."""
    ranks, one, kv_heads = recorded(script, name)
    world, seen = len(ranks), set()
    device, sharing = OneDevice(one, ranks[0]), max(1, world // kv_heads)

    def mark(place, variable, parameter):
        values = [rank.steps[place].changed[variable] for rank in ranks]
        candidates = device.candidates(place, ranks[0].steps[place].call, variable)
        return badge(values, candidates, sharing if parameter[-13:-9] in ("k_pr", "v_pr") else 1)[0]

    for place, step in enumerate(ranks[0].steps):
        function = ranks[0].calls[step.call].name
        parameter = step.note or step.changed.get("name of parameter")
        if parameter is None or (step.kind != "gradient" and "parameter" not in step.changed):
            continue
        shard, replicas, is_summed = ranks[0].notes[parameter]
        whole = f"d{shard[0]}" if shard and world > replicas else "="
        if step.kind == "gradient":
            part = "+" if whole == "=" else f"+{whole}"
            assert mark(place, f"{parameter}.grad", parameter) == (part if is_summed else whole)
        elif function == "sum_gradients":
            assert mark(place, "parameter", parameter) == whole, parameter
            seen.add(parameter)
    assert seen == set(ranks[0].notes)


def test_constant_tensors_are_drawn(recorded):
    """A tensor of ones would fit every badge: no float tensor of a model is constant."""
    ranks, *_ = recorded("sp_megatron", "none")
    for step in ranks[0].steps:
        x = step.changed.get("parameter")
        assert x is None or np.ptp(x) > 0


@pytest.fixture(scope="module")
def embedded():
    """What explorer.html holds."""
    maker = importlib.import_module("make_explorer")
    return unsqueezed(maker.embedded(maker.PAGE)["walk"])


@pytest.mark.parametrize("script", SCRIPTS)
def test_lines_on_the_page_are_the_scripts(embedded, script):
    lines = (ROOT / f"{script}.py").read_text().splitlines()
    old = [n for n, line in embedded[script]["lines"].items() if lines[int(n) - 1] != line]
    assert old == [], "run python notebooks/make_explorer.py --only walk"


def told(data):
    """A script's runs with texts and numbers in the place of their places in the pool, whose order
    depends on what else is recorded."""

    def of(value):
        return [data["pool"][i] for i in (value if isinstance(value, list) else [value])]

    found = {}
    for name, run in data["runs"].items():
        found[name] = {key: value for key, value in run.items() if key != "tracks"}
        for track in run["tracks"]:
            for kind, call, line, *rest in track:
                via, changes, messages, note = rest + [[], [], [], ""][len(rest) :]
                step = [kind, call, line, via, note]
                step += [[data["names"][n], of(v), m, *map(of, x)] for n, v, m, *x in changes]
                for *about, coming in messages:
                    step.append([about, [[[*p[:-1], of(p[-1])] for p in ps] for ps in coming]])
                found[name].setdefault("steps", []).append(step)
    return found


@pytest.mark.ci(every=4)
@pytest.mark.parametrize("script", SCRIPTS)
def test_the_page_has_what_the_scripts_do(embedded, script):
    """Made anew they are the same, each bug's first wrong line, too; and UNKNOWN has all that is no
    tensor of one device."""
    data, odd = page.walk([script])
    anew, there = json.loads(json.dumps(data[script])), embedded[script]
    assert told(anew) == told(there)
    assert odd[script] == UNKNOWN[script]
    wrong, right = ({bug: run["wrong"] for bug, run in of["bugs"].items()} for of in (anew, there))
    assert wrong == right


# --where
# --------------------------------------------------------------------------------------------------


@pytest.mark.ci
def test_where_names_the_line_of_a_change_in_a_copy(tmp_path, capsys):
    copy = tmp_path / "my_tp.py"
    right = "target_logit, sum_exp = all_reduce(torch.stack([target_logit, sum_exp]), group)"
    text = (ROOT / "tp.py").read_text()
    assert right in text
    copy.write_text(f"# a line more\n{text.replace(right, f'{right} * 2')}")
    line = copy.read_text().splitlines().index(f"        {right} * 2") + 1
    assert where.main([str(copy)]) == 1
    said = capsys.readouterr().out
    assert f"my_tp.py, line {line}, in VocabParallelCrossEntropy.forward" in said
    for no_copy in "print()", text.replace("# The lesson ends", "# It ends"), f"{text}(":
        copy.write_text(no_copy)
        assert where.main([str(copy)]) == 2
        assert capsys.readouterr().err.startswith("error: ")


@pytest.mark.slow
def test_where_says_nothing_of_a_copy_without_a_change(tmp_path):
    copy = tmp_path / "my_tp.py"
    copy.write_text((ROOT / "tp.py").read_text())
    assert where.facts(copy) == {}


@pytest.mark.slow
def test_where_follows_a_verdict():
    job = torchrun(2, "labs/break_it.py", "sp_megatron.py", "unsummed_norm_gradient", "--where")
    after = job.stdout.partition("FAIL correctness")[2]
    assert "sum_gradients" in after and re.search(r"should be: +ranks \[0, 1\]", after)


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_where_finds_every_bug(script):
    """In the function that the bug replaces, or in one that uses what it returns: those are named
    in results/README.md, which a reader can compare."""
    path = ROOT / f"{script}.py"
    for bug in BUGS[script]:
        told = where.facts(path, bug)
        assert told and told["line"], bug
        assert where.planted(path, bug), bug
        assert told["expected"] != told["is"]


# Mutants of functions that no recorded step calls: the proof's own, and those of options
PROOF = "local_logits", "by_dtensor", "shard_weights"


@pytest.mark.slow
def test_where_finds_mutants(tmp_path):
    """A fixed sample of tests/mutants.py, of all scripts: a line is found for each."""
    for script in mutants.SCRIPTS:
        known = mutants.EQUIVALENT
        sample = [m for m in mutants.mutants(script) if m.name not in known][::40]
        for mutant in (m for m in sample if not any(name in m.name for name in PROOF)):
            copy = tmp_path / f"my_{script}"
            copy.write_text(mutant.source)
            assert where.facts(copy).get("line"), mutant.name
