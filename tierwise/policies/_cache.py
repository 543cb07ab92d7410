"""A device tier as a cache: walk a schedule and, where bytes run out, send out what was used longest ago; fetch it when it is needed again.

Takes a schedule that computes and frees on the device and says nothing of copies, whatever it recomputes, and returns one that fits. Nothing
leaves before an allocation fails, so with room for everything the schedule stays as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

from ..errors import InfeasibleBudget
from ..ir import Compute, Copy, Free, Op, Problem, Schedule, Step, peak_bytes
from ..units import format_bytes


def swap_least_recent(
    problem: Problem,
    schedule: Schedule,
    *,
    tier: str,
    movable: Callable[[int], bool],
    ahead: Mapping[int, Collection[int]] | None = None,
) -> Schedule:
    """movable: which storages may leave. ahead: for places in the schedule, storages to fetch before that step if there is room."""
    if peak_bytes(problem, schedule)[problem.device_tier] <= problem.budget_bytes:
        return schedule
    return _Cache(problem, schedule, tier, movable, ahead or {}).run()


class _Cache:
    def __init__(self, problem: Problem, schedule: Schedule, tier: str, movable: Callable[[int], bool], ahead: Mapping[int, Collection[int]]) -> None:
        self.problem, self.graph, self.schedule = problem, problem.graph, schedule
        self.device, self.tier, self.movable, self.ahead = problem.device_tier, tier, movable, ahead
        self.size = [storage.nbytes for storage in self.graph.storages]
        self.steps: list[Step] = []
        self.here: dict[int, None] = {}  # least recently used first
        self.away: set[int] = set()  # what the other tier holds, up to date
        self.least = 0  # the smallest budget: all that may leave and the op at hand does not touch can be away
        links = (problem.machine.link_between[self.device, tier], problem.machine.link_between[tier, self.device])
        self.held = self.fixed = sum(link.staging_bytes for link in links if link.staging_tier == self.device)
        for storage, home in schedule.home.items():
            if self.device in home and (problem.cyclic or self.graph.is_there_at_start(storage)):
                self._arrive(storage)

    def run(self) -> Schedule:
        for place, step in enumerate(self.schedule.steps):
            if isinstance(step, Compute):
                op = self.graph.ops[step.op]
                self._make_ready(op)
                self._fetch_ahead(op, self.ahead.get(place, ()))
                self._compute(op, step)
            elif isinstance(step, Free):
                self._free(step.storage)
            else:
                raise TypeError(f"step {place} is {step}; a schedule to be cached has no copies yet")
        if self.least > self.problem.budget_bytes:
            raise InfeasibleBudget(f"with everything else sent away the step still needs {format_bytes(self.least)}", least_bytes=self.least)
        return Schedule(tuple(self.steps), self.schedule.home)

    def _make_ready(self, op: Op) -> None:
        """Everything the op reads is here, and there is room for what it makes."""
        needed = dict.fromkeys(op.reads + op.mutates)
        taken_over = {new: old for old, new in op.in_place}
        room = op.workspace_bytes
        for made in dict.fromkeys(op.writes):
            if made in taken_over:
                room += max(0, self.size[made] - self.size[taken_over[made]])
            elif made not in self.here or not self.graph.storages[made].lasting:
                room += self.size[made]  # what is still here is made a second time
        locked = sum(self.size[s] for s in needed if self.movable(s))
        self.least = max(self.least, self.fixed + locked + room)
        for storage in needed:
            self._touch(storage)
        missing = [storage for storage in needed if storage not in self.here]
        self._make_room(room + sum(self.size[s] for s in missing), needed)
        for storage in missing:
            self._fetch(storage)

    def _fetch_ahead(self, op: Op, wanted: Iterable[int]) -> None:
        room = op.workspace_bytes + sum(self.size[s] for s in op.writes)
        for storage in wanted:
            if storage in self.away and storage not in self.here and self.held + self.size[storage] + room <= self.problem.budget_bytes:
                self._fetch(storage)

    def _make_room(self, need: int, locked: Collection[int]) -> None:
        for storage in list(self.here):
            if self.held + need <= self.problem.budget_bytes:
                return
            if storage in locked or not self.movable(storage) or not self.size[storage]:
                continue
            if storage not in self.away:
                self.steps.append(Copy(storage, self.device, self.tier))
                self.away.add(storage)
            self.steps.append(Free(storage, self.device))
            self._leave(storage)

    def _compute(self, op: Op, step: Compute) -> None:
        for storage in op.mutates:
            self._forget_away(storage)
        self.steps.append(step)
        for old, _ in op.in_place:
            self._forget_away(old)
            self._leave(old)
        for storage in op.writes:
            if storage not in self.here:
                self._arrive(storage)
            self._touch(storage)

    def _free(self, storage: int) -> None:
        if storage in self.here:
            self.steps.append(Free(storage, self.device))
            self._leave(storage)
        self._forget_away(storage)

    def _fetch(self, storage: int) -> None:
        self.steps.append(Copy(storage, self.tier, self.device))
        self._arrive(storage)

    def _forget_away(self, storage: int) -> None:
        if storage in self.away:
            self.away.discard(storage)
            self.steps.append(Free(storage, self.tier))

    def _arrive(self, storage: int) -> None:
        self.here[storage] = None
        self.held += self.size[storage]
        if not self.movable(storage):
            self.fixed += self.size[storage]

    def _leave(self, storage: int) -> None:
        del self.here[storage]
        self.held -= self.size[storage]
        if not self.movable(storage):
            self.fixed -= self.size[storage]

    def _touch(self, storage: int) -> None:
        if storage in self.here:
            del self.here[storage]
            self.here[storage] = None
