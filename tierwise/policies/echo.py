"""echo: between one product and the next, compute again what takes fewer bytes to make than to keep.

Paper    Zheng, Vijaykumar, Pekhimenko, ISCA 2020, arXiv:1805.08899.
Idea     what a recomputation reads must itself be kept: it pays only if that is less than what it lets go, over the whole graph and not op by op.
Rule     cut forward at products and convolutions; of a region, drop a set of stashes iff  Σ bytes dropped > Σ bytes newly kept to make them from.
         What is kept already, or newly kept for another region, costs nothing. First single stashes, then all of a region; until nothing improves.
Differs  reconstructed: the test, the cut and the iteration are the paper's, the order in which sets are tried is ours. A region is what lies as
         many products deep, and what a deeper one reads stays, so that no recomputation reaches further back. There is no budget in it, and no
         test of time: what is computed again is never a product, and costs little.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..ir import Graph, Op, Phase, Problem, Role, Schedule
from ._blocks import is_work
from ._gaps import Drop, build, can_recompute
from ._layers import saved_for_backward

DECIDES = "what to recompute"
FIDELITY = "like"
EXECUTABLE = True


def plan(problem: Problem) -> Schedule:
    stashes = _Stashes(problem)
    improved = True
    while improved:
        improved = False
        for chosen in [{storage} for storage in stashes.droppable()] + stashes.regions():
            improved = stashes.drop_if_it_pays(chosen) or improved
    last = {storage: last for storage, last, _ in saved_for_backward(problem.graph)}
    return build(problem, drops=[Drop(storage, last[storage] + 1) for storage in sorted(stashes.dropped)], kept=stashes.sources_of(stashes.dropped))


class _Stashes:
    """What is kept for backward, and what is made again from it."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.graph = problem, problem.graph
        self.depth = _depths(self.graph)
        self.kept = {storage for storage, _, _ in saved_for_backward(self.graph)}
        self.dropped: set[int] = set()
        self.candidates = [
            storage
            for storage, last, needed in saved_for_backward(self.graph)
            if needed > last + 1 and can_recompute(problem, storage) and self._is_local(storage)
        ]

    def _is_local(self, storage: int) -> bool:
        """Made by a cheap op, and not read by one of a deeper region."""
        producer = self.graph.producer(storage)
        if producer is None or is_work(self.graph.ops[producer]):
            return False
        readers = (self.graph.ops[reader] for reader in self.graph.readers[storage])
        return all(is_work(reader) or self.depth[reader.id] == self.depth[producer] for reader in readers if reader.phase is Phase.FORWARD)

    def droppable(self) -> list[int]:
        return [storage for storage in self.candidates if storage not in self.dropped]

    def regions(self) -> list[set[int]]:
        found: dict[int, set[int]] = {}
        for storage in self.droppable():
            found.setdefault(self.depth[self._maker(storage).id], set()).add(storage)
        return [found[depth] for depth in sorted(found)]

    def _maker(self, storage: int) -> Op:
        producer = self.graph.producer(storage)
        assert producer is not None
        return self.graph.ops[producer]

    def drop_if_it_pays(self, stashes: set[int]) -> bool:
        stashes = {storage for storage in stashes if storage not in self.dropped}
        if not stashes:
            return False
        already = self.kept | self.sources_of(self.dropped)
        after = (self.kept - stashes) | self.sources_of(self.dropped | stashes)
        if self._bytes(after) >= self._bytes(already):
            return False
        self.dropped |= stashes
        self.kept -= stashes
        return True

    def sources_of(self, dropped: Iterable[int]) -> set[int]:
        """What must be kept so that all of these can be made by cheap ops."""
        gone = set(dropped)
        found: set[int] = set()
        pending, seen = list(gone), set(gone)
        while pending:
            op = self._maker(pending.pop())
            for read in op.reads:
                if read in seen or self.graph.storages[read].lasting:
                    continue
                seen.add(read)
                if self._is_source(read, gone, self.depth[op.id]):
                    found.add(read)
                else:
                    pending.append(read)
        return found

    def _is_source(self, storage: int, gone: set[int], depth: int) -> bool:
        if storage in gone or storage in self.graph.consumed_by:
            return False
        producer = self.graph.producer(storage)
        # What is kept is where the way back ends; so is what a product made, or a region less deep.
        return (
            producer is None
            or storage in self.kept
            or is_work(self.graph.ops[producer])
            or self.depth[producer] != depth
            or not can_recompute(self.problem, storage)
        )

    def _bytes(self, storages: Iterable[int]) -> int:
        return sum(self.graph.storages[s].nbytes for s in storages if self.graph.storages[s].role is not Role.INPUT)


def _depths(graph: Graph) -> list[int]:
    """For each forward op, the most products on a way to it, itself included."""
    found = [0] * len(graph.ops)
    of_storage: dict[int, int] = {}
    for op in graph.ops:
        if op.phase is Phase.FORWARD:
            found[op.id] = max((of_storage.get(read, 0) for read in op.reads), default=0) + is_work(op)
            of_storage.update(dict.fromkeys(op.writes, found[op.id]))
    return found
