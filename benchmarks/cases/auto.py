"""auto against the fastest of all other exact policies: six models, five budgets, two machines, op by op or block by block; and after lowering.

    python -m benchmarks.cases.auto [--models vgg-16,unet] [--machines h200,v100-32] [--others all] [--cells cells.jsonl] [--part ops] [--dry]

Problems, budgets and limits are those of the table of all policies (cases/zoo.py). A policy counts if it plans the step it was given and nothing it
does is lossy. What `--cells` has of the others is not planned again: one line of JSON for each cell, added to as they are done. Rows of choices are
programs of region choices, as fit runs them, against the schedules of policies that can run, after lowering, with state where it is. With one
`--part`, the other's rows of the latest result stay.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shlex
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.cases import zoo
from tierwise import machines, pipeline, policies
from tierwise.capture import region_examples
from tierwise.errors import InfeasibleBudget, TierwiseError
from tierwise.execute.null_device import NullDevice
from tierwise.fitting.lowered import by_policy
from tierwise.fitting.menus import MOST_CHOICES, PreparedMenu, RegionCode, estimated_choices
from tierwise.ir import Machine, Menu, Problem, check_schedule, peak_bytes
from tierwise.ir.program import MIN_SENT_BYTES
from tierwise.lower import choose, image, keep_everything, with_budget
from tierwise.profile.roofline import fused_costs
from tierwise.regions import options
from tierwise.regions.joint import describe
from tierwise.simulate import lower_bound_seconds, simulate

NEEDS = ""
NAME, BASELINE = "auto", "the fastest other"
MACHINES = ("h200", "v100-32")
PLAN_SECONDS = 10.0
AUTO_SECONDS = 120.0  # beyond this a cell says so; planning is limited in time of the processor, and others may use it too

KINDS_OF_ROWS = ("ops", "choices")
CHOOSE = "auto's choices"
SLOW_TO_LOWER = ("autotm", "sentinel", "tflms")  # they swap alone, and take a minute for a step op by op

Cell = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cases.auto", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--models", default="all", help=f"some of {', '.join(zoo.MODELS)}")
    parser.add_argument("--machines", default=",".join(MACHINES))
    parser.add_argument("--others", default="all")
    parser.add_argument("--cells", type=Path, help="what is known of others, and where more is kept")
    parser.add_argument("--part", choices=KINDS_OF_ROWS, help="only this")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--dry", action="store_true", help="print and keep nothing")
    chosen = parser.parse_args()
    models = list(zoo.MODELS) if chosen.models == "all" else chosen.models.split(",")
    others = exact_policies() if chosen.others == "all" else chosen.others.split(",")
    on, known = chosen.machines.split(","), _latest()
    rows = run(models, on, others, cells=chosen.cells, workers=chosen.workers) if chosen.part != "choices" else _of(known, CHOOSE, False)
    rows += choices(models, on) if chosen.part != "ops" else _of(known, CHOOSE, True)
    if chosen.dry:
        return print(json.dumps(rows, indent=1))
    command = shlex.join(["python", "-m", "benchmarks.cases.auto", *sys.argv[1:]])
    command = f"{known['command']}; {command}" if chosen.part and known else command
    print("wrote", results.write("auto", rows, machine="simulated", command=command, baseline=BASELINE))
    (results.HERE / "RESULTS.md").write_text(results.page(), encoding="utf-8")


def _latest() -> results.Result:
    path = max((results.HERE / "results" / "simulated").glob("*-auto.json"), default=None)
    return json.loads(path.read_text(encoding="utf-8")) if path else {}


def _of(result: results.Result, way: str, is_way: bool) -> list[Cell]:
    return [row for row in result.get("rows", ()) if (row["way"] == way) == is_way]


def exact_policies() -> list[str]:
    """All others that plan the step they are given, to the bit."""
    return [
        name
        for name in policies.names()
        if name not in (NAME, zoo.BASELINE) and not policies.card(name).exactness.startswith("lossy") and not hasattr(policies.load(name), "prepare")
    ]


def run(
    models: Iterable[str] | None = None,
    on: Iterable[str] = MACHINES,
    others: Iterable[str] | None = None,
    *,
    cells: Path | None = None,
    workers: int = 2,
) -> list[Cell]:
    models, on = list(models or zoo.MODELS), list(on)
    zoo._prepare(models, on)
    names = list(exact_policies() if others is None else others)
    known = _read(cells, names)
    tasks = [(model, machine, name) for name in (*names, NAME) for model in models for machine in on if (model, machine, name) not in known]
    began = time.perf_counter()
    with multiprocessing.get_context("fork").Pool(workers) as pool:
        for done, (task, found) in enumerate(pool.imap_unordered(_column, tasks), 1):
            known[task] = found
            if cells and task[2] != NAME:
                with cells.open("a", encoding="utf-8") as file:
                    file.writelines(json.dumps(cell) + "\n" for cell in found)
            said = ", ".join(cell["outcome"] or f"{cell['ratio']:.3f}" for cell in found)
            print(f"{time.perf_counter() - began:6.0f} s  {done}/{len(tasks)}  {' '.join(task)}: {said}", file=sys.stderr)
    return [row for model in models for machine in on for row in _rows(model, machine, names, known)]


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


# -- after lowering ---------------------------------------------------------------------------------------------------------------------


def choices(models: Iterable[str], on: Iterable[str]) -> list[Cell]:
    """Programs over region choices against the lowered schedules of policies that say they can run, for models of repeated blocks."""
    names = [name for name in exact_policies() if policies.card(name).executable is True and name not in SLOW_TO_LOWER]
    found = []
    for model in models:
        if zoo.MODELS.get(model) != "blocks":
            continue
        captured = pipeline.capture_model(model)
        for machine in on:
            prepared = _menu(captured, machines.load(machine))
            ample = with_budget(prepared.menu, 1 << 50)
            kept = image(ample, keep_everything(ample))
            kept_seconds, peak = simulate(kept.problem, kept.schedule).seconds, peak_bytes(kept.problem, kept.schedule)[kept.problem.device_tier]
            for share in zoo.SHARES:
                question = replace(prepared, menu=with_budget(prepared.menu, int(share * peak)))
                found.append(_choice_row(f"{model} on {machine}, {share:g} of the peak", captured, question, names, kept_seconds))
                print(found[-1]["case"], found[-1]["ratio"], found[-1]["the_fastest_other"], file=sys.stderr)
    return found


def _menu(captured: pipeline.CapturedModel, machine: Machine) -> PreparedMenu:
    """What regions that come more than once can choose from, at fused rooflines; nothing is compiled."""
    graph = captured.graph
    problem = Problem(graph, machine, fused_costs(graph, machine))
    regions, found = {}, {}
    with region_examples(captured.made.model, captured.made.batch, graph, autocast=captured.made.autocast) as examples:
        for region in graph.regions:
            if sum(call.region == region.id for call in graph.calls) < 2 or region.id not in examples:
                continue
            example = examples[region.id]
            joint = describe(type(example.module).forward, example.module, example.args, example.kwargs)
            named = {option.name: option for option in options(joint, most=MOST_CHOICES)}
            regions[region.id] = RegionCode(region.example, joint, named, {}, ((), {}), None)  # type: ignore[arg-type]
            found[region.id] = estimated_choices(regions[region.id], region.id, problem)
    return PreparedMenu(Menu(problem, found), regions, ())


def _priced(question: PreparedMenu, made: PreparedMenu) -> Menu:
    """The policy's choices at what they cost more than the one that saves everything, which may not be among them."""
    problem, found = question.menu.problem, {}
    for region, code in made.regions.items():
        both = {**question.regions[region].options, **code.options}
        found[region] = estimated_choices(replace(code, options=both), region, problem)
    return Menu(problem, found)


def _choice_row(case: str, captured: pipeline.CapturedModel, question: PreparedMenu, names: list[str], kept_seconds: float) -> Cell:
    began = time.process_time()
    try:
        ours = choose(question.menu, min_sent_bytes=MIN_SENT_BYTES)
    except InfeasibleBudget:
        ours = None
    planning = time.process_time() - began
    theirs: dict[str, float] = {}
    for name in names:
        try:
            limits = zoo._options(name)
            made, program = by_policy(captured.made.model, question, name, NullDevice(1 << 20), compile=True, progress=lambda _: None, **limits)
            lowered = image(_priced(question, made), program)
            check_schedule(lowered.problem, lowered.schedule)
        except TierwiseError:
            continue
        theirs[name] = simulate(lowered.problem, lowered.schedule).seconds
    best = min(theirs, key=theirs.__getitem__, default=None)
    return {
        "case": case,
        "way": CHOOSE,
        "budget_bytes": question.menu.problem.budget_bytes,
        "peak_bytes": ours.peak_bytes if ours else None,
        "seconds": ours.seconds if ours else None,
        "ratio": ours.seconds / theirs[best] if ours and best else None,
        "the_fastest_other": best,
        "its_seconds": theirs[best] if best else None,
        "others_that_fit": len(theirs),
        "times_keep_all": ours.seconds / kept_seconds if ours else None,
        "times_bound": None,
        "planning_seconds": planning,
        "outcome": None if ours else "no plan",
    }


if __name__ == "__main__":
    main()
