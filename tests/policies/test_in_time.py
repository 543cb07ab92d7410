"""Work beside compute in the order in which it would run."""

from __future__ import annotations

from dataclasses import replace

import pytest
from problems import chain

from tierwise.ir import Compute, Copy, Placement, check_schedule
from tierwise.lower.states import BESIDE, with_states
from tierwise.policies import keep_all
from tierwise.policies._in_time import Piece, over_by, run
from tierwise.simulate import simulate


def test_whatever_can_start_first_does():
    """An update of 4 s and its result on the link; state that comes over the same link for another is not behind it."""
    update = Piece("cpu", (), ("cpu",), 4.0)
    result = Piece("cpu, results", (), ("in",), 1.0, [update])
    state = Piece("stream, state", (), ("in",), 2.0)
    more = Piece("stream, state", (), ("in",), 2.5)
    assert run([update, result, state, more]) == [update, state, more, result]
    assert [(piece.start, piece.end) for piece in (update, state, more, result)] == [(0, 4), (0, 2), (2, 4.5), (4.5, 5.5)]
    assert [over_by([state, more], when) for when in (1.9, 2, 4.4, 9)] == [0, 1, 1, 2]


@pytest.mark.parametrize("update", ["backward", "after"])
def test_the_cpu_and_the_link_do_not_wait_for_each_other(update):
    """Four layers of a second each way, updates of the last on the cpu for 4 s, of the one before through the device: its state comes before the
    parameter that the cpu makes goes back."""
    problem = chain(4, weight_bytes=5, state_bytes=10, cpu_update_seconds=4)
    named = tuple(replace(s, name=f"block{s.name[1:]}.weight") if s.name.startswith("w") else s for s in problem.graph.storages)
    problem = replace(problem, graph=replace(problem.graph, storages=named))
    states = {"block3": Placement("host", "cpu", gradients="host"), "block2": Placement("host", "streamed", gradients="device")}
    found, schedule = with_states(problem, keep_all.plan(problem), states, update)
    check_schedule(found, schedule)
    assert found.machine.issuer("dram", "passing") == BESIDE, "what passes through the device is not issued behind the cpu's work"
    numbers = {s.name: s.id for s in problem.graph.storages}
    places = {(step.storage, step.dst): place for place, step in enumerate(schedule.steps) if isinstance(step, Copy)}
    if update == "backward":
        assert places[numbers["s2"], "passing"] < places[numbers["block3.weight"], "hbm"]
    computes = [step.op for step in schedule.steps if isinstance(step, Compute)]
    assert sorted(computes) == [op.id for op in problem.graph.ops]
    assert simulate(found, schedule).seconds < 9 + 2 + 4 / 0.7
