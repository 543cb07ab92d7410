"""The only door to a solver: mixed integer linear programs, solved by HiGHS as SciPy ships it. SciPy is imported when one is solved.

    program = Program()
    x = program.variable(cost=2.0, integer=True)       # 0 <= x <= 1
    y = program.variable(upper=10.0, cost=1.0)
    program.constrain([(x, 5.0), (y, 1.0)], lower=7.0)  # 5x + y >= 7
    program.solve(time_limit_seconds=60).values         # x = 1, y = 2

HiGHS runs on one thread with a fixed seed, so equal programs have equal answers, but for those cut off by the time limit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from ..errors import BadInput
from ..ir import Problem

_SCIPY_OPTIMAL, _SCIPY_INFEASIBLE = 0, 2


class Status(StrEnum):
    OPTIMAL = "optimal"  # within the gap that was asked for
    CUT_OFF = "cut off"  # the time limit came first; the best solution so far
    INFEASIBLE = "infeasible"  # proven: there is no solution
    UNKNOWN = "unknown"  # the time limit came before any solution, or proof that there is none


@dataclass(frozen=True, slots=True)
class Solution:
    """What the solver found. Without values there is no objective, and the gap is infinite."""

    status: Status
    values: tuple[float, ...]
    objective: float
    bound: float  # no solution has a smaller objective
    gap: float  # (objective - bound) / objective

    def __bool__(self) -> bool:
        return self.status in (Status.OPTIMAL, Status.CUT_OFF)

    def chosen(self, variable: int) -> bool:
        """Whether a 0/1 variable is 1, past the solver's rounding."""
        return self.values[variable] > 0.5


class Program:
    """minimise Σ cost·x  subject to  lower <= Σ factor·x <= upper for each constraint, and each variable's own bounds."""

    def __init__(self) -> None:
        self._lower: list[float] = []
        self._upper: list[float] = []
        self._cost: list[float] = []
        self._integer: list[bool] = []
        self._row_starts = [0]
        self._columns: list[int] = []
        self._factors: list[float] = []
        self._row_lower: list[float] = []
        self._row_upper: list[float] = []

    @property
    def variables(self) -> int:
        return len(self._cost)

    @property
    def constraints(self) -> int:
        return len(self._row_lower)

    def variable(self, lower: float = 0.0, upper: float = 1.0, *, cost: float = 0.0, integer: bool = False) -> int:
        """A new variable; returns the number it is known by."""
        if (cost < 0 and math.isinf(upper)) or (cost > 0 and math.isinf(lower)):
            raise BadInput(
                f"a variable with cost {cost} and bounds {lower} to {upper} makes the program unbounded; give it a bound on the cheap side"
            )
        self._lower.append(lower)
        self._upper.append(upper)
        self._cost.append(cost)
        self._integer.append(integer)
        return len(self._cost) - 1

    def constrain(self, terms: Iterable[tuple[int, float]], *, lower: float = -math.inf, upper: float = math.inf) -> None:
        """lower <= Σ factor·variable <= upper; a variable may occur several times."""
        for variable, factor in terms:
            self._columns.append(variable)
            self._factors.append(factor)
        self._row_starts.append(len(self._columns))
        self._row_lower.append(lower)
        self._row_upper.append(upper)

    def solve(
        self, *, time_limit_seconds: float = math.inf, relative_gap: float = 0.0, relaxed: bool = False, fixed: Mapping[int, float] | None = None
    ) -> Solution:
        """The best solution. `relaxed` lets integer variables take any value between their bounds; `fixed` variables have these values."""
        lower, upper = list(self._lower), list(self._upper)
        for variable, value in (fixed or {}).items():
            if not lower[variable] <= value <= upper[variable]:
                return _empty(False)
            lower[variable] = upper[variable] = value
        if not self.variables:
            return _empty(all(low <= 0 <= high for low, high in zip(self._row_lower, self._row_upper, strict=True)))
        import numpy as np
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_array

        # HiGHS stops at an absolute gap of 1e-6 too: costs in small units would all look the same to it.
        unit = max((abs(cost) for cost in self._cost), default=0.0) or 1.0
        shape = (self.constraints, self.variables)
        matrix = csr_array((np.array(self._factors, dtype=float), np.array(self._columns, dtype=np.int32), np.array(self._row_starts)), shape=shape)
        matrix.sum_duplicates()
        options = {"mip_rel_gap": relative_gap} | ({} if math.isinf(time_limit_seconds) else {"time_limit": time_limit_seconds})
        found = milp(
            np.array(self._cost) / unit,
            integrality=None if relaxed else np.array(self._integer, dtype=np.int32),
            bounds=Bounds(np.array(lower), np.array(upper)),
            constraints=LinearConstraint(matrix, np.array(self._row_lower), np.array(self._row_upper)) if self.constraints else None,
            options=options,
        )
        return _solution(found, unit)


def _empty(feasible: bool) -> Solution:
    return Solution(Status.OPTIMAL, (), 0.0, 0.0, 0.0) if feasible else Solution(Status.INFEASIBLE, (), math.inf, math.inf, math.inf)


def _solution(found: Any, unit: float) -> Solution:
    if found.x is None:
        # HiGHS's presolve may only say "unbounded or infeasible"; a program of ours is never unbounded.
        if found.status == _SCIPY_INFEASIBLE or "nfeasible" in found.message:
            return _empty(False)
        return Solution(Status.UNKNOWN, (), math.inf, -math.inf, math.inf)
    objective = float(found.fun) * unit
    bound = objective if found.mip_dual_bound is None else float(found.mip_dual_bound) * unit
    gap = 0.0 if objective == bound else abs(objective - bound) / max(abs(objective), 1e-300)
    status = Status.OPTIMAL if found.status == _SCIPY_OPTIMAL else Status.CUT_OFF
    return Solution(status, tuple(float(value) for value in found.x), objective, bound, gap)


def above_once(problem: Problem, seconds: float) -> str:
    """A gap for plans that no bound of a program was found for: whatever is computed or moved, every op runs once."""
    return f"{max(0.0, seconds / problem.op_starts[-1] - 1):.1%} above every op once" if problem.op_starts[-1] else "0.0% above every op once"
