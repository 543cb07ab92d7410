"""What a piece of work takes, and what pieces that one host issues to one device in order add up to. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Taken:
    """By one piece of work."""

    device_seconds: float  # with the queue full
    host_seconds: float  # to issue it

    @property
    def seconds(self) -> float:
        """In a row of such pieces."""
        return max(self.device_seconds, self.host_seconds)

    def times(self, count: float) -> Taken:
        return Taken(self.device_seconds * count, self.host_seconds * count)


def added_seconds(pieces: Iterable[Taken]) -> list[float]:
    """What each piece adds to the moment at which the device is done with all so far, starting from an idle one.

    The host issues piece after piece without ever waiting. The device starts a piece when it is done with the one before and the host
    has begun to issue it, and is not done before the host is.
    """
    issued = done = 0.0
    added = []
    for piece in pieces:
        before, begun = done, issued
        issued += piece.host_seconds
        done = max(max(done, begun) + piece.device_seconds, issued)
        added.append(done - before)
    return added
