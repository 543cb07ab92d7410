"""What pieces of work take when they run one behind the other, again and again, as they do in training.

A chip that has just been idle is faster than one that has multiplied matrices for a while, so nothing counts until the clocks have settled. A piece
has two times: the device's own, measured behind a pause in which the host gets ahead, and the host's, to issue it. A device that is busy longer
than the host runs without a break; one that is not waits for the host.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch

from .taken import Taken
from .torch_compat import pause_device

SETTLE_SECONDS = 2.0  # an H200 that multiplies matrices is 5% slower after one second than after a tenth, 6% after two: docs/log.md
SAMPLE_SECONDS = 0.15
LEAST_ROUNDS = 5
IN_A_ROW_SECONDS = 0.06  # short enough that the host does not fill the queue and wait: its time counts here
WITHOUT_REST_SECONDS = 0.4  # a step or two of training: a chip that rests for a moment sixteen times a second is not at its power limit
PAUSE_SECONDS = 5e-4  # so long that the host is ahead of a device that it does not have to wait for
BEHIND = 0.7  # a host that needs more than this share of the device's time gets a pause before the piece


def sustained(work: Sequence[Callable[[], Any]], device: torch.device, *, settle: bool = True) -> list[Taken]:
    """The median of each piece over rounds of all of them in order. What a piece returns is dropped at once.

    settle  wait until the clocks have settled; work that is a small share of a step runs on a device that other work has warmed, or not
    """
    rounds = _CudaRounds(device, len(work)) if device.type == "cuda" else _HostRounds()
    for _ in range(2):  # whatever is compiled, tuned or allocated on first use
        rounds.run(work)
    rounds.calibrate(work)
    began = time.perf_counter()
    while settle and time.perf_counter() - began < rounds.settle_seconds:
        rounds.in_a_row(work, WITHOUT_REST_SECONDS)
    device_times = rounds.in_a_row(work, WITHOUT_REST_SECONDS) if settle else []
    seen: list[list[Taken]] = []
    began = time.perf_counter()
    while len(seen) < LEAST_ROUNDS or time.perf_counter() - began < SAMPLE_SECONDS:
        seen += rounds.in_a_row(work, IN_A_ROW_SECONDS)
    rounds.done()
    if len(device_times) < 2:
        device_times = seen
    return [
        Taken(statistics.median(one.device_seconds for one in busy), statistics.median(one.host_seconds for one in issued))
        for busy, issued in zip(zip(*device_times, strict=True), zip(*seen, strict=True), strict=True)
    ]


class _HostRounds:
    """The host is the device."""

    settle_seconds = 0.1

    def run(self, work: Sequence[Callable[[], Any]]) -> list[Taken]:
        found = []
        for piece in work:
            start = time.perf_counter()
            piece()
            seconds = time.perf_counter() - start
            found.append(Taken(seconds, seconds))
        return found

    def in_a_row(self, work: Sequence[Callable[[], Any]], seconds: float) -> list[list[Taken]]:
        return [self.run(work)]

    def calibrate(self, work: Sequence[Callable[[], Any]]) -> None:
        pass

    def done(self) -> None:
        pass


class _CudaRounds:
    _busy_until: ClassVar[dict[torch.device, float]] = {}

    def __init__(self, device: torch.device, pieces: int) -> None:
        self.device = device
        idle_seconds = time.perf_counter() - self._busy_until.get(device, float("-inf"))
        self.settle_seconds = min(SETTLE_SECONDS, SAMPLE_SECONDS + idle_seconds)  # what was busy a moment ago has not cooled down for longer
        self.pauses = [PAUSE_SECONDS, *[0.0] * (pieces - 1)]  # before each piece
        self.round_seconds = 0.0

    def run(self, work: Sequence[Callable[[], Any]]) -> list[Taken]:
        return self._rounds(work, 1)[0]

    def in_a_row(self, work: Sequence[Callable[[], Any]], seconds: float) -> list[list[Taken]]:
        """Without a break in between for so long, where the host keeps ahead: a device that rests between rounds is not at its power limit."""
        keeps_ahead = not any(self.pauses[1:]) and self.round_seconds > 0
        return self._rounds(work, max(1, int(seconds / self.round_seconds)) if keeps_ahead else 1)

    def _rounds(self, work: Sequence[Callable[[], Any]], count: int) -> list[list[Taken]]:
        events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        host = []
        with torch.cuda.device(self.device):
            for number in range(count):
                for piece, pause in zip(work, self.pauses, strict=True):
                    if pause and (number == 0 or piece is not work[0]):
                        torch.cuda.synchronize()  # the queue is empty: a host that fills it would wait, and its time would not be its own
                        pause_device(pause)
                    events.append((torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)))
                    events[-1][0].record()
                    start = time.perf_counter()
                    piece()
                    host.append(time.perf_counter() - start)
                    events[-1][1].record()
            torch.cuda.synchronize()
        taken = [Taken(start.elapsed_time(end) / 1e3, issued) for (start, end), issued in zip(events, host, strict=True)]
        return [taken[place : place + len(work)] for place in range(0, len(taken), len(work))]

    def calibrate(self, work: Sequence[Callable[[], Any]]) -> None:
        """First let the host issue each piece before the device starts it; then pause only where that shows that it must."""
        self.pauses = [PAUSE_SECONDS + 1.5 * taken.host_seconds for taken in self.run(work)]
        taken = self.run(work)
        self.pauses = pauses_for(taken)
        self.round_seconds = sum(piece.device_seconds for piece in taken)

    def done(self) -> None:
        self._busy_until[self.device] = time.perf_counter()


def pauses_for(pieces: Sequence[Taken]) -> list[float]:
    """How long the device must wait before each piece so that the host is never behind within it; nothing where it is ahead anyway."""
    pauses = [
        PAUSE_SECONDS + 1.2 * max(0.0, piece.host_seconds - piece.device_seconds) if piece.host_seconds > BEHIND * piece.device_seconds else 0.0
        for piece in pieces
    ]
    return [pauses[0] or PAUSE_SECONDS, *pauses[1:]]


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
