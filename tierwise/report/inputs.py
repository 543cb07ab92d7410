"""Files as runs: what plan, simulate and compare write, what a training run leaves behind, or a bare timeline."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..errors import BadFile, BadInput
from ..ir import Run, Schedule, Timeline, serial


def read_runs(paths: Sequence[str | Path]) -> list[Run]:
    runs = [_read(path) for path in paths]
    for path, run in zip(paths, runs, strict=True):
        if run.predicted is None and run.measured is None and not run.comparisons:
            raise BadInput(f"{path} holds no timeline and no table, so there is nothing to report; make it again with `tierwise plan ... -o {path}`")
    return runs


def _read(path: str | Path) -> Run:
    found: Run | Timeline | Schedule = serial.load(path, (Run, Timeline, Schedule))
    if isinstance(found, Run):
        return found
    if isinstance(found, Schedule):
        raise BadFile(f"{path}: a schedule does not say when things run; `tierwise simulate STEP {path} -o run.json` makes a run of it")
    name = Path(path).name.removesuffix(".gz").removesuffix(".json")
    return Run(name, measured=found) if found.measured else Run(name, predicted=found)
