"""FlashNeuron and G10 on the traces of the G10 artifact (MICRO 2023), against the seconds its authors published.

Every schedule passes the judge and every second comes from the simulator. G10's GPU-direct columns were published with capacity binding the
planner only; they are repeated so, on an executor with the artifact's liberties (_g10_executor.py), with the plan in the file, which checks the
simulator apart from the planner, and with the plan of our own planner. The policy as it is, within the GPU's memory, is a row of its own.
Base, DeepUM and G10 itself page: they were published at 4 KiB a page and are repeated with whole storages, 45 us for each 50 pages that fault.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tierwise.errors import InfeasibleBudget
from tierwise.ir import Problem, Schedule, check_schedule, peak_bytes
from tierwise.policies import keep_all, plan
from tierwise.policies._moves import Move
from tierwise.policies.g10 import moves_without_paging
from tierwise.simulate import simulate
from tierwise.traces.g10 import G10Trace, load

from ._g10_executor import execute, with_books

GIB = 1 << 30
EXECUTOR = 4  # times the GPU's memory: the heap the artifact runs its GPU-direct columns on
COLUMNS = {"g10_gds_ssd": "disk", "g10_gds_host": "disk and host"}
FAULT_SECONDS, FAULT_PAGES = 45e-6, 50
SWEEP = re.compile(r"by_ssd_GiB_per_s_at_pcie_([0-9.]+)_GiB_per_s")

EQUAL = 1e-5  # the digits that were published
# By what the way is called; the first that is in it.
WHY = {
    "ties by id": "of tensors that are equal to the rule theirs takes the one its file names first, ours the one with the smaller number",
    "own plan": "our greedy chooses other tensors than theirs here and there; with the artifact's own plan the same executor gives their digits",
    "capacity enforced": "theirs ran on a heap of four times the GPU: what was planned too large there waits here, and what its planner holds back "
    "for a line of 1.05 times the GPU may be used here",
    "unified memory": "here only what is read faults, whole storages at a time; there pages fault when they are first written too, and a kernel is "
    "stretched by the share of its pages that fault",
    "deepum": "whole storages come and go in one copy, in the order of the ops; there pages do, and some are evicted before they are used",
    "g10, whole": "whole storages, no faults: a page-level step pays for those its planner did not foresee",
}


def rows(paths: Iterable[str | Path]) -> list[dict[str, Any]]:
    """One row for each trace and way to run it; `seconds` is None where there is no plan, as `published_seconds` is where they had none."""
    found = []
    for path in paths:
        trace = load(path)
        found += [*_in_core(trace), *_flashneuron(trace), *_g10(trace), *_paged(trace)]
    return found


def _in_core(trace: G10Trace) -> Iterable[dict[str, Any]]:
    """Everything on the GPU: checks that the trace adds up to the published ideal."""
    ample = trace.problem.with_budget(sum(s.nbytes for s in trace.problem.graph.storages) + max(op.workspace_bytes for op in trace.problem.graph.ops))
    yield _row(trace, "keep_all", ample, keep_all.plan(ample), trace.published.get("ideal"))


def _flashneuron(trace: G10Trace) -> Iterable[dict[str, Any]]:
    published = trace.published.get("flashneuron")
    options: dict[str, Any] = {"page_bytes": trace.page_bytes, "as_published": True}
    followed = {**options, "visit_order": trace.visit, "issue_order": [move.storage for move in trace.plans.get("flashneuron", ())]}
    yield _planned(trace, "flashneuron", trace.problem, "flashneuron", followed, published)
    yield _planned(trace, "flashneuron, ties by id", trace.problem, "flashneuron", options, published)
    for sweep, points in trace.published_sensitivity.items():
        bus = SWEEP.fullmatch(sweep)
        for rate, seconds in points.items() if bus else ():
            if bus and "flashneuron_s" in seconds:
                problem = trace.on(bus_bytes_per_second=float(bus[1]) * GIB, disk_bytes_per_second=float(rate) * GIB)
                way = f"flashneuron, disk {rate} GiB/s, bus {bus[1]} GiB/s"
                yield _planned(trace, way, problem, "flashneuron", followed, seconds["flashneuron_s"])


def _g10(trace: G10Trace) -> Iterable[dict[str, Any]]:
    for column, tiers in COLUMNS.items():
        within = trace.problem if column == "g10_gds_host" else trace.on(host_bytes=0)
        published = trace.published.get(column)
        if column in trace.planning_line_bytes:
            latency = {"nvme": trace.disk_latency_seconds, "dram": trace.host_latency_seconds}
            moves = moves_without_paging(within, line_bytes=trace.planning_line_bytes[column], latency_seconds=latency)
            yield _executed(trace, f"g10, {tiers}, own plan, capacity binds the planner", within, moves, published)
        if column in trace.plans:
            moves = [Move(move.op, move.storage, move.tier) for move in trace.plans[column]]
            yield _executed(trace, f"g10, {tiers}, published plan, capacity binds the planner", within, moves, published)
        yield _planned(trace, f"g10, {tiers}, capacity enforced", within, "g10", {}, published)


def _paged(trace: G10Trace) -> Iterable[dict[str, Any]]:
    machine = trace.problem.machine
    fault: dict[str, Any] = {"fault_seconds": FAULT_SECONDS, "fault_bytes": FAULT_PAGES * trace.page_bytes}
    links = tuple(replace(link, **fault) if link.dst == machine.device.tier else link for link in machine.links)
    problem = replace(trace.problem, machine=replace(machine, links=links))
    yield _planned(trace, "unified memory, whole storages", problem, "deepum", {"degree": 0}, trace.published.get("base"))
    yield _planned(trace, "deepum, whole storages", problem, "deepum", {}, trace.published.get("deepum"))
    yield _planned(trace, "g10, whole storages", trace.problem, "g10", {}, trace.published.get("g10"))


def _executed(trace: G10Trace, way: str, problem: Problem, moves: list[Move], published: float | None) -> dict[str, Any]:
    without_updates = replace(problem, graph=trace.without_updates().graph)
    ample = with_books(without_updates.with_budget(EXECUTOR * problem.budget_bytes))
    return _row(trace, way, ample, execute(ample, moves, trace.visit), published)


def _planned(trace: G10Trace, way: str, problem: Problem, policy: str, options: dict[str, Any], published: float | None) -> dict[str, Any]:
    try:
        schedule = plan(problem, policy, **options)
    except InfeasibleBudget:
        return _row(trace, way, problem, None, published)
    return _row(trace, way, problem, schedule, published)


def _row(trace: G10Trace, way: str, problem: Problem, schedule: Schedule | None, published: float | None) -> dict[str, Any]:
    row: dict[str, Any] = {"case": trace.name, "way": way, "budget_bytes": problem.budget_bytes}
    row |= dict.fromkeys(("peak_bytes", "seconds", "ratio", "predicted_seconds", "predicted_peak_bytes"))
    row |= {"published_seconds": published, "deviation": None, "why": None}
    if schedule is None:
        return row
    check_schedule(problem, schedule)
    timeline = simulate(problem, schedule)
    # A step ends with its last kernel, as published; what is still being copied then is the next step's affair.
    seconds = max(span.end for span in timeline.spans if span.lane == problem.machine.device.name)
    return row | {
        "peak_bytes": timeline.peak_bytes[problem.device_tier],
        "seconds": seconds,
        "ratio": seconds / (trace.published.get("ideal") or problem.op_starts[-1]),
        "predicted_seconds": seconds,
        "predicted_peak_bytes": peak_bytes(problem, schedule)[problem.device_tier],
        "deviation": (deviation := seconds / published - 1 if published else None),
        "why": None if deviation is None or abs(deviation) < EQUAL else next((why for part, why in WHY.items() if part in way), None),
    }
