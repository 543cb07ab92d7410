"""Where the arrays of a unit lie: its state on the device, in host memory or on disk, its parameters in host memory or on disk.

Whoever updates a unit goes through its chunks:

    home.start(chunk, ring)          begin to fetch it, if it is on disk, into the next buffer of a ring; not if it is made afresh
    arrays, after = home.take(chunk) in host memory, to be touched after these events
    home.give(chunk, after)          it has been changed, or will have been after this event; on disk it is written back
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from ..device import Device, Direction
from ..host_pool import PAGE_BYTES, Block, HostPool
from ..lanes import Event, already, settled
from ..nvme import NvmeStore
from ..offsets import round_up
from .units import Unit


class Ring:
    """Buffers of host memory, each used again when what used it last is over. For one thread."""

    def __init__(self, pool: HostPool, nbytes: int, count: int) -> None:
        self._pool = pool
        self._free: queue.SimpleQueue[tuple[Block, Event]] = queue.SimpleQueue()
        self._blocks: list[Block] = []
        self.nbytes = nbytes
        for _ in range(count):
            block = pool.allocate(nbytes, alignment=PAGE_BYTES)
            self._blocks.append(block)
            for event in block.after:
                event.wait()
            self._free.put((block, already()))

    def next(self) -> Block:
        block, last = self._free.get_nowait()  # whoever takes without giving back is wrong, and would wait for ever
        last.wait()
        return block

    def give(self, block: Block, after: Event) -> None:
        self._free.put((block, after))

    def renew(self) -> None:
        """After a failure: all buffers are free again."""
        self._settle()
        for block in self._blocks:
            self._free.put((block, already()))

    def _settle(self) -> None:
        while not self._free.empty():
            settled(self._free.get()[1]).wait()

    def close(self) -> None:
        self._settle()
        for block in self._blocks:
            self._pool.free(block)
        self._blocks.clear()


class ChunkHome(Protocol):
    """`arrays` of a chunk: a tensor of one row for each array."""

    rows: int
    dtype: torch.dtype

    def start(self, index: int, ring: Ring | None, *, fresh: bool = False) -> None: ...

    def take(self, index: int) -> tuple[torch.Tensor, tuple[Event, ...]]: ...

    def block(self, index: int) -> Block: ...

    def span(self, index: int) -> slice:
        """The chunk's bytes in its block."""

    def give(self, index: int, after: Event) -> None: ...

    def renew(self) -> None:
        """After a failure: what is kept will be written anew."""

    def free(self) -> None: ...


class HostChunks:
    """A block of the pool for each chunk."""

    def __init__(self, unit: Unit, rows: int, dtype: torch.dtype, pool: HostPool) -> None:
        self.rows, self.dtype = rows, dtype
        self._pool = pool
        self.blocks: list[Block] = []
        self._arrays: list[torch.Tensor] = []
        self._last: list[Event] = []
        for chunk in unit.chunks():
            block = pool.allocate(rows * (chunk.stop - chunk.start) * dtype.itemsize)
            for event in block.after:
                event.wait()
            block.bytes.zero_()
            self.blocks.append(block)
            self._arrays.append(block.bytes.view(dtype).view(rows, -1 if rows else 0))
            self._last.append(already())

    def start(self, index: int, ring: Ring | None, *, fresh: bool = False) -> None:
        pass

    def take(self, index: int) -> tuple[torch.Tensor, tuple[Event, ...]]:
        return self._arrays[index], (self._last[index],)

    def block(self, index: int) -> Block:
        return self.blocks[index]

    def span(self, index: int) -> slice:
        return slice(0, self.blocks[index].nbytes)

    def give(self, index: int, after: Event) -> None:
        self._last[index] = after

    def renew(self) -> None:
        for last in self._last:
            settled(last).wait()
        self._last = [already() for _ in self._last]

    def free(self) -> None:
        for block, last in zip(self.blocks, self._last, strict=True):
            self._pool.free(block, [last])
        self.blocks, self._arrays, self._last = [], [], []


class HostFlat:
    """One piece of host memory for the whole unit, in a pool of its own: a model in host memory moves there region by region, never twice there."""

    rows = 1

    def __init__(self, unit: Unit, device: Device) -> None:
        self.dtype = unit.dtype
        self._chunks = unit.chunks()
        self._pool = HostPool(max(1, unit.nbytes), device)
        self.whole = self._pool.allocate(max(1, unit.nbytes))
        self._arrays = [self.flat[chunk].view(1, -1) for chunk in self._chunks]
        self.last: Event = already()  # of the copies from and to it

    @property
    def flat(self) -> torch.Tensor:
        return self.whole.bytes.view(self.dtype)

    def start(self, index: int, ring: Ring | None, *, fresh: bool = False) -> None:
        pass

    def take(self, index: int) -> tuple[torch.Tensor, tuple[Event, ...]]:
        return self._arrays[index], (self.last,)

    def block(self, index: int) -> Block:
        return self.whole

    def span(self, index: int) -> slice:
        chunk, size = self._chunks[index], self.dtype.itemsize
        return slice(chunk.start * size, chunk.stop * size)

    def give(self, index: int, after: Event) -> None:
        self.last = after

    def renew(self) -> None:
        settled(self.last).wait()
        self.last = already()

    def free(self) -> None:
        settled(self.last).wait()
        self._arrays = []
        del self.whole  # with which its memory would be there as long as anybody knows of this
        self._pool.close()


class DiskChunks:
    """An extent of the store for each chunk. Chunks pass through the buffers of a ring: one being read, one in work, one being written."""

    def __init__(self, unit: Unit, rows: int, dtype: torch.dtype, store: NvmeStore) -> None:
        self.rows, self.dtype = rows, dtype
        self._store = store
        self._chunks = unit.chunks()
        self._extents = [store.reserve(self._nbytes(chunk)) for chunk in self._chunks]
        self._here: dict[int, tuple[Block, Event, Ring]] = {}

    @property
    def nbytes(self) -> int:
        return sum(map(self._nbytes, self._chunks))

    def create(self, index: int, ring: Ring) -> torch.Tensor:
        """Memory for a chunk that is not on disk yet; `give` writes it."""
        block = ring.next()
        self._here[index] = block, already(), ring
        return self._arrays(index).zero_()

    def start(self, index: int, ring: Ring | None, *, fresh: bool = False) -> None:
        if index in self._here:
            return
        assert ring is not None
        block = ring.next()
        if fresh:
            self._here[index] = block, already(), ring
        else:
            self._here[index] = block, self._store.read_async(self._extents[index], self._bytes(block, index)), ring

    def take(self, index: int) -> tuple[torch.Tensor, tuple[Event, ...]]:
        self._here[index][1].wait()
        return self._arrays(index), ()

    def block(self, index: int) -> Block:
        return self._here[index][0]

    def span(self, index: int) -> slice:
        return slice(0, self._nbytes(self._chunks[index]))

    def give(self, index: int, after: Event) -> None:
        block, _, ring = self._here[index]
        after.wait()
        written = self._store.write_async(self._extents[index], self._bytes(block, index))
        del self._here[index]
        ring.give(block, written)

    def drop(self, index: int) -> None:
        """Nothing was changed, so nothing is written."""
        block, _, ring = self._here.pop(index)
        ring.give(block, already())

    def read_into(self, index: int, device: Device, destination: torch.Tensor, after: Sequence[Event]) -> Event:
        """Bring a chunk to the device without a buffer of its own."""

        def take(buffer: torch.Tensor, part: slice) -> None:
            device.copy(Direction.IN, destination[part], buffer, after=after).wait()

        return self._store.read_into(self._extents[index], take)

    def write_from(self, device: Device, source: torch.Tensor, ready: Event) -> None:
        """Write all chunks from bytes on the device, and wait for it."""

        def fill_from(part_of_unit: slice) -> Callable[[torch.Tensor, slice], None]:
            here = source[part_of_unit]

            def fill(buffer: torch.Tensor, part: slice) -> None:
                device.copy(Direction.OUT, buffer, here[part], after=(ready,)).wait()

            return fill

        size = self.rows * self.dtype.itemsize
        for extent, chunk in zip(self._extents, self._chunks, strict=True):
            self._store.write_from(extent, fill_from(slice(chunk.start * size, chunk.stop * size))).wait()

    def read(self, index: int) -> torch.Tensor:
        """A chunk in memory of its own."""
        whole = torch.empty(self._nbytes(self._chunks[index]), dtype=torch.uint8)
        self._store.read_async(self._extents[index], whole).wait()
        return whole.view(self.dtype).view(self.rows, -1)

    def read_part(self, span: slice, flat: torch.Tensor, *, row: int = 0) -> None:
        """Read elements `span` of a row into host memory, and wait for it."""
        for index, chunk in enumerate(self._chunks):
            start, stop = max(span.start, chunk.start), min(span.stop, chunk.stop)
            if start < stop:
                flat[start - span.start : stop - span.start].copy_(self.read(index)[row, start - chunk.start : stop - chunk.start])

    def renew(self) -> None:
        self._here.clear()
        self.free()
        self._extents = [self._store.reserve(self._nbytes(chunk)) for chunk in self._chunks]

    def free(self) -> None:
        for extent in self._extents:
            settled(extent.last).wait()
            self._store.free(extent)
        self._extents = []

    def _nbytes(self, chunk: slice) -> int:
        return int(self.rows * (chunk.stop - chunk.start) * self.dtype.itemsize)

    def _bytes(self, block: Block, index: int) -> torch.Tensor:
        return block.bytes[: self._nbytes(self._chunks[index])]

    def _arrays(self, index: int) -> torch.Tensor:
        return self._bytes(self._here[index][0], index).view(self.dtype).view(self.rows, -1)


def chunk_bytes(unit: Unit, rows: int, dtype: torch.dtype) -> int:
    """A buffer for the largest chunk of a unit, in whole pages."""
    elements: int = min(unit.chunk_elements, unit.numel)
    return round_up(rows * elements * dtype.itemsize, PAGE_BYTES)


def copy_block(device: Device, direction: Direction, block: Block, span: slice, other: torch.Tensor, *, after: Sequence[Event]) -> Event:
    """Copy between bytes `span` of a block and as many on the device."""
    if span.start >= span.stop:
        return already()
    count = span.stop - span.start
    host = block.bytes if count == block.nbytes else block.bytes[span]
    there = other if count == other.numel() else other[:count]
    return device.copy(direction, *((host, there) if direction is Direction.OUT else (there, host)), after=after)
