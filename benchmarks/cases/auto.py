"""auto against the fastest of all other exact policies: six models, five budgets, two machines, op by op or block by block; and after lowering.

    python -m benchmarks.cases.auto [--models vgg-16,unet] [--machines h200,v100-32] [--others all] [--cells cells.jsonl] [--workers 2] [--dry]

Problems, budgets and limits are those of the table of all policies (cases/zoo.py). A policy counts if it plans the step it was given and nothing it
does is lossy. What `--cells` has of the others is not planned again: one line of JSON for each cell, added to as they are done. Rows of choices
are programs of region choices, as fit runs them, against the schedules of policies after lowering.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shlex
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.cases import zoo
from tierwise import policies
from tierwise.simulate import lower_bound_seconds

NEEDS = ""
NAME, BASELINE = "auto", "the fastest other"
MACHINES = ("h200", "v100-32")
PLAN_SECONDS = 10.0
AUTO_SECONDS = 120.0  # beyond this a cell says so; planning is limited in time of the processor, and others may use it too

Cell = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cases.auto", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--models", default="all", help=f"some of {', '.join(zoo.MODELS)}")
    parser.add_argument("--machines", default=",".join(MACHINES))
    parser.add_argument("--others", default="all")
    parser.add_argument("--cells", type=Path, help="what is known of others, and where more is kept")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--dry", action="store_true", help="print and keep nothing")
    chosen = parser.parse_args()
    models = list(zoo.MODELS) if chosen.models == "all" else chosen.models.split(",")
    others = exact_policies() if chosen.others == "all" else chosen.others.split(",")
    rows = run(models, chosen.machines.split(","), others, cells=chosen.cells, workers=chosen.workers)
    if chosen.dry:
        return print(json.dumps(rows, indent=1))
    command = shlex.join(["python", "-m", "benchmarks.cases.auto", *sys.argv[1:]])
    print("wrote", results.write("auto", rows, machine="simulated", command=command, baseline=BASELINE))
    (results.HERE / "RESULTS.md").write_text(results.page(), encoding="utf-8")


def exact_policies() -> list[str]:
    """All others that plan the step they are given, to the bit."""
    return [
        name
        for name in policies.names()
        if name not in (NAME, zoo.BASELINE) and not policies.card(name).exactness.startswith("lossy") and not hasattr(policies.load(name), "prepare")
    ]


def run(
    models: Iterable[str] | None = None,
    machines: Iterable[str] = MACHINES,
    others: Iterable[str] | None = None,
    *,
    cells: Path | None = None,
    workers: int = 2,
) -> list[Cell]:
    models, machines = list(models or zoo.MODELS), list(machines)
    zoo._prepare(models, machines)
    names = list(exact_policies() if others is None else others)
    known = _read(cells, names)
    tasks = [(model, machine, name) for name in (*names, NAME) for model in models for machine in machines if (model, machine, name) not in known]
    began = time.perf_counter()
    with multiprocessing.get_context("fork").Pool(workers) as pool:
        for done, (task, found) in enumerate(pool.imap_unordered(_column, tasks), 1):
            known[task] = found
            if cells and task[2] != NAME:
                with cells.open("a", encoding="utf-8") as file:
                    file.writelines(json.dumps(cell) + "\n" for cell in found)
            said = ", ".join(cell["outcome"] or f"{cell['ratio']:.3f}" for cell in found)
            print(f"{time.perf_counter() - began:6.0f} s  {done}/{len(tasks)}  {' '.join(task)}: {said}", file=sys.stderr)
    return [row for model in models for machine in machines for row in _rows(model, machine, names, known)]


def _column(task: tuple[str, str, str]) -> tuple[tuple[str, str, str], list[Cell]]:
    if task[2] == NAME:
        zoo.CELL_SECONDS = AUTO_SECONDS  # of this worker, for this column
    try:
        return zoo._column(task)
    finally:
        zoo.CELL_SECONDS = 20.0


def _read(cells: Path | None, names: list[str]) -> dict[tuple[str, str, str], list[Cell]]:
    found: dict[tuple[str, str, str], list[Cell]] = {}
    for line in cells.read_text(encoding="utf-8").splitlines() if cells and cells.exists() else ():
        cell = json.loads(line)
        model, machine = cell["case"].split(" on ")
        if cell["way"] in names:
            found.setdefault((model, machine, cell["way"]), []).append(cell)
    return found


def _rows(model: str, machine: str, names: list[str], known: dict[tuple[str, str, str], list[Cell]]) -> Iterator[Cell]:
    problem = zoo._problems[model, machine]
    kept_seconds, _ = zoo._kept(problem)
    for ours in known[model, machine, NAME]:
        share, budget = ours["budget_share"], ours["budget_bytes"]
        theirs = [cell for name in names for cell in known[model, machine, name] if cell["budget_share"] == share and cell.get("seconds")]
        best = min(theirs, key=lambda cell: cell["seconds"], default=None)
        mine = ours.get("seconds")
        yield {
            "case": f"{model} on {machine}, {share:g} of the peak",
            "way": NAME,
            "budget_bytes": budget,
            "peak_bytes": ours.get("peak_bytes"),
            "seconds": mine,
            "ratio": mine / best["seconds"] if mine and best else None,
            "the_fastest_other": best["way"] if best else None,
            "its_seconds": best["seconds"] if best else None,
            "others_that_fit": len(theirs),
            "times_keep_all": mine / kept_seconds if mine else None,
            "times_bound": mine / lower_bound_seconds(problem.with_budget(budget)) if mine else None,
            "planning_seconds": ours.get("planning_seconds"),
            "outcome": ours["outcome"],
        }


if __name__ == "__main__":
    main()
