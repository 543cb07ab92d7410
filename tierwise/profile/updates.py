"""The optimizer's step timed as one call, as it runs: on a GPU one kernel updates many parameters, and the host goes through them one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .sustained import sustained
from .taken import Taken

MEMORY_SHARE = 0.5  # of what is free: parameters beyond it are taken to cost as much a byte as the others
BYTES_FOR_EACH = 5  # a parameter, its gradient, two moments, and one for what a step makes on the way


def update_times(optimizer: str, shapes: Sequence[tuple[tuple[int, ...], torch.dtype]], device: torch.device) -> Taken | None:
    """Of one step and of letting the gradients go; None for an optimizer that is not in torch.optim."""
    make = _maker(optimizer, device)
    if make is None or not shapes:
        return None
    chosen = _as_many_as_fit(shapes, free_bytes(device))
    parameters = [torch.nn.Parameter(torch.empty(shape, dtype=dtype, device=device).normal_(0.0, 0.02)) for shape, dtype in chosen]
    gradients = [torch.randn_like(parameter) for parameter in parameters]
    running = make(parameters)

    def give() -> None:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient

    def step() -> None:
        running.step()
        running.zero_grad(set_to_none=True)

    taken = sustained((give, step), device, settle=False)[1]  # a pass over memory is no faster on a cool chip
    elements, timed_elements = (sum(torch.Size(shape).numel() for shape, _ in some) for some in (shapes, chosen))
    return Taken(taken.device_seconds * elements / timed_elements, taken.host_seconds * len(shapes) / len(chosen))


def _maker(optimizer: str, device: torch.device) -> Any:
    fused: Any = {"fused": True} if device.type == "cuda" else {}
    return {
        "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-5, **fused),
        "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-5, **fused),
        "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-5, **fused),
        "sgd-momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-5, momentum=0.9, **fused),
        "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=1e-5),
    }.get(optimizer)


def _as_many_as_fit(shapes: Sequence[tuple[tuple[int, ...], torch.dtype]], free_bytes: float) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """From the first on, at least one."""
    chosen: list[tuple[tuple[int, ...], torch.dtype]] = []
    room = MEMORY_SHARE * free_bytes
    for shape, dtype in shapes:
        room -= BYTES_FOR_EACH * torch.Size(shape).numel() * dtype.itemsize
        if chosen and room < 0:
            break
        chosen.append((shape, dtype))
    return chosen


def free_bytes(device: torch.device) -> float:
    if device.type != "cuda":
        import psutil

        return float(psutil.virtual_memory().available)
    return float(torch.cuda.mem_get_info(device)[0])
