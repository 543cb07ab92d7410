"""Calls of regions that had better run as they are, each with the reason. They get classes of their own, so that others of their class do not."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import replace

from torch import fx, nn

from ..execute.torch_compat import has_hooks
from ..ir import Graph, Phase
from ..regions.joint import Look
from ..regions.prepare import flat_outputs, is_tangent


def hook_inside(module: nn.Module) -> str:
    """Why a module with hooks on its parts is not compiled."""
    hooked = next((path for path, part in module.named_modules() if path and has_hooks(part)), "")
    return f"{hooked} within it has a hook, which would not be called" if hooked else ""


def adds_in_another_order(graph: Graph, call: int, look: Look) -> str:
    """Why a call would not have the bits of eager.

    Eager adds up a tensor's gradients use by use; a region first adds up those of its own uses. With several inside and others outside, that is
    another sum. (Compiled steps are compared with compiled ones, where it is the same.)
    """
    sizes = {nbytes for nbytes, uses in _differentiated_inputs(look) if uses > 1}
    given = {storage for op in graph.ops if op.region == call and op.phase is Phase.FORWARD for storage in op.reads}
    for storage in sorted(given):
        made = graph.producer(storage)
        others = [
            reader
            for reader in (graph.ops[reader] for reader in graph.readers[storage])
            if reader.phase is Phase.FORWARD and reader.region != call and (reader.writes or reader.mutates)  # who makes nothing lets go of it
        ]
        if graph.storages[storage].nbytes in sizes and others and (made is None or graph.ops[made].region != call):
            name = graph.storages[storage].name
            return f"it uses {name} several times and others use it too, so gradients would be added in another order; compile=True allows that"
    return ""


def _differentiated_inputs(look: Look) -> list[tuple[int, int]]:
    """Bytes of each input that gets a gradient, and how often the forward uses it."""
    if look.joint is None:
        return []
    nodes = list(look.joint.graph.nodes)
    primals = [node for node in nodes if node.op == "placeholder" and not is_tangent(node)]
    gradients = flat_outputs(look.joint)[look.forward_outputs :]
    in_forward = {value.name for value in look.seen.values if value.in_forward}
    return [
        (look.seen.named[node.name].nbytes, _uses(node, in_forward))
        for node, gradient in zip(primals, gradients, strict=False)
        if gradient is not None and node.name in look.seen.named
    ]


def _uses(node: fx.Node, in_forward: set[str]) -> int:
    """Ops of the forward that read it, one that reads it twice counted twice; through views, too."""
    count = 0
    for user in node.users:
        if user.name in in_forward and user.target is not operator.getitem:
            found: list[fx.Node] = []
            fx.node.map_arg((user.args, user.kwargs), found.append)
            count += found.count(node)
    return count


def set_apart(graph: Graph, calls: Mapping[int, str]) -> tuple[Graph, dict[int, str]]:
    """The graph with these calls in classes of their own, and the reasons by class."""
    regions, moved = list(graph.regions), list(graph.calls)
    reasons: dict[int, str] = {}
    known: dict[tuple[str, int], int] = {}
    for call, reason in calls.items():
        key = graph.calls[call].module, graph.calls[call].region
        if key not in known:
            known[key] = len(regions)
            reasons[len(regions)] = reason
            regions.append(replace(regions[key[1]], id=len(regions), example=key[0]))
        moved[call] = replace(moved[call], region=known[key])
    return replace(graph, regions=tuple(regions), calls=tuple(moved)), reasons
