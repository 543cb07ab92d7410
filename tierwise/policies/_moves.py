"""Moves, and the runtime that carries them out: each is issued when its op is about to start, and what planning missed is caught on demand.

A planner that works on an ideal timeline says when a storage should leave and when it should be back. Copies run late, and then a list of
fixed frees and fetches waits for things nobody needs. So the moves are played on a clock, and the steps are written down as they happen:

- a storage sent out is given back when its copy ends, or earlier in the list if its bytes are needed (the allocation then waits for the copy);
- what is still here when its fetch is due stays; a fetch that finds no room is tried again before each op that follows;
- what an op needs and is not here is fetched while the op waits;
- if there is still no room, the storage needed last is sent out, to the fastest tier that has room.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from ..ir import Op, Problem, Schedule
from ._runtime import Homes, Runtime, swap_tiers

__all__ = ["Move", "carry_out", "swap_tiers"]


@dataclass(frozen=True, slots=True)
class Move:
    """Just before op `op` starts, send `storage` to `tier`; to the device's tier: fetch it."""

    op: int
    storage: int
    tier: str


def carry_out(problem: Problem, moves: Iterable[Move], *, home: Homes | None = None) -> Schedule:
    """The schedule of a runtime that is given these moves."""
    return _Carrier(problem, moves, home or {}).run()


class _Carrier(Runtime):
    def __init__(self, problem: Problem, moves: Iterable[Move], home: Homes) -> None:
        super().__init__(problem, home)
        self.moves: dict[int, list[Move]] = {}
        for move in moves:
            self.moves.setdefault(move.op, []).append(move)
        self.late: deque[int] = deque()  # fetches that found no room

    def before(self, op: Op) -> None:
        needed = self.bytes_needed(op)
        self.late.extend(move.storage for move in self.moves.get(op.id, ()) if move.tier == self.device)
        for move in self.moves.get(op.id, ()):
            if move.tier != self.device:
                self.send(move.storage, move.tier)
        while self.late and self.fetch_ahead(self.late[0], needed):
            self.late.popleft()
