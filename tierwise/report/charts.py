"""Timelines as short lists of integers, for a page that draws them: nanoseconds and bytes, each the difference to the one before.

    spans of a lane    since the last start, duration, label, kind
    memory of a tier   since the last change, how many roles change, (role, bytes more or less) of each

Nothing is dropped up to MAX_SPANS and MAX_MOMENTS, far beyond a step of seventy layers. Above that, neighbours too short to see are drawn as one,
and of each stretch of memory its fullest and its emptiest moment are kept; `merged` says so in words, which the page shows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..ir import BUFFERS, Compute, Copy, Problem, Run, Schedule, Span, Timeline
from ..units import format_seconds
from .summary import RunSummary, lane_order, lane_words, phases_by_step
from .words import role_words

MAX_SPANS = 40_000
MAX_MOMENTS = 8_000
NANOSECOND = 1e-9


@dataclass(slots=True)
class Names:
    """Labels and kinds, shared by all runs of a page: runs of one step have the same names."""

    labels: dict[tuple[str, int], int] = field(default_factory=dict)  # what, and its bytes if it is copied
    kinds: dict[tuple[str, ...], int] = field(default_factory=dict)  # ("forward",) or ("copy", role, from, to)

    def label(self, text: str, nbytes: int = 0) -> int:
        return self.labels.setdefault((text, nbytes), len(self.labels))

    def kind(self, *words: str) -> int:
        return self.kinds.setdefault(words, len(self.kinds))


class Piece(NamedTuple):
    """A span as it is drawn; `label` may speak of several."""

    start: int
    end: int
    label: str
    nbytes: int
    kind: tuple[str, ...]


def page_data(runs: Sequence[tuple[Run, RunSummary]]) -> dict[str, Any]:
    names = Names()
    data = [_run(run, summary, names) for run, summary in runs]
    return {
        "runs": data,
        "labels": [text for text, _ in names.labels],
        "sizes": [nbytes for _, nbytes in names.labels],
        "kinds": [list(kind) for kind in names.kinds],
    }


def _run(run: Run, summary: RunSummary, names: Names) -> dict[str, Any]:
    timelines = [timeline for timeline in (run.predicted, run.measured) if timeline is not None]
    problem = run.problem
    lanes = list(dict.fromkeys(lane for timeline in timelines for lane in lane_order(timeline, problem)))
    processors = set(problem.machine.processor_named) if problem else {"gpu", "cpu"}
    tiers = {tier.name: tier.capacity_bytes for tier in problem.machine.tiers if tier.name not in BUFFERS} if problem else {}
    return {
        "title": summary.title,
        "device_tier": summary.device_tier,
        "budget": summary.budget_bytes,
        "reserved": run.reserved_bytes,
        "capacity": tiers,
        "lanes": [{"name": lane, "what": lane_words(lane, problem, run.schedule), "computes": lane in processors} for lane in lanes],
        "timelines": [_timeline(timeline, lanes, run, names) for timeline in timelines],
    }


def _timeline(timeline: Timeline, lanes: Sequence[str], run: Run, names: Names) -> dict[str, Any]:
    told: list[str] = []
    pieces = _pieces(timeline, run.problem, run.schedule)
    if sum(map(len, pieces.values())) > MAX_SPANS:
        pieces, sentence = _merged(pieces, timeline)
        told.append(sentence)
    memory = {}
    for tier in (tier for tier in timeline.memory if tier not in BUFFERS):
        moments = _moments(timeline, tier)
        if len(moments) > MAX_MOMENTS:
            found = len(moments)
            moments = _fullest_and_emptiest(moments, timeline)
            told.append(f"Of {found:,} changes of {tier}, the fullest and the emptiest moment of each {_stretch(timeline)} are drawn, both exact.")
        if moments:
            roles = list(timeline.memory[tier])
            memory[tier] = {"roles": roles, "words": [role_words(role) for role in roles], "changes": _changes(moments)}
    return {
        "measured": timeline.measured,
        "ns": _ns(timeline.seconds),
        "lanes": [_encoded(pieces.get(lane, []), names) for lane in lanes],
        "memory": memory,
        "merged": told,
    }


def _ns(seconds: float) -> int:
    return round(seconds / NANOSECOND)


# -- spans ------------------------------------------------------------------------------------------------------------------------------


def _pieces(timeline: Timeline, problem: Problem | None, schedule: Schedule | None) -> dict[str, list[Piece]]:
    phases = phases_by_step(problem, schedule) if problem and schedule else {}
    found: dict[str, list[Piece]] = {}
    for span in sorted(timeline.spans, key=lambda span: span.start):
        found.setdefault(span.lane, []).append(_piece(span, problem, schedule, phases))
    return found


def _piece(span: Span, problem: Problem | None, schedule: Schedule | None, phases: dict[int, str]) -> Piece:
    start, end = _ns(span.start), _ns(span.end)
    step = schedule.steps[span.step] if schedule is not None else None
    if problem is None or step is None:
        return Piece(start, end, f"step {span.step}", 0, ("",))
    if isinstance(step, Compute):
        return Piece(start, end, problem.graph.ops[step.op].name, 0, (phases[span.step],))
    storage = problem.graph.storages[step.storage]
    if isinstance(step, Copy):
        return Piece(start, end, storage.name, storage.nbytes, ("copy", str(storage.role), step.src, step.dst))
    return Piece(start, end, f"free {storage.name}", storage.nbytes, ("free",))


def _encoded(pieces: Iterable[Piece], names: Names) -> list[int]:
    found: list[int] = []
    before = 0
    for piece in pieces:
        found += (piece.start - before, piece.end - piece.start, names.label(piece.label, piece.nbytes), names.kind(*piece.kind))
        before = piece.start
    return found


def _merged(pieces: dict[str, list[Piece]], timeline: Timeline) -> tuple[dict[str, list[Piece]], str]:
    """Neighbours of one kind, each shorter than a threshold that is raised until few enough are left, as one piece."""
    count = sum(map(len, pieces.values()))
    short = max(1, _ns(timeline.seconds) // 100_000)
    while True:
        found = {lane: _joined(those, short) for lane, those in pieces.items()}
        left = sum(map(len, found.values()))
        if left <= MAX_SPANS or short > _ns(timeline.seconds):
            return (
                found,
                f"{count:,} spans are drawn as {left:,}: neighbours of one kind, shorter than {format_seconds(short * NANOSECOND)}, are joined.",
            )
        short *= 2


def _joined(pieces: list[Piece], short: int) -> list[Piece]:
    found: list[Piece] = []
    group: list[Piece] = []

    def close() -> None:
        if len(group) == 1:
            found.append(group[0])
        elif group:
            label = f"{len(group)} together, {group[0].label} to {group[-1].label}"
            found.append(Piece(group[0].start, max(piece.end for piece in group), label, sum(piece.nbytes for piece in group), group[0].kind))
        group.clear()

    for piece in pieces:
        fits = group and piece.kind == group[-1].kind and piece.start - group[-1].end < short and piece.end - group[0].start < 8 * short
        if piece.end - piece.start >= short or not fits:
            close()
        if piece.end - piece.start >= short:
            found.append(piece)
        else:
            group.append(piece)
    close()
    return found


# -- memory -----------------------------------------------------------------------------------------------------------------------------


class Moment(NamedTuple):
    when: int
    levels: tuple[int, ...]  # by role


def _moments(timeline: Timeline, tier: str) -> list[Moment]:
    """Every instant at which the tier's content changes, with what each role then holds."""
    curves = list(timeline.memory[tier].values())
    changes = sorted((_ns(when), role, nbytes) for role, curve in enumerate(curves) for when, nbytes in zip(curve.seconds, curve.nbytes, strict=True))
    levels = [0] * len(curves)
    found: list[Moment] = []
    for when, role, nbytes in changes:
        levels[role] = nbytes
        if found and found[-1].when == when:
            found[-1] = Moment(when, tuple(levels))
        else:
            found.append(Moment(when, tuple(levels)))
    return found


def _stretch(timeline: Timeline) -> str:
    return format_seconds(timeline.seconds / (MAX_MOMENTS // 2))


def _fullest_and_emptiest(moments: list[Moment], timeline: Timeline) -> list[Moment]:
    width = max(1, _ns(timeline.seconds) // (MAX_MOMENTS // 2))
    stretches: dict[int, list[Moment]] = {}
    for moment in moments:
        stretches.setdefault(moment.when // width, []).append(moment)
    kept = {moments[0], moments[-1]}
    for stretch in stretches.values():
        kept.add(max(stretch, key=lambda moment: sum(moment.levels)))
        kept.add(min(stretch, key=lambda moment: sum(moment.levels)))
    return sorted(kept)


def _changes(moments: list[Moment]) -> list[int]:
    found: list[int] = []
    before = Moment(0, (0,) * len(moments[0].levels))
    for moment in moments:
        moved = [(role, now - then) for role, (now, then) in enumerate(zip(moment.levels, before.levels, strict=True)) if now != then]
        found += (moment.when - before.when, len(moved), *(number for pair in moved for number in pair))
        before = moment
    return found
