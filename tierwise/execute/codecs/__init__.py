"""Tensors in fewer bytes: what a copy could carry, or the device hold, between two uses.

    encoded = encode(tensor, "zvc")       parts: plain tensors on the same device, encoded.nbytes together
    tensor  = decode(encoded)             the same bits, unless the codec is one of LOSSY

    zvc    zero-value compression: a bit for each value, and the values that are not zero              exact
    csr    rows of 256: a byte for the column of each value that is not zero, and the value            exact
    bits   a bool in a bit                                                                             exact
    fp16, bf16, fp8    rounded to a narrower number (fp8: e4m3, scaled by a power of two)              lossy

Not through `encode`, because they are read and not decoded, or need to know more than the tensor: what a ReLU's backward needs of its output
(bits.py), and the places of max pooling's maxima (pool_places.py).

The same bytes come out on every device, up to which NaN stands for a NaN that was rounded. On a GPU all but bf16 and the places of maxima are Triton
kernels where Triton is there (kernels.py, imported when first needed), signs and rounding for fp32, bf16 and fp16; what is left, and everything on
the CPU, is torch. Encoding zvc and csr waits for the device once, to learn how many values there are. How fast each is on an H200, and what that
makes of a link: benchmarks/results/h200, cases/codecs.py.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType

import torch

from ...errors import UnknownName
from . import bits, rounding, sparse_rows, zero_values
from .encoded import Encoded

Encode = Callable[[torch.Tensor], Encoded]
Decode = Callable[[Encoded], torch.Tensor]

CODECS: MappingProxyType[str, tuple[Encode, Decode]] = MappingProxyType(
    {
        "zvc": (zero_values.encode, zero_values.decode),
        "csr": (sparse_rows.encode, sparse_rows.decode),
        "bits": (bits.encode, bits.decode),
        **{name: (rounding.encoder(name), rounding.decode) for name in rounding.TYPES},
    }
)
LOSSY = frozenset(rounding.TYPES)

__all__ = ["CODECS", "LOSSY", "Encoded", "decode", "encode"]


def encode(tensor: torch.Tensor, codec: str) -> Encoded:
    if codec not in CODECS:
        raise UnknownName("codec", codec, sorted(CODECS))
    return CODECS[codec][0](tensor)


def decode(encoded: Encoded) -> torch.Tensor:
    return CODECS[encoded.codec][1](encoded)
