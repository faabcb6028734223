"""README.md and labs/README.md: what they name exists, and their commands are ones that the scripts take."""

import re
import shlex

import pytest
from conftest import ROOT, python

DOCS = [ROOT / "README.md", ROOT / "labs" / "README.md"]
STARTS = ("torchrun", "python", "python3", "make", "diff")
SCRIPT = re.compile(r"(?:labs/|tests/)?\w+\.py")


def commands(path):
    """Every command line in a code block or between backquotes, as words."""
    text = path.read_text()
    blocks = [
        line for block in re.findall(r"^```\n(.*?)^```", text, re.M | re.S) for line in block.splitlines()
    ]
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"^```\n.*?^```", "", text, flags=re.M | re.S))
    found = []
    for line in [*blocks, *inline]:
        words = [w.removeprefix(".venv/bin/") for w in line.split("#")[0].split()]
        while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):  # RANK=0 and the like
            words.pop(0)
        if words and words[0] in STARTS and len(words) > 1:
            found.append(words)
    return found


ALL = {" ".join(words): words for path in DOCS for words in commands(path)}


def script_of(words):
    return next((w for w in words if SCRIPT.fullmatch(w) and (ROOT / w).exists()), None)


def test_there_are_commands():
    assert len(ALL) > 30
    assert "make demo" in ALL and "python labs/grade.py start lab1" in ALL


@pytest.mark.parametrize("line", ALL)
def test_what_a_command_names_exists(line):
    words = ALL[line]
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.M)
        return
    for word in words[1:]:
        if SCRIPT.fullmatch(word) and word != "SCRIPT.py" and "my_labs" not in line:
            assert (ROOT / word).exists(), word
    script = script_of(words)
    if script is None:
        assert {"SCRIPT.py", "-m"} & set(words) or words[0] in ("diff", "python3"), line
        return
    source = (ROOT / script).read_text()
    for option in re.findall(r"--[a-z][a-z-]*", " ".join(words[words.index(script) :])):
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


QUICK = [
    line
    for line in ALL
    if line.startswith(
        ("python sp_layout_sim.py", "python pp.py --mode schedule", "python labs/grade.py list")
    )
]


@pytest.mark.parametrize("line", QUICK)
def test_quick_commands_run_as_written(line, tmp_path):
    words = [str(tmp_path / w) if w.endswith(".png") else w for w in shlex.split(line)[1:]]
    run = python(*words)
    assert run.returncode == (1 if "--break" in words and "list" not in words else 0), run.stderr
