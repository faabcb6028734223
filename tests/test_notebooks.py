"""The notebooks: what is committed is whole, and all of it runs anew, in a fresh kernel."""

import re

import pytest
from conftest import ROOT

pytestmark = pytest.mark.slow

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
HANGS = 600  # seconds for a cell: a notebook takes two minutes on a quiet machine
# A path that nobody else has
OF_A_MACHINE = re.compile(r"/(home|root|tmp|work|Users|private|var)/|[A-Z]:\\\\")


def read(path):
    """The notebook, checked against the format's own schema."""
    import nbformat  # of the extra `notebooks`

    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    return notebook


def outputs(notebook):
    """All outputs of a notebook's code cells."""
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return [output for cell in code for output in cell.outputs]


def pictures(notebook):
    """How many PNGs each cell shows."""
    return [
        sum("image/png" in output.get("data", {}) for output in cell.get("outputs", []))
        for cell in notebook.cells
    ]


def problems(notebook):
    """What no reader should meet: errors, warnings, a machine's paths, cells run out of order."""
    found = []
    for output in outputs(notebook):
        text = output.get("text", "") + str(output.get("data", {}).get("text/plain", ""))
        if output.output_type == "error":
            found.append(f"error: {output.evalue}")
        if output.get("name") == "stderr":
            found.append(f"on stderr: {text}")
        paths = [line for line in text.splitlines() if OF_A_MACHINE.search(line)]
        found += [f"a path of a machine: {line}" for line in paths]
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    if counts != list(range(1, len(counts) + 1)):
        found.append(f"not run once from top to bottom: {counts}")
    return found


def test_all_seven_are_there():
    names = ["1_collectives", "2_tensor_parallel", "3_sequence_parallel", "4_ulysses"]
    names += ["5_pipeline", "6_memory_and_oom", "7_break_it"]
    assert [path.stem for path in NOTEBOOKS] == names


@pytest.mark.ci
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_committed(path):
    """Outputs and pictures are there, and neither they nor the source belong to one machine."""
    notebook = read(path)
    assert problems(notebook) == []
    assert sum(pictures(notebook)) >= 3
    assert not [cell.source for cell in notebook.cells if OF_A_MACHINE.search(cell.source)]
    files = re.findall(r"\b(?:tests|labs|labs/\w+|results)/\w+\.py", str(notebook.cells))
    assert [file for file in files if not (ROOT / file).exists()] == []
    assert notebook.metadata.kernelspec.name == "python3"


@pytest.mark.ci(every=7)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs_anew(path):
    """Every cell runs in a fresh kernel, and draws as many pictures as are committed."""
    from nbclient import NotebookClient  # of the extra `notebooks`

    notebook, committed = read(path), pictures(read(path))
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    NotebookClient(
        notebook,
        timeout=HANGS,
        kernel_name="python3",
        resources={"metadata": {"path": str(path.parent)}},
    ).execute()  # raises on a cell's error
    assert problems(notebook) == []
    assert pictures(notebook) == committed


@pytest.mark.ci
def test_a_bad_notebook_is_seen():
    """The checks above see what they are there for."""
    import nbformat.v4 as nbf

    good = nbf.new_output("stream", name="stdout", text="$ python tp.py\nPASS")
    bad = [
        nbf.new_output("error", ename="ValueError", evalue="no", traceback=[]),
        nbf.new_output("stream", name="stderr", text="FutureWarning: soon"),
        nbf.new_output("stream", name="stdout", text="wrote /tmp/x/results.json"),
        nbf.new_output("execute_result", {"text/plain": "Path('/home/me/x')"}, execution_count=1),
    ]
    cases = [(good, 1, 0), (good, 2, 1), *((output, 1, 1) for output in bad)]
    for output, count, expected in cases:
        cell = nbf.new_code_cell("x", outputs=[output], execution_count=count)
        assert len(problems(nbf.new_notebook(cells=[cell]))) == expected
