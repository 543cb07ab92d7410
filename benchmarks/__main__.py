"""Run benchmark cases and keep what they say: `python -m benchmarks [CASE...] --machine NAME`; without cases, only RESULTS.md is made again.

A case is a file in cases/: its docstring says what is measured, NEEDS what it needs, and run() returns rows for COLUMNS. A result is one JSON file
under results/<machine>/, with the commit and the command; RESULTS.md is made from the latest of each and from nothing else.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("cases", nargs="*", help=f"which to run, of {', '.join(case_names())}")
    parser.add_argument("--machine", help="what to call the machine this runs on, such as h200")
    chosen = parser.parse_args()
    if unknown := sorted(set(chosen.cases) - set(case_names())):
        parser.error(f"unknown case {unknown[0]!r}; known: {', '.join(case_names())}")
    if chosen.cases and not chosen.machine:
        parser.error("say which machine this is, with --machine NAME")
    for name in chosen.cases:
        case = importlib.import_module(f"benchmarks.cases.{name}")
        if case.NEEDS == "cuda" and not _has_cuda():
            parser.error(f"{name} needs a CUDA device, and there is none here")
        print(f"running {name}", file=sys.stderr)
        print("wrote", save(name, chosen.machine, case.COLUMNS, case.run()))
    (HERE / "RESULTS.md").write_text(results_page(), encoding="utf-8")
    print("wrote", HERE / "RESULTS.md")


def case_names() -> list[str]:
    return sorted(path.stem for path in (HERE / "cases").glob("*.py") if not path.stem.startswith("_"))


def save(case: str, machine: str, columns: list[str], rows: list[list[Any]]) -> Path:
    date = datetime.now(UTC).date().isoformat()
    path = HERE / "results" / machine / f"{date}-{case}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    result = {
        "case": case,
        "machine": machine,
        "date": date,
        "commit": _commit(),
        "command": shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]]),
        "with": _versions(),
        "columns": columns,
        "rows": rows,
    }
    path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return path


def results_page() -> str:
    latest: dict[tuple[str, str], dict[str, Any]] = {}
    for path in sorted((HERE / "results").glob("*/*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        latest[result["machine"], result["case"]] = result
    parts = ["# Results\n\nMade from the files in `results/` by `python -m benchmarks`; nothing here is typed in."]
    for (machine, case), result in sorted(latest.items()):
        doc = (importlib.import_module(f"benchmarks.cases.{case}").__doc__ or "").split("\n")[0]
        parts.append(f"\n## {case} on {machine}\n\n{doc}\n\n{result['with']}, {result['date']}, commit {result['commit']}: `{result['command']}`\n")
        parts.append("| " + " | ".join(result["columns"]) + " |\n|" + "---|" * len(result["columns"]))
        parts += ["| " + " | ".join(_cell(value) for value in row) + " |" for row in result["rows"]]
    return "\n".join(parts) + "\n"


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "-" if value is None else str(value)


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _versions() -> str:
    import torch

    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else f"{os.cpu_count()} CPU cores"
    return f"{device}, Python {platform.python_version()}, torch {torch.__version__}"


def _commit() -> str:
    if "GIT_COMMIT" in os.environ:  # a copy without its history
        return os.environ["GIT_COMMIT"]
    found = subprocess.run(["git", "describe", "--always", "--dirty", "--exclude", "*"], cwd=HERE, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


if __name__ == "__main__":
    main()
