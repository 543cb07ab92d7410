"""Updates that wait for one lane, in the order in which their parameters are needed."""

from __future__ import annotations

import threading

import pytest

from tierwise.errors import CopyFault
from tierwise.execute.lanes import Lane, Signal, already
from tierwise.execute.states.backlog import Backlog


def test_of_what_has_arrived_the_one_that_is_needed_first_goes_first():
    """While the update of layer 9 runs, gradients of 8, 7 and 6 are put; that of 6 has not arrived when the lane looks."""
    lane, began, go_on, late, ran = Lane("cpu"), threading.Event(), threading.Event(), Signal(), []
    backlog = Backlog(lane)

    def busy():
        began.set()
        go_on.wait()
        ran.append(9)

    signals = [backlog.put(busy, arrivals=[already()], needed=9)]
    began.wait()
    signals += [backlog.put(lambda n=n: ran.append(n), arrivals=[already()], needed=n) for n in (8, 7)]
    signals.append(backlog.put(lambda: (late.wait(), ran.append(6)), arrivals=[late], needed=6))
    go_on.set()
    for signal in signals[:3]:
        signal.wait()
    late.fire()
    signals[3].wait()
    assert ran == [9, 7, 8, 6]
    lane.close()


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
