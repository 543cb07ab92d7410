import random

import pytest
from problems import BACKWARD, FORWARD, UPDATE, GraphBuilder, chain, machine

from tierwise.errors import BadInput, InfeasibleBudget
from tierwise.ir import Copy, Role, peak_bytes
from tierwise.policies import keep_all, plan
from tierwise.policies.swapadvisor import _Memory, _Search
from tierwise.simulate import simulate


def copies(schedule) -> int:
    return sum(isinstance(step, Copy) for step in schedule.steps)


def late_updates(hbm: int):
    """Four weights whose gradients of 20 bytes all wait for updates at the end; each update could run right behind its gradient."""
    b = GraphBuilder()
    weights = [b.storage(f"w{i}", 1, Role.PARAM) for i in range(4)]
    grads = [b.storage(f"g{i}", 20, Role.GRAD) for i in range(4)]
    for weight, grad in zip(weights, grads, strict=True):
        b.op(f"b{weight}", BACKWARD, [weight], [grad])
    for weight, grad in zip(weights, grads, strict=True):
        b.op(f"u{weight}", UPDATE, [grad], [], mutates=(weight,))
    return b.problem(machine(hbm=hbm, rate=1.0))


def test_an_order_that_needs_no_copies_is_found():
    # In program order 84 bytes are needed; with each update behind its gradient 24 are.
    problem = late_updates(44)
    schedule = plan(problem, "swapadvisor")
    assert copies(schedule) == 0
    assert simulate(problem, schedule).seconds == 8
    as_written = plan(problem, "swapadvisor", population=2, max_generations=0)
    assert copies(as_written) == 0  # the eager order is one of the first parents


def test_the_search_is_never_worse_than_the_planner_alone():
    problem = chain(6, weight_bytes=6, state_bytes=12, on=machine(rate=20.0))
    tight = problem.with_budget(int(0.6 * peak_bytes(problem, keep_all.plan(problem))["hbm"]))
    alone = simulate(tight, plan(tight, "swapadvisor", max_generations=0)).seconds
    assert simulate(tight, plan(tight, "swapadvisor")).seconds <= alone


def test_seeds_give_runs_of_their_own_and_each_the_same_again():
    problem = chain(6, weight_bytes=6, state_bytes=12, on=machine(hbm=120, rate=3.0))
    found = [plan(problem, "swapadvisor", seed=seed) for seed in (0, 0, 1)]
    assert found[0] == found[1]
    assert found[0].notes[0].startswith("tried ")


def test_classes_with_the_least_bytes():
    # One op needs two of 10, another one of 12: apart they take 2 * 10 + 12, together 2 * 12.
    b = GraphBuilder()
    x, y, z = b.storage("x", 10, Role.ACTIVATION), b.storage("y", 10, Role.ACTIVATION), b.storage("z", 12, Role.ACTIVATION)
    b.op("f0", FORWARD, [], [x, y])
    b.op("f1", FORWARD, [], [z])
    problem = b.problem(machine(hbm=24), cyclic=False)
    memory = _Memory(problem)
    assert memory.sizes == [10, 12]
    assert memory.least_classes == (1, 1)
    assert memory.first_divisions() == [((1, 1), (0, 2))]
    assert _Memory(problem.with_budget(32)).first_divisions() == [((0, 1), (2, 1)), ((1, 1), (0, 2))]
    with pytest.raises(InfeasibleBudget) as caught:
        _Memory(problem.with_budget(23))
    assert caught.value.least_bytes == 24


def test_slots_are_within_the_budget_and_serve_every_op_whatever_is_bred():
    problem = chain(6, weight_bytes=6, state_bytes=12, on=machine(hbm=100))
    memory, dice = _Memory(problem), random.Random(1)
    mother = father = memory.first_divisions()[0]
    for _ in range(200):
        mother, father = memory.mutated(*mother, dice), memory.crossed(mother, father, dice)
        for classes, counts in (mother, father):
            slots = memory.slots(classes, counts)
            assert slots.nbytes <= 100
            assert all(klass >= rank for rank, klass in enumerate(classes))
            assert (memory._needed(classes) <= counts).all()


def test_orders_keep_every_dependency_whatever_is_bred():
    problem = chain(6, weight_bytes=6, on=machine(hbm=100))
    search = _Search(problem, random.Random(2), "dram")
    mother = father = tuple(range(len(problem.graph.ops)))
    for _ in range(50):
        mother, father = search._rebuild(mother), search._cross_orders(mother, father)
        for order in (mother, father):
            place = {op: at for at, op in enumerate(order)}
            assert len(place) == len(order)
            assert all(place[before] < place[op] for op, needed in enumerate(search.before) for before in needed)
    assert mother != tuple(range(len(problem.graph.ops)))


def test_the_least_budget_is_said_at_once():
    problem = chain(6, on=machine(hbm=20))
    with pytest.raises(InfeasibleBudget) as caught:
        plan(problem, "swapadvisor")
    assert caught.value.least_bytes == 30


def test_settings_that_make_no_sense():
    with pytest.raises(BadInput):
        plan(chain(2), "swapadvisor", population=1)
