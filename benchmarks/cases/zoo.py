"""Every policy on six models at five budgets: step time against everything kept, on an H200 and on the machine of the policy's paper.

    python -m benchmarks.cases.zoo [--models vgg-16,unet] [--policies vdnn,chen] [--workers 2] [--dry]

Budgets are shares of what keeping everything takes; the card counts with its rates and as much memory as the budget says. The three transformers are
compiled steps, two ops for each block; the three convolutional nets go op by op, since rules by kind of layer need layers. Costs are rooflines.
Searches get one second a cell, and a cell that takes longer than twenty says so. Nothing here needs a GPU.
"""

from __future__ import annotations

import argparse
import inspect
import math
import multiprocessing
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks import results
from tierwise import machines, pipeline, policies
from tierwise.errors import InfeasibleBudget, MissingTier, TierwiseError
from tierwise.ir import Problem, Schedule, peak_bytes
from tierwise.simulate import lower_bound_seconds, simulate

NEEDS = ""
BASELINE = "keep_all"
MODELS = {"vgg-16": "ops", "resnet-152": "ops", "unet": "ops", "bert-large": "blocks", "gpt2-xl": "blocks", "llama-7b": "blocks"}
SHARES = (0.9, 0.75, 0.6, 0.45, 0.3)
EVERYWHERE = "h200"
# The card a paper measured on, where there is a profile of it; a 16 GB V100 has the rates of the 32 GB one.
PAPER_MACHINE = {
    "capuchin": "p100-16", "cdma": "titanx-12", "checkmate": "v100-32", "chen": "titanx-12", "cswap": "v100-32", "deepum": "v100-32",
    "dragon": "p100-16", "flashneuron": "v100-32", "g10": "a100-40", "gist": "titanx-12", "layrub": "titanx-12", "megatron": "a100-80",
    "modnn": "titanx-12", "monet": "p100-16", "oc_dnn": "p100-16", "patrickstar": "v100-32", "pytorch_budget": "a100-80", "ratel": "rtx4090",
    "ssdtrain": "a100-40", "swapadvisor": "v100-32", "tf_swap": "p100-16", "tflms": "v100-32", "torchtune": "a100-80", "unsloth": "t4",
    "vdnn": "titanx-12", "zenflow": "a100-80", "zero_infinity": "v100-32", "zero_offload": "v100-32",
}  # fmt: skip
SEARCH_SECONDS, CELL_SECONDS = 1.0, 20.0
BOUND = "(no schedule is faster)"
NVME_BYTES = 8 << 40  # every machine gets a disk that is large enough

Cell = dict[str, Any]
_problems: dict[tuple[str, str], Problem] = {}  # inherited by the workers


class _TooLong(Exception):
    pass


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cases.zoo", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--models", default="all", help=f"some of {', '.join(MODELS)}")
    parser.add_argument("--policies", default="all")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--dry", action="store_true", help="print and keep nothing")
    chosen = parser.parse_args()
    models = list(MODELS) if chosen.models == "all" else chosen.models.split(",")
    names = policies.names() if chosen.policies == "all" else chosen.policies.split(",")
    rows = run(models, names, chosen.workers)
    if chosen.dry:
        return print("\n".join(results._by_share([row for row in rows if "budget_share" in row])))
    command = shlex.join(["python", "-m", "benchmarks.cases.zoo", *sys.argv[1:]])
    print("wrote", results.write("zoo", rows, machine="simulated", command=command, baseline=BASELINE))
    (results.HERE / "RESULTS.md").write_text(results.page(), encoding="utf-8")


def run(models: list[str] | None = None, names: list[str] | None = None, workers: int = 2) -> list[Cell]:
    names = [name for name in names or policies.names() if name != BASELINE]
    where = {name: [EVERYWHERE, *([PAPER_MACHINE[name]] if name in PAPER_MACHINE else [])] for name in names}
    _prepare(models or list(MODELS), sorted({machine for found in where.values() for machine in found}))
    tasks = [(model, machine, name) for model, machine in _problems for name in names if machine in where[name]]
    # The slowest first, so that no worker is left with one of them at the end.
    tasks.sort(key=lambda task: -len(_problems[task[0], task[1]].graph.ops))
    rows = [row for key in _problems for row in _references(*key)]
    began = time.perf_counter()
    with multiprocessing.get_context("fork").Pool(workers) as pool:
        for done, (task, cells) in enumerate(pool.imap_unordered(_column, tasks), 1):
            rows += cells
            said = ", ".join(cell["outcome"] or f"{cell['ratio']:.3f}" for cell in cells)
            print(f"{time.perf_counter() - began:6.0f} s  {done}/{len(tasks)}  {' '.join(task)}: {said}", file=sys.stderr)
    order = {way: place for place, way in enumerate([BASELINE, BOUND, *names])}
    cases = {case: place for place, case in enumerate(f"{model} on {machine}" for model, machine in _problems)}
    return sorted(rows, key=lambda row: (cases[row["case"]], order[row["way"]], -row["budget_share"]))


def _prepare(models: list[str], on: list[str]) -> None:
    for model in models:
        print(f"capturing {model}", file=sys.stderr)
        captured = pipeline.capture_model(model)
        step = pipeline.compiled_step(captured) if MODELS.get(model) == "blocks" else None
        for name in on:
            machine = machines.load(name)
            machine = machine.with_capacity("nvme", NVME_BYTES) if "nvme" in machine.tier_named else machine
            problem = pipeline.compiled_problem(captured, step, machine) if step else pipeline.make_problem(captured.graph, machine)
            _problems[model, name] = problem


# -- cells ------------------------------------------------------------------------------------------------------------------------------


def _kept(problem: Problem) -> tuple[float, int]:
    ample = problem.with_budget(1 << 50)
    everything = policies.plan(ample, BASELINE)
    return simulate(ample, everything).seconds, peak_bytes(ample, everything)[problem.device_tier]


def _references(model: str, machine: str) -> Iterator[Cell]:
    problem = _problems[model, machine]
    seconds, peak = _kept(problem)
    yield _cell(model, machine, BASELINE, 1.0, peak) | {"peak_bytes": peak, "seconds": seconds, "ratio": 1.0}
    for share in SHARES:
        budget = int(share * peak)
        bound = lower_bound_seconds(problem.with_budget(budget))
        yield _cell(model, machine, BOUND, share, budget) | {"seconds": bound, "ratio": bound / seconds}


def _column(task: tuple[str, str, str]) -> tuple[tuple[str, str, str], list[Cell]]:
    """All budgets of one policy on one step and machine, the largest first; below the least it says it can do, nothing is tried any more."""
    model, machine, name = task
    problem = _problems[model, machine]
    seconds, peak = _kept(problem)
    cells: list[Cell] = []
    least = 0
    for share in SHARES:
        cell = _cell(model, machine, name, share, int(share * peak))
        if cell["budget_bytes"] < least:
            cells.append(cell | {"outcome": _needs(least, peak)})
            continue
        cells.append(cell | _planned(problem.with_budget(cell["budget_bytes"]), name, seconds, peak))
        least = cells[-1].get("least_bytes") or least
    return task, cells


def _planned(problem: Problem, name: str, kept_seconds: float, kept_peak: int) -> Cell:
    signal.signal(signal.SIGALRM, _stop)
    signal.setitimer(signal.ITIMER_REAL, CELL_SECONDS)
    began = time.perf_counter()
    try:
        prepared, schedule = policies.planned(problem, name, **_options(name))
        planning = time.perf_counter() - began
        return _measured(prepared, schedule, kept_seconds) | {"planning_seconds": planning}
    except _TooLong:
        return {"outcome": f"over {CELL_SECONDS:.0f} s"}
    except InfeasibleBudget as error:
        return {"outcome": _needs(error.least_bytes, kept_peak), "least_bytes": error.least_bytes, "why": str(error)}
    except MissingTier as error:
        return {"outcome": "no such tier", "why": str(error)}
    except TierwiseError as error:
        return {"outcome": "refused", "why": str(error)}
    except Exception as error:
        return {"outcome": f"crashed: {type(error).__name__}", "why": str(error)}
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _measured(problem: Problem, schedule: Schedule, kept_seconds: float) -> Cell:
    timeline = simulate(problem, schedule)
    row = pipeline.describe(problem, "", schedule, timeline)
    return {
        "peak_bytes": row.peak_bytes, "seconds": row.seconds, "ratio": timeline.seconds / kept_seconds, "predicted_seconds": row.seconds,
        "predicted_peak_bytes": row.peak_bytes, "copied_bytes": row.copied_bytes, "recomputed_seconds": row.recomputed_seconds,
        "notes": row.reason or None,
    }  # fmt: skip


def _options(name: str) -> Mapping[str, Any]:
    takes = inspect.signature(policies.load(name).plan).parameters
    return {"time_limit_seconds": SEARCH_SECONDS} if "time_limit_seconds" in takes else {}


def _cell(model: str, machine: str, way: str, share: float, budget: int) -> Cell:
    return {"case": f"{model} on {machine}", "way": way, "budget_share": share, "budget_bytes": budget, "outcome": None}


def _needs(least: int | None, peak: int) -> str:
    return "no plan" if least is None else f"needs {math.ceil(1000 * least / peak) / 1000:.3f}"


def _stop(*_: Any) -> None:
    raise _TooLong


if __name__ == "__main__":
    main()
