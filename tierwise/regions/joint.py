"""The joint forward and backward graph of one module call, as AOTAutograd or Inductor sees it when it compiles, described in plain types.

`describe` stops the compiler at the point where it would split the graph, so what is described is what will be split. Nothing is computed
and no kernel is made, and module and arguments may be fake tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from . import ops
from .prepare import flat_outputs, is_tangent, prepare, tensors_in
from .random_state import draw
from .torch_compat import CustomPartitionerFn, aot_with_partition, flops_of, inductor_with_partition, min_cut_saved
from .tracing import as_one_graph, capture_errors_explained, cause_of
from .values import GIVEN, JointGraph, JointValue, Kind

__all__ = ["Look", "describe", "look_at", "prepared", "values_of"]


def describe(
    forward: Callable[..., Any],
    module: torch.nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    compile: bool = True,
    precision_casts: bool = True,
) -> JointGraph:
    """The values of `forward(module, *args, **kwargs)` and its backward, as `compile_option` with the same switches will split them.

    A call that needs no gradients has no values. One that is not one graph raises CannotCapture with the reason.
    """
    return look_at(forward, module, args, kwargs, compile=compile, precision_casts=precision_casts).seen


def look_at(
    forward: Callable[..., Any],
    module: torch.nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    compile: bool = True,
    precision_casts: bool = True,
) -> Look:
    """`describe`, and the joint graph itself."""
    look = Look(compile)

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        if compile:
            return inductor_with_partition(gm, inputs, look, precision_casts=precision_casts, donate=False, compiler=_stop)
        return aot_with_partition(gm, inputs, look, compiler=_stop)

    with capture_errors_explained():
        try:
            as_one_graph(forward, backend, "describe")(module, *args, **(kwargs or {}))
        except Exception as error:
            if not isinstance(cause_of(error), _Stopped):
                raise
    return look


class _Stopped(Exception):
    """Raised in place of compiling."""


def _stop(*args: Any, **kwargs: Any) -> Any:
    raise _Stopped


class Look(CustomPartitionerFn):  # type: ignore[misc]
    """In place of a partitioner: look at the joint graph, then stop the compiler."""

    def __init__(self, compiled: bool) -> None:
        self.compiled = compiled
        self.seen = JointGraph((), compiled=compiled, keep=())
        self.joint: fx.GraphModule | None = None  # prepared to be split
        self.forward_outputs = 0

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        self.forward_outputs = kwargs["num_fwd_outputs"]
        static = kwargs.get("static_lifetime_input_indices") or ()
        self.joint = gm
        self.seen = prepared(gm, forward_outputs=self.forward_outputs, static_inputs=static, compiled=self.compiled)
        raise _Stopped

    def uuid(self) -> None:
        return None


def prepared(joint: fx.GraphModule, *, forward_outputs: int, static_inputs: Sequence[int], compiled: bool) -> JointGraph:
    """The joint graph made ready to be split, and its values, with what to keep when memory does not matter."""
    prepare(joint, compiled=compiled)
    graph = values_of(joint, forward_outputs=forward_outputs, static_inputs=static_inputs, compiled=compiled)
    saved = min_cut_saved(joint, static_inputs, forward_outputs) if compiled else graph.named
    return replace(graph, keep=_kept(graph, saved))


def values_of(joint: fx.GraphModule, *, forward_outputs: int, static_inputs: Sequence[int], compiled: bool) -> JointGraph:
    """The values of a prepared joint graph, by the names of its nodes. What to keep is left open."""
    outputs = flat_outputs(joint)
    results, gradients = outputs[:forward_outputs], outputs[forward_outputs:]
    nodes = [node for node in joint.graph.nodes if node.op != "output"]
    backward = _with_all_users(node for node in nodes if is_tangent(node))
    written = [node for node in nodes if ops.is_copy_into(node)]
    in_forward = _with_all_sources([*results, *(node for node in written if node not in backward)])
    read = {source for node in backward for source in node.all_input_nodes} | set(gradients)
    primals = [node for node in nodes if node.op == "placeholder" and not is_tangent(node)]
    parameters = {primals[index] for index in static_inputs}
    values: dict[str, JointValue] = {}
    for node in nodes:
        if node not in backward and node not in written:
            value = _value(node, values, compiled=compiled, is_parameter=node in parameters)
            made_in_forward = values[value.made_from[0]].in_forward if value.kind is Kind.PART else node in in_forward
            values[node.name] = replace(value, in_forward=made_in_forward, read_by_backward=node in read)
    graph = JointGraph(tuple(values.values()), compiled, keep=())
    shared = {graph.owner(node.name).name for node in results if node is not None and node.name in values}
    graph = replace(graph, values=tuple(replace(value, is_output=value.name in shared and value.kind not in GIVEN) for value in graph.values))
    return graph


def _value(node: fx.Node, before: Mapping[str, JointValue], *, compiled: bool, is_parameter: bool) -> JointValue:
    if node.op == "placeholder":
        return JointValue(node.name, Kind.PARAMETER if is_parameter else Kind.INPUT, nbytes=_nbytes(node.meta.get("val")), label=_label(node))
    kind = ops.kind_of(node, before)
    made_from = tuple(dict.fromkeys(source.name for source in node.all_input_nodes if source.name in before))
    reason = ops.why_save(node, kind, compiled=compiled)
    if kind is Kind.PART:
        reason = before[made_from[0]].must_save
    has_own_bytes = kind is not Kind.VIEW and isinstance(node.meta.get("val"), torch.Tensor)
    op = node.args[2] if node.target is draw else node.target
    return JointValue(
        name=node.name,
        kind=kind,
        op=getattr(op, "__name__", str(op)) if not isinstance(op, torch._ops.OpOverload) else str(op),
        nbytes=_nbytes(node.meta["val"]) if has_own_bytes else 0,
        flops=_flops(node, op) if kind in (Kind.MATMUL, Kind.CONVOLUTION, Kind.ATTENTION) else 0,
        made_from=made_from,
        label=_label(node),
        must_save=reason,
    )


def _kept(graph: JointGraph, saved: Iterable[str]) -> tuple[str, ...]:
    """Of the values to save when memory does not matter, those that backward would not make for itself anyway."""
    named = [graph.named[name] for name in saved if name in graph.named]
    wanted = [value.name for value in named if value.kind not in GIVEN and (value.in_forward or graph.compiled)]
    return graph.hand_over(wanted).saved


def _with_all_users(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in found and node.op != "output":
            found.add(node)
            waiting.extend(node.users)
    return found


def _with_all_sources(nodes: Iterable[fx.Node | None]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    waiting = [node for node in nodes if node is not None]
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting.extend(node.all_input_nodes)
    return found


def _nbytes(value: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(value))


def _flops(node: fx.Node, op: Any) -> int:
    args = node.args[3:] if node.target is draw else node.args
    with_tensors = fx.node.map_arg((args, node.kwargs), lambda source: source.meta["val"])
    return flops_of(op, *with_tensors, node.meta["val"])


def _label(node: fx.Node) -> str:
    """The submodule a node was traced in, as its dotted path within the region."""
    stack = node.meta.get("nn_module_stack") or {"": ("",)}
    return str(list(stack.values())[-1][0]).removeprefix("L['module']").strip(".")
