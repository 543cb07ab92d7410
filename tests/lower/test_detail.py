"""The last choice, on four blocks of toy_blocks.py with room for everything: on the device a step takes 13 seconds of compute and four of updates."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest
from toy_blocks import CPU, EVERYWHERE, IN_HOST, THROUGH, menu_with_moments

from tierwise.lower import Chosen, image, keep_everything
from tierwise.lower.clock import Clock
from tierwise.lower.detail import Detail
from tierwise.simulate import simulate


def chosen(question, program) -> Chosen:
    made = image(question, program)
    return Chosen(made.program, simulate(made.problem, made.schedule).seconds, 0, 0)


@pytest.mark.parametrize(("cpu_seconds", "promised", "on_the_device"), [(1.2, 16.92, True), (1.0, 15.99, False)])
def test_a_plan_that_waits_for_the_host_has_to_promise_more(cpu_seconds, promised, on_the_device):
    """With all updates on the cpu the next step waits for them: on a host that has a twelfth less for them it takes a second longer, or more."""
    question = menu_with_moments(4, hbm=1000, cpu_seconds=cpu_seconds)
    stays = chosen(question, keep_everything(question))
    leaves = chosen(question, replace(stays.program, states=dict.fromkeys(question.homes, IN_HOST), update="backward"))
    assert stays.seconds == 17 and leaves.seconds == pytest.approx(promised, abs=0.01)
    found = Detail(question, lambda states: (0, 0), Clock(counts=True)).first(leaves, [stays], until=10)
    assert found is (stays if on_the_device else leaves)


def test_what_the_cpu_sends_anyway_comes_in_time_from_host_memory():
    """Three blocks, of which the cpu updates the first and the last, over a link of two bytes a second. The last block's weight, sent as soon as it
    is made, has the state of the second wait behind it; it is faster if that weight lives in host memory and comes for its forward."""
    question = menu_with_moments(3, cpu_seconds=0.5)
    machine = question.problem.machine.with_rates(lambda link, lane, rate: 2.0)
    question = replace(question, problem=replace(question.problem, machine=machine), homes=dict.fromkeys(question.homes, EVERYWHERE))
    states = {"block0": CPU, "block1": THROUGH, "block2": CPU}
    detail = Detail(question, lambda states: (0, 0), Clock(False))
    program = replace(keep_everything(question), states=states, update="backward", ahead=2)
    given = chosen(question, program)
    found = detail.where_they_come_anyway(given, until=inf)
    assert found.program.states == {**states, "block2": IN_HOST}
    assert detail.seconds(found.program) < 0.9 * detail.seconds(program)
    alone = replace(given, program=replace(program, states={"block1": THROUGH}))
    assert detail.where_they_come_anyway(alone, until=inf) is alone  # the cpu makes nothing
    full = Detail(question, lambda states: (0, 10**9), Clock(False))
    assert full.seconds(program) is None  # host memory has no room for it


def test_as_many_gradients_wait_as_is_fastest():
    """State passes through the device over twenty bytes a second: where only one gradient may wait, backward now and then does."""
    question = menu_with_moments(4, hbm=1000)
    machine = question.problem.machine.with_rates(lambda link, lane, rate: 20.0)
    question = replace(question, problem=replace(question.problem, machine=machine), homes=dict.fromkeys(question.homes, EVERYWHERE))
    program = replace(keep_everything(question), states=dict.fromkeys(question.homes, THROUGH), update="backward", in_flight=1)
    given = chosen(question, program)
    detail = Detail(question, lambda states: (0, 0), Clock(False))
    found = detail.in_time(given, until=inf)
    assert found.program == replace(program, in_flight=2)
    assert detail.seconds(found.program) < detail.seconds(program) - 0.1
    stays = replace(given, program=keep_everything(question))
    assert detail.in_time(stays, until=inf) is stays
    late = Detail(question, lambda states: (0, 0), Clock(counts=True))
    assert late.in_time(given, until=0.0).program == program  # when time is over it is looked at, and no other
    assert late.in_time(given, until=inf).program == found.program
