"""When one step's region calls and copies ran, and what memory held: facts, for a Timeline to be made of.

Moments are events on a card's own streams, or the clock of this machine; they are read when the step is over. Nothing of the step is kept alive.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch.utils.hooks import RemovableHandle

from .device import Device, Direction, MemoryUse, Moment


@dataclass(frozen=True, slots=True)
class CopyFact:
    direction: Direction
    parcel: int
    nbytes: int
    start: Moment
    end: Moment


@dataclass(slots=True)
class CallFact:
    """Forward and backward of one region call."""

    forward: list[Moment] = field(default_factory=list)
    backward: list[Moment] = field(default_factory=list)  # the first and the last count


class Recording:
    def __init__(self, device: Device) -> None:
        self._device = device
        self.before: MemoryUse = device.memory()
        self.start = device.moment()  # of compute: a step's updates may still be under way on other lanes, and are waited for where they are needed
        self.start.now()
        self.calls: dict[int, CallFact] = {}  # by region call
        self.copies: list[CopyFact] = []
        self.sent: dict[int, list[tuple[int, str, int]]] = {}  # parcel -> region call, value, bytes
        self.memory: list[tuple[Moment, int]] = []  # allocated bytes
        self.updated: Moment | None = None  # when the optimizer's step was over, if it was seen
        self.end: Moment | None = None
        self.after: MemoryUse | None = None
        self._hooks: list[RemovableHandle] = []

    def forward(self, call: int) -> None:
        """A call's forward begins or ends here."""
        self._fact(call).forward.append(self._now())

    def watch_backward(self, call: int, outputs: Iterable[torch.Tensor], inputs: Iterable[torch.Tensor]) -> None:
        """A call's backward begins when a gradient of what it returned arrives, and ends when its nodes have run."""
        fact = self._fact(call)
        for node in {tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None}:
            self._hooks.append(node.register_prehook(lambda gradients: fact.backward.append(self._now())))
            self._hooks.append(node.register_hook(lambda found, gradients: fact.backward.append(self._now())))
        for tensor in inputs:
            if tensor.requires_grad:
                self._hooks.append(tensor.register_hook(lambda gradient: fact.backward.append(self._now())))

    def copy(self, direction: Direction, parcel: int, nbytes: int, start: Moment, end: Moment) -> None:
        self.copies.append(CopyFact(direction, parcel, nbytes, start, end))

    def was_sent(self, call: int, name: str, nbytes: int, parcel: int) -> None:
        self.sent.setdefault(parcel, []).append((call, name, nbytes))

    def was_updated(self) -> None:
        """The optimizer's step is over: what comes before the next forward is none of the step's."""
        self.updated = self._now()

    def close(self) -> None:
        """The step is over."""
        if self.end is None:
            self.end = self._now()
            self.after = self._device.memory()
            self._device.synchronize()
            self.end.now()
            if self.start.event is not None:  # both clocks agree at the end, when nothing runs
                self.start.host_seconds = self.end.host_seconds - self.end.since(self.start)
            while self._hooks:
                self._hooks.pop().remove()

    def _fact(self, call: int) -> CallFact:
        return self.calls.setdefault(call, CallFact())

    def _now(self) -> Moment:
        moment = self._device.moment()
        self.memory.append((moment, self._device.memory().allocated_bytes))
        return moment
