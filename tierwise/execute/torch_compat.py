"""The only file of execute that touches private names of torch; all of them are in 2.11 and in 2.13."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode

__all__ = ["has_hooks", "others_hold_saved_tensors", "within_backward"]


def has_hooks(module: torch.nn.Module) -> bool:
    """Whether calls of the module call something else too."""
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks)


def others_hold_saved_tensors() -> bool:
    """Whether somebody else has hooks on saved tensors here: torch.utils.checkpoint, save_on_cpu."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def within_backward(outputs: Iterable[torch.Tensor], mode: Callable[[], TorchDispatchMode]) -> None:
    """Run every node of the backward of these tensors within a mode.

    The mode is pushed by a hook before a node and popped by one behind it. Where the node fails, the engine puts back the modes that
    were there before it.
    """
    seen: set[Any] = set()
    waiting = [tensor.grad_fn for tensor in outputs]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [source for source, _ in node.next_functions]
        node.register_prehook(lambda gradients: _push_mode(mode()))
        node.register_hook(lambda inputs, gradients: _leave())


def _leave() -> None:
    _pop_mode(None)
