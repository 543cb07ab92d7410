"""Forward and backward of one block timed on the GPU as a whole: what a compiled region costs, which no sum over its ops tells."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .timing import device_seconds

REST_SECONDS = 4e-3  # between repeats, so that the chip is not at its power limit all the time


def block_seconds(call: Callable[[], Any], wanted: Sequence[Any]) -> tuple[float, float]:
    """Median seconds of the forward and of the backward of `call`, whose gradients with respect to `wanted` tensors are computed."""
    import torch

    outputs = [out for out in _tensors(call()) if out.requires_grad]
    grads = [torch.randn_like(out) for out in outputs]

    def both() -> None:
        made = [out for out in _tensors(call()) if out.requires_grad]
        torch.autograd.grad(made, wanted, grads, allow_unused=True)

    del outputs
    forward = device_seconds(call, repeats=7, rest_seconds=REST_SECONDS)
    together = device_seconds(both, repeats=7, rest_seconds=REST_SECONDS)
    return forward, max(0.0, together - forward)


def _tensors(value: Any) -> list[Any]:
    import torch

    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = tuple(value.values())
    return [tensor for part in value for tensor in _tensors(part)] if isinstance(value, (tuple, list)) else []
