"""Some activations leave and return, whatever else a planner does with the step: it is asked about a step in which each of them is two storages.

The first ends with an op of no duration, when its copy out is done; the second begins with another, when its copy back is issued. In between
nobody has its bytes. What plans such a step need not know of links at all; `back` writes the copies into its answer. Gaps are sent that the links
hide, if there are such: each copy out is done when memory is shortest, each copy back begins behind that.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ..ir import Compute, Copy, Costs, Free, Graph, Link, Op, Problem, Role, Schedule, Step
from ._gaps import Gap, gap_seconds, gaps

NEGLIGIBLE = 4096  # what is smaller than this part of the budget is not worth a copy


@dataclass(frozen=True, slots=True)
class Sent:
    """A gap whose bytes are away from place `gone` on, and on their way back from place `back` on."""

    gap: Gap
    gone: int
    back: int


def sendable(problem: Problem, *, dear_first: bool = True) -> list[Gap]:
    """Gaps over the moment at which memory is shortest: the dearest to compute again first, or the longest."""
    held = problem.graph.live_bytes
    fullest = max(range(len(held)), key=held.__getitem__, default=0)
    if not held or held[fullest] <= problem.budget_bytes:
        return []
    found = _worth_sending(problem, fullest)
    if dear_first:
        return sorted(found, key=lambda gap: (-_seconds_a_byte(problem, gap), -gap_seconds(problem, gap), gap.storage))
    return sorted(found, key=lambda gap: (-gap_seconds(problem, gap), gap.storage))


def placed(problem: Problem, order: Sequence[Gap], count: int, tier: str, *, lanes: float = 1.0) -> tuple[Sent, ...]:
    """Copies of so many of these gaps, first those that the links hide at `lanes` of their rates, in this order, then others, for which the device
    will wait."""
    links, device = problem.machine.link_between, problem.device_tier
    if not count or not order or (device, tier) not in links or (tier, device) not in links:
        return ()
    held = problem.graph.live_bytes
    fullest = max(range(len(held)), key=held.__getitem__)
    room = problem.machine.capacity(tier) - sum(link.staging_bytes for link in problem.machine.links if link.staging_tier == tier)
    lane = _Lanes(links[device, tier], links[tier, device], lanes)
    chosen: list[Gap] = []
    late: list[Gap] = []
    for gap in order:
        if len(chosen) == count:
            break
        if gap.nbytes > room:
            continue
        if all(sent.gone <= fullest < sent.back for sent in lane.place(problem, [*chosen, gap])):
            chosen.append(gap)
            room -= gap.nbytes
        else:
            late.append(gap)
    for gap in late[: count - len(chosen)]:
        if gap.nbytes <= room:
            chosen.append(gap)
            room -= gap.nbytes
    budget = problem.budget_bytes
    short = [place for place, nbytes in enumerate(held) if nbytes > budget]
    return tuple(_in_time_for(sent, short) for sent in lane.place(problem, chosen))


def _in_time_for(sent: Sent, short: Sequence[int]) -> Sent:
    """Gone where memory is short, and back behind that, even if the device must wait. `short`: places, in order."""
    first, last = short[bisect_right(short, sent.gap.start)], short[bisect_left(short, sent.gap.end) - 1]
    return Sent(sent.gap, min(sent.gone, first), min(max(sent.back, last + 1), sent.gap.end))


@dataclass(frozen=True, slots=True)
class _Lanes:
    out: Link
    back: Link
    share: float

    def place(self, problem: Problem, chosen: Sequence[Gap]) -> list[Sent]:
        """Each copy out as soon as it can be, each copy back as late as it can be, one after the other."""
        starts = problem.op_starts
        gone: dict[Gap, int] = {}
        now = 0.0
        for gap in sorted(chosen, key=lambda gap: (gap.start, gap.storage)):
            now = max(now, starts[gap.start + 1]) + self._seconds(self.out, gap)
            gone[gap] = min(gap.end, bisect_left(starts, now))
        back: dict[Gap, int] = {}
        now = starts[-1]
        for gap in sorted(chosen, key=lambda gap: (-gap.end, gap.storage)):
            now = min(now, starts[gap.end]) - self._seconds(self.back, gap)
            back[gap] = max(gap.start + 1, min(gap.end, bisect_right(starts, now) - 1))
        return [Sent(gap, gone[gap], back[gap]) for gap in chosen]

    def _seconds(self, link: Link, gap: Gap) -> float:
        return link.latency_seconds + gap.nbytes / (link.bytes_per_second * self.share)


def _worth_sending(problem: Problem, around: int) -> list[Gap]:
    graph = problem.graph
    return [
        gap
        for gap in gaps(problem)
        if not gap.wraps
        and gap.start < around < gap.end
        and not graph.storages[gap.storage].lasting
        and gap.storage not in graph.consumed_by
        and gap.nbytes * NEGLIGIBLE > problem.budget_bytes
        and len(graph.writers[gap.storage]) <= 1
    ]


def _seconds_a_byte(problem: Problem, gap: Gap) -> float:
    """What computing it again would cost at least: its op, shared by all that the op makes."""
    graph = problem.graph
    producer = graph.producer(gap.storage)
    if gap.storage not in graph.recomputable or producer is None:
        return float("inf")
    made = sum(graph.storages[s].nbytes for s in graph.ops[producer].writes)
    return problem.device_seconds[producer] / max(1, made)


@dataclass(frozen=True)
class WithSent:
    """The step in which these gaps are holes."""

    step: Problem
    sent: tuple[Sent, ...]
    tier: str = "dram"

    @cached_property
    def _ops(self) -> list[tuple[Op, int, Sent | None, bool]]:
        """(op, its place in the step or -1, what it sends or fetches, whether it fetches), in order."""
        graph = self.step.graph
        gone: dict[int, list[Sent]] = {}
        back: dict[int, list[Sent]] = {}
        for sent in sorted(self.sent, key=lambda sent: sent.gap.end):  # what is needed first comes first
            gone.setdefault(sent.gone, []).append(sent)
            back.setdefault(sent.back, []).append(sent)
        found: list[tuple[Op, int, Sent | None, bool]] = []
        renamed: dict[int, int] = {}

        def add(op: Op, place: int, sent: Sent | None, fetches: bool) -> None:
            found.append((replace(op, id=len(found)), place, sent, fetches))

        for op in graph.ops:
            for sent in gone.get(op.id, ()):
                name = graph.storages[sent.gap.storage].name
                add(Op(0, f"{name} is gone", op.phase, (sent.gap.storage,), (), replayable=False), -1, sent, False)
            for sent in back.get(op.id, ()):
                name = graph.storages[sent.gap.storage].name
                renamed[sent.gap.storage] = self._second[sent]
                add(Op(0, f"{name} comes back", op.phase, (), (self._second[sent],), replayable=False), -1, sent, True)
            if renamed.keys() & {*op.reads}:
                add(replace(op, reads=tuple(renamed.get(s, s) for s in op.reads)), op.id, None, False)
            else:
                add(op, op.id, None, False)
        return found

    @cached_property
    def _second(self) -> dict[Sent, int]:
        count = len(self.step.graph.storages)
        return {sent: count + place for place, sent in enumerate(self.sent)}

    @cached_property
    def problem(self) -> Problem:
        graph, costs = self.step.graph, self.step.costs
        halves = []
        for sent, number in self._second.items():
            first = graph.storages[sent.gap.storage]
            halves.append(replace(first, id=number, name=f"{first.name} again", role=_role(first.role)))
        seconds: dict[tuple[int, str], float] = {}
        device = self.step.machine.device.name
        names = [processor.name for processor in self.step.machine.processors]
        for op, place, _, _ in self._ops:
            if place < 0:
                seconds[op.id, device] = 0.0
            else:
                seconds |= {(op.id, on): costs.op_seconds[place, on] for on in names if (place, on) in costs.op_seconds}
        return replace(
            self.step,
            graph=Graph(tuple(op for op, *_ in self._ops), graph.storages + tuple(halves), graph.regions, graph.calls),
            costs=Costs(seconds, costs.codecs),
        )

    def back(self, schedule: Schedule) -> Schedule:
        device, tier = self.step.device_tier, self.tier
        whole = {number: sent.gap.storage for sent, number in self._second.items()}
        leaves: dict[int, list[Sent]] = {}
        for each in self.sent:
            leaves.setdefault(each.gap.start, []).append(each)
        # Of storages in two parts, the parts that the planner believes on the device.
        here = {each.gap.storage: {each.gap.storage} for each in self.sent if self.step.graph.is_there_at_start(each.gap.storage)}
        parts = {each.gap.storage for each in self.sent}
        steps: list[Step] = []
        ran: set[int] = set()
        for step in schedule.steps:
            if isinstance(step, Compute):
                op, place, sent, fetches = self._ops[step.op]
                if sent is not None:
                    if fetches:
                        storage = sent.gap.storage
                        if not here.get(storage):
                            steps.append(Copy(storage, tier, device))
                        here.setdefault(storage, set()).add(self._second[sent])
                        steps.append(Free(storage, tier))
                    continue
                steps.append(replace(step, op=place))
                for storage in op.writes:
                    if storage in parts:
                        here.setdefault(storage, set()).add(storage)
                if place not in ran:
                    ran.add(place)
                    steps += [Copy(leaving.gap.storage, device, tier) for leaving in leaves.get(place, ())]
            elif isinstance(step, Free) and step.tier == device and whole.get(step.storage, step.storage) in parts:
                storage = whole.get(step.storage, step.storage)
                believed = here.setdefault(storage, set())
                believed.discard(step.storage)
                if not believed:
                    steps.append(replace(step, storage=storage))
            else:
                steps.append(step)
        return replace(schedule, steps=tuple(steps), addresses={})


def _role(role: Role) -> Role:
    """What comes back was never given to the step by anybody."""
    return Role.ACTIVATION if role is Role.INPUT else role
