"""A second opinion on what is legal: run a schedule on values instead of versions.

A value is a number that stands for the content of a storage; an op makes new values out of those it reads. What a schedule leaves in
the lasting storages after some periods must be what the plain program, op after op, leaves. Knows nothing of versions or capacity.
"""

from __future__ import annotations

from tierwise.ir import Compute, Copy, Free, Graph, Op, Problem, Role, Schedule


def _made(op: Op, storage: int, values: tuple[int, ...]) -> int:
    return hash((op.id, storage, values))


def run_program(graph: Graph, periods: int) -> dict[int, int]:
    """The lasting storages after so many steps of the plain program."""
    content = {s.id: hash(("start", s.id)) for s in graph.storages if s.lasting}
    for period in range(periods):
        content |= {s.id: hash(("input", s.id, period)) for s in graph.storages if s.role is Role.INPUT}
        for op in graph.ops:
            read = tuple(content[s] for s in op.reads + op.mutates)
            content |= {s: _made(op, s, read) for s in op.writes + op.mutates}
    return {s.id: content[s.id] for s in graph.storages if s.lasting}


def run_schedule(problem: Problem, schedule: Schedule, periods: int) -> dict[int, int]:
    """The lasting storages, read at their homes, after so many periods. What is not there is a KeyError."""
    graph, machine = problem.graph, problem.machine
    lasting = {s.id for s in graph.storages if s.lasting}
    held: dict[tuple[int, int, str], int] = {}
    for storage in lasting:
        for tier in schedule.home[storage]:
            held[storage, 0, tier] = hash(("start", storage))
    unfinished = any(step.iteration for step in schedule.steps)
    for period in range(periods + unfinished):
        for storage in graph.storages:
            if storage.role is Role.INPUT:
                for tier in schedule.home[storage.id]:
                    held[storage.id, period, tier] = hash(("input", storage.id, period))
        for step in schedule.steps:
            iteration = period + step.iteration
            if iteration < 0 or iteration >= periods:
                continue  # before the first step, or of a step that is not asked for
            if isinstance(step, Compute):
                op = graph.ops[step.op]
                reach = machine.reachable(step.on)
                content = []
                for storage in op.reads + op.mutates:
                    key = 0 if storage in lasting else iteration
                    content.append(next(held[storage, key, tier] for tier in reach if (storage, key, tier) in held))
                for storage in op.writes + op.mutates:
                    key = 0 if storage in lasting else iteration
                    where = next((tier for tier in reach if (storage, key, tier) in held), machine.processor_named[step.on].tier)
                    held[storage, key, where] = _made(op, storage, tuple(content))
                for old, _ in op.in_place:
                    held.pop((old, iteration, machine.processor_named[step.on].tier), None)
            elif isinstance(step, Copy):
                key = 0 if step.storage in lasting else iteration
                held[step.storage, key, step.dst] = held[step.storage, key, step.src]
            elif isinstance(step, Free):
                del held[step.storage, 0 if step.storage in lasting else iteration, step.tier]
    return {storage: held[storage, 0, schedule.home[storage][0]] for storage in lasting}
