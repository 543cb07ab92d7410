"""What memory holds while a program runs, as a sum over calls: whether it fits is a few additions of arrays, and no image is made for it.

A call adds what it saves between its forward and its backward, and what it takes while it runs. Who sends takes bytes away again between the call
after which they are gone and the one before which they come back. Everything else of the step is there in any case.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Whole = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Sending:
    """Who sends what, and when."""

    senders: tuple[int, ...] = ()  # places in the order of calls
    level: int = 0  # of their hulls
    part: float = 1.0  # of what they save
    release: int = 1
    fetch: int = 1


class Holding:
    """Arrays by place of a call in the order of calls and, where that matters, by level of its hull."""

    def __init__(
        self,
        besides: Whole,  # by op: what is there whatever the calls do
        forward: Sequence[int],  # ops
        backward: Sequence[int],
        saved: Sequence[Sequence[int]],
        scratch: Sequence[Sequence[tuple[int, int]]],  # in forward and in backward
        sent: Mapping[float, Sequence[Sequence[int]]],  # by part
        outside: Mapping[int, int],  # what goes with the call of a place, besides
    ) -> None:
        self._besides, self._outside = besides, outside
        self._forward, self._backward = np.array(forward, dtype=np.int64), np.array(backward, dtype=np.int64)
        self._places = np.arange(len(forward))
        self._saved = _padded(saved)
        self._ahead = _padded([[ahead for ahead, _ in levels] for levels in scratch])
        self._behind = _padded([[behind for _, behind in levels] for levels in scratch])
        self._sent = {part: _padded(levels) for part, levels in sent.items()}

    def peak_bytes(self, levels: Whole, sending: Sending) -> int:
        """With every call at a level of its hull."""
        change = np.zeros(len(self._besides) + 1, dtype=np.int64)
        held = self._besides.copy()
        if len(self._places):
            saved = self._saved[self._places, levels]
            change[self._forward] = saved
            change[self._backward + 1] -= saved
            held[self._forward] += self._ahead[self._places, levels]
            held[self._backward] += self._behind[self._places, levels]
        if sending.senders:
            self._take_away(change, levels, sending)
        held += np.cumsum(change[:-1])
        return int(held.max(initial=0))

    def _take_away(self, change: Whole, levels: Whole, sending: Sending) -> None:
        senders, last = np.array(sending.senders), len(self._places) - 1
        nbytes = self._sent[sending.part][senders, levels[senders]]
        gone = np.maximum(self._forward[np.minimum(senders + sending.release, last)], self._forward[senders]) + 1
        back = self._backward[np.minimum(senders + sending.fetch, last)]
        away = np.where(gone < back, nbytes, 0)
        np.subtract.at(change, gone, away)
        np.add.at(change, back, away)
        for place, more in self.outside_of(sending.senders):
            left = int(self._forward[min(place + sending.release - 1, last)]) + 1
            there = int(self._backward[min(place + sending.fetch - 1, last)])
            if left < there:
                change[left] -= more
                change[there] += more

    def outside_of(self, senders: Sequence[int]) -> list[tuple[int, int]]:
        """What goes with these, and its bytes."""
        away = {*senders}
        return [(place, nbytes) for place, nbytes in self._outside.items() if place in away]


def _padded(rows: Sequence[Sequence[int]]) -> Whole:
    """Rows of one length, the last number again where one is short."""
    width = max(map(len, rows), default=0)
    return np.array([[*row, *[row[-1]] * (width - len(row))] for row in rows], dtype=np.int64).reshape(len(rows), width)
