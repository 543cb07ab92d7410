"""The budget holds: it is enforced on every allocation of the device, forward and backward, and what was predicted is what is held."""

from __future__ import annotations

import copy

import pytest
import torch
from blocks import BertBlock, ConvBlock, LlamaBlock, example
from fitting.training import batch, equal, fitting, forced, gradients, tower, trained
from torch import Tensor, nn

from tierwise.errors import InfeasibleBudget
from tierwise.execute.null_device import NullDevice
from tierwise.fitting import fit, plan_of

MIB = 1 << 20


class Layers(nn.Module):
    """Four blocks of a family, and a loss."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def layers(kind: type[nn.Module]) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = Layers(kind)
    return model, example(model.layers[0]).repeat_interleave(16, dim=0)


def steps(given: Tensor):
    def loop(model, optimizer):
        for _ in range(3):
            loss = model(given)
            loss.backward()
            yield loss
            yield gradients(model)
            optimizer.step()
            optimizer.zero_grad()
            del loss

    return loop


def held_within(model: nn.Module, given: Tensor, budget: int) -> NullDevice:
    """Train with every allocation beyond the budget refused; bit for bit the same as without it."""
    expected = trained(steps(given), copy.deepcopy(model))
    device = NullDevice(1 << 30)
    with fitting(model, budget=budget, device=device) as found:
        device.cap(budget)
        assert equal(trained(steps(given), model), expected)
        assert found.session.retries == device.out_of_memory_count() == 0
        assert 0 < device.memory().peak_allocated_bytes <= budget
        # What is predicted is an upper bound, and a near one; SGD's momentum, which fit was not told of, is on top.
        momentum = sum(weight.nbytes for weight in model.parameters())
        assert 0.8 * plan_of(model).peak_bytes <= device.memory().peak_allocated_bytes <= plan_of(model).peak_bytes + momentum
    return device


# Keeping everything takes 4.2 MB for Llama's blocks, 4.4 MB for BERT's with their dropout, 0.8 MB for the convolutions with their statistics.
@pytest.mark.parametrize(("kind", "budget"), [(LlamaBlock, 1_400_000), (BertBlock, 1_900_000), (ConvBlock, 620_000), (ConvBlock, 440_000)])
def test_it_holds(kind, budget):
    held_within(*layers(kind), budget)


@pytest.mark.parametrize(("choice", "send"), [("keep", False), ("keep", True), ("cheap", True), ("checkpoint", False), ("checkpoint", True)])
def test_what_is_predicted_is_what_is_held(choice, send, monkeypatch):
    """To the byte, but for what autograd frees a little earlier than a plan may count on."""
    model, optimizer = tower(), None
    device = NullDevice(1 << 30)
    with forced(monkeypatch, choice, send=send), fitting(model, budget="64MiB", device=device, optimizer=optimizer):
        given = batch(0)
        for _ in range(2):
            device.reset_peak()
            model(**given).backward()
            model.zero_grad()
        predicted, measured = plan_of(model).peak_bytes, device.memory().peak_allocated_bytes
        assert predicted - 0.02 * predicted <= measured <= predicted


def tower_steps(given):
    def loop(model, optimizer):
        for _ in range(2):
            model(**given).backward()
            yield gradients(model)
            optimizer.step()
            optimizer.zero_grad()

    return loop


@pytest.mark.parametrize("host", ["1GiB", "16KiB"])
def test_a_budget_below_the_minimum_names_it_and_the_minimum_works(host):
    model, given = tower(), batch(0)
    expected = trained(tower_steps(given), copy.deepcopy(model))
    with fitting(model, budget=100_000, host=host), pytest.raises(InfeasibleBudget, match=r"use budget='[0-9]+B' or more") as refused:
        model(**given)
    least = refused.value.least_bytes
    assert f"'{least}B'" in str(refused.value)
    device = NullDevice(1 << 30)
    with fitting(model, budget=least, host=host, device=device) as found:
        device.cap(least + sum(weight.nbytes for weight in model.parameters()))  # and momentum, which fit was not told of
        assert equal(trained(tower_steps(given), model), expected)
        assert found.below.host_bytes <= (16 << 10 if host == "16KiB" else 1 << 30)
        assert (found.below.copies.counts().sent_bytes > 0) == (host == "1GiB")


def test_a_budget_that_cannot_be_is_refused_at_once_when_there_is_an_example():
    model = tower()
    with pytest.raises(InfeasibleBudget):
        fit(model, budget=100_000, compile=False, example=batch(0))
    assert "forward" not in model.__dict__
    assert model(**batch(0)).requires_grad
