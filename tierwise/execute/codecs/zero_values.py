"""Zero-value compression: a bit for each value, the values that are not zero, and how many of those each block has.

Zero is what has no bit set; -0.0 and NaNs travel as they are. The counts let a kernel decode many blocks at once, and take two bytes each.
"""

from __future__ import annotations

import torch

from . import bits
from .encoded import Encoded, dense, empty_like_row, kernels_for, row

BLOCK = 4096  # values


def encode(tensor: torch.Tensor) -> Encoded:
    tensor = dense(tensor)
    words = row(tensor)
    kernels = kernels_for(tensor)
    parts = kernels.encode_zero_values(words, BLOCK) if kernels else _encode(words)
    return Encoded("zvc", parts, tensor.dtype, tuple(tensor.shape), tensor.stride())


def _encode(words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    there = words != 0
    blocks = torch.nn.functional.pad(there.view(torch.uint8), (0, -words.numel() % BLOCK)).view(-1, BLOCK)
    counts = blocks.sum(1, dtype=torch.int16)
    return bits.pack(there), words[there], counts


def decode(encoded: Encoded) -> torch.Tensor:
    mask, values, counts = encoded.parts
    tensor, words = empty_like_row(encoded, mask.device)
    kernels = kernels_for(mask)
    if kernels:
        kernels.decode_zero_values(mask, values, counts, words, BLOCK)
    else:
        words.zero_()
        words[bits.unpack(mask, encoded.elements)] = values
    return tensor
