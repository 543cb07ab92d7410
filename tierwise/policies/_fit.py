"""The largest setting with which a step fits, found by halving: for rules with one number that trades memory for time."""

from __future__ import annotations

from collections.abc import Callable

from ..errors import InfeasibleBudget
from ..ir import Problem, Schedule, peak_bytes
from ..units import format_bytes


def device_peak(problem: Problem, schedule: Schedule) -> int:
    return peak_bytes(problem, schedule)[problem.device_tier]


def largest_that_fits(
    problem: Problem, least: int, most: int, make: Callable[[int], Schedule], *, budget_bytes: int | None = None
) -> tuple[int, Schedule]:
    """The largest number between the two, and its schedule, with which the device has room. A larger number must not need less.

    Where even the least does not fit, it is refused, with what the least needs as the smallest budget. budget_bytes: less than the problem's
    budget, for planners that leave some room.
    """
    limit = problem.budget_bytes if budget_bytes is None else budget_bytes
    schedule = make(most)
    if device_peak(problem, schedule) <= limit:
        return most, schedule
    fits, too_much, found = least, most, make(least)
    if (needed := device_peak(problem, found)) > limit:
        raise InfeasibleBudget(f"the step needs at least {format_bytes(needed)} this way", least_bytes=needed)
    while too_much - fits > 1:
        middle = (fits + too_much) // 2
        schedule = make(middle)
        if device_peak(problem, schedule) <= limit:
            fits, found = middle, schedule
        else:
            too_much = middle
    return fits, found
