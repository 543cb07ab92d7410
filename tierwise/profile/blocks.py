"""Forward and backward of one block timed on the GPU as a whole: what a compiled region costs, which no sum over its ops tells.

Several calls run one behind the other, all forwards and then all backwards, as the layers of a step do: the host runs ahead of the GPU, and the
chip is as warm and as fast as it is in a step.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

LAYERS, REPEATS = 12, 5


def block_seconds(call: Callable[[], Any], wanted: Sequence[Any]) -> tuple[float, float]:
    """Median seconds of the forward and of the backward of `call`, whose gradients with respect to `wanted` tensors are computed."""
    import torch

    forward, backward = [], []
    for repeat in range(REPEATS + 1):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        events[0].record()
        made = [[out for out in _tensors(call()) if out.requires_grad] for _ in range(LAYERS)]
        events[1].record()
        grads = [torch.ones_like(out) for out in made[0]]
        while made:
            torch.autograd.grad(made.pop(), wanted, grads, allow_unused=True)
        events[2].record()
        torch.cuda.synchronize()
        if repeat:  # the first one warms up
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
