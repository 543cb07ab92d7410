"""A region's example on fake tensors becomes one on real ones, to be run and timed: same shapes, strides and sharing, random numbers in them.

Numbers are of the size they have in a model that has just been made, since a chip's speed depends on its data: zeros draw less power than any
training does, and overflows or denormals never end.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from .joint import RegionExample

MATRIX_SPREAD = 0.02  # what Transformers are initialised with
VECTOR_LOW, VECTOR_HIGH = 0.5, 1.5  # weights of norms, and variances, which must not be negative


def materialise(example: RegionExample, device: torch.device) -> RegionExample:
    """A copy of the module and of what it is called with, on real tensors; each call makes one that shares nothing with another."""
    rows = [module.num_embeddings for module in example.module.modules() if isinstance(module, nn.Embedding)]
    real = _Real(device, indices=min(rows, default=1))
    memo: dict[int, Any] = {}
    for tensor in (*example.module.parameters(), *example.module.buffers()):
        memo[id(tensor)] = real.lasting(tensor)
    with _CopiedAsReal(real):
        module = copy.deepcopy(example.module, memo)
    return RegionExample(module, tree_map(real.argument, example.args), tree_map(real.argument, example.kwargs))


class _Real:
    """Turns tensors into real ones; a tensor, and a storage, always into the same."""

    def __init__(self, device: torch.device, indices: int) -> None:
        self.device, self.indices = device, indices
        self._storages: dict[int, torch.Tensor] = {}
        self._tensors: dict[int, torch.Tensor] = {}

    def lasting(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._of(tensor, is_lasting=True)

    def argument(self, value: Any) -> Any:
        return self._of(value, is_lasting=False) if isinstance(value, torch.Tensor) else copy.copy(value)

    def _of(self, tensor: torch.Tensor, *, is_lasting: bool) -> torch.Tensor:
        if id(tensor) not in self._tensors:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._storages:
                count = storage.nbytes() // tensor.element_size()
                self._storages[storage._cdata] = self._numbers(tensor.dtype, count, spread=1.0 if not is_lasting else None, dims=tensor.dim())
            numbers = self._storages[storage._cdata].view(tensor.dtype)
            made = torch.as_strided(numbers, tensor.shape, tensor.stride(), int(tensor.storage_offset()))
            if isinstance(tensor, nn.Parameter):
                made = nn.Parameter(made, requires_grad=tensor.requires_grad)
            self._tensors[id(tensor)] = made.requires_grad_(tensor.requires_grad)
        return self._tensors[id(tensor)]

    def _numbers(self, dtype: torch.dtype, count: int, *, spread: float | None, dims: int) -> torch.Tensor:
        made = torch.empty(count, dtype=dtype, device=self.device)
        if dtype is torch.bool:
            return made.fill_(True)
        if not dtype.is_floating_point and not dtype.is_complex:
            return made.random_(0, max(1, min(self.indices, torch.iinfo(dtype).max)))
        if spread is None and dims < 2:
            return made.uniform_(VECTOR_LOW, VECTOR_HIGH)
        return made.normal_(0.0, MATRIX_SPREAD if spread is None else spread)


class _CopiedAsReal(TorchFunctionMode):
    """Tensors that a module keeps as plain attributes, met while it is copied."""

    def __init__(self, real: _Real) -> None:
        super().__init__()
        self.real = real

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is torch.Tensor.__deepcopy__:
            tensor, memo = args
            memo[id(tensor)] = self.real.lasting(tensor)
            return memo[id(tensor)]
        return func(*args, **(kwargs or {}))
