"""Offsets into one long block, first fit: the same requests in the same order get the same places, whatever the timing.

A range may be given back while a copy still reads or writes it. It is free at once, so that places depend on the plan alone; whoever takes
it next is told the events to come after.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import NamedTuple

from .lanes import Event, settled


class Place(NamedTuple):
    offset: int
    after: tuple[Event, ...]  # what still uses these bytes


class Offsets:
    """Free ranges of [start, stop), sorted and never adjacent. Not for several threads at once: the owner holds the lock."""

    def __init__(self, start: int, stop: int) -> None:
        self._free: list[tuple[int, int]] = [(start, stop)] if start < stop else []
        self._busy: list[tuple[int, int, Event]] = []

    @property
    def free_bytes(self) -> int:
        return sum(stop - start for start, stop in self._free)

    @property
    def largest_bytes(self) -> int:
        return max((stop - start for start, stop in self._free), default=0)

    def take(self, nbytes: int, alignment: int) -> Place | None:
        """The lowest aligned place with room, None if there is none. `nbytes` is rounded up to the alignment."""
        nbytes = _span(nbytes, alignment)
        for index, (start, stop) in enumerate(self._free):
            offset = round_up(start, alignment)
            if offset + nbytes <= stop:
                rest = [(start, offset), (offset + nbytes, stop)]
                self._free[index : index + 1] = [(low, high) for low, high in rest if low < high]
                return Place(offset, self._users(offset, offset + nbytes))
        return None

    def give(self, offset: int, nbytes: int, alignment: int, after: Sequence[Event] = ()) -> None:
        """Return what `take` gave; `after` are the events until which its bytes are still in use."""
        start, stop = offset, offset + _span(nbytes, alignment)
        self._busy += [(start, stop, settled(event)) for event in after if not event.done()]
        index = bisect.bisect(self._free, (start, stop))
        if index < len(self._free) and self._free[index][0] == stop:
            stop = self._free.pop(index)[1]
        if index > 0 and self._free[index - 1][1] == start:
            index -= 1
            start = self._free.pop(index)[0]
        self._free.insert(index, (start, stop))

    def _users(self, start: int, stop: int) -> tuple[Event, ...]:
        self._busy = [user for user in self._busy if not user[2].done()]
        return tuple(event for low, high, event in self._busy if low < stop and start < high)


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _span(nbytes: int, alignment: int) -> int:
    return round_up(max(nbytes, 1), alignment)
