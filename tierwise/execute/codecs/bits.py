"""Eight bools in a byte, and a ReLU's backward from the signs of its output. On a GPU each is one pass over memory, by a Triton kernel."""

from __future__ import annotations

import torch

from .encoded import Encoded, dense, kernels_for, lies_as, row


def pack(flags: torch.Tensor) -> torch.Tensor:
    """A row of bools as bytes, the first in the lowest bit; the last byte is filled up with zeros."""
    padded = torch.nn.functional.pad(flags.view(torch.uint8), (0, -flags.numel() % 8))
    return (padded.view(-1, 8) << _shifts(flags.device)).sum(1, dtype=torch.uint8)


def unpack(packed: torch.Tensor, elements: int) -> torch.Tensor:
    flags = (packed.unsqueeze(1) >> _shifts(packed.device)) & 1
    return flags.view(-1)[:elements].view(torch.bool)


def _shifts(device: torch.device) -> torch.Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)


def encode(tensor: torch.Tensor) -> Encoded:
    """A tensor of bools, such as a dropout mask, in an eighth of its bytes."""
    if tensor.dtype is not torch.bool:
        raise TypeError(f"bits are made of bools, not of {tensor.dtype}; zvc and csr keep numbers")
    tensor = dense(tensor)
    flags = row(tensor)
    kernels = kernels_for(tensor)
    packed = kernels.pack_nonzero(flags) if kernels else pack(flags.view(torch.bool))
    return Encoded("bits", (packed,), torch.bool, tuple(tensor.shape), tensor.stride())


def decode(encoded: Encoded) -> torch.Tensor:
    (packed,) = encoded.parts
    kernels = kernels_for(packed)
    flags = (kernels.unpack if kernels else unpack)(packed, encoded.elements)
    return flags.as_strided(encoded.size, encoded.stride)


def signs(output: torch.Tensor) -> Encoded:
    """What a ReLU's backward needs of the ReLU's output: where it is not at or below zero, as torch asks (a NaN is not)."""
    output = dense(output)
    values = output.as_strided((output.numel(),), (1,))
    kernels = kernels_for(output)
    packed = kernels.pack_signs(values) if kernels and output.dtype in kernels.FLOATS else pack(~(values <= 0))
    return Encoded("bits", (packed,), torch.bool, tuple(output.shape), output.stride())


def relu_backward(gradient: torch.Tensor, signs: Encoded) -> torch.Tensor:
    """The bits of torch.ops.aten.threshold_backward(gradient, output, 0), but for NaNs of 16 bits on the CPU, which that replaces by others.

    One pass by a kernel where the gradient lies in memory as the output did; else by torch, from bits that are unpacked first.
    """
    kernels = kernels_for(gradient)
    if kernels and lies_as(gradient, signs):
        kept = torch.empty_strided(gradient.shape, gradient.stride(), dtype=gradient.dtype, device=gradient.device)
        kernels.keep_where_set(row(gradient), signs.parts[0], row(kept))
        return kept
    zero = torch.zeros((), dtype=gradient.dtype, device=gradient.device)
    return torch.where(decode(signs), gradient, zero)
