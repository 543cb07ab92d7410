import pytest
from problems import FORWARD, GraphBuilder, chain, machine

from tierwise.errors import BadInput, InfeasibleBudget
from tierwise.ir import Role
from tierwise.ir.text import schedule_lines
from tierwise.policies import keep_all, plan
from tierwise.simulate import simulate


def lines(problem, **options) -> list[str]:
    return list(schedule_lines(problem.graph, plan(problem, "oc_dnn", **options)))


def moves(problem, **options) -> list[str]:
    return [line for line in lines(problem, **options) if not line.startswith(("compute", "free"))]


def test_naive_is_faults_and_least_recently_used():
    problem = chain(5, on=machine(hbm=40))
    assert moves(problem, mode="naive") == [
        "copy batch hbm -> dram", "copy a0 hbm -> dram", "copy a1 hbm -> dram",
        "fault a1 dram -> hbm", "fault a0 dram -> hbm", "fault batch dram -> hbm",
    ]  # fmt: skip
    assert simulate(problem, plan(problem, "oc_dnn", mode="naive")).seconds == 11 + 3 + 3


def test_opt_sends_feature_maps_behind_their_last_use_and_fetches_one_op_ahead():
    problem = chain(5, on=machine(hbm=40))
    found = lines(problem)
    for name, op in (("batch", "fwd1"), ("a0", "fwd2"), ("a1", "fwd3"), ("a2", "fwd4")):
        assert found.index(f"copy {name} hbm -> dram") == found.index(f"compute {op}") - 1
    for name, op in (("a2", "bwd4"), ("a1", "bwd3"), ("a0", "bwd2"), ("batch", "bwd1")):
        assert found.index(f"compute {op}") - 3 < found.index(f"copy {name} dram -> hbm") < found.index(f"compute {op}")
    assert not any(line.startswith("fault") for line in found)
    assert simulate(problem, plan(problem, "oc_dnn")).seconds == 11


def test_everything_is_sent_although_less_would_do():
    # One byte too few: a single map would be enough, and all but the last leave. That is its weakness.
    problem = chain(5, on=machine(hbm=69))
    assert len([line for line in moves(problem) if "hbm -> dram" in line]) >= 4


def test_nothing_is_sent_if_all_fits():
    problem = chain(5, on=machine(hbm=70))
    assert plan(problem, "oc_dnn") == keep_all.plan(problem)


def test_a_weight_that_did_not_change_leaves_for_nothing():
    b = GraphBuilder()
    first, second = b.storage("first", 10, Role.PARAM), b.storage("second", 10, Role.PARAM)
    for i, weight in enumerate((first, second, first, second)):
        b.op(f"f{i}", FORWARD, [weight], [])
    problem = b.problem(machine(hbm=10), cyclic=False)
    found = moves(problem)
    # `second`, there when the step begins, has no copy yet and is written once; `first` is at home on the host and never is.
    assert [line for line in found if "hbm -> dram" in line] == ["copy second hbm -> dram"]
    assert len(found) == 5  # each op fetches its weight; there is no room to do so ahead


def test_the_least_budget_is_the_largest_op():
    with pytest.raises(InfeasibleBudget) as caught:
        plan(chain(5, on=machine(hbm=29)), "oc_dnn")
    assert caught.value.least_bytes == 30


def test_unknown_mode():
    with pytest.raises(BadInput, match="oc_dnn knows opt and naive"):
        plan(chain(2), "oc_dnn", mode="best")
