"""A heap with two ends: first fit from the low end for what stays, from the high end for what goes, so that the two never riddle each other."""

from __future__ import annotations

from bisect import bisect_left


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
