"""How times of parts become seconds of ops, counted by hand. No torch."""

from __future__ import annotations

import pytest
from problems import BACKWARD, FORWARD, UPDATE, GraphBuilder

from tierwise.ir import Graph, Machine, Phase, Processor, Region, RegionCall, Role, Tier
from tierwise.profile.step import BlockTimes, StepTimes, measured_costs, parts_of
from tierwise.profile.taken import Taken, added_seconds

MACHINE = Machine(
    "toy",
    (Tier("hbm", 1000), Tier("dram", 1000)),
    (),
    (Processor("gpu", "hbm", {}, bytes_per_second=10.0), Processor("cpu", "dram", {}, bytes_per_second=1.0)),
)


def test_a_device_that_is_slower_than_the_host_never_waits():
    assert added_seconds([Taken(3.0, 1.0), Taken(2.0, 1.0)]) == [3.0, 2.0]


def test_a_device_that_is_faster_than_the_host_waits_for_it():
    assert added_seconds([Taken(1.0, 3.0), Taken(0.5, 2.0)]) == [3.0, 2.0]


def test_a_host_that_is_ahead_can_afford_a_slow_piece():
    # The host is done with the first piece at 1 and with the second at 5; the device with the first at 4, and with the second at 5.
    assert added_seconds([Taken(4.0, 1.0), Taken(0.5, 4.0)]) == [4.0, 1.0]


def test_a_device_that_waited_starts_late():
    # Issued from 0 to 2 and done at 2, though the device has worked for 1; then it works from 2 to 5.
    assert added_seconds([Taken(1.0, 2.0), Taken(3.0, 1.0)]) == [2.0, 3.0]


def test_nothing_takes_no_time():
    assert added_seconds([]) == []


def step() -> Graph:
    """Two calls of one block: f0 f1 | loss | b1 b0, each forward of a block two ops; then two updates."""
    b = GraphBuilder()
    x = b.storage("x", 10, Role.INPUT)
    weights = [b.storage(f"w{n}", size, Role.PARAM) for n, size in enumerate((10, 30))]
    grads = [b.storage(f"g{n}", size, Role.GRAD) for n, size in enumerate((10, 30))]
    before = x
    for call in range(2):
        half, out = b.storage(f"half{call}", 10, Role.ACTIVATION), b.storage(f"out{call}", 20, Role.ACTIVATION)
        b.op(f"first{call}", FORWARD, [before, weights[call]], [half], region=call)
        b.op(f"second{call}", FORWARD, [half], [out], region=call)
        before = out
    loss = b.storage("loss", 10, Role.ACTIVATION)
    b.op("loss", FORWARD, [before], [loss])
    for call in (1, 0):
        b.op(f"back{call}", BACKWARD, [loss], [grads[call]], region=call)
    for call in range(2):
        b.op(f"update{call}", UPDATE, [grads[call]], [], mutates=(weights[call],))
    return Graph(tuple(b.ops), tuple(b.storages), (Region(0, "Block", "blocks.0"),), (RegionCall(0, 0, "blocks.0"), RegionCall(1, 0, "blocks.1")))


BLOCK = {0: BlockTimes(forward=Taken(6.0, 1.0), backward=Taken(9.0, 1.0))}


def seconds(times: StepTimes) -> dict[str, float]:
    graph = step()
    costs = measured_costs(graph, MACHINE, times, parts_of(graph, MACHINE, times))
    return {op.name: pytest.approx(costs.op_seconds[op.id, "gpu"]) for op in graph.ops}


def test_what_was_not_measured_is_counted():
    assert seconds(StepTimes({}, {}, {}, None)) == {
        "first0": 3.0,  # 10 bytes of x, 10 of the weight, 10 written, at 10 bytes a second
        "second0": 3.0,
        "first1": 6.0,
        "second1": 3.0,
        "loss": 3.0,
        "back1": 4.0,
        "back0": 2.0,
        "update0": 3.0,
        "update1": 9.0,
    }


def test_a_block_is_shared_out_by_what_its_ops_take_alone():
    found = seconds(StepTimes(BLOCK, {}, {0: Taken(4.0, 0.0), 1: Taken(2.0, 0.0)}, update=Taken(8.0, 0.0)))
    assert (found["first0"], found["second0"]) == (4.0, 2.0)  # 6 seconds as 4 to 2
    assert (found["first1"], found["second1"]) == (4.0, 2.0)  # as 6 to 3, their rooflines
    assert (found["back1"], found["loss"]) == (9.0, 3.0)
    assert (found["update0"], found["update1"]) == (2.0, 6.0)  # 8 seconds as 30 to 90 bytes


def test_the_host_shows_where_the_device_waits_for_it():
    slow = {0: BlockTimes(forward=Taken(6.0, 10.0), backward=Taken(9.0, 1.0))}
    found = seconds(StepTimes(slow, {}, {4: Taken(3.0, 0.5)}, None, autograd=(0.25, 7.0)))
    assert (found["first0"], found["second0"]) == (5.0, 5.0)  # five seconds each to issue, which the device is done with by then
    assert found["loss"] == 3.0  # 0.75 s to issue, and an idle device
    assert found["back1"] == 9.0


def test_compiled_blocks_are_two_ops_with_times_of_their_own():
    b = GraphBuilder()
    x, y, z = b.storage("x", 10, Role.INPUT), b.storage("y", 10, Role.ACTIVATION), b.storage("z", 10, Role.ACTIVATION)
    b.op("compiled", FORWARD, [x], [y], region=0, kind="region_forward")
    b.op("eager", FORWARD, [y], [z], region=1)
    regions = (Region(0, "Block", "blocks.0"), Region(1, "Norm", "norm"))
    graph = Graph(tuple(b.ops), tuple(b.storages), regions, (RegionCall(0, 0, "blocks.0"), RegionCall(1, 1, "norm")))
    norm = BlockTimes(Taken(2.0, 0.0), Taken(4.0, 0.0))
    times = StepTimes(eager={**BLOCK, 1: norm}, compiled={0: BlockTimes(Taken(1.0, 0.0), Taken(3.0, 0.0))}, ops={}, update=None)
    assert {part.name: part.taken.device_seconds for part in parts_of(graph, MACHINE, times)} == {"blocks.0": 1.0, "norm": 2.0}


def test_every_op_is_in_one_part():
    parts = parts_of(step(), MACHINE, StepTimes(BLOCK, {}, {4: Taken(1.0, 1.0)}, update=None))
    assert sorted(op for part in parts for op in part.ops) == list(range(9))
    assert {(part.name, part.phase, part.measured) for part in parts} == {
        ("blocks.0", Phase.FORWARD, True),
        ("blocks.0", Phase.BACKWARD, True),
        ("glue", Phase.FORWARD, True),
        ("update", Phase.UPDATE, False),
    }
