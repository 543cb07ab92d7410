"""Draw random numbers so that they can be drawn again: functions that stand in a graph around a random op."""

from __future__ import annotations

from typing import Any

import torch


def read_state(device: torch.device) -> torch.Tensor:
    """The state of the device's generator, as a small tensor on the host."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def set_state(state: torch.Tensor, device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


def draw(state: torch.Tensor, device: torch.device, op: Any, *args: Any, **kwargs: Any) -> Any:
    """In forward: the op as it is. `state`, read just before it, is an argument so that whoever repeats the op has it."""
    return op(*args, **kwargs)


def draw_again(state: torch.Tensor, device: torch.device, op: Any, *args: Any, **kwargs: Any) -> Any:
    """In backward: the same numbers, and the generator left as it was found."""
    now = read_state(device)
    set_state(state, device)
    try:
        return op(*args, **kwargs)
    finally:
        set_state(now, device)
