"""torchtune: checkpoint every layer and send what is still saved to host memory, a few tensors behind the forward pass; fetch one node ahead.

Paper    none; activation checkpointing and OffloadActivations of torchtune, PyTorch 2024.
Idea     with every layer checkpointed only the inputs of layers remain, and those are few enough for the bus.
Rule     a saved tensor of at least min_bytes that is not a parameter is copied out when it is saved; when the stash-th after it is saved, the device
         waits for its copy and lets it go. The first node of backward takes what is still in the stash and drops the rest of it. Each node's
         tensors are fetched while the node before it runs. The head and the loss are outside. mode: none, checkpoint, offload (both).
Differs  mode=auto, the first of these that fits, is ours; torchtune's user decides, and may not offload without checkpoints. A tensor saved by two
         nodes is copied once. A layer is a repeated block of the model (_blocks.py), and what nobody reads again is not run again.
"""

from __future__ import annotations

from ..errors import BadInput, InfeasibleBudget
from ..ir import Graph, Problem, Schedule, peak_bytes
from ..units import format_bytes
from ._blocks import Block, blocks, checkpoint
from ._gaps import Swap, build
from ._layers import saved_for_backward
from ._stash import offload_behind

DECIDES = "recompute by layer, swap what remains"
FIDELITY = "faithful"
EXECUTABLE = True
REQUIRES = {"dram"}

LADDER = ("none", "checkpoint", "offload")  # of auto, fastest first


def plan(problem: Problem, *, mode: str = "auto", stash: int = 5, min_bytes: int = 1024, tier: str = "dram") -> Schedule:
    if mode not in (*LADDER, "auto"):
        raise BadInput(f"mode is {mode!r}; torchtune knows {', '.join(LADDER)} and auto")
    if stash < 1:
        raise BadInput(f"stash is {stash}; give at least 1")
    needed = {}
    for rung in LADDER if mode == "auto" else (mode,):
        schedule = _build(problem, rung, stash, min_bytes, tier)
        needed[rung] = peak_bytes(problem, schedule)[problem.device_tier]
        if mode != "auto" or needed[rung] <= problem.budget_bytes:
            return schedule
    least = min(needed.values())
    raise InfeasibleBudget(f"even with layers checkpointed and their inputs on the host, torchtune needs {format_bytes(least)}", least_bytes=least)


def _build(problem: Problem, mode: str, stash: int, min_bytes: int, tier: str) -> Schedule:
    if mode == "none":
        return build(problem)
    found = blocks(problem.graph)
    chosen = checkpoint(problem, [[block] for block in found])
    swaps: list[Swap] = []
    if mode == "offload":
        dropped = {drop.storage for drop in chosen.drops}
        behind = max((block.ops[-1] for block in found), default=-1)  # the last block: what follows is head and loss
        saved = [
            (storage, last)
            for storage, last, needed in saved_for_backward(problem.graph)
            if storage not in dropped and last <= behind and needed > last + 1 and problem.graph.storages[storage].nbytes >= min_bytes
        ]
        swaps = offload_behind(problem.graph, saved, _needs(problem.graph, found), stash=stash, tier=tier)
    return build(problem, swaps, chosen.drops, kept=chosen.kept)


def _needs(graph: Graph, found: list[Block]) -> dict[int, int]:
    """For each saved storage, the op for which it must be back: its first use after forward, or the recomputation of a layer it goes into."""
    needs = {storage: needed for storage, _, needed in saved_for_backward(graph)}
    for block in found:
        for storage in block.inputs:
            if storage in needs:
                needs[storage] = min(needs[storage], block.backward)
    return needs
