"""Models and environments that people reported about other projects, tried on this one.

What such a model needs is right, or it is refused in one line that says what would do.
"""

import json

import pytest
from conftest import python
from forks import SMALL, STRATEGIES
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

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


ROPE = [(3, script, 24, LONGROPE) for script in STRATEGIES[:3]]  # step 2's padding would cross it
ROPE += [(2, script, 25, DYNAMIC) for script in STRATEGIES]
ROPE += [(2, script, 40, LONGROPE) for script in STRATEGIES]


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("world,script,length,config", ROPE)
def test_frequencies_follow_the_whole_sequence_without_padding(
    ranks, tmp_path, world, script, length, config
):
    """longrope and dynamic rope choose theirs by the largest position of all ranks' tokens."""
    passes(ranks, world, f"{script} --length {length}", folder(tmp_path, config))


@pytest.mark.parametrize("script", STRATEGIES[1:3])
def test_padding_that_decides_on_frequencies_is_seen(ranks, tmp_path, script):
    command = [script, "--length", "16", "--model", folder(tmp_path, LONGROPE)]
    run = ranks(3, command, {"positions.clamp(max=last)": "positions"})
    assert run.codes == [1] * 3 and "the first: logits" in run.output, run.output


def test_dropout_is_left_out_and_said(ranks, tmp_path):
    model = folder(tmp_path, SIZES | {"attention_dropout": 0.1})
    run = ranks(2, ["tp.py", "--length", "8", "--model", model])
    assert run.codes == [0, 0] and "attention_dropout is set to 0" in run.output, run.output


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("script", STRATEGIES)
def test_a_head_of_its_own_in_the_file_unties(ranks, tmp_path, script):
    model = folder(tmp_path, SIZES | {"tie_word_embeddings": True}, weights())
    passes(ranks, 2, f"{script} --mode all --length 8 --bench-iters 1", model)


INDEX = json.dumps({"metadata": {}, "weight_map": dict.fromkeys(weights(), "model-1.safetensors")})
PACKED = {name.replace("_proj.weight", "_proj.qweight"): w for name, w in weights().items()}
REFUSED = [  # config, weights, other files, what is said
    (SIZES, {f"module.{name}": w for name, w in weights().items()}, {}, "21 missing_keys, lm_head"),
    (SIZES, PACKED, {}, "14 missing_keys, model.layers.0.mlp.down_proj.weight"),
    (SIZES | {"vocab_size": 97}, weights(), {}, "torch.Size([96, 48]), torch.Size([97, 48])"),
    (SIZES, None, {"model__safetensors__index__json": INDEX}, "model-1.safetensors"),
    (SIZES, weights(), {"adapter_config__json": "{}"}, "is quantized or has an adapter"),
    (SIZES | {"quantization_config": {"quant_method": "gptq"}}, None, {}, "is quantized or has"),
    (SIZES | {"rope_scaling": {"type": "su", "factor": 2.0}}, None, {}, "KeyError: 'su'"),
    (SIZES, None, {"model__safetensors": "version https://git-lfs"}, "SafetensorError"),
    (SIZES, None, {"pytorch_model__bin": "x"}, "model.safetensors"),
    *((SIZES, None, {name: "x"}, "cannot load the model: OSError: ")
      for name in ("rank0__distcp", "consolidated__00__pth", "flax_model__msgpack", "w__npz")),
    (SIZES, None, {"model__safetensors__index__json": '{"weight_map": {}}'}, 'index["metadata"]'),
    *((SIZES | {key: value}, None, {}, f"{key} is {value!r} in config.json; use a number, 1 or")
      for key, value in {"num_key_value_heads": 0, "num_hidden_layers": 0, "vocab_size": 0,
                         "rope_theta": "10000.0"}.items()),
    *((SIZES | {"model_type": "mistral", "sliding_window": n}, None, {}, f"sliding_window is {n} ")
      for n in (0, -1)),
    (SIZES | {"num_attention_heads": 4}, None, {}, "4 heads are no multiple of 3 KV heads"),
    (SIZES | {"hidden_act": "swish!"}, None, {}, "KeyError: 'swish!'"),
    (SIZES | {"pad_token_id": 96}, None, {}, "Padding_idx must be within num_embeddings"),
    *((SIZES | {"model_type": name}, None, {}, f"of type {name}; use one of llama, mistral,")
      for name in ("granite", "gemma3_text", "phi3", "glm4", "mixtral")),
    (SIZES | {"model_type": "Yi"}, None, {}, "cannot use the model: ValueError: "),
]  # fmt: skip


@pytest.mark.parametrize("config,state,files,said", REFUSED, ids=range(len(REFUSED)))
def test_what_cannot_be_used_is_refused_in_a_line(ranks, tmp_path, config, state, files, said):
    model = folder(tmp_path, config, state, **files)
    run = ranks(1, ["tp.py", "--length", "8", "--model", model])
    last = run.output.splitlines()[-1]
    assert run.codes == [2] and "error: " in last and said in last, run.output
    assert "Traceback" not in run.output


def test_code_of_a_folder_is_not_run(ranks, tmp_path):
    mark, code = tmp_path / "mark", "import pathlib; pathlib.Path({!r}).touch()"
    config = SIZES | {"auto_map": {"AutoConfig": "config.C", "AutoModelForCausalLM": "config.M"}}
    model = folder(tmp_path, config, weights(), config__py=code.format(str(mark)))
    passes(ranks, 1, "tp.py --length 8", model)
    assert not mark.exists()


def test_ranks_without_a_word_are_refused(ranks, tmp_path):
    run = ranks(3, ["tp.py", "--model", folder(tmp_path, SIZES | {"vocab_size": 2})])
    assert run.codes[0] == 2 and "more ranks than vocabulary; use at most 2" in run.output, (
        run.output
    )


WINDOW = SIZES | {"model_type": "mistral", "sliding_window": 4}
FITS = 0, "4 of 4 steps fit"
SEARCHED = [(DYNAMIC, *FITS), (LONGROPE, *FITS), (WINDOW, 2, "use --attn eager")]


@pytest.mark.ci(every=3)
@pytest.mark.parametrize("config,status,said", SEARCHED, ids=["dynamic", "longrope", "window"])
def test_what_oom_search_says_of_a_model(tmp_path, config, status, said):
    options = ["--strategy", "all", "--nproc", 2, "--at", 64, "--journal", tmp_path / "journal"]
    run = python("oom_search.py", "--model", folder(tmp_path, config), *options)
    assert run.returncode == status, run.stdout + run.stderr
    assert said in (run.stderr if status else run.stdout)


@pytest.mark.ci
def test_lab_8_tells_of_half_an_environment():
    run = python("labs/lab8_3d/lesson.py", env={"RANK": "0", "WORLD_SIZE": "4"})
    assert run.returncode == 2 and run.stderr.startswith("error: RANK is set, MASTER_ADDR")
