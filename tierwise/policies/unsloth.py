"""unsloth: checkpoint every layer, keep its input in host memory, and fetch it while the layer after it goes backward.

Paper    none; Unsloth's offloaded gradient checkpointing, Unsloth 2024 (unsloth_zoo/gradient_checkpointing.py).
Idea     the input of a layer is all that must survive, and the layer itself takes longer than the bus needs for it.
Rule     the input x of a layer, if larger than min_bytes and not the last layer's, is copied out while the layer runs; the device waits for the copy
         at the layer's end. In backward x goes into one of two buffers as soon as the layer that used that buffer before is done, two layers up;
         then the layer runs again. double_buffer=False: into one, when the layer itself is due. layers_per_checkpoint: that many as one.
Differs  there are two buffers even where less than 512 MiB are free, and they are not set aside for the whole step. The first input is the one with
         the most bytes. A layer is a repeated block of the model (_blocks.py), and what nobody reads again is not run again, where Unsloth runs the
         layer to its end.
"""

from __future__ import annotations

from ..errors import BadInput
from ..ir import Problem, Schedule
from ._blocks import blocks, checkpoint
from ._gaps import Swap, build
from ._layers import saved_for_backward

DECIDES = "recompute by layer, swap its input"
FIDELITY = "faithful"
EXECUTABLE = True
REQUIRES = {"dram"}


def plan(problem: Problem, *, layers_per_checkpoint: int = 1, double_buffer: bool = True, min_bytes: int = 2 << 20, tier: str = "dram") -> Schedule:
    if layers_per_checkpoint < 1:
        raise BadInput(f"layers_per_checkpoint is {layers_per_checkpoint}; give at least 1")
    graph, found = problem.graph, blocks(problem.graph)
    runs = [found[at : at + layers_per_checkpoint] for at in range(0, len(found), layers_per_checkpoint)]
    chosen = checkpoint(problem, runs)
    last_use = {storage: last for storage, last, _ in saved_for_backward(graph)}
    due = [min(block.backward for block in run) for run in runs]  # where the run is computed again
    swaps: list[Swap] = []
    for place, run in enumerate(runs[:-1]):
        candidates = [s for s in run[0].inputs if s in last_use and graph.storages[s].nbytes > min_bytes]
        if not candidates:
            continue
        x = max(candidates, key=lambda storage: (graph.storages[storage].nbytes, -storage))
        out_at, end = run[0].ops[0], max(run[-1].ops[-1], last_use[x]) + 1
        in_at = due[place + 1] if double_buffer else due[place]
        if end < in_at <= due[place] and x not in {swap.storage for swap in swaps}:
            swaps.append(Swap(x, tier, out_at=out_at, free_at=end, in_at=in_at, join=True, join_back=False))
    return build(problem, swaps, chosen.drops, kept=chosen.kept)
