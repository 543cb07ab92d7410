"""What a plan depends on: calls with equal keys run by one plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from ..execute.states.gradients import Gradient
from ..execute.torch_compat import has_hooks


def key_of(modules: Sequence[nn.Module], parameters: Sequence[nn.Parameter], kind: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Shapes, types and plain values of a call; autocast; who trains, who is in training mode, who has hooks; whether there are gradients already."""
    leaves, shape = tree_flatten((args, dict(kwargs)))
    return (
        tuple(map(_leaf_key, leaves)),
        str(shape),
        torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None,
        tuple(module.training for module in modules),
        tuple(parameter.requires_grad for parameter in parameters),
        tuple(place for place, module in enumerate(modules) if has_hooks(module)),
        has_gradients(parameters),
    )


def has_gradients(parameters: Sequence[nn.Parameter]) -> bool:
    """Gradients on the device that backward will add to: they take memory through the whole step."""
    return any(parameter.grad is not None and not isinstance(parameter.grad, Gradient) for parameter in parameters if parameter.requires_grad)


def needs_backward(parameters: Sequence[nn.Parameter], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    leaves, _ = tree_flatten((args, dict(kwargs)))
    given = any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves)
    return given or any(parameter.requires_grad for parameter in parameters)


def _leaf_key(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.requires_grad
    return leaf if isinstance(leaf, (bool, int, float, str, type(None))) else type(leaf).__name__
