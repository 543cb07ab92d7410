"""Moves, and the runtime that carries them out: each is issued when its op is about to start, and what planning missed is caught on demand.

A planner that works on an ideal timeline says when a storage should leave and when it should be back. Copies run late, and then a list of
fixed frees and fetches waits for things nobody needs. So the moves are played on a clock, and the steps are written down as they happen:

- a storage sent out is given back when its copy ends, or earlier in the list if its bytes are needed (the allocation then waits for the copy);
- what is still here when its fetch is due stays; a fetch that finds no room is tried again before each op that follows;
- what an op needs and is not here is fetched while the op waits;
- if there is still no room, the storage needed last is sent out, to the fastest tier that has room.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NoReturn

from ..errors import InfeasibleBudget, MissingTier
from ..ir import Compute, Copy, Free, Op, Problem, Role, Schedule, Step
from ..simulate import Clock
from ..units import format_bytes


@dataclass(frozen=True, slots=True)
class Move:
    """Just before op `op` starts, send `storage` to `tier`; to the device's tier: fetch it."""

    op: int
    storage: int
    tier: str


def swap_tiers(problem: Problem) -> tuple[str, ...]:
    """The tiers the device can copy to and from, fastest first."""
    device, links = problem.device_tier, problem.machine.link_between
    both_ways = [tier.name for tier in problem.machine.tiers if (device, tier.name) in links and (tier.name, device) in links and tier.capacity_bytes]
    if not both_ways:
        raise MissingTier(f"swapping needs a tier with links from and to {device!r}; machine {problem.machine.name} has none")
    return tuple(sorted(both_ways, key=lambda tier: -links[tier, device].bytes_per_second))


def carry_out(problem: Problem, moves: Iterable[Move], *, home: Mapping[int, tuple[str, ...]] | None = None) -> Schedule:
    """The schedule of a runtime that is given these moves."""
    return _Runtime(problem, moves, home or {}).run()


class _Runtime:
    def __init__(self, problem: Problem, moves: Iterable[Move], home: Mapping[int, tuple[str, ...]]) -> None:
        self.problem, self.graph, self.machine = problem, problem.graph, problem.machine
        self.device, self.on = problem.device_tier, problem.machine.device.name
        self.tiers = swap_tiers(problem)
        self.nbytes = [s.nbytes for s in self.graph.storages]
        self.lasting = [s.lasting for s in self.graph.storages]
        self.home = {s.id: home.get(s.id, (self.device,)) for s in self.graph.storages if s.lasting or s.role is Role.INPUT}
        self.moves: dict[int, list[Move]] = {}
        for move in moves:
            self.moves.setdefault(move.op, []).append(move)
        self.steps: list[Step] = []
        self.present: dict[int, set[str]] = {}  # the tiers that hold bytes of a storage, out of date ones too
        self.current: dict[int, set[str]] = {}  # the tiers that hold what it is now
        self.held = {tier.name: 0 for tier in self.machine.tiers}
        self.leaving: list[tuple[float, int, int]] = []  # (when the copy ends, its step, storage), a heap
        self.leaving_to: dict[int, tuple[int, str]] = {}  # storage -> (step of its copy, tier): what of the heap still holds
        self.late: deque[int] = deque()  # fetches that found no room
        self.next_op = 0
        self.clock = Clock(problem, Schedule((), self.home))
        for link in self.machine.links:
            if link.staging_bytes and self.device in (link.src, link.dst):
                self._charge(link.staging_tier, link.staging_bytes)
        for storage, tiers in self.home.items():
            if self.graph.is_there_at_start(storage):
                self.present[storage], self.current[storage] = set(tiers), set(tiers)
                for tier in tiers:
                    self._charge(tier, self.nbytes[storage])

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
            self._issue(op)
            self._make_ready(op)
            self._compute(op)
        self.next_op = len(self.graph.ops)
        self._go_home()
        return Schedule(tuple(self.steps), self.home)

    # -- before an op ---------------------------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Give back what has left by now."""
        now = self.clock.now()
        while self.leaving and self.leaving[0][0] <= now:
            _, step, storage = heapq.heappop(self.leaving)
            if self.leaving_to.get(storage, (-1, ""))[0] == step:
                self._let_go(storage)

    def _issue(self, op: Op) -> None:
        needed = self._bytes_needed(op)
        self.late.extend(move.storage for move in self.moves.get(op.id, ()) if move.tier == self.device)
        for move in self.moves.get(op.id, ()):
            if move.tier != self.device:
                self._send(move.storage, move.tier)
        while self.late:
            storage = self.late[0]
            if storage in self.leaving_to:
                self._stay(storage)
            if self._is_away(storage) and self.current.get(storage):
                if self.held[self.device] + self.nbytes[storage] + needed > self.problem.budget_bytes:
                    return
                self._fetch(storage)
            self.late.popleft()

    def _make_ready(self, op: Op) -> None:
        touched = {*op.reads, *op.writes, *op.mutates}
        self._make_room(self._bytes_needed(op), touched)
        for storage in dict.fromkeys(op.reads + op.mutates):
            if self._is_away(storage):
                self._fetch(storage)

    def _bytes_needed(self, op: Op) -> int:
        """What the op brings to the device beside what is there."""
        absent = sum(self.nbytes[s] for s in {*op.reads, *op.writes, *op.mutates} if self._is_away(s))
        return absent + op.workspace_bytes - sum(self.nbytes[old] for old, _ in op.in_place)

    def _make_room(self, nbytes: int, needed: set[int]) -> None:
        while self.held[self.device] + nbytes > self.problem.budget_bytes:
            if not self._let_next_go(needed) and not self._send_on_demand(needed):
                short = self.held[self.device] + nbytes - self.problem.budget_bytes
                self._refuse(f"{format_bytes(short)} are missing after {len(self.steps)} steps and nothing more can be sent out")

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

    def _send_on_demand(self, needed: set[int]) -> bool:
        """Send out the storage needed last."""
        here = [s for s, tiers in self.current.items() if self.device in tiers and s not in needed and s not in self.leaving_to and self.nbytes[s]]
        for storage in sorted(here, key=lambda s: (-self._next_use(s), s)):
            for tier in self.tiers:
                if self._send(storage, tier):
                    if storage in self.leaving_to:
                        self._let_go(storage)
                    return True
        return False

    def _next_use(self, storage: int) -> int:
        """The op that uses it next, counted on into the next step for what lasts."""
        uses = self.graph.uses[storage]
        at = bisect_left(uses, self.next_op)
        return uses[at] if at < len(uses) else len(self.graph.ops) + (uses[0] if uses else 0)

    # -- storages -------------------------------------------------------------------------------------------------------------------

    def _is_away(self, storage: int) -> bool:
        return self.device not in self.present.get(storage, ())

    def _send(self, storage: int, tier: str) -> bool:
        """Copy a storage out, or just give it back if the tier has it; False if it is not here or there is no room there."""
        if self.device not in self.current.get(storage, ()) or storage in self.leaving_to:
            return False
        if self.current[storage] - {self.device}:
            self._drop(storage, self.device)
            return True
        tier = next((home for home in self.home.get(storage, ()) if home != self.device), tier)
        if tier not in self.present[storage]:
            if any(self.held[name] + self.nbytes[storage] > self.machine.capacity(name) for name in self.machine.enclosing[tier]):
                return False
            self._charge(tier, self.nbytes[storage])
        end = self._do(Copy(storage, self.device, tier))
        self.present[storage].add(tier)
        self.current[storage].add(tier)
        self.leaving_to[storage] = (len(self.steps), tier)
        heapq.heappush(self.leaving, (end, len(self.steps), storage))
        return True

    def _let_go(self, storage: int) -> None:
        del self.leaving_to[storage]
        self._drop(storage, self.device)

    def _stay(self, storage: int) -> None:
        """Call a copy out off; if its bytes elsewhere are not its home, they go."""
        _, tier = self.leaving_to.pop(storage)
        if tier not in self.home.get(storage, ()):
            self._drop(storage, tier)

    def _fetch(self, storage: int) -> None:
        nbytes = self.nbytes[storage]
        source = min(self.current[storage], key=lambda tier: (self.machine.copy_seconds(nbytes, tier, self.device), tier))
        self._do(Copy(storage, source, self.device))
        self._charge(self.device, nbytes)
        self.present[storage].add(self.device)
        self.current[storage].add(self.device)
        for tier in sorted(self.present[storage] - {self.device, *self.home.get(storage, ())}):
            self._drop(storage, tier)

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
            if self._is_away(storage):
                self._charge(self.device, self.nbytes[storage])
        for storage in op.writes + op.mutates:
            self.present.setdefault(storage, set()).add(self.device)
            self.current[storage] = {self.device}
            for tier in sorted(self.present[storage] - {self.device, *self.home.get(storage, ())}):
                self._drop(storage, tier)
        for storage in dict.fromkeys(op.reads + op.writes + op.mutates):
            if not self.lasting[storage] and self.graph.uses[storage][-1] == op.id:
                self._bury(storage)

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
                self._send(storage, homes[0])
                if storage in self.leaving_to:
                    self._let_go(storage)
        for storage, homes in self.home.items():
            if self.lasting[storage] and storage in self.present and self.device in homes and self._is_away(storage):
                self._make_room(self.nbytes[storage], set())
                self._fetch(storage)

    # -- small things ---------------------------------------------------------------------------------------------------------------

    def _charge(self, tier: str, nbytes: int) -> None:
        for name in self.machine.enclosing[tier]:
            self.held[name] += nbytes

    def _do(self, step: Step) -> float:
        self.steps.append(step)
        return self.clock.advance(step)

    def _refuse(self, why: str) -> NoReturn:
        raise InfeasibleBudget(f"no plan within {format_bytes(self.problem.budget_bytes)}: {why}; use a larger budget")
