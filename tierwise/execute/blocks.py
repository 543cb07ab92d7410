"""Bytes to files and back in checksummed blocks, several at once, each through a bounce buffer of the host pool.

While one block is on the disk the next is on the link: whoever fills or takes a buffer may copy from or to a device meanwhile.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import xxhash

from ..errors import CorruptBlock, StorageFault
from .files import PageFile
from .host_pool import PAGE_BYTES, Block, HostPool
from .lanes import Event, Lane, all_of, already
from .offsets import Place, round_up

BLOCK_BYTES = 16 << 20  # large enough for a disk's full rate, small enough that four bounce buffers are no cost
REQUESTS = 4

Move = Callable[[torch.Tensor, slice], object]
"""Fills a buffer with this slice of the bytes to be written, or takes this slice of the bytes read from it."""


@dataclass(eq=False, slots=True)
class Extent:
    """Bytes of a file. Each operation on it comes after the one before, and fails if that failed."""

    offset: int
    nbytes: int
    checksums: list[int | None]  # by block; None: never written
    block_bytes: int
    place: Place | None = None  # whose bytes these are for as long as the extent lives; None: nobody else asks for them
    last: Event = field(default_factory=already)


class BlockIO:
    """`requests` threads, each with a bounce buffer of `block_bytes`."""

    def __init__(self, pool: HostPool, *, block_bytes: int = BLOCK_BYTES, requests: int = REQUESTS) -> None:
        self.block_bytes = round_up(block_bytes, PAGE_BYTES)
        self.bytes_written = 0  # wear: what a disk's endurance is counted in
        self.bytes_read = 0
        self._pool = pool
        self._bounces: queue.SimpleQueue[Block] = queue.SimpleQueue()
        self._count_lock = threading.Lock()
        self._lane = Lane("disk", threads=requests)
        try:
            for _ in range(requests):
                self._bounces.put(_settled_block(pool, self.block_bytes))
        except BaseException:
            self.close()
            raise

    def extent(self, offset: int, nbytes: int, *, place: Place | None = None) -> Extent:
        """An extent nothing was written to."""
        extent = Extent(offset, nbytes, [None] * -(-nbytes // self.block_bytes), self.block_bytes, place)
        if place is not None and place.after:
            extent.last = self._lane.put(lambda: None, after=place.after)
        return extent

    def write(self, file: PageFile, extent: Extent, view: torch.Tensor) -> Event:
        """Write a host tensor of bytes, which stays as it is until the event. Blocks of it that lie on pages need no buffer."""
        return self._start(extent, partial(self._write, file, extent, lambda buffer, part: buffer.copy_(view[part]), view))

    def read(self, file: PageFile, extent: Extent, view: torch.Tensor) -> Event:
        """Read into a host tensor of bytes, which is not touched until the event."""
        return self._start(extent, partial(self._read, file, extent, lambda buffer, part: view[part].copy_(buffer), view))

    def write_from(self, file: PageFile, extent: Extent, fill: Move) -> Event:
        """Write what `fill` puts into a buffer, block by block; it is called from several threads."""
        return self._start(extent, partial(self._write, file, extent, fill, None))

    def read_into(self, file: PageFile, extent: Extent, take: Move) -> Event:
        """Read, and let `take` have each block; it is called from several threads."""
        return self._start(extent, partial(self._read, file, extent, take, None))

    def when(self, after: Sequence[Event], what: Callable[[], object]) -> None:
        self._lane.put(what, after=after)

    def settle(self) -> None:
        """Block until nothing moves."""
        self._lane.drain()

    def close(self) -> None:
        """Finish what runs, fail what is queued, return the buffers."""
        self._lane.close()
        with contextlib.suppress(queue.Empty):
            while True:
                self._pool.free(self._bounces.get_nowait())

    def _start(self, extent: Extent, operation: Callable[[int, slice], None]) -> Event:
        starts = range(0, extent.nbytes, extent.block_bytes)
        parts = [slice(start, min(start + extent.block_bytes, extent.nbytes)) for start in starts]
        extent.last = all_of([self._lane.put(partial(operation, *numbered), after=(extent.last,)) for numbered in enumerate(parts)])
        return extent.last

    def _write(self, file: PageFile, extent: Extent, fill: Move, view: torch.Tensor | None, index: int, part: slice) -> None:
        nbytes = part.stop - part.start
        with self._buffer(view, part) as (buffer, bounced):
            if bounced:
                fill(buffer[:nbytes], part)
            extent.checksums[index] = checksum(buffer[:nbytes])
            file.write(_memory(buffer), extent.offset + part.start)
        with self._count_lock:
            self.bytes_written += buffer.numel()

    def _read(self, file: PageFile, extent: Extent, take: Move, view: torch.Tensor | None, index: int, part: slice) -> None:
        nbytes, expected = part.stop - part.start, extent.checksums[index]
        if expected is None:
            raise StorageFault(f"block {index} at byte {extent.offset + part.start} of {file.path} was never written and cannot be read")
        with self._buffer(view, part) as (buffer, bounced):
            file.read(_memory(buffer), extent.offset + part.start)
            if checksum(buffer[:nbytes]) != expected:
                raise CorruptBlock(
                    f"{nbytes} bytes at byte {extent.offset + part.start} of {file.path} are not what was written there (checksums differ); "
                    f"the disk or another program changed them"
                )
            if bounced:
                take(buffer[:nbytes], part)
        with self._count_lock:
            self.bytes_read += buffer.numel()

    @contextlib.contextmanager
    def _buffer(self, view: torch.Tensor | None, part: slice) -> Iterator[tuple[torch.Tensor, bool]]:
        """Whole pages for one block: the view itself where it lies on them, else a bounce buffer."""
        nbytes = part.stop - part.start
        if view is not None and (view.data_ptr() + part.start) % PAGE_BYTES == 0 and nbytes % PAGE_BYTES == 0:
            yield view[part], False
            return
        bounce = self._bounces.get()  # one for each thread, so there is always one
        try:
            yield bounce.bytes[: round_up(nbytes, PAGE_BYTES)], True
        finally:
            self._bounces.put(bounce)


def checksum(data: torch.Tensor) -> int:
    digest = xxhash.xxh3_64()
    digest.update(_memory(data))  # lets other threads run, unlike the one-call form of older versions
    return digest.intdigest()


def _settled_block(pool: HostPool, nbytes: int) -> Block:
    block = pool.allocate(nbytes, alignment=PAGE_BYTES)
    for event in block.after:
        event.wait()
    return block


def _memory(data: torch.Tensor) -> memoryview:
    return data.numpy().data
