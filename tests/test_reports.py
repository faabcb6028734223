"""--model: what it takes, what it refuses; models that people reported about other projects.

What such a model needs is right, or it is refused in one line that says why.
"""

import json
import math
import os

import pytest
from conftest import python
from forks import SMALL, STRATEGIES
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

import tp

SIZES = SMALL | {"vocab_size": 96, "intermediate_size": 64, "num_key_value_heads": 3}
SIZES |= {"num_attention_heads": 6, "tie_word_embeddings": False}
FACTORS = {"short_factor": [1.0] * 4, "long_factor": [2.0, 3.0, 4.0, 5.0]}
LONGROPE = {"type": "longrope", "original_max_position_embeddings": 16} | FACTORS
DYNAMIC = SIZES | {"rope_scaling": {"type": "dynamic", "factor": 2.0}}
DYNAMIC |= {"max_position_embeddings": 16}
LONGROPE = SIZES | {"rope_scaling": LONGROPE}


def folder(where, config, state=None, **files):
    """A model's folder: config.json, weights, and other files (NAME_json: their content)."""
    (where / "config.json").write_text(json.dumps(config))
    for name, content in files.items():
        (where / name.replace("__", ".")).write_text(content)
    if state is not None:
        state = {name: tensor.clone().contiguous() for name, tensor in state.items()}
        save_file(state, where / "model.safetensors", metadata={"format": "pt"})
    return str(where)


def weights():
    return LlamaForCausalLM(LlamaConfig(**SIZES)).state_dict()


def passes(ranks, world, command, model):
    run = ranks(world, [*command.split(), "--model", model])
    assert run.codes == [0] * world and "FAIL" not in run.output, run.output


@pytest.mark.parametrize("script", STRATEGIES[1:3])
def test_padding_that_decides_on_frequencies_is_seen(ranks, script):
    """longrope chooses its frequencies by the largest position; 13 tokens have the short ones."""
    command = f"{script} --length 13 --model longrope"
    run = ranks(2, command, {".clamp(max=length - 1)": ""})
    assert run.codes == [1, 1] and "the first: logits" in run.output, run.output


@pytest.mark.parametrize("name", tp.PRESETS)
def test_a_preset_is_an_architecture_with_random_weights(name):
    config, weights = tp.find_model(name)
    sizes = config.model_type, *(getattr(config, key) for key in tp.SIZES)
    assert sizes == tp.PRESETS[name] and weights is None


@pytest.mark.parametrize("where,loaded", [("", True), ("config.json", False)])
def test_a_folder_has_weights_and_a_config_alone_has_none(ranks, tmp_path, where, loaded):
    """A head of zeros makes all words equally likely; random weights come nowhere near."""
    state = weights()
    state["lm_head.weight"].zero_()
    model = os.path.join(folder(tmp_path, SIZES, state), where)
    run = ranks(2, ["tp.py", "--length", "8", "--model", model])
    assert run.codes == [0, 0] and ("random" in run.output) != loaded, run.output
    far = abs(run.json["correctness"]["loss"] - math.log(96))
    assert far < 1e-12 if loaded else far > 1e-2
    assert "with random weights" in ranks(2, "tp.py --length 8 --model even").output


def test_dropout_is_left_out(ranks, tmp_path):
    passes(ranks, 2, "tp.py --length 8", folder(tmp_path, SIZES | {"attention_dropout": 0.1}))


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("script", STRATEGIES)
def test_a_head_of_its_own_in_the_file_unties(ranks, tmp_path, script):
    model = folder(tmp_path, SIZES | {"tie_word_embeddings": True}, weights())
    passes(ranks, 2, f"{script} --mode all --length 8 --bench-iters 1", model)


INDEX = json.dumps({"metadata": {}, "weight_map": dict.fromkeys(weights(), "model-1.safetensors")})
MORE = {"model.layers.0.self_attn.q_proj.bias": weights()["model.norm.weight"]}
LESS = {name: w for name, w in weights().items() if "layers.1.mlp.up" not in name}
QUANTIZED = {"quantization_config": {"quant_method": "gptq", "bits": 4}}
CODE = {"auto_map": {"AutoConfig": "config.C", "AutoModelForCausalLM": "config.M"}}
NO_TYPE = {name: value for name, value in (SIZES | CODE).items() if name != "model_type"}
REFUSED = [  # config, weights, other files, what is said
    (SIZES, LESS, {}, "missing_keys model.layers.1.mlp.up_proj.weight"),
    (SIZES, weights() | MORE, {}, "unexpected_keys model.layers.0.self_attn.q_proj.bias"),
    (SIZES | {"vocab_size": 97}, weights(), {}, "torch.Size([96, 48]), torch.Size([97, 48])"),
    (SIZES, None, {"model__safetensors__index__json": INDEX}, "model-1.safetensors"),
    (SIZES, None, {"model__safetensors": "version https://git-lfs"}, "header too large"),
    *((SIZES, None, {name: "x"}, "model.safetensors") for name in ("pytorch_model__bin", "a__md")),
    (SIZES | QUANTIZED, weights(), {}, "cannot load "),
    (SIZES, None, {"config__json": "{"}, "not a valid JSON file"),
    *((SIZES | {key: value}, None, {}, "cannot use ")
      for key, value in {"num_key_value_heads": 0, "rope_theta": "10000.0", "hidden_act": "swish!",
                         "num_attention_heads": 4, "pad_token_id": 96,
                         "rope_scaling": {"type": "su", "factor": 2.0}}.items()),
    *((SIZES | {"model_type": name}, None, {}, f"is of type {name}, not of llama, mistral,")
      for name in ("gpt2", "gemma3_text", "mixtral")),
    (SIZES | {"model_type": "Yi"}, None, {}, "model type `Yi`"),
]  # fmt: skip


@pytest.mark.parametrize("config,state,files,said", REFUSED, ids=range(len(REFUSED)))
def test_what_cannot_be_used_is_refused_in_a_line(ranks, tmp_path, config, state, files, said):
    model = folder(tmp_path, config, state, **files)
    run = ranks(1, ["tp.py", "--length", "8", "--model", model])
    last = run.output.splitlines()[-1]
    assert run.codes == [2] and last.startswith("error: ") and said in last, run.output
    assert "Traceback" not in run.output and run.output.count("error: ") == 1


@pytest.mark.parametrize("config,code", [(SIZES | CODE, 0), (NO_TYPE, 2)])
def test_code_of_a_folder_is_not_run(ranks, tmp_path, config, code):
    """Nor does anything ask whether to run it."""
    mark, source = tmp_path / "mark", "import pathlib; pathlib.Path({!r}).touch()"
    model = folder(tmp_path, config, weights(), config__py=source.format(str(mark)))
    run = ranks(1, ["tp.py", "--length", "8", "--model", model])
    assert run.codes == [code] and "[y/N]" not in run.output, run.output
    assert not mark.exists()


def test_ranks_without_a_word_are_refused(ranks, tmp_path):
    run = ranks(3, ["tp.py", "--model", folder(tmp_path, SIZES | {"vocab_size": 2})])
    assert 2 in run.codes and "more ranks than vocabulary; use at most 2" in run.output


WINDOW = SIZES | {"model_type": "mistral", "sliding_window": 4}
FITS = 0, "PASS oom_search: 4 of 4"
SEARCHED = [(DYNAMIC, *FITS), (LONGROPE, *FITS), (WINDOW, 2, "use --attn eager")]


@pytest.mark.ci(every=3)
@pytest.mark.parametrize("config,status,said", SEARCHED, ids=["dynamic", "longrope", "window"])
def test_what_oom_search_says_of_a_model(tmp_path, config, status, said):
    options = ["--strategy", "all", "--nproc", 2, "--at", 64]
    run = python("oom_search.py", "--model", folder(tmp_path, config), *options)
    assert run.returncode == status, run.stdout + run.stderr
    assert said in (run.stderr if status else run.stdout)


@pytest.mark.ci
def test_lab_8_tells_of_half_an_environment():
    run = python("labs/lab8_3d/lesson.py", env={"RANK": "0", "WORLD_SIZE": "4"})
    assert run.returncode == 2 and run.stderr.startswith("error: RANK is set, MASTER_ADDR")
