"""A Row as a line of a table, and as part of a run."""

from __future__ import annotations

from ..ir import Comparison, Outcome, Problem, Row, Run, Schedule, Timeline
from ..pipeline import relate
from ..units import exact_bytes, format_bytes, format_seconds
from ._inputs import stem
from ._terminal import Column, Line

COLUMNS = (
    Column("policy", right=False),
    Column("peak"),
    Column("step\ntime"),
    Column("against\nkeep_all"),
    Column("against\nbound"),
    Column("recomputed"),
    Column("copied", optional=True),
    Column("planned\nin", optional=True),
)


def line(row: Row, *, best: bool = False) -> Line:
    if row.seconds is None:
        return Line((row.policy,), rest=_why(row), style="dim")
    name = f"{row.policy} (not exact)" if row.lossy else row.policy
    head = (name, format_bytes(row.peak_bytes or 0), format_seconds(row.seconds), _times(row.times_keep_all), _times(row.times_bound))
    if row.outcome is Outcome.DOES_NOT_FIT:
        return Line(head, rest="does not fit", style="dim")
    recomputed = f"{row.recomputed_ops} ops, {format_seconds(row.recomputed_seconds or 0.0)}" if row.recomputed_ops else "-"
    tail = (recomputed, format_bytes(row.copied_bytes) if row.copied_bytes else "-", format_seconds(row.planning_seconds or 0.0))
    return Line((*head, *tail), style="bold green" if best else "")


def as_run(step: str, problem: Problem, schedule: Schedule, timeline: Timeline, *, policy: str, kept: Row, row: Row, bound_seconds: float) -> Run:
    """One planned schedule beside the reference, as a file that `tierwise report` reads."""
    rows = (kept,) if policy == kept.policy else (kept, row)
    related = tuple(relate(each, kept.seconds or 0.0, bound_seconds) for each in rows)
    table = Comparison(problem.budget_bytes, bound_seconds, kept.seconds or 0.0, kept.peak_bytes or 0, related)
    return Run(stem(step), problem, schedule, timeline, policy=policy, comparisons=(table,))


def bound_line(comparison: Comparison) -> Line:
    seconds = comparison.bound_seconds
    share = seconds / comparison.keep_all_seconds if comparison.keep_all_seconds else None
    return Line(("lower bound", "", format_seconds(seconds), _times(share), _times(1.0)), style="dim")


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}×"


def _why(row: Row) -> str:
    if row.outcome is Outcome.INFEASIBLE and row.least_bytes:
        return f"does not fit; its smallest budget is {exact_bytes(row.least_bytes)}"
    return row.reason
