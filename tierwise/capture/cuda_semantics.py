"""Where eager PyTorch does something else on CUDA than on the CPU, the trace does what CUDA does.

Composite ops that choose their parts by device are overridden in torch's dispatcher while the trace runs, so calls from Python and from C++ are both
seen: attention (attention.py), dropout (a mask of one byte an element), RMS norm and recurrent layers (one fused op each), softmax from fp16 to fp32
(no separate cast). Ops whose outputs differ get their outputs from `RULES`: the statistics of layer and batch norm are fp32.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .attention import scaled_dot_product_attention
from .torch_compat import default_composite, overriding

_aten = torch.ops.aten
_RNN_MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}
_REAL = (torch.Tensor, torch.nn.Parameter)
_GATES = (1, 1, 4, 3)  # by mode

ESTIMATED_RESERVE_NOTE = (
    "cuDNN does not publish the size of what a recurrent layer saves for backward; it is estimated as its gates and two states per step"
)


@contextlib.contextmanager
def cuda_semantics() -> Iterator[None]:
    with overriding(_OVERRIDES, "AutogradCPU"):
        yield


# -- overrides of composite ops ---------------------------------------------------------------------------------------------------


def _only_fake(overload: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Real tensors, of another thread say, keep their own semantics while a trace runs. A trace's own are fake, maybe wrapped once more by torch."""

    def decorate(kernel: Callable[..., Any]) -> Callable[..., Any]:
        def chosen(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if type(tensor) in _REAL:
                return default_composite(overload, tensor, *args, **kwargs)
            return kernel(tensor, *args, **kwargs)

        return chosen

    return decorate


@_only_fake(_aten.dropout.default)
def _dropout(tensor: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    if train and 0 < p < 1 and tensor.numel():
        out: torch.Tensor = _aten.native_dropout.default(tensor, p, True)[0]
        return out
    out = default_composite(_aten.dropout.default, tensor, p, train)
    return out


def _softmax_like(composite: Any, fused: Any) -> Callable[..., Any]:
    @_only_fake(composite)
    def kernel(tensor: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> Any:
        if tensor.dtype is torch.float16 and dtype is torch.float32:
            return fused(tensor, dim, True)
        return default_composite(composite, tensor, dim, dtype)

    return kernel


@_only_fake(_aten.rms_norm.default)
def _rms_norm(tensor: torch.Tensor, normalized_shape: list[int], weight: torch.Tensor | None = None, eps: float | None = None) -> torch.Tensor:
    is_channels_last = not tensor.is_contiguous() and (
        (tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last))
        or (tensor.dim() == 5 and tensor.is_contiguous(memory_format=torch.channels_last_3d))
    )
    if is_channels_last or tensor.is_complex() or (weight is not None and weight.dtype is not tensor.dtype):
        out: torch.Tensor = default_composite(_aten.rms_norm.default, tensor, normalized_shape, weight, eps)
        return out
    out = fused_rms_norm(tensor, list(normalized_shape), weight)[0]
    return out


def _rnn(name: str) -> Callable[..., Any]:
    mode = _RNN_MODES[name]
    is_lstm = name == "lstm"

    @_only_fake(getattr(_aten, name).input)
    def kernel(
        sequence: torch.Tensor,
        hx: Any,
        params: list[torch.Tensor],
        has_biases: bool,
        layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> Any:
        hidden, cell = (hx[0], hx[1]) if is_lstm else (hx, None)
        hidden_size = (hidden if cell is None else cell).shape[2]
        projected = hidden.shape[2] if hidden.shape[2] != hidden_size else 0
        per_layer = 2 + 2 * has_biases + (projected > 0)
        out = _aten._cudnn_rnn.default(
            sequence, params, per_layer, None, hidden, cell, mode, hidden_size, projected, layers, batch_first, dropout, train, bidirectional, [],
            None,
        )  # fmt: skip
        return (out[0], out[1], out[2]) if is_lstm else (out[0], out[1])

    return kernel


_OVERRIDES: dict[str, Callable[..., Any]] = {
    "scaled_dot_product_attention": _only_fake(_aten.scaled_dot_product_attention.default)(scaled_dot_product_attention),
    "dropout": _dropout,
    "softmax.int": _softmax_like(_aten.softmax.int, _aten._softmax.default),
    "log_softmax.int": _softmax_like(_aten.log_softmax.int, _aten._log_softmax.default),
    "rms_norm": _rms_norm,
} | {f"{name}.input": _rnn(name) for name in _RNN_MODES}


# -- the fused RMS norm of CUDA, which the CPU build has no shape rule for ---------------------------------------------------------


@torch.library.custom_op("tierwise::rms_norm", mutates_args=())
def fused_rms_norm(tensor: torch.Tensor, normalized_shape: list[int], weight: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    raise NotImplementedError("only traced, never run")


@torch.library.custom_op("tierwise::rms_norm_backward", mutates_args=())
def fused_rms_norm_backward(
    grad: torch.Tensor, tensor: torch.Tensor, normalized_shape: list[int], rstd: torch.Tensor, weight: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    raise NotImplementedError("only traced, never run")


@fused_rms_norm.register_fake
def _(tensor: torch.Tensor, normalized_shape: list[int], weight: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    rows = tensor.shape[: tensor.dim() - len(normalized_shape)]
    return torch.empty_like(tensor, memory_format=torch.contiguous_format), tensor.new_empty(
        (*rows, *[1] * len(normalized_shape)), dtype=torch.float32
    )


@fused_rms_norm_backward.register_fake
def _(
    grad: torch.Tensor, tensor: torch.Tensor, normalized_shape: list[int], rstd: torch.Tensor, weight: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    weight_grad = tensor.new_empty(0) if weight is None else torch.empty_like(weight)
    return torch.empty_like(tensor, memory_format=torch.contiguous_format), weight_grad


def _save_rms_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    tensor, ctx.normalized_shape, weight = inputs
    ctx.save_for_backward(tensor, weight, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _rms_norm_backward(ctx: Any, grad: torch.Tensor, _: Any) -> tuple[torch.Tensor, None, torch.Tensor | None]:
    tensor, weight, rstd = ctx.saved_tensors
    grad_tensor, grad_weight = fused_rms_norm_backward(grad, tensor, ctx.normalized_shape, rstd, weight)
    return grad_tensor, None, None if weight is None else grad_weight


fused_rms_norm.register_autograd(_rms_norm_backward, setup_context=_save_rms_norm)


# -- outputs as CUDA makes them ---------------------------------------------------------------------------------------------------


def _fp32_statistics(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    out, *statistics = func(*args, **kwargs)
    return (out, *(torch.empty_like(values, dtype=torch.float32) for values in statistics))


def _cudnn_rnn(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    sequence, _, _, _, hidden, cell, mode, hidden_size, projected, layers, batch_first, _, train, bidirectional, *_ = args
    directions = 2 if bidirectional else 1
    steps, samples = (sequence.shape[1], sequence.shape[0]) if batch_first else sequence.shape[:2]
    out = sequence.new_empty(steps, samples, (projected or hidden_size) * directions)
    per_step = (_GATES[mode] + 2) * hidden_size * layers * directions
    reserve = torch.empty(steps * samples * per_step * sequence.element_size() if train else 0, dtype=torch.uint8)
    last_cell = sequence.new_empty(0) if cell is None else torch.empty_like(cell)
    return out.transpose(0, 1) if batch_first else out, torch.empty_like(hidden), last_cell, reserve, sequence.new_empty(0)


def _cudnn_rnn_backward(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    sequence, weights, _, _, hidden, cell = args[:6]
    flat = sequence.new_empty(sum(weight.numel() for weight in weights))  # cuDNN keeps the weights, and their gradients, in one block
    parts = flat.split([weight.numel() for weight in weights])
    grad_cell = sequence.new_empty(0) if cell is None else torch.empty_like(cell)
    grads = [part.view(weight.shape) for part, weight in zip(parts, weights, strict=True)]
    return torch.empty_like(sequence), torch.empty_like(hidden), grad_cell, grads


def _grouped_mm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Matmuls of a mixture of experts; torch's own shape rule takes only bf16, its kernels take every type."""
    left, right = args[:2]
    groups = (
        () if left.dim() != right.dim() else (right.shape[0],) if right.dim() == 3 else tuple((args[2] if len(args) > 2 else kwargs["offs"]).shape)
    )
    dtype = args[4] if len(args) > 4 else kwargs.get("out_dtype")
    return left.new_empty(*groups, left.shape[-2], right.shape[-1], dtype=dtype or left.dtype)


RULES: dict[Any, Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]] = {
    _aten.native_layer_norm.default: _fp32_statistics,
    _aten.native_batch_norm.default: _fp32_statistics,
    _aten._cudnn_rnn.default: _cudnn_rnn,
    _aten._cudnn_rnn_backward.default: _cudnn_rnn_backward,
    _aten._grouped_mm.default: _grouped_mm,
}
