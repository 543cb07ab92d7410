"""The only file of the zoo that touches private torch names, each behind a guard: they differ between versions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor

READS_VALUES: tuple[type[Exception], ...] = (DataDependentOutputException, DynamicOutputShapeException)
"""What a fake tensor raises when a program asks for a value it does not have."""


@contextlib.contextmanager
def truncated_normal_without_values() -> Iterator[None]:
    """Lets models that initialise with nn.init.trunc_normal_ be built on fake tensors.

    In torch 2.13 it draws again until all values lie within the bounds, which a tensor without values can never show. Fake tensors are
    left as they are; real ones are drawn as ever.
    """
    name = "_no_grad_trunc_normal_"
    original: Callable[..., Any] | None = getattr(torch.nn.init, name, None)
    if original is None:
        yield
        return

    def draw(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return tensor if isinstance(tensor, FakeTensor) else original(tensor, *args, **kwargs)

    setattr(torch.nn.init, name, draw)
    try:
        yield
    finally:
        setattr(torch.nn.init, name, original)
