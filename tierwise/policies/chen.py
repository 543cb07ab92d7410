"""chen: keep the activations at segment ends, compute the rest of each segment again when backward reaches it.

Paper    T. Chen, Xu, Zhang, Guestrin, arXiv 2016, 1604.06174; the search as in the authors' memonger.
Idea     with about √n segments of √n layers, memory grows with √n and the price is one more forward pass.
Rule     walk the forward ops adding up the bytes they make; where the sum passes b, keep that op's output and start again from zero.
         b comes from b ← √(x·y/2), x the bytes kept and y the largest segment, three times from b = 0, then a grid of six values up to √2·b;
         the plan with the least peak wins. segments="sqrt": keep every ⌊√n⌋-th candidate instead.
         A segment ends at an articulation point, behind an op whose output is all that the rest of forward needs, or, for steps that are no
         chains, behind any op; ends="auto" tries both.
Differs  what cannot be replayed (batch norm's running statistics) is kept.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator

from ..errors import BadInput
from ..ir import Graph, Phase, Problem, Role, Schedule, peak_bytes
from ._gaps import Drop, build, can_recompute
from ._layers import saved_for_backward

DECIDES = "recompute by segment"
FIDELITY = "faithful"
EXECUTABLE = True
FIXED_POINT_STEPS = 3
GRID_POINTS = 6


def plan(problem: Problem, *, segments: str = "search", ends: str = "auto") -> Schedule:
    if segments not in ("search", "sqrt"):
        raise BadInput(f"segments is {segments!r}; chen knows 'search' and 'sqrt'")
    if ends not in ("auto", "any", "articulation"):
        raise BadInput(f"ends is {ends!r}; chen knows 'auto', 'any' and 'articulation'")
    candidates = {storage: last for storage, last, _ in saved_for_backward(problem.graph) if can_recompute(problem, storage)}
    choices = [set(candidates)] if ends == "any" else [_articulations(problem.graph) & candidates.keys()]
    if ends == "auto":
        choices.append(set(candidates))
    plans: dict[frozenset[int], Schedule] = {}
    for may_end in choices:
        for kept in [_every_root(candidates, may_end)] if segments == "sqrt" else _searched(problem, may_end):
            plans.setdefault(frozenset(kept), _recompute_others(problem, candidates, kept))
    return min(plans.values(), key=lambda schedule: peak_bytes(problem, schedule)[problem.device_tier])


def _every_root(candidates: Iterable[int], may_end: Collection[int]) -> set[int]:
    every = max(1, math.isqrt(len(may_end)))
    return set([storage for storage in candidates if storage in may_end][every - 1 :: every])


def _searched(problem: Problem, may_end: Collection[int]) -> Iterator[set[int]]:
    for limit in _limits(problem, may_end):
        yield _keep_at_limit(problem, may_end, limit)[0]


def _limits(problem: Problem, candidates: Collection[int]) -> Iterator[float]:
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


def _keep_at_limit(problem: Problem, candidates: Collection[int], limit: float) -> tuple[set[int], int]:
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


def _articulations(graph: Graph) -> set[int]:
    """Storages that are all that the rest of forward needs of what came before, behind the op that made them."""
    last_read = {s.id: max((use for use in graph.readers[s.id] if graph.ops[use].phase is Phase.FORWARD), default=-1) for s in graph.storages}
    found: set[int] = set()
    needed: set[int] = set()
    for op in graph.ops:
        if op.phase is not Phase.FORWARD:
            continue
        needed.update(s for s in op.writes if graph.storages[s].role is Role.ACTIVATION)
        needed = {s for s in needed if last_read[s] > op.id}
        if len(needed) == 1:
            found |= needed
        elif not needed:
            found.update(op.writes)  # the end of forward, or of a part that nobody reads on
    return found


def _recompute_others(problem: Problem, candidates: dict[int, int], kept: set[int]) -> Schedule:
    return build(problem, drops=[Drop(storage, last + 1) for storage, last in candidates.items() if storage not in kept], kept=kept)
