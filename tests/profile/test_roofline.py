"""Costs counted by hand. The device does 100 flops of bf16 and moves 10 bytes a second; a launch is half a second."""

from __future__ import annotations

import pytest
from problems import BACKWARD, FORWARD, UPDATE, GraphBuilder

from tierwise.errors import BadInput
from tierwise.ir import Graph, Machine, Processor, Role, Tier
from tierwise.profile.roofline import roofline_costs, touched_bytes

GPU = Processor("gpu", "hbm", {"bf16": 100.0}, bytes_per_second=10.0, launch_seconds=0.5)
CPU = Processor("cpu", "dram", {}, bytes_per_second=4.0, launch_seconds=0.25)


def on(*processors: Processor) -> Machine:
    return Machine("toy", (Tier("hbm", 1000), Tier("dram", 1000)), (), processors)


def graph() -> Graph:
    b = GraphBuilder()
    x, w = b.storage("x", 20, Role.INPUT), b.storage("w", 10, Role.PARAM)
    m = b.storage("m", 30, Role.OPTIMIZER_STATE)
    y, g = b.storage("y", 20, Role.ACTIVATION), b.storage("g", 10, Role.GRAD)
    b.op("product", FORWARD, [x, w, x], [y], flops=1000, precision="bf16")
    b.op("small product", BACKWARD, [y, x], [g], flops=100, precision="bf16")
    b.op("step", UPDATE, [g], [], mutates=(w, m))
    return Graph(tuple(b.ops), tuple(b.storages))


def test_bytes_count_each_storage_once_and_what_is_mutated_twice():
    step = graph()
    assert [touched_bytes(step, op) for op in step.ops] == [
        20 + 10 + 20,  # x once, though the op names it twice
        20 + 20 + 10,
        10 + 2 * (10 + 30),
    ]


def test_an_op_lasts_as_long_as_its_flops_or_its_bytes_and_a_launch():
    seconds = roofline_costs(graph(), on(GPU)).op_seconds
    assert seconds == {
        (0, "gpu"): 1000 / 100 + 0.5,  # flops rule: 10 s against 5 s
        (1, "gpu"): 50 / 10 + 0.5,  # bytes rule: 1 s against 5 s
        (2, "gpu"): 90 / 10 + 0.5,
    }


def test_only_updates_have_a_cost_on_the_cpu():
    seconds = roofline_costs(graph(), on(GPU, CPU)).op_seconds
    assert {key: value for key, value in seconds.items() if key[1] == "cpu"} == {(2, "cpu"): 90 / 4 + 0.25}


def test_a_cpu_of_unknown_bandwidth_cannot_update():
    seconds = roofline_costs(graph(), on(GPU, Processor("cpu", "dram"))).op_seconds
    assert {processor for _, processor in seconds} == {"gpu"}


def test_a_device_of_unknown_bandwidth_is_refused():
    with pytest.raises(BadInput, match="memory bandwidth of its gpu"):
        roofline_costs(graph(), on(Processor("gpu", "hbm", {"bf16": 100.0})))


def test_a_precision_the_machine_does_not_say_is_refused():
    with pytest.raises(BadInput, match="bf16 rate of its gpu, which product needs; it says fp32"):
        roofline_costs(graph(), on(Processor("gpu", "hbm", {"fp32": 100.0}, 10.0)))
