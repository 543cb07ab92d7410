import numpy as np
import pytest
from problems import FORWARD, GraphBuilder, chain, machine

from tierwise.errors import BadInput, InfeasibleBudget
from tierwise.ir import Copy, Role, peak_bytes
from tierwise.policies import keep_all, plan
from tierwise.policies._swaps import SwapPlan
from tierwise.policies.deeptm import _Heat
from tierwise.simulate import simulate


def hill(hbm: int = 110, rate: float = 40.0):
    """Ten ops of a second; op 5 needs 60 bytes of workspace. `often` is used three times, `seldom` twice, and both are idle around it; so are two
    equal ones, `twin0` and `twin1`."""
    b = GraphBuilder()
    often, seldom = b.storage("often", 20, Role.ACTIVATION), b.storage("seldom", 40, Role.ACTIVATION)
    twins = [b.storage(f"twin{i}", 5, Role.ACTIVATION) for i in range(2)]
    reads = {1: [often], 8: [often, *twins], 9: [seldom]}
    for i in range(10):
        b.op(f"f{i}", FORWARD, reads.get(i, []), [often, seldom, *twins] if i == 0 else [], workspace_bytes=60 if i == 5 else 0)
    return b.problem(machine(hbm=hbm, rate=rate), cyclic=False)


def gone(problem, schedule) -> set[str]:
    return {problem.graph.storages[step.storage].name for step in schedule.steps if isinstance(step, Copy) and step.src == "hbm"}


def names(problem, group) -> list[str]:
    return [problem.graph.storages[gap.storage].name for gap in group]


def test_traits_by_hand():
    problem = hill()
    heat = _Heat(problem)
    assert [names(problem, group) for group in heat.groups] == [["often"], ["seldom"], ["twin0", "twin1"]]  # what lives and dies together is one
    uses, smallness, nearness, kind = heat.traits.T
    assert uses.tolist() == pytest.approx([1, 2 / 3, 2 / 3])
    assert smallness.tolist() == pytest.approx([0.5, 0, 0.75])  # 20, 40 and 10 bytes
    assert nearness.tolist() == pytest.approx([1 - 0.6, 1 - 0.8, 1 - 0.7])  # idle for 6, 8 and 7 of 10 s
    assert kind.tolist() == [0.25] * 3


def test_the_coldest_leave_first_and_only_as_many_as_must():
    problem = hill()  # 130 at op 5: 20 too many, and one more for the line
    heat = _Heat(problem)
    for weights, left in (((0, 1, 0, 0), {"seldom"}), ((0, 0, 1, 0), {"seldom"}), ((0, -1, 0, 0), {"twin0", "twin1", "often"})):
        assert gone(problem, heat.attempt(np.array(weights, dtype=float))[1]) == left


def test_a_gap_where_memory_is_not_short_stays():
    swaps = SwapPlan(hill(), 109)
    assert swaps.is_pressed(5, 6) and swaps.is_pressed(0, 10)
    assert not swaps.is_pressed(6, 10)


def test_learning_never_makes_it_worse_and_says_what_it_learned():
    problem = chain(8, weight_bytes=6, state_bytes=12, on=machine(rate=6.0))
    tight = problem.with_budget(int(0.6 * peak_bytes(problem, keep_all.plan(problem))["hbm"]))
    alike, learned = plan(tight, "deeptm", rounds=0), plan(tight, "deeptm")
    assert simulate(tight, learned).seconds <= simulate(tight, alike).seconds
    assert learned.notes[0].startswith("tried 13 weights; ")
    assert learned == plan(tight, "deeptm")


def test_what_hides_needs_no_learning():
    problem = hill()
    schedule = plan(problem, "deeptm")
    assert simulate(problem, schedule).seconds == 10
    assert schedule.notes[0].startswith("tried 1 weights")


def test_the_least_budget_and_options_that_make_no_sense():
    with pytest.raises(InfeasibleBudget) as caught:
        plan(chain(5, on=machine(hbm=29)), "deeptm")
    assert caught.value.least_bytes == 30
    with pytest.raises(BadInput):
        plan(chain(2), "deeptm", samples=1)
