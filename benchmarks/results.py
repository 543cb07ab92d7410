"""Result files and the page made from them: `python -m benchmarks.results` makes RESULTS.md again.

A result is one file, results/<machine>/<date>-<case>.json; <machine> is "simulated" where nothing ran on hardware. What is simulated again replaces
it; what is measured again on the same day is <date>b, and so on:

    {machine, date, commit, command, versions, baseline,
     rows: [{case, way, budget_bytes, peak_bytes, seconds, ratio, predicted_seconds, predicted_peak_bytes, ...}]}

`ratio` is seconds against the row of the way named by `baseline`, of the same case in the same file; a field without a meaning is null; a row may
have more fields. A `note` is what a reader must know of a run. Rates and the like, which compare nothing, have `columns` and rows of values instead.
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import string
import subprocess
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from tierwise.units import format_bytes

HERE = Path(__file__).parent
FIELDS = ("case", "way", "budget_bytes", "peak_bytes", "seconds", "ratio", "predicted_seconds", "predicted_peak_bytes")
LONGEST_TEXT = 300  # in a table
PACKAGES = ("torch", "numpy", "scipy")

Row = dict[str, Any]
Result = dict[str, Any]


def write(
    case: str,
    rows: Iterable[Mapping[str, Any]],
    *,
    machine: str,
    command: str,
    baseline: str | None = None,
    versions: Mapping[str, str] | None = None,
    here: Path = HERE,
    path: Path | None = None,
) -> Path:
    """Keep the rows of one run. Where a row has no ratio and its case has a row of the baseline, it gets one."""
    date = datetime.now(UTC).date().isoformat()
    result = {
        "machine": machine,
        "date": date,
        "commit": commit(),
        "command": command,
        "versions": dict(versions or installed_versions()),
        "baseline": baseline,
        "rows": _with_ratios([dict.fromkeys(FIELDS) | dict(row) for row in rows], baseline),
    }
    path = path or _free(here / "results" / machine, date, case)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return path


def write_as_they_come(case: str, rows: Iterable[Mapping[str, Any]], **about: Any) -> Path:
    """The same after each row: a run that is cut off leaves what it has."""
    found: list[Mapping[str, Any]] = []
    path: Path | None = None
    for row in rows:
        found.append(row)
        path = write(case, found, **about, path=path)
    return path or write(case, found, **about)


def _free(folder: Path, date: str, case: str) -> Path:
    names = (f"{date}{letter}-{case}.json" for letter in ("", *string.ascii_lowercase[1:]))
    return next(path for name in names if not (path := folder / name).exists() or folder.name == "simulated")


def _with_ratios(rows: list[Row], baseline: str | None) -> list[Row]:
    reference = {row["case"]: row["seconds"] for row in rows if row["way"] == baseline}
    for row in rows:
        if row["ratio"] is None and row["seconds"] is not None and reference.get(row["case"]):
            row["ratio"] = row["seconds"] / reference[row["case"]]
    return rows


def installed_versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str:
    if "GIT_COMMIT" in os.environ:  # a copy without its history
        return os.environ["GIT_COMMIT"]
    found = subprocess.run(["git", "describe", "--always", "--dirty", "--exclude", "*"], cwd=HERE, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


# -- the page ---------------------------------------------------------------------------------------------------------------------------


def page(here: Path = HERE) -> str:
    """The latest result of each case on each machine, and of ways that were not run then the latest there is."""
    found: dict[tuple[str, str], list[Result]] = {}
    for path in sorted((here / "results").glob("*/*.json"), reverse=True):
        found.setdefault((path.parent.name, path.stem.split("-", 3)[3]), []).append(json.loads(path.read_text(encoding="utf-8")))
    parts = ["# Results\n\nMade from the files in `results/` by `python -m benchmarks`; nothing here is typed in."]
    for (machine, case), (latest, *before) in sorted(found.items(), key=lambda one: one[0]):
        parts.append(f"\n## {case} on {machine}\n\n{_about(case)}\n\n{_made_by(latest)}\n")
        parts += [f"Note: {latest['note']}.\n"] if "note" in latest else []
        parts += _table(latest["columns"], latest["rows"]) if "columns" in latest else _comparison(latest["rows"])
        shown = _ways(latest)
        for result in before:
            others = _ways(result) - shown if shown else set()
            if others:
                rows = [row for row in result["rows"] if (row["case"], row["way"]) in others]
                parts += [f"\nNot run then: {_made_by(result)}\n", *_comparison(rows)]
                shown |= others
    return "\n".join(parts) + "\n"


def _made_by(result: Result) -> str:
    with_what = result["with"] if "with" in result else ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    return f"{with_what}, {result['date']}, commit {result['commit']}: `{result['command']}`"


def _ways(result: Result) -> set[tuple[str, str]]:
    """Of comparisons on hardware; what is simulated is made again as a whole, and rates compare nothing."""
    return {(row["case"], row["way"]) for row in result["rows"]} if result.get("baseline") and result["machine"] != "simulated" else set()


def _about(case: str) -> str:
    """The first line of the docstring of what made it."""
    module = f"reproductions.{case.removeprefix('reproduce-')}" if case.startswith("reproduce-") else f"cases.{case.partition('-')[0]}"
    return (importlib.import_module(f"benchmarks.{module}").__doc__ or "").split("\n")[0]


def _comparison(rows: list[Row]) -> list[str]:
    by_share = [row for row in rows if "budget_share" in row]
    others = [row for row in rows if "budget_share" not in row]
    lines = _by_share(by_share) if by_share else []
    named = dict.fromkeys(field for row in others for field in row)
    fields = [field for field in named if any(row.get(field) is not None for row in others) and not any(_is_long(row.get(field)) for row in others)]
    heads = [field.removesuffix("_bytes").replace("_", " ") for field in fields]
    return lines + ([""] if lines and others else []) + (_table(heads, [[_value(field, row.get(field)) for field in fields] for row in others]))


def _is_long(value: Any) -> bool:
    """What has parts, numbers of many steps and what is told in sentences are for readers of the file."""
    if isinstance(value, list):
        return any(not isinstance(part, str) for part in value)
    return isinstance(value, dict) or (isinstance(value, str) and len(value) > LONGEST_TEXT)


def _by_share(rows: list[Row]) -> list[str]:
    """One line for each way, one column for each budget: ours, and theirs if it differs."""
    shares = sorted({row["budget_share"] for row in rows}, reverse=True)
    cells = {(row["case"], row["way"], row["budget_share"]): _against_published(row) for row in rows}
    ways = dict.fromkeys((row["case"], row["way"]) for row in rows)
    equal = sum("(" not in cell for cell in cells.values())
    text = "Step time against everything kept, by budget as a share of the peak with everything kept"
    if any("published_ratio" in row for row in rows):
        text += f"; {equal} of {len(rows)} equal the published value, which stands beside the others"
    text += ".\n"
    return [text, *_table(["case", "way", *map(str, shares)], [[*way, *(cells.get((*way, share)) for share in shares)] for way in ways])]


def _against_published(row: Row) -> str:
    ours = row.get("outcome") or f"{row['ratio']:.4f}"
    published = row.get("published_ratio")
    theirs = f"{published:.4f}" if isinstance(published, float) else published
    return ours if theirs in (None, ours) else f"{ours} ({theirs})"


def _table(heads: list[str], rows: list[list[Any]]) -> list[str]:
    if not rows:
        return []
    return ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads), *("| " + " | ".join(_cell(value) for value in row) + " |" for row in rows)]


def _value(field: str, value: Any) -> Any:
    if value is None:
        return None
    if field.endswith("_bytes"):
        return format_bytes(value)
    return f"{value:.4f}" if field == "ratio" else value


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        value = "; ".join(map(str, value))
    return "-" if value is None else str(value).replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    (HERE / "RESULTS.md").write_text(page(), encoding="utf-8")
    print("wrote", HERE / "RESULTS.md")
