"""When regions run: hooks on the modules that tell lasting state to be there in time, in forward and in backward.

A region's backward begins when the gradient of something it returned is there, and is over when the gradients of all it was given and of all its
parameters are. A parameter that backward saved is asked for by autograd itself: whatever the order, it is brought back first.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from ..torch_compat import others_hold_saved_tensors
from .torch_compat import backward_number, in_backward


class Listener(Protocol):
    def before_pass(self) -> None: ...

    def after_pass(self) -> None: ...

    def before_region_forward(self, path: str) -> None: ...

    def after_region_forward(self, path: str) -> None: ...

    def before_region_backward(self, path: str) -> None: ...

    def inputs_done(self, path: str) -> None: ...

    def pack(self, tensor: torch.Tensor) -> Any: ...

    def unpack(self, packed: Any) -> torch.Tensor: ...


class Driver:
    """Hooks on the model and on its regions."""

    def __init__(self, model: nn.Module, regions: Mapping[str, nn.Module], listener: Listener) -> None:
        self._listener = listener
        self._entered: list[tuple[nn.Module, saved_tensors_hooks]] = []
        self._removers: list[Callable[[], None]] = []
        self._hook(model, self._before_pass, self._after_pass)
        for path, module in regions.items():
            self._hook(module, self._before(path), self._after(path))

    def close(self) -> None:
        for remove in self._removers:
            remove()
        self._removers.clear()

    def _hook(self, module: nn.Module, before: Callable[..., None], after: Callable[..., None]) -> None:
        self._removers.append(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True).remove)
        self._removers.append(module.register_forward_hook(after, with_kwargs=True, always_call=True).remove)

    def _before_pass(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._listener.before_pass()

    def _after_pass(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self._listener.after_pass()

    def _before(self, path: str) -> Callable[..., None]:
        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._listener.before_region_forward(path)
            # Hooks within those of torch.utils.checkpoint would keep all that it lets go; who checkpoints brings parameters by running again.
            if torch.is_grad_enabled() and not others_hold_saved_tensors(ours=self._listener.pack):
                hooks = saved_tensors_hooks(self._listener.pack, self._listener.unpack)
                hooks.__enter__()
                self._entered.append((module, hooks))

        return before

    def _after(self, path: str) -> Callable[..., None]:
        def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if self._entered and self._entered[-1][0] is module:
                self._entered.pop()[1].__exit__(None, None, None)
            if torch.is_grad_enabled():
                watch(self._listener, path, (args, kwargs), output)
            self._listener.after_region_forward(path)

        return after


def watch(listener: Listener, path: str, inputs: Any, output: Any) -> None:
    """Have a region's backward announced: its beginning by the gradient of what it returned, its end by those of what it was given.

    Hooks hold no node of the graph they are in, and nobody who holds the model: torch's own hook for several tensors does, and is never let go.
    """
    mine = weakref.ref(listener)
    for tensor in _with_gradients(output) if not in_backward() else ():
        tensor.register_hook(partial(_begins, mine, path))
    given = _with_gradients(inputs)
    arrived: dict[int, int] = {}  # by backward
    for tensor in given:
        tensor.register_hook(partial(_arrives, mine, path, arrived, len(given)))


def _begins(listener: weakref.ref[Listener], path: str, gradient: torch.Tensor) -> None:
    if (found := listener()) is not None:
        found.before_region_backward(path)


def _arrives(listener: weakref.ref[Listener], path: str, arrived: dict[int, int], all_of_them: int, gradient: torch.Tensor) -> None:
    number = backward_number()
    arrived[number] = arrived.get(number, 0) + 1
    if arrived[number] == all_of_them and (found := listener()) is not None:
        del arrived[number]
        found.inputs_done(path)


def _with_gradients(value: Any) -> list[torch.Tensor]:
    found = {id(leaf): leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor) and leaf.requires_grad}
    return list(found.values())
