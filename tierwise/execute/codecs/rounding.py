"""Numbers rounded to a narrower type while they wait for backward. Lossy: for whoever asked for it.

fp16 and fp8 have a short range. Values beyond it are scaled down by a power of two, which costs no digits; fp8 is always scaled to its full range.
In fp8, which has no infinities, they become NaN. By torch's own kernels on every device, each a pass over memory: one for bf16, four for fp16, five
for fp8, where one of ours could do all but the search for the largest.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from .encoded import Encoded, dense

TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}


def encoder(name: str) -> Callable[[torch.Tensor], Encoded]:
    return lambda tensor: encode(tensor, name)


def encode(tensor: torch.Tensor, name: str) -> Encoded:
    if not tensor.dtype.is_floating_point:
        raise TypeError(f"{name} rounds floating-point numbers, not {tensor.dtype}; zvc and csr keep numbers as they are")
    tensor, narrow = dense(tensor), TYPES[name]
    values = tensor.as_strided((tensor.numel(),), (1,))
    scale = torch.ones((), dtype=torch.float32, device=values.device)
    if name != "bf16" and values.numel():  # bf16 has the range of fp32
        scale = _scale(values, narrow, always=name == "fp8")
        if name == "fp8":  # versions of torch differ in what they make of an infinity
            values = values.nan_to_num(nan=math.nan, posinf=math.nan, neginf=math.nan)
        values = values * scale.to(values.dtype)
    return Encoded(name, (values.to(narrow).view(torch.uint8), scale.view(1)), tensor.dtype, tuple(tensor.shape), tensor.stride())


def _scale(values: torch.Tensor, narrow: torch.dtype, *, always: bool) -> torch.Tensor:
    """The power of two that brings the largest finite value into range; never so large that it is not a number itself."""
    lowest, highest = values.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).aminmax()
    largest = torch.maximum(-lowest, highest).to(torch.float32)
    exponent = torch.floor(torch.log2(torch.finfo(narrow).max / largest)).clamp(-126, 100)
    scale = torch.where(largest > 0, torch.exp2(exponent), 1.0)
    return scale if always else scale.clamp(max=1.0)


def decode(encoded: Encoded) -> torch.Tensor:
    narrow, scale = encoded.parts
    rounded = narrow.view(TYPES[encoded.codec])
    # Back in fp32: the scale of a small tensor is beyond the range of fp16.
    values = rounded.to(torch.float32) / scale if encoded.codec != "bf16" else rounded
    return values.to(encoded.dtype).as_strided(encoded.size, encoded.stride)
