"""Homes of lasting state in the image of a program: whose updates run where, which parameters come and go, and what then is left on the device.

A module path has the parameters below it that no longer path has; storages are told by their names, which are those of the parameters.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ..ir import (
    MASTER,
    PASSING,
    PASSING_HOST,
    Costs,
    Graph,
    Link,
    Machine,
    Menu,
    Op,
    Phase,
    Placement,
    Problem,
    Processor,
    Role,
    Schedule,
    Storage,
    Tier,
    When,
)
from ..ir.placement import owner
from ..ir.schedule import Compute, Copy, Free, Step
from ..policies._lasting import Away, placed
from .coarse import renumber

BESIDE, FROM_DISK = "gpu, updates", "cpu, from disk"
WITHIN = 1e12  # bytes a second from the device, or host memory, to buffers of what passes through it and back
# Host memory is shared. Measured on an H200's host (benchmarks/cases/sharing.py): the cpu updates 4.8 G parameters a second with nothing beside it,
# 4.2 beside plain copies both ways, 3.7 with gradients leaving and parameters coming. Of 55 GB/s a link carries 50 each way when both are busy, 46
# with updates between them; beside the cpu 36 to 40 in and 40 to 52 out. With updates both here and there, in traces of training steps: after
# backward 3.1 to 3.4 G a second on the cpu and 33 GB/s in; in backward 33 to 37 in, and 0.77 to 0.88 of the cpu's rate alone, counted over the time
# in which it updates anything, since it always has the next chunk (0.73 to 0.87, and 36 to 39 GB/s, before). Together 135 to 170 GB/s.
CPU_BESIDE_COPIES = {"after": 0.8, "backward": 0.86}
CPU_BESIDE_UPDATES = {"after": 0.66, "backward": 0.8}
HARM = {"after": 1.0, "backward": 0.5}  # the power by which a share of the time counts
BOTH_WAYS = 0.85
OUT_BESIDE_CPU, IN_BESIDE_CPU = 0.8, 0.7
UPDATES_BESIDE_CPU = {"after": 0.62, "backward": 0.64}
OTHERS_AFTER = 0.85  # of the link's rate, for what is no state: half of it moves in backward, when no update after backward runs
TIER_OF = {"host": "dram", "nvme": "nvme"}
Takes = Callable[[Mapping[str, Placement]], tuple[int, int]]  # of the device all the time, and of host memory in all, for state in these places


@dataclass(frozen=True, slots=True)
class StateUnit:
    """What one module path has."""

    path: str
    updates: tuple[int, ...]
    parameters: tuple[int, ...]  # storages
    parameter_bytes: int
    state_bytes: int
    gradient_bytes: int
    uses: int = 2  # ops of forward and backward that read its parameters, of the parameter that most do


def state_units(graph: Graph, paths: Collection[str]) -> list[StateUnit]:
    """In the order in which the step first uses them."""
    updates: dict[str, dict[int, None]] = {}  # each once, in order
    parameters: dict[str, list[int]] = {}
    for storage in graph.storages:
        if storage.role is Role.PARAM and storage.lasting and (path := owner(storage.name, paths)) is not None:
            parameters.setdefault(path, []).append(storage.id)
            updates.setdefault(path, {}).update((op, None) for op in graph.writers[storage.id] if graph.ops[op].phase is Phase.UPDATE)

    def alone(op: int) -> int:
        return sum(graph.storages[s].nbytes for s in {*graph.ops[op].mutates} if graph.storages[s].role is Role.OPTIMIZER_STATE)

    size = [storage.nbytes for storage in graph.storages]
    found = [
        StateUnit(
            path,
            tuple(updates[path]),
            tuple(held),
            sum(size[s] for s in held),
            sum(map(alone, updates[path])),
            sum(size[s] for op in updates[path] for s in graph.ops[op].reads if not graph.storages[s].lasting),
            max(sum(graph.ops[op].phase is not Phase.UPDATE for op in graph.uses[s]) for s in held),
        )
        for path, held in parameters.items()
    ]
    return sorted(found, key=lambda unit: min((graph.uses[s][0] for s in unit.parameters if graph.uses[s]), default=0))


def moved_updates(graph: Graph, states: Mapping[str, Placement]) -> set[int]:
    """Those that do not run between the step's other ops on the device."""
    return {op for unit in state_units(graph, states) if states[unit.path].update != "device" for op in unit.updates}


def with_states(problem: Problem, schedule: Schedule, states: Mapping[str, Placement], when: When) -> tuple[Problem, Schedule]:
    """The schedule with lasting state where it lives. What several paths share is where the path of its name is. Updates that are streamed run
    beside compute, on a stream of their own."""
    update, ahead, in_flight = when
    places: dict[int, Away] = {}
    frozen: dict[int, str] = {}
    for unit in state_units(problem.graph, states):
        place = states[unit.path]
        if place.update != "device":
            places |= dict.fromkeys(unit.updates, _away(place, problem))
        if place.parameters != "device":
            frozen |= {storage: TIER_OF[place.parameters] for storage in unit.parameters if not problem.graph.writers[storage]}
    if not places and not frozen:
        return problem, schedule
    if update == "backward":
        schedule = _updated_in_backward(problem.graph, schedule, places)
    problem = replace(problem, graph=_with_made_anew(problem.graph, [op for op, place in places.items() if place.processor == BESIDE]))
    alone, problem = problem, shared(problem, *_busy_seconds(problem, places), update=update)
    if any(place.processor == BESIDE for place in places.values()):
        # Before the cpu: what passes through the device is issued behind the stream's own work, not behind what the cpu updates.
        problem = _with_buffers(problem, places, problem.machine.device, BESIDE, PASSING)
    if any(place.processor == FROM_DISK for place in places.values()):
        problem = _with_buffers(problem, places, problem.machine.processor_named["cpu"], FROM_DISK, PASSING_HOST)
    if update == "after":
        problem = _with_other_copies(problem, alone)
    else:
        problem = _with_slower_compute(problem, [op for op, place in places.items() if place.processor == BESIDE])
    schedule = placed(problem, schedule, places, update=update, ahead=ahead, in_flight=in_flight, parameters=frozen)
    return (problem if update == "after" else _beside_copies(problem, alone.machine, schedule)), schedule


def _updated_in_backward(graph: Graph, schedule: Schedule, elsewhere: Collection[int]) -> Schedule:
    """With updates on the device of what one region alone has where its gradients are there, and these gone after it."""
    modules = {call.module for call in graph.calls}
    moved = {op.id for op in graph.ops if op.phase is Phase.UPDATE and op.id not in elsewhere and _is_of_one_region(graph, op, modules)}
    made: dict[int, int] = {}  # the place of the last op that stays to touch a storage
    for place, step in enumerate(schedule.steps):
        if isinstance(step, Compute) and step.op not in moved:
            made |= dict.fromkeys(_touched(graph.ops[step.op]), place)
    after: dict[int, list[Step]] = {}
    others: list[Step | None] = list(schedule.steps)
    behind: set[int] = set()  # what the update before this step was the last to touch
    for place, step in enumerate(schedule.steps):
        if isinstance(step, Compute):
            behind = _touched(graph.ops[step.op]) if step.op in moved else set()
            last = max((made.get(storage, -1) for storage in behind), default=-1)
        if isinstance(step, (Compute, Free)) and behind and (isinstance(step, Compute) or step.storage in behind):
            after.setdefault(last, []).append(step)
            others[place] = None
    steps = list(after.get(-1, ()))
    for place, step_or_none in enumerate(others):
        steps += ([] if step_or_none is None else [step_or_none]) + after.get(place, [])
    return replace(schedule, steps=tuple(steps))


def _is_of_one_region(graph: Graph, op: Op, modules: Collection[str]) -> bool:
    """Whether an update is of parameters that run in one region, or in none and are named after it; and comes after no other update."""
    names = {region for s in op.mutates if graph.storages[s].role is Role.PARAM and (region := owner(graph.storages[s].name, modules))}
    uses = {graph.ops[use].region for s in op.mutates for use in graph.uses[s] if graph.ops[use].phase is not Phase.UPDATE}
    runs_in = {graph.calls[call].module if call >= 0 else None for call in uses}
    alone = all(writer == op.id or graph.ops[writer].phase is not Phase.UPDATE for s in _touched(op) for writer in graph.writers[s])
    kept = any(graph.storages[s].role is Role.GRAD and graph.storages[s].lasting for s in _touched(op))
    return len(names) == 1 and runs_in in ({None}, names) and alone and not kept


def _touched(op: Op) -> set[int]:
    return {*op.reads, *op.writes, *op.mutates}


def _with_made_anew(graph: Graph, streamed: Collection[int]) -> Graph:
    """With parameters that these updates make from their masters as what they are, overwritten: the old ones do not come for it."""
    ops = list(graph.ops)
    for number in streamed:
        op = ops[number]
        if any(graph.storages[s].name.endswith(f".{MASTER}") for s in op.mutates):
            made = tuple(s for s in op.mutates if graph.storages[s].role is Role.PARAM)
            ops[number] = replace(op, writes=op.writes + made, mutates=tuple(s for s in op.mutates if s not in made))
    return replace(graph, ops=tuple(ops)) if streamed else graph


def _busy_seconds(problem: Problem, places: Mapping[int, Away]) -> tuple[float, float]:
    """Of the cpu with updates, and of the link with state that passes through the device, each alone."""
    ops, costs = problem.graph.ops, problem.costs.op_seconds
    on_cpu = sum(costs[op, "cpu"] for op, place in places.items() if place.processor == "cpu")
    return on_cpu, sum(streaming_seconds(problem, ops[op]) for op, place in places.items() if place.processor == BESIDE)


class Shares(NamedTuple):
    """Of the rates that the cpu and either way of the link have alone."""

    cpu: float
    out: float
    into: float


def shares(cpu_seconds: float, stream_seconds: float, update: str) -> Shares:
    """While the cpu updates and state passes through the device, for so long each if it were alone: they take host memory's bandwidth from each
    other, and streamed state keeps both ways of the link busy."""
    beside_stream, beside_both = CPU_BESIDE_UPDATES[update], UPDATES_BESIDE_CPU[update]
    if cpu_seconds and stream_seconds:
        cpu_seconds, stream_seconds = cpu_seconds / beside_stream, stream_seconds / beside_both
    longer = max(cpu_seconds, stream_seconds)
    if not longer:
        return Shares(1.0, 1.0, 1.0)
    cpu, stream = cpu_seconds / longer, stream_seconds / longer  # the shorter one is in the other's way for this share of its time
    slower = CPU_BESIDE_COPIES[update] + stream ** HARM[update] * (beside_stream - CPU_BESIDE_COPIES[update])
    out, into = ((1 - cpu) * BOTH_WAYS + cpu * (beside_cpu + stream * (beside_both - beside_cpu)) for beside_cpu in (OUT_BESIDE_CPU, IN_BESIDE_CPU))
    return Shares(slower if cpu else 1.0, out, into)


def shared(problem: Problem, cpu_seconds: float = 1.0, stream_seconds: float = 1.0, *, update: str = "backward") -> Problem:
    """The machine as it is while both work for so long."""
    found = shares(cpu_seconds, stream_seconds, update)
    ways = {(problem.device_tier, "dram"): found.out, ("dram", problem.device_tier): found.into}
    machine = problem.machine.with_rates(lambda link, _, rate: rate * ways.get((link.src, link.dst), 1.0))
    return replace(problem, machine=machine, costs=problem.costs.slowed(1 / found.cpu, "cpu"))


def _with_other_copies(problem: Problem, alone: Problem) -> Problem:
    """With what is no state at the rates of a link that updates keep busy for a part of the step only."""
    ends = {problem.device_tier, "dram"}
    rates = {(link.src, link.dst, lane): rate for link in alone.machine.links for lane, rate in link.lanes.items() if {link.src, link.dst} == ends}

    def faster(link: Link, lane: str, rate: float) -> float:
        return max(rate, OTHERS_AFTER * rates.get((link.src, link.dst, lane), 0.0))

    return replace(problem, machine=problem.machine.with_rates(faster))


def _with_slower_compute(problem: Problem, beside: Sequence[int]) -> Problem:
    """Updates beside backward take their time from it, about where their gradients are complete: each wants all of the device's memory bandwidth."""
    graph, device, seconds = problem.graph, problem.machine.device.name, dict(problem.costs.op_seconds)
    for op in beside:
        made = [graph.writers[s][-1] for s in graph.ops[op].reads if not graph.storages[s].lasting and graph.writers[s]]
        if made and (max(made), device) in seconds:
            seconds[max(made), device] += seconds[op, device]
    return replace(problem, costs=replace(problem.costs, op_seconds=seconds))


def _beside_copies(problem: Problem, alone: Machine, schedule: Schedule) -> Problem:
    """Compute longer by what copies take from it: the device may draw so much power. Where it stands still for as long, it has that back."""
    device, ends = problem.machine.device, {problem.device_tier, "dram"}
    ways = [link for link in alone.links if {link.src, link.dst} == ends and link.compute_share]
    busy: dict[str, float] = defaultdict(float)  # seconds of processors and lanes
    lost = 0.0
    for step in schedule.steps if ways else ():
        if isinstance(step, Compute):
            busy[step.on] += problem.seconds(step.op, step.on, step.variant)
        elif isinstance(step, Copy):
            nbytes, link = problem.graph.storages[step.storage].nbytes, problem.machine.link(step.src, step.dst)
            for lane, rate in link.lanes.items():
                busy[lane] += nbytes / rate
            lost += sum(way.compute_share * nbytes / way.bytes_per_second for way in ways if way.lanes.keys() & link.lanes.keys())
    compute = busy.pop(device.name, 0.0)
    if not compute or not lost:
        return problem
    pauses = max(0.0, max(busy.values()) - compute)
    longer = 1 + lost * min(1.0, max(0.0, 2 - pauses / lost)) / compute  # by all of that while a step without it would be shorter than with it
    of_updates = {op.id for op in problem.graph.ops if op.phase is Phase.UPDATE}
    costs = problem.costs.op_seconds.items()
    seconds = {(op, on): cost * (longer if on == device.name and op not in of_updates else 1.0) for (op, on), cost in costs}
    return replace(problem, costs=replace(problem.costs, op_seconds=seconds))


def streaming_seconds(problem: Problem, op: Op) -> float:
    """What an update takes when its state and its gradient come to the device for it."""
    graph, machine = problem.graph, problem.machine
    coming = [s for s in op.mutates if graph.storages[s].role is Role.OPTIMIZER_STATE] + [s for s in op.reads if not graph.storages[s].lasting]
    nbytes = sum(graph.storages[s].nbytes for s in coming)
    return max(problem.costs.op_seconds[op.id, machine.device.name], machine.copy_seconds(nbytes, "dram", problem.device_tier))


def _with_buffers(problem: Problem, updates: Collection[int], worker: Processor, name: str, tier: str) -> Problem:
    """With updates by this processor under another name, on what passes through its memory in buffers that are counted elsewhere: chunks of state, of
    which few are there at a time. Here they come as a whole."""
    machine, seconds = problem.machine, dict(problem.costs.op_seconds)
    seconds |= {
        (op, name): seconds[op, worker.name] for op in updates if (op, name) not in seconds and (op, worker.name) in seconds
    }  # unless measured
    inside = {name: WITHIN}
    links = [Link(worker.tier, tier, inside), Link(tier, worker.tier, inside)]
    links += [replace(link, dst=tier) for link in machine.links if link.dst == worker.tier and PASSING not in (link.src, link.dst)]
    links += [replace(link, src=tier) for link in machine.links if link.src == worker.tier and PASSING not in (link.src, link.dst)]
    again = replace(worker, name=name, tier=tier, library_bytes=0)
    machine = replace(
        machine,
        tiers=(*machine.tiers, Tier(tier, sys.maxsize)),
        links=(*machine.links, *links),
        processors=tuple(one for processor in machine.processors for one in ((processor, again) if processor == worker else (processor,))),
    )
    return replace(problem, machine=machine, costs=replace(problem.costs, op_seconds=seconds))


def _away(place: Placement, problem: Problem) -> Away:
    on_cpu = place.update == "cpu"
    return Away(
        processor=BESIDE if not on_cpu else FROM_DISK if place.state == "nvme" else "cpu",
        state=TIER_OF[place.state],
        parameters=TIER_OF.get(place.parameters),
        gradients="dram" if on_cpu or place.gradients == "host" else problem.device_tier,
    )


def lighter(menu: Menu, states: Mapping[str, Placement], update: str = "after") -> Menu:
    """The step as far as activations are concerned: what lives elsewhere weighs nothing, and updates that take nothing from the device are gone. Of
    updates after backward for which gradients wait on the device this waiting is left.

    What passes through the device on the way (parameters of the regions that run, state that is updated there) is not in it.
    """
    graph = menu.problem.graph
    gone: set[int] = set()
    waiting: set[int] = set()
    weightless: set[int] = set()
    for unit in state_units(graph, states):
        place = states[unit.path]
        if update == "after" and place.update == "streamed" and place.gradients == "device":
            waiting.update(unit.updates)
        if place.parameters != "device":
            weightless.update(unit.parameters)
        if place.update != "device":
            gone.update(unit.updates)
            weightless.update(s for op in unit.updates for s in graph.ops[op].mutates if graph.storages[s].role is Role.OPTIMIZER_STATE)
    if not gone and not weightless:
        return menu
    left = [_waiting(graph, op) if op.id in waiting else op for op in graph.ops if op.id not in gone - waiting]
    touched = {storage for op in left for storage in op.reads + op.writes + op.mutates}
    storages = [_without_weight(s, s.id in touched) if s.id in weightless else s for s in graph.storages]
    found, _ = renumber(left, storages, graph)
    place_of = {op.id: place for place, op in enumerate(left)}
    costs = menu.problem.costs.op_seconds
    seconds = {(place_of[op], processor): 0.0 if op in waiting else cost for (op, processor), cost in costs.items() if op in place_of}
    return replace(menu, problem=replace(menu.problem, graph=found, costs=Costs(seconds)), homes={})


def _waiting(graph: Graph, op: Op) -> Op:
    """An update that does nothing but have its gradients there."""
    return replace(op, reads=tuple(s for s in op.reads if not graph.storages[s].lasting), writes=(), mutates=(), workspace_bytes=0)


def _without_weight(storage: Storage, is_touched: bool) -> Storage:
    """What nobody touches is left out."""
    return replace(storage, nbytes=0) if is_touched else replace(storage, nbytes=0, role=Role.ACTIVATION, lasting=False)


def anew(graph: Graph, paths: Collection[str]) -> Graph:
    """The step as if gradients of these paths were made anew: they are added up where they wait, not on the device."""
    found = {s.id for s in graph.storages if s.role is Role.GRAD and s.lasting and owner(s.name.removesuffix(".grad"), paths) is not None}
    ops = []
    for op in graph.ops:
        added = tuple(storage for storage in op.mutates if storage in found and op.phase is Phase.BACKWARD)
        first = {storage for storage in added if graph.writers[storage][0] == op.id}
        ops.append(
            replace(op, mutates=tuple(s for s in op.mutates if s not in first), writes=(*op.writes, *(s for s in added if s in first)))
            if first
            else op
        )
    return replace(graph, ops=tuple(ops), storages=tuple(replace(s, lasting=s.lasting and s.id not in found) for s in graph.storages))
