"""Updates that wait for one lane. Backward brings gradients last layer first, and the next forward needs the first layer first: where updates cannot
keep up, the one whose parameters are needed first goes first, and those of the last layers run under the next forward."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...errors import CopyFault
from ..lanes import Event, Lane, Signal, without_frames

_log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class _Waiting:
    work: Callable[[], object]
    arrivals: Sequence[Event]
    needed: int
    signal: Signal


class Backlog:
    """Each piece of work put here gives the lane one turn, in which it takes whichever is best by then."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._lock = threading.Lock()
        self._waiting: list[_Waiting] = []

    def put(self, work: Callable[[], object], *, arrivals: Sequence[Event], needed: int) -> Signal:
        """`arrivals`: of what it works on; `needed`: whose result is wanted first. The signal carries its failure."""
        signal = Signal()
        with self._lock:
            self._waiting.append(_Waiting(work, arrivals, needed, signal))
        self._lane.put(self._turn)
        return signal

    def close(self) -> None:
        """After the lane was closed: what had no turn fails."""
        with self._lock:
            left, self._waiting = self._waiting, []
        for waiting in left:
            waiting.signal.fire(CopyFault(f"the {self._lane.name} lane was closed before this was done"))

    def _turn(self) -> None:
        with self._lock:
            ready = [waiting for waiting in self._waiting if all(event.done() for event in waiting.arrivals)]
            # The oldest arrives first of those that have not, and whatever the lane had to do for it was put before this turn.
            chosen = min(ready, key=lambda waiting: waiting.needed) if ready else self._waiting[0]
            self._waiting.remove(chosen)
        signal, error = chosen.signal, None
        try:
            chosen.work()
        except BaseException as failure:
            _log.debug("work on the %s lane failed", self._lane.name, exc_info=True)
            error = without_frames(failure)
        del chosen, ready  # whoever waits for the signal may count on the memory
        signal.fire(error)
