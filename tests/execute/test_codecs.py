"""Codecs on real tensors: exact ones give back every bit, of every dtype, shape and order; lossy ones say so and round no more than they must."""

from __future__ import annotations

import os
from math import inf, nan

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tierwise.errors import UnknownName
from tierwise.execute import codecs
from tierwise.execute.codecs import bits, encoded, pool_places, rounding, sparse_rows, zero_values

relaxed = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn)
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.fixture(params=["torch", pytest.param("kernels", marks=() if INTERPRETED else pytest.mark.gpu)], autouse=True)
def way(request, monkeypatch):
    """Every test by torch, and by the kernels where Triton can interpret them (TRITON_INTERPRET=1) or there is a GPU."""
    kernels = None
    if request.param == "kernels":
        kernels = pytest.importorskip("tierwise.execute.codecs.kernels", reason="needs Triton")
        if not kernels.triton.knobs.runtime.interpret and not torch.cuda.is_available():
            pytest.skip("needs a GPU, or TRITON_INTERPRET=1")
    for module in (bits, zero_values, sparse_rows, rounding):
        monkeypatch.setattr(module, "kernels_for", lambda tensor: kernels)
    return request.param


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@st.composite
def tensors(draw) -> torch.Tensor:
    """Any dtype and some of its strangest values, many zeros, sizes around the borders of blocks, in several orders."""
    size = draw(st.sampled_from(((), (0,), (1,), (7,), (8, 32), (257,), (3, 5, 7), (4096,), (4097,), (2, 3, 16, 45))))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    dtype = draw(st.sampled_from(DTYPES))
    raw = torch.randint(0, 256, (*size, dtype.itemsize), generator=generator, dtype=torch.uint8)
    raw[torch.rand(size, generator=generator) < draw(st.sampled_from((0.0, 0.5, 0.99, 1.0)))] = 0
    tensor = raw.view(dtype).view(size) if dtype is not torch.bool else raw.view(size) > 128
    if len(size) == 4 and draw(st.booleans()):
        tensor = tensor.to(memory_format=torch.channels_last)
    if len(size) >= 2 and draw(st.booleans()):
        tensor = tensor.transpose(0, 1)
    return tensor.to(device())


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(as_bytes(a), as_bytes(b))


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8) if tensor.numel() else tensor.new_empty(0, dtype=torch.uint8)


@pytest.mark.parametrize("codec", ["zvc", "csr"])
@relaxed
@given(tensor=tensors())
def test_exact_codecs_give_back_every_bit(way, codec, tensor):
    made = codecs.encode(tensor, codec)
    back = codecs.decode(made)
    assert same_bits(back, tensor)
    assert back.stride() == encoded.dense(tensor).stride()
    assert all(part.is_contiguous() and part.dim() == 1 for part in made.parts)


@relaxed
@given(tensor=tensors())
def test_torch_and_the_kernels_make_the_same_bytes(way, tensor):
    if way == "torch":
        pytest.skip("compared once")
    for module in (zero_values, sparse_rows):
        for ours, theirs in zip(module.encode(tensor).parts, module._encode(encoded.row(encoded.dense(tensor))), strict=True):
            assert torch.equal(ours, theirs)


def test_sizes_by_hand():
    tensor = torch.zeros(4096 + 8, dtype=torch.float32, device=device())
    tensor[::4] = 1.5  # 1026 of 4104 values, in two blocks and seventeen rows
    assert codecs.encode(tensor, "zvc").nbytes == 4104 // 8 + 1026 * 4 + 2 * 2
    assert codecs.encode(tensor, "csr").nbytes == 1026 * 5 + 17 * 2
    assert codecs.encode(tensor > 0, "bits").nbytes == 4104 // 8


def test_minus_zero_is_not_zero():
    tensor = torch.tensor([0.0, -0.0, float("nan"), float("inf")], device=device())
    assert codecs.encode(tensor, "zvc").parts[1].numel() == 3
    assert same_bits(codecs.decode(codecs.encode(tensor, "zvc")), tensor)


@relaxed
@given(flags=st.lists(st.booleans(), max_size=40))
def test_bits(way, flags):
    tensor = torch.tensor(flags, dtype=torch.bool, device=device())
    made = codecs.encode(tensor, "bits")
    assert made.nbytes == -(-len(flags) // 8)
    assert [made.parts[0][i // 8].item() >> i % 8 & 1 for i in range(len(flags))] == flags
    assert torch.equal(codecs.decode(made), tensor)


def test_bits_are_made_of_bools():
    with pytest.raises(TypeError, match=r"bits are made of bools, not of torch\.float32"):
        codecs.encode(torch.ones(3), "bits")


@pytest.mark.parametrize("dtype", FLOATS)
def test_signs_by_hand(dtype):
    tiny = torch.finfo(dtype).smallest_normal / 4
    output = torch.tensor([0.0, -0.0, nan, -nan, inf, -inf, tiny, -tiny, 1.0, -1.0, 0.0], dtype=dtype, device=device())
    assert bits.signs(output).parts[0].tolist() == [0b01011100, 0b001]
    assert bits.signs(output[:0]).parts[0].tolist() == []


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64])
def test_a_relus_backward_from_signs(dtype):
    x = torch.randn(3, 5, 33, 20, dtype=dtype, device=device())
    x[0, 0, 0, :3] = torch.tensor([nan, 0.0, -0.0], dtype=dtype)
    gradient = torch.randn_like(x)
    gradient[0, 0, 0, 3:13] = torch.tensor([-0.0, nan], dtype=dtype, device=device()).repeat(5)
    last = torch.channels_last
    # as torch keeps them, both channels-last, one of them, and a gradient that is one number for all
    for ours, theirs in ((x, gradient), (x.to(memory_format=last), gradient.to(memory_format=last)), (x.to(memory_format=last), gradient),
                         (x[:, ::2], gradient[:, ::2]), (x, gradient[0, 0, 0, 0].expand(x.shape)), (x[:0], gradient[:0])):  # fmt: skip
        output = torch.relu(ours)
        signs = bits.signs(output)
        assert signs.nbytes == -(-output.numel() // 8)
        made = bits.relu_backward(theirs, signs)
        assert same_bits(made, torch.where(output <= 0, torch.zeros_like(theirs), theirs))
        same = same_bits if output.is_cuda else same_but_for_nans  # on the CPU torch's own may make another NaN of one in 16 bits
        assert same(made, torch.ops.aten.threshold_backward(theirs, output, 0))


@pytest.mark.parametrize(("codec", "digits"), [("fp16", 11), ("bf16", 8), ("fp8", 4)])
@pytest.mark.parametrize("largest", [1e-3, 1.0, 1e6])
def test_rounding_is_no_worse_than_its_digits(codec, digits, largest):
    torch.manual_seed(0)
    tensor = torch.randn(4, 100, device=device()) * largest
    made = codecs.encode(tensor, codec)
    back = codecs.decode(made)
    assert back.dtype == tensor.dtype and back.shape == tensor.shape
    # Half a unit in the last place of numbers not far below the largest; smaller ones lose more, as they do in that type.
    large = tensor.abs() > tensor.abs().max() / 4
    assert ((back - tensor).abs()[large] <= tensor.abs()[large] * 2.0**-digits).all()
    assert made.nbytes == tensor.numel() * {"fp16": 2, "bf16": 2, "fp8": 1}[codec] + 4
    assert codec in codecs.LOSSY


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("codec", ["fp16", "fp8"])
def test_torch_and_the_kernels_round_alike(way, codec, dtype):
    if way == "torch":
        pytest.skip("compared once")
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32, device=device())  # all that 16 bits can be, and every 65536th fp32
    values = (every << 16).view(dtype) if dtype is torch.float32 else every.to(torch.int16).view(dtype)
    finite = values[values.isfinite()]
    # ties: fp8 has four digits, these have five
    ties = torch.arange(1, 32, dtype=dtype, device=device()).unsqueeze(1) * 2.0 ** torch.arange(-10, 4, device=device()).to(dtype)
    cases = [
        values,
        finite,
        *(finite[finite.abs() < most] for most in (3e-39, 1e-30, 1e-6, 1e-3, 3.0, 500.0)),
        ties.flatten(),
        values[:0],
        values[:1],
    ]
    cases += [torch.zeros(5, dtype=dtype, device=device()), finite[:24000].view(4, 25, 12, 20).to(memory_format=torch.channels_last), finite[::7]]
    for tensor in cases:
        made = codecs.encode(tensor, codec)
        flat = encoded.dense(tensor)
        rounded, scale = rounding._encode(flat.as_strided((flat.numel(),), (1,)), codec)
        assert torch.equal(made.parts[1], scale)
        if codec == "fp8":
            assert torch.equal(made.parts[0], rounded)
        else:
            assert same_but_for_nans(made.parts[0].view(torch.float16), rounded.view(torch.float16))
        assert same_but_for_nans(codecs.decode(made), rounding._decode(made))
        assert codecs.decode(made).stride() == flat.stride()
    # every number there is, of more digits than bf16 has
    narrow = (every.to(torch.int16) if codec == "fp16" else every[:256].to(torch.uint8)).view(torch.uint8)
    whole = encoded.Encoded(codec, (narrow, torch.full((1,), 0.5, device=device())), dtype, (65536 if codec == "fp16" else 256,), (1,))
    assert same_but_for_nans(codecs.decode(whole), rounding._decode(whole))


def same_but_for_nans(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Which NaN arithmetic makes of a NaN differs from device to device: a CPU keeps its sign and digits, a GPU does not."""
    return same_bits(torch.where(a.isnan(), nan, a), torch.where(b.isnan(), nan, b))


def test_fp8_of_numbers_whose_scale_is_beyond_fp16():
    tensor = torch.tensor([2.0**-20, -(2.0**-16), 0.0], dtype=torch.float16, device=device())
    made = codecs.encode(tensor, "fp8")
    assert made.parts[1].item() == 2.0**24  # 256 of 448
    assert torch.equal(codecs.decode(made), tensor)


def test_rounding_keeps_what_fits():
    tensor = torch.tensor([0.0, 1.0, -2.5, 448.0], device=device())
    for codec in codecs.LOSSY:
        assert torch.equal(codecs.decode(codecs.encode(tensor, codec)), tensor)
    strange = torch.tensor([float("nan"), float("inf"), 1.0], device=device())
    assert torch.equal(codecs.decode(codecs.encode(strange, "fp16"))[1:], strange[1:])
    assert codecs.decode(codecs.encode(strange, "fp8")).isnan().tolist() == [True, True, False]
    assert codecs.decode(codecs.encode(torch.zeros(0), "fp8")).shape == (0,)
    with pytest.raises(TypeError, match=r"fp8 rounds floating-point numbers, not torch\.int64"):
        codecs.encode(torch.ones(3, dtype=torch.int64), "fp8")


@relaxed
@given(
    size=st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(4, 9), st.integers(4, 9)),
    kernel=st.sampled_from(((2, 2), (3, 3), (4, 4), (2, 3))), stride=st.integers(1, 3), padding=st.sampled_from((0, 1)), seed=st.integers(0, 99),
)  # fmt: skip
def test_places_of_maxima(way, size, kernel, stride, padding, seed):
    x = torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(device())
    _, indices = torch.nn.functional.max_pool2d(x, kernel, stride, padding, return_indices=True)
    places = pool_places.encode(indices, size[-1], kernel, (stride, stride), (padding, padding))
    assert torch.equal(pool_places.decode(places), indices)
    assert places.nbytes == -(-indices.numel() // 2)


def test_a_window_too_large_for_four_bits():
    with pytest.raises(ValueError, match="a window of 5 by 5 has more than 16 values"):
        pool_places.encode(torch.zeros(1, 1, 2, 2, dtype=torch.int64), 9, (5, 5), (5, 5))


def test_unknown_codec():
    with pytest.raises(UnknownName, match="zvc"):
        codecs.encode(torch.ones(1), "zvcc")
