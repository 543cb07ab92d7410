"""Whether the loop holds on to what the model returned. `out = model(x)` does until the step is over; `model(x).loss` does not, and what else was
returned, such as logits, is gone when backward needs the room. A plan begins by assuming that it does."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch

SMALLEST_BYTES = 1 << 20  # of what is worth looking after


class Returned:
    def __init__(self) -> None:
        self._last: list[tuple[weakref.ref[torch.Tensor], int]] = []
        self.held: bool | None = None  # in the last step that returned something large
        self.nbytes = 0

    def watch(self, tensors: Sequence[torch.Tensor]) -> None:
        """A pass has returned these."""
        self._last = [(weakref.ref(tensor), nbytes) for tensor in tensors if (nbytes := tensor.untyped_storage().nbytes()) >= SMALLEST_BYTES]

    def look(self) -> None:
        """Backward is over, and what autograd held is gone: who still holds something is the loop."""
        if self._last:
            self.held = any(tensor() is not None for tensor, _ in self._last)
            self.nbytes = sum(nbytes for _, nbytes in self._last)
            self._last = []
