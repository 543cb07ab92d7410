"""A report as one HTML file: no network, no libraries. The templates hold the page; everything they say comes from the summary."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .. import __version__
from ..ir import Run, Timeline
from ..units import format_bytes, format_seconds
from .charts import page_data
from .fates import Module
from .summary import RunSummary, Summary, Times
from .terminal import gap_cells
from .words import recomputed_words, role_words

TEMPLATES = Path(__file__).parent / "templates"
SCRIPTS = ("numbers", "data", "tip", "view", "memory", "lanes", "stage", "svg", "tree", "page")  # one after the other, in one scope
INSTANTS = 20  # rows of the table behind a memory chart, and the peak


@dataclass(frozen=True, slots=True)
class MemoryTable:
    """What the memory chart shows, at a few instants: for those who do not see the chart."""

    tier: str
    measured: bool
    roles: tuple[str, ...]
    rows: tuple[tuple[str, tuple[str, ...], str], ...]  # when, by role, total


def render(runs: Sequence[Run], summary: Summary) -> str:
    """The page of these runs; `summary` is what summarize makes of them."""
    import jinja2
    from markupsafe import Markup

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters |= {"bytes": format_bytes, "seconds": format_seconds, "role": role_words, "gap": gap_cells}
    timed = [run for run in runs if run.predicted is not None or run.measured is not None]
    data = page_data(list(zip(timed, summary.runs, strict=True)))
    data["groups"] = [asdict(group) for group in summary.groups]
    data["losses"] = [asdict(run.losses) if run.losses else None for run in summary.runs]
    script = "\n".join((TEMPLATES / f"{name}.js").read_text(encoding="utf-8") for name in SCRIPTS)
    page = environment.get_template("report.html.j2").render(
        summary=summary,
        title=_title(summary),
        merged=[f"{run['title']}: {sentence}" for run in data["runs"] for timeline in run["timelines"] for sentence in timeline["merged"]],
        memory_tables=[list(_memory_tables(run, one)) for run, one in zip(timed, summary.runs, strict=True)],
        tree_rows=tree_rows,
        device_peak=device_peak,
        recomputed_words=recomputed_words,
        style=Markup((TEMPLATES / "style.css").read_text(encoding="utf-8")),
        script=Markup(f'"use strict";\n(() => {{\n{script}\n}})();'),
        data=Markup(json.dumps(data, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")),
        version=__version__,
    )
    return page


def _title(summary: Summary) -> str:
    if len(summary.runs) == 1:
        return summary.runs[0].name
    if summary.runs:
        return f"{len(summary.runs)} runs"
    return ", ".join(group.name for group in summary.groups)


def device_peak(run: RunSummary, times: Times) -> int | None:
    return next((peak.nbytes for peak in times.peaks if peak.tier == run.device_tier), None)


def tree_rows(module: Module, level: int = 1, parent: str = "") -> Iterator[dict[str, Any]]:
    """The tree as rows of a table, each with its level and the row it hangs on."""
    key = f"{parent}/{module.name}"
    yield {"module": module, "level": level, "key": key, "parent": parent, "leaf": not module.children, "open": level == 1}
    for child in module.children:
        yield from tree_rows(child, level + 1, key)


def _memory_tables(run: Run, summary: RunSummary) -> Iterator[MemoryTable]:
    for timeline, times in ((run.predicted, summary.predicted), (run.measured, summary.measured)):
        if timeline is None or times is None:
            continue
        for peak in times.peaks:
            roles = timeline.memory.get(peak.tier, {})
            if not peak.nbytes or not roles:
                continue
            instants = {timeline.seconds * part / INSTANTS: False for part in range(INSTANTS + 1)}
            if peak.at_seconds is not None:
                instants[peak.at_seconds] = True
            rows = []
            for when in sorted(instants):
                held = [_held(timeline, peak.tier, role, when) for role in roles]
                label = format_seconds(when) + (", the fullest" if instants[when] else "")
                rows.append((label, tuple(map(format_bytes, held)), format_bytes(sum(held))))
            yield MemoryTable(peak.tier, timeline.measured, tuple(map(role_words, roles)), tuple(rows))


def _held(timeline: Timeline, tier: str, role: str, when: float) -> int:
    curve = timeline.memory[tier][role]
    place = bisect_right(curve.seconds, when) - 1
    return curve.nbytes[place] if place >= 0 else 0
