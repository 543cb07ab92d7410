"""A plan whose prediction was off is made again with what was measured, at most twice."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch
from fitting.training import equal, fitting, three_steps, tower, trained

from tierwise.fitting import fitted, plan_of
from tierwise.fitting.feedback import corrected, is_off
from tierwise.ir import Compute, Copy, Span


def slowed(plan, computes: float, copies: float):
    """The predicted step as if it had been measured, with everything slower by these factors."""
    spans = []
    for span in plan.predicted.spans:
        step = plan.image.schedule.steps[span.step]
        factor = computes if isinstance(step, Compute) else copies
        spans.append(Span(span.step, span.lane, span.start, span.start + factor * (span.end - span.start)))
    return replace(plan.predicted, spans=tuple(spans), seconds=2 * plan.predicted.seconds, measured=True)


def test_times_of_choices_and_rates_of_links_are_those_measured(monkeypatch):
    monkeypatch.setattr("tierwise.fitting.feedback.LEAST_COPY_BYTES", 0)
    model = tower()
    with fitting(model, budget="800KiB") as found:
        plan = found.prepare((), {"x": torch.randn(512, 8), "target": torch.randn(512, 4)})
        copies = [step for step in plan.image.schedule.steps if isinstance(step, Copy)]
        assert copies and is_off(plan.predicted, slowed(plan, 3.0, 1.0)) and not is_off(plan.predicted, plan.predicted)
        menu = corrected(plan, slowed(plan, 3.0, 2.0))
    for region, choices in plan.menu.choices.items():
        for before, after in zip(choices, menu.choices[region], strict=True):  # those that did not run by the same factor
            assert abs(after.seconds / before.seconds - 3) < 1e-6
    out, slower = plan.menu.problem.machine.link("hbm", "dram").lanes["out"], menu.problem.machine.link("hbm", "dram").lanes["out"]
    assert 0.3 * out < slower < 0.55 * out  # a latency is part of each copy


def test_it_happens_by_itself_and_stops(monkeypatch, caplog):
    monkeypatch.setattr(fitted, "LEARNS_ON", {"cpu"})

    def nine_steps(model, optimizer):
        for _ in range(3):
            yield from three_steps(model, optimizer)

    expected = trained(nine_steps, tower())
    model = tower()
    with caplog.at_level(logging.WARNING, "tierwise"), fitting(model, budget="800KiB"):
        seen = trained(nine_steps, model)
        assert plan_of(model).corrections >= 1
    said = [record.message for record in caplog.records if "planned again with what was measured" in record.message]
    assert 1 <= len(said) <= 2
    assert equal(seen, expected)
