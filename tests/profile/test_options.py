"""Timing an option leaves nothing behind, and its bytes are those that can be counted on paper. On the CPU, op by op."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from blocks import ConvBlock, LlamaBlock, example
from torch import Tensor, nn

from tierwise.errors import BadInput
from tierwise.profile.options import OptionTimes, option_times, time_option
from tierwise.regions import options
from tierwise.regions.compiled import compile_option
from tierwise.regions.joint import describe

pytestmark = pytest.mark.usefixtures("quick")


class Square(nn.Module):
    """y = (x * w)²: saves x, w and their product."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(size))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).square()


def test_bytes_counted_by_hand():
    block = Square(1000)
    x = torch.rand(1000, requires_grad=True)
    found = time_option(Square.forward, block, (x,))
    assert found.saved_bytes == 4000  # the product; x and the weight are there anyway, and the result is not saved
    assert found.workspace_forward_bytes == 0
    # backward of the square: 2 * product * tangent, with one intermediate of 4000 bytes, makes the product's gradient: 4000; then those of x and
    # of the weight, 8000, while the product's gradient is still there. Saved bytes were there before.
    assert found.workspace_backward_bytes == 4000
    assert found.forward_seconds > 0 and found.backward_seconds > 0


def test_nothing_is_left_behind():
    torch.manual_seed(3)
    block = ConvBlock()
    x = example(block).requires_grad_()
    given = torch.ones_like(block.conv1.weight)
    block.conv1.weight.grad = given
    buffers = {name: (buffer, buffer.clone(), buffer._version) for name, buffer in block.named_buffers()}
    before = x.detach().clone()
    state = torch.get_rng_state()
    time_option(ConvBlock.forward, block, (x,))
    assert torch.equal(torch.get_rng_state(), state)
    assert block.conv1.weight.grad is given and torch.equal(given, torch.ones_like(given))
    assert block.conv2.weight.grad is None and x.grad is None
    assert torch.equal(x, before) and x.grad_fn is None
    for name, buffer in block.named_buffers():
        same, value, version = buffers[name]
        assert buffer is same and torch.equal(buffer, value) and buffer._version == version


def test_options_of_a_block_save_what_they_promise():
    block = LlamaBlock()
    x = example(block).requires_grad_()
    found = options(describe(LlamaBlock.forward, block, (x,), compile=False))
    for option in (found[0], found[-1]):
        times = time_option(compile_option(LlamaBlock.forward, option, compile=False), block, (x,))
        assert times.saved_bytes == option.saved_bytes


def test_arguments_without_data_become_random_numbers():
    block = Square(1000)
    x = torch.empty(10, 1000, device="meta").requires_grad_()
    assert time_option(Square.forward, block, (x,)).saved_bytes == 40_000


def test_a_call_that_needs_no_gradient():
    block = Square(1000).requires_grad_(False)
    found = time_option(Square.forward, block, (torch.rand(1000),))
    assert (found.saved_bytes, found.workspace_backward_bytes) == (0, 0)
    assert found.workspace_forward_bytes == 4000  # the product, while its square is made


def test_a_module_without_data_is_refused():
    with pytest.raises(BadInput, match="Square whose parameters hold no data"):
        time_option(Square.forward, Square(4).to("meta"), (torch.rand(4),))


def test_times_are_measured_once_for_each_option_and_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    block = LlamaBlock()
    x = example(block).requires_grad_()
    keep, *_, checkpoint = options(describe(LlamaBlock.forward, block, (x,), compile=False))
    asked: list[object] = []

    def pretend(*call: object, settle: bool) -> OptionTimes:
        asked.append(settle)
        return OptionTimes(1.0, 2.0, 3.0, 4.0, len(asked), 6, 7)

    monkeypatch.setattr("tierwise.profile.options.time_option", pretend)
    cache = tmp_path / "options.json"

    def ask(option: object, x: Tensor, **how: bool) -> OptionTimes:
        return option_times(LlamaBlock.forward, block, (x,), option=option, cache=cache, **how)

    assert ask(keep, x) == ask(keep, x) == OptionTimes(1.0, 2.0, 3.0, 4.0, 1, 6, 7)
    assert ask(checkpoint, x).workspace_forward_bytes == 2
    assert ask(keep, torch.rand(3, 12, 32).requires_grad_()).workspace_forward_bytes == 3
    assert ask(keep, x.detach()).workspace_forward_bytes == 4  # without a gradient of its own
    assert len(json.loads(cache.read_text())) == len(asked) == 4
    assert ask(keep, x).forward_seconds == 2.0, "the GPU waits for the host"
    assert ask(keep, x, settle=False).workspace_forward_bytes == 1, "better than asked for"
    other = torch.rand(5, 12, 32).requires_grad_()
    assert ask(keep, other, settle=False) == ask(keep, other, settle=False) == OptionTimes(1.0, 2.0, 3.0, 4.0, 5, 6, 7)
    assert ask(keep, other).workspace_forward_bytes == 6, "what was timed in passing is not enough"
    assert asked == [True, True, True, True, False, True]


def test_an_option_nobody_named_cannot_be_remembered(tmp_path: Path):
    with pytest.raises(BadInput, match="pass option="):
        option_times(Square.forward, Square(4), (torch.rand(4),), cache=tmp_path / "options.json")
