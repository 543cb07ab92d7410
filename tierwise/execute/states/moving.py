"""Into a placement and out of it again: values to the device, buffers beside them, everything back to where it came from."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ...errors import BadInput
from ..device import Device
from .units import Slot, Unit

_log = logging.getLogger("tierwise")


class Moving:
    """Remembers where the parameters and buffers of a model were, or what another does of that. `source` has values for parameters by name."""

    def __init__(self, model: nn.Module, device: Device, source: Mapping[str, torch.Tensor], before: Moving | None = None) -> None:
        self._model, self._device, self._source = model, device, source
        self._origins: dict[nn.Parameter, torch.device] = (
            {parameter: parameter.device for parameter in model.parameters()} if before is None else before._origins
        )
        self._buffers: list[tuple[nn.Module, str, torch.device]] = [] if before is None else before._buffers

    def bring_buffers(self) -> None:
        for module in self._model.modules():
            for name, buffer in list(module.named_buffers(recurse=False)):
                if buffer.device != self._device.torch_device:
                    self._bring_buffer(module, name, buffer)

    def value(self, slot: Slot) -> torch.Tensor:
        """A parameter's value at the beginning."""
        value = self._source.get(slot.name)
        if value is None and slot.parameter.device.type == "meta":
            raise BadInput(f"{slot.name} is on the meta device and no values were given for it; load them, or name a checkpoint that has them")
        if value is not None and tuple(value.shape) != slot.size:
            raise BadInput(f"the checkpoint has {slot.name} of shape {tuple(value.shape)} and the model of shape {slot.size}; load the one it is of")
        return slot.parameter.data if value is None else value

    def to_device(self, unit: Unit) -> None:
        place = self._device.torch_device
        for slot in unit.slots:
            value, parameter = self.value(slot), slot.parameter
            if parameter.device.type == "meta":
                made = torch.empty_strided(slot.size, slot.stride, dtype=parameter.dtype, device=place).copy_(value)
                torch.utils.swap_tensors(parameter, nn.Parameter(made, requires_grad=parameter.requires_grad))
                self._origins[parameter] = torch.device("cpu")
            elif slot.name in self._source:
                parameter.data = torch.empty_strided(slot.size, slot.stride, dtype=parameter.dtype, device=place).copy_(value)
            elif parameter.device != place:
                parameter.data = value.to(place)

    def origin(self, slot: Slot) -> torch.device:
        """Where a parameter came from; one that had no values goes to the host."""
        place = self._origins[slot.parameter]
        return torch.device("cpu") if place.type == "meta" else place

    def back(self, unit: Unit) -> bool:
        """Parameters that stayed on the device, to where they came from. Whether it had room for those that wait in host memory; else they stay."""
        try:
            for slot in unit.slots:
                if slot.parameter.device not in (self.origin(slot), torch.device("meta")):  # one without values has none to take anywhere
                    slot.parameter.data = slot.parameter.data.to(self.origin(slot))
        except torch.OutOfMemoryError:
            return False
        return True

    def state_back(self, slot: Slot, state: Mapping[str, Any]) -> dict[str, Any]:
        """A parameter's state beside it, in memory of its own; in host memory if the device has no room."""
        try:
            return _copied(state, slot.parameter.device)
        except torch.OutOfMemoryError:
            _log.warning("the device has no room for the optimizer's state of %s: it is given back in host memory", slot.name)
            return on_host(state)

    def buffers_back(self) -> None:
        for module, name, place in self._buffers:
            setattr(module, name, getattr(module, name).to(place))
        self._buffers.clear()

    def _bring_buffer(self, module: nn.Module, name: str, buffer: torch.Tensor) -> None:
        if buffer.device.type == "meta":
            raise BadInput(f"the buffer {name!r} of a {type(module).__name__} is on the meta device; give it values before its model is placed")
        self._buffers.append((module, name, buffer.device))
        setattr(module, name, buffer.to(self._device.torch_device))


def on_host(state: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter's state in host memory of its own."""
    return _copied(state, torch.device("cpu"))


def is_on_host(state: Mapping[str, Any]) -> bool:
    return any(value.device.type == "cpu" for key, value in state.items() if key != "step" and isinstance(value, torch.Tensor))


def _copied(state: Mapping[str, Any], place: torch.device) -> dict[str, Any]:
    return {key: value.to(place, copy=True) if key != "step" and isinstance(value, torch.Tensor) else value for key, value in state.items()}
