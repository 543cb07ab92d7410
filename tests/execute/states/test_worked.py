"""The CPU's time at updates is counted once, whoever is let in meanwhile."""

from __future__ import annotations

import itertools

from tierwise.execute.states import worked
from tierwise.execute.states.worked import Work, Worked


def test_what_is_let_in_is_counted_once(monkeypatch):
    """A clock that goes on by a second each time it is looked at: 0 as one update begins, 1 as another is let in, 2 as the first is over."""
    monkeypatch.setattr(worked.time, "perf_counter", itertools.count().__next__)
    counted = Worked()
    with counted.on(100), counted.on(30):
        pass
    assert counted.work == Work(2.0, 130)


def test_an_update_that_fails_ends(monkeypatch):
    monkeypatch.setattr(worked.time, "perf_counter", itertools.count().__next__)
    counted = Worked()
    for _ in range(2):
        try:
            with counted.on(1):
                raise ValueError
        except ValueError:
            pass
    assert counted.work == Work(2.0, 2)
