"""From gradients to updates: what arrives in backward, what step() starts, and what whoever needs a parameter waits for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import increment_version

from ...errors import BadInput, TierwiseError
from ..device import Device
from ..lanes import Event
from ..torch_compat import is_at, version_of
from .gradients import Gradient, Held, Shelf, Traffic
from .guards import guard, unguard
from .ledger import Ledger
from .parameters import Residence
from .torch_compat import in_backward
from .units import Slot, Unit
from .updates import Job, Pending, Run, Stored, Updates
from .whole import step_on_device


class Stepping:
    """Updates of units, at step() or, with `during_backward`, as soon as a unit's gradients are there."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        device: Device,
        updates: Updates,
        ledger: Ledger,
        traffic: Traffic | None,
        shelf: Shelf | None,
        residences: Mapping[Stored, Residence],
        *,
        during_backward: bool,
        needed: Callable[[Stored], int],
    ) -> None:
        self.waiting_bytes: int | None = None  # of gradients on the device for which backward does not wait; None: it never does
        self.broken: TierwiseError | None = None  # an update failed: parameters and state do not belong together any more
        self._optimizer, self._device, self._updates, self._ledger, self._traffic = optimizer, device, updates, ledger, traffic
        self._residences, self._during_backward = residences, during_backward
        self._shelf, self._needed = shelf, needed
        self._in_flight: deque[Stored] = deque()  # updates that hold gradients, the oldest first
        self._versions: dict[Slot, int | None] = {}

    def know(self, home: Stored) -> None:
        """Parameters as they are now are those the masters belong to."""
        home.was_written = False
        for slot in home.unit.slots:
            self._versions[slot] = version_of(slot.parameter)

    def raise_if_broken(self) -> None:
        if self.broken is not None:
            raise type(self.broken)(
                f"an update failed earlier, so parameters and optimizer state do not belong together: {self.broken}; load the last checkpoint"
            )

    def arrived(self, home: Stored, slot: Slot) -> None:
        """A parameter's gradient is complete, in this backward."""
        gradient = slot.parameter.grad
        if gradient is None:
            return
        if gradient.layout is not torch.strided:
            raise BadInput(f"{slot.name} has a sparse gradient, which cannot be placed; make its module with sparse=False")
        home.arrived.add(slot)
        if home.unit.placement.gradients == "host" and not isinstance(gradient, Gradient):
            self.finish(home)
            if self._shelve(home, wait=True):
                self._send_home(home, slot, gradient.detach())
        if len(home.unit.regions) > 1:
            return
        wanted = [other for other in home.unit.slots if other.parameter.requires_grad]
        if not all(has_gradient(other.parameter) for other in wanted):
            return
        with torch.no_grad():
            if self._during_backward:
                self.update(home, wanted)
            elif home.gradients_wait:
                self._lay_together(home.unit, wanted)

    def _lay_together(self, unit: Unit, slots: Sequence[Slot]) -> None:
        """Gradients that stay while the next forward fills the device: in one block, as large as the unit's parameters, not in many places between
        activations, so that what they leave behind is as good for others."""
        gradients = [slot.parameter.grad for slot in slots]
        if any(gradient is None or type(gradient) is not torch.Tensor or gradient.dtype != unit.dtype for gradient in gradients):
            return
        if len({gradient.untyped_storage().data_ptr() for gradient in gradients if gradient is not None}) == 1:
            return  # of a batch before, to which this one was added
        flat = self._device.empty(unit.nbytes).view(unit.dtype)
        for slot, gradient in zip(slots, gradients, strict=True):
            assert gradient is not None
            slot.parameter.grad = slot.shaped(flat).copy_(gradient)

    def update(self, home: Stored, slots: Sequence[Slot]) -> None:
        """Update some parameters of a unit, from the gradients they have."""
        self.finish(home)
        if self._ledger.is_native(home):
            for slot in slots:
                if isinstance(slot.parameter.grad, Gradient):  # of a step before, not zeroed since
                    slot.parameter.grad = slot.parameter.grad.held.recall()
            step_on_device(self._optimizer, slots)
            self._spend(home, slots, None)
            return
        residence = self._residences.get(home)
        if residence is not None:
            residence.outdate(in_use=in_backward())
        self.follow(home)
        job = self._job(home, slots)
        home.pending = self._updates.launch(home, job, self._needed(home))
        increment_version([slot.parameter for slot in slots])  # as if the optimizer had written to them
        self.know(home)
        if residence is not None:
            residence.know()
        if home.pending is not None and residence is None:
            guard((slot.parameter for slot in home.unit.slots), lambda _: self.finish(home))
        self._spend(home, slots, home.pending)
        if home.pending is not None:
            self._in_flight.append(home)
            self._keep_few_waiting()

    def follow(self, home: Stored) -> None:
        """Masters are those of parameters to which somebody has written since. Only now: who takes other values for a while, such as an average to be
        evaluated, puts back what was there, and the masters have more of it than was put back."""
        if not home.has_master:
            return
        written = [slot for slot in home.unit.slots if home.was_written or not is_at(slot.parameter, self._versions[slot])]
        if written:
            self._ledger.refresh(home, written)

    def _keep_few_waiting(self) -> None:
        """Gradients that come faster than they are used would pile up on the device."""
        if self.waiting_bytes is None or not self._during_backward:
            return
        waiting = [home for home in self._in_flight if not home.wants_gradients]
        nbytes = sum(home.unit.nbytes for home in waiting)
        for home in waiting[:-1]:
            if nbytes <= self.waiting_bytes:
                break
            self.finish(home)
            nbytes -= home.unit.nbytes

    def finish(self, home: Stored) -> None:
        """Compute that comes from now on comes after the unit's update."""
        pending, home.pending = home.pending, None
        if pending is None:
            return
        if home in self._in_flight:
            self._in_flight.remove(home)
        assert pending.signal is not None
        try:
            self._device.wait(pending.signal)
            self._device.wait(pending.event)
        except TierwiseError as error:
            self.broken = error
            raise
        finally:
            if home not in self._residences:
                unguard(slot.parameter for slot in home.unit.slots)
            pending.keep.clear()
            if self._during_backward:
                self._unshelve(home)

    # -- one update -----------------------------------------------------------------------------------------------------------------------

    def _job(self, home: Stored, slots: Sequence[Slot]) -> Job:
        gradients: dict[Slot, torch.Tensor] = {}
        factors: dict[Slot, Any] = {}
        arrivals: list[Event] = []
        for slot in slots:
            slot.steps += 1
            if home.wants_gradients:
                held = self._at_home(home, slot)
                factors[slot] = held.settle_factors()
                arrivals.append(held.there)
            else:
                found = slot.parameter.grad
                assert found is not None
                gradients[slot] = slot.flat(found.held.recall() if isinstance(found, Gradient) else found.detach())
        # By `.data`, whose version is its own: lanes write there later, and that must not look as if the user had.
        targets = {} if home in self._residences else {slot: slot.flat(slot.parameter.data) for slot in slots}
        return Job(self._runs(home, slots, factors), frozenset(slots), gradients, targets, tuple(arrivals), self._device.mark())

    def _runs(self, home: Stored, slots: Sequence[Slot], factors: Mapping[Slot, Any]) -> tuple[Run, ...]:
        """Parameters that are updated with the same numbers, side by side, as one run: the gaps between them are zero and stay so."""
        arithmetic = self._updates.arithmetic
        runs: list[Run] = []
        settled: dict[tuple[int, int], Any] = {}
        before: Slot | None = None
        followers = dict(zip(home.unit.slots, home.unit.slots[1:], strict=False))
        for slot in slots:
            key = (slot.group, slot.steps)
            if key not in settled:
                settled[key] = arithmetic.settle(*key)
            run = Run(slice(slot.offset, slot.stop), settled[key], factors.get(slot))
            joins = arithmetic.masters and home.wants_gradients and before is not None and followers.get(before) is slot
            if joins and runs[-1].settled is run.settled and runs[-1].factor is run.factor:
                run = Run(slice(runs.pop().span.start, slot.stop), run.settled, run.factor)
            runs.append(run)
            before = slot
        return tuple(runs)

    def _at_home(self, home: Stored, slot: Slot) -> Held:
        """The gradient is in host memory, or on its way."""
        gradient = slot.parameter.grad
        assert self._traffic is not None and gradient is not None
        if not isinstance(gradient, Gradient):
            self._shelve(home, wait=True, must=True)
            return self._send_home(home, slot, gradient)
        held = gradient.held
        if held.here is not None:
            here, held.here = held.here, None
            self._traffic.send(held, here)
        return held

    def _shelve(self, home: Stored, *, wait: bool, must: bool = False) -> bool:
        """Host memory for a unit's gradients. Where a few blocks are used in turn, whoever holds one longest is waited for."""
        assert self._shelf is not None
        while home.gradients is None:
            home.gradients = self._shelf.take(home.unit)
            if home.gradients is None:
                holders = [other for other in self._in_flight if other.gradients is not None]
                if holders and wait:
                    self.finish(holders[0])
                elif must:
                    self._shelf.add(home.unit.nbytes)  # others hold gradients that are not complete: there is no order to wait for
                else:
                    return False
        return True

    def _unshelve(self, home: Stored) -> None:
        if home.gradients is not None and self._shelf is not None and not any(has_gradient(slot.parameter) for slot in home.unit.slots):
            gradients, home.gradients = home.gradients, None
            home.held.clear()
            self._shelf.give(gradients)

    def _send_home(self, home: Stored, slot: Slot, gradient: torch.Tensor) -> Held:
        assert self._traffic is not None
        held = Held(slot, home.gradients, self._traffic)
        before = home.held.get(slot)
        if before is not None:
            before.touch()
            before.spent, held.there = True, before.there  # its bytes are taken by this one
        home.held[slot] = held
        self._traffic.send(held, gradient)
        slot.parameter.grad = held.as_tensor()
        return held

    def _spend(self, home: Stored, slots: Iterable[Slot], pending: Pending | None) -> None:
        """Say what became of gradients: used up, or read by an update that is not over."""
        for slot in slots:
            gradient = slot.parameter.grad
            if self._during_backward:
                held = gradient.held if isinstance(gradient, Gradient) else Held(slot, None, self._traffic)
                held.spent, held.here, held.before_touch = True, None, None
            elif pending is not None:
                held = gradient.held if isinstance(gradient, Gradient) else Held(slot, home.gradients, self._traffic)
                if not isinstance(gradient, Gradient):
                    held.here = gradient
                held.before_touch = lambda: self.finish(home)
            else:
                continue
            if not isinstance(gradient, Gradient):
                slot.parameter.grad = held.as_tensor()


def has_gradient(parameter: nn.Parameter) -> bool:
    gradient = parameter.grad
    return gradient is not None and not (isinstance(gradient, Gradient) and gradient.held.spent)
