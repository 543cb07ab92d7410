"""Write docs/zoo.md and its pictures from the latest committed result of benchmarks/cases/zoo.py: every policy, time against memory, and by year."""

from __future__ import annotations

import json
import math
from collections import Counter
from html import escape
from pathlib import Path
from typing import Any

from benchmarks.cases import zoo
from tierwise import policies

HERE = Path(__file__).parent
RESULTS = HERE.parent / "benchmarks" / "results" / "simulated"
PICTURES = HERE / "pictures" / "zoo"
MACHINE, REFERENCE, BOUND = "h200", "keep_all", "(no schedule is faster)"
WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 720, 400, 56, 44, 16, 16
SAME = 0.002  # of two step times
SLOWEST = 8.0  # times keeping everything; what is slower lies on the upper edge

Row = dict[str, Any]

# Who was published to be better than whom: with faster steps, or in less memory; what was said; and, where it is otherwise here, why.
ORDERS = (
    ("vdnn_plus_plus", "vdnn", "faster", "up to 60% faster", ""),
    ("cdma", "vdnn", "faster", "32% faster on average", ""),
    ("modnn", "vdnn", "faster", "loses less on a card of 12 GB", ""),
    ("capuchin", "vdnn", "faster", "up to 286% faster", ""),
    ("capuchin", "chen", "faster", "up to 55% faster than checkpointing, from memory", ""),
    ("checkmate", "chen", "faster", "up to 4.8 times as fast as what there was", ""),
    ("monet", "checkmate", "faster", "less memory at equal time, from memory",
     "its gain is in the choice of kernels and of backward formulas, and captured steps bring neither"),
    ("coop", "dtr", "less memory", "up to half the memory",
     "every storage of coop has an address; dtr's plans have none, and the holes that would cost it memory are not seen"),
    ("swapadvisor", "tflms", "faster", "TFLMS is its baseline, from memory",
     "its search has a second for each cell, far less than the paper's, and a slot for each size class leaves much of the memory unused"),
    ("sentinel", "autotm", "faster", "37% faster than the best on a CPU", ""),
    ("deeptm", "autotm", "faster", "up to 36% faster", ""),
    ("deeptm", "sentinel", "faster", "up to 49% faster, from memory", ""),
    ("g10", "deepum", "faster", "faster on 20 of 21 steps", ""),
    ("g10", "flashneuron", "faster", "faster or equal on every step FlashNeuron could do", ""),
    ("zenflow", "zero_offload", "faster", "up to 5 times as fast", ""),
    ("superoffload", "zero_offload", "faster", "up to 4 times as fast", ""),
    ("patrickstar", "zero_offload", "less memory", "models more than twice as large", ""),
    ("ratel", "zero_infinity", "faster", "2.3 times as fast as the best there was",
     "the disk is so slow for this device that reading and writing the state takes all of the step for both; the paper's machine has twelve disks"),
)  # fmt: skip


def main() -> None:
    page, pictures = zoo_page()
    PICTURES.mkdir(parents=True, exist_ok=True)
    for name, picture in pictures.items():
        (PICTURES / f"{name}.svg").write_text(picture, encoding="utf-8")
    (HERE / "zoo.md").write_text(page, encoding="utf-8")


def zoo_page(path: Path | None = None) -> tuple[str, dict[str, str]]:
    """The page, and its pictures by name."""
    path = path or max(RESULTS.glob("*-zoo.json"))
    result = json.loads(path.read_text(encoding="utf-8"))
    rows = result["rows"]
    here = [row for row in rows if row["case"].endswith(f" on {MACHINE}")]
    models = list(dict.fromkeys(row["case"].removesuffix(f" on {MACHINE}") for row in here))
    ways = sorted({row["way"] for row in rows} - {REFERENCE, BOUND})
    ours = [way for way in ways if policies.card(way).year is None]
    shares = sorted({row["budget_share"] for row in rows if row["way"] in ways}, reverse=True)
    pictures = {model: _picture([row for row in here if row["case"] == f"{model} on {MACHINE}"], model) for model in models}
    pictures["by-year"] = _years(here, ways)
    parts = [
        "# The field on one engine\n\n"
        f"Made from `benchmarks/results/{path.parent.name}/{path.name}` by `make docs`: {result['date']}, commit {result['commit']}, "
        f"`{result['command']}`.\n\n"
        f"{len(ways) - len(ours)} published policies{' and ours, ' + ', '.join(ours) + ',' if ours else ''} plan the same training steps, one judge "
        "says what is legal and one clock how long it takes. A budget is a "
        "share of what keeping everything takes, and time is against keeping everything. Nothing ran: costs are rooflines, so what is compared is "
        "what the policies decide, not how well their kernels are written. Published searches have a second for each "
        "cell, auto its ten. Models, cards and limits are in `benchmarks/cases/zoo.py`; every cell, "
        "with the machines of the papers too, is in `benchmarks/RESULTS.md`.\n",
        "## Time against memory\n\nEach point is a policy at one of the budgets; the line joins what nothing else beats in both. "
        "Hollow points are not exact: they train another way, or round.\n",
        *(_model(model, [row for row in here if row["case"] == f"{model} on {MACHINE}"], shares) for model in models),
        "## By year\n\nOf the cells of a policy (six models, five budgets, on the H200), how many have a plan, and how much longer a step takes in "
        "those that have one, as a geometric mean. The last two columns take the fastest exact policy published until then: a budget that nobody "
        "before could do counts when somebody can, and may raise the mean. The line in the picture is over the cells that the first "
        "year could do.\n\n![step time of every policy by year](pictures/zoo/by-year.svg)\n",
        *_history(here, ways, models, shares),
        "\n## At home\n\nThe same on the machine of the paper. Transformers are in bf16, which cards before 2020 compute at the rate of fp32. "
        "Where there is no profile of the paper's card, the last column says what it was.\n",
        *_at_home(rows, ways, len(models) * len(shares)),
        "\n## Orders that were published\n\nWho was said to be better than whom, on the machine both papers share in this table, or on the H200: "
        "step time as a geometric mean over the cells that both have, and how many each has. For those said to need less memory the plans count.\n",
        *_orders(rows, ways),
        "\n## Why a cell has no plan\n\nOn all machines. A policy that moves activations alone cannot go below parameters, gradients and optimizer "
        "state; one that moves state alone cannot go below the activations.\n",
        *_reasons(rows, ways),
        "\n## Not in the table\n",
        *(f"- **{absent.name}** ({absent.venue} {absent.year}): {absent.status}; {absent.reason}." for absent in policies.ABSENT),
    ]
    return "\n".join(parts) + "\n", pictures


# -- tables -----------------------------------------------------------------------------------------------------------------------------


def is_lossy(way: str) -> bool:
    return policies.card(way).lossy


def _model(model: str, rows: list[Row], shares: list[float]) -> str:
    lines = [f"### {model}\n", f"![{model}: time against memory](pictures/zoo/{model}.svg)\n",
             "| budget | have a plan | fastest | the next two | fastest that is not exact |", "|---|---|---|---|---|"]  # fmt: skip
    for share in shares:
        cells = [row for row in rows if row["budget_share"] == share and row["way"] not in (REFERENCE, BOUND)]
        fits = sorted((row["ratio"], row["way"]) for row in cells if row["seconds"] is not None)
        exact = [f"{way} {ratio:.3f}" for ratio, way in fits if not is_lossy(way)]
        lossy = [f"{way} {ratio:.3f}" for ratio, way in fits if is_lossy(way)]
        best = [*exact, "-", "-", "-"]
        lines.append(f"| {share:g} | {len(fits)} of {len(cells)} | {best[0]} | {best[1]}, {best[2]} | {(lossy or ['-'])[0]} |")
    return "\n".join(lines) + "\n"


def _history(rows: list[Row], ways: list[str], models: list[str], shares: list[float]) -> list[str]:
    cells = len(models) * len(shares)
    best: dict[tuple[str, float], float] = {}
    lines = ["| year | policy | venue | decides | plans | slowdown | plans until then | fastest until then |", "|---|---|---|---|---|---|---|---|"]
    for way in sorted(ways, key=lambda way: (policies.card(way).year or 9999, way)):
        card = policies.card(way)
        mine = [row for row in rows if row["way"] == way and row["seconds"] is not None]
        if not is_lossy(way):
            for row in mine:
                key = (row["case"], row["budget_share"])
                best[key] = min(best.get(key, math.inf), row["ratio"])
        mean, so_far = (_mean([row["ratio"] for row in mine]), _mean(list(best.values())))
        lines.append(f"| {card.year or '-'} | {way}{' (not exact)' if is_lossy(way) else ''} | {card.venue or '-'} | {card.decides} | "
                     f"{len(mine)} of {cells} | {mean} | {len(best)} of {cells} | {so_far} |")  # fmt: skip
    return lines


def _at_home(rows: list[Row], ways: list[str], cells: int) -> list[str]:
    lines = [f"| policy | machine | plans | slowdown | on the {MACHINE.upper()} | |", "|---|---|---|---|---|---|"]
    for way in ways:
        mine = [row for row in rows if row["way"] == way]
        home = next((row["case"].partition(" on ")[2] for row in mine if not row["case"].endswith(f" on {MACHINE}")), None)
        if home is None:
            continue
        there, here = (
            [row["ratio"] for row in mine if row["case"].endswith(f" on {name}") and row["seconds"] is not None] for name in (home, MACHINE)
        )
        stands_for = zoo.STAND_IN[way][1] if way in zoo.STAND_IN else ""
        lines.append(
            f"| {way} | {home} | {len(there)} of {cells} | {_mean(there)} | {_mean(here)} | {stands_for and 'in the place of ' + stands_for} |"
        )
    return lines


def _orders(rows: list[Row], ways: list[str]) -> list[str]:
    lines = ["| better | than | said | machine | step time | plans | here | why |", "|---|---|---|---|---|---|---|---|"]
    for better, worse, how, said, why in ORDERS:
        if better not in ways or worse not in ways:
            continue
        homes = [zoo.machines_of(way)[-1] for way in (better, worse)]
        machine = homes[0] if homes[0] == homes[1] else MACHINE
        first, second = ({_model_and_share(row): row["ratio"] for row in _done(rows, way, machine)} for way in (better, worse))
        both = sorted(first.keys() & second.keys())
        ours, theirs = (_geometric([cells[key] for key in both]) for cells in (first, second))
        lead = len(first) - len(second) if how == "less memory" else 0.0 if ours is None or theirs is None else theirs / ours - 1
        verdict = "as published" if lead > SAME else "equal" if lead >= -SAME else "the other way round"
        times = " against ".join("-" if mean is None else f"{mean:.3f}" for mean in (ours, theirs))
        lines.append(f"| {better} | {worse} | {said} | {machine} | {times} | {len(first)} against {len(second)} | {verdict} | "
                     f"{'' if verdict == 'as published' else why} |")  # fmt: skip
    return lines


def _done(rows: list[Row], way: str, machine: str) -> list[Row]:
    return [row for row in rows if row["way"] == way and row["case"].endswith(f" on {machine}") and row["seconds"] is not None]


def _model_and_share(row: Row) -> tuple[str, float]:
    return row["case"].partition(" on ")[0], row["budget_share"]


def _reasons(rows: list[Row], ways: list[str]) -> list[str]:
    lines = ["| policy | cells | have a plan | need more memory | took too long | other reasons |", "|---|---|---|---|---|---|"]
    for way in ways:
        mine = [row for row in rows if row["way"] == way]
        needs = sum((row["outcome"] or "").startswith("needs ") for row in mine)
        late = sum((row["outcome"] or "").startswith("over ") for row in mine)
        said = Counter(row.get("why") or row["outcome"] for row in mine if row["outcome"] and not row["outcome"].startswith(("needs ", "over ")))
        other = "; ".join(f"{count}: {_cell(why)}" for why, count in said.most_common(2)) + ("; ..." if len(said) > 2 else "")
        planned = sum(row["seconds"] is not None for row in mine)
        lines.append(f"| {way} | {len(mine)} | {planned} | {needs or '-'} | {late or '-'} | {other or '-'} |")
    return lines


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _geometric(ratios: list[float]) -> float | None:
    return math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else None


def _mean(ratios: list[float]) -> str:
    mean = _geometric(ratios)
    return "-" if mean is None else f"{mean:.3f}"


# -- pictures ---------------------------------------------------------------------------------------------------------------------------


def _picture(rows: list[Row], model: str) -> str:
    """Time against memory, both as shares of keeping everything; time on a logarithmic scale."""
    kept = next(row for row in rows if row["way"] == REFERENCE)
    points = [(row["peak_bytes"] / kept["peak_bytes"], row["ratio"], row["way"]) for row in rows if row["peak_bytes"] and row["way"] != BOUND]
    exact = [point for point in points if not is_lossy(point[2])]
    frontier = sorted({p for p in exact if not any(q[0] <= p[0] and q[1] <= p[1] and q[:2] != p[:2] for q in exact)})

    def x(share: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * min(share, 1.05) / 1.05

    def y(ratio: float) -> float:
        low, high = math.log(0.9), math.log(SLOWEST)
        return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * (math.log(min(max(ratio, 0.9), SLOWEST)) - low) / (high - low)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" font-family="sans-serif" font-size="11">',
        f"<title>{escape(model)}: step time against memory</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
    ]
    for share in (0.2, 0.4, 0.6, 0.8, 1.0):
        parts.append(f'<line x1="{x(share):.1f}" y1="{TOP}" x2="{x(share):.1f}" y2="{HEIGHT - BOTTOM}" stroke="#e3e6ea"/>')
        parts.append(f'<text x="{x(share):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle" fill="#5b6570">{share:g}</text>')
    for ratio in (1, 1.5, 2, 3, 4, 6, 8):
        parts.append(f'<line x1="{LEFT}" y1="{y(ratio):.1f}" x2="{WIDTH - RIGHT}" y2="{y(ratio):.1f}" stroke="#e3e6ea"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y(ratio) + 4:.1f}" text-anchor="end" fill="#5b6570">{ratio:g}×</text>')
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 8}" text-anchor="end" fill="#5b6570">peak memory, of keeping everything</text>')
    parts.append(f'<text x="{LEFT}" y="{HEIGHT - 8}" fill="#5b6570">step time, of keeping everything, logarithmic</text>')
    parts += [_point(x(share), y(ratio), way, hollow=is_lossy(way)) for share, ratio, way in sorted(points)]
    path = " ".join(f"{'M' if place == 0 else 'L'}{x(share):.1f},{y(ratio):.1f}" for place, (share, ratio, _) in enumerate(frontier))
    parts.append(f'<path d="{path}" fill="none" stroke="#0b6e99" stroke-width="2"/>')
    parts += _labels([(x(share), y(ratio), way) for share, ratio, way in frontier])
    return "\n".join([*parts, "</svg>"]) + "\n"


def _years(rows: list[Row], ways: list[str]) -> str:
    """Each policy's mean step time by year, and the fastest until then, on what could be done in the first year: so that nobody raises it."""
    cards = {way: policies.card(way) for way in ways}
    found = [
        (cards[way].year or 0, way, [row for row in rows if row["way"] == way and row["seconds"] is not None]) for way in ways if cards[way].year
    ]
    first, last = min(year for year, _, _ in found), max(year for year, _, _ in found)
    in_year = Counter(year for year, _, mine in found if mine)
    seen: Counter[int] = Counter()

    def x(year: float) -> float:
        return LEFT + 24 + (WIDTH - LEFT - RIGHT - 70) * (year - first) / max(1, last - first)

    def y(ratio: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * math.log(min(max(ratio, 1.0), SLOWEST)) / math.log(SLOWEST)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" font-family="sans-serif" font-size="11">',
        "<title>Step time of every policy by year</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
    ]
    for ratio in (1, 1.5, 2, 3, 4, 6, 8):
        parts.append(f'<line x1="{LEFT}" y1="{y(ratio):.1f}" x2="{WIDTH - RIGHT}" y2="{y(ratio):.1f}" stroke="#e3e6ea"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y(ratio) + 4:.1f}" text-anchor="end" fill="#5b6570">{ratio:g}×</text>')
    parts += [
        f'<text x="{x(year):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle" fill="#5b6570">{year}</text>' for year in range(first, last + 1)
    ]
    parts.append(
        f'<text x="{LEFT}" y="{HEIGHT - 8}" fill="#5b6570">step time where there is a plan, of keeping everything, geometric mean, logarithmic</text>'
    )
    best: dict[tuple[str, float], float] = {}
    at_first: set[tuple[str, float]] = set()
    line, names = [], []
    for year, way, mine in sorted(found, key=lambda entry: entry[:2]):
        if not mine:
            continue
        mean = math.exp(sum(math.log(row["ratio"]) for row in mine) / len(mine))
        spread = (seen[year] - (in_year[year] - 1) / 2) * 5  # side by side within their year
        seen[year] += 1
        parts.append(_point(x(year) + spread, y(mean), f"{way} {mean:.2f}", hollow=is_lossy(way)))
        names.append((x(year) + spread, y(mean), way))
        if not is_lossy(way):
            for row in mine:
                best[row["case"], row["budget_share"]] = min(best.get((row["case"], row["budget_share"]), math.inf), row["ratio"])
        since_then = [ratio for key, ratio in best.items() if year == first or key in at_first]
        at_first |= set(best) if year == first else set()
        if since_then:
            line.append((x(year), math.exp(sum(map(math.log, since_then)) / len(since_then))))
    ends = dict(line)  # of each year the last
    path = " ".join(f"{'M' if place == 0 else 'L'}{at:.1f},{y(ratio):.1f}" for place, (at, ratio) in enumerate(ends.items()))
    parts.append(
        f'<path d="{path}" fill="none" stroke="#0b6e99" stroke-width="2"><title>the fastest until then, where {first} had a plan</title></path>'
    )
    parts += _labels(sorted(names, key=lambda name: (-name[1], name[0])))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _point(x: float, y: float, way: str, *, hollow: bool) -> str:
    look = 'fill="none" stroke="#8a5a00"' if hollow else 'fill="#7d8894" fill-opacity="0.55"'
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" {look}><title>{escape(way)}</title></circle>'


def _labels(points: list[tuple[float, float, str]]) -> list[str]:
    """Names of what is on the frontier, each once, where they do not lie on each other."""
    taken: list[tuple[float, float, float]] = []
    found, named = [], set()
    for x, y, way in points:
        width = 6.2 * len(way)
        left = min(x + 6, WIDTH - RIGHT - width)
        if way in named or any(abs(y - 6 - other_y) < 12 and left < end and start < left + width for start, end, other_y in taken):
            continue
        named.add(way)
        taken.append((left, left + width, y - 6))
        found.append(f'<text x="{left:.1f}" y="{y - 6:.1f}" fill="#0b3f57">{escape(way)}</text>')
    return found


if __name__ == "__main__":
    main()
