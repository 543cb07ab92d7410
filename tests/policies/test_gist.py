from __future__ import annotations

import dataclasses

import pytest
from interpreter import run_program, run_schedule
from problems import machine, relu_net

from tierwise import policies
from tierwise.errors import BadInput
from tierwise.ir import peak_bytes
from tierwise.ir.text import schedule_lines
from tierwise.policies import gist, keep_all


def lines(problem, **options) -> list[str]:
    prepared, schedule = policies.planned(problem, "gist", **options)
    return list(schedule_lines(prepared.graph, schedule))


def tight(problem=None):
    problem = problem or relu_net()
    return problem.with_budget(peak_bytes(problem, keep_all.plan(problem))["hbm"] - 1)


def test_signs_for_the_pool_places_of_maxima_and_sparse_rows_for_the_conv():
    assert lines(tight()) == [
        "compute conv0", "compute relu0", "compute pool0",
        "encode r0 in hbm as bit1", "encode i0 in hbm as argmax4", "free r0 hbm", "free i0 hbm",
        "compute conv1", "compute relu1", "free c1 hbm", "compute conv2", "encode r1 in hbm as csr", "free r1 hbm",
        "compute loss", "free c2 hbm",
        "decode r1 in hbm as csr", "free r1 hbm as csr", "compute conv2'", "free dc2 hbm",
        "compute relu1'", "free r1 hbm", "free dr1 hbm", "compute conv1'", "free p0 hbm", "free dc1 hbm",
        "compute pool0' by from places", "free i0 hbm as argmax4", "free dp0 hbm",
        "compute relu0' by from signs", "free r0 hbm as bit1", "free dr0 hbm", "compute conv0'", "free x hbm", "free dc0 hbm",
        "compute step", "free g hbm",
    ]  # fmt: skip


def test_nothing_is_encoded_that_fits():
    assert not any("encode" in line for line in lines(relu_net()))


def test_what_is_left_is_rounded_only_if_asked_for():
    rounded = lines(tight(), dpr="fp16")
    assert "encode p0 in hbm as fp16" in rounded  # pooled and dense: nothing exact fits it
    assert not any("fp16" in line for line in lines(tight()))
    problem, schedule = policies.planned(tight(), "gist", dpr="fp16")
    assert run_schedule(problem, schedule, 1) != run_program(problem.graph, 1)  # the weight is another one in the end
    assert run_schedule(problem, schedule, 1, rounded=True) == run_program(problem.graph, 1)


def test_without_rates_nothing_can_be_encoded():
    problem = relu_net(on=machine())
    bare = dataclasses.replace(problem, costs=dataclasses.replace(problem.costs, codecs=()))
    assert gist.prepare(bare).costs.codec_named["bit1"].encode_bytes_per_second == {}
    assert lines(bare) == lines(bare.with_budget(10_000))


def test_a_relu_whose_output_a_conv_needs_keeps_its_numbers():
    prepared = gist.prepare(relu_net())
    chosen = gist._variants(prepared)
    assert sorted(prepared.graph.ops[op].name for op in chosen) == ["pool0'", "relu0'"]


def test_unknown_rounding():
    with pytest.raises(BadInput, match="dpr is 'fp12'; gist knows none, fp16, fp10, fp8"):
        policies.plan(relu_net(), "gist", dpr="fp12")
