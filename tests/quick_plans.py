"""For tests in which a plan only has to be legal: how good it is, is tested where plans are made."""

from __future__ import annotations

from typing import Any

import pytest

SECONDS, TRIES = 0.1, 10


@pytest.fixture(autouse=True)
def quick_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """`fit` looks for a plan so many times, where a device's times are guesses, and so finds the same on any machine; a summary takes hardly any time
    for what more or less memory would do."""
    from tierwise.fitting import programs
    from tierwise.fitting.plan import Plan
    from tierwise.lower import Chosen, choose_jointly

    def chosen(*menu: Any, seconds: float, **options: Any) -> Chosen:
        limit = {"tries": TRIES} if seconds <= SECONDS else {"seconds": seconds}
        return choose_jointly(*menu, **options, **limit)

    monkeypatch.setattr(programs, "GUESSED_SECONDS", SECONDS)
    monkeypatch.setattr(programs, "choose_jointly", chosen)
    monkeypatch.setattr(Plan.around, "__defaults__", (SECONDS,))
