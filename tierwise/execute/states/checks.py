"""What cannot be placed, before anything is: in words."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...errors import BadInput
from ..host_pool import HostPool
from ..nvme import NvmeStore
from .placement import ON_DEVICE
from .updates import Stored

TYPES = (torch.float32, torch.bfloat16, torch.float16)  # that others than torch update


def check(stored: Sequence[Stored], optimizer: torch.optim.Optimizer | None, is_whole: bool, pool: HostPool | None, store: NvmeStore | None) -> None:
    """`is_whole`: whether the optimizer is one that only torch can run, on parameters as they are."""
    for home in stored:
        unit, place, trained = home.unit, home.unit.placement, home.unit.trained
        if pool is None and ((trained and (place.state != "device" or place.gradients == "host")) or place.parameters == "nvme"):
            raise BadInput(f"{unit.name} keeps something off the device and there is no host memory for it; give a pool")
        if store is None and ((trained and place.state == "nvme") or place.parameters == "nvme"):
            raise BadInput(f"{unit.name} lives on disk and no disk store was given; name one with nvme=")
        if trained and place.update != "device" and unit.dtype not in TYPES:
            raise BadInput(f"{unit.name} is of type {unit.dtype}, which only torch itself updates; leave it on the device")
        if is_whole and trained and (place.update == "streamed" or place.state == "nvme" or place.parameters == "nvme"):
            raise BadInput(
                f"{type(optimizer).__name__} runs on whole parameters where their state is, so {unit.name} can be updated on the device, or "
                f"on the CPU with state in host memory, not {place.update!r} with state on {place.state!r}"
            )
        for slot in unit.slots:
            if slot.parameter.grad is not None and place != ON_DEVICE:
                raise BadInput(f"{slot.name} has a gradient; call optimizer.zero_grad() before its home is changed")
