"""Demand paging by itself, and what policies can ask of it."""

from problems import FORWARD, GraphBuilder, chain, machine

from tierwise.ir import Role, check_schedule
from tierwise.ir.text import schedule_lines
from tierwise.policies._paging import Paging
from tierwise.policies._runtime import DemandPaging, homes_elsewhere, run_settled


def run(problem, make=DemandPaging) -> list[str]:
    schedule = run_settled(problem, lambda home: make(problem, home))
    check_schedule(problem, schedule)
    return list(schedule_lines(problem.graph, schedule))


def test_by_itself_what_is_needed_last_goes():
    found = run(chain(5, on=machine(hbm=40)))
    assert [line for line in found if line.startswith("copy")][:3] == ["copy batch hbm -> dram", "copy a0 hbm -> dram", "copy a1 hbm -> dram"]


def test_homes_are_in_the_fastest_tier_with_room():
    problem = chain(3, weight_bytes=10, on=machine(dram=15))
    assert sorted(homes_elsewhere(problem).values()) == [("dram",), ("nvme",), ("nvme",)]


def weights(count: int, hbm: int):
    b = GraphBuilder()
    for i in range(count):
        b.op(f"f{i}", FORWARD, [b.storage(f"w{i}", 10, Role.PARAM)], [])
    return b.problem(machine(hbm=hbm))


def test_a_step_begins_with_what_the_last_one_ended_with():
    # Two slots. The first run ends with w0, needed first in the next step, and w3; so those two are at home on the device.
    problem = weights(4, 20)
    schedule = run_settled(problem, lambda home: DemandPaging(problem, home))
    assert [home for _, home in sorted(schedule.home.items())] == [("hbm",), ("dram",), ("dram",), ("hbm",)]


class LeastRecent(Paging):
    def victims(self, needed: set[int]):
        return (storage for storage in self.least_recent() if storage not in needed)


class Oldest(Paging):
    def victims(self, needed: set[int]):
        return (storage for storage in self.oldest() if storage not in needed)


def test_the_order_of_use_and_the_order_of_arrival():
    # a came before b and is used after it: when c needs room, b was used longest ago and a came longest ago.
    b = GraphBuilder()
    first, second, third = (b.storage(name, 10, Role.ACTIVATION) for name in "abc")
    b.op("f0", FORWARD, [], [first])
    b.op("f1", FORWARD, [], [second])
    b.op("f2", FORWARD, [first], [])
    b.op("f3", FORWARD, [], [third], workspace_bytes=10)
    b.op("f4", FORWARD, [first, second, third], [])
    problem = b.problem(machine(hbm=30), cyclic=False)
    for make, gone in ((LeastRecent, "b"), (Oldest, "a")):
        assert next(line for line in run(problem, make) if line.startswith("copy")) == f"copy {gone} hbm -> dram"
