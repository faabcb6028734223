"""labs/break_it.py: every bug of every script is caught, or refused where it would be none."""

import os
import re

import pytest
from conftest import ROOT, changed, python
from forks import run_script

CULPRIT = {  # what each bug breaks first: shards, logits, loss, then gradients, from the last of 2
    "tp.py": {
        "missing_backward_all_reduce": "model.norm.weight",
        "missing_forward_reduction": "logits",
        "all_reduce_both_ways": "model.layers.1.post_attention_layernorm.weight",
        "wrong_shard": "model.layers.0.self_attn.o_proj.weight",
        "unmasked_embedding": "logits",
        "local_softmax": "loss",
        "unsummed_qk_norm_gradient": "model.layers.7.self_attn.k_norm.weight",
        "loss_by_local_count": "loss",
        "no_op_parallelize": "model.embed_tokens.weight",
    },
    "sp_megatron.py": {
        "missing_backward_reduction": "model.norm.weight",
        "missing_forward_reduction": "logits",
        "wrong_shard": "model.layers.0.self_attn.o_proj.weight",
        "local_softmax": "loss",
        "unsummed_norm_gradient": "model.norm.weight",
        "local_position_ids": "logits",
        "shift_after_split": "loss",
        "loss_by_local_count": "loss",
        "no_op_parallelize": "model.embed_tokens.weight",
    },
    "sp_ulysses.py": {
        "missing_gradient_sum": "model.norm.weight",
        "local_position_ids": "logits",
        "shift_after_split": "loss",
        "no_op_ulysses": "logits",
        "wrong_head_order": "logits",
        "loss_by_local_count": "loss",
        "no_op_parallelize": "logits",  # all of them on every rank; its weights are anyway
    },
    "pp.py": {  # on 2 ranks of 1 layer
        "unscaled_loss": "loss",
        "mean_of_means": "loss",
        "overwritten_gradients": "model.norm.weight",
        "untied_gradient": "model.embed_tokens.weight",
        "dropped_boundary_gradient": "model.layers.0.post_attention_layernorm.weight",
        "wrong_layers": "model.layers.0.self_attn.q_proj.weight",
        "swapped_labels": "loss",
        "local_layer_types": "logits",
        "no_op_parallelize": "model.embed_tokens.weight",
    },
}
EVERY = [(script, bug) for script, bugs in CULPRIT.items() for bug in bugs]
QWEN3 = {"unsummed_qk_norm_gradient", "local_layer_types"}  # bugs of what no LLaMA has
PP = list(CULPRIT["pp.py"])
OF_DTENSOR = "local_softmax", "unsummed_qk_norm_gradient", "loss_by_local_count"
OF_DTENSOR += ("no_op_parallelize",)  # bugs of code that --dtensor runs, too
OURS = [bug for bug in CULPRIT["tp.py"] if bug not in OF_DTENSOR]
CAUGHT_TOO = [
    ["pp.py", "mean_of_means", "--batch", "6", "--microbatches", "6"],
    ["pp.py", "swapped_labels", "--batch", "2", "--microbatches", "1"],
    *([script, bug, "--length", "2"] for script, bug in EVERY if bug == "loss_by_local_count"),
    *([script, bug, "--length", "3"] for script, bug in EVERY if bug == "shift_after_split"),
    ["pp.py", "no_op_parallelize", "--mode", "all", "--bench-iters", "1"],
]
UNSEEN = "changes too little to be seen: leave out --dtype, --batch, --microbatches and --model"
NONE = [  # and what is said of it
    *((["tp.py", bug, "--dtensor"], "is a bug of our own code") for bug in OURS),
    (["pp.py", "local_layer_types", "--model", "even"], "is no bug in a llama: use --model tiny"),
    *((["pp.py", bug, "--microbatches", "1"], "needs 2 micro") for bug in PP[:3]),
    (["pp.py", "mean_of_means", "--batch", "6", "--microbatches", "2"], UNSEEN),
    (["pp.py", "swapped_labels", "--batch", "1"], "needs 2 sequences"),
    (["sp_ulysses.py", "shift_after_split", "--batch", "1"], UNSEEN),
    (["pp.py", "untied_gradient", "--model", "own_kv"], "is no bug where embeddings are not"),
]


def broken(ranks, script, bug, *options, world=2):
    small = ["--model", "tiny" if bug in QWEN3 else "even", "--length", "64"]
    return ranks(world, ["labs/break_it.py", script, bug, *small, *options])


def is_caught(run, script, bug, culprit):
    assert run.codes == [1] * len(run.codes) and f"with the bug {bug}:" in run.output, run.output
    assert run.output.strip().splitlines()[-1].endswith(f"the first: {culprit}"), run.output
    assert (run.json["script"], run.json["bug"]) == (script, bug)
    assert not run.json["correctness"]["passed"]


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("script,bug", EVERY)
def test_every_bug_is_caught_and_its_culprit_named(ranks, script, bug):
    is_caught(broken(ranks, script, bug), script, bug, CULPRIT[script][bug])


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("bug", OF_DTENSOR)
def test_a_bug_of_what_dtensor_runs_too_is_caught(ranks, bug):
    run = broken(ranks, "tp.py", bug, "--dtensor")
    is_caught(run, "tp.py", bug, CULPRIT["tp.py"][bug])


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("row", CAUGHT_TOO, ids=" ".join)
def test_a_bug_is_caught_in_other_settings(ranks, row):
    run = broken(ranks, *row)
    assert run.codes == [1, 1] and "FAIL correctness" in run.output, run.output


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("row,reason", NONE)
def test_a_bug_that_would_change_nothing_is_refused(ranks, row, reason):
    run = broken(ranks, *row)
    assert {2} <= {*run.codes} <= {2, None}, run.output  # a rank is ended when another has failed
    assert f"error: {row[1]} {reason}" in run.output
    assert ("with the bug" in run.output) == (reason == UNSEEN)


@pytest.mark.slow
@pytest.mark.parametrize("world", [3, 4])
def test_every_bug_is_caught_on_more_ranks_and_under_other_schedules(ranks, world):
    rows = [row for row in EVERY if row[0] != "pp.py"]
    rows += [["pp.py", bug, "--schedule", s] for s in ("zb", "interleaved") for bug in PP]
    for row in rows:
        stages = world * (2 if "interleaved" in row else 1)
        last = -(-8 // stages) - 1  # the first stage's last layer of 8
        culprit = CULPRIT[row[0]][row[1]].replace("layers.1.", "layers.7.")
        culprit = culprit.replace("layers.0.post", f"layers.{last}.post")
        is_caught(broken(ranks, *row, "--model", "tiny", world=world), *row[:2], culprit)


def test_the_list_is_of_the_bugs_tested():
    lines = python("labs/break_it.py", "--list").stdout.splitlines()
    scripts = [line for line in lines if line in CULPRIT]
    bugs = [line.strip() for line in lines if re.fullmatch(r"  \w+", line)]
    assert scripts == list(CULPRIT) and bugs == [bug for _, bug in EVERY]
    assert sum(re.fullmatch(r" {6}\S.*\.", line) is not None for line in lines) == len(EVERY)


TELLS = [
    ("", "no script given: give a path to tp.py, sp_megatron.py, sp_ulysses.py, pp.py; --list"),
    ("oom_search.py wrong_shard", "no script oom_search.py: give a path to tp.py"),
    ("tp.py", "no bug given of tp.py: use one of missing_backward_all_reduce, "),
    ("tp.py untied_gradient", "no bug untied_gradient of tp.py: use one of missing_backward_"),
    ("tp.py wrong_shard", "wrong_shard needs 2 ranks: start it with torchrun"),
    ("pp.py wrong_layers --mode schedule", "argument --mode: invalid choice"),
]


@pytest.mark.parametrize("words,message", TELLS)
def test_what_cannot_run_is_told_in_one_line(ranks, words, message):
    run = ranks(1, f"labs/break_it.py {words}", results=False)
    assert run.codes == [2] and f"error: {message}" in run.output.splitlines()[-1], run.output


def test_a_shell_that_slurm_left_local_rank_in_is_no_rank():
    run = python("labs/break_it.py", "tp.py", "local_softmax", env={"LOCAL_RANK": "0"})
    assert run.returncode == 2 and run.stdout == ""
    assert run.stderr.startswith("error: local_softmax needs 2 ranks"), run.stderr


def from_labs():
    os.chdir(ROOT / "labs")
    words = ["../tp.py", "wrong_shard", "--model", "tiny", "--length", "8"]
    run_script("labs/break_it.py", changed("labs/break_it.py"), words)


def test_it_runs_from_any_folder(ranks):
    codes, output = ranks.live(2, from_labs)
    assert codes == [1, 1] and output.count("with the bug wrong_shard:") == 1, output
