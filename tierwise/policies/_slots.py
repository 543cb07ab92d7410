"""Swaps for an order of ops and a division of the device into slots: whoever is needed last goes, everything moves as early as it can.

The device's memory is cut into slots, a number of them for each size class, and a storage lies in a slot of its class or not on the device at all.
Walking the ops in the given order, a storage that needs a slot takes a free one, or that of the storage of its class that is needed last. The
walk looks back: the victim leaves right behind its own last use, and what is fetched into its slot comes right behind it, so that copies have
all the time there is. What is up to date in the other tier leaves without a copy, and what nobody needs any more is just freed.

A step is walked twice: what lives across steps and is on the device at the end of the first walk is there from the start in the second.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..ir import Compute, Copy, Free, Graph, Op, Problem, Role, Schedule, Step


@dataclass(frozen=True, slots=True)
class Slots:
    """Size class of each storage and of each op's workspace, and the number of slots of each class. A class is known by the bytes of its slots."""

    storage_class: Sequence[int]
    workspace_class: Sequence[int]
    count: Mapping[int, int]

    @property
    def nbytes(self) -> int:
        return sum(size * number for size, number in self.count.items())


def precedences(graph: Graph) -> list[list[int]]:
    """For each op, the ops that must run before it in any order: those that wrote what it reads, and those that read or wrote what it overwrites."""
    last_writer: dict[int, int] = {}
    readers: dict[int, list[int]] = {}
    found: list[list[int]] = []
    for op in graph.ops:
        before: set[int] = set()
        taken_over = tuple(old for old, _ in op.in_place)
        for storage in op.reads + op.mutates:
            if storage in last_writer:
                before.add(last_writer[storage])
        for storage in op.writes + op.mutates + taken_over:
            before.update(readers.get(storage, ()))
            if storage in last_writer:
                before.add(last_writer[storage])
        before.discard(op.id)
        found.append(sorted(before))
        for storage in op.writes + op.mutates:
            last_writer[storage] = op.id
            readers[storage] = []
        for storage in op.reads:
            readers.setdefault(storage, []).append(op.id)
    return found


def swap_in_slots(problem: Problem, order: Sequence[int], slots: Slots, *, tier: str) -> Schedule | None:
    """The schedule for this order and these slots; None if some op has too few."""
    first = _Walk(problem, order, slots, tier, resident=())
    if not first.run():
        return None
    second = _Walk(problem, order, slots, tier, resident=first.residents())
    return second.schedule() if second.run() else None


class _Walk:
    def __init__(self, problem: Problem, order: Sequence[int], slots: Slots, tier: str, resident: Sequence[int]) -> None:
        self.problem, self.graph, self.order, self.slots, self.tier = problem, problem.graph, order, slots, tier
        self.device, self.on = problem.device_tier, problem.machine.device.name
        self.nbytes = [s.nbytes for s in self.graph.storages]
        self.lasting = [s.lasting for s in self.graph.storages]
        self.resident = tuple(resident)
        self.uses: list[list[int]] = [[] for _ in self.graph.storages]  # places in the order, the last first
        for place in range(len(order) - 1, -1, -1):
            op = self.graph.ops[order[place]]
            for storage in dict.fromkeys(op.reads + op.writes + op.mutates):
                self.uses[storage].append(place)
        self.first_use = [uses[-1] if uses else 0 for uses in self.uses]
        self.before: list[list[Step]] = [[] for _ in range(len(order) + 1)]  # steps just before each place
        self.free: dict[int, list[int]] = {size: [0] * number for size, number in slots.count.items()}  # since when each free slot is free
        self.idle: dict[int, int] = {}  # storage on the device -> the place since which it is idle
        self.victims: dict[int, list[tuple[int, int]]] = {}  # class -> (- next use, storage), a heap; out of date entries are skipped
        self.elsewhere: dict[int, bool] = {}  # storage with bytes in the other tier -> whether they are up to date
        self.back_from: dict[int, int] = {}  # storage -> the place from which on it can be fetched
        self.home: dict[int, tuple[str, ...]] = {}

    def run(self) -> bool:
        """Walk all ops; False if there are too few slots."""
        here = {*self.resident, *(s.id for s in self.graph.storages if s.role is Role.INPUT)}
        for storage in self.graph.storages:
            if not (storage.lasting or storage.role is Role.INPUT):
                continue
            self.home[storage.id] = (self.device,) if storage.id in here or not storage.nbytes else (self.tier,)
            if self.device in self.home[storage.id]:
                if not self._settle_at_start(storage.id):
                    return False
            elif self.graph.is_there_at_start(storage.id):
                self.elsewhere[storage.id] = True
        for place, op_id in enumerate(self.order):
            if not self._walk(place, self.graph.ops[op_id]):
                return False
        return self._go_home()

    def residents(self) -> list[int]:
        """What lasts, is on the device when the walk is over, and leaves room for the inputs when the next step begins."""
        room = dict(self.slots.count)
        for storage in self.graph.storages:
            if storage.role is Role.INPUT and storage.nbytes:
                room[self.slots.storage_class[storage.id]] -= 1
        found = []
        for storage_id in sorted((s for s in self.last_here if self.nbytes[s]), key=lambda s: (self.first_use[s], s)):
            size = self.slots.storage_class[storage_id]
            # What only an update writes has nothing to be there for when the step begins.
            if room[size] > 0 and self.graph.is_there_at_start(storage_id):
                room[size] -= 1
                found.append(storage_id)
        return found

    def schedule(self) -> Schedule:
        steps: list[Step] = []
        for place, op in enumerate(self.order):
            steps += self.before[place]
            steps.append(Compute(op, self.on))
        return Schedule((*steps, *self.before[-1]), self.home)

    # -- one op -------------------------------------------------------------------------------------------------------------------------

    def _walk(self, place: int, op: Op) -> bool:
        pinned = {*op.reads, *op.writes, *op.mutates}
        handed_on = {new: old for old, new in op.in_place}
        for storage in dict.fromkeys(op.reads + op.mutates):
            if storage not in self.idle and not self._fetch(storage, place, pinned):
                return False
        for storage in op.writes:
            if storage in handed_on:
                self.idle[storage] = self.idle.pop(handed_on[storage])
                self._forget_elsewhere(handed_on[storage], place + 1)
            elif storage not in self.idle:
                if self.nbytes[storage] and self._take(self.slots.storage_class[storage], pinned, latest=True) is None:
                    return False
                self.idle[storage] = place
        if op.workspace_bytes:
            size = self.slots.workspace_class[op.id]
            if self._take(size, pinned, latest=True) is None:
                return False
            insort(self.free[size], place + 1)
        for storage in op.writes + op.mutates:
            if storage in self.elsewhere:
                self.elsewhere[storage] = False
        for storage in sorted(pinned - set(handed_on.values())):
            self.uses[storage].pop()
            if self.uses[storage] or self.lasting[storage]:
                self._rest(storage, place + 1)
            else:
                self._bury(storage, place + 1)
        return True

    def _rest(self, storage: int, place: int) -> None:
        """The storage is idle from this place on."""
        self.idle[storage] = place
        if self.nbytes[storage]:
            next_use = self.uses[storage][-1] if self.uses[storage] else len(self.order) + self.first_use[storage]
            heapq.heappush(self.victims.setdefault(self.slots.storage_class[storage], []), (-next_use, storage))

    def _bury(self, storage: int, place: int) -> None:
        del self.idle[storage]
        self.before[place].append(Free(storage, self.device))
        if self.nbytes[storage]:
            insort(self.free[self.slots.storage_class[storage]], place)
        self._forget_elsewhere(storage, place)

    def _forget_elsewhere(self, storage: int, place: int) -> None:
        if self.elsewhere.pop(storage, None) is not None:
            self.before[place].append(Free(storage, self.tier))

    # -- slots --------------------------------------------------------------------------------------------------------------------------

    def _take(self, size: int, pinned: set[int], *, latest: bool = False) -> int | None:
        """A slot of the class; returns since when it is free. What is fetched wants the longest free one, what is made will do with any."""
        free = self.free[size]
        if free:
            return free.pop() if latest else free.pop(0)
        victims, kept, found = self.victims.get(size, []), [], None
        while victims and found is None:
            next_use, storage = heapq.heappop(victims)
            if storage not in self.idle or -next_use != self._next_use(storage):
                continue  # out of date: it has been used, has left or is gone
            if storage in pinned:
                kept.append((next_use, storage))
            else:
                found = self._evict(storage)
        for entry in kept:
            heapq.heappush(victims, entry)
        return found

    def _next_use(self, storage: int) -> int:
        return self.uses[storage][-1] if self.uses[storage] else len(self.order) + self.first_use[storage]

    def _evict(self, storage: int) -> int:
        """Send a storage out right behind its last use; returns the place."""
        place = self.idle.pop(storage)
        if not self.elsewhere.get(storage, False):
            self.before[place].append(Copy(storage, self.device, self.tier))
            self.elsewhere[storage] = True
        self.before[place].append(Free(storage, self.device))
        self.back_from[storage] = place
        return place

    def _fetch(self, storage: int, place: int, pinned: set[int]) -> bool:
        since = self._take(self.slots.storage_class[storage], pinned) if self.nbytes[storage] else place
        if since is None:
            return False
        at = max(since, self.back_from.get(storage, 0))
        self.before[at].append(Copy(storage, self.tier, self.device))
        self.idle[storage] = place
        return True

    # -- both ends ----------------------------------------------------------------------------------------------------------------------

    def _settle_at_start(self, storage: int) -> bool:
        if self.nbytes[storage]:
            free = self.free[self.slots.storage_class[storage]]
            if not free:
                return False
            free.pop()
        if self.uses[storage] or self.lasting[storage]:
            self._rest(storage, 0)
        else:
            self.idle[storage] = 0
            self._bury(storage, 0)
        return True

    def _go_home(self) -> bool:
        """Lasting storages end where they began: those that must leave go first, and make room for those that must return."""
        self.last_here = {storage for storage in self.idle if self.lasting[storage]}
        for storage in sorted(self.last_here):
            if self.device not in self.home[storage]:
                insort(self.free[self.slots.storage_class[storage]], self._evict(storage))
        for storage, home in self.home.items():
            if not self.lasting[storage] or self.device not in home:
                continue
            if storage not in self.idle and not self._fetch(storage, len(self.order), set()):
                return False
            self._forget_elsewhere(storage, len(self.order))
        return True
