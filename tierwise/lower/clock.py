"""What a search has spent, and what it need not."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Iterator


class Clock:
    """Seconds, or tries."""

    def __init__(self, counts: bool) -> None:
        self._counts, self._tries = counts, 0

    def now(self) -> float:
        return float(self._tries) if self._counts else time.monotonic()

    def tick(self) -> None:
        self._tries += 1


@contextlib.contextmanager
def no_search_for_garbage() -> Iterator[None]:
    """A search makes next to none, and looking for it among all that a process has takes a quarter of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
