"""The documents: what they name exists, their commands do what they say, they stay small."""

import json
import os
import re
import shutil
import subprocess
import sys

import docs
import pytest
from conftest import ENVIRONMENT, ROOT

TOP = ("README.md", "CONTRIBUTING.md", "labs/README.md", "AGENTS.md", "results/README.md")
TOP += ("labs/course.md", "results/gpus.md")
NOTES = sorted((ROOT / "labs").glob("*/*.md"))
DOCS = [ROOT / name for name in TOP] + NOTES
EACH_DOC = pytest.mark.parametrize("path", DOCS, ids=lambda path: str(path.relative_to(ROOT)))
STARTS = ("torchrun", "python", "python3", "make", "diff")
SCRIPT = re.compile(r"(?:labs/|labs/\w+/|my_labs/|tests/|results/)?\w+\.py")
BREAKS = re.compile(r"labs/break_it\.py (\w+\.py) (\w+)")


def scripts(path):
    """What a reader may paste: each code block's commands, and each command between backquotes."""
    text = path.read_text().replace("\\\n", " ")  # a line that goes on in the next
    blocks = [block.splitlines() for block in re.findall(r"^```\n(.*?)^```", text, re.M | re.S)]
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"^```\n.*?^```", "", text, flags=re.M | re.S))
    blocks += [[line] for line in inline]
    found = [[line for line in block if words(line)] for block in blocks]
    return [block for block in found if block]


def words(line):
    """A command line's words; [] where the line is none."""
    found = [w.removeprefix(".venv/bin/") for w in line.split("#")[0].split()]
    while found and re.fullmatch(r"[A-Z_]+=\S*", found[0]):  # RANK=0 and the like
        found.pop(0)
    return found if len(found) > 1 and found[0] in STARTS else []


SCRIPTS = [tuple(lines) for path in DOCS for lines in scripts(path)]
ALL = {" ".join(words(line)): words(line) for lines in SCRIPTS for line in lines}


@pytest.mark.parametrize("line", ALL)
def test_what_a_command_names_exists(line):
    command = ALL[line]
    if command[0] == "make":
        targets = re.findall(r"^([a-z -]+):", (ROOT / "Makefile").read_text(), re.M)
        assert command[1] in " ".join(targets).split()
        return
    named = [w for w in command[1:] if SCRIPT.fullmatch(w) and w != "SCRIPT.py"]
    assert named or {"-m", "-c"} & set(command), line
    files = [re.sub(r"^my_(labs/\w+)\.py", r"\1/lesson.py", name) for name in named]
    files = ["tp.py" if name == "my_tp.py" else name for name in files]  # a reader's own copy
    source = "".join((ROOT / name).read_text() for name in files)
    if any("labs/" in name for name in named):  # options of all labs, and of one
        source += "".join(file.read_text() for file in (ROOT / "labs").glob("**/*.py"))
    launched = command[command.index(named[0]) :] if named else []
    for option in re.findall(r"--[a-z][a-z-]*", " ".join(launched)):
        assert f'"{option}"' in source, f"{named} have no {option}"
    broken = BREAKS.search(line)
    assert not broken or f"def {broken[2]}(" in source, f"no bug {broken[2]}"


def anchors(path):
    """What GitHub calls a file's headings."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(), re.M)
    return [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]


@EACH_DOC
def test_links_resolve(path):
    for target in re.findall(r"\]\(([^)]+)\)", path.read_text()):
        file, _, anchor = target.partition("#")
        if not file.startswith("http"):
            there = path.parent / file if file else path
            assert there.exists(), target
            explorer = there.suffix == ".html"  # test_explorer.py opens its links
            assert not anchor or explorer or anchor in anchors(there), target


@EACH_DOC
def test_blocks_fit_a_page(path):
    """At 1280 px no more than 90 characters fit; test_site.py measures it in a browser."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", path.read_text(), re.M | re.S)
    assert [line for block in blocks for line in block.splitlines() if len(line) > 90] == []


@EACH_DOC
def test_options_and_bugs_named_exist(path):
    """Every --option named in the text is one of some script, of torchrun, pip or Megatron."""
    folders = ".", "labs", "labs/*", "tests", "results"
    files = [file for folder in folders for file in ROOT.glob(f"{folder}/*.py")]
    sources, text = "".join(file.read_text() for file in files), path.read_text()
    others = {"--nproc", "--nproc_per_node", "--nnodes", "--rdzv-backend", "--rdzv-endpoint"}
    others |= {"--no-deps", "--torch-backend", "--sequence-parallel", "--help", "--check"}
    others |= {"--no-build-isolation"}
    for option in set(re.findall(r"(?<![\w-])--[a-z][a-z_-]+", text)) - others:
        assert f'"{option}"' in sources, option
    bugs = (ROOT / "labs" / "bugs.py").read_text()
    for bug in re.findall(r"the bug `(\w+)`", text):
        assert f"def {bug}(" in bugs, bug


def test_both_orders_of_reading_are_one():
    """README's table of what to read, and the one of labs/README: the same steps."""

    def steps(path):  # the files of each
        table = re.search(r"^\|.* read \|.* build \|.*\n((?:\|.*\n)*)", path.read_text(), re.M)[1]
        return [re.findall(r"\w+\.py|lab\w+/lesson.py", row) for row in table.splitlines()]

    assert steps(DOCS[0]) == steps(DOCS[2])
    names = [file.parent.name for file in ROOT.glob("labs/*/lesson.py")]
    names.sort(key=lambda name: (int(re.match(r"lab(\d+)", name)[1]), name))
    labs = [f"{name}/lesson.py" for name in names]
    assert labs == [file for row in steps(DOCS[0]) for file in row if file.startswith("lab")]
    row = r"\]\((lab\w+/lesson\.py)\).*\| \d+ \| \d+ s \| [\d.]+ h \|$"
    assert re.findall(row, DOCS[2].read_text(), re.M) == labs


def test_numbers_in_documents_are_current(tmp_path, monkeypatch):
    assert docs.drift() == [], "run make docs"
    for path in docs.documents():
        copy = tmp_path / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(path.read_text())
    for lesson in ROOT.glob("labs/*/lesson.py"):
        (tmp_path / lesson.relative_to(ROOT)).write_text(lesson.read_text())
    monkeypatch.setattr(docs, "ROOT", tmp_path)
    lesson = tmp_path / "labs/lab2_megatron_layers/lesson.py"
    more = "# exercise: more\n" + "x = 1\n" * 20 + "# end exercise\n"
    lesson.write_text(lesson.read_text() + more)
    pages = ["labs/lab2_megatron_layers/README.md", "labs/README.md", "labs/course.md"]
    assert docs.drift(fix=True) == pages and docs.drift() == []
    assert "The 19 labs take 81 hours" in (tmp_path / "labs/course.md").read_text()


ELSEWHERE = {  # commands that are run as they stand, but not by the test below
    r"make |python3 -m venv": ".ci/run",
    r"torchrun --nnodes": "test_nodes.py and test_lab_runs.py, on one machine",
    r"python labs/lab\d+_\w+/lesson\.py$": "test_lab_runs.py, in one process",
    r"python my_labs/lab1_collectives\.py": "test_labs.py, with a bug",
    r"python tests/copies\.py": "test_user.py, on a copy",
    r"--where my_tp\.py": "test_walk.py, with a change",
    r"python tests/mutants\.py": "make prove",
    r"--model DIR": "test_referee.py, with a folder and plans of its own",
    r"\$GGUF": "test_real_weights.py",
    r"results/make\.py( cpu| gpu| limits)?$": "test_results.py, on a tiny model: they take hours",
    r"torchrun .*--model llama-3\.[12]-": "nowhere: it takes GPUs",
    r"--how predicted .*--at|--plan --nodes": "test_predictions_for_gpus, below",
}
QUICK = re.compile(r"python (sp_l|labs/four_l|labs/schedules\.py|.*--list)|diff ")  # seconds


def here(lines):
    """Those of a script's lines that are run here."""
    return [
        line for line in lines if not any(re.search(e, " ".join(words(line))) for e in ELSEWHERE)
    ]


RUN = {tuple(map(str, map(words, here(lines)))): here(lines) for lines in SCRIPTS if here(lines)}


def test_what_is_run_elsewhere_is_a_command():
    for pattern, where in ELSEWHERE.items():
        assert any(re.search(pattern, line) for line in ALL), f"{pattern}, of {where}, is none"


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """The project as a reader has it; its .venv/bin has this Python, and torchrun for it."""
    folder = tmp_path_factory.mktemp("clone") / "clone"
    leave = shutil.ignore_patterns(".*", "__pycache__", "my_labs", "*.egg-info")
    shutil.copytree(ROOT, folder, ignore=leave)
    tools = folder / ".venv" / "bin"
    tools.mkdir(parents=True)
    for name, module in {"python": "", "torchrun": "-m torch.distributed.run"}.items():
        (tools / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {module} "$@"\n')
        (tools / name).chmod(0o755)
    return folder


def as_run(lines):
    marks = [] if all(map(QUICK.match, lines)) else pytest.mark.slow
    return pytest.param(lines, marks=marks, id=lines[0])


@pytest.mark.parametrize("lines", [*map(as_run, RUN.values())])
def test_commands_run_as_written(lines, clone):
    """Line by line, by a shell. A bug, a difference or an empty exercise exits with 1."""
    shutil.rmtree(clone / "my_labs", ignore_errors=True)
    environment = ENVIRONMENT | {"PATH": f"{clone}/.venv/bin{os.pathsep}{os.environ['PATH']}"}
    how = {"shell": True, "cwd": clone, "env": environment, "timeout": 900}
    for line in lines:
        run = subprocess.run(line, capture_output=True, text=True, **how)
        fails = BREAKS.search(line) or re.search(r"--break (?!list)|grade\.py lab1", line)
        expected = 1 if fails or line.startswith("diff ") else 0
        assert run.returncode == expected, f"{line}\n{run.stdout}\n{run.stderr}"
        assert not fails or "FAIL" in run.stdout, f"{line}: exits with 1, and not by a verdict"


# ---- Figures -------------------------------------------------------------------------------------


def gpu_predictions():
    """(command, what it says) of the rows of results/gpus.md."""
    text = (ROOT / "results" / "gpus.md").read_text()
    return re.findall(r"^\|.*?\| `(python .*?)` \| ([\d.]+ \w+) \| \|$", text, re.M)


@pytest.mark.slow
@pytest.mark.parametrize("command,says", gpu_predictions())
def test_predictions_for_gpus(command, says, tmp_path):
    """GiB of the worst rank; seconds of a step without what comes once a step."""
    file = tmp_path / "result.json"
    words = [sys.executable, *command.split()[1:], "--json", file]
    subprocess.run(words, cwd=ROOT, env=ENVIRONMENT, capture_output=True, check=True)
    found = json.loads(file.read_text())
    if "plan" in found:
        [row] = [row for row in found["plan"] if row["strategy"] == "sp"]
        once = row["parts"]["optimizer"] + row["parts"]["other"]
        assert says == f"{row['seconds'] - once:.2f} s"
    else:
        peaks = found["results"][0]["at"][0]["peak_memory_bytes"]
        assert says == f"{max(peaks) / 2**30:.2f} GiB"


# ---- Courses -------------------------------------------------------------------------------------


def test_courses_add_up():
    """No plan of labs/course.md has a lab before those it needs; the last has all."""
    text = (ROOT / "labs" / "course.md").read_text()
    row = r"\[(lab \w+)\]\(\S+ \| ([\w, ]*?) ?\|.*? [\d.]+ h \|$"
    labs = re.findall(row, (ROOT / "labs" / "README.md").read_text(), re.M)
    needs = {lab: {f"lab {one}" for one in before.split(", ") if one} for lab, before in labs}
    plans = re.findall(r"^\*\*.*, [\d.]+ hours\*\*.*\n\n((?:\|.*\n)+)", text, re.M)
    assert len(plans) == 3
    for table in plans:
        done = []
        for row in table.splitlines()[2:]:
            done += (parts := re.findall(r"lab \w+|notebook \d|\w+\.py", row))
            assert all(needs.get(part, set()) <= set(done) for part in parts), row
        assert len(done) == len(set(done))
    assert needs.keys() <= set(done), "the last plan has all"
