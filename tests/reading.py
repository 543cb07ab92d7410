"""What a schedule does, in names."""

from __future__ import annotations

from tierwise.ir import Compute, Copy, Problem, Schedule


def recomputed(problem: Problem, schedule: Schedule) -> list[str]:
    """Ops that run a second time, in order."""
    seen: set[int] = set()
    again = []
    for step in schedule.steps:
        if isinstance(step, Compute):
            if step.op in seen:
                again.append(problem.graph.ops[step.op].name)
            seen.add(step.op)
    return again


def copied(problem: Problem, schedule: Schedule, src: str = "hbm") -> list[str]:
    """Storages copied from a tier, in order."""
    return [problem.graph.storages[step.storage].name for step in schedule.steps if isinstance(step, Copy) and step.src == src]


def copied_before(problem: Problem, schedule: Schedule, src: str = "hbm") -> dict[str, str]:
    """For each storage copied from a tier, the next op after it in the list."""
    found: dict[str, str] = {}
    waiting: list[str] = []
    for step in schedule.steps:
        if isinstance(step, Copy) and step.src == src:
            waiting.append(problem.graph.storages[step.storage].name)
        elif isinstance(step, Compute):
            found.update(dict.fromkeys(waiting, problem.graph.ops[step.op].name))
            waiting = []
    return found
