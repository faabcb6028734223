"""What attention and softmax take on a GPU: which kernel PyTorch would run, and its own memory.

oom_search.py predicts with it. PyTorch's device "meta" runs none of these kernels.
"""

import math

import torch
import torch.nn.functional as F


class UnknownKernel(Exception):
    """No prediction: the message says of what there would be one."""


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
            raise UnknownKernel(f"bfloat16: no prediction for heads of {d}; up to 256 would do")
        why = f"{dtype}, compute capability {capability}"
        if capability >= 9:
            why += "; where PyTorch prefers cuDNN's, that one's memory is not known"
        return "flash", why
    if dtype != "float32":
        return "math", f"none other knows {dtype} on compute capability {capability}"
    if capability >= 8 and d % 4:
        return "math", f"flash knows no float32, memory-efficient no heads of {d}"
    if key.shape[1] != query.shape[1] and torch.__version__ < (2, 14):
        return "math", "flash knows no float32, memory-efficient no GQA before PyTorch 2.14"
    return "memory-efficient", "flash knows no float32"


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
        raise UnknownKernel("sdpa with a window: no prediction; --attn eager would do")
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
