"""When everything ran and what memory held: the same type for a prediction and for a measurement."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple


class Span(NamedTuple):
    """One step on one lane. A copy that occupies two lanes has two spans."""

    step: int
    lane: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Curve:
    """Bytes held from each time until the next."""

    seconds: tuple[float, ...]
    nbytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Timeline:
    """One period in the steady state. Times count from the end of the device's work in the period before; a negative one reaches back into it."""

    seconds: float
    peak_bytes: Mapping[str, int]
    spans: tuple[Span, ...]
    memory: Mapping[str, Mapping[str, Curve]]  # tier -> role (also "workspace", "staging") -> curve
    measured: bool

    def busy_seconds(self) -> dict[str, float]:
        """How long each lane worked."""
        busy: dict[str, float] = {}
        for span in self.spans:
            busy[span.lane] = busy.get(span.lane, 0.0) + span.end - span.start
        return busy
