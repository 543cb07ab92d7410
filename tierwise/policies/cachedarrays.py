"""cachedarrays: objects in a fast and a slow pool, moved by hints: what will be used comes now, what is marked evictable goes first.

Paper    Hildebrand, Lowe-Power, Akella, IPDPS 2024; the policy as its published code has it.
Idea     the program knows what its arrays are for; a runtime that hears of it needs no plan and beats a cache that does not.
Rule     before a kernel its arguments are brought to the fast pool (will_use), and the kernel waits. A copy in the slow pool stays: an object that
         is not dirty leaves for nothing. To make room for so many bytes, look into the size bin of that many and then into larger ones, first at
         objects marked evictable (softevict), then at all, and take the one that came first. Dead objects are freed at once (archive).
Differs  hints come from the graph: an activation is evictable behind its last use in forward. Kernels of a GPU cannot run from the slow pool, so
         that when all larger bins are empty, smaller ones are looked into. Bins are powers of two. Objects are taken one by one, not with their
         neighbours in the heap. Nothing moves if all fits.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..ir import Op, Problem, Schedule
from ._fit import device_peak
from ._gaps import build
from ._layers import saved_for_backward
from ._paging import Paging
from ._runtime import Homes, run_settled

DECIDES = "what to move, online, by hints"
FIDELITY = "faithful"
EXECUTABLE = "simulated only: objects leave when an allocation fails, and not at region boundaries"
REQUIRES = {"dram"}


def plan(problem: Problem, *, softevict: bool = True) -> Schedule:
    """softevict: whether the program marks what forward is done with as evictable."""
    everything = build(problem)
    if device_peak(problem, everything) <= problem.budget_bytes:
        return everything
    return run_settled(problem, lambda home: _CachedArrays(problem, home, softevict))


class _CachedArrays(Paging):
    def __init__(self, problem: Problem, home: Homes, softevict: bool) -> None:
        super().__init__(problem, home)
        self.marks: dict[int, list[int]] = {}  # behind each op: what becomes evictable
        for storage, last_forward, reader in saved_for_backward(problem.graph) if softevict else ():
            if reader > last_forward + 1:
                self.marks.setdefault(last_forward, []).append(storage)
        self.bins = [_bin(nbytes) for nbytes in self.nbytes]
        self.evictable: dict[int, None] = {}  # in the order in which they were marked

    def keeps_copy(self, storage: int) -> bool:
        return True

    def after(self, op: Op) -> None:
        super().after(op)
        for storage in (*op.reads, *op.mutates):
            self.evictable.pop(storage, None)
        for storage in self.marks.get(op.id, ()):
            self.evictable[storage] = None

    def make_room(self, nbytes: int, needed: set[int]) -> None:
        self.wanted = nbytes
        super().make_room(nbytes, needed)

    def victims(self, needed: set[int]) -> Iterable[int]:
        """Evictable ones of this bin and larger ones, then any of them, then those of smaller bins, the largest of those first."""
        came = {storage: self.bins[storage] for storage in self.oldest() if storage not in needed}
        marked = {storage: came[storage] for storage in self.evictable if storage in came}
        wanted = _bin(self.wanted)
        for group in (marked, came):
            yield from sorted((s for s, size in group.items() if size >= wanted), key=self.bins.__getitem__)
        for group in (marked, came):
            yield from sorted((s for s, size in group.items() if size < wanted), key=lambda s: -self.bins[s])


def _bin(nbytes: int) -> int:
    return max(0, nbytes - 1).bit_length()
