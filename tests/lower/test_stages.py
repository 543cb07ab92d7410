"""The bound call by call, on the chain of toy_blocks.py: forward takes 2 seconds a block, backward 1 and 1 more for the loss, an update 1."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from toy_blocks import CPU, IN_HOST, anything_anywhere, menu, menu_with_moments

from tierwise.ir import ON_DEVICE
from tierwise.lower import stages
from tierwise.lower.bound import least_seconds
from tierwise.lower.stages import Course, least_seconds_by_stages
from tierwise.lower.states import state_units
from tierwise.simulate import simulate


def on_the_cpu(hbm: int):
    question = menu_with_moments(4, hbm=hbm)
    return replace(question, homes=dict.fromkeys(question.homes, (ON_DEVICE, CPU, IN_HOST)))


def test_its_stages_and_windows():
    """Four calls there and four back, the loss behind the last of forward. Block 1 is complete as it goes back, the third that does, in stage 6, and
    is updated until it runs again: in the rest of backward and while block 0 runs."""
    course = Course.of(menu_with_moments(4))
    assert [stage.call for stage in course.stages] == [0, 1, 2, 3, 3, 2, 1, 0]
    assert [stage.outside_seconds for stage in course.stages] == [0, 0, 0, 1, 0, 0, 0, 0]
    assert course.turn == 4
    assert (course.windows[1].complete, course.windows[1].updates, course.windows[1].last) == (6, (6, 7, 0), 6)


def test_the_first_blocks_update_lies_under_nothing():
    """Its gradient comes last, and the next step begins with it: thirteen seconds, and its own, be that on the device or on the cpu. In a bound that
    knows no order the cpu does a share of all of them meanwhile."""
    assert least_seconds_by_stages(on_the_cpu(400), "backward") == pytest.approx(14)
    assert least_seconds(on_the_cpu(400), "backward") < 13.6


def test_a_parameter_is_there_until_the_next_call_has_gone_back():
    """As block 2 goes back there are its weight, that of block 1, which comes, and that of block 3, which autograd is not done with: five bytes more
    than there are at any moment by the other count."""
    assert least_seconds(on_the_cpu(85), "backward") < 16
    assert least_seconds_by_stages(on_the_cpu(89), "backward") == float("inf")
    assert least_seconds_by_stages(on_the_cpu(90), "backward") < 18


def test_parts_are_shares_of_their_region():
    """The weight of block 1 is that of a module within it, with a home of its own."""
    question = on_the_cpu(90)
    graph = question.problem.graph
    inner = tuple(replace(s, name="block1.inner.weight") if s.name == "block1.weight" else s for s in graph.storages)
    homes = {**question.homes, "block1.inner": question.homes["block1"]}
    in_parts = replace(question, problem=replace(question.problem, graph=replace(graph, storages=inner)), homes=homes)
    assert [unit.path for unit in state_units(in_parts.problem.graph, homes)] == ["block0", "block1.inner", "block2", "block3"]
    assert least_seconds_by_stages(in_parts, "backward") == least_seconds_by_stages(question, "backward") < 18


def test_it_is_the_other_bound_where_it_says_nothing_more(monkeypatch):
    """Updates after backward, no updates elsewhere, and what is too large for it."""
    assert least_seconds_by_stages(on_the_cpu(400), "after") == least_seconds(on_the_cpu(400), "after")
    assert least_seconds_by_stages(menu(4, 180), "backward") == least_seconds(menu(4, 180), "backward")
    monkeypatch.setattr(stages, "MOST", 0)
    assert least_seconds_by_stages(on_the_cpu(400), "backward") == least_seconds(on_the_cpu(400), "backward")


def test_no_placement_is_faster():
    """Whatever is placed wherever, in as much memory as that takes; and it is never below the other."""
    rng, closer = random.Random(1), 0
    for _ in range(30):
        made, within = anything_anywhere(rng, "backward")
        found, other = least_seconds_by_stages(within, "backward"), least_seconds(within, "backward")
        assert other * (1 - 1e-6) <= found <= simulate(made.problem, made.schedule).seconds * (1 + 1e-6)
        closer += found > 1.001 * other
    assert closer > 5
