"""oneflow: clone the forward ops of marked blocks into backward, let its ops read the clones, and start each clone just in time.

Paper    Yuan et al., OneFlow, arXiv 2021, 2110.15032; the checkpointing pass of its graph compiler.
Idea     in a static graph a checkpoint is a rewrite: the same ops a second time, with an edge that holds them back.
Rule     in each marked block take the forward ops but batch norm, repeat and unpack; connected ones are a group. A group that backward reads is
         cloned, backward reads the clone, and the clone waits for the last op before the first that reads it. Blocks do not grow together:
         what goes into a marked block passes through an identity outside of it.
Differs  every repeated block of the model (_blocks.py) is marked, where OneFlow's user marks; blocks: the first so many. Of a clone only what
         somebody reads runs. An activation in place on a batch norm's output is kept with it.
"""

from __future__ import annotations

from ..errors import BadInput
from ..ir import Graph, Problem, Schedule
from ._blocks import blocks as blocks_of
from ._blocks import checkpoint
from ._gaps import build

DECIDES = "recompute by layer"
FIDELITY = "faithful"
EXECUTABLE = True
LEFT_OUT = ("batch_norm", "repeat", "unpack")  # batch norm would update its running statistics twice


def plan(problem: Problem, *, blocks: int | None = None) -> Schedule:
    if blocks is not None and blocks < 0:
        raise BadInput(f"blocks is {blocks}; give 0 or more, or nothing for all")
    chosen = checkpoint(problem, [[block] for block in blocks_of(problem.graph)[:blocks]])
    stays = _made_by_what_is_left_out(problem.graph)
    drops = [drop for drop in chosen.drops if drop.storage not in stays]
    return build(problem, drops=drops, kept=chosen.kept | stays)


def _made_by_what_is_left_out(graph: Graph) -> set[int]:
    """Outputs of ops that are not cloned, and whoever took over their bytes."""
    found = {storage for op in graph.ops if op.kind in LEFT_OUT for storage in op.writes}
    for op in graph.ops:
        found.update(new for old, new in op.in_place if old in found)
    return found
