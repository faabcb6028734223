"""A few of the mutants of mutants.py, which itself runs all, and takes an hour for that."""

import mutants
import pytest
from conftest import python

pytestmark = pytest.mark.slow  # to make them all takes half a minute, to run a few a minute


@pytest.mark.ci
def test_correctness_catches_what_changes_the_mathematics():
    run = python("tests/mutants.py", "--every", "300", timeout=600)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    assert int(run.stdout.splitlines()[-1].split()[4]) >= 4, "enough of them"


@pytest.mark.ci
def test_there_are_mutants_of_every_script_and_the_excuses_are_of_some():
    names = [mutant.name for script in mutants.SCRIPTS for mutant in mutants.mutants(script)]
    assert len(names) == len(set(names)) >= 600
    assert set(mutants.EQUIVALENT) <= set(names), "an equivalent mutant that is none any more"


@pytest.mark.ci
@pytest.mark.parametrize(
    "operation,name",
    [
        ("a collective is dropped", "tp.py:ReduceFromTPRegion.forward: all_reduce(x, group) -> x"),
        ("or doubled", "sp_megatron.py:GatherFromSPRegion.forward: all_gather(x, group) -> all_g"),
        ("f and g are swapped", "tp.py:shard_model.f: copy_to_tp_region -> reduce_from"),
        ("an offset", "tp.py:shard_model: q0 * d -> q0 // d"),
        ("a gradient is not summed", "tp.py:sum_gradients: dist.all_reduce(parameter.grad"),
        ("an action of a schedule", 'pp.py:afab: yield Action("B", rank, m) -> pass'),
    ],
)  # fmt: skip
def test_the_operators(operation, name):
    script = name.partition(":")[0]
    assert any(mutant.name.startswith(name) for mutant in mutants.mutants(script)), operation
