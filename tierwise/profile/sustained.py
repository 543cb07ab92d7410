"""What pieces of work take when they run one behind the other, again and again, as they do in training.

A chip that has just been idle is faster than one that has multiplied matrices for a while, so nothing counts until the clocks have settled. Each
round starts behind a pause on the device, in which the host gets ahead: what is measured on the device is then the device's own time, and what is
measured on the host is the time to issue the work. Who runs it has to wait for the longer of the two.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from .torch_compat import pause_device

SETTLE_SECONDS = 0.15
SAMPLE_SECONDS = 0.15
LEAST_ROUNDS = 5
LEAST_PAUSE_SECONDS = 5e-4
PAUSE_CYCLES_PER_SECOND = 2e9  # more than any clock, so that a pause is never too short


@dataclass(frozen=True, slots=True)
class Taken:
    """Of one piece of work."""

    device_seconds: float  # with the queue full
    host_seconds: float  # to issue it

    @property
    def seconds(self) -> float:
        """In a row of such pieces."""
        return max(self.device_seconds, self.host_seconds)


def sustained(work: Sequence[Callable[[], Any]], device: torch.device, *, settle_seconds: float | None = None) -> list[Taken]:
    """The median of each piece over rounds of all of them in order. What a piece returns is dropped at once."""
    clock = _CudaRounds(device) if device.type == "cuda" else _HostRounds()
    settle_seconds = SETTLE_SECONDS if settle_seconds is None else settle_seconds
    seen: list[list[Taken]] = []
    clock.round(work)  # whatever is compiled, tuned or allocated on first use
    clock.calibrate(work)
    began = time.perf_counter()
    while time.perf_counter() - began < settle_seconds:
        clock.round(work)
    began = time.perf_counter()
    while len(seen) < LEAST_ROUNDS or time.perf_counter() - began < SAMPLE_SECONDS:
        seen.append(clock.round(work))
    return [
        Taken(statistics.median(one.device_seconds for one in piece), statistics.median(one.host_seconds for one in piece))
        for piece in zip(*seen, strict=True)
    ]


class _HostRounds:
    """The host is the device."""

    def round(self, work: Sequence[Callable[[], Any]]) -> list[Taken]:
        found = []
        for piece in work:
            start = time.perf_counter()
            piece()
            seconds = time.perf_counter() - start
            found.append(Taken(seconds, seconds))
        return found

    def calibrate(self, work: Sequence[Callable[[], Any]]) -> None:
        pass


class _CudaRounds:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pause_seconds = LEAST_PAUSE_SECONDS

    def round(self, work: Sequence[Callable[[], Any]]) -> list[Taken]:
        with torch.cuda.device(self.device):
            torch.cuda.synchronize()
            pause_device(self.pause_seconds, cycles_per_second=PAUSE_CYCLES_PER_SECOND)
            events = [torch.cuda.Event(enable_timing=True) for _ in range(len(work) + 1)]
            host = []
            events[0].record()
            for piece, event in zip(work, events[1:], strict=True):
                start = time.perf_counter()
                piece()
                host.append(time.perf_counter() - start)
                event.record()
            torch.cuda.synchronize()
        taken = zip(events[:-1], events[1:], host, strict=True)
        return [Taken(before.elapsed_time(after) / 1e3, issued) for before, after, issued in taken]

    def calibrate(self, work: Sequence[Callable[[], Any]]) -> None:
        """First let the host issue everything before the device starts; from what that shows, the shortest pause after which it is never behind."""
        self.pause_seconds = LEAST_PAUSE_SECONDS + sum(piece.host_seconds for piece in self.round(work))
        self.pause_seconds = LEAST_PAUSE_SECONDS + 1.2 * head_start(self.round(work))


def head_start(pieces: Sequence[Taken]) -> float:
    """How far ahead the host must be before the first piece so that it is not behind at the end of any."""
    behind = most = 0.0
    for piece in pieces:
        behind += piece.host_seconds - piece.device_seconds
        most = max(most, behind)
    return most


@contextmanager
def random_state_kept(device: torch.device) -> Iterator[None]:
    """Random numbers drawn inside are not missed outside."""
    host = torch.get_rng_state()
    card = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    try:
        yield
    finally:
        torch.set_rng_state(host)
        if card is not None:
            torch.cuda.set_rng_state(card, device)
