"""Processes that lower graphs while this one traces the next. They only save time: what they did not do is done here."""

from __future__ import annotations

import contextlib
import logging
import os
import struct
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

import psutil
import torch

from .lowering import TracedCall, as_bytes

__all__ = ["Elsewhere"]

_log = logging.getLogger("tierwise")
MOST_PROCESSES = 8
PROCESS_BYTES = 2 << 30  # of host memory, with torch and its compiler loaded
CONTEXT_BYTES = 600 << 20  # of a GPU's memory: 525 MiB were seen on an H200


class Elsewhere:
    """Nothing until it is started, which takes seconds to be of use; its processes end with the `with` block.

    with Elsewhere() as elsewhere:
        elsewhere.start(device)
        ...
        done = elsewhere.lower_later(traced)
    """

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        self._idle: SimpleQueue[subprocess.Popen[bytes]] = SimpleQueue()
        self._threads: ThreadPoolExecutor | None = None

    @property
    def is_running(self) -> bool:
        return bool(self._processes)

    def start(self, device: torch.device, processes: int | None = None) -> None:
        """As many processes as this machine has room for; none if that is one or two."""
        found = processes if processes is not None else room_for(device)
        if self.is_running or (processes is None and found <= 2):
            return
        self._threads = ThreadPoolExecutor(found)
        for _ in range(found):
            self._processes.append(_process())
            self._idle.put(self._processes[-1])

    def lower_later(self, traced: TracedCall) -> Future[bool] | None:
        """Whether a process did it, some day; None for what cannot be sent."""
        assert self._threads is not None
        try:
            return self._threads.submit(self._lower, as_bytes(traced))
        except Exception as error:  # whatever a pickler does not like
            _log.debug("a graph is not lowered in another process: %s", error)
            return None

    def _lower(self, data: bytes) -> bool:
        process = self._idle.get()
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(struct.pack("<Q", len(data)) + data)
            process.stdin.flush()
            return process.stdout.read(1) == b"1"
        except OSError:
            return False
        finally:
            self._idle.put(process)

    def __enter__(self) -> Elsewhere:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)  # reads of an ended process return
        for process in self._processes:
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):  # what was not sent is not missed
                    if pipe is not None:
                        pipe.close()
        self._processes, self._threads = [], None


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
