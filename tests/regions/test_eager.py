"""Every option in eager: the bits of the untouched module, and the bytes it promises."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache

import pytest
import torch
from blocks import BertBlock, ConvBlock, ExpertsBlock, LlamaBlock, RestlessBlock, example, saved_tensors, storage_bytes, train
from torch import Tensor, nn

from tierwise.regions import Option, options, torch_compat
from tierwise.regions.compiled import CompiledOption, compile_option
from tierwise.regions.joint import describe

# Tracing takes a second or two for each: the two blocks with the most to choose from in full, of the others the ends and the middle.
BLOCKS = [(LlamaBlock, 6), (BertBlock, 6), (ConvBlock, 4), (ExpertsBlock, 3), (RestlessBlock, 2)]


def layers_of(kind: type[nn.Module]) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(kind() for _ in range(2))


@cache
def choices(kind: type[nn.Module], most: int) -> tuple[Option, ...]:
    block = layers_of(kind)[0]
    return options(describe(kind.forward, block, (example(block).requires_grad_(),), compile=False), most=most)


@cache
def runner(kind: type[nn.Module], option: Option) -> CompiledOption:
    return compile_option(kind.forward, option, compile=False)


def differing(kind: type[nn.Module], forward: Callable[..., Tensor]) -> list[int]:
    """Places in losses, gradients, buffers and random state of three steps that are not bit for bit those of the untouched module."""
    layers = layers_of(kind)
    expected, measured = train(copy.deepcopy(layers), kind.forward), train(layers, forward)
    return [place for place, (ours, theirs) in enumerate(zip(measured, expected, strict=True)) if not torch.equal(ours, theirs)]


@pytest.mark.parametrize(("kind", "most"), BLOCKS)
def test_every_option_has_the_bits_of_the_untouched_module(kind, most):
    found = choices(kind, most)
    assert len(found) == most
    for option in found:
        forward = runner(kind, option)
        assert differing(kind, forward) == [], option.name
        assert forward.compilations == 1


@pytest.mark.parametrize("kind", [BertBlock, LlamaBlock])
def test_in_16_bits_too(kind):
    """Where a number that dropout multiplies by is rounded makes a difference there."""
    block, found = kind().bfloat16(), []
    given = example(block).bfloat16()
    described = options(describe(kind.forward, block, (given.clone().requires_grad_(),), compile=False), most=2)
    for forward in (kind.forward, *(compile_option(kind.forward, option, compile=False) for option in described)):
        torch.manual_seed(1)
        x = given.clone().requires_grad_()
        result = forward(block, x)
        found.append([result.detach(), *torch.autograd.grad(result.float().square().mean(), (x, *block.parameters()))])
    assert len(found) == 3
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


@pytest.mark.parametrize(("kind", "most"), BLOCKS)
def test_every_option_saves_what_it_promises(kind, most):
    block = layers_of(kind)[0]
    x = example(block).requires_grad_()
    given = [x, *block.parameters(), *block.buffers()]
    for option in choices(kind, most):
        saved: list[Tensor] = []
        with saved_tensors(saved):
            y = runner(kind, option)(block, x)
        assert storage_bytes(saved, without=given) == option.saved_bytes + option.output_bytes, option.name
        assert storage_bytes(saved, without=[*given, y]) == option.saved_bytes, option.name
        assert option.output_bytes == 0 or any(tensor is y for tensor in saved), option.name


def test_an_option_that_keeps_everything_repeats_nothing():
    for kind, most in BLOCKS:
        assert choices(kind, most)[0].recomputed == ()


def test_to_checkpoint_a_llama_block_is_to_save_its_input_alone():
    checkpoint = choices(LlamaBlock, 6)[-1]
    assert (checkpoint.saved, checkpoint.saved_bytes, checkpoint.input_bytes) == ((), 0, 2 * 12 * 32 * 4)


def test_saved_tensors_may_travel_and_parameters_are_known_by_identity():
    option = choices(BertBlock, 6)[1]
    forward, layers = runner(BertBlock, option), layers_of(BertBlock)
    mine = [id(parameter) for parameter in layers.parameters()]
    seen = set()

    def pack(tensor: Tensor) -> Tensor:
        if id(tensor) in mine:
            seen.add(id(tensor))
            return tensor
        return tensor.detach().clone()

    def travelling(layer: nn.Module, x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            return forward(layer, x)

    expected = train(copy.deepcopy(layers), BertBlock.forward)
    assert all(map(torch.equal, train(layers, travelling), expected))
    assert len(seen) >= 2 * 4  # the weights of the four linear layers
    assert forward.compilations == 1  # hooks do not ask for another


def test_a_second_backward_through_the_same_graph():
    block = layers_of(LlamaBlock)[0]
    forward = runner(LlamaBlock, choices(LlamaBlock, 6)[2])
    forward(block, example(block).requires_grad_()).sum().backward()  # torch decides at the first one what may be overwritten
    block.zero_grad()
    y = forward(block, example(block).requires_grad_())
    y.square().mean().backward(retain_graph=True)
    first = [parameter.grad.clone() for parameter in block.parameters()]
    y.square().mean().backward()
    assert all(torch.equal(parameter.grad, 2 * grad) for parameter, grad in zip(block.parameters(), first, strict=True))


def test_what_is_computed_again_comes_just_before_its_use(monkeypatch):
    graphs = []
    run_boxed = torch_compat._boxed
    monkeypatch.setattr(torch_compat, "_boxed", lambda gm, inputs: (graphs.append([node.name for node in gm.graph.nodes]), run_boxed(gm, inputs))[1])
    block = layers_of(LlamaBlock)[0]
    joint = describe(LlamaBlock.forward, block, (example(block).requires_grad_(),), compile=False)
    option = options(joint)[1]
    compile_option(LlamaBlock.forward, option, compile=False)(block, example(block).requires_grad_()).sum().backward()
    _, backward = graphs
    first = {label: min(backward.index(name) for name in option.recomputed if joint.named[name].label == label) for label in ("norm1", "norm2")}
    between = backward[first["norm2"] : first["norm1"]]
    assert sum(name.startswith("mm") for name in between) >= 6  # all products of the feed-forward half's backward: three weights, three inputs


def test_without_gradients_the_forward_runs_as_it_is():
    block = layers_of(ConvBlock)[0].eval()
    forward = compile_option(ConvBlock.forward, choices(ConvBlock, 4)[1], compile=False)
    with torch.no_grad():
        assert torch.equal(forward(block, example(block)), block(example(block)))
    assert forward.compilations == 0
