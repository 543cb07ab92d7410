"""deepum: unified memory that learned the sequence of kernels: fetch what the next ones touch, evict what they do not, drop what is dead.

Paper    Jung, Kim, Lee, ASPLOS 2023; the lookahead as the G10 artifact (MICRO 2023) runs it.
Idea     the same kernels run in the same order every step and touch the same blocks: a correlation table turns the next page faults into fetches.
Rule     what an op reads and is not here is a page fault, and the op waits. While it runs, fetch what the next `degree` ops read and is not here,
         in their order; in the background evict what migrated here longest ago and none of these ops touches, until what they will make has room.
         Blocks of freed storages are dropped, not written.
Differs  whole storages, not blocks of 2 MiB. The tables are taken as learned: the first step, in which everything faults, is not counted. Faults
         queue behind fetches that are under way. What is up to date elsewhere is not written again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..errors import BadInput
from ..ir import Op, Problem, Schedule
from ._fit import device_peak
from ._gaps import build
from ._paging import Paging
from ._runtime import Homes, run_settled

DECIDES = "what to fetch ahead and evict, online"
FIDELITY = "faithful"
EXECUTABLE = "simulated only: page faults and the order of evictions are a driver's, below what regions can plan"
REQUIRES = {"dram"}


def plan(problem: Problem, *, degree: int = 8) -> Schedule:
    """degree: how many ops ahead are fetched for."""
    if degree < 0:
        raise BadInput(f"degree is {degree}; it is a number of ops, 0 or more")
    everything = build(problem)
    if device_peak(problem, everything) <= problem.budget_bytes:
        return everything
    return run_settled(problem, lambda home: _DeepUM(problem, home, degree))


class _DeepUM(Paging):
    faults = True

    def __init__(self, problem: Problem, home: Homes, degree: int) -> None:
        super().__init__(problem, home)
        self.degree = degree
        ops = problem.graph.ops
        self.touched = [{*op.reads, *op.writes, *op.mutates} for op in ops]
        self.expected: dict[int, int] = {}  # storage -> by how many ops of the window it is touched
        for op in ops[:degree]:
            self._expect(op, 1)

    def before(self, op: Op) -> None:
        ops, last = self.graph.ops, op.id + self.degree
        if last < len(ops):
            self._expect(ops[last], 1)
        self.make_ready(op)  # faults come before fetches
        spare = self.bytes_needed(op)
        for storage in self._absent(ops[op.id + 1 : last + 1]):
            while not self.has_room(self.nbytes[storage] + spare):
                victim = next((s for s in self.oldest() if s not in self.expected), None)
                if victim is None or not self.send_at_once(victim):
                    break
            if not self.fetch_ahead(storage, spare):
                break
        self._evict_ahead(ops[op.id : last + 1])

    def after(self, op: Op) -> None:
        super().after(op)
        self._expect(op, -1)

    def _absent(self, window: Iterable[Op]) -> Iterator[int]:
        seen: set[int] = set()
        for op in window:
            for storage in op.reads + op.mutates:
                if storage not in seen and (self.is_elsewhere(storage) or storage in self.leaving_to):
                    yield storage
                seen.add(storage)

    def _evict_ahead(self, window: tuple[Op, ...]) -> None:
        """Send out, in the background, what makes room for all that the window will make."""
        wanted = sum(self.nbytes[s] for op in window for s in op.writes if self.is_away(s)) + max((op.workspace_bytes for op in window), default=0)
        going = sum(self.nbytes[s] for s in self.leaving_to)
        if self.has_room(wanted - going):
            return
        for storage in list(self.oldest()):
            if self.has_room(wanted - going):
                break
            if storage not in self.expected and self.send_out(storage):
                going += self.nbytes[storage] if storage in self.leaving_to else 0

    def victims(self, needed: set[int]) -> Iterable[int]:
        """Whoever migrated here longest ago; those that the window touches last."""
        oldest = [s for s in self.oldest() if s not in needed]
        return [s for s in oldest if s not in self.expected] + [s for s in oldest if s in self.expected]

    def _expect(self, op: Op, change: int) -> None:
        for storage in self.touched[op.id]:
            left = self.expected.get(storage, 0) + change
            if left > 0:
                self.expected[storage] = left
            else:
                self.expected.pop(storage, None)
