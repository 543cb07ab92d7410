"""Send saved storages out a few behind the forward pass, and fetch them one use ahead in backward: what hooks on saved tensors do.

The stash holds the last few that were saved. When one more is saved, the device waits for the copy of the oldest and lets it go. The first use in
backward takes what is still in the stash and lets the rest of it go.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..ir import Graph
from ._gaps import Swap


def leaves_at(graph: Graph, storage: int, last: int) -> int:
    """The op before which a copy of a saved storage may begin: its last forward use, if that only reads it, or the op after."""
    return last if last in graph.readers[storage] else last + 1


def offload_behind(graph: Graph, saved: Sequence[tuple[int, int]], needs: Mapping[int, int], *, stash: int, tier: str) -> list[Swap]:
    """saved: (storage, last forward use) in that order. needs: the op for which each must be back; it is fetched when the use before that begins."""
    uses = sorted({needs[storage] for storage, _ in saved})
    before = dict(zip(uses, [uses[0], *uses] if uses else [], strict=False))
    swaps = []
    for place, (storage, last) in enumerate(saved):
        in_stash = place + stash >= len(saved)
        free_at = uses[0] + 1 if in_stash else max(saved[place + stash][1], last + 1)
        need = needs[storage]
        if need > free_at:
            out_at, in_at = leaves_at(graph, storage, last), max(before[need], free_at)
            swaps.append(Swap(storage, tier, out_at, free_at, in_at, join=True, join_back=False))
    return swaps
