"""capuchin: swap what the link carries for nothing, then for each tensor whichever costs less, the rest of a swap or a recomputation.

Paper    Peng, Shi, Dai, Jin, Ma, Xiong, Yang, Qian, ASPLOS 2020.
Idea     how long a tensor lies idle, how long its copies take and how long its op takes are all known after one step: choose with numbers.
Rule     candidates: idle gaps that cover ops at which memory is short.  FreeTime = gap − copy out − copy back.
         Swaps first, longest FreeTime first, while the lanes hide them; a fetch is triggered as late as it is still in time, behind the peak.
         Then the most bytes per second of overhead (MSPS), each by its cheaper way: swap, for the seconds by which its copies overrun the time
         before memory is short and after; or recompute, for the seconds of its lineage, once more for each recomputation it is a source of.
         What was chosen for recomputation stops being a source: whoever was made from it is made from its sources. Until everything fits.
         Targets that come back on the way to another stay if there is room (collective recomputation).
Differs  the watched step is the cost table; run-time feedback is a few rounds of the clock, in which late fetches are triggered earlier by 5%
         of their copy or by one op, while that fits and helps. Candidates are all storages that live within one step, weight gradients and
         inputs too. Hidden swaps must be gone where memory is shortest. Drops that others made superfluous are taken back. Where it
         decides, recomputation is also counted as if all targets on the way stayed, and the faster plan is kept. If recomputation needs more
         room on its way than there is, more is made there, or it is given up. As a last resort everything idle is swapped, and the device waits.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ..errors import InfeasibleBudget
from ..ir import Compute, Copy, Link, Phase, Problem, Schedule, Timeline, peak_bytes
from ..simulate import simulate
from ..units import format_bytes
from ._buckets import Buckets
from ._gaps import Drop, Gap, Swap, build, can_recompute, device_bytes, gap_seconds, gaps
from ._lineage import Lineages

DECIDES = "swap or recompute"
FIDELITY = "faithful"
EXECUTABLE = True
REQUIRES = {"dram"}
FEEDBACK_SHARE = 0.05  # a late fetch is triggered earlier by this share of its copy
MAX_CORRECTIONS = 8  # how often the choice goes on after recomputations turned out to need room themselves


def plan(problem: Problem, *, tier: str = "dram", feedback_rounds: int = 3) -> Schedule:
    everything = build(problem)
    if peak_bytes(problem, everything)[problem.device_tier] <= problem.budget_bytes:
        return everything
    found: list[tuple[float, Schedule]] = []
    for collective in (False, True):
        choice = _Choice(problem, tier, collective=collective)
        schedule = choice.make()
        if schedule is not None:
            found.append(_with_feedback(choice, schedule, feedback_rounds))
        if not choice.doubtful:
            break
    return min(found, key=lambda timed: timed[0])[1] if found else _everything_away(problem, tier)


@dataclass(slots=True)
class _Candidate:
    gap: Gap
    free_seconds: float
    swapped: bool = False
    dropped: bool = False
    banned: bool = False  # from being dropped: there was no room to make it again
    gone: int = 0  # once swapped: the first op that counts on its bytes
    trigger: int = 0  # ... and the op before which it is fetched


@dataclass(frozen=True, slots=True)
class _Offer:
    """What a candidate can do about the ops at which memory is short."""

    seconds: float
    swap: bool
    doubtful: bool  # whether the other way of counting recomputations would decide otherwise
    first: int  # the first and the last of these ops within its gap
    last: int


class _Choice:
    """What is swapped and dropped so far, and the memory curve it leaves.

    collective: whether a recomputation is compared with a swap as if what comes back on its way always stayed for those who need it next.
    """

    def __init__(self, problem: Problem, tier: str, *, collective: bool) -> None:
        self.problem, self.tier, self.collective = problem, tier, collective
        self.over = np.array(problem.graph.live_bytes, dtype=np.int64) - problem.budget_bytes  # bytes too many at each op
        self.elsewhere = np.zeros(len(self.over) + 1, dtype=np.int64)  # bytes in the other tier before each op
        self.out = problem.machine.link(problem.device_tier, tier)
        self.back = problem.machine.link(tier, problem.device_tier)
        self.buckets = Buckets(problem.device_seconds, (self.out, self.back))
        self.lineages = Lineages(problem)
        self.sources: dict[tuple[int, int], frozenset[int]] = {}  # (storage, op it comes back for) of each drop -> what it is made from
        self.source_of: dict[int, set[tuple[int, int]]] = {}
        self.candidates = sorted(
            (_Candidate(gap, gap_seconds(problem, gap) - self._copy_seconds(gap)) for gap in _idle(problem)),
            key=lambda candidate: (-candidate.free_seconds, candidate.gap.storage, candidate.gap.start),
        )
        self.swapped: dict[int, list[_Candidate]] = {}
        self.again: set[int] = set()  # ops that run again
        self.reserved = np.zeros_like(self.over)  # bytes asked for at each op because the last schedule lacked them
        self.doubtful = False  # whether a swap was chosen, or not, for the way recomputations are counted

    def make(self) -> Schedule | None:
        self.hide()
        for _ in range(MAX_CORRECTIONS):
            self.pay()
            if self.fits():
                self.take_back()
                schedule = self.schedule()
                excess = np.array(device_bytes(self.problem, schedule), dtype=np.int64) - self.problem.budget_bytes
                if excess.max() <= 0:
                    return schedule
                self.reserved = np.maximum(excess, 0)
                self.over += self.reserved
            elif not self._ban_cramped():
                return None
        return None

    def _ban_cramped(self) -> bool:
        """Give up recomputing for the ops where the last schedule had too little room, and the room that was asked for it. Whether that was any."""
        cramped = [c for c in self.candidates if c.dropped and self.reserved[c.gap.end]]
        for candidate in cramped:
            candidate.banned = True
            self._undrop(candidate)
        self.over -= self.reserved
        self.reserved[:] = 0
        return bool(cramped)

    @property
    def shortest(self) -> int:
        """The op at which most bytes are too many."""
        return int(self.over.argmax())

    def fits(self) -> bool:
        return bool(self.over[self.shortest] <= 0)

    def schedule(self) -> Schedule:
        room = -self.over

        def keeps(storage: int, reader: int, next_use: int) -> bool:
            nbytes = self.problem.graph.storages[storage].nbytes
            if room[reader:next_use].min() < nbytes:
                return False
            room[reader:next_use] -= nbytes
            return True

        in_turn = sorted(self.candidates, key=lambda c: (c.gap.end, c.gap.storage))  # of fetches with one trigger, what is needed first comes first
        leaves = [(c, c.gap.start + 1) for c in in_turn]
        swaps = [Swap(c.gap.storage, self.tier, out_at=at, free_at=at, in_at=c.trigger) for c, at in leaves if c.swapped]
        return build(self.problem, swaps, [Drop(c.gap.storage, at) for c, at in leaves if c.dropped], keep_recomputed=keeps)

    def fetch_earlier(self, late: set[tuple[int, int]]) -> bool:
        """Trigger these fetches, each known by its storage and the op that waits for it, earlier where there is room. Whether any was moved."""
        starts, moved = self.problem.op_starts, False
        for c in self.candidates:
            if c.swapped and (c.gap.storage, c.gap.end) in late and c.trigger > c.gone:
                seconds = FEEDBACK_SHARE * self.problem.machine.copy_seconds(c.gap.nbytes, self.tier, self.problem.device_tier)
                trigger = max(c.gone, min(c.trigger - 1, bisect_right(starts, starts[c.trigger] - seconds) - 1))
                if self.over[trigger : c.trigger].max() + c.gap.nbytes <= 0:
                    self._swap(c, c.gone, trigger)
                    moved = True
        return moved

    # -- what costs nothing -------------------------------------------------------------------------------------------------------

    def hide(self) -> None:
        """Swaps that the spare time of both lanes hides and that are gone where memory is shortest, again and again while there are any."""
        waiting, taken = [c for c in self.candidates if c.free_seconds >= 0], True
        while taken and not self.fits():
            taken = False
            for candidate in waiting:
                gone, trigger = self._copies(candidate.gap)
                if gone <= self.shortest < trigger and not candidate.swapped and self._has_room_elsewhere(candidate.gap):
                    self._swap(candidate, gone, trigger)
                    taken = True
                    if self.fits():
                        return

    # -- what costs ---------------------------------------------------------------------------------------------------------------

    def pay(self) -> None:
        """One after the other, whichever saves most bytes for a second of overhead, by the cheaper of its two ways."""
        queue: list[tuple[float, int]] = []
        for index, candidate in enumerate(self.candidates):
            offer = self._offer(candidate)
            if offer is not None:
                queue.append((offer.seconds / candidate.gap.nbytes, index))
        heapq.heapify(queue)
        while queue and not self.fits():
            _, index = heapq.heappop(queue)
            candidate = self.candidates[index]
            offer = self._offer(candidate)
            if offer is None or offer.seconds == float("inf"):
                continue
            price = offer.seconds / candidate.gap.nbytes
            if queue and price > queue[0][0]:  # dearer than when it was put in line
                heapq.heappush(queue, (price, index))
                continue
            self.doubtful |= offer.doubtful
            if offer.swap:
                gone, trigger = (candidate.gone, candidate.trigger) if candidate.swapped else self._copies(candidate.gap)
                self._swap(candidate, min(gone, offer.first), max(trigger, offer.last + 1))
            else:
                self._drop(candidate)

    def take_back(self) -> None:
        """What others made superfluous, the dearest first."""
        dropped = [c for c in self.candidates if c.dropped]
        for candidate in sorted(dropped, key=lambda c: (-self._again_seconds(c.gap)[0], c.gap.storage, c.gap.start)):
            gap = candidate.gap
            if self.over[gap.start + 1 : gap.end].max() + gap.nbytes <= 0:
                self._undrop(candidate)

    def _offer(self, candidate: _Candidate) -> _Offer | None:
        gap = candidate.gap
        if candidate.dropped:
            return None
        short = gap.start + 1 + np.flatnonzero(self.over[gap.start + 1 : gap.end] > 0)
        if candidate.swapped:
            short = short[(short < candidate.gone) | (short >= candidate.trigger)]
        if not len(short):
            return None
        first, last = int(short[0]), int(short[-1])
        swap = self._swap_seconds(candidate, first, last)
        again, at_best = (float("inf"), float("inf")) if candidate.swapped or candidate.banned else self._again_seconds(gap)
        by_swap = swap < (at_best if self.collective else again)
        return _Offer(swap if by_swap else again, by_swap, at_best <= swap < again, first, last)

    def _swap_seconds(self, candidate: _Candidate, first: int, last: int) -> float:
        """How long the device waits for copies if the storage is out before op `first` and back only behind op `last`."""
        gap, starts = candidate.gap, self.problem.op_starts
        if candidate.swapped:  # its copies have their place on the lanes; the device waits from where it needs them to be
            return max(0.0, starts[candidate.gone] - starts[first]) + max(0.0, starts[last + 1] - starts[candidate.trigger])
        if not self._has_room_elsewhere(gap):
            return float("inf")
        late_out = self._load(self.out, gap) - self.buckets.spare_bytes(self.out, gap.start + 1, first)
        late_back = self._load(self.back, gap) - self.buckets.spare_bytes(self.back, last + 1, gap.end)
        fetches = sum(gap.start < at < gap.end for _, at in self.source_of.get(gap.storage, ()))  # for recomputations it is a source of
        return (
            max(0.0, late_out) / self.out.bytes_per_second
            + max(0.0, late_back) / self.back.bytes_per_second
            + fetches * self.problem.machine.copy_seconds(gap.nbytes, self.tier, self.problem.device_tier)
        )

    def _again_seconds(self, gap: Gap) -> tuple[float, float]:
        """Seconds to compute it again, for itself and for each recomputation that would now go through it; what is away is fetched first.

        And at best, if everything made on the way stays: the seconds of those ops that no other drop runs again already.
        """
        can = can_recompute(self.problem, gap.storage) and self.problem.graph.ops[gap.end].phase is not Phase.UPDATE
        lineage = self.lineages.lineage(gap.storage, gap.end) if can else None
        if lineage is None:
            return float("inf"), float("inf")
        fetched = [c for source in sorted(lineage.sources) for c in self.swapped.get(source, ()) if c.gap.start < gap.end < c.trigger]
        fetch_seconds = sum(self.problem.machine.copy_seconds(c.gap.nbytes, self.tier, self.problem.device_tier) for c in fetched)
        through = sum(gap.start < at <= gap.end for _, at in self.source_of.get(gap.storage, ()))
        fresh = sum(self.problem.device_seconds[op] for op in sorted(lineage.ops - self.again))
        return (1 + through) * lineage.seconds + fetch_seconds, fresh + fetch_seconds

    # -- bookkeeping --------------------------------------------------------------------------------------------------------------

    def _copies(self, gap: Gap) -> tuple[int, int]:
        """The first op that could count on its bytes, and the one before which it would be fetched, as the lanes stand now."""
        gone = self.buckets.end_op(self.out, gap.start + 1, self._load(self.out, gap)) + 1
        trigger = self.buckets.start_op(self.back, gap.end, self._load(self.back, gap))
        return min(gone, gap.end), max(trigger, gap.start + 1)

    def _swap(self, candidate: _Candidate, gone: int, trigger: int) -> None:
        gap = candidate.gap
        if candidate.swapped:
            self.over[candidate.gone : candidate.trigger] += gap.nbytes
        else:
            self.buckets.fill_from(self.out, gap.start + 1, self._load(self.out, gap))
            self.buckets.fill_until(self.back, gap.end, self._load(self.back, gap))
            self.elsewhere[gap.start + 1 : gap.end + 1] += gap.nbytes
            self.swapped.setdefault(gap.storage, []).append(candidate)
        candidate.swapped, candidate.gone, candidate.trigger = True, gone, trigger
        self.over[gone:trigger] -= gap.nbytes

    def _drop(self, candidate: _Candidate) -> None:
        gap = candidate.gap
        candidate.dropped = True
        through = [drop for drop in self.source_of.get(gap.storage, ()) if gap.start < drop[1] <= gap.end]
        self.lineages.drop(gap.storage, gap.start, gap.end)
        self.over[gap.start + 1 : gap.end] -= gap.nbytes
        for drop in [(gap.storage, gap.end), *sorted(through)]:
            self._trace(drop)

    def _undrop(self, candidate: _Candidate) -> None:
        gap = candidate.gap
        candidate.dropped = False
        self.lineages.restore(gap.storage, gap.start, gap.end)
        for source in self.sources.pop((gap.storage, gap.end)):
            self.source_of[source].discard((gap.storage, gap.end))
        self.over[gap.start + 1 : gap.end] += gap.nbytes

    def _trace(self, drop: tuple[int, int]) -> None:
        """Find anew what a dropped storage is made from."""
        for source in self.sources.get(drop, ()):
            self.source_of[source].discard(drop)
        lineage = self.lineages.lineage(*drop)
        assert lineage is not None  # it was found before it was dropped, and what others are made from is dropped only if it can be made again
        self.sources[drop] = lineage.sources
        for source in lineage.sources:
            self.source_of.setdefault(source, set()).add(drop)
        self.again |= lineage.ops

    def _has_room_elsewhere(self, gap: Gap) -> bool:
        return int(self.elsewhere[gap.start + 1 : gap.end + 1].max()) + gap.nbytes <= self.problem.machine.capacity(self.tier)

    def _load(self, link: Link, gap: Gap) -> float:
        """What a copy takes of a lane, its latency counted as bytes."""
        return gap.nbytes + link.latency_seconds * link.bytes_per_second

    def _copy_seconds(self, gap: Gap) -> float:
        return sum(self._load(link, gap) / link.bytes_per_second for link in (self.out, self.back))


def _idle(problem: Problem) -> Iterator[Gap]:
    return (gap for gap in gaps(problem) if not problem.graph.storages[gap.storage].lasting)


def _with_feedback(choice: _Choice, schedule: Schedule, rounds: int) -> tuple[float, Schedule]:
    """Trigger fetches earlier that the clock finds late, as long as the plan fits and gets faster; with the seconds it takes."""
    problem = choice.problem
    timeline = simulate(problem, schedule)
    for _ in range(rounds):
        if not choice.fetch_earlier(_late_fetches(problem, schedule, timeline)):
            break
        tried = choice.schedule()
        if peak_bytes(problem, tried)[problem.device_tier] > problem.budget_bytes:
            break
        tried_timeline = simulate(problem, tried)
        if tried_timeline.seconds >= timeline.seconds:
            break
        schedule, timeline = tried, tried_timeline
    return timeline.seconds, schedule


def _late_fetches(problem: Problem, schedule: Schedule, timeline: Timeline) -> set[tuple[int, int]]:
    """(storage, op) of each fetch that ends after the device was ready for the op."""
    device = problem.machine.device.name
    back: dict[int, float] = {}
    late = set()
    ready = 0.0
    for span in timeline.spans:
        step = schedule.steps[span.step]
        if isinstance(step, Copy) and step.dst == problem.device_tier:
            back[step.storage] = max(span.end, back.get(step.storage, 0.0))
        elif isinstance(step, Compute) and span.lane == device:
            late |= {(storage, step.op) for storage in problem.graph.ops[step.op].reads if back.get(storage, 0.0) > ready}
            ready = span.end
    return late


def _everything_away(problem: Problem, tier: str) -> Schedule:
    """The last resort: everything idle leaves at once and comes back on demand."""
    schedule = build(problem, [Swap(gap.storage, tier, gap.start + 1, gap.start + 1, gap.end) for gap in _idle(problem)])
    needed = peak_bytes(problem, schedule)
    if needed[problem.device_tier] > problem.budget_bytes:
        least = needed[problem.device_tier] if needed[tier] <= problem.machine.capacity(tier) else None
        raise InfeasibleBudget(f"with everything idle in {tier} the step still needs {format_bytes(needed[problem.device_tier])}", least_bytes=least)
    return schedule
