"""What is dropped first, and that remembering what it would take to make it again changes nothing."""

from __future__ import annotations

import random

import pytest
from graphs import training_steps
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from problems import BACKWARD, FORWARD, GraphBuilder, chain, machine

from tierwise.ir import Role, peak_bytes
from tierwise.policies import keep_all
from tierwise.policies._nodes import Nodes, _Eviction, evict_in_order
from tierwise.policies._stages import FIRST_ANSWERS


class Forgetful(_Eviction):
    def _victim(self, stage, waiting):
        self._candidates.clear()
        return super()._victim(stage, waiting)


def nodes_of(problem):
    return Nodes(problem, [range(op.id, op.id + 1) for op in problem.graph.ops])


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(problem=training_steps(max_layers=16), share=st.sampled_from((0.95, 0.9, 0.85, 0.8, 0.7)), rule=st.sampled_from(FIRST_ANSWERS))
def test_what_is_remembered_is_what_would_be_found_again(problem, share, rule):
    nodes = nodes_of(problem)
    room = int(share * (peak_bytes(problem, keep_all.plan(problem))["hbm"] - problem.graph.lasting_bytes))
    assert evict_in_order(nodes, room, rule(nodes)) == Forgetful(nodes, room, rule(nodes)).run(lambda: False)


def with_skips(seed):
    """Thirty ops of a forward that read what was made before, three parcels each, and their backward: what could go is read more than once."""
    draw, b = random.Random(seed), GraphBuilder()
    made = [b.storage("x", 5, Role.INPUT)]
    for op in range(30):
        reads = sorted({made[-1], *draw.choices(made, k=2)})
        made.append(b.storage(f"a{op}", draw.randint(1, 40), Role.ACTIVATION))
        b.op(f"fwd{op}", FORWARD, reads, [made[-1]], seconds=draw.choice((0.25, 1.0, 3.0)))
    grad = made[-1]
    for op in reversed(range(30)):
        after = b.storage(f"d{op}", 5, Role.ACTIVATION)
        b.op(f"bwd{op}", BACKWARD, sorted({grad, made[op], made[op + 1]}), [after], kind="backward")
        grad = after
    return b.problem(machine())


@pytest.mark.parametrize("rule", FIRST_ANSWERS)
@pytest.mark.parametrize("seed", range(4))
def test_what_is_read_again_and_again_is_looked_at_again(seed, rule):
    problem = with_skips(seed)
    nodes = nodes_of(problem)
    room = int(0.5 * peak_bytes(problem, keep_all.plan(problem))["hbm"])
    stages = evict_in_order(nodes, room, rule(nodes))
    assert stages is not None and any(len(stage) > 1 for stage in stages)
    assert stages == Forgetful(nodes, room, rule(nodes)).run(lambda: False)


def test_when_time_is_over_there_is_no_answer():
    """Asked before each stage: of seven, two have run."""
    nodes, asked = nodes_of(chain(3)), []

    def is_over():
        asked.append(None)
        return len(asked) > 2

    assert evict_in_order(nodes, 1000, FIRST_ANSWERS[0](nodes), is_over) is None
    assert len(asked) == 3
