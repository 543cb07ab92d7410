from __future__ import annotations

import pytest
from problems import chain

from tierwise import policies
from tierwise.errors import BadInput, NotExecutable
from tierwise.ir import Copy
from tierwise.ir.text import graph_lines
from tierwise.policies import zenflow
from tierwise.simulate import simulate


def one_layer(cpu_seconds: float = 2.0):
    return chain(1, weight_bytes=1000, state_bytes=2000, cpu_update_seconds=cpu_seconds)


def test_each_update_is_cut_in_two():
    graph = zenflow.prepare(one_layer()).graph
    assert list(graph_lines(graph))[3:] == [
        "3 update step0 apply: w0 fresh columns, w0 -> w0!",
        "4 update step0 hot: g0, w0, s0 -> w0!, s0!",
        "5 update step0 select: g0 -> w0 cold gradient",
        "6 update step0 cold: w0 cold gradient, w0 summed gradient, s0 cold -> w0 fresh columns, w0 summed gradient!, s0 cold!",
    ]
    sizes = {s.name: s.nbytes for s in graph.storages}
    assert (sizes["s0"], sizes["s0 cold"]) == (200, 1800)  # a tenth of the columns is hot
    assert (sizes["w0 cold gradient"], sizes["w0 fresh columns"]) == (900, 225)  # a quarter of the cold columns comes back each step


def test_traffic_is_what_the_authors_say():
    # 1.13 times the model a step, against twice for ZeRO-Offload (DeepSpeed's page on ZenFlow).
    problem, schedule = policies.planned(one_layer(), "zenflow")
    moved = sum(problem.graph.storages[s.storage].nbytes for s in schedule.steps if isinstance(s, Copy))
    assert moved / 1000 == 1.125
    plain = policies.plan(one_layer(), "zero_offload")
    assert sum(one_layer().graph.storages[s.storage].nbytes for s in plain.steps if isinstance(s, Copy)) / 1000 == 2


def test_the_cpu_works_for_the_next_step_and_the_device_does_not_wait():
    # Of the cpu's 3 s, 0.9 are for the cold columns: a quarter of an update each step, and adding up.
    slow = chain(1, weight_bytes=100, state_bytes=200, cpu_update_seconds=3.0)
    problem, schedule = policies.planned(slow, "zenflow")
    assert simulate(problem, schedule).seconds < simulate(slow, policies.plan(slow, "zero_offload")).seconds
    cold = next(op for op in problem.graph.ops if op.name == "step0 cold")
    assert problem.seconds(cold.id, "cpu") == pytest.approx(3.0 * 0.9 * (1 / 4 + 10 / 28))


def test_it_is_another_step():
    with pytest.raises(NotExecutable, match="zenflow plans a step of its own making"):
        policies.plan(one_layer(), "zenflow")
    assert policies.card("zenflow").exactness.startswith("lossy")


def test_options_that_make_no_sense():
    with pytest.raises(BadInput, match="ratio is 2 and interval 4"):
        policies.planned(one_layer(), "zenflow", ratio=2)
