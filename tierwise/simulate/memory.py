"""Who held how many bytes of which tier, when: a log of changes, turned into curves and peaks at the end."""

from __future__ import annotations

import numpy as np

from ..ir import Curve


class MemoryLog:
    """Changes (when, bytes) by tier and role, over all periods played."""

    def __init__(self) -> None:
        self._changes: dict[tuple[str, str], list[tuple[float, int]]] = {}

    def add(self, tier: str, role: str, when: float, nbytes: int) -> None:
        key = (tier, role)
        changes = self._changes.get(key)
        if changes is None:
            changes = self._changes[key] = []
        changes.append((when, nbytes))

    def curves(self, tiers: tuple[str, ...], start: float, end: float) -> tuple[dict[str, int], dict[str, dict[str, Curve]]]:
        """Peaks by tier and curves by tier and role between two times; times in the curves count from `start`."""
        found: dict[str, dict[str, Curve]] = {tier: {} for tier in tiers}
        totals: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {tier: [] for tier in tiers}
        for (tier, role), changes in self._changes.items():
            when = np.array([c[0] for c in changes])
            nbytes = np.array([c[1] for c in changes], dtype=np.int64)
            totals[tier].append((when, nbytes))
            found[tier][role] = _curve(when, nbytes, start, end)
        peaks = {}
        for tier, parts in totals.items():
            peaks[tier] = 0
            if parts:
                total = _curve(np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts]), start, end)
                peaks[tier] = max(total.nbytes, default=0)
        return peaks, found


class Unread(MemoryLog):
    """For whoever asks for none of that."""

    def add(self, tier: str, role: str, when: float, nbytes: int) -> None:
        pass


def _curve(when: np.ndarray, nbytes: np.ndarray, start: float, end: float) -> Curve:
    order = np.lexsort((nbytes, when))  # at one instant, bytes are given back before they are taken
    when, level = when[order], np.cumsum(nbytes[order])
    last = np.append(when[1:] != when[:-1], True)
    when, level = when[last], level[last]
    first = int(np.searchsorted(when, start, side="right"))
    past = int(np.searchsorted(when, end, side="right"))
    opening = int(level[first - 1]) if first else 0
    when, level = when[first:past], level[first:past]
    changed = np.append([opening], level[:-1]) != level if len(level) else np.zeros(0, dtype=bool)
    return Curve((0.0, *(when[changed] - start).tolist()), (opening, *level[changed].tolist()))
