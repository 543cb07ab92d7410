"""The only file of fitting that touches private names of torch; all of them are in 2.11 and in 2.13."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

__all__ = ["compiled_call", "is_compiled", "load_compiler", "original", "set_compiled_call", "set_forward"]


def load_compiler() -> None:
    """Load Dynamo now rather than when something is first compiled."""
    import torch._dynamo  # noqa: F401


def is_compiled(module: nn.Module) -> bool:
    """Whether this is what torch.compile(module) returned. Where Dynamo was never loaded, nothing is."""
    loaded = sys.modules.get("torch._dynamo.eval_frame")
    return loaded is not None and isinstance(module, loaded.OptimizedModule)


def original(module: Any) -> nn.Module:
    """What was given to torch.compile."""
    found: nn.Module = module._orig_mod
    return found


def compiled_call(module: Any) -> Any:
    """What module.compile() left in the place of its call, or None."""
    return module._compiled_call_impl


def set_compiled_call(module: Any, call: Any) -> None:
    module._compiled_call_impl = call


def set_forward(module: Any, forward: Any) -> Any:
    """Returns what was there."""
    before = module.__dict__["forward"]
    module.__dict__["forward"] = forward
    return before
