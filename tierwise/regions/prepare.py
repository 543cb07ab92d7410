"""A joint graph made ready to be split: equal ops merged, random ops with a state to replay, overwritten inputs copied in time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import fx

from ..errors import CannotCapture
from . import ops
from .random_state import draw, read_state
from .torch_compat import FakeTensor, without_duplicates

_aten = torch.ops.aten

__all__ = ["flat_outputs", "is_tangent", "prepare", "tensors_in"]


def prepare(joint: fx.GraphModule, *, compiled: bool) -> None:
    """In place. Random ops of a compiled graph are left alone: Inductor has already given them seeds, which are values like any other."""
    _refuse_open_sizes(joint)
    without_duplicates(joint)
    for node in joint.graph.nodes:
        for mark in ("recompute", "saved_tensor_with_no_vc_check"):  # the option decides what is saved, and saved-tensor hooks see all of it
            node.meta.pop(mark, None)
    _copy_inputs_before_they_are_written(joint)
    if not compiled:
        _drop_as_the_cpu_does(joint)
        _record_random_states(joint)
    joint.graph.lint()
    joint.recompile()


def _refuse_open_sizes(joint: fx.GraphModule) -> None:
    """Bytes and work must be known before the call runs."""
    for node in sorted(joint.graph.nodes, key=lambda node: node.op == "placeholder"):  # who makes a size, before who is only given it
        for item in _flat(node.meta.get("val")):
            sizes = item.shape if isinstance(item, torch.Tensor) else [item]
            if any(isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool)) for size in sizes):
                raise CannotCapture(f"{node.target} gives a number or a size that is known only when it runs")


def is_tangent(node: fx.Node) -> bool:
    return node.op == "placeholder" and "tangents" in str(node.target)


def flat_outputs(joint: fx.GraphModule) -> list[fx.Node | None]:
    """Results of the forward, then gradients of the inputs; None where there is none."""
    (output,) = joint.graph.find_nodes(op="output")
    return list(_flat(output.args[0]))


def tensors_in(value: Any) -> list[torch.Tensor]:
    return [item for item in _flat(value) if isinstance(item, torch.Tensor)]


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from _flat(item)
    else:
        yield value


def _drop_as_the_cpu_does(joint: fx.GraphModule) -> None:
    """Traced, dropout is one op, whose backward multiplies by the mask and then by a number. On the CPU torch itself has the number in the mask, and
    of the gradient's type: in 16 bits these are other bits."""
    for node in joint.graph.find_nodes(op="call_function", target=_aten.native_dropout_backward.default):
        gradient, mask, scale = cast(tuple[fx.Node, fx.Node, float], node.args)
        found: torch.Tensor = gradient.meta["val"]
        if found.device.type != "cpu" or found.dtype not in (torch.bfloat16, torch.float16):
            continue
        drawn = mask.args[0] if mask.args else None
        kept = 1 - cast(float, drawn.args[1]) if isinstance(drawn, fx.Node) and drawn.target is _aten.native_dropout.default else 1 / scale
        with joint.graph.inserting_before(node):
            factor = _call(joint, _aten._to_copy.default, (mask,), {"dtype": found.dtype})
            factor = _call(joint, _aten.div.Scalar, (factor, kept), {})
            node.replace_all_uses_with(_call(joint, _aten.mul.Tensor, (gradient, factor), {}))
        joint.graph.erase_node(node)


def _call(joint: fx.GraphModule, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    made = joint.graph.call_function(op, args, kwargs)
    made.meta["val"] = op(*(arg.meta["val"] if isinstance(arg, fx.Node) else arg for arg in args), **kwargs)
    return made


def _copy_inputs_before_they_are_written(joint: fx.GraphModule) -> None:
    """Whoever repeats an op in backward finds the input overwritten: readers read a copy, which is saved if backward needs it."""
    last = joint.graph.find_nodes(op="placeholder")[-1]
    for node in _written_inputs(joint):
        readers = [user for user in node.users if user.op != "output" and not ops.is_copy_into(user)]
        if not readers:
            continue
        with joint.graph.inserting_after(last):
            copy = joint.graph.call_function(torch.ops.aten.clone.default, (node,))
        with node.meta["val"].fake_mode:
            copy.meta = {"val": torch.empty_like(node.meta["val"]), ops.SNAPSHOT: True}
        for user in readers:
            user.replace_input_with(node, copy)


def _written_inputs(joint: fx.GraphModule) -> list[fx.Node]:
    """Inputs that forward overwrites: by a copy within the graph, or after it by a result that says so."""
    placeholders = joint.graph.find_nodes(op="placeholder")
    described = {node.meta["desc"]: node for node in placeholders if "desc" in node.meta}
    (output,) = joint.graph.find_nodes(op="output")
    written = {described.get(getattr(result, "mutated_input", None)) for result in _flat(output.meta.get("desc", ()))}
    written |= {node.args[0] for node in joint.graph.nodes if ops.is_copy_into(node)}
    return [node for node in placeholders if node in written]


def _record_random_states(joint: fx.GraphModule) -> None:
    for node in list(joint.graph.nodes):
        if node.users and ops.is_random(node):
            tensor = next(tensor for tensor in tensors_in(node.meta["val"]) if isinstance(tensor, FakeTensor))
            with joint.graph.inserting_before(node):
                state = joint.graph.create_node("call_function", read_state, (tensor.device,), name=f"{node.name}_state")
            with tensor.fake_mode:
                state.meta["val"] = torch.empty(_state_bytes(tensor.device), dtype=torch.uint8)
            node.args = (state, tensor.device, node.target, *node.args)
            node.target = draw


def _state_bytes(device: torch.device) -> int:
    return read_state(device).numel()
