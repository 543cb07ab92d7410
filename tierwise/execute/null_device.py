"""The null device: the CPU in the place of an accelerator, so that every plan runs end to end in tests.

Its memory is accounted by storage and capped. Its copies are really asynchronous, one thread each way, each delayed at random if asked, and they
hold no reference to the device's bytes: bytes freed before their copy ran are copied as POISON and counted, as a card would have
copied whatever came to lie there. Fresh memory is filled with POISON too, so a read before its copy has arrived shows as NaN.
"""

from __future__ import annotations

import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.autograd.graph import increment_version
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..errors import CopyFault, OutOfDeviceMemory
from ..units import format_bytes
from .device import Device, Direction, MemoryUse, Moment, bytes_of
from .lanes import Event, Lane, Signal, already
from .torch_compat import within_backward

POISON = 0xFF  # a NaN in every floating-point format


class NullOutOfMemory(OutOfDeviceMemory, torch.OutOfMemoryError):
    """What a card's allocator would raise, for the null device."""

    def __init__(self, message: str, requested_bytes: int = 0) -> None:
        super().__init__(message)
        self.requested_bytes = requested_bytes


class NullDevice(Device):
    """`max_delay_seconds` delays each copy by up to so much, drawn from `seed`; `before_copy` is called on the lane before each copy and may
    raise; pinning is refused beyond `pinnable_bytes`. It gains nothing by packing copies, unless it is told to with `small_copy_bytes`.
    """

    def __init__(
        self,
        capacity_bytes: int,
        *,
        max_delay_seconds: float = 0.0,
        seed: int = 0,
        before_copy: Callable[[Direction, int], None] | None = None,
        pinnable_bytes: int | None = None,
        small_copy_bytes: int = 0,
    ) -> None:
        self.torch_device = torch.device("cpu")
        self.capacity_bytes = capacity_bytes
        self.small_copy_bytes = small_copy_bytes
        self.lost_copies = 0  # copies whose device bytes were gone before they ran: each is a missing reference
        self.pinned: dict[int, int] = {}
        self._accounts = _Accounts(capacity_bytes)
        self._lanes = {direction: Lane(direction.value) for direction in Direction}
        self._delays = random.Random(seed)
        self._max_delay_seconds = max_delay_seconds
        self._before_copy = before_copy
        self._pinnable_bytes = pinnable_bytes
        self._exposed_seconds = 0.0
        self._watch = _Watch(self)

    def empty(self, nbytes: int) -> torch.Tensor:
        self._accounts.require(nbytes)
        tensor = torch.full((nbytes,), POISON, dtype=torch.uint8)
        self.adopt(tensor)
        return tensor

    def resize(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        self._accounts.require(nbytes - storage.nbytes())
        kept_bytes = min(nbytes, storage.nbytes())
        storage.resize_(nbytes)
        bytes_of(storage)[kept_bytes:].fill_(POISON)
        self._accounts.charge(storage)

    def owns(self, tensor: torch.Tensor) -> bool:
        return self._accounts.holds(tensor.untyped_storage())

    def adopt(self, tensor: torch.Tensor) -> None:
        """Count a tensor's storage as memory of this device, once, until it dies."""
        self._accounts.charge(tensor.untyped_storage())

    def observe(self) -> TorchDispatchMode:
        """A context in which every op's outputs are this device's memory."""
        return _Observed(self)

    def accounting(self) -> AbstractContextManager[object]:
        return self.observe()

    def account_backward(self, outputs: Iterable[torch.Tensor]) -> None:
        within_backward(outputs, self._watch)

    def out_of_memory_count(self) -> int:
        return self._accounts.refusals

    def random_state(self) -> torch.Tensor:
        return torch.get_rng_state()

    def set_random_state(self, state: torch.Tensor) -> None:
        torch.set_rng_state(state)

    def exempt(self, host: torch.Tensor) -> None:
        self._accounts.exempt(host.untyped_storage())

    def mark(self) -> Event:
        return already()  # compute is this thread: what was issued is done

    def moment(self, direction: Direction | None = None, *, after: Sequence[Event] = ()) -> Moment:
        found = Moment()
        if direction is None:
            found.host_seconds = time.perf_counter()
        else:
            self._lanes[direction].put(found.now, after=after)
        return found

    def copy(self, direction: Direction, destination: torch.Tensor, source: torch.Tensor, *, after: Sequence[Event] = ()) -> Signal:
        outwards = direction is Direction.OUT
        device_bytes, host = (source, destination) if outwards else (destination, source)
        storage = weakref.ref(device_bytes.untyped_storage())
        start, nbytes = device_bytes.storage_offset(), device_bytes.numel()
        delay_seconds = self._delays.uniform(0.0, self._max_delay_seconds)
        increment_version(destination)  # as torch's own copy to a card does

        def work() -> None:
            time.sleep(delay_seconds)
            try:
                if self._before_copy is not None:
                    self._before_copy(direction, nbytes)
            except Exception as error:
                raise CopyFault(f"a copy of {format_bytes(nbytes)} from {direction.value} failed: {error}") from error
            alive = storage()
            if alive is None:
                self.lost_copies += 1
                if outwards:
                    host.fill_(POISON)
                return
            here = bytes_of(alive)[start : start + nbytes]
            if outwards:
                host.copy_(here)
            else:
                here.copy_(host)

        return self._lanes[direction].put(work, after=after)

    def wait(self, event: Event) -> None:
        start = time.perf_counter()
        try:
            event.wait()
        finally:
            self._exposed_seconds += time.perf_counter() - start

    def exposed_seconds(self) -> float:
        return self._exposed_seconds

    def synchronize(self) -> None:
        for lane in self._lanes.values():
            lane.drain()

    def memory(self) -> MemoryUse:
        live, peak = self._accounts.totals()
        return MemoryUse(live, live, peak, peak)

    def reset_peak(self) -> None:
        self._accounts.reset_peak()

    def cap(self, nbytes: int | None) -> None:
        self._accounts.cap_bytes = self.capacity_bytes if nbytes is None else min(nbytes, self.capacity_bytes)

    def pin(self, address: int, nbytes: int) -> str:
        if self._pinnable_bytes is not None and sum(self.pinned.values()) + nbytes > self._pinnable_bytes:
            return f"the null device pins at most {format_bytes(self._pinnable_bytes)}"
        self.pinned[address] = nbytes
        return ""

    def unpin(self, address: int) -> None:
        del self.pinned[address]

    def close(self) -> None:
        self._watch.is_over = True
        for lane in self._lanes.values():
            lane.close()


class _Accounts:
    """Bytes of live storages. A storage that dies only leaves a note, for it may die anywhere: on a lane, or inside one of these methods."""

    def __init__(self, cap_bytes: int) -> None:
        self.cap_bytes = cap_bytes
        self._lock = threading.Lock()
        self._counted: dict[int, int] = {}  # bytes by id of the storage
        self._watched: dict[int, weakref.KeyedRef[int, torch.UntypedStorage]] = {}
        self._died: deque[weakref.KeyedRef[int, torch.UntypedStorage]] = deque()
        self._exempt: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self._live_bytes = self._peak_bytes = 0
        self.refusals = 0

    def require(self, nbytes: int) -> None:
        """Raise unless so many bytes more fit."""
        with self._lock:
            self._settle()
            self._require(nbytes)

    def charge(self, storage: torch.UntypedStorage) -> None:
        """Count the storage, or count it anew after it was resized."""
        if storage in self._exempt:
            return
        key = id(storage)
        with self._lock:
            self._settle()
            if key not in self._counted:
                self._require(storage.nbytes())
                self._counted[key] = 0
                self._watched[key] = weakref.KeyedRef(storage, self._died.append, key)  # no Python runs when it dies: ctrl-C would be lost there
            self._live_bytes += storage.nbytes() - self._counted[key]
            self._counted[key] = storage.nbytes()
            self._peak_bytes = max(self._peak_bytes, self._live_bytes)

    def holds(self, storage: torch.UntypedStorage) -> bool:
        with self._lock:
            self._settle()
            return id(storage) in self._counted

    def exempt(self, storage: torch.UntypedStorage) -> None:
        with self._lock:
            self._settle()
            self._exempt.add(storage)
            self._watched.pop(id(storage), None)
            self._live_bytes -= self._counted.pop(id(storage), 0)

    def totals(self) -> tuple[int, int]:
        with self._lock:
            self._settle()
            return self._live_bytes, self._peak_bytes

    def reset_peak(self) -> None:
        with self._lock:
            self._settle()
            self._peak_bytes = self._live_bytes

    def _settle(self) -> None:
        while self._died:
            key = self._died.popleft().key
            del self._watched[key]
            self._live_bytes -= self._counted.pop(key)

    def _require(self, nbytes: int) -> None:
        if nbytes > 0 and self._live_bytes + nbytes > self.cap_bytes:
            self.refusals += 1
            raise NullOutOfMemory(
                f"the device was asked for {format_bytes(nbytes)} with {format_bytes(self._live_bytes)} in use of "
                f"{format_bytes(self.cap_bytes)}; free something first or raise the budget",
                nbytes,
            )


class _Watch:
    """The mode for a node of backward, for as long as the device is there."""

    def __init__(self, device: NullDevice) -> None:
        self._device = weakref.ref(device)
        self.is_over = False

    def __call__(self) -> TorchDispatchMode | None:
        device = None if self.is_over else self._device()
        return None if device is None else device.observe()


class _Observed(TorchDispatchMode):
    def __init__(self, device: NullDevice) -> None:
        super().__init__()
        self._device = device

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Graphs are captured without it and run, op by op, within it."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(outputs):
            if isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu" and leaf.layout is torch.strided:
                self._device.adopt(leaf)
        return outputs
