"""Where bytes that left the device stay: a block of host memory, or an extent of the disk store. Both say when a copy is done by an event."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from .device import Device, Direction, Moment
from .host_pool import Block, HostPool
from .lanes import Event
from .nvme import NvmeStore


class Pool(Protocol):
    """Host memory: one slab, or several."""

    def place(self, nbytes: int) -> tuple[HostPool, Block]: ...


class Home(Protocol):
    """A place in a lower tier."""

    def write(self, source: torch.Tensor, ready: Event) -> Event: ...

    def read(self, destination: torch.Tensor, after: Sequence[Event]) -> Event: ...

    def moment(self, direction: Direction, after: Sequence[Event]) -> Moment: ...

    def free(self, users: Sequence[Event]) -> None: ...


class HostHome:
    """A block of the host pool."""

    def __init__(self, device: Device, pool: Pool, nbytes: int) -> None:
        self._device = device
        self._pool, self._block = pool.place(nbytes)

    def write(self, source: torch.Tensor, ready: Event) -> Event:
        return self._device.copy(Direction.OUT, self._block.bytes, source, after=(ready, *self._block.after))

    def read(self, destination: torch.Tensor, after: Sequence[Event]) -> Event:
        return self._device.copy(Direction.IN, destination, self._block.bytes, after=after)

    def moment(self, direction: Direction, after: Sequence[Event]) -> Moment:
        return self._device.moment(direction, after=after)

    def free(self, users: Sequence[Event]) -> None:
        self._pool.free(self._block, users)


class DiskHome:
    """An extent of the disk store. Each of its blocks passes through a bounce buffer, while others are on the link or on the disk."""

    def __init__(self, device: Device, store: NvmeStore, nbytes: int) -> None:
        self._device, self._store, self._extent = device, store, store.reserve(nbytes)

    def write(self, source: torch.Tensor, ready: Event) -> Event:
        def fill(buffer: torch.Tensor, part: slice) -> None:
            self._device.copy(Direction.OUT, buffer, source[part], after=(ready,)).wait()

        return self._store.write_from(self._extent, fill)

    def read(self, destination: torch.Tensor, after: Sequence[Event]) -> Event:
        def drain(buffer: torch.Tensor, part: slice) -> None:
            self._device.copy(Direction.IN, destination[part], buffer, after=after).wait()

        return self._store.read_into(self._extent, drain)

    def moment(self, direction: Direction, after: Sequence[Event]) -> Moment:
        found = Moment()
        self._store.when(after, found.now)
        return found

    def free(self, users: Sequence[Event]) -> None:
        self._store.free(self._extent)
