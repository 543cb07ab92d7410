"""A plan of swaps in the making: the curve of bytes on the device, what the other tiers hold, and the gaps that are swapped.

Ops are counted on from one step into the next, so that a gap around the end of the step is a range like any other: in a step of 10 ops,
a storage gone at op 8 and fetched at op 13 is missing during ops 8 and 9, and 0 to 2.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

import numpy as np

from ..errors import InfeasibleBudget
from ..ir import Problem, Role
from ..units import format_bytes
from ._gaps import Gap, gap_seconds, gaps
from ._moves import Move, swap_tiers


@dataclass(slots=True)
class PlannedSwap:
    gap: Gap
    tier: str
    gone_at: int  # the first op without its bytes
    fetch_at: int  # the op before which it is fetched


class SwapPlan:
    """Swaps chosen so far, for a curve that should come under `line` bytes."""

    def __init__(self, problem: Problem, line: int) -> None:
        self.problem, self.line = problem, line
        self.ops = len(problem.graph.ops)
        self.tiers = swap_tiers(problem)
        self.chosen: list[PlannedSwap] = []
        self.resident = resident_bytes(problem)
        self.held = {tier: np.zeros(self.ops, dtype=np.int64) for tier in self.tiers}
        self.gaps = [gap for gap in gaps(problem) if gap.end > gap.start + 2]  # one op is no time to leave and return
        self.seconds = np.array([gap_seconds(problem, gap) for gap in self.gaps])
        self.weight = np.array([gap.nbytes for gap in self.gaps]) * self.seconds  # what is swapped first where nothing else decides

    def fits(self, nbytes: int) -> bool:
        return bool(self.resident.max(initial=0) <= nbytes)

    def is_pressed(self, start: int, end: int) -> bool:
        """Whether the curve is over the line at any of the ops from `start` until `end`, counted on."""
        return any(bool((self.resident[part] > self.line).any()) for part in self._within_step(start, end))

    def has_room(self, tier: str, gap: Gap) -> bool:
        capacity = self.problem.machine.capacity(tier)
        return int(self.held[tier][self._held_during(gap)].max(initial=0)) + gap.nbytes <= capacity

    def add(self, swap: PlannedSwap) -> None:
        self.chosen.append(swap)
        self.held[swap.tier][self._held_during(swap.gap)] += swap.gap.nbytes
        for missing in self._within_step(swap.gone_at, swap.fetch_at):
            self.resident[missing] -= swap.gap.nbytes

    def _held_during(self, gap: Gap) -> slice:
        """A home elsewhere is held all step long; any other copy for the time of the gap."""
        return slice(0, self.ops) if gap.wraps else slice(gap.start + 1, gap.end)

    def _within_step(self, start: int, end: int) -> Iterator[slice]:
        """The ops from `start` until `end`, counted on, as places in this step."""
        yield slice(start, min(end, self.ops))
        yield slice(max(0, start - self.ops), max(0, end - self.ops))

    # -- what the first choice left over --------------------------------------------------------------------------------------------

    def force(self) -> None:
        """Where the curve is still over the line: count on copies before they are done, fetch later, and swap more. All of it will wait."""
        taken = {(swap.gap.storage, swap.gap.start) for swap in self.chosen}
        begins: dict[int, list[PlannedSwap]] = {}
        for swap in self.chosen:
            if not swap.gap.wraps:
                begins.setdefault(swap.gap.start + 1, []).append(swap)
        opens: dict[int, list[int]] = {}
        for at, gap in enumerate(self.gaps):
            for op in {gap.start + 1, 0} if gap.wraps else {gap.start + 1}:
                opens.setdefault(op, []).append(at)
        out: list[tuple[int, int, PlannedSwap]] = []  # by when they are gone
        back: list[tuple[int, int, PlannedSwap]] = []  # by when they are needed, the last first
        spare: list[tuple[float, int]] = []  # gaps not chosen, by weight, the most first
        returns: dict[int, list[PlannedSwap]] = {}
        number = count()
        for op in range(self.ops):
            for swap in begins.get(op, ()):
                heapq.heappush(out, (swap.gone_at, next(number), swap))
                returns.setdefault(swap.fetch_at, []).append(swap)
            for swap in returns.pop(op, ()):
                heapq.heappush(back, (-swap.gap.end, next(number), swap))
            for at in opens.get(op, ()):
                heapq.heappush(spare, (-float(self.weight[at]), at))
            while self.resident[op] > self.line and out:
                self._give_back_at(op, heapq.heappop(out)[2])
            while self.resident[op] > self.line and back:
                swap = heapq.heappop(back)[2]
                if swap.gap.end > op:
                    self._fetch_after(op, swap)
                    returns.setdefault(swap.fetch_at, []).append(swap)
            while self.resident[op] > self.line and spare:
                gap = self.gaps[heapq.heappop(spare)[1]]
                if (gap.storage, gap.start) not in taken and self._swap_around(op, gap):
                    taken.add((gap.storage, gap.start))

    def _give_back_at(self, op: int, swap: PlannedSwap) -> None:
        """Count on its bytes from this op on, done or not."""
        if swap.gone_at > op:
            self.resident[op : swap.gone_at] -= swap.gap.nbytes
            swap.gone_at = op

    def _fetch_after(self, op: int, swap: PlannedSwap) -> None:
        """Put its fetch off until there is room again, or until it is needed."""
        fits = np.flatnonzero(self.resident[op : swap.gap.end] <= self.line)
        later = op + int(fits[0]) if len(fits) else swap.gap.end
        self.resident[swap.fetch_at : later] -= swap.gap.nbytes
        swap.fetch_at = later

    def _swap_around(self, op: int, gap: Gap) -> bool:
        """Swap a gap that lies around this op, to the fastest tier with room."""
        tier = next((tier for tier in self.tiers if self.has_room(tier, gap)), None)
        if tier is None or not (gap.start < op < gap.end or op + self.ops < gap.end):
            return False
        self.add(PlannedSwap(gap, tier, gap.start + 1 if gap.wraps else op, gap.end))
        return True

    def pull_earlier(self) -> None:
        """Use the memory that is left to fetch sooner than must be."""
        for swap in sorted(self.chosen, key=lambda swap: swap.fetch_at):
            step = self.ops if swap.gap.wraps else 0  # a fetch cannot begin before its step
            earliest, fetch = max(swap.gone_at - step, 0), swap.fetch_at - step
            full = np.flatnonzero(self.resident[earliest:fetch] + swap.gap.nbytes > self.line)
            sooner = earliest + int(full[-1]) + 1 if len(full) else earliest
            self.resident[sooner:fetch] += swap.gap.nbytes
            swap.fetch_at = sooner + step

    # -- what comes of it -----------------------------------------------------------------------------------------------------------

    def moves(self) -> list[Move]:
        out = [Move(swap.gap.start + 1, swap.gap.storage, swap.tier) for swap in self.chosen]
        back = sorted(self.chosen, key=lambda swap: (swap.fetch_at % self.ops, swap.gap.end % self.ops))
        return out + [
            Move(swap.fetch_at - self.ops if swap.gap.wraps else swap.fetch_at, swap.gap.storage, self.problem.device_tier) for swap in back
        ]

    def homes(self) -> dict[int, tuple[str, ...]]:
        """Where lasting storages live: what the plan sends out between steps, and whatever else cannot all be on the device at once."""
        homes: dict[int, tuple[str, ...]] = {swap.gap.storage: (swap.tier,) for swap in self.chosen if swap.gap.wraps}
        here = [s for s in self.problem.graph.storages if (s.lasting or s.role is Role.INPUT) and s.id not in homes]
        excess = sum(s.nbytes for s in here) - self.problem.budget_bytes
        for storage in sorted((s for s in here if s.lasting), key=lambda s: (-self._idle_seconds(s.id) * s.nbytes, s.id)):
            if excess <= 0:
                break
            for tier in self.tiers:
                if int(self.held[tier].max(initial=0)) + storage.nbytes <= self.problem.machine.capacity(tier):
                    self.held[tier] += storage.nbytes
                    homes[storage.id] = (tier,)
                    excess -= storage.nbytes
                    break
        if excess > 0:
            raise InfeasibleBudget(f"no plan within {format_bytes(self.problem.budget_bytes)}: lasting storages and inputs take "
                                   f"{format_bytes(excess)} more than fits there and in {' and '.join(self.tiers)}; use a larger budget")  # fmt: skip
        return homes

    def _idle_seconds(self, storage: int) -> float:
        """Between its last use and its first in the next step."""
        uses, starts = self.problem.graph.uses[storage], self.problem.op_starts
        return starts[-1] - starts[uses[-1] + 1] + starts[uses[0]] if uses else starts[-1]


def resident_bytes(problem: Problem) -> np.ndarray:
    """Bytes on the device while each op runs, if nothing is moved."""
    graph = problem.graph
    change = np.zeros(len(graph.ops) + 1, dtype=np.int64)
    for storage in graph.storages:
        uses = graph.uses[storage.id]
        if storage.lasting:
            change[0] += storage.nbytes
        elif uses:
            change[0 if storage.role is Role.INPUT else uses[0]] += storage.nbytes
            change[uses[-1] if storage.id in graph.consumed_by else uses[-1] + 1] -= storage.nbytes
    return np.cumsum(change[:-1]) + np.array([op.workspace_bytes for op in graph.ops], dtype=np.int64)
