from __future__ import annotations

import dataclasses

import pytest
from problems import machine, relu_net

from tierwise import policies
from tierwise.errors import BadInput
from tierwise.ir import Copy, Free, Problem
from tierwise.policies._gaps import Swap
from tierwise.policies.cswap import best_codec, exposed_seconds

R0 = 2  # 64 bytes: 34 as zvc, 44 as csr; written by relu0 (op 1), read by pool0 (op 2), then by pool0' (op 10). Coding takes 1 s each way.


def at(problem: Problem, **rates: float) -> Problem:
    """The problem with other rates of zvc."""
    codecs = tuple(dataclasses.replace(c, **{k: {"gpu": v} for k, v in rates.items()}) if c.name == "zvc" else c for c in problem.costs.codecs)
    return dataclasses.replace(problem, costs=dataclasses.replace(problem.costs, codecs=codecs))


def test_the_inequality_by_hand():
    # It leaves under pool0, 1 s, and is fetched with conv1', 3 s before pool0' reads it. Ten bytes a second.
    problem, swap = relu_net(), Swap(R0, "dram", 2, 3, 9)
    assert exposed_seconds(problem, swap, "") == pytest.approx((6.4 - 1) + (6.4 - 3))
    assert exposed_seconds(problem, swap, "zvc") == pytest.approx((3.4 + 1 - 1) + (3.4 + 1 - 3))
    assert exposed_seconds(problem, swap, "csr") == pytest.approx((4.4 + 1 - 1) + (4.4 + 1 - 3))
    assert best_codec(problem, swap, ("zvc", "csr")) == "zvc"


def test_no_codec_where_it_does_not_pay():
    problem, swap = relu_net(), Swap(R0, "dram", 2, 3, 9)
    slow = at(problem, encode_bytes_per_second=10.0)
    assert best_codec(slow, swap, ("zvc",)) == ""  # 6.4 s of packing save 3 s of the bus
    assert best_codec(relu_net(on=machine(rate=1000.0)), swap, ("zvc", "csr")) == ""  # copies are hidden as they are
    assert best_codec(at(problem, decode_bytes_per_second=64.0), Swap(3, "dram", 4, 5, 9), ("zvc",)) == ""  # p0 has no such form


def test_the_plan_swaps_as_vdnn_without_its_waits():
    prepared, schedule = policies.planned(relu_net(), "cswap", mode="all")
    assert not any(step.join for step in schedule.steps if isinstance(step, Free))
    sent = {prepared.graph.storages[s.storage].name: s.src_form for s in schedule.steps if isinstance(s, Copy) and s.dst == "dram"}
    assert sent == {"x": "", "r0": "zvc", "p0": ""}


def test_unknown_mode():
    with pytest.raises(BadInput, match="mode is 'most'; cswap knows none, conv, all and dyn"):
        policies.plan(relu_net(), "cswap", mode="most")
