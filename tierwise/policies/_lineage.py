"""Recompute lineages: from which storages, over which ops and in how many seconds something dropped comes back.

The sources of a storage are its nearest ancestors that stay. When a storage is itself dropped it stops being a source: whoever was made from
it is now made from its sources, and pays for its ops too. Each op on the way counts once, however many paths lead through it.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from ..ir import Graph, Problem, Role


def last_replays(graph: Graph) -> tuple[int, ...]:
    """For each op, the last op before which it may run again: its own id if it may not. What it reads or writes must still be as it left it."""
    found = []
    for op in graph.ops:
        last = len(graph.ops) - 1
        if op.mutates or not op.replayable:
            last = op.id
        for storage in op.reads + op.writes:
            writers = graph.writers[storage]
            later = bisect_right(writers, op.id)
            if later < len(writers):
                last = min(last, writers[later])
        found.append(last)
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Lineage:
    """How a storage comes back."""

    sources: frozenset[int]
    ops: frozenset[int]
    seconds: float


class Lineages:
    """Which storages are dropped when, and what it takes to have them back."""

    def __init__(self, problem: Problem) -> None:
        self._graph, self._seconds = problem.graph, problem.device_seconds
        self._last_replay = last_replays(problem.graph)
        self._dropped: dict[int, list[tuple[int, int]]] = {}  # storage -> (op after which it goes, op for which it is back)
        self._known: dict[tuple[int, int], Lineage | None] = {}

    def drop(self, storage: int, start: int, end: int) -> None:
        """From now on the storage is gone after op `start` and is made again for op `end`."""
        self._dropped.setdefault(storage, []).append((start, end))

    def restore(self, storage: int, start: int, end: int) -> None:
        """Take a drop back."""
        self._dropped[storage].remove((start, end))
        self._known.clear()

    def lineage(self, storage: int, at: int) -> Lineage | None:
        """What brings the storage back just before op `at`, whatever it is at that time itself; None if nothing can."""
        key = (storage, at)
        known = self._known.get(key)
        if known is not None:
            gone = [source for source in known.sources if not self.is_here(source, at)]
            if gone:
                self._known[key] = self._trace(gone, at, known.sources.difference(gone), known.ops)
        elif key not in self._known:
            self._known[key] = self._trace([storage], at, frozenset(), frozenset())
        return self._known[key]

    def _trace(self, missing: list[int], at: int, sources: frozenset[int], ops: frozenset[int]) -> Lineage | None:
        """A lineage that also brings back what is missing."""
        all_sources, all_ops, pending = set(sources), set(ops), list(missing)
        while pending:
            producer = self._graph.producer(pending.pop())
            if producer is None or self._last_replay[producer] < at or producer >= at:
                return None
            if producer in all_ops:
                continue
            all_ops.add(producer)
            for read in self._graph.ops[producer].reads:
                if self.is_here(read, at):
                    all_sources.add(read)
                else:
                    pending.append(read)
        return Lineage(frozenset(all_sources), frozenset(all_ops), sum(self._seconds[op] for op in sorted(all_ops)))

    def is_here(self, storage: int, at: int) -> bool:
        """Whether the storage is on the device, or at least kept somewhere, just before op `at`. An input can be kept as long as it is needed."""
        found = self._graph.storages[storage]
        if found.lasting or found.role is Role.INPUT:
            return True
        if self._graph.uses[storage][-1] < at:
            return False
        return not any(start < at <= end for start, end in self._dropped.get(storage, ()))
