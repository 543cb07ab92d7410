"""Published results against ours: traces of two artifacts, and captured steps, under the policies they were published for.

    python -m benchmarks.cases.reproduce [--traces DIR] [--only dtr]

DIR holds dtr/*.json.gz and g10/*.json; without it the reproductions that need no trace are run. Nothing here needs a GPU.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shlex
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks import results

NEEDS = "traces"
ARTIFACTS = {"dtr": "*.json*", "g10": "*.json*"}
CAPTURED = ("capuchin", "megatron", "monet", "ratel", "vdnn", "zero")  # no traces: steps are captured, or it is arithmetic
BASELINE = "keep_all"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cases.reproduce", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--traces", type=Path, help="the folder that holds dtr/ and g10/")
    parser.add_argument("--only", choices=sorted([*ARTIFACTS, *CAPTURED]), help="one of them; all that can be run unless said")
    chosen = parser.parse_args()
    for name in [chosen.only] if chosen.only else [*(ARTIFACTS if chosen.traces else ()), *CAPTURED]:
        words = ["python", "-m", "benchmarks.cases.reproduce", "--only", name]
        if name in ARTIFACTS:
            if chosen.traces is None or not traces_in(chosen.traces, name):
                parser.error(f"{(chosen.traces or Path()) / name} holds no trace; name the folder that holds dtr/ and g10/ with --traces")
            folder = Path(os.path.relpath(chosen.traces)) if chosen.traces.is_absolute() else chosen.traces
            words[3:3] = ["--traces", folder.as_posix()]
            rows = run(chosen.traces, name)
        else:
            print(f"reproducing {name}", file=sys.stderr)
            rows = importlib.import_module(f"benchmarks.reproductions.{name}").rows()
        path = results.write(f"reproduce-{name}", rows, machine="simulated", command=shlex.join(words), baseline=BASELINE)
        print("wrote", path.relative_to(results.HERE.parent))
    (results.HERE / "RESULTS.md").write_text(results.page(), encoding="utf-8")


def traces_in(folder: Path, artifact: str) -> list[Path]:
    return sorted((folder / artifact).glob(ARTIFACTS[artifact]))


def run(folder: Path, artifact: str) -> list[dict[str, Any]]:
    """All rows of one artifact, trace by trace."""
    reproduction = importlib.import_module(f"benchmarks.reproductions.{artifact}")
    paths = traces_in(folder, artifact)
    rows: list[dict[str, Any]] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(file=sys.stderr)) as progress:
        task = progress.add_task(artifact, total=len(paths))
        for path in paths:
            progress.update(task, description=f"{artifact} {path.name}")
            rows += reproduction.rows([path])
            progress.advance(task)
    return rows


if __name__ == "__main__":
    main()
