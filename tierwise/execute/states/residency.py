"""Which units' parameters are on the device when: there before their region runs, on their way while the one before it does, gone after it.

The order of regions is that of the last pass; before there was one, the order in which they were given. In backward it is reversed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .parameters import Residence
from .torch_compat import after_backward, backward_number, in_backward
from .updates import Stored


class Residency:
    """`finish` waits for a unit's update, `over` is called when a backward is. `ahead` may change between passes."""

    def __init__(
        self,
        by_region: Mapping[str, Sequence[Stored]],
        order: Sequence[str],
        ahead: int,
        *,
        finish: Callable[[Stored], None],
        over: Callable[[], None],
    ) -> None:
        self.residences: dict[Stored, Residence] = {}
        self.order = list(order)
        self._places = _places(self.order)
        self.saving = 0  # state_dicts being made
        self._by_region, self.ahead = by_region, ahead
        self._finish, self._over = finish, over
        self._storages: dict[int, Residence] = {}
        self._seen: list[str] = []
        self._in_pass = False
        self._inputs_done: set[str] = set()
        self._backward = -1

    def add(self, home: Stored, residence: Residence) -> None:
        self.residences[home] = residence
        self._storages[id(residence.storage)] = residence

    def needed(self, home: Stored) -> int:
        """Its place in the order in which the next pass needs units."""
        return min(self._places.get(region, -1) for region in home.unit.regions)

    # -- forward ------------------------------------------------------------------------------------------------------------------------

    def before_pass(self) -> None:
        if not self._in_pass and not in_backward():
            self._in_pass, self._seen, self.saving = True, [], 0
            self._inputs_done.clear()  # a backward that failed may have left some
            for homes in self._by_region.values():
                for home in homes:
                    home.arrived.clear()
        for home in self._by_region.get("", ()):
            self.be_there(home)

    def after_pass(self) -> None:
        if self._in_pass and self._seen and not in_backward():
            if self.order != self._seen:
                self._places = _places(self._seen)
            self.order = self._seen
        self._in_pass = self._in_pass and in_backward()
        for home in self._by_region.get("", ()):
            self.not_used(home, keep=torch.is_grad_enabled())

    def before_forward(self, path: str) -> None:
        for home in self._by_region.get(path, ()):
            self.be_there(home)
        if in_backward():
            return  # a recomputation: what comes next is known from backward
        if self._in_pass:
            self._seen.append(path)
        self._inputs_done.discard(path)
        for other in self._next(path):
            self._start(other)

    def after_forward(self, path: str) -> None:
        last = self.order[-self.ahead - 1 :]  # backward begins with these
        for home in self._by_region.get(path, ()):
            self.not_used(home, keep=in_backward() or (torch.is_grad_enabled() and path in last))

    # -- backward -----------------------------------------------------------------------------------------------------------------------

    def before_backward(self, path: str) -> None:
        if in_backward() and self._backward != backward_number():
            self._backward = backward_number()
            after_backward(self._after_backward)
        for home in self._by_region.get(path, ()):
            if home in self.residences:
                self.residences[home].arrive()
        for other in self._previous(path):
            self._start(other)

    def inputs_done(self, path: str) -> None:
        self._inputs_done.add(path)
        self.maybe_over(path)

    def maybe_over(self, path: str) -> None:
        """A region's backward is over when all gradients that it makes are there: those of what it was given and of its parameters."""
        if not self.residences or path not in self._inputs_done:
            return
        for home in self._by_region.get(path, ()):
            if home.unit.trained and len(home.arrived) < sum(slot.parameter.requires_grad for slot in home.unit.slots):
                return
        self.after_backward(path)

    def after_backward(self, path: str) -> None:
        for home in self._by_region.get(path, ()):
            if len(home.unit.regions) == 1:  # what several regions share goes when the whole backward is over
                self.not_used(home, keep=False, used=False)

    def pack(self, tensor: torch.Tensor) -> Any:
        residence = self._storages.get(id(tensor.untyped_storage())) if self._storages else None
        return tensor if residence is None else _Packed(tensor, residence)

    def bring(self, tensor: torch.Tensor) -> None:
        """Backward is about to read a tensor that it saved: if that is a parameter, it is there."""
        residence = self._storages.get(id(tensor.untyped_storage())) if self._storages else None
        if residence is not None:
            residence.arrive()

    def unpack(self, packed: Any) -> torch.Tensor:
        if not isinstance(packed, _Packed):
            return packed  # type: ignore[no-any-return]
        packed.residence.arrive()
        return packed.tensor

    # -- outside of regions ---------------------------------------------------------------------------------------------------------------

    def ask(self, home: Stored, parameter: nn.Parameter) -> torch.Tensor | None:
        """Somebody touches a parameter that is away."""
        residence = self.residences[home]
        if self.saving:
            slot = next(slot for slot in home.unit.slots if slot.parameter is parameter)
            return residence.on_host(slot)
        residence.lend()
        return None

    def saves(self, change: int) -> None:
        """A state_dict is being made: parameters that are away are given as they are at home."""
        self.saving = max(0, self.saving + change)

    def loaded(self, path: str) -> None:
        """A state_dict has been loaded into a region: what came for that goes again."""
        for home in self._by_region.get(path, ()):
            self.not_used(home, keep=False, used=False)

    def make_room(self) -> None:
        """Give back what came ahead of its use."""
        for residence in self.residences.values():
            if residence.users == 0 and not in_backward():
                residence.leave()

    def _after_backward(self) -> None:
        self._backward = -1
        self._inputs_done.clear()
        for home in self.residences:
            self.not_used(home, keep=False, used=False)
        self._over()

    def be_there(self, home: Stored) -> None:
        residence = self.residences.get(home)
        if residence is None:
            self._finish(home)
        else:
            residence.arrive()
            residence.users += 1

    def not_used(self, home: Stored, *, keep: bool, used: bool = True) -> None:
        residence = self.residences.get(home)
        if residence is not None:
            residence.users = max(0, residence.users - used)
            if residence.users == 0 and not keep:
                residence.leave()

    def _start(self, path: str) -> None:
        for home in self._by_region.get(path, ()):
            if home in self.residences:
                try:
                    self.residences[home].start()
                except torch.OutOfMemoryError:
                    return  # it will come when it is needed

    def _next(self, path: str) -> list[str]:
        place = len(self._seen) - 1 if self._in_pass else -1
        if not (0 <= place < len(self.order) and self.order[place] == path):
            place = self.order.index(path) if path in self.order else len(self.order)
        return self.order[place + 1 : place + 1 + self.ahead]

    def _previous(self, path: str) -> list[str]:
        if path not in self.order:
            return []
        place = len(self.order) - 1 - self.order[::-1].index(path)
        return self.order[max(0, place - self.ahead) : place][::-1]


def _places(order: Sequence[str]) -> dict[str, int]:
    """Where each region first runs."""
    return {path: place for place, path in reversed([*enumerate(order)])}


class _Packed:
    """A parameter in the hands of autograd."""

    __slots__ = ("residence", "tensor")

    def __init__(self, tensor: torch.Tensor, residence: Residence) -> None:
        self.tensor, self.residence = tensor, residence
