"""Every policy on six models at five budgets: step time against everything kept, on an H200 and on the machine of the policy's paper.

    python -m benchmarks.cases.zoo [--models vgg-16,unet] [--policies vdnn,chen] [--workers 2] [--dry]

Budgets are shares of what keeping everything takes; the card counts with its rates and as much memory as the budget says. The three transformers are
compiled steps, two ops for each block; the three convolutional nets go op by op, since rules by kind of layer need layers. Costs are rooflines.
Searches get one second a cell, ours, auto, the ten it has by itself, and a cell that takes longer than twenty of the processor says so. Nothing here
needs a GPU.

Rows are kept as they come, in results/simulated/zoo.partial.jsonl: what was interrupted goes on from there when it is called again. With only some
models or policies, the others' rows of the latest result stay; each row says at which commit it was made.
"""

from __future__ import annotations

import argparse
import inspect
import json
import math
import multiprocessing
import shlex
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
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
# The card a paper measured on; a 16 GB V100 has the rates of the 32 GB one.
PAPER_MACHINE = {
    "capuchin": "p100-16", "cdma": "titanx-12", "checkmate": "v100-32", "chen": "titanx-12", "cswap": "v100-32", "deepum": "v100-32",
    "dragon": "p100-16", "dtr": "titanv-12", "flashneuron": "v100-32", "g10": "a100-40", "gist": "titanx-12", "layrub": "titanx-12",
    "megatron": "a100-80", "modnn": "titanx-12", "monet": "p100-16", "oc_dnn": "p100-16", "oneflow": "v100-32", "patrickstar": "v100-32",
    "pytorch_budget": "a100-80", "ratel": "rtx4090", "rockmate": "v100-32", "ssdtrain": "a100-40", "superoffload": "gh200",
    "swapadvisor": "v100-32", "tf_swap": "p100-16", "tflms": "v100-32", "torchtune": "a100-80", "unsloth": "t4", "vdnn": "titanx-12",
    "zenflow": "a100-80", "zero_infinity": "v100-32", "zero_offload": "v100-32",
}  # fmt: skip
# Where there is no profile of that card, or the paper was not to be had: the nearest there is, and what it stands for.
STAND_IN = {
    "autoswap": ("p100-16", "a card of 2018; the paper's is not known here"),
    "autotm": ("v100-32", "a Xeon with Optane memory, which is no device and its host; the paper's second machine is a GPU of that time"),
    "cachedarrays": ("a100-40", "a Xeon with Optane memory, which is no device and its host"),
    "coop": ("a100-80", "a card of 2023; the paper's is not known here"),
    "deeptm": ("a100-40", "a card of 2023; the paper's is not known here"),
    "echo": ("titanv-12", "a card of 2019; the paper's is not known here"),
    "poet": ("t4", "boards with microcontrollers and a Jetson TX2, far below any profile"),
    "sentinel": ("v100-32", "a Xeon with Optane memory; the paper's second machine is a GPU of that time"),
    "superneurons": ("titanx-12", "a K40c, one generation older, with as much memory"),
    "vdnn_plus_plus": ("titanx-12", "a card of 2018; the paper's is not known here"),
}
SEARCH_SECONDS, CELL_SECONDS = 1.0, 20.0
BOUND = "(no schedule is faster)"
NVME_BYTES = 8 << 40  # every machine gets a disk that is large enough
PARTIAL = results.HERE / "results" / "simulated" / "zoo.partial.jsonl"

Cell = dict[str, Any]
Task = tuple[str, str, str]  # model, machine, policy
_problems: dict[tuple[str, str], Problem] = {}  # inherited by the workers


class _TooLong(BaseException):
    """Not to be caught by a policy that tries one thing after another."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cases.zoo", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--models", default="all", help=f"some of {', '.join(MODELS)}")
    parser.add_argument("--policies", default="all")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--dry", action="store_true", help="print and keep nothing")
    chosen = parser.parse_args()
    models = list(MODELS) if chosen.models == "all" else chosen.models.split(",")
    names = policies.names() if chosen.policies == "all" else chosen.policies.split(",")
    if chosen.dry:
        return print("\n".join(results._by_share(run(models, names, chosen.workers))))
    rows = run(models, names, chosen.workers, partial=PARTIAL)
    whole = (chosen.models, chosen.policies) == ("all", "all")
    rows = in_order(rows if whole else [*_others(rows), *rows])
    command = shlex.join(["python", "-m", "benchmarks.cases.zoo", *sys.argv[1:]])
    command = command if whole or not _latest() else f"{_latest()['command']}; {command}"
    print("wrote", results.write("zoo", rows, machine="simulated", command=command, baseline=BASELINE))
    PARTIAL.unlink(missing_ok=True)
    (results.HERE / "RESULTS.md").write_text(results.page(), encoding="utf-8")


def machines_of(name: str) -> list[str]:
    """Where a policy is tried: everywhere the same, and at home."""
    home = PAPER_MACHINE.get(name) or STAND_IN.get(name, (None, ""))[0]
    return [EVERYWHERE, *([home] if home else [])]


def run(models: list[str] | None = None, names: list[str] | None = None, workers: int = 2, partial: Path | None = None) -> list[Cell]:
    """All rows. With `partial`, columns of it are not computed again, and new ones are added to it as they come."""
    names = [name for name in names or policies.names() if name != BASELINE]
    models = models or list(MODELS)
    tasks = [(model, machine, name) for model in models for name in names for machine in machines_of(name)]
    done = dict(_kept_columns(partial)) if partial else {}
    rows = [cell for task in tasks if task in done for cell in done[task]]
    if rows:
        print(f"{partial}: {len(set(done) & set(tasks))} of {len(tasks)} columns are there; delete it to begin anew", file=sys.stderr)
    _prepare(models, sorted({machine for name in names for machine in machines_of(name)}))
    rows += [row for key in _problems for row in _references(*key)]
    # The slowest first, so that no worker is left with one of them at the end.
    left = sorted((task for task in tasks if task not in done), key=lambda task: -len(_problems[task[:2]].graph.ops))
    began, commit = time.perf_counter(), results.commit()
    with multiprocessing.get_context("fork").Pool(workers) as pool:
        for count, (task, cells) in enumerate(pool.imap_unordered(_column, left), 1):
            if partial:
                _keep_column(partial, task, cells, commit)
            rows += cells
            said = ", ".join(cell["outcome"] or f"{cell['ratio']:.3f}" for cell in cells)
            print(f"{time.perf_counter() - began:6.0f} s  {count}/{len(left)}  {' '.join(task)}: {said}", file=sys.stderr)
    return in_order([{"commit": commit} | row for row in rows])


def in_order(rows: Iterable[Cell]) -> list[Cell]:
    places = {name: place for place, name in enumerate(MODELS)}

    def key(row: Cell) -> tuple[Any, ...]:
        model, _, machine = row["case"].partition(" on ")
        first = (BASELINE, BOUND).index(row["way"]) if row["way"] in (BASELINE, BOUND) else 2
        return places.get(model, len(places)), machine != EVERYWHERE, machine, first, row["way"], -row["budget_share"]

    return sorted(rows, key=key)


# -- what is there already --------------------------------------------------------------------------------------------------------------


def _keep_column(partial: Path, task: Task, cells: list[Cell], commit: str) -> None:
    with partial.open("a", encoding="utf-8") as file:
        # A new line first: the last one may have been cut off.
        file.write("\n" + json.dumps({"task": task, "rows": [{"commit": commit} | cell for cell in cells]}, ensure_ascii=False))


def _kept_columns(partial: Path) -> Iterator[tuple[Task, list[Cell]]]:
    for line in partial.read_text(encoding="utf-8").splitlines() if partial.exists() else ():
        try:
            column = json.loads(line)
        except ValueError:  # nothing, or the line that was being written when it ended
            continue
        yield tuple(column["task"]), column["rows"]


def _others(rows: list[Cell]) -> list[Cell]:
    """Of the latest result, what is not in these rows; its keeping everything and bounds are theirs, where a machine is in both."""
    here = {(row["case"], row["way"]) for row in rows}
    return [row for row in _latest().get("rows", ()) if (row["case"], row["way"]) not in here]


def _latest() -> results.Result:
    path = max((results.HERE / "results" / "simulated").glob("*-zoo.json"), default=None)
    return json.loads(path.read_text(encoding="utf-8")) if path else {}


# -- cells ------------------------------------------------------------------------------------------------------------------------------


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


def _column(task: Task) -> tuple[Task, list[Cell]]:
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
    # Seconds of this process, not of the clock: others may be busy here, too.
    signal.signal(signal.SIGPROF, _stop)
    signal.setitimer(signal.ITIMER_PROF, CELL_SECONDS)
    began = time.process_time()
    try:
        prepared, schedule = policies.planned(problem, name, **_options(name))
        planning = time.process_time() - began
        return _measured(prepared, schedule, kept_seconds) | {"planning_seconds": planning}
    except _TooLong:
        return {"outcome": f"over {CELL_SECONDS:.0f} s", "why": f"planning took more than {CELL_SECONDS:.0f} s"}
    except InfeasibleBudget as error:
        return {"outcome": _needs(error.least_bytes, kept_peak), "least_bytes": error.least_bytes, "why": str(error)}
    except MissingTier as error:
        return {"outcome": "no such tier", "why": str(error)}
    except TierwiseError as error:
        return {"outcome": "refused", "why": str(error)}
    except Exception as error:
        return {"outcome": f"crashed: {type(error).__name__}", "why": str(error)}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


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
