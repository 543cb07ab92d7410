"""Parameters that must not be read yet: their bytes are elsewhere, or an update of them is under way.

A guarded parameter is its old self but for its class, which asks before anything that touches its bytes: then the update is waited for, the bytes
are brought, the class is put back, and the operation goes on as if nothing had been. Shapes, types, gradients and hooks can be asked for
without that. Reading a parameter without bytes would end the process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from .torch_compat import without_torch_function

HARMLESS = {  # what asks for nothing but a shape, a type or a gradient
    "shape", "dtype", "device", "layout", "ndim", "is_leaf", "grad_fn", "grad", "_grad", "requires_grad", "retains_grad", "names", "_version",
    "output_nr", "is_cuda", "is_cpu", "is_sparse", "is_sparse_csr", "is_quantized", "is_meta", "is_mkldnn", "is_nested", "is_mps", "is_xpu", "is_xla",
    "itemsize", "nbytes", "_backward_hooks", "_post_accumulate_grad_hooks", "grad_dtype", "is_hpu",
    "size", "dim", "numel", "nelement", "stride", "element_size", "storage_offset", "is_floating_point", "is_complex", "is_contiguous",
    "is_signed", "is_inference", "get_device", "ndimension", "__len__", "__hash__", "_is_view", "_is_zerotensor", "is_conj", "is_neg",
    "has_names", "register_hook", "register_post_accumulate_grad_hook", "requires_grad_", "retain_grad", "is_same_size",
}  # fmt: skip


Ask = Callable[[nn.Parameter], torch.Tensor | None]
"""Called with a parameter before it is touched. It makes the parameter readable and unguards it, or gives a tensor to be taken in its place."""


def guard(parameters: Iterable[nn.Parameter], ask: Ask) -> None:
    for parameter in parameters:
        parameter.__dict__["_tierwise_ask"] = ask
        kind = type(parameter)
        if not issubclass(kind, _Guarded):
            parameter.__class__ = _guarded(kind)


def unguard(parameters: Iterable[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.__dict__.pop("_tierwise_ask", None)
        kind = type(parameter)
        if issubclass(kind, _Guarded):
            parameter.__class__ = kind.__mro__[2]


def is_guarded(parameter: nn.Parameter) -> bool:
    return isinstance(parameter, _Guarded)


class _Guarded:
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _name(func) in HARMLESS:
            with without_torch_function():
                return func(*args, **kwargs)
        args, kwargs = tree_map(_asked, (args, kwargs))
        return func(*args, **kwargs)


def _asked(leaf: Any) -> Any:
    if not isinstance(leaf, _Guarded):
        return leaf
    ask = leaf.__dict__.get("_tierwise_ask")
    instead = None if ask is None else ask(leaf)
    if instead is not None:
        return instead
    unguard([leaf])  # type: ignore[list-item]
    return leaf


@cache
def _guarded(kind: type[nn.Parameter]) -> type[nn.Parameter]:
    return type(kind.__name__, (_Guarded, kind), {"__module__": kind.__module__, "__qualname__": kind.__qualname__})


def _name(func: Any) -> str:
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__"):
        attribute = getattr(getattr(func, "__self__", None), "__name__", "")
        return "" if name == "__set__" and attribute not in ("grad", "requires_grad", "_grad") else str(attribute)
    return str(name)
