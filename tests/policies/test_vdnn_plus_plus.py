from __future__ import annotations

import dataclasses

import pytest
from problems import chain, machine, relu_net
from reading import copied

from tierwise import policies
from tierwise.errors import BadInput
from tierwise.ir import Codec, Copy, Costs, Free, peak_bytes
from tierwise.simulate import simulate


def test_it_is_vdnn_without_the_waits():
    problem = chain(8)
    with_joins, without = policies.plan(problem, "vdnn", mode="all"), policies.plan(problem, "vdnn_plus_plus", mode="all")
    assert [step for step in without.steps if isinstance(step, Copy)] == [step for step in with_joins.steps if isinstance(step, Copy)]
    assert not any(step.join for step in without.steps if isinstance(step, Free))
    slow = chain(8, on=machine(rate=5.0))  # a copy takes two ops: vDNN stands still for one of them at each layer
    assert simulate(slow, policies.plan(slow, "vdnn_plus_plus", mode="all")).seconds < simulate(slow, policies.plan(slow, "vdnn", mode="all")).seconds


def test_every_second_convolution_comes_before_all_of_them():
    problem = chain(8)
    assert copied(problem, policies.plan(problem, "vdnn_plus_plus", mode="conv")) == ["batch", *(f"a{i}" for i in range(6))]
    half = policies.plan(problem, "vdnn_plus_plus", mode="alternate")
    assert copied(problem, half) == ["batch", "a1", "a3", "a5"]
    assert policies.plan(problem.with_budget(peak_bytes(problem, half)["hbm"]), "vdnn_plus_plus") == half


def coded(rate: float):
    """A chain whose activations the cpu halves at `rate` bytes a second; copies take one op."""
    problem = chain(12)
    sizes = {s.id: 5 for s in problem.graph.storages}
    return dataclasses.replace(problem, costs=Costs(problem.costs.op_seconds, (Codec("zvc", sizes, {"cpu": rate}, {"cpu": rate}),)))


def test_the_cpu_halves_what_lies_in_host_memory():
    problem = coded(10.0)
    plain = policies.plan(problem, "vdnn_plus_plus", mode="all")
    packed = policies.plan(problem, "vdnn_plus_plus", mode="all", compress=True)
    assert peak_bytes(problem, plain)["dram"] == 110  # batch and a0 to a9
    assert peak_bytes(problem, packed)["dram"] < 90
    assert simulate(problem, packed).seconds == simulate(problem, plain).seconds  # what it has no time for it leaves alone
    coding = [step for step in packed.steps if isinstance(step, Copy) and step.src == step.dst]
    assert {step.src for step in coding} == {"dram"} and len(coding) >= 8


def test_what_would_come_late_is_not_compressed():
    problem = coded(0.5)  # twenty seconds each way
    assert policies.plan(problem, "vdnn_plus_plus", mode="all", compress=True) == policies.plan(problem, "vdnn_plus_plus", mode="all")


def test_unknown_mode():
    with pytest.raises(BadInput, match="mode is 'most'; vdnn_plus_plus knows none, alternate, conv, all and dyn"):
        policies.plan(relu_net(), "vdnn_plus_plus", mode="most")
