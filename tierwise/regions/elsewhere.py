"""Processes that lower graphs while this one traces the next. They only save time: what they did not do is done here."""

from __future__ import annotations

import contextlib
import logging
import os
import struct
import subprocess
import sys
import threading
from pathlib import Path
from queue import SimpleQueue

import psutil
import torch

from .lowering import TracedCall, as_bytes

__all__ = ["Elsewhere", "Job"]

_log = logging.getLogger("tierwise")
MOST_PROCESSES = 8
SECONDS_TO_END = 5.0  # for a thread whose process has ended
PROCESS_BYTES = 2 << 30  # of host memory, with torch and its compiler loaded
CONTEXT_BYTES = 600 << 20  # of a GPU's memory: 525 MiB were seen on an H200


class Job:
    """A traced call that some process may lower, or whoever waits for it."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self._claim = threading.Lock()
        self._done = threading.Event()

    def claim(self) -> bool:
        """True for the first who asks: it is theirs to do."""
        return self._claim.acquire(blocking=False)

    def finish(self) -> None:
        self._done.set()

    def wait(self, seconds: float) -> None:
        self._done.wait(seconds)


class Elsewhere:
    """Nothing until it is started, which takes seconds to be of use; its processes end with the `with` block.

    with Elsewhere() as elsewhere:
        elsewhere.start(device)
        ...
        job = elsewhere.lower_later(traced)
    """

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        self._threads: list[threading.Thread] = []
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()

    @property
    def is_running(self) -> bool:
        return bool(self._processes)

    def start(self, device: torch.device, processes: int | None = None) -> None:
        """As many processes as this machine has room for; none if that is one or two."""
        found = processes if processes is not None else room_for(device)
        if self.is_running or (processes is None and found <= 2):
            return
        self._jobs = SimpleQueue()
        self._processes = [_process() for _ in range(found)]
        self._threads = [threading.Thread(target=_serve, args=(process, self._jobs), daemon=True) for process in self._processes]
        for thread in self._threads:
            thread.start()

    def lower_later(self, traced: TracedCall) -> Job | None:
        """What a process will do that finds the time; None for what cannot be sent."""
        try:
            job = Job(as_bytes(traced))
        except Exception as error:  # whatever a pickler does not like
            _log.debug("a graph is not lowered in another process: %s", error)
            return None
        self._jobs.put(job)
        return job

    def __enter__(self) -> Elsewhere:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()  # whoever reads from it reads the end
            self._jobs.put(None)
        for process, thread in zip(self._processes, self._threads, strict=True):
            process.wait()
            thread.join(SECONDS_TO_END)
            for pipe in (process.stdin, process.stdout) if not thread.is_alive() else ():
                with contextlib.suppress(OSError):  # what was not sent is not missed
                    if pipe is not None:
                        pipe.close()
        self._processes, self._threads = [], []


def _serve(process: subprocess.Popen[bytes], jobs: SimpleQueue[Job | None]) -> None:
    """Give a process jobs that nobody has claimed, from when it says that it is ready until it ends."""
    assert process.stdin is not None and process.stdout is not None
    alive = process.stdout.read(1) != b""
    while alive and (job := jobs.get()) is not None:
        if not job.claim():
            continue
        try:
            process.stdin.write(struct.pack("<Q", len(job.data)) + job.data)
            process.stdin.flush()
            alive = process.stdout.read(1) != b""
        except OSError:
            alive = False
        finally:
            job.finish()


def room_for(device: torch.device) -> int:
    """At most half of what is free: of cores, of host memory, and of the device's, where each process is present while it lasts."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    most = min(MOST_PROCESSES, cores // 2, psutil.virtual_memory().available // 2 // PROCESS_BYTES)
    if device.type == "cuda":
        most = min(most, torch.cuda.mem_get_info(device)[0] // 2 // CONTEXT_BYTES)
    return int(most)


def _process() -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or str(Path.cwd()) for path in sys.path), "TORCH_WARM_POOL": "0"}
    command = [sys.executable, "-m", "tierwise.regions.lowering_process"]
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
