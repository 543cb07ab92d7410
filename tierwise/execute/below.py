"""What lies below the device: host memory within its limits, the disk's file, and the copies there and back. Made when a plan first needs it.

Host memory comes in slabs. A plan gets one of its size; while something is still in an older one, or when several forwards wait for one
backward, another is added, as far as the limit allows. The disk has bounce buffers of its own, which count as host memory too.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ..errors import OutOfHostMemory, StorageFault
from ..units import exact_bytes, format_bytes
from .blocks import BLOCK_BYTES, REQUESTS
from .copies import Copies
from .device import Device
from .host_pool import PAGE_BYTES, Block, HostPool
from .nvme import NvmeStore
from .offsets import round_up

MORE_SHARE = 8  # of what there is, one part in so many at least when a slab turns out too small
BOUNCE_SHARE = 8  # of a small host limit, one part in so many for the disk's buffers


def bounce_bytes(host_limit_bytes: int | None) -> int:
    """Host memory that passing data to the disk takes."""
    full = REQUESTS * BLOCK_BYTES
    if host_limit_bytes is None or host_limit_bytes >= BOUNCE_SHARE * full:
        return full
    pages = host_limit_bytes // BOUNCE_SHARE // REQUESTS // PAGE_BYTES
    return REQUESTS * PAGE_BYTES * max(1, pages)


class Below:
    def __init__(
        self,
        device: Device,
        *,
        host_limit_bytes: int | None = None,
        pinned_limit_bytes: int | None = None,
        disk: tuple[Path, int] | None = None,
        progress: Callable[[str], None] = lambda what: None,
    ) -> None:
        self._device = device
        self._host_limit_bytes, self._pinned_limit_bytes, self._disk = host_limit_bytes, pinned_limit_bytes, disk
        self._progress = progress
        self._pools: list[HostPool] = []
        self._bounce: HostPool | None = None
        self._store: NvmeStore | None = None
        self.copies = Copies(device, self, small_bytes=device.small_copy_bytes)

    @property
    def host_bytes(self) -> int:
        return sum(pool.nbytes for pool in self._all_pools())

    @property
    def pinned_bytes(self) -> int:
        return sum(pool.pinned_bytes for pool in self._all_pools())

    @property
    def used_bytes(self) -> int:
        """What is away in host memory now."""
        return sum(pool.nbytes - pool.free_bytes for pool in self._pools)

    @property
    def disk_written_bytes(self) -> int:
        return self._store.bytes_written if self._store else 0

    @property
    def disk_read_bytes(self) -> int:
        return self._store.bytes_read if self._store else 0

    @property
    def disk_path(self) -> Path | None:
        return self._store.path if self._store else None

    def reserve(self, host_bytes: int, pinned_bytes: int) -> None:
        """So much host memory is taken by others, within the same limits; less than nothing gives it back."""
        if self._host_limit_bytes is not None:
            if host_bytes > self._host_limit_bytes - self.host_bytes:
                raise OutOfHostMemory(
                    f"lasting state takes {format_bytes(host_bytes)} of host memory and host= allows {exact_bytes(self._host_limit_bytes)}, of which "
                    f"{format_bytes(self.host_bytes)} are in use; allow more"
                )
            self._host_limit_bytes -= host_bytes
        if self._pinned_limit_bytes is not None:
            self._pinned_limit_bytes = max(0, self._pinned_limit_bytes - pinned_bytes)

    @property
    def host_left_bytes(self) -> int | None:
        """How much more may be used; None: as much as there is."""
        return None if self._host_limit_bytes is None else max(0, self._host_limit_bytes - self.host_bytes)

    @property
    def pinned_left_bytes(self) -> int | None:
        """How much more may be locked; None: as much as the system lets."""
        return None if self._pinned_limit_bytes is None else max(0, self._pinned_limit_bytes - self.pinned_bytes)

    def disk(self) -> NvmeStore:
        """The store on the disk that was named, opened when it is first needed."""
        if self._store is None:
            self._open_disk()
        assert self._store is not None
        return self._store

    def provide(self, host_bytes: int, disk_bytes: int) -> None:
        """Have so much of each tier at hand."""
        if disk_bytes and self._store is None:
            self._open_disk()
        if host_bytes > sum(pool.nbytes for pool in self._pools):
            if not self.used_bytes:  # one slab of the right size rather than several
                self.copies.settle()
                self._close_pools()
            self._add(host_bytes - sum(pool.nbytes for pool in self._pools))

    def trim(self, host_bytes: int) -> None:
        """Have no more than so much of host memory for what is sent away, if nothing is there now."""
        if sum(pool.nbytes for pool in self._pools) > round_up(host_bytes, PAGE_BYTES) and not self.used_bytes:
            self.copies.settle()
            self._close_pools()
            self.provide(host_bytes, 0)

    def place(self, nbytes: int) -> tuple[HostPool, Block]:
        """A block in the first slab that has room, else in a new one."""
        for pool in self._pools:
            try:
                return pool.place(nbytes)
            except OutOfHostMemory:
                continue
        pool = self._add(max(nbytes, sum(pool.nbytes for pool in self._pools) // MORE_SHARE))
        return pool.place(nbytes)

    def close(self) -> None:
        """Finish what moves, give the memory back, remove the file."""
        try:
            self.copies.close()
        finally:
            store, self._store = self._store, None
            if store is not None:
                store.close()
            self._close_pools()
            bounce, self._bounce = self._bounce, None
            if bounce is not None:
                bounce.close()

    def _add(self, nbytes: int) -> HostPool:
        """Another slab, of less than was asked for where the limit is near."""
        left = None if self._host_limit_bytes is None else self._host_limit_bytes - self.host_bytes
        if left is not None and left < PAGE_BYTES:
            raise OutOfHostMemory(
                f"{format_bytes(self.host_bytes)} of host memory are in use and host= allows {exact_bytes(self._host_limit_bytes or 0)}; allow more"
            )
        pool = self._pool(nbytes if left is None else min(round_up(nbytes, PAGE_BYTES), left // PAGE_BYTES * PAGE_BYTES))
        self._pools.append(pool)
        return pool

    def _pool(self, nbytes: int) -> HostPool:
        return HostPool(
            nbytes,
            self._device,
            pinned_limit_bytes=self.pinned_left_bytes,
            progress=lambda done, total: self._progress(f"locking host memory, {format_bytes(done)} of {format_bytes(total)}"),
        )

    def _open_disk(self) -> None:
        if self._disk is None:
            raise StorageFault("the plan uses the disk and none was given; fit with nvme='DIR:200GiB'")
        nbytes = bounce_bytes(self._host_limit_bytes)
        bounce = self._pool(nbytes)
        try:
            directory, capacity_bytes = self._disk
            self._store = NvmeStore(directory, capacity_bytes, bounce, block_bytes=nbytes // REQUESTS, requests=REQUESTS)
        except BaseException:
            bounce.close()
            raise
        self._bounce = bounce
        self.copies.use_disk(self._store)

    def _close_pools(self) -> None:
        while self._pools:
            self._pools.pop().close()

    def _all_pools(self) -> list[HostPool]:
        return [*self._pools, *([self._bounce] if self._bounce else [])]
