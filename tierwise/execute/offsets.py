"""Offsets into one long block, first fit: the same requests in the same order get the same places, whatever the timing.

A range may be given back while a copy still reads or writes it. It is free at once, so that places depend on the plan alone; whoever takes
it next is told the events to come after.

Ctrl-C may come in the middle of anything, in a finalizer too, where Python drops it and what the finalizer was to do: a place that nobody holds
any more and nobody gave back is recovered when it is missed.
"""

from __future__ import annotations

import bisect
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

from .lanes import Event, settled


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class Place:
    """A range that is taken for as long as this lives, or until it is given back."""

    offset: int
    span_bytes: int
    after: tuple[Event, ...]  # what still uses these bytes


class Offsets:
    """Free ranges of [start, stop), sorted and never adjacent. Not for several threads at once: the owner holds the lock."""

    def __init__(self, start: int, stop: int) -> None:
        self._start, self._stop = start, stop
        self._free: list[tuple[int, int]] = [(start, stop)] if start < stop else []
        self._busy: list[tuple[int, int, Event]] = []
        self._taken: weakref.WeakSet[Place] = weakref.WeakSet()

    @property
    def free_bytes(self) -> int:
        return sum(stop - start for start, stop in self._free)

    @property
    def largest_bytes(self) -> int:
        return max((stop - start for start, stop in self._free), default=0)

    def take(self, nbytes: int, alignment: int) -> Place | None:
        """The lowest aligned place with room, None if there is none. `nbytes` is rounded up to the alignment."""
        nbytes = round_up(max(nbytes, 1), alignment)
        for index, (start, stop) in enumerate(self._free):
            offset = round_up(start, alignment)
            if offset + nbytes <= stop:
                place = Place(offset, nbytes, self._users(offset, offset + nbytes))
                self._taken.add(place)
                rest = [(start, offset), (offset + nbytes, stop)]
                self._free[index : index + 1] = [(low, high) for low, high in rest if low < high]
                return place
        return None

    def give(self, place: Place, after: Sequence[Event] = ()) -> None:
        """Return what `take` gave; `after` are the events until which its bytes are still in use."""
        start, stop = place.offset, place.offset + place.span_bytes
        self._busy += [(start, stop, settled(event)) for event in after if not event.done()]
        index = bisect.bisect(self._free, (start, stop))
        if index < len(self._free) and self._free[index][0] == stop:
            stop = self._free.pop(index)[1]
        if index > 0 and self._free[index - 1][1] == start:
            index -= 1
            start = self._free.pop(index)[0]
        self._free.insert(index, (start, stop))
        self._taken.discard(place)

    @property
    def lost_bytes(self) -> int:
        """What is neither free nor held by anybody."""
        return self._stop - self._start - self.free_bytes - sum(place.span_bytes for place in self._taken)

    def recover(self) -> None:
        """Everything is free that nobody holds. Only while nothing moves: who lost a place did not say what still uses it."""
        held = sorted((place.offset, place.offset + place.span_bytes) for place in self._taken)
        gaps = zip([self._start, *(stop for _, stop in held)], [*(start for start, _ in held), self._stop], strict=True)
        self._free = [(low, high) for low, high in gaps if low < high]

    def _users(self, start: int, stop: int) -> tuple[Event, ...]:
        self._busy = [user for user in self._busy if not user[2].done()]
        return tuple(event for low, high, event in self._busy if low < stop and start < high)


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
