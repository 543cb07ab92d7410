"""A policy's schedule of the expanded step becomes what can run: for each region call what it saves, what of that is sent away, and when.

Copies and frees snap to the borders of region calls. What a region was given can be kept or sent but not made again, since that would run an
earlier region's forward a second time; tensors outside of regions are kept. The coarse image of the result is judged again: a schedule that
lives on what is lost here does not fit, and that is said.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..errors import NotExecutable
from ..ir import INPUTS, CallPlan, Compute, Copy, Free, Phase, Problem, Role, Schedule
from .expand import Expanded

MOST_SETS = 4  # of saved values for a region class: each is a compilation


@dataclass(frozen=True, slots=True)
class Lowered:
    """By region call, before its choice has a name."""

    saved: Mapping[int, frozenset[str]]  # values forward leaves for backward
    plans: Mapping[int, CallPlan]  # with an empty choice
    notes: tuple[str, ...]


def lower(problem: Problem, expanded: Expanded, schedule: Schedule) -> Lowered:
    reader = _Reader(problem, expanded, schedule)
    saved = reader.saved_values()
    moved = {call: reader.movement(call, saved[call]) for call in expanded.backward}
    return Lowered(saved, moved, tuple(reader.notes()))


def clustered(saved: Mapping[int, frozenset[str]], nbytes: Mapping[str, int], most: int = MOST_SETS) -> dict[int, frozenset[str]]:
    """At most `most` different sets for the calls of one class: rare ones take the largest of the others that saves nothing they do not."""
    counts = Counter(saved.values())
    kept = sorted(counts, key=lambda values: (-counts[values], sorted(values)))[:most]
    smallest = min(counts, key=lambda values: (sum(nbytes[value] for value in values), sorted(values)))
    if smallest not in kept:  # somebody may have nothing else within the budget
        kept[-1] = smallest

    def nearest(values: frozenset[str]) -> frozenset[str]:
        size = sum(nbytes[value] for value in values)
        fitting = [other for other in kept if sum(nbytes[value] for value in other) <= size] or [smallest]
        return max(fitting, key=lambda other: (len(other & values), sum(nbytes[value] for value in other), sorted(other)))

    return {call: values if values in kept else nearest(values) for call, values in saved.items()}


class _Reader:
    def __init__(self, problem: Problem, expanded: Expanded, schedule: Schedule) -> None:
        self.problem, self.expanded, self.schedule = problem, expanded, schedule
        self.device = problem.machine.device.name
        self.place_of: dict[int, int] = {}  # op -> where it first runs
        self.copied_out: dict[int, list[tuple[int, str]]] = defaultdict(list)
        self.copied_in: dict[int, list[int]] = defaultdict(list)
        self.freed: dict[int, list[int]] = defaultdict(list)
        for place, step in enumerate(schedule.steps):
            self._note(place, step)
        self.order = sorted(expanded.backward, key=lambda call: self.place_of[expanded.forward[call][-1]])
        self.forward_ends = [self.place_of[expanded.forward[call][-1]] for call in self.order]
        back = sorted(expanded.backward, key=lambda call: self.place_of[expanded.backward[call]])
        self.backward_starts = [self.place_of[expanded.backward[call]] for call in back]
        self.backward_order = {call: place for place, call in enumerate(back)}

    def _note(self, place: int, step: object) -> None:
        tier = self.problem.device_tier
        if isinstance(step, Compute) and self.problem.graph.ops[step.op].phase is Phase.UPDATE:
            self.place_of.setdefault(step.op, place)  # where and when: lasting.py
        elif isinstance(step, Compute):
            if step.on != self.device:
                raise NotExecutable(
                    f"{self.problem.graph.ops[step.op].name} runs on {step.on}; this runtime runs ops of a step on {self.device} only"
                )
            if step.iteration:
                raise NotExecutable(f"{self.problem.graph.ops[step.op].name} belongs to the step before; this runtime ends a step before the next")
            if step.variant:
                raise NotExecutable(f"{self.problem.graph.ops[step.op].name} runs by {step.variant}; this runtime runs the kernels torch chooses")
            self.place_of.setdefault(step.op, place)
        elif isinstance(step, Copy) and (step.src_form or step.dst_form):
            name, codec = self.problem.graph.storages[step.storage].name, step.src_form or step.dst_form
            raise NotExecutable(f"{name} is held or sent as {codec}; this runtime sends bytes as they are")
        elif isinstance(step, Copy) and step.src == tier:
            self.copied_out[step.storage].append((place, step.dst))
        elif isinstance(step, Copy) and step.dst == tier:
            self.copied_in[step.storage].append(place)
        elif isinstance(step, Free) and step.tier == tier:
            self.freed[step.storage].append(place)

    def saved_values(self) -> dict[int, frozenset[str]]:
        """The values whose bytes as forward made them, here or brought back, are read from the region's backward or on the way to it."""
        graph, expanded = self.problem.graph, self.expanded
        saved: dict[int, set[str]] = {call: set() for call in expanded.backward}
        ran: set[int] = set()
        made_again: set[int] = set()  # storages whose bytes here come from a recomputation
        for step in self.schedule.steps:
            if not isinstance(step, Compute):
                continue
            op = graph.ops[step.op]
            is_again = step.op in ran
            ran.add(step.op)
            if is_again or op.id in expanded.backward.values():
                for storage in op.reads:
                    if storage in expanded.values and storage not in made_again:
                        call, value = expanded.values[storage]
                        saved[call].add(value)
            if is_again:
                made_again.update(op.writes)
        return {call: frozenset(values) for call, values in saved.items()}

    def movement(self, call: int, saved: frozenset[str]) -> CallPlan:
        by_value = {value: storage for storage, (owner, value) in self.expanded.values.items() if owner == call}
        sent = {value: by_value[value] for value in sorted(saved) if self._leaves(call, by_value[value])}
        given = [storage for storage in self.expanded.inputs[call] if self._is_own(call, storage) and self._leaves(call, storage)]
        storages = [*sent.values(), *given]
        if not storages:
            return CallPlan("")
        tiers = Counter(tier for storage in storages for _, tier in self.copied_out[storage])
        return CallPlan(
            choice="",
            sent=(*sent, *((INPUTS,) if given else ())),
            tier=max(sorted(tiers), key=tiers.__getitem__),
            release=max(1, max(self._release(call, storage) for storage in storages)),
            fetch=max(1, max(self._fetch(call, storage) for storage in storages)),
        )

    def _is_own(self, call: int, storage: int) -> bool:
        """Whether no other backward reads it: what several share is held by all of them."""
        readers = [op for op in self.problem.graph.readers[storage] if op >= min(self.expanded.backward.values())]
        return readers == [self.expanded.backward[call]]

    def _leaves(self, call: int, storage: int) -> bool:
        """Whether it is copied out after this call's forward and brought back for its backward."""
        start, end = self.place_of[self.expanded.forward[call][-1]], self.place_of[self.expanded.backward[call]]
        return any(place < end for place, _ in self.copied_out[storage]) and any(start <= place <= end for place in self.copied_in[storage])

    def _release(self, call: int, storage: int) -> int:
        out = max((place for place, _ in self.copied_out[storage]), default=0)
        free = next((place for place in self.freed[storage] if place > out), self.forward_ends[-1])
        return bisect_right(self.forward_ends, free) - 1 - self.order.index(call)

    def _fetch(self, call: int, storage: int) -> int:
        end = self.place_of[self.expanded.backward[call]]
        back = max(place for place in self.copied_in[storage] if place <= end)
        return self.backward_order[call] - bisect_left(self.backward_starts, back)

    def notes(self) -> Sequence[str]:
        graph, expanded = self.problem.graph, self.expanded
        moving = [s for s in self.copied_out if not graph.storages[s].lasting and graph.storages[s].role is not Role.GRAD]
        glue = [s for s in moving if s not in expanded.values and all(s not in given for given in expanded.inputs.values())]
        found = []
        if glue:
            largest = max(glue, key=lambda s: graph.storages[s].nbytes)
            found.append(f"{len(glue)} storages outside of regions are kept instead of copied, {graph.storages[largest].name} the largest")
        return found
