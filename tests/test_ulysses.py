"""sp_ulysses.py on 2 ranks: it holds, its traffic is as the formula says, its bugs are caught."""

import pytest

SCRIPT = "sp_ulysses.py"
HOLDS = {
    "float32": [SCRIPT],
    "benchmark": [SCRIPT, "--mode", "benchmark", "--bench-iters", "1"],
    "learning": [SCRIPT, "--mode", "learning", "--length", "128"],
    "float64": [SCRIPT, "--dtype", "float64", "--length", "37", "--batch", "3", "--attn", "eager"],
}
CULPRIT = {  # what each bug breaks first, in the order of computation
    "no_op_ulysses": "logits",
    "wrong_head_order": "logits",
    "missing_gradient_sum": "model.norm.weight",
    "no_op_parallelize": "logits",
}
COMMANDS = [*HOLDS.values(), *([SCRIPT, "--inject-bug", bug] for bug in CULPRIT)]


@pytest.mark.parametrize("case", HOLDS)
def test_ulysses_holds(outcomes, case):
    outcome = outcomes(2, COMMANDS, HOLDS[case])
    assert outcome["exit"] == 0, outcome["output"]
    if case == "benchmark":
        rows = outcome["json"]["benchmark"]["traffic"]
        layers = [row for row in rows if row["op"] == "all_to_all"]
        assert [row["count"] for row in layers] == [4 * 8, 2 * 4 * 8]  # the backward runs each layer again
        assert all(row["bytes"] == row["expected_bytes"] for row in rows)


@pytest.mark.parametrize("bug", CULPRIT)
def test_ulysses_bugs_are_caught(outcomes, bug):
    outcome = outcomes(2, COMMANDS, [SCRIPT, "--inject-bug", bug])
    assert outcome["exit"] == 1, outcome["output"]
    assert outcome["output"].strip().splitlines()[-1].endswith(f"the first: {CULPRIT[bug]}")
