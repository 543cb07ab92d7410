"""Where max pooling found each maximum: torch keeps eight bytes for it, four bits say which value of the window it was."""

from __future__ import annotations

from dataclasses import dataclass

import torch

MOST = 16  # values in a window that four bits can tell apart


@dataclass(frozen=True, slots=True)
class Places:
    """Indices of torch.nn.functional.max_pool2d(..., return_indices=True), with what their windows were."""

    nibbles: torch.Tensor
    size: tuple[int, ...]
    input_width: int
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]

    @property
    def nbytes(self) -> int:
        return self.nibbles.numel()


def encode(indices: torch.Tensor, input_width: int, kernel: tuple[int, int], stride: tuple[int, int], padding: tuple[int, int] = (0, 0)) -> Places:
    if kernel[0] * kernel[1] > MOST:
        raise ValueError(f"a window of {kernel[0]} by {kernel[1]} has more than {MOST} values, and four bits cannot tell them apart")
    top, left = _corners(indices, stride, padding)
    within = (indices // input_width - top) * kernel[1] + (indices % input_width - left)
    flat = torch.nn.functional.pad(within.to(torch.uint8).flatten(), (0, within.numel() % 2))
    return Places(flat[::2] | (flat[1::2] << 4), tuple(indices.shape), input_width, kernel, stride, padding)


def decode(places: Places) -> torch.Tensor:
    pairs = torch.stack((places.nibbles & 15, places.nibbles >> 4), 1).flatten()
    count = 1
    for extent in places.size:
        count *= extent
    within = pairs[:count].to(torch.int64).view(places.size)
    top, left = _corners(within, places.stride, places.padding)
    return (top + within // places.kernel[1]) * places.input_width + left + within % places.kernel[1]


def _corners(indices: torch.Tensor, stride: tuple[int, int], padding: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The row and the column in the input at which each output's window begins."""
    rows = torch.arange(indices.shape[-2], device=indices.device) * stride[0] - padding[0]
    columns = torch.arange(indices.shape[-1], device=indices.device) * stride[1] - padding[1]
    return rows.unsqueeze(1), columns
