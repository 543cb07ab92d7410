"""Run benchmark cases and keep what they say: `python -m benchmarks [CASE...] --machine NAME`; without cases, only RESULTS.md is made again.

A case with PARTS is run part by part, each with a result of its own: `activations:vit-large-16` is one of them, `activations` all.
A case is a file in cases/: its docstring says what is measured, NEEDS what it needs, and run() returns rows: of named fields where ways are compared
(results.py says which; BASELINE names the way the others are compared with), or of values for COLUMNS. A result is one JSON file under
results/<machine>/, with the commit and the command; RESULTS.md is made from the latest of each and from nothing else.
"""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import shlex
import sys
from pathlib import Path
from typing import Any

from benchmarks import results

HERE = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("cases", nargs="*", help=f"which to run, of {', '.join(case_names())}")
    parser.add_argument("--machine", help="what to call the machine this runs on, such as h200")
    chosen = parser.parse_args()
    if unknown := sorted({name.partition(":")[0] for name in chosen.cases} - set(case_names())):
        parser.error(f"unknown case {unknown[0]!r}; known: {', '.join(case_names())}")
    if chosen.cases and not chosen.machine:
        parser.error("say which machine this is, with --machine NAME")
    for name, _, part in (words.partition(":") for words in chosen.cases):
        case = importlib.import_module(f"benchmarks.cases.{name}")
        parts = getattr(case, "PARTS", ())
        if part and part not in parts:
            parser.error(f"{name} has no part {part!r}; known: {', '.join(parts) or 'none'}")
        if case.NEEDS == "cuda" and not _has_cuda():
            parser.error(f"{name} needs a CUDA device, and there is none here")
        if case.NEEDS == "traces":
            parser.error(f"{name} needs recorded steps: python -m benchmarks.cases.{name} --traces DIR")
        print(f"running {name}", file=sys.stderr)
        if hasattr(case, "COLUMNS"):
            print("wrote", save(name, chosen.machine, case.COLUMNS, case.run()))
            continue
        about = {
            "machine": chosen.machine,
            "command": _command(),
            "baseline": getattr(case, "BASELINE", None),
            "versions": {"device": _device(), **results.installed_versions()},
        }
        if parts:
            for one in [part] if part else parts:
                print("wrote", results.write_as_they_come(f"{name}-{one}", case.run(one), **about))
        else:
            print("wrote", results.write_as_they_come(name, case.run(), **about))
    (HERE / "RESULTS.md").write_text(results_page(), encoding="utf-8")
    print("wrote", HERE / "RESULTS.md")


def case_names() -> list[str]:
    return sorted(path.stem for path in (HERE / "cases").glob("*.py") if not path.stem.startswith("_"))


def save(case: str, machine: str, columns: list[str], rows: list[list[Any]]) -> Path:
    """Rates and the like compare no ways: each row is a way of its own, named by its first column, with the columns as more fields."""
    named = [{"case": case, "way": str(row[0]), **dict(zip(columns[1:], row[1:], strict=True))} for row in rows]
    return results.write(case, named, machine=machine, command=_command(), versions={"device": _device(), **results.installed_versions()}, here=HERE)


def results_page() -> str:
    return results.page(HERE)


def _command() -> str:
    return shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]])


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _device() -> str:
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else f"{os.cpu_count()} CPU cores"


def _versions() -> str:
    import torch

    return f"{_device()}, Python {platform.python_version()}, torch {torch.__version__}"


if __name__ == "__main__":
    main()
