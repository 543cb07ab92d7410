"""The formulas as one kernel for the card, in Triton: products and sums are not fused, quotients and roots are rounded as IEEE says.

Imported only where there is a card. Whether it has the bits of rules.py on this card and this compiler is checked once, before it is used.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
# Triton reads the annotations of a kernel, so only the ones it knows are written, and not as strings.

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from .rules import Rule

BLOCK = 1024
TYPES = (torch.float32, torch.bfloat16, torch.float16)


@triton.jit
def _gradient(g_ptr, at, there, scale, sign, l2, w, SCALED: tl.constexpr):
    g = tl.load(g_ptr + at, mask=there, other=0.0).to(tl.float32)
    if SCALED:
        g = (g * scale).to(g_ptr.dtype.element_ty).to(tl.float32)
    return g * sign + w * l2


@triton.jit
def _adam(
    w_ptr, g_ptr, m_ptr, v_ptr, out_ptr, count, scale,
    sign, l2, decay, beta1, rest1, beta2, rest2, root, eps, step,
    SCALED: tl.constexpr, HAS_OUT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = at < count
    w = tl.load(w_ptr + at, mask=there, other=0.0)
    g = _gradient(g_ptr, at, there, scale, sign, l2, w, SCALED)
    m = tl.load(m_ptr + at, mask=there, other=0.0) * beta1 + g * rest1
    v = tl.load(v_ptr + at, mask=there, other=0.0) * beta2 + (g * g) * rest2
    w = w * decay - tl.div_rn(m, tl.sqrt_rn(v) * root + eps) * step
    tl.store(m_ptr + at, m, mask=there)
    tl.store(v_ptr + at, v, mask=there)
    tl.store(w_ptr + at, w, mask=there)
    if HAS_OUT:
        tl.store(out_ptr + at, w.to(out_ptr.dtype.element_ty), mask=there)


@triton.jit
def _momentum(
    w_ptr, g_ptr, m_ptr, out_ptr, count, scale,
    sign, l2, keep, take, direct, through, lr,
    SCALED: tl.constexpr, HAS_OUT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = at < count
    w = tl.load(w_ptr + at, mask=there, other=0.0)
    g = _gradient(g_ptr, at, there, scale, sign, l2, w, SCALED)
    m = tl.load(m_ptr + at, mask=there, other=0.0) * keep + g * take
    w = w - (g * direct + m * through) * lr
    tl.store(m_ptr + at, m, mask=there)
    tl.store(w_ptr + at, w, mask=there)
    if HAS_OUT:
        tl.store(out_ptr + at, w.to(out_ptr.dtype.element_ty), mask=there)


@triton.jit
def _plain(
    w_ptr, g_ptr, out_ptr, count, scale, sign, l2, lr,
    SCALED: tl.constexpr, HAS_OUT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = at < count
    w = tl.load(w_ptr + at, mask=there, other=0.0)
    w = w - _gradient(g_ptr, at, there, scale, sign, l2, w, SCALED) * lr
    tl.store(w_ptr + at, w, mask=there)
    if HAS_OUT:
        tl.store(out_ptr + at, w.to(out_ptr.dtype.element_ty), mask=there)


_KERNELS = {"adam": _adam, "momentum": _momentum, "plain": _plain}


def can_run(gradient: torch.Tensor, out: torch.Tensor | None) -> bool:
    return gradient.dtype in TYPES and (out is None or out.dtype in TYPES)


def cuda_pass(
    rule: Rule,
    numbers: Sequence[float],
    weights: torch.Tensor,
    gradient: torch.Tensor,
    states: Sequence[torch.Tensor],
    out: torch.Tensor | None = None,
    *,
    scale: float = 1.0,
) -> None:
    """As rules.apply_rule, on the current stream; tensors are contiguous and on the card."""
    count = weights.numel()
    if count:
        _KERNELS[rule.name][(triton.cdiv(count, BLOCK),)](
            weights, gradient, *states, weights if out is None else out, count, scale, *numbers,
            SCALED=scale != 1.0, HAS_OUT=out is not None, BLOCK=BLOCK, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
