"""The page of accuracy, from the latest committed result of benchmarks/cases/accuracy.py, misses included. Nothing there is typed in."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from tierwise.units import format_bytes

HERE = Path(__file__).parent
RESULTS = HERE.parent / "benchmarks" / "results"
MACHINE = "h200"
PEAK_WITHIN, SECONDS_WITHIN, ROOFLINE_WITHIN = 0.03, 0.05, 0.25

Row = dict[str, Any]


def accuracy_page(path: Path | None = None) -> str:
    path = path or max((RESULTS / MACHINE).glob("*-accuracy.json"))
    result = json.loads(path.read_text(encoding="utf-8"))
    rows = [row for row in result["rows"] if row["seconds"]]
    absent = [row for row in result["rows"] if not row["seconds"]]
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    parts = [
        "# Predicted against measured\n\n"
        f"Made from `benchmarks/results/{path.parent.name}/{path.name}`: {versions}, {result['date']}, commit {result['commit']}, "
        f"`{result['command']}`.\n\n"
        "Whole training steps with everything kept, eager and with each repeated block compiled, against what was predicted before any of them ran. "
        "The peak comes from a capture on fake tensors, without a GPU. The step time is predicted twice: by the roofline of the shipped machine "
        "profile, without a GPU; and from a measured profile, for which the GPU runs each kind of block, the ops outside blocks and the update by "
        "themselves. Nothing is fitted to the steps of this table.\n",
        "| | aim | holds |\n|---|---|---|",
        _aim("peak", f"within {PEAK_WITHIN:.0%}", rows, "peak_error", PEAK_WITHIN),
        _aim("step time, measured profile", f"within {SECONDS_WITHIN:.0%}", rows, "seconds_error", SECONDS_WITHIN),
        *(_median(rows, way) for way in ("eager", "compiled")),
        "\n| model | batch | way | step | predicted | error | by roofline | peak | predicted | error |\n|---|---|---|---|---|---|---|---|---|---|",
        *map(_line, rows),
        "\n**Bold**: beyond the aim.",
    ]
    missed = [row for row in rows if abs(row["seconds_error"]) > SECONDS_WITHIN or abs(row["peak_error"]) > PEAK_WITHIN]
    if missed or absent:
        parts.append("\n## Misses\n")
        parts += [_miss(row) for row in missed]
        parts += [f"- **{row['case']}**: {row['way']}; {_last_line(row)}" for row in absent]
    notes = sorted({f"{row['case']}, {row['way']}: {note}" for row in rows for note in row.get("notes") or ()})
    if notes:
        parts += ["\n## Notes\n", *(f"- {note}" for note in notes)]
    return "\n".join(parts) + "\n"


def _aim(what: str, aim: str, rows: list[Row], field: str, within: float) -> str:
    return f"| {what} | {aim} | {sum(abs(row[field]) <= within for row in rows)} of {len(rows)} rows |"


def _median(rows: list[Row], way: str) -> str:
    errors = [abs(row["roofline_error"]) for row in rows if row["way"] == way]
    aim = f"median within {ROOFLINE_WITHIN:.0%}" if way == "compiled" else "-"
    return f"| step time, roofline, {way} | {aim} | median {statistics.median(errors):.0%}, at most {max(errors):.0%} |" if errors else ""


def _line(row: Row) -> str:
    size = f"{row['batch']}" + (f" × {row['seq']}" if row["seq"] else "")
    return "| " + " | ".join((
        row["case"], size, row["way"],
        _ms(row["seconds"]), _ms(row["predicted_seconds"]), _error(row["seconds_error"], SECONDS_WITHIN), f"{row['roofline_error']:+.0%}",
        format_bytes(row["peak_bytes"]), format_bytes(row["predicted_peak_bytes"]), _error(row["peak_error"], PEAK_WITHIN),
    )) + " |"  # fmt: skip


def _error(error: float, within: float) -> str:
    return f"{100 * error:+.1f}%" if abs(error) <= within else f"**{100 * error:+.1f}%**"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"


def _miss(row: Row) -> str:
    """Where it misses: each phase, as far as the result says."""
    head = f"- **{row['case']}, {row['way']}**: step {_error(row['seconds_error'], SECONDS_WITHIN)}, peak {_error(row['peak_error'], PEAK_WITHIN)}"
    detail = row.get("detail") or {}
    if "predicted" not in detail:
        return head + "."
    phases = [
        f"{phase} {_ms(detail['measured'][phase]['seconds'])} (the host {_ms(detail['measured'][phase]['host'])}), "
        f"predicted {_ms(predicted['seconds'])} (busy {_ms(predicted['busy'])}, the host {_ms(predicted['host'])})"
        for phase, predicted in detail["predicted"].items()
    ]
    kernels = f"; the GPU was busy for {_ms(detail['kernels']['busy'])}" if "kernels" in detail else ""
    return f"{head}; {'; '.join(phases)}{kernels}."


def _last_line(row: Row) -> str:
    said = " ".join(row.get("notes") or ["no reason kept"]).strip().splitlines()
    return said[-1]
