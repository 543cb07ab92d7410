"""The same step asked another way, and the way back: updates right behind their gradients, on another processor, or with their state elsewhere.

A policy that plans activations knows nothing of where optimizer state lives. So it is asked about a step from which that is gone: ops stand in
another order, updates that another processor runs are left out, state that lives elsewhere weighs nothing but while its update runs, and updates
that follow each other are one op. `back` turns its answer into a schedule of the step itself, with the copies that were left out.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ..ir import Compute, Copy, Costs, Free, Graph, Machine, Op, Phase, Problem, Role, Schedule, Step
from ._lasting import away
from ._slots import precedences


@dataclass(frozen=True)
class Reshaped:
    """`order`: the ops of the step, as they run; `moved`: updates on another processor; `streamed`: updates whose state comes when they run."""

    step: Problem
    order: tuple[int, ...]
    moved: tuple[int, ...] = ()
    streamed: tuple[int, ...] = ()
    update: str = "after"  # when moved updates run: after backward, or each during it
    tier: str = "dram"
    processor: str = "cpu"
    window_bytes: int = 0  # how much state may be on the device ahead of its update
    lane_share: float = 1.0  # of the links' rates, what the planner may count on
    parameters_away: bool = False  # parameters of moved updates live in the tier, too, and come for each use

    # -- the question -------------------------------------------------------------------------------------------------------------

    @cached_property
    def places(self) -> tuple[tuple[int, ...], ...]:
        """The ops a planner is asked about, in order: each by itself, but updates that follow each other together."""
        gone, graph = set(self.moved), self.step.graph
        streamed, largest = set(self.streamed), self.window_bytes // 2
        found: list[tuple[int, ...]] = []
        open_bytes = 0
        for op in self.order:
            if op in gone:
                continue
            nbytes = self._state_bytes(op) if op in streamed else 0
            if _only_updates(graph.ops[op]) and found and _only_updates(graph.ops[found[-1][-1]]) and open_bytes + nbytes <= largest:
                found[-1] += (op,)
                open_bytes += nbytes
            else:
                found.append((op,))
                open_bytes = nbytes
        return tuple(found)

    @cached_property
    def problem(self) -> Problem:
        graph, costs = self.step.graph, self.step.costs
        weightless, held = self._weightless, self._held_ahead
        ops = tuple(_together([graph.ops[op] for op in group], place, held[place]) for place, group in enumerate(self.places))
        storages = tuple(replace(s, nbytes=0) if s.id in weightless else s for s in graph.storages)
        names = [processor.name for processor in self.step.machine.processors]
        seconds = {
            (place, on): sum(costs.op_seconds[op, on] for op in group)
            for place, group in enumerate(self.places)
            for on in names
            if all((op, on) in costs.op_seconds for op in group)
        }
        place_of = {group[0]: place for place, group in enumerate(self.places)}
        variants = tuple(
            replace(variant, op=place_of[variant.op], workspace_bytes=variant.workspace_bytes + held[place_of[variant.op]])
            for variant in costs.variants
            if variant.op in place_of and len(self.places[place_of[variant.op]]) == 1
        )
        return Problem(
            replace(graph, ops=ops, storages=storages), _slower(self.step.machine, self.lane_share), Costs(seconds, costs.codecs, variants),
            self.step.cyclic,
        )  # fmt: skip

    @cached_property
    def stays_bytes(self) -> int:
        """What lasts and is on the device all the time."""
        storages = self.step.graph.storages
        return self.step.graph.lasting_bytes - sum(storages[s].nbytes for s in self._weightless)

    @cached_property
    def _weightless(self) -> set[int]:
        """What the planner does not hear of: state that lives elsewhere, and parameters."""
        return {s for op in (*self.moved, *self.streamed) for s in own_state(self.step.graph, op)} | self._parameters

    def _state_bytes(self, op: int) -> int:
        return sum(self.step.graph.storages[s].nbytes for s in own_state(self.step.graph, op))

    @cached_property
    def _fetched_before(self) -> dict[int, int]:
        """For each place whose state is streamed, the place before which that is fetched: as late as the link lets it be in time, but with no
        more than the window on the device."""
        machine, streamed = self.step.machine, set(self.streamed)
        starts = [0.0]
        for group in self.places:
            starts.append(starts[-1] + sum(self.step.device_seconds[op] for op in group))
        sizes = {place: nbytes for place, group in enumerate(self.places) if (nbytes := sum(self._state_bytes(op) for op in group if op in streamed))}
        found: dict[int, int] = {}
        begin = float("inf")
        for place in sorted(sizes, reverse=True):
            begin = min(begin, starts[place]) - machine.copy_seconds(sizes[place], self.tier, self.step.device_tier)
            found[place] = max(0, min(place, bisect_right(starts, begin) - 1))
        ahead = sorted(sizes)
        held = first = 0
        for last, place in enumerate(ahead):  # what is too much beside it has left before it comes
            held += sizes[place]
            while first < last and held > self.window_bytes:
                held -= sizes[ahead[first]]
                first += 1
            if first:
                found[place] = max(found[place], min(place, ahead[first - 1] + 1))
        return found

    @cached_property
    def _parameters(self) -> set[int]:
        """Those that only moved updates change."""
        graph, moved = self.step.graph, set(self.moved)
        if not self.parameters_away:
            return set()
        return {
            s.id
            for s in graph.storages
            if s.role is Role.PARAM and s.lasting and s.nbytes and {*graph.writers[s.id]} and {*graph.writers[s.id]} <= moved
        }

    @cached_property
    def _held_ahead(self) -> list[int]:
        """What is on the device for an op that the planner does not know of: state on its way to its update, parameters for this op and the next."""
        graph, parameters = self.step.graph, self._parameters
        uses = [{s for op in group for s in graph.ops[op].reads if s in parameters} for group in self.places] if parameters else []
        state = self._state_ahead
        if not parameters:
            return state
        ahead = [uses[place] | (uses[place + 1] if place + 1 < len(uses) else set()) for place in range(len(uses))]
        return [held + sum(graph.storages[s].nbytes for s in ahead[place]) for place, held in enumerate(state)]

    @cached_property
    def _state_ahead(self) -> list[int]:
        streamed = set(self.streamed)
        change = [0] * (len(self.places) + 1)
        for place, fetched in self._fetched_before.items():
            nbytes = sum(self._state_bytes(op) for op in self.places[place] if op in streamed)
            change[fetched] += nbytes
            change[place + 1] -= nbytes
        held, found = 0, []
        for difference in change[:-1]:
            held += difference
            found.append(held)
        return found

    # -- the answer ---------------------------------------------------------------------------------------------------------------

    def back(self, schedule: Schedule) -> Schedule:
        """The schedule of the step itself that this answer to `problem` stands for."""
        graph, device, streamed = self.step.graph, self.step.device_tier, set(self.streamed)
        fetches: dict[int, list[Step]] = {}
        for place, fetched in sorted(self._fetched_before.items()):
            brought = [s for op in self.places[place] if op in streamed for s in own_state(graph, op)]
            fetches.setdefault(fetched, []).extend(Copy(s, self.tier, device) for s in brought)
        steps: list[Step] = []
        begun = 0  # places whose fetches are in the list
        for step in schedule.steps:
            if not isinstance(step, Compute):
                steps.append(step)
                continue
            while begun <= step.op:  # what runs again lies before
                steps += fetches.get(begun, ())
                begun += 1
            for op in self.places[step.op]:
                steps.append(replace(step, op=op))
                if op in streamed:
                    for storage in own_state(graph, op):
                        steps += (Copy(storage, device, self.tier), Free(storage, device))
        home = dict(schedule.home) | {s: (self.tier,) for op in self.streamed for s in own_state(graph, op)}
        found = replace(schedule, steps=tuple(steps), home=home, addresses={})
        if self.moved:
            parameters = self.tier if self.parameters_away else None
            found = away(
                self.step, found, self.moved, update=self.update, state=self.tier, host=self.tier, processor=self.processor, parameters=parameters
            )
        return found


def _only_updates(op: Op) -> bool:
    """An update that makes nothing but what lasts."""
    return op.phase is Phase.UPDATE and not op.in_place and not op.writes


def _together(ops: Sequence[Op], place: int, held_bytes: int) -> Op:
    workspace = max(op.workspace_bytes for op in ops) + held_bytes
    if len(ops) == 1:
        return replace(ops[0], id=place, workspace_bytes=workspace)
    mutates = dict.fromkeys(s for op in ops for s in op.mutates)
    reads = tuple(s for s in dict.fromkeys(s for op in ops for s in op.reads) if s not in mutates)
    return replace(ops[0], id=place, name=f"{len(ops)} updates", reads=reads, mutates=tuple(mutates), workspace_bytes=workspace, replayable=False)


def _slower(machine: Machine, share: float) -> Machine:
    if share == 1.0:
        return machine
    return machine.with_rates(lambda _, __, rate: rate * share)


# -- what there is to choose from -------------------------------------------------------------------------------------------------------


def own_state(graph: Graph, update: int) -> tuple[int, ...]:
    """What lasts and no other op touches: an update's moments and masters."""
    op, storages = graph.ops[update], graph.storages
    return tuple(s for s in dict.fromkeys(op.mutates) if storages[s].lasting and storages[s].nbytes and graph.uses[s] == (update,))


def updates_first(graph: Graph) -> tuple[int, ...]:
    """An order in which every update runs as soon as all it needs is there: its gradient goes with it."""
    before = precedences(graph)
    after: list[list[int]] = [[] for _ in before]
    for op, needed in enumerate(before):
        for each in needed:
            after[each].append(op)
    waits = [len(needed) for needed in before]

    def rank(op: int) -> tuple[bool, int]:
        return graph.ops[op].phase is not Phase.UPDATE, op

    ready = [(rank(op), op) for op, count in enumerate(waits) if not count]
    heapq.heapify(ready)
    found: list[int] = []
    while ready:
        _, op = heapq.heappop(ready)
        found.append(op)
        for each in after[op]:
            waits[each] -= 1
            if not waits[each]:
                heapq.heappush(ready, (rank(each), each))
    return tuple(found)


def evenly(graph: Graph, updates: Sequence[int], nbytes: float) -> tuple[int, ...]:
    """Updates, spread over all of them, whose own state is at least so many bytes together; all of them if that is less."""
    sizes = {op: sum(graph.storages[s].nbytes for s in own_state(graph, op)) for op in updates}
    total = sum(sizes.values())
    if nbytes <= 0 or not total:
        return ()
    share = min(1.0, nbytes / total)
    found: list[int] = []
    seen = taken = 0
    for op, size in sizes.items():
        seen += size
        if size and taken < seen * share:
            found.append(op)
            taken += size
    return tuple(found)
