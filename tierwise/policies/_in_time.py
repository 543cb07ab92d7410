"""About when copies and updates beside compute would run: the order in which a list had better name them.

Lanes and processors take their work in the order of the list, so a copy that is named early and can only start late keeps the others waiting. Here
pieces of work stand in rows, each in its own order, and whatever can start first does.
"""

from __future__ import annotations

import bisect
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
    start: float = -1.0  # once it is known
    end: float = -1.0

    def may_start(self, free: Mapping[str, float]) -> float | None:
        """None: something that comes before it has no time yet."""
        if any(other.end < 0 for other in self.after):
            return None
        return max((0.0, *(other.end for other in self.after), *(free.get(lane, 0.0) for lane in self.lanes)))


def piece(problem: Problem, row: str, steps: Sequence[Step], after: Iterable[Piece] = ()) -> Piece:
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
    return Piece(row, steps, tuple(lanes), seconds, list(after))


def run(pieces: Sequence[Piece]) -> list[Piece]:
    """All of them with their times, in the order in which they start."""
    rows: dict[str, deque[Piece]] = {}
    for piece in pieces:
        rows.setdefault(piece.row, deque()).append(piece)
    free: dict[str, float] = {}
    found: list[Piece] = []
    while rows:
        heads = [(start, number, row) for number, (row, waiting) in enumerate(rows.items()) if (start := waiting[0].may_start(free)) is not None]
        start, _, row = min(heads)
        piece = rows[row].popleft()
        if not rows[row]:
            del rows[row]
        piece.start, piece.end = start, start + piece.seconds
        free |= dict.fromkeys(piece.lanes, piece.end)
        found.append(piece)
    return found


def over_by(row: Sequence[Piece], when: float) -> int:
    """How many pieces of a row are over by then."""
    return bisect.bisect_right(row, when, key=lambda piece: piece.end)
