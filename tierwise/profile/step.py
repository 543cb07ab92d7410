"""Times of a step's parts become seconds of its ops: what was measured as a whole is shared out, and waits for the host stay where they fall."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..ir import Costs, Graph, Machine, Op, Phase
from .roofline import NOTHING, roofline_costs, touched_bytes
from .taken import Taken, added_seconds

MACRO = "region_"  # the kind of an op that is a whole region starts with this


@dataclass(frozen=True, slots=True)
class BlockTimes:
    """Of one call of a region."""

    forward: Taken
    backward: Taken

    def of(self, phase: Phase) -> Taken:
        return self.forward if phase is Phase.FORWARD else self.backward


@dataclass(frozen=True, slots=True)
class StepTimes:
    """What was measured of a step; anything may be missing."""

    eager: Mapping[int, BlockTimes]  # by region class
    compiled: Mapping[int, BlockTimes]
    ops: Mapping[int, Taken]  # by op of the graph, each run by itself
    update: Taken | None  # of all parameters
    autograd: tuple[float, float] = (0.0, 0.0)  # what the host spends on a recorded op beyond launching it, and on its node in backward


@dataclass(frozen=True, slots=True)
class Part:
    """Ops of a step that were timed as one."""

    name: str  # of the region class, "glue" or "update"
    phase: Phase
    ops: tuple[int, ...]
    taken: Taken
    measured: bool  # or counted: a roofline


def parts_of(graph: Graph, machine: Machine, times: StepTimes) -> list[Part]:
    """Every op of the step in exactly one part: a region call's forward or backward, all updates, or an op by itself."""
    counted = roofline_costs(graph, machine).op_seconds
    device = machine.device.name
    region_of = {call.id: graph.regions[call.region] for call in graph.calls}
    wholes: dict[tuple[int, Phase], list[Op]] = {}
    parts = []
    for op in graph.ops:
        if op.phase is Phase.UPDATE:
            if times.update is not None:
                wholes.setdefault((-1, Phase.UPDATE), []).append(op)
                continue
        elif op.region in region_of and region_of[op.region].id in (times.compiled if op.kind.startswith(MACRO) else times.eager):
            wholes.setdefault((op.region, op.phase), []).append(op)
            continue
        name = region_of[op.region].example if op.region in region_of else "update" if op.phase is Phase.UPDATE else "glue"
        if op.id in times.ops and op.phase is not Phase.UPDATE:
            alone = times.ops[op.id]
            host = alone.host_seconds + times.autograd[op.phase is Phase.BACKWARD]
            parts.append(Part(name, op.phase, (op.id,), Taken(alone.device_seconds, host), True))
        else:
            parts.append(Part(name, op.phase, (op.id,), Taken(counted[op.id, device], 0.0), False))
    for (call, phase), ops in wholes.items():
        ids = tuple(op.id for op in ops)
        if phase is Phase.UPDATE:
            assert times.update is not None
            parts.append(Part("update", phase, ids, times.update, True))
        else:
            region = region_of[call]
            taken = (times.compiled if ops[0].kind.startswith(MACRO) else times.eager)[region.id].of(phase)
            parts.append(Part(region.example, phase, ids, taken, True))
    return parts


def measured_costs(graph: Graph, machine: Machine, times: StepTimes, parts: Sequence[Part]) -> Costs:
    """Seconds of every op: a part's are shared out by what its ops take alone, or would by their roofline. Other processors keep their rooflines."""
    table = dict(roofline_costs(graph, machine).op_seconds)
    device = machine.device.name
    alone = {op.id: times.ops[op.id].device_seconds if op.id in times.ops else table[op.id, device] for op in graph.ops}
    pieces: dict[int, Taken] = {}
    for part in parts:
        pieces.update(_shared_out(graph, part, alone))
    for op, seconds in zip(graph.ops, added_seconds(pieces[op.id] for op in graph.ops), strict=True):
        table[op.id, device] = seconds
    return Costs(table)


def _shared_out(graph: Graph, part: Part, alone: Mapping[int, float]) -> Iterator[tuple[int, Taken]]:
    ops = [graph.ops[op] for op in part.ops]
    working = [op for op in ops if op.kind != NOTHING] or ops
    weights = {op.id: touched_bytes(graph, op) if op.phase is Phase.UPDATE else alone[op.id] for op in working}
    whole = sum(weights.values())
    for op in ops:
        if op.id not in weights:
            yield op.id, Taken(0.0, 0.0)
        else:
            share = weights[op.id] / whole if whole else 1 / len(working)
            yield op.id, Taken(part.taken.device_seconds * share, part.taken.host_seconds / len(working))
