"""The CPU's time at updates is counted once, whoever is let in meanwhile, and up to the moment at which somebody asks."""

from __future__ import annotations

import itertools

import pytest

from tierwise.execute.states import worked
from tierwise.execute.states.worked import Work, Worked


@pytest.fixture
def counted(monkeypatch) -> Worked:
    """By a clock that goes on by a second each time it is looked at."""
    monkeypatch.setattr(worked.time, "perf_counter", itertools.count().__next__)
    return Worked()


def test_what_is_let_in_is_counted_once(counted):
    """At second 0 an update begins; somebody asks at 1, and at 2 as another is let in; it is over at 3."""
    with counted.at_it():
        counted.did(70)
        assert counted.work == Work(1.0, 70)
        with counted.at_it():
            counted.did(30)
            assert counted.work == Work(2.0, 100)
        counted.did(5)
    assert counted.work == Work(3.0, 105)


def test_an_update_that_fails_ends(counted):
    for _ in range(2):
        try:
            with counted.at_it():
                counted.did(1)
                raise ValueError
        except ValueError:
            pass
    assert counted.work == Work(2.0, 2)
