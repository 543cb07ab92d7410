"""The device a model lives on, and the machine around it, as the planner sees them."""

from __future__ import annotations

import os
import re
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from .. import machines
from ..errors import BadInput
from ..execute.device import CudaDevice, Device
from ..execute.host_pool import available_host_bytes
from ..execute.null_device import NullDevice
from ..ir import Link, Machine, Processor, Tier
from .measured_here import with_links

HOST_SHARE = 0.85  # of the host memory that is free: the loader and the page cache need some too
BOUNCE_BYTES = 64 << 20
_NULL_RATE = 4e9  # bytes a second of the null device's copies: a memcpy in a thread


def device_of(model: nn.Module, wanted: torch.device | str | None = None) -> Device:
    """The card that was asked for, or on which the model's parameters are; the CPU in the place of one where they are on the CPU."""
    if wanted is not None:
        return _device(torch.device(wanted))
    places = {parameter.device for parameter in model.parameters()}
    if not places:
        raise BadInput("the model has no parameters, so there is nothing to train and nothing to fit")
    if len(places) > 1:
        raise BadInput(f"the model's parameters are on {', '.join(sorted(map(str, places)))}; move it to one device first: model.to('cuda')")
    return _device(*places)


def _device(place: torch.device) -> Device:
    if place.type == "cuda":
        return CudaDevice(torch.cuda.current_device() if place.index is None else place.index)
    if place.type == "cpu":
        return NullDevice(available_host_bytes())
    raise BadInput(
        f"the model is on {place}; Tierwise works on CUDA devices, and on the CPU in the place of one: model.to('cuda'), or device='cuda' for a "
        "model that is to be brought there"
    )


def machine_of(device: Device) -> Machine:
    """What is known of this machine: shipped for the card's name, with this machine's own links; all of it measured where nothing ships."""
    if device.torch_device.type != "cuda":
        return _null_machine(device)
    name = torch.cuda.get_device_name(device.torch_device)
    plain = re.sub(r"[^a-z0-9]", "", name.lower())
    known = [shipped for shipped in machines.names() if re.sub(r"[^a-z0-9]", "", shipped) in plain]
    if known:
        found = with_links(machines.load(max(known, key=len)), device.torch_device)
    else:
        from ..profile.probe import probe

        found = probe(Path(tempfile.gettempdir()))
    return _with_capacities(found, device.capacity_bytes)


def _with_capacities(machine: Machine, device_bytes: int) -> Machine:
    host_bytes = int(available_host_bytes() * HOST_SHARE)
    sizes = {machine.device.tier: device_bytes, "dram": host_bytes}
    return replace(machine, tiers=tuple(replace(tier, capacity_bytes=sizes.get(tier.name, tier.capacity_bytes)) for tier in machine.tiers))


def _null_machine(device: Device) -> Machine:
    cores = os.cpu_count() or 1
    links = (
        Link("hbm", "dram", {"out": _NULL_RATE}, 1e-5),
        Link("dram", "hbm", {"in": _NULL_RATE}, 1e-5),
        Link("hbm", "nvme", {"out": _NULL_RATE, "disk write": _NULL_RATE / 8}, 1e-4, "dram", BOUNCE_BYTES),
        Link("nvme", "hbm", {"in": _NULL_RATE, "disk read": _NULL_RATE / 8}, 1e-4, "dram", BOUNCE_BYTES),
        Link("dram", "nvme", {"disk write": _NULL_RATE / 8}, 1e-4),
        Link("nvme", "dram", {"disk read": _NULL_RATE / 8}, 1e-4),
    )
    rates = {"fp64": 1.5e10 * cores, "fp32": 3e10 * cores, "tf32": 3e10 * cores, "bf16": 1e9 * cores, "fp16": 1e9 * cores}
    return Machine(
        name="this CPU in the place of a GPU",
        tiers=(Tier("hbm", device.capacity_bytes), Tier("dram", int(available_host_bytes() * HOST_SHARE)), Tier("nvme", 1 << 40)),
        links=links,
        processors=(Processor("gpu", "hbm", rates, 1e10, 5e-6), Processor("cpu", "dram", {}, 1e10, 5e-6)),
        source="assumed: the null device is for tests and demonstrations, and its times are guesses",
    )
