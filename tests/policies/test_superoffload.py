import pytest
from problems import chain, machine

from tierwise.errors import BadInput
from tierwise.ir import Compute
from tierwise.policies import plan
from tierwise.simulate import simulate


def updated_on(problem, schedule):
    return {problem.graph.ops[s.op].name: s.on for s in schedule.steps if isinstance(s, Compute) and s.op >= 9}


def test_the_last_gradients_of_backward_are_updated_on_the_device():
    # Copies of 5 bytes take 0.5 s, updates 0.5 s on the cpu. g1 is there when bwd1 is over, 1 s before the end: out, update and back take 1.5 s. One
    # update on the device takes 1 s and gives it that time.
    problem = chain(4, weight_bytes=5, state_bytes=10, cpu_update_seconds=0.5)
    schedule = plan(problem, "superoffload")
    assert updated_on(problem, schedule) == {"step0": "gpu", "step1": "cpu", "step2": "cpu", "step3": "cpu"}
    assert simulate(problem, schedule).seconds == 9 + 1  # forward, loss and backward, and one update on the device; zero_offload waits 1.5


def test_a_slow_cpu_gets_less():
    problem = chain(4, weight_bytes=5, state_bytes=10, cpu_update_seconds=3)
    assert updated_on(problem, plan(problem, "superoffload")) == {"step0": "gpu", "step1": "gpu", "step2": "gpu", "step3": "cpu"}


def test_where_there_is_no_room_for_their_state_more_goes_to_the_cpu():
    big = machine(hbm=100_000, rate=1000.0)
    problem = chain(4, weight_bytes=100, state_bytes=200, cpu_update_seconds=3, on=big)
    wanted = plan(problem, "superoffload")
    assert list(updated_on(problem, wanted).values()).count("gpu") == 3
    tight = problem.with_budget(simulate(problem, wanted).peak_bytes["hbm"] - 1)
    assert list(updated_on(tight, plan(tight, "superoffload")).values()).count("gpu") == 2


def test_how_many_can_be_said():
    problem = chain(4, weight_bytes=5, cpu_update_seconds=0.5)
    assert set(updated_on(problem, plan(problem, "superoffload", on_device=4)).values()) == {"gpu"}
    assert set(updated_on(problem, plan(problem, "superoffload", on_device=0)).values()) == {"cpu"}
    with pytest.raises(BadInput, match="on_device is -1"):
        plan(problem, "superoffload", on_device=-1)
