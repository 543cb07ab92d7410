"""The device as the runtime sees it: memory with a cap, a copy lane each way, events. A CUDA card, or the CPU in its place for tests.

Copies run beside compute. Nothing is kept alive by a copy itself: whoever starts one holds a reference to the device's bytes until the
copy's event has happened, then lets go at a planned point. `Tensor.record_stream` is never used, since it frees at a time nobody planned.
"""

from __future__ import annotations

import contextlib
import enum
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import BadInput
from ..units import format_bytes
from .lanes import Event
from .torch_compat import let_segments_grow

SMALL_BYTES = 1 << 20  # a smaller copy does not reach nine tenths of the link's rate, one of 64 KiB a third: benchmarks/RESULTS.md


class Direction(enum.Enum):
    OUT = "device to host"
    IN = "host to device"


@dataclass(frozen=True, slots=True)
class MemoryUse:
    allocated_bytes: int
    reserved_bytes: int  # what a budget caps: allocated and what the allocator keeps for later
    peak_allocated_bytes: int
    peak_reserved_bytes: int


@dataclass(slots=True)
class Moment:
    """A point in time of compute or of a copy lane. It is known once everything issued before it has run."""

    host_seconds: float = float("nan")
    event: torch.cuda.Event | None = None

    def now(self) -> None:
        self.host_seconds = time.perf_counter()

    def wait(self) -> None:
        if self.event is not None:
            self.event.synchronize()

    def since(self, start: Moment) -> float:
        """Seconds from `start`, a moment that knows both clocks."""
        if self.event is not None and start.event is not None:
            return float(start.event.elapsed_time(self.event)) / 1e3
        return self.host_seconds - start.host_seconds


class Device(ABC):
    """What moves and holds bytes needs of a device. Tensors passed to `copy` are one-dimensional, contiguous and of dtype uint8."""

    torch_device: torch.device
    capacity_bytes: int
    small_copy_bytes: int = SMALL_BYTES  # copies of less than this are better packed together, which takes memory for the pack

    @abstractmethod
    def empty(self, nbytes: int) -> torch.Tensor:
        """A new storage of bytes; raises torch.OutOfMemoryError."""

    @abstractmethod
    def resize(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Give a storage's bytes back (0) or allocate them anew; raises torch.OutOfMemoryError."""

    @abstractmethod
    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's bytes count as this device's memory."""

    @abstractmethod
    def mark(self) -> Event:
        """The event that all compute issued so far is done."""

    @abstractmethod
    def copy(self, direction: Direction, destination: torch.Tensor, source: torch.Tensor, *, after: Sequence[Event] = ()) -> Event:
        """Start a copy on the lane of this direction, when `after` has happened and the lane's earlier copies are done."""

    def let_others(self, direction: Direction) -> None:  # noqa: B027
        """Copies of other lanes of this direction that are ready go before this lane's next one."""

    @abstractmethod
    def wait(self, event: Event) -> None:
        """Compute issued from now on comes after the event. Time that compute loses by it is counted as exposed."""

    @abstractmethod
    def exposed_seconds(self) -> float:
        """How long compute has stood still in `wait` so far."""

    @abstractmethod
    def synchronize(self) -> None:
        """Block until all compute and all copies are done."""

    @abstractmethod
    def memory(self) -> MemoryUse: ...

    @abstractmethod
    def reset_peak(self) -> None: ...

    @abstractmethod
    def out_of_memory_count(self) -> int:
        """How often an allocation was refused so far."""

    def giving_back_count(self) -> int:
        """How often an allocation found no room until unused memory was given back: that waits for all work of the device, copies included."""
        return 0

    @abstractmethod
    def moment(self, direction: Direction | None = None, *, after: Sequence[Event] = ()) -> Moment:
        """This point of compute, or of a lane when `after` has happened, for measurements."""

    @abstractmethod
    def random_state(self) -> Any:
        """What the device's generator draws next depends on this alone."""

    @abstractmethod
    def set_random_state(self, state: Any) -> None: ...

    def accounting(self) -> AbstractContextManager[object]:
        """Within it, what compute allocates counts as the device's. Of a card it does anyway."""
        return contextlib.nullcontext()

    def account_backward(self, outputs: Iterable[torch.Tensor]) -> None:  # noqa: B027
        """The same for the backward of these tensors."""

    def adopt(self, tensor: torch.Tensor) -> None:  # noqa: B027
        """Count a tensor made outside of `accounting` as the device's."""

    @abstractmethod
    def cap(self, nbytes: int | None) -> None:
        """Refuse allocations beyond `nbytes` reserved; None lifts the cap."""

    @abstractmethod
    def pin(self, address: int, nbytes: int) -> str:
        """Lock host pages so that copies can run beside compute; the reason when the system refuses, else ''."""

    @abstractmethod
    def unpin(self, address: int) -> None: ...

    @abstractmethod
    def exempt(self, host: torch.Tensor) -> None:
        """Declare a storage to be host memory, for a device whose memory looks the same."""

    @abstractmethod
    def close(self) -> None: ...


class CudaEvent:
    """A point on a CUDA stream."""

    __slots__ = ("raw",)

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.raw = torch.cuda.Event(blocking=True)  # a host thread that waits sleeps instead of spinning
        self.raw.record(stream)

    def done(self) -> bool:
        return bool(self.raw.query())

    def wait(self) -> None:
        self.raw.synchronize()

    def failed(self) -> bool:
        return False  # torch raises a failure of the card from whatever call comes next


class _Turn:
    """A stream's wait for a kernel of another one, as short as can be."""

    def __init__(self, device: torch.device) -> None:
        self._aside, self._little = torch.cuda.Stream(device), torch.zeros(1, device=device)
        # Whoever had these bytes before may still be read by compute that is issued and has not run: they are this stream's after that.
        self._aside.wait_stream(torch.cuda.current_stream(device))

    def over(self, stream: torch.cuda.Stream) -> None:
        self._aside.wait_event(CudaEvent(stream).raw)
        with torch.cuda.stream(self._aside):
            self._little.add_(1)
        stream.wait_event(CudaEvent(self._aside).raw)


class CudaDevice(Device):
    """A card of this machine: torch's caching allocator, one copy stream each way beside the stream compute runs on."""

    def __init__(self, index: int | None = None) -> None:
        if not torch.cuda.is_available():
            raise BadInput("this torch sees no CUDA device; install a CUDA build and driver, or use the CPU as the device")
        index = torch.cuda.current_device() if index is None else index
        if index >= torch.cuda.device_count():
            raise BadInput(f"there is no CUDA device {index}; this machine has {torch.cuda.device_count()}, counted from 0")
        self.torch_device = torch.device("cuda", index)
        self.capacity_bytes = torch.cuda.mem_get_info(self.torch_device)[1]
        self._streams = {direction: torch.cuda.Stream(self.torch_device) for direction in Direction}
        self._turn: _Turn | None = None
        self._stalls: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._exposed_seconds = 0.0
        torch.cuda.init()
        let_segments_grow()
        self._generator = torch.cuda.default_generators[index]

    def empty(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.torch_device)

    def resize(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        storage.resize_(nbytes)

    def owns(self, tensor: torch.Tensor) -> bool:
        return tensor.device == self.torch_device

    def mark(self) -> CudaEvent:
        return CudaEvent(torch.cuda.current_stream(self.torch_device))

    def copy(self, direction: Direction, destination: torch.Tensor, source: torch.Tensor, *, after: Sequence[Event] = ()) -> CudaEvent:
        stream = self._streams[direction]
        for event in after:
            _come_after(stream, event)
        with torch.cuda.stream(stream):
            destination.copy_(source, non_blocking=True)
        return CudaEvent(stream)

    def let_others(self, direction: Direction) -> None:
        """The engine that copies goes on with a stream until that has to wait, however long others have waited: so this one has to, for a kernel
        (benchmarks/cases/turns.py). An event with no work before it was not enough."""
        if self._turn is None:
            self._turn = _Turn(self.torch_device)
        self._turn.over(self._streams[direction])

    def wait(self, event: Event) -> None:
        if not isinstance(event, CudaEvent):
            start = time.perf_counter()
            event.wait()
            self._exposed_seconds += time.perf_counter() - start
            return
        if event.done():
            return
        stream = torch.cuda.current_stream(self.torch_device)
        before, behind = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record(stream)
        stream.wait_event(event.raw)
        behind.record(stream)
        self.exposed_seconds()  # settles what is over, so that the list stays short
        self._stalls.append((before, behind))

    def exposed_seconds(self) -> float:
        while self._stalls and self._stalls[0][1].query():
            before, behind = self._stalls.popleft()
            self._exposed_seconds += before.elapsed_time(behind) / 1e3
        return self._exposed_seconds

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def memory(self) -> MemoryUse:
        found = torch.cuda.memory_stats_as_nested_dict(self.torch_device)  # asked once: each question makes all of its counters anew
        allocated, reserved = ((found.get(name) or {}).get("all") or {} for name in ("allocated_bytes", "reserved_bytes"))
        return MemoryUse(*(int(of.get(when, 0)) for when in ("current", "peak") for of in (allocated, reserved)))

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.torch_device)

    def out_of_memory_count(self) -> int:
        return int(torch.cuda.memory_stats_as_nested_dict(self.torch_device).get("num_ooms", 0))

    def giving_back_count(self) -> int:
        return int(torch.cuda.memory_stats_as_nested_dict(self.torch_device).get("num_alloc_retries", 0))

    def moment(self, direction: Direction | None = None, *, after: Sequence[Event] = ()) -> Moment:
        stream = torch.cuda.current_stream(self.torch_device) if direction is None else self._streams[direction]
        for event in after:
            _come_after(stream, event)
        found = Moment(event=torch.cuda.Event(enable_timing=True))
        assert found.event is not None
        found.event.record(stream)
        return found

    def random_state(self) -> int:
        return int(self._generator.get_offset())  # the seed stays, and this is no copy

    def set_random_state(self, state: int) -> None:
        self._generator.set_offset(state)

    def cap(self, nbytes: int | None) -> None:
        # Half a byte more, because torch multiplies the fraction out again and cuts off.
        fraction = 1.0 if nbytes is None else min(1.0, (nbytes + 0.5) / self.capacity_bytes)
        torch.cuda.set_per_process_memory_fraction(fraction, self.torch_device)

    def pin(self, address: int, nbytes: int) -> str:
        runtime = torch.cuda.cudart()
        with torch.cuda.device(self.torch_device):
            result = runtime.cudaHostRegister(address, nbytes, 1)  # 1: portable, pinned for every context of the process
        if int(result) == 0:
            return ""
        self._clear_last_error()
        return f"cudaHostRegister of {format_bytes(nbytes)} returned {int(result)} ({runtime.cudaGetErrorString(result)})"

    def unpin(self, address: int) -> None:
        if int(torch.cuda.cudart().cudaHostUnregister(address)) != 0:
            self._clear_last_error()

    def exempt(self, host: torch.Tensor) -> None:
        pass  # tensor.device tells host memory apart

    def close(self) -> None:
        self.synchronize()

    def _clear_last_error(self) -> None:
        """A refused call leaves its error behind for the next kernel launch to find; let a launch of our own find it."""
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device=self.torch_device).add_(1)


def waited_here(events: Iterable[Event]) -> tuple[Event, ...]:
    """This thread waits for what only a thread can wait for; the rest is left to the stream that copies or computes, and the thread goes on."""
    left = []
    for event in events:
        if isinstance(event, CudaEvent):
            left.append(event)
        else:
            event.wait()
    return tuple(left)


def _come_after(stream: torch.cuda.Stream, event: Event) -> None:
    if isinstance(event, CudaEvent):
        stream.wait_event(event.raw)
    else:
        event.wait()


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """A storage as the one-dimensional tensor of its bytes."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
