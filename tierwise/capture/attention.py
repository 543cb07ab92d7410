"""Which kernel CUDA would run for scaled_dot_product_attention, called on fake CPU tensors: one op forward, one op backward.

    flash      fp16 or bf16, no mask, one head size up to 256; saves q, k, v, out, the log-sum-exp of each row in fp32, and the random state
    efficient  with a mask or in fp32; saves the mask too, and the log-sum-exp with rows rounded up to 32
    math       everything else: matmul, softmax, matmul, with the whole score matrix

Torch itself has shape rules and derivatives for CUDA's kernels, whatever the device of the tensors, so calling them is all it takes.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

_aten = torch.ops.aten
_FLASH_HEAD_SIZE_LIMIT = 256
_FLASH_HEAD_SIZE_MULTIPLE = 8  # other head sizes are padded with zeros
_MASK_MULTIPLE = 16  # the rows of a mask are padded to it


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    if _flash_works(query, key, value, attn_mask, is_causal):
        return _flash(query, key, value, dropout_p, is_causal, scale)
    bias = _as_bias(attn_mask, query.dtype)
    rows = (query, key, value) if attn_mask is None else (query, key, value, attn_mask)
    if _rows_have_no_gaps(*rows) and _efficient_works(query, key, value, is_causal and attn_mask is not None, enable_gqa):
        needs_grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
        bias = None if bias is None else _aligned(bias).expand(*query.shape[:3], key.shape[2])
        out: torch.Tensor = _aten._scaled_dot_product_efficient_attention.default(
            query, key, value, bias, needs_grad, dropout_p, is_causal, scale=scale
        )[0]
        return out
    out = _aten._scaled_dot_product_attention_math.default(query, key, value, bias, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa)[0]
    return out


def _rows_have_no_gaps(*tensors: torch.Tensor) -> bool:
    """Both fused kernels read whole rows; a mask made by permuting, as T5's is, sends CUDA to the plain matmuls."""
    return all(tensor.stride(-1) == 1 for tensor in tensors)


def _flash_works(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, is_causal: bool) -> bool:
    return (
        torch.backends.cuda.flash_sdp_enabled()  # type: ignore[no-untyped-call]
        and mask is None
        and all(tensor.dim() == 4 and tensor.dtype in (torch.float16, torch.bfloat16) for tensor in (query, key, value))
        and _rows_have_no_gaps(query, key, value)
        and query.shape[-1] == key.shape[-1] == value.shape[-1] <= _FLASH_HEAD_SIZE_LIMIT
        and not (is_causal and query.shape[2] != key.shape[2])
    )


def _flash(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout_p: float, is_causal: bool, scale: float | None) -> torch.Tensor:
    head_size = query.shape[-1]
    missing = -head_size % _FLASH_HEAD_SIZE_MULTIPLE
    if missing:
        query, key, value = (F.pad(tensor, (0, missing)) for tensor in (query, key, value))
    scale = 1.0 / math.sqrt(head_size) if scale is None else scale
    out: torch.Tensor = _aten._scaled_dot_product_flash_attention.default(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
    return out[..., :head_size] if missing else out


def _efficient_works(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal_and_masked: bool, grouped: bool) -> bool:
    multiple = 16 // query.element_size()  # head sizes must fill 128 bits
    return (
        torch.backends.cuda.mem_efficient_sdp_enabled()  # type: ignore[no-untyped-call]
        and all(tensor.dim() == 4 and tensor.dtype in (torch.float16, torch.bfloat16, torch.float32) for tensor in (query, key, value))
        and query.shape[-1] % multiple == 0
        and value.shape[-1] % multiple == 0
        and query.shape[1] == key.shape[1] == value.shape[1]
        and not is_causal_and_masked
        and not grouped
    )


def _as_bias(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    if mask is None or mask.dtype is not torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask.logical_not(), -math.inf)


def _aligned(bias: torch.Tensor) -> torch.Tensor:
    columns = bias.shape[-1]
    missing = -columns % _MASK_MULTIPLE
    return F.pad(bias, (0, missing))[..., :columns] if missing else bias
