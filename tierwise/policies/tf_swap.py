"""tf_swap: keep the feature maps nearest to the loss, send all earlier ones to host memory, and trigger each fetch as late as still hides it.

Paper    Meng, Sun, Yang, Qiu, Gu, NIPS ML Systems Workshop 2017.
Idea     cut the edge from a feature map to backward and put a swap-out and a swap-in there: a rewrite of the graph, for any network. Device memory
         belongs to what lives shortest; what lives longest has the most time to leave and come back.
Rule     walk the forward pass back from the loss and keep feature maps while they are within a threshold of bytes; swap all before. Out after the
         last forward use. In after the latest op w with  start(reader) − end(w) >= copy(bytes).  Weights stay.
Differs  the threshold is the largest with which the step fits, where the paper has the user set it (keep_bytes). The attention layer that does not
         store its scores is another kernel, not a plan: captured steps have attention as one op that stores none.
"""

from __future__ import annotations

from bisect import bisect_right

from ..ir import Problem, Schedule
from ._fit import largest_that_fits
from ._gaps import Swap, build
from ._layers import saved_for_backward

DECIDES = "swap by distance to the loss"
FIDELITY = "faithful"
EXECUTABLE = True
REQUIRES = {"dram"}


def plan(problem: Problem, *, keep_bytes: int | None = None, tier: str = "dram") -> Schedule:
    """keep_bytes: the threshold of feature maps to keep; as many as fit unless given."""
    swaps = _swaps_from_the_loss_back(problem, tier)
    if keep_bytes is not None:
        return build(problem, swaps[_count_within(problem, swaps, keep_bytes) :])
    return largest_that_fits(problem, 0, len(swaps), lambda kept: build(problem, swaps[kept:]))[1]


def _swaps_from_the_loss_back(problem: Problem, tier: str) -> list[Swap]:
    """Every feature map that waits for backward as a swap, those made last first."""
    graph, starts = problem.graph, problem.op_starts
    found = []
    for storage, last_forward, reader in saved_for_backward(graph):
        if reader <= last_forward + 1:
            continue
        seconds = problem.machine.copy_seconds(graph.storages[storage].nbytes, tier, problem.device_tier)
        trigger = bisect_right(starts, starts[reader] - seconds) - 1
        fetch_at = min(reader, max(trigger, last_forward + 2))
        made = graph.producer(storage)
        swap = Swap(storage, tier, out_at=last_forward + 1, free_at=last_forward + 1, in_at=fetch_at)
        found.append((-1 if made is None else made, storage, swap))
    return [swap for _, _, swap in sorted(found, key=lambda each: each[:2], reverse=True)]


def _count_within(problem: Problem, swaps: list[Swap], keep_bytes: int) -> int:
    kept = 0
    for count, swap in enumerate(swaps):
        kept += problem.graph.storages[swap.storage].nbytes
        if kept > keep_bytes:
            return count
    return len(swaps)
