"""Values where they are known: integer and boolean tensors that follow from the batch are computed for real beside their fake selves.

Code may then ask what eager code asks: whether a mask hides anything, how many labels there are, where a mask is true. What follows from parameters
and activations has no value, and a question about it is refused. A single random number, drawn to decide whether to skip a layer, is taken to be 0.5.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from .kinds import Traits, tensors_in, written_tensors
from .torch_compat import no_dispatch

UNKNOWN = object()
RANDOM_NUMBER = 0.5
RANDOM_NUMBER_NOTE = "a random number drawn with torch.rand([]), which models do to skip a layer now and then, was taken to be 0.5"
_ELEMENTS_LIMIT = 1 << 22  # of integers and booleans: a batch of token ids and its masks, not the square of them
_FLOAT_ELEMENTS_LIMIT = 1 << 12
_aten = torch.ops.aten


class Values:
    """The real value of some fake tensors."""

    def __init__(self) -> None:
        self._of: Any = WeakTensorKeyDictionary()
        self.notes: list[str] = []
        self._stale: set[int] = set()  # addresses of real storages that something unknown was written into

    def remember(self, fake: torch.Tensor, real: torch.Tensor) -> None:
        """The value of an input. It is copied: in-place ops of the step act on it."""
        if real.device.type != "meta" and type(real) is not type(fake) and not real.dtype.is_floating_point and real.numel() <= _ELEMENTS_LIMIT:
            self._of[fake] = real.detach().cpu().clone()

    def of(self, fake: torch.Tensor) -> torch.Tensor | None:
        real: torch.Tensor | None = self._of.get(fake)
        return None if real is None or real.untyped_storage()._cdata in self._stale else real

    def answer(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What an op returns whose result, or its shape, depends on values; UNKNOWN if they are not known."""
        if func is _aten.index.Tensor:
            return self._index(args)
        real = self._evaluated(func, args, kwargs)
        return UNKNOWN if real is UNKNOWN else _mapped(real, self._fake_of)

    def follow(self, func: Any, traits: Traits, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Compute what the op just did on known values too."""
        if traits.written_names:
            self._follow_writing(func, traits, args, kwargs, out)
            return
        outputs = list(tensors_in(out))
        if not outputs or not all(map(_is_small, outputs)):
            return
        if func is _aten.rand.default and not outputs[0].dim():
            with no_dispatch():
                self._of[out] = torch.tensor(RANDOM_NUMBER, dtype=out.dtype)
            self.notes.append(RANDOM_NUMBER_NOTE)
            return
        real = self._evaluated(func, args, kwargs)
        if real is not UNKNOWN:
            for fake, value in zip(outputs, tensors_in(real), strict=False):
                self._of[fake] = value

    def _follow_writing(self, func: Any, traits: Traits, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        written = [value for tensor in written_tensors(traits, args, kwargs) if (value := self.of(tensor)) is not None]
        if written and self._evaluated(func, args, kwargs) is UNKNOWN:
            self._stale.update(value.untyped_storage()._cdata for value in written)

    def _evaluated(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags or any(self.of(tensor) is None for tensor in tensors_in(args, tuple(kwargs.values()))):
            return UNKNOWN
        with no_dispatch():
            return func(*_mapped(args, self.of), **{name: _mapped(value, self.of) for name, value in kwargs.items()})

    def _fake_of(self, real: torch.Tensor) -> torch.Tensor:
        fake = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype)
        self._of[fake] = real
        return fake

    def _index(self, args: tuple[Any, ...]) -> Any:
        """tensor[mask]: with the mask known, the places where it is true."""
        tensor, indices = args
        if not any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices):
            return UNKNOWN
        places: list[torch.Tensor | None] = []
        for index in indices:
            if index is None or index.dtype not in (torch.bool, torch.uint8):
                places.append(index)
            elif (mask := self.of(index)) is None:
                return UNKNOWN
            else:
                with no_dispatch():
                    count, dimensions = int(mask.count_nonzero()), mask.dim()
                places.extend(torch.empty(count, dtype=torch.int64) for _ in range(dimensions))
        return _aten.index.Tensor(tensor, places)


def _is_small(tensor: torch.Tensor) -> bool:
    return tensor.numel() <= (_FLOAT_ELEMENTS_LIMIT if tensor.dtype.is_floating_point else _ELEMENTS_LIMIT)


def _mapped(value: Any, change: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, (tuple, list)):
        return type(value)(_mapped(part, change) for part in value)
    return value
