"""zero_offload: forward and backward on the device, gradients out as they come, the optimizer's update on the cpu, parameters back.

Paper    Ren, Rajbhandari, Aminabadi, Ruwase, Yang, Zhang, Li, He, USENIX ATC 2021, arXiv:2101.06840.
Idea     of all ways to cut the step between gpu and cpu, this one gives the cpu only work linear in the parameters and moves the fewest
         bytes: gradients out, parameters in, while the optimizer's state never moves.
Rule     home(optimizer state) = dram;  gradient g leaves when its last device op is done;  update(p) on the cpu, then p back to the device;
         an op that reads p waits for it, and no op waits for more. update="after": once backward is over, first the layers the next
         forward needs first. update="backward": each as its gradient arrives.
Differs  always exact: the paper's delayed update, which trains one step on old parameters, is not used; instead updates lie under the
         next step's forward as far as its reads allow. Tiles of one update are not overlapped with each other.
"""

from __future__ import annotations

from ..errors import BadInput
from ..ir import Compute, Copy, Free, Op, Phase, Problem, Role, Schedule, Step

DECIDES = "update on the cpu"
FIDELITY = "faithful"
EXECUTABLE = True
REQUIRES = {"dram", "cpu"}


def plan(problem: Problem, *, update: str = "after", tier: str = "dram", processor: str = "cpu") -> Schedule:
    if update not in ("after", "backward"):
        raise BadInput(f"update is {update!r}; zero_offload knows 'after' and 'backward'")
    graph, device = problem.graph, problem.device_tier
    moved = [op for op in graph.ops if op.phase is Phase.UPDATE and (op.id, processor) in problem.costs.op_seconds]
    away = {op.id for op in moved}
    home: dict[int, tuple[str, ...]] = {s.id: (device,) for s in graph.storages if s.lasting or s.role is Role.INPUT}
    for op in moved:
        for storage in op.mutates:
            home[storage] = (device, tier) if any(use not in away for use in graph.uses[storage]) else (tier,)
    last_on_device = {s.id: max((use for use in graph.uses[s.id] if use not in away), default=-1) for s in graph.storages}

    updates: dict[int, list[Step]] = {op.id: _update(problem, op, home, tier, processor, iteration=0) for op in moved}
    steps: list[Step] = []
    if update == "after" and problem.cyclic:
        first_needed = {op.id: min((graph.uses[s][0] for s in op.mutates + op.writes), default=0) for op in moved}
        for op in sorted(moved, key=lambda op: (first_needed[op.id], op.id)):
            steps += _update(problem, op, home, tier, processor, iteration=-1)
        updates = {}
    arriving = {op.id: max((last_on_device[s] for s in op.reads), default=-1) for op in moved}
    for op in graph.ops:
        if op.id in away:
            continue
        steps.append(Compute(op.id, problem.machine.device.name))
        for storage in dict.fromkeys(op.reads + op.writes + op.mutates):
            found = graph.storages[storage]
            if found.lasting or storage in graph.consumed_by or last_on_device[storage] != op.id:
                continue
            if any(use in away for use in graph.uses[storage]):
                steps.append(Copy(storage, device, tier))
            steps.append(Free(storage, device))
        if update == "backward":
            for arrived in [other for other in updates if arriving[other] == op.id]:
                steps += updates.pop(arrived)
    for remaining in updates.values():
        steps += remaining
    steps += [Free(s.id, device) for s in graph.storages if s.role is Role.INPUT and not graph.uses[s.id]]
    return Schedule(tuple(steps), home)


def _update(problem: Problem, op: Op, home: dict[int, tuple[str, ...]], tier: str, processor: str, *, iteration: int) -> list[Step]:
    """One update on the cpu: its gradient goes, its parameter returns to the device."""
    graph, device = problem.graph, problem.device_tier
    steps: list[Step] = [Compute(op.id, processor, iteration)]
    for storage in op.reads:
        if not graph.storages[storage].lasting and max(graph.uses[storage]) == op.id:
            steps.append(Free(storage, tier, iteration=iteration))
    for storage in op.mutates + op.writes:
        if graph.storages[storage].lasting and device in home[storage]:
            steps.append(Copy(storage, tier, device, iteration))
            if tier not in home[storage]:
                steps.append(Free(storage, tier, iteration=iteration))
    return steps
