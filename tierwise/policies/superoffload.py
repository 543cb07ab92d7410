"""superoffload: update each layer on the cpu as its gradient arrives, and the last layers of backward, which nothing could hide, on the device.

Paper    Lian, Tanaka, Ruwase, Zhang, ASPLOS 2026.
Idea     the cpu starts before backward is over and before the norm of all gradients is known, so its work lies under backward; what arrives last
         would be waited for, so that stays on the device.
Rule     update(p) on the cpu when its gradient is there; on the device for the last n in the order of backward, the smallest n for which the
         last parameter from the cpu is back before the device has done its own updates; less if there is no room for their state.
Differs  for PCIe machines too. Which end casts is not chosen: the graph says what travels. A step that overflows or is clipped is not rolled back;
         use it where nothing happens between backward and update. n is chosen by the times of ops with everything in place.
"""

from __future__ import annotations

from ..errors import BadInput
from ..ir import Phase, Problem, Schedule
from ._fit import largest_that_fits
from ._gaps import build
from ._lasting import away, movable

DECIDES = "which updates run on the cpu, during backward"
FIDELITY = "like"
EXECUTABLE = True
EXACTNESS = "exact if gradients are neither clipped nor scaled before the update"
REQUIRES = {"dram", "cpu"}


def plan(problem: Problem, *, on_device: int | None = None, tier: str = "dram", processor: str = "cpu") -> Schedule:
    """on_device: how many of the last updates stay there, instead of as many as the rule says."""
    if on_device is not None and on_device < 0:
        raise BadInput(f"on_device is {on_device}; it is a number of updates, 0 or more")
    base, moved = build(problem), movable(problem, processor)
    order = sorted(moved, key=lambda op: (_arrives(problem, op), op))
    wanted = _unhidden(problem, order, tier, processor) if on_device is None else min(on_device, len(order))

    def made(kept: int) -> Schedule:
        return away(problem, base, order[: len(order) - kept], update="backward", state=tier, host=tier, processor=processor)

    return largest_that_fits(problem, 0, wanted, made)[1]


def _arrives(problem: Problem, op: int) -> float:
    """When the last device op that the update waits for is over, if every byte is in place."""
    graph = problem.graph
    ends = [
        problem.op_starts[use + 1]
        for storage in graph.ops[op].reads
        for use in graph.uses[storage]
        if graph.ops[use].phase is not Phase.UPDATE and use < op
    ]
    return max(ends, default=0.0)


def _unhidden(problem: Problem, order: list[int], tier: str, processor: str) -> int:
    """The smallest number of last updates to keep on the device."""
    graph, machine, device = problem.graph, problem.machine, problem.device_tier
    ending = max((problem.op_starts[op.id + 1] for op in graph.ops if op.phase is not Phase.UPDATE), default=0.0)
    back, backs = 0.0, []
    free = 0.0
    for op in order:
        found = graph.ops[op]
        out = sum(machine.copy_seconds(graph.storages[s].nbytes, device, tier) for s in found.reads if not graph.storages[s].lasting)
        free = max(free, _arrives(problem, op) + out) + problem.costs.op_seconds[op, processor]
        read = [s for s in dict.fromkeys(found.mutates + found.writes) if any(graph.ops[u].phase is not Phase.UPDATE for u in graph.uses[s])]
        back = max(back, free) + sum(machine.copy_seconds(graph.storages[s].nbytes, tier, device) for s in read)
        backs.append(back)
    own = 0.0
    for kept in range(len(order) + 1):
        if kept:
            own += problem.device_seconds[order[len(order) - kept]]
        if kept == len(order) or backs[len(order) - kept - 1] <= ending + own:
            return kept
    return 0
