import pytest
from problems import FORWARD, GraphBuilder, chain, machine

from tierwise.errors import InfeasibleBudget
from tierwise.ir import Copy, Link, Machine, Processor, Role, Tier, peak_bytes
from tierwise.policies import keep_all, plan
from tierwise.policies._gaps import Gap
from tierwise.policies._moves import Move
from tierwise.policies._swaps import PlannedSwap, SwapPlan
from tierwise.policies.g10 import moves_without_paging
from tierwise.simulate import simulate


def own_lanes(hbm: int, dram_rate: float = 0.0, disk_rate: float = 0.0, *, dram: int = 1000) -> Machine:
    """Tiers the device reaches each over its own lanes; a rate of 0 leaves the tier out."""
    rates = {name: rate for name, rate in (("dram", dram_rate), ("nvme", disk_rate)) if rate}
    tiers = [Tier("hbm", hbm), *(Tier(name, dram if name == "dram" else 10_000) for name in rates)]
    links = [link for n, r in rates.items() for link in (Link("hbm", n, {f"to {n}": r}), Link(n, "hbm", {f"from {n}": r}))]
    return Machine("own lanes", tuple(tiers), tuple(links), (Processor("gpu", "hbm"),))


def hill(on: Machine, held: tuple[int, ...] = (40,)):
    """Nine ops of a second. `a0`, `a1`... are made by op 0 and read by op 8; between, each op reads the 10 bytes of the one before and makes 10.

    Op 4 has 60 bytes of workspace. With one `a` of 40 the curve is 40 50 60 60 120 60 60 60 50.
    """
    b = GraphBuilder()
    kept = [b.storage(f"a{i}", nbytes, Role.ACTIVATION) for i, nbytes in enumerate(held)]
    b.op("f0", FORWARD, [], kept)
    before: list[int] = []
    for i in range(1, 8):
        made = b.storage(f"t{i}", 10, Role.ACTIVATION)
        b.op(f"f{i}", FORWARD, before, [made], workspace_bytes=60 if i == 4 else 0)
        before = [made]
    b.op("f8", FORWARD, [*kept, *before], [])
    return b.problem(on, cyclic=False)


def copies(problem, schedule) -> list[str]:
    """Each copy with the op it is issued before."""
    found, at = [], 0
    for step in schedule.steps:
        if isinstance(step, Copy):
            found.append(f"{problem.graph.storages[step.storage].name} to {step.dst} before f{at}")
        at += not isinstance(step, Copy) and hasattr(step, "op")
    return found


@pytest.mark.parametrize("tier, on", [("dram", own_lanes(100, dram_rate=20)), ("nvme", own_lanes(100, disk_rate=20))])
def test_out_at_the_start_of_the_gap_and_back_as_soon_as_there_is_room(tier, on):
    # Out during ops 1 and 2. To be back for op 8 it must start at op 6; memory is left at op 5 (60 of 99) but not at op 4 (80 and 40 more).
    problem = hill(on)
    schedule = plan(problem, "g10")
    assert copies(problem, schedule) == [f"a0 to {tier} before f1", "a0 to hbm before f5"]
    assert simulate(problem, schedule).seconds == 9


def test_the_disk_if_there_is_time_and_the_host_if_not():
    # The gap is 7 s. Over a disk of 20 it takes 2 s out and 3 with the margin back; over one of 14 that is more than 7.
    for disk_rate, tier in ((20, "nvme"), (14, "dram")):
        problem = hill(own_lanes(100, dram_rate=40, disk_rate=disk_rate))
        assert copies(problem, plan(problem, "g10"))[0] == f"a0 to {tier} before f1"


def test_the_host_when_the_disk_is_busy():
    # Each a takes the disk's lane for the 2 s after op 0: there is time for both, one after the other, but the second finds the lane full.
    problem = hill(own_lanes(100, dram_rate=40, disk_rate=20), held=(40, 40))
    schedule = plan(problem, "g10")
    assert sorted(copies(problem, schedule)[:2]) == ["a0 to nvme before f1", "a1 to dram before f1"]
    full = hill(own_lanes(100, dram_rate=40, disk_rate=20, dram=39), held=(40, 40))
    assert copies(full, plan(full, "g10"))[:2] == ["a0 to nvme before f1", "a1 to nvme before f1"]


def test_nothing_is_moved_when_nothing_must_be():
    problem = hill(own_lanes(120, dram_rate=20))
    assert plan(problem, "g10") == plan(problem, "keep_all")


def test_no_time_for_it_means_waiting_not_failing():
    # 8 s each way and a gap of 7: nothing is safe, but op 4 does not fit otherwise. It waits until 9; the way back is from 10 to 18.
    problem = hill(own_lanes(100, dram_rate=5))
    schedule = plan(problem, "g10")
    assert copies(problem, schedule) == ["a0 to dram before f1", "a0 to hbm before f5"]
    assert simulate(problem, schedule).seconds == 19


def test_an_op_that_does_not_fit_alone_is_refused_with_the_least_budget():
    problem = hill(own_lanes(79, dram_rate=20))
    with pytest.raises(InfeasibleBudget) as caught:
        plan(problem, "g10")
    assert caught.value.least_bytes == 80  # op 4: two t and 60 of workspace


def test_optimizer_state_lives_elsewhere_between_its_updates():
    problem = chain(4, weight_bytes=5, state_bytes=50, on=machine(rate=100.0, disk_rate=50.0))
    whole = peak_bytes(problem, keep_all.plan(problem))["hbm"]
    tight = problem.with_budget(whole - 100)
    schedule = plan(tight, "g10")
    away = [problem.graph.storages[s].name for s, home in schedule.home.items() if home != ("hbm",)]
    assert len(away) >= 2
    assert all(name.startswith("s") for name in away)
    assert simulate(tight, schedule).seconds == simulate(problem, keep_all.plan(problem)).seconds


def test_more_lasting_bytes_than_the_device_has():
    problem = chain(6, weight_bytes=20, state_bytes=40, on=machine(hbm=130, rate=40.0))
    assert sum(s.nbytes for s in problem.graph.storages if s.lasting) == 360
    assert peak_bytes(problem, plan(problem, "g10"))["hbm"] <= 130
    nowhere = chain(6, weight_bytes=20, state_bytes=40, on=machine(hbm=130, dram=100, nvme=100, rate=40.0))
    with pytest.raises(InfeasibleBudget):
        plan(nowhere, "g10")


def test_what_no_op_writes_leaves_without_a_copy():
    # A frozen weight of 40, read by f0 alone, in a loop: at home on the host it is fetched each step and never sent.
    b = GraphBuilder()
    w, x = b.storage("w", 40, Role.PARAM), b.storage("x0", 10, Role.ACTIVATION)
    b.op("f0", FORWARD, [], [x])
    for i in range(1, 6):
        y = b.storage(f"x{i}", 10, Role.ACTIVATION)
        b.op(f"f{i}", FORWARD, [x, w] if i == 3 else [x], [y], workspace_bytes=60 if i == 5 else 0)
        x = y
    problem = b.problem(own_lanes(100, dram_rate=40))
    schedule = plan(problem, "g10")
    assert schedule.home[w] == ("dram",)
    assert copies(problem, schedule) == ["w to hbm before f0"]
    assert simulate(problem, schedule).seconds == 6


# -- the plan in the making ------------------------------------------------------------------------------------------------------------


def test_a_gap_around_the_end_of_the_step_is_a_range_like_any_other():
    problem = chain(1, weight_bytes=10, on=machine(hbm=1000))  # fwd0, loss, bwd0, step0: the weight is idle during the loss alone
    swaps = SwapPlan(problem, 1000)
    before = swaps.resident.tolist()
    swaps.add(PlannedSwap(Gap(1, 10, 2, 4 + 2, wraps=True), "dram", 3, 5))  # gone at op 3, fetched at op 1 of the next step
    assert (swaps.resident - before).tolist() == [-10, 0, 0, -10]
    assert swaps.held["dram"].tolist() == [10, 10, 10, 10]  # a home is kept all step long
    assert swaps.moves() == [Move(3, 1, "dram"), Move(1, 1, "hbm")]
    assert swaps.homes() == {1: ("dram",)}


def test_force_gives_back_sooner_and_fetches_later_before_it_swaps_more():
    problem = hill(own_lanes(100, dram_rate=20), held=(40, 30))  # 70 80 90 90 150 90 90 90 80
    swaps = SwapPlan(problem, 99)
    swaps.add(PlannedSwap(swaps.gaps[0], "dram", 5, 7))  # too late for op 4
    swaps.force()
    assert [(swap.gone_at, swap.fetch_at) for swap in swaps.chosen] == [(4, 7), (4, 8)]
    assert swaps.resident.tolist() == [70, 80, 90, 90, 80, 20, 20, 60, 80]  # the second, a1, had to go as well
    early = SwapPlan(problem, 110)
    early.add(PlannedSwap(early.gaps[0], "dram", 2, 4))  # back too soon for op 4
    early.force()
    assert [(swap.gone_at, swap.fetch_at) for swap in early.chosen] == [(2, 5)]


def test_pull_earlier_stops_at_the_op_that_has_no_room():
    swaps = SwapPlan(hill(own_lanes(100, dram_rate=20)), 99)
    swaps.add(PlannedSwap(swaps.gaps[0], "dram", 2, 8))
    swaps.pull_earlier()
    assert swaps.chosen[0].fetch_at == 5
    assert swaps.resident.tolist() == [40, 50, 20, 20, 80, 60, 60, 60, 50]


# -- the artifact's variants without paging --------------------------------------------------------------------------------------------


def test_moves_without_paging_relieve_the_fullest_op_on_demand():
    problem = hill(own_lanes(100, disk_rate=20), held=(40, 30))  # op 4 holds 150
    moves = moves_without_paging(problem, line_bytes=115, latency_seconds={})
    # Without a0 op 4 holds 110, which is under the line and over 0.9 of it: a1 goes too, and nothing fetches it.
    assert moves == [Move(1, 0, "nvme"), Move(5, 0, "hbm"), Move(1, 1, "nvme")]
    # A second allowed for each copy leaves no time for a0 (3 s out, 4.5 back, in 7), so a1 is planned and a0 left to demand.
    slower = moves_without_paging(problem, line_bytes=115, latency_seconds={"nvme": 1.0})
    assert slower == [Move(1, 1, "nvme"), Move(5, 1, "hbm"), Move(1, 0, "nvme")]
