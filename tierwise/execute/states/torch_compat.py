"""The private names of torch that lasting state needs, in one place; the same in torch 2.11 to 2.13."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

without_torch_function = torch._C.DisableTorchFunctionSubclass
no_torch_function = torch._C._disabled_torch_function_impl


def in_backward() -> bool:
    """Whether this thread runs inside autograd's backward."""
    return int(torch._C._current_graph_task_id()) != -1


def backward_number() -> int:
    return int(torch._C._current_graph_task_id())


def after_backward(call: Callable[[], None]) -> None:
    """Have something called when the backward that runs now is over."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def without_bytes(cls: Any, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device) -> Any:
    """A tensor of a class with __torch_dispatch__ that has a shape and no memory."""
    return torch.Tensor._make_wrapper_subclass(cls, size, strides=stride, dtype=dtype, device=device, storage_size=0)


def with_step_hooks(step: Callable[..., Any]) -> Callable[..., Any]:
    """A step method that calls the optimizer's hooks around it, as torch's own do."""
    return torch.optim.Optimizer.profile_hook_step(step)


def run_hooks(optimizer: torch.optim.Optimizer, kind: str, *args: Any) -> Any:
    """Hooks of the kind "state_dict_pre", "state_dict_post", "load_state_dict_pre" or "load_state_dict_post"; the last result that is one."""
    result = None
    for hook in getattr(optimizer, f"_optimizer_{kind}_hooks", {}).values():
        found = hook(optimizer, *args)
        if found is not None:
            result = found
            args = (found, *args[1:])
    return result
