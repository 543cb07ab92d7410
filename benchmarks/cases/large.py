"""How long auto takes to plan a step of llama-70b, 80 layers op by op, for an H200 whose host has 2 TiB.

Planned and judged as `tierwise plan` does; nothing runs. 130 GiB have room for the parameters and next to nothing else, 100 and 60 GiB for some of
them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from tierwise import machines, pipeline
from tierwise.simulate import lower_bound_seconds
from tierwise.units import format_bytes

NEEDS = ""
MODEL, MACHINE, NAME = "llama-70b", "h200", "auto"
HOST_BYTES = 2 << 40
BUDGETS = tuple(gib << 30 for gib in (60, 100, 130))


def run() -> Iterator[dict[str, Any]]:
    print(f"capturing {MODEL}", file=sys.stderr)
    captured = pipeline.capture_model(MODEL)
    machine = machines.load(MACHINE).with_capacity("dram", HOST_BYTES)
    for budget in BUDGETS:
        problem = pipeline.make_problem(captured.graph, machine, budget)
        answer = pipeline.answer(problem, NAME)
        yield {
            "case": f"{MODEL} in {format_bytes(budget)}, host memory of {format_bytes(HOST_BYTES)}",
            "way": NAME,
            "budget_bytes": budget,
            "peak_bytes": answer.row.peak_bytes,
            "seconds": answer.row.seconds,
            "planning_seconds": answer.row.planning_seconds,
            "ops": len(problem.graph.ops),
            "times_bound": answer.row.seconds / lower_bound_seconds(problem) if answer.row.seconds else None,
        }
