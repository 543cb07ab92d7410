"""Kernels for a schedule that is there already: each run of an op takes the fastest variant whose workspace fits beside what is there."""

from __future__ import annotations

from dataclasses import replace

from ..ir import Compute, Copy, Free, Problem, Schedule, Step, Variant


def has_kernels(problem: Problem) -> bool:
    return any(_kernels(problem).values())


def _kernels(problem: Problem) -> dict[int, list[Variant]]:
    """For each op the variants that read what it reads, on the device."""
    device, found = problem.machine.device.name, dict[int, list[Variant]]()
    for variant in problem.costs.variants:
        if device in variant.seconds and not variant.forms and variant.reads in (None, problem.graph.ops[variant.op].reads):
            found.setdefault(variant.op, []).append(variant)
    return found


def fastest_with_room(problem: Problem, schedule: Schedule) -> Schedule:
    """For schedules of one step without addresses."""
    kernels = _kernels(problem)
    if not kernels:
        return schedule
    graph, tier, device = problem.graph, problem.device_tier, problem.machine.device.name
    size = [storage.nbytes for storage in graph.storages]
    here = {s for s, home in schedule.home.items() if tier in home and (problem.cyclic or graph.is_there_at_start(s))}
    used = {(step.src, step.dst) for step in schedule.steps if isinstance(step, Copy)}
    held = sum(size[s] for s in here)
    held += sum(link.staging_bytes for pair, link in problem.machine.link_between.items() if pair in used and link.staging_tier == tier)
    steps: list[Step] = []
    for step in schedule.steps:
        if isinstance(step, Compute) and step.on == device:
            op = graph.ops[step.op]
            taken_over = {new: old for old, new in op.in_place}
            twice = 0
            for storage in op.writes:
                if storage in taken_over and taken_over[storage] in here:
                    here.discard(taken_over[storage])
                    held -= size[taken_over[storage]]
                if storage not in here:
                    here.add(storage)
                    held += size[storage]
                elif storage not in taken_over and not graph.storages[storage].lasting:
                    twice += size[storage]
            room = problem.budget_bytes - held - twice
            own = (problem.seconds(op.id, device, step.variant), step.variant)
            ways = [(v.seconds[device], v.name) for v in kernels.get(op.id, ()) if v.workspace_bytes <= room]
            step = replace(step, variant=min([own, *ways])[1])
        elif isinstance(step, Free) and step.tier == tier:
            here.discard(step.storage)
            held -= size[step.storage]
        elif isinstance(step, Copy) and step.dst == tier and step.storage not in here:
            here.add(step.storage)
            held += size[step.storage]
        steps.append(step)
    return replace(schedule, steps=tuple(steps))
