"""Updates that wait for one lane, in the order in which their parameters are needed."""

from __future__ import annotations

import threading

import pytest

from tierwise.errors import CopyFault
from tierwise.execute.lanes import Lane, Signal, already
from tierwise.execute.states.backlog import Backlog


class Busy:
    """A lane with work that has begun, which goes on when it is told to."""

    def __init__(self, then) -> None:
        self.lane, self._go_on, began = Lane("cpu"), threading.Event(), threading.Event()
        self.backlog = Backlog(self.lane)
        self.signal = self.backlog.put(lambda: (began.set(), self._go_on.wait(), then(self.backlog)), arrivals=[already()], needed=9)
        began.wait()

    def goes_on(self, *signals) -> None:
        """And these are over."""
        self._go_on.set()
        for signal in (self.signal, *signals):
            signal.wait()


def test_of_what_has_arrived_the_one_that_is_needed_first_goes_first():
    """While the update of layer 9 runs, gradients of 8, 7 and 6 are put; that of 6 has not arrived when the lane looks."""
    late, ran = Signal(), []
    busy = Busy(lambda backlog: ran.append(9))
    arrived = [busy.backlog.put(lambda n=n: ran.append(n), arrivals=[already()], needed=n) for n in (8, 7)]
    last = busy.backlog.put(lambda: (late.wait(), ran.append(6)), arrivals=[late], needed=6)
    busy.goes_on(*arrived)
    late.fire()
    last.wait()
    assert ran == [9, 7, 8, 6]
    busy.lane.close()


def test_what_is_needed_before_it_is_let_in():
    """Layer 9 stops once in the middle. By then gradients of 8 and 3 have arrived and are needed before it; not 7's, nor is 12 needed before it."""
    late, ran = Signal(), []
    busy = Busy(lambda backlog: (ran.append("9, first part"), backlog.let_in(9, lambda: ran.append("9, sent")), ran.append("9")))
    arrived = [busy.backlog.put(lambda n=n: ran.append(n), arrivals=[], needed=n) for n in (12, 8)]
    last = busy.backlog.put(lambda: (late.wait(), ran.append(7)), arrivals=[late], needed=7)
    arrived.append(busy.backlog.put(lambda: ran.append(3), arrivals=[], needed=3))
    busy.goes_on(*arrived)
    assert ran == ["9, first part", "9, sent", 3, "9, sent", 8, "9", 12]
    late.fire()
    last.wait()
    assert ran[-1] == 7
    busy.lane.close()


def test_turns_of_what_was_let_in_wait_for_nobody():
    """8 was let in, so its turn has nothing to do: the gradient of 7 comes by work of the same lane, which stands behind that turn."""
    made, ran = Signal(), []
    busy = Busy(lambda backlog: backlog.let_in(9, lambda: None))
    first = busy.backlog.put(lambda: ran.append(8), arrivals=[], needed=8)
    busy.lane.put(made.fire)
    second = busy.backlog.put(lambda: (made.wait(), ran.append(7)), arrivals=[made], needed=7)
    busy.goes_on(first, second)
    assert ran == [8, 7]
    busy.lane.close()


def test_a_failure_is_that_of_the_update_and_a_closed_lane_fails_the_rest():
    lane, began, go_on = Lane("cpu"), threading.Event(), threading.Event()
    backlog = Backlog(lane)
    fails = backlog.put(lambda: 1 / 0, arrivals=(), needed=0)
    with pytest.raises(ZeroDivisionError):
        fails.wait()
    running = backlog.put(lambda: (began.set(), go_on.wait()), arrivals=(), needed=1)
    began.wait()
    left = backlog.put(lambda: None, arrivals=(), needed=2)
    ending = threading.Thread(target=lane.close)
    ending.start()
    while not lane._closing.is_set():
        pass
    go_on.set()
    ending.join()
    backlog.close()
    running.wait()
    with pytest.raises(CopyFault, match="the cpu lane was closed before this was done"):
        left.wait()
