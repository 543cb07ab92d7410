"""How far the host runs ahead of the device. Where a queue of launches is full the next one waits inside the driver, and if that holds Python's lock,
lanes that have copies and updates to issue wait with it. So the host waits by itself before that, and lets others have the lock meanwhile."""

from __future__ import annotations

from collections import deque

from .device import Device
from .lanes import Event

REGIONS_AHEAD = 4  # of a model: a hundred kernels each, where a queue holds a thousand


class Pace:
    def __init__(self, device: Device, ahead: int = REGIONS_AHEAD) -> None:
        self._device, self._ahead = device, ahead
        self._issued: deque[Event] = deque()

    def next(self) -> None:
        """Another region is about to be issued."""
        self._issued.append(self._device.mark())
        while len(self._issued) > self._ahead:
            event = self._issued.popleft()
            if not event.done():
                event.wait()
