"""Heaps: who gets which bytes when they ask for some, without knowing what comes.

A heap with two ends takes the first fit from the low end for what stays and from the high end for what goes, so that the two never riddle each
other; used from the low end alone it is first fit, and it can also take the best fit. Slots of size classes are cut once and never join again.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from heapq import heappop, heappush


class TwoEndedHeap:
    """Byte offsets in [0, capacity), handed out in whole pages."""

    def __init__(self, capacity_bytes: int, *, page_bytes: int = 1) -> None:
        self.page_bytes = page_bytes
        whole = capacity_bytes // page_bytes * page_bytes
        self._holes: list[tuple[int, int]] = [(0, whole)] if whole else []  # (start, end), sorted, never touching each other

    def pages(self, nbytes: int) -> int:
        """Bytes rounded up to whole pages."""
        return -(-nbytes // self.page_bytes) * self.page_bytes

    def take_low(self, nbytes: int) -> int | None:
        """The lowest offset with room, or None."""
        size = self.pages(nbytes)
        for at, (start, end) in enumerate(self._holes):
            if end - start >= size:
                self._replace(at, (start + size, end))
                return start
        return None if size else 0

    def take_high(self, nbytes: int) -> int | None:
        """The highest offset with room, or None."""
        size = self.pages(nbytes)
        for at in range(len(self._holes) - 1, -1, -1):
            start, end = self._holes[at]
            if end - start >= size:
                self._replace(at, (start, end - size))
                return end - size
        return None if size else 0

    def take_best(self, nbytes: int) -> int | None:
        """The low end of the smallest hole with room, the lowest of equals, or None."""
        size = self.pages(nbytes)
        fits = [(end - start, at) for at, (start, end) in enumerate(self._holes) if end - start >= size]
        if not size or not fits:
            return None if size else 0
        at = min(fits)[1]
        start, end = self._holes[at]
        self._replace(at, (start + size, end))
        return start

    def give_back(self, offset: int, nbytes: int) -> None:
        start, end = offset, offset + self.pages(nbytes)
        if start == end:
            return
        at = bisect_left(self._holes, (start, end))
        if at < len(self._holes) and self._holes[at][0] == end:
            end = self._holes.pop(at)[1]
        if at and self._holes[at - 1][1] == start:
            at -= 1
            start = self._holes.pop(at)[0]
        self._holes.insert(at, (start, end))

    def largest_hole_bytes(self) -> int:
        return max((end - start for start, end in self._holes), default=0)

    def _replace(self, at: int, hole: tuple[int, int]) -> None:
        if hole[0] < hole[1]:
            self._holes[at] = hole
        else:
            del self._holes[at]


class SizeClassHeap:
    """Slots of a few sizes, cut from the low end as they are first needed; a slot is only ever used for its own class."""

    def __init__(self, capacity_bytes: int, class_bytes: Callable[[int], int]) -> None:
        self.capacity_bytes, self.class_bytes = capacity_bytes, class_bytes
        self.height_bytes = 0
        self._free: dict[int, list[int]] = {}  # class -> offsets of its free slots, a heap

    def take(self, nbytes: int) -> int | None:
        size = self.class_bytes(nbytes) if nbytes else 0
        free = self._free.setdefault(size, [])
        if free:
            return heappop(free)
        if self.height_bytes + size > self.capacity_bytes:
            return None
        self.height_bytes += size
        return self.height_bytes - size

    def give_back(self, offset: int, nbytes: int) -> None:
        if nbytes:
            heappush(self._free[self.class_bytes(nbytes)], offset)


def quarter_powers(nbytes: int) -> int:
    """A size rounded up to one of four steps between powers of two, as caching allocators have them: at most a quarter is wasted."""
    step = 1 << max(0, nbytes.bit_length() - 3)
    return -(-nbytes // step) * step
