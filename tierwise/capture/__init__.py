"""A module and a batch become a Graph, on fake tensors: no GPU, no memory. Torch is loaded on first use.

tierwise.capture(model, batch)         the public function; this folder has its name, and answers when it is called

capture(model, batch)                  the graph of one eager training step
capture_step(model, batch)             the same, with the notes that were taken
capture_joints(model, batch, graph)    the joint forward and backward graph of each of its region classes
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .fakes import on_fake_tensors
    from .joint import Joint, Joints, RegionExample, capture_joints, region_examples
    from .step import Capture, capture, capture_step

__all__ = ["Capture", "Joint", "Joints", "RegionExample", "capture", "capture_joints", "capture_step", "on_fake_tensors", "region_examples"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import fakes, joint, step

    return next(getattr(module, name) for module in (step, joint, fakes) if hasattr(module, name))


class _Callable(ModuleType):
    """Python binds a submodule to its package whenever anybody imports it, so `tierwise.capture` is this folder as soon as one file of it is used."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self.capture(*args, **options)


sys.modules[__name__].__class__ = _Callable
