"""Memory that the allocator keeps in pieces too small for what comes next. Where gradients wait between activations, many are left when they go.

An allocation that finds no room makes the allocator give all of its pieces back. It waits for the device then, and holds Python's lock, so lanes that
have copies and updates to issue wait with it, and the device for them: half a second. Given back where little has to be waited for, without the
lock, pieces cost a few milliseconds, and what is allocated next lies close together.
"""

from __future__ import annotations

from .device import Device

BETWEEN_PASSES = 3 / 4, 1 / 32  # of the budget: what is in use or kept, and what of it is kept, from which on pieces are given back
WITHIN_FORWARD = 15 / 16, 1 / 8


class Holes:
    def __init__(self, device: Device, budget_bytes: int) -> None:
        self._device, self._budget_bytes = device, budget_bytes
        self.are_in_the_way = False  # an allocation had to wait for them: from then on they are looked after

    def close_between_passes(self) -> None:
        self._close(*BETWEEN_PASSES)

    def close_within_forward(self) -> None:
        self._close(*WITHIN_FORWARD)

    def _close(self, reserved_share: float, kept_share: float) -> None:
        if not self.are_in_the_way:
            return
        memory = self._device.memory()
        kept = memory.reserved_bytes - memory.allocated_bytes
        if memory.reserved_bytes >= reserved_share * self._budget_bytes and kept >= kept_share * self._budget_bytes:
            self._device.give_back()
