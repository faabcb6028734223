"""What DTensor, which has placements at run time, costs: the same step of tp.py with and without.

One process plays rank 0 of 2 (the fake process group): messages take no time. What is compared is
the processor time of a step. How much of it torch's kernels take the profiler says, of the step
without DTensor: the kernels are the same, and its own operations do not hide what DTensor does.
"""

import statistics
import time
from types import SimpleNamespace

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM

from labs.kit.harness import LABS, load
from labs.lab15_types.oracle import fake_mesh

MODELS = {  # name: (hidden, MLP, layers, heads, tokens)
    "tiny": (64, 192, 8, 8, 64),
    "wider": (768, 2048, 4, 12, 128),
}
STEPS = 5  # of each, the median


def build(hidden, width, layers, heads, tokens):
    """(HF's LLaMA in float32 with random weights, a batch of one sequence)."""
    torch.manual_seed(0)
    sizes = {"hidden_size": hidden, "intermediate_size": width, "num_hidden_layers": layers}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": heads // 2, "vocab_size": 256}
    model = LlamaForCausalLM(LlamaConfig(**sizes, attn_implementation="sdpa")).train()
    return model, torch.randint(256, (1, tokens))


def measure(name, dtensor):
    """{"step": processor seconds; without DTensor "kernels": of these, in torch's operations}."""
    script = load(LABS.parent / "tp.py")
    model, ids = build(*MODELS[name])
    args = SimpleNamespace(
        config=model.config, recompute="none", loss="full", attn_implementation="sdpa"
    )
    vars(args).update(batch=1, length=ids.shape[1], dtensor=dtensor, device=torch.device("cpu"))
    with fake_mesh({"tp": 2}) as mesh:
        group = mesh.get_group("tp")
        model = script.parallelize(model, group, args)

        def step():
            script.forward_backward(model, ids, ids, group, args)
            model.zero_grad()

        for _ in range(3):  # DTensor's first steps fill its caches
            step()
        times = []
        for _ in range(STEPS):
            begin = time.process_time()
            step()
            times.append(time.process_time() - begin)
        if dtensor:
            return {"step": statistics.median(times)}
        shares = []
        for _ in range(STEPS):  # both by the clock, so that other processes matter little
            with profile(activities=[ProfilerActivity.CPU]) as seen:
                begin = time.perf_counter()
                step()
                whole = time.perf_counter() - begin
            own = [e.self_cpu_time_total for e in seen.key_averages() if e.key[:6] == "aten::"]
            shares.append(sum(own) / 1e6 / whole)
    step = statistics.median(times)
    return {"step": step, "kernels": step * statistics.median(shares)}


def prices():
    """{model: {"plain", "dtensor": measure(), "slower": by what part of the plain step}}."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = {}
        for name in MODELS:
            row = {"plain": measure(name, False), "dtensor": measure(name, True)}
            row["slower"] = row["dtensor"]["step"] / row["plain"]["step"] - 1
            for kind in "plain", "dtensor":
                row[kind]["outside"] = 1 - row["plain"]["kernels"] / row[kind]["step"]
            found[name] = row
        return found
    finally:
        torch.set_num_threads(threads)
