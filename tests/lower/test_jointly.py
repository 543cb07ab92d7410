"""Activations and lasting state in one budget: the chain of toy_blocks.py, with 20 bytes of moments for each weight of 5."""

from __future__ import annotations

import pytest
from toy_blocks import menu_with_moments

from tierwise.lower import choose_jointly


def test_two_searches_of_so_many_tries_are_equal_however_long_they_take(monkeypatch):
    """Ten blocks with 250 bytes that last, in 200 bytes; no clock is looked at, and with more tries nothing slower is found."""
    monkeypatch.setattr("tierwise.lower.jointly.time.monotonic", lambda: pytest.fail("somebody looked at the clock"))
    few, many, again = (choose_jointly(menu_with_moments(10, hbm=200), update="backward", tries=tries) for tries in (4, 40, 40))
    assert many == again
    assert many.program.states and many.seconds <= few.seconds
