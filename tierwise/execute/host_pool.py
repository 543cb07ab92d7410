"""Host memory of the plan's size: one slab, its pages locked as far as allowed, handed out by offset.

Pages are locked by one registration: no copy, ours or torch's or the user's of a state_dict, may reach from one registration into the next.

torch's own pinned allocator rounds every block up to a power of two, which costs up to twice the memory; here the slab is exactly what was
asked for. Two limits hold separately: how much host memory may be used, and how much of that may be pinned. What cannot be pinned is
ordinary pageable memory: copies from it are right but slower.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch

from ..errors import OutOfHostMemory
from ..units import exact_bytes, format_bytes
from .device import Device
from .lanes import Event
from .offsets import Offsets, Place, round_up

ALIGNMENT = 512  # what CUDA's allocator gives, so that bytes lie the same in both tiers
PAGE_BYTES = 4096  # what direct disk access wants
TOUCH_BYTES = 1 << 30  # pages are first touched, which takes most of the time of locking them: report progress a few times a second
LEAST_PINNED_BYTES = 1 << 20  # when the system refuses, half of it is tried, and so on down to this

_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False, slots=True)
class Block:
    """Bytes of the slab, all pinned or all pageable."""

    place: Place
    bytes: torch.Tensor
    pinned: bool
    lent: list[weakref.ref[memoryview]] = field(default_factory=list)  # to tensors that somebody may keep for longer than this

    def lend(self, part: torch.Tensor) -> torch.Tensor:
        """Some of these bytes as a tensor with a storage of its own, so that saving it saves no more."""
        view = part.view(torch.uint8).numpy().data
        self.lent[:] = [other for other in self.lent if other() is not None]
        self.lent.append(weakref.ref(view))  # which lives as long as the storage
        return torch.frombuffer(view, dtype=part.dtype)

    @property
    def offset(self) -> int:
        return self.place.offset

    @property
    def after(self) -> tuple[Event, ...]:
        """What still uses these bytes: come after it before writing."""
        return self.place.after

    @property
    def nbytes(self) -> int:
        return self.bytes.numel()


class HostPool:
    """`nbytes` of host memory, within `host_limit_bytes`; the first `pinned_limit_bytes` of it pinned for `device`.

    `progress(done_bytes, total_bytes)` is called while pages are locked.
    """

    def __init__(
        self,
        nbytes: int,
        device: Device,
        *,
        host_limit_bytes: int | None = None,
        pinned_limit_bytes: int | None = None,
        touch_bytes: int = TOUCH_BYTES,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self.nbytes = round_up(max(nbytes, 1), PAGE_BYTES)
        self.pinned_bytes = 0
        self._more: list[HostPool] = []
        self._grows_by: tuple[int, int | None] | None = None
        self._device = device
        self._pages: mmap.mmap | None = _pages(self.nbytes, host_limit_bytes)
        self._slab: torch.Tensor | None = torch.frombuffer(self._pages, dtype=torch.uint8)
        self._dissolves = False
        device.exempt(self._slab)
        pinned: list[int] = []
        self._unpin = weakref.finalize(self, _unpin, device, pinned, self._slab, os.getpid())
        try:
            limit_bytes = self.nbytes if pinned_limit_bytes is None else min(self.nbytes, pinned_limit_bytes)
            self._touch(limit_bytes, touch_bytes, progress)
            self._pin(pinned, limit_bytes // PAGE_BYTES * PAGE_BYTES)
        except BaseException:
            self.close()
            raise
        self._lock = threading.Lock()
        self._freed: deque[tuple[Block, tuple[Event, ...]]] = deque()
        self._offsets = {True: Offsets(0, self.pinned_bytes), False: Offsets(self.pinned_bytes, self.nbytes)}

    @property
    def free_bytes(self) -> int:
        with self._lock:
            self._settle()
            self._recover()
            return sum(offsets.free_bytes for offsets in self._offsets.values()) + sum(pool.free_bytes for pool in self._more)

    @contextlib.contextmanager
    def growing(self, nbytes: int, pinned_limit_bytes: int | None = None) -> Iterator[None]:
        """What it has no room for meanwhile is in another slab, of at least so many bytes, made then."""
        self._grows_by = nbytes, pinned_limit_bytes
        try:
            yield
        finally:
            self._grows_by = None

    def allocate(self, nbytes: int, *, alignment: int = ALIGNMENT) -> Block:
        """The first place with room, pinned before pageable."""
        with self._lock:
            slab = self._slab
            if slab is None:
                raise OutOfHostMemory(f"{format_bytes(nbytes)} were asked of a host pool that is closed")
            self._settle()
            block = self._take(slab, nbytes, alignment)
            if block is None and self._recover():
                block = self._take(slab, nbytes, alignment)
            if block is not None:
                return block
            for pool in self._more:
                with contextlib.suppress(OutOfHostMemory):
                    return pool.allocate(nbytes, alignment=alignment)
            if self._grows_by is not None:
                return self._grown(nbytes).allocate(nbytes, alignment=alignment)
            free = sum(offsets.free_bytes for offsets in self._offsets.values())
            largest = max(offsets.largest_bytes for offsets in self._offsets.values())
        raise OutOfHostMemory(
            f"host memory has no room for {format_bytes(nbytes)}: {format_bytes(free)} of {format_bytes(self.nbytes)} are free, "
            f"the largest piece {format_bytes(largest)}; allow more with host="
        )

    def place(self, nbytes: int) -> tuple[HostPool, Block]:
        """A block, and who to give it back to."""
        return self, self.allocate(nbytes)

    def free(self, block: Block, after: Sequence[Event] = ()) -> None:
        """Take a block back; `after` are the events until which its bytes are still in use. Safe in a finalizer: it only leaves a
        note, until the pool dissolves."""
        owner = next((pool for pool in (self, *self._more) if pool.has(block)), None)
        if owner is not None:
            if owner._dissolves and not any(view() is not None for view in block.lent):
                owner._discard(block, after)
            owner._freed.append((block, tuple(after)))

    def dissolve(self) -> None:
        """Nothing is pinned any more, and what is freed from now on goes back to the system at once: what is here is about to be copied to other host
        memory, and there need not be room for all of it twice."""
        if self._dissolves:
            return
        for pool in self._more:
            pool.dissolve()
        self._dissolves, self.pinned_bytes = True, 0
        self._unpin()  # the system takes back no page that is locked

    def has(self, block: Block) -> bool:
        """Whether these bytes are of its slab."""
        return self._slab is not None and self._slab.untyped_storage().data_ptr() == block.bytes.untyped_storage().data_ptr()

    def close(self) -> None:
        """Unpin and unmap, once no copy runs any more. Views that outlive the pool keep their bytes, unpinned."""
        while self._more:
            self._more.pop().close()
        self._slab = self._pages = None
        self._unpin()

    def _grown(self, nbytes: int) -> HostPool:
        assert self._grows_by is not None
        by_bytes, limit_bytes = self._grows_by
        left = None if limit_bytes is None else max(0, limit_bytes - sum(pool.pinned_bytes for pool in self._more))
        other = HostPool(max(round_up(nbytes, PAGE_BYTES), by_bytes), self._device, pinned_limit_bytes=left)
        self._more.append(other)
        self.nbytes, self.pinned_bytes = self.nbytes + other.nbytes, self.pinned_bytes + other.pinned_bytes
        return other

    def _discard(self, block: Block, after: Sequence[Event]) -> None:
        """Its whole pages, which are zero if they are ever read again."""
        for event in (*block.after, *after):
            event.wait()
        start = round_up(block.offset, PAGE_BYTES)
        stop = (block.offset + block.nbytes) // PAGE_BYTES * PAGE_BYTES
        if self._pages is not None and start < stop and hasattr(mmap, "MADV_DONTNEED"):
            self._pages.madvise(mmap.MADV_DONTNEED, start, stop - start)

    def _settle(self) -> None:
        while self._freed:
            block, after = self._freed.popleft()
            self._offsets[block.pinned].give(block.place, after)

    def _take(self, slab: torch.Tensor, nbytes: int, alignment: int) -> Block | None:
        for pinned, offsets in self._offsets.items():
            place = offsets.take(nbytes, alignment)
            if place is not None:
                return Block(place, slab[place.offset : place.offset + nbytes], pinned)
        return None

    def _recover(self) -> bool:
        """Whether there was something that nobody holds and nobody gave back."""
        lost = [offsets for offsets in self._offsets.values() if offsets.lost_bytes > 0]
        if lost:
            self._device.synchronize()
        for offsets in lost:
            offsets.recover()
        return bool(lost)

    def _touch(self, limit_bytes: int, step_bytes: int, progress: Callable[[int, int], None] | None) -> None:
        assert self._slab is not None
        for start in range(0, limit_bytes, step_bytes):
            stop = min(start + step_bytes, limit_bytes)
            self._slab[start:stop].zero_()
            if progress is not None:
                progress(stop, limit_bytes)

    def _pin(self, pinned: list[int], nbytes: int) -> None:
        assert self._slab is not None
        first_refusal = ""
        while nbytes:
            refusal = self._device.pin(self._slab.data_ptr(), nbytes)
            if not refusal:
                pinned.append(self._slab.data_ptr())
                self.pinned_bytes = nbytes
                break
            first_refusal = first_refusal or refusal
            nbytes = nbytes // 2 // PAGE_BYTES * PAGE_BYTES if nbytes > LEAST_PINNED_BYTES else 0
        if first_refusal:
            rest = format_bytes(self.nbytes - self.pinned_bytes)
            _log.warning("%s of host memory stay pageable, copies from there are slower: %s", rest, first_refusal)


def _unpin(device: Device, pinned: list[int], slab: torch.Tensor, owner: int) -> None:
    """`slab` is passed so that it is still mapped now."""
    if not pinned or os.getpid() != owner:
        return
    device.synchronize()  # a copy may still be using the pages
    while pinned:
        device.unpin(pinned.pop())


def _pages(nbytes: int, limit_bytes: int | None) -> mmap.mmap:
    """Anonymous pages, private to this process."""
    if limit_bytes is not None and nbytes > limit_bytes:
        raise OutOfHostMemory(f"the plan keeps {format_bytes(nbytes)} in host memory and host= allows {exact_bytes(limit_bytes)}; allow more")
    available = available_host_bytes()
    if nbytes > available:
        raise OutOfHostMemory(
            f"the plan keeps {format_bytes(nbytes)} in host memory and {format_bytes(available)} are available; "
            f"close other programs or lower host= to at most {exact_bytes(available)}"
        )
    try:
        private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}  # Windows has no choice
        pages = mmap.mmap(-1, nbytes, **private)
    except OSError as error:
        raise OutOfHostMemory(f"the system refused {format_bytes(nbytes)} of host memory ({error}); lower host=") from error
    # A forked data loader must not share these: a page copied on write is no longer the page that is pinned.
    for advice in ("MADV_DONTFORK", "MADV_HUGEPAGE"):
        if hasattr(mmap, advice):
            try:
                pages.madvise(getattr(mmap, advice))
            except OSError:
                _log.debug("the system does not know %s", advice)
    return pages


def available_host_bytes() -> int:
    """What this process may still use: the machine's available memory, or less where a control group limits it."""
    available = int(psutil.virtual_memory().available)
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = (group / "memory.max").read_text().strip(), int((group / "memory.current").read_text())
        cached = dict(line.split() for line in (group / "memory.stat").read_text().splitlines()).get("inactive_file", 0)
        return available if limit == "max" else min(available, int(limit) - used + int(cached))
    except (OSError, ValueError):
        return available
