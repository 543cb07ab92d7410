"""Other processes that look at placements for a search, as many at a time as the host has cores to spare; without them it looks one by one.

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
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ..ir import Menu, Placement
from .choose import Chosen

MOST = 8
CORES_EACH = 2  # the rest is for whoever else is at work here
PATIENCE_SECONDS = 5.0  # for a batch of looks, of a fraction of a second each, and for starting up
Asked = tuple[Mapping[str, Placement], int]  # states, and the bytes of the device that they take all the time


def spare() -> int:
    """How many the host has cores for; other processes of this job on it plan at the same time."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    others = os.environ.get("LOCAL_WORLD_SIZE", "1")
    found = cores // CORES_EACH // max(1, int(others) if others.isdigit() else 1)
    return min(MOST, found) if found > 1 else 0


class Helpers:
    """So many, started when there is something to learn."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._workers: list[_Worker] = []

    def __bool__(self) -> bool:
        """Whether there are any, and they have answered so far."""
        return bool(self._workers)

    def learn(self, menu: Menu, update: str, ahead: int) -> None:
        """What the next questions are about."""
        try:
            while len(self._workers) < self._count:
                self._workers.append(_Worker())
        except OSError:
            self.close()
        told = pickle.dumps(("menu", menu, update, ahead))
        for worker in self._workers:
            worker.thread.submit(worker.tell, told)

    def look(self, asked: Sequence[Asked], other: Chosen) -> list[Chosen | None] | None:
        """Each with what was planned for another one's activations. None: they do not answer, and will not be asked again."""
        found: list[Chosen | None] = [None] * len(asked)
        left, lock = iter(enumerate(asked)), threading.Lock()
        told = pickle.dumps(("activations", other))

        def work(worker: _Worker) -> None:
            worker.tell(told)
            while True:
                with lock:
                    number, (states, passing) = next(left, (-1, ({}, 0)))
                if number < 0:
                    return
                found[number] = worker.ask(pickle.dumps(("states", dict(states), passing)))

        working = [worker.thread.submit(work, worker) for worker in self._workers]
        try:
            for one in working:
                one.result(PATIENCE_SECONDS)
        except Exception:  # a process that was killed, or hangs: whatever it is, looking one by one is always possible
            self.close()
            return None
        return found

    def close(self) -> None:
        for worker in self._workers:
            worker.close()
        self._workers, self._count = [], 0


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

    def tell(self, what: bytes) -> None:
        self._process.stdin.write(what)
        self._process.stdin.flush()

    def ask(self, what: bytes) -> Chosen | None:
        self.tell(what)
        return pickle.load(self._process.stdout)  # type: ignore[no-any-return]

    def close(self) -> None:
        self._process.kill()
        self.thread.shutdown(wait=True, cancel_futures=True)
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()
