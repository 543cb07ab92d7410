"""Two hundred steps with every copy delayed at random and every distance drawn anew: the same bits as without any of it."""

from __future__ import annotations

import copy
import random
from dataclasses import replace

import pytest
from fitting.training import batch, equal, fitting, forced, tower, trained

from tierwise.execute.copies import Copies
from tierwise.execute.null_device import NullDevice

BATCHES = [batch(number, rows=64) for number in range(5)]


def steps(count: int, between=lambda: None):
    def loop(model, optimizer):
        for number in range(count):
            loss = model(**BATCHES[number % 5])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield loss
            between()

    return loop


def shuffled(found, seed: int):
    """Draws when each call lets go of what it sent and when it asks for it."""
    draw = random.Random(seed)

    def shuffle() -> None:
        for key, plan in found.current.plans.items():
            found.current.plans[key] = replace(plan, call=replace(plan.call, release=draw.randint(1, 4), fetch=draw.randint(1, 4)))

    return shuffle


@pytest.mark.parametrize("small_copy_bytes", [0, 1 << 20])  # one by one, and packed together
def test_no_difference_in_two_hundred_steps(small_copy_bytes, monkeypatch):
    count = 200 if small_copy_bytes else 30
    model = tower(blocks=3, dropout=0.1)
    expected = trained(steps(count), copy.deepcopy(model))
    device = NullDevice(1 << 30, max_delay_seconds=0.001, seed=3, small_copy_bytes=small_copy_bytes)
    with forced(monkeypatch, "cheap", send=True), fitting(model, budget="64MiB", device=device) as found:
        found.prepare((), BATCHES[0])
        assert equal(trained(steps(count, shuffled(found, seed=4)), model), expected)
        counts = found.below.copies.counts()
        assert counts.sent_bytes == counts.fetched_bytes > 0
        assert device.lost_copies == 0


def test_the_race_would_be_seen(monkeypatch):
    """The same without waiting for what comes back."""
    model = tower()
    expected = trained(steps(3), copy.deepcopy(model))
    device = NullDevice(1 << 30, max_delay_seconds=0.005, seed=3)
    with forced(monkeypatch, "keep", send=True), fitting(model, budget="64MiB", device=device):
        monkeypatch.setattr(Copies, "wait", lambda copies, pending: pending.layout.on(pending.storage, pending.start_bytes))
        assert not equal(trained(steps(3), model), expected)
        device.synchronize()
        device.lost_copies = 0
