"""Which nets see which bug: types, parity (the float64 proof on 2 ranks), bits (lab 16's).

A bug of break_it.py is written into scripts.py, which has the scripts as programs of types.
For bits it is written into lab 16's lesson, if that has a place for it: in tensor parallelism,
or in data parallelism's sums of gradients, which stand for Ulysses'. Bits asks that two ranks
give what one gives. Lab 16's own bugs, of order and of random numbers, are compared with one
device, too, as parity does it: in float64, from given weights, without dropout.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist

from labs.kit.harness import LABS, load, on_ranks, relative_error
from labs.kit.mistakes import edits_of
from labs.lab3_pitfalls import check as lab3
from labs.lab3_pitfalls.show import WRONG, size, try_all
from labs.lab15_types import scripts
from labs.lab16_bits import same_bits
from labs.lab16_bits.bits import data_of, finished

break_it = load(LABS / "break_it.py")
NETS = LABS / "lab15_types" / "nets.json"
WATCHING = "adaptive_timing", "rank_0_clock"  # of lab 3: no number of the model is wrong
EXACT = 1e-10
SHAPES = {"tp.py": [(1, 2)], "sp_ulysses.py": [(2, 1)], "lab16": [(1, 2), (2, 1)]}  # dp, tp
OTHER = {"no_op_parallelize": "unsharded", "unsummed_qk_norm_gradient": "qk_norm"}  # programs

TYPED = """
tp missing_backward_all_reduce: move(y, "I", "R") -> y
tp missing_forward_reduction: move(y, "P", "I") -> y
tp all_reduce_both_ways: move(y, "P", "I") -> move(y, "P", "R")
tp local_softmax: shift(labels), g) -> shift(labels), same)
tp unsummed_qk_norm_gradient: move(q_norm, "I", "R") -> q_norm
tp loss_by_local_count: return loss -> return scale(loss, own_count)
sp_megatron missing_backward_reduction: move(y, S(1), "R") -> move(y, S(1), "I")
sp_megatron missing_forward_reduction: move(y, "P", S(1)) -> y
sp_megatron local_softmax: shift(labels), g) -> shift(labels), same)
sp_megatron unsummed_norm_gradient: move(weight, "I", "R") -> weight
sp_megatron local_position_ids: (w["positions"], y) -> (modulo(w["positions"]), y)
sp_megatron shift_after_split: shift(labels) -> masked(shift(labels))
sp_megatron loss_by_local_count: return loss -> return scale(loss, own_count)
sp_ulysses missing_gradient_sum: move(weight, "I", "R") -> weight
sp_ulysses local_position_ids: (w["positions"], y) -> (modulo(w["positions"]), y)
sp_ulysses shift_after_split: (logits, labels, same) -> (logits, masked(labels), same)
sp_ulysses no_op_ulysses: , whole, all_to_all) -> , whole)
sp_ulysses wrong_head_order: , all_to_all) -> , lambda *y: roll_heads(all_to_all(*y)))
sp_ulysses loss_by_local_count: return loss -> return scale(loss, own_count)
pp overwritten_gradients: add(*losses) -> losses[-1]
pp untied_gradient: tied = move(table, "I", "R") -> tied = table
pp swapped_labels: shift(labels) -> roll_sequences(shift(labels))
"""  # script bug: ours -> theirs, in scripts.py; a bug that is not here changes numbers alone
OWN = "sum((~rows_of(ids[1:], block)[1]).sum() for block in layout.blocks)"  # its targets
LOCAL_COUNT = f"/ (B * (S - 1)) -> / (len(layout.sequences) * {OWN})"
BITS = {  # script: {bug: the same in lab 16's lesson}
    "tp.py": {
        "missing_backward_all_reduce": "all_reduce(tree_sum(grads), ctx.group) -> tree_sum(grads)",
        "missing_forward_reduction": "all_reduce(tree_sum(parts), group) -> tree_sum(parts)",
        "all_reduce_both_ways": "ctx.count = -> ctx.group, ctx.count = group,"
        " && *[grad] -> *[all_reduce(grad, ctx.group)]",
        "wrong_shard": "else initial(name, block, seed) -> else initial(name, (block"
        ' + len(layout.blocks) * (name == "layers.0.o")) % BLOCKS, seed)',
        "unmasked_embedding": ".masked_fill(elsewhere[:, None], 0) ->",
        "local_softmax": "Leave.apply(layout.tp, *sums) -> tree_sum(sums)",
        "loss_by_local_count": LOCAL_COUNT,
        "no_op_parallelize": "range(group.rank() * size, (group.rank() + 1) * size) ->"
        " range(n) && (doubling if x.numel() % group.size() else halving)(x, group) -> x",
    },
    "sp_ulysses.py": {
        "missing_gradient_sum": "(all_reduce(tree_sum(parts), layout.dp) -> (tree_sum(parts)",
        "loss_by_local_count": LOCAL_COUNT,
    },
    "lab16": dict.fromkeys(change.__name__ for change in same_bits.SURE),
}
BITS["sp_ulysses.py"]["no_op_parallelize"] = BITS["tp.py"]["no_op_parallelize"]


def with_edits(path, edits):
    """The module of a file whose text is edited: ours -> theirs, and others behind &&."""
    text = Path(path).read_text()
    for ours, theirs in edits_of(filter(None, edits.split(" && "))):
        assert ours in text, ours
        text = text.replace(ours, theirs)
    module = ModuleType(Path(path).stem)
    exec(compile(text, path, "exec"), vars(module))
    return module


# ---- Types ---------------------------------------------------------------------------------------


def changes():
    """{(script, bug): its edits of scripts.py}."""
    lines = (line.split(": ", 1) for line in TYPED.strip().split("\n"))
    return {tuple(names.split()): edits for names, edits in lines}


def script_says(script, bug=None):
    """What the checker says to a script with a bug of break_it.py; None if it accepts it."""
    edits = changes().get((script, bug), "")
    return with_edits(scripts.__file__, edits).said(OTHER.get(bug, script))


def pitfall_says(name):
    """The same of a pitfall of lab 3; accepted, where it has no line that a type has."""
    return scripts.said(name) if name in scripts.PITFALLS else None


def type_verdicts():
    """{script, lab3 or lab16: {bug: what the checker says, or None}}."""
    found = {}
    for script, bugs in break_it.BUGS.items():
        found[f"{script}.py"] = {bug: script_says(script, bug) for bug in bugs}
    found["lab3"] = {name: pitfall_says(name) for name in lab3.CHECKS}
    # orders of sums and random numbers: a type says nothing of either
    return found | {"lab16": dict.fromkeys(sorted(BITS["lab16"]))}


# ---- Parity --------------------------------------------------------------------------------------


def proof_sees(script, bug):
    """Whether the float64 proof of a script fails with a bug, on 2 ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2"]
    command += ["labs/break_it.py", script, bug, "--length", "64"]
    how = {"cwd": LABS.parent, "env": os.environ | {"OMP_NUM_THREADS": "1"}, "text": True}
    run = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, **how)
    return "FAIL correctness" in run.stdout


def pitfalls_seen(seed):
    """{pitfall: whether a comparison of gradients with one device shows it, or it raises}."""
    names = [name for name in lab3.CHECKS if name not in WATCHING]
    lab = load(LABS / "lab3_pitfalls" / "lesson.py")
    ranks = on_ranks(2, try_all, lab, names, seed, timeout=120)
    found = dict.fromkeys(lab3.CHECKS, False)
    for name in names:
        rows = [rank[name]["wrong"] for rank in ranks if "wrong" in rank[name]]
        worst = max(rows, key=size)
        found[name] = worst.get("gradient", size(worst)) > WRONG
    return found


# ---- Bits ----------------------------------------------------------------------------------------


def changed(script, bug, dp, tp):
    """Lab 16's lesson as a new module, with a bug."""
    if script != "lab16":
        return with_edits(finished.__file__, BITS[script][bug])
    lab = load(finished.__file__)
    getattr(same_bits, bug)(lab, dp, tp)
    return lab


def given(lab, layout, seed):
    """{key: gradient} of a step in float64 from given weights, without dropout."""
    lab.initial, lab.dropout = finished.initial, lambda x, *_, **__: x
    weights = lab.new_state(layout, seed, torch.float64)["weights"]
    return lab.gradients(data_of(seed, lab.B), weights, layout, 0, seed)[1]


def judged_on_rank(group, seed):
    """{(script, bug): the nets that see it} on this rank: bits; parity of lab 16's own."""
    groups, found, data = same_bits.all_groups(group, SHAPES["lab16"]), {}, data_of(seed)
    single = [dist.new_group([rank]) for rank in range(group.size())][group.rank()]
    for script, bug in ((each, bug) for each, bugs in BITS.items() for bug in bugs):
        row = found[script, bug] = set()
        for dp, tp in SHAPES[script]:
            labs = changed(script, bug, dp, tp), changed(script, bug, 1, 1)
            layouts = labs[0].Layout(*groups[dp, tp]), labs[1].Layout(single, single)
            pair = [same_bits.briefly(*each, data, seed) for each in zip(labs, layouts)]
            if any(same_bits.differing(pair[0][what], pair[1][what])[0] for what in pair[1]):
                row.add("bits")
            if script == "lab16":
                mine = given(labs[0], layouts[0], seed)
                right = given(finished, layouts[1], seed)
                if max(relative_error(x, right[key]) for key, x in mine.items()) > EXACT:
                    row.add("parity")
            dist.barrier(group)
    return found


def judge_bits(seed):
    """{script or lab16: {bug: the nets, bits or parity, that see it on any of 2 ranks}}."""
    found = {}
    ranks = on_ranks(2, judged_on_rank, seed, timeout=300)
    for script, bug in ranks[0]:
        seen = set.union(*(rank[script, bug] for rank in ranks))
        found.setdefault(script, {})[bug] = [net for net in ("parity", "bits") if net in seen]
    return found


def make(seed):
    """Write nets.json anew: {script: {bug: the nets that see it}}."""
    found, bits = {}, judge_bits(seed)
    for script, bugs in type_verdicts().items():
        seen = pitfalls_seen(seed) if script == "lab3" else {}
        for bug, problem in bugs.items():
            row = bits.get(script, {}).get(bug, [])
            if script != "lab16":
                parity = seen[bug] if script == "lab3" else proof_sees(script, bug)
                row = ["types"] * (problem is not None) + ["parity"] * parity + row
            found.setdefault(script, {})[bug] = row
            print(f"  {script:15} {bug:28} {', '.join(row)}", flush=True)
    NETS.write_text(json.dumps(found, indent=1) + "\n")
