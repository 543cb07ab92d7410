"""A runtime that meets the ops one by one with a device that is too small: what is missing is fetched while the op waits, what must go is sent out.

It is played on a clock, and the steps are written down as they happen. By itself it is demand paging: policies derive from it to move things ahead of
their use (`before`), to say who goes first (`victims`), and to learn what was used (`after`).

- a storage sent out is given back when its copy ends, or earlier in the list if its bytes are needed (the allocation then waits for the copy);
- what is up to date elsewhere leaves without a copy, and what no later op uses is freed everywhere;
- what lasts is home again at the end.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from typing import NoReturn

from ..errors import InfeasibleBudget, MissingTier
from ..ir import Compute, Copy, Free, Op, Problem, Role, Schedule, Step
from ..simulate import Clock
from ..units import format_bytes

Homes = Mapping[int, tuple[str, ...]]


def swap_tiers(problem: Problem) -> tuple[str, ...]:
    """The tiers the device can copy to and from, fastest first."""
    device, links = problem.device_tier, problem.machine.link_between
    both_ways = [tier.name for tier in problem.machine.tiers if (device, tier.name) in links and (tier.name, device) in links and tier.capacity_bytes]
    if not both_ways:
        raise MissingTier(f"swapping needs a tier with links from and to {device!r}; machine {problem.machine.name} has none")
    return tuple(sorted(both_ways, key=lambda tier: -links[tier, device].bytes_per_second))


class Runtime:
    faults = False  # whether what an op finds missing comes by page faults

    def __init__(self, problem: Problem, home: Homes) -> None:
        self.problem, self.graph, self.machine = problem, problem.graph, problem.machine
        self.device, self.on = problem.device_tier, problem.machine.device.name
        self.tiers = swap_tiers(problem)
        self.nbytes = [s.nbytes for s in self.graph.storages]
        self.lasting = [s.lasting for s in self.graph.storages]
        self.home = {s.id: home.get(s.id, (self.device,)) for s in self.graph.storages if s.lasting or s.role is Role.INPUT}
        self.steps: list[Step] = []
        self.present: dict[int, set[str]] = {}  # the tiers that hold bytes of a storage, out of date ones too
        self.current: dict[int, set[str]] = {}  # the tiers that hold what it is now
        self.held = {tier.name: 0 for tier in self.machine.tiers}
        self.leaving: list[tuple[float, int, int]] = []  # (when the copy ends, its step, storage), a heap
        self.leaving_to: dict[int, tuple[int, str]] = {}  # storage -> (step of its copy, tier): what of the heap still holds
        self.next_op = 0
        self.residents: list[int] = []  # once it has run: what lasts and was on the device when the last op was done
        self.clock = Clock(problem, Schedule((), self.home))
        for link in self.machine.links:
            if link.staging_bytes and self.device in (link.src, link.dst):
                self._charge(link.staging_tier, link.staging_bytes)
        for storage, tiers in self.home.items():
            if self.graph.is_there_at_start(storage):
                self.present[storage], self.current[storage] = set(tiers), set(tiers)
                for tier in tiers:
                    self._charge(tier, self.nbytes[storage])

    # -- what a policy decides ------------------------------------------------------------------------------------------------------

    def before(self, op: Op) -> None:
        """Moves to issue when this op is about to start."""

    def after(self, op: Op) -> None:
        """The op has been issued."""

    def victims(self, needed: set[int]) -> Iterable[int]:
        """Whom to send out when there is no room, in this order; what is not on the device or needed is passed over. Here: needed last."""
        here = [s for s, tiers in self.current.items() if self.device in tiers and s not in needed and s not in self.leaving_to and self.nbytes[s]]
        return sorted(here, key=lambda s: (-self.next_use(s), s))

    def keeps_copy(self, storage: int) -> bool:
        """Whether its bytes elsewhere stay when a storage comes to the device; until it changes it can then leave without a copy."""
        return False

    # -- what it can ask and do -----------------------------------------------------------------------------------------------------

    def is_away(self, storage: int) -> bool:
        return self.device not in self.present.get(storage, ())

    def is_elsewhere(self, storage: int) -> bool:
        """Not on the device, but to be had."""
        return self.is_away(storage) and bool(self.current.get(storage))

    def next_use(self, storage: int) -> int:
        """The op that uses it next, counted on into the next step for what lasts."""
        uses = self.graph.uses[storage]
        at = bisect_left(uses, self.next_op)
        return uses[at] if at < len(uses) else len(self.graph.ops) + (uses[0] if uses else 0)

    def has_room(self, nbytes: int) -> bool:
        return self.held[self.device] + nbytes <= self.problem.budget_bytes

    def bytes_needed(self, op: Op) -> int:
        """What the op brings to the device beside what is there."""
        absent = sum(self.nbytes[s] for s in {*op.reads, *op.writes, *op.mutates} if self.is_away(s))
        return absent + op.workspace_bytes - sum(self.nbytes[old] for old, _ in op.in_place)

    def fetch_ahead(self, storage: int, spare: int = 0) -> bool:
        """Have a storage on the device if there is room for it and for `spare` bytes; False if there is not."""
        if storage in self.leaving_to:
            self._stay(storage)
        if self.is_elsewhere(storage):
            if not self.has_room(self.nbytes[storage] + spare):
                return False
            self._fetch(storage)
        return True

    def send(self, storage: int, tier: str) -> bool:
        """Copy a storage out, or just give it back if another tier has it; False if it is not here or there is no room there."""
        if self.device not in self.current.get(storage, ()) or storage in self.leaving_to:
            return False
        if self.current[storage] - {self.device}:
            self._drop(storage, self.device)
            return True
        tier = next((home for home in self.home.get(storage, ()) if home != self.device), tier)
        if tier not in self.present[storage]:
            if not self._has_room_elsewhere(storage, tier):
                return False
            self._charge(tier, self.nbytes[storage])
        end = self._do(Copy(storage, self.device, tier))
        self.present[storage].add(tier)
        self.current[storage].add(tier)
        self.leaving_to[storage] = (len(self.steps), tier)
        heapq.heappush(self.leaving, (end, len(self.steps), storage))
        return True

    def make_room(self, nbytes: int, needed: set[int]) -> None:
        """Wait for copies out, and send out victims, until so many bytes are free."""
        if self.has_room(nbytes):
            return
        while not self.has_room(nbytes) and self._let_next_go(needed):
            pass
        victims = iter(()) if self.has_room(nbytes) else iter(self.victims(needed))
        while not self.has_room(nbytes):
            victim = next(victims, None)
            if victim is None:
                short = self.held[self.device] + nbytes - self.problem.budget_bytes
                self._refuse(f"{format_bytes(short)} are missing after {len(self.steps)} steps and nothing more can be sent out")
            self.send_at_once(victim)

    def send_at_once(self, storage: int) -> bool:
        """Send a storage to the fastest tier with room and count on its bytes from now on."""
        for tier in self.tiers:
            if self.send(storage, tier):
                if storage in self.leaving_to:
                    self._let_go(storage)
                return True
        return False

    def send_out(self, storage: int) -> bool:
        """Copy a storage to the fastest tier with room, in the background: its bytes are given back when that is done."""
        return any(self.send(storage, tier) for tier in self.tiers)

    def copy_between(self, storage: int, src: str, dst: str) -> bool:
        """Copy a storage from one other tier to another, if there is room."""
        if not self._has_room_elsewhere(storage, dst):
            return False
        self._do(Copy(storage, src, dst))
        self._charge(dst, self.nbytes[storage])
        self.present[storage].add(dst)
        self.current[storage].add(dst)
        return True

    # -- the step -------------------------------------------------------------------------------------------------------------------

    def run(self) -> Schedule:
        if self.held[self.device] > self.problem.budget_bytes:
            self._refuse(f"what is there at the start takes {format_bytes(self.held[self.device])}")
        self.clock.begin_period()
        for storage in self.home:
            if not self.lasting[storage] and not self.graph.uses[storage]:
                self._bury(storage)
        for op in self.graph.ops:
            self.next_op = op.id
            self._settle()
            self.before(op)
            self.make_ready(op)
            self._compute(op)
            self.after(op)
        self.next_op = len(self.graph.ops)
        self.residents = [s for s in sorted(self.current) if self.lasting[s] and self.device in self.current[s] and s not in self.leaving_to]
        self._go_home()
        return Schedule(tuple(self.steps), self.home)

    def _settle(self) -> None:
        """Give back what has left by now."""
        now = self.clock.now()
        while self.leaving and self.leaving[0][0] <= now:
            _, step, storage = heapq.heappop(self.leaving)
            if self.leaving_to.get(storage, (-1, ""))[0] == step:
                self._let_go(storage)

    def make_ready(self, op: Op) -> None:
        """Have all that the op needs, and room for what it makes; what is missing is fetched while the op waits."""
        touched = {*op.reads, *op.writes, *op.mutates}
        self.make_room(self.bytes_needed(op), touched)
        for storage in dict.fromkeys(op.reads + op.mutates):
            if self.is_away(storage):
                self._fetch(storage, fault=self.faults)

    def _let_next_go(self, needed: set[int]) -> bool:
        kept = []
        found = False
        while self.leaving and not found:
            entry = heapq.heappop(self.leaving)
            storage = entry[2]
            if self.leaving_to.get(storage, (-1, ""))[0] != entry[1]:
                continue
            if storage in needed:
                kept.append(entry)
            else:
                self._let_go(storage)
                found = True
        for entry in kept:
            heapq.heappush(self.leaving, entry)
        return found

    # -- storages -------------------------------------------------------------------------------------------------------------------

    def _has_room_elsewhere(self, storage: int, tier: str) -> bool:
        def full() -> bool:
            return any(self.held[name] + self.nbytes[storage] > self.machine.capacity(name) for name in self.machine.enclosing[tier])

        if full():  # copies of what is on the device give way
            for other in sorted(self.present):
                if tier in self.present[other] and self.device in self.current[other] and tier not in self.home.get(other, ()):
                    if other not in self.leaving_to:
                        self._drop(other, tier)
                    if not full():
                        break
        return not full()

    def _let_go(self, storage: int) -> None:
        del self.leaving_to[storage]
        self._drop(storage, self.device)

    def _stay(self, storage: int) -> None:
        """Call a copy out off; if its bytes elsewhere are not its home, they go."""
        _, tier = self.leaving_to.pop(storage)
        if tier not in self.home.get(storage, ()) and not self.keeps_copy(storage):
            self._drop(storage, tier)

    def _fetch(self, storage: int, *, fault: bool = False) -> None:
        nbytes = self.nbytes[storage]
        source = min(self.current[storage], key=lambda tier: (self.machine.copy_seconds(nbytes, tier, self.device), tier))
        self._do(Copy(storage, source, self.device, fault=fault))
        self._charge(self.device, nbytes)
        self.present[storage].add(self.device)
        self.current[storage].add(self.device)
        if not self.keeps_copy(storage):
            self._forget_elsewhere(storage)

    def _compute(self, op: Op) -> None:
        for storage in op.writes + op.mutates:
            if storage in self.leaving_to:
                self._stay(storage)
        self._do(Compute(op.id, self.on))
        for old, _ in op.in_place:
            self._charge(self.device, -self.nbytes[old])
            self.present[old].discard(self.device)
            self._bury(old)
        for storage in op.writes:
            if self.is_away(storage):
                self._charge(self.device, self.nbytes[storage])
        for storage in op.writes + op.mutates:
            self.present.setdefault(storage, set()).add(self.device)
            self.current[storage] = {self.device}
            self._forget_elsewhere(storage)
        for storage in dict.fromkeys(op.reads + op.writes + op.mutates):
            if not self.lasting[storage] and self.graph.uses[storage][-1] == op.id:
                self._bury(storage)

    def _forget_elsewhere(self, storage: int) -> None:
        """What is on the device stays nowhere else, but for its home."""
        for tier in sorted(self.present[storage] - {self.device, *self.home.get(storage, ())}):
            self._drop(storage, tier)

    def _bury(self, storage: int) -> None:
        self.leaving_to.pop(storage, None)
        for tier in sorted(self.present.pop(storage, ())):
            self._do(Free(storage, tier))
            self._charge(tier, -self.nbytes[storage])
        self.current.pop(storage, None)

    def _drop(self, storage: int, tier: str) -> None:
        self._do(Free(storage, tier))
        self._charge(tier, -self.nbytes[storage])
        self.present[storage].discard(tier)
        self.current[storage].discard(tier)

    # -- the end --------------------------------------------------------------------------------------------------------------------

    def _go_home(self) -> None:
        """Lasting storages end where they began: first those that leave, then those that come."""
        for storage, homes in self.home.items():
            if storage in self.leaving_to and self.device in homes:
                self._stay(storage)
        for storage, homes in self.home.items():
            if self.lasting[storage] and storage in self.present and self.device not in homes and self.device in self.present[storage]:
                self.send(storage, homes[0])
                if storage in self.leaving_to:
                    self._let_go(storage)
        for storage, homes in self.home.items():
            if self.lasting[storage] and storage in self.present and self.device in homes:
                if self.is_away(storage):
                    self.make_room(self.nbytes[storage], set())
                    self._fetch(storage)
                self._forget_elsewhere(storage)

    # -- small things ---------------------------------------------------------------------------------------------------------------

    def _charge(self, tier: str, nbytes: int) -> None:
        for name in self.machine.enclosing[tier]:
            self.held[name] += nbytes

    def _do(self, step: Step) -> float:
        self.steps.append(step)
        return self.clock.advance(step)

    def _refuse(self, why: str) -> NoReturn:
        raise InfeasibleBudget(
            f"no plan within {format_bytes(self.problem.budget_bytes)}: {why}; use a larger budget", least_bytes=self.least_bytes()
        )

    def least_bytes(self) -> int | None:
        """The smallest budget, where it is known."""
        return None


class DemandPaging(Runtime):
    """Whatever is not touched by the op at hand can be away."""

    def least_bytes(self) -> int | None:
        least = least_on_demand(self.problem)
        return least if least > self.problem.budget_bytes else None  # otherwise it is another tier that is full


def least_on_demand(problem: Problem) -> int:
    """What the largest op touches, or the inputs if they are more: the least with which demand paging can do, with room for all else elsewhere."""
    graph, nbytes = problem.graph, [s.nbytes for s in problem.graph.storages]
    largest = sum(s.nbytes for s in graph.storages if s.role is Role.INPUT)
    for op in graph.ops:
        touched = {*op.reads, *op.writes, *op.mutates}
        # Bytes that are handed on are there once; if the new storage is the larger one, as many as it has.
        handed = sum(min(nbytes[old], nbytes[new]) for old, new in op.in_place)
        largest = max(largest, op.workspace_bytes + sum(nbytes[s] for s in touched) - handed)
    return largest + staging_bytes(problem)


def staging_bytes(problem: Problem) -> int:
    """What bounce buffers take of the device."""
    device = problem.device_tier
    return sum(link.staging_bytes for link in problem.machine.links if link.staging_tier == device and device in (link.src, link.dst))


# -- steps that begin as they end -------------------------------------------------------------------------------------------------------


def run_settled(problem: Problem, make: Callable[[Homes], Runtime]) -> Schedule:
    """The second of two runs: what lasts and is on the device at the end of the first is at home there in the second, as far as there is room when
    a step begins; all else is at home in the fastest tier with room."""
    away = homes_elsewhere(problem)
    first = make(away)
    first.run()
    room = problem.budget_bytes - staging_bytes(problem) - sum(s.nbytes for s in problem.graph.storages if s.role is Role.INPUT)
    stay: dict[int, tuple[str, ...]] = {}
    for storage in sorted(first.residents, key=lambda s: (problem.graph.uses[s][0] if problem.graph.uses[s] else 0, s)):
        if problem.graph.storages[storage].nbytes <= room and problem.graph.is_there_at_start(storage):
            room -= problem.graph.storages[storage].nbytes
            stay[storage] = (problem.device_tier,)
    return make({**away, **stay}).run()


def homes_elsewhere(problem: Problem) -> dict[int, tuple[str, ...]]:
    """A home off the device for whatever lasts: the fastest tier with room; what has no bytes stays."""
    tiers = swap_tiers(problem)
    room = {tier: problem.machine.capacity(tier) for tier in tiers}
    found: dict[int, tuple[str, ...]] = {}
    for storage in problem.graph.storages:
        if storage.lasting and storage.nbytes:
            tier = next((tier for tier in tiers if room[tier] >= storage.nbytes), None)
            if tier is not None:
                room[tier] -= storage.nbytes
                found[storage.id] = (tier,)
    return found
