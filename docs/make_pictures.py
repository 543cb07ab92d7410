"""The pictures of how_it_works.md: one small step four ways, simulated when the site is built."""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from pathlib import Path

from tierwise import pipeline, policies
from tierwise.ir import Compute, Problem, Schedule, Timeline
from tierwise.report.fates import recomputations
from tierwise.simulate import simulate
from tierwise.units import format_bytes, format_seconds

STEP = Path(__file__).parent.parent / "examples" / "gpt-small.step.json"
MACHINE, BUDGET_SHARE = "rtx4090", 0.6
WAYS = {  # a policy that does it
    "keep_all": "keep everything",
    "dtr": "within the budget, recompute",
    "tflms": "within the budget, copy away and back",
    "capuchin": "within the budget, each tensor the cheaper way",
}
WIDTH, LEFT, RIGHT, CURVE, LANE, GAP, HEAD = 640, 130, 8, 84, 14, 4, 24


def four_ways() -> str:
    """Memory and lanes of the step with everything kept, and within a budget in three ways; one time axis, one memory axis."""
    problem = pipeline.make_problem(str(STEP), MACHINE)
    kept = pipeline.reference(problem).row.peak_bytes or 0
    budget = int(BUDGET_SHARE * kept)
    found = {name: policies.planned(problem if name == "keep_all" else problem.with_budget(budget), name) for name in WAYS}
    timelines = {name: simulate(*planned) for name, planned in found.items()}
    longest = max(timeline.seconds for timeline in timelines.values())
    charts = [_way(*found[name], timelines[name], WAYS[name], longest, kept, budget) for name in WAYS]
    return f'<figure class="ways">{"".join(charts)}</figure>'


def _way(problem: Problem, schedule: Schedule, timeline: Timeline, words: str, longest: float, most: int, budget: int) -> str:
    lanes = ["gpu", *(lane for lane in ("out", "in") if any(span.lane == lane for span in timeline.spans))]
    height = HEAD + CURVE + (LANE + GAP) * len(lanes) + GAP
    again = {place for place, _ in recomputations(schedule)}

    def x(when: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * min(max(when, 0.0), longest) / longest

    def y(nbytes: float) -> float:
        return HEAD + CURVE * (1 - nbytes / (1.06 * most))

    peak = timeline.peak_bytes[problem.device_tier]
    said = f"{words}: {format_bytes(peak)}, {format_seconds(timeline.seconds)}"
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img"><title>{escape(said)}</title><text class="head" x="{LEFT}" y="16">{escape(said)}</text>'
    ]
    parts.append(f'<path class="area" d="{_area(timeline, problem.device_tier, x, y)}"/>')
    parts.append(f'<text x="{LEFT - 10}" y="{HEAD + CURVE - 4}" text-anchor="end">memory</text>')
    parts.append(f'<path class="budget" d="M{LEFT},{y(budget):.1f}H{WIDTH - RIGHT}"/><text class="budget" x="{LEFT - 10}" y="{y(budget) + 4:.1f}" text-anchor="end">budget</text>')  # fmt: skip  # noqa: E501
    names = {"gpu": "computes", "out": "copies to the host", "in": "copies back"}
    for place, lane in enumerate(lanes):
        top = HEAD + CURVE + GAP + place * (LANE + GAP)
        parts.append(f'<text x="{LEFT - 10}" y="{top + 11.5}" text-anchor="end">{names[lane]}</text>')
        for span in timeline.spans:
            if span.lane == lane:
                step = schedule.steps[span.step]
                phase = "again" if span.step in again else str(problem.graph.ops[step.op].phase) if isinstance(step, Compute) else "copy"
                width = max(x(span.end) - x(span.start) - 0.3, 0.4)
                parts.append(f'<rect class="{phase}" x="{x(span.start):.1f}" y="{top}" width="{width:.1f}" height="{LANE}"/>')
    return "".join([*parts, "</svg>"])


def _area(timeline: Timeline, tier: str, x: Callable[[float], float], y: Callable[[float], float]) -> str:
    changes = sorted(
        (when, role, nbytes) for role, curve in timeline.memory[tier].items() for when, nbytes in zip(curve.seconds, curve.nbytes, strict=True)
    )
    held: dict[str, int] = {}
    path = f"M{x(0):.1f},{y(0):.1f}"
    for when, role, nbytes in changes:
        path += f"H{x(when):.1f}"
        held[role] = nbytes
        path += f"V{y(sum(held.values())):.1f}"
    return f"{path}H{x(timeline.seconds):.1f}V{y(0):.1f}Z"
