"""What is dropped first, and that remembering what it would take to make it again changes nothing."""

from __future__ import annotations

from graphs import training_steps
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from problems import chain

from tierwise.ir import peak_bytes
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


def test_when_time_is_over_there_is_no_answer():
    """Asked before each stage: of seven, two have run."""
    nodes, asked = nodes_of(chain(3)), []

    def is_over():
        asked.append(None)
        return len(asked) > 2

    assert evict_in_order(nodes, 1000, FIRST_ANSWERS[0](nodes), is_over) is None
    assert len(asked) == 3
