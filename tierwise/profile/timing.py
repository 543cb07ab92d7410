"""How long something takes on the device, or on the host: medians after a warm-up."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any


def device_seconds(work: Callable[[], Any], *, repeats: int = 20, warm_up: int = 3, rest_seconds: float = 0.0) -> float:
    """Median seconds of one call on the current CUDA device; with a rest before each, so that the chip is not at its power limit."""
    import torch

    for _ in range(warm_up):
        work()
    taken = []
    for _ in range(repeats):
        if rest_seconds:
            torch.cuda.synchronize()
            time.sleep(rest_seconds)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        end.synchronize()
        taken.append(float(start.elapsed_time(end)) / 1e3)
    return statistics.median(taken)


def host_seconds(work: Callable[[], Any], *, repeats: int = 5, warm_up: int = 1) -> float:
    """Median seconds of one call on the host."""
    for _ in range(warm_up):
        work()
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)
