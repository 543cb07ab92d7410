from __future__ import annotations

import gc
import sys
import threading
import weakref
from types import SimpleNamespace

import pytest

from tierwise.errors import CopyFault
from tierwise.execute.lanes import TURN_SECONDS, Lane, Signal, Turns, all_of, settled
from tierwise.execute.pace import Pace


@pytest.fixture
def lane():
    lane = Lane("test")
    yield lane
    lane.close()


def test_work_runs_in_order_and_after_what_it_waits_for(lane):
    order, gate = [], Signal()
    first = lane.put(lambda: order.append("first"), after=[gate])
    second = lane.put(lambda: order.append("second"))
    assert not first.done() and not second.done()
    order.append("gate")
    gate.fire()
    second.wait()
    assert order == ["gate", "first", "second"]


def test_a_failure_is_raised_by_whoever_waits_and_by_what_depends_on_it_but_nothing_else(lane):
    failing = lane.put(lambda: 1 / 0)
    dependent = lane.put(lambda: None, after=[failing])
    over = lane.put(lambda: None, after=[settled(failing)])
    other = lane.put(lambda: None)
    for event in (failing, dependent, all_of([other, failing])):
        with pytest.raises(ZeroDivisionError):
            event.wait()
        assert event.failed()
    over.wait()
    other.wait()


def test_memory_is_let_go_before_the_signal_fires_also_after_a_failure(lane):
    class Held:
        pass

    def use(held, fail):
        if fail:
            raise ValueError(str(held))

    for fail in (False, True):
        held = Held()
        reference = weakref.ref(held)
        signal = lane.put(lambda held=held, fail=fail: use(held, fail))
        del held
        while not signal.done():
            pass
        assert reference() is None
        assert signal.failed() == fail


def test_closing_fails_what_is_queued_and_ends_the_threads():
    lane, gate, started = Lane("test", threads=2), Signal(), threading.Semaphore(0)

    def work():
        started.release()
        gate.wait()

    running = [lane.put(work) for _ in range(2)]
    queued = lane.put(work)
    started.acquire()
    started.acquire()
    closer = threading.Thread(target=lane.close)
    closer.start()
    while not lane._closing.is_set():
        pass
    gate.fire()
    closer.join()
    for event in running:
        event.wait()
    with pytest.raises(CopyFault, match="closed before this was done"):
        queued.wait()
    with pytest.raises(CopyFault, match="takes no more work"):
        lane.put(work)


def test_a_lane_that_is_forgotten_ends_its_threads():
    lane = Lane("forgotten")
    threads = list(lane._threads)
    del lane
    gc.collect()
    for thread in threads:
        thread.join(timeout=5)
        assert not thread.is_alive()


def test_turns_are_shorter_while_they_have_to_be():
    before = sys.getswitchinterval()
    turns = Turns()
    assert sys.getswitchinterval() == pytest.approx(min(before, TURN_SECONDS))
    turns.close()
    assert sys.getswitchinterval() == before
    turns = Turns()
    sys.setswitchinterval(0.25)  # somebody else's wish
    turns.close()
    assert sys.getswitchinterval() == 0.25
    sys.setswitchinterval(before)


def test_the_host_is_never_more_than_a_few_regions_ahead():
    waited = []

    class Mark:
        def __init__(self, number, is_done):
            self.number, self.is_done = number, is_done

        def done(self):
            return self.is_done

        def wait(self):
            waited.append(self.number)

    marks = iter(Mark(number, is_done=number == 1) for number in range(9))
    pace = Pace(SimpleNamespace(mark=lambda: next(marks)), ahead=4)
    for _ in range(7):
        pace.next()
    assert waited == [0, 2], "the fifth region waits for the first; the second is over when the sixth comes"
