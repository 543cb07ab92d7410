"""The executor of G10's GPU-direct columns, as a legal schedule: moves are issued when their kernel is about to start, on more memory than they need.

It keeps no contents, so it can do what no real one could. Each of those liberties is granted here by a tier that costs nothing to copy to, and
nowhere else:

- a tensor is fetched from the disk at any time, also before its copy out is done, and also if it was sent to the host ("disk books");
- one sent to the host and fetched by the plan comes from the host, also before its copy out is done ("host books");
- a global that is absent when a kernel needs it costs nothing ("free books").

A tensor is gone when its copy out ends, even if it was fetched or used in between; what is absent at its use is fetched while the kernel waits.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import replace

from tierwise.ir import Compute, Copy, Free, Link, Op, Problem, Schedule, Step, Tier
from tierwise.policies._moves import Move
from tierwise.simulate import Clock

AT_ONCE = 1e30  # bytes per second
ROOM = 1 << 60  # the executor knows no capacity of any tier
DISK, HOST, FREE = BOOKS = ("disk books", "host books", "free books")


def with_books(problem: Problem) -> Problem:
    """The same problem on a machine with the three tiers of the artifact's liberties."""
    machine = problem.machine
    read = {DISK: machine.link("nvme", "hbm").lanes, FREE: {FREE: AT_ONCE}}
    read[HOST] = machine.link("dram", "hbm").lanes if ("dram", "hbm") in machine.link_between else read[DISK]
    tiers = tuple(replace(tier, capacity_bytes=ROOM) if tier.name != "hbm" else tier for tier in machine.tiers)
    tiers += tuple(Tier(name, ROOM) for name in BOOKS)
    links = tuple(link for name in BOOKS for link in (Link("hbm", name, {f"to {name}": AT_ONCE}), Link(name, "hbm", read[name])))
    return replace(problem, machine=replace(machine, tiers=tiers, links=machine.links + links))


def execute(problem: Problem, moves: Iterable[Move], visit: Sequence[Sequence[int]]) -> Schedule:
    """The schedule of these moves on a problem with books."""
    return _Executor(problem, moves, visit).run()


class _Executor:
    def __init__(self, problem: Problem, moves: Iterable[Move], visit: Sequence[Sequence[int]]) -> None:
        self.graph, self.visit = problem.graph, visit
        self.lasting = {s.id for s in self.graph.storages if s.lasting}
        self.home = dict.fromkeys(self.lasting, ("hbm",))
        self.moves: dict[int, list[Move]] = {}
        for move in moves:
            # A global sent out after its last use comes back in the next step, which a cold step does not have.
            if move.storage not in self.lasting or self.graph.uses[move.storage][-1] >= move.op:
                self.moves.setdefault(move.op, []).append(move)
        self.here = set(self.lasting)
        self.booked: set[int] = set()
        self.on_host: set[int] = set()
        self.leaving: list[tuple[float, int, int]] = []  # (when the copy ends, its step, storage), a heap
        self.ready: dict[int, float] = {}  # what is being fetched, and when it is there
        self.steps: list[Step] = []
        self.clock = Clock(problem, Schedule((), self.home))
        self.now = 0.0

    def run(self) -> Schedule:
        self.clock.begin_period()
        for op in self.graph.ops:
            self.now = self.clock.now()
            self._settle(set())
            for move in self.moves.get(op.id, ()):
                self._issue(move)
            needed = set(self.visit[op.id])
            for storage in self.visit[op.id]:
                self._need(storage, op, needed)
            self._do(Compute(op.id))
            self._written(op)
        for storage in sorted(self.booked | self.lasting):
            if storage not in self.here:
                self._fetch(storage, FREE)
            self._forget(storage)
        return Schedule(tuple(self.steps), self.home)

    def _settle(self, kept: set[int]) -> None:
        """What has left by now is gone, unless the kernel that is about to start has it in hand."""
        later = []
        while self.leaving and self.leaving[0][0] <= self.now:
            entry = heapq.heappop(self.leaving)
            if entry[2] in kept:
                later.append(entry)
            elif entry[2] in self.here:
                self._drop(entry[2])
        for entry in later:
            heapq.heappush(self.leaving, entry)
        self.ready = {storage: end for storage, end in self.ready.items() if end > self.now}

    def _issue(self, move: Move) -> None:
        storage = move.storage
        if move.tier == "hbm":
            if storage in self.here and storage in self.lasting:
                return
            if storage in self.here:
                self._drop(storage)
            if storage in self.booked:
                self._fetch(storage, HOST if storage in self.on_host else DISK)
        elif storage in self.here:
            if storage not in self.booked:
                self._book(storage)
            end = self._do(Copy(storage, "hbm", move.tier))
            self._do(Free(storage, move.tier))
            heapq.heappush(self.leaving, (end, len(self.steps), storage))
            (self.on_host.add if move.tier == "dram" else self.on_host.discard)(storage)

    def _need(self, storage: int, op: Op, needed: set[int]) -> None:
        if storage in self.here:
            self.now = max(self.now, self.ready.get(storage, 0.0))
        elif storage in self.booked:
            self._fetch(storage, FREE if storage in self.lasting else DISK)
            self.now = max(self.now, self.ready[storage])
        self._settle(needed)

    def _written(self, op: Op) -> None:
        self.here.update(op.writes)
        for storage in self.booked.intersection(op.mutates):
            for books in BOOKS:
                self._do(Copy(storage, "hbm", books))
        for storage in self.visit[op.id]:
            if storage not in self.lasting and self.graph.uses[storage][-1] == op.id:
                self._drop(storage)
                self._forget(storage)

    def _fetch(self, storage: int, books: str) -> None:
        self.ready[storage] = self._do(Copy(storage, books, "hbm"))
        self.here.add(storage)
        if books == HOST:
            self.on_host.discard(storage)

    def _book(self, storage: int) -> None:
        self.booked.add(storage)
        for books in BOOKS:
            self._do(Copy(storage, "hbm", books))

    def _forget(self, storage: int) -> None:
        if storage in self.booked:
            self.booked.discard(storage)
            for books in BOOKS:
                self._do(Free(storage, books))

    def _drop(self, storage: int) -> None:
        self.here.discard(storage)
        self.ready.pop(storage, None)
        self._do(Free(storage, "hbm"))

    def _do(self, step: Step) -> float:
        self.steps.append(step)
        return self.clock.advance(step)
