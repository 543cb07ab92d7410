"""The joint view: forward and backward of one region as a single functional aten graph, from which compiled options are cut.

AOTAutograd traces the region on fake tensors with the arguments of its first call in the step. Beside the fx graph stands the same thing as a Graph
of ours: what the region is given (parameters, buffers, activations, and the gradients of what it returns), what it gives back, and which values its
backward could be given instead of computing them again.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..ir import Graph, Op, Phase, Role, Storage, check_graph
from . import kinds
from .autocast import cuda_autocast, cuda_autocast_lists
from .cuda_semantics import cuda_semantics
from .fake_step import FakeStep
from .torch_compat import aot_joint, described_input, described_outputs

_ROLES = {"param": Role.PARAM, "buffer": Role.BUFFER}


@dataclass(frozen=True, slots=True)
class JointValue:
    """A value of the joint graph that crosses its border, or could cross from forward to backward."""

    node: str  # its name in the fx graph
    kind: str  # inputs: param, buffer, activation, tangent, other; outputs: output, mutation, grad; saved: needed (backward reads it) or possible
    name: str  # the parameter's or buffer's own name, or the node's
    storage: int  # in Joint.graph
    nbytes: int


@dataclass(frozen=True, slots=True)
class Joint:
    """One region class."""

    module: str
    graph_module: torch.fx.GraphModule
    graph: Graph
    inputs: tuple[JointValue, ...]
    outputs: tuple[JointValue, ...]
    saved: tuple[JointValue, ...]


@dataclass(frozen=True, slots=True)
class Joints:
    by_region: dict[int, Joint]
    notes: tuple[str, ...]  # of regions that have no joint graph, and why


def capture_joints(model: nn.Module, batch: Any, graph: Graph, *, autocast: torch.dtype | str | None = None) -> Joints:
    """The joint graph of each region class of a captured step, for the model, batch and autocast it was captured with."""
    step = FakeStep(model, batch, autocast)
    with step.mode, _arguments_of({region.example for region in graph.regions}, step.model) as arguments:
        step.run_forward()
    by_region: dict[int, Joint] = {}
    notes = []
    for region in graph.regions:
        module = step.model.get_submodule(region.example)
        try:
            by_region[region.id] = capture_joint(module, *arguments[region.example], name=region.example, autocast=step.autocast)
        except Exception as error:
            reason = (str(error) or type(error).__name__).strip().splitlines()[0]
            notes.append(f"{region.example} ({region.kind}) has no joint graph and runs eagerly: {type(error).__name__}: {reason}")
    return Joints(by_region, tuple(notes))


def capture_joint(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, name: str = "", autocast: torch.dtype | None = None) -> Joint:
    """The joint graph of a module on fake tensors."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(cuda_autocast_lists())
        stack.enter_context(cuda_semantics())
        stack.enter_context(cuda_autocast(autocast))
        graph_module = aot_joint(stack, module, args, kwargs)
    return _Reader(name, graph_module).joint()


@dataclass(frozen=True, slots=True)
class RegionExample:
    """A region class's module on fake tensors, and what it is called with the first time in the step."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@contextlib.contextmanager
def region_examples(model: nn.Module, batch: Any, graph: Graph, *, autocast: torch.dtype | str | None = None) -> Iterator[dict[int, RegionExample]]:
    """One example call of each region class of a captured step, for as long as fake tensors, CUDA's semantics and autocast are on."""
    step = FakeStep(model, batch, autocast)
    with contextlib.ExitStack() as stack:
        stack.enter_context(step.mode)
        with _arguments_of({region.example for region in graph.regions}, step.model) as arguments:
            step.run_forward()
        stack.enter_context(cuda_autocast_lists())
        stack.enter_context(cuda_semantics())
        stack.enter_context(cuda_autocast(step.autocast))
        yield {
            region.id: RegionExample(step.model.get_submodule(region.example), *arguments[region.example])
            for region in graph.regions
            if region.example in arguments
        }


@contextlib.contextmanager
def _arguments_of(wanted: set[str], model: nn.Module) -> Iterator[dict[str, tuple[tuple[Any, ...], dict[str, Any]]]]:
    """What each wanted submodule is called with the first time, as leaves."""
    found: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}

    def watch(name: str) -> Any:
        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if name not in found:
                made: dict[int, torch.Tensor] = {}
                found[name] = (_as_leaves(args, made), _as_leaves(kwargs, made))

        return before

    handles = [model.get_submodule(name).register_forward_pre_hook(watch(name), with_kwargs=True) for name in wanted]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _as_leaves(value: Any, made: dict[int, torch.Tensor]) -> Any:
    """Tensors of their own, the same for the same; parameters stay parameters."""
    if isinstance(value, torch.Tensor):
        if id(value) not in made:
            leaf = value.detach()
            is_parameter = isinstance(value, nn.Parameter)
            made[id(value)] = nn.Parameter(leaf, value.requires_grad) if is_parameter else leaf.requires_grad_(value.requires_grad)
        return made[id(value)]
    if isinstance(value, dict):
        return {key: _as_leaves(part, made) for key, part in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_as_leaves(part, made) for part in value)
    return copy.copy(value)


class _Reader:
    """Walks a joint fx graph and writes it down as storages and ops."""

    def __init__(self, name: str, graph_module: torch.fx.GraphModule) -> None:
        self.name, self.graph_module = name, graph_module
        self.nodes = list(graph_module.graph.nodes)
        self.ends = described_outputs(self.nodes[-1])
        self.forward = _ancestors(node for node, kind in self.ends if kind != "grad")
        self.storages: list[Storage] = []
        self.ops: list[Op] = []
        self.at: dict[int, int] = {}  # address of a storage -> its number

    def joint(self) -> Joint:
        inputs = [self._input(node) for node in self.nodes if node.op == "placeholder"]
        for node in self.nodes:
            if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
                self._op(node)
        outputs = [self._value(node, kind, node.name) for node, kind in self.ends]
        graph = Graph(tuple(self.ops), tuple(self.storages))
        check_graph(graph)
        return Joint(self.name, self.graph_module, graph, tuple(filter(None, inputs)), tuple(filter(None, outputs)), tuple(self._saved(graph)))

    def _input(self, node: torch.fx.Node) -> JointValue | None:
        kind, name = described_input(node)
        for tensor in kinds.tensors_in(node.meta.get("val")):
            self._storage_of(tensor, name, _ROLES.get(kind, Role.INPUT))
        return self._value(node, kind, name)

    def _op(self, node: torch.fx.Node) -> None:
        traits = kinds.traits(node.target)
        args, kwargs = _with_values(node.args), {key: _with_values(value) for key, value in node.kwargs.items()}
        out = node.meta.get("val")
        inputs, outputs = list(kinds.tensors_in(args, tuple(kwargs.values()))), list(kinds.tensors_in(out))
        reads = dict.fromkeys(self._storage_of(tensor, node.name, Role.ACTIVATION) for tensor in inputs) if traits.reads_content else {}
        known = len(self.storages)
        writes = dict.fromkeys(self._storage_of(tensor, node.name, Role.ACTIVATION) for tensor in outputs if tensor.untyped_storage().nbytes())
        fresh = tuple(storage for storage in writes if storage >= known)
        if not fresh:
            return
        is_forward = node in self.forward
        self.ops.append(
            Op(
                id=len(self.ops),
                name=node.name,
                phase=Phase.FORWARD if is_forward else Phase.BACKWARD,
                reads=tuple(reads),
                writes=fresh,
                kind=kinds.kind(traits, args, is_backward=not is_forward),
                workspace_bytes=kinds.workspace_bytes(traits, args),
                replayable=traits.is_replayable,
                flops=kinds.flops(node.target, traits, args, kwargs, out, inputs, outputs),
                precision=kinds.precision(inputs, outputs),
            )
        )

    def _storage_of(self, tensor: torch.Tensor, name: str, role: Role) -> int:
        storage = tensor.untyped_storage()
        if storage._cdata not in self.at:
            self.at[storage._cdata] = len(self.storages)
            self.storages.append(Storage(len(self.storages), name, storage.nbytes(), role, lasting=role in (Role.PARAM, Role.BUFFER)))
        return self.at[storage._cdata]

    def _value(self, node: torch.fx.Node, kind: str, name: str) -> JointValue | None:
        tensor = next(iter(kinds.tensors_in(node.meta.get("val"))), None)
        if tensor is None:
            return None
        storage = self.at[tensor.untyped_storage()._cdata]
        return JointValue(node.name, kind, name, storage, self.storages[storage].nbytes)

    def _saved(self, graph: Graph) -> Iterator[JointValue]:
        """Every value that forward makes or is given and that is no parameter: backward may be given it."""
        for storage in self.storages:
            producer = graph.producer(storage.id)
            if storage.lasting or (producer is None and storage.role is not Role.INPUT):
                continue
            if producer is not None and graph.ops[producer].phase is not Phase.FORWARD:
                continue
            if producer is None and not any(graph.ops[use].phase is Phase.FORWARD for use in graph.uses[storage.id]):
                continue
            is_needed = any(graph.ops[reader].phase is Phase.BACKWARD for reader in graph.readers[storage.id])
            yield JointValue(storage.name, "needed" if is_needed else "possible", storage.name, storage.id, storage.nbytes)


def _ancestors(nodes: Iterator[torch.fx.Node]) -> set[torch.fx.Node]:
    found: set[torch.fx.Node] = set()
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending.extend(node.all_input_nodes)
    return found


def _with_values(value: Any) -> Any:
    return torch.fx.node.map_arg(value, lambda node: node.meta.get("val"))
