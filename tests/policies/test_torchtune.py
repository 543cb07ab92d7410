import pytest
from problems import chain, machine
from reading import copied, copied_before, recomputed
from transformer import kept_for_backward, transformer

from tierwise.errors import BadInput, InfeasibleBudget
from tierwise.ir import Compute, Free, peak_bytes
from tierwise.policies import plan
from tierwise.simulate import simulate


def step(layers: int = 8, mode: str = "offload", rate: float = 10.0, **options):
    problem = transformer(layers, on=machine(rate=rate))
    return problem, plan(problem, "torchtune", mode=mode, min_bytes=1, **options)


def test_checkpoints_keep_the_inputs_of_layers():
    problem, schedule = step(mode="checkpoint")
    assert kept_for_backward(problem, schedule) == 8 * 2
    assert not copied(problem, schedule)


def test_inputs_leave_when_the_second_after_them_is_saved():
    problem, schedule = step(stash=2)
    assert copied(problem, schedule) == ["x", "z.0", "z.1", "z.2", "z.3", "z.4", "z.5"]
    freed = {problem.graph.storages[s.storage].name: place for place, s in enumerate(schedule.steps) if isinstance(s, Free) and s.join}
    ran = {problem.graph.ops[s.op].name: place for place, s in reversed(list(enumerate(schedule.steps))) if isinstance(s, Compute)}
    assert ran["drop1.2"] < freed["x"] < ran["add1.2"]  # add1 is the last to read and save a layer's input
    assert ran["drop1.3"] < freed["z.0"] < ran["add1.3"]


def test_backward_takes_what_is_left_in_the_stash():
    problem, schedule = step(stash=2)
    assert kept_for_backward(problem, schedule) == 2 * 2  # z.5 and z.6; z.6 is used at once, z.5 goes and comes back
    assert copied(problem, schedule, "dram") == ["z.5", "z.4", "z.3", "z.2", "z.1", "z.0", "x"]


def test_what_a_layer_needs_is_fetched_while_the_one_behind_it_runs():
    problem, schedule = step(stash=2)
    assert copied_before(problem, schedule, "dram")["z.3"] == "norm1.5"  # layer 4's input, when layer 5 begins, again, with norm1.5


def test_a_slow_link_holds_forward_up():
    # Two bytes at 0.05 a second: 40 s a copy against 16.25 s a layer.
    problem, schedule = step(rate=0.05, stash=1)
    fast, plain = step(rate=10.0, stash=1)
    assert simulate(problem, schedule).seconds > simulate(fast, plain).seconds + 4 * 40
    assert simulate(fast, plain).seconds == simulate(*step(mode="checkpoint")).seconds


def test_small_tensors_stay():
    problem = transformer(8)
    assert not copied(problem, plan(problem, "torchtune", mode="offload"))  # 1024 bytes and more only


def test_auto_takes_the_first_rung_that_fits():
    problem = transformer(8, unit=1024, on=machine(hbm=10**6, dram=10**6))
    needs = {mode: peak_bytes(problem, plan(problem, "torchtune", mode=mode))["hbm"] for mode in ("none", "checkpoint", "offload")}
    assert needs["none"] > needs["checkpoint"] > needs["offload"]
    assert recomputed(problem, plan(problem.with_budget(needs["none"]), "torchtune")) == []
    assert not copied(problem, plan(problem.with_budget(needs["checkpoint"]), "torchtune"))
    assert copied(problem, plan(problem.with_budget(needs["checkpoint"] - 1), "torchtune"))
    with pytest.raises(InfeasibleBudget) as caught:
        plan(problem.with_budget(needs["offload"] - 1), "torchtune")
    assert caught.value.least_bytes == needs["offload"]


def test_unknown_words():
    with pytest.raises(BadInput, match="mode is 'all'; torchtune knows none, checkpoint, offload and auto"):
        plan(chain(2), "torchtune", mode="all")
    with pytest.raises(BadInput, match="stash is 0; give at least 1"):
        plan(chain(2), "torchtune", stash=0)
