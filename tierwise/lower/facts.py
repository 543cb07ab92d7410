"""What the bound is made of, by the image of a step that keeps everything: who holds what at the two fullest moments, which calls are alike, and when
no module can be updated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ..ir import Choice, Menu, Phase, Role
from .choose import hull, keep_everything
from .image import Image, image
from .states import StateUnit, state_units, streaming_seconds

SPANS = 4  # modules that are asked how long nothing is updated: those for which that is longest


class Turn(NamedTuple):
    """Bytes as every call has saved and none has gone back, at the fullest moment."""

    held: int  # besides what calls save
    activations: int  # of these
    saved: int  # by calls, at most


class Back(NamedTuple):
    """Bytes as the first of the calls that are most alike goes back."""

    held: int  # besides what calls save, without its workspace
    parameters: int  # that it reads, and that come for the next one
    untouched: int  # of what is held, by it


@dataclass(frozen=True, slots=True)
class Facts:
    """What the lines are made of, by a step that keeps everything."""

    units: list[StateUnit]
    outside: dict[Phase, float]
    turn: Turn
    back: Back
    classes: list[tuple[int, tuple[Choice, ...], int]]
    spans: list[tuple[float, float]]
    streaming_seconds: float  # of the link, for all state on its way through the device, alone

    @classmethod
    def of(cls, menu: Menu) -> Facts:
        made = image(menu, keep_everything(menu))
        problem, units = menu.problem, state_units(menu.problem.graph, menu.homes)
        streaming = sum(streaming_seconds(problem, problem.graph.ops[op]) for unit in units for op in unit.updates)
        return cls(
            units, _outside_seconds(menu, made), _at_the_turn(menu, made), _going_back(menu, made), _classes(menu, made), _spans(menu, made, units),
            streaming,
        )  # fmt: skip


def _at_the_turn(menu: Menu, made: Image) -> Turn:
    graph, coarse = made.problem.graph, made.coarse
    both = [call for call in coarse.forward if call in coarse.backward]
    saved = sum(menu.choices[graph.calls[call].region][0].saved_bytes for call in both)
    first, last = max((coarse.forward[call] for call in both), default=-1), min((coarse.backward[call] for call in both), default=len(graph.ops))
    between = range(first + 1, last) or range(max(first, 0), max(first, 0) + 1)
    calls = {*coarse.forward.values(), *coarse.backward.values()}
    held = {op: graph.live_bytes[op] - saved - (graph.ops[op].workspace_bytes if op in calls else 0) for op in between}
    turn = max(held, key=held.__getitem__)
    lasting = sum(storage.nbytes for storage in graph.storages if storage.lasting or storage.role is Role.INPUT)
    return Turn(held[turn], max(0, held[turn] - lasting), saved)


def _calls_back(made: Image) -> tuple[list[int], int]:
    """Calls in the order in which they go back, and the place of the first one of those that are most alike."""
    backward = made.coarse.backward
    both = sorted((call for call in made.coarse.forward if call in backward), key=backward.__getitem__)
    regions = [made.problem.graph.calls[call].region for call in both]
    counts = Counter(regions)
    return both, regions.index(max(counts, key=counts.__getitem__)) if both else 0


def _going_back(menu: Menu, made: Image) -> Back:
    graph, (calls, place) = made.problem.graph, _calls_back(made)
    if not calls:
        return Back(0, 0, 0)
    op = made.coarse.backward[calls[place]]
    saved = sum(menu.choices[graph.calls[call].region][0].saved_bytes for call in calls[place:])
    read = {storage for call in calls[place : place + 2] for storage in graph.ops[made.coarse.backward[call]].reads}
    running = sum(unit.parameter_bytes for unit in state_units(graph, menu.homes) if read & {*unit.parameters})
    return Back(graph.live_bytes[op] - saved - graph.ops[op].workspace_bytes, running, untouched_bytes(made, op, Role.INPUT))


def untouched_bytes(made: Image, op: int, *besides: Role) -> int:
    """Of what is there before an op and after it, and it does not touch: neither saved by calls nor of these roles."""
    graph, of_calls = made.problem.graph, {*made.coarse.saved.values()}
    idle = [s for s in graph.storages if not s.lasting and s.id not in of_calls and s.role not in besides]
    return sum(s.nbytes for s in idle if (uses := graph.uses[s.id]) and uses[0] < op < uses[-1] and op not in uses)


def timed(menu: Menu, made: Image, call: int) -> tuple[Choice, ...]:
    """The choices of a call, with the seconds of the step's ops where one has none."""
    seconds, coarse = made.problem.device_seconds, made.coarse
    there, back = seconds[coarse.forward[call]], seconds[coarse.backward[call]]
    choices = menu.choices[made.problem.graph.calls[call].region]
    return tuple(choice if choice.seconds else replace(choice, forward_seconds=there, backward_seconds=back) for choice in choices)


def _classes(menu: Menu, made: Image) -> list[tuple[int, tuple[Choice, ...], int]]:
    """How many calls a class has, its choices worth having, with the seconds of the step's ops where a choice has none, and whether they go back
    before a certain one (-1), are it (0), or come after it (1)."""
    calls, place = _calls_back(made)
    graph = made.problem.graph
    counts = Counter((graph.calls[call].region, (number > place) - (number < place)) for number, call in enumerate(calls))
    choices = {graph.calls[call].region: timed(menu, made, call) for call in calls}
    return [(count, choices[region] if when == 0 else hull(choices[region]), when) for (region, when), count in counts.items()]


def _spans(menu: Menu, made: Image, units: Sequence[StateUnit]) -> list[tuple[float, float]]:
    """For a few modules, the least time from where all of their parameters are in use to the first of their gradients that is complete, in which none
    of them can be updated; and what the cpu would take for those of the others that can."""
    graph, fine, costs = made.problem.graph, menu.problem.graph, menu.problem.costs.op_seconds
    forward, backward = made.coarse.forward, made.coarse.backward
    seconds = {op.id: made.problem.device_seconds[op.id] for op in graph.ops if op.phase is not Phase.UPDATE}
    for call, back in backward.items():
        choices = menu.choices[graph.calls[call].region]
        seconds |= {forward[call]: min(c.forward_seconds for c in choices), back: min(c.backward_seconds for c in choices)}
    number = {storage.name: storage.id for storage in graph.storages}

    def known(storages: Iterable[int]) -> list[int]:
        return [number[fine.storages[s].name] for s in storages]

    within: list[tuple[int, int]] = []
    for unit in units:
        gradients = known(s for op in unit.updates for s in fine.ops[op].reads if not fine.storages[s].lasting)
        complete = [max((op for op in graph.writers[s] if op in seconds), default=-1) for s in gradients]
        begins = [graph.uses[s][0] for s in known(unit.parameters) if graph.uses[s]]  # some models have parameters that no step uses
        within.append((max(begins, default=0), min(complete, default=-1)))
    on_cpu = [sum(costs.get((op, "cpu"), 0.0) for op in unit.updates) for unit in units]
    found = []
    for first, last in within:
        others = sum(cost for cost, (start, end) in zip(on_cpu, within, strict=True) if not (start <= first and last <= end))
        found.append((others, sum(seconds[op] for op in range(first, last + 1))))
    return sorted((span for span in found if span[1] > span[0]), key=lambda span: span[0] - span[1])[:SPANS]


def _outside_seconds(menu: Menu, made: Image) -> dict[Phase, float]:
    """Of the device, by part of the step, outside of calls and without updates that could be elsewhere."""
    graph, seconds = made.problem.graph, made.problem.device_seconds
    calls = {op for call, op in (*made.coarse.forward.items(), *made.coarse.backward.items()) if call in made.coarse.backward}
    moving = {op for unit in state_units(graph, menu.homes) for op in unit.updates}
    found = dict.fromkeys(Phase, 0.0)
    for op in graph.ops:
        if op.id not in calls and op.id not in moving:
            found[op.phase] += seconds[op.id]
    return found
