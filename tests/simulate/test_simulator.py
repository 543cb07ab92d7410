"""The clock on schedules small enough to draw on paper."""

from __future__ import annotations

import dataclasses

import pytest
from problems import BACKWARD, FORWARD, GraphBuilder, chain, machine

from tierwise.errors import InvalidSchedule
from tierwise.ir import Compute, Copy, Free, Link, Phase, Role, Schedule, check_schedule
from tierwise.policies import keep_all, vdnn, zero_offload
from tierwise.policies._lasting import away as moved
from tierwise.simulate import Clock, simulate


def play(problem, steps, home):
    schedule = Schedule(tuple(steps), home)
    check_schedule(problem, schedule)
    return simulate(problem, schedule)


def starts(timeline) -> dict[int, tuple[float, float]]:
    return {span.step: (span.start, span.end) for span in timeline.spans}


def test_ops_follow_each_other():
    timeline = simulate(chain(2), keep_all.plan(chain(2)))
    assert timeline.seconds == 5
    assert [(s.lane, s.start, s.end) for s in timeline.spans] == [("gpu", i, i + 1) for i in range(5)]
    assert timeline.peak_bytes == {"hbm": 40, "dram": 0, "nvme": 0}
    assert not timeline.measured


def test_memory_by_role_over_time():
    curve = simulate(chain(2), keep_all.plan(chain(2))).memory["hbm"]
    # a0 at 0, a1 at 1, d1 at 2, a1 gone and d0 made at 3, a0 and d1 gone at 4, d0 gone at 5
    assert curve["activation"].seconds == (0, 1, 2, 4, 5)
    assert curve["activation"].nbytes == (10, 20, 30, 10, 0)
    assert curve["input"].nbytes == (10, 0)


# One activation of 20 bytes goes out and comes back over a link of 10 bytes a second: two seconds each way.
def away(free_at: int = 1, back_at: int = 4, *, hbm: int = 1000, join: bool = False, ops: int = 6):
    b = GraphBuilder()
    x, y = b.storage("x", 20, Role.ACTIVATION), b.storage("y", 1, Role.ACTIVATION)
    b.op("make", FORWARD, [], [x])
    for i in range(ops - 2):
        b.op(f"other{i}", FORWARD, [], [b.storage(f"o{i}", 20, Role.ACTIVATION)])
    b.op("use", BACKWARD, [x], [y])
    steps = []
    for op in range(ops):
        if op == 1:
            steps.append(Copy(x, "hbm", "dram"))
        if op == free_at:
            steps.append(Free(x, "hbm", join))
        if op == back_at:
            steps += [Copy(x, "dram", "hbm"), Free(x, "dram")]
        steps.append(Compute(op))
        if 0 < op < ops - 1:
            steps.append(Free(op + 1, "hbm"))
    return b.problem(machine(hbm=hbm)), [*steps, Free(x, "hbm"), Free(y, "hbm")]


def test_a_copy_hides_under_compute():
    problem, steps = away()
    timeline = play(problem, steps, {})
    spans = starts(timeline)
    assert spans[steps.index(Copy(0, "hbm", "dram"))] == (1, 3)
    assert spans[steps.index(Copy(0, "dram", "hbm"))] == (4, 6)
    assert spans[steps.index(Compute(5))] == (6, 7)  # other3 ends at 5; x is back at 6
    assert timeline.seconds == 7


def test_bytes_are_held_until_the_copy_out_ends():
    problem, steps = away()
    curve = play(problem, steps, {}).memory["hbm"]["activation"]
    # x at 0; with other0 and other1 until its copy ends at 3; alone other2; other3 with x coming back from 4
    assert dict(zip(curve.seconds, curve.nbytes, strict=True)) == {0: 20, 1: 40, 3: 20, 4: 40, 5: 20, 6: 21, 7: 0}


def test_an_allocation_waits_for_the_free_it_needs():
    # With 20 bytes of room, other0 has to wait until x has left.
    problem, steps = away(hbm=40)
    assert starts(play(problem, steps, {}))[steps.index(Compute(1))] == (1, 2)  # 40 hold both
    problem, steps = away(hbm=39, back_at=5)
    spans = starts(play(problem, steps, {}))
    assert spans[steps.index(Compute(1))] == (3, 4)


def test_a_join_makes_the_device_wait_although_there_is_room():
    problem, steps = away(join=True)
    assert starts(play(problem, steps, {}))[steps.index(Compute(1))] == (3, 4)


def test_a_free_of_later_bytes_does_not_make_it_wait():
    problem, steps = away(free_at=3)
    assert starts(play(problem, steps, {}))[steps.index(Compute(3))] == (3, 4)


def test_what_is_left_of_bytes_that_return_is_not_there_any_sooner():
    # a's 20 bytes return at 3, when its copy ends. y takes 4 of them; f1 cannot have any of the others before 3 either.
    b = GraphBuilder()
    a, y, c = b.storage("a", 20, Role.ACTIVATION), b.storage("y", 4, Role.INPUT), b.storage("c", 10, Role.ACTIVATION)
    b.op("f0", FORWARD, [], [a])
    b.op("f1", FORWARD, [], [c])
    problem = b.problem(machine(hbm=20), cyclic=False)
    steps = (Compute(0), Copy(a, "hbm", "dram"), Free(a, "hbm"), Copy(y, "dram", "hbm"), Compute(1))
    timeline = play(problem, steps, {y: ("dram",)})
    assert starts(timeline) == {0: (0, 1), 1: (1, 3), 3: (3, 3.4), 4: (3, 4)}
    assert timeline.peak_bytes["hbm"] == 20


def test_an_incoming_storage_is_held_from_its_copy_start():
    problem, steps = away(back_at=5)
    timeline = play(problem, steps, {})
    assert starts(timeline)[steps.index(Copy(0, "dram", "hbm"))] == (5, 7)
    assert timeline.seconds == 8


def test_latency_is_paid_once_a_copy():
    problem, steps = away()
    slow = tuple(dataclasses.replace(link, latency_seconds=0.5) for link in problem.machine.links)
    problem = dataclasses.replace(problem, machine=dataclasses.replace(problem.machine, links=slow))
    assert starts(play(problem, steps, {}))[steps.index(Copy(0, "hbm", "dram"))] == (1, 3.5)


def test_a_fault_costs_more_the_more_rounds_it_takes():
    # 10 bytes at 10 a second, and 0.5 s for each 4 bytes or part of them: 1 + 3 * 0.5. The op that faulted waits for all of it.
    problem = chain(2, on=machine())
    faulting = tuple(dataclasses.replace(link, fault_seconds=0.5, fault_bytes=4) for link in problem.machine.links)
    problem = dataclasses.replace(problem, machine=dataclasses.replace(problem.machine, links=faulting), cyclic=False)
    for fault, seconds in ((False, 1.0), (True, 2.5)):
        timeline = play(problem, [Copy(0, "dram", "hbm", fault=fault), *map(Compute, range(5))], {0: ("dram",)})
        assert starts(timeline)[1] == (seconds, seconds + 1)
    assert problem.machine.link("dram", "hbm").faults_seconds(0) == 0
    assert dataclasses.replace(problem.machine.links[0], fault_bytes=0).faults_seconds(1000) == 0.5


def test_lanes_are_taken_in_turn_and_shared_only_for_their_part():
    # 20 bytes to disk take 10 s on the disk and 2 s on the link out; a second copy over the same link to dram can follow after those 2 s.
    b = GraphBuilder()
    x, y = b.storage("x", 20, Role.ACTIVATION), b.storage("y", 20, Role.ACTIVATION)
    b.op("make", FORWARD, [], [x, y])
    problem = b.problem()
    steps = [Compute(0), Copy(x, "hbm", "nvme"), Copy(y, "hbm", "dram"), Free(x, "hbm"), Free(y, "hbm"), Free(x, "nvme"), Free(y, "dram")]
    timeline = play(dataclasses.replace(problem, cyclic=False), steps, {})
    assert [(s.lane, s.start, s.end) for s in timeline.spans[1:]] == [("out", 1, 3), ("disk write", 1, 11), ("out", 3, 5)]
    assert timeline.seconds == 11


def test_directions_are_independent():
    problem = chain(8)
    timeline = simulate(problem, vdnn.plan(problem, mode="all"))
    busy = timeline.busy_seconds()
    assert busy["out"] == busy["in"] == 7  # batch and a0 to a5, one second each
    assert timeline.seconds == 17


def test_overwriting_waits_for_a_copy_that_still_reads():
    problem = chain(1, weight_bytes=50, on=machine())
    legal = keep_all.plan(problem)
    update = legal.steps.index(Compute(3))
    steps = [*legal.steps[:update], Copy(1, "hbm", "dram"), *legal.steps[update:], Free(1, "dram")]
    timeline = simulate(problem, Schedule(tuple(steps), legal.home))
    assert starts(timeline)[update + 1] == (8, 9)  # three ops, then five seconds of copy


def test_an_update_runs_under_the_backward_before_and_the_next_forward():
    """Worked on paper: gradients leave 0.5 s after their op, the cpu takes 2 s for each, the weight comes back in 0.5 s; w0 is the last."""
    problem = chain(4, weight_bytes=5, state_bytes=10, cpu_update_seconds=2)
    timeline = simulate(problem, zero_offload.plan(problem, update="backward"))
    assert next((s.start, s.end) for s in timeline.spans if s.lane == "gpu") == (6, 7)
    cpu = [(s.start, s.end) for s in timeline.spans if s.lane == "cpu"]
    assert cpu == [(12.5, 14.5), (14.5, 16.5), (16.5, 18.5), (18.5, 20.5)]  # past the end of the period: under the next one
    assert timeline.seconds == 15


def test_an_update_after_backward_begins_when_backward_is_over():
    """The last layer's gradient is on the host three seconds before backward ends; its update begins with the next period all the same."""
    problem = chain(4, weight_bytes=5, state_bytes=10, cpu_update_seconds=2)
    (last,) = (op.id for op in problem.graph.ops if op.phase is Phase.UPDATE and problem.graph.storages[op.mutates[0]].name.startswith("w3"))
    schedule = moved(problem, keep_all.plan(problem), [last], update="after")
    check_schedule(problem, schedule)
    timeline = simulate(problem, schedule)
    assert [(s.start, s.end) for s in timeline.spans if s.lane == "cpu"] == [(0, 2)]
    assert timeline.seconds == 12  # nine ops and three updates on the device: the fourth lies under the forward


def test_periods_overlap_and_settle():
    """A cpu update of 20 s a step under 3 s of gpu work: the cpu rules the period."""
    problem = chain(1, weight_bytes=5, cpu_update_seconds=20)
    schedule = zero_offload.plan(problem)
    check_schedule(problem, schedule)
    assert simulate(problem, schedule).seconds == pytest.approx(3 + 20 + 0.5 + 0.5)  # gradient out, update, weight in: w0 is needed at once
    assert [simulate(problem, schedule, most).seconds for most in (1, 2)] == [3, 24]  # nobody waits in the first


def test_a_copy_at_the_end_of_the_step_overlaps_the_next():
    b = GraphBuilder()
    x, log = b.storage("x", 1, Role.INPUT), b.storage("log", 30, Role.ACTIVATION)
    b.op("work", FORWARD, [x], [], seconds=5)
    b.op("note", FORWARD, [], [log], seconds=0)
    steps = [Free(log, "dram", iteration=-1), Compute(0), Free(x, "hbm"), Compute(1), Copy(log, "hbm", "dram"), Free(log, "hbm")]
    timeline = play(b.problem(), steps, {x: ("hbm",)})
    assert timeline.seconds == 5  # the 3 s copy lies under the next step's work


def test_clock_step_by_step_is_the_same_clock():
    problem, steps = away()
    schedule = Schedule(tuple(steps), {})
    clock = Clock(problem, schedule)
    clock.begin_period()
    ends = [clock.advance(step) for step in steps]
    whole = simulate(problem, schedule)
    assert clock.timeline() == whole
    assert clock.now() == whole.seconds == ends[steps.index(Compute(5))]
    assert not clock.held(0, "hbm")


def test_what_the_judge_would_refuse_is_refused():
    problem, _ = away()
    with pytest.raises(InvalidSchedule, match="step 0"):
        simulate(problem, Schedule((Compute(5),), {}))
    tiny, steps = away(hbm=19)
    with pytest.raises(InvalidSchedule, match="hbm overflows by 1 bytes"):
        simulate(tiny, Schedule(tuple(steps), {}))


def test_addresses_make_an_allocation_wait_for_its_very_range():
    problem, steps = away(hbm=1000)
    place = {steps.index(Compute(op)): op for op in range(6)}
    addresses = {(step, op + 1 if op else 0): 100 * op for step, op in place.items() if op < 5}
    addresses[steps.index(Compute(1)), 2] = 10  # other0 on top of x, which leaves at 3
    addresses[steps.index(Copy(0, "dram", "hbm")), 0] = 0
    addresses[steps.index(Compute(5)), 1] = 900
    schedule = Schedule(tuple(steps), {}, addresses)
    check_schedule(problem, schedule)
    assert starts(simulate(problem, schedule))[steps.index(Compute(1))] == (3, 4)


def test_link_rate_is_its_slowest_lane():
    assert Link("a", "b", {"x": 10.0, "y": 2.0}).bytes_per_second == 2.0
