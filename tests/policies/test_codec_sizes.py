"""What a storage holds, by the op that made it, and what that is in each form."""

from __future__ import annotations

import dataclasses

import pytest
from problems import FORWARD, GraphBuilder, machine, relu_net

from tierwise.ir import Processor, Role
from tierwise.policies import _codecs
from tierwise.policies._codecs import Content, csr_bytes, narrowed_bytes, with_codecs, with_variants_on_codes, zvc_bytes


def made_by(*kinds: str, nbytes: int = 1024, precision: str = "fp32"):
    """A chain of such ops; pooling makes a quarter of the bytes, and indices."""
    b = GraphBuilder()
    at = b.storage("x", nbytes, Role.INPUT)
    for kind in kinds:
        nbytes = nbytes // 4 if kind == "max_pool2d" else nbytes
        writes = [b.storage(kind, nbytes, Role.ACTIVATION)]
        if kind == "max_pool2d":
            writes.append(b.storage("places", 2 * nbytes, Role.ACTIVATION))
        b.op(kind, FORWARD, [at], writes, kind=kind, precision=precision)
        at = writes[0]
    on = dataclasses.replace(machine(), processors=(Processor("gpu", "hbm", bytes_per_second=400.0), Processor("cpu", "dram")))
    return b.problem(on)


def test_densities_by_kind():
    known = _codecs.contents(made_by("conv2d", "relu", "max_pool2d").graph)
    assert {s: c.density for s, c in known.items()} == pytest.approx({1: 1.0, 2: 0.35, 3: 1 - 0.65**4})  # not of the indices
    assert known[3].elements == 64
    assert _codecs.contents(made_by("relu", precision="bf16").graph)[1] == Content(512, 2, 0.35)
    assert _codecs.contents(made_by("gelu").graph)[1].density == 1.0


def test_sizes_by_hand():
    half_zero = Content(elements=512, element_bytes=4, density=0.5)
    assert zvc_bytes(half_zero) == 64 + 1024  # a bit each, and 256 values
    assert csr_bytes(half_zero) == 256 * 5 + 2 * 2  # a byte and a value each, two rows
    assert narrowed_bytes(half_zero, 1) == 64
    assert narrowed_bytes(half_zero, 10) == 640


def test_published_ratio_of_cdma():
    relu = Content(10**6, 4, _codecs.RELU_DENSITY)
    assert 4 * 10**6 / zvc_bytes(relu) == pytest.approx(2.6, abs=0.05)


def test_a_form_that_is_hardly_smaller_is_no_form():
    sizes = {name: set(with_codecs(made_by("conv2d", "relu", "max_pool2d"), [name]).costs.codec_named[name].encoded_bytes)
             for name in ("zvc", "csr", "bit1", "argmax4", "fp8")}  # fmt: skip
    assert sizes == {"zvc": {2, 3}, "csr": {2}, "bit1": {2}, "argmax4": {4}, "fp8": {1, 2, 3}}


def test_rates_are_passes_over_memory():
    # 0.75 of 400 bytes a second; zvc reads all twice and writes 0.38: 300 / 2.38. Signs are written and never decoded.
    codecs = with_codecs(made_by("relu"), ["zvc", "bit1"]).costs.codec_named
    assert codecs["zvc"].encode_bytes_per_second == pytest.approx({"gpu": 300 / (2 + 0.38125)}, rel=1e-2)
    assert codecs["zvc"].decode_bytes_per_second == pytest.approx({"gpu": 300 / (1 + 0.38125)}, rel=1e-2)
    assert codecs["bit1"].encode_bytes_per_second == pytest.approx({"gpu": 300 / (1 + 1 / 32)})
    assert codecs["bit1"].decode_bytes_per_second == {}


def test_what_a_problem_brings_is_left_alone():
    problem = relu_net()
    assert with_codecs(problem, ["zvc", "csr"]) is problem
    assert with_codecs(problem, ["zvc", "fp8"]).costs.codec_named["zvc"] == problem.costs.codec_named["zvc"]


def test_backward_from_codes():
    problem = with_variants_on_codes(relu_net())
    found = {(problem.graph.ops[v.op].name, v.name): (v.reads, dict(v.forms)) for v in problem.costs.variants}
    r0, i0, r1, dp0 = (next(s.id for s in problem.graph.storages if s.name == name) for name in ("r0", "i0", "r1", "dp0"))
    assert found == {
        ("relu1'", "from signs"): (None, {r1: "bit1"}),
        ("pool0'", "from places"): ((dp0, i0), {i0: "argmax4"}),
        ("relu0'", "from signs"): (None, {r0: "bit1"}),
    }
    assert with_variants_on_codes(problem).costs.variants == problem.costs.variants
