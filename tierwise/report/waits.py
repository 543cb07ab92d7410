"""What one lane waits for: its work and that of others as they fall into one period, with what the periods before and after leave in it."""

from __future__ import annotations

import math
from collections.abc import Iterable

from ..ir import Timeline

Interval = tuple[float, float]


def waits_of(timeline: Timeline, lane: str) -> tuple[float, dict[str, float]]:
    """How long a lane does nothing in a period, and how much of that each other one is at work, if it is."""
    idle = _holes(_merged(_wrapped(timeline, lane)), timeline.seconds)
    others = dict.fromkeys(span.lane for span in timeline.spans if span.lane != lane)
    meanwhile = {other: _overlap(idle, _merged(_wrapped(timeline, other))) for other in others}
    return sum(end - start for start, end in idle), {other: seconds for other, seconds in meanwhile.items() if seconds > 0}


def _wrapped(timeline: Timeline, lane: str) -> Iterable[Interval]:
    """The lane's work as it falls into one period: what reaches over an end is work of the neighbouring period too."""
    period = timeline.seconds
    for span in timeline.spans:
        if span.lane != lane or span.end <= span.start or period <= 0:
            continue
        start, end = span.start, min(span.end, span.start + period)
        shift = math.floor(start / period) * period
        start, end = start - shift, end - shift
        yield start, min(end, period)
        if end > period:
            yield 0.0, end - period


def _merged(intervals: Iterable[Interval]) -> list[Interval]:
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def _holes(busy: list[Interval], period: float) -> list[Interval]:
    edges = [0.0, *(edge for interval in busy for edge in interval), period]
    return [(start, end) for start, end in zip(edges[::2], edges[1::2], strict=True) if end > start]


def _overlap(a: list[Interval], b: list[Interval]) -> float:
    total, i, j = 0.0, 0, 0
    while i < len(a) and j < len(b):
        total += max(0.0, min(a[i][1], b[j][1]) - max(a[i][0], b[j][0]))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return total
