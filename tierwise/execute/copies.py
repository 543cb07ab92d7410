"""Tensors leave the device and come back: one lane each way, every buffer with its event, freed late and at planned points.

    ticket  = copies.send(tensor)        the bytes start to leave once compute has written them
    copies.release_sent([ticket])        the device's bytes are let go, after the copy
    pending = copies.fetch(ticket)       the bytes start to come back, into memory allocated now
    tensor  = copies.wait(pending)       compute from here on comes after their arrival

What travels is the storage: views that share one leave in one copy and come back sharing one. Small storages sent together are packed and
travel as one. A ticket holds its bytes in the lower tier for as long as it lives, so a graph that is thrown away gives them back by itself.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, count

import torch

from ..errors import CopyFault, MissingTier
from .device import SMALL_BYTES, Device, Direction, Moment, bytes_of
from .homes import DiskHome, Home, HostHome, Pool
from .host_pool import ALIGNMENT
from .lanes import Event, already
from .layout import Layout, copyable
from .nvme import NvmeStore
from .offsets import round_up
from .torch_compat import is_at, version_of

PACK_BYTES = 8 << 20  # the most device memory that a pack of small storages takes while it leaves and while it is back


@dataclass(slots=True)
class Counts:
    sent_bytes: int = 0
    sent_copies: int = 0
    fetched_bytes: int = 0
    fetched_copies: int = 0
    exposed_seconds: float = 0.0  # how long compute stood still for copies


Watch = Callable[[Direction, int, int, Moment, Moment], None]
"""Told of each copy: which way, the parcel's number and bytes, from when, until when."""


class _Parcel:
    """Bytes that travel together: one storage, or several small ones side by side."""

    def __init__(self, number: int, nbytes: int, home: Home) -> None:
        self.number = number
        self.nbytes = nbytes
        self.home = home
        self.users: list[Event] = []  # what uses the bytes in the lower tier: the send, then the last fetch
        self.arrived: tuple[weakref.ref[torch.UntypedStorage], Event] | None = None
        weakref.finalize(self, home.free, self.users).atexit = False


@dataclass(frozen=True, eq=False, slots=True)
class Ticket:
    """A tensor that was sent."""

    layout: Layout
    parcel: _Parcel | None  # None: there are no bytes
    start_bytes: int


@dataclass(frozen=True, eq=False, slots=True)
class Pending:
    """A tensor on its way back. Its bytes must not be read before `Copies.wait`."""

    layout: Layout
    storage: torch.UntypedStorage
    start_bytes: int
    event: Event


@dataclass(frozen=True, slots=True)
class _Sent:
    """A storage, as it was when it was sent: the next view of it needs no second copy."""

    storage: weakref.ref[torch.UntypedStorage]
    version: int | None
    tier: str
    parcel: weakref.ref[_Parcel]
    start_bytes: int


class Copies:
    """The traffic between a device and the tiers below it."""

    def __init__(self, device: Device, pool: Pool, store: NvmeStore | None = None, *, small_bytes: int = SMALL_BYTES) -> None:
        self.watch: Watch | None = None
        self._small_bytes = small_bytes
        self._device = device
        self._homes: dict[str, Callable[[int], Home]] = {"dram": lambda nbytes: HostHome(device, pool, nbytes)}
        if store is not None:
            self.use_disk(store)
        self._closed = False
        self._numbers = count()
        self._sent: dict[int, _Sent] = {}
        self._leaving: dict[int, tuple[Event, torch.Tensor]] = {}  # keeps the device's bytes while they are read
        self._arriving: dict[int, tuple[Event, torch.UntypedStorage]] = {}  # ... and while they are written
        self._counts = Counts()

    def use_disk(self, store: NvmeStore) -> None:
        """Offer the tier "nvme" too."""
        self._homes["nvme"] = lambda nbytes: DiskHome(self._device, store, nbytes)

    def send(self, tensor: torch.Tensor, *, to: str = "dram") -> Ticket:
        return self.send_all([tensor], to=to)[0]

    @torch.no_grad()
    def send_all(self, tensors: Sequence[torch.Tensor], *, to: str = "dram") -> list[Ticket]:
        """Start copies of the tensors' storages, which are not written to until they are released; small ones travel in packs."""
        if to not in self._homes:
            raise MissingTier(f"there is no tier {to!r} to send to; there is {', '.join(self._homes)}")
        for tensor in tensors:
            if not copyable(tensor):
                raise CopyFault(f"a {type(tensor).__name__} of layout {tensor.layout} is more than bytes and cannot be sent; keep it")
            if tensor.device != self._device.torch_device:
                raise CopyFault(f"a tensor on {tensor.device} cannot be sent from {self._device.torch_device}; keep it where it is")
        tensors = [tensor.resolve_neg() for tensor in tensors]
        fresh = {id(tensor.untyped_storage()): tensor for tensor in tensors if tensor.numel() and self._found(tensor, to) is None}
        new: dict[int, tuple[_Parcel, int]] = {}
        try:
            for pack in _packs(list(fresh.values()), self._small_bytes):
                new |= self._send_pack(pack, to)
        except BaseException:
            self._take_back([parcel for parcel, _ in new.values()])
            raise
        tickets = []
        for tensor in tensors:
            there = new.get(id(tensor.untyped_storage())) or self._found(tensor, to) or (None, 0)
            tickets.append(Ticket(Layout.of(tensor), *there))
        return tickets

    def release_sent(self, tickets: Iterable[Ticket] | None = None, *, join: bool = True) -> None:
        """Let go of the device's bytes of these tickets, or of all that were sent.

        `join`: compute waits for copies that are not done, and the bytes are free for what it does next. Otherwise those that are done
        are let go and the others stay for a later call.
        """
        numbers = list(self._leaving) if tickets is None else [ticket.parcel.number for ticket in tickets if ticket.parcel]
        failures = []
        for number in numbers:
            if number in self._leaving and (join or self._leaving[number][0].done()):
                failures.append(_failure(partial(self._device.wait, self._leaving[number][0])))
                del self._leaving[number]
        self._drop_arrived()
        _raise_first(failures)

    @torch.no_grad()
    def fetch(self, ticket: Ticket) -> Pending:
        """Allocate on the device and start the copy back. While what arrived lives, other tickets of its storage or pack share it."""
        parcel = ticket.parcel
        if self._closed:
            raise CopyFault("what this backward needs was given up when the model was released; call backward before tierwise.release(model)")
        if parcel is None:
            return Pending(ticket.layout, self._device.empty(0).untyped_storage(), 0, already())
        storage = parcel.arrived[0]() if parcel.arrived and not parcel.arrived[1].failed() else None
        if storage is None:
            self._drop_arrived()
            arriving = self._device.empty(parcel.nbytes)
            storage = arriving.untyped_storage()
            # The allocator may hand out bytes that compute issued earlier still uses: the copy comes after that, too.
            after = (self._device.mark(), parcel.users[0])
            begun = parcel.home.moment(Direction.IN, after) if self.watch else None
            event = parcel.home.read(arriving, after)
            self._arriving[id(storage)] = event, storage
            if self.watch and begun:
                self.watch(Direction.IN, parcel.number, parcel.nbytes, begun, parcel.home.moment(Direction.IN, (event,)))
            parcel.arrived = weakref.ref(storage), event
            parcel.users[1:] = [event]  # reads are in order: the last is the last to end
            self._counts.fetched_bytes += parcel.nbytes
            self._counts.fetched_copies += 1
        assert parcel.arrived is not None
        return Pending(ticket.layout, storage, ticket.start_bytes, parcel.arrived[1])

    def fetch_all(self, tickets: Iterable[Ticket]) -> list[Pending]:
        """Fetch what was sent together together: a pack then comes back once."""
        return [self.fetch(ticket) for ticket in tickets]

    @torch.no_grad()
    def wait(self, pending: Pending) -> torch.Tensor:
        """The tensor, for compute that comes after its arrival. A send that failed meanwhile is raised here, once."""
        failed = [number for number, (event, _) in self._leaving.items() if event.failed()]
        _raise_first([_failure(self._leaving.pop(number)[0].wait) for number in failed])
        self._device.wait(pending.event)
        self._arriving.pop(id(pending.storage), None)  # not before: whoever is interrupted while waiting leaves a copy in flight
        return pending.layout.on(pending.storage, pending.start_bytes)

    def settle(self) -> None:
        """Block until nothing moves. For when something went wrong: failures are left for whoever needs what failed."""
        for event, _ in (*self._leaving.values(), *self._arriving.values()):
            _failure(event.wait)
        self._device.synchronize()
        self._drop_arrived()

    def in_flight(self) -> int:
        """Copies that are not known to be done."""
        return sum(not event.done() for event, _ in (*self._leaving.values(), *self._arriving.values()))

    def close(self) -> None:
        """Finish what moves and take no more: what is still away cannot be fetched any more."""
        self._closed = True
        self.settle()
        self._leaving.clear()
        self._arriving.clear()

    def drain(self) -> None:
        """Block until nothing moves, let go of everything in flight, then raise the first failure."""
        failures = [_failure(event.wait) for event, _ in (*self._leaving.values(), *self._arriving.values())]
        self._device.synchronize()
        self._leaving.clear()
        self._arriving.clear()
        _raise_first(failures)

    def counts(self) -> Counts:
        """Since the start."""
        return replace(self._counts, exposed_seconds=self._device.exposed_seconds())

    def _send_pack(self, tensors: list[torch.Tensor], to: str) -> dict[int, tuple[_Parcel, int]]:
        """Send storages as one parcel; where each lies in it, by the storage's id."""
        sources = [bytes_of(tensor.untyped_storage()) for tensor in tensors]
        starts = [0, *accumulate(round_up(source.numel(), ALIGNMENT) for source in sources)]
        source = sources[0]
        if len(sources) > 1:
            try:
                source, padding = self._device.empty(starts[-1]), self._device.empty(ALIGNMENT)
            except torch.OutOfMemoryError:  # no room to pack: more copies, but no memory
                return {key: there for tensor in tensors for key, there in self._send_pack([tensor], to).items()}
            _lay_down(sources, source, padding)
        parcel = _Parcel(next(self._numbers), source.numel(), self._homes[to](source.numel()))
        ready = self._device.mark()
        begun = parcel.home.moment(Direction.OUT, (ready,)) if self.watch else None
        event = parcel.home.write(source, ready)
        parcel.users.append(event)
        self._leaving[parcel.number] = event, source
        if self.watch and begun:
            self.watch(Direction.OUT, parcel.number, parcel.nbytes, begun, parcel.home.moment(Direction.OUT, (event,)))
        self._counts.sent_bytes += parcel.nbytes
        self._counts.sent_copies += 1
        for tensor, start in zip(tensors, starts, strict=False):
            self._remember(tensor, to, parcel, start)
        return {id(tensor.untyped_storage()): (parcel, start) for tensor, start in zip(tensors, starts, strict=False)}

    def _take_back(self, parcels: Sequence[_Parcel]) -> None:
        """Of parcels sent together some could not be: nobody will have tickets of the others."""
        for parcel in parcels:
            if (leaving := self._leaving.get(parcel.number)) is not None:
                _failure(leaving[0].wait)
                del self._leaving[parcel.number]

    def _remember(self, tensor: torch.Tensor, to: str, parcel: _Parcel, start: int) -> None:
        storage, known = tensor.untyped_storage(), self._sent
        key = id(storage)
        reference = weakref.ref(storage, lambda _: known.pop(key, None))
        known[key] = _Sent(reference, version_of(tensor), to, weakref.ref(parcel), start)

    def _found(self, tensor: torch.Tensor, to: str) -> tuple[_Parcel, int] | None:
        """Where the tensor's storage already went, unless it was written to since or never arrived there."""
        sent = self._sent.get(id(tensor.untyped_storage()))
        parcel = sent.parcel() if sent else None
        if sent is None or parcel is None or parcel.users[0].failed():
            return None
        unchanged = is_at(tensor, sent.version)
        return (parcel, sent.start_bytes) if unchanged and sent.tier == to else None

    def _drop_arrived(self) -> None:
        for key in [key for key, (event, _) in self._arriving.items() if event.done()]:
            del self._arriving[key]


def _packs(tensors: Sequence[torch.Tensor], small_bytes: int) -> list[list[torch.Tensor]]:
    """Large storages alone, small ones together up to PACK_BYTES."""
    packs: list[list[torch.Tensor]] = []
    pack: list[torch.Tensor] = []
    pack_bytes = 0
    for tensor in tensors:
        nbytes = round_up(tensor.untyped_storage().nbytes(), ALIGNMENT)
        if nbytes >= small_bytes:
            packs.append([tensor])
        elif pack and pack_bytes + nbytes <= PACK_BYTES:
            pack.append(tensor)
            pack_bytes += nbytes
        else:
            pack, pack_bytes = [tensor], nbytes
            packs.append(pack)
    return packs


def _lay_down(sources: Sequence[torch.Tensor], destination: torch.Tensor, padding: torch.Tensor) -> None:
    """Storages side by side, aligned, in one kernel."""
    pieces = [piece for source in sources for piece in (source, padding[: -source.numel() % ALIGNMENT])]
    torch.cat(pieces, out=destination)


def _failure(wait: Callable[[], object]) -> Exception | None:
    try:
        wait()
    except Exception as error:
        return error
    return None


def _raise_first(failures: list[Exception | None]) -> None:
    found = [failure for failure in failures if failure is not None]
    failures.clear()  # no name keeps what is raised: a frame that keeps its own exception keeps its tensors until the next collection
    if found:
        raise found.pop(0)
