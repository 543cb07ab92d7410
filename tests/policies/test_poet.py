import pytest
from problems import chain, machine
from reading import copied, copied_before, recomputed
from transformer import transformer

from tierwise.errors import BadInput, InfeasibleBudget
from tierwise.ir import check_schedule, peak_bytes
from tierwise.policies import plan
from tierwise.policies._paged import paged_schedule
from tierwise.simulate import simulate


def outcome(problem, **options):
    schedule = plan(problem, "poet", **options)
    return simulate(problem, schedule).seconds, len(recomputed(problem, schedule)), len(copied(problem, schedule))


def test_what_hides_is_paged():
    # Ten bytes take a second, as an op does: three of six activations too many are all paged, and nothing waits.
    assert outcome(chain(6).with_budget(50)) == (13, 0, 3)


def test_what_does_not_hide_is_computed_again():
    assert outcome(chain(6, on=machine(rate=0.1)).with_budget(50)) == (16, 3, 0)


def test_a_mixture_is_better_than_either():
    # Four seconds a copy: the batch hides behind all of the step, and the other ten bytes are cheaper to compute again.
    problem = chain(6, on=machine(rate=2.5)).with_budget(60)
    assert outcome(problem) == (14, 1, 1)
    assert copied(problem, plan(problem, "poet")) == ["batch"]
    assert simulate(problem, plan(problem, "checkmate")).seconds == 15


def test_a_long_copy_takes_several_stages():
    problem = chain(6, on=machine(rate=2.5)).with_budget(70)
    schedule = plan(problem, "poet")
    assert copied_before(problem, schedule) == {"batch": "fwd1"}
    came_back = copied_before(problem, schedule, "dram")["batch"]
    assert came_back in ("bwd5", "bwd4")  # at least four ops before bwd0
    assert simulate(problem, schedule).seconds == 13


def test_the_program_over_gaps_is_as_good_here():
    for budget in (120, 100, 80):
        problem = chain(12, on=machine(rate=2.5)).with_budget(budget)
        schedule = plan(problem, "poet", solver="gaps")
        assert "gaps of 25 nodes" in schedule.notes[0]
        assert simulate(problem, schedule).seconds == {120: 25, 100: 27, 80: 29}[budget]


def test_layers_as_nodes():
    problem = transformer(layers=3, on=machine(rate=1.0)).with_budget(140)
    schedule = plan(problem, "poet", max_nodes=8, time_limit_seconds=5)
    assert peak_bytes(problem, schedule)["hbm"] <= 140
    all_again = simulate(problem, plan(problem, "oneflow")).seconds
    assert simulate(problem, schedule).seconds < all_again


def test_nothing_is_waited_for_that_nobody_reads():
    # fwd0 runs twice and a0 goes out twice: only what somebody reads is left.
    problem = chain(2)
    a0 = next(s.id for s in problem.graph.storages if s.name == "a0")
    events = [("run", 0), ("out", a0), ("run", 0), ("run", 1), ("in", a0), ("run", 2), ("run", 3), ("out", a0), ("run", 4)]
    schedule = paged_schedule(problem, events, "dram")
    check_schedule(problem, schedule)
    assert recomputed(problem, schedule) == ["fwd0"] and copied(problem, schedule) == ["a0"] and len(copied(problem, schedule, "dram")) == 1


def test_the_least_budget_works():
    for length in (6, 12):
        with pytest.raises(InfeasibleBudget) as caught:
            plan(chain(length).with_budget(20), "poet")
        plan(chain(length).with_budget(caught.value.least_bytes), "poet")


def test_unknown_solver():
    with pytest.raises(BadInput, match="solver 'gurobi'; give one of auto, exact, gaps"):
        plan(chain(2), "poet", solver="gurobi")


def test_a_host_that_is_too_small_is_not_used():
    # Within 40 bytes two activations would be paged, and the host has room for one: everything is dropped instead, and less cannot be done.
    problem = chain(4, on=machine(hbm=40, dram=10))
    assert peak_bytes(problem, plan(problem, "poet", solver="gaps"))["dram"] == 0
    with pytest.raises(InfeasibleBudget) as refusal:
        plan(problem.with_budget(35), "poet", solver="gaps")
    assert refusal.value.least_bytes == 40
