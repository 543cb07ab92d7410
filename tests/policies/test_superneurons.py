import pytest
from problems import chain, skip
from reading import copied, copied_before, recomputed

from tierwise.errors import InfeasibleBudget
from tierwise.policies import plan
from tierwise.policies.superneurons import checkpoints
from tierwise.simulate import simulate


def test_cheap_layers_are_recomputed_and_costly_ones_kept():
    # conv a0, relu a1, conv a2, relu a3. a1 is made again for bwd2; a3 is read right away by the loss and stays.
    problem = chain(4, kinds=("conv2d", "relu"))
    schedule = plan(problem, "superneurons")
    assert recomputed(problem, schedule) == ["fwd1"]
    assert simulate(problem, schedule).seconds == 9 + 1
    assert simulate(problem, schedule).peak_bytes["hbm"] == 50  # at the loss: batch, a0, a2, a3, d3


def test_a_small_segment_is_computed_once():
    # The most a backward op touches is 30: its gradient, its activation and what it makes. Three relus of 10 are not more.
    problem = chain(5, kinds=("conv2d", "relu", "relu", "relu", "conv2d"))
    assert recomputed(problem, plan(problem, "superneurons")) == ["fwd1", "fwd2", "fwd3"]


def test_a_large_segment_is_computed_anew_for_every_layer():
    problem = chain(6, kinds=("conv2d", "relu", "relu", "relu", "relu", "conv2d"))
    assert recomputed(problem, plan(problem, "superneurons")) == [
        "fwd1", "fwd2", "fwd3", "fwd4", "fwd1", "fwd2", "fwd3", "fwd1", "fwd2", "fwd1"
    ]  # fmt: skip


def test_branches_part_and_meet_at_checkpoints():
    names = {storage.name: storage.id for storage in skip().graph.storages}
    assert checkpoints(skip().graph) == {names["a"], names["c"]}  # a is read by two layers, c comes from a convolution; b from a relu


def test_nothing_is_copied_until_bytes_run_out():
    problem = chain(4, kinds=("conv2d", "relu"))
    assert not copied(problem, plan(problem.with_budget(50), "superneurons"))
    # At the loss ten bytes are missing. The batch was used longest ago; it is back for bwd0, and the device waits a second each way.
    schedule = plan(problem.with_budget(40), "superneurons")
    assert copied_before(problem, schedule) == {"batch": "loss"}
    assert copied_before(problem, schedule, "dram") == {"batch": "bwd0"}
    assert simulate(problem.with_budget(40), schedule).seconds == 10 + 1 + 1


def test_the_next_checkpoint_is_fetched_while_one_layer_runs():
    problem = chain(6).with_budget(60)
    schedule = plan(problem, "superneurons")
    assert copied_before(problem, schedule) == {"batch": "fwd5", "a0": "loss"}
    assert copied_before(problem, schedule, "dram") == {"a0": "bwd2", "batch": "bwd1"}
    assert simulate(problem, schedule).seconds == 13 + 2
    assert simulate(problem, plan(problem, "superneurons", prefetch=False)).seconds == 13 + 2 + 2


def test_the_least_budget_is_what_one_op_touches():
    problem = chain(6)
    with pytest.raises(InfeasibleBudget) as caught:
        plan(problem.with_budget(20), "superneurons")
    assert caught.value.least_bytes == 30  # d5, a4 and d4
    assert simulate(problem.with_budget(30), plan(problem.with_budget(30), "superneurons")).peak_bytes["hbm"] == 30
