import pytest
from problems import chain, machine

from tierwise.errors import BadInput, InfeasibleBudget
from tierwise.ir import Copy, peak_bytes
from tierwise.ir.text import schedule_lines
from tierwise.policies import keep_all, plan
from tierwise.simulate import simulate


def lines(problem, **options) -> list[str]:
    return list(schedule_lines(problem.graph, plan(problem, "deepum", **options)))


def test_without_looking_ahead_everything_missing_is_a_fault():
    # Four slots of ten. From fwd3 on the oldest leaves when its bytes are needed, and the op waits a second; so does each op that faults.
    problem = chain(5, on=machine(hbm=40))
    found = lines(problem, degree=0)
    assert [line for line in found if not line.startswith(("compute", "free"))] == [
        "copy batch hbm -> dram", "copy a0 hbm -> dram", "copy a1 hbm -> dram",
        "fault a1 dram -> hbm", "fault a0 dram -> hbm", "fault batch dram -> hbm",
    ]  # fmt: skip
    assert found.index("copy batch hbm -> dram") == found.index("compute fwd3") - 2
    assert found.index("fault a1 dram -> hbm") == found.index("compute bwd2") - 2
    assert simulate(problem, plan(problem, "deepum", degree=0)).seconds == 11 + 3 + 3


def test_two_ops_ahead_hides_all_of_it():
    # The oldest leave while fwd1 to fwd4 run; a1 comes while bwd3 does, two ops before it is read.
    problem = chain(5, on=machine(hbm=40))
    found = lines(problem, degree=2)
    assert not any(line.startswith("fault") for line in found)
    assert found.index("copy batch hbm -> dram") == found.index("compute fwd1") - 1
    assert found.index("copy a1 dram -> hbm") == found.index("compute bwd3") - 2
    assert simulate(problem, plan(problem, "deepum", degree=2)).seconds == 11


def test_what_the_next_ops_touch_is_not_evicted_for_them():
    problem = chain(6, on=machine(hbm=40))
    steps = plan(problem, "deepum", degree=2).steps
    at = 0
    for step in steps:
        if isinstance(step, Copy) and step.src == "hbm":
            soon = [s for op in problem.graph.ops[at : at + 2] for s in op.reads]
            assert step.storage not in soon
        at += hasattr(step, "op")


def test_what_is_dead_is_dropped_and_not_written():
    problem = chain(5, on=machine(hbm=40))
    written = {problem.graph.storages[s.storage].name for s in plan(problem, "deepum").steps if isinstance(s, Copy) and s.src == "hbm"}
    assert written <= {"batch", "a0", "a1", "a2"}  # never a gradient, nor a3 and a4, which are used until they die


def test_a_step_begins_as_it_ends():
    # What the optimizer touched last is on the device at the end, and so at home there; the judge has seen two periods.
    problem = chain(4, weight_bytes=5, state_bytes=20, on=machine(rate=100.0))
    tight = problem.with_budget(int(0.6 * peak_bytes(problem, keep_all.plan(problem))["hbm"]))
    homes = {problem.graph.storages[s].name: home for s, home in plan(tight, "deepum").home.items()}
    assert homes["s3"] == ("hbm",)
    assert homes["s0"] == ("dram",)


def test_the_least_budget_is_the_largest_op():
    with pytest.raises(InfeasibleBudget) as caught:
        plan(chain(5, on=machine(hbm=29)), "deepum")
    assert caught.value.least_bytes == 30


def test_degree_below_zero():
    with pytest.raises(BadInput):
        plan(chain(2), "deepum", degree=-1)
