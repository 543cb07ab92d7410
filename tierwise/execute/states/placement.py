"""Placements, and how many bytes a set of them takes."""

from __future__ import annotations

from dataclasses import dataclass

from ...ir.placement import ON_DEVICE, Placement

__all__ = ["ON_DEVICE", "Needs", "Placement"]


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes that a set of placements takes, for a plan to count. The device's are beside parameters and gradients that are there anyway."""

    device_bytes: int  # lasting state there, and staging
    leaving_bytes: int  # gradients on their way to the host, beside what backward has just made
    host_bytes: int  # of the shared pool: state, gradients, staging
    parameter_host_bytes: int  # of pools of their own, one for each region
    nvme_bytes: int
    written_bytes_per_step: int  # to the disk: its wear
    staging_bytes: int  # of the device's: what streamed updates pass through
    window_bytes: int  # the most that parameters which live elsewhere take on the device at once
