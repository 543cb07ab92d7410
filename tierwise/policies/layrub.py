"""layrub: let feature maps pass through a few rotating buffers, out to the host behind forward and back one layer ahead in backward.

Paper    Jin, Liu, Jiang, Ma, Shi, He, Zhao, Layrub, ACM TACO 2018 (volume 15, number 3).
Idea     a layer needs its own maps only: buffers for a few layers, reused by all, train a network of any depth.
Rule     mode: intra (a layer's gradient takes the bytes of its map), inter (every map migrates after its last forward use; its buffer serves the
         buffers-th map after it, which waits for the copy; in backward the next map comes back while a layer runs), hybrid (maps that some layer
         reads again as its input migrate, what only its own layer's backward needs stays). auto: the first that fits of intra, hybrid, inter.
Differs  reconstructed from the abstract: the number of buffers, the order of modes and what hybrid means are inferred. Intra is what freeing right
         after the last use gives; the overlap of a map and its gradient within one op is not saved. Buffers have the size of what is in them.
"""

from __future__ import annotations

from ..errors import BadInput, InfeasibleBudget
from ..ir import Problem, Schedule, peak_bytes
from ..units import format_bytes
from ._gaps import build
from ._layers import saved_for_backward
from ._stash import offload_behind

DECIDES = "swap by layer"
FIDELITY = "like"
EXECUTABLE = True
REQUIRES = {"dram"}

LADDER = ("intra", "hybrid", "inter")  # of auto, fastest first


def plan(problem: Problem, *, mode: str = "auto", buffers: int = 2, tier: str = "dram") -> Schedule:
    if mode not in (*LADDER, "auto"):
        raise BadInput(f"mode is {mode!r}; layrub knows {', '.join(LADDER)} and auto")
    if buffers < 1:
        raise BadInput(f"buffers is {buffers}; give at least 1")
    needed = {}
    for rung in LADDER if mode == "auto" else (mode,):
        schedule = _migrate(problem, rung, buffers, tier)
        needed[rung] = peak_bytes(problem, schedule)[problem.device_tier]
        if mode != "auto" or needed[rung] <= problem.budget_bytes:
            return schedule
    least = min(needed.values())
    raise InfeasibleBudget(f"with every feature map on the host, layrub needs {format_bytes(least)}", least_bytes=least)


def _migrate(problem: Problem, mode: str, buffers: int, tier: str) -> Schedule:
    if mode == "intra":
        return build(problem)
    graph = problem.graph
    saved = [
        (storage, last, needed)
        for storage, last, needed in saved_for_backward(graph)
        if needed > last + 1 and (mode == "inter" or last in graph.readers[storage])
    ]
    swaps = offload_behind(graph, [entry[:2] for entry in saved], {storage: needed for storage, _, needed in saved}, stash=buffers, tier=tier)
    return build(problem, swaps)
