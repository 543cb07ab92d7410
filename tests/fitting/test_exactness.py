"""Every family of models under every choice, sent away and kept: loss, gradients, parameters, buffers and random state of three steps, to the bit.

In a model half of the calls send and half keep, and the other way round under the next choice. The models run one after the other, each
fitted once: what is compiled for a choice is used for its steps and dropped.
"""

from __future__ import annotations

import copy

import pytest
import torch
from fitting.training import equal, fitting, same, steps, three_steps, trained
from fitting.zoo import MODELS, around
from torch import nn

from tierwise.fitting import fitted, menus
from tierwise.ir import INPUTS, CallPlan, Program

MOST = 4  # keep, cheap, dear and checkpoint
FEWER = dict.fromkeys(("autocast", "lora", "lstm", "skip_connections", "t5"), (1, 3))  # a second of tracing for each choice of each class


def on(name, batch):
    def loss_of(model, number):
        with around(name):
            out = model(**batch(number))
        return out if isinstance(out, torch.Tensor) else out.loss

    return steps(loss_of)


def program_with(number: int):
    """Every call with this choice of its class, or its last; every second call sends what it saves and what it was given."""

    def program_for(prepared, *args, **options):
        calls = {}
        for call in prepared.menu.problem.graph.calls:
            if call.region in prepared.menu.choices:
                offered = prepared.menu.choices[call.region]
                choice = offered[min(number, len(offered) - 1)]
                sent = (*(value.name for value in choice.saved), *((INPUTS,) if choice.reads_inputs else ()))
                calls[call.id] = CallPlan(choice.name, sent if (call.id + number) % 2 else ())
        return prepared, Program(calls, "forced")

    return program_for


@pytest.mark.parametrize("name", MODELS)
def test_every_choice_has_the_bits_of_the_untouched_model(name, monkeypatch):
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    model.train()
    before = copy.deepcopy(model.state_dict())
    expected = trained(on(name, batch), copy.deepcopy(model))
    monkeypatch.setattr(menus, "MOST_CHOICES", MOST)
    used = set()
    with fitting(model, budget="1GiB") as found:
        for number in FEWER.get(name, range(MOST)):
            monkeypatch.setattr(fitted, "program_for", program_with(number))
            found.plans.clear()
            model.load_state_dict(before)
            measured = trained(on(name, batch), model)
            assert [place for place, (ours, theirs) in enumerate(zip(measured, expected, strict=True)) if not equal(ours, theirs)] == []
            used |= {(call.choice, bool(call.sent)) for call in found.current.program.calls.values()}
        assert "checkpoint" in {choice for choice, _ in used} and len({choice for choice, _ in used}) > 1
        assert {sends for _, sends in used} == {True, False}
        assert found.below.copies.counts().fetched_bytes > 0
        assert not [sentence for sentence in found.session.events.said if "runs as it is" in sentence]


class Twice(nn.Module):
    """Uses what it is given twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x):
        return torch.tanh(self.inner(x)) * x


class Forked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(8, 16)
        self.blocks = nn.ModuleList(Twice() for _ in range(4))

    def forward(self, x, target):
        x = self.enter(x)
        x = self.blocks[0](x) + self.blocks[1](x)
        return (self.blocks[3](self.blocks[2](x))[:, :4] - target).square().mean()


class Unsaved(Twice):
    """No op of it saves what it is given."""

    def forward(self, x):
        return x + self.inner(2.0 * x)


class Held(Forked):
    """The first block's input has a name until the end, as embeddings have in many models."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Unsaved() for _ in range(4))

    def forward(self, x, target):
        first = x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return (x[:, :4] - target).square().mean() + 0.0 * first.shape[0]


def test_where_gradients_would_be_added_in_another_order_the_block_runs_as_it_is():
    """A tensor that goes into two blocks, each of which uses it twice: eager adds ((a + b) + c) + d, regions (a + b) + (c + d)."""
    torch.manual_seed(0)
    found = same(three_steps, Forked(), budget="1GiB")
    assert {module for module, _ in found.current.plans} == {"blocks.2", "blocks.3"}
    assert [note for note in found.current.notes if note.startswith("blocks.0 (Twice) runs as it is: it uses enter.addmm several times")]


def test_who_only_holds_a_tensor_adds_nothing_to_its_gradient():
    torch.manual_seed(0)
    found = same(three_steps, Held(), budget="1GiB")
    assert {module for module, _ in found.current.plans} == {f"blocks.{number}" for number in range(4)}
