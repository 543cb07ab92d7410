"""Numbers of each step, beside what was predicted: a plain dict for a logger, and a Timeline of a step that was recorded."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from ..execute.copies import Counts
from ..execute.device import Moment
from ..execute.recording import Recording
from ..execute.states.worked import Work
from ..ir import Copy, Timeline
from .feedback import TIMED_STEPS
from .measured import measured_timeline
from .plan import Plan

if TYPE_CHECKING:
    from .fitted import Fitted


@dataclass(frozen=True, slots=True)
class _Mark:
    """Counters as a step began."""

    at: float
    counts: Counts
    disk_written_bytes: int
    retries: int


class Meter:
    def __init__(self, fitted: Fitted) -> None:
        self._fitted = fitted
        self.steps = 0
        self.record_next = self.reset_peak = False
        self.listeners: list[Callable[[dict[str, float | int]], None]] = []  # each hears the numbers of a step when the next one begins
        self._seconds = 0.0
        self._mark: _Mark | None = None
        self._recorded: tuple[Recording, Plan] | None = None
        self._running: list[Moment] = []  # when the step that nobody records began, and when its update was over
        self._ran: deque[tuple[Moment, Moment]] = deque(maxlen=TIMED_STEPS)
        self._worked: deque[Work] = deque(maxlen=TIMED_STEPS)  # by the CPU, as each of these began

    def step_ends(self) -> None:
        """The next one is about to begin."""
        session = self._fitted.session
        if session.recording is not None:
            session.recording.close()
            self._fitted.below.copies.watch = session.recording = None
        if self._running:
            self._ran.append((self._running[0], self._running[1] if len(self._running) > 1 else self._fitted.device.moment()))
            self._running = []

    def step_updated(self) -> None:
        """The optimizer has done its step."""
        if self._fitted.session.recording is not None:
            self._fitted.session.recording.was_updated()
        if self._running:
            self._running = [self._running[0], self._fitted.device.moment()]

    def step_begins(self, plan: Plan) -> None:
        fitted, now = self._fitted, self._now()
        if self._mark is not None:
            self._seconds = now.at - self._mark.at
            for listener in self.listeners:
                listener(self.stats())
        self._mark = now
        self._worked.append(self._cpu_work())
        self.steps += 1
        if self.record_next:
            self.record_next = False
            if self.reset_peak:
                fitted.device.reset_peak()
            recording = Recording(fitted.device)
            fitted.session.recording, fitted.below.copies.watch = recording, recording.copy
            self._recorded = recording, plan
        else:
            self._running = [self._fitted.device.moment()]

    def step_seconds(self) -> float | None:
        """What a step takes that nobody records: the middle one of the last few, without what the loop does between steps."""
        if len(self._ran) < TIMED_STEPS:
            return None
        self._ran[-1][1].wait()
        return median(end.since(start) for start, end in self._ran)

    def cpu_seconds(self) -> float | None:
        """How long the CPU is at the updates of a step, by the last few; None where it has none, or nothing is known of them."""
        states = self._fitted.lasting.states
        if states is None or len(self._worked) < TIMED_STEPS:
            return None
        now, before = self._cpu_work(), self._worked[0]
        elements = now.elements - before.elements
        return states.cpu_elements * (now.seconds - before.seconds) / elements if elements > 0 else None

    def timeline(self) -> Timeline | None:
        """Of the last recorded step; None while it runs, or if there was none."""
        if self._recorded is None:
            return None
        (recording, plan), session = self._recorded, self._fitted.session
        if session.recording is recording:
            if session.last is None or session.last.waits_for_backward:
                return None
            self.step_ends()
        return measured_timeline(recording, plan, self._fitted.below.host_bytes)

    def stats(self) -> dict[str, float | int]:
        """Bytes and seconds that are counted are those of the step that began last; peaks are since whoever last reset them."""
        fitted, now = self._fitted, self._now()
        then = self._mark or now
        memory = fitted.device.memory()
        found: dict[str, float | int] = {
            "step": self.steps,
            "seconds": self._seconds,
            "allocated_bytes": memory.allocated_bytes,
            "peak_allocated_bytes": memory.peak_allocated_bytes,
            "peak_reserved_bytes": memory.peak_reserved_bytes,
            "pinned_bytes": fitted.below.pinned_bytes,
            "host_bytes": fitted.below.host_bytes,
            "sent_bytes": now.counts.sent_bytes - then.counts.sent_bytes,
            "fetched_bytes": now.counts.fetched_bytes - then.counts.fetched_bytes,
            "exposed_seconds": now.counts.exposed_seconds - then.counts.exposed_seconds,
            "disk_written_bytes": now.disk_written_bytes - then.disk_written_bytes,
            "retries": now.retries - then.retries,
        }
        return found | (_predicted(fitted.current) if fitted.current is not None else {})

    def _cpu_work(self) -> Work:
        states = self._fitted.lasting.states
        return Work() if states is None else states.cpu_work

    def _now(self) -> _Mark:
        fitted = self._fitted
        return _Mark(time.perf_counter(), fitted.below.copies.counts(), fitted.below.disk_written_bytes, fitted.session.retries)


def _predicted(plan: Plan) -> dict[str, float | int]:
    problem, predicted = plan.image.problem, plan.predicted
    copies = [step for step in plan.image.schedule.steps if isinstance(step, Copy)]
    nbytes = {
        way: sum(problem.graph.storages[copy.storage].nbytes for copy in copies if (copy.src == problem.device_tier) is out)
        for way, out in (("sent", True), ("fetched", False))
    }
    return {
        "budget_bytes": plan.budget_bytes,
        "predicted_seconds": predicted.seconds,
        "predicted_peak_bytes": plan.peak_bytes,
        "predicted_host_bytes": plan.host_bytes,
        "predicted_sent_bytes": nbytes["sent"],
        "predicted_fetched_bytes": nbytes["fetched"],
        "predicted_exposed_seconds": max(0.0, predicted.seconds - predicted.busy_seconds().get(problem.machine.device.name, 0.0)),
    }
