import pytest
from problems import BACKWARD, FORWARD, GraphBuilder, chain, machine
from reading import recomputed

from tierwise.errors import InfeasibleBudget, RecomputeLimit
from tierwise.ir import Role, peak_bytes
from tierwise.policies import coop, plan
from tierwise.policies.coop import Arena
from tierwise.simulate import simulate


def test_the_smallest_hole_with_room():
    arena = Arena(100)
    offsets = [arena.take(size, owner) for owner, size in enumerate((10, 30, 10, 20, 10))]
    assert offsets == [0, 10, 40, 50, 70]
    arena.give_back(10, 30)
    arena.give_back(50, 20)
    assert arena.holes == [(10, 40), (50, 70), (80, 100)]
    assert arena.take(15, 9) == 50  # 20 of three holes, the lowest of two equals
    assert arena.take(15, 8, from_high_end=True) == 85
    assert list(arena.pieces()) == [(10, 0), (30, None), (10, 2), (15, 9), (5, None), (10, 4), (5, None), (15, 8)]
    assert arena.take(40, 7) is None
    arena.give_back(40, 10)
    assert arena.holes[0] == (10, 50)  # neighbours join
    assert arena.take_at(20, 10, 6) and not arena.take_at(25, 10, 5)
    assert arena.holes[:2] == [(10, 20), (30, 50)]


def step(budget: int):
    """a and c are cheap, b is not; d needs 60 in one piece while all three wait for backward."""
    b = GraphBuilder()
    x = b.storage("x", 30, Role.INPUT)
    made = [b.storage(name, 30, Role.ACTIVATION) for name in "abc"]
    w, d, g = b.storage("w", 1, Role.ACTIVATION), b.storage("d", 60, Role.ACTIVATION), b.storage("g", 1, Role.ACTIVATION)
    for storage, (name, kind, seconds) in zip(made, (("a", "relu", 1), ("b", "matmul", 100), ("c", "relu", 1)), strict=True):
        b.op(f"make {name}", FORWARD, [x], [storage], kind=kind, seconds=seconds)
    b.op("wait", FORWARD, [x], [w], kind="matmul", seconds=50)
    b.op("large", FORWARD, [x, w], [d], kind="relu")
    b.op("loss", BACKWARD, [d], [g], kind="loss")
    for name, storage in zip("abc", made, strict=True):
        b.op(f"use {name}", BACKWARD, [g, storage, x], [b.storage(f"d{name}", 1, Role.ACTIVATION)], kind="backward")
    return b.problem(machine(hbm=budget))


def test_cheap_storages_lie_together_and_go_together():
    problem = step(122)
    schedule = plan(problem, "coop")
    assert recomputed(problem, schedule) == ["make a", "make c"]
    names = {storage.id: storage.name for storage in problem.graph.storages}
    where = {names[storage]: offset for (place, storage), offset in schedule.addresses.items() if place <= 2}
    assert where == {"x": 0, "a": 92, "b": 30, "c": 62}  # costly from below, cheap from above


def test_without_partition_the_costly_one_in_the_middle_goes_too():
    # x a b c in a row: the cheapest two are not neighbours, so one of them takes b along.
    problem = step(122)
    assert "make b" in recomputed(problem, plan(problem, "coop", partition=False))


def test_with_room_nothing_is_evicted():
    problem = step(300)
    schedule = plan(problem, "coop")
    assert recomputed(problem, schedule) == []
    assert simulate(problem, schedule).seconds == simulate(problem, plan(problem, "keep_all")).seconds


def test_no_piece_is_large_enough():
    with pytest.raises(InfeasibleBudget) as caught:
        plan(step(80), "coop")
    assert caught.value.least_bytes >= 91  # x, w and d at least
    assert peak_bytes(step(300), plan(step(caught.value.least_bytes), "coop"))["hbm"] <= caught.value.least_bytes


def test_too_much_recomputation_is_refused():
    with pytest.raises(RecomputeLimit, match=r"within 80 B recomputation takes more than 0.01 times"):
        coop.plan(chain(64, on=machine(hbm=80)), recompute_limit=0.01)
