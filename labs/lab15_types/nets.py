"""Which nets see which bug: types, parity (the float64 proof on 2 ranks), bits (lab 16's).

scripts.py has the scripts and their bugs as programs of types. For bits a bug is written into
lab 16's lesson, if that has a place for it: in tensor parallelism, or in data parallelism's
sums of gradients, which stand for Ulysses'. Bits asks that two ranks give what one gives. Lab
16's own bugs, of order and of random numbers, are compared with one device, too, as parity does
it: in float64, from given weights, without dropout.
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
JUDGED = "types", "parity", "bits"
EXACT = 1e-10
SHAPES = {"tp.py": [(1, 2)], "sp_ulysses.py": [(2, 1)], "lab16": [(1, 2), (2, 1)]}  # dp, tp
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
    "lab16": {change.__name__: change for change in same_bits.SURE},
}
BITS["sp_ulysses.py"]["no_op_parallelize"] = BITS["tp.py"]["no_op_parallelize"]


def type_verdicts():
    """{script, lab3 or lab16: {bug: what the checker says, or None}}."""
    found = {}
    for script, bugs in break_it.BUGS.items():
        found[f"{script}.py"] = {bug: scripts.script_says(script, bug) for bug in bugs}
    found["lab3"] = {name: scripts.pitfall_says(name) for name in lab3.CHECKS}
    # orders of sums and random numbers: a type says nothing of either
    return found | {"lab16": dict.fromkeys(sorted(BITS["lab16"]))}


def proof_sees(script, bug):
    """Whether the float64 proof of a script fails with a bug, on 2 ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2"]
    command += ["labs/break_it.py", script, bug, "--length", "64"]
    how = {"cwd": LABS.parent, "env": os.environ | {"OMP_NUM_THREADS": "1"}, "text": True}
    run = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, **how)
    seen = "FAIL correctness" in run.stdout
    print(f"  {script:15} {bug:28} {'seen' if seen else 'not seen'}", flush=True)
    return seen


def parity_sees(seed):
    """The (script, bug, "parity") of the scripts' bugs, by their proofs, and of lab 3's
    pitfalls: a comparison of gradients with one device shows it, or it raises."""
    found = [(f"{script}.py", bug) for script, bugs in break_it.BUGS.items() for bug in bugs]
    found = [names for names in found if proof_sees(*names)]
    names = [name for name in lab3.CHECKS if name not in WATCHING]
    lab = load(LABS / "lab3_pitfalls" / "lesson.py")
    ranks = on_ranks(2, try_all, lab, names, seed, timeout=120)
    for name in names:
        worst = max((rank[name]["wrong"] for rank in ranks if "wrong" in rank[name]), key=size)
        found += [("lab3", name)] * (worst.get("gradient", size(worst)) > WRONG)
    return {(*names, "parity") for names in found}


# ---- Bits ----------------------------------------------------------------------------------------


def changed(bug, dp, tp):
    """Lab 16's lesson as a new module, with a bug of BITS."""
    if callable(bug):
        lab = load(finished.__file__)
        bug(lab, dp, tp)
        return lab
    text, lab = Path(finished.__file__).read_text(), ModuleType("lesson")
    for ours, theirs in edits_of(bug.split(" && ")):
        assert ours in text, ours
        text = text.replace(ours, theirs)
    exec(compile(text, finished.__file__, "exec"), vars(lab))
    return lab


def given(lab, layout, seed):
    """{key: gradient} of a step in float64 from given weights, without dropout."""
    lab.initial, lab.dropout = finished.initial, lambda x, *_, **__: x
    weights = lab.new_state(layout, seed, torch.float64)["weights"]
    return lab.gradients(data_of(seed, lab.B), weights, layout, 0, seed)[1]


def seen_on_rank(group, seed):
    """{(script, bug, net)} of this rank: bits, and for lab 16's own bugs parity."""
    groups, found, data = same_bits.all_groups(group, SHAPES["lab16"]), set(), data_of(seed)
    single = [dist.new_group([rank]) for rank in range(group.size())][group.rank()]
    cases = [(script, *bug) for script, bugs in BITS.items() for bug in bugs.items()]
    for script, name, bug in cases:
        for dp, tp in SHAPES[script]:
            labs = changed(bug, dp, tp), changed(bug, 1, 1)
            layouts = labs[0].Layout(*groups[dp, tp]), labs[1].Layout(single, single)
            mine, right = (same_bits.briefly(*each, data, seed) for each in zip(labs, layouts))
            if any(same_bits.differing(mine[what], right[what])[0] for what in right):
                found.add((script, name, "bits"))
            if script == "lab16":
                mine = given(labs[0], layouts[0], seed)
                right = given(finished, layouts[1], seed)
                if max(relative_error(x, right[key]) for key, x in mine.items()) > EXACT:
                    found.add((script, name, "parity"))
            dist.barrier(group)
    return found


def bits_see(seed):
    """{(script, bug, net)} of seen_on_rank(), on any of 2 ranks."""
    return set.union(*on_ranks(2, seen_on_rank, seed, timeout=300))


def make(seed):
    """Write nets.json anew: {script: {bug: the nets that see it}}."""
    seen, found = parity_sees(seed) | bits_see(seed), {}
    for script, bugs in type_verdicts().items():
        seen |= {(script, bug, "types") for bug, problem in bugs.items() if problem}
        rows = ((bug, [net for net in JUDGED if (script, bug, net) in seen]) for bug in bugs)
        found[script] = {bug: ", ".join(nets) for bug, nets in rows}
    NETS.write_text(json.dumps(found, indent=1) + "\n")
