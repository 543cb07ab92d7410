import pytest
from problems import chain, machine

from tierwise.errors import InfeasibleBudget
from tierwise.policies._fit import largest_that_fits
from tierwise.policies._gaps import Swap, build

SWAPS = [Swap(storage, "dram", out_at=storage + 1, free_at=storage + 1, in_at=9 - storage) for storage in (0, 1, 2)]  # batch, a0, a1


def keep(problem, count: int):
    return build(problem, SWAPS[: 3 - count])


def test_the_largest_number_is_found_whatever_it_is():
    for hbm, kept in ((70, 3), (69, 2), (59, 1), (50, 1), (49, 0), (40, 0)):
        problem = chain(5, on=machine(hbm=hbm))  # 70 with all kept, at the loss; 50 at the loss with one kept
        assert largest_that_fits(problem, 0, 3, lambda count, problem=problem: keep(problem, count))[0] == kept


def test_less_room_than_the_budget_can_be_asked_for():
    problem = chain(5, on=machine(hbm=70))
    assert largest_that_fits(problem, 0, 3, lambda count: keep(problem, count), budget_bytes=60)[0] == 2


def test_what_the_least_needs_is_the_smallest_budget():
    problem = chain(5, on=machine(hbm=30))
    with pytest.raises(InfeasibleBudget, match="at least 40 B") as caught:
        largest_that_fits(problem, 0, 3, lambda count: keep(problem, count))
    assert caught.value.least_bytes == 40
