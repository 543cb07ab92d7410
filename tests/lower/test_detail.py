"""The last choice, on four blocks of toy_blocks.py with room for everything: on the device a step takes 13 seconds of compute and four of updates."""

from __future__ import annotations

from dataclasses import replace

import pytest
from toy_blocks import IN_HOST, menu_with_moments

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
