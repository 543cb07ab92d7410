"""For tests in which a plan only has to be legal: how good it is, is tested where plans are made."""

from __future__ import annotations

import pytest

SECONDS = 0.1


@pytest.fixture(autouse=True)
def quick_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """`fit` looks for a plan until it has one, and hardly longer; so does a summary for what more or less memory would do."""
    from tierwise.fitting import programs
    from tierwise.fitting.plan import Plan

    monkeypatch.setattr(programs, "GUESSED_SECONDS", SECONDS)
    monkeypatch.setattr(Plan.around, "__defaults__", (SECONDS,))
