"""Who calls whom: every call of a submodule in the traced step, as a tree, with the storages that went in and came out."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from .storages import StorageTable

ROOT = 0
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_DEPTH_LIMIT = 4  # how deep tensors are looked for in objects that are passed around (caches, output classes)


@dataclass(slots=True)
class ModuleCall:
    """One call of one submodule."""

    id: int
    parent: int
    module: str  # its path in the model: "layers.3.mlp"
    kind: str
    inputs: set[int] = field(default_factory=set)  # blocks (storages.py)
    outputs: set[int] = field(default_factory=set)
    signature: tuple[Any, ...] = ()  # of the module and of what it was called with: calls of equal blocks have equal ones
    sibling_key: tuple[Any, ...] = ()  # blocks of one list are siblings if they are of one class, other submodules if their parameters are equal too
    is_container: bool = False
    has_children: bool = False
    stands_for: int | None = None  # a call made again in backward (checkpointing) belongs to the call whose node asked for it


class CallTree:
    """The calls so far, and which of them is running."""

    def __init__(self, model: nn.Module, storages: StorageTable) -> None:
        self._names = {id(module): name for name, module in model.named_modules()}
        self._lists = {name for name, module in model.named_modules() if isinstance(module, _CONTAINERS)}
        self._storages = storages
        self._module_signatures: dict[int, tuple[Any, ...]] = {}
        self.calls = [ModuleCall(ROOT, -1, "", type(model).__name__)]
        self.stack = [ROOT]
        self.standing_for: int | None = None  # while backward runs: the call whose node is running

    @property
    def current(self) -> int:
        return self.stack[-1]

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """See every call of a submodule: hooks would do, but a model may have its own, in an order of its own."""
        original = nn.Module.__call__
        tree = self

        def watched(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            name = tree._names.get(id(module))
            if not name:
                return original(module, *args, **kwargs)
            call = tree._enter(module, name, args, kwargs)
            try:
                out = original(module, *args, **kwargs)
                call.outputs.update(tree._blocks_of(out))
                return out
            finally:
                tree.stack.pop()

        nn.Module.__call__ = watched  # type: ignore[method-assign]
        try:
            yield
        finally:
            nn.Module.__call__ = original  # type: ignore[method-assign]

    def _enter(self, module: nn.Module, name: str, args: Any, kwargs: Any) -> ModuleCall:
        call = ModuleCall(len(self.calls), self.current, name, type(module).__name__)
        tensors = list(_tensors_of((args, kwargs)))
        call.inputs = {block for block in map(self._storages.find, tensors) if block is not None}
        if id(module) not in self._module_signatures:
            self._module_signatures[id(module)] = _module_signature(module)
        signature = self._module_signatures[id(module)]
        parent = name.rpartition(".")[0]
        call.sibling_key = (parent, type(module)) if parent in self._lists else (parent, *signature)
        call.signature = (*signature, *_given(tensors))
        call.is_container = isinstance(module, _CONTAINERS)
        call.has_children = bool(module._modules)
        if self.current == ROOT:
            call.stands_for = self.standing_for
        self.calls.append(call)
        self.stack.append(call.id)
        return call

    def _blocks_of(self, value: Any) -> set[int]:
        return {block for block in map(self._storages.find, _tensors_of(value)) if block is not None}


def _module_signature(module: nn.Module) -> tuple[Any, ...]:
    tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return (type(module), module.training, tuple((name, tensor.shape, tensor.dtype, tensor.requires_grad) for name, tensor in tensors))


def _given(tensors: list[torch.Tensor]) -> tuple[Any, ...]:
    """What a call is given. One tensor passed twice is one input of its graph, and a parameter is no activation."""
    first: dict[int, int] = {}
    return tuple(
        (tensor.shape, tensor.dtype, tensor.requires_grad, isinstance(tensor, nn.Parameter), first.setdefault(id(tensor), place))
        for place, tensor in enumerate(tensors)
    )


def _tensors_of(value: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif depth >= _DEPTH_LIMIT or isinstance(value, (str, bytes, int, float, bool, type(None), nn.Module)):
        return
    elif isinstance(value, dict):
        for part in value.values():
            yield from _tensors_of(part, depth + 1)
    elif isinstance(value, (tuple, list, set)):
        for part in value:
            yield from _tensors_of(part, depth + 1)
    elif hasattr(value, "__dict__"):
        yield from _tensors_of(vars(value), depth + 1)
