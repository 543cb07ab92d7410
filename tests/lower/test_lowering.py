"""Schedules of policies as choices of region calls, on the chain of toy_blocks.py."""

from __future__ import annotations

import pytest
from toy_blocks import JOINT, chain, machine

from tierwise import policies
from tierwise.errors import NotExecutable
from tierwise.ir import INPUTS, Compute, Costs, Phase, Problem, Schedule
from tierwise.lower import clustered, expand, lower


def problem(length, budget, rate=30.0):
    expanded = expand(chain(length), {0: JOINT})
    costs = Costs({(op.id, "gpu"): 0.0 if op.phase is Phase.UPDATE else 1.0 for op in expanded.graph.ops})
    return expanded, Problem(expanded.graph, machine(budget, bytes_per_second=rate), costs)


def test_forward_is_op_by_op_and_backward_is_one_op():
    expanded, _ = problem(2, 1000)
    assert [op.name for op in expanded.graph.ops if op.phase is not Phase.UPDATE] == [
        "block0.h", "block0.y", "block1.h", "block1.y", "loss", "block1.backward", "block0.backward",
    ]  # fmt: skip
    assert sorted(expanded.values.values()) == [(0, "h"), (1, "h")]  # y is the block's result, a storage of the step


def test_keeping_everything_saves_what_the_compiler_keeps():
    expanded, question = problem(2, 1000)
    lowered = lower(question, expanded, policies.plan(question, "keep_all"))
    assert lowered.saved == {0: frozenset({"h"}), 1: frozenset({"h"})}
    assert not any(plan.sent for plan in lowered.plans.values())


def test_what_chen_computes_again_is_not_saved():
    expanded, question = problem(4, 1000)
    lowered = lower(question, expanded, policies.plan(question, "chen"))
    assert frozenset() in lowered.saved.values()


def test_what_vdnn_copies_is_sent():
    expanded, question = problem(4, 150, rate=1000.0)
    lowered = lower(question, expanded, policies.plan(question, "vdnn"))
    assert lowered.plans[0].sent == ("h", INPUTS)
    assert lowered.plans[0].tier == "dram"
    assert lowered.plans[0].fetch >= 1 and lowered.plans[0].release >= 1


def test_an_op_elsewhere_is_refused_with_its_name():
    expanded, question = problem(2, 1000)
    schedule = policies.plan(question, "keep_all")
    elsewhere = tuple(Compute(step.op, "cpu") if isinstance(step, Compute) and step.op == 0 else step for step in schedule.steps)
    with pytest.raises(NotExecutable, match=r"block0\.h runs on cpu"):
        lower(question, expanded, Schedule(elsewhere, schedule.home))


def test_rare_sets_take_the_nearest_that_saves_no_more():
    a, b, c, d = frozenset("a"), frozenset("ab"), frozenset("abc"), frozenset()
    sizes = dict.fromkeys("abc", 10)
    sets = {0: c, 1: c, 2: b, 3: a, 4: a, 5: d}
    assert clustered(sets, sizes, most=3) == {0: c, 1: c, 2: a, 3: a, 4: a, 5: d}
