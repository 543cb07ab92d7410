"""Numbers rounded to a narrower type while they wait for backward. Lossy: for whoever asked for it.

fp16 and fp8 have a short range. Values beyond it are scaled down by a power of two, which costs no digits; fp8 is always scaled to its full range.
In fp8, which has no infinities, they become NaN.

bf16 is torch's cast on every device, one pass over memory each way. fp16 and fp8 of fp32, bf16 and fp16 are Triton kernels on a GPU where Triton is
there: a pass for the largest, one to scale and round, and one to decode. Elsewhere, and of fp64, they are torch's ops: four passes and five, and two
or three to decode. The bytes are the same; only which NaN stands for a NaN in a type other than fp8 is up to the device's arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType

import torch

from .encoded import Encoded, dense, kernels_for

TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
# The largest number, 65504 and 448, as the bits of an fp32; and the greatest power of two to scale by. bf16 has the range of fp32.
RANGES = {"fp16": (0x477FE000, 0), "fp8": (0x43E00000, 100)}


def encoder(name: str) -> Callable[[torch.Tensor], Encoded]:
    return lambda tensor: encode(tensor, name)


def encode(tensor: torch.Tensor, name: str) -> Encoded:
    if not tensor.dtype.is_floating_point:
        raise TypeError(f"{name} rounds floating-point numbers, not {tensor.dtype}; zvc and csr keep numbers as they are")
    tensor = dense(tensor)
    values = tensor.as_strided((tensor.numel(),), (1,))
    kernels = _kernels(values, tensor.dtype, name)
    parts = kernels.encode_rounded(values, TYPES[name], *RANGES[name]) if kernels else _encode(values, name)
    return Encoded(name, parts, tensor.dtype, tuple(tensor.shape), tensor.stride())


def _encode(values: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    scale = torch.ones((), dtype=torch.float32, device=values.device)
    if name in RANGES and values.numel():
        scale = _scale(values, *RANGES[name])
        if name == "fp8":  # versions of torch differ in what they make of an infinity
            values = values.nan_to_num(nan=math.nan, posinf=math.nan, neginf=math.nan)
        if values.dtype is torch.float16:  # the scale of a small tensor is beyond its range
            values = values.to(torch.float32)
        values = values * scale.to(values.dtype)
    return values.to(TYPES[name]).view(torch.uint8), scale.view(1)


def _scale(values: torch.Tensor, limit: int, most: int) -> torch.Tensor:
    """The greatest power of two that leaves the largest finite value in range, but not above 2**most."""
    lowest, highest = values.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).aminmax()
    largest = torch.maximum(-lowest, highest).to(torch.float32)
    # In whole numbers, which no device rounds: the difference of the bits is that of the exponents, less one if the digits of the largest are more.
    power = ((limit - largest.view(torch.int32)) >> 23).clamp(max=most)
    return torch.where(largest > 0, ((power + 127) << 23).view(torch.float32), 1.0)


def decode(encoded: Encoded) -> torch.Tensor:
    rounded, scale = encoded.parts
    kernels = _kernels(rounded, encoded.dtype, encoded.codec)
    if not kernels:
        return _decode(encoded)
    tensor = torch.empty_strided(encoded.size, encoded.stride, dtype=encoded.dtype, device=rounded.device)
    kernels.decode_rounded(rounded.view(TYPES[encoded.codec]), scale, tensor.as_strided((tensor.numel(),), (1,)))
    return tensor


def _decode(encoded: Encoded) -> torch.Tensor:
    rounded, scale = encoded.parts
    values = rounded.view(TYPES[encoded.codec])
    if encoded.codec in RANGES:
        values = values.to(torch.float32) / scale  # in fp32 for the same reason
    return values.to(encoded.dtype).as_strided(encoded.size, encoded.stride)


def _kernels(values: torch.Tensor, dtype: torch.dtype, name: str) -> ModuleType | None:
    """The kernels, if they round this type of number to that one."""
    kernels = kernels_for(values) if name in RANGES else None
    return kernels if kernels and dtype in kernels.FLOATS else None
