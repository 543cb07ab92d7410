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

    def has_arrived(self) -> bool:
        return all(event.done() for event in self.arrivals)

    def when(self) -> int:
        return self.needed


class Backlog:
    """Each piece of work put here gives the lane one turn, in which it takes whichever is best by then. Work that can stop for a moment lets in what
    is needed before it."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._lock = threading.Lock()
        self._waiting: list[_Waiting] = []
        self._let_in = 0  # turns that are still to come for work that is done

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

    def let_in(self, needed: int, first: Callable[[], object]) -> None:
        """On the lane, in the middle of work whose result is needed then: do what has arrived since and is needed before that, and `first` before
        any of it."""
        while (chosen := self._more_urgent(needed)) is not None:
            first()
            self._do(chosen)

    def _more_urgent(self, needed: int) -> _Waiting | None:
        with self._lock:
            chosen = min((waiting for waiting in self._waiting if waiting.needed < needed and waiting.has_arrived()), key=_Waiting.when, default=None)
            if chosen is not None:
                self._waiting.remove(chosen)
                self._let_in += 1
        return chosen

    def _turn(self) -> None:
        with self._lock:
            ready = [waiting for waiting in self._waiting if waiting.has_arrived()]
            if not ready and self._let_in:
                self._let_in -= 1
                return
            # There is one turn for each that waits, so the oldest arrives first of those that have not, and whatever the lane had to do for it was
            # put before this turn.
            chosen = min(ready, key=_Waiting.when) if ready else self._waiting[0]
            self._waiting.remove(chosen)
        self._do(chosen)

    def _do(self, chosen: _Waiting) -> None:
        error = None
        try:
            chosen.work()
        except BaseException as failure:
            _log.debug("work on the %s lane failed", self._lane.name, exc_info=True)
            error = without_frames(failure)
        chosen.work, chosen.arrivals = _nothing, ()  # whoever waits for the signal may count on the memory
        chosen.signal.fire(error)


def _nothing() -> None:
    pass
