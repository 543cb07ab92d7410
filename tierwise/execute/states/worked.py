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
    """Counted by the one lane that updates, read by others at any moment: seconds up to then, and parameters chunk by chunk. An update may let in
    others between two of its chunks, all of a backward one within the other; who counted it as it ends would know of most parameters before any of
    the seconds."""

    def __init__(self) -> None:
        self._known: tuple[Work, float | None] = Work(), None  # until it began what it is at; in one piece, for whoever reads

    @property
    def work(self) -> Work:
        work, since = self._known
        return work if since is None else work._replace(seconds=work.seconds + time.perf_counter() - since)

    @contextlib.contextmanager
    def at_it(self) -> Iterator[None]:
        """What is let in meanwhile is counted once."""
        if self._known[1] is not None:
            yield
            return
        self._known = self.work, time.perf_counter()
        try:
            yield
        finally:
            self._known = self.work, None

    def did(self, elements: int) -> None:
        work, since = self._known
        self._known = work._replace(elements=work.elements + elements), since
