"""Units taken to their homes, from where they were or from the homes they had before, and given back: parameters where they came from, state in the
optimizer, in torch's layout."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial

from ...errors import TierwiseError
from ..device import Device
from ..host_pool import HostPool
from ..lanes import Lane
from ..nvme import NvmeStore
from .gradients import Gradient
from .guards import unguard
from .handover import groups_of, taken_over
from .homes import DiskChunks, HostFlat, Ring, chunk_bytes
from .ledger import Ledger
from .moving import Moving, is_on_host, on_host
from .parameters import Residence
from .residency import Residency
from .stepping import Stepping
from .updates import Stored

BRINGING = 12  # threads that bring parameters: parts of a few modules come as they are made, not in the order of the modules
_log = logging.getLogger("tierwise")


class Settling:
    """`ledger` and `stepping` are None for a model without an optimizer. `pool_is_ours`: nobody else uses it, then or later. `failed` is told what
    cannot be read."""

    def __init__(
        self, stored: Sequence[Stored], moving: Moving, residency: Residency, ledger: Ledger | None, stepping: Stepping | None, device: Device,
        pool: HostPool | None, store: NvmeStore | None, *, pool_is_ours: bool, failed: Callable[[TierwiseError], None],
    ) -> None:  # fmt: skip
        self.stored = stored
        self.moving, self._residency, self._ledger, self._stepping = moving, residency, ledger, stepping
        self._device, self._pool, self._store, self._failed = device, pool, store, failed
        self._own_pool = pool if pool_is_ours else None
        self._there: list[Stored] = []  # homes that have all of their state
        self._bring: Lane | None = None

    # -- in -----------------------------------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """From where everything was."""
        self.moving.bring_buffers()
        for home in self.stored:
            self._move_in(home)

    def succeed(self, before: Settling) -> None:
        """From the homes that others had, who have none of them then."""
        self.moving.bring_buffers()
        for group in groups_of(before.stored, self.stored):
            same = taken_over(group) if before._ledger is not None and before._ledger.hands_over else []
            self._there += same
            before.give_out(group.before)
            for home in group.after:
                self._move_in(home, has_state=home in same)

    def _move_in(self, home: Stored, *, has_state: bool = False) -> None:
        if home.unit.placement.parameters == "device" or not home.unit.numel:
            self.moving.to_device(home.unit)
        else:
            self._send_away(home)
        if self._ledger is not None and self._stepping is not None:
            if not has_state:
                self._ledger.keep(home, self._device, self._pool, self._store)
                self._there.append(home)
            self._stepping.know(home)

    def _send_away(self, home: Stored) -> None:
        unit = home.unit
        if self._bring is None:
            self._bring = Lane("parameters", threads=BRINGING)
        ring: Ring | None = None
        if unit.placement.parameters == "host":
            home.parameters = HostFlat(unit, self._device)
        else:
            assert self._store is not None and self._pool is not None
            home.parameters = DiskChunks(unit, 1, unit.dtype, self._store)
            ring = Ring(self._pool, chunk_bytes(unit, 1, unit.dtype), 2)
        residence = Residence(
            unit, self._device, home.parameters, self._bring,
            wait_settled=partial(self._finish, home), settling=lambda: None if home.pending is None else home.pending.signal,
            ask=partial(self._residency.ask, home), written=partial(setattr, home, "was_written", True), failed=self._failed,
        )  # fmt: skip
        residence.adopt(self.moving.value, ring)
        if ring is not None:
            ring.close()
        self._residency.add(home, residence)

    def _finish(self, home: Stored) -> None:
        if self._stepping is not None:
            self._stepping.finish(home)

    # -- out ----------------------------------------------------------------------------------------------------------------------------

    def give_out(self, homes: Sequence[Stored]) -> None:
        """For whoever takes them in now: parameters to the device, and state that was not taken over to the optimizer, in host memory."""
        for home in homes:
            unguard(slot.parameter for slot in home.unit.slots)
            residence = self._residency.residences.get(home)
            if residence is not None:
                residence.end(lambda _: self._device.torch_device)
                del self._residency.residences[home]
            if self._ledger is not None and (home.chunks is not None or home.arrays is not None):
                for slot in home.unit.slots:
                    self._ledger.hand(slot, on_host(self._ledger.of(home, slot)))
            let_go(home)

    def move_out(self, *, state: bool) -> None:
        """Everything that is in, which may not be all. Parameters before any state, which may take all the room that they had."""
        for home in self.stored:
            for slot in home.unit.slots:
                gradient = slot.parameter.grad
                if isinstance(gradient, Gradient):
                    slot.parameter.grad = gradient.held.recall() if state and not gradient.held.spent else None
        self._say_where([home for home in self.stored if not self._parameters_back(home)])
        for home in self._there if state else ():
            if home.unit.trained and self._ledger is not None and not self._ledger.is_native(home):
                self._state_back(home, self._ledger)
        self.moving.buffers_back()

    def back_from(self, before: Settling) -> None:
        """After a move that failed: what has moved already, and what has not."""
        if self._own_pool is not None:
            self._own_pool.dissolve()
        self.move_out(state=True)
        before.give_out(before.stored)
        self._say_where([home for home in before.stored if not before.moving.back(home.unit)])

    def close(self) -> None:
        if self._bring is not None:
            self._bring.close()
            self._bring = None

    def _parameters_back(self, home: Stored) -> bool:
        """Whether the device had room for them, if that is where they came from."""
        residence = self._residency.residences.get(home)
        if residence is None:
            return self.moving.back(home.unit)
        had_room = residence.end(self.moving.origin)
        del self._residency.residences[home]
        if home.parameters is not None:  # what was given back is there twice until then
            home.parameters.free()
            home.parameters = None
        return had_room

    def _state_back(self, home: Stored, ledger: Ledger) -> None:
        for slot in home.unit.slots:
            given = self.moving.state_back(slot, ledger.of(home, slot))  # nobody holds what it was any more
            if self._own_pool is not None and is_on_host(given):
                self._own_pool.dissolve()
            ledger.hand(slot, given)
        home.arrays = None  # as above
        if home.chunks is not None:
            home.chunks.free()
            home.chunks = None

    def _say_where(self, homes: Sequence[Stored]) -> None:
        """These parameters are not where they came from."""
        if homes:
            names = homes[0].unit.name + (f" and {len(homes) - 1} more modules" if len(homes) > 1 else "")
            _log.warning("the device has no room for the parameters of %s: they are given back in host memory; model.to(...) takes them there", names)


def let_go(home: Stored) -> None:
    for kept in (home.chunks, home.parameters):
        if kept is not None:
            kept.free()
    home.chunks = home.parameters = home.arrays = None
