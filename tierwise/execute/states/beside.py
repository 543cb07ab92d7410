"""Compute beside compute: update kernels on a stream of their own, so that they neither wait for the step nor make it wait."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from ..device import CudaEvent, Device
from ..lanes import Event


class Beside:
    """For a lane's thread. Inside `after`, the device's `mark` is a point of this stream."""

    def __init__(self, device: Device) -> None:
        self._device = device
        # It goes first where both have work: its kernels are short, and a link waits for each of them.
        self._stream = torch.cuda.Stream(device.torch_device, priority=-1) if device.torch_device.type == "cuda" else None

    @contextlib.contextmanager
    def after(self, events: Sequence[Event]) -> Iterator[None]:
        if self._stream is None:  # the null device computes in the thread that asks it to
            for event in events:
                event.wait()
            yield
            return
        with torch.cuda.stream(self._stream):
            for event in events:
                if isinstance(event, CudaEvent):
                    self._stream.wait_event(event.raw)
                else:
                    event.wait()
            yield
