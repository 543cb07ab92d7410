"""Lasting state away from the device: a schedule in which some updates run on the cpu and parameters come and go is made from one without.

`away` takes any schedule of a step, however its activations are kept, moved or made again, and moves updates to another processor: their state
lives in a lower tier, gradients leave when their last device op is done, and what an update makes goes where it is read. Parameters that live
elsewhere come a few ops before their first use in forward and in backward, and go after their last.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import pairwise

from ..ir import Compute, Copy, Free, Op, Phase, Problem, Role, Schedule, Step


def movable(problem: Problem, processor: str = "cpu") -> list[int]:
    """Updates that the processor can run, and whose results nobody else needs before they last."""
    graph = problem.graph
    moved = {op.id for op in graph.ops if op.phase is Phase.UPDATE and (op.id, processor) in problem.costs.op_seconds}
    while True:
        kept = {op for op in moved if all(_stays_among(problem, storage, moved) for storage in graph.ops[op].writes + graph.ops[op].reads)}
        if kept == moved:
            return sorted(moved)
        moved = kept


def _stays_among(problem: Problem, storage: int, moved: Collection[int]) -> bool:
    """A passing storage that an update makes is used by moved updates only."""
    graph = problem.graph
    made_by = graph.producer(storage)
    passing = not graph.storages[storage].lasting and made_by is not None and graph.ops[made_by].phase is Phase.UPDATE
    return not passing or (storage not in graph.consumed_by and all(use in moved for use in graph.uses[storage]))


def away(
    problem: Problem,
    base: Schedule,
    moved: Sequence[int],
    *,
    update: str,
    state: str = "dram",
    parameters: str | None = None,
    ahead: int = 1,
    host: str = "dram",
    processor: str = "cpu",
) -> Schedule:
    """`moved` are updates, by op. state: the tier of what they alone use; parameters: the tier of what forward and backward read, None for the
    device. update: "after" backward and under the next forward, or "backward", each when its gradient is there."""
    builder = _Away(problem, base, moved, state, parameters, ahead, host, processor)
    return builder.run("after" if update == "after" and problem.cyclic else "end" if update == "after" else "backward")


class _Away:
    def __init__(
        self,
        problem: Problem,
        base: Schedule,
        moved: Sequence[int],
        state: str,
        parameters: str | None,
        ahead: int,
        host: str,
        processor: str,
    ) -> None:
        self.problem, self.graph, self.base = problem, problem.graph, base
        self.moved = set(moved)
        self.device, self.host, self.state, self.ahead, self.processor = problem.device_tier, host, state, ahead, processor
        self.steps = [step for step in base.steps if not (isinstance(step, Compute) and step.op in self.moved)]
        self.last_use: dict[int, int] = {}  # of a storage by an op that stays, as a place in the list
        for place, step in enumerate(self.steps):
            if isinstance(step, Compute):
                for storage in self._touched(self.graph.ops[step.op]):
                    self.last_use[storage] = place
        self.home = dict(base.home)
        self.streamed = self._streamed(parameters)
        for op in (self.graph.ops[number] for number in moved):
            for storage in op.mutates + op.reads + op.writes:
                if not self.graph.storages[storage].lasting or storage in self.streamed:
                    continue
                if storage not in self.last_use:
                    self.home[storage] = (state,)
                elif storage in op.mutates or storage in op.reads:
                    self.home[storage] = (self.device, host)
        for storage in self.streamed:
            assert parameters is not None
            self.home[storage] = (parameters,)
        self.before: dict[int, list[Step]] = {}  # what is put in the list before the step at this place
        self.after: dict[int, list[Step]] = {}

    def run(self, when: str) -> Schedule:
        self._gradients_leave()
        self._parameters_come_and_go()
        order = self._order(when)
        if when == "backward":
            arrived: dict[int, list[int]] = {}
            for op in order:
                arrived.setdefault(self._complete_at(self.graph.ops[op]), []).append(op)
            for place, ops in sorted(arrived.items()):
                self.after.setdefault(place, []).extend(step for op in ops for step in self._update(op, 0))
            updates: list[Step] = []
        else:
            updates = self._pipelined(order, -1 if when == "after" else 0)
        steps: list[Step] = list(updates) if when == "after" else []
        steps += self.after.get(-1, [])
        for place, step in enumerate(self.steps):
            steps += self.before.get(place, [])
            if step is not _GONE:
                steps.append(step)
            steps += self.after.get(place, [])
        if when == "end":
            steps += updates
        return replace(self.base, steps=tuple(steps), home=self.home, addresses={})

    def _touched(self, op: Op) -> set[int]:
        return {*op.reads, *op.writes, *op.mutates}

    def _streamed(self, tier: str | None) -> set[int]:
        """Parameters that the device only reads and that moved updates, or nobody, change."""
        if tier is None:
            return set()
        found = set()
        for storage in self.graph.storages:
            users = self.graph.writers[storage.id]
            if storage.role is Role.PARAM and storage.lasting and storage.nbytes and all(op in self.moved for op in users):
                found.add(storage.id)
        return {storage for storage in found if storage in self.last_use}

    def _gradients_leave(self) -> None:
        """What a moved update reads leaves the device after the last op there that uses it, instead of after the update."""
        leaving = {s for op in self.moved for s in self.graph.ops[op].reads if not self.graph.storages[s].lasting and s in self.last_use}
        made_there = {s for op in self.moved for s in self._touched(self.graph.ops[op]) if not self.graph.storages[s].lasting}
        for place, step in enumerate(self.steps):
            if isinstance(step, Free) and step.storage in made_there and not step.form and (step.tier == self.device or step.storage in leaving):
                self.steps[place] = _GONE
        for storage in sorted(leaving):
            self.after.setdefault(self.last_use[storage], []).extend((Copy(storage, self.device, self.host), Free(storage, self.device)))

    def _parameters_come_and_go(self) -> None:
        computes = [place for place, step in enumerate(self.steps) if isinstance(step, Compute)]
        number = {place: count for count, place in enumerate(computes)}
        for storage in sorted(self.streamed):
            uses = [place for place in computes if storage in self._touched(self.graph.ops[self.steps[place].op])]  # type: ignore[union-attr]
            free_from = 0
            for stay in _stays(uses, [number[place] for place in uses], self.ahead + 1):
                comes = computes[max(number[stay[0]] - self.ahead, free_from)]
                self.before.setdefault(comes, []).append(Copy(storage, self.home[storage][0], self.device))
                self.after.setdefault(stay[1], []).append(Free(storage, self.device))
                free_from = min(number[stay[1]] + 1, len(computes) - 1)

    def _order(self, when: str) -> list[int]:
        """In program order where one update needs another; else what the next forward needs first, or what is complete first."""
        needed = {op: min((self.graph.uses[s][0] for s in self._touched(self.graph.ops[op]) if self.graph.storages[s].lasting), default=0)
                  for op in self.moved}  # fmt: skip
        key = (lambda op: (self._complete_at(self.graph.ops[op]), op)) if when == "backward" else (lambda op: (needed[op], op))
        found: list[int] = []
        waiting = sorted(self.moved, key=key)
        while waiting:
            ready = next(op for op in waiting if not any(before in waiting for before in self._earlier(op)))
            waiting.remove(ready)
            found.append(ready)
        return found

    def _earlier(self, op: int) -> set[int]:
        """Moved updates before this one that touch what it touches."""
        mine = self._touched(self.graph.ops[op])
        return {other for other in self.moved if other < op and mine & self._touched(self.graph.ops[other])}

    def _complete_at(self, op: Op) -> int:
        """The place of the last device op that makes what the update reads, or still reads what it changes; of updates it comes after, too."""
        places = [self.last_use.get(storage, -1) for storage in self._touched(op)]
        places += [self._complete_at(self.graph.ops[other]) for other in self._earlier(op.id)]
        return max(places, default=-1)

    def _pipelined(self, order: Sequence[int], iteration: int) -> list[Step]:
        """One update's state is read while the one before it is computed."""
        fetches = [self._fetch(op, iteration) for op in order]
        steps: list[Step] = list(fetches[0]) if fetches else []
        for place, op in enumerate(order):
            nearby = self._touched(self.graph.ops[order[place + 1]]) if place + 1 < len(order) else set()
            if place + 1 < len(order) and not nearby & self._touched(self.graph.ops[op]):
                steps += fetches[place + 1]
                steps += self._update(op, iteration, fetched=True)
            else:
                steps += self._update(op, iteration, fetched=True)
                if place + 1 < len(order):
                    steps += fetches[place + 1]
        return steps

    def _fetch(self, op: int, iteration: int) -> list[Step]:
        """What lives below host memory comes there."""
        found = self.graph.ops[op]
        wanted = [s for s in dict.fromkeys(found.mutates + found.reads) if self.graph.storages[s].lasting and self.host not in self.home[s]]
        return [Copy(s, self.home[s][0], self.host, iteration) for s in wanted if self.home[s][0] != self.device]

    def _update(self, op: int, iteration: int, *, fetched: bool = False) -> list[Step]:
        graph, found = self.graph, self.graph.ops[op]
        steps: list[Step] = [] if fetched else self._fetch(op, iteration)
        steps.append(Compute(op, self.processor, iteration))
        for storage in dict.fromkeys(found.reads + found.writes):
            if not graph.storages[storage].lasting and max(graph.uses[storage]) == op:
                steps.append(Free(storage, self.host, iteration=iteration))
        changed = dict.fromkeys(found.mutates + found.writes)
        for storage in dict.fromkeys(found.mutates + found.writes + found.reads):
            if not graph.storages[storage].lasting:
                continue
            homes = self.home[storage]
            if storage in changed:
                steps += [Copy(storage, self.host, tier, iteration) for tier in homes if tier != self.host]
            if self.host not in homes:
                steps.append(Free(storage, self.host, iteration=iteration))
        return steps


_GONE = Free(-1, "")  # a step that the schedule had and this one has not


def _stays(places: Sequence[int], numbers: Sequence[int], gap: int) -> list[tuple[int, int]]:
    """Uses that follow each other within so many computes are one stay; (first place, last place) of each."""
    if not places:
        return []
    cuts = [count + 1 for count, (one, other) in enumerate(pairwise(numbers)) if other - one > gap]
    starts, stops = [0, *cuts], [*cuts, len(places)]
    return [(places[start], places[stop - 1]) for start, stop in zip(starts, stops, strict=True)]
