"""How an op of a captured step was called, so that it can be called again by itself: the op, and the shape, stride and type of each tensor.

Two calls with equal recipes cost the same, so each is timed once (profile/ops.py). A recipe's text is its key in the cache on disk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class TensorSpec:
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int

    def __repr__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}/{list(self.stride)}"


@dataclass(frozen=True, slots=True)
class Recipe:
    op: Any  # the overload, such as aten.mm.default
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]

    @property
    def key(self) -> str:
        return f"{self.op}({', '.join([*map(repr, self.args), *(f'{name}={value!r}' for name, value in self.kwargs)])})"

    def prepare(self, device: torch.device) -> Callable[[], Any]:
        """Real tensors of these shapes on a device, and the call on them; run under no_grad, once or many times."""
        op, args = _runnable(self.op, tuple(_thaw(value, device) for value in self.args))
        kwargs = {name: _thaw(value, device) for name, value in self.kwargs}
        return lambda: op(*args, **kwargs)

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in _specs((self.args, tuple(value for _, value in self.kwargs))))


def _runnable(op: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """What CUDA runs for an op: the fused kernel it stands for while tracing (cuda_semantics.py), and cuDNN's batch norm."""
    aten = torch.ops.aten
    match str(op):
        case "tierwise.rms_norm.default":
            return aten._fused_rms_norm.default, (*args, None)
        case "tierwise.rms_norm_backward.default":
            return aten._fused_rms_norm_backward.default, (*args, [True, args[-1] is not None])
        case "aten.native_batch_norm.default" if args[1] is not None:
            return aten.cudnn_batch_norm.default, args
        case "aten.native_batch_norm_backward.default" if args[2] is not None:
            grad, tensor, weight, mean, variance, *_, training, epsilon, _ = args
            _, saved_mean, saved_variance, reserve = aten.cudnn_batch_norm.default(tensor, weight, weight, mean, variance, training, 0.1, epsilon)
            return aten.cudnn_batch_norm_backward.default, (tensor, grad, weight, mean, variance, saved_mean, saved_variance, epsilon, reserve)
    return op, args


def recipe_of(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Recipe:
    return Recipe(op, tuple(_freeze(value) for value in args), tuple((name, _freeze(value)) for name, value in sorted(kwargs.items())))


def _freeze(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return TensorSpec(tuple(value.shape), tuple(value.stride()), value.dtype, value.numel() * value.element_size())
    if isinstance(value, (list, tuple)):
        return tuple(_freeze(part) for part in value)
    return value


def _thaw(value: Any, device: torch.device) -> Any:
    if isinstance(value, TensorSpec):
        return _tensor(value, device)
    if isinstance(value, torch.device):
        return device
    if isinstance(value, tuple):
        return [_thaw(part, device) for part in value]
    return value


def _tensor(spec: TensorSpec, device: torch.device) -> torch.Tensor:
    """Random numbers, because zeros run faster than data ever does; indices and masks that are valid whatever they index."""
    once = tuple(1 if stride == 0 else size for size, stride in zip(spec.shape, spec.stride, strict=True))  # expanded: one in memory
    made = torch.empty_strided(once, spec.stride, dtype=spec.dtype, device=device)
    if spec.dtype.is_floating_point and spec.dtype.itemsize >= 2:
        made.normal_()
    else:
        made.fill_(spec.dtype is torch.bool)
    return made.expand(spec.shape)


def _specs(value: Any) -> list[TensorSpec]:
    if isinstance(value, TensorSpec):
        return [value]
    return [spec for part in value for spec in _specs(part)] if isinstance(value, tuple) else []
