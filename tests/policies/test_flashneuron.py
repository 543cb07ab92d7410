import dataclasses

import pytest
from problems import BACKWARD, FORWARD, GraphBuilder, chain, machine

from tierwise.errors import BadInput, InfeasibleBudget, MissingTier
from tierwise.ir import Codec, Copy, Costs, Link, Machine, Processor, Role, Tier, check_schedule
from tierwise.ir.schedule import WORKSPACE
from tierwise.ir.text import schedule_lines
from tierwise.policies import plan
from tierwise.simulate import simulate


def cold_chain(hbm: int):
    """batch and a0 to a3 are what backward reads, 50 bytes; an op touches 30 at most; ten bytes take a second to the disk."""
    return chain(4, on=machine(hbm=hbm, disk_rate=10.0), cyclic=False)


def test_everything_stays_if_it_fits():
    problem = cold_chain(60)
    schedule = plan(problem, "flashneuron")
    assert not any(isinstance(step, Copy) for step in schedule.steps)
    assert simulate(problem, schedule).seconds == 9
    assert schedule.addresses[-1, 0] == 0  # the batch, at the low end with all that stays


def test_text_of_a_whole_plan():
    # keep = 50 - 30 = 20: batch, a0, a1 and a2 go, a3 stays. The last of them leaves during the loss, which therefore waits.
    problem = cold_chain(50)
    schedule = plan(problem, "flashneuron")
    assert list(schedule_lines(problem.graph, schedule)) == [
        "compute fwd0",
        "copy batch hbm -> nvme", "compute fwd1",
        "copy a0 hbm -> nvme", "free batch hbm", "compute fwd2",
        "copy a1 hbm -> nvme", "free a0 hbm", "compute fwd3",
        "copy a2 hbm -> nvme", "free a1 hbm", "free a2 hbm join", "compute loss", "free a3 hbm",
        "copy a2 nvme -> hbm", "free a2 nvme", "compute bwd3", "free a2 hbm", "free d3 hbm",
        "copy a1 nvme -> hbm", "free a1 nvme", "compute bwd2", "free a1 hbm", "free d2 hbm",
        "copy a0 nvme -> hbm", "free a0 nvme", "compute bwd1", "free a0 hbm", "free d1 hbm",
        "copy batch nvme -> hbm", "free batch nvme", "compute bwd0", "free batch hbm", "free d0 hbm",
    ]  # fmt: skip
    assert simulate(problem, schedule).seconds == 9 + 1 + 4  # the join, and four fetches the 30 bytes of the next op leave no room for


def test_what_goes_comes_from_the_high_end_and_what_stays_from_the_low_one():
    problem = cold_chain(50)
    schedule = plan(problem, "flashneuron")
    placed = {problem.graph.storages[storage].name: offset for (_, storage), offset in reversed(schedule.addresses.items())}
    assert [placed[name] for name in ("batch", "a0", "a1")] == [40, 30, 20]
    assert placed["a2"] == 40  # the batch has left by then
    assert [placed[name] for name in ("a3", "d3", "d2")] == [0, 10, 0]


def test_fetches_ahead_when_the_largest_hole_is_larger_than_the_largest_op():
    # keep = 80 - 30 = 50, so the batch alone goes. After bwd2 only a0 (0 to 10) and d1 (20 to 30) are left: the hole of 50 less 30 is more than 10.
    problem = cold_chain(80)
    schedule = plan(problem, "flashneuron", as_published=True)
    lines = list(schedule_lines(problem.graph, schedule))
    assert lines.index("copy batch nvme -> hbm") == lines.index("compute bwd1") - 2
    assert simulate(problem, schedule).seconds == 9


def test_a_slow_disk_makes_the_next_placement_wait():
    # A copy takes 5 s. fwd3 starts at 6, when the batch is out, and not at 3: in 40 bytes there is no hole for a3 before.
    problem = chain(4, on=machine(hbm=40, disk_rate=2.0), cyclic=False)
    schedule = plan(problem, "flashneuron")
    check_schedule(problem, schedule)
    starts = {step: span.start for span in simulate(problem, schedule).spans if span.lane == "gpu" for step in [schedule.steps[span.step].op]}
    assert [starts[op] for op in range(4)] == [0, 1, 2, 6]


def test_the_published_rule_refuses_what_all_offloaded_might_do():
    problem = cold_chain(30)
    with pytest.raises(InfeasibleBudget):
        plan(problem, "flashneuron", as_published=True)  # 30 less 30 leaves nothing for activations
    assert simulate(problem, plan(problem, "flashneuron")).seconds == 14
    with pytest.raises(InfeasibleBudget):
        plan(problem.with_budget(29), "flashneuron")


def test_workspace_and_what_nobody_reads_share_one_hole():
    b = GraphBuilder()
    x, a, unread, d = (
        b.storage(n, 10, r) for n, r in (("x", Role.INPUT), ("a", Role.ACTIVATION), ("unread", Role.ACTIVATION), ("d", Role.ACTIVATION))
    )
    b.op("f", FORWARD, [x], [a, unread], workspace_bytes=7)
    b.op("loss", BACKWARD, [a], [d], workspace_bytes=12)
    b.op("end", BACKWARD, [d, x], [])
    problem = b.problem(machine(hbm=47), cyclic=False)
    schedule = plan(problem, "flashneuron")  # a hole of 17, and x, a and d
    assert schedule.addresses[0, WORKSPACE] == 0
    assert schedule.addresses[0, unread] == 7
    loss = next(place for place, line in enumerate(schedule_lines(problem.graph, schedule)) if line == "compute loss")
    assert schedule.addresses[loss, WORKSPACE] == 0
    assert "copy x hbm -> nvme" in schedule_lines(problem.graph, plan(problem.with_budget(46), "flashneuron"))


def test_lasting_storages_are_at_the_same_address_in_every_step():
    problem = chain(4, weight_bytes=5, state_bytes=10, on=machine(hbm=110, disk_rate=10.0))
    schedule = plan(problem, "flashneuron")  # the judge plays two periods
    lasting = [s.id for s in problem.graph.storages if s.lasting]
    assert [schedule.addresses[-1, storage] for storage in lasting] == [0, 5, 10, 15, 20, 30, 40, 50]
    assert all(schedule.home[storage] == ("hbm",) for storage in lasting)


def test_what_forward_changes_while_it_is_being_sent_stays():
    # The only gap of `a` that begins in forward is before `again` changes it, and its copy takes 50 s: it is worth nothing then.
    b = GraphBuilder()
    a, t0, t1, big, d = (b.storage(n, z, Role.ACTIVATION) for n, z in (("a", 10), ("t0", 1), ("t1", 1), ("big", 30), ("d", 1)))
    b.op("make", FORWARD, [], [a])
    b.op("idle", FORWARD, [], [t0])
    b.op("again", FORWARD, [t0], [t1], mutates=(a,))
    b.op("loss", BACKWARD, [t1, a], [d])
    b.op("large", BACKWARD, [d, a], [big])
    problem = b.problem(machine(hbm=42, rate=0.2, disk_rate=0.2), cyclic=False)
    schedule = plan(problem, "flashneuron", as_published=True)
    assert list(schedule_lines(problem.graph, schedule)) == [
        "compute make", "copy a hbm -> nvme", "compute idle", "compute again", "free t0 hbm",
        "free a nvme", "compute loss", "free t1 hbm", "compute large", "free a hbm", "free big hbm", "free d hbm",
    ]  # fmt: skip


def test_without_a_disk_the_host_will_do_and_without_either_nothing():
    two_tiers = Machine(
        "two tiers",
        (Tier("hbm", 50), Tier("dram", 1000)),
        (Link("hbm", "dram", {"out": 10.0}), Link("dram", "hbm", {"in": 10.0})),
        (Processor("gpu", "hbm"),),
    )
    schedule = plan(chain(4, on=two_tiers, cyclic=False), "flashneuron")
    assert {step.dst for step in schedule.steps if isinstance(step, Copy)} == {"hbm", "dram"}
    alone = Machine("alone", (Tier("hbm", 50),), (), (Processor("gpu", "hbm"),))
    with pytest.raises(MissingTier, match="no link to 'nvme' or 'dram'"):
        plan(chain(4, on=alone, cyclic=False), "flashneuron")


def test_the_smallest_budget_is_found_above_the_peak_of_keeping_all():
    # The hole for d, which nobody reads, is kept free all the time: 30 bytes are the peak with everything kept, and 40 are needed here.
    b = GraphBuilder()
    t, u, v, d = (b.storage(n, 10, Role.ACTIVATION) for n in ("t", "u", "v", "d"))
    b.op("f", FORWARD, [], [t, u])
    b.op("g", FORWARD, [t, u], [v])
    b.op("loss", BACKWARD, [v], [d])
    with pytest.raises(InfeasibleBudget) as caught:
        plan(b.problem(machine(hbm=35), cyclic=False), "flashneuron")
    assert caught.value.least_bytes == 40


def test_the_order_of_placement_and_of_sending_can_be_said():
    # t and u are both due before op 2; by first use t goes first.
    b = GraphBuilder()
    t, u, v, d = (b.storage(n, 10, Role.ACTIVATION) for n in ("t", "u", "v", "d"))
    b.op("f", FORWARD, [], [t, u])
    b.op("g", FORWARD, [t, u], [v])
    b.op("h", FORWARD, [v], [])
    b.op("loss", BACKWARD, [t, u], [d])
    problem = b.problem(machine(hbm=40, disk_rate=10.0), cyclic=False)  # keep = 40 - 30, and both are 20

    def sent(**options):
        schedule = plan(problem, "flashneuron", as_published=True, **options)
        return [problem.graph.storages[s.storage].name for s in schedule.steps if isinstance(s, Copy) and s.dst == "nvme"]

    assert sent() == ["t", "u"]
    assert sent(issue_order=[u, t]) == ["u", "t"]
    backwards = [[u, t], [v, u, t], [v], [d, u, t]]
    assert sent(visit_order=backwards) == ["u", "t"]
    with pytest.raises(BadInput, match="for another graph"):
        sent(visit_order=backwards[1:])


def relus(**options):
    """Four relus of 40 bytes in a chain, half zeros: 22 bytes as a mask and values; the disk writes 2 bytes a second and the device codes 80."""
    problem = chain(4, activation_bytes=40, kinds=("relu",), on=machine(**options), cyclic=False)
    sizes = {s.id: 22 for s in problem.graph.storages if s.name.startswith("a")}
    rates = {"gpu": 80.0}
    return dataclasses.replace(problem, costs=Costs(problem.costs.op_seconds, (Codec("zvc", sizes, rates, rates),)))


def test_codecs_are_for_writes_that_forward_does_not_hide():
    problem = relus(hbm=200)
    lines = list(schedule_lines(problem.graph, plan(problem, "flashneuron", codecs="csr")))
    assert "encode a0 in hbm as zvc" in lines and "copy a0 hbm as zvc -> nvme as zvc" in lines and "decode a0 in hbm as zvc" in lines
    assert lines.index("free a0 hbm") < lines.index("copy a0 hbm as zvc -> nvme as zvc")  # its bytes are there for others while the code is written
    plain = plan(problem, "flashneuron")
    assert simulate(problem, plan(problem, "flashneuron", codecs="csr")).seconds < simulate(problem, plain).seconds
    fast = relus(hbm=200, rate=1000.0, disk_rate=1000.0)
    assert plan(fast, "flashneuron", codecs="csr") == plan(fast, "flashneuron")


def test_what_compresses_worst_is_replaced_until_the_writes_are_hidden():
    def sent(disk_rate: float, codecs: str) -> list[str]:
        """batch has 40 bytes and no form; a0 39, a1 30 and a2 10 of 40. Two must go, and forward takes 4 s."""
        problem = relus(hbm=250, rate=1000.0, disk_rate=disk_rate)
        forms = dataclasses.replace(problem.costs.codecs[0], encoded_bytes={1: 39, 2: 30, 3: 10})
        problem = dataclasses.replace(problem, costs=dataclasses.replace(problem.costs, codecs=(forms,)))
        steps = plan(problem, "flashneuron", codecs=codecs, as_published=True).steps
        return [f"{problem.graph.storages[s.storage].name} {s.src_form}".strip() for s in steps if isinstance(s, Copy) and s.dst == "nvme"]

    assert sent(14.0, "none") == ["batch", "a0"]
    assert sent(20.0, "csr") == ["batch", "a0"]  # 80 bytes are written in 4 s as they are
    assert sent(14.0, "csr") == ["a0 zvc", "a2 zvc"]  # 79 are more than 56, 49 are not
    assert sent(10.0, "csr") == ["a1 zvc", "a2 zvc"]  # 49 are more than 40


def test_unknown_codecs():
    with pytest.raises(BadInput, match="codecs is 'zip'; flashneuron knows none, csr, fp16"):
        plan(chain(3), "flashneuron", codecs="zip")
