"""How a tensor lies in its storage, so that its bytes can travel and the tensor be rebuilt, bit for bit, on other bytes."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Layout:
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # in elements, from the start of the storage
    conjugate: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Layout:
        return cls(tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), tensor.is_conj())

    def on(self, storage: torch.UntypedStorage, start_bytes: int) -> torch.Tensor:
        """The tensor whose storage has been laid down at `start_bytes` of this one."""
        offset = self.offset + start_bytes // self.dtype.itemsize
        tensor = torch.empty(0, dtype=self.dtype, device=storage.device).set_(storage, offset, self.size, self.stride)
        return tensor.conj() if self.conjugate else tensor


def copyable(tensor: torch.Tensor) -> bool:
    """Whether a tensor is nothing but a layout over bytes. Sparse, quantized and wrapper tensors are more than that."""
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided and not tensor.is_quantized
