"""Other processes that plan for a search, as many at a time as the host has cores to spare; without them it looks at one placement after another.

They are processes of their own, not copies of this one, which may have a device and threads that hold locks, and run nothing of the user's: only the
planner, which imports neither torch nor the script.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ..ir import Menu, Placement, Program, When
from .choose import Chosen
from .splits import Split

MOST = 12
SHARE = 0.75  # of the cores; the rest is for whoever else is at work here
PATIENCE_SECONDS = 5.0  # for starting up, and then for a batch of looks, of a fraction of a second each
T = TypeVar("T")
Taken = tuple[int, int]  # by updates: of the device all the time, and of host memory in all


def spare() -> int:
    """How many the host has cores for; other processes of this job on it plan at the same time."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    others = os.environ.get("LOCAL_WORLD_SIZE", "1")
    found = int(cores * SHARE) // max(1, int(others) if others.isdigit() else 1)
    return min(MOST, found) if found > 1 else 0


@dataclass(frozen=True, slots=True)
class Lesson:
    """What questions are about: a menu that is compact, and the whole of it."""

    menu: Menu
    whole: Menu
    when: When
    tiers: tuple[str, ...]
    min_sent_bytes: int


class Helpers:
    """So many, started when there is something to learn. Those that do not answer are not asked again, nor are the others: looking one by one is
    always possible."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._workers: list[_Worker] = []
        self._begun: list[Future[Any]] = []

    def __bool__(self) -> bool:
        """Whether there are any, and they have answered so far."""
        return bool(self._workers)

    def learn(self, lesson: Lesson) -> None:
        """What the next questions are about."""
        self._begun.clear()
        try:
            while len(self._workers) < self._count:
                self._workers.append(_Worker())
        except OSError:
            self.close()
        told = pickle.dumps(("menu", lesson))
        for worker in self._workers:
            worker.thread.submit(worker.tell, told)

    def have_started(self, seconds: float) -> bool:
        """Whether all of them have, after so many seconds at most."""
        done, late = wait([worker.started for worker in self._workers], seconds)
        return not late and all(one.exception() is None for one in done)

    def look(self, asked: Iterable[tuple[Mapping[str, Placement], Taken]], other: Chosen) -> list[Chosen | None] | None:
        """Each with what was planned for another one's activations; asked for one by one, as somebody has time for it. None: no answers."""
        return self._answers((("states", dict(states), taken) for states, taken in asked), ("activations", other))

    def glance(self, asked: Iterable[tuple[Split, Taken]]) -> list[tuple[Split, float] | None] | None:
        """Of each split, itself or the nearest lighter one that fits, and about its seconds. None: no answers."""
        return self._answers(("glance", split, taken) for split, taken in asked)

    def plan(self, asked: Iterable[tuple[Split, bool, Taken]]) -> list[Chosen | None] | None:
        """What is planned for each split, with activations that are sent or without. None: no answers."""
        return self._answers(("split", (split, sends), taken) for split, sends, taken in asked)

    def seconds(self, asked: Iterable[tuple[Program, Taken]]) -> list[float | None] | None:
        """Of each, with each update by itself; None for one that does not fit, and for all if there are no answers."""
        return self._answers(("program", program, taken) for program, taken in asked)

    def hear(self, asked: Iterable[tuple[Program, T, Taken]], heard: Callable[[Program, T, T | None], None]) -> None:
        """Of each, how long it takes if that is less than another one does, told as soon as it is known and before the next is asked for."""

        def told(question: tuple[str, tuple[Program, T], Taken], found: T | None) -> None:
            program, than = question[1]
            heard(program, than, found)

        self._answers((("drawn", (program, than), taken) for program, than, taken in asked), heard=told)

    def begin_to_send(self, asked: Iterable[tuple[Split, Taken]]) -> None:
        """Half of them look for what is near these with activations that are sent, and the others answer meanwhile."""
        half = self._workers[: len(self._workers) // 2]
        questions = [pickle.dumps(("sending", split, taken)) for split, taken in asked]
        for number, question in enumerate(questions if half else ()):
            worker = half[number % len(half)]
            self._begun.append(worker.begin(question))

    def sent(self, seconds: float) -> list[tuple[Split, Chosen]]:
        """What they have found, after so many seconds at most."""
        done, _ = wait(self._begun, max(0.0, seconds))
        found = [future.result() for future in self._begun if future in done and not future.cancelled() and future.exception() is None]
        self._begun.clear()
        return [one for one in found if one is not None]

    def _answers(
        self, questions: Iterable[tuple[Any, ...]], *before: tuple[Any, ...], heard: Callable[[Any, Any], None] = lambda *_: None
    ) -> list[Any] | None:
        if not self.have_started(PATIENCE_SECONDS):
            self.close()
        found: list[Any] = []
        left, lock = iter(questions), threading.Lock()
        told = [pickle.dumps(one) for one in before]

        def work(worker: _Worker) -> None:
            for one in told:
                worker.tell(one)
            while True:
                with lock:
                    question = next(left, None)
                    if question is None:
                        return
                    number = len(found)
                    found.append(None)
                found[number] = worker.ask(pickle.dumps(question))
                with lock:
                    heard(question, found[number])

        working = [worker.thread.submit(work, worker) for worker in self._workers if worker.is_free]
        try:
            for one in working:
                one.result(PATIENCE_SECONDS)
        except Exception:  # a process that was killed, or hangs
            self.close()
            return None
        return found if working else None

    def close(self) -> None:
        for worker in self._workers:
            worker.close()
        self._workers, self._count = [], 0
        self._begun.clear()


@contextlib.contextmanager
def helpers(count: int) -> Iterator[Helpers]:
    found = Helpers(count)
    try:
        yield found
    finally:
        found.close()


class _Worker:
    """A process, and the thread that talks to it."""

    def __init__(self) -> None:
        # Not in the folder of the user's script, whose files may be called as modules of Python are.
        path = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
        command = [sys.executable, "-P", "-m", "tierwise.lower.helper"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": os.pathsep.join(path)}, **pipes)  # type: ignore[call-overload]
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="tierwise helper")
        self.started = self.thread.submit(self._hear)
        self._begun: list[Future[Any]] = []

    @property
    def is_free(self) -> bool:
        return all(one.done() for one in self._begun)

    def begin(self, question: bytes) -> Future[Any]:
        """To be answered when it is."""
        self._begun.append(self.thread.submit(self.ask, question))
        return self._begun[-1]

    def tell(self, what: bytes) -> None:
        self._process.stdin.write(what)
        self._process.stdin.flush()

    def ask(self, what: bytes) -> Any:
        self.tell(what)
        return self._hear()

    def _hear(self) -> Any:
        return pickle.load(self._process.stdout)

    def close(self) -> None:
        self._process.kill()
        self.thread.shutdown(wait=True, cancel_futures=True)
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()
