"""What a node of a joint graph is: its kind, and whether it may be computed a second time."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from .random_state import draw, read_state
from .torch_compat import has_flop_formula, is_higher_order
from .values import JointValue, Kind

__all__ = ["SNAPSHOT", "is_copy_into", "is_random", "is_view", "kind_of", "why_save"]

SNAPSHOT = "tierwise_snapshot"
"""In a node's meta: it copies an input before forward overwrites it."""

_ALIASES = {"_unsafe_view", "_reshape_alias"}  # return a view of their input without saying so
_PASSES = {
    "_to_copy", "arange", "cat", "constant_pad_nd", "copy", "embedding", "empty", "empty_like", "empty_strided", "flip", "full", "full_like",
    "gather", "index", "index_select", "inductor_lookup_seed", "inductor_randint", "inductor_random", "iota", "lift_fresh_copy", "masked_fill",
    "new_empty", "new_full", "new_ones", "new_zeros", "ones", "ones_like", "repeat", "roll", "scalar_tensor", "select_scatter", "slice_scatter",
    "stack", "tril", "triu", "zeros", "zeros_like",
}  # fmt: skip
_REDUCTIONS = {
    "_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "_batch_norm_with_update_functional", "_fused_rms_norm", "_log_softmax",
    "_native_batch_norm_legit", "_native_batch_norm_legit_functional", "_native_batch_norm_legit_no_training", "_softmax", "all", "amax", "amin",
    "any", "avg_pool2d", "avg_pool3d", "linalg_vector_norm", "logsumexp", "max", "max_pool2d_with_indices", "max_pool3d_with_indices", "mean",
    "min", "native_batch_norm", "native_group_norm", "native_layer_norm", "norm", "prepare_softmax_online", "prod", "std", "std_mean", "sum",
    "var", "var_mean", "_low_memory_max_pool_with_offsets",
}  # fmt: skip
_ORDER_DEPENDENT = {
    "_index_put_impl", "bincount", "cumprod", "cumsum", "histc", "index_add", "index_put", "index_reduce", "put", "scatter_add", "scatter_reduce",
}  # fmt: skip
_SELECTIONS = {"argmax", "argmin", "argsort", "kthvalue", "median", "mode", "multinomial", "nonzero", "sort", "topk", "unique_dim", "_unique2"}


def is_copy_into(node: fx.Node) -> bool:
    """Writes one of the graph's inputs."""
    return node.target is torch.ops.aten.copy_.default


def is_random(node: fx.Node) -> bool:
    """Draws from a generator. Attention says so of itself even when its dropout is off."""
    op = node.target
    if not isinstance(op, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in op.tags:
        return False
    return not ("attention" in op.__name__ and _argument(node, "dropout_p") == 0.0)


def is_view(node: fx.Node) -> bool:
    """Lies in the bytes of its first source."""
    if node.target is operator.getitem:
        return is_view(node.all_input_nodes[0])
    return isinstance(node.target, torch._ops.OpOverload) and _is_view(node.target)


def kind_of(node: fx.Node, before: Mapping[str, JointValue]) -> Kind:
    """`before` has the values of the nodes before it. Inputs are for the caller to tell from parameters."""
    if node.op == "get_attr":
        return Kind.PARAMETER
    if node.target is operator.getitem:
        return Kind.VIEW if before[node.all_input_nodes[0].name].kind is Kind.VIEW else Kind.PART
    if node.target is read_state:
        return Kind.RANDOM_STATE
    op: Any = node.args[2] if node.target is draw else node.target
    if not isinstance(op, torch._ops.OpOverload):
        return Kind.OTHER
    name = _name(op)
    if _is_view(op):
        return Kind.VIEW
    if "attention" in name:
        return Kind.ATTENTION
    if has_flop_formula(op):
        return Kind.CONVOLUTION if "conv" in name else Kind.MATMUL
    if node.target is draw:
        return Kind.RANDOM
    if is_random(node):
        return Kind.RANDOM_STATE if name.startswith("inductor_seed") else Kind.RANDOM
    if name in _REDUCTIONS:
        return Kind.REDUCTION
    if torch.Tag.pointwise in op.tags or name in _PASSES:
        return Kind.POINTWISE
    return Kind.OTHER


def why_save(node: fx.Node, kind: Kind, *, compiled: bool) -> str:
    """Why a node may not be computed a second time; empty if it may."""
    if node.meta.get(SNAPSHOT):
        return "forward overwrites the input it copies"
    if kind is Kind.RANDOM_STATE:
        return "the next random state is another one"
    if node.op != "call_function" or node.target in (draw, operator.getitem):
        return ""
    op = node.target
    if is_higher_order(op) or not isinstance(op, torch._ops.OpOverload):
        return "it may do more than compute its result"
    if op._schema.is_mutable:
        return "it writes its inputs"
    if op.namespace not in ("aten", "prims", "prim"):
        return "it is an op of another library, which need not give the same result twice"
    if is_random(node):
        return "it would draw other numbers"
    name = _name(op)
    if name in _ORDER_DEPENDENT:
        return "a parallel machine adds in any order"
    if name in _SELECTIONS:
        return "equal values may be taken in another order"
    if compiled and kind is Kind.REDUCTION:
        return "fused with other ops it may add in another order"
    return ""


def _is_view(op: torch._ops.OpOverload) -> bool:
    returns = op._schema.returns
    return _name(op) in _ALIASES or (bool(returns) and returns[0].alias_info is not None and not op._schema.is_mutable)


def _name(op: torch._ops.OpOverload) -> str:
    return str(op.overloadpacket.__name__)


def _argument(node: fx.Node, name: str) -> Any:
    """An argument by its name in the op's schema, given or default."""
    for position, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if argument.name == name:
            return node.args[position] if position < len(node.args) else node.kwargs.get(name, argument.default_value)
    return None
