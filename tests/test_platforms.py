"""Where users are: an operating system that is refused, too little memory, what pip installs."""

import ast
import faulthandler
import importlib
import re
import sys
import tomllib

import pytest
from conftest import ROOT


@pytest.mark.parametrize("name", ["tp", "sp_megatron", "sp_ulysses", "pp", "oom_search"])
def test_windows_is_told_what_would_do(name, monkeypatch, capsys):
    script = importlib.import_module(name)
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.delattr(faulthandler, "register")
    assert script.main([]) == 2
    assert capsys.readouterr() == ("", "error: needs Linux or macOS; on Windows use WSL\n")


def test_what_is_imported_is_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = sum(project["optional-dependencies"].values(), project["dependencies"])
    declared = {re.match(r"[\w-]+", line)[0].replace("-", "_") for line in lines}
    files = [file for pattern in ("*.py", "[a-z]*/**/*.py") for file in ROOT.glob(pattern)]
    ours = {file.stem for file in files} | {file.parent.name for file in files}
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            packages = {name.partition(".")[0] for name in names}
            assert packages <= declared | ours | sys.stdlib_module_names, file
