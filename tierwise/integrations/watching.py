"""`tierwise.watch(model)`: one line of numbers on stderr while a fitted model trains.

    tierwise.watch(model)       step 128   291 ms (planned 287 ms)   peak 23.1 of 24.0 GiB   out 3.20 GiB   in 3.20 GiB   waited 4.0 ms

On a terminal the line is written over itself, and makes way for what the script prints. Where nobody watches there is none, unless show=True
asks for it: then lines follow each other.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, TextIO

from torch import nn

from ..fitting import fitted_of
from ..fitting.fitted import Fitted
from ..units import format_bytes, format_seconds

__all__ = ["Watching", "status", "watch"]

_CLEAR = "\r\x1b[K"


def watch(model: nn.Module, *, every: float | None = None, show: bool | None = None) -> Watching:
    """Show the numbers of the steps of a fitted model, at most once in `every` seconds (1 on a terminal, else 10), until it is released.

    show    False: nothing; True: on stderr, whatever it is; None: on stderr if that is a terminal
    """
    return Watching(fitted_of(model), sys.stderr, every, show)


class Watching:
    """A line that is kept up to date; `stop` it, or leave it as a context."""

    def __init__(self, fitted: Fitted, to: TextIO, every: float | None, show: bool | None) -> None:
        self._fitted, self._to = fitted, to
        self._over_itself = to.isatty()
        self._every = every if every is not None else 1.0 if self._over_itself else 10.0
        self._last = float("-inf")
        self._making_way: list[tuple[TextIO, Any]] = []  # streams of this terminal, while a line stands on it
        if show if show is not None else self._over_itself:
            fitted.meter.listeners.append(self._hear)
            fitted.set_aside.append(self.stop)

    def stop(self) -> None:
        if self._hear in self._fitted.meter.listeners:
            self._fitted.meter.listeners.remove(self._hear)
            if self._lifted():
                self._write("\n")

    def _hear(self, numbers: Mapping[str, float | int]) -> None:
        now = time.monotonic()
        if now - self._last >= self._every:
            self._last = now
            if not self._over_itself:
                return self._write(f"{status(numbers)}\n")
            self._lifted()
            self._write(f"{_CLEAR}{status(numbers)}")
            for stream in {id(stream): stream for stream in (sys.stdout, sys.stderr) if stream is not None and stream.isatty()}.values():
                self._make_way_for(stream)

    def _make_way_for(self, stream: Any) -> None:
        """Who writes to this stream next finds an empty line, not the end of ours."""
        plain = stream.write

        def write(text: str) -> Any:
            if self._lifted():
                self._write(_CLEAR)
            return plain(text)

        with contextlib.suppress(AttributeError):  # a stream of a class of its own, which may not let that be changed
            stream.write = write
            self._making_way.append((stream, write))

    def _lifted(self) -> bool:
        """Streams are as they were; whether our line was standing there."""
        streams, self._making_way = self._making_way, []
        for stream, write in streams:
            if vars(stream).get("write") is write:
                del stream.write
        return bool(streams)

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # a terminal that has gone away must not end a training
            self._to.write(text)
            self._to.flush()

    def __enter__(self) -> Watching:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()


def status(numbers: Mapping[str, float | int]) -> str:
    """The numbers of one step as one line."""
    planned = numbers.get("predicted_seconds")
    parts = [
        f"tierwise: step {numbers['step']}",
        format_seconds(numbers["seconds"]) + (f" (planned {format_seconds(planned)})" if planned is not None else ""),
        f"peak {format_bytes(numbers['peak_reserved_bytes'])}"
        + (f" of {format_bytes(numbers['budget_bytes'])}" if "budget_bytes" in numbers else ""),
        f"out {format_bytes(numbers['sent_bytes'])}",
        f"in {format_bytes(numbers['fetched_bytes'])}",
        f"waited {format_seconds(numbers['exposed_seconds'])}",
    ]
    if numbers["disk_written_bytes"]:
        parts.append(f"to disk {format_bytes(numbers['disk_written_bytes'])}")
    if numbers["retries"]:
        parts.append(f"{numbers['retries']} calls ran twice for lack of memory")
    return "   ".join(parts)
