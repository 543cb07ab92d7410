"""The loss of a Hugging Face model as a module, so that it is a region like any other: in eager it alone takes 13 bytes for each logit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

_NAME = "_loss_function"  # where transformers keeps a loss that was set, and where a module set is found as a submodule


class LossRegion(nn.Module):
    """A loss function with a place among the submodules; it has no parameters, so nothing of it shows in a state_dict."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def adopt_losses(model: nn.Module) -> list[nn.Module]:
    """Make the losses of the model's parts regions; returns the parts."""
    found: list[nn.Module] = []
    for part in list(model.modules()):
        if isinstance(getattr(type(part), "loss_function", None), property) and not hasattr(part, _NAME):
            try:
                function = part.loss_function
            except Exception:  # a model without a loss says so in ways of its own
                continue
            if callable(function):
                part._loss_function = LossRegion(function)  # the property itself refuses modules
                found.append(part)
    return found


def give_back_losses(parts: list[nn.Module]) -> None:
    for part in parts:
        if isinstance(getattr(part, _NAME, None), LossRegion):
            delattr(part, _NAME)
