"""The door to the solver: small programs with answers known by hand."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest

from tierwise.errors import BadInput
from tierwise.policies._milp import Program, Status


def knapsack(capacity: float) -> Program:
    """Worth 6, 10, 12 at weights 1, 2, 3: as integers the best of 5 is the last two, relaxed it is the first two and two thirds of the third."""
    program = Program()
    items = [program.variable(cost=-worth, integer=True) for worth in (6.0, 10.0, 12.0)]
    program.constrain([(item, weight) for item, weight in zip(items, (1.0, 2.0, 3.0), strict=True)], upper=capacity)
    return program


def equalities() -> Program:
    """Twelve equalities over forty 0/1 variables, which no presolve sees through at once; there is no solution."""
    program = Program()
    picks = [program.variable(cost=-(7 * i % 13 + 3.1 * (i % 5)), integer=True) for i in range(40)]
    for k in range(12):
        program.constrain([(pick, float((i * (k + 3)) % 17 + 1)) for i, pick in enumerate(picks)], lower=90.0 + k, upper=90.0 + k)
    return program


def test_an_integer_program():
    found = knapsack(5).solve()
    assert (found.status, found.values, found.objective, found.bound, found.gap) == (Status.OPTIMAL, (0.0, 1.0, 1.0), -22, -22, 0)
    assert [found.chosen(item) for item in range(3)] == [False, True, True]


def test_its_relaxation_is_a_bound():
    found = knapsack(5).solve(relaxed=True)
    assert found.values == pytest.approx((1.0, 1.0, 2 / 3))
    assert found.objective == pytest.approx(-24)


def test_bounds_equalities_and_repeated_terms():
    program = Program()
    x, y = program.variable(upper=10.0, cost=1.0), program.variable(lower=-5.0, upper=5.0, cost=2.0)
    program.constrain([(x, 1.0), (y, 1.0), (x, 1.0)], lower=4.0, upper=4.0)  # 2x + y = 4
    found = program.solve()
    assert found.values == pytest.approx((4.5, -5.0))
    assert found.objective == pytest.approx(-5.5)


def test_small_costs_are_told_apart():
    """In seconds an op may cost a microsecond; HiGHS by itself takes answers that are 1e-6 apart for equal."""
    program = Program()
    cheap, dear = program.variable(cost=1.0e-8, integer=True), program.variable(cost=1.1e-8, integer=True)
    program.constrain([(cheap, 1.0), (dear, 1.0)], lower=1.0)
    assert program.solve().values == (1.0, 0.0)


def test_infeasible_is_not_the_same_as_out_of_time():
    none = equalities().solve()
    assert (none.status, none.values, bool(none)) == (Status.INFEASIBLE, (), False)
    late = equalities().solve(time_limit_seconds=0.0)
    assert (late.status, late.values, bool(late)) == (Status.UNKNOWN, (), False)
    assert none.bound == math.inf and late.bound == -math.inf


def test_a_program_without_variables():
    program = Program()
    assert program.solve().status is Status.OPTIMAL
    program.constrain([], lower=1.0)
    assert program.solve().status is Status.INFEASIBLE


def test_an_unbounded_cost_is_refused():
    with pytest.raises(BadInput, match="unbounded"):
        Program().variable(upper=math.inf, cost=-1.0)


def test_equal_programs_have_equal_answers():
    assert knapsack(4).solve() == knapsack(4).solve()


def test_scipy_is_imported_only_to_solve():
    code = "import sys, tierwise.policies.checkmate; sys.exit('scipy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_variables_can_be_fixed_for_one_solution():
    program = Program()
    x, y = program.variable(cost=2.0), program.variable(upper=10.0, cost=1.0)
    program.constrain([(x, 5.0), (y, 1.0)], lower=7.0)
    assert program.solve().values == pytest.approx((1.0, 2.0))
    assert program.solve(fixed={x: 0.5}).objective == pytest.approx(2 * 0.5 + 4.5)
    assert not program.solve(fixed={x: 1.5})  # past its own bound
    assert program.solve().objective == pytest.approx(4.0)  # and free again
