"""What a search has spent."""

from __future__ import annotations

import time


class Clock:
    """Seconds, or tries."""

    def __init__(self, counts: bool) -> None:
        self._counts, self._tries = counts, 0

    def now(self) -> float:
        return float(self._tries) if self._counts else time.monotonic()

    def tick(self) -> None:
        self._tries += 1
