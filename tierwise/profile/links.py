"""Links measured by size: a copy costs latency + bytes / rate, fitted to what copies of several sizes really took."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..ir import Link
from .timing import device_seconds, host_seconds

COPY_SIZES = tuple(1 << power for power in (16, 18, 20, 22, 25, 28))
DISK_REQUEST_BYTES = 16 << 20
DISK_REQUESTS_IN_FLIGHT = 4
DISK_TEST_BYTES = 512 << 20


@dataclass(frozen=True, slots=True)
class Affine:
    """seconds = latency_seconds + nbytes / bytes_per_second"""

    latency_seconds: float
    bytes_per_second: float


@dataclass(frozen=True, slots=True)
class DiskRates:
    """Bytes a second written and read, each alone; and of both together, as much read as written at the same time."""

    write: float
    read: float
    both: float

    def applied(self, link: Link) -> Link:
        """A link to or from this disk at its rates. Each way has a lane, and both share one: as much read as written takes what was measured of both,
        and nothing is slower than one after the other."""
        if "nvme" not in (link.src, link.dst):
            return link
        way, rate = ("disk write", self.write) if link.dst == "nvme" else ("disk read", self.read)
        in_turn = 2 / (1 / self.write + 1 / self.read)
        return replace(link, lanes={**link.lanes, way: rate, "disk": rate * max(1.0, self.both / in_turn)})


def fit(seconds_by_size: Mapping[int, float]) -> Affine:
    """The line with the least squared relative error, so that small copies count as much as large ones; the latency is never negative."""
    import numpy as np

    sizes = np.array(list(seconds_by_size), dtype=float)
    seconds = np.array(list(seconds_by_size.values()))
    (latency, per_byte), *_ = np.linalg.lstsq(np.stack([1 / seconds, sizes / seconds], axis=1), np.ones(len(sizes)), rcond=None)
    if latency < 0:
        latency, per_byte = 0.0, float(np.mean(seconds / sizes))
    return Affine(float(latency), float(1 / per_byte))


def measure_device_link(sizes: Sequence[int] = COPY_SIZES) -> tuple[Affine, Affine]:
    """Out and in, between pinned host memory and the current CUDA device, each way alone, copies queued one behind the other."""
    import torch

    out: dict[int, float] = {}
    back: dict[int, float] = {}
    for size in sizes:
        host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        device = torch.empty(size, dtype=torch.uint8, device="cuda")
        count = max(4, min(256, (1 << 26) // size))

        def copies(target: Any, source: Any, count: int = count) -> None:
            for _ in range(count):
                target.copy_(source, non_blocking=True)

        out[size] = device_seconds(lambda h=host, d=device: copies(h, d), repeats=5) / count  # type: ignore[misc]
        back[size] = device_seconds(lambda h=host, d=device: copies(d, h), repeats=5) / count  # type: ignore[misc]
    return fit(out), fit(back)


def measure_disk(directory: Path, nbytes: int | None = None) -> DiskRates:
    """Of files in a directory, past the page cache where the file system allows it."""
    nbytes = nbytes or DISK_TEST_BYTES
    requests = nbytes // DISK_REQUEST_BYTES
    direct = getattr(os, "O_DIRECT", 0)
    with tempfile.TemporaryDirectory(dir=directory, prefix=".tierwise-probe-") as scratch, ThreadPoolExecutor(DISK_REQUESTS_IN_FLIGHT) as pool:
        path = Path(scratch) / "block"
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | direct, 0o600)
        except OSError:
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        block = mmap.mmap(-1, DISK_REQUEST_BYTES)  # page aligned, as O_DIRECT asks
        targets = [mmap.mmap(-1, DISK_REQUEST_BYTES) for _ in range(DISK_REQUESTS_IN_FLIGHT)]
        block[:] = os.urandom(4096) * (DISK_REQUEST_BYTES // 4096)
        try:

            def write(place: int) -> None:
                os.pwrite(handle, block, place * DISK_REQUEST_BYTES)

            def read(place: int) -> None:
                os.preadv(handle, [targets[place % DISK_REQUESTS_IN_FLIGHT]], place * DISK_REQUEST_BYTES)

            def either(turn: int) -> None:
                """Every second request reads, and what it reads is not what is being written."""
                place = turn // 2
                if turn % 2:
                    write(place)
                else:
                    read((place + requests // 2) % requests)

            def all_of(work: Any, count: int = requests) -> None:
                list(pool.map(work, range(count)))
                os.fsync(handle)

            written = host_seconds(lambda: all_of(write), repeats=2)
            was_read = host_seconds(lambda: all_of(read), repeats=2)
            both = host_seconds(lambda: all_of(either, 2 * requests), repeats=1, warm_up=0)
        finally:
            os.close(handle)
    return DiskRates(nbytes / written, nbytes / was_read, 2 * nbytes / both)
