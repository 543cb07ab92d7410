"""chen: keep the activations at segment ends, compute the rest of each segment again when backward reaches it.

Paper    T. Chen, Xu, Zhang, Guestrin, arXiv 2016, 1604.06174; the search as in the authors' memonger.
Idea     with about √n segments of √n layers, memory grows with √n and the price is one more forward pass.
Rule     walk the forward ops adding up the bytes they make; where the sum passes b, keep that op's output and start again from zero.
         b comes from b ← √(x·y/2), x the bytes kept and y the largest segment, three times from b = 0, then a grid of six values up to √2·b;
         the plan with the least peak wins. segments="sqrt": keep every ⌊√n⌋-th candidate instead.
Differs  any op may end a segment. What cannot be replayed (batch norm's running statistics) is kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from ..errors import BadInput
from ..ir import Phase, Problem, Role, Schedule, peak_bytes
from ._gaps import Drop, build, can_recompute
from ._layers import saved_for_backward

DECIDES = "recompute by segment"
FIDELITY = "faithful"
EXECUTABLE = True
FIXED_POINT_STEPS = 3
GRID_POINTS = 6


def plan(problem: Problem, *, segments: str = "search") -> Schedule:
    if segments not in ("search", "sqrt"):
        raise BadInput(f"segments is {segments!r}; chen knows 'search' and 'sqrt'")
    candidates = {storage: last for storage, last, _ in saved_for_backward(problem.graph) if can_recompute(problem, storage)}
    if segments == "sqrt":
        every = max(1, math.isqrt(len(candidates)))
        kept = set(list(candidates)[every - 1 :: every])
        return _recompute_others(problem, candidates, kept)
    plans: dict[frozenset[int], Schedule] = {}
    for limit in _limits(problem, candidates):
        kept = _keep_at_limit(problem, candidates, limit)[0]
        plans.setdefault(frozenset(kept), _recompute_others(problem, candidates, kept))
    return min(plans.values(), key=lambda schedule: peak_bytes(problem, schedule)[problem.device_tier])


def _limits(problem: Problem, candidates: dict[int, int]) -> Iterator[float]:
    """The segment sizes to try."""
    limit, smallest_segment = 0.0, math.inf
    for _ in range(FIXED_POINT_STEPS):
        yield limit
        kept, segment_bytes = _keep_at_limit(problem, candidates, limit)
        kept_bytes = sum(problem.graph.storages[storage].nbytes for storage in kept)
        smallest_segment = min(smallest_segment, segment_bytes)
        limit = math.sqrt(kept_bytes * segment_bytes / 2)
    highest = math.sqrt(2) * limit
    for point in range(GRID_POINTS):
        yield smallest_segment + (highest - smallest_segment) * point / (GRID_POINTS - 1)


def _keep_at_limit(problem: Problem, candidates: dict[int, int], limit: float) -> tuple[set[int], int]:
    """What is kept when segments end at `limit` bytes, and the bytes of the largest segment."""
    graph = problem.graph
    kept: set[int] = set()
    segment = largest = 0
    for op in graph.ops:
        if op.phase is not Phase.FORWARD:
            continue
        segment += sum(graph.storages[s].nbytes for s in op.writes if graph.storages[s].role is Role.ACTIVATION)
        largest = max(largest, segment)
        ends = [s for s in op.writes if s in candidates]
        if segment > limit and ends:
            kept.update(ends)
            segment = 0
    return kept, largest


def _recompute_others(problem: Problem, candidates: dict[int, int], kept: set[int]) -> Schedule:
    return build(problem, drops=[Drop(storage, last + 1) for storage, last in candidates.items() if storage not in kept])
