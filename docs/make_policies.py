"""A page for each policy: what its docstring says, its options, and its time against memory beside the best of the others.

The numbers are those of the latest committed result of benchmarks/cases/zoo.py. A policy that is not in it yet is simulated on the small step in
examples/ while the site is built.
"""

from __future__ import annotations

import functools
import json
import math
from html import escape
from pathlib import Path
from typing import Any

from tierwise import pipeline, policies
from tierwise.cli._inputs import options_of
from tierwise.errors import TierwiseError
from tierwise.simulate import simulate
from tierwise.units import format_bytes

HERE = Path(__file__).parent
RESULTS = HERE.parent / "benchmarks" / "results" / "simulated"
SMALL_STEP, SMALL_SHARES, SEARCH_SECONDS = "examples/gpt-small.step.json", (0.9, 0.7, 0.5), 0.5
MACHINE, KEPT = "h200", "keep_all"
WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 300, 200, 40, 32, 26, 10
SLOWEST = 8.0  # times keeping everything; what is slower lies on the upper edge

Row = dict[str, Any]


def policy_page(name: str) -> str:
    card = policies.card(name)
    facts = {title.capitalize(): _plain(text) for title, text in card.facts.items()}
    facts["Options"] = ", ".join(f"`{option}`" for option in _options(name)) or "none"
    parts = [f"# {name}\n\n{_plain(card.summary[:1].upper() + card.summary[1:])}\n", "| | |\n|---|---|"]
    parts += [f"| {title} | {text} |" for title, text in facts.items() if text]
    parts.append(f"\n```console\n$ tierwise plan {SMALL_STEP} --machine {MACHINE} --budget 6GiB --policy {name}\n```\n")
    return "\n".join([*parts, *_curves(name)]) + "\n"


def _plain(text: str) -> str:
    """Text of a docstring in a cell: a bar would end the cell, and stars and underscores would not be seen."""
    return escape(text, quote=False).replace("|", "\\|").replace("*", "\\*").replace("_", "\\_")


def _options(name: str) -> list[str]:
    return [f"{option}={default!r}" for option, default in options_of(name).items()]


# -- time against memory ------------------------------------------------------------------------------------------------------------------


def _curves(name: str) -> list[str]:
    result = zoo_result()
    rows = [row for row in result["rows"] if row["case"].endswith(f" on {MACHINE}")] if result else []
    if any(row["way"] == name for row in rows):
        made = f"`benchmarks/results/simulated/{result['file']}`, {result['date']}, commit {result['commit']}, `{result['command']}`"
    else:
        rows, made = [*_small_rows(KEPT), *_small_rows(name)], f"`{SMALL_STEP}`, simulated when this page was made"
    cases = list(dict.fromkeys(row["case"] for row in rows))
    charts = "".join(picture(name, case, [row for row in rows if row["case"] == case]) for case in cases)
    told = " The grey line joins what nothing beats in both." if len({row["way"] for row in rows} - {KEPT, name}) else ""
    return [
        "## Time against memory\n",
        f"Of a training step within shares of what keeping everything takes, at the rates of an {MACHINE.upper()}; left and down is better.{told}\n",
        f'<figure class="curves">{charts}</figure>\n',
        *(_table(name, rows, cases) if name != KEPT else []),
        f"\nFrom {made}.",
    ]


@functools.cache
def zoo_result() -> Row:
    found = sorted(RESULTS.glob("*-zoo.json"))
    return json.loads(found[-1].read_text(encoding="utf-8")) | {"file": found[-1].name} if found else {}


@functools.cache
def _small_rows(name: str) -> list[Row]:
    """The rows benchmarks/cases/zoo.py would make, on a step that is planned in a moment."""
    problem = pipeline.make_problem(str(HERE.parent / SMALL_STEP), MACHINE)
    kept = pipeline.reference(problem).row
    case = f"gpt-small on {MACHINE}"
    if name == KEPT:
        return [{"case": case, "way": KEPT, "budget_share": 1.0, "peak_bytes": kept.peak_bytes, "ratio": 1.0}]
    limits = {"time_limit_seconds": SEARCH_SECONDS} if "time_limit_seconds" in options_of(name) else {}
    rows: list[Row] = []
    for share in SMALL_SHARES:
        row: Row = {"case": case, "way": name, "budget_share": share, "peak_bytes": None, "ratio": None, "outcome": None}
        try:
            prepared, schedule = policies.planned(problem.with_budget(int(share * (kept.peak_bytes or 0))), name, **limits)
            found = pipeline.describe(prepared, name, schedule, simulate(prepared, schedule))
            row |= {"peak_bytes": found.peak_bytes, "ratio": (found.seconds or 0.0) / (kept.seconds or 1.0)}
        except TierwiseError as error:
            least = getattr(error, "least_bytes", None)
            row["outcome"] = f"needs {format_bytes(least)}" if least else "no plan"
        rows.append(row)
    return rows


def _table(name: str, rows: list[Row], cases: list[str]) -> list[str]:
    mine = {(row["case"], row["budget_share"]): row for row in rows if row["way"] == name}
    shares = sorted({share for _, share in mine}, reverse=True)
    head = ["| step time within | " + " | ".join(f"{share:g}" for share in shares) + " |", "|---|" + "---:|" * len(shares)]
    lines = []
    for case in cases:
        cells = (mine.get((case, share), {}) for share in shares)
        said = [f"{cell['ratio']:.3f}×" if cell.get("ratio") else cell.get("outcome") or "-" for cell in cells]
        lines.append(f"| {case.removesuffix(f' on {MACHINE}')} | " + " | ".join(said) + " |")
    return head + lines


def picture(name: str, case: str, rows: list[Row]) -> str:
    """One small chart: the frontier of all policies in grey, this one's points joined. Both axes are shares of keeping everything."""
    whole = next(row["peak_bytes"] for row in rows if row["way"] == KEPT)
    points = {way: sorted({(row["peak_bytes"] / whole, row["ratio"]) for row in rows if row["way"] == way and row["peak_bytes"] and row["ratio"]})
              for way in {row["way"] for row in rows}}  # fmt: skip
    exact = [point for way, found in points.items() if way in _exact() for point in found]
    model = case.removesuffix(f" on {MACHINE}")
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        f"<title>{escape(model)}: time against memory of {escape(name)}; the table below has the numbers</title>",
        f'<text class="head" x="{LEFT}" y="14">{escape(model)}</text>',
    ]
    for share in (0.25, 0.5, 0.75, 1.0):
        parts.append(f'<path class="grid" d="M{_x(share):.1f},{TOP}V{HEIGHT - BOTTOM}"/><text x="{_x(share):.1f}" y="{HEIGHT - BOTTOM + 13}" text-anchor="middle">{share:g}</text>')  # fmt: skip  # noqa: E501
    for ratio in (1, 1.5, 2, 4, 8):
        parts.append(f'<path class="grid" d="M{LEFT},{_y(ratio):.1f}H{WIDTH - RIGHT}"/><text x="{LEFT - 5}" y="{_y(ratio) + 3.5:.1f}" text-anchor="end">{ratio:g}×</text>')  # fmt: skip  # noqa: E501
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 4}" text-anchor="end">peak memory</text>')
    parts.append(f'<text x="{WIDTH - RIGHT}" y="14" text-anchor="end">step time</text>')
    if set(points) - {KEPT, name}:
        parts.append(f'<path class="others" d="{_path(frontier(exact))}"/>')
    if mine := points.get(name, []):
        parts.append(f'<path class="mine" d="{_path(mine)}"/>')
        parts += [f'<circle class="mine" cx="{_x(x):.1f}" cy="{_y(y):.1f}" r="3"><title>{x:.2f} of the memory, {y:.3f} times as long</title></circle>' for x, y in mine]  # fmt: skip  # noqa: E501
    else:
        middle = (LEFT + WIDTH - RIGHT) / 2
        parts.append(f'<text class="none" x="{middle}" y="{HEIGHT / 2}" text-anchor="middle">no plan within these budgets</text>')
    return "".join([*parts, "</svg>"])


def frontier(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """[(1.0, 1.0), (0.5, 2.0), (0.6, 3.0)] -> [(0.5, 2.0), (1.0, 1.0)]: what no other beats in both."""
    found: list[tuple[float, float]] = []
    for point in sorted(set(points), reverse=True):  # from the most memory to the least
        while found and found[-1][1] >= point[1]:
            found.pop()
        found.append(point)
    return found[::-1]


@functools.cache
def _exact() -> frozenset[str]:
    return frozenset(name for name in policies.names() if not policies.card(name).exactness.startswith("lossy"))


def _path(points: list[tuple[float, float]]) -> str:
    return " ".join(f"{'L' if place else 'M'}{_x(x):.1f},{_y(y):.1f}" for place, (x, y) in enumerate(points))


def _x(share: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * min(share, 1.05) / 1.05


def _y(ratio: float) -> float:
    low, high = math.log(0.9), math.log(SLOWEST)
    return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * (math.log(min(max(ratio, 0.9), SLOWEST)) - low) / (high - low)
