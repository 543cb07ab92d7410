"""A step as nodes: runs of ops that are computed, and computed again, as one. For planners that cannot take every op by itself.

A node knows what it reads from outside, what it makes that lives on, and how many bytes it needs on the way; the accounts are the judge's.
Lasting storages are fixed and are not counted here. Storages that one node makes and the same nodes read are one parcel: to be without one of
them is to run the node again, which makes them all. Stage t is all that runs from the end of node t-1 to the end of node t: some earlier nodes
again, in program order, and then node t.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..ir import Compute, Free, Graph, Phase, Problem, Role, Schedule, Step
from ._lineage import last_replays


@dataclass(frozen=True, slots=True)
class Stretch:
    """Part of a node within which no parcel can go: its most bytes above the node's start, and the parcels that may go at its end."""

    peak: int
    ends: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Node:
    ops: range
    seconds: float
    reads: tuple[int, ...]  # parcels from outside
    makes: tuple[int, ...]  # parcels for outside
    consumes: tuple[int, ...]  # those of its reads whose bytes an in-place op takes over
    stretches: tuple[Stretch, ...]  # at least one
    grows: int  # bytes above the start at the end, if no parcel goes
    again_until: int  # the last stage in which it can run again to any use; itself if there is none

    @property
    def peak(self) -> int:
        return max(stretch.peak for stretch in self.stretches)


class Nodes:
    """The nodes of a step with sizes in units of `unit` bytes, rounded up."""

    def __init__(self, problem: Problem, runs: Sequence[range], *, unit: int = 1, only_forward: bool = False) -> None:
        self.problem, self.graph, self.unit = problem, problem.graph, unit
        graph = problem.graph
        self._sizes = [-(-storage.nbytes // unit) for storage in graph.storages]
        self._node_of = [index for index, run in enumerate(runs) for _ in run]
        self._parcel_of: dict[int, int] = {}  # storage -> its parcel, which is known by its first storage
        self.size: dict[int, int] = {}
        self.home: dict[int, int] = {}  # parcel -> the node that makes it; -1: an input
        self.readers: dict[int, tuple[int, ...]] = {}  # parcel -> nodes that read it, but for the one that makes it
        self._pack()
        self.needed_until: dict[int, int] = {}  # parcel -> the last stage that may begin with it
        self.nodes = self._make_nodes(runs, _again_until(graph, runs, only_forward))

    def __len__(self) -> int:
        return len(self.nodes)

    def storages_of(self, parcel: int) -> list[int]:
        return [storage for storage, its in self._parcel_of.items() if its == parcel]

    def computes(self, stages: Sequence[Sequence[int]]) -> list[int]:
        """The ops of the nodes of each stage, in a row; of a node that runs again, without what only keeps books (_again_until)."""
        ops = self.graph.ops
        return [op for stage, nodes in enumerate(stages) for node in nodes for op in self.nodes[node].ops if node == stage or ops[op].writes]

    def _pack(self) -> None:
        parcels: dict[tuple[int, ...], int] = {}
        for storage in self.graph.storages:
            consumed = self.graph.consumed_by.get(storage.id, -1)
            if storage.lasting or (not storage.nbytes and consumed == -1):
                continue  # what has no bytes can stay for good
            producer = self.graph.producer(storage.id)
            home = -1 if producer is None else self._node_of[producer]
            readers = sorted({self._node_of[op] for op in self.graph.readers[storage.id]} - {home})
            if readers:
                parcel = self._parcel_of[storage.id] = parcels.setdefault((home, consumed, *readers), storage.id)
                self.home[parcel], self.readers[parcel] = home, tuple(readers)
                self.size[parcel] = self.size.get(parcel, 0) + self._sizes[storage.id]

    def _make_nodes(self, runs: Sequence[range], again_until: Sequence[int]) -> tuple[Node, ...]:
        found: list[Node] = []
        until = list(range(len(runs)))
        makes: list[list[int]] = [[] for _ in runs]
        reads: list[list[int]] = [[] for _ in runs]
        for parcel, home in self.home.items():
            if home >= 0:
                makes[home].append(parcel)
            for reader in self.readers[parcel]:
                reads[reader].append(parcel)
        # A node is worth running again as long as someone may need what it makes, and that depends on the nodes behind it.
        for index in reversed(range(len(runs))):
            for parcel in makes[index]:
                self.needed_until[parcel] = max(until[reader] for reader in self.readers[parcel])
            worth = max((self.needed_until[parcel] for parcel in makes[index]), default=index)
            until[index] = max(index, min(again_until[index], worth))
        for parcel, home in self.home.items():
            if home == -1:
                self.needed_until[parcel] = max(until[reader] for reader in self.readers[parcel])
        for index, run in enumerate(runs):
            stretches, grows = self._stretches(run)
            found.append(
                Node(
                    ops=run,
                    seconds=sum(self.problem.device_seconds[run.start : run.stop]),
                    reads=tuple(reads[index]),
                    makes=tuple(makes[index]),
                    consumes=tuple(parcel for parcel in reads[index] if self.graph.consumed_by.get(parcel, -1) in run),
                    stretches=stretches,
                    grows=grows,
                    again_until=until[index],
                )
            )
        return tuple(found)

    def _stretches(self, run: range) -> tuple[tuple[Stretch, ...], int]:
        graph = self.graph
        last_touch: dict[int, int] = {}
        for index in run:
            op = graph.ops[index]
            taken_over = {old for old, _ in op.in_place}
            for storage in op.reads + op.writes + op.mutates:
                parcel = self._parcel_of.get(storage)
                if parcel is not None:
                    last_touch[parcel] = -1 if storage in taken_over else index
        may_go: dict[int, list[int]] = {}
        for parcel, index in last_touch.items():
            may_go.setdefault(index, []).append(parcel)
        level = peak = 0
        found = []
        for index in run:
            op = graph.ops[index]
            old_of = {new: old for old, new in op.in_place}
            for storage in op.writes:  # in the judge's order: an in-place op may give back what it takes only later
                if not graph.storages[storage].lasting:
                    level += self._sizes[storage] - (self._sizes[old_of[storage]] if storage in old_of else 0)
                    peak = max(peak, level)
            peak = max(peak, level - (-op.workspace_bytes // self.unit))
            for storage in dict.fromkeys(op.reads + op.writes + op.mutates):
                inside = not graph.storages[storage].lasting and storage not in self._parcel_of
                if inside and graph.uses[storage][-1] == index and storage not in graph.consumed_by:
                    level -= self._sizes[storage]
            if index in may_go or index + 1 == run.stop:
                found.append(Stretch(peak, tuple(may_go.get(index, ()))))
                peak = level
        return tuple(found), level


def _again_until(graph: Graph, runs: Sequence[range], only_forward: bool) -> list[int]:
    """The last stage in which each node may run again: what runs again in a stage does so before the stage's own node begins.

    An op that makes nothing and only changes what lives on, such as batch norm's running statistics, runs once and holds nobody back.
    """
    last = last_replays(graph)
    starts = [run.start for run in runs]
    found = []
    for index, run in enumerate(runs):
        until = min((last[op] for op in run if graph.ops[op].writes), default=run.start)
        if only_forward and any(graph.ops[op].phase is not Phase.FORWARD for op in run):
            until = run.start
        found.append(max(index, bisect_left(starts, until + 1) - 1))
    return found


# -- which ops go together --------------------------------------------------------------------------------------------------------------


def runs_of(problem: Problem, limit: int, *, only_forward: bool = False) -> list[range]:
    """At most `limit` runs of consecutive ops: each op by itself if they are few, else cut where region call or phase change, then by work.

    only_forward: nothing but forward will run again, so that once it is cut at region calls nothing else is worth cutting further.
    """
    ops = problem.graph.ops
    if len(ops) <= limit:
        return [range(op.id, op.id + 1) for op in ops]
    last = last_replays(problem.graph)
    labels = [(op.phase, last[op.id] == op.id and bool(op.writes or op.phase is not Phase.FORWARD), op.region) for op in ops]
    for precision in (3, 2, 1, 0):
        cuts = [place for place in range(1, len(ops)) if labels[place - 1][:precision] != labels[place][:precision]]
        if len(cuts) < limit:
            break
    runs = [range(start, end) for start, end in zip([0, *cuts], [*cuts, len(ops)], strict=True)]
    leave = only_forward and precision == 3 and any(op.region >= 0 for op in ops)
    worth = [any(last[op] > op and not (leave and ops[op].phase is not Phase.FORWARD) for op in run) for run in runs]
    return _split(problem, runs, limit, worth)


def _split(problem: Problem, runs: list[range], limit: int, worth: list[bool]) -> list[range]:
    """Halve the work of the longest run, again and again. Runs that can never run again are left whole: there is nothing to decide in them."""
    starts = problem.op_starts
    longest = [
        (-(starts[run.stop] - starts[run.start]), run.start, run.stop) for run, halve in zip(runs, worth, strict=True) if halve and len(run) > 1
    ]
    heapq.heapify(longest)
    done = [run for run, halve in zip(runs, worth, strict=True) if not (halve and len(run) > 1)]
    while longest and len(done) + len(longest) < limit:
        _, start, stop = heapq.heappop(longest)
        middle = bisect_left(starts, (starts[start] + starts[stop]) / 2)
        middle = min(max(middle, start + 1), stop - 1)
        for part in (range(start, middle), range(middle, stop)):
            if len(part) > 1:
                heapq.heappush(longest, (-(starts[part.stop] - starts[part.start]), part.start, part.stop))
            else:
                done.append(part)
    return sorted(done + [range(start, stop) for _, start, stop in longest], key=lambda run: run.start)


# -- from what runs to a schedule -------------------------------------------------------------------------------------------------------


def schedule_of(problem: Problem, computes: Sequence[int]) -> Schedule:
    """The schedule that runs these ops in this order on the device. A second run nobody reads is left out; all else goes right after its last use."""
    graph, tier = problem.graph, problem.device_tier
    first_run = _first_runs(computes)
    needed: set[int] = set()  # read later on, as it is now
    backwards: list[Step] = []
    for place in reversed(range(len(computes))):
        op = graph.ops[computes[place]]
        if place not in first_run and needed.isdisjoint(op.writes):
            continue
        taken_over = {old for old, _ in op.in_place}
        touched = sorted(set(op.reads + op.writes + op.mutates) - taken_over - needed, reverse=True)
        backwards.extend(Free(storage, tier) for storage in touched if not graph.storages[storage].lasting)
        backwards.append(Compute(op.id, problem.machine.device.name))
        needed.difference_update(op.writes)
        needed.update(op.reads + op.mutates)
    home = {s.id: (tier,) for s in graph.storages if s.lasting or s.role is Role.INPUT}
    unread = [s.id for s in graph.storages if s.role is Role.INPUT and s.id not in needed]
    return Schedule((*(Free(storage, tier) for storage in unread), *reversed(backwards)), home)


def _first_runs(computes: Sequence[int]) -> set[int]:
    """Places in the list at which an op runs for the first time."""
    found: dict[int, int] = {}
    for place, op in enumerate(computes):
        found.setdefault(op, place)
    return set(found.values())


# -- a first answer ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Victim:
    """What could go now."""

    parcel: int
    now: int  # the stage
    next_use: int
    seconds: float  # to make it again for its next use
    seconds_around: float  # the same with the parcels that are gone and would then have to be made from further back


Score = Callable[[Victim], tuple[float, ...]]


def evict_in_order(nodes: Nodes, capacity: int, score: Score, is_over: Callable[[], bool] = lambda: False) -> list[list[int]] | None:
    """Run the program within `capacity` units; where it is short, drop what has the lowest score, and make it again when it is read.

    Returns the nodes of each stage, or None if it gets stuck or its time is over.
    """
    return _Eviction(nodes, capacity, score).run(is_over)


@dataclass(slots=True)
class _Candidate:
    next_use: int
    seconds: float
    seconds_around: float
    scored_in: int = -1  # the stage
    score: tuple[float, ...] = ()


class _Eviction:
    """What could go is asked for whenever memory is short, so what it takes to make a parcel again is remembered, until one of those that were looked
    at for it comes, goes or is read."""

    def __init__(self, nodes: Nodes, capacity: int, score: Score) -> None:
        self.nodes, self.capacity, self.score = nodes, capacity, score
        self.here = {parcel for parcel, home in nodes.home.items() if home == -1}
        self.held = sum(nodes.size[parcel] for parcel in self.here)
        self._candidates: dict[int, _Candidate | None] = {}  # None: it cannot go
        self._looked_at_for: dict[int, set[int]] = {}  # by parcel: candidates

    def run(self, is_over: Callable[[], bool]) -> list[list[int]] | None:
        stages: list[list[int]] = []
        for stage in range(len(self.nodes)):
            if is_over():
                return None
            again = self._missing(self.nodes.nodes[stage].reads, stage)
            if again is None:
                return None
            order = [*sorted(again), stage]
            waiting: dict[int, int] = {}
            for index in order:
                for parcel in self.nodes.nodes[index].reads:
                    waiting[parcel] = waiting.get(parcel, 0) + 1
            for index in order:
                if not self._room_for(index, stage, waiting):
                    return None
                self._compute(index, stage, waiting)
            for parcel in self.nodes.nodes[stage].reads:
                self._forget(parcel)
            stages.append(order)
        return stages

    def _missing(self, parcels: Sequence[int], stage: int, without: int = -1, looked_at: set[int] | None = None) -> set[int] | None:
        """The nodes to run again in a stage to have these parcels; None if that cannot be. `looked_at`: where to note what that depends on."""
        nodes, here = self.nodes.nodes, self.here
        found: set[int] = set()
        pending = [s for s in parcels if s not in here or s == without]
        while pending:
            home = self.nodes.home[pending.pop()]
            if home == -1 or home >= stage or nodes[home].again_until < stage:
                return None
            if home not in found:
                found.add(home)
                pending += [s for s in nodes[home].reads if s not in here or s == without]
                if looked_at is not None:
                    looked_at.update(nodes[home].reads)
        return found

    def _next_use(self, parcel: int, stage: int) -> int | None:
        readers = self.nodes.readers[parcel]
        place = bisect_left(readers, stage)
        return readers[place] if place < len(readers) else None

    def _room_for(self, index: int, stage: int, waiting: dict[int, int]) -> bool:
        node = self.nodes.nodes[index]
        need = node.peak + sum(self.nodes.size[s] for s in node.makes if s in self.here)
        while self.held + need > self.capacity:
            victim = self._victim(stage, waiting)
            if victim is None:
                return False
            self._leave(victim)
        return True

    def _victim(self, stage: int, waiting: dict[int, int]) -> int | None:
        best: tuple[tuple[float, ...], int] | None = None
        for parcel in self.here:
            if waiting.get(parcel) or not self.nodes.size[parcel]:
                continue
            candidate = self._candidates[parcel] if parcel in self._candidates else self._candidate(parcel, stage)
            if candidate is None:
                continue
            if candidate.scored_in != stage:
                candidate.score = self.score(Victim(parcel, stage, candidate.next_use, candidate.seconds, candidate.seconds_around))
                candidate.scored_in = stage
            if best is None or (candidate.score, parcel) < best:
                best = (candidate.score, parcel)
        return None if best is None else best[1]

    def _candidate(self, parcel: int, stage: int) -> _Candidate | None:
        found, looked_at = None, {parcel}
        if (next_use := self._next_use(parcel, stage)) is not None:
            again = self._missing([parcel], next_use, without=parcel, looked_at=looked_at)
            if again is not None:
                around = again | self._made_from(parcel, stage, looked_at)
                found = _Candidate(next_use, self._seconds(again), self._seconds(around))
        self._candidates[parcel] = found
        for other in looked_at:
            self._looked_at_for.setdefault(other, set()).add(parcel)
        return found

    def _forget(self, parcel: int) -> None:
        """What was known of those for which it was looked at."""
        for candidate in self._looked_at_for.pop(parcel, ()):
            self._candidates.pop(candidate, None)

    def _seconds(self, nodes: set[int]) -> float:
        return sum(self.nodes.nodes[node].seconds for node in sorted(nodes))

    def _made_from(self, parcel: int, stage: int, looked_at: set[int]) -> set[int]:
        """The nodes that make, from this parcel, parcels that are gone and will be read. `looked_at`: where to note what that depends on."""
        found: set[int] = set()
        pending = [parcel]
        while pending:
            for reader in self.nodes.readers[pending.pop()]:
                if reader < stage and reader not in found:
                    makes = self.nodes.nodes[reader].makes
                    looked_at.update(makes)
                    gone = [p for p in makes if p not in self.here and self._next_use(p, stage) is not None]
                    if gone:
                        found.add(reader)
                        pending.extend(gone)
        return found

    def _compute(self, index: int, stage: int, waiting: dict[int, int]) -> None:
        node = self.nodes.nodes[index]
        for parcel in node.makes:
            if parcel not in self.here:
                self.here.add(parcel)
                self.held += self.nodes.size[parcel]
                self._forget(parcel)
        for parcel in node.consumes:
            self._leave(parcel)
        for parcel in node.reads:
            waiting[parcel] -= 1
        for parcel in (*node.reads, *node.makes):
            # What cannot be made again may still be what others are made from.
            last = self.nodes.needed_until[parcel] if self._missing([parcel], stage + 1, without=parcel) is None else stage
            if parcel in self.here and not waiting.get(parcel) and self._next_use(parcel, stage + 1) is None and last <= stage:
                self._leave(parcel)

    def _leave(self, parcel: int) -> None:
        self.here.discard(parcel)
        self.held -= self.nodes.size[parcel]
        self._forget(parcel)
