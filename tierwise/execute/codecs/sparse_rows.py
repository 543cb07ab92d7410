"""Gist's narrow sparse rows: rows of 256 values; for each that is not zero its column in one byte, and the value; and how many each row has."""

from __future__ import annotations

import torch

from .encoded import Encoded, dense, empty_like_row, kernels_for, row

WIDTH = 256


def encode(tensor: torch.Tensor) -> Encoded:
    tensor = dense(tensor)
    words = row(tensor)
    kernels = kernels_for(tensor)
    parts = kernels.encode_sparse_rows(words, WIDTH) if kernels else _encode(words)
    return Encoded("csr", parts, tensor.dtype, tuple(tensor.shape), tensor.stride())


def _encode(words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    places = words.nonzero().squeeze(1)
    rows = -(-words.numel() // WIDTH)
    counts = torch.bincount(places // WIDTH, minlength=rows)
    return (places % WIDTH).to(torch.uint8), words[places], counts.to(torch.int16)


def decode(encoded: Encoded) -> torch.Tensor:
    columns, values, counts = encoded.parts
    tensor, words = empty_like_row(encoded, values.device)
    kernels = kernels_for(values)
    if kernels:
        kernels.decode_sparse_rows(columns, values, counts, words, WIDTH)
        return tensor
    rows = torch.repeat_interleave(torch.arange(counts.numel(), device=values.device), counts.to(torch.int64))
    words.zero_()
    words[rows * WIDTH + columns.to(torch.int64)] = values
    return tensor
