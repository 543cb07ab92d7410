"""Which convolutions Winograd's transform fits, read from flops and bytes."""

from __future__ import annotations

import dataclasses

import pytest
from problems import BACKWARD, FORWARD, GraphBuilder, machine

from tierwise.ir import Processor, Role
from tierwise.policies._kernels import with_conv_kernels


def conv(window: int, stride: int = 1, *, precision: str = "fp32", tf32: float = 1e6):
    """A convolution of 8 samples of 4 channels of 6 by 6 into 16 channels, and its backward."""
    b = GraphBuilder()
    positions = 8 * (6 // stride) ** 2
    x, w = b.storage("x", 8 * 4 * 36 * 4, Role.INPUT), b.storage("w", 16 * 4 * window * 4, Role.PARAM)
    y, d = b.storage("y", positions * 16 * 4, Role.ACTIVATION), b.storage("d", positions * 16 * 4, Role.ACTIVATION)
    flops = 2 * positions * 16 * 4 * window
    b.op("conv", FORWARD, [x, w], [y], kind="conv2d", flops=flops, precision=precision, seconds=flops / 1e6)
    b.op("loss", BACKWARD, [y], [d], kind="loss")
    b.op("conv'", BACKWARD, [d, x, w], [b.storage("g", 16 * 4 * window * 4, Role.GRAD)], kind="conv2d_backward", flops=2 * flops, precision=precision,
         seconds=2 * flops / 1e6)  # fmt: skip
    gpu = Processor("gpu", "hbm", {"fp32": 1e6, "tf32": tf32}, bytes_per_second=1e9)
    return b.problem(dataclasses.replace(machine(), processors=(gpu, Processor("cpu", "dram"))))


def test_a_3_by_3_convolution_takes_a_quarter_of_the_products_and_a_workspace():
    problem = with_conv_kernels(conv(9))
    forward, backward = problem.costs.variants
    assert (problem.graph.ops[forward.op].name, problem.graph.ops[backward.op].name) == ("conv", "conv'")
    assert forward.workspace_bytes == backward.workspace_bytes == round(2.25 * (8 * 4 * 36 * 4 + 8 * 36 * 16 * 4))
    assert forward.seconds["gpu"] == pytest.approx(problem.seconds(0, "gpu") / 4)


@pytest.mark.parametrize(
    "problem", [conv(1), conv(25), conv(9, stride=2), conv(9, precision="tf32", tf32=8e6)], ids=["1x1", "5x5", "stride 2", "tf32"]
)
def test_others_keep_their_kernel(problem):
    assert with_conv_kernels(problem) is problem


def test_kernels_a_problem_brings_are_left_alone():
    once = with_conv_kernels(conv(9))
    assert with_conv_kernels(once) is once
