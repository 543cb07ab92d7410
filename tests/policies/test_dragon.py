import dataclasses

import pytest
from problems import FORWARD, GraphBuilder, chain, machine

from tierwise.errors import BadInput, InfeasibleBudget, MissingTier
from tierwise.ir import Role
from tierwise.ir.text import schedule_lines
from tierwise.policies import plan
from tierwise.simulate import simulate


def moves(problem, **options) -> list[str]:
    lines = schedule_lines(problem.graph, plan(problem, "dragon", **options))
    return [line for line in lines if not line.startswith(("compute", "free"))]


def test_what_is_missing_faults_from_the_page_cache():
    problem = chain(5, on=machine(hbm=40))
    assert moves(problem) == [
        "copy batch hbm -> dram", "copy a0 hbm -> dram", "copy a1 hbm -> dram",
        "fault a1 dram -> hbm", "fault a0 dram -> hbm", "fault batch dram -> hbm",
    ]  # fmt: skip
    assert simulate(problem, plan(problem, "dragon")).seconds == 11 + 3 + 3


def turns(hbm: int, dram: int):
    """`a`, `b`, `c`, `d` of 10 bytes are made one after the other and read in the same order, each by an op of 6 s with 20 bytes beside it."""
    b = GraphBuilder()
    made = [b.storage(name, 10, Role.ACTIVATION) for name in "abcd"]
    for storage in made:
        b.op(f"make{storage}", FORWARD, [], [storage])
    b.op("work", FORWARD, [], [], workspace_bytes=hbm)
    for storage in made:
        b.op(f"read{storage}", FORWARD, [storage], [], workspace_bytes=20, seconds=6)
    return b.problem(machine(hbm=hbm, dram=dram, disk_rate=2.0), cyclic=False)


def test_what_the_page_cache_has_no_room_for_is_on_the_disk():
    problem = turns(hbm=40, dram=20)
    assert moves(problem, read_ahead=0) == [
        "copy a hbm -> dram", "copy b hbm -> dram", "copy c hbm -> nvme", "copy d hbm -> nvme",
        "fault a dram -> hbm", "fault b dram -> hbm", "fault c nvme -> hbm", "fault d nvme -> hbm",
    ]  # fmt: skip


def test_a_fault_that_reaches_the_disk_reads_ahead_into_the_cache():
    # c comes from the disk, and d with it, into the room that a and b have left in the cache: it faults from there.
    problem = turns(hbm=40, dram=20)
    assert moves(problem)[-3:] == ["fault c nvme -> hbm", "copy d nvme -> dram", "fault d dram -> hbm"]
    assert simulate(problem, plan(problem, "dragon")).seconds < simulate(problem, plan(problem, "dragon", read_ahead=0)).seconds


def test_what_did_not_change_is_not_written_again():
    # One slot, so a and b take turns. Each is written once and read from the cache ever after.
    b = GraphBuilder()
    first, second = b.storage("a", 10, Role.ACTIVATION), b.storage("b", 10, Role.ACTIVATION)
    b.op("f0", FORWARD, [], [first])
    b.op("f1", FORWARD, [], [second])
    for i in range(4):
        b.op(f"g{i}", FORWARD, [first if i % 2 == 0 else second], [])
    found = moves(b.problem(machine(hbm=10), cyclic=False))
    assert [line for line in found if line.startswith("copy")] == ["copy a hbm -> dram", "copy b hbm -> dram"]
    assert len([line for line in found if line.startswith("fault")]) == 4


def test_what_it_needs_and_refuses():
    with pytest.raises(InfeasibleBudget) as caught:
        plan(chain(5, on=machine(hbm=29)), "dragon")
    assert caught.value.least_bytes == 30
    with pytest.raises(BadInput):
        plan(chain(2), "dragon", read_ahead=-1)
    diskless = machine(hbm=40)
    links = tuple(link for link in diskless.links if "nvme" not in (link.src, link.dst))
    with pytest.raises(MissingTier):
        plan(chain(2, on=dataclasses.replace(diskless, tiers=diskless.tiers[:2], links=links)), "dragon")
