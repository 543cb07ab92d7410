import pytest
from problems import chain, machine, masters

from tierwise.errors import UnknownName
from tierwise.ir import Copy
from tierwise.ir.text import schedule_lines
from tierwise.policies import plan
from tierwise.simulate import simulate


def test_homes():
    problem = chain(2, weight_bytes=5, state_bytes=10, cpu_update_seconds=1)
    names = {s.id: s.name for s in problem.graph.storages}
    homes = {names[s]: home for s, home in plan(problem, "zero_infinity").home.items()}
    assert homes == {"batch": ("hbm",), "w0": ("dram",), "w1": ("dram",), "s0": ("nvme",), "s1": ("nvme",)}


def test_one_update_is_read_while_the_one_before_it_runs_and_the_one_before_that_is_written():
    problem = chain(3, weight_bytes=5, state_bytes=10, cpu_update_seconds=1)
    lines = list(schedule_lines(problem.graph, plan(problem, "zero_infinity")))
    assert lines[:11] == [
        "copy s0 nvme -> dram @-1",
        "copy s1 nvme -> dram @-1",
        "compute step0 on cpu @-1",
        "free g0 dram @-1",
        "copy s0 dram -> nvme @-1",
        "free s0 dram @-1",
        "copy s2 nvme -> dram @-1",
        "compute step1 on cpu @-1",
        "free g1 dram @-1",
        "copy s1 dram -> nvme @-1",
        "free s1 dram @-1",
    ]


def test_parameters_come_twice_a_step_and_leave_after_each_use():
    problem = chain(6, weight_bytes=50, state_bytes=100, cpu_update_seconds=0.1, on=machine(rate=1000.0, disk_rate=1000.0))
    schedule = plan(problem, "zero_infinity", ahead=1)
    names = {s.id: s.name for s in problem.graph.storages}
    brought = [names[s.storage] for s in schedule.steps if isinstance(s, Copy) and s.dst == "hbm"]
    assert brought == ["w0", "w1", "w2", "w3", "w4", "w5", "w4", "w3", "w2", "w1", "w0"]  # w5 stays: it is used again at once
    kept, offloaded = (simulate(problem, plan(problem, name)).peak_bytes["hbm"] for name in ("keep_all", "zero_infinity"))
    assert kept == 6 * 50 + 6 * 100 + 6 * 50 + 20  # weights, states, gradients, batch and d0
    assert offloaded < kept / 3


def test_with_masters_the_parameter_is_made_in_host_memory():
    problem = masters()
    lines = list(schedule_lines(problem.graph, plan(problem, "zero_infinity")))
    assert "compute step0 on cpu @-1" in lines and not any(line.startswith("copy w0 hbm") for line in lines)


def test_parameters_go_to_the_disk_where_host_memory_is_small():
    problem = chain(2, weight_bytes=500, state_bytes=10, cpu_update_seconds=1, on=machine(dram=2050))
    names = {s.id: s.name for s in problem.graph.storages}
    homes = {names[s]: home for s, home in plan(problem, "zero_infinity").home.items()}
    assert homes["w0"] == ("nvme",)


def test_options_have_names():
    problem = chain(2, weight_bytes=5, cpu_update_seconds=1)
    for options in ({"parameters": "disk"}, {"update": "later"}, {"state": "tape"}):
        with pytest.raises(UnknownName):
            plan(problem, "zero_infinity", **options)
    schedule = plan(problem, "zero_infinity", parameters="device", state="dram", update="backward")
    assert all("nvme" not in home for home in schedule.home.values())
