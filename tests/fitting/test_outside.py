"""Tensors that ops outside of regions save are sent too, where they are too large to ignore."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tierwise.execute import passes
from tierwise.fitting import fit, fitted_of, plan_of, release
from tierwise.lower import image


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    """A stem of bare functions, whose results are larger than what a block saves."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Parameter(torch.randn(16, 128) * 0.1)
        self.back = nn.Parameter(torch.randn(128, 16) * 0.1)
        self.blocks = nn.ModuleList(Block() for _ in range(12))

    def forward(self, x, y):
        x = torch.tanh(torch.sigmoid(x @ self.stem).square()) @ self.back
        for block in self.blocks:
            x = block(x)
        return (x - y).square().mean()


def trained(model):
    seen = []
    for step in range(3):
        torch.manual_seed(step)
        loss = model(torch.randn(64, 16), torch.randn(64, 16))
        loss.backward()
        seen += [loss.detach().clone(), *(parameter.grad.clone() for parameter in model.parameters())]
        model.zero_grad()
    return seen


@pytest.fixture
def small_is_large(monkeypatch):
    monkeypatch.setattr(passes, "MIN_OUTSIDE_BYTES", 1 << 12)
    monkeypatch.setitem(image.__globals__, "MIN_OUTSIDE_BYTES", 1 << 12)  # the name of its module is the function's


def under(model, share):
    """The model trained within a share of what keeping everything takes; its plan, what it saw, and how much it sent."""
    whole = 1 << 30
    for part in (1.0, share):
        fit(model, budget=int(part * whole), compile=False)
        try:
            seen = trained(model)
            plan, sent = plan_of(model), fitted_of(model).session.copies.counts().sent_bytes
            whole = plan.keep_all_bytes
        finally:
            release(model)
    return plan, seen, sent


def test_they_leave_and_come_back_bit_for_bit(small_is_large):
    torch.manual_seed(0)
    untouched = Net()
    model = Net()
    model.load_state_dict(untouched.state_dict())
    expected = trained(untouched)
    plan, seen, sent = under(model, 0.9)
    assert plan.program.outside, plan.summary()
    assert all(map(torch.equal, expected, seen))
    assert sent >= 3 * 64 * 128 * 4  # at least one of the stem's tensors in each step


def test_small_ones_stay():
    torch.manual_seed(0)
    plan, _, _ = under(Net(), 0.9)
    assert not plan.program.outside
