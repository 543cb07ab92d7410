"""The only file of the zoo that touches private torch names, each behind a guard: they differ between versions."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor

READS_VALUES: tuple[type[Exception], ...] = (DataDependentOutputException, DynamicOutputShapeException)
"""What a fake tensor raises when a program asks for a value it does not have."""


@contextlib.contextmanager
def models_built_on_fake_tensors() -> Iterator[None]:
    """Lets code that was written for real tensors build its model on fake ones; real tensors are treated as ever.

    nn.init.trunc_normal_ in torch 2.13 draws again until all values lie within the bounds, which a tensor without values can never show.
    module.to(dtype) swaps fake parameters, and refuses those that the fake mode has a weak reference to, which is most of them.
    """
    with _replaced(torch.nn.init, "_no_grad_trunc_normal_", _drawn_only_if_real), _replaced(torch.utils, "swap_tensors", _swapped_even_if_fake):
        yield


def _drawn_only_if_real(original: Callable[..., Any], tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    return tensor if isinstance(tensor, FakeTensor) else original(tensor, *args, **kwargs)


def _swapped_even_if_fake(original: Callable[..., Any], first: Tensor, second: Tensor) -> Any:
    for tensor in (first, second):
        if isinstance(tensor, FakeTensor):
            _forget(tensor)
    return original(first, second)


def _forget(tensor: FakeTensor) -> None:
    """Out of the fake mode's memory of what it has converted: a tensor born fake is never asked for there again."""
    memory = tensor.fake_mode.fake_tensor_converter.meta_converter.tensor_memo
    for reference in weakref.getweakrefs(tensor):
        if isinstance(reference, weakref.KeyedRef) and memory.get(reference.key) is tensor:
            del memory[reference.key]


@contextlib.contextmanager
def _replaced(owner: Any, name: str, replacement: Callable[..., Any]) -> Iterator[None]:
    original = getattr(owner, name, None)
    if original is None:
        yield
        return
    setattr(owner, name, lambda *args, **kwargs: replacement(original, *args, **kwargs))
    try:
        yield
    finally:
        setattr(owner, name, original)
