import dataclasses

from problems import chain, machine

from tierwise.ir import Compute, Copy, Region, RegionCall
from tierwise.ir.text import schedule_lines
from tierwise.policies import plan
from tierwise.simulate import simulate


def moved(problem, schedule):
    """Activations that go to host memory, and ops that run twice."""
    names = {s.id: s.name for s in problem.graph.storages}
    out = [names[s.storage] for s in schedule.steps if isinstance(s, Copy) and s.src == "hbm" and names[s.storage].startswith("a")]
    runs = [s.op for s in schedule.steps if isinstance(s, Compute) and s.iteration == 0]
    return out, sorted({problem.graph.ops[op].name for op in runs if runs.count(op) > 1})


def test_updates_run_while_backward_goes_on_with_state_from_the_disk():
    problem = chain(3, weight_bytes=5, state_bytes=10, cpu_update_seconds=1)
    lines = list(schedule_lines(problem.graph, plan(problem, "ratel")))
    update, last = lines.index("compute step2 on cpu"), lines.index("compute bwd0")
    assert update < last
    assert lines[update - 1 : update + 4] == [
        "copy s2 nvme -> dram", "compute step2 on cpu", "free g2 dram", "copy s2 dram -> nvme", "free s2 dram",
    ]  # fmt: skip


def test_activations_move_as_far_as_the_links_have_time():
    # Five activations of 10 bytes wait for backward; forward takes 6 s, in which a link of 5 bytes a second takes three of them out.
    problem = chain(6, weight_bytes=1, on=machine(rate=5.0, disk_rate=100.0), cpu_update_seconds=0.01)
    out, again = moved(problem, plan(problem, "ratel"))
    assert out == ["a0", "a1", "a2"] and again == ["fwd3", "fwd4"]
    # With a link ten times as fast all of them go, and nothing runs twice.
    problem = chain(6, weight_bytes=1, on=machine(rate=50.0, disk_rate=100.0), cpu_update_seconds=0.01)
    assert moved(problem, plan(problem, "ratel")) == (["a0", "a1", "a2", "a3", "a4"], [])


def test_what_passes_between_layers_always_moves():
    # The same wait for the disk; fwd1 with fwd2 and fwd3 with fwd4 are two calls of one block, and a2 and a4 are what they hand on.
    problem = chain(6, weight_bytes=1, state_bytes=100, on=machine(rate=5.0, disk_rate=1.0), cpu_update_seconds=0.01, kinds=("matmul",))
    ops = tuple(dataclasses.replace(op, region=(op.id - 1) // 2) if 1 <= op.id <= 4 else op for op in problem.graph.ops)
    calls = (RegionCall(0, 0, "blocks.0"), RegionCall(1, 0, "blocks.1"))
    graph = dataclasses.replace(problem.graph, ops=ops, regions=(Region(0, "Block", "blocks.0"),), calls=calls)
    out, again = moved(problem, plan(dataclasses.replace(problem, graph=graph), "ratel"))
    assert out == ["a2", "a4"] and "fwd2" not in again and "fwd4" not in again


def test_where_the_disk_is_what_is_waited_for_recomputing_costs_nothing_and_nothing_moves():
    problem = chain(6, weight_bytes=1, state_bytes=100, on=machine(rate=5.0, disk_rate=1.0), cpu_update_seconds=0.01)
    out, again = moved(problem, plan(problem, "ratel"))
    assert out == [] and len(again) == 5


def test_it_needs_less_of_the_device_than_keeping():
    problem = chain(8, weight_bytes=20, state_bytes=60, activation_bytes=30, cpu_update_seconds=0.1, on=machine(rate=1000.0, disk_rate=1000.0))
    kept, offloaded = (simulate(problem, plan(problem, name)).peak_bytes["hbm"] for name in ("keep_all", "ratel"))
    assert offloaded < kept / 3
