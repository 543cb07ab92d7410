import dataclasses

import pytest
from problems import BACKWARD, FORWARD, UPDATE, GraphBuilder, chain, machine

from tierwise.errors import InfeasibleBudget
from tierwise.ir import Graph, Region, RegionCall, Role
from tierwise.ir.text import schedule_lines
from tierwise.policies import plan
from tierwise.policies.sentinel import _Walk, layers_of
from tierwise.simulate import simulate

# Without regions every op of a chain is a layer. Activations, the batch and gradients, which live for two layers, live long: there is no reserve.


def lines(problem, **options) -> list[str]:
    return list(schedule_lines(problem.graph, plan(problem, "sentinel", **options)))


def test_an_interval_fetches_for_the_next_one_and_evicts_what_neither_uses():
    # Intervals of one op, room for four. fwd3 makes the fifth: the batch, needed last, goes at its start. bwd3 starts the fetch of a1 for bwd2.
    problem = chain(5, on=machine(hbm=40))
    found = lines(problem, interval=1)
    assert [line for line in found if line.startswith("copy")] == [
        "copy batch hbm -> dram", "copy a0 hbm -> dram", "copy a1 hbm -> dram",
        "copy a1 dram -> hbm", "copy a0 dram -> hbm", "copy batch dram -> hbm",
    ]  # fmt: skip
    assert found.index("copy batch hbm -> dram") == found.index("compute fwd3") - 2
    assert found.index("copy a1 dram -> hbm") == found.index("compute bwd3") - 2
    assert simulate(problem, plan(problem, "sentinel", interval=1)).seconds == 11 + 3  # each eviction is waited for, no fetch is


def test_longer_intervals_fetch_in_the_order_of_need():
    # Two ops each: the interval of bwd3 and bwd2 fetches for bwd1 and bwd0, and what it finds no room for comes later.
    problem = chain(6, on=machine(hbm=50))
    back = [line for line in lines(problem, interval=2) if line.endswith("dram -> hbm")]
    assert back == ["copy a1 dram -> hbm", "copy a0 dram -> hbm", "copy batch dram -> hbm"]


def test_the_length_with_the_least_exposed_seconds_is_found():
    problem = chain(8, on=machine(hbm=60, rate=20.0))
    found = simulate(problem, plan(problem, "sentinel")).seconds
    assert found <= min(simulate(problem, plan(problem, "sentinel", interval=length)).seconds for length in (1, 2, 4, 8))


def test_exposed_seconds_by_hand():
    # Intervals of one op of 1 s, copies of 2 s. Evictions at fwd3, fwd4 and the loss outlast each by 1 s, and so do the fetches at bwd3, bwd2, bwd1.
    problem = chain(5, on=machine(hbm=40, rate=5.0))
    walk = _Walk(problem, layers_of(problem.graph), 1)
    assert walk.fits
    assert walk.exposed_seconds == 3 + 3


def test_what_lives_within_a_layer_is_never_moved_and_has_its_reserve():
    # Two calls of a region. `inner` is made and read within the first, beside 5 bytes of workspace: 25 are reserved, and 60 - 25 left for the rest.
    b = GraphBuilder()
    x, inner, out, w = (
        b.storage("x", 10, Role.INPUT),
        b.storage("inner", 20, Role.ACTIVATION),
        b.storage("out", 10, Role.ACTIVATION),
        b.storage("w", 4, Role.PARAM),
    )
    b.op("f0", FORWARD, [x], [inner], region=0)
    b.op("f1", FORWARD, [inner], [out], region=0, workspace_bytes=5)
    b.op("f2", FORWARD, [out, w], [], region=1)
    b.op("b2", BACKWARD, [x], [], region=1)
    b.op("step", UPDATE, [], [], mutates=(w,))
    problem = b.problem(machine(hbm=60))
    regions = (Region(0, "Block", "blocks.0"),)
    graph = Graph(problem.graph.ops, problem.graph.storages, regions, (RegionCall(0, 0, "blocks.0"), RegionCall(1, 0, "blocks.1")))
    problem = dataclasses.replace(problem, graph=graph)
    layers = layers_of(graph)
    assert layers == [range(0, 2), range(2, 3), range(3, 4), range(4, 5)]  # the update is a layer of the phase of updates
    walk = _Walk(problem, layers, 1)
    assert walk._room == 35
    assert inner not in walk._used and set(walk._used) == {x, out, w}


def test_weights_are_at_home_where_the_next_step_needs_them():
    problem = chain(4, weight_bytes=10, state_bytes=20, on=machine(hbm=110, rate=100.0))
    homes = {problem.graph.storages[s].name: home for s, home in plan(problem, "sentinel").home.items()}
    assert homes["w0"] == ("hbm",)  # fetched ahead by the last interval of the step before
    assert ("dram",) in homes.values()


def test_the_least_budget_is_the_largest_op():
    with pytest.raises(InfeasibleBudget) as caught:
        plan(chain(5, on=machine(hbm=29)), "sentinel")
    assert caught.value.least_bytes == 30
