"""DTR's five heuristics on the traces of its artifact (ICLR 2021), against the slowdowns its simulator gives for them.

Every schedule passes the judge and every second comes from the simulator. ">2" means that recomputation exceeds one step's time, "OOM" that
nothing is left to evict.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tierwise.errors import InfeasibleBudget, RecomputeLimit
from tierwise.ir import check_schedule
from tierwise.policies import dtr, keep_all
from tierwise.simulate import simulate
from tierwise.traces.dtr import DtrTrace, load

RECOMPUTE_LIMIT = 1.0  # of the step's own time; the authors stopped there
CLOSE = 0.01  # of the step's own time


def rows(paths: Iterable[str | Path]) -> list[dict[str, Any]]:
    """One row for each trace with everything kept, and one for each heuristic at each budget with a published slowdown."""
    return [row for path in paths for row in _rows(load(path))]


def _rows(trace: DtrTrace) -> Iterator[dict[str, Any]]:
    kept = simulate(trace.problem, keep_all.plan(trace.problem))
    seconds, peak = kept.seconds, kept.peak_bytes[trace.problem.device_tier]
    yield {
        "case": trace.name,
        "way": "keep_all",
        "budget_bytes": trace.problem.budget_bytes,
        "peak_bytes": peak,
        "seconds": seconds,
        "ratio": 1.0,
        "predicted_seconds": seconds,
        "predicted_peak_bytes": peak,
    }
    for heuristic, cells in trace.published.items():
        for share, published in cells.items():
            yield _cell(trace, heuristic, float(share), published, seconds)


def _cell(trace: DtrTrace, heuristic: str, share: float, published: float | str, in_core_seconds: float) -> dict[str, Any]:
    problem = trace.problem.with_budget(math.floor(share * trace.peak_bytes))
    row: dict[str, Any] = {"case": trace.name, "way": f"dtr {heuristic}", "budget_bytes": problem.budget_bytes, "budget_share": share}
    row |= {"published_ratio": published, "outcome": None, "deviation": None}
    try:
        schedule = dtr.plan(problem, heuristic=heuristic, recompute_limit=RECOMPUTE_LIMIT, **trace.options)
    except InfeasibleBudget as error:
        outcome = ">2" if isinstance(error, RecomputeLimit) else "OOM"
        return row | {"outcome": outcome, "agrees": outcome == published}
    check_schedule(problem, schedule)
    timeline = simulate(problem, schedule)
    ratio, peak = timeline.seconds / in_core_seconds, timeline.peak_bytes[problem.device_tier]
    row |= {"seconds": timeline.seconds, "peak_bytes": peak, "ratio": ratio, "predicted_seconds": timeline.seconds, "predicted_peak_bytes": peak}
    if isinstance(published, str):
        return row | {"agrees": False}
    return row | {"deviation": ratio - published, "agrees": abs(ratio - published) <= CLOSE}
