"""Every family of models under every choice, sent away and kept: loss, gradients, parameters, buffers and random state of three steps, to the bit.

In a model half of the calls send and half keep, and the other way round under the next choice. The models run one after the other, each
fitted once: what is compiled for a choice is used for its steps and dropped.
"""

from __future__ import annotations

import copy

import pytest
import torch
from fitting.training import equal, fitting, gradients, trained
from fitting.zoo import MODELS, around

from tierwise.fitting import fitted, menus
from tierwise.ir import INPUTS, CallPlan, Program

MOST = 4  # keep, cheap, dear and checkpoint


def steps(name, batch):
    def loop(model, optimizer):
        for number in range(3):
            with around(name):
                out = model(**batch(number))
            loss = out if isinstance(out, torch.Tensor) else out.loss
            loss.backward()
            yield loss
            yield gradients(model)
            optimizer.step()
            optimizer.zero_grad()

    return loop


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
    expected = trained(steps(name, batch), copy.deepcopy(model))
    monkeypatch.setattr(menus, "MOST_CHOICES", MOST)
    used = set()
    with fitting(model, budget="1GiB") as found:
        for number in range(MOST):
            monkeypatch.setattr(fitted, "program_for", program_with(number))
            found.plans.clear()
            model.load_state_dict(before)
            measured = trained(steps(name, batch), model)
            assert [place for place, (ours, theirs) in enumerate(zip(measured, expected, strict=True)) if not equal(ours, theirs)] == []
            used |= {(call.choice, bool(call.sent)) for call in found.current.program.calls.values()}
        assert {choice for choice, _ in used} >= {"keep", "checkpoint"} and {sends for _, sends in used} == {True, False}
        assert found.below.copies.counts().fetched_bytes > 0
        assert not [sentence for sentence in found.session.events.said if "runs as it is" in sentence]
