"""Work that runs beside the caller, in order: an Event says when it is done, a Lane is a queue served by threads.

The null device copies on lanes of one thread, the disk reads and writes on a lane of several. Work starts in the order it was put; what it
must come after is either earlier on its lane or on another lane that never waits for it, so lanes cannot deadlock.
"""

from __future__ import annotations

import copy
import logging
import queue
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Protocol

from ..errors import CopyFault

_log = logging.getLogger(__name__)


class Event(Protocol):
    """Something that will have happened: a copy, a read, all compute issued so far."""

    def done(self) -> bool:
        """Whether it has happened, successfully or not. Never blocks."""

    def wait(self) -> None:
        """Block this thread until it has happened; raise what made it fail."""

    def failed(self) -> bool:
        """Whether it is known to have failed. Never blocks."""


class Signal:
    """An event fired from Python, once; it carries the failure of what it stands for."""

    __slots__ = ("_error", "_fired")

    def __init__(self) -> None:
        self._fired = threading.Event()
        self._error: BaseException | None = None

    def done(self) -> bool:
        return self._fired.is_set()

    def settle(self) -> None:
        """Block until it has happened, however it ended."""
        self._fired.wait()

    def wait(self) -> None:
        self.settle()
        if self._error is not None:
            # A copy, because an exception keeps the frames it passes through, and they keep tensors.
            raise copy.copy(self._error) from self._error.__cause__

    def failed(self) -> bool:
        return self._error is not None

    def fire(self, error: BaseException | None = None) -> None:
        self._error = error
        self._fired.set()


def all_of(signals: Sequence[Signal]) -> Event:
    """The event that all have fired; its failure is that of the first that failed."""
    return _All(tuple(signals))


class _All:
    __slots__ = ("_signals",)

    def __init__(self, signals: tuple[Signal, ...]) -> None:
        self._signals = signals

    def done(self) -> bool:
        return all(signal.done() for signal in self._signals)

    def settle(self) -> None:
        for signal in self._signals:
            signal.settle()

    def wait(self) -> None:
        self.settle()
        for signal in self._signals:
            signal.wait()

    def failed(self) -> bool:
        return any(signal.failed() for signal in self._signals)


def settled(event: Event) -> Event:
    """The event that something is over, however it ended."""
    return _Settled(event) if isinstance(event, (Signal, _All)) else event


class _Settled:
    __slots__ = ("_event",)

    def __init__(self, event: Signal | _All) -> None:
        self._event = event

    def done(self) -> bool:
        return self._event.done()

    def wait(self) -> None:
        self._event.settle()

    def failed(self) -> bool:
        return False


def already() -> Signal:
    """An event that has happened: always the same one, since nothing can happen to it any more."""
    return _ALREADY


_ALREADY = Signal()
_ALREADY.fire()


TURN_SECONDS = 1e-4


class Turns:
    """While it is open, threads take turns in Python more often than every 5 ms: a lane whose copy or update is done would wait for a loop that
    launches kernels all the time, and the link or the processors with it."""

    def __init__(self) -> None:
        self._before = sys.getswitchinterval()
        sys.setswitchinterval(min(self._before, TURN_SECONDS))
        self._ours = sys.getswitchinterval()

    def close(self) -> None:
        if sys.getswitchinterval() == self._ours:  # unless somebody else has set it meanwhile
            sys.setswitchinterval(self._before)


_Task = tuple[Callable[[], object], tuple[Event, ...], Signal]
_Queue = queue.Queue[_Task | None]


class Lane:
    """A first-in-first-out queue of work, served by `threads` threads."""

    def __init__(self, name: str, *, threads: int = 1) -> None:
        self.name = name
        self._tasks: _Queue = queue.Queue()
        self._closing = threading.Event()
        # Daemons, because an interpreter that exits waits for other threads before it runs the finalizer that ends these.
        self._threads = [
            threading.Thread(target=_serve, args=(name, self._tasks, self._closing), name=f"tierwise {name} {n}", daemon=True) for n in range(threads)
        ]
        for thread in self._threads:
            thread.start()
        self._end = weakref.finalize(self, _end, self._tasks, self._closing, self._threads)

    def put(self, work: Callable[[], object], *, after: Sequence[Event] = ()) -> Signal:
        """Queue `work`, to start when `after` has happened; a failure of either is the failure of the signal."""
        if self._closing.is_set():
            raise CopyFault(f"the {self.name} lane is closed and takes no more work")
        signal = Signal()
        self._tasks.put((work, tuple(after), signal))
        return signal

    def drain(self) -> None:
        """Block until everything queued has run or failed."""
        self._tasks.join()

    def close(self) -> None:
        """Let running work finish, fail what is queued, end the threads."""
        self._end()


def _serve(name: str, tasks: _Queue, closing: threading.Event) -> None:
    while (task := tasks.get()) is not None:
        work, after, signal = task
        error: BaseException | None = None
        try:
            if closing.is_set():
                raise CopyFault(f"the {name} lane was closed before this was done")
            _wait_for(after)
            work()
        except BaseException as failure:
            _log.debug("work on the %s lane failed", name, exc_info=True)
            error = without_frames(failure)
        # Whoever waits for the signal may count on the memory: nothing here holds it any longer when it fires.
        del task, work, after
        signal.fire(error)
        del signal, error
        tasks.task_done()
    tasks.task_done()


def _wait_for(events: Sequence[Event]) -> None:
    for event in events:
        event.wait()


def without_frames(error: BaseException) -> BaseException:
    """The failure without its traceback, whose frames keep tensors; that went to the log."""
    link: BaseException | None = error
    while link is not None:
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
    return error


def _end(tasks: _Queue, closing: threading.Event, threads: list[threading.Thread]) -> None:
    closing.set()
    for _ in threads:
        tasks.put(None)
    for thread in threads:
        if thread is not threading.current_thread():  # the last reference may die on the lane itself
            thread.join()
