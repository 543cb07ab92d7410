"""Lasting state away from the device: a schedule in which some updates run on the cpu and parameters come and go is made from one without.

`away` takes any schedule of a step, however its activations are kept, moved or made again, and moves updates to another processor: their state
lives in a lower tier, gradients leave when their last device op is done, and what an update makes goes where it is read. Parameters that live
elsewhere come a few ops before their first use in forward and in backward, and go after their last. `placed` does so for each update by itself;
one that stays on the device while its state does not has it streamed through: in, updated, out.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from ..ir import Compute, Copy, Free, Op, Phase, Problem, Role, Schedule, Step


@dataclass(frozen=True, slots=True)
class Away:
    """Where the things of one update are."""

    processor: str = "cpu"  # that runs it
    state: str = "dram"  # the tier of what updates alone use
    parameters: str | None = None  # the tier of what forward and backward read; None for the device
    gradients: str = "dram"  # the tier where they wait for the update


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
    frozen = None if parameters is None else Away(processor, state, parameters, host)
    return placed(problem, base, {op: Away(processor, state, parameters, host) for op in moved}, update=update, ahead=ahead, frozen=frozen)


def placed(
    problem: Problem,
    base: Schedule,
    places: Mapping[int, Away],
    *,
    update: str,
    ahead: int = 1,
    frozen: Away | None = None,
    parameters: Mapping[int, str] | None = None,
) -> Schedule:
    """`places` by update. Parameters that nobody updates come and go too where `frozen` says so, or `parameters` by storage."""
    builder = _Away(problem, base, places, ahead, frozen, parameters or {})
    return builder.run("after" if update == "after" and problem.cyclic else "end" if update == "after" else "backward")


class _Away:
    def __init__(
        self,
        problem: Problem,
        base: Schedule,
        places: Mapping[int, Away],
        ahead: int,
        frozen: Away | None,
        parameters: Mapping[int, str],
    ) -> None:
        self.problem, self.graph, self.base, self.places = problem, problem.graph, base, places
        self.moved = set(places)
        self.device, self.ahead = problem.device_tier, ahead
        self.works_in = {processor.name: processor.tier for processor in problem.machine.processors}
        self.steps = [step for step in base.steps if not (isinstance(step, Compute) and step.op in self.moved)]
        self.last_use: dict[int, int] = {}  # of a storage by an op that stays, as a place in the list
        self.first_use: dict[int, int] = {}
        for place, step in enumerate(self.steps):
            if isinstance(step, Compute):
                for storage in self._touched(self.graph.ops[step.op]):
                    self.last_use[storage] = place
                    self.first_use.setdefault(storage, place)
        self.home = dict(base.home)
        self.streamed = self._streamed(frozen, parameters)  # parameters that come and go, and the tier they live in
        self.waits_in: dict[int, str] = {}  # gradients, and the tier in which they wait
        for number, place_of in places.items():
            op, works_in = self.graph.ops[number], self.works_in[place_of.processor]
            for storage in dict.fromkeys(op.mutates + op.reads + op.writes):
                if not self.graph.storages[storage].lasting:
                    if storage in op.reads and storage in self.last_use:
                        self.waits_in[storage] = place_of.gradients
                elif storage in self.streamed:
                    continue
                elif storage not in self.last_use:
                    self.home[storage] = (place_of.state,)
                elif works_in != self.device and (storage in op.mutates or storage in op.reads):
                    self.home[storage] = (self.device, works_in)
        for storage, tier in self.streamed.items():
            self.home[storage] = (tier,)
        self.before: dict[int, list[Step]] = {}  # what is put in the list before the step at this place
        self.after: dict[int, list[Step]] = {}

    def run(self, when: str) -> Schedule:
        self._gradients_leave()
        self._parameters_come_and_go()
        order = self._order(when)
        updates: list[Step] = []
        if when == "backward":
            arrived: dict[int, list[int]] = {}
            for op in order:
                arrived.setdefault(self._complete_at(self.graph.ops[op]), []).append(op)
            for place, ops in sorted(arrived.items()):
                self.after.setdefault(place, []).extend(step for op in ops for step in self._update(op, 0))
        elif when == "after":
            updates = self._pipelined([op for op in order if self._is_elsewhere(op)], -1)
            self._under_forward([op for op in order if not self._is_elsewhere(op)])
        else:
            updates = self._pipelined(order, 0)
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

    def _is_elsewhere(self, op: int) -> bool:
        return self.works_in[self.places[op].processor] != self.device

    def _streamed(self, frozen: Away | None, parameters: Mapping[int, str]) -> dict[int, str]:
        """Parameters that the device only reads and that moved updates, or nobody, change."""
        found: dict[int, str] = {}
        for storage in self.graph.storages:
            writers = self.graph.writers[storage.id]
            if storage.role is not Role.PARAM or not storage.lasting or not storage.nbytes or storage.id not in self.last_use:
                continue
            if not all(op in self.moved for op in writers):
                continue
            tiers = {self.places[op].parameters for op in writers} or {parameters.get(storage.id, frozen.parameters if frozen else None)}
            (tier, *others) = sorted(tiers, key=str)
            if tier is not None and not others:
                found[storage.id] = tier
        return found

    def _gradients_leave(self) -> None:
        """What a moved update reads leaves the device after the last op there that uses it, or stays until its update is over."""
        made_there = {s for op in self.moved for s in self._touched(self.graph.ops[op]) if not self.graph.storages[s].lasting}
        for place, step in enumerate(self.steps):
            leaves = isinstance(step, Free) and step.storage in made_there and not step.form
            if leaves and (step.tier == self.device or step.storage in self.waits_in):
                self.steps[place] = _GONE
        for storage, tier in sorted(self.waits_in.items()):
            if tier != self.device:
                self.after.setdefault(self.last_use[storage], []).extend((Copy(storage, self.device, tier), Free(storage, self.device)))

    def _parameters_come_and_go(self) -> None:
        computes = [place for place, step in enumerate(self.steps) if isinstance(step, Compute)]
        number = {place: count for count, place in enumerate(computes)}
        uses_of: dict[int, list[int]] = {storage: [] for storage in sorted(self.streamed)}
        for place in computes:
            for storage in self._touched(self.graph.ops[self.steps[place].op]) & uses_of.keys():  # type: ignore[union-attr]
                uses_of[storage].append(place)
        for storage, uses in uses_of.items():
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
        earlier = {op: self._earlier(op) for op in self.moved}
        found: list[int] = []
        waiting = sorted(self.moved, key=key)
        left = set(waiting)
        while waiting:
            ready = next(op for op in waiting if not earlier[op] & left)
            waiting.remove(ready)
            left.remove(ready)
            found.append(ready)
        return found

    @cached_property
    def _movers(self) -> dict[int, list[int]]:
        """Moved updates by what they touch."""
        found: dict[int, list[int]] = {}
        for op in sorted(self.moved):
            for storage in self._touched(self.graph.ops[op]):
                found.setdefault(storage, []).append(op)
        return found

    def _earlier(self, op: int) -> set[int]:
        """Moved updates before this one that touch what it touches."""
        return {other for storage in self._touched(self.graph.ops[op]) for other in self._movers[storage] if other < op}

    def _complete_at(self, op: Op) -> int:
        """The place of the last device op that makes what the update reads, or still reads what it changes; of updates it comes after, too."""
        places = [self.last_use.get(storage, -1) for storage in self._touched(op)]
        places += [self._complete_at(self.graph.ops[other]) for other in self._earlier(op.id)]
        return max(places, default=-1)

    def _under_forward(self, order: Sequence[int]) -> None:
        """Updates on the device whose state comes and goes: over when parameters that live elsewhere come for forward, their state an op earlier."""
        computes = [place for place, step in enumerate(self.steps) if isinstance(step, Compute)]
        number = {place: count for count, place in enumerate(computes)}
        fetched: dict[int, list[Step]] = {}
        updated: dict[int, list[Step]] = {}
        for op in order:
            lasting = [s for s in self._touched(self.graph.ops[op]) if s in self.first_use and self.graph.storages[s].lasting]
            first = number[min((self.first_use[s] for s in lasting), default=computes[0])]
            updates, comes = max(0, first - self.ahead), max(0, first - self.ahead - 1)
            fetched.setdefault(computes[comes], []).extend(self._fetch(op, -1) if comes != updates else [])
            updated.setdefault(computes[updates], []).extend(self._update(op, -1, fetched=comes != updates))
        for place in {*fetched, *updated}:
            self.before[place] = [*updated.get(place, []), *fetched.get(place, []), *self.before.get(place, [])]

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
        """What the update needs and does not live where it runs comes there."""
        found, works_in = self.graph.ops[op], self.works_in[self.places[op].processor]
        wanted = [s for s in dict.fromkeys(found.mutates + found.reads) if self.graph.storages[s].lasting and works_in not in self.home[s]]
        steps: list[Step] = [Copy(s, self.home[s][0], works_in, iteration) for s in wanted if self.home[s][0] != self.device]
        for storage in found.reads:
            waits_in = self.waits_in.get(storage, works_in)
            if not self.graph.storages[storage].lasting and waits_in != works_in:
                steps += [Copy(storage, waits_in, works_in, iteration), Free(storage, waits_in, iteration=iteration)]
        return steps

    def _update(self, op: int, iteration: int, *, fetched: bool = False) -> list[Step]:
        graph, found, works_in = self.graph, self.graph.ops[op], self.works_in[self.places[op].processor]
        steps: list[Step] = [] if fetched else self._fetch(op, iteration)
        steps.append(Compute(op, self.places[op].processor, iteration))
        for storage in dict.fromkeys(found.reads + found.writes):
            if not graph.storages[storage].lasting and max(graph.uses[storage]) == op:
                steps.append(Free(storage, works_in, iteration=iteration))
        changed = dict.fromkeys(found.mutates + found.writes)
        for storage in dict.fromkeys(found.mutates + found.writes + found.reads):
            if not graph.storages[storage].lasting:
                continue
            homes = self.home[storage]
            if storage in changed:
                steps += [Copy(storage, works_in, tier, iteration) for tier in homes if tier != works_in]
            if works_in not in homes:
                steps.append(Free(storage, works_in, iteration=iteration))
        return steps


_GONE = Free(-1, "")  # a step that the schedule had and this one has not


def _stays(places: Sequence[int], numbers: Sequence[int], gap: int) -> list[tuple[int, int]]:
    """Uses that follow each other within so many computes are one stay; (first place, last place) of each."""
    if not places:
        return []
    cuts = [count + 1 for count, (one, other) in enumerate(pairwise(numbers)) if other - one > gap]
    starts, stops = [0, *cuts], [*cuts, len(places)]
    return [(places[start], places[stop - 1]) for start, stop in zip(starts, stops, strict=True)]
