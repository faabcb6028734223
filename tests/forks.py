"""Ranks for the tests: forks of one process that has loaded torch, so that a run takes 0.3 s."""

import ast
import functools
import gc
import json
import os
import signal
import sys
import time
import traceback
import types
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STRATEGIES = ["tp.py", "sp_megatron.py", "sp_ulysses.py", "pp.py"]
TIMEOUT = 300  # seconds; a run takes one or two

SMALL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 101,
    "hidden_size": 48, "intermediate_size": 46, "num_attention_heads": 12,
    "initializer_range": 0.2, "max_position_embeddings": 64, "num_hidden_layers": 2,
}  # fmt: skip
MIXED = {"use_sliding_window": True, "sliding_window": 5}  # full and sliding attention in turn
MODELS = {  # As they really come. 2, 3, 4 divide none of vocabulary, intermediate, length 37
    "shared_kv": {"num_key_value_heads": 1, "tie_word_embeddings": True, "attention_bias": True,
                  "mlp_bias": True, "pad_token_id": 60},
    "own_kv": {"model_type": "qwen3", "num_key_value_heads": 3, "tie_word_embeddings": False,
               "head_dim": 6, "max_window_layers": 1, **MIXED},
    "two_kv": {"num_key_value_heads": 2, "tie_word_embeddings": True,
               "pad_token_id": 26},  # the first word of rank 1 of 4
    "bias": {"model_type": "qwen2", "num_key_value_heads": 4, "tie_word_embeddings": False,
             "pad_token_id": 0, "max_window_layers": 1, **MIXED},  # of q, k and v
    "head_dim": {"model_type": "mistral", "num_key_value_heads": 4, "head_dim": 10,
                 "tie_word_embeddings": False, "sliding_window": 4},
    "olmo2": {"model_type": "olmo2", "num_key_value_heads": 4},
    "even": {"num_key_value_heads": 4, "tie_word_embeddings": True, "vocab_size": 104,
             "intermediate_size": 48},  # for DTensor
    "even_bias": {"num_key_value_heads": 4, "tie_word_embeddings": False, "vocab_size": 104,
                  "intermediate_size": 48, "attention_bias": True, "mlp_bias": True},
    "even_qwen3": {"model_type": "qwen3", "num_key_value_heads": 4, "vocab_size": 104,
                   "intermediate_size": 48, "head_dim": 4},
    "six_kv": {"num_key_value_heads": 6, "tie_word_embeddings": True, "attention_bias": True,
               "mlp_bias": True, "pad_token_id": 7},
    "longrope": {"num_key_value_heads": 2, "rope_scaling": {  # the padding of 13 tokens to 14
        "type": "longrope", "short_factor": [1.0, 1.0], "long_factor": [2.0, 3.0],  # crosses it
        "original_max_position_embeddings": 13}},
    "dynamic": {"num_key_value_heads": 2, "max_position_embeddings": 13,
                "rope_scaling": {"type": "dynamic", "factor": 2.0}},
    "gpt2": {"model_type": "gpt2"},  # to be refused
    "one_layer": {"num_hidden_layers": 1, "num_key_value_heads": 1},
    "uneven_kv": {"model_type": "qwen3", "num_attention_heads": 6, "num_key_value_heads": 2,
                  "hidden_size": 24, "head_dim": 4},  # on 4 ranks 2 and 1 queries of a KV head
    "deep": {"model_type": "smollm3", "num_hidden_layers": 7, "num_key_value_heads": 4,
             "tie_word_embeddings": True, "attention_bias": True, "pad_token_id": 0,
             "no_rope_layer_interval": 3, "initializer_range": 0.1,
             "layer_types": ["full_attention"] + 3 * ["sliding_attention", "full_attention"],
             **MIXED},
    "wide": {"num_hidden_layers": 7, "num_key_value_heads": 4, "vocab_size": 4096},
    "deep_untied": {"num_hidden_layers": 5, "num_key_value_heads": 4, "tie_word_embeddings": False},
}  # fmt: skip


def prepare(folder):
    """In the process that will fork: the models' configs; and torch, once for all."""
    for name, config in MODELS.items():
        Path(folder, name).mkdir()
        Path(folder, name, "config.json").write_text(json.dumps(SMALL | config))
    os.chdir(ROOT)
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    for script in STRATEGIES:
        source = ast.parse((ROOT / script).read_text())
        imports = [n for n in source.body if isinstance(n, (ast.Import, ast.ImportFrom))]
        exec(compile(ast.Module(imports, []), script, "exec"), {})
    gc.collect()
    gc.freeze()  # no fork need look at what has been imported


@functools.lru_cache(9)
def compiled(script, source):
    """A script's code. Asked for before the fork, too, so that not every rank has to compile it."""
    return compile(source, ROOT / script, "exec")


def run_script(script, source, argv):
    """What `python SCRIPT ARGV` does, with another source."""
    sys.argv = [str(ROOT / script), *argv]
    main = sys.modules["__main__"] = types.ModuleType("__main__")  # pickle looks there
    main.__file__ = sys.argv[0]
    exec(compiled(script, source), vars(main))


def be_rank(rank, world, port, life, output):
    """Call life() as one rank of several, with torchrun's environment; does not return."""
    status = 1
    try:
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
        os.dup2(1, 2)
        signal.alarm(TIMEOUT + 5)  # not even if the parent is killed does a rank stay
        joined = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world}
        joined |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        joined |= {"TORCHELASTIC_USE_AGENT_STORE": True}  # as under torchrun: rank 0 has none
        os.environ |= {name: str(value) for name, value in joined.items()}
        life()
        status = 0
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else 1
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(status)


def on_ranks(world, life, output, patience=0.0):
    """Have ranks live; returns their exit codes, None for one that was ended.

    When one fails, the others have some seconds of patience to come to an end of their own.
    """
    from torch.distributed import TCPStore  # not above: pytest's main process needs no torch

    Path(output).write_text("")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    end, running, codes = time.time() + TIMEOUT, {}, [None] * world
    for rank in range(world):
        pid = os.fork()
        if not pid:
            be_rank(rank, world, store.port, life, output)
        running[pid] = rank
    while running and time.time() < end:
        for pid in list(running):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                codes[running.pop(pid)] = code = os.waitstatus_to_exitcode(status)
                wait = 0 if code == 2 else patience  # 2: it has said why, the others only wait
                end = min(end, time.time() + wait) if code else end
        time.sleep(0.005)
    for pid in running:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return codes
