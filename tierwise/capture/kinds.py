"""What an aten op is: its kind in plain words, its precision, its arithmetic, its scratch memory, and which of its tensors it really reads.

Flops are torch's own formulas for matmuls, convolutions and attention (half of it for causal attention, whose kernels skip the masked half), nothing
for what only moves bytes, and one per element for the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import torch

from .torch_compat import formula_flops

_KINDS = {
    "mm": "matmul", "addmm": "matmul", "bmm": "matmul", "baddbmm": "matmul", "addbmm": "matmul", "mv": "matmul", "addmv": "matmul", "dot": "matmul",
    "_grouped_mm": "matmul", "_scaled_mm": "matmul",
    "_scaled_dot_product_flash_attention": "attention", "_scaled_dot_product_flash_attention_backward": "attention_backward",
    "_scaled_dot_product_efficient_attention": "attention", "_scaled_dot_product_efficient_attention_backward": "attention_backward",
    "native_layer_norm": "layer_norm", "native_layer_norm_backward": "layer_norm_backward",
    "native_batch_norm": "batch_norm", "native_batch_norm_backward": "batch_norm_backward",
    "_native_batch_norm_legit": "batch_norm", "_native_batch_norm_legit_functional": "batch_norm", "_batch_norm_with_update_functional": "batch_norm",
    "native_group_norm": "group_norm", "native_group_norm_backward": "group_norm_backward",
    "native_dropout": "dropout", "native_dropout_backward": "dropout_backward",
    "_safe_softmax": "softmax", "_softmax_backward_data": "softmax_backward", "_log_softmax_backward_data": "log_softmax_backward",
    "nll_loss_forward": "nll_loss", "nll_loss2d_forward": "nll_loss", "nll_loss2d_backward": "nll_loss_backward",
    "embedding_dense_backward": "embedding_backward", "threshold_backward": "relu_backward",
    "max_pool2d_with_indices": "max_pool2d", "max_pool2d_with_indices_backward": "max_pool2d_backward",
    "max_pool3d_with_indices": "max_pool3d", "max_pool3d_with_indices_backward": "max_pool3d_backward",
    "_cudnn_rnn": "rnn", "_cudnn_rnn_backward": "rnn_backward", "_to_copy": "cast",
}  # fmt: skip

_PRECISIONS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64", torch.complex64: "fp32"}

# They take a tensor for its shape and type, not for its content.
_SHAPE_ONLY = {
    "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "new_empty", "new_empty_strided", "new_zeros", "new_ones",
    "new_full", "lift_fresh",
}  # fmt: skip
_EMPTY = {"empty", "empty_strided", "empty_like", "empty_permuted", "new_empty", "new_empty_strided"}
_MOVES_ONLY = _SHAPE_ONLY | _EMPTY | {
    "zeros", "ones", "full", "zero_", "fill_", "copy_", "copy", "clone", "_to_copy", "cat", "stack", "embedding", "index", "index_select", "gather",
    "slice_backward", "select_backward", "repeat", "roll", "flip", "constant_pad_nd", "arange", "scatter", "scatter_", "lift_fresh_copy",
}  # fmt: skip
_RNNS = {"_cudnn_rnn", "_cudnn_rnn_backward"}
# Ops that overwrite a tensor without their schema saying so: the running statistics of batch norm, at these argument places.
_UNDECLARED_WRITES = {"native_batch_norm": (3, 4, 5)}  # running mean, running variance, and whether it is training


@dataclass(frozen=True, slots=True)
class Traits:
    """What is known of an op before it is called."""

    base: str  # "addmm"
    is_view: bool  # returns views of its inputs and nothing else
    is_empty: bool  # only allocates
    reads_content: bool
    written_places: tuple[int, ...]
    written_names: tuple[str, ...]
    is_replayable: bool
    depends_on_values: bool  # its result, or the shape of it, is not known from shapes


@cache
def traits(func: Any) -> Traits:
    schema = func._schema
    base = schema.name.partition("::")[2]
    written = [(place, a.name, a.kwarg_only) for place, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write]
    return Traits(
        base=base,
        is_view=base != "lift_fresh" and not written and bool(schema.returns) and all(result.alias_info is not None for result in schema.returns),
        is_empty=base in _EMPTY,
        reads_content=base not in _SHAPE_ONLY,
        written_places=tuple(place for place, _, by_keyword in written if not by_keyword),
        written_names=tuple(name for _, name, _ in written),
        is_replayable=not schema.name.startswith(("_c10d_functional::", "c10d::")),
        depends_on_values=func is torch.ops.aten.index.Tensor
        or bool({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags)),
    )


def written_tensors(of: Traits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors among the arguments that the op overwrites."""
    found = [args[place] for place in of.written_places if place < len(args)]
    found += [kwargs[name] for name in of.written_names if name in kwargs]
    if of.base in _UNDECLARED_WRITES:
        mean, variance, is_training = _UNDECLARED_WRITES[of.base]
        if args[is_training]:
            found += [args[mean], args[variance]]
    return list(tensors_in(found))


def tensors_in(*values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from tensors_in(*value)


def kind(of: Traits, args: tuple[Any, ...], *, is_backward: bool) -> str:
    """A short name that rules by layer type look at; what runs in backward ends with _backward."""
    if of.base == "convolution":
        found = f"conv{'_transpose' if args[6] else ''}{args[0].dim() - 2}d"
    elif of.base == "convolution_backward":
        found = f"conv{'_transpose' if args[7] else ''}{args[0].dim() - 2}d_backward"
    else:
        found = _KINDS.get(of.base) or of.base.strip("_")
    return f"{found}_backward" if is_backward and not found.endswith("_backward") else found


def precision(inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> str:
    for tensor in [*inputs, *outputs]:
        if tensor.dtype in _PRECISIONS:
            return _PRECISIONS[tensor.dtype]
        if tensor.dtype.is_floating_point:
            return "fp8"
    return "fp32"


def arithmetic(kind: str, precision: str) -> str:
    """The rate an op's flops run at: torch lets convolutions in fp32 use the tensor cores' tf32, and matmuls where it was told so."""
    if precision == "fp32" and (
        ("conv" in kind and torch.backends.cudnn.allow_tf32) or (kind.startswith("matmul") and torch.backends.cuda.matmul.allow_tf32)
    ):
        return "tf32"
    return precision


def flops(
    func: Any, of: Traits, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, inputs: list[torch.Tensor], outputs: list[torch.Tensor]
) -> int:
    if of.base in _MOVES_ONLY:
        return 0
    if of.base in _RNNS:
        return _rnn_flops(args) * (2 if of.base.endswith("backward") else 1)
    if of.base == "_grouped_mm":
        return int(2 * args[0].numel() * args[1].shape[-1])
    counted = formula_flops(func, args, kwargs, out)
    if counted is not None:
        return counted // 2 if _is_causal(of, args, kwargs) else counted
    if of.base.startswith("embedding"):
        return max((tensor.numel() for tensor in inputs), default=0)
    return max((tensor.numel() for tensor in [*inputs, *outputs]), default=0)


_CAUSAL_PLACE = {
    "_scaled_dot_product_flash_attention": 4, "_scaled_dot_product_flash_attention_backward": 11,
    "_scaled_dot_product_efficient_attention": 6, "_scaled_dot_product_efficient_attention_backward": 11,
}  # fmt: skip


def _is_causal(of: Traits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    place = _CAUSAL_PLACE.get(of.base)
    return place is not None and bool(args[place] if place < len(args) else kwargs.get("is_causal", False))


def _rnn_flops(args: tuple[Any, ...]) -> int:
    """Two per weight and per step of each sequence."""
    sequence, weights = args[0], args[1]
    return int(2 * sequence.shape[0] * sequence.shape[1] * sum(weight.numel() for weight in weights))


def workspace_bytes(of: Traits, args: tuple[Any, ...]) -> int:
    """Scratch that CUDA's kernel is known to take from the allocator; 0 where nothing is known."""
    if of.base == "_scaled_dot_product_flash_attention_backward":
        return _flash_backward_bytes(query=args[1], key=args[2], value=args[3])
    if of.base == "_scaled_dot_product_efficient_attention_backward":
        return int(4 * prod(args[1].shape[:3]))  # the row sums of out × grad, in fp32
    return 0


def _flash_backward_bytes(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> int:
    """FlashAttention-2: the gradient of q is gathered in fp32 and the row sums of out × grad kept, both with rows rounded up to 128.

    With grouped queries, the gradients of k and v are first made per query head.
    """
    batch, heads, length, head_size = query.shape
    rows = -(-length // 128) * 128
    columns = -(-head_size // 32) * 32 if head_size <= 128 else -(-head_size // 64) * 64
    gathered = 4 * batch * heads * rows * (columns + 1)
    expanded = batch * heads * key.shape[2] * head_size * (key.element_size() + value.element_size()) if key.shape[1] != heads else 0
    return gathered + expanded
