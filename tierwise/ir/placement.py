"""Where the lasting state of a region lives, and where its update runs.

state       masters and moments: "device", "host" or "nvme"
update      "device": on what is there; "cpu": where the state is, in host memory; "streamed": the state comes to the device and goes back
parameters  "device"; or "host", "nvme": they come before the region runs and go after it
gradients   where they wait for their update: "device", or "host", where they go as they arrive
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ..errors import BadInput, UnknownName

TIERS = ("device", "host", "nvme")
# The tiers that state is in while it passes through the device, or from the disk through host memory: buffers of a few chunks, whatever a module has.
# Whoever runs updates says how large these are, so in the image of a program what passes takes nothing of the budget, nor of host memory.
PASSING, PASSING_HOST = BUFFERS = "passing", "passing host"
UPDATES = ("device", "cpu", "streamed")
IN_FLIGHT = 4  # regions whose gradients may wait for updates beside backward, before it waits for these; those that wait for the cpu are not meant
FEW_IN_FLIGHT = 2  # of these on the device, unless a program says otherwise: where the link is busy all the time, compute waits for it here or there
HELD_SHARE = 10  # of the budget, one part in so many for gradients that wait so on the device


@dataclass(frozen=True, slots=True)
class Placement:
    state: str = "device"
    update: str = "device"
    parameters: str = "device"
    gradients: str = "device"

    def __post_init__(self) -> None:
        for what, value, known in (
            ("home of the state", self.state, TIERS),
            ("place of the update", self.update, UPDATES),
            ("home of the parameters", self.parameters, TIERS),
            ("home of the gradients", self.gradients, TIERS[:2]),
        ):
            if value not in known:
                raise UnknownName(what, value, known)
        if (self.update == "device") != (self.state == "device"):
            raise BadInput(
                f"state on {self.state!r} cannot be updated on {self.update!r}: state on the device is updated there ('device'), "
                f"state on the host or the disk on the 'cpu' or 'streamed' through the device"
            )
        if self.update == "device" and self.gradients != "device":
            raise BadInput("an update on the device takes its gradients there; use gradients='device', or update on the 'cpu' or 'streamed'")


ON_DEVICE = Placement()


def owner(name: str, paths: Collection[str]) -> str | None:
    """The path that a parameter belongs to, the longest that it is below; None for those of no path."""
    path = name
    while path:
        path = path.rpartition(".")[0]
        if path in paths:
            return path
    return None


def stated(states: Mapping[str, Placement]) -> dict[str, Placement]:
    """What has to be said of places by path: where what is elsewhere is, and which of its parts are on the device. A part of which nothing is said is
    where the rest is."""
    elsewhere = {path: place for path, place in states.items() if place != ON_DEVICE}
    return {path: place for path, place in states.items() if path in elsewhere or owner(path, elsewhere) is not None}


def region_of(path: str, regions: Collection[str]) -> str:
    """The one that a path is or is a part of; else itself."""
    return path if path in regions else owner(path, regions) or path


def waiting_bytes(budget_bytes: int, largest_bytes: int, in_flight: int) -> int:
    """Of gradients on the device whose updates pass through it, before backward waits for them; by those of so many of the largest region. Of regions
    of which a part is updated so there are more at a time."""
    return max(largest_bytes, min(in_flight * largest_bytes, budget_bytes // HELD_SHARE))
