"""The device is full although the plan fits, because somebody else took memory: the cap of the null device is lower than the budget."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from fitting.training import ROWS, WIDTH, batch, equal, fitting, forced, gradients, three_steps, tower, trained

from tierwise.errors import OutOfDeviceMemory
from tierwise.execute.null_device import NullDevice
from tierwise.fitting import plan_of, stats

INPUT = ROWS * WIDTH * 4
ONE_BLOCK = 9 * INPUT  # what a block that keeps everything sends away: what it was given, and both sides of the activation function


def test_a_region_that_finds_it_full_runs_again_after_what_has_left_is_let_go(monkeypatch):
    """Blocks hold what they have sent until three blocks later; with memory for one less, the third finds it full. Dropout draws the same."""
    model = tower(dropout=0.1)
    expected = trained(three_steps, copy.deepcopy(model))
    device = NullDevice(1 << 30)
    with forced(monkeypatch, "keep", send=True, release=3), fitting(model, budget="64MiB", device=device) as found:
        peak = found.prepare((), batch(0)).peak_bytes
        device.cap(peak - ONE_BLOCK)
        assert equal(trained(three_steps, model), expected)
        assert found.session.retries > 0
        assert device.memory().peak_allocated_bytes <= peak - ONE_BLOCK
    assert [sentence for sentence in found.session.events.said if "ran out of memory in blocks" in sentence and "it runs again" in sentence]


def test_the_next_step_is_planned_for_what_was_there(caplog):
    model = tower()
    given = batch(1)
    expected = trained(lambda model, _: iter([model(**given).backward(), gradients(model)]), copy.deepcopy(model))
    device = NullDevice(1 << 30)
    with fitting(model, budget="2MiB", device=device) as found, caplog.at_level(logging.WARNING, "tierwise"):
        assert not any(call.sent for call in found.prepare((), given).program.calls.values())  # everything fits, the plan says
        device.cap(900_000)
        with pytest.raises(
            OutOfDeviceMemory, match=r"ran out of memory in the forward although the plan fits .* the next step is planned with less"
        ) as full:
            model(**given)
        assert isinstance(full.value, torch.OutOfMemoryError)
        del full
        assert equal(trained(lambda model, _: iter([model(**given).backward(), gradients(model)]), model), expected)
        assert plan_of(model).peak_bytes <= 900_000
        assert plan_of(model).budget_bytes == 2 << 20
        assert stats(model)["retries"] == 0
    assert any("from now on steps are planned for" in record.getMessage() for record in caplog.records)


def test_a_backward_that_ran_out_of_memory_makes_the_next_plan_tighter():
    model = tower()
    given = batch(1)
    device = NullDevice(1 << 30)
    with fitting(model, budget="2MiB", device=device) as found:
        before = found.prepare((), given)
        loss = model(**given)
        device.cap(device.memory().allocated_bytes + 1000)
        with pytest.raises(torch.OutOfMemoryError):
            loss.backward()
        del loss
        model.zero_grad()
        device.cap(None)
        model(**given).backward()
        assert plan_of(model).peak_bytes <= before.peak_bytes - 0.03 * before.budget_bytes


def test_what_comes_back_early_waits_when_there_is_no_room(monkeypatch):
    """What three blocks saved is fetched as backward begins; then there is no room for what the fourth asks for, and the others' is called off."""
    model = tower(dropout=0.1)
    expected = trained(three_steps, copy.deepcopy(model))
    device = NullDevice(1 << 30)
    with forced(monkeypatch, "keep", send=True, fetch=3), fitting(model, budget="64MiB", device=device) as found:
        peak = found.prepare((), batch(0)).peak_bytes
        device.cap(peak - ONE_BLOCK)
        assert equal(trained(three_steps, model), expected)
        assert found.session.retries > 0
    assert any("ran out of memory in the backward of blocks.3" in sentence for sentence in found.session.events.said)


def test_a_plan_that_cannot_be_tighter_is_as_tight_as_it_can():
    model = tower()
    given = batch(1)
    device = NullDevice(1 << 30)
    with fitting(model, budget="0.7MiB", device=device) as found:
        found.prepare((), given)
        device.cap(300_000)
        for _ in range(3):
            with pytest.raises(OutOfDeviceMemory):
                model(**given)
        device.cap(None)
        model(**given).backward()
        assert plan_of(model).peak_bytes < 0.7 * (1 << 20)


def test_memory_full_of_holes_makes_the_next_plan_tighter_twice_at_most(monkeypatch, caplog):
    """An allocator that gives memory back and takes it again in three steps running; one that does so now and then is left alone."""
    model, given, device = tower(), batch(1), NullDevice(1 << 30)
    counts = iter([0, 1, 2, 2, 3, 4, 5, *range(6, 40)])
    monkeypatch.setattr(device, "giving_back_count", lambda: next(counts))
    peaks = []
    with fitting(model, budget="2MiB", device=device) as found, caplog.at_level(logging.WARNING, "tierwise"):
        for _ in range(16):
            model(**given).backward()
            peaks.append((found._tightened_bytes, plan_of(model).peak_bytes <= (2 << 20) - found._tightened_bytes))
    tightened = int(0.03 * (2 << 20))
    assert [nbytes for nbytes, _ in peaks] == [0] * 5 + [tightened] * 3 + [2 * tightened] * 8
    assert all(fits for _, fits in peaks)
    assert sum("full of holes" in record.getMessage() for record in caplog.records) == 2
