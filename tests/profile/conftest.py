"""Timing without waiting for clocks to settle: what is tested is that the right work is timed, and that nothing stays behind."""

from __future__ import annotations

import pytest


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    from tierwise.profile import sustained

    monkeypatch.setattr(sustained._HostRounds, "settle_seconds", 0.0)
    monkeypatch.setattr(sustained, "SAMPLE_SECONDS", 0.0)
