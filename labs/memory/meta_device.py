"""PyTorch's device "meta" in a GPU's place: tensors with a size and no data, for predictions.

oom_search.py predicts with it. A prediction needs to know which attention kernel PyTorch would
run on a GPU, and what kernels take for themselves, because meta runs none of them.
"""

import math
from functools import partial
from types import SimpleNamespace

import torch
import torch.distributed._tools.fake_collectives  # collectives of meta tensors: nothing moves
import torch.nn.functional as F
import transformers
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

ATEN = torch.library.Library("aten", "IMPL")


class MetaStream(torch.cpu.Stream):
    """What fully_shard of PyTorch 2.15 asks of a stream, besides what a CPU's has."""

    stream_id = device_index = device_type = 0


def use_meta(args, capability):
    """Have a script compute nothing: its tensors are meta, and nobody reads their values.

    args: its arguments. Returns a set, in which the attention of a GPU of this compute capability
    notes what it is.
    """
    kernels = set()
    args.device, args.weights = torch.device("meta"), None  # weights of the right shape will do
    args.config.rope_parameters |= {"rope_type": "default"}  # a dynamic one reads positions
    attend = partial(attention, capability, kernels)
    ATEN.impl("scaled_dot_product_attention", attend, "AutogradMeta", allow_override=True)
    # HF reads positions to find several texts in one sequence; there is only one here
    transformers.masking_utils.find_packed_sequence_indices = lambda position_ids: None
    # DTensor and fully_shard ask torch.<device> for devices, of which fully_shard refuses meta
    device = {"current_device": lambda: 0, "current_stream": lambda *_: MetaStream()}
    torch.meta = SimpleNamespace(**vars(torch.cpu) | device)
    FSDPParamGroup._validate_no_meta_params = lambda self: None
    return kernels


def host_memory():
    """save_on_cpu for tensors without data: they leave the device, and come back as new ones."""
    return torch.autograd.graph.saved_tensors_hooks(
        lambda x: (x.shape, x.stride(), x.dtype),
        lambda saved: torch.empty_strided(saved[0], saved[1], dtype=saved[2], device="meta"),
    )


def run_by_shape(shapes, func, args):
    """func(*args), without computing a shape that is known; None for operations of other kinds.

    PyTorch works out a meta result in Python, which would take half of a prediction's time. What
    a pointwise operation, a product or a sum returned for operands alike is kept in `shapes`.
    """
    aten = torch.ops.aten
    pointwise = torch.Tag.pointwise in func.tags and not func._schema.is_mutable
    if not pointwise and func not in (aten.mm.default, aten.mean.dim, aten.sum.dim_IntList):
        return None
    key = [func]
    for x in args:
        if isinstance(x, torch.Tensor):
            key += [x.shape, x.stride(), x.dtype, x.device]
        else:
            key += [type(x), str(x)]
    key = tuple(key)
    if key not in shapes:
        out = func(*args)
        shapes[key] = out.shape, out.stride(), out.dtype, out.device
        return out
    shape, stride, dtype, device = shapes[key]
    return torch.empty_strided(shape, stride, dtype=dtype, device=device)


# ---- Attention and softmax on a GPU --------------------------------------------------------


class UnknownKernel(Exception):
    """No prediction; the message says what to use instead."""


def attention_kernel(query, key, capability):
    """Which kernel scaled_dot_product_attention runs on a GPU, causal and unmasked: (name, why).

    query (b, heads, s, d), key (b, KV heads, s, d). Hugging Face does not repeat KV heads that
    several query heads share, but sets enable_gqa (transformers, integrations/sdpa_attention.py).
    PyTorch takes the first kernel that can (transformers/cuda/sdp_utils.cpp, 2.11 to 2.14):

      flash              bfloat16, from compute capability 8.0 on, d up to 256
      memory-efficient   float32, from 8.0 on with d a multiple of 4; GQA from PyTorch 2.14 on
                         (its q_heads_per_kv, in cuda/mem_eff_attention/kernel_forward.h)
      math               all else: matmul, softmax, matmul, with an s x s matrix for every head
    """
    dtype, d = str(query.dtype).removeprefix("torch."), query.shape[-1]
    if dtype == "bfloat16" and capability >= 8:
        if d > 256:
            raise UnknownKernel(f"no prediction for heads of {d}; use a model with up to 256")
        why = f"{dtype}, compute capability {capability}"
        if capability >= 9:
            why += "; cuDNN's, which PyTorch prefers there, had the same peaks on an H200"
        return "flash", why
    if dtype != "float32":
        return "math", f"no other supports {dtype} on compute capability {capability}"
    if capability >= 8 and d % 4:
        return "math", f"flash supports no float32, memory-efficient no heads of {d}"
    if key.shape[1] != query.shape[1] and torch.__version__ < (2, 14):
        return "math", "flash supports no float32, memory-efficient no GQA before PyTorch 2.14"
    return "memory-efficient", "flash supports no float32"


def attention(capability, kernels, query, key, value, mask=None, dropout=0.0, causal=False, **how):
    """scaled_dot_product_attention on meta, with the kernel of a GPU, whose name goes to kernels.

    Left to itself, meta would always run math. As PyTorch's own, in transformers/attention.cpp.
    """
    aten, inputs = torch.ops.aten, (query, key, value)
    kernel, why = attention_kernel(query, key, capability)
    matrix = ", which makes the s x s matrix" if kernel == "math" else ""
    kernels.add(f"{kernel}{matrix} ({why})")
    if kernel == "math":
        return aten._scaled_dot_product_attention_math(*inputs, mask, dropout, causal, **how)[0]
    how.pop("enable_gqa", None)  # the other kernels see it by the shapes
    if mask is not None:  # of a sliding window, where the sequence is longer
        raise UnknownKernel("no prediction for sdpa with a sliding window; use --attn eager")
    if kernel == "flash":  # it takes heads of 8, 16, 24, ... numbers: others are padded
        d = query.shape[-1]
        inputs = [F.pad(x, (0, -d % 8)) if d % 8 else x for x in inputs]
        return aten._scaled_dot_product_flash_attention(*inputs, dropout, causal, **how)[0][..., :d]
    backward = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)  # keep logsumexp?
    rest = None, backward, dropout, causal
    return aten._scaled_dot_product_efficient_attention(*inputs, *rest, **how)[0]


def per_query_head(query, key):
    """Bytes of dk and dv of every query head, summed only then where several share a KV head."""
    return 2 * query.nbytes if key.shape[1] != query.shape[1] else 0


def flash_scratch(grad_out, query, key, *others):
    """What flash attention's backward takes: float32 sums of dq, and of a number a row.

    aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp, mha_bwd().
    """
    b, heads, s, d = query.shape
    rows, columns = math.ceil(s / 128) * 128, math.ceil(d / 32) * 32
    return 4 * b * heads * rows * (columns + 1) + per_query_head(query, key)


def efficient_scratch(grad_out, query, key, *others):
    """What memory-efficient attention's backward takes in float32: a number a row, and tiles of dq.

    cuda/mem_eff_attention/kernel_backward.h, workspace_size(): tiles of 64 x 64 numbers (or, the
    same but for rounding, 128 x 64), each with 16 bytes of lock and counter.
    """
    b, heads, s, d = query.shape
    tiles = math.ceil(s / 64) * math.ceil(d / 64)
    return b * heads * (4 * s + tiles * (16 + 4 * 64 * 64)) + per_query_head(query, key)


def softmax_scratch(grad, output, *others):
    """softmax's backward makes grad * output first: aten/src/ATen/native/cuda/SoftMax.cu."""
    return output.nbytes


SCRATCH = {  # kernels that take memory for themselves: its bytes, from their arguments
    "aten::_scaled_dot_product_flash_attention_backward": flash_scratch,
    "aten::_scaled_dot_product_efficient_attention_backward": efficient_scratch,
    "aten::_softmax_backward_data": softmax_scratch,
}
