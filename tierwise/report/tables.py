"""Tables of policies from several runs: those of the same step on the same machine belong together, budget by budget."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ..ir import Comparison, Outcome, Row, Run


@dataclass(frozen=True, slots=True)
class Point:
    """A policy at a budget, as a point of time against memory."""

    budget_bytes: int
    peak_bytes: int
    seconds: float
    on_frontier: bool  # no other point of the group is at most as large and at most as slow


@dataclass(frozen=True, slots=True)
class Curve:
    """Every point of one policy, the smallest first."""

    policy: str
    points: tuple[Point, ...]


@dataclass(frozen=True, slots=True)
class Group:
    """One step on one machine: a table for each budget, the smallest first, and time against memory over all of them."""

    name: str
    tables: tuple[Comparison, ...]
    curves: tuple[Curve, ...]


def grouped(runs: Iterable[Run]) -> tuple[Group, ...]:
    """Keeping everything takes the same time and the same bytes: the same step on the same machine."""
    groups: dict[tuple[float, int], tuple[list[str], dict[int, Comparison]]] = {}
    for run in runs:
        for table in run.comparisons:
            if not table.rows:  # it says what keeping everything takes, and compares nothing
                continue
            names, tables = groups.setdefault((table.keep_all_seconds, table.keep_all_bytes), ([], {}))
            name = f"{run.name} on {run.problem.machine.name}" if run.problem is not None else run.name
            if name not in names:
                names.append(name)
            tables[table.budget_bytes] = _joined(tables.get(table.budget_bytes), table)
    found = []
    for names, tables in groups.values():
        ordered = tuple(tables[budget] for budget in sorted(tables))
        found.append(Group(", ".join(names), ordered, curves(ordered)))
    return tuple(found)


def _joined(one: Comparison | None, other: Comparison) -> Comparison:
    if one is None:
        return other
    known = {row.policy for row in one.rows}
    rows = (*one.rows, *(row for row in other.rows if row.policy not in known))
    return replace(one, rows=tuple(sorted(rows, key=_rank)))


def _rank(row: Row) -> tuple[int, float]:
    """The reference, then what has a time, the fastest first, then the rest as they came."""
    if row.policy == "keep_all":
        return 0, 0.0
    return (1, row.seconds) if row.seconds is not None else (2, 0.0)


def curves(tables: Sequence[Comparison]) -> tuple[Curve, ...]:
    found: dict[str, list[tuple[int, int, float]]] = {}
    for table in tables:
        for row in table.rows:
            if row.seconds is not None and row.peak_bytes is not None and row.outcome in (Outcome.FITS, Outcome.DOES_NOT_FIT):
                point = (table.budget_bytes, row.peak_bytes, row.seconds)
                same = [p[1:] for p in found.setdefault(row.policy, [])]
                if point[1:] not in same:  # a smaller budget that changes nothing
                    found[row.policy].append(point)
    every = [(peak, seconds) for points in found.values() for _, peak, seconds in points]

    def beaten(peak: int, seconds: float) -> bool:
        return any(p <= peak and s <= seconds and (p, s) != (peak, seconds) for p, s in every)

    return tuple(
        Curve(policy, tuple(Point(*point, on_frontier=not beaten(point[1], point[2])) for point in sorted(points, key=lambda p: p[1])))
        for policy, points in found.items()
    )
