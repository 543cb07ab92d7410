"""auto, and the two ways in which it asks others about a step: reshaped, and with holes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from graphs import training_steps
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from problems import ODD_PROBLEMS, chain, machine

from tierwise import policies
from tierwise.errors import BadInput, InfeasibleBudget, InvalidSchedule, MissingTier, OverCapacity, RecomputeLimit
from tierwise.ir import Compute, Copy, Free, check_schedule, peak_bytes
from tierwise.policies import auto, checkmate, keep_all, plan, poet
from tierwise.policies._gaps import Gap, build
from tierwise.policies._reshaped import Reshaped, evenly, own_state, updates_first
from tierwise.policies._sent import Sent, WithSent, placed, sendable
from tierwise.simulate import simulate

HBM, DRAM = "hbm", "dram"


def names(problem, ops):
    return [problem.graph.ops[op].name for op in ops]


# -- reshaped ---------------------------------------------------------------------------------------------------------------------------


def test_an_update_runs_as_soon_as_its_gradient_is_there():
    problem = chain(2, weight_bytes=5, state_bytes=10)
    assert names(problem, updates_first(problem.graph)) == ["fwd0", "fwd1", "loss", "bwd1", "step1", "bwd0", "step0"]


def test_gradients_that_go_with_their_update_are_never_there_together():
    problem = chain(2, activation_bytes=0, weight_bytes=5, state_bytes=10)
    early = Reshaped(problem, updates_first(problem.graph))
    schedule = early.back(build(early.problem))
    check_schedule(problem, schedule)
    assert peak_bytes(problem, build(problem))[HBM] == 2 * 15 + 2 * 5
    assert peak_bytes(problem, schedule)[HBM] == 2 * 15 + 5


def test_state_that_is_streamed_weighs_nothing_but_while_its_update_runs():
    problem = chain(2, activation_bytes=0, weight_bytes=5, state_bytes=10)
    order = updates_first(problem.graph)
    first_update = order[4]
    assert [problem.graph.storages[s].name for s in own_state(problem.graph, first_update)] == ["s1"]
    shape = Reshaped(problem, order, streamed=(first_update,), window_bytes=10)
    assert [op.workspace_bytes for op in shape.problem.graph.ops] == [0, 0, 0, 10, 10, 0, 0]  # 10 bytes take a second, and bwd1 one
    schedule = shape.back(build(shape.problem))
    check_schedule(problem, schedule)
    steps = [step for step in schedule.steps if not isinstance(step, Free) or step.storage in own_state(problem.graph, first_update)]
    state = own_state(problem.graph, first_update)[0]
    at = steps.index(Compute(first_update))
    assert steps[at - 2 : at + 3] == [Copy(state, DRAM, HBM), Compute(order[3]), Compute(first_update), Copy(state, HBM, DRAM), Free(state, HBM)]
    assert schedule.home[state] == (DRAM,)
    assert simulate(problem, schedule).seconds == 7  # as if it were there


def test_updates_that_follow_each_other_are_one_op_and_come_back_as_they_were():
    problem = chain(3, weight_bytes=5, state_bytes=10)
    shape = Reshaped(problem, tuple(range(len(problem.graph.ops))))
    assert shape.problem.graph.ops[-1].name == "3 updates" and shape.problem.device_seconds[-1] == 3
    runs = [step for step in shape.back(build(shape.problem)).steps if isinstance(step, Compute)]
    assert runs == [step for step in build(problem).steps if isinstance(step, Compute)]


def test_streamed_updates_are_spread():
    problem = chain(4, weight_bytes=5, state_bytes=10)
    updates = [op for op in updates_first(problem.graph) if problem.graph.ops[op].name.startswith("step")]
    assert names(problem, evenly(problem.graph, updates, 20)) == ["step3", "step1"]
    assert evenly(problem.graph, updates, 0) == () and len(evenly(problem.graph, updates, 1000)) == 4


# -- holes ------------------------------------------------------------------------------------------------------------------------------


def test_a_hole_is_two_storages_and_becomes_two_copies():
    problem = chain(4).with_budget(70)
    a0 = next(s.id for s in problem.graph.storages if s.name == "a0")
    gap = Gap(a0, 10, 1, 7)  # after fwd1, until bwd1
    step = WithSent(problem, (Sent(gap, gone=3, back=6),))
    held = step.problem.graph.live_bytes
    assert [op.name for op in step.problem.graph.ops][3:5] == ["a0 is gone", "fwd3"] and "a0 comes back" in [op.name for op in step.problem.graph.ops]
    assert max(held) == max(problem.graph.live_bytes) - 10
    schedule = step.back(build(step.problem))
    check_schedule(problem, schedule)
    moved = [s for s in schedule.steps if getattr(s, "storage", -1) == a0]
    assert moved == [Copy(a0, HBM, DRAM), Free(a0, HBM), Copy(a0, DRAM, HBM), Free(a0, DRAM), Free(a0, HBM)]


def test_what_the_links_hide_is_sent_first():
    # Each copy takes as long as an op. Memory is shortest at bwd3, op 5: a0 is out by then and a2 is not, if both go.
    problem = chain(4).with_budget(50)
    order = sendable(problem, dear_first=False)
    assert [problem.graph.storages[gap.storage].name for gap in order] == ["batch", "a0", "a1", "a2"]
    sent = placed(problem, order, 2, DRAM)
    assert [(problem.graph.storages[s.gap.storage].name, s.gone, s.back) for s in sent] == [("batch", 2, 7), ("a0", 3, 6)]
    assert placed(problem, order, 0, DRAM) == () and len(placed(problem, order, 9, DRAM)) == 4


# -- the planner ------------------------------------------------------------------------------------------------------------------------


def test_nothing_is_done_where_nothing_is_needed():
    problem = chain(4)
    assert plan(problem, "auto") == build(problem)


def test_updates_go_to_an_idle_cpu_if_that_is_faster():
    # Keeping all takes 13 s: 4 forward, the loss, 4 backward, 4 updates. The cpu takes 2 s for each, under the device's work.
    problem = chain(4, weight_bytes=5, state_bytes=10, cpu_update_seconds=2)
    assert simulate(problem, build(problem)).seconds == 13
    schedule = plan(problem, "auto")
    assert simulate(problem, schedule).seconds <= 11
    assert any(isinstance(step, Compute) and step.on == "cpu" for step in schedule.steps)
    assert "above the bound" in schedule.notes[0]


def test_state_goes_before_activations_are_computed_again():
    # 30 bytes of state fewer and gradients gone at once: nothing need be computed again, and no copy is waited for.
    problem = chain(4, weight_bytes=5, state_bytes=10, cpu_update_seconds=1)
    kept = peak_bytes(problem, build(problem))[HBM]
    tight = problem.with_budget(int(0.7 * kept))
    schedule = plan(tight, "auto")
    again = [step.op for step in schedule.steps if isinstance(step, Compute)]
    assert len(again) == len(set(again))
    assert simulate(tight, schedule).seconds < min(simulate(tight, plan(tight, name)).seconds for name in ("patrickstar", "g10"))


@pytest.mark.parametrize(("length", "budget"), [(6, 50), (8, 50), (8, 60)])
def test_within_two_percent_of_the_integer_program_where_only_dropping_can_help(length, budget):
    problem = chain(length, on=replace(machine(), links=())).with_budget(budget)
    optimum = simulate(problem, checkmate.plan(problem, solver="exact")).seconds
    assert optimum > simulate(problem.with_budget(1000), build(problem)).seconds
    assert simulate(problem, plan(problem, "auto")).seconds <= 1.02 * optimum


@pytest.mark.parametrize("rate", [4.0, 10.0])
def test_within_two_percent_of_the_integer_program_with_links(rate):
    problem = chain(6, on=machine(rate=rate)).with_budget(50)
    optimum = simulate(problem, poet.plan(problem, solver="exact")).seconds
    assert simulate(problem, plan(problem, "auto")).seconds <= 1.02 * optimum


def test_a_number_of_tries_makes_two_searches_equal():
    problem = ODD_PROBLEMS["masters"]().with_budget(90)
    assert plan(problem, "auto", max_tries=6) == plan(problem, "auto", max_tries=6)
    with pytest.raises(BadInput, match="give more than 0 seconds"):
        plan(problem, "auto", plan_seconds=0)


def test_without_links_it_still_plans():
    problem = chain(6, on=replace(machine(), links=())).with_budget(60)
    assert not any(isinstance(step, Copy) for step in plan(problem, "auto").steps)


QUICK = ("capuchin", "chen", "dtr", "g10", "oc_dnn", "patrickstar", "rockmate", "superoffload", "tf_swap", "vdnn", "zero_infinity", "zero_offload")


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(problem=training_steps(), share=st.sampled_from((0.8, 0.6, 0.45)))
def test_never_without_a_plan_where_another_policy_has_one(problem, share):
    whole = peak_bytes(problem, keep_all.plan(problem))[HBM]
    problem = problem.with_budget(max(1, int(whole * share)))
    fits = []
    for name in QUICK:
        try:
            schedule = policies.load(name).plan(problem)
            check_schedule(problem, schedule)
        except (InfeasibleBudget, OverCapacity, InvalidSchedule, MissingTier, RecomputeLimit):
            continue
        fits.append(simulate(problem, schedule).seconds)
    if not fits:
        return
    assert simulate(problem, auto.plan(problem)).seconds <= 1.005 * min(fits)


def test_what_lasts_and_has_no_room_is_not_planned_around():
    """Three layers with 15 bytes each that last; the state of two of them elsewhere leaves 25, and 15 for one's state and gradient on the way."""
    problem = chain(3, activation_bytes=0, weight_bytes=5, state_bytes=10).with_budget(44)
    search = auto._Search(problem, "dram", "cpu", float("inf"), 10)
    here, elsewhere = auto.Knobs(early=True), auto.Knobs(early=True, streamed=0.6)
    assert [search._shape(knobs).reshaped.stays_bytes for knobs in (here, elsewhere)] == [45, 25]
    assert search.seconds(here) == float("inf")
    assert not search._simulated
    assert search.seconds(elsewhere) < float("inf")
    assert len(search._simulated) == 1


def test_a_plan_that_is_a_little_too_large_is_made_again_in_less(monkeypatch):
    problem = chain(6).with_budget(60)
    large, small = build(problem), auto._dropped(problem, auto.Knobs(), lambda: False)
    over, asked = peak_bytes(problem, large)[HBM] - 60, []

    def planned(self, knobs, is_over, less_bytes=0):
        asked.append(less_bytes)
        return small if less_bytes else large

    monkeypatch.setattr(auto._Shape, "plan", planned)
    monkeypatch.setattr(auto, "LITTLE", 2.0)
    assert auto._Search(problem, "dram", "cpu", float("inf"), 10).seconds(auto.Knobs()) == simulate(problem, small).seconds
    assert asked == [0, over + 24]  # a fifth of what is little
    monkeypatch.setattr(auto, "LITTLE", 0.01)
    assert auto._Search(problem, "dram", "cpu", float("inf"), 10).seconds(auto.Knobs()) == float("inf")


def test_where_what_lasts_has_no_room_anywhere_nobody_is_asked(monkeypatch):
    """Two layers with 15 bytes each that last: 19 of them on the device and 6 on disk leave 5 for host memory, which has 4."""
    problem = chain(2, weight_bytes=5, state_bytes=10, on=machine(hbm=100, dram=4, nvme=6)).with_budget(19)
    monkeypatch.setattr(auto, "_Search", lambda *_: pytest.fail("a plan was looked for"))
    with pytest.raises(InfeasibleBudget, match="auto needs 5 B of dram and there are 4 B; give it a machine with more, or a larger budget"):
        plan(problem, "auto")
