"""A joint graph split at an option's saved values: forward leaves exactly those, backward makes the rest again."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import fx

from ..errors import CannotCapture
from . import ops
from .joint import values_of
from .options import Option
from .prepare import prepare
from .random_state import draw, draw_again
from .torch_compat import CustomPartitionerFn, ordered_for_memory, split_graph, with_early_parts
from .values import JointGraph

__all__ = ["OptionPartitioner", "fingerprint", "split", "split_prepared"]


class OptionPartitioner(CustomPartitionerFn):  # type: ignore[misc]
    """A partition function for AOTAutograd and Inductor."""

    def __init__(self, option: Option, *, compiled: bool) -> None:
        self.option = option
        self.compiled = compiled

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        static = kwargs.get("static_lifetime_input_indices") or ()
        return split(gm, self.option, forward_outputs=kwargs["num_fwd_outputs"], static_inputs=static, compiled=self.compiled)

    def uuid(self) -> str:
        """What Inductor's cache on disk knows this split by."""
        return fingerprint(self.option.to_json())


def fingerprint(choice: str) -> str:
    """Of a choice and of the code that carries it out."""
    digest = hashlib.sha256(choice.encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def split(
    joint: fx.GraphModule, option: Option, *, forward_outputs: int, static_inputs: Sequence[int], compiled: bool
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The forward and the backward graph of an option. The joint graph is used up."""
    prepare(joint, compiled=compiled)
    graph = values_of(joint, forward_outputs=forward_outputs, static_inputs=static_inputs, compiled=compiled)
    if graph.fingerprint != option.graph:
        raise CannotCapture(
            f"this call gives graph {graph.fingerprint}, and option {option.name} is for {option.graph}; "
            "calls of one class need the same code, the same switches and gradients for the same inputs"
        )
    return split_prepared(joint, graph, option, forward_outputs=forward_outputs)


def split_prepared(joint: fx.GraphModule, graph: JointGraph, option: Option, *, forward_outputs: int) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The same of a joint graph that is prepared, with its values."""
    handover = graph.hand_over(option.saved)
    named = {node.name: node for node in joint.graph.nodes}
    between = [named[name] for name in (*handover.given, *handover.saved) if named[name].op != "get_attr"]
    forward, backward = split_graph(joint, between, forward_outputs)
    _plain_where_nothing_is_repeated(forward, handover.saved)
    _draw_the_same_numbers(backward)
    return with_early_parts(forward), ordered_for_memory(backward)


def _plain_where_nothing_is_repeated(forward: fx.GraphModule, saved: Sequence[str]) -> None:
    """Take out of forward the random states and copies of inputs that backward does not ask for."""
    for node in list(forward.graph.nodes):
        if node.meta.get(ops.SNAPSHOT) and node.name not in saved:
            node.replace_all_uses_with(node.args[0])
            forward.graph.erase_node(node)
        elif node.target is draw and node.args[0].name not in saved:
            state, _, op, *args = node.args
            node.target, node.args = op, tuple(args)
            forward.graph.erase_node(state)
    forward.recompile()


def _draw_the_same_numbers(backward: fx.GraphModule) -> None:
    for node in backward.graph.nodes:
        if node.target is draw:
            node.target = draw_again
    backward.recompile()
