"""What a user meets: the first command, bad input, copies that drift, files that grow."""

import os
import re
import subprocess

import pytest
from conftest import ROOT, changed, torchrun
from copies import drift, split_tail
from forks import STRATEGIES, run_script

DIFF = 446  # lines of `diff tp.py sp_megatron.py`: 72 are --dtensor, 33 say what is copied
TAIL = 441  # lines of sections 5 and 6


@pytest.mark.slow  # CI runs it as `make demo`
def test_the_demo_passes():
    run = torchrun(2, "sp_megatron.py", "--mode", "correctness")
    assert run.returncode == 0, run.stderr
    verdict = run.stdout.strip().splitlines()[-1]
    assert verdict.startswith("PASS correctness: logits, loss and all gradients")
    assert run.stderr == "", "nothing but the report is printed"


BAD = [
    ("tp.py --length 1", "--length 1: use 2 or more"),
    ("tp.py --batch -1", "--batch -1: use 1 or more"),
    ("tp.py --length 9x", "argument --length: invalid int value: '9x'"),
    ("tp.py --backend nccl", "--backend nccl needs"),
    (
        "tp.py --backend fake",
        "--backend fake computes no real values; use it with --mode benchmark",
    ),
    *((f"tp.py --model {name}", f"error: cannot use {name}: ") for name in (
        "./nowhere", "nowhere", "a/b/c", "nobody/nothing", "nowhere.gguf", "pyproject.toml",
        "tests",
    )),
    ("sp_ulysses.py --attn flash", "--attn flash needs --dtype bfloat16"),
    ("sp_ulysses.py --shard-weights", "--shard-weights needs another rank"),
    ("tp.py --json /nowhere/at/all.json", "argument --json: can't open '/nowhere/at/all.json'"),
    ("sp_megatron.py --typo", "unrecognized arguments: --typo"),
    ("pp.py --schedule gpipe", "argument --schedule: invalid choice: 'gpipe'"),
    ("pp.py --batch 2 --microbatches 4", "--batch 2 cannot be cut into 4 microbatches; use --m"),
    ("pp.py --virtual-stages 2", "--virtual-stages 2 needs --schedule interleaved"),
    ("labs/torch_pipeline.py --schedule zb", "for PyTorch's engine use --schedule afab or"),
]  # fmt: skip


@pytest.mark.parametrize("command,message", BAD)
def test_bad_input_is_one_line(ranks, command, message):
    """Sections 5 and 6 are one text: what is refused there is refused by all four scripts."""
    run = ranks(1, command, results="--json" not in command)
    said = run.output.splitlines()[-1]
    assert run.codes == [2] and "error: " in said and message in said, run.output
    assert "Traceback" not in run.output


LAUNCHERS = [
    {"SLURM_PROCID": "1", "SLURM_NTASKS": "2"},
    {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"},
]


@pytest.mark.parametrize("given", LAUNCHERS)
def test_srun_and_mpirun_are_told_to_start_torchrun(ranks, given):
    codes, output = ranks.live(1, launched_so, "tp.py", given, "--length", "16")
    assert codes == [2] and output.count("\n") == 1, output
    assert output.startswith("error: 2 processes") and "torchrun" in output, output


def test_torchrun_may_run_under_srun(ranks):
    """Which starts one on each node; the ranks have Slurm's variables and torchrun's."""
    slurm = "import os\nos.environ['SLURM_NTASKS'] = '2'\n"
    top = "# ---- 1. Imports"
    run = ranks(2, "tp.py --length 8", {top: slurm + top})
    assert run.codes == [0, 0], run.output


def test_what_another_rank_prints_appears(ranks):
    where = "    dtype = args.dtype\n"
    run = ranks(
        2, "tp.py --length 8", {where: where + "    print(f'rank {group.rank()}\\n', end='')\n"}
    )
    assert {"rank 0", "rank 1"} <= set(run.output.splitlines()), run.output
    assert run.output.count("PASS") == 1


@pytest.mark.parametrize("given", [{"RANK": "0"}, {"LOCAL_RANK": "0"}])
def test_one_process_needs_no_launcher(ranks, given):
    codes, output = ranks.live(1, launched_so, "tp.py", given, "--length", "8")
    assert codes == [0] and "1 rank (gloo, cpu)" in output, output


def launched_so(script, given, *options):
    torchruns = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT"
    for name in (*torchruns.split(), "TORCHELASTIC_USE_AGENT_STORE"):
        del os.environ[name]
    os.environ |= given
    run_script(script, changed(script), options)


@pytest.mark.ci
def test_under_torchrun_each_rank_says_why_in_a_line():
    run = torchrun(4, "tp.py", "--model", "smollm2-135m")
    assert run.returncode != 0  # 1: torchrun has a status of its own
    ours = {line for line in run.stderr.splitlines() if line.startswith("error: ")}
    why = "9 heads with 3 KV heads cannot be split over 4 ranks; "
    assert ours == {f"error: {why}use one of 1, 2, 3, 6, 9 ranks"}
    assert re.search(r"exitcode\s*: 2", run.stderr) and "[rank" not in run.stderr


def test_one_of_the_fake_ranks_measures_alone(ranks):
    fake = ["--backend", "fake", "--mode", "benchmark"]
    given = {"RANK": "3", "WORLD_SIZE": "4"}
    codes, output = ranks.live(1, launched_so, "sp_megatron.py", given, *fake)
    assert codes == [0] and "4 ranks (fake, cpu)" in output and "PASS benchmark" in output, output


def test_drift_is_found_and_fixed(tmp_path):
    for script in STRATEGIES:
        (tmp_path / script).write_text((ROOT / script).read_text())
    copy = tmp_path / "sp_megatron.py"
    right = copy.read_text()
    copy.write_text(right.replace("a rank's share of n things", "the share of n things"))
    assert drift(tmp_path) == ["sp_megatron.py: shard_range differs from its original in tp.py"]
    drift(tmp_path, fix=True)
    assert drift(tmp_path) == [] and copy.read_text() == right
    changed_tail = right.replace("    return values\n", "    return []\n")
    copy.write_text(changed_tail.replace("# ---- 5. Proof:", "# ---- 5. Proofs:"))
    assert drift(tmp_path) == ["sp_megatron.py: its last sections differ from those of tp.py"]
    drift(tmp_path, fix=True)
    assert drift(tmp_path) == [] and copy.read_text() == right
    line = "    base, extra = divmod(n, world)\n"
    copy.write_text(right.replace(line, line * 3))
    ulysses = tmp_path / "sp_ulysses.py"  # it copies from the copy, whose lines move when mended
    text = ulysses.read_text()
    ulysses.write_text(text.replace("kinds = config.layer_types", "kinds = []"))
    drift(tmp_path, fix=True)
    assert drift(tmp_path) == [] and copy.read_text() == right
    copy.write_text(right.replace("# Copied from tp.py\ndef grad_norm", "def grad_norm"))
    assert "sp_megatron.py: grad_norm is the same in tp.py, and unmarked" in drift(tmp_path)
    copy.write_text(right)
    original = (ROOT / "tp.py").read_text()
    marked = original.replace("def grad_norm(", "# Copied from tp.py\ndef grad_norm(")
    (tmp_path / "tp.py").write_text(marked)
    assert drift(tmp_path) == ["tp.py: grad_norm is said to be a copy of itself"]


def test_a_diff_of_the_scripts_is_about_sequence_parallelism():
    diff = ["diff", "tp.py", "sp_megatron.py"]
    lines = subprocess.run(diff, cwd=ROOT, capture_output=True, text=True).stdout.splitlines()
    assert len(lines) <= DIFF
    _, tail, original = split_tail((ROOT / "sp_megatron.py").read_text())
    assert original == "tp.py" and (ROOT / "tp.py").read_text().endswith(tail)
    assert len(tail.splitlines()) <= TAIL


def test_totals_are_those_of_contributing():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    rows = re.findall(r"^\| (.+?) \| (`.+`) \| ([\d,]+) \| ([\d,]+) \|$", text, re.M)
    assert len(rows) == 8
    for what, files, now, goal in rows:
        found = {file for name in re.findall("`(.+?)`", files) for file in ROOT.glob(name)}
        lines = sum(len(file.read_text().splitlines()) for file in found if file.is_file())
        now, goal = (int(number.replace(",", "")) for number in (now, goal))
        assert goal <= now and lines <= 1.02 * now, f"{what}: {lines} lines"
