"""What can be known without a GPU of a run on one: on which device each tensor is, what reaches
flash-attn, masks under tracing, and a search for the longest sequence at a limit. results/README.md
says what cannot."""

import json
import os
import re
import sys
from contextlib import nullcontext
from types import ModuleType
from unittest import mock

import pytest
import torch
from conftest import changed
from forks import MODELS, SMALL, STRATEGIES
from test_oom_search import folder, run  # noqa: F401
from test_proof import load
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.function import BackwardCFunction
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
from transformers import masking_utils, modeling_utils
from transformers import modeling_flash_attention_utils as flash_utils

DEEP = "deep_untied"  # 5 layers, 12 heads, 4 KV heads: 3 ranks divide none of them


def parsed(script, *options):
    """The arguments of a script, and its process group."""
    args = script.parse(["--length", "13", "--backend", "gloo", "--model", *options])
    group = script.start(args)
    args.dtype = args.dtype or "float64"
    return args, group


# ---- Devices: a step on tensors without data, "on" an accelerator --------------------------------

ACCELERATOR = torch.device("privateuseone", 0)  # PyTorch's place for one, where any build has one


def backward(root, grad=None):
    """tensor.backward(), node by node: autograd's own engine wants a real accelerator."""
    grad = torch.ones_like(root) if grad is None else grad
    if root.grad_fn is None:  # a weight
        root.grad = grad if root.grad is None else root.grad + grad
        return
    order, todo, seen = [], [root.grad_fn], set()
    while todo:
        node = todo.pop()
        if node in seen:
            order.append(node)
        else:
            seen.add(node)
            todo += [node, *(n for n, _ in node.next_functions if n is not None and n not in seen)]
    grads = {root.grad_fn: {root.output_nr: grad}}
    for node in reversed(list(dict.fromkeys(order))):
        come = grads.pop(node, {})
        if come and hasattr(node, "variable"):
            backward(node.variable, come[0])
        elif come:
            call = node.apply if isinstance(node, BackwardCFunction) else node
            out = call(*(come.get(i) for i in range(1 + max(come))))
            out = out if isinstance(out, tuple) else (out,)
            for (following, i), x in zip(node.next_functions, out):
                if following is not None and x is not None:
                    x = x.sum_to_size(following._input_metadata[i].shape)
                    there = grads.setdefault(following, {})
                    there[i] = there[i] + x if i in there else x


def proof_on_accelerator(script, put, options, world):
    """Steps, and their comparison with one device. What asks a tensor for its value is told 1."""
    _setup_privateuseone_for_python_backend()
    torch.get_device_module("privateuseone").get_amp_supported_dtype = lambda: []
    # HF finds out by a tensor, which is real
    modeling_utils.get_torch_context_manager_or_global_device = lambda: ACCELERATOR
    script = load(script, put | {"range(20)": "range(1)"})  # of learning a step is as good as all
    values = {"item": lambda x: 1, "__float__": lambda x: 1.0, "__bool__": lambda x: True}
    values["__format__"] = lambda x, how: "1"

    def on_it(function):
        def run(model, *others):
            found = function(model, *others)
            seen = [found, *(p.grad for p in model.parameters())]
            assert all(x is None or x.device == ACCELERATOR for x in seen)
            return found

        return run

    for name in ("forward_backward", "local_logits"):
        script.check_learning.__globals__[name] = on_it(getattr(script, name))
    for rank, attn in [(rank, attn) for rank in range(world) for attn in ("sdpa", "eager")]:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world)}
        how = ["--backend", "fake", "--mode", "benchmark", "--dtype", "bfloat16", "--attn", attn]
        args, group = parsed(script, *options, *how)
        args.device = ACCELERATOR
        with (
            FakeTensorMode(),
            mock.patch.object(torch.Tensor, "backward", backward),
            mock.patch.object(torch.autograd, "backward", backward),
            mock.patch.object(torch._C, "_current_graph_task_id", lambda: 1),  # recompute once
            mock.patch.multiple(torch.Tensor, **values),
        ):
            script.check_correctness(args, group)
            script.check_learning(args, group)
        script.dist.destroy_process_group()


@pytest.mark.ci(every=3)
@pytest.mark.parametrize("world", [2, 1, 3])
@pytest.mark.parametrize("script", STRATEGIES)
def test_all_tensors_of_a_proof_are_where_they_should_be(ranks, script, world):
    options = [f"{ranks.folder}/{DEEP}", *["--schedule", "zb"][: 2 * (script == "pp.py")]]
    codes, output = ranks.live(1, proof_on_accelerator, script, {}, options, world)
    assert codes == [0], output


TWO_DEVICES = "found (at least )?two (different )?devices"
LABELS = "return ids.to(args.device), labels.to(args.device)"
COLUMN = "softmax.scatter_add_(-1, column"  # in a backward
ON_THE_CPU = [(script, LABELS, "return ids.to(args.device), labels") for script in STRATEGIES]
for script in STRATEGIES:
    norm = f"vector_norm({'grad' if script == 'sp_ulysses.py' else 'p.grad'}, dtype=torch.float64)"
    ON_THE_CPU.append((script, norm, f"{norm}.cpu()"))
ON_THE_CPU += [
    ("tp.py", COLUMN, f"{COLUMN}.cpu()"),
    ("pp.py", "dtype=self.dtype, device=ids.device)", "dtype=self.dtype)"),
]


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("script,old,new", ON_THE_CPU)
def test_a_tensor_on_the_cpu_is_found(ranks, script, old, new):
    codes, output = ranks.live(
        1, proof_on_accelerator, script, {old: new}, [f"{ranks.folder}/bias"], 2
    )
    assert codes == [1] and re.search(TWO_DEVICES, output), output


# ---- Tracing: Hugging Face then cannot look whether a mask can be left out -----------------------


def same_logits_when_traced(script, put, options, compiled):
    script = load(script, put)
    args, group = parsed(script, *options)
    tracing = mock.patch.object(masking_utils, "is_tracing", lambda *_: True)
    with script.upcasts_in_float64(args), torch.no_grad():
        model = script.parallelize(script.load_model(args), group, args)
        ids, _ = script.proof_batch(args, group)
        plain = script.local_logits(model, ids, group, args)
        if compiled:
            sys.modules["loaded"] = script  # dynamo looks there
            hidden = torch.compile(script.final_hidden_states, backend="eager")
            script.local_logits.__globals__["final_hidden_states"] = hidden
        with nullcontext() if compiled else tracing:
            traced = script.local_logits(model, ids, group, args)
    torch.testing.assert_close(traced, plain, rtol=1e-10, atol=1e-10)


ALL_TOKENS = {"sp_megatron.py": "hidden, ids.shape[1]", "sp_ulysses.py": "hidden, padded"}
TRACED = [("sp_megatron.py", False), ("sp_ulysses.py", False)]
TRACED += [pytest.param("sp_megatron.py", True, marks=pytest.mark.slow)]


@pytest.mark.ci
@pytest.mark.parametrize("script,compiled", TRACED)
def test_under_tracing_the_mask_is_that_of_all_tokens(ranks, script, compiled):
    """Layers with a sliding window in turn with others, since HF makes no mask for the latter."""
    options = [f"{ranks.folder}/own_kv"]
    codes, output = ranks.live(2, same_logits_when_traced, script, {}, options, compiled)
    assert codes == [0, 0], output
    put = {f"{ALL_TOKENS[script]})": "hidden, hidden.shape[1])"}
    codes, output = ranks.live(2, same_logits_when_traced, script, put, options, compiled)
    assert codes == [1, 1] and "scaled_dot_product_attention" in output, output


# ---- flash-attn: what reaches it, and what comes of it -------------------------------------------


def attend(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), **_):
    """flash_attn_func, plainly: q (b, s, heads, d), k and v (b, s, KV heads, d) -> like q.
    window_size: how many tokens to the left and right of its own a token sees, -1: all."""
    assert q.shape[0::3] == k.shape[0::3] and k.shape == v.shape and q.shape[1] == k.shape[1]
    assert (dropout_p, softmax_scale, causal) == (0.0, q.shape[-1] ** -0.5, True)
    wide = torch.promote_types(q.dtype, torch.float32)
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, 2).to(wide) for x in (k, v))
    ahead = torch.arange(k.shape[1]) - torch.arange(q.shape[1])[:, None]  # of query by key
    left, right = (x if x >= 0 else q.shape[1] for x in window_size)
    seen = (ahead <= (0 if causal else right)) & (ahead >= -left)
    scores = torch.einsum("bqhd,bkhd->bhqk", q.to(wide), k) * softmax_scale
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v).to(q.dtype)


def attend_within(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
    dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), deterministic=False,
):  # fmt: skip
    """flash_attn_varlen_func: texts one after another, (tokens, heads, d), none sees another.
    Hugging Face looks at these names: it gives what the function takes."""
    assert cu_seqlens_q.equal(cu_seqlens_k) and max_seqlen_q == cu_seqlens_q.diff().max()
    texts = zip(*(x.split(cu_seqlens_q.diff().tolist()) for x in (q, k, v)))
    how = dropout_p, softmax_scale, causal, window_size
    return torch.cat([attend(*(x[None] for x in text), *how)[0] for text in texts])


def flash_is_sdpa(script, put, options):
    """Every tensor of the proof with flash, against one device with sdpa, in float64."""
    package, padding = ModuleType("flash_attn"), ModuleType("flash_attn.bert_padding")
    package.flash_attn_func, package.flash_attn_varlen_func = attend, attend_within
    package.flash_attn_with_kvcache = padding.pad_input = padding.unpad_input = None  # unused
    sys.modules |= {"flash_attn": package, "flash_attn.bert_padding": padding}
    flash_utils.is_flash_attn_2_available = lambda: True
    there = {"general_availability_check": lambda: True, "supported_devices": ((lambda: True, ""),)}
    flash_utils.FLASH_ATTENTION_COMPATIBILITY_MATRIX[2] |= there
    script = load(script, put)
    args, group = parsed(script, *options, "--attn", "flash", "--dtype", "bfloat16")
    args.dtype, kinds = "float64", iter(["sdpa", "flash_attention_2"])  # reference, model

    def load_model(args, right=script.load_model):
        args.attn_implementation = next(kinds)
        return right(args)

    script.check_correctness.__globals__["load_model"] = load_model
    with script.upcasts_in_float64(args):
        _, result = script.check_correctness(args, group)
    assert result["passed"], "other than sdpa"
    assert flash_utils._loaded_implementation == args.attn_implementation, "flash was not used"


SIZES = [(2, 1, 5), (3, 3, 0)]  # ranks, sequences, the window that a token sees (0: all before it)
MORE = [(1, 1, 0), (1, 3, 5), (2, 3, 5), (2, 1, 0), (3, 1, 5)]
SIZES += [pytest.param(*size, marks=pytest.mark.slow) for size in MORE]


@pytest.mark.quick(every=5)
@pytest.mark.parametrize("script", STRATEGIES)
@pytest.mark.parametrize("world,batch,window", SIZES)
def test_flash_attention_is_given_what_sdpa_is(ranks, tmp_path, script, world, batch, window):
    family = {"model_type": "mistral", "sliding_window": window} if window else {}
    (tmp_path / "config.json").write_text(json.dumps(SMALL | MODELS[DEEP] | family))
    microbatches = ["--microbatches", "1"] if script == "pp.py" and batch == 1 else []
    options = [str(tmp_path), "--batch", str(batch), *microbatches]
    codes, output = ranks.live(world, flash_is_sdpa, script, {}, options)
    assert codes == [0] * world, output


HEAD = "        d = attention.head_dim\n"
HOOK = f"{HEAD}        attention.register_forward_pre_hook(lambda module, args, kwargs: "
HOOK += '(args, kwargs | {"position_ids": kwargs["position_ids"] % 5}), with_kwargs=True)\n'
ROTARY = "position_embeddings=rotary)"
POSITIONS = "position_embeddings=rotary, position_ids=positions[None] % 5)"
# As if texts of five tokens had been packed. sdpa does not look at positions
WRONG = [("tp.py", HEAD, HOOK), ("sp_megatron.py", ROTARY, POSITIONS)]
WRONG += [("sp_ulysses.py", ROTARY, POSITIONS)]


@pytest.mark.parametrize("script,old,new", WRONG)
def test_a_wrong_position_is_found(ranks, script, old, new):
    options = [f"{ranks.folder}/{DEEP}", "--batch", "1"]
    codes, output = ranks.live(2, flash_is_sdpa, script, {old: new}, options)
    assert codes == [1, 1] and "other than sdpa" in output, output


# ---- A search on a GPU whose memory is a number --------------------------------------------------

GPU = """
def add(self, key, size, part, add=LiveTensors.add):
    ours.append(self)
    if self.now + size > limit[-1]:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate %d bytes" % size)
    add(self, key, size, part)

ours, limit, LiveTensors.add = [], [2**30], add
properties = type("Properties", (), {"total_memory": 2**30})
torch.cuda.get_device_properties, torch.cuda.device_count = lambda *_: properties, lambda: 0
torch.cuda.set_per_process_memory_fraction = lambda x, _: limit.append(x * 2**30)
torch.cuda.max_memory_allocated = lambda: ours[-1].peak
torch.cuda.reset_peak_memory_stats = torch.cuda.synchronize = lambda: None

"""  # what a step asks of torch.cuda, where tensors are the CPU's and LiveTensors the allocator
ON_IT = {"# ---- 2.": f"{GPU}# ---- 2."}
ON_IT |= {'    if args.device.type == "cuda":\n        share': "    if True:\n        share"}


@pytest.mark.slow
@pytest.mark.parametrize("how,gpus,strategy", [("emulated", 1, "pp"), ("measured", 2, "sp")])
def test_a_search_finds_the_limit(folder, how, gpus, strategy):  # noqa: F811
    """The real scripts. This proves the search, and the calls: a real allocator needs a GPU."""
    (folder / "oom_search.py").write_text(changed("oom_search.py", ON_IT))
    tensors = folder / "labs" / "memory" / "live_tensors.py"
    tensors.write_text(tensors.read_text().replace('self.device == "cuda"', "True"))
    options = f"--how {how} --model tiny --memory-gib 0.01 --strategy {strategy} --nproc 2"
    status, out, _, [row] = run(folder, gpus, options)
    assert status == 0 and (row["how"], row["too_long"] - row["longest"]) == (how, 16), out
    assert None in (peak for _, peak in row["tried"]), "memory ran out"
    if how == "emulated":  # gloo's threads let go of a message at some later moment
        assert sum(row["breakdown"].values()) == max(row["peak_memory_bytes"]) <= 0.01 * 2**30
        at = f"--memory-gib 1 --at {row['longest']} {row['too_long']}"
        _, _, _, [row] = run(folder, gpus, f"{options} {at}")
        fits, does_not = (max(entry["peak_memory_bytes"]) for entry in row["at"])
        assert fits <= 0.01 * 2**30 < does_not
