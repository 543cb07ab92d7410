"""torch.autocast as it is on CUDA, on CPU tensors.

The CPU has lists of its own: it keeps softmax, norms and exponentials in bf16 where CUDA computes them in fp32. What both cast down (matmuls,
convolutions, attention) is left to torch's own kernels, with their cache of cast weights; what only CUDA casts gets a kernel here. The lists are
those of torch 2.13 (ATen/autocast_mode.h); of each, what the torch that runs has on CUDA's list counts (RMS norm is there since 2.12).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .torch_compat import autocast_for_cuda_runs_on_cpu, has_kernel, overriding, without_autocast

# Those the CPU's own list lacks.
_TO_LOW_PRECISION = ("addmv", "addr", "mv", "chain_matmul", "linalg_multi_dot", "einsum", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell")
_RECURRENT = "_cudnn_rnn"  # cast down too, but only CUDA builds of torch have it on a list
_TO_FP32 = (
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "sinh", "tan", "pow.Tensor_Scalar",
    "pow.Tensor_Tensor", "pow.Scalar", "softplus", "layer_norm", "native_layer_norm", "rms_norm", "group_norm", "frobenius_norm.dim", "nuclear_norm",
    "nuclear_norm.dim", "cosine_similarity", "dist", "pdist", "renorm", "logsumexp", "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d",
    "_upsample_nearest_exact1d", "_upsample_nearest_exact2d", "_upsample_nearest_exact3d", "upsample_linear1d", "upsample_bilinear2d",
    "_upsample_bilinear2d_aa", "upsample_trilinear3d", "upsample_bicubic2d", "_upsample_bicubic2d_aa",
)  # fmt: skip
_WITH_FP32_RESULT = ("softmax.int", "log_softmax.int", "cumprod", "cumsum", "sum", "sum.dim_IntList", "linalg_vector_norm", "linalg_matrix_norm")
_TO_WIDEST = ("addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler", "index_put", "tensordot", "scatter_add")
# The CPU casts them up; CUDA leaves them as they are.
_LEFT_ALONE = (
    "cross_entropy_loss", "avg_pool3d", "max_pool3d", "adaptive_avg_pool3d", "adaptive_max_pool3d", "fractional_max_pool2d", "fractional_max_pool3d",
    "replication_pad1d", "replication_pad2d", "replication_pad3d", "reflection_pad1d", "reflection_pad2d", "grid_sampler_2d", "grid_sampler_3d",
    "polar", "view_as_complex", "stft", "fft_fft", "fft_ifft", "fft_fft2", "fft_ifft2", "fft_rfft", "fft_irfft", "fft_rfft2", "fft_irfft2",
)  # fmt: skip


def cuda_autocast(dtype: torch.dtype | None) -> contextlib.AbstractContextManager[object]:
    """Autocast to `dtype`, or nothing; contexts that the model itself opens, for cuda or for the cpu, act in either case."""
    return contextlib.nullcontext() if dtype is None else torch.autocast("cuda", dtype=dtype)


@contextlib.contextmanager
def cuda_autocast_lists() -> Iterator[None]:
    """While the context lasts, autocast on CPU tensors follows CUDA's lists, and a context for cuda acts on CPU tensors."""
    kernels = {name: _kernel(name, _low_precision) for name in _TO_LOW_PRECISION}
    kernels |= {name: _kernel(name, _fp32) for name in _TO_FP32}
    kernels |= {name: _fp32_result(name) for name in _WITH_FP32_RESULT}
    kernels |= {name: _kernel(name, _widest) for name in _TO_WIDEST}
    kernels = {name: kernel for name, kernel in kernels.items() if has_kernel(name, "AutocastCUDA")}
    kernels[_RECURRENT] = _kernel(_RECURRENT, _low_precision)
    kernels |= dict.fromkeys(_LEFT_ALONE, torch.library.fallthrough_kernel)
    with overriding(kernels, "AutocastCPU"), autocast_for_cuda_runs_on_cpu():
        yield


def _overload(name: str) -> Any:
    base, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, base), overload or "default")


def _kernel(name: str, cast: Callable[[Any], Callable[[torch.Tensor], torch.Tensor]]) -> Callable[..., Any]:
    overload = _overload(name)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        change = cast(args)
        with without_autocast():
            return overload(*_mapped(args, change), **{key: _mapped(value, change) for key, value in kwargs.items()})

    return kernel


def _fp32_result(name: str) -> Callable[..., Any]:
    overload = _overload(name)
    place = [argument.name for argument in overload._schema.arguments].index("dtype")

    def kernel(*args: Any, **kwargs: Any) -> Any:
        asked = args[place] if place < len(args) else kwargs.get("dtype")
        with without_autocast():
            if asked is None and _is_eligible(args[0]):
                return overload(*args[:place], **{**kwargs, "dtype": torch.float32})
            return overload(*args, **kwargs)

    return kernel


def _is_eligible(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype is not torch.float64


def _low_precision(_: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    dtype = torch.get_autocast_dtype("cpu")
    return lambda tensor: tensor.to(dtype) if _is_eligible(tensor) else tensor


def _fp32(_: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: tensor.to(torch.float32) if _is_eligible(tensor) else tensor


def _widest(args: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    found = [tensor.dtype for tensor in _tensors(args) if _is_eligible(tensor)]
    dtype = torch.float32 if torch.float32 in found else torch.get_autocast_dtype("cpu")
    return lambda tensor: tensor.to(dtype) if _is_eligible(tensor) else tensor


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _tensors(part)


def _mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, (tuple, list)):
        return type(value)(_mapped(part, change) for part in value)
    return value
