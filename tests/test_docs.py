"""README.md and labs/README.md: what they name exists, and their commands are ones that the scripts take."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ENVIRONMENT, ROOT

DOCS = [ROOT / "README.md", ROOT / "labs" / "README.md"]
STARTS = ("torchrun", "python", "python3", "make", "diff")
SCRIPT = re.compile(r"(?:labs/|tests/)?\w+\.py")


def scripts(path):
    """What a reader may paste: each code block's command lines, and each command between backquotes."""
    text = path.read_text()
    blocks = [block.splitlines() for block in re.findall(r"^```\n(.*?)^```", text, re.M | re.S)]
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"^```\n.*?^```", "", text, flags=re.M | re.S))
    found = [[line for line in block if words(line)] for block in [*blocks, *([line] for line in inline)]]
    return [block for block in found if block]


def words(line):
    """A command line's words; [] where the line is none."""
    found = [w.removeprefix(".venv/bin/") for w in line.split("#")[0].split()]
    while found and re.fullmatch(r"[A-Z_]+=\S*", found[0]):  # RANK=0 and the like
        found.pop(0)
    return found if len(found) > 1 and found[0] in STARTS else []


SCRIPTS = [tuple(lines) for path in DOCS for lines in scripts(path)]
ALL = {" ".join(words(line)): words(line) for lines in SCRIPTS for line in lines}


def script_of(command):
    return next((w for w in command if SCRIPT.fullmatch(w) and (ROOT / w).exists()), None)


def test_there_are_commands():
    assert len(ALL) > 30
    assert "make demo" in ALL and "python labs/grade.py start lab1" in ALL


@pytest.mark.parametrize("line", ALL)
def test_what_a_command_names_exists(line):
    command = ALL[line]
    if command[0] == "make":
        assert re.search(rf"^{command[1]}:", (ROOT / "Makefile").read_text(), re.M)
        return
    for word in command[1:]:
        if SCRIPT.fullmatch(word) and word != "SCRIPT.py" and "my_labs" not in line:
            assert (ROOT / word).exists(), word
    script = script_of(command)
    if script is None:
        assert {"SCRIPT.py", "-m"} & set(command) or command[0] in ("diff", "python3"), line
        return
    source = (ROOT / script).read_text()
    for option in re.findall(r"--[a-z][a-z-]*", " ".join(command[command.index(script) :])):
        assert f'"{option}"' in source, f"{script} has no {option}"


@pytest.mark.parametrize("path", DOCS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_resolve(path):
    for target in re.findall(r"\]\(([^)]+)\)", path.read_text()):
        file, _, anchor = target.partition("#")
        if not file.startswith("http"):
            assert (path.parent / file).exists(), target


@pytest.mark.parametrize("path", DOCS, ids=lambda path: str(path.relative_to(ROOT)))
def test_options_in_tables_exist(path):
    """Every --option named in the text is one of some script, of torchrun, pip or Megatron."""
    sources = "".join(
        file.read_text() for file in [*ROOT.glob("*.py"), *ROOT.glob("labs/*.py"), *ROOT.glob("tests/*.py")]
    )
    others = {
        "--nproc",
        "--nnodes",
        "--rdzv-backend",
        "--rdzv-endpoint",
        "--rdzv-id",
        "--no-deps",
        "--sequence-parallel",
    }
    for option in set(re.findall(r"(?<![\w-])--[a-z][a-z_-]+", path.read_text())) - others:
        assert f'"{option}"' in sources or option == "--nproc_per_node", option


ELSEWHERE = {  # commands that are run as they stand, but not by the test below
    r"make |python3 -m venv|-m pytest": ".ci/run",
    r"torchrun --nnodes": "test_nodes.py and test_lab8.py, on one machine",
    r"python labs/lab\d_\w+\.py$": "test_lab1.py to test_lab8.py",
    r"python tests/mutants\.py$": "test_mutants.py: a sample of them",
    r"\$GGUF": "test_real_weights.py",
    r"SCRIPT\.py": "a pattern, of which the others are examples",
}
QUICK = re.compile(r"python (sp_layout_sim\.py|pp\.py --mode schedule)|diff ")  # a second each


def here(lines):
    """Those of a script's lines that are run here."""
    return [line for line in lines if not any(re.search(e, " ".join(words(line))) for e in ELSEWHERE)]


RUN = {tuple(map(str, map(words, here(lines)))): here(lines) for lines in SCRIPTS if here(lines)}.values()


def test_what_is_run_elsewhere_is_a_command():
    for pattern, where in ELSEWHERE.items():
        assert any(re.search(pattern, line) for line in ALL), f"{pattern}, of {where}, is none any more"


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """The project as a reader has it, with this Python's environment as its .venv."""
    folder = tmp_path_factory.mktemp("clone") / "clone"
    leave = shutil.ignore_patterns(".*", "__pycache__", "my_labs", "*.egg-info")
    shutil.copytree(ROOT, folder, ignore=leave)
    Path(folder, ".venv").symlink_to(sys.prefix)
    return folder


@pytest.mark.parametrize(
    "lines",
    [pytest.param(r, marks=[] if all(map(QUICK.match, r)) else pytest.mark.slow, id=r[0]) for r in RUN],
)
def test_commands_run_as_written(lines, clone):
    """Line by line, by a shell. What shows a bug, a difference or an empty exercise ends with 1."""
    shutil.rmtree(clone / "my_labs", ignore_errors=True)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    how = {"shell": True, "cwd": clone, "env": ENVIRONMENT | {"PATH": path}, "timeout": 900}
    for line in lines:
        run = subprocess.run(line, capture_output=True, text=True, **how)
        fails = re.search(r"--(break|inject-bug) (?!list)|grade\.py lab1", line)
        expected = 1 if fails or line.startswith("diff ") else 0
        assert run.returncode == expected, f"{line}\n{run.stdout}\n{run.stderr}"
        assert not fails or "FAIL" in run.stdout, f"{line}: ended with 1, and not by a verdict"
