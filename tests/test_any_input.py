"""Whatever command line or config says: exit 0, 1 or 2, and 2 with one line that says why."""

import contextlib
import importlib
import io
import json
import tempfile
from functools import partial
from pathlib import Path

import pytest
from conftest import ROOT
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from learner import run_lab

pytestmark = pytest.mark.slow  # 600 cases
CASES = settings(
    deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None
)
NUMBERS = st.sampled_from(
    ["0", "1", "2", "3", "7", "-1", "1.5", "1e3", "", "many", "٣", "\x00", "9" * 30]
)
WORDS = st.sampled_from(
    ["", "tiny", ".", "./nowhere", "a b", "--", "-", "é", "full", "none", "auto", "all", "list"]
)
ANY = NUMBERS | WORDS | st.text(max_size=5)


def options(choices):
    """Command lines of a few of the options {name: strategy of values}; None: it takes no value."""

    def one(name):
        value = choices[name]
        return st.just([name]) if value is None else value.map(lambda v: [name, v])

    few = st.lists(st.sampled_from(sorted(choices)).flatmap(one), max_size=4)
    return few.map(lambda pairs: [word for pair in pairs for word in pair])


def said(main, argv):
    """(exit status, stdout, stderr) of main(argv), in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = main(argv)
        except SystemExit as stop:  # --help
            status = stop.code
    return status, out.getvalue(), err.getvalue()


def holds(main, argv):
    status, out, err = said(main, argv)
    errors = [line for line in err.splitlines() if "error: " in line]
    assert status in (0, 1, 2), (argv, status)
    assert "Traceback" not in out + err, (argv, err)
    assert len(errors) == (status == 2), (argv, status, err)


STRATEGY = {
    "--mode": st.sampled_from(["correctness", "benchmark", "schedule", "bubble"]) | ANY,
    "--length": NUMBERS, "--batch": NUMBERS,
    "--dtype": st.sampled_from(["float32", "float64", "int8"]) | ANY,
    "--attn": st.sampled_from(["eager", "flash"]) | ANY,
    "--loss": ANY, "--recompute": st.sampled_from(["offload", "none"]) | ANY, "--tile": NUMBERS,
    "--backend": st.sampled_from(["gloo", "nccl", "fake"]) | ANY,
    "--bench-iters": st.sampled_from("01x"),
    "--seed": NUMBERS, "--timeout": NUMBERS, "--model": WORDS, "--json": WORDS,
    "--dtensor": None, "--typo": None,
    "--schedule": st.sampled_from(["afab", "1f1b", "interleaved", "zb"]) | ANY,
    "--microbatches": NUMBERS,
    "--virtual-stages": NUMBERS, "--ranks": NUMBERS,
}  # fmt: skip


CONFIG = {
    "hidden_size": 8, "intermediate_size": 6, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 11, "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
}  # fmt: skip
SMALL = CONFIG | {"num_hidden_layers": 4, "vocab_size": 300}  # bytes; as many layers as pp's stages


@pytest.mark.parametrize("script", ["tp", "sp_megatron", "sp_ulysses", "pp"])
def test_command_lines(script, monkeypatch, tmp_path):
    module = importlib.import_module(script)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text(json.dumps(SMALL))

    @settings(CASES, max_examples=100)
    @given(options(STRATEGY))
    def check(argv):
        holds(module.main, ["--model", ".", "--length", "8", "--bench-iters", "1", *argv])

    check()


VALUES = st.sampled_from([0, 1, 2, 3, 5, -1, 1.5, None, "x", True, [], {}])
KEYS = [*CONFIG, "head_dim", "rope_theta", "rms_norm_eps", "pad_token_id"]
KEYS += ["tie_word_embeddings", "hidden_act", "dtype"]


@pytest.mark.parametrize("script", ["tp", "sp_megatron", "sp_ulysses", "pp"])
def test_configs(script):
    module = importlib.import_module(script)

    @settings(CASES, max_examples=20)
    @given(st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=3))
    def check(changes):
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(json.dumps(CONFIG | changes))
            holds(module.main, ["--length", "8", "--model", folder])

    check()


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "{}", '{"model_type": "llama"'])
def test_a_config_that_is_none(text, tmp_path):
    (tmp_path / "config.json").write_text(text)
    tp = importlib.import_module("tp")
    status, _, err = said(tp.main, ["--length", "8", "--model", str(tmp_path)])
    assert status == 2 and err.startswith("error: ") and err.count("\n") == 1


LAB = {
    "--predict": NUMBERS,
    "--seed": st.sampled_from(["x", "1.5", ""]), "--inject-bug": ANY,
    "--json": st.just("/no/x.json"),
    "--typo": None, "more": None,
}  # fmt: skip
SIM = dict.fromkeys(["--tp", "--batch", "--seq", "--hidden", "--ffn"], NUMBERS) | {"--typo": None}
OTHERS = {
    "sp_layout_sim": SIM | {"--break": ANY},
    "labs.four_layouts": SIM | {"--heads": NUMBERS, "--layout": ANY, "--json": WORDS},
    **{f"labs.{path.parent.name}.lesson": LAB for path in sorted(ROOT.glob("labs/*/lesson.py"))},
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_the_simulator_and_the_labs(name, monkeypatch, tmp_path):
    module = importlib.import_module(name)
    main = getattr(module, "main", None) or partial(run_lab, module.__file__)
    monkeypatch.chdir(tmp_path)

    @settings(CASES, max_examples=12)
    @given(options(OTHERS[name]))
    def check(argv):
        if name.endswith("lesson"):  # a lab that runs takes half a minute: these do not get so far
            argv = [*argv, "--no-such-option"] if "list" not in argv else argv
        holds(main, argv)

    check()
