"""Models that went, or will go, through Accelerator.prepare, in one process. Nothing of accelerate is imported before a model needs it.

    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    tierwise.fit(model, optimizer, budget="20GiB")          # or before prepare; with mixed precision, too

With mixed precision, prepare puts a forward in the place of the model's own that turns autocast on and its results into fp32. The plan's
forward belongs within that, so that it sees autocast as regions will.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from ..fitting.wrapped import Aside


def mixed_precision_set_aside(model: nn.Module, aside: Aside) -> None:
    """Take prepare's forward away, to be put around the plan's once the model is fitted."""
    before: dict[str, Any] = {name: model.__dict__.pop(name) for name in ("forward", "_original_forward") if name in model.__dict__}
    aside.take(lambda: model.__dict__.update(before), after=lambda: _wrap(model))


def _wrap(model: Any) -> None:
    """As Accelerator.prepare_model does it for a forward that is no method."""
    from accelerate.utils import convert_outputs_to_fp32, get_mixed_precision_context_manager

    within = model.forward
    model._original_forward = within
    model.forward = convert_outputs_to_fp32(get_mixed_precision_context_manager(native_amp=True)(within))
