"""coop: evict a window of neighbours in memory, the cheapest that makes enough room in one piece, and keep cheap storages apart from costly ones.

Paper    Zhang, Ma, Liu, Yuan, NeurIPS 2023, arXiv:2311.00591; rules as in OneFlow's remat allocator.
Idea     bytes in ten places do not make room for one storage: what is evicted must lie side by side, or it was evicted for nothing.
Rule     a storage costs  (its seconds + those of its evicted neighbours, by union-find) / age.  If no hole is large enough, slide a window over
         the addresses, across holes and what may be evicted, and evict the window of the least total cost that is large enough.
         A new storage goes into the smallest hole that takes it: outputs of products and convolutions at its low end, the rest at its high end.
         What is updated in place stays where it is.
Differs  as in that code, a storage's cost is not divided by its bytes, as DTR's is: the window has the bytes that are asked for. Alignment,
         OneFlow's groups of addresses and its area for small tensors are left out. Gradients stay until their update unless evict_gradients, as in
         dtr. A plan that recomputes more than recompute_limit times the step's own seconds is refused.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import replace

from ..errors import InfeasibleBudget
from ..ir import Op, Problem, Role, Schedule
from ..ir.schedule import AT_START, WORKSPACE
from ..units import format_bytes
from ._blocks import is_work
from ._evict import Groups, Replay, Run

DECIDES = "what to recompute, and every address"
FIDELITY = "faithful"
EXECUTABLE = "simulated only: it places every storage at an address, and torch's allocator takes none"


def plan(problem: Problem, *, partition: bool = True, recompute_limit: float = 1.0, evict_gradients: bool = False) -> Schedule:
    """partition: cheap storages from the other end."""
    exempt = [] if evict_gradients else [s.id for s in problem.graph.storages if s.role is Role.GRAD]
    return _Addressed(problem, Groups(), partition=partition, recompute_limit=recompute_limit, exempt=exempt).run()


class Arena:
    """Which bytes are whose: taken ranges and the holes between them, by address."""

    def __init__(self, capacity_bytes: int) -> None:
        self.holes: list[tuple[int, int]] = [(0, capacity_bytes)] if capacity_bytes else []  # (start, end), sorted, never touching
        self.taken: list[tuple[int, int, int]] = []  # (start, end, owner), sorted

    def take(self, nbytes: int, owner: int, *, from_high_end: bool = False) -> int | None:
        """An end of the smallest hole with room, the lowest of equals; None if there is no such hole."""
        if not nbytes:
            return 0
        fits = [(end - start, at) for at, (start, end) in enumerate(self.holes) if end - start >= nbytes]
        if not fits:
            return None
        at = min(fits)[1]
        start, end = self.holes[at]
        offset = end - nbytes if from_high_end else start
        rest = (start, offset) if from_high_end else (offset + nbytes, end)
        if rest[0] < rest[1]:
            self.holes[at] = rest
        else:
            del self.holes[at]
        insort(self.taken, (offset, offset + nbytes, owner))
        return offset

    def give_back(self, offset: int, nbytes: int) -> None:
        if not nbytes:
            return
        del self.taken[bisect_left(self.taken, (offset,))]
        start, end = offset, offset + nbytes
        at = bisect_left(self.holes, (start, end))
        if at < len(self.holes) and self.holes[at][0] == end:
            end = self.holes.pop(at)[1]
        if at and self.holes[at - 1][1] == start:
            at -= 1
            start = self.holes.pop(at)[0]
        self.holes.insert(at, (start, end))

    def take_at(self, offset: int, nbytes: int, owner: int) -> bool:
        """Exactly these bytes; False if they are not all free."""
        if not nbytes:
            return True
        at = bisect_left(self.holes, (offset + 1,)) - 1
        if at < 0 or self.holes[at][1] < offset + nbytes:
            return False
        start, end = self.holes[at]
        self.holes[at : at + 1] = [hole for hole in ((start, offset), (offset + nbytes, end)) if hole[0] < hole[1]]
        insort(self.taken, (offset, offset + nbytes, owner))
        return True

    def pieces(self) -> Iterator[tuple[int, int | None]]:
        """(bytes, owner or None for a hole) by address."""
        holes = iter(self.holes)
        hole = next(holes, None)
        for start, end, owner in self.taken:
            if hole is not None and hole[0] < start:
                yield hole[1] - hole[0], None
                hole = next(holes, None)
            yield end - start, owner
        if hole is not None:
            yield hole[1] - hole[0], None


class _Addressed(Replay):
    """A replay in which everything has an address."""

    def __init__(self, problem: Problem, chooser: Groups, *, partition: bool, recompute_limit: float, exempt: list[int]) -> None:
        self.arena = Arena(problem.budget_bytes)
        self.groups, self.partition = chooser, partition
        self.addresses: dict[tuple[int, int], int] = {}
        self.offset: dict[int, int] = {}
        self.reserved: set[int] = set()  # lasting storages nobody reads before they are written: theirs from the start, named when written
        self.transient: list[tuple[int, int]] = []  # (offset, bytes) for the duration of an op
        super().__init__(problem, chooser, recompute_limit=recompute_limit, exempt=exempt)

    def run(self) -> Schedule:
        graph = self.graph
        for storage in graph.storages:
            at_start = graph.is_there_at_start(storage.id)
            if at_start or (storage.lasting and self.problem.cyclic):
                offset = self.arena.take(storage.nbytes, storage.id)
                if offset is None:
                    break  # the replay refuses, with the bytes
                self.offset[storage.id] = offset
                if at_start:
                    self.addresses[AT_START, storage.id] = offset
                else:
                    self.reserved.add(storage.id)
        return replace(super().run(), addresses=self.addresses)

    def _make_room(self, op: Op) -> None:
        """Just before an op: addresses for all it makes and for its workspace."""
        taken_over = {new for _, new in op.in_place}
        claims: list[tuple[int, int]] = []
        if op.workspace_bytes:
            offset = self._find(op, WORKSPACE, op.workspace_bytes)
            self.transient.append((offset, op.workspace_bytes))
            claims.append((WORKSPACE, offset))
        for storage in dict.fromkeys(op.writes):
            nbytes = self.graph.storages[storage].nbytes
            if storage in taken_over:
                continue
            if storage in self.reserved:
                self.reserved.discard(storage)
                claims.append((storage, self.offset[storage]))
            elif storage not in self.offset:
                self.offset[storage] = self._find(op, storage, nbytes)
                claims.append((storage, self.offset[storage]))
            elif not self.graph.storages[storage].lasting:  # still here: made a second time
                offset = self._find(op, storage, nbytes)
                self.transient.append((offset, nbytes))
                claims.append((storage, offset))
        self.addresses.update({(len(self._steps), storage): offset for storage, offset in claims})

    def _find(self, op: Op, storage: int, nbytes: int) -> int:
        high = self.partition and not is_work(op)
        while (offset := self.arena.take(nbytes, storage, from_high_end=high)) is None:
            window = self._cheapest_window(nbytes)
            for victim in window:
                self._leave(victim, free=True)
            if not window and not self._drop_spent():
                raise InfeasibleBudget(
                    f"{op.name} needs {format_bytes(nbytes)} in one piece, and what may be evicted makes no such room; "
                    f"the budget is {format_bytes(self._budget)}"
                )
        return offset

    def _cheapest_window(self, nbytes: int) -> list[int]:
        """What to evict; nothing if no window is large enough."""
        pieces = [(size, owner, self._cost(owner)) for size, owner in self.arena.pieces()]
        best: tuple[float, int, int] | None = None
        start = room = 0
        cost = 0.0
        for end, (size, _, own) in enumerate(pieces):
            if own is None:
                start, room, cost = end + 1, 0, 0.0
                continue
            room += size
            cost += own
            while room >= nbytes:
                if best is None or cost < best[0]:
                    best = (cost, start, end + 1)
                room -= pieces[start][0]
                cost -= pieces[start][2] or 0.0
                start += 1
        if best is None:
            return []
        return [owner for _, owner, _ in pieces[best[1] : best[2]] if owner is not None]

    def _cost(self, owner: int | None) -> float | None:
        """Of a hole nothing; None for what may not be evicted."""
        if owner is None:
            return 0.0
        if owner not in self.pool:
            return None
        age = max(1, int(self.clock - self.last_use[owner]))
        return float(int(self.ticks[owner]) + self.groups.ticks_around(owner)) / age

    def _compute(self, run: Run) -> None:
        super()._compute(run)
        for offset, nbytes in self.transient:
            self.arena.give_back(offset, nbytes)
        self.transient.clear()

    def _leave(self, storage: int, *, free: bool) -> None:
        if free:
            self.arena.give_back(self.offset.pop(storage), self.graph.storages[storage].nbytes)
        super()._leave(storage, free=free)

    def _arrive(self, storage: int) -> None:
        producer = self.graph.producer(storage)
        for old, new in self.graph.ops[producer].in_place if producer is not None else ():
            if new == storage and old in self.offset:
                self._take_over(old, new)
        super()._arrive(storage)

    def _take_over(self, old: int, new: int) -> None:
        storages, offset = self.graph.storages, self.offset.pop(old)
        self.arena.give_back(offset, storages[old].nbytes)
        if new in self.offset:
            return
        self.offset[new] = offset
        if not self.arena.take_at(offset, storages[new].nbytes, new):
            raise InfeasibleBudget(f"{storages[new].name} takes over {storages[old].name}, is larger, and finds no room behind it")
