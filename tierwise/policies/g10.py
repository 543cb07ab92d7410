"""g10: place evictions and fetches on a timeline of bandwidth, the most pressure relieved per choice first, to the disk or to the host.

Paper    Zhang, Zhou, Xue, Liu, Huang, G10, MICRO 2023, arXiv:2310.09443.
Idea     when kernels and their times are known, so are the idle gaps of every tensor; fill them with copies the links can carry in that time.
Rule     pick the gap with the most  bytes * (time over the line between half out and half back);  disk if  gap > (2 + margin) * copy,  the host if
         that is too slow or the disk's lane is full;  out at the gap's start, back as late as the buckets let, if out ends before back begins;
         until the curve is under the line. Last, pull each fetch earlier while the curve stays under it.
Differs  whole storages, not pages. Where that leaves the curve over the line, bytes are counted on before their copy is done, fetches put off, and
         more gaps swapped, in the order of bytes * seconds (_swaps.py); the paper leaves it to its driver. What is missed even so is caught on
         demand (_moves.py): late copies are waited for, and the storage needed last goes, where the driver takes the least recently used. What is
         up to date elsewhere is not written again. A weight kept elsewhere between steps comes back from the start of its step on, not earlier.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from ..ir import Problem, Schedule
from ._buckets import Buckets
from ._gaps import Gap
from ._moves import Move, carry_out
from ._swaps import PlannedSwap, SwapPlan

DECIDES = "swap to host or disk, and when"
FIDELITY = "faithful"
EXECUTABLE = True
BLOCK = 512  # benefits brought up to date at a time; any number gives the same plan


def plan(problem: Problem, *, line: float = 0.99, margin: float = 0.5) -> Schedule:
    """line: the share of the budget to plan for. margin: the slack asked of a gap, in copies."""
    target = int(line * problem.budget_bytes)
    swaps = SwapPlan(problem, target)
    if swaps.fits(problem.budget_bytes):
        return carry_out(problem, ())
    _Greedy(swaps, target, margin, {}).run()
    swaps.force()
    swaps.pull_earlier()
    return carry_out(problem, swaps.moves(), home=swaps.homes())


def moves_without_paging(
    problem: Problem, *, line_bytes: int, latency_seconds: Mapping[str, float], margin: float = 0.5, relieve_peak: float = 0.9
) -> list[Move]:
    """What the artifact plans for its variants without paging, where only the planner knows a capacity.

    It plans a cold step as one of many, gives the copies around its ends no place in the buckets, and counts pressure from the budget on, though
    it stops at line_bytes; latency_seconds are allowed for a copy, by tier. Last, it brings the op that was fullest at first below relieve_peak
    of the line, with gaps that are fetched on demand.
    """
    swaps = SwapPlan(replace(problem, cyclic=True), line_bytes)
    fullest = int(swaps.resident.argmax())
    _Greedy(swaps, problem.budget_bytes, margin, latency_seconds, wraps_are_free=True).run()
    swaps.pull_earlier()
    return swaps.moves() + _relieve(swaps, fullest, relieve_peak * line_bytes)


def _relieve(swaps: SwapPlan, op: int, target: float) -> list[Move]:
    """Send out gaps around an op, the most bytes times seconds first, until it is below the target."""
    taken = {(swap.gap.storage, swap.gap.start) for swap in swaps.chosen}
    moves = []
    for at in np.argsort(-swaps.weight, kind="stable"):
        gap = swaps.gaps[at]
        if swaps.resident[op] < target:
            break
        if not gap.wraps and gap.start < op < gap.end and (gap.storage, gap.start) not in taken:
            swaps.resident[gap.start + 2 : gap.end] -= gap.nbytes
            moves.append(Move(gap.start + 1, gap.storage, swaps.tiers[-1]))
    return moves


class _Greedy:
    """Adds swaps to a plan while the links can carry them."""

    def __init__(self, swaps: SwapPlan, pressure: int, margin: float, latency: Mapping[str, float], *, wraps_are_free: bool = False) -> None:
        self.swaps, self.pressure, self.margin, self.latency, self.wraps_are_free = swaps, pressure, margin, latency, wraps_are_free
        self.problem, self.ops, self.gaps = swaps.problem, swaps.ops, swaps.gaps
        self.near, self.far = swaps.tiers[0], swaps.tiers[-1]
        device, link = self.problem.device_tier, self.problem.machine.link
        self.out = {tier: link(device, tier) for tier in swaps.tiers}
        self.back = {tier: link(tier, device) for tier in swaps.tiers}
        self.buckets = Buckets(self.problem.device_seconds, [*self.out.values(), *self.back.values()])
        self.seconds, self.starts = np.array(self.problem.device_seconds), np.array(self.problem.op_starts)
        self.half = np.array([gap.nbytes / 2 for gap in self.gaps])
        self.first = np.array([gap.start + 1 for gap in self.gaps], dtype=np.int64)
        self.wraps = np.array([gap.wraps for gap in self.gaps], dtype=bool)
        self.last = np.array([self._last(gap) for gap in self.gaps], dtype=np.int64)
        self.open = np.arange(len(self.gaps))  # neither accepted nor rejected
        self.bound = np.full(len(self.gaps), np.inf)  # of those: at least their benefit
        self.fresh = np.zeros(len(self.gaps), dtype=bool)  # of those: whether that is their benefit now
        self.pressed = np.zeros(self.ops + 1)

    def _last(self, gap: Gap) -> int:
        """The op that ends a gap, as a place in its own step."""
        return gap.end - self.ops if gap.wraps else gap.end

    def run(self) -> None:
        """Accept or reject the most beneficial gap until the curve is under the line."""
        self._update_pressure()
        while not self.swaps.fits(self.swaps.line):
            best = self._take_most_beneficial()
            if best is None:
                break
            swap = self._place(self.gaps[best], float(self.swaps.seconds[best]))
            if swap is not None:
                self.swaps.add(swap)
                self._update_pressure()

    # -- the benefit ----------------------------------------------------------------------------------------------------------------

    def _take_most_beneficial(self) -> int | None:
        """The gap with the most benefit, by weight if several have. Benefits only fall while the plan grows, so an old one is an upper bound,
        and only those that could be the most are brought up to date."""
        bound, fresh = self.bound, self.fresh
        most = float(bound[fresh].max(initial=0.0))
        block = BLOCK
        while True:
            stale = np.flatnonzero((bound > 0.0) & (bound >= most) & ~fresh)
            if not len(stale):
                break
            if len(stale) > block:
                stale = stale[np.argpartition(-bound[stale], block)[:block]]
                block *= 2
            bound[stale] = self._benefit(self.open[stale])
            fresh[stale] = True
            most = max(most, float(bound[stale].max()))
        if most <= 0:
            return None
        tied = np.flatnonzero(bound == most)
        at = tied[np.argmax(self.swaps.weight[self.open[tied]])]
        best = int(self.open[at])
        bound[at] = 0.0
        if 2 * np.count_nonzero(bound) < len(bound):
            left = bound > 0
            self.open, self.bound, self.fresh = self.open[left], bound[left], fresh[left]
        return best

    def _update_pressure(self) -> None:
        """Seconds over the line before each op; every benefit is then out of date."""
        np.cumsum(np.where(self.swaps.resident > self.pressure, self.seconds, 0.0), out=self.pressed[1:])
        self.fresh[:] = False

    def _benefit(self, which: np.ndarray) -> np.ndarray:
        """Bytes times the seconds over the line from half out to half back."""
        first, last, half, wraps = self.first[which], self.last[which], self.half[which], self.wraps[which]
        half_out = self.buckets.end_ops(self.out[self.far], first, half)
        half_back = np.maximum(self.buckets.start_ops(self.back[self.far], last, half), 0)
        if self.wraps_are_free:
            half_out, half_back = np.where(wraps, first, half_out), np.where(wraps, last, half_back)
        seconds = self.pressed[half_back] - self.pressed[half_out] + np.where(wraps, self.pressed[-1], 0.0)
        benefit: np.ndarray = 2 * half * np.maximum(seconds, 0.0)
        return benefit

    # -- the place ------------------------------------------------------------------------------------------------------------------

    def _place(self, gap: Gap, seconds: float) -> PlannedSwap | None:
        """Put a gap's two copies on the timeline, if there is time and room."""
        tier = self._tier(gap, seconds)
        if tier is None:
            return None
        if gap.wraps and self.wraps_are_free:
            return PlannedSwap(gap, tier, *self._alone(gap, tier))
        gone, fetch = self._between_others(gap, tier)
        if fetch < gone:
            return None
        left = self.buckets.fill_from(self.out[tier], gap.start + 1, self._bytes_sent(gap))
        if gap.wraps and left:
            self.buckets.fill_from(self.out[tier], 0, left)
        self.buckets.fill_until(self.back[tier], self._last(gap), gap.nbytes)
        return PlannedSwap(gap, tier, gone, fetch)

    def _between_others(self, gap: Gap, tier: str) -> tuple[int, int]:
        """The first op without the bytes, and the op to fetch them at, as the buckets are now."""
        first, out, sent = gap.start + 1, self.out[tier], self._bytes_sent(gap)
        end = self.buckets.end_op(out, first, sent)
        if gap.wraps and end == self.ops:
            end += self.buckets.end_op(out, 0, sent - self.buckets.spare_bytes(out, first, self.ops))
        begin = self.buckets.start_op(self.back[tier], self._last(gap), gap.nbytes)
        if begin < 0:
            return end + 1, -1  # a fetch cannot begin before its step
        return end + 1, begin + self.ops if gap.wraps else begin

    def _alone(self, gap: Gap, tier: str) -> tuple[int, int]:
        """The same, as if nothing else were copied."""
        twice = np.concatenate((self.starts, self.starts[-1] + self.starts[1:]))
        out = self._copy_seconds(gap.nbytes, self.problem.device_tier, tier)
        back = self._copy_seconds(gap.nbytes, tier, self.problem.device_tier) * (1 + self.margin)
        gone = int(np.searchsorted(twice, twice[gap.start + 1] + out, side="right"))
        fetch = int(np.searchsorted(twice, twice[gap.end] - back, side="right")) - 1
        return gone, max(fetch, self.ops)

    def _bytes_sent(self, gap: Gap) -> int:
        """What no op writes is still at home when its gap around the end of the step begins."""
        return gap.nbytes if self.problem.graph.writers[gap.storage] or not gap.wraps else 0

    def _tier(self, gap: Gap, seconds: float) -> str | None:
        near = self.near if self.swaps.has_room(self.near, gap) else None
        if seconds > self._safe_seconds(self.far, gap.nbytes) and self.swaps.has_room(self.far, gap):
            return near if near and not (gap.wraps and self.wraps_are_free) and self._is_crowded(gap) else self.far
        return near if near and seconds > self._safe_seconds(near, gap.nbytes) else None

    def _safe_seconds(self, tier: str, nbytes: int) -> float:
        device = self.problem.device_tier
        return self._copy_seconds(nbytes, device, tier) + self._copy_seconds(nbytes, tier, device) * (1 + self.margin)

    def _copy_seconds(self, nbytes: int, src: str, dst: str) -> float:
        allowed = self.latency.get(dst if src == self.problem.device_tier else src, 0.0)
        return allowed + self.problem.machine.copy_seconds(nbytes, src, dst)

    def _is_crowded(self, gap: Gap) -> bool:
        """Whether the far tier's lane is full for as long as the copy out would take alone."""
        first = gap.start + 1
        alone = self.starts[first] + self._copy_seconds(gap.nbytes, self.problem.device_tier, self.far)
        until = min(gap.end, self.ops, int(np.searchsorted(self.starts, alone, side="right")) - 1)
        return not self.buckets.spare_bytes(self.out[self.far], first, until)
