"""How long the CPU has been at updates, and how many parameters these were of."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import NamedTuple


class Work(NamedTuple):
    """Since the beginning."""

    seconds: float = 0.0
    elements: int = 0


class Worked:
    """Counted by the one lane that updates, read by others. What is let in between two chunks of an update is counted once."""

    def __init__(self) -> None:
        self.work = Work()
        self._is_at_it = False

    @contextlib.contextmanager
    def on(self, elements: int) -> Iterator[None]:
        is_let_in, self._is_at_it, began = self._is_at_it, True, time.perf_counter()
        try:
            yield
        finally:
            self._is_at_it = is_let_in
            seconds = 0.0 if is_let_in else time.perf_counter() - began
            self.work = Work(self.work.seconds + seconds, self.work.elements + elements)
