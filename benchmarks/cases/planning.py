"""How long each policy takes to plan a step of GPT-2 XL, 48 layers, two ops a block, with its own limits; and what it says of the plan.

Within six tenths of what keeping everything takes on an H200; a policy that cannot do that plans for the least it can do, and both times count.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from benchmarks.cases import zoo
from tierwise import policies
from tierwise.errors import InfeasibleBudget, TierwiseError
from tierwise.ir import Problem
from tierwise.simulate import simulate

NEEDS = ""
COLUMNS = ["policy", "planning seconds", "budget share", "step time", "said of the plan"]
MODEL, MACHINE, SHARE, LIMIT_SECONDS = "gpt2-xl", "h200", 0.6, 60.0


def run() -> list[list[Any]]:
    zoo._prepare([MODEL], [MACHINE])
    problem = zoo._problems[MODEL, MACHINE]
    kept_seconds, kept_peak = zoo._kept(problem)
    rows = []
    for name in policies.names():
        rows.append([name, *_planned(problem, name, kept_seconds, kept_peak)])
        print(*rows[-1], sep="\t", file=sys.stderr)
    if late := [row[0] for row in rows if row[1] > LIMIT_SECONDS]:
        print(f"longer than {LIMIT_SECONDS:.0f} s: {', '.join(late)}", file=sys.stderr)
    return rows


def _planned(problem: Problem, name: str, kept_seconds: float, kept_peak: int) -> list[Any]:
    began, budget = time.perf_counter(), int(SHARE * kept_peak)
    for _ in range(2):
        try:
            prepared, schedule = policies.planned(problem.with_budget(budget), name)
        except InfeasibleBudget as error:
            if error.least_bytes is None:
                return [time.perf_counter() - began, None, None, str(error)]
            budget = error.least_bytes
            continue
        except TierwiseError as error:
            return [time.perf_counter() - began, None, None, str(error)]
        seconds = time.perf_counter() - began
        return [seconds, budget / kept_peak, simulate(prepared, schedule).seconds / kept_seconds, "; ".join(schedule.notes) or None]
    return [time.perf_counter() - began, None, None, "the least budget it named does not work"]
