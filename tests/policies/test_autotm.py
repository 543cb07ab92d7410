import pytest
from problems import FORWARD, GraphBuilder, chain, machine

from tierwise.errors import BadInput, InfeasibleBudget
from tierwise.ir import Copy, Role, peak_bytes
from tierwise.ir.text import schedule_lines
from tierwise.policies import keep_all, plan
from tierwise.policies.autotm import _runs
from tierwise.simulate import simulate


def hill(hbm: int, *, rate: float = 20.0, held: tuple[int, ...] = (40,), ops: int = 9, top: int = 4):
    """A second each. `a0`, `a1`... are made by f0 and read by the last op; f{top} has 60 bytes of workspace, and nothing else needs any."""
    b = GraphBuilder()
    kept = [b.storage(f"a{i}", nbytes, Role.ACTIVATION) for i, nbytes in enumerate(held)]
    b.op("f0", FORWARD, [], kept)
    for i in range(1, ops - 1):
        b.op(f"f{i}", FORWARD, [], [], workspace_bytes=60 if i == top else 0)
    b.op(f"f{ops - 1}", FORWARD, kept, [])
    return b.problem(machine(hbm=hbm, rate=rate), cyclic=False)


def lines(problem, **options) -> list[str]:
    return list(schedule_lines(problem.graph, plan(problem, "autotm", **options)))


def test_synchronous_moves_stop_the_ops():
    # 2 s out, before any other op, and 2 s back, before the reader: 9 + 4.
    problem = hill(80)
    assert lines(problem, mode="synchronous") == [
        "compute f0", "copy a0 hbm -> dram", "free a0 hbm join", *(f"compute f{i}" for i in range(1, 8)),
        "copy a0 dram -> hbm", "free a0 dram", "compute f8", "free a0 hbm",
    ]  # fmt: skip
    assert simulate(problem, plan(problem, "autotm", mode="synchronous")).seconds == 13


def test_asynchronous_moves_are_charged_to_one_op():
    # A move of 2 s beside an op of 1 s makes it last 2: a second out, a second back.
    problem = hill(80)
    schedule = plan(problem, "autotm")
    assert simulate(problem, schedule).seconds == 11
    out = next(i for i, step in enumerate(schedule.steps) if isinstance(step, Copy) and step.src == "hbm")
    assert "join" in lines(problem)[out + 2]  # the op beside it is over when the move is


def test_moves_that_hide_cost_nothing():
    problem = hill(80, rate=40.0)
    assert simulate(problem, plan(problem, "autotm")).seconds == 9


def test_the_cheapest_that_is_enough_goes():
    # 30 must go: a1 of 30 alone, and not a0 of 40.
    problem = hill(100, held=(40, 30), rate=5.0)
    assert [line for line in lines(problem, mode="synchronous") if line.startswith("copy")] == ["copy a1 hbm -> dram", "copy a1 dram -> hbm"]


def test_moves_beside_ops_are_near_uses_only():
    # 60 ops with the top in the middle. Free of charge either way, but moves within 15 ops of f0 and of f59.
    problem = hill(80, rate=40.0, ops=60, top=30)
    found = lines(problem)
    out, back = found.index("copy a0 hbm -> dram"), found.index("copy a0 dram -> hbm")
    assert found.index("compute f0") < out < found.index("compute f16")
    assert found.index("compute f43") < back < found.index("compute f59")


def test_a_weight_at_home_in_slow_memory_is_written_when_it_changed():
    b = GraphBuilder()
    frozen, trained = b.storage("frozen", 20, Role.PARAM), b.storage("trained", 20, Role.PARAM)
    for i in range(8):
        b.op(f"f{i}", FORWARD, [frozen] * (i == 0), [], mutates=(trained,) if i == 2 else (), workspace_bytes=80 if i == 5 else 0)
    problem = b.problem(machine(hbm=100, rate=5.0))
    schedule = plan(problem, "autotm", mode="synchronous")
    assert (schedule.home[frozen], schedule.home[trained]) == (("dram",), ("hbm",))  # 4 s to read it, and 8 to read and write the other
    assert simulate(problem, schedule).seconds == 12


def test_static_is_all_or_nothing_on_a_gpu():
    problem = hill(99)
    with pytest.raises(InfeasibleBudget) as caught:
        plan(problem, "autotm", mode="static")
    assert caught.value.least_bytes == 100
    assert plan(problem.with_budget(100), "autotm", mode="static") == keep_all.plan(problem)


def test_runs_of_ops():
    assert _runs(7, 10) == [range(i, i + 1) for i in range(7)]
    assert _runs(10, 4) == [range(0, 3), range(3, 6), range(6, 9), range(9, 10)]
    assert _runs(0, 4) == []


def test_fewer_runs_still_fit_and_say_how_good_they_are():
    problem = chain(6, weight_bytes=4, state_bytes=8)
    tight = problem.with_budget(int(0.7 * peak_bytes(problem, keep_all.plan(problem))["hbm"]))
    whole, coarse = plan(tight, "autotm"), plan(tight, "autotm", max_nodes=6)
    assert simulate(tight, whole).seconds <= simulate(tight, coarse).seconds
    assert whole.notes[0].startswith("asynchronous, 19 runs of ops: optimal, at most 0.")


def test_without_a_solution_the_heaviest_gaps_are_swapped_until_all_fits():
    problem = hill(60, top=1)
    schedule = plan(problem, "autotm", max_nodes=1)  # in one run nothing is ever idle, and in three f1 is in the run of f0
    assert schedule.notes[0].startswith("asynchronous, 1 runs of ops: infeasible; synchronous, 3 runs of ops: infeasible; 1 of 1 idle gaps")
    with pytest.raises(InfeasibleBudget) as caught:
        plan(problem.with_budget(59), "autotm")
    assert caught.value.least_bytes == 60


def test_defrag_places_everything():
    problem = chain(6, weight_bytes=3, state_bytes=7, on=machine(hbm=90))
    schedule = plan(problem, "autotm", defrag=True)
    assert schedule.addresses
    assert "lost between storages" in schedule.notes[1]


def test_unknown_mode():
    with pytest.raises(BadInput, match="autotm knows static, synchronous, asynchronous"):
        plan(chain(2), "autotm", mode="numa")
