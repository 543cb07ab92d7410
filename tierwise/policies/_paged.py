"""Checkmate's program over stages with a second memory: copies out and in compete with recomputation for bytes and for time.

A copy begins with a stage and runs beside the program's own ops; one that takes longer than its stage goes on in the stages after it. What is paged
in takes its bytes from the start and is there when the copy has ended.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from ..ir import Compute, Copy, Free, Problem, Role, Schedule, Step
from ._milp import Solution
from ._nodes import Nodes
from ._stages import StageProgram

LEAST_COST = 1e-4  # of a copy that hides, in its seconds: of equal plans the one that copies least


def copy_ends(nodes: Nodes, stage: int, seconds: float) -> int:
    """The stage with which a copy ends that begins with a stage and takes so long."""
    while stage + 1 < len(nodes) and (seconds := seconds - nodes.nodes[stage].seconds) > 0:
        stage += 1
    return stage


def shares(nodes: Nodes, stage: int, end: int) -> Iterator[tuple[int, float]]:
    """How a copy from the start of one stage to the end of another is divided among them."""
    room = sum(nodes.nodes[t].seconds for t in range(stage, end + 1))
    for t in range(stage, end + 1):
        yield t, nodes.nodes[t].seconds / room if room else 1 / (end + 1 - stage)


class PagedProgram(StageProgram):
    """Checkmate's program with paging. A copy that takes longer than the stage it begins in takes the stages after it too."""

    def __init__(self, nodes: Nodes, capacity: int, problem: Problem, tier: str) -> None:
        self.problem, self.tier = problem, tier
        self.comes: dict[tuple[int, int], int] = {}  # (stage, parcel) -> it begins to come there
        self.goes: dict[tuple[int, int], int] = {}
        self.away: dict[tuple[int, int], int] = {}
        machine, device = problem.machine, problem.device_tier
        self.rates = {"out": machine.link_between[device, tier].bytes_per_second, "in": machine.link_between[tier, device].bytes_per_second}
        self.ends: dict[tuple[str, int, int], int] = {}  # (way, stage, parcel) -> the stage with which a copy that begins there ends
        self.coming: dict[tuple[int, int], list[int]] = {}  # (stage, parcel) -> variables of copies on their way
        self.arrive: dict[tuple[int, int], list[int]] = {}  # and of those that end with it
        self.load: dict[tuple[str, int], list[tuple[int, float]]] = {}  # (way, stage) -> copies, each with its seconds in that stage
        super().__init__(nodes, capacity, run_costs=False)
        self._times()

    def prepare(self) -> None:
        for parcel, home in self.nodes.home.items():
            if parcel in self.problem.graph.consumed_by:
                continue
            last = self.nodes.needed_until[parcel]
            for stage in range(max(home + 1, 1), last):
                self.away[stage + 1, parcel] = self.program.variable()
            for stage in range(max(home + 1, 1), last):
                if (end := self._end("out", stage, parcel)) < last:
                    self.goes[stage, parcel] = self._copy("out", stage, end, parcel)
                if (stage, parcel) in self.away and (end := self._end("in", stage, parcel)) < last:
                    variable = self.comes[stage, parcel] = self._copy("in", stage, end, parcel)
                    for on_the_way in range(stage, end + 1):
                        self.coming.setdefault((on_the_way, parcel), []).append(variable)
                    self.arrive.setdefault((end, parcel), []).append(variable)

    def _end(self, way: str, stage: int, parcel: int) -> int:
        return copy_ends(self.nodes, stage, self.nodes.size[parcel] * self.nodes.unit / self.rates[way])

    def _copy(self, way: str, stage: int, end: int, parcel: int) -> int:
        seconds = self.nodes.size[parcel] * self.nodes.unit / self.rates[way]
        variable = self.program.variable(cost=LEAST_COST * seconds, integer=True)
        for t, share in shares(self.nodes, stage, end):
            self.load.setdefault((way, t), []).append((variable, seconds * share))
        self.ends[way, stage, parcel] = end
        return variable

    def arrivals(self, stage: int, parcel: int) -> list[int]:
        return self.arrive.get((stage, parcel), [])

    def arriving(self, stage: int, parcel: int) -> list[int]:
        return self.coming.get((stage, parcel), [])

    def live(self, stage: int, parcel: int, freed: dict[tuple[int, int], int]) -> None:
        constrain = self.program.constrain
        comes = self.comes.get((stage, parcel))
        away, next_away = self.away.get((stage, parcel)), self.away.get((stage + 1, parcel))
        leaving = [self.goes[t, parcel] for t in range(stage + 1) if self.ends.get(("out", t, parcel), -1) >= stage]
        kept = self.kept.get((stage, parcel))
        for variable in leaving:
            # Its bytes are read until the copy is done: they stay until then.
            constrain([(variable, 1.0)] + ([(kept, -1.0)] if kept is not None else []), upper=0)
            if freed:
                constrain([(variable, 1.0), *((free, 1.0) for free in freed.values())], upper=1)
        if comes is not None and away is not None:
            constrain([(comes, 1.0), (away, -1.0)], upper=0)
        if next_away is not None:
            done = [self.goes[t, parcel] for t in range(stage + 1) if self.ends.get(("out", t, parcel)) == stage]
            before = [(variable, -1.0) for variable in ([away] if away is not None else []) + done]
            constrain([(next_away, 1.0), *before], upper=0)

    def _times(self) -> None:
        """Stages take as long as their work or their share of the copies, whichever is longer."""
        total = sum(node.seconds for node in self.nodes.nodes) or 1.0
        for stage, node in enumerate(self.nodes.nodes):
            seconds = self.program.variable(0.0, math.inf, cost=total)
            again = [(run, self.nodes.nodes[index].seconds / total) for (t, index), run in self.runs.items() if t == stage and index != stage]
            self.program.constrain([*again, (seconds, -1.0)], upper=-node.seconds / total)
            for way in ("out", "in"):
                if copies := self.load.get((way, stage)):
                    self.program.constrain([*((variable, share / total) for variable, share in copies), (seconds, -1.0)], upper=0)

    # -- answers ------------------------------------------------------------------------------------------------------------------

    def schedule(self, found: Solution) -> Schedule:
        """The schedule of an integer answer."""
        events: list[tuple[str, int]] = []
        for stage, nodes in enumerate(self.stages(found)):
            for moves, what in ((self.goes, "out"), (self.comes, "in")):
                for parcel in sorted(p for (t, p), variable in moves.items() if t == stage and found.chosen(variable)):
                    events += [(what, storage) for storage in self.nodes.storages_of(parcel)]
            events += [("run", op) for node in nodes for op in self.nodes.nodes[node].ops]
        return paged_schedule(self.problem, events, self.tier)


def paged_schedule(problem: Problem, events: list[tuple[str, int]], tier: str) -> Schedule:
    """The schedule of these runs and copies in this order; what nobody reads is left out, and everything goes right after its last use."""
    graph, device = problem.graph, problem.device_tier
    seen: set[int] = set()
    first: set[int] = set()
    for place, (what, subject) in enumerate(events):
        if what == "run" and subject not in seen:
            seen.add(subject)
            first.add(place)
    here: set[int] = set()  # wanted later on the device, as it is now
    there: set[int] = set()  # and in the other tier
    backwards: list[Step] = []
    for place in reversed(range(len(events))):
        what, subject = events[place]
        if what == "in":
            if subject in here:
                here.discard(subject)
                if subject not in there:
                    backwards.append(Free(subject, tier))
                there.add(subject)
                backwards.append(Copy(subject, tier, device))
            continue
        if what == "out":
            if subject in there:
                there.discard(subject)
                if subject not in here:
                    backwards.append(Free(subject, device))
                here.add(subject)
                backwards.append(Copy(subject, device, tier))
            continue
        op = graph.ops[subject]
        if place not in first and here.isdisjoint(op.writes):
            continue
        taken_over = {old for old, _ in op.in_place}
        touched = sorted(set(op.reads + op.writes + op.mutates) - taken_over - here, reverse=True)
        backwards.extend(Free(storage, device) for storage in touched if not graph.storages[storage].lasting)
        backwards.append(Compute(op.id, problem.machine.device.name))
        here.difference_update(op.writes)
        here.update(op.reads + op.mutates)
    home = {s.id: (device,) for s in graph.storages if s.lasting or s.role is Role.INPUT}
    unread = [s.id for s in graph.storages if s.role is Role.INPUT and s.id not in here]
    return Schedule((*(Free(storage, device) for storage in unread), *reversed(backwards)), home)
