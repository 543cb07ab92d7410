import dataclasses

import pytest
from problems import chain, skip
from reading import copied, copied_before, recomputed

from tierwise.errors import InfeasibleBudget
from tierwise.ir import Compute, Variant
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


def test_what_room_is_left_goes_to_faster_kernels():
    # 60 bytes hold everything. A kernel that takes 20 bytes and a quarter of the time fits where at most 40 are held: in fwd0 to fwd2 (20, 30
    # and 40) and in bwd1 and bwd0 (batch, a0, d1, d0; then batch and d0). Each of these saves three quarters of a second.
    problem = chain(4)
    kernels = tuple(Variant(op.id, "fft", {"gpu": 0.25}, workspace_bytes=20) for op in problem.graph.ops if op.name != "loss")
    offered = dataclasses.replace(problem, costs=dataclasses.replace(problem.costs, variants=kernels)).with_budget(60)
    schedule = plan(offered, "superneurons")
    fast = [problem.graph.ops[step.op].name for step in schedule.steps if isinstance(step, Compute) and step.variant]
    assert fast == ["fwd0", "fwd1", "fwd2", "bwd1", "bwd0"]
    assert simulate(offered, schedule).seconds == 9 - 5 * 0.75
    assert simulate(offered, schedule).peak_bytes["hbm"] == 60
