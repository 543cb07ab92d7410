import pytest
from problems import FORWARD, GraphBuilder, chain, machine

from tierwise.errors import InfeasibleBudget, MissingTier
from tierwise.ir import Link, Machine, Processor, Role, Tier, check_schedule
from tierwise.ir.text import schedule_lines
from tierwise.policies._moves import Move, carry_out, swap_tiers
from tierwise.simulate import simulate


def idle(hbm: int = 1000, *, rate: float = 10.0, ops: int = 5, dram: int = 1000):
    """`a` (10 bytes) is made by f0 and read by the last op; each op in between reads the 10 bytes of the one before and makes 10. A second each."""
    b = GraphBuilder()
    a = b.storage("a", 10, Role.ACTIVATION)
    b.op("f0", FORWARD, [], [a])
    before = []
    for i in range(1, ops - 1):
        made = b.storage(f"t{i}", 10, Role.ACTIVATION)
        b.op(f"f{i}", FORWARD, before, [made])
        before = [made]
    b.op(f"f{ops - 1}", FORWARD, [a, *before], [])
    return b.problem(machine(hbm=hbm, dram=dram, rate=rate, disk_rate=rate / 2), cyclic=False)


def carried_out(problem, *moves: Move, **more):
    schedule = carry_out(problem, moves, **more)
    check_schedule(problem, schedule)
    return schedule


def lines(problem, schedule) -> list[str]:
    return list(schedule_lines(problem.graph, schedule))


def test_bytes_are_given_back_when_their_copy_has_ended():
    problem = idle(rate=10.0)
    schedule = carried_out(problem, Move(1, 0, "dram"), Move(3, 0, "hbm"))
    assert lines(problem, schedule) == [
        "compute f0", "copy a hbm -> dram", "compute f1", "free a hbm", "compute f2", "free t1 hbm",
        "copy a dram -> hbm", "free a dram", "compute f3", "free t2 hbm", "compute f4", "free a hbm", "free t3 hbm",
    ]  # fmt: skip
    assert simulate(problem, schedule).seconds == 5


def test_what_is_still_here_when_its_fetch_is_due_stays():
    problem = idle(rate=4.0)  # 2.5 s: from 1 to 3.5, and the fetch is due at 3
    schedule = carried_out(problem, Move(1, 0, "dram"), Move(3, 0, "hbm"))
    assert [line for line in lines(problem, schedule) if " a " in line] == ["copy a hbm -> dram", "free a dram", "free a hbm"]
    assert simulate(problem, schedule).seconds == 5


def test_bytes_that_are_needed_are_given_back_early_and_waited_for():
    problem = idle(hbm=20, rate=4.0)  # f2 needs t1 and t2; a is gone at 3.5
    schedule = carried_out(problem, Move(1, 0, "dram"))
    assert lines(problem, schedule)[:5] == ["compute f0", "copy a hbm -> dram", "compute f1", "free a hbm", "compute f2"]
    assert simulate(problem, schedule).seconds == 3.5 + 1 + 1 + 2.5 + 1  # f2, f3, a on its way back, f4


def test_what_is_absent_is_fetched_on_demand():
    problem = idle(rate=10.0)
    schedule = carried_out(problem, Move(1, 0, "nvme"))  # 2 s out, 2 s back, when f4 is about to start
    assert lines(problem, schedule)[-5:] == ["copy a nvme -> hbm", "free a nvme", "compute f4", "free a hbm", "free t3 hbm"]
    assert simulate(problem, schedule).seconds == 5 + 2


def test_a_fetch_without_room_is_tried_again():
    problem = idle(hbm=20, rate=100.0)  # only f4, which makes nothing, leaves room for a
    schedule = carried_out(problem, Move(1, 0, "dram"), Move(2, 0, "hbm"))
    assert lines(problem, schedule).index("copy a dram -> hbm") == lines(problem, schedule).index("compute f4") - 2


def test_without_any_moves_the_storage_needed_last_goes_to_the_fastest_tier():
    problem = idle(hbm=20)
    schedule = carried_out(problem)
    assert [line for line in lines(problem, schedule) if line.startswith("copy")] == ["copy a hbm -> dram", "copy a dram -> hbm"]
    full = idle(hbm=20, dram=9)
    assert "copy a hbm -> nvme" in lines(full, carried_out(full))


def test_what_cannot_be_done_is_refused():
    with pytest.raises(InfeasibleBudget, match="10 B are missing"):
        carry_out(idle(hbm=10), ())
    with pytest.raises(InfeasibleBudget, match="what is there at the start takes 10 B"):
        carry_out(chain(2, on=machine(hbm=9)), ())


def test_a_home_elsewhere_is_fetched_changed_and_written_back():
    problem = chain(1, weight_bytes=5, state_bytes=10)
    state = next(s.id for s in problem.graph.storages if s.name == "s0")
    schedule = carried_out(problem, home={state: ("dram",)})
    assert [line for line in lines(problem, schedule) if " s0" in line] == ["copy s0 dram -> hbm", "copy s0 hbm -> dram", "free s0 hbm"]


def test_what_is_up_to_date_at_home_is_not_written_again():
    b = GraphBuilder()
    w, x, y = b.storage("w", 10, Role.PARAM), b.storage("x", 5, Role.ACTIVATION), b.storage("y", 5, Role.ACTIVATION)
    b.op("f", FORWARD, [w], [x])
    b.op("g", FORWARD, [x], [y])
    problem = b.problem()
    schedule = carried_out(problem, Move(0, w, "hbm"), Move(1, w, "dram"), home={w: ("dram",)})
    assert lines(problem, schedule) == ["copy w dram -> hbm", "compute f", "free w hbm", "compute g", "free x hbm", "free y hbm"]


def test_a_weight_sent_out_on_demand_is_home_again_at_the_end():
    b = GraphBuilder()
    w, x, y = b.storage("w", 10, Role.PARAM), b.storage("x", 15, Role.ACTIVATION), b.storage("y", 1, Role.ACTIVATION)
    b.op("f", FORWARD, [w], [y])
    b.op("g", FORWARD, [y], [x])
    problem = b.problem(machine(hbm=20))
    schedule = carried_out(problem)
    assert [line for line in lines(problem, schedule) if " w " in line] == ["copy w hbm -> dram", "free w hbm", "copy w dram -> hbm", "free w dram"]


def test_tiers_are_those_with_links_both_ways_fastest_first():
    assert swap_tiers(chain(1)) == ("dram", "nvme")
    links = (Link("hbm", "far", {"a": 1.0}), Link("far", "hbm", {"b": 1.0}), Link("hbm", "sink", {"c": 9.0}))
    one_way = Machine("m", (Tier("hbm", 9), Tier("far", 9), Tier("sink", 9)), links, (Processor("gpu", "hbm"),))
    assert swap_tiers(chain(1, on=one_way)) == ("far",)
    with pytest.raises(MissingTier):
        swap_tiers(chain(1, on=Machine("m", (Tier("hbm", 9),), (), (Processor("gpu", "hbm"),))))
