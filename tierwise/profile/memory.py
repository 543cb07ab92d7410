"""Bytes that a piece of work allocates: on the GPU as its allocator counts them, on the CPU as torch's profiler sees them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from .torch_compat import host_allocations

CUDA_BLOCK_BYTES = 512  # the allocator rounds up to a multiple of this


@dataclass(frozen=True, slots=True)
class Bytes:
    """Against what was there before."""

    peak: int
    left: int  # less than nothing where more is freed than made


def measured_bytes(work: Callable[[], Any], device: torch.device) -> Bytes:
    """What the work has at most, and what it leaves. It should have run before: libraries allocate for themselves the first time."""
    if device.type != "cuda":
        held = [0, *accumulate(host_allocations(work))]
        return Bytes(max(held), held[-1])
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    work()
    return Bytes(torch.cuda.max_memory_allocated(device) - before, torch.cuda.memory_allocated(device) - before)


def allocated_bytes(nbytes: int, device: torch.device) -> int:
    """What a storage of so many bytes takes."""
    return -(-nbytes // CUDA_BLOCK_BYTES) * CUDA_BLOCK_BYTES if device.type == "cuda" else nbytes
