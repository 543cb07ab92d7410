"""Torch's own arithmetic, wherever the tensors are: the user's optimizer class runs on pieces of parameters, or on whole ones.

Used without masters. Adam, AdamW and SGD work element by element, so a piece of a parameter, of its gradient and of its state gives the bits the
whole would have given (pieces begin at multiples of 256 elements, where vectorised loops begin too). Between processors the bits may differ,
as torch's do: an update on the CPU equals torch on the CPU, one on the device equals torch on the device.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...errors import BadInput

PIECEWISE = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
OURS = (
    "step",
    "state_dict",
    "load_state_dict",
    "zero_grad",
    "add_param_group",
    "_step_supports_amp_scaling",
)  # set on the instance by others and by us


def is_piecewise(optimizer: torch.optim.Optimizer) -> bool:
    return type(optimizer) in PIECEWISE


def state_names(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    """What the optimizer keeps for each element of a parameter."""
    groups = optimizer.param_groups
    if type(optimizer) is torch.optim.SGD:
        return ("momentum_buffer",) if any(group["momentum"] for group in groups) else ()
    if any(group["amsgrad"] for group in groups):
        return "exp_avg", "exp_avg_sq", "max_exp_avg_sq"
    return "exp_avg", "exp_avg_sq"


def device_of_step(group: Mapping[str, Any], device: torch.device) -> torch.device:
    """Where torch counts the steps of a parameter on this device."""
    return device if group.get("fused") or group.get("capturable") else torch.device("cpu")


def check_options(optimizer: torch.optim.Optimizer) -> None:
    for option in ("differentiable", "capturable"):
        if any(group.get(option) for group in optimizer.param_groups):
            raise BadInput(f"{option}=True needs state that stays where torch put it; make the optimizer with {option}=False to place its state")


def shadow_of(optimizer: torch.optim.Optimizer, groups: Sequence[Mapping[str, Any]], state: Any) -> torch.optim.Optimizer:
    """An optimizer of the same class and settings over other tensors, without the hooks and the schedulers of the original."""
    kind = type(optimizer)
    shadow = kind.__new__(kind)
    shadow.__dict__.update({name: value for name, value in optimizer.__dict__.items() if name not in OURS})
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        shadow.__dict__[name] = OrderedDict()
    shadow.param_groups = [dict(group) for group in groups]
    shadow.state = state
    return shadow


def update_pieces(
    optimizer: torch.optim.Optimizer,
    group: Mapping[str, Any],
    step: int,
    weights: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    states: Sequence[Sequence[torch.Tensor]],
) -> None:
    """The `step`-th update of some pieces, in place."""
    names = state_names(optimizer)
    pieces = [found.detach() for found in weights]
    kept: Any = defaultdict(dict)
    for piece, gradient, rows in zip(pieces, gradients, states, strict=True):
        piece.grad = gradient
        kept[piece] = dict(zip(names, rows, strict=True))
        if type(optimizer) is torch.optim.SGD:
            if step == 1 and names:
                kept[piece]["momentum_buffer"] = None  # torch starts with the gradient itself
        else:
            # Filled where it is: a number that comes from the host would make it wait for everything before it.
            kept[piece]["step"] = torch.full((), float(step - 1), device=device_of_step(group, piece.device))
            if "max_exp_avg_sq" in kept[piece] and not group["amsgrad"]:
                del kept[piece]["max_exp_avg_sq"]
    shadow = shadow_of(optimizer, [{**group, "params": pieces}], kept)
    shadow.step()
    for piece, rows in zip(pieces, states, strict=True):
        piece.grad = None
        for name, state in zip(names, rows, strict=True):
            made = shadow.state[piece].get(name)
            if made is not None and made is not state:
                state.copy_(made)
