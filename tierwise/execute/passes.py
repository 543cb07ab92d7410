"""One forward pass and its backward: which region call runs, what it saved for backward, what of that has left the device and when it comes back.

    forward   a call saves tensors (pack); when it is over, those the plan names start to leave; some calls later their bytes are let go
    backward  a call asks for its tensors (unpack); that starts the way back of what calls ahead will ask for

Nothing here outlives the graph: autograd's nodes hold what they saved, and when a graph is thrown away, after backward or without one, what it
had sent away is given back with it.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ..ir import INPUTS, CallPlan
from .copies import Copies, Pending, Ticket
from .layout import copyable

MAX_AHEAD = 16  # calls of regions that a copy back may start before its own
MIN_SENT_BYTES = 1 << 12  # seeds and the like stay: they cost a copy and give back nothing


@dataclass(frozen=True, slots=True)
class RegionPlan:
    """How a call of a region runs: in place of the module's forward, and what of its saved tensors leaves."""

    forward: Callable[..., Any]  # forward(module, *args, **kwargs)
    call: CallPlan
    saved: tuple[str, ...] = ()  # names of the values it saves, in the order it saves them, without inputs, parameters and results


class Saved:
    """A tensor in the hands of autograd: here, or away."""

    __slots__ = ("__weakref__", "pending", "tensor", "ticket")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor: torch.Tensor | None = tensor
        self.ticket: Ticket | None = None
        self.pending: Pending | None = None


class RegionRun:
    """One call of a region in one pass."""

    def __init__(self, in_pass: Pass, place: int, plan: RegionPlan | None) -> None:
        self.place, self.plan = place, plan
        self._pass = in_pass
        self._saved: list[weakref.ref[Saved]] = []  # weak: what backward is done with is gone
        self._is_turned = False

    def pack(self, tensor: torch.Tensor) -> Any:
        if self.plan is None or not self.plan.call.sent:
            return tensor
        saved = Saved(tensor)
        self._saved.append(weakref.ref(saved))
        return saved

    def unpack(self, saved: Any) -> torch.Tensor:
        if not self._is_turned:
            self._is_turned = True
            self._pass.turned(self)
        if isinstance(saved, torch.Tensor):
            return saved
        if saved.tensor is not None:
            return saved.tensor  # type: ignore[no-any-return]
        pending, saved.pending = saved.pending or self._pass.copies.fetch(saved.ticket), None
        return self._pass.copies.wait(pending)

    def send(self, module: torch.nn.Module, inputs: Any, outputs: Any) -> list[Ticket]:
        """Start the way out of what the plan names."""
        waiting = [saved for reference in self._saved if (saved := reference()) is not None]
        if not waiting or self.plan is None:
            return []
        chosen = list(self._chosen(self.plan, waiting, module, inputs, outputs))
        tickets = self._pass.copies.send_all([saved.tensor for saved in chosen if saved.tensor is not None], to=self.plan.call.tier)
        for saved, ticket in zip(chosen, tickets, strict=True):
            saved.ticket, saved.tensor = ticket, None
        return tickets

    def fetch(self) -> None:
        """Start the way back of everything that is away."""
        for reference in self._saved:
            saved = reference()
            if saved is not None and saved.ticket is not None and saved.pending is None:
                saved.pending = self._pass.copies.fetch(saved.ticket)

    def _chosen(self, plan: RegionPlan, waiting: Sequence[Saved], module: torch.nn.Module, inputs: Any, outputs: Any) -> Sequence[Saved]:
        lasting = {id(tensor.untyped_storage()) for tensor in (*module.parameters(), *module.buffers())}
        given, results = _storages(inputs), _storages(outputs)
        activations = _storages(inputs, only_trained=True)  # positions, masks and tables are shared by all layers
        own: list[Saved] = []
        chosen: list[Saved] = []
        for saved in waiting:
            tensor = saved.tensor
            if tensor is None or not copyable(tensor):
                continue
            storage = id(tensor.untyped_storage())
            if storage in lasting:
                continue
            if storage in given:
                if INPUTS in plan.call.sent and storage in activations:
                    chosen.append(saved)
            elif storage not in results:
                own.append(saved)
        names: Sequence[str] = plan.saved
        if len(names) != len(own):  # an eager call, or a compiler that saves in its own way: everything goes, or nothing
            names = ["*"] * len(own)
        everything = set(plan.call.sent) >= set(plan.saved)
        chosen += [saved for saved, name in zip(own, names, strict=True) if name in plan.call.sent or everything]
        return [saved for saved in chosen if saved.tensor is not None and saved.tensor.untyped_storage().nbytes() >= MIN_SENT_BYTES]


class Pass:
    """One forward of the model, from the call of the root to its return, and whatever backward comes of it."""

    def __init__(self, copies: Copies, plans: Mapping[tuple[str, int], RegionPlan]) -> None:
        self.copies = copies
        self._plans = plans
        self._runs: list[weakref.ref[RegionRun]] = []  # autograd's nodes hold them
        self._times: dict[str, int] = {}
        self._leaving: deque[tuple[int, list[Ticket]]] = deque()  # (place after whose forward they are let go, tickets)

    def enter(self, module: str) -> RegionRun:
        """The next call of a region; its plan is None where the plan knows nothing of it."""
        times = self._times[module] = self._times.get(module, 0) + 1
        run = RegionRun(self, len(self._runs), self._plans.get((module, times - 1)))
        self._runs.append(weakref.ref(run))
        return run

    def leave(self, run: RegionRun, module: torch.nn.Module, inputs: Any, outputs: Any) -> None:
        tickets = run.send(module, inputs, outputs)
        if tickets and run.plan is not None:
            self._leaving.append((run.place + run.plan.call.release, tickets))
        while self._leaving and (self._leaving[0][0] <= run.place or run.place + 1 >= len(self._plans)):
            self.copies.release_sent(self._leaving.popleft()[1])

    def over(self) -> None:
        """The forward has returned, or has failed: nothing that left is still held here."""
        while self._leaving:
            self.copies.release_sent(self._leaving.popleft()[1])

    def turned(self, run: RegionRun) -> None:
        """The backward of a call begins: start the way back of those that count on it."""
        for place in range(run.place - 1, max(-1, run.place - 1 - MAX_AHEAD), -1):
            other = self._runs[place]()
            if other is not None and other.plan is not None and place + other.plan.call.fetch >= run.place:
                other.fetch()


def _storages(value: Any, *, only_trained: bool = False) -> set[int]:
    tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return {id(tensor.untyped_storage()) for tensor in tensors if tensor.requires_grad or not only_trained}
