"""What a codec makes of a tensor, and how a tensor is taken as a row of values and made from one again."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import torch

# Values are compared and moved as whole numbers of their size: -0.0 is not zero, and every NaN keeps its bits.
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Encoded:
    codec: str
    parts: tuple[torch.Tensor, ...]  # what is sent or held, each contiguous and of one dimension
    dtype: torch.dtype  # of what is decoded, as are
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return sum(part.numel() * part.element_size() for part in self.parts)

    @property
    def elements(self) -> int:
        count = 1
        for extent in self.size:
            count *= extent
        return count

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Encoded:
        """The same on another device."""
        parts = tuple(part.to(device, non_blocking=non_blocking) for part in self.parts)
        return Encoded(self.codec, parts, self.dtype, self.size, self.stride)


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor if its values lie side by side in some order, as channels-last ones do; else a contiguous copy."""
    extent = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda pair: pair[1]):
        if size != 1:
            if stride != extent:
                return tensor.contiguous()
            extent *= size
    return tensor


def row(tensor: torch.Tensor) -> torch.Tensor:
    """The values of a dense tensor as they lie, as whole numbers."""
    flat = tensor.as_strided((tensor.numel(),), (1,))
    if tensor.dtype is torch.bool:
        return flat.view(torch.uint8)
    return flat.view(WORDS[tensor.element_size()])


def empty_like_row(encoded: Encoded, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for what is decoded, and the same bytes as a row of whole numbers."""
    tensor = torch.empty_strided(encoded.size, encoded.stride, dtype=encoded.dtype, device=device)
    return tensor, row(tensor)


def lies_as(tensor: torch.Tensor, encoded: Encoded) -> bool:
    """Whether the tensor's values lie in memory in the order of those encoded; a stride counts only where there is more than one value."""
    strides = zip(tensor.shape, tensor.stride(), encoded.stride, strict=False)
    return tuple(tensor.shape) == encoded.size and all(size == 1 or mine == theirs for size, mine, theirs in strides)


def kernels_for(tensor: torch.Tensor) -> ModuleType | None:
    """The Triton kernels, where this tensor is on a GPU and Triton is installed."""
    if not tensor.is_cuda:
        return None
    try:
        from . import kernels
    except ImportError:
        return None
    return kernels
