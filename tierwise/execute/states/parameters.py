"""Parameters that live elsewhere: they come before their region runs and go after it.

A unit's parameters are views of one storage on the device. Away, that storage has no bytes; autograd, the optimizer and the module keep
their tensors, and a guard keeps everybody else from reading them. To come means to allocate the storage again and copy the unit into it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ...errors import BadInput, TierwiseError
from ..device import Device, Direction, bytes_of
from ..lanes import Event, Lane, Signal, already
from ..torch_compat import is_at, version_of
from .guards import Ask, guard, unguard
from .homes import DiskChunks, HostFlat, Ring, copy_block
from .torch_compat import in_backward, without_torch_function
from .units import Slot, Unit

_log = logging.getLogger("tierwise")


class Residence:
    """A unit whose parameters live in `home`.

    `wait_settled` waits until no update of them is pending, `settling` is the signal of one; `ask` is called when somebody touches them
    while they are away, `written` when what is at home was replaced by what somebody wrote on the device, `failed` when they cannot be read.
    """

    def __init__(
        self,
        unit: Unit,
        device: Device,
        home: HostFlat | DiskChunks,
        lane: Lane,
        *,
        wait_settled: Callable[[], None],
        settling: Callable[[], Signal | None],
        ask: Ask,
        written: Callable[[], None],
        failed: Callable[[TierwiseError], None],
    ) -> None:
        self.unit, self.home = unit, home
        self.users = 0  # calls of its regions that run now
        self.is_here = False
        self._is_old = False  # it has been updated at home since it came
        self.borrowed = False  # somebody other than a region asked for it, and may have written to it
        self._versions: list[int | None] = []  # of parameters that nobody has written to since they came
        self._device, self._lane = device, lane
        self._wait_settled, self._settling = wait_settled, settling
        self._ask, self._written, self._failed = ask, written, failed
        self._coming: tuple[Signal | None, list[Event]] | None = None
        made = device.empty(unit.nbytes)
        self._storage = made.untyped_storage()
        self._flat = made.view(unit.dtype)

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [slot.parameter for slot in self.unit.slots]

    @property
    def storage(self) -> torch.UntypedStorage:
        return self._storage

    def adopt(self, values: Callable[[Slot], torch.Tensor], ring: Ring | None) -> None:
        """Take the parameters to their home, and leave views without bytes in their place. `values` have the parameters' shapes."""
        self.fill(lambda slot: slot.flat(values(slot).detach()), ring)
        for slot in self.unit.slots:
            view = slot.shaped(self._flat)
            if slot.parameter.device.type == "meta":
                torch.utils.swap_tensors(slot.parameter, nn.Parameter(view, requires_grad=slot.parameter.requires_grad))
            else:
                slot.parameter.data = view
        self.is_here = True
        self.know()
        self.leave()

    def fill(self, flat: Callable[[Slot], torch.Tensor], ring: Ring | None) -> None:
        """Write what is at home."""
        if isinstance(self.home, HostFlat):
            self.home.last.wait()
            for slot in self.unit.slots:
                self.home.flat[slot.offset : slot.stop].copy_(flat(slot))
            return
        assert ring is not None
        for index, chunk in enumerate(self.unit.chunks()):
            row = self.home.create(index, ring)[0]
            for slot, piece in self.unit.pieces(chunk):
                part = flat(slot)[piece.start - slot.offset : piece.stop - slot.offset]
                row[piece.start - chunk.start : piece.stop - chunk.start].copy_(part)
            self.home.give(index, already())

    # -- coming and going -----------------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to come. Bytes are allocated now; they are copied when no update of them is pending any more."""
        if self.is_here or self._coming is not None:
            return
        self._device.resize(self._storage, self.unit.nbytes)
        after = self._device.mark()  # the allocator may hand out bytes that compute issued earlier still uses
        events: list[Event] = []
        settling = self._settling()
        if isinstance(self.home, HostFlat) and (settling is None or (settling.done() and not settling.failed())):
            events.append(self._copy_in(after))
            self._coming = None, events
        else:
            waits = (settling,) if settling is not None else ()
            self._coming = self._lane.put(lambda: events.append(self._copy_in(after)), after=waits), events

    def arrive(self) -> None:
        """They are here for compute that comes from now on."""
        if self._is_old and not in_backward():
            self.leave()
        if not self.is_here:
            if self.was_replaced():
                raise BadInput(
                    f"the parameters of {self.unit.name} were replaced by others while they live elsewhere; "
                    f"call tierwise.release(model) before model.to(...), and fit it again after"
                )
            self.start()
            assert self._coming is not None
            (signal, events), self._coming = self._coming, None
            try:
                self._wait_settled()
                if signal is not None:
                    self._device.wait(signal)
                self._device.wait(events[-1])
            except BaseException as error:
                self._device.resize(self._storage, 0)
                if isinstance(error, TierwiseError):
                    self._failed(error)
                raise
            self.is_here = True
            self.know()
        unguard(self.parameters)

    def know(self) -> None:
        """Parameters are what they are at home, or that is no matter of theirs any more: what is written to them from now on was somebody else."""
        self._versions = [version_of(parameter) for parameter in self.parameters]

    def leave(self) -> None:
        """Give the device's bytes back. What somebody may have written to them goes home first."""
        if self._coming is not None:
            self.arrive()
        if not self.is_here:
            return
        self.settle()
        self.is_here = self._is_old = False
        self._device.resize(self._storage, 0)
        guard(self.parameters, self._ask)

    def guard_if_away(self) -> None:
        if not self.is_here:
            guard(self.parameters, self._ask)

    def outdate(self, *, in_use: bool) -> None:
        """An update is about to change what is at home. What is on the device goes, or will not count as being here any more; what somebody may have
        written to it goes home before that, for it would go over what the update makes."""
        if not in_use and self.users == 0:
            self.leave()
        else:
            self.settle()
            self._is_old = self.is_here

    def lend(self) -> None:
        """Come for somebody who reads or writes parameters by themselves; they stay until their region has run."""
        self.arrive()
        self.borrowed = True

    def settle(self) -> None:
        """What is at home is what it is on the device, if somebody may have written to that: whoever asked for it, or, while it stays for a backward
        that does not come, whoever needs not ask."""
        if self.is_here and (self.borrowed or not all(map(is_at, self.parameters, self._versions))):
            self.write_back()

    def write_back(self) -> None:
        """What is on the device becomes what is at home."""
        self.borrowed = False
        self.know()
        here, after = bytes_of(self._storage), self._device.mark()
        if isinstance(self.home, HostFlat):
            whole = slice(0, self.unit.nbytes)
            event = copy_block(self._device, Direction.OUT, self.home.whole, whole, here, after=(after, self.home.last))
            event.wait()
            self.home.last = event
        else:
            self.home.write_from(self._device, here, after)
        self._written()

    def end(self, origin: Callable[[Slot], torch.device]) -> bool:
        """The parameters get memory of their own again, where they came from, or where the device has no room for them in host memory; the unit's is
        given back. Whether there was room."""
        if self.was_replaced():
            return True  # somebody has already given them some
        places = [origin(slot) for slot in self.unit.slots]
        try:
            values = [self._alone(slot, place) for slot, place in zip(self.unit.slots, places, strict=True)]
        except TierwiseError as error:
            _log.error("the parameters of %s cannot be read any more and are NaN now; load them from a checkpoint: %s", self.unit.name, error)
            made = (
                torch.empty_strided(slot.size, slot.stride, dtype=self.unit.dtype, device=place)
                for slot, place in zip(self.unit.slots, places, strict=True)
            )
            values = [(empty.fill_(float("nan")), True) for empty in made]
        unguard(self.parameters)
        for slot, (value, _) in zip(self.unit.slots, values, strict=True):
            parameter = slot.parameter
            gradient, parameter.grad = parameter.grad, None
            parameter.data = value
            parameter.grad = None if gradient is None else gradient.to(value.device)
        self.is_here = False
        self._device.resize(self._storage, 0)
        return all(had_room for _, had_room in values)

    def _alone(self, slot: Slot, place: torch.device) -> tuple[torch.Tensor, bool]:
        """A parameter in memory of its own, and whether there was room for it where it is wanted. Host memory has what it was at home."""
        try:
            self.arrive()
            return slot.shaped(self._flat).to(place, copy=True), True
        except torch.OutOfMemoryError:
            return self.on_host(slot).clone(), False

    def on_host(self, slot: Slot) -> torch.Tensor:
        """The parameter as it is at home, for a state_dict. In host memory those bytes themselves, in a tensor of exactly their length."""
        self._wait_settled()
        self.settle()
        if isinstance(self.home, HostFlat):
            part = self.home.flat[slot.offset : slot.stop]
            alone = self.home.whole.lend(part) if part.numel() else part.clone()
            return alone.as_strided(slot.size, slot.stride)
        flat = torch.empty(slot.numel, dtype=self.unit.dtype)
        self.home.read_part(slice(slot.offset, slot.stop), flat)
        return flat.as_strided(slot.size, slot.stride)

    def was_replaced(self) -> bool:
        """Whether somebody gave the parameters other memory, as model.to() does."""
        with without_torch_function():
            return self.unit.slots[0].parameter.untyped_storage() is not self._storage

    def free(self) -> None:
        self.home.free()

    def _copy_in(self, after: Event) -> Event:
        destination = bytes_of(self._storage)
        if isinstance(self.home, HostFlat):
            whole = slice(0, self.unit.nbytes)
            self.home.last = copy_block(self._device, Direction.IN, self.home.whole, whole, destination, after=(after, self.home.last))
            return self.home.last
        size, last = self.unit.dtype.itemsize, already()
        reads: list[Any] = []
        for index, chunk in enumerate(self.unit.chunks()):
            reads.append(self.home.read_into(index, self._device, destination[chunk.start * size : chunk.stop * size], (after,)))
        for read in reads:
            read.wait()
        return last
