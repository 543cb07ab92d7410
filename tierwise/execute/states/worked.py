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
        self._began: float | None = None

    @contextlib.contextmanager
    def on(self, elements: int) -> Iterator[None]:
        outermost, now = self._began is None, time.perf_counter()
        if outermost:
            self._began = now
        try:
            yield
        finally:
            seconds = 0.0
            if outermost and self._began is not None:
                seconds, self._began = time.perf_counter() - self._began, None
            self.work = Work(self.work.seconds + seconds, self.work.elements + elements)
