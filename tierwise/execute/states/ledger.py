"""The optimizer's state by parameter: from torch's layout to rows in their homes, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from ..device import Device
from ..host_pool import HostPool
from ..nvme import NvmeStore
from . import access
from .arithmetic import Formula
from .facade import MASTER
from .homes import DiskChunks, HostChunks
from .rules import rule_of
from .torchs import device_of_step, is_piecewise, state_names
from .units import Slot, Unit
from .updates import Stored, Updates
from .whole import Whole

HOST = torch.device("cpu")


class Ledger:
    """`weights` gives a parameter as it is now, flat."""

    def __init__(self, optimizer: torch.optim.Optimizer, updates: Updates, weights: Callable[[Stored, Slot], torch.Tensor]) -> None:
        self._optimizer, self._updates, self._weights = optimizer, updates, weights
        self._arithmetic = updates.arithmetic

    def is_native(self, home: Stored) -> bool:
        """Whether torch itself keeps the state and updates, on the device."""
        return home.unit.placement.update == "device" and not isinstance(self._arithmetic, Formula)

    @property
    def hands_over(self) -> bool:
        """Whether all state is in the homes, for whoever takes them over."""
        return not isinstance(self._arithmetic, Whole)

    def hand(self, slot: Slot, state: dict[str, Any]) -> None:
        """Give a parameter's state, if it has any, to the optimizer."""
        if state:
            self._optimizer.state[slot.parameter] = state

    def keep(self, home: Stored, device: Device, pool: HostPool | None, store: NvmeStore | None) -> None:
        """Make room for a unit's state, and take over what the optimizer has of it."""
        unit, place = home.unit, home.unit.placement
        if not unit.trained:
            return
        if self.is_native(home):
            known = {slot: self._optimizer.state.get(slot.parameter, {}) for slot in unit.slots}
            self.take_over(home, {slot: state for slot, state in known.items() if _is_elsewhere(state, slot.parameter.device)})
            return
        if place.state == "device":
            made = device.empty(max(1, home.row_count * unit.numel * home.dtype.itemsize))
            home.arrays = made[: home.row_count * unit.numel * home.dtype.itemsize].view(home.dtype).view(home.row_count, unit.numel)
        elif place.state == "host" or not home.names:
            assert pool is not None
            home.chunks = HostChunks(unit, home.row_count, home.dtype, pool)
        else:
            assert store is not None
            home.chunks = DiskChunks(unit, home.row_count, home.dtype, store)
        self.take_over(home, {slot: self._optimizer.state.get(slot.parameter, {}) for slot in unit.slots})
        for slot in unit.slots:  # until all of it is there it is the optimizer's
            self._optimizer.state.pop(slot.parameter, None)

    def take_over(self, home: Stored, known: Mapping[Slot, Mapping[str, Any]]) -> None:
        """State of a unit's parameters in torch's layout; a master that is not there is made from its parameter."""
        if self.is_native(home):
            for slot, state in known.items():
                self._optimizer.state.pop(slot.parameter, None)
                if state:
                    self._optimizer.state[slot.parameter] = _cast(state, slot.parameter.device, slot.parameter.dtype, self._step_device(slot))
            return
        if isinstance(self._arithmetic, Whole):
            for slot, state in known.items():
                self._arithmetic.kept.pop(slot, None)
                if state:
                    self._arithmetic.kept[slot] = _cast(state, HOST, home.unit.dtype, HOST)
            known = {slot: {} for slot in known}
        for slot, state in known.items():
            slot.steps = int(state["step"]) if "step" in state else int(any(isinstance(value, torch.Tensor) for value in state.values()))

        def values(slot: Slot, name: str) -> torch.Tensor | None:
            value = known[slot].get(name)
            if isinstance(value, torch.Tensor):
                return slot.flat(value)
            return self._weights(home, slot) if name == MASTER else None

        access.fill(home, values, self._updates.ring("state", home))

    def of(self, home: Stored, slot: Slot) -> dict[str, Any]:
        """A parameter's state in torch's layout, masters as one key more; empty before its first update."""
        if self.is_native(home):
            return dict(self._optimizer.state.get(slot.parameter, {}))
        if isinstance(self._arithmetic, Whole):
            return self._arithmetic.kept.get(slot, {})
        if not slot.steps:
            return {}
        found: dict[str, Any] = {}
        if type(self._optimizer) is not torch.optim.SGD:
            found["step"] = torch.tensor(float(slot.steps), device=self._step_device(slot))
        names = home.states if home.dtype == home.unit.dtype else home.names
        for name in (*home.states, *(set(names) - set(home.states))):
            found[name] = access.read(home, slot, name).as_strided(slot.size, slot.stride)
        return found

    def _step_device(self, slot: Slot) -> torch.device:
        return device_of_step(self._optimizer.param_groups[slot.group], slot.parameter.device)

    def refresh(self, home: Stored, slots: Iterable[Slot]) -> None:
        """Somebody wrote to these parameters: masters follow where they differ by more than rounding."""
        wanted = set(slots)

        def value(slot: Slot, old: torch.Tensor) -> torch.Tensor | None:
            if slot not in wanted:
                return None
            now = self._weights(home, slot).to(old.device)
            differs = old.to(now.dtype) != now
            return torch.where(differs, now.to(old.dtype), old) if bool(differs.any()) else None

        access.rewrite(home, MASTER, value, self._updates.ring("state", home))


def stored_of(unit: Unit, optimizer: torch.optim.Optimizer | None, masters: str | None) -> Stored:
    """Which rows a unit's state has, and of which type."""
    home = Stored(unit)
    if optimizer is None or not unit.trained:
        return home
    place = unit.placement
    home.dtype = torch.float32 if masters == "fp32" else unit.dtype
    copied = place.update == "cpu" and place.parameters == "device"  # the host has weights of its own to work on
    whole = masters is None and not is_piecewise(optimizer)
    home.has_master = home.dtype != unit.dtype or copied or (whole and place.update == "cpu")
    known = rule_of(optimizer).states if masters == "fp32" else () if whole else state_names(optimizer)
    home.names = ((MASTER,) if home.has_master else ()) + known
    return home


def _is_elsewhere(state: Mapping[str, Any], place: torch.device) -> bool:
    """Than its parameter, as after it was in other hands."""
    return any(isinstance(value, torch.Tensor) and value.dim() > 0 and value.device != place for value in state.values())


def _cast(state: Mapping[str, Any], place: torch.device, dtype: torch.dtype, step_device: torch.device) -> dict[str, Any]:
    """As torch does it when a state is loaded: everything to the parameter's device, numbers with a fraction to its type, `step` in its own."""
    made: dict[str, Any] = {}
    for key, value in state.items():
        if not isinstance(value, torch.Tensor):
            made[key] = value
        elif key == "step":
            made[key] = value.to(step_device, copy=True)
        else:
            made[key] = value.to(place, dtype if value.is_floating_point() else value.dtype, copy=True)
    return made
