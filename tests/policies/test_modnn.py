from __future__ import annotations

import dataclasses

import pytest
from problems import BACKWARD, FORWARD, GraphBuilder, machine

from tierwise import policies
from tierwise.errors import BadInput, InfeasibleBudget, NotExecutable
from tierwise.ir import Compute, Copy, Costs, Role, Variant, peak_bytes
from tierwise.policies import modnn
from tierwise.simulate import simulate


def net(layers: int = 4, on=None):
    """conv and relu in turn, 16 bytes each, no weights: a piece of a layer can be as small as one likes."""
    b = GraphBuilder()
    at = b.storage("x", 16, Role.INPUT)
    made = []
    for i in range(layers):
        kind = ("conv2d", "relu")[i % 2]
        made.append((at, b.storage(f"a{i}", 16, Role.ACTIVATION), kind))
        b.op(f"fwd{i}", FORWARD, [at], [made[-1][1]], kind=kind)
        at = made[-1][1]
    grad = b.storage("d", 16, Role.ACTIVATION)
    b.op("loss", BACKWARD, [at], [grad], kind="loss")
    for i, (inputs, _, kind) in reversed(list(enumerate(made))):
        grad, before = b.storage(f"d{i}", 16, Role.ACTIVATION), grad
        b.op(f"bwd{i}", BACKWARD, [before, inputs], [grad], kind=f"{kind}_backward")
    return b.problem(on or machine(rate=100.0))


def least(problem) -> int:
    return peak_bytes(problem, policies.load("modnn").build(problem, modnn._away(problem, "dram")))["hbm"]


def test_the_batch_stays_whole_while_it_fits():
    problem = net()
    assert modnn.prepare(problem) is problem
    at_least = least(problem)
    assert at_least == 48  # an op's input, its gradient and what it writes
    assert modnn.prepare(problem.with_budget(at_least)).graph is problem.graph


def test_as_few_pieces_as_fit():
    problem = net()
    in_two = modnn.prepare(problem.with_budget(47))
    assert {op.name.rpartition("/")[2] for op in in_two.graph.ops if "/" in op.name} == {"2"}
    prepared, schedule = policies.planned(problem.with_budget(47), "modnn")
    assert peak_bytes(prepared, schedule)["hbm"] <= 47
    with pytest.raises(NotExecutable, match="modnn plans a step of its own making"):
        policies.plan(problem.with_budget(47), "modnn")


def test_the_smallest_budget_is_named_and_works():
    with pytest.raises(InfeasibleBudget) as caught:
        policies.planned(net().with_budget(5), "modnn")
    assert caught.value.least_bytes is not None
    policies.planned(net().with_budget(caught.value.least_bytes), "modnn")


def test_room_is_spent_on_what_is_hidden_least():
    # 96 bytes hold everything but one: what is idle the shortest time is kept, the batch's input goes.
    problem = net()
    schedule = policies.plan(problem.with_budget(95), "modnn")
    assert {problem.graph.storages[s.storage].name for s in schedule.steps if isinstance(s, Copy)} == {"x"}


def test_fetches_come_early_where_there_is_room():
    problem = net(on=machine(rate=4.0)).with_budget(72)  # a copy takes four ops
    schedule = policies.plan(problem, "modnn")
    just_in_time = policies.load("modnn").build(problem, modnn._away(problem, "dram"))
    assert simulate(problem, schedule).seconds < simulate(problem, just_in_time).seconds


def test_kernels_take_what_room_is_left():
    problem = net()
    fast = Variant(0, "fft", {"gpu": 0.25}, workspace_bytes=10)
    problem = dataclasses.replace(problem, costs=Costs(problem.costs.op_seconds, variants=(fast,)))
    assert policies.plan(problem, "modnn").steps[0] == Compute(0, variant="fft")
    tight = policies.plan(problem.with_budget(48), "modnn")
    assert tight.steps[0] == Compute(0, variant="fft")  # only x and a0 are there when fwd0 runs: 32 of 48 bytes


def test_pieces_by_hand():
    assert len(modnn.prepare(net(), pieces=4).graph.ops) > len(net().graph.ops)
    assert modnn.prepare(net(), pieces=1).graph == net().graph
    with pytest.raises(BadInput, match="pieces is -1; it is a number of sub-batches"):
        policies.planned(net(), "modnn", pieces=-1)
