"""verify=True: a plan that is right says nothing and changes nothing; one that is wrong is named by the region."""

from __future__ import annotations

import copy

import pytest
import torch
from blocks import ConvBlock, example
from fitting.training import Tower, batch, equal, fitting, forced, gradients, same, three_steps, tower, trained
from torch import nn

from tierwise.errors import NotExact
from tierwise.execute.homes import HostHome
from tierwise.fitting import plan_of
from tierwise.regions.compiled import CompiledOption

TIGHT = "0.9MiB"


def test_a_right_plan_is_verified_and_the_training_is_what_it_is_without():
    found = same(three_steps, tower(dropout=0.1), budget=TIGHT, verify=True)
    assert len(found._verified) == 1
    assert found.session.passes == 3  # the runs that compare are not counted


def test_buffers_are_left_as_they_were():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(ConvBlock() for _ in range(3))

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return x  # and no loss: a projection of it is compared

    def loop(model, optimizer):
        for _ in range(2):
            model(example(model.blocks[0])).square().mean().backward()
            yield gradients(model)

    torch.manual_seed(0)
    same(loop, Net(), budget="64MiB", verify=True)


def test_each_shape_is_verified_once():
    model = tower()
    with fitting(model, budget=TIGHT, verify=True) as found:
        for rows in (512, 256, 512):
            model(**batch(0, rows=rows)).backward()
            model.zero_grad()
        assert len(found._verified) == 2


def corrupt(monkeypatch, which: int) -> None:
    """Flip a byte of one of the copies back."""
    original, count = HostHome.read, iter(range(10_000))

    def read(home, destination, after):
        event = original(home, destination, after)
        if next(count) == which:
            event.wait()
            destination[7] ^= 16
        return event

    monkeypatch.setattr(HostHome, "read", read)


def test_a_corrupted_copy_is_found_and_named(monkeypatch):
    """When the backward of blocks.3 begins, what blocks.2 saved starts to come back: that is the first copy."""
    model = tower()
    before = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    with forced(monkeypatch, "keep", send=True), fitting(model, budget="64MiB", verify=True) as found:
        assert all(call.sent for call in found.prepare((), batch(0)).program.calls.values())
        corrupt(monkeypatch, which=0)
        with pytest.raises(NotExact, match=r"blocks\.2: the gradient of blocks\.2\.\w+\.\w+ is the first in backward that differs \(\d+ of"):
            model(**batch(0))
        assert gradients(model) == [None] * len(gradients(model))
        assert equal((dict(model.state_dict()), torch.get_rng_state()), (dict(before[0]), before[1]))
        monkeypatch.undo()
        model(**batch(0)).backward()  # verified again, and right


def test_an_option_that_computes_something_else_is_found_and_named(monkeypatch):
    original = CompiledOption.__call__
    model = tower()
    expected = trained(three_steps, copy.deepcopy(model))

    def call(option, module, /, *args, **kwargs):
        out = original(option, module, *args, **kwargs)
        return torch.nextafter(out, out + 1) if module is model.blocks[2] else out

    with fitting(model, budget=TIGHT, verify=True):
        monkeypatch.setattr(CompiledOption, "__call__", call)
        with pytest.raises(NotExact, match=r"plain eager checkpointing: blocks\.2 is the first region whose result is another"):
            model(**batch(0))
        monkeypatch.undo()
        assert equal(trained(three_steps, model), expected)


@pytest.mark.slow
def test_a_compiled_plan_is_compared_with_the_compiled_step_that_keeps_everything():
    torch.manual_seed(0)
    model = Tower(blocks=3)
    with fitting(model, budget="0.8MiB", verify=True, compile=True) as found:
        model(**batch(0)).backward()
        assert len(found._verified) == 1
        assert any(call.choice != "keep" or call.sent for call in plan_of(model).program.calls.values())
