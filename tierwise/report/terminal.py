"""A summary as plain lines, for a terminal and for people who grep."""

from __future__ import annotations

from collections.abc import Iterator

from ..units import format_bytes, format_seconds
from .summary import Gap, RunSummary, Summary, Times


def lines(summary: Summary) -> Iterator[str]:
    if len(summary.runs) > 1:
        yield from table(("run", "step time", "peak", "recomputed", "copied", "waiting"), [_row(run) for run in summary.runs])
    for run in summary.runs:
        yield from _run(run, blank=run is not summary.runs[0] or len(summary.runs) > 1)
    for group in summary.groups:
        if summary.runs or group is not summary.groups[0]:
            yield ""
        yield f"{group.name}: time against memory, * where nothing is both smaller and faster"
        points = [(curve.policy, point) for curve in group.curves for point in curve.points]
        points.sort(key=lambda item: item[1].peak_bytes)
        yield from table(
            ("policy", "peak", "step time", ""),
            [(policy, format_bytes(p.peak_bytes), format_seconds(p.seconds), "*" if p.on_frontier else "") for policy, p in points],
        )


def _row(run: RunSummary) -> tuple[str, ...]:
    times = run.best
    peak = next((p.nbytes for p in times.peaks if p.tier == run.device_tier), 0) if times else 0
    copied = sum(copy.nbytes for copy in run.copied)
    return (
        run.title,
        format_seconds(times.seconds) if times else "-",
        format_bytes(peak),
        format_seconds(run.recomputed_seconds or 0.0) if run.recomputed_ops or run.recomputed_blocks else "-",
        format_bytes(copied) if copied else "-",
        format_seconds(times.waiting_seconds) if times else "-",
    )


def _run(run: RunSummary, *, blank: bool) -> Iterator[str]:
    if blank:
        yield ""
    yield run.title
    for sentence in run.words:
        yield f"  {sentence}"
    if run.plan:
        yield ""
        yield "  The plan"
    for sentence in run.plan:
        yield f"  {sentence}"
    if run.gaps:
        yield ""
        yield from table(("", "predicted", "measured", "off"), [gap_cells(gap) for gap in run.gaps], indent=2)
    elif run.best is not None:
        yield ""
        yield from table(("lane", "busy", "share"), _lanes(run.best), indent=2)


def _lanes(times: Times) -> list[tuple[str, ...]]:
    return [(lane.name, format_seconds(lane.busy_seconds), f"{lane.share:.0%}") for lane in times.lanes]


def gap_cells(gap: Gap) -> tuple[str, str, str, str]:
    show = format_bytes if gap.unit == "bytes" else format_seconds
    predicted, measured = (show(value) if value else "none" for value in (gap.predicted, gap.measured))
    return gap.what, predicted, measured, "-" if gap.off is None else off_words(gap.off)


def off_words(off: float) -> str:
    """0.031 -> '+3.1%'; 5.4 -> '6.4×'."""
    return f"{off:+.1%}" if off < 1 else f"{off + 1:.1f}×"


def table(titles: tuple[str, ...], rows: list[tuple[str, ...]], *, indent: int = 0) -> Iterator[str]:
    """The first column to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    for row in (titles, *rows):
        cells = [cell.rjust(width) if place else cell.ljust(width) for place, (cell, width) in enumerate(zip(row, widths, strict=True))]
        yield (" " * indent + "  ".join(cells)).rstrip()
