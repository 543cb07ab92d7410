"""One line per op or step, for people and for golden tests."""

from __future__ import annotations

from collections.abc import Iterator

from .graph import Graph
from .schedule import Compute, Copy, Schedule, Step, held_as


def graph_lines(graph: Graph) -> Iterator[str]:
    """`12 forward layers.0.up: x, w -> y`"""
    for op in graph.ops:
        reads = ", ".join(graph.storages[s].name for s in op.reads + op.mutates)
        writes = ", ".join([graph.storages[s].name for s in op.writes] + [graph.storages[s].name + "!" for s in op.mutates])
        yield f"{op.id} {op.phase} {op.name}: {reads} -> {writes}"


def schedule_lines(graph: Graph, schedule: Schedule) -> Iterator[str]:
    """`compute layers.0.up`, `copy y hbm -> dram`, `free y hbm`, `encode y in hbm as zvc`; work of the step before ends in `@-1`."""
    seen: set[tuple[int, int]] = set()
    for step in schedule.steps:
        again = isinstance(step, Compute) and (step.op, step.iteration) in seen
        if isinstance(step, Compute):
            seen.add((step.op, step.iteration))
        yield step_line(graph, step, again=again)


def step_line(graph: Graph, step: Step, *, again: bool = False) -> str:
    before = " @-1" if step.iteration else ""
    if isinstance(step, Compute):
        how = f" by {step.variant}" if step.variant else ""
        return f"{'recompute' if again else 'compute'} {graph.ops[step.op].name}{how}{'' if step.on == 'gpu' else ' on ' + step.on}{before}"
    name = graph.storages[step.storage].name
    if isinstance(step, Copy):
        if step.src == step.dst:
            return f"{'decode' if step.src_form else 'encode'} {name} in {step.src} as {step.src_form or step.dst_form}{before}"
        return f"{'fault' if step.fault else 'copy'} {name} {held_as(step.src, step.src_form)} -> {held_as(step.dst, step.dst_form)}{before}"
    return f"free {name} {held_as(step.tier, step.form)}{' join' if step.join else ''}{before}"
