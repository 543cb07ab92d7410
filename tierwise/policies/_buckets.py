"""Bandwidth buckets: how much each lane can still carry while each op runs.

On the ideal timeline (all ops in order, every byte there) an op that lasts t seconds gives each lane t seconds of work. A copy issued at an
op fills the buckets from there on, and the op in whose bucket it ends is when its bytes are gone; one that must be done before an op fills
the buckets before it, backwards, and the earliest of them is when it must be issued. A copy over several lanes moves in each bucket what the
fullest of them lets through. Sums from the left make both questions a binary search.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..ir import Link

ROUNDING = 1e-9  # of a bucket


class Buckets:
    """The spare seconds of every lane, op by op."""

    def __init__(self, op_seconds: Sequence[float], links: Sequence[Link]) -> None:
        self.ops = len(op_seconds)
        self._links = tuple(links)
        self._spare = {lane: np.array(op_seconds, dtype=float) for link in links for lane in link.lanes}
        whole = slice(0, self.ops)
        # By link: bytes it can carry before each op starts, counted from the first; one more entry, the whole step.
        self._carried = {(link.src, link.dst): np.concatenate(([0.0], np.cumsum(self._per_op(link, whole)))) for link in links}

    def end_op(self, link: Link, start: int, nbytes: float) -> int:
        """The op during which a copy issued at op `start` ends; the number of ops if it does not end with the step."""
        carried = self._carried[link.src, link.dst]
        return min(self.ops, max(start, int(carried.searchsorted(carried[start] + nbytes, side="left")) - 1))

    def start_op(self, link: Link, end: int, nbytes: float) -> int:
        """The latest op a copy can be issued at to be done when op `end` starts; -1 if the step begins too late for it."""
        carried = self._carried[link.src, link.dst]
        return min(end - 1, int(carried.searchsorted(carried[end] - nbytes, side="right")) - 1)

    def end_ops(self, link: Link, starts: np.ndarray, nbytes: np.ndarray) -> np.ndarray:
        """`end_op` of many copies, each as if it were alone."""
        carried = self._carried[link.src, link.dst]
        ends: np.ndarray = np.maximum(starts, carried.searchsorted(carried[starts] + nbytes, side="left") - 1)
        capped: np.ndarray = np.minimum(self.ops, ends)
        return capped

    def start_ops(self, link: Link, ends: np.ndarray, nbytes: np.ndarray) -> np.ndarray:
        """`start_op` of many copies, each as if it were alone."""
        carried = self._carried[link.src, link.dst]
        starts: np.ndarray = carried.searchsorted(carried[ends] - nbytes, side="right") - 1
        capped: np.ndarray = np.minimum(ends - 1, starts)
        return capped

    def spare_bytes(self, link: Link, start: int, end: int) -> float:
        """What can still be carried from op `start` until op `end` starts."""
        return float(self._per_op(link, slice(start, end)).sum())

    def fill_from(self, link: Link, start: int, nbytes: float) -> float:
        """Take what a copy issued at op `start` needs; returns the bytes left over at the end of the step."""
        return self._fill(link, slice(start, min(self.ops, self.end_op(link, start, nbytes) + 1)), nbytes, backwards=False)

    def fill_until(self, link: Link, end: int, nbytes: float) -> float:
        """Take what a copy that must be done when op `end` starts needs, as late as possible; returns the bytes left over at the start."""
        return self._fill(link, slice(max(0, self.start_op(link, end, nbytes)), end), nbytes, backwards=True)

    def _fill(self, link: Link, where: slice, nbytes: float, *, backwards: bool) -> float:
        carried = self._per_op(link, where)
        order = carried[::-1] if backwards else carried
        taken = np.clip(nbytes - (np.cumsum(order) - order), 0.0, order)
        if backwards:
            taken = taken[::-1]
        for lane, rate in link.lanes.items():
            rest = self._spare[lane][where] - taken / rate
            # What rounding leaves of a bucket counts as nothing, or a full lane would never look full.
            self._spare[lane][where] = np.where(rest > ROUNDING * taken / rate, rest, 0.0)
        for other in self._links:
            if other.lanes.keys() & link.lanes.keys():
                self._sum_up(other, where)
        return max(0.0, nbytes - float(carried.sum()))

    def _sum_up(self, link: Link, where: slice) -> None:
        """Bring the sums up to date after a change of these buckets; those behind them only shift."""
        sums = self._carried[link.src, link.dst]
        before = sums[where.stop]
        sums[where.start + 1 : where.stop + 1] = sums[where.start] + np.cumsum(self._per_op(link, where))
        sums[where.stop + 1 :] += sums[where.stop] - before

    def _per_op(self, link: Link, where: slice) -> np.ndarray:
        carried = [self._spare[lane][where] * rate for lane, rate in link.lanes.items()]
        return carried[0] if len(carried) == 1 else np.minimum.reduce(carried)
