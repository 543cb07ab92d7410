"""tflms: swap every tensor whose reader is far away in topological levels, with a threshold, a lead and a grouping tuned on a memory simulator.

Paper    Le, Imai, Negishi, Kawachiya, ISMM 2019, arXiv:1807.02037; the rules of versions 2 and 3 as IBM published them.
Idea     an edge between distant levels of the graph holds its tensor for long: cut it, and put a copy to the host and one back in its place.
Rule     an edge is swapped iff  level(reader) − level(producer) > threshold;  readers within `groupby` levels of each other share one fetch;  a
         fetch is triggered by an ancestor of the reader more than `ahead` levels above it, looked for on 10 levels.  Tuned within memory_ratio of
         what variables leave free: nothing swapped, else the largest threshold, then the largest ahead, then the largest groupby that pass; sync 1
         waits for copies out, 2 for copies back, 3 for both, and is raised while even threshold 1 does not pass. Version 3: when an allocation
         fails, the tensor idle longest that is large enough goes, or all of them in turn; what was reclaimed after a use in the step before is sent
         out right behind it. What is missing is fetched while the op waits.
Differs  version 1 and its settings, and version 2's chain of fetches (a negative ahead), are left out. Ops run in program order and not as they
         become ready, so serialising levels changes nothing. All lasting storages count as variables. Tensors of rank 1 are not known as such and
         are swapped too. A copy out that is not waited for gives its bytes back one op late, the simulator's delay of one level; a storage has one
         copy on the device, where every fetch of TensorFlow makes another.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise

from ..errors import BadInput, InfeasibleBudget
from ..ir import Graph, Op, Problem, Schedule
from ..units import format_bytes
from ._fit import device_peak
from ._gaps import Swap, build
from ._paging import Paging
from ._runtime import Homes, run_settled

DECIDES = "swap by distance in levels"
FIDELITY = "faithful"
EXECUTABLE = True
REQUIRES = {"dram"}
LEVELS_TRIED = 10  # above the one asked for, until an ancestor of the reader is found


def plan(
    problem: Problem,
    *,
    threshold: int | None = None,
    ahead: int | None = None,
    groupby: int | None = None,
    sync: int = 0,
    memory_ratio: float = 0.9,
    version: int = 2,
    tier: str = "dram",
) -> Schedule:
    """What is None is tuned. With sync 2 or 3 fetches are on demand, and ahead and groupby do not matter. Version 3 has no settings."""
    if version not in (2, 3):
        raise BadInput(f"version is {version}; tflms knows 2, which rewrites the graph, and 3, which reclaims as the ops run")
    if version == 3:
        return _reclaiming(problem)
    if not 0 <= sync <= 3:
        raise BadInput(f"sync is {sync}; tflms knows 0 (none), 1 (copies out), 2 (copies back) and 3 (both)")
    if (threshold is not None and threshold < 1) or (ahead is not None and ahead < 1):
        raise BadInput(f"threshold and ahead are numbers of levels from 1 on, not {threshold} and {ahead}")
    if not 0 < memory_ratio <= 1:
        raise BadInput(f"memory_ratio is {memory_ratio}; it is a share of the free memory, above 0 and at most 1")
    lasting = problem.graph.lasting_bytes
    limit = lasting + int(memory_ratio * max(0, problem.budget_bytes - lasting))
    rewriter = _Rewriter(problem, tier)
    most = rewriter.levels

    def fits(settings: _Settings) -> bool:
        return device_peak(problem, rewriter.play(settings)) <= limit

    nothing = _Settings(most, 1, 0, sync)
    if threshold is ahead is groupby is None and fits(nothing):
        return rewriter.play(nothing)
    found = _Settings(threshold or 1, ahead or 1, groupby or 0, sync)
    if threshold is None:
        while not fits(found):
            if found.sync == 3:
                needed = device_peak(problem, rewriter.play(found))
                least = _least_budget(lasting, needed, memory_ratio)
                raise InfeasibleBudget(f"with every edge swapped the step still needs {format_bytes(needed)}", least_bytes=least)
            found = found.but(sync=found.sync + 1)
        found = _search(found, "threshold", 1, most, fits)
    if found.sync >= 2 or not fits(found):
        return rewriter.play(found)
    if ahead is None:
        found = _search(found, "ahead", 1, most, fits)
    if groupby is None:
        together = found.but(groupby=most)
        found = together if fits(together) else _search(found, "groupby", 0, most, fits, first=True)
    return rewriter.play(found)


def _search(found: _Settings, which: str, low: int, high: int, fits: Callable[[_Settings], bool], *, first: bool = False) -> _Settings:
    """The largest value that passes, by halving from the middle, or the first met. Where no ancestor is that far ahead a fetch is on demand, so
    that a larger lead may need less; what is found then depends on the way, which is the authors'."""
    while low <= high:
        middle = (low + high) // 2
        if fits(tried := found.but(**{which: middle})):
            found, low = tried, middle + 1
            if first:
                break
        else:
            high = middle - 1
    return found


def _least_budget(lasting: int, needed: int, memory_ratio: float) -> int:
    """The smallest budget of which the ratio of what is free is enough."""
    budget = lasting + int((needed - lasting) / memory_ratio)
    while lasting + int(memory_ratio * (budget - lasting)) < needed:
        budget += 1
    return budget


@dataclass(frozen=True, slots=True)
class _Settings:
    threshold: int
    ahead: int
    groupby: int
    sync: int

    def but(self, **changed: int) -> _Settings:
        return _Settings(**({"threshold": self.threshold, "ahead": self.ahead, "groupby": self.groupby, "sync": self.sync} | changed))


class _Rewriter:
    """The graph in levels, and its schedules under any settings."""

    def __init__(self, problem: Problem, tier: str) -> None:
        self.problem, self.graph, self.tier = problem, problem.graph, tier
        before = _needed_ops(self.graph)
        self.level: list[int] = []
        self.ancestors: list[int] = []  # of each op, a set of bits
        for needed in before:
            self.level.append(1 + max((self.level[op] for op in needed), default=-1))
            found = 0
            for op in needed:
                found |= self.ancestors[op] | 1 << op
            self.ancestors.append(found)
        self.inputs_of = before
        self.levels = max(self.level, default=0) + 1
        self.at_level = [0] * self.levels
        for op, level in enumerate(self.level):
            self.at_level[level] |= 1 << op
        self.play = functools.lru_cache(maxsize=4)(self._play)  # the last few are asked for again

    def _play(self, settings: _Settings) -> Schedule:
        swaps = []
        for storage in self.graph.storages:
            if not storage.lasting and storage.nbytes and len(self.graph.writers[storage.id]) == 1:
                swaps += self._swaps_of(storage.id, settings)
        return build(self.problem, swaps)

    def _swaps_of(self, storage: int, settings: _Settings) -> list[Swap]:
        producer = self.graph.writers[storage][0]
        limit = self.level[producer] + settings.threshold
        readers = self.graph.readers[storage]
        group = self._groups([op for op in readers if self.level[op] > limit], settings.groupby)
        found = []
        for use, reader in pairwise((producer, *readers)):
            if reader not in group or group.get(use) == group[reader] or reader == use + 1:
                continue
            out_sync, in_sync = settings.sync in (1, 3), settings.sync in (2, 3)
            gone = min(use + (1 if out_sync else 2), reader)
            trigger = None if in_sync else self._trigger(producer, reader, settings.ahead)
            if trigger is None:
                trigger = max((op for op in self.inputs_of[reader] if op != producer), default=reader - 1)
            found.append(
                Swap(storage, self.tier, out_at=use + 1, free_at=gone, in_at=min(reader, max(gone, trigger + 1)), join=out_sync, join_back=False)
            )
        return found

    def _groups(self, readers: list[int], limit: int) -> dict[int, int]:
        """Reader -> its group, known by the first level in it; neighbours at most `limit` levels apart are together."""
        found: dict[int, int] = {}
        if limit <= 0:
            return {op: at for at, op in enumerate(readers)}
        first = last = -1
        for op in sorted(readers, key=lambda op: (self.level[op], op)):
            if first < 0 or self.level[op] - last > limit:
                first = self.level[op]
            last = self.level[op]
            found[op] = first
        return found

    def _trigger(self, producer: int, reader: int, ahead: int) -> int | None:
        """The op behind which a fetch is issued: an ancestor of the reader more than `ahead` levels above it."""
        highest = self.level[reader] - ahead - 1
        for level in range(highest, max(highest - LEVELS_TRIED, self.level[producer]), -1):
            if found := self.ancestors[reader] & self.at_level[level]:
                return found.bit_length() - 1  # the last of them in program order
        return None


def _needed_ops(graph: Graph) -> list[list[int]]:
    """For each op, the ops whose results it reads."""
    last_writer: dict[int, int] = {}
    found = []
    for op in graph.ops:
        found.append(sorted({last_writer[s] for s in op.reads + op.mutates if s in last_writer}))
        last_writer.update(dict.fromkeys(op.writes + op.mutates, op.id))
    return found


# -- version 3 --------------------------------------------------------------------------------------------------------------------------


def _reclaiming(problem: Problem) -> Schedule:
    everything = build(problem)
    if device_peak(problem, everything) <= problem.budget_bytes:
        return everything
    watched: list[_Reclaim] = []

    def watch(home: Homes) -> _Reclaim:
        watched.append(_Reclaim(problem, home, frozenset()))
        return watched[-1]

    run_settled(problem, watch)
    return _Reclaim(problem, watched[-1].home, frozenset(watched[-1].reclaimed)).run()


class _Reclaim(Paging):
    """An allocator that takes back idle tensors when it fails, and at once those it had to take back in the step before."""

    def __init__(self, problem: Problem, home: Homes, eager: frozenset[tuple[int, int]]) -> None:
        super().__init__(problem, home)
        self.eager = eager  # (storage, op): behind this op it is sent out
        self.reclaimed: set[tuple[int, int]] = set()
        self.last_use: dict[int, int] = {}
        self.short = 0

    def after(self, op: Op) -> None:
        super().after(op)
        for storage in dict.fromkeys(op.reads + op.writes + op.mutates):
            self.last_use[storage] = op.id
            if (storage, op.id) in self.eager:
                self.send_out(storage)

    def make_room(self, nbytes: int, needed: set[int]) -> None:
        self.short = self.held[self.device] + nbytes - self.problem.budget_bytes
        super().make_room(nbytes, needed)

    def victims(self, needed: set[int]) -> Iterable[int]:
        idle = [storage for storage in self.least_recent() if storage not in needed]
        large = next((storage for storage in idle if self.nbytes[storage] >= self.short), None)
        return idle if large is None else [large, *(storage for storage in idle if storage != large)]

    def send_at_once(self, storage: int) -> bool:
        self.reclaimed.add((storage, self.last_use.get(storage, -1)))
        return super().send_at_once(storage)
