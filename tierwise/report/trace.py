"""Runs as a Chrome trace, which Perfetto (ui.perfetto.dev) and chrome://tracing open: a process for each timeline, a thread for each lane,
a counter for each tier. Times are microseconds; a step that reaches back into the one before starts the trace, so nothing is negative."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from ..ir import Compute, Copy, Run, Timeline
from .summary import lane_order, lane_words, phases_by_step

MICROSECONDS = 1e6


def chrome_trace(runs: Iterable[tuple[Run, str]]) -> dict[str, Any]:
    """`runs` with the title each has in the report."""
    events: list[dict[str, Any]] = []
    process = 0
    for run, title in runs:
        for timeline in (run.predicted, run.measured):
            if timeline is not None:
                process += 1
                events += _events(run, timeline, process, f"{title} ({'measured' if timeline.measured else 'predicted'})")
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _events(run: Run, timeline: Timeline, process: int, name: str) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": process, "args": {"sort_index": process}}
    threads = {lane: place for place, lane in enumerate(lane_order(timeline, run.problem), start=1)}
    for lane, thread in threads.items():
        words = lane_words(lane, run.problem, run.schedule)
        yield {"ph": "M", "name": "thread_name", "pid": process, "tid": thread, "args": {"name": f"{lane}: {words}" if words else lane}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": process, "tid": thread, "args": {"sort_index": thread}}
    origin = min([0.0, *(span.start for span in timeline.spans)])
    phases = phases_by_step(run.problem, run.schedule) if run.problem and run.schedule else {}
    for span in timeline.spans:
        times = {"ts": (span.start - origin) * MICROSECONDS, "dur": (span.end - span.start) * MICROSECONDS}
        yield {"ph": "X", "pid": process, "tid": threads[span.lane], **times, **_what(run, span.step, phases)}
    for tier in timeline.memory:
        yield from _counter(timeline, tier, process, origin)


def _what(run: Run, place: int, phases: dict[int, str]) -> dict[str, Any]:
    step = run.schedule.steps[place] if run.schedule else None
    if run.problem is None or step is None:
        return {"name": f"step {place}", "cat": "step"}
    graph = run.problem.graph
    if isinstance(step, Compute):
        op = graph.ops[step.op]
        module = graph.calls[op.region].module if 0 <= op.region < len(graph.calls) else ""
        return {"name": op.name, "cat": phases[place], "args": {"phase": phases[place], "kind": op.kind, "module": module, "step": place}}
    storage = graph.storages[step.storage]
    args = {"bytes": storage.nbytes, "role": str(storage.role), "step": place}
    if isinstance(step, Copy):
        return {"name": storage.name, "cat": "copy", "args": args | {"from": step.src, "to": step.dst}}
    return {"name": f"free {storage.name}", "cat": "free", "args": args | {"tier": step.tier}}


def _counter(timeline: Timeline, tier: str, process: int, origin: float) -> Iterator[dict[str, Any]]:
    """One counter a tier, its roles stacked; every event says all of them, as the format wants it."""
    curves = timeline.memory[tier]
    held = dict.fromkeys(curves, 0)
    changes = sorted((when, role, nbytes) for role, curve in curves.items() for when, nbytes in zip(curve.seconds, curve.nbytes, strict=True))
    for place, (when, role, nbytes) in enumerate(changes):
        held[role] = nbytes
        if place + 1 == len(changes) or changes[place + 1][0] > when:
            yield {"ph": "C", "name": f"{tier} bytes", "pid": process, "ts": (when - origin) * MICROSECONDS, "args": dict(held)}
