"""A module and its batch on fake CPU tensors: shapes, strides and who shares a storage with whom, and not one byte of data.

The user's module is copied, its tensors replaced on the way, so nothing it does while it is traced is left behind in it. Real tensors of any
device, meta tensors and fake tensors of anybody's mode all become fake CPU tensors of one mode of ours.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ..errors import CaptureError
from .torch_compat import FakeTensor, FakeTensorMode, UntypedStorage, fake_from_parts, meta_storage, new_fake_mode

_PLAIN_TYPES = (torch.Tensor, nn.Parameter, FakeTensor)


@contextlib.contextmanager
def on_fake_tensors() -> Iterator[None]:
    """Models that are built, and tensors that are made, in this context have shapes and no data."""
    with new_fake_mode(), torch.device("cpu"):
        yield


class Fakes:
    """Turns tensors into fake ones; a tensor, and a storage, always into the same."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self.mode = mode
        self._storages: dict[tuple[int, int], UntypedStorage] = {}  # by storage, and where in it: parts that nobody else touches are storages
        self._parts: dict[int, tuple[int, int]] = {}  # by tensor: first byte and bytes of such a part
        self._tensors: dict[int, torch.Tensor] = {}
        self._seen: list[torch.Tensor] = []  # an id is only good while its tensor lives

    def of(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        if (known := self._tensors.get(id(tensor))) is not None:
            return known
        _refuse_exotic(tensor, name)
        source = tensor.untyped_storage()
        first, nbytes = self._parts.get(id(tensor), (0, source.nbytes()))
        storage = self._storages.get((source._cdata, first))
        if storage is None:
            storage = self._storages[source._cdata, first] = meta_storage(nbytes)
        offset = int(tensor.storage_offset()) - first // tensor.element_size()
        made: torch.Tensor = fake_from_parts(self.mode, storage, offset, tensor.size(), tensor.stride(), tensor.dtype)
        if isinstance(tensor, nn.Parameter):
            made = nn.Parameter(made, requires_grad=tensor.requires_grad)
        elif tensor.requires_grad:
            made.requires_grad_(True)
        self._tensors[id(tensor)] = made
        self._seen.append(tensor)
        return made

    def made(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Every tensor that was turned into a fake one, with it."""
        return ((tensor, self._tensors[id(tensor)]) for tensor in self._seen)

    def of_module(self, model: nn.Module) -> nn.Module:
        """A copy of the module on fake tensors."""
        memo: dict[int, Any] = {}
        self._parts |= _parts(model)
        for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]:
            memo[id(tensor)] = self.of(tensor, name)
        try:
            with _CopiedAsFake(self):
                copied: nn.Module = copy.deepcopy(model, memo)
        except CaptureError:
            raise
        except Exception as error:
            raise CaptureError(
                f"{type(model).__name__} cannot be copied: {type(error).__name__}: {_first_line(error)}; capture copies a module (copy.deepcopy, "
                f"with its tensors replaced) so that tracing leaves nothing behind in it: move what cannot be copied (locks, open files) out of it"
            ) from error
        return copied

    def of_batch(self, value: Any, name: str = "batch") -> Any:
        """The batch with its tensors replaced, containers rebuilt, everything else as it is."""
        if isinstance(value, torch.Tensor):
            return self.of(value, name)
        if isinstance(value, Mapping):
            return {key: self.of_batch(part, f"{name}.{key}") for key, part in value.items()}
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*(self.of_batch(part, f"{name}.{field}") for field, part in zip(value._fields, value, strict=True)))
        if isinstance(value, (tuple, list)):
            return type(value)(self.of_batch(part, f"{name}.{place}") for place, part in enumerate(value))
        return value


class _CopiedAsFake(TorchFunctionMode):
    """Tensors that a module keeps as plain attributes, met while it is copied."""

    def __init__(self, fakes: Fakes) -> None:
        super().__init__()
        self.fakes = fakes

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is torch.Tensor.__deepcopy__:
            tensor, memo = args
            memo[id(tensor)] = self.fakes.of(tensor, "a tensor attribute")
            return memo[id(tensor)]
        return func(*args, **(kwargs or {}))


def _parts(model: nn.Module) -> dict[int, tuple[int, int]]:
    """By parameter, its part of a storage that it shares with others, where all have parts of their own: first byte, and bytes. What lies there side
    by side, as parameters that live elsewhere do, is captured as it would be apart."""
    sharing: dict[int, dict[int, tuple[int, int]]] = {}
    for parameter in model.parameters():
        size = parameter.element_size()
        extent = (
            1 + sum((length - 1) * stride for length, stride in zip(parameter.size(), parameter.stride(), strict=True)) if parameter.numel() else 0
        )
        sharing.setdefault(parameter.untyped_storage()._cdata, {})[id(parameter)] = int(parameter.storage_offset()) * size, extent * size
    found: dict[int, tuple[int, int]] = {}
    for parts in sharing.values():
        ranges = sorted(set(parts.values()))
        if len(ranges) > 1 and all(first + nbytes <= following for (first, nbytes), (following, _) in pairwise(ranges)):
            found |= parts
    return found


def _refuse_exotic(tensor: torch.Tensor, name: str) -> None:
    if type(tensor) not in _PLAIN_TYPES:
        raise CaptureError(
            f"{name} is a {type(tensor).__name__}; capture knows plain tensors and parameters: give it the model before it is sharded or quantised"
        )
    if tensor.layout is not torch.strided:
        raise CaptureError(f"{name} has the layout {tensor.layout}; capture knows dense (strided) tensors: convert it with .to_dense()")
    if any(not isinstance(extent, int) for extent in tensor.shape):
        raise CaptureError(f"{name} has the symbolic shape {tuple(tensor.shape)}; give capture a batch of a fixed size")


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).strip().splitlines()[0]
