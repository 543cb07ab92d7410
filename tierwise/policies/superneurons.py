"""superneurons: compute cheap layers again; when bytes run out, send outputs of costly ones to the host, the least recently used first.

Paper    Wang, Ye, Zhao, Wu, Li, Song, Xu, Kraska, PPoPP 2018, arXiv:1801.04380; recomputation as in the authors' release.
Idea     convolutions take the time, the layers between them take the memory: recompute these, move the others, and one layer is all that must fit.
Rule     checkpoints are the outputs of CONV, FC, JOIN and CONCAT layers and what several layers read (FORK); all else that backward reads is dropped.
         l_peak = the most bytes one backward layer touches. A segment between checkpoints whose outputs sum to at most l_peak is computed once and
         stays for its backward (speed-centric); a larger one anew for each layer, from its checkpoint (memory-centric).
         Nothing is copied until bytes run out; then the least recently used goes to the host (tensor cache). In backward, while a checkpoint
         layer runs, what the next one reads is fetched, if there is room. Each op runs by the fastest kernel whose workspace then fits.
Differs  kernels are the step's variants, and captured steps have none unless they are given. Attention counts as FC. l_peak is taken over ops.
         A copy on the host that still holds is not written twice. The release fetches on demand (prefetch=False).
"""

from __future__ import annotations

from ..ir import Compute, Graph, Op, Phase, Problem, Role, Schedule
from ._cache import swap_least_recent
from ._gaps import Drop, build, can_recompute
from ._layers import is_conv, is_dense, saved_for_backward
from ._room import fastest_with_room

DECIDES = "recompute by layer type, swap the rest when bytes run out; kernels"
FIDELITY = "faithful"
EXECUTABLE = "simulated only: it sends out what was used longest ago at the op whose allocation fails, where no region begins or ends"
REQUIRES = {"dram"}


def plan(problem: Problem, *, prefetch: bool = True, tier: str = "dram") -> Schedule:
    graph = problem.graph
    kept = checkpoints(graph)
    dropped = [
        Drop(storage, last + 1)
        for storage, last, needed in saved_for_backward(graph)
        if storage not in kept and needed > last + 1 and can_recompute(problem, storage)
    ]
    large = _memory_centric(graph, kept)
    recomputed = build(problem, drops=dropped, keep_recomputed=lambda storage, _, __: storage not in large, kept=kept)
    cached = swap_least_recent(
        problem,
        recomputed,
        tier=tier,
        movable=lambda storage: graph.storages[storage].role in (Role.ACTIVATION, Role.INPUT) and not graph.storages[storage].lasting,
        ahead=_prefetches(graph, recomputed) if prefetch else {},
    )
    return fastest_with_room(problem, cached)


def checkpoints(graph: Graph) -> set[int]:
    """Storages that are kept: what costly layers make, and where branches part or meet."""
    made = {storage for op in graph.ops if op.phase is Phase.FORWARD and _is_checkpoint(graph, op) for storage in op.writes}
    return made | {storage.id for storage in graph.storages if storage.role is Role.ACTIVATION and len(_layers_that_read(graph, storage.id)) > 1}


def _is_checkpoint(graph: Graph, op: Op) -> bool:
    joins = op.kind == "add" and sum(graph.storages[read].role is Role.ACTIVATION for read in op.reads) > 1
    return is_conv(op) or is_dense(op) or joins or op.kind == "cat"


def _layers_that_read(graph: Graph, storage: int) -> list[int]:
    """Forward ops that make something of it; keeping running statistics is no layer."""
    return [op for op in graph.readers[storage] if graph.ops[op].phase is Phase.FORWARD and graph.ops[op].writes]


def _memory_centric(graph: Graph, kept: set[int]) -> set[int]:
    """The storages of segments that are larger than the most bytes any backward layer touches."""
    peak = max((_touched_bytes(graph, op) for op in graph.ops if op.phase is Phase.BACKWARD), default=0)
    segment_of: dict[int, int] = {}  # op -> a name for the run of cheap layers it is in
    members: dict[int, list[int]] = {}
    for op in graph.ops:
        if op.phase is not Phase.FORWARD or not op.writes or all(storage in kept for storage in op.writes):
            continue
        makers = {graph.producer(read) for read in op.reads if read not in kept}
        joined = sorted({segment_of[maker] for maker in makers if maker is not None and maker in segment_of})
        name = joined[0] if joined else op.id
        members.setdefault(name, []).append(op.id)
        for other in joined[1:]:
            members[name] += members.pop(other)
        segment_of.update(dict.fromkeys(members[name], name))
    large: set[int] = set()
    for ops in members.values():
        made = {storage for op in ops for storage in graph.ops[op].writes if storage not in kept}
        if sum(graph.storages[storage].nbytes for storage in made) > peak:
            large |= made
    return large


def _touched_bytes(graph: Graph, op: Op) -> int:
    touched = dict.fromkeys(op.reads + op.writes + op.mutates)
    return op.workspace_bytes + sum(graph.storages[s].nbytes for s in touched if graph.storages[s].role is Role.ACTIVATION)


def _prefetches(graph: Graph, schedule: Schedule) -> dict[int, tuple[int, ...]]:
    """Where a checkpoint layer's backward runs: what the next one to run reads."""
    found: dict[int, tuple[int, ...]] = {}
    waiting: list[int] = []
    for place, step in enumerate(schedule.steps):
        if not isinstance(step, Compute):
            continue
        op = graph.ops[step.op]
        if op.phase is Phase.BACKWARD and (is_conv(op) or is_dense(op)):
            found.update(dict.fromkeys(waiting, op.reads))
            waiting = [place]
    return found
