"""The disk tier: one scratch file in a directory the user names, its space claimed in full at the start and given back at the end.

A file left behind by a process that was killed is removed by the next store in that directory; those of living processes are locked and left
alone. What must outlive the process is published: written beside the last state and put in its place only when complete.
"""

from __future__ import annotations

import os
import shutil
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path

import torch

from ..errors import StorageFault, StorageFull
from ..units import exact_bytes, format_bytes
from .blocks import BLOCK_BYTES, REQUESTS, BlockIO, Extent, Move
from .files import PageFile, exclusive, remove_if_abandoned
from .host_pool import PAGE_BYTES, HostPool
from .lanes import Event
from .offsets import Offsets, round_up
from .published import Published, Publisher


class NvmeStore:
    """`capacity_bytes` of disk under `directory`, read and written through `requests` buffers of `block_bytes` out of `pool`."""

    def __init__(
        self, directory: str | Path, capacity_bytes: int, pool: HostPool, *, block_bytes: int = BLOCK_BYTES, requests: int = REQUESTS
    ) -> None:
        self.directory = Path(directory)
        self.capacity_bytes = round_up(capacity_bytes, PAGE_BYTES)
        self._io = BlockIO(pool, block_bytes=block_bytes, requests=requests)
        try:
            self._file = _scratch_file(self.directory, self.capacity_bytes)
        except BaseException:
            self._io.close()
            raise
        self._lock = threading.Lock()
        self._offsets = Offsets(0, self.capacity_bytes)
        self._freed: deque[Extent] = deque()
        self._end = weakref.finalize(self, _end, self._io, self._file, os.getpid())

    def __enter__(self) -> NvmeStore:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def path(self) -> Path:
        return self._file.path

    @property
    def bytes_written(self) -> int:
        """Wear: what a disk's endurance is counted in."""
        return self._io.bytes_written

    @property
    def bytes_read(self) -> int:
        return self._io.bytes_read

    def reserve(self, nbytes: int) -> Extent:
        """The first place with room, until it is freed."""
        with self._lock:
            while self._freed:
                extent = self._freed.popleft()
                assert extent.place is not None
                self._offsets.give(extent.place, [extent.last])
            place = self._offsets.take(nbytes, PAGE_BYTES)
            if place is None and self._offsets.lost_bytes > 0:
                self._io.settle()
                self._offsets.recover()
                place = self._offsets.take(nbytes, PAGE_BYTES)
            free_bytes = self._offsets.free_bytes
        if place is None:
            raise StorageFull(
                f"the disk tier has no room for {format_bytes(nbytes)}: {format_bytes(free_bytes)} of {format_bytes(self.capacity_bytes)} "
                f"are free; allow more with nvme="
            )
        return self._io.extent(place.offset, nbytes, place=place)

    def free(self, extent: Extent) -> None:
        """Take an extent back. Safe in a finalizer: it only leaves a note."""
        self._freed.append(extent)

    def write_async(self, extent: Extent, view: torch.Tensor) -> Event:
        """Write a host tensor of bytes, which stays as it is until the event."""
        return self._io.write(self._file, extent, view)

    def read_async(self, extent: Extent, view: torch.Tensor) -> Event:
        """Read into a host tensor of bytes, which is not touched until the event. Wrong bytes are the event's failure."""
        return self._io.read(self._file, extent, view)

    def write_from(self, extent: Extent, fill: Move) -> Event:
        """Write what `fill` puts into a buffer, block by block; it is called from several threads."""
        return self._io.write_from(self._file, extent, fill)

    def read_into(self, extent: Extent, take: Move) -> Event:
        """Read, and let `take` have each block; it is called from several threads."""
        return self._io.read_into(self._file, extent, take)

    def when(self, after: Sequence[Event], what: Callable[[], object]) -> None:
        """Call something on a thread of the store when events have happened."""
        self._io.when(after, what)

    def publish(self, name: str, nbytes: int) -> Publisher:
        """Write a state of at most `nbytes` that outlives the process: `with store.publish(...) as state: state.write(key, view)`."""
        return Publisher(self.directory, name, nbytes, self._io)

    def open_published(self, name: str) -> Published:
        """The last complete state of that name: `with store.open_published(...) as state: state.read(key, view)`."""
        return Published(self.directory, name, self._io)

    def close(self) -> None:
        """Finish what runs, fail what is queued, remove the scratch file. Published states stay."""
        self._end()


def _end(io: BlockIO, file: PageFile, owner: int) -> None:
    if os.getpid() == owner:  # a forked child has neither the threads nor the file
        io.close()
        file.close(remove=True)


def _scratch_file(directory: Path, nbytes: int) -> PageFile:
    if not directory.is_dir():
        raise StorageFault(f"{directory} is not a directory; make it first, or name another with nvme=")
    with exclusive(directory):
        for path in sorted(directory.glob("tierwise-*.scratch")):
            remove_if_abandoned(path)
        free_bytes = shutil.disk_usage(directory).free
        if nbytes > free_bytes:
            raise StorageFull(
                f"{directory} has {format_bytes(free_bytes)} free and nvme= asks for {format_bytes(nbytes)}; "
                f"ask for at most {exact_bytes(free_bytes)} or free some space"
            )
        names = (directory / f"tierwise-{os.getpid()}-{number}.scratch" for number in count())
        file = PageFile(next(path for path in names if not path.exists()), nbytes=nbytes)
        file.lock()
    return file
