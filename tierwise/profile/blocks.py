"""Forward and backward of one block timed on the GPU as a whole: what a compiled region costs, which no sum over its ops tells.

Several calls run one behind the other, all forwards and then all backwards, as the layers of a step do, until the chip is as warm and as slow as it
is after some steps. The first call waits behind a pause, so that the host is ahead of the GPU from the start.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

LAYERS, REPEATS = 12, 7
WARM_SECONDS = 1.0
PAUSE_CYCLES = 10_000_000  # about five milliseconds


def block_seconds(call: Callable[[], Any], wanted: Sequence[Any]) -> tuple[float, float]:
    """Median seconds of the forward and of the backward of `call`, whose gradients with respect to `wanted` tensors are computed."""
    import torch

    forward: list[float] = []
    backward: list[float] = []
    began = time.perf_counter()
    while len(forward) < REPEATS:
        torch.cuda._sleep(PAUSE_CYCLES)  # type: ignore[no-untyped-call]
        events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        events[0].record()
        made = [[out for out in _tensors(call()) if out.requires_grad] for _ in range(LAYERS)]
        events[1].record()
        grads = [torch.ones_like(out) for out in made[0]]
        while made:
            torch.autograd.grad(made.pop(), wanted, grads, allow_unused=True)
        events[2].record()
        torch.cuda.synchronize()
        if time.perf_counter() - began > WARM_SECONDS:
            forward.append(events[0].elapsed_time(events[1]) / 1e3 / LAYERS)
            backward.append(events[1].elapsed_time(events[2]) / 1e3 / LAYERS)
    return statistics.median(forward), statistics.median(backward)


def _tensors(value: Any) -> list[Any]:
    import torch

    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = tuple(value.values())
    return [tensor for part in value for tensor in _tensors(part)] if isinstance(value, (tuple, list)) else []
