"""ratel: state on the disk, updated on the cpu while backward goes on, and as many activations in host memory as the links have time for.

Paper    Liao et al., ICDE 2025, arXiv:2403.06504 (first as LoHan).
Idea     three things share the links: gradients, optimizer state and activations. Updates start in backward, so their traffic has that time; what
         traffic is left decides how many activations are moved, and the rest are computed again.
Rule     home(optimizer state) = nvme, home(parameters) = dram; each update runs on the cpu when its gradient is there, its state read from the
         disk and written back. Of the activations that wait for backward, what passes between layers is always moved, and then those that cost most
         to compute again for each byte, D bytes in all; the others are made again from them. D minimises
         max(forward, D/link) + max(backward + recompute(D), (D + parameters)/link, state/disk).
Differs  formulas as reconstructed from the authors' code, which orders the tensors of a transformer layer by a table; here the order is by seconds
         for each byte. Spilling activations to the disk is left out. Updates run in the same process.
"""

from __future__ import annotations

from ..ir import Phase, Problem, Role, Schedule
from ._blocks import blocks
from ._gaps import Drop, Swap, build
from ._lasting import away, movable
from ._layers import saved_for_backward
from ._stash import leaves_at

DECIDES = "activations to swap or recompute, state on disk, updates during backward"
FIDELITY = "like"
EXECUTABLE = True
EXACTNESS = "exact if gradients are neither clipped nor scaled before the update"
REQUIRES = {"dram", "nvme", "cpu"}


def plan(problem: Problem, *, ahead: int = 1, parameters: str = "dram", state: str = "nvme", swapped: int | None = None) -> Schedule:
    """swapped: how many activations to move, instead of as many as the rule says."""
    graph = problem.graph
    moved = movable(problem)
    # Only what can be made again is there to choose; it is moved most worth first.
    saved = [entry for entry in saved_for_backward(graph) if entry[0] in graph.recomputable and entry[2] > entry[1] + 1]
    between = {storage for block in blocks(graph) for storage in block.outputs} if graph.calls else set()
    saved.sort(key=lambda entry: (entry[0] not in between, -_seconds(problem, entry[0]) / graph.storages[entry[0]].nbytes, entry[0]))
    least = sum(entry[0] in between for entry in saved)
    count = _traffic_aware(problem, moved, [entry[0] for entry in saved], least) if swapped is None else max(0, min(swapped, len(saved)))
    swaps = [
        Swap(storage, "dram", leaves_at(graph, storage, last), free_at=last + 1, in_at=max(last + 1, needed - ahead))
        for storage, last, needed in saved[:count]
    ]
    drops = [Drop(storage, last + 1) for storage, last, _ in saved[count:]]
    base = build(problem, swaps, drops)
    return away(problem, base, moved, update="backward", state=state, parameters=parameters, ahead=ahead)


def _seconds(problem: Problem, storage: int) -> float:
    """To run the op that makes it once more."""
    producer = problem.graph.producer(storage)
    return 0.0 if producer is None else problem.device_seconds[producer]


def _traffic_aware(problem: Problem, moved: list[int], order: list[int], least: int) -> int:
    """How many, first in this order and at least so many, to move: the sum of forward and backward is least."""
    graph, machine, device = problem.graph, problem.machine, problem.device_tier
    size = [storage.nbytes for storage in graph.storages]
    forward = sum(problem.device_seconds[op.id] for op in graph.ops if op.phase is Phase.FORWARD)
    backward = sum(problem.device_seconds[op.id] for op in graph.ops if op.phase is Phase.BACKWARD)
    link = machine.link_between[device, "dram"].bytes_per_second
    parameters = sum(s.nbytes for s in graph.storages if s.role is Role.PARAM and s.lasting)
    touched = {s for op in moved for s in graph.ops[op].mutates if graph.storages[s].role is Role.OPTIMIZER_STATE}
    disk = sum(machine.copy_seconds(size[s], "nvme", "dram") + machine.copy_seconds(size[s], "dram", "nvme") for s in sorted(touched))
    costs = {storage: _seconds(problem, storage) for storage in order}
    again = sum(costs.values())
    best = (float("inf"), 0)
    out = 0
    for count in range(len(order) + 1):
        if count:
            out += size[order[count - 1]]
            again -= costs[order[count - 1]]
        seconds = max(forward, out / link) + max(backward + again, (out + parameters) / link, disk)
        if count >= least:
            best = min(best, (seconds, count))
    return best[1]
