"""How many bytes an option needs while it runs op by op, read from the joint graph: each value is freed after its last use, a view holds its owner.

What kernels allocate for themselves is not seen here.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from . import ops
from .joint import Look
from .options import Option
from .prepare import flat_outputs, is_tangent

__all__ = ["Workspace", "workspace_of"]


@dataclass(frozen=True, slots=True)
class Workspace:
    """The most held at once beyond what a call is given and what it leaves: the forward its results and what it saves, the backward gradients."""

    forward_bytes: int
    backward_bytes: int


def workspace_of(look: Look, option: Option) -> Workspace:
    """What an option of this graph needs in eager. A compiler fuses and reorders: what its code needs is to be measured."""
    assert look.joint is not None, "a call that needs no gradients has no options"
    handover = look.seen.hand_over(option.saved)
    nodes = list(look.joint.graph.nodes)
    named = {node.name: node for node in nodes}
    outputs = flat_outputs(look.joint)
    results = [node for node in outputs[: look.forward_outputs] if node is not None]
    gradients = [node for node in outputs[look.forward_outputs :] if node is not None]
    saved = [named[name] for name in handover.saved]
    forward = _in_order(nodes, [*results, *saved], given=())
    there = {named[name] for name in (*handover.saved, *handover.given)}
    # Autograd lets go of what it saved as backward begins; results of the region are still held by whoever used them.
    given_up = [node for node in saved if not look.seen.named[node.name].is_output]
    return Workspace(_beyond(forward, [*results, *saved]), _beyond(_backward_order(nodes, gradients, there), gradients, given_up))


def _in_order(nodes: Sequence[fx.Node], wanted: Iterable[fx.Node], given: Collection[fx.Node]) -> list[fx.Node]:
    needed: set[fx.Node] = set()
    waiting = list(wanted)
    while waiting:
        node = waiting.pop()
        if node not in needed and node not in given and node.op == "call_function":
            needed.add(node)
            waiting.extend(node.all_input_nodes)
    return [node for node in nodes if node in needed]


def _backward_order(nodes: Sequence[fx.Node], gradients: Iterable[fx.Node], there: Collection[fx.Node]) -> list[fx.Node]:
    """As it is split: gradients in the order of the graph, what is computed again just before its first use."""
    needed = _in_order(nodes, gradients, there)
    first = next((place for place, node in enumerate(needed) if any(map(is_tangent, node.all_input_nodes))), 0)
    order: dict[fx.Node, None] = {}
    for node in needed[first:]:
        order |= dict.fromkeys(_in_order(needed, [node], {*there, *order}))
    return list(order)


def _beyond(order: Sequence[fx.Node], left: Collection[fx.Node], given_up: Collection[fx.Node] = ()) -> int:
    """The most bytes that ops in this order hold at once, beyond what they leave, if `given_up` is freed after its last use too."""
    owner: dict[fx.Node, fx.Node] = {}
    last_use: dict[fx.Node, int] = {}
    for place, node in enumerate(order):
        sources = node.all_input_nodes
        owner[node] = owner.get(sources[0], sources[0]) if sources and ops.is_view(node) else node
        for used in {owner[node], *(owner.get(source, source) for source in sources)}:
            last_use[used] = place
    own = {node: _own_bytes(node) for node in order if owner[node] is node}
    kept = {owner.get(node, node) for node in left}
    dies: list[int] = [0] * len(order)
    for node, place in last_use.items():
        if node not in kept:
            dies[place] += own.get(node, 0) + (_own_bytes(node) if node in given_up else 0)
    held = peak = 0
    for place, node in enumerate(order):
        held += own.get(node, 0)
        peak = max(peak, held)
        held -= dies[place]
    return max(0, peak - sum(own.get(node, 0) for node in kept))


def _own_bytes(node: fx.Node) -> int:
    """Of several results those nobody asks for; the others count where they are taken apart, which the graphs do at once."""
    taken = {user.args[1] for user in node.users if user.target is operator.getitem}
    value = node.meta.get("val")
    parts = [part for place, part in enumerate(value) if place not in taken] if isinstance(value, (tuple, list)) else [value]
    return sum(part.numel() * part.element_size() for part in parts if isinstance(part, torch.Tensor))
