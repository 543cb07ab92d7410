import dataclasses

import pytest
from problems import BACKWARD, FORWARD, GraphBuilder, chain, machine

from tierwise.errors import InfeasibleBudget
from tierwise.ir import Compute, Copy, Role, peak_bytes
from tierwise.policies import plan
from tierwise.simulate import simulate


def sent(problem, schedule) -> list[str]:
    return [problem.graph.storages[s.storage].name for s in schedule.steps if isinstance(s, Copy) and s.src == "hbm"]


def recomputed(problem, schedule) -> list[str]:
    ops = [s.op for s in schedule.steps if isinstance(s, Compute)]
    return [problem.graph.ops[op].name for place, op in enumerate(ops) if op in ops[:place]]


def test_nothing_is_done_when_everything_fits():
    problem = chain(6).with_budget(80)
    schedule = plan(problem, "capuchin")
    assert not sent(problem, schedule)
    assert not recomputed(problem, schedule)


def test_the_longest_idle_goes_first_and_no_more_than_needed():
    # Everything takes 80; ten too many at the loss and at bwd5. The batch lies idle longest: it goes under fwd1 and is back for bwd0.
    problem = chain(6).with_budget(70)
    schedule = plan(problem, "capuchin")
    assert sent(problem, schedule) == ["batch"]
    assert simulate(problem, schedule).seconds == 13


def test_a_swap_that_hides_beats_a_recomputation():
    problem = chain(8).with_budget(60)
    schedule = plan(problem, "capuchin")
    assert not recomputed(problem, schedule)
    assert simulate(problem, schedule).seconds == 17


def test_what_the_link_cannot_hide_is_computed_again():
    # A hundred seconds for ten bytes each way, and one second to compute them again.
    problem = chain(6, on=machine(rate=0.1)).with_budget(60)
    schedule = plan(problem, "capuchin")
    assert not sent(problem, schedule)
    assert len(recomputed(problem, schedule)) >= 2
    assert simulate(problem, schedule).seconds == 13 + len(recomputed(problem, schedule))


def test_both_ways_mix():
    # Ten bytes take four seconds: the link hides two of the oldest, and one activation is computed again. Recomputing all three would take 28.
    problem = chain(12, on=machine(rate=2.5)).with_budget(110)
    schedule = plan(problem, "capuchin")
    assert len(sent(problem, schedule)) == 2
    assert len(recomputed(problem, schedule)) == 1
    assert simulate(problem, schedule).seconds == 26


def test_cheaper_ops_are_computed_again_first():
    # relu costs a tenth of a conv: with a hopeless link, what relus made is dropped, not what convs made.
    problem = chain(8, kinds=("conv2d", "relu"), on=machine(rate=0.01)).with_budget(70)
    seconds = {(op.id, "gpu"): 0.1 if op.kind == "relu" else 1.0 for op in problem.graph.ops}
    problem = dataclasses.replace(problem, costs=dataclasses.replace(problem.costs, op_seconds=seconds))
    again = recomputed(problem, plan(problem, "capuchin"))
    kinds = {op.name: op.kind for op in problem.graph.ops}
    assert again
    assert {kinds[name] for name in again} == {"relu"}


def test_what_comes_back_on_the_way_stays_while_there_is_room():
    # No link to speak of, and 70 of 130 bytes: more than every second activation goes, so some come back two at a time. None is made twice.
    problem = chain(11, on=machine(rate=0.01)).with_budget(70)
    again = recomputed(problem, plan(problem, "capuchin"))
    assert len(again) == len(set(again))
    assert len(again) >= 6


def test_a_recomputation_without_room_on_its_way_is_given_up():
    # big is cheap to make again, but from mid, which nobody else reads: with x and d that would take 101. So big is swapped, and kept,
    # which must go too while back runs, is made again when d is gone.
    b = GraphBuilder()
    x = b.storage("x", 1, Role.INPUT)
    mid, big, kept, d, y = (b.storage(n, z, Role.ACTIVATION) for n, z in (("mid", 40), ("big", 20), ("kept", 20), ("d", 40), ("y", 1)))
    b.op("fm", FORWARD, [x], [mid])
    b.op("fb", FORWARD, [mid], [big])
    b.op("fk", FORWARD, [big], [kept])
    b.op("peak", FORWARD, [x, kept], [d])
    b.op("back", BACKWARD, [d, big, x], [y])
    b.op("end", BACKWARD, [kept, x, y], [])
    problem = b.problem(machine(rate=2.0))
    assert peak_bytes(problem, plan(problem, "keep_all"))["hbm"] == 82
    schedule = plan(problem.with_budget(80), "capuchin")
    assert sent(problem, schedule) == ["big"]
    assert recomputed(problem, schedule) == ["fm", "fb", "fk"]


def test_a_full_host_leaves_recomputation():
    # Three activations must go; the host holds one at a time.
    problem = chain(8, on=machine(dram=10)).with_budget(70)
    schedule = plan(problem, "capuchin")
    assert peak_bytes(problem, schedule)["dram"] == 10
    assert recomputed(problem, schedule)


def test_weight_gradients_wait_for_the_update_on_the_host():
    # Two weights of 40 bytes: while bwd0 runs, g1 is idle and 40 bytes are too many.
    problem = chain(2, activation_bytes=2, weight_bytes=40, on=machine(rate=40.0)).with_budget(128)
    assert "g1" in sent(problem, plan(problem, "capuchin"))


def late_fetch():
    """Backward reads a (10 bytes, a second) and two ops later c (30 bytes, three seconds); in between there is no room for either."""
    b = GraphBuilder()
    x = b.storage("x", 1, Role.INPUT)
    a, c, big = (b.storage(n, z, Role.ACTIVATION) for n, z in (("a", 10), ("c", 30), ("big", 60)))
    b.op("fa", FORWARD, [x], [a])
    b.op("fc", FORWARD, [x], [c])
    for i in range(4):
        b.op(f"before{i}", FORWARD, [x], [])
    b.op("peak", FORWARD, [x], [big])
    b.op("shrink", FORWARD, [big], [])
    for i in range(4):
        b.op(f"after{i}", FORWARD, [x], [])
    b.op("reads_a", BACKWARD, [a], [])
    b.op("between", BACKWARD, [x], [])
    b.op("reads_c", BACKWARD, [c], [])
    return b.problem().with_budget(61)


def test_feedback_triggers_a_late_fetch_earlier():
    # a takes the second before reads_a, so c must start a second before that, and then holds the lane until a second after reads_a is due:
    # a is two seconds late. Triggered one op earlier it goes ahead of c, and both are in time.
    problem = late_fetch()
    assert simulate(problem, plan(problem, "capuchin", feedback_rounds=0)).seconds == 17
    assert simulate(problem, plan(problem, "capuchin")).seconds == 15


def test_where_nothing_hides_the_device_waits():
    # Four slots and everything idle away: the least there is, whatever it costs.
    problem = chain(6)
    with pytest.raises(InfeasibleBudget) as refused:
        plan(problem.with_budget(20), "capuchin")
    assert refused.value.least_bytes == 30  # bwd_i with its two inputs and its output
    schedule = plan(problem.with_budget(30), "capuchin")
    assert simulate(problem.with_budget(30), schedule).seconds > 13
