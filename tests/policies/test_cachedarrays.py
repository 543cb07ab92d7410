import pytest
from problems import BACKWARD, FORWARD, GraphBuilder, chain, machine

from tierwise.errors import InfeasibleBudget
from tierwise.ir import Role
from tierwise.ir.text import schedule_lines
from tierwise.policies import plan
from tierwise.simulate import simulate


def moves(problem, **options) -> list[str]:
    lines = schedule_lines(problem.graph, plan(problem, "cachedarrays", **options))
    return [line for line in lines if line.startswith("copy")]


def test_kernels_wait_for_their_arguments_but_there_are_no_faults():
    problem = chain(5, on=machine(hbm=40))
    assert moves(problem) == [
        "copy batch hbm -> dram", "copy a0 hbm -> dram", "copy a1 hbm -> dram",
        "copy a1 dram -> hbm", "copy a0 dram -> hbm", "copy batch dram -> hbm",
    ]  # fmt: skip
    assert simulate(problem, plan(problem, "cachedarrays")).seconds == 11 + 3 + 3


def marked(hbm: int):
    """`early` is made first and used by every op; `saved` waits for backward; the last op of forward needs `hbm` - 30 bytes of workspace."""
    b = GraphBuilder()
    early, saved, tail = (b.storage(name, 20, Role.ACTIVATION) for name in ("early", "saved", "tail"))
    b.op("f0", FORWARD, [], [early])
    b.op("f1", FORWARD, [early], [saved])
    b.op("f2", FORWARD, [early], [])
    b.op("f3", FORWARD, [], [tail], workspace_bytes=hbm - 40)
    b.op("f4", FORWARD, [early, tail], [])
    b.op("b0", BACKWARD, [saved], [])
    return b.problem(machine(hbm=hbm), cyclic=False)


def test_what_is_marked_evictable_goes_before_what_came_first():
    assert moves(marked(60))[0] == "copy saved hbm -> dram"
    assert moves(marked(60), softevict=False)[0] == "copy early hbm -> dram"


def test_bins_of_at_least_the_size_come_first():
    # 20 bytes are missing. Small ones came first, but the large one is in the bin of what is wanted.
    b = GraphBuilder()
    small = [b.storage(f"small{i}", 4, Role.ACTIVATION) for i in range(3)]
    large, tail = b.storage("large", 20, Role.ACTIVATION), b.storage("tail", 20, Role.ACTIVATION)
    b.op("f0", FORWARD, [], [*small, large])
    b.op("f1", FORWARD, [], [tail])
    b.op("f2", FORWARD, [tail], [])
    b.op("f3", FORWARD, [*small, large], [])
    assert moves(b.problem(machine(hbm=40), cyclic=False))[0] == "copy large hbm -> dram"


def test_smaller_bins_serve_when_there_is_nothing_larger():
    b = GraphBuilder()
    small = [b.storage(f"small{i}", 4, Role.ACTIVATION) for i in range(5)]
    tail = b.storage("tail", 20, Role.ACTIVATION)
    b.op("f0", FORWARD, [], small)
    b.op("f1", FORWARD, [], [tail])
    b.op("f2", FORWARD, small, [])
    assert moves(b.problem(machine(hbm=30), cyclic=False))[:3] == [f"copy small{i} hbm -> dram" for i in range(3)]


def test_a_clean_object_leaves_for_nothing():
    b = GraphBuilder()
    first, second = b.storage("a", 10, Role.ACTIVATION), b.storage("b", 10, Role.ACTIVATION)
    b.op("f0", FORWARD, [], [first])
    b.op("f1", FORWARD, [], [second])
    for i in range(4):
        b.op(f"g{i}", FORWARD, [first if i % 2 == 0 else second], [])
    found = moves(b.problem(machine(hbm=10), cyclic=False))
    assert [line for line in found if line.endswith("dram")] == ["copy a hbm -> dram", "copy b hbm -> dram"]


def test_copies_give_way_when_the_slow_pool_is_full():
    # 20 bytes of host memory: a and b keep theirs while they are here, until c has to leave too.
    b = GraphBuilder()
    made = [b.storage(name, 10, Role.ACTIVATION) for name in "abc"]
    for storage in made:
        b.op(f"make{storage}", FORWARD, [], [storage])
    for storage in (0, 2, 1, 0, 2):
        b.op("read", FORWARD, [made[storage]], [])
    problem = b.problem(machine(hbm=20, dram=20, nvme=0), cyclic=False)
    assert simulate(problem, plan(problem, "cachedarrays")).peak_bytes["dram"] <= 20


def test_the_least_budget_is_the_largest_op():
    with pytest.raises(InfeasibleBudget) as caught:
        plan(chain(5, on=machine(hbm=29)), "cachedarrays")
    assert caught.value.least_bytes == 30
