"""Work beside compute in the order in which it would run."""

from __future__ import annotations

from dataclasses import replace

import pytest
from problems import chain

from tierwise.ir import Compute, Copy, Placement, When, check_schedule
from tierwise.lower.states import BESIDE, with_states
from tierwise.policies import keep_all
from tierwise.policies._in_time import Piece, over_by, run
from tierwise.simulate import simulate


def named(problem):
    """Parameters w0, w1, ... as those of modules block0, block1, ..."""
    storages = tuple(replace(s, name=f"block{s.name[1:]}.weight") if s.name.startswith("w") else s for s in problem.graph.storages)
    return replace(problem, graph=replace(problem.graph, storages=storages))


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
    problem = named(chain(4, weight_bytes=5, state_bytes=10, cpu_update_seconds=4))
    states = {"block3": Placement("host", "cpu", gradients="host"), "block2": Placement("host", "streamed", gradients="device")}
    found, schedule = with_states(problem, keep_all.plan(problem), states, When(update))
    check_schedule(found, schedule)
    assert found.machine.issuer("dram", "passing") == BESIDE, "what passes through the device is not issued behind the cpu's work"
    numbers = {s.name: s.id for s in problem.graph.storages}
    places = {(step.storage, step.dst): place for place, step in enumerate(schedule.steps) if isinstance(step, Copy)}
    if update == "backward":
        assert places[numbers["s2"], "passing"] < places[numbers["block3.weight"], "hbm"]
    computes = [step.op for step in schedule.steps if isinstance(step, Compute)]
    assert sorted(computes) == [op.id for op in problem.graph.ops]
    assert simulate(found, schedule).seconds < 9 + 2 + 4 / 0.7


def test_of_pieces_with_a_rank_the_least_that_is_ready_starts():
    """Three gradients at 1, 2 and 3 s, each for an update of 2 s on the cpu: the last is ranked first, and waits for nobody but who runs."""
    gradients = [Piece("device", (), ("gpu",), 1.0) for _ in range(3)]
    updates = [Piece("cpu", (), ("cpu",), 2.0, [gradient], rank) for gradient, rank in zip(gradients, (2, 1, 0), strict=True)]
    run([*gradients, *updates])
    assert [(update.start, update.end) for update in updates] == [(1, 3), (5, 7), (3, 5)]


def test_what_the_cpu_has_no_time_for_runs_under_the_next_forward():
    """Four layers of a second each way, updates on the cpu for 1.72 s, 2 s beside copies; gradients of the last layer are there at 6 1/8 s, then one
    every second. The cpu takes layer 3 until 8 1/8 s, when that of layer 1 has come, which is needed before layer 2; layer 0 until 12 1/8 s, when
    its parameter takes 1/7 s to the device and the next step begins. Layer 2 has time until then. In turn all would be done at 14 1/8 s."""
    problem = named(chain(4, weight_bytes=1, state_bytes=1, cpu_update_seconds=1.72))
    states = {f"block{n}": Placement("host", "cpu", gradients="host") for n in range(4)}
    found, schedule = with_states(problem, keep_all.plan(problem), states, When("backward"))
    check_schedule(found, schedule)
    updates = [(problem.graph.ops[step.op].name, step.iteration) for step in schedule.steps if isinstance(step, Compute) and step.on == "cpu"]
    assert updates == [("step0", -1), ("step2", -1), ("step3", 0), ("step1", 0)]
    assert simulate(found, schedule).seconds == pytest.approx(12 + 1 / 8 + 1 / 7)
