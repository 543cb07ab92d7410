"""About when copies and updates beside compute would run: the order in which a list had better name them.

Lanes and processors take their work in the order of the list, so a copy that is named early and can only start late keeps the others waiting. Here
pieces of work stand in rows, each in its own order, and whatever can start first does. Pieces with a rank stand in no order: of those that can start
the one with the least rank does.
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ..ir import Compute, Copy, Problem, Step


@dataclass(slots=True, eq=False)
class Piece:
    """Steps that stand together in the list."""

    row: str
    steps: Sequence[Step]
    lanes: tuple[str, ...]
    seconds: float
    after: list[Piece] = field(default_factory=list)
    rank: int | None = None
    start: float = -1.0  # once it is known
    end: float = -1.0
    known_ready: float | None = None

    def ready(self) -> float | None:
        """When all that comes before it is over; None: something of that has no time yet."""
        if self.known_ready is None:
            latest = 0.0
            for other in self.after:
                if other.end < 0:
                    return None
                latest = max(latest, other.end)
            self.known_ready = latest
        return self.known_ready


class _Row:
    """Pieces in their order."""

    def __init__(self) -> None:
        self._waiting: deque[Piece] = deque()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def put(self, piece: Piece) -> None:
        self._waiting.append(piece)

    def first(self, free: Mapping[str, float]) -> tuple[float, Piece] | None:
        """What starts next, and when; None if that is not known yet."""
        head = self._waiting[0]
        ready = head.ready()
        return None if ready is None else (_when_free(head.lanes, free, ready), head)

    def take(self, piece: Piece) -> None:
        self._waiting.popleft()


class _ByRank(_Row):
    """Pieces of one lane, of which whoever can start is known in the order they were put."""

    def __init__(self) -> None:
        super().__init__()
        self._coming: list[tuple[float, int, Piece]] = []  # by when they are ready
        self._there: list[tuple[int, float, int, Piece]] = []  # by rank
        self._count = 0

    def __bool__(self) -> bool:
        return bool(self._waiting or self._coming or self._there)

    def first(self, free: Mapping[str, float]) -> tuple[float, Piece] | None:
        while self._waiting and (ready := self._waiting[0].ready()) is not None:
            heapq.heappush(self._coming, (ready, self._count, self._waiting.popleft()))
            self._count += 1
        if not self._coming and not self._there:
            return None
        now = _when_free((self._there or self._coming)[0][-1].lanes, free)
        while self._coming and (self._coming[0][0] <= now or not self._there):
            ready, number, piece = heapq.heappop(self._coming)
            now = max(now, ready)
            assert piece.rank is not None
            heapq.heappush(self._there, (piece.rank, ready, number, piece))
        return max(now, self._there[0][1]), self._there[0][-1]

    def take(self, piece: Piece) -> None:
        assert heapq.heappop(self._there)[-1] is piece


def piece(problem: Problem, row: str, steps: Sequence[Step], after: Iterable[Piece] = (), rank: int | None = None) -> Piece:
    """With what the machine takes for it."""
    lanes: dict[str, None] = {}
    seconds = 0.0
    for step in steps:
        if isinstance(step, Copy):
            lanes |= dict.fromkeys(problem.machine.link(step.src, step.dst).lanes)
            seconds += problem.machine.copy_seconds(problem.graph.storages[step.storage].nbytes, step.src, step.dst)
        elif isinstance(step, Compute):
            lanes[step.on] = None
            seconds += problem.seconds(step.op, step.on, step.variant)
    return Piece(row, steps, tuple(lanes), seconds, list(after), rank)


def run(pieces: Sequence[Piece]) -> list[Piece]:
    """All of them with their times, in the order in which they start."""
    rows: dict[str, _Row] = {}
    for piece in pieces:
        rows.setdefault(piece.row, _Row() if piece.rank is None else _ByRank()).put(piece)
    free: dict[str, float] = {}
    found: list[Piece] = []
    waiting = list(rows.values())
    firsts: list[tuple[float, Piece] | None] = [None] * len(waiting)
    while waiting:
        best, start = -1, math.inf
        for number, row in enumerate(waiting):
            first = firsts[number]
            if first is None:
                first = firsts[number] = row.first(free)
            if first is not None and first[0] < start:
                best, start = number, first[0]
        piece = firsts[best][1]  # type: ignore[index]
        waiting[best].take(piece)
        piece.start, piece.end = start, start + piece.seconds
        free |= dict.fromkeys(piece.lanes, piece.end)
        found.append(piece)
        firsts[best] = None
        if not waiting[best]:
            del waiting[best], firsts[best]
        # What shares a lane with it may start later now; of a row without an order somebody else may, who waited for it.
        taken = {*piece.lanes}
        for number, first in enumerate(firsts):
            if first is not None and (not taken.isdisjoint(first[1].lanes) or isinstance(waiting[number], _ByRank)):
                firsts[number] = None
    return found


def _when_free(lanes: Sequence[str], free: Mapping[str, float], earliest: float = 0.0) -> float:
    for lane in lanes:
        if (when := free.get(lane, 0.0)) > earliest:
            earliest = when
    return earliest


def over_by(row: Sequence[Piece], when: float) -> int:
    """How many pieces of a row are over by then."""
    return bisect.bisect_right(row, when, key=lambda piece: piece.end)
