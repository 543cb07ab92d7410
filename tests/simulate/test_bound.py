"""The bound on problems small enough to work out on paper."""

from __future__ import annotations

import dataclasses

import pytest
from problems import BACKWARD, FORWARD, UPDATE, GraphBuilder, chain, machine

from tierwise.ir import Role
from tierwise.simulate import lower_bound_seconds


def test_all_the_work_has_to_be_done():
    assert lower_bound_seconds(chain(4)) == 9


def test_processors_share_the_work_at_best():
    # Two updates of 4 s on the gpu or 4 s on the cpu, beside 2 s that only the gpu can do: 5 s each.
    b = GraphBuilder()
    for i in range(2):
        w, g = b.storage(f"w{i}", 1, Role.PARAM), b.storage(f"g{i}", 1, Role.GRAD)
        b.op(f"grad{i}", BACKWARD, [], [g], seconds=1)
        b.op(f"step{i}", UPDATE, [g], [], mutates=(w,), seconds=4, cpu_seconds=4)
    assert lower_bound_seconds(b.problem()) == pytest.approx(5)


def test_the_circle_from_a_weight_to_its_update():
    # The cpu can do the updates, but one weight's forward, backward and update follow each other: 1 + 1 (loss) + 1 + 7.
    problem = chain(1, weight_bytes=5, seconds=1.0, cpu_update_seconds=7)
    seconds = {key: (9.0 if key == (3, "gpu") else value) for key, value in problem.costs.op_seconds.items()}
    problem = dataclasses.replace(problem, costs=dataclasses.replace(problem.costs, op_seconds=seconds))
    assert lower_bound_seconds(problem) == 10


def test_what_does_not_fit_comes_back_over_the_link_or_is_computed_again():
    # When the loss runs, batch and a0..a9 (110 bytes) are needed then or later. 40 may stay; of the other 70 the cheap recomputations (0.1 s
    # for ten bytes) are weighed against a link of 1 byte a second: copy c bytes, recompute 70 - c: 21 + (70 - c) / 100 = c -> c = 21.7 / 1.01.
    problem = chain(10, on=machine(hbm=40, rate=1.0))
    assert lower_bound_seconds(chain(10)) == 21
    fast = {key: 0.1 if problem.graph.ops[key[0]].phase is FORWARD else 2.0 - 0.1 for key in problem.costs.op_seconds}
    fast[10, "gpu"] = 21 - 10 * 0.1 - 10 * 1.9
    problem = dataclasses.replace(problem, costs=dataclasses.replace(problem.costs, op_seconds=fast))
    assert sum(fast.values()) == pytest.approx(21)
    assert lower_bound_seconds(problem) == pytest.approx(21.7 / 1.01)


def test_a_parameter_can_only_come_over_the_link():
    # Nothing can be computed again to get 100 bytes of weights past a budget of 40: 60 bytes at 2 bytes a second.
    b = GraphBuilder()
    x = b.storage("x", 0, Role.INPUT)
    weights = [b.storage(f"w{i}", 50, Role.PARAM) for i in range(2)]
    b.op("forward", FORWARD, [x], [])
    loss = b.storage("loss", 0, Role.ACTIVATION)
    b.op("loss", BACKWARD, [x], [loss])
    for i, w in enumerate(weights):
        b.op(f"backward{i}", BACKWARD, [loss, w], [])
    toy = machine(hbm=40, rate=2.0)
    one_link = dataclasses.replace(toy, links=tuple(link for link in toy.links if "nvme" not in (link.src, link.dst)))
    assert lower_bound_seconds(b.problem(one_link)) == 30
