"""A second opinion on what is legal: run a schedule on values instead of versions.

A value is a number that stands for the content of a storage; an op makes new values out of those it reads. What a schedule leaves in
the lasting storages after some periods must be what the plain program, op after op, leaves. Knows nothing of versions or capacity.

A lossy codec gives back another value, unless `rounded` says that this is meant. A variant of an op makes what the op makes if what it reads is what
the program has there at that op, plain or encoded.
"""

from __future__ import annotations

from tierwise.ir import Compute, Copy, Free, Graph, Op, Problem, Role, Schedule
from tierwise.ir.schedule import held_as

Content = dict[int, int]  # storage -> value


def _made(op: Op, storage: int, values: tuple[int, ...]) -> int:
    return hash((op.id, storage, values))


def run_program(graph: Graph, periods: int) -> Content:
    """The lasting storages after so many steps of the plain program."""
    content = _run(graph, periods)[-1]
    return {s.id: content[s.id] for s in graph.storages if s.lasting}


def _run(graph: Graph, periods: int) -> list[Content]:
    """What every storage holds before each op of each step, and at the end."""
    content: Content = {s.id: hash(("start", s.id)) for s in graph.storages if s.lasting}
    before = []
    for period in range(periods):
        content |= {s.id: hash(("input", s.id, period)) for s in graph.storages if s.role is Role.INPUT}
        for op in graph.ops:
            before.append(dict(content))
            read = tuple(content[s] for s in op.reads + op.mutates)
            content |= {s: _made(op, s, read) for s in op.writes + op.mutates}
    return [*before, content]


def run_schedule(problem: Problem, schedule: Schedule, periods: int, *, rounded: bool = False) -> Content:
    """The lasting storages, read at their homes, after so many periods. What is not there is a KeyError."""
    graph, machine = problem.graph, problem.machine
    lasting = {s.id for s in graph.storages if s.lasting}
    held: dict[tuple[int, int, str], int] = {}
    for storage in lasting:
        for tier in schedule.home[storage]:
            held[storage, 0, tier] = hash(("start", storage))
    by_variants = any(isinstance(step, Compute) and step.variant for step in schedule.steps)
    program = _run(graph, periods) if by_variants else []
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
                variant = problem.costs.variant_of[op.id, step.variant] if step.variant else None
                reads = op.reads if variant is None or variant.reads is None else variant.reads
                content = []
                for storage in reads + op.mutates:
                    key = 0 if storage in lasting else iteration
                    places = [held_as(tier, variant.forms.get(storage, "") if variant else "") for tier in reach]
                    content.append(next(held[storage, key, where] for where in places if (storage, key, where) in held))
                if variant is not None:
                    should_be = program[iteration * len(graph.ops) + op.id]
                    content = _as_the_op_reads(op, reads, content, should_be)
                for storage in op.writes + op.mutates:
                    key = 0 if storage in lasting else iteration
                    where = next((tier for tier in reach if (storage, key, tier) in held), machine.processor_named[step.on].tier)
                    held[storage, key, where] = _made(op, storage, tuple(content))
                for old, _ in op.in_place:
                    held.pop((old, iteration, machine.processor_named[step.on].tier), None)
            elif isinstance(step, Copy):
                key = 0 if step.storage in lasting else iteration
                value = held[step.storage, key, held_as(step.src, step.src_form)]
                if step.src_form and not step.dst_form and problem.costs.codec_named[step.src_form].lossy and not rounded:
                    value = hash(("rounded", step.src_form, value))
                held[step.storage, key, held_as(step.dst, step.dst_form)] = value
            elif isinstance(step, Free):
                del held[step.storage, 0 if step.storage in lasting else iteration, held_as(step.tier, step.form)]
    return {storage: held[storage, 0, schedule.home[storage][0]] for storage in lasting}


def _as_the_op_reads(op: Op, reads: tuple[int, ...], content: list[int], should_be: Content) -> list[int]:
    """What the op itself would have read, or something else if what its variant reads is not what the program has."""
    right = all(value == should_be[storage] for storage, value in zip(reads + op.mutates, content, strict=True))
    return [should_be[storage] for storage in op.reads + op.mutates] if right else [hash(("wrong", *content))]
