"""zero_offload: forward and backward on the device, gradients out as they come, the optimizer's update on the cpu, parameters back.

Paper    Ren, Rajbhandari, Aminabadi, Ruwase, Yang, Zhang, Li, He, USENIX ATC 2021, arXiv:2101.06840.
Idea     of all ways to cut the step between gpu and cpu, this one gives the cpu only work linear in the parameters and moves the fewest
         bytes: gradients out, parameters in, while the optimizer's state never moves.
Rule     home(optimizer state) = dram;  gradient g leaves when its last device op is done;  update(p) on the cpu in the order gradients
         arrive, p back to the device after it. The next forward op that reads p waits for it and no op waits for more.
Differs  exact: the paper's delayed update, which trains one step on old parameters, is not used. Updates lie under the backward they
         belong to and under the next step's forward as far as its reads allow. Tiles of one update are not overlapped with each other.
"""

from __future__ import annotations

from ..ir import Compute, Copy, Free, Op, Phase, Problem, Role, Schedule, Step

DECIDES = "update on the cpu"
REQUIRES = {"dram", "cpu"}


def plan(problem: Problem, *, tier: str = "dram", processor: str = "cpu") -> Schedule:
    graph, device = problem.graph, problem.device_tier
    seconds = problem.costs.op_seconds
    updates = [op for op in graph.ops if op.phase is Phase.UPDATE and (op.id, processor) in seconds]
    moved = {op.id for op in updates}
    on_device = [op for op in graph.ops if op.id not in moved]
    home = {s.id: (device,) for s in graph.storages if s.lasting or s.role is Role.INPUT}
    for op in updates:
        for storage in op.mutates:
            used_on_device = any(use not in moved for use in graph.uses[storage])
            home[storage] = (device, tier) if used_on_device else (tier,)
    arrival = {op.id: max((_last_use(graph.uses[s], moved) for s in op.reads), default=0) for op in updates}
    updates.sort(key=lambda op: (arrival[op.id], op.id))
    first = [step for op in updates for step in _update(problem, op, home, moved, tier, processor)] if problem.cyclic else []
    steps: list[Step] = [*first]
    for op in on_device:
        steps.append(Compute(op.id, problem.machine.device.name))
        for storage in dict.fromkeys(op.reads + op.writes + op.mutates):
            found = graph.storages[storage]
            if found.lasting or storage in graph.consumed_by or _last_use(graph.uses[storage], moved) != op.id:
                continue
            if any(use in moved for use in graph.uses[storage]):
                steps.append(Copy(storage, device, tier))
            steps.append(Free(storage, device))
    for storage in graph.storages:
        if storage.role is Role.INPUT and not graph.uses[storage.id]:
            steps.append(Free(storage.id, device))
    if not problem.cyclic:
        steps += [step for op in updates for step in _update(problem, op, home, moved, tier, processor)]
    return Schedule(tuple(steps), home)


def _last_use(uses: tuple[int, ...], moved: set[int]) -> int:
    """The last op on the device that touches a storage; -1 if none does."""
    return max((use for use in uses if use not in moved), default=-1)


def _update(problem: Problem, op: Op, home: dict[int, tuple[str, ...]], moved: set[int], tier: str, processor: str) -> list[Step]:
    """One update on the cpu, of the step before when steps follow each other."""
    graph, device = problem.graph, problem.device_tier
    iteration = -1 if problem.cyclic else 0
    steps: list[Step] = [Compute(op.id, processor, iteration)]
    for storage in op.reads:
        if not graph.storages[storage].lasting and max(graph.uses[storage]) == op.id:
            steps.append(Free(storage, tier, iteration=iteration))
    for storage in op.mutates + op.writes:
        if not graph.storages[storage].lasting:
            continue
        if device in home[storage]:
            steps.append(Copy(storage, tier, device, iteration))
            if tier not in home[storage]:
                steps.append(Free(storage, tier, iteration=iteration))
    return steps
