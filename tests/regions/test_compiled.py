"""Options through Inductor: bit-equal to each other and to plain torch.compile, one compilation for all layers. Slow: a compiler runs."""

from __future__ import annotations

import copy

import pytest
import torch
from blocks import GatedBlock, saved_tensors, storage_bytes, train
from torch import Tensor, nn

from tierwise.regions import Kind, options
from tierwise.regions.compiled import compile_option, compiled_together
from tierwise.regions.joint import describe


@pytest.mark.slow
def test_keeping_and_recomputing_give_the_same_bits():
    torch.manual_seed(0)
    layers = nn.ModuleList(GatedBlock() for _ in range(3))
    x = torch.randn(2, 12, 32, requires_grad=True)
    joint = describe(GatedBlock.forward, layers[0], (x,))
    keep, *_, checkpoint = options(joint)
    statistics = {value.name for value in joint.values if value.kind is Kind.REDUCTION}
    assert statistics and not statistics & set(checkpoint.recomputed)
    results = []
    for option in (keep, checkpoint):
        forward = compile_option(GatedBlock.forward, option)
        results.append(train(copy.deepcopy(layers), forward))
        saved: list[Tensor] = []
        with saved_tensors(saved):
            y = forward(layers[0], x)
        assert storage_bytes(saved, without=[x, y, *layers[0].parameters()]) == option.saved_bytes
        assert sum(any(tensor is parameter for tensor in saved) for parameter in layers[0].parameters()) >= 3
        assert forward.compilations == 1
    assert all(map(torch.equal, *results))
    assert checkpoint.saved_bytes < keep.saved_bytes / 20


@pytest.mark.slow
def test_a_second_backward_where_nothing_is_donated():
    torch.manual_seed(0)
    block = GatedBlock()
    x = torch.randn(2, 12, 32, requires_grad=True)
    forward = compile_option(GatedBlock.forward, options(describe(GatedBlock.forward, block, (x,)))[-1], donate=False)
    with compiled_together() as together:  # compiled first, and run when all kernels are there
        together.compile(forward, block, (x,), {})
    assert forward.compilations == 1 and all(parameter.grad is None for parameter in block.parameters())
    forward(block, x).square().mean().backward()
    assert forward.compilations == 1
    block.zero_grad()
    y = forward(block, x)
    y.square().mean().backward(retain_graph=True)
    first = [parameter.grad.clone() for parameter in block.parameters()]
    y.square().mean().backward()
    assert all(torch.equal(parameter.grad, 2 * grad) for parameter, grad in zip(block.parameters(), first, strict=True))
