"""The only file of execute that touches private names of torch; all of them are in 2.11 and in 2.13."""

from __future__ import annotations

import contextlib
import os
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode

__all__ = [
    "has_hooks",
    "is_at",
    "let_segments_grow",
    "others_hold_saved_tensors",
    "version_of",
    "within_backward",
    "within_transform",
    "without_hooks",
]

_WITHIN = "tierwise.within_backward"
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def let_segments_grow() -> None:
    """Ask torch's allocator for segments that grow: with ordinary ones a plan that fits in bytes may not fit between the holes. What the user has
    said in the environment stands, this included."""
    said = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    ask = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if ask is None or sys.platform == "win32" or "expandable_segments" in said or "backend" in said:
        return
    with contextlib.suppress(RuntimeError, ValueError):  # a platform without them
        ask(",".join(filter(None, (said, "expandable_segments:True"))))


def version_of(tensor: torch.Tensor) -> int | None:
    """How often autograd saw the storage written to; None where it does not look."""
    return None if tensor.is_inference() else tensor._version


def is_at(tensor: torch.Tensor, version: int | None) -> bool:
    """Whether nobody has written to it since it was at that version; where autograd does not look that is not known."""
    return version is not None and version == version_of(tensor)


def has_hooks(module: torch.nn.Module) -> bool:
    """Whether calls of the module call something else too."""
    return any(getattr(module, name) for name in _HOOKS)


@contextlib.contextmanager
def without_hooks(model: torch.nn.Module) -> Iterator[None]:
    """The modules without the user's hooks, which are not to be called when a step is only looked at. Those of torch itself compute weights."""
    found = [(module, name, getattr(module, name)) for module in model.modules() for name in _HOOKS if getattr(module, name)]
    for module, name, hooks in found:
        setattr(module, name, OrderedDict((key, hook) for key, hook in hooks.items() if _is_of_torch(hook)))
    try:
        yield
    finally:
        for module, name, hooks in found:
            setattr(module, name, hooks)


def _is_of_torch(hook: Any) -> bool:
    home = getattr(hook, "__module__", None) or type(hook).__module__
    return str(home).split(".")[0] == "torch"


def others_hold_saved_tensors(ours: Any = None) -> bool:
    """Whether somebody else has hooks on saved tensors here: torch.utils.checkpoint, save_on_cpu. `ours` is the hook we put there ourselves."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks is not None and (ours is None or hooks[0] != ours)


def within_transform() -> bool:
    """Whether torch.func is at work here, with tensors that have no storage."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def within_backward(outputs: Iterable[torch.Tensor], mode: Callable[[], TorchDispatchMode | None]) -> None:
    """Run every node of the backward of these tensors within a mode, if there is one by then.

    The mode is pushed by a hook before a node and popped by one behind it. Where the node fails, the engine puts back the modes that
    were there before it.
    """
    waiting: list[Any] = [tensor.grad_fn for tensor in outputs]
    while waiting:
        node = waiting.pop()
        metadata: Any = None if node is None else node.metadata  # a dict, whatever torch's own types say
        if node is None or metadata.get(_WITHIN) is mode:  # nodes that add to a gradient may serve one graph after the other
            continue
        metadata[_WITHIN] = mode
        waiting += [source for source, _ in node.next_functions]
        _run_within(node, mode)


def _run_within(node: Any, mode: Callable[[], TorchDispatchMode | None]) -> None:
    pushed: list[bool] = []

    def before(gradients: Any) -> None:
        found = mode()
        pushed.append(found is not None)
        if found is not None:
            _push_mode(found)

    def behind(inputs: Any, gradients: Any) -> None:
        if pushed.pop():
            _pop_mode(None)

    node.register_prehook(before)
    node.register_hook(behind)
