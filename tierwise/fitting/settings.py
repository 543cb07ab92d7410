"""What a user asks of `fit`, and what that leaves of the machine."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, replace
from pathlib import Path

from ..errors import UnknownName
from ..execute.below import bounce_bytes
from ..ir import Machine
from .programs import PLAN_SECONDS

HOST_SHARE = 0.97  # of host=: parcels are rounded up, and leave gaps between them
_log = logging.getLogger("tierwise")


@dataclass(frozen=True, slots=True)
class Settings:
    budget_bytes: int
    host_bytes: int | None
    pinned_bytes: int | None
    nvme: tuple[Path, int] | None
    policy: str
    compile: bool
    verify: bool = False
    masters: str | None = None
    update: str = "after"
    weights: str | os.PathLike[str] | None = None
    plan: str | os.PathLike[str] | None = None  # a saved one, for the first shape
    plan_seconds: float = PLAN_SECONDS


def limited(machine: Machine, settings: Settings) -> Machine:
    """The machine as far as it may be used. The disk's buffers serve both ways: they are counted once."""
    sizes: dict[str, int] = {}
    if settings.host_bytes is not None:
        sizes["dram"] = int(settings.host_bytes * HOST_SHARE)
    if settings.nvme is not None:
        sizes["nvme"] = settings.nvme[1]
    bounce = bounce_bytes(settings.host_bytes)
    links = [replace(link, staging_bytes=bounce * (link.src != "nvme")) if link.staging_tier == "dram" else link for link in machine.links]
    tiers = [replace(tier, capacity_bytes=sizes.get(tier.name, tier.capacity_bytes)) for tier in machine.tiers]
    return replace(machine, tiers=tuple(tiers), links=tuple(links))


def log_level_from_environment() -> None:
    """TIERWISE_LOG=info or debug shows what is decided and what moves."""
    level = os.environ.get("TIERWISE_LOG", "")
    if level:
        number = logging.getLevelNamesMapping().get(level.upper())
        if number is None:
            raise UnknownName("TIERWISE_LOG level", level, [name.lower() for name in logging.getLevelNamesMapping()])
        _log.setLevel(number)
        if not _log.handlers:
            _log.addHandler(logging.StreamHandler())
